"""Start what is measured: train.py on random tokens, and PyTorch's own stack.

    SEEN=seen.json python -m tools.bench.launch --steps 3

is train.py that writes to SEEN, a file, the peak of its GPU's memory in GB and, with PROFILE=1,
torch.profiler's table of its kernels. With KILL_IN_STEP=7 the last rank kills itself there.
"""
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train
from base.commandline import words_of
from corpus.shards import append_tokens
from model import GPTConfig
from tools.metrics import Run, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300                   # the longest that a program may take


@dataclass(frozen=True)
class Work:
    """How much is measured, on a device."""
    device: str
    vocab: int
    shape: dict
    dtype: str
    batch: int                  # sequences of a step on each replica
    microbatches: tuple         # of train.py and of memory, in sequences
    steps: int                  # of a run; medians are of those after the warm-up
    warmup: int = 0
    turns: int = 1
    ranks: int = 1              # where several are measured

    @property
    def cfg(self) -> GPTConfig:
        return GPTConfig(self.vocab, **self.shape)

    def compiled(self, flags: str) -> str:
        """These flags; on a CPU, where it takes minutes, without --compile."""
        return flags if self.device == "cuda" else flags.replace("--compile", "").strip()


class Row(NamedTuple):
    """A line of the table."""
    what: str
    result: str
    bound: str = ""
    ok: bool = True


def random_data(folder: Path, vocab: int) -> Path:
    """A directory of shards of random tokens."""
    path = Path(folder) / f"random_{vocab}"
    draw = np.random.default_rng(0)
    if not (path / "meta.json").exists():
        path.mkdir(exist_ok=True)
        for split, count in (("train", 400_000), ("val", 2049)):
            append_tokens(path, split, draw.integers(vocab, size=count).astype("<u2"), 0, count)
        (path / "meta.json").write_text(json.dumps(dict(
            tokenizer="bytes", vocab_size=vocab, bytes_per_token=1.0, fingerprint="random")))
    return path


def train_py(work: Work, folder: Path, processes: int, *flags, out=None,
             **environment) -> tuple[Run, dict]:
    """Run train.py on random tokens -> (its metrics.jsonl, what it has written to SEEN). (The last
    of repeated flags counts.)"""
    out = Path(out or tempfile.mkdtemp(dir=folder))
    settings = work.shape | dict(
        data=random_data(folder, work.vocab), out=out, save_every=0, eval_every=0, lr=1e-3,
        batch_size=work.batch * processes, micro_batch=work.microbatches[0], dtype=work.dtype,
        device=work.device, steps=work.steps)
    finished(folder, processes, "tools.bench.launch", *words_of(settings), *flags,
             SEEN=str(out / "seen.json"), **environment)
    return read_metrics(out), json.loads((out / "seen.json").read_text())


def finished(folder: Path, processes: int, *command, **environment) -> str:
    """Standard output of a Python module with arguments, in one process on all cores, or by
    torchrun. Raises RuntimeError if it fails or takes longer than SECONDS; what it has said then
    stands in log.txt."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--rdzv-backend=c10d",
                  "--rdzv-endpoint=localhost:0", f"--nproc_per_node={processes}"]
    start += ["-m", *map(str, command)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    process = subprocess.Popen(start, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=inherited | environment,
                               start_new_session=True)
    try:
        text, error = process.communicate(timeout=SECONDS)
        status = f"exit status {process.returncode}: {first_error(error)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)      # with what torchrun has started
        _, error = process.communicate()
        status = f"stopped after {SECONDS} s"
    if process.returncode != 0:
        with open(Path(folder, "log.txt"), "a") as log:
            print("$", shlex.join(start), environment, error, status, sep="\n", file=log)
        raise RuntimeError(status)
    return text


def first_error(text: str) -> str:
    """The first line of standard error that names one. (torchrun's own come after it.)"""
    lines = text.strip().splitlines() or [""]
    errors = [line for line in lines if "Error" in line or line.startswith("train.py: ")]
    return (errors or lines[-1:])[0].strip()


class Killed(train.Run):
    """The run of a rank that ends in the middle of a step, as if its machine had failed."""

    def update(self, *arguments):
        if self.step == int(os.environ["KILL_IN_STEP"]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().update(*arguments)


if __name__ == "__main__":
    sys.argv[0] = "train.py"
    rank = int(os.environ.get("RANK", 0))
    if "KILL_IN_STEP" in os.environ and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        train.Run = Killed
    profiler = torch.profiler.profile() if "PROFILE" in os.environ else nullcontext()
    try:
        with profiler:
            train.main()
    finally:                            # it ends by sys.exit
        seen = dict(peak=torch.cuda.max_memory_allocated() / 1e9)       # 0 on a CPU
        if "PROFILE" in os.environ:
            kind = "cuda" if torch.cuda.is_initialized() else "cpu"
            seen["profile"] = profiler.key_averages().table(
                sort_by=f"self_{kind}_time_total", row_limit=20, max_name_column_width=60)
        if rank == 0:
            Path(os.environ["SEEN"]).write_text(json.dumps(seen))
