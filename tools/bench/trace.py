"""What a trace of torch.profiler says of a device: its kernels, and when it is idle. gpu.py
prints it. On a CPU, which has no kernels, its outermost operations take their place.
"""
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cpu_op", "cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Event:
    name: str
    start: float                # ms
    end: float


@dataclass(frozen=True)
class Trace:
    """Events in order of their start. `python`: functions, if the profile had `with_stack`."""
    kernels: list[Event]
    calls: list[Event]
    python: list[Event]


def read_trace(path: Path) -> Trace:
    """The file that profiler.export_chrome_trace wrote."""
    by_kind = {}
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        if event.get("ph") == "X":
            start = event["ts"] / 1e3
            found = Event(event["name"], start, start + event["dur"] / 1e3)
            by_kind.setdefault(event.get("cat"), []).append(found)

    def events(kinds):
        found = [event for kind in kinds for event in by_kind.get(kind, [])]
        return sorted(found, key=lambda event: (event.start, -event.end))
    kernels = events(KERNELS)
    if not kernels:
        end = 0.0
        for event in events(["cpu_op"]):
            if event.start >= end:              # not within the one before
                kernels.append(event)
                end = event.end
    return Trace(kernels, events(CALLS), events(["python_function"]))


def idle_times(trace: Trace) -> list[tuple[Event, Event]]:
    """The device's gaps, each as (the kernel that ended last, the next one)."""
    found = []
    last = trace.kernels[0]
    for event in trace.kernels:
        if event.start > last.end:
            found.append((last, event))
        if event.end > last.end:
            last = event
    return found


def summary(trace: Trace) -> dict:
    span = max(event.end for event in trace.kernels) - trace.kernels[0].start
    idle = sum(after.start - before.end for before, after in idle_times(trace))
    return {"kernels": len(trace.kernels), "ms": span, "busy, ms": span - idle, "idle, ms": idle,
            "idle": idle / span}


def slowest_kernels(trace: Trace, count: int = 20) -> list[dict]:
    """By name: calls, their time together, and its share."""
    calls = Counter(event.name for event in trace.kernels)
    times = Counter()
    for event in trace.kernels:
        times[event.name] += event.end - event.start
    total = sum(times.values())
    return [{"kernel": name, "calls": calls[name], "ms": ms, "share": ms / total}
            for name, ms in times.most_common(count)]


def longest_gaps(trace: Trace, count: int = 10) -> list[dict]:
    """The longest gaps, with what the host did in the middle of each."""
    found = sorted(idle_times(trace), key=lambda gap: gap[0].end - gap[1].start)[:count]
    return [{"ms": after.start - before.end, "after": before.name, "before": after.name,
             "host's call": innermost(trace.calls, (before.end + after.start) / 2),
             "in Python": innermost(trace.python, (before.end + after.start) / 2)}
            for before, after in found]


def innermost(events: list[Event], moment: float) -> str:
    """The name of the shortest of the events that are under way; "-" if there is none."""
    under_way = [event for event in events if event.start <= moment <= event.end]
    if not under_way:
        return "-"
    return min(under_way, key=lambda event: event.end - event.start).name


def tables_of(path: Path, side: str, with_stack: bool = False) -> Iterator:
    """All of these as (title, row). A profile `with_stack` has noted Python's calls, which takes
    time: its kernels are left out."""
    trace = read_trace(path)
    if with_stack:
        side += ", slowed by noting Python's calls"
    yield "two steps", dict(side=side) | summary(trace)
    if not with_stack:
        for row in slowest_kernels(trace):
            yield f"{side}: kernels", row
    for row in longest_gaps(trace):
        yield f"{side}: gaps", row
