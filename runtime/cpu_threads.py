"""How many threads one process on a CPU computes with. runtime/startup.py calls `Threads.compare`
before the first step, runtime/console.py `after_step`.

A matrix product ends when its slowest thread does. On a busy machine another program holds that
thread's core, and the other threads spin: a step may take ten times as long as with one thread. A
process that notices this takes one thread, and returns to all when they get their cores again.
Another number of threads adds in another order: the last digits differ (with --exact there is one).
"""
import math
import os
import statistics
import time
from collections import deque

import torch
import torch.nn.functional as F

from base.processes import print_rank0

TRIAL_SECONDS = 0.05
PAUSE = 60              # seconds between two comparisons


class Threads:
    """The threads of a run, which is on a CPU or not, in `world` processes. They stay as they are
    where there are several processes or OMP_NUM_THREADS is set: somebody has chosen."""

    def __init__(self, device: torch.device, world: int):
        self.all = torch.get_num_threads()
        self.may_change = (device.type == "cpu" and world == 1 and self.all > 1
                           and "OMP_NUM_THREADS" not in os.environ)
        self.recent = deque(maxlen=5)           # seconds of the last steps
        self.fastest = math.inf                 # the least median of them
        self.compared_at = -math.inf

    def after_step(self, seconds: float) -> None:
        """Compare when steps have become slow and, while there is one thread, every minute."""
        self.recent.append(seconds)
        median = statistics.median(self.recent)
        self.fastest = min(self.fastest, median)
        is_due = torch.get_num_threads() == 1 or median > 2 * self.fastest
        if is_due and time.monotonic() - self.compared_at >= PAUSE:
            self.compare()

    def compare(self) -> None:
        """Compute with one thread or all, whichever is faster; it takes 0.3 seconds to find out."""
        if not self.may_change:
            return
        self.compared_at = time.monotonic()
        has_one = torch.get_num_threads() == 1
        is_busy = one_is_faster(self.all)
        torch.set_num_threads(1 if is_busy else self.all)
        if is_busy and not has_one:
            print_rank0(f"note     this machine is busy, {self.all} threads wait for each other: "
                        f"computing with one, which changes the last digits (OMP_NUM_THREADS sets "
                        f"the number)")
        elif has_one and not is_busy:
            print_rank0(f"note     this machine is free again: computing with {self.all} threads")


def one_is_faster(count: int) -> bool:
    """Whether one thread computes faster than so many, which do not get their cores."""
    x, weight = torch.ones(512, 192), torch.ones(768, 192)
    rates = {count: [], 1: []}
    shares = []             # of the time of a core, that a thread gets
    for threads in 3 * list(rates):
        torch.set_num_threads(threads)
        started, cpu = time.perf_counter(), time.process_time()
        trials = 0
        seconds = 0.0
        while seconds < TRIAL_SECONDS:
            F.gelu(F.linear(x, weight))
            trials += 1
            seconds = time.perf_counter() - started
        rates[threads].append(trials / seconds)
        if threads > 1:
            shares.append((time.process_time() - cpu) / seconds / threads)
    torch.set_num_threads(count)
    is_slower = statistics.median(rates[count]) < 0.7 * statistics.median(rates[1])
    return is_slower and statistics.median(shares) < 0.8
