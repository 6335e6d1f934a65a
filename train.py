"""Train a GPT: first the plain algorithm on one CPU, then the same algorithm on many ranks.

    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp = 8 / (pp * cp * tp) = 2

New to training? Read `plain_train` and `learning_rate`, the whole algorithm. `Run` does the same on
any number of ranks and in any precision; a test checks that the results agree. New to parallel
training? Read on: the picture of the ranks, then Run.train, compute_gradients and update.

    plain_train             Run.train, on each rank
    rows of the batch       Loader.next: this rank's rows, in microbatches
    learning rate           learning_rate: the same function
                            compute_gradients:
    zero_grad                 the same, in the flat buffers of zero.FlatParameters
    forward and backward      for each microbatch; with pp in the order of a schedule
                              finish_grad_sync: waits for the sums of gradients over the replicas
    norm                      step_stats: loss and squared norm are summed over all ranks
                            update:
    clipping                  all ranks clip by the same factor, or all skip the step
    AdamW                     on all of the rank's parameters, or on a shard

Everything else that a long run needs is in runtime/: flags, signals, what a checkpoint holds
(run_state.py; checkpoint.py writes the file), and monitors.py, which writes metrics.jsonl and takes
a diverged run back to an older checkpoint. To change the loss, see model.Head; docs/extend.md says
where other changes go.
"""
import signal

if __name__ == "__main__":      # before the slow `import torch`, so that Ctrl-C exits at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Iterator

import runtime      # first: if numpy or torch is missing, it exits with a message of one line

import numpy as np
import torch

import checkpoint
from amp import NOT_FINITE, PRECISIONS, clip_factor
from checkpoint import plain_load, plain_save
from corpus.shards import read_meta
from data import Batch, TokenDataset, plain_batch, open_shards, plain_windows
from model import GPT, GPTConfig, ceil_div
from parallelism.build import Grid, build_rank, make_groups
from parallelism.collectives import PeerError, all_reduce, sum_dtype, to_host
from parallelism.pipeline import like_activations, run_schedule
from parallelism.schedules import make_schedule
from runtime import (checks, console, directory, evaluation, processes, run_state,
                     startup)
from runtime.checkpoint_files import remove_old
from runtime.loader import Loader
from runtime.monitors import Monitors
from runtime.options import Config
from runtime.processes import Job, RunError, all_ranks
from runtime.signals import StopSignal


def plain_train(config: Config, model: GPT, optimizer: torch.optim.Optimizer, shards: list,
                begin: int = 1) -> Iterator[tuple[float, float]]:
    """Train from step `begin` to the last one. Yields the loss and the gradient norm of each step.
    To try it, after `python data.py`:

        from train import *
        shards = open_shards("data/python", "train")
        config = Config(steps=20, lr=4e-3)
        model = GPT(GPTConfig()).initialize(config.seed)
        for loss, norm in plain_train(config, model, plain_adamw(config, model), shards):
            print(loss)

    prints the same losses as `python train.py --steps 20`."""
    device = model.head.weight.device
    for step in range(begin, config.steps + 1):
        # The data are windows of T + 1 tokens, shuffled by the seed. The batch is the batch_size
        # windows after those consumed. Each gives a row: its first T tokens are the inputs, its
        # last T the targets.
        consumed = (step - 1) * config.batch_size
        rows = plain_batch(shards, model.cfg.seq_len, config.seed, consumed, config.batch_size)
        rows = torch.from_numpy(rows).to(device)                    # (B, T+1)
        inputs, targets = rows[:, :-1], rows[:, 1:]                 # (B, T) each
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)

        optimizer.zero_grad()
        loss = model(inputs, targets) / targets.numel()             # the model returns the sum
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        yield loss.item(), norm.item()


def plain_adamw(config: Config, model: GPT) -> torch.optim.AdamW:
    """Weight decay is for matrices, not for biases and the weights of LayerNorm."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
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
    if step >= config.steps:
        return config.lr * config.min_lr_ratio
    done = (step - decay_start) / (config.steps - decay_start)      # of the decay: 0 to 1
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:                       # "linear" and "wsd"
        left = 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


@torch.no_grad()
def plain_evaluate(config: Config, model: GPT, shards: list) -> float:
    """The mean loss in nats on windows at equal distances, the same in every evaluation."""
    device, seq_len = model.head.weight.device, model.cfg.seq_len
    n = sum((len(tokens) - 1) // seq_len for tokens in shards)
    count = min(n, evaluation.DEFAULT_SEQUENCES)
    if config.eval_tokens is not None:
        count = min(n, ceil_div(config.eval_tokens, seq_len))
    numbers = np.linspace(0, n - 1, count).astype(np.int64)
    total = 0.0
    for first in range(0, count, config.batch_size):
        some = numbers[first:first + config.batch_size]
        rows = torch.from_numpy(plain_windows(shards, seq_len, some)).to(device)
        total += model(rows[:, :-1], rows[:, 1:]).item()
    return total / (count * seq_len)


def plain_launch(given: dict, device: torch.device, job: Job, stack: ExitStack) -> None:
    """`python train.py --plain`: train, evaluate and save by the plain forms alone. The directory
    is one of `python train.py`: either goes on with what the other has saved."""
    config, model_config, begin = startup.prepare(given, job, device, stack)    # flags, --out
    out = Path(config.out)
    meta = read_meta(Path(config.data))
    train_shards = open_shards(config.data, "train")
    val_shards = open_shards(config.data, "val")
    model = model_config.build().initialize(config.seed).to(device)
    optimizer = plain_adamw(config, model)
    if begin.path is None:
        facts = run_state.plain_facts(config, model_config, meta, begin)
    else:
        facts = plain_load(model, optimizer, begin.path)
        run_state.check_plain(facts, config)        # whether it left out batches
    metrics = directory.Metrics(out, rank=0)
    done = facts["step"]
    metrics.write(event="resume" if done else "start", step=done, config=asdict(config))
    seconds = time.perf_counter()
    for loss, norm in plain_train(config, model, optimizer, train_shards, done + 1):
        if not math.isfinite(loss + norm):
            raise RunError(f"step {done + 1} has loss {loss}, gradient norm {norm}: lower --lr")
        done += 1
        consumed = done * config.batch_size
        seconds, before = time.perf_counter(), seconds
        row = dict(step=done, tokens=consumed * model_config.seq_len, loss=loss,
                   lr=learning_rate(config, done), batch_size=config.batch_size, grad_norm=norm,
                   tokens_per_second=config.batch_size * model_config.seq_len / (seconds - before))
        if is_due(done, config.eval_every, config):
            row["val_loss"] = plain_evaluate(config, model, val_shards)
            row["bits_per_byte"] = evaluation.bits_per_byte(row["val_loss"],
                                                            meta["bytes_per_token"])
        if is_due(done, config.log_every or ceil_div(config.steps, 50), config):
            print(", ".join(f"{name} {value:.6g}" for name, value in row.items()), flush=True)
        metrics.write(**row)
        if is_due(done, config.save_every, config):
            facts |= dict(step=done, consumed_samples=consumed, tokens=row["tokens"],
                          config=asdict(config))
            plain_save(model, optimizer, facts, out)
            kept = {file for _, file, _ in facts["monitor"]["checkpoints"]}    # a Run may go back to
            remove_old(out, config.keep, kept)
    metrics.write(event="end", step=done)


def is_due(step: int, every: int, config: Config) -> bool:
    """Whether this step is one of every so many (0: none), or the last one."""
    return step == config.steps or (every > 0 and step % every == 0)


# ---- The same on many ranks -----------------------------------------------------------------
#
# Each process is a rank. With --tp 2 --pp 2, eight ranks are two replicas, each a full copy of the
# model:
#
#                      replica 0: half of the rows         replica 1: the other half
#     stage 0,         rank 0  <-- tp -->  rank 1          rank 4  <-- tp -->  rank 5
#     first layers       | pp                | pp            | pp                | pp
#     stage 1, last    rank 2  <-- tp -->  rank 3          rank 6  <-- tp -->  rank 7
#
#           divides                   what the ranks exchange                         parallelism/
#     tp    each matrix               activations, twice a block; their gradients     tensor.py
#     pp    the layers, in stages     activations, and their gradients                pipeline.py
#     dp    the rows of the batch     gradients: rank 0 with 4, 1 with 5, 2 with 6 .. zero.py
#     cp    the positions of a row    keys and values; gradients, as in dp            context.py
#
# Ranks at the same place in different replicas, such as 0 and 4, train the same parameters. With
# --zero 0 each updates all of them; with 1 to 3 it updates one shard and sends it to the others.


@dataclass
class StepStats:
    """The statistics of a step. Every rank has the same, except for local_loss."""
    loss: float                 # mean over the learnt targets of the global batch, in nats
    activation_norm: float      # mean over the tokens of the norm of the final hidden state
    grad_norm: float            # of the whole model, unscaled, before clipping
    skipped: str                # the reason to skip the update, such as NOT_FINITE; "" if none
    loss_scale: float           # the loss scale used in this step
    local_loss: torch.Tensor    # this rank's summed loss; shows where an inf or NaN first appeared


class Run:
    """A training run on this rank.

    step                the step in progress, from 1
    finished_step       the last step whose update is complete
    saved_step          the step of the last checkpoint written or restored, or None
    optimizer_steps     updates so far, without skipped steps
    batches             data.Batches: the run's position in the data
    loader              loader.Loader: the rows of the batch that this rank reads
    model               this rank's part of the model
    flat                zero.FlatParameters: the buffers that hold its parameters, their gradients
                        and AdamW's state
    scaler              amp.LossScaler, which adjusts the loss scale
    writer              checkpoint.Writer
    monitors            monitors.Monitors: divergence, the gradient noise scale, the log
    stop                signals.StopSignal, once the run trains; before, None
    """

    def __init__(self, config: Config, model_config: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None,
                 identity: dict | None = None):
        """`state` is a loaded checkpoint, or None for a run that begins with step 1. `identity` is
        the run's id and origin (directory.new_run); None: a new id, with weights from the seed."""
        self.config, self.model_config = config, model_config
        self.grid, self.device = grid, device
        self.train_data, self.val_data = train_data, val_data
        self.identity = identity or directory.new_run("seed")
        self.monitors = Monitors(self)
        self.stop = None
        dtype, master_dtype = PRECISIONS[config.dtype]
        # This rank's part of the model: its stage's layers, and its slice of each matrix. Then the
        # flat buffers that hold its parameters, and the hooks that sum their gradients.
        self.model, self.flat = build_rank(model_config, grid, config, (dtype, master_dtype),
                                           device)
        self.writer = checkpoint.Writer(Path(config.out), config.keep, model_config, self.flat,
                                        config.timeout)
        # An empty tensor, of the shape and dtype that one stage sends to the next.
        self.activation_like = like_activations(config, model_config, grid, dtype, device)
        self.loader = Loader(self)
        run_state.restore(self, state)      # step, optimizer_steps, batches, scaler; the weights

    # ---- The loop ---------------------------------------------------------------------------

    def train(self) -> None:
        """Train until step --steps. A signal is handled in another thread. It waits while
        `stop.held()` is active, because the state is being changed."""
        self.model.train()
        while self.step <= self.config.steps:
            self.monitors.before_step()     # skips what --skip-steps or a rollback excludes
            batch = self.loader.next()          # this rank's rows, in microbatches
            lr = learning_rate(self.config, self.step) * self.monitors.lr_factor
            stats = self.compute_gradients(batch)
            with self.stop.held():
                self.update(stats, lr)
                row = self.monitors.after_step(batch, stats, lr)     # of metrics.jsonl
            if row is not None:     # None: the run diverged; an older checkpoint has been restored
                self.evaluate_and_save(row)
            self.step = self.finished_step + 1      # finished_step may be the older checkpoint's
        with self.stop.held():
            self.finish()

    def evaluate_and_save(self, row: dict) -> None:
        """Evaluate and save if the step is the last one, or one of every --eval-every and
        --save-every. `row` is the step's row of metrics.jsonl."""
        last = self.step == self.config.steps
        if last or self.is_due(self.config.eval_every):
            console.announce_evaluation(self)
            row.update(evaluation.evaluate(self))
        saving = last or self.is_due(self.config.save_every)
        difference = self.monitors.before_save(saving)      # between copies that should be equal
        with self.stop.held():
            self.monitors.log.write_row(self, row)
            if difference is not None:
                self.monitors.go_back(difference)         # to an older checkpoint
            elif saving:
                if last:
                    self.monitors.before_end(row)       # fails if the validation loss is not finite
                run_state.save(self)

    def finish(self) -> None:
        self.flat.wait_params()     # other ranks may still be receiving this rank's shard
        # Wait for the last checkpoint. (all_ranks raises one rank's error on every rank.)
        all_ranks(lambda: self.writer.wait(required=True))
        self.stop.close()           # a signal comes too late from here on, on every rank
        console.report_end(self)

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    # ---- One step ---------------------------------------------------------------------------

    def compute_gradients(self, batch: Batch) -> StepStats:
        """Forward and backward, and the sums over the ranks. It changes nothing that a checkpoint
        holds."""
        config, grid, model, flat = self.config, self.grid, self.model, self.flat
        microbatches = batch.microbatches
        tokens_in_batch = batch.size * self.model_config.seq_len        # of all ranks
        learnt = self.train_data.count_learnt(batch.window_ids)         # targets that have a loss

        # 1. Forward and backward. The model returns the sum of a microbatch's losses. Times
        #    loss_factor it is the microbatch's share of the mean loss of the batch, times the loss
        #    scale. The gradients of all microbatches and replicas add up to that of this mean.
        loss_factor = self.scaler.scale / learnt
        flat.zero_grad(self.scaler.scale, tokens_in_batch, learnt)      # --exact needs the counts
        if grid.is_last:
            # The head computes its gradients in forward, so it needs the factor now. Its backward
            # returns them and does not apply the factor again.
            model.head.set_loss_factor(loss_factor)
        if grid.pp == 1:
            loss_sum = self.scalar(0.0)
            for m, (inputs, targets, dropout_seed, positions) in enumerate(microbatches):
                # Hooks start the all-reduce of each bucket of gradients in backward: only in that
                # of the last microbatch, or with ZeRO 2 and 3 in every one.
                flat.prepare_grad_sync(model, last=m == len(microbatches) - 1)
                loss = model(inputs, targets, dropout_seed, positions=positions)
                (loss * loss_factor).backward()
                loss_sum += loss.detach()
                self.monitors.after_microbatch(m)
        else:       # a pipeline: the same in the order of a schedule; stages exchange messages
            schedule = make_schedule(config.pp_schedule, grid, len(microbatches))
            loss_sum = run_schedule(schedule, model, grid, microbatches, self.activation_like, flat)
        self.loader.prefetch()          # while the GPU computes: the next lines wait for it
        self.monitors.after_backward()

        # 2. Wait for the all-reduces of the gradients over the replicas. (With ZeRO they are
        #    reduce-scatters: this rank gets the sum of its shard.)
        flat.finish_grad_sync()

        # 3. Sum the loss and the squared norm over all ranks, so that all make the same decision.
        return self.step_stats(loss_sum, tokens_in_batch, learnt)

    def step_stats(self, loss_sum: torch.Tensor, tokens_in_batch: int, learnt: int) -> StepStats:
        """Compute the step's statistics with one all-reduce."""
        grid, scaler = self.grid, self.scaler
        loss, activation_norm = self.scalar(0.0), self.scalar(0.0)
        # All tp ranks have the same loss: count it once. Their last activations are the same too,
        # unless sequence parallelism splits the positions.
        if grid.is_last and grid.tp_rank == 0:
            loss = loss_sum
        if grid.is_last and (grid.tp_rank == 0 or grid.sequence_parallel):
            activation_norm = self.model.head.norms.to(loss.dtype)
        total = self.sum_across_ranks(dict(loss=loss, activation_norm=activation_norm,
                                           **self.flat.grad_norm_squares()))
        norm, skipped = self.flat.global_norm(total)
        if not math.isfinite(total["loss"]):
            skipped = NOT_FINITE
        return StepStats(
            loss=total["loss"] / learnt,
            activation_norm=total["activation_norm"] / tokens_in_batch,
            grad_norm=norm / scaler.scale, skipped=skipped, loss_scale=scaler.scale,
            local_loss=loss_sum)

    def update(self, stats: StepStats, lr: float) -> None:
        """Update the weights. Every rank skips it if the loss or a gradient is inf or NaN (or, with
        --exact, too large for an exact sum)."""
        config = self.config
        # 4. Clip, and AdamW. One factor both clips the gradients and undoes the loss scale. With
        #    ZeRO each rank updates its shard; the others receive it during the next forward.
        if not stats.skipped:
            self.optimizer_steps += 1
            factor = clip_factor(stats.grad_norm, config.clip, self.scaler.scale)
            self.flat.adamw_step(factor, self.optimizer_steps, lr, config.beta1, config.beta2,
                                 config.weight_decay)
        self.scaler.update(stats.skipped == NOT_FINITE)
        self.finished_step = self.step

    def sum_across_ranks(self, local: dict) -> dict:
        """{name: scalar tensor} -> {name: its sum over all ranks, a number}. Blocks until the sums
        arrive; with several ranks, at most --timeout. It also tells every rank if one has received
        a signal."""
        has_signal = self.stop is not None and self.stop.since is not None
        numbers = [*local.values(), self.scalar(float(has_signal))]
        sums = all_reduce(torch.stack(numbers), self.grid.groups["world"]).wait()
        timeout = self.config.timeout if self.grid.world > 1 else math.inf
        *sums, signals = to_host(sums, timeout).tolist()
        if signals > 0:
            self.stop.receive()
        return dict(zip(local, sums))

    def scalar(self, value: float) -> torch.Tensor:
        """A tensor of shape () on the device, in the dtype used for sums."""
        return torch.full((), value, dtype=sum_dtype(self.device), device=self.device)


# ---- Start ----------------------------------------------------------------------------------

def launch(given: dict, device: torch.device, job: Job, stack: ExitStack) -> None:
    """Build this rank's run, and train or evaluate. `stack` collects what must be closed when the
    process ends."""
    config, model_config, begin = startup.prepare(given, job, device, stack)
    state = startup.load_start(begin, given)        # a checkpoint, None for a new run
    train_data, val_data = startup.open_data(config, model_config, state, job)
    dp = job.world // (config.pp * config.cp * config.tp)
    grid = Grid(dp, config.pp, config.tp, job.rank, cp=config.cp, chunks=config.pp_chunks,
                sequence_parallel=config.sequence_parallel)
    stack.enter_context(checks.advice_on_memory(config, grid))
    make_groups(grid, device, timedelta(seconds=config.timeout))
    stack.callback(grid.groups.clear)       # otherwise gloo's threads may abort the exiting process
    run = Run(config, model_config, grid, device, train_data, val_data, state, begin.run)
    stack.callback(run.writer.close)
    try:
        if config.eval_only:
            console.print_evaluation(run, begin)
        elif startup.has_ended(run):
            console.print_finished(run, state, given, begin)
        else:
            startup.begin_training(run, state, begin, given, learning_rate, stack)
            with StopSignal(run):       # sets run.stop
                run.train()
    except PeerError as error:
        raise PeerError(f"stage {grid.stage}, step {run.step}: {error}") from error


def main() -> None:
    processes.run_process(startup.parse, plain_launch if "--plain" in sys.argv else launch)


if __name__ == "__main__":
    main()
