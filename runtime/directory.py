"""The directory of a run: one writer, where a run begins, and metrics.jsonl. runtime/startup.py
calls it; run_state.py loads checkpoints by it, rollback.py and flipped_bits.py choose older ones.
"""
import errno
import json
import math
import os
import secrets
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Callable, NamedTuple

import torch.distributed as dist

from base.checkpoint_files import CorruptCheckpoint, list_checkpoints, verify
from base.processes import RunError, all_ranks, is_rank0, on_rank0, warn
from checkpoint import load
from parallelism.collectives import all_gather_object, first_line, on_hosts


@contextmanager
def lock_output_dir(out: Path):
    """Create the directory `out` and hold its lock during the block, or until the process ends.
    Raises ValueError if another process holds it, OSError if `out` cannot be written or locked."""
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(out / "lock", "a+"))
            with suppress(ImportError):     # Windows has no flock: a second run is not refused
                import fcntl
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                        raise
                    warn(f"the file system of {out} has no locks ({error.strerror}): see that no "
                         f"second run writes to it")
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"another run writes to {out} ({file.read()}): stop it first, or give "
                             f"another --out") from None
        except OSError as error:
            raise OSError(f"--out {out} is not a directory that can be written and locked: "
                          f"{error.strerror}: give another") from error
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}")
        file.flush()
        yield


def latest_valid(files: list) -> tuple[Path | None, list[dict]]:
    """The first whole checkpoint of a list, and an event for each damaged or missing one before it.
    None in the list is step 0 of a run from the seed. Raises RunError if none is whole. Every rank
    calls it."""
    events = []
    for path in files:
        if path is None:
            return None, events
        reason = damage(path)
        if reason is None:
            return path, events
        events.append(dict(event="damaged", path=str(path), reason=reason))
        if is_rank0():
            warn(f"{reason}; passed over")
    raise RunError(f"none of the {len(files)} checkpoints is whole: "
                   f"{', '.join(map(str, files))}; give another --out to start over")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Every rank calls it, and reads its share. Raises
    RunError if rank 0 has the checkpoint and another rank does not see it."""
    def look() -> tuple[str | None, bool]:
        try:
            verify_share(path)
            if is_rank0():
                load(path)
        except (CorruptCheckpoint, FileNotFoundError) as error:
            return str(error), isinstance(error, FileNotFoundError)
        return None, False
    found = all_gather_object((socket.gethostname(), *all_ranks(look)))
    hosts, reasons, missing = zip(*found)
    for rank, is_missing in enumerate(missing):
        if is_missing and not missing[0]:
            raise RunError(f"rank {rank}{on_hosts([rank], hosts)} does not see {path}: --out must "
                           f"be on a disk that all machines share")
    return next((reason for reason in reasons if reason is not None), None)


def verify_share(path: Path) -> None:
    """Verify this rank's share of a checkpoint."""
    if dist.is_initialized():
        verify(path, dist.get_rank(), dist.get_world_size())
    else:
        verify(path)


class Start(NamedTuple):
    """Where a run begins, as `find_start` decides."""
    kind: str               # "continue": the run in --out; or a new run: "resume" (a branch, with
                            # the whole state of a file), "init-from" (with its weights) or "seed"
    path: Path | None       # the checkpoint to load; None for "seed"
    run: dict               # the run's id and origin, stored in its checkpoints
    found: list             # the checkpoints in --out at this time
    events: list = []       # of damaged checkpoints that were passed over
    given: dict = {}        # the flags of the command, before a checkpoint's and defaults


def find_start(out: Path, resume: str, init_from: str | None, eval_only: bool,
               restarted: bool) -> Start:
    """Decide where a run begins. `out` is one run:

    1. If `out` holds checkpoints, the run goes on from the newest whole one.
    2. If not, it begins from --resume FILE, from --init-from FILE, or from the seed.

    If FILE is given in case 1, the run in `out` must have begun from it, unless torchrun has
    `restarted` the group: FILE may be gone. With --eval-only, FILE is evaluated without a look at
    `out`. The kind is then "init-from": the weights are enough.

    Every rank calls it, and verifies its share of the checkpoint. Raises RunError, with status 2
    for a usage error, also for a damaged FILE.
    """
    file = init_from if resume in ("auto", "never") else resume         # one of them at most
    kind = "seed"
    if file is not None:
        file = Path(file)
        kind = "resume" if init_from is None else "init-from"

    def look() -> list[Path]:
        found = [] if eval_only and file is not None else list_checkpoints(out)
        if resume == "never" and found and not restarted:
            raise ValueError(f"--resume never, but {out} holds {found[0].name}: give another --out")
        return found
    found = on_rank0(look)
    newest, events = latest_valid(found) if found else (None, [])
    if not found and file is not None:
        all_ranks(lambda: verify_share(file))
    return on_rank0(lambda: decide(out, kind, file, found, newest, events, eval_only, restarted))


def decide(out: Path, kind: str, file: Path | None, found: list[Path], newest: Path | None,
           events: list[dict], eval_only: bool, restarted: bool) -> Start:
    """The last part of `find_start`, on rank 0. `newest`: of the checkpoints `found` in `out`, the
    first that is whole. Raises ValueError or OSError."""
    if newest is not None:
        state = load(newest)
        if file is not None and not restarted:
            try:
                origin = new_run(kind, load(file))["origin"]        # it has no paths
            except FileNotFoundError as error:
                raise ValueError(f"{error}; {out} holds a run: give another --out, or drop "
                                 f"--{kind} to go on with it") from None
            if file.resolve().parent == out.resolve():
                raise ValueError(f"{file} is of the run in {out}: drop --{kind} to go on with that "
                                 f"run, or give another --out to begin from this file")
            if state["run"].get("origin") != origin:
                raise ValueError(f"{out} holds a run that did not begin from {file}: drop --{kind} "
                                 f"to go on with that run, or give another --out")
        start = Start("continue", newest, state["run"], found, events)
    elif file is not None:
        state = load(file)
        start = Start(kind, file, new_run(kind, state), found)
    elif eval_only:
        raise ValueError(f"--eval-only, but {out} holds no checkpoint: give the --out of a run, "
                         f"or --resume FILE")
    else:
        return Start(kind, None, new_run(kind), found)

    if eval_only:
        return Start("init-from", start.path, new_run("init-from", state), found)
    if not state["exp_avg"] and start.kind != "init-from":
        how = {"resume": "instead of --resume", "continue": "and another --out"}[start.kind]
        raise ValueError(f"{start.path} holds weights alone: begin a run with --init-from "
                         f"{start.path} {how}")
    return start


def new_run(kind: str, state: dict | None = None) -> dict:
    """A new id, and the origin of a run that begins with this state or, without one, from the seed:
    [kind, id, step] of the file. A file with weights alone has no id."""
    origin = [kind, None, 0]
    if state is not None:
        origin = [kind, state["run"].get("id"), state["step"]]
    return dict(id=secrets.token_hex(8), origin=origin)


def start_branch(state: dict, new_lr: bool) -> None:
    """Reset the history of rollbacks in a state with which a branch begins and, if the branch has a
    learning rate of its own (`new_lr`), the corrections of the learning rate."""
    state["monitor"].update(checkpoints=[], rollbacks=0, returned_to=[], last_cut=1.0, bad=0,
                            accused=[])
    if new_lr:
        state["monitor"]["lr_factor"] = 1.0


def load_state(path) -> dict | None:
    """The state in a checkpoint, or None without a path."""
    return None if path is None else load(Path(path))


def last_lines(out: Path) -> list[dict]:
    """The last lines of metrics.jsonl that are whole; [] without the file."""
    lines = []
    with suppress(FileNotFoundError), open(out / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2 ** 20))
        for text in file:
            with suppress(ValueError):
                lines.append(json.loads(text))
    return lines


class Metrics:
    """OUT/metrics.jsonl, append-only: one object per step, and one with `event` for anything else.
    Only rank 0 writes. `dashboards`: of --log, by name. They get each line too."""

    def __init__(self, out: Path, rank: int):
        self.path = None
        self.dashboards = {}
        if rank == 0:
            self.path = out / "metrics.jsonl"
            with open(self.path, "a+b") as file:
                file.seek(0)
                whole = sum(len(line) for line in file if line.endswith(b"\n"))
                file.truncate(whole)                                # a line torn by a crash

    def write(self, **row) -> None:
        if self.path is None:
            return
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v
               for k, v in row.items()} | dict(time=round(time.time(), 3))
        line = json.dumps(row).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)     # somebody may have removed it
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):
                    file.truncate(end)
                    raise OSError("the disk is full")
        except OSError as error:                        # costs this line, not the run
            warn(f"{self.path} lacks a line: {error.strerror or error}")
        self.send(lambda dashboard: dashboard.write(row))

    def send(self, action: Callable) -> None:
        """action(dashboard) of each. An error costs one warning and the dashboard, not the run."""
        for name, dashboard in list(self.dashboards.items()):
            try:
                action(dashboard)
            except Exception as error:
                del self.dashboards[name]
                warn(f"--log: {name} is off from here on: {first_line(error)}")
