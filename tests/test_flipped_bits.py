"""Replicas that must be equal: flipped bits are found and named, healthy runs are left alone.

    python -m pytest tests/test_flipped_bits.py
    python -m pytest tests/test_flipped_bits.py -m slow -s      12 flips, 5 healthy runs; a table
    FLIPS=18 python -m pytest [the same]                        216 flips, 100 healthy runs

A flip is one bit of one rank's parameter, master, moment or gradient. The final weights of a run
that has gone back are compared with those of a run without the flip, bit for bit.
"""
import functools
import os
import random
import socket
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from model import ceil_div
from parallelism.build import Grid, build_stage
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters
from runtime import flipped_bits
from tests.harness import (CFG, COVER, TINY, assert_same_state, deep_enough_for, dp_for, kinds,
                           launch, names_in, nothing, read_metrics, saved, trained)

SMALL = replace(CFG, n_layer=2)
STEPS = dict(steps=8, save_every=4, check_every=2, keep=9, lr=1e-2, warmup_steps=1)


@dataclass(frozen=True)
class Flip:
    """One bit of `tensor`, in the part of a parameter that the rank holds. `moment`: "update",
    after that of `step`; "forward", before that of the next step; of gradients "sum", after the
    sum over the replicas, or "backward", before it."""
    rank: int
    step: int
    moment: str
    tensor: str
    place: float | str              # of the parameter in the rank's list, from 0 to 1; or its name
    bit: int


def numbers_of(flat, flip, bucket):
    """The flat tensor of a bucket in which the bit is, and the parts of it that parameters have."""
    if flip.moment == "backward" or (flip.tensor == "data" and flat.zero < 3):      # all the bucket
        offsets = [(spec, bucket.offsets[spec.name]) for spec in bucket.specs]
        return (getattr(bucket, flip.tensor),
                [(spec, slice(first, first + spec.numel)) for spec, first in offsets])
    return (bucket.shard.get(flip.tensor),
            [(spec, part) for spec, part, _ in bucket.shard_ranges])


def number_at(flat, flip):
    """(bucket, spec, the number's place in the flat tensor). Each parameter is as likely as another
    one, though a LayerNorm has few numbers."""
    parts = [(bucket, *part) for bucket in flat.buckets
             for part in numbers_of(flat, flip, bucket)[1]]
    if isinstance(flip.place, str):
        [found] = [part for part in parts if part[1].name == flip.place]
    else:
        found = parts[int(flip.place * len(parts))]
    bucket, spec, part = found
    return bucket, spec, (part.start + part.stop) // 2


def turn(flat, flip, bucket, i):
    x, _ = numbers_of(flat, flip, bucket)
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
    width = 8 * x.itemsize
    mask = 1 << flip.bit % width
    if mask == 1 << width - 1:              # the sign
        mask -= 1 << width
    bits[i] ^= mask


def inject(flip, again, run):
    """Turn the bit once, or with `again` in each attempt."""
    flat, run.turned = run.flat, False
    if run.grid.rank != flip.rank:
        return
    bucket, _, i = number_at(flat, flip)
    method, step, before = {
        "update": ("adamw_step", flip.step, False), "forward": ("zero_grad", flip.step + 1, True),
        "sum": ("finish_grad_sync", flip.step, False),
        "backward": ("_start_grad_sync", flip.step, True)}[flip.moment]
    original = getattr(flat, method)

    def turn_now():
        run.turned = True
        flat.wait_params()
        turn(flat, flip, bucket, i)

    def changed(*args, **flags):
        due = run.step == step and (again or not run.turned)
        if method == "_start_grad_sync":
            due = due and args[0] is bucket
        if due and before:
            turn_now()
        original(*args, **flags)
        if due and not before:
            turn_now()
    setattr(flat, method, changed)


def events_of(run):
    return run.events


def flipped(pool, out, layout, flip, again=False, **flags):
    """A run with a flip -> (its events, its final state)."""
    prepare = nothing if flip is None else functools.partial(inject, flip, again)
    _, seen, state = trained(pool, layout, out, SMALL, events_of, prepare=prepare,
                             **{**STEPS, **flags})
    return seen[-1], state


def equal_states(one, two):
    return all(torch.equal(x, two[name][key]) for name in one for key, x in one[name].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_flipped_bit_changes_the_hash(dtype):
    """And so does each pair of bits, of many."""
    x = torch.randn(2 * flipped_bits.PIECE, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = flipped_bits.hash_bits(x)
    words, rng = x.view(torch.int64), random.Random(0)
    for count in [1] * 100 + [2] * 100:
        picks = {(rng.randrange(len(words)), rng.randrange(64)) for _ in range(count)}
        for is_changed in (True, False):            # there and back
            for i, bit in picks:
                words[i] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
            assert (flipped_bits.hash_bits(x) != before) == is_changed, picks


@pytest.mark.parametrize("device, sequence_parallel, is_compared", [
    ("cpu", False, True), ("meta", False, False), ("meta", True, True)])
def test_tp_copies_on_a_gpu_are_compared_where_their_gradients_are_summed(device, sequence_parallel,
                                                                          is_compared):
    """Elsewhere a GPU may compute them with other bits on each rank. (A device without numbers
    stands for it.)"""
    grid = Grid(1, 1, 2, 0, sequence_parallel=sequence_parallel)
    grid.groups["tp"] = "two ranks"
    specs = param_specs(build_stage(SMALL, grid), SMALL, grid)
    flat = FlatParameters(specs, grid, torch.float32, torch.float32, device)
    assert (len(flipped_bits.shared_hashes(flat)["tp"]) > 0) == is_compared


@pytest.mark.claim("A flipped bit is found, named and undone.")
@pytest.mark.parametrize("layout, flags, flip, ranks", [
    ((3, 1, 1), dict(batch_size=6), Flip(2, 5, "forward", "data", 0.7, 29), [2]),
    ((2, 1, 1), dict(dtype="bf16"), Flip(0, 4, "update", "master", 0.4, 2), [0, 1]),
    ((1, 2, 1), dict(zero=0), Flip(1, 6, "update", "exp_avg_sq", 0.08, 25), [0, 1]),
    ((1, 1, 2), {}, Flip(1, 4, "update", "data", "embed.token.weight", 22), [0, 1]),
    ((3, 1, 1), dict(zero=1, batch_size=6), Flip(1, 4, "update", "data", 0.02, 20), [1]),
    ((2, 2, 1), dict(zero=3), Flip(1, 6, "update", "exp_avg", "blocks.0.norm1.weight", 9),
     [0, 1])])
def test_a_flipped_bit_is_found_named_and_undone(pool, tmp_path, layout, flags, flip, ranks):
    """The run goes back to its last checkpoint and ends with the bits of a run without the flip, in
    every file."""
    _, healthy = flipped(pool, tmp_path / "healthy", layout, None, **flags)
    events, state = flipped(pool, tmp_path / "flipped", layout, flip, **flags)
    assert [event["event"] for event in events] == ["replicas", "rollback"], events
    found, back = events
    assert (found["ranks"], found["tensor"]) == (ranks, flip.tensor)
    assert back["to"] == 4 * ((found["step"] - 1) // 4) and back["step"] == found["step"]
    assert equal_states(state, healthy)
    assert names_in(tmp_path / "flipped") == names_in(tmp_path / "healthy")
    for step in (4, 8):
        assert_same_state(saved(tmp_path / "flipped", step), saved(tmp_path / "healthy", step),
                          but=("config", "run", "monitor"))


def test_a_flip_that_makes_the_loss_nan_is_no_divergence(pool, tmp_path):
    """It is compared before a rollback that would skip batches and cut the learning rate."""
    flags = dict(save_every=0, check_every=100)
    _, healthy = flipped(pool, tmp_path / "healthy", (2, 1, 1), None, **flags)
    nan = Flip(1, 2, "update", "data", "blocks.0.norm1.weight", 30)
    events, state = flipped(pool, tmp_path / "flipped", (2, 1, 1), nan, **flags)
    assert kinds(events) == ["skip"] * 3 + ["spike", "replicas", "rollback"], events
    assert events[-1]["to"] == 0 and equal_states(state, healthy)


def test_the_second_time_on_the_same_machine_the_run_ends(shards, tmp_path):
    """With exit status 1 and one line that names it; the files are those from before."""
    out = tmp_path / "out"
    code = """
import sys, functools, train
from tests.test_flipped_bits import Flip, inject
restore = train.Run.restore
def restore_and_turn(run, state):
    restore(run, state)
    if not hasattr(run, "turned"):
        inject(Flip(1, 3, "update", "data", 0.5, 20), True, run)
train.Run.restore = restore_and_turn
train.main()
"""
    (tmp_path / "faulty.py").write_text(code)
    ranks = launch(2, "--data", shards, "--out", out, *TINY, "--check-every", 1,
                   file=tmp_path / "faulty.py")
    ends = [rank.finish(100) for rank in ranks]
    assert [status for status, *_ in ends] == [1, 1], ends
    line = ends[0][2]
    host = socket.gethostname()
    assert line.startswith("train.py: step 3: rank 0 on ") and line.count("\n") == 1, line
    assert f"as before on {host}: leave this machine out" in line and ends[1][2] == ""
    assert kinds(read_metrics(out)[1]) == ["start", "replicas", "rollback", "replicas", "stop"]
    assert names_in(out) == ["latest.pt", "lock", "metrics.jsonl", "step_00000002.pt"]


# ---------------------------------------------------------------------------------------------
# A campaign of flips, and healthy runs
# ---------------------------------------------------------------------------------------------

CAMPAIGN = [((2, 1, 1), {}), ((4, 1, 1), {}), ((2, 1, 1), dict(dtype="bf16")), ((2, 2, 1), {}),
            ((1, 2, 1), {}), ((2, 1, 2), {}), ((1, 1, 2), {}), ((4, 1, 1), dict(zero=1)),
            ((2, 2, 1), dict(zero=1, dtype="bf16")), ((2, 1, 2), dict(zero=2)),
            ((4, 1, 1), dict(zero=2)), ((2, 2, 1), dict(zero=3))]
# Of each row. FLIPS=18 is the campaign of docs/faults.md: 216 flips, and a hundred healthy runs.
FLIPS = int(os.environ.get("FLIPS", 1))
SHARD = "a shard of ZeRO, or a part of tensor parallelism: no other rank has it"
BEFORE_SUM = "a gradient before the sum: all replicas have the same wrong sum"
REWRITTEN = "a copy that the next update rewrites, before the check"
ROUNDED = "a difference that rounding removed: no trace is left"
SKIPPED = "a gradient that is not finite: the step is skipped, and the event names it"


def drawn_flip(number, layout, flags):
    """Flips of a row: each tensor and moment in turn, the bits spread over all positions."""
    rng = random.Random(number)
    tensors = ["data", "exp_avg", "exp_avg_sq", "grad"]
    if flags.get("dtype") == "bf16":
        tensors.append("master")
    tensor = tensors[number % len(tensors)]
    moments = ["sum", "backward"] if tensor == "grad" else ["update", "forward"]
    dp, tp, pp = layout
    return Flip(rng.randrange(dp * tp * pp), rng.randrange(1, 8), rng.choice(moments), tensor,
                rng.random(), number * 7 % 32)


def why_not_seen(flip, layout, flags):
    """Why the comparison cannot see the flip, or None if it must; and the parameter's name."""
    dp, tp, pp = layout
    zero = flags.get("zero", 0)
    dtype = torch.bfloat16 if flags.get("dtype") == "bf16" else torch.float32
    grid = Grid(dp, pp, tp, flip.rank)
    specs = param_specs(build_stage(SMALL, grid), SMALL, grid)
    flat = FlatParameters(specs, grid, dtype, torch.float32, "cpu", zero)
    bucket, spec, i = number_at(flat, flip)
    replicated = tp > 1 and spec.partition_dim is None
    tied = pp > 1 and bucket.name == "tied"
    twin = replicated or tied or (zero == 0 and dp > 1)
    if flip.moment == "backward":
        return (None if replicated else BEFORE_SUM if dp > 1 or tied else SHARD), spec.name
    if flip.tensor == "data" and (zero in (1, 2) or dtype == torch.bfloat16):
        length = bucket.numel // flat.num_shards
        owned = i // length == flat.shard_rank or zero == 0
        seen_at_once = flip.moment == "update" and flip.step % STEPS["check_every"] == 0
        has_copy = twin or (dp > 1 and zero < 3)
        if not has_copy:
            return SHARD, spec.name
        if seen_at_once or (twin and owned and dtype == torch.float32):
            return None, spec.name
        return (SHARD if owned and dtype == torch.float32 else REWRITTEN), spec.name
    return (None if twin else SHARD), spec.name


@pytest.mark.fault("a bit flips in a value that another rank holds too", tried=107, survived=107,
                   note="found before the next save, named; bit-equal at the end")
@pytest.mark.fault("a bit flips, and rounding removes it", tried=9, survived=9,
                   note="bit-equal at the end")
@pytest.mark.fault("a bit flips in a value that one rank alone holds", tried=77, survived=0,
                   note="not detected")
@pytest.mark.fault("a bit flips in a value that the next update overwrites", tried=12, survived=0,
                   note="not detected")
@pytest.mark.fault("a bit flips in a gradient before its sum", tried=11, survived=0,
                   note="not detected")
@pytest.mark.slow
def test_each_flip_is_found_or_cannot_be(pool, tmp_path):
    """At random bits, ranks and steps, in twelve layouts; the campaign has every bit. A flip is
    found before the next save, named, and undone to the last bit, or it is listed with the reason.
    (With -s: the table.)"""
    table, bits, wrong = Counter(), set(), []
    for row, (layout, flags) in enumerate(CAMPAIGN):
        _, healthy = flipped(pool, tmp_path / f"healthy{row}", layout, None, **flags)
        for number in range(row * FLIPS, (row + 1) * FLIPS):
            flip = drawn_flip(number, layout, flags)
            out = tmp_path / str(number)
            events, state = flipped(pool, out, layout, flip, **flags)
            reason, name = why_not_seen(flip, layout, flags)
            what = [event["event"] for event in events]
            same = equal_states(state, healthy)
            told = (row, layout, flags, flip, name, reason, events, same)
            if "replicas" in what:
                found = events[what.index("replicas")]
                # (The sum of a wrong gradient may be on another rank.)
                right = flip.rank in found["ranks"]
                first = flip.step + (flip.moment == "forward")      # whose update or save has it
                in_time = found["step"] <= 4 * ceil_div(first, 4)
                if not (what.count("replicas") == 1 and same and in_time
                        and (right or flip.moment == "backward")):
                    wrong.append(told)
                for step in (4, 8):
                    assert_same_state(saved(out, step), saved(tmp_path / f"healthy{row}", step),
                                      but=("config", "run", "monitor"))
                named = "named" if found["parameter"] == name else "another parameter named"
                who = "its rank" if found["ranks"] == [flip.rank] else "its group of ranks"
                outcome = f"found: {who if right else 'another rank'}, {named}"
            elif same:
                outcome = f"no trace: {reason or ROUNDED}"
            else:
                if "skip" in what and reason is None:
                    reason = SKIPPED
                outcome = f"not seen: {reason}"
                if reason is None:
                    wrong.append(told)
            table[f"{flip.tensor}, {flip.moment}", outcome] += 1
            bits.add(flip.bit)
    print()
    for (kind, outcome), count in sorted(table.items()):
        print(f"{kind:22} {count:4}  {outcome}")
    totals = Counter()
    for (_, outcome), count in table.items():
        totals[outcome] += count
    for outcome, count in sorted(totals.items()):
        print(f"{'all':22} {count:4}  {outcome}")
    assert len(bits) == 32 or FLIPS < 18
    assert not wrong


@pytest.mark.claim("The comparison of replicas leaves healthy runs alone.")
@pytest.mark.slow
def test_healthy_runs_are_left_alone(pool, tmp_path):
    """Compared after each step, in random layouts, ZeRO stages, types and schedules."""
    rng = random.Random(0)
    rows = [rng.choice(COVER) for _ in range(100 * FLIPS // 18)]
    for number, row in enumerate(rows):
        layout = (rng.choice([1, dp_for(row)]), row["tp"], row["pp"])
        _, seen, _ = trained(pool, layout, tmp_path / str(number), deep_enough_for(row), events_of,
                             steps=6, check_every=1, lr=1e-2, warmup_steps=1, seed=number,
                             dropout=rng.choice([0.0, 0.1]), **{
                                 name: x for name, x in row.items() if name not in ("tp", "pp")})
        assert not {"replicas", "rollback"} & {event["event"] for event in seen[-1]}, (row, seen)
