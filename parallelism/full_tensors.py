"""Full tensors by global name: what to print, compare or plot of a run, the same in every layout.

    for name, gradient in flat.full_gradients():        # the plain model's p.grad, on every rank
        if flat.grid.rank == 0:
            print(name, gradient.norm().item())

A rank has no such tensor by itself. `p.grad` is None, because gradients add up in flat buffers;
`p.main_grad()` is one rank's part of a sum, times the loss scale; with tensor parallelism a
parameter is a part; with ZeRO 3 its memory is freed between uses (to read it crashes the process);
and a pipeline's first and last stage both have the tied matrix.

Each number of a full tensor has one owner among the ranks. So every rank writes what it owns into
zeros of the full shape, and an all-reduce adds them: x + 0 = x, without rounding. It is meant for
inspection, not for every step: every rank needs memory for the full parameter, twice.
"""
import difflib
import math
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from parallelism.collectives import all_reduce, comm_errors
from parallelism.tensor import TIED

MOST_AT_ONCE = 2 ** 22      # numbers that one all-reduce of `full_gradients` adds up


class FullTensors:
    """The part of zero.FlatParameters that is for reading. Its methods communicate: all ranks must
    make the same calls in the same order, not rank 0 alone.

    They raise ValueError for an unknown name, or if the ranks make different calls, and
    RuntimeError if there is nothing to read; on every rank."""

    def parameter_names(self) -> list[str]:
        """The global names of the whole model's parameters; the tied matrix is there once."""
        return list(self._shapes("parameter_names()"))

    def full_gradient(self, name: str) -> torch.Tensor:
        """The gradient of the batch's mean loss with respect to a parameter, before clipping and
        without the loss scale, in fp32 (float64 with --dtype fp64 or --exact).

        It is there from `finish_grad_sync` to the next `zero_grad`. `adamw_step` multiplies it in
        place by the clip factor, which is divided out again: one more rounding."""
        call = f"full_gradient({name!r})"
        self._check_gradients(call)
        return self._gather("grad", [self._global_name(name, call)])[0].div_(self.grad_factor)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(global name, `full_gradient`) of every parameter, small ones in one message."""
        call = "full_gradients()"
        self._check_gradients(call)
        pending = []
        shapes = self._shapes(call)
        names = list(shapes)
        for name, following in zip(names, [*names[1:], None]):
            pending.append(name)
            numbers = sum(math.prod(shapes[name]) for name in [*pending, following] if name)
            if following is None or numbers > MOST_AT_ONCE:
                for name, gradient in zip(pending, self._gather("grad", pending)):
                    yield name, gradient.div_(self.grad_factor)
                pending = []

    def full_state(self, kind: str, name: str) -> torch.Tensor:
        """A parameter as AdamW updates it, "master", or one of its moments, "exp_avg" and
        "exp_avg_sq"."""
        if kind not in ("master", "exp_avg", "exp_avg_sq"):
            raise ValueError(f"full_state: {kind!r} is none of master, exp_avg, exp_avg_sq")
        if kind not in self.buckets[0].shard:
            raise RuntimeError(f"full_state: there is no {kind} without training")
        call = f"full_state({kind!r}, {name!r})"
        return self._gather(kind, [self._global_name(name, call)])[0]

    def before_state_dict(self, *_) -> None:
        """A hook of the modules: a state_dict() that would be a part of the weights (tensor and
        pipeline parallelism), or freed memory (ZeRO 3), is refused; else it waits for an update
        under way (ZeRO 1 and 2)."""
        if self.grid.tp * self.grid.pp > 1 or self.zero == 3:
            raise RuntimeError("state_dict() of one rank is not the model's: read a checkpoint's "
                               "parameters, or call full_state('master', name) on every rank")
        self.wait_params()

    def _check_gradients(self, call: str) -> None:
        if not self.training:
            raise RuntimeError(f"{call}: there are no gradients without training")
        if not self.grads_are_summed:
            raise RuntimeError(f"{call}: this step's gradients are not summed over the ranks yet: "
                               f"call it after finish_grad_sync, before the next zero_grad")

    def _global_name(self, name: str, call: str) -> str:
        """The name that all ranks ask for by `call`: one of the model's, or a tied one's other."""
        name = TIED.get(name, name)
        shapes = self._shapes(call)
        if name not in shapes:
            near = difflib.get_close_matches(name, shapes, 1, 0.0)[0]
            raise ValueError(f"{call}: the model has no such parameter; did you mean {near!r}? "
                             f"(parameter_names() lists all)")
        return name

    def _shapes(self, call: str) -> dict[str, tuple]:
        """{global name: full shape} of all stages, once every rank is known to make this call."""
        own = {spec.name: spec.shape for bucket in self.buckets for spec in bucket.specs
               if not spec.is_tied_copy}
        world = self.grid.groups["world"]
        if world is None:
            self.shapes = own
            return own
        with comm_errors(f"{call}, which every rank must call", world):
            number = zlib.crc32(call.encode())
            extremes = torch.tensor([number, -number], dtype=torch.float64,
                                    device=self.buckets[0].data.device)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, world)
            largest, smallest = extremes.abs().tolist()
            if largest != smallest:
                calls = self._of_all_ranks(call)
                other = next(other for other in calls if other != calls[0])
                raise ValueError(f"the ranks call {calls[0]} and {other} at once: each must make "
                                 f"the same calls, in the order of parameter_names()")
            if self.shapes is None:
                self.shapes = {}
                for shapes in self._of_all_ranks(own):
                    self.shapes |= shapes
        return self.shapes

    def _of_all_ranks(self, value) -> list:
        values = [None] * self.grid.world
        dist.all_gather_object(values, value, group=self.grid.groups["world"])
        return values

    @torch.no_grad()
    def _gather(self, kind: str, names: list[str]) -> list[torch.Tensor]:
        """The full tensors of shard[kind], without padding, on this rank's device."""
        sizes = [math.prod(self.shapes[name]) for name in names]
        flat = torch.zeros(sum(sizes), dtype=self.buckets[0].shard[kind].dtype,
                           device=self.buckets[0].data.device)
        full = {name: x.view(self.shapes[name]) for name, x in zip(names, flat.split(sizes))}
        for bucket in self.buckets:
            for spec in bucket.specs:
                if spec.name in full and self._is_owner(spec):
                    full[spec.name].copy_(self._part(bucket, spec, kind))
        all_reduce(flat, self.grid.groups["world"]).wait()
        return list(full.values())

    def _is_owner(self, spec) -> bool:
        """Whether the numbers of this parameter that this rank has count as its own, as in a save
        (checkpoint.owned_slices)."""
        counts = self.grid.replica < self.num_shards      # without ZeRO the first replica alone
        is_replicated = spec.partition_dim is None and self.grid.tp_rank > 0
        return counts and not (is_replicated or spec.is_tied_copy)

    def _part(self, bucket, spec, kind: str) -> torch.Tensor:
        """What this rank has of a parameter, in zeros of the full shape."""
        local = torch.zeros(spec.numel, dtype=bucket.shard[kind].dtype, device=bucket.data.device)
        for of_shard, shard_slice, param_slice in bucket.shard_ranges:
            if of_shard is spec:
                local[param_slice].copy_(bucket.shard[kind][shard_slice])
        local = local.view(spec.local_shape)
        if spec.partition_dim is None:
            return local
        parts = [torch.zeros_like(local) for _ in range(self.grid.tp)]
        parts[self.grid.tp_rank] = local
        return spec.join(parts)
