"""The flat parameters of train.py: `DataParallel` of parallel.py, section 4, and

    addition                                 gain                               where
    the head and the embedding add their     no gradient of a whole matrix in   add_grad,
      gradients to main_grad themselves      between (loss.py)                  main_grad
    --offload: masters and moments are in    6 of 18 bytes per parameter stay   update_offloaded
      host memory, and AdamW runs there
    a state_dict() that is not the model's                                      before_state_dict
      is refused
"""
import torch

from amp import adamw_update
from parallel import DataParallel
from parallelism.collectives import copy_to_host_async
from parallelism.parameters import ParamSpec


class FlatParameters(DataParallel):
    """This rank's parameters (of type `dtype`) and, for `training`, their gradients, masters and
    Adam moments (of type `master_dtype`), in buckets. With `host`, masters and moments are there,
    and AdamW runs there."""

    def __init__(self, specs: list[ParamSpec], grid, dtype, master_dtype, device,
                 zero: int = 0, host=None, training: bool = True):
        device = torch.device(device)
        if host is not None and device != torch.device(host):
            self.host = torch.device(host)
        super().__init__(specs, grid, dtype, master_dtype, device, zero, training)
        # --offload: two rows, in turn: a bucket's gradients arrive in one, its parameters leave
        self.staging = None
        if training and self.host is not None:
            longest = max(bucket.numel // bucket.num_shards for bucket in self.buckets)
            self.staging = torch.empty(2, longest, dtype=master_dtype, device=self.host,
                                       pin_memory=device.type == "cuda")

    def attach(self, module, attribute, bucket, spec):
        super().attach(module, attribute, bucket, spec)
        module.register_state_dict_pre_hook(self.before_state_dict)

    def before_state_dict(self, *_) -> None:
        """Refuse a state_dict() that would be a part of the weights, with tensor and pipeline
        parallelism, or freed memory, with ZeRO 3. With ZeRO 1 and 2 wait for the last update."""
        if self.grid.tp * self.grid.pp > 1 or self.zero == 3:
            raise RuntimeError("state_dict() of one rank is not the model's: read a checkpoint's "
                               "parameters, or call runtime.full_tensors.full_tensors(flat, "
                               "'master') on every rank")
        self.wait_params()

    @torch.no_grad()
    def load(self, name: str, full) -> None:
        """Fill this rank's tensors `name` from full parameters: full(name, shape) -> tensor."""
        self.load_parts(name, lambda spec: spec.cut(full(spec.name, spec.shape), self.grid))

    # The head computes the gradient of its matrix in forward, and the embedding adds to the same.
    # Both add to main_grad, and autograd gets None (loss.py).

    def add_grad(self, parameter):
        if parameter.grad is not None:
            super().add_grad(parameter)

    def main_grad(self, parameter):
        bucket = parameter.bucket
        grows_in_forward = bucket.name in ("tied", "head")
        if bucket.grad is None and grows_in_forward:    # what the last backward has sent of it is
            self.wait_grad_sync()                       # as large
        return super().main_grad(parameter)

    def start_grad_sync(self, bucket):
        if bucket.grad is not None:     # under GPipe the first backward sends the head's, of all
            super().start_grad_sync(bucket)

    @property
    def tp_copies_are_equal(self) -> bool:
        """Whether what all tp ranks hold has the same bits. On GPUs only if sequence parallelism
        sums its gradients: else each rank computes them, by kernels that may add in any order."""
        return self.buckets[0].data.device.type == "cpu" or self.grid.sequence_parallel

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
