"""Data parallelism (DDP, Li et al. 2020) and ZeRO (Rajbhandari et al. 2020), as train.py runs them.

parallel.py has plain forms of most rows: `PlainBucket`, `plain_shards`, `PlainGathered` and
`reduce_scatter_in_backward`. It has one bucket a block, gradients in the parameters' type, no views
and no block that awaits updates. The table compares with `plain_replica_step` (GPT-2 124M, 16 bit):

    difference                              gain                          where
    microbatches add up, one sync a step    1/m of the traffic            prepare_grad_sync
    parameters are views into flat buckets  26 messages, not 148          buckets.py
    gradients add up in the masters' type   no rounding (bf16: 256+1=256) grad_ready
    a hook starts a complete bucket's sum   24 of 26 overlap backward     _start_grad_sync
    all are awaited at the end              backward goes on (ZeRO 0)     finish_grad_sync
    the tied matrix has its own bucket      no other bucket waits for it  buckets.py
    ZeRO 1: each of r ranks has a shard     12 of 18 bytes become 12/r    _start_grad_sync
    ZeRO 2: and keeps only its gradients    4 more bytes become 4/r       _start_grad_sync
    ZeRO 3: and only its parameters         2 more bytes become 2/r       gather_before_use
    ZeRO 1, 2: a block awaits its updates   forward hides the all-gather  gather_before_use

A step of m microbatches; r = dp x cp ranks, one of each replica, have the same parameters (in
fp32 a parameter is its own master). Bytes per parameter; those sent, by a run in 16 bits (which
sends gradients in fp32, parameters in 16 bits), times (r - 1) / r:

            a rank keeps (moments as masters)    bytes kept in           bytes sent
    ZeRO    masters    gradients    data         16 bits     fp32        gradients    parameters
      0     all        all          all          18          16          8            -
      1     a shard    all          all          6 + 12/r    8 + 8/r     4            2
      2     a shard    a shard      all          2 + 16/r    4 + 12/r    4m           2
      3     a shard    a shard      a shard      18/r        16/r        4m           4m
"""
import math
from functools import partial
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
from torch.optim.adamw import adamw     # the function: the class imports a compiler, for seconds

from amp import NOT_FINITE
from model import GPT, GPTConfig, ceil_div, initial_value
from parallelism.buckets import Bucket, is_owner, make_buckets
from parallelism.collectives import (all_gather, all_reduce, copy_to_host_async, reduce_scatter,
                                     sum_dtype)
from parallelism.parameters import ParamSpec


class FlatParameters:
    """This rank's parameters (of type `dtype`) and, for `training`, their gradients, masters and
    Adam moments (of type `master_dtype`), in buckets. With `host`, masters and moments are there,
    and AdamW runs there: 6 of 18 bytes per parameter stay on the GPU.

    A training step calls zero_grad, then prepare_grad_sync before each backward, and at the end
    finish_grad_sync, grad_norm_squares and adamw_step. In ZeRO 1 and 2 `adamw_step` only starts to
    gather the updated parameters: `gather_before_use` or `wait_params` waits for them. With --exact
    exact.ExactParameters replaces add_grad, is_in_parts, sum_squares, grad_norm, update_shards.

    grads_are_summed    from finish_grad_sync to the next zero_grad
    grad_factor         by which the gradients are then multiplied: the loss scale; after
                        adamw_step also the factor of clipping"""

    def __init__(self, specs: list[ParamSpec], grid, dtype, master_dtype, device,
                 zero: int = 0, host=None, training: bool = True):
        device = torch.device(device)
        host = device if host is None else torch.device(host)
        self.grid, self.zero, self.training = grid, zero, training
        self.num_shards = grid.replicas if zero > 0 else 1
        shard_rank = grid.replica if zero > 0 else 0
        self.buckets = make_buckets(specs, grid.replicas, self.num_shards, shard_rank)
        self.buckets_to_sync = []       # those that this backward communicates, the next one last
        self.in_flight = []             # [(bucket, Work)] of gradients
        self.grads_are_summed = False
        self.grad_factor = 1.0
        # What AdamW updates: views, made in the first step. Nothing may replace a shard's tensors.
        self.slices = None
        for bucket in self.buckets:
            self._allocate(bucket, dtype, master_dtype, device, host)
            self._attach(bucket)
            if zero == 3:
                self.reshard([bucket])
        # --offload: two rows, in turn: a bucket's gradients arrive in one, its parameters leave
        self.staging = None
        if training and device != host:
            longest = max(bucket.numel // bucket.num_shards for bucket in self.buckets)
            self.staging = torch.empty(2, longest, dtype=master_dtype, device=host,
                                       pin_memory=device.type == "cuda")

    def _allocate(self, bucket: Bucket, dtype, master_dtype, device, host) -> None:
        """Create the bucket's tensors, all zero, of the sizes in the table of ZeRO stages."""
        length = bucket.numel // bucket.num_shards
        shard = bucket.shard
        if bucket.is_wide:
            dtype = master_dtype
        bucket.data = torch.zeros(bucket.numel, dtype=dtype, device=device)
        shard["data"] = bucket.data.chunk(bucket.num_shards)[bucket.shard_rank]
        if self.zero == 3:
            shard["data"] = shard["data"].clone()
        shard["master"] = shard["data"]
        if not self.training:
            return
        grad_dtype = self.grad_dtype(master_dtype)
        if self.zero < 2:
            bucket.grad = torch.zeros(bucket.numel, dtype=grad_dtype, device=device)
            shard["grad"] = bucket.grad.chunk(bucket.num_shards)[bucket.shard_rank]
        else:
            shard["grad"] = torch.zeros(length, dtype=grad_dtype, device=device)
        if dtype != master_dtype or device != host:
            shard["master"] = torch.zeros(length, dtype=master_dtype, device=host)
        for moment in ("exp_avg", "exp_avg_sq"):
            shard[moment] = torch.zeros(length, dtype=master_dtype, device=host)

    def grad_dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        return master_dtype

    def _attach(self, bucket: Bucket) -> None:
        """Replace the modules' parameters by views into the bucket, and give each its function
        `main_grad` and the hook that autograd calls when its gradient is complete."""
        for spec in bucket.specs:
            # A tied matrix becomes two Parameters on one memory; as one Parameter its hook would
            # run only after both uses.
            for module, attribute in spec.owners:
                # `.data` has its own version counter: ZeRO 3 gathers into this memory between
                # forward and backward, which autograd must not take for a modified weight.
                view = bucket.view(bucket.data, spec)
                parameter = nn.Parameter(view.data)
                setattr(module, attribute, parameter)
                parameter.bucket = bucket
                parameter.main_grad = partial(self.main_grad, bucket, spec)
                parameter.register_post_accumulate_grad_hook(self.grad_ready)
                module.register_state_dict_pre_hook(self.before_state_dict)

    def main_grad(self, bucket: Bucket, spec: ParamSpec) -> torch.Tensor:
        """Where a parameter's gradient adds up. From ZeRO 2 on this memory is created by the first
        gradient and freed by the sync."""
        is_awaited = bucket.pending_grads > 0 or bucket.grows_in_forward
        if self.grads_are_summed or (bucket.grad is None and not is_awaited):
            raise RuntimeError(f"main_grad of {spec.name} is this rank's part of a sum, while "
                               f"backward runs: call full_tensors.full_gradients(flat) after "
                               f"finish_grad_sync, on every rank")
        if bucket.grad is None:
            if bucket.grows_in_forward:     # what the last backward has sent of it is as large
                self._wait_grad_sync()
            bucket.grad = torch.zeros_like(bucket.data, dtype=bucket.shard["grad"].dtype)
        return bucket.view(bucket.grad, spec)

    def before_state_dict(self, *_) -> None:
        """Refuse a state_dict() that would be a part of the weights, with tensor and pipeline
        parallelism, or freed memory, with ZeRO 3. With ZeRO 1 and 2 wait for the last update."""
        if self.grid.tp * self.grid.pp > 1 or self.zero == 3:
            raise RuntimeError("state_dict() of one rank is not the model's: read a checkpoint's "
                               "parameters, or call full_tensors.full_tensors(flat, 'master') on "
                               "every rank")
        self.wait_params()

    @torch.no_grad()
    def load(self, name: str, full) -> None:
        """Fill this rank's tensors `name` from full parameters: full(name, shape) -> tensor."""
        self.load_parts(name, lambda spec: spec.cut(full(spec.name, spec.shape), self.grid))

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
        with torch.no_grad():
            if load_weights is None:
                self.load_parts("master", initial)
            else:
                load_weights(self)
        if self.training:
            for bucket in self.buckets:
                bucket.shard["exp_avg"].zero_()
                bucket.shard["exp_avg_sq"].zero_()
        self.sync_params()
        self.wait_params()

    @torch.no_grad()
    def sync_params(self) -> None:
        """masters -> parameters, rounded to the parameters' type. Starts to share them with all
        replicas: `gather_before_use` waits."""
        rounded = [bucket.shard for bucket in self.buckets
                   if bucket.shard["master"] is not bucket.shard["data"]]
        if rounded:
            torch._foreach_copy_([shard["data"] for shard in rounded],
                                 [shard["master"] for shard in rounded])
        for bucket in self.buckets:
            self._start_gather(bucket)

    def _start_gather(self, bucket: Bucket) -> None:
        assert bucket.unsharding is None, "the last update's parameters are still on their way"
        if self.zero in (1, 2):                 # ZeRO 3 gathers in `unshard`
            bucket.unsharding = all_gather(bucket.data, self.grid.groups[bucket.group])

    def wait_params(self) -> None:
        """Wait for the all-gathers that `sync_params` started, where no forward does."""
        if self.zero < 3:
            self.unshard(self.buckets)

    def zero_grad(self, loss_scale: float = 1.0, tokens: int = 1, targets: int = 1) -> None:
        """Zero the gradients, before a step on so many `tokens` of all ranks, of which `targets`
        count in the loss."""
        self.grad_factor = loss_scale
        self.grads_are_summed = False
        torch._foreach_zero_([bucket.grad if self.zero < 2 else bucket.shard["grad"]
                              for bucket in self.buckets])

    def prepare_grad_sync(self, chunk: nn.Module, last: bool) -> None:
        """Before each backward of a chunk. Only the `last` of a step communicates, from ZeRO 2 on
        each. Everything is a sum, because the loss is already multiplied by its factor."""
        for parameter in chunk.parameters():
            parameter.bucket.pending_grads += 1
        self.buckets_to_sync = []
        if last or self.zero >= 2:
            self.buckets_to_sync = [bucket for bucket in self.buckets if bucket.pending_grads > 0]
            if self.buckets_to_sync[0].specs[0].is_tied_copy:   # the head's gradient is ready first
                self.buckets_to_sync.append(self.buckets_to_sync.pop(0))

    def grad_ready(self, parameter: nn.Parameter) -> None:
        """A hook of autograd, and of the op W of a schedule: the gradient is complete. It runs on
        backward's thread and CUDA stream, so collectives start after the gradient's kernels."""
        if parameter.grad is not None:      # else a Function of tensor.py has added it to main_grad
            self.add_grad(parameter.main_grad(), parameter.grad)
            parameter.grad = None
        parameter.bucket.pending_grads -= 1
        # All ranks must communicate in the same order. A bucket completed out of turn waits.
        while self.buckets_to_sync and self.buckets_to_sync[-1].pending_grads == 0:
            self._start_grad_sync(self.buckets_to_sync.pop())

    def add_grad(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        total.add_(grad)

    def _start_grad_sync(self, bucket: Bucket) -> None:
        """Start the communication of a complete bucket."""
        group = self.grid.groups[bucket.group]
        if self.zero == 0:
            self.in_flight.append((bucket, all_reduce(bucket.grad, group)))
        # None: under GPipe the head adds in all forwards, and the first backward sends the sum.
        elif bucket.grad is not None:
            # Wait for the previous bucket first where a sync in flight holds memory: from ZeRO 2
            # on the whole bucket's gradients, on a CPU what the other ranks have sent.
            if self.zero >= 2 or bucket.grad.device.type == "cpu":
                self._wait_grad_sync()
            self.in_flight.append((bucket, reduce_scatter(bucket.grad, group)))
        if self.zero >= 2:
            bucket.grad = None
        if self.zero == 3:
            self.reshard([bucket])              # this backward does not need it again

    @torch.no_grad()
    def _wait_grad_sync(self) -> None:
        for bucket, work in self.in_flight:
            total = work.wait()
            if self.zero >= 2:
                bucket.shard["grad"] += total
        self.in_flight = []

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for all buckets. Then sum the gradients that have terms on other ranks: the tied
        matrix's at both ends of a pipeline, and those of `is_in_parts`."""
        assert not self.buckets_to_sync, "a parameter got no gradient"
        self._wait_grad_sync()
        for bucket in self.buckets:
            if bucket.name == "tied":
                all_reduce(bucket.shard["grad"], self.grid.groups["embedding"]).wait()
        if self.grid.tp > 1:
            replicated = [bucket.shard["grad"][shard_slice] for bucket in self.buckets
                          for spec, shard_slice, _ in bucket.shard_ranges
                          if self.is_in_parts(spec)]
            if replicated:
                sums = all_reduce(torch.cat(replicated), self.grid.groups["tp"]).wait()
                torch._foreach_copy_(replicated, sums.split([len(x) for x in replicated]))
        self.grads_are_summed = True

    def is_in_parts(self, spec: ParamSpec) -> bool:
        """Whether each tp rank has all of the parameter, but of its gradient only the term of this
        rank's positions or heads."""
        return spec.partition_dim is None and (self.grid.sequence_parallel
                                               or spec.grad_covers_own_heads)

    def grad_norm_squares(self) -> dict[str, torch.Tensor]:
        """Sums of squares of this rank's gradients, numbers of `sum_dtype`, for a sum over all
        ranks: `squares` for the global norm, each parameter of the model once, and `all_squares`,
        also every copy of a parameter, only to detect inf or NaN. A router's bias has no gradient,
        but counts of tokens in its place."""
        counted, others = [], []
        for bucket in self.buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                pieces = bucket.shard["grad"][shard_slice].split(2 ** 20)
                if spec.sign_step > 0:
                    continue
                if is_owner(spec, self.grid, self.num_shards):
                    counted += pieces
                else:
                    others += pieces
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

    @torch.no_grad()
    def adamw_step(self, factor: float, updates: int, lr: float, beta1: float, beta2: float,
                   weight_decay: float) -> None:
        """The optimizer's step: AdamW on this rank's shards, with the gradients times `factor`.
        `updates`: how many there have been, with this one. With --offload it goes bucket by bucket:
        while the CPU updates one, the next one's gradients arrive and the previous one's parameters
        leave."""
        grads = [bucket.shard["grad"] for bucket in self.buckets]
        torch._foreach_mul_(grads, factor)
        self.grad_factor *= factor
        if self.staging is None:
            self.update_shards(grads, updates, lr, beta1, beta2, weight_decay)
            self.sync_params()
            return
        rows = [self.staging[i % 2, :len(grad)] for i, grad in enumerate(grads)]
        copies = [copy_to_host_async(grad, row) for grad, row in zip(grads[:2], rows)]
        for i, bucket in enumerate(self.buckets):
            grad, arrived = copies[i]
            arrived.synchronize()       # queued after the parameters that left from the same row
            slices = slices_to_update([bucket], [grad])
            adamw_update(slices, updates, lr, beta1, beta2, weight_decay)
            data = bucket.shard["data"]
            rounded = grad.view(data.dtype)[:len(data)].copy_(bucket.shard["master"])
            data.copy_(rounded, non_blocking=True)
            self._start_gather(bucket)
            if i + 2 < len(grads):
                copies.append(copy_to_host_async(grads[i + 2], rows[i + 2]))

    def update_shards(self, grads: list[torch.Tensor], *arguments) -> None:
        if self.slices is None:                 # the same in each step
            self.slices = slices_to_update(self.buckets, grads)
        adamw_update(self.slices, *arguments)

    def unshard(self, buckets: list[Bucket], prefetch: list[Bucket] = ()) -> None:
        """Make the buckets' parameters whole: gather them, or wait for the all-gather that
        `sync_params` started (ZeRO 1 and 2). Begin to gather those of the buckets to `prefetch`."""
        for bucket in (*buckets, *prefetch):
            if bucket.data.untyped_storage().size() == 0:
                bucket.data.untyped_storage().resize_(bucket.data.nbytes)
                bucket.data.chunk(bucket.num_shards)[bucket.shard_rank].copy_(bucket.shard["data"])
                bucket.unsharding = all_gather(bucket.data, self.grid.groups[bucket.group])
        for bucket in buckets:
            if bucket.unsharding is not None:
                bucket.unsharding.wait()
                bucket.unsharding = None

    def reshard(self, buckets: list[Bucket]) -> None:
        """ZeRO 3: free the gathered parameters. Their views refer to the storage: filling it again
        (`unshard`) makes them valid again."""
        if self.zero < 3:
            return
        for bucket in buckets:
            assert bucket.unsharding is None, "a gather would write into freed memory"
            bucket.data.untyped_storage().resize_(0)


class Slices(NamedTuple):
    """The parameters in a rank's shards, each a slice of a bucket's tensors."""
    decaying: list[list]        # tensors of the masters, gradients, first and second moments
    others: list[list]          # the same of parameters without weight decay
    router_biases: list[tuple]  # (master, gradient, size of a step)


def slices_to_update(buckets: list[Bucket], grads: list[torch.Tensor]) -> Slices:
    """The slices of these buckets, whose gradients are `grads`. They end at a multiple of 32, in
    the padding. So each number gets the same instructions, wherever a shard ends."""
    slices = Slices([[], [], [], []], [[], [], [], []], [])
    for bucket, grad in zip(buckets, grads):
        shard = bucket.shard
        for spec, shard_slice, _ in bucket.shard_ranges:
            if spec.sign_step > 0:
                master = shard["master"][shard_slice]
                slices.router_biases.append((master, grad[shard_slice], spec.sign_step))
                continue
            end = ceil_div(shard_slice.stop, 32) * 32
            lists = slices.decaying if spec.decays else slices.others
            for tensors, whole in zip(lists, (shard["master"], grad, shard["exp_avg"],
                                              shard["exp_avg_sq"])):
                tensors.append(whole[shard_slice.start:end])
    return slices


def adamw_update(slices: Slices, updates: int, lr: float, beta1: float, beta2: float,
                 weight_decay: float) -> None:
    """torch's fused AdamW. A router's bias takes a step of a fixed size instead."""
    for bias, grad, step in slices.router_biases:
        bias -= step * grad.sign()
    for lists, decay in ((slices.decaying, weight_decay), (slices.others, 0.0)):
        masters, grads, *moments = lists
        if not masters:
            continue
        counts = torch.full((len(masters),), updates - 1.0, device=grads[0].device).unbind()
        # It adds 1 to each count. The empty list is amsgrad's.
        adamw(masters, grads, *moments, [], list(counts), fused=True, amsgrad=False,
              maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=decay)


def gather_before_use(model: GPT, flat: FlatParameters) -> None:
    """Wrap the forward of the embedding, each block and the head in unshard and reshard. ZeRO 1 and
    2: the all-gather after AdamW is awaited there, bucket by bucket. ZeRO 3:

        forward    unshard block i, prefetch i + 1, run, reshard
        backward   unshard block i, prefetch i - 1, run; _start_grad_sync reduces and reshards

    The tied matrix stays gathered from the embedding to the head, which computes its gradient in
    forward. The other parameters of the ends, and the last block, stay gathered until backward."""
    def find_buckets(name):         # tied, embed, ends, head, or the number of a block
        return [bucket for bucket in flat.buckets if bucket.name.split(".")[0] == name]

    tied, embed, ends, head = map(find_buckets, ("tied", "embed", "ends", "head"))
    blocks = [find_buckets(number) for number in model.blocks]      # [[attention, MLP ...]]

    def run_embed(forward, *args):
        flat.unshard(tied + embed + ends, prefetch=blocks[0])
        y = forward(*args)
        flat.reshard(embed)
        return y

    def run_block(forward, current, previous, following, *args):
        flat.unshard(current, prefetch=following)
        y = forward(*args)
        if y.requires_grad:         # the hook runs when y's gradient is there, before the block's
            y.register_hook(lambda dy: flat.unshard(current, prefetch=previous))
        if following or not y.requires_grad:
            flat.reshard(current)
        return y

    def run_head(forward, *args):
        flat.unshard(tied + head + ends)
        y = forward(*args)
        flat.reshard(tied + head)
        if not torch.is_grad_enabled():
            flat.reshard(ends)
        return y

    if model.embed is not None:
        model.embed.forward = partial(run_embed, model.embed.forward)
    if model.head is not None:
        model.head.forward = partial(run_head, model.head.forward)
    for block, current, previous, following in zip(model.blocks.values(), blocks, [(), *blocks],
                                                   [*blocks[1:], ()]):
        block.forward = partial(run_block, block.forward, current, previous, following)
