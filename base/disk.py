"""Files and folders on a disk, which may fill up, fail for a while, or lose its power.

A checkpoint is written under another name, flushed to the disk, then renamed. So a name belongs to
a whole file or folder at each moment, also when the process is killed or the power fails. Reading
is tried again, because a disk behind a network may fail for a while.
"""
import errno
import os
import shutil
import time
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist

from base.errors import DiskFailed, first_cause, is_failure, out_of_memory, warn

RETRY_SECONDS = (0, 0.2, 1, 3)      # waits before each attempt to read


def retry_transient(read):
    """Decorator of functions that read a path: try again after an error of the file system, which
    a network may cause for a while. Raises DiskFailed if the error persists: the file must not be
    passed over as damaged."""
    @wraps(read)
    def read_with_retries(path: Path, *args):
        for seconds in RETRY_SECONDS:
            time.sleep(seconds)
            try:
                return read(path, *args)
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as error:
                if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):        # a mistake in the path
                    raise
                reason = error.strerror
        raise DiskFailed(f"{path} could not be read ({reason}): start again when the file system "
                         f"works")
    return read_with_retries


def write_file(state: dict, aside: Path, path: Path) -> None:
    """Write a state to the file `aside`. Once it is whole and on the disk, rename it to `path`.
    Errors are those of `writing`."""
    with writing(aside, path):
        with flushed_file(aside) as file:
            torch.save(state, file)
        os.replace(aside, path)


@contextmanager
def flushed_file(path: Path, mode: str = "wb"):
    """A new file, which is on the disk when the block ends."""
    with open(path, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(aside: Path, path: Path):
    """The block writes a checkpoint as `aside` and renames it to `path`. If it cannot, remove what
    it has written. Raises OSError, or DistError if a rank that sends its pieces is gone, and the
    allocator's own error if memory is too small."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
        cause = first_cause(error, until=dist.DistError)        # which has causes of its own
        if isinstance(cause, dist.DistError) or out_of_memory(cause):
            raise cause
        status = 1 if is_failure(cause) else 2
        raise DiskFailed(f"{path} could not be written: {cause}", status) from error


def link_file(path: Path, name: Path) -> None:
    """Give the file `path` a second name, which another file may have had. At each moment the name
    belongs to a whole file. Errors are those of `writing`."""
    aside = name.with_name(name.name + ".tmp")
    aside.unlink(missing_ok=True)               # a killed save may have left it
    with writing(aside, name):
        with suppress(OSError):
            os.link(path, aside)
        if not aside.exists():                  # the file system has no hard links
            with open(path, "rb") as file, flushed_file(aside) as copy:
                shutil.copyfileobj(file, copy)
        os.replace(aside, name)


def rename_folder(aside: Path, path: Path, name: Path) -> None:
    """Give a folder that is whole its name, and the link `name` to it. A folder that had the name
    is called .old first, and `list_checkpoints` lists it: at each moment one of the two is there.
    (`remove_old` removes it.)"""
    old = path.with_name(path.name + ".old")
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(aside, path)
    link = name.with_name(name.name + ".tmp")
    link.unlink(missing_ok=True)
    try:
        if name.is_dir() and not name.is_symlink():     # a copy may have made a folder of the link
            remove(name)
        os.symlink(path.name, link)
        os.replace(link, name)
    except OSError as error:            # a run needs no link: the folder has its name
        with suppress(OSError):
            name.unlink(missing_ok=True)                # of an older folder
        warn(f"{path} is whole, but no link {name} can be made to it: {error.strerror}")
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint, if it is there. A folder loses its name first: half of it is none."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    aside = path.with_name("removed.tmp")
    if path != aside:
        remove(aside)                           # a killed process has left it
        os.rename(path, aside)
        flush_folder(path.parent)
    shutil.rmtree(aside)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk: they too must survive a power failure."""
    if hasattr(os, "O_DIRECTORY"):              # Windows cannot open a folder to flush it
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
