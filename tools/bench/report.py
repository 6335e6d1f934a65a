"""What the parts of gpu.py have found, as a page of Markdown."""
import re

from tools.markdown_tables import table


def format_page(found: dict) -> str:
    """What is expected of each part, its tables, and the cause of an error."""
    lines = [f"# {found['device']}, {found['model']}, {found['started']}"]
    for name, part in found["parts"].items():
        lines += ["", f"## {name}, {part['seconds']:.0f} s", part["about"]]
        for title, rows in part["tables"].items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[format_cell(column, row.get(column)) for column in columns] for row in rows]
            lines += ["", f"**{title}**", "", *table(columns, cells)]
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
