"""A folder for files that are not complete yet, which a process that is stopped does not leave."""
import errno
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path


def check_writable(folder: Path) -> None:
    """Raise an OSError if this folder, or the first of its parents that exists, cannot be
    written."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(exists, os.W_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(exists))


@contextmanager
def new_folder(out: Path):
    """A new folder in `out`, which is removed at the end. A process that is killed leaves it there:
    the next one removes it, unless a process holds its lock."""
    for left in out.glob(".new-*"):
        lock = lock_folder(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=out) as folder:
        lock = lock_folder(folder)
        try:
            yield Path(folder)
        finally:
            if lock is not None:
                os.close(lock)


def lock_folder(folder) -> int | None:
    """The descriptor that holds a folder's lock until it is closed. None if another process holds
    it, or where folders have no locks (Windows, some network drives)."""
    try:
        import fcntl
        lock = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


@contextmanager
def signals_stop():
    """SIGTERM and the end of a terminal stop this block as Ctrl-C does; more of them do not stop
    what it does at its end."""
    def stop(number, frame):
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
               if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers
              if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
