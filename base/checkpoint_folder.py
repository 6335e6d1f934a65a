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
when this file reads. `.metadata` is a pickle, and a pickle may run any code: ours knows only the
classes of that table. And facts.pt has the CRC of each other file, which `verify_folder` compares:
a file that is damaged, or is of another save or another rank, is found.

runtime/folder_writer.py writes a folder, on every rank. checkpoint.py reads it. Functions import
DCP where they need it: importing it takes more than a second.
"""
import gc
import io
import math
import os
import pickle
import zlib
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from base.chunks import chunks
from base.processes import all_ranks
from base.retries import first_cause, retry_transient

FACTS = "facts.pt"
TABLE = ".metadata"
# What a pickle of DCP's table consists of, beside dtypes.
CLASSES = {("torch.distributed.checkpoint.metadata", name) for name in (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")}
CLASSES |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
            ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A chunk in a rank's file."""
    name: str
    shape: tuple            # of the full tensor
    offsets: tuple          # of the chunk in it
    sizes: tuple
    start: int              # bytes in the file
    length: int


def part_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


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


def make_table(parts: list[list[Entry]], dtype: torch.dtype) -> bytes:
    """`.metadata`, from what each rank has written.

    Of thousands of ranks it has millions of chunks (`python -m tools.bench checkpoint_plans`). All
    layers, and the three kinds of tensors, are cut alike. So a rank's equal chunks are one object,
    which the pickle has once: it is half as long, and is made and read in half the time."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata,
                                                       MetadataIndex, TensorProperties,
                                                       TensorStorageMetadata)
    tensors, where, names = {}, {}, {}
    with without_garbage_collection():
        for rank, entries in enumerate(parts):
            file = part_file(rank)
            known = {}                              # {(offsets, sizes): chunk}
            for name, shape, offsets, sizes, start, length in entries:
                name = names.setdefault(name, name)         # each rank has sent its own string
                if name not in tensors:
                    tensors[name] = TensorStorageMetadata(TensorProperties(dtype),
                                                          torch.Size(shape), [])
                chunk = known.get((offsets, sizes))
                if chunk is None:
                    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    known[offsets, sizes] = chunk
                tensors[name].chunks.append(chunk)
                index = MetadataIndex(name)
                object.__setattr__(index, "offset", chunk.offsets)      # its own would be a copy
                where[index] = _StorageInfo(file, start, length)
        table = Table()
        pickle.dump(Metadata(tensors, storage_data=where, version=CURRENT_DCP_VERSION), table)
        return b"".join(table.pieces)


class Table:
    """A file in memory. pickle.dumps would hold the interpreter's lock for as long as it takes, and
    training would wait. Between two writes of a file in Python other threads get it."""

    def __init__(self):
        self.pieces = []

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)


@contextmanager
def without_garbage_collection():
    """For a block that makes millions of objects. Python would look through all of them for garbage
    again and again, which takes more time than to make them, and lets no other thread run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def write_table(folder: Path, table: bytes, facts: dict, crcs: list[int]) -> None:
    """Write `.metadata` and facts.pt, and flush them to the disk. `crcs`: of the ranks' files."""
    of_files = {part_file(rank): crc for rank, crc in enumerate(crcs)}
    with open(folder / TABLE, "wb") as file:
        file.write(table)
        file.flush()
        os.fsync(file.fileno())
    with open(folder / FACTS, "wb") as file:
        torch.save(facts | dict(crcs=of_files | {TABLE: zlib.crc32(table)}), file)
        file.flush()
        os.fsync(file.fileno())


def write_whole(state: dict, kinds, folder: Path) -> None:
    """Write a state whose tensors are whole, as one process: a folder with one part."""
    entries, crc = write_part(folder / part_file(0), (
        (f"{kind}.{name}", tensor.shape, (0,) * tensor.dim(), tensor)
        for kind in kinds for name, tensor in state[kind].items()))
    dtype = next(iter(state[kinds[0]].values())).dtype
    facts = {key: value for key, value in state.items() if key not in kinds}
    write_table(folder, make_table([entries], dtype), facts, [crc])


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


class TableUnpickler(pickle.Unpickler):
    """Loads nothing but the classes of DCP's table."""

    def find_class(self, module, name):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in CLASSES or is_dtype:
            return super().find_class(module, name)
        raise ValueError(f"{TABLE} names {module}.{name}")


def read_table(folder: Path):
    """DCP's Metadata of a folder."""
    with without_garbage_collection():
        return TableUnpickler(io.BytesIO((folder / TABLE).read_bytes())).load()


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
    if not kinds:
        return facts
    table = read_table(folder)
    return facts | {kind: FolderTensors(folder, table, f"{kind}.") for kind in kinds}


def shapes_of(tensors: Mapping) -> dict[str, tuple]:
    """{name: shape} of the tensors of a state. Those of a folder are not read for it."""
    if isinstance(tensors, FolderTensors):
        tensors = tensors.like
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def fill_shards(tensors: FolderTensors, flat, kind: str) -> None:
    """Load shard[kind] of each bucket of a zero.FlatParameters. Every rank calls it. If one cannot
    read, all raise a RunError."""
    wanted = []
    for bucket in flat.buckets:
        for spec, shard_slice, param_slice in bucket.shard_ranges:
            numbers = bucket.shard[kind][shard_slice].zero_()       # padding is in no folder
            wanted += [(spec.name, offsets, chunk)
                       for offsets, chunk in chunks(spec, flat.grid, numbers, param_slice)]
    all_ranks(lambda: tensors.read(wanted), status=1)


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
