"""Many ranks, one GPT, in five sections, each built on the one before.

    1. Ranks                    who they are, how they meet, talk and fail together
    2. Tensor parallelism       one matrix product on several ranks; sequence parallelism
    3. Pipeline parallelism     one model's layers on several ranks
    4. Data parallelism, ZeRO   one batch on several replicas, which share the memory
    5. What a layout costs      memory, traffic, time and failures, before anything runs

The invariant of the first four: the same seed and the same global batch give the same loss,
gradients and gradient norm as one process, up to the order of additions. Size 1 in a dimension
needs no second implementation: collectives over one rank are no-ops.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.

    python parallel.py --pp 4 --microbatches 8      # draw a pipeline, count bubble and memory
"""
import argparse
import json
import math
import operator
import os
import re
import signal
import sys
import time
import uuid
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import accumulate, groupby, product
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.adamw import adamw     # the function: the class imports a compiler, for seconds
from torch.utils.checkpoint import checkpoint

from model import (DEVICES, GPT, IGNORE_INDEX, Device, GPTConfig, chinchilla_loss, compute_optimal,
                   flops_per_token, initial_value, linear, parameter_count,
                   upcast_for_matmul)

# ---------------------------------------------------------------------------------------------
# 1. Ranks
#
# Ranks stand in an array [dp, pp, tp], the last dimension fastest. With dp 2, pp 2, tp 2:
#
#                     stage 0     stage 1
#       replica 0     0   1       2   3          tensor parallel    (0 1) (2 3) (4 5) (6 7)
#       replica 1     4   5       6   7          pipelines          (0 2) (1 3) (4 6) (5 7)
#                                                data parallel      (0 4) (1 5) (2 6) (3 7)
#
# Tensor parallelism communicates most (four times a block) and gets adjacent ranks, which share a
# machine; data parallelism reduces gradients once a step (ZeRO 2 and 3: once a microbatch) and may
# cross the network (Megatron-LM, Narayanan et al. 2021, section 3).
# ---------------------------------------------------------------------------------------------


class Grid:
    """Sizes, this rank's coordinates and its process groups; a group of one rank is None. With
    `sequence_parallel` a rank holds T / tp positions between its matrices."""

    def __init__(self, dp: int, pp: int, tp: int, rank: int = 0, sequence_parallel: bool = False):
        self.dp, self.pp, self.tp, self.rank = dp, pp, tp, rank
        self.world = dp * pp * tp
        self.ranks = torch.arange(self.world).view(dp, pp, tp)
        self.dp_rank, self.stage, self.tp_rank = (self.ranks == rank).nonzero()[0].tolist()
        self.is_first, self.is_last = self.stage == 0, self.stage == pp - 1
        self.sequence_parallel, self.groups = sequence_parallel, {}

    def pipeline_peer(self, step: int) -> int:
        """The rank `step` stages further on in this rank's pipeline."""
        return self.rank + step * self.tp

    def group(self, name: str):
        return self.groups.get(name)


ALONE = Grid(1, 1, 1)           # one rank, without anybody to communicate with


def make_grid(world: int, tp: int, pp: int, rank: int, sequence_parallel=False,
              timeout: timedelta | None = None, device=torch.device("cpu")) -> Grid:
    """The grid of `world` ranks. For world > 1 torch.distributed must be initialised, and every
    rank must call this, because all ranks create each process group together. `timeout` is how
    long an operation waits for another rank (None: torch's half an hour); `device` is where the
    groups communicate: on the CPU by gloo, else by NCCL."""
    grid = Grid(world // (tp * pp), pp, tp, rank, sequence_parallel)
    pipelines = grid.ranks.permute(0, 2, 1).reshape(-1, pp).tolist()
    members = {
        "tp": grid.ranks.reshape(-1, tp).tolist(),
        "dp": grid.ranks.permute(1, 2, 0).reshape(-1, grid.dp).tolist(),
        "pp": pipelines,
        "embedding": [[pipe[0], pipe[-1]] for pipe in pipelines] if pp > 1 else [],
        "world": [list(range(world))],
    }
    backend = "gloo" if device.type == "cpu" else "nccl"
    for name, lists in members.items():
        for group in lists:
            if len(group) > 1:
                handle = dist.new_group(group, timeout, backend)
                if rank in group:
                    grid.groups[name] = handle
    if device.type != "cpu":
        connect(grid, device)
    return grid


def connect(grid: Grid, device: torch.device) -> None:
    """Make NCCL's connections while nothing else is under way.

    A group's first collective makes a communicator, and the first message to a neighbour in the
    pipeline a connection. Either waits for the other rank, and for all that the device has started:
    if that is a receive whose sender waits for this connection in turn, the run hangs. (GPipe on
    two stages did on an H100, with the group's communicator made, but not its connections.)
    """
    one = torch.zeros(1, device=device)
    for group in grid.groups.values():
        all_reduce(one, group).wait()
    messages = [dist.P2POp(kind, torch.zeros_like(one), grid.pipeline_peer(step), grid.group("pp"))
                for step in (1, -1) if 0 <= grid.stage + step < grid.pp
                for kind in (dist.isend, dist.irecv)]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def check_layout(cfg: GPTConfig, world: int, tp: int, pp: int, batch: int, micro_batch: int,
                 zero: int = 0, sequence_parallel: bool = False) -> None:
    """Raise a ValueError that names the numbers if this job cannot run; no communication."""
    dp, size = world // (tp * pp), tp * pp
    for impossible, message in [
        (zero == 3 and pp > 1, f"zero 3 with pp {pp} would gather every block again for each "
         f"microbatch of the pipeline: use zero 2, or pp 1"),
        (sequence_parallel and tp == 1, "sequence parallelism splits the positions over "
         "tensor-parallel ranks, but tp is 1: give --tp 2 or more"),
        (sequence_parallel and cfg.seq_len % tp,
         f"sequence parallelism: seq_len {cfg.seq_len} is not divisible by tp {tp}"),
        (world % size, f"{world} processes are not divisible by tp {tp} x pp {pp} = {size}; start "
         f"a multiple of {size} (torchrun --nproc_per_node)"),
        (cfg.n_head % tp, f"n_head {cfg.n_head} is not divisible by tp {tp}"),
        (cfg.padded_vocab % tp,
         f"the padded vocabulary {cfg.padded_vocab} is not divisible by tp {tp}"),
        (cfg.n_layer < pp, f"n_layer {cfg.n_layer} is less than pp {pp}: a stage would be empty"),
        (batch % max(1, dp * micro_batch), f"batch size {batch} is not divisible by dp {dp} x "
         f"micro-batch {micro_batch} = {dp * micro_batch}"),
    ]:
        if impossible:
            raise ValueError(message)


@dataclass
class Work:
    """Communication under way: `wait` ends it and returns finish(result)."""
    result: torch.Tensor
    handles: list = ()
    operation: str = ""
    group: object = None
    finish: Callable = lambda result: result

    def wait(self) -> torch.Tensor:
        with comm_errors(self.operation, self.group):
            for handle in self.handles:
                handle.wait()
        return self.finish(self.result)


def _exchange(outgoing: list, incoming: list, group) -> list:
    """Handles of messages to and from each other rank of the group, by rank. All ranks start their
    exchanges in the same order, and gloo matches messages between two ranks in order."""
    others = [r for r in range(group.size()) if r != group.rank()]
    return [*(dist.isend(outgoing[r], group=group, group_dst=r) for r in others),
            *(dist.irecv(incoming[r], group=group, group_src=r) for r in others)]


EXCHANGE_BYTES = 2 ** 20        # two ranks exchange tensors up to this size and add them


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> Work:
    """Sum (or `op`) over the group, in place. Two ranks on the CPU exchange a small x by messages,
    which takes gloo half as long: without it `nano` on 2 x 2 x 2 ranks is a tenth slower."""
    if group is None:
        return Work(x)
    small = x.device.type == "cpu" and x.nbytes <= EXCHANGE_BYTES
    with comm_errors("all-reduce", group):
        if not small or group.size() > 2 or op != dist.ReduceOp.SUM:
            return Work(x, [dist.all_reduce(x, op, group, async_op=True)], "all-reduce", group)
        theirs = torch.empty_like(x)
        return Work(x, _exchange([x, x], [theirs, theirs], group), "all-reduce", group,
                    lambda x: x.add_(theirs))


def reduce_scatter(x: torch.Tensor, group) -> Work:
    """Cut x along dimension 0 into a slice for each rank and sum the ranks' x: this rank's slice
    becomes the sum, in place; the other slices keep what they had.

    On the CPU every rank sends each other rank its slice. gloo's own copies x, all-reduces the copy
    and throws most of it away, which takes twice the traffic and the memory.
    """
    if group is None:
        return Work(x)
    slices, rank = x.chunk(group.size()), group.rank()
    with comm_errors("reduce-scatter", group):
        if x.device.type != "cpu":
            handles = [dist.reduce_scatter_single(slices[rank], x, group=group, async_op=True)]
            return Work(slices[rank], handles, "reduce-scatter", group)
        received = [torch.empty_like(slices[rank]) for _ in slices]
        handles = _exchange(slices, received, group)

    def add_received(total):
        for other, term in enumerate(received):
            if other != rank:
                total += term
        return total
    return Work(slices[rank], handles, "reduce-scatter", group, add_received)


def all_gather(x: torch.Tensor, group) -> Work:
    """The counterpart: send this rank's slice of x to all ranks and receive theirs, in place. On
    the CPU by messages again, because gloo's own gathers into a copy first."""
    if group is None:
        return Work(x)
    slices, rank = x.chunk(group.size()), group.rank()
    with comm_errors("all-gather", group):
        if x.device.type != "cpu":
            handles = [dist.all_gather_single(x, slices[rank], group=group, async_op=True)]
        else:
            handles = _exchange([slices[rank]] * len(slices), slices, group)
    return Work(x, handles, "all-gather", group)


# ---------------------------------------------------------------------------------------------
# 2. Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3)
#
#     MLP:  y = act(x A) B,   A = [A1 A2] by columns,  B = [B1] by rows
#                                                           [B2]
#
#           +-> act(x A1) B1 -+
#      x -f-+                 +-g-> y             rank r computes act(x Ar) Br alone
#           +-> act(x A2) B2 -+
#
#      f: identity forward,   all-reduce backward  (x fed both ranks: its gradients add up)
#      g: all-reduce forward, identity backward    (y is a sum: each term has the gradient of y)
#
# Attention is the same with heads for columns. nn.Linear stores its weight as (out, in), so "by
# columns" cuts dimension 0 here. `plain_mlp` is the whole technique, for the default group:
# ---------------------------------------------------------------------------------------------


class f(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        dist.all_reduce(dx)
        return dx


class g(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


def plain_mlp(x, up, up_bias, down, down_bias):
    """(B, T, C) -> (B, T, C), as model.MLP. Every rank is given the whole matrices (out, in) and
    uses its part of them. Only a test calls it."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    h = F.linear(f.apply(x), up.chunk(tp)[rank], up_bias.chunk(tp)[rank])       # (B, T, 4C / tp)
    h = F.gelu(h, approximate="tanh")
    return g.apply(F.linear(h, down.chunk(tp, dim=1)[rank])) + down_bias        # the bias once


# The rest of this section departs from it in nine ways. Comments in the code have the numbers.
#
#    1  A rank stores its shard of a matrix only: memory / tp. The matrix of q, k and v is cut by
#       thirds.                                              ParamSpec.shard, QKVParallelLinear
#    2  g sums in place: no copy of (B, T, C).                                          _Reduce
#    3  f is one function with its product: the gradient of the weight is computed while the
#       gradient of x travels.                                                  _ColumnParallel
#    4  The token matrix, by far the largest, is cut by rows: memory / tp. A rank looks up the
#       tokens it has; g adds up.                                        VocabParallelEmbedding
#    5  Sequence parallelism: between g and the next f a rank holds T / tp positions, at the same
#       traffic.                                                gather_positions, sum_positions
#    6  The loss takes three numbers a position from other ranks, never their logits. chunk_loss
#    7  Logits exist for one chunk of positions at a time. So forward computes their gradients,
#       and has to be given the factor on them, `scale`.            VocabParallelCrossEntropy
#    8  The token matrix's gradient is added where it is kept, `main_grad`. With 50304 tokens a
#       step takes 0.80 of the time in fp32, 0.70 in bf16.       _LookupToMainGrad, add_product
#    9  CPUs without 16-bit instructions multiply in fp32: 4 to 27 times faster. They keep what
#       backward needs in 16 bits.                                      model.upcast_for_matmul
#
# Departure 1. What is cut, and where; all else (LayerNorm, positions, the bias after g) is whole on
# every rank:
#
#     module of model.py     parameter        shape          cut in dimension
#     attn.qkv               weight, bias     (3C, C)        0, each third by heads (stride 3)
#     attn.proj              weight           (C, C)         1
#     mlp.up                 weight, bias     (4C, C)        0
#     mlp.down               weight           (C, 4C)        1
#     embed.token, head      weight           (V, C)         0


@dataclass
class ParamSpec:
    """One parameter: its global name, its shape, and how tensor parallelism cuts it."""
    name: str
    shape: tuple                # of the full parameter, without padding
    padded_rows: int            # shape[0] with the padding
    partition_dim: int | None   # the dimension that is cut; None: every rank has all of it
    stride: int                 # how many matrices are stacked in that dimension
    tp: int
    places: list                # (module, attribute) that hold it: two for a weight tied in a stage
    is_copy: bool               # the last stage's copy of a weight tied across stages

    @property
    def local_shape(self) -> list[int]:
        """The shape of one rank's shard."""
        shape = [self.padded_rows, *self.shape[1:]]
        if self.partition_dim is not None:
            shape[self.partition_dim] //= self.tp
        return shape

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    def shard(self, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
        """Full parameter -> one tensor-parallel rank's shard."""
        if self.padded_rows > self.shape[0]:
            full = F.pad(full, (0, 0, 0, self.padded_rows - self.shape[0]))
        if self.partition_dim is None:
            return full
        dim = self.partition_dim
        stacked = full.unflatten(dim, (self.stride, self.tp, -1))   # qkv: (3, tp, C / tp, C)
        return stacked.select(dim + 1, tp_rank).flatten(dim, dim + 1)

    def unshard(self, shards: list) -> torch.Tensor:
        """The shards of all tensor-parallel ranks -> full parameter."""
        if self.partition_dim is None:
            return shards[0]
        dim = self.partition_dim
        stacked = [shard.unflatten(dim, (self.stride, -1)) for shard in shards]
        return torch.cat(stacked, dim + 1).flatten(dim, dim + 1)[:self.shape[0]]


def f_forward(x: torch.Tensor, grid: Grid) -> Work:
    """x as it is: every rank has it. With sequence parallelism, (B, T / tp, C) -> (B, T, C)."""
    if grid.sequence_parallel:
        return gather_positions(x, grid)
    return Work(x)


def g_forward(x: torch.Tensor, grid: Grid) -> Work:
    """The sum of the ranks' x (B, T, C), in place. With sequence parallelism, only the sum at this
    rank's positions, (B, T / tp, C)."""
    if grid.sequence_parallel:
        return sum_positions(x, grid)
    return all_reduce(x, grid.group("tp"))


f_backward = g_forward          # each of the two is the other's backward
g_backward = f_forward


class _Reduce(torch.autograd.Function):
    """g. Departure 2: it may overwrite x, (B, T, C)."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        if not grid.sequence_parallel:
            ctx.mark_dirty(x)
        return g_forward(x, grid).wait()

    @staticmethod
    def backward(ctx, dy):
        return g_backward(dy, ctx.grid).wait(), None


class _ColumnParallel(torch.autograd.Function):
    """y = f(x) W^T + b. Departure 3: as one function, because two would run one after the other."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return linear(f_forward(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        gathering = f_forward(x, ctx.grid)          # departure 5: x has T / tp positions
        dx = f_backward(matmul(dy, weight), ctx.grid)
        dy = dy.flatten(0, 1)                                               # (B T, out)
        dw = matmul(dy.t(), gathering.wait().flatten(0, 1))                 # while dx travels
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx.wait(), dw, db, None


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b; departure 9."""
    return upcast_for_matmul(torch.matmul, a, b, out=out)


class TensorParallel(nn.Module):
    """Takes over the parameters of a plain module. `partition_dim` says in which dimension they are
    cut, `stride` how many matrices are stacked there."""
    partition_dim = {}
    stride = 1

    def __init__(self, plain: nn.Module, grid: Grid):
        super().__init__()
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        self.grid = grid


class ColumnParallelLinear(TensorParallel):
    """(B, T, in), the same on every rank -> (B, T, out / tp), this rank's columns. (With sequence
    parallelism, here and below, "the same on every rank" is a slice of T on each.)"""
    partition_dim = {"weight": 0, "bias": 0}

    def forward(self, x):
        if self.grid.tp == 1:
            return linear(x, self.weight, self.bias)
        return _ColumnParallel.apply(x, self.weight, self.bias, self.grid)


class QKVParallelLinear(ColumnParallelLinear):
    """The matrices of q, k and v, one above the other: each is cut by heads on its own."""
    stride = 3


class RowParallelLinear(TensorParallel):
    """(B, T, in / tp), this rank's rows -> (B, T, out), the same on every rank. Every rank holds
    the bias, which is added once, after the sum."""
    partition_dim = {"weight": 1}

    def forward(self, x):
        if self.grid.tp == 1:
            return linear(x, self.weight, self.bias)
        return _Reduce.apply(linear(x, self.weight), self.grid) + self.bias


class VocabParallelEmbedding(TensorParallel):
    """tokens (B, T) -> (B, T, C). Departure 4: tokens outside this rank's rows embed to zero; g
    sums over the ranks."""
    partition_dim = {"weight": 0}

    def forward(self, tokens):
        rows = self.weight.shape[0]
        local = tokens - self.grid.tp_rank * rows                       # row number on this rank
        is_local = (local >= 0) & (local < rows)
        local = local.where(is_local, 0)
        if hasattr(self.weight, "main_grad"):                           # departure 8
            x = _LookupToMainGrad.apply(local, self.weight)
        else:
            x = F.embedding(local, self.weight)                         # (B, T, C)
        return _Reduce.apply(x * is_local.unsqueeze(-1), self.grid)


# Departure 5: sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Between g and the next
# f all ranks hold the same activations and do the same work on them. Let each hold T / tp positions
# there. An all-reduce is a reduce-scatter and an all-gather, so f and g do one half each:
#
#      f: all-gather forward,     reduce-scatter backward
#      g: reduce-scatter forward, all-gather backward
#
# The backward of a column-parallel product needs x at all positions. It gathers x again, during the
# product before: to keep the gathered x would take tp times the memory. The replicated parameters
# that see T / tp positions (LayerNorm, the bias after g, the embedding of positions) have a part of
# their gradient on each rank: `finish_grad_sync` adds them up.


def gather_positions(x: torch.Tensor, grid: Grid) -> Work:
    """(B, T / tp, C) of each rank -> (B, T, C) on all."""
    parts = x.new_empty(grid.tp, *x.shape)                              # (tp, B, T / tp, C)
    parts[grid.tp_rank] = x
    gathering = all_gather(parts, grid.group("tp"))
    return replace(gathering, finish=lambda parts: parts.movedim(0, 1).flatten(1, 2))


def sum_positions(x: torch.Tensor, grid: Grid) -> Work:
    """The sum of the ranks' x (B, T, C) at this rank's positions, (B, T / tp, C)."""
    parts = x.unflatten(1, (grid.tp, -1)).movedim(1, 0)                 # (tp, B, T / tp, C)
    return reduce_scatter(parts.flatten(0, 1).contiguous(), grid.group("tp"))


class PositionEmbedding(TensorParallel):
    """positions 0, 1, ... n - 1 -> (n, C), counted from where this rank's slice starts."""

    def forward(self, positions):
        first = self.grid.tp_rank * len(positions) if self.grid.sequence_parallel else 0
        return F.embedding(positions + first, self.weight)


def chunk_loss(logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int, group,
               scale: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The summed cross-entropy in nats of some positions, and the gradient of their logits times
    `scale` (None: no gradient). A pure function, but that the gradient may take the logits' memory.

    logits      (n, V / tp), the columns of tokens first, first + 1, ...; from `valid` on padding
    targets     (n,) tokens of the whole vocabulary; IGNORE_INDEX adds nothing

        loss = log sum_v exp(z_v) - z_target        d loss / d z_v = softmax(z)_v - [v = target]

    Departure 6. With s_r = log sum_v exp(z_v) over the columns of rank r (`local_logsumexp`), and
    the largest of them, s (`global_max`), which keeps exp from overflowing:

        share_r = exp(s_r - s)                      total = sum_r share_r
        log sum_v exp(z_v) = s + log total          softmax = local softmax * share_r / total

    All is computed in fp32 or wider.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits[:, valid:] = torch.finfo(logits.dtype).min       # (-inf alone would have no softmax)
    local = targets - first
    is_local = (local >= 0) & (local < logits.shape[1])
    target = torch.arange(len(logits), device=logits.device), local.where(is_local, 0)
    target_logit = logits[target].to(wide)                                          # (n,)
    largest = logits.amax(dim=1).to(wide)

    p = logits.to(wide)
    torch.softmax(p, 1, out=p)                              # over this rank's columns
    # The largest softmax is exp(largest - local_logsumexp).
    local_logsumexp = largest - p.amax(dim=1).log()
    global_max = all_reduce(local_logsumexp.clone(), group, dist.ReduceOp.MAX).wait()
    share = (local_logsumexp - global_max).exp()
    local_target = (target_logit - global_max).where(is_local, 0)       # on one rank not 0
    total, target_logit = all_reduce(torch.stack([share, local_target]), group).wait()
    counted = targets != IGNORE_INDEX
    loss = (total.log() - target_logit).where(counted, 0).sum()
    if scale is None:
        return loss, None

    upstream = counted.to(wide) * scale                                             # (n,)
    factor = upstream * share / total
    target_gradient = p[target] * factor - upstream * is_local
    p *= factor.unsqueeze(1)
    gradient = logits.copy_(p)
    gradient[target] = target_gradient.to(gradient.dtype)
    return loss, gradient


MAX_LOGITS = {"cpu": 2 ** 24, "gpu": 2 ** 28}       # of a chunk; measured on the CPU


def chunk_size(positions: int, vocab: int, device_type: str) -> int:
    """Number of positions whose logits, of `vocab` tokens each, are materialized at once."""
    return min(positions, max(1, MAX_LOGITS["cpu" if device_type == "cpu" else "gpu"] // vocab))


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy in nats of the logits f(x) W^T against targets (B, T), of x
    (B, T, C) and this rank's rows W (V / tp, C). Gradients come times `scale`.

    Departure 7: forward also computes the gradients, chunk by chunk, so neither the logits nor the
    softmax of all positions ever exist (None for `scale`: no gradients). Backward hands them over.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, grid, scale):
        x = f_forward(x, grid).wait()
        shape = x.shape
        x, targets = x.flatten(0, 1), targets.flatten()                     # (N, C), (N,)
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        rows = weight.shape[0]
        first = grid.tp_rank * rows
        valid = min(max(vocab_size - first, 0), rows)
        ctx.in_main_grad = hasattr(weight, "main_grad")
        if scale is not None:
            dx = torch.empty_like(x)
            if ctx.in_main_grad:
                dw = weight.main_grad()                                     # departure 8
            else:
                dw = torch.zeros_like(weight, dtype=wide)

        size = chunk_size(len(x), rows, x.device.type)
        memory = x.new_empty(size, rows)                                    # of all chunks
        for i in range(0, len(x), size):
            chunk = slice(i, i + size)
            logits = matmul(x[chunk], weight.t(), out=memory[:len(x) - i])  # (n, V / tp)
            term, dz = chunk_loss(logits, targets[chunk], first, valid, grid.group("tp"), scale)
            loss += term
            if scale is not None:
                dx[chunk] = matmul(dz, weight)
                add_product(dw, dz, x[chunk])

        if scale is not None:
            dx = f_backward(dx.view(shape), grid).wait()
            if grid.sequence_parallel:
                dx = dx.clone()             # a slice would keep the memory of all positions
            ctx.save_for_backward(dx, None if ctx.in_main_grad else dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, upstream):
        dx, dw = ctx.saved_tensors
        if ctx.in_main_grad:
            assert_unscaled(upstream)
            return dx, None, None, None, None, None
        return dx * upstream, dw * upstream, None, None, None, None


# Departure 8. An embedding reads few rows of the token matrix, and the gradient of the head comes
# in chunks. FlatParameters gives the weight a method `main_grad`, which returns the tensor (V / tp,
# C) that collects its gradient, in fp32 (as in Megatron-LM). Both gradients are added there, and
# autograd gets None. (For other matrices this gained nothing: 0.98 and 1.08 of the time.) Without a
# `main_grad` autograd gets ordinary gradients, so this section can be used with any optimizer.


class _LookupToMainGrad(torch.autograd.Function):
    """F.embedding, whose gradient is added to the rows of `main_grad` that were looked up."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, dx):
        grad = ctx.weight.main_grad()
        grad.index_add_(0, ctx.saved_tensors[0].flatten(), dx.flatten(0, 1).to(grad.dtype))
        return None, None


def add_product(grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """grad (out, in) += dy^T x, of dy (N, out) and x (N, in), by the matrix product itself where
    the types are equal, or 16 bit and fp32 on CUDA; else in parts that stay in the cache."""
    if grad.dtype == x.dtype:
        grad.addmm_(dy.t(), x)
    elif grad.device.type == "cuda":
        torch.addmm(grad, dy.t(), x, out_dtype=grad.dtype, out=grad)
    else:
        for rows, columns in zip(grad.split(2048), dy.split(2048, dim=1)):
            rows += matmul(columns.t(), x)


def assert_unscaled(upstream: torch.Tensor) -> None:
    """Raise a RuntimeError unless the loss is what backward started from: it is too late to scale
    the gradient in `main_grad`."""
    message = ("the gradient of the loss is not 1, but the token matrix's gradient has been added "
               "to main_grad: call backward() on the loss itself, and set head.scale instead")
    if upstream.device.type == "cuda":
        torch._assert_async(upstream == 1, message)         # does not wait for the GPU
    elif upstream != 1:
        raise RuntimeError(message)


class VocabParallelHead(TensorParallel):
    """x (B, T, C) and targets (B, T) -> the summed loss of model.Head, the same on every rank; a
    new loss must change both. Its gradients come times `self.scale`. `self.norms` adds up the norms
    of x over its positions."""
    partition_dim = {"weight": 0}

    def __init__(self, head: nn.Module, grid: Grid):
        super().__init__(head, grid)
        self.norm = head.norm
        self.vocab_size = head.vocab_size
        self.scale = 1.0
        self.norms = 0.0

    def forward(self, x, targets):
        wide = torch.promote_types(x.dtype, torch.float32)
        self.norms += torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).sum()
        return VocabParallelCrossEntropy.apply(
            self.norm(x), self.weight, targets, self.vocab_size, self.grid,
            self.scale if torch.is_grad_enabled() else None)


TP_PLAN = {         # which module of model.py becomes what
    "attn.qkv": QKVParallelLinear,
    "attn.proj": RowParallelLinear,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
    "embed.token": VocabParallelEmbedding,
    "embed.position": PositionEmbedding,
    "head": VocabParallelHead,
}
TIED = {"head.weight": "embed.token.weight"}    # one matrix: its name in the head, its global name


def parallelize(model: GPT, grid: Grid) -> None:
    """Replace the modules of TP_PLAN. Their parameters are still whole, and the caller replaces
    them by shards (`param_specs` gives the ParamSpec of each)."""
    for name, module in list(model.named_modules()):
        for suffix, parallel_module in TP_PLAN.items():
            if name.endswith(suffix):
                model.set_submodule(name, parallel_module(module, grid))
    for block in model.blocks.values():
        block.attn.dot_product.rng_offset = grid.tp_rank        # other heads draw other masks


# ---------------------------------------------------------------------------------------------
# 3. Pipeline parallelism (GPipe, Huang et al. 2019)
#
#     The layers are cut into stages and the batch into microbatches, which follow each other:
#
#     stage 0   F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0        m microbatches, p stages: of the
#     stage 1   .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .         m + p - 1 slots of each direction
#     stage 2   .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .         p - 1 are idle, the bubble
#
# 1F1B has the same bubble, but starts on a backward as soon as there is one: what a stage keeps is
# bounded by the number of stages, not of microbatches.
#
# A schedule is data: a list of ("F" | "B", microbatch) for each stage. `run_schedule` carries one
# out; `clock` runs all of them without processes, to count and to draw. With --recompute the
# activations inside a block are dropped after forward and computed again in backward (GPipe,
# section 2.3, with blocks for its partitions, as in Chen et al. 2016): a block's input remains.
# ---------------------------------------------------------------------------------------------


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The blocks of a stage: their numbers differ by one at most, and the last stage, which has the
    head too, is never one of those with more."""
    return range(-(-stage * n_layer // pp), -(-(stage + 1) * n_layer // pp))


def build_stage(cfg: GPTConfig, grid: Grid) -> GPT:
    """This rank's part of the GPT, on the meta device: its stage's blocks, parallel modules."""
    with torch.device("meta"):
        model = GPT(cfg)
    layers = stage_layers(cfg.n_layer, grid.pp, grid.stage)
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None
    parallelize(model, grid)
    return model


def wrap_blocks(model: GPT, recompute: bool, compile: bool) -> None:
    """Compile each block's forward, recompute its activations in backward, or both.

    The compiler goes around what we do by hand: modules that communicate or draw a mask run as they
    are. What lies between them is compiled once for all blocks.
    """
    def by_hand(module):
        communicates = isinstance(module, TensorParallel) and module.grid.tp > 1
        return communicates or getattr(module, "p", 0) > 0

    for block in model.blocks.values():
        if compile:
            modules = [module for module in block.modules() if by_hand(module)]
            for module in modules:
                module.forward = torch.compiler.disable(module.forward)
            block.forward = torch.compile(block.forward, fullgraph=not modules)
        if recompute:       # dropout masks come from their seeds, so no generator's state is kept
            block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                    preserve_rng_state=False)


def gpipe(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards in reverse; every stage does the same. O(micro) live."""
    return [("F", m) for m in range(micro)] + [("B", m) for m in reversed(range(micro))]


def one_f_one_b(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """As few forwards as fill the stages behind this one, then forward and backward in turn
    (PipeDream-flush, Narayanan et al. 2021): GPipe's bubble, `stages - stage` microbatches live.
    On one stage each backward follows its forward."""
    warmup = min(micro, stages - stage - 1)
    return ([("F", m) for m in range(warmup)]
            + [op for m in range(micro - warmup) for op in (("F", m + warmup), ("B", m))]
            + [("B", m) for m in range(micro - warmup, micro)])


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
OPS = {"F": "forward", "B": "backward"}


def start_messages(messages: list, group) -> list[Work]:
    """Start to send to or receive from other stages, all at once; a message is (dist.isend or
    dist.irecv, tensor, rank, tag, what it is). Returns a Work for each.

    On gloo messages of different tags pass each other. NCCL ignores tags and does in order what it
    is asked for: two stages that send to each other before they receive wait for ever. There all
    messages become one operation, as in Megatron-LM.
    """
    works = []
    if messages and messages[0][1].device.type != "cpu":
        with comm_errors(", ".join(what for *_, what in messages)):
            handles = dist.batch_isend_irecv([dist.P2POp(kind, x, peer, group, tag)
                                              for kind, x, peer, tag, _ in messages])
        return [Work(x, handles, what) for _, x, _, _, what in messages]
    for kind, x, peer, tag, what in messages:
        with comm_errors(what):
            works.append(Work(x, [kind(x, peer, group, tag=tag)], what))
    return works


def run_schedule(schedule, model: GPT, grid: Grid, batch: list, boundary: torch.Tensor,
                 flat=None, scale: float = 1.0) -> torch.Tensor:
    """Carry out this stage's list. Returns the sum of its losses (`sum_dtype`), unscaled (0 on
    every stage but the last).

    batch       microbatch -> (tokens (B, T), used on the first stage; targets (B, T), used on the
                last; dropout seed)
    boundary    an empty tensor like what crosses a stage boundary, (B, T, C) or (B, T / tp, C)
    flat        the FlatParameters that collect gradients; None for a schedule without backward
    scale       factor on the gradients of the summed loss

    Between two ops the result of the one leaves, and the input of the next is asked for. Raises
    PeerError, naming the microbatch, if another rank is gone or hangs.
    """
    live, coming, sending, group = {}, [], {}, grid.group("pp")
    total = torch.zeros((), dtype=sum_dtype(boundary.device), device=boundary.device)
    last = [m for op, m in schedule if op == "B"][-1:]
    if grid.is_last:
        model.head.scale, model.head.norms = scale, 0.0

    def message(kind, i, x):
        """[what op number i sends or receives]; [] at the ends of the pipeline and the schedule."""
        op, m = schedule[i] if i < len(schedule) else (None, None)
        step = 1 if (op == "F") == (kind is dist.isend) else -1
        if op is None or not 0 <= grid.stage + step < grid.pp:
            return []
        peer, verb = grid.pipeline_peer(step), {dist.isend: "send to", dist.irecv: "receive from"}
        return [(kind, x.detach().contiguous(), peer, m, f"{OPS[op]} of microbatch {m}: "
                 f"{verb[kind]} rank {peer} (stage {grid.stage + step})")]

    def receive(i):
        return message(dist.irecv, i, torch.empty_like(boundary))

    def forward(m, x):
        tokens, targets, dropout_seed = batch[m]
        x = tokens if grid.is_first else x.requires_grad_()
        y = model(x, targets, dropout_seed)
        if grid.is_last:
            total.add_(y.detach())
        if torch.is_grad_enabled():
            live[m] = x, y
        return y

    def backward(m, dy):
        x, y = live.pop(m)
        if not grid.is_last:
            # A scalar whose gradient with respect to y is dy. torch.autograd.backward(y, dy) would
            # import a compiler's 487 modules at the first step: 0.5 s in each process.
            y = (y * dy).sum()
        flat.prepare_grad_sync([m] == last)
        y.backward()
        return x.grad

    coming += start_messages(receive(0), group)
    for i, (op, m) in enumerate(schedule):
        turns = i + 1 < len(schedule) and schedule[i + 1][0] != op
        # The next input from the same stage may come while this op runs. (NCCL keeps the order:
        # the result of this op then leaves behind it.)
        if not turns:
            coming += start_messages(receive(i + 1), group)
        x = None if (grid.is_first if op == "F" else grid.is_last) else coming.pop(0).wait()
        try:
            y = forward(m, x) if op == "F" else backward(m, x)
        except PeerError as error:
            raise PeerError(f"{OPS[op]} of microbatch {m}: {error}") from error
        outgoing = message(dist.isend, i, y)
        if outgoing and op in sending:              # one on its way in each direction
            sending.pop(op).wait()
        # Where a forward follows a backward, or the reverse, both are with the same stage.
        works = start_messages(outgoing + (receive(i + 1) if turns else []), group)
        if outgoing:
            sending[op] = works.pop(0)
        coming += works
    for work in sending.values():
        work.wait()
    return total


def activation_bytes(cfg: GPTConfig, grid: Grid, schedule, micro_batch: int, itemsize: int,
                     recompute: bool = False) -> int:
    """Estimate of the most bytes this rank keeps between forward and backward, in units of
    B T C numbers (Korthikanti et al. 2022, section 4, for what we save; without dropout):

        block    inputs and outputs of 2 LayerNorms     / tp with sequence parallelism
                 q, k, v, attention's output and the MLP's 4C (before and after GELU)     / tp
        stage    what it sends on; or the head's input and its gradient, computed in forward
    """
    unit = micro_batch * cfg.seq_len * cfg.n_embd * itemsize
    thin = unit // (grid.tp if grid.sequence_parallel else 1)
    block = 4 * thin + (12 if cfg.activation == "gelu" else 8) * unit // grid.tp
    end = 2 * thin if grid.is_last else thin
    layers = len(stage_layers(cfg.n_layer, grid.pp, grid.stage))
    kept = layers * thin + end if recompute else layers * block + end
    return live_activations(schedule) * kept + (block if recompute else 0)


def loss_bytes(cfg: GPTConfig, grid: Grid, micro_batch: int, itemsize: int, device: str) -> int:
    """The memory of the logits in VocabParallelCrossEntropy, on the last stage: a chunk of them in
    the type of the activations, and in 16 bits a second one in fp32."""
    vocab = cfg.padded_vocab // grid.tp
    count = chunk_size(micro_batch * cfg.seq_len, vocab, device)
    return count * vocab * (itemsize + 4 * (itemsize == 2)) * grid.is_last


def clock(schedules) -> list[list[tuple]]:
    """Simulate the stages' schedules without processes: [(op, microbatch, start, end)] of each
    stage. A forward takes one unit of time, a backward two; an op starts when its stage is free and
    its input is there. Raises ValueError on a deadlock."""
    end, out = {}, [[] for _ in schedules]
    while any(len(o) < len(s) for o, s in zip(out, schedules)):
        before = len(end)
        for s, schedule in enumerate(schedules):
            for op, m in schedule[len(out[s]):]:
                last = s == len(schedules) - 1
                source = (("F", s - 1, m) if op == "F" and s > 0 else
                          None if op == "F" else ("F", s, m) if last else ("B", s + 1, m))
                if source is not None and source not in end:
                    break
                start = max(end.get(source, 0), out[s][-1][3] if out[s] else 0)
                end[op, s, m] = start + (1 if op == "F" else 2)
                out[s].append((op, m, start, end[op, s, m]))
        if len(end) == before:
            raise ValueError("the schedules wait for each other: deadlock")
    return out


def bubble(timeline) -> float:
    """Idle fraction of all stages' time."""
    span = max(row[-1][3] for row in timeline)
    busy = sum(end - start for row in timeline for _, _, start, end in row)
    return 1 - busy / (span * len(timeline))


def live_activations(schedule) -> int:
    """The most microbatches a stage holds between their forward and their backward."""
    return max(accumulate(1 if op == "F" else -1 for op, _ in schedule))


def draw(timeline) -> str:
    """One line a stage, a column a unit of time: F3 is the forward of microbatch 3, . is idle."""
    span = max(row[-1][3] for row in timeline)
    width = max(len(str(m)) for row in timeline for _, m, _, _ in row) + 2
    lines = []
    for s, row in enumerate(timeline):
        cells = ["."] * span
        for op, m, start, end in row:
            cells[start:end] = [f"{op}{m}"] * (end - start)
        lines.append(f"stage {s:2d}  " + "".join(c.ljust(width) for c in cells).rstrip())
    return "\n".join(lines)


def microbatches(config, grid: Grid) -> int:
    """Of a step, on each replica."""
    return config.batch_size // (grid.dp * config.micro_batch)


def schedule_of(config, grid: Grid) -> list[tuple[str, int]]:
    """This stage's. Without a pipeline each backward follows its forward."""
    make_schedule = SCHEDULES[config.pp_schedule] if grid.pp > 1 else one_f_one_b
    return make_schedule(grid.stage, grid.pp, microbatches(config, grid))


# ---------------------------------------------------------------------------------------------
# 4. Data parallelism in flat buckets (as DDP's, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020)
#
#     data    | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |     parameters are views
#     grad    | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |     gradients add up here
#
# A bucket is one flat tensor: half a block's parameters; the tied token matrix, whose gradient
# comes from both ends of the model and is added up between them where these are two stages; what
# else the ends have. Backward fills `grad` from the right. Once the last microbatch's gradients of
# a bucket are in, its all-reduce starts, while backward goes on to the left; the order is the same
# on every rank.
#
# All replicas would then do the same update on the same numbers. ZeRO cuts each bucket into dp
# shards, and replica r keeps shard r. One number (ZeRO's "stage", no stage of a pipeline) says of
# which tensors:
#
#                                                    bytes a parameter
#     ZeRO    masters, moments    grad     data      16 bits      fp32 (its own master)
#       0     full                full     full      18           16
#       1     shard               full     full      6 + 12/dp    8 + 8/dp
#       2     shard               shard    full      2 + 16/dp    4 + 12/dp
#       3     shard               shard    shard     18/dp        16/dp
#
#     1   the all-reduce becomes a reduce-scatter; AdamW updates the shard; an all-gather follows
#     2   every microbatch's bucket is reduce-scattered, added to the shard, and freed
#     3   a block's parameters are gathered before use, forward and backward, and freed after; the
#         next block's are on their way meanwhile (FSDP, Zhao et al. 2023)
#
# The path of a gradient:
#
#     autograd or a Function above --> parameter.main_grad(), a view of bucket.grad
#     hook after each parameter    --> bucket.missing - 1; at 0 the bucket is full:
#     _sync                        --> its communication starts (one function for each ZeRO stage)
#     finish_grad_sync             --> bucket.shard["grad"] holds the sum over all replicas
# ---------------------------------------------------------------------------------------------


class Bucket:
    """Parameters that are communicated as one, laid out flat and padded to dp equal shards.

    data          (numel,) the parameters are views into it; with ZeRO 3 its memory comes and goes
    grad          (numel,) their gradients; from ZeRO 2 on those of one microbatch, None in between
    shard         what this rank updates, (numel,) or with ZeRO (numel / dp,), a view of data and
                  grad or, as the table says, all there is: data, grad, master, exp_avg, exp_avg_sq
    shard_ranges  what of each parameter is in it: [(spec, range in the shard, in the parameter)]
    """

    def __init__(self, specs: list[ParamSpec], dp: int, num_shards: int = 1, shard_rank: int = 0):
        self.specs, self.shard = specs, {}
        self.data = self.grad = self.unsharding = None
        self.missing = 0                # gradients of this microbatch that are not in yet
        self.offsets, end = {}, 0
        for spec in specs:
            self.offsets[spec.name] = end
            end += -(-spec.numel // 32) * 32            # up to a multiple of 64 bytes in 16 bits
        self.numel = -(-end // (32 * dp)) * 32 * dp
        length = self.numel // num_shards
        first, self.shard_ranges = shard_rank * length, []
        for spec in specs:
            offset = self.offsets[spec.name]
            low, high = max(offset, first), min(offset + spec.numel, first + length)
            if low < high:
                self.shard_ranges.append((spec, slice(low - first, high - first),
                                          slice(low - offset, high - offset)))

    def view(self, flat: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        """The part of a full bucket that belongs to a parameter, in the parameter's shape."""
        offset = self.offsets[spec.name]
        return flat[offset:offset + spec.numel].view(spec.local_shape)


def param_specs(model: GPT, cfg: GPTConfig, grid: Grid) -> list[ParamSpec]:
    """The parameters of a stage. They depend on the stage alone, so any rank can know the layout of
    another one (`checkpoint.gather_full_state`)."""
    specs = {}
    for module_name, module in model.named_modules():
        stride = getattr(module, "stride", 1)
        for attribute, parameter in module.named_parameters(recurse=False):
            local_name = f"{module_name}.{attribute}"
            name = TIED.get(local_name, local_name)
            if name in specs:
                specs[name].places.append((module, attribute))
                continue
            rows = cfg.vocab_size if name == "embed.token.weight" else parameter.shape[0]
            specs[name] = ParamSpec(
                name, (rows, *parameter.shape[1:]), parameter.shape[0],
                getattr(module, "partition_dim", {}).get(attribute), stride, grid.tp,
                [(module, attribute)], is_copy=local_name in TIED and not grid.is_first)
    return list(specs.values())


def make_buckets(specs: list[ParamSpec], *sharding) -> list[Bucket]:
    """The tied matrix alone; what else the ends have; then each block's attention and MLP, with the
    LayerNorm before it."""
    def bucket_of(spec):
        if spec.name in TIED.values():
            return -2, ""
        if not spec.name.startswith("blocks."):
            return -1, ""
        _, block, module, *_ = spec.name.split(".")
        return int(block), "mlp" if module in ("norm2", "mlp") else "attn"
    return [Bucket(list(group), *sharding)
            for _, group in groupby(sorted(specs, key=bucket_of), key=bucket_of)]


class FlatParameters:
    """This rank's parameters, gradients, masters and Adam moments, in buckets.

    dtype           of the parameters
    master_dtype    of gradients, masters and moments; where it is dtype, a parameter is its own
                    master
    zero            ZeRO's stage, 0 to 3
    host            the device of masters and moments, where AdamW runs (ZeRO-Offload, Ren et al.
                    2021): gradients go over and parameters come back, bucket by bucket
    """

    def __init__(self, specs: list[ParamSpec], grid: Grid, dtype, master_dtype, device,
                 zero: int = 0, host=None):
        self.grid, self.zero = grid, zero
        device, host = torch.device(device), torch.device(device if host is None else host)
        self.num_shards, rank = (grid.dp, grid.dp_rank) if zero else (1, 0)
        self.buckets = make_buckets(specs, grid.dp, self.num_shards, rank)
        self.unsynced = []      # buckets to be communicated in this backward, the next one last
        self.in_flight = []     # [(bucket, Work)]
        self._sync = (self._all_reduce, self._reduce_scatter, self._reduce_scatter_and_free,
                      self._reduce_scatter_and_reshard)[zero]
        for bucket in self.buckets:
            shard, new = bucket.shard, partial(torch.zeros, bucket.numel // self.num_shards)
            bucket.data = torch.zeros(bucket.numel, dtype=dtype, device=device)
            shard["data"] = (bucket.data.chunk(self.num_shards)[rank] if zero < 3 else
                             new(dtype=dtype, device=device))
            if zero < 2:
                bucket.grad = torch.zeros(bucket.numel, dtype=master_dtype, device=device)
            shard["grad"] = (bucket.grad.chunk(self.num_shards)[rank] if zero < 2 else
                             new(dtype=master_dtype, device=device))
            shard["master"] = (shard["data"] if (dtype, device) == (master_dtype, host) else
                               new(dtype=master_dtype, device=host))
            for moment in ("exp_avg", "exp_avg_sq"):
                shard[moment] = new(dtype=master_dtype, device=host)
            # The tied matrix is two parameters on the same memory: as one, its first gradient would
            # stay with autograd until the second came, at the end of backward.
            for spec, place in [(spec, place) for spec in bucket.specs for place in spec.places]:
                # `.data` keeps gathers from bumping autograd's version counter.
                parameter = nn.Parameter(bucket.view(bucket.data, spec).data)
                setattr(*place, parameter)
                parameter.main_grad = partial(self._main_grad, bucket, spec)
                parameter.register_post_accumulate_grad_hook(partial(self._grad_ready, bucket))
            if zero == 3:
                self.reshard(bucket)

    @torch.no_grad()
    def load(self, name: str, full) -> None:
        """Fill this rank's tensors `name` from full parameters: full(name, shape) -> tensor."""
        for bucket in self.buckets:
            for spec, here, there in bucket.shard_ranges:
                value = spec.shard(full(spec.name, spec.shape), self.grid.tp_rank)
                bucket.shard[name][here].copy_(value.flatten()[there])

    def initialize(self, cfg: GPTConfig, seed: int, parameters: dict | None = None) -> None:
        """Everything at step 0, one full parameter in memory at a time; the weights are those of
        `parameters` {name: full tensor}, whose positions may be more, or drawn from the seed."""
        self.load("master", lambda name, shape: initial_value(cfg, name, shape, seed)
                  if parameters is None else parameters[name][:shape[0]])
        for bucket in self.buckets:
            bucket.shard["exp_avg"].zero_()
            bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()

    def sync_params(self) -> None:
        """masters -> parameters, rounded to the parameters' type, on all replicas."""
        for work in [self._sync_params(bucket) for bucket in self.buckets]:
            work.wait()

    @torch.no_grad()
    def _sync_params(self, bucket: Bucket) -> Work:
        data, master = bucket.shard["data"], bucket.shard["master"]
        if master.device != data.device:        # through pinned memory, so that nobody waits
            pinned = data.device.type == "cuda"
            master = torch.empty_like(master, dtype=data.dtype, pin_memory=pinned).copy_(master)
        if master is not data:
            data.copy_(master, non_blocking=True)
        return all_gather(bucket.data, self.grid.group("dp") if self.zero in (1, 2) else None)

    def unshard(self, buckets: list[Bucket], prefetch: list[Bucket] = ()) -> None:
        """ZeRO 3: gather the buckets' parameters; start on those of the ones to `prefetch`."""
        for bucket in (*buckets, *prefetch):
            if bucket.data.untyped_storage().size() == 0:
                bucket.data.untyped_storage().resize_(bucket.data.nbytes)
                bucket.data.chunk(self.num_shards)[self.grid.dp_rank].copy_(bucket.shard["data"])
                bucket.unsharding = all_gather(bucket.data, self.grid.group("dp"))
        for bucket in buckets:
            if bucket.unsharding is not None:
                bucket.unsharding.wait()
                bucket.unsharding = None

    def reshard(self, *buckets: Bucket) -> None:
        """Free the gathered parameters; the shard stays."""
        for bucket in buckets:
            bucket.data.untyped_storage().resize_(0)

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            (bucket.grad if self.zero < 2 else bucket.shard["grad"]).zero_()

    def prepare_grad_sync(self, last: bool) -> None:
        """Before each backward. If it is the step's last, or from ZeRO 2 on in every one, each
        bucket is communicated as soon as it is full, from the last bucket to the first."""
        self.unsynced = list(self.buckets) if last or self.zero >= 2 else []
        for bucket in self.buckets:
            bucket.missing = sum(len(spec.places) for spec in bucket.specs)

    def _main_grad(self, bucket: Bucket, spec: ParamSpec) -> torch.Tensor:
        """Where a parameter's gradient adds up, in its shape."""
        if bucket.grad is None:
            bucket.grad = torch.zeros(bucket.numel, dtype=bucket.shard["grad"].dtype,
                                      device=bucket.data.device)
        return bucket.view(bucket.grad, spec)

    def _grad_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Autograd's hook after a parameter. A gradient of None has been added already."""
        if parameter.grad is not None:
            parameter.main_grad().add_(parameter.grad)
            parameter.grad = None
        bucket.missing -= 1
        while self.unsynced and not self.unsynced[-1].missing:
            self._sync(self.unsynced.pop())

    def _all_reduce(self, bucket: Bucket) -> None:
        """ZeRO 0: every replica gets the full sum."""
        self.in_flight.append((bucket, all_reduce(bucket.grad, self.grid.group("dp"))))

    def _reduce_scatter(self, bucket: Bucket) -> None:
        """ZeRO 1: the shard becomes the sum. One bucket at a time is on its way, because each needs
        memory for the shards that arrive."""
        self._wait_grad_sync()
        self.in_flight.append((bucket, reduce_scatter(bucket.grad, self.grid.group("dp"))))

    def _reduce_scatter_and_free(self, bucket: Bucket) -> None:
        """ZeRO 2: the sum will be added to the shard; the bucket's memory is free for the next. (It
        is None if this microbatch added nothing: GPipe's forwards have added all of the head's.)
        """
        if bucket.grad is not None:
            self._reduce_scatter(bucket)
            bucket.grad = None

    def _reduce_scatter_and_reshard(self, bucket: Bucket) -> None:
        """ZeRO 3: its parameters are not needed again in this backward."""
        self._reduce_scatter_and_free(bucket)
        self.reshard(bucket)

    @torch.no_grad()
    def _wait_grad_sync(self) -> None:
        for bucket, work in self.in_flight:
            total = work.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += total
        self.in_flight = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for the buckets, then add up what else is a sum: the two ends' gradients of the tied
        weight, and with sequence parallelism those of what tensor parallelism replicates."""
        assert not self.unsynced, "a parameter got no gradient"
        self._wait_grad_sync()
        if self.buckets[0].specs[0].name in TIED.values():
            all_reduce(self.buckets[0].shard["grad"], self.grid.group("embedding")).wait()
        if self.grid.sequence_parallel:
            terms = [bucket.shard["grad"][here] for bucket in self.buckets
                     for spec, here, _ in bucket.shard_ranges if spec.partition_dim is None]
            if terms:
                sums = all_reduce(torch.cat(terms), self.grid.group("tp")).wait()
                torch._foreach_copy_(terms, sums.split([len(x) for x in terms]))

    def square_sums(self) -> torch.Tensor:
        """Sums of squares of this rank's gradients, (2,): [what counts for the global norm,
        everything].

        Summed over the world, the first counts each parameter of the whole model once: replicas,
        what tensor parallelism replicates, and the copy of the tied weight count elsewhere. The
        second is not finite if one of this rank's gradients is not (or if they are so large that
        the squares of a row overflow in fp32).
        """
        norms = {True: [], False: []}           # does it count -> norms of rows
        replica = self.zero == 0 and self.grid.dp_rank > 0
        for bucket in self.buckets:
            def counts(entry):
                replicated = entry[0].partition_dim is None and self.grid.tp_rank > 0
                return not replica and not replicated and not entry[0].is_copy
            for counted, run in groupby(bucket.shard_ranges, key=counts):
                ranges = [here for _, here, _ in run]       # one after the other, zeros in between
                grads = bucket.shard["grad"][ranges[0].start:ranges[-1].stop]
                norms[counted].append(row_norms(grads))
        none = torch.zeros(0, device=self.buckets[0].data.device)
        counted, others = (torch.cat([none, *rows]).to(sum_dtype(none.device)).square().sum()
                           for rows in (norms[True], norms[False]))
        return torch.stack([counted, counted + others])

    @torch.no_grad()
    def step(self, factor: float, step: int, lr: float, beta1: float, beta2: float,
             weight_decay: float) -> None:
        """AdamW number `step` (from 1) on what this rank keeps, with the gradients times `factor`;
        then all replicas have the new parameters. Matrices decay, vectors do not (Loshchilov and
        Hutter 2019, algorithm 2)."""
        syncs, grads = [], []
        for bucket in self.buckets:
            grad = bucket.shard["grad"].mul_(factor)
            offload = bucket.shard["master"].device != grad.device
            grads.append(start_to_host(grad) if offload else (grad, None))
        for bucket, (grad, arrived) in zip(self.buckets, grads):
            master, *moments = (bucket.shard[n] for n in ("master", "exp_avg", "exp_avg_sq"))
            if arrived is not None:     # the next buckets' gradients come while AdamW runs
                arrived.synchronize()
            for decay, matrices in ((weight_decay, True), (0.0, False)):
                ranges = [here for spec, here, _ in bucket.shard_ranges
                          if (len(spec.shape) >= 2) == matrices]
                if ranges:
                    lists = [[x[here] for here in ranges] for x in (master, grad, *moments)]
                    steps = torch.full((len(ranges),), step - 1.0, device=master.device).unbind()
                    adamw(*lists, [], list(steps), fused=True, amsgrad=False, maximize=False,
                          lr=lr, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=decay)
            syncs.append(self._sync_params(bucket))         # while the next bucket is updated
        for work in syncs:
            work.wait()


class _UnshardForBackward(torch.autograd.Function):
    """The end of a block: in backward its parameters must be there again."""

    @staticmethod
    def forward(ctx, y, *arguments):
        ctx.arguments = arguments
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        flat, here, before = ctx.arguments
        flat.unshard(here, prefetch=before)
        return dy, None, None, None


def fully_shard(model: GPT, flat: FlatParameters) -> None:
    """ZeRO 3: wrap the forward of each part of the model (on one stage) in unshard and reshard.

        forward    unshard block i, prefetch i + 1, run, reshard
        backward   unshard block i, prefetch i - 1, run; `_sync` reduces its gradients and reshards

    The tied matrix stays unsharded from the embedding to the head, whose gradients are computed in
    forward. The other parameters of the two, and the last block, stay unsharded until backward.
    """
    ends, halves = flat.buckets[:2], flat.buckets[2:]
    blocks = list(zip(halves[::2], halves[1::2]))

    def run_embed(forward, *args):
        flat.unshard(ends, prefetch=blocks[0])
        return forward(*args)

    def run_block(forward, here, before, after, *args):
        flat.unshard(here, prefetch=after)
        y = _UnshardForBackward.apply(forward(*args), flat, here, before)
        if after or not torch.is_grad_enabled():
            flat.reshard(*here)
        return y

    def run_head(forward, *args):
        y = forward(*args)
        flat.reshard(*ends[:1] if torch.is_grad_enabled() else ends)
        return y

    model.embed.forward = partial(run_embed, model.embed.forward)
    model.head.forward = partial(run_head, model.head.forward)
    for block, here, before, after in zip(model.blocks.values(), blocks, [(), *blocks],
                                          [*blocks[1:], ()]):
        block.forward = partial(run_block, block.forward, here, before, after)


def locate_nonfinite(own_loss: float, flat: FlatParameters) -> dict:
    """Where a number is not finite: the first rank whose own loss is not, or else whose gradients,
    and a parameter with such a gradient: the last of the last stage that has one, which backward
    reaches first. With replicas, the reported rank is not necessarily the source, because gradients
    are summed by then. If all numbers are finite, it is the squares of several gradients together
    (`square_sums`) that are not: the "norm", of no rank."""
    nonfinite = [spec.name for bucket in flat.buckets for spec, here, _ in bucket.shard_ranges
                 if not row_norms(bucket.shard["grad"][here]).isfinite().all()]
    found = all_gather_object([not math.isfinite(own_loss), nonfinite[-1] if nonfinite else None])
    of_loss = [rank for rank, (loss, _) in enumerate(found) if loss]
    of_gradient = [rank for rank, (_, name) in enumerate(found) if name is not None]
    return dict(what="loss" if of_loss else "gradient" if of_gradient else "norm",
                rank=[*of_loss, *of_gradient, None][0],
                parameter=found[of_gradient[-1]][1] if of_gradient else None)


def row_norms(x: torch.Tensor) -> torch.Tensor:
    """The norms of the rows of 4096 of a flat tensor, the last of which may be shorter.

    Their squares are for the caller to add up (`sum_dtype`): one fp32 sum over 10M values can be
    off in its fourth digit.
    """
    end = x.numel() // 4096 * 4096
    rows = torch.linalg.vector_norm(x[:end].view(-1, 4096), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(x[end:]).view(1)])


# ---------------------------------------------------------------------------------------------
# 5. What a layout costs, on paper. `config` is train.Config, by attribute names.
#
#     step = sum(t) + (m - 1) max(t) + data parallelism + AdamW
#
#            m microbatches, t the time of one on each stage, forward and backward (with GPipe first
#            the one, then the other); of data parallelism what backward does not hide
#     t    = FLOPs / (MATRIX of the peak) + PASSES of x through the memory for the rest of a block
#            + the bytes of tp and pp / (LINK of the link's speed), nothing of them hidden
# ---------------------------------------------------------------------------------------------

# Fitted on published runs of up to 18B parameters on A100s and H100s (listed in test_all.py):
MATRIX = 0.57           # of the device's peak is what matrix products reach
LINK = 0.73             # of a link's speed is what collectives and messages reach
PASSES = 260            # how often (B, T, C / tp) numbers cross the memory for the rest of a block
HEADROOM = 0.1          # of a device's memory stays for temporaries, NCCL and fragmentation
# Assumed: seconds that each rank of a ring adds (NCCL's tuning has 3 to 14 microseconds); bytes/s
# of one writer; seconds from a failure until a checkpoint is read.
HOP, DISK, RESTART = 1e-5, 2e9, 300.0
KEPT = ("parameters", "gradients", "masters", "moments")        # all the time


@lru_cache
def stage_specs(cfg: GPTConfig, tp: int, is_first: bool, is_last: bool) -> list[ParamSpec]:
    """The parameters of such a stage if it has one block: all blocks are alike."""
    pp, stage = (1, 0) if is_first and is_last else (3, 0 if is_first else 2 if is_last else 1)
    grid, cfg = Grid(1, pp, tp, stage * tp), replace(cfg, n_layer=pp)
    return param_specs(build_stage(cfg, grid), cfg, grid)


def stage_buckets(cfg: GPTConfig, grid: Grid, zero: int) -> list[tuple[Bucket, int]]:
    """The buckets of this rank's FlatParameters, without tensors: [(bucket, how many like it)], the
    last two a block's."""
    buckets = make_buckets(stage_specs(cfg, grid.tp, grid.is_first, grid.is_last), grid.dp,
                           *((grid.dp, grid.dp_rank) if zero else ()))
    layers = len(stage_layers(cfg.n_layer, grid.pp, grid.stage))
    return list(zip(buckets, [1] * (len(buckets) - 2) + [layers] * 2))


def memory_bytes(cfg: GPTConfig, grid: Grid, config, dtypes: tuple, on_gpu: bool) -> dict:
    """The most bytes of this rank, by kind ("host_..." with `--offload`); dtypes are those of the
    parameters and the masters. KEPT is exact, the others are estimates: what stays between forward
    and backward, and buffers:

        ZeRO 2, 3   gradients of the ends and a block; on the CPU also slices that arrive (from 1)
        ZeRO 3      parameters of the ends and two blocks, gathered
        pipeline    a message comes, another leaves
    """
    (size, wide), zero, each = (dtype.itemsize for dtype in dtypes), config.zero, config.micro_batch
    buckets = stage_buckets(cfg, grid, zero)
    numel = sum(bucket.numel * count for bucket, count in buckets)
    data, grad, own = (numel // (grid.dp if zero >= since else 1) for since in (3, 2, 1))
    once = [bucket.numel for bucket, _ in buckets]          # of the ends and one block
    buffers = wide * sum(once) * (zero >= 2) + size * sum(once + once[-2:]) * (zero == 3)
    buffers += wide * max(once) * (grid.dp - 1) // grid.dp * (zero > 0 and not on_gpu)
    buffers += 2 * (grid.pp > 1) * each * cfg.seq_len * cfg.n_embd * size // (
        grid.tp if grid.sequence_parallel else 1)
    host, schedule = "host_" if config.offload and on_gpu else "", schedule_of(config, grid)
    return {"parameters": size * data, "gradients": wide * grad,
            f"{host}masters": wide * own * (size != wide or host != ""),
            f"{host}moments": 2 * wide * own, "buffers": buffers,
            "logits": loss_bytes(cfg, grid, each, size, "gpu" if on_gpu else "cpu"),
            "activations": activation_bytes(cfg, grid, schedule, each, size, config.recompute)}


def check_memory(cfg: GPTConfig, grid: Grid, config, dtypes: tuple, device: torch.device,
                 local_world: int) -> None:
    """Raise a ValueError if what the processes of this machine would keep all the time is more than
    its memory, or what this rank would keep is more than its GPU's; nothing is allocated."""
    total, on_gpu = Counter(), device.type != "cpu"
    for rank in [grid.rank] if on_gpu else range(local_world):
        sizes = memory_bytes(cfg, Grid(grid.dp, grid.pp, grid.tp, rank), config, dtypes, on_gpu)
        total.update({kind: sizes.get(kind, 0) for kind in KEPT})
    has = math.inf if not hasattr(os, "sysconf") else (         # as on Windows
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if device.type == "cuda":
        has = torch.cuda.mem_get_info(device)[1]
    if total.total() > has:
        parts = ", ".join(f"{kind} {size / 1e9:,.1f} GB" for kind, size in total.items())
        more = "GPUs, give --offload" if device.type == "cuda" else "machines"
        raise ValueError(f"this model would keep {parts} here, but there are {has / 1e9:,.1f} GB: "
                         f"raise --tp, --pp or --zero on more {more}, or take a smaller --model")


def traffic_bytes(cfg: GPTConfig, grid: Grid, config, dtypes: tuple) -> dict:
    """Bytes that this rank sends in a step, by kind. An all-reduce of n ranks counts as a ring's,
    2 (n - 1) / n of its bytes, a reduce-scatter or all-gather as one half of that. x is (B, T, C).

        tp          4 all-reduces of x a block, 1 of the embedding, 1 of the head; 3 numbers a
                    position for the loss. Recomputation: 1 more a block. Sequence parallelism:
                    the input of 2 matrices is gathered again (of 3 with recomputation), and the
                    gradients of what is replicated are summed
        pp          x forward, x backward
        gradients   ZeRO 0: an all-reduce; 1: a reduce-scatter; 2, 3: one for each microbatch
        parameters  ZeRO 1, 2: an all-gather; 3: for each microbatch one forward and another
                    backward, where the ends and the last block are still there
        embedding   the tied matrix's gradient, between the first stage and the last
        world       five numbers in float64 that all ranks agree on
    """
    def ring(ranks, nbytes):
        return (ranks - 1) * nbytes / ranks

    (size, wide), zero, tp = (dtype.itemsize for dtype in dtypes), config.zero, grid.tp
    m, positions = microbatches(config, grid), config.micro_batch * cfg.seq_len
    x, split, ends = positions * cfg.n_embd * size, grid.sequence_parallel, (
        grid.is_first + grid.is_last)
    buckets = stage_buckets(cfg, grid, zero)
    numel = sum(bucket.numel * count for bucket, count in buckets)
    once, tied = sum(bucket.numel for bucket, _ in buckets), buckets[0][0].numel
    replicated = sum(count * (here.stop - here.start) for bucket, count in buckets
                     for spec, here, _ in bucket.shard_ranges if spec.partition_dim is None)
    halves = 2 * ends + buckets[-1][1] * (8 + 2 * split + config.recompute * (2 + split))
    gradients = numel * (2, 1, m, m)[zero]
    if zero == 2 and grid.is_last and grid.pp > 1 and config.pp_schedule == "gpipe":
        gradients -= (m - 1) * tied             # the forwards have added up all of the head's
    return dict(
        tp=m * (halves * ring(tp, x) + 2 * grid.is_last * ring(tp, 3 * wide * positions))
        + 2 * split * ring(tp, wide * replicated),
        pp=m * (2 - ends) * x / (tp if split else 1),
        gradients=ring(grid.dp, wide * gradients),
        parameters=ring(grid.dp, size * (0, numel, numel, m * (2 * numel - once))[zero]),
        embedding=wide * tied / (grid.dp if zero else 1) * (ends > 0 and grid.pp > 1),
        world=2 * ring(grid.world, 5 * 8))


def kinds_of_stages(cfg: GPTConfig, config) -> tuple[list[Grid], list[int]]:
    """The first rank of each kind of stage, and which kind each stage is of."""
    tp, pp = config.tp, config.pp
    stages = [(len(stage_layers(cfg.n_layer, pp, stage)), stage == 0, stage == pp - 1)
              for stage in range(pp)]
    kinds = list(dict.fromkeys(stages))
    return ([Grid(config.world // (tp * pp), pp, tp, stages.index(kind) * tp,
                  config.sequence_parallel) for kind in kinds], list(map(kinds.index, stages)))


def pipeline_seconds(schedule: str, forward: list, backward: list, m: int) -> float:
    """The time of m microbatches through stages that take so long for one. GPipe: the slowest stage
    works, the others add their time once, forward and backward. 1F1B: a stage starts when the first
    microbatch reaches it, and waits for its first and last backward, from all stages behind it,
    if the forwards (or backwards) that it has to do meanwhile are shorter."""
    if schedule == "gpipe":
        return sum(sum(times) + (m - 1) * max(times) for times in (forward, backward))
    both, p = list(map(operator.add, forward, backward)), len(forward)
    return max(sum(both[:s]) + m * both[s] + sum(
        max(0.0, sum(both[s + 1:]) - (p - 1 - s) * times[s]) for times in (forward, backward))
        for s in range(max(0, p - m), p))


def step_seconds(cfg: GPTConfig, grids: list, kinds: list, sent: list, config, dtypes: tuple,
                 device: Device) -> tuple[dict, float]:
    """Seconds of a step by what they go to, which add up, and the bubble: the idle fraction of the
    stages until the last backward. `kinds_of_stages`, and the `traffic_bytes` of each kind."""
    size, zero, tp, pp = dtypes[0].itemsize, config.zero, config.tp, config.pp
    dp, m = grids[0].dp, microbatches(config, grids[0])

    def speed(ranks, stride, adapters=1):
        """Of ranks `stride` apart; what leaves a machine does so by as many of its adapters."""
        inside = config.gpus_per_node % (ranks * stride) == 0 or (
            config.world <= config.gpus_per_node)
        return LINK * (device.link if inside else min(device.link, adapters * device.network))

    pipeline, tensor, data = speed(pp, tp), speed(tp, 1, config.gpus_per_node), speed(
        dp, tp * pp, max(1, config.gpus_per_node // (tp * pp)))
    positions, head = config.micro_batch * cfg.seq_len, 6 * cfg.vocab_size * cfg.n_embd
    plain, block = ((flops_per_token(cfg, again) - head) / cfg.n_layer
                    for again in (False, config.recompute))
    rate = tp * MATRIX * device.peak(size) / positions
    x = positions * cfg.n_embd * size / tp / device.bandwidth
    costs, forward = [], []                     # of a microbatch on each kind of stage
    for grid, out in zip(grids, sent):
        layers = len(stage_layers(cfg.n_layer, pp, grid.stage))
        costs.append(dict(matrices=(layers * block + grid.is_last * head) / rate,
                          passes=layers * PASSES * x * block / plain,
                          tp=out["tp"] / m / tensor, pp=out["pp"] / m / pipeline))
        # A third of a block's work without recomputation is forward, and all of the head's.
        ahead = grid.is_last * head / rate
        forward.append(ahead + (sum(costs[-1].values()) - ahead) * plain / block / 3)
    both = [sum(cost.values()) for cost in costs]
    backward, slowest = [t - f for t, f in zip(both, forward)], both.index(max(both))
    span = pipeline_seconds(config.pp_schedule, [forward[k] for k in kinds],
                            [backward[k] for k in kinds], m)
    exposed, t, last = 0.0, both[slowest], backward[slowest]
    for grid, out in zip(grids, sent):
        hops = HOP * (dp - 1) * (2 * len(stage_layers(cfg.n_layer, pp, grid.stage)) + 2)
        gradients = out["gradients"] / data + hops * (2, 1, m, m)[zero]
        parameters = out["parameters"] / data + hops * (0, 1, 1, 2 * m)[zero]
        late = out["embedding"] / pipeline + parameters * (zero < 3)
        hidden = (last, last, m * last, m * t)[zero]
        exposed = max(exposed, late + max(0.0, gradients + parameters * (zero == 3) - hidden))
    # AdamW reads or writes twelve numbers for each parameter, about.
    numel = sum(bucket.numel * n for bucket, n in stage_buckets(cfg, grids[0], zero))
    update = 12 * dtypes[1].itemsize * numel / (dp if zero else 1) / (
        device.host if config.offload else device.bandwidth)
    return (dict({kind: m * seconds for kind, seconds in costs[slowest].items()}, fill=span - m * t,
                 dp=exposed, update=update), 1 - m * sum(both[k] for k in kinds) / (pp * span))


def goodput(checkpoint: float, speed: float, nodes: float, mtbf_hours: float) -> dict:
    """The fraction of time that makes progress, where each node fails every `mtbf_hours`, with the
    best interval between checkpoints of so many bytes (Daly 2006, equations 20 and 37; Young's of
    1974, sqrt(2 M pause), is its first term).

    Training pauses while rank 0 gathers a checkpoint at `speed` bytes/s; then a thread writes it.
    A failure costs the restart, the reading of a checkpoint, and the progress since the last whole
    one, which is a write's time older than the last.
    """
    M, pause, write = mtbf_hours * 3600 / nodes, checkpoint / speed, checkpoint / DISK
    root, lost = min(1.0, math.sqrt(pause / (2 * M))), RESTART + 2 * write
    interval = max(write, 2 * M * root * (1 + root / 3 + root ** 2 / 9) - pause)
    progress = interval / M * math.exp(-(lost + interval + pause) / M) / -math.expm1(
        -(interval + pause) / M)
    return dict(failure_hours=M / 3600, pause_seconds=pause, write_seconds=write,
                interval_seconds=interval, goodput=progress)


def make_plan(cfg: GPTConfig, config, dtypes: tuple) -> dict:
    """What `config.steps` steps on `config.world` GPUs need, as one flat dict. Memory is that of
    the fullest rank, bytes sent are those of the rank that sends most."""
    device, world, (grids, kinds) = DEVICES[config.gpu], config.world, kinds_of_stages(cfg, config)
    sizes = [memory_bytes(cfg, grid, config, dtypes, True) for grid in grids]
    needed = [sum(size for kind, size in each.items() if kind[:4] != "host") for each in sizes]
    at = needed.index(max(needed))
    sent = [traffic_bytes(cfg, grid, config, dtypes) for grid in grids]
    seconds, bubble = step_seconds(cfg, grids, kinds, sent, config, dtypes, device)
    step, N, tokens = sum(seconds.values()), parameter_count(cfg), config.batch_size * cfg.seq_len
    D, rate, days = config.steps * tokens, tokens / step / world, config.steps * step / 86400
    flops, hardware = flops_per_token(cfg), flops_per_token(cfg, config.recompute)
    gather = LINK * (device.network if world > config.gpus_per_node else device.link)
    layout = ("gpu", "world", "tp", "pp", "micro_batch", "zero", "recompute", "sequence_parallel",
              "pp_schedule", "steps")
    return dict(
        {name: getattr(config, name) for name in layout}, dp=grids[0].dp,
        layers_per_stage=-(-cfg.n_layer // config.pp),
        parameters=N, tokens_per_step=tokens, tokens=D, flops_per_token=flops, flops_6nd=6 * N * D,
        flops_with_attention=flops * D, flops_with_recomputation=hardware * D,
        pf_days=flops * D / 8.64e19, compute_optimal_tokens=20 * N,
        **{f"compute_optimal_parameters_{name}": x
           for name, x in compute_optimal(6 * N * D).items()},
        predicted_loss=chinchilla_loss(N, D),
        **{f"memory_{kind}": size for kind, size in sizes[at].items()}, memory_bytes=needed[at],
        fullest_rank=grids[at].rank, fits=needed[at] <= (1 - HEADROOM) * device.memory,
        **{f"bytes_{kind}": size for kind, size in
           max(sent, key=lambda sizes: sum(sizes.values())).items()},
        **{f"seconds_{kind}": x for kind, x in seconds.items()}, step_seconds=step, bubble=bubble,
        tokens_per_second=rate * world, model_tflops_per_gpu=rate * flops / 1e12,
        hardware_tflops_per_gpu=rate * hardware / 1e12,
        mfu=rate * flops / device.peak(dtypes[0].itemsize), days=days, gpu_hours=days * 24 * world,
        **goodput(3 * dtypes[1].itemsize * N, gather, max(1, world / config.gpus_per_node),
                  config.mtbf_hours))


def search_layouts(cfg: GPTConfig, config, dtypes: tuple, given: dict) -> list[dict]:
    """The plans of the ten fastest layouts that fit, of those with tp inside a machine and
    microbatches of 1 to 16 sequences, and with 1F1B, which takes less time and memory than GPipe.
    What `given` names stays as it is in `config`."""
    divisors = [n for n in range(1, config.world + 1) if config.world % n == 0]
    options = dict(tp=[n for n in divisors if config.gpus_per_node % n == 0],
                   pp=[n for n in divisors if n <= cfg.n_layer], pp_schedule=["1f1b"],
                   micro_batch=[1, 2, 4, 8, 16], zero=range(4), recompute=[False, True],
                   sequence_parallel=[False, True])
    options.update({name: [getattr(config, name)] for name in options.keys() & given.keys()})
    plans = []
    for values in product(*options.values()):
        one = replace(config, **dict(zip(options, values)))
        if one.zero > 0 and one.world == one.tp * one.pp:       # no replicas share anything
            continue
        with suppress(ValueError):
            check_layout(cfg, one.world, one.tp, one.pp, one.batch_size, one.micro_batch, one.zero,
                         one.sequence_parallel)
            plans.append(make_plan(cfg, one, dtypes))
    # Of the sizes of a microbatch the fastest, or of equal ones the smallest.
    plans = sorted((plan for plan in plans if plan["fits"]),
                   key=lambda plan: (plan["step_seconds"], plan["memory_bytes"]))
    best = {}
    for plan in plans:
        best.setdefault(tuple(plan[name] for name in options if name != "micro_batch"), plan)
    if not plans:
        raise ValueError(f"no layout of this model and batch size {config.batch_size} fits "
                         f"{config.world} x {config.gpu}: take more or larger GPUs, --offload, or "
                         f"a batch size that more layouts divide")
    return list(best.values())[:10]


# ---------------------------------------------------------------------------------------------
# 6. Processes: errors, start, signals and devices
# ---------------------------------------------------------------------------------------------


class RunError(Exception):
    """The run ends: every rank raises it alike, rank 0 prints the message, and all exit with
    `status` (1: the run failed, 2: a user's mistake)."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


class PeerError(RuntimeError):
    """Another rank is gone, or did not answer within the timeout. The message names the operation
    and the ranks it waited for; `run_schedule` adds the microbatch."""


@contextmanager
def comm_errors(operation: str, group=None):
    """Turn the RuntimeErrors of communication into PeerErrors that name `operation` and, if a group
    is given, its ranks."""
    try:
        yield
    except PeerError:
        raise                               # named already
    except RuntimeError as error:
        if out_of_memory(error):            # not the others' fault
            raise
        ranks = "" if group is None else f" with ranks {dist.get_process_group_ranks(group)}"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", reason)
        raise PeerError(f"{operation}{ranks}: {reason}") from error


def out_of_memory(error: BaseException) -> bool:
    words = "allocate memory|out of memory|ALLOC_FAILED"        # the CPU's; NCCL's; cuBLAS's
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def fatal_message(error: Exception) -> str | None:
    """One line for a lost peer or too little memory; None for any other error, which deserves its
    traceback."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if out_of_memory(error):
        return f"{first}: lower --micro-batch, give --recompute, or raise --zero, --tp or --pp"
    return first if isinstance(error, PeerError) else None


def is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def print_rank0(line: str) -> None:
    """Print one line on rank 0. A closed pipe (`| head`) does not stop the run."""
    if is_rank0():
        try:
            print(line, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def all_gather_object(value) -> list:
    """The value of every rank, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    with comm_errors("exchange with all ranks"):
        dist.all_gather_object(values, value)
    return values


def all_ranks(action: Callable, status: int = 2):
    """Run action() on every rank and return its result here. If it fails on any rank, every rank
    raises the same RunError, with the first failing rank's reason; `status` is that of a ValueError
    or OSError."""
    result = failure = None
    try:
        result = action()
    except (ValueError, OSError, RunError) as error:
        failure = str(error), getattr(error, "status", status)
    for rank, failure in enumerate(all_gather_object(failure)):
        if failure is not None:
            raise RunError(f"rank {rank}: " * (rank > 0) + failure[0], failure[1])
    return result


def on_rank0(action: Callable):
    """Run action() on rank 0 alone and return its result on every rank; errors as `all_ranks`."""
    return all_gather_object(all_ranks(lambda: action() if is_rank0() else None))[0]


def assert_equal_across_ranks(value, message: str) -> None:
    """Every rank raises a RunError with this message unless all have the same value."""
    values = all_gather_object(value)
    if any(v != values[0] for v in values):
        raise RunError(message, 2)


def rendezvous(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store through which the ranks of this start find each other.

    torchrun's own store outlives a restart of the group and still holds the addresses of dead
    processes (pytorch issue 135712), and its count of restarts differs between machines. So each
    process makes up a name, rank 0 lists the names it sees until every other process confirms that
    the list has its own, and rank 0's name becomes the prefix of all keys.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"rank {rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            names = [store.get(f"rank {r}").decode() for r in range(world)]
            store.set("names", json.dumps(names))
            confirmations = [f"{own} {name}" for name in names[1:]]
            done = not confirmations or store.check(confirmations)
        else:
            names = json.loads(store.get("names"))
            done = len(names) == world and names[rank] == own
            if done:
                store.set(f"{names[0]} {own}", "")
        if done:
            return dist.PrefixStore(names[0], store)
        time.sleep(0.02)
    raise RuntimeError(f"no answer in {timeout.total_seconds():.0f} s")


def pick_device(name: str, local_rank: int, local_world: int, visible: str = "",
                on_mps: bool = True) -> torch.device:
    """This process's device; `auto` is CUDA where there is one, or else MPS (Apple's) if the run
    can be there. `visible`, CUDA_VISIBLE_DEVICES: a launcher may show each process one GPU of its
    own. Raises ValueError."""
    here = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if name == "auto":
        name = next(n for n in here if here[n] and (n != "mps" or on_mps))
    if not here[name]:
        raise ValueError(f"--device {name}, but torch finds no {name.upper()} device here: leave "
                         f"the flag out, or give --device cpu")
    if name != "cuda":
        return torch.device(name)
    count = torch.cuda.device_count()
    own = count == 1 and bool(visible)
    if local_world > count and not own:
        raise ValueError(f"{local_world} processes on this machine, but {count} CUDA devices: "
                         f"lower --nproc_per_node, or give --device cpu")
    device = torch.device("cuda", 0 if own else local_rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")      # fp32 products by TF32: several times as fast
    return device


def assert_own_gpu(device: torch.device) -> None:
    """Every rank raises a RunError if two processes have the same GPU."""
    if device.type == "cuda":
        gpus = all_gather_object(str(torch.cuda.get_device_properties(device).uuid))
        if len(set(gpus)) < len(gpus):
            raise RunError("two processes share a GPU: lower --nproc_per_node, or give "
                           "--device cpu", 2)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Of sums that add up many numbers: float64, which MPS does not have."""
    return torch.float32 if device.type == "mps" else torch.float64


class StopSignal:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one, half a second later or more (a
    launcher may forward what the terminal has sent already), ends at once. Python handles signals
    between two of its instructions: a wait for a rank that hangs ends by --timeout or SIGKILL."""

    def __init__(self):
        self.requested = None           # when the first signal came
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, *_) -> None:
        again = self.requested is not None
        if again and time.monotonic() - self.requested < 0.5:
            return
        self.requested = time.monotonic()
        if is_rank0():
            with suppress(OSError):     # a closed pipe; `print` must not be entered twice
                os.write(1, b"ended without saving\n" if again else b"saving after this step; a "
                            b"second signal ends at once, without saving\n")
        if again:
            os._exit(1)


@contextmanager
def process_group(rank: int, world: int, device: torch.device, timeout: timedelta):
    """Start torch.distributed for the block, with gloo on the CPU and NCCL on GPUs; one process
    needs none."""
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with comm_errors("start of the process group"):
            dist.init_process_group(backend, store=rendezvous(rank, world, timeout), rank=rank,
                                    world_size=world, timeout=timeout)
    yield
    if world > 1:
        dist.destroy_process_group()


def start_to_host(x: torch.Tensor) -> tuple:
    """Begin to copy x from its device to the host -> (the copy, in pinned memory on CUDA; an event
    that says when it is there)."""
    host, done = x.to("cpu", non_blocking=True), torch.get_device_module(x.device).Event()
    done.record()
    return host, done


def to_host(x: torch.Tensor, timeout: float) -> torch.Tensor:
    """x on the host, once the device has computed it; PeerError if it has not in `timeout` seconds.
    A plain copy would wait for ever for a rank that hangs: Python handles no signal meanwhile, and
    NCCL's own watchdog takes minutes."""
    if x.device.type == "cpu":
        return x
    host, done = start_to_host(x)
    deadline = time.monotonic() + timeout
    while not done.query():
        if time.monotonic() > deadline:
            raise PeerError(f"the device has not ended its work in {timeout} s: a rank that it "
                            f"waits for is gone or hangs")
        time.sleep(1e-4)
    return host


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a pipeline schedule, count what it costs.")
    parser.add_argument("--pp", type=int, default=4, help="stages")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--pp-schedule", default="gpipe", choices=list(SCHEDULES))
    parser.error = lambda message: parser.exit(2, f"parallel.py: {message}\n")
    args = parser.parse_args()
    if args.pp < 1 or args.microbatches < 1:
        parser.error("--pp and --microbatches must be at least 1")
    p, m = args.pp, args.microbatches
    schedules = [SCHEDULES[args.pp_schedule](s, p, m) for s in range(p)]
    timeline = clock(schedules)
    print(f"{args.pp_schedule}, {p} stages, {m} microbatches; a backward takes two units of time")
    print(f"\n{draw(timeline)}\n\nbubble {bubble(timeline):.1%} of the time, "
          f"(p - 1) / (m + p - 1) = {(p - 1) / (m + p - 1):.1%}")
    print("live activations, in microbatches: "
          + ", ".join(f"stage {s}: {live_activations(x)}" for s, x in enumerate(schedules)))


if __name__ == "__main__":
    main()
