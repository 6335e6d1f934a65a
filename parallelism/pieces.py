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
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from parallel import is_owner
from parallelism.collectives import comm_errors
from parallelism.parameters import ParamSpec


class Piece(NamedTuple):
    """What the file takes from one rank of one tensor: part.flatten()[numbers]."""
    rank: int
    part: int
    numbers: slice


class Scattered(NamedTuple):
    """A full tensor as the ranks hold it."""
    spec: ParamSpec
    pieces: list[Piece]


def owned_slices(flat) -> Iterator[tuple]:
    """Which numbers a checkpoint takes from this rank of a zero.FlatParameters: (bucket, spec,
    slice of the bucket's shard, slice of the flattened part). They are the same of a parameter and
    of its moments."""
    for bucket in flat.buckets:
        for spec, shard_slice, param_slice in bucket.shard_ranges:
            if is_owner(spec, flat.grid, flat.num_shards):
                yield bucket, spec, shard_slice, param_slice


def file_order(flat) -> list[Scattered] | None:
    """On rank 0 all parameters of the model, in the order of the file: stage by stage. Each rank of
    a zero.FlatParameters tells what it has, and of this which numbers it owns."""
    grid = flat.grid
    specs = [replace(spec, owners=[]) for bucket in flat.buckets for spec in bucket.specs
             if not spec.is_tied_copy and grid.replica == grid.tp_rank == 0]      # alike on others
    pieces = [(spec.name, Piece(grid.rank, spec.part_of(grid), numbers)) for _, spec, _, numbers
              in owned_slices(flat)]
    told = [(specs, pieces)] * grid.world
    if grid.world > 1:
        with comm_errors("exchange with all ranks"):
            dist.gather_object((specs, pieces), told if grid.rank == 0 else None)
    if grid.rank > 0:
        return None
    order = {}
    for specs, pieces in told:
        for spec in specs:
            order.setdefault(spec.name, Scattered(spec, []))
        for name, piece in pieces:
            order[name].pieces.append(piece)
    return list(order.values())
