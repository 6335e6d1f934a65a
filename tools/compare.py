"""Plot and tabulate runs from their metrics.jsonl, finished or still training.

    python -m tools.compare out/lr1e-3 out/lr2e-3
    python -m tools.compare --mermaid out/one out       # a chart for a README
    python -m tools.compare --svg losses.svg out/one out        # a picture

The chart has the losses over the tokens read, on a logarithmic scale that ends at the first loss.
Each run has a letter; a capital is a validation loss. Below the axis, > marks a resume and < a
rollback. The table has the best run first, and beside each run's name the flags that differ between
the runs. Best is the lowest validation loss or, where tokenizer, text or sample differ, the fewest
bits per byte (tools/comparable_losses.py). `hours` is the time from line to line of metrics.jsonl
within each process; where the clock was set back, none.

A resume or rollback to step k makes the rows beyond k void: `read_metrics` leaves them out.
"""
import tools        # first: python tools/compare.py ends in its line

import json
import math
import shutil
import statistics
import string
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from runtime.commandline import Parser
from tools import comparable_losses, svg
from tools.comparable_losses import evaluated, finite

NATS, BITS = "nats a token", "bits a byte"      # units of a loss
PARTS = 32          # points of a line of the chart for a README
# Seconds before these events were spent between two processes, not in one.
BETWEEN_PROCESSES = ("start", "resume", "damaged")
ROW = {"tokens", "loss", "lr", "tokens_per_second"}     # fields that each row of a step has


# ---------------------------------------------------------------------------------------------
# metrics.jsonl
# ---------------------------------------------------------------------------------------------


def parse_line(text: bytes) -> dict | None:
    """The row of a step, or an event; None if the line is damaged."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if isinstance(line, dict) and {"step", "time"} <= line.keys():
        return line
    return None


def last_valid_step(line: dict) -> int | None:
    """Rows of later steps that come before this line in the file are void; None: no row is."""
    kind = line.get("event")
    if kind is None:
        return line["step"] - 1
    if kind in ("start", "resume"):
        return line["step"]
    if kind == "rollback":
        return line["to"]
    return None


class Run(NamedTuple):
    name: str               # --out
    rows: list[dict]        # of the steps that are not void, in their order; `data` is that of the
                            # start or resume before it
    events: list[dict]
    hours: float            # spent in the processes of the run

    @property
    def config(self) -> dict:
        """The flags of the run's last start."""
        configs = [event["config"] for event in self.events if "config" in event]
        return configs[-1] if configs else {}


def read_metrics(out: Path) -> Run:
    """The run in the directory `out`; without a metrics.jsonl it has no rows. A line that is still
    being written is left out."""
    rows, events = [], []
    seconds, before, data = 0.0, None, None
    path = out / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    for line in map(parse_line, content.splitlines()):
        if line is None:
            continue
        last_valid = last_valid_step(line)
        while last_valid is not None and rows and rows[-1]["step"] > last_valid:
            rows.pop()
        if "event" in line:
            events.append(line)
            if line["event"] in ("start", "resume"):
                data = line.get("data")
        elif ROW <= line.keys():
            rows.append(line | dict(data=data))
        if before is not None and line.get("event") not in BETWEEN_PROCESSES:
            seconds += max(0, line["time"] - before)
        before = line["time"]
    return Run(str(out), rows, events, seconds / 3600)


# ---------------------------------------------------------------------------------------------
# The chart
# ---------------------------------------------------------------------------------------------


def unit_of(runs: list[Run]) -> str:
    """Of the chart: bits a byte if the tokenizers differ, and the bytes of all tokens are known."""
    data = [row["data"] for run in runs for row in run.rows]
    known = [each for each in data if each is not None and each["bytes_per_token"]]
    if len(known) == len(data) and not comparable_losses.have_one_tokenizer(known):
        return BITS
    return NATS


def unit_note(runs: list[Run]) -> list[str]:
    """A line on the chart if the tokenizers are known to differ."""
    if comparable_losses.have_one_tokenizer([row["data"] for run in runs for row in run.rows]):
        return []
    note = f"the chart's unit is {unit_of(runs)}"
    if unit_of(runs) == NATS:
        note += ", in which different tokenizers cannot be compared"
    return [note]


def drawn(row: dict, field: str, unit: str) -> float | None:
    """A loss of a row in the unit of the chart; None if it is not finite."""
    loss = finite(row, field)
    if unit == BITS and loss is not None:
        return loss / math.log(2) / row["data"]["bytes_per_token"]
    return loss


def mean_losses(runs: list[tuple[str, Run]], column) -> dict[tuple[str, int], float]:
    """{(character, column of the chart): mean loss there}; the first run's come last, and so
    cover those of the others."""
    unit = unit_of([run for _, run in runs])
    highest = max(next(loss for row in run.rows if (loss := drawn(row, "loss", unit)) is not None)
                  for _, run in runs)
    losses = {}
    for letter, run in reversed(runs):
        for character, field in ((letter, "loss"), (letter.upper(), "val_loss")):
            for row in run.rows:
                loss = drawn(row, field, unit)
                if loss is not None:
                    loss = min(max(loss, 1e-9), highest)            # its logarithm is finite
                    losses.setdefault((character, column(row)), []).append(loss)
    return {place: statistics.fmean(values) for place, values in losses.items()}


def mark_line(run: Run, width: int, column) -> str:
    """The line below the axis: where the run was resumed or rolled back."""
    cells = [" "] * width
    for event in run.events:
        if event["event"] in ("resume", "rollback"):
            step = last_valid_step(event)
            first = next((row for row in run.rows if row["step"] > step), run.rows[-1])
            cells[column(first)] = "<" if event["event"] == "rollback" else ">"
    return "".join(cells)


def chart(runs: list[tuple[str, Run]], width: int, height: int = 16) -> list[str]:
    """Lines with the losses of runs, each with its letter; the first is drawn over the others."""
    most_tokens = max(run.rows[-1]["tokens"] for _, run in runs)

    def column(row):
        return row["tokens"] * (width - 1) // most_tokens

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


def mermaid(runs: list[Run]) -> str:
    """The chart as an xychart-beta of Mermaid, which GitHub draws: the mean losses of equal parts
    of the tokens that all runs have read. Raises ValueError if a part has no loss."""
    part = max(1, min(run.rows[-1]["tokens"] for run in runs) // PARTS)
    unit = unit_of(runs)
    curves = []
    for run in runs:
        parts = [[] for _ in range(PARTS + 1)]          # the last one, beyond them, is not drawn
        for row in run.rows:
            loss = drawn(row, "loss", unit)
            if loss is not None:
                parts[min((row["tokens"] - 1) // part, PARTS)].append(loss)
        if not all(parts[:PARTS]):
            raise ValueError(f"{run.name} has too few steps for a chart of {PARTS} points")
        curves.append([round(statistics.fmean(losses), 3) for losses in parts[:PARTS]])
    first, last = part // 2, part // 2 + part * (PARTS - 1)         # the middle of a part
    lines = [f"    line [{', '.join(map(str, curve))}]" for curve in curves]
    return "\n".join(["```mermaid", "xychart-beta",
                      f'    title "{", ".join(run.name for run in runs)}"',
                      f'    x-axis "tokens" {first} --> {last}',
                      f'    y-axis "loss, {unit}" {min(map(min, curves))} --> '
                      f'{max(map(max, curves))}', *lines, "```"])


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


def format_evaluation(row: dict | None, fields: list[str]) -> str:
    """These numbers of an evaluation, and its step."""
    if row is None:
        row = dict(step="-")
    cells = []
    for value in [finite(row, field) for field in fields]:
        cells.append(f"{'-':>9}" if value is None else f"{value:9.4f}")
    return f"{' '.join(cells)} {row['step']:>8}"


def format_run(run: Run, of_best: list[str], flags: list[str]) -> str:
    """The run's line of the table, but for its letter. `of_best` are fields of its best row."""
    best, last = None, None
    found = evaluated(run)
    if found is not None:
        best, last = found.best, found.rows[-1]
    minutes = round(run.hours * 60)
    hours = f"{minutes // 60}h{minutes % 60:02d}m"
    speed = statistics.median(row["tokens_per_second"] for row in run.rows)
    return (f"{format_evaluation(best, of_best)} {format_evaluation(last, ['val_loss'])} "
            f"{run.rows[-1]['step']:7} {run.rows[-1]['tokens']:16,} {hours:>8} {speed:11,.0f}  "
            f"{max(row['lr'] for row in run.rows):.2e}  {describe(run, flags)}")


def table(sections: list[tuple[str, list[Run]]], letters: dict[str, str]) -> list[str]:
    """Lines with the runs of each section, and its heading if it has one."""
    runs = [run for _, section in sections for run in section]
    of_best, column = ["val_loss"], ""
    if any(finite(row, "bits_per_byte") is not None for run in runs for row in run.rows):
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


def read_runs(outs: list[str]) -> list[Run]:
    """The runs that have made a step, each once; a warning for each of the others. Raises
    ValueError if there is none."""
    runs = []
    folders = {Path(out).resolve(): out for out in reversed(outs)}          # out, out/ and ./out
    for out in reversed(folders.values()):
        run = read_metrics(Path(out))
        if any(finite(row, "loss") is not None for row in run.rows):
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


def compare(runs: list[Run], as_mermaid=False) -> str:
    """A chart as wide as the terminal, or one for a README, and a table."""
    notes, sections = comparable_losses.order(runs)
    runs = [run for _, section in sections for run in section]
    letters = dict(zip((run.name for run in runs), string.ascii_lowercase))     # the best 26
    charted = [(letters[run.name], run) for run in runs if run.name in letters]
    width = max(20, shutil.get_terminal_size((100, 24)).columns - 12)
    lines = [mermaid(runs)] if as_mermaid else chart(charted, width)
    notes += unit_note(runs)
    lines += [f"note     {note}" for note in notes]
    return "\n".join(lines + table(sections, letters))


def main() -> None:
    usage = "python -m tools.compare [--mermaid] [--svg FILE] OUT ..."
    parser = Parser("tools.compare", usage, __doc__)
    parser.add_argument("outs", nargs="+", metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--mermaid", action="store_true",
                        help="draw for a README on GitHub, not for the terminal")
    parser.add_argument("--svg", metavar="FILE", help="also draw the losses, and in layouts their "
                        "differences from the first run, to this file")
    args = parser.parse_args()
    if "" in args.outs:
        parser.error("an OUT is empty: is a variable of the shell not set?")
    try:
        runs = read_runs(args.outs)
        print(compare(runs, args.mermaid))
        if args.svg:
            if unit_of(runs) == BITS or unit_note(runs):
                raise ValueError("--svg draws nats a token, in which different tokenizers cannot "
                                 "be compared: give runs of one tokenizer")
            Path(args.svg).write_text(svg.losses(runs))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
