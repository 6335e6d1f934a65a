"""Replicas that must be equal: flipped bits are found and named, healthy runs are left alone.

A flip is one bit of one rank's parameter, master, moment or gradient. The final weights of a run
that has gone back are compared with those of a run without the flip, bit for bit."""
import functools
import math
import random
import socket
from dataclasses import dataclass, replace
from operator import attrgetter

import pytest
import torch

from model import ceil_div
from parallel import Grid
from parallelism.build import build_stage
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters
from runtime import flipped_bits
from tests.commands import TINY, kinds, launch, read_metrics
from tests.harness import CFG, assert_same_state, names_in, nothing, saved, trained
from tests.test_layouts import MODELS, drawn

SMALL = replace(CFG, n_layer=2)
EVENTS = attrgetter("events")
STEPS = dict(steps=8, save_every=4, check_every=2, keep=9, lr=1e-2, warmup_steps=1)


@dataclass(frozen=True)
class Flip:
    """One bit of `tensor`, in the part of a parameter that the rank holds. `moment`."""
    rank: int
    step: int
    moment: str
    tensor: str
    place: float | str              # of the parameter in the rank's list, from 0 to 1; or its name
    bit: int


def flip_bit(words, i, bit):
    """In the number with this place in a tensor of integers."""
    words[i:i + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def find_number(flat, flip):
    """(flat tensor, place) of a number of the parameter. Each parameter is as likely."""
    parts = [(bucket.shard[flip.tensor], spec.name, part) for bucket in flat.buckets
             for spec, part, _ in bucket.shard_ranges]
    if isinstance(flip.place, str):
        [found] = [part for part in parts if part[1] == flip.place]
    else:
        found = parts[int(flip.place * len(parts))]
    x, _, part = found
    return x, (part.start + part.stop) // 2


def inject(flip, again, run):
    """Turn the bit once, or with `again` in each attempt."""
    flat, run.turned = run.flat, False
    if run.grid.rank != flip.rank:
        return
    method, step, before = {
        "update": ("adamw_step", flip.step, False), "forward": ("zero_grad", flip.step + 1, True),
        "sum": ("finish_grad_sync", flip.step, False)}[flip.moment]
    original = getattr(flat, method)

    def turn_now():
        run.turned = True
        flat.wait_params()
        x, i = find_number(flat, flip)
        bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
        flip_bit(bits, i, flip.bit % (8 * x.itemsize))

    def changed(*args, **flags):
        due = run.step == step and (again or not run.turned)
        if due and before:
            turn_now()
        original(*args, **flags)
        if due and not before:
            turn_now()
    setattr(flat, method, changed)


def flipped(pool, out, layout, flip, again=False, **flags):
    """A run with a flip -> (its events, its final state)."""
    prepare = nothing if flip is None else functools.partial(inject, flip, again)
    _, seen, state = trained(pool, layout, out, SMALL, EVENTS, prepare=prepare, **STEPS | flags)
    return seen[-1], state


def equal_states(one, two):
    return all(torch.equal(x, two[name][key]) for name in one for key, x in one[name].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_flipped_bit_changes_the_hash(dtype):
    """And so does each pair of bits, of many."""
    x = torch.randn(2 * flipped_bits.PIECE, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = flipped_bits.hash_bits(x)
    words, rng = x.view(torch.int64), random.Random(0)
    for count in [1] * 30 + [2] * 30:
        picks = {(rng.randrange(len(words)), rng.randrange(64)) for _ in range(count)}
        for is_changed in (True, False):            # there and back
            for i, bit in picks:
                flip_bit(words, i, bit)
            assert (flipped_bits.hash_bits(x) != before) == is_changed, picks


@pytest.mark.parametrize("device, sequence_parallel, is_compared", [
    ("cpu", False, True), ("meta", False, False), ("meta", True, True)])
def test_tp_copies_on_a_gpu_are_compared_where_summed(device, sequence_parallel, is_compared):
    """Elsewhere a GPU, here a device without numbers, may compute them with other bits."""
    grid = Grid(1, 1, 2, 0, sequence_parallel=sequence_parallel)
    grid.groups["tp"] = "two ranks"
    specs = param_specs(build_stage(SMALL, grid), SMALL, grid)
    flat = FlatParameters(specs, grid, torch.float32, torch.float32, device)
    assert (len(flipped_bits.shared_hashes(flat)["tp"]) > 0) == is_compared


@pytest.mark.claim("A flipped bit is found, named and undone.")
@pytest.mark.parametrize("layout, flags, flip, ranks", [
    ((3, 1, 1), dict(batch_size=6), Flip(2, 5, "forward", "data", 0.7, 29), [2]),
    ((1, 2, 1), dict(zero=0), Flip(1, 6, "update", "exp_avg_sq", 0.08, 25), [0, 1]),
    ((1, 1, 2), {}, Flip(1, 4, "update", "data", "embed.token.weight", 22), [0, 1]),
    pytest.param((2, 2, 1), dict(zero=3), Flip(1, 6, "update", "exp_avg", "blocks.0.norm1.weight",
                                               9), [0, 1], marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_named_and_undone(pool, tmp_path, layout, flags, flip, ranks):
    """The run goes back to its last checkpoint, and ends and saves as a run without the flip."""
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
import train
from tests.test_flipped_bits import Flip, inject
class Turned(train.Run):
    def __init__(self, *args):
        super().__init__(*args)
        inject(Flip(1, 3, "update", "data", 0.5, 20), True, self)
train.Run = Turned
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


@pytest.mark.fault("a bit flips in a value that another rank holds too", tried=8, survived=8,
                   note="found before the next save, named; bit-equal at the end")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_each_flip_in_a_value_that_another_rank_holds_is_found(pool, tmp_path, seed):
    """Any bit of a parameter, a moment or a summed gradient of two, three or four replicas. Or no
    trace is left: rounding has removed it. (A value that one rank alone holds is not compared.)"""
    rng = random.Random(seed)
    layout = rng.choice([(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)])
    tensor = rng.choice(["data", "exp_avg", "exp_avg_sq", "grad"])
    flip = Flip(rng.randrange(math.prod(layout)), rng.randrange(1, 8),
                "sum" if tensor == "grad" else rng.choice(["update", "forward"]), tensor,
                rng.random(), rng.randrange(32))
    _, healthy = flipped(pool, tmp_path / "healthy", layout, None)
    events, state = flipped(pool, tmp_path / "flipped", layout, flip)
    found = [event for event in events if event["event"] == "replicas"]
    assert equal_states(state, healthy) or "skip" in kinds(events), (flip, events)
    if found:
        first = flip.step + (flip.moment == "forward")          # whose update or save has it
        assert len(found) == 1 and flip.rank in found[0]["ranks"], (flip, events)
        assert found[0]["step"] <= 4 * ceil_div(first, 4), (flip, events)


@pytest.mark.claim("The comparison of replicas leaves healthy runs alone.")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_healthy_runs_are_left_alone(pool, tmp_path, seed):
    """Compared after each step, in drawn layouts."""
    name, layout, flags = drawn(seed)
    _, seen, _ = trained(pool, layout, tmp_path, MODELS[name], EVENTS, steps=6, check_every=1,
                         lr=1e-2, warmup_steps=1, seed=seed, **flags)
    assert not {"replicas", "rollback"} & {*kinds(seen[-1])}
