"""OLMoE's norm of q and k over the channels of all heads, under tensor parallelism.

Each tp rank has some heads, and so some of the channels. For each position the tp ranks sum the
squares of their channels, a number (B, T) forward and its gradient backward.
"""
import torch
import torch.nn as nn

from models.moe import AllHeadsNorm
from parallelism.collectives import all_reduce
from parallelism.tensor import TensorParallel


class _SumBothWays(torch.autograd.Function):
    """The sum over the tp ranks, each of which uses it for its own heads."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x.clone(), group).wait()

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy.clone(), ctx.group).wait(), None


class ParallelAllHeadsNorm(TensorParallel):
    """RMSNorm over the channels of all heads, of which q (B, H / tp, T, D) has this rank's."""
    partition_dim = {"weight": 0}

    def __init__(self, plain: AllHeadsNorm, grid):
        super().__init__(plain, grid)
        self.channels, self.eps = plain.weight.numel(), plain.eps

    def forward(self, q):
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        squares = wide.square().sum((1, 3), keepdim=True)                   # (B, 1, T, 1)
        if self.grid.tp > 1:
            squares = _SumBothWays.apply(squares, self.grid.groups["tp"])
        normal = (wide * (squares / self.channels + self.eps).rsqrt()).to(q.dtype)
        return normal * self.weight.view(q.shape[1], 1, -1)


def norm_of_heads(plain: nn.Module, grid) -> nn.Module:
    """Only the norm over all heads is cut. A norm of each head stays whole."""
    if isinstance(plain, AllHeadsNorm):
        return ParallelAllHeadsNorm(plain, grid)
    return plain
