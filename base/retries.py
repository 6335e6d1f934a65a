"""Errors of the file system, which may come from a network and last for a while. checkpoint.py,
checkpoint_files.py and checkpoint_folder.py read by `retry_transient`.
"""
import errno
import time
from functools import wraps
from pathlib import Path

from base.processes import RunError
from parallelism.collectives import PeerError

RETRY_SECONDS = (0, 0.2, 1, 3)      # waits before each attempt to read


class ReadFailed(RunError, OSError):
    """The file system failed repeatedly. The file itself may be whole."""


def retry_transient(read):
    """Decorator of functions that read a path: try again after an error of the file system, which
    a network may cause for a while. Raises ReadFailed if the error persists: the file must not be
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
        raise ReadFailed(f"{path} could not be read ({reason}): start again when the file system "
                         f"works")
    return read_with_retries


def first_cause(error: BaseException) -> BaseException:
    """The system's error, or that of a lost peer, which zipfile and torch's zip writer hide behind
    their own."""
    while error.__context__ is not None and not isinstance(error, PeerError):
        error = error.__context__
    return error
