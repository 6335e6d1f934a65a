"""The state of a run: what its checkpoints hold beside tensors, and how it is saved and restored.
`run` is a train.Run."""
import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Callable

import checkpoint
from amp import LossScaler, make_scaler
from base.agreement import all_ranks, on_rank0
from base.checkpoint_files import step_file
from base.options import Config
from data import Batches, TokenDataset
from model import GPTConfig
from parallelism.pieces import file_order
from parallelism.zero import FlatParameters
from runtime.checkpoint_writer import Writer
from runtime.directory import latest_valid, new_run
from runtime.divergence import DivergenceMonitor
from runtime.folder_writer import FolderWriter


def make_writer(config: Config, flat: FlatParameters) -> Writer:
    """The writer of the run's checkpoints, in the format of --checkpoint-format. Every rank calls
    it."""
    kind = FolderWriter if config.checkpoint_format == "folder" else Writer
    return kind(Path(config.out), config.keep, flat, file_order(flat), config.timeout,
                new_run("seed"))


@dataclasses.dataclass
class Progress:
    """How far a run has come: what its checkpoints hold beside tensors."""
    step: int                   # the last one whose update is complete
    optimizer_steps: int        # updates so far, without skipped steps
    batches: Batches            # where the run is in its data
    scaler: LossScaler
    monitor: DivergenceMonitor


def restore(state: dict | None, flat: FlatParameters, config: Config, model_config: GPTConfig,
            train_data: TokenDataset) -> Progress:
    """Fill the buffers from a checkpoint, whose tensors leave `state`. Without one, begin before
    step 1. On the CPU, in the same layout and with as many threads, a resumed run has the bits of
    an uninterrupted one."""
    scaler = make_scaler(config.dtype)
    if state is None:
        done = dict(step=0, consumed_samples=0, tokens=0, optimizer_steps=0)
        load_weights = None
        if config.init_from is not None:
            weights = all_ranks(lambda: checkpoint.load(Path(config.init_from)))["parameters"]
            load_weights = partial(checkpoint.load_shards, weights, kind="master")
        flat.initialize(model_config, config.seed, load_weights)
    else:
        done = state
        if state["config"]["dtype"] == config.dtype:
            scaler.load_state_dict(state["scaler"])
        checkpoint.restore(state, flat)
    return Progress(done["step"], done["optimizer_steps"],
                    Batches(train_data, config, consumed=done["consumed_samples"],
                            sequences_trained=done["tokens"] // train_data.seq_len),
                    scaler, DivergenceMonitor.restored(state, config, train_data))


def go_back(run, find: Callable) -> None:
    """Restore an older checkpoint: the first whole one of the list that find() returns on rank 0
    (directory.latest_valid). Every rank must call it."""
    step = run.progress.step
    run.flat.wait_params()                      # restoring them starts the next all-gather
    all_ranks(run.writer.wait)                  # we may load the file being written
    _, state, events = latest_valid(on_rank0(find))
    run.progress = restore(state, run.flat, run.config, run.model_config, run.train_data)
    for event in events:
        run.log.metrics.write(**event, step=step)


def save(run, is_start: bool = False) -> None:
    """Write a checkpoint after the last finished step, and record in the monitor whether it is
    healthy: a rollback may return to it. `is_start`: it is the starting state of the run. Of a file
    the state is copied, and threads write it while training goes on."""
    began = time.monotonic()
    config, progress = run.config, run.progress
    step, scaler = progress.step, progress.scaler
    progress.monitor.add_checkpoint(
        step, step_file(Path(config.out), step, config.checkpoint_format).name, config.keep,
        scheduled=config.is_nth_or_last(step, config.save_every), is_start=is_start,
        at_floor=config.dtype == "fp16" and scaler.scale <= scaler.min_scale)
    all_ranks(run.writer.wait)          # a rank holds at most one copy of its shards
    submit(run)
    run.log.save_seconds = time.monotonic() - began


def submit(run) -> None:
    """Start to write a checkpoint: this state and the tensors. The last write must have ended. The
    files to which a rollback may return stay."""
    progress = run.progress
    facts = make_facts(run.config, run.model_config, run.train_data, run.writer.identity,
                       progress.scaler, progress.monitor) | dict(
        step=progress.step, optimizer_steps=progress.optimizer_steps,
        tokens=progress.batches.sequences_trained * run.model_config.seq_len,
        consumed_samples=progress.batches.consumed)
    run.writer.submit(facts, {file for _, file, _ in progress.monitor.checkpoints})


def make_facts(config: Config, model_config: GPTConfig, train_data: TokenDataset, identity: dict,
               scaler: LossScaler, monitor: DivergenceMonitor) -> dict:
    """What a checkpoint holds besides tensors and how far the run has come. `identity` is the run's
    id and origin (directory.new_run)."""
    of_tokenizer = {key: value for key, value in train_data.meta.items()
                    if key in ("tokenizer", *checkpoint.OPTIONAL)}
    return of_tokenizer | dict(
        format=checkpoint.FORMAT, run=identity, config=dataclasses.asdict(config),
        model=dataclasses.asdict(model_config), data=train_data.mixture.phases,
        scaler=scaler.state_dict(), monitor=dataclasses.asdict(monitor))
