"""The tables of `python -m tools.bench`, each printed by a function of its name."""
import timeit
from dataclasses import replace

import numpy as np
import torch

import model
from base.flops import parameter_count
from model import GPTConfig
from tools.bench import launch
from tools.bench.peak_memory import BIG, CONTEXT, CONTEXTS, MICROBATCHES, NARROW, PIPELINES, peak_of
from tools.bench.pytorch_stack import SHAPE
from tools.markdown_tables import heading, row

PAIRS = 5                       # each side's runs, in turn

# name, processes, train.py's flags, the peer's work; alone each side has its best micro-batch
RACES = [
    ("one process, fp32", 1, "--micro-batch 8", dict(mode="single", micro_batch=8)),
    ("one process, fp32, vocabulary 50304", 1, "--micro-batch 2", dict(mode="single", vocab=50304)),
    ("one process, bf16", 1, "--micro-batch 4", dict(mode="single", dtype="bf16", micro_batch=16)),
    ("one process, bf16, vocabulary 50304", 1, "--micro-batch 8",
     dict(mode="single", dtype="bf16", vocab=50304)),
    ("dp 2 / DDP", 2, "", dict(mode="ddp")),
    ("dp 2, zero 3 / FSDP2", 2, "--zero 3", dict(mode="fsdp")),
    ("pp 2, gpipe", 2, "--pp 2", dict(mode="pp")),
    ("pp 2, 1f1b", 2, "--pp 2 --pp-schedule 1f1b", dict(mode="pp", schedule="Schedule1F1B")),
    ("tp 2 / DTensor", 2, "--tp 2", dict(mode="tp")),
    ("dp 2 x pp 2 x tp 2", 8, "--tp 2 --pp 2", dict(mode="3d")),
]


def speed_of_train_py(folder, processes, *flags, vocab=257, shape=SHAPE, steps=3, warmup=2):
    """Tokens a second, train.py's own figure: the median after the warm-up."""
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
    rows, _ = launch.train_py(processes, folder, vocab, *sizes, "--batch-size", 16,
                              "--micro-batch", 2, "--steps", warmup + steps, "--lr", 1e-3, *flags)
    return np.median([row["tokens_per_second"] for row in rows[warmup:]])


def parallel_stack(folder):
    """Both sides in turn, PAIRS times: medians and their ratio."""
    print("", *heading("tokens a second", "ours", "PyTorch's", "ratio"), sep="\n")
    for name, processes, flags, work in RACES:
        flags = ["--dtype", work.get("dtype", "fp32"), *flags.split()]
        vocab = work.get("vocab", 257)
        ours, theirs = [], []
        for _ in range(PAIRS):
            ours.append(speed_of_train_py(folder, processes, *flags, vocab=vocab))
            theirs.append(launch.peer(processes, **work)["tokens_per_second"])
        us, them = np.median(ours), np.median(theirs)
        print(row(name, f"{us:,.4g}", f"{them:,.4g}", f"{us / them:.2f}"), flush=True)


def scaling_of_layouts(folder):
    """Where does a layout pay? Tokens a second of one process with two threads; those of two
    processes with one each, relative to it."""
    layouts = {"one process": (1, ""), "dp 2": (2, ""), "dp 2, zero 3": (2, "--zero 3"),
               "tp 2": (2, "--tp 2")}
    print("", *heading("parameters", *layouts), sep="\n")
    for n_layer, n_embd in [(4, 128), (6, 384), (10, 512), (14, 768)]:
        shape = dict(n_layer=n_layer, n_head=n_embd // 64, n_embd=n_embd, seq_len=256)
        seen = {name: [] for name in layouts}
        for _ in range(PAIRS):
            for name, (processes, flags) in layouts.items():
                seen[name].append(speed_of_train_py(folder, processes, *flags.split(), shape=shape,
                                                    steps=1, warmup=1))
        count = parameter_count(GPTConfig(vocab_size=257, **shape))
        alone, *others = map(np.median, seen.values())
        print(row(f"{count / 1e6:.1f}M", f"{alone:,.0f}",
                  *(f"{speed / alone:.2f}" for speed in others)), flush=True)


def memory(folder):
    """Rank 0's peak beside the plan's estimate."""
    runs = [(f"zero {zero}", BIG, dict(zero=zero, micro_batch=1)) for zero in range(4)]
    runs += [(name, NARROW, MICROBATCHES | flags) for name, flags in PIPELINES.items()]
    runs += [(name, replace(CONTEXT, seq_len=seq_len),
              dict(cp=cp, batch_size=4 // cp, micro_batch=1))
             for name, (seq_len, cp) in CONTEXTS.items()]
    print("", *heading("", "state", "buffers", "activations", "sum", "measured peak",
                       "measured / sum"), sep="\n")
    for name, cfg, flags in runs:
        peak, sizes = peak_of(cfg, folder, **flags)[0]
        cells = [f"{x / 1e6:,.0f} MB" for x in (*sizes, sum(sizes), peak)]
        print(row(name, *cells, f"{peak / sum(sizes):.2f}"), flush=True)


def dropout_seeds(folder):
    """What it costs to seed a mask: our one generator, and torch.manual_seed for all devices."""
    def ours():
        model.seed_dropout(torch.device("cpu"), 1, "embed")

    def theirs():
        torch.manual_seed(1)
    for name, seed in [("model.seed_dropout", ours), ("torch.manual_seed", theirs)]:
        milliseconds = timeit.repeat(seed, number=1000, repeat=9)   # 1000 take as many seconds
        print(f"{name} takes {1e3 * np.median(milliseconds):.1f} us", flush=True)


TABLES = dict(parallel_stack=parallel_stack, memory=memory, dropout_seeds=dropout_seeds,
              scaling_of_layouts=scaling_of_layouts)
