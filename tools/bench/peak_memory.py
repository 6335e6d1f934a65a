"""The memory of four processes at the peak of a step, beside the plan's estimate."""
import functools
import gc
import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import train
from corpus.shards import SPLITS
from data import TokenDataset
from model import GPTConfig
from parallelism.build import Grid, make_groups
from runtime import evaluation, run_log
from tools.bench.launch import random_data
from tools.plan.flags import PlanConfig
from tools.plan.memory import memory_bytes
from tools.plan.stages import Stage

# What a process holds at its peak: 101M parameters on four replicas; the activations of a narrow
# model, which computes little, on four stages of a pipeline; and long sequences on four ranks.

BIG = GPTConfig(vocab_size=257, seq_len=32, n_layer=8, n_head=8, n_embd=1024)
NARROW = GPTConfig(vocab_size=257, seq_len=128, n_layer=8, n_head=4, n_embd=256)
MICROBATCHES = dict(pp=4, batch_size=256, micro_batch=16)
PIPELINES = {"gpipe": {}, "1f1b": dict(pp_schedule="1f1b"), "recompute": dict(recompute=True),
             "interleaved": dict(pp_schedule="interleaved", pp_chunks=2),
             "zb-h1": dict(pp_schedule="zb-h1")}
CONTEXT = GPTConfig(vocab_size=257, seq_len=8192, n_layer=4, n_head=4, n_embd=256)
CONTEXTS = {"8,192 positions": (8192, 1), "8,192 positions, cp 4": (8192, 4),
            "24,576 positions, cp 4": (24_576, 4)}
KEPT = ("parameters", "gradients", "masters", "moments")        # from the start to the end


def resident(what):
    """Bytes of this process, now (VmRSS) or at most since the last reset (VmHWM)."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak_memory(config, cfg, store, rank):
    """(bytes at the peak of a step, less what was there before the model was made; the plan's:
    state, buffers, activations) of this rank of four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    grid = Grid(4 // (config.tp * config.pp * config.cp), config.pp, config.tp, rank,
                chunks=config.pp_chunks, cp=config.cp, ep=config.ep)
    make_groups(grid)

    def step(cfg):
        train_data, val_data = (TokenDataset(config.data, split, cfg.seq_len)
                                for split in SPLITS)
        run = train.Run(config, cfg, grid, torch.device("cpu"), train_data, val_data, None)
        run.writer.submit = lambda *_: None
        run.log = run_log.RunLog(mock.Mock())
        with mock.patch.object(evaluation, "evaluate_source", lambda *_: 0.0):
            run.stop = mock.Mock(number=None, agreed=False)
            run.train()
    # Libraries allocate at their first use.
    step(GPTConfig(vocab_size=257, seq_len=16, n_layer=config.pp * config.pp_chunks, n_head=8,
                   n_embd=32))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")           # VmHWM starts over
    before = resident("VmRSS")
    step(cfg)
    peak = resident("VmHWM") - before
    sizes = memory_bytes(Stage(cfg, config, grid), on_gpu=False)
    dist.barrier()
    return peak, (sum(sizes[kind] for kind in KEPT), sizes["buffers"], sizes["activations"])


def peak_of(cfg, folder, **flags):
    """`peak_memory` of each of four ranks, in fresh processes, whose freed memory goes back to the
    system at once."""
    config = PlanConfig(**dict(
        data=str(random_data(folder, cfg.vocab_size, cfg.seq_len + 1)), out=str(folder), steps=1,
        batch_size=8, micro_batch=2, lr=1e-3, eval_every=0, save_every=0, device="cpu") | flags)
    spawn = multiprocessing.get_context("spawn")            # malloc reads its environment first
    # MKL, on Intel's processors, would keep its buffers: 5 MB that no formula has.
    with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1",
                         MKL_DISABLE_FAST_MM="1"), \
            tempfile.TemporaryDirectory() as store, spawn.Pool(4) as processes:
        measure = functools.partial(peak_memory, config, cfg, f"{store}/store")
        return processes.map_async(measure, range(4), chunksize=1).get(500)
