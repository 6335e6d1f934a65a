"""Data: text -> tokens -> shards -> batches.

    .txt, .jsonl --pass 1--> hash and size of each document: drop duplicates, choose the split
    .txt, .jsonl --pass 2--> pieces of text --tiktoken--> tokens --> DIR/train_000000.bin, ...
                                                                     DIR/val_000000.bin, meta.json
    DIR/*.bin --memmap--> windows of T+1 tokens --permute--> batches (B, T+1), of several DIRs mixed

A document is a .txt file, or the field "text" of a line of .jsonl. The token <|endoftext|> stands
before each document; the same characters inside a text are ordinary text. The shards have the
format of llm.c: int32 (256,): magic 20240520, version 1, number of tokens n, zeros; then uint16
(n,): the tokens.
- Memory is bounded: 24 bytes are kept for each document, and a line of .jsonl is read as a whole.
- The split is a function of (seed, text of the document): about 5% of the documents validate. With
  fewer than 20 documents, each gives its last 5%. Of equal documents the first is kept.
- Sequence number s of a training run is a function of (seed, s) alone.

    python data.py                           # the standard library's source, bytes, no network
    python data.py --dataset shakespeare     # or tinystories: downloaded once; GPT-2's tokens
    python data.py --dataset fineweb --shards 2         # tokenised by others, 100M tokens a shard
    python data.py --input a.txt b.jsonl --out data/mine
"""
import argparse
import codecs
import difflib
import hashlib
import json
import math
import os
import re
import shlex
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

SPLITS = ("train", "val")
DEFAULT_OUT = Path("data/python")
EOT = "<|endoftext|>"
BLOCK = 1 << 18             # bytes read at once, and tokens checked at once
PIECE = 1 << 18             # characters encoded at once


# ---- Tokens and shards ----------------------------------------------------------------------

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
META_KEYS = ("tokenizer", "vocab_size", "bytes_per_token", "fingerprint")


def get_tokenizer(name: str):
    """A tiktoken.Encoding. "gpt2": GPT-2's BPE, 50257 tokens. "bytes": token i is byte i, and 256
    is <|endoftext|>. Raises ValueError for another name, ConnectionError without a vocabulary."""
    import tiktoken             # imported here, like requests: train.py runs without them
    if name == "bytes":         # the pattern bounds the characters processed at once; no merges
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        raise ValueError(f"unknown tokenizer {name!r}: expected gpt2 or bytes")
    gpt2_files()
    return tiktoken.get_encoding("gpt2")


def append_tokens(directory: Path, split: str, tokens, written: int, shard_tokens: int) -> None:
    """Append uint16 tokens (n,) to the shards of a split, which hold `written` tokens so far."""
    while len(tokens) > 0:
        number, position = divmod(written, shard_tokens)
        part = tokens[:shard_tokens - position]
        with open(directory / f"{split}_{number:06d}.bin", "r+b" if position else "wb") as file:
            file.write(np.array([MAGIC, VERSION, position + len(part)], "<i4"))
            file.seek(HEADER_BYTES + 2 * position)      # the bytes in between read as zeros
            file.write(part)
        written += len(part)
        tokens = tokens[len(part):]


def open_shard(path: Path) -> np.memmap:
    """The tokens of a shard, uint16 (n,), mapped into memory. Raises ValueError if the header and
    the size do not match."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", 3).tolist()
    count = header[2] if header[:2] == [MAGIC, VERSION] else 0
    if count < 1 or size != HEADER_BYTES + 2 * count:
        raise ValueError(f"{path} is not a complete shard: expected header {MAGIC}, {VERSION}, n "
                         f"and {HEADER_BYTES} + 2 n bytes, got {header} and {size} bytes: copy "
                         f"it, or run data.py, again")
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (count,))


def shards_of(directory: Path, split: str) -> list[Path]:
    """The shards of a split, by a whole word in their names: retrieval_train_0.bin is no "val"."""
    return sorted(path for path in directory.glob("*.bin")
                  if re.search(rf"(?<![a-z]){split}(?![a-z])", path.name))


def find_shards(directory: Path, split: str) -> list[Path]:
    """The shards of a split. Raises FileNotFoundError with advice if there are none."""
    shards = shards_of(directory, split)
    if shards:
        return shards
    inside = [str(path) for path in sorted(directory.glob("*")) if shards_of(path, split)]
    out = Path("data", directory.stem)
    if directory.is_file() and directory.suffix == ".bin":
        advice = f"give the directory of the shard, --data {directory.parent}"
    elif directory.is_file():
        advice = f"run `python data.py --input {directory} --out {out}`, then give --data {out}"
    elif inside:
        advice = f"give --data {' or '.join(inside)}"
    elif directory.name in DOWNLOADS:
        advice = f"run `python data.py --dataset {directory.name} --out {directory}`"
    elif directory == DEFAULT_OUT:
        advice = "run `python data.py`"
    else:
        advice = f"mistyped? Or run `python data.py --input FILE --out {directory}`"
    raise FileNotFoundError(f"{directory} is no directory with {split} shards: {advice}")


def read_meta(directory: Path) -> dict:
    """The entries of meta.json that training needs. Without the file the shards are others', and
    hold GPT-2's tokens. Raises ValueError if the file is damaged."""
    path = directory / "meta.json"
    if not path.exists():
        names = [(file.name, file.stat().st_size) for file in sorted(directory.glob("*.bin"))]
        return dict(tokenizer="gpt2", vocab_size=50257, bytes_per_token=None,
                    fingerprint=hashlib.sha256(repr(names).encode()).hexdigest())
    try:
        meta = json.loads(path.read_text())
        return {key: meta[key] for key in META_KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): run data.py again") from None


def sha256_of(*paths) -> str:
    """The sha256 of these files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


# ---- Batches: a function of the seed and the step -------------------------------------------

class Source(NamedTuple):
    """A directory of shards: windows first ... first + n_windows - 1 of a TokenDataset."""
    name: str
    weight: int             # of its sequences, relative to those of the other sources
    first: int
    n_windows: int
    meta: dict


class TokenDataset:
    """The windows of one split: T+1 tokens each, T = seq_len; the last is the first of the next.

    `data` is a directory, or a mixture "A=0.7,B=0.3" of sources with one tokenizer. A source gives
    its share of the sequences, in less than an epoch or in several, as in The Pile (Gao et al.
    2020, section 2). A resume with other weights begins a new phase, in which each source continues
    where it stopped. Raises FileNotFoundError or ValueError for missing, damaged or short shards.
    """

    def __init__(self, data, split: str, seq_len: int):
        self.seq_len = seq_len
        self.shards = []                # uint16 tokens
        self.sources = {}               # by fingerprint
        ends = []                       # of each shard, in windows
        n_windows = 0
        vocabularies = set()
        mixture = parse_mixture(str(data))
        for directory, weight in mixture.items():
            first = n_windows
            for path in find_shards(directory, split):
                tokens = open_shard(path)
                n_windows += (len(tokens) - 1) // seq_len
                self.shards.append(tokens)
                ends.append(n_windows)
            if n_windows == first:
                raise ValueError(f"{path}: {len(tokens)} tokens are too few for a window of "
                                 f"{seq_len} + 1: use a shorter --seq-len, or more text")
            meta = read_meta(directory)
            vocabularies.add((meta["tokenizer"], meta["vocab_size"]))
            self.sources[meta["fingerprint"]] = Source(
                directory.absolute().name, weight, first, n_windows - first, meta)
        if len(vocabularies) > 1:
            raise ValueError(f"--data {data}: these have different tokenizers or vocabularies: "
                             f"make them with one --tokenizer of data.py")
        if len(self.sources) < len(mixture):
            raise ValueError(f"--data {data}: two of these hold the same text: give it once")
        self.ends = np.array(ends)
        self.n_windows = n_windows
        self.n_tokens = sum(map(len, self.shards))
        bytes_per_token = [source.meta["bytes_per_token"] for source in self.sources.values()]
        self.meta = dict(tokenizer=meta["tokenizer"], vocab_size=meta["vocab_size"],
                         bytes_per_token=self.average(bytes_per_token))
        # Each phase is [first sequence, {fingerprint of a source: weight}]; checkpoints store them.
        self.phases = [[0, {key: source.weight for key, source in self.sources.items()}]]

    def sample_indices(self, seed: int, first: int, count: int) -> np.ndarray:
        """int64 (count,): the windows of sequences first, first + 1, ... of a run with this seed.
        Each epoch of a source is a permutation of all its windows."""
        windows = np.empty(count, np.int64)
        for key, read in self.counts(np.arange(first, first + count + 1)).items():
            source = self.sources[key]
            epochs, places = np.divmod(np.arange(read[0], read[-1]), source.n_windows)
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                places[in_epoch] = permute(places[in_epoch], source.n_windows, seed, epoch)
            is_from_source = np.diff(read) > 0
            windows[is_from_source] = source.first + places
        return windows

    def windows(self, indices) -> np.ndarray:
        """int64 (B, T+1): these windows. Raises ValueError: a token beyond the vocabulary."""
        batch = np.empty((len(indices), self.seq_len + 1), np.int64)
        for row, index in zip(batch, indices):
            shard = int(np.searchsorted(self.ends, index, side="right"))
            first = self.ends[shard - 1] if shard > 0 else 0
            start = int(index - first) * self.seq_len
            row[:] = self.shards[shard][start:start + len(row)]
        if batch.max(initial=0) >= self.meta["vocab_size"]:
            raise ValueError(f"token {batch.max()} is beyond a vocabulary of "
                             f"{self.meta['vocab_size']}: run data.py again")
        return batch

    def counts(self, n: np.ndarray) -> dict[str, np.ndarray]:
        """{fingerprint: int64 (B,)}: how many of the first n sequences (B,) each source gives. The
        first source takes its share of all, rounded down, the next its share of what is left, and
        so on: within a phase, each count is exact to less than one sequence for each source."""
        counts = dict.fromkeys(self.sources, np.zeros_like(n))
        ends = [first for first, _ in self.phases[1:]]
        ends.append(np.iinfo(np.int64).max)
        for (first, weights), end in zip(self.phases, ends):
            left = np.clip(n, first, end) - first               # sequences of this phase
            weight_left = sum(weights.values())
            for key, weight in weights.items():
                taken = left * weight // max(weight_left, 1)
                counts[key] = counts[key] + taken
                left = left - taken
                weight_left -= weight
        return counts

    def go_on(self, phases: list, position: int) -> None:
        """Continue a run that has these phases and whose next sequence is number `position`."""
        weights = self.phases[-1][1]
        if weights != phases[-1][1]:
            phases = [phase for phase in phases if phase[0] < position] + [[position, weights]]
        self.phases = phases

    def phase_begins(self, first: int, end: int) -> bool:
        """Whether a phase after the first begins at one of the sequences first ... end - 1."""
        return any(first <= begin < end for begin, _ in self.phases[1:])

    def epochs(self, n: int) -> dict[str, float]:
        """{name of a source: how many times the first n sequences read it}."""
        return {self.sources[key].name: (count / self.sources[key].n_windows).item()
                for key, count in self.counts(np.array([n])).items()}

    def average(self, values) -> float | None:
        """The weighted mean of one number for each source; None if a number is None."""
        pairs = [(source.weight, value) for source, value in zip(self.sources.values(), values)
                 if source.weight > 0]
        if any(value is None for _, value in pairs):
            return None
        return sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)

    def check(self, part: int, parts: int) -> None:
        """Raise ValueError if a token is beyond the vocabulary. Rank number `part` of `parts` reads
        its share of the blocks."""
        vocab_size, size = self.meta["vocab_size"], 1 << 16
        for tokens in self.shards:
            for start in range(part * size, len(tokens), parts * size):
                beyond = np.flatnonzero(tokens[start:start + size] >= vocab_size)
                if len(beyond) > 0:
                    at = start + int(beyond[0])
                    raise ValueError(f"{tokens.filename} position {at}: token {tokens[at]} is "
                                     f"beyond a vocabulary of {vocab_size}: run data.py again")


def permute(places: np.ndarray, n: int, *key: int) -> np.ndarray:
    """int64 (k,) -> int64 (k,): these places after a permutation of 0 ... n - 1 that is a function
    of the key. It is computed, so it takes no memory, however large n is.

    A Feistel network of six rounds permutes the numbers of 2 h bits (Luby and Rackoff 1988): each
    round XORs one half with a function of the other. A result of n or above goes through the
    network again (cycle walking, Black and Rogaway 2002); at most three in four do.
    """
    bits = (n - 1).bit_length()
    h = np.uint64(max(1, (bits + 1) // 2))
    mask = (np.uint64(1) << h) - np.uint64(1)
    round_keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    places = places.astype(np.uint64)
    walking = np.ones(len(places), bool)
    while walking.any():
        left = places[walking] >> h
        right = places[walking] & mask
        for round_key in round_keys:
            # Products modulo 2^64 and shifts mix the bits, with MurmurHash3's constants.
            x = (right + round_key) * np.uint64(0xFF51AFD7ED558CCD)
            x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
            x = (x ^ x >> np.uint64(33)) & mask
            left, right = right, left ^ x
        places[walking] = left << h | right
        walking = places >= n
    return places.astype(np.int64)


def parse_mixture(text: str) -> dict[Path, int]:
    """"DIR" -> {DIR: 1}; "A=0.7,B=0.3" -> {A: 7, B: 3}. Raises ValueError."""
    if not set("=,") & set(text) or Path(text).is_dir():
        return {Path(text): 1}
    weights = {}
    for part in text.split(","):
        folder, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if weight == 0 or 1e-6 <= weight <= 1000:
            weights[Path(folder)] = round(1e6 * weight)
    names = {folder.absolute().name for folder in weights}
    divisor = math.gcd(*weights.values())
    if divisor == 0 or len(names) < len(text.split(",")):
        raise ValueError(f"--data {text} must be DIR, or DIR=WEIGHT,DIR=WEIGHT ... with weights of "
                         f"0 or 1e-6 to 1000, not all 0, and different last parts of the DIRs")
    return {folder: weight // divisor for folder, weight in weights.items()}


# ---- Making shards: two passes over the documents -------------------------------------------

VAL_ONE_IN = 20             # documents, or bytes of each document where there are fewer


def prepare(files, out: Path, tokenizer: str, seed=0, shard_tokens=100_000_000) -> dict:
    """Tokenise the documents of these files into shards in `out`, and return what meta.json says.

    The shards appear when all are complete. Raises ValueError if a file is not text, if there is
    too little text, or if `out` holds shards of another text, which a run may be training on.
    """
    refuse_other_shards(out, r"(train|val)_\d{6}\.bin|meta\.json")
    encoding = get_tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=out) as folder:
        folder = Path(folder)
        cuts, size, counts = index_documents(files, seed)
        tokens = dict.fromkeys(SPLITS, 0)
        text_bytes = dict.fromkeys(SPLITS, 0)
        note = progress("tokenising", size)
        for split, encoded, job_bytes in encode(read_jobs(files, cuts), encoding):
            append_tokens(folder, split, encoded, tokens[split], shard_tokens)
            tokens[split] += len(encoded)
            text_bytes[split] += job_bytes
            note(job_bytes)
        if sum(text_bytes.values()) != size:
            raise ValueError("the input changed while it was read: run data.py again")
        # The fingerprint covers the headers, too: windows do not cross the end of a shard.
        meta = dict(tokenizer=tokenizer, vocab_size=encoding.n_vocab, seed=seed, tokens=tokens,
                    text_bytes=text_bytes, bytes_per_token=text_bytes["val"] / tokens["val"],
                    fingerprint=sha256_of(*sorted(folder.iterdir())), **counts)
        old = meta
        if shards_of(out, "train"):
            with suppress(ValueError):          # an unfinished meta.json
                old = read_meta(out)
        if old["fingerprint"] != meta["fingerprint"]:
            raise ValueError(f"{out} holds shards that were made of other text or with other "
                             f"flags: give another --out, or remove {out}")
        # An interrupted replacement leaves a meta.json that TokenDataset refuses.
        (out / "meta.json").write_text("unfinished: run data.py again\n")
        for split in SPLITS:
            for path in shards_of(out, split):
                path.unlink()
        for path in folder.iterdir():
            os.replace(path, out / path.name)
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        os.replace(folder / "meta.json", out / "meta.json")
    return meta


def refuse_other_shards(out: Path, pattern: str) -> None:
    """Raise ValueError if `out` holds a shard or meta.json whose name is not of this pattern."""
    for path in (*out.glob("*.bin"), *out.glob("meta.json")):
        if not re.fullmatch(pattern, path.name):
            raise ValueError(f"{path} would mix with the new shards: choose another --out")


def index_documents(files, seed: int):
    """Pass 1: hash and measure every document, drop duplicates, choose the split.

    Returns (cuts, size, counts). cuts, int64 (documents,): the number of bytes of each document
    that train; the rest validates. A cut of -1 drops a document without text, or a duplicate.
    size: the bytes of the documents that are kept. counts: the numbers of documents for meta.json.
    """
    note = progress("reading", sum(path.stat().st_size for path in files))
    salt = seed.to_bytes(16, "little")      # one hash finds duplicates and chooses the split
    table = bytearray()
    for path in files:
        for blocks in read_documents(path, note):
            digest = hashlib.blake2b(digest_size=16, salt=salt)
            size = 0
            is_blank = True
            for text in blocks:
                raw = text.encode()
                digest.update(raw)
                size += len(raw)
                is_blank = is_blank and text.isspace()
            if is_blank:
                size = 0
            table += digest.digest() + size.to_bytes(8, "little")
    table = np.frombuffer(table, [("digest", "S16"), ("size", "<i8")])
    has_text = table["size"] > 0
    _, first = np.unique(table["digest"], return_index=True)
    kept = first[has_text[first]]
    sizes = table["size"][kept]
    if len(kept) >= VAL_ONE_IN:
        score = table["digest"][kept].view("<u8")[::2]      # the first 8 of the 16 bytes
        validates = score < 2**64 // VAL_ONE_IN
        validates[score.argmin()] = True                    # both splits receive documents
        validates[score.argmax()] = False
        train_sizes = np.where(validates, 0, sizes)
    else:
        train_sizes = sizes - np.maximum(sizes // VAL_ONE_IN, 1)
        if train_sizes.max(initial=0) < 4:                  # bytes of the longest character
            raise ValueError("the input holds no text, or less than 5 bytes: give it more")
    cuts = np.full(len(table), -1)
    cuts[kept] = train_sizes
    counts = dict(documents=len(kept), skipped=len(table) - int(has_text.sum()),
                  duplicates=int(has_text.sum()) - len(kept))
    return cuts, int(sizes.sum()), counts


def read_jobs(files, cuts):
    """Pass 2: yield (split, job): a list of texts for a thread. "" begins a document."""
    jobs = {split: [] for split in SPLITS}
    documents = (blocks for path in files for blocks in read_documents(path))
    for blocks, cut in zip(documents, cuts):
        if cut < 0:
            continue
        for split, parts in groupby(split_at(blocks, int(cut)), lambda part: part[0]):
            jobs[split].append("")
            for text in chunks(text for _, text in parts):
                jobs[split].append(text)
                if len(text) > PIECE // 8 or len(jobs[split]) > 100:
                    yield split, jobs[split]
                    jobs[split] = []
    for split, job in jobs.items():
        if job:
            yield split, job


def split_at(blocks, cut: int):
    """Yield (split, text): train up to the last whole character before byte `cut`, then val."""
    for block in blocks:
        raw = block.encode()
        head = raw[:max(cut, 0)].decode(errors="ignore")
        tail = block[len(head):]
        if head:
            yield "train", head
        if tail:
            yield "val", tail
        cut -= len(raw)


# A text cut here and encoded in parts gives the tokens of the whole: before a space or newline that
# follows another character. GPT-2's pattern splits text into words, which have white space at most
# as their first character, and runs of white space. So a word ends here in any case, and no
# look-ahead crosses this place. The pattern is greedy: match() finds the last such place.
CUT = re.compile(r"(?s:.*)\S(?=[ \n])")


def chunks(blocks):
    """Yield the same text in pieces of at most PIECE characters, cut at CUT. A text without such a
    place, which is not prose, is cut anywhere and may take a few tokens more."""
    rest = ""
    for block in blocks:
        text = rest + block
        start = 0
        while len(text) - start > PIECE:
            cut = CUT.match(text, start, start + PIECE)
            end = cut.end() if cut else start + PIECE
            yield text[start:end]
            start = end
        rest = text[start:]
    yield rest


def encode(jobs, encoding):
    """Yield (split, tokens as uint16, bytes of text) of every job, in order. Threads encode, as
    tiktoken releases Python's lock. Few jobs wait at a time, which bounds memory."""
    def work(split, job):
        tokens = [encoding.encode_to_numpy(text, disallowed_special=()) if text
                  else [encoding.eot_token] for text in job]
        tokens = np.concatenate(tokens, dtype="<u2", casting="unsafe")
        return split, tokens, len("".join(job).encode())

    cores = os.cpu_count() or 1
    pending = []
    with ThreadPoolExecutor(cores) as pool:
        for split, job in jobs:
            pending.append(pool.submit(work, split, job))
            if len(pending) > 2 * cores:
                yield pending.pop(0).result()
        for job in pending:
            yield job.result()


SUFFIXES = (".txt", ".jsonl")


def find_files(paths) -> list[Path]:
    """These .txt and .jsonl files, and those in these folders. Raises ValueError or OSError."""
    files = []
    for path in paths:
        path.stat()                     # raises FileNotFoundError
        found = [path]
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*"))
                     if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not found or found[0].suffix.lower() not in SUFFIXES:
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


def read_documents(path: Path, note=lambda count: None):
    """Yield every document of a file, as an iterable of strings: joined, they are its text. note(n)
    is called as n more bytes are read. Raises ValueError, which says where, if it is no text."""
    with open(path, "rb") as file:
        if path.suffix == ".eot":       # TinyStories: lines of <|endoftext|> between the documents
            for is_end, lines in groupby(file, lambda line: line.strip() == EOT.encode()):
                raw = b"".join(lines)
                note(len(raw))
                if not is_end:
                    yield [raw.decode().strip()]
        elif path.suffix.lower() == ".jsonl":
            for number, line in enumerate(file, 1):
                note(len(line))
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                    text.encode()       # refuses half a surrogate pair
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise ValueError(f'{path} line {number} is not JSON with a string "text": '
                                     f"{error}") from None
                yield [text]
        else:
            yield read_blocks(file, note)


def read_blocks(file, note):
    """Yield the text of a binary file by blocks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while raw := file.read(BLOCK):
            note(len(raw))
            yield decoder.decode(raw)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:         # error.object is what was decoded last
        offset = file.tell() - len(error.object) + error.start
        raise ValueError(f"{file.name} is not UTF-8 text, see byte {offset}: convert it") from None


def progress(label: str, total: int, done: int = 0):
    """Return note(n), to be called when n more of `total` bytes are done. It prints the progress to
    standard error: on a terminal five times a second and at the end, elsewhere once a minute."""
    is_terminal = sys.stderr.isatty()
    interval = 0.2 if is_terminal else 60
    before = done
    began = time.monotonic()
    printed = began

    def note(count: int) -> None:
        nonlocal done, printed
        done += count
        now = time.monotonic()
        is_end = is_terminal and done == total
        if is_end or now - printed >= interval:
            printed = now
            rate = max(done - before, 1) / max(now - began, 1e-9)
            left = round(max(total - done, 0) / rate)
            print(f"{label}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s, "
                  f"{left // 60}m{left % 60:02d}s left   ", file=sys.stderr, flush=True,
                  end="\r" if is_terminal and not is_end else "\n")
    return note


# ---- Downloads ------------------------------------------------------------------------------

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
FINEWEB_SHARDS = 103        # training shards of 100M tokens each; there is one validation shard
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
              "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}


def download(url: str, path: Path, sha256: str | None = None, check=lambda path: None) -> None:
    """Download url to path, which appears only when its sha256, or else its length, is right and
    `check` raises no ValueError. Until then the bytes are in path.part. After a lost connection the
    next try, or the next run, continues there; wrong bytes are discarded. Raises ConnectionError
    after four tries."""
    import requests
    if path.exists() and sha256 in (None, sha256_of(path)):
        with suppress(ValueError):
            check(path)
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.touch()
    for seconds in (0, 1, 2, 4):
        time.sleep(seconds)
        headers = {"Range": f"bytes={part.stat().st_size}-", "Accept-Encoding": "identity"}
        try:
            with requests.get(url, headers=headers, stream=True, timeout=(10, 30)) as reply:
                if reply.status_code in (200, 416):     # the whole file; nothing after this byte
                    os.truncate(part, 0)
                reply.raise_for_status()
                _, _, total = reply.headers.get("Content-Range", "").rpartition("/")
                total = int(total or reply.headers.get("Content-Length", 0))
                note = progress(path.name, total, part.stat().st_size)
                with open(part, "ab") as file:
                    for block in reply.iter_content(BLOCK):
                        note(file.write(block))
            size = part.stat().st_size
            if sha256 is None and not size == total > 0:
                raise ValueError(f"expected {total} bytes, got {size}")
            if sha256 is not None and sha256_of(part) != sha256:
                raise ValueError(f"expected sha256 {sha256}, got {size} other bytes")
            check(part)
            os.replace(part, path)
            return
        except requests.RequestException as problem:
            error = problem
        except ValueError as problem:
            error = problem
            os.truncate(part, 0)
    raise ConnectionError(f"cannot download {url} ({error}): run it again later, "
                          f"it continues where it stopped, or put the file at {path}")


def gpt2_files() -> dict[str, Path]:
    """The files of GPT-2's vocabulary, in tiktoken's cache. tiktoken would download them itself,
    but without a timeout. Raises ConnectionError."""
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or f"{tempfile.gettempdir()}/data-gym-cache")
    paths = {}
    for file, sha256 in GPT2_FILES.items():
        paths[file] = cache / hashlib.sha1((GPT2_URL + file).encode()).hexdigest()
        try:
            download(GPT2_URL + file, paths[file], sha256)
        except OSError as error:
            raise ConnectionError(f"{error}. Set TIKTOKEN_CACHE_DIR to use another cache. Shards "
                                  f"made with --tokenizer bytes need no vocabulary.") from error
    return paths


def fetch_shards(url: str, out: Path, count: int) -> dict:
    """Download the first `count` training shards of FineWeb and its validation shard, in GPT-2's
    tokens, as llm.c and modded-nanogpt use them. Returns dict(tokens={split: number})."""
    refuse_other_shards(out, r"fineweb_.*")
    names = ["val_000000"] + [f"train_{i:06d}" for i in range(1, count + 1)]
    for name in names:
        file = f"fineweb_{name}.bin"
        download(url + file, out / file, check=open_shard)
    return dict(tokens={split: TokenDataset(out, split, 1).n_tokens for split in SPLITS})


# ---- Command line ---------------------------------------------------------------------------

SEQ_LEN = 128       # train.py's default, for a warning


def parse_arguments(parser: argparse.ArgumentParser, arguments, other_names: dict[str, str]):
    """The parsed arguments of a command line. Flags may have underscores for dashes, as nanoGPT's.
    For an unknown flag the error suggests one: that which other_names gives its other names, or the
    most similar."""
    given = [re.sub(r"^--[\w-]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), text)
             for text in arguments]
    args, unknown = parser.parse_known_args(given)
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-")
        flags = re.findall(r"--([\w-]+)", parser.format_usage())
        near = [ours for ours, theirs in other_names.items() if name in theirs.split()]
        near += difflib.get_close_matches(name, flags, 1, 0.75)
        advice = f"did you mean --{near[0]}?" if near else "--help lists the flags"
        parser.error(f"unknown argument {unknown[0]}: {advice}")
    return args


def parse_flags(arguments) -> argparse.Namespace:
    """The flags, with their defaults. A mistake ends the program with status 2."""
    parser = argparse.ArgumentParser("data.py", allow_abbrev=False, description="Makes shards.")
    parser.error = lambda message: parser.exit(2, f"data.py: {message}\n")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=["python", *DOWNLOADS], default="python",
                        help="python (default) is the standard library's source")
    source.add_argument("--input", nargs="+", type=Path, metavar="FILE",
                        help=".txt or .jsonl, or folders of such")
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"],
                        help="(default: gpt2; bytes for python)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="(default: data/DATASET; required with --input)")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="(default: 100M)")
    parser.add_argument("--shards", type=int, default=1, help="of fineweb (default: 1)")
    args = parse_arguments(parser, arguments, {})
    if not 0 <= args.seed < 2**63 or not 1024 <= args.shard_tokens < 2**31:
        parser.error("--seed must be 0 to 2^63 - 1, --shard-tokens 1024 to 2^31 - 1")
    if args.out is None:
        if args.input:
            parser.error("--input requires --out DIR, where the shards go")
        args.out = Path("data", args.dataset)
    is_fineweb = args.dataset == "fineweb"
    if args.shards != 1 and not (is_fineweb and 1 <= args.shards <= FINEWEB_SHARDS):
        parser.error(f"only --dataset fineweb has --shards, 1 to {FINEWEB_SHARDS}")
    if is_fineweb and args.tokenizer == "bytes":
        parser.error("--dataset fineweb has GPT-2's tokens: drop --tokenizer bytes")
    if args.tokenizer is None:
        args.tokenizer = "bytes" if args.dataset == "python" and not args.input else "gpt2"
    return args


def make_shards(args) -> dict:
    """Download the text or the shards, make the shards, and return what is known of them."""
    if args.input:
        files = find_files(args.input)
    elif args.dataset == "python":
        files = standard_library()
    else:
        url, sha256, suffix = DOWNLOADS[args.dataset]
        url = url.replace(HUB, os.environ.get("HF_ENDPOINT", HUB))
        if args.dataset == "fineweb":
            return fetch_shards(url, args.out, args.shards)
        files = [args.out / "raw" / (args.dataset + suffix)]
        download(url, files[0], sha256)
    return prepare(files, args.out, args.tokenizer, args.seed, args.shard_tokens)


def print_summary(out: Path, meta: dict) -> None:
    """Print the numbers of documents and tokens, and the commands that train on them."""
    flags = ""
    if out != DEFAULT_OUT:
        flags = f" --data {shlex.quote(out.as_posix())} --out {shlex.quote(f'out/{out.name}')}"
    tokens = meta["tokens"]
    if "documents" in meta:
        print("{documents:,} documents, {duplicates:,} duplicates dropped, {skipped:,} without "
              "text skipped".format(**meta), end="; ")
    print(f"{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on.")
    shortest = min(tokens.values())
    if "documents" in meta and shortest < SEQ_LEN + 1:
        print(f"This is too little text for windows of {SEQ_LEN} + 1 tokens: add text to --input, "
              f"or use the shorter windows below.")
        flags += f" --seq-len {shortest - 1}"
    print("Now train, in one process or in eight:")
    print(f"python train.py{flags}\ntorchrun --nproc_per_node=8 train.py{flags} --tp 2 --pp 2")


def main(argv=None) -> int:
    args = parse_flags(sys.argv[1:] if argv is None else argv)
    try:
        meta = make_shards(args)
    except KeyboardInterrupt:
        print("data.py: stopped: run it again, and a download continues", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, ConnectionError) else 2
    print_summary(args.out, meta)
    return 0


if __name__ == "__main__":
    sys.exit(main())
