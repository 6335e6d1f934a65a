"""Heads of keys and values that ranks share: tensor parallelism where K < tp (multi-query
attention, Shazeer 2019, as in PaLM; grouped queries on many ranks). build.build_stage swaps qkv.

Each rank has whole heads of q, so tp / K ranks attend to one head of k and v. They divide its
matrix: each computes some of the channels of (k, v), which the ranks then exchange. For K = 1, tp 2
and four heads of q:

    rank 0    x -f-+-> q0 q1                  -+-> attention of q0 q1 to k v -> proj -g->
                   +-> k  -+-- exchange --> k v+
    rank 1    x -f-+-> v  -+                  -+
                   +-> q2 q3                  -+-> attention of q2 q3 to k v -> proj -g->

In backward each rank has a part of the gradients of k and v, that of its heads of q. The ranks
exchange them, and each sums those of its channels.

Copies of the matrix would need no exchange here. But then each rank computes all of k and v, keeps
copies of weights, masters and moments, and sums their gradients; the norm and a checkpoint must
count one of them. For PaLM 540B (48 heads, tp 12) a rank's qkv would be 1.4 times as large. The
exchange sends 0.7% of what tensor parallelism sends.

Shapes: B sequences, T positions, D channels of a head, K heads of k and v, each for G of q.
"""
import torch

from model import GPTConfig, ceil_div
from parallelism.collectives import all_to_all
from parallelism.tensor import QKVParallelLinear


def can_cut_heads(model_config: GPTConfig, parts: int) -> bool:
    """Whether each of `parts` ranks can have as many whole heads of q, and either whole heads of k
    and v or a part of one."""
    K = model_config.n_kv_head
    return K % parts == 0 or (parts % K == 0 and model_config.n_head % parts == 0)


def exchange(slices: torch.Tensor, grid) -> torch.Tensor:
    """Slice i goes to the i-th of the consecutive ranks that share a head. Returns theirs, of the
    same shape."""
    sharing = len(slices)
    if sharing == 1:
        return slices
    first = grid.tp_rank // sharing * sharing
    counts = [int(first <= rank < first + sharing) for rank in range(grid.tp)]
    return all_to_all(slices, counts, counts, grid.groups["tp"]).wait()


class JoinHeads(torch.autograd.Function):
    """Pieces (..., n / shares) -> whole heads (..., n), of which `shares` consecutive pieces are
    one. A rank has one piece, with --exact one for each of its strips; it gets the head of each.
    Backward sums the gradients of all ranks and strips, in their order."""

    @staticmethod
    def forward(ctx, grid, shares, *pieces):
        here = min(shares, len(pieces))         # pieces of a head on this rank
        ctx.grid, ctx.here, ctx.ranks = grid, here, shares // here
        x = torch.stack(pieces)
        x = exchange(x.expand(ctx.ranks, *x.shape), grid)
        x = x.unflatten(1, (-1, here)).transpose(0, 1).flatten(1, 2)        # (heads, shares, ...)
        heads = x.movedim(1, -2).flatten(-2)                                # (heads, ..., n)
        return tuple(heads[i // here] for i in range(len(pieces)))

    @staticmethod
    def backward(ctx, *dheads):
        x = torch.stack(dheads).unflatten(0, (-1, ctx.here))        # (heads, here, ..., n)
        x = x.unflatten(-1, (ctx.ranks, ctx.here, -1))              # n: (ranks, here, n / shares)
        x = x.movedim((-3, 1), (0, 1))                      # (to rank, term, heads, ..., here, ...)
        first, *others = exchange(x, ctx.grid).flatten(0, 1)        # one term of each sharer
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for term in others:
            total = total + term                                    # (heads, ..., here, n / shares)
        return None, None, *total.to(first.dtype).movedim(-2, 1).flatten(0, 1)


class SharedHeadsQKV(QKVParallelLinear):
    """Its columns are those of this rank's heads of q, and its piece of a head of k and v."""

    def __init__(self, plain, grid, model_config: GPTConfig):
        super().__init__(plain, grid)
        self.head_dim, self.groups = model_config.head_dim, model_config.n_kv_head
        self.shares = grid.tp // self.groups
        self.sections = model_config.n_head // self.groups * self.head_dim, 2 * self.head_dim
        self.widths = tuple(ceil_div(section, self.shares) for section in self.sections)

    def forward(self, x):
        q, piece = super().forward(x).split(self.widths, -1)
        [kv] = JoinHeads.apply(self.grid, self.shares, piece)
        return torch.cat([q, kv[..., :2 * self.head_dim]], -1)          # (B, T, (G K / tp + 2) D)
