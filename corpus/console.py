"""What the user is told: notes, progress, and an error of the system in one line. data.py and the
other files of corpus/ call it."""
import errno
import os
import sys
import time
from contextlib import contextmanager


def note(text: str) -> None:
    print(f"note: {one_line(text)}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    r"""A name may have line ends: each is shown as \n."""
    return text.replace("\r", r"\r").replace("\n", r"\n")


def progress(label: str, total: int | None = None, done: int = 0, quiet=False):
    """Return count_bytes(n), to be called when n more bytes are done. Every five seconds it prints
    how many are, of `total` if that is known, to standard error, unless `quiet`."""
    of_total = f" of {total / 1e6:,.1f}" if total else ""
    printed = time.monotonic()

    def count_bytes(count: int) -> None:
        nonlocal done, printed
        done += count
        if not quiet and time.monotonic() - printed >= 5:
            print(f"{label}: {done / 1e6:,.1f}{of_total} MB", file=sys.stderr, flush=True)
            printed = time.monotonic()
    return count_bytes


def print_lines(lines: list[str]) -> OSError | None:
    """Print to standard output. Returns the error where it is full; a reader that has gone is none.
    """
    try:
        if sys.stdout is not None and sys.stdout.errors == "strict":    # a name in a poor console
            sys.stdout.reconfigure(errors="backslashreplace")
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None if isinstance(error, BrokenPipeError) else error
    return None


# ---- Errors of the system --------------------------------------------------------------------

@contextmanager
def named(path):
    """An OSError in this block has the path, which one of reading or writing lacks."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FAILURES = (*NO_SPACE, errno.EFBIG, errno.EIO)
SYSTEM_ADVICE = {
    errno.ENOSPC: "free some space there, or give another --out",
    errno.EDQUOT: "free some of your quota there, or give another --out",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or give another --out",
    errno.EROFS: "give another --out",
    errno.EACCES: "give another path, or change who may use it",
    errno.EPERM: "give another path, or change who may use it",
    errno.EIO: "the disk fails: copy the file elsewhere and read it there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOENT: "give another path",
    errno.ELOOP: "these links lead to each other: give another path",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "a part of this path is a file: give another",
    errno.EISDIR: "a file is needed there",
    errno.EEXIST: "it is a file: give another path"}


def explain(error: Exception) -> str:
    """One line of an error: of an OSError of the system its path, its reason and what to do."""
    if not isinstance(error, OSError) or error.filename is None:
        return one_line(str(error))
    path = error.filename2 if error.filename2 is not None else error.filename
    advice = SYSTEM_ADVICE.get(error.errno)
    return one_line(f"{path}: {error.strerror}" + (f": {advice}" if advice else ""))


def is_failure(error: Exception) -> bool:
    """Whether it is no mistake of the user: exit status 1, not 2."""
    return isinstance(error, ConnectionError) or getattr(error, "errno", None) in FAILURES
