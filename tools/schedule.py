"""Draw a pipeline schedule; count its bubble and the activations it keeps.

    python -m tools.schedule --pp 4 --microbatches 8
    python -m tools.schedule --pp 2 --microbatches 4 --pp-schedule interleaved --pp-chunks 2

`clock` simulates the lists of ops that parallelism/pipeline.py makes, without processes.
"""
import sys
from dataclasses import dataclass
from itertools import accumulate

from base.commandline import Parser, add_flags, flag
from base.errors import errors_in_one_line
from base.options import Config
from model import GPTConfig
from parallel import Grid
from parallelism.pipeline import make_schedule
from runtime.checks import check_layout


def clock(schedules: list, units: list | None = None) -> list[dict]:
    """Simulate the stages' schedules without processes; returns {op: (start, end)} of each stage.
    An op starts when its stage is free and its input has arrived. Raises ValueError on a deadlock.
    `units`: {kind of op: its time} of each stage; None: one unit, and two of a B."""
    if units is None:
        units = [dict(F=1, B=2)] * len(schedules)
    times = [{} for _ in schedules]
    free = [0] * len(schedules)
    places = len(schedules) * len({chunk for _, _, chunk in schedules[0]})
    arrived = {("F", m, 0): 0 for _, m, _ in schedules[0]}  # (op, microbatch, place) -> input there
    waiting = [list(reversed(ops)) for ops in schedules]    # the next op is the last
    while any(waiting):
        arrivals_before = len(arrived)
        for stage, (row, ops) in enumerate(zip(times, waiting)):
            while ops:
                op, m, chunk = ops[-1]
                place = chunk * len(schedules) + stage
                if (op, m, place) not in arrived:
                    break                                   # another stage has to go first
                ops.pop()
                start = max(arrived[op, m, place], free[stage])
                free[stage] = start + units[stage][op]
                row[op, m, chunk] = start, free[stage]
                if op == "F" and place == places - 1:
                    arrived["B", m, place] = free[stage]    # the loss
                elif op == "F":
                    arrived["F", m, place + 1] = free[stage]
                else:
                    arrived["B", m, place - 1] = free[stage]
        if len(arrived) == arrivals_before:
            raise ValueError("the schedules wait for each other: deadlock")
    return times


def bubble(times: list[dict]) -> float:
    """The fraction of all stages' time that is idle, from `clock`'s table."""
    busy = sum(end - start for row in times for start, end in row.values())
    return 1 - busy / (max(end for row in times for _, end in row.values()) * len(times))


def live_activations(schedule: list) -> int:
    """The largest number of microbatches, in all chunks, between F and B."""
    return max(accumulate({"F": 1, "B": -1}[op] for op, *_ in schedule))


def draw(times: list[dict]) -> str:
    """`clock`'s table as a line for each stage, a column for each unit of time."""
    span = max(end for row in times for _, end in row.values())
    is_chunked = any(chunk > 0 for _, _, chunk in times[0])
    lines = []
    for row in times:
        cells = ["."] * span
        for (op, m, chunk), (start, end) in row.items():
            letter = "abcdefghijklmnopqrstuvwxyz"[chunk % 26] if is_chunked else ""
            cells[start:end] = [f"{op}{m}{letter}"] * (end - start)
        lines.append(cells)
    width = 1 + max(len(cell) for cells in lines for cell in cells)
    return "\n".join(f"stage {stage:2d}  " + "".join(cell.ljust(width) for cell in cells).rstrip()
                     for stage, cells in enumerate(lines))


def describe(name: str, p: int, m: int, v: int) -> str:
    """The drawing of a schedule, its bubble and its live activations."""
    schedules = [make_schedule(name, Grid(1, p, 1, stage, chunks=v), m) for stage in range(p)]
    times = clock(schedules)
    counts = [f"stage {s}: {live_activations(ops) / v:g}" for s, ops in enumerate(schedules)]
    chunks = f" in {v} chunks" if v > 1 else ""
    formula = "v m" if name == "interleaved" else "m"       # v is 1 for the others
    return "\n".join([
        f"{name}, {p} stages{chunks}, {m} microbatches; a backward takes two units of time", "",
        draw(times), "",
        f"bubble {bubble(times):.1%} of the time, "
        f"(p - 1) / ({formula} + p - 1) = {(p - 1) / (v * m + p - 1):.1%}",
        f"live activations, in microbatches: {', '.join(counts)}"])


@dataclass(frozen=True)
class ScheduleFlags(Config):
    """The command line has four of these flags. runtime.checks reads the others' defaults."""
    pp: int = flag(4, "stages", low=1, group="schedule")
    microbatches: int = flag(8, "microbatches of a step", low=1, group="schedule")


@errors_in_one_line("tools.schedule")
def main() -> None:
    parser = Parser("tools.schedule", "python -m tools.schedule [FLAG ...]",
                    "Draw a pipeline schedule; count its bubble and activations.")
    add_flags(parser, ScheduleFlags, ("pp", "microbatches", "pp_schedule", "pp_chunks"))
    flags = ScheduleFlags(micro_batch=1, **parser.parse(sys.argv[1:]))
    p, m, v = flags.pp, flags.microbatches, flags.pp_chunks
    if v > 1 and m % p:
        raise ValueError(f"interleaved requires --microbatches in multiples of --pp {p}")
    check_layout(GPTConfig(n_layer=p * v), p, m, flags)
    print(describe(flags.pp_schedule, p, m, v))


if __name__ == "__main__":
    main()
