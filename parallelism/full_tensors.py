"""Full tensors by global name: what to print, compare or plot of a run, the same in every layout.

    from parallelism.full_tensors import full_gradients
    for name, gradient in full_gradients(flat):         # the plain model's p.grad, on every rank
        if flat.grid.rank == 0:
            print(name, gradient.norm().item())

`flat` is a run's zero.FlatParameters. A rank has no such tensor by itself. `p.grad` is None,
because gradients add up in flat buffers. `p.main_grad()` is one rank's part of a sum, times the
loss scale. With tensor parallelism a parameter is a part. With ZeRO 3 its memory is freed between
uses, so reading it crashes the process. A pipeline's first and last stage both have the tied
matrix.

Each number of a full tensor has one owner among the ranks (buckets.is_owner). So every rank writes
what it owns into zeros of the full shape, and an all-reduce adds them: x + 0 = x, without rounding.
It is meant for inspection, not for every step: every rank needs memory for the full parameter,
twice.

The functions communicate: all ranks must make the same calls in the same order, not rank 0 alone.
They raise ValueError for an unknown name, or if the ranks make different calls, and RuntimeError if
there is nothing to read, on every rank.
"""
import difflib
import math
from collections.abc import Iterator

import torch

from parallelism.buckets import Bucket, is_owner
from parallelism.collectives import all_gather_object, all_reduce
from parallelism.parameters import TIED, ParamSpec
from parallelism.zero import FlatParameters

MOST_AT_ONCE = 2 ** 22      # numbers that one all-reduce of `full_gradients` adds up
KINDS = ("master", "exp_avg", "exp_avg_sq")


def parameter_names(flat: FlatParameters) -> list[str]:
    """The global names of the whole model's parameters; the tied matrix is there once."""
    return list(full_shapes(flat, "parameter_names(flat)"))


def full_gradient(flat: FlatParameters, name: str) -> torch.Tensor:
    """The gradient of the batch's mean loss with respect to a parameter, before clipping and
    without the loss scale, in fp32 (float64 with --dtype fp64 or --exact).

    It is there from `finish_grad_sync` to the next `zero_grad`. `adamw_step` multiplies it in
    place by the clip factor, which is divided out again: one more rounding."""
    call = f"full_gradient(flat, {name!r})"
    check_gradients(flat, call)
    [gradient] = gather(flat, "grad", one_shape(flat, name, call))
    return gradient.div_(flat.grad_factor)


def full_gradients(flat: FlatParameters) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, `full_gradient`) of every parameter, small ones in one message."""
    call = "full_gradients(flat)"
    check_gradients(flat, call)
    left = full_shapes(flat, call)
    while left:
        together = {}
        numbers = 0
        for name, shape in left.items():
            numbers += math.prod(shape)
            if together and numbers > MOST_AT_ONCE:
                break
            together[name] = shape
        for name, gradient in zip(together, gather(flat, "grad", together)):
            del left[name]
            yield name, gradient.div_(flat.grad_factor)


def full_state(flat: FlatParameters, kind: str, name: str) -> torch.Tensor:
    """A parameter as AdamW updates it, "master", or one of its moments, "exp_avg" and
    "exp_avg_sq"."""
    if kind not in KINDS:
        raise ValueError(f"full_state: {kind!r} is none of {', '.join(KINDS)}")
    if kind not in flat.buckets[0].shard:
        raise RuntimeError(f"full_state: there is no {kind} without training")
    [tensor] = gather(flat, kind, one_shape(flat, name, f"full_state(flat, {kind!r}, {name!r})"))
    return tensor


def check_gradients(flat: FlatParameters, call: str) -> None:
    """Raise RuntimeError unless the gradients of this step are summed over the ranks."""
    if not flat.training:
        raise RuntimeError(f"{call}: there are no gradients without training")
    if not flat.grads_are_summed:
        raise RuntimeError(f"{call}: this step's gradients are not summed over the ranks yet: "
                           f"call it after finish_grad_sync, before the next zero_grad")


def full_shapes(flat: FlatParameters, call: str) -> dict[str, tuple]:
    """{global name: full shape} of all stages. Raises ValueError unless every rank makes this
    call: otherwise different tensors would be added up."""
    own = {spec.name: spec.shape for bucket in flat.buckets for spec in bucket.specs
           if not spec.is_tied_copy}
    calls, shapes = zip(*all_gather_object((call, own)))
    for other in calls:
        if other != calls[0]:
            raise ValueError(f"the ranks call {calls[0]} and {other} at once: each must make the "
                             f"same calls, in the order of parameter_names(flat)")
    return {name: shape for of_rank in shapes for name, shape in of_rank.items()}


def one_shape(flat: FlatParameters, name: str, call: str) -> dict[str, tuple]:
    """{global name: full shape} of the parameter with this name, or with the name that a tied one
    has at the other end of the model."""
    name = TIED.get(name, name)
    shapes = full_shapes(flat, call)
    if name not in shapes:
        near = difflib.get_close_matches(name, shapes, 1, 0.0)[0]
        raise ValueError(f"{call}: the model has no such parameter; did you mean {near!r}? "
                         f"(parameter_names(flat) lists all)")
    return {name: shapes[name]}


@torch.no_grad()
def gather(flat: FlatParameters, kind: str, shapes: dict[str, tuple]) -> list[torch.Tensor]:
    """The full tensors of shard[kind], without padding, on this rank's device."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    numbers = torch.zeros(sum(sizes), dtype=flat.buckets[0].shard[kind].dtype,
                          device=flat.buckets[0].data.device)
    full = {name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), numbers.split(sizes))}
    for bucket in flat.buckets:
        for spec in bucket.specs:
            if spec.name in full and is_owner(spec, flat.grid, flat.num_shards):
                full[spec.name].copy_(own_part(flat, bucket, spec, kind))
    all_reduce(numbers, flat.grid.groups["world"]).wait()
    return list(full.values())


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
