"""The documents of a file. Two passes read them: index.py, encode.py.

    .txt      a document; several, if lines that are exactly <|endoftext|> stand between them. So
              is any other file of text
    .jsonl    a document on each line, in the field "text" of an object; so does .json
    .parquet  a document in each row, in the column "text"; so does .arrow
    .eot      TinyStories as it is downloaded: as .txt, without white space around each document

Lines and rows may also hold conversations (messages.py). Text and lines may be compressed by gzip
or zstd. UTF-8, or UTF-16 and UTF-32 with their byte-order marks, which are not part of the text. A
NotText stands for a document that cannot be read, so that one in a thousand can be left out.
"""
import io
import re
from functools import partial
from itertools import chain, groupby
from pathlib import Path

from base.errors import named
from corpus.compressed import BLOCK
from corpus.contents import how_read
from corpus.file_kinds import LFS_POINTER, START, why_not_text
from corpus.messages import messages_of, read_table
from corpus.records import NotText, open_text, read_records, read_texts, text_of_record
from corpus.unread_fields import UnreadFields

EOT = "<|endoftext|>"
MOST_HELD = 1 << 16         # white space that is held back until more text comes
# A line of <|endoftext|>. The line end before it belongs to it, the one behind it does not.
EOT_LINE = re.compile(r"\n[^\S\n]*<\|endoftext\|>[^\S\n]*(?=\n)")


def read_documents(path: Path, field: str | None = "text", unread: UnreadFields | None = None):
    """Yield every document of a file, as an iterable of strings: joined, they are its text. A
    NotText among them says why the rest cannot be read. Raises ValueError if no document can.
    Without a field: every conversation, as a list of messages.Message. `unread` counts the fields
    that are not read."""
    if unread is None:
        unread = UnreadFields()
    with named(path):
        kind = how_read(path)
        if field is None and kind == ".txt":
            raise ValueError(f"{path}: conversations are lines of JSON or rows of Parquet: prepare "
                             f"text by itself, in another --out")
        if kind in (".parquet", ".arrow"):
            if field is None:
                yield from read_table(path, unread)
            else:
                yield from read_texts(path, field, unread)
            return
        if kind in (".jsonl", ".json"):
            parse = partial(messages_of, unread=unread)
            if field is not None:
                parse = partial(text_of_record, field=field, unread=unread)
            yield from read_records(path, parse)
            return
        file, encoding = open_text(path)
        with file:
            if kind == ".eot":
                yield from read_stories(path, file)
            else:
                numbered = cut_at_eot(read_blocks(path, file, encoding))
                for _, pieces in groupby(numbered, key=lambda piece: piece[0]):
                    yield (text for _, text in pieces)


def read_blocks(path: Path, file, encoding: str):
    """Yield the text of a file by blocks, with its line ends."""
    start = file.peek(START)
    with io.TextIOWrapper(file, encoding, newline="") as wrapped:
        try:
            while block := wrapped.read(BLOCK):
                is_binary = "\0" in block and block.count("\0") > len(block) // 50
                if is_binary or start.startswith(LFS_POINTER):
                    why = why_not_text(path, start, block.encode())
                    yield NotText(f"{path} is not {encoding.upper()} text: {why}")
                    return
                yield block
        except UnicodeDecodeError as error:     # error.object are the bytes that were read last
            offset = file.tell() - len(error.object) + error.start
            why = why_not_text(path, start, error.object)
            yield NotText(f"{path} is not {encoding.upper()} text, see byte {offset} "
                          f"(0x{error.object[error.start]:02x}): {why}")


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


def read_stories(path: Path, file):
    """Yield the documents between lines of <|endoftext|>, without white space around them."""
    for is_end, lines in groupby(file, lambda line: line.strip() == EOT.encode()):
        if not is_end:
            try:
                yield [b"".join(lines).decode().strip()]
            except UnicodeDecodeError as error:
                yield [NotText(f"{path} is not UTF-8 text ({error}): download it again")]
