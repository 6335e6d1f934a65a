"""3D parallelism whole, in its plainest form: data, pipeline and tensor parallelism of the GPT.

    python data.py; python parallel.py                          # in one process
    torchrun --nproc_per_node=8 parallel.py --tp 2 --pp 2       # dp = 8 / (tp pp) = 2

trains the quick start's model on its data for 20 steps. train.py, run the same way, has the same
losses to 1e-5, in any layout: the same seed and the same global batch give the same loss and
gradients, up to the order of additions. There are no options here and nothing is done for speed:
read it, run it, change it.

    1. Ranks                    their grid and its process groups
    2. Tensor parallelism       each matrix is cut; every rank computes with its part
    3. Pipeline parallelism     the layers are cut into stages; microbatches pass through them
    4. Data parallelism, ZeRO   the batch is cut; replicas sum their gradients
    5. Context parallelism      the sequence is cut; ranks exchange keys and values
    6. All together             one step, and the program
    7. As train.py runs it      the same techniques made fast and small, by parallelism/

In parallelism/ tensor.py, pipeline.py, zero.py and context.py begin with a table of what they add
to the plain form here, and why.

Shapes: B sequences, T positions, C channels, H heads, V vocabulary.
"""
import argparse
import os
import re
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, GPTConfig
from parallelism.compiling import compile_model
from parallelism.context import CP_PLAN, own_positions, recompute_attention
from parallelism.exact import EXACT_PLAN, ExactParameters, make_exact, new_sums
from parallelism.kernels import use_kernels
from parallelism.pipeline import chunk_layers, recompute_blocks, stage_layers
from parallelism.tensor import TP_PLAN, param_specs
from parallelism.zero import FlatParameters, gather_before_use

# ---------------------------------------------------------------------------------------------
# 1. Ranks
#
# A rank is one process. The ranks form an array (dp, pp, cp, tp) whose last dimension is the
# fastest. (cp is 1 except in section 7.) For dp 2, pp 2, tp 2:
#
#                     stage 0     stage 1
#       replica 0     0   1       2   3          tensor parallel    (0 1) (2 3) (4 5) (6 7)
#       replica 1     4   5       6   7          pipelines          (0 2) (1 3) (4 6) (5 7)
#                                                replicas           (0 4) (1 5) (2 6) (3 7)
#
# Tensor parallelism communicates most (four all-reduces per block and microbatch: two forward, two
# backward), so its ranks are adjacent and share a machine. Those of context parallelism, which
# exchange keys and values in each block, come next. Data parallelism reduces gradients once a step
# (ZeRO 2 and 3: once per microbatch) and may cross the network (Narayanan et al. 2021, section 3).
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
    `chunks`, that many parts of the model, which it runs in turn (interleaved 1F1B).

    A replica is a full copy of the model, on pp x tp ranks. There are dp x cp: dp cuts the rows of
    the batch, cp their positions. Their gradients are summed, and ZeRO shards over them."""

    def __init__(self, dp: int, pp: int, tp: int, rank: int = 0, sequence_parallel: bool = False,
                 chunks: int = 1, cp: int = 1):
        self.dp, self.pp, self.cp, self.tp = dp, pp, cp, tp
        self.rank, self.chunks = rank, chunks
        self.world = dp * pp * cp * tp
        self.ranks = torch.arange(self.world).view(dp, pp, cp, tp)
        self.dp_rank, rank_in_rows = divmod(rank, pp * cp * tp)
        self.stage, rank_in_stage = divmod(rank_in_rows, cp * tp)
        self.cp_rank, self.tp_rank = divmod(rank_in_stage, tp)
        self.replicas = dp * cp
        self.replica = self.dp_rank * cp + self.cp_rank
        self.is_first = self.stage == 0
        self.is_last = self.stage == pp - 1
        self.sequence_parallel = sequence_parallel
        self.hosts = ["this machine"] * self.world      # each rank's; parallelism/groups.py asks
        self.groups = dict.fromkeys(("tp", "cp", "replicas", "pp", "world", "embedding"))
        self.exact = None           # exact_sums.ExactSums, with --exact

    def members(self) -> dict[str, list]:
        """{kind of group: the ranks of each group of that kind}."""
        pipelines = self.ranks.permute(0, 2, 3, 1).reshape(-1, self.pp)
        replicas = self.ranks.permute(1, 3, 0, 2).reshape(-1, self.replicas)
        kinds = {
            "tp": self.ranks.reshape(-1, self.tp),                          # share each matrix
            "cp": self.ranks.mT.reshape(-1, self.cp),                       # share each sequence
            "replicas": replicas,                                           # hold the same weights
            "pp": pipelines,                                                # share the layers
            "world": self.ranks.reshape(1, -1),
            "embedding": pipelines[:, [0, -1]],                             # hold the tied matrix
        }
        return {kind: rows.tolist() for kind, rows in kinds.items()}


def make_grid(world: int, tp: int, pp: int, rank: int) -> Grid:
    """The grid of `world` ranks, with its process groups."""
    grid = Grid(world // (tp * pp), pp, tp, rank)
    for kind, rows in grid.members().items():
        for ranks in rows:
            if len(set(ranks)) > 1:
                group = dist.new_group(ranks)       # every rank must call it, for every group
                if rank in ranks:
                    grid.groups[kind] = group
    return grid


def sum_over(x: torch.Tensor, group) -> torch.Tensor:
    """Sum x over the ranks of a group, in place. There is nothing to do for one rank (None)."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


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
# its weight as (out, in), so "by columns" cuts dimension 0. In use: parallelism/tensor.py.
# ---------------------------------------------------------------------------------------------


class CopyToRanks(torch.autograd.Function):
    """f: every rank of the group uses x."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return sum_over(dy.clone(), ctx.group), None


class ReduceFromRanks(torch.autograd.Function):
    """g: the sum of the group's x."""

    @staticmethod
    def forward(ctx, x, group):
        return sum_over(x.clone(), group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def cut(parameter: nn.Parameter, dim: int, grid: Grid, stacked: int = 1) -> nn.Parameter:
    """This rank's part of a parameter, along `dim`. If several matrices are stacked there, as q, k
    and v are, each is cut by itself: (3C, C) -> (3C / tp, C)."""
    parts = [matrix.chunk(grid.tp, dim)[grid.tp_rank] for matrix in parameter.chunk(stacked, dim)]
    own = nn.Parameter(torch.cat(parts, dim).detach())
    own.is_cut = True           # no other rank of the tp group has it: see `plain_grad_norm`
    return own


class PlainColumnLinear(nn.Module):
    """x (B, T, in), equal on all ranks -> (B, T, out / tp), this rank's columns."""

    def __init__(self, plain: nn.Linear, grid: Grid, stacked: int = 1):
        super().__init__()
        self.group = grid.groups["tp"]
        self.weight = cut(plain.weight, 0, grid, stacked)
        self.bias = cut(plain.bias, 0, grid, stacked)

    def forward(self, x):
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class PlainRowLinear(nn.Module):
    """x (B, T, in / tp), this rank's columns -> (B, T, out), equal on all ranks."""

    def __init__(self, plain: nn.Linear, grid: Grid):
        super().__init__()
        self.group = grid.groups["tp"]
        self.weight = cut(plain.weight, 1, grid)
        self.bias = plain.bias      # whole: added after the sum; inside, it would count tp times

    def forward(self, x):
        return ReduceFromRanks.apply(F.linear(x, self.weight), self.group) + self.bias


# The token matrix, which embedding and head share, is cut by rows: a rank has V / tp tokens. (V is
# padded to a multiple of 128, so that it can be cut; the last rows belong to no token.)


def find_local(tokens: torch.Tensor, weight: torch.Tensor, grid: Grid) -> tuple:
    """(each token's row in this rank's part of the matrix, 0 if it is elsewhere; whether it is in
    this part)."""
    rows = tokens - grid.tp_rank * len(weight)
    is_local = (rows >= 0) & (rows < len(weight))
    return rows.where(is_local, 0), is_local


class PlainVocabEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, C). A rank has zeros for the tokens of others; g sums over ranks."""

    def __init__(self, weight: nn.Parameter, grid: Grid):
        super().__init__()
        self.grid = grid
        self.weight = weight                                            # (V / tp, C)

    def forward(self, tokens):
        rows, is_local = find_local(tokens, self.weight, self.grid)
        x = F.embedding(rows, self.weight) * is_local.unsqueeze(-1)
        return ReduceFromRanks.apply(x, self.grid.groups["tp"])


class PlainVocabHead(nn.Module):
    """x (B, T, C), targets (B, T) -> the summed loss of model.Head, though no rank has all V logits
    z of a position:

        loss = log sum_v exp(z_v) - z_target = m + log sum_v exp(z_v - m) - z_target

    With m the largest logit, exp cannot overflow; m cancels, so it needs no gradient."""

    def __init__(self, plain: nn.Module, weight: nn.Parameter, grid: Grid):
        super().__init__()
        self.norm, self.vocab_size, self.grid = plain.norm, plain.vocab_size, grid
        self.weight = weight                                            # (V / tp, C)

    def forward(self, x, targets):
        group = self.grid.groups["tp"]
        z = F.linear(CopyToRanks.apply(self.norm(x), group), self.weight)       # (B, T, V / tp)
        tokens = torch.arange(len(self.weight)) + self.grid.tp_rank * len(self.weight)
        z = z.masked_fill(tokens >= self.vocab_size, -torch.inf)        # padding: probability 0
        m = z.detach().amax(-1)                                         # (B, T), as all below
        if group is not None:
            dist.all_reduce(m, dist.ReduceOp.MAX, group)
        total = ReduceFromRanks.apply((z - m.unsqueeze(-1)).exp().sum(-1), group)
        columns, is_local = find_local(targets, self.weight, self.grid)
        z_here = z.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
        z_target = ReduceFromRanks.apply(z_here.where(is_local, 0), group)
        return (m + total.log() - z_target).sum()


def plain_tensor_parallel(model: GPT, grid: Grid) -> None:
    """Replace every module that has a matrix to cut."""
    for block in model.blocks.values():
        block.attn.qkv = PlainColumnLinear(block.attn.qkv, grid, stacked=3)
        block.attn.proj = PlainRowLinear(block.attn.proj, grid)
        block.mlp.up = PlainColumnLinear(block.mlp.up, grid)
        block.mlp.down = PlainRowLinear(block.mlp.down, grid)
    token_matrix = cut(model.embed.token.weight, 0, grid)
    model.embed.token = PlainVocabEmbedding(token_matrix, grid)
    model.head = PlainVocabHead(model.head, token_matrix, grid)


# ---------------------------------------------------------------------------------------------
# 3. Pipeline parallelism (GPipe, Huang et al. 2019)
#
# The layers are cut into p stages, one for each rank of a pipeline, and the batch into m
# microbatches, which pass through the stages one after another: forward (F), then backward (B).
# For three stages and five microbatches, a backward taking twice as long as a forward:
#
#     stage 0    F0 F1 F2 F3 F4 .  .  .  .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0
#     stage 1    .  F0 F1 F2 F3 F4 .  .  .  B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .
#     stage 2    .  .  F0 F1 F2 F3 F4 B4 B4 B3 B3 B2 B2 B1 B1 B0 B0 .  .  .  .
#
# A stage idles for (p - 1) / (m + p - 1) of the time, the bubble, and keeps the activations of all
# m microbatches. In use: parallelism/pipeline.py; better orders: parallelism/schedules.py.
# ---------------------------------------------------------------------------------------------


def keep_stage(model: GPT, grid: Grid, layers) -> None:
    """Keep these layers. The first stage also keeps the embedding, the last one the head; model.GPT
    runs what is left. (stage_layers divides the layers evenly.)"""
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None


def plain_pipeline(stage: nn.Module, batch: list, n_embd: int, total: int, grid: Grid) -> float:
    """Add the gradients of the mean loss over `total` tokens; return the sum of the losses (0 on
    all stages but the last). `batch` is a list of microbatches (tokens (B, T), targets (B, T)). A
    stage maps tokens, or activations (B, T, C), to activations; the last one maps them and the
    targets to the sum of the losses. C is `n_embd`."""
    previous, following = grid.rank - grid.tp, grid.rank + grid.tp
    stage_dtype = next(stage.parameters()).dtype
    loss_sum = 0.0
    kept = []
    for tokens, targets in batch:                       # all forwards
        x = tokens
        if not grid.is_first:
            x = torch.empty(*tokens.shape, n_embd, dtype=stage_dtype)
            dist.recv(x, src=previous)
            x.requires_grad_()
        y = stage(x, targets)
        if grid.is_last:
            loss_sum += y.item()
        else:
            dist.send(y.detach(), dst=following)
        kept.append((x, y))

    for x, y in reversed(kept):                         # then all backwards, in reverse
        if grid.is_last:
            (y / total).backward()
        else:
            dy = torch.empty_like(y)
            dist.recv(dy, src=following)
            y.backward(dy)
        if not grid.is_first:
            dist.send(x.grad, dst=previous)
    return loss_sum


# ---------------------------------------------------------------------------------------------
# 4. Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020)
#
# Every replica trains on its share of the batch. The gradients are summed over the replicas. The
# replicas start equal (from the same seed), make the same update, and so stay equal. In the forms
# of this section each rank of the default group is a replica. In use: parallelism/zero.py.
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


def plain_overlap(model, loss):
    """loss.backward(), then the sums of `plain_step`. Each sum starts when its gradient is there,
    and travels while backward computes the next ones."""
    sums = []

    def start_sum(parameter):
        sums.append(dist.all_reduce(parameter.grad, async_op=True))

    hooks = [parameter.register_post_accumulate_grad_hook(start_sum)
             for parameter in model.parameters()]
    loss.backward()
    for work in sums:
        work.wait()
    for hook in hooks:
        hook.remove()


# ZeRO does not repeat on every replica what one of them can do: replica r updates shard r of the
# parameters, laid out flat. AdamW is elementwise, so a shard may begin and end inside a matrix. Its
# moments are 8 of 16 bytes per parameter (parameters, gradients, two moments, in fp32).


def plain_shard(module: nn.Module) -> nn.Parameter:
    """This rank's part of the module's parameters, which are padded to a multiple of dp."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    flat = F.pad(flat, (0, -len(flat) % dp))
    return nn.Parameter(flat.chunk(dp)[rank].clone())


def plain_zero_step(model, shard, optimizer, tokens, targets):
    """ZeRO 1: `plain_step`, but `optimizer` updates `plain_shard(model)` alone."""
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


# ZeRO 2 reduce-scatters a block's gradients as soon as backward has computed them, as in
# `plain_overlap`, adds the sum to that block's shard, and frees them: the gradients of the whole
# model never exist at once. ZeRO 3 keeps no `full` either (FSDP, Zhao et al. 2023):


class GatherParameters(torch.autograd.Function):
    """shard (n / dp,) -> all n parameters of a block. Backward: this rank's gradients of all n ->
    the sum over ranks of those of the shard."""

    @staticmethod
    def forward(ctx, shard):
        full = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_single(full, shard)
        return full

    @staticmethod
    def backward(ctx, dfull):
        dshard = dfull.new_empty(len(dfull) // dist.get_world_size())
        dist.reduce_scatter_single(dshard, dfull)
        return dshard


def plain_zero3_block(block: nn.Module, shard: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    """ZeRO 3: block(x) with the parameters of which each rank keeps a `plain_shard`. `block` gives
    only their names and shapes; it may be on the meta device, without memory."""
    def gather_and_run(shard, x):
        full = GatherParameters.apply(shard)
        sizes = [parameter.numel() for parameter in block.parameters()]
        pieces = full[:sum(sizes)].split(sizes)
        parameters = {name: piece.view(parameter.shape)
                      for piece, (name, parameter) in zip(pieces, block.named_parameters())}
        return torch.func.functional_call(block, parameters, x)
    # Autograd would keep the gathered parameters for backward. The checkpoint drops them, and in
    # backward it gathers them again.
    return checkpoint(gather_and_run, shard, x, use_reentrant=False)


# ---------------------------------------------------------------------------------------------
# 5. Context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2)
#
# The activations of a long sequence do not fit on one rank. So the sequence is cut, too: a rank
# runs the whole model on some of its positions. It embeds them with their global positions and
# computes the loss at them; the gradients of parameters are summed over the ranks, as in data
# parallelism. Only attention reads other positions: the keys and values of those before. A later
# position attends to more keys, so for equal work each rank has an early and a late piece of the
# sequence (`own_positions`: pieces r and 2 cp - 1 - r of 2 cp). For two ranks and 12 positions:
#
#     position            0 1 2    3 4 5    6 7 8    9 10 11
#     rank                0        1        1        0
#     number of keys      1 2 3    4 5 6    7 8 9    10 11 12        39 on either rank
#
# In this section all ranks of the default group share one sequence. In use: parallelism/context.py.
# ---------------------------------------------------------------------------------------------


class GatherPositions(torch.autograd.Function):
    """x (B, H, T / cp, D) at this rank's positions -> x (B, H, T, D) at all positions, in order."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        pieces = [part.chunk(2, dim=2) for part in parts]
        early = [first for first, _ in pieces]
        late = [second for _, second in pieces]
        return torch.cat([*early, *reversed(late)], dim=2)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone(memory_format=torch.contiguous_format)        # the sum is in place
        dist.all_reduce(dx)             # the queries of every rank have used x
        return own_positions(dx, dist.get_rank(), dist.get_world_size(), dim=2)


def plain_context_attention(q, k, v):
    """Causal attention of q, k and v (B, H, T / cp, D), those of this rank's positions."""
    k, v = GatherPositions.apply(k), GatherPositions.apply(v)           # (B, H, T, D)
    positions = torch.arange(k.shape[2])
    own = own_positions(positions, dist.get_rank(), dist.get_world_size())
    mask = own.unsqueeze(1) >= positions        # (T / cp, T): a row for a query, columns for keys
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# ---------------------------------------------------------------------------------------------
# 6. All together
# ---------------------------------------------------------------------------------------------


def plain_norm_squared(model: GPT, grid: Grid) -> torch.Tensor:
    """This rank's share of the squared gradient norm: summed over all ranks, the shares count each
    parameter of the whole model once."""
    squares = torch.zeros((), dtype=torch.float64)
    if grid.replica > 0:
        return squares                          # replicas have the same gradients
    for name, parameter in model.named_parameters():
        is_counted = grid.tp_rank == 0 or hasattr(parameter, "is_cut")
        if name == "head.weight":       # the tied matrix of a last stage: the first one counts it
            is_counted = False
        if is_counted:
            squares += parameter.grad.double().square().sum()
    return squares


def plain_3d_step(model: GPT, optimizer, tokens: torch.Tensor, grid: Grid) -> float:
    """One step on the batch `tokens` (B, T + 1), which is the same on all ranks. Returns the mean
    loss over its tokens, in nats, before the update."""
    # Batch: this replica's rows, in four microbatches (fewer, if it has fewer rows).
    total = tokens[:, 1:].numel()
    rows = tokens.chunk(grid.dp)[grid.dp_rank]
    batch = [(part[:, :-1], part[:, 1:]) for part in rows.chunk(4)]

    # Forward and backward.
    optimizer.zero_grad()
    loss_sum = plain_pipeline(model, batch, model.cfg.n_embd, total, grid)

    # Sum over ranks: the gradients of the replicas; of the tied matrix also those of its two ends,
    # the embedding on the first stage and the head on the last; then the loss and the norm. (Where
    # one stage has both ends, autograd has added them: named_parameters has the matrix once. All
    # ranks of a tp group have the same loss: count it once.)
    for name, parameter in model.named_parameters():
        sum_over(parameter.grad, grid.groups["replicas"])
        if name in ("embed.token.weight", "head.weight"):
            sum_over(parameter.grad, grid.groups["embedding"])
    if grid.tp_rank > 0:
        loss_sum = 0.0
    loss_sum = torch.tensor(loss_sum, dtype=torch.float64)
    sums = torch.stack([loss_sum, plain_norm_squared(model, grid)])
    loss_sum, squares = sum_over(sums, grid.groups["world"]).tolist()

    # Clip the global norm to 1, and AdamW: every rank updates the parameters that it has.
    factor = min(1.0, 1.0 / (squares ** 0.5 + 1e-6))
    for parameter in model.parameters():
        parameter.grad *= factor
    optimizer.step()
    return loss_sum / total


def train_plainly(dataset, steps: int, grid: Grid) -> None:
    """Train `nano` on this rank's part of a data.TokenDataset with train.py's defaults: its batch
    size, seed, optimizer, and learning rate, which rises for 50 steps. (Its decay comes later.)"""
    batch_size, seed, peak_lr, warmup_steps = 16, 1337, 4e-3, 50
    config = GPTConfig(vocab_size=dataset.meta["vocab_size"])
    model = GPT(config).initialize(seed)        # all of it; train.py makes a rank's part alone
    plain_tensor_parallel(model, grid)
    keep_stage(model, grid, stage_layers(config.n_layer, grid.pp, grid.stage))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]           # biases, LayerNorm
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1),
                                   dict(params=vectors, weight_decay=0.0)], betas=(0.9, 0.95))
    for step in range(1, steps + 1):
        window_ids = dataset.window_ids(seed, (step - 1) * batch_size, batch_size)
        tokens = torch.from_numpy(dataset.tokens_of(window_ids))        # (B, T + 1)
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, step / warmup_steps)
        loss = plain_3d_step(model, optimizer, tokens, grid)
        if grid.rank == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)


def main() -> None:
    from data import DEFAULT_OUT, TokenDataset

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def fail(message) -> None:          # one line from one rank
        if rank > 0:
            time.sleep(5)       # torchrun ends all ranks when one exits: rank 0 prints first
        else:
            print(f"parallel.py: {message}", file=sys.stderr, flush=True)
        sys.exit(2)

    parser = argparse.ArgumentParser("parallel.py", description="3D parallelism in plain forms.")
    parser.error = fail
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    tp, pp = args.tp, args.pp
    config = GPTConfig()
    if world > 1 and "MASTER_ADDR" not in os.environ:
        fail(f"WORLD_SIZE is {world}, but the other variables of torchrun are not set: start by "
             f"torchrun --nproc_per_node={world} parallel.py, or unset it")
    if tp < 1 or pp < 1 or world % (tp * pp) or 16 % (world // (tp * pp)):
        tp, pp = max(1, tp), max(1, pp)
        fail(f"--tp {args.tp} --pp {args.pp} need tp x pp processes, or times a dp that divides "
             f"the batch of 16, not {world}: start them by torchrun --nproc_per_node={tp * pp} "
             f"parallel.py --tp {tp} --pp {pp}")
    if config.n_head % tp or pp > config.n_layer:
        fail(f"the model has {config.n_head} heads for --tp {tp}, {config.n_layer} layers for "
             f"--pp {pp}")
    try:
        dataset = TokenDataset(DEFAULT_OUT, "train", config.seq_len)
    except (ValueError, OSError) as error:
        fail(error)
    if world > 1:
        dist.init_process_group("gloo")
    train_plainly(dataset, args.steps, make_grid(world, tp, pp, rank))
    if world > 1:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------
# 7. As train.py runs it
# ---------------------------------------------------------------------------------------------


def build_stage(model_config: GPTConfig, grid: Grid) -> GPT:
    """This rank's part of the GPT, on the meta device, without memory: its stage's blocks with the
    modules of parallelism/tensor.py, whose parameters are still whole: the caller replaces them by
    what this rank has of them (`param_specs`)."""
    with torch.device("meta"):
        model = model_config.build()
    use_kernels(model)
    keep_stage(model, grid, set().union(*chunk_layers(model_config.n_layer, grid)))
    plan = dict(TP_PLAN)
    if grid.exact is not None:
        plan |= EXACT_PLAN
    if grid.cp > 1:
        plan |= CP_PLAN
    for name, module in list(model.named_modules()):
        name_in_plan = re.sub(r"^blocks\.\d+\.", "", name)             # of any block
        if name_in_plan in plan:
            model.set_submodule(name, plan[name_in_plan](module, grid))
    for block in model.blocks.values():     # different heads need different dropout masks
        block.attn.core_attention.heads = grid.tp_rank
    return model


def build_rank(model_config: GPTConfig, grid: Grid, config, dtypes: tuple,
               device: torch.device) -> tuple[GPT, FlatParameters]:
    """This rank's part of the model, and the flat buffers that hold its parameters. `config` has
    train.py's flags, `dtypes` are those of parameters and of masters. Each step needs the one
    before:

    1. Pipeline and tensor parallelism decide which parameters this rank has, and their shapes.
    2. Data parallelism and ZeRO move these parameters into flat buffers.
    3. With context parallelism backward computes attention again, unless 5 does.
    4. A block is compiled without anything of 5 and 6, which must run as written.
    5. Recomputation runs the compiled block again in backward.
    6. ZeRO gathers a block's parameters before its forward, or its recomputation, begins.
    """
    host = "cpu" if config.offload else device
    if config.exact:
        grid.exact = new_sums(model_config, config, device)
    model = build_stage(model_config, grid)
    if config.exact:
        make_exact(model, model_config, grid)
    flat_type = ExactParameters if config.exact else FlatParameters
    flat = flat_type(param_specs(model, model_config, grid), grid, *dtypes, device, config.zero,
                     host, training=not config.eval_only)
    if grid.cp > 1 and not config.recompute:
        recompute_attention(model)
    if config.compile:
        compile_model(model)
    if config.recompute:
        recompute_blocks(model)
    if config.zero > 0:
        gather_before_use(model, flat)
    return model, flat


if __name__ == "__main__":
    main()
