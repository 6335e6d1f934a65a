"""Training entry point: flags, the training loop, evaluation, saving, logging, start-up.

    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp = 8 / (tp pp) = 2

`plain_train` is the training loop in its plainest form; a test compares it with `Run.train`, the
loop in use, which adds:

    prefetched microbatches                         train.py     Run.load_microbatches, prefetch
    layers and loss sharded by tensor parallelism   parallel.py  section 2
    forward and backward of a pipeline's stages     parallel.py  section 3: run_schedule
    gradient all-reduce, ZeRO, AdamW                parallel.py  section 4: FlatParameters
    statistics on which all ranks agree             train.py     Run.reduce_stats
    loss scaling, recovery from divergence          amp.py       LossScaler, DivergenceMonitor
    checkpoints, metrics.jsonl                      checkpoint.py  Writer, Metrics

Resuming is exact: on the CPU, in the same layout, the result is bit-identical to that of an
uninterrupted run. Flags come from the command line, then the checkpoint, then the defaults; layout,
precision and paths are not restored.

Exit status: 0 done; 1 the run failed; 2 usage error, reported in one line. A run that has saved
after a signal exits with 0 under torchrun, and by that signal without.
"""
import signal

if __name__ == "__main__":      # until training starts, Ctrl-C exits immediately
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import importlib.util
import math
import os
import platform
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import checkpoint
from amp import (BAD_STEPS, LEAD_IN, MAX_SKIPPED, PRECISIONS, Divergence, DivergenceMonitor,
                 StepStats, clip_factor, make_scaler)
from data import Parser, Source, TokenDataset
from model import (GPT, IGNORE_INDEX, PEAK_LR, SIZES, GPTConfig, derive_seed, flops_per_token,
                   multiplies_in_fp32, parameter_count, peak_flops)
from parallel import (SCHEDULES, FlatParameters, Grid, PeerError, RunError, StopSignal, Work,
                      all_gather_object, all_ranks, all_reduce, assert_equal_across_ranks,
                      assert_own_gpu, build_stage, check_grid, check_layout, check_memory,
                      fatal_message, gather_before_use, make_grid, make_schedule, on_hosts,
                      on_rank0, param_specs, pick_device, print_rank0, process_group, run_schedule,
                      state_bytes, to_host, wrap_model)


# ---------------------------------------------------------------------------------------------
# The plain form
# ---------------------------------------------------------------------------------------------


def plain_train(config, model: GPT, data: TokenDataset) -> list[tuple[float, float]]:
    """Train on the CPU with PyTorch's own AdamW. Returns (loss, gradient norm) of each step.
    (`config.clip` must be above 0; a ramp of the batch and skipped steps are ignored.)"""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]           # biases, LayerNorm
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=config.weight_decay),
         dict(params=vectors, weight_decay=0.0)], betas=(config.beta1, config.beta2))
    history = []
    for step in range(1, config.steps + 1):
        first = (step - 1) * config.batch_size                          # position in the data
        windows = data.sample_indices(config.seed, first, config.batch_size)
        tokens = torch.from_numpy(data.windows(windows))                # (B, T + 1)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]                 # (B, T) each

        optimizer.zero_grad()
        loss = model(inputs, targets) / targets.numel()     # the model returns the sum over tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------


def flag(default, help, low=None, below=None, choices=None, group=None, form=None):
    """A field of Config. low <= x < below is the valid range; `group` begins a section of --help,
    `form` is the value's placeholder there (if there are choices: {A,B})."""
    if choices and form is None:
        form = "{" + ",".join(map(str, choices)) + "}"
    return dataclasses.field(default=default, metadata=dict(
        help=help, low=low, below=below, choices=choices, group=group, form=form))


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag with its default; the field n_layer is the flag --n-layer."""
    data: str = flag("data/python", "directory of token shards, or a mixture: A=0.7,B=0.3",
                     group="paths", form="DIR")
    out: str = flag("out", "directory of the run: checkpoints and metrics.jsonl", form="DIR")
    log: str = flag(None, "also log to tensorboard, wandb, or tensorboard,wandb", form="NAMES",
                    choices=["tensorboard", "wandb", "tensorboard,wandb", "wandb,tensorboard"])
    model: str = flag("nano", "named size: " + ", ".join(SIZES), choices=list(SIZES), group="model",
                      form="NAME")
    n_layer: int = flag(None, "blocks (this and the next four override --model)", low=1)
    n_head: int = flag(None, "attention heads", low=1)
    n_embd: int = flag(None, "channels", low=1)
    seq_len: int = flag(None, "context length, in tokens", low=1)
    activation: str = flag(None, "activation of the MLP", choices=["gelu", "relu"])
    dropout: float = flag(0.0, "probability on embeddings, attention, residuals", low=0, below=1)
    batch_size: int = flag(16, "global batch size: sequences per step", low=1, group="optimization")
    batch_ramp: str = flag(None, "ramp the batch from START to --batch-size in INCREMENTs over "
                           "SEQUENCES; none: no ramp", form="START:INCREMENT:SEQUENCES")
    steps: int = flag(800, "steps of the whole run", low=1)
    epochs: int = flag(None, "train for N epochs, instead of --steps", low=1)
    lr: float = flag(None, "peak learning rate (default: the published one of --model, 4e-3 for "
                     "nano)", low=0)
    min_lr_ratio: float = flag(0.1, "final learning rate / peak; 1: constant", low=0)
    warmup_steps: int = flag(50, "steps of linear warm-up", low=0)
    lr_schedule: str = flag("cosine", "decay of the learning rate", choices=["cosine", "linear"])
    weight_decay: float = flag(0.1, "AdamW weight decay, on matrices only", low=0)
    beta1: float = flag(0.9, "AdamW beta1: decay rate of the mean of gradients", low=0, below=1)
    beta2: float = flag(0.95, "AdamW beta2: the same of their squares", low=0, below=1)
    clip: float = flag(1.0, "maximum global gradient norm; 0: no clipping", low=0)
    seed: int = flag(1337, "random seed of initial weights, data order and dropout", low=0)
    tp: int = flag(1, "tensor-parallel ranks", low=1, group="layout")
    pp: int = flag(1, "pipeline stages", low=1)
    pp_schedule: str = flag("gpipe", "order of the microbatches in the pipeline",
                            choices=list(SCHEDULES))
    pp_chunks: int = flag(1, "interleaved: parts of the model on each stage", low=1)
    device: str = flag("auto", "auto: cuda, or mps for one process, where available",
                       choices=["auto", "cpu", "cuda", "mps"])
    compile: bool = flag(False, "torch.compile the blocks; communication and dropout run eagerly")
    timeout: int = flag(600, "seconds a step waits for another rank (on GPUs for all of it)", low=1)
    micro_batch: int = flag(None, "sequences per microbatch (default: the largest, up to 4, or 16 "
                            "on CUDA without --pp, that gives a multiple of pp microbatches)",
                            low=1, group="memory")
    zero: int = flag(0, "ZeRO stage: shard optimizer state (1), also gradients (2), also "
                     "parameters (3)", choices=[0, 1, 2, 3])
    recompute: bool = flag(False, "recompute the activations of a block in backward")
    sequence_parallel: bool = flag(False, "shard activations along the sequence outside the "
                                   "tensor-parallel layers")
    offload: bool = flag(False, "keep the optimizer state in host memory and run AdamW on the CPU")
    dtype: str = flag("fp32", "type of parameters and activations",
                      choices=list(PRECISIONS), group="precision")
    save_every: int = flag(200, "steps between checkpoints; 0: only the last", low=0,
                           group="checkpoints, evaluation, logging")
    keep: int = flag(3, "step files kept", low=1)
    resume: str = flag("auto", "auto: from the newest whole checkpoint of --out; never: --out must "
                       "be new; FILE: branch from it into a new --out", form="{auto,never,FILE}")
    init_from: str = flag(None, "start a new run from the weights of this checkpoint", form="FILE")
    eval_every: int = flag(200, "steps between evaluations; 0: only the last", low=0)
    eval_tokens: int = flag(None, "validation tokens per evaluation and source (default: 128 "
                            "sequences; all with --eval-only)", low=1)
    eval_only: bool = flag(False, "evaluate the checkpoint, then exit")
    log_every: int = flag(1, "steps between lines on the console", low=1)
    rollback: str = flag("on", "after a divergence go back, skip batches, reduce the learning rate",
                         choices=["on", "off"], group="stability")
    max_rollbacks: int = flag(5, "rollbacks of the whole run before it fails", low=0)
    skip_steps: str = flag(None, "skip the batches of steps A to B, inclusive; none: skip nothing",
                           form="A:B")


SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "activation")
# These flags apply to one launch and are not restored from a checkpoint; all others are. (--epochs
# is stored as the resulting --steps.)
LOCAL = {"data", "out", "log", "resume", "init_from", "eval_only", "eval_tokens", "log_every", "tp",
         "pp", "pp_schedule", "pp_chunks", "device", "compile", "timeout", "micro_batch", "zero",
         "recompute", "sequence_parallel", "offload", "dtype", "epochs"}
RESTORED = [f.name for f in dataclasses.fields(Config) if f.name not in LOCAL]
# Losses under different values of these flags are not compared (`losses_stay_comparable`).
FLAGS_THAT_CHANGE_THE_LOSS = (
    "dropout", "batch_size", "batch_ramp", "steps", "lr", "min_lr_ratio", "warmup_steps",
    "lr_schedule", "weight_decay", "beta1", "beta2", "clip", "dtype")


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The batch of one step."""
    step: int
    first: int              # run-wide index of its first sequence
    windows: np.ndarray     # (B,) indices of windows of the dataset
    microbatches: list      # of this replica: (tokens (b, T), targets (b, T), dropout seed)

    @property
    def size(self) -> int:
        return len(self.windows)


class Run:
    """A training run on this rank. `self.step` counts completed steps; the body of the loop runs
    step `self.step + 1`."""

    def __init__(self, config: Config, cfg: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None,
                 identity: dict | None = None):
        """`state` is a loaded checkpoint, or None for a run that begins at step 0; `identity` is
        the run's id and origin (checkpoint.new_run)."""
        self.config, self.cfg, self.grid, self.device = config, cfg, grid, device
        self.train_data, self.val_data = train_data, val_data
        self.identity = identity or checkpoint.new_run("seed")
        self.metrics = None                     # checkpoint.Metrics, for `train`
        self.prefetched = None                  # the batch of the next step
        self.recent_seconds = deque(maxlen=20)
        self.busy = None            # seconds computed, at the last comparison of ranks

        param_dtype, master_dtype = PRECISIONS[config.dtype]
        host = "cpu" if config.offload else device
        # pp and tp: only this stage's blocks, with this rank's slice of each matrix.
        self.model = build_stage(cfg, grid)
        # dp and ZeRO: parameters become views into flat buffers, which also hold AdamW's state.
        self.flat = FlatParameters(param_specs(self.model, cfg, grid), grid, param_dtype,
                                   master_dtype, device, config.zero, host,
                                   training=not config.eval_only)
        self.writer = checkpoint.Writer(Path(config.out), config.keep, cfg, self.flat,
                                        config.timeout)
        wrap_model(self.model, config.recompute, config.compile)
        if config.zero > 0:                     # each block gathers, or awaits, its parameters
            gather_before_use(self.model, self.flat)
        # Shape and dtype of the activations that one stage sends to the next.
        positions = cfg.seq_len
        if grid.sequence_parallel:
            positions //= grid.tp
        self.activation_like = torch.empty(config.micro_batch, positions, cfg.n_embd,
                                           dtype=param_dtype, device=device)
        self.restore(state)                     # step, position in the data, scaler, monitor

    def train(self, stop: StopSignal) -> None:
        """Train up to --steps, or until `stop.requested`."""
        config = self.config
        self.model.train()
        while self.step < config.steps:
            started = time.perf_counter()
            self.skip_excluded()                            # by --skip-steps or a rollback
            batch = self.next_batch()
            lr = learning_rate(config, self.step + 1) * self.monitor.lr_factor

            loss_sum = self.forward_backward(batch)         # gradients, summed over the replicas
            self.prefetch()                                 # reads ahead while a GPU computes
            stats = self.reduce_stats(loss_sum, batch, stop.requested)      # all ranks agree

            divergence = self.monitor.observe(batch.first, stats)
            roll_back = divergence is not None and config.rollback == "on"
            if not roll_back and not stats.found_inf:       # on overflow, skip only the update
                self.update_parameters(stats, lr)           # unscale, clip, AdamW
            self.scaler.update(stats.found_inf)

            row = self.metrics_row(batch, stats, lr, time.perf_counter() - started)
            self.report(row, batch, stats, loss_sum, divergence)
            if roll_back:
                self.log_step(row)
                self.rollback(divergence)                   # sets self.step back
                continue

            self.step += 1
            done = self.step == config.steps
            stopping = stats.stop_requested and not done
            if done or (self.is_due(config.eval_every) and not stopping):
                row |= self.evaluate()
            self.log_step(row)
            hopeless = self.monitor.skipped >= MAX_SKIPPED and not stats.scale_can_fall
            if hopeless and config.rollback == "off":
                self.fail(self.step, f"{MAX_SKIPPED} steps in a row were not finite")
            if done or stopping or self.is_due(config.save_every):
                self.save()
            if stopping:
                break
        self.finish()

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    # ---- the phases of a step

    def next_batch(self) -> Batch:
        """The batch of this step. Advances the position in the data past it."""
        batch = self.prefetched
        if batch is None or (batch.step, batch.first) != (self.step + 1, self.consumed_samples):
            batch = self.load_batch(self.step + 1, self.consumed_samples)
        self.advance(self.consumed_samples + batch.size)
        self.samples += batch.size
        return batch

    def advance(self, position: int) -> None:
        """Move to another position in the data. If the mixture of sources changes before it, forget
        the recent losses: they are not comparable."""
        if self.train_data.phase_begins(self.consumed_samples, position):
            self.monitor.forget_losses()
        self.consumed_samples = position

    def prefetch(self) -> None:
        """Load the batch of the step after this one, unless this step is the last. (`next_batch`
        discards it if a rollback or `skip_excluded` has moved the position.)"""
        if self.step + 1 < self.config.steps:
            self.prefetched = self.load_batch(self.step + 2, self.consumed_samples)

    def load_batch(self, step: int, first: int) -> Batch:
        """The batch of step `step`, the next one, from sequence `first` on."""
        size = batch_size_at(self.config, self.samples)
        windows = self.train_data.sample_indices(self.config.seed, first, size)
        return Batch(step, first, windows, self.load_microbatches(self.train_data, windows, step))

    def load_microbatches(self, dataset: TokenDataset, windows: np.ndarray, step: int) -> list:
        """This replica's microbatches of a batch of windows (B,): (tokens (b, T), targets (b, T),
        dropout seed) each; None for tokens and targets on middle stages. An evaluation pads the
        last batch with window -1, whose targets are ignored."""
        grid, size = self.grid, self.config.micro_batch
        # Ranks that hold different rows, or positions (sequence parallelism), need different masks.
        mask_owner = [grid.dp_rank]
        if grid.sequence_parallel:
            mask_owner.append(grid.tp_rank)
        microbatches = []
        for m in range(len(windows) // (grid.dp * size)):
            first_row = (m * grid.dp + grid.dp_rank) * size     # interleaved over the replicas
            rows = windows[first_row:first_row + size]
            x, y = None, None
            if grid.is_first or grid.is_last:
                tokens = torch.from_numpy(dataset.windows(np.maximum(rows, 0)))     # (b, T + 1)
                x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()                # (b, T) each
                y[torch.from_numpy(rows < 0)] = IGNORE_INDEX
                if self.device.type == "cuda":
                    x, y = x.pin_memory(), y.pin_memory()
                x = x.to(self.device, non_blocking=True)
                y = y.to(self.device, non_blocking=True)
            microbatches.append((x, y, derive_seed(self.config.seed, step, m, *mask_owner)))
        return microbatches

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of all microbatches. Returns the sum of this rank's losses in nats.
        On one stage:

            for tokens, targets, dropout_seed in batch.microbatches:
                loss = model(tokens, targets, dropout_seed)
                (loss * scale).backward()
                loss_sum += loss

        Gradients are sums over tokens, microbatches and replicas. `scale` makes them the gradient
        of the mean loss over all tokens of the batch, times the loss scale.
        """
        self.flat.zero_grad()
        schedule = make_schedule(self.config.pp_schedule, self.grid, len(batch.microbatches))
        scale = self.scaler.scale / (batch.size * self.cfg.seq_len)
        loss_sum = run_schedule(schedule, self.model, self.grid, batch.microbatches,
                                self.activation_like, self.flat, scale)
        self.flat.finish_grad_sync()
        return loss_sum

    def reduce_stats(self, loss_sum: torch.Tensor, batch: Batch, stop_requested) -> StepStats:
        """Sum loss, norms and stop flag in one all-reduce, so that all ranks decide the same."""
        grid, scaler = self.grid, self.scaler
        tokens = batch.size * self.cfg.seq_len
        zero = loss_sum.new_zeros(())
        local = dict(loss=zero, activation_norm=zero, stop=zero + bool(stop_requested))
        # All tp ranks have the same loss: count it once. Their last activations are the same too,
        # unless sequence parallelism splits the positions.
        if grid.is_last and grid.tp_rank == 0:
            local["loss"] = loss_sum / tokens
        if grid.is_last and (grid.tp_rank == 0 or grid.sequence_parallel):
            local["activation_norm"] = self.model.head.norms.to(loss_sum) / tokens
        # `squares` counts each parameter once; `all_squares` counts replicas too, so it is not
        # finite if any gradient of any rank is not.
        local["squares"], local["all_squares"] = self.flat.grad_norm_squares()
        sums = all_reduce(torch.stack([*local.values()]), grid.groups["world"]).wait()
        total = dict(zip(local, self.to_floats(sums)))
        finite = math.isfinite(total["loss"]) and math.isfinite(total["all_squares"])
        return StepStats(
            total["loss"], total["activation_norm"], math.sqrt(total["squares"]) / scaler.scale,
            found_inf=not finite, stop_requested=total["stop"] > 0, loss_scale=scaler.scale,
            scale_can_fall=self.config.dtype == "fp16" and scaler.scale > scaler.min_scale)

    def to_floats(self, x: torch.Tensor):
        """Copy x to Python numbers. Waits for the device, up to --timeout if ranks may be late."""
        timeout = self.config.timeout if self.grid.world > 1 else math.inf
        return to_host(x, timeout).tolist()

    def update_parameters(self, stats: StepStats, lr: float) -> None:
        """AdamW on this rank's shard of the parameters, which is then shared with all replicas."""
        config = self.config
        self.optimizer_steps += 1
        grad_scale = clip_factor(stats.grad_norm, config.clip, stats.loss_scale)
        self.flat.step(grad_scale, self.optimizer_steps, lr, config.beta1, config.beta2,
                       config.weight_decay)

    # ---- evaluation

    def evaluate(self) -> dict:
        """The fields of an evaluation in a row of metrics.jsonl: `val_loss`, the mean over the
        sources by weight; of several sources also the loss and the epochs of each."""
        losses = {s.name: self.evaluate_source(s) for s in self.val_data.sources.values()}
        row = dict(val_loss=self.val_data.average(losses.values()))
        if len(losses) > 1:
            epochs = self.train_data.epochs(self.consumed_samples)
            row |= {f"val_loss/{name}": loss for name, loss in losses.items()}
            row |= {f"epochs/{name}": count for name, count in epochs.items()}
        return row

    @torch.no_grad()
    def evaluate_source(self, source: Source) -> float:
        """Mean loss in nats on fixed validation windows, the same in every layout."""
        self.model.eval()
        count = eval_sequences(self.config, self.cfg, source)
        at_once = self.grid.dp * self.config.micro_batch
        windows = np.full(math.ceil(count / at_once) * at_once, -1)
        evenly_spaced = np.linspace(0, source.n_windows - 1, count).astype(np.int64)
        windows[:count] = source.first + evenly_spaced
        local = 0.0
        for part in np.split(windows, range(64 * at_once, len(windows), 64 * at_once)):
            batch = self.load_microbatches(self.val_data, part, step=0)
            schedule = make_schedule("gpipe", self.grid, len(batch))
            forwards = [op for op in schedule if op[0] == "F"]
            local += run_schedule(forwards, self.model, self.grid, batch, self.activation_like)
            self.to_floats(local)       # so that --timeout is for one part
        if self.grid.tp_rank > 0:       # all tp ranks have the same loss: count it once
            local.zero_()               # (it is 0 on every stage but the last)
        total = self.to_floats(all_reduce(local, self.grid.groups["world"]).wait())
        self.model.train()
        return total / (count * self.cfg.seq_len)

    # ---- checkpoints and rollback

    def restore(self, state: dict | None) -> None:
        """Restore a checkpoint; without one, begin at step 0, from the seed or from the weights of
        --init-from."""
        self.scaler = make_scaler(self.config.dtype)
        self.monitor = DivergenceMonitor()
        if state is None:
            self.step = 0                       # the last completed step
            self.consumed_samples = 0           # position in the data, in sequences
            self.samples = 0                    # sequences trained on; skipped ones do not count
            self.optimizer_steps = 0            # updates; a skipped step counts as none
            weights = all_ranks(lambda: load_state(self.config.init_from)) or {}
            self.flat.initialize(self.cfg, self.config.seed, weights.get("parameters"))
            return
        self.step = state["step"]
        self.consumed_samples = state["consumed_samples"]
        self.samples = state["tokens"] // self.cfg.seq_len
        self.optimizer_steps = state["optimizer_steps"]
        vars(self.monitor).update(state["monitor"])     # (older checkpoints have other fields)
        if self.config.rollback == "on":        # with "off", it may be from a divergence
            self.monitor.bad = min(self.monitor.bad, BAD_STEPS - 1)
        if not losses_stay_comparable(self.config, self.train_data, state):
            self.monitor.forget_losses()
        if state["config"]["dtype"] == self.config.dtype:
            self.scaler.load_state_dict(state["scaler"])
        checkpoint.restore(state, self.flat)

    def save(self, is_start: bool = False) -> None:
        """Write a checkpoint, and record whether it is healthy. `is_start`: the run has just begun
        from a file."""
        config = self.config
        at_floor = config.dtype == "fp16" and self.scaler.scale <= self.scaler.min_scale
        scheduled = self.is_due(config.save_every) or self.step == config.steps
        file = checkpoint.step_file(Path(), self.step).name
        self.monitor.add_checkpoint(self.step, file, config.keep, scheduled, at_floor, is_start)
        self.write_checkpoint()

    def write_checkpoint(self) -> None:
        """Copy the state; threads write it while training goes on."""
        all_ranks(self.writer.wait)         # a rank holds at most one copy of its shards
        self.writer.submit(dict(
            format=checkpoint.FORMAT, run=self.identity, step=self.step,
            consumed_samples=self.consumed_samples, tokens=self.samples * self.cfg.seq_len,
            optimizer_steps=self.optimizer_steps, config=dataclasses.asdict(self.config),
            model=dataclasses.asdict(self.cfg), tokenizer=self.train_data.meta["tokenizer"],
            data=self.train_data.phases, scaler=self.scaler.state_dict(),
            monitor=dataclasses.asdict(self.monitor)))

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.flat.wait_params()             # no rank leaves before the others have its shard
        all_ranks(lambda: self.writer.wait(required=True))
        if self.step == self.config.steps:
            self.event("end", step=self.step)
            return
        command = "the same command"
        if self.config.resume == "never":
            command += " without --resume never"
        self.event("stop", f"stopped and saved after step {self.step}; run {command} to go on",
                   step=self.step)

    def rollback(self, divergence: Divergence) -> None:
        """Return to a healthy checkpoint, skip the batches that led to the divergence, and save at
        once, so that a kill does not undo the rollback."""
        config, monitor = self.config, self.monitor
        diverged_at = self.step + 1
        if monitor.rollbacks >= config.max_rollbacks:
            self.fail(diverged_at, f"{divergence.reason}, and --max-rollbacks "
                      f"{config.max_rollbacks} are used up")
        excluded, data_to_blame = monitor.to_exclude(divergence.steps, self.consumed_samples)
        first_skipped = diverged_at - divergence.steps + 1
        if not data_to_blame:
            first_skipped -= LEAD_IN
        candidates = monitor.candidates(first_skipped)
        files = [Path(config.out, name) for name in candidates] or [None]       # None: step 0

        all_ranks(self.writer.wait)                 # we may load the file being written
        path, events = on_rank0(lambda: checkpoint.latest_valid(files))
        self.restore(all_ranks(lambda: load_state(path), status=1))     # with its own monitor
        excluded[0] = max(excluded[0], self.consumed_samples)
        monitor.rolled_back(self.step, excluded, data_to_blame, restored=self.monitor)
        self.monitor = monitor
        self.busy = None
        for event in events:
            self.metrics.write(**event, step=diverged_at)
        self.event("rollback", f"rollback {monitor.rollbacks} of at most {config.max_rollbacks}: "
                   f"back to step {self.step}, learning rate x {monitor.lr_factor:.3g} from now on",
                   reason=divergence.reason, to=self.step, sequences=excluded,
                   lr_factor=monitor.lr_factor, rollbacks=monitor.rollbacks, step=diverged_at)
        self.write_checkpoint()
        all_ranks(lambda: self.writer.wait(required=True))

    def skip_excluded(self) -> None:
        """Advance past the excluded samples that the next batch would contain: those of
        --skip-steps and those of rollbacks."""
        monitor, skip = self.monitor, self.config.skip_steps
        start = self.consumed_samples
        size = batch_size_at(self.config, self.samples)
        if skip is not None and monitor.applied_skip != skip:
            first, last = step_range(skip)
            if first <= self.step + 1 <= last:
                monitor.applied_skip = skip
                samples = samples_after(self.config, self.samples, last - self.step)
                end = start + samples - self.samples
                monitor.excluded.insert(0, [start, end])        # rollbacks append theirs
        position = start
        for first, end in sorted(monitor.excluded):
            if first < position + size and position < end:
                position = end
        if position > start:
            self.event("skip", f"skip     sequences {start:,} to {position - 1:,} are left out",
                       step=self.step + 1, reason="left out", sequences=[start, position])
            self.advance(position)

    def fail(self, step: int, reason: str) -> None:
        """Stop a run that cannot recover from its divergence."""
        self.event("stop", step=step, reason=reason)
        raise RunError(f"step {step}: {reason}; the run has diverged: see the events in "
                       f"{self.config.out}/metrics.jsonl, and go on from an older checkpoint with "
                       f"a lower --lr, a tighter --clip or --skip-steps")

    # ---- logging

    def event(self, kind: str, line: str | None = None, **fields) -> None:
        """Write an event to metrics.jsonl and, if there is one, its line to the console."""
        self.metrics.write(event=kind, **fields)
        if line is not None:
            print_rank0(line)

    def metrics_row(self, batch: Batch, stats: StepStats, lr: float, seconds: float) -> dict:
        """The row of the step in progress in metrics.jsonl."""
        self.recent_seconds.append(seconds)
        tokens = self.samples * self.cfg.seq_len
        return dict(step=self.step + 1, tokens=tokens, loss=stats.loss, lr=lr,
                    batch_size=batch.size, grad_norm=stats.grad_norm, loss_scale=stats.loss_scale,
                    skipped=self.monitor.skipped, activation_norm=stats.activation_norm,
                    tokens_per_second=round(batch.size * self.cfg.seq_len / seconds, 1))

    def report(self, row: dict, batch: Batch, stats: StepStats, loss_sum: torch.Tensor,
               divergence: Divergence | None) -> None:
        """Write events for a step that is not finite, or diverged. TokenDataset.windows rebuilds
        the batch, or the last batches, from the windows in the event."""
        seen = {name: row[name] for name in ("step", "loss", "grad_norm", "loss_scale")}
        if stats.found_inf:
            where = locate_nonfinite(loss_sum.item(), self.flat)
            self.event("skip", reason="not finite", **seen, **where, windows=batch.windows.tolist())
        if divergence is not None:
            windows = []
            starts = self.monitor.starts[-LEAD_IN - BAD_STEPS:]
            for first, following in zip(starts, [*starts[1:], self.consumed_samples]):
                size = min(batch.size, following - first)   # skipped batches leave a gap
                windows += self.train_data.sample_indices(self.config.seed, first, size).tolist()
            self.event("spike", f"diverged: {divergence.reason}", reason=divergence.reason,
                       limit=self.monitor.limit(), windows=windows, **seen)

    def log_step(self, row: dict) -> None:
        """Write the step's row to metrics.jsonl and its line to the console."""
        self.metrics.write(**row)
        last = row["step"] == self.config.steps
        if row["step"] % self.config.log_every == 0 or last or "val_loss" in row:
            print_rank0(format_step(self, row, statistics.median_low(self.recent_seconds)))
        if "val_loss" in row:
            print_rank0(format_eval(row, self))
        # On GPUs, where waits are asynchronous, a process's time does not show slow ranks.
        on_cpus = self.grid.world > 1 and self.device.type == "cpu"
        if row["step"] % COMPARE_RANKS_EVERY == 0 and on_cpus:
            busy = time.perf_counter() - Work.seconds_waited
            if self.busy is not None:
                note_slow_ranks(self.grid, busy - self.busy)
            self.busy = busy


COMPARE_RANKS_EVERY = 100       # steps


def note_slow_ranks(grid: Grid, own_seconds: float) -> None:
    """Name the ranks that computed for longer than the median of their pipeline stage: their
    machines may be slow or busy. Every rank calls it with its own seconds."""
    seconds = all_gather_object(own_seconds)
    for ranks in grid.ranks.transpose(0, 1).flatten(1).tolist():        # of each stage
        median = statistics.median_low(seconds[rank] for rank in ranks)
        for rank in ranks:
            if seconds[rank] > 1.5 * median:
                print_rank0(f"note     rank {rank}{on_hosts([rank], grid.hosts)} is slow: it "
                            f"computed for {seconds[rank]:.1f} s in the last {COMPARE_RANKS_EVERY} "
                            f"steps, the median of its stage for {median:.1f} s")


def locate_nonfinite(local_loss: float, flat: FlatParameters) -> dict:
    """Find where a number is not finite; every rank must call it. Reports the first rank with a
    non-finite loss or, if there is none, with a non-finite gradient, and its last parameter with
    one, which backward reaches first. Gradients have already been summed over the replicas, so
    another replica may be the source. If all numbers are finite but their squares are not, `what`
    is "norm"."""
    parameter = None
    for bucket in flat.buckets:
        for spec, shard_slice, _ in bucket.shard_ranges:
            if not bucket.shard["grad"][shard_slice].isfinite().all():
                parameter = spec.name
    found = all_gather_object((local_loss, parameter))
    for rank, (loss, name) in enumerate(found):
        if not math.isfinite(loss):
            return dict(what="loss", rank=rank, parameter=name)
    for rank, (_, name) in enumerate(found):
        if name is not None:
            return dict(what="gradient", rank=rank, parameter=name)
    return dict(what="norm", rank=None, parameter=None)


# ---------------------------------------------------------------------------------------------
# Learning rate and batch size
# ---------------------------------------------------------------------------------------------


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `lr` at step warmup_steps, then decay to lr * min_lr_ratio at the last."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def batch_sizes(config: Config) -> tuple[range, int]:
    """The batch sizes of the ramp, and its length; both in sequences.
    --batch-ramp is Megatron-LM's --rampup-batch-size (GPT-3: Brown et al. 2020, section 2.3)."""
    if config.batch_ramp is None:
        return range(config.batch_size, config.batch_size + 1), 1
    start, increment, sequences = map(int, config.batch_ramp.split(":"))
    return range(start, config.batch_size + 1, increment), sequences


def batch_size_at(config: Config, samples: int) -> int:
    """Size of the next batch after training on `samples` sequences."""
    sizes, sequences = batch_sizes(config)
    return sizes[min(samples, sequences) * (len(sizes) - 1) // sequences]


def samples_after(config: Config, samples: int, steps: int) -> int:
    """Sequences trained on after `steps` more steps."""
    for _ in range(steps):
        samples += batch_size_at(config, samples)
    return samples


def steps_of_epochs(config: Config, data: TokenDataset, state: dict | None) -> int:
    """The steps of a run that trains on the data --epochs times."""
    step, samples = 0, 0
    if state is not None:
        step = state["step"]
        samples = state["tokens"] // state["model"]["seq_len"]
    epoch = sum(source.n_windows for source in data.sources.values() if source.weight > 0)
    while samples < config.epochs * epoch:
        samples += batch_size_at(config, samples)
        step += 1
    return step


def losses_stay_comparable(config: Config, data: TokenDataset, state: dict) -> bool:
    """Whether losses from before a resume or a rollback can be compared with later ones: only under
    the same flags. Exception: if the peak learning rate has more than tripled, probably by mistake,
    the old losses stay: they are the only evidence of it."""
    stored = state["config"]
    if config.lr > 3 * stored["lr"]:
        return True
    same_flags = all(stored[name] == getattr(config, name) for name in FLAGS_THAT_CHANGE_THE_LOSS)
    return same_flags and state["data"][-1][1] == data.phases[-1][1]


# ---------------------------------------------------------------------------------------------
# The console
# ---------------------------------------------------------------------------------------------


def eval_sequences(config: Config, cfg: GPTConfig, source: Source) -> int:
    """Number of validation sequences that an evaluation reads of a source."""
    if config.eval_tokens is not None:
        return min(source.n_windows, math.ceil(config.eval_tokens / cfg.seq_len))
    return source.n_windows if config.eval_only else min(source.n_windows, 128)


def format_step(run: Run, row: dict, seconds: float) -> str:
    """The console's line of a step; `seconds` is the time of a step."""
    config = run.config
    line = (f"step {row['step']:>{len(str(config.steps))}}/{config.steps}  "
            f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.3f}  "
            f"act {row['activation_norm']:.2f}  {row['tokens_per_second']:,.0f} tok/s")
    if config.batch_ramp is not None:
        line += f"  batch {row['batch_size']}"
    if config.dtype == "fp16":
        line += f"  scale {row['loss_scale']:g}"
    if run.device.type == "cuda" and config.dtype in ("bf16", "fp16"):
        peak = run.grid.world * peak_flops(torch.cuda.get_device_name(run.device))
        if peak > 0:
            line += f"  MFU {row['tokens_per_second'] * flops_per_token(run.cfg) / peak:.1%}"
    line += f"  left {timedelta(seconds=round((config.steps - row['step']) * seconds))}"
    if row["skipped"] > 0:
        line += "  skipped: loss or gradient not finite"
    return line


def format_eval(row: dict, run: Run) -> str:
    """The validation loss in three units, and a line for each of several sources."""
    def line(name, loss, bytes_per_token):
        perplexity = math.exp(loss) if loss < 700 else math.inf
        uniform = math.log(run.cfg.vocab_size)
        text = f"{name}: {loss:.4f} nats a token"
        if loss > uniform:
            text += f" (a uniform guess: {uniform:.4f})"
        text += f", perplexity {perplexity:{'.2f' if perplexity < 1e4 else '.3g'}}"
        if bytes_per_token:
            text += f", {loss / math.log(2) / bytes_per_token:.4f} bits a byte"
        return text

    dataset = run.val_data
    sources = dataset.sources.values()
    count = sum(eval_sequences(run.config, run.cfg, source) for source in sources)
    lines = [line("validation", row["val_loss"], dataset.meta["bytes_per_token"])
             + f" (on {count * run.cfg.seq_len:,} of {dataset.n_tokens:,} tokens)"]
    if len(sources) > 1:
        for source in sources:
            lines.append(line(f"  {source.name}", row[f"val_loss/{source.name}"],
                              source.meta["bytes_per_token"]))
    return "\n".join(lines)


def print_summary(run: Run) -> None:
    """Print model, layout, memory, batch and data."""
    config, cfg, grid, data = run.config, run.cfg, run.grid, run.train_data
    device = run.device.type
    if multiplies_in_fp32(run.activation_like.dtype, run.device):
        device += f" (multiplies {config.dtype} in fp32)"
    if config.dtype == "fp32" and torch.get_float32_matmul_precision() == "high":
        device += " (multiplies fp32 in TF32)"
    layout = (f"dp {grid.dp} x pp {grid.pp} x tp {grid.tp}, {device}, {config.dtype}, "
              f"zero {config.zero}")
    if grid.pp > 1:
        layout += f", {config.pp_schedule}"
    if grid.chunks > 1:
        layout += f" in {grid.chunks} chunks"
    for name in ("recompute", "sequence_parallel", "offload", "compile"):
        if getattr(config, name):
            layout += ", " + name.replace("_", " ")
    num_microbatches = config.batch_size // (grid.dp * config.micro_batch)
    batch = (f"{config.batch_size} sequences = dp {grid.dp} x {num_microbatches} microbatches x "
             f"{config.micro_batch} sequences")
    if config.batch_ramp is not None:
        batch += f", after a ramp {config.batch_ramp}"
    sizes = [bucket.numel for bucket in run.flat.buckets]
    on_device, on_host = state_bytes(sum(sizes), max(sizes), grid.dp, PRECISIONS[config.dtype],
                                     config.zero, config.offload and run.device.type != "cpu")
    memory = [f"{kind} {size / 1e6:,.1f} MB" for kind, size in on_device.items()]
    memory += [f"host {kind} {size / 1e6:,.1f} MB" for kind, size in on_host.items()]
    ahead = samples_after(config, run.samples, config.steps - run.step) - run.samples
    end = run.consumed_samples + ahead
    epochs = [f"{count:.2f} epochs of {name}" for name, count in data.epochs(end).items()]
    print_rank0(
        f"model    {parameter_count(cfg):,} parameters: {cfg.n_layer} layers, {cfg.n_head} heads, "
        f"width {cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size}; "
        f"{flops_per_token(cfg):.3g} FLOPs a token\n"
        f"layout   {layout}{on_hosts(range(grid.world), grid.hosts)}\n"
        f"memory   {', '.join(memory)} (rank {grid.rank})\n"
        f"batch    {batch}; {config.batch_size * cfg.seq_len:,} tokens a step\n"
        f"data     {data.n_tokens:,} tokens ({data.meta['tokenizer']}) in {config.data}; "
        f"{config.steps} steps read {', '.join(epochs)}")


def print_notes(run: Run, given: dict, resumed: bool) -> None:
    """Hints on settings that are probably not what the user wants."""
    config = run.config
    many_threads = run.device.type == "cpu" and torch.get_num_threads() > 1
    if many_threads and hasattr(os, "getloadavg") and os.getloadavg()[0] > os.cpu_count():
        print_rank0("note     this machine is busy: set OMP_NUM_THREADS=1, or threads wait for "
                    "each other")
    if not resumed and not {"lr", "model"} & set(given) and parameter_count(run.cfg) > 2e7:
        print_rank0(f"note     a learning rate of {config.lr:g} suits nano: GPT-3 used 6e-4 for "
                    f"125M parameters, 2e-4 for 1.3B: give --lr")
    for ranks in run.grid.ranks.reshape(-1, run.grid.tp).tolist():
        if len({run.grid.hosts[rank] for rank in ranks}) > 1:
            print_rank0(f"note     tensor-parallel ranks {ranks} communicate most, but are"
                        f"{on_hosts(ranks, run.grid.hosts)}: --tp should divide a machine's ranks")
            break
    if config.warmup_steps > config.steps / 2:
        print_rank0(f"note     the warm-up takes {config.warmup_steps} of {config.steps} steps: "
                    f"give a smaller --warmup-steps")
    if config.skip_steps is not None and step_range(config.skip_steps)[1] <= run.step:
        print_rank0(f"skip     the steps {config.skip_steps} are done: there is nothing to skip")


# ---------------------------------------------------------------------------------------------
# Dashboards: tools/follow.py sends metrics.jsonl to them, in a process of its own
# ---------------------------------------------------------------------------------------------

FOLLOWER_SECONDS = 10           # time allowed to send the last lines
FOLLOWER = Path(__file__).resolve().with_name("tools") / "follow.py"


def check_follower(log: str) -> None:
    """Raise a ValueError if something that --log needs is missing."""
    if not FOLLOWER.exists():
        raise ValueError(f"--log {log} needs {FOLLOWER}, which is missing: drop the flag")
    for name in log.split(","):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--log {name} needs a package that is missing: pip install {name}")


@contextmanager
def follower(config: Config):
    """Run tools.follow during the block, in a process whose failure does not end the run. Its
    own session lets it send the last lines after Ctrl-C or torchrun's SIGTERM."""
    command = [sys.executable, "-m", "tools.follow", os.path.abspath(config.out),
               "--to", config.log, "--parent"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=FOLLOWER.parent.parent,
                               start_new_session=True)
    try:
        yield
    finally:
        process.stdin.close()                       # it sends the rest, then it exits
        try:
            process.wait(FOLLOWER_SECONDS)          # (it prints its own errors)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            checkpoint.warn(f"--log: tools.follow did not end in {FOLLOWER_SECONDS} seconds: "
                            f"`python -m tools.follow` sends the rest")


# ---------------------------------------------------------------------------------------------
# From the command line to a run
# ---------------------------------------------------------------------------------------------

OTHER_NAMES = {     # of our flags, in nanoGPT, picotron and Megatron-LM; README.md has more
    "steps": "max-iters train-iters", "lr": "learning-rate", "min-lr-ratio": "min-lr",
    "n-layer": "num-layers num-hidden-layers", "n-head": "num-attention-heads",
    "n-embd": "hidden-size", "zero": "use-distributed-optimizer", "batch-ramp": "rampup-batch-size",
    "tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size",
    "pp-chunks": "num-virtual-stages-per-pipeline-rank",
    "batch-size": "global-batch-size gradient-accumulation-steps grad-acc-steps",
    "micro-batch": "micro-batch-size mbs", "eval-every": "eval-interval",
    "eval-tokens": "eval-iters", "log-every": "log-interval",
    "seq-len": "block-size seq-length", "clip": "grad-clip clip-grad", "data": "dataset data-path",
    "warmup-steps": "warmup-iters lr-warmup-iters", "out": "out-dir save", "resume": "load",
    "dtype": "bf16 fp16", "recompute": "recompute-granularity", "save-every": "save-interval",
    "offload": "optimizer-cpu-offload", "init-from": "finetune"}


def add_flags(parser: Parser, names=None, kind=Config) -> None:
    """Add the fields of Config, or of these `names`, to a parser, in their groups of --help."""
    groups, heading = {}, None
    for f in dataclasses.fields(kind):
        heading = f.metadata["group"] or heading    # that of the fields after it, too
        if names is not None and f.name not in names:
            continue
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        flag_name = "--" + f.name.replace("_", "-")
        help = f.metadata["help"]
        if f.type is bool:
            groups[heading].add_argument(flag_name, action="store_true", help=help)
            continue
        if f.default is not None:
            help += f" (default {f.default})"
        metavar = f.metadata["form"] or {int: "N", float: "X", str: "NAME"}[f.type]
        groups[heading].add_argument(flag_name, type=f.type, metavar=metavar, help=help,
                                     choices=f.metadata["choices"])


def parse_given(parser: Parser, arguments, kind=Config) -> dict:
    """The flags that were given, validated one by one. The parser has `add_flags`' flags, and may
    have others; it must have `argument_default=argparse.SUPPRESS`. Raises ValueError."""
    def refuse(message):
        raise ValueError(message)
    parser.error = refuse
    given = vars(parser.parse_args(arguments))
    for f in dataclasses.fields(kind):
        value = given.get(f.name)
        low = f.metadata["low"]
        below = f.metadata["below"] or math.inf
        if value is not None and low is not None and not low <= value < below:
            limit = "finite" if below == math.inf else f"below {below}"
            refuse(f"argument --{f.name.replace('_', '-')}: {value:g} must be at least {low} and "
                   f"{limit}")
    return given


def step_range(text: str) -> tuple[int, int]:
    """"A:B" -> (A, B). Raises ValueError."""
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ValueError(f"argument --skip-steps: {text} must be A:B, steps with 1 <= A <= B")
    return int(numbers[1]), int(numbers[2])


def parse_flags(arguments) -> dict:
    """The flags of train.py that were given. Raises ValueError."""
    parser = Parser("train.py", "python train.py [FLAG ...]", "Train a GPT.", OTHER_NAMES,
                    argument_default=argparse.SUPPRESS)
    add_flags(parser)
    given = parse_given(parser, arguments)
    for name in ("batch_ramp", "skip_steps"):       # "none" unsets what a checkpoint has stored
        if given.get(name) == "none":
            given[name] = None
    if given.get("skip_steps") is not None:
        step_range(given["skip_steps"])
    ramp = given.get("batch_ramp")
    if ramp is not None and not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", ramp):
        raise ValueError(f"argument --batch-ramp: {ramp} is not START:INCREMENT:SEQUENCES, all > 0")
    if {"steps", "epochs"} <= set(given):
        raise ValueError("--steps cannot be combined with --epochs: both say when the run ends")
    if "init_from" in given and given.get("resume", "auto") not in ("auto", "never"):
        raise ValueError("--init-from cannot be combined with --resume FILE: it begins a new run")
    return given


def model_shape(flags: dict) -> dict:
    """The fields of the model's shape that these flags set."""
    shape = dict(SIZES[flags["model"]]) if "model" in flags else {}
    for name in SHAPE:
        if flags.get(name) is not None:
            shape[name] = flags[name]
    return shape


def merge_config(given: dict, state: dict | None, weights_only=False) -> tuple[Config, dict]:
    """Command line, then checkpoint, then defaults -> the config and the model's shape (without
    vocabulary and dropout). With `weights_only` the checkpoint gives the shape alone, and seq_len
    may be shorter. Raises ValueError if the command line asks for another model."""
    config = Config(**given)
    shape = model_shape(given)
    if state is None:
        return config, SIZES[config.model] | shape
    for name, value in shape.items():
        stored = state["model"][name]
        may_be_shorter = name == "seq_len" and weights_only
        if value != stored and not (may_be_shorter and value < stored):
            allowed = f"{stored} or less" if may_be_shorter else stored
            flag_name = (name if name in given else "model").replace("_", "-")
            raise ValueError(f"the checkpoint's model has {name} {allowed}, not {value}: drop "
                             f"--{flag_name}, or use another --out or checkpoint")
    shape = {name: state["model"][name] for name in SHAPE} | shape
    if not weights_only:
        config = Config(**(restored_flags(state) | given))
    return config, shape


def restored_flags(state: dict) -> dict:
    """The flags that a checkpoint restores."""
    return {name: state["config"][name] for name in RESTORED if name in state["config"]}


def default_micro_batch(sizes: range, replicas: float, pp: int, device_type: str) -> int:
    """The largest microbatch, up to a limit, that splits every batch size into a multiple of pp
    microbatches, which fill the pipeline. GPUs gain from large products, but a pipeline loses more:
    with 16 sequences instead of 4 it has fewer microbatches (`tools.plan`: 8 to 40% slower)."""
    most = 16 if device_type == "cuda" and pp == 1 else 4
    replica = math.gcd(*sizes) / replicas       # sequences of each; a fraction is no multiple
    return max([m for m in range(1, most + 1) if replica % (m * pp) == 0], default=1)


def default_lr(model: str, shape: dict) -> float:
    """Published peak learning rate of the size with this depth and width (`model` first, but the
    weights of --init-from may have another shape); without one, that of `model`."""
    for name in (model, *SIZES):
        if (SIZES[name]["n_layer"], SIZES[name]["n_embd"]) == (shape["n_layer"], shape["n_embd"]):
            return PEAK_LR[name]
    return PEAK_LR[model]


def check_config(config: Config, shape: dict, vocab_size: int, world: int,
                 device_type: str) -> tuple[Config, GPTConfig]:
    """The config with a microbatch and a learning rate, and the model. Raises ValueError if they
    cannot run."""
    cfg = GPTConfig(vocab_size=vocab_size, dropout=config.dropout, **shape)
    replicas = world / (config.tp * config.pp)
    sizes, _ = batch_sizes(config)
    if config.batch_size not in sizes and not config.eval_only:
        raise ValueError(f"--batch-ramp {config.batch_ramp} does not end at --batch-size "
                         f"{config.batch_size}: START and INCREMENTs must add up to it (none: no "
                         f"ramp)")
    defaults = {}
    if config.micro_batch is None:
        defaults["micro_batch"] = default_micro_batch(sizes, replicas, config.pp, device_type)
    if config.lr is None:
        defaults["lr"] = default_lr(config.model, shape)
    config = dataclasses.replace(config, **defaults)
    if config.eval_only:            # an evaluation ignores --batch-size
        sizes = [max(1, int(replicas)) * config.micro_batch * config.pp]
        config = dataclasses.replace(config, batch_size=sizes[0])
    for size in sizes:
        check_layout(cfg, world, size, config)
    return config, cfg


def validate(given: dict, state: dict | None, world: int, device_type: str,
             weights_only: bool = False) -> tuple[Config, GPTConfig]:
    """Flags and checkpoint -> config and model. Raises ValueError or OSError if they cannot run."""
    config, shape = merge_config(given, state, weights_only)
    data = TokenDataset(config.data, "train", shape["seq_len"])
    TokenDataset(config.data, "val", shape["seq_len"])
    config, cfg = check_config(config, shape, data.meta["vocab_size"], world, device_type)
    resumed = None if weights_only else state
    if state is not None:
        checkpoint.check_data(state, data, config, same=not weights_only)
    if config.epochs is not None and not config.eval_only:
        config = dataclasses.replace(config, steps=steps_of_epochs(config, data, resumed))
    return config, cfg


def load_state(path) -> dict | None:
    """The state in a checkpoint, or None without a path."""
    return None if path is None else checkpoint.load(Path(path))


def prepare(given: dict, world: int, local_world: int, device: torch.device,
            stack: ExitStack) -> tuple[Config, GPTConfig, checkpoint.Start]:
    """Resolve configuration and checkpoint on rank 0: config, model, and where the run begins.
    Finally lock --out; `stack` releases the lock. Raises ValueError, OSError or RunError."""
    store = torch.distributed.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":    # this one persists
        store, _, _ = next(torch.distributed.rendezvous("env://"))
    restarted = store.check(["begun"])          # a refused start leaves no key
    config = Config(**given)
    if config.log is not None:
        check_follower(config.log)
    out = Path(config.out)
    begin = checkpoint.find_start(out, config.resume, config.init_from, config.eval_only, restarted)
    if begin.kind == "init-from":
        given = {**given, "init_from": str(begin.path)}
    config, cfg = validate(given, load_state(begin.path), world, device.type,
                           begin.kind == "init-from")
    grid = Grid(world // (config.tp * config.pp), config.pp, config.tp, chunks=config.pp_chunks)
    check_memory(cfg, grid, config, PRECISIONS[config.dtype], device, local_world)
    if not config.eval_only:
        stack.enter_context(checkpoint.lock_output_dir(out))
        if checkpoint.list_checkpoints(out) != begin.found:
            raise ValueError(f"another run has just written to {config.out}: start again")
        store.set("begun", "")
    return config, cfg, begin


def launch(given: dict, device: torch.device, rank: int, world: int, local_world: int,
           stack: ExitStack) -> int | None:
    """Build the run on this rank and train, or evaluate, to its end. Returns the number of the
    signal that stopped it, or None."""
    assert_equal_across_ranks((given, device.type), "the ranks have different flags or devices: "
                              "start all with one command")
    assert_own_gpu(device)
    config, cfg, begin = on_rank0(lambda: prepare(given, world, local_world, device, stack))
    path = begin.path if begin.kind in ("continue", "resume") else None
    state = all_ranks(lambda: load_state(path))
    if begin.kind == "resume":
        checkpoint.start_branch(state, "lr" in given)

    train_data = all_ranks(lambda: TokenDataset(config.data, "train", cfg.seq_len))
    val_data = all_ranks(lambda: TokenDataset(config.data, "val", cfg.seq_len))
    fingerprints = list(train_data.sources)
    assert_equal_across_ranks(fingerprints, f"{config.data} differs between ranks: copy it")
    if state is not None:
        train_data.go_on(state["data"], state["consumed_samples"])
    if state is None or not set(fingerprints) <= set(state["data"][-1][1]):   # data new to this run
        if not config.eval_only:
            all_ranks(lambda: train_data.check(rank, world))
        all_ranks(lambda: val_data.check(rank, world))

    grid = make_grid(world, config.tp, config.pp, rank, config.sequence_parallel,
                     timedelta(seconds=config.timeout), device, config.pp_chunks)
    stack.callback(grid.groups.clear)   # gloo's threads can abort a process that exits
    run = Run(config, cfg, grid, device, train_data, val_data, state, begin.run)
    stack.callback(run.writer.close)
    if state is not None:
        for name in checkpoint.STATE:
            del state[name]                             # unmaps the file
    try:
        return start(run, state, begin, given, stack)
    except PeerError as error:
        raise PeerError(f"stage {grid.stage}, step {run.step + 1}: {error}") from error


def start(run: Run, state: dict | None, begin: checkpoint.Start, given: dict,
          stack: ExitStack) -> int | None:
    """Evaluate; or print how the run begins, and train. `state` no longer holds tensors."""
    config = run.config
    if config.eval_only:
        text = format_eval(run.evaluate(), run)
        _, _, step = begin.run["origin"]
        print_rank0(f"{begin.path}, step {step}, on {config.data}: {text}")
        return None
    if run.step >= config.steps:
        print_rank0(f"{begin.path} is step {run.step} of {config.steps}: nothing left to do; raise "
                    f"--steps or --epochs to continue, or begin a new run in another --out")
        return None
    run.metrics = all_ranks(lambda: checkpoint.Metrics(Path(config.out), run.grid.rank))
    if config.log is not None and run.grid.rank == 0:
        stack.enter_context(follower(config))
    print_summary(run)
    if state is None:
        line = f"weights  from {config.init_from}" if begin.kind == "init-from" else None
        run.event("start", line, step=0, config=dataclasses.asdict(config),
                  environment=environment(run.grid))
    else:
        report_resume(run, state, begin, given)
    if begin.kind in ("init-from", "resume"):   # after this save, FILE is no longer needed
        run.save(is_start=True)
    print_notes(run, given, resumed=state is not None)
    stop = StopSignal()
    run.train(stop)
    if run.step < config.steps:
        return stop.number
    if run.train_data.meta["tokenizer"] in ("gpt2", "bytes"):
        file = shlex.quote(f"{config.out}/latest.pt")
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}")
    return None


def environment(grid: Grid) -> dict:
    """Versions, the git commit that this source is based on (None without a repository), and each
    rank's machine, for an event, which rank 0 writes."""
    folder = Path(__file__).resolve().parent
    commit = None
    if grid.rank == 0 and shutil.which("git") is not None and (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return dict(python=platform.python_version(), pytorch=torch.__version__, commit=commit,
                hosts=grid.hosts)


def report_resume(run: Run, state: dict, begin: checkpoint.Start, given: dict) -> None:
    """The events of a resume, and its line: which settings differ from the stored ones, and how the
    next step's learning rate changes."""
    config, factor = run.config, run.monitor.lr_factor
    changed = {}
    for name in RESTORED:
        if state["config"].get(name) != getattr(config, name):
            changed[name] = [state["config"].get(name), getattr(config, name)]
    if state["data"] != run.train_data.phases:
        changed["data"] = [state["config"]["data"], config.data]
    line = f"resume   {begin.path}, after step {run.step}"
    for name, (old, new) in changed.items():
        line += f", {name.replace('_', ' ')} {new} instead of {old}"

    stored = Config(**restored_flags(state))
    old, new = learning_rate(stored, run.step + 1), learning_rate(config, run.step + 1)
    if not 0.8 * old <= new <= 1.25 * old:
        line += f"; so the next step's learning rate is {new:.2e} instead of {old:.2e}"
    if factor != 1:
        line += f", learning rate x {factor:.3g}"
    for event in begin.events:
        run.metrics.write(**event, step=run.step)
    run.event("resume", line, path=str(begin.path), given=given, changed=changed, lr_factor=factor,
              config=dataclasses.asdict(config), environment=environment(run.grid), step=run.step)


def choose_device(config: Config, world: int, local_rank: int) -> torch.device:
    """This process's device. Raises ValueError if the flags ask for one that cannot be used."""
    device = pick_device(config.device, local_rank, world == 1 and config.dtype != "fp64")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")      # TF32, several times as fast as fp32
    compiler = os.environ.get("CXX", "cl" if os.name == "nt" else "g++")
    if config.compile and device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError("--compile on a CPU needs a C++ compiler: install g++, name another in "
                         "CXX, or leave the flag out")
    return device


def print_error(message) -> None:
    print(f"train.py: {message}", file=sys.stderr, flush=True)


def main() -> None:
    rank = int(os.environ.get("RANK", 0))                       # torchrun sets these
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # NCCL: a group's first operation connects its ranks for all later ones (`parallel.connect`).
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    # PyTorch: a collective takes free SMs before the products that are queued already.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    try:                            # before any communication
        given = parse_flags(sys.argv[1:])
        config = Config(**given)
        check_grid(world, config)
        device = choose_device(config, world, local_rank)
    except ValueError as error:
        if rank > 0:
            time.sleep(5)           # torchrun ends all ranks when one exits: rank 0 prints first
        if local_rank == 0:
            print_error(error)
        sys.exit(2)
    status, signal_number = 0, None
    try:
        with process_group(rank, world, device, timedelta(seconds=config.timeout)):
            try:
                with ExitStack() as stack:
                    signal_number = launch(given, device, rank, world, local_world, stack)
            except RunError as error:               # every rank raises the same error
                status = error.status
                if rank == 0:
                    print_error(error)
                all_gather_object(None)             # wait until rank 0 has printed
    except Exception as error:
        message = fatal_message(error)
        if message is not None:
            host = f" on {socket.gethostname()}" if world > local_world else ""
            print_error(f"rank {rank}{host}: {message}")
        elif world == 1:
            raise
        else:
            traceback.print_exc()
        os._exit(1)                 # at once, so that the other ranks notice
    if signal_number is not None and world == 1:
        signal.signal(signal_number, signal.SIG_DFL)    # so that Ctrl-C also ends a shell's loop
        os.kill(os.getpid(), signal_number)
    sys.exit(status)


if __name__ == "__main__":
    main()
