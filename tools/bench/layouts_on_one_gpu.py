"""train.py in many layouts, as several processes on one GPU, against one process. gpu.py calls it.
"""
from pathlib import Path

import numpy as np

from tools.bench.launch import train_py
from tools.bench.shared_gpu import POISON

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


def compare_layout(device: str, layout: tuple, references: dict, folder: Path,
                   seconds: float) -> dict:
    """A row on a layout (processes, flags, environment): the largest relative differences from one
    process. `references` keeps what that has found. A program may take so many seconds."""
    def trained(processes, device, flags, environment):
        rows, _ = train_py(processes, folder, 257, *SHAPE, "--device", device, *flags.split(),
                           seconds=seconds, NVIDIA_TF32_OVERRIDE="0", **environment)
        return np.array([(row["loss"], row["grad_norm"]) for row in rows], float)
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
