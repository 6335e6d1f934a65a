"""ZeRO: what a rank keeps, and when it communicates.

That replicas train as one process, DDP and FSDP2 do: test_all.py."""
import functools
import itertools
from dataclasses import replace

import pytest
import torch

import amp
from parallel import Grid
from parallelism.build import build_stage
from parallelism.parameters import param_specs
from parallelism.pipeline import SCHEDULES, run_schedule
from parallelism.zero import FlatParameters
from runtime.console import memory_in_words
from tests.harness import CFG, gridded, in_turn, staged, tokens_of, traffic
from tests.test_layouts import MODELS
from tools.plan.flags import PlanConfig
from tools.plan.memory import Stage, state_bytes


def held_by(flat):
    """{(device, kind): bytes} of the tensors in a FlatParameters' buckets."""
    sizes = {}                  # storage -> ((device, kind), bytes)
    for bucket in flat.buckets:
        own = bucket.shard
        for kind, x in [("parameters", bucket.data), ("parameters", own["data"]),
                        ("gradients", bucket.grad), ("gradients", own.get("grad")),
                        ("masters", own["master"]), ("moments", own.get("exp_avg")),
                        ("moments", own.get("exp_avg_sq"))]:
            if x is not None:
                storage = x.untyped_storage()
                sizes.setdefault(storage._cdata, ((x.device.type, kind), storage.nbytes()))
    if flat.staging is not None:
        sizes["staging"] = ("cpu", "staging"), flat.staging.nbytes
    places = {place for place, _ in sizes.values()}
    return {place: sum(size for at, size in sizes.values() if at == place) for place in places}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("model, place", [
    ("gpt", dict(dp=2, pp=2, tp=2, chunks=2)), ("gpt", dict(dp=3, pp=1, tp=2)),
    ("shared, bias", dict(dp=4, pp=1, tp=2, ep=2))])
def test_state_bytes_are_what_flat_parameters_allocate(model, place, device, dtype, zero):
    """On a rank of each replica and stage, by kind, exactly, also of the buckets that a plan counts
    without building the blocks. (That the total is ZeRO's published formula: test_plan.py.)
    Parameters on another device than the optimizer, here torch's meta device, are --offload."""
    dtypes, offload = amp.PRECISIONS[dtype], device == "meta"
    if zero == 3:
        place = place | dict(pp=1, chunks=1)
    cfg = replace(MODELS[model], n_layer=5 if place["pp"] > 1 else 2)
    for rank in range(1, place["dp"] * place["pp"] * place["tp"], place["tp"]):
        grid = Grid(**place, rank=rank)
        specs = param_specs(build_stage(cfg, grid), cfg, grid)
        flat = FlatParameters(specs, grid, *dtypes, device, zero, "cpu")
        planned = state_bytes(Stage(cfg, PlanConfig(zero=zero, dtype=dtype, offload=offload), grid))
        assert held_by(flat) == {("cpu" if kind.startswith("host_") else device,
                                  kind.removeprefix("host_")): size
                                 for kind, size in planned.items() if size > 0}
        told = memory_in_words(flat)
        assert told == ", ".join(f"{kind.replace('_', ' ')} {size / 1e6:,.1f} MB"
                                 for kind, size in planned.items())
        # An evaluation keeps the parameters alone.
        flat = FlatParameters(specs, grid, *dtypes, device, zero, "cpu", training=False)
        assert held_by(flat) == {(device, "parameters"): planned["parameters"]}


def events_of_a_step(rank, world, zero):
    """What a step of two microbatches does, in order, and then the next forward: (what, of which
    bucket or part of the model)."""
    events = []
    storages = {}               # of tensors on their way: (what they are, their bucket)

    def note_gradient(name, gradient):
        events.append(("gradient", name))

    def note_message(name, x, *_, **__):
        storage = x.untyped_storage().data_ptr()
        if name == "isend":
            for bucket in flat.buckets:
                for kind, tensor in (("sum", bucket.grad), ("gather", bucket.data)):
                    if tensor is not None and tensor.untyped_storage().data_ptr() == storage:
                        storages[storage] = kind, bucket.name
                        events.append((f"{kind} starts", bucket.name))
        if name == "wait" and storage in storages:      # (not for what is received)
            kind, bucket = storages.pop(storage)        # other tensors may take this memory
            events.append((f"{kind} ends", bucket))
    with gridded(rank, world, tp=1, pp=1) as grid:
        local, flat = staged(replace(CFG, n_layer=2), grid, zero=zero)
        for bucket in flat.buckets:
            for module, attribute in sum((spec.owners for spec in bucket.specs), []):
                parameter = getattr(module, attribute)
                parameter.register_hook(functools.partial(note_gradient, bucket.name))
        parts = {f"block {name}": block.norm1 for name, block in local.blocks.items()}
        parts |= dict(embedding=local.embed.token, head=local.head.norm)
        batch = [(tokens, tokens, 0, None) for tokens in tokens_of(CFG, 4).split(2)]
        with traffic(note_message):
            flat.zero_grad()
            run_schedule(SCHEDULES["1f1b"](0, 1, 2), local, grid, batch, flat=flat)
            flat.finish_grad_sync()
            events.append(("update", ""))
            flat.adamw_step(1.0, 1, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
            for name, first in parts.items():
                first.register_forward_pre_hook(lambda *_, name=name: events.append((name, "")))
            with torch.no_grad():
                local(*batch[0][:2])
    return events


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_of_buckets_overlap_backward(pool, zero):
    """Mechanism (that backward hides communication): the sum of a bucket starts between its last
    gradient and the first of the next bucket. (ZeRO 2's memory: test_plan.py.)"""
    completed = ["1.mlp", "1.attn", "0.mlp", "0.attn", "ends", "tied"]      # in this order
    for events in pool.run(2, events_of_a_step, zero):
        update = events.index(("update", ""))
        backward, after = events[:update], events[update:]
        started = [bucket for what, bucket in backward if what == "sum starts"]
        assert started == completed * (2 if zero == 2 else 1)
        last = {event: i for i, event in enumerate(backward)}
        for bucket, following in itertools.pairwise(completed):
            assert last["gradient", bucket] < last["sum starts", bucket] < last[
                "gradient", following], (bucket, backward)
        sums = [what for what, _ in backward if what in ("sum starts", "sum ends")]
        if zero > 0:
            assert sums == len(started) * ["sum starts", "sum ends"]
        else:
            assert sums == len(started) * ["sum starts"] + len(started) * ["sum ends"]
            assert {what for what, _ in after} == {"update", "embedding", "block 0", "block 1",
                                                   "head"}
            continue
        place = {event: i for i, event in enumerate(after)}
        for part, previous, buckets in [
                ("embedding", "update", ("tied", "ends")),
                ("block 0", "embedding", ("0.attn", "0.mlp")),
                ("block 1", "block 0", ("1.attn", "1.mlp"))]:
            for bucket in buckets:
                assert place["gather starts", bucket] < place["embedding", ""]
                assert place[previous, ""] < place["gather ends", bucket] < place[part, ""]


@pytest.mark.parametrize("recompute", [False, True])
def test_zero_3_holds_one_block_and_gathers_the_next(recompute):
    """Mechanism (of ZeRO 3's memory and overlap): which buckets have memory, the two halves of a
    block each, and + what is on its way: in a block's forward, its backward (recomputation sees it
    in both) and after."""
    tokens = tokens_of(CFG, 2)
    seen = []
    local, flat = staged(replace(CFG, n_layer=3), Grid(1, 1, 1), recompute=recompute, zero=3)

    def look(*_):
        held = []
        for bucket in flat.buckets:
            if bucket.data.untyped_storage().size() > 0:
                part = bucket.name.split(".")[0]
                held.append(part if bucket.unsharding is None else part + "+")
        seen.append(" ".join(held))
    local.embed.token.register_forward_hook(look)
    for block in local.blocks.values():
        block.norm2.register_forward_hook(look)
        block.norm2.weight.register_post_accumulate_grad_hook(look)
    loss = local(tokens, tokens)
    look()                                      # the head has made its gradients already
    flat.prepare_grad_sync(local, True)
    loss.backward()
    look()
    with torch.no_grad():
        local(tokens, tokens)
    look()
    forward = ["tied ends 0+ 0+", "tied ends 0 0 1+ 1+", "tied ends 1 1 2+ 2+", "tied ends 2 2"]
    backward = ["ends 2 2", "ends 1+ 1+ 2 2", "ends 0+ 0+ 1 1", "ends 0 0"]
    assert in_turn(seen) == [*forward, *backward, "", *forward, ""]
    with pytest.raises(RuntimeError, match="full_tensors"):
        local.state_dict()
