"""Heads of keys and values that ranks share: tensor parallelism where K < tp (multi-query
attention, Shazeer 2019, as in PaLM; grouped queries). all_heads_norm.cut_heads swaps qkv.

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
count one copy. For PaLM 540B (48 heads, tp 12) copies make a rank's qkv 1.4 times as large, and the
exchange sends 0.7% of what tensor parallelism sends.

Shapes: B sequences, T positions, D channels of a head, K heads of k and v, each for G of q.
"""
import torch

from model import GPTConfig, ceil_div
from parallel import QKVParallelLinear, all_to_all


def can_cut_heads(model_config: GPTConfig, parts: int) -> bool:
    """Whether each of `parts` ranks can have as many whole heads of q, and either whole heads of k
    and v or a part of one."""
    K = model_config.n_kv_head
    return K % parts == 0 or (parts % K == 0 and model_config.n_head % parts == 0)


def exchange(slices: torch.Tensor, grid) -> torch.Tensor:
    """Slice i goes to the i-th of the consecutive ranks that share a head. Returns one slice from
    each of these ranks, in their order."""
    ranks = len(slices)
    if ranks == 1:
        return slices
    first = grid.tp_rank // ranks * ranks
    counts = [int(first <= rank < first + ranks) for rank in range(grid.tp)]
    return all_to_all(slices, counts, counts, grid.groups["tp"]).wait()


class JoinHeads(torch.autograd.Function):
    """Pieces (..., n / sharing) -> whole heads (..., n), of which `sharing` consecutive pieces are
    one. A rank has one piece, or one for each of its strips. It returns, for each piece,
    the whole head that the piece belongs to. Backward sums the gradients of all ranks and strips,
    in their order."""

    @staticmethod
    def forward(ctx, grid, sharing, *pieces):
        on_rank = min(sharing, len(pieces))             # pieces of a head on a rank
        ranks = sharing // on_rank                      # that share a head
        ctx.grid, ctx.on_rank, ctx.ranks = grid, on_rank, ranks
        x = torch.stack(pieces)
        x = exchange(x.expand(ranks, *x.shape), grid)       # (ranks, pieces, ..., n / sharing)
        heads = []
        for of_head in x.split(on_rank, 1):                 # (ranks, on_rank, ..., n / sharing)
            head = torch.cat(list(of_head.flatten(0, 1)), -1)                   # (..., n)
            heads += [head.view_as(head) for _ in range(on_rank)]
        return tuple(heads)

    @staticmethod
    def backward(ctx, *dheads):
        x = torch.stack(dheads)                             # (pieces, ..., n)
        x = torch.stack(x.chunk(ctx.ranks, -1))             # (to rank, pieces, ..., n / ranks)
        x = exchange(x, ctx.grid)                           # (from rank, pieces, ..., n / ranks)
        dpieces = []
        for of_head in x.split(ctx.on_rank, 1):             # (ranks, on_rank, ..., n / ranks)
            first, *others = of_head.flatten(0, 1)
            total = first.to(torch.promote_types(first.dtype, torch.float32))
            for term in others:
                total = total + term
            of_pieces = total.to(first.dtype).chunk(ctx.on_rank, -1)    # (..., n / sharing) each
            # The products that take them may depend on strides, too.
            dpieces += [dpiece.contiguous() for dpiece in of_pieces]
        return None, None, *dpieces


class SharedHeadsQKV(QKVParallelLinear):
    """Its columns are those of this rank's heads of q, and its piece of a head of k and v."""

    def __init__(self, plain, grid, model_config: GPTConfig):
        super().__init__(plain, grid)
        self.head_dim, self.groups = model_config.head_dim, model_config.n_kv_head
        self.sharing = grid.tp // self.groups
        self.sections = model_config.n_head // self.groups * self.head_dim, 2 * self.head_dim
        self.widths = tuple(ceil_div(section, self.sharing) for section in self.sections)

    def forward(self, x):
        q, piece = super().forward(x).split(self.widths, -1)
        [kv] = JoinHeads.apply(self.grid, self.sharing, piece)
        kv = kv[..., :2 * self.head_dim]                # without the padding of the last piece
        return torch.cat([q, kv], -1)                   # (B, T, (G K / tp + 2) D)
