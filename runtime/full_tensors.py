"""Full tensors by global name: what to print, compare or plot of a run, the same in every layout.

    from runtime.full_tensors import full_gradients
    for name, gradient in full_gradients(flat):     # on rank 0 the plain model's p.grad
        print(name, gradient.norm().item())

`flat` is a run's zero.FlatParameters. A rank has no such tensor by itself: gradients add up in flat
buffers, times the loss scale, and a rank holds parts of parameters and of sums. So the ranks send
their pieces to rank 0, as for a checkpoint. All make the same calls in the same order. Rank 0 alone
gets tensors, and must take them all. If there is nothing to read, every rank raises RuntimeError.
"""
import math
from collections.abc import Iterator

import torch

import checkpoint
from parallelism.pieces import file_order, owned_slices
from parallelism.zero import FlatParameters

TAG = 2 ** 30           # of these messages: above the step of a save that may be under way


def full_gradients(flat: FlatParameters) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, gradient of the batch's mean loss) of every parameter, the tied matrix once,
    before clipping and without the loss scale, in the type of the buffers.

    They are there from `finish_grad_sync` to the next `zero_grad`. `adamw_step` multiplies them in
    place by the clip factor, which is divided out again: one more rounding."""
    if not flat.grads_are_summed:
        raise RuntimeError("this step's gradients are not summed over the ranks: call it after "
                           "finish_grad_sync, before the next zero_grad")
    return ((name, gradient.div_(flat.grad_factor))
            for name, gradient in full_tensors(flat, "grad"))


def full_tensors(flat: FlatParameters, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, full tensor in host memory) of every parameter, without padding. `kind`:
    "master", as AdamW updates it, or its moments "exp_avg" and "exp_avg_sq"."""
    if kind not in flat.buckets[0].shard:
        raise RuntimeError(f"full_tensors: there is no {kind} without training")
    grid, dtype = flat.grid, flat.buckets[0].shard[kind].dtype
    copies = checkpoint.copy_pieces(owned_slices(flat), [kind], math.inf)
    order = file_order(flat)
    if grid.rank > 0:
        checkpoint.send_pieces(copies, grid, TAG)
        return iter(())
    return ((scattered.spec.name, checkpoint.full_tensor(scattered, dtype, copies, grid, TAG))
            for scattered in order)
