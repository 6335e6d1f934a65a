"""Pictures as SVG, drawn by matplotlib, an optional package. tools/loss_picture.py and
tools/schedule.py draw in them.
"""
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from base.errors import named

WIDTH = 8                   # inches; GitHub shows a page in about 9
GRAY = "#8c959f"            # is seen on a white and on a dark page
# Black text gets the color of the reader's scheme, light or dark.
SCHEME = "text{fill:#24292f}@media (prefers-color-scheme:dark){text{fill:#e6edf3}}"


@contextmanager
def picture(file: Path, title: str, height: float) -> Iterator:
    """A matplotlib Figure to draw in; at the end it is written to `file`. A screen reader says the
    title. Raises ValueError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError("--svg needs a package that is missing: pip install matplotlib")
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
        with named(file):
            figure.savefig(file, format="svg", transparent=True, bbox_inches="tight",
                           metadata=dict(Date=None))
    svg, styles = with_classes(file.read_text())
    # A text has a comment, and a rotation by 0 degrees.
    svg = re.sub(r' *<!--.*?-->\n| transform="rotate\(-0 [-.\d ]*\)"', "", svg)
    # Coordinates in hundredths of a point. They are in tags: a text may have numbers of its own.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), svg)
    head = f"<title>{title}</title><style>{SCHEME}{styles}</style>"
    with named(file):
        file.write_text(svg.replace("<metadata>", f"{head}<metadata>", 1))


def with_classes(svg: str) -> tuple[str, str]:
    """(the picture with a class for each different style, which matplotlib writes at each shape;
    the style sheet of the classes)."""
    classes = {}

    def name(found):
        return f'class="{classes.setdefault(found[1], f"s{len(classes)}")}"'
    svg = re.sub('style="([^"]*)"', name, svg)
    return svg, "".join(f".{name}{{{style}}}" for style, name in classes.items())
