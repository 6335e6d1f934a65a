"""The policy of a run: flags, schedules, the loop, logging, when to save and when to stop.

    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp is what remains: 2

A step has these phases; `Run.train` shows them on one screen:

    batch       the next samples of a seeded order; a rank only decides which rows it reads
    forward and backward, microbatch by microbatch; full buckets of gradients are reduced meanwhile
    agree       one small all-reduce tells every rank what it must know of the step (StepStats)
    observe     the monitor of divergence decides alike on every rank: update or roll back
    unscale, clip, AdamW on the masters; or skip all three after an overflow
    evaluate and log, then save

Everything a resumed run needs is in the checkpoint: N steps are bit for bit N/2 steps, a stop and
N/2 more, in the same layout on the CPU. Flags given at the resume win over the stored ones, which
win over the defaults; layout, precision and paths are never taken from the checkpoint.

Exit status: 0 done, or saved on a signal; 1 the run failed; 2 a user's mistake, told in one line.
"""
import signal

if __name__ == "__main__":      # Ctrl-C ends it at once, until there is something to save
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import difflib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import statistics
import string
import sys
import time
import traceback
from bisect import bisect_left
from collections import Counter, deque
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

import checkpoint
from amp import (MAX_SKIPPED, PRECISIONS, DivergenceMonitor, LossScaler, StepStats, clip_factor,
                 make_scaler)
from data import Source, TokenDataset
from model import (DEVICES, IGNORE_INDEX, SIZES, GPTConfig, derive_seed, flops_per_token,
                   multiplies_in_fp32, parameter_count, peak_flops)
from parallel import (SCHEDULES, FlatParameters, Grid, PeerError, RunError, StopSignal,
                      all_gather_object, all_ranks, all_reduce, assert_equal_across_ranks,
                      assert_own_gpu, build_stage, check_layout, check_memory, fatal_message,
                      fully_shard, locate_nonfinite, make_grid, make_plan, memory_bytes,
                      microbatches, on_rank0, param_specs, pick_device, print_rank0, process_group,
                      run_schedule, schedule_of, search_layouts, to_host, wrap_blocks)

EVAL_SEQUENCES = 128        # fixed validation windows, evenly spaced over those of each source
COUNTERS = ("step", "consumed_samples", "tokens", "optimizer_steps")        # of a run


# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------


def flag(default, help, kind=None, choices=None, low=None, below=None, group=None):
    """A field of Config: its default, what --help says, the numbers it takes (low <= x < below),
    and the heading in --help that begins with it."""
    return dataclasses.field(default=default, metadata=dict(
        help=help, kind=kind or type(default), choices=choices, low=low, below=below, group=group))


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = flag("data/python", "directory of token shards, made by data.py; or several by "
                     "weight: A=0.7,B=0.3", group="paths")
    out: str = flag("out", "directory for checkpoints and metrics.jsonl")
    log: str = flag(None, "beside metrics.jsonl: tensorboard (in OUT/tensorboard), wandb (which "
                    "keeps the steps that a rollback voids), or tensorboard,wandb", str,
                    choices=["tensorboard", "wandb", "tensorboard,wandb", "wandb,tensorboard"])
    compare: list = flag(None, "draw and list the runs in these directories, and leave; capitals "
                         "are validation losses, > a resume, < a rollback", list)
    model: str = flag("nano", "named size: " + ", ".join(SIZES), choices=list(SIZES), group="model")
    n_layer: int = flag(None, "blocks (this and the next four override --model)", int, low=1)
    n_head: int = flag(None, "attention heads", int, low=1)
    n_embd: int = flag(None, "channels", int, low=1)
    seq_len: int = flag(None, "positions, in tokens", int, low=1)
    activation: str = flag(None, "gelu or relu", str, choices=["gelu", "relu"])
    dropout: float = flag(0.0, "probability on embeddings, attention and residuals", low=0, below=1)
    batch_size: int = flag(16, "sequences a step, of the whole job", low=1, group="optimisation")
    batch_ramp: str = flag(None, "START:INCREMENT:SEQUENCES, the batch grows to --batch-size by "
                           "increments over so many sequences", str)
    steps: int = flag(800, "steps of the whole run", low=1)
    epochs: int = flag(None, "instead of --steps: read as many sequences as the data has, N times",
                       int, low=1)
    lr: float = flag(4e-3, "peak learning rate", low=0)
    min_lr_ratio: float = flag(0.1, "last learning rate / peak; 1: it stays constant", low=0)
    warmup_steps: int = flag(50, "steps of linear warm-up", low=0)
    lr_schedule: str = flag("cosine", "decay: cosine or linear", choices=["cosine", "linear"])
    weight_decay: float = flag(0.1, "AdamW's, on matrices only", low=0)
    beta1: float = flag(0.9, "AdamW's first", low=0, below=1)
    beta2: float = flag(0.95, "AdamW's second", low=0, below=1)
    clip: float = flag(1.0, "largest global gradient norm; 0: no clipping", low=0)
    seed: int = flag(1337, "of the initial weights, the order of the data, dropout", low=0)
    tp: int = flag(1, "tensor-parallel ranks", low=1, group="layout")
    pp: int = flag(1, "pipeline stages", low=1)
    pp_schedule: str = flag("gpipe", "pipeline schedule: gpipe or 1f1b", choices=list(SCHEDULES))
    device: str = flag("auto", "auto: cuda or, for one process, mps where there is one",
                       choices=["auto", "cpu", "cuda", "mps"])
    compile: bool = flag(False, "torch.compile for the blocks; what communicates or draws masks "
                         "stays as it is")
    timeout: int = flag(600, "seconds to wait for another rank before giving up (on GPUs for a "
                        "whole step)", low=1)
    micro_batch: int = flag(None, "sequences a microbatch (default: 4, 2 or 1, the largest that "
                            "makes a multiple of pp microbatches)", int, low=1, group="memory")
    zero: int = flag(0, "replicas shard: 1 the optimizer's state, 2 gradients too, 3 parameters "
                     "too", choices=[0, 1, 2, 3])
    recompute: bool = flag(False, "compute a block's activations again in backward")
    sequence_parallel: bool = flag(False, "between the matrices, tp ranks split the positions")
    offload: bool = flag(False, "keep the optimizer's state in host memory and run it there")
    dtype: str = flag("fp32", "type of parameters and activations: " + ", ".join(PRECISIONS),
                      choices=list(PRECISIONS), group="precision")
    save_every: int = flag(200, "steps between checkpoints; 0: only the last", low=0,
                           group="checkpoints and evaluation")
    keep: int = flag(3, "step files kept", low=1)
    resume: str = flag("auto", "auto: the newest whole checkpoint of --out; never; or a file")
    init_from: str = flag(None, "checkpoint whose weights a fresh run begins with", str)
    eval_every: int = flag(200, "steps between evaluations; 0: only the last", low=0)
    eval_only: bool = flag(False, "evaluate the checkpoint and leave")
    rollback: str = flag("on", "after a divergence go back, skip batches, lower the learning rate: "
                         "on or off", choices=["on", "off"], group="stability")
    max_rollbacks: int = flag(5, "rollbacks of the whole run, then it stops", low=0)
    spike_margin: float = flag(6.0, "deviations that a high loss is above the lowest median", low=1)
    spike_steps: int = flag(3, "high losses in a row that make a divergence", low=1)
    skip_steps: str = flag(None, "A:B, leave out the batches of steps A to B, inclusive", str)
    plan: str = flag(None, "print what this run would need of GPUs, and run nothing: text or json; "
                     "or search, search-json: the ten fastest layouts that fit", str,
                     ["text", "json", "search", "search-json"], group="plan")
    world: int = flag(None, "GPUs", int, low=1)
    gpu: str = flag(None, "one of " + ", ".join(DEVICES), str, list(DEVICES))
    gpus_per_node: int = flag(8, "GPUs of a machine", low=1)
    mtbf_hours: float = flag(5100.0, "between two failures of a machine; OPT-175B: 35 restarts in "
                             "two months on 124", low=1)
    vocab_size: int = flag(50257, "tokens of the vocabulary; a run has that of its data", low=1)


PLAN = ("world", "gpu", "gpus_per_node", "mtbf_hours", "vocab_size")
# Paths, layout and precision belong to one start: they are never taken from a checkpoint. (But
# --init-from is remembered: it says how the run began.)
LOCAL = {"data", "out", "log", "compare", "resume", "eval_only", "tp", "pp", "pp_schedule",
         "device", "compile", "timeout", "micro_batch", "zero", "recompute", "sequence_parallel",
         "offload", "dtype", "plan", *PLAN, "epochs"}       # what remains of epochs is `steps`
FREE = {"steps", "save_every", "eval_every", "keep"}        # other values make no other run
SWITCHES = ("recompute", "sequence_parallel", "offload", "compile")
LASTING = [f.name for f in dataclasses.fields(Config) if f.name not in LOCAL]
SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "activation")
OTHER_NAMES = {     # of our flags, in nanoGPT, picotron and Megatron-LM; README.md has more
    "steps": "max-iters train-iters", "lr": "learning-rate", "min-lr-ratio": "min-lr",
    "tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size",
    "batch-size": "global-batch-size", "micro-batch": "micro-batch-size mbs",
    "seq-len": "block-size seq-length", "clip": "grad-clip clip-grad", "data": "dataset data-path",
    "warmup-steps": "warmup-iters lr-warmup-iters", "out": "out-dir save", "resume": "load",
    "dtype": "bf16 fp16", "recompute": "recompute-granularity", "save-every": "save-interval"}


def settings_of(config: Config) -> dict:
    """What a checkpoint and the log keep of a run's flags."""
    return {name: value for name, value in dataclasses.asdict(config).items()
            if name not in ("plan", "compare", *PLAN)}


def step_range(text: str) -> tuple[int, int]:
    """"A:B" -> (A, B); raises ValueError."""
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"argument --skip-steps: {text} must be A:B, two steps from 1 on, A not "
                         f"after B")
    return first, last


def parse_flags(arguments) -> dict:
    """The flags that were given, checked one by one; raises ValueError."""
    parser = argparse.ArgumentParser(description="Train a GPT.", allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    def refuse(message):
        raise ValueError(message)
    parser.error, ranges = refuse, {}
    for f in dataclasses.fields(Config):
        kind, low, below = (f.metadata[name] for name in ("kind", "low", "below"))
        ranges[f.name] = low, below
        if f.metadata["group"] is not None:
            group = parser.add_argument_group(f.metadata["group"])
        notes = [f"at least {low}"] * (low is not None) + [f"below {below}"] * bool(below)
        notes += [f"default {f.default}"] * (f.default is not None and kind is not bool)
        how = dict(action="store_true") if kind is bool else dict(
            nargs="+", metavar="OUT") if kind is list else dict(
            type=kind, choices=f.metadata["choices"],
            metavar={int: "N", float: "X", str: "NAME"}[kind])
        group.add_argument("--" + f.name.replace("_", "-"), **how,
                           help=f.metadata["help"] + f" ({', '.join(notes)})" * bool(notes))
    # Underscores, as nanoGPT's flags have, are dashes.
    given, unknown = parser.parse_known_args([
        re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), text) for text in arguments])
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-")
        near = [ours for ours, theirs in OTHER_NAMES.items() if name in theirs.split()] or (
            difflib.get_close_matches(name, [known.replace("_", "-") for known in ranges], 1, 0.75))
        refuse(f"unknown argument {unknown[0]}: " + (f"did you mean --{near[0]}?" if near else
               "--help lists the flags, README.md what others call them"))
    given = vars(given)
    for name, value in given.items():
        low, below = ranges[name]
        if low is not None and not low <= value < (below or math.inf):
            refuse(f"argument --{name.replace('_', '-')}: {value:g} must be at least {low} and "
                   + (f"below {below}" if below else "finite"))
    step_range(given.get("skip_steps", "1:1"))
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", given.get("batch_ramp", "1:1:1")):
        refuse(f"argument --batch-ramp: {given['batch_ramp']} must be START:INCREMENT:SEQUENCES, "
               f"three numbers from 1 on")
    if {"steps", "epochs"} <= set(given):
        refuse("--steps and --epochs both say when the run ends: drop one")
    if "plan" in given and not {"world", "gpu"} <= given.keys():
        refuse("--plan needs --world, the number of GPUs, and --gpu, " + ", ".join(DEVICES))
    for name in ("epochs", "batch_ramp", "eval_only") if "plan" in given else ():
        if name in given:
            refuse(f"argument --{name.replace('_', '-')}: does not go with --plan")
    for name in PLAN if "plan" not in given else ():
        if name in given:
            refuse(f"argument --{name.replace('_', '-')}: goes with --plan alone")
    return given


def model_shape(flags: dict) -> dict:
    """What the flags say of the model's shape."""
    named = SIZES[flags["model"]] if "model" in flags else {}
    return {**named, **{n: flags[n] for n in SHAPE if flags.get(n) is not None}}


def merge_config(given: dict, state: dict | None, initial=None) -> tuple[Config, dict]:
    """Command line, then checkpoint, then defaults -> the config and the model's shape (without
    vocabulary and dropout). Of the checkpoint `initial` a fresh run has the shape, or fewer
    positions. Raises ValueError where the command line wants another model."""
    source, wanted = state or initial, model_shape(given)
    if source is None:
        config = Config(**given)
        return config, model_shape(vars(config))
    for name, value in wanted.items():
        has, shorter = source["model"][name], name == "seq_len" and state is None
        if value != has and not (shorter and value < has):
            raise ValueError(f"the checkpoint's model has {name} {has}, not {value}: drop the "
                             f"flag, or use another {'--out' if state else '--init-from'}")
    shape = {**{name: source["model"][name] for name in SHAPE}, **wanted}
    if state is None:
        return Config(**given), shape
    stored = {name: state["config"][name] for name in LASTING if name in state["config"]}
    return Config(**{**stored, **given}), shape


def check_config(config: Config, shape: dict, vocab_size: int,
                 world: int) -> tuple[Config, GPTConfig]:
    """The config with a microbatch, and the model. Raises ValueError if they cannot run."""
    cfg = GPTConfig(vocab_size=vocab_size, dropout=config.dropout, **shape)
    sizes, _ = batch_sizes(config)
    if config.batch_size not in sizes and not config.eval_only:
        raise ValueError(f"--batch-ramp {config.batch_ramp} does not end at --batch-size "
                         f"{config.batch_size}: START and INCREMENTs must add up to it")
    if config.micro_batch is None:
        # Sequences of each replica.
        replica = max(1, math.gcd(*sizes) * config.tp * config.pp // world)
        config = dataclasses.replace(config, micro_batch=next(
            (m for m in (4, 2, 1) if replica % (m * config.pp) == 0), 1))
    if config.eval_only:            # its batches are its own
        dp = max(1, world // (config.tp * config.pp))
        sizes = [dp * config.micro_batch]
        config = dataclasses.replace(config, batch_size=sizes[0])
    for size in sizes:
        check_layout(cfg, world, config.tp, config.pp, size, config.micro_batch, config.zero,
                     config.sequence_parallel)
    return config, cfg


def validate(given: dict, state: dict | None, world: int,
             initial: dict | None = None) -> tuple[Config, GPTConfig]:
    """Flags and checkpoint -> config and model. Raises ValueError or OSError if they cannot run."""
    config, shape = merge_config(given, state, initial)
    data = TokenDataset(config.data, "train", shape["seq_len"])
    TokenDataset(config.data, "val", shape["seq_len"])
    config, cfg = check_config(config, shape, data.meta["vocab_size"], world)
    # (If nothing of it has changed, the stored `steps` stay: a rollback has read other samples.)
    if config.epochs is not None and not config.eval_only and not (
            state and state["data"][-1][1] == data.phases[-1][1] and all(
                state["config"].get(name) == getattr(config, name)
                for name in ("epochs", "batch_size", "batch_ramp"))):
        step, first = (state["step"], state["consumed_samples"]) if state else (0, 0)
        epoch = sum(source.n_windows for source in data.sources.values() if source.weight)
        config = dataclasses.replace(config, steps=step + steps_between(
            config, first, config.epochs * epoch))
    if initial is not None:
        checkpoint.check_data(initial, data, config.data, same=False)
    if state is not None:
        checkpoint.check_data(state, data, config.data, same=not config.eval_only)
        LossScaler().load_state_dict(state["scaler"])           # both raise ValueError
        DivergenceMonitor.from_state(state["monitor"])
    return config, cfg


# ---------------------------------------------------------------------------------------------
# Learning rate, batch size, logging
# ---------------------------------------------------------------------------------------------


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `lr` at step warmup_steps, then decay to lr * min_lr_ratio at the last."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}[config.lr_schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def batch_sizes(config: Config) -> tuple[range, int]:
    """The sizes, in sequences, that the batch grows through, and over how many sequences of data:
    --batch-ramp is Megatron-LM's --rampup-batch-size (GPT-3: Brown et al. 2020, section 2.3)."""
    if config.batch_ramp is None:
        return range(config.batch_size, config.batch_size + 1), 1
    start, increment, sequences = map(int, config.batch_ramp.split(":"))
    return range(start, config.batch_size + 1, increment), sequences


def batch_size_at(config: Config, position: int) -> int:
    """The size of the batch that begins at this position in the data."""
    sizes, sequences = batch_sizes(config)
    return sizes[min(position, sequences) * (len(sizes) - 1) // sequences]


def position_after(config: Config, position: int, steps: int) -> int:
    """The position in the data so many batches later; earlier if negative."""
    for _ in range(-steps):
        position = bisect_left(range(position), position,
                               key=lambda first: first + batch_size_at(config, first))
    while steps > 0 and batch_size_at(config, position) < config.batch_size:
        position, steps = position + batch_size_at(config, position), steps - 1
    return position + max(steps, 0) * config.batch_size


def steps_between(config: Config, position: int, end: int) -> int:
    """How many batches from this position on read the data up to `end`."""
    return bisect_left(range(end), end, key=lambda steps: position_after(config, position, steps))


def format_step(run: "Run", row: dict, seconds: float) -> str:
    """The console's line of a step; `seconds` is what a step takes."""
    config, left = run.config, round((run.config.steps - row["step"]) * seconds)
    line = (f"step {row['step']:>{len(str(config.steps))}}/{config.steps}  "
            f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:,.0f} tok/s")
    if config.dtype == "fp16":
        line += f"  scale {row['loss_scale']:g}"
    if run.device.type == "cuda" and config.dtype in ("bf16", "fp16"):
        peak = run.grid.world * peak_flops(torch.cuda.get_device_name(run.device))
        used = row["tokens_per_second"] * flops_per_token(run.cfg)
        line += f"  MFU {used / peak:.1%}" if peak else ""
    line += (f"  left {left // 3600}h{left % 3600 // 60:02d}m" if left >= 3600 else
             f"  left {left // 60}m{left % 60:02d}s")
    return line + "  skipped: loss or gradient not finite" * (row["skipped"] > 0)


def format_eval(row: dict, dataset: TokenDataset) -> str:
    """The validation loss in three units: together, then a line for each of several sources."""
    kinds = [("validation", "val_loss", dataset.meta), *(
        (f"  {source.name}", f"val_loss/{source.name}", source.meta)
        for source in dataset.sources.values() if len(dataset.sources) > 1)]
    lines = []
    for name, field, meta in kinds:
        loss, size = row[field], meta["bytes_per_token"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        lines.append(f"{name}: {loss:.4f} nats a token, perplexity {perplexity:.2f}"
                     + (f", {loss / math.log(2) / size:.4f} bits a byte" if size else ""))
    return "\n".join(lines)


def format_layout(config: Config, cfg: GPTConfig, grid: Grid, device: str, sizes: dict) -> str:
    """Model, layout, memory and batch, a line each, of a run and of a plan alike."""
    options = ", ".join([f"zero {config.zero}", *[config.pp_schedule] * (grid.pp > 1), *(
        name.replace("_", " ") for name in SWITCHES if getattr(config, name))])
    about = "buffers", "logits", "activations"
    memory = ", ".join(f"{kind.replace('_', ' ')}{' about' * (kind in about)} {size / 1e6:,.1f} MB"
                       for kind, size in sizes.items())
    return (
        f"model    {parameter_count(cfg):,} parameters: {cfg.n_layer} layers, {cfg.n_head} heads, "
        f"width {cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size}; "
        f"{flops_per_token(cfg):.3g} FLOPs a token\n"
        f"layout   dp {grid.dp} x pp {grid.pp} x tp {grid.tp}, {device}, {config.dtype}, "
        f"{options}\n"
        f"memory   {memory} (rank {grid.rank})\n"
        f"batch    {config.batch_size} sequences = dp {grid.dp} x {microbatches(config, grid)} "
        f"microbatches x {config.micro_batch} sequences; "
        f"{config.batch_size * cfg.seq_len:,} tokens a step"
        + f", after a ramp {config.batch_ramp}" * (config.batch_ramp is not None))


def print_summary(run: "Run") -> None:
    """What is about to run, in a few lines."""
    config, device = run.config, run.device.type
    if multiplies_in_fp32(PRECISIONS[config.dtype][0], run.device):
        device += f" (multiplies {config.dtype} in fp32)"
    end = position_after(config, run.consumed_samples, config.steps - run.step)
    epochs = ", ".join(f"{count:.2f} epochs" + f" of {name}" * (len(run.train_data.sources) > 1)
                       for name, count in run.train_data.epochs(end).items())
    sizes = memory_bytes(run.cfg, run.grid, config, PRECISIONS[config.dtype],
                         run.device.type != "cpu")
    print_rank0(
        f"{format_layout(config, run.cfg, run.grid, device, sizes)}\n"
        f"data     {run.train_data.n_tokens:,} tokens in {config.data}; {config.steps} steps read "
        f"{epochs}")


def format_plan(config: Config, cfg: GPTConfig, plan: dict) -> str:
    """`parallel.make_plan` in lines."""
    def line(title, names):
        """What of the plan has one of these names, a regular expression."""
        return f"{title:8} " + ", ".join(
            f"{name.replace('_', ' ')} " + (f"{x:,.0f}" if x % 1 == 0 and x < 1e6 else f"{x:.4g}")
            for name, x in plan.items() if re.fullmatch(names, name))
    grid = Grid(plan["dp"], config.pp, config.tp, plan["fullest_rank"], config.sequence_parallel)
    sizes = {name[7:]: x for name, x in plan.items() if re.match("memory_(?!bytes)", name)}
    return "\n".join([
        format_layout(config, cfg, grid, config.gpu, sizes),
        f"fits     {'yes' if plan['fits'] else 'no'}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{DEVICES[config.gpu].memory / 1e9:.0f} GB, of which a tenth is to stay free",
        line("compute", "steps|tokens(_per_step)?|flops_.*|pf_days"),
        line("optimal", "compute_optimal_.*|predicted_loss"), line("sends", "bytes_.*"),
        line("time", "layers_per_stage|seconds_.*|step_seconds|bubble"),
        line("speed", "tokens_per_second|.*tflops_per_gpu|mfu|days|gpu_hours"),
        line("failures", "(failure|pause|write|interval)_.*|goodput"),
        "assumes  backward hides data parallelism, nothing hides tp and pp; no rank is slow",
        *["note     few tokens for this model: give --steps, --batch-size"] * (
            plan["tokens"] < plan["compute_optimal_tokens"] / 10),
        *["note     fp32 is slow: give --dtype bf16 (fp16 on a V100)"] * (config.dtype == "fp32")])


def print_plan(given: dict) -> None:
    """--plan: what a run would need, without starting one. Raises ValueError."""
    config, shape = merge_config(given, None)
    dtypes = PRECISIONS[config.dtype]
    if config.dtype == "bf16" and DEVICES[config.gpu].word == "V100":
        raise ValueError("a V100 has no products in bf16: give --dtype fp16")
    if config.plan.startswith("search"):
        cfg = GPTConfig(config.vocab_size, dropout=config.dropout, **shape)
        result = search_layouts(cfg, config, dtypes, given)
        columns = ("dp", "pp", "tp", "micro_batch", "zero", "recompute", "sequence_parallel",
                   "pp_schedule", "memory_bytes", "bubble", "step_seconds", "mfu", "days")
        rows = [[f"{plan[name]:.4g}" if isinstance(plan[name], float) else str(plan[name])
                 for name in columns] for plan in result]
        text = "\n".join("  ".join(x.rjust(max(4, len(name))) for x, name in zip(row, columns))
                         for row in [columns, *rows])
    else:
        config, cfg = check_config(config, shape, config.vocab_size, config.world)
        result = make_plan(cfg, config, dtypes)
        text = format_plan(config, cfg, result)
    print_rank0(json.dumps(result) if "json" in config.plan else text)


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


class Run:
    """What a run is made of on this rank, and its verbs: train, evaluate, save, roll back.
    `self.step` is the last step done; while one is in progress it is step `self.step + 1`."""

    def __init__(self, config: Config, cfg: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None):
        self.config, self.cfg, self.grid, self.device = config, cfg, grid, device
        self.train_data, self.val_data = train_data, val_data
        self.writer = checkpoint.Writer(Path(config.out), config.keep)
        param_dtype, master_dtype = PRECISIONS[config.dtype]
        self.model = build_stage(cfg, grid)
        self.flat = FlatParameters(param_specs(self.model, cfg, grid), grid, param_dtype,
                                   master_dtype, device, config.zero,
                                   "cpu" if config.offload else device)
        wrap_blocks(self.model, config.recompute, config.compile)
        if config.zero == 3:
            fully_shard(self.model, self.flat)
        self.restore(state)
        self.set_batch_size(config.batch_size)
        positions = cfg.seq_len // (grid.tp if grid.sequence_parallel else 1)
        self.boundary = torch.empty(config.micro_batch, positions, cfg.n_embd,
                                    dtype=param_dtype, device=device)
        self.loaded = None, ()          # `load_batch`'s last answer

    def restore(self, state: dict | None) -> None:
        """Be where the checkpoint was; without one, at step 0."""
        for name in COUNTERS:
            setattr(self, name, 0 if state is None else state[name])
        self.scaler = make_scaler(self.config.dtype)
        self.monitor = DivergenceMonitor(checkpoints=[[0, None]])
        if state is None:
            file = self.config.init_from        # None: drawn from the seed
            initial = all_ranks(lambda: file and checkpoint.load(Path(file))["parameters"])
            return self.flat.initialize(self.cfg, self.config.seed, initial)
        checkpoint.restore(state, self.flat)
        self.monitor = DivergenceMonitor.from_state(state["monitor"])
        if state["config"]["dtype"] == self.config.dtype:
            self.scaler.load_state_dict(state["scaler"])

    def set_batch_size(self, size: int) -> None:
        """What follows from the size of a step's batch."""
        self.step_tokens = size * self.cfg.seq_len
        self.schedule = schedule_of(dataclasses.replace(self.config, batch_size=size), self.grid)

    def train(self, metrics: checkpoint.Metrics, stop: StopSignal) -> None:
        config, self.metrics = self.config, metrics
        is_due = lambda every: every > 0 and self.step % every == 0
        recent = deque(maxlen=20)       # seconds of a step
        self.model.train()
        while self.step < config.steps:
            # batch
            started, position = time.perf_counter(), self.consumed_samples
            self.skip_excluded()
            windows, batch = self.load_batch(self.step + 1, self.consumed_samples)
            self.set_batch_size(len(windows))
            self.consumed_samples += len(windows)
            if self.train_data.phase_begins(position, self.consumed_samples):
                self.monitor.forget_losses()
            self.tokens += self.step_tokens

            # forward, backward; agree; observe; unscale, clip, AdamW
            scale, at_floor = self.scaler.scale, self.scaler.scale <= self.scaler.min_scale
            lr = learning_rate(config, self.step + 1) * self.monitor.lr_factor
            local_loss = self.forward_backward(batch)
            self.load_batch(self.step + 2, self.consumed_samples)   # while a GPU computes
            stats = self.reduce_stats(local_loss, stop.requested)
            verdict, reason = self.monitor.observe(self.step + 1, stats, at_floor, config)
            if verdict == "update" and not stats.found_inf:     # an overflow skips the update only
                self.optimizer_steps += 1
                self.flat.step(clip_factor(stats.grad_norm, config.clip, scale),
                               self.optimizer_steps, lr, config.beta1, config.beta2,
                               config.weight_decay)
            self.scaler.update(stats.found_inf)
            recent.append(time.perf_counter() - started)
            row = dict(step=self.step + 1, tokens=self.tokens, loss=stats.loss, lr=lr,
                       batch_size=len(windows), grad_norm=stats.grad_norm, loss_scale=scale,
                       skipped=self.monitor.skipped_steps, activation_norm=stats.activation_norm,
                       tokens_per_second=round(self.step_tokens / recent[-1], 1))
            where = locate_nonfinite(local_loss.item(), self.flat) if stats.found_inf else None
            self.log_events(row, reason, where, windows)

            # roll back; or evaluate and log, then save
            if verdict == "rollback":
                self.log_step(row, recent)
                self.rollback(reason)
                continue
            self.step += 1
            done = self.step == config.steps
            stopping = stats.stop_requested and not done
            if done or (is_due(config.eval_every) and not stopping):
                row |= self.evaluate_all()
            self.log_step(row, recent)
            if at_floor and self.monitor.skipped_steps >= MAX_SKIPPED:
                self.fail(self.step, f"{MAX_SKIPPED} steps in a row were not finite, at a loss "
                                     f"scale of {scale:g} that cannot fall")
            if done or stopping or is_due(config.save_every):
                self.save()
            if stopping:
                break
        all_ranks(self.writer.finish)                   # the last checkpoint must not be missing
        if self.step < config.steps:
            self.metrics.write(event="stop", step=self.step)
            print_rank0(f"stopped and saved after step {self.step}; " + (
                "go on with --resume auto" if config.resume == "never" else
                "the same command goes on"))

    def skip_excluded(self) -> None:
        """Move on over the samples that come next in the data but are to be left out."""
        monitor, position, skip = self.monitor, self.consumed_samples, self.config.skip_steps
        if skip is not None and monitor.applied_skip != skip:
            first, last = step_range(skip)
            if first <= self.step + 1 <= last:
                monitor.applied_skip = skip
                end = position_after(self.config, position, last - self.step)
                monitor.excluded.insert(0, [position, end])     # the last is a rollback's
        self.consumed_samples = end = monitor.skip_excluded(
            position, lambda sample: batch_size_at(self.config, sample))
        if end > position:
            self.metrics.write(event="skip", step=self.step + 1, reason="left out",
                               batches=steps_between(self.config, position, end),
                               sequences=[position, end])

    def load_batch(self, step: int, first: int) -> tuple[np.ndarray, list]:
        """The windows of step `step`, the first of which is sample `first`, and this replica's
        microbatches; the last answer is kept, for who asks again."""
        if self.loaded[0] != (step, first):
            windows = self.train_data.sample_indices(self.config.seed, first,
                                                     batch_size_at(self.config, first))
            batch = self.load_microbatches(self.train_data, windows, step)
            self.loaded = (step, first), (windows, batch)
        return self.loaded[1]

    def load_microbatches(self, dataset: TokenDataset, windows: np.ndarray, step: int) -> list:
        """This replica's microbatches of a batch of windows (B,): (tokens (b, T), targets (b, T),
        dropout seed) each; None inside the pipeline. Window -1 is padding: its targets are ignored.
        """
        grid, size, microbatches = self.grid, self.config.micro_batch, []
        # Ranks that hold other rows, or other positions (sequence parallelism), draw other masks.
        holder = [grid.dp_rank, grid.tp_rank] if grid.sequence_parallel else [grid.dp_rank]
        for m in range(len(windows) // (grid.dp * size)):
            first = (m * grid.dp + grid.dp_rank) * size
            rows, x, y = windows[first:first + size], None, None
            if grid.is_first or grid.is_last:
                tokens = torch.from_numpy(dataset.windows(np.maximum(rows, 0)))     # (b, T + 1)
                x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
                y[torch.from_numpy(rows < 0)] = IGNORE_INDEX
                if self.device.type == "cuda":
                    x, y = x.pin_memory(), y.pin_memory()
                x, y = (part.to(self.device, non_blocking=True) for part in (x, y))
            microbatches.append((x, y, derive_seed(self.config.seed, step, m, *holder)))
        return microbatches

    def forward_backward(self, batch: list) -> torch.Tensor:
        """This rank's sum of losses in nats; gradients of the mean loss times the loss scale."""
        self.flat.zero_grad()
        loss = run_schedule(self.schedule, self.model, self.grid, batch, self.boundary, self.flat,
                            self.scaler.scale / self.step_tokens)
        self.flat.finish_grad_sync()
        return loss

    def reduce_stats(self, loss: torch.Tensor, stop_requested) -> StepStats:
        """The one all-reduce by which all ranks agree on a step."""
        grid, tokens = self.grid, self.step_tokens
        # All tp ranks have the same loss, and without sequence parallelism the same activations.
        loss_counts = grid.is_last and grid.tp_rank == 0
        norms_count = grid.is_last and (grid.tp_rank == 0 or grid.sequence_parallel)
        norms = self.model.head.norms.to(loss) if norms_count else loss.new_zeros(())
        local = torch.stack([loss * loss_counts / tokens, norms / tokens,
                             *self.flat.square_sums(), loss.new_full((), bool(stop_requested))])
        mean_loss, activation_norm, squares, all_squares, stopping = self.read(
            all_reduce(local, grid.group("world")).wait())
        return StepStats(mean_loss, activation_norm, math.sqrt(squares) / self.scaler.scale,
                         found_inf=not (math.isfinite(mean_loss) and math.isfinite(all_squares)),
                         stop_requested=stopping > 0)

    def evaluate_all(self) -> dict:
        """What a row says of an evaluation. `val_loss` is the mean of the sources' by weight; of
        several sources each has a field, and another for the epochs read of it."""
        losses = {s.name: self.evaluate(s) for s in self.val_data.sources.values()}
        row = dict(val_loss=self.val_data.average(losses.values()))
        if len(losses) > 1:
            epochs = self.train_data.epochs(self.consumed_samples)
            row |= {f"val_loss/{name}": loss for name, loss in losses.items()}
            row |= {f"epochs/{name}": count for name, count in epochs.items()}
        return row

    @torch.no_grad()
    def evaluate(self, source: Source) -> float:
        """Mean loss in nats on fixed validation windows, the same in every layout."""
        self.model.eval()
        count = min(source.n_windows, EVAL_SEQUENCES)
        at_once = self.grid.dp * self.config.micro_batch
        windows = np.full(-(-count // at_once) * at_once, -1)
        places = np.linspace(0, source.n_windows - 1, count).astype(np.int64)
        windows[:count] = source.first + places
        batch = self.load_microbatches(self.val_data, windows, step=0)
        total = run_schedule([("F", m) for m in range(len(batch))], self.model, self.grid, batch,
                             self.boundary)
        total *= self.grid.tp_rank == 0                 # all tp ranks have the same: count one
        total = self.read(all_reduce(total, self.grid.group("world")).wait())
        self.model.train()
        return total / (count * self.cfg.seq_len)

    def read(self, x: torch.Tensor):
        """The numbers in x, once the device has computed them; other ranks may take --timeout."""
        return to_host(x, self.config.timeout if self.grid.world > 1 else math.inf).tolist()

    def save(self) -> None:
        """Gather on rank 0, where a thread writes it while training goes on."""
        self.writer.wait()                              # else the host would hold a third state
        file = checkpoint.step_file(Path(), self.step).name
        self.monitor.add_checkpoint(self.step, file, self.config.keep)  # a checkpoint lists itself
        full = checkpoint.gather_full_state(self.flat, self.cfg, self.grid,
                                            checkpoint.STATE.values())
        if full is not None:                            # on rank 0
            self.writer.submit(dict(
                format=checkpoint.FORMAT, **{name: getattr(self, name) for name in COUNTERS},
                config=settings_of(self.config), model=dataclasses.asdict(self.cfg),
                tokenizer=self.train_data.meta["tokenizer"],
                data=self.train_data.phases, scaler=self.scaler.state_dict(),
                monitor=dataclasses.asdict(self.monitor),
                **{key: full[flat_name] for key, flat_name in checkpoint.STATE.items()}))

    def rollback(self, reason: str) -> None:
        """Go back to a healthy checkpoint, and write down there what is to be different, before
        anything else happens: from then on a kill loses nothing."""
        config, monitor, diverged_at = self.config, self.monitor, self.step + 1
        if monitor.rollbacks >= config.max_rollbacks:
            self.fail(diverged_at, f"{reason}, and --max-rollbacks {monitor.rollbacks} are spent")
        samples, data = monitor.to_exclude(diverged_at, self.consumed_samples, lambda end, batches:
                                           position_after(config, end, -batches))
        files = [name and Path(config.out, name) for _, name
                 in monitor.candidates(diverged_at - monitor.bad_steps() + 1, data)]
        self.writer.wait()                              # the file being written may be the one
        path, events = on_rank0(lambda: checkpoint.latest_valid(files))
        self.restore(all_ranks(lambda: path and checkpoint.load(path), status=1))  # new monitor
        samples[0] = max(samples[0], self.consumed_samples)
        monitor.rolled_back(self.step, samples, data, then=self.monitor)
        self.monitor = monitor
        events += [dict(event="rollback", reason=reason, to=self.step, sequences=samples,
                        lr_factor=monitor.lr_factor, rollbacks=monitor.rollbacks)]
        for event in events:
            self.metrics.write(**event, step=diverged_at)
        print_rank0(f"rollback {monitor.rollbacks} of at most {config.max_rollbacks}: back to step "
                    f"{self.step}, leaving out sequences {samples[0]} to {samples[1] - 1}, "
                    f"learning rate x {monitor.lr_factor:.3g} from now on")
        self.save()
        all_ranks(self.writer.finish)

    def log_step(self, row: dict, recent: deque) -> None:
        self.metrics.write(**row)
        print_rank0(format_step(self, row, statistics.median_low(recent)))
        if "val_loss" in row:
            print_rank0(format_eval(row, self.val_data))

    def log_events(self, row: dict, reason: str | None, where: dict | None,
                   windows: np.ndarray) -> None:
        """Events of a step that was not as usual. From its windows of the data
        TokenDataset.windows makes the same batch again."""
        seen = {name: row[name] for name in ("step", "loss", "grad_norm", "loss_scale")}
        if where is not None:
            self.metrics.write(event="skip", reason="not finite", **seen, **where,
                               windows=windows.tolist())
        if reason is not None:
            limit = self.monitor.limit(self.config.spike_margin)
            self.metrics.write(event="spike", reason=reason, limit=limit, **seen)
            print_rank0(f"diverged: {reason}")

    def fail(self, step: int, reason: str):
        """The end of a run that has diverged and cannot help itself."""
        self.metrics.write(event="stop", step=step, reason=reason)
        raise RunError(f"step {step}: {reason}; the run has diverged: see the events in "
                       f"{self.config.out}/metrics.jsonl, and go on from an older checkpoint with "
                       f"a lower --lr, a tighter --clip or --skip-steps")


# ---------------------------------------------------------------------------------------------
# A look at runs, also while they train
# ---------------------------------------------------------------------------------------------


def chart(runs: list, width: int, height: int = 16) -> list[str]:
    """Lines with the losses of runs (letter, rows, events) over tokens, on a logarithmic scale that
    ends at the first loss; the first run is on top. Capitals are validation losses; below, > is a
    resume and < a rollback."""
    most, points, lines = max(rows[-1]["tokens"] for _, rows, _ in runs), {}, []
    column = lambda row: row["tokens"] * (width - 1) // most
    top = max(next(row["loss"] for row in rows if row["loss"] is not None) for _, rows, _ in runs)
    for letter, rows, _ in reversed(runs):
        for mark, name in (letter, "loss"), (letter.upper(), "val_loss"):
            for row in rows:
                if row.get(name) is not None:
                    loss = min(max(row[name], 1e-9), top)
                    points.setdefault((mark, column(row)), []).append(loss)
    levels = {place: math.log(statistics.fmean(losses)) for place, losses in points.items()}
    low, high = min(levels.values()), max(levels.values())
    cells = [[" "] * width for _ in range(height)]
    for (mark, x), level in levels.items():
        cells[round((high - level) / (high - low or 1) * (height - 1))][x] = mark
    for y, line in enumerate(cells):
        lines.append(f"{math.exp(high - y * (high - low) / (height - 1)):9.4f} |{''.join(line)}")
    lines.append(f"{'+':>11}" + "-" * width)
    for letter, rows, events in runs:
        line = [" "] * width
        for event in events:
            if event["event"] in ("resume", "rollback"):
                last = checkpoint.branch_point(event)
                row = next((row for row in rows if row["step"] > last), rows[-1])
                line[column(row)] = "<" if event["event"] == "rollback" else ">"
        lines += [f"{letter:>9} |{''.join(line)}"] * (set(line) != {" "})
    return [*lines, f"{'tokens':>9}  0{most:>{width - 1},}", ""]


def compare(outs: list[str]) -> str:
    """A chart as wide as the terminal and a table of runs, the best validation loss first. Raises
    ValueError if none has made a step."""
    runs, names = [], string.ascii_lowercase + " " * len(outs)
    for out in dict.fromkeys(outs):
        rows, events, hours = checkpoint.read_metrics(Path(out))
        if any(row.get("loss") is not None for row in rows):
            evals = [row for row in rows if row.get("val_loss") is not None]
            best = min(evals, key=lambda row: row["val_loss"], default={})
            runs.append((out, rows, events, hours, best, evals[-1] if evals else {}))
        else:
            checkpoint.warn(f"{out}/metrics.jsonl has no step")
    if not runs:
        raise ValueError("nothing to compare: give the --out of runs that have made a step")
    runs.sort(key=lambda run: run[4].get("val_loss", math.inf))
    width = max(20, shutil.get_terminal_size((100, 24)).columns - 12)
    lines = chart([(name, run[1], run[2]) for name, run in zip(names, runs)], width)
    lines.append("   best val  at step  last val  at step   steps           tokens   hours    "
                 "tokens/s   peak lr  run, events")
    for name, (out, rows, events, hours, best, last) in zip(names, runs):
        kinds = Counter(event["event"] for event in events if event["event"] != "start")
        lines.append(
            f"{name}  {best.get('val_loss', math.nan):8.4f} {best.get('step', '-'):>8} "
            f"{last.get('val_loss', math.nan):9.4f} {last.get('step', '-'):>8} "
            f"{rows[-1]['step']:7} {rows[-1]['tokens']:16,} {hours:7.2f} "
            f"{statistics.median(row['tokens_per_second'] for row in rows):11,.0f}  "
            f"{max(row['lr'] for row in rows):.2e}  "
            + ", ".join([out, *(f"{count} {kind}" for kind, count in kinds.items())]))
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------
# From the command line to a run
# ---------------------------------------------------------------------------------------------


def prepare(given: dict, world: int, local_world: int, device: torch.device, restarted: bool,
            stack: ExitStack):
    """What rank 0 settles alone, without communication: config, model, the checkpoint to go on from
    or None, events of damaged ones; last, the lock of --out on the stack. Errors are for main."""
    config = Config(**given)
    for name in checkpoint.LOGS:
        if name in (config.log or "") and importlib.util.find_spec(name) is None:
            raise ValueError(f"--log {name} needs a package that is missing: pip install {name}")
    out, found = Path(config.out), checkpoint.list_checkpoints(Path(config.out))
    explicit = config.resume not in ("auto", "never") and not config.eval_only
    path, events, branch = checkpoint.find_checkpoint(
        out, config.resume, restarted, given,
        ["resume", *(name for name in LASTING if name not in FREE)],
        TokenDataset(config.data, "train", 1).phases[0][1] if explicit else None)
    if config.eval_only and path is None:
        raise ValueError(f"--eval-only, but {config.out} holds no checkpoint")
    if "init_from" in given and (config.eval_only or config.resume not in ("auto", "never")):
        raise ValueError("--init-from begins a fresh run; --resume FILE goes on with one, or with "
                         "--eval-only evaluates it: drop one")
    state, initial = path and checkpoint.load(path), None
    if state is not None and "init_from" in given and (
            state["config"].get("init_from") != given["init_from"]):
        raise ValueError(f"{config.out} holds a run that did not begin with {config.init_from}: "
                         f"give another --out")
    if state is not None and not state["exp_avg"]:
        if not config.eval_only:
            raise ValueError(f"{path} holds weights alone: begin a run with --init-from {path} and "
                             f"another --out")
        given, path, state = {**given, "init_from": str(path)}, None, None
    if state is None and "init_from" in given:
        checkpoint.verify(Path(given["init_from"]))
        initial = checkpoint.load(Path(given["init_from"]))
    config, cfg = validate(given, state, world, initial)
    grid = Grid(world // (config.tp * config.pp), config.pp, config.tp)
    check_memory(cfg, grid, config, PRECISIONS[config.dtype], device, local_world)
    if not config.eval_only:
        stack.enter_context(checkpoint.lock_output_dir(out))
        if checkpoint.list_checkpoints(out) != found:
            raise ValueError(f"another run has just written to {config.out}: start again")
    return config, cfg, path, events, branch


def start(run: Run, state: dict | None, path: Path | None, events: list, given: dict) -> None:
    """Evaluate; or tell how the run begins, and train. `state` was loaded from `path`."""
    config, factor, settings = run.config, run.monitor.lr_factor, settings_of(run.config)
    if config.eval_only:
        text = format_eval(run.evaluate_all(), run.val_data)
        return print_rank0(f"{path or config.init_from}, step {run.step}, on {config.data}: {text}")
    if run.step >= config.steps:
        return print_rank0(f"{path} is step {run.step} of {config.steps}: nothing left to do; "
                           f"raise --steps or --epochs to go on, or give another --out")
    metrics = all_ranks(lambda: checkpoint.Metrics(Path(config.out), run.grid.rank, config.log))
    print_summary(run)
    if state is None:
        metrics.write(event="start", step=0, config=settings)
        if config.init_from:                # FILE is not needed again, not even for a rollback
            print_rank0(f"weights  those of {config.init_from}")
            run.monitor.checkpoints = []
            run.save()
    else:
        changed = {name: [state["config"].get(name), settings[name]] for name in LASTING
                   if state["config"].get(name) != settings[name]}
        if state["data"] != run.train_data.phases:
            changed["data"] = [state["config"]["data"], config.data]
        for event in [*events, dict(event="resume", path=str(path), given=given, changed=changed,
                                    lr_factor=factor, config=settings)]:
            metrics.write(**event, step=run.step)
        differs = "".join(f", {name.replace('_', ' ')} {new} instead of {old}"
                          for name, (old, new) in changed.items())
        before = Config(**{n: state["config"][n] for n in LASTING if n in state["config"]})
        old, new = (learning_rate(c, run.step + 1) for c in (before, config))
        if not 0.8 * old <= new <= 1.25 * old:
            differs += f"; so the next step's learning rate is {new:.2e} instead of {old:.2e}"
            if before.lr == config.lr:      # a longer schedule: the loss may rise, and be healthy
                run.monitor.forget_losses()
        print_rank0(f"resume   {path}, after step {run.step}{differs}"
                    + f", learning rate x {factor:.3g}" * (factor != 1))
    if run.device.type == "cpu" and torch.get_num_threads() > 1 and (
            hasattr(os, "getloadavg") and os.getloadavg()[0] > os.cpu_count()):    # not on Windows
        print_rank0("note     this machine is busy: threads that wait for each other may be slow, "
                    "set OMP_NUM_THREADS=1")
    if state is None and "lr" not in given and parameter_count(run.cfg) > 2e7:
        print_rank0(f"note     a learning rate of {config.lr:g} suits nano: GPT-3 took 6e-4 for "
                    f"125M parameters, 2e-4 for 1.3B")
    if config.warmup_steps > config.steps / 2:
        print_rank0(f"note     most of the {config.steps} steps are warm-up")
    if "skip_steps" in given and step_range(config.skip_steps)[1] <= run.step:
        print_rank0(f"skip     the steps {config.skip_steps} lie behind: there is nothing to skip")
    run.train(metrics, StopSignal())
    if run.step >= config.steps and run.train_data.meta["tokenizer"] in ("gpt2", "bytes"):
        file = shlex.quote(f"{config.out}/latest.pt")
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}")


def launch(prepared, given: dict, device: torch.device, rank: int, world: int) -> None:
    """All ranks, from what rank 0 has prepared to the end of the run."""
    assert_own_gpu(device)
    with ExitStack() as stack:
        config, cfg, path, events, branch = on_rank0(lambda: prepared)      # broadcast
        state = all_ranks(lambda: path and checkpoint.load(path))
        if branch and not config.eval_only:
            checkpoint.start_branch(state, path, "lr" in given)
        datasets = all_ranks(lambda: [TokenDataset(config.data, split, cfg.seq_len)
                                      for split in ("train", "val")])
        sources = list(datasets[0].sources)         # their fingerprints
        assert_equal_across_ranks(sources, f"{config.data} differs between ranks: copy it")
        if state is not None and not config.eval_only:
            datasets[0].go_on(state["data"], state["consumed_samples"])
        if state is None or not set(sources) <= set(state["data"][-1][1]):      # new to this run
            all_ranks(lambda: [dataset.check(rank, world) for dataset in datasets])
        grid = make_grid(world, config.tp, config.pp, rank, config.sequence_parallel,
                         timedelta(seconds=config.timeout), device)
        stack.callback(grid.groups.clear)   # gloo's threads, if they outlive main, can abort it
        run = Run(config, cfg, grid, device, *datasets, state)
        stack.callback(run.writer.wait)
        for name in checkpoint.STATE if state else ():
            del state[name]                             # the file is mapped no longer
        try:
            start(run, state, path, events, given)
        except PeerError as error:
            raise PeerError(f"stage {grid.stage}, step {run.step + 1}: {error}") from error


def main() -> None:
    rank, world, local_rank, local_world, restarts = (
        int(os.environ.get(name, default)) for name, default in [
            ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1),
            ("TORCHELASTIC_RESTART_COUNT", 0)])
    complain = lambda text: print(f"train.py: {text}", file=sys.stderr, flush=True)
    try:
        given = parse_flags(sys.argv[1:])
        config = Config(**given)
        if config.compare is not None:
            if rank == 0:
                print_rank0(compare(config.compare))
            sys.exit(0)
        if config.plan is not None:
            if rank == 0:
                print_plan(given)
            sys.exit(0)
        on_mps = world == 1 and config.dtype != "fp64"
        device = pick_device(config.device, local_rank, local_world,
                             os.environ.get("CUDA_VISIBLE_DEVICES", ""), on_mps)
        if device.type == "mps" and not on_mps:
            raise ValueError("mps is for one process and has no fp64: give --device cpu")
        if config.compile and device.type == "cpu" and not shutil.which(
                os.environ.get("CXX", "cl" if os.name == "nt" else "g++")):
            raise ValueError("--compile on a CPU needs a C++ compiler: install g++, name another "
                             "in CXX, or leave the flag out")
        # Rank 0 alone, before any communication: the others wait for it at the rendezvous.
        stack, status = ExitStack(), 0
        prepared = None if rank else prepare(given, world, local_world, device, restarts > 0, stack)
    except (ValueError, OSError, RunError) as error:
        if rank > 0:
            time.sleep(5)           # torchrun ends all ranks when one exits: rank 0 prints first
        if local_rank == 0:
            complain(error)
        sys.exit(getattr(error, "status", 2))
    try:
        with stack, process_group(rank, world, device, timedelta(seconds=config.timeout)):
            try:
                launch(prepared, given, device, rank, world)
            except RunError as error:               # raised alike on every rank
                status = error.status
                if rank == 0:
                    complain(error)
                all_gather_object(None)             # nobody leaves before rank 0 has printed
    except Exception as error:
        message = fatal_message(error)
        if message is not None:
            complain(f"rank {rank}: {message}")
        elif world == 1:
            raise
        else:
            traceback.print_exc()
        os._exit(1)                 # no orderly end: the others learn that this rank is gone
    sys.exit(status)


if __name__ == "__main__":
    main()
