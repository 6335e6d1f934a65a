"""The layers of parallel.py with sequence parallelism, beside the whole ones."""
from dataclasses import replace

import pytest

import parallel
from tests.harness import (CFG, CUTS, assert_close, cut, cut_layers, gridded, on_ranks,
                           outputs_and_dx, random_gpt, random_tensor, tokens_of)


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
        cut_layers(local, grid)
        ours = outputs_and_dx(local, tokens, targets, part(x), part(dy))
        pairs = {name: (ours[name], part(theirs[name])) for name in theirs}
        for name, parameter in whole.named_parameters():
            mine = local.get_parameter(name).grad
            if name not in CUTS:
                mine = parallel.all_reduce(mine, grid.groups["tp"]).wait()
            pairs[name] = mine, cut(name, parameter.grad, rank, world)
    assert_close(pairs, 1e-12)
