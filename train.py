"""The policy of a run: flags, schedules, the loop, logging, when to save and when to stop.

    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp is what remains: 2

A step has these phases; `train` shows them on one screen:

    batch       step k reads sequences [position, position + batch size) of a seeded order; the
                rank only decides which rows of them it reads
    forward and backward, microbatch by microbatch; gradients add up in flat fp32 buckets
    reduce      buckets over replicas, started during backward (ZeRO 2 and 3: with each
                microbatch); the tied weight's two ends
    agree       one small all-reduce tells every rank the loss, the norms of the gradient and of the
                last activations, whether any gradient overflowed, whether anyone was asked to stop
    watch       from these every rank concludes alike whether the run has diverged (`DivergenceMonitor`)
    unscale, clip, AdamW on the masters, or skip all three after an overflow
    save, then evaluate, then log; or after a divergence roll back

Everything a resumed run needs is in the checkpoint: N steps are bit for bit N/2 steps, a stop and
N/2 more, in the same layout on the CPU. Flags given at the resume win over the stored ones, which
win over the defaults; layout, precision and paths are never taken from the checkpoint. So a run may
be killed at any moment, and torchrun --max-restarts or a loop around it brings it to its end.

Exit status: 0 done, or saved on a signal; 1 the run failed; 2 a user's mistake, told in one line.
"""
import argparse
import dataclasses
import fcntl
import json
import math
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
import uuid
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
from amp import PRECISIONS, clip_factor, make_scaler
from data import TokenDataset
from model import IGNORE_INDEX, SIZES, GPTConfig, flops_per_token, parameter_count, derive_seed
from parallel import (SCHEDULES, FlatParameters, PeerError, activation_bytes, all_reduce,
                      build_stage, check_layout, comm_errors, make_grid, one_f_one_b, run_schedule,
                      shard_parameters)

EVAL_SEQUENCES = 128        # fixed validation windows, evenly spaced over the split
COUNTERS = ("step", "consumed_samples", "tokens", "optimizer_steps", "skipped_in_a_row")    # of a run

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
    rollback: str = flag("on", "after a divergence go back to a healthy checkpoint, skip batches, "
                         "lower the learning rate: on or off", choices=["on", "off"])
    max_rollbacks: int = flag(5, "rollbacks of the whole run, then it stops", low=0)
    spike_margin: float = flag(6.0, "a loss is high this many deviations above its recent median",
                               low=1)
    spike_steps: int = flag(3, "high losses in a row that make a divergence", low=1)
    skip_steps: str = flag(None, "A:B, leave out the batches of steps A to B, inclusive", str)
    timeout: int = flag(600, "seconds to wait for another rank before giving up", low=1, local=True)
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
    if "skip_steps" in given:
        first, last = step_range(given["skip_steps"])
        if not 1 <= first <= last:
            raise ValueError(f"--skip-steps is {given['skip_steps']}: it must be A:B, two steps "
                             f"from 1 on, A not after B")
    return given


def step_range(text: str) -> tuple[int, int]:
    """"A:B" -> (A, B); (0, 0) for anything else."""
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "activation")


def model_shape(flags: dict) -> dict:
    """What the flags say of the model's shape."""
    named = SIZES[flags["model"]] if "model" in flags else {}
    return {**named, **{n: flags[n] for n in SHAPE if flags.get(n) is not None}}


def merge_config(given: dict, state: dict | None) -> tuple[Config, dict]:
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


def print_rank0(line: str) -> None:
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


def give_up(error, rank: int):
    """One line on standard error and exit 2, before the ranks can communicate. The first to leave
    makes torchrun end the others, so these leave rank 0 the time to speak, and speak only if it had
    nothing to say."""
    if rank != 0:
        time.sleep(10)
    print(f"train.py: {error}", file=sys.stderr, flush=True)
    leave(2)


def first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def all_gather_object(value) -> list:
    """The value of each rank, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    with comm_errors("exchange with all ranks"):
        dist.all_gather_object(values, value)
    return values


def depart(message: str, status: int):
    """All leave, and nobody before rank 0 has said why."""
    if first_rank():
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    all_gather_object(None)
    leave(status)


def all_ranks(action):
    """action() on every rank. If it fails on any, all leave with the first reason."""
    failure, result = None, None
    try:
        result = action()
    except (ValueError, OSError, checkpoint.NoValidCheckpoint) as error:
        failure = (str(error), 1 if isinstance(error, checkpoint.NoValidCheckpoint) else 2)
    failure = next((f for f in all_gather_object(failure) if f is not None), None)
    if failure is not None:
        depart(*failure)
    return result


def on_rank0(action):
    """The result of action() on rank 0, for all; or all leave."""
    return all_gather_object(all_ranks(lambda: action() if first_rank() else None))[0]


def assert_equal_across_ranks(value, complaint: str) -> None:
    """All leave, with this complaint, if the ranks do not have the same value."""
    values = all_gather_object(value)
    if any(v != values[0] for v in values):
        depart(complaint, 2)


class StopSignal:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one, half a second later or more (a
    launcher may pass on what has arrived already), ends at once.

    A thread listens, because Python runs a handler between two of its own instructions only, and
    the main thread may be in the middle of a wait for another rank.
    """

    def __init__(self, rank: int):
        self.requested, self.rank = 0.0, rank
        self.source, self.sink = os.pipe()
        os.set_blocking(self.sink, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.sink)         # where the signal's number is written
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while os.read(self.source, 1):
            if self.requested and time.monotonic() - self.requested > 0.5:
                self.tell("ended without saving")
                os._exit(1)
            if not self.requested:
                self.requested = time.monotonic()
                self.tell("saving after this step; a second signal ends at once, without saving")

    def tell(self, line):
        if self.rank == 0:
            print_rank0(line)


@contextmanager
def lock_output_dir(out: Path, rank: int):
    """`out` is this run's alone: rank 0 has a lock there that ends with its process, however that
    ends. What it writes into the lock all ranks must find."""
    mark = f"{socket.gethostname()}, process {os.getpid()}, {time.time_ns()}"

    def lock():
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = open(out / "lock", "a+")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read().rpartition(",")[0]
            raise ValueError(f"another run writes to {out} ({owner}): stop it first, or give "
                             f"another --out") from None
        except OSError as error:
            raise OSError(f"--out {out} is not a directory that can be written and locked: "
                          f"{error.strerror}") from error
        file.truncate(0)
        file.write(mark)
        file.flush()
        os.fsync(file.fileno())             # for other machines
        return file

    def find():
        path, end = out / "lock", time.monotonic() + 5
        while not path.is_file() or path.read_text() != wanted:
            if time.monotonic() > end:
                raise ValueError(f"rank {rank} on {socket.gethostname()} does not find in {out} "
                                 f"what rank 0 wrote there: --out must be on a file system that "
                                 f"all machines share")
            time.sleep(0.2)

    with all_ranks(lambda: lock() if rank == 0 else nullcontext()):
        wanted = all_gather_object(mark)[0]
        all_ranks(find)
        yield


class Metrics:
    """out/metrics.jsonl, append-only: one object a step, and one with `event` for what happened
    besides. Only rank 0 writes."""

    def __init__(self, out: Path, rank: int):
        self.path = out / "metrics.jsonl" if rank == 0 else None
        if rank == 0:
            with open(self.path, "a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)         # a line torn by a crash

    def last_row(self, step: int) -> dict:
        """What was written last of a step; a kill after its checkpoint leaves nothing, {}."""
        if self.path is None:
            return {}
        rows = [line for line in self.path.read_text().splitlines()
                if line.startswith(f'{{"step": {step}, ')]
        return json.loads(rows[-1]) if rows else {}

    def write(self, **row):
        if self.path is None:
            return
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v
               for k, v in row.items()}
        line = json.dumps(row).encode() + b"\n"
        try:
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):
                    file.truncate(end)
                    raise OSError("the disk is full")
        except OSError as error:                        # costs this line, not the run
            print(f"train.py: warning: metrics.jsonl lacks a line: {error}", file=sys.stderr,
                  flush=True)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


# ---------------------------------------------------------------------------------------------
# DivergenceMonitor
#
# A loss far above its recent median for several steps, one that is not finite, or a loss scale that
# would have to fall below its floor: the run has diverged. What the teams of OPT-175B (Zhang et al.
# 2022, section 2.5, and their logbook) and PaLM (Chowdhery et al. 2022, section 5.1) then did by
# hand happens by itself, up to --max-rollbacks times:
#
#     loss                                 x x x                  x high
#        \_____                         x                         o healthy checkpoint: the run had
#              \___o________o___________/                           stayed healthy for HEALTHY steps
#                  |           |////////////|
#         go back there,     skip these batches        at learning rate x LR_CUT
#
# The steps are done again, on the batches behind the skipped ones; of these the first are skipped
# too, for as long as their loss is high. Where the run comes back to the same checkpoint again, or
# to an older one, the learning rate was not cut enough: then it is cut three times.
# ---------------------------------------------------------------------------------------------

WINDOW, FEWEST = 64, 16     # losses that make the median, and how many it takes at least
MAX_SKIPPED = 20            # steps in a row without an update that make a divergence
HEALTHY = 16                # steps without a high loss after a checkpoint to go back to
LEAD_IN = 8                 # batches before the first high loss that are skipped
MAX_SKIP = 500              # batches left out in one go, at most
LR_CUT = 0.6


@dataclass
class DivergenceMonitor:
    """What a run remembers of its monitor. A function of what all ranks agreed on, so that they
    decide alike; every checkpoint holds it."""
    losses: list = field(default_factory=list)      # the last that were not high
    high: int = 0               # steps in a row with a loss that was
    lr_factor: float = 1.0      # on the schedule's learning rate
    rollbacks: int = 0
    last_rollback_step: int = -1          # the step that the last of them went back to
    skipped: list = field(default_factory=list)     # [first, end) of the sequences to leave out
    applied_skip: str | None = None    # --skip-steps, once it is among them
    files: list = field(default_factory=list)       # [step, file]: its beginning, then the kept

    def limit(self, margin: float) -> float:
        """The highest loss that is no spike. A deviation is measured between neighbours, so that a
        falling loss does not count as noise: their median distance times 1.4826 / sqrt 2, which is
        sigma if the noise is normal; or 1% of the median if that is more."""
        if len(self.losses) < FEWEST:
            return math.inf
        middle = statistics.median(self.losses)
        distance = statistics.median(abs(a - b) for a, b in zip(self.losses, self.losses[1:]))
        return middle + margin * max(1.4826 / math.sqrt(2) * distance, middle / 100)

    def goes_on(self, first: int, end: int, loss: float, margin: float) -> bool:
        """Whether the batch [first, end) belongs to what was skipped right before it."""
        if not self.skipped or self.skipped[-1][1] != first or loss <= self.limit(margin):
            return False
        if first - self.skipped[-1][0] >= MAX_SKIP * (end - first):
            return False
        self.skipped[-1][1] = end
        return True

    def observe(self, loss: float, inf_at_floor: bool, skipped_in_a_row: int,
              config: Config) -> str | None:
        """Take note of a step; the reason if with it the run has diverged. An overflow that a lower
        loss scale can answer is none, nor is a single one where there is no scale."""
        limit = self.limit(config.spike_margin)
        at_once = ("the loss is not finite" if not math.isfinite(loss) else
                   "a gradient is not finite, and the loss scale is at its floor"
                   if inf_at_floor and config.dtype == "fp16" else
                   f"{MAX_SKIPPED} steps in a row were skipped"
                   if skipped_in_a_row >= MAX_SKIPPED else None)
        if at_once:
            self.high = max(self.high + 1, config.spike_steps)
        elif loss > limit:
            self.high += 1
        else:
            self.high = 0
            self.losses = [*self.losses, loss][-WINDOW:]
        told = config.rollback == "off" and self.high > config.spike_steps
        if self.high < config.spike_steps or told:
            return None
        return at_once or f"the loss was above {limit:.4f} for {self.high} steps, now {loss:.4f}"

    def candidates(self, onset: int) -> list:
        """[step, file] to go back to from a divergence that began at step `onset`, best first:
        those after which it stayed healthy for HEALTHY steps, the newest first; if there are none,
        or none whole, the oldest of the later ones, but not the same again; where it began."""
        began, *kept = [f for f in self.files if f[0] < onset] or self.files[:1]
        proven = [f for f in kept if f[0] <= onset - HEALTHY]
        others = [f for f in kept if f not in proven and f[0] != self.last_rollback_step]
        return [*reversed(proven), *others[:1], began]


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


class Run:
    """What a run is made of on this rank, and its verbs: batch, train, evaluate, save."""

    def __init__(self, config: Config, cfg: GPTConfig, grid, device, train_data, val_data, state):
        self.config, self.cfg, self.grid, self.device = config, cfg, grid, device
        self.train_data, self.val_data = train_data, val_data
        self.precision = PRECISIONS[config.dtype]
        self.writer = checkpoint.Writer(Path(config.out), config.keep)
        self.model, specs = build_stage(cfg, grid, config.recompute, config.compile)
        self.flat = FlatParameters(specs, grid, self.precision.param_dtype, self.precision.master_dtype,
                                   device, config.zero, "cpu" if config.offload else device)
        if config.zero == 3:
            shard_parameters(self.model, self.flat)
        self.restore(state)
        self.num_microbatches = config.batch_size // (grid.dp * config.micro_batch)
        order = SCHEDULES[config.pp_schedule] if grid.pp > 1 else one_f_one_b
        self.schedule = order(grid.stage, grid.pp, self.num_microbatches)
        positions = cfg.seq_len // (grid.tp if grid.sequence_parallel else 1)
        self.boundary = torch.empty(config.micro_batch, positions, cfg.n_embd,
                                    dtype=self.precision.param_dtype, device=device)

    def restore(self, state: dict | None) -> None:
        """Be where the checkpoint was; without one, at step 0."""
        for name in COUNTERS:
            setattr(self, name, 0 if state is None else state[name])
        self.scaler, self.monitor = make_scaler(self.config.dtype), DivergenceMonitor(files=[[0, None]])
        self.row = {} if state is None else state["row"]        # metrics.jsonl's last
        if state is None:
            self.flat.initialize(self.cfg, self.config.seed)
            return
        checkpoint.restore(state, self.flat)
        if state["config"].get("dtype") == self.config.dtype:
            self.scaler.load_state_dict(state["scaler"])
        self.monitor = DivergenceMonitor(**state["monitor"])

    def microbatch_slice(self, m: int) -> slice:
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
        y[torch.from_numpy(windows < 0)] = IGNORE_INDEX
        return (x.to(self.device) if self.grid.is_first else None,
                y.to(self.device) if self.grid.is_last else None)

    def train(self, metrics: Metrics, stop: StopSignal) -> None:
        config, grid, flat = self.config, self.grid, self.flat
        step_tokens = config.batch_size * self.cfg.seq_len
        speaks_for_loss = grid.is_last and grid.tp_rank == 0
        speaks_for_norms = grid.is_last if grid.sequence_parallel else speaks_for_loss
        recent = deque(maxlen=20)       # seconds of a step
        self.model.train()
        while self.step < config.steps:
            self.skip_excluded(metrics)
            started = time.perf_counter()
            self.step += 1
            lr = learning_rate(config, self.step) * self.monitor.lr_factor
            scale = self.scaler.scale

            # batch
            windows = self.train_data.sample_indices(config.seed, self.consumed_samples, config.batch_size)
            batch = [self.load(self.train_data, windows[self.microbatch_slice(m)]) for m in range(self.num_microbatches)]
            inputs, targets = zip(*batch)
            holder = [grid.dp_rank] + [grid.tp_rank] * grid.sequence_parallel   # of rows, positions
            dropout_seeds = [derive_seed(config.seed, self.step, m, *holder) for m in range(self.num_microbatches)]
            self.consumed_samples += config.batch_size
            self.tokens += step_tokens

            # forward, backward, reduce
            flat.zero_grad()
            loss = run_schedule(self.schedule, self.model, grid, inputs, targets, self.boundary,
                                dropout_seeds, scale / step_tokens, before_backward=flat.prepare_grad_sync)
            flat.finish_grad_sync()

            # agree: loss, norms, squares that tell an overflow, wish to stop
            own_loss, norms = loss, self.model.head.norms if speaks_for_norms else 0.0
            stats = torch.stack([loss / step_tokens * speaks_for_loss, *flat.square_sums(),
                                torch.tensor(float(stop.requested > 0), device=self.device),
                                loss.new_zeros(()) + norms / step_tokens])
            stats = all_reduce(stats, grid.group("world")).wait()
            loss, squares, overflow, stopping, activation_norm = stats.tolist()
            grad_norm = math.sqrt(squares) / scale
            found_inf = not (math.isfinite(loss) and math.isfinite(overflow))

            # watch
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if found_inf else 0
            at_floor = scale <= self.scaler.min_scale           # always true outside fp16
            left_out = self.monitor.goes_on(self.consumed_samples - config.batch_size, self.consumed_samples,
                                           loss, config.spike_margin)
            reason = None if left_out else self.monitor.observe(
                loss, found_inf and at_floor, self.skipped_in_a_row, config)

            # unscale, clip, step, or skip
            if not found_inf and not left_out:
                flat.step(clip_factor(grad_norm, config.clip, scale), self.optimizer_steps + 1, lr,
                            config.beta1, config.beta2, config.weight_decay)
                self.optimizer_steps += 1
            self.scaler.update(found_inf)
            elapsed = time.perf_counter() - started
            recent.append(elapsed)
            row = dict(step=self.step, tokens=self.tokens, loss=loss, lr=lr, grad_norm=grad_norm,
                       loss_scale=scale, skipped=self.skipped_in_a_row,
                       activation_norm=activation_norm,
                       tokens_per_second=round(step_tokens / elapsed, 1))
            self.tell(metrics, row, left_out, reason,
                      self.locate_nonfinite(own_loss.item(), windows) if found_inf else {})

            # roll back; or save, evaluate, log
            if reason is not None and config.rollback == "on":
                self.log(metrics, row, recent)
                self.roll_back(reason, metrics)
                continue
            if left_out:
                self.step -= 1                                  # the next batch is this step's
            else:
                self.row = row
            stopping = stopping > 0 and self.step < config.steps
            last = stopping or self.step == config.steps
            if last or not left_out and is_due(self.step, config.save_every):
                self.save()
            if not left_out:
                if not stopping and (last or is_due(self.step, config.eval_every)):
                    row["val_loss"] = self.evaluate()
                self.log(metrics, row, recent)
            if at_floor and self.skipped_in_a_row >= MAX_SKIPPED:
                self.fail(metrics, f"{MAX_SKIPPED} steps in a row were not finite, at a loss scale "
                                   f"of {scale:g} that cannot fall")
            if last:
                all_ranks(self.writer.last)
            if stopping:
                metrics.write(event="stop", step=self.step)
                if grid.rank == 0:
                    how = ("the same command goes on" if config.resume == "auto" else
                           "go on with --resume auto")
                    print_rank0(f"stopped and saved after step {self.step}; {how}")
                return

    def tell(self, metrics: Metrics, row: dict, left_out: bool, reason: str | None,
             locate_nonfinite: dict) -> None:
        """Events of a step that was not as usual: before its save, so that a kill keeps them."""
        seen = {name: row[name] for name in ("step", "loss", "grad_norm", "loss_scale")}
        if locate_nonfinite:
            metrics.write(event="skip", reason="not finite", **seen, **locate_nonfinite)
        if left_out:
            metrics.write(event="skip", reason="the loss is high behind batches left out", **seen)
        if reason is not None:
            limit = self.monitor.limit(self.config.spike_margin)
            metrics.write(event="spike", reason=reason, limit=limit, **seen)
            if self.grid.rank == 0:
                print_rank0(f"diverged: {reason}")

    def log(self, metrics: Metrics, row: dict, recent) -> None:
        metrics.write(**row)
        self.report(row, statistics.median_low(recent))

    def fail(self, metrics: Metrics, reason: str):
        """The end of a run that has diverged and cannot help itself."""
        metrics.write(event="stop", step=self.step, reason=reason)
        depart(f"step {self.step}: {reason}; the run has diverged: see the events in "
               f"{self.config.out}/metrics.jsonl, and go on from an older checkpoint with a lower "
               f"--lr, a tighter --clip or --skip-steps", 1)

    def skip_excluded(self, metrics: Metrics) -> None:
        """Move on over the batches that come next in the data but are to be left out."""
        position, batch = self.consumed_samples, self.config.batch_size
        first, last = step_range(self.config.skip_steps or "")
        if first <= self.step + 1 <= last and self.monitor.applied_skip != self.config.skip_steps:
            self.monitor.applied_skip = self.config.skip_steps
            self.monitor.skipped.append([position, position + (last - self.step) * batch])
        for first, end in sorted(self.monitor.skipped):
            if first <= self.consumed_samples < end:
                self.consumed_samples = end
        if self.consumed_samples > position:
            metrics.write(event="skip", step=self.step + 1, reason="left out",
                          batches=(self.consumed_samples - position) // batch, sequences=[
                              position, self.consumed_samples])

    def locate_nonfinite(self, own_loss: float, windows) -> dict:
        """Where a number is not finite: the first rank whose own loss is not, or else whose
        gradients; a parameter with such a gradient, of the last stage that has one; and the windows
        of the data, from which TokenDataset.windows makes the same batch again."""
        found = all_gather_object([not math.isfinite(own_loss), self.flat.not_finite()])
        of_loss = [rank for rank, (loss, _) in enumerate(found) if loss]
        of_gradient = [rank for rank, (_, name) in enumerate(found) if name is not None]
        return dict(what="loss" if of_loss else "gradient", rank=(of_loss or of_gradient)[0],
                    parameter=found[of_gradient[-1]][1] if of_gradient else None,
                    windows=windows.tolist())

    def roll_back(self, reason: str, metrics: Metrics) -> None:
        """Go back to a healthy checkpoint, and write down there what is to be different, before
        anything else happens: from then on a kill loses nothing."""
        config, monitor, grid, diverged_at = self.config, self.monitor, self.grid, self.step
        if monitor.rollbacks >= config.max_rollbacks:
            self.fail(metrics, f"{reason}, and --max-rollbacks {monitor.rollbacks} are spent")
        bad, batch = max(monitor.high, self.skipped_in_a_row), config.batch_size
        onset = diverged_at - bad + 1
        skip = [self.consumed_samples - (bad + LEAD_IN) * batch, self.consumed_samples]

        def choose():
            self.writer.wait()                          # what it writes may be the one
            return choose_checkpoint([name and Path(config.out, name)
                                      for _, name in monitor.candidates(onset)])

        path, events = on_rank0(choose)
        state = all_ranks(lambda: path and checkpoint.load(path))
        self.restore(state)
        skip[0] = max(skip[0], self.consumed_samples)
        rollbacks, cuts = monitor.rollbacks + 1, 1 if self.step > monitor.last_rollback_step else 3
        self.monitor = dataclasses.replace(
            self.monitor, rollbacks=rollbacks, lr_factor=monitor.lr_factor * LR_CUT ** cuts,
            skipped=[*monitor.skipped, skip], applied_skip=monitor.applied_skip, last_rollback_step=self.step,
            files=monitor.files)
        told = dict(to=self.step, sequences=skip, lr_factor=self.monitor.lr_factor,
                    rollbacks=rollbacks)
        for event in [*events, dict(event="rollback", reason=reason, **told)]:
            metrics.write(**event, step=diverged_at)
        if grid.rank == 0:
            print_rank0(f"rollback {rollbacks} of at most {config.max_rollbacks}: back to step "
                f"{self.step}, leaving out {(skip[1] - skip[0]) // batch} batches up to step "
                f"{diverged_at}'s, learning rate x {self.monitor.lr_factor:.3g} from now on")
        self.save()
        all_ranks(self.writer.last)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats on fixed validation windows, the same in every layout."""
        self.model.eval()
        count = min(self.val_data.n_windows, EVAL_SEQUENCES)
        num_microbatches = -(-count // (self.grid.dp * self.config.micro_batch))
        windows = np.full(num_microbatches * self.grid.dp * self.config.micro_batch, -1)
        windows[:count] = np.linspace(0, self.val_data.n_windows - 1, count).astype(np.int64)
        batch = [self.load(self.val_data, windows[self.microbatch_slice(m)]) for m in range(num_microbatches)]
        inputs, targets = zip(*batch)
        total = run_schedule([("F", m) for m in range(num_microbatches)], self.model, self.grid, inputs,
                             targets, self.boundary, [0] * num_microbatches)
        total *= self.grid.tp_rank == 0                         # tensor neighbours have the same
        all_reduce(total, self.grid.group("world")).wait()
        self.model.train()
        return total.item() / (count * self.cfg.seq_len)

    def save(self) -> None:
        """Gather on rank 0, where a thread writes it while training goes on."""
        started, row = time.perf_counter(), dict(self.row)
        began, *files = self.monitor.files
        files = [f for f in files if f[0] < self.step]
        files.append([self.step, checkpoint.step_file(Path(), self.step).name])
        self.monitor.files = [began, *files[-self.config.keep:]]
        whole = checkpoint.gather_full_state(self.flat, self.cfg, self.grid, checkpoint.STATE.values())
        if whole is not None:                   # on rank 0
            self.writer.submit(dict(
                format=3, **{name: getattr(self, name) for name in COUNTERS}, row=row,
                config=dataclasses.asdict(self.config), model=dataclasses.asdict(self.cfg),
                tokenizer=self.train_data.meta["tokenizer"],
                data=self.train_data.meta["fingerprint"], scaler=self.scaler.state_dict(),
                monitor=dataclasses.asdict(self.monitor),
                **{key: whole[name] for key, name in checkpoint.STATE.items()}))
        self.row["save_seconds"] = round(time.perf_counter() - started, 4)

    def report(self, row: dict, seconds: float) -> None:
        """One console line a step."""
        if self.grid.rank != 0:
            return
        line = (f"step {row['step']:>{len(str(self.config.steps))}}/{self.config.steps}  "
                f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.3f}  "
                f"{row['tokens_per_second']:,.0f} tok/s")
        if self.config.dtype == "fp16":
            line += f"  scale {row['loss_scale']:g}"
        if self.device.type == "cuda" and self.precision.param_dtype.itemsize == 2:
            name = torch.cuda.get_device_name(self.device)
            peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
            if peak is not None:
                used = row["tokens_per_second"] * flops_per_token(self.cfg)
                line += f"  MFU {used / (self.grid.world * peak):.1%}"
        line += f"  left {clock_time((self.config.steps - row['step']) * seconds)}"
        if row["skipped"]:
            line += "  skipped: a gradient is not finite"
        if "val_loss" in row:
            line += "\n" + self.describe(row["val_loss"])
        print_rank0(line)

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


def rendezvous(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store through which this start's ranks find each other. torchrun's own outlives a restart
    of the group, with the addresses of dead processes in it (pytorch issue 135712), and its count
    of restarts differs between machines. So rank 0 tells whom it has met until each answers that it
    was the one, not an earlier process of its rank; a name it made up is their prefix."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"rank {rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            met = [store.get(f"rank {r}").decode() for r in range(world)]
            store.set("met", json.dumps(met))
            answers = [f"{own} {name}" for name in met[1:]]
            done = not answers or store.check(answers)
        else:
            met = json.loads(store.get("met"))
            done = len(met) == world and met[rank] == own
            if done:
                store.set(f"{met[0]} {own}", "")
        if done:
            return dist.PrefixStore(met[0], store)
        time.sleep(0.02)
    raise RuntimeError(f"no answer in {timeout.total_seconds():.0f} s")


def files_to_resume(config: Config, given: dict, restarted: bool) -> list[Path]:
    """The checkpoints to go on from, best first; none for a fresh run. A run that torchrun starts
    again goes on with what it wrote itself, whatever it was to begin with."""
    found = checkpoint.list_checkpoints(Path(config.out))
    if config.resume in ("auto", "never"):
        if found and config.resume == "never" and not restarted:
            raise ValueError(f"--resume never, but {config.out} holds {found[0].name}: give "
                             f"another --out")
        return found
    own = []
    for path in found if restarted else []:
        with suppress(checkpoint.CorruptCheckpoint):
            stored = checkpoint.load(path)["config"]
            own += [path] * all(stored.get(name) == value for name, value in given.items())
    return [*own, Path(config.resume)]


def choose_checkpoint(files: list) -> tuple[Path | None, list[dict]]:
    """The first of the files that is whole by its CRCs, and an event for each passed over. Rank 0's
    business, because it reads whole files."""
    events = []

    def passed_over(path, error):
        events.append(dict(event="damaged", path=str(path), reason=str(error)))
        print(f"train.py: warning: {error}; passed over", file=sys.stderr, flush=True)

    return checkpoint.latest_valid(files, passed_over), events


def start_branch(state: dict, path: Path, own_lr: bool) -> None:
    """A file given by hand is where a branch of the run begins: healthy, with no rollbacks yet, and
    without earlier corrections of a learning rate that is given too."""
    lasting = checkpoint.step_file(path.parent, state["step"])      # latest.pt will be another
    path = lasting if path.name == "latest.pt" and lasting.exists() else path
    state["monitor"].update(files=[[state["step"], str(path.resolve())]], rollbacks=0, last_rollback_step=-1)
    if own_lr:
        state["monitor"]["lr_factor"] = 1.0
    with suppress(OSError):
        os.utime(path)          # newer than what the branch that is left has written since


def validate(given: dict, state: dict | None, world: int):
    """Flags and checkpoint -> config, model shape, datasets. Raises ValueError or OSError for
    whatever cannot run, without communication."""
    config, shape = merge_config(given, state)
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


def print_summary(run: Run) -> None:
    """What is about to run, in a few lines."""
    config, cfg, grid, train_data = run.config, run.cfg, run.grid, run.train_data
    epochs = config.steps * config.batch_size / train_data.n_windows
    print_rank0(f"model    {parameter_count(cfg):,} parameters: {cfg.n_layer} layers, {cfg.n_head} heads, "
        f"width {cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size}; "
        f"{flops_per_token(cfg):.3g} FLOPs a token")
    options = [f"zero {config.zero}", *[config.pp_schedule] * (grid.pp > 1),
               *(name for name in ("recompute", "sequence_parallel", "offload", "compile")
                 if getattr(config, name))]
    print_rank0(f"layout   dp {grid.dp} x pp {grid.pp} x tp {grid.tp}, {config.dtype}, "
        + ", ".join(options).replace("_", " "))
    memory = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in run.flat.memory().items())
    memory += " (the last in host memory)" if config.offload else ""
    activations = activation_bytes(cfg, grid, run.schedule, config.micro_batch,
                                   run.boundary.itemsize, config.recompute)
    print_rank0(f"memory   {memory}, activations about {activations / 1e6:,.1f} MB (rank 0)")
    print_rank0(f"batch    {config.batch_size} sequences = dp {grid.dp} x {run.num_microbatches} microbatches x "
        f"{config.micro_batch} sequences; {config.batch_size * cfg.seq_len:,} tokens a step")
    print_rank0(f"data     {train_data.n_tokens:,} tokens in {config.data}; {config.steps} steps read "
        f"{epochs:.2f} epochs")


def start(run: Run, state: dict | None, path: Path | None, events: list[dict],
          given: dict) -> None:
    """Evaluate, or tell how the run begins and train; `state` is that of the checkpoint at `path`,
    without its tensors."""
    config, rank = run.config, run.grid.rank
    if config.eval_only:
        val_loss = run.evaluate()
        if rank == 0:
            print_rank0(f"{path}, step {run.step}: {run.describe(val_loss)}")
        return
    metrics = all_ranks(lambda: Metrics(Path(config.out), rank))
    stop = StopSignal(rank)
    settings = dataclasses.asdict(config)
    if state is None:
        metrics.write(event="start", step=0, config=settings)
    elif run.row:
        # A kill between the checkpoint and its row, or in the evaluation, has left a gap. (A row of
        # the same step may also be of another branch, that ended in a rollback: its speed differs.)
        written = on_rank0(lambda: metrics.last_row(run.step))
        mine = written.get("tokens_per_second") == run.row["tokens_per_second"]
        row = written if mine else run.row
        if "val_loss" not in row and (run.step == config.steps
                                      or is_due(run.step, config.eval_every)):
            row = {**row, "val_loss": run.evaluate()}
        if row != written:
            metrics.write(**row)
    if run.step >= config.steps:
        if rank == 0:
            print_rank0(f"{path} is step {run.step} of {config.steps}: nothing left to do; raise --steps "
                f"to go on, or give another --out")
        return
    if state is not None:
        changed = {f.name: [state["config"].get(f.name), settings[f.name]]
                   for f in dataclasses.fields(Config) if not f.metadata["local"]
                   and state["config"].get(f.name) != settings[f.name]}
        for event in [*events, dict(event="resume", path=str(path), given=given, changed=changed,
                                    lr_factor=run.monitor.lr_factor, config=settings)]:
            metrics.write(**event, step=run.step)
    if rank == 0:
        print_summary(run)
        if state is not None:
            differs = "".join(f", {name.replace('_', ' ')} {now} instead of {before}"
                              for name, (before, now) in changed.items())
            cut = f", learning rate x {run.monitor.lr_factor:.3g}" * (run.monitor.lr_factor != 1)
            print_rank0(f"resume   {path}, after step {run.step}{differs}{cut}")
        if "skip_steps" in given and step_range(config.skip_steps)[1] <= run.step:
            print_rank0(f"skip     the steps {config.skip_steps} lie behind: there is nothing to skip")
    run.train(metrics, stop)


def work(config: Config, given: dict, files: list, job, device, rank: int, world: int) -> None:
    """From here on all ranks go together: choose a checkpoint, check the data, run."""
    state, path, events = None, None, []
    files = all_gather_object(files)[0]
    if files:
        if files == [Path(config.resume)]:              # the user's choice, with no other to take
            on_rank0(lambda: checkpoint.must_be_whole(files[0]))
        path, events = on_rank0(lambda: choose_checkpoint(files))
        state = all_ranks(lambda: checkpoint.load(path))
        if path == Path(config.resume) and not config.eval_only:
            start_branch(state, path, "lr" in given)
        job = all_ranks(lambda: validate(given, state, world))
    config, cfg, train_data, val_data = job
    assert_equal_across_ranks([dataset.meta["fingerprint"] for dataset in (train_data, val_data)],
          f"the ranks find different data in {config.data}: copy it anew")
    for dataset in (train_data, val_data):
        all_ranks(lambda: dataset.check(rank, world))

    grid = make_grid(world, config.tp, config.pp, rank, config.sequence_parallel,
                     timedelta(seconds=config.timeout))
    try:
        run = Run(config, cfg, grid, device, train_data, val_data, state)
        for name in checkpoint.STATE if state else ():
            del state[name]                             # the file is mapped no longer
        try:
            start(run, state, path, events, given)
        except PeerError as error:
            raise PeerError(f"stage {grid.stage}, step {run.step}: {error}") from error
        finally:
            run.writer.wait()   # while `out` is still locked
    finally:
        grid.groups.clear()     # threads of gloo that outlive main can abort the process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)        # until there is something to save
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    job = None
    try:                            # what can be judged alone is, before any communication
        given = parse(sys.argv[1:])
        config = Config(**given)
        device = pick_device(config.device, local_rank)
        files = files_to_resume(config, given, restarted)
        if not files and config.eval_only:
            raise ValueError(f"--eval-only, but {config.out} holds no checkpoint")
        with suppress(checkpoint.CorruptCheckpoint):      # which is told below, or passed over
            try:
                job = validate(given, checkpoint.load(files[0]) if files else None, world)
            except ValueError:
                if files:
                    checkpoint.verify(files[0])     # CorruptCheckpoint: then it is not the user's mistake
                raise
    except (ValueError, OSError) as error:
        give_up(error, rank)

    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if world > 1:
            timeout = timedelta(seconds=config.timeout)
            with comm_errors("start of the process group"):
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                        store=rendezvous(rank, world, timeout), rank=rank,
                                        world_size=world, timeout=timeout)
        with nullcontext() if config.eval_only else lock_output_dir(Path(config.out), rank):
            work(config, given, files, job, device, rank, world)
    except PeerError as error:
        # Without the others there is nothing to save, and no orderly way out.
        print(f"train.py: rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
