"""train.py: recorded losses, the learning rate, and the evaluation of a mixture.

That layouts and resumed runs are alike: test_all.py."""
import math
import re
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest
import torch

import checkpoint
import data
import train
from base.errors import RunError
from base.options import Config
from model import GPT, GPTConfig
from tests.commands import TINY, launch, read_metrics
from tests.harness import column, relative, run_steps, settings, small_state

GOLDEN = GPTConfig(vocab_size=257, seq_len=16, n_layer=3, n_head=4, n_embd=16)
GOLDEN_LOSSES = [5.55859342554, 5.54993836079, 5.55928922506, 5.57521507225, 5.55341832377,
                 5.56903443908, 5.53138854180, 5.57396297904, 5.55446105077, 5.53090800447]


def test_losses_equal_the_recorded_ones(tmp_path):
    """On any CPU, to 1e-9 in fp64: a change of the code that moves a number shows here at once.
    The weights are integers, scaled: torch's normal distribution depends on the CPU."""
    draw = np.random.default_rng(0)
    parameters = {}
    for name, shape in checkpoint.parameter_shapes(GOLDEN).items():
        values = torch.from_numpy(draw.integers(-2 ** 20, 2 ** 20, size=shape) / 2 ** 24)
        parameters[name] = values + 1 if re.search(r"norm.*weight", name) else values
    file = tmp_path / "weights.pt"
    torch.save(small_state(0) | dict(model=asdict(GOLDEN), parameters=parameters, exp_avg={},
                                     exp_avg_sq={}), file)
    config = settings(tmp_path, dtype="fp64", steps=50, lr=3e-3, init_from=str(file), micro_batch=8)
    rows = run_steps(0, 1, (1, 1, 1), config, GOLDEN).rows
    assert relative(column(rows[:10], "loss"), GOLDEN_LOSSES) <= 1e-9


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_plain_step_whose_norm_is_not_finite_ends_the_run(norm):
    model = GPT(GOLDEN).initialize(1)
    shards = [np.arange(400) % GOLDEN.vocab_size]
    config = Config(lr=1e-3)
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(norm)), \
            pytest.raises(RunError, match="lower --lr"):
        train.plain_step(config, model, train.plain_adamw(config, model), shards, 1)


@pytest.mark.parametrize("schedule, changes, rates", [
    ("cosine", {}, {1: 0.2, 5: 1.0, 10: 2.0, 35: 1.7363961, 60: 1.1, 110: 0.2}),
    ("linear", {}, {1: 0.2, 5: 1.0, 10: 2.0, 35: 1.55, 60: 1.1, 110: 0.2}),
    ("cosine", dict(warmup_steps=0, steps=1), {1: 0.2}),
    # The last fifth decays, linearly, also in a prolonged run.
    ("wsd", {}, {5: 1.0, 10: 2.0, 11: 2.0, 88: 2.0, 99: 1.1, 110: 0.2}),
    ("wsd", dict(steps=220), {88: 2.0, 110: 2.0, 176: 2.0, 198: 1.1, 220: 0.2}),
    ("wsd", dict(decay_ratio=0.5), {55: 2.0, 110: 0.2}),
    ("wsd", dict(decay_ratio=0.0), {109: 2.0, 110: 2.0}),
    ("wsd", dict(decay_ratio=0.99), {10: 2.0, 60: 1.1, 110: 0.2})])
def test_the_learning_rate_warms_up_then_decays_to_the_ratio(schedule, changes, rates):
    """A peak of 2 after a warm-up of 10 steps; 0.1 of it at step 110."""
    config = Config(**dict(lr=2.0, steps=110, warmup_steps=10, min_lr_ratio=0.1,
                           lr_schedule=schedule) | changes)
    assert {step: train.learning_rate(config, step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("ranks, dropout", [(1, 0.0), (2, 0.5)])
def test_a_mixture_is_evaluated_by_source_on_evenly_spaced_windows(monkeypatch, tmp_path,
                                                                   two_sources, ranks, dropout):
    """Each source is evaluated on at most 128 windows, without dropout, which is on again in the
    next step."""
    monkeypatch.chdir(two_sources)
    plain = GPT(GPTConfig(257, 16, 2, 2, 16)).initialize(Config.seed).double()
    both = data.TokenDataset("a=3,b=1", "train", 16)
    each = []

    def loss(source, windows):
        tokens = torch.from_numpy(source.read(windows)[0])
        return plain(tokens[:, :-1], tokens[:, 1:]).item() / tokens[:, 1:].numel()
    for name in "ab":
        val = data.TokenDataset(name, "val", 16)
        spaced = np.linspace(0, val.n_windows - 1, min(val.n_windows, 128)).astype(int)
        each.append(pytest.approx(loss(val, spaced), rel=1e-10))
    assert val.n_windows > 128
    assert TINY[-2:] == ["--eval-tokens", "64"]         # left out
    ends = [command.finish() for command in launch(
        ranks, "--data", "a=3,b=1", "--out", tmp_path, *TINY[:-2], "--batch-size", 8, "--steps", 2,
        "--eval-every", 1, "--lr", 0, "--dtype", "fp64", "--dropout", dropout, "--pp", ranks,
        cwd=two_sources)]
    assert ends[0][1].count(" bits a byte") == 2 * 3, ends
    for step, row in enumerate(read_metrics(tmp_path)[0]):
        assert [row["val_loss/a"], row["val_loss/b"]] == each
        mean = (3 * row["val_loss/a"] + row["val_loss/b"]) / 4
        assert row["val_loss"] == pytest.approx(mean, rel=1e-14)
        assert [row["epochs/a"], row["epochs/b"]] == [
            n * (step + 1) / source.n_windows
            for n, source in zip((6, 2), both.mixture.sources.values())]
        expected = loss(both, both.window_ids(Config.seed, 8 * step, 8))
        assert (row["loss"] == pytest.approx(expected, rel=1e-10)) == (dropout == 0)
    assert both.mixture.average([4.0, 1.0]) == 3.25 and both.mixture.average([4.0, None]) is None
    assert data.TokenDataset("a=1,b=0", "val", 16).mixture.average([4.0, None]) == 4.0
