"""The short examples of parallel.py, each beside one process.

They stand before the forms that train.py runs. A row of EXAMPLES is a function on each of two
ranks: it makes three steps of SGD by the example, and returns the parameters that its rank has
then, each whole."""
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel
import train
from base import processes
from parallelism.build import build_stage
from parallelism.parameters import TIED
from tests.harness import (CFG, Memory, assert_close, gridded, on_ranks, random_gpt, random_tensor,
                           relative, settings, tokens_of)
from tests.test_layouts import MODELS


def sgd(gpt):
    """Unlike AdamW it shows a gradient that is a multiple of the right one."""
    return torch.optim.SGD(gpt.parameters(), lr=1.0)


def by_replicas(gpt, tokens, targets):
    optimizer = sgd(gpt)
    for _ in range(3):
        parallel.plain_replica_step(gpt, optimizer, tokens, targets)
    return dict(gpt.named_parameters())


def by_stages(gpt, tokens, targets):
    batch = list(zip(tokens.split(1), targets.split(1)))
    with gridded(dist.get_rank(), dist.get_world_size(), tp=1, pp=2) as grid:
        parallel.keep_stage(gpt, grid)
        optimizer = sgd(gpt)
        for schedule in (parallel.gpipe, parallel.one_f_one_b, parallel.one_f_one_b):
            optimizer.zero_grad()
            parallel.plain_pipeline(gpt, batch, schedule(grid.stage, 2, len(batch)), grid)
            (tied,) = [p for name, p in gpt.named_parameters() if name in (*TIED, *TIED.values())]
            dist.all_reduce(tied.grad)              # embedding and head have a term each
            for parameter in gpt.parameters():
                parameter.grad /= targets.numel()   # of the sum -> of the mean
            optimizer.step()
        return {TIED.get(name, name): p for name, p in gpt.named_parameters()}


def by_gathers(gpt, tokens, targets):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards, shapes = [], {}
    for name, parameter in gpt.named_parameters():
        flat = F.pad(parameter.detach().flatten(), (0, -parameter.numel() % ranks))
        shards.append(flat.chunk(ranks)[rank].clone().requires_grad_())
        shapes[name] = parameter.shape
    gpt.to("meta")
    gpt.head.weight = gpt.embed.token.weight        # `to` has made two of it
    optimizer = torch.optim.SGD(shards, lr=1.0)
    with gridded(rank, ranks, tp=1, pp=1) as grid:
        group = grid.groups["replicas"]
        for _ in range(3):
            optimizer.zero_grad()
            loss = parallel.plain_zero3_forward(gpt, shards, group, tokens.chunk(ranks)[rank],
                                                targets.chunk(ranks)[rank])
            (loss / targets.numel()).backward()
            optimizer.step()
        found = {}
        for shard, (name, shape) in zip(shards, shapes.items()):
            whole = [torch.empty_like(shard) for _ in range(ranks)]
            dist.all_gather(whole, shard.detach())
            found[name] = torch.cat(whole)[:shape.numel()].view(shape)
        return found


EXAMPLES = dict(plain_replica_step=by_replicas, plain_pipeline=by_stages,
                plain_zero3_forward=by_gathers)


def train_whole(gpt, tokens, targets):
    optimizer = sgd(gpt)
    for _ in range(3):
        optimizer.zero_grad()
        (gpt(tokens, targets) / targets.numel()).backward()
        optimizer.step()
    return dict(gpt.named_parameters())


@pytest.mark.claim("The short examples of parallel.py train as one process.")
@pytest.mark.parametrize("example", EXAMPLES)
@on_ranks
def test_short_examples_train_as_one_process(rank, world=2, *, example):
    """To 1e-12 in fp64. The rows of one rank alone lead elsewhere."""
    cfg = replace(CFG, n_layer=2)
    tokens, targets = tokens_of(cfg, 4), tokens_of(cfg, 4, seed=1)
    expected = train_whole(random_gpt(cfg), tokens, targets)
    alone = train_whole(random_gpt(cfg), tokens.chunk(world)[rank], targets.chunk(world)[rank])
    assert relative(alone, expected) > 0.1
    found = EXAMPLES[example](random_gpt(cfg), tokens, targets)
    assert_close({name: (x, expected[name]) for name, x in found.items()}, 1e-12)
    names = processes.all_gather_object(list(found))
    assert set().union(*names) == set(expected)         # together the ranks have all


@on_ranks
def test_plain_mlp_is_the_mlp_of_the_whole_matrices(rank, world=2):
    """Its output, and the gradients of x and of this rank's columns and rows, to 1e-12 in fp64."""
    x, dy = random_tensor(2, 16, 32, seed=1), random_tensor(2, 16, 32, seed=2)
    A, B = random_tensor(32, 128, seed=3), random_tensor(128, 32, seed=4)
    for tensor in (x, A, B):
        tensor.requires_grad_()
    y = F.gelu(x @ A) @ B
    dx, dA, dB = torch.autograd.grad(y, (x, A, B), dy)
    parts = A.chunk(world, 1)[rank].detach(), B.chunk(world, 0)[rank].detach()
    with gridded(rank, world, tp=world, pp=1) as grid:
        inputs = x, *(part.clone().requires_grad_() for part in parts)
        ours = parallel.plain_mlp(*inputs, grid.groups["tp"])
        gradients = torch.autograd.grad(ours, inputs, dy)
    expected = dx, dA.chunk(world, 1)[rank], dB.chunk(world, 0)[rank]
    pairs = dict(zip(("dx", "dA", "dB"), zip(gradients, expected)))
    assert_close(pairs | dict(y=(ours, y)), 1e-12)


@pytest.mark.parametrize("cfg", [CFG, MODELS["olmoe"], MODELS["shared, bias"]])
@on_ranks
def test_a_run_has_the_modules_of_build_stage(rank, world=2, *, cfg):
    """Plans compose a rank's part once more."""
    config = settings("unused", tp=2)
    with gridded(rank, world, tp=2, pp=1) as grid:
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg), None)
        ours, planned = (
            {name: type(module) for name, module in model.named_modules()}
            for model in (run.model, build_stage(cfg, grid)))
        assert ours == planned
