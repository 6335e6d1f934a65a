"""The command line of python -m tools.bench."""
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import tools.bench
from base.commandline import Parser, flag_name
from base.flops import flops_per_token, peak_flops
from base.options import parse_flags
from model import SIZES, GPTConfig
from parallel import Grid
from tools.bench import launch
from tools.metrics import read_metrics
from tools.plan.flags import PlanConfig
from tools.plan.memory import Stage, gpu_bytes, memory_bytes


@dataclass(frozen=True)
class Work:
    """How much is measured, on a device."""
    device: str
    vocab: int
    shape: dict
    dtype: str
    batch: int                  # sequences of a step
    microbatches: tuple         # of train.py and of memory, in sequences
    steps: int                  # of a run; medians are of those after the warm-up
    warmup: int
    turns: int

    @property
    def cfg(self) -> GPTConfig:
        return GPTConfig(self.vocab, **self.shape)

    @property
    def world(self) -> int:
        """Processes of a layout, a divisor of its batch."""
        cores_or_cards = 2 if self.device == "cpu" else torch.cuda.device_count()
        return max(count for count in (1, 2, 4, 8) if count <= cores_or_cards)


SMALL = dict(n_layer=6, n_head=6, n_embd=384, seq_len=256)
WORKS = dict(
    gpu=Work("cuda", 50257, SIZES["gpt2"], "bf16", 64, (16, 64), steps=30, warmup=10, turns=2),
    cpu=Work("cpu", 257, SMALL, "fp32", 16, (2,), steps=5, warmup=2, turns=5))
SECONDS = 300                   # the longest that a program may take
RACES = {                       # flags of train.py; the mode of PyTorch's stack; is it compiled
    "alone": ("", "single", False), "alone, --compile": ("--compile", "single", True),
    "DDP": ("", "ddp", False), "FSDP2": ("--zero 3", "fsdp", False)}
MEMORIES = ("", "--compile", "--recompute", "--offload", "--dtype fp32")
LAYOUTS = ("--zero 1", "--zero 2", "--zero 3", "--tp 2", "--tp 2 --sequence-parallel", "--pp 2",
           "--pp 2 --pp-schedule 1f1b", "--pp 2 --pp-schedule interleaved --pp-chunks 2", "--cp 2")
TINY = dict(n_layer=4, n_head=4, n_embd=64, seq_len=32)


def train_py(work: Work, folder: Path, processes: int, *flags, **environment) -> tuple[list, dict]:
    """Run train.py on random tokens, without saves -> (the steps in its metrics.jsonl, what it has
    written to SEEN). (The last of repeated flags counts.)"""
    shape = [f"{flag_name(name)}={value}" for name, value in work.shape.items()]
    with tempfile.TemporaryDirectory(dir=folder) as out:
        seen = Path(out, "seen.json")
        launch.finished(
            processes, "tools.bench.launch", "--data", launch.random_data(folder, work.vocab),
            "--out", out, "--save-every", 0, "--eval-every", 0, *shape, "--batch-size", work.batch,
            "--micro-batch", work.microbatches[0], "--dtype", work.dtype, "--device", work.device,
            "--steps", work.steps, "--lr", 1e-3, *flags, seconds=SECONDS, SEEN=str(seen),
            **environment)
        return read_metrics(Path(out)).rows, json.loads(seen.read_text())


# ---- The parts: each yields its rows, {column: value} ----------------------------------------

def race(work: Work, folder: Path) -> Iterator[dict]:
    peak_rate = None
    if work.device == "cuda":
        peak_rate = peak_flops(torch.cuda.get_device_name())
    for name, (flags, mode, compiled) in RACES.items():
        processes = 1 if mode == "single" else work.world
        if (mode != "single" and processes == 1) or (compiled and work.device == "cpu"):
            continue
        micro_batch = min(work.microbatches[0], work.batch // processes)
        turns = []
        try:
            for _ in range(work.turns):
                steps, seen = train_py(work, folder, processes, *flags.split(), "--micro-batch",
                                       micro_batch)
                of_peer = dict(
                    mode=mode, shape=work.shape, vocab=work.cfg.padded_vocab,
                    batch_size=work.batch, micro_batch=micro_batch, dtype=work.dtype,
                    steps=work.steps - work.warmup, warmup=work.warmup, device=work.device,
                    compile=compiled)
                peer = json.loads(launch.finished(processes, "tools.bench.pytorch_stack",
                                                  json.dumps(of_peer), seconds=SECONDS))
                speeds = [step["tokens_per_second"] for step in steps[work.warmup:]]
                turns.append((np.median(speeds), peer["tokens_per_second"]))
        except RuntimeError as error:                       # too little memory, say
            yield dict(race=name, error=str(error))
            continue
        our_speed, torch_speed = np.median(turns, 0)
        mfu = None
        if peak_rate:
            mfu = our_speed * flops_per_token(work.cfg) / peak_rate / processes
        yield {"race": name, "processes": processes, "tokens/s": our_speed,
               "PyTorch's": torch_speed, "ratio": our_speed / torch_speed, "MFU": mfu,
               "peak, GB": seen["peak"], "PyTorch's peak": peer["peak_memory"]}


def memory(work: Work, folder: Path) -> Iterator[dict]:
    for micro_batch in work.microbatches:
        for flags in MEMORIES:
            words = [*flags.split(), "--micro-batch", str(micro_batch)]
            config = PlanConfig(**dict(batch_size=work.batch, dtype=work.dtype)
                                | parse_flags(words))
            plan = gpu_bytes(memory_bytes(Stage(work.cfg, config, Grid(1, 1, 1)))) / 1e9
            found = {"micro-batch": micro_batch, "flags": flags, "plan, GB": plan}
            try:
                _, seen = train_py(work, folder, 1, *words, "--steps", 3)
            except RuntimeError as error:
                yield found | dict(error=str(error))
                continue
            yield found | {"peak, GB": seen["peak"], "peak / plan": seen["peak"] / plan}


def profile(work: Work, folder: Path) -> Iterator[dict]:
    for flags in ("", "--compile"):
        try:
            _, seen = train_py(work, folder, 1, *flags.split(), "--steps", work.warmup, PROFILE="1")
            yield dict(flags=flags, kernels="\n" + seen["profile"])
        except RuntimeError as error:
            yield dict(flags=flags, error=str(error))


def layouts(work: Work, folder: Path) -> Iterator[dict]:
    tiny = [f"{flag_name(name)}={value}" for name, value in TINY.items()]

    def losses(processes, *flags):
        steps, _ = train_py(work, folder, processes, *tiny, "--dtype", "fp32", "--batch-size", 16,
                            "--micro-batch", 2, "--steps", 8, "--warmup-steps", 2, *flags,
                            NVIDIA_TF32_OVERRIDE="0")
        return np.array([step["loss"] for step in steps], float)
    if work.world < 2:
        yield dict(error="one GPU: layouts take two or more")
        return
    expected = losses(1, "--device", "cpu")
    for flags in LAYOUTS:
        found = dict(processes=work.world, flags=flags)
        try:
            off = abs(losses(work.world, *flags.split()) / expected - 1).max()
            yield found | {"loss is off by": off}
        except RuntimeError as error:
            yield found | dict(error=str(error))


PARTS = dict(gpu=(race, memory, profile, layouts), cpu=(race,))


def in_words(found: dict) -> str:
    """A row of the page."""
    words = []
    for column, value in found.items():
        if isinstance(value, float):
            value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        if value is not None:
            words.append(f"{column} {value}")
    return "; ".join(words)


def main() -> None:
    parser = Parser("tools.bench", "python -m tools.bench gpu|cpu [PART ...]", tools.bench.__doc__)
    parser.add_argument("device", choices=list(PARTS), help="what is measured")
    parser.add_argument("parts", nargs="*", metavar="PART", help="some parts (default: all)")
    parser.add_argument("--out", default="out/bench", metavar="DIR",
                        help="for bench.txt (default %(default)s)")
    args = parser.parse_args()
    parts = {part.__name__: part for part in PARTS[args.device]}
    for name in args.parts:
        if name not in parts:
            parser.error(f"{args.device} has no part {name!r}: it has {', '.join(parts)}")
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here: cpu measures two CPU cores")
    card = torch.cuda.get_device_name() if args.device == "gpu" else "CPU"
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with open(Path(args.out, "bench.txt"), "w") as page, tempfile.TemporaryDirectory() as folder:
        def write(line):
            print(line, flush=True)
            print(line, file=page, flush=True)      # what is there is safe
        write(f"{card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}")
        for name in args.parts or parts:
            write(f"\n{name}")
            for found in parts[name](WORKS[args.device], Path(folder)):
                write("    " + in_words(found))


if __name__ == "__main__":
    main()
