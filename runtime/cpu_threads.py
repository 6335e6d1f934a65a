"""How many threads one process on a CPU computes with. runtime/startup.py calls `choose_threads`
before the first step.

A matrix product ends when its slowest thread does. On a busy machine another program holds that
thread's core, and the other threads spin: a step may take ten times as long as with one thread. So
a run that begins on a busy machine takes one thread. It decides once, because another number of
threads adds in another order: the last digits would change within the run.
"""
import os
import statistics
import time

import torch
import torch.nn.functional as F

from base.processes import print_rank0

TRIAL_SECONDS = 0.05


def choose_threads(device: torch.device, world: int) -> None:
    """Take one thread if that is faster than all. It takes 0.3 seconds to find out. Where there are
    several processes, or OMP_NUM_THREADS is set, somebody has chosen."""
    count = torch.get_num_threads()
    has_choice = device.type == "cpu" and world == 1 and "OMP_NUM_THREADS" not in os.environ
    if has_choice and count > 1 and one_is_faster(count):
        torch.set_num_threads(1)
        print_rank0(f"note     this machine is busy, {count} threads wait for each other: "
                    f"computing with one, which changes the last digits (OMP_NUM_THREADS sets the "
                    f"number)")


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
