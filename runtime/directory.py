"""The directory of a run: one writer, where a run begins, and metrics.jsonl."""
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

from base.agreement import all_gather_object, all_ranks, is_rank0, on_rank0
from base.checkpoint_files import CorruptCheckpoint, facts_file, list_checkpoints, verify
from base.errors import RunError, first_line, warn
from base.options import Config
from checkpoint import load


@contextmanager
def lock_output_dir(out: Path, found: list):
    """Create the directory `out` and hold its lock during the block, or until the process ends.
    Raises RunError if another process holds it, or has written checkpoints since `found` were
    listed, or if `out` cannot be written or locked."""
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(out / "lock", "a+"))
            try:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:             # Windows: a second run is not refused
                pass
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                warn(f"the file system of {out} has no locks ({error.strerror}): see that no "
                     f"second run writes to it")
            file.truncate(0)
            print(f"{socket.gethostname()}, process {os.getpid()}", end="", file=file, flush=True)
        except BlockingIOError:
            file.seek(0)
            raise RunError(f"another run writes to {out} ({file.read()}): stop it first, or give "
                           f"another --out", 2) from None
        except OSError as error:
            raise RunError(f"--out {out} is not a directory that can be written and locked: "
                           f"{error.strerror}: give another", 2) from error
        if list_checkpoints(out) != found:
            raise RunError(f"another run has just written to {out}: start again", 2)
        yield


def latest_valid(files: list) -> tuple[Path | None, dict | None, list[dict]]:
    """The first whole checkpoint of a list, its state, and an event for each damaged or missing one
    before it. None in the list is step 0 of a run from the seed, which has no state. Raises
    RunError if none is whole. Every rank calls it, and verifies its share of each."""
    events = []
    for path in files:
        if path is None:
            return None, None, events
        is_there = on_rank0(facts_file(path).is_file)
        state, reason = all_ranks(lambda: read_or_reason(path, is_there))
        reason = next(filter(None, all_gather_object(reason)), None)
        if reason is None:
            return path, state, events
        events.append(dict(event="damaged", path=str(path), reason=reason))
        if is_rank0():
            warn(f"{reason}; passed over")
    raise RunError(f"none of the {len(files)} checkpoints is whole: "
                   f"{', '.join(map(str, files))}; give another --out to start over")


def read_or_reason(path: Path, is_there: bool) -> tuple[dict | None, str | None]:
    """The state in a checkpoint, or why this rank cannot read it. Raises RunError if the checkpoint
    `is_there` on rank 0, and this rank does not see it."""
    try:
        return read(path), None
    except (CorruptCheckpoint, FileNotFoundError) as error:
        if is_there and isinstance(error, FileNotFoundError):
            raise RunError(f"there is no {path} here: --out must be on a disk that all machines "
                           f"share") from error
        return None, str(error)


def read(path: Path) -> dict:
    """Verify this rank's share of a checkpoint, and load its state."""
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ()
    verify(path, *ranks)
    return load(path)


class Start(NamedTuple):
    """Where a run begins, as `find_start` decides."""
    kind: str               # "continue": the run in --out; or a new run: "resume" (a branch, with
                            # the whole state of a file), "init-from" (with its weights) or "seed"
    path: Path | None       # the checkpoint to load; None for "seed"
    state: dict | None      # what it holds
    run: dict               # the run's id and origin, stored in its checkpoints
    found: list             # the checkpoints in --out at this time
    events: list            # of damaged checkpoints that were passed over
    given: dict             # the flags of the command, before a checkpoint's and defaults

    @property
    def step(self) -> int:
        """The last finished step; 0 in a run without a state."""
        return 0 if self.state is None else self.state["step"]


def find_start(given: dict, restarted: bool = False) -> Start:
    """Decide where a run with the flags `given` begins. --out is one run:

    1. If it holds checkpoints, the run goes on from the newest whole one.
    2. If not, it begins from --resume FILE, from --init-from FILE, or from the seed.

    If FILE is given in case 1, the run in --out must have begun from it, unless torchrun has
    `restarted` the group: FILE may be gone. With --eval-only, FILE is evaluated without a look at
    --out. The kind is then "init-from": the weights are enough.

    Every rank calls it, and decides alike. Raises RunError, with status 2 for a usage error, also
    for a damaged FILE.
    """
    config = Config(**given)
    out, resume, eval_only = Path(config.out), config.resume, config.eval_only
    kind, path, state, events = "seed", None, None, []
    if config.init_from is not None:
        kind, path = "init-from", Path(config.init_from)
    elif resume not in ("auto", "never"):
        kind, path = "resume", Path(resume)
    found = on_rank0(lambda: [] if eval_only and path is not None else list_checkpoints(out))
    if found:
        if resume == "never" and not restarted:
            raise RunError(f"--resume never, but {out} holds {found[0].name}: give another --out",
                           2)
        newest, state, events = latest_valid(found)
        if path is not None and not restarted:
            on_rank0(lambda: check_origin(state, out, kind, path))
        kind, path = "continue", newest
    elif path is not None:
        state = all_ranks(lambda: read(path))
    elif eval_only:
        raise RunError(f"--eval-only, but {out} holds no checkpoint: give the --out of a run, or "
                       f"--resume FILE", 2)
    if eval_only:
        kind = "init-from"
    if kind in ("continue", "resume") and not state["exp_avg"]:
        raise RunError(f"{path} holds weights alone: begin a run with --init-from {path} in "
                       f"another --out", 2)
    return Start(kind, path, state,
                 on_rank0(lambda: state["run"] if kind == "continue" else new_run(kind, state)),
                 found, events, given)


def check_origin(state: dict, out: Path, kind: str, file: Path) -> None:
    """Raise ValueError unless the run in `out`, whose state this is, began from `file`."""
    try:
        origin = new_run(kind, load(file))["origin"]            # it has no paths
    except FileNotFoundError as error:
        raise ValueError(f"{error}; {out} holds a run: give another --out, or drop --{kind} to go "
                         f"on with it") from None
    if file.resolve().parent == out.resolve():
        raise ValueError(f"{file} is of the run in {out}: drop --{kind} to go on with that run, or "
                         f"give another --out to begin from this file")
    if state["run"].get("origin") != origin:
        raise ValueError(f"{out} holds a run that did not begin from {file}: drop --{kind} to go "
                         f"on with that run, or give another --out")


def new_run(kind: str, state: dict | None = None) -> dict:
    """A new id, and the origin of a run that begins with this state or, without one, from the seed:
    [kind, id, step] of the file. A file with weights alone has no id."""
    origin = (None, 0) if state is None else (state["run"].get("id"), state["step"])
    return dict(id=secrets.token_hex(8), origin=[kind, *origin])


def has_ended(step: int, config: Config) -> bool:
    """Whether a run has made all steps, of which `step` is the last one in its checkpoint, and
    reported its end in the last whole line of metrics.jsonl. If it has not, a crash came after the
    last save. Every rank calls it."""
    if step != config.steps:
        return step > config.steps

    def has_reported() -> bool:
        path = Path(config.out, "metrics.jsonl")
        with suppress(FileNotFoundError, ValueError), open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 ** 20))
            whole = [line for line in file if line.endswith(b"\n")]
            return not whole or json.loads(whole[-1]).get("event") == "end"
        return True
    return on_rank0(has_reported)


class Metrics:
    """OUT/metrics.jsonl, append-only: one object per step, and one with `event` for anything else.
    Only rank 0 writes. `dashboards`: of --log, by name. They get each line too."""

    def __init__(self, out: Path, rank: int = 0):
        self.path = None
        self.dashboards = {}
        if rank == 0:
            self.path = out / "metrics.jsonl"
            with open(self.path, "a+b") as file:
                file.seek(0)
                # A crash may have torn the last line.
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

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
