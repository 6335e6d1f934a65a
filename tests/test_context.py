"""Context parallelism: who holds which positions, and what a rank keeps.

    python -m pytest tests/test_context.py

That attention and layers are the whole ones: test_all.py.
"""
import re
from types import SimpleNamespace

import torch

import model
from parallelism import context
from tests.harness import gridded, random_tensor


def test_ranks_hold_each_position_once_and_attend_to_equally_many():
    """For 1 to 16 ranks. A single rank holds all in order, of any number. A rank's two pieces of q
    attend to 2 cp + 1 pieces together, the figure in context.py."""
    for cp in (1, 2, 3, 4, 8, 16):
        positions = torch.arange(6 * cp)
        parts = [context.own_positions(positions, rank, cp) for rank in range(cp)]
        assert torch.cat(parts).sort().values.equal(positions)
        assert {len(part) for part in parts} == {6}
        assert len({(part + 1).sum().item() for part in parts}) == 1        # keys of all q
        pieces = [(part[::3] // 3 + 1).tolist() for part in parts]
        assert {sum(piece) for piece in pieces} == {2 * cp + 1}
    drawing = "".join(line for line in context.__doc__.splitlines(True) if "rank that" in line)
    holders = [int(x) for x in re.findall(r"\d", drawing)]
    parts = [context.own_positions(torch.arange(8), rank, 4).tolist() for rank in range(4)]
    assert [next(r for r in range(4) if piece in parts[r]) for piece in range(8)] == holders
    for length in (1, 2, 7):
        assert context.own_positions(torch.arange(length), 0, 1).tolist() == list(range(length))


def test_a_run_keeps_only_its_own_positions_of_keys_and_values(pool):
    """CP3: of a layer's attention autograd keeps q, k and v at this rank's positions, all in one
    tensor of the projection, and nothing of all positions."""
    assert pool.run(4, bytes_kept_by_attention) == [3 * 2 * 3 * 4 * 5 * 8] * 4


def bytes_kept_by_attention(rank, world):
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with gridded(rank, world, 1, 1, cp=world) as grid:
        block = SimpleNamespace(attn=SimpleNamespace(core_attention=(
            context.ContextParallelAttention(model.CoreAttention(0.0, "x"), grid))))
        context.recompute_attention(SimpleNamespace(blocks={"0": block}))
        qkv = random_tensor(3, 2, 3, 4, 5, seed=rank).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = block.attn.core_attention(*qkv.unbind())
        y.sum().backward()
    return sum(kept.values())
