"""--exact: attention and MLPs in strips. exact.py has the argument, and builds them (make_exact).

A strip of attention has some heads, a strip of an MLP some channels. All products have one strip's
shape, whatever tp is. Where there are more strips than heads of k and v, some strips share one, and
each computes a piece of it, as ranks do (shared_heads.py).
"""
import copy
from functools import partial

import torch
import torch.nn as nn

from parallel import (WithGradient, all_gather, by_ranks, by_sequences, gather_positions,
                      sum_over_ranks)
from parallelism.all_heads_norm import (ParallelAllHeadsNorm, sharing_of, sum_of_squares,
                                        widened)
from parallelism.exact_sums import ExactSums
from parallelism.kernels import linear, matmul
from parallelism.shared_heads import JoinHeads


def all_positions(x: torch.Tensor, grid) -> torch.Tensor:
    """With sequence parallelism (B, T / tp, ...) -> (B, T, ...), those of all tp ranks; else x."""
    return by_sequences(gather_positions(x, grid).wait(), grid)


def copy_to_strips(x: torch.Tensor, count: int, grid) -> torch.Tensor:
    """f: x for each of this rank's `count` strips. Backward sums the gradients of all strips."""
    def copy(x):
        return all_positions(x, grid).expand(count, -1, -1, -1)

    def add(dxs):
        return sum_strips(dxs, grid.exact.activation_gradient, grid)
    return WithGradient.apply(x, copy, add)


def sum_of_strips(ys: list, grid) -> torch.Tensor:
    """g: the sum of the y of all strips."""
    def add(ys):
        return sum_strips(ys, ExactSums.ACTIVATION, grid)

    def copy(dy):
        return all_positions(dy, grid).expand(len(ys), -1, -1, -1)
    return WithGradient.apply(torch.stack(ys), add, copy)


def sum_strips(terms, unit: float, grid) -> torch.Tensor:
    """The sum of this rank's terms (B, T, C) and those of the other tensor-parallel ranks."""
    total = torch.zeros_like(terms[0], dtype=torch.float64)
    for term in terms:
        grid.exact.add(total, term, unit, grid.exact.strips)
    return sum_over_ranks(by_ranks(total, grid), grid).wait().to(terms[0].dtype)


class StripProduct(torch.autograd.Function):
    """x W^T + b. W is a view, (1 or 3, w, in) or (out, 1, w), and is copied for each product: a
    kernel may also depend on strides and alignment."""

    @staticmethod
    def forward(ctx, x, weight, bias, exact):
        ctx.save_for_backward(x, weight, bias)
        ctx.exact = exact
        y = linear(x, copy_matrix(weight))
        return y if bias is None else y.add_(bias.flatten())

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        dx = matmul(dy, copy_matrix(weight))
        dw = matmul(dy.flatten(0, 1).t(), x.flatten(0, 1)).view(weight.shape)
        db = None
        if bias is not None:
            total = torch.zeros(bias.numel(), dtype=torch.float64, device=bias.device)
            ctx.exact.add_rows(total, dy, ctx.exact.gradient)
            db = total.to(bias.dtype).view(bias.shape)
        return dx, dw, db, None


def copy_matrix(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(0, -2).clone(memory_format=torch.contiguous_format)


class StripLinear(nn.Module):
    """A Linear with the weight and bias of one strip, views of this rank's part."""

    def __init__(self, exact: ExactSums):
        super().__init__()
        self.exact = exact

    def forward(self, x):
        return StripProduct.apply(x, self.weight, self.bias, self.exact)


class Affine(torch.autograd.Function):
    """x * weight + bias, (..., C) with (C,); either may be None. The gradients of weight and bias
    are added to main_grad."""

    @staticmethod
    def forward(ctx, x, weight, bias, exact):
        ctx.weight, ctx.bias, ctx.exact = weight, bias, exact
        if weight is None:
            return x + bias
        ctx.save_for_backward(x)
        y = x * weight
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy):
        unit = ctx.exact.gradient
        rows = 1                            # for each position
        if dy.dim() == 4:                   # a norm of heads: (B, heads of a strip, T, D)
            rows = dy.shape[1] * ctx.exact.strips
        if ctx.bias is not None:
            ctx.exact.add_rows(ctx.bias.main_grad(), dy, unit)
        if ctx.weight is None:
            return dy, None, None, None
        x, = ctx.saved_tensors
        ctx.exact.add_rows(ctx.weight.main_grad(), dy * x, unit, rows)
        return dy * ctx.weight, None, None, None


class InStrips:
    """The forward of attention or an MLP, `part`, in strips. `narrow` is model.py's own module,
    which runs with the weights of one strip after another; `names`: its Linear modules, the one
    before g last."""

    def __init__(self, part: nn.Module, narrow: nn.Module, names: tuple, grid):
        self.part, self.narrow, self.names, self.grid = part, narrow, names, grid
        for name in names:
            setattr(narrow, name, StripLinear(grid.exact))

    def __call__(self, x, *args):
        count = self.grid.exact.strips // self.grid.tp
        xs = copy_to_strips(x, count, self.grid)
        y = sum_of_strips(self.of_strips(xs, args), self.grid)
        bias = getattr(self.part, self.names[-1]).bias
        return y if bias is None else Affine.apply(y, None, bias, self.grid.exact)

    def of_strips(self, xs, args) -> list:
        """The y of each strip of this rank, by its x."""
        return [narrow(x, *args) for narrow, x in zip(self.strips(len(xs), self.names), xs)]

    def cut(self, name: str, count: int) -> list[tuple]:
        """[(weight, bias)] of the strips of this rank's part of a layer. All at once, because
        autograd then joins their gradients. Of single slices it would pad each with zeros, and
        add."""
        layer = getattr(self.part, name)
        strips = {"bias": [None] * count}
        for attribute, dim in layer.partition_dim.items():
            if getattr(layer, attribute) is not None:
                matrices = getattr(layer, attribute).unflatten(dim, (layer.stacked, count, -1))
                strips[attribute] = matrices.unbind(dim + 1)
        return list(zip(strips["weight"], strips["bias"]))

    def strips(self, count: int, names: tuple):
        """Yields `narrow` once for each strip, with this strip's weights of the layers `names`."""
        strips = {name: self.cut(name, count) for name in names}
        self.narrow.train(self.part.training)
        for number in range(count):
            for name in names:
                layer = getattr(self.narrow, name)
                layer.weight, layer.bias = strips[name][number]
            if hasattr(self.narrow, "core_attention"):
                # Each strip has a dropout mask. It has a module of its own, too: a CPU without
                # 16-bit products repeats attention in backward, and must draw the same mask.
                attention = copy.copy(self.narrow.core_attention)
                attention.part = self.grid.tp_rank * count + number
                self.narrow.core_attention = attention
            yield self.narrow


def sum_in_order(xs: torch.Tensor, grid) -> torch.Tensor:
    """xs (n, ...), an x for each of this rank's n strips -> n times the sum of the x of all strips.
    Each rank gathers all x and adds them in the order of the strips."""
    strips = xs.new_empty(grid.tp, *xs.shape)
    strips[grid.tp_rank] = xs
    return all_gather(strips, grid.groups["tp"]).wait().flatten(0, 1).sum(0).expand_as(xs)


def norm_of_strips(norm: ParallelAllHeadsNorm, qs: tuple) -> list:
    """The norm over all heads of the q, or k, of this rank's strips."""
    qs = [widened(q) for q in qs]
    pieces = norm.weight.chunk(len(qs))
    sharing = sharing_of(qs[0], pieces[0])
    weights = norm.whole_weights(sharing, pieces)
    squares = torch.stack([sum_of_squares(q) / sharing for q in qs])
    in_order = partial(sum_in_order, grid=norm.grid)        # all use the sum: its own gradient
    totals = WithGradient.apply(squares, in_order, in_order)
    return [norm.normalize(q, total, weight) for q, total, weight in zip(qs, totals, weights)]


class AttentionInStrips(InStrips):
    """Attention that needs the q, k and v of all strips first: its norms are over all heads, or
    `sharing` strips have one head of k and v, of which each computes a piece (shared_heads.py)."""

    def __init__(self, part: nn.Module, narrow: nn.Module, grid, sharing: int):
        names = ("qkv", "proj") if sharing == 1 else ("q", "kv", "proj")
        super().__init__(part, narrow, names, grid)
        self.sharing = sharing
        narrow.group //= sharing

    def cut(self, name, count):
        if name not in ("q", "kv"):
            return super().cut(name, count)
        layer = self.part.qkv
        biases = [None] * count if layer.bias is None else self.rows(name, layer.bias, count)
        return list(zip(self.rows(name, layer.weight, count), biases))

    def rows(self, name: str, x: torch.Tensor, count: int) -> list:
        """The rows of q, or of k and v, of each strip: views of this rank's weight or bias. This
        rank has some heads of k and v with their q, or a piece of one head."""
        heads = max(1, count // self.sharing)
        on_rank = count // heads                                # strips of one head
        x = x.unflatten(0, (heads, -1))
        of_kv = 2 * self.narrow.head_dim * on_rank // self.sharing
        q, kv = x.split([x.shape[1] - of_kv, of_kv], 1)
        strips_of_heads = (q if name == "q" else kv).unflatten(1, (on_rank, -1))
        return [strip for head in strips_of_heads for strip in head]

    def of_strips(self, xs, args):
        count = len(xs)
        if self.sharing == 1:
            qkvs = [narrow.qkv(x) for narrow, x in zip(self.strips(count, ("qkv",)), xs)]
        else:
            products = [(narrow.q(x), narrow.kv(x))
                        for narrow, x in zip(self.strips(count, ("q", "kv")), xs)]
            qs, pieces = zip(*products)
            heads = JoinHeads.apply(self.grid, self.sharing, *pieces)
            qkvs = [torch.cat(pair, -1) for pair in zip(qs, heads)]
        qs, ks, vs = zip(*map(self.narrow.split_heads, qkvs))
        q_norm, k_norm = (getattr(self.part, name, None) for name in ("q_norm", "k_norm"))
        if isinstance(q_norm, ParallelAllHeadsNorm):
            qs, ks = norm_of_strips(q_norm, qs), norm_of_strips(k_norm, ks)
        elif q_norm is not None:
            qs, ks = map(q_norm, qs), map(k_norm, ks)
        return [narrow.attend(q, k, v, *args)
                for narrow, q, k, v in zip(self.strips(count, ("proj",)), qs, ks, vs)]
