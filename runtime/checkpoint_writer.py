"""Checkpoints are written while training goes on. checkpoint.py says what a file holds, and
parallelism/pieces.py which pieces of a tensor come from which rank.

Training waits only while each rank copies its own pieces to host memory. Then a thread of each rank
sends them to rank 0, and a thread there joins them and writes the file, while the next steps run.

    every rank          copy_pieces      its pieces of all tensors, to host memory
    a rank's thread     send_pieces      one by one, each freed once it is sent
    rank 0's thread     Inbox.read       the next full tensor, when torch.save comes to its bytes

So a rank needs memory for its shards once more. Rank 0 also needs memory for two full tensors, the
parts of one and their union, whatever the size of the model.
"""
from collections import OrderedDict, deque
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from base.errors import RunError, warn
from checkpoint import STATE
from model import GPTConfig
from parallel import Grid
from parallelism.collectives import comm_errors, on_hosts, to_host
from parallelism.pieces import Scattered, file_order, owned_slices
from parallelism.zero import FlatParameters


class Writer:
    """Writes checkpoints in a thread of each rank, one at a time. Rank 0 waits at most `timeout`
    seconds for each piece that another rank sends. `identity`: the run's id and origin, which they
    all have (directory.new_run)."""

    def __init__(self, out: Path, keep: int, model_config: GPTConfig, flat: FlatParameters,
                 timeout: float, identity: dict):
        self.out = out
        self.keep = keep
        self.model_config = model_config
        self.flat = flat
        self.grid = flat.grid
        self.timeout = timeout
        self.identity = identity
        self.thread = ThreadPoolExecutor(1)
        self.pending = None         # the Future of the last write

    @cached_property
    def order(self) -> list[Scattered]:
        return file_order(self.model_config, self.grid, self.flat.num_shards)

    def submit(self, facts: dict, protected: Container[str]) -> None:
        """Copy this rank's pieces, then start to write the state: `facts` and the tensors. Files
        whose names are in `protected` stay. Every rank must call it. Call `wait` before."""
        copies = copy_pieces(self.flat, STATE.values(), self.timeout)
        task = self._write if self.grid.rank == 0 else self._send
        self.pending = self.thread.submit(task, facts, protected, copies)

    def _send(self, facts: dict, protected: Container[str], copies: deque) -> None:
        send_pieces(copies, self.grid, facts["step"])

    def _write(self, facts: dict, protected: Container[str], copies: deque) -> str | None:
        dtype = self.flat.buckets[0].shard["master"].dtype
        inbox = Inbox(self.order, dtype, copies, self.grid, facts["step"])
        tensors = {key: {spec.name: Streamed(spec.shape, dtype, inbox) for spec, _ in self.order}
                   for key in STATE}
        try:
            checkpoint.save(facts | tensors, self.out, self.keep, protected)
            return None
        except OSError as error:        # training continues: earlier files are whole
            reason = str(error)         # the exception itself would keep a tensor in memory
        warn(f"{reason}; earlier checkpoints, if any, are untouched")
        inbox.discard_rest()
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
            timeout = None if self.grid.rank == 0 else self.timeout
            with suppress(dist.DistError, TimeoutError):
                self.pending.result(timeout)


@torch.no_grad()
def copy_pieces(flat: FlatParameters, names, timeout: float) -> deque[torch.Tensor]:
    """Copy to host memory the pieces that the file takes from this rank, for each of the flat
    tensors `names`, in the order of the file. DistError if a GPU hangs for `timeout` seconds."""
    copies = deque()
    for name in names:
        for bucket, _, shard_slice, _ in owned_slices(flat.buckets, flat.grid, flat.num_shards):
            copy = to_host(bucket.shard[name][shard_slice], timeout)
            # A copy from CUDA is pinned memory, which may take twice the space. Its clone is not.
            copies.append(copy.clone())
    return copies


def send_pieces(copies: deque[torch.Tensor], grid: Grid, tag: int) -> None:
    """Send the copies to rank 0, in order, and free each once it is sent. A message waits until
    rank 0 asks for it. If rank 0 dies, the connection breaks. The tag is the step of the save."""
    while copies:
        with comm_errors("save, send to rank 0"):
            dist.isend(copies.popleft(), 0, grid.groups["save"], tag).wait(timedelta(days=1))


class Inbox:
    """On rank 0: receives the full tensors of one save, in the order of the file. The pieces come
    from the other ranks by messages with this tag, and from the rank's own `copies`."""

    def __init__(self, order: list[Scattered], dtype: torch.dtype, copies: deque[torch.Tensor],
                 grid: Grid, tag: int):
        self.expected = deque(parameter for _ in STATE for parameter in order)
        self.dtype = dtype
        self.copies = copies
        self.grid = grid
        self.tag = tag

    def read(self) -> torch.Tensor:
        """The next full tensor."""
        spec, pieces = self.expected.popleft()
        parts = torch.empty(spec.num_parts, spec.numel, dtype=self.dtype)
        receives = []                   # [(operation, Work)] under way
        for rank, part, numbers in pieces:
            space = parts[part, numbers]
            if rank == 0:
                space.copy_(self.copies.popleft())
                continue
            operation = f"save, receive from rank {rank}{on_hosts([rank], self.grid.hosts)}"
            with comm_errors(operation):
                receive = dist.irecv(space, rank, self.grid.groups["save"], self.tag)
            receives.append((operation, receive))
        for operation, receive in receives:
            with comm_errors(operation):
                receive.wait()
        return spec.join(parts.view(-1, *spec.local_shape).unbind())

    def discard_rest(self) -> None:
        """Receive what nobody writes: each rank waits until rank 0 has taken all its pieces."""
        while self.expected:
            self.read()


# ---- Tensors that exist only while torch.save writes them ------------------------------------
#
# torch.save pickles all objects first, then writes their storages one by one in the same order. The
# file is that of the tensors themselves, byte for byte.

class Streamed:
    """Stands in a state for a tensor. When torch.save comes to its bytes, `source.read()` must
    return the tensor, contiguous from the start of its storage."""

    def __init__(self, shape: tuple, dtype: torch.dtype, source):
        self.like = torch.empty(shape, dtype=dtype, device="meta")
        self.source = source

    def __reduce__(self):
        """What torch.Tensor.__reduce_ex__ returns for a tensor on the CPU: a function that builds
        the tensor again, and the arguments of that function. Pickle then asks the first argument
        for its storage."""
        storage = LateStorage(self.like.nbytes, device="meta")
        storage.source = self.source
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=self.like.dtype,
                                           _internal=True)
        typed._fake_device = "cpu"          # what the file says of its device
        offset = 0
        shape, stride = tuple(self.like.shape), self.like.stride()
        requires_grad = False
        hooks = OrderedDict()
        return (torch._utils._rebuild_tensor_v2,
                (typed, offset, shape, stride, requires_grad, hooks))


class LateStorage(torch.UntypedStorage):
    """A storage of the device `meta`, which has no memory. torch.save calls `cpu` for the bytes of
    a storage that is not on the CPU, and drops them when they are in the file."""

    def cpu(self):
        return self.source.read().untyped_storage()
