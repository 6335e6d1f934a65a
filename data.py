"""Data: text -> tokens -> shards -> batches.

    .txt, .jsonl --pass 1--> hash and size of each document: drop duplicates, choose the split
    .txt, .jsonl --pass 2--> pieces of text --tiktoken--> tokens --> DIR/train_000000.bin, ...
                                                                     DIR/val_000000.bin, meta.json
    DIR/*.bin --memmap--> windows of T+1 tokens --permute--> batches (B, T+1), of several DIRs mixed

A document is a .txt file, or the field "text" of a line of .jsonl; lines of <|endoftext|> cut a
.txt into several. The token <|endoftext|> stands before each document; the same characters
elsewhere in a text are ordinary text. A shard is llm.c's:
int32 (256,): magic 20240520, version 1, number of tokens n, zeros; then uint16 (n,): the tokens.
- Memory is bounded: 24 bytes are kept for each document, and a line of .jsonl is read as a whole.
- The split is a function of (seed, text of the document): about 5% of the documents validate. If
  these hold more than a quarter of the text, each gives only its end, together 5% of all. With
  fewer than 20 documents, each gives its last 5%. Of equal documents the first is kept.
- Sequence number s of a training run is a function of (seed, s) alone.

    python data.py                           # the standard library's source, bytes, no network
    python data.py --dataset shakespeare     # or tinystories: downloaded once; GPT-2's tokens
    python data.py --dataset fineweb --shards 2         # tokenised by others, 100M tokens a shard
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
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from runtime.commandline import Parser      # first: without numpy it ends the program in one line

import numpy as np

from runtime.corpora import (BLOCK, DOWNLOADS, EOT, FINEWEB_SHARDS, HUB, NotText, check_problems,
                             download, last_cause, progress, read_documents, read_url,
                             standard_library)
from runtime.files import (change_of, check_writable, explain, is_failure, most_open_files, named,
                           new_folder, sha256_of, sha256_of_samples, signals_stop, what_it_is)
from runtime.inputs import find_files
from runtime.inputs import note as tell
from runtime.other_names import DATA_ADVICE

SPLITS = ("train", "val")
VAL_ONE_IN = 20             # documents, or bytes of each document where there are fewer
DEFAULT_OUT = Path("data/python")
SEQ_LEN = 128               # train.py's default, for a warning
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
PADDING = -1                # in place of a window's number: a row without tokens


# ---- Tokens and shards ----------------------------------------------------------------------

def get_tokenizer(name: str):
    """A tiktoken.Encoding. "gpt2": GPT-2's BPE, 50257 tokens. "bytes": token i is byte i, and 256
    is <|endoftext|>. Raises ValueError for another name, ConnectionError without a vocabulary."""
    import tiktoken.load        # imported here, like requests: train.py runs without them
    if name == "bytes":         # the pattern bounds the characters processed at once; no merges
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        raise ValueError(f"there is no tokenizer {name!r} here, only gpt2 and bytes: `python -m "
                         f"tools.huggingface export FILE.pt DIR` takes its model to where it is")
    tiktoken.load.read_file = read_url      # tiktoken's own may wait for ever
    try:
        return tiktoken.get_encoding("gpt2")        # downloads its vocabulary once
    except (OSError, ValueError) as error:      # ValueError: the file has the wrong hash
        raise ConnectionError(f"GPT-2's vocabulary could not be loaded ({last_cause(error)}): add "
                              f"--tokenizer bytes to data.py's flags, which needs none, or run it "
                              f"again later, or set TIKTOKEN_CACHE_DIR to a folder that has it"
                              ) from None


def append_tokens(directory: Path, split: str, tokens, written: int, shard_tokens: int) -> None:
    """Append uint16 tokens (n,) to the shards of a split, which hold `written` tokens so far."""
    while len(tokens) > 0:
        number, position = divmod(written, shard_tokens)
        part = tokens[:shard_tokens - position]
        path = directory / f"{split}_{number:06d}.bin"
        with named(path), open(path, "r+b" if position else "wb") as file:
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
    if header and header[0] != MAGIC:
        what = what_it_is(path) or ("it has no header of llm.c's format (nanoGPT's files have "
                                    "none)")
        raise ValueError(f"{path} begins with {header[0]}, not {MAGIC}: {what}: make shards from "
                         f"the text by python data.py --input FILE --out DIR")
    count = header[2] if header[:2] == [MAGIC, VERSION] else 0
    if count < 1 or size != HEADER_BYTES + 2 * count:
        raise ValueError(f"{path} is not a complete shard: expected header {MAGIC}, {VERSION}, n "
                         f"and {HEADER_BYTES} + 2 n bytes, got {header} and {size} bytes: remove "
                         f"it, and make or copy it again")
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (count,))


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


def read_meta(directory: Path) -> dict:
    """The entries of meta.json that training needs. Shards without it that data.py did not make
    are taken for GPT-2's tokens; their fingerprint is of samples of the files, and `former` is the
    one of names and sizes that older checkpoints have. Raises ValueError if meta.json is damaged
    or lost."""
    path = directory / "meta.json"
    try:
        meta = json.loads(path.read_text())
        needed = {key: meta[key]
                  for key in ("tokenizer", "vocab_size", "bytes_per_token", "fingerprint")}
        return dict(needed, tokens=dict(meta.get("tokens", {})))
    except FileNotFoundError:
        if (directory / "train_000000.bin").exists():       # data.py's own name
            raise ValueError(f"{directory} has no meta.json: copy it, too, or remove the shards "
                             f"and run data.py again") from None
        files = sorted(directory.glob("[!.]*.bin"))
        names = [(file.name, file.stat().st_size) for file in files]
        return dict(tokenizer="gpt2", vocab_size=50257, bytes_per_token=None, tokens={},
                    fingerprint=sha256_of_samples(files),
                    former=hashlib.sha256(repr(names).encode()).hexdigest())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and the shards, and run data.py "
                         f"again") from None


# ---- Windows of tokens, in the order in which a run reads them -------------------------------

class Source(NamedTuple):
    """A directory of shards: windows first ... first + n_windows - 1 of a TokenDataset."""
    name: str
    weight: int             # of its sequences, relative to those of the other sources
    first: int
    n_windows: int
    meta: dict


class Shards:
    """The tokens of shards, uint16 (n,) each. A mapping takes one of the files that a process may
    have open, often 1,024: of more shards than a quarter of them, the oldest mapping makes way."""

    def __init__(self):
        self.most = max(1, min(most_open_files() // 4, 10_000))     # Linux maps 65,530 at most
        self.paths = []
        self.mapped = {}        # by number

    def __getitem__(self, number: int) -> np.memmap:
        if number not in self.mapped:
            tokens = open_shard(self.paths[number])
            if len(self.mapped) >= self.most:
                del self.mapped[next(iter(self.mapped))]
            self.mapped[number] = tokens
        return self.mapped[number]

    def append(self, path: Path) -> int:
        """Add a shard. Returns the number of its tokens."""
        self.paths.append(path)
        return len(self[len(self.paths) - 1])


class TokenDataset:
    """The windows of one split: T+1 tokens each, T = seq_len; the last is the first of the next.

    `data` is a directory, or a mixture "A=0.7,B=0.3" of sources with one tokenizer. A source gives
    its share of the sequences, in less than an epoch or in several, as in The Pile (Gao et al.
    2020, section 2). A resume with other weights begins a new phase, in which each source continues
    where it stopped. Raises FileNotFoundError or ValueError for missing, damaged or short shards.
    """

    def __init__(self, data, split: str, seq_len: int):
        self.seq_len = seq_len
        self.n_windows = 0
        self.n_tokens = 0
        self.shards = Shards()
        self.firsts = []                # the first window of each
        self.sources = {}               # by fingerprint
        mixture = parse_mixture(str(data))
        for directory, weight in mixture.items():
            first = self.n_windows
            n_tokens = 0
            for path in find_shards(directory, split):
                length = self.shards.append(path)
                self.firsts.append(self.n_windows)
                self.n_windows += (length - 1) // seq_len
                n_tokens += length
            if self.n_windows == first:
                advice = "give more text"
                if length > 1:
                    advice += f", or --seq-len {length - 1} or less"
                raise ValueError(f"{path}: {length} tokens are too few for a window of "
                                 f"{seq_len} + 1: {advice}")
            meta = read_meta(directory)
            if n_tokens != meta["tokens"].get(split, n_tokens):
                raise ValueError(f"{directory} has {n_tokens:,} {split} tokens, but its meta.json "
                                 f"says {meta['tokens'][split]:,}: a shard is missing or of other "
                                 f"data: copy all files again")
            self.n_tokens += n_tokens
            for folder, other in zip(mixture, self.sources.values()):
                pair = f"--data {data}: {folder} and {directory}"
                if meta["fingerprint"] == other.meta["fingerprint"]:
                    raise ValueError(f"{pair} hold the same text: drop one")
                if any(meta[key] != other.meta[key] for key in ("tokenizer", "vocab_size")):
                    raise ValueError(f"{pair} have different tokenizers, {other.meta['tokenizer']} "
                                     f"and {meta['tokenizer']}: make both with one --tokenizer")
            self.sources[meta["fingerprint"]] = Source(
                directory.absolute().name, weight, first, self.n_windows - first, meta)
        metas = [source.meta for source in self.sources.values()]
        self.meta = dict(tokenizer=meta["tokenizer"], vocab_size=meta["vocab_size"],
                         bytes_per_token=self.average(meta["bytes_per_token"] for meta in metas))
        # Each phase is [first sequence, {fingerprint of a source: weight}]; checkpoints store them.
        self.phases = [[0, {key: source.weight for key, source in self.sources.items()}]]

    def window_ids(self, seed: int, position: int, count: int) -> np.ndarray:
        """int64 (count,): the windows of sequences position, position + 1, ... of a run with this
        seed. Each epoch of a source is a permutation of all its windows."""
        ids = np.empty(count, np.int64)
        for key, read in self.counts(np.arange(position, position + count + 1)).items():
            source = self.sources[key]
            epochs, places = np.divmod(np.arange(read[0], read[-1]), source.n_windows)
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                places[in_epoch] = permute(places[in_epoch], source.n_windows, seed, epoch)
            is_from_source = np.diff(read) > 0
            ids[is_from_source] = source.first + places
        return ids

    def tokens_of(self, window_ids) -> np.ndarray:
        """int64 (B, T+1): the tokens of these windows; zeros for PADDING. Raises ValueError for a
        token beyond the vocabulary."""
        tokens = np.zeros((len(window_ids), self.seq_len + 1), np.int64)
        for row, window in zip(tokens, window_ids):
            if window == PADDING:
                continue
            shard = bisect_right(self.firsts, window) - 1
            start = int(window - self.firsts[shard]) * self.seq_len
            row[:] = self.shards[shard][start:start + len(row)]
        if tokens.max(initial=0) >= self.meta["vocab_size"]:
            raise ValueError(f"token {tokens.max()} is beyond a vocabulary of "
                             f"{self.meta['vocab_size']}: run data.py again")
        return tokens

    def counts(self, n: np.ndarray) -> dict[str, np.ndarray]:
        """{fingerprint: int64 (B,)}: how many of the first n sequences (B,) each source gives. The
        first source takes its share of all, rounded down, the next its share of what is left, and
        so on: within a phase, each count is exact to less than one sequence for each source."""
        counts = dict.fromkeys(self.sources, np.zeros_like(n))
        ends = [first for first, _ in self.phases[1:]] + [np.iinfo(np.int64).max]
        for (first, weights), end in zip(self.phases, ends):
            left = np.clip(n, first, end) - first               # sequences of this phase
            weight_left = sum(weights.values())
            for key, weight in weights.items():
                taken = left * weight // max(weight_left, 1)
                counts[key] = counts[key] + taken
                left = left - taken
                weight_left -= weight
        return counts

    def by_current_keys(self, phases: list) -> list:
        """Phases of a checkpoint whose fingerprints can be `former` ones."""
        keys = {source.meta.get("former"): key for key, source in self.sources.items()}
        return [[first, {keys.get(key, key): weight for key, weight in weights.items()}]
                for first, weights in phases]

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
        its share of each shard."""
        for tokens in self.shards:
            largest = np.array_split(tokens, parts)[part].max(initial=0)
            if largest >= self.meta["vocab_size"]:
                raise ValueError(f"{tokens.filename} holds token {largest}, beyond a vocabulary of "
                                 f"{self.meta['vocab_size']}: run data.py again")


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
    def refuse(problem):
        raise ValueError(f"--data {text}: a mixture is DIR=WEIGHT,DIR=WEIGHT: {problem}")
    weights = {}
    names = {}                  # {last part of a folder: the folder}
    for part in text.split(","):
        folder, _, number = part.rpartition("=")
        if not part:
            refuse("a comma stands at an end, or twice: drop it")
        if not folder:
            refuse(f"{part!r} lacks its DIR or its =WEIGHT: give both, as in a=0.7")
        try:
            weight = float(number)
        except ValueError:
            refuse(f"the weight {number!r} of {folder} is no number: give one, as in {folder}=0.7")
        if weight != 0 and not 1e-6 <= weight <= 1000:
            refuse(f"the weight of {folder} must be 0 or 1e-6 to 1000: only their ratios count, so "
                   f"scale all of them; {folder}=0 leaves it out")
        other = names.setdefault(Path(folder).absolute().name, folder)
        if Path(folder) in weights:
            refuse(f"{folder} stands there twice: give it once, with the sum of the weights")
        if other != folder:
            refuse(f"{other} and {folder} have the same last part, which names a source in "
                   f"metrics.jsonl: rename one")
        weights[Path(folder)] = round(1e6 * weight)
    divisor = math.gcd(*weights.values())
    if divisor == 0:
        refuse("all weights are 0: give one that is not")
    return {folder: weight // divisor for folder, weight in weights.items()}


# ---- Batches: a function of the seed and the step -------------------------------------------

class Batch(NamedTuple):
    """The batch of one step."""
    step: int
    position: int               # of its first sequence in the run's order
    window_ids: np.ndarray      # (B,) of all ranks
    microbatches: list          # this rank's part of it (train.Run.load_microbatches)
    new_mixture: bool = False   # the weights of the sources have changed since the batch before

    @property
    def size(self) -> int:
        return len(self.window_ids)


class Batches:
    """Where a run is in its data: the batches, one after another. train.Run loads them.

    position            of the next batch in the run's order, in sequences; skipped ones count
    sequences_trained   the sequences of all batches so far; skipped ones do not count. The ramp of
                        the batch size depends on it
    """

    def __init__(self, data: TokenDataset, config, position=0, sequences_trained=0):
        """`config` has train.py's flags."""
        self.data, self.config = data, config
        self.position = position
        self.sequences_trained = sequences_trained
        self.compared_at = position     # where `new_mixture` was last determined

    def next_window_ids(self) -> np.ndarray:
        """(B,): the windows of the next batch."""
        size = batch_size_at(self.config, self.sequences_trained)
        return self.data.window_ids(self.config.seed, self.position, size)

    def move_past(self, batch: Batch) -> Batch:
        """Count this batch, the next one, as read. Returns it with its `new_mixture`."""
        self.position += batch.size
        self.sequences_trained += batch.size
        new_mixture = self.data.phase_begins(self.compared_at, self.position)
        self.compared_at = self.position
        return batch._replace(new_mixture=new_mixture)

    def skip_to(self, position: int) -> None:
        """Leave out the sequences before `position`."""
        self.position = position


def split_microbatches(window_ids: np.ndarray, micro_batch: int, dp_rank: int,
                       dp: int) -> np.ndarray:
    """(B,) -> (m, micro_batch): the microbatches of one of dp ranks. They take turns, so the first
    microbatches of all of them are the first sequences of the batch."""
    in_turns = window_ids.reshape(-1, dp, micro_batch)              # (m, dp, micro_batch)
    return in_turns[:, dp_rank]


def batch_sizes(config) -> tuple[range, int]:
    """The batch sizes of the ramp, and its length; both in sequences. Without a ramp there is one
    size. --batch-ramp START:INCREMENT:SEQUENCES is Megatron-LM's --rampup-batch-size (GPT-3: Brown
    et al. 2020, section 2.3)."""
    if config.batch_ramp is None:
        return range(config.batch_size, config.batch_size + 1), 1
    start, increment, sequences = map(int, config.batch_ramp.split(":"))
    return range(start, config.batch_size + 1, increment), sequences


def batch_size_at(config, sequences_trained: int) -> int:
    """Size of the next batch after training on so many sequences."""
    sizes, ramp = batch_sizes(config)
    return sizes[min(sequences_trained, ramp) * (len(sizes) - 1) // ramp]


def divide_up(n: int, divisor: int) -> int:
    return (n + divisor - 1) // divisor


def equal_steps(config, sequences_trained: int):
    """Yield (batch size, number of steps that have it) from here on, without an end: a ramp has few
    sizes, however many steps a run has."""
    sizes, ramp = batch_sizes(config)
    increments = len(sizes) - 1
    while sequences_trained < ramp and increments > 0:
        size = batch_size_at(config, sequences_trained)
        next_size_from = divide_up((sizes.index(size) + 1) * ramp, increments)
        steps = divide_up(next_size_from - sequences_trained, size)
        yield size, steps
        sequences_trained += steps * size
    yield sizes[-1], math.inf


def sequences_after(config, sequences_trained: int, steps: int) -> int:
    """Sequences trained on after `steps` more steps."""
    for size, most in equal_steps(config, sequences_trained):
        count = min(steps, most)
        sequences_trained += count * size
        steps -= count
        if steps == 0:
            return sequences_trained


def steps_of_epochs(config, data: TokenDataset, state: dict | None) -> int:
    """The steps of a run that trains on the data --epochs times."""
    step = 0
    sequences_trained = 0
    if state is not None:
        step = state["step"]
        sequences_trained = state["tokens"] // state["model"]["seq_len"]
    epoch = sum(source.n_windows for source in data.sources.values() if source.weight > 0)
    left = config.epochs * epoch - sequences_trained
    for size, most in equal_steps(config, sequences_trained):
        count = min(max(divide_up(left, size), 0), most)
        step += count
        left -= count * size
        if left <= 0:
            return step


# ---- Making shards: two passes over the documents -------------------------------------------

def prepare(files, out: Path, tokenizer: str, seed=0, shard_tokens=100_000_000) -> dict:
    """Tokenise the documents of these files into shards in `out`, which appear when all are
    complete, and return what meta.json says. Raises ValueError if a file is not text, if there is
    too little or, before it tokenises, if `out` holds shards of other text or other flags, which a
    run may be training on."""
    encoding = get_tokenizer(tokenizer)
    check_writable(out)
    before = [change_of(path) for path in files]
    digest, cuts, size, counts = index_documents(files, seed)
    source = f"{digest}, {tokenizer}, {shard_tokens}"
    meta_path = out / "meta.json"
    held = [*out.glob("[!.]*.bin"), *out.glob("meta.json")]
    if held and not (meta_path.exists() and f'"{source}"' in meta_path.read_text()):
        raise ValueError(f"{held[0]} was made of other text, with other flags or by another "
                         f"program: give another --out, or remove the shards and meta.json")
    out.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        tokens = dict.fromkeys(SPLITS, 0)
        text_bytes = dict.fromkeys(SPLITS, 0)
        note = progress("tokenising", size)
        for split, encoded, job_bytes in tokenise(files, cuts, encoding):
            append_tokens(folder, split, encoded, tokens[split], shard_tokens)
            tokens[split] += len(encoded)
            text_bytes[split] += job_bytes
            note(job_bytes)
        for path, change in zip(files, before):
            if change_of(path) != change:
                raise ValueError(f"{path} changed while it was read: run data.py again")
        if sum(text_bytes.values()) != size:
            raise ValueError("the input changed while it was read: run data.py again")
        # The fingerprint covers the headers, too: windows do not cross the end of a shard.
        meta = dict(tokenizer=tokenizer, vocab_size=encoding.n_vocab, seed=seed, tokens=tokens,
                    text_bytes=text_bytes, bytes_per_token=text_bytes["val"] / tokens["val"],
                    fingerprint=sha256_of(*sorted(folder.iterdir())), source=source, **counts)
        with named(meta_path):
            # If this is interrupted, TokenDataset refuses the meta.json that has the source alone.
            meta_path.write_text(json.dumps(dict(source=source)))
            for path in folder.iterdir():
                os.replace(path, out / path.name)
            (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            os.replace(folder / "meta.json", meta_path)
    return meta


def index_documents(files, seed: int):
    """Pass 1: hash and measure every document, drop duplicates, choose the split.

    Returns (digest of all, cuts, bytes that are kept, numbers of documents). cuts, int64
    (documents,): the number of bytes of each that train; the rest validates. A cut of -1 drops a
    document without text, a duplicate, or one that cannot be read.
    """
    note = progress("reading")
    salt = seed.to_bytes(16, "little")      # one hash finds duplicates and chooses the split
    table = bytearray()
    problems = []
    marks = 0                               # <|endoftext|> as ordinary text
    for path in files:
        for blocks in read_documents(path):
            digest = hashlib.blake2b(digest_size=16, salt=salt)
            size = 0
            has_text = False
            for text in blocks:
                if isinstance(text, NotText):
                    problems.append(text)
                    check_problems(problems, len(table) // 24 + 1)
                    has_text = False
                    break
                raw = text.encode()
                digest.update(raw)
                size += len(raw)
                has_text = has_text or not text.isspace()
                if "|" in text:             # is found 40 times faster
                    marks += text.count(EOT)
                note(len(raw))
            table += digest.digest() + (size if has_text else 0).to_bytes(8, "little")
    table = np.frombuffer(table, [("digest", "S16"), ("size", "<i8")])
    check_problems(problems, len(table), at_end=True)
    if marks > 0:
        tell(f"{EOT} stands {marks:,} times within a line or a field, where it is ordinary text: "
             f"in a .txt, a line of its own ends a document")
    has_text = table["size"] > 0
    _, first = np.unique(table["digest"], return_index=True)
    kept = first[has_text[first]]
    sizes = table["size"][kept]
    train_sizes, is_cut = choose_split(table["digest"][kept], sizes)
    cuts = np.full(len(table), -1)
    cuts[kept] = train_sizes
    skipped = len(table) - int(has_text.sum())
    counts = dict(documents=len(kept), skipped=skipped - len(problems),
                  duplicates=len(table) - skipped - len(kept))
    if problems:
        counts["unreadable"] = len(problems)
    digest = hashlib.sha256(table)
    if is_cut:                  # earlier versions made other shards of this text
        digest.update(b"cut")
    return digest.hexdigest(), cuts, int(sizes.sum()), counts


def choose_split(digests, sizes):
    """(bytes of each document that train, whether a rule against long documents holds)."""
    if len(sizes) < VAL_ONE_IN:
        train_sizes = sizes - np.maximum(sizes // VAL_ONE_IN, 1)
        if train_sizes.max(initial=0) < 4:                  # bytes of the longest character
            raise ValueError("the input holds no text, or less than 5 bytes: give it more")
        return train_sizes, False
    score = digests.view("<u8")[::2]                        # the first 8 of the 16 bytes
    validates = score < 2**64 // VAL_ONE_IN
    validates[score.argmin()] = True                        # both splits receive documents
    validates[score.argmax()] = False
    most = int(sizes.sum()) // VAL_ONE_IN
    drawn = int(sizes[validates].sum())
    if drawn <= 5 * most:
        return np.where(validates, 0, sizes), False
    shares = np.maximum(sizes * (most / drawn), 1).astype(np.int64)
    return np.where(validates, sizes - shares, sizes), True


# A text cut here and encoded in parts gives the tokens of the whole: before a space or newline that
# follows another character. GPT-2's pattern splits text into words, which have white space at most
# as their first character, and runs of white space. So a word ends here in any case, and no
# look-ahead crosses this place. The pattern is greedy: match() finds the last such place.
CUT = re.compile(r"(?s:.*)\S(?=[ \n])")


def split_document(blocks, cut: int):
    """Yield (split, text): a document up to the last whole character before byte `cut` trains, the
    rest validates. "" begins each, then come pieces of at most BLOCK characters, cut at CUT. A text
    without such a place, which is not prose, is cut anywhere and may take a few tokens more."""
    rest = {}
    for block in blocks:
        if isinstance(block, NotText):      # pass 1 could read it
            raise block
        raw = block.encode()
        head = raw[:max(cut, 0)].decode(errors="ignore")
        cut -= len(raw)
        for split, text in (("train", head), ("val", block[len(head):])):
            if not text:
                continue
            if split not in rest:
                yield split, ""
            text = rest.get(split, "") + text
            start = 0
            while len(text) - start > BLOCK:
                match = CUT.match(text, start, start + BLOCK)
                end = match.end() if match else start + BLOCK
                yield split, text[start:end]
                start = end
            rest[split] = text[start:]
    yield from rest.items()


def tokenise(files, cuts, encoding):
    """Pass 2: yield (split, tokens as uint16, bytes of text), in order. Threads encode, as tiktoken
    releases Python's lock. Few jobs wait at a time, which bounds memory."""
    def work(split, texts):
        tokens = [encoding.encode_to_numpy(text, disallowed_special=()) if text
                  else [encoding.eot_token] for text in texts]
        tokens = np.concatenate(tokens, dtype="<u2", casting="unsafe")
        return split, tokens, len("".join(texts).encode())

    documents = (blocks for path in files for blocks in read_documents(path))
    pieces = (piece for blocks, cut in zip(documents, map(int, cuts)) if cut >= 0
              for piece in split_document(blocks, cut))
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):        # not all of the machine's, as in a container
        cores = len(os.sched_getaffinity(0))
    texts = {split: [] for split in SPLITS}
    jobs = []
    with ThreadPoolExecutor(cores) as pool:
        for split, text in pieces:
            texts[split].append(text)
            if len(text) > BLOCK // 8 or len(texts[split]) > 100:
                jobs.append(pool.submit(work, split, texts[split]))
                texts[split] = []
            if len(jobs) > 2 * cores:
                yield jobs.pop(0).result()
        jobs += [pool.submit(work, split, last) for split, last in texts.items() if last]
        for job in jobs:
            yield job.result()


# ---- Downloads ------------------------------------------------------------------------------

def fetch_shards(url: str, out: Path, count: int) -> dict:
    """Download the first `count` training shards of FineWeb and its validation shard, in GPT-2's
    tokens, as llm.c and modded-nanogpt use them. Returns dict(tokens={split: number})."""
    if (out / "meta.json").exists():
        raise ValueError(f"{out} holds other shards, see meta.json: give another --out")
    for name in ["val_000000"] + [f"train_{i:06d}" for i in range(1, count + 1)]:
        download(f"{url}fineweb_{name}.bin", out / f"fineweb_{name}.bin")
    return dict(tokens={split: TokenDataset(out, split, 1).n_tokens for split in SPLITS})


# ---- Command line ---------------------------------------------------------------------------

def parse_flags(arguments) -> argparse.Namespace:
    """The flags, with their defaults. A mistake ends the program with status 2."""
    parser = Parser("data.py", "python data.py [--dataset NAME | --input FILE ...] [FLAG ...]",
                    "Turn text into shards of tokens for train.py.", advice=DATA_ADVICE)
    source = parser.add_argument_group("text").add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=["python", *DOWNLOADS], default="python",
                        help="python: the standard library's source, no download (the default)")
    source.add_argument("--input", nargs="+", type=Path, metavar="FILE",
                        help="your own: .txt or .jsonl files, or folders of such")
    add = parser.add_argument_group("shards").add_argument
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default gpt2; bytes for python)")
    add("--out", type=Path, metavar="DIR", help="(default data/DATASET; required with --input)")
    add("--seed", type=int, default=0, metavar="N", help="of the validation split (default 0)")
    add("--shard-tokens", type=int, default=10**8, metavar="N", help="per shard (default 100M)")
    add("--shards", type=int, default=1, metavar="N", help="of fineweb, each of 100M (default 1)")
    parser.add_argument("unnamed", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.unnamed and args.unnamed[0] in ("python", *DOWNLOADS):
        parser.error(f"give --dataset {args.unnamed[0]}")
    if args.unnamed:
        parser.error(f"text is given by --input: give --input {shlex.join(args.unnamed)} --out DIR")
    if not 0 <= args.seed < 2**63 or not 1024 <= args.shard_tokens < 2**31:
        parser.error("--seed must be 0 to 2^63 - 1, --shard-tokens 1024 to 2^31 - 1")
    if args.out is None:
        if args.input:
            parser.error("--input requires --out DIR, where the shards go")
        args.out = Path("data", args.dataset)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is not a directory: give another")
    is_fineweb = args.dataset == "fineweb"
    if args.shards != 1 and not (is_fineweb and 1 <= args.shards <= FINEWEB_SHARDS):
        parser.error(f"only --dataset fineweb has --shards, 1 to {FINEWEB_SHARDS}")
    if is_fineweb and args.tokenizer == "bytes":
        parser.error("--dataset fineweb has GPT-2's tokens: drop --tokenizer bytes")
    if args.tokenizer is None:
        args.tokenizer = "bytes" if args.dataset == "python" and not args.input else "gpt2"
    return args


def print_summary(out: Path, meta: dict) -> None:
    """Print the numbers of documents and tokens, and the commands that train on them."""
    flags = ""
    if out != DEFAULT_OUT:
        flags = f" --data {shlex.quote(out.as_posix())} --out {shlex.quote(f'out/{out.name}')}"
    if "documents" in meta:
        print("{documents:,} documents, {duplicates:,} duplicates dropped, {skipped:,} without "
              "text skipped".format(**meta), end="")
        if "unreadable" in meta:
            print(f", {meta['unreadable']:,} unreadable left out", end="")
        print(end="; ")
    tokens = meta["tokens"]
    print(f"{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on.")
    share = tokens["val"] / (tokens["train"] + tokens["val"])
    if "documents" in meta and not 0.01 <= share <= 0.2:
        print(f"note: {share:.2%} of the tokens validate, not about 5%, because the documents "
              f"differ much in length: another --seed draws others")
    if min(tokens.values()) < SEQ_LEN + 1:
        print(f"This is too little text for windows of {SEQ_LEN} + 1 tokens: add text, or use the "
              f"shorter windows below.")
        flags += f" --seq-len {min(tokens.values()) - 1}"
    print("Now train, in one process or in eight:")
    print(f"python train.py{flags}\ntorchrun --nproc_per_node=8 train.py{flags} --tp 2 --pp 2")


def make(args) -> dict:
    """Download or find the text and make the shards. Returns what meta.json says."""
    url, sha256, suffix = DOWNLOADS.get(args.dataset, ("", None, ""))
    url = url.replace(HUB, os.environ.get("HF_ENDPOINT", HUB))
    if args.input:
        files = find_files(args.input)
    elif args.dataset == "python":
        files = standard_library()
    elif args.dataset == "fineweb":
        return fetch_shards(url, args.out, args.shards)
    else:
        files = [args.out / "raw" / (args.dataset + suffix)]
        download(url, files[0], sha256)
    return prepare(files, args.out, args.tokenizer, args.seed, args.shard_tokens)


def main(argv=None) -> int:
    args = parse_flags(sys.argv[1:] if argv is None else argv)
    try:
        with signals_stop():
            meta = make(args)
    except KeyboardInterrupt:
        print("data.py: stopped: the same command continues a download, and makes the shards from "
              "the beginning", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"data.py: {explain(error)}", file=sys.stderr)
        return 1 if is_failure(error) else 2
    try:
        if sys.stdout is not None and sys.stdout.errors == "strict":    # a name in a poor console
            sys.stdout.reconfigure(errors="backslashreplace")
        print_summary(args.out, meta)
        print(end="", flush=True)
    except OSError as error:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"data.py: the shards are in {args.out}, but standard output cannot be written: "
                  f"{error.strerror}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
