"""Is there memory for a run? startup.py refuses a model whose state is larger than the memory of
the machine or the GPU, before anything is allocated. To a later error of too little memory it adds
which flags take less.
"""
import dataclasses
import os
from collections import Counter
from contextlib import contextmanager, suppress

import torch

from base.errors import out_of_memory
from base.options import Config
from model import GPTConfig
from parallelism.buckets import state_bytes
from parallelism.build import Grid, rank_buckets, rank_parameters
from runtime.layout_checks import check_grid


@contextmanager
def advice_on_memory(config: Config, grid: Grid):
    """To an error of too little memory in the block, add the flags that take less."""
    try:
        yield
    except BaseException as error:
        if out_of_memory(error):
            error.add_note(less_memory(config, grid))
        raise


def less_memory(config: Config, grid: Grid) -> str:
    """The flags that take less memory and can be given here."""
    changes = []
    if config.micro_batch > 1 and not config.exact:         # with --exact it gives other bits
        prime = next(n for n in range(2, config.micro_batch + 1) if config.micro_batch % n == 0)
        smaller = config.micro_batch // prime
        changes.append((f"--micro-batch {smaller} instead of {config.micro_batch}",
                        dict(micro_batch=smaller)))
    if not config.recompute:
        changes.append(("--recompute", dict(recompute=True)))
    if grid.replicas > 1 and config.zero < 3:
        changes.append((f"--zero {config.zero + 1}", dict(zero=config.zero + 1)))
    flags = []
    for text, change in changes:
        with suppress(ValueError):
            check_grid(grid.world, dataclasses.replace(config, **change))
            flags.append(text)
    return f"give {', '.join([*flags, '--tp, --pp or --cp on more processes'])}"


def check_memory(model_config: GPTConfig, grid: Grid, config, dtypes: tuple, device: torch.device,
                 local_world: int) -> None:
    """Raise a ValueError if the state of a rank on this machine is larger than its GPU's memory, or
    what all its ranks keep there, and copy for a save, larger than the machine's. Nothing is
    allocated. Rank 0 calls it: the ranks on its machine are 0 to local_world - 1."""
    limits = []                         # (bytes by kind, bytes available, what to add)
    on_machine = Counter()
    for rank in range(local_world):
        place = grid.at_rank(rank)
        buckets = rank_buckets(model_config, place, config.zero)
        _, longest = rank_parameters(buckets)
        on_device, on_host = state_bytes(buckets, dtypes, config.zero,
                                         config.offload and device.type != "cpu", config.exact)
        if config.eval_only:
            on_device = dict(parameters=on_device["parameters"])
            on_host = {}
        on_machine.update(on_host)
        if device.type == "cuda":
            limits.append((on_device, torch.cuda.mem_get_info(device)[1], "GPUs, give --offload"))
        else:
            on_machine.update(on_device)
        if not config.eval_only and (config.zero > 0 or place.replica == 0):
            moments = (on_device | on_host)["moments"]          # of masters there are half as many
            on_machine["copies for a save"] += 3 * moments // 2
            if device.type == "cuda" and not config.offload:
                # They pass through pinned memory, of which PyTorch keeps a piece of each power of
                # two: together less than twice the one that the longest tensor needs.
                shards = grid.replicas if config.zero > 0 else 1
                tensor = dtypes[1].itemsize * longest // shards
                on_machine["pinned memory"] += 2 << (tensor - 1).bit_length()
    if hasattr(os, "sysconf"):          # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limits.append((on_machine, memory, "machines"))
    for sizes, memory, more in limits:
        if sum(sizes.values()) > memory:
            parts = ", ".join(f"{kind} {size / 1e9:,.1f} GB" for kind, size in sizes.items())
            raise ValueError(f"this model would keep {parts} here, but there are "
                             f"{memory / 1e9:,.1f} GB: raise --tp, --pp or --zero on more {more}, "
                             f"or take a smaller --model")
