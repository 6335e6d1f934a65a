"""Files from the network: whole or not there. For the data sets and vocabularies of data.py."""
import hashlib
import os
import time
from pathlib import Path

from base.errors import errors_with_path, first_cause
from corpus import progress

HUB = "https://huggingface.co"
# name: (address, sha256 or None to check the length alone)
DOWNLOADS = {
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "tinystories": (
        f"{HUB}/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt",
        None),
    "fineweb": (f"{HUB}/datasets/kjj0/fineweb10B-gpt2/resolve/main/", None),
}
TIMEOUT = (10, 30)          # seconds to connect, and of silence
FINEWEB_SHARDS = 103        # training shards of 100M tokens each; there is one validation shard
BLOCK = 1 << 18             # bytes


def sha256_of(*paths) -> str:
    """The sha256 of these files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with errors_with_path(path), open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def address_of(dataset: str) -> str:
    return DOWNLOADS[dataset][0].replace(HUB, os.environ.get("HF_ENDPOINT", HUB))


def download_fineweb(out: Path, count: int) -> None:
    """Download the first `count` training shards of FineWeb and its validation shard, in GPT-2's
    tokens, as llm.c and modded-nanogpt use them."""
    if (out / "meta.json").exists():
        raise ValueError(f"{out} holds other shards, see meta.json: give another --out")
    for name in ["val_000000"] + [f"train_{i:06d}" for i in range(1, count + 1)]:
        download(f"{address_of('fineweb')}fineweb_{name}.bin", out / f"fineweb_{name}.bin")


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
                  errors_with_path(part), open(part, "ab") as file):
                if reply.status_code in (200, 416):     # the whole file; nothing after this byte
                    size = file.truncate(0)
                reply.raise_for_status()
                total = size + int(reply.headers.get("Content-Length", 0))
                count_bytes = progress(path.name, total, size)
                for block in reply.iter_content(BLOCK):
                    size += file.write(block)
                    count_bytes(len(block))
        except requests.RequestException as problem:
            error = first_cause(problem)
            continue
        if (size == total > 0) if sha256 is None else (sha256_of(part) == sha256):
            os.replace(part, path)
            return
        error = f"got {size} bytes that are not the file's"
        os.truncate(part, 0)
    raise ConnectionError(f"cannot download {url} ({error}): run it again later, "
                          f"it continues where it stopped, or put the file at {path}")
