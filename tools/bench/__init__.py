"""Measure speed and memory: the tables of docs/measurements.md. Nothing is asserted.

    python -m tools.bench                       # all tables: an hour on a quiet machine
    python -m tools.bench parallel_stack        # one or more, by name
    python -m tools.bench gpu                   # on one GPU: tools/bench/gpu.py
    python -m tools.bench paper                 # counts, without a GPU: tools/bench/paper.py

Where PyTorch's own parallel stack (tools/bench/pytorch_stack.py) does the same work, both sides
take turns, and their medians and the ratio are printed. The other files here are started by these
commands alone.
"""
