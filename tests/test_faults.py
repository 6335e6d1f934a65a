"""tools/faults: each fault harms, each policy acts, and neither by accident.

    python -m pytest tests/test_faults.py
"""
import functools
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from model import GPTConfig
from runtime import divergence
from tools.faults import __main__ as faults
from tools.faults import policies, runs


def verdicts(policy, losses, norms=None, first_step=1):
    """{step: what the policy says} of a series of losses and gradient norms."""
    norms = norms or [1.0] * len(losses)
    said = {}
    for step, (loss, grad_norm) in enumerate(zip(losses, norms), first_step):
        verdict = policy.judge(step, SimpleNamespace(loss=loss, grad_norm=grad_norm))
        if verdict is not None:
            said[step] = verdict
    return said


WAVE = [1.0, 3.0] * 64                          # mean 2, standard deviation 1.0039


@pytest.mark.parametrize("policy, losses, norms, said", [
    (policies.Policy, [1.0, math.nan, 99.0], None, {}),
    (policies.Stop, [1.0, 99.0, math.nan], None, {3: "stop"}),
    (policies.SkipSixDeviations, [*WAVE, 8.0], None, {}),       # the limit is 8.02
    (policies.SkipSixDeviations, [*WAVE, 8.1], None, {129: "skip"}),
    (policies.SkipSixDeviations, [*WAVE[:62], 99.0], None, {}),
    (policies.SkipSixDeviations, [*WAVE[:63], 99.0], None, {64: "skip"}),
    (policies.SkipSixDeviations, [2.0] * 129, [*WAVE, 8.1], {129: "skip"}),
    (policies.SkipSixDeviations, [99.0, *WAVE, 8.1], None, {130: "skip"}),      # the last 128
    (policies.SkipSixDeviations, [*WAVE, math.nan, 2.0, 2.0], None,
     {129: "skip", 130: "skip", 131: "skip"}),
    (policies.CountNaN, [1.0] + [math.inf] * 9 + [1.0] + [math.nan] * 11, None, {21: "back"}),
    (policies.ByHand, [2.0] * 140 + [2.09] * 10, None, {}),
    (policies.ByHand, [2.0] * 140 + [2.11] * 10 + [2.0] * 50, None, {150: "back"}),
    (policies.ByHand, [2.0] * 95 + [math.nan] * 3 + [2.0] * 52, None, {100: "back"})])
def test_a_policy_of_the_gym_judges_as_it_was_published(policy, losses, norms, said):
    """Without noise a deviation is none, so that 2.0 is never above it."""
    assert verdicts(policy(), losses, norms) == said


def test_the_gyms_operator_goes_back_skips_and_slows_five_times():
    """To the newest file from before the last good look, or the oldest. A sixth return ends the
    run."""
    loaded, skipped = [], []
    run = SimpleNamespace(
        verdict="back", files=lambda: [Path(f"step_{step:08d}.pt") for step in (150, 120, 90)],
        load=loaded.append,
        monitors=SimpleNamespace(divergence=SimpleNamespace(lr_factor=1.0)),
        batches=SimpleNamespace(consumed=1200, skip_to=skipped.append))
    policy = policies.ByHand()
    looks = [(149, 120), (150, 150), (119, 90), (50, 90), (120, 120)]
    for returns, (good, file) in enumerate(looks):
        policy.good = (good, 2.0)
        assert policy.go_back_if_diverged(run, None, SimpleNamespace(skipped=False), {})
        assert loaded.pop() == Path(f"step_{file:08d}.pt") and skipped.pop() == 1200
        assert run.monitors.divergence.lr_factor == 0.5 ** (returns + 1)
    with pytest.raises(policies.Ended):
        policy.go_back_if_diverged(run, None, SimpleNamespace(skipped=False), {})


@pytest.fixture(scope="module")
def gym(tmp_path_factory):
    """gym(dtype) -> a healthy run and its policies half way, after 80 of 160 steps."""
    settings_ = replace(runs.SETTINGS, steps=160, save_every=20, batch_size=4, micro_batch=4)
    tiny = GPTConfig(n_layer=1, n_head=2, n_embd=32, seq_len=16)

    @functools.cache
    def run(dtype):
        folder = tmp_path_factory.mktemp(dtype)
        runs.make_texts(folder)
        with mock.patch.dict(runs.MODELS, tiny=("code", tiny)):
            return runs.healthy(folder, "tiny", 9, dtype, settings_)
    return run


@pytest.mark.parametrize("fault", [         # fp16 is slow on a CPU
    pytest.param(fault, marks=pytest.mark.slow if runs.DTYPES[fault] == "fp16" else ())
    for fault in runs.FAULTS])
def test_each_fault_of_the_gym_harms_and_the_policies_answer(gym, fault):
    """Under "ignore" the loss differs from the healthy run's, unless the disk is full. Where
    another policy must act, it does: by the steps lost, and by the end."""
    run, half_way = gym(runs.DTYPES[fault])
    assert run.step == 161 and half_way["count NaN"].in_a_row == 0
    assert not {"ours", "stop", "count NaN"} & run.policy.alarms and not run.alarm

    def under(policy):
        return runs.disturbed(run, fault, half_way[policy])
    ignored = under("ignore")
    assert not ignored.ended and (abs(ignored.rise) > 1e-3) == (fault != "full disk")
    assert ignored.lost == (80 if fault == "overflow" else 0)
    if fault == "41 bad batches":
        assert under("ours").lost > 0
    if fault == "lr x 3000":
        by_hand, skipped, ours = map(under, ("by hand", "skip six deviations", "ours"))
        assert ignored.rise > 1 and ours.rise < 0.2 and ours.lost > 0 and not ours.ended
        assert by_hand.rise < 1 and by_hand.lost >= 20 and skipped.lost > 0
    if fault == "overflow":
        assert ignored.rise == math.inf
        assert under("count NaN") == (0.0, 10, False)
        assert under("stop")[1:] == (80, True)
        assert 0 < under("ours").lost <= 80
    if fault == "full disk":
        assert [under(policy)[1:] for policy in ("stop", "count NaN", "ours")] == [
            (80, True), (40, False), (0, False)]


def test_the_gym_counts_the_false_alarms_of_healthy_runs(tmp_path, monkeypatch):
    """Of a monitor to which every loss is high, and of a policy that always acts; a run of each
    model. None of them acts."""
    runs.make_texts(tmp_path)
    brief = replace(runs.SETTINGS, steps=24, save_every=12, batch_size=2, micro_batch=2)
    monkeypatch.setattr(faults, "healthy", functools.partial(runs.healthy, settings=brief))
    monkeypatch.setattr(faults, "HEALTHY_RUNS", 3)
    assert faults.false_alarms(tmp_path) == {"ours": 0}
    monkeypatch.setattr(divergence, "SPIKE_MARGIN", -99.0)
    monkeypatch.setattr(policies.CountNaN, "judge", lambda *_: "back")
    assert faults.false_alarms(tmp_path) == {"ours": 3, "count NaN": 3}


def test_the_gym_prints_medians_the_worst_and_false_alarms(monkeypatch, capsys):
    """Two tables of made-up outcomes; an unknown fault is refused in a line."""
    made_up = {(fault, policy): [runs.Outcome(0.01, 0, False), runs.Outcome(0.03, 30, True),
                               runs.Outcome(math.inf, 90, True)]
               for fault in ("a", "b") for policy in policies.POLICIES}
    of_faults = faults.table_of_faults(made_up)
    of_policies = faults.table_of_policies(made_up, dict.fromkeys(policies.POLICIES, 7))
    assert of_faults[2] == "| a |" + " +3.0%; 30; 2 of 3 ended |" * 6
    assert of_policies[-1] == "| ours | 4 of 6 | +inf% | 40 | 4 | 7 |"
    monkeypatch.setattr(sys, "argv", ["tools.faults", "flood"])
    with pytest.raises(SystemExit):
        faults.main()
    error = capsys.readouterr().err
    assert error.startswith("tools.faults: there is no fault 'flood': there are 41")
