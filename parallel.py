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
                   flops_per_token, initial_value, linear, parameter_count, widen)

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
# columns" cuts dimension 0 here. The vocabulary is cut by rows: a rank looks up the tokens it owns,
# and the loss needs a maximum and two sums over the ranks, never the logits of the others.
#
# Between g and the next f all ranks hold the same activations and do the same work on them. With
# sequence parallelism (Korthikanti et al. 2022, section 4.2.2) each holds T / tp positions there:
# an all-reduce is a reduce-scatter and an all-gather, so f and g take one half each, at its cost:
#
#      f: all-gather forward,     reduce-scatter backward
#      g: reduce-scatter forward, all-gather backward
#
# What is replicated and sees these positions only (LayerNorm, the bias after g, the embedding of
# positions) then has a part of its gradient on each rank: `finish_grad_sync` adds them up.
# ---------------------------------------------------------------------------------------------


def copy_to(x: torch.Tensor, grid: Grid) -> Work:
    """Enter a tensor-parallel region (f forward, g backward): x as it is, since all ranks have it;
    with sequence parallelism gather the positions, (B, T / tp, C) -> (B, T, C)."""
    if not grid.sequence_parallel:
        return Work(x)
    full = x.new_empty(grid.tp, *x.shape)                               # (tp, B, T / tp, C)
    full[grid.tp_rank] = x
    gathered = all_gather(full, grid.group("tp"))
    return Work(full, [gathered], finish=lambda x: x.movedim(0, 1).flatten(1, 2))


def reduce_from(x: torch.Tensor, grid: Grid) -> Work:
    """Leave it (g forward, f backward): the sum of the ranks' x (B, T, C), in place; with sequence
    parallelism only at this rank's positions, (B, T / tp, C)."""
    if not grid.sequence_parallel:
        return all_reduce(x, grid.group("tp"))
    slices = x.unflatten(1, (grid.tp, -1)).movedim(1, 0).contiguous()   # (tp, B, T / tp, C)
    scattered = reduce_scatter(slices, grid.group("tp"))
    return Work(scattered.result, [scattered], finish=lambda x: x.squeeze(0))


class _ReduceFrom(torch.autograd.Function):
    """g: the sum of the ranks' x (B, T, C); may overwrite x."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        if not grid.sequence_parallel:
            ctx.mark_dirty(x)
        return reduce_from(x, grid).wait()

    @staticmethod
    def backward(ctx, dy):
        return copy_to(dy, ctx.grid).wait(), None


class _ColumnParallel(torch.autograd.Function):
    """y = f(x) W^T + b. While the gradient of x is on its way to the other ranks, that of W is
    computed; with sequence parallelism the positions of x are gathered a second time for it."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.has_bias = grid, bias is not None
        return linear(copy_to(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x, weight), grid = ctx.saved_tensors, ctx.grid
        gathered = copy_to(x, grid)
        dx = reduce_from(matmul(dy, weight), grid)
        dy = dy.flatten(0, 1)                                               # (B T, out)
        dw = matmul(dy.t(), gathered.wait().flatten(0, 1))
        return dx.wait(), dw, dy.sum(0) if ctx.has_bias else None, None


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, `widen`ed, in the type of a."""
    wide = widen(a, b)
    if wide[0] is a:
        return torch.matmul(a, b, out=out)
    return torch.matmul(*wide).to(a.dtype) if out is None else out.copy_(torch.matmul(*wide))


def local_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """model.linear without communication. Where that multiplies in fp32, autograd would keep x and
    the weight in fp32 too: _ColumnParallel keeps them in 16 bits."""
    if widen(x)[0] is x:
        return F.linear(x, weight, bias)
    return _ColumnParallel.apply(x, weight, bias, ALONE)


class TensorParallel(nn.Module):
    """Takes over the parameters of a plain module; `partition_dim` says which dimension is cut."""
    partition_dim = {}

    def __init__(self, plain: nn.Module, grid: Grid):
        super().__init__()
        self.weight, self.bias, self.grid = plain.weight, getattr(plain, "bias", None), grid


class ColumnParallelLinear(TensorParallel):
    """(B, T, in), the same everywhere -> (B, T, out / tp): this rank's columns. With sequence
    parallelism, as in the other modules here, what is "the same everywhere" is a slice of T."""
    partition_dim = {"weight": 0, "bias": 0}

    def forward(self, x):
        if self.grid.tp == 1:
            return local_linear(x, self.weight, self.bias)
        return _ColumnParallel.apply(x, self.weight, self.bias, self.grid)


class RowParallelLinear(TensorParallel):
    """(B, T, in / tp), this rank's rows -> (B, T, out), the same everywhere. Every rank holds the
    bias, which is added once, after the sum."""
    partition_dim = {"weight": 1}

    def forward(self, x):
        if self.grid.tp == 1:
            return local_linear(x, self.weight, self.bias)
        return _ReduceFrom.apply(local_linear(x, self.weight), self.grid) + self.bias


# The token matrix is by far the largest parameter, and an embedding reads few of its rows. Its
# gradient is therefore added where FlatParameters keeps it (`main_grad`, as in Megatron-LM) and
# never exists as a tensor of its own: with a vocabulary of 50304 a step takes 0.80 of the time in
# fp32 and 0.70 in bf16 (6 layers of width 384). For other matrices this gained nothing: 0.98, 1.08.


class _Lookup(torch.autograd.Function):
    """F.embedding, whose gradient is added to the rows looked up alone."""

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


class VocabParallelEmbedding(TensorParallel):
    """tokens (B, T) -> (B, T, C): rows of other ranks count as zero here, and g adds them."""
    partition_dim = {"weight": 0}

    def forward(self, tokens):
        rows = self.weight.shape[0]
        local = tokens - self.grid.tp_rank * rows                       # row number on this rank
        mine = (local >= 0) & (local < rows)
        x = _Lookup.apply(local.where(mine, 0), self.weight)            # (B, T, C)
        return _ReduceFrom.apply(x * mine.unsqueeze(-1), self.grid)


class PositionEmbedding(TensorParallel):
    """positions 0, 1, ... n - 1 -> (n, C): counted from where this rank's slice starts."""

    def forward(self, positions):
        first = self.grid.tp_rank * len(positions) if self.grid.sequence_parallel else 0
        return F.embedding(positions + first, self.weight)


LOGITS = {"cpu": 2 ** 24, "gpu": 2 ** 28}       # logits that exist at a time; measured on the CPU


def positions_at_once(positions: int, vocab: int, device_type: str) -> int:
    """Of how many positions the logits of `vocab` tokens exist at a time."""
    return min(positions, max(1, LOGITS["cpu" if device_type == "cpu" else "gpu"] // vocab))


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy in nats of the logits z = f(x) W^T, x (B, T, C) and W (V / tp, C),
    against targets (B, T) of the whole vocabulary. `start` is the first row's token; rows from
    `valid` on are padding. Computed in fp32 or wider, whatever the type of x. Gradients come times
    `scale`.

        loss = log sum_v exp(z_v) - z_target        d loss / d z_v = softmax(z)_v - [v = target]

    Forward also computes the gradients, while each chunk of logits exists, so that neither logits
    nor softmax of all positions ever do. Hence the scale is an argument (None: no gradients), and
    backward, whose upstream gradient must be 1, only hands over that of x: that of W has been added
    to `main_grad`. Three numbers a position cross the ranks.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, start, valid, grid, scale):
        shape, group = x.shape, grid.group("tp")
        x, targets = copy_to(x, grid).wait().flatten(0, 1), targets.flatten()       # (N, C), (N,)
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        dx = None if scale is None else torch.empty_like(x)
        count = positions_at_once(len(x), weight.shape[0], x.device.type)
        logits = x.new_empty(count, weight.shape[0])        # one memory for all chunks
        floats = logits if x.dtype == wide else torch.empty_like(logits, dtype=wide)
        for rows in (slice(i, i + count) for i in range(0, len(x), count)):
            n = len(x[rows])
            z = matmul(x[rows], weight.t(), out=logits[:n])                         # (n, V / tp)
            z[:, valid:] = torch.finfo(z.dtype).min     # (of -inf alone there is no softmax)
            local = targets[rows] - start
            mine = (local >= 0) & (local < z.shape[1])
            target = torch.arange(n, device=x.device), local.where(mine, 0)
            at_target = z[target].to(wide)                                          # (n,)
            highest = z.amax(dim=1).to(wide)
            p = floats[:n].copy_(z)
            torch.softmax(p, 1, out=p)                      # over this rank's columns alone
            own = highest - p.amax(dim=1).log()             # and the log of their sum of exp(z)
            most = all_reduce(own.clone(), group, dist.ReduceOp.MAX).wait()
            share = (own - most).exp()
            total, at_target = all_reduce(torch.stack(
                [share, (at_target - most).where(mine, 0)]), group).wait()
            counted = targets[rows] != IGNORE_INDEX
            loss += (total.log() - at_target).where(counted, 0).sum()
            if scale is not None:
                upstream = counted.to(wide) * scale                                 # (n,)
                factor = upstream * share / total
                dz_target = p[target] * factor - upstream * mine
                p *= factor.unsqueeze(1)
                dz = logits[:n].copy_(p)
                dz[target] = dz_target.to(dz.dtype)
                matmul(dz, weight, out=dx[rows])
                add_product(weight.main_grad(), dz, x[rows])
        if scale is not None:
            dx = reduce_from(dx.view(shape[0], -1, shape[2]), grid).wait()
            # A slice of the positions would keep the memory of all.
            ctx.save_for_backward(dx.clone() if grid.sequence_parallel else dx)
        return loss

    @staticmethod
    def backward(ctx, one):
        return *ctx.saved_tensors, *[None] * 6


def add_product(grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """grad (out, in) += dy^T x, of dy (N, out) and x (N, in), by the matrix product itself where
    the types are equal, or 16 bit and fp32 on CUDA; else in parts that stay in the cache."""
    dy, x = widen(dy, x)
    if grad.dtype == x.dtype:
        grad.addmm_(dy.t(), x)
    elif grad.device.type == "cuda":
        torch.addmm(grad, dy.t(), x, out_dtype=grad.dtype, out=grad)
    else:
        for rows, columns in zip(grad.split(2048), dy.split(2048, dim=1)):
            rows += columns.t() @ x


class VocabParallelHead(TensorParallel):
    """x (B, T, C) and targets (B, T) -> the summed loss of model.Head, the same on every rank; a
    new loss must change both. Its gradients come times `self.scale`. `self.norms` adds up the norms
    of x over its positions."""
    partition_dim = {"weight": 0}

    def __init__(self, head: nn.Module, grid: Grid):
        super().__init__(head, grid)
        self.norm, self.vocab_size, self.scale, self.norms = head.norm, head.vocab_size, 1.0, 0.0

    def forward(self, x, targets):
        wide = torch.promote_types(x.dtype, torch.float32)
        self.norms += torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).sum()
        rows = self.weight.shape[0]
        start = self.grid.tp_rank * rows
        valid = min(max(self.vocab_size - start, 0), rows)
        return VocabParallelCrossEntropy.apply(
            self.norm(x), self.weight, targets, start, valid, self.grid,
            self.scale if torch.is_grad_enabled() else None)


# Which module of model.py becomes what.
TP_PLAN = {
    "attn.qkv": ColumnParallelLinear,
    "attn.proj": RowParallelLinear,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
    "embed.token": VocabParallelEmbedding,
    "embed.position": PositionEmbedding,
    "head": VocabParallelHead,
}
STACKED = {"attn.qkv": 3}       # q over k over v: each third is cut by heads on its own
TIED = {"head.weight": "embed.token.weight"}    # one matrix: its name in the head, its global name


@dataclass
class ParamSpec:
    """One parameter: its global name, its shape, and how tensor parallelism cuts it."""
    name: str
    shape: tuple                # of the full parameter, without padding
    padded_rows: int            # shape[0] with the padding
    partition_dim: int | None   # the dimension that is cut; None: every rank has all of it
    stride: int                 # how many matrices are stacked in that dimension
    tp: int
    owners: list                # (module, attribute) that hold it: two for a weight tied in a stage
    is_tied_copy: bool          # the last stage's copy of a weight tied across stages

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
        stacked = full.unflatten(dim, (self.stride, self.tp, -1))
        return stacked.select(dim + 1, tp_rank).flatten(dim, dim + 1)

    def unshard(self, shards: list) -> torch.Tensor:
        """The shards of all tensor-parallel ranks -> full parameter."""
        if self.partition_dim is None:
            return shards[0]
        dim = self.partition_dim
        stacked = [shard.unflatten(dim, (self.stride, -1)) for shard in shards]
        return torch.cat(stacked, dim + 1).flatten(dim, dim + 1)[:self.shape[0]]


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
    for name, module in list(model.named_modules()):
        for suffix, parallel_module in TP_PLAN.items():
            if name.endswith(suffix):
                model.set_submodule(name, parallel_module(module, grid))
    for block in model.blocks.values():
        block.attn.dot_product.stream = grid.tp_rank        # other heads draw other masks
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
    count = positions_at_once(micro_batch * cfg.seq_len, vocab, device)
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
# 4. Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020)
#
# Every replica trains on its share of the batch. The gradients are summed over the replicas, so all
# of them make the same update and stay equal. This is its plainest form, which a test runs:
# ---------------------------------------------------------------------------------------------


def plain_step(model, optimizer, tokens, targets):
    """tokens, targets (B, T): the whole batch. Each rank trains on its share of the rows."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    loss = model(tokens.chunk(dp)[rank], targets.chunk(dp)[rank])   # a sum over this rank's tokens
    (loss / targets.numel()).backward()                             # the mean over all tokens ...
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)                             # ... once these are summed
    optimizer.step()                                                # on every rank the same


# What follows departs from it, one number at a time; the code's comments carry the numbers. There
# are m microbatches; the counts are those of GPT-2 124M, the bytes those of 16 bits (table below).
#
#   1  microbatches add up, one sync a step         1/m of the traffic            prepare_grad_sync
#   2  parameters are views into flat buckets       26 messages, not 148                     Bucket
#   3  gradients add up in the masters' type        bf16 sums stall at 256 terms        _grad_ready
#   4  a hook starts a full bucket's all-reduce     24 of 26 overlap backward      _start_grad_sync
#   5  all of them are awaited at the end           no hook blocks                 finish_grad_sync
#   6  the tied matrix has a bucket of its own      it holds up no other               make_buckets
#   7  ZeRO 1: a replica updates one shard          12 of 18 bytes / dp            _start_grad_sync
#   8  ZeRO 2: and keeps one shard of gradients     4 more bytes / dp              _start_grad_sync
#   9  ZeRO 3: and of parameters                    2 more bytes / dp                   fully_shard
#  10  one AdamW on the slices of all buckets       2 calls, not 52                      adamw_step
#  11  masters, moments and AdamW on the host       6 of 18 bytes on the GPU                   step
#  12  the norm counts shared parameters once       clips as one process does    grad_norm_squares
#
# The buckets of a rank are the tied matrix, the other parameters of the ends of the model, and two
# for each block. Backward fills `grad` from the right; every rank communicates in that order.
#
#     data    | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |     parameters are views
#     grad    | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |     gradients add up here
#
# ZeRO (Rajbhandari et al. 2020) cuts each bucket into dp shards, and replica r keeps shard r. Its
# stage, a number unrelated to the stages of a pipeline, says which tensors are sharded. A rank
# sends (dp - 1) / dp of the bytes in the last column.
#
#                                                  bytes a parameter                  sent a step,
#     ZeRO    masters, moments    grad     data     16 bits      fp32 (its own master)   16 bits
#       0     full                full     full     18           16                      8
#       1     shard               full     full     6 + 12/dp    8 + 8/dp                4 + 2
#       2     shard               shard    full     2 + 16/dp    4 + 12/dp               4m + 2
#       3     shard               shard    shard    18/dp        16/dp                   4m + 4m
#
#     1   the all-reduce becomes a reduce-scatter; AdamW updates the shard; an all-gather follows.
#         AdamW is elementwise, so a shard may begin and end inside a matrix
#     2   every microbatch's bucket is reduce-scattered, added to the shard, and freed
#     3   a block's parameters are gathered before use, forward and backward, and freed after; the
#         next block's travel meanwhile (FSDP, Zhao et al. 2023)


def round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


class Bucket:
    """Departure 2: parameters that are communicated together, laid out flat, and padded so that dp
    equal shards make up the bucket.

    data            (numel,) the parameters are views into it; ZeRO 3 frees and restores its memory
    grad            (numel,) their gradients; from ZeRO 2 on those of one microbatch, otherwise None
    shard           {name: tensor} of what this rank updates, for data, grad, master, exp_avg and
                    exp_avg_sq. Each has numel / num_shards elements. "data" and "grad" are views
                    of the above where the table of ZeRO stages says "full".
    shard_ranges    the parts of parameters in the shard: [(spec, shard_slice, param_slice)], where
                    shard[name][shard_slice] belongs to parameter.flatten()[param_slice]
    pending_grads   number of gradients that this backward has not computed yet
    unsharding      ZeRO 3: the all-gather of `data` under way, or None
    """

    def __init__(self, specs: list[ParamSpec], dp: int, num_shards: int = 1, shard_rank: int = 0):
        self.specs = specs
        self.data = None
        self.grad = None
        self.shard = {}
        self.pending_grads = 0
        self.unsharding = None

        self.offsets = {}
        end = 0
        for spec in specs:
            self.offsets[spec.name] = end
            end += round_up(spec.numel, 32)             # aligned to 64 bytes, in 16 bits too
        self.numel = round_up(end, 32 * dp)

        length = self.numel // num_shards
        first = shard_rank * length
        self.shard_ranges = []
        for spec in specs:
            offset = self.offsets[spec.name]
            low = max(offset, first)
            high = min(offset + spec.numel, first + length)
            if low < high:
                shard_slice = slice(low - first, high - first)
                param_slice = slice(low - offset, high - offset)
                self.shard_ranges.append((spec, shard_slice, param_slice))

    def view(self, flat: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        """The part of a full bucket that belongs to a parameter, in the parameter's shape."""
        offset = self.offsets[spec.name]
        return flat[offset:offset + spec.numel].view(spec.local_shape)


def param_specs(model: GPT, cfg: GPTConfig, grid: Grid) -> list[ParamSpec]:
    """The parameters of a stage. They depend on the stage alone, so any rank can compute the layout
    of another one (`checkpoint.gather_full_state`)."""
    specs = {}
    for module_name, module in model.named_modules():
        stride = next((n for suffix, n in STACKED.items() if module_name.endswith(suffix)), 1)
        for attribute, parameter in module.named_parameters(recurse=False):
            local_name = f"{module_name}.{attribute}"
            name = TIED.get(local_name, local_name)
            if name in specs:
                specs[name].owners.append((module, attribute))
                continue
            rows = cfg.vocab_size if name == "embed.token.weight" else parameter.shape[0]
            specs[name] = ParamSpec(
                name, (rows, *parameter.shape[1:]), parameter.shape[0],
                getattr(module, "partition_dim", {}).get(attribute), stride, grid.tp,
                [(module, attribute)], is_tied_copy=local_name in TIED and not grid.is_first)
    return list(specs.values())


def make_buckets(specs: list[ParamSpec], dp: int, num_shards: int = 1,
                 shard_rank: int = 0) -> list[Bucket]:
    """The tied matrix; the other parameters of the ends; then each block's attention and MLP, with
    the LayerNorm before it. Departure 6: the tied matrix is alone, because its gradient is complete
    only at the end of backward, and where the ends are two stages their gradients are summed."""
    tied, ends, blocks = [], [], {}
    for spec in specs:
        if spec.name in TIED.values():
            tied.append(spec)
        elif not spec.name.startswith("blocks."):
            ends.append(spec)
        else:
            _, block, module, *_ = spec.name.split(".")
            half = "mlp" if module in ("norm2", "mlp") else "attn"
            blocks.setdefault((int(block), half), []).append(spec)
    groups = [tied, ends]
    groups += [blocks[key] for key in sorted(blocks)]           # "attn" sorts before "mlp"
    return [Bucket(group, dp, num_shards, shard_rank) for group in groups if group]


class FlatParameters:
    """This rank's parameters, gradients, masters and Adam moments, in buckets.

    dtype           of the parameters
    master_dtype    of gradients, masters and moments; where it equals dtype, a parameter is its own
                    master
    zero            stage of ZeRO, 0 to 3
    host            departure 11: the device of masters and moments, where AdamW runs; by default
                    the parameters' device
    """

    def __init__(self, specs: list[ParamSpec], grid: Grid, dtype, master_dtype, device,
                 zero: int = 0, host=None):
        device = torch.device(device)
        host = device if host is None else torch.device(host)
        self.grid, self.zero = grid, zero
        self.num_shards = 1
        self.shard_rank = 0
        if zero > 0:
            self.num_shards = grid.dp
            self.shard_rank = grid.dp_rank
        self.buckets = make_buckets(specs, grid.dp, self.num_shards, self.shard_rank)
        self.buckets_to_sync = []       # those that this backward communicates, the next one last
        self.in_flight = []             # [(bucket, Work)] of gradients
        for bucket in self.buckets:
            self._allocate(bucket, dtype, master_dtype, device, host)
            self._attach(bucket)
            if zero == 3:
                self.reshard(bucket)

    def _allocate(self, bucket: Bucket, dtype, master_dtype, device, host) -> None:
        """Create the bucket's tensors, all zero, of the sizes in the table of ZeRO stages."""
        length = bucket.numel // self.num_shards
        shard = bucket.shard
        bucket.data = torch.zeros(bucket.numel, dtype=dtype, device=device)
        if self.zero < 3:
            shard["data"] = bucket.data.chunk(self.num_shards)[self.shard_rank]
        else:
            shard["data"] = torch.zeros(length, dtype=dtype, device=device)
        if self.zero < 2:
            bucket.grad = torch.zeros(bucket.numel, dtype=master_dtype, device=device)
            shard["grad"] = bucket.grad.chunk(self.num_shards)[self.shard_rank]
        else:
            shard["grad"] = torch.zeros(length, dtype=master_dtype, device=device)
        if dtype == master_dtype and device == host:
            shard["master"] = shard["data"]
        else:
            shard["master"] = torch.zeros(length, dtype=master_dtype, device=host)
        for moment in ("exp_avg", "exp_avg_sq"):
            shard[moment] = torch.zeros(length, dtype=master_dtype, device=host)

    def _attach(self, bucket: Bucket) -> None:
        """Replace the modules' parameters by views into the bucket, and give each two things:

        main_grad    a function that returns the view of bucket.grad where this parameter's gradient
                     adds up (the name is Megatron-LM's). It is a function because from ZeRO 2 on
                     that memory exists only between a backward's first gradient and its sync.
        a hook       `_grad_ready`, which autograd calls when the gradient is complete.
        """
        for spec in bucket.specs:
            # A tied matrix has two owners and becomes two parameters on the same memory. With one,
            # autograd would hold its first gradient until the second came, at backward's end.
            for module, attribute in spec.owners:
                # `.data` has a version counter of its own: ZeRO 3 gathers into this memory between
                # forward and backward, and autograd must not take that for a modified weight.
                parameter = nn.Parameter(bucket.view(bucket.data, spec).data)
                setattr(module, attribute, parameter)
                parameter.main_grad = partial(self._main_grad, bucket, spec)
                parameter.register_post_accumulate_grad_hook(partial(self._grad_ready, bucket))

    # At step 0, or from a checkpoint.

    @torch.no_grad()
    def load(self, name: str, full) -> None:
        """Fill this rank's tensors `name` from full parameters: full(name, shape) -> tensor."""
        for bucket in self.buckets:
            for spec, shard_slice, param_slice in bucket.shard_ranges:
                value = spec.shard(full(spec.name, spec.shape), self.grid.tp_rank)
                bucket.shard[name][shard_slice].copy_(value.flatten()[param_slice])

    def initialize(self, cfg: GPTConfig, seed: int, parameters: dict | None = None) -> None:
        """The state at step 0, with one full parameter in memory at a time. The weights come from
        `parameters` {name: full tensor}, which may have more positions, or from the seed."""
        def initial(name, shape):
            if parameters is None:
                return initial_value(cfg, name, shape, seed)
            return parameters[name][:shape[0]]
        self.load("master", initial)
        for bucket in self.buckets:
            bucket.shard["exp_avg"].zero_()
            bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()

    def sync_params(self) -> None:
        """masters -> parameters, rounded to the parameters' type, on all replicas."""
        works = [self._start_params_sync(bucket) for bucket in self.buckets]
        for work in works:
            work.wait()

    @torch.no_grad()
    def _start_params_sync(self, bucket: Bucket) -> Work:
        data, master = bucket.shard["data"], bucket.shard["master"]
        if master.device != data.device:        # departure 11; pinned, to copy in the background
            pinned = data.device.type == "cuda"
            master = torch.empty_like(master, dtype=data.dtype, pin_memory=pinned).copy_(master)
        if master is not data:
            data.copy_(master, non_blocking=True)
        if self.zero in (1, 2):                 # departures 7 and 8; ZeRO 3 gathers before use
            return all_gather(bucket.data, self.grid.group("dp"))
        return Work(bucket.data)

    # A step: zero_grad, prepare_grad_sync before each backward, finish_grad_sync, the norm, step.

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            if self.zero < 2:
                bucket.grad.zero_()
            else:
                bucket.shard["grad"].zero_()

    def prepare_grad_sync(self, last: bool) -> None:
        """Before each backward. Departure 1: only the `last` of a step communicates; from ZeRO 2 on
        each one does, because a microbatch's gradients are not kept. Everything is a sum: before a
        backward, `run_schedule` divides the loss by the tokens of the whole batch (`scale`)."""
        self.buckets_to_sync = []
        if last or self.zero >= 2:
            self.buckets_to_sync = list(self.buckets)
        for bucket in self.buckets:
            bucket.pending_grads = sum(len(spec.owners) for spec in bucket.specs)

    def _main_grad(self, bucket: Bucket, spec: ParamSpec) -> torch.Tensor:
        """Where a parameter's gradient adds up, in its shape (see `_attach`)."""
        if bucket.grad is None:
            bucket.grad = torch.zeros(bucket.numel, dtype=bucket.shard["grad"].dtype,
                                      device=bucket.data.device)
        return bucket.view(bucket.grad, spec)

    def _grad_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Departures 3 and 4: autograd calls this hook once per parameter and backward, when the
        gradient is complete.

        parameter.grad is None if a Function of section 2 has added the gradient to main_grad itself
        and returned None: autograd calls the hook all the same. Hooks run on the thread and stream
        of the backward, which is the device's default stream. Communication that they start is thus
        ordered after the kernels that computed the gradients; another stream would need events.
        """
        if parameter.grad is not None:
            parameter.main_grad().add_(parameter.grad)
            parameter.grad = None
        bucket.pending_grads -= 1
        # Buckets may fill in another order. All ranks must communicate in the same one.
        while self.buckets_to_sync and self.buckets_to_sync[-1].pending_grads == 0:
            self._start_grad_sync(self.buckets_to_sync.pop())

    def _start_grad_sync(self, bucket: Bucket) -> None:
        """Departures 4 and 7 to 9: start the communication of a full bucket."""
        group = self.grid.group("dp")
        if self.zero == 0:
            self.in_flight.append((bucket, all_reduce(bucket.grad, group)))
            return
        # From ZeRO 2 on a bucket's gradients are None if this microbatch added nothing: the head's
        # come in forward, and GPipe runs all of the forwards before the first backward.
        if bucket.grad is not None:
            # One at a time where it takes memory: on a CPU, buffers for the shards that arrive;
            # from ZeRO 2 on, the bucket itself, which lives until its communication ends.
            if self.zero >= 2 or bucket.grad.device.type == "cpu":
                self._wait_grad_sync()
            self.in_flight.append((bucket, reduce_scatter(bucket.grad, group)))
        if self.zero >= 2:
            bucket.grad = None
        if self.zero == 3:
            self.reshard(bucket)                # this backward does not need it again

    @torch.no_grad()
    def _wait_grad_sync(self) -> None:
        for bucket, work in self.in_flight:
            total = work.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += total
        self.in_flight = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Departure 5: wait for all buckets. Then add up two kinds of gradients of which other
        ranks have a part: the tied matrix's between the two ends of a pipeline (departure 6), and,
        with sequence parallelism, those of parameters that tensor parallelism replicates."""
        assert not self.buckets_to_sync, "a parameter got no gradient"
        self._wait_grad_sync()
        if self.buckets[0].specs[0].name in TIED.values():
            all_reduce(self.buckets[0].shard["grad"], self.grid.group("embedding")).wait()
        if self.grid.sequence_parallel:
            replicated = [bucket.shard["grad"][shard_slice] for bucket in self.buckets
                          for spec, shard_slice, _ in bucket.shard_ranges
                          if spec.partition_dim is None]
            if replicated:
                sums = all_reduce(torch.cat(replicated), self.grid.group("tp")).wait()
                torch._foreach_copy_(replicated, sums.split([len(x) for x in replicated]))

    def grad_norm_squares(self) -> torch.Tensor:
        """Departure 12: sums of squares of this rank's gradients, (2,) of `sum_dtype`: [those that
        count for the global norm, all of them].

        Summed over the world, the first counts each parameter of the whole model once: replicas,
        parameters that tensor parallelism replicates, and the tied matrix's copy are counted on
        another rank. The second is not finite if a gradient of this rank is not.
        """
        counted, others = [], []
        is_replica = self.zero == 0 and self.grid.dp_rank > 0
        for bucket in self.buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                is_replicated = spec.partition_dim is None and self.grid.tp_rank > 0
                pieces = bucket.shard["grad"][shard_slice].split(NORM_PIECE)
                if is_replica or is_replicated or spec.is_tied_copy:
                    others += pieces
                else:
                    counted += pieces
        device = self.buckets[0].data.device
        counted_squares = sum_of_squares(counted, device)
        return torch.stack([counted_squares, counted_squares + sum_of_squares(others, device)])

    @torch.no_grad()
    def step(self, grad_scale: float, step: int, lr: float, beta1: float, beta2: float,
             weight_decay: float) -> None:
        """AdamW update number `step` (from 1) of this rank's shards, with the gradients times
        `grad_scale`; afterwards all replicas have the new parameters. Matrices decay, vectors do
        not (Loshchilov and Hutter 2019, algorithm 2)."""
        settings = dict(step=step, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
        grads = [bucket.shard["grad"] for bucket in self.buckets]
        torch._foreach_mul_(grads, grad_scale)
        if self.buckets[0].shard["master"].device == grads[0].device:
            adamw_step(self.buckets, grads, **settings)                     # departure 10
            self.sync_params()
            return
        # Departure 11: the next buckets' gradients arrive, and the last one's parameters leave,
        # while AdamW updates a bucket.
        copies = [start_to_host(grad) for grad in grads]
        syncs = []
        for bucket, (grad, arrived) in zip(self.buckets, copies):
            arrived.synchronize()
            adamw_step([bucket], [grad], **settings)
            syncs.append(self._start_params_sync(bucket))
        for work in syncs:
            work.wait()

    # Departure 9: ZeRO 3 frees and restores the memory of `bucket.data`.

    def unshard(self, buckets: list[Bucket], prefetch: list[Bucket] = ()) -> None:
        """Gather the buckets' parameters; begin to gather those of the buckets to `prefetch`."""
        for bucket in (*buckets, *prefetch):
            if bucket.data.untyped_storage().size() == 0:
                bucket.data.untyped_storage().resize_(bucket.data.nbytes)
                bucket.data.chunk(self.num_shards)[self.shard_rank].copy_(bucket.shard["data"])
                bucket.unsharding = all_gather(bucket.data, self.grid.group("dp"))
        for bucket in buckets:
            if bucket.unsharding is not None:
                bucket.unsharding.wait()
                bucket.unsharding = None

    def reshard(self, *buckets: Bucket) -> None:
        """Free the gathered parameters; the shard stays. A view refers to its storage, not to an
        address: the parameters are valid again once `unshard` has resized and filled the storage.
        """
        for bucket in buckets:
            assert bucket.unsharding is None, "a gather would write into freed memory"
            bucket.data.untyped_storage().resize_(0)


NORM_PIECE = 2 ** 20        # elements: a CPU converts each piece to float64 before it adds


def sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Scalar of `sum_dtype`. One fp32 sum over 10M values can be off in its fourth digit."""
    dtype = sum_dtype(device)
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum()


def adamw_step(buckets: list[Bucket], grads: list[torch.Tensor], step: int, lr: float,
               beta1: float, beta2: float, weight_decay: float) -> None:
    """torch's fused AdamW on the parameters' slices of these shards, whose gradients are `grads`:
    one call for matrices, one for vectors."""
    for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
        params, param_grads, exp_avgs, exp_avg_sqs = [], [], [], []
        for bucket, grad in zip(buckets, grads):
            for spec, shard_slice, _ in bucket.shard_ranges:
                if (len(spec.shape) >= 2) == is_matrix:
                    params.append(bucket.shard["master"][shard_slice])
                    param_grads.append(grad[shard_slice])
                    exp_avgs.append(bucket.shard["exp_avg"][shard_slice])
                    exp_avg_sqs.append(bucket.shard["exp_avg_sq"][shard_slice])
        if params:
            steps = torch.full((len(params),), step - 1.0, device=params[0].device).unbind()
            adamw(params, param_grads, exp_avgs, exp_avg_sqs, [], list(steps), fused=True,
                  amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=1e-8,
                  weight_decay=decay)


def fully_shard(model: GPT, flat: FlatParameters) -> None:
    """Departure 9: wrap the forward of each part of the model (on one stage) in unshard and
    reshard.

        forward    unshard block i, prefetch i + 1, run, reshard
        backward   unshard block i, prefetch i - 1, run; _start_grad_sync reduces and reshards

    The tied matrix stays unsharded from the embedding to the head, whose gradients are computed in
    forward. The other parameters of the two, and the last block, stay unsharded until backward.
    """
    tied, ends, *halves = flat.buckets
    blocks = list(zip(halves[::2], halves[1::2]))

    def run_embed(forward, *args):
        flat.unshard([tied, ends], prefetch=blocks[0])
        return forward(*args)

    def run_block(forward, current, previous, following, *args):
        flat.unshard(current, prefetch=following)
        y = forward(*args)
        if y.requires_grad:         # the hook runs when y's gradient is there, before the block's
            y.register_hook(lambda dy: flat.unshard(current, prefetch=previous))
        if following or not y.requires_grad:
            flat.reshard(*current)
        return y

    def run_head(forward, *args):
        y = forward(*args)
        flat.reshard(tied)
        if not torch.is_grad_enabled():
            flat.reshard(ends)
        return y

    model.embed.forward = partial(run_embed, model.embed.forward)
    model.head.forward = partial(run_head, model.head.forward)
    for block, current, previous, following in zip(
            model.blocks.values(), blocks, [(), *blocks], [*blocks[1:], ()]):
        block.forward = partial(run_block, block.forward, current, previous, following)


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
