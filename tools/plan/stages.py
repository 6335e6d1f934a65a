"""Stages: all blocks are alike, so one block and a count stand for them."""
from dataclasses import replace
from functools import lru_cache

from model import GPTConfig
from parallel import Grid, build_stage
from parallelism.pipeline import chunk_layers
from parallelism.tensor import ParamSpec, param_specs
from parallelism.zero import Bucket, make_buckets
from tools.plan.flags import PlanConfig


def layers_of(cfg: GPTConfig, grid: Grid) -> int:
    return sum(map(len, chunk_layers(cfg.n_layer, grid)))


def kinds_of_stages(cfg: GPTConfig, config: PlanConfig) -> tuple[list[Grid], list[int]]:
    """(the grid of the first rank of each kind of stage, which kind each stage is)"""
    in_stage = config.cp * config.tp
    dp = config.world // (config.pp * in_stage)
    stages = [Grid(dp, config.pp, config.tp, stage * in_stage, config.sequence_parallel,
                   config.pp_chunks, config.cp) for stage in range(config.pp)]
    kind_of = [(layers_of(cfg, grid), grid.is_first, grid.is_last) for grid in stages]
    kinds = list(dict.fromkeys(kind_of))
    firsts = [stages[kind_of.index(kind)] for kind in kinds]
    return firsts, [kinds.index(kind) for kind in kind_of]


@lru_cache
def stage_specs(cfg: GPTConfig, tp: int, is_first: bool, is_last: bool) -> list[ParamSpec]:
    """The parameters of such a stage if it has one block."""
    if is_first and is_last:
        grid = Grid(1, 1, tp)
    elif is_first:
        grid = Grid(1, 2, tp)
    elif is_last:
        grid = Grid(1, 2, tp, rank=tp)
    else:
        grid = Grid(1, 3, tp, rank=tp)
    cfg = replace(cfg, n_layer=grid.pp)
    return param_specs(build_stage(cfg, grid), cfg, grid)


def stage_buckets(cfg: GPTConfig, grid: Grid, zero: int) -> list[tuple[Bucket, int]]:
    """The buckets of this rank's FlatParameters, without tensors: [(bucket, how many like it)]. The
    last two are a block's attention and MLP."""
    specs = stage_specs(cfg, grid.tp, grid.is_first, grid.is_last)
    if zero > 0:
        buckets = make_buckets(specs, grid.replicas, grid.replicas, grid.replica)
    else:
        buckets = make_buckets(specs, grid.replicas)
    ends = [(bucket, 1) for bucket in buckets[:-2]]
    return ends + [(bucket, layers_of(cfg, grid)) for bucket in buckets[-2:]]


def numel_of(buckets: list[tuple[Bucket, int]]) -> int:
    return sum(bucket.numel * count for bucket, count in buckets)


def microbatches(config, grid: Grid) -> int:
    """Number of microbatches of a step on each replica."""
    return config.batch_size // (grid.dp * config.micro_batch)


def numbers_between_blocks(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """Of x (B, T / cp, C)."""
    return config.micro_batch * cfg.seq_len // grid.cp * cfg.n_embd


def keys_and_values(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """How many numbers a block's K and V (B, T, C / tp) have."""
    return 2 * config.micro_batch * cfg.seq_len * cfg.n_embd // grid.tp


def kept_by_mlp(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """How many numbers a block keeps of the LayerNorm before its MLP, and of the MLP."""
    unit = numbers_between_blocks(cfg, grid, config)
    thin = unit // grid.tp if grid.sequence_parallel else unit
    wide = 8 if cfg.activation == "gelu" else 4
    return 2 * thin + wide * unit // grid.tp
