"""Measure speed and memory, on a card that is lent for half an hour or on two CPU cores.

    python -m tools.bench gpu                   # all parts, about 20 minutes
    python -m tools.bench gpu race memory       # some of them
    python -m tools.bench cpu                   # the race alone

    race        train.py and PyTorch's own stack (pytorch_stack.py), in turn: alone, and on several
                GPUs (CPU: two processes) by DDP and FSDP2. Wanted: 0.95 of the plain loop that is
                compiled as a whole. (An H100 in November 2026: 0.99.)
    memory      the allocator's peak beside the estimate of tools.plan. Wanted: within 10%
    profile     the kernels of the first steps, by torch.profiler
    layouts     on several GPUs: losses of train.py in many layouts beside those of one process on
                the CPU. Wanted: within 1e-5

Nothing is asserted. It makes its own data, needs nothing but PyTorch, and writes its page to --out.
Each measurement is a process of its own, and one that fails is a row with its error. No card has
run these four parts yet: commit 8a7dec6 has the program that measured the H100.
"""
