"""The documents of a file. The two passes (passes.py) read them.

    .txt      a document; several, if lines that are exactly <|endoftext|> stand between them
    .jsonl    a document on each line, in the field "text" of an object
    .eot      TinyStories as it is downloaded: as .txt, without white space around each document

UTF-8, or UTF-16 and UTF-32 with their byte-order marks, which are not part of the text. A NotText
stands for a document that cannot be read, so that one in a thousand can be left out.
"""
import codecs
import io
import json
import os
import re
import shlex
from itertools import chain, groupby
from pathlib import Path

from corpus.kinds import what_it_is
from corpus.messages import named, note

EOT = "<|endoftext|>"
BLOCK = 1 << 18             # characters or bytes read at once, and characters encoded at once
MOST_HELD = 1 << 16         # white space that is held back until more text comes
MOST_NOT_TEXT = 1000        # one document in so many may be left out
LFS_POINTER = "version https://git-lfs"


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le",    # before UTF-16's, which
         codecs.BOM_UTF32_BE: "utf-32-be", codecs.BOM_UTF16_LE: "utf-16-le",    # begins as this
         codecs.BOM_UTF16_BE: "utf-16-be"}
# A line of <|endoftext|>. The line end before it belongs to it, the one behind it does not.
EOT_LINE = re.compile(r"\n[^\S\n]*<\|endoftext\|>[^\S\n]*(?=\n)")


def open_text(path: Path):
    """(the file behind its byte-order mark, its encoding)."""
    file = open(path, "rb")
    start = file.peek(4)
    for mark, encoding in MARKS.items():
        if start.startswith(mark):
            file.seek(len(mark))
            return file, encoding
    return file, "utf-8"


def read_documents(path: Path):
    """Yield every document of a file, as an iterable of strings: joined, they are its text. A
    NotText among them says why the rest cannot be read. Raises ValueError if no document can."""
    with named(path):
        file, encoding = open_text(path)
        with file:
            if path.suffix == ".eot":
                yield from read_stories(path, file)
            elif path.suffix.lower() == ".jsonl":
                yield from read_lines(path, file, encoding)
            else:
                numbered = cut_at_eot(read_blocks(path, file, encoding))
                for _, pieces in groupby(numbered, key=lambda piece: piece[0]):
                    yield (text for _, text in pieces)


def read_blocks(path: Path, file, encoding: str):
    """Yield the text of a file by blocks, with its line ends."""
    with io.TextIOWrapper(file, encoding, newline="") as wrapped:
        try:
            while block := wrapped.read(BLOCK):
                is_binary = "\0" in block and block.count("\0") > len(block) // 50
                if is_binary or block.startswith(LFS_POINTER):
                    kind = what_it_is(path) or guess(path, block.encode())
                    yield NotText(f"{path} is not {encoding.upper()} text: {kind}")
                    return
                yield block
        except UnicodeDecodeError as error:     # error.object are the bytes that were read last
            offset = file.tell() - len(error.object) + error.start
            kind = what_it_is(path) or guess(path, error.object)
            yield NotText(f"{path} is not {encoding.upper()} text, see byte {offset} "
                          f"(0x{error.object[error.start]:02x}): {kind}")


def guess(path: Path, raw: bytes) -> str:
    """What a file probably is of which these bytes are not UTF-8, and what to do."""
    odd, even = raw[1::2].count(0), raw[::2].count(0)
    if odd + even <= len(raw) // 50:
        encoding = "WINDOWS-1252"
        problem = ""
    else:
        if odd + even > len(raw) // 2 and min(odd, even) > len(raw) // 8:
            encoding = "UTF-32"
        elif 2 * min(odd, even) > max(odd, even):
            return f"{(odd + even) / len(raw):.0%} of it are NUL bytes: leave it out"
        else:
            encoding = "UTF-16LE" if odd > even else "UTF-16BE"
        problem = f"it looks like {encoding} without a byte-order mark: "
    return (f"{problem}convert it, as by iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > "
            f"NEW{path.suffix}, or leave it out")


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


def read_lines(path: Path, file, encoding: str):
    """Yield the documents of a .jsonl file."""
    lines = file if encoding == "utf-8" else recode(file, encoding)
    try:
        is_first = True
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if is_first:
                check_first_line(path, line.strip())
                is_first = False
            try:
                text = json.loads(line)["text"].removeprefix("\ufeff")
                text.encode()       # refuses half a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                text = NotText(f"{path} line {number}{why_no_text(line)}")
            yield [text]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {encoding.upper()} text ({error.reason}): it may be cut "
                         f"off: copy it again") from None


def recode(file, encoding: str):
    """Yield the lines of a file in UTF-8."""
    with io.TextIOWrapper(file, encoding, newline="\n") as wrapped:
        for line in wrapped:
            yield line.encode()


def check_first_line(path: Path, line: bytes) -> None:
    """Raise ValueError if a .jsonl file is something else."""
    name = shlex.quote(str(path))
    if line.count(0) > len(line) // 50 or line.startswith(LFS_POINTER.encode()):
        kind = what_it_is(path) or guess(path, line)
        raise ValueError(f"{path} is not UTF-8 text: {kind}")
    if line.startswith(b"["):
        raise ValueError(f"{path} is a JSON array, not an object on each line: jq -c '.[]' {name} "
                         f"> NEW.jsonl makes a .jsonl of it")
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        if line.startswith(b"{") and error.pos >= len(line.decode(errors="replace")):
            raise ValueError(f"{path} line 1 ends within a JSON object, and each line must hold a "
                             f"whole one: jq -c . {name} > NEW.jsonl makes a .jsonl of it, unless "
                             f"it is cut off") from None
    except (ValueError, RecursionError):
        pass                    # why_no_text says it


JSON_NAMES = {type(None): "null", bool: "true or false", int: "a number", float: "a number",
              list: "an array", dict: "an object", str: "a string"}


def why_no_text(line: bytes) -> str:
    """What is wrong with a line of .jsonl, after its place."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f' is not JSON with a string "text": {error}'
    if not isinstance(value, dict):
        return f' is {JSON_NAMES[type(value)]}, not an object with a string "text"'
    if "text" not in value:
        names = ", ".join(f'"{name}"' for name in list(value)[:5]) or "no field"
        return f' has no field "text", but {names}: rename the one with the text'
    if not isinstance(value["text"], str):
        return f': "text" is {JSON_NAMES[type(value["text"])]}, not a string'
    return ': "text" has half a surrogate pair, which is no character: correct the line'


def check_problems(problems: list[NotText], documents: int, at_end=False) -> None:
    """Of so many documents these could not be read: one in a thousand is left out, with a note; a
    ValueError if they are more, at the end or once most documents are so."""
    count = len(problems)
    most = documents // MOST_NOT_TEXT if at_end else max(10, documents // 2)
    named = "; ".join(map(str, problems[:3]))
    if count > most:
        if count > 3:
            named += "; ..."
        raise ValueError(f"{named} ({count:,} of {documents:,} documents; one in {MOST_NOT_TEXT:,} "
                         f"would be left out)")
    if count and at_end:
        note(f"{count:,} of {documents:,} documents are left out: {named}")
