"""The parts of `python -m tools.bench` that ask whether several ranks compute what one does: small
models in float32, without TF32. Each loss of a run stands beside the same step's of another.
"""
import functools
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tools.bench.launch import Row, Work, train_py
from tools.metrics import Run

LAYOUTS = {         # fewest ranks: layouts; more ranks run them too
    1: ("", "--zero 1 --compile", "--zero 2", "--zero 3 --recompute", "--dtype bf16 --compile"),
    2: ("--tp 2 --sequence-parallel --zero 1 --compile", "--pp 2 --pp-schedule 1f1b --zero 2",
        "--cp 2 --zero 3", "--model moe-nano --ep 2 --zero 1"),
    4: ("--pp 4 --pp-schedule interleaved --pp-chunks 2 --zero 1",),
    8: ("--pp 2 --cp 2 --tp 2 --zero 1", "--model moe-nano --ep 4 --tp 2", "--tp 8")}
SAME_BITS = {       # fewest ranks: the layout that must have the bits of the first
    1: "--exact --zero 1", 2: "--exact --pp 2 --pp-schedule 1f1b",
    4: "--exact --tp 2 --pp 2 --pp-schedule interleaved --pp-chunks 2 --zero 2"}
# The largest relative difference of a loss, by the first of these words that the flags have. Where
# numbers are rounded otherwise, a mixture chooses other experts.
BOUNDS = {"bf16": 2e-2, "moe": 1e-3, "": 1e-5}
TINY = Work("cpu", 257, dict(n_layer=8, n_head=8, n_embd=64, seq_len=64), "fp32", batch=32,
            microbatches=(2,), steps=8)


def train_tiny(device: str, folder: Path, ranks: int, flags: str, **options) -> Run:
    """Train such a model: on the same batches, whatever the ranks."""
    run, _ = train_py(replace(TINY, device=device), folder, ranks, "--batch-size", TINY.batch,
                      "--warmup-steps", 2, "--eval-every", 4, "--timeout", 100, *flags.split(),
                      NVIDIA_TF32_OVERRIDE="0", **options)
    return run


@functools.cache
def run_on_cpu(folder: Path, model: str) -> Run:
    return train_tiny("cpu", folder, 1, model)


def compare(what: str, run: Run, expected: Run, bound: float, note: str = "") -> list[Row]:
    """The bound of the norms of gradients is ten times that of the losses."""
    loss, norm = (abs(run.column(name) / expected.column(name) - 1).max()
                  for name in ("loss", "grad_norm"))
    return [Row(what, f"losses are off by {loss:.0e}, norms by {norm:.0e}{note}",
                f"{bound:g}, {10 * bound:g}", bool(loss <= bound and norm <= 10 * bound))]


def beside_cpu(folder: Path, flags: str, run: Run, note: str = "") -> list[Row]:
    expected = run_on_cpu(folder, "--model moe-nano" if "moe" in flags else "")
    bound = next(bound for word, bound in BOUNDS.items() if word in flags)
    return compare(flags, run, expected, bound, note)


# ---- The parts: each yields (what, a function that measures it and returns rows). Their --------
# docstrings are printed where a row fails.

def layouts(work: Work, folder: Path) -> Iterator[tuple]:
    """The losses are beside those of one process on the CPU. If one is off, try `tools.bench cpu
    layouts` with as many --ranks. If that is ok, only GPUs are wrong: leave out --compile, then
    halve the layout. For errors of NCCL and hangs see docs/troubleshooting.md."""
    def measure(flags):
        return beside_cpu(folder, flags, train_tiny(work.device, folder, work.ranks, flags))
    for fewest, group in LAYOUTS.items():
        for flags in map(work.compiled, group if work.ranks >= fewest else ()):
            yield flags, partial(measure, flags)


def bits(work: Work, folder: Path) -> Iterator[tuple]:
    """Two layouts must have the same bits. If not, find by smaller layouts which flag makes the
    difference: a kernel whose sums depend on the shape of its input is the likely cause."""
    first, *others = [flags for fewest, flags in SAME_BITS.items() if work.ranks >= fewest]

    def measure(flags):
        run, expected = (train_tiny(work.device, folder, work.ranks, f) for f in (flags, first))
        return compare(f"{flags} / {first}", run, expected, 0)
    if others:
        yield others[-1], partial(measure, others[-1])


def resume(work: Work, folder: Path) -> Iterator[tuple]:
    """The last rank is killed in step 7; the same command must resume from a save after step 3 or
    6, and end with the losses of the CPU. If not, look at the files in the newest folder beside
    this table, and at its metrics.jsonl."""
    flags = "--zero 1 --save-every 3"

    def measure():
        again = partial(train_tiny, work.device, folder, work.ranks, flags,
                        out=tempfile.mkdtemp(dir=folder))
        with suppress(RuntimeError):
            again(KILL_IN_STEP="7")
        run = again()
        resumes = [event["step"] for event in run.events if event["event"] == "resume"]
        if not resumes:
            raise RuntimeError("the second start did not resume")
        return beside_cpu(folder, flags, run, f"; resumed after step {resumes[0]}")
    yield flags, measure
