"""The start of a run, as main in train.py calls it: `parse`, before all communication, then
`prepare`, `open_data`, `join_ranks` and, when the ranks have built the run, `begin_training`. What
one rank refuses from `prepare` on, every rank raises, as a RunError."""
import os
import sys
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist

from base import devices
from base.agreement import (all_gather_object, all_ranks, assert_equal_across_ranks, on_rank0,
                            print_rank0)
from base.errors import RunError, memory_advice
from base.options import Config, parse_flags
from base.processes import Job, exit_for_mistake, refuse_tasks_without_ranks
from checkpoint import load
from corpus.mixtures import optional_entries
from data import TokenDataset
from model import GPTConfig
from parallel import Grid
from parallelism.build import make_groups
from runtime import checks, console, dashboards, evaluation, run_state
from runtime.directory import Metrics, Start, find_start, lock_output_dir
from runtime.run_log import RunLog, format_eval


def parse() -> tuple[Job, dict, torch.device, timedelta]:
    """This process among the others, the flags that were given, the device, and --timeout. A
    mistake ends the process with a message of one line."""
    job = Job()
    try:
        refuse_tasks_without_ranks()
        job = Job.from_environment()
        given = parse_flags(sys.argv[1:])
        config = Config(**given)
        if config.plain:
            checks.check_plain(given, job.world)
        checks.check_grid(job.world, config)
        return job, given, devices.choose_device(config, job), timedelta(seconds=config.timeout)
    except ValueError as error:
        exit_for_mistake(error, job)


@contextmanager
def errors_with_step(run):
    """The error of a lost rank names this rank's stage and the step in progress."""
    try:
        yield
    except dist.DistError as error:
        raise dist.DistError(f"stage {run.grid.stage}, step {run.step}: {error}") from error


def report_only(run, begin: Start) -> None:
    """Of a train.Run without steps to make: evaluate it for --eval-only, or tell that it has ended.
    Every rank calls it."""
    config, val_data = run.config, run.val_data
    if config.eval_only:
        row = evaluation.evaluate(run.model, val_data, run.loader, run.progress.batches, run.stop)
        _, _, step = begin.run["origin"]
        print_rank0(f"{begin.path}, step {step}, on {config.data}: "
                    f"{format_eval(row, config, run.model_config, val_data)}")
    else:
        console.print_finished(begin, config)


def prepare(given: dict, job: Job, device: torch.device,
            stack: ExitStack) -> tuple[Config, GPTConfig, Start]:
    """Compare flags and devices of the ranks; return what rank 0 then decides (`resolve`). Every
    rank calls it."""
    assert_equal_across_ranks(
        (given, device.type), "the ranks have different flags or devices: start all with one "
        "command")
    if device.type == "cuda":
        assert_own_gpu(device)
    store = launch_store() if job.rank == 0 else None
    restarted = on_rank0(lambda: store.check(["begun"]))    # a refused start leaves no key
    begin = find_start(given, restarted)
    config, model_config = on_rank0(lambda: resolve(begin, job, device, store, stack))
    if begin.kind == "resume":                  # a branch has had no rollback
        begin.state["monitor"].update(checkpoints=[], rollbacks=0, returned_to=[], last_cut=1.0,
                                      bad=0, accused=[])
        if "lr" in given:                       # its own rate has had no correction
            begin.state["monitor"]["lr_factor"] = 1.0
    if begin.kind == "init-from":               # the run reads the file itself
        begin = begin._replace(state=None)
    return config, model_config, begin


def assert_own_gpu(device: torch.device) -> None:
    """Every rank raises a RunError if two processes have the same GPU."""
    gpus = all_gather_object(str(torch.cuda.get_device_properties(device).uuid))
    if len(set(gpus)) < len(gpus):
        raise RunError(f"{len(gpus)} processes, but {len(set(gpus))} CUDA devices: lower "
                       f"--nproc_per_node, or give --device cpu", 2)


def launch_store() -> dist.Store:
    """A store that outlives a restart of the group by torchrun; without torchrun, a new one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://"))[0]
    return dist.HashStore()


def resolve(begin: Start, job: Job, device: torch.device, store: dist.Store,
            stack: ExitStack) -> tuple[Config, GPTConfig]:
    """Resolve flags and checkpoint on rank 0: the complete config, and the model. Finally lock
    --out; `stack` releases the lock. Raises ValueError, OSError or RunError."""
    given, is_new = begin.given, begin.kind == "init-from"
    if is_new:
        given = {**given, "init_from": str(begin.path)}
    config, model_config = checks.validate(given, begin.state, job.world, device.type, is_new,
                                           begin.path)
    for name in (config.log or "").split(","):
        if name and find_spec(name) is None:
            raise ValueError(f"--log {name} needs a package that is missing: pip install {name}")
    if not config.eval_only:
        stack.enter_context(lock_output_dir(Path(config.out), begin.found))
        store.set("begun", "")
    return config, model_config


def join_ranks(config: Config, job: Job, device: torch.device, stack: ExitStack) -> Grid:
    """Create this rank's process groups -> its grid, which has them. Every rank calls it. `stack`
    adds advice to an error of too little memory, and ends the groups."""
    stack.enter_context(memory_advice("{}; give --recompute, a smaller --micro-batch, a higher "
                                      "--zero, or --tp, --pp or --cp on more processes"))
    grid = Grid(job.world // (config.pp * config.cp * config.tp), config.pp, config.tp, job.rank,
                cp=config.cp, ep=config.ep, chunks=config.pp_chunks,
                sequence_parallel=config.sequence_parallel)
    make_groups(grid, device, timedelta(seconds=config.timeout))
    stack.callback(grid.groups.clear)       # otherwise gloo's threads may abort the exiting process
    return grid


def open_data(config: Config, model_config: GPTConfig, state: dict | None,
              job: Job) -> tuple[TokenDataset, TokenDataset]:
    """Open the data for training and validation on every rank. All must have the same; data that is
    new to this run is checked for tokens beyond the vocabulary. Every rank calls it."""
    train_data, val_data = all_ranks(lambda: [
        TokenDataset(config.data, split, model_config.seq_len) for split in ("train", "val")])
    fingerprints = list(train_data.mixture.sources)
    assert_equal_across_ranks(fingerprints, f"{config.data} differs between ranks: copy it")
    known = {}
    if state is not None:
        _, known = state["data"][-1]            # the last phase
        train_data.mixture.resume(state["data"], state["consumed_samples"])
    weights = state
    if state is None and config.init_from is not None:
        weights = all_ranks(lambda: load(Path(config.init_from)))
    if weights is not None:                 # its template and its ends stay with it
        train_data.meta |= optional_entries([train_data.meta, weights])
    rows = min(train_data.meta["vocab_size"], model_config.vocab_size)  # an import may have fewer
    if not set(fingerprints) <= set(known):
        for data in [val_data] if config.eval_only else [train_data, val_data]:
            all_ranks(lambda: data.mixture.check(rows, job.rank, job.world))
    return train_data, val_data


def begin_training(run, begin: Start, learning_rate: Callable, stack: ExitStack) -> None:
    """Watch for signals, open the log of a train.Run, report how it begins and, if it begins from a
    file, save its starting state. `stack` ends all this."""
    run.writer.identity = begin.run
    stack.enter_context(run.stop)
    stack.callback(run.writer.close)
    config = run.config
    metrics = all_ranks(lambda: Metrics(Path(config.out), run.grid.rank))
    run.log = RunLog(metrics, config, run.val_data, run.model_config, run.device, run.grid.world)
    if config.log is not None and run.grid.rank == 0:
        metrics.dashboards = {name: dashboards.KINDS[name]() for name in config.log.split(",")}
        metrics.send(lambda dashboard: dashboard.open(Path(config.out), begin.run["id"],
                                                      begin.step + 1))
        stack.callback(metrics.send, lambda dashboard: dashboard.close())
        if begin.step > 0 and begin.state["config"].get("log") != config.log:
            print(f"note     --log has the steps from {begin.step + 1} on: `python -m tools.follow "
                  f"{config.out} --to {config.log.split(',')[0]}` sends all of them when the run "
                  f"has ended")
    console.print_summary(config, run.model_config, run.flat, run.device,
                          run.progress.batches, config.steps - begin.step)
    console.report_begin(run.log, begin, run.train_data, run.grid.hosts,
                         learning_rate, run.progress.monitor.lr_factor)
    if begin.kind in ("init-from", "resume"):   # after this save, FILE is no longer needed
        run_state.save(run, is_start=True)
