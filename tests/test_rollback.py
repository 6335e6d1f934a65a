"""Divergence and rollback: when a run goes back, and where to.

Runs with a fault are compared with runs without it, and the judgement of steps and checkpoints with
the rules in the docstring of runtime/divergence.py."""
import math
import re
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import amp
import checkpoint
import train
from base import checkpoint_files
from base.errors import RunError
from runtime.divergence import ANSWERS_DEVIATION, DivergenceMonitor
from runtime.step_stats import StepStats
from tests.commands import kinds
from tests.harness import (CFG, Memory, after_backward, assert_same_state, batches_from, column,
                           monitor_now, poison, relative, run_steps, saved, saved_file, settings,
                           watched)


def overflow_in_turn(run):
    """At step k rank k - 1 alone finds a gradient that is not finite, and at step 5 rank 3 a
    loss."""
    sum_statistics = run.sum_statistics

    def spoil(loss, batch):
        if run.grid.rank == run.step - 1:
            run.flat.buckets[-1].shard["grad"][0] = math.inf
        if (run.step, run.grid.rank) == (5, 3):
            loss += math.inf
        return sum_statistics(loss, batch)
    run.sum_statistics = spoil


@pytest.mark.parametrize("zero, parameters", [
    (0, ["norm2.weight", "norm2.weight"]),
    (2, ["norm2.weight", "mlp.up.bias"])])              # in the halves of the two replicas
def test_a_skip_names_the_rank_the_parameter_and_the_data(pool, tmp_path, zero, parameters):
    """In metrics.jsonl: of two replicas on two stages each rank overflows once, then a loss."""
    config = settings(tmp_path, dtype="fp16", steps=5, pp=2, zero=zero, rollback="off")
    _, seen, _ = pool.run(4, run_steps, (2, 1, 2), config, replace(CFG, n_layer=2), monitor_now,
                          None, overflow_in_turn)[0]
    skips = [event for event in seen[-1][2] if event["event"] == "skip"]
    assert [(e["step"], e["rank"], e["what"]) for e in skips] == [
        (1, 0, "gradient"), (2, 1, "gradient"), (3, 2, "gradient"), (4, 3, "gradient"),
        (5, 3, "loss")]
    assert [e["parameter"] for e in skips[:4]] == [
        f"blocks.{stage}.{name}" for stage in (0, 1) for name in parameters]
    for event, scale in zip(skips, [65536, 32768, 16384, 8192, 4096]):
        windows = Memory(CFG).window_ids(config.seed, 8 * event["step"] - 8, 8)
        assert event["windows"] == windows.tolist() and event["loss_scale"] == scale


def test_a_run_that_always_overflows_ends_with_a_clear_message(tmp_path):
    """After 20 skipped steps in a row, with status 1 and what may help: fp16 has the smallest range
    (DeepSpeed 1599)."""
    def huge(run):
        for bucket in run.flat.buckets:
            bucket.data.fill_(60000)
    config = settings(tmp_path, dtype="fp16", steps=21, batch_size=2, rollback="off")
    advice = "20 steps in a row were not finite; .*lower --lr.* or --dtype bf16$"
    with pytest.raises(RunError, match=advice) as stop:
        run_steps(0, 1, (1, 1, 1), config, replace(CFG, n_layer=1), prepare=huge)
    assert stop.value.status == 1


def at_step(run, number, act):
    """act() when the gradients of this step are complete."""
    after_backward(run, lambda step: act() if step == number else None)


def torn_file(run):
    """The losses are high, and the file of step 32, the first choice, is torn."""
    poison(run)
    file = checkpoint_files.step_file(Path(run.config.out), 32)
    at_step(run, 40, lambda: file.write_bytes(b"torn"))


def late_file(run):
    """The losses are high, and the file of step 39 is written once the rollback waits for it."""
    poison(run)
    wanted = threading.Event()
    wait = run.writer.wait

    def want(**required):
        if run.step > 39:
            wanted.set()
        return wait(**required)
    run.writer.wait = want
    at_step(run, 39, lambda: run.writer.thread.submit(wanted.wait, 60))


def infinite_gradients(run):
    def spoil(step):
        if step >= 40 and run.progress.monitor.rollbacks == 0:
            run.flat.buckets[0].shard["grad"][0] = math.inf
    after_backward(run, spoil)


@pytest.mark.parametrize("fault, flags, at, to, first, damaged", [
    (torn_file, dict(save_every=2), 43, 30, 32, ["damaged"]),
    (poison, dict(), 43, 0, 32, []),                   # no checkpoint yet
    (late_file, dict(save_every=39), 43, 39, 39, []),       # behind the skipped, but the only one
    (infinite_gradients, dict(save_every=10), 42, 30, 31, []),
    (poison, dict(save_every=4, batch_size=24, batch_ramp="2:2:450", micro_batch=2), 43, 32,
     32, [])])
def test_after_a_divergence_a_run_goes_back_skips_and_slows(tmp_path, fault, flags, at, to, first,
                                                            damaged):
    """After three bad steps, the last of them `at`, the run goes back to step `to`, leaves out the
    batches from the one with index `first` on (eight before the first bad one, but none that the
    checkpoint has read) and multiplies the learning rate by 0.6; metrics.jsonl tells it."""
    config = settings(tmp_path, **dict(steps=50, keep=99, micro_batch=8) | flags)
    seen = watched(config, fault)
    straight = batches_from(config, 0, 50)      # a step has the same size after a rollback
    left_out = [straight[first][0], sum(straight[at - 1])]
    shift = left_out[1] - left_out[0]
    assert seen.batches == (straight[:at] + straight[to:first]
                            + [(start + shift, size) for start, size in straight[first:]])
    assert column(seen.rows, "step") == [*range(1, at + 1), *range(to + 1, 51)]
    assert column(seen.rows[at:], "lr") == pytest.approx(
        [0.6 * train.learning_rate(config, step) for step in range(to + 1, 51)])
    if first > to:                              # the same parameters and batch again
        assert seen.rows[at]["loss"] == seen.rows[to]["loss"]
    events = [e for e in seen.events if e["reason"] != "not finite"]
    assert kinds(events) == ["spike", *damaged, "rollback", "skip"]
    spike, (rollback, skip) = events[0], events[-2:]
    assert (spike["step"], rollback["step"], rollback["to"]) == (at, at, to)
    assert spike["reason"] == rollback["reason"] and "3 bad steps in a row" in spike["reason"]
    assert rollback["sequences"] == left_out == skip["sequences"]
    windows = Memory(CFG).window_ids(1337, 0, left_out[1]).tolist()
    assert spike["windows"] == windows[straight[at - 11][0]:]
    end = saved(tmp_path, 50)
    assert end["optimizer_steps"] == 50
    assert end["monitor"]["losses"] == column(seen.rows[:to] + seen.rows[at:], "loss")
    if to == 0:
        moments = [*saved(tmp_path, 0)["exp_avg"].values(),
                   *saved(tmp_path, 0)["exp_avg_sq"].values()]
        assert not any(moment.any() for moment in moments)
    watched(replace(config, out=str(tmp_path / "o")), fault,
            checkpoint_files.step_file(tmp_path, to))
    assert_same_state(saved(tmp_path / "o", 50), end)


NOT_FINITE = dict(loss=math.nan, why_skipped=amp.NOT_FINITE)


@pytest.mark.parametrize("bad, facts, keep, back, read, lr_factor", [
    ([39, 41], NOT_FINITE, 1, [], [(0, 50)], 1.0),
    ([39, 40, 41], NOT_FINITE, 1, [(42, 36)], [(0, 42), (42, 56)], 0.6),
    (range(40, 80), dict(loss=99.0), 99, [(43, 32), (35, 32), (35, 32)],
     [(0, 43), (43, 46), (65, 68), (109, 127)], 1.0)])
def test_bad_batches_are_skipped_and_three_in_a_row_go_back(tmp_path, bad, facts, keep, back, read,
                                                            lr_factor):
    """The indices of bad batches, which rollbacks they lead to (from step, to step), the batches
    read and the final learning rate."""
    def prepare(run):
        sum_statistics = run.sum_statistics

        def changed(*args):
            stats = sum_statistics(*args)
            is_bad = run.progress.batches.consumed // 8 - 1 in bad
            return replace(stats, **facts) if is_bad else stats
        run.sum_statistics = changed
    seen = watched(settings(tmp_path, steps=50, save_every=4, keep=keep, micro_batch=8), prepare)
    assert [(e["step"], e["to"]) for e in seen.events if e["event"] == "rollback"] == back
    assert [first // 8 for first, _ in seen.batches] == [k for part in read for k in range(*part)]
    assert seen.run.progress.monitor.lr_factor == lr_factor
    skipped = [first // 8 for (first, _), row in zip(seen.batches, seen.rows) if row["skipped"]]
    assert skipped == (bad if facts is NOT_FINITE else [])


def test_rollbacks_are_bounded_and_cut_more_each_time_the_run_returns(tmp_path):
    """A run that diverges after each rollback multiplies its learning rate by 0.6, 0.1, 0.05 and
    0.05, goes to an older file when it has returned to one twice, and ends with exit status 1 after
    --max-rollbacks 4."""
    runs = []

    def prepare(run):
        runs.append(run)
        poison(run, times=9)
    config = settings(tmp_path, steps=50, save_every=4, keep=9, max_rollbacks=4, micro_batch=8)
    with pytest.raises(RunError, match="--max-rollbacks 4 are used up.*--skip-steps") as stop:
        watched(config, prepare)
    *events, end = runs[0].events
    assert (stop.value.status, end["event"], kinds(events).count("spike")) == (1, "stop", 5)
    assert "--max-rollbacks 4" in end["reason"]
    older = re.search(r"branch from an older checkpoint \(--resume (.*)\)", str(stop.value))[1]
    runs[0].writer.close()                          # it may still be written
    assert checkpoint.load(Path(older))["step"] >= 28
    assert [(e["to"], e["lr_factor"]) for e in events if e["event"] == "rollback"] == [
        (32, 0.6), (32, pytest.approx(0.06)), (28, pytest.approx(0.003)),
        (28, pytest.approx(0.00015))]


@pytest.mark.claim("Every rank takes the same decision on a divergence.")
@pytest.mark.parametrize("layout, zero", [
    ((2, 1, 1), 3), pytest.param((2, 1, 2), 1, marks=pytest.mark.slow)])
def test_every_rank_decides_alike_and_like_one_process(pool, tmp_path, layout, zero):
    """All ranks have the same monitor, events and position after each step; they roll back as one
    process does, with its losses to 1e-5 in fp32."""
    dp, tp, pp = layout
    cfg = replace(CFG, n_layer=pp)
    config = settings(tmp_path, steps=44, save_every=4, keep=9, micro_batch=8 // dp)
    one = watched(replace(config, out=str(tmp_path / "one")), poison, cfg=cfg)
    ranks = pool.run(dp * tp * pp, run_steps, layout, replace(config, tp=tp, pp=pp, zero=zero),
                     cfg, monitor_now, None, poison)
    rows, seen, _ = ranks[0]
    assert all(repr(other) == repr(seen) for _, other, _ in ranks)
    _, samples, events = seen[-1]
    assert kinds(events) == ["spike", "rollback", "skip"]
    assert samples == one.run.progress.batches.consumed
    for ours, theirs in zip(events, one.events):
        assert all(ours.get(x) == theirs.get(x) for x in ("event", "step", "to", "sequences"))
    losses = [column(steps[:40] + steps[43:], "loss") for steps in (rows, one.rows)]
    assert len(losses[0]) == 52 and relative(*losses) <= 1e-5       # but for the poisoned ones


def test_skip_steps_leaves_out_the_batches_of_these_steps_once(tmp_path):
    """Also with a batch ramp, whose sizes are those of a run without the skip; at a resume only
    what lies ahead, and nothing twice; and not again after a rollback."""
    config = settings(tmp_path, steps=6, skip_steps="3:5", save_every=1, keep=9,
                      batch_ramp="2:2:40")
    seen, batches = watched(config), batches_from(config, 0, 10)
    shift = batches[5][0] - batches[2][0]
    assert seen.batches == batches[:2] + [(start + shift, size) for start, size in batches[2:6]]
    assert seen.events == [dict(event="skip", step=3, reason="left out",
                                sequences=[batches[2][0], batches[5][0]])]
    config = replace(config, batch_ramp=None)
    watched(config)
    batches = batches_from(config, 0, 15)
    for step, skip, first in [(2, "3:5", 5), (3, "3:5", 6), (4, "2:5", 8), (4, "2:4", 7)]:
        resumed = watched(replace(config, skip_steps=skip, out=str(tmp_path / "resumed")),
                          state=checkpoint_files.step_file(tmp_path, step))
        assert resumed.batches == batches[first:first + 6 - step], (step, skip)
    config = settings(tmp_path / "rollback", steps=44, skip_steps="41:43", save_every=4, keep=9,
                      micro_batch=8)
    seen, batches = watched(config, poison), batches_from(config, 0, 60)
    assert kinds(seen.events) == ["skip", "spike", "rollback", "skip"]
    assert seen.batches == [*batches[:40], *batches[43:58]]
    windows = [Memory(CFG).window_ids(1337, *batch).tolist() for batch in seen.batches[32:43]]
    assert seen.events[1]["windows"] == sum(windows, [])        # none of the skipped ones

    def exclude(run):
        run.progress.monitor.excluded = [[16, 24], [8, 16]]     # in another order than the data
    config = settings(tmp_path / "order", steps=2)
    assert watched(config, exclude).batches == [(0, 8), (24, 8)]


# ---- Mechanisms

NOISY = list(2 + 0.1 * np.random.default_rng(0).standard_normal(100))       # 2.9: nine deviations


def judge(losses, **settings):
    """What a DivergenceMonitor says to a series of losses: {index: reason}. "overflow" stands for a
    step that an infinite gradient skips, "at floor" for one that no loss scale can cure."""
    monitor = DivergenceMonitor(**settings)
    reasons = {}
    for i, loss in enumerate(losses):
        skipped = isinstance(loss, str)
        stats = StepStats(2.0 if skipped else loss, 1.0, 1.0, amp.NOT_FINITE if skipped else "",
                          loss_scale=2.0 if loss == "overflow" else 1.0)
        divergence = monitor.observe(i, stats)
        if divergence is not None:
            reasons[i] = divergence.reason
    return reasons


@pytest.mark.parametrize("losses, told", [
    (NOISY + [2.9, 2.9] + NOISY + [2.9], {}),                       # outliers
    (NOISY + [2.9] * 4, {102: "3 bad steps in a row: the loss is 2.9000, above 2.4"}),
    (NOISY + [2.48] * 3, {}),                                       # six deviations are 2.49
    (NOISY + [2.50] * 3, {102: "the loss is 2.5000"}),
    ([3.0] * 15 + [9.0] * 3, {}),                                   # too few to judge by
    ([3.0] * 16 + [9.0] * 3, {18: "above 3.1800"}),
    ([2.0] * 50 + [2.11] * 5, {}),              # no noise at all: 1% counts as a deviation
    ([2.0] * 50 + [2.13] * 3, {52: "above 2.1200"}),
    ([2.0] * 20 + [9.0, 9.0, 2.0] * 40 + [9.0] * 3, {142: ""}),     # high ones make no median
    ([9.0] * 200 + [2.0] * 33 + [3.0] * 3, {235: ""}),              # old ones are forgotten
    ([math.nan, math.inf, 2.0] * 9, {}),
    ([math.nan, math.inf, math.nan], {2: "the loss is not finite"}),
    (["at floor", "at floor", 2.0] * 9, {}),
    (["at floor"] * 4, {2: "a gradient is not finite"}),
    (NOISY + [9.0, math.nan, "at floor"], {102: "a gradient is not finite"}),   # three kinds
    (["overflow"] * 40, {})])
def test_a_divergence_is_three_bad_steps_in_a_row(losses, told):
    """Serves "goes back, skips and slows": the losses at which the monitor tells of a divergence,
    and its reason."""
    reasons = judge(losses)
    assert list(reasons) == list(told), reasons
    assert all(told[i] in reasons[i] for i in told)


def test_a_loss_that_rises_slowly_is_a_divergence_too_but_no_fall_or_plateau_is():
    """Serves the same claim. A rise by four deviations, so that few losses are high, is told within
    a window of 64, and again only when the median has risen by two more."""
    noise = 0.1 * np.random.default_rng(1).standard_normal(300)
    told = judge(np.repeat([2.0, 2.0, 2.4], 100) + noise)
    assert 210 <= min(told) < 264 and "has risen from 1.9" in told[min(told)] and len(told) <= 3
    for seed in range(2):
        rng = np.random.default_rng(seed)
        plateau = 1.4 + 0.03 * rng.standard_normal(5000)
        fall = 2 + 3.5 * np.exp(-np.arange(1000) / rng.uniform(20, 200))
        fall += rng.standard_t(4, 1000) * rng.uniform(0.005, 0.2)       # tails wider than normal
        assert judge(plateau) == judge(fall) == {}, seed


@pytest.mark.parametrize("loss, least_deviation, diverges", [
    (0.06, ANSWERS_DEVIATION, False), (1.0, ANSWERS_DEVIATION, True), (0.06, 0.0, True)])
def test_a_surprise_among_losses_near_0_is_no_divergence(loss, least_deviation, diverges):
    """One letter that is wrong in a batch of some 30 learnt tokens gives 0.06 to 0.3 nats, where
    the others gave 0.0005. Three losses of 1 nat are a divergence, and of text 0.06 are."""
    losses = [*np.random.default_rng(0).uniform(0, 0.0005, 64), *3 * [loss]]
    assert bool(judge(losses, least_deviation=least_deviation)) == diverges


@pytest.mark.parametrize("changes, healthy", [
    (dict(), True), (dict(losses=15), False), (dict(at_floor=True), False), (dict(bad=1), False),
    (dict(skipped=7), False),               # an fp16 overflow whose scale is still falling
    (dict(scheduled=False), False), (dict(scheduled=False, is_start=True, losses=0), True),
    (dict(lowest=1.981), True), (dict(lowest=1.979), False),    # a deviation is 1% here,
    (dict(loss=0.0, lowest=0.0), True),                         # and here there is none
    (dict(norm=6.0), True), (dict(norm=6.1), False)])
def test_a_checkpoint_is_judged_as_opts_team_did(changes, healthy):
    """Serves "goes back": a file is healthy by the losses, the norm of the last activations and the
    loss scale; never if it is a stop's own (a run without the stop has no such file), and always if
    the user began with it."""
    facts = dict(losses=64, loss=2.0, lowest=1.99, norm=4.0, bad=0, skipped=0, at_floor=False,
                 scheduled=True, is_start=False) | changes
    monitor = DivergenceMonitor([facts["loss"]] * facts["losses"], [3.0] * 15 + [facts["norm"]],
                                bad=facts["bad"], skipped=facts["skipped"], lowest=facts["lowest"])
    monitor.add_checkpoint(7, "file", 1, facts["scheduled"], facts["at_floor"], facts["is_start"])
    assert monitor.checkpoints == [[7, "file", healthy]]


def test_a_rollback_takes_the_newest_healthy_checkpoint_from_before_the_skipped_batches():
    """Serves "goes back": if the batches from `first` on are skipped, to these steps, the best
    first; then those that a run returned to twice, and later ones."""
    monitor = DivergenceMonitor([2.0] * 64, [3.0] * 64, lowest=2.0)
    assert monitor.candidates(9) == []                  # never a healthy one: the seed
    for step in (10, 20, 30, 40):
        monitor.add_checkpoint(step, step, 9, True, at_floor=step == 30, is_start=False)
    for first, steps in [(91, [40, 20, 10]), (41, [40, 20, 10]), (40, [20, 10, 40]),
                         (20, [10, 20, 40]), (4, [10, 20, 40])]:        # later ones last
        assert monitor.candidates(first) == steps, first
    monitor.returned_to = [20, 40, 40]
    assert monitor.candidates(99) == [20, 10, 40]
    for step in (50, 60):
        monitor.add_checkpoint(step, step, 1, True, at_floor=True, is_start=False)
    assert monitor.checkpoints == [[40, 40, True], [60, 60, False]]
    monitor.rolled_back(60, [0, 8], False, restored=DivergenceMonitor())
    assert monitor.lr_factor == 0.6                     # the first cut: it got beyond the others


def test_losses_are_compared_under_the_same_flags_only(tmp_path):
    """Serves "three bad steps": a resume with these flags keeps so many of 20 losses."""
    def count(run):
        counts.append(len(run.progress.monitor.losses))
        raise ZeroDivisionError                     # there is no need to train
    config = settings(tmp_path)
    file = saved_file(tmp_path, 20)
    watched(config)
    for changes, kept in [
            (dict(), 20), (dict(micro_batch=4, zero=1, keep=2), 20), (dict(lr=3.1e-3), 20),
            (dict(lr=2.9e-3), 0), (dict(lr=5e-4), 0), (dict(dropout=0.1), 0),
            (dict(weight_decay=0.2), 0), (dict(batch_size=4), 0), (dict(steps=60), 0),
            (dict(batch_ramp="4:4:9"), 0), (dict(dtype="bf16"), 0), (dict(warmup_steps=2), 0),
            (dict(clip=0.5), 0)]:
        counts = []
        with suppress(ZeroDivisionError):
            watched(replace(config, **changes), count, file)
        assert counts == [kept], changes

    def begin_another_mixture(run):
        run.train_data.mixture.phases = [[0, {"memory": 1}], [20 * 8, {"memory": 1}]]
    config = settings(tmp_path / "longer", steps=30, save_every=20)
    watched(config)
    file = saved_file(tmp_path / "longer", 20)
    # After step 30. Also where the sequence with which other weights begin is left out.
    for changes, kept in [(dict(), 10), (dict(skip_steps="21:22"), 10), (dict(lr=3.1e-3), 30)]:
        seen = watched(replace(config, **changes), begin_another_mixture, file)
        assert len(seen.run.progress.monitor.losses) == kept, changes
