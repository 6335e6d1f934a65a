"""Which device a process computes on."""
import os
import shutil

import torch


def pick_device(name: str, local_rank: int = 0, on_mps: bool = True) -> torch.device:
    """The device of this process. `auto` is the first that is available of CUDA, MPS (Apple's GPU)
    if `on_mps`, and the CPU. Raises ValueError."""
    available = {"cuda": torch.cuda.is_available(),
                 "mps": on_mps and torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    if not available[name]:
        if name == "mps" and not on_mps:
            raise ValueError("--device mps is for one process that needs no float64: give --device "
                             "cpu")
        raise ValueError(f"torch finds no {name.upper()} device here: leave out --device {name}, "
                         f"or give --device cpu")
    if name != "cuda":
        return torch.device(name)
    # A launcher may show each process a GPU of its own, as the only one.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_device(config, job) -> torch.device:
    """The device of a process of train.py with these flags, a processes.Job. Raises ValueError if
    the flags ask for one that cannot be used."""
    on_mps = job.world == 1 and config.dtype != "fp64" and not config.exact     # it lacks float64
    device = pick_device(config.device, job.local_rank, on_mps)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")      # TF32, several times as fast as fp32
    if config.compile and device.type == "cpu":
        compiler = os.environ.get("CXX", "cl" if os.name == "nt" else "g++")
        if shutil.which(compiler) is None:
            raise ValueError("--compile on a CPU needs a C++ compiler: install g++, name another "
                             "in CXX, or leave the flag out")
    return device
