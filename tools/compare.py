"""Plot and tabulate runs from their metrics.jsonl, finished or still training.

    python -m tools.compare out/lr1e-3 out/lr2e-3
    python -m tools.compare --mermaid out/one out       # a chart for a README
    python -m tools.compare --svg losses.svg out/one out        # a picture

The chart has the losses over the tokens read, on a logarithmic scale that ends at the first loss.
Each run has a letter; a capital is a validation loss. Below the axis, > marks a resume and < a
rollback. The table has the run with the best validation loss first, and beside each run's name the
flags that differ between the runs.

A resume or rollback to step k makes the rows beyond k void: `read_metrics` leaves them out.
"""
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
from tools import svg

PARTS = 32          # points of a line of the chart for a README
# Seconds before these events were spent between two processes, not in one.
BETWEEN_PROCESSES = ("start", "resume", "damaged")


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
    rows: list[dict]        # of the steps that are not void, in their order
    events: list[dict]
    hours: float            # spent in the processes of the run

    @property
    def config(self) -> dict:
        """The flags of the run's last start."""
        configs = [event["config"] for event in self.events if "config" in event]
        return configs[-1] if configs else {}

    @property
    def evaluations(self) -> list[dict]:
        return [row for row in self.rows if row.get("val_loss") is not None]

    @property
    def best_val_loss(self) -> float:
        return min((row["val_loss"] for row in self.evaluations), default=math.inf)


def read_metrics(out: Path) -> Run:
    """The run in the directory `out`; without a metrics.jsonl it has no rows. A line that is still
    being written is left out."""
    rows, events = [], []
    seconds, before = 0.0, None
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
        else:
            rows.append(line)
        if before is not None and line.get("event") not in BETWEEN_PROCESSES:
            seconds += line["time"] - before
        before = line["time"]
    return Run(str(out), rows, events, seconds / 3600)


# ---------------------------------------------------------------------------------------------
# The chart
# ---------------------------------------------------------------------------------------------


def mean_losses(runs: list[tuple[str, Run]], column) -> dict[tuple[str, int], float]:
    """{(character, column of the chart): mean loss there}; the first run's come last, and so
    cover those of the others."""
    highest = max(next(row["loss"] for row in run.rows if row["loss"] is not None)
                  for _, run in runs)
    losses = {}
    for letter, run in reversed(runs):
        for character, field in ((letter, "loss"), (letter.upper(), "val_loss")):
            for row in run.rows:
                if row.get(field) is not None:
                    loss = min(max(row[field], 1e-9), highest)      # its logarithm is finite
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
    curves = []
    for run in runs:
        parts = [[] for _ in range(PARTS + 1)]          # the last one, beyond them, is not drawn
        for row in run.rows:
            if row["loss"] is not None:
                parts[min((row["tokens"] - 1) // part, PARTS)].append(row["loss"])
        if not all(parts[:PARTS]):
            raise ValueError(f"{run.name} has too few steps for a chart of {PARTS} points")
        curves.append([round(statistics.fmean(losses), 3) for losses in parts[:PARTS]])
    first, last = part // 2, part // 2 + part * (PARTS - 1)         # the middle of a part
    lines = [f"    line [{', '.join(map(str, curve))}]" for curve in curves]
    return "\n".join(["```mermaid", "xychart-beta",
                      f'    title "{", ".join(run.name for run in runs)}"',
                      f'    x-axis "tokens" {first} --> {last}',
                      f'    y-axis "loss, nats a token" {min(map(min, curves))} --> '
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


def format_evaluation(row: dict | None) -> str:
    """Two columns: the validation loss and its step."""
    if row is None:
        return f"{'-':>9} {'-':>8}"
    return f"{row['val_loss']:9.4f} {row['step']:8}"


def format_run(run: Run, flags: list[str]) -> str:
    """The run's line of the table, but for its letter."""
    best, last = None, None
    if run.evaluations:
        best = min(run.evaluations, key=lambda row: row["val_loss"])
        last = run.evaluations[-1]
    minutes = round(run.hours * 60)
    hours = f"{minutes // 60}h{minutes % 60:02d}m"
    speed = statistics.median(row["tokens_per_second"] for row in run.rows)
    return (f"{format_evaluation(best)} {format_evaluation(last)} "
            f"{run.rows[-1]['step']:7} {run.rows[-1]['tokens']:16,} {hours:>8} {speed:11,.0f}  "
            f"{max(row['lr'] for row in run.rows):.2e}  {describe(run, flags)}")


def compare(outs: list[str], as_mermaid=False) -> str:
    """A chart as wide as the terminal, or one for a README, and a table. Raises ValueError if no
    run has a step."""
    runs = []
    for out in dict.fromkeys(outs):
        run = read_metrics(Path(out))
        if any(row.get("loss") is not None for row in run.rows):
            runs.append(run)
        else:
            problem = f"{out} is not the --out of a run"
            if Path(out, "metrics.jsonl").exists():
                problem = f"{out}/metrics.jsonl has no step"
            print(f"compare.py: warning: {problem}: left out", file=sys.stderr)
    if not runs:
        raise ValueError("nothing to compare: give the --out of runs that have made a step")
    runs.sort(key=lambda run: run.best_val_loss)
    charted = list(zip(string.ascii_lowercase, runs))         # the best 26
    width = max(20, shutil.get_terminal_size((100, 24)).columns - 12)
    lines = [mermaid(runs)] if as_mermaid else chart(charted, width)
    lines.append("   best val  at step  last val  at step   steps           tokens    hours    "
                 "tokens/s    max lr  run")
    flags = differing_flags(runs)
    for letter, run in zip(string.ascii_lowercase.ljust(len(runs)), runs):
        lines.append(f"{letter} {format_run(run, flags)}")
    return "\n".join(lines)


def main() -> None:
    usage = "python -m tools.compare [--mermaid] [--svg FILE] OUT ..."
    parser = Parser("compare.py", usage, __doc__)
    parser.add_argument("outs", nargs="+", metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--mermaid", action="store_true",
                        help="draw for a README on GitHub, not for the terminal")
    parser.add_argument("--svg", metavar="FILE", help="also draw the losses, and in layouts their "
                        "differences from the first run, to this file")
    args = parser.parse_args()
    try:
        print(compare(args.outs, args.mermaid))
        if args.svg:
            runs = [read_metrics(Path(out)) for out in dict.fromkeys(args.outs)]
            runs = [run for run in runs if any(row.get("loss") is not None for row in run.rows)]
            Path(args.svg).write_text(svg.losses(runs))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
