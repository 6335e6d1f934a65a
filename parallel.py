"""3D parallelism of the GPT in its plainest form: data, pipeline and tensor parallelism, with
sequence, context and expert parallelism and ZeRO. It runs on CPUs.

    python data.py && python parallel.py                                # in one process
    torchrun --nproc_per_node=8 parallel.py --tp 2 --pp 2 --zero 1      # dp = 8 / (tp pp) = 2

trains the quick start's model on its data for 20 steps. With the same seed and global batch every
layout has the same losses and gradients, up to the order of additions. They agree with those of
train.py to 1e-5. The sections below are the program, and flags choose what runs. Read it, run it,
change it.

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
from collections import defaultdict
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
TIED = ("embed.token.weight", "head.weight")    # one matrix, which both ends of a pipeline have


class Grid:
    """The layout, this rank's coordinates in it, and its process groups. A group of one is None.

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
        coordinates = (self.ranks == rank).nonzero()[0].tolist()
        self.stage, self.dp_rank, self.cp_rank, self.tp_rank = coordinates
        self.replicas = dp * cp                                 # how many there are
        self.replica = self.dp_rank * cp + self.cp_rank         # the number of this rank's
        self.ep_rank = self.replica % ep
        self.is_first = self.stage == 0
        self.is_last = self.stage == pp - 1
        self.sequence_parallel = sequence_parallel
        self.groups = dict.fromkeys(GROUPS)

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


def make_groups(grid: Grid) -> None:
    """Create this rank's process groups. Only the members of a group create it. PyTorch counts the
    groups of a process to name the next one, and all members must find the same name. So
    "embedding", which stages in the middle do not create, comes last."""
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
# So an all-reduce costs as much as the other two together. Without a group x is returned unchanged.


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum of x over the ranks of a group, or the result of another operation."""
    if group is None:
        return x
    result = x.clone()
    dist.all_reduce(result, op, group)
    return result


def reduce_scatter(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """This rank's slice, along `dim`, of the sum of x over the ranks."""
    if group is None:
        return x
    slices = [part.contiguous() for part in x.chunk(group.size(), dim)]
    total = torch.empty_like(slices[0])
    dist.reduce_scatter(total, slices, group=group)
    return total


def all_gather(x: torch.Tensor, group, dim: int = 0) -> torch.Tensor:
    """The x of all ranks, joined along `dim`."""
    if group is None:
        return x
    x = x.contiguous()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


class Conjugate(torch.autograd.Function):
    """A collective in forward. In backward another one, its conjugate, turns the gradient of the
    result into that of x.

    The conjugate of an all-gather is a reduce-scatter. All ranks compute with this rank's slice, so
    its gradient is the sum of theirs. The conjugate of a reduce-scatter is an all-gather."""

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
# the memory. A parameter that is used there gets a gradient from this rank's positions alone:
# `plain_3d_step` sums it over the tp ranks. In train.py: parallelism/sequence.py.
# ---------------------------------------------------------------------------------------------

gather_positions = partial(all_gather, dim=1)           # (B, T / tp, C) -> (B, T, C)
scatter_positions = partial(reduce_scatter, dim=1)      # (B, T, C) -> (B, T / tp, C)


def identity(x: torch.Tensor, group) -> torch.Tensor:
    return x


def f(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The input of matrices that are cut by columns: x at all positions."""
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
    pieces = [matrix.chunk(grid.tp, dim)[grid.tp_rank] for matrix in parameter.chunk(stacked, dim)]
    part = nn.Parameter(torch.cat(pieces, dim).detach())
    part.is_cut = True      # parameters without this mark are whole on every tp rank
    return part


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


def find_local(tokens: torch.Tensor, weight: torch.Tensor, grid: Grid) -> tuple:
    """The token matrix, which embedding and head share, is cut by rows: `weight` has V / tp tokens.
    Returns for each token its row in `weight`, or 0, and whether the token is there."""
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
    """The rows of this rank's positions: all, or with sequence and context parallelism some of
    them. Every sequence is as long as the matrix."""

    def __init__(self, whole: nn.Embedding, grid: Grid):
        super().__init__()
        self.weight = whole.weight                                              # (T, C)
        positions = torch.arange(len(self.weight))
        self.positions = cut_sequence(positions, grid.cp_rank, grid.cp)         # (T / cp,)
        if grid.sequence_parallel:
            self.positions = self.positions.chunk(grid.tp)[grid.tp_rank]        # (T / cp / tp,)

    def forward(self, _):       # the model passes positions from 0, which a cut sequence has not
        return F.embedding(self.positions, self.weight)


class PlainVocabHead(nn.Module):
    """x (B, T, C), targets (B, T) -> the summed loss of model.Head. No target is ignored. Each rank
    computes V / tp of the logits z of a position. For each position the ranks exchange three
    numbers: m, the sum and z_target.

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
        m = all_reduce(z.detach().amax(-1), group, dist.ReduceOp.MAX)   # (B, T), as all below
        total = (z - m.unsqueeze(-1)).exp().sum(-1)
        total = Conjugate.apply(total, all_reduce, identity, group)
        columns, is_local = find_local(targets, self.weight, self.grid)
        z_target = z.gather(-1, columns.unsqueeze(-1)).squeeze(-1).where(is_local, 0)
        z_target = Conjugate.apply(z_target, all_reduce, identity, group)
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
# A row for each of three stages, five microbatches, a backward as long as two forwards:
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
    """What a stage does, in order: all forwards, then all backwards, the last one first."""
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
    mean loss over all tokens of the batch. Returns the sum of the losses on the last stage, else 0.

    stage   maps tokens (B, T), or activations (B, T, C), to activations. The last stage maps
            activations and targets to the sum of the losses
    batch   microbatches, (tokens (B, T), targets (B, T))
    order   what the stage does: ("F" or "B", number of the microbatch)

    `recv` waits for its message. `isend` returns at once. With a blocking send 1F1B would hang: two
    neighbors send to each other, and each would wait for the other to receive."""
    pipeline = grid.members("pp")       # its ranks, by stage
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
                dist.recv(x, src=pipeline[grid.stage - 1])
                x.requires_grad_()      # a leaf: backward ends here, with the gradient in x.grad
            y = stage(x, targets)
            if grid.is_last:
                loss_sum += y.item()
            else:
                sends.append(dist.isend(y.detach(), dst=pipeline[grid.stage + 1]))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            if grid.is_last:
                (y / tokens_in_batch).backward()
            else:
                dy = torch.empty_like(y)
                dist.recv(dy, src=pipeline[grid.stage + 1])
                y.backward(dy)
            if not grid.is_first:
                sends.append(dist.isend(x.grad, dst=pipeline[grid.stage - 1]))
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


def plain_replica_step(model, optimizer, tokens, targets):
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
    the hook of a parameter after it has accumulated into .grad. The last hook of a bucket starts
    its all-reduce, which runs while backward computes the gradients of other buckets:

        time          ------------------------------------------>
        backward      head    block 1    block 0    embedding
        all-reduce            head       block 1    block 0     embedding
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


def kind_of_group(parameter: nn.Parameter) -> str:
    """The group of ranks that have the parameter: the replicas, or for an expert (section 6) those
    of them that have the same experts."""
    return "same_experts" if hasattr(parameter, "is_expert") else "replicas"


def plain_buckets(model: GPT, grid: Grid) -> list[PlainBucket]:
    """A bucket for each block, one for its experts, and one each for the last LayerNorm, positions
    and tokens. The matrix of tokens is complete last: head and embedding add to it."""
    contents = defaultdict(list)
    for name, parameter in model.named_parameters():            # lists the tied matrix once
        module = ".".join(name.split(".")[:2])                  # blocks.0, embed.token, head.norm
        contents[module, kind_of_group(parameter)].append(parameter)
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
# the shards of ZeRO 1 and 2 are copies, which take more memory. In zero.py they are views.


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
        # `checkpoint` keeps only the inputs for backward. There it gathers and runs forward again.
        # FSDP and zero.py only gather again.
        return checkpoint(self.gather_and_run, *inputs, use_reentrant=False)


def gather_in_use(model: GPT, shards: dict, grid: Grid) -> None:
    """ZeRO 3: embedding, blocks and head keep nothing but their shards. Embedding and head gather
    the same shard of the tied matrix, and add to its gradient."""
    shard_of = {parameter: shards[name] for name, parameter in model.named_parameters()}

    def keep_shards(module):
        shards_of_module = [shard_of[parameter] for parameter in module.parameters()]
        return PlainGathered(module, shards_of_module, grid.groups["replicas"])

    for layer, block in list(model.blocks.items()):
        model.blocks[layer] = keep_shards(block)
    if model.embed is not None:
        model.embed = keep_shards(model.embed)
    if model.head is not None:
        model.head = keep_shards(model.head)


# ---------------------------------------------------------------------------------------------
# 5. Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2)
#
# The activations of a long sequence do not fit on one rank. So the sequence is cut, too: a rank
# runs the whole model on some of its positions, from the embedding to the loss, and the gradients
# are summed over the ranks, as in data parallelism. Only attention needs other positions: it reads
# the keys and values of all earlier ones. Late positions have more work, so each rank has an early
# and a late piece of the sequence. For two ranks and 12 positions:
#
#     position            0 1 2    3 4 5    6 7 8    9 10 11
#     rank                0        1        1        0
#     number of keys      1 2 3    4 5 6    7 8 9    10 11 12        39 on either rank
#
# In train.py: parallelism/context.py. The plain form is slower, because it computes the scores of
# later keys and then masks them.
# ---------------------------------------------------------------------------------------------


def cut_sequence(x: torch.Tensor, rank: int, cp: int, dim: int = -1) -> torch.Tensor:
    """A copy of the positions of x, T along `dim`, that a rank of cp holds: pieces `rank` and
    2 cp - 1 - `rank` of 2 cp. T must be a multiple of 2 cp, unless cp is 1."""
    pieces = x.tensor_split(2 * cp, dim)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim)


def gather_in_order(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x (B, H, T / cp, D) at this rank's positions -> x (B, H, T, D) at all positions, in order."""
    gather, scatter = partial(all_gather, dim=2), partial(reduce_scatter, dim=2)
    pieces = Conjugate.apply(x, gather, scatter, grid.groups["cp"]).chunk(2 * grid.cp, dim=2)
    early, late = pieces[0::2], pieces[1::2]        # each rank's first and second piece
    return torch.cat([*early, *reversed(late)], dim=2)      # the last rank's late piece comes first


class PlainContextAttention(nn.Module):
    """Causal attention of q, k and v (B, H, T / cp, D), those of this rank's positions."""

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        # The arguments of model.CoreAttention. Dropout and packed texts are left out.
        k, v = gather_in_order(k, self.grid), gather_in_order(v, self.grid)     # (B, H, T, D)
        of_keys = torch.arange(k.shape[2])
        of_queries = cut_sequence(of_keys, self.grid.cp_rank, self.grid.cp)
        is_earlier = of_queries.unsqueeze(1) >= of_keys                         # (T / cp, T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_earlier)


def plain_context_parallel(model: GPT, grid: Grid) -> None:
    """Let every attention read the keys and values of all positions."""
    for block in model.blocks.values():
        block.attn.core_attention = PlainContextAttention(grid)


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
# experts sum theirs. In train.py: parallelism/experts.py.
# ---------------------------------------------------------------------------------------------


def exchange(x: torch.Tensor, group, sent: list, received: list) -> torch.Tensor:
    """The first sent[0] rows of x go to rank 0 of the group, the next sent[1] to rank 1, and so on.
    The result has received[0] rows from rank 0, then received[1] from rank 1."""
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group)
    return result


def plain_experts(experts: nn.Module, grid: Grid, x: torch.Tensor, counts: torch.Tensor):
    """Replaces `run` of a moe.Experts of which this rank keeps E / ep. x (n, C) are this rank's
    tokens, sorted by the expert that they chose, and counts (E,) says how many rows each has.
    Returns what the experts compute for these rows, (n, C), by `mlp` (rows, counts of experts)."""
    group = grid.groups["ep"]
    counts = counts.view(grid.ep, -1)               # (ep, E / ep): a row for each rank's experts
    arriving = torch.empty_like(counts)             # (ep, E / ep): a row from each rank
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    to_experts = partial(exchange, sent=sent, received=received)
    back = partial(exchange, sent=received, received=sent)      # the gradients go back, too
    x = Conjugate.apply(x, to_experts, back, group)
    # What arrives from a rank is sorted by expert, so the experts compute one rank after another.
    parts = zip(x.split(received), arriving)
    y = torch.cat([experts.mlp(rows, counts_of_rows) for rows, counts_of_rows in parts])
    return Conjugate.apply(y, back, to_experts, group)


def plain_expert_parallel(model: GPT, grid: Grid) -> None:
    """Divide the experts of every block: rank i of an ep group keeps the i-th E / ep of them."""
    for block in model.blocks.values():
        experts = block.mlp.experts
        for layer in (experts.up, experts.down):
            part = layer.weight.detach().chunk(grid.ep)[grid.ep_rank]
            layer.weight = nn.Parameter(part.clone())
            layer.weight.is_expert = True
        experts.run = partial(plain_experts, experts, grid)


# ---------------------------------------------------------------------------------------------
# 7. All together
# ---------------------------------------------------------------------------------------------


def plain_norm_squared(owned: dict, grid: Grid, zero: int) -> torch.Tensor:
    """This rank's share of the squared norm of the whole gradient: the shares of all ranks add up
    to it. If several ranks have an element of the gradient, each counts a part of its square."""
    squares = torch.zeros((), dtype=torch.float64)
    for name, parameter in owned.items():
        copies = 1 if hasattr(parameter, "is_cut") else grid.tp
        if zero == 0:                       # with ZeRO replicas have different shards
            copies *= len(grid.members(kind_of_group(parameter)))
        if name in TIED and grid.pp > 1:
            copies *= 2                     # both end stages have it
        squares += parameter.grad.double().square().sum() / copies
    return squares


def plain_3d_step(model: GPT, owned: dict, buckets: list, optimizer, tokens: torch.Tensor,
                  grid: Grid, zero: int = 0, schedule=plain_gpipe) -> float:
    """One step on the batch `tokens` (B, T + 1), which is the same on all ranks. Returns the mean
    loss over its tokens, in nats, before the update. `owned` is {name: what `optimizer` updates},
    the parameters, or with ZeRO their shards. `buckets` are those of ZeRO 0."""
    # This rank's rows and positions of the batch, in at most four microbatches.
    rows = tokens.chunk(grid.dp)[grid.dp_rank]                          # (B / dp, T + 1)
    inputs = cut_sequence(rows[:, :-1], grid.cp_rank, grid.cp)          # (B / dp, T / cp)
    targets = cut_sequence(rows[:, 1:], grid.cp_rank, grid.cp)
    batch = list(zip(inputs.chunk(4), targets.chunk(4)))

    # Forward and backward. The gradients of the microbatches add up.
    tokens_in_batch = tokens[:, 1:].numel()
    order = schedule(grid.stage, grid.pp, len(batch))
    model.zero_grad()
    optimizer.zero_grad()
    for bucket in buckets:
        bucket.begin_step(len(batch))
    loss_sum = plain_pipeline(model, batch, order, tokens_in_batch, grid)

    # Sum the gradients over the replicas. With ZeRO 2 and 3 backward has done it. Then sum those
    # that are still partial: of the tied matrix over the end stages, and with sequence parallelism
    # of parameters that are not cut over the tp ranks.
    for bucket in buckets:
        bucket.finish()
    if zero == 1:
        reduce_scatter_gradients(model, owned, grid)
    for name, parameter in owned.items():
        if name in TIED:
            parameter.grad = all_reduce(parameter.grad, grid.groups["embedding"])
        if grid.sequence_parallel and not hasattr(parameter, "is_cut"):
            parameter.grad = all_reduce(parameter.grad, grid.groups["tp"])

    # Sum the loss and the norm over all ranks. The tp ranks have the same loss: each gives a share.
    loss_share = torch.tensor(loss_sum / grid.tp, dtype=torch.float64)
    shares = torch.stack([loss_share, plain_norm_squared(owned, grid, zero)])
    loss_sum, norm_squared = all_reduce(shares, grid.groups["world"]).tolist()

    # Clip the global norm to 1, and AdamW: every rank updates what it owns.
    factor = min(1.0, 1.0 / (norm_squared ** 0.5 + 1e-6))
    for parameter in owned.values():
        parameter.grad *= factor
    optimizer.step()
    if zero in (1, 2):
        all_gather_parameters(model, owned, grid)
    return loss_sum / tokens_in_batch


def train_plainly(dataset, config: GPTConfig, steps: int, grid: Grid, zero: int = 0,
                  schedule=plain_gpipe) -> None:
    """Train a GPT, or a mixture of experts, on a data.TokenDataset with train.py's defaults. The
    decay of its learning rate, which begins after step 50, is left out."""
    batch_size, seed, peak_lr, warmup_steps = 16, 1337, 4e-3, 50
    model = config.build().initialize(seed)     # the whole model

    # This rank's part: of the matrices, of the positions, of the layers, then what it owns.
    if not hasattr(config, "n_expert"):         # a mixture has data and expert parallelism alone
        plain_tensor_parallel(model, grid)
    if grid.ep > 1:
        plain_expert_parallel(model, grid)
    if grid.cp > 1:
        plain_context_parallel(model, grid)
    keep_stage(model, grid, stage_layers(config.n_layer, grid.pp, grid.stage))
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    owned = plain_shards(model, grid) if zero > 0 else dict(model.named_parameters())
    buckets = plain_buckets(model, grid) if zero == 0 else []
    if zero == 2:
        reduce_scatter_in_backward(model, owned, grid)
    if zero == 3:
        gather_in_use(model, owned, grid)

    # AdamW, with weight decay for matrices, not for vectors: biases, LayerNorm.
    optimizer = torch.optim.AdamW([
        dict(params=[owned[name] for name in owned if name in matrices], weight_decay=0.1),
        dict(params=[owned[name] for name in owned if name not in matrices], weight_decay=0.0),
    ], betas=(0.9, 0.95))
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

    parser = argparse.ArgumentParser()
    parser.error = refuse
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--sequence-parallel", action="store_true",
                        help="cut positions over the tp ranks between these matrices")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--pp-schedule", choices=SCHEDULES, default="gpipe",
                        help="the order of forwards and backwards")
    parser.add_argument("--zero", type=int, choices=range(4), default=0,
                        help="1: shard AdamW's moments; 2: also gradients; 3: also parameters")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--mixture", action="store_true",
                        help="train a tiny mixture of experts, with --ep alone")
    parser.add_argument("--ep", type=int, default=1, help="replicas that divide the experts")
    parser.add_argument("--steps", type=int, default=20,
                        help="steps; after 50 train.py has another learning rate")
    args = parser.parse_args()
    tp, pp, cp = args.tp, args.pp, args.cp
    layout = f"--tp {tp} --pp {pp} --cp {cp}"
    config = GPTConfig()
    if min(tp, pp, cp, args.ep) < 1:
        refuse(f"{layout} --ep {args.ep}: give at least 1 of each")
    size = tp * pp * cp             # ranks that share each row of the batch
    if world % size or 16 % (world // size):
        refuse(f"{layout} need {size} processes, times a dp that divides the batch of 16, "
             f"not {world}: start them by torchrun --nproc_per_node={size} parallel.py {layout}")
    if config.n_head % tp or pp > config.n_layer or config.seq_len % (2 * cp * tp):
        refuse(f"{layout}: tp must divide the model's {config.n_head} heads, pp be at most its "
             f"{config.n_layer} layers, and 2 x cp x tp divide its {config.seq_len} positions")
    if args.mixture and (size > 1 or args.zero > 0):
        refuse(f"--mixture is for replicas alone, here without {layout} --zero {args.zero}")
    experts = 8 if args.mixture else 1
    if world % args.ep or experts % args.ep:
        refuse(f"--ep {args.ep} must divide {world} processes, and the experts: 8 with --mixture")
    return args


def main() -> None:
    from data import TokenDataset
    from models.moe import SIZES, MoEConfig

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = read_flags(world)
        if world > 1:
            dist.init_process_group("gloo")
        dataset = TokenDataset("data/python", "train", GPTConfig().seq_len)
    except (ValueError, OSError) as error:      # a mistake: one line, not a traceback of each rank
        if rank > 0:
            time.sleep(5)       # torchrun ends all ranks when one exits: rank 0 prints first
        else:
            print(f"parallel.py: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
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
