"""The state of a run: what its checkpoints hold beside tensors, and how it is saved and restored.
train.py calls `restore` at the start and `save` in its loop, startup.py `save` at the start of a
branch. rollback.py and flipped_bits.py call `go_back`; rollback.py and signals.py `submit`, the
second after `judge_checkpoint`. `run` is a train.Run.
"""
import copy
import dataclasses
from pathlib import Path
from typing import Callable, NamedTuple

import checkpoint
from amp import LossScaler, make_scaler
from data import Batches
from runtime.checkpoint_files import step_file
from runtime.directory import load_state
from runtime.divergence import STATISTICS, DivergenceMonitor
from runtime.options import Config
from runtime.processes import RunError, all_ranks, on_rank0


class Progress(NamedTuple):
    """A run's state besides tensors and settings: a checkpoint holds all three."""
    step: int                   # the last finished one
    consumed: int               # sequences of the data: trained on, or left out
    sequences_trained: int      # without those that were left out
    optimizer_steps: int        # updates, without skipped steps
    scaler: LossScaler
    monitor: DivergenceMonitor

    @classmethod
    def of(cls, run) -> "Progress":
        return cls(run.finished_step, run.batches.consumed, run.batches.sequences_trained,
                   run.optimizer_steps, run.scaler, run.monitors.divergence)

    def copy(self) -> "Progress":
        return self._replace(scaler=copy.copy(self.scaler), monitor=self.monitor.copy())


def restore(run, state: dict | None) -> None:
    """Restore a checkpoint; without one, begin before step 1, with weights from --init-from or from
    the seed. On the CPU, in the same layout and with as many threads, a resumed run ends with the
    same bits as an uninterrupted run."""
    config = run.config
    consumed = 0                # sequences
    sequences_trained = 0
    run.step = 1
    run.optimizer_steps = 0
    run.scaler = make_scaler(config.dtype)
    run.monitors.restore(state)
    if state is None:
        parameters = None
        if config.init_from is not None:
            weights = all_ranks(lambda: load_state(config.init_from))
            parameters = weights["parameters"]
        run.flat.initialize(run.model_config, config.seed, parameters)
    else:
        run.step = state["step"] + 1
        run.optimizer_steps = state["optimizer_steps"]
        consumed = state["consumed_samples"]
        sequences_trained = state["tokens"] // run.model_config.seq_len
        if state["config"]["dtype"] == config.dtype:
            run.scaler.load_state_dict(state["scaler"])
        checkpoint.restore(state, run.flat)
    run.batches = Batches(run.train_data, config, consumed, sequences_trained)
    run.loader.prefetched = None        # it may be another batch now
    run.finished_step = run.step - 1
    run.saved_step = None if state is None else run.finished_step


def go_back(run, find: Callable) -> None:
    """Restore an older checkpoint. find() chooses it on rank 0, as directory.latest_valid does.
    Every rank must call it."""
    step = run.step
    run.flat.wait_params()                      # restoring them starts the next all-gather
    all_ranks(run.writer.wait)                  # we may load the file being written
    path, events = on_rank0(find)
    restore(run, all_ranks(lambda: load_state(path), status=1))
    run.monitors.log.compute_clock = None           # the rollback was no computing
    for event in events:
        run.monitors.log.metrics.write(**event, step=step)


def save(run, is_start: bool = False) -> None:
    """Write a checkpoint after the last finished step. `is_start`: save the state before the first
    step. The state is copied; threads write it while training goes on."""
    progress = Progress.of(run)
    judge_checkpoint(run.config, progress, is_start)
    all_ranks(run.writer.wait)          # a rank holds at most one copy of its shards
    submit(run, progress)


def judge_checkpoint(config: Config, progress: Progress, is_start: bool) -> None:
    """Record in the monitor the checkpoint that is about to be written, and whether it is healthy:
    a rollback may return to it. `is_start`: it is the starting state of the run."""
    done = progress.step
    file = step_file(Path(config.out), done).name
    scheduled = done == config.steps or (config.save_every > 0 and done % config.save_every == 0)
    at_floor = config.dtype == "fp16" and progress.scaler.scale <= progress.scaler.min_scale
    progress.monitor.add_checkpoint(done, file, config.keep, scheduled, at_floor, is_start)


def submit(run, progress: Progress) -> None:
    """Start to write a checkpoint: this state and the tensors. The last write must have ended."""
    run.saved_step = progress.step
    run.writer.submit(dict(
        format=checkpoint.FORMAT, run=run.identity, step=progress.step,
        consumed_samples=progress.consumed,
        tokens=progress.sequences_trained * run.model_config.seq_len,
        optimizer_steps=progress.optimizer_steps, config=dataclasses.asdict(run.config),
        model=dataclasses.asdict(run.model_config),
        data=run.train_data.phases, scaler=progress.scaler.state_dict(),
        monitor=dataclasses.asdict(progress.monitor),
        **{key: value for key, value in run.train_data.meta.items()
           if key in ("tokenizer", *checkpoint.OPTIONAL)}))


# ---- Of train.py --plain --------------------------------------------------------------------

def plain_facts(config: Config, model_config, meta: dict, begin) -> dict:
    """What a checkpoint of a new run holds beside tensors. `meta` is shards.read_meta's, `begin` a
    directory.Start."""
    facts = dict(format=checkpoint.FORMAT, run=begin.run, step=0, consumed_samples=0, tokens=0,
                 config=dataclasses.asdict(config), model=dataclasses.asdict(model_config),
                 data=[[0, {meta["fingerprint"]: 1}]], tokenizer=meta["tokenizer"],
                 scaler=make_scaler(config.dtype).state_dict(),
                 monitor=dataclasses.asdict(DivergenceMonitor()))
    return facts | {key: meta[key] for key in checkpoint.OPTIONAL if meta.get(key) is not None}


def check_plain(facts: dict, config: Config) -> None:
    """Raise RunError unless plain_train goes on where this checkpoint is in its data. Forget the
    losses: those of its steps are not judged."""
    monitor = facts["monitor"]
    if facts["consumed_samples"] != facts["step"] * config.batch_size or monitor["excluded"]:
        raise RunError(f"step {facts['step']} of this run has read {facts['consumed_samples']} "
                       f"sequences, or leaves out some: go on without --plain", 2)
    fresh = dataclasses.asdict(DivergenceMonitor())
    facts["monitor"] = monitor | {name: fresh[name] for name in STATISTICS}
