"""Sums and copies between ranks: the collectives that the techniques use, and their errors.

    all_reduce(x, group)        every rank has the sum
    reduce_scatter(x, group)    every rank has its slice of the sum
    all_gather(x, group)        every rank has all slices
    all_to_all(x, .., group)    every rank has what each other has for it

Each starts at once and returns a `Work`; `wait` returns the result. A group of one rank is None: a
collective over it does nothing. What PyTorch 2.13 calls reduce_scatter_single and
all_gather_single was reduce_scatter_tensor and all_gather_into_tensor before. What differs from
torch.distributed's own:

    two CPU ranks swap small tensors             half the time of gloo's all-reduce    all_reduce
    on the CPU slices travel as messages         gloo's own work on a copy of all      _exchange
    an error names the operation and its ranks                                         comm_errors
"""
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable

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


def on_hosts(ranks: list[int], hosts: list[str]) -> str:
    """" on node1, node2", the machines of these ranks; "" if the whole job is on one machine."""
    if len(set(hosts)) == 1:
        return ""
    return " on " + ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))


@dataclass
class Work:
    """Communication under way. `wait` waits for it and returns finish(result)."""
    result: torch.Tensor | None
    handles: list = field(default_factory=list)         # of torch.distributed
    operation: str = ""                                 # for errors, with the ranks of the group
    group: object = None
    finish: Callable = lambda result: result

    def wait(self) -> torch.Tensor:
        if self.handles:
            with comm_errors(self.operation, self.group):
                for handle in self.handles:
                    handle.wait()
        return self.finish(self.result)


def _exchange(outgoing: list, incoming: list, group) -> list:
    """Send outgoing[r] to every other rank r of the group and receive incoming[r] from it; returns
    the handles. All ranks must start exchanges in the same order: gloo pairs messages of equal tag
    by order."""
    others = [r for r in range(group.size()) if r != group.rank()]
    return ([dist.isend(outgoing[r], group=group, group_dst=r) for r in others]
            + [dist.irecv(incoming[r], group=group, group_src=r) for r in others])


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> Work:
    """Sum x (or apply `op`) over the group, in place. Two CPU ranks swap small tensors directly, in
    half the time of gloo's all-reduce (`nano` on 2 x 2 x 2 ranks: a step is 10% faster)."""
    if group is None:
        return Work(x)
    small = x.device.type == "cpu" and x.nbytes <= 2 ** 20
    with comm_errors("all-reduce", group):
        if small and group.size() == 2 and op == dist.ReduceOp.SUM:
            received = torch.empty_like(x)
            handles = _exchange([x] * 2, [received] * 2, group)     # uses the other rank's entry
            return Work(received, handles, "all-reduce", group, finish=x.add_)
        return Work(x, [dist.all_reduce(x, op, group, async_op=True)], "all-reduce", group)


def reduce_scatter(x: torch.Tensor, group) -> Work:
    """Cut x along dimension 0 into a slice for each rank. This rank's becomes the sum over ranks,
    in place. On the CPU each rank sends every other one its slice: gloo's own is an all-reduce of
    a copy, with twice the traffic and memory."""
    if group is None:
        return Work(x)
    slices = x.chunk(group.size())
    rank = group.rank()
    with comm_errors("reduce-scatter", group):
        if x.device.type != "cpu":
            handles = [dist.reduce_scatter_single(slices[rank], x, group=group, async_op=True)]
            return Work(slices[rank], handles, "reduce-scatter", group)
        received = [torch.empty_like(slices[rank]) for _ in slices]
        handles = _exchange(slices, received, group)
    del received[rank]                  # no rank sends to itself

    def add_received(total):
        if total.dtype.itemsize > 2:
            for term in received:
                total += term
            return total
        wide = total.float()            # of 16 bits only the whole sum is rounded
        for term in received:
            wide += term
        return total.copy_(wide)
    return Work(slices[rank], handles, "reduce-scatter", group, add_received)


def all_gather(x: torch.Tensor, group) -> Work:
    """Copy each rank's slice of x to all ranks, in place: the reverse of `reduce_scatter`. On the
    CPU by messages too, because gloo gathers into a copy."""
    if group is None:
        return Work(x)
    slices = x.chunk(group.size())
    rank = group.rank()
    with comm_errors("all-gather", group):
        if x.device.type != "cpu":
            handles = [dist.all_gather_single(x, slices[rank], group=group, async_op=True)]
        else:
            handles = _exchange([slices[rank]] * len(slices), slices, group)
    return Work(x, handles, "all-gather", group)


def all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group) -> Work:
    """The first sent[0] rows of x go to rank 0 of the group, the next sent[1] to rank 1, and so on.
    The result is new memory, with received[r] rows from each rank r. A number may be 0."""
    if group is None:
        return Work(x)
    result = x.new_empty(sum(received), *x.shape[1:])
    with comm_errors("all-to-all", group):
        handles = [dist.all_to_all_single(result, x.contiguous(), received, sent, group,
                                          async_op=True)]
    return Work(result, handles, "all-to-all", group)


class WithGradient(torch.autograd.Function):
    """function(x), whose gradient is gradient(dy): autograd does not see communication."""

    @staticmethod
    def forward(ctx, x, function, gradient):
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient(dy), None, None


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
