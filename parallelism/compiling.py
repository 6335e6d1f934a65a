"""--compile: what torch.compile may turn into fewer kernels. parallel.build_rank calls it.

Communication and dropout stay eager: they break a block's graph, or the compiler would take a
mask's seed for a constant. The rest of a block is one graph without them, compiled once for all
blocks.
"""
from functools import partial

import torch
import torch.nn as nn

from model import GPT, Dropout
from parallelism.context import ContextParallelAttention
from parallelism.tensor import TensorParallel, softmax_over_ranks


def runs_eagerly(module: nn.Module) -> bool:
    if isinstance(module, TensorParallel):      # it communicates if it cuts a parameter
        return module.grid.tp > 1 and len(module.partition_dim) > 0
    if isinstance(module, ContextParallelAttention):
        return True
    return isinstance(module, Dropout) and module.p > 0


def compile_method(module: nn.Module, name: str) -> None:
    """Compile a method of a module, except for the submodules in it that run eagerly."""
    eager = [part for part in module.modules() if part is not module and runs_eagerly(part)]
    for part in eager:
        part.forward = torch.compiler.disable(part.forward)
    setattr(module, name, torch.compile(getattr(module, name), fullgraph=not eager))


def compile_model(model: GPT) -> None:
    """Compile each block's forward; of embedding and head everything but the lookup and the
    products with the token matrix."""
    if model.embed is not None:
        compile_method(model.embed, "add_positions")
    if model.head is not None:
        head = model.head
        compile_method(head, "normalize")
        if head.grid.tp > 1:            # two parts, before and after the all-reduces
            eager = torch.compiler.disable(softmax_over_ranks)
            head.chunk_loss = partial(head.chunk_loss, over_ranks=eager)
        head.chunk_loss = torch.compile(head.chunk_loss, fullgraph=head.grid.tp == 1, dynamic=False)
    for block in model.blocks.values():
        compile_method(block, "forward")
