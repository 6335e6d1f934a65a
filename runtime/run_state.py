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
from parallelism.zero import FlatParameters
from runtime.checkpoint_writer import Writer
from runtime.directory import latest_valid, new_run
from runtime.divergence import DivergenceMonitor
from runtime.folder_writer import FolderWriter
from runtime.loader import Loader


def make_writer(config: Config, model_config: GPTConfig, flat: FlatParameters) -> Writer:
    """The writer of the run's checkpoints, in the format of --checkpoint-format."""
    kind = FolderWriter if config.checkpoint_format == "folder" else Writer
    return kind(Path(config.out), config.keep, model_config, flat, config.timeout, new_run("seed"))


def restore(run, state: dict | None) -> None:
    """Load the state of a checkpoint. Without one, begin before step 1. On the CPU, in the same
    layout and with as many threads, a resumed run has the bits of an uninterrupted one."""
    config = run.config
    run.scaler = make_scaler(config.dtype)
    if state is None:
        done = dict(step=0, consumed_samples=0, tokens=0, optimizer_steps=0)
        load_weights = None
        if config.init_from is not None:
            weights = all_ranks(lambda: checkpoint.load(Path(config.init_from)))["parameters"]
            load_weights = partial(checkpoint.load_shards, weights, kind="master")
        run.flat.initialize(run.model_config, config.seed, load_weights)
    else:
        done = state
        if state["config"]["dtype"] == config.dtype:
            run.scaler.load_state_dict(state["scaler"])
        checkpoint.restore(state, run.flat)
    run.step = done["step"] + 1                     # in progress, from 1
    run.finished_step = done["step"]                # the last one whose update is complete
    run.optimizer_steps = done["optimizer_steps"]   # updates so far, without skipped steps
    run.batches = Batches(run.train_data, config, consumed=done["consumed_samples"],
                          sequences_trained=done["tokens"] // run.model_config.seq_len)
    run.loader = Loader(run.batches, run.model_config, run.grid, run.device)
    run.divergence = DivergenceMonitor.restored(state, config, run.train_data)


def go_back(run, find: Callable) -> None:
    """Restore an older checkpoint: the first whole one of the list that find() returns on rank 0
    (directory.latest_valid). Every rank must call it."""
    step = run.step
    run.flat.wait_params()                      # restoring them starts the next all-gather
    all_ranks(run.writer.wait)                  # we may load the file being written
    _, state, events = latest_valid(on_rank0(find))
    restore(run, state)
    for event in events:
        run.log.metrics.write(**event, step=step)


def save(run, is_start: bool = False) -> None:
    """Write a checkpoint after the last finished step, and record in the monitor whether it is
    healthy: a rollback may return to it. `is_start`: it is the starting state of the run. Of a file
    the state is copied, and threads write it while training goes on."""
    began = time.monotonic()
    config, done = run.config, run.finished_step
    file = step_file(Path(config.out), done, config.checkpoint_format).name
    scheduled = config.is_nth_or_last(done, config.save_every)
    at_floor = config.dtype == "fp16" and run.scaler.scale <= run.scaler.min_scale
    run.divergence.add_checkpoint(done, file, config.keep, scheduled, at_floor, is_start)
    all_ranks(run.writer.wait)          # a rank holds at most one copy of its shards
    submit(run)
    run.log.save_seconds = time.monotonic() - began


def wait_for_last_save(writer: Writer) -> None:
    """Wait for the last checkpoint. If it could not be written, all ranks raise the same error."""
    all_ranks(lambda: writer.wait(required=True))


def submit(run) -> None:
    """Start to write a checkpoint: this state and the tensors. The last write must have ended. The
    files to which a rollback may return stay."""
    facts = make_facts(run.config, run.model_config, run.train_data, run.writer.identity,
                       run.scaler, run.divergence)
    facts |= dict(step=run.finished_step, optimizer_steps=run.optimizer_steps,
                  tokens=run.batches.sequences_trained * run.model_config.seq_len,
                  consumed_samples=run.batches.consumed)
    run.writer.submit(facts, {file for _, file, _ in run.divergence.checkpoints})


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
