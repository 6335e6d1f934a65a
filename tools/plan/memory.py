"""What a rank of a planned run holds: its place in the run, and its memory, by kind.

All blocks are alike, so one block and a count stand for them, and no tensor is made. Buffers,
logits and activations are estimates, but not what ZeRO's formula counts (parallel.py, section 4).
"""
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from base.flops import mlp_channels
from model import GPTConfig
from parallel import Bucket, Grid, chunk_layers, make_buckets
from parallelism.build import build_stage
from parallelism.loss import tile_size
from parallelism.parameters import ParamSpec, param_specs
from tools.plan.flags import PlanConfig


@dataclass(frozen=True)
class Stage:
    """A rank of a stage. Numbers are those of one microbatch."""
    cfg: GPTConfig
    config: PlanConfig
    grid: Grid

    @cached_property
    def layers(self) -> int:
        return sum(map(len, chunk_layers(self.cfg.n_layer, self.grid)))

    @cached_property
    def microbatches(self) -> int:
        """Of a step, on each replica."""
        return self.config.batch_size // (self.grid.dp * self.config.micro_batch)

    @cached_property
    def positions(self) -> int:
        """That this rank computes, of all sequences."""
        return self.config.micro_batch * self.cfg.seq_len // self.grid.cp

    @cached_property
    def x(self) -> int:
        """How many numbers pass from block to block, (B, T / cp, C)."""
        return self.positions * self.cfg.n_embd

    @cached_property
    def own_x(self) -> int:
        """How many of them this rank keeps."""
        return self.x // self.grid.tp if self.grid.sequence_parallel else self.x

    @cached_property
    def sharing(self) -> int:
        """The tensor-parallel ranks that share a head of k and v (parallelism/shared_heads.py)."""
        return max(1, self.grid.tp // self.cfg.n_kv_head)

    @cached_property
    def keys_and_values(self) -> int:
        """How many numbers a block's K and V of all positions have, (B, T, K D / tp), or
        (B, T, D)."""
        cfg, grid = self.cfg, self.grid
        channels = cfg.n_kv_head * self.sharing * cfg.head_dim // grid.tp
        return 2 * self.positions * grid.cp * channels

    @cached_property
    def buckets(self) -> list[tuple[Bucket, int]]:
        """This rank's, as [(bucket, how many like it)]."""
        grid = self.grid
        specs = stage_specs(self.cfg, grid.tp, grid.ep, grid.is_first, grid.is_last)
        num_shards, shard_rank = (grid.replicas, grid.replica) if self.config.zero > 0 else (1, 0)
        return [(bucket, self.layers if bucket.name[0].isdigit() else 1)
                for bucket in make_buckets(specs, grid.replicas, num_shards, shard_rank)]

    @cached_property
    def numel(self) -> int:
        """Numbers in these buckets."""
        return sum(bucket.numel * count for bucket, count in self.buckets)


@lru_cache
def stage_specs(model_config: GPTConfig, tp: int, ep: int, is_first: bool,
                is_last: bool) -> list[ParamSpec]:
    """The parameters of such a stage if it has one block."""
    pp = 1 + (not is_first) + (not is_last)         # a stage before it, and one behind it
    rank = 0 if is_first else ep * tp               # the first of stage 1
    grid = Grid(ep, pp, tp, rank, ep=ep)
    model_config = replace(model_config, n_layer=pp)
    return param_specs(build_stage(model_config, grid), model_config, grid)


def kinds_of_stages(cfg: GPTConfig, config: PlanConfig) -> tuple[list[Stage], list[int]]:
    """(the first stage of each kind, at its first rank; which kind each stage is)"""
    dp = config.world // (config.pp * config.cp * config.tp)
    stages = [Stage(cfg, config, Grid(
        dp, config.pp, config.tp, stage * config.world // config.pp, cp=config.cp, ep=config.ep,
        chunks=config.pp_chunks, sequence_parallel=config.sequence_parallel))
        for stage in range(config.pp)]
    kind_of = [(stage.layers, stage.grid.is_first, stage.grid.is_last) for stage in stages]
    kinds = list(dict.fromkeys(kind_of))
    first = [stages[kind_of.index(kind)] for kind in kinds]
    return first, [kinds.index(kind) for kind in kind_of]


def memory_bytes(stage: Stage, on_gpu: bool = True) -> dict:
    """Peak memory of this rank in bytes, by kind; what --offload keeps on the host has the prefix
    host_."""
    return state_bytes(stage, on_gpu) | dict(
        buffers=buffer_bytes(stage, on_gpu), logits=logits_bytes(stage, on_gpu),
        activations=activation_bytes(stage))


def gpu_bytes(sizes: dict) -> int:
    """The part of `memory_bytes` that is not on the host."""
    return sum(size for kind, size in sizes.items() if not kind.startswith("host_"))


def state_bytes(stage: Stage, on_gpu: bool = True) -> dict:
    """Bytes of this rank's parameters and optimizer state, as the table in parallel.py says."""
    config = stage.config
    offload = config.offload and on_gpu
    place = "host_" if offload else ""
    sizes = dict.fromkeys(("parameters", "gradients", f"{place}masters", f"{place}moments"), 0)
    longest = 0
    for bucket, count in stage.buckets:
        shard = bucket.numel // bucket.num_ranks
        size = config.master_size if bucket.is_wide else config.size
        updated = shard if config.zero >= 1 else bucket.numel
        sizes["parameters"] += count * size * (shard if config.zero >= 3 else bucket.numel)
        sizes["gradients"] += count * config.master_size * (
            shard if config.zero >= 2 else bucket.numel)
        sizes[f"{place}moments"] += 2 * count * config.master_size * updated
        if offload or size != config.master_size:       # masters apart from the parameters
            sizes[f"{place}masters"] += count * config.master_size * updated
        longest = max(longest, updated)
    if offload:
        sizes["host_staging"] = 2 * config.master_size * longest
    return sizes


def buffer_bytes(stage: Stage, on_gpu: bool) -> int:
    """What comes and goes within a step:

        ZeRO 2, 3   whole gradients, and with ZeRO 3 gathered parameters (bucket_bytes)
        ZeRO 1 - 3  on the CPU, slices of one bucket that arrive from the other replicas
        pipeline    a message that comes, another that leaves
        context     of one block the K and V of all positions, their gradients, and these in slices;
                    by then backward has freed what its MLP kept
    """
    config, grid = stage.config, stage.grid
    total = bucket_bytes(stage)
    if config.zero >= 1 and not on_gpu:
        longest = max(bucket.numel for bucket, _ in stage.buckets)
        total += config.master_size * longest * (grid.replicas - 1) // grid.replicas
    if grid.pp > 1:
        total += 2 * stage.own_x * config.size
    if grid.cp > 1:
        total += max(0, 3 * stage.keys_and_values - kept_by_mlp(stage)) * config.size
    return total


def bucket_bytes(stage: Stage) -> int:
    """The most bytes of whole gradients (ZeRO 2 and 3) and gathered parameters (ZeRO 3) at a time.
    Backward computes the gradients of one bucket while those of the one before it are on their way.
    Those of a tied matrix stay from the head's forward to the embedding's backward; where the ends
    are on two stages, it is two matrices."""
    config = stage.config
    if config.zero < 2:
        return 0
    numel = {bucket.name.split(".")[-1]: bucket.numel for bucket, _ in stage.buckets}
    tied, embed, ends, head = (numel.get(name, 0) for name in ("tied", "embed", "ends", "head"))
    if stage.grid.pp > 1:
        head += tied
        tied = 0
    mlp = sum(numel.get(name, 0) for name in ("mlp", "router", "experts"))
    block = numel["attn"] + mlp
    two_blocks = min(2, stage.layers) * block
    sent = tied + embed if stage.microbatches > 1 else 0    # of the last microbatch, on their way
    moments = [                                             # (parameters, gradients)
        (tied + embed + ends + block, sent),                                    # the embedding
        (tied + ends + two_blocks, sent),                                       # blocks, forward
        (tied + head + ends + block, tied + head),                              # the head
        (ends + two_blocks, tied + ends + mlp + max(embed, head, numel["attn"]))]
    if config.zero == 2:
        moments = [(0, gradients) for _, gradients in moments]
    return max(config.size * parameters + config.master_size * gradients
               for parameters, gradients in moments)


def logits_bytes(stage: Stage, on_gpu: bool = True) -> int:
    """The logits that loss.TiledCrossEntropy holds at once, on the last stage: a tile in the
    type of the activations, and in 16 bits a second one in fp32, but not with --compile."""
    if not stage.grid.is_last:
        return 0
    size, without_p = stage.config.size, False
    if size == 2:
        without_p = stage.config.compile
        size = 2 if without_p else 2 + 4
    vocab = stage.cfg.padded_vocab // stage.grid.tp
    device_type = "gpu" if on_gpu else "cpu"
    return tile_size(stage.positions, vocab, device_type, without_p) * vocab * size


def kept_by_mlp(stage: Stage) -> int:
    """How many numbers a block keeps of the norm before its MLP, and of the MLP: the F channels
    before and after the activation, which are one tensor with ReLU; if it is gated, gate and value,
    the activated gate, and what `down` takes. A mixture also keeps, for each expert of a position,
    what the expert takes and what it gives. With --ep it keeps both three times: sent, received and
    sorted. The counts are those of experts that are used alike. The router takes what the norm
    gives in the type of the masters. In 16 bits it keeps this copy, and a shared expert its input.
    """
    cfg, grid = stage.cfg, stage.grid
    if hasattr(cfg, "n_expert"):
        copies = 2 if grid.ep == 1 else 6
        rows = copies * cfg.n_active * cfg.n_embd
        of_x = 2 if stage.config.size > 2 else 3 + (cfg.shared_hidden > 0)
        return of_x * stage.own_x + stage.positions * (rows + 4 * mlp_channels(cfg) // grid.tp)
    wide = 2 * cfg.hidden
    if cfg.gated:
        wide = 4 * cfg.hidden
    elif cfg.activation == "relu":
        wide = cfg.hidden
    return 2 * stage.own_x + wide * stage.positions // stage.grid.tp


def kept_by_attention(stage: Stage) -> int:
    """How many numbers a block keeps of q, k, v and attention's output. (Of q and k that are
    rotated or normed it keeps those that attention takes: to rotate back needs the angles alone.)
    """
    cfg = stage.cfg
    channels = (2 * cfg.n_head + 2 * cfg.n_kv_head * stage.sharing) * cfg.head_dim
    return channels * stage.positions // stage.grid.tp


def activation_bytes(stage: Stage) -> int:
    """The most that this rank keeps between forward and backward, in units of B T C / cp numbers
    (Korthikanti et al. 2022, section 4, for what we save; without dropout):

        block    inputs and outputs of 2 norms     / tp with sequence parallelism
                 q, k, v, attention's output and the MLP's F (before and after GELU)     / tp
        stage    what it sends on; or the head's input and its gradient, computed in forward

    Of chunks (interleaved 1F1B) each is such a stage, with its part of the blocks."""
    config, grid = stage.config, stage.grid
    thin = config.size * stage.own_x
    block = config.size * (kept_by_mlp(stage) + kept_by_attention(stage)) + 2 * thin
    end = 2 * thin if grid.is_last else thin
    live = live_microbatches(stage)
    if config.recompute:        # a block's input; and once, in backward, all of a block
        return live * (stage.layers * thin // grid.chunks + end) + block
    return live * (stage.layers * block // grid.chunks + end)


def live_microbatches(stage: Stage) -> int:
    """The most microbatches, in all chunks, whose activations a stage keeps at a time
    (tests/test_pipeline.py counts them in the schedules)."""
    grid, m = stage.grid, stage.microbatches
    if grid.pp == 1:
        return 1
    live = {"gpipe": m, "1f1b": grid.pp - grid.stage,
            "interleaved": (grid.chunks + 1) * grid.pp - 1 - 2 * grid.stage}
    return min(grid.chunks * m, live[stage.config.pp_schedule])
