"""The short examples of parallel.py, each beside one process.

They stand before the forms that train.py runs. A row of EXAMPLES is a function on each of two
ranks: it makes three steps of SGD by the example, and returns the parameters that its rank has
then, each whole.
"""
from dataclasses import replace

import pytest
import torch

import parallel
from base import processes
from tests.harness import CFG, assert_close, on_ranks, random_gpt, relative, tokens_of


def sgd(gpt):
    """Unlike AdamW it shows a gradient that is a multiple of the right one."""
    return torch.optim.SGD(gpt.parameters(), lr=1.0)


def by_replicas(gpt, tokens, targets):
    optimizer = sgd(gpt)
    for _ in range(3):
        parallel.plain_replica_step(gpt, optimizer, tokens, targets)
    return dict(gpt.named_parameters())


EXAMPLES = dict(plain_replica_step=by_replicas)


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
