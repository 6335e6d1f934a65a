"""A checkpoint as a folder, for models that are too large for one file: every rank writes its own
numbers, and reads those that it needs. The folder is in the format of torch.distributed.checkpoint
(DCP), with a file of our own beside it.

    out/step_00000200/
        __0_0.distcp, __1_0.distcp ...  one file a rank: its chunks, each saved by torch.save
        .metadata                       DCP's table: which chunk of which tensor is where
        facts.pt                        the entries of a checkpoint file except the tensors, and
                                        the CRC of each other file

A chunk is a box of a full tensor (a rectangle, if it is a matrix), at the global `offsets`. The
names are parameters.NAME, exp_avg.NAME and exp_avg_sq.NAME, and the tensors have no layout, as in a
file. A rank holds a range of the flattened part of a parameter (pieces.owned_slices), which is no
box. So `chunks` cuts it into few: the end of a row, whole rows, the beginning of a row.

DCP's own functions open such a folder, and read it in one process or in many. Two things differ
when this file reads. The table is a pickle, which may run any code: `TableUnpickler` knows only
the classes of the table. And facts.pt has the CRC of each other file (checkpoint_files.verify): a
file that is damaged, or is of another save or another rank, is found.
"""
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from base.agreement import all_ranks
from base.disk import retry_transient

TABLE = ".metadata"
# What a pickle of DCP's table consists of, beside dtypes.
CLASSES = {("torch.distributed.checkpoint.metadata", name) for name in (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")}
CLASSES |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
            ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}


def part_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


class TableUnpickler(pickle.Unpickler):
    """Loads DCP's table, a Metadata, and nothing but its classes."""

    def find_class(self, module, name):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in CLASSES or is_dtype:
            return super().find_class(module, name)
        raise ValueError(f"{TABLE} names {module}.{name}")


def add_tensors(facts: dict, folder: Path, kinds) -> dict:
    """The state in a folder: its facts, and {name: tensor} for each kind, as a file has them."""
    facts = {key: value for key, value in facts.items() if key != "crcs"}
    table = TableUnpickler(io.BytesIO((folder / TABLE).read_bytes())).load()
    return facts | {kind: FolderTensors(folder, table, f"{kind}.") for kind in kinds}


class FolderTensors(Mapping):
    """The tensors of a folder whose names begin with `prefix`: {name after it: full tensor}, read
    when asked for."""

    def __init__(self, folder: Path, table, prefix: str):
        self.folder = folder
        self.table = table
        self.prefix = prefix
        self.like = {name.removeprefix(prefix): torch.empty(
                         tensor.size, dtype=tensor.properties.dtype, device="meta")
                     for name, tensor in table.state_dict_metadata.items()
                     if name.startswith(prefix) and hasattr(tensor, "chunks")}

    def __iter__(self):
        return iter(self.like)

    def __len__(self):
        return len(self.like)

    def __getitem__(self, name: str) -> torch.Tensor:
        full = torch.empty_like(self.like[name], device="cpu")
        read_chunks(self.folder, self.find([(name, (0,) * full.dim(), full)]))
        return full

    def load_shards(self, flat, kind: str) -> None:
        """Fill this rank's shard[kind] of each bucket of a FlatParameters. Every rank calls it. If
        one cannot read, all raise a RunError."""
        wanted = []
        for bucket in flat.buckets:
            for spec, shard_slice, param_slice in bucket.shard_ranges:
                numbers = bucket.shard[kind][shard_slice].zero_()       # padding is in no folder
                wanted += [(spec.name, offsets, box)
                           for offsets, box in chunks(spec, flat.grid, numbers, param_slice)]
        all_ranks(lambda: read_chunks(self.folder, self.find(wanted)), status=1)

    def find(self, wanted: list[tuple]) -> dict:
        """The chunks that overlap with boxes of full tensors, [(name, offsets, tensor to fill)] ->
        {file: {(start, length) of a chunk: [(slices of the chunk, where they go)]}}. Raises
        ValueError if these have not all of their numbers."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        found = defaultdict(lambda: defaultdict(list))
        for name, offsets, box in wanted:
            name = self.prefix + name
            missing = box.numel()
            for chunk in self.table.state_dict_metadata[name].chunks:
                both = overlap(chunk.offsets, chunk.sizes, offsets, box.shape)
                if both is not None:
                    of_chunk, of_box = both
                    where = self.table.storage_data[MetadataIndex(name, chunk.offsets)]
                    found[where.relative_path][where.offset, where.length].append(
                        (of_chunk, box[of_box]))
                    missing -= box[of_box].numel()
            if missing > 0:
                raise ValueError(f"{self.folder} lacks a part of {name}")
        return found


def overlap(offsets, sizes, other_offsets, other_sizes) -> tuple | None:
    """Where two boxes of a tensor overlap: (slices of the one, slices of the other), or None."""
    one, other = [], []
    for a, size, b, other_size in zip(offsets, sizes, other_offsets, other_sizes):
        low, high = max(a, b), min(a + size, b + other_size)
        if low >= high:
            return None
        one.append(slice(low - a, high - a))
        other.append(slice(low - b, high - b))
    return tuple(one), tuple(other)


@retry_transient
def read_chunks(folder: Path, found: dict) -> None:
    """Read each chunk of FolderTensors.find once, and copy its parts to the boxes."""
    for name, of_file in found.items():
        with (folder / name).open("rb") as file:
            for start, length in sorted(of_file):
                file.seek(start)
                chunk = torch.load(io.BytesIO(file.read(length)), map_location="cpu",
                                   weights_only=True)
                for part, target in of_file[start, length]:
                    target.copy_(chunk[part])


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


def chunks_of_box(spec, grid, offsets: tuple, box: torch.Tensor) -> Iterator[tuple]:
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


def chunks(spec, grid, numbers: torch.Tensor, where: slice) -> Iterator[tuple]:
    """The numbers part.flatten()[where] of this rank's part of a parameter, as chunks of the full
    tensor. Yields (offsets, view of `numbers`)."""
    begin = 0
    for offsets, sizes in boxes(spec.local_shape, where.start, where.stop):
        end = begin + math.prod(sizes)
        yield from chunks_of_box(spec, grid, offsets, numbers[begin:end].view(sizes))
        begin = end
