"""train.py as several processes on one GPU, against the CPU. gpu.py calls it.

`python -m tools.bench.shared_gpu` is train.py, except that its processes may share a GPU (NCCL
allows it with a setting), and that an older PyTorch will do.
"""
import json
import math
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import train
from parallelism.zero import FlatParameters
from runtime import devices
from tools.bench.programs import ROOT, finished, random_data, rows_of

POISON = "POISON_FREED_PARAMETERS"              # in the environment: they become NaN (`main`)
NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"     # PyTorch's: freed memory is unmapped at once
# Processes, flags, environment.
LAYOUTS = (
    (4, "--zero 0", {}), (4, "--zero 1", {}), (4, "--zero 2", {}), (4, "--zero 3", {}),
    (2, "--tp 2", {}), (2, "--tp 2 --sequence-parallel", {}),
    (4, "--pp 4", {}), (4, "--pp 4 --pp-schedule 1f1b", {}),
    (2, "--pp 2 --pp-schedule interleaved --pp-chunks 2", {}),
    (2, "--pp 2 --pp-schedule zb-h1", {}),
    (2, "--cp 2", {}), (4, "--cp 4 --dtype bf16", {}),      # two kernels of attention
    (8, "--tp 2 --pp 2 --zero 2", {}), (8, "--tp 2 --pp 2 --zero 2 --dtype bf16", {}),
    (4, "--tp 2 --sequence-parallel --compile", {}), (4, "--tp 2 --pp 2 --exact", {}),
    (2, "--zero 2", {NO_CACHE: "1"}), (2, "--zero 3", {NO_CACHE: "1"}),
    (2, "--zero 3", {POISON: "1"}))
SHAPE = ("--n-layer", 4, "--n-head", 4, "--n-embd", 64, "--seq-len", 32, "--batch-size", 16,
         "--micro-batch", 2, "--steps", 8, "--lr", 1e-3, "--warmup-steps", 2)


def run_train_py(processes: int, out: str, *flags, seconds: float = 900, **environment) -> dict:
    """Run train.py by `main` below, without saves -> its use of memory."""
    finished(processes, "-m", "tools.bench.shared_gpu", "--out", out, "--save-every", 0,
             "--eval-every", 0, *flags, seconds=seconds, PYTHONPATH=str(ROOT),
             NCCL_MULTI_RANK_GPU_ENABLE="1", MEMORY_FILE=str(Path(out) / "memory.json"),
             **environment)
    return json.loads((Path(out) / "memory.json").read_text())


def compare_layout(device: str, layout: tuple, references: dict, folder: Path,
                   seconds: float) -> dict:
    """A row on a layout (processes, flags, environment): the largest relative differences from one
    process. `references` keeps what that has found. A program may take so many seconds."""
    def trained(processes, device, flags, environment):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            run_train_py(processes, out, "--data", random_data(folder, 257), *SHAPE, "--device",
                         device, *flags.split(), seconds=seconds, NVIDIA_TF32_OVERRIDE="0",
                         **environment)
            return np.array([(row["loss"], row["grad_norm"]) for row in rows_of(out)], float)
    processes, flags, environment = layout
    reference = ("cpu", "")
    bound = 1e-5
    if "bf16" in flags:
        reference = ("cpu", "--dtype bf16")
        bound = 8e-4
    if "--exact" in flags:
        reference = (device, "--exact")
        bound = 0.0
    row = dict(processes=processes, flags=flags, environment=" ".join(environment))
    try:
        if reference not in references:
            references[reference] = trained(1, *reference, {})
        found = trained(processes, device, flags, environment)
    except RuntimeError as error:
        return row | dict(error=str(error))
    loss, norm = abs(found / references[reference] - 1).max(0)
    return row | dict(loss=loss, norm=norm, bound=bound, right=bool(loss <= bound))


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


def main() -> None:
    """train.py, except that processes may share a GPU; rank 0 writes its use of memory into
    MEMORY_FILE. With POISON, parameters that ZeRO 3 frees become NaN first: a use after that shows
    in the loss."""
    free = FlatParameters.reshard

    def reshard(flat, buckets):
        for bucket in buckets:
            if flat.zero == 3 and bucket.data.untyped_storage().size() > 0:
                bucket.data.fill_(math.nan)
        free(flat, buckets)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["train.py", *sys.argv[1:]]))
        stack.enter_context(mock.patch.object(devices, "assert_own_gpu", lambda device: None))
        if POISON in os.environ:
            stack.enter_context(mock.patch.object(FlatParameters, "reshard", reshard))
        stack.callback(write_memory)        # train.main ends by sys.exit
        train.main()


if __name__ == "__main__":
    accept_older_pytorch()
    main()
