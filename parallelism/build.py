"""What `Run.__init__` in train.py needs to put a rank together besides parallel.py: groups on GPUs,
which connect before the first step; --recompute, which keeps 1 of about 16 activations; --compile.

`build_stage` is the composition of `Run.__init__` for the place of any rank, for tools/plan.
"""
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import parallel
from amp import PRECISIONS
from model import GPT, Dropout, GPTConfig
from models.moe import Mixture
from parallel import (ContextParallelAttention, Grid, Message, TensorParallel, all_reduce,
                      all_to_all, keep_stage, start_messages, tensor_parallel)
from parallelism.all_heads_norm import cut_heads
from parallelism.context import context_parallel
from parallelism.experts import ParallelExperts, ParallelRouter, expert_parallel
from parallelism.kernels import use_kernels
from parallelism.loss import TiledHead, add_in_place
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters

# ---------------------------------------------------------------------------------------------
# The process groups
# ---------------------------------------------------------------------------------------------


def make_groups(grid: Grid, device=torch.device("cpu"), timeout: timedelta | None = None) -> None:
    """parallel.make_groups, on gloo or NCCL, and a group of all ranks to save. On GPUs all
    connections are made before the first step."""
    if device.type == "cpu":
        parallel.make_groups(grid, "gloo", timeout)
    else:
        # NCCL's clock starts with the operation; that of collectives.to_host, which should report
        # first, starts later, when the host reads the result.
        parallel.make_groups(grid, "nccl", None if timeout is None else 2 * timeout)
        connect(grid, device)
    # For checkpoints, which a thread sends while training goes on. After `connect`, because gloo
    # cannot sum GPU tensors.
    if grid.world > 1:
        grid.groups["save"] = dist.new_group(timeout=timeout, backend="gloo",
                                             group_desc="all ranks")


def connect(grid: Grid, device: torch.device) -> None:
    """NCCL connects two ranks at their first message, and connecting waits for all work queued on
    the device. If that work is a receive whose sender is itself waiting to connect, both hang (seen
    with GPipe on two H100s). So connect everything first (see also `processes.running`)."""
    x = torch.zeros(grid.tp, device=device)         # tp ranks send a part of a message each
    for group in grid.groups.values():
        all_reduce(x, group).wait()
    for group in (grid.groups["tp"], grid.groups["ep"]):        # shared_heads.py, experts.py
        ones = [1] * (1 if group is None else group.size())
        all_to_all(torch.zeros(len(ones), device=device), ones, ones, group).wait()
    messages = [Message(sending, (kind, 0, chunk), x) for sending in (True, False)
                for kind in "FB" for chunk in range(grid.chunks)]
    for work in start_messages(grid, messages):
        work.wait()
    torch.get_device_module(device).synchronize()


# ---------------------------------------------------------------------------------------------
# This rank's part of the model
# ---------------------------------------------------------------------------------------------


def build_stage(model_config: GPTConfig, grid: Grid) -> GPT:
    """The part of a model that the rank at this place has, by the calls of train.Run, without
    memory. Its parameters are still whole: `param_specs` cuts them."""
    with torch.device("meta"):
        model = model_config.build()
    tensor_parallel(model, grid)
    use_faster_modules(model, grid)
    context_parallel(model, grid)
    expert_parallel(model, grid)
    keep_stage(model, grid)
    return model


def use_faster_modules(model: GPT, grid: Grid) -> None:
    """Modules that compute what those of model.py and parallel.py do, faster; and the heads of
    Llamas that parallel.py cannot cut (all_heads_norm.py, shared_heads.py)."""
    use_kernels(model)
    add_in_place(model, grid)
    cut_heads(model, grid)


def data_parallel(model: GPT, grid: Grid, config, device: torch.device,
                  flat_type=FlatParameters) -> FlatParameters:
    """The flat buffers, which hold the parameters of the model from here on, with ZeRO this rank's
    shard."""
    host = "cpu" if config.offload else device
    return flat_type(param_specs(model, model.cfg, grid), grid, *PRECISIONS[config.dtype],
                     device, config.zero, host, training=not config.eval_only)


def recompute_blocks(model: GPT) -> None:
    """Backward recomputes a block from its input: 1 stored value per position and channel
    instead of about 16, for a third more FLOPs (by blocks as in Chen et al. 2016)."""
    for block in model.blocks.values():
        # Dropout masks depend on seeds only, so there is no generator state to restore.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                preserve_rng_state=False)


def set_loss_factors(model: GPT, flat: FlatParameters, loss_scale: float, tokens: int,
                     targets: int) -> None:
    """Before a step on so many `tokens` of all ranks, of which `targets` count in the loss: by what
    the head's loss, a sum over the targets, and those of the routers, sums over the tokens, are
    multiplied before backward. The head computes its gradients in forward, so backward of loss *
    loss_scale / targets does not apply it again. Also zero head.norms and the routers' loads."""
    flat.set_loss_scale(loss_scale, tokens, targets)
    for module in model.modules():
        if isinstance(module, TiledHead):
            module.set_loss_factor(loss_scale / targets)
        elif isinstance(module, ParallelRouter):
            module.set_token_factor(loss_scale / tokens)


# ---------------------------------------------------------------------------------------------
# --compile: what torch.compile may turn into fewer kernels
#
# Communication, experts and dropout stay eager: they break a block's graph, or the compiler would
# take a mask's seed, or the number of an expert's tokens, for a constant. The rest of a block is
# one graph without them, compiled once for all blocks.
# ---------------------------------------------------------------------------------------------


def runs_eagerly(module: nn.Module) -> bool:
    if isinstance(module, TensorParallel):      # it communicates if it cuts a parameter
        return module.grid.tp > 1 and len(module.partition_dim) > 0
    # The sizes of products of experts depend on the data.
    if isinstance(module, ContextParallelAttention | ParallelRouter | ParallelExperts):
        return True
    return isinstance(module, Dropout) and module.p > 0


def compile_method(module: nn.Module, name: str) -> None:
    """Compile a method of a module, except for the submodules in it that run eagerly."""
    eager = [part for part in module.modules() if part is not module and runs_eagerly(part)]
    for part in eager:
        part.forward = torch.compiler.disable(part.forward)
    setattr(module, name, torch.compile(getattr(module, name), fullgraph=not eager))


def keep_angles(model: GPT, T: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compute cos and sin of this rank's T positions, (T, n / 2) each, once for all blocks. The
    compiler would compute them again for every channel of q and k."""
    rotaries = [block.attn.rotary for block in model.blocks.values()
                if hasattr(block.attn, "rotary")]
    if rotaries:
        known = rotaries[0].cos_and_sin(T, dtype, device)
        for rotary in rotaries:
            rotary.cos_and_sin = lambda *_: known


def compile_model(model: GPT, grid: Grid, dtype: torch.dtype, device: torch.device) -> None:
    """Compile each block's forward; of embedding and head everything but the lookup and the
    products with the token matrix."""
    keep_angles(model, model.cfg.seq_len // grid.cp, dtype, device)
    if model.embed is not None:
        compile_method(model.embed, "add_positions")
    if model.head is not None:
        head = model.head
        compile_method(head, "normalize")
        # A run makes at most four graphs of each: with and without gradients, and a last tile.
        head.tile_sums = torch.compile(head.tile_sums, fullgraph=True, dynamic=False)
        head.tile_loss = torch.compile(head.tile_loss, fullgraph=True, dynamic=False)
        head.is_compiled = True
    for block in model.blocks.values():
        compile_method(block, "forward")
        if isinstance(block.mlp, Mixture):
            # Parts of it, after the above has told the compiler to leave it alone. How many rows
            # arrive is another number each time: it is no constant.
            experts = block.mlp.experts
            experts.activate = torch.compile(experts.activate, fullgraph=True, dynamic=True)
            experts.weighted_sum = torch.compile(experts.weighted_sum, fullgraph=True)
