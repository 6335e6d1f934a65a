"""A step of two tensor-parallel ranks on two machines with a slow link, with and without
--tp-overlap, in turn.

    python -m tools.bench tp_overlap        # as root, on Linux: a machine is a network namespace

Each rank runs this file: `python -m tools.bench.slow_link FOLDER STEPS`. Rank 0 prints one object,
{"off" or "on": [[seconds of a step, seconds that a rank waited, its thread's CPU seconds], ...]},
averages of the ranks. The last two are what the first would be on idle cores.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import train
from base.options import Config
from corpus.shards import SPLITS
from data import TokenDataset
from model import GPTConfig
from parallelism.build import Grid, make_groups
from parallelism.collectives import Work, all_gather_object
from tools.bench.launch import ROOT, run_rank

SHAPE = GPTConfig(vocab_size=257, seq_len=256, n_layer=4, n_head=8, n_embd=256)
FLAGS = dict(tp=2, batch_size=4, micro_batch=4, steps=1, lr=1e-3, device="cpu")


def on_two_machines(rate: str, folder: Path, steps: int) -> dict:
    """What rank 0 prints. `rate`: of the link in each direction, as tc has it (400mbit)."""
    link = f"tc qdisc add dev eth7 root tbf rate {rate} burst 64kb latency 10s"
    machines = []
    for rank in (0, 1):
        variables = dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="10.77.0.1", MASTER_PORT=29500,
                         GLOO_SOCKET_IFNAME="eth7", OMP_NUM_THREADS=1)
        machines.append(subprocess.Popen(
            ["unshare", "--net", "bash", "-c", f"""echo here
             until ip addr add 10.77.0.{rank + 1}/24 dev eth7; do sleep 0.1; done 2> /dev/null
             ip link set lo up && ip link set eth7 up && {link} && exec "$@" """, "bash",
             sys.executable, "-m", "tools.bench.slow_link", str(folder), str(steps)],
            cwd=ROOT, env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE, text=True))
    first, second = machines
    try:
        if [machine.stdout.readline() for machine in machines] != ["here\n"] * 2:
            raise RuntimeError("no network namespaces can be made here: are you root?")
        subprocess.run(["ip", "link", "add", "eth7", "netns", str(first.pid), "type", "veth",
                        "peer", "eth7", "netns", str(second.pid)], check=True)
        return json.loads(first.stdout.read())
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()


def clocks() -> tuple:
    return time.perf_counter(), Work.seconds_waited, time.thread_time()


def measure(folder: Path, steps: int) -> dict:
    grid = Grid(1, 1, 2, dist.get_rank())
    make_groups(grid)
    data = [TokenDataset(str(folder), split, SHAPE.seq_len) for split in SPLITS]
    runs, seen = {}, {}
    for name in ("off", "on"):
        config = Config(out=tempfile.mkdtemp(), tp_overlap=name == "on", **FLAGS)
        runs[name] = train.Run(config, SHAPE, grid, torch.device("cpu"), *data, None)
        seen[name] = []
    batch = runs["off"].loader.next()
    for _ in range(1 + steps):
        for name, run in runs.items():
            dist.barrier()
            before = clocks()
            run.compute_gradients(batch)
            of_ranks = all_gather_object([now - then for now, then in zip(clocks(), before)])
            seen[name].append([sum(values) / 2 for values in zip(*of_ranks)])
    return {name: values[1:] for name, values in seen.items()}         # one to warm up


if __name__ == "__main__":
    run_rank(measure)
