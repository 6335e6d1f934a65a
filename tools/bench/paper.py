"""A training step on paper: what an H100 would do, counted without a GPU.

    python -m tools.bench paper                     # all runs: five minutes of a CPU
    python -m tools.bench paper "GPT, compiled"     # some, by name

A count is no measurement. It shows where the bytes are, how often the host waits for the device,
and what the compiler did again. tools/bench/fake_gpu.py says what is counted and what is not. The
step that is counted is the second one, because the first one compiles. Each run is a process of its
own. With tp or cp it is rank 0 of two, and collectives do nothing. Breaks of graphs do not count
where a part runs eagerly on purpose (build.runs_eagerly). Linux and PyTorch's build for CPUs
are needed, and no Triton.

The roofline adds up, over all kernels, FLOPs (of products and attention) or bytes (of the others)
divided by a rate of an H100. The rates are those of tools.plan: 62.5% of the FLOP/s for products,
30% for attention, fitted on published steps, and the data sheet's bandwidth. Nothing was fitted to
this program. There is no time between two kernels, and no two kernels run at once.
"""
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from base import commandline
from base.options import merge_config, parse_flags
from corpus.shards import SPLITS
from data import TokenDataset
from models import make_config
from parallel import GROUPS
from parallelism.build import Grid
from tools.bench import gpu, launch, pytorch_stack
from tools.bench.fake_gpu import FakeGPU, make_fake_gpu
from tools.markdown_tables import heading, row
from tools.plan.gpus import GPUS

GPT = "--model gpt2"
LLAMA = gpu.MIXTURES[0][1]      # the dense model, of about the same size
RUNS = {                        # flags of train.py; None: the plain loop
    "GPT": GPT, "GPT, compiled": f"{GPT} --compile",
    "Llama": LLAMA, "Llama, compiled": f"{LLAMA} --compile",
    "GPT, compiled, tp 2": f"{GPT} --compile --tp 2",
    "GPT, compiled, cp 2": f"{GPT} --compile --cp 2",
    "the plain loop": None, "the plain loop, compiled": None}
FORWARD = ("embedding", "blocks", "head and loss")
COLUMNS = ("kernels", "TFLOP", *(f"GB: {phase}" for phase in FORWARD), "GB: forward",
           "GB: backward", "GB: optimizer", "peak, GB", "waits", "breaks", "recompiles",
           "roofline, ms")
SECONDS = 600                   # the longest that a run may take


def count_step(device: FakeGPU, step: Callable) -> dict:
    """What the second of two calls of `step` starts, and what the compiler had to do for both."""
    step()
    device.start()
    step()
    rates = GPUS["h100"]
    found = Counter()
    for launched in device.launches:
        kind = launched.kind
        found["kernels"] += launched.kernels
        if kind == "memory":
            found[f"GB: {launched.phase}"] += launched.bytes / 1e9
            found["ms"] += 1e3 * launched.bytes / rates.bandwidth
        else:
            found["TFLOP"] += launched.flops / 1e12
            rate = rates.products if kind == "product" else rates.attention
            found["ms"] += 1e3 * launched.flops / (rate * rates.peak(2))
    breaks = [count for reason, count in counters["graph_break"].items()
              if "torch.compiler.disable" not in reason]
    compilations = get_compilation_metrics()
    return dict(found) | {
        "peak, GB": device.peak / 1e9, "waits": device.waits, "breaks": sum(breaks),
        "recompiles": sum(compiled.recompile_reason is not None for compiled in compilations)}


def in_phase(device: FakeGPU, phase: str, owner, name: str) -> None:
    """Counts what `owner.name` starts as this phase. A wrapped method that it calls counts as its
    own phase."""
    function = getattr(owner, name)

    def within(*args, **kwargs):
        outer = device.phase
        device.phase = phase
        try:
            return function(*args, **kwargs)
        finally:
            device.phase = outer
    setattr(owner, name, within)


def count_ours(device: FakeGPU, flags: list[str], folder: Path) -> dict:
    """A step of train.py on rank 0."""
    work = gpu.GPU_WORK
    given = dict(data=str(launch.random_data(folder, work.vocab)), out=str(folder), lr=1e-4,
                 steps=1000, batch_size=work.batch, micro_batch=work.microbatches[0], dtype="bf16")
    config, shape = merge_config(given | parse_flags(flags), None)
    cfg = make_config(vocab_size=work.vocab, **shape)
    grid = Grid(1, config.pp, config.tp, cp=config.cp)
    if grid.world > 1:
        dist.init_process_group("fake", rank=0, world_size=grid.world, store=FakeStore())
        for kind in GROUPS:
            if len(set(grid.members(kind))) > 1:
                grid.groups[kind] = dist.group.WORLD
    datasets = [TokenDataset(config.data, split, cfg.seq_len) for split in SPLITS]
    with device:
        run = train.Run(config, cfg, grid, torch.device("cuda", 0), *datasets, None)
        in_phase(device, "embedding", run.model.embed, "forward")
        in_phase(device, "head and loss", run.model.head, "forward")
        for block in run.model.blocks.values():
            in_phase(device, "blocks", block, "forward")
        for name in ("zero_grad", "grad_norm_squares", "adamw_step"):
            in_phase(device, "optimizer", run.flat, name)
        return count_step(device, lambda: gpu.make_steps(run, 1))


def count_plain(device: FakeGPU, compile: bool) -> dict:
    """A step of the plain loop that `tools.bench gpu` measures."""
    found = {}
    work = gpu.GPU_WORK

    class OnDevice(pytorch_stack.PlainGPT):     # a fake tensor cannot be moved in its place
        def __init__(self, *args, **options):
            with torch.device("cuda"):
                super().__init__(*args, **options)

        def to(self, device):
            return self

    def two_steps(step, count, size, vocab, *_):
        device.phase = "forward"
        x, y = torch.zeros(2, *size, dtype=torch.long, device="cuda")
        found.update(count_step(device, lambda: step(x, y)))
        return [1.0] * count        # seconds, by which train_plain divides: its result is unused
    for owner, name in ((torch.nn.utils, "clip_grad_norm_"), (torch.optim.AdamW, "step"),
                        (torch.optim.AdamW, "zero_grad")):
        in_phase(device, "optimizer", owner, name)
    cfg = work.model_config
    with device, mock.patch.multiple(pytorch_stack, PlainGPT=OnDevice, timed=two_steps):
        pytorch_stack.train_plain(
            "single", work.batch, work.microbatches[0], cfg.padded_vocab, "bf16", device="cuda",
            shape={name: getattr(cfg, name) for name in pytorch_stack.SHAPE}, compile=compile)
    return found


def count_run(name: str) -> dict:
    """In a process of its own: the counts of a run of RUNS, or of train.py by its flags."""
    torch.set_float32_matmul_precision("high")          # as base/devices.py does on a GPU
    device = make_fake_gpu()
    in_phase(device, "backward", torch.Tensor, "backward")
    flags = RUNS.get(name, name)        # a test gives flags
    if flags is None:
        return count_plain(device, compile="compiled" in name)
    with tempfile.TemporaryDirectory() as folder:
        return count_ours(device, flags.split(), Path(folder))


def main(arguments: list[str]) -> None:
    parser = commandline.Parser("tools.bench", "python -m tools.bench paper [NAME ...]", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(RUNS))
    names = parser.parse_args(arguments).names or list(RUNS)
    if torch.version.cuda is not None or sys.platform != "linux":       # untried
        parser.error("this needs Linux and PyTorch's build for CPUs: pip install torch=="
                     f"{torch.__version__.partition('+')[0]} in an environment of its own, from "
                     "https://download.pytorch.org/whl/cpu")
    for name in names:
        if name not in RUNS:
            parser.error(f"there is no run {name!r}: there are {'; '.join(RUNS)}")
    print("", *heading("", *COLUMNS), sep="\n", flush=True)
    for name in names:
        command = [sys.executable, "-m", "tools.bench.paper", name]
        text, error = launch.run(command, SECONDS)
        if error is not None:
            raise RuntimeError(error)
        print(line_of(name, json.loads(text.splitlines()[-1])), flush=True)


def line_of(name: str, found: dict) -> str:
    """A run's line of the table. The plain loop's forward is one, because it is compiled as one."""
    phases = [found.get(f"GB: {phase}") for phase in FORWARD]
    forward = found.get("GB: forward") or sum(phases)
    gigabytes = [*phases, forward, found["GB: backward"], found["GB: optimizer"]]
    return row(name, f"{found['kernels']:,}", f"{found['TFLOP']:.1f}",
               *("-" if x is None else f"{x:.1f}" for x in gigabytes), f"{found['peak, GB']:.1f}",
               found["waits"], found["breaks"], found["recompiles"], f"{found['ms']:.1f}")


if __name__ == "__main__":
    print(json.dumps(count_run(" ".join(sys.argv[1:]))))
