"""What data.TokenDataset reads and refuses: windows, epochs, mixtures, batches that grow.

How shards are made: test_data.py."""
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
from base.batch_ramp import batch_size_at, sequences_after, steps_of_epochs
from base.options import Config
from corpus import mixtures
from corpus.mixtures import Mixture, Source, parse_mixture
from runtime import checks
from tests.commands import dataset, shard
from tests.harness import batches_from, megatrons_batch_size, saved


def test_windows_share_one_token_and_stay_in_their_shard(tmp_path):
    """Shards have the split as a word of their names; copies from a Mac have a ._NAME for each.
    Without meta.json names, sizes and samples of the files tell one source from another."""
    (tmp_path / "._train_2.bin").write_bytes(b"no shard")
    made = dataset(tmp_path, {"TinyStories-train": range(13), "retrieval_train_1": range(99, 102),
                              "train_2": range(100, 112), "constrained_val_0": range(9)})
    assert (made.n_tokens, made.n_windows) == (28, 5)
    assert made.read(np.array([2, 0, 4, 3]))[0].tolist() == [
        [8, 9, 10, 11, 12], [0, 1, 2, 3, 4], [104, 105, 106, 107, 108], [100, 101, 102, 103, 104]]
    assert made.read([1])[0].dtype == np.int64
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
    """After any number of sequences each source has given its share, to less than one a source."""
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
        n_windows, begin = rng.randint(1, 500), rng.randint(0, 700)
        state = dict(step=5, tokens=begin * 4, model=dict(seq_len=4))
        made = mixture(dict(a=n_windows, b=7), [[0, dict(a=1, b=0)]])
        position, step = begin, 5
        while position < config.epochs * n_windows:
            position += batch_size_at(config, position)
            step += 1
        assert steps_of_epochs(config, made, state) == step
        assert sequences_after(config, begin, step - 5) == position
    config = Config(batch_size=512, batch_ramp="16:16:1000000")
    assert sequences_after(config, 0, 10 ** 9) == 511_996_842_048       # a loop would take minutes


def test_data_is_a_directory_or_several_by_weight(tmp_path, monkeypatch):
    """--data is DIR, whose name may have a "=", or DIR=WEIGHT,... in lowest terms."""
    monkeypatch.chdir(tmp_path)
    Path("day=1").mkdir()
    for text, weights in {"day=1": {"day=1": 1}, "data/a=0.7,b=0.3": {"data/a": 7, "b": 3},
                          "a=.000001,b=1000,k=v=0": {"a": 1, "b": 10 ** 9, "k=v": 0}}.items():
        assert parse_mixture(text) == {Path(folder): w for folder, w in weights.items()}


def test_epochs_make_the_steps_that_read_the_data_so_often(run_train, tmp_path, monkeypatch):
    """49 windows, in batches of 4. Sequences that were left out do not count. A source of weight 0
    is not read; other weights count from where the run is."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        dataset(Path(name), dict(train=np.arange(197), val=range(9)), fingerprint=name)
    run_train(*"--data a --n-layer 1 --n-head 1 --n-embd 8 --seq-len 4 --batch-size 4 --epochs 2 "
              "--save-every 20".split())
    middle, end = saved(Path("out"), 20), saved(Path("out"), 25)
    for state, given, steps in [
            (end, {}, 25), (end, dict(epochs=2), 25), (end, dict(steps=32), 32),
            (end, dict(epochs=3, batch_size=8), 25 + 6), (middle, dict(batch_size=8), 25),
            (dict(middle, consumed_samples=92), dict(epochs=2), 25),
            (middle, dict(epochs=2, batch_size=8), 20 + 3),
            (middle, dict(epochs=2, data="a=1,b=0"), 25),
            (middle, dict(epochs=2, data="a=1,b=1"), 20 + 29)]:
        config, _ = checks.validate(dict(data="a", seq_len=4) | given, state, 1, "cpu")
        assert config.steps == steps, given


def test_a_token_beyond_the_vocabulary_is_found_by_exactly_one_rank(tmp_path, monkeypatch):
    """Wherever it stands in two shards, which three ranks share."""
    monkeypatch.setattr(mixtures, "CHECKED_AT_ONCE", 1000)
    for at in (0, 6_666, 6_667, 13_334, 19_999, 20_000, 29_999):
        tokens = np.full(30_000, 256)
        tokens[at] = 257
        bad = dataset(tmp_path, {"train_0": tokens[:20_000], "train_1": tokens[20_000:]})
        found = []
        for part in range(3):
            try:
                bad.mixture.check(257, part, 3)
            except ValueError as error:
                found.append(str(error))
        assert len(found) == 1 and f"train_{int(at >= 20_000)}.bin holds the token 257" in found[0]


@pytest.mark.parametrize("file, damage, words", [
    ("train_0.bin", shard(range(20), magic=20240521), "20240521 no header data.py"),
    ("train_0.bin", shard(range(20), version=2), "20240520, 2"),
    ("train_0.bin", shard(range(20), count=21), "21 1064"), ("train_0.bin", shard([]), "1024"),
    ("train_0.bin", shard([1])[:5], "5 bytes"), ("train_0.bin", b"", "0 bytes"),
    ("train_0.bin", shard([1]), "1 tokens are too few for a window of 4 + 1: give more text"),
    ("train_0.bin", shard(range(4)), "4 tokens 4 + 1: give more text, or a smaller --seq-len"),
    ("meta.json", b"{", "remove run data.py again"), ("meta.json", b'{"tokenizer": "gpt2"}', ""),
    ("meta.json", b'{"tokenizer": "bytes", "vocab_size": 257, "bytes_per_token": 1, "fingerprint": '
     b'"f", "tokens": {"train": 3226}}', "5 train 3,226: a shard is missing")])
def test_a_damaged_data_set_is_refused_with_its_file_and_numbers(tmp_path, file, damage, words):
    """Five tokens make a window of 4 + 1; with the damage the ValueError names file and cause."""
    assert dataset(tmp_path, {"train_0": range(5)}).n_windows == 1
    (tmp_path / file).write_bytes(damage)
    with pytest.raises(ValueError) as error:
        data.TokenDataset(tmp_path, "train", 4)
    assert all(word in str(error.value) for word in [file, *words.split()])


def bytes_read_from_disk(path, read):
    """Of a file that is not in memory, while `read` is called: by the kernel's count."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    counts = []
    for then in (read, int):
        told = Path("/proc/self/io").read_text()
        counts.append(int(re.search(r"^read_bytes: (\d+)$", told, re.M)[1]))
        then()
    return counts[1] - counts[0]


@pytest.mark.claim("`plain_batch` reads the batches of a run.")
@pytest.mark.parametrize("first", [0, 5, 30, 1000])
def test_plain_batch_reads_what_a_run_reads(tmp_path, first):
    """The batches cross the ends of epochs, and of shards of several lengths."""
    rng = np.random.default_rng(0)
    made = dataset(tmp_path, {f"train_{number}": rng.integers(257, size=length)
                              for number, length in enumerate([52, 20, 3, 41])})    # one too short
    batch = data.plain_batch(data.open_shards(tmp_path, "train"), 4, 1337, first, 29)
    assert made.n_windows == 26
    assert batch.tolist() == made.read(made.window_ids(1337, first, 29))[0].tolist()


@pytest.mark.claim("Training on data larger than memory reads the windows of a batch alone from "
                   "the disk.")
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count reads")
def test_windows_are_read_from_the_disk_alone(tmp_path):
    """32 windows of 2 kB of a cold shard of 48 MB: at most three pages each. A plain map of the
    file reads around each of them, several times as much."""
    dataset(tmp_path, dict(train_0=np.random.default_rng(0).integers(257, size=24_000_000)))
    file = tmp_path / "train_0.bin"
    made = data.TokenDataset(tmp_path, "train", 1024)
    windows = made.window_ids(1, 0, 32)
    ours = bytes_read_from_disk(file, lambda: made.read(windows)[0])
    del made
    tokens = np.memmap(file, "<u2", "r", 1024)
    plain = bytes_read_from_disk(file, lambda: [tokens[1024 * i:1024 * (i + 1) + 1].sum()
                                                for i in windows.tolist()])
    if plain > 0:               # in a file system in memory nothing is read
        assert 0 < ours <= 32 * 3 * 4096 < plain / 2, (ours, plain)
