"""A mixture: one directory of shards, or several, each with its share of a run's sequences.

    --data A=0.7,B=0.3

    sequence    0   1   2   3   4   5   6   7   8   9  ...      what the run reads, in this order
    source      B   A   A   B   A   A   B   A   A   A  ...      7 in 10 are of A, 3 in 10 of B
    its number  0   0   1   1   2   3   2   4   5   6  ...      how many the source gave before

A source gives its sequences in the order in which it would give them alone, for less than an epoch
or for several, as in The Pile (Gao et al. 2020, section 2).

The weights may change at a resume. Then a new phase begins, in which each source continues where it
stopped. `Mixture.counts` is all of the arithmetic: which source gives sequence n is a function of n
and the phases.
"""
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.conversations import ConversationWindows
from corpus.shards import HEADER_BYTES, OPTIONAL

NO_WINDOW = -1                  # in place of a window's number: a row without tokens
FOREVER = np.iinfo(np.int64).max
CHECKED_AT_ONCE = 1 << 22       # tokens


class Source(NamedTuple):
    """A directory of shards. Its windows are numbers first, first + 1, ... of the mixture's."""
    name: str
    weight: int             # of its sequences, relative to those of the other sources
    first: int
    windows: ConversationWindows            # or data.TextWindows
    meta: dict              # read_meta

    @property
    def n_windows(self) -> int:
        return self.windows.count


class Mixture:
    """The sources of one split.

    sources     {fingerprint: Source}
    shards      the tokens of all files
    meta        what all have in common: the tokenizer, the template of conversations
    phases      [[first sequence, {fingerprint: weight}], ...]. Checkpoints store it"""

    def __init__(self, sources: dict[str, Source]):
        self.sources = sources
        self.phases = [[0, {key: source.weight for key, source in sources.items()}]]
        metas = [source.meta for source in sources.values()]
        self.meta = dict(
            tokenizer=metas[0]["tokenizer"], vocab_size=metas[0]["vocab_size"],
            bytes_per_token=self.average(meta["bytes_per_token"] for meta in metas),
            **optional_entries(metas))

    # ---- Which source gives a sequence -------------------------------------------------------

    def counts(self, n: np.ndarray) -> dict[str, np.ndarray]:
        """{fingerprint: int64 (B,)}: how many of the first n (B,) sequences each source gives.

        The first source takes its share of the sequences of a phase, rounded down, the next its
        share of what is left, and so on. From n to n + 1 one count grows by one, and its source
        gives sequence n."""
        counts = {key: np.zeros_like(n) for key in self.sources}
        ends = [first for first, _ in self.phases[1:]] + [FOREVER]
        for (first, weights), end in zip(self.phases, ends):
            left = np.clip(n, first, end) - first           # sequences of this phase
            weight_left = sum(weights.values())
            for key, weight in weights.items():
                if weight > 0:
                    taken = left * weight // weight_left
                    counts[key] = counts[key] + taken
                    left = left - taken
                    weight_left -= weight
        return counts

    def divide_sequences(self, start: int, count: int) -> Iterator[tuple]:
        """Yield (source, is_from_it, numbers) of each source. `is_from_it`, bool (count,): which of
        the sequences start, start + 1, ... the source gives. `numbers`, int64 (k,): how many it
        gave before each of these."""
        counts = self.counts(np.arange(start, start + count + 1))
        for key, source in self.sources.items():
            before, after = counts[key][:-1], counts[key][1:]
            is_from_it = after > before
            yield source, is_from_it, before[is_from_it]

    def epochs(self, n: int) -> dict[str, float]:
        """{name of a source: how many times the first n sequences have read it}."""
        counts = self.counts(np.array([n]))
        return {source.name: (counts[key] / source.n_windows).item()
                for key, source in self.sources.items()}

    # ---- Phases ------------------------------------------------------------------------------

    def resume(self, phases: list, consumed: int) -> None:
        """Continue a run that has these phases and has consumed so many sequences. If the weights
        differ, a new phase begins here."""
        weights = self.phases[-1][1]
        if weights != phases[-1][1]:
            phases = [phase for phase in phases if phase[0] < consumed] + [[consumed, weights]]
        self.phases = phases

    # ---- Windows and tokens ------------------------------------------------------------------

    def find(self, window_ids) -> Iterator[tuple]:
        """Yield (row, the windows of its source, its number there) of each but NO_WINDOW."""
        for row, window in enumerate(window_ids):
            if window != NO_WINDOW:
                source = next(source for source in reversed(self.sources.values())
                              if source.first <= window)
                yield row, source.windows, int(window) - source.first

    @property
    def shards(self) -> list[np.ndarray]:
        return [tokens for source in self.sources.values() for tokens in source.windows.shards]

    def check(self, rows: int, part: int, parts: int) -> None:
        """Raise ValueError if a shard holds a token that has none of these rows. Rank number `part`
        of `parts` reads its share of each shard, so all ranks together read the data once."""
        for tokens in self.shards:
            begin, end = (len(tokens) * i // parts for i in (part, part + 1))
            for start in range(begin, end, CHECKED_AT_ONCE):
                # Not through the map, which reads nothing ahead.
                count = min(CHECKED_AT_ONCE, end - start)
                largest = np.fromfile(tokens.filename, tokens.dtype, count,
                                      offset=HEADER_BYTES + tokens.itemsize * start).max()
                if largest >= rows:
                    raise ValueError(f"{tokens.filename} holds the token {largest}, beyond a vocabu"
                                     f"lary of {rows}: make --data again, or take a larger model")

    def average(self, values) -> float | None:
        """The weighted mean of one number for each source. None if a number is None."""
        pairs = [(source.weight, value) for source, value in zip(self.sources.values(), values)
                 if source.weight > 0]
        if None in [value for _, value in pairs]:
            return None
        return sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)


# ---- From the value of --data ----------------------------------------------------------------

def combine(weights: dict[Path, int], opened: list[tuple]) -> Mixture:
    """The mixture of these directories, of which (windows, read_meta) are opened. Raises ValueError
    if they do not go together."""
    sources, first = {}, 0
    for folder, (windows, meta) in zip(weights, opened):
        for other, source in zip(weights, sources.values()):
            check_pair(f"--data: {other} and {folder}", source.meta, meta)
        sources[meta["fingerprint"]] = Source(folder.absolute().name, weights[folder], first,
                                              windows, meta)
        first += windows.count
    return Mixture(sources)


def optional_entries(metas: list[dict]) -> dict:
    """What several sources, or data and the checkpoint of weights, have of OPTIONAL: the ends of
    all, and of the rest what the first has."""
    found, ends = {}, set()
    for meta in reversed(metas):
        if meta.get("template") is not None:
            found.pop("template_file", None)            # of another template
        found |= {key: meta[key] for key in OPTIONAL if meta.get(key) is not None}
        ends.update(meta.get("ends") or ())
    return found | dict(ends=sorted(ends)) if ends else found


def check_pair(pair: str, one: dict, other: dict) -> None:
    """Raise ValueError if a mixture cannot have both sources, of which these are the read_meta."""
    if one["fingerprint"] == other["fingerprint"]:
        raise ValueError(f"{pair} hold the same text: drop one")
    if any(one[key] != other[key] for key in ("tokenizer", "vocab_size")):
        raise ValueError(f"{pair} have different tokenizers, {one['tokenizer']} and "
                         f"{other['tokenizer']}: make both with one --tokenizer")
    if len({one["template"], other["template"], None}) > 2:
        raise ValueError(f"{pair} have different templates, {one['template']} and "
                         f"{other['template']}: make both with one --template")


def parse_mixture(text: str) -> dict[Path, int]:
    """The weights: "DIR" -> {DIR: 1}, "A=0.7,B=0.3" -> {A: 7, B: 3}. Raises ValueError."""
    if not set("=,") & set(text) or Path(text).is_dir():
        return {Path(text): 1}

    def refuse(problem):
        raise ValueError(f"--data {text}: a mixture is DIR=WEIGHT,DIR=WEIGHT, as a=0.7,b=0.3: "
                         f"{problem}")

    weights = {}
    for part in text.split(","):
        folder, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not folder or not (weight == 0 or 1e-6 <= weight <= 1000):
            refuse(f"{part!r} has no DIR, or no weight of 1e-6 to 1000, or 0, which leaves it out")
        if Path(folder).absolute().name in {other.absolute().name for other in weights}:
            refuse(f"{folder} is the second with this last part, which names a source in "
                   f"metrics.jsonl: give it once, or rename one")
        weights[Path(folder)] = round(1e6 * weight)
    divisor = math.gcd(*weights.values())
    if divisor == 0:
        refuse("all weights are 0: give one that is not")
    return {folder: weight // divisor for folder, weight in weights.items()}
