"""Near-duplicates: documents that share most of their words, found without comparing each pair.

    text -> words -> shingles: hashes of 5 words each -> 14 bands of 8 minimal hashes -> 14 keys

    document A   | 8 hashes | 8 hashes | ... | 8 hashes |      one key for each band of hashes
    document B   | 8 hashes | 8 hashes | ... | 8 hashes |      equal in one band: near-duplicates

The least of a random hash over all shingles is equal for two documents with probability s, the
share of their shingles that both have (Jaccard). So they agree in a band with s^8, and in at least
one of 14 with 1 - (1 - s^8)^14: 0.06 at s = 0.5, 0.56 at 0.7, 0.92 at 0.8, 1.00 at 0.9.

A character of a script without spaces, as Chinese, Japanese and Thai have, is a word of its own.
So is what stands between the signs of a word that is longer than words are, as of minified code.

Conversations that begin with the same long instruction are not alike for that: what ten of them
have in common in their prompts is not compared.

MinHash: Broder 1997. The sizes are FineWeb's (Penedo et al. 2024).
"""
from concurrent.futures import ThreadPoolExecutor

import numpy as np

WORDS, BANDS, ROWS = 5, 14, 8
MOST_BYTES = 1 << 18            # of a document: longer ones are compared by their beginning
BASE = 0x9E3779B97F4A7C15       # odd, so it has an inverse modulo 2^64
HASHED_AT_ONCE = 256            # shingles, whose 112 hashes fit a core's cache
LONGEST_WORD = 256              # bytes
SIGNS = np.array([chr(byte).isascii() and not chr(byte).isalnum() for byte in range(256)])
# Unicode's blocks of scripts without spaces, each [first, last + 1): Thai and Lao; Tibetan and
# Myanmar; Khmer; New Tai Lue to Tai Tham; radicals, kana, Bopomofo; ideographs, Yi (Hangul, which
# has spaces, is left out); compatibility and full-width forms; ideographs beyond 16 bits.
UNSPACED = np.array([0x0E00, 0x10A0, 0x1780, 0x1800, 0x1980, 0x1AB0, 0x2E80, 0x3130, 0x3190, 0xA4D0,
                     0xF900, 0xFB00, 0xFE30, 0xFE50, 0xFF00, 0xFFF0, 0x20000, 0x40000])
PROMPTS = 500                   # of a group that are looked at: each, or evenly spaced ones
SHARED_BY = 10                  # of them: what so many have is not compared
GROUP, GROUP_HASHES = 2000, 1 << 21     # conversations of a group, or their shingles
MOST_SHARED = 1 << 20           # shingles of prompts that are remembered


def mix(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64: MurmurHash3's last steps. Every bit depends on every bit."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ x >> np.uint64(33)) * np.uint64(factor)
    return x ^ x >> np.uint64(33)


def powers_of(base: int) -> np.ndarray:
    """uint64 (MOST_BYTES + 1,): 1, base, base^2, ... modulo 2^64."""
    factors = np.full(MOST_BYTES + 1, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def ends_without_spaces(raw: np.ndarray) -> np.ndarray:
    """Where words end for a character of a script without spaces, in bytes of UTF-8: before it and
    behind it, where no space follows."""
    leads = np.flatnonzero(raw[:-3] >= 0xE0)            # of characters of three or four bytes
    leads = leads[(raw[leads] != 0xE2) | (raw[leads + 1] >= 0xBA)]      # no quotes and dashes
    if len(leads) == 0:
        return leads
    lengths = np.where(raw[leads] >= 0xF0, 4, 3)
    bits = [raw[leads + i].astype(np.int64) & 0x3F for i in range(4)]
    codes = (bits[0] & 0xF) << 12 | bits[1] << 6 | bits[2]
    longer = (bits[0] & 7) << 18 | bits[1] << 12 | bits[2] << 6 | bits[3]
    codes = np.where(lengths == 4, longer, codes)
    is_unspaced = np.searchsorted(UNSPACED, codes, "right") % 2 == 1
    starts = leads[is_unspaced]
    ends = starts + lengths[is_unspaced]
    return np.r_[starts[starts > 0], ends[raw[ends.clip(max=len(raw) - 1)] != ord(" ")]]


def cut_long_words(raw: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The ends of words, with more within those that are too long: behind each sign."""
    is_long = np.diff(ends, prepend=0) > LONGEST_WORD
    signs = np.flatnonzero(SIGNS[raw[:ends[-1]]])
    signs = signs[is_long[np.searchsorted(ends, signs, "right")]]
    return np.union1d(ends, signs + 1)


class MinHash:
    """The keys of texts."""

    def __init__(self):
        self.powers = powers_of(BASE)
        self.inverse_powers = powers_of(pow(BASE, -1, 2**64))
        drawn = np.random.default_rng(0).integers(2**64, size=(2, BANDS * ROWS), dtype=np.uint64)
        self.factors = drawn[0] | np.uint64(1)
        self.terms = drawn[1]

    def shingles(self, text: str) -> np.ndarray:
        """uint64 (n,): the different hashes of each 5 consecutive words. The hash of a span is the
        sum of byte_i BASE^i, from a running sum, times BASE^-start."""
        words = " ".join(text.lower().split()) + " "
        raw = np.frombuffer(words.encode()[:MOST_BYTES], np.uint8)
        sums = np.zeros(len(raw) + 1, np.uint64)
        np.cumsum(raw * self.powers[:len(raw)], out=sums[1:])
        ends = np.flatnonzero(raw == ord(" ")) + 1
        if not words.isascii():
            more = ends_without_spaces(raw)
            if len(more) > 0:
                ends = np.union1d(ends, more)
        if len(ends) == 0:                  # one word, longer than is compared
            ends = np.array([len(raw)])
        if max(ends[0], (ends[1:] - ends[:-1]).max(initial=0)) > LONGEST_WORD:
            ends = cut_long_words(raw, ends)
        starts = np.r_[0, ends[:-1]]
        n = max(len(ends) - WORDS + 1, 1)
        starts, ends = starts[:n], ends[-n:]
        return np.unique(mix((sums[ends] - sums[starts]) * self.inverse_powers[starts]))

    def keys(self, text: str) -> np.ndarray:
        """uint64 (BANDS,): documents that agree in one of them are near-duplicates."""
        return self.keys_of(self.shingles(text))

    def keys_of(self, hashes: np.ndarray) -> np.ndarray:
        """As `keys`, of the shingles of a text."""
        least = np.full(BANDS * ROWS, 2**64 - 1, np.uint64)
        for start in range(0, len(hashes), HASHED_AT_ONCE):
            part = hashes[start:start + HASHED_AT_ONCE, None] * self.factors + self.terms
            np.minimum(least, part.min(0), out=least)
        rows = mix(least.reshape(BANDS, ROWS) + np.arange(ROWS, dtype=np.uint64))
        return mix(np.bitwise_xor.reduce(rows, axis=1))


class KeyTable:
    """The keys of documents, computed by threads. 112 bytes are kept for each document."""

    def __init__(self, threads: int):
        self.min_hash = MinHash()
        self.pool = ThreadPoolExecutor(threads)
        self.most_jobs = 4 * threads
        self.jobs = []
        self.table = bytearray()
        self.group = []             # of conversations: (the shingles of each, its prompt)
        self.group_hashes = 0
        self.shared = np.zeros(0, np.uint64)

    def add(self, text: str) -> None:
        self.submit(self.min_hash.keys, text)

    def submit(self, work, argument) -> None:
        self.jobs.append(self.pool.submit(work, argument))
        while len(self.jobs) > self.most_jobs:
            self.table += self.jobs.pop(0).result().tobytes()

    def add_conversation(self, text: str, prompt: str) -> None:
        """`prompt`: what of the text is no answer."""
        self.group.append((self.min_hash.shingles(text), prompt))
        self.group_hashes += len(self.group[-1][0])
        if len(self.group) >= GROUP or self.group_hashes > GROUP_HASHES:
            self.finish_group()

    def finish_group(self) -> None:
        """Compare the conversations of the group without what many prompts share."""
        if self.group:
            some = [prompt for _, prompt in self.group[::1 + len(self.group) // PROMPTS]]
            found, counts = np.unique(np.concatenate(list(map(self.min_hash.shingles, some))),
                                      return_counts=True)
            shared = np.union1d(self.shared, found[counts >= SHARED_BY])
            if len(shared) <= MOST_SHARED:
                self.shared = shared
        for hashes, _ in self.group:
            own = hashes
            if len(self.shared) > 0:
                at = np.searchsorted(self.shared, hashes).clip(max=len(self.shared) - 1)
                own = hashes[self.shared[at] != hashes]
            self.submit(self.min_hash.keys_of, own if len(own) > 0 else hashes)
        self.group = []
        self.group_hashes = 0

    def finish(self) -> np.ndarray:
        """uint64 (documents, BANDS)."""
        self.finish_group()
        for job in self.jobs:
            self.table += job.result().tobytes()
        self.pool.shutdown()
        return np.frombuffer(self.table, np.uint64).reshape(-1, BANDS)


def is_repeated(table: np.ndarray) -> np.ndarray:
    """bool (documents,): whether an earlier document has one of a document's keys."""
    repeated = np.zeros(len(table), bool)
    for band in table.T:
        _, first, which = np.unique(band, return_index=True, return_inverse=True)
        repeated |= first[which] < np.arange(len(band))
    return repeated


def occurs_in(table: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool (documents,): whether one of the others has one of a document's keys."""
    return np.any([np.isin(band, other) for band, other in zip(table.T, others.T)], axis=0)
