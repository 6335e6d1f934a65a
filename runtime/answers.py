"""--eval-answers: how many answers greedy decoding gives, token for token. evaluation.py calls it.

Greedy decoding gives an answer if and only if each of its tokens is the most probable one after the
prompt and the answer's earlier tokens. So nothing has to be decoded: one forward pass over the
whole conversation tells it of all tokens, in every layout. (Of two equal logits both count as the
most probable.)
"""
import numpy as np
import torch
import torch.distributed as dist

from data import NOT_LEARNT, PADDING, TokenDataset
from parallelism.collectives import all_reduce
from parallelism.context import own_positions
from parallelism.sequence import by_sequences, gather_positions
from parallelism.tensor import matmul


@torch.no_grad()
def share_of_right_answers(run, forward) -> float:
    """Of the answers of --eval-answers validation conversations, each alone in its window, the
    share that greedy decoding gives. forward(run, microbatches) runs the model of a train.Run."""
    grid, config = run.grid, run.config
    data = TokenDataset(config.data, "val", run.model_config.seq_len, pack=False)
    window_ids = choose_conversations(data, config.eval_answers)
    padding = -len(window_ids) % (grid.dp * config.micro_batch)
    window_ids = np.append(window_ids, np.full(padding, PADDING))
    numbers, count = number_answers(data.rows(window_ids)[1])           # (B, T)

    run.model.eval()
    microbatches = run.load_microbatches(data, window_ids, step=0)
    is_wrong = torch.zeros(count + 1, device=run.device)    # the last one: tokens of no answer
    own_rows = run.own_windows(np.arange(len(window_ids)))              # (m, b)
    for rows, is_greedy in zip(own_rows, compare_greedy(run, microbatches, forward)):
        own = own_positions(numbers[torch.from_numpy(rows)], grid.cp_rank, grid.cp)
        is_wrong[own.to(run.device)[~is_greedy]] = 1
    run.model.train()
    is_wrong = all_reduce(is_wrong, grid.groups["world"]).wait()
    return 1 - (is_wrong[:count] > 0).float().mean().item()


def choose_conversations(data: TokenDataset, count: int) -> np.ndarray:
    """Evenly spaced ones of all sources that have conversations."""
    all_ids = [np.arange(source.first, source.first + source.n_windows)
               for source in data.sources.values() if source.meta["template"] is not None]
    all_ids = np.concatenate(all_ids)
    evenly_spaced = np.linspace(0, len(all_ids) - 1, min(count, len(all_ids)))
    return all_ids[evenly_spaced.astype(np.int64)]


def number_answers(targets: np.ndarray) -> tuple[torch.Tensor, int]:
    """targets (B, T) -> (for each the number of the answer that it belongs to, the number of
    answers). Targets that are not learnt belong to answer number `count`."""
    is_learnt = targets != NOT_LEARNT
    before = np.pad(is_learnt, ((0, 0), (1, 0)))[:, :-1]    # whether the target before is learnt
    begins = is_learnt & ~before
    numbers = begins.cumsum().reshape(targets.shape) - 1
    count = int(begins.sum())
    return torch.from_numpy(np.where(is_learnt, numbers, count)), count


def compare_greedy(run, microbatches: list, forward) -> list[torch.Tensor]:
    """For each microbatch whether its targets are the most probable tokens, bool (b, T / cp). Those
    that are not learnt count as such. Empty on every stage but the last."""
    head, grid, found = run.model.head, run.grid, []

    def loss(x, targets, scale):
        """In place of the head's own."""
        x = by_sequences(gather_positions(x, grid).wait(), grid)        # (b, T / cp, C)
        is_learnt = targets != NOT_LEARNT
        found.append(torch.ones_like(is_learnt))
        found[-1][is_learnt] = are_largest(head, x[is_learnt], targets[is_learnt])
        return run.scalar(0.0)

    if grid.is_last:
        head.loss = loss
    try:
        forward(run, microbatches)
    finally:
        if grid.is_last:
            del head.loss           # the class has its own
    return found


def are_largest(head, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """x (n, C), targets (n,) -> whether a target's logit is the largest, (n,). The tensor-parallel
    ranks have a part of the vocabulary each."""
    logits = matmul(x, head.weight.t()).float()                         # (n, V / tp)
    first = head.grid.tp_rank * logits.shape[1]
    logits[:, max(0, head.vocab_size - first):] = -torch.inf            # padding
    columns = (targets - first).unsqueeze(1)
    is_local = (columns >= 0) & (columns < logits.shape[1])
    of_target = logits.gather(1, columns.where(is_local, 0)).where(is_local, -torch.inf)
    both = torch.cat([of_target, logits.amax(1, keepdim=True)], dim=1)
    both = all_reduce(both, head.grid.groups["tp"], dist.ReduceOp.MAX).wait()
    return both[:, 0] == both[:, 1]
