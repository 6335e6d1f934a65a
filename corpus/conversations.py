"""The windows of conversations: whole ones, packed with padding. data.py has the windows of text.

    window    | conversation 17 ......... | conversation 4 .... | conversation 90 .. | padding |
    position    0 1 2 ...                   0 1 2 ...             0 1 2 ...            0 0 ...

Each conversation is in one window, from its first token on, so that no answer loses its question.
Positions begin again with each, and a token attends to its own conversation alone
(model.mask_of_packed): the loss of a conversation does not depend on its neighbors. Of the targets
the tokens of answers count in the loss.
"""
from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from corpus.shards import BEGINS, LEARNT


def pack(lengths: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing (Johnson 1974): the longest first, each into the window with the least
    space that is enough. Returns the window of each of these lengths (n,), all at most `size`, and
    the number of windows: a function of the lengths."""
    with_space = defaultdict(list)      # {free space: the windows that have so much}
    spaces = []                         # the free spaces of which there are windows, in order
    windows = np.empty(len(lengths), np.int64)
    count = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        index = bisect_left(spaces, length)
        if index < len(spaces):
            space = spaces[index]
            window = with_space[space].pop()
            if not with_space[space]:
                del spaces[index]
        else:
            space, window = size, count
            count += 1
        windows[i] = window
        left = space - length
        if not with_space[left]:
            insort(spaces, left)
        with_space[left].append(window)
    return windows, count


class ConversationWindows:
    """The windows of a source of conversations, with the methods of data.TextWindows.

    count           of the windows
    n_truncated     conversations that are longer than a window: they lose their end
    n_left_out      those that then have no answer
    """

    def __init__(self, shards: list[np.ndarray], flags: list[np.ndarray], seq_len: int):
        """`flags`: of each shard. All are held in memory. A conversation may begin in one shard and
        end in the next."""
        self.shards, self.seq_len = shards, seq_len
        self.tokens, self.flags = np.concatenate(shards), np.concatenate(flags)
        flags = self.flags
        begins = np.flatnonzero(flags & BEGINS)
        if len(begins) == 0 or begins[0] > 0:
            raise ValueError(f"{shards[0].filename} does not begin with a conversation: remove the "
                             f"shards and run data.py again")
        ends = np.append(begins[1:], len(flags))
        cut_ends = np.minimum(ends, begins + seq_len + 1)
        # reduceat sums between each two of these; every second sum is of a conversation.
        bounds = np.stack([begins, cut_ends], axis=1).ravel()
        has_loss = np.append(flags & LEARNT, 0)             # the last bound is a place, too
        targets = np.add.reduceat(has_loss, bounds, dtype=np.int64)[::2]
        has_answer = targets > 0
        self.n_truncated = int((cut_ends < ends)[has_answer].sum())
        self.n_left_out = int((~has_answer).sum())
        begins, ends, targets = begins[has_answer], cut_ends[has_answer], targets[has_answer]
        if len(begins) == 0:
            raise ValueError(f"{shards[0].filename}: no conversation has an answer in its "
                             f"first {seq_len} + 1 tokens: give a larger --seq-len")
        windows, self.count = pack(ends - begins, seq_len + 1)
        self.n_targets = np.bincount(windows, targets, self.count).astype(np.int64)
        # Those of a window stand in it in the order of the shards: not the longest first.
        order = np.argsort(windows, kind="stable")
        self.begins, self.ends = begins[order], ends[order]
        self.n_conversations = len(begins)
        self.firsts = np.searchsorted(windows[order], np.arange(self.count + 1))

    def arrays(self) -> list[np.ndarray]:
        """As TextWindows: the shards, and their flags."""
        return [*self.shards, self.flags]

    def fill(self, window: int, tokens, positions, has_loss) -> None:
        """Write a window to these rows (T + 1,). The padding at its end stays as it is."""
        start = 0
        for i in range(self.firsts[window], self.firsts[window + 1]):
            begin, end = int(self.begins[i]), int(self.ends[i])
            span = slice(start, start + end - begin)
            tokens[span] = self.tokens[begin:end]
            positions[span] = np.arange(end - begin)
            has_loss[span] = self.flags[begin:end] & LEARNT
            start += end - begin

    def count_targets(self, window: int) -> int:
        return int(self.n_targets[window])

    def describe(self) -> str:
        """How the conversations fill the windows, for the start of a run."""
        n_tokens = int((self.ends - self.begins).sum())
        text = (f"answers  {self.n_targets.sum():,} of {n_tokens:,} tokens are learnt; "
                f"{self.n_conversations:,} conversations in {self.count:,} windows, which are "
                f"{n_tokens / (self.count * (self.seq_len + 1)):.1%} full")
        if self.n_truncated or self.n_left_out:
            text += (f"\nnote     longer than {self.seq_len} + 1 tokens: {self.n_truncated:,} "
                     f"conversations lose their end, {self.n_left_out:,} have no answer before it "
                     f"and are left out: give a larger --seq-len")
        return text
