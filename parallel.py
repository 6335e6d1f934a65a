"""3D parallelism of the GPT in its plainest form: data, pipeline and tensor parallelism, with
sequence, context and expert parallelism and ZeRO. It runs on CPUs.

    python data.py && python parallel.py                                # in one process
    torchrun --nproc_per_node=8 parallel.py --tp 2 --pp 2 --zero 1      # dp = 8 / (tp pp) = 2

trains the quick start's model on its data for 20 steps. With the same seed and global batch every
layout has the same losses and gradients, up to the order of additions. They agree with those of
train.py to 1e-5. The sections below are the program, and flags choose what runs. Nothing is tuned
for speed, but buckets overlap communication with backward. Read it, run it, change it.

    1. Ranks                    their grid, their groups, their collectives
    2. Tensor parallelism       each matrix is cut             --tp, --sequence-parallel
    3. Pipeline parallelism     the layers are cut             --pp, --pp-schedule
    4. Data parallelism         the batch is cut               --zero (dp is what remains)
    5. Context parallelism      the sequence is cut            --cp
    6. Expert parallelism       the experts are divided        --mixture --ep
    7. All together             one step, and the program

parallelism/ has the versions that train.py runs. They are faster and need less memory. Most begin
with a table of what they add to the plain form.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.
"""
import argparse
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, GPTConfig, ceil_div

# ---------------------------------------------------------------------------------------------
# 1. Ranks
#
# A rank is one process. The ranks form an array (pp, dp, cp, tp) in row-major order: neighbors in
# tp have consecutive ranks, and so has each stage. For pp 2, dp 2, cp 1, tp 2:
#
#                     replica 0   replica 1
#       stage 0       0   1       2   3          tensor parallel    (0 1) (2 3) (4 5) (6 7)
#       stage 1       4   5       6   7          same weights       (0 2) (1 3) (4 6) (5 7)
#                                                pipelines          (0 4) (1 5) (2 6) (3 7)
#
# A machine has consecutive ranks, so those that send each other most are neighbors. Tensor
# parallelism sends most: each block and microbatch needs two all-reduces in forward and two in
# backward. Context parallelism exchanges keys and values in each block, expert parallelism tokens.
# Data parallelism reduces gradients once a step, and more often with ZeRO 2 and 3. Pipelines
# usually send least: one activation for each microbatch, and its gradient. So the boundary of two
# stages is the cheapest place to cut a job into machines (Narayanan et al. 2021, section 3). The
# order is Megatron-LM's.
# ---------------------------------------------------------------------------------------------


GROUPS = ("tp", "cp", "replicas", "ep", "same_experts", "pp", "world", "embedding")


class Grid:
    """The layout, this rank's place in it, and its process groups (None for a group of one). With
    `sequence_parallel`, a rank holds T / tp positions outside the tensor-parallel layers.

    A replica is a full copy of the model, on pp x tp ranks. There are dp x cp replicas: dp cuts the
    rows of the batch, and cp cuts their positions. With cp 2 each replica of the drawing becomes
    two. The gradients of the replicas are summed, and ZeRO shards over the replicas. With `ep`,
    every ep consecutive replicas divide the experts of a mixture among them (section 6)."""

    def __init__(self, dp: int, pp: int, tp: int, rank: int = 0, *, cp: int = 1, ep: int = 1,
                 sequence_parallel: bool = False):
        self.dp, self.pp, self.cp, self.tp, self.ep = dp, pp, cp, tp, ep
        self.rank = rank
        self.world = dp * pp * cp * tp
        self.ranks = torch.arange(self.world).view(pp, dp, cp, tp)
        place = (self.ranks == rank).nonzero()[0].tolist()
        self.stage, self.dp_rank, self.cp_rank, self.tp_rank = place
        self.replicas = dp * cp
        self.replica = self.dp_rank * cp + self.cp_rank
        self.ep_rank = self.replica % ep
        self.is_first = self.stage == 0
        self.is_last = self.stage == pp - 1
        self.sequence_parallel = sequence_parallel
        self.groups = dict.fromkeys(GROUPS)

    def members(self, kind: str) -> list[int]:
        """The ranks in this rank's group of this kind."""
        p, d, c, t = self.stage, self.dp_rank, self.cp_rank, self.tp_rank
        replicas = self.ranks[p, :, :, t].reshape(-1, self.ep)          # a row shares the experts
        same_experts = replicas[:, self.ep_rank]
        if self.ep == 1:        # experts are like all other weights: no second group of replicas
            same_experts = self.ranks[p, d, c, t]
        members = dict(
            tp=self.ranks[p, d, c, :],                  # share each matrix
            cp=self.ranks[p, d, :, t],                  # share each sequence
            replicas=replicas,                          # hold the same weights: one of each replica
            ep=replicas[self.replica // self.ep],       # hold all experts together
            same_experts=same_experts,                  # hold the same experts
            pp=self.ranks[:, d, c, t],                  # share the layers
            world=self.ranks,
            embedding=self.ranks[[0, -1], d, c, t])     # hold the tied matrix: first and last stage
        return members[kind].flatten().tolist()


def make_groups(grid: Grid) -> None:
    """Create this rank's process groups. Only the members of a group create it.

    PyTorch names a new group by the number of groups that the process has created. All members must
    find the same name. Stages in the middle do not create "embedding", so it comes last."""
    for kind in GROUPS:
        ranks = grid.members(kind)
        if grid.rank in ranks and len(set(ranks)) > 1:
            grid.groups[kind] = dist.new_group(ranks, use_local_synchronization=True)


# The ranks of a group use three collectives. For ranks a and b, which have two slices each:
#
#                before      reduce-scatter      then all-gather     or all-reduce, from "before"
#       rank a   a0 a1       a0+b0  -            a0+b0  a1+b1        a0+b0  a1+b1
#       rank b   b0 b1       -      a1+b1        a0+b0  a1+b1        a0+b0  a1+b1
#
# So an all-reduce costs as much as the other two together. A rank alone has None as its group, and
# its collectives return x unchanged.


def all_reduce(x: torch.Tensor, group) -> torch.Tensor:
    """The sum of x over the ranks of a group."""
    if group is None:
        return x
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def reduce_scatter(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """This rank's slice, along `dim`, of the sum of x over the ranks."""
    if group is None:
        return x
    slices = [part.contiguous() for part in x.chunk(group.size(), dim)]
    own = torch.empty_like(slices[0])
    dist.reduce_scatter(own, slices, group=group)
    return own


def all_gather(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """The x of all ranks, joined along `dim`."""
    if group is None:
        return x
    x = x.contiguous()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


class Conjugate(torch.autograd.Function):
    """A collective in forward. In backward another one, its conjugate, makes the gradient of x from
    that of the result.

    The conjugate of an all-gather is a reduce-scatter. Every rank uses this rank's slice for work
    of its own, so the gradient of the slice is the sum of the gradients of all ranks. The conjugate
    of a reduce-scatter is an all-gather. Sections 2 and 6 have more pairs."""

    @staticmethod
    def forward(ctx, x, collective, conjugate, group):
        ctx.conjugate, ctx.group = conjugate, group
        return collective(x, group)

    @staticmethod
    def backward(ctx, dy):
        return ctx.conjugate(dy, ctx.group), None, None, None


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
# its weight as (out, in), so "by columns" cuts dimension 0. In train.py: parallelism/tensor.py.
# ---------------------------------------------------------------------------------------------


# Sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Between g and the next f (bias,
# residual addition, LayerNorm) all tp ranks do the same work on the same activations. Instead, let
# each hold some positions there. For two ranks and positions 0 to 3:
#
#                 norm               f     qkv, attention, proj     g      norm
#       rank a    0 1     ->   0 1 2 3     with half of the heads   ->     0 1
#       rank b    2 3     ->   0 1 2 3     with the other half      ->     2 3
#
#   f: all-gather forward,     reduce-scatter backward
#   g: reduce-scatter forward, all-gather backward
#
# f and g together send as much as one all-reduce, so no more than without it. The activations from
# g to f take 1 / tp of the memory. A LayerNorm, a bias after g and the position embedding see this
# rank's positions alone, so `plain_3d_step` sums their gradients over the tp ranks.
# In train.py: parallelism/sequence.py.


gather_positions = partial(all_gather, dim=1)           # (B, T / tp, C) -> (B, T, C)
scatter_positions = partial(reduce_scatter, dim=1)      # (B, T, C) -> (B, T / tp, C)


def identity(x: torch.Tensor, group) -> torch.Tensor:
    return x


def f(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The input of a matrix that is cut by columns, at all positions."""
    if grid.sequence_parallel:
        return Conjugate.apply(x, gather_positions, scatter_positions, grid.groups["tp"])
    return Conjugate.apply(x, identity, all_reduce, grid.groups["tp"])


def g(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The output of a matrix that is cut by rows: the sum of what the ranks computed."""
    if grid.sequence_parallel:
        return Conjugate.apply(x, scatter_positions, gather_positions, grid.groups["tp"])
    return Conjugate.apply(x, all_reduce, identity, grid.groups["tp"])


def cut(parameter: nn.Parameter, dim: int, grid: Grid, stacked: int = 1) -> nn.Parameter:
    """This rank's part of a parameter, along `dim`. If several matrices are stacked there, as q, k
    and v are, each is cut by itself: (3C, C) -> (3C / tp, C)."""
    parts = [matrix.chunk(grid.tp, dim)[grid.tp_rank] for matrix in parameter.chunk(stacked, dim)]
    own = nn.Parameter(torch.cat(parts, dim).detach())
    # Every tp rank has a different part. Parameters without this mark are whole on each of them, so
    # the norm counts them once, and with sequence parallelism their gradients are summed.
    own.is_cut = True
    return own


class PlainColumnLinear(nn.Module):
    """x (B, T, in) -> (B, T, out / tp), this rank's columns."""

    def __init__(self, whole: nn.Linear, grid: Grid, stacked: int = 1):
        super().__init__()
        self.grid = grid
        self.weight = cut(whole.weight, 0, grid, stacked)
        self.bias = cut(whole.bias, 0, grid, stacked)

    def forward(self, x):
        return F.linear(f(x, self.grid), self.weight, self.bias)


class PlainRowLinear(nn.Module):
    """x (B, T, in / tp), this rank's columns -> (B, T, out), the sum over the ranks."""

    def __init__(self, whole: nn.Linear, grid: Grid):
        super().__init__()
        self.grid = grid
        self.weight = cut(whole.weight, 1, grid)
        self.bias = whole.bias      # added after the sum, which would count it tp times

    def forward(self, x):
        return g(F.linear(x, self.weight), self.grid) + self.bias


# The token matrix, which embedding and head share, is cut by rows: a rank has V / tp tokens. V is
# padded to a multiple of 128, so that it can be cut. The last rows belong to no token.


def find_local(tokens: torch.Tensor, weight: torch.Tensor, grid: Grid) -> tuple:
    """(the row of each token in this rank's part of the matrix, whether the part has the token). If
    not, the row is 0."""
    rows = tokens - grid.tp_rank * len(weight)
    is_local = (rows >= 0) & (rows < len(weight))
    return rows.where(is_local, 0), is_local


class PlainVocabEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, C). A rank computes 0 for tokens of other ranks, and g sums."""

    def __init__(self, weight: nn.Parameter, grid: Grid):
        super().__init__()
        self.grid = grid
        self.weight = weight                                            # (V / tp, C)

    def forward(self, tokens):
        rows, is_local = find_local(tokens, self.weight, self.grid)
        x = F.embedding(rows, self.weight) * is_local.unsqueeze(-1)
        return g(x, self.grid)


class PlainPositionEmbedding(nn.Module):
    """With sequence or context parallelism, a rank holds some positions of the sequence. The model
    numbers them 0, 1, 2 ..., and own[i] is where number i stands in the sequence. Every sequence is
    as long as the matrix."""

    def __init__(self, whole: nn.Embedding, grid: Grid):
        super().__init__()
        self.weight = whole.weight                                              # (T, C)
        positions = torch.arange(len(self.weight))
        own = own_positions(positions, grid.cp_rank, grid.cp)       # (T / cp): all, if cp is 1
        if grid.sequence_parallel:
            own = own.chunk(grid.tp)[grid.tp_rank]                  # (T / cp / tp)
        self.own = own

    def forward(self, positions):
        return F.embedding(self.own[positions], self.weight)


class PlainVocabHead(nn.Module):
    """x (B, T, C), targets (B, T) -> the summed loss of model.Head. All targets count in the loss.
    No rank holds all V logits z of a position. The ranks exchange three numbers for it, m, the sum
    and z_target:

        loss = log sum_v exp(z_v) - z_target = m + log sum_v exp(z_v - m) - z_target

    m is the largest logit, so that exp cannot overflow. m cancels, so it needs no gradient."""

    def __init__(self, whole: nn.Module, weight: nn.Parameter, grid: Grid):
        super().__init__()
        self.norm, self.vocab_size, self.grid = whole.norm, whole.vocab_size, grid
        self.weight = weight                                            # (V / tp, C)

    def forward(self, x, targets):
        group = self.grid.groups["tp"]
        z = F.linear(f(self.norm(x), self.grid), self.weight)           # (B, T, V / tp)
        tokens = torch.arange(len(self.weight)) + self.grid.tp_rank * len(self.weight)
        z = z.masked_fill(tokens >= self.vocab_size, -torch.inf)        # padding: probability 0
        m = z.detach().amax(-1)                                         # (B, T), as all below
        if group is not None:
            dist.all_reduce(m, dist.ReduceOp.MAX, group)
        own_total = (z - m.unsqueeze(-1)).exp().sum(-1)
        total = Conjugate.apply(own_total, all_reduce, identity, group)
        columns, is_local = find_local(targets, self.weight, self.grid)
        z_here = z.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
        z_target = Conjugate.apply(z_here.where(is_local, 0), all_reduce, identity, group)
        return (m + total.log() - z_target).sum()


def plain_tensor_parallel(model: GPT, grid: Grid) -> None:
    """Replace every module that has a matrix to cut, or that has to know its positions."""
    for block in model.blocks.values():
        block.attn.qkv = PlainColumnLinear(block.attn.qkv, grid, stacked=3)
        block.attn.proj = PlainRowLinear(block.attn.proj, grid)
        block.mlp.up = PlainColumnLinear(block.mlp.up, grid)
        block.mlp.down = PlainRowLinear(block.mlp.down, grid)
    token_matrix = cut(model.embed.token.weight, 0, grid)
    model.embed.token = PlainVocabEmbedding(token_matrix, grid)
    model.embed.position = PlainPositionEmbedding(model.embed.position, grid)
    model.head = PlainVocabHead(model.head, token_matrix, grid)


# ---------------------------------------------------------------------------------------------
# 3. Pipeline parallelism (GPipe: Huang et al. 2019, 1F1B: Narayanan et al. 2021, section 2.2)
#
# The layers are cut into p stages, one for each rank of a pipeline, and the batch into m
# microbatches, which pass through the stages one after another: forward (F), then backward (B).
# For three stages and five microbatches, a backward taking twice as long as a forward:
#
#     GPipe      F0 F1 F2 F3 F4 .  .  .  .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0
#                .  F0 F1 F2 F3 F4 .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .
#                .  .  F0 F1 F2 F3 F4 B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .  .  .
#
#     1F1B       F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4
#                .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .
#                .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .
#
# In both a stage idles for (p - 1) / (m + p - 1) of the time. This is the bubble. With GPipe it
# keeps the activations of m microbatches. With 1F1B it keeps those of p at most, because each B
# frees those of its microbatch. In train.py: parallelism/pipeline.py and parallelism/schedules.py.
# ---------------------------------------------------------------------------------------------


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The numbers of a stage's blocks. Stages differ by one block at most. The last stage, which
    also has the head, never has more blocks than another."""
    return range(ceil_div(stage * n_layer, pp), ceil_div((stage + 1) * n_layer, pp))


def keep_stage(model: GPT, grid: Grid, layers) -> None:
    """Keep these layers. The first stage also keeps the embedding, the last one the head. The
    forward of model.GPT leaves out what is None, so it runs the rest as a stage."""
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None


def plain_gpipe(stage: int, stages: int, m: int) -> list[tuple]:
    """What a stage does, in order: all forwards, then all backwards, the last one first. The
    backwards could have any other order that is the same on all stages."""
    return [("F", i) for i in range(m)] + [("B", i) for i in reversed(range(m))]


def plain_1f1b(stage: int, stages: int, m: int) -> list[tuple]:
    """Warm-up: one forward for each later stage, because no gradient arrives before those have run.
    Steady state: a forward and a backward in turn. Cool-down: the backwards that are left."""
    ahead = min(stages - 1 - stage, m)
    order = [("F", i) for i in range(ahead)]
    for i in range(m - ahead):
        order += [("F", ahead + i), ("B", i)]
    return order + [("B", i) for i in range(m - ahead, m)]


SCHEDULES = {"gpipe": plain_gpipe, "1f1b": plain_1f1b}


def plain_pipeline(stage: GPT, batch: list, order: list, tokens_in_batch: int,
                   grid: Grid) -> float:
    """Run the stage's forwards and backwards in this order. They accumulate the gradients of the
    mean loss over all tokens of the batch. Returns the sum of the losses, on the last stage. Other
    stages return 0.

    stage   maps tokens, or activations (B, T, C), to activations. The last stage maps them and the
            targets to the sum of the losses
    batch   microbatches, (tokens (B, T), targets (B, T))
    order   what the stage does: ("F" or "B", number of the microbatch)

    `recv` waits for its message. `isend` returns at once. With a blocking send 1F1B would hang: two
    neighbors send to each other, and each would wait for the other to receive. On NCCL the messages
    must also start together: see `start_messages` in parallelism/pipeline.py."""
    ranks_of_stage = grid.replicas * grid.tp        # consecutive, by the order of section 1
    previous = grid.rank - ranks_of_stage
    following = grid.rank + ranks_of_stage
    parts = grid.tp if grid.sequence_parallel else 1        # an activation has T / parts positions
    loss_sum = 0.0
    kept = {}           # microbatch: (x, y), the stage's input and output, from F to B
    sends = []
    for kind, i in order:
        if kind == "F":
            tokens, targets = batch[i]
            if grid.is_first:
                x = tokens
            else:
                x = torch.empty(len(tokens), tokens.shape[1] // parts, stage.cfg.n_embd,
                                dtype=next(stage.parameters()).dtype)
                dist.recv(x, src=previous)
                x.requires_grad_()      # a leaf: backward ends here, with x.grad for `previous`
            y = stage(x, targets)
            if grid.is_last:
                loss_sum += y.item()
            else:
                sends.append(dist.isend(y.detach(), dst=following))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            if grid.is_last:
                (y / tokens_in_batch).backward()
            else:
                dy = torch.empty_like(y)
                dist.recv(dy, src=following)
                y.backward(dy)
            if not grid.is_first:
                sends.append(dist.isend(x.grad, dst=previous))
    for send in sends:
        send.wait()
    return loss_sum


# ---------------------------------------------------------------------------------------------
# 4. Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020)
#
# Every replica trains on its share of the batch. The gradients are summed over the replicas. The
# replicas start equal, because they have the same seed. They make the same update, so they stay
# equal. In train.py: parallelism/zero.py. The whole idea, if every process is a replica:
# ---------------------------------------------------------------------------------------------


def plain_step(model, optimizer, tokens, targets):
    """tokens, targets (B, T): the whole batch. Each rank trains on its share of the rows."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    loss = model(tokens.chunk(dp)[rank], targets.chunk(dp)[rank])   # a sum over this rank's tokens
    (loss / targets.numel()).backward()                             # its term of the mean loss
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)                             # the gradient of the mean loss
    optimizer.step()                                                # the same on every rank


class PlainBucket:
    """Gradients that are sent in one message, which is faster than many small ones. Autograd calls
    the hook of a parameter after it has accumulated into .grad. The last hook starts the
    all-reduce, which runs while backward computes the gradients of the next bucket. All replicas
    complete the buckets in the order of backward:

        backward      head       block 1         block 0         embedding
        all-reduce               head.norm ->    block 1 ----->  block 0 ----->  positions, tokens >
    """

    def __init__(self, parameters: list, group):
        self.parameters, self.group = parameters, group
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.grad_ready)

    def begin_step(self, num_microbatches: int) -> None:
        """A gradient is complete after the backward of the last microbatch."""
        self.missing = num_microbatches * len(self.parameters)

    def grad_ready(self, parameter: nn.Parameter) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.message = torch.cat([p.grad.flatten() for p in self.parameters])
            self.work = dist.all_reduce(self.message, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums, and make them the gradients."""
        self.work.wait()
        sums = self.message.split([p.numel() for p in self.parameters])
        for parameter, total in zip(self.parameters, sums):
            parameter.grad = total.view(parameter.shape)


def plain_buckets(model: GPT, grid: Grid) -> list[PlainBucket]:
    """A bucket for each block, the token matrix, the position matrix and the last LayerNorm. The
    gradient of the token matrix is complete last: head and embedding add to it. Experts, which not
    all replicas have (section 6), are in buckets of their own."""
    contents = {}
    for name, parameter in model.named_parameters():            # lists the tied matrix once
        module = ".".join(name.split(".")[:2])                  # blocks.0, embed.token, head.norm
        kind = "same_experts" if hasattr(parameter, "is_expert") else "replicas"
        contents.setdefault((module, kind), []).append(parameter)
    return [PlainBucket(parameters, grid.groups[kind])
            for (_, kind), parameters in contents.items() if grid.groups[kind] is not None]


# AdamW keeps two moments for each parameter, its averages of the gradient and of the gradient's
# square. With plain data parallelism every replica keeps all moments and makes the same update.
# ZeRO divides this work: replica i of r updates shard i of each flattened parameter. AdamW is
# elementwise, so a shard may begin and end anywhere. Of n parameters a replica keeps:
#
#            parameters  gradients  moments    sent: gradients                    parameters
#   ZeRO 0   n           n          2n         all-reduce, once a step            -
#   ZeRO 1   n           n          2n / r     reduce-scatter, once a step        all-gather, once
#   ZeRO 2   n           n / r      2n / r     reduce-scatter, in each backward   all-gather, once
#   ZeRO 3   n / r       n / r      2n / r     reduce-scatter, in each backward   all-gather, in use
#
# With ZeRO 3 a microbatch gathers each parameter twice, for forward and for backward. In this file
# the shards of ZeRO 1 and 2 are copies, so ZeRO 1 keeps 2n / r more than this table, and ZeRO 2
# keeps n / r more. In zero.py the shards are views.


def flatten(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x in one dimension, padded to a multiple of the replicas."""
    return F.pad(x.flatten(), (0, -x.numel() % grid.replicas))


def plain_shards(model: GPT, grid: Grid) -> dict[str, nn.Parameter]:
    """{name: the part of the parameter that this replica's AdamW updates}."""
    shards = {}
    for name, parameter in model.named_parameters():
        parts = flatten(parameter.detach(), grid).chunk(grid.replicas)
        shards[name] = nn.Parameter(parts[grid.replica].clone())
        if hasattr(parameter, "is_cut"):
            shards[name].is_cut = True
    return shards


def reduce_scatter_gradients(model: GPT, shards: dict, grid: Grid) -> None:
    """ZeRO 1, after the last backward of a step: each replica gets its part of the sums."""
    for name, parameter in model.named_parameters():
        grad = flatten(parameter.grad, grid)
        shards[name].grad = reduce_scatter(grad, grid.groups["replicas"])


@torch.no_grad()
def all_gather_parameters(model: GPT, shards: dict, grid: Grid) -> None:
    """ZeRO 1 and 2, after AdamW: copy the updated shards of all replicas into the model."""
    for name, parameter in model.named_parameters():
        flat = all_gather(shards[name], grid.groups["replicas"])
        parameter.copy_(flat[:parameter.numel()].view(parameter.shape))         # no padding


def reduce_scatter_in_backward(model: GPT, shards: dict, grid: Grid) -> None:
    """ZeRO 2: a hook reduce-scatters each gradient as soon as backward has computed it. The shard
    keeps this rank's part, and the rest is freed. So the gradients of the whole model never exist
    at once."""
    def grad_ready(shard, parameter):
        grad = reduce_scatter(flatten(parameter.grad, grid), grid.groups["replicas"])
        shard.grad = grad if shard.grad is None else shard.grad + grad
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(grad_ready, shards[name]))


class PlainGathered(nn.Module):
    """ZeRO 3 (FSDP, Zhao et al. 2023): a module whose parameters exist only while it runs.
    `module`, on the meta device, takes no memory and only gives their names, shapes and order.

        forward     gather, run, free         backward    gather, run again, backward, free
    """

    def __init__(self, module: nn.Module, shards: list, group):
        super().__init__()
        self.module = module.to("meta")
        self.shards, self.group = shards, group

    def gather_and_run(self, *inputs):
        parameters = {}
        for shard, (name, empty) in zip(self.shards, self.module.named_parameters()):
            # Backward adds this replica's part of the summed gradient to shard.grad.
            flat = Conjugate.apply(shard, all_gather, reduce_scatter, self.group)
            parameters[name] = flat[:empty.numel()].view(empty.shape)
        return torch.func.functional_call(self.module, parameters, inputs)

    def forward(self, *inputs):
        # Autograd would keep the gathered parameters for backward. The checkpoint drops them. In
        # backward it gathers them and runs forward again. FSDP and zero.py only gather again.
        return checkpoint(self.gather_and_run, *inputs, use_reentrant=False)


def gather_in_use(model: GPT, shards: dict, grid: Grid) -> None:
    """ZeRO 3: embedding, blocks and head keep nothing but their shards. Embedding and head gather
    the same shard of the tied matrix, and add to its gradient."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    def gathered(module):
        own = [shards[name_of[parameter]] for parameter in module.parameters()]
        return PlainGathered(module, own, grid.groups["replicas"])

    for layer, block in list(model.blocks.items()):
        model.blocks[layer] = gathered(block)
    if model.embed is not None:
        model.embed = gathered(model.embed)
    if model.head is not None:
        model.head = gathered(model.head)


# ---------------------------------------------------------------------------------------------
# 5. Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2)
#
# The activations of a long sequence do not fit on one rank. So the sequence is cut, too. A rank
# runs the whole model on some of its positions, from the embedding to the loss. The gradients of
# parameters are summed over the ranks, as in data parallelism. Only attention reads other
# positions: the keys and values of earlier ones. A later position attends to more keys. For equal
# work each rank has an early and a late piece of the sequence. For two ranks and 12 positions:
#
#     position            0 1 2    3 4 5    6 7 8    9 10 11
#     rank                0        1        1        0
#     number of keys      1 2 3    4 5 6    7 8 9    10 11 12        39 on either rank
#
# The plain form computes the masked scores, too, so it does not gain from this. For backward it
# keeps the gathered keys and values of every block. Other activations have this rank's T / cp
# positions alone. In train.py: parallelism/context.py, which skips later keys and gathers again.
# ---------------------------------------------------------------------------------------------


def own_positions(x: torch.Tensor, rank: int, cp: int, dim: int = -1) -> torch.Tensor:
    """A copy of the positions of x, T along `dim`, that a rank of cp holds: pieces `rank` and
    2 cp - 1 - `rank` of 2 cp. T must be a multiple of 2 cp, unless cp is 1."""
    pieces = x.tensor_split(2 * cp, dim)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim)


def gather_in_order(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x (B, H, T / cp, D) at this rank's positions -> x (B, H, T, D) at all positions, in order."""
    gather, scatter = partial(all_gather, dim=2), partial(reduce_scatter, dim=2)
    pieces = Conjugate.apply(x, gather, scatter, grid.groups["cp"]).chunk(2 * grid.cp, dim=2)
    early, late = pieces[0::2], pieces[1::2]        # each rank's first and second piece
    return torch.cat([*early, *reversed(late)], dim=2)


class PlainContextAttention(nn.Module):
    """Causal attention of q, k and v (B, H, T / cp, D), those of this rank's positions."""

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        # The arguments of model.CoreAttention. Dropout and packed texts are left out.
        k, v = gather_in_order(k, self.grid), gather_in_order(v, self.grid)     # (B, H, T, D)
        positions = torch.arange(k.shape[2])
        own = own_positions(positions, self.grid.cp_rank, self.grid.cp)
        mask = own.unsqueeze(1) >= positions    # (T / cp, T): a row for a query, columns for keys
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def plain_context_parallel(model: GPT, grid: Grid) -> None:
    """Let every attention read the keys and values of all positions."""
    for block in model.blocks.values():
        block.attn.core_attention = PlainContextAttention(grid)


# ---------------------------------------------------------------------------------------------
# 6. Expert parallelism (GShard, Lepikhin et al. 2020)
#
# In a mixture of experts (models/moe.py) a token uses few of the E experts. So most of the memory
# is for experts that have few tokens of this rank. Let each of `ep` replicas keep E / ep experts.
# A replica sends its tokens to the ranks that have the experts which they chose, and gets the
# results back:
#
#     replica 0    tokens for experts 0 1 | 2 3    ->    experts 0 1 of both    ->    own tokens
#     replica 1    tokens for experts 0 1 | 2 3    ->    experts 2 3 of both    ->    own tokens
#
# The gradient of an expert is then that of the tokens of ep replicas. It is summed over those
# replicas that have the same experts. All other gradients are summed over all replicas. In
# train.py: parallelism/experts.py.
# ---------------------------------------------------------------------------------------------


def exchange(x: torch.Tensor, group, sent: list, received: list) -> torch.Tensor:
    """The first sent[0] rows of x go to rank 0 of the group, the next sent[1] to rank 1, and so on.
    The result has received[0] rows from rank 0, then received[1] from rank 1."""
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group)
    return result


def plain_experts(experts: nn.Module, grid: Grid, x: torch.Tensor, counts: torch.Tensor):
    """The `run` of a moe.Experts of which this rank keeps E / ep experts. Its forward sorts the
    tokens by expert before it calls `run`. x (n, C), counts (E,): how many rows of x are for each
    expert -> (n, C), what the experts compute for these rows."""
    group = grid.groups["ep"]
    counts = counts.view(grid.ep, -1)                   # (ep, E / ep): for each rank's experts
    ones = [1] * grid.ep
    theirs = exchange(counts, group, ones, ones)        # (ep, E / ep): of each rank, for mine
    sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
    to_experts = partial(exchange, sent=sent, received=received)
    back = partial(exchange, sent=received, received=sent)      # the gradients go back, too
    x = Conjugate.apply(x, to_experts, back, group)
    # The rows that arrive are sorted by rank, then by expert. Sort them by expert alone. With ep 2,
    # two experts on this rank and `theirs` [[2, 1], [1, 2]], `expert` is 0 0 1 and 0 1 1.
    expert = torch.arange(theirs.shape[1]).repeat(grid.ep).repeat_interleave(theirs.flatten())
    order = expert.argsort(stable=True)
    y = experts.mlp(x[order], theirs.sum(0))
    return Conjugate.apply(y[order.argsort()], back, to_experts, group)


def plain_expert_parallel(model: GPT, grid: Grid) -> None:
    """Divide the experts of every block: the first rank of an ep group keeps the first E / ep, and
    so on."""
    for block in model.blocks.values():
        experts = block.mlp.experts
        for layer in (experts.up, experts.down):
            own = layer.weight.detach().chunk(grid.ep)[grid.ep_rank]
            layer.weight = nn.Parameter(own.clone())
            layer.weight.is_expert = True
        experts.run = partial(plain_experts, experts, grid)


# ---------------------------------------------------------------------------------------------
# 7. All together
# ---------------------------------------------------------------------------------------------


def plain_norm_squared(owned: dict, grid: Grid, zero: int) -> torch.Tensor:
    """This rank's share of the squared gradient norm: summed over all ranks, the shares count each
    parameter of the whole model once."""
    squares = torch.zeros((), dtype=torch.float64)
    for name, parameter in owned.items():
        first_replicas = 1          # these hold each number once: one replica, of experts ep
        if hasattr(parameter, "is_expert"):
            first_replicas = grid.ep
        if grid.replica >= first_replicas and zero == 0:
            continue                            # replicas have the same gradients
        is_counted = grid.tp_rank == 0 or hasattr(parameter, "is_cut")
        if name == "head.weight":
            is_counted = False      # the last stage's copy of the tied matrix, which stage 0 counts
        if is_counted:
            squares += parameter.grad.double().square().sum()
    return squares


def plain_3d_step(model: GPT, owned: dict, buckets: list, optimizer, tokens: torch.Tensor,
                  grid: Grid, zero: int = 0, schedule=plain_gpipe) -> float:
    """One step on the batch `tokens` (B, T + 1), which is the same on all ranks. Returns the mean
    loss over its tokens, in nats, before the update. `owned` is {name: what `optimizer` updates},
    the parameters, or with ZeRO their shards. `buckets` are those of ZeRO 0."""
    # This rank's rows and positions of the batch, in at most four microbatches.
    rows = tokens.chunk(grid.dp)[grid.dp_rank]                          # (B / dp, T + 1)
    inputs = own_positions(rows[:, :-1], grid.cp_rank, grid.cp)         # (B / dp, T / cp)
    targets = own_positions(rows[:, 1:], grid.cp_rank, grid.cp)
    batch = list(zip(inputs.chunk(4), targets.chunk(4)))

    # Forward and backward. The gradients of the microbatches add up.
    tokens_in_batch = tokens[:, 1:].numel()
    order = schedule(grid.stage, grid.pp, len(batch))
    model.zero_grad()
    optimizer.zero_grad()
    for bucket in buckets:
        bucket.begin_step(len(batch))
    loss_sum = plain_pipeline(model, batch, order, tokens_in_batch, grid)

    # Sum the gradients over the replicas. With ZeRO 2 and 3 backward has done it.
    for bucket in buckets:
        bucket.finish()
    if zero == 1:
        reduce_scatter_gradients(model, owned, grid)
    for name, parameter in owned.items():
        # The tied matrix has two copies, the embedding on the first stage and the head on the last:
        # sum their gradients. Where one stage has both, autograd has added them.
        if name in ("embed.token.weight", "head.weight"):
            parameter.grad = all_reduce(parameter.grad, grid.groups["embedding"])
        # With sequence parallelism, a parameter that is whole on every tp rank has a gradient from
        # this rank's positions alone.
        if grid.sequence_parallel and not hasattr(parameter, "is_cut"):
            parameter.grad = all_reduce(parameter.grad, grid.groups["tp"])

    # Sum the loss and the norm. All ranks of a tp group have the same loss: count it once.
    if grid.tp_rank > 0:
        loss_sum = 0.0
    loss_sum = torch.tensor(loss_sum, dtype=torch.float64)
    sums = torch.stack([loss_sum, plain_norm_squared(owned, grid, zero)])
    loss_sum, squares = all_reduce(sums, grid.groups["world"]).tolist()

    # Clip the global norm to 1, and AdamW: every rank updates what it owns.
    factor = min(1.0, 1.0 / (squares ** 0.5 + 1e-6))
    for parameter in owned.values():
        parameter.grad *= factor
    optimizer.step()
    if zero in (1, 2):
        all_gather_parameters(model, owned, grid)
    return loss_sum / tokens_in_batch


def train_plainly(dataset, config: GPTConfig, steps: int, grid: Grid, zero: int = 0,
                  schedule=plain_gpipe) -> None:
    """Train a GPT, or a mixture of experts, on this rank's part of a data.TokenDataset with
    train.py's defaults: its batch size, seed, optimizer, and learning rate, which rises for 50
    steps. The decay of train.py, which starts after step 50, is left out."""
    batch_size, seed, peak_lr, warmup_steps = 16, 1337, 4e-3, 50
    model = config.build().initialize(seed)     # the whole model

    # This rank's part: of the matrices, of the positions, of the layers, then what it owns.
    if not hasattr(config, "n_expert"):         # a mixture has replicas alone
        plain_tensor_parallel(model, grid)
    if grid.ep > 1:
        plain_expert_parallel(model, grid)
    if grid.cp > 1:
        plain_context_parallel(model, grid)
    keep_stage(model, grid, stage_layers(config.n_layer, grid.pp, grid.stage))
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    owned = dict(model.named_parameters())
    buckets = []
    if zero == 0:
        buckets = plain_buckets(model, grid)
    if zero > 0:
        owned = plain_shards(model, grid)
    if zero == 2:
        reduce_scatter_in_backward(model, owned, grid)
    if zero == 3:
        gather_in_use(model, owned, grid)

    # AdamW, with weight decay for matrices, not for vectors: biases, LayerNorm.
    decayed = [parameter for name, parameter in owned.items() if name in matrices]
    others = [parameter for name, parameter in owned.items() if name not in matrices]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1),
                                   dict(params=others, weight_decay=0.0)], betas=(0.9, 0.95))
    for step in range(1, steps + 1):
        window_ids = dataset.window_ids(seed, (step - 1) * batch_size, batch_size)
        tokens = torch.from_numpy(dataset.tokens_of(window_ids))        # (B, T + 1)
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, step / warmup_steps)
        loss = plain_3d_step(model, owned, buckets, optimizer, tokens, grid, zero, schedule)
        if grid.rank == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)


def read_flags(world: int) -> argparse.Namespace:
    """The flags. Raises ValueError if `world` processes cannot run with them."""
    def refuse(message):
        raise ValueError(message)

    parser = argparse.ArgumentParser(
        "parallel.py", description="3D parallelism in plain forms, on CPUs.")
    parser.error = refuse
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--sequence-parallel", action="store_true",
                        help="cut positions over the tp ranks between these matrices")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--pp-schedule", choices=SCHEDULES, default="gpipe",
                        help="the order of forwards and backwards")
    parser.add_argument("--zero", type=int, choices=range(4), default=0,
                        help="what to shard. 1: AdamW's moments; 2: also gradients; "
                             "3: also parameters")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--mixture", action="store_true",
                        help="train a tiny mixture of experts, on replicas alone")
    parser.add_argument("--ep", type=int, default=1, help="replicas that divide the experts")
    parser.add_argument("--steps", type=int, default=20,
                        help="train.py has the same learning rate up to step 50")
    args = parser.parse_args()
    tp, pp, cp = args.tp, args.pp, args.cp
    layout = f"--tp {tp} --pp {pp} --cp {cp}"
    config = GPTConfig()
    if world > 1 and "MASTER_ADDR" not in os.environ:
        refuse(f"WORLD_SIZE is {world}, but the other variables of torchrun are not set: start "
             f"by torchrun --nproc_per_node={world} parallel.py, or unset it")
    if min(tp, pp, cp) < 1:
        refuse(f"{layout}: give at least 1 of each")
    size = tp * pp * cp             # ranks that share each row of the batch
    if world % size or 16 % (world // size):
        refuse(f"{layout} need {size} processes, or times a dp that divides the batch of 16, "
             f"not {world}: start them by torchrun --nproc_per_node={size} parallel.py {layout}")
    if config.n_head % tp or pp > config.n_layer or config.seq_len % (2 * cp * tp):
        refuse(f"{layout}: tp must divide the model's {config.n_head} heads, pp be at most its "
             f"{config.n_layer} layers, and 2 x cp x tp divide its {config.seq_len} positions")
    if args.mixture and (size > 1 or args.zero > 0):
        refuse(f"--mixture with {layout} --zero {args.zero}: its plain form has replicas and "
             f"--ep alone; train.py has all of them")
    if args.ep > 1 and not args.mixture:
        refuse(f"--ep {args.ep} divides the experts of --mixture: give it, too")
    if args.ep < 1 or world % args.ep or 8 % args.ep:
        refuse(f"--ep {args.ep} must divide the 8 experts of --mixture, and the {world} "
             f"processes")
    return args


def main() -> None:
    from data import TokenDataset
    from models.moe import SIZES, MoEConfig

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = read_flags(world)
        dataset = TokenDataset("data/python", "train", GPTConfig().seq_len)
    except (ValueError, OSError) as error:      # a mistake: one line, not a traceback of each rank
        if rank > 0:
            time.sleep(5)       # torchrun ends all ranks when one exits: rank 0 prints first
        else:
            print(f"parallel.py: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    if world > 1:
        dist.init_process_group("gloo")
    dp = world // (args.tp * args.pp * args.cp)
    grid = Grid(dp, args.pp, args.tp, rank, cp=args.cp, ep=args.ep,
                sequence_parallel=args.sequence_parallel)
    make_groups(grid)
    config = GPTConfig(vocab_size=dataset.meta["vocab_size"])
    if args.mixture:
        config = MoEConfig(vocab_size=dataset.meta["vocab_size"], **SIZES["moe-nano"])
    train_plainly(dataset, config, args.steps, grid, args.zero, SCHEDULES[args.pp_schedule])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
