"""Train a GPT: first the plain program in one process, then the same on many ranks.

    python train.py --plain                                     # the plain program
    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp = 8 / (pp * cp * tp) = 2

The plain program is the whole algorithm: a batch, forward and backward, clipping, AdamW,
evaluation, saving. `Run` does the same on any number of ranks and in any precision, and tests
compare the two. Before `Run`, read parallel.py: it divides the work. base/options.py has the flags
and their defaults; runtime/ does loading, logging, saving and rollback."""
import math
import time

import base      # first: a one-line error if numpy or torch is not installed

import numpy as np
import torch

from amp import PRECISIONS, clip_factor
from base.agreement import all_ranks
from base.errors import RunError
from base.options import Config
from base.processes import running
from checkpoint import plain_load, plain_save
from data import Batch, TokenDataset, open_shards, plain_batch, plain_windows
from model import GPT, GPTConfig
from parallel import Grid, gather_before_use, keep_stage, tensor_parallel
from parallelism.build import (compile_model, data_parallel, recompute_blocks, set_loss_factors,
                               use_faster_modules)
from parallelism.context import context_parallel
from parallelism.exact import make_exact
from parallelism.experts import expert_parallel
from parallelism.pipeline import run_pipeline
from runtime import console, evaluation, plain_run, rollback, run_state, startup, step_stats
from runtime.directory import has_ended
from runtime.loader import Loader
from runtime.signals import StopSignal


# ---- The plain program ----------------------------------------------------------------------

def plain_step(config: Config, model: GPT, optimizer: torch.optim.Optimizer, shards: list,
               step: int) -> tuple[float, float]:
    """One step. Returns its loss and gradient norm. docs/training.md tries it in a notebook."""
    # A shard is an array of tokens. With T = seq_len, window i is tokens[i * T : (i + 1) * T + 1],
    # because the target of a token is the next one. Each epoch visits all windows in a new order,
    # set by the seed. A step takes the next batch_size of them.
    T = model.cfg.seq_len
    rows = plain_batch(shards, T, config.seed, (step - 1) * config.batch_size, config.batch_size)
    rows = torch.from_numpy(rows).to(model.device)                          # (B, T + 1)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)

    optimizer.zero_grad()
    mean_loss = 0.0
    for microbatch in rows.split(config.micro_batch or config.batch_size):
        inputs, targets = microbatch[:, :-1], microbatch[:, 1:]             # (b, T) each
        with torch.autocast(model.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            loss = model(inputs, targets) / (config.batch_size * T)     # the sum -> its mean
        loss.backward()                 # the gradients of the microbatches add up
        mean_loss += loss.item()
    max_norm = config.clip if config.clip > 0 else math.inf     # --clip 0: no clipping
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not norm.isfinite():             # `Run` skips such a step, or goes back to a checkpoint
        raise RunError(f"step {step} has loss {mean_loss} and gradient norm {norm}: lower --lr")
    optimizer.step()
    return mean_loss, norm.item()


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `lr` in warmup_steps, then decay to lr * min_lr_ratio at the last step.
    "wsd" (warmup-stable-decay, Hu et al. 2024, section 4) decays only over the last decay_ratio of
    the steps: a checkpoint from before the decay can be continued with more --steps."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_start = config.warmup_steps
    if config.lr_schedule == "wsd":
        decay_start = max(decay_start, config.steps - round(config.decay_ratio * config.steps))
    if step <= decay_start:
        return config.lr
    done = (step - decay_start) / (config.steps - decay_start)      # fraction of the decay
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:                               # linear, and wsd
        left = 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def plain_adamw(config: Config, model: GPT) -> torch.optim.AdamW:
    """PyTorch's AdamW, with weight decay for matrices only. plain_step sets the learning rate."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]       # biases, LayerNorm
    return torch.optim.AdamW([dict(params=matrices, weight_decay=config.weight_decay),
                              dict(params=vectors, weight_decay=0.0)],
                             betas=(config.beta1, config.beta2))


@torch.no_grad()
def plain_evaluate(config: Config, model: GPT, shards: list) -> float:
    """The mean loss in nats on evenly spaced windows, the same in every evaluation."""
    T = model.cfg.seq_len
    n_windows = sum((len(tokens) - 1) // T for tokens in shards)
    count = evaluation.eval_sequences(config, T, n_windows)     # --eval-tokens / T, or 128
    window_ids = np.linspace(0, n_windows - 1, count).astype(np.int64)
    loss_sum = 0.0
    model.eval()                        # no dropout
    for first in range(0, count, config.batch_size):
        rows = plain_windows(shards, T, window_ids[first:first + config.batch_size])
        rows = torch.from_numpy(rows).to(model.device)                      # (B, T + 1)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            loss_sum += model(rows[:, :-1], rows[:, 1:]).item()
    model.train()
    return loss_sum / (count * T)


def plain_train(config: Config, model_config: GPTConfig, device: torch.device,
                out: plain_run.OutputFolder) -> None:
    """`python train.py --plain`: train until step config.steps, or until a signal arrives. `out` is
    the folder of the run. This program and `Run` can resume each other's checkpoints."""
    dtype = torch.float64 if config.dtype == "fp64" else torch.float32
    model = model_config.build().initialize(config.seed).to(device, dtype)
    optimizer = plain_adamw(config, model)
    if out.checkpoint is not None:      # the run goes on from it
        plain_load(model, optimizer, out.checkpoint)
    train_shards = open_shards(config.data, "train")
    val_shards = open_shards(config.data, "val")
    with StopSignal() as stop:          # remembers Ctrl-C or SIGTERM, and exits after this block
        for step in range(out.finished_step + 1, config.steps + 1):
            start = time.perf_counter()
            loss, norm = plain_step(config, model, optimizer, train_shards, step)
            seconds = time.perf_counter() - start
            row = out.report_step(step, loss, norm, learning_rate(config, step), seconds)
            if config.is_nth_or_last(step, config.eval_every):
                row["val_loss"] = plain_evaluate(config, model, val_shards)
            out.log.write_row(row)
            stopping = stop.requested           # read once: a later signal waits for the next step
            if stopping or config.is_nth_or_last(step, config.save_every):
                with out.outlive_failed_save(stopping or step == config.steps):
                    plain_save(model, optimizer, out.facts(step), config.out, config.keep)
            if stopping:
                break
        out.report_end()


# ---- The same on many ranks -----------------------------------------------------------------
# --plain runs the program above; without it, `Run` runs. A rank is one process, with its own GPU.
# With --tp 2 --pp 2, eight ranks are two replicas of the whole model:
#
#                    replica 0: half of the rows            replica 1: the other half
#     first layers   [rank 0 <-tp-> rank 1]      <-dp->     [rank 2 <-tp-> rank 3]      stage 0
#                        | pp          | pp                     | pp          | pp
#     last layers    [rank 4 <-tp-> rank 5]      <-dp->     [rank 6 <-tp-> rank 7]      stage 1
#
# dp: ranks at the same place in different replicas, such as 0 and 2, sum their gradients; with
# --zero each updates a part. --cp divides sequences over more ranks, --ep experts over replicas.
#
#     the plain program       Run, on each rank       what it calls, in parallel.py
#     plain_train             __init__, train         tensor_parallel, DataParallel (self.flat)
#       plain_step
#         plain_batch           loader.next           cut_sequence
#         forward, backward     compute_gradients     Pipeline, flat.prepare_grad_sync
#         clip_grad_norm_       sum_statistics        flat.grad_norm_squares, all_reduce
#         optimizer.step        update                flat.adamw_step


class Run:
    """A training run on this rank. `state` is a loaded checkpoint, or None for a new run."""

    def __init__(self, config: Config, model_config: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None):
        self.config, self.model_config, self.grid, self.device = config, model_config, grid, device
        self.train_data, self.val_data = train_data, val_data
        # The whole model, on the meta device: shapes, no memory yet. Each call removes what other
        # ranks hold, or adds communication with them.
        with torch.device("meta"):
            self.model = model = model_config.build()
        tensor_parallel(model, grid)            # tp: layers with a slice of each matrix
        use_faster_modules(model, grid)         # faster, with the same results
        context_parallel(model, grid, config.recompute)     # cp: attention gathers keys and values
        expert_parallel(model, grid)            # ep: some experts; tokens are sent to their rank
        keep_stage(model, grid)                 # pp: the blocks of this rank's stage
        # dp, ZeRO: a few large buffers take the place of the optimizer. They hold this rank's
        # parameters, gradients and AdamW state. Hooks sum the gradients during backward.
        if config.exact:        # sums in which no order matters: the same bits in every layout
            self.flat = make_exact(model, grid, config, device)
        else:
            self.flat = data_parallel(model, grid, config, device)
        # Each call wraps the forward of every block, outside the wrappers before it.
        if config.compile:
            compile_model(model, grid, PRECISIONS[config.dtype].parameters, device)
        if config.recompute:
            recompute_blocks(model)                 # in backward, instead of keeping activations
        if config.zero > 0:
            gather_before_use(model, self.flat)     # a block's parameters, when it needs them
        # Load `state`, or initialize. progress.batches: train_data, its order and how far we are.
        self.progress = run_state.restore(state, self.flat, config, model_config, train_data)
        self.step = self.progress.step + 1      # in progress, from 1
        self.loader = Loader(config, model_config, grid, device)
        self.writer = run_state.make_writer(config, self.flat)      # of checkpoints
        self.stop = StopSignal()        # remembers a signal to this process
        self.log = None                 # startup.begin_training opens it

    def train(self) -> None:
        """Train until step --steps, or until a signal arrives."""
        config = self.config
        self.model.train()
        while self.step <= config.steps and not self.stop.agreed:
            start = time.perf_counter()
            step, progress = self.step, self.progress
            # Leave out what --skip-steps or a rollback excludes; load this rank's microbatches.
            rollback.leave_out_batches(step, progress, self.log)
            batch = self.loader.next(progress.batches, step)
            lr = learning_rate(config, step) * progress.monitor.lr_factor   # below 1 by rollbacks
            loss_sum = self.compute_gradients(batch)
            stats = self.sum_statistics(loss_sum, batch)
            self.update(stats, lr)
            progress.step = step
            seconds = time.perf_counter() - start
            divergence = rollback.find_divergence(batch, stats, progress, self.log)     # or None
            row = self.log.report_step(batch, stats, lr, seconds, progress)
            if divergence is None and config.is_nth_or_last(step, config.eval_every):
                row |= evaluation.evaluate(self.model, self.val_data, self.loader, progress.batches,
                                           self.stop, may_end=step < config.steps)
            self.log.write_row(row)
            rollback.save_or_go_back(self, row, divergence)     # go back after a divergence
            self.step = self.progress.step + 1
        self.flat.wait_params()         # other ranks may still be receiving this rank's shard
        all_ranks(lambda: self.writer.wait(required=True))      # of the last checkpoint
        console.report_end(self.log, self.progress.step, config, self.train_data.meta)

    def compute_gradients(self, batch: Batch) -> torch.Tensor:
        """1. Forward and backward. Returns the sum of this rank's losses. self.flat then has the
        gradients of the whole batch, with ZeRO those of this rank's shard."""
        model, flat, microbatches = self.model, self.flat, batch.microbatches
        loss_scale = self.progress.scaler.scale
        # The model returns a sum of losses. loss_factor makes it a share of the batch's mean loss,
        # times the loss scale: so the gradients of all microbatches and replicas simply add up.
        loss_factor = loss_scale / batch.num_targets
        flat.zero_grad()
        # The head computes its gradients already in forward, to keep the logits of a few positions
        # only, and routers add theirs to the loss: both need the factors before.
        set_loss_factors(model, flat, loss_scale, batch.num_tokens, batch.num_targets)
        if self.grid.pp == 1:
            loss_sum = step_stats.scalar(0.0, self.device)
            for m, (inputs, targets, dropout_seed, positions) in enumerate(microbatches):
                # Hooks start the all-reduce of each bucket of gradients in the backward of the last
                # microbatch. With ZeRO 2 and 3 they do so in every one.
                flat.prepare_grad_sync(model, last=m == len(microbatches) - 1)
                loss = model(inputs, targets, dropout_seed, positions=positions)
                (loss * loss_factor).backward()
                loss_sum += loss.detach()
        else:       # a pipeline: the same in the order of a schedule, with messages between stages
            loss_sum = run_pipeline(self.config.pp_schedule, model, self.grid, microbatches,
                                    loss_factor, flat)
        self.loader.prefetch(self.progress.batches, batch.step + 1)     # while a GPU computes
        flat.finish_grad_sync()                 # waits for the sums over the replicas
        return loss_sum

    def sum_statistics(self, loss_sum: torch.Tensor, batch: Batch) -> step_stats.StepStats:
        """2. Sum the loss and the squared norm over all ranks, so that all decide alike. A value
        that several ranks hold, such as the loss in a tp group, is counted once. A signal may reach
        only one rank: the sum tells the others (self.stop.agreed)."""
        local = step_stats.local_sums(loss_sum, self.model, self.flat)
        total = step_stats.sum_across_ranks(local, self.grid, self.config.timeout, self.stop)
        loss_scale = self.progress.scaler.scale
        return step_stats.statistics(total, batch, self.flat, loss_scale, loss_sum)

    def update(self, stats: step_stats.StepStats, lr: float) -> None:
        """3. Clip, and AdamW. One factor both clips the gradients and undoes the loss scale. With
        ZeRO each rank updates its shard, and the others receive it during the next forward. If a
        number of any rank is inf or NaN, all ranks skip the update."""
        config, progress = self.config, self.progress
        if not stats.why_skipped:
            progress.optimizer_steps += 1
            factor = clip_factor(stats.grad_norm, config.clip, progress.scaler.scale)
            self.flat.adamw_step(factor, progress.optimizer_steps, lr, config.beta1, config.beta2,
                                 config.weight_decay)
        progress.scaler.update(stats.not_finite)        # the loss scale of the next step


def main() -> None:
    job, flags, device, timeout = startup.parse()       # exits here if a flag is wrong
    with running(job, device, timeout) as stack:        # closes at its end what is opened here
        if flags.get("plain"):
            config, model_config, out = plain_run.begin(
                flags, job, device, stack, learning_rate)
            plain_train(config, model_config, device, out)
            return
        config, model_config, start = startup.prepare(flags, job, device, stack)
        train_data, val_data = startup.open_data(config, model_config, start.state, job)
        grid = startup.join_ranks(config, job, device, stack)
        run = Run(config, model_config, grid, device, train_data, val_data, start.state)
        with startup.errors_with_step(run):
            if config.eval_only or has_ended(start.step, config):
                startup.report_only(run, start)         # evaluate, or say that it has ended
            else:
                startup.begin_training(run, start, learning_rate, stack)
                run.train()


if __name__ == "__main__":
    main()
