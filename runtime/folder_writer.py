"""Checkpoints as folders are written while training goes on, each rank's part by a thread of that
rank (--checkpoint-format folder). train.Run builds a `FolderWriter` in place of a
checkpoint_writer.Writer. base/checkpoint_folder.py says what a folder holds.

    1. copy     each rank copies its pieces to host memory. Training waits for this, and before it
                for the end of the last write
    2. begin    rank 0 makes the folder out/step.tmp
    3. parts    each rank writes its file and flushes it to the disk
    4. end      rank 0 hears that all have, writes the table and the facts, and renames the folder

A folder has its name only if it is whole. A rank whose disk is full tells rank 0 in 3, and a rank
that dies closes its connections: then the folder never gets its name. The next save removes it.
Other errors of a rank's thread end that rank at the next `wait`, and its loss ends the others.
"""
import shutil
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from base.atomic_writes import flush_folder, rename_folder
from base.checkpoint_files import LATEST, remove_old, step_file, what_is_left
from base.checkpoint_folder import write_part, write_table
from base.chunks import chunks
from base.dcp_table import make_table, part_file
from base.pieces import owned_slices
from base.processes import warn
from base.retries import first_cause
from checkpoint import STATE
from parallelism.buckets import Bucket
from parallelism.build import Grid
from parallelism.collectives import PeerError, comm_errors, first_line, on_hosts, out_of_memory
from runtime.checkpoint_writer import Writer

SHARED = "--out must be on a disk that all machines share"


class FolderWriter(Writer):
    """Writes folders in a thread of each rank, one at a time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.aside = self.out / "step.tmp"
        # The entries stay the same from one save to the next. So they are sent once.
        self.written = None         # this rank's, if rank 0 has them
        self.table = None           # on rank 0: `.metadata`
        # Other threads send by the other groups meanwhile. A slow disk is no error.
        if self.grid.world > 1:
            self.grid.groups["folder"] = dist.new_group(timeout=timedelta(days=1), backend="gloo",
                                                        group_desc="all ranks")

    def _write(self, facts: dict, named: Container[str], copies: deque) -> str | None:
        """Returns on every rank why the folder could not be written, or None."""
        is_first = self.grid.rank == 0
        reason = None
        if is_first:
            _, reason = attempt(self._begin)
        reason = self._from_rank0(reason)
        if reason is None:
            written, reason = attempt(lambda: self._write_part(copies))
            entries, crc = (None, None) if written is None else written
            parts = self._to_rank0((entries if entries != self.written else None, crc, reason))
            if is_first:
                reason = self._failure(parts)
                if reason is None:
                    _, reason = attempt(lambda: self._end(facts, named, parts))
            reason = self._from_rank0(reason)
            self.written = entries if reason is None else None      # rank 0 knows them, or not
        if reason is not None:
            path = step_file(self.out, facts["step"], "folder")
            reason = f"{path} could not be written: {reason}"
            if is_first:
                shutil.rmtree(self.aside, ignore_errors=True)       # give its space back
                warn(f"{reason}; {what_is_left(self.out)}")
        return reason

    def _send(self, *args) -> str | None:
        return self._write(*args)           # all ranks do the same

    def _write_part(self, copies: deque) -> tuple:
        if not self.aside.exists():
            raise OSError(f"there is no {self.aside} here: {SHARED}")
        return write_part(self.aside / part_file(self.grid.rank), chunks_of(
            self.flat.buckets, self.grid, self.flat.num_shards, copies))

    def _begin(self) -> None:
        if self.aside.exists():                     # a killed save has left it
            shutil.rmtree(self.aside)
        self.aside.mkdir(parents=True)

    def _end(self, facts: dict, named: Container[str], parts: list[tuple]) -> None:
        """On rank 0, when all ranks have written their files."""
        for rank in range(self.grid.world):
            if not (self.aside / part_file(rank)).exists():
                raise OSError(f"the file of rank {rank}{on_hosts([rank], self.grid.hosts)} is not "
                              f"in {self.aside}: {SHARED}")
        entries = [of_rank for of_rank, _, _ in parts]
        unchanged = entries.count(None)
        if 0 < unchanged < len(entries):                # after this failure all send theirs again
            raise OSError("the chunks of some ranks have changed")
        if unchanged == 0:
            dtype = self.flat.buckets[0].shard["master"].dtype
            self.table = make_table(entries, dtype)
        write_table(self.aside, self.table, facts, [crc for _, crc, _ in parts])
        flush_folder(self.aside)
        path = step_file(self.out, facts["step"], "folder")
        rename_folder(self.aside, path, self.out / LATEST["folder"])
        remove_old(path, self.keep, named)

    def _failure(self, parts: list[tuple]) -> str | None:
        for rank, (_, _, reason) in enumerate(parts):
            if reason is not None:
                return f"rank {rank}{on_hosts([rank], self.grid.hosts)}: {reason}"
        return None

    def _to_rank0(self, value) -> list | None:
        """On rank 0 the values of all ranks."""
        if self.grid.world == 1:
            return [value]
        values = [None] * self.grid.world if self.grid.rank == 0 else None
        with comm_errors("save, send to rank 0"):
            dist.gather_object(value, values, 0, self.grid.groups["folder"])
        return values

    def _from_rank0(self, value):
        if self.grid.world == 1:
            return value
        values = [value]
        with comm_errors("save, receive from rank 0"):
            dist.broadcast_object_list(values, 0, self.grid.groups["folder"])
        return values[0]

    def close(self) -> None:
        """Wait for the last write when the run ends by an error. If that error is the loss of a
        rank, the others wait for it in vain. So they wait for `timeout` seconds: a write that takes
        longer is given up."""
        if self.pending is not None:
            timeout = None if self.grid.world == 1 else self.timeout
            with suppress(PeerError, TimeoutError):
                self.pending.result(timeout)



def chunks_of(buckets: list[Bucket], grid: Grid, num_shards: int, copies: deque) -> Iterator[tuple]:
    """What a rank writes, of its pieces in order: (name, shape of the full tensor, offsets, chunk).
    """
    for key in STATE:
        for _, spec, _, where in owned_slices(buckets, grid, num_shards):
            for offsets, chunk in chunks(spec, grid, copies.popleft(), where):
                yield f"{key}.{spec.name}", spec.shape, offsets, chunk


def attempt(action: Callable) -> tuple:
    """(the result of action(), None), or (None, why a file could not be written)."""
    try:
        return action(), None
    except (OSError, RuntimeError) as error:
        cause = first_cause(error)
        if out_of_memory(cause):
            raise cause
        return None, first_line(cause)
