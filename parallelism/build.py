"""How a rank of train.py is put together: its grid and process groups, and its part of the model.

`build_model` makes this rank's part of the model: pipeline and tensor parallelism decide which
parameters it has, and their shapes. `make_flat` moves these into flat buffers, for data parallelism
and ZeRO. Then `change_blocks` says how a block runs.
"""
import re
import socket
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

import parallel
from amp import PRECISIONS
from model import GPT, Dropout, GPTConfig
from models.moe import Mixture
from parallel import GROUPS, keep_stage
from parallelism.collectives import all_reduce, comm_errors, on_hosts
from parallelism.context import CP_PLAN, ContextParallelAttention, recompute_attention
from parallelism.exact import EXACT_PLAN, ExactParameters, make_exact, new_sums
from parallelism.exact_experts import EXACT_EXPERT_PLAN
from parallelism.experts import EXPERT_PLAN, ParallelExperts, ParallelRouter
from parallelism.kernels import use_kernels
from parallelism.parameters import param_specs
from parallelism.pipeline import Message, chunk_layers, recompute_blocks, start_messages
from parallelism.shared_heads import SharedHeadsQKV
from parallelism.tensor import TP_PLAN, TensorParallel, VocabParallelHead
from parallelism.zero import FlatParameters, gather_before_use

# ---------------------------------------------------------------------------------------------
# The grid of ranks and its process groups
# ---------------------------------------------------------------------------------------------


class Grid(parallel.Grid):
    """The plain grid, and what a run adds:

    chunks      parts of the model that this rank runs in turn (interleaved 1F1B)
    hosts       the machine of each rank, which `make_groups` asks for
    exact       exact_sums.ExactSums, with --exact
    """

    def __init__(self, dp: int, pp: int, tp: int, rank: int = 0, *, cp: int = 1, ep: int = 1,
                 chunks: int = 1, sequence_parallel: bool = False):
        super().__init__(dp, pp, tp, rank, cp=cp, ep=ep, sequence_parallel=sequence_parallel)
        self.chunks = chunks
        self.hosts = [socket.gethostname()] * self.world
        self.exact = None

    def at_rank(self, rank: int) -> "Grid":
        """The place of another rank in the same layout, without groups."""
        return Grid(self.dp, self.pp, self.tp, rank, cp=self.cp, ep=self.ep, chunks=self.chunks,
                    sequence_parallel=self.sequence_parallel)


def make_groups(grid: Grid, device=torch.device("cpu"), timeout: timedelta | None = None) -> None:
    """Create the groups of a grid, on gloo or NCCL: those of parallel.make_groups, with a timeout
    and a name for errors. An operation waits `timeout` for another rank (None: 30 minutes). On GPUs
    all connections are made before the first step."""
    if grid.world > 1:
        with comm_errors("exchange with all ranks"):
            dist.all_gather_object(grid.hosts, socket.gethostname())
    backend = "gloo"
    group_timeout = timeout
    if device.type != "cpu":
        backend = "nccl"
        if timeout is not None:
            # NCCL's clock starts with the operation; that of collectives.to_host, which should
            # report first, starts later, when the host reads the result.
            group_timeout = 2 * timeout
    for kind in GROUPS:
        ranks = grid.members(kind)
        is_used = grid.ep > 1 or kind != "same_experts"
        if is_used and grid.rank in ranks and len(set(ranks)) > 1:
            grid.groups[kind] = dist.new_group(
                ranks, timeout=group_timeout, backend=backend, use_local_synchronization=True,
                group_desc=f"ranks {ranks}{on_hosts(ranks, grid.hosts)}")
    if device.type != "cpu":
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
    messages = [Message(sending, (kind, 0, chunk), x) for sending in (True, False)
                for kind in "FB" for chunk in range(grid.chunks)]
    for work in start_messages(grid, messages):
        work.wait()
    torch.get_device_module(device).synchronize()


# ---------------------------------------------------------------------------------------------
# This rank's part of the model
# ---------------------------------------------------------------------------------------------


def build_stage(model_config: GPTConfig, grid: Grid) -> GPT:
    """This rank's part of the GPT, on the meta device, without memory: its stage's blocks with the
    modules of parallelism/tensor.py. Their parameters are still whole. `param_specs` cuts them."""
    with torch.device("meta"):
        model = model_config.build()
    use_kernels(model)
    keep_stage(model, grid, set().union(*chunk_layers(model_config.n_layer, grid)))
    plan = TP_PLAN | EXPERT_PLAN
    if grid.exact is not None:
        plan |= EXACT_PLAN | EXACT_EXPERT_PLAN
    if grid.cp > 1:
        plan |= CP_PLAN
    sharing = grid.tp // model_config.n_kv_head         # ranks that share a head of k and v
    if sharing > 1:
        plan["attn.qkv"] = partial(SharedHeadsQKV, model_config=model_config)
    for name, module in list(model.named_modules()):
        name_in_plan = re.sub(r"^blocks\.\d+\.", "", name)             # of any block
        if name_in_plan in plan:
            model.set_submodule(name, plan[name_in_plan](module, grid))
    for block in model.blocks.values():     # different heads need different dropout masks
        block.attn.core_attention.part = grid.tp_rank
        if sharing > 1:
            block.attn.group //= sharing
    if grid.exact is not None:
        make_exact(model, model_config, grid)
    return model


def build_model(model_config: GPTConfig, grid: Grid, config, device: torch.device) -> GPT:
    """This rank's part of the model, without memory. `config` has train.py's flags."""
    if config.exact:
        grid.exact = new_sums(model_config, config, device)
    return build_stage(model_config, grid)


def make_flat(model: GPT, model_config: GPTConfig, grid: Grid, config,
              device: torch.device) -> FlatParameters:
    """The flat buffers, which hold the parameters of the model from here on."""
    host = "cpu" if config.offload else device
    flat_type = ExactParameters if config.exact else FlatParameters
    return flat_type(param_specs(model, model_config, grid), grid, *PRECISIONS[config.dtype],
                     device, config.zero, host, training=not config.eval_only)


def change_blocks(model: GPT, flat: FlatParameters, model_config: GPTConfig, config,
                  device: torch.device) -> None:
    """Change how forward and backward of a block run. The order matters: each of these runs what
    those above it have made, and the compiler sees none of those below."""
    if config.cp > 1 and not config.recompute:
        recompute_attention(model)              # in backward
    if config.compile:
        keep_angles(model, model_config.seq_len // config.cp, PRECISIONS[config.dtype].parameters,
                    device)
        compile_model(model)
    if config.recompute:
        recompute_blocks(model)                 # in backward
    if config.zero > 0:
        gather_before_use(model, flat)          # before its forward, or the recomputation, begins


def begin_step(model: GPT, flat: FlatParameters, loss_scale: float, tokens: int,
               targets: int) -> None:
    """Begin a step on so many `tokens` of all ranks, of which `targets` count in the loss. Zero the
    gradients, head.norms and the routers' loads. The head's loss is a mean over the targets, that
    of a router a mean over the tokens: both need their factor in forward, where the head computes
    its gradients. Backward of the loss times the same factor does not apply it again."""
    flat.zero_grad(loss_scale, tokens, targets)
    for module in model.modules():
        if isinstance(module, VocabParallelHead):
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


def compile_model(model: GPT) -> None:
    """Compile each block's forward; of embedding and head everything but the lookup and the
    products with the token matrix."""
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
