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

`plain_prepare` writes shards and `plain_batch` reads batches, in the plainest form. `TokenDataset`
and `Batches` give train.Run the same batches. They also read mixtures of several directories
(corpus/mixtures.py) and conversations (corpus/windows.py).

A shard is llm.c's file: 256 int32 (magic number 20240520, version 1, the number of tokens, zeros),
then the tokens as uint16. A vocabulary of more than 65,536 tokens has magic number 20240801,
version 7 and uint32. `python data.py` makes shards from files of any size and kind.
corpus/flags.py has its flags, and corpus/prepare.py does the work.

    python data.py                           # the standard library's source, bytes, no network
    python data.py --dataset shakespeare     # or tinystories: downloaded once, GPT-2's tokens
    python data.py --dataset fineweb --shards 2         # tokenized by others, 100M tokens a shard
    python data.py --input a.txt b.jsonl --out data/mine
    python data.py --input chat.jsonl --out data/chat   # conversations: only answers count
"""
import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

import base      # first: without numpy or tiktoken it ends the program in one line

import numpy as np

from base.batch_ramp import batch_size_at
from corpus.mixtures import NO_WINDOW, open_mixture
from corpus.permutation import permute
from corpus.shards import find_shards, open_shard

IGNORE_INDEX = -1       # a target that does not count in the loss, as model.IGNORE_INDEX


def plain_prepare(texts, tokenizer, directory: Path, seed=0) -> None:
    """Write one shard for each split. The split of a text is a function of (seed, text). Of fewer
    than 20 texts, none may validate. corpus/dedup_and_split.py has rules for them."""
    tokens = dict(train=[], val=[])
    salt = seed.to_bytes(16, "little")
    for text in dict.fromkeys(texts):               # of equal texts the first
        digest = hashlib.blake2b(text.encode(), digest_size=16, salt=salt).digest()
        number = int.from_bytes(digest[:8], "little")           # as if drawn from 0 to 2^64 - 1
        split = "val" if number < 2**64 // 20 else "train"      # 5% of the texts validate
        tokens[split] += [tokenizer.eot_token, *tokenizer.encode_ordinary(text)]
    for split, ids in tokens.items():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids)
        shard = header.tobytes() + np.array(ids, "<u2").tobytes()
        (directory / f"{split}_000000.bin").write_bytes(shard)


def open_shards(directory, split: str) -> list[np.ndarray]:
    """The tokens (n,) of each shard, mapped from the disk: only what is used is read."""
    return [open_shard(path) for path in find_shards(Path(directory), split)]


def plain_window(shards: list[np.ndarray], seq_len: int, number: int) -> np.ndarray:
    """The window with this number, (T+1,). The first of a shard is its tokens 0 to T, the next its
    tokens T to 2 T. Numbers continue from shard to shard."""
    for tokens in shards:
        count = (len(tokens) - 1) // seq_len        # windows of this shard
        if number < count:
            return tokens[number * seq_len:(number + 1) * seq_len + 1]
        number -= count
    raise IndexError("there are fewer windows")


def plain_windows(shards: list[np.ndarray], seq_len: int, numbers) -> np.ndarray:
    """The windows with these numbers, int64 (B, T+1)."""
    windows = [plain_window(shards, seq_len, number) for number in numbers]
    return np.stack(windows).astype(np.int64)


def plain_batch(shards: list[np.ndarray], seq_len: int, seed: int, consumed: int,
                batch_size: int) -> np.ndarray:
    """The batch after `consumed` sequences, int64 (B, T+1)."""
    n = sum((len(tokens) - 1) // seq_len for tokens in shards)
    sequences = np.arange(consumed, consumed + batch_size)
    return plain_windows(shards, seq_len, epoch_windows(sequences, n, seed))


def epoch_windows(sequences: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Which of n windows each of these sequences reads, int64 (k,) -> int64 (k,). Epoch 0 is
    sequences 0 to n - 1, epoch 1 is sequences n to 2 n - 1. Each reads every window once."""
    epochs, numbers = np.divmod(sequences, n)           # numbers within the epoch, 0 to n - 1
    windows = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        windows[in_epoch] = permute(numbers[in_epoch], n, seed, epoch)
    return windows


# ---- The same for a run ----------------------------------------------------------------------

class TokenDataset:
    """The windows of one split, T+1 tokens each, T = seq_len.

    `data` is a directory, or a mixture "A=0.7,B=0.3" of several. Raises FileNotFoundError or
    ValueError for missing, damaged or short shards."""

    def __init__(self, data, split: str, seq_len: int):
        self.seq_len = seq_len
        self.mixture = open_mixture(str(data), split, seq_len)
        self.meta = self.mixture.meta
        self.n_windows = sum(source.n_windows for source in self.mixture.sources.values())
        self.n_tokens = sum(map(len, self.mixture.shards))
        self.has_conversations = "template" in self.meta

    def window_ids(self, seed: int, start: int, count: int) -> np.ndarray:
        """int64 (count,): the windows that are sequences start, start + 1, ... of a run with this
        seed."""
        ids = np.empty(count, np.int64)
        for source, is_from_it, numbers in self.mixture.divide_sequences(start, count):
            ids[is_from_it] = source.first + epoch_windows(numbers, source.n_windows, seed)
        return ids

    def read(self, window_ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and positions, int64 (B, T+1), and whether a token counts in the loss, bool
        (B, T+1). All are 0 for NO_WINDOW."""
        shape = len(window_ids), self.seq_len + 1
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        has_loss = np.zeros(shape, bool)
        for row, windows, number in self.mixture.find(window_ids):
            windows.fill(number, tokens[row], positions[row], has_loss[row])
        return tokens, positions, has_loss

    def tokens_of(self, window_ids) -> np.ndarray:
        """The tokens of these windows, int64 (B, T+1)."""
        tokens, _, _ = self.read(window_ids)
        return tokens

    def rows(self, window_ids) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Inputs, targets and positions, int64 (B, T) each. The inputs are the first T tokens of a
        window, the targets its last T. A target that does not count in the loss is IGNORE_INDEX.
        Positions begin again at 0 with each conversation. Without conversations they are None."""
        tokens, positions, has_loss = self.read(window_ids)
        inputs = tokens[:, :-1]
        targets = np.where(has_loss[:, 1:], tokens[:, 1:], IGNORE_INDEX)
        if not self.has_conversations:
            return inputs, targets, None
        return inputs, targets, positions[:, :-1]

    def count_targets(self, window_ids) -> int:
        """How many targets of these windows count in the loss. It reads no tokens: every rank does
        this for the whole batch, so it must be cheap."""
        return sum(windows.count_targets(number)
                   for _, windows, number in self.mixture.find(window_ids))


class Batch(NamedTuple):
    """The batch of one step."""
    step: int
    start: int                  # the number of its first sequence
    window_ids: np.ndarray      # (B,) of all ranks
    microbatches: list          # this rank's rows (runtime.loader.Loader.microbatches)

    @property
    def size(self) -> int:
        return len(self.window_ids)


class Batches:
    """A run's position in its data. runtime.loader.Loader loads the batches.

    consumed            sequences before the next batch, including those that were left out
    sequences_trained   sequences of all batches so far, without those that were left out. The ramp
                        of the batch size depends on it"""

    def __init__(self, data: TokenDataset, config, consumed=0, sequences_trained=0):
        """`config` has train.py's flags."""
        self.data, self.config = data, config
        self.consumed = consumed
        self.sequences_trained = sequences_trained

    def next_window_ids(self) -> np.ndarray:
        """The windows of the next batch, int64 (B,)."""
        size = batch_size_at(self.config, self.sequences_trained)
        return self.data.window_ids(self.config.seed, self.consumed, size)

    def move_past(self, batch: Batch) -> None:
        """Count the next batch as consumed."""
        self.consumed += batch.size
        self.sequences_trained += batch.size

    def skip_to(self, start: int) -> None:
        """Leave out the sequences before number `start`."""
        self.consumed = start


def split_microbatches(window_ids: np.ndarray, micro_batch: int, dp_rank: int,
                       dp: int) -> np.ndarray:
    """(B,) -> (m, micro_batch): the microbatches of one of dp ranks. The first microbatches of all
    ranks together are the first dp x micro_batch windows, and so on."""
    return window_ids.reshape(-1, dp, micro_batch)[:, dp_rank]      # of (m, dp, micro_batch)


def pad_window_ids(window_ids: np.ndarray, multiple: int) -> np.ndarray:
    """These windows, and then NO_WINDOW until their number is a multiple."""
    missing = -len(window_ids) % multiple
    return np.append(window_ids, np.full(missing, NO_WINDOW))


if __name__ == "__main__":
    from corpus.program import main     # here: it imports what reads files, which training does not
    sys.exit(main())
