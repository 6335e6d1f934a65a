"""Before the ranks build a run: what rank 0 decides, and the data. train.launch calls `prepare` and
`open_data`.
"""
import os
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from amp import PRECISIONS
from checkpoint import list_checkpoints
from data import TokenDataset
from model import GPTConfig
from parallel import Grid
from runtime import checks, dashboards
from runtime.directory import Start, find_start, load_state, lock_output_dir
from runtime.options import Config
from runtime.processes import Job, all_ranks, assert_equal_across_ranks


def launch_store() -> dist.Store:
    """A store that outlives a restart of the group by torchrun; without torchrun, a new one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(dist.rendezvous("env://"))
        return store
    return dist.HashStore()


def prepare(given: dict, job: Job, device: torch.device,
            stack: ExitStack) -> tuple[Config, GPTConfig, Start]:
    """Resolve flags and checkpoint on rank 0: the complete config, the model, and where the run
    begins. Finally lock --out; `stack` releases the lock. Raises ValueError, OSError or RunError.
    """
    store = launch_store()
    restarted = store.check(["begun"])          # a refused start leaves no key
    config = Config(**given)
    if config.log is not None:
        dashboards.check_follower(config.log)
    out = Path(config.out)
    begin = find_start(out, config.resume, config.init_from, config.eval_only, restarted)
    if begin.kind == "init-from":
        given = {**given, "init_from": str(begin.path)}
    config, model_config = checks.validate(given, load_state(begin.path), job.world, device.type,
                                           begin.kind == "init-from")
    grid = Grid(job.world // (config.tp * config.pp), config.pp, config.tp,
                chunks=config.pp_chunks)
    checks.check_memory(model_config, grid, config, PRECISIONS[config.dtype], device,
                        job.local_world)
    if not config.eval_only:
        stack.enter_context(lock_output_dir(out))
        if list_checkpoints(out) != begin.found:
            raise ValueError(f"another run has just written to {config.out}: start again")
        store.set("begun", "")
    return config, model_config, begin


def open_data(config: Config, model_config: GPTConfig, state: dict | None,
              job: Job) -> tuple[TokenDataset, TokenDataset]:
    """Open the data for training and validation on every rank. All must have the same; data that is
    new to this run is checked for tokens beyond the vocabulary. Every rank calls it."""
    train_data = all_ranks(lambda: TokenDataset(config.data, "train", model_config.seq_len))
    val_data = all_ranks(lambda: TokenDataset(config.data, "val", model_config.seq_len))
    fingerprints = list(train_data.sources)
    assert_equal_across_ranks(fingerprints, f"{config.data} differs between ranks: copy it")
    known = set()
    if state is not None:
        _, weights = state["data"][-1]          # of the last phase
        known = set(weights)
        train_data.go_on(state["data"], state["consumed_samples"])
    if not known.issuperset(fingerprints):
        if not config.eval_only:
            all_ranks(lambda: train_data.check(job.rank, job.world))
        all_ranks(lambda: val_data.check(job.rank, job.world))
    return train_data, val_data
