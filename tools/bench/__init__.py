"""Measure speed and memory: the tables of docs/measurements.md. Nothing is asserted.

    python -m tools.bench                       # all tables: an hour on a quiet machine
    python -m tools.bench parallel_stack        # one or more, by name
    python -m tools.bench gpu                   # on one GPU: tools/bench/gpu.py

    tables.py       the tables of CPUs          gpu.py          the parts for a GPU
    peak.py         memory of four processes    trace.py        what a profile says
    peer.py         PyTorch's parallel stack    shared_gpu.py   train.py, several times on one GPU
    launch.py       starts these programs       report.py       the page of the GPU's parts
"""
