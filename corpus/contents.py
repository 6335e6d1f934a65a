"""How a file is read. Its bytes say whether it is a table; otherwise a known ending decides; the
bytes decide for all other files."""
import codecs
import shlex
from pathlib import Path

from corpus import records
from corpus.compressed import open_bytes
from corpus.file_kinds import (KINDS, LINES, READ, START, WEB_PAGES, kind_of, kind_of_start,
                               table_kind, what_it_is, why_not_text)
from corpus.records import is_document, open_text


def how_read(path: Path) -> str:
    """The ending of the files that are read as this one: .txt, .jsonl, .json, .parquet, .arrow or
    .eot. Raises ValueError if it cannot be decompressed."""
    kind = table_kind(path)
    if kind is not None:
        return kind
    kind = kind_of(path.name)
    if kind in (*READ, ".eot"):
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
    """Whether a file begins as text of an encoding that is read."""
    try:
        if special_kind_of(start_of(path)) is not None:
            return False
        file, encoding = open_text(path)
        with file:
            start = file.peek(START)[:START]
        text = codecs.getincrementaldecoder(encoding)().decode(start)
    except ValueError:
        return False
    return text.count("\0") <= len(text) // 50


def special_kind_of(start: bytes):
    """The Kind of a file that begins so and is no text to train on. A web page may be that."""
    kind = kind_of_start(start)
    return None if kind in WEB_PAGES else kind


def why_not_read(path: Path) -> str | None:
    """Why a file that --input names is not read, whose ending tells nothing, and what to do; None
    if it is read."""
    if how_read(path) != ".txt" or is_text(path):
        return None
    name = shlex.quote(str(path))
    start = start_of(path)
    kind = special_kind_of(start)
    for one in KINDS:                   # .docx and .zip begin alike
        if kind_of(path.name) in one.suffixes.split() and (
                start.startswith(one.first_bytes) and one.at == 0):
            kind = one
            break
    if path.suffix == ".bin" and what_it_is(path) is not None:
        return what_it_is(path)
    if kind is None:
        return why_not_text(path, start, start)
    clause = f"{kind.clause}: " if kind.clause else ""
    return clause + kind.advice.replace("FILE", name).replace("STEM", path.stem)


def is_read_by_content(path: Path, field: str) -> bool:
    """Whether a file of a folder, whose ending tells nothing, holds documents: a table, or lines of
    JSON with this field."""
    try:
        kind = how_read(path)
        return kind != ".txt" and (table_kind(path) is not None
                                   or is_document(path, field))
    except ValueError:
        return False
