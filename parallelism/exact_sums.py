"""Exact sums: the same in every order. parallelism/exact.py (--exact) uses them.

Floating-point addition rounds, so a sum depends on its order, and the order on the layout: on
microbatches, replicas, tensor-parallel ranks. Whole numbers add without rounding, in float64 up
to 2^53. So count in units: round each term to a whole number of units, by itself, and add these.
The sum is the same in every order (Demmel and Nguyen 2013; Collange et al. 2015). With a unit of
0.01:

    3.14159   ->    314 units           314 +  272 = 586,  586 - 1 = 585
    2.71828   ->    272 units             272 - 1 = 271,  271 + 314 = 585   -> 5.85
   -0.01234   ->     -1 unit

Each term changes by at most half a unit. The units (powers of two) and limits:

    terms                                   unit                    largest sum: 2^52 units
    activations of strips                   2^-32                   2^20
    a token's gradients of these            2^-36 loss scale / N    2^16 loss scale / N
    gradients of parameters                 2^-40 loss scale        2^12 loss scale
      of embedding and head                 2^-36 loss scale        2^16 loss scale
    squares of gradients, high digits       2^-30                   2^23 (2^53 units): norm 2,900
      what is left of each                  2^-46                   2^7: of 2^38 parameters
    exp(logit - largest)                    2^-34                   2^18: tokens of a vocabulary
    losses                                  2^-20                   2^32: of 10^8 tokens
    norms of activations                    2^-10                   2^42

N is the number of tokens in the batch that have a loss. Why these: a gradient of the mean loss is
below 1 in a healthy run, AdamW's epsilon is 1e-8 = 10,000 * 2^-40, and the gradient of one of a
million tokens must not vanish. An embedding's gradients are the largest: they pass the first
LayerNorm, which divides by 0.03 at the start. The largest sum is half of what float64 holds,
because the token matrix has two sums, of the embedding and of the head, which are added.

A larger term must not silently make the sum inexact. Of n terms each may be as large as the n-th
part of the largest sum, its share. `ExactSums` compares it with that, and an excess skips the
step on all ranks, as an overflow does. In 60 healthy steps of nano the largest term had 0.03 of
its share.
"""
import math

import torch

from amp import adamw_update
from parallelism.zero import FlatParameters


def plain_exact_sum(terms: list[float], unit: float) -> float:
    """The sum of the terms, each rounded to a multiple of `unit`: the same in every order."""
    units = 0
    for term in terms:
        units += round(term / unit)
    return units * unit


class ExactSums:
    """The exact sums of a step, in float64 tensors, and whether a term was too large.

    strips      attention, MLP and logits are computed in so many strips (exact.py)
    positions   of a microbatch
    excess      the largest |term| so far, relative to its limit; at 1 or more a sum may be inexact
    """
    ACTIVATION = 2.0 ** -32
    SQUARES = (2.0 ** -30, 2.0 ** -46)
    SOFTMAX = 2.0 ** -34
    LOSS = 2.0 ** -20
    NORM = 2.0 ** -10

    def __init__(self, strips: int, positions: int, device: torch.device):
        self.strips, self.positions = strips, positions
        self.scratch = torch.empty(0, device=device)
        self.set_units(1.0, 1)

    def set_units(self, loss_scale: float, tokens: int, targets: int | None = None) -> None:
        """Before a step or an evaluation. `tokens`, of all ranks, bound the number of terms of a
        sum; `targets` (None: all), those of which the loss is the mean, set the size of a gradient.
        """
        self.loss_scale, self.tokens = loss_scale, tokens
        self.activation_gradient = 2.0 ** -36 * power_of_2(loss_scale / (targets or tokens))
        self.gradient = 2.0 ** -40 * power_of_2(loss_scale)
        self.embedding_gradient = 2.0 ** -36 * power_of_2(loss_scale)
        self.excess = torch.zeros((), device=self.scratch.device)

    def in_units(self, x: torch.Tensor, unit: float, terms: float) -> torch.Tensor:
        """x in whole units, in memory that the next call uses again. `terms`: how many such terms
        the sum has."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.scratch.numel() < x.numel() or self.scratch.dtype != wide:
            self.scratch = torch.empty(x.numel(), dtype=wide, device=x.device)
        units = self.scratch[:x.numel()].view(x.shape)
        torch.mul(x.to(wide), 1 / unit, out=units).round_()     # exact: a power of two
        low, high = units.aminmax()
        excess = torch.maximum(-low, high) * (terms / 2 ** 52)
        self.excess = torch.maximum(self.excess, excess)
        return units

    def add(self, total: torch.Tensor, x: torch.Tensor, unit: float, terms: float) -> None:
        """total += x, both of one shape."""
        total.add_(self.in_units(x, unit, terms), alpha=unit)

    def add_rows(self, total: torch.Tensor, x: torch.Tensor, unit: float, rows: int = 1) -> None:
        """total (C,) += the sum of x (..., C), which has so many rows for each position, those of
        other strips and ranks included."""
        units = self.in_units(x.flatten(0, -2), unit, rows * self.terms(1))
        total.add_(units.sum(0, dtype=total.dtype), alpha=unit)

    def terms(self, positions: int) -> float:
        """The number of terms, each for so many positions, in a sum over the batch."""
        return self.tokens / positions

    def squares(self, grad: torch.Tensor) -> torch.Tensor:
        """The sum of the squares of a float64 gradient, as two exact sums: of the high digits, and
        of what is left, (2,)."""
        left = (grad / self.loss_scale).square_()
        sums = []
        for unit in self.SQUARES:
            units = self.in_units(left, unit, 1)
            sums.append(units.sum() * unit)
            left -= units * unit
        return torch.stack(sums) * self.loss_scale ** 2

    def checked(self, total: torch.Tensor) -> torch.Tensor:
        """This total, but inf if a term of any sum was too large, or NaN, since `set_units`."""
        return total.where(self.excess < 1, torch.inf)

    def in_range(self, squares: float) -> bool:
        """Whether a sum of squares' high digits is exact. Its terms are positive: one that was too
        large on the way is too large in the end."""
        return squares < 2 ** 53 * self.SQUARES[0] * self.loss_scale ** 2


class ExactParameters(FlatParameters):
    """FlatParameters with exact sums of the gradients, in float64, and of their squares."""

    grad_dtype = torch.float64
    tp_copies_are_equal = True

    def set_loss_scale(self, loss_scale, tokens, targets):
        self.grid.exact.set_units(loss_scale, tokens, targets)
        super().set_loss_scale(loss_scale, tokens, targets)

    def add_grad(self, parameter):
        exact, grad = self.grid.exact, parameter.grad
        if grad is not None:
            exact.add(self.main_grad(parameter), grad, exact.gradient, exact.terms(exact.positions))
        parameter.grad = None

    def is_in_parts(self, spec):
        # exact_experts.ExactRouter computes all positions on each tp rank.
        return super().is_in_parts(spec) and ".mlp.router." not in spec.name

    def sum_squares(self, counted, others):
        """`squares` has the high digits, `low_squares` what is left; `out_of_range` is 0, or inf if
        a term of a sum was too large."""
        exact = self.grid.exact
        squares = torch.stack([exact.squares(piece) for piece in counted + others])
        high, low = squares[:len(counted)].sum(0)
        return dict(squares=high, low_squares=low, all_squares=squares.sum(),
                    out_of_range=exact.checked(torch.zeros_like(high)))

    def grad_norm(self, total):
        _, skipped = super().grad_norm(total)
        in_range = self.grid.exact.in_range(total["squares"]) and total["out_of_range"] == 0
        if not skipped and not in_range:
            skipped = "too large for an exact sum (--exact)"
        return math.sqrt(total["squares"] + total["low_squares"]), skipped

    def update_shards(self, *arguments):
        for bucket in self.buckets:                             # one at a time: a copy less
            grad = bucket.shard["grad"].to(bucket.shard["master"].dtype)
            adamw_update([bucket], [grad], *arguments)
        self.sync_params()


def power_of_2(x: float) -> float:
    """The largest power of two that is not above x > 0."""
    return 2.0 ** (math.frexp(x)[1] - 1)
