"""The files of a data set: written by prepare.py, read by data.py.

    train_000000.bin, ...       shards of the splits train and val, in llm.c's format (data.py)
    train_000000.learn, ...     beside a shard of conversations: a byte for each of its tokens, the
                                sum of LEARNT and BEGINS
    hf-HASH.json                the tokenizer, if it is of a file (tokenizers.py)
    jinja-HASH.jinja            the template of conversations, if it is a model's own
    meta.json                   written last: the tokenizer's name, counts, a fingerprint
"""
import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from base.errors import errors_with_path

SPLITS = ("train", "val")
DEFAULT_OUT = Path("data/python")
HEADER_BYTES = 1024
FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}          # magic, version: type of a token
FLAGS_SUFFIX = ".learn"
LEARNT = 1                  # an answer's token
BEGINS = 2                  # a conversation's first token
OPTIONAL = ("tokenizer_file", "template", "template_file", "ends")      # entries of meta.json
SAMPLE_BYTES = 1 << 16      # of each file
FEW_TOKENS = 1 << 14        # 128 windows of 128


def append_tokens(directory: Path, split: str, tokens, written: int, shard_tokens: int,
                  flags=None) -> None:
    """Append tokens (n,), uint16 or uint32, to the shards of a split, which hold `written` tokens
    so far, and of conversations the flags (n,) of these tokens to the files beside them."""
    itemsize = tokens.dtype.itemsize
    [magic_and_version] = [form for form, dtype in FORMATS.items() if dtype == f"<u{itemsize}"]
    while len(tokens) > 0:
        number, held = divmod(written, shard_tokens)        # the shard, and its tokens so far
        part = tokens[:shard_tokens - held]
        path = directory / f"{split}_{number:06d}.bin"
        with errors_with_path(path), open(path, "r+b" if held else "wb") as file:
            file.write(np.array([*magic_and_version, held + len(part)], "<i4"))
            file.seek(HEADER_BYTES + itemsize * held)   # the bytes in between read as zeros
            file.write(part)
        if flags is not None:
            path = path.with_suffix(FLAGS_SUFFIX)
            with errors_with_path(path), open(path, "ab") as file:
                file.write(flags[:len(part)])
            flags = flags[len(part):]
        written += len(part)
        tokens = tokens[len(part):]


def read_header(path: Path) -> tuple[str, int]:
    """The type of a shard's tokens, and how many it has. Raises ValueError if the header and the
    size of the file do not match."""
    size = path.stat().st_size
    magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]    # 0: cut off
    dtype = FORMATS.get((magic, version))
    if dtype is None:
        raise ValueError(f"{path} begins with {magic}, {version} and has {size} bytes: it has no "
                         f"header of llm.c's format: make shards from the text by python data.py")
    expected = HEADER_BYTES + np.dtype(dtype).itemsize * count
    if count < 1 or size != expected:
        raise ValueError(f"{path} is not a complete shard: it has {size} bytes, and {count} tokens "
                         f"take {expected}: remove it, and make or copy it again")
    return dtype, count


def open_flags(tokens: np.memmap) -> np.memmap:
    """The flags of a shard's tokens (n,), uint8 (n,). Raises ValueError if their file is missing or
    damaged."""
    path = Path(tokens.filename).with_suffix(FLAGS_SUFFIX)
    size = path.stat().st_size if path.exists() else None
    if size != len(tokens):
        problem = "is missing" if size is None else f"has {size} bytes for {len(tokens)} tokens"
        raise ValueError(f"{path} {problem}: it says which tokens are learnt: copy all files "
                         f"again, or remove them and run data.py again")
    return np.memmap(path, "u1", "r")


def find_shards(directory: Path, split: str) -> list[Path]:
    """The shards of a split, by a whole word in their names: retrieval_train_0.bin is no "val".
    Raises FileNotFoundError if there are none."""
    allow_open_files()
    shards = [path for path in sorted(directory.glob("[!.]*.bin"))
              if re.search(rf"(?<![a-z]){split}(?![a-z])", path.name)]
    if not shards:
        problem = f"has no {split} shards" if directory.is_dir() else "is no directory"
        raise FileNotFoundError(
            f"{directory} {problem}: give a directory that data.py has made: {DEFAULT_OUT} by "
            f"`python data.py`, data/NAME by --dataset NAME, DIR by --input FILE --out DIR")
    return shards


def read_meta(directory: Path) -> dict:
    """The entries of meta.json that training needs. Shards without it that data.py did not make
    are taken for GPT-2's tokens. Their fingerprint is of samples of the files. Raises ValueError if
    meta.json is damaged or lost."""
    path = directory / "meta.json"
    try:
        written = json.loads(path.read_text())
        meta = {key: written[key]
                for key in ("tokenizer", "vocab_size", "bytes_per_token", "fingerprint")}
        meta["tokens"] = dict(written.get("tokens", {}))
        meta |= {key: written.get(key) for key in OPTIONAL}
    except FileNotFoundError:
        if (directory / "train_000000.bin").exists():       # data.py's own name
            raise ValueError(f"{directory} has no meta.json: copy it, too, or remove the shards "
                             f"and run data.py again") from None
        files = sorted(directory.glob("[!.]*.bin"))
        return dict(tokenizer="gpt2", vocab_size=50257, bytes_per_token=None, tokens={},
                    template=None, fingerprint=sha256_of_samples(files))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and the shards, and run data.py "
                         f"again") from None
    refuse_old(meta["tokenizer"], f"{path}: ")
    for key in ("tokenizer_file", "template_file"):
        if meta[key] is not None:               # the name of a file: its content is returned
            with errors_with_path(directory / meta[key]):
                meta[key] = (directory / meta[key]).read_text(encoding="utf-8")
    return meta


def check_shards(directory: Path, split: str, shards, meta: dict, seq_len: int) -> None:
    """Raise ValueError if the shards of a split have other tokens than their read_meta says, or of
    text too few for a window."""
    n_tokens = sum(map(len, shards))
    expected = meta["tokens"].get(split, n_tokens)
    if n_tokens != expected:
        raise ValueError(f"{directory} has {n_tokens:,} {split} tokens, but its meta.json says "
                         f"{expected:,}: a shard is missing or of other data: copy all files again")
    longest = max(map(len, shards))
    if meta["template"] is None and longest <= seq_len:
        raise ValueError(f"{shards[-1].filename}: {longest} tokens are too few for a window of "
                         f"{seq_len} + 1: give more text, or a smaller --seq-len")


def tell_small_validation(train: int, val: int) -> list[str]:
    """A sentence where few tokens validate beside those that train; nothing where there are enough.
    """
    if val >= min(train / 200, FEW_TOKENS):
        return []
    return [f"{val:,} tokens validate beside {train:,} that train: the loss of so few says little: "
            f"give data.py a longer file named val.txt, or another --seed, and a new --out"]


def refuse_old(tokenizer: str, where="") -> None:
    """Raise ValueError if a tokenizer has the name that older versions gave one of a file."""
    if str(tokenizer).startswith(("json-", "bpe-")):
        flag = "--train-tokenizer N" if tokenizer.startswith("bpe-") else "--tokenizer FOLDER"
        raise ValueError(f"{where}the tokenizer {tokenizer} is of an older version and not read: "
                         f"make its data again, python data.py --input FILE {flag} --out NEW, or "
                         f"its model, python -m tools.huggingface import FOLDER NEW.pt")


def sha256_of_samples(paths) -> str:
    """The sha256 of these files' names, sizes and beginnings. It tells two data sets apart in
    seconds, where reading 100 GB takes minutes."""
    digest = hashlib.sha256()
    for path in paths:
        with errors_with_path(path), open(path, "rb") as file:
            digest.update(repr((path.name, path.stat().st_size)).encode() + file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system allows: each mapped shard takes
    one."""
    with suppress(ImportError, OSError, ValueError):    # Windows; macOS refuses "unlimited"
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
