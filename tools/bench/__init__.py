"""Measure speed and memory, on cards that are lent for half an hour or on two CPU cores.

    python -m tools.bench gpu                   # race to layouts on one card, about 20 minutes
    python -m tools.bench gpu race memory       # some of them
    python -m tools.bench eight                 # several cards: about 10 minutes on eight
    python -m tools.bench cpu                   # all but memory and profile, on two CPU cores

    race        train.py and PyTorch's own stack (pytorch_stack.py), by turns, of one rank each.
                Wanted: 0.95 of the plain loop that is compiled as a whole. (An H100: 0.99.)
    memory      the allocator's peak beside the estimate of tools.plan. Wanted: within 10%
    profile     the kernels of the first steps, by torch.profiler
    layouts     losses of train.py in many layouts beside those of one process on the CPU
    bits        --exact in two layouts: the same bits
    resume      a rank is killed, and the same command resumes
    replicas    race and memory on all cards, beside DDP and FSDP2

It writes one table to --out, whose lines are ok or FAIL, and below it what to do about those that
fail; the exit status is then 1. It makes its own data and needs nothing but PyTorch. Each
measurement is a process of its own. No card has run these parts yet: the H100 was measured by the
program of commit 8a7dec6.
"""
