"""Context parallelism: what parallel.ContextParallelAttention lacks for other models than GPTs, and

    difference                               gain                       where
    backward gathers and attends again       K and V of T / cp          recompute_attention
      (Korthikanti et al. 2022, section 5)   positions are kept, not T

It costs another gather and a third of attention's arithmetic.
"""
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from model import GPT, CoreAttention
from models.llama import Rotary
from models.window import WindowedAttention, with_window
from parallel import ContextParallelAttention, cut_sequence, replace_modules


class WindowedContextAttention(ContextParallelAttention):
    """Attention reaches back `window` positions (models/window.py)."""

    def __init__(self, plain: WindowedAttention, grid):
        super().__init__(plain, grid)
        self.window = plain.window

    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, with_window(mask, self.window, k.shape[2], k.device))


def attention_of(plain: CoreAttention, grid) -> ContextParallelAttention:
    if isinstance(plain, WindowedAttention):
        return WindowedContextAttention(plain, grid)
    return ContextParallelAttention(plain, grid)


class ContextParallelRotary(Rotary):
    """Local positions, 0 to T / cp - 1, become those of the whole sequence."""

    def __init__(self, plain: Rotary, grid):
        super().__init__(plain.cfg)
        self.grid = grid

    def positions(self, T, device):
        whole = torch.arange(T * self.grid.cp, device=device)
        return cut_sequence(whole, self.grid.cp_rank, self.grid.cp)


def recompute_attention(model: GPT) -> None:
    """Backward gathers and attends again. Autograd keeps this rank's own q, k and v alone."""
    for block in model.blocks.values():
        attention = block.attn.core_attention
        # Dropout masks depend on seeds only, so there is no generator state to restore.
        attention.forward = partial(checkpoint, attention.forward, use_reentrant=False,
                                    preserve_rng_state=False)


def context_parallel(model: GPT, grid, blocks_recompute: bool = True) -> None:
    """Replace the modules that have to know all positions of a sequence. Attention is recomputed,
    unless whole blocks are (--recompute)."""
    if grid.cp == 1:
        return
    replace_modules(model, {"attn.core_attention": attention_of,
                            "attn.rotary": ContextParallelRotary}, grid)
    if not blocks_recompute:
        recompute_attention(model)
