"""Tabulate runs from their metrics.jsonl, finished or still training.

    python -m tools.compare out/lr1e-3 out/lr2e-3

The table has the best run first, and beside each run's name the flags that differ between the runs.
Best is the lowest validation loss or, where tokenizer, text or sample differ, the fewest bits per
byte. `hours` is the time from line to line of metrics.jsonl within each process; where the clock
was set back, none.
"""
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from base.commandline import Parser
from base.errors import errors_in_one_line
from tools import comparable_losses
from tools.comparable_losses import evaluated
from tools.metrics import Run, finite, read_metrics


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
    return ", ".join(notes + [f"{count} {kind}" for kind, count in kinds.items()
                              if kind not in ("start", "end")])


def cell(row: dict | None, name: str, form: str, width: int) -> str:
    """A number of a row; - where there is none."""
    value = None if row is None else finite(row, name)
    return f"{'-':>{width}}" if value is None else f"{value:{width}{form}}"


def format_run(run: Run, of_best: list[str], flags: list[str]) -> str:
    """The run's line of the table. `of_best` are fields of its best row."""
    found = evaluated(run)
    best, last = (None, None) if found is None else (found.best, found.last)
    minutes = round(run.hours * 60)
    rows = run.rows
    cells = [*(cell(best, name, ".4f", 9) for name in of_best), cell(best, "step", "", 8),
             cell(last, "val_loss", ".4f", 9), cell(last, "step", "", 8),
             f"{rows[-1]['step']:7}", f"{rows[-1]['tokens']:16,}",
             f"{f'{minutes // 60}h{minutes % 60:02d}m':>8}",
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
    lines = [f" best val{column}  at step  last val  at step   steps           tokens    hours"
             f"    tokens/s    max lr  run"]
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
        problem = f"{out} is not the --out of a run"
        if Path(out).is_file():
            problem = f"{out} is a file: give the --out of a run, a folder"
        if Path(out, "metrics.jsonl").exists():
            problem = f"{out}/metrics.jsonl has no step with a loss"
        print(f"tools.compare: warning: {problem}: left out", file=sys.stderr)
    if not runs:
        raise ValueError("nothing to compare: none of these runs has made a step")
    return runs


def compare(runs: list[Run]) -> str:
    """The table, and notes on what in it cannot be compared."""
    notes, sections = comparable_losses.order(runs)
    return "\n".join([f"note     {note}" for note in notes] + table(sections))


@errors_in_one_line("tools.compare")
def main() -> None:
    parser = Parser("tools.compare", "python -m tools.compare OUT ...", __doc__)
    parser.add_argument("outs", nargs="+", metavar="OUT", help="the --out of a run of train.py")
    args = parser.parse_args()
    if "" in args.outs:
        parser.error("an OUT is empty: is a variable of the shell not set?")
    print(compare(read_runs(args.outs)))


if __name__ == "__main__":
    main()
