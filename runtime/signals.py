"""SIGTERM, Ctrl-C and a closed terminal end a run from any phase, with the last finished step on
the disk. train.py enters `StopSignal` around its loop.

    main thread     [update 7]  evaluation . . . . . . . . . . . . . . . . . . .
    signal                          x
    other thread                    agree: step 7   save its state   end the process

Only the blocks `with stop.held()` change what a checkpoint holds: weights, moments, the place in
the data. Outside of them another thread can save the state of the last finished step, whatever the
main thread computes or waits for. What it has computed since is lost; a resume computes it again.

All ranks must save the same step. Every rank enters the same blocks in the same order, and the sum
over all ranks before an update (sums.py) lets none begin one that another will not reach. The
ranks exchange how many blocks each has begun, and complete blocks up to the largest number.
"""
import ctypes
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from base.checkpoint_files import what_is_left
from base.processes import RunError, all_ranks, is_rank0, print_error
from parallelism.collectives import PeerError, all_reduce
from runtime import console, flipped_bits, run_state
from runtime.run_state import Progress
from runtime.sums import sum_across_ranks


class StopSignal:
    """The signals that end `run`, a train.Run, during the block. A launcher sends them to all its
    ranks; one that gets a signal alone tells the others with its next sum over all ranks. A second
    signal ends the process at once, unless it comes within half a second: a launcher may forward
    what the terminal has already sent. One process ends by the signal, one of several with 0."""

    def __init__(self, run):
        self.run = run
        self.since = None               # time of the first signal to any rank, in seconds
        self.own_since = None           # and to this one
        self.number = None              # of the first; 0: another rank has received it
        self.error = None               # of the main thread, after a signal
        self.thread = None              # that saves
        self.finished = None            # run_state.Progress at the end of the last block
        self.changed = threading.Condition()
        self.begun = 0                  # blocks of `held`
        self.ended = 0
        self.allowed = math.inf         # blocks that may begin
        self.closed = False             # the run has made all steps: too late to stop
        self.left = False               # the block of this StopSignal has ended

    def __enter__(self) -> "StopSignal":
        self.finished = Progress.of(self.run).copy()
        self.run.stop = self
        # Python runs a handler in the main thread, when that returns from what it waits for. The
        # byte of `set_wakeup_fd` is written at once.
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        numbers = [signal.SIGINT, signal.SIGTERM]
        # (nohup has it ignored; Windows has none.)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        """After a signal, an error outside of `held` is no news: other ranks have ended, or the
        compiler that --compile has started got Ctrl-C too, and may tell it first. But a launcher
        sends a signal when a rank is lost: then the loss is the news."""
        if self.since is None and error is not None and not isinstance(error, PeerError):
            time.sleep(0.2)
        if self.since is not None and error is not None and self.begun == self.ended:
            with self.changed:
                self.error = error
                self.changed.notify_all()
            threading.Event().wait()            # the other thread ends the process
        with self.changed:
            self.left = True
            self.changed.notify_all()
        if self.thread is not None and error is None:
            self.thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.writer.close()                     # ends `listen`

    @contextmanager
    def held(self):
        """A signal waits for the end of the block, on all ranks; or the block never begins."""
        with self.changed:
            self.changed.wait_for(lambda: self.begun < self.allowed)
            self.begun += 1
        yield
        with self.changed:
            self.finished = Progress.of(self.run).copy()
            self.ended += 1
            self.changed.notify_all()

    def close(self) -> None:
        """From here on a signal to this rank comes too late. A sum over all ranks tells them of one
        from before, so that their threads end together. Every rank calls it."""
        with self.changed:
            self.closed = True
        sum_across_ranks(self.run, {})

    def listen(self) -> None:
        """Wait for signals, until the block of this StopSignal ends."""
        with self.reader:
            while numbers := self.reader.recv(64):
                for number in set(numbers) & self.before.keys():
                    self.receive(number)

    def receive(self, number: int = 0) -> None:
        """Begin to end the run. `number` 0: another rank has received the signal."""
        now = time.monotonic()
        with self.changed:              # both threads may call this
            is_first = self.since is None and (number == 0 or not self.closed)
            is_second = self.own_since is not None and number > 0 and now - self.own_since >= 0.5
            if is_first:
                self.since, self.number = now, number
                self.thread = threading.Thread(target=self.end, daemon=True)
            if number > 0 and self.own_since is None:
                self.own_since = now
        if is_first:
            self.thread.start()         # first: the terminal may be stopped
            if not self.closed:
                self.write("saving the last finished step; a second signal ends at once, without "
                           "saving")
        elif is_second:
            self.write("ended without saving")
            exit_like_signal(number)

    @staticmethod
    def write(line: str) -> None:
        """As `print_rank0`, which the main thread may be inside of."""
        if is_rank0() and sys.stdout is not None:       # otherwise 1 may be another file
            with suppress(OSError):
                os.write(1, f"{line}\n".encode())

    def end(self) -> None:
        """Save the last finished step, and end the process. If all steps are finished before that,
        the main thread ends it as always."""
        run = self.run
        try:
            if run.device.type == "cuda":
                torch.cuda.set_device(run.device)       # of this thread
            if not self.settle():
                return
            self.save(self.finished)
            run.log.metrics.close()
        except Exception as error:
            if self.left:               # and so have the other ranks: the run has ended
                return
            if run.grid.rank == 0 or not isinstance(error, RunError):   # all have the same one
                print_error(f"rank {run.grid.rank}: ended without saving: {self.error or error}")
            run.log.metrics.close()
            os._exit(1)
        with suppress(AttributeError, OSError):     # it is closed
            sys.stdout.flush()
        if run.grid.world == 1:
            exit_like_signal(self.number)
        os._exit(0)

    def settle(self) -> bool:
        """Let the ranks agree on the last block, and wait for its end here. False if that is the
        end of the run."""
        self.over_ranks(0)              # all have received the signal: none needs to hear of it
        if self.closed:
            return False
        with self.changed:
            self.allowed = self.begun
        last = self.over_ranks(self.allowed)
        with self.changed:
            self.allowed = last
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.ended == self.allowed or self.left or self.error)
            if self.error is not None and self.ended < self.allowed:
                raise self.error
            return not (self.left or self.closed)

    def over_ranks(self, number: int) -> int:
        """The largest `number` of all ranks, once all have called this."""
        if self.run.grid.world == 1:
            return number
        # By the group of the thread that sends checkpoints: the main thread may be in any other.
        group = self.run.grid.groups["save"]
        return all_reduce(torch.tensor(number), group, dist.ReduceOp.MAX).wait().item()

    def save(self, finished: Progress) -> None:
        """Save the state after the last finished step, and tell it. Raises RunError if it cannot be
        written."""
        run = self.run
        if run.log.unwritten is not None:       # an evaluation was under way
            run.log.metrics.write(**run.log.unwritten)
        group = run.grid.groups.get("save")         # None: one process
        # A write that was under way; rank 0 knows how it ended.
        is_lost = all_ranks(run.writer.wait, group=group) is not None
        if finished.step > (run.saved_step or 0) or self.over_ranks(int(is_lost)):
            difference = flipped_bits.find_difference(run, by_signal=True)
            if difference is not None:
                reason, _ = flipped_bits.report(run, difference)
                raise RunError(f"{reason}; {what_is_left(Path(run.config.out))}")
            run_state.judge_checkpoint(run.config, finished, is_start=False)
            run_state.submit(run, finished)
            all_ranks(lambda: run.writer.wait(required=True), group=group)
        console.report_stop(run, finished.step)


def exit_like_signal(number: int) -> None:
    """End this process by the signal's default action, so that Ctrl-C also ends a shell's loop."""
    if os.name == "posix":
        # signal.signal is for the main thread alone, which may be inside of something else.
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
        time.sleep(0.5)             # (process 1, as of a container, has no default action)
    os._exit(128 + number)
