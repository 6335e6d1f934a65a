"""Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2), as a run uses it.

The ranks of a cp group share every sequence: each holds T / cp positions. Only attention looks at
other positions, so only attention communicates. Causal attention works more for later positions;
so that all ranks work equally, each has an early and a late piece (Brandon et al. 2023). For cp 4:

    piece of the sequence           0   1   2   3   4   5   6   7
    rank that holds it              0   1   2   3   3   2   1   0
    pieces that its q attends to    1   2   3   4   5   6   7   8       9 on every rank

It computes what the plain form in parallel.py does. The differences:

         difference                             gain                        where
    CP1  a piece of q attends to a prefix       half the products; flash    attend_to_prefix
         of the keys, not to all under a mask   attention on GPUs
    CP2  K and V travel as one; backward        half the messages; half     _GatherKeysAndValues
         sends slices of the sum, not all       the bytes of backward
    CP3  backward gathers and attends again     K and V of T / cp           recompute_attention
         (Korthikanti et al. 2022, section 5)   positions are kept, not T;
                                                costs a third of attention

The gradients of all parameters are summed over dp x cp replicas (zero.py). A ring (Liu et al. 2023)
would overlap its messages with attention; gathering is shorter, and the same for any mask.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head.
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, CoreAttention, seed_dropout, upcast_for_matmul
from parallelism.collectives import all_gather, reduce_scatter
from parallelism.tensor import PositionEmbedding


def own_positions(x: torch.Tensor, rank: int, cp: int, dim: int = -1) -> torch.Tensor:
    """The positions of x, T along `dim`, that a rank of cp holds: pieces `rank` and
    2 cp - 1 - `rank` of 2 cp. A copy. T is a multiple of 2 cp, but any for cp 1."""
    pieces = x.tensor_split(2 * cp, dim)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim)


class _GatherKeysAndValues(torch.autograd.Function):
    """k and v of this rank's positions, (B, H, T / cp, D) each -> those of all positions, in order:
    (2, B, H, T, D). Backward: the gradients at this rank's positions, summed over the ranks."""

    @staticmethod
    def forward(ctx, k, v, grid):
        ctx.grid = grid
        parts = k.new_empty(grid.cp, 2, *k.shape)                   # (cp, 2, B, H, T / cp, D)
        torch.stack([k, v], out=parts[grid.cp_rank])
        all_gather(parts, grid.groups["cp"]).wait()                 # in place
        early, late = parts.chunk(2, dim=-2)
        return torch.cat([*early, *late.flip(0)], dim=-2)

    @staticmethod
    def backward(ctx, dkv):
        grid = ctx.grid
        parts = torch.stack([own_positions(dkv, rank, grid.cp, dim=-2) for rank in range(grid.cp)])
        [own] = reduce_scatter(parts, grid.groups["cp"]).wait()     # (2, B, H, T / cp, D)
        dk, dv = own
        return dk, dv, None


def attend_to_prefix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float):
    """CP1: causal attention of q (B, H, n, D), the last n of the positions of k and v
    (B, H, end, D)."""
    n, end = q.shape[2], k.shape[2]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p)
    if q.device.type != "cpu":
        # Flash attention, which needs no mask in memory. (The import loads a compiler, for 1 s.)
        from torch.nn.attention.bias import causal_lower_right
        return attend(q, k, v, causal_lower_right(n, end))
    # A CPU's kernel reads a mask (n, end), and backward keeps it. With q in reverse order row i may
    # see position j if i + j < end: row i is a vector from its element i on. The mask is a view.
    dtype = torch.promote_types(q.dtype, torch.float32)
    mask = torch.zeros(end + n - 1, dtype=dtype)
    mask[end:] = -torch.inf
    attend = partial(attend, attn_mask=mask.unfold(0, end, 1))
    return upcast_for_matmul(attend, q.flip(2), k, v).flip(2)


class ContextParallelAttention(CoreAttention):
    """model.CoreAttention of q, k and v (B, H, T / cp, D), those of this rank's positions."""

    def __init__(self, plain: CoreAttention, grid):
        super().__init__(plain.p, *plain.name)
        self.grid = grid

    def forward(self, q, k, v, causal, dropout_seed=None):
        """`causal` is True: a run has no cache."""
        p = self.p if self.training else 0.0
        if p > 0:
            seed_dropout(q.device, dropout_seed, *self.name, self.rng_offset)
        k, v = _GatherKeysAndValues.apply(k, v, self.grid)          # 2 of (B, H, T, D)
        outputs = []
        pieces = own_positions(torch.arange(2 * self.grid.cp), self.grid.cp_rank, self.grid.cp)
        for piece, q in zip(pieces.tolist(), q.chunk(2, dim=2)):
            end = (piece + 1) * q.shape[2]
            outputs.append(attend_to_prefix(q, k[:, :, :end], v[:, :, :end], p))
        return torch.cat(outputs, dim=2)


class ContextParallelPositions(PositionEmbedding):
    """Positions are counted in this rank's pieces."""

    def lookup(self, positions):
        whole = torch.arange(0, len(self.weight), device=positions.device)
        own = own_positions(whole, self.grid.cp_rank, self.grid.cp)
        return F.embedding(own[positions], self.weight)


def recompute_attention(model: GPT) -> None:
    """CP3: autograd keeps q, k and v of this rank's positions alone."""
    for block in model.blocks.values():
        attention = block.attn.core_attention
        # Dropout masks depend on seeds only, so there is no generator state to restore.
        attention.forward = partial(checkpoint, attention.forward, use_reentrant=False,
                                    preserve_rng_state=False)


CP_PLAN = {         # which module of model.py becomes what (build_stage)
    "attn.core_attention": ContextParallelAttention,
    "embed.position": ContextParallelPositions,
}
