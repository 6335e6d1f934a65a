"""The data: text -> tokens -> shards -> batches.

    documents --pass 1--> hashes, sizes: which documents are duplicates, which validate
    documents --pass 2--> pieces of text --tiktoken--> tokens --> DIR/train_000000.bin, ...
                                                                  DIR/val_000000.bin, meta.json
    DIR/*.bin --memmap--> windows of T+1 tokens --permute--> batches (B, T+1), of several DIRs mixed

A document is a .txt file, or the field "text" of a line of .jsonl. Each is preceded by the token
<|endoftext|>, as in llm.c; the same characters inside a text are ordinary text. A shard is llm.c's:
int32 (256,): magic 20240520, version 1, number of tokens n, zeros; then uint16 (n,): the tokens.
- Memory stays bounded: 24 bytes are kept of each document. (A line of .jsonl is held whole.)
- The split is a function of (seed, text of the document): about 5% of the documents validate; of
  fewer than 20, each gives its last 5%. Of equal documents the first counts.
- The shards are written aside and take an earlier run's place when all are whole, meta.json last.
- Sequence number s of a training run is a function of (seed, s) alone.

    python data.py                           # the standard library's source, bytes, no network
    python data.py --dataset shakespeare     # or tinystories: downloaded once; GPT-2's tokens
    python data.py --dataset fineweb --shards 2         # others' shards, 100M tokens each
    python data.py --input a.txt b.jsonl --out data/mine
"""
import argparse
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

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
SPLITS = ("train", "val")
VAL_ONE_IN = 20             # documents, or bytes of each of few documents
BLOCK = PIECE = 1 << 18     # characters read, and encoded, at once
DEFAULT_OUT = Path("data/python")
EOT = "<|endoftext|>"


# ---------------------------------------------------------------------------------------------
# Tokens and shards
# ---------------------------------------------------------------------------------------------


def get_tokenizer(name: str):
    """A tiktoken.Encoding. "gpt2": GPT-2's BPE, 50257 tokens. "bytes": token i is byte i, and 256
    is <|endoftext|>."""
    import tiktoken
    if name == "bytes":         # the pattern is how much is looked at together: nothing is merged
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        raise ValueError(f"unknown tokenizer {name!r}: there are gpt2 and bytes")
    gpt2_files()
    return tiktoken.get_encoding("gpt2")


def shards_of(directory: Path, split: str) -> list[Path]:
    """The shards of a split, by the word in their names: retrieval_train_0.bin is no "val"."""
    return sorted(path for path in directory.glob("*.bin")
                  if re.search(rf"(?<![a-z]){split}(?![a-z])", path.name))


def sha256_of(*paths) -> str:
    """The sha256 of these files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------
# Batches: a function of the seed and the step
# ---------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A directory of shards: windows first ... first + n_windows - 1 of a TokenDataset."""
    name: str
    weight: int             # of its sequences, relative to those of the other sources
    first: int
    n_windows: int
    meta: dict


class TokenDataset:
    """The windows of one split: T+1 tokens, the last of one the first of the next; T = seq_len.

    `data` is a directory, or a mixture "A=0.7,B=0.3" of sources with one tokenizer. A source gives
    its share of the sequences, be it less than one epoch or several, as in The Pile (Gao et al.
    2020, section 2). A resume with other weights begins a phase: each source goes on where it was.
    """

    def __init__(self, data, split: str, seq_len: int):
        self.seq_len, self.files, self.shards, self.sources, ends = seq_len, [], [], {}, [0]
        for directory, weight in parse_mixture(str(data)).items():
            files, first = shards_of(directory, split), ends[-1]
            if not files:
                kind = f"dataset {directory.name}" if directory.name in DOWNLOADS else "input FILE"
                how = "" if directory == DEFAULT_OUT else f" --{kind} --out {directory}"
                what = f"no {split} shards in" if directory.is_dir() else "there is no folder"
                raise FileNotFoundError(f"{what} {directory}: mistyped? Or run `python "
                                        f"data.py{how}`")
            for path in files:
                self.files.append(path)
                self.shards.append(self.open_shard(path))
                ends.append(ends[-1] + (len(self.shards[-1]) - 1) // seq_len)
            if ends[-1] == first:
                raise ValueError(f"{path}: {len(self.shards[-1])} tokens are too few for a window "
                                 f"of {seq_len} + 1: use a shorter --seq-len, or more text")
            meta = self._read_meta(directory)
            self.sources[meta["fingerprint"]] = Source(
                directory.absolute().name, weight, first, ends[-1] - first, meta)
            self.meta = {name: meta[name] for name in ("tokenizer", "vocab_size")}
        if len({(s.meta["tokenizer"], s.meta["vocab_size"]) for s in self.sources.values()}) > 1:
            raise ValueError(f"--data {data}: these have different tokenizers or vocabularies: "
                             f"make them with one --tokenizer of data.py")
        if sum(source.n_windows for source in self.sources.values()) < ends[-1]:
            raise ValueError(f"--data {data}: two of these hold the same text: give it once")
        self.n_tokens, self.n_windows = sum(map(len, self.shards)), ends[-1]
        self.ends = np.array(ends[1:])
        self.meta["bytes_per_token"] = self.average(
            [source.meta["bytes_per_token"] for source in self.sources.values()])
        # [first sequence, {fingerprint of a source: weight}] each; a checkpoint holds them.
        self.phases = [[0, {key: source.weight for key, source in self.sources.items()}]]

    @staticmethod
    def open_shard(path: Path) -> np.memmap:
        size, header = path.stat().st_size, np.fromfile(path, "<i4", 3).tolist()
        count = header[-1] if header[:2] == [MAGIC, VERSION] else 0
        if count < 1 or size != HEADER_BYTES + 2 * count:
            raise ValueError(f"{path} is no whole shard: magic, version, tokens are {header}, not "
                             f"{MAGIC}, {VERSION}, n > 0, or its {size} bytes are not "
                             f"{HEADER_BYTES} + 2 n: copy it again, or run data.py again")
        return np.memmap(path, "<u2", "r", HEADER_BYTES, (count,))

    def _read_meta(self, directory: Path) -> dict:
        path = directory / "meta.json"
        if not path.exists():               # shards made by others hold GPT-2's tokens
            names = [(file.name, file.stat().st_size) for file in sorted(directory.glob("*.bin"))]
            return dict(tokenizer="gpt2", vocab_size=50257, bytes_per_token=None,
                        fingerprint=hashlib.sha256(repr(names).encode()).hexdigest())
        try:
            meta = json.loads(path.read_text())
            [meta[key] for key in ("tokenizer", "vocab_size", "bytes_per_token", "fingerprint")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): run data.py again") from None
        return meta

    def _check(self, tokens, shard: int, position: int) -> None:
        beyond = tokens >= self.meta["vocab_size"]
        if beyond.any():
            at = int(beyond.argmax())
            raise ValueError(f"{self.files[shard]} position {position + at}: token {tokens[at]} is "
                             f"beyond a vocabulary of {self.meta['vocab_size']}: run data.py again")

    def windows(self, indices) -> np.ndarray:
        """int64 (B, T+1): these windows. ValueError: a token beyond the vocabulary."""
        batch = np.empty((len(indices), self.seq_len + 1), np.int64)
        for row, index in zip(batch, indices):
            shard = int(np.searchsorted(self.ends, index, side="right"))
            start = int(index - (self.ends[shard - 1] if shard else 0)) * self.seq_len
            row[:] = self.shards[shard][start:start + len(row)]
            self._check(row, shard, start)
        return batch

    def check(self, part: int, parts: int) -> None:
        """ValueError if share `part` of `parts` of all tokens holds one beyond the vocabulary."""
        first, last = (self.n_tokens * i // parts for i in (part, part + 1))
        for shard, tokens in enumerate(self.shards):
            for start in range(max(first, 0), min(last, len(tokens)), BLOCK):
                self._check(tokens[start:min(start + BLOCK, last)], shard, start)
            first, last = first - len(tokens), last - len(tokens)

    def go_on(self, phases: list, position: int) -> None:
        """Read on as a run with these phases, whose next sequence is number `position`."""
        if phases[-1][1] != self.phases[-1][1]:
            phases = [p for p in phases if p[0] < position] + [[position, self.phases[-1][1]]]
        self.phases = phases

    def phase_begins(self, first: int, end: int) -> bool:
        """Whether one after the first does among the sequences first ... end - 1."""
        return any(first <= begin < end for begin, _ in self.phases[1:])

    def counts(self, n: np.ndarray) -> dict[str, np.ndarray]:
        """{fingerprint: int64 (B,)}: how many of the first n sequences (B,) each source gives. The
        first takes its share of all, rounded down, the next its share of what is left, and so on:
        in a phase each is off by less than one sequence for each source."""
        counts, ends = dict.fromkeys(self.sources, np.zeros_like(n)), [
            *(first for first, _ in self.phases[1:]), np.iinfo(np.int64).max]
        for (first, weights), end in zip(self.phases, ends):
            left, rest = np.clip(n, first, end) - first, sum(weights.values())
            for key, weight in weights.items():
                taken = left * weight // max(rest, 1)
                counts[key], left, rest = counts[key] + taken, left - taken, rest - weight
        return counts

    def epochs(self, n: int) -> dict[str, float]:
        """{name of a source: how often the first n sequences read it}."""
        return {self.sources[key].name: (count / self.sources[key].n_windows).item()
                for key, count in self.counts(np.array([n])).items()}

    def average(self, values) -> float | None:
        """The mean by weight of a number of each source; None if one is None."""
        pairs = [(s.weight, x) for s, x in zip(self.sources.values(), values) if s.weight]
        if any(x is None for _, x in pairs):
            return None
        return sum(weight * x for weight, x in pairs) / sum(weight for weight, _ in pairs)

    def sample_indices(self, seed: int, first: int, count: int) -> np.ndarray:
        """int64 (count,): windows of sequences first, first + 1, ...; an epoch permutes all of a
        source."""
        windows = np.empty(count, np.int64)
        for key, read in self.counts(np.arange(first, first + count + 1)).items():
            source = self.sources[key]
            epochs, places = np.divmod(np.arange(read[0], read[-1]), source.n_windows)
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                places[now] = permute(places[now], source.n_windows, seed, epoch)
            windows[np.diff(read) > 0] = source.first + places
        return windows


def permute(places: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Where a permutation of 0 ... n - 1 that is a function of the key puts these places. It is
    computed, so that it takes no memory, however large n is.

    A Feistel network of six rounds permutes the numbers of 2 h bits (Luby and Rackoff 1988): each
    round adds to one half, modulo 2, a function of the other. What lands at n or above goes through
    again (cycle walking, Black and Rogaway 2002), at most three times in four.
    """
    h = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    mask, round_keys = (np.uint64(1) << h) - np.uint64(1), (
        np.random.SeedSequence(key).generate_state(6, np.uint64))
    places = places.astype(np.uint64)
    walking = np.ones(len(places), bool)
    while walking.any():
        left, right = places[walking] >> h, places[walking] & mask
        for round_key in round_keys:
            # Products modulo 2^64 and shifts mix the bits, with MurmurHash3's constants.
            x = (right + round_key) * np.uint64(0xFF51AFD7ED558CCD)
            x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
            left, right = right, left ^ (x ^ x >> np.uint64(33)) & mask
        places[walking] = left << h | right
        walking = places >= n
    return places.astype(np.int64)


def parse_mixture(text: str) -> dict[Path, int]:
    """"DIR" -> {DIR: 1}; "A=0.7,B=0.3" -> {A: 7, B: 3}. Raises ValueError."""
    if not set("=,") & set(text) or Path(text).is_dir():
        return {Path(text): 1}
    pairs = [part.rpartition("=")[::2] for part in text.split(",")]
    try:
        weights = {Path(folder): round(1e6 * float(weight)) for folder, weight in pairs}
        lost = any(0 < float(weight) < 1e-6 for _, weight in pairs)
        divisor = 0 if lost else math.gcd(*weights.values())
    except (ValueError, OverflowError):             # no number, or not finite
        divisor = 0
    if (not divisor or min(weights.values()) < 0 or max(weights.values()) > 10 ** 9
            or len({folder.absolute().name for folder in weights}) < len(pairs)):
        raise ValueError(f"--data {text} must be DIR, or DIR=WEIGHT,DIR=WEIGHT ... with weights of "
                         f"0 or 1e-6 to 1000, not all 0, and different last parts of the DIRs")
    return {folder: weight // divisor for folder, weight in weights.items()}


# ---------------------------------------------------------------------------------------------
# Shards of documents, in two passes
# ---------------------------------------------------------------------------------------------


def prepare(files, out: Path, tokenizer: str, seed=0, shard_tokens=100_000_000, skipped=0):
    """Makes a data set of the files in `out`, in place of an earlier one, and returns its meta."""
    before = tokenizer
    with suppress(OSError, ValueError, LookupError, TypeError):
        before = json.loads((out / "meta.json").read_text())["tokenizer"]
    if before != tokenizer:
        raise ValueError(f"{out} holds tokens of {before}, which --tokenizer {tokenizer} would "
                         f"replace: choose another --out, or delete {out}/meta.json")
    encoding = get_tokenizer(tokenizer)
    old = [path for split in SPLITS for path in shards_of(out, split)]
    if foreign := [path for path in old if not re.fullmatch(r"(train|val)_\d{6}\.bin", path.name)]:
        raise ValueError(f"{foreign[0]} would mix with the new shards: choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        aside = tempfile.TemporaryDirectory(prefix=".new-", dir=out)
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror}): choose another --out") from error
    with aside as folder:
        cuts, size, counts = index_documents(files, seed)
        note = progress("tokenising", size)
        counts["skipped"] += skipped
        total, text_bytes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        for split, tokens, size in encode(read_jobs(files, cuts), encoding):
            text_bytes[split] += size
            note(size)
            while len(tokens):
                number, have = divmod(total[split], shard_tokens)
                now, tokens = np.split(tokens, [shard_tokens - have])
                with open(f"{folder}/{split}_{number:06d}.bin", "r+b" if have else "wb") as file:
                    file.write(np.array([MAGIC, VERSION, have + len(now)], "<i4"))
                    file.seek(HEADER_BYTES + 2 * have)      # what is skipped reads as zeros
                    file.write(now)
                total[split] += len(now)
        new = sorted(Path(folder).iterdir())
        meta = dict(tokenizer=tokenizer, vocab_size=encoding.n_vocab, seed=seed, tokens=total,
                    text_bytes=text_bytes, bytes_per_token=text_bytes["val"] / total["val"],
                    fingerprint=sha256_of(*new), **counts)  # headers too: shards bound windows
        new.append(Path(folder, "meta.json"))
        new[-1].write_text(json.dumps(meta, indent=2) + "\n")
        (out / "meta.json").write_text("unfinished: run data.py again\n")  # no JSON: is refused
        for path in old:
            path.unlink()
        for path in new:
            os.replace(path, out / path.name)
    return meta


def index_documents(files, seed: int):
    """Pass 1: cuts, int64 (documents,): how many bytes of each go to train; the rest goes to val.
    -1: neither, for it repeats an earlier one or has no text. The bytes of the others; counts."""
    table, note = bytearray(), progress("reading", sum(path.stat().st_size for path in files))
    for blocks in (blocks for path in files for blocks in read_documents(path)):
        # Salted with the seed, one hash serves both to find duplicates and to split.
        digest = hashlib.blake2b(digest_size=16, salt=seed.to_bytes(16, "little"))
        size, has_text = 0, False
        for text in blocks:
            raw = text.encode()
            digest.update(raw)
            note(len(raw))
            size, has_text = size + len(raw), has_text or not text.isspace()
        table += digest.digest() + (size * has_text).to_bytes(8, "little")
    table = np.frombuffer(table, [("digest", "S16"), ("size", "<i8")])
    size, first = table["size"], np.unique(table["digest"], return_index=True)[1]
    unique = first[size[first] > 0]
    if not len(unique) or size[unique].max() < 5:       # may be one character: none for one split
        raise ValueError("the input holds no text, or less than 5 bytes: give it more")
    cuts = np.full(len(size), -1)
    if len(unique) < VAL_ONE_IN:
        cuts[unique] = size[unique] - np.maximum(size[unique] // VAL_ONE_IN, 1)
    else:
        score = table["digest"][unique].view("<u8")[::2]
        val = score < 2**64 // VAL_ONE_IN
        val[score.argmin()], val[score.argmax()] = True, False      # at least one to each split
        cuts[unique] = np.where(val, 0, size[unique])
    return cuts, int(size[unique].sum()), dict(
        documents=len(unique), skipped=int((size == 0).sum()),
        duplicates=int((size > 0).sum()) - len(unique))


def read_jobs(files, cuts):
    """Pass 2: (split, job): texts enough to be worth a thread, "" where a document begins."""
    jobs = {split: [] for split in SPLITS}
    documents = (blocks for path in files for blocks in read_documents(path))
    for blocks, cut in zip(documents, cuts, strict=True):
        for split, texts in groupby(halves(blocks, int(cut)) if cut >= 0 else (), lambda h: h[0]):
            jobs[split].append("")
            for text in chunks(text for _, text in texts):
                jobs[split].append(text)
                if len(text) > PIECE // 8 or len(jobs[split]) > 100:
                    yield split, jobs[split]
                    jobs[split] = []
    yield from ((split, job) for split, job in jobs.items() if job)


def halves(blocks, cut: int):
    """(split, text): train up to the last whole character before byte `cut`, val from there on."""
    for block in blocks:
        raw = block.encode()
        head = raw[:max(cut, 0)].decode(errors="ignore")
        yield from (half for half in zip(SPLITS, (head, block[len(head):])) if half[1])
        cut -= len(raw)


# Where a text can be cut so that its sides, encoded apart, give the tokens of the whole: before a
# space or newline that follows a character which is no white space. GPT-2's pattern makes words,
# which have white space at most as their first character, and runs of white space. So a word ends
# here in any case, and no look-ahead reaches this far. Greedy: match() finds the last such place.
CUT = re.compile(r"(?s:.*)\S(?=[ \n])")


def chunks(blocks):
    """The same text in pieces of at most PIECE characters, cut by CUT; or, in a stretch of PIECE
    characters without such a place, which is no prose, at its end, at the price of a few tokens."""
    held = ""
    for block in blocks:
        held, start = held + block, 0
        while len(held) - start > PIECE:
            cut = CUT.match(held, start, start + PIECE)
            end = cut.end() if cut else start + PIECE
            yield held[start:end]
            start = end
        held = held[start:]
    yield held


def encode(jobs, encoding):
    """(split, tokens as uint16, bytes of text) of every job in order, by threads on all cores:
    tiktoken lets go of Python's lock. Only a few jobs are under way, so that memory is bounded."""
    def work(split, job):
        tokens = [encoding.encode_to_numpy(text, disallowed_special=()) if text
                  else [encoding.eot_token] for text in job]
        tokens = np.concatenate(tokens, dtype="<u2", casting="unsafe")
        return split, tokens, len("".join(job).encode())

    cores, pending = os.cpu_count() or 1, []
    with ThreadPoolExecutor(cores) as pool:
        for job in jobs:
            pending.append(pool.submit(work, *job))
            if len(pending) > 2 * cores:
                yield pending.pop(0).result()
        while pending:
            yield pending.pop(0).result()


# ---------------------------------------------------------------------------------------------
# Documents
# ---------------------------------------------------------------------------------------------


def read_documents(path: Path):
    """Every document of a file, as an iterable of strings that joined are its text."""
    if path.suffix == ".eot":           # TinyStories: lines of <|endoftext|> between the documents
        for between, lines in groupby(read_text(path, lines=True), lambda s: s.strip() == EOT):
            if not between:
                yield ["".join(lines).strip()]
    elif path.suffix == ".jsonl":
        for number, line in enumerate(read_text(path, lines=True), 1):
            try:
                if line.strip():
                    text = json.loads(line)["text"]
                    text.encode()
                    yield [text]
            except (ValueError, RecursionError) as error:       # half a surrogate pair, too
                raise ValueError(f"{path} line {number} is not JSON text: {error}") from None
            except (KeyError, TypeError, AttributeError):
                raise ValueError(f'{path} line {number} lacks the string field "text"') from None
    else:
        yield read_text(path)


def read_text(path: Path, lines: bool = False):
    """The text of a file in lines or blocks. ValueError names the first byte that is not UTF-8."""
    with open(path, encoding="utf-8", newline="\n") as file:    # "\n": line ends stay as they are
        try:
            yield from file if lines else iter(lambda: file.read(BLOCK), "")
        except UnicodeDecodeError as error:             # error.object is what was read last
            offset = file.buffer.tell() - len(error.object) + error.start
            raise ValueError(f"{path} is not UTF-8 text, see byte {offset}: convert it") from None


def standard_library() -> tuple[list[Path], int]:
    """The interpreter's own .py files, without tests, and how many others cannot be read."""
    files, skipped = [], 0
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        for path in [Path(folder, name) for name in names if name.endswith(".py")]:
            try:
                path.read_text(encoding="utf-8")
                files.append(path)
            except (OSError, ValueError):
                skipped += 1
    return sorted(files), skipped


def progress(what: str, total: int, done: int = 0):
    """note(n): n more of `total` bytes are done. It tells how many, the rate and the time left on
    standard error: a terminal five times a second and at the end, anything else once a minute."""
    terminal, before, began = sys.stderr.isatty(), done, time.monotonic()
    told = began

    def note(count: int) -> None:
        nonlocal done, told
        done, now = done + count, time.monotonic()
        if now - told >= (0.2 if terminal else 60) or terminal and done == total:
            told, rate = now, (done - before) / max(now - began, 1e-9)
            left = round(max(total - done, 0) / rate)
            print(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s, "
                  f"{left // 60}m{left % 60:02d}s left   ", file=sys.stderr, flush=True,
                  end="\r" if terminal and done != total else "\n")
    return note


# ---------------------------------------------------------------------------------------------
# Downloads
# ---------------------------------------------------------------------------------------------


HUB = "https://huggingface.co"
# name: address, sha256 (None: the length is verified), suffix of the copy: how it is read
DOWNLOADS = {"shakespeare": (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", ".txt"), "tinystories": (
    f"{HUB}/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt", None,
    ".eot"), "fineweb": (f"{HUB}/datasets/kjj0/fineweb10B-gpt2/resolve/main/", None, ".bin")}
FINEWEB_SHARDS = 103        # to train on, 100M tokens each, as is the one to validate on
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
              "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}


def download(url: str, path: Path, sha256: str | None = None, tries: int = 4, wait: float = 0.5,
             check=lambda path: None):
    """Downloads url to path, which appears only when whole by its sha256, or else by its length and
    because `check` raises no ValueError. What has come waits in path.part: the next try or run goes
    on from there, or, where the server has no more and the file is still not right, starts over.
    ConnectionError after `tries` tries."""
    import requests             # here, as other packages: train.py starts without them
    if path.exists() and sha256 in (None, sha256_of(path)):
        with suppress(ValueError):
            check(path)
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.touch()
    error = "it is empty"
    for attempt in range(tries):
        time.sleep(attempt and wait * 2 ** attempt)
        ask = {"Range": f"bytes={part.stat().st_size}-", "Accept-Encoding": "identity"}
        try:
            with requests.get(url, headers=ask, stream=True, timeout=(10, 30)) as reply:
                if reply.status_code in (200, 416):     # all of it instead; or nothing from there
                    os.truncate(part, 0)
                if reply.status_code == 416:
                    continue                            # the error is that of the try before
                reply.raise_for_status()
                total = int(reply.headers.get("Content-Range", "").rpartition("/")[2]
                            or reply.headers.get("Content-Length", 0))
                note = progress(path.name, total, part.stat().st_size)
                with open(part, "ab") as file:
                    for block in reply.iter_content(BLOCK):
                        note(file.write(block))
            if sha256_of(part) == sha256 if sha256 else part.stat().st_size == total > 0:
                check(part)
                return os.replace(part, path)
            error = f"{part.stat().st_size} of {total} bytes came, or not those expected"
        except (requests.RequestException, ValueError) as problem:
            error = problem
    raise ConnectionError(f"cannot download {url} in {tries} tries ({error}): run it again later, "
                          f"it goes on where it stopped, or put the file at {path}")


def gpt2_files() -> dict[str, Path]:
    """GPT-2's vocabulary, in tiktoken's cache: tiktoken would fetch it itself, but without a
    timeout. Raises ConnectionError."""
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or f"{tempfile.gettempdir()}/data-gym-cache")
    paths = {file: cache / hashlib.sha1((GPT2_URL + file).encode()).hexdigest()
             for file in GPT2_FILES}
    try:
        for file, sha256 in GPT2_FILES.items():
            download(GPT2_URL + file, paths[file], sha256, tries=3)
    except OSError as error:
        where = " and ".join(f"{GPT2_URL}{file} as DIR/{path.name}" for file, path in paths.items())
        raise ConnectionError(f"cannot fetch GPT-2's vocabulary into {cache}: put {where} and set "
                              "TIKTOKEN_CACHE_DIR=DIR (a model of shards that data.py --tokenizer "
                              "bytes has made needs neither)") from error
    return paths


def fetch_shards(url: str, out: Path, count: int) -> dict:
    """The first `count` training shards of FineWeb and its validation shard, with GPT-2's tokens,
    as llm.c and modded-nanogpt take them -> dict(tokens={split: how many in its shards})."""
    for old in (*out.glob("*.bin"), *out.glob("meta.json")):
        if not old.name.startswith("fineweb_"):
            raise ValueError(f"{old} would mix with the new shards: choose another --out")
    for name in ["val_000000", *(f"train_{i:06d}" for i in range(1, count + 1))]:
        file = f"fineweb_{name}.bin"
        download(url + file, out / file, check=TokenDataset.open_shard)
    return dict(tokens={split: TokenDataset(out, split, 1).n_tokens for split in SPLITS})


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def main(argv=None) -> int:
    parser = argparse.ArgumentParser("data.py", allow_abbrev=False, description="Makes shards.")
    parser.error = lambda message: parser.exit(2, f"data.py: {message}\n")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=["python", *DOWNLOADS], default="python",
                        help="python (default) is the standard library's source")
    source.add_argument("--input", nargs="+", type=Path, metavar="FILE",
                        help=".txt or .jsonl, or folders of such")
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"], help="gpt2; bytes for python")
    parser.add_argument("--out", type=Path, metavar="DIR", help="data/DATASET; needed with --input")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="(default: 100M)")
    parser.add_argument("--shards", type=int, metavar="N", help="of fineweb (default: 1)")
    args = parser.parse_args(argv)
    if not 0 <= args.seed < 2**63 or not 1024 <= args.shard_tokens < 2**31:
        parser.error("--seed must be 0 to 2^63 - 1, --shard-tokens 1024 to 2^31 - 1")
    if args.input and not args.out:
        parser.error("--input needs --out DIR, where the shards go")
    fineweb, shards = args.dataset == "fineweb", 1 if args.shards is None else args.shards
    if not 1 <= shards <= FINEWEB_SHARDS or (args.tokenizer == "bytes" if fineweb else args.shards):
        parser.error(f"--dataset fineweb has --shards 1 to {FINEWEB_SHARDS}, of GPT-2's tokens")
    out, usual, skipped = args.out or Path("data", args.dataset), "gpt2", 0
    try:
        if args.input:
            files = [file for path in args.input for file in sorted(
                f for f in path.rglob("*.*") if f.suffix in (".txt", ".jsonl")) or [path]]
            for path in files:
                if path.suffix not in (".txt", ".jsonl"):
                    raise ValueError(f"{path}: only .txt and .jsonl are read: convert or rename it")
                if not path.stat().st_size:
                    raise ValueError(f"{path} is empty: leave it out of --input")
        elif args.dataset == "python":
            (files, skipped), usual = standard_library(), "bytes"
        else:
            url, sha256, suffix = DOWNLOADS[args.dataset]
            url = url.replace(HUB, os.environ.get("HF_ENDPOINT", HUB))
            files = [out / "raw" / (args.dataset + suffix)]
            if not fineweb:
                download(url, files[0], sha256)
        meta = fetch_shards(url, out, shards) if fineweb else prepare(
            files, out, args.tokenizer or usual, args.seed, args.shard_tokens, skipped)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        stopped = "stopped: run it again, and a download goes on where it was"
        print(f"data.py: {str(error) or stopped}", file=sys.stderr)
        return 1 if isinstance(error, (ConnectionError, KeyboardInterrupt)) else 2
    data = "" if out == DEFAULT_OUT else (f" --data {shlex.quote(out.as_posix())}"
                                          f" --out {shlex.quote(f'out/{out.name}')}")
    if not fineweb:
        print("{documents:,} documents, {duplicates:,} duplicates dropped, {skipped:,} without "
              "text skipped".format(**meta), end="; ")
    print("{train:,} tokens to train on, {val:,} to validate on.\n"
          "Now train, in one process or in eight:".format(**meta["tokens"]))
    print(f"python train.py{data}\ntorchrun --nproc_per_node=8 train.py{data} --tp 2 --pp 2")
    return 0


if __name__ == "__main__":
    sys.exit(main())
