"""3D parallelism of the GPT: data, pipeline and tensor parallelism, with sequence, context and
expert parallelism and ZeRO. This is what train.py runs:

    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2 --zero 1         # dp = 8 / (tp pp) = 2

With the same seed and global batch every layout has the same losses and gradients, up to the order
of additions.

    1. Ranks                    their grid, their groups, their collectives
    2. Tensor parallelism       each matrix is cut             --tp, --sequence-parallel
    3. Pipeline parallelism     the layers are cut             --pp, --pp-schedule
    4. Data parallelism         the batch is cut               --zero (dp is what remains)
    5. Context parallelism      the sequence is cut            --cp
    6. Expert parallelism       the experts are divided        --ep

`Run` in train.py puts it together. What parallelism/ adds, as subclasses:

    loss.py         a faster head, and a token matrix whose gradient adds up in place
    schedules.py    the orders "interleaved" and "zb-h1"; pipeline.py runs them
    zero.py         --offload, the values of step 0, and skipped steps
    context.py      rotary positions, windows, recomputed attention
    experts.py      routers, experts that tensor parallelism cuts
    build.py        a rank of train.py: its groups on GPUs, its part of a model

`linear`, `matmul` and `lookup` are F.linear, torch.matmul and F.embedding. They differ in 16 bits
on a CPU alone, where PyTorch's own are slow or inaccurate (kernels.py).

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.
"""
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.adamw import adamw     # the function: the class imports a compiler, for seconds

from model import GPT, IGNORE_INDEX, CoreAttention, ceil_div
from parallelism import collectives
from parallelism.collectives import comm_errors, on_hosts, sum_dtype
from parallelism.kernels import attend_to_prefix, linear, lookup, matmul

# ---------------------------------------------------------------------------------------------
# 1. Ranks
#
# A rank is one process. The ranks form an array (pp, dp, cp, tp) in row-major order: neighbors in
# tp have consecutive numbers, and so have the ranks of a stage. For pp 2, dp 2, cp 1, tp 2:
#
#                     replica 0   replica 1
#       stage 0       0   1       2   3          tensor parallel    (0 1) (2 3) (4 5) (6 7)
#       stage 1       4   5       6   7          same weights       (0 2) (1 3) (4 6) (5 7)
#                                                pipelines          (0 4) (1 5) (2 6) (3 7)
#
# A machine has consecutive ranks, so the ranks that send each other most are neighbors. Tensor
# parallelism sends most: two all-reduces in the forward of each block, and two in its backward.
# Context parallelism gathers keys and values in each, data parallelism sums each gradient once.
# Pipelines send the fewest bytes: one block's output and its gradient. So a boundary of stages is
# the cheapest place to cut a job into machines (Narayanan et al. 2021, section 3).
# ---------------------------------------------------------------------------------------------


GROUPS = ("tp", "cp", "replicas", "ep", "same_experts", "pp", "world", "embedding")


class Grid:
    """The layout, this rank's coordinates in it, and its process groups. A group of one is None.

    A replica is a full copy of the model, on pp x tp ranks. There are dp x cp replicas: dp cuts the
    rows of the batch, and cp cuts their positions. With cp 2 each replica of the drawing becomes
    two. The gradients of the replicas are summed, and ZeRO shards over the replicas. With `ep`,
    every ep consecutive replicas divide the experts of a mixture among them (section 6).

    chunks      parts of the model that this rank runs in turn (schedules.py: interleaved)
    hosts       the machine of each rank, for errors
    """

    def __init__(self, dp: int, pp: int, tp: int, rank: int = 0, *, cp: int = 1, ep: int = 1,
                 chunks: int = 1, sequence_parallel: bool = False):
        self.dp, self.pp, self.cp, self.tp, self.ep = dp, pp, cp, tp, ep
        self.rank = rank
        self.world = dp * pp * cp * tp
        self.ranks = torch.arange(self.world).view(pp, dp, cp, tp)
        coordinates = (self.ranks == rank).nonzero()[0].tolist()
        self.stage, self.dp_rank, self.cp_rank, self.tp_rank = coordinates
        self.replicas = dp * cp                                 # how many there are
        self.replica = self.dp_rank * cp + self.cp_rank         # the number of this rank's
        self.ep_rank = self.replica % ep
        self.is_first = self.stage == 0
        self.is_last = self.stage == pp - 1
        self.sequence_parallel = sequence_parallel
        self.groups = dict.fromkeys(GROUPS)
        self.chunks = chunks
        self.hosts = [socket.gethostname()] * self.world

    def at_rank(self, rank: int) -> "Grid":
        """The place of another rank in the same layout, without groups."""
        return Grid(self.dp, self.pp, self.tp, rank, cp=self.cp, ep=self.ep, chunks=self.chunks,
                    sequence_parallel=self.sequence_parallel)

    def members(self, kind: str) -> list[int]:
        """The ranks in this rank's group of this kind."""
        p, d, c, t = self.stage, self.dp_rank, self.cp_rank, self.tp_rank
        replicas = self.ranks[p, :, :, t].reshape(-1, self.ep)      # a row shares all experts
        members = dict(
            tp=self.ranks[p, d, c, :],                      # share each matrix
            cp=self.ranks[p, d, :, t],                      # share each sequence
            replicas=replicas,                              # have the same weights
            ep=replicas[self.replica // self.ep],           # share the experts
            same_experts=replicas[:, self.ep_rank],         # have the same experts
            pp=self.ranks[:, d, c, t],                      # share the layers
            world=self.ranks,
            embedding=self.ranks[[0, -1], d, c, t])         # have the tied matrix: the end stages
        return members[kind].flatten().tolist()


def make_groups(grid: Grid, backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """Create this rank's process groups. An operation waits `timeout` for another rank (None: 30
    minutes). Only the members of a group create it. PyTorch counts the groups of a process to name
    the next one, and all members must find the same name. So "embedding", which stages in the
    middle do not create, comes last."""
    for kind in GROUPS:
        ranks = grid.members(kind)
        is_used = grid.ep > 1 or kind != "same_experts"
        if is_used and grid.rank in ranks and len(set(ranks)) > 1:
            grid.groups[kind] = dist.new_group(
                ranks, timeout=timeout, backend=backend, use_local_synchronization=True,
                group_desc=f"ranks {ranks}{on_hosts(ranks, grid.hosts)}")


# The ranks of a group use three collectives. For ranks a and b, which have two slices each:
#
#                before      reduce-scatter      then all-gather     or all-reduce, from "before"
#       rank a   a0 a1       a0+b0  -            a0+b0  a1+b1        a0+b0  a1+b1
#       rank b   b0 b1       -      a1+b1        a0+b0  a1+b1        a0+b0  a1+b1
#
# So an all-reduce costs as much as the other two together. Each of these functions works in the
# memory of x and starts at once. What it returns is a `Work`, so a rank can compute until it needs
# the result. Without a group x is the result.


class Work:
    """Communication under way. `wait` waits for it and returns the result. `start` is a function of
    torch.distributed; errors name the operation and the ranks of the group."""

    def __init__(self, result: torch.Tensor | None, operation: str = "", group=None,
                 start: Callable | None = None):
        self.result, self.operation, self.group = result, operation, group
        self.handle = None
        if start is not None:
            with comm_errors(operation, group):
                self.handle = start(group=group, async_op=True)

    def wait(self) -> torch.Tensor | None:
        if self.handle is not None:
            with comm_errors(self.operation, self.group):
                self.handle.wait()
        return self.result


def library(x: torch.Tensor):
    """What has the collectives of x: torch.distributed, for CPUs our own, which send less."""
    return collectives if x.device.type == "cpu" else dist


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> Work:
    """Sum x over the ranks of a group, or apply another operation."""
    if group is None:
        return Work(x)
    return Work(x, "all-reduce", group, partial(library(x).all_reduce, x, op))


def reduce_scatter(x: torch.Tensor, group) -> Work:
    """Cut x along dimension 0 into a slice for each rank. This rank's becomes the sum over the
    ranks, and is the result. What happens to the other slices is undefined."""
    if group is None:
        return Work(x)
    own = x.chunk(group.size())[group.rank()]
    return Work(own, "reduce-scatter", group, partial(library(x).reduce_scatter_single, own, x))


def all_gather(x: torch.Tensor, group) -> Work:
    """Copy each rank's slice of x to all ranks: the reverse of `reduce_scatter`."""
    if group is None:
        return Work(x)
    own = x.chunk(group.size())[group.rank()]
    return Work(x, "all-gather", group, partial(library(x).all_gather_single, x, own))


def all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group) -> Work:
    """The first sent[0] rows of x go to rank 0 of the group, the next sent[1] to rank 1, and so on.
    The result is new memory, with received[r] rows from each rank r. A number may be 0."""
    if group is None:
        return Work(x)
    result = x.new_empty(sum(received), *x.shape[1:])
    return Work(result, "all-to-all", group,
                partial(dist.all_to_all_single, result, x.contiguous(), received, sent))


class WithGradient(torch.autograd.Function):
    """function(x), whose gradient is gradient(dy), because autograd does not see communication.

    The gradient of an all-gather is a reduce-scatter. All ranks compute with this rank's slice, so
    its gradient is the sum of theirs. The gradient of a reduce-scatter is an all-gather."""

    @staticmethod
    def forward(ctx, x, function, gradient):
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient(dy), None, None


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
#   f: identity forward,   all-reduce backward      both ranks use x, so its gradient is a sum
#   g: all-reduce forward, identity backward        y is a sum, so each term has the gradient of y
#
# Between f and g the ranks do different work, so each has only its own term of the gradient of x.
# Before f and after g all ranks do the same work and compute the same loss. Each rank has the whole
# gradient there, and a sum would count it tp times.
#
# Attention is cut the same way: each rank has some heads instead of some columns. nn.Linear stores
# its weight as (out, in), so "by columns" cuts dimension 0.
#
# Sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Between g and the next f come
# bias, residual addition and LayerNorm: all tp ranks do the same work on the same activations.
# Instead, let each hold some positions there. For two ranks and positions 0 to 3:
#
#                 norm               f     qkv, attention, proj     g      norm
#       rank a    0 1     ->   0 1 2 3     with half of the heads   ->     0 1
#       rank b    2 3     ->   0 1 2 3     with the other half      ->     2 3
#
#   f: all-gather forward,     reduce-scatter backward
#   g: reduce-scatter forward, all-gather backward
#
# f and g together send as much as one all-reduce, and the activations from g to f take 1 / tp of
# the memory. A parameter that is used there gets a gradient from this rank's positions alone, which
# `finish_grad_sync` sums over the tp ranks.
#
# An all-gather puts the ranks' parts one after another, and a reduce-scatter takes them so:
#
#     by sequences (B, T, C)               by ranks (tp B, T / tp, C), here B = tp = 2
#
#     sequence 0:  rank 0 | rank 1         rank 0 of sequence 0, of 1, rank 1 of sequence 0, of 1
#     sequence 1:  rank 0 | rank 1
#
# From f to g activations stay by ranks, because a change of the order copies them. A product does
# not care. Only attention needs whole sequences.
# ---------------------------------------------------------------------------------------------


def gather_positions(x: torch.Tensor, grid: Grid) -> Work:
    """For f's forward and g's backward: x itself. With sequence parallelism all positions, by
    ranks: (B, T / tp, C) -> (tp B, T / tp, C)."""
    if not grid.sequence_parallel:
        return Work(x)
    parts = x.new_empty(grid.tp, *x.shape)                              # (tp, B, T / tp, C)
    parts[grid.tp_rank] = x
    return all_gather(parts.flatten(0, 1), grid.groups["tp"])


def sum_over_ranks(x: torch.Tensor, grid: Grid) -> Work:
    """For g's forward and f's backward: the sum of the ranks' x (B, T, C), in place. With sequence
    parallelism x is by ranks, (tp B, T / tp, C), and the result a part of it: the sum of this
    rank's positions, (B, T / tp, C). The other parts change too, so autograd must not have saved
    x."""
    if not grid.sequence_parallel:
        return all_reduce(x, grid.groups["tp"])
    return reduce_scatter(x, grid.groups["tp"])


def f(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The input of matrices that are cut by columns."""
    return WithGradient.apply(x, lambda x: gather_positions(x.view_as(x), grid).wait(),
                              lambda dx: sum_over_ranks(dx.clone(), grid).wait())


class SumInPlace(torch.autograd.Function):
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


def g(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The output of a matrix that is cut by rows: the sum of what the ranks computed."""
    return SumInPlace.apply(x, grid)


def by_ranks(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """With sequence parallelism (B, T, ...) -> (tp B, T / tp, ...), a view if B is 1; else x."""
    if not grid.sequence_parallel:
        return x
    return x.unflatten(1, (grid.tp, -1)).transpose(0, 1).flatten(0, 1)


def by_sequences(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The reverse of `by_ranks`: (tp B, T / tp, ...) -> (B, T, ...)."""
    if not grid.sequence_parallel:
        return x
    return x.unflatten(0, (grid.tp, -1)).transpose(0, 1).flatten(1, 2)


def cut_positions(x: torch.Tensor, grid: Grid, dim: int = 1) -> torch.Tensor:
    """With sequence parallelism this rank's T / tp of the positions in dimension `dim`; else x."""
    if not grid.sequence_parallel:
        return x
    return x.chunk(grid.tp, dim)[grid.tp_rank]


class TensorParallel(nn.Module):
    """Takes over a plain module's parameters. `partition_dim` says in which dimension they are cut
    (those it does not name are whole), `stacked` how many matrices are stacked there, as q, k and v
    are: each is cut by itself, (3C, C) -> (3C / tp, C). Here the parameters are whole, but without
    memory. ParamSpec.cut leaves this rank's part (parallelism/parameters.py)."""
    partition_dim = {}

    def __init__(self, plain: nn.Module, grid: Grid):
        super().__init__()
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        self.stacked = getattr(plain, "stacked", 1)
        self.grid = grid

    def multiply(self, product: Callable, x: torch.Tensor, *args) -> torch.Tensor:
        return product(x, self.weight, *args)       # pipeline.ZeroBubble does more


class ColumnProduct(torch.autograd.Function):
    """f(x) W^T + b. Backward computes dx, starts its sum, computes dW and only then waits. With
    sequence parallelism it gathers x again, because saving f(x) would take tp times the memory: a
    block then sends as much as five all-reduces instead of four."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return linear(gather_positions(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_dw, needs_db = ctx.needs_input_grad[1:3]
        gathering = gather_positions(x, ctx.grid) if needs_dw else None
        dx = sum_over_ranks(matmul(dy, weight), ctx.grid)       # overlaps with the all-gather of x
        dy = dy.flatten(0, 1)                                   # (B T, out / tp)
        dw = matmul(dy.t(), gathering.wait().flatten(0, 1)) if needs_dw else None
        db = dy.sum(0) if needs_db else None
        return dx.wait(), dw, db, None


class ColumnParallelLinear(TensorParallel):
    """(B, T, in), equal on all ranks -> (B, T, out / tp), this rank's columns. With sequence
    parallelism (B, T / tp, in) -> (tp B, T / tp, out / tp), by ranks."""
    partition_dim = {"weight": 0, "bias": 0}

    def forward(self, x):
        if self.grid.tp == 1:
            return self.multiply(linear, x, self.bias)
        return self.multiply(ColumnProduct.apply, x, self.bias, self.grid)


class QKVParallelLinear(ColumnParallelLinear):
    """Its columns are cut by heads: those of q, k and v, which are stacked, each on its own, or in
    groups (models/llama.py). Attention takes them by sequences."""

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
        y = self.sum(self.multiply(linear, x))
        return y if self.bias is None else y + self.bias

    def sum(self, y):
        return g(y, self.grid)


class AttentionOutput(RowParallelLinear):
    """Its input is always by sequences. By ranks, backward would keep it twice."""

    def sum(self, y):
        return g(by_ranks(y, self.grid), self.grid)


def find_local(tokens: torch.Tensor, first, n: int) -> tuple:
    """The token matrix, which embedding and head share, is cut by rows: a rank has n of the tokens,
    from `first` on. Returns for each token its row there, or 0, and whether it is there."""
    rows = tokens - first
    is_local = (rows >= 0) & (rows < n)
    return rows.where(is_local, 0), is_local


class VocabParallelEmbedding(TensorParallel):
    """tokens (B, T) -> (B, T, C). A rank computes 0 for tokens of other ranks, and g sums."""
    partition_dim = {"weight": 0}

    def forward(self, tokens):
        if self.grid.tp == 1:
            return self.lookup(tokens)
        n = len(self.weight)
        rows, is_local = find_local(by_ranks(tokens, self.grid), self.grid.tp_rank * n, n)
        x = g(self.lookup(rows) * is_local.unsqueeze(-1), self.grid)
        # x may be a slice of all positions. A Llama, which adds nothing to x, would keep them.
        return x.clone() if self.grid.sequence_parallel else x

    def lookup(self, rows):
        return lookup(rows, self.weight)


class PositionEmbedding(TensorParallel):
    """positions 0, 1, ... n - 1 of this rank's part of a sequence -> (n, C): with sequence and
    context parallelism they are others in the whole sequence. Those of packed texts are given for
    the whole sequence, (B, T) -> (B, n, C)."""

    def forward(self, positions):
        if positions.dim() == 2:
            return lookup(own_positions(positions, self.grid), self.weight)
        parts = self.grid.tp if self.grid.sequence_parallel else 1
        T = len(positions) * parts * self.grid.cp
        whole = torch.arange(T, device=positions.device)
        return F.embedding(own_positions(whole, self.grid), self.weight)


def own_positions(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x (..., T) -> (..., n): of the positions of sequences, those that this rank holds."""
    return cut_positions(cut_sequence(x, grid.cp_rank, grid.cp), grid, dim=-1)


class VocabParallelHead(TensorParallel):
    """x (B, T, C), with sequence parallelism (B, T / tp, C), and targets (B, T) -> the summed loss
    of model.Head, the same on every rank. Each rank computes V / tp of the logits z of a position.
    For each position the ranks exchange three numbers: m, the sum and z_target.

        loss = log sum_v exp(z_v) - z_target = m + log sum_v exp(z_v - m) - z_target

    m is the largest logit, so that exp cannot overflow. m cancels, so it needs no gradient. In
    train.py loss.TiledHead computes the same, without ever having all logits in memory."""
    partition_dim = {"weight": 0, "bias": 0}
    loss_factor = 1.0           # by what a pipeline multiplies the loss before backward

    def __init__(self, plain: nn.Module, grid: Grid):
        super().__init__(plain, grid)
        self.norm, self.vocab_size = plain.norm, plain.vocab_size

    def forward(self, x, targets):
        return self.loss(self.norm(x), targets)

    def loss(self, x, targets):
        group = self.grid.groups["tp"]
        z = linear(f(x, self.grid), self.weight, self.bias)             # (B, T, V / tp)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        tokens = torch.arange(len(self.weight), device=z.device)
        tokens += self.grid.tp_rank * len(self.weight)
        z = z.masked_fill(tokens >= self.vocab_size, -torch.inf)        # padding: probability 0
        m = all_reduce(z.detach().amax(-1), group, dist.ReduceOp.MAX).wait()    # (B, T), as below
        total = add_up((z - m.unsqueeze(-1)).exp().sum(-1), group)
        targets = by_ranks(targets, self.grid)
        columns, is_local = find_local(targets, tokens[0], len(tokens))
        z_target = z.gather(-1, columns.unsqueeze(-1)).squeeze(-1).where(is_local, 0)
        losses = m + total.log() - add_up(z_target, group)
        return losses.where(targets != IGNORE_INDEX, 0).sum()


def add_up(x: torch.Tensor, group) -> torch.Tensor:
    """The sum over the ranks, which all compute the same with it."""
    return WithGradient.apply(x, lambda x: all_reduce(x.clone(), group).wait(), lambda dy: dy)


PLAN = {            # which module of a model becomes what
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


def tensor_parallel(model: GPT, grid: Grid) -> None:
    """Replace every module that has a matrix to cut, or that has to know its positions."""
    replace_modules(model, PLAN, grid)
    for block in model.blocks.values():     # different heads need different dropout masks
        block.attn.core_attention.part = grid.tp_rank


def replace_modules(model: GPT, plan: dict, grid: Grid) -> None:
    for name, module in list(model.named_modules()):
        name_in_plan = re.sub(r"^blocks\.\d+\.", "", name)             # of any block
        if name_in_plan in plan:
            model.set_submodule(name, plan[name_in_plan](module, grid))


# ---------------------------------------------------------------------------------------------
# 3. Pipeline parallelism (GPipe: Huang et al. 2019, 1F1B: Narayanan et al. 2021, section 2.2)
#
# The layers are cut into p stages, one for each rank of a pipeline, and the batch into m
# microbatches, which pass through the stages one after another: forward (F), then backward (B).
# A row for each of three stages, five microbatches, a backward as long as two forwards. The last
# column is the number of microbatches whose activations a stage keeps:
#
#     GPipe      F0 F1 F2 F3 F4 .  .  .  .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0      5
#                .  F0 F1 F2 F3 F4 .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .       5
#                .  .  F0 F1 F2 F3 F4 B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .  .  .       5
#
#     1F1B       F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4      3
#                .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .       2
#                .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .       1
#
# In both a stage idles for (p - 1) / (m + p - 1) of the time. This is the bubble. With GPipe it
# keeps the activations of m microbatches. With 1F1B it keeps those of p at most, because each B
# frees those of its microbatch. `python -m tools.schedule` draws any schedule.
# ---------------------------------------------------------------------------------------------


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The numbers of a stage's blocks. Stages differ by one block at most. The last stage, which
    also has the head, never has more blocks than another."""
    return range(ceil_div(stage * n_layer, pp), ceil_div((stage + 1) * n_layer, pp))


def chunk_layers(n_layer: int, grid: Grid) -> list[range]:
    """The numbers of this rank's blocks, in each of its chunks: one, unless they are interleaved
    (schedules.py)."""
    return [stage_layers(n_layer, grid.pp * grid.chunks, chunk * grid.pp + grid.stage)
            for chunk in range(grid.chunks)]


def keep_stage(model: GPT, grid: Grid) -> None:
    """Keep the layers of this rank's stage. The first stage also keeps the embedding, the last one
    the head. The forward of model.GPT leaves out what is None, so it runs the rest as a stage."""
    layers = set().union(*chunk_layers(model.cfg.n_layer, grid))
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None


# A schedule is the list of a stage's ops, in order: (kind, microbatch, chunk). The kind is "F" or
# "B". The chunk is 0, unless a stage has several parts of the layers (schedules.py: interleaved).


def gpipe(stage: int, stages: int, m: int) -> list[tuple]:
    """All forwards, then all backwards, the last one first."""
    return [("F", i, 0) for i in range(m)] + [("B", i, 0) for i in reversed(range(m))]


def one_f_one_b(stage: int, stages: int, m: int) -> list[tuple]:
    """Warm-up: one forward for each later stage, because no gradient arrives before those have run.
    Steady state: a forward and a backward in turn. Cool-down: the backwards that are left."""
    forwards, backwards = ([(kind, i, 0) for i in range(m)] for kind in "FB")
    return in_turn(forwards, backwards, ahead=stages - 1 - stage)


def in_turn(forwards: list, backwards: list, ahead: int) -> list[tuple]:
    """First `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    ops = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards):
        ops += pair
    return ops + backwards[len(forwards[ahead:]):]


class Pipeline:
    """A stage that runs a schedule on the microbatches of a step. Before a turn, which is one op,
    its input arrives. After it its result leaves, while the next turn runs: no stage waits for its
    neighbor to receive.

    batch            microbatch -> (inputs (B, T), targets (B, T), dropout seed, positions of packed
                     texts (B, T) or None)
    activation_like  a tensor like what one stage sends to the next: (B, T, C), or with sequence
                     parallelism (B, T / tp, C)
    flat             collects the gradients (zero.FlatParameters); None: they stay in .grad
    loss             on the last stage the sum of the losses so far, not scaled; else 0
    """

    def __init__(self, model: GPT, grid: Grid, batch: list, activation_like: torch.Tensor,
                 flat=None):
        self.model, self.grid, self.batch, self.flat = model, grid, batch, flat
        self.activation_like = activation_like
        self.loss = activation_like.new_zeros((), dtype=sum_dtype(activation_like.device))
        self.chunks = [model]       # pipeline.Interleaved has several
        self.kept = {}              # (microbatch, chunk): (x, y), input and output, from F to B

    def F(self, m: int, chunk: int, x: torch.Tensor | None) -> torch.Tensor:
        """Forward -> activations, or from the head the loss."""
        inputs, targets, dropout_seed, positions = self.batch[m]
        if self.grid.is_first and chunk == 0:
            x = inputs
        else:
            x.requires_grad_()      # a leaf: backward ends here, with the gradient in x.grad
        y = self.chunks[chunk](x, targets, dropout_seed, positions=positions)
        if self.chunks[chunk].head is not None:
            self.loss.add_(y.detach())
        if torch.is_grad_enabled():
            self.kept[m, chunk] = x, y
        return y

    def B(self, m: int, chunk: int, dy: torch.Tensor | None) -> torch.Tensor:
        """Backward, given the gradient of y -> that of x. The parameters' gradients add up."""
        x, y = self.kept.pop((m, chunk))
        if self.chunks[chunk].head is not None:
            scaled = y * self.model.head.loss_factor
        else:       # dy is its gradient. (torch.autograd.backward(y, dy) imports a compiler, 0.5 s)
            scaled = (y * dy).sum()
        if self.flat is not None:
            self.flat.prepare_grad_sync(self.chunks[chunk], m == self.last_backward[chunk])
        scaled.backward()
        return x.grad

    def run(self, schedule: list[tuple]) -> None:
        """Run a schedule. Raises DistError if another rank is gone or hangs."""
        self.last_backward = {chunk: m for kind, m, chunk in schedule if kind == "B"}
        turns = self.turns(schedule)
        leaving = dict.fromkeys("FBW", Work(None))          # the last result of each kind
        arriving = start_messages(self.grid, self.inputs_of(turns[0]))
        for turn, next_turn in zip(turns, [*turns[1:], []]):
            inputs = arriving
            receive_early = self.may_receive_early(turn, next_turn)
            if receive_early:
                arriving = start_messages(self.grid, self.inputs_of(next_turn))
            results = []
            for op, x in zip(turn, inputs):
                y = self.run_op(op, x)
                leaving[op[0]].wait()       # the result before, which has traveled during this op
                results.append(Message(True, op, y))
            if receive_early:
                started = start_messages(self.grid, results)
            else:                           # together: they may cross
                started = start_messages(self.grid, results + self.inputs_of(next_turn))
                arriving = started[len(turn):]
            for op, work in zip(turn, started):
                leaving[op[0]] = work
        for work in leaving.values():
            work.wait()

    def turns(self, schedule: list[tuple]) -> list[list[tuple]]:
        return [[op] for op in schedule]

    def inputs_of(self, turn: list[tuple]) -> list["Message"]:
        return [Message(False, op, self.activation_like) for op in turn]

    def may_receive_early(self, turn: list[tuple], next_turn: list[tuple]) -> bool:
        """Whether the next turn's inputs may be received during this turn, not only after it.

        F, then F: they come from the other neighbor than the one that the result goes to, so yes
        (GPipe is 3 to 10% faster on CPUs). F, then B: both messages are with one neighbor and
        cross, so they have to start together."""
        return len(next_turn) > 0 and next_turn[-1][0] == turn[-1][0]

    def run_op(self, op: tuple, x: Work) -> torch.Tensor | None:
        kind, m, chunk = op
        x = gather_message(x.wait(), self.grid)
        try:
            return getattr(self, kind)(m, chunk, x)
        except dist.DistError as error:
            raise dist.DistError(f"{OP_NAMES[kind]} of microbatch {m}: {error}") from error


OP_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}       # for errors


@dataclass
class Message:
    """What a stage sends, or receives, for an op of its own."""
    sending: bool
    op: tuple                   # (kind, microbatch, chunk)
    tensor: torch.Tensor        # the op's result, to be sent; or a tensor like its input


def route(grid: Grid, message: Message) -> tuple[int, int] | None:
    """(the stage at the other end of a message, its tag); None at the ends of the model, where
    there is no other stage, and for "W" (schedules.py: ZB-H1), which sends nothing."""
    kind, m, chunk = message.op
    places = grid.pp * grid.chunks          # chunk c of stage s is number c p + s in the model
    here = chunk * grid.pp + grid.stage
    forth = 1 if kind == "F" else -1        # activations go to the next place, gradients back
    there = here + forth if message.sending else here - forth
    receiver = there if message.sending else here
    if kind == "W" or not 0 <= there < places:
        return None
    tag = 2 * (m * places + receiver) + "FB".index(kind)        # the op that needs the message
    return there % grid.pp, tag


def start_messages(grid: Grid, messages: list[Message]) -> list[Work]:
    """Start all messages together, and return a Work for each; its result is None if the message
    has no `route`. On NCCL they are one operation. If two neighbors send to each other, and each
    started its send before its receive, NCCL could have both wait forever. gloo starts them one by
    one; the tag tells them apart.

    The tp ranks of a stage have the same x for those of the next, which is in another machine. Each
    sends 1 / tp of it. `gather_message` joins the parts (Narayanan et al. 2021, section 4.1)."""
    works = [Work(None) for _ in messages]
    started, operations = [], []
    for work, message in zip(works, messages):
        end = route(grid, message)
        if end is None:
            continue
        stage, tag = end
        peer = grid.rank + (stage - grid.stage) * grid.replicas * grid.tp
        if message.sending:
            start, verb = dist.isend, "send to"
            work.result = message.tensor.detach().contiguous()
        else:
            start, verb = dist.irecv, "receive from"
            work.result = torch.empty_like(message.tensor)
        kind, m, _ = message.op
        work.operation = (f"{OP_NAMES[kind]} of microbatch {m}: {verb} rank {peer}"
                          f"{on_hosts([peer], grid.hosts)} (stage {stage})")
        part = work.result
        if not grid.sequence_parallel:
            part = part.view(-1).chunk(grid.tp)[grid.tp_rank]               # a tp-th of x
        started.append(work)
        operations.append(dist.P2POp(start, part, peer, grid.groups["pp"], tag))
    if started:
        with comm_errors(", ".join(work.operation for work in started)):
            handles = dist.batch_isend_irecv(operations)
        if len(handles) == 1:               # NCCL's one handle is that of every message
            handles = handles * len(started)
        for work, handle in zip(started, handles, strict=True):
            work.handle = handle
    return works


def gather_message(x: torch.Tensor | None, grid: Grid) -> torch.Tensor | None:
    """What has arrived, whole: the tp ranks exchange their parts inside their machine. With
    sequence parallelism x is a part already."""
    if x is not None and not grid.sequence_parallel:
        all_gather(x.view(-1), grid.groups["tp"]).wait()                    # in place
    return x


# ---------------------------------------------------------------------------------------------
# 4. Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020)
#
# Every replica trains on its share of the batch. The gradients are summed over the replicas. The
# replicas start equal, because they have the same seed. They make the same update, so they stay
# equal. The whole idea, if every process is a replica:
# ---------------------------------------------------------------------------------------------


def plain_replica_step(model, optimizer, tokens, targets):
    """tokens, targets (B, T): the whole batch. Each rank trains on its share of the rows."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    loss = model(tokens.chunk(dp)[rank], targets.chunk(dp)[rank])   # a sum over this rank's tokens
    (loss / targets.numel()).backward()                             # its term of the mean loss
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)                             # the gradient of the mean loss
    optimizer.step()                                                # the same on every rank


# `DataParallel` below, which train.py runs, sends few messages, and sends them during backward.
# Parameters are views into flat buckets, two for each block. So are their gradients. Autograd calls
# a hook when it has computed a gradient. The last hook of a bucket starts the bucket's sum:
#
#     time          ------------------------------------------>
#     backward      head    block 1    block 0    embedding
#     all-reduce            head       block 1    block 0     embedding
#
# AdamW keeps two moments for each parameter, its averages of the gradient and of the gradient's
# square, and for a parameter in 16 bits a master in fp32. Gradients add up in fp32, too. With plain
# data parallelism every replica keeps all of it and makes the same update. ZeRO divides this work:
# each of r replicas updates a shard of each bucket, and receives the other shards. AdamW is
# elementwise, so a shard may begin and end anywhere. In bytes per parameter, those sent times
# (r - 1) / r, for a step of m microbatches (in fp32 a parameter is its own master):
#
#         masters,                             bytes kept in           bytes sent in 16 bits
#   ZeRO  moments   gradients   parameters     16 bits     fp32        gradients    parameters
#     0   all       all         all            18          16          8            -
#     1   a shard   all         all            6 + 12/r    8 + 8/r     4            2   after AdamW
#     2   a shard   a shard     all            2 + 16/r    4 + 12/r    4m           2   after AdamW
#     3   a shard   a shard     a shard        18/r        16/r        4m           4m  in use


class Bucket:
    """Parameters that are communicated together: one after another, with padding for equal shards.

    specs           what is known of each (parallelism/parameters.py)
    group, ranks    whose ranks have them, and how many: "replicas", or of experts "same_experts"
    num_shards, shard_rank      the number of ZeRO's shards, and which this rank has
    is_wide         `data` is of the masters' type: a router's, because rounding would choose other
                    experts (section 6)
    shard_ranges    the parts of parameters in it: [(spec, shard_slice, param_slice)], where
                    shard[name][shard_slice] belongs to parameter.flatten()[param_slice]
    data            (numel,) the parameters are views into it; ZeRO 3 frees and restores its memory
    grad            (numel,) their gradients; with ZeRO 2 and 3, None from a sum to the next one
    shard           {name: (numel / num_shards,)} of what this rank updates: views "data" and "grad"
                    (with ZeRO 3, and from ZeRO 2 on, own memory), "exp_avg", "exp_avg_sq", and
                    "master", the same tensor as data if their types are equal
    pending_grads   number of gradients that backward (with ZB-H1: W) has not computed yet
    unsharding      the all-gather of `data` under way, or None
    """

    def __init__(self, name: str, specs: list, replicas: int, num_shards: int, shard_rank: int):
        self.name, self.specs = name, specs
        self.is_wide = name.endswith(".router")
        ep = specs[0].ep
        self.group = "replicas" if ep == 1 else "same_experts"
        self.ranks = replicas // ep
        self.num_shards, self.shard_rank = max(1, num_shards // ep), shard_rank // ep
        self.data = self.grad = self.unsharding = None
        self.shard, self.offsets, self.shard_ranges = {}, {}, []
        self.pending_grads = 0
        end = 0
        for spec in specs:
            self.offsets[spec.name] = end
            end += ceil_div(spec.numel, 32) * 32        # aligned to 64 bytes, in 16 bits too
        self.numel = ceil_div(end, 32 * self.ranks) * 32 * self.ranks
        length = self.numel // self.num_shards
        for spec in specs:
            start = self.offsets[spec.name] - self.shard_rank * length          # in the shard
            low, high = max(start, 0), min(start + spec.numel, length)
            if low < high:
                part = spec, slice(low, high), slice(low - start, high - start)
                self.shard_ranges.append(part)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of `data` or `grad`."""
        return flat.chunk(self.num_shards)[self.shard_rank]

    def view(self, flat: torch.Tensor, spec) -> torch.Tensor:
        """The part of `data` or `grad` that belongs to a parameter, in the parameter's shape."""
        offset = self.offsets[spec.name]
        return flat[offset:offset + spec.numel].view(spec.local_shape)


def make_buckets(specs: list, replicas: int, num_shards: int, shard_rank: int) -> list[Bucket]:
    """Backward completes them from the right; but a tied matrix, to whose gradient embedding and
    head add, is complete last, and no other parameter waits for it.

        | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |                 a tied matrix
        | embed | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp | head |         a head of its own
        | ... | 0.attn | 0.mlp | 0.router | 0.experts | ...                     a mixture of experts
    """
    contents = {"tied": [], "embed": [], "ends": []}
    for spec in specs:
        match spec.name.split("."):
            case ["blocks", number, "norm1" | "attn", *_]:
                bucket = f"{number}.attn"
            case ["blocks", number, "mlp", "router" | "experts" as part, *_]:
                bucket = f"{number}.{part}"
            case ["blocks", number, *_]:
                bucket = f"{number}.mlp"
            case ["embed", "token", _]:
                bucket = "tied" if spec.is_tied else "embed"
            case _:
                bucket = "head" if spec.name == "head.weight" else "ends"
        contents.setdefault(bucket, []).append(spec)
    return [Bucket(name, group, replicas, num_shards, shard_rank)
            for name, group in contents.items() if group]


class DataParallel:
    """This rank's parameters, of type `dtype`, in buckets, with their gradients, masters and
    moments. A step calls zero_grad, then prepare_grad_sync before each backward, finish_grad_sync
    after the last one, and adamw_step. train.py runs a subclass, parallelism/zero.py. All ranks
    must start collectives in the same order.

    grad_factor     by which the gradients are multiplied: loss scale (amp.py), then also clipping
    """
    grad_dtype = None       # None: that of the masters
    host = None             # where masters and moments are. None: with the parameters

    def __init__(self, specs: list, grid: Grid, dtype, master_dtype, device="cpu", zero: int = 0):
        self.grid, self.zero = grid, zero
        self.num_shards, shard_rank = (grid.replicas, grid.replica) if zero > 0 else (1, 0)
        self.buckets = make_buckets(specs, grid.replicas, self.num_shards, shard_rank)
        self.buckets_to_sync = []       # those that this backward sums, the next one last
        self.in_flight = []             # [(bucket, the sum of its gradients under way)]
        self.grad_factor = 1.0
        for bucket in self.buckets:
            self.allocate_parameters(bucket, master_dtype if bucket.is_wide else dtype, device)
            self.allocate_state(bucket, master_dtype, device)
            for spec in bucket.specs:
                for module, attribute in spec.owners:
                    self.attach(module, attribute, bucket, spec)
            self.reshard([bucket])

    def allocate_parameters(self, bucket: Bucket, dtype, device) -> None:
        bucket.data = torch.zeros(bucket.numel, dtype=dtype, device=device)
        own = bucket.own(bucket.data)
        bucket.shard["data"] = bucket.shard["master"] = own.clone() if self.zero == 3 else own

    def allocate_state(self, bucket: Bucket, dtype, device) -> None:
        """What AdamW needs, as the table says: all zero, masters and moments of type `dtype`."""
        shard, grad_dtype = bucket.shard, self.grad_dtype or dtype
        length = len(shard["data"])
        if self.zero < 2:
            bucket.grad = torch.zeros(bucket.numel, dtype=grad_dtype, device=device)
            shard["grad"] = bucket.own(bucket.grad)
        else:
            shard["grad"] = torch.zeros(length, dtype=grad_dtype, device=device)
        zeros = partial(torch.zeros, length, dtype=dtype, device=self.host or device)
        if self.host is not None or shard["data"].dtype != dtype:
            shard["master"] = zeros()
        shard["exp_avg"], shard["exp_avg_sq"] = zeros(), zeros()

    def attach(self, module: nn.Module, attribute: str, bucket: Bucket, spec) -> None:
        """Replace the module's parameter by a view into the bucket, with a hook. A tied matrix
        becomes two Parameters on one memory: as one its hook would run only after both uses."""
        # `.data` has its own version counter: ZeRO 3 gathers into this memory between forward and
        # backward, which autograd must not take for a modified weight.
        parameter = nn.Parameter(bucket.view(bucket.data, spec).data)
        parameter.bucket, parameter.spec = bucket, spec
        parameter.register_post_accumulate_grad_hook(self.grad_ready)
        setattr(module, attribute, parameter)

    # ---- Gradients and their sums

    def zero_grad(self, loss_scale: float = 1.0) -> None:
        self.grad_factor = loss_scale
        torch._foreach_zero_([bucket.grad if self.zero < 2 else bucket.shard["grad"]
                              for bucket in self.buckets])

    def prepare_grad_sync(self, chunk: nn.Module, last: bool) -> None:
        """Before each backward of a chunk of the model. Only the `last` of a step communicates,
        from ZeRO 2 on each. Everything is a sum: the loss is already a share of the batch's."""
        for parameter in chunk.parameters():
            parameter.bucket.pending_grads += 1
        self.buckets_to_sync = []
        if last or self.zero >= 2:
            self.buckets_to_sync = [bucket for bucket in self.buckets if bucket.pending_grads > 0]
            if self.buckets_to_sync[0].specs[0].is_tied_copy:   # the head's gradient is ready first
                self.buckets_to_sync.append(self.buckets_to_sync.pop(0))

    def grad_ready(self, parameter: nn.Parameter) -> None:
        """A hook of autograd, and of the op W of a schedule: the gradient is complete. It runs on
        backward's thread and CUDA stream, so collectives start after the gradient's kernels."""
        if parameter.grad is not None:      # else a Function of loss.py has added it already
            self.add_grad(self.main_grad(parameter), parameter.grad)
            parameter.grad = None
        parameter.bucket.pending_grads -= 1
        # All ranks must communicate in the same order. A bucket completed out of turn waits.
        while self.buckets_to_sync and self.buckets_to_sync[-1].pending_grads == 0:
            self.start_grad_sync(self.buckets_to_sync.pop())

    def main_grad(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where its gradient adds up. From ZeRO 2 on this memory is created by the first gradient
        and freed by the sum."""
        bucket = parameter.bucket
        if bucket.grad is None:
            bucket.grad = torch.zeros_like(bucket.data, dtype=bucket.shard["grad"].dtype)
        return bucket.view(bucket.grad, parameter.spec)

    def add_grad(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        total.add_(grad)

    def start_grad_sync(self, bucket: Bucket) -> None:
        """Start the sum of a complete bucket over the replicas."""
        if bucket.grad is not None:     # under GPipe the first backward sends the head's, of all
            # Wait for the previous bucket first where a sum in flight holds memory: from ZeRO 2
            # on the whole bucket's gradients, on a CPU what the other ranks have sent.
            if self.zero >= 2 or (self.zero == 1 and bucket.grad.device.type == "cpu"):
                self.wait_grad_sync()
            start = all_reduce if self.zero == 0 else reduce_scatter
            self.in_flight.append((bucket, start(bucket.grad, self.grid.groups[bucket.group])))
        if self.zero >= 2:
            bucket.grad = None
        self.reshard([bucket])              # this backward does not need it again

    @torch.no_grad()
    def wait_grad_sync(self) -> None:
        for bucket, work in self.in_flight:
            total = work.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += total
        self.in_flight = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for all buckets. Then sum the gradients that have terms on other ranks: the tied
        matrix's at both ends of a pipeline, and those of `is_in_parts`."""
        assert not self.buckets_to_sync, "a parameter got no gradient"
        self.wait_grad_sync()
        for bucket in self.buckets:
            if bucket.name == "tied":
                all_reduce(bucket.shard["grad"], self.grid.groups["embedding"]).wait()
        parts = [bucket.shard["grad"][shard_slice] for bucket in self.buckets
                 for spec, shard_slice, _ in bucket.shard_ranges if self.is_in_parts(spec)]
        if parts:
            sums = all_reduce(torch.cat(parts), self.grid.groups["tp"]).wait()
            torch._foreach_copy_(parts, sums.split([len(x) for x in parts]))

    def is_in_parts(self, spec) -> bool:
        """Whether each tp rank has all of the parameter, but of its gradient only the term of this
        rank's positions."""
        return self.grid.sequence_parallel and spec.partition_dim is None

    # ---- The update, and the parameters' way to the other replicas

    @torch.no_grad()
    def adamw_step(self, factor: float, updates: int, lr: float, beta1: float, beta2: float,
                   weight_decay: float) -> None:
        """The optimizer's step: AdamW on this rank's shards, with the gradients times `factor`.
        `updates`: how many there have been, with this one."""
        torch._foreach_mul_([bucket.shard["grad"] for bucket in self.buckets], factor)
        self.grad_factor *= factor
        self.update_shards(updates, lr, beta1, beta2, weight_decay)

    def update_shards(self, *arguments) -> None:
        adamw_update(self.buckets, [bucket.shard["grad"] for bucket in self.buckets], *arguments)
        self.sync_params()

    @torch.no_grad()
    def sync_params(self) -> None:
        """masters -> parameters, rounded to the parameters' type. ZeRO 1 and 2 start to share them
        with all replicas: `gather_before_use` waits."""
        for bucket in self.buckets:
            bucket.shard["data"].copy_(bucket.shard["master"])      # nothing if it is one tensor
            if self.zero in (1, 2):
                self.start_gather(bucket)

    def start_gather(self, bucket: Bucket) -> None:
        assert bucket.unsharding is None, "the last update's parameters are still on their way"
        bucket.unsharding = all_gather(bucket.data, self.grid.groups[bucket.group])

    def unshard(self, buckets: list[Bucket], prefetch: list[Bucket] = ()) -> None:
        """Make the buckets' parameters whole: gather them, or wait for the all-gather under way.
        Begin to gather those of the buckets to `prefetch`."""
        for bucket in (*buckets, *prefetch):
            if bucket.data.untyped_storage().size() == 0:
                bucket.data.untyped_storage().resize_(bucket.data.nbytes)
                bucket.own(bucket.data).copy_(bucket.shard["data"])
                self.start_gather(bucket)
        for bucket in buckets:
            if bucket.unsharding is not None:
                bucket.unsharding.wait()
                bucket.unsharding = None

    def reshard(self, buckets: list[Bucket]) -> None:
        """ZeRO 3: free the gathered parameters. Their views refer to the storage: filling it again
        (`unshard`) makes them valid again."""
        for bucket in buckets:
            if self.zero == 3:
                assert bucket.unsharding is None, "a gather would write into freed memory"
                bucket.data.untyped_storage().resize_(0)


def adamw_update(buckets: list[Bucket], grads: list[torch.Tensor], updates: int, lr: float,
                 beta1: float, beta2: float, weight_decay: float) -> None:
    """torch's fused AdamW of this rank's shards of these buckets, whose gradients are `grads`. A
    router's bias (models/moe.py) takes a step of a fixed size instead."""
    slices = {True: ([], [], [], []), False: ([], [], [], [])}      # with weight decay, and without
    for bucket, grad in zip(buckets, grads):
        shard = bucket.shard
        whole = shard["master"], grad, shard["exp_avg"], shard["exp_avg_sq"]
        for spec, part, _ in bucket.shard_ranges:
            if spec.sign_step > 0:
                shard["master"][part] -= spec.sign_step * grad[part].sign()
                continue
            # They end at a multiple of 32, in the padding. So each number gets the same
            # instructions, wherever a shard ends.
            end = ceil_div(part.stop, 32) * 32
            for tensors, tensor in zip(slices[spec.decays], whole):
                tensors.append(tensor[part.start:end])
    for decays, (masters, grads, *moments) in slices.items():
        if masters:
            counts = torch.full((len(masters),), updates - 1.0, device=grads[0].device).unbind()
            # It adds 1 to each count. The empty list is amsgrad's.
            adamw(masters, grads, *moments, [], list(counts), fused=True, amsgrad=False,
                  maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=1e-8,
                  weight_decay=weight_decay if decays else 0.0)


def gather_before_use(model: GPT, flat: DataParallel) -> None:
    """Wrap the forward of the embedding, each block and the head in unshard and reshard. ZeRO 1 and
    2 await there, bucket by bucket, the all-gather after AdamW. With ZeRO 3 (FSDP, Zhao et al.
    2023) the parameters of a block exist only while it runs:

        forward    unshard block i, prefetch i + 1, run, reshard
        backward   unshard block i, prefetch i - 1, run; start_grad_sync sums and reshards

    The tied matrix stays gathered from the embedding to the head, which computes its gradient in
    forward. The other parameters of the ends, and the last block, stay gathered until backward."""
    def of(name):           # its buckets: of tied, embed, ends, head, or the number of a block
        return [bucket for bucket in flat.buckets if bucket.name.split(".")[0] == name]

    def run(forward, needed, freed, kept, previous, following, *args):
        flat.unshard(needed, prefetch=following)
        y = forward(*args)
        if y.requires_grad and previous is not None:
            # The hook runs when y's gradient is there, before the block's backward.
            y.register_hook(lambda dy: flat.unshard(needed, prefetch=previous))
        flat.reshard(freed if y.requires_grad else freed + kept)
        return y

    tied, embed, ends, head = map(of, ("tied", "embed", "ends", "head"))
    blocks = [of(number) for number in model.blocks]            # [[attention, MLP ...]]
    parts = [(model.embed, tied + embed + ends, embed, [], None, blocks[0]),
             (model.head, tied + head + ends, tied + head, ends, None, [])]
    for block, needed, previous, following in zip(model.blocks.values(), blocks, [[], *blocks],
                                                  [*blocks[1:], []]):
        freed, kept = (needed, []) if following else ([], needed)
        parts.append((block, needed, freed, kept, previous, following))
    for module, *arguments in parts:
        if module is not None:
            module.forward = partial(run, module.forward, *arguments)


# ---------------------------------------------------------------------------------------------
# 5. Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2)
#
# The activations of a long sequence do not fit on one rank. So the sequence is cut, too: a rank
# runs the whole model on some of its positions, from the embedding to the loss, and the gradients
# are summed over the ranks, as in data parallelism. Only attention needs other positions: it reads
# the keys and values of all earlier ones. Late positions have more work, so each rank has an early
# and a late piece of the sequence (Brandon et al. 2023). For two ranks and 12 positions:
#
#     position            0 1 2    3 4 5    6 7 8    9 10 11
#     rank                0        1        1        0
#     number of keys      1 2 3    4 5 6    7 8 9    10 11 12        39 on either rank
#
# Ring attention (Liu et al. 2023) instead passes K and V from rank to rank, and merges the outputs
# for each part: more to read.
# ---------------------------------------------------------------------------------------------


def cut_sequence(x: torch.Tensor, rank: int, cp: int, dim: int = -1) -> torch.Tensor:
    """A copy of the positions of x, T along `dim`, that a rank of cp holds: pieces `rank` and
    2 cp - 1 - `rank` of 2 cp. T must be a multiple of 2 cp, unless cp is 1."""
    pieces = x.tensor_split(2 * cp, dim)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim)


class GatherKeysAndValues(torch.autograd.Function):
    """k and v of this rank's positions, (B, H, T / cp, D) each -> those of all positions, in order:
    (2, B, H, T, D). Backward: the gradients at this rank's positions, summed over the ranks."""

    @staticmethod
    def forward(ctx, k, v, grid):
        ctx.grid = grid
        parts = k.new_empty(grid.cp, 2, *k.shape)                   # (cp, 2, B, H, T / cp, D)
        parts[grid.cp_rank, 0] = k
        parts[grid.cp_rank, 1] = v
        all_gather(parts, grid.groups["cp"]).wait()                 # fills in the other ranks'
        early, late = parts.chunk(2, dim=-2)            # each rank's first and second piece
        return torch.cat([*early, *late.flip(0)], dim=-2)   # the last rank's late piece comes first

    @staticmethod
    def backward(ctx, dkv):
        grid = ctx.grid
        parts = torch.stack([cut_sequence(dkv, rank, grid.cp, dim=-2) for rank in range(grid.cp)])
        sums = reduce_scatter(parts, grid.groups["cp"]).wait()      # (1, 2, B, H, T / cp, D)
        return sums[0, 0], sums[0, 1], None


class ContextParallelAttention(CoreAttention):
    """model.CoreAttention of q, k and v (B, H, T / cp, D), those of this rank's positions."""

    def __init__(self, plain: CoreAttention, grid: Grid):
        super().__init__(plain.p, *plain.name)
        self.grid, self.part = grid, plain.part

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        """With dropout each rank has a seed of its own. A mask (B, 1, T, T) is of all positions."""
        k, v = GatherKeysAndValues.apply(k, v, self.grid)           # 2 of (B, H, T, D)
        return super().forward(q, k, v, dropout_seed, mask)

    def attend(self, q, k, v, mask):
        """A piece of q attends to the keys before its end. With all keys, and a mask, there would
        be about twice the products."""
        outputs = []
        p = self.p if self.training else 0.0
        rank, cp = self.grid.cp_rank, self.grid.cp
        for piece, q_piece in zip([rank, 2 * cp - 1 - rank], q.chunk(2, dim=2)):
            n = q_piece.shape[2]
            end = (piece + 1) * n
            mask_of_piece = None if mask is None else mask[..., end - n:end, :end]
            outputs.append(attend_to_prefix(q_piece, k[:, :, :end], v[:, :, :end], p,
                                            mask_of_piece))
        return torch.cat(outputs, dim=2)


# ---------------------------------------------------------------------------------------------
# 6. Expert parallelism (GShard, Lepikhin et al. 2020)
#
# In a mixture of experts (models/moe.py) each token chooses K of the E experts. Experts are most of
# the memory, and each computes few of a rank's tokens. So let each of `ep` replicas keep E / ep
# experts. A replica sends its tokens to the experts that they chose, and gets the results back:
#
#     replica 0    tokens for experts 0 1 | 2 3    ->    experts 0 1 of both    ->    own tokens
#     replica 1    tokens for experts 0 1 | 2 3    ->    experts 2 3 of both    ->    own tokens
#
# An expert's gradient is then already a sum over ep replicas. The replicas that have the same
# experts sum theirs (`Bucket.group`).
# ---------------------------------------------------------------------------------------------


def run_on_their_ranks(experts: nn.Module, grid: Grid, x: torch.Tensor, counts: torch.Tensor):
    """The `run` of a moe.Experts of which this rank has E / ep. x (n, C) are this rank's tokens,
    sorted by the expert that they chose, and counts (E,) says how many rows each has. Returns what
    the experts compute for these rows, (n, C)."""
    group, one_each = grid.groups["ep"], [1] * grid.ep
    leaving = counts.view(grid.ep, -1)                                          # (to, E / ep)
    arriving = all_to_all(leaving, one_each, one_each, group).wait()            # (from, E / ep)
    leaving, arriving = torch.stack([leaving, arriving]).cpu()
    sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    rows = exchange_rows(x, sent, received, group)
    return exchange_rows(run_blocks(experts, rows, arriving), received, sent, group)


def exchange_rows(x: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
    """An all-to-all of rows. Backward sends the gradients of the rows back."""
    return WithGradient.apply(x, lambda x: all_to_all(x, sent, received, group).wait(),
                              lambda dy: all_to_all(dy, received, sent, group).wait())


def run_blocks(experts: nn.Module, rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """What the experts compute for rows (n, C) that are in blocks, each sorted by expert. blocks
    (number, E / ep), on the host, says how many rows of each expert a block has."""
    # Sort them by expert alone, so that an expert multiplies all its rows at once.
    expert = torch.arange(blocks.shape[1]).repeat(len(blocks)).repeat_interleave(blocks.flatten())
    order = expert.to(rows.device).argsort(stable=True)
    back = order.argsort()
    y = experts.mlp(experts.permute(rows, order, back), blocks.sum(0).to(rows.device))
    return experts.permute(y, back, order)
