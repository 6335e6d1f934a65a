"""Where text comes from: files, downloads, the standard library's own source. data.py calls it.
"""
import json
import os
import sys
import sysconfig
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from runtime.files import sha256_of

EOT = "<|endoftext|>"
BLOCK = 1 << 18             # characters or bytes read at once, and characters encoded at once


def last_cause(error: BaseException) -> BaseException:
    """The first of the errors that led to this one: requests' own message lists five classes."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def find_files(paths) -> list[Path]:
    """These .txt and .jsonl files, and those in these folders. Raises ValueError or OSError."""
    files = []
    for path in paths:
        path.stat()                     # raises FileNotFoundError
        candidates = [path]
        if path.is_dir():
            candidates = sorted(file for file in path.rglob("*") if file.is_file())
        found = [file for file in candidates if file.suffix.lower() in (".txt", ".jsonl")]
        if not found:
            raise ValueError(f"{path}: only .txt and .jsonl are read: convert or rename it")
        files += found
    return files


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


def read_documents(path: Path):
    """Yield every document of a file, as an iterable of strings: joined, they are its text. Raises
    ValueError, which says where, if it is no text."""
    if path.suffix == ".eot":           # TinyStories: lines of <|endoftext|> between the documents
        with open(path, "rb") as file:
            for is_end, lines in groupby(file, lambda line: line.strip() == EOT.encode()):
                if not is_end:
                    yield [b"".join(lines).decode().strip()]
    elif path.suffix.lower() == ".jsonl":
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                    text.encode()       # refuses half a surrogate pair
                except KeyError:
                    raise ValueError(f'{path} line {number} has no field "text"') from None
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    raise ValueError(f'{path} line {number} is not JSON with a string "text": '
                                     f"{error}") from None
                yield [text]
    else:
        yield read_blocks(path)


def read_blocks(path: Path):
    """Yield the text of a file by blocks, with its line ends."""
    with open(path, encoding="utf-8", newline="") as file:
        try:
            while block := file.read(BLOCK):
                yield block
        except UnicodeDecodeError as error:     # error.object are the bytes that were read last
            offset = file.buffer.tell() - len(error.object) + error.start
            raise ValueError(f"{path} is not UTF-8 text, see byte {offset}: convert it") from None


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
                  open(part, "ab") as file):
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
