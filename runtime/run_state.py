"""The state of a run: what its checkpoints hold beside tensors, and how it is saved and restored.
`run` is a train.Run."""
import dataclasses
from pathlib import Path
from typing import Callable

import checkpoint
from amp import LossScaler
from base.checkpoint_files import step_file
from base.options import Config
from base.processes import all_ranks, on_rank0
from data import TokenDataset
from model import GPTConfig
from runtime.checkpoint_writer import Writer
from runtime.directory import latest_valid
from runtime.divergence import DivergenceMonitor
from runtime.folder_writer import FolderWriter


def make_writer(run) -> Writer:
    """The writer of the run's checkpoints, in the format of --checkpoint-format."""
    config = run.config
    writer = FolderWriter if config.checkpoint_format == "folder" else Writer
    return writer(Path(config.out), config.keep, run.model_config, run.flat, config.timeout)


def initial_weights(config: Config) -> Callable | None:
    """A function that loads this rank's masters from --init-from, or None: from the seed. Every
    rank calls it."""
    if config.init_from is None:
        return None
    weights = all_ranks(lambda: checkpoint.load(Path(config.init_from)))["parameters"]
    return lambda flat: checkpoint.load_shards(weights, flat, "master")


def go_back(run, find: Callable) -> None:
    """Restore an older checkpoint: the first whole one of the list that find() returns on rank 0
    (directory.latest_valid). Every rank must call it."""
    step = run.step
    run.flat.wait_params()                      # restoring them starts the next all-gather
    all_ranks(run.writer.wait)                  # we may load the file being written
    _, state, events = latest_valid(on_rank0(find))
    run.restore(state)
    for event in events:
        run.log.metrics.write(**event, step=step)


def save(run, is_start: bool = False) -> None:
    """Write a checkpoint after the last finished step, and record in the monitor whether it is
    healthy: a rollback may return to it. `is_start`: it is the starting state of the run. Of a file
    the state is copied, and threads write it while training goes on."""
    config, done = run.config, run.finished_step
    file = step_file(Path(config.out), done, config.checkpoint_format).name
    scheduled = config.is_due(done, config.save_every)
    at_floor = config.dtype == "fp16" and run.scaler.scale <= run.scaler.min_scale
    run.divergence.add_checkpoint(done, file, config.keep, scheduled, at_floor, is_start)
    all_ranks(run.writer.wait)          # a rank holds at most one copy of its shards
    submit(run)


def wait_for_last_save(run) -> None:
    """Wait for the last checkpoint. If it could not be written, every rank raises the same error.
    """
    all_ranks(lambda: run.writer.wait(required=True))


def submit(run) -> None:
    """Start to write a checkpoint: this state and the tensors. The last write must have ended. The
    files to which a rollback may return stay."""
    run.writer.submit(facts_of(run), {file for _, file, _ in run.divergence.checkpoints})


def facts_of(run) -> dict:
    """What a checkpoint of this moment holds besides tensors."""
    facts = make_facts(run.config, run.model_config, run.train_data, run.identity, run.scaler,
                       run.divergence)
    return facts | dict(
        step=run.finished_step, optimizer_steps=run.optimizer_steps,
        tokens=run.batches.sequences_trained * run.model_config.seq_len,
        consumed_samples=run.batches.consumed)


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
