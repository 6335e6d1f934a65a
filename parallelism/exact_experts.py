"""--exact for mixtures of experts (parallelism/exact.py says what it claims, and why it holds).

    operation               its sums are over                                   exact in
    experts                 forward (g): strips of their hidden channels.       ExactExperts
                            backward (f), of x and of the weights: the same
    their matrices          backward: microbatches, and with --ep also those    ExpertProduct
                            of the ranks whose tokens they compute
    router                  backward: one product for each microbatch           ExactRouter

The rows of an expert's product are the tokens of one microbatch that chose the expert, in their
order. With --ep a rank computes the tokens of each rank by themselves. So products have the same
shapes as without --ep. The rows of a router's product are all tokens of a microbatch, with sequence
parallelism too. A router compares numbers that have the same bits, and so chooses the same experts.
"""
from functools import partial

import torch
import torch.nn as nn

from models.moe import Experts, Router
from parallel import WithGradient, cut_positions
from parallelism.exact_strips import all_positions, copy_matrix, copy_to_strips, sum_of_strips
from parallelism.experts import ExpertColumns, ExpertRows, ParallelExperts, ParallelRouter
from parallelism.kernels import linear, matmul


class ExactRouter(ParallelRouter):
    """ParallelRouter, but with sequence parallelism each tp rank computes all positions and returns
    its own. So products have the shapes that they have without."""

    def __init__(self, plain: Router, grid):
        super().__init__(plain, grid)
        self.has_own_positions = False

    def forward(self, x):
        if not self.grid.sequence_parallel:
            return super().forward(x)
        gather = partial(all_positions, grid=self.grid)
        cut = partial(cut_positions, grid=self.grid)    # all ranks have the same gradient of all
        weights, chosen = super().forward(WithGradient.apply(x, gather, cut))
        return WithGradient.apply(weights, cut, gather), cut(chosen)

    def add_losses(self, losses):
        exact = self.grid.exact
        exact.add(self.loss_sum, losses, exact.LOSS, exact.terms(exact.positions))


class ExpertProduct(torch.autograd.Function):
    """x (n, in) by one strip of an expert's matrix -> (n, out). The gradient of the strip, of one
    microbatch, is added to main_grad."""

    @staticmethod
    def forward(ctx, x, weight, layer, expert, strip):
        ctx.save_for_backward(x)
        ctx.layer, ctx.place = layer, (expert, strip)
        return linear(x, copy_matrix(layer.strip_of(weight, *ctx.place)))

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        layer, exact = ctx.layer, ctx.layer.grid.exact
        strip = layer.strip_of(layer.weight, *ctx.place)
        dx = matmul(dy, copy_matrix(strip))
        dw = matmul(dy.t(), x).view(strip.shape)
        total = layer.strip_of(layer.weight.main_grad(), *ctx.place)
        exact.add(total, dw, exact.gradient, exact.terms(exact.positions))
        return dx, None, None, None, None


class OneStrip:
    """A layer of experts. It multiplies by strip number `strip` of each expert's matrix."""

    def forward(self, x, counts, strip: int):
        products = [ExpertProduct.apply(rows.contiguous(), self.weight, self, expert, strip)
                    for expert, rows in enumerate(x.split(counts.tolist()))]
        return torch.cat(products)

    def strip_of(self, weight, expert, strip):
        """A view: (2, w, C) of up (E, 2 F, C), (C, 1, w) of down (E, C, F)."""
        dim = self.partition_dim["weight"] - 1
        count = self.grid.exact.strips // self.grid.tp
        return weight[expert].unflatten(dim, (self.stacked, count, -1)).select(dim + 1, strip)


class ExactColumns(OneStrip, ExpertColumns):
    pass


class ExactRows(OneStrip, ExpertRows):
    pass


class ExactExperts(ParallelExperts):
    """ParallelExperts, one strip after another."""

    def forward(self, x, weights, chosen):
        grid = self.grid
        count = grid.exact.strips // grid.tp
        chosen = all_positions(chosen, grid)
        xs = copy_to_strips(x, count, grid)
        weights_of_strips = copy_to_strips(weights, count, grid)
        ys = [StripOfExperts(self, strip)(xs[strip], weights_of_strips[strip], chosen)
              for strip in range(count)]
        return sum_of_strips(ys, grid)


class StripOfExperts(ParallelExperts):
    """The experts of `whole`, of whose matrices it uses one strip. It has no parameters."""

    def __init__(self, whole: ExactExperts, strip: int):
        nn.Module.__init__(self)
        self.n_expert, self.activation, self.grid = whole.n_expert, whole.activation, whole.grid
        self.up, self.down = partial(whole.up, strip=strip), partial(whole.down, strip=strip)

    def forward(self, x, weights, chosen):
        return Experts.forward(self, x, weights, chosen)

    def run_blocks(self, rows, blocks):
        """The rows of each rank by themselves, as without --ep."""
        ys = [self.mlp(rows_of_rank, counts)
              for rows_of_rank, counts in zip(rows.split(blocks.sum(1).tolist()), blocks)]
        return torch.cat(ys)


EXACT_EXPERT_PLAN = {       # instead of those of experts.expert_parallel
    "mlp.router": ExactRouter,
    "mlp.experts": ExactExperts,
    "mlp.experts.up": ExactColumns,
    "mlp.experts.down": ExactRows,
}
