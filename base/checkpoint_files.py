"""The files of checkpoints: which a directory has, which is the newest, which are removed, and how
one is read from a disk that may fail. (What they hold: checkpoint.py, checkpoint_folder.py.)

Reading fails in three ways, which differ in what to do:

    FileNotFoundError       there is no such file: the message says which to give
    DiskFailed              the disk, or the network to it, failed in each attempt
    CorruptCheckpoint       the file is damaged: a run passes over it to an older one
"""
import errno
import math
import os
import pickle
import re
import stat
import zipfile
import zlib
from collections.abc import Container
from contextlib import contextmanager
from pathlib import Path

import torch

from base.disk import remove, retry_transient
from base.errors import first_cause, first_line, warn
from model import OF_VOCABULARY, GPTConfig
from models import make_config

FACTS = "facts.pt"          # in a folder: its entries other than tensors, and CRCs
# A folder has no suffix. One with ".old" is about to be replaced (disk.rename_folder).
STEP_FILE = re.compile(r"step_(\d{8})(\.pt|\.old)?")
LATEST = {"file": "latest.pt", "folder": "latest"}      # names of the newest, by format
# What is not yet whole, or no longer. It is there after a kill.
ASIDE = ("step.pt.tmp", "latest.pt.tmp", "step.tmp", "latest.tmp", "removed.tmp")


class CorruptCheckpoint(ValueError):
    """The file is not a whole checkpoint."""


def step_file(out: Path, step: int, form: str = "file") -> Path:
    """The checkpoint after a step. `form`: --checkpoint-format."""
    return out / (f"step_{step:08d}.pt" if form == "file" else f"step_{step:08d}")


def step_of(path: Path) -> float:
    """The step that a checkpoint's name says; inf for the newest's other name."""
    name = STEP_FILE.fullmatch(path.name)
    return math.inf if name is None else int(name[1])


def facts_file(path: Path) -> Path:
    """The file that has a checkpoint's entries other than tensors."""
    return path / FACTS if path.is_dir() else path


# ---- Reading a file --------------------------------------------------------------------------

@contextmanager
def errors_as_corrupt(path: Path, problem: str):
    """An exception of the block that reads `path` becomes a CorruptCheckpoint that names the
    problem: damaged bytes make zipfile and torch.load raise exceptions of many types. Errors of the
    file system are raised as they are."""
    if (path.parent / FACTS).exists():
        raise ValueError(f"{path} is a part of the checkpoint {path.parent}: give the folder")
    try:
        if not stat.S_ISREG(os.stat(facts_file(path)).st_mode):
            raise FileNotFoundError
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no checkpoint {path}: {advice(path)}") from None
    except (PermissionError, MemoryError):
        raise
    except Exception as error:
        cause = disk_error(error)
        if cause is not None:
            raise cause
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain types"
        raise CorruptCheckpoint(f"{path} {problem}: {reason}") from error


def disk_error(error: Exception) -> OSError | None:
    """The error of the file system behind an error, or None if the file is damaged: its bytes led
    to an invalid request (EINVAL, or no number), or a folder is in its place (EISDIR)."""
    cause = first_cause(error)
    if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL, errno.EISDIR):
        return cause
    return None


def advice(path: Path) -> str:
    """What to give instead of `path`, which is no file."""
    inside = sorted([*path.glob("*.pt"), *(facts.parent for facts in path.glob(f"*/{FACTS}"))])
    if inside:                                          # latest or latest.pt is the first
        return f"it is a directory: give a file in it: {', '.join(map(str, inside))}"
    if str(path) in ("resume", "scratch"):              # of nanoGPT's init_from
        return "leave the flag out: a run resumes from --out, and a new one begins from its seed"
    others = [file.name for file in list_checkpoints(path.parent)]
    if path.suffix == ".pt" and others:                 # --keep has removed it
        return f"{path.parent} has {', '.join(others)}"
    name, file = ("NAME", path) if path.suffix == ".pt" else (path, f"{path.resolve().name}.pt")
    return (f"give a file of train.py, such as out/latest.pt; `python -m tools.huggingface import "
            f"{name} {file}` makes one of weights, for --init-from and sample.py")


def read_state(path: Path) -> dict:
    """What a file holds, or the facts of a folder. Errors are those of torch.load."""
    options = dict(map_location="cpu", mmap=True, weights_only=True)
    try:
        return torch.load(facts_file(path), **options)
    except UnicodeEncodeError:                      # torch takes no name that is not UTF-8
        with open(facts_file(path), "rb") as file:
            return torch.load(f"/proc/self/fd/{file.fileno()}", **options)


@retry_transient
def verify(path: Path, rank: int = 0, world: int = 1) -> None:
    """Read a checkpoint once and compare its bytes with their CRCs: those of the zip, and of a
    folder those in facts.pt. Of a folder each rank reads some of the files, if all ranks of `world`
    call this; a file is for rank 0. Raises CorruptCheckpoint."""
    with errors_as_corrupt(path, "is damaged, cut off, or no checkpoint"):
        if rank == 0:
            with zipfile.ZipFile(facts_file(path)) as archive:
                bad = archive.testzip()
                if bad is not None:
                    raise ValueError(f"the CRC of {bad} does not match")
                for entry in archive.infolist():
                    if entry.external_attr != 0:    # a directory's bit: torch.load would not read
                        raise ValueError(f"the attributes of {entry.filename} are not 0")
        crcs = read_state(path)["crcs"] if path.is_dir() else {}
        for name in sorted(crcs)[rank::world]:
            if not (path / name).exists():
                raise ValueError(f"{name} is missing")
            crc = 0
            with open(path / name, "rb") as file:
                while block := file.read(2 ** 22):
                    crc = zlib.crc32(block, crc)
            if crc != crcs[name]:
                raise ValueError(f"the CRC of {name} does not match")


def check_entries(state: dict, keys: set, optional: Container, kinds: Container) -> None:
    """Raise ValueError if the `keys` of a checkpoint, or the names and shapes of its tensors of the
    `kinds`, are not those of its model. A file of weights alone has no moments."""
    difference = (set(state) - set(optional)) ^ keys
    if difference:
        raise ValueError(f"its keys differ: {sorted(difference)}")
    shapes = parameter_shapes(make_config(**state["model"]))
    for key in kinds:
        tensors = getattr(state[key], "like", state[key])       # those of a folder are not read
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != shapes and (key == "parameters" or state["exp_avg"] or state["exp_avg_sq"]):
            raise ValueError(f"its {key} are not those of its model")


def parameter_shapes(model_config: GPTConfig) -> dict[str, tuple]:
    """{global name: shape} of the full parameters, without the padding of the vocabulary."""
    with torch.device("meta"):
        model = model_config.build()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return shapes | {name: (model_config.vocab_size, *shapes[name][1:]) for name in OF_VOCABULARY
                     if name in shapes}


# ---- The files of a directory ----------------------------------------------------------------

@retry_transient
def list_checkpoints(out: Path) -> list[Path]:
    """The checkpoints in `out`, newest first. A file written after more rollbacks is newer: a
    rollback makes the files of later steps void. Otherwise that of the later step is. The time of
    a file says nothing, because a copy changes it. A file or folder with two names, because latest
    is a link to it, is listed once, under its step's name."""
    try:
        names = os.listdir(out)
    except (FileNotFoundError, NotADirectoryError):
        return []
    files = {}                                      # {inode: path}
    for name in sorted(names):                      # latest.pt comes first
        if STEP_FILE.fullmatch(name) or name in LATEST.values():
            try:
                files[os.stat(out / name).st_ino] = out / name
            except FileNotFoundError:               # another process may just have removed it
                if os.path.islink(out / name):
                    warn(f"{out / name} is a link to {os.readlink(out / name)}, which is missing; "
                         f"passed over")
    orders = {path: read_order(path) for path in files.values()}
    most_rollbacks = max((order[0] for order in orders.values() if order), default=0)
    # Of a damaged one see what its name says.
    return sorted(orders, key=lambda path: orders[path] or (most_rollbacks, step_of(path)),
                  reverse=True)


def read_order(path: Path) -> tuple[int, int] | None:
    """(rollbacks of the run so far, step) of a checkpoint, or None if it cannot be read."""
    try:
        state = read_state(path)
        return state["monitor"].get("rollbacks", 0), state["step"]
    except Exception as error:
        cause = disk_error(error)
        if cause is None or cause.errno in (errno.EACCES, errno.ENOENT):
            return None                             # `verify` tells of it
        raise cause                                 # not damage: list_checkpoints tries again


def remove_old(path: Path, keep: int, protected: Container[str]) -> None:
    """After the checkpoint `path` has been written, remove those beside it, except the newest
    `keep` and those whose name is in `protected`. A rollback has made those of later steps void.
    Remove also what killed saves and the other format have left. A failure costs a warning: `path`
    is whole."""
    out = path.parent
    try:
        remove(out / LATEST["file" if path.is_dir() else "folder"])
        for name in ASIDE:
            remove(out / name)
        files = [file for file in out.iterdir() if STEP_FILE.fullmatch(file.name) and file != path]
        older = [file for file in sorted(files, key=step_of, reverse=True)
                 if step_of(file) <= step_of(path)
                 and (file.suffix != ".old" or not file.with_suffix("").exists())]
        for file in files:
            if file not in older[:keep - 1] and file.name not in protected:
                remove(file)
    except OSError as error:
        warn(f"old checkpoints in {out} could not be removed: {error}")
