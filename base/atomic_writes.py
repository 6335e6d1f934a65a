"""How a checkpoint gets its name. It is written under another name, flushed to the disk, then
renamed. So a name belongs to a whole file at each moment, also when the process is killed or the
power fails. checkpoint.py and tools write by it.
"""
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from base.errors import WriteFailed, is_failure
from base.retries import first_cause
from parallelism.collectives import PeerError, out_of_memory


def write_file(state: dict, aside: Path, path: Path) -> None:
    """Write a state to the file `aside`. Once it is whole and on the disk, rename it to `path`.
    Errors are those of `writing`."""
    with writing(aside, path):
        with flushed_file(aside) as file:
            torch.save(state, file)
        os.replace(aside, path)


@contextmanager
def flushed_file(path: Path):
    """A new file, which is on the disk when the block ends."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(aside: Path, path: Path):
    """The block writes a checkpoint as `aside` and renames it to `path`. If it cannot, remove what
    it has written. Raises OSError, or PeerError if a rank that sends its pieces is gone, and the
    allocator's own error if memory is too small."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        cause = first_cause(error)
        if isinstance(cause, PeerError) or out_of_memory(cause):
            raise cause
        status = 1 if is_failure(cause) else 2
        raise WriteFailed(f"{path} could not be written: {cause}", status) from error


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


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk: they too must survive a power failure."""
    if hasattr(os, "O_DIRECTORY"):              # Windows cannot open a folder to flush it
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
