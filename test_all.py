"""The claims of the book, each with its test.

The book is model.py, data.py, amp.py, parallel.py, checkpoint.py, sample.py and train.py. The
claims of parallelism/, which adds what is rarer or faster, are here, too.

    python -m pytest test_all.py                what a change must pass: minutes, on two CPU cores
    python -m pytest test_all.py -m slow        the same claims at a size that takes longer
    python test_all.py                          docs/measurements.md: the measured differences

Section             Claims                                            Compared with
All layouts         losses, gradients and norms are those of one      one process, and autograd
                    process; with --exact bit for bit                 of model.GPT
Parallel layers     cut by tensor, sequence, context or expert        the whole layers, torch's
                    parallelism they compute what they do whole       attention, a dense mixture
torch's own stack   a GPT's logits; by every technique gradients,     TransformerEncoderLayer, DDP,
                    and where five steps of train.py end              FSDP2, pipelining, DTensor
The loss scaler     its moves; an fp16 run finds its scale; an        GradScaler, fp64
                    overflow on any rank skips the step on all
Checkpoints         a resumed run is the straight one, bit for bit    a run without a stop
The plain program   data.py's shards, sample.py's tokens; the plain   20 lines, a loop without a
                    program trains and resumes as a run               cache, a run

Begin with          test_an_mlp_cut_by_columns_and_rows_needs_one_sum
                    test_pipelines_give_the_gradients_of_the_whole_model
                    test_five_steps_end_where_torchs_own_stack_ends
                    test_a_resumed_run_is_the_straight_one_bit_for_bit
                    test_an_fp16_run_finds_its_loss_scale_and_trains_as_fp64

A layout is (dp, tp, pp). `@on_ranks` runs the body of a test on each of `world` ranks.
`trained(pool, layout, ...)` trains with train.Run on dp x tp x pp ranks, on the data of `Memory`,
and `reference(cfg, ...)` in one process. These and the fixtures are in tests/harness.py.

Upstream gradients are random: a gradient of ones looks the same transposed. A claim that fails
prints one line, with -vv also the traceback. tests/ has every model in every layout."""
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleOutput,
                                               RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)
from torch.nn.parallel import DistributedDataParallel

import amp
import checkpoint
import parallel
import sample
import train
from base import checkpoint_files
from corpus.prepare import prepare
from corpus.shards import SPLITS
from corpus.tokenizers import get_tokenizer
from model import GPT, IGNORE_INDEX, CoreAttention, GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig
from parallelism import build
from parallelism.experts import ParallelExperts
from parallelism.parameters import TIED
from tests.commands import NASTY, Command, dataset, launch, read_metrics
from tests.harness import (BOUNDS, CFG, INTERLEAVED, LAYOUTS, TWO_STEPS, UPSTREAM, Memory, Pool,
                           assert_close, assert_same_state, batches_from, by_step, column,
                           deep_enough, differences, different_bits, different_rows, gradient_pairs,
                           gridded, monitor_now, names_in, nothing, on_ranks, outputs_and_dx,
                           overflow_in, plain_generate, plain_gradient, random_gpt, random_tensor,
                           relative, run_steps, save_at_the_start, saved, settings, small_state,
                           stage_of, tiles_of, tokens_of, trained, whole_gradient, without_saves)

# ---- All layouts train as one process

def compare_layout(pool, layout, one, out, cfg, **flags):
    """The `differences` of a layout's run from the run of `one` process. The layout also decides
    how many microbatches there are, and whether backward computes the blocks again."""
    dp, tp, pp = layout
    if "pp_chunks" in flags:
        num_microbatches = pp           # interleaved schedules take multiples of it
    elif pp > 2:
        num_microbatches = pp // 2      # fewer microbatches than stages
    else:
        num_microbatches = 1 if tp > 2 else 2
    micro_batch = max(1, 8 // (dp * num_microbatches))
    return differences(trained(pool, layout, out, cfg, whole_gradient, prepare=without_saves,
                               recompute=pp in (2, 8), micro_batch=micro_batch, **flags), one)


MAIN = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2)]          # (dp, tp, pp)
TWO_RANKS = [(2, 1, 1), (1, 2, 1)]
FP32 = dict(dtype="fp32", lr=1e-3, warmup_steps=5)


@pytest.mark.claim("Every layout trains small models as one process does: losses, gradients, "
                   "norms differ by at most 1e-5 in fp32 (rate 1e-3), 1e-10 in fp64.")
@pytest.mark.parametrize("layout, shape, flags", [
    *(pytest.param(layout, dict(n_layer=layout[2] + 1), FP32 | dict(steps=8),
                   marks=() if layout == (2, 2, 2) else pytest.mark.slow) for layout in MAIN),
    ((1, 2, 2), dict(vocab_size=50257, seq_len=8, n_layer=3), FP32),        # GPT-2's vocabulary
    *((layout, {}, dict(dtype="fp64", steps=8, lr=1e-2, warmup_steps=5)) for layout in TWO_RANKS),
    # What the pairs of tests/test_layouts.py do not have: three chunks, four slices of the
    # positions, and three replicas, which cut a bucket into no power of two.
    ((1, 1, 4), dict(n_layer=13), dict(dtype="fp64", pp_schedule="interleaved", pp_chunks=3)),
    ((1, 1, 1), {}, dict(dtype="fp64", cp=4)),
    *(((3, 1, 1), {}, dict(dtype="fp64", batch_size=6, zero=zero)) for zero in (0, 2)),
    *(pytest.param(layout, dict(n_layer=layout[2] + 1), dict(
        dtype="fp64", steps=3, lr=1e-3, warmup_steps=2), marks=pytest.mark.slow)
      for layout in LAYOUTS if layout not in [(1, 1, 1), *TWO_RANKS, *MAIN])])
def test_every_layout_trains_as_one_process(pool, tmp_path, reference, layout, shape, flags):
    """In each layout the loss and the norm of each step, each parameter's gradient and the
    validation loss are those of one process, to 1e-10 in fp64 and 1e-5 in fp32."""
    cfg = replace(CFG, **dict(n_layer=2) | shape)
    flags = TWO_STEPS | flags
    one = reference(cfg, **{name: value for name, value in flags.items()
                            if name not in ("zero", "pp_schedule", "pp_chunks", "cp",
                                            "sequence_parallel")})
    found = compare_layout(pool, layout, one, tmp_path, cfg, **flags)
    assert max(found) <= BOUNDS[flags["dtype"]], f"(loss, gradient, norm) differ by {found}"
    plain = plain_gradient(cfg, flags.get("batch_size", 8))
    assert relative(one.seen[0], plain) <= BOUNDS[flags["dtype"]]


NARROW = GPTConfig(vocab_size=257, seq_len=17, n_layer=4, n_head=8, n_embd=40)


@pytest.mark.claim("With `--exact` every layout has the bits of one process.")
@pytest.mark.parametrize("layout, cfg, same, flags", [       # (dp, tp, pp)
    ((4, 1, 1), replace(NARROW, n_layer=2), {}, dict(zero=1)),
    ((2, 1, 2), NARROW, {}, INTERLEAVED),
    ((2, 2, 2), replace(NARROW, n_layer=2), dict(dtype="fp16"), dict(pp_schedule="1f1b", zero=1)),
    ((2, 2, 1), replace(NARROW, seq_len=20, n_layer=2), dict(dtype="bf16"),
     dict(zero=3, sequence_parallel=True)),
    ((1, 4, 1), replace(NARROW, seq_len=20, n_layer=2), dict(batch_size=8, micro_batch=8),
     dict(sequence_parallel=True)),
    ((2, 2, 1), replace(NARROW, n_layer=2, dropout=0.1), {}, dict(zero=2, recompute=True))])
def test_exact_layouts_have_the_bits_of_one_process(pool, tmp_path, reference, layout, cfg, same,
                                                    flags):
    """With --exact every row, each parameter's gradient, the weights and the moments are those of
    one process, bit for bit. Without it the first row already differs."""
    same = dict(steps=2, batch_size=4, micro_batch=1) | same
    one = reference(cfg, exact=True, **same)
    ours = trained(pool, layout, tmp_path, cfg, whole_gradient, exact=True, **same, **flags)
    assert different_bits(ours, one) == ""
    assert relative(ours.seen, one.seen) == 0
    if layout == (4, 1, 1):
        ours = trained(pool, layout, tmp_path / "rounded", cfg, **same, **flags)
        assert different_bits(ours, reference(cfg, **same)).startswith("step 1")


# ---- Parallel layers beside the whole ones

@on_ranks
def test_an_mlp_cut_by_columns_and_rows_needs_one_sum(rank, world=2):
    """Each rank has half of the hidden channels. Alone it computes a term of the output, and of the
    gradient of x: they differ from the MLP's. Their sums over the ranks are the MLP's, and so is
    what the layers of parallel.py compute, to 1e-12 in fp64."""
    mlp = random_gpt(replace(CFG, n_layer=1)).blocks["0"].mlp
    x, dy = random_tensor(2, 16, 32, seed=1).requires_grad_(), random_tensor(2, 16, 32, seed=2)
    y = mlp(x)
    dx, = torch.autograd.grad(y, x, dy)
    up, bias = (p.detach().chunk(world, 0)[rank] for p in mlp.up.parameters())      # some columns
    down = mlp.down.weight.detach().chunk(world, 1)[rank]                           # some rows
    term = F.gelu(x @ up.T + bias, approximate="tanh") @ down.T
    dx_term, = torch.autograd.grad(term, x, dy)
    assert relative(term + mlp.down.bias, y) > 0.1 and relative(dx_term, dx) > 0.1
    dist.all_reduce(term.detach())                  # what g does in forward
    dist.all_reduce(dx_term)                        # what f does in backward
    assert_close(dict(y=(term + mlp.down.bias, y), dx=(dx_term, dx)), 1e-12)

    with gridded(rank, world, tp=world, pp=1) as grid:
        mlp.up = parallel.ColumnParallelLinear(mlp.up, grid)
        mlp.down = parallel.RowParallelLinear(mlp.down, grid)
        mlp.up.weight, mlp.up.bias, mlp.down.weight = map(nn.Parameter, (up, bias, down))
        ours = mlp(x)
        assert_close(dict(y=(ours, y), dx=(torch.autograd.grad(ours, x, dy)[0], dx)), 1e-12)


@pytest.mark.claim("Tensor- and sequence-parallel layers compute what the whole layers do.")
@pytest.mark.parametrize("world, sequence_parallel, faster", [
    (2, False, False), (4, True, False), (2, True, True), (8, False, True), (8, True, True)])
@on_ranks
def test_tensor_parallel_layers_equal_the_whole_layers(rank, world, sequence_parallel, faster):
    """Embedding, block and head with its loss, by parallel.py alone and with the faster modules of
    parallelism/, have the whole layers' output and all gradients under random upstream gradients,
    to 1e-12 in fp64. With sequence parallelism a rank has its slice of the positions."""
    plain = random_gpt(replace(CFG, n_layer=1))
    tokens, targets = tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)
    targets[:, ::7] = IGNORE_INDEX
    x, dy = random_tensor(2, 16, 32, seed=1), random_tensor(2, 16, 32, seed=2)
    theirs = outputs_and_dx(plain, tokens, targets, x, dy)

    def part(x):
        return x.chunk(world, 1)[rank] if sequence_parallel and x.dim() else x
    modules = build.use_faster_modules if faster else mock.Mock()
    with gridded(rank, world, tp=world, pp=1, sequence_parallel=sequence_parallel) as grid, \
            tiles_of(7, world), mock.patch.object(build, "use_faster_modules", modules):
        local, flat = stage_of(plain, grid)
        assert (type(local.head) is parallel.VocabParallelHead) != faster
        if faster:                      # this head computes its gradient in forward
            local.head.set_loss_factor(UPSTREAM.item())
        flat.prepare_grad_sync(local, True)
        ours = outputs_and_dx(local, tokens, targets, part(x), part(dy))
        flat.finish_grad_sync()
        gradients = gradient_pairs(flat, plain)
    outputs = {name: (ours[name], part(theirs[name])) for name in theirs}
    assert rank > 0 or set(gradients) == {name for name, _ in plain.named_parameters()}
    assert_close(outputs | gradients, 1e-12)


@pytest.mark.claim("A pipeline gives the gradients of the whole model, under GPipe and 1F1B.")
@pytest.mark.parametrize("schedule", [parallel.gpipe, parallel.one_f_one_b])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
@on_ranks
def test_pipelines_give_the_gradients_of_the_whole_model(rank, world=3, *, schedule,
                                                         num_microbatches):
    """On three stages, with fewer microbatches than stages and with more, each parameter has the
    gradient of the whole model, to 1e-12 in fp64."""
    cfg = replace(CFG, n_layer=world)
    tokens, targets = tokens_of(cfg, 8), tokens_of(cfg, 8, seed=1)
    whole, stage = random_gpt(cfg), random_gpt(cfg)
    (whole(tokens, targets) / targets.numel()).backward()
    batch = [(*pair, None, None)
             for pair in zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches))]
    with gridded(rank, world, tp=1, pp=world) as grid:
        parallel.keep_stage(stage, grid)
        order = schedule(rank, world, num_microbatches)
        parallel.Pipeline(stage, grid, batch, 1 / targets.numel()).run(order)
        theirs = dict(whole.named_parameters())
        for name, parameter in stage.named_parameters():
            if name in TIED or name in TIED.values():       # each end has a term of its gradient
                assert relative(parameter.grad, theirs[TIED.get(name, name)].grad) > 0.1
                parallel.all_reduce(parameter.grad, grid.groups["embedding"]).wait()
    assert_close({name: (p.grad, theirs[TIED.get(name, name)].grad)
                  for name, p in stage.named_parameters()}, 1e-12)


@pytest.mark.claim("Attention of context-parallel ranks equals plain attention.")
@pytest.mark.parametrize("world", [2, 4])
@on_ranks
def test_context_attention_equals_attention_of_the_whole_sequence(rank, world):
    """The output at this rank's positions, and dq, dk and dv there under random upstream gradients
    of all ranks, are those of F.scaled_dot_product_attention on the whole sequence, to 1e-12 in
    fp64. torch's context_parallel cuts the sequence in the same way (its attention needs a GPU)."""
    whole = [random_tensor(2, 3, 16, 5, seed=n).requires_grad_() for n in range(3)]
    dy = random_tensor(2, 3, 16, 5, seed=3)

    def own(x):
        return parallel.cut_sequence(x, rank, world, dim=2)
    mine = [own(x).detach().requires_grad_() for x in whole]
    theirs = F.scaled_dot_product_attention(*whole, is_causal=True)
    theirs.backward(dy)
    alone = F.scaled_dot_product_attention(*mine, is_causal=True)       # without others' keys
    assert relative(alone, own(theirs)) > 0.1
    with gridded(rank, world, tp=1, pp=1, cp=world) as grid:
        attention = parallel.ContextParallelAttention(CoreAttention(0.0), grid)
        ours = attention(*mine)
        ours.backward(own(dy))
    pairs = {name: (x.grad, own(y.grad)) for name, x, y in zip(("dq", "dk", "dv"), mine, whole)}
    assert_close(pairs | dict(y=(ours, own(theirs))), 1e-12)

    positions = torch.arange(16)
    with context_parallel(init_device_mesh("cpu", (world,)), buffers=[positions],
                          buffer_seq_dims=[0]):
        assert positions.equal(parallel.cut_sequence(torch.arange(16), rank, world))


def dense_mixture(x, router, up, down, n_active):
    """Every expert computes every token, and a token adds up those that it chose."""
    weights, chosen = (x @ router.T).softmax(-1).topk(n_active)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(len(router)):
        gate, value = (x @ up[expert].T).chunk(2, -1)
        weight = weights.where(chosen == expert, 0).sum(-1, keepdim=True)
        y = y + weight * ((F.silu(gate) * value) @ down[expert].T)
    return y, chosen


@pytest.mark.claim("Experts on other ranks compute what a dense mixture computes.")
@pytest.mark.parametrize("world, ep", [(2, 2), (4, 2), (4, 4)])
@on_ranks
def test_experts_on_other_ranks_equal_a_dense_mixture(rank, world, ep):
    """A rank's output, dx and its experts' gradients, summed over the ranks that have them, are
    those of a mixture in which every expert computes the tokens of all ranks, to 1e-12 in fp64."""
    cfg = MoEConfig(257, 16, 1, 4, 32, hidden=24, n_expert=8, n_active=2, balance_loss=0)
    whole, local = (random_gpt(cfg).blocks["0"].mlp for _ in range(2))
    x, dy = (random_tensor(world, 16, 32, seed=n) for n in (1, 2))              # a row a rank
    x.requires_grad_()
    theirs, chosen = dense_mixture(x, *whole.parameters(), cfg.n_active)
    theirs.backward(dy)
    count = cfg.n_expert // ep
    own = slice(rank % ep * count, (rank % ep + 1) * count)         # the experts of this rank
    assert (chosen[rank] // count != rank % ep).any()               # others are on another
    with gridded(rank, world, tp=1, pp=1, ep=ep) as grid:
        for matrix in (local.experts.up, local.experts.down):
            matrix.weight = nn.Parameter(matrix.weight.detach()[own])
        local.experts = ParallelExperts(local.experts, grid)
        mine = x.detach()[rank:rank + 1].requires_grad_()
        ours = local(mine)
        ours.backward(dy[rank:rank + 1])
        pairs = dict(y=(ours, theirs[rank:rank + 1]), dx=(mine.grad, x.grad[rank:rank + 1]))
        for name in ("up", "down"):
            gradient = local.experts.get_submodule(name).weight.grad
            parallel.all_reduce(gradient, grid.groups["same_experts"]).wait()
            pairs[name] = gradient, whole.experts.get_submodule(name).weight.grad[own]
    assert_close(pairs, 1e-12)


# ---- torch's own stack

def torchs_logits(plain, tokens):
    """The logits of the same parameters in torch's own Transformer layers."""
    cfg = plain.cfg
    T = tokens.shape[1]
    activation = {"relu": F.relu, "gelu": functools.partial(F.gelu, approximate="tanh")}
    layer = nn.TransformerEncoderLayer(
        cfg.n_embd, cfg.n_head, 4 * cfg.n_embd, 0.0, activation[cfg.activation], batch_first=True,
        norm_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    x = plain.embed.token.weight[tokens] + plain.embed.position.weight[:T]
    for block in plain.blocks.values():
        ours = [parameter for part in (block.attn, block.mlp, block.norm1, block.norm2)
                for parameter in part.parameters()]         # the order of theirs
        weights = dict(zip(dict(layer.named_parameters()), ours, strict=True))
        x = torch.func.functional_call(layer, weights, (x, mask))
    x = F.layer_norm(x, (cfg.n_embd,), plain.head.norm.weight, plain.head.norm.bias)
    return x @ plain.embed.token.weight[:cfg.vocab_size].T


@pytest.mark.claim("Logits, loss and gradients of a GPT equal those of torch's Transformer layers.")
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_logits_loss_and_gradients_equal_those_of_torchs_layers(activation):
    """With nn.TransformerEncoderLayer, F.layer_norm and F.cross_entropy on the same parameters:
    logits of three lengths and the loss to 1e-12, each parameter's gradient to 1e-11 in fp64."""
    plain = random_gpt(replace(CFG, activation=activation))
    tokens, targets = tokens_of(CFG, 3), tokens_of(CFG, 3, seed=1)
    targets[0, 3:] = IGNORE_INDEX
    for T in (CFG.seq_len, 7, 1):
        difference = relative(plain(tokens[:, :T]), torchs_logits(plain, tokens[:, :T]))
        assert difference < 1e-12, T
    loss = plain(tokens, targets)
    expected = F.cross_entropy(torchs_logits(plain, tokens).flatten(0, 1), targets.flatten(),
                               ignore_index=IGNORE_INDEX, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients, theirs = (torch.autograd.grad(x, list(plain.parameters())) for x in (loss, expected))
    assert relative(gradients, theirs) < 1e-11          # 0 in the padding


def train_theirs(config, gpt, kind=torch.optim.AdamW, rows=slice(None), backward=None,
                 look=nothing, **more):
    """Train a model with clip_grad_norm_ and AdamW, or an optimizer of another `kind`, on these
    rows of each batch. `look(gpt)` sees each step's gradients."""
    def backward_of_mean(x, y):
        loss = gpt(x, y) / y.numel()
        loss.backward()
        return loss.item()
    tokens, parameters = Memory(CFG), list(gpt.parameters())
    optimizer = kind([
        dict(params=[p for p in parameters if p.dim() > 1], weight_decay=config.weight_decay),
        dict(params=[p for p in parameters if p.dim() == 1], weight_decay=0.0)],
        lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, **more)
    seen = []
    for step, (first, size) in enumerate(batches_from(config, 0, config.steps), 1):
        windows = tokens.read(tokens.window_ids(config.seed, first, size))[0]
        batch = torch.from_numpy(windows)[rows]
        optimizer.zero_grad()
        loss = (backward or backward_of_mean)(batch[:, :-1], batch[:, 1:])
        look(gpt)
        norm = nn.utils.clip_grad_norm_(parameters, config.clip) if config.clip else None
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        optimizer.step()
        seen.append((loss, norm))
    return seen, optimizer


@pytest.mark.claim("Clipping and AdamW equal those of a plain model.")
@pytest.mark.parametrize("layout, cp", [((2, 2, 2), 1), ((1, 1, 1), 2)])
def test_a_run_is_adamw_with_clipping_on_a_plain_model(pool, tmp_path, layout, cp):
    """Losses and norms are those of a plain model with torch.optim.AdamW and clip_grad_norm_, and
    so are the parameters after five steps of growing batches, to 1e-10 in fp64."""
    flags = dict(dtype="fp64", steps=5, clip=0.35, lr=1e-2, warmup_steps=2, batch_size=16,
                 batch_ramp="4:4:20")
    config = settings(tmp_path, **flags)
    steps, _, whole = trained(pool, layout, tmp_path, cp=cp, **flags)
    assert column(steps, "batch_size") == [4, 4, 8, 12, 16]
    assert column(steps, "tokens") == [16 * n for n in (4, 8, 16, 28, 44)]
    plain = GPT(CFG).initialize(config.seed).double()
    theirs = [dict(step=step, loss=loss, grad_norm=norm)
              for step, (loss, norm) in enumerate(train_theirs(config, plain)[0], 1)]
    assert min(column(theirs, "grad_norm")) > config.clip               # it clips
    for name in ("loss", "grad_norm"):
        assert relative(by_step(steps, name), by_step(theirs, name)) <= 1e-10
    expected = comparable(dict(plain.named_parameters()))
    assert relative(comparable(whole["master"]), expected) <= 1e-10


def comparable(whole):
    """The parameters without padding, and without the bias of the keys. The softmax does not see
    that bias, so its gradient is rounding alone, which Adam divides by its own size."""
    found = {name: x.detach() for name, x in whole.items()}
    for name, x in found.items():
        if name == "embed.token.weight":
            found[name] = x[:257]
        if name.endswith("qkv.bias"):
            q, _, v = x.chunk(3)
            found[name] = torch.cat([q, v])
    return found


def whole_tensors(named):
    return {name.removeprefix("module."): p.full_tensor() if isinstance(p, DTensor) else p
            for name, p in named.items()}


def gradients_and_end(config, gpt, whole=whole_tensors, **how):
    """({name: gradient} of step 1, {name: parameter} after all steps)"""
    gradients = []

    def keep(gpt):
        gradients.append(whole({name: p.grad.clone() for name, p in gpt.named_parameters()}))
    train_theirs(config, gpt, look=keep, **how)
    return gradients[0], whole(dict(gpt.named_parameters()))


def replicated(rank, world, config):
    """By DistributedDataParallel and, with ZeRO 1, ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    gpt = DistributedDataParallel(GPT(CFG).initialize(config.seed).double())
    rows = slice(rank, None, world)
    if config.zero == 0:
        return gradients_and_end(config, gpt, rows=rows)
    return gradients_and_end(config, gpt, rows=rows, kind=ZeroRedundancyOptimizer,
                             optimizer_class=torch.optim.AdamW)


def fully_sharded(rank, world, config):
    """By fully_shard (FSDP2)."""
    from torch.distributed.fsdp import fully_shard
    gpt = GPT(CFG).initialize(config.seed).double()
    mesh = init_device_mesh("cpu", (world,))
    for part in (*gpt.blocks.values(), gpt):
        fully_shard(part, mesh=mesh, reshard_after_forward=config.zero == 3)
    return gradients_and_end(config, gpt, rows=slice(rank, None, world))


LAYERS_OF_STAGES = {        # (ranks, chunks): the layers of each chunk of each rank
    (2, 2): [["01", "3"], ["2", "4"]], (3, 1): [["01"], ["23"], ["4"]],
    (4, 1): [["01"], ["2"], ["3"], ["4"]]}


def pipelined(rank, world, config):
    """This rank's stage, by torch.distributed.pipelining. It leaves the sum of the tied matrix's
    gradients to us."""
    from torch.distributed import pipelining
    whole = GPT(CFG).initialize(config.seed).double()
    tied = whole.head.weight
    stage = nn.ModuleList()
    parts = []
    for chunk, layers in enumerate(LAYERS_OF_STAGES[world, config.pp_chunks][rank]):
        part = copy.copy(whole)
        part._modules = dict(whole._modules, blocks=nn.ModuleDict(
            {layer: whole.blocks[layer] for layer in layers}))
        if rank > 0 or chunk > 0:
            part.embed = None
        if rank < world - 1 or chunk < config.pp_chunks - 1:
            part.head = None
        stage.append(part)
        parts.append(pipelining.PipelineStage(part, chunk * world + rank, world * config.pp_chunks,
                                              torch.device("cpu")))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B}[config.pp_schedule]
    schedule = kind(parts if config.pp_chunks > 1 else parts[0],
                    config.batch_size // config.micro_batch,
                    loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    ends = dist.new_group([0, world - 1])

    def step(x, y):
        if rank == 0:
            schedule.step(x)
        elif rank < world - 1:
            schedule.step()
        else:
            schedule.step(target=y, losses=[])
        if rank in (0, world - 1):
            dist.all_reduce(tied.grad, group=ends)

    def named_as_ours(named):
        return {TIED.get(name.split(".", 1)[1], name.split(".", 1)[1]): p
                for name, p in named.items()}
    return gradients_and_end(config, stage, named_as_ours, backward=step)


def by_columns_and_rows(rank, world, config):
    """By parallelize_module, and loss_parallel, which computes F.cross_entropy of logits that are
    cut by columns. ColwiseParallel gives a rank consecutive rows of a matrix, so the rows of q, k
    and v are put in the order of the ranks first."""
    gpt = GPT(CFG).initialize(config.seed).double()
    in_order_of_ranks = torch.arange(3 * CFG.n_embd).view(3, world, -1).transpose(0, 1).flatten()
    for block in gpt.blocks.values():
        for parameter in block.attn.qkv.parameters():
            parameter.data = parameter.data[in_order_of_ranks]
    gpt.embed.token = nn.Embedding.from_pretrained(
        gpt.embed.token.weight[:CFG.vocab_size].detach(), freeze=False)
    gpt.projection = nn.Linear(CFG.n_embd, CFG.vocab_size, bias=False)
    gpt.norm, gpt.head = gpt.head.norm, None
    x = Shard(1) if config.sequence_parallel else Replicate()       # between the layers
    plan = {"embed.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "blocks.*.attn.qkv": ColwiseParallel(input_layouts=x),
            "blocks.*.attn.proj": RowwiseParallel(output_layouts=x),
            "blocks.*.mlp.up": ColwiseParallel(input_layouts=x),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=x),
            "projection": ColwiseParallel(input_layouts=x, output_layouts=Shard(-1),
                                          use_local_output=False)}
    if config.sequence_parallel:
        plan |= {"embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=x),
                 "blocks.*.norm1": SequenceParallel(), "blocks.*.norm2": SequenceParallel(),
                 "norm": SequenceParallel()}
    parallelize_module(gpt, init_device_mesh("cpu", (world,)), plan)
    gpt.projection.weight = gpt.embed.token.weight                  # tied, as in model.GPT

    def backward(x, y):
        logits = gpt.projection(gpt.norm(gpt(x)))
        with loss_parallel():
            F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()

    def in_our_order(named):
        return {re.sub("^norm", "head.norm", name):
                p[in_order_of_ranks.argsort()] if ".qkv." in name else p
                for name, p in whole_tensors(named).items()}
    return gradients_and_end(config, gpt, in_our_order, backward=backward)


@pytest.mark.claim("Gradients, and where five steps end, are those of DDP, "
                   "`ZeroRedundancyOptimizer`, FSDP2, `torch.distributed.pipelining`, "
                   "`parallelize_module` and `loss_parallel`.")
@pytest.mark.parametrize("theirs, world, flags", [
    (replicated, 3, dict(batch_size=6)), (replicated, 2, dict(zero=1)),
    (fully_sharded, 3, dict(zero=2, batch_size=6)), (fully_sharded, 2, dict(zero=3)),
    (pipelined, 4, dict(pp=4, pp_schedule="gpipe", clip=0.0)),
    (pipelined, 3, dict(pp=3, pp_schedule="1f1b", clip=0.0)),
    (pipelined, 2, dict(pp=2, pp_schedule="interleaved", pp_chunks=2, clip=0.0)),
    (by_columns_and_rows, 2, dict(tp=2, clip=0.0)),
    (by_columns_and_rows, 2, dict(tp=2, sequence_parallel=True, clip=0.0))])
def test_five_steps_end_where_torchs_own_stack_ends(pool, tmp_path, theirs, world, flags):
    """The gradients of step 1 and the parameters after step 5, to 1e-12 in fp64."""
    config = settings(tmp_path, dtype="fp64", steps=5, lr=1e-2, warmup_steps=2, micro_batch=1,
                      **{"clip": 0.5, **flags})
    gradients, end = {}, {}
    for rank in pool.run(world, theirs, config):
        gradients |= comparable(rank[0])
        end |= comparable(rank[1])
    layout = (world // config.pp // config.tp, config.tp, config.pp)
    ours = pool.run(world, run_steps, layout, config, CFG, whole_gradient)[0]
    assert relative(comparable(ours.seen[0]), gradients) <= 1e-12
    assert relative(comparable(ours.state["master"]), end) <= 1e-12


# ---- The loss scaler

@pytest.mark.claim("The loss scale moves as that of PyTorch's `GradScaler`.")
@pytest.mark.parametrize("init_scale, growth_factor, backoff_factor, growth_interval, share", [
    (2.0 ** 16, 2.0, 0.5, 5, 0.1),
    (1.7, 1.01, 0.95, 3, 0.02),
    (0.3, 1e12, 0.3, 1, 0.02)])         # up to where fp32 ends
def test_the_scale_moves_as_in_torch(init_scale, growth_factor, backoff_factor, growth_interval,
                                     share):
    """For 300 steps, a `share` of which overflow, the scale equals torch.amp.GradScaler's to the
    bit. After each step another LossScaler continues from the state."""
    numbers = dict(growth_factor=growth_factor, backoff_factor=backoff_factor,
                   growth_interval=growth_interval)
    draw = random.Random(0)
    overflows = [draw.random() < share for _ in range(300)]
    ours = amp.LossScaler(torch.tensor(init_scale).item(), **numbers, min_scale=0.0)    # in fp32
    scales = []
    for overflow in overflows:
        scales.append(ours.scale)
        state = json.dumps(ours.state_dict())
        ours = amp.LossScaler()
        ours.load_state_dict(json.loads(state))
        ours.update(overflow)
    theirs = scales_by_torch(overflows, init_scale=init_scale, **numbers)
    assert scales == theirs and min(scales) > 1e-37
    ours, theirs = amp.make_scaler("fp16"), torch.amp.GradScaler("cpu")         # fp16's numbers
    assert (ours.scale, ours.growth_interval) == (theirs.get_scale(), theirs.get_growth_interval())


def scales_by_torch(overflows, **numbers):
    """The loss scale of torch.amp.GradScaler in each of these steps, which overflow or do not."""
    scaler = torch.amp.GradScaler("cpu", **numbers)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in overflows:
        scaler.scale(torch.ones(()))            # creates the scale
        scales.append(scaler.get_scale())
        weight.grad = torch.full((2,), math.inf if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
    return scales


def start_with_a_high_scale(run):
    run.progress.scaler = amp.LossScaler(2.0 ** 22, growth_interval=4)


@pytest.mark.claim("An fp16 run finds its loss scale, trains as fp64 does, and updates as "
                   "PyTorch's AdamW.")
def test_an_fp16_run_finds_its_loss_scale_and_trains_as_fp64(pool, tmp_path):
    """On two stages the gradients overflow by themselves under a scale of 2^22. Of the gradients,
    without those of skipped steps, torch's clip_grad_norm_ and AdamW make the same fp32 masters."""
    flags = dict(steps=20, clip=0.3, rollback="off", layout=(1, 1, 2))
    half, gradients, state = trained(pool, out=tmp_path / "fp16", prepare=start_with_a_high_scale,
                                     dtype="fp16", look=whole_gradient, **flags)
    skipped = [row["step"] for row in half if row["skipped"] > 0]
    exact, *_ = trained(pool, out=tmp_path / "fp64", dtype="fp64",
                        prepare=functools.partial(overflow_in, steps=skipped), **flags)
    assert column(exact, "skipped") == column(half, "skipped")
    losses, expected = (np.array(column(rows, "loss")) for rows in (half, exact))
    learns = expected[0] - expected[-1]
    assert learns > 0.05 and abs(losses - expected).max() < 0.01 * learns
    norms = [column([row for row in rows if row["skipped"] == 0], "grad_norm")
             for rows in (half, exact)]
    assert relative(*norms) < 0.01
    scales = column(half, "loss_scale")
    assert scales == scales_by_torch([row["skipped"] > 0 for row in half],
                                     init_scale=2.0 ** 22, growth_interval=4)
    grown = [step for step, (before, after) in enumerate(itertools.pairwise(scales), 1)
             if after > before]
    assert skipped[:2] == [1, 2] and 2 < grown[0] < skipped[-1]
    assert min(norms[0]) > 0.3                          # it clips
    [resumed], *_ = trained(pool, out=tmp_path, state=tmp_path / "fp64" / "latest.pt", dtype="fp16",
                            **flags | dict(steps=21))
    assert resumed["loss_scale"] == amp.make_scaler("fp16").scale       # fp64 left none
    updates = column([*exact, resumed], "skipped").count(0)
    assert saved(tmp_path, 21)["optimizer_steps"] == updates
    masters = GPT(CFG).initialize(settings("").seed)
    steps = zip(half, gradients)

    def fill_in(x, y):
        row, found = next(steps)
        if row["skipped"] == 0:
            for name, p in masters.named_parameters():
                p.grad = torch.zeros_like(p)
                p.grad[:len(found[name])] = found[name]
    train_theirs(settings("", steps=20, clip=0.3), masters, backward=fill_in)
    expected = comparable(dict(masters.named_parameters()))
    assert relative(comparable(state["master"]), expected) <= 1e-6


def spoil_in_turn(run):
    """At step k rank k - 1 alone finds a gradient that is not finite. This comes after the
    reductions, so the others learn of it only when the ranks agree."""
    sum_statistics = run.sum_statistics

    def spoil(loss, batch):
        bucket = run.flat.buckets[-1]
        assert bucket.specs[0].partition_dim is None
        if run.grid.rank == run.step - 1:
            bucket.shard["grad"][0] = math.inf if run.step < 5 else math.nan
        if (run.step, run.grid.rank) == (9, 6):
            loss += math.inf
        return sum_statistics(loss, batch)
    run.sum_statistics = spoil


HALVED = [65536, 32768, 16384, 8192, 4096, 2048, 1024, 512, 256]


@pytest.mark.claim("An overflow on any rank skips the step on all ranks.")
@pytest.mark.parametrize("dtype, zero, scales", [
    ("fp16", 2, HALVED), pytest.param("fp32", 0, [1] * 9, marks=pytest.mark.slow)])
def test_an_overflow_on_any_rank_skips_the_step_on_all(pool, tmp_path, dtype, zero, scales):
    """Each of eight ranks overflows once, by an inf or a NaN, and at step 9 a loss is infinite. All
    ranks skip all nine steps and halve the scale. The learning rate moves on."""
    cfg = replace(CFG, n_layer=2)
    config = settings(tmp_path, dtype=dtype, steps=9, tp=2, pp=2, zero=zero, rollback="off")
    ranks = pool.run(8, run_steps, (2, 2, 2), config, cfg, monitor_now, None, spoil_in_turn)
    for steps, seen, _ in ranks:
        assert column(steps, "skipped") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert column(steps, "loss_scale") == scales and repr(seen) == repr(ranks[0][1])
        assert column(steps, "lr")[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
        assert steps[6]["lr"] < steps[5]["lr"] < 1e-3
    whole = ranks[0].state
    for name, parameter in GPT(cfg).initialize(config.seed).named_parameters():
        assert whole["master"][name].equal(parameter[:len(whole["master"][name])]), name
        assert not whole["exp_avg"][name].any() and not whole["exp_avg_sq"][name].any()


# ---- Checkpoints, and runs that stop and resume

def overflow_and_grow(run):
    """Steps 2 and 5 overflow. In fp16 the loss scale grows after two steps without an overflow."""
    overflow_in(run, (2, 5))
    if run.step == 1 and run.config.dtype == "fp16":    # a resumed run has it from the file
        run.progress.scaler.growth_interval = 2


@pytest.mark.claim("A resumed run equals an uninterrupted one with as many threads, bit for bit.")
@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), dict(dtype="fp16")),
    ((1, 1, 2), dict(dtype="fp32", pp_schedule="1f1b", batch_size=16, batch_ramp="4:4:25")),
    ((1, 2, 1), dict(dtype="bf16", sequence_parallel=True)),
    ((2, 1, 2), dict(dtype="fp32", zero=2, pp_schedule="interleaved", pp_chunks=2)),
    ((2, 1, 1), dict(dtype="fp16", zero=3, recompute=True))])
def test_a_resumed_run_is_the_straight_one_bit_for_bit(pool, tmp_path, layout, flags):
    """A run that resumes from the file of step 3 has the rows of the uninterrupted run and, at step
    6, its checkpoint, to the bit. There is dropout."""
    cfg = replace(CFG, dropout=0.1, n_layer=2 * flags.get("pp_chunks", 1))
    flags = dict(steps=6, save_every=3, micro_batch=4 // layout[0], **flags)
    whole, _, _ = trained(pool, layout, tmp_path / "whole", cfg, prepare=overflow_and_grow, **flags)
    file = tmp_path / "whole" / "step_00000003.pt"
    resumed, _, _ = trained(pool, layout, tmp_path / "resumed", cfg, state=file,
                            prepare=overflow_and_grow, **flags)
    assert column(resumed, "step") == [4, 5, 6] and "val_loss" in resumed[-1]
    assert different_rows(resumed, whole[3:]) == ""
    end = saved(tmp_path / "whole", 6)
    assert_same_state(saved(tmp_path / "resumed", 6), end)
    assert (checkpoint.load(file)["optimizer_steps"], end["optimizer_steps"]) == (2, 4)
    if flags["dtype"] == "fp16":
        assert column(whole, "loss_scale") == [2 ** 16, 2 ** 16, 2 ** 15, 2 ** 15, 2 ** 16, 2 ** 15]


def test_a_resume_in_a_new_process_continues_the_order_of_the_data(run_train, tmp_path):
    """Batches of four do not divide the data set of 49 windows."""
    tokens = np.random.default_rng(0).integers(257, size=197)
    dataset(tmp_path / "data", {"train": tokens, "val": tokens[:9]})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = ["--data", tmp_path / "data", "--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--seq-len",
             4, "--batch-size", 4, "--steps", 26, "--save-every", 12, "--eval-every", 0]
    assert run_train(*flags, "--out", whole)[0] == 0
    resumed.mkdir()
    shutil.copy(whole / "step_00000012.pt", resumed)
    status, text, _ = Command("train.py", *flags, "--out", resumed).finish()
    assert status == 0 and "after step 12" in text
    rows, expected = (read_metrics(out)[0] for out in (resumed, whole))
    assert column(rows, "step") == [*range(13, 27)]
    assert different_rows(rows, expected[12:], but=("tokens_per_second", "time")) == ""
    assert_same_state(saved(resumed, 26), saved(whole, 26))


@pytest.mark.claim("A run that changes its layout after every step ends as one that stays.")
def test_a_run_resumes_in_any_other_layout(pool, tmp_path):
    """A run that moves to the next of seven layouts after each step has the rows and the last state
    of one that stays, to 1e-10 in fp64."""
    moves = [((2, 1, 1), dict(zero=2)), ((1, 1, 2), dict(pp_schedule="1f1b")),
             ((1, 2, 1), dict(cp=2, zero=3)), ((1, 1, 1), {}), ((2, 2, 1), dict(zero=1)),
             ((1, 1, 2), dict(pp_schedule="interleaved", pp_chunks=2)), ((2, 1, 1), {})]
    same = dict(min_lr_ratio=1.0, dtype="fp64", cfg=replace(CFG, n_layer=4))
    straight, _, end = trained(pool, (1, 1, 1), tmp_path / "stays", steps=len(moves), **same)
    file = None
    for step, (layout, flags) in enumerate(moves, 1):
        rows, _, ours = trained(pool, layout, tmp_path / "moves", state=file, steps=step,
                                micro_batch=4 // layout[0], **same, **flags)
        file = tmp_path / "moves" / "latest.pt"
        assert column(rows, "step") == [step]
        for name in ("tokens", "lr", "loss", "grad_norm"):
            assert rows[0][name] == pytest.approx(straight[step - 1][name], rel=1e-10), (step, name)
    assert relative(ours, end) <= 1e-10


@pytest.mark.parametrize("layout, cp, zero", [((2, 2, 2), 1, 1), ((2, 1, 1), 1, 3)])
def test_a_file_has_the_plain_models_state_in_any_layout(pool, tmp_path, layout, cp, zero):
    """In each layout and ZeRO stage the file of step 0 holds a plain model's parameters, bit for
    bit, and no moments."""
    cfg = replace(CFG, n_layer=3)
    plain = GPT(cfg).initialize(5).double()

    def unpadded(tensors):
        return tensors | {"embed.token.weight": tensors["embed.token.weight"][:257]}
    trained(pool, layout, tmp_path, cfg, prepare=save_at_the_start, micro_batch=1, seed=5,
            cp=cp, zero=zero, steps=1, save_every=1, clip=0.0, dtype="fp64")
    begin, end = saved(tmp_path, 0), saved(tmp_path, 1)
    expected = unpadded(dict(plain.named_parameters()))
    assert begin["parameters"].keys() == expected.keys()
    assert all(begin["parameters"][name].equal(x) for name, x in expected.items())
    assert not any(x.any() for key in ("exp_avg", "exp_avg_sq") for x in begin[key].values())

    moments = train_theirs(settings("", steps=1, seed=5, clip=0.0), plain)[1].state
    for key in checkpoint.STATE:
        theirs = dict(plain.named_parameters())
        if key != "parameters":
            theirs = {name: moments[p][key] for name, p in theirs.items()}
        theirs = unpadded(theirs)
        assert relative(comparable(end[key]), comparable(theirs)) <= 1e-10, key
    size = sum(x.nbytes for key in checkpoint.STATE for x in end[key].values())
    assert (tmp_path / "latest.pt").stat().st_size < 1.2 * size


@pytest.mark.claim("Loading a checkpoint runs no code from it.")
def test_a_checkpoints_code_is_not_run(tmp_path):
    """A pickle that makes a folder is refused, and makes none. With plain torch.load it does."""
    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)
    path = tmp_path / "step_00000001.pt"
    torch.save({**small_state(1), "scaler": Malice()}, path)
    checkpoint.verify(path)
    with pytest.raises(checkpoint_files.CorruptCheckpoint,
                       match="refused: it holds more than tensors"):
        checkpoint.load(path)
    assert names_in(tmp_path) == ["step_00000001.pt"]
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").is_dir()


# ---- Shards, drawn tokens, and the plain program: `train.py --plain`

SMALL = ("--seq-len", 32, "--n-embd", 32, "--batch-size", 8, "--warmup-steps", 4, "--device", "cpu")


def plain_prepare(texts, tokenizer, directory: Path, seed=0) -> None:
    """Write one shard for each split. The split of a text is a function of (seed, text). Of fewer
    than 20 texts, none may validate. corpus/dedup_and_split.py has rules for them."""
    tokens = dict(train=[], val=[])
    salt = seed.to_bytes(16, "little")
    for text in dict.fromkeys(texts):               # of equal texts the first
        digest = hashlib.blake2b(text.encode(), digest_size=16, salt=salt).digest()
        number = int.from_bytes(digest[:8], "little")           # as if drawn from 0 to 2^64 - 1
        split = "val" if number < 2**64 // 20 else "train"      # 5% of the texts validate
        tokens[split] += [tokenizer.eot_token, *tokenizer.encode_ordinary(text)]
    for split, ids in tokens.items():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids)
        shard = header.tobytes() + np.array(ids, "<u2").tobytes()
        (directory / f"{split}_000000.bin").write_bytes(shard)


@pytest.mark.claim("data.py writes the shards that 20 lines write, byte for byte.")
def test_data_py_makes_the_shards_that_20_lines_make(tmp_path):
    """From 200 texts, of which every tenth is given twice, with two seeds."""
    texts = [f"{i} " + "".join(random.Random(i).sample(NASTY, 9)) for i in range(200)]
    texts += texts[::10]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    for seed in (0, 5):
        plain, made = tmp_path / f"plain_{seed}", tmp_path / f"made_{seed}"
        plain.mkdir()
        plain_prepare(texts, get_tokenizer("bytes"), plain, seed)
        prepare([tmp_path / "a.jsonl"], made, "bytes", seed)
        for split in SPLITS:
            name = f"{split}_000000.bin"
            assert (plain / name).read_bytes() == (made / name).read_bytes()


@pytest.mark.claim("sample.py draws the tokens of a loop without a cache.")
@pytest.mark.parametrize("cfg", [GPTConfig(257, 16), LlamaConfig(257, 16, 2, 4, 32)])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_loop_without_a_cache_draws_what_sample_draws(cfg, temperature):
    model = random_gpt(cfg)
    prompt = list(range(20))
    expected = [drawn[0] for drawn in sample.generate(
        model, prompt, 40, set(), temperature, generators=[torch.Generator().manual_seed(7)])]
    drawn = plain_generate(model, prompt, 40, temperature, torch.Generator().manual_seed(7))
    assert drawn == expected


def tensors(path):
    state = torch.load(path, weights_only=True)
    return {(key, name): tensor for key in ("parameters", "exp_avg", "exp_avg_sq")
            for name, tensor in state[key].items()}


@pytest.mark.claim("`plain_step` and `plain_evaluate`, run by `train.py --plain`, have the losses "
                   "and norms of a run.")
@pytest.mark.parametrize("size, dtype, bound", [
    ((), "fp32", 1e-6), (("--model", "llama-nano", "--micro-batch", 2), "fp64", 1e-10),
    ((), "bf16", 0.02)])
def test_the_plain_program_has_the_losses_of_a_run(run_train, library, tmp_path, size, dtype,
                                                   bound):
    """With clipping at work, over 10 steps. In bf16 a run has bf16 parameters with fp32 masters,
    and the plain program autocast."""
    flags = ["--data", library, *SMALL, *size, "--steps", 10, "--dtype", dtype]
    for out, plain in (("run", []), ("plain", ["--plain"])):
        assert run_train(*flags, "--out", tmp_path / out, *plain)[0] == 0
    expected, found = (read_metrics(tmp_path / out)[0] for out in ("run", "plain"))
    assert max(column(expected, "grad_norm")) > 1           # the default of --clip
    for name in ("loss", "grad_norm"):
        assert relative(by_step(found, name), by_step(expected, name)) < bound
    assert relative([found[-1]["val_loss"]], [expected[-1]["val_loss"]]) < bound


@pytest.mark.claim("Eight ranks resume what `plain_save` writes, and `plain_load` what they write.")
def test_a_plain_run_continues_in_eight_ranks_and_back(run_train, library, tmp_path):
    """In fp32 the losses are those of one Run to 1e-5. What stops and continues in the plain
    program alone has the bits of a straight plain run."""
    flags = ["--data", library, *SMALL, "--min-lr-ratio", 1, "--eval-every", 0]
    for out, plain in (("run", []), ("plain", ["--plain"])):
        assert run_train(*flags, "--out", tmp_path / out, "--steps", 9, *plain)[0] == 0
    for out in ("mixed", "parts"):
        assert run_train(*flags, "--out", tmp_path / out, "--steps", 3, "--plain")[0] == 0
    ranks = launch(8, *flags, "--out", tmp_path / "mixed", "--steps", 6, "--tp", 2, "--pp", 2)
    assert [rank.finish()[0] for rank in ranks] == [0] * 8
    for out in ("mixed", "parts"):
        assert run_train(*flags, "--out", tmp_path / out, "--steps", 9, "--plain")[0] == 0
    rows = {out: read_metrics(tmp_path / out)[0] for out in ("run", "plain", "mixed", "parts")}
    for out in ("plain", "mixed", "parts"):
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert relative(by_step(rows[out], name), by_step(rows["run"], name)) < 1e-5, out
    checkpoint.load_model(tmp_path / "plain/latest.pt")             # as sample.py does
    straight, parts = (tensors(tmp_path / out / "latest.pt") for out in ("plain", "parts"))
    assert straight.keys() == parts.keys() == tensors(tmp_path / "run/latest.pt").keys()
    assert all(torch.equal(straight[key], parts[key]) for key in straight)


# ---- The table of differences

def equality_table(pool, dtype, out):
    """Yields (layout, schedule, (loss, gradient, norm)): the figures of docs/measurements.md."""
    one = {cfg: trained(pool, (1, 1, 1), out, cfg, whole_gradient, dtype=dtype, micro_batch=8)
           for cfg in map(deep_enough, LAYOUTS)}
    rows = [(layout, dict(pp_schedule="gpipe"), deep_enough(layout)) for layout in LAYOUTS]
    rows += [(layout, INTERLEAVED, deep_enough((1, 1, 8)))
             for layout in [(1, 1, 2), (4, 1, 2), (2, 2, 2), (1, 1, 4), (2, 1, 4), (1, 2, 4)]]
    for layout, flags, cfg in rows:
        yield layout, flags["pp_schedule"], compare_layout(pool, layout, one[cfg], out, cfg,
                                                         dtype=dtype, **flags)
    cfg, flags = replace(NARROW, n_layer=9), dict(exact=True, dtype=dtype, micro_batch=1)
    one = trained(pool, (1, 1, 1), out, cfg, whole_gradient, **flags)
    exact = [differences(trained(pool, layout, out, cfg, whole_gradient, **flags), one)
             for layout in LAYOUTS]
    yield ("all",), "exact", [max(column) for column in zip(*exact)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        workers = Pool()
        tables = [equality_table(workers, dtype, folder) for dtype in ("fp32", "fp64")]
        print("| dp x tp x pp | schedule | fp32: loss | gradient | norm | fp64: loss | gradient | "
              "norm |\n" + "|---" * 8 + "|")
        for (layout, schedule, fp32), (_, _, fp64) in zip(*tables):
            cells = [" x ".join(map(str, layout)), schedule]
            cells += [f"{x:.0e}" for x in [*fp32, *fp64]]
            print("| " + " | ".join(cells) + " |", flush=True)
        workers.stop()
