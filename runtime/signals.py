"""Ctrl-C (SIGINT), SIGTERM, SIGHUP and SIGUSR1 end a run after the step in progress, with a save.
A run trains in the block of a `StopSignal`.

    a rank gets a signal     it notes it
    the next sum over all    tells every rank of it: that of a step, or one of an evaluation
    ranks (step_stats.py)
    the end of this step     evaluation and row as always, then a save, and the run ends

So all ranks end after the same step. What stops a rank before it has ended the step, as a dead peer
does, also stops the save: earlier checkpoints stay.
"""
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from base.agreement import is_rank0
from base.errors import RunError, first_line, print_error

# A terminal sends the first and, when it is closed, the third; a launcher the second; Slurm, before
# the time limit, what its --signal says, such as USR1.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


@dataclass
class StopSignal:
    """The signals to this process during the block. The end of the block then ends a process alone
    by the first one, also after a run's last step, so that Ctrl-C ends a shell's loop; ranks go on
    to exit status 0. A second signal ends the process at once, unless it comes within half a
    second: a launcher may forward what the terminal has already sent."""
    number: int | None = None       # of the first signal
    since: float = 0.0              # time of the first signal, in seconds
    agreed: bool = False            # all ranks know that one has a signal (sum_across_ranks)
    before: dict = field(default_factory=dict)      # {signal: its handler before the block}

    def __enter__(self) -> "StopSignal":
        for name in NAMES:
            number = getattr(signal, name, None)                # Windows lacks two
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:       # nohup
                self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, kind, error, trace) -> None:
        """After a signal, an error ends the process in one line: the programs that it has started,
        such as the compiler of --compile, get Ctrl-C too."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if not self.requested or isinstance(error, (RunError, dist.DistError, SystemExit)):
            return
        if error is not None:
            print_error(f"ended without saving: {type(error).__name__}: {first_line(error)}")
            if dist.is_initialized():
                os._exit(1)             # the other ranks notice
        if not dist.is_initialized():
            exit_like_signal(self.number)

    @property
    def requested(self) -> bool:
        """Whether this process has received a signal."""
        return self.number is not None

    def receive(self, number: int, frame) -> None:
        now = time.monotonic()
        if not self.requested:
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
    """End this process by the signal's default action."""
    with suppress(AttributeError, OSError):             # standard output is closed
        sys.stdout.flush()
    if os.name == "posix":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(0.5)             # (process 1, as of a container, has no default action)
    os._exit(128 + number)
