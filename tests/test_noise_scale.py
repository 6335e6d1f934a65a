"""The gradient noise scale: right on a quadratic, beside per-sequence gradients, in every layout.

    python -m pytest tests/test_noise_scale.py
    python -m pytest tests/test_noise_scale.py -m slow -s       nano's, as its loss falls
"""
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from models.llama import FAMILIES, LlamaConfig
from runtime.noise_scale import NoiseScale
from tests.harness import (BOUNDS, CFG, INTERLEAVED, TINY, Memory, column, expect_mistake, launch,
                           read_metrics, relative, trained)

SHALLOW = replace(CFG, n_layer=1, vocab_size=64)
QWEN3 = LlamaConfig(64, 16, 1, 4, 32, n_kv_head=2, **FAMILIES["qwen3"])
SMALL = replace(CFG, n_layer=4, n_embd=16)
EVERY_STEP = dict(steps=4, noise_scale=1, lr=1e-2, warmup_steps=1, batch_size=64, micro_batch=8)


def test_a_quadratics_noise_scale_is_within_5_percent():
    """The loss of a sample is |x - y|^2 / 2 with y normal: the gradient is x, its noise has the
    variance of y. Batches have 8 and 64 samples; the mean of 200 steps' answers."""
    rng = np.random.default_rng(0)
    for norm, deviation in [(3.0, 1.0), (2.0, 2.0)]:
        noise, x, answers = NoiseScale(), np.full(400, norm / 20), []
        for _ in range(220):
            gradients = x + deviation * rng.standard_normal((64, 400))      # of 64 samples
            parts = gradients.reshape(8, 8, 400).mean(1)                    # of 8 replicas
            noise.observe((parts ** 2).sum(1).mean(), (gradients.mean(0) ** 2).sum(), 8, 64)
            answers.append(noise.sequences)
        truth = 400 * deviation ** 2 / norm ** 2
        assert relative(np.mean(answers[20:]), truth) < 0.05


@pytest.mark.parametrize("dp, microbatches", [(2, 4), (4, 2), (1, 4)])
def test_a_small_batch_is_a_replicas_rows_or_of_one_replica_its_first_microbatch(dp, microbatches):
    """Their gradients have been divided by the tokens of the whole batch and multiplied by the loss
    scale."""
    parts = dp if dp > 1 else microbatches
    gradients = np.random.default_rng(0).standard_normal((parts, 10))       # means over each part
    measured = gradients if dp > 1 else gradients[:1]
    noise = NoiseScale()
    noise.observe = mock.Mock()
    noise.small_squares = ((1024 * measured / parts) ** 2).sum()
    run = SimpleNamespace(flat=SimpleNamespace(sync_at_end=True), grid=SimpleNamespace(dp=dp),
                          model_config=CFG)
    noise.after_step(run, SimpleNamespace(microbatches=[None] * microbatches, size=16),
                     SimpleNamespace(skipped=False, loss_scale=1024.0, grad_norm=3.0), {})
    small_squares, big_squares, small, big = noise.observe.call_args.args
    assert small_squares == pytest.approx((measured ** 2).sum(1).mean())
    assert (big_squares, small, big) == (9.0, 16 / parts, 16)


LAYOUTS = [
    ((2, 1, 1), dict(zero=3)), ((2, 1, 1), dict(exact=True)), ((2, 1, 2), dict(zero=2)),
    ((2, 2, 1), dict(zero=3, sequence_parallel=True)), ((2, 1, 1), dict(cp=2, zero=2))]
MORE_LAYOUTS = [
    ((2, 1, 1), dict(zero=1)), ((2, 1, 1), dict(zero=2)),
    ((2, 4, 1), dict(zero=2, recompute=True)),
    ((2, 1, 4), dict(pp_schedule="1f1b")), ((2, 1, 2), dict(zero=1, **INTERLEAVED)),
    ((2, 1, 2), dict(pp_schedule="zb-h1")),
    ((2, 2, 2), dict(pp_schedule="zb-h1", sequence_parallel=True, zero=1)),
    ((2, 2, 1), dict(cp=2, sequence_parallel=True)), ((2, 1, 2), dict(cp=2, zero=1))]


def averages(run):
    return run.monitors.noise.tr_sigma, run.monitors.noise.squared_norm


@pytest.mark.claim("Every layout of two replicas measures the same gradient noise scale.")
@pytest.mark.parametrize("layouts", [
    LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)], ids=["few", "more"])
def test_every_layout_of_two_replicas_measures_the_same(pool, tmp_path, layouts):
    """Both averages, after each of four steps, in fp64 to 1e-10. (Their ratio is null while noise
    hides the gradient.)"""
    def run(number, layout, **flags):
        rows, seen, _ = trained(pool, layout, tmp_path / str(number), SMALL, averages, dtype="fp64",
                                **EVERY_STEP, **flags)
        return rows, seen
    expected, wanted = run("plain", (2, 1, 1))
    for number, (layout, flags) in enumerate(layouts):
        rows, seen = run(number, layout, **flags)
        bound = 1e-5 if "exact" in flags else BOUNDS["fp64"]        # it rounds the gradients
        assert relative(seen, wanted) < bound, (layout, flags)
        for row, (tr_sigma, squared_norm) in zip(rows, seen):
            known = row["noise_scale"] is not None
            assert known == (squared_norm > 0)
            assert not known or row["noise_scale_tokens"] == 16 * tr_sigma / squared_norm


@pytest.mark.parametrize("layout, flags", [
    ((2, 1, 1), {}), ((2, 1, 2), {}), ((2, 2, 1), dict(sequence_parallel=True)),
    ((4, 1, 1), dict(zero=1)), ((1, 1, 1), {}), ((2, 1, 1), dict(dtype="fp16"))])
def test_a_run_that_measures_has_the_bits_of_one_that_does_not(pool, tmp_path, layout, flags):
    """And fp16's loss scale does not change the number: overflows are left out."""
    plain, measuring = [
        trained(pool, layout, tmp_path / str(every), SMALL, **flags,
                **{**EVERY_STEP, "noise_scale": every}) for every in (0, 2)]
    (rows, _, state), (expected, _, wanted) = measuring, plain
    assert column(rows, "loss") == column(expected, "loss")
    assert all(x.equal(wanted[name][key]) for name in state for key, x in state[name].items())
    assert ["noise_scale" in row for row in rows] == [
        row["step"] % 2 == 0 and row["skipped"] == 0 for row in rows]
    assert not any("noise_scale" in row for row in expected)


@pytest.mark.claim("The gradient noise scale is that of per-sequence gradients.")
@pytest.mark.parametrize("cfg, layout, micro_batch", [
    (SHALLOW, (1, 1, 1), 2), (QWEN3, (1, 1, 1), 2),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        (QWEN3, (1, 2, 1), 1), (SHALLOW, (4, 1, 1), 2)])])
def test_the_noise_scale_is_that_of_per_sequence_gradients(pool, tmp_path, cfg, layout,
                                                           micro_batch):
    """Within 10%, the mean over 130 steps: the learning rate is 0, so all measure the same weights.
    The direct computation takes the gradient of each sequence by itself."""
    rows, _, state = trained(pool, layout, tmp_path, cfg, lr=0.0, noise_scale=1, steps=150,
                             micro_batch=micro_batch, dtype="fp64")
    gradients = per_sequence_gradients(cfg, state["master"])
    count = len(gradients)
    mean = gradients.mean(0)
    variance = (gradients - mean).square().sum() / (count - 1)
    truth = variance / (mean.square().sum() - variance / count)
    measured = np.mean(column(rows, "noise_scale")[20:])
    assert relative(measured, truth) < 0.1, (measured, truth)


def per_sequence_gradients(cfg, parameters):
    """(windows, numbers) of a plain model."""
    model = cfg.build().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()[:len(parameters[name])] = parameters[name]
    data, found = Memory(cfg), []
    for window in range(data.n_windows):
        tokens = torch.from_numpy(data.tokens_of(np.array([window])))
        model.zero_grad()
        (model(tokens[:, :-1], tokens[:, 1:]) / cfg.seq_len).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(found)


@pytest.mark.parametrize("flags, message", [
    (["--batch-size", 4, "--micro-batch", 4], "with dp 1 there is a single microbatch of 4"),
    (["--batch-ramp", "2:2:8", "--micro-batch", 2], "a single microbatch of 2"),
    (["--pp", 2], "--noise-scale with --pp requires dp 2")])
def test_a_run_with_one_batch_size_is_refused(run_train, shards, tmp_path, flags, message):
    world = 2 if "--pp" in flags else 1
    expect_mistake(run_train("--data", shards, "--out", tmp_path / "o", *TINY, "--noise-scale", 1,
                             *flags, WORLD_SIZE=world), message)


def test_the_console_tells_the_noise_scale_at_evaluations(run_train, shards, tmp_path):
    status, text, error = run_train("--data", shards, "--out", tmp_path / "o", *TINY,
                                    "--noise-scale", 1, "--micro-batch", 1)
    assert (status, error) == (0, "")
    assert text.count("noise scale: ") == 2 and "; the batch has 4 sequences" in text
    assert all(row["noise_scale_tokens"] == 16 * row["noise_scale"]
               for row in read_metrics(tmp_path / "o")[0])


@pytest.mark.slow
def test_nanos_noise_scale_rises_as_its_loss_falls(library, tmp_path):
    """The default model on two replicas, 400 steps: the medians of its quarters rise."""
    ends = [rank.finish(1500) for rank in launch(
        2, "--data", library, "--out", tmp_path, "--steps", 400, "--eval-every", 100,
        "--noise-scale", 4)]
    assert {status for status, *_ in ends} == {0}
    rows = [row for row in read_metrics(tmp_path)[0] if "noise_scale" in row]
    quarters = [[row["noise_scale"] for row in rows if (row["step"] - 1) // 100 == i]
                for i in range(4)]
    print([(i, round(float(np.median(q)), 1)) for i, q in enumerate(quarters)])
    medians = [np.median(quarter) for quarter in quarters]
    assert medians == sorted(medians) and medians[-1] > 2 * medians[0]
