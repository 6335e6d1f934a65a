"""How a file is read. Its bytes say whether it is a table; otherwise a known ending decides; the
bytes decide for all other files."""
import codecs
from pathlib import Path

from corpus import records
from corpus.compressed import open_bytes
from corpus.file_kinds import ALSO_TEXT, LINES, NOT_READ, READ, kind_of, table_kind
from corpus.records import START, is_document


def how_read(path: Path) -> str:
    """The ending of the files that are read as this one: .txt, .jsonl, .json, .parquet or .arrow.
    Raises ValueError if it cannot be decompressed."""
    kind = table_kind(path)
    if kind is not None:
        return kind
    kind = kind_of(path.name)
    if kind in READ:
        return kind
    if kind in LINES:
        return ".jsonl"
    if start_of(path).lstrip().startswith(b"{") and holds_records(path):
        return ".jsonl"
    return ".txt"


def holds_records(path: Path) -> bool:
    """Whether a text that begins with "{" is JSON by records, and not one object over several
    lines, as a notebook is."""
    try:
        start = records.start_of(path)
    except ValueError:              # damaged: whoever reads the file says so
        return False
    record = records.fields_of(start.record)
    return bool(record) and (not start.is_alone or records.is_conversation(record))


def start_of(path: Path) -> bytes:
    """The first bytes of a file, decompressed."""
    with open_bytes(path) as file:
        return file.peek(START)[:START]


def is_text(path: Path) -> bool:
    """Whether a file begins as text in UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start_of(path))
    except ValueError:
        return False
    return not is_binary(text)


def is_refused(path: Path) -> bool:
    """Whether a file is of a kind that is not read, by its name and, where that tells little, by
    its bytes."""
    if kind_of(path.name) in ALSO_TEXT and is_text(path):
        return False
    return kind_of(path.name) in NOT_READ


def is_binary(text: str) -> bool:
    """Whether a text has more NUL bytes than one that is damaged."""
    return text.count("\0") > len(text) // 50


def is_read_by_content(path: Path, field: str) -> bool:
    """Whether a file of a folder, whose ending tells nothing, holds documents: a table, or lines of
    JSON with this field."""
    try:
        kind = how_read(path)
        return kind != ".txt" and (table_kind(path) is not None
                                   or is_document(path, field))
    except ValueError:
        return False
