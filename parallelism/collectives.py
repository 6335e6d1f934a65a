"""What torch.distributed lacks: errors that name the operation and its ranks, faster collectives of
CPUs, and copies to the host that end.

parallel.py's collectives call these three where tensors are on the CPU, instead of gloo's:

    all_reduce                 two ranks swap small tensors: half the time
    reduce_scatter_single      slices travel as messages: gloo's is an all-reduce of a copy, with
                               twice the traffic and memory
    all_gather_single          the same: gloo gathers into a copy
"""
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def comm_errors(operation: str, group=None):
    """Turn a RuntimeError of torch.distributed into its DistError: another rank is gone or did not
    answer in time. It names `operation` and, if a group of `make_groups` is given, its ranks. Not
    the error of a kernel that failed in this process."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if group is not None:
            operation += f" with {group.group_desc}"
        raise dist.DistError(f"{operation}: {error}") from error


def name_of(op: tuple) -> str:
    """An op of a pipeline's schedule, for errors."""
    kind, microbatch, _ = op
    return f"{dict(F='forward', B='backward')[kind]} of microbatch {microbatch}"


def on_hosts(ranks: list[int], hosts: list[str]) -> str:
    """" on node1, node2", the machines of these ranks; "" if the whole job is on one machine."""
    if len(set(hosts)) == 1:
        return ""
    return " on " + ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))


class Messages:
    """An exchange under way, like a handle of torch.distributed. `finish` runs after it."""

    def __init__(self, handles: list, finish=None):
        self.handles, self.finish = handles, finish

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        if self.finish is not None:
            self.finish()


def _exchange(outgoing: list, incoming: list, group) -> list:
    """Send outgoing[r] to every other rank r of the group and receive incoming[r] from it; returns
    the handles. All ranks must start exchanges in the same order: gloo pairs messages of equal tag
    by order."""
    others = [r for r in range(group.size()) if r != group.rank()]
    return ([dist.isend(outgoing[r], group=group, group_dst=r) for r in others]
            + [dist.irecv(incoming[r], group=group, group_src=r) for r in others])


def all_reduce(x: torch.Tensor, op, group, async_op: bool):
    """dist.all_reduce on CPUs. `nano` on 2 x 2 x 2 ranks: a step is 10% faster."""
    if group.size() > 2 or x.nbytes > 2 ** 20 or op != dist.ReduceOp.SUM:
        return dist.all_reduce(x, op, group, async_op=async_op)
    received = torch.empty_like(x)
    handles = _exchange([x] * 2, [received] * 2, group)         # uses the other rank's entry
    return Messages(handles, lambda: x.add_(received))


def reduce_scatter_single(total: torch.Tensor, x: torch.Tensor, group, async_op: bool):
    """dist.reduce_scatter_single on CPUs; `total` is this rank's slice of x."""
    slices = x.chunk(group.size())
    received = [torch.empty_like(total) for _ in slices]
    handles = _exchange(slices, received, group)
    del received[group.rank()]          # no rank sends to itself

    def add_received():
        wide = total if total.dtype.itemsize > 2 else total.float()
        for term in received:           # of 16 bits only the whole sum is rounded
            wide += term
        if wide is not total:
            total.copy_(wide)
    return Messages(handles, add_received)


def all_gather_single(x: torch.Tensor, own: torch.Tensor, group, async_op: bool):
    """dist.all_gather_single on CPUs; `own` is this rank's slice of x."""
    slices = x.chunk(group.size())
    return Messages(_exchange([own] * len(slices), slices, group))


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type for sums of many numbers: float64, but on MPS, which has none, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def copy_to_host_async(x: torch.Tensor, host: torch.Tensor | None = None) -> tuple:
    """Start to copy x to `host`, or to new memory, pinned on CUDA -> (the copy, its event)."""
    host = x.to("cpu", non_blocking=True) if host is None else host.copy_(x, non_blocking=True)
    event = torch.get_device_module(x.device).Event()
    event.record()
    return host, event


def to_host(x: torch.Tensor, timeout: float) -> torch.Tensor:
    """x on the host; DistError if the device takes more than `timeout` seconds to compute it. If
    a rank hangs, a plain copy blocks until NCCL's own watchdog, for minutes."""
    if x.device.type == "cpu":
        return x
    host, event = copy_to_host_async(x)
    deadline = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > deadline:
            raise dist.DistError(f"the device has not ended its work in {timeout} s: a rank that "
                                 f"it waits for is gone or hangs")
        time.sleep(1e-4)
    return host
