"""A run as its metrics.jsonl tells it.

A resume or rollback to step k, and a row of step k + 1, make rows beyond k void that come before
them in the file: they are left out. Events all stay.
"""
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

ROW = {"tokens", "loss", "lr", "tokens_per_second"}     # fields that each row of a step has
KINDS = dict.fromkeys(("step", "time", "tokens", "lr"), int | float) | dict.fromkeys(
    ("loss", "val_loss", "bits_per_byte", "tokens_per_second"), int | float | None)


def parse_line(text: bytes) -> dict | None:
    """The row of a step, or an event; None if the line is damaged, or is still being written."""
    try:
        line = json.loads(text.decode())        # of bytes it would guess the encoding
    except ValueError:
        return None
    if isinstance(line, dict) and {"step", "time"} <= line.keys() and all(
            isinstance(value, KINDS.get(name, object)) for name, value in line.items()):
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


@dataclass
class Run:
    name: str                                           # --out
    lines: list[dict] = field(default_factory=list)     # events and valid rows, in their order

    @cached_property
    def rows(self) -> list[dict]:
        return [line for line in self.lines if "event" not in line and ROW <= line.keys()]

    @cached_property
    def events(self) -> list[dict]:
        return [line for line in self.lines if "event" in line]

    @property
    def config(self) -> dict:
        """The flags of the run's last start."""
        configs = [event["config"] for event in self.events if "config" in event]
        return configs[-1] if configs else {}

    def column(self, name: str) -> np.ndarray:
        """This number of each row; NaN where it is missing or not finite."""
        return np.array([math.nan if finite(row, name) is None else row[name]
                         for row in self.rows], float)

    def evaluations(self) -> list[tuple[dict | None, dict]]:
        """(what the start or resume before it says of the data, the row) of each row with a
        validation loss."""
        found, data = [], None
        for line in self.lines:
            if line.get("event") in ("start", "resume"):
                data = line.get("data")
            elif ROW <= line.keys() and finite(line, "val_loss") is not None:
                found.append((data, line))
        return found


def read_metrics(out: Path) -> Run:
    """The run in the directory `out`; without a metrics.jsonl it has no lines."""
    run, path = Run(str(out)), Path(out, "metrics.jsonl")
    if not path.exists():
        return run
    valid, rows = {}, []            # {number: line}; (step, number) of the rows, by rising steps
    with open(path, "rb") as file:
        for number, line in enumerate(map(parse_line, file)):
            if line is None:
                continue
            while rows and rows[-1][0] > last_valid_step(line):
                del valid[rows.pop()[1]]
            valid[number] = line
            if "event" not in line:
                rows.append((line["step"], number))
    run.lines = list(valid.values())
    return run
