"""Which rank gives a checkpoint which numbers.

A parameter is cut twice:

    full tensor                    in the checkpoint, under its global name
    part 0        | part 1         tensor parallelism: one part for each tp rank; of experts, also
                                   for each ep rank (ParamSpec.cut)
    piece | piece | piece | piece  ZeRO: a part is flattened, then cut where the shards of its
                                   bucket end

Each number of the model has one owner (parallel.is_owner). A file has the pieces joined again. For
a folder each rank cuts its own into chunks of the full tensor (base/checkpoint_folder.py).
"""
from collections.abc import Iterator
from typing import NamedTuple

from model import GPTConfig
from parallel import Bucket, Grid, is_owner, make_buckets
from parallelism.build import build_stage
from parallelism.parameters import ParamSpec, param_specs


class Piece(NamedTuple):
    """What the file takes from one rank of one tensor: part.flatten()[numbers]."""
    rank: int
    part: int
    numbers: slice


class Scattered(NamedTuple):
    """A full tensor as the ranks hold it."""
    spec: ParamSpec
    pieces: list[Piece]


def owned_slices(buckets: list[Bucket], grid: Grid, num_shards: int) -> Iterator[tuple]:
    """Which numbers a checkpoint takes from the rank of `grid`: (bucket, spec, slice of the
    bucket's shard, slice of the flattened part). They are the same of a parameter and of its
    moments."""
    for bucket in buckets:
        for spec, shard_slice, param_slice in bucket.shard_ranges:
            if is_owner(spec, grid, num_shards):
                yield bucket, spec, shard_slice, param_slice


def owners(model_config: GPTConfig, grid: Grid, num_shards: int) -> Iterator[tuple]:
    """Yields the place and the buckets of each rank that owns numbers, stage by stage."""
    for stage in range(grid.pp):
        ranks = grid.ranks[stage].flatten(0, 1)                         # (replica, tp rank)
        place = grid.at_rank(int(ranks[0, 0]))
        specs = param_specs(build_stage(model_config, place), model_config, place)
        for replica in range(max(num_shards, grid.ep)):
            shard = replica if num_shards > 1 else 0
            buckets = make_buckets(specs, grid.replicas, num_shards, shard)
            for rank in ranks[replica].tolist():
                yield grid.at_rank(rank), buckets


def file_order(model_config: GPTConfig, grid: Grid, num_shards: int) -> list[Scattered]:
    """All parameters of the model, in the order of the file. This is a function of the model and
    the layout: rank 0 need not ask the other ranks what they hold."""
    order = {}
    for place, buckets in owners(model_config, grid, num_shards):
        for bucket in buckets:
            for spec in bucket.specs:
                if spec.name not in order and not spec.is_tied_copy:
                    order[spec.name] = Scattered(spec, [])
        for _, spec, _, param_slice in owned_slices(buckets, place, num_shards):
            piece = Piece(place.rank, spec.part_of(place), param_slice)
            order[spec.name].pieces.append(piece)
    return list(order.values())
