"""A stage of a planned pipeline: its place in the run, and what of the model it holds. All blocks
are alike, so one block and a count stand for them, and no tensor is made.
"""
from dataclasses import dataclass
from functools import cached_property

from model import GPTConfig
from parallelism.buckets import Bucket
from parallelism.build import Grid, rank_buckets, rank_parameters
from parallelism.pipeline import chunk_layers
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
    def keys_and_values(self) -> int:
        """How many numbers a block's K and V of all positions have, (B, T, K D / tp)."""
        cfg, grid = self.cfg, self.grid
        return 2 * self.positions * grid.cp * cfg.n_kv_head * cfg.head_dim // grid.tp

    @cached_property
    def buckets(self) -> list[tuple[Bucket, int]]:
        return rank_buckets(self.cfg, self.grid, self.config.zero)

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


def kinds_of_stages(cfg: GPTConfig, config: PlanConfig) -> tuple[list[Stage], list[int]]:
    """(the first stage of each kind, at its first rank; which kind each stage is)"""
    ranks_of_stage = config.world // config.pp
    dp = ranks_of_stage // (config.cp * config.tp)
    stages = [Stage(cfg, config, Grid(dp, config.pp, config.tp, stage * ranks_of_stage,
                                      cp=config.cp, ep=config.ep, chunks=config.pp_chunks,
                                      sequence_parallel=config.sequence_parallel))
              for stage in range(config.pp)]
    kind_of = [(stage.layers, stage.grid.is_first, stage.grid.is_last) for stage in stages]
    kinds = list(dict.fromkeys(kind_of))
    firsts = [stages[kind_of.index(kind)] for kind in kinds]
    return firsts, [kinds.index(kind) for kind in kind_of]
