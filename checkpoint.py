"""State to disk and back. A checkpoint has no layout.

    every rank                     rank 0                            out/
    slices of flat buffers  -->  whole tensors by global name  -->  step_00000200.pt  <-+ hard link
    (tp, pp, ZeRO, 16 bit)       (fp32 masters, Adam's moments)     latest.pt  ---------+

One file holds the whole state under global names: layers numbered through, tied weights once, no
vocabulary padding. So any layout, and sample.py in one process, loads what any other layout wrote;
the price is that one host's memory must hold the model with its two moments.

    format      3
    step        the last step done            sequences  read so far: the position in the data
    tokens      read so far                   optimizer_steps updates done: steps without the skipped
    row         metrics.jsonl's of this step  skipped_in_a_row   steps, up to this one
    config      train.py's flags              model      GPTConfig as a dict
    tokenizer   its name                      data       fingerprint of what it was trained on
    scaler      LossScaler.state_dict()              health     train.py's DivergenceMonitor as a dict
    parameters, exp_avg, exp_avg_sq           {global name: tensor}

The file appears whole or not at all (written aside, fsync, os.replace), and only plain types and
tensors are in it: it is read with weights_only=True, which runs no code from the file. A file is a
zip, whose members carry CRCs; torch.load does not look at them, `verify` does.

Training waits only for the copy to rank 0's host memory. A thread there writes it (`Writer`) while
the next steps run, so for that long the host holds the state twice.
"""
import os
import pickle
import re
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from parallel import FlatParameters, Grid, build_stage, make_buckets, comm_errors

STATE = {"parameters": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
STEP_FILE = re.compile(r"step_(\d{8})\.pt")


class CorruptCheckpoint(ValueError):
    """The file is not a whole checkpoint."""


class NoValidCheckpoint(RuntimeError):
    """What a run needs is lost: each of its checkpoints is damaged, or the last was not written."""


# ---------------------------------------------------------------------------------------------
# Between flat buffers and whole tensors
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_full_state(flat: FlatParameters, cfg: GPTConfig, grid: Grid, names) -> dict | None:
    """{name: {global parameter name: whole CPU tensor}} for the flat tensors `names` of all ranks,
    on rank 0; None on the others. Every rank must call it.

    Bucket by bucket, the ranks that keep something send it one after the other: the first
    replica's, or with ZeRO those of all replicas, which keep a slice each. Rank 0 knows the layout
    of each stage, because it is a function of (config, dp, stage).
    """
    whole = {name: {} for name in names}
    for stage in range(grid.pp):
        buckets = flat.buckets if grid.stage == stage else []
        if grid.rank == 0:
            _, specs = build_stage(cfg, Grid(grid.dp, grid.pp, grid.tp, rank=stage * grid.tp))
            buckets = make_buckets(specs, grid.dp)
        sources = grid.ranks[:flat.shards, stage].T.tolist()        # of each tensor rank
        for i, bucket in enumerate(buckets):
            for name in names:
                slices = {}
                for source in sum(sources, []):
                    if grid.rank == source:
                        slices[source] = flat.buckets[i].shard[name].cpu()
                        if source != 0:
                            with comm_errors("save, send to rank 0"):
                                dist.send(slices[source], 0)
                    elif grid.rank == 0:
                        slices[source] = torch.empty(bucket.numel // flat.shards,
                                                     dtype=flat.buckets[0].shard[name].dtype)
                        with comm_errors(f"save, receive from rank {source}"):
                            dist.recv(slices[source], source)
                if grid.rank == 0:
                    wholes = [slices[row[0]] if len(row) == 1 else
                              torch.cat([slices[source] for source in row]) for row in sources]
                    for spec in bucket.specs:
                        if not spec.copy:
                            parts = [bucket.view(tensor, spec) for tensor in wholes]
                            # A copy: training goes on, and views would drag the whole bucket
                            # into the file.
                            whole[name][spec.name] = spec.unshard(parts).clone()
    return whole if grid.rank == 0 else None


def restore(state: dict, flat: FlatParameters) -> None:
    """Cut this rank's slices out of a loaded checkpoint's whole tensors."""
    for key, name in STATE.items():
        flat.load(name, lambda spec, shape: state[key][spec])
    flat.sync_params()


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def step_file(out: Path, step: int) -> Path:
    return out / f"step_{step:08d}.pt"


def save(state: dict, out: Path, keep: int) -> Path:
    """Write out/step_0000000k.pt, point latest.pt at it, remove all but the newest `keep`.

    Raises OSError if it cannot be written (a full disk); the files before it are then untouched.
    """
    path = step_file(out, state["step"])
    aside = out / "step.pt.tmp"                     # one name: what a kill leaves is overwritten
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _point_latest(path)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        cause = error
        while cause.__context__ is not None:        # torch's zip writer hides the disk's own words
            cause = cause.__context__
        raise OSError(f"{path} could not be written: {cause}") from error
    for old in [p for p in list_checkpoints(out) if STEP_FILE.fullmatch(p.name)][keep:]:
        old.unlink(missing_ok=True)
    return path


class Writer:
    """Writes checkpoints on a thread of its own, one at a time, beside the training."""

    def __init__(self, out: Path, keep: int):
        self.out, self.keep = out, keep
        self.thread, self.pending = ThreadPoolExecutor(1), None

    def submit(self, state: dict) -> None:
        """Begin to write, after the one before."""
        self.wait()
        self.pending = self.thread.submit(self._write, state)

    def _write(self, state: dict) -> OSError | None:
        try:
            save(state, self.out, self.keep)
        except OSError as error:            # the run goes on: the files before it are whole
            print(f"warning: {error}; earlier checkpoints are untouched", file=sys.stderr,
                  flush=True)
            return error

    def wait(self) -> OSError | None:
        """Until the last file is written; the error if it could not be."""
        return self.pending.result() if self.pending is not None else None

    def last(self) -> None:
        """Wait for a file that must not be missing; Raises NoValidCheckpoint."""
        error = self.wait()
        if error is not None:
            raise NoValidCheckpoint(f"the last checkpoint is lost: {error}") from error


def _point_latest(path: Path) -> None:
    """latest.pt becomes another name of `path`; a copy where the file system has no hard links."""
    aside = path.with_name("latest.pt.tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        shutil.copyfile(path, aside)
        _fsync(aside)
    os.replace(aside, path.with_name("latest.pt"))
    _fsync(path.parent)                             # the names too must survive a power cut


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def list_checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run: latest.pt, then the others, the last written first. Of two names for
    one file the step's."""
    files = {p: p.stat() for p in out.glob("*.pt")
             if STEP_FILE.fullmatch(p.name) or p.name == "latest.pt"}
    latest = files.get(out / "latest.pt")
    order = sorted(files, key=lambda p: (latest is not None and files[p].st_ino == latest.st_ino,
                                         files[p].st_mtime_ns, p.name), reverse=True)
    found, seen = [], set()
    for path in order:
        if files[path].st_ino not in seen:
            seen.add(files[path].st_ino)
            found.append(path)
    return found


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")


def verify(path: Path) -> None:
    """Read the file once against the zip's CRCs; raises CorruptCheckpoint."""
    _must_exist(path)
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except PermissionError:
        raise
    except Exception as error:              # a damaged zip raises whatever its bytes suggest
        raise CorruptCheckpoint(f"{path} is damaged, or no checkpoint: {error}") from error
    if bad is not None:
        raise CorruptCheckpoint(f"{path} is damaged: the CRC of {bad} does not match")


def load(path: Path) -> dict:
    """The state in a file, its tensors mapped from disk, not yet read nor verified.

    Raises CorruptCheckpoint if it is no checkpoint of ours or holds anything but tensors and plain types.
    """
    _must_exist(path)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise CorruptCheckpoint(f"{path} is refused: it holds more than tensors and plain types") from None
    except PermissionError:
        raise
    except Exception as error:              # damaged bytes raise whatever they suggest
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptCheckpoint(f"{path} is refused: {first}") from error
    needed = {"format", "step", "consumed_samples", "tokens", "optimizer_steps", "skipped_in_a_row", "row",
              "config", "model", "tokenizer", "data", "scaler", "monitor", *STATE}
    if not isinstance(state, dict) or not needed <= set(state) or state["format"] != 3:
        raise CorruptCheckpoint(f"{path} is not a checkpoint of this project (format 3)")
    try:
        cfg = GPTConfig(**state["model"])
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in GPT(cfg).named_parameters()}
        shapes["embed.token.weight"] = (cfg.vocab_size, cfg.n_embd)
        for key in STATE:
            if {name: tuple(t.shape) for name, t in state[key].items()} != shapes:
                raise ValueError(f"its {key} are not those of its model")
    except Exception as error:
        raise CorruptCheckpoint(f"{path} contradicts itself: {error}") from error
    return state


def must_be_whole(path: Path) -> None:
    """Raises CorruptCheckpoint, or FileNotFoundError, where the file is no whole checkpoint of ours."""
    verify(path)
    load(path)


def latest_valid(files: list, passed_over=lambda path, error: None) -> Path | None:
    """The first whole checkpoint of a list (None stands for none, and is whole); `passed_over` is
    told of each that is damaged or gone. Raises NoValidCheckpoint."""
    for path in files:
        try:
            if path is not None:
                must_be_whole(path)
            return path
        except (CorruptCheckpoint, FileNotFoundError) as error:
            passed_over(path, error)
    raise NoValidCheckpoint(f"none of the {len(files)} checkpoints is whole: {', '.join(map(str, files))}; move "
               f"them away to start over")


def load_model(path: Path) -> tuple[GPT, dict]:
    """A whole model in one process on the CPU, from any layout's file, and the file's state."""
    verify(path)
    state = load(path)
    model = GPT(GPTConfig(**state["model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = state["parameters"][name]
            parameter.zero_()[:whole.shape[0]] = whole          # zero: the vocabulary padding
    return model.eval(), state
