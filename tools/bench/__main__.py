"""The command line of python -m tools.bench."""
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import tools.bench
from base.commandline import Parser
from base.flops import flops_per_token, peak_flops
from base.options import parse_flags
from model import SIZES
from parallel import Grid
from tools.bench import eight
from tools.bench.launch import Row, Work, finished, train_py
from tools.plan.flags import PlanConfig
from tools.plan.memory import Stage, gpu_bytes, memory_bytes

SMALL = dict(n_layer=6, n_head=6, n_embd=384, seq_len=256)
GPU = Work("cuda", 50257, SIZES["gpt2"], "bf16", 64, (16, 64), steps=30, warmup=10, turns=2)
CPU = Work("cpu", 257, SMALL, "fp32", 16, (2,), steps=5, warmup=2, turns=5)
WORKS = dict(gpu=GPU, cpu=CPU, eight=replace(GPU, turns=1))
ALONE = (("", "single"), ("--compile", "single"))   # flags of train.py; mode of PyTorch's stack
SEVERAL = (("--compile", "ddp"), ("--compile --zero 1", "fsdp"), ("--compile --zero 3", "fsdp"))
MEMORIES = ("", "--compile", "--recompute", "--offload", "--dtype fp32")


# ---- The parts: each yields (what, a function that measures it and returns rows). Their --------
# docstrings are printed where a row fails.

def race(work: Work, folder: Path, pairs=ALONE) -> Iterator[tuple]:
    """One process has 0.95 of the speed of PyTorch's, and the memory that tools.plan says. If not,
    is the card alone, cool and at its limit of power (nvidia-smi -q -d POWER,CLOCK)? Then send
    the kernels: `python -m tools.bench gpu profile`."""
    @cache
    def peer(mode, compiled, processes, turn):
        settings = dict(mode=mode, compiled=compiled,
                        work=asdict(work) | dict(vocab=work.cfg.padded_vocab))
        return json.loads(finished(folder, processes, "tools.bench.pytorch_stack",
                                   json.dumps(settings)))

    def measure(flags, mode, processes):
        speeds = []
        for turn in range(work.turns):
            run, seen = train_py(work, folder, processes, *flags.split())
            other = peer(mode, "--compile" in flags, processes, turn)
            speeds.append((np.median(run.column("tokens_per_second")[work.warmup:]),
                           other["tokens_per_second"]))
        ours, theirs = np.median(speeds, 0)
        what = f"{flags} / {mode}"
        result = f"{ours:,.0f} tokens/s; PyTorch's {theirs:,.0f}; ratio {ours / theirs:.2f}"
        if work.device == "cpu":        # where a tenth is noise
            return [Row(what, result)]
        if peak_rate := peak_flops(torch.cuda.get_device_name()):
            result += f"; MFU {ours * flops_per_token(work.cfg) / peak_rate / processes:.1%}"
        return [Row(what, result, "ratio 0.95", ours >= 0.95 * theirs),
                beside_plan(work, processes, flags, seen["peak"],
                            f"; PyTorch's {other['peak_memory']:.3g}")]
    for flags, mode in dict.fromkeys((work.compiled(flags), mode) for flags, mode in pairs):
        processes = 1 if mode == "single" else work.ranks
        if mode == "single" or processes > 1:
            yield f"{flags} / {mode}", partial(measure, flags, mode, processes)


def replicas(work: Work, folder: Path) -> Iterator[tuple]:
    """As `race`, beside DDP and FSDP2. If `python -m tools.bench gpu race` is ok, communication
    is slow: NVLink or only PCIe (nvidia-smi topo -m, NCCL_DEBUG=INFO)? If memory alone is more than
    planned, send the row: the plan is to be corrected."""
    return race(work, folder, SEVERAL)


def beside_plan(work: Work, processes: int, flags: str, peak: float, note: str = "") -> Row:
    """The allocator's peak in GB beside the estimate of tools.plan."""
    config = PlanConfig(**dict(batch_size=work.batch * processes, dtype=work.dtype,
                               micro_batch=work.microbatches[0]) | parse_flags(flags.split()))
    plan = gpu_bytes(memory_bytes(Stage(work.cfg, config, Grid(processes, 1, 1)))) / 1e9
    return Row(f"{flags}, memory", f"peak {peak:.3g} GB; plan {plan:.3g}{note}", "within 10%",
               abs(peak / plan - 1) <= 0.1)


def memory(work: Work, folder: Path) -> Iterator[tuple]:
    """The allocator's peak is within 10% of the estimate of tools.plan. If not, send the row: the
    plan is to be corrected."""
    def measure(flags):
        _, seen = train_py(work, folder, 1, *flags.split(), "--steps", 3)
        return [beside_plan(work, 1, flags, seen["peak"])]
    for micro_batch in work.microbatches:
        for flags in MEMORIES:
            flags = f"{flags} --micro-batch {micro_batch}"
            yield flags, partial(measure, flags)


def profile(work: Work, folder: Path) -> Iterator[tuple]:
    """The kernels of the first steps."""
    def measure(flags):
        _, seen = train_py(work, folder, 1, *flags.split(), "--steps", work.warmup, PROFILE="1")
        file = folder / f"kernels{flags}.txt"
        file.write_text(seen["profile"])
        return [Row(flags, f"{file} has its kernels")]
    for flags in ("", "--compile"):
        yield flags, partial(measure, flags)


OF_RANKS = (eight.layouts, eight.bits, eight.resume, replicas)
PARTS = dict(gpu=(race, memory, profile, eight.layouts), eight=OF_RANKS, cpu=(race, *OF_RANKS))


def read_arguments() -> tuple[Work, Path, list]:
    """What is measured, the folder for the table, and the parts."""
    parser = Parser("tools.bench", "python -m tools.bench gpu|eight|cpu [PART ...]",
                    tools.bench.__doc__)
    parser.add_argument("kind", choices=list(PARTS), help="what is measured")
    parser.add_argument("parts", nargs="*", metavar="PART", help="some parts (default: all)")
    parser.add_argument("--out", default="out/bench", metavar="DIR",
                        help="for bench.txt, log.txt and the runs (default %(default)s)")
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4, 8],
                        help="of eight and cpu (default: all GPUs; 2 on CPUs)")
    args = parser.parse_args()
    parts = {part.__name__: part for part in PARTS[args.kind]}
    wanted = args.parts or list(parts)
    for name in wanted:
        if name not in parts:
            parser.error(f"{args.kind} has no part {name!r}: it has {', '.join(parts)}")
    if args.kind == "gpu" and args.ranks:
        parser.error("gpu measures one process: --ranks is a flag of eight and cpu")
    work = WORKS[args.kind]
    if work.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here: cpu measures two CPU cores")
    count = 2 if work.device == "cpu" else torch.cuda.device_count()
    ranks = args.ranks or max(ranks for ranks in (1, 2, 4, 8) if ranks <= count)
    return replace(work, ranks=ranks), Path(args.out).resolve(), [parts[name] for name in wanted]


def main() -> None:
    work, folder, parts = read_arguments()
    card = "CPU"
    if work.device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        card = f"{torch.cuda.get_device_name()}, NCCL {nccl}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").unlink(missing_ok=True)
    failed = {}
    with open(folder / "bench.txt", "w") as page:
        def write(line):
            print(line, flush=True)
            print(line, file=page, flush=True)      # what is there is safe
        write(f"{work.ranks} x {card}, torch {torch.__version__}, "
              f"{time.strftime('%Y-%m-%d %H:%M')}\n")
        write("| What | Result | Bound | |\n|---|---|---|---|")
        for part in parts:
            for what, measure in part(work, folder):
                try:
                    rows = measure()
                except (RuntimeError, ValueError) as error:     # too little memory, say
                    rows = [Row(what, str(error), ok=False)]
                for row in rows:
                    verdict = "ok"
                    if not row.ok:
                        verdict, failed[part.__name__] = "**FAIL**", part.__doc__
                    cells = [f"{part.__name__} {row.what}", row.result, row.bound, verdict]
                    write(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        if failed:
            write(f"\n{folder}/log.txt has the programs that failed, and what they said.")
            for name, text in failed.items():
                write(f"- {name}: {' '.join(text.split())}")
            sys.exit(1)


if __name__ == "__main__":
    main()
