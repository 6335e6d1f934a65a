"""parallel.py's forms of sequence parallelism, 1F1B, buckets and ZeRO, each beside the whole model,
and its program in many layouts beside train.py.
"""
from dataclasses import replace

import pytest
import torch

import parallel
from parallelism.schedules import gpipe, one_f_one_b
from tests.commands import Command
from tests.harness import (CFG, CUTS, assert_close, cut, gridded, on_ranks, outputs_and_dx,
                           random_gpt, random_tensor, tokens_of)


@pytest.mark.parametrize("world", [2, 4])
@on_ranks
def test_plain_sequence_parallel_layers_equal_the_whole_layers(rank, world):
    """Each rank has its slice of the output of embedding and block and of dx, the loss of all
    positions, and, of what is not cut, terms whose sum over the ranks is the gradient: to 1e-12 in
    fp64 under random upstream gradients."""
    whole, local = (random_gpt(replace(CFG, n_layer=1)) for _ in range(2))
    tokens, targets = tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)
    x, dy = random_tensor(2, 16, 32, seed=1), random_tensor(2, 16, 32, seed=2)
    theirs = outputs_and_dx(whole, tokens, targets, x, dy)

    def part(x):
        return x.chunk(world, 1)[rank] if x.dim() > 0 else x
    with gridded(rank, world, tp=world, pp=1, sequence_parallel=True) as grid:
        parallel.plain_tensor_parallel(local, grid)
        ours = outputs_and_dx(local, tokens, targets, part(x), part(dy))
        pairs = {name: (ours[name], part(theirs[name])) for name in theirs}
        for name, parameter in whole.named_parameters():
            mine = local.get_parameter(name).grad
            if name not in CUTS:
                mine = parallel.all_reduce(mine, grid.groups["tp"])
            pairs[name] = mine, cut(name, parameter.grad, rank, world)
    assert_close(pairs, 1e-12)


def test_plain_orders_are_those_of_the_schedules():
    for stages in (1, 2, 3, 5):
        for stage in range(stages):
            for m in (1, 2, 5, 8):
                for plain, ours in ((parallel.plain_1f1b, one_f_one_b),
                                    (parallel.plain_gpipe, gpipe)):
                    assert plain(stage, stages, m) == [op[:2] for op in ours(stage, stages, m)]


def owned_with(zero, model, grid):
    """(what AdamW updates, the buckets), as train_plainly makes them."""
    if zero == 0:
        buckets = parallel.plain_buckets(model, grid) if grid.replicas > 1 else []
        return dict(model.named_parameters()), buckets
    shards = parallel.plain_shards(model, grid)
    if zero == 2:
        parallel.reduce_scatter_in_backward(model, shards, grid)
    if zero == 3:
        parallel.gather_in_use(model, shards, grid)
    return shards, []


@pytest.mark.parametrize("world, tp, pp, cp, sequence_parallel, zeros", [
    (3, 1, 3, 1, False, (0,)), (4, 1, 2, 1, False, (1,)), (4, 2, 1, 1, True, (2,)),
    (4, 1, 2, 2, False, (3,)),
    pytest.param(4, 2, 1, 1, True, (0, 1, 3), marks=pytest.mark.slow)])
@on_ranks
def test_plain_3d_steps_clip_by_the_norm_of_the_whole_model(rank, world, *, tp, pp, cp,
                                                            sequence_parallel, zeros):
    """Three steps of SGD, which unlike AdamW shows the norm, have the losses of one process, to
    1e-10 in fp64, with each stage of ZeRO."""
    cfg = replace(CFG, n_layer=3)

    def large_gpt():
        gpt = random_gpt(cfg)
        with torch.no_grad():
            gpt.head.weight *= 8                            # so that the norm is above 1
        return gpt
    one = large_gpt()
    tokens = torch.cat([tokens_of(cfg, 8), tokens_of(cfg, 8, seed=1)[:, :1]], 1)
    expected = []
    of_one = torch.optim.SGD(one.parameters(), lr=0.5)
    for _ in range(3):
        of_one.zero_grad()
        loss = one(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0) > 1.1
        of_one.step()
        expected.append(loss.item())
    with gridded(rank, world, tp, pp, sequence_parallel, cp=cp) as grid:
        for zero in zeros:
            local = large_gpt()
            parallel.plain_tensor_parallel(local, grid)
            if cp > 1:
                parallel.plain_context_parallel(local, grid)
            parallel.keep_stage(local, grid, parallel.stage_layers(cfg.n_layer, pp, grid.stage))
            owned, buckets = owned_with(zero, local, grid)
            of_local = torch.optim.SGD(owned.values(), lr=0.5)
            found = [parallel.plain_3d_step(local, owned, buckets, of_local, tokens, grid, zero,
                                            parallel.plain_1f1b) for _ in range(3)]
            assert found == pytest.approx(expected, rel=1e-10), f"ZeRO {zero}"


def test_plain_program_tells_a_mistake_in_one_line(tmp_path):
    """What cannot run ends with status 2 and one line that names the numbers."""
    command = "torchrun --nproc_per_node=2 parallel.py"
    for flags, words in [
            (["--tp", 2], f"not 1: start them by {command} --tp 2 --pp 1 --cp 1\n"),
            (["--tp", 2, "--pp", 2], "--nproc_per_node=4 parallel.py --tp 2 --pp 2"),
            (["--pp", 0], "--pp 0"), (["--zero", 4], "--zero"),
            (["--pp-schedule", "zb-h1"], "--pp-schedule"), (["--steps"], "--steps"),
            ([], "data/python")]:
        status, text, error = Command("parallel.py", *flags, cwd=tmp_path).finish()
        assert (status, text) == (2, "") and words in error and error.count("\n") == 1, error
    error = Command("parallel.py", "--tp", 8, cwd=tmp_path, WORLD_SIZE=8, RANK=0,
                    MASTER_ADDR="localhost").finish()[2]
    assert "tp must divide the model's 4 heads" in error and error.count("\n") == 1
    error = Command("parallel.py", cwd=tmp_path, WORLD_SIZE=2).finish()[2]
    assert "environment variable RANK expected, but not set" in error and error.count("\n") == 1
