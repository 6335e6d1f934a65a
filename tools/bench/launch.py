"""Start the programs that are measured: train.py, PyTorch's stack (peer.py), and the parts of
gpu.py.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def random_data(folder: Path, vocab: int, val_tokens: int = 2049) -> Path:
    """A directory of shards of random tokens."""
    path = Path(folder) / f"random_{vocab}_{val_tokens}"
    draw = np.random.default_rng(0)
    if not path.exists():
        path.mkdir()
        for split, count in (("train", 400_000), ("val", val_tokens)):
            header = np.array([20240520, 1, count], "<i4").tobytes().ljust(1024, b"\0")
            tokens = draw.integers(vocab, size=count).astype("<u2").tobytes()
            (path / f"{split}_000000.bin").write_bytes(header + tokens)
        (path / "meta.json").write_text(json.dumps(dict(
            tokenizer="bytes", vocab_size=vocab, bytes_per_token=1.0, fingerprint="random")))
    return path


def run(command: list, seconds: float, own_group: bool = False, **options) -> tuple:
    """What a program prints, and its error if it failed or was stopped after `seconds`; with
    `own_group` together with what it has started."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors, text=True,
                                   start_new_session=own_group, **options)
        error = None
        try:
            if process.wait(seconds) != 0:
                errors.seek(0)
                error = errors.read().strip() or f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
            end(process, os.killpg if own_group else os.kill)
        out.seek(0)
        return out.read(), error


def end(process: subprocess.Popen, kill) -> None:
    kill(process.pid, signal.SIGTERM)
    try:
        process.wait(60)                # torchrun needs 30 seconds to end its processes
    except subprocess.TimeoutExpired:
        kill(process.pid, signal.SIGKILL)
        process.wait()


def finished(processes: int, *command, seconds: float = 900, **environment) -> str:
    """Standard output of a Python script, in one process on all cores, or by torchrun. Raises
    RuntimeError if it fails or takes longer."""
    torchrun = []
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d",
                    "--rdzv-endpoint=localhost:0", f"--nproc_per_node={processes}"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    text, error = run([sys.executable, *torchrun, *map(str, command)], seconds,
                      env=inherited | environment)
    if error is not None:
        raise RuntimeError(error)
    return text


def train_py(processes: int, folder: Path, vocab: int, *flags, **options) -> tuple[list, dict]:
    """Run train.py, by shared_gpu.py, on random tokens and without saves -> the steps in its
    metrics.jsonl, and rank 0's use of memory. `options` are those of `finished`."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        memory = Path(out) / "memory.json"
        finished(processes, "-m", "tools.bench.shared_gpu", "--data", random_data(folder, vocab),
                 "--out", out, "--save-every", 0, "--eval-every", 0, *flags,
                 MEMORY_FILE=str(memory), **options)
        lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line], json.loads(memory.read_text())


def run_rank(measure) -> None:
    """One rank of a program whose arguments are a folder and a number: rank 0 prints what
    measure(folder, number) returns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(Path(sys.argv[1]), int(sys.argv[2]))
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def peer(processes: int, seconds: float = 900, **work) -> dict:
    """What peer.py measures; `work` are arguments of its `train_plain`."""
    return json.loads(finished(processes, "-m", "tools.bench.pytorch_stack", json.dumps(work),
                               seconds=seconds))


def collect(command: list[str], seconds: float) -> dict:
    """Run a part of gpu.py, which prints each row of its tables as a line [title, {column: value}]
    as soon as it has found it -> {title: rows}, and its error."""
    started = time.monotonic()
    text, error = run(command, seconds, own_group=True)
    tables = {}
    for line in text.splitlines():
        if line.startswith('["'):
            title, row = json.loads(line)
            tables.setdefault(title, []).append(row)
    return dict(seconds=time.monotonic() - started, tables=tables, error=error)
