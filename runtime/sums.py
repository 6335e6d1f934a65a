"""Sums over all ranks, which also tell every rank of a signal in the same step. train.py and
evaluation.py call `sum_across_ranks` with their numbers.
"""
import math

import torch

from parallelism.collectives import all_reduce, sum_dtype, to_host


def sum_across_ranks(run, local: dict) -> dict:
    """Sum each tensor of `local` over all ranks of a train.Run -> {name: a number, or a list of the
    rows of a matrix}. Waits for the other ranks, at most --timeout. One more number is summed on
    the way: how many ranks have received a signal."""
    has_signal = float(run.stop.number is not None)
    tensors = [*local.values(), scalar(has_signal, run.device)]
    numbers = torch.cat([x.flatten() for x in tensors])
    sums = all_reduce(numbers, run.grid.groups["world"]).wait()
    timeout = run.config.timeout if run.grid.world > 1 else math.inf
    parts = to_host(sums, timeout).split([x.numel() for x in tensors])
    *totals, signals = [part.view_as(x).tolist() for part, x in zip(parts, tensors)]
    run.stop.agreed = signals > 0
    return dict(zip(local, totals))


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """A tensor of shape (), in the dtype used for sums."""
    return torch.full((), value, dtype=sum_dtype(device), device=device)
