"""The norm of q and k over the channels of all heads (OLMo 2, OLMoE), under tensor parallelism.

Each tp rank has some heads, and so some of the channels. For each position the tp ranks sum the
squares of their channels, a number (B, T) forward and its gradient backward. Of a head that ranks
share (shared_heads.py) each counts its part of the squares.
"""
from functools import partial

import torch
import torch.nn as nn

from model import GPT
from models.llama import AllHeadsNorm
from parallel import TensorParallel, WithGradient, all_reduce, replace_modules
from parallelism.shared_heads import JoinHeads, SharedHeadsQKV


def widened(q: torch.Tensor) -> torch.Tensor:
    """q in fp32 or wider."""
    return q.to(torch.promote_types(q.dtype, torch.float32))


def sum_of_squares(q: torch.Tensor) -> torch.Tensor:
    """(B, heads, T, D) -> (B, 1, T, 1)"""
    return q.square().sum((1, 3), keepdim=True)


def sharing_of(q: torch.Tensor, weight: torch.Tensor) -> int:
    """How many pieces share each head of q, or of k, (B, heads, T, D). `weight` is one
    of the pieces. Heads of q are not shared: 1."""
    return q.shape[1] * q.shape[3] // len(weight)


class ParallelAllHeadsNorm(TensorParallel):
    """RMSNorm over the channels of all heads, of which q (B, H / tp, T, D) has this rank's."""
    partition_dim = {"weight": 0}

    def __init__(self, plain: AllHeadsNorm, grid):
        super().__init__(plain, grid)
        self.channels, self.eps = plain.weight.numel(), plain.eps

    def forward(self, q):
        q = widened(q)
        sharing = sharing_of(q, self.weight)
        [weight] = self.whole_weights(sharing, [self.weight])
        squares = sum_of_squares(q) / sharing
        if self.grid.tp > 1:
            squares = WithGradient.apply(squares, self.sum_over_heads, self.sum_over_heads)
        return self.normalize(q, squares, weight)

    def sum_over_heads(self, x):
        """The sum over the tp ranks. Each uses it for its own heads, so it is its own gradient."""
        return all_reduce(x.clone(), self.grid.groups["tp"]).wait()

    def whole_weights(self, sharing: int, pieces: list | tuple) -> list | tuple:
        """The weights of pieces of heads -> the weight of the whole heads, for each piece."""
        return pieces if sharing == 1 else JoinHeads.apply(self.grid, sharing, *pieces)

    def normalize(self, q, squares, weight):
        """q in fp32 or wider, the squares (B, 1, T, 1) of all heads, the weight of those of q."""
        normal = q * (squares / self.channels + self.eps).rsqrt()
        return normal.to(weight.dtype) * weight.view(q.shape[1], 1, -1)


def norm_of_heads(plain: nn.Module, grid) -> nn.Module:
    """Only the norm over all heads is cut. A norm of each head stays whole."""
    if isinstance(plain, AllHeadsNorm):
        return ParallelAllHeadsNorm(plain, grid)
    return plain


def cut_heads(model: GPT, grid) -> None:
    """What parallel.tensor_parallel lacks for Llamas: norms over all heads, and heads of k and v
    that ranks share."""
    replace_modules(model, {"attn.q_norm": norm_of_heads, "attn.k_norm": norm_of_heads}, grid)
    sharing = grid.tp // model.cfg.n_kv_head                # ranks that share a head
    if sharing > 1:
        qkv = partial(SharedHeadsQKV, model_config=model.cfg)
        replace_modules(model, {"attn.qkv": qkv}, grid)
        for block in model.blocks.values():
            block.attn.group //= sharing
