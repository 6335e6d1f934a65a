"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Two things differ from `f` and `g`
of parallel.py: backward of f gathers x again instead of keeping it, and activations stay in the
order of ranks.

Between g and the next f all tensor-parallel ranks hold the same activations. Instead, let each hold
T / tp positions of every sequence. Then f and g, and their reverses in backward, are

         forward           backward                          without sequence parallelism
    f    all-gather        reduce-scatter, an all-gather     nothing       all-reduce
    g    reduce-scatter    all-gather                        all-reduce    nothing

f's backward also gathers x again (_ColumnParallel): a block then sends as much as five all-reduces
instead of four. LayerNorm, the bias after g and the position embedding see T / tp positions, so
each rank has a part of their gradients: zero.finish_grad_sync adds them up.

An all-gather puts the ranks' parts one after another, and a reduce-scatter takes them so:

    by sequences (B, T, C)               by ranks (tp B, T / tp, C), here B = tp = 2

    sequence 0:  rank 0 | rank 1         rank 0 of sequence 0, of 1, rank 1 of sequence 0, of 1
    sequence 1:  rank 0 | rank 1

From f to g activations stay by ranks, because a change of the order copies them. Only attention
needs whole sequences.
"""
import torch

from parallelism.collectives import Work, all_gather, all_reduce, reduce_scatter


def gather_positions(x: torch.Tensor, grid) -> Work:
    """For f's forward and g's backward. With sequence parallelism all positions, by ranks:
    (B, T / tp, C) -> (tp B, T / tp, C). Without it, x itself."""
    if not grid.sequence_parallel:
        return Work(x)
    parts = x.new_empty(grid.tp, *x.shape)                              # (tp, B, T / tp, C)
    parts[grid.tp_rank] = x
    return all_gather(parts.flatten(0, 1), grid.groups["tp"])


def sum_over_ranks(x: torch.Tensor, grid) -> Work:
    """For g's forward and f's backward: the sum of the ranks' x (B, T, C), in place. With sequence
    parallelism x is by ranks, (tp B, T / tp, C). The sum is that of this rank's positions, a part
    (B, T / tp, C) of x. The other parts change too, so autograd must not have saved x."""
    if not grid.sequence_parallel:
        return all_reduce(x, grid.groups["tp"])
    return reduce_scatter(x, grid.groups["tp"])


def by_ranks(x: torch.Tensor, grid) -> torch.Tensor:
    """With sequence parallelism (B, T, ...) -> (tp B, T / tp, ...), a view if B is 1; else x."""
    if not grid.sequence_parallel:
        return x
    return x.unflatten(1, (grid.tp, -1)).transpose(0, 1).flatten(0, 1)


def by_sequences(x: torch.Tensor, grid) -> torch.Tensor:
    """The reverse of `by_ranks`: (tp B, T / tp, ...) -> (B, T, ...)."""
    if not grid.sequence_parallel:
        return x
    return x.unflatten(0, (grid.tp, -1)).transpose(0, 1).flatten(1, 2)


def all_positions(x: torch.Tensor, grid) -> torch.Tensor:
    """With sequence parallelism (B, T / tp, ...) -> (B, T, ...), those of all tp ranks; else x."""
    return by_sequences(gather_positions(x, grid).wait(), grid)


def cut_positions(x: torch.Tensor, grid) -> torch.Tensor:
    """With sequence parallelism (B, T, ...) -> (B, T / tp, ...), those of this rank; else x."""
    if not grid.sequence_parallel:
        return x
    return x.chunk(grid.tp, dim=1)[grid.tp_rank]
