"""The parts of `python -m tools.bench eight` that ask whether several ranks compute what one does:
small models, in float32 without TF32, and each loss of a run beside the same step's of another.
"""
import functools
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from base.options import parse_flags
from tools.bench.launch import Row, Work, train_py
from tools.metrics import Run

# Those run that the ranks can carry. Eight ranks: all, two ranks: the first nine.
LAYOUTS = (
    "", "--zero 1 --compile", "--zero 2", "--zero 3 --recompute", "--dtype bf16 --compile",
    "--tp 2 --sequence-parallel --zero 1 --compile", "--pp 2 --pp-schedule 1f1b --zero 2",
    "--cp 2 --zero 3", "--model moe-nano --ep 2 --zero 1",
    "--pp 4 --pp-schedule interleaved --pp-chunks 2 --zero 1",
    "--pp 2 --cp 2 --tp 2 --zero 1", "--model moe-nano --ep 4 --tp 2", "--tp 8")
EXACT_LAYOUTS = ("--zero 1", "--pp 2 --pp-schedule 1f1b", "--tp 2 --pp 2 --pp-schedule interleaved "
                 "--pp-chunks 2 --zero 1")
# The largest relative difference of a loss, by the first of these words that the flags have. Where
# numbers are rounded otherwise, a mixture chooses other experts.
BOUNDS = {"bf16": 2e-2, "moe": 1e-3, "": 1e-5}
TINY = Work("cpu", 257, dict(n_layer=8, n_head=8, n_embd=64, seq_len=64), "fp32", batch=32,
            microbatches=(2,), steps=8)
SAVE_EVERY = 3
KILL_IN_STEP = 7


def can_carry(ranks: int, flags: str) -> bool:
    """Whether a layout fits so many ranks."""
    sizes = parse_flags(flags.split())
    replicas, rest = divmod(ranks, sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1))
    return replicas > 0 and rest == 0 and replicas % sizes.get("ep", 1) == 0


def train_tiny(device: str, folder: Path, ranks: int, flags: str, **options) -> Run:
    """Train such a model: on the same batches, whatever the ranks."""
    run, _ = train_py(replace(TINY, device=device), folder, ranks, "--batch-size", TINY.batch,
                      "--warmup-steps", 2, "--eval-every", 4, "--timeout", 100, *flags.split(),
                      NVIDIA_TF32_OVERRIDE="0", **options)
    return run


def beside_cpu(folder: Path, flags: str, run: Run, note: str = "") -> Row:
    """Judge the losses of a run by those of one process on the CPU."""
    losses = run.column("loss")
    model = "--model moe-nano" if "moe" in flags else ""
    expected = cpu_losses(folder, model)
    bound = next(bound for word, bound in BOUNDS.items() if word in flags)
    if len(losses) != len(expected):
        return Row(flags, f"{len(losses)} steps, not {len(expected)}{note}", ok=False)
    off = abs(losses / expected - 1).max()
    return Row(flags, f"losses are off by {off:.1e}{note}", f"{bound:.0e}", bool(off <= bound))


@functools.cache
def cpu_losses(folder: Path, model: str) -> np.ndarray:
    return train_tiny("cpu", folder, 1, model).column("loss")


# ---- The parts: each yields (what, function), and the function returns the rows ---------------

def layouts(work: Work, folder: Path) -> Iterator[tuple]:
    def measure(flags):
        return [beside_cpu(folder, flags, train_tiny(work.device, folder, work.ranks, flags))]
    for flags in map(work.compiled, LAYOUTS):
        if can_carry(work.ranks, flags):
            yield flags, partial(measure, flags)


def exact(work: Work, folder: Path) -> Iterator[tuple]:
    """The first of these layouts beside the last one that the ranks can carry."""
    carried = [flags for flags in EXACT_LAYOUTS if can_carry(work.ranks, flags)]
    what = f"--exact {carried[0]} / {carried[-1]}"

    def measure():
        runs = [train_tiny(work.device, folder, work.ranks, f"--exact {flags}").rows
                for flags in (carried[0], carried[-1])]
        differ = [one["step"] for one, other in zip(*runs, strict=True)
                  if any(one[name] != other[name] for name in ("loss", "grad_norm"))]
        if differ:
            return [Row(what, f"bits differ from step {differ[0]} on", "equal", False)]
        return [Row(what, f"{len(runs[0])} losses and norms have equal bits", "equal")]
    if len(carried) > 1:
        yield what, measure


def resume(work: Work, folder: Path) -> Iterator[tuple]:
    """The last rank is killed, and the same command resumes."""
    what = "--zero 1"

    def measure():
        again = partial(train_tiny, work.device, folder, work.ranks, f"{what} --save-every {SAVE_EVERY}",
                        out=tempfile.mkdtemp(dir=folder))
        with suppress(RuntimeError):
            again(KILL_IN_STEP=str(KILL_IN_STEP))
        run = again()
        resumes = [event["step"] for event in run.events if event["event"] == "resume"]
        if not resumes:
            return [Row(what, "the run began again: it did not resume", ok=False)]
        return [beside_cpu(folder, what, run, f", resumed after step {resumes[0]}")]
    yield what, measure
