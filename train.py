"""The policy of a run: flags, schedules, the loop, logging, when to save and when to stop.

    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp is what remains: 2

A step has these phases; `train` shows them on one screen:

    batch       step k reads sequences [position, position + batch size) of a seeded order; the
                rank only decides which rows of them it reads
    forward and backward, microbatch by microbatch; gradients add up in flat fp32 buckets
    reduce      buckets over replicas, started during backward (ZeRO 2 and 3: with each
                microbatch); the tied weight's two ends
    agree       one small all-reduce tells every rank the loss, the gradient norm, whether any
                gradient overflowed, and whether anyone was asked to stop
    unscale, clip, AdamW on the masters, or skip all three after an overflow
    save, then evaluate, then log

Everything a resumed run needs is in the checkpoint: N steps are bit for bit N/2 steps, a stop and
N/2 more, in the same layout on the CPU. Flags given at the resume win over the stored ones, which
win over the defaults; layout, precision and paths are never taken from the checkpoint.

Exit status: 0 done, or saved on a signal; 1 the run failed; 2 a user's mistake, told in one line.
"""
import argparse
import dataclasses
import json
import math
import os
import signal
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
from amp import PRECISIONS, clip_factor, make_scaler
from data import TokenDataset
from model import IGNORE, SIZES, GPTConfig, flops_per_token, parameter_count, seed_of
from parallel import (SCHEDULES, FlatParameters, activation_bytes, all_reduce, check_layout,
                      local_model, make_grid, one_f_one_b, run_schedule, shard_parameters)

EVAL_SEQUENCES = 128        # fixed validation windows, evenly spaced over the split
MAX_SKIPPED = 10            # steps skipped in a row, the scale at its floor, before giving up
COUNTERS = ("step", "sequences", "tokens", "adam_steps", "skipped_in_a_row")    # of a run

# Dense 16-bit FLOP/s of a device by a word of its name (the makers' data sheets).
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12,
              "H200": 989e12, "B200": 2250e12}


# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------


def flag(default, help, kind=None, choices=None, low=None, below=None, local=False):
    """A field of Config: its default, what `--help` says, the numbers it takes (low <= x < below),
    and whether it is `local` to this start: layout, precision and paths, not in a checkpoint."""
    return dataclasses.field(default=default, metadata=dict(
        help=help, kind=kind or type(default), choices=choices, low=low, below=below, local=local))


@dataclass(frozen=True)
class Config:
    data: str = flag("data/python", "directory of token shards, made by data.py", local=True)
    out: str = flag("out", "directory for checkpoints and metrics.jsonl", local=True)
    model: str = flag("nano", "named size: " + ", ".join(SIZES), choices=list(SIZES))
    n_layer: int = flag(None, "blocks (this and the next four override --model)", int, low=1)
    n_head: int = flag(None, "attention heads", int, low=1)
    n_embd: int = flag(None, "channels", int, low=1)
    seq_len: int = flag(None, "positions", int, low=1)
    activation: str = flag(None, "gelu or relu", str, choices=["gelu", "relu"])
    batch_size: int = flag(16, "sequences a step, of the whole job", low=1)
    micro_batch: int = flag(None, "sequences a microbatch (default: 4, 2 or 1, the largest that "
                            "makes a multiple of pp microbatches)", int, low=1, local=True)
    steps: int = flag(800, "steps of the whole run", low=1)
    lr: float = flag(4e-3, "peak learning rate", low=0)
    min_lr_ratio: float = flag(0.1, "last learning rate / peak", low=0)
    warmup_steps: int = flag(50, "steps of linear warm-up", low=0)
    lr_schedule: str = flag("cosine", "decay: cosine or linear", choices=["cosine", "linear"])
    weight_decay: float = flag(0.1, "AdamW's, on matrices only", low=0)
    beta1: float = flag(0.9, "AdamW's first", low=0, below=1)
    beta2: float = flag(0.95, "AdamW's second", low=0, below=1)
    clip: float = flag(1.0, "largest global gradient norm; 0: no clipping", low=0)
    dropout: float = flag(0.0, "on embeddings, attention and residuals", low=0, below=1)
    tp: int = flag(1, "tensor-parallel ranks", low=1, local=True)
    pp: int = flag(1, "pipeline stages", low=1, local=True)
    pp_schedule: str = flag("gpipe", "order of a pipeline's microbatches: gpipe or 1f1b",
                            choices=list(SCHEDULES), local=True)
    zero: int = flag(0, "replicas keep a slice each of: 1 the optimizer's state, 2 gradients too, "
                     "3 parameters too", choices=[0, 1, 2, 3], local=True)
    recompute: bool = flag(False, "make a block's activations again in backward", local=True)
    sequence_parallel: bool = flag(False, "tp ranks hold a slice of the positions each between the "
                                   "matrices", local=True)
    offload: bool = flag(False, "keep the optimizer's state in host memory and run it there",
                         local=True)
    dtype: str = flag("fp32", "type of parameters and activations: " + ", ".join(PRECISIONS),
                      choices=list(PRECISIONS), local=True)
    device: str = flag("auto", "auto: cuda where there is one", choices=["auto", "cpu", "cuda"],
                       local=True)
    compile: bool = flag(False, "torch.compile for the blocks (tp 1, dropout 0)", local=True)
    seed: int = flag(1337, "of the initial weights, the order of the data, dropout", low=0)
    save_every: int = flag(200, "steps between checkpoints; 0: only the last", low=0)
    keep: int = flag(3, "step files kept", low=1)
    eval_every: int = flag(200, "steps between evaluations; 0: only the last", low=0)
    eval_only: bool = flag(False, "evaluate the checkpoint and leave", local=True)
    resume: str = flag("auto", "auto: the newest whole checkpoint of --out; never; or a file",
                       local=True)


def parse(arguments) -> dict:
    """The flags that were given, checked one by one; raises ValueError."""
    parser = argparse.ArgumentParser(description="Train a GPT.", allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)

    def refuse(message):
        raise ValueError(message)

    parser.error = refuse
    fields = dataclasses.fields(Config)
    for f in fields:
        text = f.metadata["help"].replace("%", "%%")
        if f.default is not None and f.default is not False:
            text += f" (default {f.default})"
        how = (dict(action="store_true") if f.metadata["kind"] is bool else
               dict(type=f.metadata["kind"], choices=f.metadata["choices"],
                    metavar={int: "N", float: "X", str: "NAME"}[f.metadata["kind"]]))
        parser.add_argument("--" + f.name.replace("_", "-"), help=text, **how)
    given = vars(parser.parse_args(arguments))
    for f in fields:
        value, low, below = given.get(f.name), f.metadata["low"], f.metadata["below"]
        if low is not None and value is not None:
            if not (low <= value < (below or math.inf)):
                limit = f"below {below}" if below else "finite"
                raise ValueError(f"--{f.name.replace('_', '-')} is {value}: it must be at least "
                                 f"{low} and {limit}")
    return given


SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "activation")


def model_shape(flags: dict) -> dict:
    """What the flags say of the model's shape."""
    named = SIZES[flags["model"]] if "model" in flags else {}
    return {**named, **{n: flags[n] for n in SHAPE if flags.get(n) is not None}}


def settle(given: dict, state: dict | None) -> tuple[Config, dict]:
    """Command line, then checkpoint, then defaults -> the config and the model's shape (without
    vocabulary and dropout). Raises ValueError where the command line wants another model."""
    stored = {}
    if state is not None:
        stored = {f.name: state["config"][f.name] for f in dataclasses.fields(Config)
                  if f.name in state["config"] and not f.metadata["local"]}
        for name, wanted in model_shape(given).items():
            if wanted != state["model"][name]:
                raise ValueError(f"the checkpoint's model has {name} {state['model'][name]}, not "
                                 f"{wanted}: drop the flag, or use another --out")
    config = Config(**{**stored, **given})
    shape = model_shape(vars(config)) if state is None else {n: state["model"][n] for n in SHAPE}
    return config, shape


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `lr` at step warmup_steps, then decay to lr * min_lr_ratio at the last."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.lr_schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


# ---------------------------------------------------------------------------------------------
# Mistakes, signals, logging
# ---------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """One line on standard output; where nobody reads it any more (`| head`) the run goes on."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(status: int):
    """Exit where all ranks do: gloo aborts a process that ends with process groups, and to destroy
    them can wait for the other ranks for ever where these go on."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


def give_up(error, rank: int, status: int = 2):
    """One line on standard error and exit. The first rank to leave makes torchrun end the others,
    so these leave rank 0 the time to speak, and speak only if it had nothing to say."""
    if rank != 0:
        time.sleep(10)
    print(f"train.py: {error}", file=sys.stderr, flush=True)
    leave(status)


def everyones(value, world: int) -> list:
    """The value of each rank."""
    values = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return values


def together(action, rank: int, world: int):
    """action() on every rank. If it fails on any, all leave, and rank 0 tells the first reason."""
    failure, result = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = (str(error), 2)
    except checkpoint.Lost as error:
        failure = (str(error), 1)
    failure = next((f for f in everyones(failure, world) if f is not None), None)
    if failure is not None:
        if rank == 0:
            print(f"train.py: {failure[0]}", file=sys.stderr, flush=True)
        everyones(None, world)          # nobody leaves before rank 0 has spoken
        leave(failure[1])
    return result


def agree(value, complaint: str, rank: int, world: int) -> None:
    """All leave, with this complaint, if the ranks do not have the same value."""
    values = everyones(value, world)

    def check():
        if any(v != values[0] for v in values):
            raise ValueError(complaint)

    together(check, rank, world)


class StopSignal:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one, two seconds later or more,
    ends at once (torchrun passes on a Ctrl-C that the terminal has delivered already)."""

    def __init__(self):
        self.asked = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        if self.asked and time.monotonic() - self.asked > 2:
            os._exit(1)
        self.asked = self.asked or time.monotonic()


class Metrics:
    """out/metrics.jsonl, append-only: one object a step, and one with `event` for what happened
    besides. Only rank 0 writes. Raises OSError if `out` is no directory that takes a file."""

    def __init__(self, out: Path, rank: int):
        self.path = out / "metrics.jsonl" if rank == 0 else None
        if rank == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a+b") as file:
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)     # a line torn by a crash
            except OSError as error:
                raise OSError(f"--out {out} is not a directory that can be written: "
                              f"{error.strerror}") from error

    def has(self, step: int) -> bool:
        """Whether the step has a row: a kill between its checkpoint and its row leaves none."""
        return self.path is None or f'{{"step": {step}, ' in self.path.read_text()

    def write(self, **row):
        if self.path is None:
            return
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v
               for k, v in row.items()}
        line = json.dumps(row).encode() + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError("the disk is full")
            except OSError as error:                    # costs this line, not the run
                file.truncate(end)
                print(f"train.py: warning: metrics.jsonl lacks a line: {error}", file=sys.stderr,
                      flush=True)


def clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


class Run:
    """What a run is made of on this rank, and its verbs: batch, train, evaluate, save."""

    def __init__(self, config: Config, cfg: GPTConfig, grid, device, train_data, val_data, state):
        self.config, self.cfg, self.grid, self.device = config, cfg, grid, device
        self.train_data, self.val_data = train_data, val_data
        self.precision, self.scaler = PRECISIONS[config.dtype], make_scaler(config.dtype)
        self.model, pieces = local_model(cfg, grid, config.recompute, config.compile)
        self.flat = FlatParameters(pieces, grid, self.precision.compute, self.precision.master,
                                   device, config.zero, "cpu" if config.offload else device)
        if config.zero == 3:
            shard_parameters(self.model, self.flat)
        for name in COUNTERS:
            setattr(self, name, 0 if state is None else state[name])
        if state is None:
            self.flat.initialize(cfg, config.seed)
        else:
            checkpoint.restore(state, self.flat)
            if state["config"].get("dtype") == config.dtype:
                self.scaler.load_state_dict(state["scaler"])
        self.micros = config.batch_size // (grid.dp * config.micro_batch)
        order = SCHEDULES[config.pp_schedule] if grid.pp > 1 else one_f_one_b
        self.schedule = order(grid.stage, grid.pp, self.micros)
        positions = cfg.seq_len // (grid.tp if grid.sequence_parallel else 1)
        self.boundary = torch.empty(config.micro_batch, positions, cfg.n_embd,
                                    dtype=self.precision.compute, device=device)

    def rows(self, m: int) -> slice:
        """Which sequences of a batch are this replica's microbatch m."""
        first = (m * self.grid.dp + self.grid.dp_rank) * self.config.micro_batch
        return slice(first, first + self.config.micro_batch)

    def load(self, dataset: TokenDataset, windows):
        """Windows (B,) of the dataset -> inputs and targets (B, T); None where this stage needs
        neither. A window below 0 is a row that counts for nothing."""
        if not (self.grid.is_first or self.grid.is_last):
            return None, None
        tokens = torch.from_numpy(dataset.windows(np.maximum(windows, 0)))      # (B, T + 1)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        y[torch.from_numpy(windows < 0)] = IGNORE
        return (x.to(self.device) if self.grid.is_first else None,
                y.to(self.device) if self.grid.is_last else None)

    def train(self, metrics: Metrics, stop: StopSignal) -> None:
        config, grid, flat = self.config, self.grid, self.flat
        step_tokens = config.batch_size * self.cfg.seq_len
        speaks_for_loss = grid.is_last and grid.tp_rank == 0
        recent = deque(maxlen=20)       # seconds of a step
        self.model.train()
        while self.step < config.steps:
            started = time.perf_counter()
            self.step += 1
            lr = learning_rate(config, self.step)
            scale = self.scaler.scale

            # batch
            windows = self.train_data.order(config.seed, self.sequences, config.batch_size)
            batch = [self.load(self.train_data, windows[self.rows(m)]) for m in range(self.micros)]
            inputs, targets = zip(*batch)
            holder = [grid.dp_rank] + [grid.tp_rank] * grid.sequence_parallel   # of rows, positions
            keys = [seed_of(config.seed, self.step, m, *holder) for m in range(self.micros)]
            self.sequences += config.batch_size
            self.tokens += step_tokens

            # forward, backward, reduce
            flat.zero_grad()
            loss = run_schedule(self.schedule, self.model, grid, inputs, targets, self.boundary,
                                keys, scale / step_tokens, before_backward=flat.arm)
            flat.finish_reduction()

            # agree: loss, squares for the norm, squares that tell an overflow, wish to stop
            news = torch.stack([loss / step_tokens * speaks_for_loss, *flat.square_sums(),
                                torch.tensor(float(stop.asked > 0), device=self.device)])
            news = all_reduce(news, grid.group("world")).wait()
            loss, squares, overflow, stopping = news.tolist()
            grad_norm = math.sqrt(squares) / scale
            found_inf = not (math.isfinite(loss) and math.isfinite(overflow))

            # unscale, clip, step, or skip
            if not found_inf:
                flat.update(clip_factor(grad_norm, config.clip, scale), self.adam_steps + 1, lr,
                            config.beta1, config.beta2, config.weight_decay)
                self.adam_steps += 1
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if found_inf else 0
            self.scaler.update(found_inf)
            elapsed = time.perf_counter() - started
            recent.append(elapsed)

            # save, evaluate, log
            stopping = stopping > 0 and self.step < config.steps
            last = self.step == config.steps or stopping
            due = {name: last or every > 0 and self.step % every == 0 for name, every in
                   (("save", config.save_every), ("eval", config.eval_every))}
            row = dict(step=self.step, tokens=self.tokens, loss=loss, lr=lr, grad_norm=grad_norm,
                       loss_scale=scale, tokens_per_second=round(step_tokens / elapsed, 1))
            if due["save"]:
                self.save(row, last)
            if due["eval"] and not stopping:
                row["val_loss"] = self.evaluate()
            metrics.write(**row)
            self.report(row, statistics.median_low(recent), found_inf)
            if found_inf:
                metrics.write(event="skip", step=self.step, loss_scale=scale)
                if self.skipped_in_a_row >= MAX_SKIPPED and scale <= self.scaler.min_scale:
                    give_up(f"{MAX_SKIPPED} steps in a row had gradients that are not finite, "
                            f"with the loss scale at its floor of {scale}: the run has diverged; "
                            f"go on from an older checkpoint with a lower --lr", grid.rank, 1)
            if stopping:
                metrics.write(event="stop", step=self.step)
                if grid.rank == 0:
                    how = ("the same command goes on" if config.resume == "auto" else
                           "go on with --resume auto")
                    say(f"stopped and saved after step {self.step}; {how}")
                return

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats on fixed validation windows, the same in every layout."""
        self.model.eval()
        count = min(self.val_data.n_windows, EVAL_SEQUENCES)
        micros = -(-count // (self.grid.dp * self.config.micro_batch))
        windows = np.full(micros * self.grid.dp * self.config.micro_batch, -1)
        windows[:count] = np.linspace(0, self.val_data.n_windows - 1, count).astype(np.int64)
        batch = [self.load(self.val_data, windows[self.rows(m)]) for m in range(micros)]
        inputs, targets = zip(*batch)
        total = run_schedule([("F", m) for m in range(micros)], self.model, self.grid, inputs,
                             targets, self.boundary, [0] * micros)
        total *= self.grid.tp_rank == 0                         # tensor neighbours have the same
        all_reduce(total, self.grid.group("world")).wait()
        self.model.train()
        return total.item() / (count * self.cfg.seq_len)

    def save(self, row: dict, last: bool) -> None:
        """Gather on rank 0 and write there. A failure is told and passed over, but for the last
        save: what cannot be kept has not succeeded."""
        whole = checkpoint.gather(self.flat, self.cfg, self.grid, checkpoint.STATE.values())

        def write():
            if whole is None:           # not on rank 0
                return
            state = dict(
                format=1, **{name: getattr(self, name) for name in COUNTERS}, row=row,
                config=dataclasses.asdict(self.config), model=dataclasses.asdict(self.cfg),
                tokenizer=self.train_data.meta["tokenizer"],
                data=self.train_data.meta["fingerprint"], scaler=self.scaler.state_dict(),
                **{key: whole[name] for key, name in checkpoint.STATE.items()})
            try:
                checkpoint.save(state, Path(self.config.out), self.config.keep)
            except OSError as error:
                if last:
                    raise checkpoint.Lost(f"the last checkpoint is lost: {error}") from error
                print(f"train.py: warning: {error}; earlier checkpoints are untouched, and the "
                      f"next save comes as planned", file=sys.stderr, flush=True)

        together(write, self.grid.rank, self.grid.world)

    def report(self, row: dict, seconds: float, skipped: bool) -> None:
        """One console line a step."""
        if self.grid.rank != 0:
            return
        line = (f"step {row['step']:>{len(str(self.config.steps))}}/{self.config.steps}  "
                f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.3f}  "
                f"{row['tokens_per_second']:,.0f} tok/s")
        if self.config.dtype == "fp16":
            line += f"  scale {row['loss_scale']:g}"
        if self.device.type == "cuda" and self.precision.compute.itemsize == 2:
            name = torch.cuda.get_device_name(self.device)
            peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
            if peak is not None:
                used = row["tokens_per_second"] * flops_per_token(self.cfg)
                line += f"  MFU {used / (self.grid.world * peak):.1%}"
        line += f"  left {clock_time((self.config.steps - row['step']) * seconds)}"
        if skipped:
            line += "  skipped: a gradient is not finite"
        if "val_loss" in row:
            line += "\n" + self.describe(row["val_loss"])
        say(line)

    def describe(self, val_loss: float) -> str:
        bytes_per_token = self.val_data.meta["bytes_per_token"]
        perplexity = math.exp(val_loss) if val_loss < 700 else math.inf
        text = f"validation: {val_loss:.4f} nats a token, perplexity {perplexity:.2f}"
        if bytes_per_token:
            text += f", {val_loss / math.log(2) / bytes_per_token:.4f} bits a byte"
        return text


# ---------------------------------------------------------------------------------------------
# From the command line to a run
# ---------------------------------------------------------------------------------------------


def pick_device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"{local_rank + 1} processes on this machine or more, but "
                         f"{torch.cuda.device_count()} CUDA devices: lower --nproc_per_node")
    return torch.device("cuda", local_rank)


def choose_checkpoint(config: Config) -> tuple[Path, list[dict]]:
    """The file to resume from, whole by its CRCs, and an event for each damaged file passed over.
    Rank 0's business, because it reads whole files."""
    events = []

    def passed_over(path, error):
        events.append(dict(event="damaged", path=str(path), reason=str(error)))
        print(f"train.py: warning: {error}; passed over", file=sys.stderr, flush=True)

    if config.resume not in ("auto", "never"):
        checkpoint.verify(Path(config.resume))
        return Path(config.resume), events
    return checkpoint.newest_whole(Path(config.out), passed_over), events


def plan(given: dict, state: dict | None, world: int):
    """Flags and checkpoint -> config, model shape, datasets. Raises ValueError or OSError for
    whatever cannot run, without communication."""
    config, shape = settle(given, state)
    train_data = TokenDataset(config.data, "train", shape["seq_len"])
    val_data = TokenDataset(config.data, "val", shape["seq_len"])
    meta = train_data.meta
    cfg = GPTConfig(vocab_size=meta["vocab_size"], dropout=config.dropout, **shape)
    if config.micro_batch is None:
        replica = config.batch_size * config.tp * config.pp // world        # sequences of each
        config = dataclasses.replace(config, micro_batch=next(
            (m for m in (4, 2, 1) if replica % (m * config.pp) == 0), 1))
    if config.eval_only:            # whose batches are its own
        dp = max(1, world // (config.tp * config.pp))
        config = dataclasses.replace(config, batch_size=dp * config.micro_batch)
    if config.compile and (config.tp > 1 or config.dropout > 0):
        raise ValueError(f"--compile goes with tp 1 and dropout 0, not {config.tp} and "
                         f"{config.dropout}: a compiled block can neither communicate nor draw "
                         f"masks by their key")
    check_layout(cfg, world, config.tp, config.pp, config.batch_size, config.micro_batch,
                 config.zero, config.sequence_parallel)
    if state is not None:
        theirs = state["tokenizer"], state["model"]["vocab_size"]
        if theirs != (meta["tokenizer"], meta["vocab_size"]):
            raise ValueError(f"the checkpoint's tokenizer is {theirs[0]} with {theirs[1]} tokens, "
                             f"but {config.data} has {meta['tokenizer']} with "
                             f"{meta['vocab_size']}: use the run's own --data, or another --out")
        if state["data"] != meta["fingerprint"] and not config.eval_only:
            raise ValueError(f"{config.data} is not the data this checkpoint was trained on "
                             f"(its fingerprint changed): use the run's own --data, or another "
                             f"--out")
    return config, cfg, train_data, val_data


def introduce(run: Run) -> None:
    """What is about to run, in a few lines."""
    config, cfg, grid, train_data = run.config, run.cfg, run.grid, run.train_data
    epochs = config.steps * config.batch_size / train_data.n_windows
    say(f"model    {parameter_count(cfg):,} parameters: {cfg.n_layer} layers, {cfg.n_head} heads, "
        f"width {cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size}; "
        f"{flops_per_token(cfg):.3g} FLOPs a token")
    options = [f"zero {config.zero}", *[config.pp_schedule] * (grid.pp > 1),
               *(name for name in ("recompute", "sequence_parallel", "offload", "compile")
                 if getattr(config, name))]
    say(f"layout   dp {grid.dp} x pp {grid.pp} x tp {grid.tp}, {config.dtype}, "
        + ", ".join(options).replace("_", " "))
    memory = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in run.flat.memory().items())
    memory += " (the last in host memory)" if config.offload else ""
    activations = activation_bytes(cfg, grid, run.schedule, config.micro_batch,
                                   run.boundary.itemsize, config.recompute)
    say(f"memory   {memory}, activations about {activations / 1e6:,.1f} MB (rank 0)")
    say(f"batch    {config.batch_size} sequences = dp {grid.dp} x {run.micros} microbatches x "
        f"{config.micro_batch} sequences; {config.batch_size * cfg.seq_len:,} tokens a step")
    say(f"data     {train_data.n_tokens:,} tokens in {config.data}; {config.steps} steps read "
        f"{epochs:.2f} epochs")


def start(run: Run, row: dict | None, path: Path | None, events: list[dict], given: dict,
          stop: StopSignal) -> None:
    """Evaluate, or train after telling how it began; `row` is that of the checkpoint at `path`."""
    config, rank, world = run.config, run.grid.rank, run.grid.world
    if config.eval_only:
        val_loss = run.evaluate()
        if rank == 0:
            say(f"{path}, step {run.step}: {run.describe(val_loss)}")
        return
    metrics = together(lambda: Metrics(Path(config.out), rank), rank, world)
    if row is not None and not metrics.has(run.step):
        metrics.write(**row)
    began = dict(event="start") if row is None else dict(
        event="resume", path=str(path), given=given)
    began["config"] = dataclasses.asdict(config)
    for event in [*events, began]:
        metrics.write(**event, step=run.step)
    if rank == 0:
        introduce(run)
        if row is not None:
            say(f"resume   {path}, after step {run.step}")
    run.train(metrics, stop)


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    try:                            # what can be judged alone is, before any communication
        given = parse(sys.argv[1:])
        config = Config(**given)
        device = pick_device(config.device, local_rank)
        files = (checkpoint.newest_first(Path(config.out)) if config.resume in ("auto", "never")
                 else [Path(config.resume)])
        if files and config.resume == "never" and not restarted:
            raise ValueError(f"--resume never, but {config.out} holds {files[0].name}: give "
                             f"another --out")
        if not files and config.eval_only:
            raise ValueError(f"--eval-only, but {config.out} holds no checkpoint")
        with suppress(checkpoint.Damaged):      # which is told below, or passed over
            job = plan(given, checkpoint.load(files[0]) if files else None, world)
    except (ValueError, OSError) as error:
        give_up(error, rank)

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    agree(bool(files), f"some ranks find checkpoints in {config.out}, others none: --out must be "
          f"on a file system that all machines share", rank, world)
    state, path, events = None, None, []
    if files:
        chosen = together(lambda: choose_checkpoint(config) if rank == 0 else None, rank, world)
        path, events = everyones(chosen, world)[0]
        state = together(lambda: checkpoint.load(path), rank, world)
        job = together(lambda: plan(given, state, world), rank, world)
    config, cfg, train_data, val_data = job
    agree([dataset.meta["fingerprint"] for dataset in (train_data, val_data)],
          f"the ranks find different data in {config.data}: copy it anew", rank, world)
    for dataset in (train_data, val_data):
        together(lambda: dataset.check(rank, world), rank, world)

    if not config.eval_only and state is not None and state["step"] >= config.steps:
        if rank == 0:
            say(f"{path} is step {state['step']} of {config.steps}: nothing left to do; raise "
                f"--steps to go on, or give another --out")
    else:
        stop = StopSignal()
        grid = make_grid(world, config.tp, config.pp, rank, config.sequence_parallel)
        try:
            run = Run(config, cfg, grid, device, train_data, val_data, state)
            row, state = state and state["row"], None       # the file is mapped no longer
            start(run, row, path, events, given, stop)
        finally:
            grid.groups.clear()     # what threads of gloo outlive main abort the process at times
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
