"""Plot and tabulate runs from their metrics.jsonl, finished or still training.

    python -m tools.compare out/lr1e-3 out/lr2e-3
    python -m tools.compare --svg losses.svg out/one out        # a picture

The chart has the losses over the tokens read, on a logarithmic scale that ends at the first loss.
Each run has a letter; a capital is a validation loss. Below the axis, > marks a resume and < a
rollback. The table has the best run first, and beside each run's name the flags that differ between
the runs. Best is the lowest validation loss or, where tokenizer, text or sample differ, the fewest
bits per byte (tools/comparable_losses.py). `hours` is the time from line to line of metrics.jsonl
within each process; where the clock was set back, none. A second table says how mixtures of experts
used them in their last step (runtime/step_stats.py).

A resume or rollback to step k makes the rows beyond k void: they are left out.
"""
import json
import math
import shutil
import string
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from base.commandline import Parser
from base.errors import errors_in_one_line
from tools import comparable_losses, loss_picture
from tools.comparable_losses import evaluated
from tools.metrics import Run, finite, last_valid_step, part_means, read_metrics

NATS, BITS = "nats a token", "bits a byte"      # units of a loss


# ---------------------------------------------------------------------------------------------
# The chart
# ---------------------------------------------------------------------------------------------


def unit_of(runs: list[Run]) -> str:
    """Of the chart: bits a byte if the tokenizers differ, and the bytes of all tokens are known."""
    data = [each for run in runs for each in run.known_data()]
    known = [each for each in data if each is not None and each["bytes_per_token"]]
    if len(known) == len(data) and not comparable_losses.have_one_tokenizer(runs):
        return BITS
    return NATS


def unit_note(runs: list[Run]) -> list[str]:
    """A line on the chart if the tokenizers are known to differ."""
    if comparable_losses.have_one_tokenizer(runs):
        return []
    note = f"the chart's unit is {unit_of(runs)}"
    if unit_of(runs) == NATS:
        note += ", in which different tokenizers cannot be compared"
    return [note]


def drawn(run: Run, name: str, unit: str) -> np.ndarray:
    """The losses of the steps in the unit of the chart."""
    losses = run.steps[name]
    if unit == NATS:
        return losses
    bytes_per_token = [math.nan if data is None else data["bytes_per_token"] for data in run.data]
    return losses / math.log(2) / np.array(bytes_per_token, float)[run.steps["data"]]


def mean_losses(runs: list[tuple[str, Run]], column) -> dict[tuple[str, int], float]:
    """{(character, column of the chart): mean loss there}; the first run's come last, and so
    cover those of the others."""
    unit = unit_of([run for _, run in runs])
    highest = -math.inf             # of the first losses
    for _, run in runs:
        losses = drawn(run, "loss", unit)
        highest = max(highest, losses[~np.isnan(losses)][0])
    means = {}
    for letter, run in reversed(runs):
        columns = column(run.steps["tokens"])
        for character, name in ((letter, "loss"), (letter.upper(), "val_loss")):
            losses = np.clip(drawn(run, name, unit), 1e-9, highest)     # its logarithm is finite
            for x, mean in zip(*part_means(losses, columns)):
                means[character, x] = mean
    return means


def mark_line(run: Run, width: int, column) -> str:
    """The line below the axis: where the run was resumed or rolled back."""
    cells = [" "] * width
    for event in run.events:
        if event["event"] in ("resume", "rollback"):
            place = np.searchsorted(run.steps["step"], last_valid_step(event), side="right")
            first = run.steps["tokens"][min(place, len(run.steps["tokens"]) - 1)]
            cells[column(first)] = "<" if event["event"] == "rollback" else ">"
    return "".join(cells)


def chart(runs: list[tuple[str, Run]], width: int, height: int = 16) -> list[str]:
    """Lines with the losses of runs, each with its letter; the first is drawn over the others."""
    most_tokens = max(run.last["tokens"] for _, run in runs)

    def column(tokens):
        return tokens * (width - 1) // most_tokens

    levels = {place: math.log(loss) for place, loss in mean_losses(runs, column).items()}
    low, high = min(levels.values()), max(levels.values())
    per_row = (high - low) / (height - 1)
    cells = [[" "] * width for _ in range(height)]
    for (character, x), level in levels.items():
        y = round((high - level) / per_row) if high > low else 0
        cells[y][x] = character
    lines = [f"{math.exp(high - y * per_row):9.4f} |{''.join(line)}"
             for y, line in enumerate(cells)]
    lines.append(f"{'+':>11}" + "-" * width)
    for letter, run in runs:
        marks = mark_line(run, width, column)
        if marks.strip():
            lines.append(f"{letter:>9} |{marks}")
    return [*lines, f"{'tokens':>9}  0{most_tokens:>{width - 1},}", ""]


# ---------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------


def differing_flags(runs: list[Run]) -> list[str]:
    """Names of the flags, but for --out, that do not have the same value in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [name for name in names if name != "out"
            and len({json.dumps(run.config.get(name)) for run in runs}) > 1]


def describe(run: Run, flags: list[str]) -> str:
    """The run's name, its values of these flags, and how often each event occurred."""
    notes = [run.name]
    for name in flags:
        if run.config.get(name) is not None:
            notes.append(f"{name.replace('_', '-')} {run.config[name]}")
    kinds = Counter(event["event"] for event in run.events)
    for kind, count in kinds.items():
        if kind not in ("start", "end"):
            notes.append(f"{count} {kind}")
    return ", ".join(notes)


def format_numbers(row: dict, fields: list[str], width: int = 9) -> str:
    """These numbers of a row."""
    cells = []
    for value in [finite(row, field) for field in fields]:
        cells.append(f"{'-':>{width}}" if value is None else f"{value:{width}.4f}")
    return " ".join(cells)


def format_evaluation(row: dict | None, fields: list[str]) -> str:
    """These numbers of an evaluation, and its step."""
    if row is None:
        row = dict(step="-")
    return f"{format_numbers(row, fields)} {row['step']:>8}"


def format_run(run: Run, of_best: list[str], flags: list[str]) -> str:
    """The run's line of the table, but for its letter. `of_best` are fields of its best row."""
    best, last = None, None
    found = evaluated(run)
    if found is not None:
        best, last = found.best, found.last
    minutes = round(run.hours * 60)
    hours = f"{minutes // 60}h{minutes % 60:02d}m"
    speed = np.nanmedian(run.steps["tokens_per_second"])
    return (f"{format_evaluation(best, of_best)} {format_evaluation(last, ['val_loss'])} "
            f"{run.last['step']:7} {run.last['tokens']:16,} {hours:>8} {speed:11,.0f}  "
            f"{run.max_lr:.2e}  {describe(run, flags)}")


def table(sections: list[tuple[str, list[Run]]], letters: dict[str, str]) -> list[str]:
    """Lines with the runs of each section, and its heading if it has one."""
    runs = [run for _, section in sections for run in section]
    of_best, column = ["val_loss"], ""
    if any(finite(each.best, "bits_per_byte") is not None
           for run in runs for each in run.evaluations):
        of_best.append("bits_per_byte")
        column = " bits/byte"
    lines = [f"   best val{column}  at step  last val  at step   steps           tokens    hours"
             f"    tokens/s    max lr  run"]
    flags = differing_flags(runs)
    for heading, section in sections:
        if heading:
            lines.append(heading)
        for run in section:
            lines.append(f"{letters.get(run.name, ' ')} {format_run(run, of_best, flags)}")
    return lines


def experts_table(runs: list[Run], letters: dict[str, str]) -> list[str]:
    """Lines with how each mixture of experts used them in its last step; none without a mixture."""
    lines = []
    for run in runs:
        loads = {name.removeprefix("load/"): finite(run.last, name)
                 for name in run.last if name.startswith("load/")}
        if not loads:
            continue
        block = max(loads, key=loads.get)
        router_loss = format_numbers(run.last, ["router_loss"], 11)
        of_blocks = " ".join(f"{load:.2f}" for load in loads.values())
        lines.append(f"{letters.get(run.name, ' ')} {loads[block]:13.2f} {block:>9} "
                     f"{run.last['dead_experts']:13}  {router_loss}  {run.name}: {of_blocks}")
    if not lines:
        return []
    return ["   largest load  in block  dead experts  router loss  run: of each block the load of "
            "its most used expert, relative to the mean", *lines]


def read_runs(outs: list[str]) -> list[Run]:
    """The runs that have made a step, each once; a warning for each of the others. Raises
    ValueError if there is none."""
    runs = []
    folders = {Path(out).resolve(): out for out in reversed(outs)}          # out, out/ and ./out
    for out in reversed(folders.values()):
        run = read_metrics(Path(out))
        if np.isfinite(run.steps["loss"]).any():
            runs.append(run)
            continue
        problem = f"{out} is not the --out of a run"
        if Path(out).is_file():
            problem = f"{out} is a file: give the --out of a run, a folder"
        if Path(out, "metrics.jsonl").exists():
            problem = f"{out}/metrics.jsonl has no step with a loss"
        print(f"tools.compare: warning: {problem}: left out", file=sys.stderr)
    if not runs:
        raise ValueError("nothing to compare: give the --out of runs that have made a step")
    return runs


def draw(runs: list[Run], file: Path) -> None:
    """The picture of the best runs, the best one first; of one command in several layouts in the
    order given, as they differ by rounding."""
    if not comparable_losses.have_one_tokenizer(runs):
        raise ValueError("--svg draws nats a token, in which different tokenizers cannot "
                         "be compared: give runs of one tokenizer")
    names = []
    if loss_picture.strips(runs):
        names = loss_picture.layouts(runs)
    else:
        _, sections = comparable_losses.order(runs)
        runs = [run for _, section in sections for run in section]
    flags = differing_flags(runs)
    names = names or [describe(run, flags) for run in runs]
    loss_picture.draw(runs[:loss_picture.MOST], names, flags, file)
    if len(runs) > loss_picture.MOST:
        print(f"note     {file} has the first {loss_picture.MOST} of {len(runs)} runs")
    print(f"wrote {file}")


def compare(runs: list[Run]) -> str:
    """A chart as wide as the terminal, and a table."""
    notes, sections = comparable_losses.order(runs)
    runs = [run for _, section in sections for run in section]
    letters = dict(zip((run.name for run in runs), string.ascii_lowercase))     # the best 26
    charted = [(letters[run.name], run) for run in runs if run.name in letters]
    width = max(20, shutil.get_terminal_size((100, 24)).columns - 12)
    lines = chart(charted, width)
    notes += unit_note(runs)
    lines += [f"note     {note}" for note in notes]
    return "\n".join(lines + table(sections, letters) + experts_table(runs, letters))


@errors_in_one_line("tools.compare")
def main() -> None:
    usage = "python -m tools.compare [--svg FILE] OUT ..."
    parser = Parser("tools.compare", usage, __doc__)
    parser.add_argument("outs", nargs="+", metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--svg", metavar="FILE", help="also draw the losses, and in layouts their "
                        "differences from the first run, to this file")
    args = parser.parse_args()
    if "" in args.outs:
        parser.error("an OUT is empty: is a variable of the shell not set?")
    if args.svg is not None and Path(args.svg).suffix != ".svg":
        parser.error(f"--svg {args.svg}: the picture is an SVG: give a name that ends in .svg")
    runs = read_runs(args.outs)
    print(compare(runs))
    if args.svg:
        draw(runs, Path(args.svg))


if __name__ == "__main__":
    main()
