"""Tabulate and draw runs from their metrics.jsonl, finished or still training.

    python -m tools.compare out/lr1e-3 out/lr2e-3
    python -m tools.compare --svg losses.svg out/one out        # a picture, with matplotlib

The table has the best run first, and beside each run's name the flags that differ between the runs.
Best is the lowest validation loss or, where tokenizer, text or sample differ, the fewest bits per
byte.
"""
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from base.commandline import Parser, words_of
from base.errors import errors_in_one_line
from tools import comparable_losses
from tools.comparable_losses import evaluated
from tools.metrics import Run, finite, read_metrics
from tools.svg_picture import COLORS, few_numbers, picture, short
from tools.train_many import OF_OPERATION

PARTS = 50                  # of the tokens in a picture
DASHES = ["-", "--", ":", "-."]


def differing_flags(runs: list[Run]) -> list[str]:
    """Names of the flags, but of operation, that do not have the same value in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [name for name in names if name not in OF_OPERATION
            and len({json.dumps(run.config.get(name)) for run in runs}) > 1]


def describe(run: Run, flags: list[str]) -> str:
    """The run's name, its values of these flags, and how often each event occurred."""
    notes = [run.name]
    for name in flags:
        if run.config.get(name) is not None:
            notes.append(" ".join(words_of({name: run.config[name]})).removeprefix("--"))
    kinds = Counter(event["event"] for event in run.events)
    notes += [f"{count} {kind}" for kind, count in kinds.items() if kind not in ("start", "end")]
    return ", ".join(filter(None, notes))       # of a switch that is off there are no words


def cell(row: dict | None, name: str, form: str, width: int) -> str:
    """A number of a row; - where there is none."""
    value = None if row is None else finite(row, name)
    return f"{'-':>{width}}" if value is None else f"{value:{width}{form}}"


def format_run(run: Run, of_best: list[str], flags: list[str]) -> str:
    """The run's line of the table. `of_best` are fields of its best row."""
    found = evaluated(run)
    best, last = (None, None) if found is None else (found.best, found.last)
    rows = run.rows
    cells = [*(cell(best, name, ".4f", 9) for name in of_best), cell(best, "step", "", 8),
             cell(last, "val_loss", ".4f", 9), cell(last, "step", "", 8),
             f"{rows[-1]['step']:7}", f"{rows[-1]['tokens']:16,}",
             f"{np.nanmedian(run.column('tokens_per_second')):11,.0f}",
             f" {max(row['lr'] for row in rows):.2e}", f" {describe(run, flags)}"]
    return " ".join(cells)


def table(sections: list[tuple[str, list[Run]]]) -> list[str]:
    """Lines with the runs of each section, and its heading if it has one."""
    runs = [run for _, section in sections for run in section]
    of_best, column = ["val_loss"], ""
    if any(finite(row, "bits_per_byte") for run in runs for _, row in run.evaluations()):
        of_best.append("bits_per_byte")
        column = " bits/byte"
    lines = [f" best val{column}  at step  last val  at step   steps           tokens    tokens/s"
             f"    max lr  run"]
    flags = differing_flags(runs)
    for heading, section in sections:
        if heading:
            lines.append(heading)
        lines += [format_run(run, of_best, flags) for run in section]
    return lines


def read_runs(outs: list[str]) -> list[Run]:
    """The runs that have made a step, each once; a warning for each of the others. Raises
    ValueError if there is none."""
    runs = []
    folders = {Path(out).resolve(): out for out in reversed(outs)}          # out, out/ and ./out
    for out in reversed(folders.values()):
        run = read_metrics(Path(out))
        if np.isfinite(run.column("loss")).any():
            runs.append(run)
            continue
        print(f"tools.compare: warning: {out} has no metrics.jsonl with the loss of a step: it is "
              f"left out", file=sys.stderr)
    if not runs:
        raise ValueError("nothing to compare: none of these runs has made a step")
    return runs


def compare(runs: list[Run]) -> str:
    """The table, and notes on what in it cannot be compared."""
    notes, sections = comparable_losses.order(runs)
    return "\n".join([f"note     {note}" for note in notes] + table(sections))


def draw(runs: list[Run], file: Path) -> None:
    """The picture of the runs, the best one first. A line is a run's training loss, a point its
    validation loss: both are means over one PARTS-th of the longest run's tokens. Raises ValueError
    without matplotlib."""
    tokenizers = {(data["tokenizer"], data["vocab_size"]) for run in runs
                  for data, _ in run.evaluations() if data is not None}
    if len(tokenizers) > 1:
        raise ValueError("--svg draws nats a token, in which different tokenizers cannot "
                         "be compared: give runs of one tokenizer")
    _, sections = comparable_losses.order(runs)
    runs = [run for _, section in sections for run in section]
    flags = differing_flags(runs)
    size = max(run.rows[-1]["tokens"] for run in runs) / PARTS
    with picture(file, "Losses of the runs", 4 + 0.21 * len(runs)) as figure:
        panel = figure.subplots()
        for place, run in enumerate(runs):
            color = COLORS[place % len(COLORS)]
            dash = DASHES[place // len(COLORS) % len(DASHES)]
            panel.plot(*part_means(run, "loss", size), dash, color=color,
                       label=describe(run, flags))
            panel.plot(*part_means(run, "val_loss", size), "o", color=color, markersize=4)
        panel.set(yscale="log", ylabel="loss, nats per token", xlabel="tokens read",
                  title=f"Lines: training loss; points: validation loss; both: means of 1/{PARTS} "
                        f"of the tokens")
        panel.xaxis.set_major_formatter(short)
        few_numbers(panel.yaxis)
        panel.grid(alpha=0.25)
        figure.legend(loc="outside lower left", frameon=False)


def part_means(run: Run, name: str, size: float) -> tuple[list, list]:
    """The middle of each part of so many tokens in which the run has this loss, and its mean."""
    losses = run.column(name)
    known = losses > 0              # neither NaN nor without a logarithm
    parts = np.ceil(run.column("tokens")[known] / size) - 1
    found = np.unique(parts)
    return (((found + 0.5) * size).tolist(),
            [float(losses[known][parts == part].mean()) for part in found])


@errors_in_one_line("tools.compare")
def main() -> None:
    parser = Parser("tools.compare", "python -m tools.compare [--svg FILE] OUT ...", __doc__)
    parser.add_argument("outs", nargs="+", metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--svg", metavar="FILE", help="also draw the losses to this file")
    args = parser.parse_args()
    if "" in args.outs:
        parser.error("an OUT is empty: is a variable of the shell not set?")
    if args.svg is not None and Path(args.svg).suffix != ".svg":
        parser.error(f"--svg {args.svg}: the picture is an SVG: give a name that ends in .svg")
    runs = read_runs(args.outs)
    print(compare(runs))
    if args.svg:
        draw(runs, Path(args.svg))
        print(f"wrote {args.svg}")


if __name__ == "__main__":
    main()
