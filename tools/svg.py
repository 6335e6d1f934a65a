"""Pictures as SVG: the losses of runs, pipeline schedules, and a block cut in two.

tools.compare --svg, tools.schedule --svg and tools.docs draw them. The same input gives the same
bytes. A picture follows the reader's color scheme, light or dark; its background is transparent.
"""
import math
import statistics
from html import escape

from runtime.options import FLAGS_THAT_CHANGE_THE_LOSS

WIDTH = 800
LEFT, RIGHT = 72, 16        # the margins of a chart
PARTS = 100                 # most points of a line
COLORS = ["#2f81f7", "#db6d28", "#2da44e", "#a371f7", "#e5534b", "#1b9e9e", "#bf8700", "#d6409f"]

STYLE = """<style>
text{font:13px sans-serif;fill:#24292f}
.title{font-size:16px;font-weight:bold}
.small{font-size:12px}
.op text{font-size:11px;fill:#ffffff;text-anchor:middle}
.middle{text-anchor:middle}
.end{text-anchor:end}
.axis{stroke:#8c959f;fill:none}
.grid{stroke:#8c959f;stroke-opacity:.25;fill:none}
.line{fill:none;stroke-linejoin:round}
.box{fill:none;stroke:#57606a;stroke-width:1.3}
.idle{fill:#8c959f;fill-opacity:.16}
.arrow{stroke:#57606a;stroke-width:1.3;fill:none}
@media (prefers-color-scheme:dark){text{fill:#e6edf3} .op text{fill:#ffffff}
.box,.arrow{stroke:#9ea7b3}}
</style>"""


def document(height: int, title: str, body: list[str]) -> str:
    """The whole file. The title is what a screen reader says."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">', f"<title>{escape(title)}</title>", STYLE,
        *body, "</svg>", ""])


def text(x: float, y: float, words, kind="") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(str(words))}</text>'


def box(x: float, y: float, width: float, height: float, kind="box", more="") -> str:
    return (f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="3" {more}/>')


def path(kind: str, route: str, more="") -> str:
    return f'<path class="{kind}" d="{route}" {more}/>'


# ---------------------------------------------------------------------------------------------
# The losses of runs: one chart of them all, and their differences from the first
# ---------------------------------------------------------------------------------------------


def losses(runs: list) -> str:
    """The picture of tools.compare's runs: their losses over the tokens, and below, where the same
    losses are expected, a strip with each one's difference from the first. Runs with --exact have
    a strip of their own. Raises ValueError if the runs have no step in common."""
    by_step = [{row["step"]: row for row in run.rows if has_loss(row)} for run in runs]
    common = set(by_step[0]).intersection(*by_step)
    if not common:
        raise ValueError("the runs have no step in common: there is nothing to draw")
    steps = sorted(common)
    names = label(runs)
    curves = [[rows[step]["loss"] for step in steps] for rows in by_step]
    places = [[rows[step]["tokens"] for step in steps] for rows in by_step]
    last = max(tokens[-1] for tokens in places)

    def x(tokens):
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / last

    groups = comparable_groups(runs)
    legend = list(dict.fromkeys(names))
    top = 46
    bottom = top + max(250, 30 + 22 * len(legend))
    looks = {name: look_of(number, len(legend), bool(groups)) for number, name in enumerate(legend)}
    body = [text(LEFT, 26, heading(groups), "title")]
    body += loss_panel(curves, names, looks, places, x, top, bottom)
    for words, members in groups:
        top = bottom + 38
        bottom = top + 92
        body += difference_panel([curves[i] for i in members], [names[i] for i in members], legend,
                                 places[members[0]], words, x, top, bottom)
    body += token_axis(last, x, bottom)
    return document(bottom + 50, heading(groups), body)


def has_loss(row: dict) -> bool:
    """Whether the row's loss has a place on a logarithmic scale."""
    loss = row.get("loss")
    return loss is not None and 0 < loss < math.inf


def heading(groups: list) -> str:
    return "The same run in different layouts" if groups else "Losses of the runs"


def layout_of(run) -> str:
    """Such as dp 2 x pp 2, from the run's last start."""
    starts = [event for event in run.events if "config" in event]
    config = starts[-1]["config"]
    ranks = len(starts[-1].get("environment", {}).get("hosts", [None]))
    sizes = {name: config.get(name, 1) for name in ("pp", "cp", "tp")}
    sizes = {"dp": ranks // math.prod(sizes.values()), **sizes}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 process"


def label(runs: list) -> list[str]:
    """The runs' names in the legend: their layouts, where these tell them apart."""
    if all(run.config for run in runs):
        names = [layout_of(run) for run in runs]
        kinds = [(name, run.config.get("exact")) for name, run in zip(names, runs)]
        if len(set(kinds)) == len(runs):
            return names
    return [run.name for run in runs]


def comparable_groups(runs: list) -> list[tuple[str, list[int]]]:
    """[(words, the numbers of runs that should have the same losses)]: the runs without --exact,
    then those with it. There is none if the runs differ in more than their layout."""
    if len({str([run.config.get(name) for name in
                 (*FLAGS_THAT_CHANGE_THE_LOSS, "model", "seed", "data", "init_from")])
            for run in runs}) > 1:
        return []
    groups = []
    for exact, words in ((False, "without --exact"), (True, "with --exact")):
        members = [i for i, run in enumerate(runs) if bool(run.config.get("exact")) == exact]
        if len(members) > 1:
            groups.append((words, members))
    return groups


def parts(values: list[float], combine) -> list[float]:
    """At most PARTS numbers, each made of as many neighboring values."""
    per_part = math.ceil(len(values) / PARTS)
    return [combine(values[i:i + per_part]) for i in range(0, len(values), per_part)]


def polyline(places: list[float], values: list[float], look: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, values))
    return f'<polyline class="line" points="{points}" {look}/>'


def look_of(number: int, count: int, nested: bool) -> str:
    """Of curves that coincide the first is wide, each later one on it thinner: all can be seen."""
    width = 2
    if nested:
        width += min(2.2, 12 / count) * (count - 1 - number)
    return f'stroke="{COLORS[number % len(COLORS)]}" stroke-width="{width:g}"'


def loss_panel(curves: list, names: list[str], looks: dict, places: list, x, top: int, bottom: int):
    """The losses, each the mean of its part, on a logarithmic scale, and the legend."""
    lines = [parts(curve, statistics.fmean) for curve in curves]
    low, high = (pick(map(pick, lines)) for pick in (min, max))
    span = math.log(high / low) or 1

    def y(loss):
        return bottom - 8 - (bottom - top - 16) * math.log(loss / low) / span

    body = [path("axis", f"M{LEFT} {top}V{bottom}H{WIDTH - RIGHT}")]
    for loss in nice_losses(low, high):
        body += [path("grid", f"M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}"),
                 text(LEFT - 8, round(y(loss), 1) + 4, loss, "small end")]
    for tokens, line, name in zip(places, lines, names):
        body.append(polyline(map(x, parts(tokens, statistics.fmean)), map(y, line), looks[name]))
    left = WIDTH - RIGHT - 60 - 7.5 * max(map(len, looks))
    for number, (name, look) in enumerate(looks.items()):
        at = top + 16 + 22 * number
        body += [path("line", f"M{left:g} {at}h36", look), text(left + 46, at + 4, name)]
    middle = (top + bottom) / 2
    body.append(f'<text class="small middle" transform="translate(18 {middle:g}) rotate(-90)">'
                "loss, nats per token</text>")
    return body


def nice_losses(low: float, high: float) -> list[float]:
    """At most seven round numbers between the two."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5):
        marks = [round(step * i, 2) for i in range(math.ceil(low / step),
                                                   math.floor(high / step) + 1)]
        if len(marks) <= 7:
            return marks
    return [round(high)]


def difference_panel(curves: list, members: list[str], legend: list[str], tokens: list[int],
                     words: str, x, top: int, bottom: int):
    """The largest relative difference of each part from the first run, on a logarithmic scale above
    a line for zero."""
    zero, low, high = bottom - 8, bottom - 26, top + 4
    lowest, highest = -8, -1            # powers of ten

    def y(difference):
        if difference == 0:
            return zero
        power = min(max(math.log10(difference), lowest), highest)
        return low - (low - high) * (power - lowest) / (highest - lowest)

    differences = [[abs(loss / first - 1) for loss, first in zip(curve, curves[0])]
                   for curve in curves[1:]]
    most = max(map(max, differences))
    found = f"at most {most:.1e}" if most > 0 else "none"
    body = [text(LEFT, top - 10, f"difference from {members[0]}, {words}: {found}"),
            path("axis", f"M{LEFT} {top}V{bottom}H{WIDTH - RIGHT}")]
    for number, mark in ((0, "0"), (1e-7, "1e-7"), (1e-4, "1e-4"), (1e-1, "1e-1")):
        body += [path("grid", f"M{LEFT} {y(number):.1f}H{WIDTH - RIGHT}"),
                 text(LEFT - 8, round(y(number), 1) + 4, mark, "small end")]
    for values, name in zip(differences, members[1:]):
        color = COLORS[legend.index(name) % len(COLORS)]
        body.append(polyline(map(x, parts(tokens, statistics.fmean)), map(y, parts(values, max)),
                             f'stroke="{color}" stroke-width="1.6"'))
    return body


def token_axis(last: int, x, y: int) -> list[str]:
    """Round numbers of tokens below the last panel."""
    body = [text((WIDTH + LEFT - RIGHT) / 2, y + 40, "tokens read", "small middle")]
    step = next(step for power in range(18) for step in (10 ** power, 2 * 10 ** power,
                                                         5 * 10 ** power) if last / step <= 6)
    for tokens in range(0, last + 1, step):
        place = "end" if x(tokens) > WIDTH - 24 else "middle"
        body.append(text(round(x(tokens), 1), y + 20, short(tokens), f"small {place}"))
    return body


def short(count: float) -> str:
    """Such as 409,600 -> 410k."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


# ---------------------------------------------------------------------------------------------
# Pipeline schedules
# ---------------------------------------------------------------------------------------------

OP_COLORS = dict(F="#2f81f7", B="#bc4c00", W="#1a7f37")
SHADES = (1, 0.75, 0.6, 0.5)          # of the chunks


def schedules(rows: list[tuple[str, list[dict], float]]) -> str:
    """[(title, `tools.schedule.clock`'s table, time of its unit)] as bars on one time scale: an
    op's letter says its kind, its number the microbatch, its shade the chunk."""
    span = max(span_of(times) * unit for _, times, unit in rows)
    scale = (WIDTH - LEFT - RIGHT) / span
    panel = 24 * len(rows[0][1]) + 40
    heading = "Pipeline schedules: what each stage computes, and when"
    body = [text(LEFT, 24, heading, "title"), *op_legend(48)]
    for number, (title, times, unit) in enumerate(rows):
        top = 92 + panel * number
        body += [text(LEFT, top - 8, title), *bars(times, top, unit * scale)]
    return document(70 + panel * len(rows), heading, body)


def span_of(times: list[dict]) -> float:
    return max(end for row in times for _, end in row.values())


def bars(times: list[dict], top: int, scale: float) -> list[str]:
    """A row of ops for each stage. All ops of a kind and chunk are one path, to keep the file
    small; an op has the number of its microbatch where there is room for it."""
    width = span_of(times) * scale
    body, routes, numbers = [], {}, []
    for stage, row in enumerate(times):
        y = top + 24 * stage
        body += [text(LEFT - 8, y + 15, f"stage {stage}", "small end"),
                 f'<rect class="idle" x="{LEFT}" y="{y}" width="{width:.1f}" height="22"/>']
        for (op, microbatch, chunk), (start, end) in row.items():
            x, length = LEFT + start * scale, (end - start) * scale
            routes.setdefault((op, chunk), []).append(
                f"M{x + 0.5:.1f} {y}h{length - 1:.1f}v22h-{length - 1:.1f}z")
            if length >= 7 * len(str(microbatch)) + 2:
                numbers.append(f'<text x="{x + length / 2:.1f}" y="{y + 15}">{microbatch}</text>')
    for (op, chunk), route in routes.items():
        shade = SHADES[min(chunk, len(SHADES) - 1)]
        body.append(f'<path fill="{OP_COLORS[op]}" fill-opacity="{shade}" d="{"".join(route)}"/>')
    return [*body, '<g class="op">', *numbers, "</g>"]


def op_legend(y: int) -> list[str]:
    words = (("F", "forward"), ("B", "backward"), ("W", "weight gradients"))
    body, x = [], LEFT
    for op, name in words:
        body += [box(x, y - 11, 14, 14, "", f'fill="{OP_COLORS[op]}"'),
                 text(x + 20, y, name, "small")]
        x += 40 + 7 * len(name)
    body += [box(x, y - 11, 14, 14, "idle"), text(x + 20, y, "idle", "small"),
             text(x + 62, y, "number: microbatch; other shade: second chunk", "small")]
    return body


# ---------------------------------------------------------------------------------------------
# A block cut in two
# ---------------------------------------------------------------------------------------------


def labeled(x: float, y: float, width: float, words: str, more="") -> list[str]:
    return [box(x, y, width, 36, "box", more), text(x + width / 2, y + 23, words, "middle")]


def block() -> str:
    """A Transformer block on two tensor-parallel ranks: attention above, the MLP below."""
    heading = "Tensor parallelism: a block on two ranks"
    body = [text(16, 26, heading, "title")]
    body += half_block(50, "attention", "norm1", ["qkv: its heads", "attention", "proj: its rows"])
    body += half_block(220, "MLP", "norm2", ["up: its columns", "activation", "down: its rows"])
    body += [text(16, 388, "f   forward: identity; backward: all-reduce", "small"),
             text(16, 410, "g   forward: all-reduce; backward: identity", "small"),
             text(400, 388, "Only f and g communicate.", "small"),
             text(400, 410, "Each rank holds half of every matrix.", "small")]
    return document(426, heading, body)


def half_block(top: int, name: str, norm: str, layers: list[str]) -> list[str]:
    """x -> norm -> f -> each rank's layers -> g -> + bias -> + x."""
    middle = top + 74
    body = [text(16, top + 8, name), *labeled(16, middle - 18, 32, "x"),
            *labeled(70, middle - 18, 64, norm), *labeled(156, middle - 18, 32, "f"),
            path("arrow", f"M48 {middle}H70"), path("arrow", f"M134 {middle}H156")]
    for rank, (color, y) in enumerate(zip(COLORS, (top + 16, top + 96))):
        tint = f'style="fill:{color};fill-opacity:.22;stroke:{color}"'
        body.append(text(222, y - 8, f"rank {rank}", "small"))
        body += [*labeled(222, y, 112, layers[0], tint), *labeled(354, y, 92, layers[1], tint),
                 *labeled(466, y, 112, layers[2], tint)]
        body += [path("arrow", f"M188 {middle}L222 {y + 18}"),
                 path("arrow", f"M334 {y + 18}H354"), path("arrow", f"M446 {y + 18}H466"),
                 path("arrow", f"M578 {y + 18}L612 {middle}")]
    return body + [
        *labeled(612, middle - 18, 32, "g"), *labeled(666, middle - 18, 62, "+ bias"),
        *labeled(748, middle - 18, 40, "+ x"), path("arrow", f"M644 {middle}H666"),
        path("arrow", f"M728 {middle}H748")]
