"""Tables of Markdown, whole or row by row. tools.docs and tools.bench print them."""


def row(*cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def heading(*columns) -> list[str]:
    return [row(*columns), "|" + "---|" * len(columns)]


def table(columns: list[str], rows: list[list]) -> list[str]:
    """The lines of a whole table."""
    return [*heading(*columns), *(row(*cells) for cells in rows)]
