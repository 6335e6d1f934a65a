"""The documents of a file. Two passes read them: dedup_and_split.py, encode.py.

    .txt      a document; several, if lines that are exactly <|endoftext|> stand between them. So
              is any other file of text
    .jsonl    a document on each line, in the field "text" of an object; so does .json, which may
              also be an array of them
    .parquet  a document in each row, in the column "text"; so does .arrow

Lines and rows may also hold conversations (chat_records.py). Text is UTF-8. The name says how it is
read. Text and lines may be compressed: .gz, .zst.

A text is read by blocks, so its file may be larger than memory. A Refused stands for a document, or
the rest of one.
"""
import io
import json
import re
from itertools import groupby
from pathlib import Path

from base.errors import errors_with_path
from corpus import EOT
from corpus.chat_records import Refused, check_characters, form_of, messages_of, names_of
from corpus.file_formats import BLOCK, RECORDS, TABLES, kind_of, open_bytes, read_table

EOT_LINE = re.compile(r"(?m)^[^\S\n]*<\|endoftext\|>[^\S\n]*$")
LONGEST_LINE = 1 << 20      # characters up to which a line is not cut


class Conversation(list):
    """The messages of a record. `place`: its file and line."""


def read_documents(path: Path, field: str | None = "text"):
    """Yield every document of a file as an iterable: of strings, which joined are its text, or
    without a field of the messages of a conversation. A Refused among them says why the rest cannot
    be read. Raises ValueError if the file is damaged."""
    with errors_with_path(path):
        if kind_of(path) not in RECORDS:
            if field is None:
                raise ValueError(f"{path}: conversations are lines of JSON or rows of Parquet: "
                                 f"prepare text by itself, in another --out")
            for _, pieces in groupby(cut_at_eot(read_blocks(path)), key=lambda piece: piece[0]):
                yield (text for _, text in pieces)
            return
        for place, record in read_records(path, field):
            try:
                if isinstance(record, Refused):
                    raise record
                if field is not None:
                    document = [text_of(record, field)]
                else:
                    document = Conversation(messages_of(record))
                    document.place = f"{path} {place}"
            except Refused as error:
                document = [Refused(f"{path} {place}{error}")]
            yield document


def first_record(path: Path) -> dict:
    """The fields of a file's first record; empty if it has none, or is no record."""
    if kind_of(path) not in RECORDS:
        return {}
    _, record = next(read_records(path, None), (None, None))
    return record if isinstance(record, dict) else {}


def is_conversation(record: dict) -> bool:
    """Whether records with such fields are conversations."""
    return form_of(record) is not None and "text" not in record


# ---- Text ------------------------------------------------------------------------------------

def read_blocks(path: Path):
    """Yield the text of a file by blocks, which end with a line."""
    try:
        with open_bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="\n") as file:
            while block := file.read(BLOCK):
                block += file.readline(LONGEST_LINE)
                if "\0" in block:
                    raise Refused(f"{path} is no text: it has NUL bytes: if it is UTF-16, convert "
                                  f"it, as by iconv -f UTF-16 -t UTF-8, or leave it out")
                yield block
    except Refused as error:
        yield error
    except UnicodeDecodeError as error:
        yield Refused(f"{path} is not UTF-8 text ({error.reason}): if it is text, convert it, as "
                      f"by iconv -f WINDOWS-1252 -t UTF-8, or leave it out")


def cut_at_eot(blocks):
    """Yield (number of the document, text) of a file in blocks. Lines of <|endoftext|> cut it, and
    the white space around these lines is dropped. Without such a line the text is unchanged. Raises
    Refused behind such a line: the rest of the file may be many documents."""
    number = 0
    held = ""               # white space, which more text may follow
    begun = True            # whether the document has text; the white space before the first stays
    for block in blocks:
        if isinstance(block, Refused):
            if number > 0:
                raise block
            yield number, block
            return
        parts = EOT_LINE.split(block) if EOT in block else [block]
        for i, part in enumerate(parts):
            if i > 0:
                number += 1
                held = ""
                begun = False
            text = held + part if begun else part.lstrip()
            end = len(text.rstrip())
            if end > 0:
                yield number, text[:end]
                begun = True
            held = text[end:]
    if number == 0:
        yield number, held


# ---- Records ---------------------------------------------------------------------------------

def read_records(path: Path, field: str | None):
    """Yield (place, record) of each record of a file. A Refused stands in place of one that
    cannot be read. Raises ValueError if the file is damaged."""
    if kind_of(path) in TABLES:
        yield from ((f"row {number}", row) for number, row in enumerate(read_table(path, field), 1))
        return
    with open_bytes(path) as file:
        if file.peek(4)[:4].lstrip(b"\xef\xbb\xbf \r\n").startswith(b"["):      # held in memory
            try:
                records = json.loads(file.read())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} is no array of JSON: {error}: correct the file, or copy "
                                 f"it again if it is cut off") from None
            yield from ((f"record {number}", record) for number, record in enumerate(records, 1))
            return
        for number, line in enumerate(file, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):      # or a byte-order mark alone
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = Refused(f" is not JSON: {error}")
            yield f"line {number}", record


def text_of(record, field: str) -> str:
    """The text in this field. Raises Refused."""
    if not isinstance(record, dict):
        raise Refused(f' is not an object with a string "{field}"')
    text = record.get(field)
    if isinstance(text, str):
        check_characters(text)
        return text.removeprefix("\ufeff")
    if field in record:
        raise Refused(f': "{field}" is {type(text).__name__}, not a string')
    raise Refused(f' has no field "{field}", but {names_of(record)}: give the name of the one with '
                  f'the text to --text-field')
