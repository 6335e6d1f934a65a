"""Notes and progress, which the files of corpus/ tell on standard error."""
import sys
import time

from base.errors import one_line


def note(text: str) -> None:
    print(f"note: {one_line(text)}", file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """A number of things: "1 file", "2 files"."""
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def progress(label: str, total: int | None = None, done: int = 0):
    """Return count_bytes(n), to be called when n more bytes are done. Every five seconds it prints
    how many are, of `total` if that is known, to standard error."""
    of_total = f" of {total / 1e6:,.1f}" if total else ""
    printed = time.monotonic()

    def count_bytes(count: int) -> None:
        nonlocal done, printed
        done += count
        if time.monotonic() - printed >= 5:
            print(f"{label}: {done / 1e6:,.1f}{of_total} MB", file=sys.stderr, flush=True)
            printed = time.monotonic()
    return count_bytes
