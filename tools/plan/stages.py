"""A stage of a planned pipeline: its place in the run, and what of the model it holds. All blocks
are alike, so one block and a count stand for them, and no tensor is made.
"""
from dataclasses import dataclass
from functools import cached_property, lru_cache

from model import GPTConfig
from parallelism.buckets import Bucket
from parallelism.build import Grid, rank_buckets, rank_parameters
from parallelism.pipeline import chunk_layers
from tools.plan.flags import PlanConfig


def layers_of(n_layer: int, grid: Grid) -> int:
    """How many of the model's layers a rank has."""
    return sum(map(len, chunk_layers(n_layer, grid)))


@dataclass(frozen=True)
class Stage:
    """A rank of a stage. Numbers are those of one microbatch."""
    cfg: GPTConfig
    config: PlanConfig
    grid: Grid

    @cached_property
    def layers(self) -> int:
        return layers_of(self.cfg.n_layer, self.grid)

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
    def keys_and_values(self) -> int:
        """How many numbers a block's K and V of all positions have, (B, T, K D / tp)."""
        cfg, grid = self.cfg, self.grid
        return 2 * self.positions * grid.cp * cfg.n_kv_head * cfg.head_dim // grid.tp

    @cached_property
    def buckets(self) -> list[tuple[Bucket, int]]:
        return buckets_of(self.cfg, self.grid, self.config.zero)

    @cached_property
    def numel(self) -> int:
        """Numbers in these buckets."""
        numel, _ = rank_parameters(self.buckets)
        return numel

    @cached_property
    def longest(self) -> int:
        """Numbers in the longest of them."""
        _, longest = rank_parameters(self.buckets)
        return longest


# A search asks for the same with each microbatch, schedule and kind of recomputation.
buckets_of = lru_cache(maxsize=1024)(rank_buckets)


@lru_cache
def kinds_of_grids(n_layer: int, world: int, pp: int, cp: int, tp: int, ep: int, chunks: int,
                   sequence_parallel: bool) -> tuple[list[Grid], list[int]]:
    """(the first stage of each kind, at its first rank; which kind each stage is)"""
    dp, ranks_of_stage = world // (pp * cp * tp), world // pp
    grids = [Grid(dp, pp, tp, stage * ranks_of_stage, cp=cp, ep=ep, chunks=chunks,
                  sequence_parallel=sequence_parallel) for stage in range(pp)]
    kind_of = [(layers_of(n_layer, grid), grid.is_first, grid.is_last) for grid in grids]
    kinds = list(dict.fromkeys(kind_of))
    return [grids[kind_of.index(kind)] for kind in kinds], [kinds.index(kind) for kind in kind_of]


def kinds_of_stages(cfg: GPTConfig, config: PlanConfig) -> tuple[list[Stage], list[int]]:
    """`kinds_of_grids` of this layout, as stages."""
    grids, kinds = kinds_of_grids(cfg.n_layer, config.world, config.pp, config.cp, config.tp,
                                  config.ep, config.pp_chunks, config.sequence_parallel)
    return [Stage(cfg, config, grid) for grid in grids], kinds
