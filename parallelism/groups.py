"""The process groups of a run, on gloo or NCCL. train.py makes them here.

They are those of parallel.make_grid, with a timeout and a name for errors; only a group's members
create it. On GPUs all connections are made before the first step.
"""
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from parallelism.collectives import all_gather_object, all_reduce, on_hosts
from parallelism.pipeline import Message, start_messages


def make_groups(grid, device=torch.device("cpu"), timeout: timedelta | None = None) -> None:
    """Create the groups of a Grid. An operation waits `timeout` for another rank (None: 30
    minutes)."""
    grid.hosts = all_gather_object(socket.gethostname())
    backend = "gloo"
    group_timeout = timeout
    if device.type != "cpu":
        backend = "nccl"
        if timeout is not None:
            # NCCL's clock starts with the operation; that of collectives.to_host, which should
            # report first, starts later, when the host reads the result.
            group_timeout = 2 * timeout
    # (torch names a group after the number of groups that a rank has. "embedding" comes last,
    # because ranks in the middle of a pipeline are in none.)
    for kind, rows in grid.members().items():
        for ranks in rows:
            if grid.rank in ranks and len(set(ranks)) > 1:
                grid.groups[kind] = dist.new_group(
                    ranks, timeout=group_timeout, backend=backend, use_local_synchronization=True,
                    group_desc=f"ranks {ranks}{on_hosts(ranks, grid.hosts)}")
    if device.type != "cpu":
        connect(grid, device)
    # For checkpoints, which a thread sends while training goes on. All ranks make it, so its name
    # does not depend on how many groups a rank has. After `connect`: gloo cannot sum GPU tensors.
    if grid.world > 1:
        grid.groups["save"] = dist.new_group(timeout=timeout, backend="gloo",
                                             group_desc="all ranks")


def connect(grid, device: torch.device) -> None:
    """NCCL connects two ranks at their first message, and connecting waits for all work queued on
    the device. If that work is a receive whose sender is itself waiting to connect, both hang (seen
    with GPipe on two H100s). So connect everything first (see also `processes.run_process`)."""
    x = torch.zeros(grid.tp, device=device)         # tp ranks send a part of a message each
    for group in grid.groups.values():
        all_reduce(x, group).wait()
    messages = [Message(sending, (kind, 0, chunk), x) for sending in (True, False)
                for kind in "FB" for chunk in range(grid.chunks)]
    for work in start_messages(grid, messages):
        work.wait()
    torch.get_device_module(device).synchronize()
