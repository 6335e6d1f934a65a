"""The picture of tools.compare --svg: the losses of runs over the tokens they read.

A line is a run's training loss, a point its validation loss: both are means over one PARTS-th of
the longest run's tokens. The legend below has the runs in the order given, each with the flags that
differ. Runs that should have the same losses, as those of one command in several layouts, also have
a strip with each one's largest relative difference from the first in each part.

`curves` and `strips` compute what `draw` draws with matplotlib, a package of its own.
"""
import math
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.options import FLAGS_THAT_CHANGE_THE_LOSS
from tools.matplotlib_svg import picture
from tools.metrics import Run, part_means

PARTS = 50
MOST = 28           # runs: each color with each dash
# The palette of Okabe and Ito, which color-blind readers tell apart, and a gray. Black and yellow
# are left out: they are not seen on a dark or a white page.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c959f"]
DASHES = ["-", "--", ":", "-."]
# From violet to yellow, without those that are too dark or too light for a page.
RISING = ["#5b2a86", "#414f9d", "#2f6c8e", "#21918c", "#35b779", "#84c141", "#d8b400"]


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
    ranks = len(starts[-1].get("environment", {}).get("hosts", [None]))
    sizes = {name: run.config.get(name, 1) for name in ("pp", "cp", "tp")}
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


def looks(runs: list[Run], names: list[str], flags: list[str]) -> list[tuple[str, str]]:
    """A color and a dash for each run. Of layouts a color is a layout, a dash means --exact. In a
    sweep of one or two numbers a color is a value of the first flag, and goes from violet to yellow
    with it; a dash is a value of the second. Else the runs have the colors in turn."""
    palette = COLORS
    values = [[run.config.get(flag) for run in runs] for flag in flags]
    if strips(runs):
        colors = places([name.removesuffix(", exact") for name in names])
        dashes = [int(bool(run.config.get("exact"))) for run in runs]
    elif len(flags) in (1, 2) and all(isinstance(x, (int, float)) for row in values for x in row):
        colors = places(values[0], sorted(values[0]))
        dashes = [0] * len(runs)
        palette = rising(max(colors) + 1)
        if len(flags) == 2:
            dashes = places(values[1], sorted(values[1]))
    else:
        colors = range(len(runs))
        dashes = [place // len(COLORS) for place in colors]
    return [(palette[color % len(palette)], DASHES[dash % len(DASHES)])
            for color, dash in zip(colors, dashes)]


def places(values: list, order: list | None = None) -> list[int]:
    """The place of each value among the different ones, in this order or in that of the values."""
    different = list(dict.fromkeys(values if order is None else order))
    return [different.index(value) for value in values]


def rising(count: int) -> list[str]:
    """So many of the colors from violet to yellow, evenly spaced."""
    return [RISING[round(place * (len(RISING) - 1) / max(1, count - 1))] for place in range(count)]


def draw(runs: list[Run], names: list[str], flags: list[str], file: Path) -> None:
    """`names` stand in the legend; `flags` are those that differ. Raises ValueError without
    matplotlib."""
    below = strips(runs)
    columns = 2 if max(map(len, names)) < 40 else 1
    height = 4 + 1.2 * len(below) + 0.21 * math.ceil(len(runs) / columns)
    with picture(file, "Losses of the runs", height) as figure:
        panels = figure.subplots(1 + len(below), sharex=True, squeeze=False,
                                 height_ratios=[4] + [1] * len(below))[:, 0]
        styles = [dict(color=color, linestyle=dash, linewidth=1.5)
                  for color, dash in looks(runs, names, flags)]
        draw_losses(panels[0], runs, names, styles, lines_coincide=bool(below))
        for panel, strip in zip(panels[1:], below):
            for member, curve in zip(strip.members[1:], strip.curves):
                panel.plot(*curve, **styles[member])
            panel.set_yscale("symlog", linthresh=1e-8)
            panel.set(ylim=(-1e-9, 1), yticks=[0, 1e-7, 1e-4, 1e-1],
                      yticklabels=["0", "1e-7", "1e-4", "1e-1"],
                      title=f"difference from {names[strip.members[0]].removesuffix(', exact')}, "
                            f"{strip.words}")
        panels[-1].set(xlabel="tokens read", xlim=(0, max(run.last["tokens"] for run in runs)))
        panels[-1].xaxis.set_major_formatter(lambda tokens, _: short(tokens))
        for panel in panels:
            panel.grid(alpha=0.25)
        legend = figure.legend(loc="outside lower left", frameon=False, ncols=columns)
        for line in legend.get_lines():
            line.set_linewidth(1.5)


def draw_losses(panel, runs: list[Run], names: list[str], styles: list[dict],
                lines_coincide: bool) -> None:
    """Each line that coincides with others is thinner than the one below it."""
    from matplotlib.ticker import MaxNLocator, NullLocator
    for i, (train, val) in enumerate(zip(curves(runs, "loss"), curves(runs, "val_loss"))):
        wider = min(1.5, 8 / len(runs)) * (len(runs) - 1 - i) if lines_coincide else 0
        style = styles[i] | dict(linewidth=1.5 + wider)
        panel.plot(*train, **style, label=names[i])
        panel.plot(*val, "o", color=style["color"], markersize=4)
    panel.set(yscale="log", ylabel="loss, nats per token",
              title=f"Lines: training loss; points: validation loss; both: means of 1/{PARTS} of "
                    f"the tokens")
    panel.yaxis.set(major_locator=MaxNLocator(7), minor_locator=NullLocator(),
                    major_formatter=lambda loss, _: f"{loss:g}")
