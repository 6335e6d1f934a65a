"""Train a GPT: first the plain program in one process, then the same on many ranks.

    python train.py --plain                                     # the plain program
    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp = 8 / (pp * cp * tp) = 2

The plain program is the whole algorithm: a batch, forward and backward, clipping, AdamW,
evaluation, saving. `Run` does the same on any number of ranks and in any precision. Tests check
that the results agree. Before `Run` read parallel.py, which has each technique in its plain form.

The flags are in base/. What else a long run needs is in runtime/. docs/extend.md says where changes
go.
"""
import signal

if __name__ == "__main__":      # Ctrl-C during the slow import of torch exits at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Iterator

import base      # first: without numpy or torch it exits with a one-line message

import numpy as np
import torch
from torch.distributed import DistError

import checkpoint
from amp import NOT_FINITE, PRECISIONS, clip_factor, make_scaler
from base.options import Config
from base.processes import Job, running
from checkpoint import plain_load, plain_save
from data import Batch, Batches, TokenDataset, open_shards, plain_batch, plain_windows
from model import GPT, GPTConfig
from parallelism.build import Grid, build_rank, set_factors
from parallelism.pipeline import like_activations, run_schedule
from parallelism.schedules import make_schedule
from runtime import (console, directory, evaluation, flipped_bits, rollback, run_log, run_state,
                     startup, step_stats)
from runtime.divergence import DivergenceMonitor
from runtime.loader import Loader
from runtime.plain_run import PlainRun
from runtime.signals import StopSignal, exit_like_signal
from runtime.step_stats import StepStats
from runtime.sums import scalar


# ---- The plain program ----------------------------------------------------------------------

def plain_train(config: Config, model: GPT, optimizer: torch.optim.Optimizer, shards: list,
                first_step: int = 1) -> Iterator[tuple[float, float]]:
    """Train until step config.steps. Yields the loss and the gradient norm of each step.

    Try it after `python data.py`:

        from train import *
        shards = open_shards("data/python", "train")
        config = Config(steps=20, lr=4e-3)
        model = GPT(GPTConfig()).initialize(config.seed)
        for loss, norm in plain_train(config, model, plain_adamw(config, model), shards):
            print(loss)

    These are the losses of `python train.py --steps 20`."""
    device = next(model.parameters()).device
    for step in range(first_step, config.steps + 1):
        # A window is T + 1 tokens. The seed shuffles all windows, and each step takes the next
        # batch_size of them. One gives a row: its first T tokens are the inputs, its last T the
        # targets, because each position predicts the token that follows.
        consumed = (step - 1) * config.batch_size
        rows = plain_batch(shards, model.cfg.seq_len, config.seed, consumed, config.batch_size)
        rows = torch.from_numpy(rows).to(device)                    # (B, T + 1)
        inputs, targets = rows[:, :-1], rows[:, 1:]                 # (B, T) each
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)

        optimizer.zero_grad()
        loss = model(inputs, targets) / targets.numel()             # the model returns the sum
        loss.backward()
        max_norm = config.clip or math.inf                          # --clip 0: no clipping
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        yield loss.item(), norm.item()


def plain_adamw(config: Config, model: GPT) -> torch.optim.AdamW:
    """PyTorch's AdamW, with weight decay for matrices only. Each step sets the learning rate."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]       # biases, LayerNorm
    return torch.optim.AdamW([dict(params=matrices, weight_decay=config.weight_decay),
                              dict(params=vectors, weight_decay=0.0)],
                             betas=(config.beta1, config.beta2))


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `lr` in warmup_steps, then decay to lr * min_lr_ratio at the last step.
    "cosine" and "linear" decay right after the warm-up. "wsd" (warm-up, stable, decay: Hu et al.
    2024, section 4) stays at `lr` and decays linearly over the last decay_ratio of the steps, so
    that a run can be extended from a checkpoint taken before the decay."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_start = config.warmup_steps
    if config.lr_schedule == "wsd":
        decay_start = max(decay_start, config.steps - round(config.decay_ratio * config.steps))
    if step <= decay_start:
        return config.lr
    done = (step - decay_start) / (config.steps - decay_start)      # of the decay: 0 to 1
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:                       # "linear" and "wsd"
        left = 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


@torch.no_grad()
def plain_evaluate(config: Config, model: GPT, shards: list) -> float:
    """The mean loss in nats on evenly spaced windows, the same in every evaluation."""
    device = next(model.parameters()).device
    seq_len = model.cfg.seq_len
    n_windows = sum((len(tokens) - 1) // seq_len for tokens in shards)
    count = evaluation.eval_sequences(config, model.cfg, n_windows)     # at most 128 by default
    window_ids = np.linspace(0, n_windows - 1, count).astype(np.int64)
    loss_sum = 0.0
    model.eval()                        # no dropout
    for first in range(0, count, config.batch_size):
        batch = window_ids[first:first + config.batch_size]
        rows = torch.from_numpy(plain_windows(shards, seq_len, batch)).to(device)   # (B, T + 1)
        loss_sum += model(rows[:, :-1], rows[:, 1:]).item()
    model.train()
    return loss_sum / (count * seq_len)


def plain_launch(given: dict, device: torch.device, job: Job, stack: ExitStack) -> None:
    """`python train.py --plain`: train, evaluate, save and resume. It uses the same --out as a
    `Run`, and each continues what the other has saved. `given` are the flags of the command, `job`
    is this process, and `stack` closes what is open when the process ends."""
    # Refuse mistakes, lock --out, and find the checkpoint to begin from: begin.path, or None.
    config, model_config, begin = startup.prepare(given, job, device, stack)
    dtype, _ = PRECISIONS[config.dtype]         # fp32 or fp64
    model = model_config.build().initialize(config.seed).to(device, dtype)
    optimizer = plain_adamw(config, model)
    loaded = None if begin.path is None else plain_load(model, optimizer, begin.path)
    datasets = startup.open_data(config, model_config, loaded, job)     # checks the data
    train_shards, val_shards = (open_shards(config.data, split) for split in ("train", "val"))

    # The rest of a run: metrics.jsonl and the console, the end at Ctrl-C, and `facts`, which a
    # checkpoint holds besides tensors: the step, the flags, the data ...
    run = PlainRun(config, model_config, device, begin, loaded, *datasets, learning_rate)
    training = plain_train(config, model, optimizer, train_shards, first_step=run.step)
    for step, loss, norm in run.steps(training, stack):
        row = dict(step=step, loss=loss, lr=learning_rate(config, step), grad_norm=norm)
        if config.is_due(step, config.eval_every):
            row["val_loss"] = plain_evaluate(config, model, val_shards)
        run.log_step(row)
        if config.is_due(step, config.save_every) or run.stopping:      # at Ctrl-C
            with run.saving() as facts:
                plain_save(model, optimizer, facts, Path(config.out))


# ---- The same on many ranks -----------------------------------------------------------------
#
# Each process is a rank. With --tp 2 --pp 2, eight ranks are two replicas, each a full copy of the
# model:
#
#                      replica 0: half of the rows         replica 1: the other half
#     stage 0,         rank 0  <-- tp -->  rank 1          rank 2  <-- tp -->  rank 3
#     first layers       | pp                | pp            | pp                | pp
#     stage 1, last    rank 4  <-- tp -->  rank 5          rank 6  <-- tp -->  rank 7
#
# Ranks at the same place in different replicas, such as 0 and 2, train the same parameters. With
# --zero 0 each updates all of them, otherwise one shard (parallel.py, section 4).
#
#     the plain program       Run, on each rank
#
#     plain_train             train
#     plain_batch             Loader.next: this rank's rows of the batch, in microbatches
#     learning_rate           the same function
#                             compute_gradients:
#     zero_grad                 the same, in the flat buffers of zero.FlatParameters
#     forward and backward      for each microbatch, with pp in the order of a schedule
#                               finish_grad_sync: waits for the sums of gradients over the replicas
#     norm                      step_stats.of_step: loss and squared norm, summed over all ranks
#                             update:
#     clipping                  all ranks clip by the same factor, or all skip the step
#     AdamW                     on all of the rank's parameters, or on a shard
#     plain_evaluate          evaluation.evaluate
#     plain_save              checkpoint_writer.Writer: the same file, from the shards of all ranks


class Run:
    """A training run on this rank. `state` is a loaded checkpoint, or None for a run that begins
    with step 1. `identity` is the run's id and origin (directory.new_run)."""
    learning_rate = staticmethod(learning_rate)         # console.report_resume asks for it, too
    step_stats = step_stats.of_step                     # loss and norms, summed over all ranks

    def __init__(self, config: Config, model_config: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None,
                 identity: dict | None = None):
        self.config, self.model_config = config, model_config
        self.grid, self.device = grid, device
        self.train_data, self.val_data = train_data, val_data
        self.identity = identity or directory.new_run("seed")
        self.log = None                     # run_log.RunLog: metrics.jsonl and the console
        self.stop = StopSignal()            # which `launch` enters
        dtypes = PRECISIONS[config.dtype]       # of the parameters, and of the masters
        # build_rank keeps the blocks of this stage (pp), and replaces their layers by those that
        # hold a slice (tp) or exchange keys and values (cp). It moves the parameters into `flat`,
        # a zero.FlatParameters, whose hooks sum the gradients (dp, ZeRO).
        self.model, self.flat = build_rank(model_config, grid, config, dtypes, device)
        self.writer = run_state.make_writer(self)
        # An empty tensor, of the shape and dtype that one stage sends to the next.
        self.activation_like = like_activations(config, model_config, grid, dtypes[0], device)
        self.restore(state)

    def restore(self, state: dict | None) -> None:
        """Load the state of a checkpoint. Without one, begin before step 1. On the CPU, with the
        same layout and number of threads, a resumed run ends with an uninterrupted run's bits."""
        config = self.config
        step, consumed, tokens = 0, 0, 0
        self.optimizer_steps = 0            # updates so far, without skipped steps
        self.scaler = make_scaler(config.dtype)
        self.divergence = DivergenceMonitor.restored(state, config, self.train_data)
        if state is not None:
            step, consumed, tokens = state["step"], state["consumed_samples"], state["tokens"]
            self.optimizer_steps = state["optimizer_steps"]
            if state["config"]["dtype"] == config.dtype:
                self.scaler.load_state_dict(state["scaler"])
        self.step = step + 1                # in progress, from 1
        self.finished_step = step           # the last one whose update is complete
        self.batches = Batches(self.train_data, config, consumed,
                               tokens // self.model_config.seq_len)
        self.loader = Loader(self)          # of the rows that this rank reads
        if state is None:
            self.flat.initialize(self.model_config, config.seed, run_state.initial_weights(config))
        else:
            checkpoint.restore(state, self.flat)

    # ---- The loop ---------------------------------------------------------------------------

    def train(self) -> None:
        """Train until step --steps, or until a signal has come."""
        self.model.train()
        while self.step <= self.config.steps and not self.stop.agreed:
            start = time.perf_counter()
            rollback.skip_excluded(self)        # passes over data that --skip-steps excludes
            batch = self.loader.next()          # this rank's rows. It moves self.batches on
            lr = self.learning_rate(self.config, self.step) * self.divergence.lr_factor
            stats = self.compute_gradients(batch)
            self.update(stats, lr)
            row = self.log.new_row(self, batch, stats, lr, time.perf_counter() - start)
            if not rollback.go_back_if_diverged(self, batch, stats, row):
                self.evaluate_and_save(row)
            # After a divergence or a flipped bit an older checkpoint is restored, whose step is now
            # finished_step.
            self.step = self.finished_step + 1
        self.flat.wait_params()             # other ranks may still be receiving this rank's shard
        run_state.wait_for_last_save(self)
        if self.step > self.config.steps:
            console.report_end(self)
        else:
            console.report_stop(self)

    def evaluate_and_save(self, row: dict) -> None:
        """Evaluate every --eval-every steps and save every --save-every steps, and both after the
        last one. Save also if a signal has come. `row` is the step's row of metrics.jsonl."""
        config = self.config
        if config.is_due(self.step, config.eval_every):
            run_log.announce_evaluation(self)
            row.update(evaluation.evaluate(self))
        saving = config.is_due(self.step, config.save_every) or self.stop.agreed
        # Ranks hold copies of some state. If two copies differ, a bit has flipped.
        is_compared = saving or config.is_due(self.step, config.check_every)
        difference = flipped_bits.find_difference(self) if is_compared else None
        self.log.write_row(self, row)
        if difference is not None:
            flipped_bits.go_back(self, difference)      # to the last checkpoint
        elif saving:
            rollback.fail_if_diverged(self, row)
            run_state.save(self)

    # ---- One step ---------------------------------------------------------------------------

    def compute_gradients(self, batch: Batch) -> StepStats:
        """Forward and backward, and the sums over the ranks. It changes nothing that a checkpoint
        holds."""
        config, grid, model, flat = self.config, self.grid, self.model, self.flat
        microbatches = batch.microbatches
        # Of all ranks. They differ in conversations, where only answers count in the loss.
        tokens_in_batch = batch.size * self.model_config.seq_len
        targets_in_batch = self.train_data.count_targets(batch.window_ids)

        # 1. Forward and backward. The model returns the sum of a microbatch's losses. Times
        #    loss_factor it is the microbatch's share of the mean loss of the batch, times the loss
        #    scale. The gradients of all microbatches and replicas add up to the gradient of this
        #    mean.
        loss_factor = self.scaler.scale / targets_in_batch
        # It also notes the loss scale, and with --exact the two counts.
        flat.zero_grad(self.scaler.scale, tokens_in_batch, targets_in_batch)
        # The parallel head computes its gradients in forward, and the routers of a mixture of
        # experts have losses of their own: both need their factor now.
        set_factors(model, loss_factor, self.scaler.scale / tokens_in_batch)
        if grid.pp == 1:
            loss_sum = scalar(0.0, self.device)
            for m, (inputs, targets, dropout_seed, positions) in enumerate(microbatches):
                # Hooks start the all-reduce of each bucket of gradients in backward: only in that
                # of the last microbatch, or with ZeRO 2 and 3 in every one.
                is_last = m == len(microbatches) - 1
                flat.prepare_grad_sync(model, is_last)
                loss = model(inputs, targets, dropout_seed, positions=positions)
                (loss * loss_factor).backward()
                loss_sum += loss.detach()
        else:       # a pipeline: the same in the order of a schedule, and stages exchange messages
            schedule = make_schedule(config.pp_schedule, grid, len(microbatches))
            loss_sum = run_schedule(schedule, model, grid, microbatches, self.activation_like, flat)
        self.loader.prefetch()      # the next batch, while the GPU computes. The next line waits

        # 2. Wait for the all-reduces of the gradients over the replicas. With ZeRO they are
        #    reduce-scatters, and this rank gets the sum of its shard.
        flat.finish_grad_sync()

        # 3. Sum the loss and the squared norm over all ranks, so that all make the same decision.
        return self.step_stats(loss_sum, tokens_in_batch, targets_in_batch)

    def update(self, stats: StepStats, lr: float) -> None:
        """Update the weights. Every rank skips it if the loss or a gradient is inf or NaN, or with
        --exact if one is too large for an exact sum."""
        config = self.config
        # 4. Clip, and AdamW. One factor both clips the gradients and undoes the loss scale. With
        #    ZeRO each rank updates its shard. The others receive it during the next forward.
        if not stats.skipped:
            self.optimizer_steps += 1
            factor = clip_factor(stats.grad_norm, config.clip, self.scaler.scale)
            self.flat.adamw_step(factor, self.optimizer_steps, lr, config.beta1, config.beta2,
                                 config.weight_decay)
        self.scaler.update(stats.skipped == NOT_FINITE)
        self.finished_step = self.step


# ---- Start ----------------------------------------------------------------------------------

def launch(given: dict, device: torch.device, job: Job, stack: ExitStack) -> None:
    """Build this rank's run, and train or evaluate. `stack` collects what must be closed when the
    process ends."""
    config, model_config, begin = startup.prepare(given, job, device, stack)
    state = begin.state                             # of a checkpoint, None for a new run
    train_data, val_data = startup.open_data(config, model_config, state, job)
    grid = startup.join_ranks(config, job, device, stack)
    run = Run(config, model_config, grid, device, train_data, val_data, state, begin.run)
    stack.callback(run.writer.close)
    try:
        if config.eval_only:
            console.print_evaluation(run, begin)
        elif startup.has_ended(run):
            console.print_finished(run, state, begin)
        else:
            startup.begin_training(run, begin, stack)
            with run.stop:
                run.train()
            if run.step <= config.steps and job.world == 1:         # stopped by a signal
                stack.close()
                exit_like_signal(run.stop.number)
    except DistError as error:
        raise DistError(f"stage {grid.stage}, step {run.step}: {error}") from error


def main() -> None:
    job, given, device, timeout = startup.parse()       # a mistake in the flags ends here
    with running(job, device, timeout) as stack:
        if given.get("plain"):
            plain_launch(given, device, job, stack)
        else:
            launch(given, device, job, stack)


if __name__ == "__main__":
    main()
