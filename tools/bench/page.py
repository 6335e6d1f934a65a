"""Measurements in processes of their own, and their page. gpu.py calls it.

A part is a program that prints each row of its tables as a line [title, {column: value}], as soon
as it has found it: what an error, or the end of its time, has left is kept.
"""
import json
import os
import re
import signal
import subprocess
import tempfile
import time

from tools.bench.programs import ROOT


def collect(command: list[str], seconds: float) -> dict:
    """Run a part -> {title: rows} and its error, if it failed or was stopped after `seconds`."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors, text=True,
                                   start_new_session=True)
        error = None
        try:
            if process.wait(seconds) != 0:
                errors.seek(0)
                error = errors.read().strip() or f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
            end_group(process)
        out.seek(0)
        tables = {}
        for line in out:
            if line.startswith('["'):
                title, row = json.loads(line)
                tables.setdefault(title, []).append(row)
    return dict(seconds=time.monotonic() - started, tables=tables, error=error)


def end_group(process: subprocess.Popen) -> None:
    """A part and the programs that it has started: torchrun needs 30 seconds for its own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def format_page(found: dict) -> str:
    """All parts as a page of Markdown: what is expected, the tables, the cause of an error."""
    lines = [f"# {found['device']}, {found['model']}, {found['started']}"]
    for name, part in found["parts"].items():
        lines += ["", f"## {name}, {part['seconds']:.0f} s", part["about"]]
        for title, rows in part["tables"].items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            lines += ["", f"**{title}**", "", "| " + " | ".join(columns) + " |",
                      "|---" * len(columns) + "|"]
            for row in rows:
                cells = [format_cell(column, row.get(column)) for column in columns]
                lines.append("| " + " | ".join(cells) + " |")
        if part["error"] is not None:
            lines += ["", f"**Failed:** {cause(part['error'])}"]
    return "\n".join(lines) + "\n"


def format_cell(column: str, value) -> str:
    if value is None:
        return "-"
    if column == "error":
        value = cause(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/")[:90]


def cause(error: str) -> str:
    """The line of a program's standard error that names the first error. (torchrun's own come
    after it.)"""
    lines = error.splitlines()
    words = r"train\.py: (?!warning)|\w(Error|Exception)\b"
    named = [line for line in lines if re.search(words, line)]
    return (named or lines[-1:])[0].strip()
