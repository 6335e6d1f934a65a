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

import dataclasses
import math
import os
import shlex
import socket
import statistics
import sys
import time
import traceback
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import checkpoint
from amp import PRECISIONS, clip_factor, make_scaler
from data import Source, TokenDataset, batch_size_at, samples_after
from model import GPT, IGNORE_INDEX, GPTConfig, derive_seed
from parallel import Grid, build_stage, make_grid, param_specs
from parallelism.collectives import PeerError, Work, all_gather_object, all_reduce, to_host
from parallelism.compiling import wrap_model
from parallelism.pipeline import run_schedule
from parallelism.schedules import make_schedule
from parallelism.zero import FlatParameters, gather_before_use
from runtime import checks, console, dashboards, devices, directory, recovery
from runtime.divergence import BAD_STEPS, LEAD_IN, MAX_SKIPPED, Divergence, DivergenceMonitor
from runtime.options import Config, parse_flags, restored_flags, step_range
from runtime.processes import (RunError, StopSignal, all_ranks, assert_equal_across_ranks,
                               fatal_message, on_rank0, print_rank0, process_group)


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


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


@dataclass
class StepStats:
    """The statistics of a step, equal on every rank after the step's one all-reduce."""
    loss: float                 # mean over the tokens of the global batch, in nats
    activation_norm: float      # mean over the tokens of the norm of the last activations
    grad_norm: float            # of the whole model, unscaled, before clipping
    found_inf: bool             # the loss or a gradient of some rank is not finite
    stop_requested: bool        # some rank received a signal
    loss_scale: float           # that the step used
    scale_can_fall: bool        # fp16: this scale is above its floor


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
        the run's id and origin (directory.new_run)."""
        self.config, self.cfg, self.grid, self.device = config, cfg, grid, device
        self.train_data, self.val_data = train_data, val_data
        self.identity = identity or directory.new_run("seed")
        self.metrics = None                     # directory.Metrics, for `train`
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
        count = console.eval_sequences(self.config, self.cfg, source)
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
        if not recovery.losses_stay_comparable(self.config, self.train_data, state):
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
        path, events = on_rank0(lambda: directory.latest_valid(files))
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
            where = recovery.locate_nonfinite(loss_sum.item(), self.flat)
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
            print_rank0(console.format_step(self, row, statistics.median_low(self.recent_seconds)))
        if "val_loss" in row:
            print_rank0(console.format_eval(row, self))
        # On GPUs, where waits are asynchronous, a process's time does not show slow ranks.
        on_cpus = self.grid.world > 1 and self.device.type == "cpu"
        if row["step"] % console.COMPARE_RANKS_EVERY == 0 and on_cpus:
            busy = time.perf_counter() - Work.seconds_waited
            if self.busy is not None:
                console.note_slow_ranks(self.grid, busy - self.busy)
            self.busy = busy


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


# ---------------------------------------------------------------------------------------------
# The console
# ---------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------
# Dashboards: tools/follow.py sends metrics.jsonl to them, in a process of its own
# ---------------------------------------------------------------------------------------------

# ---------------------------------------------------------------------------------------------
# From the command line to a run
# ---------------------------------------------------------------------------------------------

def load_state(path) -> dict | None:
    """The state in a checkpoint, or None without a path."""
    return None if path is None else checkpoint.load(Path(path))


def prepare(given: dict, world: int, local_world: int, device: torch.device,
            stack: ExitStack) -> tuple[Config, GPTConfig, directory.Start]:
    """Resolve configuration and checkpoint on rank 0: config, model, and where the run begins.
    Finally lock --out; `stack` releases the lock. Raises ValueError, OSError or RunError."""
    store = torch.distributed.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":    # this one persists
        store, _, _ = next(torch.distributed.rendezvous("env://"))
    restarted = store.check(["begun"])          # a refused start leaves no key
    config = Config(**given)
    if config.log is not None:
        dashboards.check_follower(config.log)
    out = Path(config.out)
    begin = directory.find_start(out, config.resume, config.init_from, config.eval_only, restarted)
    if begin.kind == "init-from":
        given = {**given, "init_from": str(begin.path)}
    config, cfg = checks.validate(given, load_state(begin.path), world, device.type,
                           begin.kind == "init-from")
    grid = Grid(world // (config.tp * config.pp), config.pp, config.tp, chunks=config.pp_chunks)
    checks.check_memory(cfg, grid, config, PRECISIONS[config.dtype], device, local_world)
    if not config.eval_only:
        stack.enter_context(directory.lock_output_dir(out))
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
    devices.assert_own_gpu(device)
    config, cfg, begin = on_rank0(lambda: prepare(given, world, local_world, device, stack))
    path = begin.path if begin.kind in ("continue", "resume") else None
    state = all_ranks(lambda: load_state(path))
    if begin.kind == "resume":
        directory.start_branch(state, "lr" in given)

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


def start(run: Run, state: dict | None, begin: directory.Start, given: dict,
          stack: ExitStack) -> int | None:
    """Evaluate; or print how the run begins, and train. `state` no longer holds tensors."""
    config = run.config
    if config.eval_only:
        text = console.format_eval(run.evaluate(), run)
        _, _, step = begin.run["origin"]
        print_rank0(f"{begin.path}, step {step}, on {config.data}: {text}")
        return None
    if run.step >= config.steps:
        print_rank0(f"{begin.path} is step {run.step} of {config.steps}: nothing left to do; raise "
                    f"--steps or --epochs to continue, or begin a new run in another --out")
        return None
    run.metrics = all_ranks(lambda: directory.Metrics(Path(config.out), run.grid.rank))
    if config.log is not None and run.grid.rank == 0:
        stack.enter_context(dashboards.follower(config))
    console.print_summary(run)
    if state is None:
        line = f"weights  from {config.init_from}" if begin.kind == "init-from" else None
        run.event("start", line, step=0, config=dataclasses.asdict(config),
                  environment=console.environment(run.grid))
    else:
        stored = Config(**restored_flags(state))
        console.report_resume(run, state, begin, given, learning_rate(stored, run.step + 1),
                              learning_rate(config, run.step + 1))
    if begin.kind in ("init-from", "resume"):   # after this save, FILE is no longer needed
        run.save(is_start=True)
    console.print_notes(run, given, resumed=state is not None)
    stop = StopSignal()
    run.train(stop)
    if run.step < config.steps:
        return stop.number
    if run.train_data.meta["tokenizer"] in ("gpt2", "bytes"):
        file = shlex.quote(f"{config.out}/latest.pt")
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}")
    return None


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
        checks.check_grid(world, config)
        device = devices.choose_device(config, world, local_rank)
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
