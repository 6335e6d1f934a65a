"""Save and restore a run as a file and as a folder, in turn.

    torchrun --nproc_per_node=8 -m tools.bench.checkpoint_formats FOLDER PAIRS

Rank 0 prints one object: {format: {pause, write, verify, restore: [seconds], bytes: number}}.
`pause` is what training waits; `write` ends when the checkpoint has its name. What is read was just
written, so it comes from memory if it fits.
"""
import time
from pathlib import Path

import torch
import torch.distributed as dist

import train
from corpus.shards import SPLITS
from data import TokenDataset
from model import GPTConfig
from parallelism.build import Grid, make_groups
from runtime import run_state
from runtime.checkpoint_writer import Writer
from runtime.directory import latest_valid, load_state
from runtime.folder_writer import FolderWriter
from tools.bench.launch import random_data, run_rank
from tools.plan.flags import PlanConfig

SHAPE = GPTConfig(vocab_size=257, seq_len=128, n_layer=10, n_head=8, n_embd=512)    # 31.7M
LAYOUT = dict(tp=2, pp=2, zero=1)


def timed(action) -> tuple:
    """(the result, the seconds until all ranks have it)"""
    dist.barrier()
    start = time.perf_counter()
    result = action()
    dist.barrier()
    return result, time.perf_counter() - start


def size_of(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def measure(folder: Path, pairs: int) -> dict:
    config = PlanConfig(data=str(random_data(folder, SHAPE.vocab_size, SHAPE.seq_len + 1)),
                        out=str(folder), steps=1, batch_size=8, micro_batch=1, lr=1e-3,
                        device="cpu", timeout=600, **LAYOUT)
    grid = Grid(dist.get_world_size() // 4, 2, 2, dist.get_rank())
    make_groups(grid)
    run = train.Run(config, SHAPE, grid, torch.device("cpu"),
                    *(TokenDataset(config.data, split, SHAPE.seq_len) for split in SPLITS), None)
    writers = {form: kind(folder / form, 1, SHAPE, run.flat, config.timeout)
               for form, kind in (("file", Writer), ("folder", FolderWriter))}
    seen = {form: dict(pause=[], write=[], verify=[], restore=[]) for form in writers}
    for _ in range(1 + pairs):
        for form, run.writer in writers.items():
            start = time.perf_counter()
            _, pause = timed(lambda: run_state.submit(run, run_state.Progress.of(run)))
            run.writer.wait(required=True)
            dist.barrier()
            seen[form]["pause"].append(pause)
            seen[form]["write"].append(time.perf_counter() - start)
            path = folder / form / ("latest.pt" if form == "file" else "latest")
            _, verify = timed(lambda: latest_valid([path]))
            _, restore = timed(lambda: run.restore(load_state(path)))
            seen[form]["verify"].append(verify)
            seen[form]["restore"].append(restore)
            seen[form]["bytes"] = size_of(path)
    return {form: {what: values[1:] if isinstance(values, list) else values    # one to warm up
                   for what, values in columns.items()} for form, columns in seen.items()}


if __name__ == "__main__":
    run_rank(measure)
