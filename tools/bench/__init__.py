"""Measure speed and memory on a card that is lent for half an hour. Nothing is asserted.

    python -m tools.bench                       # all parts, about 15 minutes on a GPU
    python -m tools.bench race memory           # some of them
    python -m tools.bench --device cpu          # on two CPU cores; memory is a GPU's alone

    race        train.py and PyTorch's own stack (pytorch_stack.py), in turn: alone, and on several
                GPUs (CPU: two processes) with each kind of parallelism that both have. Wanted: 0.95
                of the plain loop that is compiled as a whole. (An H100 in November 2026: 0.99.)
    memory      the allocator's peak beside the estimate of tools.plan. Wanted: within 10%
    profile     the kernels of the first steps, by torch.profiler
    layouts     on several GPUs: losses of train.py in many layouts beside those of one process on
                the CPU. Wanted: within 1e-5

It makes its own data, needs nothing but PyTorch, and writes its page to --out. Each measurement is
a process of its own, and one that fails is a row with its error.
"""
