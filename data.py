"""Data: text -> tokens -> shards -> windows -> batches.

    files --corpus/--> tokens of documents --> DIR/train_000000.bin, ..., DIR/val_000000.bin, ...
    DIR/*.bin --memmap--> windows of T+1 tokens --permute--> batches (B, T+1), of several DIRs mixed

    shard       llm.c's file: int32 (256,): magic 20240520, version 1, number of tokens n, zeros;
                then uint16 (n,): the tokens. <|endoftext|> stands before each document. With more
                than 65,536 tokens in the vocabulary: magic 20240801, version 7, uint32
    window      T+1 consecutive tokens of a shard; the last is the first of the next window. Of
                conversations: some whole ones (corpus/windows.py)
    consumed    how many sequences (windows) a run has read or left out. Its sequences are numbered
                0, 1, ...; which window is number n is a function of (seed, n), in every layout

`plain_prepare` makes shards in the plainest form. `python data.py` makes the same ones from files
of any size and kind: corpus/program.py has its flags, corpus/prepare.py the work.

    python data.py                           # the standard library's source, bytes, no network
    python data.py --dataset shakespeare     # or tinystories: downloaded once; GPT-2's tokens
    python data.py --dataset fineweb --shards 2         # tokenised by others, 100M tokens a shard
    python data.py --input a.txt b.jsonl --out data/mine
    python data.py --input chat.jsonl --out data/chat   # conversations: the answers are learnt
"""
import hashlib
import math
import mmap
import sys
from pathlib import Path
from typing import NamedTuple

import runtime      # first: without numpy or tiktoken it ends the program in one line

import numpy as np

from corpus.console import progress
from corpus.shards import (Shards, find_shards, open_flags, open_shard, read_meta,
                           same_tokenizer, show_token)
from corpus.windows import ConversationWindows, TextWindows
from runtime.batch_ramp import batch_size_at

CHECKED_AT_ONCE = 1 << 24   # tokens
PADDING = -1                # in place of a window's number: a row without tokens
NOT_LEARNT = -1             # in place of a target: model.IGNORE_INDEX


# ---- Shards ---------------------------------------------------------------------------------

def plain_prepare(texts, tokenizer, directory: Path, seed=0) -> None:
    """Write one shard for each split. The split of a text is a function of (seed, text). There must
    be 20 texts or more of similar lengths; corpus/split.py has rules for others."""
    tokens = dict(train=[], val=[])
    salt = seed.to_bytes(16, "little")
    for text in dict.fromkeys(texts):               # of equal texts the first
        digest = hashlib.blake2b(text.encode(), digest_size=16, salt=salt).digest()
        validates = int.from_bytes(digest[:8], "little") < 2**64 // 20      # 5% of the texts
        split = "val" if validates else "train"
        tokens[split] += [tokenizer.eot_token, *tokenizer.encode_ordinary(text)]
    for split, ids in tokens.items():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids)
        shard = header.tobytes() + np.array(ids, "<u2").tobytes()
        (directory / f"{split}_000000.bin").write_bytes(shard)


# ---- Windows of tokens, in the order in which a run reads them -------------------------------

def open_shards(directory, split: str) -> list[np.ndarray]:
    """The tokens (n,) of each shard, mapped from the disk: what is not used is not read."""
    return [open_shard(path) for path in find_shards(Path(directory), split)]


def plain_windows(shards: list[np.ndarray], seq_len: int, numbers) -> np.ndarray:
    """The windows with these numbers, int64 (B, T+1). Window i of a shard (n,) is its tokens i T to
    (i + 1) T: its last token is the first of the next window. Shards are numbered one after the
    other."""
    rows = []
    for number in numbers:
        for tokens in shards:
            count = (len(tokens) - 1) // seq_len        # windows of this shard
            if number < count:
                rows.append(tokens[number * seq_len:(number + 1) * seq_len + 1])
                break
            number -= count
    return np.stack(rows).astype(np.int64)


def plain_batch(shards: list[np.ndarray], seq_len: int, seed: int, first: int,
                batch_size: int) -> np.ndarray:
    """The sequences first, first + 1, ... of a run, int64 (B, T+1). Each epoch reads every window
    once, in an order of its own."""
    n = sum((len(tokens) - 1) // seq_len for tokens in shards)
    numbers = []
    for sequence in range(first, first + batch_size):
        epoch, place = divmod(sequence, n)
        numbers += permute(np.array([place]), n, seed, epoch).tolist()
    return plain_windows(shards, seq_len, numbers)


class Source(NamedTuple):
    """A directory of shards: windows first ... first + n_windows - 1 of a TokenDataset."""
    name: str
    weight: int             # of its sequences, relative to those of the other sources
    first: int
    windows: TextWindows | ConversationWindows
    meta: dict

    @property
    def n_windows(self) -> int:
        return self.windows.count


class TokenDataset:
    """The windows of one split: T+1 tokens each, T = seq_len; the last is the first of the next.
    Those of conversations are packed, and their targets are learnt in part.

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
        self.sources = {}               # by fingerprint
        mixture = parse_mixture(str(data))
        for directory, weight in mixture.items():
            paths = find_shards(directory, split)
            first_shard = len(self.shards.paths)
            lengths = [self.shards.append(path) for path in paths]
            numbers = range(first_shard, first_shard + len(paths))
            meta = read_meta(directory)
            if meta["template"] is None:
                windows = TextWindows(self.shards, numbers, lengths, seq_len)
            else:
                flags = [open_flags(path, length) for path, length in zip(paths, lengths)]
                windows = ConversationWindows(self.shards, numbers, flags, seq_len)
            n_tokens = sum(lengths)
            if n_tokens != meta["tokens"].get(split, n_tokens):
                raise ValueError(f"{directory} has {n_tokens:,} {split} tokens, but its meta.json "
                                 f"says {meta['tokens'][split]:,}: a shard is missing or of other "
                                 f"data: copy all files again")
            for folder, other in zip(mixture, self.sources.values()):
                check_pair(f"--data {data}: {folder} and {directory}", other.meta, meta)
            self.sources[meta["fingerprint"]] = Source(
                directory.absolute().name, weight, self.n_windows, windows, meta)
            self.n_windows += windows.count
            self.n_tokens += n_tokens
        metas = [source.meta for source in self.sources.values()]
        self.meta = dict(tokenizer=metas[0]["tokenizer"], vocab_size=metas[0]["vocab_size"],
                         bytes_per_token=self.average(meta["bytes_per_token"] for meta in metas))
        for meta in reversed(metas):
            self.meta |= {key: meta[key] for key in ("tokenizer_file", "template", "template_file",
                                                     "ends") if meta.get(key) is not None}
        self.has_conversations = "template" in self.meta
        # Each is [first sequence, {fingerprint of a source: weight}]; checkpoints store it.
        self.phases = [[0, {key: source.weight for key, source in self.sources.items()}]]

    def window_ids(self, seed: int, start: int, count: int) -> np.ndarray:
        """int64 (count,): the windows that are sequences start, start + 1, ... of a run with this
        seed."""
        ids = np.empty(count, np.int64)
        for key, given in self.counts(np.arange(start, start + count + 1)).items():
            source = self.sources[key]
            windows = epoch_windows(source.n_windows, given[0], given[-1], seed)
            gives = np.diff(given) > 0          # bool (count,): which of them this source gives
            ids[gives] = source.first + windows
        return ids

    def find(self, window_ids):
        """Yield (row, the windows of its source, its number there) of each that is not PADDING."""
        for row, window in enumerate(window_ids):
            if window != PADDING:
                source = next(source for source in self.sources.values()
                              if window < source.first + source.n_windows)
                yield row, source.windows, int(window) - source.first

    def read(self, window_ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, T+1) each: tokens and positions, int64, and whether a token is learnt, as a target.
        All are 0 for PADDING. Raises ValueError for a token beyond the vocabulary."""
        shape = len(window_ids), self.seq_len + 1
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        learnt = np.zeros(shape, bool)
        for row, windows, number in self.find(window_ids):
            windows.fill(number, tokens[row], positions[row], learnt[row])
        if tokens.max(initial=0) >= self.meta["vocab_size"]:
            raise ValueError(f"token {tokens.max()} is beyond a vocabulary of "
                             f"{self.meta['vocab_size']}: run data.py again")
        return tokens, positions, learnt

    def tokens_of(self, window_ids) -> np.ndarray:
        """int64 (B, T+1), as `read`."""
        tokens, _, _ = self.read(window_ids)
        return tokens

    def rows(self, window_ids) -> tuple:
        """int64 (B, T) each: the inputs, the first T tokens of these windows; the targets, the last
        T, NOT_LEARNT where a target has no loss; and the positions of the inputs, which begin again
        at 0 with each conversation. They are None if all sources are text."""
        tokens, positions, learnt = self.read(window_ids)
        targets = np.where(learnt[:, 1:], tokens[:, 1:], NOT_LEARNT)
        return tokens[:, :-1], targets, positions[:, :-1] if self.has_conversations else None

    def count_learnt(self, window_ids) -> int:
        """How many targets of these windows are learnt, without reading them: every rank counts
        those of the whole batch."""
        return sum(windows.count_learnt(number) for _, windows, number in self.find(window_ids))

    def will_need(self, window_ids) -> None:
        """Tell the kernel which windows are read soon, where a system has a call for it."""
        if hasattr(mmap, "MADV_WILLNEED"):
            for _, windows, number in self.find(window_ids):
                windows.will_need(number)

    def counts(self, n: np.ndarray) -> dict[str, np.ndarray]:
        """{fingerprint: int64 (B,)}: how many of the first n (B,) sequences each source gives. From
        n to n + 1 one count grows by one: its source gives sequence n. The first source takes its
        share of all, rounded down, the next its share of what is left, and so on. So within a phase
        a count differs from its exact share by less than the number of sources."""
        counts = dict.fromkeys(self.sources, np.zeros_like(n))
        ends = [first for first, _ in self.phases[1:]] + [np.iinfo(np.int64).max]
        for (first, weights), end in zip(self.phases, ends):
            left = np.clip(n, first, end) - first               # windows of this phase
            weight_left = sum(weights.values())
            for key, weight in weights.items():
                taken = left * weight // max(weight_left, 1)
                counts[key] = counts[key] + taken
                left = left - taken
                weight_left -= weight
        return counts

    def by_current_keys(self, phases: list) -> list:
        """Phases of a checkpoint, with former fingerprints replaced by the present ones."""
        keys = {source.meta.get("former"): key for key, source in self.sources.items()}
        return [[first, {keys.get(key, key): weight for key, weight in weights.items()}]
                for first, weights in phases]

    def go_on(self, phases: list, consumed: int) -> None:
        """Continue a run that has these phases and has consumed so many sequences. If the weights
        differ, a new phase begins here."""
        weights = self.phases[-1][1]
        if weights != phases[-1][1]:
            phases = [phase for phase in phases if phase[0] < consumed] + [[consumed, weights]]
        self.phases = phases

    def phase_begins(self, first: int, end: int) -> bool:
        """Whether a phase after the first begins at one of the sequences first ... end - 1."""
        return any(first <= begin < end for begin, _ in self.phases[1:])

    def epochs(self, n: int) -> dict[str, float]:
        """{name of a source: how many times the first n sequences have read it}."""
        return {self.sources[key].name: (count / self.sources[key].n_windows).item()
                for key, count in self.counts(np.array([n])).items()}

    def average(self, values) -> float | None:
        """The weighted mean of one number for each source; None if a number is None."""
        pairs = [(source.weight, value) for source, value in zip(self.sources.values(), values)
                 if source.weight > 0]
        if any(value is None for _, value in pairs):
            return None
        return sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)

    def check(self, part: int, parts: int, rows: int | None = None) -> None:
        """Raise ValueError if a token is beyond the vocabulary, or beyond the `rows` of a model, if
        it has fewer. Rank number `part` of `parts` reads its share of each shard, so all
        ranks together read the data once. The first tells how far it is, on standard error."""
        share = self.shards[0].itemsize * self.n_tokens // parts
        count_bytes = progress("reading all tokens once, to check them", share, quiet=part > 0)
        for tokens in self.shards:
            own = np.array_split(tokens, parts)[part]
            for start in range(0, len(own), CHECKED_AT_ONCE):
                block = own[start:start + CHECKED_AT_ONCE]
                largest = block.max(initial=0)
                if largest >= self.meta["vocab_size"]:
                    raise ValueError(f"{tokens.filename} holds token {largest}, beyond a "
                                     f"vocabulary of {self.meta['vocab_size']}: run data.py again")
                if rows is not None and largest >= rows:
                    raise ValueError(f"{tokens.filename} holds the token "
                                     f"{show_token(self.meta, int(largest))}, and the model has "
                                     f"rows for {rows:,} tokens: make --data without that token, "
                                     f"or take a model that has it")
                count_bytes(block.nbytes)


def check_pair(pair: str, one: dict, other: dict) -> None:
    """Raise ValueError if a mixture cannot have both sources, of which these are the read_meta."""
    if one["fingerprint"] == other["fingerprint"]:
        raise ValueError(f"{pair} hold the same text: drop one")
    if not same_tokenizer(one, other) or one["vocab_size"] != other["vocab_size"]:
        raise ValueError(f"{pair} have different tokenizers, {one['tokenizer']} and "
                         f"{other['tokenizer']}: make both with one --tokenizer")
    if len({one["template"], other["template"], None}) > 2:
        raise ValueError(f"{pair} have different templates, {one['template']} and "
                         f"{other['template']}: make both with one --template")


def epoch_windows(n: int, start: int, stop: int, seed: int) -> np.ndarray:
    """int64 (stop - start,): the windows start ... stop - 1 that a source of n windows gives. Each
    epoch is a permutation of all n of them."""
    epochs, windows = np.divmod(np.arange(start, stop), n)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        windows[in_epoch] = permute(windows[in_epoch], n, seed, epoch)
    return windows


def permute(numbers: np.ndarray, n: int, *key: int) -> np.ndarray:
    """int64 (k,) -> int64 (k,): these numbers after a permutation of 0 ... n - 1 that is a function
    of the key. It is computed, so it takes no memory, however large n is.

    A Feistel network of six rounds permutes the numbers of 2 h bits (Luby and Rackoff 1988): each
    round XORs one half with a function of the other. A result of n or above goes through the
    network again (cycle walking, Black and Rogaway 2002); at most three in four do.
    """
    bits = (n - 1).bit_length()
    h = np.uint64(max(1, (bits + 1) // 2))
    mask = (np.uint64(1) << h) - np.uint64(1)
    round_keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    numbers = numbers.astype(np.uint64)
    walking = np.ones(len(numbers), bool)
    while walking.any():
        left = numbers[walking] >> h
        right = numbers[walking] & mask
        for round_key in round_keys:
            # Products modulo 2^64 and shifts mix the bits, with MurmurHash3's constants.
            x = (right + round_key) * np.uint64(0xFF51AFD7ED558CCD)
            x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
            x = (x ^ x >> np.uint64(33)) & mask
            left, right = right, left ^ x
        numbers[walking] = left << h | right
        walking = numbers >= n
    return numbers.astype(np.int64)


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
    start: int                  # the number of its first sequence
    window_ids: np.ndarray      # (B,) of all ranks
    microbatches: list          # this rank's part of it (train.Run.load_microbatches)
    new_mixture: bool = False   # the weights of the sources have changed since the batch before

    @property
    def size(self) -> int:
        return len(self.window_ids)


class Batches:
    """Where a run is in its data: the batches, one after another. train.Run loads them.

    consumed            sequences before the next batch; skipped ones count
    sequences_trained   the sequences of all batches so far; skipped ones do not count. The ramp of
                        the batch size depends on it
    """

    def __init__(self, data: TokenDataset, config, consumed=0, sequences_trained=0):
        """`config` has train.py's flags."""
        self.data, self.config = data, config
        self.consumed = consumed
        self.sequences_trained = sequences_trained
        self.compared_at = consumed     # where `new_mixture` was last determined

    def next_window_ids(self) -> np.ndarray:
        """(B,): the windows of the next batch."""
        size = batch_size_at(self.config, self.sequences_trained)
        return self.data.window_ids(self.config.seed, self.consumed, size)

    def move_past(self, batch: Batch) -> Batch:
        """Count this batch, the next one, as read. Returns it with its `new_mixture`."""
        self.consumed += batch.size
        self.sequences_trained += batch.size
        new_mixture = self.data.phase_begins(self.compared_at, self.consumed)
        self.compared_at = self.consumed
        return batch._replace(new_mixture=new_mixture)

    def skip_to(self, start: int) -> None:
        """Leave out the sequences before number `start`."""
        self.consumed = start


def pad_window_ids(window_ids: np.ndarray, multiple: int) -> np.ndarray:
    """These windows, and PADDING up to a multiple."""
    padding = -len(window_ids) % multiple
    return np.append(window_ids, np.full(padding, PADDING))


def split_microbatches(window_ids: np.ndarray, micro_batch: int, dp_rank: int,
                       dp: int) -> np.ndarray:
    """(B,) -> (m, micro_batch): the microbatches of one of dp ranks. They take turns, so the first
    microbatches of all of them are the first windows of the batch."""
    in_turns = window_ids.reshape(-1, dp, micro_batch)              # (m, dp, micro_batch)
    return in_turns[:, dp_rank]


if __name__ == "__main__":
    from corpus.program import main     # here: it imports what reads files, which training does not
    sys.exit(main())
