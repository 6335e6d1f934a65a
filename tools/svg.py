"""Pictures as SVG: pipeline schedules, and a block cut in two.

tools.schedule --svg and tools.docs draw them. The same input gives the same bytes. A picture
follows the reader's color scheme, light or dark; its background is transparent.
"""
from html import escape

WIDTH = 800
LEFT, RIGHT = 72, 16        # the margins of a chart
COLORS = ["#2f81f7", "#db6d28", "#2da44e", "#a371f7", "#e5534b", "#1b9e9e", "#bf8700", "#d6409f"]

STYLE = """<style>
text{font:13px sans-serif;fill:#24292f}
.title{font-size:16px;font-weight:bold}
.small{font-size:12px}
.op text{font-size:11px;fill:#ffffff;text-anchor:middle}
.middle{text-anchor:middle}
.end{text-anchor:end}
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
