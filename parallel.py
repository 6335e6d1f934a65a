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
"""
import re
import socket
from datetime import timedelta
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, GPTConfig
from parallelism.collectives import all_gather_object, on_hosts
from parallelism.compiling import compile_model
from parallelism.pipeline import chunk_layers, connect, recompute_blocks
from parallelism.tensor import TIED, TP_PLAN, ParamSpec
from parallelism.zero import FlatParameters, gather_before_use

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


# TP2: sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Between g and the next f all
# ranks hold the same activations; instead, let each hold T / tp positions. Then f is an all-gather
# forward and a reduce-scatter backward, and g is a reduce-scatter forward and an all-gather
# backward. Backward also gathers x again (_ColumnParallel), so a block sends 5 / 4 of the bytes.
# LayerNorm, the bias after g and the position embedding see T / tp positions, so each rank has a
# part of their gradients: `finish_grad_sync` adds the parts up.


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


def build_rank(model_config: GPTConfig, grid: Grid, config, dtypes: tuple,
               device: torch.device) -> tuple[GPT, FlatParameters]:
    """This rank's part of the model, and the flat buffers that hold its parameters. `config` has
    train.py's flags, `dtypes` are those of parameters and of masters. Each step needs the one
    before:

    1. Pipeline and tensor parallelism decide which parameters this rank has, and their shapes.
    2. Data parallelism and ZeRO move these parameters into flat buffers.
    3. A block is compiled without anything of 4 and 5, which must run as written.
    4. Recomputation runs the compiled block again in backward.
    5. ZeRO gathers a block's parameters before its forward, or its recomputation, begins.
    """
    host = "cpu" if config.offload else device
    model = build_stage(model_config, grid)
    flat = FlatParameters(param_specs(model, model_config, grid), grid, *dtypes, device,
                          config.zero, host, training=not config.eval_only)
    if config.compile:
        compile_model(model)
    if config.recompute:
        recompute_blocks(model)
    if config.zero > 0:
        gather_before_use(model, flat)
    return model, flat
