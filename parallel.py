"""Where everything lives: one GPT on many ranks, in four ideas, each using the one before.

    1. The rank grid            which rank is what; who talks to whom
    2. Tensor parallelism       one matrix product on several ranks
    3. Pipeline parallelism     one model's layers on several ranks
    4. Data parallelism         one batch on several replicas; the flat buffers; the gradient norm

The invariant all four keep: the same seed and the same global batch give the same loss, gradients
and gradient norm as one process, up to the order of additions. Size 1 in any dimension takes the
same path, with communication that has nobody to talk to.

Shapes: B sequences, T positions, C channels, H heads, D channels of a head, V vocabulary.

    python parallel.py --pp 4 --microbatches 8      # draw a pipeline, count bubble and memory
"""
import argparse
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, IGNORE, GPTConfig, initial_value

# ---------------------------------------------------------------------------------------------
# 1. The rank grid
#
# Ranks stand in an array [dp, pp, tp], the last dimension fastest. With dp 2, pp 2, tp 2:
#
#                     stage 0     stage 1
#       replica 0     0   1       2   3          tensor neighbours  (0 1) (2 3) (4 5) (6 7)
#       replica 1     4   5       6   7          pipelines          (0 2) (1 3) (4 6) (5 7)
#                                                same parameters    (0 4) (1 5) (2 6) (3 7)
#
# Tensor parallelism talks most (four times a block) and gets neighbouring ranks, which share a
# machine; data parallelism talks once a step and may cross the network (Megatron-LM, Narayanan et
# al. 2021, section 3).
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Sizes, this rank's coordinates and its process groups; a group of one rank is None."""
    dp: int
    pp: int
    tp: int
    rank: int = 0
    groups: dict = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def ranks(self) -> torch.Tensor:
        return torch.arange(self.world).view(self.dp, self.pp, self.tp)

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.pp * self.tp)

    @property
    def stage(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    def neighbour(self, step: int) -> int:
        """The rank `step` stages further on in this rank's pipeline."""
        return self.rank + step * self.tp

    def group(self, name: str):
        return self.groups.get(name)


def make_grid(world: int, tp: int, pp: int, rank: int) -> Grid:
    """The grid of `world` ranks; for world > 1 torch.distributed must be initialised, and every
    rank must call this, because a process group is created by all ranks together."""
    grid = Grid(world // (tp * pp), pp, tp, rank)
    ranks = grid.ranks
    members = {
        "tp": ranks.reshape(-1, tp).tolist(),
        "dp": ranks.permute(1, 2, 0).reshape(-1, grid.dp).tolist(),
        # Two groups for the same ranks: NCCL ignores tags and keeps the messages of a group in
        # order, so activations going down and gradients coming up must not share one.
        "forward": (pipelines := ranks.permute(0, 2, 1).reshape(-1, pp).tolist()),
        "backward": pipelines,
        "ends": [[pipe[0], pipe[-1]] for pipe in pipelines] if pp > 1 else [],
        "world": [list(range(world))],
    }
    for name, lists in members.items():
        for group in lists:
            if len(group) > 1:
                handle = dist.new_group(group)
                if rank in group:
                    grid.groups[name] = handle
    return grid


def check_layout(cfg: GPTConfig, world: int, tp: int, pp: int, batch: int, micro: int) -> None:
    """Raise a ValueError that names the numbers if this job cannot run; no communication."""
    if tp < 1 or pp < 1 or world % (tp * pp):
        raise ValueError(f"{world} processes are not divisible by tp {tp} x pp {pp} = {tp * pp}; "
                         f"start a multiple of {tp * pp} (torchrun --nproc_per_node)")
    if cfg.n_head % tp:
        raise ValueError(f"n_head {cfg.n_head} is not divisible by tp {tp}")
    if cfg.padded_vocab % tp:
        raise ValueError(f"the padded vocabulary {cfg.padded_vocab} is not divisible by tp {tp}")
    if cfg.n_layer < pp:
        raise ValueError(f"n_layer {cfg.n_layer} is less than pp {pp}: a stage would be empty")
    dp = world // (tp * pp)
    if batch % (dp * micro):
        raise ValueError(f"batch size {batch} is not divisible by dp {dp} x micro-batch {micro} "
                         f"= {dp * micro}")


def all_reduce(x: torch.Tensor, group, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """Sum (or `op`) over the group, in place; nothing to do alone."""
    if group is not None:
        dist.all_reduce(x, op, group)
    return x


# ---------------------------------------------------------------------------------------------
# 2. Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3)
#
#     MLP:  y = act(x A) B,   A = [A1 A2] by columns,  B = [B1] by rows
#                                                           [B2]
#
#           +-> act(x A1) B1 -+
#      x -f-+                 +-g-> y             rank r computes act(x Ar) Br alone
#           +-> act(x A2) B2 -+
#
#      f: identity forward,   all-reduce backward  (x fed both ranks: its gradients add up)
#      g: all-reduce forward, identity backward    (y is a sum: each term has the gradient of y)
#
# Attention is the same with heads for columns. nn.Linear stores its weight as (out, in), so "by
# columns" cuts dimension 0 here. The vocabulary is cut by rows: a rank looks up the tokens it owns,
# and the loss needs a maximum and two sums over the ranks, never the logits of the others.
# ---------------------------------------------------------------------------------------------


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy.contiguous(), ctx.group), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def f(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Entry of a tensor-parallel region: x is the same on all its ranks."""
    return x if grid.tp == 1 else _F.apply(x, grid.group("tp"))


def g(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Exit of a tensor-parallel region: the ranks' x are summed, in place."""
    return x if grid.tp == 1 else _G.apply(x, grid.group("tp"))


class ColumnParallelLinear(nn.Module):
    """(B, T, in), the same everywhere -> (B, T, out / tp): this rank's columns."""
    cut_dim = {"weight": 0, "bias": 0}

    def __init__(self, linear: nn.Linear, grid: Grid):
        super().__init__()
        self.weight, self.bias, self.grid = linear.weight, linear.bias, grid

    def forward(self, x):
        return F.linear(f(x, self.grid), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """(B, T, in / tp), this rank's rows -> (B, T, out), the same everywhere. The bias is held by
    all and added once, after the sum."""
    cut_dim = {"weight": 1}

    def __init__(self, linear: nn.Linear, grid: Grid):
        super().__init__()
        self.weight, self.bias, self.grid = linear.weight, linear.bias, grid

    def forward(self, x):
        return g(F.linear(x, self.weight), self.grid) + self.bias


class VocabParallelEmbedding(nn.Module):
    """tokens (B, T) -> (B, T, C): rows of other ranks count as zero here, and g adds them."""
    cut_dim = {"weight": 0}

    def __init__(self, embedding: nn.Embedding, grid: Grid):
        super().__init__()
        self.weight, self.grid = embedding.weight, grid

    def forward(self, tokens):
        rows = self.weight.shape[0]
        local = tokens - self.grid.tp_rank * rows                       # row number on this rank
        mine = (local >= 0) & (local < rows)
        x = F.embedding(local.where(mine, 0), self.weight)              # (B, T, C)
        return g(x * mine.unsqueeze(-1), self.grid)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy in nats of logits (N, V / tp) against targets (N,) of the whole
    vocabulary; `start` is the first column's token, columns from `valid` on are padding.

        loss = log sum_v exp(z_v) - z_target        d loss / d z_v = softmax(z)_v - [v = target]

    In fp32 or wider whatever the logits' type. Three numbers a position cross the ranks.
    """

    @staticmethod
    def forward(ctx, logits, targets, start, valid, group):
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # (N, V / tp)
        z[:, valid:] = float("-inf")
        z -= all_reduce(z.amax(dim=1), group, dist.ReduceOp.MAX).unsqueeze(1)
        local = targets - start
        mine = (local >= 0) & (local < z.shape[1])
        column = local.where(mine, 0).unsqueeze(1)                                  # (N, 1)
        at_target = z.gather(1, column).squeeze(1).where(mine, 0)
        z.exp_()
        total, at_target = all_reduce(torch.stack([z.sum(dim=1), at_target]), group)
        counted = targets != IGNORE
        ctx.save_for_backward(z.div_(total.unsqueeze(1)), column, mine, counted)    # z: softmax
        ctx.dtype = logits.dtype
        return (total.log() - at_target).where(counted, 0).sum()

    @staticmethod
    def backward(ctx, scale):
        softmax, column, mine, counted = ctx.saved_tensors
        grad = softmax.scatter_add(1, column, -mine.to(softmax.dtype).unsqueeze(1))
        return (grad * (counted * scale).unsqueeze(1)).to(ctx.dtype), None, None, None, None


class VocabParallelHead(nn.Module):
    """x (B, T, C) and targets (B, T) -> the summed loss of model.Head, the same on every rank."""
    cut_dim = {"weight": 0}

    def __init__(self, head: nn.Module, grid: Grid):
        super().__init__()
        self.norm, self.weight, self.grid = head.norm, head.weight, grid
        self.vocab_size = head.vocab_size

    def forward(self, x, targets):
        logits = F.linear(f(self.norm(x), self.grid), self.weight)                  # (B, T, V / tp)
        rows = self.weight.shape[0]
        start = self.grid.tp_rank * rows
        valid = min(max(self.vocab_size - start, 0), rows)
        return VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), start,
                                               valid, self.grid.group("tp"))


# Which module of model.py becomes what.
PLAN = {
    "attn.qkv": ColumnParallelLinear,
    "attn.proj": RowParallelLinear,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
    "embed.token": VocabParallelEmbedding,
    "head": VocabParallelHead,
}
STACKED = {"attn.qkv": 3}       # q over k over v: each third is cut by heads on its own


@dataclass
class Piece:
    """One parameter: its global name, its whole shape, and how a rank's slice is cut from it."""
    name: str
    shape: tuple            # of the whole, without vocabulary padding
    dim: int | None         # the dimension that tensor parallelism cuts; None: every rank has it
    parts: int              # how many blocks are stacked in that dimension
    rows: int               # shape[0] with the vocabulary padding
    places: list            # (module, attribute) that hold it: two for a tied weight in one stage
    copy: bool              # the last stage's second copy of the tied weight
    local: torch.Size = ()  # shape of a rank's slice
    offset: int = 0         # of the slice in the flat buffers, in elements

    def cut(self, whole: torch.Tensor, tp: int, tp_rank: int) -> torch.Tensor:
        """Whole parameter -> slice of one tensor-parallel rank."""
        if self.rows > self.shape[0]:
            whole = F.pad(whole, (0, 0, 0, self.rows - self.shape[0]))
        if self.dim is None:
            return whole
        stacked = whole.unflatten(self.dim, (self.parts, tp, -1))
        return stacked.select(self.dim + 1, tp_rank).flatten(self.dim, self.dim + 1)

    def join(self, slices: list) -> torch.Tensor:
        """The tp ranks' slices -> whole parameter."""
        if self.dim is None:
            return slices[0]
        stacked = [s.unflatten(self.dim, (self.parts, -1)) for s in slices]
        return torch.cat(stacked, self.dim + 1).flatten(self.dim, self.dim + 1)[:self.shape[0]]


# ---------------------------------------------------------------------------------------------
# 3. Pipeline parallelism (GPipe, Huang et al. 2019)
#
#     The layers are cut into stages and the batch into microbatches, which follow each other:
#
#     stage 0   F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0        m microbatches, p stages: of the
#     stage 1   .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .         m + p - 1 slots of each direction
#     stage 2   .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .         p - 1 are idle, the bubble
#
# A schedule is data: a list of ("F" | "B", microbatch) for each stage. `run_schedule` carries one
# out; `clock` runs all of them without processes, to count and to draw. With --recompute the
# activations inside a block are dropped after forward and made again in backward (GPipe, section
# 2.3, with blocks for its partitions, as in Chen et al. 2016): what stays is a block's input.
# ---------------------------------------------------------------------------------------------

TIED = {"head.weight": "embed.token.weight"}    # local name -> global name


def stage_layers(n_layer: int, pp: int, stage: int) -> range:
    """The blocks of a stage: their numbers differ by one at most, and the last stage, which has the
    head too, is never one of those with more."""
    return range(-(-stage * n_layer // pp), -(-(stage + 1) * n_layer // pp))


def local_model(cfg: GPTConfig, grid: Grid, recompute=False) -> tuple[GPT, list[Piece]]:
    """This rank's part of the model, on the meta device, and its parameters in flat order.

    The pieces depend on the stage alone, so any rank can know the layout of another one.
    """
    with torch.device("meta"):
        model = GPT(cfg)
    mine = stage_layers(cfg.n_layer, grid.pp, grid.stage)
    for name in list(model.blocks):
        if int(name) not in mine:
            del model.blocks[name]
    if not grid.is_first:
        model.embed = None
    if not grid.is_last:
        model.head = None
    for name, module in list(model.named_modules()):
        for end, twin in PLAN.items():
            if name.endswith(end):
                model.set_submodule(name, twin(module, grid))

    pieces = {}
    for module_name, module in model.named_modules():
        parts = next((n for end, n in STACKED.items() if module_name.endswith(end)), 1)
        for attribute, parameter in module.named_parameters(recurse=False):
            local = f"{module_name}.{attribute}"
            name = TIED.get(local, local)
            if name in pieces:
                pieces[name].places.append((module, attribute))
                continue
            vocab = name == "embed.token.weight"
            shape = (cfg.vocab_size, cfg.n_embd) if vocab else tuple(parameter.shape)
            pieces[name] = Piece(name, shape, getattr(module, "cut_dim", {}).get(attribute), parts,
                                 parameter.shape[0], [(module, attribute)],
                                 copy=local in TIED and not grid.is_first)
    # The tied weight first, so that it has the same offset on the first and on the last stage.
    pieces = sorted(pieces.values(), key=lambda piece: piece.name not in TIED.values())
    end = 0
    for piece in pieces:
        piece.local = piece.cut(torch.empty(piece.shape, device="meta"), grid.tp, 0).shape
        piece.offset = end
        end += -(-piece.local.numel() // 32) * 32                       # 64 bytes in 16 bits

    for block in model.blocks.values():
        block.attn.stream = grid.tp_rank                                # other heads, other masks
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                    preserve_rng_state=False)           # masks come from the key
    return model, pieces


def gpipe(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards in reverse; every stage does the same. O(micro) live."""
    return [("F", m) for m in range(micro)] + [("B", m) for m in reversed(range(micro))]


def accumulate(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """One stage needs no pipeline: each backward follows its forward. One live microbatch."""
    return [(op, m) for m in range(micro) for op in "FB"]


def run_schedule(schedule, model: GPT, grid: Grid, inputs, targets, boundary, keys,
                 scale: float = 1.0, last_backward=lambda: None) -> torch.Tensor:
    """Carry out this stage's list; returns the sum of its losses in float64, unscaled (0 on every
    stage but the last).

    inputs      microbatch -> tokens (B, T), used on the first stage
    targets     microbatch -> tokens (B, T), used on the last stage
    boundary    an empty tensor like what crosses a stage boundary, (B, T, C)
    keys        microbatch -> key of the dropout masks
    scale       what to multiply the summed loss by before backward
    last_backward   called before the last "B": its gradients complete the step
    """
    live, sends = {}, []
    total = torch.zeros((), dtype=torch.float64, device=boundary.device)
    backwards = sum(op == "B" for op, _ in schedule)

    def receive(source, group, m):
        x = torch.empty_like(boundary)
        dist.irecv(x, source, grid.group(group), tag=m).wait()
        return x

    def send(x, target, group, m):
        x = x.detach().contiguous()
        sends.append((dist.isend(x, target, grid.group(group), tag=m), x))  # x lives until sent

    for op, m in schedule:
        if op == "F":
            x = inputs[m] if grid.is_first else receive(grid.neighbour(-1), "forward", m)
            if not grid.is_first:
                x.requires_grad_()
            y = model(x, targets[m] if grid.is_last else None, keys[m])
            if grid.is_last:
                total += y.detach()
            else:
                send(y, grid.neighbour(1), "forward", m)
            live[m] = (x, y) if torch.is_grad_enabled() else None
        else:
            x, y = live.pop(m)
            dy = (torch.full_like(y, scale) if grid.is_last
                  else receive(grid.neighbour(1), "backward", m))
            backwards -= 1
            if backwards == 0:
                last_backward()
            y.backward(dy)
            if not grid.is_first:
                send(x.grad, grid.neighbour(-1), "backward", m)
    for work, _ in sends:
        work.wait()
    return total


def clock(schedules, forward: int = 1, backward: int = 2) -> list[list[tuple]]:
    """Run the stages' lists against each other without processes.

    Returns for each stage [(op, microbatch, start, end)] in units of time: an instruction starts
    when its stage is free and its input is there. Raises ValueError on a deadlock.
    """
    end, out = {}, [[] for _ in schedules]
    while any(len(o) < len(s) for o, s in zip(out, schedules)):
        before = len(end)
        for s, schedule in enumerate(schedules):
            for op, m in schedule[len(out[s]):]:
                last = s == len(schedules) - 1
                source = (("F", s - 1, m) if op == "F" and s > 0 else
                          None if op == "F" else ("F", s, m) if last else ("B", s + 1, m))
                if source is not None and source not in end:
                    break
                start = max(end.get(source, 0), out[s][-1][3] if out[s] else 0)
                end[op, s, m] = start + (forward if op == "F" else backward)
                out[s].append((op, m, start, end[op, s, m]))
        if len(end) == before:
            raise ValueError("the schedules wait for each other: deadlock")
    return out


def bubble(timeline) -> float:
    """Idle fraction of all stages' time."""
    span = max(row[-1][3] for row in timeline)
    busy = sum(end - start for row in timeline for _, _, start, end in row)
    return 1 - busy / (span * len(timeline))


def live_activations(schedule) -> int:
    """The most microbatches a stage holds between their forward and their backward."""
    live = [0]
    for op, _ in schedule:
        live.append(live[-1] + (1 if op == "F" else -1))
    return max(live)


def draw(timeline) -> str:
    """One line a stage, a column a unit of time: F3 is the forward of microbatch 3, . is idle."""
    span = max(row[-1][3] for row in timeline)
    width = max(len(str(m)) for row in timeline for _, m, _, _ in row) + 2
    lines = []
    for s, row in enumerate(timeline):
        cells = ["."] * span
        for op, m, start, end in row:
            cells[start:end] = [f"{op}{m}"] * (end - start)
        lines.append(f"stage {s:2d}  " + "".join(c.ljust(width) for c in cells).rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------
# 4. Data parallelism on flat buffers (bucketed as in DDP, Li et al. 2020)
#
#     data    | token | position | block 0 ... | block 1 ... | head |     parameters are views
#     grad    | token | position | block 0 ... | block 1 ... | head |     gradients are views
#             |bucket | bucket 1        |    bucket 0               |
#
# Backward fills `grad` from the right. Once the last microbatch's gradients of a bucket are in, its
# all-reduce starts, while backward goes on to the left. Buckets start in a fixed order, the same
# on every rank. The tied token matrix has the left-most bucket for itself: its gradient comes from
# both ends of the model, and where these are two stages, they add theirs up afterwards.
# ---------------------------------------------------------------------------------------------


def flat_numel(pieces: list[Piece]) -> int:
    """Elements of a rank's flat tensors, padding between the pieces included."""
    return pieces[-1].offset + pieces[-1].local.numel()


def view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a flat tensor that belongs to a piece, in the shape of its slice."""
    return flat[piece.offset:piece.offset + piece.local.numel()].view(piece.local)


class FlatParameters:
    """This rank's parameters, gradients, masters and Adam moments, each one flat tensor.

    data                 (numel,) in `dtype`: the parameters are views into it
    grad                 (numel,) in `master_dtype`: sums over microbatches, then over replicas
    master               (numel,) in `master_dtype`: `data` itself where the types are equal
    exp_avg, exp_avg_sq  (numel,) in `master_dtype`: Adam's moments
    """

    def __init__(self, pieces: list[Piece], grid: Grid, dtype, master_dtype, device,
                 bucket_numel: int = 4 * 2 ** 20):
        self.pieces, self.grid = pieces, grid
        numel = flat_numel(pieces)
        self.data = torch.zeros(numel, dtype=dtype, device=device)
        self.grad = torch.zeros(numel, dtype=master_dtype, device=device)
        self.master = self.data if dtype == master_dtype else torch.zeros_like(self.grad)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.grad), torch.zeros_like(self.grad)

        # Buckets in the order backward completes them: [start, end, parameters still missing].
        self.buckets, self.home, right = [], {}, numel
        for i, piece in reversed(list(enumerate(pieces))):
            alone = i == 1 and pieces[0].name in TIED.values()          # what is left is tied
            self.home[piece.name] = len(self.buckets)
            if right - piece.offset >= bucket_numel or alone or i == 0:
                self.buckets.append((piece.offset, right))
                right = piece.offset
        self.armed, self.works = False, []
        for piece in pieces:
            parameter = nn.Parameter(view(self.data, piece))
            for module, attribute in piece.places:
                setattr(module, attribute, parameter)
            grad = view(self.grad, piece)
            if dtype == master_dtype:
                parameter.grad = grad               # autograd adds straight into the buffer
            parameter.register_post_accumulate_grad_hook(partial(self._ready, piece.name, grad))

    @torch.no_grad()
    def load(self, name: str, whole) -> None:
        """Fill the flat tensor `name` from whole parameters: whole(name, shape) -> tensor."""
        for piece in self.pieces:
            slice = piece.cut(whole(piece.name, piece.shape), self.grid.tp, self.grid.tp_rank)
            view(getattr(self, name), piece).copy_(slice)

    def initialize(self, cfg: GPTConfig, seed: int) -> None:
        """Every parameter at step 0, one whole parameter in memory at a time."""
        self.load("master", lambda name, shape: initial_value(cfg, name, shape, seed))
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """masters -> parameters, rounded to the parameters' type."""
        if self.master is not self.data:
            self.data.copy_(self.master)

    def arm(self) -> None:
        """The next backward completes the gradients: reduce each bucket as soon as it is full."""
        self.armed = True
        self.missing = [0] * len(self.buckets)
        for piece in self.pieces:
            self.missing[self.home[piece.name]] += 1

    def _ready(self, name, grad, parameter) -> None:
        if parameter.grad is not None and parameter.grad.data_ptr() != grad.data_ptr():
            grad += parameter.grad                  # 16 bit -> the fp32 buffer
            parameter.grad = None
        if self.armed:
            self.missing[self.home[name]] -= 1
            while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
                start, end = self.buckets[len(self.works)]
                group = self.grid.group("dp")
                self.works.append(group and dist.all_reduce(self.grad[start:end], group=group,
                                                            async_op=True))

    def finish_reduction(self) -> None:
        """Wait for the buckets, then add up the two ends' gradients of the tied weight."""
        assert len(self.works) == len(self.buckets), "a parameter got no gradient"
        for work in self.works:
            if work is not None:
                work.wait()
        self.armed, self.works = False, []
        tied = next((p for p in self.pieces if p.name in TIED.values()), None)
        if tied is not None:
            all_reduce(view(self.grad, tied), self.grid.group("ends"))

    def square_sums(self) -> torch.Tensor:
        """Sums of squares of this rank's gradients, float64 (2,): [what counts for the global
        norm, everything].

        Summed over the world, the first counts each parameter of the whole model once: replicas,
        what tensor parallelism replicates, and the copy of the tied weight count elsewhere. The
        second is not finite if one of this rank's gradients is not (or if they are so large that
        the squares of a row overflow in fp32).
        """
        counted = torch.zeros((), dtype=torch.float64, device=self.grad.device)
        everything = counted.clone()
        for piece in self.pieces:
            square = square_sum(view(self.grad, piece).flatten())
            everything += square
            replicated = piece.dim is None and self.grid.tp_rank > 0
            if self.grid.dp_rank == 0 and not replicated and not piece.copy:
                counted += square
        return torch.stack([counted, everything])


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat tensor, a float64 scalar.

    One fp32 sum over 10M values can be off in its fourth digit: rows of 4096 are summed in fp32,
    and the rows' sums in float64.
    """
    whole = x.numel() // 4096 * 4096
    rows = torch.linalg.vector_norm(x[:whole].view(-1, 4096), dim=1).double()
    return rows.square().sum() + torch.linalg.vector_norm(x[whole:]).double().square()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a GPipe schedule and count what it costs.")
    parser.add_argument("--pp", type=int, default=4, help="stages")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.error = lambda message: parser.exit(2, f"parallel.py: {message}\n")
    args = parser.parse_args()
    if args.pp < 1 or args.microbatches < 1:
        parser.error("--pp and --microbatches must be at least 1")
    schedules = [gpipe(s, args.pp, args.microbatches) for s in range(args.pp)]
    timeline = clock(schedules)
    p, m = args.pp, args.microbatches
    print(f"gpipe, {p} stages, {m} microbatches; a backward takes two units of time\n")
    print(draw(timeline))
    print(f"\nbubble {bubble(timeline):.1%} of the time, (p - 1) / (m + p - 1) = "
          f"{(p - 1) / (m + p - 1):.1%}")
    print("live activations, in microbatches: "
          + ", ".join(f"stage {s}: {live_activations(x)}" for s, x in enumerate(schedules)))


if __name__ == "__main__":
    main()
