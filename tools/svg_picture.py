"""Pictures as SVG, drawn by matplotlib, an optional package."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from base.errors import errors_with_path

WIDTH = 8                   # inches; GitHub shows a page in about 9
GRAY = "#8c959f"            # is seen on a white and on a dark page
# The palette of Okabe and Ito, which color-blind readers tell apart, without black and yellow.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", GRAY]
# Black text gets the color of the reader's scheme, light or dark.
SCHEME = "text{fill:#24292f}@media (prefers-color-scheme:dark){text{fill:#e6edf3}}"


@contextmanager
def picture(file: Path, title: str, height: float) -> Iterator:
    """A matplotlib Figure to draw in; at the end it is written to `file`. A screen reader says the
    title. Raises ValueError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError("a picture needs a package that is missing: pip install matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    # Text remains text; the same input gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "axes.edgecolor": GRAY,
                     "xtick.color": GRAY, "ytick.color": GRAY, "xtick.labelcolor": "black",
                     "ytick.labelcolor": "black", "axes.spines.top": False,
                     "axes.spines.right": False, "axes.titlelocation": "left",
                     "axes.titlesize": "medium"}):
        figure = Figure((WIDTH, height), layout="constrained")
        yield figure
        with errors_with_path(file):
            figure.savefig(file, format="svg", transparent=True, bbox_inches="tight",
                           metadata=dict(Date=None))
            svg = file.read_text()
            head = f"<title>{title}</title><style>{SCHEME}</style><metadata>"
            file.write_text(svg.replace("<metadata>", head, 1))


def draw_if_possible(draw: Callable, *arguments) -> str:
    """draw(*arguments), whose last one is the file; a line on it. Without matplotlib a note."""
    if find_spec("matplotlib") is None:
        return "note     no picture: pip install matplotlib"
    draw(*arguments)
    return f"wrote    {arguments[-1]}"


def few_numbers(axis, form=lambda x, _: f"{x:g}") -> None:
    """A logarithmic axis with evenly spaced numbers, also within a power of ten."""
    from matplotlib.ticker import MaxNLocator, NullLocator
    axis.set(major_locator=MaxNLocator(7), minor_locator=NullLocator(), major_formatter=form)


def short(count: float, _=None) -> str:
    """Such as 409,600 -> 410k. (matplotlib also gives a place on the axis.)"""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"
