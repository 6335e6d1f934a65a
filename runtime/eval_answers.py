"""--eval-answers: the share of answers that greedy decoding gives exactly. evaluation.py calls it.

Greedy decoding gives an answer if and only if each of its tokens is the most probable one after the
prompt and the answer's earlier tokens. So nothing has to be decoded: one forward pass over the
whole conversation tells it of all tokens, in every layout. (Of two equal logits both count as the
most probable. An answer that a window cuts off counts if its beginning is right.)
"""
import numpy as np
import torch
import torch.distributed as dist

from data import IGNORE_INDEX, TokenDataset, pad_window_ids
from model import ceil_div
from parallelism.collectives import all_reduce
from parallelism.context import own_positions
from parallelism.sequence import by_sequences, gather_positions
from parallelism.tensor import matmul
from runtime.sums import scalar

MICROBATCHES = 64               # on each rank, for each all-reduce


@torch.no_grad()
def greedy_accuracy(run, forward) -> tuple[float, int]:
    """(the share of answers that greedy decoding gives, the number of answers), in as many evenly
    spaced validation windows as hold about --eval-answers conversations. forward(run, microbatches)
    runs the model of a train.Run."""
    grid, config, data = run.grid, run.config, run.val_data
    window_ids = choose_windows(data, config.eval_answers)
    n_wrong = 0
    n_answers = 0
    part = MICROBATCHES * grid.dp * config.micro_batch      # so that --timeout applies to each part
    run.model.eval()
    for first in range(0, len(window_ids), part):
        ids = pad_window_ids(window_ids[first:first + part], grid.dp * config.micro_batch)
        numbers, count = number_answers(data.rows(ids)[1])              # (B, T)
        is_wrong = torch.zeros(count + 1, device=run.device)    # the last one: what is not learnt
        microbatches = run.loader.microbatches(data, ids, step=0)
        own_rows = run.loader.own_windows(np.arange(len(ids)))                 # (m, b)
        for rows, is_greedy in zip(own_rows, compare_greedy(run, microbatches, forward)):
            own = own_positions(numbers[torch.from_numpy(rows)], grid.cp_rank, grid.cp)
            is_wrong[own.to(run.device)[~is_greedy]] = 1
        is_wrong = all_reduce(is_wrong, grid.groups["world"]).wait()
        n_wrong += int((is_wrong > 0).sum())
        n_answers += count
    run.model.train()
    return 1 - n_wrong / n_answers, n_answers


def choose_windows(data: TokenDataset, n_conversations: int) -> np.ndarray:
    """Evenly spaced windows of all sources of conversations, with about so many in all."""
    all_ids, held = [], 0
    for source in data.mixture.sources.values():
        if source.meta["template"] is not None:
            all_ids += range(source.first, source.first + source.n_windows)
            held += source.windows.n_conversations
    count = min(len(all_ids), ceil_div(n_conversations * len(all_ids), held))
    return np.array(all_ids)[np.linspace(0, len(all_ids) - 1, count).astype(np.int64)]


def number_answers(targets: np.ndarray) -> tuple[torch.Tensor, int]:
    """targets (B, T) -> (for each the number of the answer that it belongs to, the number of
    answers). Targets that are not learnt belong to answer number `count`."""
    is_learnt = targets != IGNORE_INDEX
    before = np.pad(is_learnt, ((0, 0), (1, 0)))[:, :-1]    # whether the target before is learnt
    begins = is_learnt & ~before
    numbers = begins.cumsum().reshape(targets.shape) - 1
    count = int(begins.sum())
    return torch.from_numpy(np.where(is_learnt, numbers, count)), count


def compare_greedy(run, microbatches: list, forward) -> list[torch.Tensor]:
    """For each microbatch whether its targets are the most probable tokens, bool (b, T / cp). Those
    that are not learnt count as such. Empty on every stage but the last."""
    head, grid, found = run.model.head, run.grid, []

    def loss(x, targets, loss_factor):
        """In place of the head's own."""
        x = by_sequences(gather_positions(x, grid).wait(), grid)        # (b, T / cp, C)
        is_learnt = targets != IGNORE_INDEX
        found.append(torch.ones_like(is_learnt))
        found[-1][is_learnt] = is_argmax(head, x[is_learnt], targets[is_learnt])
        return scalar(0.0, run.device)

    if grid.is_last:
        head.loss = loss
    try:
        forward(run, microbatches)
    finally:
        if grid.is_last:
            del head.loss           # the class has its own
    return found


def is_argmax(head, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """x (n, C), targets (n,) -> whether a target's logit is the largest, (n,). The tensor-parallel
    ranks have a part of the vocabulary each."""
    logits = matmul(x, head.weight.t()).float()                         # (n, V / tp)
    if head.bias is not None:
        logits += head.bias
    first = head.grid.tp_rank * logits.shape[1]
    logits[:, max(0, head.vocab_size - first):] = -torch.inf            # padding
    columns = (targets - first).unsqueeze(1)
    is_local = (columns >= 0) & (columns < logits.shape[1])
    of_target = logits.gather(1, columns.where(is_local, 0)).where(is_local, -torch.inf)
    both = torch.cat([of_target, logits.amax(1, keepdim=True)], dim=1)
    both = all_reduce(both, head.grid.groups["tp"], dist.ReduceOp.MAX).wait()
    return both[:, 0] == both[:, 1]
