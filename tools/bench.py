"""Measure speed and memory: the tables of docs/measurements.md. Nothing is asserted.

    python -m tools.bench                       # all tables: an hour on a quiet machine
    python -m tools.bench parallel_stack        # one or more, by name
    python -m tools.bench gpu                   # on one GPU: tools/gpu.py

Where PyTorch's own parallel stack (tools/peer.py) or another library does the same work, both sides
take turns, and their medians and the ratio are printed.
"""
import tools        # first: python tools/bench.py ends in its line

import copy
import functools
import gc
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import amp
import checkpoint
import data
import model
import parallel
import sample
import train
from model import GPT, SIZES, GPTConfig
from parallelism.buckets import state_bytes
from parallelism.groups import make_groups
from parallelism.kernels import use_kernels
from runtime import commandline, console, corpora, divergence, evaluation
from runtime.flops import flops_per_token, parameter_count
from runtime.options import Config
from tools import gpu, huggingface
from tools.peer import SHAPE
from tools.plan import memory_bytes
from tools.runs import PEER, ROOT, finished, random_data, rows_of, started

PAIRS = 5                       # each side's runs, in turn


def speed_of_train_py(folder, processes, *flags, vocab=257, shape=SHAPE, steps=3, warmup=2):
    """Tokens a second, train.py's own figure: the median after the warm-up."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
        finished(processes, ROOT / "train.py", "--data", random_data(folder, vocab), "--out", out,
                 *sizes, "--batch-size", 16, "--steps", warmup + steps, "--eval-every", 0,
                 "--save-every", 0, "--lr", 1e-3, *flags)
        speeds = [row["tokens_per_second"] for row in rows_of(out)]
    assert len(speeds) == warmup + steps
    return np.median(speeds[warmup:])


def speed_of_peer(processes, **work):
    return json.loads(finished(processes, PEER, json.dumps(work)))["tokens_per_second"]


def race(name, ours, theirs):
    """Both sides in turn, PAIRS times; prints medians and their ratio."""
    seen = [(ours(), theirs()) for _ in range(PAIRS)]
    us, them = np.median(seen, axis=0)
    print(f"| {name} | {us:,.4g} | {them:,.4g} | {us / them:.2f} |", flush=True)


# name, processes, train.py's flags, the peer's work; alone each side has its best micro-batch
RACES = [
    ("one process, fp32", 1, "--micro-batch 8", dict(mode="single", micro_batch=8)),
    ("one process, fp32, vocabulary 50304", 1, "--micro-batch 2", dict(mode="single", vocab=50304)),
    ("one process, bf16", 1, "--micro-batch 4", dict(mode="single", dtype="bf16", micro_batch=16)),
    ("one process, bf16, vocabulary 50304", 1, "--micro-batch 8",
     dict(mode="single", dtype="bf16", vocab=50304)),
    ("dp 2 / DDP", 2, "", dict(mode="ddp")),
    ("dp 2, zero 1 / ZeroRedundancyOptimizer", 2, "--zero 1", dict(mode="zero1")),
    ("dp 2, zero 3 / FSDP2", 2, "--zero 3", dict(mode="fsdp")),
    ("pp 2, gpipe", 2, "--pp 2", dict(mode="pp")),
    ("pp 2, 1f1b", 2, "--pp 2 --pp-schedule 1f1b", dict(mode="pp", schedule="Schedule1F1B")),
    ("tp 2 / DTensor", 2, "--tp 2", dict(mode="tp")),
    ("dp 2 x pp 2 x tp 2", 8, "--tp 2 --pp 2", dict(mode="3d")),
]


def parallel_stack(folder):
    print("\n| tokens a second | ours | PyTorch's | ratio |\n|---|---|---|---|")
    for name, processes, flags, theirs in RACES:
        flags = ["--micro-batch", 2, "--dtype", theirs.get("dtype", "fp32"), *flags.split()]
        vocab = theirs.get("vocab", 257)
        race(name, lambda: speed_of_train_py(folder, processes, *flags, vocab=vocab),
             lambda: speed_of_peer(processes, **theirs))


def three_dimensions(folder):
    print("\n| tokens a second | 2 x 2 x 2 | one process | ratio |\n|---|---|---|---|")
    race("8 processes / 1 on all cores",
         lambda: speed_of_train_py(folder, 8, "--tp", 2, "--pp", 2, "--micro-batch", 2),
         lambda: speed_of_train_py(folder, 1, "--micro-batch", 8))


@contextmanager
def all_cores():
    torch.set_num_threads(os.cpu_count())
    try:
        yield
    finally:
        torch.set_num_threads(1)


def per_second(work, amount):
    """A function that does the work once and returns amount / seconds."""
    def measure():
        start = time.perf_counter()
        work()
        return amount / (time.perf_counter() - start)
    return measure


def sampling(folder):
    """Beside one sample of Hugging Face generate in fp32, with the same weights."""
    try:
        import transformers
    except ImportError:
        return print("(Hugging Face: pip install transformers)")
    plain = GPT(GPTConfig(vocab_size=257, **SHAPE)).initialize(0).eval()
    state = {key: {} for key in checkpoint.KEYS} | dict(
        format=checkpoint.FORMAT, step=0, model=asdict(plain.cfg), tokenizer="bytes", data=None,
        parameters={name: p.detach()[:shape[0]] for (name, p), shape in zip(
            plain.named_parameters(), checkpoint.parameter_shapes(plain.cfg).values())})
    torch.save(state, folder / "plain.pt")
    huggingface.export_model(folder / "plain.pt", folder / "hf")
    hf = transformers.GPT2LMHeadModel.from_pretrained(folder / "hf").eval()
    print("\n| tokens sampled a second | ours | Hugging Face | ratio |\n|---|---|---|---|")
    with all_cores():
        for samples, dtype in itertools.product((1, 8), (torch.float32, torch.bfloat16)):
            ours = copy.deepcopy(plain).to(dtype)
            use_kernels(ours)

            def sample_ours():
                generators = [None] * samples
                list(sample.generate(ours, [1], 255, end=-1, temperature=0, generators=generators))

            def sample_theirs():
                hf.generate(torch.tensor([[1]]), max_new_tokens=255, min_new_tokens=255,
                            do_sample=False, use_cache=True, pad_token_id=0)
            race(f"{samples} at a time, {dtype}", per_second(sample_ours, 255 * samples),
                 per_second(sample_theirs, 255))


def tokenizing(folder):
    gpt2 = data.get_tokenizer("gpt2")
    files = corpora.standard_library()
    texts = [file.read_text() for file in files]
    size = sum(file.stat().st_size for file in files) / 1e6
    cores = os.cpu_count()
    print("\n| MB a second | ours | tiktoken | ratio |\n|---|---|---|---|")
    race("data.py, GPT-2 BPE / encode_ordinary_batch",
         per_second(lambda: data.prepare(files, folder, "gpt2"), size),
         per_second(lambda: gpt2.encode_ordinary_batch(texts, num_threads=cores), size))


def checkpoints(folder):
    out = folder / "out"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    finished(1, ROOT / "train.py", "--data", random_data(folder, 50257), "--out", out, *sizes,
             "--seq-len", 64, "--batch-size", 1, "--micro-batch", 1, "--steps", 1,
             "--warmup-steps", 1, "--eval-every", 0)
    latest, theirs = out / "latest.pt", folder / "theirs"
    state = torch.load(latest)
    size = latest.stat().st_size / 1e6
    room = {key: {name: torch.empty_like(x) for name, x in state[key].items()}
            for key in checkpoint.STATE}

    def their_save():
        theirs.unlink(missing_ok=True)              # ours too is a new file, and removes the old
        with open(theirs, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def copied(loaded):
        for key, tensors in room.items():
            for name, tensor in tensors.items():
                tensor.copy_(loaded[key][name])
    print("\n| MB a second | ours | torch's | ratio |\n|---|---|---|---|")
    race("save / torch.save, fsync", per_second(lambda: checkpoint.save(state, out, 1), size),
         per_second(their_save, size))
    race("CRCs, load, copy / torch.load, copy", per_second(
        lambda: checkpoint.verify(latest) or copied(checkpoint.load(latest)), size),
        per_second(lambda: copied(torch.load(theirs)), size))


def monitoring(folder):
    """What the monitor of divergence adds to a step of `nano`, timed alone: steps vary by more."""
    cfg = GPTConfig(**SIZES["nano"])
    step = 16 * cfg.seq_len / speed_of_train_py(folder, 1, "--micro-batch", 4, steps=20, warmup=10,
                                                shape=SIZES["nano"])
    x = torch.randn(4, cfg.seq_len, cfg.n_embd)
    monitor = divergence.DivergenceMonitor(losses=list(range(64, 0, -1)), lowest=1.0)
    stats = train.StepStats(3.0, 1.0, 1.0, skipped="", loss_scale=1.0, local_loss=None)

    def observe():
        for _ in range(4):              # microbatches
            torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).sum()
        monitor.observe(1, stats)
    seconds = [1 / per_second(observe, 1)() for _ in range(200)]
    print(f"the monitor takes {1e6 * np.median(seconds):.0f} us of a step of {1e3 * step:.0f} ms: "
          f"{np.median(seconds) / step:.2%}")


def dropout_seeds(folder):
    """What it costs to seed a mask: our one generator, and torch.manual_seed for all devices."""
    def ours():
        model.seed_dropout(torch.device("cpu"), 1, "embed")

    def theirs():
        torch.manual_seed(1)
    for name, seed in [("model.seed_dropout", ours), ("torch.manual_seed", theirs)]:
        rates = [per_second(lambda: [seed() for _ in range(1000)], 1000)() for _ in range(9)]
        print(f"{name} takes {1e6 / np.median(rates):.1f} us", flush=True)


def first_step(folder):
    """Seconds from the command to the end of the first step."""
    def seconds(processes, start, *command):
        began = time.perf_counter()
        process = started(processes, *command)
        while not process.stdout.readline().startswith(start):
            assert process.poll() is None
        duration = time.perf_counter() - began
        process.communicate(timeout=300)
        return duration
    print("\n| seconds to the first step | ours | PyTorch's | ratio |\n|---|---|---|---|")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    for processes, mode, flags in [(1, "single", ""), (8, "ddp", "--micro-batch 2"),
                                   (8, "3d", "--micro-batch 2 --tp 2 --pp 2")]:
        work = json.dumps(dict(mode=mode, steps=1, warmup=0))
        command = [ROOT / "train.py", "--data", random_data(folder, 257), *sizes, "--steps", 2,
                   *flags.split()]

        def ours():
            return seconds(processes, "step 1/", *command, "--out", tempfile.mkdtemp(dir=folder))
        race(f"{processes} processes, {mode}", ours, lambda: seconds(processes, "{", PEER, work))


def rate_of_products(n=2048):
    """FLOP/s of a large square matrix product on all cores, fp32."""
    with all_cores():
        a = torch.randn(n, n)
        return max(per_second(lambda: a @ a, 2 * n ** 3)() for _ in range(4))


def scaling_of_work(folder):
    """One quantity at a time, 4096 tokens a step; the machine's rate is measured with each."""
    print("\n| one process, fp32 | tokens a second | GFLOP/s | of the products' rate |\n"
          "|---|---|---|---|")
    for name, value in [("n_embd", 192), ("n_embd", 384), ("n_embd", 768), ("n_embd", 1024),
                        ("n_layer", 3), ("n_layer", 12), ("seq_len", 64), ("seq_len", 1024),
                        ("vocab", 8192), ("vocab", 50304)]:
        shape = {**SHAPE, "vocab": 257, name: value}
        vocab = shape.pop("vocab")
        shape["n_head"] = shape["n_embd"] // 64
        flops = flops_per_token(GPTConfig(vocab_size=vocab, **shape))
        batch = 4096 // shape["seq_len"]
        rate = rate_of_products()
        speed = speed_of_train_py(folder, 1, "--batch-size", batch, "--micro-batch",
                                  max(1, batch // 4), vocab=vocab, shape=shape)
        print(f"| {name} {value} | {speed:,.0f} | {speed * flops / 1e9:,.0f} | "
              f"{speed * flops / rate:.2f} |", flush=True)


def scaling_of_layouts(folder):
    """Where does a layout pay? Tokens a second of one process with two threads; those of two
    processes with one each, relative to it."""
    layouts = {"one process": (1, ""), "dp 2": (2, ""), "dp 2, zero 3": (2, "--zero 3"),
               "tp 2": (2, "--tp 2")}
    print("\n| parameters | " + " | ".join(layouts) + " |\n" + "|---" * 5 + "|")
    for n_layer, n_embd in [(4, 128), (6, 384), (10, 512), (14, 768)]:
        shape = dict(n_layer=n_layer, n_head=n_embd // 64, n_embd=n_embd, seq_len=256)
        seen = {name: [] for name in layouts}
        for _ in range(PAIRS):
            for name, (processes, flags) in layouts.items():
                seen[name].append(speed_of_train_py(folder, processes, "--micro-batch", 2,
                                                    *flags.split(), shape=shape, steps=1, warmup=1))
        count = parameter_count(GPTConfig(vocab_size=257, **shape))
        alone, *others = map(np.median, seen.values())
        print(f"| {count / 1e6:.1f}M | {alone:,.0f} | " + " | ".join(
            f"{speed / alone:.2f}" for speed in others) + " |", flush=True)


def scaling_of_processes(folder):
    """One thread each. The bubble: what a step takes beyond its microbatches, whose time is the
    slope between 8 and 32 of them."""
    print("\n| layout | tokens a second |\n|---|---|")
    for processes, flags in [(1, ""), (2, ""), (4, ""), (2, "--tp 2"), (2, "--pp 2"),
                             (4, "--pp 4")]:
        speed = speed_of_train_py(folder, processes, "--micro-batch", 2, *flags.split())
        print(f"| {processes} processes {flags} | {speed:,.0f} |", flush=True)
    seconds = {}
    for num_microbatches in (1, 2, 4, 8, 32):
        speed = speed_of_train_py(folder, 2, "--pp", 2, "--batch-size", num_microbatches,
                                  "--micro-batch", 1, steps=9)
        seconds[num_microbatches] = num_microbatches * SHAPE["seq_len"] / speed
    each = (seconds[32] - seconds[8]) / 24
    print("\n| microbatches on 2 stages | bubble measured | (p - 1) / (m + p - 1) |\n|---|---|---|")
    for num_microbatches, time_ in seconds.items():
        print(f"| {num_microbatches} | {1 - num_microbatches * each / time_:.2f} | "
              f"{1 / (num_microbatches + 1):.2f} |")


def relative_speeds(folder):
    """Tokens a second on two processes at each stage, relative to stage 0: medians of runs that
    take turns."""
    seen = {zero: [] for zero in range(4)}
    for _ in range(PAIRS):
        for zero, speeds in seen.items():
            speeds.append(speed_of_train_py(folder, 2, "--micro-batch", 2, "--zero", zero,
                                            steps=4, warmup=1))
    return [np.median(speeds) / np.median(seen[0]) for speeds in seen.values()]


# What a process holds at its peak: 101M parameters on four replicas; a pipeline of four stages with
# eight layers of width 512, 16 microbatches of two sequences; and long sequences on four ranks.

BIG = GPTConfig(vocab_size=257, seq_len=32, n_layer=8, n_head=8, n_embd=1024)
LONG = GPTConfig(vocab_size=257, seq_len=512, n_layer=8, n_head=8, n_embd=512)
PIPELINES = {"gpipe": {}, "1f1b": dict(pp_schedule="1f1b"), "recompute": dict(recompute=True),
             "interleaved": dict(pp_schedule="interleaved", pp_chunks=2),
             "zb-h1": dict(pp_schedule="zb-h1")}
CONTEXT = GPTConfig(vocab_size=257, seq_len=8192, n_layer=4, n_head=4, n_embd=256)
CONTEXTS = {"8,192 positions": (8192, 1), "8,192 positions, cp 4": (8192, 4),
            "24,576 positions, cp 4": (24_576, 4)}
KEPT = ("parameters", "gradients", "masters", "moments")        # from the start to the end


def resident(what):
    """Bytes of this process, now (VmRSS) or at most since the last reset (VmHWM)."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak_memory(config, cfg, store, rank):
    """(bytes at the peak of a step, less what was there before the model was made; the plan's:
    state, buffers, activations) of this rank of four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    grid = parallel.Grid(4 // (config.tp * config.pp * config.cp), config.pp, config.tp, rank,
                         chunks=config.pp_chunks, cp=config.cp)
    make_groups(grid)

    def step(cfg):
        train_data, val_data = (data.TokenDataset(config.data, split, cfg.seq_len)
                                for split in data.SPLITS)
        run = train.Run(config, cfg, grid, torch.device("cpu"), train_data, val_data, None)
        run.save = lambda: None
        run.watch.log = console.RunLog(mock.Mock())
        with mock.patch.object(evaluation, "evaluate_source", lambda *_: 0.0):
            run.train(mock.Mock(held=nullcontext))
    # Libraries allocate at their first use.
    step(GPTConfig(vocab_size=257, seq_len=16, n_layer=config.pp * config.pp_chunks, n_head=8,
                   n_embd=32))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")           # VmHWM starts over
    before = resident("VmRSS")
    step(cfg)
    peak = resident("VmHWM") - before
    sizes = memory_bytes(cfg, grid, config, on_gpu=False)
    dist.barrier()
    return peak, (sum(sizes[kind] for kind in KEPT), sizes["buffers"], sizes["activations"])


def peak_of(cfg, folder, **flags):
    """`peak_memory` of each of four ranks, in fresh processes, whose freed memory goes back to the
    system at once."""
    config = Config(**dict(
        data=str(random_data(folder, cfg.vocab_size, cfg.seq_len + 1)), out=str(folder), steps=1,
        batch_size=8, micro_batch=2, lr=1e-3, eval_every=0, save_every=0, device="cpu") | flags)
    spawn = multiprocessing.get_context("spawn")            # malloc reads its environment first
    with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1"), \
            tempfile.TemporaryDirectory() as store, spawn.Pool(4) as processes:
        measure = functools.partial(peak_memory, config, cfg, f"{store}/store")
        return processes.map_async(measure, range(4), chunksize=1).get(500)


def memory(folder):
    heads = ["", "bytes a parameter", "state", "buffers", "activations", "sum", "measured peak",
             "measured / sum"]

    def row(name, peaks, formula, *more):
        peak, sizes = peaks[0]
        cells = [name, formula, *(f"{x / 1e6:,.0f} MB" for x in (*sizes, sum(sizes), peak)),
                 f"{peak / sum(sizes):.2f}", *more]
        print("| " + " | ".join(cells) + " |", flush=True)
    print("| " + " | ".join([*heads, "tokens a second"]) + " |\n" + "|---" * 9 + "|")
    speeds = relative_speeds(folder)
    for zero in range(4):
        # Four parameters, of which each of four replicas has one in a shard.
        state, _ = state_bytes(4, 0, 4, amp.PRECISIONS["fp32"], zero, offload=False)
        row(f"zero {zero}", peak_of(BIG, folder, zero=zero, micro_batch=1),
            f"{sum(state.values()) / 4:g}", f"{speeds[zero]:.2f}")
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * 8 + "|")
    for name, flags in PIPELINES.items():
        row(name, peak_of(LONG, folder, pp=4, batch_size=32, **flags), "16")
    for name, (seq_len, cp) in CONTEXTS.items():
        cfg = replace(CONTEXT, seq_len=seq_len)
        row(name, peak_of(cfg, folder, cp=cp, batch_size=4 // cp, micro_batch=1), "16")


TABLES = dict(parallel_stack=parallel_stack, three_dimensions=three_dimensions, memory=memory,
              sampling=sampling, tokenizing=tokenizing, checkpoints=checkpoints,
              first_step=first_step, monitoring=monitoring, dropout_seeds=dropout_seeds,
              scaling_of_work=scaling_of_work, scaling_of_layouts=scaling_of_layouts,
              scaling_of_processes=scaling_of_processes)


def main() -> None:
    if sys.argv[1:2] == ["gpu"]:
        gpu.main(sys.argv[2:])
        return
    parser = commandline.Parser("bench.py", "python -m tools.bench [NAME ...]", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=", ".join(TABLES) + " (default: all); or gpu, with flags of its own")
    names = parser.parse_args().names or list(TABLES)
    os.environ["PYTHONPATH"] = str(ROOT)                    # for the programs that it starts
    for name in names:
        if name not in TABLES:
            parser.error(f"there is no table {name!r}: there are {', '.join(TABLES)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""                 # these tables are of CPUs
    torch.set_num_threads(1)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            TABLES[name](Path(folder))


if __name__ == "__main__":
    main()
