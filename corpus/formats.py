"""The documents of files, downloads, the standard library's own source. data.py calls it.

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
import sys
import sysconfig
import time
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path

from corpus.disk import named, sha256_of, what_it_is
from corpus.inputs import note

EOT = "<|endoftext|>"
BLOCK = 1 << 18             # characters or bytes read at once, and characters encoded at once
MOST_HELD = 1 << 16         # white space that is held back until more text comes
MOST_NOT_TEXT = 1000        # one document in so many may be left out
LFS_POINTER = "version https://git-lfs"


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


# ---- The documents of a file -----------------------------------------------------------------

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


# ---- The standard library, and downloads ------------------------------------------------------

def standard_library() -> list[Path]:
    """The interpreter's own .py files, without tests and without files that cannot be read."""
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        if not excluded & set(path.relative_to(root).parts):
            with suppress(OSError, ValueError):
                path.read_text(encoding="utf-8")
                files.append(path)
    return files


def progress(label: str, total: int | None = None, done: int = 0):
    """Return note(n), to be called when n more bytes are done. Every five seconds it prints how
    many are, of `total` if that is known, to standard error."""
    of_total = f" of {total / 1e6:,.1f}" if total else ""
    printed = time.monotonic()

    def note(count: int) -> None:
        nonlocal done, printed
        done += count
        if time.monotonic() - printed >= 5:
            print(f"{label}: {done / 1e6:,.1f}{of_total} MB", file=sys.stderr, flush=True)
            printed = time.monotonic()
    return note


HUB = "https://huggingface.co"
# name: (address, sha256 or None to check the length alone, suffix of the file: how it is read)
DOWNLOADS = {
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", ".txt"),
    "tinystories": (
        f"{HUB}/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt",
        None, ".eot"),
    "fineweb": (f"{HUB}/datasets/kjj0/fineweb10B-gpt2/resolve/main/", None, ".bin"),
}
TIMEOUT = (10, 30)          # seconds to connect, and of silence
FINEWEB_SHARDS = 103        # training shards of 100M tokens each; there is one validation shard


def last_cause(error: BaseException) -> BaseException:
    """The first of the errors that led to this one: requests' own message lists five classes."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def read_url(url: str) -> bytes:
    """The bytes at this address. Raises a RequestException, which is an OSError."""
    import requests
    reply = requests.get(url, timeout=TIMEOUT)
    reply.raise_for_status()
    return reply.content


def download(url: str, path: Path, sha256: str | None = None) -> None:
    """Download url to path, which appears only when its length and its sha256 are right. Until then
    the bytes are in path.part. After a lost connection the next try, or the next run, continues
    there; wrong bytes are discarded. Raises ConnectionError after four tries."""
    import requests
    if path.exists() and sha256 in (None, sha256_of(path)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.touch()
    for seconds in (0, 1, 2, 4):
        time.sleep(seconds)
        size = part.stat().st_size
        headers = {"Range": f"bytes={size}-", "Accept-Encoding": "identity"}
        try:
            with (requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply,
                  named(part), open(part, "ab") as file):
                if reply.status_code in (200, 416):     # the whole file; nothing after this byte
                    size = file.truncate(0)
                reply.raise_for_status()
                total = size + int(reply.headers.get("Content-Length", 0))
                note = progress(path.name, total, size)
                for block in reply.iter_content(BLOCK):
                    size += file.write(block)
                    note(len(block))
        except requests.RequestException as problem:
            error = last_cause(problem)
            continue
        is_whole = size == total > 0 if sha256 is None else sha256_of(part) == sha256
        if is_whole:
            os.replace(part, path)
            return
        error = f"got {size} bytes that are not the file's"
        os.truncate(part, 0)
    raise ConnectionError(f"cannot download {url} ({error}): run it again later, "
                          f"it continues where it stopped, or put the file at {path}")
