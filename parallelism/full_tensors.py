"""Full tensors by global name: what to print, compare or plot of a run, the same in every layout.

    from parallelism.full_tensors import full_gradients
    for name, gradient in full_gradients(flat):         # the plain model's p.grad, on every rank
        if flat.grid.rank == 0:
            print(name, gradient.norm().item())

`flat` is a run's zero.FlatParameters. A rank has no such tensor by itself: gradients add up in flat
buffers, times the loss scale, and a rank holds parts of parameters and of sums.

Each number of a full tensor has one owner among the ranks (parallel.is_owner). So every rank writes
what it owns into zeros of the full shape, and an all-reduce adds them: x + 0 = x, without rounding.
It is meant for inspection, not for every step: every rank needs memory for the full parameter,
twice.

The functions communicate: all ranks must make the same calls in the same order, and take all that
they yield, not rank 0 alone. On every rank they raise RuntimeError if there is nothing to read.
"""
from collections.abc import Iterator

import torch
import torch.distributed as dist

from parallel import Bucket, all_reduce, is_owner
from parallelism.collectives import comm_errors
from parallelism.parameters import ParamSpec
from parallelism.zero import FlatParameters


def full_gradients(flat: FlatParameters) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, gradient of the batch's mean loss) of every parameter, the tied matrix once,
    before clipping and without the loss scale, in the type of the buffers.

    They are there from `finish_grad_sync` to the next `zero_grad`. `adamw_step` multiplies them in
    place by the clip factor, which is divided out again: one more rounding."""
    if not flat.grads_are_summed:
        raise RuntimeError("this step's gradients are not summed over the ranks: call it after "
                           "finish_grad_sync, before the next zero_grad")
    for name, gradient in full_tensors(flat, "grad"):
        yield name, gradient.div_(flat.grad_factor)


@torch.no_grad()
def full_tensors(flat: FlatParameters, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, full tensor on this rank's device) of every parameter, without padding. `kind`:
    "master", as AdamW updates it, or its moments "exp_avg" and "exp_avg_sq"."""
    if kind not in flat.buckets[0].shard:
        raise RuntimeError(f"full_tensors: there is no {kind} without training")
    owned = {spec.name: (bucket, spec) for bucket in flat.buckets for spec in bucket.specs
             if is_owner(spec, flat.grid, flat.num_shards)}
    for name, shape in full_shapes(flat).items():
        full = torch.zeros(shape, dtype=flat.buckets[0].shard[kind].dtype,
                           device=flat.buckets[0].data.device)
        if name in owned:
            full.copy_(own_part(flat, *owned[name], kind))
        yield name, all_reduce(full, flat.grid.groups["world"]).wait()


def full_shapes(flat: FlatParameters) -> dict[str, tuple]:
    """{global name: full shape} of all stages."""
    shapes_of_stage = {spec.name: spec.shape for bucket in flat.buckets for spec in bucket.specs
                       if not spec.is_tied_copy}
    shapes = [shapes_of_stage] * flat.grid.world
    if flat.grid.world > 1:
        with comm_errors("exchange with all ranks"):
            dist.all_gather_object(shapes, shapes_of_stage)
    return {name: shape for of_rank in shapes for name, shape in of_rank.items()}


def own_part(flat: FlatParameters, bucket: Bucket, spec: ParamSpec, kind: str) -> torch.Tensor:
    """What this rank has of a parameter, in zeros of the full shape."""
    local = torch.zeros(spec.numel, dtype=bucket.shard[kind].dtype, device=bucket.data.device)
    for of_shard, shard_slice, param_slice in bucket.shard_ranges:
        if of_shard is spec:
            local[param_slice].copy_(bucket.shard[kind][shard_slice])
    local = local.view(spec.local_shape)
    parts = [torch.zeros_like(local) for _ in range(spec.num_parts)]
    parts[spec.part_of(flat.grid)] = local
    return spec.join(parts)
