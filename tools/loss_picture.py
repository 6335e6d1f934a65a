"""The picture of tools.compare --svg: the losses of runs over the tokens they read.

A line is a run's training loss, a point its validation loss: both are means over one PARTS-th of
the longest run's tokens. The legend below has the runs in the order given, each with the flags that
differ. Runs that should have the same losses, as those of one command in several layouts, also have
a strip with each one's largest relative difference from the first in each part.

`curves` and `strips` compute what `draw` draws with matplotlib, a package of its own.
"""
import math
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.options import FLAGS_THAT_CHANGE_THE_LOSS
from tools.metrics import Run, part_means

PARTS = 50
MOST = 28           # runs: each color with each dash
# The palette of Okabe and Ito, which color-blind readers tell apart, and a gray. Black and yellow
# are left out: they are not seen on a dark or a white page.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c959f"]
DASHES = ["-", "--", ":", "-."]
# Text has the color of the reader's scheme, light or dark.
STYLE = ("<style>text{fill:#24292f}"
         "@media (prefers-color-scheme:dark){text{fill:#e6edf3}}</style>")


class Curve(NamedTuple):
    """One loss of a run: the middle of each part that has one, in tokens, and its mean there."""
    tokens: list[float]
    losses: list[float]


class Strip(NamedTuple):
    words: str
    members: list[int]          # places of the runs; the others are compared with the first
    curves: list[Curve]         # of the others: their differences


def part_size(runs: list[Run]) -> float:
    return max(run.last["tokens"] for run in runs) / PARTS


def parts_of(tokens: np.ndarray, size: float) -> np.ndarray:
    return np.ceil(tokens / size) - 1


def curves(runs: list[Run], name: str) -> list[Curve]:
    """For each run that of its `loss` or `val_loss`."""
    size = part_size(runs)
    found = []
    for run in runs:
        losses = run.steps[name]
        losses = np.where(losses > 0, losses, math.nan)         # the scale is logarithmic
        parts, means = part_means(losses, parts_of(run.steps["tokens"], size))
        found.append(Curve(((parts + 0.5) * size).tolist(), means.tolist()))
    return found


def strips(runs: list[Run]) -> list[Strip]:
    """One of the runs without --exact, one of those with it. There is none if the runs differ in
    more than their layout, or have no step in common."""
    same = (*FLAGS_THAT_CHANGE_THE_LOSS, "model", "seed", "data", "init_from")
    if len({str([run.config.get(name) for name in same]) for run in runs}) > 1:
        return []
    found = []
    for exact, words in ((False, "without --exact"), (True, "with --exact")):
        members = [i for i, run in enumerate(runs) if bool(run.config.get("exact")) == exact]
        if len(members) > 1:
            found += strip_of([runs[i] for i in members], members, words, part_size(runs))
    return found


def strip_of(runs: list[Run], members: list[int], words: str, size: float) -> list[Strip]:
    valid = [run.steps["loss"] > 0 for run in runs]
    common = reduce(np.intersect1d, [run.steps["step"][on] for run, on in zip(runs, valid)])
    if len(common) == 0:
        return []
    places = [np.searchsorted(run.steps["step"], common) for run in runs]
    first, *others = [run.steps["loss"][place] for run, place in zip(runs, places)]
    parts = parts_of(runs[0].steps["tokens"][places[0]], size)
    found, begins = np.unique(parts, return_index=True)
    tokens = ((found + 0.5) * size).tolist()
    differences = [np.maximum.reduceat(abs(losses / first - 1), begins) for losses in others]
    most = max(map(max, differences))
    words += f": at most {most:.1e}" if most > 0 else ": none"
    return [Strip(words, members, [Curve(tokens, each.tolist()) for each in differences])]


def layout_of(run: Run) -> str:
    """Such as dp 2 x pp 2, from the run's last start."""
    starts = [event for event in run.events if "config" in event]
    config = starts[-1]["config"]
    ranks = len(starts[-1].get("environment", {}).get("hosts", [None]))
    sizes = {name: config.get(name, 1) for name in ("pp", "cp", "tp")}
    sizes = {"dp": ranks // math.prod(sizes.values()), **sizes}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 process"


def layouts(runs: list[Run]) -> list[str]:
    """The runs' layouts, where with --exact these tell all runs apart; [] if not."""
    if not all(run.config for run in runs):
        return []
    names = [layout_of(run) for run in runs]
    if len(set(zip(names, [run.config.get("exact") for run in runs]))) < len(runs):
        return []
    return [f"{name}, exact" if run.config.get("exact") else name
            for name, run in zip(names, runs)]


def short(count: float) -> str:
    """Such as 409,600 -> 410k."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


def draw(runs: list[Run], names: list[str], file: Path) -> None:
    """`names`: of the legend. Raises ValueError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError("--svg needs a package that is missing: pip install matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
    below = strips(runs)
    gray = "#8c959f"
    # Text remains text; the same input gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "axes.edgecolor": gray,
                     "xtick.color": gray, "ytick.color": gray, "xtick.labelcolor": "black",
                     "ytick.labelcolor": "black", "axes.spines.top": False,
                     "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}):
        figure = Figure((8, 4 + 1.2 * len(below) + 0.21 * len(runs)), layout="constrained")
        panels = figure.subplots(1 + len(below), sharex=True, squeeze=False,
                                 height_ratios=[4] + [1] * len(below))[:, 0]
        looks = []
        for i, (train, val) in enumerate(zip(curves(runs, "loss"), curves(runs, "val_loss"))):
            look = dict(color=COLORS[i % len(COLORS)],
                        linestyle=DASHES[i // len(COLORS) % len(DASHES)], linewidth=1.5)
            if below:           # the lines coincide: each is thinner than the one below it
                look["linewidth"] += min(2.2, 12 / len(runs)) * (len(runs) - 1 - i)
            looks.append(look)
            panels[0].plot(*train, **look, label=names[i])
            panels[0].plot(*val, "o", color=look["color"], markersize=4)
        panels[0].set(yscale="log", ylabel="loss, nats per token",
                      title=f"Lines: training loss; points: validation loss; both: means of 1/"
                            f"{PARTS} of the tokens")
        panels[0].yaxis.set(major_locator=MaxNLocator(7), minor_locator=NullLocator(),
                            major_formatter=FuncFormatter(lambda loss, _: f"{loss:g}"))
        for panel, strip in zip(panels[1:], below):
            for member, curve in zip(strip.members[1:], strip.curves):
                panel.plot(*curve, **looks[member] | dict(linewidth=1.5))
            panel.set_yscale("symlog", linthresh=1e-8)
            panel.set(ylim=(-1e-9, 1), yticks=[0, 1e-7, 1e-4, 1e-1],
                      yticklabels=["0", "1e-7", "1e-4", "1e-1"])
            panel.set_title(f"difference from {names[strip.members[0]]}, {strip.words}",
                            loc="left", fontsize="medium")
        panels[-1].set_xlabel("tokens read")
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short(tokens)))
        figure.legend(loc="outside lower left", frameon=False)
        figure.savefig(file, format="svg", transparent=True, bbox_inches="tight",
                       metadata=dict(Date=None))
    title = "<title>Losses of the runs</title>"
    file.write_text(file.read_text().replace("<metadata>", f"{title}{STYLE}<metadata>", 1))
