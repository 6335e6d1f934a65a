"""The token matrix, faster: the loss in tiles, and gradients that add up in place.

`TiledHead` replaces the `loss` of parallel.VocabParallelHead, which computes the same, and
`InPlaceEmbedding` the `lookup` of parallel.VocabParallelEmbedding. The differences:

    difference                               gain                      where
    the loss works in tiles of positions     logits of one tile        TiledCrossEntropy
    its forward computes its gradients       logits computed once      TiledCrossEntropy
    the token matrix's gradients add up      20 to 30% of a step       LookupToMainGrad,
      in place, in fp32                      (50304 tokens)            add_product

Shapes: B sequences, T positions, C channels, V vocabulary.
"""
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import parallel
from model import GPT, IGNORE_INDEX, ceil_div
from parallel import all_reduce, by_ranks, find_local, gather_positions, sum_over_ranks
from parallelism.kernels import matmul, multiplies_in_fp32


class InPlaceEmbedding(parallel.VocabParallelEmbedding):
    def lookup(self, rows):
        if hasattr(self.weight, "main_grad"):
            return LookupToMainGrad.apply(rows, self.weight)
        return super().lookup(rows)


class LookupToMainGrad(torch.autograd.Function):
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
    columns, is_local = find_local(targets.unsqueeze(1), first, logits.shape[1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    largest = logits.amax(1, keepdim=True).to(wide)
    z = logits.gather(1, columns).to(wide)
    total = shifted_exp(logits, largest, p).sum(1, keepdim=True)
    return TileSums(largest, total, is_local, columns, z)


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
                out: torch.Tensor | None = None) -> torch.Tensor:
    """The logits (n, V / tp) of x (n, C), written to `out`. Columns after the first `tokens` are
    padding: they get the smallest number. -inf would give NaN where a rank has nothing else."""
    logits = matmul(x, weight.t(), out=out)
    if bias is not None:
        logits += bias
    logits[:, max(tokens, 0):] = torch.finfo(logits.dtype).min
    return logits


class TiledCrossEntropy(torch.autograd.Function):
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


class TiledHead(parallel.VocabParallelHead):
    """parallel.VocabParallelHead. If you change the loss, change it there and in model.Head too.
    Forward computes the gradients of loss * loss_factor, so `set_loss_factor` comes before it, and
    backward() begins from this product. `norms`: sum over positions of |x| since then, for logs."""
    cross_entropy = TiledCrossEntropy

    def __init__(self, head: nn.Module, grid):
        super().__init__(head, grid)
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
        return self.loss(x, targets)

    def loss(self, x, targets):
        loss_factor = self.loss_factor if torch.is_grad_enabled() else None
        return self.cross_entropy.apply(x, self.weight, self.bias, targets, self.grid, loss_factor,
                                        self)


def add_in_place(model: GPT, grid) -> None:
    """Replace what parallel.tensor_parallel has made of the token matrix."""
    parallel.replace_modules(model, {"embed.token": InPlaceEmbedding, "head": TiledHead}, grid)
