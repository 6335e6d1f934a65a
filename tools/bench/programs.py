"""Programs that are measured, and the random tokens that they train on. tables.py and
gpu.py run them.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("peer.py")


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


def finished(processes: int, *command, seconds: float = 900, **environment) -> str:
    """Standard output of a Python script, in one process on all cores, or by torchrun. Raises
    RuntimeError if it fails or takes longer."""
    torchrun = []
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d",
                    "--rdzv-endpoint=localhost:0", f"--nproc_per_node={processes}"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    process = subprocess.Popen([sys.executable, *torchrun, *map(str, command)],
                               env=inherited | environment, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        text, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()             # torchrun ends its processes
        process.communicate()
        raise RuntimeError(f"stopped after {seconds:.0f} s") from None
    if process.returncode != 0:
        raise RuntimeError(error.strip() or f"exit status {process.returncode}")
    return text


def rows_of(out: Path) -> list[dict]:
    """The steps of a run's metrics.jsonl."""
    rows = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]
