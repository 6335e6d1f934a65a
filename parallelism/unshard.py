"""When parameters that the replicas shard are whole: with ZeRO 3, from shortly before a block's use
to its end; with ZeRO 1 and 2, once their updates have arrived. build.build_rank calls
`gather_before_use`; FlatParameters.unshard and reshard (zero.py) do the work.
"""
from functools import partial

import torch

from model import GPT
from parallelism.zero import FlatParameters


def gather_before_use(model: GPT, flat: FlatParameters) -> None:
    """Wrap the forward of the embedding, each block and the head in unshard and reshard. ZeRO 1 and
    2 (DP10): the all-gather after AdamW is awaited there, bucket by bucket. ZeRO 3 (DP9):

        forward    unshard block i, prefetch i + 1, run, reshard
        backward   unshard block i, prefetch i - 1, run; _start_grad_sync reduces and reshards

    The tied matrix stays gathered from the embedding to the end of the head's forward, because the
    head computes its gradients there. The other parameters of the ends, and the last block, stay
    gathered until backward."""
    ends = [bucket for bucket in flat.buckets if bucket.name in ("tied", "ends")]
    halves = flat.buckets[len(ends):]
    blocks = list(zip(halves[::2], halves[1::2]))                   # [(attention, MLP)]

    def run_embed(forward, *args):
        flat.unshard(ends, prefetch=blocks[0])
        return forward(*args)

    def run_block(forward, current, previous, following, *args):
        flat.unshard(current, prefetch=following)
        y = forward(*args)
        if y.requires_grad:         # the hook runs when y's gradient is there, before the block's
            y.register_hook(lambda dy: flat.unshard(current, prefetch=previous))
        if following or not y.requires_grad:
            flat.reshard(current)
        return y

    def run_head(forward, *args):
        flat.unshard(ends)
        y = forward(*args)
        flat.reshard(ends[:1])                                      # the tied matrix
        if not torch.is_grad_enabled():
            flat.reshard(ends[1:])
        return y

    if model.embed is not None:
        model.embed.forward = partial(run_embed, model.embed.forward)
    if model.head is not None:
        model.head.forward = partial(run_head, model.head.forward)
    for block, current, previous, following in zip(model.blocks.values(), blocks, [(), *blocks],
                                                   [*blocks[1:], ()]):
        block.forward = partial(run_block, block.forward, current, previous, following)
