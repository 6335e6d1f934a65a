"""The tables of `python -m tools.bench`, each printed by a function of its name."""
import copy
import itertools
import json
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import torch

import amp
import checkpoint
import model
import sample
from corpus import inputs
from corpus.prepare import prepare
from corpus.tokenizers import get_tokenizer
from model import GPT, GPTConfig
from parallelism.buckets import state_bytes
from parallelism.kernels import use_kernels
from runtime.flops import parameter_count
from tools import huggingface
from tools.bench.peak import BIG, CONTEXT, CONTEXTS, LONG, PIPELINES, peak_of
from tools.bench.peer import SHAPE
from tools.bench.programs import PEER, ROOT, finished, random_data, rows_of

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
    gpt2 = get_tokenizer("gpt2")
    files = inputs.standard_library()
    texts = [file.read_text() for file in files]
    size = sum(file.stat().st_size for file in files) / 1e6
    cores = os.cpu_count()
    print("\n| MB a second | ours | tiktoken | ratio |\n|---|---|---|---|")
    race("data.py, GPT-2 BPE / encode_ordinary_batch",
         per_second(lambda: prepare(files, folder, "gpt2"), size),
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


def dropout_seeds(folder):
    """What it costs to seed a mask: our one generator, and torch.manual_seed for all devices."""
    def ours():
        model.seed_dropout(torch.device("cpu"), 1, "embed")

    def theirs():
        torch.manual_seed(1)
    for name, seed in [("model.seed_dropout", ours), ("torch.manual_seed", theirs)]:
        rates = [per_second(lambda: [seed() for _ in range(1000)], 1000)() for _ in range(9)]
        print(f"{name} takes {1e6 / np.median(rates):.1f} us", flush=True)


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


def relative_speeds(folder):
    """Tokens a second on two processes at each stage, relative to stage 0: medians of runs that
    take turns."""
    seen = {zero: [] for zero in range(4)}
    for _ in range(PAIRS):
        for zero, speeds in seen.items():
            speeds.append(speed_of_train_py(folder, 2, "--micro-batch", 2, "--zero", zero,
                                            steps=4, warmup=1))
    return [np.median(speeds) / np.median(seen[0]) for speeds in seen.values()]


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


TABLES = dict(parallel_stack=parallel_stack, memory=memory, sampling=sampling,
              tokenizing=tokenizing, checkpoints=checkpoints, dropout_seeds=dropout_seeds,
              scaling_of_layouts=scaling_of_layouts)
