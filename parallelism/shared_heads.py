"""Heads of keys and values that ranks share: tensor parallelism where K < tp (multi-query attention,
Shazeer 2019, as in PaLM; grouped queries on many ranks). build.build_stage swaps the modules.

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
    """Whether each of `parts` ranks can have as many whole heads of q, and whole heads of k and v or
    a part of one."""
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
        x = x.unflatten(-1, (ctx.ranks, ctx.here, -1))              # by the piece that it belongs to
        x = x.movedim((-3, 1, 0, -2), (0, 1, 2, 3))                 # (ranks, here, heads, here, ...)
        first, *others = exchange(x, ctx.grid).flatten(0, 1)
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for term in others:
            total = total + term
        return None, None, *total.to(first.dtype).flatten(0, 1)


def join_heads(qkvs: list, head_dim: int, shares: int, grid) -> list:
    """Each (B, T, its heads of q and its piece of k and v) -> the same with all of this k and v, as
    models/llama.py splits it."""
    width = ceil_div(2 * head_dim, shares)
    qs, pieces = zip(*(qkv.split([qkv.shape[-1] - width, width], -1) for qkv in qkvs))
    heads = JoinHeads.apply(grid, shares, *pieces)
    return [torch.cat([q, kv[..., :2 * head_dim]], -1) for q, kv in zip(qs, heads)]


class SharedHeadsQKV(QKVParallelLinear):
    """Its columns are those of this rank's heads of q, and its piece of a head of k and v."""

    def __init__(self, plain, grid, model_config: GPTConfig):
        super().__init__(plain, grid)
        self.head_dim, self.groups = model_config.head_dim, model_config.n_kv_head
        self.shares = grid.tp // self.groups
        self.sections = model_config.n_head // self.groups * self.head_dim, 2 * self.head_dim
        self.widths = tuple(ceil_div(section, self.shares) for section in self.sections)

    def forward(self, x):
        [qkv] = join_heads([super().forward(x)], self.head_dim, self.shares, self.grid)
        return qkv


def strips_of_heads(x: torch.Tensor, heads: int, width: int, count: int) -> list:
    """This rank's rows of qkv (or numbers of its bias) in `count` strips of --exact. It has so many
    heads of k and v, or a part of one; a strip has `width` rows of one."""
    groups = x.unflatten(0, (heads, -1))
    of_kv = width * count // heads
    parts = groups.split([groups.shape[1] - of_kv, of_kv], 1)
    strips = [part.unflatten(1, (count // heads, -1)).flatten(0, 1) for part in parts]
    return [torch.cat(pair) for pair in zip(*strips)]
