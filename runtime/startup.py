"""The start of a run. train.py calls, in this order, `parse`, before all communication, `prepare`,
`load_start`, `open_data`, `join_ranks` and, when the ranks have built the run, `begin_training`.
"""
import os
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from amp import PRECISIONS
from base import devices
from base.checkpoint_files import list_checkpoints
from base.options import Config, parse_flags
from base.processes import (Job, all_ranks, assert_equal_across_ranks, exit_for_mistake, on_rank0,
                            refuse_tasks_without_ranks)
from data import TokenDataset
from model import GPTConfig
from parallelism.build import Grid, make_groups
from runtime import (checks, console, dashboards, layout_checks, memory_limits, plain_run,
                     run_state)
from runtime.directory import (Metrics, Start, find_start, last_lines, load_state, lock_output_dir,
                               start_branch)
from runtime.run_log import RunLog


def parse() -> tuple[Job, dict, torch.device, timedelta]:
    """This process among the others, the flags that were given, the device, and --timeout. A
    mistake ends the process with a message of one line."""
    job = Job()
    try:
        refuse_tasks_without_ranks()
        job = Job.from_environment()
        return job, *read_flags(job)
    except ValueError as error:
        exit_for_mistake(error, job)


def read_flags(job: Job) -> tuple[dict, torch.device, timedelta]:
    """The flags that were given, the device, and --timeout. Raises ValueError."""
    given = parse_flags(sys.argv[1:])
    config = Config(**given)
    if config.plain:
        plain_run.check_flags(given, job.world)
    layout_checks.check_grid(job.world, config)
    return given, devices.choose_device(config, job), timedelta(seconds=config.timeout)


def prepare(given: dict, job: Job, device: torch.device,
            stack: ExitStack) -> tuple[Config, GPTConfig, Start]:
    """Compare flags and devices of the ranks; return what rank 0 then decides (`resolve`). Every
    rank calls it."""
    assert_equal_across_ranks(
        (given, device.type), "the ranks have different flags or devices: start all with one "
        "command")
    devices.assert_own_gpu(device)
    store = launch_store() if job.rank == 0 else None
    restarted = on_rank0(lambda: store.check(["begun"]))    # a refused start leaves no key
    config = Config(**given)
    if config.log is not None:
        on_rank0(lambda: dashboards.check("--log", config.log))
    begin = find_start(Path(config.out), config.resume, config.init_from, config.eval_only,
                       restarted)
    return on_rank0(lambda: resolve(given, begin, job, device, store, stack))


def launch_store() -> dist.Store:
    """A store that outlives a restart of the group by torchrun; without torchrun, a new one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(dist.rendezvous("env://"))
        return store
    return dist.HashStore()


def resolve(given: dict, begin: Start, job: Job, device: torch.device, store: dist.Store,
            stack: ExitStack) -> tuple[Config, GPTConfig, Start]:
    """Resolve flags and checkpoint on rank 0: the complete config, the model, and where the run
    begins. Finally lock --out; `stack` releases the lock. Raises ValueError, OSError or RunError.
    """
    if begin.kind == "init-from":
        given = {**given, "init_from": str(begin.path)}
    config, model_config = checks.validate(given, load_state(begin.path), job.world, device.type,
                                           begin.kind == "init-from", begin.path)
    memory_limits.check_memory(model_config, make_grid(config, job), config,
                               PRECISIONS[config.dtype], device, job.local_world)
    if config.plain:
        plain_run.check_file(begin)
    if not config.eval_only:
        stack.enter_context(lock_output_dir(Path(config.out)))
        if list_checkpoints(Path(config.out)) != begin.found:
            raise ValueError(f"another run has just written to {config.out}: start again")
        store.set("begun", "")
    return config, model_config, begin._replace(given=given)


def make_grid(config: Config, job: Job) -> Grid:
    """The place of this process in the layout, without process groups."""
    dp = job.world // (config.pp * config.cp * config.tp)
    return Grid(dp, config.pp, config.tp, job.rank, cp=config.cp, ep=config.ep,
                chunks=config.pp_chunks, sequence_parallel=config.sequence_parallel)


def join_ranks(config: Config, job: Job, device: torch.device, stack: ExitStack) -> Grid:
    """Create this rank's process groups -> its grid, which has them. Every rank calls it. `stack`
    adds advice to an error of too little memory, and ends the groups."""
    grid = make_grid(config, job)
    stack.enter_context(memory_limits.advice_on_memory(config, grid))
    make_groups(grid, device, timedelta(seconds=config.timeout))
    stack.callback(grid.groups.clear)       # otherwise gloo's threads may abort the exiting process
    return grid


def load_start(begin: Start) -> dict | None:
    """The checkpoint with whose whole state the run begins, or None. Every rank calls it."""
    if begin.kind not in ("continue", "resume"):
        return None
    state = all_ranks(lambda: load_state(begin.path))
    if begin.kind == "resume":
        start_branch(state, "lr" in begin.given)
    return state


def open_data(config: Config, model_config: GPTConfig, state: dict | None,
              job: Job) -> tuple[TokenDataset, TokenDataset]:
    """Open the data for training and validation on every rank. All must have the same; data that is
    new to this run is checked for tokens beyond the vocabulary. Every rank calls it."""
    train_data = all_ranks(lambda: TokenDataset(config.data, "train", model_config.seq_len))
    val_data = all_ranks(lambda: TokenDataset(config.data, "val", model_config.seq_len))
    fingerprints = list(train_data.mixture.sources)
    assert_equal_across_ranks(fingerprints, f"{config.data} differs between ranks: copy it")
    known = set()
    if state is not None:
        _, weights = state["data"][-1]          # of the last phase
        known = set(weights)
        train_data.mixture.resume(state["data"], state["consumed_samples"])
    rows = min(train_data.meta["vocab_size"], model_config.vocab_size)  # an import may have fewer
    if not known.issuperset(fingerprints):
        for data in [val_data] if config.eval_only else [train_data, val_data]:
            all_ranks(lambda: data.mixture.check(rows, job.rank, job.world))
    return train_data, val_data


def begin_training(run, state: dict | None, begin: Start, stack: ExitStack) -> None:
    """Open the log of a train.Run, report how it begins and, if it begins from a file, save its
    starting state. `state` is that of `load_start`, without the tensors. `stack` closes the
    dashboards."""
    config = run.config
    metrics = all_ranks(lambda: Metrics(Path(config.out), run.grid.rank))
    run.log = RunLog(metrics)
    if config.log is not None and run.grid.rank == 0:
        metrics.dashboards = dashboards.start(config.log, Path(config.out), begin.run["id"],
                                              run.step)
        stack.callback(metrics.close)
    console.print_summary(run)
    if state is None:
        console.report_start(run, begin)
    else:
        console.report_resume(run, state, begin)
    if begin.kind in ("init-from", "resume"):   # after this save, FILE is no longer needed
        run_state.save(run, is_start=True)
    console.print_notes(run, begin)


def has_ended(run) -> bool:
    """Whether a run has made all steps, and reported its end. If it has not, a crash came after the
    last save. Every rank calls it."""
    done = run.step - 1
    if done != run.config.steps:
        return done > run.config.steps
    lines = on_rank0(lambda: last_lines(Path(run.config.out)))
    return not lines or lines[-1].get("event") == "end"
