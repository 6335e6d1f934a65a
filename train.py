"""Train a GPT: first the plain program in one process, then the same on many ranks.

    python train.py --plain                                     # the plain program
    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp = 8 / (pp * cp * tp) = 2

The plain program is the whole algorithm: a batch, forward and backward, clipping, AdamW,
evaluation, saving. `Run` does the same on any number of ranks and in any precision. Tests check
that the results agree. Before `Run` read parallel.py, which has each technique in its plain form.

base/ defines the flags. runtime/ has what else a long run needs. docs/extend.md says how to change
it."""
import math
import time
from contextlib import ExitStack
from pathlib import Path

import base      # before numpy and torch: it exits with one line if they are missing

import numpy as np
import torch

import checkpoint
from amp import NOT_FINITE, PRECISIONS, clip_factor, make_scaler
from base.errors import RunError
from base.options import Config
from base.processes import Job, print_rank0, running
from data import Batch, Batches, TokenDataset, open_shards, plain_batch, plain_windows
from model import GPT, GPTConfig
from parallelism.build import Grid, begin_step, build_model, change_blocks, make_flat
from parallelism.collectives import sum_dtype
from parallelism.pipeline import like_activations, run_schedule
from parallelism.schedules import make_schedule
from runtime import (console, directory, evaluation, flipped_bits, plain_run, rollback, run_state,
                     startup)
from runtime.directory import Metrics, Start, lock_output_dir
from runtime.divergence import DivergenceMonitor
from runtime.loader import Loader
from runtime.signals import StopSignal
from runtime.step_stats import StepStats, sum_statistics


# ---- The plain program ----------------------------------------------------------------------

def plain_step(config: Config, model: GPT, optimizer: torch.optim.Optimizer, shards: list,
               step: int) -> tuple[float, float]:
    """One step. Returns its loss and gradient norm. Try it after `python data.py`:

        from train import Config, GPT, GPTConfig, open_shards, plain_adamw, plain_step
        shards = open_shards("data/python", "train")
        config = Config(steps=20, lr=4e-3)              # nano's default learning rate
        model = GPT(GPTConfig()).initialize(config.seed)
        optimizer = plain_adamw(config, model)
        for step in range(1, 21):       # the losses of `python train.py --plain --steps 20`
            print(plain_step(config, model, optimizer, shards, step))
    """
    # Shards are arrays of tokens. Window i of a shard is its tokens i T, i T + 1, ..., (i + 1) T,
    # where T is seq_len. The seed shuffles all windows, and each step takes the next batch_size.
    # The first T tokens are the inputs, the last T the targets: each position predicts the next.
    consumed = (step - 1) * config.batch_size
    rows = plain_batch(shards, model.cfg.seq_len, config.seed, consumed, config.batch_size)
    rows = torch.from_numpy(rows).to(next(model.parameters()).device)       # (B, T + 1)
    inputs, targets = rows[:, :-1], rows[:, 1:]                             # (B, T) each
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)

    optimizer.zero_grad()
    loss = model(inputs, targets) / targets.numel()             # the model returns the sum
    loss.backward()
    max_norm = config.clip if config.clip > 0 else math.inf     # --clip 0: no clipping
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not norm.isfinite():
        raise RunError(f"step {step} has loss {loss} and gradient norm {norm}: lower --lr")
    optimizer.step()
    return loss.item(), norm.item()


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
    seq_len, device = model.cfg.seq_len, next(model.parameters()).device
    n_windows = sum((len(tokens) - 1) // seq_len for tokens in shards)      # they share a token
    count = min(n_windows, 128)
    if config.eval_tokens is not None:
        count = min(n_windows, math.ceil(config.eval_tokens / seq_len))
    window_ids = np.linspace(0, n_windows - 1, count).astype(np.int64)
    loss_sum = 0.0
    model.eval()                        # no dropout
    for first in range(0, count, config.batch_size):
        batch = window_ids[first:first + config.batch_size]
        rows = torch.from_numpy(plain_windows(shards, seq_len, batch)).to(device)   # (B, T + 1)
        loss_sum += model(rows[:, :-1], rows[:, 1:]).item()
    model.train()
    return loss_sum / (count * seq_len)


def plain_train(config: Config, model: GPT, optimizer: torch.optim.Optimizer, begin: Start,
                metrics: Metrics, stop: StopSignal) -> None:
    """Train from the step after begin.step to step config.steps, or until a signal arrives."""
    train_shards = open_shards(config.data, "train")
    val_shards = open_shards(config.data, "val")
    tokens_per_step = config.batch_size * model.cfg.seq_len
    log_every = 10 if config.log_every is None else config.log_every
    for step in range(begin.step + 1, config.steps + 1):
        start = time.perf_counter()
        loss, norm = plain_step(config, model, optimizer, train_shards, step)
        speed = tokens_per_step / (time.perf_counter() - start)
        row = dict(step=step, tokens=step * tokens_per_step, loss=loss, grad_norm=norm,
                   lr=learning_rate(config, step), loss_scale=1.0, tokens_per_second=speed)
        if step == 1 or config.is_due(step, log_every):     # every so many steps, and at the last
            print_rank0(f"step {step}/{config.steps}  loss {loss:.4f}  lr {row['lr']:.2e}  "
                        f"norm {norm:.3f}  {speed:,.0f} tok/s")
        if config.is_due(step, config.eval_every):
            row["val_loss"] = plain_evaluate(config, model, val_shards)
            print_rank0(f"step {step}/{config.steps}  validation {row['val_loss']:.4f}")
        metrics.write(**row)
        stopped = stop.number is not None
        if stopped or config.is_due(step, config.save_every):
            facts = begin.facts | dict(         # what a checkpoint holds besides tensors
                step=step, tokens=row["tokens"], consumed_samples=step * config.batch_size)
            checkpoint.plain_save(model, optimizer, facts, Path(config.out), config.keep)
        if stopped and step < config.steps:
            metrics.write(event="stop", step=step)
            print_rank0(f"stopped and saved after step {step}; run the same command to go on")
            return
    metrics.write(event="end", step=config.steps)
    print_rank0(f"Now sample from it:\npython sample.py --ckpt {config.out}/latest.pt")


def plain_main(given: dict, device: torch.device) -> None:
    """`python train.py --plain`. This program and `Run` can resume each other's checkpoints.
    `given` are the flags of the command line. They win over those of the newest whole checkpoint in
    --out, begin.path, if there is one, and these over the defaults."""
    config, model_config, begin = plain_run.read_config(given)
    with lock_output_dir(Path(config.out), begin.found):        # no other run may write there
        dtype = PRECISIONS[config.dtype].parameters             # fp32 or fp64
        model = model_config.build().initialize(config.seed).to(device, dtype)
        optimizer = plain_adamw(config, model)
        if begin.path is not None:
            checkpoint.plain_load(model, optimizer, begin.path)
        if begin.step >= config.steps:
            print_rank0(f"{begin.path} is step {begin.step} of {config.steps}: raise --steps")
            return
        metrics = plain_run.open_metrics(config, model_config, begin)       # metrics.jsonl
        # Ctrl-C or SIGTERM sets stop.number. The process then ends when this block does.
        with StopSignal() as stop:
            plain_train(config, model, optimizer, begin, metrics, stop)


# ---- The learning rate of both programs -----------------------------------------------------

def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `lr` in warmup_steps, then decay to lr * min_lr_ratio at the last step.
    "wsd" (warm-up, stable, decay: Hu et al. 2024, section 4) decays in the last decay_ratio of the
    steps alone. A checkpoint from before the decay can be continued with more --steps."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_start = config.warmup_steps
    if config.lr_schedule == "wsd":
        decay_start = max(decay_start, config.steps - round(config.decay_ratio * config.steps))
    if step <= decay_start:
        return config.lr
    done = (step - decay_start) / (config.steps - decay_start)      # of the decay: 0 to 1
    decays = dict(cosine=0.5 * (1 + math.cos(math.pi * done)), linear=1 - done, wsd=1 - done)
    left = decays[config.lr_schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


# ---- The same on many ranks -----------------------------------------------------------------
#
# For training in one process you can stop here. Now each process is a rank. With --tp 2 --pp 2,
# eight ranks are two replicas of the whole model:
#
#                    replica 0: half of the rows         replica 1: the other half
#     first layers   rank 0  <-- tp -->  rank 1          rank 2  <-- tp -->  rank 3      stage 0
#                      | pp                | pp            | pp                | pp
#     last layers    rank 4  <-- tp -->  rank 5          rank 6  <-- tp -->  rank 7      stage 1
#
# Ranks at the same place in different replicas, such as 0 and 2, train the same parameters. With
# --zero 0 each updates all of them, otherwise a part (parallel.py, section 4). --cp divides the
# positions of a replica's sequences among ranks, --ep the experts of a mixture among replicas.
#
#     the plain program       Run, on each rank
#
#     plain_train             train, and evaluate_and_save
#       plain_step              compute_gradients:
#         plain_batch             Loader.next: this rank's rows of the batch, in microbatches
#         zero_grad               in the flat buffers of zero.FlatParameters
#         forward, backward       for each microbatch, with pp in the order of a schedule
#                                 finish_grad_sync: waits for the sums of gradients over replicas
#         norm                    step_stats: loss and squared norm, summed over all ranks
#                               update:
#         clipping                all ranks clip by the same factor, or all skip the step
#         AdamW                   on all of the rank's parameters, or on a part
#       plain_evaluate          evaluation.evaluate
#       plain_save              checkpoint_writer.Writer: the same file, from all ranks' parts


class Run:
    """A training run on this rank. `state` is a loaded checkpoint, or None for a new run."""

    def __init__(self, config: Config, model_config: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None):
        self.config, self.model_config = config, model_config
        self.grid, self.device = grid, device
        self.train_data, self.val_data = train_data, val_data
        self.identity = directory.new_run("seed")       # an id, and that it begins from the seed
        self.log = None                     # startup.begin_training opens it
        self.stop = StopSignal()            # remembers a signal to this process

        # 1. The blocks of this stage (pp), whose layers hold a slice of each matrix (tp), exchange
        #    keys and values (cp), or exchange tokens (ep).
        self.model = build_model(model_config, grid, config, device)
        # 2. Their parameters become views of flat buffers, which are few and large. Hooks sum the
        #    gradients over the replicas as soon as backward has filled a buffer (dp, ZeRO).
        self.flat = make_flat(self.model, model_config, grid, config, device)
        # 3. A block may be compiled, run again in backward (--recompute), or begin with a gather
        #    of its parameters (ZeRO).
        change_blocks(self.model, self.flat, model_config, config, device)
        # An empty tensor: what one stage sends to the next has its shape and dtype.
        self.activation_like = like_activations(config, model_config, grid, device)
        self.writer = run_state.make_writer(self)       # of checkpoints
        self.restore(state)

    def restore(self, state: dict | None) -> None:
        """Load the state of a checkpoint. Without one, begin before step 1. On the CPU, in the same
        layout and with as many threads, a resumed run has the bits of an uninterrupted one."""
        config = self.config
        self.scaler = make_scaler(config.dtype)
        if state is None:
            done = dict(step=0, consumed_samples=0, tokens=0, optimizer_steps=0)
            self.flat.initialize(self.model_config, config.seed, run_state.initial_weights(config))
        else:
            done = state
            if state["config"]["dtype"] == config.dtype:
                self.scaler.load_state_dict(state["scaler"])
            checkpoint.restore(state, self.flat)
        self.step = done["step"] + 1                    # in progress, from 1
        self.finished_step = done["step"]               # the last one whose update is complete
        self.optimizer_steps = done["optimizer_steps"]  # updates so far, without skipped steps
        self.batches = Batches(self.train_data, config, consumed=done["consumed_samples"],
                               sequences_trained=done["tokens"] // self.model_config.seq_len)
        self.loader = Loader(self)                      # of the rows that this rank reads
        self.divergence = DivergenceMonitor.restored(state, config, self.train_data)

    # ---- The loop ---------------------------------------------------------------------------

    def train(self) -> None:
        """Train until step --steps, or until a signal arrives."""
        self.model.train()
        # A signal may reach one rank alone. The sums of a step tell all of it: self.stop.agreed.
        while self.step <= self.config.steps and not self.stop.agreed:
            start = time.perf_counter()
            batch = self.loader.next()          # this rank's rows. Also advances self.batches
            # lr_factor is 1 until a divergence has reduced it.
            lr = learning_rate(self.config, self.step) * self.divergence.lr_factor
            stats = self.compute_gradients(batch)
            self.update(stats, lr)
            row = self.log.new_row(self, batch, stats, lr, time.perf_counter() - start)
            if not rollback.go_back_if_diverged(self, batch, stats, row):
                self.evaluate_and_save(row)
            # After a divergence or a flipped bit, finished_step is that of an older checkpoint.
            self.step = self.finished_step + 1
        self.flat.wait_params()             # other ranks may still be receiving this rank's shard
        run_state.wait_for_last_save(self)
        console.report_end(self)

    def evaluate_and_save(self, row: dict) -> None:
        """Evaluate every --eval-every steps and save every --save-every steps, and both after the
        last one. Save also if a signal has arrived. `row` is the step's row of metrics.jsonl."""
        config = self.config
        if config.is_due(self.step, config.eval_every):
            row.update(evaluation.evaluate(self))
        self.log.write_row(self, row)
        saving = config.is_due(self.step, config.save_every) or self.stop.agreed
        # Ranks hold copies of some state. If two differ, a bit has flipped: it is not saved.
        if saving or config.is_due(self.step, config.check_every):
            if flipped_bits.go_back_if_found(self):
                return
        if saving:
            rollback.fail_if_diverged(self, row)
            run_state.save(self)

    # ---- One step ---------------------------------------------------------------------------

    def compute_gradients(self, batch: Batch) -> StepStats:
        """Forward and backward, and the sums over the ranks. No state of a checkpoint changes."""
        config, grid, model, flat = self.config, self.grid, self.model, self.flat
        # Of all ranks. These two differ in conversations alone, where only answers are targets.
        tokens_in_batch = batch.size * self.model_config.seq_len
        targets_in_batch = self.train_data.count_targets(batch.window_ids)

        # 1. Forward and backward. The model returns the sum of a microbatch's losses. loss_factor
        #    makes it the microbatch's share of the mean loss of the batch, times the loss scale. So
        #    the gradients of all microbatches and replicas simply add up.
        loss_factor = self.scaler.scale / targets_in_batch
        # Zero the gradients, and give their factors to the modules that need them in forward: the
        # parallel head computes its gradients there, and the routers of a mixture have own losses.
        begin_step(model, flat, self.scaler.scale, tokens_in_batch, targets_in_batch)
        if grid.pp == 1:
            loss_sum = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
            for m, (inputs, targets, dropout_seed, positions) in enumerate(batch.microbatches):
                # Hooks start the all-reduce of each bucket of gradients in the backward of the last
                # microbatch. With ZeRO 2 and 3 they do so in every one.
                is_last = m == len(batch.microbatches) - 1
                flat.prepare_grad_sync(model, is_last)
                loss = model(inputs, targets, dropout_seed, positions=positions)
                (loss * loss_factor).backward()
                loss_sum += loss.detach()
        else:       # a pipeline: the same work in the order of a schedule, with messages between
                    # stages. The last one applies loss_factor, which begin_step gave to its head
            schedule = make_schedule(config.pp_schedule, grid, len(batch.microbatches))
            loss_sum = run_schedule(schedule, model, grid, batch.microbatches,
                                    self.activation_like, flat)
        self.loader.prefetch()      # the next batch, while the GPU still computes this one

        # 2. Wait for the all-reduces of the gradients over the replicas. With ZeRO they are
        #    reduce-scatters, and this rank gets the sum of its shard.
        flat.finish_grad_sync()
        return self.step_stats(loss_sum, tokens_in_batch, targets_in_batch)

    def step_stats(self, loss_sum: torch.Tensor, tokens: int, targets: int) -> StepStats:
        """3. Sum the loss and the squared norm over all ranks, so that all decide alike."""
        return sum_statistics(self, loss_sum, tokens, targets)

    def update(self, stats: StepStats, lr: float) -> None:
        """4. Clip, and AdamW. One factor both clips the gradients and undoes the loss scale. With
        ZeRO each rank updates its shard, and the others receive it during the next forward. Every
        rank skips the update if the loss or a gradient is inf or NaN, or with --exact if one is too
        large to be summed exactly."""
        config = self.config
        if not stats.skipped:
            self.optimizer_steps += 1
            factor = clip_factor(stats.grad_norm, config.clip, self.scaler.scale)
            self.flat.adamw_step(factor, self.optimizer_steps, lr, config.beta1, config.beta2,
                                 config.weight_decay)
        self.scaler.update(stats.skipped == NOT_FINITE)
        self.finished_step = self.step


# ---- Start ----------------------------------------------------------------------------------

def launch(given: dict, device: torch.device, job: Job, stack: ExitStack) -> None:
    """Build this rank's run, and train or evaluate. `stack` closes at exit what is opened here."""
    config, model_config, begin = startup.prepare(given, job, device, stack)
    train_data, val_data = startup.open_data(config, model_config, begin.state, job)
    grid = startup.join_ranks(config, job, device, stack)
    run = Run(config, model_config, grid, device, train_data, val_data, begin.state)
    with startup.errors_name_step(run):
        if config.eval_only:
            console.print_evaluation(run, begin)
        elif startup.has_ended(run):
            console.print_finished(run, begin)
        else:
            startup.begin_training(run, begin, learning_rate, stack)
            run.train()


def main() -> None:
    job, given, device, timeout = startup.parse()       # exits here if a flag is wrong
    with running(job, device, timeout) as stack:
        if given.get("plain"):
            plain_main(given, device)
        else:
            launch(given, device, job, stack)


if __name__ == "__main__":
    main()
