"""The life of a run's process, from the launcher's variables to its exit status: a run is a block
of `running`.

Exit status: 0 done; 1 the run failed; 2 usage error, reported in one line. A run that has saved
after a signal exits with 0 under torchrun, and by that signal without.
"""
import json
import os
import re
import socket
import sys
import time
import traceback
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from base.agreement import all_gather_object
from base.errors import RunError, first_line, out_of_memory, print_error, refuse


def fatal_message(error: Exception) -> str | None:
    """One line for a lost peer, without gloo's source file and advice, for NCCL's own failure here,
    or for too little memory; None for errors that need a traceback."""
    if out_of_memory(error):
        return first_line(error)
    if isinstance(error, dist.DistError):
        reason = re.sub(r"(?<=: )\[\S+\] |\. This is typically.*", "", first_line(error))
        if "ncclUnhandledCudaError" in str(error):
            return f"{reason}; docs/troubleshooting.md, NCCL, has remedies"
        return (f"{reason}; another rank has failed, was killed, or does not answer: see its own "
                f"message, then give the same command again")
    return None


def rendezvous(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The key-value store through which the ranks of this start find each other.

    torchrun's store outlives a restart of the group and then holds the addresses of dead processes
    (pytorch issue 135712). Therefore each process draws a name. Rank 0 publishes the list of names
    that it sees until every other process has confirmed its own; its name prefixes all later keys.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    deadline = time.monotonic() + timeout.total_seconds()
    process_name = uuid.uuid4().hex
    store.set(f"rank {rank}", process_name)
    while time.monotonic() < deadline:
        if rank == 0:
            names = [store.get(f"rank {r}").decode() for r in range(world)]
            store.set("names", json.dumps(names))
            done = store.check([f"{process_name} {name}" for name in names[1:]])
        else:
            names = json.loads(store.get("names"))
            done = len(names) == world and names[rank] == process_name
            if done:
                store.set(f"{names[0]} {process_name}", "")
        if done:
            return dist.PrefixStore(names[0], store)
        time.sleep(0.02)
    raise RuntimeError(f"no answer in {timeout.total_seconds():.0f} s")


def join_group(rank: int, world: int, device: torch.device, timeout: timedelta) -> None:
    """Initialize torch.distributed."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=rendezvous(rank, world, timeout), rank=rank,
                                world_size=world, timeout=timeout)
    except RuntimeError as error:
        raise dist.DistError(f"start of the process group: {error}") from error


@dataclass(frozen=True)
class Job:
    """This process among those of its job, as torchrun numbers them, and on its machine."""
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_environment(cls) -> "Job":
        """Raises ValueError if its variables cannot be those of one job, as after an `export`."""
        def read(name, default, low=0, below=2 ** 31):
            text = os.environ.get(name) or str(default)
            if not text.isdecimal() or not low <= int(text) < below:
                limit = "" if below == 2 ** 31 else f" and below {below}"
                raise ValueError(f"{name} is {text}, but must be at least {low}{limit}: start "
                                 f"several processes by torchrun, which sets it, and unset it to "
                                 f"start one")
            return int(text)

        world = read("WORLD_SIZE", 1, low=1)
        if world > 1:
            missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")
                       if not os.environ.get(name)]
            refuse([(missing, f"WORLD_SIZE is {world}, but {', '.join(missing)} not set: start "
                              f"{world} processes by torchrun --nproc_per_node={world} train.py, "
                              f"which sets them all, and unset WORLD_SIZE to start one")])
            read("MASTER_PORT", "", low=1, below=2 ** 16)
        return cls(read("RANK", 0, below=world), world, read("LOCAL_RANK", 0, below=world),
                   read("LOCAL_WORLD_SIZE", 1, low=1))


def refuse_tasks_without_ranks() -> None:
    """Raise ValueError in a task of several that srun has started, not torchrun: each would train
    alone. (A batch script is no such task, whatever its SLURM_NTASKS.) One task tells it."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "RANK" not in os.environ:
        if os.environ.get("SLURM_PROCID", "0") != "0":
            time.sleep(5)           # srun may end all tasks when one exits: the first prints first
            sys.exit(2)
        raise ValueError(f"SLURM_STEP_NUM_TASKS is {tasks} but RANK is not set, so each task would "
                         f"train alone: start through torchrun, one task on each machine, as in "
                         f"the Slurm script of docs/clusters.md")


@contextmanager
def running(job: Job, device: torch.device, timeout: timedelta):
    """The life of one process after its flags, up to its exit status. Yields an ExitStack, which is
    left when the block ends, also by an error."""
    # NCCL: a group's first operation connects its ranks for all later ones (`build.connect`).
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    # PyTorch: let communication kernels start before queued matrix products.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    status = 0
    try:
        if job.world > 1:
            join_group(job.rank, job.world, device, timeout)
        try:
            with ExitStack() as stack:
                yield stack
        except RunError as error:               # every rank raises the same error
            status = error.status
            if job.rank == 0:
                print_error(error)
            all_gather_object(None)             # wait until rank 0 has printed
        if job.world > 1:
            dist.destroy_process_group()
    except Exception as error:
        message = fatal_message(error)
        if message is not None:
            host = f" on {socket.gethostname()}" if job.world > job.local_world else ""
            print_error(f"rank {job.rank}{host}: {message}")
        elif job.world == 1:
            raise
        else:
            traceback.print_exc()
        os._exit(1)                 # at once, so that the other ranks notice
    sys.exit(status)


def exit_for_mistake(error: ValueError, job: Job) -> None:
    """Tell a mistake that needs no communication, on one rank of a machine, and exit with 2."""
    if job.rank > 0:
        time.sleep(5)               # torchrun ends all ranks when one exits: rank 0 prints first
    if job.local_rank == 0:
        print_error(error)
    sys.exit(2)
