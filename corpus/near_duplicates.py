"""Near-duplicates: documents that share most of their words, found without comparing each pair.

    text -> words -> shingles: hashes of 5 words each -> 14 bands of 8 minimal hashes -> 14 keys

    document A   | 8 hashes | 8 hashes | ... | 8 hashes |      one key for each band of hashes
    document B   | 8 hashes | 8 hashes | ... | 8 hashes |      equal in one band: near-duplicates

The least of a random hash over all shingles is equal for two documents with probability s, the
share of their shingles that both have (Jaccard). So they agree in a band with s^8, and in at least
one of 14 with 1 - (1 - s^8)^14: 0.06 at s = 0.5, 0.56 at 0.7, 0.92 at 0.8, 1.00 at 0.9.

A character of three or four bytes of UTF-8 is a word of its own, because Chinese, Japanese and Thai
have no spaces.

MinHash: Broder 1997. The sizes are FineWeb's (Penedo et al. 2024).
"""
import numpy as np

WORDS, BANDS, ROWS = 5, 14, 8
MOST_BYTES = 1 << 18            # of a document: longer ones are compared by their beginning
BASE = 0x9E3779B97F4A7C15       # odd, so it has an inverse modulo 2^64
HASHED_AT_ONCE = 256            # shingles, whose 112 hashes fit a core's cache


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


def ends_of_words(raw: np.ndarray) -> np.ndarray:
    """Where words end in the bytes of a text, int64 (n,): behind each space, and before and behind
    each character of three or four bytes, except quotes and dashes, which begin with 0xE2."""
    ends = np.flatnonzero(raw == ord(" ")) + 1
    starts = np.flatnonzero((raw >= 0xE0) & (raw != 0xE2))
    if len(starts) > 0:
        behind = starts + np.where(raw[starts] >= 0xF0, 4, 3)
        behind = behind[behind < len(raw)]
        ends = np.union1d(ends, np.r_[starts[starts > 0], behind[raw[behind] != ord(" ")]])
    return ends if len(ends) > 0 else np.array([len(raw)])


class MinHash:
    """The keys of texts, 112 bytes each."""

    def __init__(self):
        self.powers = powers_of(BASE)
        self.inverse_powers = powers_of(pow(BASE, -1, 2**64))
        drawn = np.random.default_rng(0).integers(2**64, size=(2, BANDS * ROWS), dtype=np.uint64)
        self.factors = drawn[0] | np.uint64(1)
        self.terms = drawn[1]

    def shingles(self, text: str) -> np.ndarray:
        """uint64 (n,): the different hashes of each 5 consecutive words. The hash of a span is the
        sum of byte_i BASE^i, from a running sum, times BASE^-start."""
        words = " ".join(text[:MOST_BYTES].lower().split()) + " "
        raw = np.frombuffer(words.encode()[:MOST_BYTES], np.uint8)
        sums = np.zeros(len(raw) + 1, np.uint64)
        np.cumsum(raw * self.powers[:len(raw)], out=sums[1:])
        ends = ends_of_words(raw)
        starts = np.r_[0, ends[:-1]]
        n = max(len(ends) - WORDS + 1, 1)
        starts, ends = starts[:n], ends[-n:]
        return np.unique(mix((sums[ends] - sums[starts]) * self.inverse_powers[starts]))

    def keys(self, text: str) -> np.ndarray:
        """uint64 (BANDS,): documents that agree in one of them are near-duplicates."""
        hashes = self.shingles(text)
        least = np.full(BANDS * ROWS, 2**64 - 1, np.uint64)
        for start in range(0, len(hashes), HASHED_AT_ONCE):
            part = hashes[start:start + HASHED_AT_ONCE, None] * self.factors + self.terms
            np.minimum(least, part.min(0), out=least)
        rows = mix(least.reshape(BANDS, ROWS) + np.arange(ROWS, dtype=np.uint64))
        return mix(np.bitwise_xor.reduce(rows, axis=1))


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
