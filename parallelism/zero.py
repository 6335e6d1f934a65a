"""Data parallelism and ZeRO: what train.py adds to `DataParallel` of parallel.py, section 4.

    addition                                 gain                               where
    the head and the embedding add their     no gradient of a whole matrix in   main_grad
      gradients to main_grad themselves      between (loss.py)
    --offload: masters and moments are in    6 of 18 bytes per parameter stay   update_offloaded
      host memory, and AdamW runs there
    inf or NaN on any rank skips a step                                         grad_norm
    what is read too early or too late is                                       main_grad,
      refused                                                                   before_state_dict
"""
import math
from functools import partial
from typing import Callable

import torch

from amp import NOT_FINITE
from model import GPTConfig, initial_value
from parallel import DataParallel, adamw_update
from parallelism.buckets import is_owner
from parallelism.collectives import copy_to_host_async, sum_dtype
from parallelism.parameters import ParamSpec


class FlatParameters(DataParallel):
    """This rank's parameters (of type `dtype`) and, for `training`, their gradients, masters and
    Adam moments (of type `master_dtype`), in buckets. With `host`, masters and moments are there,
    and AdamW runs there.

    grads_are_summed    from finish_grad_sync to the next zero_grad"""

    def __init__(self, specs: list[ParamSpec], grid, dtype, master_dtype, device,
                 zero: int = 0, host=None, training: bool = True):
        device = torch.device(device)
        self.training = training
        if host is not None and device != torch.device(host):
            self.host = torch.device(host)
        self.grads_are_summed = False
        super().__init__(specs, grid, dtype, master_dtype, device, zero)
        # --offload: two rows, in turn: a bucket's gradients arrive in one, its parameters leave
        self.staging = None
        if training and self.host is not None:
            longest = max(bucket.numel // bucket.num_shards for bucket in self.buckets)
            self.staging = torch.empty(2, longest, dtype=master_dtype, device=self.host,
                                       pin_memory=device.type == "cuda")

    def allocate_state(self, bucket, dtype, device):
        if self.training:
            super().allocate_state(bucket, dtype, device)

    def attach(self, module, attribute, bucket, spec):
        super().attach(module, attribute, bucket, spec)
        parameter = getattr(module, attribute)
        parameter.main_grad = partial(self.main_grad, parameter)
        module.register_state_dict_pre_hook(self.before_state_dict)

    def before_state_dict(self, *_) -> None:
        """Refuse a state_dict() that would be a part of the weights, with tensor and pipeline
        parallelism, or freed memory, with ZeRO 3. With ZeRO 1 and 2 wait for the last update."""
        if self.grid.tp * self.grid.pp > 1 or self.zero == 3:
            raise RuntimeError("state_dict() of one rank is not the model's: read a checkpoint's "
                               "parameters, or call full_tensors.full_tensors(flat, 'master') on "
                               "every rank")
        self.wait_params()

    def wait_params(self) -> None:
        """Wait for the all-gathers that `sync_params` started, where no forward does."""
        if self.zero < 3:
            self.unshard(self.buckets)

    # ---- Values

    @torch.no_grad()
    def load(self, name: str, full) -> None:
        """Fill this rank's tensors `name` from full parameters: full(name, shape) -> tensor."""
        self.load_parts(name, lambda spec: spec.cut(full(spec.name, spec.shape), self.grid))

    @torch.no_grad()
    def load_parts(self, name: str, part: Callable) -> None:
        """The same from this rank's parts: part(spec) -> tensor."""
        for bucket in self.buckets:
            for spec, shard_slice, param_slice in bucket.shard_ranges:
                bucket.shard[name][shard_slice].copy_(part(spec).flatten()[param_slice])

    def initialize(self, model_config: GPTConfig, seed: int,
                   load_weights: Callable | None = None) -> None:
        """Set the state of step 0, also after a rollback to it. The weights come from
        load_weights(self), which sets the masters, or from the seed. Then only one full parameter
        is in memory at a time, of experts one."""
        def initial(spec):
            if len(spec.shape) == 3:
                return spec.cut_experts(partial(initial_expert, spec), self.grid)
            return spec.cut(initial_value(model_config, spec.name, spec.shape, seed), self.grid)

        def initial_expert(spec, number):
            return initial_value(model_config, f"{number}.{spec.name}", spec.shape[1:], seed)
        if load_weights is None:
            self.load_parts("master", initial)
        else:
            with torch.no_grad():
                load_weights(self)
        if self.training:
            for bucket in self.buckets:
                bucket.shard["exp_avg"].zero_()
                bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()
        self.wait_params()

    # ---- Gradients

    def zero_grad(self, loss_scale: float = 1.0, tokens: int = 1, targets: int = 1) -> None:
        """Before a step on so many `tokens` of all ranks, of which `targets` count in the loss."""
        self.grads_are_summed = False
        super().zero_grad(loss_scale)

    def main_grad(self, parameter):
        bucket = parameter.bucket
        grows_in_forward = bucket.name in ("tied", "head")      # the head computes it there
        is_awaited = bucket.pending_grads > 0 or grows_in_forward
        if self.grads_are_summed or (bucket.grad is None and not is_awaited):
            raise RuntimeError(f"main_grad of {parameter.spec.name} is this rank's part of a sum, "
                               f"while backward runs: call full_tensors.full_gradients(flat) after "
                               f"finish_grad_sync, on every rank")
        if bucket.grad is None and grows_in_forward:    # what the last backward has sent of it is
            self.wait_grad_sync()                       # as large
        return super().main_grad(parameter)

    def finish_grad_sync(self):
        super().finish_grad_sync()
        self.grads_are_summed = True

    @property
    def tp_copies_are_equal(self) -> bool:
        """Whether what all tp ranks hold has the same bits. On GPUs only if sequence parallelism sums
        its gradients: else each rank computes them, by kernels that may add in any order."""
        return self.buckets[0].data.device.type == "cpu" or self.grid.sequence_parallel

    def is_in_parts(self, spec):
        """Also of norms of heads, of which a rank has the gradient of its own heads."""
        return self.grid.tp > 1 and (super().is_in_parts(spec) or (
            spec.partition_dim is None and spec.grad_covers_own_heads))

    def grad_norm_squares(self) -> dict[str, torch.Tensor]:
        """Sums of squares of this rank's gradients, numbers of `sum_dtype`, for a sum over all
        ranks: `squares` for the global norm, each parameter of the model once, and `all_squares`,
        also every copy of a parameter, only to detect inf or NaN. A router's bias has no gradient,
        but counts of tokens in its place."""
        counted, others = [], []
        for bucket in self.buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                if spec.sign_step == 0:
                    pieces = counted if is_owner(spec, self.grid, self.num_shards) else others
                    pieces += bucket.shard["grad"][shard_slice].split(2 ** 20)
        # One fp32 sum over 10M values can be off in its fourth digit. Pieces fit a CPU's cache.
        return self.sum_squares(counted, others)

    def sum_squares(self, counted: list[torch.Tensor], others: list[torch.Tensor]) -> dict:
        dtype = sum_dtype(self.buckets[0].data.device)
        squares = torch.stack(torch._foreach_norm(counted + others, 2, dtype=dtype)).square()
        return dict(squares=squares[:len(counted)].sum(), all_squares=squares.sum())

    def grad_norm(self, total: dict[str, float]) -> tuple[float, str]:
        """From the sums of `grad_norm_squares` over all ranks: (the gradient norm of the whole
        model, times the loss scale; why the step must be skipped, "" if it need not)."""
        skipped = "" if math.isfinite(total["all_squares"]) else NOT_FINITE
        return math.sqrt(total["squares"]), skipped

    # ---- --offload

    def update_shards(self, *arguments):
        if self.staging is None:
            super().update_shards(*arguments)
        else:
            self.update_offloaded(*arguments)

    def update_offloaded(self, *arguments) -> None:
        """Bucket by bucket: while the CPU updates one, the next one's gradients arrive and the
        previous one's parameters leave."""
        grads = [bucket.shard["grad"] for bucket in self.buckets]
        rows = [self.staging[i % 2, :len(grad)] for i, grad in enumerate(grads)]
        copies = [copy_to_host_async(grad, row) for grad, row in zip(grads[:2], rows)]
        for i, bucket in enumerate(self.buckets):
            grad, arrived = copies[i]
            arrived.synchronize()       # queued after the parameters that left from the same row
            adamw_update([bucket], [grad], *arguments)
            data = bucket.shard["data"]
            rounded = grad.view(data.dtype)[:len(data)].copy_(bucket.shard["master"])
            data.copy_(rounded, non_blocking=True)
            if self.zero in (1, 2):
                self.start_gather(bucket)
            if i + 2 < len(grads):
                copies.append(copy_to_host_async(grads[i + 2], rows[i + 2]))
