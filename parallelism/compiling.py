"""torch.compile, block by block: what is compiled, and what runs eagerly between.
"""
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from model import GPT, Dropout
from parallelism.tensor import TensorParallel, softmax_over_ranks


def wrap_model(model: GPT, recompute: bool, compile: bool) -> None:
    """Compile each block's forward, or recompute its activations, or both. Embedding and head are
    compiled too, except for the lookup and the products with the token matrix. Communication and
    dropout run eagerly; the rest is compiled once for all blocks. PP6: backward recomputes a block
    from its input: 1 stored value per position and channel instead of about 16, for a third more
    FLOPs (by blocks as in Chen et al. 2016)."""
    def runs_eagerly(module):
        if isinstance(module, TensorParallel):      # it communicates if it cuts a parameter
            return module.grid.tp > 1 and len(module.partition_dim) > 0
        return isinstance(module, Dropout) and module.p > 0

    def compile_method(module, name):
        eager = [part for part in module.modules() if part is not module and runs_eagerly(part)]
        for part in eager:
            part.forward = torch.compiler.disable(part.forward)
        setattr(module, name, torch.compile(getattr(module, name), fullgraph=not eager))

    if compile and model.embed is not None:
        compile_method(model.embed, "add_positions")
    if compile and model.head is not None:
        head = model.head
        compile_method(head, "normalize")
        if head.grid.tp > 1:            # two parts, before and after the all-reduces
            eager = torch.compiler.disable(softmax_over_ranks)
            head.chunk_loss = partial(head.chunk_loss, over_ranks=eager)
        head.chunk_loss = torch.compile(head.chunk_loss, fullgraph=head.grid.tp == 1, dynamic=False)
    for block in model.blocks.values():
        if compile:
            compile_method(block, "forward")
        if recompute:
            # Dropout masks depend on seeds only, so there is no generator state to restore.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                    preserve_rng_state=False)
