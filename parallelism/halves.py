"""--tp-overlap: a block computes two halves of its microbatch in turn, so that the sum over the
tensor-parallel ranks of one half travels while the other half is computed.

The rows of a batch do not depend on each other. With halves a and b, a GPT's block is

    computes   attention a   attention b   MLP a         MLP b
    travels                  attention a   attention b   MLP a         MLP b

Of the four half sums of forward, three travel behind products; the block waits for the last. (To
hide that too, blocks would have to hand over what is on its way: through recomputation, ZeRO's
gathers, and messages between stages.) In backward TP3 of tensor.py hides the sums of dx behind dW,
here those of each half. Sequence parallelism is refused: a half begins with an all-gather, which
NCCL, whose operations of a group run in order, would send behind the other half's reduce-scatter.
(So also attention with shared heads, or with a norm over all heads, hides little on GPUs.)

It costs products of half the rows, which are slower, and a copy of (B, T, C) a block. By the model
of tools.plan a step with tp 8 in a node of H100 takes 0.92 to 0.96 of the time with microbatches of
4 or 8 sequences (a GPT of 13B, Llama 8B and 70B), 0.94 to 1.01 with those of 2; with tp 2, 0.99. No
GPU has run it, so it is off by default.

In its plain form, where attention and mlp (each with its norm) return a product whose sum is under
way, and `finish` waits for the sum and adds the bias:

    y_a = attention(a)
    y_b = attention(b)              # a's sum travels
    a = a + finish(y_a)
    y_a = mlp(a)                    # b's sum travels
    b = b + finish(y_b)
    y_b = mlp(b)                    # a's sum travels
    a = a + finish(y_a)
    b = b + finish(y_b)

Domino (Wang et al. 2024) cuts batches like this in training, and columns of matrices besides.
DeepSeek-V3 (2024, section 3.4.1) reads prompts in two microbatches in turn. Megatron-LM and
torchtitan instead cut one product and its collective into chunks.
"""
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn

from model import GPT


def compute_in_halves(model: GPT) -> None:
    """Let each block of a stage compute `in_halves`."""
    for block in model.blocks.values():
        for linear in (block.attn.proj, block.mlp.down):
            linear.forward = linear.start
        block.forward = partial(in_halves, block)


def branches(block: nn.Module) -> list:
    """[(start, finish)] of attention and of the MLP. start(x, mask) -> (y, work): the product that
    ends the branch, and its sum under way. finish(y, work) -> what the block adds to x."""
    norm1, norm2 = block.norm1, getattr(block, "norm2", block.norm1)        # "one norm"
    no_norm = nn.Identity()
    before, behind = (norm1, norm2), (no_norm, no_norm)
    if residual(block) == "norm after":
        before, behind = behind, before

    def attention(x, mask):
        return block.attn(before[0](x), None, mask)

    def mlp(x, mask):
        return block.mlp(before[1](x))
    return [(attention, lambda *started: behind[0](block.attn.proj.finish(*started))),
            (mlp, lambda *started: behind[1](block.mlp.down.finish(*started)))]


def residual(block: nn.Module) -> str:
    """One of models.llama.RESIDUALS; a GPT's block is serial."""
    return getattr(block, "residual", "serial")


@dataclass
class Half:
    """Half of a batch's rows in a block: x (B / 2, T, C), its part of the mask, and [(finish, y,
    work)] of the branches whose sums are under way."""
    x: torch.Tensor
    mask: torch.Tensor | None
    started: list = field(default_factory=list)

    def finish(self) -> None:
        """Wait for the sums and add the branches to x."""
        while self.started:
            finish, y, work = self.started.pop(0)
            self.x = self.x + finish(y, work)


def in_halves(block: nn.Module, x: torch.Tensor, dropout_seed=None, mask=None) -> torch.Tensor:
    """block(x, dropout_seed, mask), (B, T, C) -> (B, T, C). Without dropout, of which both halves
    would draw the same mask."""
    masks = [None, None] if mask is None else mask.chunk(2)
    halves = [Half(*parts) for parts in zip(x.chunk(2), masks)]
    is_parallel = residual(block) in ("parallel", "one norm")       # both branches read the same x
    try:
        for start, finish in branches(block):
            for half in halves:
                if not is_parallel:
                    half.finish()
                half.started.append((finish, *start(half.x, half.mask)))
        for half in halves:
            half.finish()
        return torch.cat([half.x for half in halves])
    finally:        # Recomputation ends by an exception behind the last tensor that backward needs.
        for half in halves:
            for _, _, work in half.started:
                work.wait()
