"""How a mixture's experts are used: train.Run.step_stats calls `measure` and `fields`,
run_log.write_row `in_words`. Of each step metrics.jsonl has

    load/3          in block 3, how many tokens chose the expert that is used most, relative to
                    the mean over its experts: 1 if all are used alike, E / K at most
    dead_experts    how many experts of all blocks no token of the batch chose
    router_loss     the balancing loss and z_loss times their factors, summed over the blocks: the
                    mean over the tokens. `loss` is the cross-entropy alone
"""
import torch

from parallelism.collectives import sum_dtype


def measure(run) -> dict:
    """What `fields` needs the sum of over all ranks. {} if the model is no mixture."""
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


def fields(total: dict, tokens: int) -> dict:
    """The fields of a step's row, for a batch of so many tokens, from the sums over all ranks."""
    if "experts" not in total:
        return {}
    sums = torch.tensor(total["experts"], dtype=torch.float64)
    loads = sums[:, :-1]                                                    # (L, E)
    relative = loads.amax(1) / loads.mean(1)
    row = {f"load/{layer}": load for layer, load in enumerate(relative.tolist())}
    return row | dict(dead_experts=int((loads == 0).sum()),
                      router_loss=sums[:, -1].sum().item() / tokens)


def in_words(row: dict, cfg) -> str:
    """The line of the console beside an evaluation."""
    loads = [row[f"load/{layer}"] for layer in range(cfg.n_layer)]
    largest = max(loads)
    return (f"experts: the largest load is {largest:.2f} of the mean, in block "
            f"{loads.index(largest)}; {row['dead_experts']} of {cfg.n_layer * cfg.n_expert} had no "
            f"token in this step")
