"""What the ranks of a run know and fail at together: every rank calls these functions alike, and
gets the same answer or raises the same RunError."""
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Callable

import torch.distributed as dist

from base.errors import RunError


def all_gather_object(value) -> list:
    """The value of every rank, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(values, value)
    except RuntimeError as error:
        raise dist.DistError(f"exchange with all ranks: {error}") from error
    return values


def is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def print_rank0(line: str, end="\n") -> None:
    """Print one line on rank 0. A closed pipe (`| head`) does not stop the run."""
    if is_rank0():
        try:
            print(line, end=end, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def all_ranks(action: Callable, status: int = 2):
    """Run action() on every rank and return its result here. If it raises a ValueError, OSError or
    RunError on any rank, every rank raises the same RunError, with the message of the first such
    rank and its status (`status` for a ValueError or OSError).

    The action may take longer than --timeout, on a slow disk: it runs in a thread, and meanwhile
    the ranks exchange messages, which show that each is alive. It must not communicate. Another
    error is raised at once, on its rank alone: the actions of the others may wait for it."""
    def attempt() -> tuple:
        try:
            return action(), None
        except (ValueError, OSError, RunError) as error:
            return None, (str(error), getattr(error, "status", status))

    future = ThreadPoolExecutor(1).submit(attempt)
    ended = [None]                          # of each rank whose action has: (machine, failure)
    while None in ended:
        wait([future], timeout=1)
        outcome = (socket.gethostname(), future.result()[1]) if future.done() else None
        ended = all_gather_object(outcome)
    for rank, (host, failure) in enumerate(ended):
        if failure is not None:
            message, status = failure
            if rank > 0:
                on_host = f" on {host}" if len({host for host, _ in ended}) > 1 else ""
                message = f"rank {rank}{on_host}: {message}"
            raise RunError(message, status)
    return future.result()[0]


def on_rank0(action: Callable):
    """Run action() on rank 0 and return its result on every rank; errors as in `all_ranks`."""
    return all_gather_object(all_ranks(lambda: action() if is_rank0() else None))[0]


def assert_equal_across_ranks(value, message: str) -> None:
    """Every rank raises a RunError with this message unless all ranks have the same value."""
    values = all_gather_object(value)
    if values.count(value) < len(values):
        raise RunError(message, 2)
