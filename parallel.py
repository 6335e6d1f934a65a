"""Rank layout and process groups; tensor, pipeline and data parallelism; ZeRO.

    1. Ranks                   their grid, its process groups, and the collectives
    2. Tensor parallelism      each matrix is split over ranks; sequence parallelism
    3. Pipeline parallelism    layers are split over ranks; schedules, and a tool that draws them
    4. Data parallelism, ZeRO  the batch is split over replicas; ZeRO shards their state
    5. Processes               errors, start, signals and devices

Each of sections 2 to 4 starts with a minimal version, which only a test runs, then lists how the
real code differs and why: TP1 to TP6, PP1 to PP8, DP1 to DP10. Comments refer to these names.

Invariant: the same seed and the same global batch give the same loss, gradients and gradient norm
in every layout, up to the order of additions. One process is the layout 1 x 1 x 1: a collective
over a single rank does nothing.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.

    python parallel.py --pp 4 --microbatches 8      # draw a schedule; count bubble and activations
"""
import copy
import json
import math
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.adamw import adamw     # the function: the class imports a compiler, for seconds
from torch.utils.checkpoint import checkpoint

from model import (GPT, IGNORE_INDEX, Dropout, GPTConfig, ceil_div, initial_value, linear,
                   multiplies_in_fp32, upcast_for_matmul)

# ---------------------------------------------------------------------------------------------
# 1. Ranks
#
# The ranks form an array (dp, pp, tp) whose last dimension is the fastest. For dp 2, pp 2, tp 2:
#
#                     stage 0     stage 1
#       replica 0     0   1       2   3          tensor parallel    (0 1) (2 3) (4 5) (6 7)
#       replica 1     4   5       6   7          pipelines          (0 2) (1 3) (4 6) (5 7)
#                                                data parallel      (0 4) (1 5) (2 6) (3 7)
#
# Tensor parallelism communicates most (four all-reduces per block and microbatch: two forward, two
# backward), so its ranks are adjacent and share a machine. Data parallelism reduces gradients once
# a step (ZeRO 2 and 3: a microbatch) and may cross the network (Narayanan et al. 2021, section 3).
#
# Ranks a and b have two slices each. An all-reduce is a reduce-scatter, then an all-gather:
#
#                before      reduce-scatter      then all-gather     or all-reduce, from "before"
#       rank a   a0 a1       a0+b0  -            a0+b0  a1+b1        a0+b0  a1+b1
#       rank b   b0 b1       -      a1+b1        a0+b0  a1+b1        a0+b0  a1+b1
# ---------------------------------------------------------------------------------------------


class Grid:
    """The layout, this rank's place in it, and its process groups (None where it is alone). With
    `sequence_parallel`, a rank holds T / tp positions outside the tensor-parallel layers; with
    `chunks`, so many parts of the model, which take turns (interleaved 1F1B)."""

    def __init__(self, dp: int, pp: int, tp: int, rank: int = 0, sequence_parallel: bool = False,
                 chunks: int = 1):
        self.dp, self.pp, self.tp, self.rank, self.chunks = dp, pp, tp, rank, chunks
        self.world = dp * pp * tp
        self.hosts = [socket.gethostname()] * self.world        # each rank's machine
        self.ranks = torch.arange(self.world).view(dp, pp, tp)
        self.dp_rank, rank_in_replica = divmod(rank, pp * tp)
        self.stage, self.tp_rank = divmod(rank_in_replica, tp)
        self.is_first = self.stage == 0
        self.is_last = self.stage == pp - 1
        self.sequence_parallel = sequence_parallel
        self.groups = dict.fromkeys(("tp", "dp", "pp", "embedding", "world"))


def make_grid(world: int, tp: int, pp: int, rank: int, sequence_parallel=False,
              timeout: timedelta | None = None, device=torch.device("cpu"), chunks=1) -> Grid:
    """The grid of `world` ranks, with process groups by gloo or, on GPUs, NCCL; a group's ranks
    create it together. An operation waits `timeout` for another rank (None: 30 minutes)."""
    grid = Grid(world // (tp * pp), pp, tp, rank, sequence_parallel, chunks)
    grid.hosts = all_gather_object(socket.gethostname())
    pipelines = grid.ranks.permute(0, 2, 1).reshape(-1, pp)
    members = {
        "tp": grid.ranks.reshape(-1, tp),                           # share each matrix
        "dp": grid.ranks.permute(1, 2, 0).reshape(-1, grid.dp),     # hold the same weights
        "pp": pipelines,                                            # share the layers
        "world": grid.ranks.reshape(1, world),
        # Last: torch counts a rank's groups to name the next one, and middle stages have no such.
        "embedding": pipelines[:, [0, -1]],     # hold the tied matrix (one rank twice if pp is 1)
    }
    backend = "gloo" if device.type == "cpu" else "nccl"
    group_timeout = timeout
    if backend == "nccl" and timeout is not None:
        group_timeout *= 2          # NCCL counts from the start, to_host from its later reading
    for name, rows in members.items():
        for ranks in rows.tolist():
            if rank in ranks and len(set(ranks)) > 1:
                grid.groups[name] = dist.new_group(
                    ranks, timeout=group_timeout, backend=backend, use_local_synchronization=True,
                    group_desc=f"ranks {ranks}{on_hosts(ranks, grid.hosts)}")
    if device.type != "cpu":
        connect(grid, device)
    # For checkpoints, which a thread sends while training goes on. All ranks make it, so that its
    # name does not depend on the count. It stays behind `connect`: gloo cannot sum GPU tensors.
    if world > 1:
        grid.groups["save"] = dist.new_group(timeout=timeout, backend="gloo")
    return grid


def on_hosts(ranks: list[int], hosts: list[str]) -> str:
    """" on node1, node2", the machines of these ranks; "" if the whole job is on one machine."""
    if len(set(hosts)) == 1:
        return ""
    return " on " + ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))


def check_grid(world: int, config) -> None:
    """Raise a ValueError that names the numbers if no model can run in this layout."""
    tp, pp, schedule, chunks = config.tp, config.pp, config.pp_schedule, config.pp_chunks
    if world % (tp * pp):
        raise ValueError(f"{world} processes are not divisible by tp {tp} x pp {pp} = {tp * pp}; "
                         f"start a multiple of {tp * pp} (torchrun --nproc_per_node)")
    if config.zero == 3 and pp > 1:
        raise ValueError(f"zero 3 with pp {pp} would gather every block again for each microbatch "
                         f"of the pipeline: use zero 2, or pp 1")
    if config.sequence_parallel and tp == 1:
        raise ValueError("sequence parallelism splits the positions over tensor-parallel ranks, "
                         "but tp is 1: give --tp 2 or more")
    if schedule != "interleaved" and chunks > 1:
        raise ValueError(f"--pp-chunks {chunks} requires --pp-schedule interleaved, not {schedule}")
    if schedule == "interleaved" and min(pp, chunks) < 2:
        raise ValueError(f"--pp-schedule interleaved requires --pp and --pp-chunks of 2 or more, "
                         f"not {pp} and {chunks}")
    if schedule == "zb-h1" and (pp == 1 or config.zero == 2 or config.recompute or config.compile):
        raise ValueError("--pp-schedule zb-h1 requires --pp 2 or more, and cannot be combined "
                         "with --zero 2, --recompute or --compile: drop these, or use 1f1b")


def check_layout(cfg: GPTConfig, world: int, batch: int, config) -> None:
    """Raise a ValueError that names the numbers if this job cannot run; no communication."""
    check_grid(world, config)
    tp, pp, chunks, micro_batch = config.tp, config.pp, config.pp_chunks, config.micro_batch
    dp = world // (tp * pp)
    if config.sequence_parallel and cfg.seq_len % tp:
        raise ValueError(f"sequence parallelism: seq_len {cfg.seq_len} is not divisible by tp {tp}")
    if cfg.n_head % tp:
        raise ValueError(f"n_head {cfg.n_head} is not divisible by tp {tp}")
    if cfg.padded_vocab % tp:
        raise ValueError(f"the padded vocabulary {cfg.padded_vocab} is not divisible by tp {tp}")
    if cfg.n_layer < pp * chunks:
        raise ValueError(f"n_layer {cfg.n_layer} is less than pp {pp} x pp-chunks {chunks}: a "
                         f"stage would be empty")
    if batch % (dp * micro_batch):
        raise ValueError(f"batch size {batch} is not divisible by dp {dp} x micro-batch "
                         f"{micro_batch} = {dp * micro_batch}")
    if chunks > 1 and batch // (dp * micro_batch) % pp:
        raise ValueError(f"{batch // (dp * micro_batch)} microbatches are not divisible by pp "
                         f"{pp}, as the interleaved schedule requires: change --batch-size, its "
                         f"ramp or --micro-batch")


@dataclass
class Work:
    """Communication under way. `wait` waits for it and returns finish(result)."""
    result: torch.Tensor | None
    handles: list = field(default_factory=list)         # of torch.distributed
    operation: str = ""                                 # for errors, with the ranks of the group
    group: object = None
    finish: Callable = lambda result: result
    seconds_waited = 0.0        # of the class: total over all waits of this process

    def wait(self) -> torch.Tensor:
        if self.handles:
            started = time.perf_counter()
            with comm_errors(self.operation, self.group):
                for handle in self.handles:
                    handle.wait()
            Work.seconds_waited += time.perf_counter() - started
        return self.finish(self.result)


def _exchange(outgoing: list, incoming: list, group) -> list:
    """Send outgoing[r] to every other rank r of the group and receive incoming[r] from it; returns
    the handles. All ranks must start exchanges in the same order: gloo pairs messages of equal tag
    by order."""
    others = [r for r in range(group.size()) if r != group.rank()]
    return ([dist.isend(outgoing[r], group=group, group_dst=r) for r in others]
            + [dist.irecv(incoming[r], group=group, group_src=r) for r in others])


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> Work:
    """Sum x (or apply `op`) over the group, in place. Two CPU ranks swap small tensors directly, in
    half the time of gloo's all-reduce (`nano` on 2 x 2 x 2 ranks: a step is 10% faster)."""
    if group is None:
        return Work(x)
    small = x.device.type == "cpu" and x.nbytes <= 2 ** 20
    with comm_errors("all-reduce", group):
        if small and group.size() == 2 and op == dist.ReduceOp.SUM:
            theirs = torch.empty_like(x)
            handles = _exchange([x] * 2, [theirs] * 2, group)       # uses the other rank's entry
            return Work(theirs, handles, "all-reduce", group, finish=x.add_)
        return Work(x, [dist.all_reduce(x, op, group, async_op=True)], "all-reduce", group)


def reduce_scatter(x: torch.Tensor, group) -> Work:
    """Cut x along dimension 0 into a slice for each rank. This rank's becomes the sum over ranks,
    in place. On the CPU each rank sends every other one its slice: gloo's own is an all-reduce of
    a copy, with twice the traffic and memory."""
    if group is None:
        return Work(x)
    slices = x.chunk(group.size())
    rank = group.rank()
    with comm_errors("reduce-scatter", group):
        if x.device.type != "cpu":
            handles = [dist.reduce_scatter_single(slices[rank], x, group=group, async_op=True)]
            return Work(slices[rank], handles, "reduce-scatter", group)
        received = [torch.empty_like(slices[rank]) for _ in slices]
        handles = _exchange(slices, received, group)
    del received[rank]                  # no rank sends to itself

    def add_received(total):
        for term in received:
            total += term
        return total
    return Work(slices[rank], handles, "reduce-scatter", group, add_received)


def all_gather(x: torch.Tensor, group, finish: Callable = lambda x: x) -> Work:
    """Copy each rank's slice of x to all ranks, in place: the reverse of `reduce_scatter`. On the
    CPU by messages too, because gloo gathers into a copy."""
    if group is None:
        return Work(x, finish=finish)
    slices = x.chunk(group.size())
    rank = group.rank()
    with comm_errors("all-gather", group):
        if x.device.type != "cpu":
            handles = [dist.all_gather_single(x, slices[rank], group=group, async_op=True)]
        else:
            handles = _exchange([slices[rank]] * len(slices), slices, group)
    return Work(x, handles, "all-gather", group, finish)


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
#   f: identity forward,   all-reduce backward   (x is used on both ranks, so its gradient is a sum)
#   g: all-reduce forward, identity backward     (y is a sum, so each term has the gradient of y)
#
# Attention is cut the same way: each rank has some heads instead of some columns. nn.Linear stores
# its weight as (out, in), so "by columns" cuts dimension 0. `plain_mlp` is the whole technique:
# ---------------------------------------------------------------------------------------------


class f(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        dist.all_reduce(dx)
        return dx


class g(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


def plain_mlp(x, up, up_bias, down, down_bias):
    """(B, T, C) -> (B, T, C), as model.MLP. Every rank of the default group is given the whole
    matrices (out, in) and uses its part of them."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    h = F.linear(f.apply(x), up.chunk(tp)[rank], up_bias.chunk(tp)[rank])       # (B, T, 4C / tp)
    h = F.gelu(h, approximate="tanh")
    return g.apply(F.linear(h, down.chunk(tp, dim=1)[rank])) + down_bias        # after the sum


# The rest of this section differs from `plain_mlp`:
#
#        difference                             gain                      where
#   TP1  a rank stores only its shard           memory / tp               ParamSpec.shard
#   TP2  sequence parallelism from g to f       activations / tp there    gather_positions
#   TP3  f is fused with the next product       sum of dx runs during dW  _ColumnParallel
#   TP4  the token matrix, the largest, is cut  memory / tp               VocabParallelEmbedding
#   TP5  the loss sends 3 numbers per position  not V / tp logits         chunk_loss
#   TP6  its forward computes its gradients     logits of one chunk       VocabParallelCrossEntropy


@dataclass
class ParamSpec:
    """One parameter: its global name, its shape, and how tensor parallelism cuts it (TP1)."""
    name: str
    shape: tuple                # of the full parameter, without padding
    padded_rows: int            # shape[0] with the padding
    partition_dim: int | None   # the dimension that is cut; None: every rank has all of it
    stride: int                 # how many matrices are stacked in that dimension
    tp: int
    owners: list                # (module, attribute): two if embedding and head are on one stage
    is_tied_copy: bool          # the last stage's copy of a weight tied across stages

    @property
    def local_shape(self) -> list[int]:
        shape = [self.padded_rows, *self.shape[1:]]
        if self.partition_dim is not None:
            shape[self.partition_dim] //= self.tp
        return shape

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, not vectors (Loshchilov and Hutter 2019, algorithm 2)."""
        return len(self.shape) >= 2

    def shard(self, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
        """Full parameter -> one tensor-parallel rank's shard."""
        if self.partition_dim is None:
            return full
        if self.padded_rows > self.shape[0]:            # the vocabulary: rows at the end are zero
            rows = self.padded_rows // self.tp
            mine = full[tp_rank * rows:(tp_rank + 1) * rows]
            padding = rows - len(mine)
            return F.pad(mine, (0, 0, 0, padding)) if padding > 0 else mine     # a view: not read
        dim = self.partition_dim                                    # qkv's weight: (3C, C)
        stacked = full.unflatten(dim, (self.stride, self.tp, -1))   # (3, tp, C / tp, C)
        mine = stacked.select(dim + 1, tp_rank)                     # (3, C / tp, C)
        return mine.flatten(dim, dim + 1)                           # (3C / tp, C)

    def unshard(self, shards: list) -> torch.Tensor:
        """The shards of all tensor-parallel ranks -> full parameter."""
        if self.partition_dim is None:
            return shards[0]
        dim = self.partition_dim
        stacked = [shard.unflatten(dim, (self.stride, -1)) for shard in shards]     # (3, C / tp, C)
        return torch.cat(stacked, dim + 1).flatten(dim, dim + 1)[:self.shape[0]]    # (3C, C)


# TP2: sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Between g and the next f all
# ranks hold the same activations; instead, let each hold T / tp positions. Then f is an all-gather
# forward and a reduce-scatter backward, and g is a reduce-scatter forward and an all-gather
# backward. Backward also gathers x again (_ColumnParallel), so a block sends 5 / 4 of the bytes.
# LayerNorm, the bias after g and the position embedding see T / tp positions, so each rank has a
# part of their gradients: `finish_grad_sync` adds the parts up.


def gather_positions(x: torch.Tensor, grid: Grid) -> Work:
    """What f does in forward and g in backward: nothing. With TP2, gather all positions:
    (B, T / tp, C) -> (B, T, C)."""
    if not grid.sequence_parallel:
        return Work(x)
    parts = x.new_empty(grid.tp, *x.shape)                              # (tp, B, T / tp, C)
    parts[grid.tp_rank] = x
    return all_gather(parts, grid.groups["tp"], lambda parts: parts.transpose(0, 1).flatten(1, 2))


def sum_over_ranks(x: torch.Tensor, grid: Grid) -> Work:
    """What g does in forward and f in backward: sum the ranks' x (B, T, C), in place. With TP2,
    only this rank's positions, (B, T / tp, C), in new memory."""
    if not grid.sequence_parallel:
        return all_reduce(x, grid.groups["tp"])
    B, T, C = x.shape
    parts = x.view(B, grid.tp, T // grid.tp, C).transpose(0, 1)         # (tp, B, T / tp, C)
    # A copy, also at B = 1: reduce_scatter writes into it, and x must not change behind autograd.
    parts = parts.clone(memory_format=torch.contiguous_format)
    return reduce_scatter(parts.view(-1, T // grid.tp, C), grid.groups["tp"])


class _Reduce(torch.autograd.Function):
    """g. Without TP2 it overwrites x, which saves a copy of (B, T, C)."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        if not grid.sequence_parallel:
            ctx.mark_dirty(x)
        return sum_over_ranks(x, grid).wait()

    @staticmethod
    def backward(ctx, dy):
        return gather_positions(dy, ctx.grid).wait(), None


class _ColumnParallel(torch.autograd.Function):
    """y = f(x) W^T + b. TP3: the all-reduce of dx runs while dW is computed. With TP2 backward
    gathers x again, because saving f(x) would take tp times the memory."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return linear(gather_positions(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        gathering = gather_positions(x, ctx.grid) if ctx.needs_input_grad[1] else None
        dx = sum_over_ranks(matmul(dy, weight), ctx.grid)       # overlaps with the all-gather of x
        dy = dy.flatten(0, 1)                                   # (B T, out / tp)
        dw = None if gathering is None else matmul(dy.t(), gathering.wait().flatten(0, 1))
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx.wait(), dw, db, None


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, in fp32 on CPUs without 16-bit products, where it is 4 to 27 times as fast."""
    return upcast_for_matmul(torch.matmul, a, b, out=out)


class TensorParallel(nn.Module):
    """Takes over a plain module's parameters. `partition_dim` says in which dimension they are cut
    (those it does not name are whole), `stride` how many matrices are stacked there."""
    partition_dim = {}
    stride = 1
    put_off = None      # PP8: a list of (module, dy, x) for each backward whose W has not run

    def __init__(self, plain: nn.Module, grid: Grid):
        super().__init__()
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        self.grid = grid

    def multiply(self, function: Callable, x: torch.Tensor, *args) -> torch.Tensor:
        """function(x, weight, *args). PP8: backward stores the factors of the weight's gradient."""
        if self.put_off is None:
            return function(x, self.weight, *args)
        y = function(x, self.weight.detach(), *args)
        y.register_hook(lambda dy: self.put_off[-1].append((self, dy, x.detach())))
        return y


class ColumnParallelLinear(TensorParallel):
    """(B, T, in), equal on all ranks (TP2: T / tp positions) -> (B, T, out / tp), this rank's
    columns."""
    partition_dim = {"weight": 0, "bias": 0}

    def forward(self, x):
        if self.grid.tp == 1:
            return self.multiply(linear, x, self.bias)
        return self.multiply(_ColumnParallel.apply, x, self.bias, self.grid)


class QKVParallelLinear(ColumnParallelLinear):
    stride = 3          # the matrices of q, k and v, stacked: each is cut by heads on its own


class RowParallelLinear(TensorParallel):
    """(B, T, in / tp), this rank's rows -> (B, T, out), equal on all ranks (TP2: T / tp positions).
    The bias, equal on all ranks, is added after the sum; before it, it would count tp times."""
    partition_dim = {"weight": 1}

    def forward(self, x):
        if self.grid.tp == 1:
            return self.multiply(linear, x, self.bias)
        return _Reduce.apply(self.multiply(linear, x), self.grid) + self.bias


class PositionEmbedding(TensorParallel):
    """positions 0, 1, ... n - 1, counted from where this rank's slice starts -> (n, C)."""

    def forward(self, positions):
        first = self.grid.tp_rank * len(positions) if self.grid.sequence_parallel else 0
        return F.embedding(positions + first, self.weight)


class VocabParallelEmbedding(TensorParallel):
    """tokens (B, T) -> (B, T, C). TP4: tokens outside this rank's rows give a zero vector; g sums
    over the ranks."""
    partition_dim = {"weight": 0}

    def forward(self, tokens):
        lookup = F.embedding
        if hasattr(self.weight, "main_grad"):
            lookup = _LookupToMainGrad.apply
        if self.grid.tp == 1:
            return lookup(tokens, self.weight)
        rows = tokens - self.grid.tp_rank * len(self.weight)
        is_local = (rows >= 0) & (rows < len(self.weight))
        x = lookup(rows.where(is_local, 0), self.weight)                # (B, T, C)
        return _Reduce.apply(x * is_local.unsqueeze(-1), self.grid)


class _LookupToMainGrad(torch.autograd.Function):
    """F.embedding, whose gradient is added to the rows of `main_grad` that were looked up.

    FlatParameters (section 4) gives each weight a method `main_grad`, which returns the tensor that
    collects its gradient, in fp32 (as in Megatron-LM). The embedding, which reads few rows, and the
    head, which works in chunks, add their gradients there, and autograd gets None: with 50304
    tokens a step takes 0.80 of the time, in bf16 0.70. (Other matrices do not gain: 0.98, 1.08.)"""

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


def softmax_over_ranks(largest: torch.Tensor, total: torch.Tensor, z: torch.Tensor,
                       is_local: torch.Tensor, group) -> tuple:
    """TP5: combine the ranks' statistics, each (n, 1): the largest logit, the sum of
    exp(logit - largest), and the target's logit z where `is_local`. Returns the largest logit of
    all ranks, and the sum and z relative to it."""
    overall = all_reduce(largest.clone(), group, dist.ReduceOp.MAX).wait()
    local = torch.stack([total * (largest - overall).exp(), (z - overall).where(is_local, 0)])
    return overall, *all_reduce(local, group).wait()


def chunk_loss(logits: torch.Tensor, p: torch.Tensor | None, targets: torch.Tensor,
               upstream: torch.Tensor | None, vocab_size: int, grid: Grid,
               over_ranks: Callable = softmax_over_ranks) -> tuple:
    """The summed cross-entropy of n positions in nats, the same on all ranks. Its gradient, times
    the scalar `upstream` if that is given, overwrites the logits, but for one column of each row.
    Returns (loss, these target columns (n, 1), the gradients there (n, 1)).

    logits      (n, V / tp): this rank's columns
    p           memory to compute in, like logits, but fp32 or fp64; it may be `logits`; None: new
    targets     (n,) tokens of the whole vocabulary; IGNORE_INDEX adds nothing

        loss = log sum_v exp(z_v) - z_target        gradient = softmax(z), less 1 at the target

    The largest logit is subtracted so that exp cannot overflow; it cancels. The caller scatters the
    columns in: done here, a compiled kernel would have to write all of p to memory first."""
    n, width = logits.shape
    first = grid.tp_rank * width                            # this rank's first token
    is_local = ((targets >= first) & (targets < first + width)).unsqueeze(1)
    counted = (targets != IGNORE_INDEX).unsqueeze(1)
    columns = (targets - first).unsqueeze(1).where(is_local, 0)
    # The columns from here on are padding. (-inf would give NaN where a rank has no other.)
    logits[:, max(vocab_size - first, 0):] = torch.finfo(logits.dtype).min
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = logits.gather(1, columns).to(wide)                              # (n, 1), as all below
    largest = logits.amax(1, keepdim=True).to(wide)
    out = logits if p is None else p
    p = logits - largest if p is None else p.copy_(logits).sub_(largest)
    total = p.exp_().sum(1, keepdim=True)
    overall, total, target = over_ranks(largest, total, z, is_local, grid.groups["tp"])
    loss = (total.log() - target).where(counted, 0).sum()
    if upstream is None:
        return loss, None, None

    weight = counted * upstream                             # of each position in the loss
    logits.copy_(torch.mul(p, (largest - overall).exp() * weight / total, out=out))
    return loss, columns, ((z - overall).exp() / total - is_local.to(wide)) * weight


# Upper limit on the logits of a chunk (measured on the CPU only).
MAX_LOGITS = {"cpu": 2 ** 24, "gpu": 2 ** 28}


def chunk_size(positions: int, vocab: int, device_type: str) -> int:
    """Number of positions whose logits, of `vocab` tokens each, exist at once."""
    most = max(1, MAX_LOGITS["cpu" if device_type == "cpu" else "gpu"] // vocab)
    return ceil_div(positions, ceil_div(positions, most))       # of about equal size


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy in nats of the logits f(x) W^T: x (B, T, C), with TP2 T / tp
    positions, targets (B, T), W (V / tp, C) this rank's rows. TP6: forward also computes the
    gradients, times `scale` (None: no gradients). Backward returns them."""

    @staticmethod
    def forward(ctx, x, weight, targets, grid, scale, chunk_loss):
        x = gather_positions(x, grid).wait()
        shape = x.shape
        x, targets = x.flatten(0, 1), targets.flatten()                     # (N, C), (N,)
        in_main_grad = hasattr(weight, "main_grad")                 # as in _LookupToMainGrad
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = x                                                      # not written without a scale
        # A tensor, because a compiler takes a number for a constant.
        upstream = None if scale is None else x.new_full((), scale, dtype=wide)
        if scale is not None:
            dx = torch.empty_like(x)
            dw = weight.main_grad() if in_main_grad else torch.zeros_like(weight, dtype=wide)
        loss = 0.0
        size = chunk_size(len(x), len(weight), x.device.type)
        memory = x.new_empty(size, len(weight))                             # of all chunks
        p = None
        if wide == x.dtype or x.device.type == "cpu":   # (a CPU converts in memory, which is slow)
            p = memory.to(wide)                                             # in fp32 the same
        for x_i, targets_i, dx_i in zip(x.split(size), targets.split(size), dx.split(size)):
            logits = matmul(x_i, weight.t(), out=memory[:len(x_i)])         # (n, V / tp)
            p_i = None if p is None else p[:len(x_i)]
            if p is memory:
                p_i = logits            # the same object: a compiler handles two views worse
            loss_i, columns, at_columns = chunk_loss(logits, p_i, targets_i, upstream)
            loss += loss_i
            if scale is not None:
                dz = logits.scatter_(1, columns, at_columns.to(logits.dtype))
                matmul(dz, weight, out=dx_i)
                add_product(dw, dz, x_i)

        if scale is not None:
            dx = sum_over_ranks(dx.view(shape), grid).wait()
            if grid.sequence_parallel:
                dx = dx.clone()             # a slice would keep the memory of all positions
            ctx.save_for_backward(dx, None if in_main_grad else dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, upstream):
        dx, dw = ctx.saved_tensors
        if dw is not None:
            dx, dw = dx * upstream, dw * upstream
        elif upstream.device.type == "cpu" and upstream != 1:       # (a GPU would synchronize)
            raise RuntimeError("the gradient of the loss is not 1, but the token matrix's gradient "
                               "has been added to main_grad: call backward() on the loss itself, "
                               "and set head.scale instead")
        return dx, dw, None, None, None, None


class VocabParallelHead(TensorParallel):
    """x (B, T, C), with TP2 T / tp positions, and targets (B, T) -> the summed loss of model.Head,
    the same on every rank. If you change the loss, change model.Head too. The gradients are
    multiplied by `scale`. `norms`: sum over all positions of |x|, for the log."""
    partition_dim = {"weight": 0}

    def __init__(self, head: nn.Module, grid: Grid):
        super().__init__(head, grid)
        self.norm = head.norm
        self.chunk_loss = partial(chunk_loss, vocab_size=head.vocab_size, grid=grid)
        self.scale = 1.0
        self.norms = 0.0

    def normalize(self, x):
        """LayerNorm of x, and the sum over all positions of |x|."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.norm(x), torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).sum()

    def forward(self, x, targets):
        x, norms = self.normalize(x)
        self.norms += norms
        scale = self.scale if torch.is_grad_enabled() else None
        return VocabParallelCrossEntropy.apply(x, self.weight, targets, self.grid, scale,
                                               self.chunk_loss)


TP_PLAN = {         # which module of model.py becomes what (build_stage)
    "attn.qkv": QKVParallelLinear,
    "attn.proj": RowParallelLinear,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
    "embed.token": VocabParallelEmbedding,
    "embed.position": PositionEmbedding,
    "head": VocabParallelHead,
}
TIED = {"head.weight": "embed.token.weight"}    # one matrix: its name in the head, its global name


# ---------------------------------------------------------------------------------------------
# 3. Pipeline parallelism (GPipe, Huang et al. 2019)
#
# The layers are cut into p stages, one for each rank, and the batch into m microbatches, which pass
# through the stages one after another. `plain_pipeline` is the whole technique:
# ---------------------------------------------------------------------------------------------


def plain_pipeline(stage: Callable, batch: list, activation_like: torch.Tensor, total: int) -> None:
    """Each rank of the default group is a stage; they accumulate the gradients of the mean loss
    over `total` tokens. `batch` is a list of microbatches (tokens (B, T), targets (B, T)). A stage
    maps tokens, or activations like `activation_like` (B, T, C), to activations; the last one maps
    them and the targets to the sum of the losses."""
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    kept = []
    for tokens, targets in batch:                       # all forwards
        x = tokens
        if rank > 0:
            x = torch.empty_like(activation_like)
            dist.recv(x, src=rank - 1)
            x.requires_grad_()
        y = stage(x, targets)
        if rank < last:
            dist.send(y.detach(), dst=rank + 1)
        kept.append((x, y))

    for x, y in reversed(kept):                         # then all backwards, in reverse
        if rank < last:
            dy = torch.empty_like(y)
            dist.recv(dy, src=rank + 1)
            y.backward(dy)
        else:
            (y / total).backward()
        if rank > 0:
            dist.send(x.grad, dst=rank - 1)


# The rest of this section differs from `plain_pipeline`:
#
#        difference                          gain                                  where
#   PP1  a stage's ops are a list            one executor runs any schedule        run_schedule
#   PP2  1F1B: backwards start early         activations of p microbatches, not m  one_f_one_b
#   PP3  crossing messages start together    NCCL cannot hang                      start_messages
#   PP4  a rank has only its stage's layers  parameters / p                        build_stage
#   PP5  both ends have the tied matrix      only its gradients travel             finish_grad_sync
#   PP6  backward recomputes a block         stores 1 value instead of about 16    wrap_model
#   PP7  a rank has v chunks of the layers   about bubble / v, v times messages    model_chunks
#   PP8  gradients of weights wait for gaps  about bubble / 3, activations of p    zb_h1
#
# GPipe and 1F1B on three stages. F2 is the forward of microbatch 2, a backward takes two units of
# time, and a dot is idle time. Both idle for (p - 1) / (m + p - 1) of the time, the bubble; the
# last column is the number of microbatches whose activations a stage keeps:
#
#     GPipe    F0 F1 F2 F3 F4 .  .  .  .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0      5
#              .  F0 F1 F2 F3 F4 .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .       5
#              .  .  F0 F1 F2 F3 F4 B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .  .  .       5
#
#     1F1B     F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4      3
#              .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .       2
#              .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .       1
#
# PP7. Chunk c of stage s has the layers of place c p + s in a pipeline of v p stages. An op takes
# 1 / v of the time, so the bubble is (p - 1) / (v m + p - 1). gpipe and 1f1b have v = 1.
# PP8. B computes the gradients of inputs only, which the stage before waits for, and W those of the
# linear layers' weights, later. If F, B and W take one unit and m >= p, the bubble is
# (p - 1) / (3 m + p - 1), and each stage keeps activations of p microbatches, until their W (with
# sequence parallelism more: W's dy are not cut):
#
#     ZB-H1    F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
#              .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
#              .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4


def gpipe(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    """A stage's ops, ("F" or "B", microbatch, chunk), in order: all forwards, then all backwards.
    With chunks, groups of `stages` microbatches pass through chunk 0, then 1 and so on."""
    forwards = [("F", m, chunk) for first in range(0, num_microbatches, stages)
                for chunk in range(chunks)
                for m in range(first, min(first + stages, num_microbatches))]
    return forwards + [("B", m, chunk) for _, m, chunk in reversed(forwards)]


def one_f_one_b(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    """PP2; with chunks PP7 (PipeDream-flush, interleaved: Narayanan et al. 2021, section 2.2)."""
    # Warm-up: one forward for every later stage; a backward cannot arrive before those have run.
    # Then one forward and one backward in turn, and at the end the backwards that are left. With
    # chunks, the first microbatches have to reach the last chunk, and each later stage adds two
    # turns: an activation travels there, and its gradient back.
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = (chunks - 1) * stages + 2 * warmup
    forwards = gpipe(stage, stages, num_microbatches, chunks)[:num_microbatches * chunks]
    backwards = [("B", m, chunks - 1 - chunk) for _, m, chunk in forwards]
    ops = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards):
        ops += pair
    return ops + backwards[len(forwards[warmup:]):]


def zb_h1(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    """PP8 (ZB-H1: Qi et al. 2024, section 2.1): 1F1B, with each W put off by `stage` microbatches:
    the stages before wait for the first gradients, so B goes before W there."""
    ops = []
    for op, m, chunk in one_f_one_b(stage, stages, num_microbatches, chunks):
        ops.append((op, m, chunk))
        if op == "B" and m >= stage:
            ops.append(("W", m - stage, chunk))
    return ops + [("W", m, 0) for m in range(max(0, num_microbatches - stage), num_microbatches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": one_f_one_b, "zb-h1": zb_h1}
OP_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}       # for errors


def make_schedule(name: str, grid: Grid, num_microbatches: int) -> list[tuple]:
    """The ops of this rank's stage. Without a pipeline each forward is followed by its backward."""
    schedule = SCHEDULES[name] if grid.pp > 1 else one_f_one_b
    return schedule(grid.stage, grid.pp, num_microbatches, grid.chunks)


def split_in_turns(schedule: list[tuple], chunks: int) -> list[list[tuple]]:
    """Group the ops into turns; a stage exchanges messages after each turn. A turn is one op, after
    any W: messages travel meanwhile. Where an interleaved schedule alternates, it is a forward and
    the backward after it: each stage is two forwards ahead of the next there, so that on NCCL
    single sends would wait for each other."""
    pairs = [(first[0], second[0]) for first, second in pairwise(schedule)]
    joined = [("F", "B")] if chunks > 1 and ("B", "F") in pairs else []
    turns = [schedule[:1]]
    for op, pair in zip(schedule[1:], pairs):
        if pair in joined or pair[0] == "W":
            turns[-1].append(op)
        else:
            turns.append([op])
    return turns


def start_messages(grid: Grid, messages: list[tuple]) -> list[Work]:
    """Start all messages together: on NCCL as one operation, on gloo singly, where the tag, the op
    that needs it, tells them apart. A message is (True, op, its result), to be sent, or (False, op,
    a tensor like its input), to be received. Returns a Work for each, whose result is None beyond
    the pipeline's ends and for W. PP3: when two neighbors send to each other, each starts its send
    and its receive as one operation; otherwise NCCL could have both send first and wait forever."""
    works, operations = [], []
    for sending, (op, m, chunk), x in messages:
        place = chunk * grid.pp + grid.stage
        step = 1 if op == "F" else -1       # activations go to the next place, gradients back
        other = place + step if sending else place - step
        if op == "W" or not 0 <= other < grid.pp * grid.chunks:
            works.append(Work(None))
            continue
        receiver = other if sending else place
        tag = 2 * (m * grid.pp * grid.chunks + receiver) + "FB".index(op)
        x = x.detach().contiguous() if sending else torch.empty_like(x)
        stage = other % grid.pp
        peer = grid.rank + (stage - grid.stage) * grid.tp
        start, verb = (dist.isend, "send to") if sending else (dist.irecv, "receive from")
        operations.append(dist.P2POp(start, x, peer, grid.groups["pp"], tag))
        works.append(Work(x, operation=f"{OP_NAMES[op]} of microbatch {m}: {verb} rank {peer}"
                                       f"{on_hosts([peer], grid.hosts)} (stage {stage})"))
    started = [work for work in works if work.result is not None]
    if started:
        with comm_errors(", ".join(work.operation for work in started)):
            handles = dist.batch_isend_irecv(operations)
        if len(handles) == 1:               # NCCL's one handle is that of every message
            handles = handles * len(started)
        for work, handle in zip(started, handles, strict=True):
            work.handles = [handle]
    return works


def connect(grid: Grid, device: torch.device) -> None:
    """NCCL connects two ranks at their first message, and connecting waits for all work queued on
    the device. If that work is a receive whose sender is itself waiting to connect, both hang (seen
    with GPipe on two H100s). So connect everything first (`train.main`: for all collectives)."""
    one = torch.zeros(1, device=device)
    for group in grid.groups.values():
        all_reduce(one, group).wait()
    messages = [(sending, (op, 0, chunk), one) for sending in (True, False) for op in "FB"
                for chunk in range(grid.chunks)]
    for work in start_messages(grid, messages):
        work.wait()
    torch.get_device_module(device).synchronize()


def run_schedule(schedule, model: GPT, grid: Grid, batch: list, activation_like: torch.Tensor,
                 flat=None, scale: float = 1.0) -> torch.Tensor:
    """PP1: run this stage's list of ops. Returns the sum of the losses, not scaled, in `sum_dtype`;
    0 on all stages but the last. Raises PeerError if another rank is gone or hangs.

    batch            microbatch -> (tokens (B, T), targets (B, T), dropout seed)
    activation_like  a tensor like the activations between stages, (B, T, C) or (B, T / tp, C)
    flat             the FlatParameters that collect the gradients; None if there is no backward
    scale            factor on the gradients of the summed loss
    """
    loss = activation_like.new_zeros((), dtype=sum_dtype(activation_like.device))
    last_backward = {chunk: m for op, m, chunk in schedule if op == "B"}
    in_flight = {}              # (microbatch, chunk) -> (input, output), from forward to backward
    chunks = model_chunks(model, grid)
    put_off = []                # PP8: of each backward without its W, the factors of the products
    has_weight_ops = ("W", 0, 0) in schedule
    for module in model.modules():
        module.put_off = put_off if has_weight_ops else None
    if grid.is_last:
        model.head.scale = scale
        model.head.norms = 0.0

    def forward(m, chunk, x):
        tokens, targets, dropout_seed = batch[m]
        x = tokens if grid.is_first and chunk == 0 else x.requires_grad_()
        y = chunks[chunk](x, targets, dropout_seed)     # activations, or from the head the loss
        if chunks[chunk].head is not None:
            loss.add_(y.detach())
        if torch.is_grad_enabled():
            in_flight[m, chunk] = x, y
        return y

    def backward(m, chunk, dy):
        x, y = in_flight.pop((m, chunk))
        if chunks[chunk].head is None:
            # Its gradient is dy. (torch.autograd.backward(y, dy) imports a compiler, for 0.5 s.)
            y = (y * dy).sum()
        flat.prepare_grad_sync(chunks[chunk], m == last_backward[chunk])        # DP1
        put_off.append([])
        y.backward()
        return x.grad

    @torch.no_grad()
    def weight_grads(m, chunk, _):
        factors = put_off.pop(0)
        while factors:                                  # each product frees its own
            module, dy, x = factors.pop(0)
            if x.shape[1] < dy.shape[1]:                # TP2: this rank's positions
                x = gather_positions(x, grid).wait()
            module.weight.grad = matmul(dy.flatten(0, 1).t(), x.flatten(0, 1))
            flat.grad_ready(module.weight)

    run_turns(split_in_turns(schedule, grid.chunks), grid,
              dict(F=forward, B=backward, W=weight_grads), activation_like)
    return loss


def run_turns(turns: list, grid: Grid, functions: dict, activation_like: torch.Tensor) -> None:
    """Run the ops by functions[op](microbatch, chunk, input) -> result; exchange their messages."""
    sends = dict.fromkeys("FBW", Work(None))        # the last ones
    arriving = start_messages(grid, [(False, op, activation_like) for op in turns[0]])
    for turn, next_turn in zip(turns, [*turns[1:], []]):
        inputs = arriving
        following = [(False, op, activation_like) for op in next_turn]
        # Same kind next (F, F): its input comes from the other neighbor, so receive now (GPipe is 3
        # to 10% faster on CPUs). Kind changes (F, B): both messages are with one neighbor and
        # cross, so start them together after the op; as in a ring of chunks, where all would wait.
        if following and next_turn[-1][0] == turn[-1][0] and grid.chunks == 1:
            arriving = start_messages(grid, following)
            following = []
        results = []
        for (op, m, chunk), arrival in zip(turn, inputs):
            x = arrival.wait()
            try:
                y = functions[op](m, chunk, x)
            except PeerError as error:
                raise PeerError(f"{OP_NAMES[op]} of microbatch {m}: {error}") from error
            sends[op].wait()            # the one before, which has traveled during this op
            results.append((True, (op, m, chunk), y))
        works = start_messages(grid, results + following)
        sends |= {op: work for (op, *_), work in zip(turn, works)}
        if following:
            arriving = works[len(turn):]
    for work in sends.values():
        work.wait()


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The numbers of a stage's blocks. Stages differ by one block at most. The last stage, which
    also has the head, never has more blocks than another."""
    return range(ceil_div(stage * n_layer, pp), ceil_div((stage + 1) * n_layer, pp))


def chunk_layers(n_layer: int, grid: Grid) -> list[range]:
    """The numbers of the blocks in each chunk of this rank."""
    return [stage_layers(n_layer, grid.pp * grid.chunks, chunk * grid.pp + grid.stage)
            for chunk in range(grid.chunks)]


def model_chunks(model: GPT, grid: Grid) -> list[GPT]:
    """The chunks of this rank's model, as models that share its modules."""
    chunks = []
    for number, layers in enumerate(chunk_layers(model.cfg.n_layer, grid)):
        chunk = copy.copy(model)
        chunk._modules = dict(
            embed=model.embed if number == 0 else None,
            blocks=nn.ModuleDict({str(layer): model.blocks[str(layer)] for layer in layers}),
            head=model.head if number == grid.chunks - 1 else None)
        chunks.append(chunk)
    return chunks


def build_stage(cfg: GPTConfig, grid: Grid) -> GPT:
    """This rank's part of the GPT, on the meta device, without memory: its stage's blocks (PP4; the
    first stage also has `embed`, the last `head`) with the modules of section 2, whose parameters
    are still whole: the caller replaces them by shards (`param_specs`)."""
    with torch.device("meta"):
        model = GPT(cfg)
    layers = set().union(*chunk_layers(cfg.n_layer, grid))
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None
    for name, module in list(model.named_modules()):
        name_in_plan = re.sub(r"^blocks\.\d+\.", "", name)             # of any block
        if name_in_plan in TP_PLAN:
            model.set_submodule(name, TP_PLAN[name_in_plan](module, grid))
    for block in model.blocks.values():     # different heads need different dropout masks
        block.attn.core_attention.rng_offset = grid.tp_rank
    return model


def wrap_model(model: GPT, recompute: bool, compile: bool) -> None:
    """Compile each block's forward, or recompute its activations, or both. Embedding and head are
    compiled too, except for the lookup and the products with the token matrix. Communication and
    dropout run eagerly; the rest is compiled once for all blocks. PP6: backward recomputes a block
    from its input: 1 stored value per position and channel instead of about 16, for a third more
    FLOPs (by blocks as in Chen et al. 2016)."""
    def runs_eagerly(module):
        if isinstance(module, TensorParallel):      # it communicates if it cuts a parameter
            return module.grid.tp > 1 and len(module.partition_dim) > 0
        return isinstance(module, Dropout) and module.p > 0

    def compile_method(module, name):
        eager = [part for part in module.modules() if part is not module and runs_eagerly(part)]
        for part in eager:
            part.forward = torch.compiler.disable(part.forward)
        setattr(module, name, torch.compile(getattr(module, name), fullgraph=not eager))

    if compile and model.embed is not None:
        compile_method(model.embed, "add_positions")
    if compile and model.head is not None:
        head = model.head
        compile_method(head, "normalize")
        if head.grid.tp > 1:            # two parts, before and after the all-reduces
            eager = torch.compiler.disable(softmax_over_ranks)
            head.chunk_loss = partial(head.chunk_loss, over_ranks=eager)
        head.chunk_loss = torch.compile(head.chunk_loss, fullgraph=head.grid.tp == 1, dynamic=False)
    for block in model.blocks.values():
        if compile:
            compile_method(block, "forward")
        if recompute:
            # Dropout masks depend on seeds only, so there is no generator state to restore.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                    preserve_rng_state=False)


def clock(schedules: list, units: list | None = None) -> list[dict]:
    """Simulate the stages' schedules without processes; returns {op: (start, end)} of each stage.
    An op starts when its stage is free and its input has arrived. Raises ValueError on a deadlock.
    `units`: {kind of op: its time} of each stage; None: one unit, and two of a B without a W."""
    if units is None:
        units = [dict(F=1, B=1 if ("W", 0, 0) in schedules[0] else 2, W=1)] * len(schedules)
    times = [{} for _ in schedules]
    free = [0] * len(schedules)
    places = len(schedules) * len({chunk for _, _, chunk in schedules[0]})
    arrived = {("F", m, 0): 0 for _, m, _ in schedules[0]}  # (op, microbatch, place) -> input there
    while any(len(row) < len(ops) for row, ops in zip(times, schedules)):
        arrivals_before = len(arrived)
        for stage, (row, ops) in enumerate(zip(times, schedules)):
            for op, m, chunk in ops[len(row):]:
                place = chunk * len(schedules) + stage
                if (op, m, place) not in arrived:
                    break                                   # another stage has to go first
                start = max(arrived[op, m, place], free[stage])
                free[stage] = start + units[stage][op]
                row[op, m, chunk] = start, free[stage]
                if op == "F" and place == places - 1:
                    arrived["B", m, place] = free[stage]    # the loss
                elif op == "F":
                    arrived["F", m, place + 1] = free[stage]
                elif op == "B":
                    arrived["B", m, place - 1] = free[stage]
                    arrived["W", m, place] = free[stage]
        if len(arrived) == arrivals_before:
            raise ValueError("the schedules wait for each other: deadlock")
    return times


def bubble(times: list[dict]) -> float:
    """The fraction of all stages' time that is idle, from `clock`'s table."""
    busy = sum(end - start for row in times for start, end in row.values())
    return 1 - busy / (max(end for row in times for _, end in row.values()) * len(times))


def live_activations(schedule: list) -> int:
    """The largest number of microbatches, in all chunks, between F and B, or W if there is one."""
    freed_by = "W" if ("W", 0, 0) in schedule else "B"
    return max(accumulate({"F": 1, freed_by: -1}.get(op, 0) for op, *_ in schedule))


def draw(times: list[dict]) -> str:
    """`clock`'s table as a line for each stage, a column for each unit of time, as shown above."""
    span = max(end for row in times for _, end in row.values())
    is_chunked = any(chunk > 0 for _, _, chunk in times[0])
    lines = []
    for row in times:
        cells = ["."] * span
        for (op, m, chunk), (start, end) in row.items():
            letter = "abcdefghijklmnopqrstuvwxyz"[chunk % 26] if is_chunked else ""
            cells[start:end] = [f"{op}{m}{letter}"] * (end - start)
        lines.append(cells)
    width = 1 + max(len(cell) for cells in lines for cell in cells)
    return "\n".join(f"stage {stage:2d}  " + "".join(cell.ljust(width) for cell in cells).rstrip()
                     for stage, cells in enumerate(lines))


# ---------------------------------------------------------------------------------------------
# 4. Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020)
#
# Every replica trains on its share of the batch. The gradients are summed over the replicas, which
# start equal, from the same seed, make the same update and stay equal. This is the plain form:
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


# ZeRO does not repeat on every replica what one of them can do: replica r updates shard r of the
# parameters, laid out flat. AdamW is elementwise, so a shard may begin and end inside a matrix.


def plain_zero_step(model, shard, optimizer, tokens, targets):
    """ZeRO 1: `plain_step`, but `optimizer` has only `shard`, this rank's part of all parameters,
    which were padded to a multiple of dp. So AdamW's moments take 1 / dp of the memory."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    model.zero_grad()
    loss = model(tokens.chunk(dp)[rank], targets.chunk(dp)[rank])
    (loss / targets.numel()).backward()
    grad = nn.utils.parameters_to_vector([parameter.grad for parameter in model.parameters()])
    grad = F.pad(grad, (0, len(shard) * dp - len(grad)))
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter_single(shard.grad, grad)
    optimizer.step()
    full = torch.empty_like(grad)
    dist.all_gather_single(full, shard.detach())
    nn.utils.vector_to_parameters(full, model.parameters())     # (it ignores the padding)


# ZeRO 2 reduce-scatters the gradients in every backward, adds them to shard.grad, and frees the
# rest. ZeRO 3 keeps no `full` either: it gathers a block's parameters before its forward and before
# its backward, while another block runs, and frees them after (FSDP, Zhao et al. 2023).
#
# A step of m microbatches (in fp32 a parameter is its own master):
#
#             masters,                     bytes kept per parameter    in 16 bits, bytes sent per
#                                                                      parameter, x (dp-1)/dp:
#     ZeRO    moments    grad     data     16 bits      fp32           gradients + parameters
#       0     full       full     full     18           16             8
#       1     shard      full     full     6 + 12/dp    8 + 8/dp       4 + 2
#       2     shard      shard    full     2 + 16/dp    4 + 12/dp      4m + 2
#       3     shard      shard    shard    18/dp        16/dp          4m + 4m
#
# The rest of this section differs from `plain_step` (numbers of GPT-2 124M in 16 bits):
#
#        difference                              gain                          where
#   DP1  microbatches add up, one sync a step    1/m of the traffic            prepare_grad_sync
#   DP2  parameters are views into flat buckets  26 messages, not 148          Bucket
#   DP3  gradients add up in the masters' type   (in bf16, 256 + 1 = 256)      grad_ready
#   DP4  a hook starts a complete bucket's sum   24 of 26 overlap backward     _start_grad_sync
#   DP5  all are awaited at the end              in ZeRO 0 no hook waits       finish_grad_sync
#   DP6  the tied matrix has its own bucket      no other bucket waits for it  make_buckets
#   DP7  ZeRO 1: a replica updates one shard     12 of 18 bytes become 12/dp   _start_grad_sync
#   DP8  ZeRO 2: and keeps only its gradients    4 more bytes become 4/dp      _start_grad_sync
#   DP9  ZeRO 3: and only its parameters         2 more bytes become 2/dp      gather_before_use
#   DP10 ZeRO 1, 2: a block awaits its updates   forward hides the all-gather  gather_before_use
#
# The buckets of a rank are the tied matrix, the other parameters of the ends of the model, and two
# for each block. Backward completes them from the right; every rank communicates in that order.
#
#     | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |


def param_specs(model: GPT, cfg: GPTConfig, grid: Grid) -> list[ParamSpec]:
    """The parameters of a stage. They depend on the stage alone, so any rank can compute the layout
    of another one (`checkpoint.file_order`)."""
    specs = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            local_name = f"{module_name}.{attribute}"
            name = TIED.get(local_name, local_name)
            if name in specs:
                specs[name].owners.append((module, attribute))
                continue
            rows = cfg.vocab_size if name == "embed.token.weight" else parameter.shape[0]
            specs[name] = ParamSpec(
                name, (rows, *parameter.shape[1:]), padded_rows=parameter.shape[0],
                partition_dim=getattr(module, "partition_dim", {}).get(attribute),
                stride=getattr(module, "stride", 1), tp=grid.tp, owners=[(module, attribute)],
                is_tied_copy=local_name in TIED and not grid.is_first)
    return list(specs.values())


class Bucket:
    """DP2: parameters that are communicated together, laid out flat, padded to dp equal shards.
    `name` is as drawn above: tied, ends, 0.attn ...

    data            (numel,) the parameters are views into it; ZeRO 3 frees and restores its memory
    grad            (numel,) their gradients; from ZeRO 2 on None from a sync to the next gradient
    shard           {name: (numel / num_shards,)} of what this rank updates:
                    data    a view of `data`; in ZeRO 3 its own memory
                    grad    a view of `grad`; from ZeRO 2 on its own memory, a sum of backwards
                    master  the same tensor as data if types and devices are equal
                    exp_avg, exp_avg_sq     on the master's device
    shard_ranges    the parts of parameters in the shard: [(spec, shard_slice, param_slice)], where
                    shard[name][shard_slice] belongs to parameter.flatten()[param_slice]
    pending_grads   number of gradients that backward (PP8: W) has not computed yet
    unsharding      the all-gather of `data` under way, or None
    """

    def __init__(self, name: str, specs: list[ParamSpec], dp: int, num_shards: int,
                 shard_rank: int):
        self.name = name
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
            end += ceil_div(spec.numel, 32) * 32        # aligned to 64 bytes, in 16 bits too
        self.numel = ceil_div(end, 32 * dp) * 32 * dp

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
        """The part of `data` or `grad` that belongs to a parameter, in the parameter's shape."""
        offset = self.offsets[spec.name]
        return flat[offset:offset + spec.numel].view(spec.local_shape)

    def main_grad(self, spec: ParamSpec) -> torch.Tensor:
        """Where a parameter's gradient adds up. From ZeRO 2 on this memory is created by the first
        gradient and freed by the sync. The head adds in forward, so under GPipe the first backward
        syncs all microbatches' head gradients and the later ones find none."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.data, dtype=self.shard["grad"].dtype)
        return self.view(self.grad, spec)


def make_buckets(specs: list[ParamSpec], dp: int, num_shards: int = 1,
                 shard_rank: int = 0) -> list[Bucket]:
    """The buckets drawn above. DP6: the tied gradient is complete only at backward's end."""
    contents = {"tied": [], "ends": []}
    for spec in specs:
        match spec.name.split("."):
            case ["blocks", number, "norm1" | "attn", *_]:
                bucket = f"{number}.attn"
            case ["blocks", number, *_]:
                bucket = f"{number}.mlp"
            case _:
                bucket = "tied" if spec.name in TIED.values() else "ends"
        contents.setdefault(bucket, []).append(spec)
    return [Bucket(name, group, dp, num_shards, shard_rank)
            for name, group in contents.items() if group]


class FlatParameters:
    """This rank's parameters (of type `dtype`) and, for `training`, their gradients, masters and
    Adam moments (of type `master_dtype`), in buckets. With `host`, masters and moments are there,
    and AdamW runs there: 6 of 18 bytes per parameter stay on the GPU.

    A training step calls zero_grad, then prepare_grad_sync before each backward, and at the end
    finish_grad_sync, grad_norm_squares and step. In ZeRO 1 and 2 `step` only starts to gather the
    updated parameters: `gather_before_use` or wait_params waits for them."""

    def __init__(self, specs: list[ParamSpec], grid: Grid, dtype, master_dtype, device,
                 zero: int = 0, host=None, training: bool = True):
        device = torch.device(device)
        host = device if host is None else torch.device(host)
        self.grid, self.zero, self.training = grid, zero, training
        self.num_shards = grid.dp if zero > 0 else 1
        self.shard_rank = grid.dp_rank if zero > 0 else 0
        self.buckets = make_buckets(specs, grid.dp, self.num_shards, self.shard_rank)
        self.buckets_to_sync = []       # those that this backward communicates, the next one last
        self.in_flight = []             # [(bucket, Work)] of gradients
        for bucket in self.buckets:
            self._allocate(bucket, dtype, master_dtype, device, host)
            self._attach(bucket)
            if zero == 3:
                self.reshard([bucket])
        # --offload: rows used in turn, to bring a bucket's gradients and take its parameters back
        self.staging = None
        if training and device != host:
            longest = max(bucket.numel for bucket in self.buckets) // self.num_shards
            self.staging = torch.empty(2, longest, dtype=master_dtype, device=host,
                                       pin_memory=device.type == "cuda")

    def _allocate(self, bucket: Bucket, dtype, master_dtype, device, host) -> None:
        """Create the bucket's tensors, all zero, of the sizes in the table of ZeRO stages."""
        length = bucket.numel // self.num_shards
        shard = bucket.shard
        bucket.data = torch.zeros(bucket.numel, dtype=dtype, device=device)
        shard["data"] = bucket.data.chunk(self.num_shards)[self.shard_rank]
        if self.zero == 3:
            shard["data"] = shard["data"].clone()
        shard["master"] = shard["data"]
        if not self.training:
            return
        if self.zero < 2:
            bucket.grad = torch.zeros(bucket.numel, dtype=master_dtype, device=device)
            shard["grad"] = bucket.grad.chunk(self.num_shards)[self.shard_rank]
        else:
            shard["grad"] = torch.zeros(length, dtype=master_dtype, device=device)
        if dtype != master_dtype or device != host:
            shard["master"] = torch.zeros(length, dtype=master_dtype, device=host)
        for moment in ("exp_avg", "exp_avg_sq"):
            shard[moment] = torch.zeros(length, dtype=master_dtype, device=host)

    def _attach(self, bucket: Bucket) -> None:
        """Replace the modules' parameters by views into the bucket, and give each its function
        `main_grad` and the hook that autograd calls when its gradient is complete."""
        for spec in bucket.specs:
            # A tied matrix becomes two Parameters on one memory; as one Parameter its hook would
            # run only after both uses.
            for module, attribute in spec.owners:
                # `.data` has its own version counter: ZeRO 3 gathers into this memory between
                # forward and backward, which autograd must not take for a modified weight.
                view = bucket.view(bucket.data, spec)
                parameter = nn.Parameter(view.data)
                setattr(module, attribute, parameter)
                parameter.bucket = bucket
                parameter.main_grad = partial(bucket.main_grad, spec)
                parameter.register_post_accumulate_grad_hook(self.grad_ready)

    @torch.no_grad()
    def load(self, name: str, full) -> None:
        """Fill this rank's tensors `name` from full parameters: full(name, shape) -> tensor."""
        for bucket in self.buckets:
            for spec, shard_slice, param_slice in bucket.shard_ranges:
                value = spec.shard(full(spec.name, spec.shape), self.grid.tp_rank)
                bucket.shard[name][shard_slice].copy_(value.flatten()[param_slice])

    def initialize(self, cfg: GPTConfig, seed: int, parameters: dict | None = None) -> None:
        """Set the state of step 0, also after a rollback to it. Only one full parameter is in
        memory at a time. The weights come from `parameters` {name: full tensor}, or the seed."""
        def initial(name, shape):
            if parameters is None:
                return initial_value(cfg, name, shape, seed)
            return parameters[name][:shape[0]]      # the position table may be longer
        self.load("master", initial)
        if self.training:
            for bucket in self.buckets:
                bucket.shard["exp_avg"].zero_()
                bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()
        self.wait_params()

    @torch.no_grad()
    def sync_params(self) -> None:
        """masters -> parameters, rounded to the parameters' type. Starts to share them with all
        replicas: `gather_before_use` waits."""
        data = [bucket.shard["data"] for bucket in self.buckets]
        masters = [bucket.shard["master"] for bucket in self.buckets]
        if masters[0] is not data[0]:
            torch._foreach_copy_(data, masters)
        for bucket in self.buckets:
            self._start_gather(bucket)

    def _start_gather(self, bucket: Bucket) -> None:
        assert bucket.unsharding is None, "the last update's parameters are still on their way"
        if self.zero in (1, 2):                 # (ZeRO 3 gathers in `unshard`)
            bucket.unsharding = all_gather(bucket.data, self.grid.groups["dp"])

    def wait_params(self) -> None:
        """Wait for the all-gathers that `step` or `sync_params` started, where no forward does."""
        if self.zero < 3:
            self.unshard(self.buckets)

    def zero_grad(self) -> None:
        torch._foreach_zero_([bucket.grad if self.zero < 2 else bucket.shard["grad"]
                              for bucket in self.buckets])

    def prepare_grad_sync(self, chunk: nn.Module, last: bool) -> None:
        """Before each backward of a chunk. DP1: only the `last` of a step communicates; from ZeRO 2
        on each does. Everything is a sum: the head has scaled the gradients (`run_schedule`)."""
        for parameter in chunk.parameters():
            parameter.bucket.pending_grads += 1
        self.buckets_to_sync = []
        if last or self.zero >= 2:
            self.buckets_to_sync = [bucket for bucket in self.buckets if bucket.pending_grads > 0]
            if self.buckets_to_sync[0].specs[0].is_tied_copy:   # the head's gradient is ready first
                self.buckets_to_sync.append(self.buckets_to_sync.pop(0))

    def grad_ready(self, parameter: nn.Parameter) -> None:
        """DP3, DP4: autograd, or W, calls this hook when a parameter's gradient is complete, on the
        backward's thread and CUDA stream: collectives start after the kernels of the gradient."""
        # `grad` is None if a Function of section 2 has added the gradient to main_grad itself.
        if parameter.grad is not None:
            parameter.main_grad().add_(parameter.grad)
            parameter.grad = None
        parameter.bucket.pending_grads -= 1
        # All ranks must communicate in the same order. A bucket completed out of turn waits.
        while self.buckets_to_sync and self.buckets_to_sync[-1].pending_grads == 0:
            self._start_grad_sync(self.buckets_to_sync.pop())

    def _start_grad_sync(self, bucket: Bucket) -> None:
        """DP4, DP7 to DP9: start the communication of a complete bucket."""
        group = self.grid.groups["dp"]
        if self.zero == 0:
            self.in_flight.append((bucket, all_reduce(bucket.grad, group)))
        # `grad` is None if nothing was added since the last sync (see Bucket.main_grad).
        elif bucket.grad is not None:
            # Wait for the previous bucket first, where a sync in flight holds extra memory.
            if self.zero >= 2 or bucket.grad.device.type == "cpu":
                self._wait_grad_sync()
            self.in_flight.append((bucket, reduce_scatter(bucket.grad, group)))
        if self.zero >= 2:
            bucket.grad = None
        if self.zero == 3:
            self.reshard([bucket])              # this backward does not need it again

    @torch.no_grad()
    def _wait_grad_sync(self) -> None:
        for bucket, work in self.in_flight:
            total = work.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += total
        self.in_flight = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """DP5: wait for all buckets. Then sum two kinds of gradients of which other ranks have a
        part: the tied matrix's on the two ends of a pipeline (PP5), and, with sequence parallelism,
        those of parameters that tensor parallelism replicates (TP2)."""
        assert not self.buckets_to_sync, "a parameter got no gradient"
        self._wait_grad_sync()
        if self.buckets[0].name == "tied":
            all_reduce(self.buckets[0].shard["grad"], self.grid.groups["embedding"]).wait()
        if self.grid.sequence_parallel:
            replicated = [bucket.shard["grad"][shard_slice] for bucket in self.buckets
                          for spec, shard_slice, _ in bucket.shard_ranges
                          if spec.partition_dim is None]
            if replicated:
                sums = all_reduce(torch.cat(replicated), self.grid.groups["tp"]).wait()
                torch._foreach_copy_(replicated, sums.split([len(x) for x in replicated]))

    def grad_norm_squares(self) -> torch.Tensor:
        """Sums of squares of this rank's gradients, (2,) of `sum_dtype`: [those that count for the
        global norm, all of them]. The first, summed over the world, counts every parameter once.
        The second shows where a gradient is not finite."""
        counted, others = [], []
        is_replica = self.zero == 0 and self.grid.dp_rank > 0
        for bucket in self.buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                pieces = bucket.shard["grad"][shard_slice].split(2 ** 20)
                is_replicated = spec.partition_dim is None and self.grid.tp_rank > 0
                if is_replica or is_replicated or spec.is_tied_copy:
                    others += pieces
                else:
                    counted += pieces
        # (One fp32 sum over 10M values can be off in its fourth digit. Pieces fit a CPU's cache.)
        dtype = sum_dtype(self.buckets[0].data.device)
        squares = torch.stack(torch._foreach_norm(counted + others, 2, dtype=dtype)).square()
        return torch.stack([squares[:len(counted)].sum(), squares.sum()])

    @torch.no_grad()
    def step(self, grad_scale: float, step: int, lr: float, beta1: float, beta2: float,
             weight_decay: float) -> None:
        """AdamW update number `step` (from 1) of this rank's shards, with the gradients times
        `grad_scale`. With --offload it goes bucket by bucket: while the CPU updates one, the next
        one's gradients arrive and the previous one's parameters leave."""
        grads = [bucket.shard["grad"] for bucket in self.buckets]
        torch._foreach_mul_(grads, grad_scale)
        if self.staging is None:
            adamw_step(self.buckets, grads, step, lr, beta1, beta2, weight_decay)
            self.sync_params()
            return
        rows = [self.staging[i % 2, :len(grad)] for i, grad in enumerate(grads)]
        copies = [copy_to_host_async(grad, row) for grad, row in zip(grads[:2], rows)]
        for i, bucket in enumerate(self.buckets):
            grad, arrived = copies[i]
            arrived.synchronize()       # queued after the parameters that left from the same row
            adamw_step([bucket], [grad], step, lr, beta1, beta2, weight_decay)
            data = bucket.shard["data"]
            rounded = grad.view(data.dtype)[:len(data)].copy_(bucket.shard["master"])
            data.copy_(rounded, non_blocking=True)
            self._start_gather(bucket)
            if i + 2 < len(grads):
                copies.append(copy_to_host_async(grads[i + 2], rows[i + 2]))

    def unshard(self, buckets: list[Bucket], prefetch: list[Bucket] = ()) -> None:
        """Make the buckets' parameters whole: gather them, or wait for the all-gather that `step`
        started (ZeRO 1 and 2). Begin to gather those of the buckets to `prefetch`."""
        for bucket in (*buckets, *prefetch):
            if bucket.data.untyped_storage().size() == 0:
                bucket.data.untyped_storage().resize_(bucket.data.nbytes)
                bucket.data.chunk(self.num_shards)[self.shard_rank].copy_(bucket.shard["data"])
                bucket.unsharding = all_gather(bucket.data, self.grid.groups["dp"])
        for bucket in buckets:
            if bucket.unsharding is not None:
                bucket.unsharding.wait()
                bucket.unsharding = None

    def reshard(self, buckets: list[Bucket]) -> None:
        """ZeRO 3: free the gathered parameters. They are views of a storage, not of an address:
        `unshard` makes them valid again by filling the same storage."""
        if self.zero < 3:
            return
        for bucket in buckets:
            assert bucket.unsharding is None, "a gather would write into freed memory"
            bucket.data.untyped_storage().resize_(0)


def adamw_step(buckets: list[Bucket], grads: list[torch.Tensor], step: int, lr: float,
               beta1: float, beta2: float, weight_decay: float) -> None:
    """torch's fused AdamW on the parameters in this rank's shards, whose gradients are `grads`."""
    for decays, decay in ((True, weight_decay), (False, 0.0)):
        parts = [(bucket.shard | dict(grad=grad), shard_slice)
                 for bucket, grad in zip(buckets, grads)
                 for spec, shard_slice, _ in bucket.shard_ranges if spec.decays == decays]
        tensors = [[shard[name][shard_slice] for shard, shard_slice in parts]
                   for name in ("master", "grad", "exp_avg", "exp_avg_sq")]
        # adamw adds 1 to each step number. (The empty list is amsgrad's.)
        steps = torch.full((len(parts),), step - 1.0, device=grads[0].device).unbind()
        adamw(*tensors, [], list(steps), fused=True, amsgrad=False, maximize=False, lr=lr,
              beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=decay)


def gather_before_use(model: GPT, flat: FlatParameters) -> None:
    """Wrap the forward of the embedding, each block and the head in unshard and reshard. ZeRO 1 and
    2 (DP10): the all-gather after AdamW is awaited there, bucket by bucket. ZeRO 3 (DP9):

        forward    unshard block i, prefetch i + 1, run, reshard
        backward   unshard block i, prefetch i - 1, run; _start_grad_sync reduces and reshards

    The tied matrix stays gathered from the embedding to the end of the head's forward, because the
    head computes its gradients there. The other parameters of the ends, and the last block, stay
    gathered until backward."""
    ends = [bucket for bucket in flat.buckets if bucket.name in ("tied", "ends")]
    halves = flat.buckets[len(ends):]
    blocks = list(zip(halves[::2], halves[1::2]))                   # [(attention, MLP)]

    def run_embed(forward, *args):
        flat.unshard(ends, prefetch=blocks[0])
        return forward(*args)

    def run_block(forward, current, previous, following, *args):
        flat.unshard(current, prefetch=following)
        y = forward(*args)
        if y.requires_grad:         # the hook runs when y's gradient is there, before the block's
            y.register_hook(lambda dy: flat.unshard(current, prefetch=previous))
        if following or not y.requires_grad:
            flat.reshard(current)
        return y

    def run_head(forward, *args):
        flat.unshard(ends)
        y = forward(*args)
        flat.reshard(ends[:1])                                      # the tied matrix
        if not torch.is_grad_enabled():
            flat.reshard(ends[1:])
        return y

    if model.embed is not None:
        model.embed.forward = partial(run_embed, model.embed.forward)
    if model.head is not None:
        model.head.forward = partial(run_head, model.head.forward)
    for block, current, previous, following in zip(model.blocks.values(), blocks, [(), *blocks],
                                                   [*blocks[1:], ()]):
        block.forward = partial(run_block, block.forward, current, previous, following)


def state_bytes(numel: int, longest: int, dp: int, dtypes: tuple, zero: int,
                offload: bool) -> tuple[dict, dict]:
    """Bytes of one rank's state, as the table of ZeRO stages says: {kind: bytes} on its device and,
    if `offload` keeps a part there, on the host. `numel` counts this rank's parameters before ZeRO
    shards them, `longest` those of its longest bucket; `dtypes`: of parameters and masters."""
    dtype, master_dtype = dtypes
    shard = numel // dp
    weights = dict(
        parameters=dtype.itemsize * (shard if zero >= 3 else numel),
        gradients=master_dtype.itemsize * (shard if zero >= 2 else numel))
    masters = master_dtype.itemsize * (shard if zero >= 1 else numel)
    states = dict(masters=masters, moments=2 * masters)
    if offload:
        staging = 2 * master_dtype.itemsize * (longest // dp if zero >= 1 else longest)
        return weights, states | dict(staging=staging)
    if dtype == master_dtype:           # a parameter is its own master
        states["masters"] = 0
    return weights | states, {}


def check_memory(cfg: GPTConfig, grid: Grid, config, dtypes: tuple, device: torch.device,
                 local_world: int) -> None:
    """Raise a ValueError if the state of a rank on this machine is larger than its GPU's memory, or
    what all its ranks keep there, and copy for a save, larger than the machine's. Nothing is
    allocated. Rank 0 calls it: the ranks on its machine are 0 to local_world - 1."""
    limits = []                         # (bytes by kind, bytes available, what to add)
    on_machine = Counter()
    for rank in range(local_world):
        place = Grid(grid.dp, grid.pp, grid.tp, rank, chunks=grid.chunks)
        specs = param_specs(build_stage(cfg, place), cfg, place)
        numel = sum(spec.numel for spec in specs)
        longest = max(bucket.numel for bucket in make_buckets(specs, grid.dp))
        on_device, on_host = state_bytes(numel, longest, grid.dp, dtypes, config.zero,
                                         config.offload and device.type != "cpu")
        if config.eval_only:
            on_device = dict(parameters=on_device["parameters"])
            on_host = {}
        on_machine.update(on_host)
        if device.type == "cuda":
            limits.append((on_device, torch.cuda.mem_get_info(device)[1], "GPUs, give --offload"))
        else:
            on_machine.update(on_device)
        if not config.eval_only and (config.zero > 0 or place.dp_rank == 0):
            moments = (on_device | on_host)["moments"]          # of masters there are half as many
            on_machine["copies for a save"] += 3 * moments // 2
    if hasattr(os, "sysconf"):          # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limits.append((on_machine, memory, "machines"))
    for sizes, memory, more in limits:
        if sum(sizes.values()) > memory:
            parts = ", ".join(f"{kind} {size / 1e9:,.1f} GB" for kind, size in sizes.items())
            raise ValueError(f"this model would keep {parts} here, but there are "
                             f"{memory / 1e9:,.1f} GB: raise --tp, --pp or --zero on more {more}, "
                             f"or take a smaller --model")


# ---------------------------------------------------------------------------------------------
# 5. Processes: errors, start, signals and devices
# ---------------------------------------------------------------------------------------------


class RunError(Exception):
    """Ends the run: every rank raises it with the same message, rank 0 prints it, and all exit with
    `status` (1: the run failed, 2: usage error)."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


class PeerError(RuntimeError):
    """Another rank is gone or did not answer in time. The message names the operation and ranks."""


@contextmanager
def comm_errors(operation: str, group=None):
    """Turn a RuntimeError of torch.distributed into a PeerError that names `operation` and, if a
    group of `make_grid` is given, its ranks. Not an error of this process: a failed kernel, too
    little memory."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, (PeerError, torch.AcceleratorError)) or out_of_memory(error):
            raise
        if group is not None:
            operation += f" with {group.group_desc}"
        # without gloo's source file and advice
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", first_line(error))
        raise PeerError(f"{operation}: {reason}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def out_of_memory(error: BaseException) -> bool:
    """Whether a CPU or a GPU has too little memory."""
    words = "allocate memory|out of memory|ALLOC_FAILED"        # of the CPU, NCCL, cuBLAS
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def fatal_message(error: Exception) -> str | None:
    """One line for a lost peer or too little memory; None for errors that need a traceback."""
    if out_of_memory(error):
        return (f"{first_line(error)}: lower --micro-batch, give --recompute, or raise --zero, "
                f"--tp or --pp")
    return str(error) if isinstance(error, PeerError) else None


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
    """Run action() on every rank and return its result here. If it raises a ValueError, OSError or
    RunError on any rank, every rank raises the same RunError, with the message of the first such
    rank and its status (`status` for a ValueError or OSError).

    The action may take longer than --timeout, on a slow disk: it runs in a thread, and meanwhile
    the ranks exchange messages, which show that each is alive. It must not communicate."""
    failure = None
    future = ThreadPoolExecutor(1).submit(action)
    wait([future], timeout=1)
    while dist.is_initialized() and not all(all_gather_object(future.done())):
        wait([future], timeout=1)
    try:
        result = future.result()
    except (ValueError, OSError, RunError) as error:
        failure = str(error), getattr(error, "status", status)
    hosts, failures = zip(*all_gather_object((socket.gethostname(), failure)))
    for rank, failure in enumerate(failures):
        if failure is not None:
            message, status = failure
            if rank > 0:
                message = f"rank {rank}{on_hosts([rank], hosts)}: {message}"
            raise RunError(message, status)
    return result


def on_rank0(action: Callable):
    """Run action() on rank 0 and return its result on every rank; errors as in `all_ranks`."""
    result = all_ranks(lambda: action() if is_rank0() else None)
    return all_gather_object(result)[0]


def assert_equal_across_ranks(value, message: str) -> None:
    """Every rank raises a RunError with this message unless all ranks have the same value."""
    values = all_gather_object(value)
    if values.count(value) < len(values):
        raise RunError(message, 2)


def rendezvous(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The key-value store through which the ranks of this start find each other.

    torchrun's store outlives a restart of the group and then holds the addresses of dead processes
    (pytorch issue 135712). Therefore each process draws a name. Rank 0 publishes the list of names
    that it sees until every other process has confirmed its own; its name prefixes all later keys.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    deadline = time.monotonic() + timeout.total_seconds()
    own = uuid.uuid4().hex
    store.set(f"rank {rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            names = [store.get(f"rank {r}").decode() for r in range(world)]
            store.set("names", json.dumps(names))
            done = store.check([f"{own} {name}" for name in names[1:]])
        else:
            names = json.loads(store.get("names"))
            done = len(names) == world and names[rank] == own
            if done:
                store.set(f"{names[0]} {own}", "")
        if done:
            return dist.PrefixStore(names[0], store)
        time.sleep(0.02)
    raise RuntimeError(f"no answer in {timeout.total_seconds():.0f} s")


def pick_device(name: str, local_rank: int = 0, on_mps: bool = True) -> torch.device:
    """The device of this process. `auto` is the first that is available of CUDA, MPS (Apple's GPU)
    if `on_mps`, and the CPU. Raises ValueError."""
    available = {"cuda": torch.cuda.is_available(),
                 "mps": on_mps and torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    if name == "mps" and not on_mps:
        raise ValueError("--device mps is for one process, and not for fp64: give --device cpu")
    if not available[name]:
        raise ValueError(f"torch finds no {name.upper()} device here: leave out --device {name}, "
                         f"or give --device cpu")
    if name != "cuda":
        return torch.device(name)
    # A launcher may show each process a GPU of its own, as the only one.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def assert_own_gpu(device: torch.device) -> None:
    """Every rank raises a RunError if two processes have the same GPU."""
    if device.type == "cuda":
        gpus = all_gather_object(str(torch.cuda.get_device_properties(device).uuid))
        if len(set(gpus)) < len(gpus):
            raise RunError(f"{len(gpus)} processes, but {len(set(gpus))} CUDA devices: lower "
                           f"--nproc_per_node, or give --device cpu", 2)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type for sums of many numbers: float64, but on MPS, which has none, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


class StopSignal:
    """Ctrl-C and SIGTERM request a stop after the current step. A second signal exits at once,
    unless it comes within half a second: a launcher may forward a signal that the terminal has
    already sent. (A handler cannot run while Python waits for a hung rank.)"""

    def __init__(self):
        self.requested = None           # time of the first signal, in seconds
        self.number = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested = now
            self.number = number
            self.write("saving after this step; a second signal ends at once, without saving")
        elif now - self.requested >= 0.5:
            self.write("ended without saving")
            os._exit(1)

    def write(self, line: str) -> None:
        """As `print_rank0`, which a handler that interrupts it must not call again."""
        if is_rank0():
            with suppress(OSError):
                os.write(1, f"{line}\n".encode())


@contextmanager
def process_group(rank: int, world: int, device: torch.device, timeout: timedelta):
    """Initialize torch.distributed for the block; nothing to do for one process."""
    if world == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with comm_errors("start of the process group"):
        dist.init_process_group(backend, store=rendezvous(rank, world, timeout), rank=rank,
                                world_size=world, timeout=timeout)
    yield
    dist.destroy_process_group()


def copy_to_host_async(x: torch.Tensor, host: torch.Tensor | None = None) -> tuple:
    """Start to copy x to `host`, or to new memory, pinned on CUDA -> (the copy, its event)."""
    host = x.to("cpu", non_blocking=True) if host is None else host.copy_(x, non_blocking=True)
    event = torch.get_device_module(x.device).Event()
    event.record()
    return host, event


def to_host(x: torch.Tensor, timeout: float) -> torch.Tensor:
    """x on the host; PeerError if the device takes more than `timeout` seconds to compute it. (If
    a rank hangs, a plain copy blocks until NCCL's own watchdog, for minutes.)"""
    if x.device.type == "cpu":
        return x
    host, event = copy_to_host_async(x)
    deadline = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > deadline:
            raise PeerError(f"the device has not ended its work in {timeout} s: a rank that it "
                            f"waits for is gone or hangs")
        time.sleep(1e-4)
    return host


def main() -> None:
    from data import Parser             # only this drawing has flags
    parser = Parser("parallel.py", "python parallel.py [FLAG ...]",
                    "Draw a pipeline schedule; count its bubble and activations.")
    add = parser.add_argument_group("schedule").add_argument
    add("--pp", type=int, default=4, metavar="N", help="stages (default %(default)s)")
    add("--microbatches", type=int, default=8, metavar="N",
        help="microbatches of a step (default %(default)s)")
    add("--pp-schedule", default="gpipe", choices=list(SCHEDULES),
        help="order of the microbatches (default %(default)s)")
    add("--pp-chunks", type=int, default=1, metavar="N",
        help="interleaved: parts of the model on each stage (default %(default)s)")
    parser.set_defaults(tp=1, zero=0, micro_batch=1, sequence_parallel=False, recompute=False,
                        compile=False)
    args = parser.parse_args()
    p, m, v = args.pp, args.microbatches, args.pp_chunks
    try:
        if min(p, m, v) < 1:
            raise ValueError("--pp, --microbatches and --pp-chunks must be at least 1")
        check_layout(GPTConfig(n_layer=p * v), p, m, args)
    except ValueError as error:
        parser.error(error)
    schedules = [SCHEDULES[args.pp_schedule](stage, p, m, v) for stage in range(p)]
    times = clock(schedules)
    counts = [f"stage {s}: {live_activations(ops) / v:g}" for s, ops in enumerate(schedules)]
    chunks = f" in {v} chunks" if v > 1 else ""
    formula, n = {"interleaved": ("v m", v * m), "zb-h1": ("3 m", 3 * m)}.get(
        args.pp_schedule, ("m", m))
    units = "a backward takes two units of time"
    if args.pp_schedule == "zb-h1":
        units = "an op takes one unit of time, the formula is for m >= p"
    print(f"{args.pp_schedule}, {p} stages{chunks}, {m} microbatches; {units}")
    print(f"\n{draw(times)}\n")
    print(f"bubble {bubble(times):.1%} of the time, "
          f"(p - 1) / ({formula} + p - 1) = {(p - 1) / (n + p - 1):.1%}")
    print(f"live activations, in microbatches: {', '.join(counts)}")


if __name__ == "__main__":
    main()
