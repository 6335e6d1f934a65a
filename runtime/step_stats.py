"""The numbers of a step, summed over all ranks. Of each step of a mixture of experts
metrics.jsonl has

    load/3          in block 3, how many tokens chose the expert that is used most, relative to
                    the mean over its experts: 1 if all are used alike, E / K at most
    dead_experts    how many experts of all blocks no token of the batch chose
    router_loss     the balancing loss and z_loss times their factors, summed over the blocks: the
                    mean over the tokens. `loss` is the cross-entropy alone
"""
import math
from dataclasses import dataclass, field

import torch

from amp import NOT_FINITE
from base.agreement import all_gather_object
from data import Batch
from model import GPT
from parallel import Grid, all_reduce
from parallelism.collectives import sum_dtype, to_host
from parallelism.zero import FlatParameters
from runtime.signals import StopSignal


@dataclass
class StepStats:
    """The statistics of a step. Every rank has the same."""
    loss: float                 # mean over the targets of the global batch that count, in nats
    activation_norm: float      # the norm of the final hidden state, averaged over the tokens. The
                                # divergence monitor watches it, as the OPT-175B team did
    grad_norm: float            # of the whole model, unscaled, before clipping
    why_skipped: str            # why the update is skipped, such as NOT_FINITE, or ""
    loss_scale: float           # the loss scale used in this step
    where: dict = field(default_factory=dict)   # an inf or NaN began (locate_nonfinite)
    expert_loads: dict = field(default_factory=dict)    # of a mixture (expert_fields)

    @property
    def not_finite(self) -> bool:
        """Whether the loss or a gradient of a rank is inf or NaN."""
        return self.why_skipped == NOT_FINITE


def sum_across_ranks(local: dict, grid: Grid, timeout: float, stop: StopSignal) -> dict:
    """Sum each tensor of `local` over all ranks -> {name: a number, or a list of the rows of a
    matrix}. Waits for the other ranks, at most `timeout` seconds. A signal to one rank reaches all
    only in this sum, which sets stop.agreed: so no rank may skip one."""
    local = local | dict(signals=scalar(stop.requested, local["loss"].device))
    numbers = torch.cat([x.flatten() for x in local.values()])
    sums = all_reduce(numbers, grid.groups["world"]).wait()
    parts = to_host(sums, timeout if grid.world > 1 else math.inf).split(
        [x.numel() for x in local.values()])
    total = {name: part.view_as(x).tolist() for (name, x), part in zip(local.items(), parts)}
    stop.agreed = total.pop("signals") > 0
    return total


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """A tensor of shape (), in the dtype used for sums."""
    return torch.full((), value, dtype=sum_dtype(device), device=device)


def local_sums(loss_sum: torch.Tensor, model: GPT, flat: FlatParameters) -> dict:
    """This rank's terms of the sums from which `statistics` computes: {name: tensor}."""
    grid = flat.grid
    local = dict(loss=scalar(0.0, loss_sum.device), activation_norm=scalar(0.0, loss_sum.device))
    # All tp ranks have the same loss: count it once. Their last activations are the same too,
    # unless sequence parallelism splits the positions.
    if grid.is_last and grid.tp_rank == 0:
        local["loss"] = loss_sum
    if grid.is_last and (grid.tp_rank == 0 or grid.sequence_parallel):
        local["activation_norm"] = model.head.norms.to(loss_sum.dtype)
    local |= flat.grad_norm_squares()               # of this rank's part of the model
    if hasattr(model.cfg, "n_expert"):
        local["experts"] = expert_sums(model, grid, loss_sum)
    return local


def statistics(total: dict, batch: Batch, flat: FlatParameters, loss_scale: float,
               local_loss: torch.Tensor) -> StepStats:
    """The statistics of a step, from the sums of `local_sums`. Every rank calls it."""
    norm, why_skipped = flat.grad_norm(total)           # of the whole model
    if not math.isfinite(total["loss"]):
        why_skipped = NOT_FINITE
    where = locate_nonfinite(local_loss.item(), flat) if why_skipped == NOT_FINITE else {}
    return StepStats(
        loss=total["loss"] / batch.num_targets,
        activation_norm=total["activation_norm"] / batch.num_tokens,
        grad_norm=norm / loss_scale, why_skipped=why_skipped, loss_scale=loss_scale, where=where,
        expert_loads=expert_fields(total, batch.num_tokens))


def locate_nonfinite(local_loss: float, flat: FlatParameters) -> dict:
    """Find where a number is not finite; every rank must call it. Reports the first rank with a
    non-finite loss or, if there is none, with a non-finite gradient, and the last such parameter:
    backward reaches it first. Gradients have already been summed over the replicas, so another
    replica may be the source. If all numbers are finite but their squares are not, `what` is
    "norm"."""
    parameter = None
    for bucket in flat.buckets:
        for spec, shard_slice, _ in bucket.shard_ranges:
            if not bucket.shard["grad"][shard_slice].isfinite().all():
                parameter = spec.name
    found = list(enumerate(all_gather_object((local_loss, parameter))))
    sources = [("loss", rank, name) for rank, (loss, name) in found if not math.isfinite(loss)]
    sources += [("gradient", rank, name) for rank, (_, name) in found if name is not None]
    what, rank, parameter = [*sources, ("norm", None, None)][0]
    return dict(what=what, rank=rank, parameter=parameter)


def expert_sums(model: GPT, grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """This rank's terms: a row for each block, and in the last column the losses of its router."""
    sums = like.new_zeros(model.cfg.n_layer, model.cfg.n_expert + 1)
    for layer, block in model.blocks.items():
        router = block.mlp.router
        # All tp ranks count the same tokens, unless sequence parallelism splits the positions.
        if grid.tp_rank == 0 or router.has_own_positions:
            sums[int(layer), :-1] += router.load
            sums[int(layer), -1] += router.loss_sum
    return sums


def expert_fields(total: dict, tokens: int) -> dict:
    """The fields of a step's row, for a batch of so many tokens, from the sums over all ranks."""
    if "experts" not in total:
        return {}
    sums = torch.tensor(total["experts"], dtype=torch.float64)
    loads = sums[:, :-1]                                                    # (L, E)
    relative = loads.amax(1) / loads.mean(1)
    row = {f"load/{layer}": load for layer, load in enumerate(relative.tolist())}
    return row | dict(dead_experts=int((loads == 0).sum()),
                      router_loss=sums[:, -1].sum().item() / tokens)
