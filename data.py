"""Data: files of text -> tokens -> shards -> windows -> batches.

    shard       E a   t e x t E a n o t h e r ...       one long array of tokens, E before each text
    windows     |-- 0 --|-- 1 --|-- 2 --|-- 3 --| ...   T + 1 tokens, the last also the next's first
    epoch 0     3 2 5 1 4 0                             each window once, in an order that is a
    epoch 1                 5 4 1 0 3 2                 function of (seed, epoch)
    sequences   3 2 5 1 4 0 5 4 1 0 3 2 ...             what a run reads, numbered 0, 1, 2, ...
    batches     |-----| |-----| |-----|                 B sequences, here 4: (B, T + 1) tokens

A run's position in its data is one integer: how many sequences it has consumed. The next batch is a
function of that number and the seed. So all layouts of ranks read the same batches, and a resume
repeats no sequence and leaves none out.

The plain program reads text by `plain_batch`. train.Run reads a `TokenDataset`, which may also mix
several directories (corpus/mixtures.py) or hold conversations (corpus/conversations.py). As a
program data.py makes the shards, from files of any size and kind (corpus/program.py):

    python data.py                           # the standard library's source, bytes, no network
    python data.py --dataset shakespeare     # or tinystories: downloaded once, GPT-2's tokens
    python data.py --dataset fineweb --shards 2         # tokenized by others, 100M tokens a shard
    python data.py --input a.txt b.jsonl --out data/mine
    python data.py --input chat.jsonl --out data/chat   # conversations: only answers count
"""
import mmap
from pathlib import Path
from typing import NamedTuple

import base      # first: without numpy or tiktoken it ends the program in one line

import numpy as np

from base.batch_ramp import batch_size_at
from corpus.conversations import ConversationWindows
from corpus.mixtures import combine, parse_mixture
from corpus.shards import (HEADER_BYTES, check_shards, find_shards, open_flags, read_header,
                           read_meta)

IGNORE_INDEX = -1       # a target that does not count in the loss, as model.IGNORE_INDEX


# ---- Shards ---------------------------------------------------------------------------------

def open_shard(path: Path) -> np.memmap:
    """The tokens of a shard, (n,), mapped from the disk: only what is used is read.

    It is llm.c's file: 256 int32 (magic number 20240520, version 1, n, zeros), then n tokens as
    uint16. Of a vocabulary above 65,536 they are magic number 20240801, version 7 and uint32."""
    dtype, count = read_header(path)
    tokens = np.memmap(path, dtype, "r", HEADER_BYTES, (count,))
    if hasattr(mmap, "MADV_RANDOM"):    # the disk reads the windows of a batch, not what is around
        tokens.base.madvise(mmap.MADV_RANDOM)
    return tokens


def open_shards(directory, split: str) -> list[np.memmap]:
    """The shards of a split, "train" or "val", in the order of their names."""
    return [open_shard(path) for path in find_shards(Path(directory), split)]


# ---- Windows and their order ----------------------------------------------------------------

class TextWindows:
    """The windows of shards of text. The first of a shard is its tokens 0 to T, the next its tokens
    T to 2 T. Numbers continue from shard to shard. All T targets of a window count in the loss."""

    def __init__(self, shards: list[np.ndarray], seq_len: int):
        self.shards, self.seq_len = shards, seq_len
        counts = [(len(tokens) - 1) // seq_len for tokens in shards]
        self.ends = np.cumsum(counts)           # of each shard: the number after its last window
        self.count = int(self.ends[-1])

    def tokens(self, number: int) -> np.ndarray:
        """The window with this number, (T+1,)."""
        shard = int(np.searchsorted(self.ends, number, side="right"))
        if shard > 0:
            number = number - self.ends[shard - 1]          # in the shard
        return self.shards[shard][number * self.seq_len:(number + 1) * self.seq_len + 1]

    def arrays(self) -> list[np.ndarray]:
        """What decides the windows: the shards that are long enough for one."""
        return [tokens for tokens in self.shards if len(tokens) > self.seq_len]

    def fill(self, number: int, tokens, positions, has_loss) -> None:
        """Write a window to these rows (T + 1,)."""
        tokens[:] = self.tokens(number)
        positions[:] = np.arange(len(positions))
        has_loss[:] = True

    def count_targets(self, number: int) -> int:
        return self.seq_len


def permute(numbers: np.ndarray, n: int, *key: int) -> np.ndarray:
    """These numbers after a permutation of 0 ... n - 1 that is a function of the key, int64 (k,) ->
    int64 (k,). As np.random.permutation(n)[numbers], but it takes no memory, however large n is.

    A Feistel network of six rounds permutes the numbers of 2 h bits (Luby and Rackoff 1988): each
    round XORs one half with a function of the other. A result of n or above goes through the
    network again (cycle walking, Black and Rogaway 2002). At most three in four do."""
    h = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << h) - np.uint64(1)
    round_keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    numbers = numbers.astype(np.uint64)
    walking = np.ones(len(numbers), bool)       # which numbers go through the network (again)
    while walking.any():
        left, right = numbers[walking] >> h, numbers[walking] & mask
        for round_key in round_keys:
            # Products modulo 2^64 and shifts mix the bits, with MurmurHash3's constants.
            x = (right + round_key) * np.uint64(0xFF51AFD7ED558CCD)
            x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
            mixed = left ^ ((x ^ x >> np.uint64(33)) & mask)
            left, right = right, mixed
        numbers[walking] = left << h | right
        walking = numbers >= n
    return numbers.astype(np.int64)


def epoch_windows(sequences: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Which of n windows each of these sequences reads, int64 (k,) -> int64 (k,). Epoch 0 is
    sequences 0 to n - 1, epoch 1 is sequences n to 2 n - 1. Each reads every window once."""
    epochs, numbers = np.divmod(sequences, n)           # numbers within the epoch, 0 to n - 1
    windows = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        windows[in_epoch] = permute(numbers[in_epoch], n, seed, epoch)
    return windows


def plain_windows(shards: list[np.ndarray], seq_len: int, numbers) -> np.ndarray:
    """The windows with these numbers, int64 (B, T+1)."""
    windows = TextWindows(shards, seq_len)
    return np.stack([windows.tokens(number) for number in numbers]).astype(np.int64)


def plain_batch(shards: list[np.ndarray], seq_len: int, seed: int, consumed: int,
                batch_size: int) -> np.ndarray:
    """The batch after `consumed` sequences, int64 (B, T+1)."""
    sequences = np.arange(consumed, consumed + batch_size)
    numbers = epoch_windows(sequences, TextWindows(shards, seq_len).count, seed)
    return plain_windows(shards, seq_len, numbers)


# ---- Text, mixtures of it, conversations ----------------------------------------------------

def open_windows(folder: Path, split: str, seq_len: int) -> tuple:
    """Open a directory -> (the windows of its split, its meta.json)."""
    shards, meta = open_shards(folder, split), read_meta(folder)
    check_shards(folder, split, shards, meta, seq_len)
    if meta["template"] is None:
        return TextWindows(shards, seq_len), meta
    return ConversationWindows(shards, [*map(open_flags, shards)], seq_len), meta


class TokenDataset:
    """The windows of one split of a directory, or of a mixture "A=0.7,B=0.3" of several: T+1 tokens
    each, T = seq_len. Raises FileNotFoundError or ValueError for missing, damaged or short shards.
    """

    def __init__(self, data, split: str, seq_len: int):
        self.seq_len = seq_len
        weights = parse_mixture(str(data))              # {directory: share of the sequences}
        opened = [open_windows(folder, split, seq_len) for folder in weights]
        self.mixture = combine(weights, opened)
        self.meta = self.mixture.meta
        self.n_windows = sum(source.n_windows for source in self.mixture.sources.values())
        self.n_tokens = sum(map(len, self.mixture.shards))
        self.has_conversations = "template" in self.meta

    def window_ids(self, seed: int, start: int, count: int) -> np.ndarray:
        """int64 (count,): the windows that are sequences start, start + 1, ... of a run with this
        seed. Numbers continue from source to source."""
        ids = np.empty(count, np.int64)
        for source, is_from_it, numbers in self.mixture.divide_sequences(start, count):
            ids[is_from_it] = source.first + epoch_windows(numbers, source.n_windows, seed)
        return ids

    def read(self, window_ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and positions, int64 (B, T+1), and whether a token counts in the loss, bool
        (B, T+1). All are 0 for NO_WINDOW, which fills up the last batch of an evaluation."""
        shape = len(window_ids), self.seq_len + 1
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        has_loss = np.zeros(shape, bool)
        for row, windows, number in self.mixture.find(window_ids):
            windows.fill(number, tokens[row], positions[row], has_loss[row])
        return tokens, positions, has_loss

    def rows(self, window_ids) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Inputs, targets and positions, int64 (B, T) each. The inputs are the first T tokens of a
        window, the targets its last T. A target that does not count in the loss is IGNORE_INDEX.
        Positions begin again at 0 with each conversation. Without conversations they are None."""
        tokens, positions, has_loss = self.read(window_ids)
        targets = np.where(has_loss[:, 1:], tokens[:, 1:], IGNORE_INDEX)
        return tokens[:, :-1], targets, positions[:, :-1] if self.has_conversations else None

    def count_targets(self, window_ids) -> int:
        """How many targets of these windows count in the loss. It reads no tokens."""
        return sum(windows.count_targets(number)
                   for _, windows, number in self.mixture.find(window_ids))


class Batch(NamedTuple):
    step: int
    start: int                  # the number of its first sequence
    window_ids: np.ndarray      # (B,) of all ranks
    num_targets: int            # of all ranks: those that count in the loss
    num_tokens: int             # B T
    microbatches: list          # this rank's rows (runtime.loader.Loader.microbatches)

    @property
    def size(self) -> int:
        return len(self.window_ids)


class Batches:
    """A run's position in its data. runtime.loader.Loader loads the batches.

    config              train.py's flags
    consumed            sequences before the next batch, including those that were left out
    sequences_trained   sequences of all batches so far, without those that were left out. The ramp
                        of the batch size depends on it"""

    def __init__(self, data: TokenDataset, config, consumed=0, sequences_trained=0):
        self.data, self.config = data, config
        self.consumed = consumed
        self.sequences_trained = sequences_trained

    def next_size(self) -> int:
        """How many sequences the next batch has."""
        return batch_size_at(self.config, self.sequences_trained)


if __name__ == "__main__":
    from corpus.program import main     # here: it imports what reads files, which training does not
    main()
