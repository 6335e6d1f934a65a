"""`.metadata`, the table of torch.distributed.checkpoint (DCP). It says where each chunk of a
tensor is in a checkpoint that is a folder. checkpoint_folder.py says what else the folder has.

The table is a pickle, and a pickle may run any code: `read_table` knows only the classes of the
table. Functions import DCP where they need it: importing it takes more than a second.
"""
import gc
import io
import pickle
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = ".metadata"
# What a pickle of DCP's table consists of, beside dtypes.
CLASSES = {("torch.distributed.checkpoint.metadata", name) for name in (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")}
CLASSES |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
            ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}


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
