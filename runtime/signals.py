"""SIGTERM, Ctrl-C and a closed terminal end a run after the step in progress, with a save. train.py
enters `StopSignal` around the loop of a run, and a plain run does.

    a rank gets a signal     it notes it
    the next sum over all    tells every rank of it: that of a step, or one of an evaluation
    ranks (sums.py)
    the end of this step     evaluation and row as always, then a save, and the run ends

So all ranks end after the same step. What stops a rank before it has ended the step, as a dead peer
does, also stops the save: earlier checkpoints stay.
"""
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

from base.processes import is_rank0


class StopSignal:
    """The signals to this process during the block. A second signal ends the process at once,
    unless it comes within half a second: a launcher may forward what the terminal has already sent.

    number      of the first signal, or None
    agreed      whether all ranks know that one of them has a signal
    """

    def __init__(self):
        self.number = None
        self.since = None               # time of the first signal, in seconds
        self.agreed = False
        self.before = {}                # {number of a signal: its handler before the block}

    def __enter__(self) -> "StopSignal":
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)                # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:       # nohup
                self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self.since = number, now
            write("saving after the step in progress; a second signal ends at once, without saving")
        elif now - self.since >= 0.5:
            write("ended without saving")
            exit_like_signal(number)


def write(line: str) -> None:
    """As `print_rank0`, which the handler may have interrupted."""
    if is_rank0() and sys.stdout is not None:           # otherwise 1 may be another file
        with suppress(OSError):
            os.write(1, f"{line}\n".encode())


def exit_like_signal(number: int) -> None:
    """End this process by the signal's default action, so that Ctrl-C also ends a shell's loop."""
    with suppress(AttributeError, OSError):             # standard output is closed
        sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
        time.sleep(0.5)             # (process 1, as of a container, has no default action)
    os._exit(128 + number)
