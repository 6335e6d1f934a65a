"""A run as its metrics.jsonl tells it, in columns of numbers: 48 bytes a step. tools/compare.py and
tools/follow.py read it.

The file is read backwards: a resume or rollback to step k, and a row of step k + 1, make rows
beyond k void that come before them in the file. So a row is valid if its step is at most the
smallest such k met so far, and nothing that was read has to be taken back.
"""
import json
import math
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Of the steps: a name and a type, "q" for integers. `data` is the step's place in Run.data.
COLUMNS = dict(step="q", tokens="q", data="q", loss="d", val_loss="d", tokens_per_second="d")
BLOCK = 2 ** 20             # bytes read at a time
# Seconds before these events were spent between two processes, not in one.
BETWEEN_PROCESSES = ("start", "resume", "damaged")
ROW = {"tokens", "loss", "lr", "tokens_per_second"}     # fields that each row of a step has
# Columns that a row has in its fields.
FIELDS = [name for name in COLUMNS if name != "data"]


def parse_line(text: bytes) -> dict | None:
    """The row of a step, or an event; None if the line is damaged."""
    try:
        line = json.loads(text.decode())        # of bytes it would guess the encoding
    except ValueError:
        return None
    if isinstance(line, dict) and "step" in line and "time" in line:
        return line
    return None


def last_valid_step(line: dict) -> float:
    """Rows of later steps that come before this line in the file are void; math.inf: no row is."""
    kind = line.get("event")
    if kind is None:
        return line["step"] - 1
    if kind in ("start", "resume"):
        return line["step"]
    if kind == "rollback":
        return line["to"]
    return math.inf


def finite(row: dict, name: str) -> float | None:
    """This number of a row; None if it is missing, null, inf or NaN."""
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None


class Evaluations(NamedTuple):
    """Those of one process: they read the same text."""
    data: dict | None       # what the start or resume says on it
    best: dict              # rows
    last: dict


@dataclass
class Run:
    name: str                                           # --out
    steps: dict[str, np.ndarray] = field(default_factory=dict)      # COLUMNS of those not void
    last: dict | None = None                            # row of such a step
    max_lr: float = 0.0
    evaluations: list[Evaluations] = field(default_factory=list)        # in their order
    events: list[dict] = field(default_factory=list)
    data: list[dict | None] = field(default_factory=list)
    hours: float = 0.0                                  # spent in the processes of the run

    @property
    def config(self) -> dict:
        """The flags of the run's last start."""
        configs = [event["config"] for event in self.events if "config" in event]
        return configs[-1] if configs else {}

    def known_data(self) -> list[dict | None]:
        """What the steps read, each once."""
        return [self.data[place] for place in np.unique(self.steps["data"])]


def lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first; none without the file."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        first = b""
        while end > 0:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            first, *lines = (file.read(end - begin) + first).split(b"\n")
            yield from reversed(lines)
            end = begin
        yield first


def judged_lines(path: Path) -> Iterator[tuple[bytes, dict, bool]]:
    """Of each line that is not damaged, the last one first: its text, the row or event, and whether
    it is valid, as each event is."""
    last_valid = math.inf
    for text in lines_backwards(path):
        line = parse_line(text)
        if line is None:
            continue
        yield text, line, "event" in line or line["step"] <= last_valid
        last_valid = min(last_valid, last_valid_step(line))


def read_metrics(out: Path) -> Run:
    """The run in the directory `out`; without a metrics.jsonl it has no steps. A line that is still
    being written is left out."""
    run = Run(str(out))
    path = out / "metrics.jsonl"
    columns = {name: array(kind) for name, kind in COLUMNS.items()}     # the last step first
    best, last = {}, {}             # {place in run.data: row with a validation loss}
    after = None
    for _, line, is_valid in judged_lines(path):
        place = len(run.data)
        if "event" in line:
            run.events.append(line)
            if line["event"] in ("start", "resume"):
                run.data.append(line.get("data"))
        elif is_valid and ROW <= line.keys():
            columns["data"].append(place)
            for name in FIELDS:
                value = line.get(name)
                columns[name].append(math.nan if value is None else value)
            if run.last is None:
                run.last = line
            run.max_lr = max(run.max_lr, line["lr"])
            if finite(line, "val_loss") is not None:
                last.setdefault(place, line)
                # Of equal ones the first of the run, which is met last.
                if place not in best or line["val_loss"] <= best[place]["val_loss"]:
                    best[place] = line
        if after is not None and after.get("event") not in BETWEEN_PROCESSES:
            run.hours += max(0, after["time"] - line["time"]) / 3600
        after = line
    run.steps = {name: np.array(column)[::-1] for name, column in columns.items()}
    for losses in (run.steps["loss"], run.steps["val_loss"]):
        losses[np.isinf(losses)] = math.nan
    run.data.append(None)           # of steps without a start before them
    run.events.reverse()
    run.evaluations = [Evaluations(run.data[place], best[place], last[place])
                       for place in reversed(best)]
    return run


def part_means(values: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value has a part: the parts, in their order, and the mean of each one's values. A NaN
    does not count."""
    known = ~np.isnan(values)
    found, place = np.unique(parts[known], return_inverse=True)
    return found, np.bincount(place, values[known]) / np.bincount(place)
