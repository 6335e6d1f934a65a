"""The files of a data set: written by prepare.py, read by mixtures.py.

    train_000000.bin, ...       shards of the splits train and val, in llm.c's format (data.py)
    train_000000.learn, ...     beside a shard of conversations: a byte for each of its tokens, the
                                sum of LEARNT and BEGINS
    bpe-HASH.tiktoken, ...      the tokenizer, if it is of a file (tokenizers.py)
    jinja-HASH.json             the template of conversations, if it is a model's own
    meta.json                   written last: the tokenizer's name, counts, a fingerprint
"""
import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from base.errors import named
from corpus.jinja_templates import OWN
from corpus.tokenizers import (file_name, get_tokenizer, has_added, is_of_file, read_kept,
                               shown_token)

SPLITS = ("train", "val")
DEFAULT_OUT = Path("data/python")
HEADER_BYTES = 1024
FORMATS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}          # type of a token: magic, version
FLAGS_SUFFIX = ".learn"
LEARNT = 1                  # an answer's token
BEGINS = 2                  # a conversation's first token
SAMPLES, SAMPLE_BYTES = 8, 8192         # of each file, at equal distances


def append_tokens(directory: Path, split: str, tokens, written: int, shard_tokens: int,
                  flags=None) -> None:
    """Append tokens (n,), uint16 or uint32, to the shards of a split, which hold `written` tokens
    so far, and of conversations the flags (n,) of these tokens to the files beside them."""
    itemsize = tokens.dtype.itemsize
    while len(tokens) > 0:
        number, held = divmod(written, shard_tokens)        # the shard, and its tokens so far
        part = tokens[:shard_tokens - held]
        path = directory / f"{split}_{number:06d}.bin"
        with named(path), open(path, "r+b" if held else "wb") as file:
            file.write(np.array([*FORMATS[f"<u{itemsize}"], held + len(part)], "<i4"))
            file.seek(HEADER_BYTES + itemsize * held)   # the bytes in between read as zeros
            file.write(part)
        if flags is not None:
            path = path.with_suffix(FLAGS_SUFFIX)
            with named(path), open(path, "ab") as file:
                file.write(flags[:len(part)])
            flags = flags[len(part):]
        written += len(part)
        tokens = tokens[len(part):]


def open_shard(path: Path) -> np.memmap:
    """The tokens of a shard, uint16 or uint32 (n,), mapped into memory. Raises ValueError if the
    header and the size do not match."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", 3).tolist()
    magics = {magic: dtype for dtype, (magic, _) in FORMATS.items()}
    if header and header[0] not in magics:
        raise ValueError(f"{path} begins with {header[0]}, not {FORMATS['<u2'][0]}: it has no "
                         f"header of llm.c's format, as files of nanoGPT and Megatron-LM have "
                         f"none: make shards from the text by python data.py --input FILE "
                         f"--out DIR")
    dtype = magics[header[0]] if header else "<u2"
    magic, version = FORMATS[dtype]
    itemsize = np.dtype(dtype).itemsize
    count = header[2] if header[:2] == [magic, version] else 0
    if count < 1 or size != HEADER_BYTES + itemsize * count:
        raise ValueError(f"{path} is not a complete shard: expected header {magic}, {version}, n "
                         f"and {HEADER_BYTES} + {itemsize} n bytes, got {header} and {size} bytes: "
                         f"remove it, and make or copy it again")
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,))


def open_flags(shard: Path, count: int) -> np.memmap:
    """The flags of a shard's tokens, uint8 (count,). Raises ValueError if the file is missing or
    damaged."""
    path = shard.with_suffix(FLAGS_SUFFIX)
    size = path.stat().st_size if path.exists() else None
    if size != count:
        problem = "is missing" if size is None else f"has {size} bytes for {count} tokens"
        raise ValueError(f"{path} {problem}: it says which tokens of {shard.name} are learnt: copy "
                         f"all files again, or remove them and run data.py again")
    return np.memmap(path, "u1", "r")


def find_shards(directory: Path, split: str) -> list[Path]:
    """The shards of a split, by a whole word in their names: retrieval_train_0.bin is no "val".
    Raises FileNotFoundError if there are none."""
    shards = sorted(path for path in directory.glob("[!.]*.bin")
                    if re.search(rf"(?<![a-z]){split}(?![a-z])", path.name))
    if not shards:
        problem = f"has no {split} shards" if directory.exists() else "does not exist"
        others = sorted(path.name for path in directory.glob("[!.]*.bin"))
        hint = ""
        if directory.is_file():
            hint = " (this is a file)"
        elif others:
            hint = f" (the name {others[0]} has no word {split})"
        raise FileNotFoundError(
            f"{directory} {problem}: give a directory that data.py has made{hint}: {DEFAULT_OUT} "
            f"by `python data.py`, data/NAME by --dataset NAME, DIR by --input FILE --out DIR")
    return shards


def count_tokens(directory: Path, split: str) -> int:
    """Of all shards of a split."""
    return sum(len(open_shard(path)) for path in find_shards(directory, split))


def read_meta(directory: Path) -> dict:
    """The entries of meta.json that training needs. Shards without it that data.py did not make
    are taken for GPT-2's tokens. Their fingerprint is of samples of the files. Raises ValueError if
    meta.json is damaged or lost."""
    path = directory / "meta.json"
    try:
        meta = json.loads(path.read_text())
        needed = {key: meta[key]
                  for key in ("tokenizer", "vocab_size", "bytes_per_token", "fingerprint")}
        needed["tokens"] = dict(meta.get("tokens", {}))
        needed["template"] = meta.get("template")           # of conversations
        needed["ends"] = meta.get("ends")                   # of a model's generations
    except FileNotFoundError:
        if (directory / "train_000000.bin").exists():       # data.py's own name
            raise ValueError(f"{directory} has no meta.json: copy it, too, or remove the shards "
                             f"and run data.py again") from None
        files = sorted(directory.glob("[!.]*.bin"))
        if open_shard(files[0]).dtype != np.uint16:
            raise ValueError(f"{directory} has tokens of 32 bits and no meta.json: write one with "
                             f"tokenizer, vocab_size, bytes_per_token (or null), fingerprint"
                             ) from None
        return dict(tokenizer="gpt2", vocab_size=50257, bytes_per_token=None, tokens={},
                    template=None, fingerprint=sha256_of_samples(files))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and the shards, and run data.py "
                         f"again") from None
    if is_of_file(needed["tokenizer"]):
        needed["tokenizer_file"] = read_kept(
            directory / file_name(needed["tokenizer"]), "the tokenizer of the shards",
            meta.get("tokenizer_sha256", "lost"))
    name = meta.get("template_file")
    if name is not None:
        needed["template_file"] = read_kept(directory / f"{name}.json", "the template of the "
                                            "conversations", name.removeprefix(OWN))
    return needed


def fits_tokenizer(state: dict, meta: dict) -> bool:
    """Whether the `read_meta` of data has the tokenizer of a checkpoint's state, maybe with more
    added tokens. Mixture.check tells whether the model has rows for those that occur."""
    return state["tokenizer"] == meta["tokenizer"] or has_added(state.get("tokenizer_file"),
                                                                meta.get("tokenizer_file"))


def show_token(meta: dict, token: int) -> str:
    """The number of a token and, where the tokenizer is there, its text."""
    try:
        return shown_token(get_tokenizer(meta["tokenizer"], meta.get("tokenizer_file")), token)
    except (ValueError, OSError, ImportError):
        return str(token)


def sha256_of_samples(paths) -> str:
    """The sha256 of these files' names, sizes and samples: the first 8 KiB of each, the last, and
    six between them. It tells two data sets of equal sizes apart in seconds, where reading 100 GB
    takes minutes. It does not see a change that lies between the samples."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(repr((path.name, size)).encode())
        with named(path), open(path, "rb", buffering=0) as file:
            for number in range(SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class Shards:
    """The tokens of shards, (n,) each. A mapping takes one of the files that a process may
    have open, often 1,024: of more shards than a quarter of them, the oldest mapping makes way."""

    def __init__(self):
        self.most = max(1, min(most_open_files() // 4, 10_000))     # Linux maps 65,530 at most
        self.paths = []
        self.lengths = []       # tokens of each
        self.mapped = {}        # by number

    def __getitem__(self, number: int) -> np.memmap:
        if number not in self.mapped:
            tokens = open_shard(self.paths[number])
            if len(self.mapped) >= self.most:
                del self.mapped[next(iter(self.mapped))]
            self.mapped[number] = tokens
        return self.mapped[number]

    def append(self, path: Path) -> None:
        self.paths.append(path)
        self.lengths.append(len(self[len(self.paths) - 1]))


def most_open_files() -> int:
    """How many files this process may have open, after it has raised its limit as far as the
    system allows."""
    try:
        import resource
    except ImportError:         # Windows
        return 512
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):         # macOS refuses "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
