"""train.py, except that its processes may share a GPU, and that an older PyTorch will do.

    MEMORY_FILE=memory.json torchrun --nproc_per_node=2 -m tools.bench.shared_gpu --tp 2

NCCL refuses two ranks on one GPU of a machine. So each rank names a machine of its own, and they
talk through sockets. launch.py starts it for all measurements. Rank 0 writes its use of memory into
MEMORY_FILE. With POISON_FREED_PARAMETERS, parameters that ZeRO 3 frees become NaN first: a use
after that shows in the loss.
"""
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import train
from base import devices
from parallelism.zero import FlatParameters

POISON = "POISON_FREED_PARAMETERS"


def accept_older_pytorch() -> None:
    """Names of PyTorch 2.13 that an older one lacks."""
    for new, old in (("all_gather_single", "all_gather_into_tensor"),
                     ("reduce_scatter_single", "reduce_scatter_tensor")):
        if not hasattr(dist, new):
            setattr(dist, new, getattr(dist, old))


def write_memory() -> None:
    """Rank 0: the peak of the allocator in GB, and how often it had to free its cache."""
    used = dict(peak=None, retries=None)
    if torch.cuda.is_initialized():
        used = dict(peak=torch.cuda.max_memory_allocated() / 1e9,
                    retries=torch.cuda.memory_stats()["num_alloc_retries"])
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["MEMORY_FILE"]).write_text(json.dumps(used))


def reshard_with_nan(flat, buckets, reshard=FlatParameters.reshard) -> None:
    for bucket in buckets:
        if flat.zero == 3 and bucket.data.untyped_storage().size() > 0:
            bucket.data.fill_(math.nan)
    reshard(flat, buckets)


if __name__ == "__main__":
    accept_older_pytorch()
    sys.argv[0] = "train.py"
    os.environ.update(NCCL_HOSTID=os.environ.get("RANK", "0"), NCCL_SOCKET_IFNAME="lo")
    devices.assert_own_gpu = lambda device: None
    if POISON in os.environ:
        FlatParameters.reshard = reshard_with_nan
    try:
        train.main()
    finally:
        write_memory()
