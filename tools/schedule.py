"""Draw a pipeline schedule; count its bubble and the activations it keeps.

    python -m tools.schedule --pp 4 --microbatches 8
    python -m tools.schedule --pp 2 --microbatches 4 --pp-schedule interleaved --pp-chunks 2
    python -m tools.schedule --pp 4 --microbatches 8 --svg schedules.svg        # a picture

`clock` simulates the lists of ops that parallelism/schedules.py makes, without processes.
"""
import math
from itertools import accumulate
from pathlib import Path

from base.commandline import Parser
from base.errors import errors_in_one_line
from model import GPTConfig
from parallelism.build import Grid
from parallelism.schedules import SCHEDULES, make_schedule
from runtime.layout_checks import check_layout
from tools.matplotlib_svg import GRAY, picture

TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zb-h1": "ZB-H1"}
# Of the picture: the color of an op, its name; how pale the first, second ... chunk is.
OPS = {"F": ("#2f81f7", "forward"), "B": ("#bc4c00", "backward"),
       "W": ("#1a7f37", "weight gradients")}
SHADES = (1, 0.7, 0.55, 0.45)
BAR = 17                    # points; a stage has 19


def clock(schedules: list, units: list | None = None) -> list[dict]:
    """Simulate the stages' schedules without processes; returns {op: (start, end)} of each stage.
    An op starts when its stage is free and its input has arrived. Raises ValueError on a deadlock.
    `units`: {kind of op: its time} of each stage; None: one unit, and two of a B without a W."""
    if units is None:
        units = [dict(F=1, B=1 if ("W", 0, 0) in schedules[0] else 2, W=1)] * len(schedules)
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
                elif op == "B":
                    arrived["B", m, place - 1] = free[stage]
                    arrived["W", m, place] = free[stage]
        if len(arrived) == arrivals_before:
            raise ValueError("the schedules wait for each other: deadlock")
    return times


def bubble(times: list[dict]) -> float:
    """The fraction of all stages' time that is idle, from `clock`'s table."""
    busy = sum(end - start for row in times for start, end in row.values())
    return 1 - busy / (max(end for row in times for _, end in row.values()) * len(times))


def live_activations(schedule: list) -> int:
    """The largest number of microbatches, in all chunks, between F and B, or W if there is one."""
    freed_by = "W" if ("W", 0, 0) in schedule else "B"
    return max(accumulate({"F": 1, freed_by: -1}.get(op, 0) for op, *_ in schedule))


def draw(times: list[dict]) -> str:
    """`clock`'s table as a line for each stage, a column for each unit of time, as shown above."""
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


def simulate(name: str, stages: int, num_microbatches: int, chunks: int) -> tuple[list, list]:
    """(each stage's list of ops, as the pipeline executes it; `clock`'s table of them)."""
    ops = [make_schedule(name, Grid(1, stages, 1, stage, chunks=chunks), num_microbatches)
           for stage in range(stages)]
    return ops, clock(ops)


def describe(name: str, p: int, m: int, v: int) -> str:
    """The drawing of a schedule, its bubble and its live activations."""
    schedules, times = simulate(name, p, m, v)
    counts = [f"stage {s}: {live_activations(ops) / v:g}" for s, ops in enumerate(schedules)]
    chunks = f" in {v} chunks" if v > 1 else ""
    formula, n = {"interleaved": ("v m", v * m), "zb-h1": ("3 m", 3 * m)}.get(name, ("m", m))
    units = "a backward takes two units of time"
    if name == "zb-h1":
        units = "an op takes one unit of time, the formula is for m >= p"
    return "\n".join([
        f"{name}, {p} stages{chunks}, {m} microbatches; {units}", "", draw(times), "",
        f"bubble {bubble(times):.1%} of the time, "
        f"(p - 1) / ({formula} + p - 1) = {(p - 1) / (n + p - 1):.1%}",
        f"live activations, in microbatches: {', '.join(counts)}"])


def panels(layouts: list[tuple[str, int]], p: int, m: int) -> list[tuple[str, list[dict]]]:
    """What the picture shows of schedules, each with its number of chunks: a title, and `clock`'s
    table in one unit of time for all, the forward of a whole stage."""
    found = []
    for name, chunks in layouts:
        ops, times = simulate(name, p, m, chunks)
        live = ", ".join(f"{live_activations(stage) / chunks:g}" for stage in ops)
        title = f"{TITLES[name]}: idle {bubble(times):.0%} of the time; holds {live} microbatches"
        found.append((title, [{op: (start / chunks, end / chunks)
                               for op, (start, end) in row.items()} for row in times]))
    return found


def draw_panels(shown: list[tuple[str, list[dict]]], file: Path) -> None:
    """A picture of these panels. Raises ValueError without matplotlib."""
    stages = len(shown[0][1])
    ends = [max(end for row in times for _, end in row.values()) for _, times in shown]
    height = len(shown) * (0.26 * stages + 0.4) + 0.5
    with picture(file, "Pipeline schedules: what each stage computes, and when", height) as figure:
        axes = figure.subplots(len(shown), squeeze=False)[:, 0]
        for panel, (title, times), end in zip(axes, shown, ends):
            panel.set(title=title, xlim=(0, max(ends)), xticks=[], ylim=(stages - 0.5, -0.5),
                      yticks=range(stages), yticklabels=[f"stage {n}" for n in range(stages)])
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            panel.hlines(range(stages), 0, end, linewidth=BAR, color=GRAY, alpha=0.2)
            draw_ops(panel, times, max(ends))
        # Empty bars, for the legend alone.
        bars = [axes[0].barh(0, 0, color=color, label=name) for color, name in OPS.values()]
        bars.append(axes[0].barh(0, 0, color=GRAY, alpha=0.2, label="idle"))
        figure.legend(handles=bars, loc="outside lower left", ncols=len(bars), frameon=False,
                      title="number: microbatch; paler: second chunk", alignment="left")


def draw_ops(panel, times: list[dict], span: float) -> None:
    """The bars of the ops, with the number of the microbatch where there is room for it."""
    lines = {}              # {(op, chunk): points; NaN ends a bar}
    for stage, row in enumerate(times):
        for (op, microbatch, chunk), (start, end) in row.items():
            points = lines.setdefault((op, chunk), [])
            points += [(start, stage), (end - span / 600, stage), (math.nan, math.nan)]
            if (end - start) / span > 0.011 * len(str(microbatch)):
                panel.text((start + end) / 2, stage, microbatch, color="white", fontsize=7,
                           ha="center", va="center")
    # One line for all bars of a color: the file is a third of that with a shape for each.
    for (op, chunk), points in lines.items():
        color, _ = OPS[op]
        panel.plot(*zip(*points), color=color, alpha=SHADES[min(chunk, len(SHADES) - 1)],
                   linewidth=BAR, solid_capstyle="butt")


@errors_in_one_line("tools.schedule")
def main() -> None:
    parser = Parser("tools.schedule", "python -m tools.schedule [FLAG ...]",
                    "Draw a pipeline schedule; count its bubble and activations.")
    add = parser.add_argument_group("schedule").add_argument
    add("--pp", type=int, default=4, metavar="N", help="stages (default %(default)s)")
    add("--microbatches", type=int, default=8, metavar="N",
        help="microbatches of a step (default %(default)s)")
    add("--pp-schedule", choices=list(SCHEDULES),
        help="order of the microbatches (default gpipe)")
    add("--pp-chunks", type=int, default=1, metavar="N",
        help="interleaved: parts of the model on each stage (default %(default)s)")
    add("--svg", metavar="FILE", help="draw to this file; without --pp-schedule all four "
        "schedules, the interleaved one with 2 chunks or more")
    parser.set_defaults(tp=1, cp=1, ep=1, zero=0, micro_batch=1, sequence_parallel=False,
                        recompute=False, compile=False, exact=False)
    args = parser.parse_args()
    p, m = args.pp, args.microbatches
    layouts = [(args.pp_schedule or "gpipe", args.pp_chunks)]
    if args.svg and args.pp_schedule is None:
        layouts = [("gpipe", 1), ("1f1b", 1), ("interleaved", max(2, args.pp_chunks)), ("zb-h1", 1)]
    for args.pp_schedule, args.pp_chunks in layouts:
        v = args.pp_chunks
        if min(p, m, v) < 1:
            raise ValueError("--pp, --microbatches and --pp-chunks must be at least 1")
        if v > 1 and m % p:
            raise ValueError(f"interleaved requires --microbatches in multiples of --pp {p}")
        check_layout(GPTConfig(n_layer=p * v), p, m, args)
    if args.svg:
        draw_panels(panels(layouts, p, m), Path(args.svg))
        print(f"wrote {args.svg}")
    else:
        print(describe(args.pp_schedule, p, m, args.pp_chunks))


if __name__ == "__main__":
    main()
