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
from parallelism.collectives import sum_dtype
from runtime.sums import scalar, sum_across_ranks


@dataclass
class StepStats:
    """The statistics of a step. Every rank has the same, except for local_loss."""
    loss: float                 # mean over the targets of the global batch that count, in nats
    activation_norm: float      # the norm of the final hidden state, averaged over the tokens. The
                                # divergence monitor watches it, as the OPT-175B team did
    grad_norm: float            # of the whole model, unscaled, before clipping
    skipped: str                # why the update is skipped, such as NOT_FINITE, or ""
    loss_scale: float           # the loss scale used in this step
    local_loss: torch.Tensor    # this rank's summed loss, to find where an inf or NaN began
    expert_loads: dict = field(default_factory=dict)    # of a mixture (expert_fields)


def sum_statistics(run, loss_sum: torch.Tensor, tokens_in_batch: int,
                   targets_in_batch: int) -> StepStats:
    """The statistics of a step of a train.Run, by one all-reduce."""
    grid, scaler = run.grid, run.scaler
    local = dict(loss=scalar(0.0, run.device), activation_norm=scalar(0.0, run.device))
    # All tp ranks have the same loss: count it once. Their last activations are the same too,
    # unless sequence parallelism splits the positions.
    if grid.is_last and grid.tp_rank == 0:
        local["loss"] = loss_sum
    if grid.is_last and (grid.tp_rank == 0 or grid.sequence_parallel):
        local["activation_norm"] = run.model.head.norms.to(loss_sum.dtype)
    local |= run.flat.grad_norm_squares()           # of this rank's part of the model
    local |= expert_sums(run)                       # if it is a mixture of experts
    total = sum_across_ranks(run, local)
    norm, skipped = run.flat.grad_norm(total)       # of the whole model
    if not math.isfinite(total["loss"]):
        skipped = NOT_FINITE
    return StepStats(
        loss=total["loss"] / targets_in_batch,
        activation_norm=total["activation_norm"] / tokens_in_batch,
        grad_norm=norm / scaler.scale, skipped=skipped, loss_scale=scaler.scale,
        local_loss=loss_sum, expert_loads=expert_fields(total, tokens_in_batch))


def expert_sums(run) -> dict:
    """What `expert_fields` needs the sum of over all ranks. {} if the model is no mixture."""
    cfg, grid = run.model_config, run.grid
    if not hasattr(cfg, "n_expert"):
        return {}
    # A row for each block, and in the last column the losses of its router.
    sums = torch.zeros(cfg.n_layer, cfg.n_expert + 1, dtype=sum_dtype(run.device),
                       device=run.device)
    for layer, block in run.model.blocks.items():
        router = block.mlp.router
        # All tp ranks count the same tokens, unless sequence parallelism splits the positions.
        if grid.tp_rank == 0 or router.has_own_positions:
            sums[int(layer), :-1] += router.load
            sums[int(layer), -1] += router.loss_sum
    return dict(experts=sums)


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


def experts_in_words(row: dict, cfg) -> str:
    """The line of the console beside an evaluation."""
    loads = [row[f"load/{layer}"] for layer in range(cfg.n_layer)]
    largest = max(loads)
    return (f"experts: the largest load is {largest:.2f} of the mean, in block "
            f"{loads.index(largest)}; {row['dead_experts']} of {cfg.n_layer * cfg.n_expert} had no "
            f"token in this step")
