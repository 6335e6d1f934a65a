"""Mixtures of experts (models/moe.py) as train.py runs them. Section 6 of parallel.py has the
exchange of tokens between the ranks of --ep. In it a token has a row for each of the K experts that
it chose. If no token chose the experts of a rank, this rank takes part with no rows, and the
gradients of its experts are zero.

Tensor parallelism cuts each expert as it cuts an MLP, with parallel.py's f and g: f copies its
input to the tp ranks and sums the gradients in backward, g sums the outputs. Each tp rank has some
hidden channels of the rank's experts:

    f(x) -> up, activation and down of its hidden channels -> times f(weights), sum over K -> g -> y

The router is whole on every tp rank. All use the choice of the first, which sends its N K numbers.

With --ep each tp rank sends all rows, so --tp multiplies the bytes of the all-to-alls. What differs
from models/moe.py and section 6:

    difference                               gain                           where
    a rank has E / ep experts                memory / ep                    ParamSpec.cut
    routers of every stage add the           no loss travels through the    _AddLosses
      gradients of their losses              pipeline
    only counts of tokens are summed over    the balancing loss of whole    ParallelRouter.share
      cp, and with sequence parallelism tp   sequences sends B E integers
    the router's parameters are in the       16 bits do not choose other    Bucket.is_wide
      type of the masters                    experts
    a router's bias moves by the sign of     no state, and no message of    count_in,
      counts that add up as a gradient       its own                        adamw_update

Shapes: B sequences, T positions, C channels, E experts, K of them active for a token, F hidden
channels of an expert.
"""
from functools import partial

import torch
import torch.nn as nn

from model import GPT
from models.moe import Experts, Router
from parallel import (TensorParallel, all_reduce, cut_positions, cut_sequence, f, g,
                      gather_positions, replace_modules, run_on_their_ranks)
from parallelism.collectives import sum_dtype
from parallelism.kernels import expert_linear

# ---- Router ---------------------------------------------------------------------------------


class _AddLosses(torch.autograd.Function):
    """Returns x. Backward gives `losses` () the gradient `factor`, as if the loss of the last
    stage contained them times `factor`."""

    @staticmethod
    def forward(ctx, x, losses, factor):
        ctx.gradient = losses.new_full((), factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.gradient, None


class _InBackward(torch.autograd.Function):
    """Returns x. Backward calls `action`: once for each microbatch, while recomputation repeats
    forward. The router's `bias` is an input so that autograd calls its hook. Its gradient is
    None, because `action` has added it."""

    @staticmethod
    def forward(ctx, x, bias, action):
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.action()
        return dx, None, None


class ParallelRouter(Router):
    """The router of this rank's positions. `set_token_factor` begins a step: it says by what the
    losses, which are sums over tokens, are multiplied. From then on these add up, of all backwards:

        load            (E,) how many of this rank's tokens chose each expert
        loss_sum        the losses of the router, summed over this rank's tokens
    """
    partition_dim = {}
    losses = None           # MoE.forward adds none: `_AddLosses` does

    def __init__(self, plain: Router, grid):
        nn.Module.__init__(self)
        self.cfg, self.grid = plain.cfg, grid
        self.weight, self.bias = plain.weight, plain.bias
        self.has_own_positions = grid.sequence_parallel     # else the same as all tp ranks
        self.set_token_factor(1.0)

    def set_token_factor(self, token_factor: float) -> None:
        self.token_factor = token_factor
        device = self.weight.device
        self.load = torch.zeros(self.cfg.n_expert, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), dtype=sum_dtype(device), device=device)

    def forward(self, x):
        logits, scores, weights, chosen = self.choose(x)
        if not torch.is_grad_enabled():
            return weights, chosen
        rank_counts = self.count(chosen)
        counts, positions = self.share(rank_counts, x.shape[1])
        losses = self.sum_losses(logits, scores, counts, positions)
        weights = _AddLosses.apply(weights, losses, self.token_factor)
        count_in = partial(self.count_in, rank_counts.sum(0), losses.detach())
        return _InBackward.apply(weights, self.bias, count_in), chosen

    def largest(self, ranked):
        """On all tp ranks what tp rank 0 chooses. On GPUs their routers may differ in the last
        bits, and one other choice would break the all-to-all."""
        chosen = super().largest(ranked)
        if self.grid.tp == 1 or self.has_own_positions:
            return chosen
        if self.grid.tp_rank > 0:
            chosen.zero_()
        return all_reduce(chosen, self.grid.groups["tp"]).wait()

    def own_text(self):
        text = cut_sequence(self.is_text, self.grid.cp_rank, self.grid.cp)
        return cut_positions(text, self.grid) if self.has_own_positions else text

    def share(self, counts, positions):
        """The counts of whole sequences, summed over their ranks, and their length."""
        kinds = ["cp"]
        if self.has_own_positions:
            kinds.append("tp")
        for kind in kinds:
            counts = all_reduce(counts.clone(), self.grid.groups[kind]).wait()
            positions *= getattr(self.grid, kind)
        return counts, positions

    def count_in(self, counts, losses) -> None:
        """Of one microbatch, the counts (E,) of this rank's tokens, and their losses."""
        self.load += counts
        self.add_losses(losses)
        if self.bias is not None:
            # The gradient is above 0 where more tokens than the mean chose the expert. (fp32 has
            # whole numbers to 2^24. Above, rounding may change the sign of a small excess.)
            grad = self.bias.main_grad()
            grad += (self.cfg.n_expert * counts - counts.sum()).to(grad.dtype)

    def add_losses(self, losses) -> None:
        self.loss_sum += losses


# ---- Experts --------------------------------------------------------------------------------


class ParallelExpertLinear(TensorParallel):
    """moe.ExpertLinear of this rank's experts."""
    is_expert = True

    def forward(self, x, counts):
        return expert_linear(x, self.weight, counts)


class ExpertColumns(ParallelExpertLinear):
    partition_dim = {"weight": 1}


class ExpertRows(ParallelExpertLinear):
    partition_dim = {"weight": 2}


class _Permute(torch.autograd.Function):
    """rows[order]. Backward permutes by the inverse. Autograd's backward of an index must expect
    that a row is taken twice: it sorts the indices, and adds."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, dy):
        inverse, = ctx.saved_tensors
        return dy[inverse], None, None


class ParallelExperts(Experts):
    """This rank's part of the experts: E / ep of them, and of each its F / tp hidden channels."""

    def __init__(self, plain: Experts, grid):
        nn.Module.__init__(self)
        self.n_expert, self.activation = plain.n_expert, plain.activation
        self.up, self.down = plain.up, plain.down
        self.grid = grid

    def forward(self, x, weights, chosen):
        grid = self.grid
        if grid.tp == 1:
            return super().forward(x, weights, chosen)
        x, weights = f(x, grid), f(weights, grid)
        y = super().forward(x, weights, gather_positions(chosen, grid).wait())
        return g(y, grid)

    def permute(self, rows, order, inverse):
        return _Permute.apply(rows, order, inverse)

    def run(self, x, counts):
        """x (n, C), sorted by expert, the same on all tp ranks -> this rank's term of the sum."""
        if self.grid.ep == 1:
            return super().run(x, counts)
        return run_on_their_ranks(self, self.grid, x, counts)

    def run_blocks(self, rows, blocks):
        """What the experts compute for rows (n, C) that are in blocks, each sorted by expert.
        blocks (number, E / ep) says how many rows of each expert a block has."""
        # Each expert multiplies all its rows at once. With output_size the host waits for no GPU.
        expert = torch.arange(blocks.shape[1], device=rows.device).repeat(len(blocks))
        expert = expert.repeat_interleave(blocks.flatten(), output_size=len(rows))  # of each row
        order = expert.argsort(stable=True)
        back = order.argsort()                                      # the inverse permutation
        y = self.mlp(self.permute(rows, order, back), blocks.sum(0))
        return self.permute(y, back, order)


def expert_parallel(model: GPT, grid) -> None:
    """Replace the modules of models/moe.py, if the model is a mixture of experts."""
    replace_modules(model, {"mlp.router": ParallelRouter, "mlp.experts": ParallelExperts,
                            "mlp.experts.up": ExpertColumns, "mlp.experts.down": ExpertRows}, grid)
