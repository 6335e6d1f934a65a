"""Start what is measured: train.py on random tokens, and PyTorch's own stack.

    SEEN=seen.json python -m tools.bench.launch --steps 3

is train.py that writes to SEEN, a file, the peak of its GPU's memory in GB and, with PROFILE=1,
torch.profiler's table of its kernels.
"""
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import train
from corpus.shards import append_tokens

ROOT = Path(__file__).resolve().parents[2]


def random_data(folder: Path, vocab: int) -> Path:
    """A directory of shards of random tokens."""
    path = Path(folder) / f"random_{vocab}"
    draw = np.random.default_rng(0)
    if not path.exists():
        path.mkdir()
        for split, count in (("train", 400_000), ("val", 2049)):
            append_tokens(path, split, draw.integers(vocab, size=count).astype("<u2"), 0, count)
        (path / "meta.json").write_text(json.dumps(dict(
            tokenizer="bytes", vocab_size=vocab, bytes_per_token=1.0, fingerprint="random")))
    return path


def finished(processes: int, *command, seconds: float, **environment) -> str:
    """Standard output of a Python module with arguments, in one process on all cores, or by
    torchrun. Raises RuntimeError if it fails or takes longer."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--rdzv-backend=c10d",
                  "--rdzv-endpoint=localhost:0", f"--nproc_per_node={processes}"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    process = subprocess.Popen([*start, "-m", *map(str, command)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=inherited | environment, start_new_session=True)
    try:
        text, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)      # with what torchrun has started
        process.communicate()
        raise RuntimeError(f"stopped after {seconds:.0f} s") from None
    if process.returncode != 0:
        raise RuntimeError(f"exit status {process.returncode}: {first_error(error)}")
    return text


def first_error(text: str) -> str:
    """The first line of standard error that names one. (torchrun's own come after it.)"""
    lines = text.strip().splitlines() or [""]
    errors = [line for line in lines if "Error" in line or line.startswith("train.py: ")]
    return (errors or lines[-1:])[0].strip()


if __name__ == "__main__":
    sys.argv[0] = "train.py"
    profiler = torch.profiler.profile() if "PROFILE" in os.environ else nullcontext()
    try:
        with profiler:
            train.main()
    finally:                            # it ends by sys.exit
        seen, kind = dict(peak=None), "cuda" if torch.cuda.is_initialized() else "cpu"
        if kind == "cuda":
            seen["peak"] = torch.cuda.max_memory_allocated() / 1e9
        if "PROFILE" in os.environ:
            seen["profile"] = profiler.key_averages().table(
                sort_by=f"self_{kind}_time_total", row_limit=20, max_name_column_width=60)
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ["SEEN"]).write_text(json.dumps(seen))
