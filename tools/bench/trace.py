"""What a trace of torch.profiler says of a device: its kernels, and when it is idle. gpu.py
prints it. On a CPU, which has no kernels, its outermost operations take their place.
"""
import json
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple

KINDS = {"kernel": "kernels", "gpu_memcpy": "kernels", "gpu_memset": "kernels",
         "cpu_op": "calls", "cuda_runtime": "calls", "cuda_driver": "calls"}


class Event(NamedTuple):
    name: str
    start: float                # ms
    end: float


def read_trace(path: Path) -> dict[str, list[Event]]:
    """The file that profiler.export_chrome_trace wrote: {kernels, calls}, each in order of the
    start."""
    found = dict(kernels=[], calls=[])
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        kind = KINDS.get(event.get("cat"))
        if event.get("ph") == "X" and kind is not None:
            start = event["ts"] / 1e3
            found[kind].append(Event(event["name"], start, start + event["dur"] / 1e3))
    for events in found.values():
        events.sort(key=lambda event: (event.start, -event.end))
    if not found["kernels"]:
        end = 0.0
        for event in found["calls"]:
            if event.start >= end:              # not within the one before
                found["kernels"].append(event)
                end = event.end
    return found


def idle_times(kernels: list[Event]) -> list[tuple[Event, Event]]:
    """The device's gaps, each as (the kernel that ended last, the next one)."""
    found = []
    last = kernels[0]
    for event in kernels:
        if event.start > last.end:
            found.append((last, event))
        if event.end > last.end:
            last = event
    return found


def summary(kernels: list[Event]) -> dict:
    span = max(event.end for event in kernels) - kernels[0].start
    idle = sum(after.start - before.end for before, after in idle_times(kernels))
    return {"kernels": len(kernels), "ms": span, "busy, ms": span - idle, "idle, ms": idle,
            "idle": idle / span}


def slowest_kernels(kernels: list[Event], count: int = 20) -> list[dict]:
    """By name: calls, their time together, and its share."""
    calls = Counter(event.name for event in kernels)
    times = Counter()
    for event in kernels:
        times[event.name] += event.end - event.start
    total = sum(times.values())
    return [{"kernel": name, "calls": calls[name], "ms": ms, "share": ms / total}
            for name, ms in times.most_common(count)]


def longest_gaps(trace: dict, count: int = 10) -> list[dict]:
    """The longest gaps, with what the host did in the middle of each."""
    found = sorted(idle_times(trace["kernels"]), key=lambda gap: gap[0].end - gap[1].start)
    return [{"ms": after.start - before.end, "after": before.name, "before": after.name,
             "host's call": innermost(trace["calls"], (before.end + after.start) / 2)}
            for before, after in found[:count]]


def innermost(events: list[Event], moment: float) -> str:
    """The name of the shortest of the events that are under way; "-" if there is none."""
    under_way = [event for event in events if event.start <= moment <= event.end]
    if not under_way:
        return "-"
    return min(under_way, key=lambda event: event.end - event.start).name


def tables_of(path: Path, side: str) -> Iterator:
    """All of these as (title, row)."""
    trace = read_trace(path)
    yield "two steps", dict(side=side) | summary(trace["kernels"])
    for row in slowest_kernels(trace["kernels"]):
        yield f"{side}: kernels", row
    for row in longest_gaps(trace):
        yield f"{side}: gaps", row
