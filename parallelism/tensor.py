"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3), as train.py runs it.

The plain forms in parallel.py compute the same, with sequence parallelism too. The differences:

    difference                               gain                      where
    a rank never builds a whole parameter    memory / tp               parameters.py
    sequence parallelism, with fewer         activations / tp from g   sequence.py
      copies than its plain form             to f
    f is fused with the next product         sum of dx runs during dW  _ColumnParallel
    the loss works in tiles of positions     logits of one tile        VocabParallelCrossEntropy
    its forward computes its gradients       logits computed once      VocabParallelCrossEntropy
    the token matrix's gradients add up      20 to 30% of a step       _LookupToMainGrad,
      in place, in fp32                      (50304 tokens)            add_product

Shapes: B sequences, T positions, C channels, H heads, V vocabulary.
"""
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from model import IGNORE_INDEX, ceil_div
from parallelism.collectives import all_reduce
from parallelism.kernels import linear, lookup, multiplies_in_fp32, upcast_for_matmul
from parallelism.sequence import (by_ranks, by_sequences, cut_positions, gather_positions,
                                  sum_over_ranks)


class _Reduce(torch.autograd.Function):
    """g: the sum overwrites x to save a copy of (B, T, C)."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        total = sum_over_ranks(x.detach(), grid).wait()
        if grid.sequence_parallel:              # the result is a part of x
            return total
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return gather_positions(dy, ctx.grid).wait(), None


def reduce(x: torch.Tensor, grid) -> torch.Tensor:
    """g, (B, T, C) -> (B, T, C), with sequence parallelism (B, T / tp, C)."""
    return _Reduce.apply(x, grid)


class _ColumnParallel(torch.autograd.Function):
    """y = f(x) W^T + b. Backward computes dx, starts its sum, computes dW and only then waits. With
    sequence parallelism it gathers x again, because saving f(x) would take tp times the memory."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return linear(gather_positions(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        # With ZB-H1 the weight is detached: see `TensorParallel.multiply`.
        gathering = gather_positions(x, ctx.grid) if ctx.needs_input_grad[1] else None
        dx = sum_over_ranks(matmul(dy, weight), ctx.grid)       # overlaps with the all-gather of x
        dy = dy.flatten(0, 1)                                   # (B T, out / tp)
        dw = None if gathering is None else matmul(dy.t(), gathering.wait().flatten(0, 1))
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx.wait(), dw, db, None


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b. A CPU without 16-bit products multiplies in fp32, which is 4 to 27 times as fast."""
    return upcast_for_matmul(torch.matmul, a, b, out=out)


class TensorParallel(nn.Module):
    """Takes over a plain module's parameters. `partition_dim` says in which dimension they are cut
    (those it does not name are whole), `stacked` how many matrices are stacked there."""
    partition_dim = {}
    postponed = None      # the pipeline schedule ZB-H1 keeps the factors of `multiply` here

    def __init__(self, plain: nn.Module, grid):
        super().__init__()
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        self.stacked = getattr(plain, "stacked", 1)
        self.grid = grid

    def multiply(self, function: Callable, x: torch.Tensor, *args) -> torch.Tensor:
        """function(x, weight, *args). With ZB-H1 backward does not compute the weight's gradient:
        it stores the factors (module, dy, x) in `postponed[-1]`, and the op W multiplies them."""
        if self.postponed is None:
            return function(x, self.weight, *args)
        y = function(x, self.weight.detach(), *args)

        def keep_factors(dy):           # what a hook returned would replace dy
            self.postponed[-1].append((self, dy, x.detach()))
        y.register_hook(keep_factors)
        return y

    def weight_grad(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The op W: the gradient of the weight by the factors that `multiply` kept."""
        if len(x) < len(dy):        # with sequence parallelism x has this rank's positions alone
            x = gather_positions(x, self.grid).wait()
        return matmul(dy.flatten(0, 1).t(), x.flatten(0, 1))


class ColumnParallelLinear(TensorParallel):
    """(B, T, in), equal on all ranks -> (B, T, out / tp), this rank's columns. With sequence
    parallelism (B, T / tp, in) -> (tp B, T / tp, out / tp), by ranks."""
    partition_dim = {"weight": 0, "bias": 0}

    def forward(self, x):
        if self.grid.tp == 1:
            return self.multiply(linear, x, self.bias)
        return self.multiply(_ColumnParallel.apply, x, self.bias, self.grid)


class QKVParallelLinear(ColumnParallelLinear):
    """Its columns are cut by heads: those of q, k and v, which are stacked, each on its own, or in
    groups (models/llama.py)."""

    def forward(self, x):
        return by_sequences(super().forward(x), self.grid)


class RowParallelLinear(TensorParallel):
    """(B, T, in / tp), this rank's rows -> (B, T, out), equal on all ranks. With sequence
    parallelism (tp B, T / tp, in / tp), by ranks -> (B, T / tp, out). The bias, equal on all
    ranks, is added after the sum; before it, it would count tp times."""
    partition_dim = {"weight": 1}

    def forward(self, x):
        if self.grid.tp == 1:
            return self.multiply(linear, x, self.bias)
        y = reduce(self.multiply(linear, x), self.grid)
        return y if self.bias is None else y + self.bias


class AttentionOutput(RowParallelLinear):
    """Its input is always by sequences. By ranks, backward would keep it twice."""

    def multiply(self, *args):
        return by_ranks(super().multiply(*args), self.grid)


class PositionEmbedding(TensorParallel):
    """positions 0, 1, ... n - 1, counted from where this rank's slice starts -> (n, C). Those of
    packed texts are given for all ranks, (B, T) -> (B, n, C)."""

    def forward(self, positions):
        if positions.dim() == 2:
            return lookup(self.cut_packed(positions), self.weight)
        first = self.grid.tp_rank * len(positions) if self.grid.sequence_parallel else 0
        return self.lookup(positions + first)

    def cut_packed(self, positions):
        """The positions of packed texts, (B, T) -> this rank's part of them, (B, n)."""
        return cut_positions(positions, self.grid)

    def lookup(self, positions):
        return F.embedding(positions, self.weight)


class VocabParallelEmbedding(TensorParallel):
    """tokens (B, T) -> (B, T, C). Tokens outside this rank's rows give a zero vector; g sums over
    the ranks."""
    partition_dim = {"weight": 0}

    def forward(self, tokens):
        if self.grid.tp == 1:
            return self.lookup(tokens)
        rows = by_ranks(tokens, self.grid) - self.grid.tp_rank * len(self.weight)
        is_local = (rows >= 0) & (rows < len(self.weight))
        x = self.lookup(rows.where(is_local, 0))                        # (B, T, C)
        x = reduce(x * is_local.unsqueeze(-1), self.grid)
        # x may be a slice of all positions. A Llama, which adds nothing to x, would keep them.
        return x.clone() if self.grid.sequence_parallel else x

    def lookup(self, rows):
        if hasattr(self.weight, "main_grad"):
            return _LookupToMainGrad.apply(rows, self.weight)
        return lookup(rows, self.weight)


class _LookupToMainGrad(torch.autograd.Function):
    """F.embedding, whose gradient is added to the rows of `main_grad` that were looked up.

    zero.FlatParameters gives each weight a method `main_grad`, which returns the tensor that
    collects its gradient, in fp32 (as in Megatron-LM). The embedding, which reads few rows, and the
    head, which works in tiles, add their gradients there, and autograd gets None: with 50304
    tokens a step takes 0.80 of the time (0.70 in bf16). Other matrices gain nothing."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows)
        ctx.weight = weight
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx, dx):
        grad = ctx.weight.main_grad()
        grad.index_add_(0, ctx.saved_tensors[0].flatten(), dx.flatten(0, 1).to(grad.dtype))
        return None, None


def add_product(grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """grad (out, in) += dy^T x, for dy (N, out) and x (N, in)."""
    if multiplies_in_fp32(x.dtype, x.device):
        dy, x = dy.float(), x.float()           # so the product is not rounded to 16 bits
    if grad.dtype == x.dtype:
        grad.addmm_(dy.t(), x)
    elif grad.device.type == "cuda":            # adds 16-bit products to fp32
        torch.addmm(grad, dy.t(), x, out_dtype=grad.dtype, out=grad)
    else:                                       # in parts that fit the cache
        for rows, columns in zip(grad.split(2048), dy.split(2048, dim=1)):
            rows += matmul(columns.t(), x)


class TileSums(NamedTuple):
    """What a rank knows of the loss of n positions, each (n, 1)."""
    largest: torch.Tensor       # of its logits
    total: torch.Tensor         # sum of exp(logit - largest)
    is_local: torch.Tensor      # whether the target is one of its columns
    columns: torch.Tensor       # the target's column, 0 if it is not local
    z: torch.Tensor             # the logit in that column


def tile_sums(logits: torch.Tensor, p: torch.Tensor | None, targets: torch.Tensor,
              first: int) -> TileSums:
    """What this rank's logits say of the loss of n positions.

    logits      (n, V / tp): this rank's columns
    p           (n, V / tp) in fp32 or fp64: exp(logits - largest) is left there for `tile_loss`. It
                may be the logits' own memory. None: `tile_loss` computes it again
    targets     (n,) tokens of the whole vocabulary; IGNORE_INDEX adds nothing to the loss
    first       the token of column 0"""
    columns, is_local = local_columns((targets - first).unsqueeze(1), logits)
    wide = torch.promote_types(logits.dtype, torch.float32)
    largest = logits.amax(1, keepdim=True).to(wide)
    z = logits.gather(1, columns).to(wide)
    total = shifted_exp(logits, largest, p).sum(1, keepdim=True)
    return TileSums(largest, total, is_local, columns, z)


def local_columns(columns: torch.Tensor, logits: torch.Tensor) -> tuple:
    """(the columns (n, 1) that `logits` has, 0 for the others; whether it has them)."""
    is_local = (columns >= 0) & (columns < logits.shape[1])
    return columns.where(is_local, 0), is_local


def shifted_exp(logits: torch.Tensor, largest: torch.Tensor,
                out: torch.Tensor | None) -> torch.Tensor:
    """exp(logits - largest) in the type of `largest`: it cannot overflow."""
    if out is not None and out.device.type == "cpu":    # sub of two types converts in memory
        return out.copy_(logits).sub_(largest).exp_()
    return torch.sub(logits, largest, out=out).exp_()


def softmax_over_ranks(sums: TileSums, group) -> tuple:
    """Combine what all ranks know. Returns the largest logit of all ranks, and relative to it the
    sum of exponentials and the target's logit, each (n, 1)."""
    if group is None:
        return sums.largest, sums.total, sums.z - sums.largest
    largest = all_reduce(sums.largest.clone(), group, dist.ReduceOp.MAX).wait()
    total = sums.total * (sums.largest - largest).exp()
    target = (sums.z - largest).where(sums.is_local, 0)
    return largest, *all_reduce(torch.stack([total, target]), group).wait()


def tile_loss(logits: torch.Tensor, p: torch.Tensor | None, targets: torch.Tensor, sums: TileSums,
              global_sums: tuple, loss_factor: torch.Tensor | None) -> tuple:
    """The summed cross-entropy of n positions in nats, the same on all ranks. `logits`, `p` and
    `targets` are those given to `tile_sums`, `sums` is its result, `global_sums` that of
    `softmax_over_ranks`.

        loss = log sum_v exp(z_v) - z_target        gradient = softmax(z), less 1 at the target

    If `loss_factor` is given, the gradient of loss * loss_factor overwrites the logits, except in
    the columns of the targets. Returns the loss and the gradients for these columns, (n, 1), or
    None. Written here, a compiled kernel would have to write all of p to memory first."""
    largest, total, target = global_sums
    counted = (targets != IGNORE_INDEX).unsqueeze(1)
    loss = (total.log() - target).where(counted, 0).sum()
    if loss_factor is None:
        return loss, None
    weight = counted * loss_factor                      # of each position in the loss
    factor = (sums.largest - largest).exp() * weight / total
    if p is None:
        p = shifted_exp(logits, sums.largest, None)
    if p.device.type == "cpu":
        logits.copy_(p.mul_(factor))
    else:
        torch.mul(p, factor, out=logits)
    return loss, ((sums.z - largest).exp() / total - sums.is_local.to(p.dtype)) * weight


# Upper limit on the logits of a tile. That of the CPU is measured: its cache holds them. Without p
# a logit in 16 bits takes 2 bytes, not 6. So a tile of twice the size needs less memory, and the
# fp32 gradient of the token matrix is read and written half as often.
MAX_LOGITS = {"cpu": 2 ** 24, "gpu": 2 ** 28, "gpu, without p": 2 ** 29}


def tile_size(positions: int, vocab: int, device_type: str, without_p: bool = False) -> int:
    """Number of positions whose logits, of `vocab` tokens each, exist at once. `without_p`: no p in
    fp32 is kept beside logits in 16 bits."""
    limit = MAX_LOGITS["cpu"]
    if device_type != "cpu":
        limit = MAX_LOGITS["gpu, without p" if without_p else "gpu"]
    tiles = ceil_div(positions, max(1, limit // vocab))
    return ceil_div(positions, tiles)           # all of about equal size


def tile_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int,
                out: torch.Tensor) -> torch.Tensor:
    """The logits (n, V / tp) of x (n, C), written to `out`. Columns after the first `tokens` are
    padding: they get the smallest number. -inf would give NaN where a rank has nothing else."""
    logits = matmul(x, weight.t(), out=out)
    if bias is not None:
        logits += bias
    logits[:, max(tokens, 0):] = torch.finfo(logits.dtype).min
    return logits


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy in nats of the logits f(x) W^T: x (B, T, C), with sequence
    parallelism (B, T / tp, C), targets (B, T), W (V / tp, C) this rank's rows. Forward computes
    the logits of one tile of positions at a time. With these it also computes the gradients, those
    of loss * loss_factor (None: no gradients). Backward returns them."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets, grid, loss_factor, head):
        x = gather_positions(x, grid).wait()
        shape = x.shape
        x, targets = x.flatten(0, 1), by_ranks(targets, grid).flatten()     # (N, C), (N,)
        in_main_grad = hasattr(weight, "main_grad")
        wide = torch.promote_types(x.dtype, torch.float32)
        if loss_factor is not None:
            # A tensor, because a compiler takes a number for a constant.
            loss_factor = x.new_full((), loss_factor, dtype=wide)
            dx = torch.empty_like(x)
            dw = weight.main_grad() if in_main_grad else torch.zeros_like(weight, dtype=wide)
            db = None if bias is None else torch.zeros_like(bias, dtype=wide)
        loss = 0.0
        without_p = head.is_compiled and wide != x.dtype
        size = tile_size(len(x), len(weight), x.device.type, without_p)
        memory = x.new_empty(size, len(weight))                 # of one tile after another
        p = None        # Compiled, p is computed twice: that is faster than to write it to memory.
        if not head.is_compiled:
            p = memory if wide == x.dtype else torch.empty_like(memory, dtype=wide)
        first = grid.tp_rank * len(weight)                      # this rank's first token
        for start in range(0, len(x), size):
            tile = slice(start, start + size)
            n = len(x[tile])
            tile_p = None if p is None else p[:n]
            logits = tile_logits(x[tile], weight, bias, head.vocab_size - first, memory[:n])
            sums = head.tile_sums(logits, tile_p, targets[tile], first)
            global_sums = softmax_over_ranks(sums, grid.groups["tp"])
            part_of_loss, target_grads = head.tile_loss(logits, tile_p, targets[tile], sums,
                                                        global_sums, loss_factor)
            loss += part_of_loss
            if loss_factor is not None:
                dz = logits.scatter_(1, sums.columns, target_grads.to(logits.dtype))
                matmul(dz, weight, out=dx[tile])
                add_product(dw, dz, x[tile])
                if bias is not None:
                    db += dz.sum(0, dtype=wide)

        if loss_factor is not None:
            dx = sum_over_ranks(dx.view(shape), grid).wait()
            if grid.sequence_parallel:
                dx = dx.clone()             # a slice would keep the memory of all positions
            ctx.save_for_backward(dx, None if in_main_grad else dw.to(weight.dtype),
                                  None if bias is None else db.to(bias.dtype), loss_factor)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dx, dw, db, loss_factor = ctx.saved_tensors     # the gradients for dloss = loss_factor
        if dw is not None:
            dx = dx * (dloss / loss_factor)
            dw = dw * (dloss / loss_factor)
            db = None if db is None else db * (dloss / loss_factor)
        elif dloss.device.type == "cpu" and dloss != loss_factor:   # a GPU would synchronize
            raise RuntimeError(f"the gradient of the loss is {dloss:g}, but the token matrix's "
                               f"gradient has been added to main_grad for {loss_factor:g}: "
                               f"multiply the loss by head.loss_factor before backward()")
        return dx, dw, db, None, None, None, None


class VocabParallelHead(TensorParallel):
    """x (B, T, C), with sequence parallelism (B, T / tp, C), and targets (B, T) -> the summed loss
    of model.Head, the same on every rank. If you change the loss, change model.Head too. Forward
    computes the gradients of loss * loss_factor, so `set_loss_factor` comes before it, and
    backward() begins from this product. `norms`: sum over positions of |x| since then, for logs."""
    partition_dim = {"weight": 0, "bias": 0}

    def __init__(self, head: nn.Module, grid):
        super().__init__(head, grid)
        self.norm = head.norm
        self.vocab_size = head.vocab_size
        self.tile_sums, self.tile_loss = tile_sums, tile_loss
        self.is_compiled = False        # whether these two are
        self.set_loss_factor(1.0)

    def set_loss_factor(self, loss_factor: float) -> None:
        self.loss_factor = loss_factor
        self.norms = 0.0

    def normalize(self, x):
        """LayerNorm of x, and the sum over all positions of |x|."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.norm(x), torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).sum()

    def forward(self, x, targets):
        x, norms = self.normalize(x)
        self.norms += norms
        return self.loss(x, targets, self.loss_factor if torch.is_grad_enabled() else None)

    def loss(self, x, targets, loss_factor):
        return VocabParallelCrossEntropy.apply(x, self.weight, self.bias, targets, self.grid,
                                               loss_factor, self)


TP_PLAN = {         # which module of model.py becomes what (build_stage)
    "attn.qkv": QKVParallelLinear,
    "attn.proj": AttentionOutput,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
    "mlp.shared.up": ColumnParallelLinear,          # of a mixture of experts
    "mlp.shared.down": RowParallelLinear,
    "embed.token": VocabParallelEmbedding,
    "embed.position": PositionEmbedding,
    "head": VocabParallelHead,
}
