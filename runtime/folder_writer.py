"""Checkpoints as folders. Each rank writes its own part, which is little, so training waits for it.
base/checkpoint_folder.py says what a folder holds.

    1. begin    rank 0 makes the folder out/step.tmp
    2. parts    each rank writes its file, and flushes it to the disk
    3. end      all tell what is where in their files; rank 0 writes the table and the facts, and
                renames the folder

The ranks do each of these together (agreement.all_ranks): if one cannot, as on a full disk, all
hear of it, rank 0 tells it in one line, and training goes on. A rank that is lost ends the run. In
both cases the folder never gets its name. The next save removes what is left of it.
"""
import io
import pickle
import shutil
import zlib
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import torch

from base.agreement import all_gather_object, all_ranks, on_rank0
from base.checkpoint_files import FACTS, LATEST, remove_old, step_file
from base.checkpoint_folder import TABLE, chunks, part_file
from base.disk import flush_folder, flushed_file, remove, rename_folder
from base.errors import RunError, warn
from checkpoint import STATE
from parallelism.collectives import on_hosts
from parallelism.pieces import owned_slices
from runtime.checkpoint_writer import Writer

SHARED = "--out must be on a disk that all machines share"


def saved(value) -> memoryview:
    """The bytes of torch.save. (Behind its own errors it would hide those of a disk.)"""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def write_part(path: Path, named_chunks: Iterable[tuple]) -> tuple[list[tuple], int]:
    """Write this rank's file. `named_chunks`: (name, shape of the full tensor, offsets, tensor).
    Returns what is where, [(name, shape, offsets, sizes of the chunk, start in the file, length in
    bytes)], and the file's CRC."""
    entries, crc = [], 0
    # "x": the file is new. A rank of an ended job that still hangs in a disk cannot empty it later.
    with flushed_file(path, "xb") as file:
        for name, shape, offsets, tensor in named_chunks:
            content = saved(tensor.clone())         # of a view it would be the whole memory
            entries.append((name, tuple(shape), offsets, tuple(tensor.shape), file.tell(),
                            len(content)))
            file.write(content)
            crc = zlib.crc32(content, crc)
    return entries, crc


def write_table(folder: Path, parts: list[tuple], dtype: torch.dtype, facts: dict) -> None:
    """Write `.metadata`, DCP's table, and facts.pt. `parts`: what `write_part` has returned on each
    rank."""
    from torch.distributed.checkpoint import filesystem, metadata       # takes more than a second
    tensors, where, crcs = {}, {}, {}
    properties = metadata.TensorProperties(dtype)
    for rank, (entries, crc) in enumerate(parts):
        crcs[part_file(rank)] = crc
        for name, shape, offsets, sizes, start, length in entries:
            if name not in tensors:
                tensors[name] = metadata.TensorStorageMetadata(properties, torch.Size(shape), [])
            chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            tensors[name].chunks.append(chunk)
            where[metadata.MetadataIndex(name, chunk.offsets)] = filesystem._StorageInfo(
                part_file(rank), start, length)
    table = pickle.dumps(metadata.Metadata(tensors, storage_data=where,
                                           version=filesystem.CURRENT_DCP_VERSION))
    with flushed_file(folder / TABLE) as file:
        file.write(table)
    with flushed_file(folder / FACTS) as file:
        file.write(saved(facts | dict(crcs=crcs | {TABLE: zlib.crc32(table)})))


class FolderWriter(Writer):
    """Writes folders, on all ranks at the same time. `submit` returns when the folder is whole, or
    could not be written."""

    @property
    def aside(self) -> Path:
        return self.out / "step.tmp"

    def submit(self, facts: dict, protected: Container[str]) -> None:
        path = step_file(self.out, facts["step"], "folder")
        reason = None
        try:
            on_rank0(self._begin)
            parts = all_gather_object(all_ranks(self._write_part))
            on_rank0(lambda: self._end(path, facts, protected, parts))
        except RunError as error:               # training goes on: earlier folders are whole
            reason = f"{path} could not be written: {error}"
            if self.flat.grid.rank == 0:
                shutil.rmtree(self.aside, ignore_errors=True)       # give its space back
                warn(f"{reason}; earlier checkpoints, if any, are untouched")
        self.pending = Future()                 # for `wait`
        self.pending.set_result(reason)

    def _begin(self) -> None:
        remove(self.aside)                      # a killed save has left it
        self.aside.mkdir(parents=True)

    def _write_part(self) -> tuple[list[tuple], int]:
        if not self.aside.exists():
            raise OSError(f"there is no {self.aside} here: {SHARED}")
        return write_part(self.aside / part_file(self.flat.grid.rank), self._chunks())

    def _end(self, path: Path, facts: dict, protected: Container[str], parts: list[tuple]) -> None:
        hosts = self.flat.grid.hosts
        for rank in range(len(hosts)):
            if not (self.aside / part_file(rank)).exists():
                raise OSError(f"the file of rank {rank}{on_hosts([rank], hosts)} is not "
                              f"in {self.aside}: {SHARED}")
        write_table(self.aside, parts, self.dtype, facts)
        flush_folder(self.aside)
        rename_folder(self.aside, path, self.out / LATEST["folder"])
        remove_old(path, self.keep, protected)

    def _chunks(self) -> Iterator[tuple]:
        """What a rank writes, in the order of its file: (name, shape of the full tensor, offsets,
        chunk). One piece at a time is copied to host memory."""
        for key, kind in STATE.items():
            for bucket, spec, shard_slice, where in owned_slices(self.flat):
                numbers = bucket.shard[kind][shard_slice].cpu()
                for offsets, chunk in chunks(spec, self.flat.grid, numbers, where):
                    yield f"{key}.{spec.name}", spec.shape, offsets, chunk
