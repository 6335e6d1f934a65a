"""3D parallelism of the GPT: data, pipeline and tensor parallelism, with sequence, context and
expert parallelism and ZeRO. This is what train.py runs:

    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2 --zero 1         # dp = 8 / (tp pp) = 2

With the same seed and global batch, and without dropout, every layout has the same losses and
gradients, up to the order of additions.

    1. Ranks                    their grid, their groups, their collectives
    2. Tensor parallelism       each matrix is cut             --tp, --sequence-parallel
    3. Pipeline parallelism     the layers are cut             --pp, --pp-schedule
    4. Data parallelism         the batch is cut               --zero (dp is what remains)
    5. Context parallelism      the sequence is cut            --cp
    6. Expert parallelism       the experts are divided        --ep

Each section begins with the idea. Where the code that runs hides it, a short example comes first,
`plain_...`, which only tests run. `Run.__init__` in train.py puts the sections together. Files of
parallelism/ replace single classes and methods by what is faster or rarer: a head that never has
all logits (loss.py), interleaved stages (pipeline.py), --offload (zero.py), other models than GPTs
(context.py, experts.py). `linear`, `matmul` and `lookup` are PyTorch's, but for 16 bits on CPUs.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.
"""
import math
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
from torch.utils.checkpoint import checkpoint

from amp import NOT_FINITE, adamw_update
from model import GPT, IGNORE_INDEX, CoreAttention, GPTConfig, ceil_div, initial_value
from parallelism import collectives
from parallelism.collectives import comm_errors, name_of, on_hosts, sum_dtype
from parallelism.kernels import attend_to_prefix, linear, lookup, matmul

# ---- 1. Ranks -------------------------------------------------------------------------------
#
# A rank is one process. The ranks form an array (pp, dp, cp, tp). tp varies fastest, pp slowest: a
# tp group has consecutive numbers, and so has a stage. For pp 2, dp 2, cp 1, tp 2:
#
#                     replica 0   replica 1
#       stage 0       0   1       2   3          tensor parallel    (0 1) (2 3) (4 5) (6 7)
#       stage 1       4   5       6   7          same weights       (0 2) (1 3) (4 6) (5 7)
#                                                pipelines          (0 4) (1 5) (2 6) (3 7)
#
# A machine has consecutive ranks, so tp, which sends most, varies fastest: two all-reduces in the
# forward of each block, and two in its backward. Context parallelism gathers keys and values in
# each block, data parallelism sums each gradient once. Pipelines send least, one block's output and
# its gradient: cut a job into machines between stages (Narayanan et al. 2021, section 3).

GROUPS = ("tp", "cp", "replicas", "ep", "same_experts", "pp", "world", "embedding")


class Grid:
    """The layout, this rank's coordinates in it, and its process groups. A group of one is None.

    A replica is a full copy of the model, on pp x tp ranks. There are dp x cp replicas: dp cuts the
    rows of the batch, and cp cuts their positions. With cp 2 each replica of the drawing becomes
    two. The gradients of the replicas are summed, and ZeRO shards over the replicas. With `ep`,
    every ep consecutive replicas divide the experts of a mixture among them (section 6).

    chunks      parts of the model that this rank runs in turn (pipeline.py: interleaved)
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

    def members(self, kind: str) -> list[int]:
        """The ranks in this rank's group of this kind."""
        p, d, c, t = self.stage, self.dp_rank, self.cp_rank, self.tp_rank
        replicas = self.ranks[p, :, :, t].reshape(-1, self.ep)      # a row divides all experts
        members = dict(
            tp=self.ranks[p, d, c, :],                      # divide each matrix
            cp=self.ranks[p, d, :, t],                      # divide each sequence
            replicas=replicas,                              # have the same weights
            ep=replicas[self.replica // self.ep],           # divide the experts
            same_experts=replicas[:, self.ep_rank],         # have the same experts
            pp=self.ranks[:, d, c, t],                      # divide the layers
            world=self.ranks,
            embedding=self.ranks[[0, -1], d, c, t])         # have the tied matrix: the end stages
        return members[kind].flatten().tolist()


def make_groups(grid: Grid, backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """Create this rank's process groups, in which an operation waits `timeout` for another rank.
    Only members create a group, and PyTorch names it by counting the process's groups: "embedding",
    which stages in the middle do not create, comes last. On GPUs a group takes memory: "world" and
    "embedding", used while no other is, share that of equal ranks. The others overlap."""
    if grid.world > 1:
        with comm_errors("exchange with all ranks"):
            dist.all_gather_object(grid.hosts, socket.gethostname())
    made = {}
    for kind in GROUPS:
        ranks = tuple(grid.members(kind))
        is_used = grid.ep > 1 or kind != "same_experts"
        if kind in ("world", "embedding") and ranks in made:
            grid.groups[kind] = made[ranks]
        elif is_used and grid.rank in ranks and len(set(ranks)) > 1:
            grid.groups[kind] = made[ranks] = dist.new_group(
                ranks, timeout=timeout, backend=backend, use_local_synchronization=True,
                group_desc=f"ranks {[*ranks]}{on_hosts(ranks, grid.hosts)}")


# The ranks of a group exchange tensors by collectives. For ranks a and b, with two slices each:
#
#                before      reduce-scatter      then all-gather     or all-reduce, from "before"
#       rank a   a0 a1       a0+b0  -            a0+b0  a1+b1        a0+b0  a1+b1
#       rank b   b0 b1       -      a1+b1        a0+b0  a1+b1        a0+b0  a1+b1
#
# So an all-reduce sends as much as the other two together. These three work in the memory of x.
# `all_to_all` is the fourth: its result is new memory. Each function starts at once and returns a
# `Work`, so a rank can compute until it waits for the result. Without a group x is the result.


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
            self.handle = None
        return self.result


def implementation(x: torch.Tensor):
    """The module with the collectives for x: for CPUs our own, which send less, or PyTorch's."""
    return collectives if x.device.type == "cpu" else dist


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> Work:
    """Sum x over the ranks of a group, or apply another operation."""
    if group is None:
        return Work(x)
    return Work(x, "all-reduce", group, partial(implementation(x).all_reduce, x, op))


def reduce_scatter(x: torch.Tensor, group) -> Work:
    """Cut x along dimension 0 into a slice for each rank. This rank's becomes the sum over the
    ranks, and is the result. The other slices are undefined."""
    if group is None:
        return Work(x)
    own = x.chunk(group.size())[group.rank()]
    start = partial(implementation(x).reduce_scatter_single, own, x)
    return Work(own, "reduce-scatter", group, start)


def all_gather(x: torch.Tensor, group) -> Work:
    """x has this rank's slice of dimension 0: fill in the other ranks' slices."""
    if group is None:
        return Work(x)
    own = x.chunk(group.size())[group.rank()]
    start = partial(implementation(x).all_gather_single, x, own)
    return Work(x, "all-gather", group, start)


def all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group) -> Work:
    """The first sent[0] rows of x go to rank 0 of the group, the next sent[1] to rank 1, and so on.
    The result is new memory, with received[r] rows from each rank r. A number may be 0."""
    if group is None:
        return Work(x)
    result = x.new_empty(sum(received), *x.shape[1:])
    start = partial(dist.all_to_all_single, result, x.contiguous(), received, sent)
    return Work(result, "all-to-all", group, start)


class WithGradient(torch.autograd.Function):
    """function(x), whose gradient is gradient(dy), because autograd does not see communication.

    The gradient of an all-gather is a reduce-scatter: the sum of what all ranks computed with this
    rank's slice. That of a reduce-scatter is an all-gather. That of an all-reduce: see f and g."""

    @staticmethod
    def forward(ctx, x, function, gradient):
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient(dy), None, None


# ---- 2. Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3) --------------------
#
#     MLP:  y = act(x A) B,   A = [A1 A2] by columns,  B = [B1] by rows
#                                                           [B2]
#           y = act(x A1) B1 + act(x A2) B2            act works on each column alone
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
# its weight as (out, in), so "by columns" cuts dimension 0. The whole idea:


def plain_mlp(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, group) -> torch.Tensor:
    """act(x A) B. x (B, T, C) is equal on all ranks, A (C, 4C / tp) and B (4C / tp, C) are cut."""
    x = WithGradient.apply(x, torch.clone, lambda dx: all_reduce(dx.clone(), group).wait())     # f
    return add_up(F.gelu(x @ A) @ B, group)                                                     # g


def add_up(x: torch.Tensor, group) -> torch.Tensor:
    """The sum over the ranks, which all compute the same with it."""
    return WithGradient.apply(x, lambda x: all_reduce(x.clone(), group).wait(), lambda dy: dy)


# The forms that train.py runs also serve sequence parallelism, at the end of this section. Without
# it `gather_positions` returns x itself, and `sum_over_ranks` is an all-reduce in place.


def f(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The input of matrices that are cut by columns."""
    # Autograd wants another tensor than x as the output. The sum is in place, so it takes a copy.
    return WithGradient.apply(x, lambda x: gather_positions(x.view_as(x), grid).wait(),
                              lambda dx: sum_over_ranks(dx.contiguous().clone(), grid).wait())


def g(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The output of a matrix that is cut by rows: the sum of the ranks' x, in place."""
    return WithGradient.apply(x, lambda x: sum_over_ranks(x.detach(), grid).wait(),
                              lambda dy: gather_positions(dy, grid).wait())


class TensorParallel(nn.Module):
    """Takes over the parameters of a module. `partition_dim` says in which dimension they are cut
    (those it does not name are whole), `stacked` how many matrices are stacked there, as q, k and v
    are: each is cut by itself, (3C, C) -> (3C / tp, C). Here they are whole, on the meta device.
    `DataParallel` replaces them by weight.chunk(tp, dim)[tp_rank] (parameters.ParamSpec.cut)."""
    partition_dim = {}

    def __init__(self, whole: nn.Module, grid: Grid):
        super().__init__()
        self.weight = whole.weight
        self.bias = getattr(whole, "bias", None)
        self.stacked = getattr(whole, "stacked", 1)
        self.grid = grid


class ColumnParallelLinear(TensorParallel):
    """(B, T, in), equal on all ranks -> (B, T, out / tp), this rank's columns. With sequence
    parallelism (B, T / tp, in) -> (tp B, T / tp, out / tp), by ranks."""
    partition_dim = {"weight": 0, "bias": 0}

    def forward(self, x):
        if self.grid.tp == 1:
            return linear(x, self.weight, self.bias)
        return ColumnProduct.apply(x, self.weight, self.bias, self.grid)    # linear(f(x), ...)


class ColumnProduct(torch.autograd.Function):
    """f and the product in one, f(x) W^T + b, because backward can then overlap: it computes dx,
    starts its sum, computes dW and only then waits. With sequence parallelism it gathers x again
    instead of saving f(x): a block sends as much as five all-reduces, not four."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return linear(gather_positions(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        gathering = gather_positions(x, ctx.grid)
        dx = sum_over_ranks(matmul(dy, weight), ctx.grid)       # overlaps with the all-gather of x
        dy = dy.flatten(0, 1)                                   # (B T, out / tp)
        dw = matmul(dy.t(), gathering.wait().flatten(0, 1))
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx.wait(), dw, db, None


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
            return linear(x, self.weight, self.bias)
        y = self.sum(linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def sum(self, y):
        return g(y, self.grid)


class AttentionOutput(RowParallelLinear):
    """Its input is by sequences, as attention saves it. By ranks it would be a copy, saved too."""

    def sum(self, y):
        return g(by_ranks(y, self.grid), self.grid)


def find_local(tokens: torch.Tensor, first, n: int) -> tuple:
    """A rank has the rows of n tokens, from `first` on: the token matrix, which embedding and head
    share, is cut by rows. Returns for each token its row there, or 0, and whether it is there."""
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
        # With sequence parallelism x is a slice of a tensor of all positions, which it keeps alive.
        return x.clone() if self.grid.sequence_parallel else x

    def lookup(self, rows):
        return lookup(rows, self.weight)


class VocabParallelHead(TensorParallel):
    """x (B, T, C), with sequence parallelism (B, T / tp, C), and targets (B, T) -> the summed loss
    of model.Head, the same on every rank. Each rank computes V / tp of the logits z of a position.
    For each position the ranks exchange three numbers: the largest logit, the sum and z_target.

        loss = log sum_v exp(z_v) - z_target = largest + log sum_v exp(z_v - largest) - z_target

    `largest` keeps exp from overflowing. It cancels, so it needs no gradient. train.py runs another
    `loss`, that of loss.TiledHead, which never has all logits in memory."""
    partition_dim = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.Module, grid: Grid):
        super().__init__(whole, grid)
        self.norm, self.vocab_size = whole.norm, whole.vocab_size

    def forward(self, x, targets):
        return self.loss(self.norm(x), targets)

    def loss(self, x, targets):
        group = self.grid.groups["tp"]
        z = linear(f(x, self.grid), self.weight, self.bias)             # (B, T, V / tp)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        n = len(self.weight)
        first = self.grid.tp_rank * n                                   # this rank's first token
        tokens = torch.arange(first, first + n, device=z.device)
        z = z.masked_fill(tokens >= self.vocab_size, -torch.inf)        # padding: probability 0
        largest = all_reduce(z.detach().amax(-1), group, dist.ReduceOp.MAX).wait()      # (B, T)
        total = add_up((z - largest.unsqueeze(-1)).exp().sum(-1), group)
        targets = by_ranks(targets, self.grid)
        columns, is_local = find_local(targets, first, n)
        z_target = z.gather(-1, columns.unsqueeze(-1)).squeeze(-1).where(is_local, 0)
        losses = largest + total.log() - add_up(z_target, group)
        return losses.where(targets != IGNORE_INDEX, 0).sum()


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
# `DataParallel.finish_grad_sync` sums over the tp ranks.


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
    rank's positions, (B, T / tp, C). All of x changes: autograd must not have saved it."""
    if not grid.sequence_parallel:
        return all_reduce(x, grid.groups["tp"])
    return reduce_scatter(x, grid.groups["tp"])


def own_positions(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x (..., T) -> (..., n): of the positions of sequences, those that this rank holds."""
    return cut_positions(cut_sequence(x, grid.cp_rank, grid.cp), grid, dim=-1)


class PositionEmbedding(TensorParallel):
    """Of `positions` 0, 1, ... n - 1 it only takes the length: this rank's are others -> (n, C).
    Those of packed texts are given for the whole sequence, (B, T) -> (B, n, C)."""

    def forward(self, positions):
        if positions.dim() == 2:
            return lookup(own_positions(positions, self.grid), self.weight)
        parts = self.grid.tp if self.grid.sequence_parallel else 1
        T = len(positions) * parts * self.grid.cp
        whole = torch.arange(T, device=positions.device)
        return F.embedding(own_positions(whole, self.grid), self.weight)


def cut_positions(x: torch.Tensor, grid: Grid, dim: int = 1) -> torch.Tensor:
    """With sequence parallelism this rank's T / tp of the positions in dimension `dim`; else x."""
    if not grid.sequence_parallel:
        return x
    return x.chunk(grid.tp, dim)[grid.tp_rank]


# An all-gather puts the ranks' parts one after another, and a reduce-scatter takes them so. A row
# of this drawing is a row of dimension 0; B = tp = 2, and each sequence has positions 0 to 3:
#
#     by sequences (B, T, C)              by ranks (tp B, T / tp, C)
#
#     sequence 0    0 1 2 3               rank a, sequence 0    0 1
#     sequence 1    0 1 2 3               rank a, sequence 1    0 1
#                                         rank b, sequence 0    2 3
#                                         rank b, sequence 1    2 3
#
# From f to g activations stay by ranks, because a change of the order copies them. A product treats
# each position alone. Only attention needs whole sequences.


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


# ---- 3. Pipeline parallelism (GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2021) ----------
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
#
# A schedule is the list of a stage's ops, in order: (kind, microbatch, chunk). The kind is "F" or
# "B". The chunk is 0, unless a stage has several parts of the layers (pipeline.py: interleaved).


def gpipe(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    """All forwards, then all backwards, the last one first."""
    microbatches = range(num_microbatches)
    return [("F", i, 0) for i in microbatches] + [("B", i, 0) for i in reversed(microbatches)]


def one_f_one_b(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    """Warm-up: one forward for each later stage, because no gradient arrives before those have run.
    Steady state: a forward and a backward in turn. Cool-down: the backwards that are left."""
    forwards = [("F", i, 0) for i in range(num_microbatches)]
    backwards = [("B", i, 0) for i in range(num_microbatches)]
    return in_turn(forwards, backwards, ahead=stages - 1 - stage)


def in_turn(forwards: list, backwards: list, ahead: int) -> list[tuple]:
    """First `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    ops = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards):
        ops += pair
    return ops + backwards[len(forwards[ahead:]):]


# The whole idea, with messages that a stage waits for:


def plain_pipeline(stage: GPT, batch: list, schedule: list[tuple], grid: Grid) -> float:
    """Run the schedule of a stage. The gradients of the summed loss add up in its parameters.
    Returns this loss on the last stage, else 0. batch: [(tokens, targets)], (B, T) each.

    For gloo: `recv` waits for its message, `isend` returns at once. With a blocking send, or on
    NCCL, 1F1B could hang: two neighbors send to each other, and each waits for a receive."""
    ranks = grid.members("pp")              # of this pipeline, by stage
    loss_sum = 0.0
    kept = {}           # microbatch: (x, y), the stage's input and output, from F to B
    sends = []
    for kind, i, _ in schedule:
        tokens, targets = batch[i]
        if kind == "F":
            x = tokens
            if not grid.is_first:
                x = next(stage.parameters()).new_empty(*tokens.shape, stage.cfg.n_embd)
                dist.recv(x, src=ranks[grid.stage - 1])
                x.requires_grad_()      # a leaf: backward ends here, with the gradient in x.grad
            y = stage(x, targets)
            if grid.is_last:
                loss_sum += y.item()
            else:
                sends.append(dist.isend(y.detach(), dst=ranks[grid.stage + 1]))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            dy = torch.ones_like(y)         # on the last stage, whose y is the loss
            if not grid.is_last:
                dist.recv(dy, src=ranks[grid.stage + 1])
            y.backward(dy)
            if not grid.is_first:
                sends.append(dist.isend(x.grad, dst=ranks[grid.stage - 1]))
    for send in sends:
        send.wait()
    return loss_sum


# `Pipeline` below, which train.py runs, computes the same. Results travel while the next op runs.
# After either form, the gradient of a tied matrix is summed: each end stage has a term.


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The numbers of a stage's blocks. Stages differ by one block at most. The last stage, which
    also has the head, never has more blocks than another."""
    return range(ceil_div(stage * n_layer, pp), ceil_div((stage + 1) * n_layer, pp))


def chunk_layers(n_layer: int, grid: Grid) -> list[range]:
    """The numbers of this rank's blocks, in each of its chunks (pipeline.py has several)."""
    return [stage_layers(n_layer, grid.pp * grid.chunks, chunk * grid.pp + grid.stage)
            for chunk in range(grid.chunks)]


def keep_stage(model: GPT, grid: Grid) -> None:
    """Keep this stage's layers; the first also keeps the embedding, the last one the head. The
    forward of model.GPT leaves out what is None, so it runs the rest as a stage."""
    layers = set().union(*chunk_layers(model.cfg.n_layer, grid))
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None


class Pipeline:
    """A stage that runs a schedule on the microbatches of a step.

    batch           microbatch -> (inputs (B, T), targets (B, T), dropout seed, positions of packed
                    texts (B, T) or None)
    loss_factor     what the loss is multiplied by before backward
    flat            collects the gradients (section 4); None: they stay in .grad
    loss            on the last stage the sum of the losses so far, without loss_factor; else 0
    """

    def __init__(self, model: GPT, grid: Grid, batch: list, loss_factor: float = 1.0, flat=None):
        self.model, self.grid, self.batch = model, grid, batch
        self.loss_factor, self.flat = loss_factor, flat
        inputs = batch[0][0]
        dtype = next(model.parameters()).dtype          # also of activations
        self.loss = torch.zeros((), dtype=sum_dtype(inputs.device), device=inputs.device)
        # like what one stage sends to the next: (B, T, C), or with sequence parallelism T / tp
        shape = *cut_positions(inputs, grid).shape, model.cfg.n_embd
        self.activation_like = torch.empty(shape, dtype=dtype, device=inputs.device)
        self.chunks = [model]       # pipeline.Interleaved has several
        self.kept = {}              # (microbatch, chunk): (x, y), input and output, from F to B

    def forward(self, i: int, chunk: int, x: torch.Tensor | None) -> torch.Tensor:
        """Microbatch i -> activations, or from the head the loss."""
        inputs, targets, dropout_seed, positions = self.batch[i]
        if self.grid.is_first and chunk == 0:
            x = inputs
        else:
            x.requires_grad_()      # a leaf: backward ends here, with the gradient in x.grad
        y = self.chunks[chunk](x, targets, dropout_seed, positions=positions)
        if self.chunks[chunk].head is not None:
            self.loss.add_(y.detach())
        if torch.is_grad_enabled():
            self.kept[i, chunk] = x, y
        return y

    def backward(self, i: int, chunk: int, dy: torch.Tensor | None) -> torch.Tensor:
        """The gradient of y -> that of x. The parameters' gradients add up."""
        x, y = self.kept.pop((i, chunk))
        if self.chunks[chunk].head is not None:
            scaled = y * self.loss_factor
        else:       # dy is its gradient. (torch.autograd.backward(y, dy) imports a compiler, 0.5 s)
            scaled = (y * dy).sum()
        if self.flat is not None:
            self.flat.prepare_grad_sync(self.chunks[chunk], i == self.last_backward[chunk])
        scaled.backward()
        return x.grad

    def run(self, schedule: list[tuple]) -> None:
        """Run a schedule. Raises DistError if another rank is gone or hangs."""
        self.last_backward = {chunk: i for kind, i, chunk in schedule if kind == "B"}
        leaving = {"F": Work(None), "B": Work(None)}        # the last result of each kind
        turns = self.split_in_turns(schedule)
        arriving = start_messages(self.grid, [self.input_of(op) for op in turns[0]])
        for turn, next_turn in zip(turns, [*turns[1:], []]):
            inputs = [self.input_of(op) for op in next_turn]
            early = self.may_receive_early(turn, next_turn)
            receiving = start_messages(self.grid, inputs) if early else []
            results = []
            for op, x in zip(turn, arriving):
                results.append(Message(sending=True, op=op, tensor=self.run_op(op, x)))
                leaving[op[0]].wait()   # the result before this one, which has traveled meanwhile
            started = start_messages(self.grid, results if early else results + inputs)
            for op, work in zip(turn, started):
                leaving[op[0]] = work
            arriving = receiving + started[len(turn):]
        for work in leaving.values():
            work.wait()

    def split_in_turns(self, schedule: list[tuple]) -> list[list[tuple]]:
        return [[op] for op in schedule]    # messages start after a turn; Interleaved has pairs

    def may_receive_early(self, turn: list[tuple], next_turn: list[tuple]) -> bool:
        """F, then F: input and result have different neighbors, so receive the input during this op
        (GPipe: 3 to 10% faster; on a GPU, waiting would occupy multiprocessors). F, then B: they
        have the same neighbor, so both messages start together."""
        kinds = [kind for kind, *_ in turn + next_turn]
        return self.loss.device.type == "cpu" and kinds in (["F", "F"], ["B", "B"])

    def input_of(self, op: tuple) -> "Message":
        return Message(sending=False, op=op, tensor=self.activation_like)

    def run_op(self, op: tuple, arriving: Work) -> torch.Tensor | None:
        kind, i, chunk = op
        x = gather_message(arriving.wait(), self.grid)
        return self.forward(i, chunk, x) if kind == "F" else self.backward(i, chunk, x)


@dataclass
class Message:
    """What a stage sends, or receives, for an op of its own."""
    sending: bool
    op: tuple                   # (kind, microbatch, chunk)
    tensor: torch.Tensor        # the op's result, to be sent; or a tensor like its input


def route(grid: Grid, message: Message) -> tuple[int, int] | None:
    """(the stage at the other end of a message, its tag); None at the ends of the model."""
    kind, i, chunk = message.op
    places = grid.pp * grid.chunks          # chunk c of stage s is number c p + s in the model
    here = chunk * grid.pp + grid.stage
    forth = 1 if kind == "F" else -1        # activations go to the next place, gradients back
    there = here + forth if message.sending else here - forth
    receiver = there if message.sending else here
    if not 0 <= there < places:
        return None
    tag = 2 * (i * places + receiver) + "FB".index(kind)        # the op that needs the message
    return there % grid.pp, tag


def start_messages(grid: Grid, messages: list[Message]) -> list[Work]:
    """Start all messages together. Returns a Work for each; its result is None if the message has
    no `route`. On NCCL they are one operation: if two neighbors each started a send before a
    receive, both could wait forever. gloo starts them one by one; the tag tells them apart. Of x,
    which the tp ranks of a stage have alike, each sends 1 / tp to the next stage, in another
    machine. `gather_message` joins the parts (Narayanan et al. 2021, section 4.1)."""
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
        work.operation = f"{name_of(message.op)}: {verb} rank {peer}"
        work.operation += f"{on_hosts([peer], grid.hosts)} (stage {stage})"
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
    """What has arrived, whole: the tp ranks exchange parts. With sequence parallelism x is one."""
    if x is not None and not grid.sequence_parallel:
        all_gather(x.view(-1), grid.groups["tp"]).wait()                    # in place
    return x


# ---- 4. Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020) -----------
#
# Every replica trains on its share of the batch, and the gradients are summed. Replicas start equal
# by the seed and make the same update, so they stay equal. The whole idea, one process a replica:


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
# a hook when it has computed a gradient. The hook of the last one starts the sum of the bucket:
#
#     time          ------------------------------------------>
#     backward      head    block 1    block 0    embedding
#     all-reduce            head       block 1    block 0     embedding
#
# AdamW keeps two moments for each parameter, its averages of the gradient and of the gradient's
# square, and for a parameter in 16 bits a master in fp32. Gradients add up in fp32, too. With plain
# data parallelism every replica keeps all and makes the same update. ZeRO divides this work: each
# of r replicas updates a shard of each bucket, and receives the others. AdamW is elementwise, so a
# shard may begin and end anywhere. In bytes per parameter, those sent times (r - 1) / r, for a step
# of m microbatches (in fp32 a parameter is its own master):
#
#         masters,                             bytes kept in           bytes sent in 16 bits
#   ZeRO  moments   gradients   parameters     16 bits     fp32        gradients    parameters
#     0   all       all         all            18          16          8            -
#     1   a shard   all         all            6 + 12/r    8 + 8/r     4            2   after AdamW
#     2   a shard   a shard     all            2 + 16/r    4 + 12/r    4m           2   after AdamW
#     3   a shard   a shard     a shard        18/r        16/r        4m           4m  in use
#
# 18 is 2 for the parameter, 4 its gradient, 4 its master and 8 the moments. Gradients are sent in
# fp32: a reduce-scatter sends 4 bytes, and an all-reduce, which is two collectives, 8. So ZeRO 1 is
#
#     own = reduce_scatter(grad, group).wait()    in place of plain_replica_step's all_reduce
#     AdamW of `own` and of this rank's shard of the master, which is rounded to its slice of data
#     all_gather(data, group).wait()              the parameters, in which each has its shard
#
# ZeRO 2 sums the gradients of each microbatch, to keep only a shard of them. ZeRO 3 (FSDP, Zhao et
# al. 2023) gathers parameters for each forward and each backward, 2 x 2 bytes, m times: those of a
# block exist only while it runs. The whole idea is a gather whose gradient is a reduce-scatter:


def plain_zero3_forward(module: nn.Module, shards: list, group, *inputs):
    """module(*inputs). The module, on the meta device, gives names and shapes. `shards` has this
    rank's part of each parameter, flat and padded: (n / ranks,). Backward adds to shard.grad."""
    def gather(shard):
        whole = shard.new_empty(group.size(), len(shard))
        whole[group.rank()] = shard
        return all_gather(whole.flatten(), group).wait()                    # (n,)

    def scatter(dwhole):
        return reduce_scatter(dwhole.clone(), group).wait().clone()         # (n / ranks,)

    def gather_and_run(*inputs):
        parameters = {}
        for shard, (name, empty) in zip(shards, module.named_parameters()):
            whole = WithGradient.apply(shard, gather, scatter)
            parameters[name] = whole[:empty.numel()].view(empty.shape)
        return torch.func.functional_call(module, parameters, inputs)

    # Backward has only the inputs: it gathers and runs the module again.
    return checkpoint(gather_and_run, *inputs, use_reentrant=False)


# A spec (parameters.ParamSpec) says what this rank has of a parameter: `name` and `shape` in the
# whole model, `partition_dim`, `local_shape` and `numel` of this rank's part, the modules that own
# it, `is_tied` and `is_tied_copy`, `ep`: replicas that divide its experts, `decays`, `sign_step`.


class Bucket:
    """Parameters that are communicated together: one after another, with padding for equal shards.

    group           whose ranks have them: "replicas", or of experts "same_experts"
    num_ranks       how many these are
    num_shards, shard_rank      the number of ZeRO's shards, and which this rank has
    is_wide         `data` is of the masters' type: rounded, a router would choose other experts
    shard_ranges    the parts of parameters in the shard: [(spec, shard_slice, param_slice)], where
                    shard[kind][shard_slice] belongs to parameter.flatten()[param_slice]
    data            (numel,) the parameters are views into it; ZeRO 3 frees and restores its memory
    grad            (numel,) their gradients; with ZeRO 2 and 3, None from a sum to the next one
    shard           {kind: (numel / num_shards,)}, what this rank updates: "data" (a view, with ZeRO
                    3 own memory), "grad" (a view, from ZeRO 2 on own memory), "exp_avg",
                    "exp_avg_sq", and "master" (is "data" if the types are equal)
    pending_grads   number of gradients that backward has not computed yet
    unsharding      the all-gather of `data` under way, or None
    """

    def __init__(self, name: str, specs: list, replicas: int, num_shards: int, shard_rank: int):
        self.name, self.specs = name, specs
        self.is_wide = name.endswith(".router")
        ep = specs[0].ep
        self.group = "replicas" if ep == 1 else "same_experts"
        self.num_ranks = replicas // ep
        self.num_shards, self.shard_rank = max(1, num_shards // ep), shard_rank // ep
        self.data = self.grad = self.unsharding = None
        self.shard, self.offsets, self.shard_ranges = {}, {}, []
        self.pending_grads = 0
        end = 0
        for spec in specs:
            self.offsets[spec.name] = end
            end += ceil_div(spec.numel, 32) * 32        # aligned to 64 bytes, in 16 bits too
        self.numel = ceil_div(end, 32 * self.num_ranks) * 32 * self.num_ranks
        length = self.numel // self.num_shards
        for spec in specs:
            start = self.offsets[spec.name] - self.shard_rank * length          # in the shard
            low, high = max(start, 0), min(start + spec.numel, length)
            if low < high:
                part = spec, slice(low, high), slice(low - start, high - start)
                self.shard_ranges.append(part)

    def own(self, data_or_grad: torch.Tensor) -> torch.Tensor:
        """This rank's shard of it."""
        return data_or_grad.chunk(self.num_shards)[self.shard_rank]

    def view(self, data_or_grad: torch.Tensor, spec) -> torch.Tensor:
        """The part of it that belongs to a parameter, in the parameter's shape."""
        offset = self.offsets[spec.name]
        return data_or_grad[offset:offset + spec.numel].view(spec.local_shape)


def is_owner(spec, grid: Grid, num_shards: int) -> bool:
    """Whether the numbers that a rank has of this parameter count as its own: in the global norm,
    in a checkpoint and in a full tensor. Each number of the model has one owner."""
    # Without ZeRO all ranks of the bucket's group hold the same.
    has_first_copy = grid.replica // spec.ep < max(1, num_shards // spec.ep)
    is_replicated = spec.partition_dim is None and grid.tp_rank > 0
    return has_first_copy and not is_replicated and not spec.is_tied_copy


def make_buckets(specs: list, replicas: int, num_shards: int, shard_rank: int) -> list[Bucket]:
    """Backward completes them from the right; a tied matrix, to which embedding and head add, last.

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
    after the last one, and adamw_step. train.py's `flat` is a subclass, zero.FlatParameters. All
    ranks must start collectives in the same order. A new buffer counts in tools/plan/memory.py.

    grad_factor         by which the gradients are multiplied: loss scale, then that of clipping
    grads_are_summed    from finish_grad_sync to the next zero_grad
    """
    grad_dtype = None       # that of the masters
    host = None             # where masters and moments are (--offload); None: with the parameters

    def __init__(self, specs: list, grid: Grid, dtype, master_dtype, device="cpu", zero: int = 0,
                 training: bool = True):
        self.grid, self.zero, self.training = grid, zero, training
        self.num_shards, shard_rank = (grid.replicas, grid.replica) if zero > 0 else (1, 0)
        self.buckets = make_buckets(specs, grid.replicas, self.num_shards, shard_rank)
        self.buckets_to_sync = []       # those that this backward sums, the next one last
        self.in_flight = []             # [(bucket, the sum of its gradients under way)]
        self.grad_factor = 1.0
        self.grads_are_summed = False
        for bucket in self.buckets:
            data_dtype = master_dtype if bucket.is_wide else dtype
            bucket.data = torch.zeros(bucket.numel, dtype=data_dtype, device=device)
            own = bucket.own(bucket.data)
            bucket.shard["data"] = bucket.shard["master"] = own.clone() if zero == 3 else own
            if training:
                self.allocate_state(bucket, master_dtype, device)
            for spec in bucket.specs:
                for module, attribute in spec.owners:
                    self.attach(module, attribute, bucket, spec)
            self.reshard([bucket])

    def allocate_state(self, bucket: Bucket, dtype, device) -> None:
        """What AdamW needs, as the table says: all zero, of type `dtype`."""
        self.allocate_gradients(bucket, self.grad_dtype or dtype, device)
        n = len(bucket.shard["data"])
        zeros = partial(torch.zeros, n, dtype=dtype, device=self.host or device)
        if bucket.data.dtype != dtype or self.host is not None:
            bucket.shard["master"] = zeros()
        bucket.shard["exp_avg"], bucket.shard["exp_avg_sq"] = zeros(), zeros()

    def allocate_gradients(self, bucket: Bucket, dtype, device) -> None:
        if self.zero < 2:
            bucket.grad = torch.zeros(bucket.numel, dtype=dtype, device=device)
            bucket.shard["grad"] = bucket.own(bucket.grad)
        else:
            length = bucket.numel // bucket.num_shards
            bucket.shard["grad"] = torch.zeros(length, dtype=dtype, device=device)

    def attach(self, module: nn.Module, attribute: str, bucket: Bucket, spec) -> None:
        """Replace the module's parameter by a view into the bucket, with a hook. A tied matrix
        becomes two Parameters on one memory: as one its hook would run only after both uses."""
        # `.data` has its own version counter: to autograd the gathers of ZeRO 3 change no weight.
        parameter = nn.Parameter(bucket.view(bucket.data, spec).data)
        parameter.bucket, parameter.spec = bucket, spec
        parameter.main_grad = partial(self.main_grad, parameter)
        parameter.register_post_accumulate_grad_hook(self.grad_ready)
        setattr(module, attribute, parameter)

    # ---- Values

    @torch.no_grad()
    def load_parts(self, kind: str, part: Callable) -> None:
        """Fill this rank's shards "master" or moments: part(spec) -> this rank's part of it."""
        for bucket in self.buckets:
            for spec, shard_slice, param_slice in bucket.shard_ranges:
                bucket.shard[kind][shard_slice].copy_(part(spec).flatten()[param_slice])

    @torch.no_grad()
    def initialize(self, model_config: GPTConfig, seed: int,
                   load_weights: Callable | None = None) -> None:
        """Set the state of step 0, also after a rollback to it. A full parameter is a function of
        the seed and its name, so all layouts begin equal. Only one at a time is in memory, of
        experts one. Or load_weights(self) sets the masters."""
        def part(spec):
            if len(spec.shape) == 3:
                return spec.cut_experts(partial(expert, spec), self.grid)
            return spec.cut(initial_value(model_config, spec.name, spec.shape, seed), self.grid)

        def expert(spec, number):
            return initial_value(model_config, f"{number}.{spec.name}", spec.shape[1:], seed)
        if load_weights is None:
            self.load_parts("master", part)
        else:
            load_weights(self)
        for bucket in self.buckets:
            if self.training:
                bucket.shard["exp_avg"].zero_()
                bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()
        self.wait_params()

    # ---- Gradients and their sums

    def zero_grad(self) -> None:
        self.grads_are_summed = False
        torch._foreach_zero_([bucket.grad if self.zero < 2 else bucket.shard["grad"]
                              for bucket in self.buckets])

    def set_loss_scale(self, loss_scale: float, tokens: int, targets: int) -> None:
        self.grad_factor = loss_scale       # a subclass also needs the numbers of the batch

    def prepare_grad_sync(self, chunk: nn.Module, last: bool) -> None:
        """Before each backward of a chunk of the model. Only the step's `last` one sums over the
        replicas, from ZeRO 2 on each. In every backward every parameter must get a gradient, or its
        bucket would never be complete."""
        for parameter in chunk.parameters():
            parameter.bucket.pending_grads += 1
        self.buckets_to_sync = []
        if last or self.zero >= 2:
            self.buckets_to_sync = [bucket for bucket in self.buckets if bucket.pending_grads > 0]
            if self.buckets_to_sync[0].specs[0].is_tied_copy:   # the head's gradient is ready first
                self.buckets_to_sync.append(self.buckets_to_sync.pop(0))

    def grad_ready(self, parameter: nn.Parameter) -> None:
        """A hook of autograd: the gradient is complete. It runs on backward's thread and CUDA
        stream, so collectives start after the gradient's kernels."""
        self.add_grad(parameter)
        parameter.bucket.pending_grads -= 1
        # All ranks must communicate in the same order. A bucket completed out of turn waits.
        while self.buckets_to_sync and self.buckets_to_sync[-1].pending_grads == 0:
            self.start_grad_sync(self.buckets_to_sync.pop())

    def add_grad(self, parameter: nn.Parameter) -> None:
        self.main_grad(parameter).add_(parameter.grad)
        parameter.grad = None

    def main_grad(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where its gradient adds up: from ZeRO 2 on in memory that the sum frees."""
        bucket = parameter.bucket
        if bucket.grad is None:
            bucket.grad = torch.zeros_like(bucket.data, dtype=bucket.shard["grad"].dtype)
        return bucket.view(bucket.grad, parameter.spec)

    def start_grad_sync(self, bucket: Bucket) -> None:
        """Start the sum over the replicas. This backward needs none of the bucket's parameters."""
        # Wait for the previous bucket first where a sum in flight holds memory: from ZeRO 2 on the
        # whole bucket's gradients, on a CPU what the other ranks have sent.
        if self.zero >= 2 or (self.zero == 1 and bucket.grad.device.type == "cpu"):
            self.wait_grad_sync()
        start = all_reduce if self.zero == 0 else reduce_scatter
        self.in_flight.append((bucket, start(bucket.grad, self.grid.groups[bucket.group])))
        if self.zero >= 2:
            bucket.grad = None
        self.reshard([bucket])

    @torch.no_grad()
    def wait_grad_sync(self) -> None:
        for bucket, work in self.in_flight:
            total = work.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += total
        self.in_flight = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for all buckets. Then sum the gradients with terms on other ranks: those of a tied
        matrix, at both ends of a pipeline, and those of `is_in_parts`."""
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
        self.grads_are_summed = True

    def is_in_parts(self, spec) -> bool:
        """Whether each tp rank has all of the parameter, but only a term of its gradient: that of
        its positions or, of a norm of heads, of its heads."""
        return self.grid.tp > 1 and spec.partition_dim is None and (
            self.grid.sequence_parallel or spec.grad_covers_own_heads)

    # ---- Their norm

    def grad_norm_squares(self) -> dict[str, torch.Tensor]:
        """Sums of squares of this rank's gradients, to be summed over all ranks: `squares` of each
        parameter of the model once, for the global norm, and `all_squares` of copies, too, to
        detect inf or NaN. A router's bias has counts of tokens in place of a gradient."""
        counted, others = [], []
        for bucket in self.buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                if spec.sign_step == 0:
                    pieces = counted if is_owner(spec, self.grid, self.num_shards) else others
                    pieces += bucket.shard["grad"][shard_slice].split(2 ** 20)
        # One fp32 sum over 10M values can be off in its fourth digit. Pieces fit a CPU's cache.
        return self.sum_squares(counted, others)

    def sum_squares(self, counted: list[torch.Tensor], others: list[torch.Tensor]) -> dict:
        dtype = sum_dtype(self.buckets[0].data.device)
        squares = torch.stack(torch._foreach_norm(counted + others, 2, dtype=dtype)).square()
        return dict(squares=squares[:len(counted)].sum(), all_squares=squares.sum())

    def grad_norm(self, total: dict[str, float]) -> tuple[float, str]:
        """From the sums of `grad_norm_squares` over all ranks: (the gradient norm of the whole
        model, times the loss scale; why the step must be skipped, "" if it need not)."""
        skipped = "" if math.isfinite(total["all_squares"]) else NOT_FINITE
        return math.sqrt(total["squares"]), skipped

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

    def wait_params(self) -> None:
        """Wait for the all-gathers that `sync_params` started, where no forward does."""
        if self.zero < 3:
            self.unshard(self.buckets)

    def reshard(self, buckets: list[Bucket]) -> None:
        """ZeRO 3: free the gathered parameters. `unshard` makes their views valid again."""
        for bucket in buckets:
            if self.zero == 3:
                assert bucket.unsharding is None, "a gather would write into freed memory"
                bucket.data.untyped_storage().resize_(0)


# ZeRO 3 in train.py: the memory of a bucket comes and goes, and parameters are views into it. So
# backward gathers again, but does not run the block again. Gathers start one block ahead:
#
#     forward of       needs               gathers ahead   frees       without a backward also
#     embedding        tied, embed, ends   block 0         embed
#     block i          block i             block i + 1     block i
#     the last block   its own                                         its own
#     head             tied, head, ends                    tied, head  ends
#
# Backward of block i needs block i, and gathers block i - 1 ahead. start_grad_sync frees what it
# sums. The head computes the tied matrix's gradient in forward (loss.py), so it frees the matrix.


def gather_before_use(model: GPT, flat: DataParallel) -> None:
    """Wrap the forward of the embedding, each block and the head in unshard and reshard. ZeRO 1 and
    2 await there, bucket by bucket, the all-gather after AdamW. (ZeRO 3 in a pipeline is refused:
    the first backward would free the parameters of the ends.)"""
    def buckets_of(name):       # tied, embed, ends, head, or the number of a block
        return [bucket for bucket in flat.buckets if bucket.name.split(".")[0] == name]

    def wrap(module, needed, ahead=(), freed=(), freed_without_backward=(), before=None):
        """A row of the table. `before`: of a block, what its backward gathers ahead."""
        run = module.forward

        def forward(*args):
            flat.unshard(needed, prefetch=ahead)
            y = run(*args)
            if y.requires_grad and before is not None:
                # The hook runs when y's gradient is there, before the module's backward.
                y.register_hook(lambda dy: flat.unshard(needed, prefetch=before))
            flat.reshard(freed)
            if not y.requires_grad:
                flat.reshard(freed_without_backward)
            return y
        module.forward = forward

    tied, embed, ends, head = map(buckets_of, ("tied", "embed", "ends", "head"))
    blocks = [buckets_of(number) for number in model.blocks]            # [[attention, MLP ...]]
    if model.embed is not None:
        wrap(model.embed, tied + embed + ends, ahead=blocks[0], freed=embed)
    for i, block in enumerate(model.blocks.values()):
        before = blocks[i - 1] if i > 0 else []
        if i + 1 < len(blocks):
            wrap(block, blocks[i], ahead=blocks[i + 1], freed=blocks[i], before=before)
        else:
            wrap(block, blocks[i], freed_without_backward=blocks[i], before=before)
    if model.head is not None:
        wrap(model.head, tied + head + ends, freed=tied + head, freed_without_backward=ends)


# ---- 5. Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2) ---------------
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
# for each part: more to read, but no rank holds K and V of all positions at once.


def cut_sequence(x: torch.Tensor, rank: int, cp: int, dim: int = -1) -> torch.Tensor:
    """A copy of the positions of x, T along `dim`, that a rank of cp holds: pieces `rank` and
    2 cp - 1 - `rank` of 2 cp. T must be a multiple of 2 cp, unless cp is 1."""
    pieces = x.tensor_split(2 * cp, dim)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim)


def gather_keys_and_values(k: torch.Tensor, v: torch.Tensor, grid: Grid) -> torch.Tensor:
    """k and v of this rank's positions, (B, H, T / cp, D) each -> those of all positions, in order:
    (2, B, H, T, D). Backward: the gradients at this rank's positions, summed over the ranks."""
    def gather(kv):
        parts = kv.new_empty(grid.cp, *kv.shape)                    # (cp, 2, B, H, T / cp, D)
        parts[grid.cp_rank] = kv
        all_gather(parts, grid.groups["cp"]).wait()                 # fills in the other ranks'
        early, late = parts.chunk(2, dim=-2)            # each rank's first and second piece
        return torch.cat([*early, *late.flip(0)], dim=-2)   # the last rank's late piece comes first

    def scatter(dkv):
        parts = torch.stack([cut_sequence(dkv, rank, grid.cp, dim=-2) for rank in range(grid.cp)])
        return reduce_scatter(parts, grid.groups["cp"]).wait()[0]
    return WithGradient.apply(torch.stack([k, v]), gather, scatter)


class ContextParallelAttention(CoreAttention):
    """model.CoreAttention of q, k and v (B, H, T / cp, D), those of this rank's positions."""

    def __init__(self, whole: CoreAttention, grid: Grid):
        super().__init__(whole.p, *whole.name)
        self.grid, self.part = grid, whole.part

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        """With dropout each rank has its seed. A mask (B, 1, T, T) is of all positions."""
        k, v = gather_keys_and_values(k, v, self.grid)              # (B, H, T, D) each
        return super().forward(q, k, v, dropout_seed, mask)

    def attend(self, q, k, v, mask):
        """A piece of q is the last n of the keys to which it attends. A mask doubles the work."""
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


# ---- 6. Expert parallelism (GShard, Lepikhin et al. 2020) -----------------------------------
#
# In a mixture of experts (models/moe.py) each token chooses K of the E experts. Experts are most of
# the memory, and each computes few of a rank's tokens. So let each of `ep` replicas keep E / ep
# experts. A replica sends its tokens to the experts that they chose, and gets the results back:
#
#     replica 0    tokens for experts 0 1 | 2 3    ->    experts 0 1 of both    ->    own tokens
#     replica 1    tokens for experts 0 1 | 2 3    ->    experts 2 3 of both    ->    own tokens
#
# An expert's gradient is then a sum over ep replicas. Those with the same experts add theirs up.


def run_on_their_ranks(experts: nn.Module, grid: Grid, x: torch.Tensor, counts: torch.Tensor):
    """The `run` of experts of which this rank has E / ep. x (n, C) are this rank's tokens, each K
    times, sorted by the expert that they chose, and counts (E,) says how many rows each expert has.
    Returns what the experts compute for these rows, (n, C)."""
    group, ep = grid.groups["ep"], grid.ep
    leaving = counts.view(ep, -1)                                               # (to, E / ep)
    arriving = all_to_all(leaving, [1] * ep, [1] * ep, group).wait()            # (from, E / ep)
    sent, received = torch.stack([leaving, arriving]).sum(2).tolist()   # one copy to the host
    rows = exchange_rows(x, sent, received, group)
    y = experts.run_blocks(rows, arriving)          # of each rank a block of rows
    return exchange_rows(y, received, sent, group)


def exchange_rows(x: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
    """An all-to-all of rows. Backward sends the gradients of the rows back."""
    return WithGradient.apply(x, lambda x: all_to_all(x, sent, received, group).wait(),
                              lambda dy: all_to_all(dy, received, sent, group).wait())
