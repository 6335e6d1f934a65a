"""Errors of a user or of the machine, in one line."""
import errno
import os
import re
import sys
from contextlib import contextmanager, suppress

FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
SYSTEM_ADVICE = {
    errno.ENOSPC: "free some space there, or give another path",
    errno.EDQUOT: "free some of your quota there, or give another path",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or give another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "the disk fails: copy the file elsewhere and read it there"}


class RunError(Exception):
    """Ends the run: every rank raises it with the same message, rank 0 prints it, and all exit with
    `status` (1: the run failed, 2: usage error)."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


class DiskFailed(RunError, OSError):
    """A file could not be read or written. The system's error, if there is one, is in the message.
    What is read may be whole."""


def refuse(rules: list[tuple]) -> None:
    """Raise a ValueError that names all problems of these rules (is it a problem?, which one)."""
    text = "; ".join(problem for is_problem, problem in rules if is_problem)
    if text:
        raise ValueError(text)


def print_error(message, program: str = "train.py") -> None:
    with suppress(OSError):                 # a closed pipe does not stop the run
        print(f"{program}: {message}", file=sys.stderr, flush=True)


def warn(text: str, program: str = "train.py") -> None:
    print_error(f"warning: {text}", program)


@contextmanager
def errors_in_one_line(program: str):
    """End the program in one line on standard error if the block raises an error of its user, with
    status 2, or of the machine, with status 1. Other errors keep their traceback."""
    try:
        yield
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        if not isinstance(error, BrokenPipeError):      # `| head` has read enough
            print(f"{program}: {describe(error)}", file=sys.stderr)
        if sys.stdout is not None and is_of_stdout(error):
            # Python flushes once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(getattr(error, "status", 1 if is_failure(error) else 2))


def is_of_stdout(error: BaseException) -> bool:
    """Whether a system's error is of standard output: all others have the path of their file."""
    return isinstance(error, OSError) and error.errno is not None and error.filename is None


def describe(error: BaseException) -> str:
    """One line of an error: of an OSError of the system its path, its reason and what to do."""
    if is_of_stdout(error):
        text = f"standard output cannot be written: {error.strerror}"
    elif isinstance(error, OSError) and error.filename is not None:
        path = error.filename2 if error.filename2 is not None else error.filename
        advice = SYSTEM_ADVICE.get(error.errno, "give another path")
        text = f"{path}: {error.strerror}: {advice}"
    else:
        text = str(error) or type(error).__name__       # a MemoryError has no text
    return one_line(text)


def one_line(text: str) -> str:
    r"""A name may have line ends: each is shown as \n."""
    return text.replace("\r", r"\r").replace("\n", r"\n")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name if it has none. Of NCCL's error the
    last lines, in one: the reason and what to do."""
    text = str(error) or type(error).__name__
    text = re.sub(r"(?s)NCCL error in: .*?\nLast error:\s*(?=\S)(?!Exception)", "NCCL: ", text)
    if "NCCL: " in text:
        return " ".join(text.partition("\nException raised from")[0].split())
    return text.splitlines()[0]


def first_cause(error: BaseException, until: type | tuple = ()) -> BaseException:
    """The first error of the chain that led to this one, or the nearest of the type `until`.
    zipfile, requests and torch's zip writer hide the system's error behind their own."""
    while error.__context__ is not None and not isinstance(error, until):
        error = error.__context__
    return error


def out_of_memory(error: BaseException) -> bool:
    """Whether a CPU or a GPU has too little memory. In an error of NCCL it may be the memory of a
    switch, and NCCL says what to do."""
    text = str(error)
    found = re.search("allocate memory|out of memory|ALLOC_FAILED", text)       # CPU, CUDA, cuBLAS
    return isinstance(error, MemoryError) or (found is not None and "NCCL error" not in text)


@contextmanager
def memory_advice(message: str):
    """An error of too little memory becomes a MemoryError with this `message`, in which its own
    first line stands for {}."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise MemoryError(message.format(first_line(error))) from error


def is_failure(error: BaseException) -> bool:
    """Whether an error is no mistake of the user."""
    kinds = (ConnectionError, MemoryError, FloatingPointError)
    return isinstance(error, kinds) or getattr(error, "errno", None) in FAILURES


@contextmanager
def errors_with_path(path):
    """An OSError in this block has the path, which one of reading or writing lacks."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
