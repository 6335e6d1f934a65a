"""The documents of a file. Two passes read them: dedup_and_split.py, encode.py.

    .txt      a document; several, if lines that are exactly <|endoftext|> stand between them. So
              is any other file of text
    .jsonl    a document on each line, in the field "text" of an object; so does .json
    .parquet  a document in each row, in the column "text"; so does .arrow

Lines and rows may also hold conversations (chat_formats.py). Text and lines are UTF-8, and may be
compressed by gzip or zstd. A NotText stands for a document that cannot be read, so that one in a
thousand can be left out.
"""
import io
import re
from functools import partial
from itertools import chain, groupby
from pathlib import Path

from base.errors import named
from corpus.chat_formats import columns_of_messages, messages_of
from corpus.compressed import BLOCK
from corpus.content_type import how_read, is_binary
from corpus.file_kinds import how_to_convert
from corpus.json_stream import open_text
from corpus.records import (START, NotText, UnreadFields, column_of_text, parse_records, read_json,
                            read_rows, text_of_record)

EOT = "<|endoftext|>"
LFS_POINTER = b"version https://git-lfs"
MOST_HELD = 1 << 16         # white space that is held back until more text comes
# A line of <|endoftext|>. The line end before it belongs to it, the one behind it does not.
EOT_LINE = re.compile(r"\n[^\S\n]*<\|endoftext\|>[^\S\n]*(?=\n)")


def read_documents(path: Path, field: str | None = "text", unread: UnreadFields | None = None):
    """Yield every document of a file, as an iterable of strings: joined, they are its text. A
    NotText among them says why the rest cannot be read. Raises ValueError if no document can.
    Without a field: every conversation, as a list of chat_message.Message. `unread` counts the
    fields that are not read."""
    if unread is None:
        unread = UnreadFields()
    with named(path):
        kind = how_read(path)
        if field is None and kind == ".txt":
            raise ValueError(f"{path}: conversations are lines of JSON or rows of Parquet: prepare "
                             f"text by itself, in another --out")
        if kind != ".txt":
            choose = columns_of_messages
            parse = partial(messages_of, unread=unread)
            if field is not None:
                choose = partial(column_of_text, field)
                parse = partial(text_of_record, field=field, unread=unread)
            is_json = kind in (".jsonl", ".json")
            records = read_json(path) if is_json else read_rows(path, choose)
            yield from parse_records(path, records, parse)
            return
        with open_text(path) as file:
            numbered = cut_at_eot(read_blocks(path, file))
            for _, pieces in groupby(numbered, key=lambda piece: piece[0]):
                yield (text for _, text in pieces)


def read_blocks(path: Path, file):
    """Yield the text of a file by blocks, with its line ends."""
    start = file.peek(START)[:START]
    if start.startswith(LFS_POINTER):
        yield NotText(f"{path} is a pointer of Git LFS in place of the file: run `git lfs pull` in "
                      f"the repository that it is from")
        return
    with io.TextIOWrapper(file, "utf-8", newline="") as wrapped:
        try:
            while block := wrapped.read(BLOCK):
                if is_binary(block):
                    yield NotText(f"{path} is not UTF-8 text: it has NUL bytes: "
                                  f"{how_to_convert(path, start)}")
                    return
                yield block
        except UnicodeDecodeError as error:     # error.object are the bytes that were read last
            offset = file.tell() - len(error.object) + error.start
            yield NotText(f"{path} is not UTF-8 text, see byte {offset} "
                          f"(0x{error.object[error.start]:02x}): {how_to_convert(path, start)}")


def cut_at_eot(blocks):
    """Yield (number of the document, text) for a file in blocks. Lines of <|endoftext|> cut it, and
    the white space around these lines is dropped. Without such a line the text is unchanged."""
    number = 0
    held = "\n"             # what may belong to such a line; a line end stands before each document
    starts = True           # `held` is the start of a document
    for block in chain(blocks, ["\n"]):
        if isinstance(block, NotText):
            yield number, block
            return
        text = held + block
        if "|" in text and EOT in text:     # one character is found 40 times faster
            *whole, text = EOT_LINE.split(text)
            for part in whole:
                part = part.removeprefix("\n") if starts else part
                part = part.lstrip() if starts and number > 0 else part
                if part.strip():
                    yield number, part.rstrip()
                number += 1
                starts = True
        if starts and number > 0:
            text = "\n" + text.lstrip()
        end = end_of_text(text)
        if len(text) - end > MOST_HELD:
            end = len(text)
        if end > 0:
            yield number, text[int(starts):end]
            starts = False
        held = text[end:]
    if number == 0:
        yield number, held[int(starts):-1]


def end_of_text(text: str) -> int:
    """Where the white space begins that ends a text, or ends it before the beginning of a line that
    may become <|endoftext|>."""
    end = len(text)
    line = text.rfind("\n")
    if line >= 0 and EOT.startswith(text[line:].strip()):
        end = line
    return len(text[:end].rstrip())
