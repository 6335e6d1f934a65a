"""Where everything lives: one GPT on many ranks, in four ideas, each using the one before.

    1. The rank grid            which rank is what; who talks to whom, and in which forms
    2. Tensor parallelism       one matrix product on several ranks; sequence parallelism
    3. Pipeline parallelism     one model's layers on several ranks
    4. Data parallelism, ZeRO   one batch on several replicas, which share out the memory

The invariant all four keep: the same seed and the same global batch give the same loss, gradients
and gradient norm as one process, up to the order of additions. Size 1 in any dimension takes the
same path, with communication that has nobody to talk to.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.

    python parallel.py --pp 4 --microbatches 8      # draw a pipeline, count bubble and memory
"""
import argparse
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.adamw import adamw     # the function: the class imports a compiler, for seconds
from torch.utils.checkpoint import checkpoint

from model import GPT, IGNORE_INDEX, GPTConfig, initial_value

EXCHANGE_BYTES = 2 ** 20        # two ranks swap tensors up to this size rather than all-reduce them
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 28}      # numbers that exist at a time; measured on the CPU

# ---------------------------------------------------------------------------------------------
# 1. The rank grid
#
# Ranks stand in an array [dp, pp, tp], the last dimension fastest. With dp 2, pp 2, tp 2:
#
#                     stage 0     stage 1
#       replica 0     0   1       2   3          tensor neighbours  (0 1) (2 3) (4 5) (6 7)
#       replica 1     4   5       6   7          pipelines          (0 2) (1 3) (4 6) (5 7)
#                                                same parameters    (0 4) (1 5) (2 6) (3 7)
#
# Tensor parallelism talks most (four times a block) and gets neighbouring ranks, which share a
# machine; data parallelism talks once a step (ZeRO 2 and 3: once a microbatch) and may cross the
# network (Megatron-LM, Narayanan et al. 2021, section 3).
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Sizes, this rank's coordinates and its process groups; a group of one rank is None."""
    dp: int
    pp: int
    tp: int
    rank: int = 0
    groups: dict = field(default_factory=dict)
    sequence_parallel: bool = False     # between its matrices a rank holds T / tp positions

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def ranks(self) -> torch.Tensor:
        return torch.arange(self.world).view(self.dp, self.pp, self.tp)

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.pp * self.tp)

    @property
    def stage(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    def pipeline_peer(self, step: int) -> int:
        """The rank `step` stages further on in this rank's pipeline."""
        return self.rank + step * self.tp

    def group(self, name: str):
        return self.groups.get(name)


def make_grid(world: int, tp: int, pp: int, rank: int, sequence_parallel=False,
              timeout: timedelta | None = None) -> Grid:
    """The grid of `world` ranks; for world > 1 torch.distributed must be initialised, and every
    rank must call this, because a process group is created by all ranks together. `timeout` is how
    long its operations wait for another rank (None: torch's half an hour)."""
    grid = Grid(world // (tp * pp), pp, tp, rank, sequence_parallel=sequence_parallel)
    ranks = grid.ranks
    members = {
        "tp": ranks.reshape(-1, tp).tolist(),
        "dp": ranks.permute(1, 2, 0).reshape(-1, grid.dp).tolist(),
        # Two groups for the same ranks: NCCL ignores tags and keeps the messages of a group in
        # order, so activations going down and gradients coming up must not share one.
        "forward": (pipelines := ranks.permute(0, 2, 1).reshape(-1, pp).tolist()),
        "backward": pipelines,
        "embedding": [[pipe[0], pipe[-1]] for pipe in pipelines] if pp > 1 else [],
        "world": [list(range(world))],
    }
    for name, lists in members.items():
        for group in lists:
            if len(group) > 1:
                handle = dist.new_group(group, timeout=timeout)
                if rank in group:
                    grid.groups[name] = handle
    return grid


def check_layout(cfg: GPTConfig, world: int, tp: int, pp: int, batch: int, micro: int,
                 zero: int = 0, sequence_parallel: bool = False) -> None:
    """Raise a ValueError that names the numbers if this job cannot run; no communication."""
    if zero == 3 and pp > 1:
        raise ValueError(f"zero 3 with pp {pp} would gather every block again for each microbatch "
                         f"of the pipeline: take zero 2, or pp 1")
    if sequence_parallel and tp == 1:
        raise ValueError("sequence parallelism shares out the positions over tensor-parallel "
                         "ranks, but tp is 1: give --tp 2 or more")
    if sequence_parallel and cfg.seq_len % tp:
        raise ValueError(f"sequence parallelism: seq_len {cfg.seq_len} is not divisible by tp {tp}")
    if tp < 1 or pp < 1 or world % (tp * pp):
        raise ValueError(f"{world} processes are not divisible by tp {tp} x pp {pp} = {tp * pp}; "
                         f"start a multiple of {tp * pp} (torchrun --nproc_per_node)")
    if cfg.n_head % tp:
        raise ValueError(f"n_head {cfg.n_head} is not divisible by tp {tp}")
    if cfg.padded_vocab % tp:
        raise ValueError(f"the padded vocabulary {cfg.padded_vocab} is not divisible by tp {tp}")
    if cfg.n_layer < pp:
        raise ValueError(f"n_layer {cfg.n_layer} is less than pp {pp}: a stage would be empty")
    dp = world // (tp * pp)
    if batch % (dp * micro):
        raise ValueError(f"batch size {batch} is not divisible by dp {dp} x micro-batch {micro} "
                         f"= {dp * micro}")


class PeerError(RuntimeError):
    """Another rank is gone, or did not answer within the timeout. The message names the operation
    and the ranks that it waited for; run_schedule adds the microbatch."""


@contextmanager
def comm_errors(operation: str, group=None):
    """Whatever fails inside is PeerError: `operation`, with the ranks of a group if it is given."""
    try:
        yield
    except RuntimeError as error:
        whom = "" if group is None else f" with ranks {dist.get_process_group_ranks(group)}"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", reason)
        raise PeerError(f"{operation}{whom}: {reason}") from error


class Work:
    """An operation of a group on its way: `start` begins it and returns torch's handles, `wait`
    ends it and returns its result. What is `received` is added to the result then."""

    def __init__(self, result, operation="", group=None, start=list, received=()):
        self.result, self.operation, self.group = result, operation, group
        self.received, self.finish = received, lambda result: result
        with comm_errors(operation, group):
            self.works = start()

    def then(self, finish) -> "Work":
        """The same, with finish(result) for its result."""
        self.finish = finish
        return self

    def wait(self) -> torch.Tensor:
        with comm_errors(self.operation, self.group):
            for work in self.works:
                work.wait()
        for part in self.received:
            self.result += part
        return self.finish(self.result)


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> Work:
    """Sum (or `op`) over the group, in place; nothing to do alone.

    Two ranks on the CPU send each other a small x and add, which takes gloo half as long.
    """
    if group is None:
        return Work(x)
    if x.is_cuda or group.size() > 2 or x.nbytes > EXCHANGE_BYTES or op != dist.ReduceOp.SUM:
        return Work(x, "all-reduce", group,
                        lambda: [dist.all_reduce(x, op, group, async_op=True)])
    other, theirs = 1 - group.rank(), torch.empty_like(x)
    return Work(x, "all-reduce", group, lambda: [
        dist.isend(x, group=group, group_dst=other),
        dist.irecv(theirs, group=group, group_src=other)], [theirs])


# torch 2.13 renamed both and warns of the old names; 2.11 has only these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(x: torch.Tensor, group) -> Work:
    """Cut x along dimension 0 into a slice for each rank of the group and add up the ranks' x: this
    rank's slice becomes the sum, in place; the others keep what they had.

    On the CPU every rank sends each other rank its slice: gloo's own copies x, all-reduces the copy
    and throws most of it away, which takes twice the traffic and the memory. All ranks start their
    transfers in the same order, and gloo matches messages between two ranks in order.
    """
    if group is None:
        return Work(x)
    slices, rank = x.chunk(group.size()), group.rank()
    if x.is_cuda:
        return Work(slices[rank], "reduce-scatter", group, lambda: [
            _reduce_scatter(slices[rank], x, group=group, async_op=True)])
    others = [r for r in range(len(slices)) if r != rank]
    received = [torch.empty_like(slices[rank]) for _ in others]
    return Work(slices[rank], "reduce-scatter", group, lambda: [
        *(dist.isend(slices[r], group=group, group_dst=r) for r in others),
        *(dist.irecv(y, group=group, group_src=r) for r, y in zip(others, received))], received)


def all_gather(x: torch.Tensor, group) -> Work:
    """The inverse: this rank's slice of x goes to all, and theirs come into x, in place. On the CPU
    by messages again, because gloo's own gathers into a copy first."""
    if group is None:
        return Work(x)
    slices, rank = x.chunk(group.size()), group.rank()
    if x.is_cuda:
        return Work(x, "all-gather", group,
                        lambda: [_all_gather(x, slices[rank], group=group, async_op=True)])
    others = [r for r in range(len(slices)) if r != rank]
    return Work(x, "all-gather", group, lambda: [
        *(dist.isend(slices[rank], group=group, group_dst=r) for r in others),
        *(dist.irecv(slices[r], group=group, group_src=r) for r in others)])


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
    """Into a tensor-parallel region, f forward and g backward: x as it is, for all ranks have it;
    with sequence parallelism this rank's positions (B, T / tp, C) -> (B, T, C)."""
    if not grid.sequence_parallel:
        return Work(x)
    whole = x.new_empty(grid.tp, *x.shape)                              # (tp, B, T / tp, C)
    whole[grid.tp_rank] = x
    return all_gather(whole, grid.group("tp")).then(lambda x: x.movedim(0, 1).flatten(1, 2))


def reduce_from(x: torch.Tensor, grid: Grid) -> Work:
    """Out of one, g forward and f backward: the sum of the ranks' x (B, T, C), in place; with
    sequence parallelism at this rank's positions only, (B, T / tp, C)."""
    if not grid.sequence_parallel:
        return all_reduce(x, grid.group("tp"))
    slices = x.unflatten(1, (grid.tp, -1)).movedim(1, 0).contiguous()   # (tp, B, T / tp, C)
    return reduce_scatter(slices, grid.group("tp")).then(lambda x: x.squeeze(0))


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        if not grid.sequence_parallel:
            ctx.mark_dirty(x)
        return reduce_from(x, grid).wait()

    @staticmethod
    def backward(ctx, dy):
        return copy_to(dy, ctx.grid).wait(), None


def g(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Exit of a tensor-parallel region: the sum of the ranks' x (B, T, C); may overwrite x."""
    return x if grid.tp == 1 else _G.apply(x, grid)


def add_product(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """The weight's gradient dy^T x, of dy (N, out) and x (N, in): added where FlatParameters keeps
    gradients (`main_grad`, as in Megatron-LM), by the matrix product itself if the types are equal,
    so that it never is a tensor of its own; returned where there is no such place."""
    if not hasattr(weight, "main_grad"):
        return dy.t() @ x
    kept = weight.main_grad()
    if kept.dtype == x.dtype:
        kept.addmm_(dy.t(), x)
    else:                               # 16 bit -> fp32, in parts that stay in the cache
        for rows, columns in zip(kept.split(2048), dy.split(2048, dim=1)):
            rows += columns.t() @ x
    return None


class _Linear(torch.autograd.Function):
    """y = f(x) W^T + b. While the gradient of x is on its way to the other ranks, that of W is
    computed; with sequence parallelism the positions of x are gathered a second time for it."""

    @staticmethod
    def forward(ctx, x, weight, bias, grid):
        ctx.save_for_backward(x)
        ctx.weight, ctx.biased, ctx.grid = weight, bias is not None, grid
        return F.linear(copy_to(x, grid).wait(), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x,), grid = ctx.saved_tensors, ctx.grid
        there = copy_to(x, grid)
        back = reduce_from(dy @ ctx.weight, grid)
        dy = dy.flatten(0, 1)                                               # (B T, out)
        dw = add_product(ctx.weight, dy, there.wait().flatten(0, 1))
        if dw is None:
            ctx.weight.ready()
        return back.wait(), dw, dy.sum(0) if ctx.biased else None, None


def linear(x, weight, bias=None, grid=Grid(1, 1, 1)):
    """f(x) W^T + b, where f does nothing on a grid of one. Inside torch.compile, which is for tp 1,
    the plain product: the compiler takes care of its backward, `_mark_ready` of its gradient."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, grid)


class ColumnParallelLinear(nn.Module):
    """(B, T, in), the same everywhere -> (B, T, out / tp): this rank's columns. With sequence
    parallelism, as in the other modules here, what is "the same everywhere" is a slice of T."""
    partition_dim = {"weight": 0, "bias": 0}

    def __init__(self, plain: nn.Linear, grid: Grid):
        super().__init__()
        self.weight, self.bias, self.grid = plain.weight, plain.bias, grid

    def forward(self, x):
        return linear(x, self.weight, self.bias, self.grid)


class RowParallelLinear(nn.Module):
    """(B, T, in / tp), this rank's rows -> (B, T, out), the same everywhere. The bias is held by
    all and added once, after the sum."""
    partition_dim = {"weight": 1}

    def __init__(self, plain: nn.Linear, grid: Grid):
        super().__init__()
        self.weight, self.bias, self.grid = plain.weight, plain.bias, grid

    def forward(self, x):
        if self.grid.tp == 1:
            return linear(x, self.weight, self.bias)
        return g(linear(x, self.weight), self.grid) + self.bias


class _Lookup(torch.autograd.Function):
    """F.embedding, whose gradient is added to the rows looked up alone, where it is kept."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, dx):
        tokens, weight = ctx.saved_tensors[0].flatten(), ctx.weight
        kept = weight.main_grad() if hasattr(weight, "main_grad") else torch.zeros_like(weight)
        kept.index_add_(0, tokens, dx.flatten(0, 1).to(kept.dtype))
        if not hasattr(weight, "main_grad"):
            return None, kept
        weight.ready()
        return None, None


class VocabParallelEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, C): rows of other ranks count as zero here, and g adds them."""
    partition_dim = {"weight": 0}

    def __init__(self, embedding: nn.Embedding, grid: Grid):
        super().__init__()
        self.weight, self.grid = embedding.weight, grid

    def forward(self, tokens):
        rows = self.weight.shape[0]
        local = tokens - self.grid.tp_rank * rows                       # row number on this rank
        mine = (local >= 0) & (local < rows)
        x = _Lookup.apply(local.where(mine, 0), self.weight)            # (B, T, C)
        return g(x * mine.unsqueeze(-1), self.grid)


class PositionEmbedding(nn.Module):
    """positions 0, 1, ... n - 1 -> (n, C): counted from where this rank's slice starts."""

    def __init__(self, embedding: nn.Embedding, grid: Grid):
        super().__init__()
        self.weight, self.grid = embedding.weight, grid

    def forward(self, positions):
        first = self.grid.tp_rank * len(positions) if self.grid.sequence_parallel else 0
        return F.embedding(positions + first, self.weight)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy in nats of the logits z = f(x) W^T, x (B, T, C) and W (V / tp, C),
    against targets (B, T) of the whole vocabulary; `start` is the first row's token, rows from
    `valid` on are padding. In fp32 or wider whatever the type of x. Gradients come times `scale`.

        loss = log sum_v exp(z_v) - z_target        d loss / d z_v = softmax(z)_v - [v = target]

    Forward makes the gradients too, as long as the logits are there: a slice of positions at a
    time, so neither logits nor softmax of all positions ever exist. That is why the loss scale must
    be known then (None: no gradients), and why backward is to be called with gradient 1: that of W
    has been added already. Three numbers a position cross the ranks.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, start, valid, grid, scale):
        shape, group = x.shape, grid.group("tp")
        x, targets = copy_to(x, grid).wait().flatten(0, 1), targets.flatten()        # (N, C), (N,)
        wide = torch.promote_types(x.dtype, torch.float32)
        loss, dw = torch.zeros((), dtype=wide, device=x.device), None
        dx = None if scale is None else torch.empty_like(x)
        count = min(len(x), max(1, LOGITS[x.device.type] // weight.shape[0]))
        logits = x.new_empty(count, weight.shape[0])        # one memory for all slices
        floats = logits if x.dtype == wide else torch.empty_like(logits, dtype=wide)
        for rows in (slice(i, i + count) for i in range(0, len(x), count)):
            n = len(x[rows])
            torch.mm(x[rows], weight.t(), out=logits[:n])                           # (n, V / tp)
            z = floats[:n].copy_(logits[:n])
            z[:, valid:] = float("-inf")
            z -= all_reduce(z.amax(dim=1), group, dist.ReduceOp.MAX).wait().unsqueeze(1)
            local = targets[rows] - start
            mine = (local >= 0) & (local < z.shape[1])
            column = local.where(mine, 0).unsqueeze(1)                              # (n, 1)
            at_target = z.gather(1, column).squeeze(1).where(mine, 0)
            z.exp_()
            total, at_target = all_reduce(torch.stack([z.sum(dim=1), at_target]), group).wait()
            counted = targets[rows] != IGNORE_INDEX
            loss += (total.log() - at_target).where(counted, 0).sum()
            if scale is not None:
                upstream = counted.to(wide) * scale                                 # (n,)
                z *= (upstream / total).unsqueeze(1)
                z.scatter_add_(1, column, -(upstream * mine).unsqueeze(1))
                dz = logits[:n].copy_(z)
                torch.mm(dz, weight, out=dx[rows])
                part = add_product(weight, dz, x[rows])
                dw = part if dw is None else dw + part
        if scale is not None:
            dx = reduce_from(dx.view(shape[0], -1, shape[2]), grid).wait()
            # A slice of the positions would keep the memory of all.
            ctx.save_for_backward(dx.clone() if grid.sequence_parallel else dx)
            ctx.weight, ctx.dw = weight, dw
        return loss

    @staticmethod
    def backward(ctx, one):
        if ctx.dw is None:
            ctx.weight.ready()
        return *ctx.saved_tensors, ctx.dw, *[None] * 5


class VocabParallelHead(nn.Module):
    """x (B, T, C) and targets (B, T) -> the summed loss of model.Head, the same on every rank; its
    gradients come times `self.scale`. `self.norms` adds up the norms of x over its positions."""
    partition_dim = {"weight": 0}

    def __init__(self, head: nn.Module, grid: Grid):
        super().__init__()
        self.norm, self.weight, self.grid = head.norm, head.weight, grid
        self.vocab_size, self.scale, self.norms = head.vocab_size, 1.0, 0.0

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


@dataclass
class ParamSpec:
    """One parameter: its global name, its whole shape, and how a rank's slice is cut from it."""
    name: str
    shape: tuple            # of the whole, without vocabulary padding
    partition_dim: int | None         # the dimension that tensor parallelism cuts; None: every rank has it
    stride: int              # how many blocks are stacked in that dimension
    rows: int               # shape[0] with the vocabulary padding
    places: list            # (module, attribute) that hold it: two for a tied weight in one stage
    copy: bool              # the last stage's second copy of the tied weight
    local: torch.Size = ()  # shape of a rank's slice
    offset: int = 0         # of the slice in its bucket, in elements

    @property
    def bucket(self) -> str:
        """What it is communicated with: its block's attention or MLP, with the norm before it; the
        tied matrix, which two stages share, alone; what else the ends have."""
        if self.name.startswith("blocks."):
            block, part = self.name.split(".")[1:3]
            return f"{block}.mlp" if part in ("norm2", "mlp") else f"{block}.attn"
        return "tied" if self.name in TIED.values() else "ends"

    def shard(self, whole: torch.Tensor, tp: int, tp_rank: int) -> torch.Tensor:
        """Whole parameter -> slice of one tensor-parallel rank."""
        if self.rows > self.shape[0]:
            whole = F.pad(whole, (0, 0, 0, self.rows - self.shape[0]))
        if self.partition_dim is None:
            return whole
        stacked = whole.unflatten(self.partition_dim, (self.stride, tp, -1))
        return stacked.select(self.partition_dim + 1, tp_rank).flatten(self.partition_dim, self.partition_dim + 1)

    def unshard(self, slices: list) -> torch.Tensor:
        """The tp ranks' slices -> whole parameter."""
        if self.partition_dim is None:
            return slices[0]
        stacked = [s.unflatten(self.partition_dim, (self.stride, -1)) for s in slices]
        return torch.cat(stacked, self.partition_dim + 1).flatten(self.partition_dim, self.partition_dim + 1)[:self.shape[0]]


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
# activations inside a block are dropped after forward and made again in backward (GPipe, section
# 2.3, with blocks for its partitions, as in Chen et al. 2016): what stays is a block's input.
# ---------------------------------------------------------------------------------------------

TIED = {"head.weight": "embed.token.weight"}    # local name -> global name


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The blocks of a stage: their numbers differ by one at most, and the last stage, which has the
    head too, is never one of those with more."""
    return range(-(-stage * n_layer // pp), -(-(stage + 1) * n_layer // pp))


def build_stage(cfg: GPTConfig, grid: Grid, recompute=False, compile=False):
    """(this rank's part of the GPT, on the meta device; its parameters, ParamSpec in flat order)

    The specs depend on the stage alone, so any rank can know the layout of another one.
    """
    with torch.device("meta"):
        model = GPT(cfg)
    mine = stage_layers(cfg.n_layer, grid.pp, grid.stage)
    for name in list(model.blocks):
        if int(name) not in mine:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None
    for name, module in list(model.named_modules()):
        for end, twin in TP_PLAN.items():
            if name.endswith(end):
                model.set_submodule(name, twin(module, grid))

    specs = {}
    for module_name, module in model.named_modules():
        parts = next((n for end, n in STACKED.items() if module_name.endswith(end)), 1)
        for attribute, parameter in module.named_parameters(recurse=False):
            local = f"{module_name}.{attribute}"
            name = TIED.get(local, local)
            if name in specs:
                specs[name].places.append((module, attribute))
                continue
            vocab = name == "embed.token.weight"
            shape = (cfg.vocab_size, cfg.n_embd) if vocab else tuple(parameter.shape)
            specs[name] = ParamSpec(name, shape, getattr(module, "partition_dim", {}).get(attribute), parts,
                                 parameter.shape[0], [(module, attribute)],
                                 copy=local in TIED and not grid.is_first)
    # In the order of their buckets; `sorted` keeps the model's order within one.
    specs = sorted(specs.values(), key=lambda spec: (spec.name not in TIED.values(),
                                                        spec.bucket != "ends"))
    for _, bucket in groupby(specs, key=lambda spec: spec.bucket):
        end = 0
        for spec in bucket:
            spec.local = spec.shard(torch.empty(spec.shape, device="meta"), grid.tp, 0).shape
            spec.offset = end
            end += round_up(spec.local.numel(), 32)                    # 64 bytes in 16 bits

    for block in model.blocks.values():
        block.attn.stream = grid.tp_rank                                # other heads, other masks
        if compile:
            block.forward = torch.compile(block.forward, fullgraph=True)
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                    preserve_rng_state=False)           # masks come from the key
    return model, specs


def gpipe(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards in reverse; every stage does the same. O(micro) live."""
    return [("F", m) for m in range(micro)] + [("B", m) for m in reversed(range(micro))]


def one_f_one_b(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """As few forwards as fill the stages behind this one, then forward and backward in turn
    (PipeDream-flush, Narayanan et al. 2021): GPipe's bubble, `stages - stage` microbatches live.
    On one stage each backward follows its forward."""
    ahead = min(micro, stages - stage - 1)
    return ([("F", m) for m in range(ahead)]
            + [op for m in range(micro - ahead) for op in (("F", m + ahead), ("B", m))]
            + [("B", m) for m in range(micro - ahead, micro)])


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def run_schedule(schedule, model: GPT, grid: Grid, inputs, targets, boundary, dropout_seeds,
                 scale: float = 1.0, before_backward=lambda last: None) -> torch.Tensor:
    """Carry out this stage's list; returns the sum of its losses in float64, unscaled (0 on every
    stage but the last).

    inputs      microbatch -> tokens (B, T), used on the first stage
    targets     microbatch -> tokens (B, T), used on the last stage
    boundary    an empty tensor like what crosses a stage boundary, (B, T, C) or (B, T / tp, C)
    dropout_seeds        microbatch -> key of the dropout masks
    scale       what to multiply the gradients of the summed loss by
    before_backward   called before each "B" with whether it is the last, which completes the step

    Raises PeerError, naming the microbatch, if another rank is gone or hangs.
    """
    live, sends = {}, {}
    total = torch.zeros((), dtype=torch.float64, device=boundary.device)
    last = [m for op, m in schedule if op == "B"][-1:]

    if grid.is_last:
        model.head.scale, model.head.norms = scale, 0.0

    def receive(step, group, m):
        x, source = torch.empty_like(boundary), grid.pipeline_peer(step)
        with comm_errors(f"receive from rank {source} (stage {grid.stage + step})"):
            dist.irecv(x, source, grid.group(group), tag=m).wait()
        return x

    def send(x, step, group, m):
        x, target = x.detach().contiguous(), grid.pipeline_peer(step)
        what = f"send to rank {target} (stage {grid.stage + step})"
        with comm_errors(what):
            sends[group, m] = dist.isend(x, target, grid.group(group), tag=m), x, what

    def sent(*key):
        """What was sent lives until it has arrived, no longer."""
        work, _, what = sends.pop(key)
        with comm_errors(what):
            work.wait()

    def forward(m):
        x = inputs[m] if grid.is_first else receive(-1, "forward", m)
        if not grid.is_first:
            x.requires_grad_()
        y = model(x, targets[m] if grid.is_last else None, dropout_seeds[m])
        if grid.is_last:
            total.add_(y.detach())
        else:
            send(y, 1, "forward", m)
        if torch.is_grad_enabled():
            live[m] = x, y
        else:
            for key in list(sends)[:-1]:
                sent(*key)

    def backward(m):
        x, y = live.pop(m)
        if not grid.is_last:
            # A scalar whose gradient is dy: given dy itself torch imports a compiler, for a second.
            y = (y * receive(1, "backward", m)).sum()
            sent("forward", m)                          # at once: its gradient is back
        before_backward([m] == last)
        y.backward()
        if not grid.is_first:
            for key in list(sends):
                if key[0] == "backward":                # one gradient on its way at a time
                    sent(*key)
            send(x.grad, -1, "backward", m)

    for op, m in schedule:
        try:
            (forward if op == "F" else backward)(m)
        except PeerError as error:
            name = "forward" if op == "F" else "backward"
            raise PeerError(f"{name} of microbatch {m}: {error}") from error
    for key in list(sends):
        sent(*key)
    return total


def activation_bytes(cfg: GPTConfig, grid: Grid, schedule, micro_batch: int, itemsize: int,
                     recompute: bool = False) -> int:
    """Estimate of the most bytes this rank keeps between forward and backward, in units of
    B T C numbers (Korthikanti et al. 2022, section 4, for what we save; without dropout):

        block    inputs and outputs of 2 LayerNorms     / tp with sequence parallelism
                 q, k, v, attention's output and the MLP's 4C (before and after GELU)     / tp
        stage    what it sends on; or the head's input and its gradient, which is made in forward
    """
    unit = micro_batch * cfg.seq_len * cfg.n_embd * itemsize
    thin = unit // (grid.tp if grid.sequence_parallel else 1)
    block = 4 * thin + (12 if cfg.activation == "gelu" else 8) * unit // grid.tp
    end = 2 * thin if grid.is_last else thin
    layers = len(stage_layers(cfg.n_layer, grid.pp, grid.stage))
    kept = layers * thin + end if recompute else layers * block + end
    return live_activations(schedule) * kept + (block if recompute else 0)


def clock(schedules, forward: int = 1, backward: int = 2) -> list[list[tuple]]:
    """Run the stages' lists against each other without processes.

    Returns for each stage [(op, microbatch, start, end)] in units of time: an instruction starts
    when its stage is free and its input is there. Raises ValueError on a deadlock.
    """
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
                end[op, s, m] = start + (forward if op == "F" else backward)
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
    live = [0]
    for op, _ in schedule:
        live.append(live[-1] + (1 if op == "F" else -1))
    return max(live)


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
# slices, and replica r keeps slice r. One number (ZeRO's "stage", no stage of a pipeline) says of
# which tensors:
#
#                                                    bytes a parameter
#     ZeRO    masters, moments    grad     data      16 bits      fp32 (its own master)
#       0     whole               whole    whole     18           16
#       1     slice               whole    whole     6 + 12/dp    8 + 8/dp
#       2     slice               slice    whole     2 + 16/dp    4 + 12/dp
#       3     slice               slice    slice     18/dp        16/dp
#
#     1   the all-reduce becomes a reduce-scatter; AdamW updates the slice; an all-gather follows
#     2   every microbatch's bucket is reduce-scattered, added to the slice, and freed
#     3   a block's parameters are gathered before use, forward and backward, and freed after; the
#         next block's are on their way meanwhile (FSDP, Zhao et al. 2023)
#
# Before a backward that completes the gradients, `prepare_grad_sync`; each is `_mark_ready` once it is added; a
# full bucket goes off with `_start_grad_sync`, and its sum comes in with `_wait_grad_sync`.
# ---------------------------------------------------------------------------------------------


class Bucket:
    """Parameters that are communicated as one, laid out flat and padded to dp equal slices.

    data    (numel,) the parameters are views into it; with ZeRO 3 its memory comes and goes
    grad    (numel,) their gradients; from ZeRO 2 on those of one microbatch, None in between
    own     what this rank updates, (numel,) or with ZeRO (numel / dp,), a view of data and grad or
            from the line of the table on all there is: data, grad, master, exp_avg, exp_avg_sq
    parts   what of each spec is in this rank's slice: [(spec, range in the slice, in the spec)]
    """

    def __init__(self, specs: list[ParamSpec], dp: int, shards: int = 1, rank: int = 0):
        self.specs, self.shard = specs, {}
        self.data = self.grad = self.gathering = None
        self.missing = 0                # gradients of this microbatch that are not in yet
        end = specs[-1].offset + specs[-1].local.numel()
        self.numel = round_up(end, 32 * dp)
        length = self.numel // shards
        first, self.shard_ranges = rank * length, []
        for spec in specs:
            low = max(spec.offset, first)
            high = min(spec.offset + spec.local.numel(), first + length)
            if low < high:
                self.shard_ranges.append((spec, slice(low - first, high - first),
                                   slice(low - spec.offset, high - spec.offset)))

    def view(self, whole: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        """The part of a whole bucket that belongs to a spec, in the shape of the spec."""
        return whole[spec.offset:spec.offset + spec.local.numel()].view(spec.local)


def make_buckets(specs: list[ParamSpec], *layout) -> list[Bucket]:
    groups = groupby(specs, key=lambda spec: spec.bucket)
    return [Bucket(list(group), *layout) for _, group in groups]


class FlatParameters:
    """This rank's parameters, gradients, masters and Adam moments, in buckets.

    dtype           of the parameters
    master_dtype    of gradients, masters and moments; where it is dtype, a parameter is its own
                    master
    zero            ZeRO's stage, 0 to 3
    host            the device of masters and moments, where AdamW runs (ZeRO-Offload, Ren et al.
                    2021): gradients go over and parameters come back, bucket by bucket
    """

    def __init__(self, specs: list[ParamSpec], grid: Grid, dtype, master_dtype, device, zero: int = 0,
                 host=None):
        self.specs, self.grid, self.zero = specs, grid, zero
        device, host = torch.device(device), torch.device(device if host is None else host)
        self.shards, rank = (grid.dp, grid.dp_rank) if zero else (1, 0)
        self.buckets = make_buckets(specs, grid.dp, self.shards, rank)
        self.armed, self.reduced, self.transfers = False, 0, []
        for bucket in self.buckets:
            own, length = bucket.shard, bucket.numel // self.shards
            bucket.data = torch.zeros(bucket.numel, dtype=dtype, device=device)
            own["data"] = (bucket.data.chunk(self.shards)[rank] if zero < 3 else
                           torch.zeros(length, dtype=dtype, device=device))
            if zero < 2:
                bucket.grad = torch.zeros(bucket.numel, dtype=master_dtype, device=device)
            own["grad"] = (bucket.grad.chunk(self.shards)[rank] if zero < 2 else
                           torch.zeros(length, dtype=master_dtype, device=device))
            for name in ("master", "exp_avg", "exp_avg_sq"):
                own[name] = (own["data"] if (name, dtype, device) == ("master", master_dtype, host)
                             else torch.zeros(length, dtype=master_dtype, device=host))
            # The tied matrix is two parameters on the same memory: as one, its first gradient would
            # stay with autograd until the second came, at the end of backward.
            for spec, place in ((p, place) for p in bucket.specs for place in p.places):
                # .data: autograd shall not take a gather for a change of the values it saved.
                parameter = nn.Parameter(bucket.view(bucket.data, spec).data)
                setattr(*place, parameter)
                # Matrices are added there by their own backward, which says when; what autograd
                # makes (of vectors, and where torch.compile does the work) is added by the hook.
                parameter.main_grad = partial(self._main_grad, bucket, spec)
                parameter.ready = partial(self._mark_ready, bucket)
                parameter.register_post_accumulate_grad_hook(self._add)
            if zero == 3:
                self.reshard(bucket)

    def memory(self) -> dict:
        """Bytes that this rank holds all the time, by kind (the optimizer's on `host`)."""
        def held(*names):
            storages = [b.shard[name].untyped_storage() for b in self.buckets for name in names]
            return {storage.data_ptr(): storage.nbytes() for storage in storages}
        data, optimizer = held("data"), held("master", "exp_avg", "exp_avg_sq")
        return dict(parameters=sum(data.values()), gradients=sum(held("grad").values()),
                    optimizer=sum(size for at, size in optimizer.items() if at not in data))

    # Values

    @torch.no_grad()
    def load(self, name: str, whole) -> None:
        """Fill this rank's tensors `name` from whole parameters: whole(name, shape) -> tensor."""
        for bucket in self.buckets:
            for spec, here, there in bucket.shard_ranges:
                value = spec.shard(whole(spec.name, spec.shape), self.grid.tp, self.grid.tp_rank)
                bucket.shard[name][here].copy_(value.flatten()[there])

    def initialize(self, cfg: GPTConfig, seed: int) -> None:
        """Everything at step 0, one whole parameter in memory at a time."""
        self.load("master", lambda name, shape: initial_value(cfg, name, shape, seed))
        for bucket in self.buckets:
            bucket.shard["exp_avg"].zero_()
            bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()

    def sync_params(self) -> None:
        """masters -> parameters, rounded to the parameters' type, on all replicas."""
        for transfer in [self._sync_params(bucket) for bucket in self.buckets]:
            transfer.wait()

    @torch.no_grad()
    def _sync_params(self, bucket: Bucket) -> Work:
        if bucket.shard["master"] is not bucket.shard["data"]:
            bucket.shard["data"].copy_(bucket.shard["master"])
        group = self.grid.group("dp") if self.zero in (1, 2) else None
        return all_gather(bucket.data, group)

    # ZeRO 3: parameters that come and go

    def unshard(self, buckets: list[Bucket], prefetch: list[Bucket] = ()) -> None:
        """Have the buckets' parameters, and those of the ones `prefetch` on their way."""
        for bucket in (*buckets, *prefetch):
            if bucket.data.untyped_storage().size() == 0:
                bucket.data.untyped_storage().resize_(bucket.data.nbytes)
                bucket.data.chunk(self.shards)[self.grid.dp_rank].copy_(bucket.shard["data"])
                bucket.gathering = all_gather(bucket.data, self.grid.group("dp"))
        for bucket in buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def reshard(self, *buckets: Bucket) -> None:
        for bucket in buckets:
            bucket.data.untyped_storage().resize_(0)

    # Gradients

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            (bucket.grad if self.zero < 2 else bucket.shard["grad"]).zero_()

    def prepare_grad_sync(self, last: bool) -> None:
        """The next backward completes the gradients (of the step, or from ZeRO 2 on of this
        microbatch): reduce each bucket as soon as it is full."""
        self.armed, self.reduced = last or self.zero >= 2, 0
        for bucket in self.buckets:
            bucket.missing = sum(len(spec.places) for spec in bucket.specs)

    def _main_grad(self, bucket: Bucket, spec: ParamSpec) -> torch.Tensor:
        """Where the spec's gradient adds up, in the shape of the spec."""
        if bucket.grad is None:
            bucket.grad = torch.zeros(bucket.numel, dtype=bucket.shard["grad"].dtype,
                                      device=bucket.data.device)
        return bucket.view(bucket.grad, spec)

    def _add(self, parameter) -> None:
        if parameter.grad is not None:              # torch may call after a backward without one
            parameter.main_grad().add_(parameter.grad)
            parameter.grad = None
            parameter.ready()

    def _mark_ready(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        while self.armed and self.reduced < len(self.buckets):
            full = self.buckets[-1 - self.reduced]
            if full.missing:
                break
            self._start_grad_sync(full)
            self.reduced += 1

    def _start_grad_sync(self, bucket: Bucket) -> None:
        group = self.grid.group("dp")
        if self.zero == 0:
            self.transfers.append((bucket, all_reduce(bucket.grad, group)))
            return
        if bucket.grad is None:     # GPipe's forwards add the head's before the first backward
            return
        self._wait_grad_sync()                                # one on its way at a time
        self.transfers.append((bucket, reduce_scatter(bucket.grad, group)))
        if self.zero >= 2:
            bucket.grad = None
        if self.zero == 3:
            self.reshard(bucket)

    @torch.no_grad()
    def _wait_grad_sync(self) -> None:
        """Wait for the buckets on their way; from ZeRO 2 on they add up in the slice."""
        for bucket, transfer in self.transfers:
            mine = transfer.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += mine
        self.transfers = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for the buckets, then add up what else is a sum: the two ends' gradients of the tied
        weight, and with sequence parallelism those of what tensor parallelism replicates."""
        assert self.reduced == len(self.buckets), "a parameter got no gradient"
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
        """Sums of squares of this rank's gradients, float64 (2,): [what counts for the global
        norm, everything].

        Summed over the world, the first counts each parameter of the whole model once: replicas,
        what tensor parallelism replicates, and the copy of the tied weight count elsewhere. The
        second is not finite if one of this rank's gradients is not (or if they are so large that
        the squares of a row overflow in fp32).
        """
        counted = torch.zeros((), dtype=torch.float64, device=self.buckets[0].data.device)
        everything = counted.clone()
        replica = self.zero == 0 and self.grid.dp_rank > 0
        for bucket in self.buckets:
            for spec, here, _ in bucket.shard_ranges:
                square = square_sum(bucket.shard["grad"][here])
                everything += square
                replicated = spec.partition_dim is None and self.grid.tp_rank > 0
                if not replica and not replicated and not spec.copy:
                    counted += square
        return torch.stack([counted, everything])

    def not_finite(self) -> str | None:
        """A parameter whose gradient here makes `square_sums` not finite, of several that of the
        last block, which backward reaches first; None: there is none."""
        return next((spec.name for bucket in reversed(self.buckets)
                     for spec, here, _ in reversed(bucket.shard_ranges)
                     if not square_sum(bucket.shard["grad"][here]).isfinite()), None)

    @torch.no_grad()
    def step(self, factor: float, step: int, lr: float, beta1: float, beta2: float,
               weight_decay: float) -> None:
        """AdamW number `step` (from 1) on what this rank keeps, with the gradients times `factor`;
        then all replicas have the new parameters. Matrices decay, vectors do not (Loshchilov and
        Hutter 2019, algorithm 2)."""
        transfers = []
        for bucket in self.buckets:
            master, *moments = (bucket.shard[n] for n in ("master", "exp_avg", "exp_avg_sq"))
            grad = bucket.shard["grad"].mul_(factor).to(master.device)
            for decay, matrices in ((weight_decay, True), (0.0, False)):
                ranges = [here for spec, here, _ in bucket.shard_ranges
                          if (len(spec.shape) >= 2) == matrices]
                if ranges:
                    lists = [[x[here] for here in ranges] for x in (master, grad, *moments)]
                    steps = torch.full((len(ranges),), step - 1.0, device=master.device).unbind()
                    adamw(*lists, [], list(steps), fused=True, amsgrad=False, maximize=False,
                          lr=lr, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=decay)
            transfers.append(self._sync_params(bucket))     # while the next bucket is updated
        for transfer in transfers:
            transfer.wait()


class _Regather(torch.autograd.Function):
    """The end of a block: in backward its parameters must be there again."""

    @staticmethod
    def forward(ctx, y, *gather):
        ctx.gather = gather
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        flat, here, before = ctx.gather
        flat.unshard(here, prefetch=before)
        return dy, None, None, None


def shard_parameters(model: GPT, flat: FlatParameters) -> None:
    """ZeRO 3: wrap the forward of each part of the model (on one stage) in gather and free.

        forward    gather block i, start i + 1, run, free
        backward   gather block i, start i - 1, run; `_mark_ready` reduces its gradients and frees it

    The tied matrix is there from the embedding to the head, which makes its gradients in forward;
    what else the ends have stays for backward, and so does the last block, with which that begins.
    """
    ends, halves = flat.buckets[:2], flat.buckets[2:]
    blocks = list(zip(halves[::2], halves[1::2]))

    def run_embed(forward, *args):
        flat.unshard(ends, prefetch=blocks[0])
        return forward(*args)

    def run_block(forward, here, before, after, *args):
        flat.unshard(here, prefetch=after)
        y = _Regather.apply(forward(*args), flat, here, before)
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


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat tensor, a float64 scalar.

    One fp32 sum over 10M values can be off in its fourth digit: rows of 4096 are summed in fp32,
    and the rows' sums in float64.
    """
    whole = x.numel() // 4096 * 4096
    rows = torch.linalg.vector_norm(x[:whole].view(-1, 4096), dim=1).double()
    return rows.square().sum() + torch.linalg.vector_norm(x[whole:]).double().square()


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
    print(f"{args.pp_schedule}, {p} stages, {m} microbatches; a backward takes two units of time\n")
    print(draw(timeline))
    print(f"\nbubble {bubble(timeline):.1%} of the time, (p - 1) / (m + p - 1) = "
          f"{(p - 1) / (m + p - 1):.1%}")
    print("live activations, in microbatches: "
          + ", ".join(f"stage {s}: {live_activations(x)}" for s, x in enumerate(schedules)))


if __name__ == "__main__":
    main()
