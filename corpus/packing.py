"""Windows of conversations: whole ones, packed.

    window    | conversation 17 ......... | conversation 4 .... | conversation 90 .. | padding |
    position    0 1 2 ...                   0 1 2 ...             0 1 2 ...            0 0 ...

Each conversation is in one window, from its first token on, so that no answer loses its question.
Positions begin again with each, and a token attends to its own conversation alone
(model.mask_of_packed): the loss of a conversation does not depend on its neighbours.

A shard train_000000.bin has a twin train_000000.learn: a byte for each token, a sum of LEARNT and
BEGINS. data.TokenDataset packs when it opens the shards, for the --seq-len of the run.
"""
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from pathlib import Path

import numpy as np

LEARNT = 1                  # an answer's token
BEGINS = 2                  # a conversation's first token
TWIN = ".learn"


def open_twin(shard: Path, count: int) -> np.memmap:
    """The bytes of a shard's twin, uint8 (count,). Raises ValueError if it is lost or damaged."""
    path = shard.with_suffix(TWIN)
    size = path.stat().st_size if path.exists() else None
    if size != count:
        problem = "is missing" if size is None else f"has {size} bytes for {count} tokens"
        raise ValueError(f"{path} {problem}: it says which tokens of {shard.name} are learnt: copy "
                         f"all files again, or remove them and run data.py again")
    return np.memmap(path, "u1", "r")


def pack(lengths: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing (Johnson 1974): the longest first, each into the window with the least
    space that is enough. Returns the window of each of these lengths (n,), all at most `size`, and
    the number of windows: a function of the lengths."""
    with_space = defaultdict(list)      # {space: the windows that have so much left}
    spaces = []                         # those of which there are windows, in order
    windows = np.empty(len(lengths), np.int64)
    count = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            window = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        else:
            space, window = size, count
            count += 1
        windows[i] = window
        left = space - length
        if not with_space[left]:
            insort(spaces, left)
        with_space[left].append(window)
    return windows, count


class PackedWindows:
    """The windows of a source's conversations, T + 1 tokens each, T = seq_len.

    count       of the windows
    learnt      int64 (count,): the targets of each that are learnt, one or more
    cut         conversations that are longer than a window: they lose their end
    left_out    those that then have no answer
    """

    def __init__(self, shard_of, twins: list[np.memmap], seq_len: int, pack_them=True):
        """The twins of a source's shards, in order. shard_of(i) returns the tokens of shard i. A
        conversation may begin in one shard and end in the next. `pack_them`: False puts each
        conversation into a window of its own."""
        self.shard_of, self.twins, self.seq_len = shard_of, twins, seq_len
        lengths = [len(twin) for twin in twins]
        self.starts = np.cumsum([0, *lengths])[:-1]         # of the shards
        flags = np.concatenate(twins)
        begins = np.flatnonzero(flags & BEGINS)
        if len(begins) == 0 or begins[0] > 0:
            raise ValueError(f"{twins[0].filename} does not begin with a conversation: remove the "
                             f"shards and run data.py again")
        ends = np.append(begins[1:], len(flags))
        cut_ends = np.minimum(ends, begins + seq_len + 1)
        learnt_before = np.append(0, np.cumsum(flags & LEARNT, dtype=np.int64))
        learnt = learnt_before[cut_ends] - learnt_before[begins]
        has_answer = learnt > 0
        self.cut = int((cut_ends < ends)[has_answer].sum())
        self.left_out = int((~has_answer).sum())
        begins, ends, learnt = begins[has_answer], cut_ends[has_answer], learnt[has_answer]
        windows, self.count = np.arange(len(begins)), len(begins)
        if pack_them:
            windows, self.count = pack(ends - begins, seq_len + 1)
        self.learnt = np.bincount(windows, learnt, self.count).astype(np.int64)
        # Those of a window stand in it in the order of the shards: not the longest first.
        order = np.argsort(windows, kind="stable")
        self.begins, self.ends = begins[order], ends[order]
        self.firsts = np.searchsorted(windows[order], np.arange(self.count + 1))

    def describe(self) -> str:
        """How the conversations fill the windows, for the start of a run."""
        n_tokens = int((self.ends - self.begins).sum())
        text = (f"answers  {self.learnt.sum():,} of {n_tokens:,} tokens are learnt; "
                f"{len(self.begins):,} conversations in {self.count:,} windows, which are "
                f"{n_tokens / (self.count * (self.seq_len + 1)):.1%} full")
        if self.cut or self.left_out:
            text += (f"\nnote     longer than {self.seq_len} + 1 tokens: {self.cut:,} "
                     f"conversations lose their end, {self.left_out:,} have no answer before it "
                     f"and are left out: give a larger --seq-len")
        return text

    def conversations_of(self, window: int):
        """Yield (first place in the window, begin and end in the shards) of each conversation."""
        place = 0
        for i in range(self.firsts[window], self.firsts[window + 1]):
            begin, end = int(self.begins[i]), int(self.ends[i])
            yield place, begin, end
            place += end - begin

    def fill(self, window: int, tokens=None, positions=None, learnt=None) -> None:
        """Write what a window holds to those of these rows (T + 1,) that are given. The padding at
        its end stays as it is."""
        for place, begin, end in self.conversations_of(window):
            there = slice(place, place + end - begin)
            if tokens is not None:
                tokens[there] = self.read(self.shard_of, begin, end)
            if positions is not None:
                positions[there] = np.arange(end - begin)
            if learnt is not None:
                learnt[there] = self.read(self.twins.__getitem__, begin, end) & LEARNT

    def read(self, array_of, begin: int, end: int) -> np.ndarray:
        """Elements begin ... end - 1 of array_of(0), array_of(1), ..., one behind the other."""
        number = bisect_right(self.starts, begin) - 1
        parts = []
        while begin < end:
            begin_there = begin - self.starts[number]
            part = array_of(number)[begin_there:begin_there + end - begin]
            parts.append(part)
            begin += len(part)
            number += 1
        return np.concatenate(parts)
