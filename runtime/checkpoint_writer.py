"""Checkpoints are written while training goes on. checkpoint.py says what a file holds, and how its
pieces come from the ranks; parallelism/pieces.py which.

Training waits only while each rank copies its own pieces to host memory. Then a thread of each rank
sends them to rank 0, and a thread there joins them and writes the file, while the next steps run:
the next full tensor is made when torch.save comes to its bytes.

So a rank needs memory for its shards once more. Rank 0 also needs memory for two full tensors, the
parts of one and their union, whatever the size of the model.
"""
from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from base.errors import RunError, warn
from checkpoint import STATE
from parallelism.pieces import Scattered, owned_slices
from parallelism.zero import FlatParameters


@dataclass
class Writer:
    """Writes checkpoints in a thread of each rank, one at a time."""
    out: Path
    keep: int
    flat: FlatParameters
    order: list[Scattered] | None       # on rank 0 (pieces.file_order)
    timeout: float              # seconds that rank 0 waits for each piece of another rank, at most
    identity: dict              # the run's id and origin (directory.new_run)
    pending: Future | None = None       # the last write
    thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensors in a file."""
        return self.flat.buckets[0].shard["master"].dtype

    def submit(self, facts: dict, protected: Container[str]) -> None:
        """Copy this rank's pieces, then start to write the state: `facts` and the tensors. Files
        whose names are in `protected` stay. Every rank must call it. Call `wait` before."""
        copies = checkpoint.copy_pieces(owned_slices(self.flat), STATE.values(), self.timeout)
        if self.flat.grid.rank == 0:
            self.pending = self.thread.submit(self._write, facts, protected, copies)
        else:
            self.pending = self.thread.submit(checkpoint.send_pieces, copies, self.flat.grid,
                                              facts["step"])

    def _write(self, facts: dict, protected: Container[str], copies: deque) -> str | None:
        full_tensors = (checkpoint.full_tensor(parameter, self.dtype, copies, self.flat.grid,
                                               facts["step"])
                        for _ in STATE for parameter in self.order)
        tensors = {key: {spec.name: Streamed(spec.shape, self.dtype, full_tensors)
                         for spec, _ in self.order} for key in STATE}
        try:
            checkpoint.save(facts | tensors, self.out, self.keep, protected)
            return None
        except OSError as error:        # training continues: earlier files are whole
            reason = str(error)         # the exception itself would keep a tensor in memory
        warn(f"{reason}; earlier checkpoints, if any, are untouched")
        for _ in full_tensors:          # each rank waits until rank 0 has taken all its pieces
            pass
        return reason

    def wait(self, required: bool = False) -> str | None:
        """Wait for the last write, however slow the disk is. Returns why it failed, on rank 0 at
        least. Raises DistError if another rank is gone, and RunError if rank 0 could not write a
        checkpoint that is `required`."""
        error = None if self.pending is None else self.pending.result()
        if required and error is not None:
            raise RunError(f"the last checkpoint is lost: {error}: see that {self.out} can be "
                           f"written and has space for it, then give the same command")
        return error

    def close(self) -> None:
        """Wait for the last write when the run ends by an error. If that error is the loss of
        rank 0, nobody receives. So the others wait for `timeout` seconds."""
        if self.pending is not None:
            with suppress(dist.DistError, TimeoutError):
                self.pending.result(None if self.flat.grid.rank == 0 else self.timeout)


# ---- Tensors that exist only while torch.save writes them ------------------------------------
#
# torch.save pickles all objects first, then writes their storages one by one in the same order. The
# file is that of the tensors themselves, byte for byte.

@dataclass
class Streamed:
    """Stands in a state for a tensor. When torch.save comes to its bytes, next(source) must be the
    tensor, contiguous from the start of its storage."""
    shape: tuple
    dtype: torch.dtype
    source: Iterator[torch.Tensor]

    def __reduce__(self):
        """What torch.Tensor.__reduce_ex__ returns for a tensor on the CPU: a function that builds
        the tensor again, and the arguments of that function. Pickle then asks the first argument
        for its storage."""
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")         # no memory
        storage = LateStorage(like.nbytes, device="meta")
        storage.source = self.source
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=self.dtype, _internal=True)
        typed._fake_device = "cpu"          # what the file says of its device
        # Then: its offset there, its size and stride, whether it requires a gradient, its hooks.
        return (torch._utils._rebuild_tensor_v2,
                (typed, 0, tuple(self.shape), like.stride(), False, OrderedDict()))


class LateStorage(torch.UntypedStorage):
    """A storage of the device `meta`, which has no memory. torch.save calls `cpu` for the bytes of
    a storage that is not on the CPU, and drops them when they are in the file."""

    def cpu(self):
        return next(self.source).untyped_storage()
