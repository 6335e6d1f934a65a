"""Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2), as train.py runs it.

The ranks of a cp group share every sequence: each holds the activations of T / cp positions. Only
attention reads other positions, so only attention communicates. Later positions attend to more
keys, so for equal work each rank has an early and a late piece (Brandon et al. 2023). For cp 4:

    piece of the sequence           0   1   2   3   4   5   6   7
    rank that holds it              0   1   2   3   3   2   1   0
    pieces that its q attends to    1   2   3   4   5   6   7   8       9 on every rank

It computes the same as `PlainContextAttention` in parallel.py. The differences:

    difference                               gain                       where
    a piece of q attends to the keys         about half the products;   attend_to_prefix
      before its end, not to all, masked     flash attention
    K and V are gathered in one message      half the messages          _GatherKeysAndValues
    backward gathers and attends again       K and V of T / cp          recompute_attention
      (Korthikanti et al. 2022, section 5)   positions are kept, not T

Recomputation costs another gather and a third of attention's arithmetic. Ring attention (Liu et al.
2023) instead passes K and V from rank to rank, and merges the outputs for each part: more to read.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head.
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, CoreAttention
from models.llama import Rotary
from models.window import with_window
from parallel import cut_sequence
from parallelism.collectives import all_gather, reduce_scatter
from parallelism.kernels import upcast_for_matmul
from parallelism.tensor import PositionEmbedding


class _GatherKeysAndValues(torch.autograd.Function):
    """k and v of this rank's positions, (B, H, T / cp, D) each -> those of all positions, in order:
    (2, B, H, T, D). Backward: the gradients at this rank's positions, summed over the ranks."""

    @staticmethod
    def forward(ctx, k, v, grid):
        ctx.grid = grid
        parts = k.new_empty(grid.cp, 2, *k.shape)                   # (cp, 2, B, H, T / cp, D)
        parts[grid.cp_rank, 0] = k
        parts[grid.cp_rank, 1] = v
        all_gather(parts, grid.groups["cp"]).wait()                 # fills in the other ranks'
        early, late = parts.chunk(2, dim=-2)
        return torch.cat([*early, *late.flip(0)], dim=-2)

    @staticmethod
    def backward(ctx, dkv):
        grid = ctx.grid
        parts = torch.stack([cut_sequence(dkv, rank, grid.cp, dim=-2) for rank in range(grid.cp)])
        sums = reduce_scatter(parts, grid.groups["cp"]).wait()      # (1, 2, B, H, T / cp, D)
        return sums[0, 0], sums[0, 1], None


def attend_to_prefix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float,
                     mask: torch.Tensor | None):
    """Causal attention of q (B, H, n, D), the last n of the positions of k and v
    (B, H, end, D), or by a mask (B, 1, n, end)."""
    n, end = q.shape[2], k.shape[2]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p,
                     enable_gqa=q.shape[1] > k.shape[1])
    if mask is not None:
        return upcast_for_matmul(partial(attend, attn_mask=mask), q, k, v)
    if q.device.type == "cpu":
        return upcast_for_matmul(partial(attend, attn_mask=reversed_mask(n, end, q.dtype)),
                                 q.flip(2), k, v).flip(2)
    # Flash attention, which needs no mask in memory. Imported here because it takes a second.
    from torch.nn.attention.bias import causal_lower_right
    return attend(q, k, v, attn_mask=causal_lower_right(n, end))


def reversed_mask(n: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask (n, end) to add to the scores of the last n of `end` positions, in reverse order: row
    i, of position end - 1 - i, is elements i to i + end - 1 of a vector (0, ... 0, -inf, ... -inf).
    A CPU's kernel keeps the mask for backward; a view of the vector takes no memory."""
    vector = torch.zeros(end + n - 1, dtype=torch.promote_types(dtype, torch.float32))
    vector[end:] = -torch.inf
    return vector.unfold(0, end, 1)


class ContextParallelAttention(CoreAttention):
    """model.CoreAttention of q, k and v (B, H, T / cp, D), those of this rank's positions."""

    def __init__(self, plain: CoreAttention, grid):
        super().__init__(plain.p, *plain.name)
        self.grid = grid
        self.window = getattr(plain, "window", 0)           # 0: none (models/window.py)

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        """With dropout each rank has a seed of its own. A mask (B, 1, T, T) is of all positions."""
        k, v = _GatherKeysAndValues.apply(k, v, self.grid)          # 2 of (B, H, T, D)
        if self.window > 0:
            mask = with_window(mask, self.window, k.shape[2], k.device)
        return super().forward(q, k, v, dropout_seed, mask)

    def attend(self, q, k, v, mask):
        outputs = []
        p = self.p if self.training else 0.0
        rank, cp = self.grid.cp_rank, self.grid.cp
        for piece, q_piece in zip([rank, 2 * cp - 1 - rank], q.chunk(2, dim=2)):
            n = q_piece.shape[2]
            end = (piece + 1) * n
            mask_of_piece = None if mask is None else mask[..., end - n:end, :end]
            outputs.append(attend_to_prefix(q_piece, k[:, :, :end], v[:, :, :end], p,
                                            mask_of_piece))
        return torch.cat(outputs, dim=2)


class ContextParallelPositions(PositionEmbedding):
    """Local positions, 0 to T / cp - 1, become those of the whole sequence: the weight's T rows."""

    def cut_packed(self, positions):
        return super().cut_packed(cut_sequence(positions, self.grid.cp_rank, self.grid.cp))

    def lookup(self, positions):
        whole = torch.arange(0, len(self.weight), device=positions.device)
        of_rank = cut_sequence(whole, self.grid.cp_rank, self.grid.cp)
        return F.embedding(of_rank[positions], self.weight)


class ContextParallelRotary(Rotary):
    """Local positions, 0 to T / cp - 1, become those of the whole sequence."""

    def __init__(self, plain: Rotary, grid):
        super().__init__(plain.cfg)
        self.grid = grid

    def positions(self, T, device):
        whole = torch.arange(T * self.grid.cp, device=device)
        return cut_sequence(whole, self.grid.cp_rank, self.grid.cp)


def recompute_attention(model: GPT) -> None:
    """Backward gathers and attends again. Autograd keeps this rank's own q, k and v alone."""
    for block in model.blocks.values():
        attention = block.attn.core_attention
        # Dropout masks depend on seeds only, so there is no generator state to restore.
        attention.forward = partial(checkpoint, attention.forward, use_reentrant=False,
                                    preserve_rng_state=False)


CP_PLAN = {         # which module of model.py becomes what (build_stage)
    "attn.core_attention": ContextParallelAttention,
    "embed.position": ContextParallelPositions,
    "attn.rotary": ContextParallelRotary,
}
