"""train.py in many layouts, as several processes on one GPU, against one process. gpu.py calls it.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench.launch import train_py
from tools.bench.shared_gpu import POISON


class Layout(NamedTuple):
    processes: int
    flags: str
    model: str = ""             # flags of the process that it is compared with, too
    environment: dict = {}


NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"     # PyTorch's: freed memory is unmapped at once
BF16 = "--dtype bf16"
# In fp32 the CPU and the GPU would soon choose other experts.
MIXTURE = "--model moe-nano --dtype fp64"
EXACT_MIXTURE = "--model moe-nano --exact"
LAYOUTS = (
    Layout(4, "--zero 0"), Layout(4, "--zero 1"), Layout(4, "--zero 2"), Layout(4, "--zero 3"),
    Layout(2, "--tp 2"), Layout(2, "--tp 2 --sequence-parallel"),
    Layout(4, "--ep 4 --zero 3", MIXTURE), Layout(4, "--ep 2 --tp 2", MIXTURE),
    Layout(4, "--ep 2 --pp 2", EXACT_MIXTURE), Layout(4, "--tp 2 --pp 2", "--exact"),
    Layout(4, "--pp 4"), Layout(4, "--pp 4 --pp-schedule 1f1b"),
    Layout(2, "--pp 2 --pp-schedule interleaved --pp-chunks 2"),
    Layout(2, "--pp 2 --pp-schedule zb-h1"),
    Layout(2, "--cp 2"), Layout(4, "--cp 4", BF16),         # two kernels of attention
    Layout(8, "--tp 2 --pp 2 --zero 2"), Layout(8, "--tp 2 --pp 2 --zero 2", BF16),
    Layout(4, "--tp 2 --sequence-parallel --compile"),
    Layout(2, "--zero 2", environment={NO_CACHE: "1"}),
    Layout(2, "--zero 3", environment={NO_CACHE: "1"}),
    Layout(2, "--zero 3", environment={POISON: "1"}))
SHAPE = ("--n-layer", 4, "--n-head", 4, "--n-embd", 64, "--seq-len", 32, "--batch-size", 16,
         "--micro-batch", 2, "--steps", 8, "--lr", 1e-3, "--warmup-steps", 2)


def bound_of(model: str) -> float:
    """The largest relative difference of a loss."""
    for flag, bound in (("--exact", 0.0), (BF16, 8e-4), ("fp64", 1e-10)):
        if flag in model:
            return bound
    return 1e-5


def compare_layout(device: str, layout: Layout, references: dict, folder: Path,
                   seconds: float) -> dict:
    """A row on a layout: the largest relative differences from one process. `references` keeps
    what that has found. A program may take so many seconds."""
    def trained(processes, device, flags, environment):
        rows, _ = train_py(processes, folder, 257, *SHAPE, "--device", device, *flags.split(),
                           seconds=seconds, NVIDIA_TF32_OVERRIDE="0", **environment)
        return np.array([(row["loss"], row["grad_norm"]) for row in rows], float)
    flags = f"{layout.model} {layout.flags}"
    row = dict(processes=layout.processes, flags=flags.strip(),
               environment=" ".join(layout.environment))
    bound = bound_of(layout.model)
    try:
        if layout.model not in references:
            other = "cpu" if bound > 0 else device
            references[layout.model] = trained(1, other, layout.model, {})
        found = trained(layout.processes, device, flags, layout.environment)
    except RuntimeError as error:
        return row | dict(error=str(error))
    loss, norm = abs(found / references[layout.model] - 1).max(0)
    return row | dict(loss=loss, norm=norm, bound=bound, right=bool(loss <= bound))
