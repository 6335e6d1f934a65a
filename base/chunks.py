"""What a rank holds of a parameter, as chunks of the full tensor. checkpoint_folder.py and
runtime/folder_writer.py call it.

A chunk is a box of a full tensor (a rectangle, if it is a matrix), at the global `offsets`. A rank
holds a range of the flattened part of a parameter (pieces.owned_slices), which is no box. So it
is cut into few: the end of a row, whole rows, the beginning of a row.
"""
import math
from collections.abc import Iterator

import torch

from parallelism.parameters import ParamSpec


def boxes(shape, low: int, high: int) -> Iterator[tuple]:
    """Cut the numbers low to high - 1 of a flattened tensor into boxes, in their order. Yields
    (offsets, sizes). Of a matrix there are at most three."""
    row = math.prod(shape[1:])                      # of a vector: 1
    while low < high:
        number, column = divmod(low, row)
        if column == 0 and high - low >= row:       # whole rows
            count = (high - low) // row
            yield (number, *[0] * (len(shape) - 1)), (count, *shape[1:])
            low += count * row
        else:
            end = min(high, (number + 1) * row)
            for offsets, sizes in boxes(shape[1:], column, end - number * row):
                yield (number, *offsets), (1, *sizes)
            low = end


def place(spec: ParamSpec, grid, offsets: tuple, box: torch.Tensor) -> Iterator[tuple]:
    """A box of this rank's part of a parameter, as chunks of the full tensor: one for each stacked
    matrix that it reaches into, without the padding. Yields (offsets, view of `box`). It is the
    inverse of ParamSpec.cut."""
    expert = grid.ep_rank % spec.ep * (spec.shape[0] // spec.ep)
    offsets = (offsets[0] + expert, *offsets[1:])
    dim = spec.partition_dim
    if dim is None:
        yield offsets, box
        return
    begin = offsets[dim]
    start = 0                                       # of a piece in this rank's part
    for first, size, width in spec.pieces(grid.tp_rank):
        low = max(begin, start)
        high = min(begin + box.shape[dim], start + size)
        if low < high:
            yield ((*offsets[:dim], first + low - start, *offsets[dim + 1:]),
                   box.narrow(dim, low - begin, high - low))
        start += width


def chunks(spec: ParamSpec, grid, numbers: torch.Tensor, where: slice) -> Iterator[tuple]:
    """The numbers part.flatten()[where] of this rank's part of a parameter, as chunks of the full
    tensor. Yields (offsets, view of `numbers`)."""
    begin = 0
    for offsets, sizes in boxes(spec.local_shape, where.start, where.stop):
        end = begin + math.prod(sizes)
        yield from place(spec, grid, offsets, numbers[begin:end].view(sizes))
        begin = end
