"""A checkpoint as a folder, for models that are too large for one file: every rank writes its own
numbers, and reads those that it needs. The folder is in the format of torch.distributed.checkpoint
(DCP), with a file of our own beside it.

    out/step_00000200/
        __0_0.distcp, __1_0.distcp ...  one file a rank: its chunks, each saved by torch.save
        .metadata                       DCP's table: which chunk of which tensor is where
        facts.pt                        the entries of a checkpoint file except the tensors, and
                                        the CRC of each other file

A chunk is a box of a full tensor (chunks.py). The names are parameters.NAME, exp_avg.NAME and
exp_avg_sq.NAME, and the tensors have no layout, as in a file.

DCP's own functions open such a folder, and read it in one process or in many. Two things differ
when this file reads. `.metadata` runs no code (dcp_table.py). And facts.pt has the CRC of each
other file, which `verify_folder` compares: a file that is damaged, or is of another save or another
rank, is found.

runtime/folder_writer.py writes a folder, on every rank. checkpoint.py reads it. Functions import
DCP where they need it: importing it takes more than a second.
"""
import io
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from base.atomic_writes import flushed_file
from base.chunks import chunks
from base.dcp_table import TABLE, Entry, part_file, read_table
from base.processes import all_ranks
from base.retries import first_cause, retry_transient

FACTS = "facts.pt"


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


class SummedFile(io.BufferedWriter):
    """A file to write from its beginning to its end. `crc`: of what has been written."""
    crc = 0

    def write(self, data) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)


def write_part(path: Path, named_chunks) -> tuple[list[Entry], int]:
    """Write this rank's file and flush it to the disk. `named_chunks`: (name, shape of the full
    tensor, offsets, tensor). Returns what is where in the file, and the file's CRC."""
    entries = []
    # "x": the file is new. A rank of an ended job that still hangs in a disk cannot empty it later.
    with SummedFile(io.FileIO(path, "x")) as file:
        for name, shape, offsets, tensor in named_chunks:
            start = file.tell()
            torch.save(tensor.clone(), file)        # of a view it would write the whole memory
            entries.append(Entry(name, tuple(shape), offsets, tuple(tensor.shape), start,
                                 file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    return entries, file.crc


def write_table(folder: Path, table: bytes, facts: dict, crcs: list[int]) -> None:
    """Write `.metadata` and facts.pt, and flush them to the disk. `crcs`: of the ranks' files."""
    of_files = {part_file(rank): crc for rank, crc in enumerate(crcs)}
    with flushed_file(folder / TABLE) as file:
        file.write(table)
    with flushed_file(folder / FACTS) as file:
        torch.save(facts | dict(crcs=of_files | {TABLE: zlib.crc32(table)}), file)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """What FileSystemReader asks of a planner: where a chunk's numbers go."""
    tensors: dict           # {MetadataIndex: tensor to fill}

    def resolve_tensor(self, item) -> torch.Tensor:
        target = self.tensors[item.dest_index]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item, tensor) -> None:
        pass                # resolve_tensor gave a view


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
        self.read([(name, (0,) * full.dim(), full)])
        return full

    def read(self, wanted: list[tuple]) -> None:
        """Fill tensors with chunks of the full ones: [(name, offsets, tensor)]. Reads from the
        files the chunks that overlap. Raises ValueError if the folder has not all of it."""
        from torch.distributed.checkpoint import LoadPlan
        from torch.distributed.checkpoint.metadata import MetadataIndex
        targets = {MetadataIndex(self.prefix + name, offsets): tensor
                   for name, offsets, tensor in wanted}
        read_chunks(self.folder, self.table, LoadPlan(self.plan(wanted)), Targets(targets))

    def plan(self, wanted: list[tuple]) -> list:
        """Which parts of the folder's chunks go where: DCP's ReadItems."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
        boxes_of, items = {}, []
        for name, offsets, tensor in wanted:
            box = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            boxes_of.setdefault(self.prefix + name, []).append(box)
        for name, own in boxes_of.items():
            found = create_read_items_for_chunk_list(name, self.table.state_dict_metadata[name],
                                                     own)
            if sum(math.prod(item.lengths) for item in found) < sum(
                    math.prod(box.sizes) for box in own):
                raise ValueError(f"{self.folder} lacks a part of {name}")
            items += found
        return items

    def load_shards(self, flat, kind: str) -> None:
        """Fill this rank's shard[kind] of each bucket of a FlatParameters. Every rank calls it. If
        one cannot read, all raise a RunError."""
        wanted = []
        for bucket in flat.buckets:
            for spec, shard_slice, param_slice in bucket.shard_ranges:
                numbers = bucket.shard[kind][shard_slice].zero_()       # padding is in no folder
                wanted += [(spec.name, offsets, chunk)
                           for offsets, chunk in chunks(spec, flat.grid, numbers, param_slice)]
        all_ranks(lambda: self.read(wanted), status=1)


@retry_transient
def read_chunks(folder: Path, table, plan, targets: Targets) -> None:
    """Fill the targets by DCP's reader. Raises OSError."""
    from torch.distributed.checkpoint import FileSystemReader
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(table, is_coordinator=False)
    try:
        reader.read_data(plan, targets)
    except RuntimeError as error:
        cause = first_cause(error)
        raise cause if isinstance(cause, OSError) else error


def add_tensors(facts: dict, folder: Path, kinds) -> dict:
    """The state in a folder: its facts, and {name: tensor} for each kind, as a file has them."""
    facts = {key: value for key, value in facts.items() if key != "crcs"}
    table = read_table(folder)
    return facts | {kind: FolderTensors(folder, table, f"{kind}.") for kind in kinds}


def shapes_of(tensors: Mapping) -> dict[str, tuple]:
    """{name: shape} of the tensors of a state. Those of a folder are not read for it."""
    if isinstance(tensors, FolderTensors):
        tensors = tensors.like
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def verify_folder(folder: Path, rank: int, world: int) -> None:
    """Compare the CRCs of the files with those in facts.pt: of every file, if the ranks of this
    `world` all call it. Raises ValueError."""
    with open(folder / FACTS, "rb") as file:
        crcs = torch.load(file, weights_only=True)["crcs"]
    for name in sorted(crcs)[rank::world]:
        if not (folder / name).exists():
            raise ValueError(f"{name} is missing")
        crc = 0
        with open(folder / name, "rb") as file:
            while block := file.read(2 ** 22):
                crc = zlib.crc32(block, crc)
        if crc != crcs[name]:
            raise ValueError(f"the CRC of {name} does not match")
