"""--exact: the same bits in every layout, by `make_exact`, and what is refused.

The claim: with one seed, batch size and --micro-batch, on one kind of machine, layouts compute the
same bits. The argument, for each operation whose inputs have the same bits:

    sums       whose order depends on the layout are exact sums, so their order does not matter
               (exact_sums.py)
    products   are computed in strips of a layer's columns (or rows), one by one; tp only decides
               which rank computes a strip. So a product has the same shape, strides and alignment
               everywhere (exact_strips.py)
    the rest   is elementwise (a + b = b + a), or computes each row by itself

The assumption: a library computes a product in the same way where shape, strides and alignment are
the same, and a row of LayerNorm however many rows there are. Random layouts test it.

    x -f-+- strip 0: qkv -> attention -> proj -+
         +- strip 1: qkv -> attention -> proj -+        with tp 2, rank 0 computes strips 0 and 1,
         +- strip 2: qkv -> attention -> proj -+-g-> y  and rank 1 strips 2 and 3
         +- strip 3: qkv -> attention -> proj -+        f, g: exact sums over strips and ranks

    operation                     its sums are over                              exact in
    embeddings                    backward: positions, sequences                 ExactLookup
    LayerNorm, bias after g       backward: positions                            Affine
    norms over all heads          both ways: strips, in their order              sum_in_order
    k and v that strips share     backward: strips, in their order               JoinHeads
    qkv and proj, up and down     forward (g) and backward (f): strips           sum_strips
        their biases              backward: positions                            StripProduct
    logits and loss               strips of the vocabulary, positions            ExactCrossEntropy
    gradients of parameters       microbatches, replicas, both ends of a         ExactParameters
                                  pipeline; the squares for the norm

Dropout draws a mask for each strip; AdamW's slices end at multiples of 32
(amp.adamw_update). It costs float64 gradients, copies of the weights, one strip at a time, and
on a CPU all threads but one.
"""
import math
import os
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, IGNORE_INDEX, GPTConfig
from models.moe import Mixture
from parallel import (VocabParallelEmbedding, all_reduce, by_ranks, find_local, own_positions,
                      replace_modules, sum_over_ranks)
from parallelism.all_heads_norm import ParallelAllHeadsNorm
from parallelism.build import data_parallel
from parallelism.exact_experts import EXACT_EXPERT_PLAN
from parallelism.exact_strips import Affine, AttentionInStrips, InStrips, all_positions
from parallelism.exact_sums import ExactParameters, ExactSums
from parallelism.kernels import matmul, use_kernels
from parallelism.loss import TiledCrossEntropy, TiledHead, tile_logits, tile_size
from parallelism.shared_heads import can_cut_heads

MOST_STRIPS = 8         # tp must divide it


# ---- Norms, embedding, head and loss --------------------------------------------------------

def exact_norm(norm: nn.Module, exact: ExactSums, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm or RMSNorm of x (..., C), computed in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    function = F.rms_norm if isinstance(norm, nn.RMSNorm) else F.layer_norm
    normal = function(wide, x.shape[-1:], eps=norm.eps)
    if norm.weight is None:
        return normal.to(x.dtype)
    return Affine.apply(normal, norm.weight, getattr(norm, "bias", None), exact).to(x.dtype)


class ExactLookup(torch.autograd.Function):
    """F.embedding, whose gradient is added to main_grad."""

    @staticmethod
    def forward(ctx, rows, weight, exact):
        ctx.save_for_backward(rows)
        ctx.weight, ctx.exact = weight, exact
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx, dx):
        unit = ctx.exact.embedding_gradient
        units = ctx.exact.in_units(dx.flatten(0, 1), unit, ctx.exact.terms(1))
        rows, = ctx.saved_tensors                   # in any order: units add exactly
        ctx.weight.main_grad().index_add_(0, rows.flatten(), units.double(), alpha=unit)
        return None, None, None


class ExactEmbedding(VocabParallelEmbedding):
    def lookup(self, rows):
        return ExactLookup.apply(rows, self.weight, self.grid.exact)


def add_positions(embed: nn.Module, grid, x: torch.Tensor, dropout_seed,
                  positions: torch.Tensor | None):
    """model.Embed.add_positions, but each sequence looks its positions up: autograd would sum the
    gradients of all sequences."""
    B, T, _ = x.shape
    if hasattr(embed, "position"):
        if positions is None:
            start = grid.tp_rank * T if grid.sequence_parallel else 0
            positions = torch.arange(start, start + T, device=x.device).expand(B, T)
        else:
            positions = own_positions(positions, grid)
        x = x + ExactLookup.apply(positions, embed.position.weight, grid.exact)
    return embed.dropout(x, dropout_seed)


class ExactCrossEntropy(TiledCrossEntropy):
    """The loss of loss.TiledCrossEntropy, with logits in strips, and its gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets, grid, loss_factor, head):
        exact = grid.exact
        x = all_positions(x, grid)
        shape = x.shape
        x, targets = x.flatten(0, 1), targets.flatten()                     # (N, C), (N,)
        # Each (w, C), and aligned: w is a multiple of 16, C of the number of strips.
        weights = weight.chunk(exact.strips // grid.tp)
        biases, dbs = [None] * len(weights), [None] * len(weights)
        if bias is not None:
            db = torch.zeros_like(bias, dtype=torch.float64)
            biases, dbs = bias.chunk(len(weights)), db.chunk(len(weights))  # each (w,)
        first = grid.tp_rank * len(weight)
        vocab_end = head.vocab_size - first         # the column where the padding begins
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.zeros_like(x, dtype=torch.float64)
        loss = torch.zeros(1, dtype=torch.float64, device=x.device)
        size = tile_size(len(x), len(weight) * grid.tp, x.device.type)     # the same for every tp
        for x_i, targets_i, dx_i in zip(x.split(size), targets.split(size), dx.split(size)):
            logits = [tile_logits(x_i, strip, b, vocab_end - i * len(strip)).to(wide)
                      for i, (strip, b) in enumerate(zip(weights, biases))] # each (n, w)
            targets_of_strips = [(targets_i - first - i * len(strip)).unsqueeze(1)
                                 for i, strip in enumerate(weights)]        # each (n, 1)
            losses, total = exact_losses(logits, targets_of_strips, grid)   # (n, 1); new logits
            counted = (targets_i != IGNORE_INDEX).unsqueeze(1)
            exact.add_rows(loss, losses.where(counted, 0), exact.LOSS)
            if loss_factor is None:
                continue
            weight_of_row = counted.to(total.dtype) * loss_factor           # (n, 1)
            dws = weight.main_grad().chunk(len(weights))
            for p, strip, dw, db_i, columns in zip(logits, weights, dws, dbs, targets_of_strips):
                p.mul_((weight_of_row / total).to(p.dtype))
                columns, is_local = find_local(columns, 0, p.shape[1])
                p.scatter_add_(1, columns, -(weight_of_row * is_local).to(p.dtype))
                dz = p.to(x.dtype)
                exact.add(dx_i, matmul(dz, strip), exact.activation_gradient, exact.strips)
                exact.add(dw, matmul(dz.t(), x_i), exact.embedding_gradient, exact.terms(len(x_i)))
                if db_i is not None:
                    exact.add_rows(db_i, dz, exact.gradient)
        if loss_factor is not None:
            dx = by_ranks(dx.view(shape), grid)
            dx = sum_over_ranks(dx, grid).wait().to(x.dtype)
            ctx.save_for_backward(dx, None, None if bias is None else db.to(bias.dtype),
                                  loss.new_full((), loss_factor))
        return loss[0]


def exact_losses(logits: list, targets: list, grid) -> tuple:
    """The losses of n positions, and the sum of exp(z - largest) over the vocabulary, (n, 1) each
    in float64. The logits z (n, w) of each strip become exp(z - largest)."""
    largest = torch.stack([z.amax(1, keepdim=True) for z in logits]).amax(0)
    largest = all_reduce(largest, grid.groups["tp"], dist.ReduceOp.MAX).wait()
    sums = torch.zeros(2, *largest.shape, dtype=torch.float64, device=largest.device)
    total, target = sums
    for z, columns in zip(logits, targets):
        z.sub_(largest)
        columns, is_local = find_local(columns, 0, z.shape[1])
        target += z.gather(1, columns).where(is_local, 0)       # one strip has it
        grid.exact.add(total, z.exp_().sum(1, keepdim=True), ExactSums.SOFTMAX, grid.exact.strips)
    total, target = all_reduce(sums, grid.groups["tp"]).wait()
    return total.log() - target, total


class ExactHead(TiledHead):
    cross_entropy = ExactCrossEntropy

    def normalize(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True, dtype=wide)
        total = torch.zeros(1, dtype=torch.float64, device=x.device)
        self.grid.exact.add_rows(total, norms, ExactSums.NORM)
        return self.norm(x), total[0]


# ---- What is refused ------------------------------------------------------------------------

def refusals(config, cfg: GPTConfig | None) -> list[tuple]:
    """What --exact cannot be combined with, and of a model what it cannot cut, as rules of
    checks.refuse."""
    if not config.exact:
        return []
    tp, cp = config.tp, config.cp
    channels = 0 if cfg is None else cfg.n_kv_head * cfg.head_dim
    return [
        (MOST_STRIPS % tp,
         f"--exact computes in {MOST_STRIPS} strips at most, which tp {tp} does not divide"),
        (channels % tp,
         f"--exact requires that tp {tp} divides the {channels} channels of all heads of keys: "
         f"change one"),
        (cp > 1,
         f"--exact cannot be combined with --cp {cp}, which sums the gradients of keys in the "
         f"order of the ranks: drop one"),
        (config.compile,
         "--exact cannot be combined with --compile, which orders sums in its own way: drop one"),
        (config.sequence_parallel and config.dropout > 0,
         "--exact cannot be combined with --dropout and --sequence-parallel, where each rank draws "
         "masks for its positions: drop one")]


def complete_config(config, device_type: str, state: dict | None, file, default: int):
    """The config with the microbatch of the checkpoint that it goes on from, `state` in `file`, or
    the default: others give other bits. Raises ValueError if a run with these flags has others."""
    if config.offload and device_type == "cuda":
        raise ValueError("--exact cannot be combined with --offload on a GPU: AdamW rounds "
                         "differently on the CPU: drop one")
    if state is not None:
        default = state["config"]["micro_batch"]
        if state["config"].get("exact") and config.micro_batch not in (None, default):
            raise ValueError(f"--exact: the microbatches of {file} have {default} sequences: drop "
                             f"--micro-batch {config.micro_batch}")
    return replace(config, micro_batch=config.micro_batch or default)


# ---- A rank ---------------------------------------------------------------------------------

def count_strips(model_config: GPTConfig) -> int:
    """The largest number that cuts the heads and the channels of the MLPs into equal strips. tp
    divides it. Strips cut k and v into equal pieces, too. Of ranks the last one's is padded."""
    channels = math.gcd(MOST_STRIPS, model_config.hidden, getattr(model_config, "shared_hidden", 0))
    return max(n for n in range(1, channels + 1) if channels % n == 0
               and can_cut_heads(model_config, n)
               and model_config.n_kv_head * model_config.head_dim % n == 0)


def make_exact(model: GPT, grid, config, device: torch.device) -> ExactParameters:
    """Let a rank's part of a model compute as this file says -> its flat buffers."""
    if device.type == "cpu":
        # The number of threads chooses kernels of products, and cuts elementwise ones elsewhere.
        torch.set_num_threads(1)
    elif device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # for the next line
        torch.use_deterministic_algorithms(True)        # kernels that add in a fixed order
    model_config = model.cfg
    positions = config.micro_batch * model_config.seq_len
    grid.exact = ExactSums(count_strips(model_config), positions, device)
    replace_modules(model, EXACT_EXPERT_PLAN | {"embed.token": ExactEmbedding, "head": ExactHead},
                    grid)
    for name, block in model.blocks.items():
        with torch.device("meta"):
            narrow = type(block)(model_config, int(name))
        use_kernels(narrow)
        for norm in ("q_norm", "k_norm"):           # all strips share it
            if hasattr(block.attn, norm):
                setattr(narrow.attn, norm, getattr(block.attn, norm))
        sharing = max(1, grid.exact.strips // model_config.n_kv_head)
        if sharing > 1 or isinstance(getattr(block.attn, "q_norm", None), ParallelAllHeadsNorm):
            attention = AttentionInStrips(block.attn, narrow.attn, grid, sharing)
        else:
            attention = InStrips(block.attn, narrow.attn, ("qkv", "proj"), grid)
        block.attn.forward = attention
        mlp, narrow_mlp = block.mlp, narrow.mlp
        if isinstance(mlp, Mixture):        # exact_experts.py has its experts
            mlp, narrow_mlp = mlp.shared, narrow_mlp.shared
        if mlp is not None:
            mlp.forward = InStrips(mlp, narrow_mlp, ("up", "down"), grid)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.forward = partial(exact_norm, module, grid.exact)
    if model.embed is not None:
        model.embed.add_positions = partial(add_positions, model.embed, grid)
    return data_parallel(model, grid, config, device, ExactParameters)
