"""Train a GPT: one step, the loop around it, evaluation, saving and resuming.

    python train.py                                             # one process
    torchrun --nproc_per_node=8 train.py --tp 2 --pp 2          # dp = 8 / (tp pp) = 2

`plain_train` is all of it in its plainest form, on one CPU; a test compares it with `Run`, which is
the same in any layout, precision and on any device:

    a batch       data.py         the same batch in every layout; this replica's microbatches
    forward,      model.py        the GPT, of which parallel.py builds this rank's part
    backward      parallelism/    a pipeline's schedule, gradients summed over replicas
    the sums      `Run.reduce`    loss and norms, summed over all ranks: they decide the same
    the update    amp.py          loss scale and clipping; parallelism/zero.py: AdamW
    after it      runtime/        a diverged run goes back; metrics.jsonl; the console
                  checkpoint.py   the state, written while training goes on

Resuming is exact: on the CPU, with the same layout, a resumed run is bit-identical to an
uninterrupted one. Flags come from the command line, then the checkpoint, then the defaults; layout,
precision and paths are not restored. runtime/options.py has the flags.
"""
import signal

if __name__ == "__main__":      # until training starts, Ctrl-C exits immediately
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import dataclasses
import math
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch

import checkpoint
from amp import PRECISIONS, clip_factor, make_scaler
from data import PADDING, Batch, Batches, Source, TokenDataset, split_microbatches
from model import GPT, IGNORE_INDEX, GPTConfig, derive_seed
from parallel import Grid, build_rank
from parallelism.collectives import PeerError, all_reduce, sum_dtype, to_host
from parallelism.groups import make_groups
from parallelism.pipeline import run_schedule
from parallelism.schedules import make_schedule
from runtime import (checks, console, dashboards, devices, directory, options, processes, recovery,
                     startup)
from runtime.divergence import BAD_STEPS, DivergenceMonitor
from runtime.options import Config
from runtime.processes import Job, StopSignal, all_ranks


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
        position = (step - 1) * config.batch_size                       # in the data
        window_ids = data.window_ids(config.seed, position, config.batch_size)
        tokens = torch.from_numpy(data.tokens_of(window_ids))           # (B, T + 1)
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


def learning_rate(config, step: int) -> float:
    """Linear warm-up to `lr` at step warmup_steps, then decay to lr * min_lr_ratio at the last."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


@dataclass
class StepStats:
    """The statistics of a step, equal on every rank."""
    loss: float                 # mean over the tokens of the global batch, in nats
    activation_norm: float      # mean over the tokens of the norm of the last activations
    grad_norm: float            # of the whole model, unscaled, before clipping
    found_inf: bool             # the loss or a gradient of some rank is not finite
    stop_requested: bool        # some rank received a signal
    loss_scale: float           # that the step used
    scale_can_fall: bool        # fp16: this scale is above its floor


class Run:
    """A training run on this rank.

    step                the step in progress, from 1
    optimizer_steps     updates so far; a skipped step counts as none
    batches             data.Batches: the position in the data
    model, flat         this rank's part of the model; the buffers that hold its parameters
    scaler, monitor     the loss scale; the judgement of divergence
    """

    def __init__(self, config: Config, model_config: GPTConfig, grid: Grid, device: torch.device,
                 train_data: TokenDataset, val_data: TokenDataset, state: dict | None,
                 identity: dict | None = None):
        """`state` is a loaded checkpoint, or None for a run that begins before step 1; `identity`
        is the run's id and origin (directory.new_run)."""
        self.config, self.model_config = config, model_config
        self.grid, self.device = grid, device
        self.train_data, self.val_data = train_data, val_data
        self.identity = identity or directory.new_run("seed")
        self.log = None                         # console.RunLog, for `train`
        dtypes = PRECISIONS[config.dtype]
        self.model, self.flat = build_rank(model_config, grid, config, dtypes, device)
        self.writer = checkpoint.Writer(Path(config.out), config.keep, model_config, self.flat,
                                        config.timeout)
        # Shape and type of the activations that one stage sends to the next.
        positions = model_config.seq_len
        if grid.sequence_parallel:
            positions //= grid.tp
        self.activation_like = torch.empty(config.micro_batch, positions, model_config.n_embd,
                                           dtype=dtypes[0], device=device)
        self.restore(state)

    # ---- One step ---------------------------------------------------------------------------

    def train_step(self, batch: Batch, lr: float, stop_requested) -> StepStats:
        """Forward, backward and update. A non-finite number skips only the update, on all ranks."""
        config, grid, model, flat = self.config, self.grid, self.model, self.flat
        tokens_in_batch = batch.size * self.model_config.seq_len

        # Forward and backward. Each loss is multiplied by scale = loss scale / tokens, so the sum
        # of the gradients is the gradient of the mean loss (times the loss scale).
        scale = self.scaler.scale / tokens_in_batch
        flat.zero_grad()
        if grid.is_last:
            model.head.begin_step(scale)
        if grid.pp == 1:
            loss_sum = self.zero()
            for m, (tokens, targets, dropout_seed) in enumerate(batch.microbatches):
                # After the last backward, gradients are summed over the replicas.
                flat.prepare_grad_sync(model, last=m == len(batch.microbatches) - 1)
                loss = model(tokens, targets, dropout_seed)     # the sum over this rank's tokens
                (loss * scale).backward()
                loss_sum += loss.detach()
        else:
            schedule = make_schedule(config.pp_schedule, grid, len(batch.microbatches))
            loss_sum = run_schedule(schedule, model, grid, batch.microbatches,
                                    self.activation_like, flat)
        if self.step < config.steps:
            self.batches.prefetch(self.step + 1)                # while a GPU computes

        # Sum over ranks: the gradients, then the numbers on which all ranks must agree.
        flat.finish_grad_sync()
        stats = self.reduce(loss_sum, tokens_in_batch, stop_requested)

        # Clip, and AdamW on this rank's shard of the parameters.
        if not stats.found_inf:
            self.optimizer_steps += 1
            factor = clip_factor(stats.grad_norm, config.clip, self.scaler.scale)
            flat.step(factor, self.optimizer_steps, lr, config.beta1, config.beta2,
                      config.weight_decay)
        self.scaler.update(stats.found_inf)
        self.loss_sum = loss_sum
        return stats

    def zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=sum_dtype(self.device), device=self.device)

    def reduce(self, loss_sum: torch.Tensor, tokens_in_batch: int, stop_requested) -> StepStats:
        """The statistics of a step, by one all-reduce."""
        grid, scaler = self.grid, self.scaler
        local = dict(loss=self.zero(), activation_norm=self.zero(), stop=self.zero())
        # All tp ranks have the same loss: count it once. Their last activations are the same too,
        # unless sequence parallelism splits the positions.
        if grid.is_last and grid.tp_rank == 0:
            local["loss"] = loss_sum / tokens_in_batch
        if grid.is_last and (grid.tp_rank == 0 or grid.sequence_parallel):
            local["activation_norm"] = self.model.head.norms.to(loss_sum) / tokens_in_batch
        if stop_requested:
            local["stop"] += 1
        # `squares` counts each parameter once; `all_squares` counts replicas too, so it is not
        # finite if any gradient of any rank is not.
        local["squares"], local["all_squares"] = self.flat.grad_norm_squares()
        total = self.sum_across_ranks(local)
        finite = math.isfinite(total["loss"]) and math.isfinite(total["all_squares"])
        return StepStats(
            total["loss"], total["activation_norm"], math.sqrt(total["squares"]) / scaler.scale,
            found_inf=not finite, stop_requested=total["stop"] > 0, loss_scale=scaler.scale,
            scale_can_fall=self.config.dtype == "fp16" and scaler.scale > scaler.min_scale)

    def sum_across_ranks(self, local: dict) -> dict:
        """{name: scalar tensor} -> {name: its sum over all ranks, a number}. Waits for the device,
        up to --timeout if ranks may be late."""
        sums = all_reduce(torch.stack(list(local.values())), self.grid.groups["world"]).wait()
        timeout = self.config.timeout if self.grid.world > 1 else math.inf
        return dict(zip(local, to_host(sums, timeout).tolist()))

    def load_microbatches(self, dataset: TokenDataset, window_ids: np.ndarray, step: int) -> list:
        """This replica's microbatches of the windows (B,): (tokens (b, T), targets (b, T), dropout
        seed) each; tokens and targets are None on middle stages. PADDING has no targets."""
        grid = self.grid
        # Ranks that hold different rows, or positions (sequence parallelism), need different masks.
        mask_owner = [grid.dp_rank]
        if grid.sequence_parallel:
            mask_owner.append(grid.tp_rank)
        rows = split_microbatches(window_ids, self.config.micro_batch, grid.dp_rank, grid.dp)
        microbatches = []
        for m, ids in enumerate(rows):                                          # (b,)
            inputs, targets = None, None
            if grid.is_first or grid.is_last:
                tokens = torch.from_numpy(dataset.tokens_of(ids))               # (b, T + 1)
                tokens_in, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
                targets[torch.from_numpy(ids == PADDING)] = IGNORE_INDEX
                inputs = devices.to_device(tokens_in, self.device)
                targets = devices.to_device(targets, self.device)
            seed = derive_seed(self.config.seed, step, m, *mask_owner)
            microbatches.append((inputs, targets, seed))
        return microbatches

    # ---- The loop ---------------------------------------------------------------------------

    def train(self, stop: StopSignal) -> None:
        """Train up to --steps, or until `stop.requested`."""
        config = self.config
        self.model.train()
        while self.step <= config.steps:
            started = time.perf_counter()
            recovery.skip_excluded(self)                    # by --skip-steps or a rollback
            batch = self.batches.next(self.step)
            lr = learning_rate(config, self.step) * self.monitor.lr_factor
            stats = self.train_step(batch, lr, stop.requested)
            row = self.log.new_row(self, batch, stats, lr, time.perf_counter() - started)
            if recovery.after_step(self, batch, stats, row):
                continue                                    # back at an earlier step

            last = self.step == config.steps
            stopping = stats.stop_requested and not last
            if last or (self.is_due(config.eval_every) and not stopping):
                row |= self.evaluate()
            self.log.step(self, row)
            if last or stopping or self.is_due(config.save_every):
                self.save()
            self.step += 1
            if stopping:
                break
        self.finish()

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.flat.wait_params()     # stay until the other ranks have received this rank's shard
        all_ranks(lambda: self.writer.wait(required=True))
        done = self.step - 1
        if done == self.config.steps:
            self.log.event("end", step=done)
            return
        command = "the same command"
        if self.config.resume == "never":
            command += " without --resume never"
        self.log.event("stop", f"stopped and saved after step {done}; run {command} to go on",
                       step=done)

    # ---- Evaluation -------------------------------------------------------------------------

    def evaluate(self) -> dict:
        """The fields of an evaluation in a row of metrics.jsonl: `val_loss`, the mean over the
        sources by weight; of several sources also the loss and the epochs of each."""
        losses = {s.name: self.evaluate_source(s) for s in self.val_data.sources.values()}
        row = dict(val_loss=self.val_data.average(losses.values()))
        if len(losses) > 1:
            epochs = self.train_data.epochs(self.batches.position)
            row |= {f"val_loss/{name}": loss for name, loss in losses.items()}
            row |= {f"epochs/{name}": count for name, count in epochs.items()}
        return row

    @torch.no_grad()
    def evaluate_source(self, source: Source) -> float:
        """Mean loss in nats on fixed validation windows, the same in every layout."""
        self.model.eval()
        count = console.eval_sequences(self.config, self.model_config, source)
        at_once = self.grid.dp * self.config.micro_batch
        window_ids = np.full(math.ceil(count / at_once) * at_once, PADDING)
        evenly_spaced = np.linspace(0, source.n_windows - 1, count).astype(np.int64)
        window_ids[:count] = source.first + evenly_spaced
        total = 0.0
        for first in range(0, len(window_ids), 64 * at_once):       # so that --timeout is for one
            part = window_ids[first:first + 64 * at_once]
            microbatches = self.load_microbatches(self.val_data, part, step=0)
            loss_sum = self.forward(microbatches)
            if self.grid.tp_rank > 0:       # all tp ranks have the same loss: count it once
                loss_sum.zero_()
            total += self.sum_across_ranks(dict(loss=loss_sum))["loss"]
        self.model.train()
        return total / (count * self.model_config.seq_len)

    def forward(self, microbatches: list) -> torch.Tensor:
        """The sum of this replica's losses; 0 on every stage but the last."""
        if self.grid.pp > 1:
            schedule = make_schedule("gpipe", self.grid, len(microbatches))
            forwards = [(op, m, chunk) for op, m, chunk in schedule if op == "F"]
            return run_schedule(forwards, self.model, self.grid, microbatches,
                                self.activation_like)
        loss_sum = self.zero()
        for tokens, targets, _ in microbatches:
            loss_sum += self.model(tokens, targets)
        return loss_sum

    # ---- Checkpoints ------------------------------------------------------------------------

    def restore(self, state: dict | None) -> None:
        """Restore a checkpoint; without one, begin before step 1, from the seed or from the weights
        of --init-from. An older checkpoint's monitor may have other fields."""
        config, seq_len = self.config, self.model_config.seq_len
        position = 0                # in the data, in sequences
        sequences_trained = 0
        self.step = 1
        self.optimizer_steps = 0
        self.scaler = make_scaler(config.dtype)
        self.monitor = DivergenceMonitor()
        if state is None:
            weights = all_ranks(lambda: directory.load_state(config.init_from)) or {}
            self.flat.initialize(self.model_config, config.seed, weights.get("parameters"))
        else:
            self.step = state["step"] + 1
            self.optimizer_steps = state["optimizer_steps"]
            position = state["consumed_samples"]
            sequences_trained = state["tokens"] // seq_len
            vars(self.monitor).update(state["monitor"])
            if config.rollback == "on":     # the checkpoint may have been saved while diverging
                self.monitor.bad = min(self.monitor.bad, BAD_STEPS - 1)
            if not recovery.losses_stay_comparable(config, self.train_data, state):
                self.monitor.forget_losses()
            if state["config"]["dtype"] == config.dtype:
                self.scaler.load_state_dict(state["scaler"])
            checkpoint.restore(state, self.flat)
        load = partial(self.load_microbatches, self.train_data)
        self.batches = Batches(self.train_data, config, load, position, sequences_trained)

    def save(self, begins: bool = False) -> None:
        """Write a checkpoint after the step in progress, and record whether it is healthy.
        `begins`: the run has just begun from a file, and no step is in progress."""
        config = self.config
        done = self.step - 1 if begins else self.step
        at_floor = config.dtype == "fp16" and self.scaler.scale <= self.scaler.min_scale
        scheduled = self.is_due(config.save_every) or self.step == config.steps
        file = checkpoint.step_file(Path(), done).name
        self.monitor.add_checkpoint(done, file, config.keep, scheduled, at_floor, begins)
        self.write_checkpoint(done)

    def write_checkpoint(self, done: int) -> None:
        """Copy the state after step `done`; threads write it while training goes on."""
        all_ranks(self.writer.wait)         # a rank holds at most one copy of its shards
        batches = self.batches
        self.writer.submit(dict(
            format=checkpoint.FORMAT, run=self.identity, step=done,
            consumed_samples=batches.position,
            tokens=batches.sequences_trained * self.model_config.seq_len,
            optimizer_steps=self.optimizer_steps, config=dataclasses.asdict(self.config),
            model=dataclasses.asdict(self.model_config),
            tokenizer=self.train_data.meta["tokenizer"], data=self.train_data.phases,
            scaler=self.scaler.state_dict(), monitor=dataclasses.asdict(self.monitor)))


# ---------------------------------------------------------------------------------------------
# Start
# ---------------------------------------------------------------------------------------------


def parse(job: Job) -> tuple[dict, torch.device, timedelta]:
    """The flags that were given, the device, and --timeout. Raises ValueError."""
    given = options.parse_flags(sys.argv[1:])
    config = Config(**given)
    checks.check_grid(job.world, config)
    return given, devices.choose_device(config, job), timedelta(seconds=config.timeout)


def launch(given: dict, device: torch.device, job: Job, stack: ExitStack) -> int | None:
    """Build the run on this rank and train, or evaluate, to its end. Returns the number of the
    signal that stopped it, or None."""
    processes.assert_equal_across_ranks(
        (given, device.type), "the ranks have different flags or devices: start all with one "
        "command")
    devices.assert_own_gpu(device)
    config, model_config, begin = processes.on_rank0(
        lambda: startup.prepare(given, job, device, stack))
    path = begin.path if begin.kind in ("continue", "resume") else None
    state = all_ranks(lambda: directory.load_state(path))
    if begin.kind == "resume":
        directory.start_branch(state, "lr" in given)
    train_data, val_data = startup.open_data(config, model_config, state, job)

    grid = Grid(job.world // (config.tp * config.pp), config.pp, config.tp, job.rank,
                config.sequence_parallel, config.pp_chunks)
    make_groups(grid, device, timedelta(seconds=config.timeout))
    stack.callback(grid.groups.clear)   # gloo's threads can abort a process that exits
    run = Run(config, model_config, grid, device, train_data, val_data, state, begin.run)
    stack.callback(run.writer.close)
    if state is not None:
        for name in checkpoint.STATE:
            del state[name]             # restored: unmap the file
    try:
        return start(run, state, begin, given, stack)
    except PeerError as error:
        raise PeerError(f"stage {grid.stage}, step {run.step}: {error}") from error


def start(run: Run, state: dict | None, begin: directory.Start, given: dict,
          stack: ExitStack) -> int | None:
    """Evaluate; or print how the run begins, and train. `state` no longer holds tensors."""
    config = run.config
    if config.eval_only:
        console.print_evaluation(run, begin)
        return None
    if run.step > config.steps:
        console.print_finished(run, begin)
        return None
    run.log = console.RunLog(all_ranks(lambda: directory.Metrics(Path(config.out), run.grid.rank)))
    if config.log is not None and run.grid.rank == 0:
        stack.enter_context(dashboards.follower(config))
    console.print_summary(run)
    if state is None:
        console.report_start(run, begin)
    else:
        stored = Config(**options.restored_flags(state))
        console.report_resume(run, state, begin, given, learning_rate(stored, run.step),
                              learning_rate(config, run.step))
    if begin.kind in ("init-from", "resume"):   # after this save, FILE is no longer needed
        run.save(begins=True)
    console.print_notes(run, given, resumed=state is not None)
    stop = StopSignal()
    run.train(stop)
    if run.step <= config.steps:
        return stop.number
    if run.train_data.meta["tokenizer"] in ("gpt2", "bytes"):
        file = shlex.quote(f"{config.out}/latest.pt")
        processes.print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}")
    return None


def main() -> None:
    processes.run_process(parse, launch)


if __name__ == "__main__":
    main()
