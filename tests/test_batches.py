"""What data.TokenDataset reads: windows, epochs, mixtures, and batches that grow.

How shards are made: test_data.py.
"""
import random
from types import SimpleNamespace

import numpy as np
import pytest

import data
from base.batch_ramp import batch_size_at, sequences_after, steps_of_epochs
from base.options import Config
from corpus.mixtures import Mixture, Source
from tests.commands import dataset
from tests.harness import batches_from, megatrons_batch_size


def test_windows_share_one_token_and_stay_in_their_shard(tmp_path):
    """The shards are those that have the split as a word of their names. Without meta.json the
    names, sizes and samples of the files tell one source from another. Folders copied from a Mac
    have a ._NAME for each file."""
    (tmp_path / "._train_2.bin").write_bytes(b"no shard")
    made = dataset(tmp_path, {"TinyStories-train": range(13), "retrieval_train_1": range(99, 102),
                              "train_2": range(100, 112), "constrained_val_0": range(9)})
    assert (made.n_tokens, made.n_windows) == (28, 5)
    assert made.tokens_of(np.array([2, 0, 4, 3])).tolist() == [
        [8, 9, 10, 11, 12], [0, 1, 2, 3, 4], [104, 105, 106, 107, 108], [100, 101, 102, 103, 104]]
    assert made.tokens_of([1]).dtype == np.int64
    assert data.TokenDataset(tmp_path, "val", 4).n_tokens == 9
    keys = []
    for size in (9, 9, 8):
        dataset(tmp_path, {"train_2": range(size)})
        (tmp_path / "meta.json").unlink()
        keys.append(data.TokenDataset(tmp_path, "train", 4).mixture.sources.keys())
    assert keys[0] == keys[1] != keys[2]


def mixture(n_windows, phases):
    """A TokenDataset without tokens; phases are [first sequence, {source: weight}] each."""
    made = data.TokenDataset.__new__(data.TokenDataset)
    sources = {}
    first = 0
    for name, n in n_windows.items():
        windows = SimpleNamespace(count=n)
        meta = dict(tokenizer="bytes", vocab_size=257, bytes_per_token=1.0)
        sources[name] = Source(name, phases[-1][1][name], first, windows, meta)
        first += n
    made.mixture = Mixture(sources)
    made.mixture.phases = phases
    return made


@pytest.mark.parametrize("n", [
    *range(1, 40), 256, 257, 1000, 4097, pytest.param(10 ** 6, marks=pytest.mark.slow)])
def test_an_epoch_is_a_permutation_drawn_from_seed_and_epoch(n):
    """An epoch reads each of n windows once."""
    made, in_order = mixture({"d": n}, [[0, {"d": 1}]]), np.arange(n)
    one, two = made.window_ids(7, 0, 2 * n).reshape(2, n)
    assert np.array_equal(np.sort(one), in_order) and np.array_equal(np.sort(two), in_order)
    if n == 1000:
        assert made.window_ids(1337, 995, 10).tolist() == [
            483, 950, 50, 473, 32, 918, 294, 124, 291, 217]
    if n > 250:
        for other in (two, made.window_ids(8, 0, n), in_order):
            assert (other == one).mean() < 10 / n + 1e-3
        for other in (in_order, np.roll(one, 1)):
            assert abs(np.corrcoef(one, other)[0, 1]) < 4 / n ** 0.5


@pytest.mark.claim("A mixture of data sets is exact in proportion and reads each source without "
                   "replacement.")
@pytest.mark.parametrize("n_windows, phases", [
    (dict(d=5), [[0, dict(d=1)]]), (dict(a=50, b=300), [[0, dict(a=7, b=3)]]),
    (dict(a=1, b=2000), [[0, dict(a=1, b=999)]]), (dict(a=9, b=9), [[0, dict(a=0, b=1)]]),
    (dict(a=40, b=70, c=11, d=400, e=30, f=90), [[0, dict(a=5, b=1, c=3, d=20, e=0, f=5)]]),
    # With other weights each source goes on where it was; d is a new one.
    (dict(a=50, b=300, c=70, d=9), [[0, dict(a=7, b=3, c=0)], [100, dict(a=1, b=1, c=2, d=4)]])])
def test_a_mixture_is_exact_in_proportion_and_reads_each_source_without_replacement(n_windows,
                                                                                    phases):
    """After any number of sequences of a phase, each source has given its share of them, to less
    than one sequence a source."""
    n = 2000
    made = mixture(n_windows, phases)
    windows = made.window_ids(7, 0, n)
    for first, count in [(0, 1), (17, 16), (90, 99), (n - 3, 3), (5, 0)]:
        assert np.array_equal(made.window_ids(7, first, count), windows[first:first + count])
    ends = [*(first for first, _ in phases[1:]), n]
    for name, source in made.mixture.sources.items():
        its = (source.first <= windows) & (windows < source.first + source.n_windows)
        alone = mixture({name: source.n_windows}, [[0, {name: 1}]]).window_ids(7, 0, its.sum())
        assert np.array_equal(windows[its] - source.first, alone)
        assert made.mixture.epochs(n)[name] == its.sum() / source.n_windows
        for (first, weights), end in zip(phases, ends):
            share = weights.get(name, 0) / sum(weights.values())
            off = np.cumsum(its[first:end]) - np.arange(1, end - first + 1) * share
            assert abs(off).max() < len(weights)


@pytest.mark.parametrize("batch_size, ramp, steps", [
    (16, None, 60), (16, "4:4:100", 60), (24, "8:2:77", 60), (9, "1:1:7", 60), (16, "16:3:50", 60),
    (8, "1:7:1", 60), (64, "1:1:5000", 460), (1536, "16:16:585937", 2400)])
def test_the_batch_grows_as_in_megatron(batch_size, ramp, steps):
    """At each step, also past the end of the ramp, batches begin where Megatron-LM's do and have
    their size; so do batches that begin at other samples, as after a rollback."""
    config = Config(batch_size=batch_size, batch_ramp=ramp)
    starts = [first for first, _ in batches_from(config, 0, steps + 1)]
    assert starts[-1] - starts[-2] == batch_size
    for at in (0, 1, 2, 5, 30, steps // 2, steps):
        assert sequences_after(config, 0, at) == starts[at]
    for consumed in range(0, starts[-1], 1 + starts[-1] // 5000):
        assert batch_size_at(config, consumed) == megatrons_batch_size(config, consumed)


def test_the_steps_of_a_long_run_are_counted_without_a_loop():
    """The end of a run and the steps of its epochs are those of a loop over all steps, for 300
    random ramps; and those of 10^9 steps come at once."""
    rng = random.Random(0)
    for _ in range(300):
        start, increment = rng.randint(1, 9), rng.randint(1, 9)
        batch_size = start + increment * rng.randint(0, 12)
        ramp = rng.choice([None, f"{start}:{increment}:{rng.randint(1, 600)}"])
        config = Config(batch_size=batch_size, batch_ramp=ramp, epochs=rng.randint(1, 3))
        n_windows, steps = rng.randint(1, 500), rng.randint(0, 150)
        begin = rng.randint(0, 700)
        position = begin
        for _ in range(steps):
            position += batch_size_at(config, position)
        assert sequences_after(config, begin, steps) == position
        state = dict(step=5, tokens=begin * 4, model=dict(seq_len=4))
        made = mixture(dict(a=n_windows, b=7), [[0, dict(a=1, b=0)]])
        position, step = begin, 5
        while position < config.epochs * n_windows:
            position += batch_size_at(config, position)
            step += 1
        assert steps_of_epochs(config, made, state) == step
    config = Config(batch_size=512, batch_ramp="16:16:1000000")
    assert sequences_after(config, 0, 10 ** 9) == 511_996_842_048       # a loop would take minutes
