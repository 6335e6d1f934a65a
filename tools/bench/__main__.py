"""The command line of python -m tools.bench."""
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
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
CPU = Work("cpu", 257, SMALL, "fp32", 16, (2,), steps=5, warmup=2, turns=5, ranks=2)
NANO = Work("cpu", 257, SIZES["nano"], "fp32", 8, (2,), steps=5, warmup=2)      # eight's, on CPUs
ALONE = (("", "single"), ("--compile", "single"))   # flags of train.py; mode of PyTorch's stack
SEVERAL = (("--compile", "ddp"), ("--compile --zero 1", "fsdp"), ("--compile --zero 3", "fsdp"))
MEMORIES = ("", "--compile", "--recompute", "--offload", "--dtype fp32")


# ---- The parts: each yields (what, a function that measures it and returns rows) --------------

def race(work: Work, folder: Path, pairs=ALONE) -> Iterator[tuple]:
    @cache
    def peer(mode, compiled, processes, turn):
        """What `train_plain` returns: measured once for all flags."""
        return json.loads(finished(folder, processes, "tools.bench.pytorch_stack", json.dumps(dict(
            mode=mode, shape=work.shape, vocab=work.cfg.padded_vocab, dtype=work.dtype,
            batch_size=work.batch * processes, micro_batch=work.microbatches[0],
            steps=work.steps - work.warmup, warmup=work.warmup, device=work.device,
            compile=compiled))))

    def measure(flags, mode, processes):
        speeds = []
        for turn in range(work.turns):
            run, seen = train_py(work, folder, processes, *flags.split())
            other = peer(mode, "--compile" in flags, processes, turn)
            speeds.append((np.median(run.column("tokens_per_second")[work.warmup:]),
                           other["tokens_per_second"]))
        ours, theirs = np.median(speeds, 0)
        result = f"{ours:,.0f} tokens/s; PyTorch's {theirs:,.0f}; ratio {ours / theirs:.2f}"
        if work.device == "cpu":        # as much as a tenth is noise
            return [Row(f"{flags} / {mode}", result)]
        if peak_rate := peak_flops(torch.cuda.get_device_name()):
            mfu = ours * flops_per_token(work.cfg) / peak_rate / processes
            result += f"; MFU {mfu:.1%}"
        return [Row(f"{flags} / {mode}", result, "ratio 0.95", ours / theirs >= 0.95),
                beside_plan(work, processes, flags, seen["peak"],
                            f"; PyTorch's {other['peak_memory']:.2f} GB")]
    for flags, mode in dict.fromkeys((work.compiled(flags), mode) for flags, mode in pairs):
        processes = 1 if mode == "single" else work.ranks
        if mode == "single" or processes > 1:
            yield f"{flags} / {mode}", partial(measure, flags, mode, processes)


def replicas(work: Work, folder: Path) -> Iterator[tuple]:
    return race(work, folder, SEVERAL)


def beside_plan(work: Work, processes: int, flags: str, peak: float, note: str = "") -> Row:
    """The peak of a rank's memory in GB beside the estimate of tools.plan."""
    given = dict(batch_size=work.batch * processes, dtype=work.dtype,
                 micro_batch=work.microbatches[0]) | parse_flags(flags.split())
    plan = gpu_bytes(memory_bytes(Stage(work.cfg, PlanConfig(**given), Grid(processes, 1, 1)))) / 1e9
    return Row(f"{flags}: memory", f"peak {peak:.2f} GB; plan {plan:.2f} GB{note}",
               "within 10%", abs(peak / plan - 1) <= 0.1)


def memory(work: Work, folder: Path) -> Iterator[tuple]:
    def measure(flags):
        _, seen = train_py(work, folder, 1, *flags.split(), "--steps", 3)
        return [beside_plan(work, 1, flags, seen["peak"])]
    for micro_batch in work.microbatches:
        for flags in MEMORIES:
            flags = f"{flags} --micro-batch {micro_batch}"
            yield flags, partial(measure, flags)


def profile(work: Work, folder: Path) -> Iterator[tuple]:
    def measure(flags):
        _, seen = train_py(work, folder, 1, *flags.split(), "--steps", work.warmup, PROFILE="1")
        return [Row(flags, "its kernels are below", below=seen["profile"])]
    for flags in ("", "--compile"):
        yield flags, partial(measure, flags)


PARTS = dict(gpu=(race, memory, profile, eight.layouts), cpu=(race, replicas),
             eight=(eight.layouts, eight.exact, eight.resume, replicas))
ADVICE = dict(
    layouts="A loss that is off: if the same command with --device cpu is ok, the fault is in what "
            "a GPU alone runs: without --compile, then with NCCL_ALGO=Ring, narrow it down. An "
            "error: docs/troubleshooting.md has NCCL's.",
    exact="Which layout differs from one rank? Train both once more with 1 step, then without "
          "--pp and --tp: a kernel whose result depends on the shape is the usual reason.",
    resume="The second command in log.txt must print that it resumes. If it began again, look for "
           "the files of steps 3 and 6 in its --out; if losses are off, the state is incomplete.",
    race="Is the card alone, cool, at its power limit (nvidia-smi -q -d POWER,CLOCK)? "
         "Then send the kernels: python -m tools.bench gpu profile.",
    replicas="Is `python -m tools.bench gpu race` ok? Then communication is slow: look at "
             "nvidia-smi topo -m and NCCL_DEBUG=INFO (NVLink, or only PCIe?), and give "
             "--numa-binding=node. Memory: see the advice for it.",
    memory="docs/planning.md says what a plan counts. Send the row: tools.plan is to be corrected.",
    profile="log.txt has the error.")


def measured(what: str, measure) -> list[Row]:
    """Its rows, or one with what went wrong."""
    try:
        return measure()
    except RuntimeError as error:                       # too little memory, say
        return [Row(what, str(error), ok=False)]


def read_arguments():
    parser = Parser("tools.bench", "python -m tools.bench gpu|cpu|eight [PART ...]",
                    tools.bench.__doc__)
    parser.add_argument("kind", choices=list(PARTS), help="what is measured")
    parser.add_argument("parts", nargs="*", metavar="PART", help="some parts (default: all)")
    parser.add_argument("--out", default="out/bench", metavar="DIR",
                        help="for bench.md, runs, and log.txt of errors (default %(default)s)")
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4, 8],
                        help="of eight (default: all GPUs; 2 on CPUs)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="of eight (default cuda)")
    args = parser.parse_args()
    parts = {part.__name__: part for part in PARTS[args.kind]}
    for name in args.parts:
        if name not in parts:
            parser.error(f"{args.kind} has no part {name!r}: it has {', '.join(parts)}")
    work = dict(gpu=GPU, cpu=CPU, eight=replace(GPU, turns=1))[args.kind]
    if args.kind != "eight" and (args.ranks or args.device):
        parser.error("--ranks and --device are flags of eight")
    if args.device == "cpu":
        work = NANO
    if work.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here: cpu measures two CPU cores, eight --device "
                     "cpu tries ranks on them")
    count = 2 if work.device == "cpu" else torch.cuda.device_count()
    ranks = args.ranks or max(ranks for ranks in (1, 2, 4, 8) if ranks <= count)
    return (replace(work, ranks=ranks), Path(args.out),
            {name: parts[name] for name in args.parts or parts})


def versions(work: Work) -> str:
    device = "CPU"
    if work.device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        device = f"{work.ranks} x {torch.cuda.get_device_name()}, NCCL {nccl}"
    return f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}"


def main() -> None:
    work, folder, parts = read_arguments()
    folder.mkdir(parents=True, exist_ok=True)
    failed, below = {}, []
    with open(folder / "bench.md", "w") as page:
        def write(line):
            print(line, flush=True)
            print(line, file=page, flush=True)      # what is there is safe
        write(f"{versions(work)}\n\n| What | Result | Bound | |\n|---|---|---|---|")
        for name, part in parts.items():
            for row in (row for what, measure in part(work, folder)
                        for row in measured(what, measure)):
                verdict = "ok" if row.ok else "**FAIL**"
                result = row.result.replace("|", "/")
                write(f"| {name} {row.what} | {result} | {row.bound} | {verdict} |")
                if not row.ok:
                    failed[name] = ADVICE[name]
                if row.below:
                    below.append(f"\n{name} {row.what}\n\n```\n{row.below}\n```")
        for text in below:
            write(text)
        for name, advice in failed.items():
            write(f"\nWhere {name} fails: {advice}")
        if failed:
            write(f"\n{folder}/log.txt has the commands that failed, with all that they said.")
            sys.exit(1)


if __name__ == "__main__":
    main()
