"""Tests of the claims of the book (model, data, amp, parallel, checkpoint, train, sample) and of
the techniques in parallelism/.

    python -m pytest test_all.py                what a change must pass: minutes, on two CPU cores
    python -m pytest test_all.py -m slow        the same claims at a size that takes longer
    python -m pytest                            these and tests/: options, runtime, faults ...
    python test_all.py                          docs/measurements.md: the measured differences

Section                       Claims                                    Compared with
The main claims               every layout trains as one process        one process
                              tensor, pipeline and data parallelism     the whole model
                              context parallelism                       plain attention
                              a resumed run; another layout             an uninterrupted run
                              fifty losses                              recorded ones
model.py                      logits, gradients, sizes, dropout         torch's layers; the papers
data.py                       shards, split, windows, mixtures, ramp    GPT-2's pattern; Megatron-LM
amp.py                        loss scale, an update in 16 bits          torch's GradScaler and AdamW
                              overflow, gradient norm                   fp64; the state before
parallelism/pipeline.py       stages, schedules, what a stage keeps     the papers' formulas
parallelism/tensor.py         memory and passes of the loss, overlap    plain layers
parallelism/: whole runs      AdamW; five steps; dropout; ZB-H1         DDP, FSDP2, torch's rings
parallelism/zero.py           what a rank keeps, when it communicates   the table of ZeRO's stages
checkpoint.py                 a file's content; no code is run          the plain model's state
train.py                      learning rate, evaluation                 literals; a plain model
sample.py                     sampling, cache                           one token at a time
The table of differences      what `python test_all.py` prints          one process

Begin with                    test_plain_tensor_parallel_layers_equal_the_whole_layers
                              test_plain_pipelines_give_the_gradients_of_the_whole_model
                              test_replicas_train_as_one_process_and_stay_equal   (ZeRO 1 to 3)
                              test_a_resumed_run_is_the_straight_one_bit_for_bit
                              test_an_fp16_run_finds_its_loss_scale_and_trains_as_fp64

That no schedule can hang: tests/test_gpu_branches.py.

How the tests work: the body of an `on_ranks` test runs on each of `world` ranks: processes of a
`Pool`, which are started once. `trained(pool, layout, ...)` trains with train.Run on dp x tp x pp
of them, on the data of `Memory`, and returns the rows of metrics.jsonl, what a callback saw after
each step, and the whole state; `reference(cfg, ...)` is such a run of one process.
`Command(file, *flags)` runs a program in a process of its own, and `run_train` runs train.py here,
to its end. `relative(ours, theirs)` is the largest relative difference. These, and the fixtures,
are in tests/harness.py. A layout is (dp, tp, pp).

Where gradients are compared, the upstream ones are random: ones would hide a transposition.
Nothing here needs a network or a GPU.
"""
import copy
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import tempfile
import textwrap
import tracemalloc
import weakref
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amp
import checkpoint
import data
import model
import parallel
import sample
import train
from corpus import encode, index
from corpus.prepare import prepare
from corpus.shards import SPLITS
from corpus.tokenizers import get_tokenizer
from model import GPT, IGNORE_INDEX, SIZES, GPTConfig
from models.llama import LlamaConfig
from parallelism import collectives, context, cpu_kernels, full_tensors, pipeline
from parallelism.buckets import state_bytes
from parallelism.build import Grid, build_stage
from parallelism.pipeline import run_schedule
from parallelism.schedules import SCHEDULES, gpipe, make_schedule, one_f_one_b
from parallelism.tensor import (MAX_LOGITS, TIED, ColumnParallelLinear, VocabParallelEmbedding,
                                add_product, tile_loss, tile_size, param_specs)
from parallelism.zero import FlatParameters
from runtime import checkpoint_files, run_state
from runtime.batch_ramp import batch_size_at, sequences_after, steps_of_epochs
from runtime.flops import parameter_count
from runtime.options import Config
from tests.harness import (BOUNDS, CFG, CUTS, FORMULA, INTERLEAVED, LAYOUTS, NASTY, ROOT, TINY,
                           TWO_STEPS, UPSTREAM, Alive, Command, Memory, Pool, after_backward,
                           assert_close, assert_same_state, batches_from, column, cut, dataset,
                           deep_enough, differences, greedy, gridded, in_turn, launch,
                           losses_of_plain_program, megatrons_batch_size, monitor_now, names_in,
                           on_ranks, outputs_and_dx, plain_gradient, random_gpt, random_tensor,
                           read_metrics, relative, run_steps, same_bits, saved, set_block, settings,
                           small_state, staged, texts_of, tokens_of, traffic, trained, watched,
                           whole_gradient, without_saves)
from tools.schedule import bubble, clock, live_activations


# ---------------------------------------------------------------------------------------------
# The main claims
# ---------------------------------------------------------------------------------------------

def equality_row(pool, layout, one, out, cfg, **flags):
    """The `differences` from `one`, the run of one process."""
    dp, tp, pp = layout
    if "pp_chunks" in flags:
        num_microbatches = pp           # interleaved schedules take multiples of it
    elif pp > 2:
        num_microbatches = pp // 2      # fewer microbatches than stages
    else:
        num_microbatches = 1 if tp > 2 else 2
    recompute = pp in (2, 8) and flags.get("pp_schedule") != "zb-h1"        # which refuses it
    micro_batch = max(1, 8 // (dp * num_microbatches))
    return differences(trained(pool, layout, out, cfg, whole_gradient, prepare=without_saves,
                               recompute=recompute, micro_batch=micro_batch, **flags), one)


@pytest.mark.claim("Every layout trains small models as one process does: losses, gradients, "
                   "norms differ by at most 1e-5 in fp32 (rate 1e-3), 1e-10 in fp64.")
@pytest.mark.parametrize("layout, n_layer, flags", [        # (dp, tp, pp)
    ((8, 1, 1), 2, dict(dtype="fp64")),
    ((1, 8, 1), 2, dict(dtype="fp64")),
    ((1, 1, 8), 9, dict(dtype="fp64")),
    ((1, 4, 2), 3, dict(dtype="fp64")),
    ((4, 1, 2), 3, dict(dtype="fp64")),
    ((2, 2, 2), 5, dict(dtype="fp64", **INTERLEAVED)),
    ((1, 1, 4), 13, dict(dtype="fp64", pp_schedule="interleaved", pp_chunks=3)),
    ((2, 2, 2), 3, dict(dtype="fp64", pp_schedule="zb-h1")),
    ((1, 1, 1), 2, dict(dtype="fp64", cp=4)),
    ((2, 1, 1), 2, dict(dtype="fp64", cp=2, zero=3)),
    ((1, 2, 2), 3, dict(dtype="fp64", cp=2, zero=1, sequence_parallel=True, pp_schedule="1f1b")),
    # Three replicas: no powers of two, also of the shards into which they cut a bucket.
    *(((3, 1, 1), 2, dict(dtype="fp64", batch_size=6, zero=zero)) for zero in range(4)),
    *((layout, layout[2] + 1, dict(dtype="fp32", steps=20, lr=1e-3, warmup_steps=5))
      for layout in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2)]),
    # A rate at which rounding differences grow fast.
    *((layout, 2, dict(dtype="fp64", steps=20, lr=1e-2, warmup_steps=5))
      for layout in [(2, 1, 1), (1, 2, 1)]),
    *(pytest.param(layout, layout[2] + 1,
                   dict(dtype="fp64", steps=6, lr=1e-3, warmup_steps=5), marks=pytest.mark.slow)
      for layout in LAYOUTS),
    *(pytest.param(layout, layout[2] * flags.get("pp_chunks", 1) + 1,
                   dict(dtype=dtype, steps=6, lr=1e-3, warmup_steps=5, cp=cp, **flags),
                   marks=pytest.mark.slow)
      for dtype, layout, cp, flags in [
          ("fp32", (1, 1, 1), 8, {}), ("fp64", (1, 4, 1), 2, dict(sequence_parallel=True)),
          ("fp32", (1, 1, 2), 4, INTERLEAVED), ("fp64", (2, 1, 1), 4, dict(zero=2)),
          ("fp32", (1, 2, 2), 2, dict(pp_schedule="zb-h1")),
          ("fp64", (2, 2, 1), 2, dict(zero=3))])])
def test_every_layout_trains_as_one_process(pool, tmp_path, reference, layout, n_layer, flags):
    """In each layout the loss and the norm of each step, each parameter's gradient and the
    validation loss are those of one process, whose first gradients are those of the plain model by
    autograd, to 1e-10 in fp64 and 1e-5 in fp32. The number of layers is no multiple of that of the
    stages, which differ in size. With pp 4 and 8 there are fewer microbatches than stages, if they
    are not interleaved."""
    cfg = replace(CFG, n_layer=n_layer)
    flags = TWO_STEPS | flags
    one = reference(cfg, **{name: value for name, value in flags.items()
                            if name not in ("zero", "pp_schedule", "pp_chunks", "cp",
                                            "sequence_parallel")})
    found = equality_row(pool, layout, one, tmp_path, cfg, **flags)
    assert max(found) <= BOUNDS[flags["dtype"]], f"(loss, gradient, norm) differ by {found}"
    plain = plain_gradient(cfg, flags.get("batch_size", 8))
    assert relative(one.seen[0], plain) <= BOUNDS[flags["dtype"]]


def test_a_vocabulary_of_gpt2s_size_trains_as_one_process(pool, tmp_path, reference):
    """Two tensor-parallel ranks of two stages, to 1e-5 in fp32. Two ranks swap small tensors
    directly; the gradients of GPT-2's token matrix are so large that they are reduced as those of
    more ranks."""
    cfg = GPTConfig(vocab_size=50257, seq_len=8, n_layer=3, n_head=4, n_embd=16)
    flags = dict(dtype="fp32", steps=2)
    found = equality_row(pool, (1, 2, 2), reference(cfg, **flags), tmp_path, cfg, **flags)
    assert max(found) <= BOUNDS["fp32"], f"(loss, gradient, norm) differ by {found}"


# Heads of 5 channels and sequences of 17: shapes for which kernels differ most.
NARROW = GPTConfig(vocab_size=257, seq_len=17, n_layer=4, n_head=8, n_embd=40)


@pytest.mark.claim("With `--exact` every layout has the bits of one process.")
@pytest.mark.parametrize("layout, cfg, same, flags", [       # (dp, tp, pp)
    ((8, 1, 1), NARROW, dict(batch_size=8), dict(zero=1)),
    ((1, 8, 1), replace(NARROW, n_layer=1), {}, {}),
    ((1, 1, 4), NARROW, {}, dict(pp_schedule="1f1b")),
    ((4, 1, 2), NARROW, dict(batch_size=8), INTERLEAVED),
    ((2, 2, 2), NARROW, dict(dtype="fp16"), dict(pp_schedule="zb-h1", zero=1)),
    ((2, 4, 1), replace(NARROW, seq_len=20, n_layer=2), dict(dtype="bf16"),
     dict(zero=3, sequence_parallel=True)),
    ((1, 4, 1), replace(NARROW, seq_len=20, n_layer=2), dict(batch_size=8, micro_batch=8),
     dict(sequence_parallel=True)),
    ((2, 2, 2), replace(NARROW, n_layer=3, dropout=0.1), {}, dict(zero=2, recompute=True)),
    ((1, 2, 2), replace(NARROW, vocab_size=50257, n_layer=2), dict(batch_size=2), {})])
def test_exact_layouts_have_the_bits_of_one_process(pool, tmp_path, reference, layout, cfg, same,
                                                    flags):
    """With --exact every row, each parameter's gradient, the weights and the moments are those of
    one process, bit for bit. Without it the losses of the first row already differ."""
    same = dict(steps=2, batch_size=4, micro_batch=1) | same
    one = reference(cfg, exact=True, **same)
    ours = trained(pool, layout, tmp_path, cfg, whole_gradient, exact=True, **same, **flags)
    assert same_bits(ours, one) and relative(ours.seen, one.seen) == 0
    if layout == (8, 1, 1):
        ours = trained(pool, layout, tmp_path / "rounded", cfg, **same, **flags)
        assert not same_bits(ours, reference(cfg, **same))


@pytest.mark.parametrize("cfg", [
    replace(NARROW, n_layer=2), LlamaConfig(257, 16, 2, 4, 32, n_kv_head=2, qk_norm=True)],
    ids=["gpt", "llama"])
def test_an_exact_run_goes_on_in_another_layout_bit_for_bit(pool, tmp_path, cfg):
    """Two steps on dp 4, two on tp 2 x pp 2 with ZeRO 1 and two in one process end where six steps
    in one process do. (The learning rate is constant: it would depend on --steps.)"""
    flags = dict(exact=True, batch_size=4, micro_batch=1, warmup_steps=1, min_lr_ratio=1.0)
    straight = trained(pool, (1, 1, 1), tmp_path / "straight", cfg, steps=6, **flags)
    state = None
    for steps, layout, zero in [(2, (4, 1, 1), 0), (4, (1, 2, 2), 1), (6, (1, 1, 1), 0)]:
        out = tmp_path / f"{steps}"
        end = trained(pool, layout, out, cfg, state=state, steps=steps, zero=zero, **flags)
        state = out / f"step_{steps:08d}.pt"
    assert same_bits(end, straight._replace(rows=straight.rows[4:]))


# ---- Tensor parallelism: the layers of tp ranks are the plain layers

@pytest.mark.parametrize("world", [2, 4])
@on_ranks
def test_plain_tensor_parallel_layers_equal_the_whole_layers(rank, world):
    """On two and four ranks the plain modules, as they stand in parallel.py, give the output of
    embedding, block and head with its loss, and all gradients, under random upstream gradients, to
    1e-12 in fp64. The 257 tokens are padded and cut into equal parts."""
    whole, local = (random_gpt(replace(CFG, n_layer=1)) for _ in range(2))
    tokens, targets = tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)
    x, dy = random_tensor(2, 16, 32, seed=1), random_tensor(2, 16, 32, seed=2)
    with gridded(rank, world, tp=world, pp=1) as grid:
        parallel.plain_tensor_parallel(local, grid)
        ours = outputs_and_dx(local, tokens, targets, x, dy)
    theirs = outputs_and_dx(whole, tokens, targets, x, dy)
    pairs = {name: (ours[name], theirs[name]) for name in theirs}
    torchs = F.cross_entropy(whole.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
    pairs["torch's loss"] = ours["loss"], torchs
    for name, parameter in whole.named_parameters():
        mine = local.get_parameter(name)
        assert hasattr(mine, "is_cut") == (name in CUTS), name
        pairs[name] = mine.grad, cut(name, parameter.grad, rank, world)
    assert_close(pairs, 1e-12)


def tiles_of(positions, world):
    """In the block, `world` ranks compute the logits of so many positions at once. (Of the 32 in a
    batch of two, 7 are no divisor: the last tile is shorter.)"""
    return mock.patch.dict(MAX_LOGITS, cpu=positions * (CFG.padded_vocab // world))


def stage_of(plain, grid, recompute=False):
    """This rank's part of an fp64 model, with its values -> (model, its FlatParameters)."""
    local, flat = staged(plain.cfg, grid, torch.float64, recompute)
    flat.load("master", lambda name, shape: plain.get_parameter(name)[:shape[0]])
    return local, flat


def gradient_pairs(flat, plain):
    """{parameter: (the full gradient, the plain model's)}"""
    return {name: (gradient, plain.get_parameter(name).grad[:len(gradient)])
            for name, gradient in flat.full_gradients()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 8])
@on_ranks
def test_tensor_parallel_layers_equal_the_whole_layers(rank, world, sequence_parallel):
    """With tp 2 and 8 embedding, block and head with its loss give the plain layers' output and
    all gradients under random upstream gradients, to 1e-12 in fp64."""
    plain = random_gpt(replace(CFG, n_layer=1))
    tokens, targets = tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)
    targets[:, ::7] = IGNORE_INDEX
    x, dy = random_tensor(2, 16, 32, seed=1), random_tensor(2, 16, 32, seed=2)
    theirs = outputs_and_dx(plain, tokens, targets, x, dy)

    def part(x):                        # sequence parallelism: a slice of the positions
        return x.chunk(world, 1)[rank] if sequence_parallel and x.dim() else x
    with gridded(rank, world, tp=world, pp=1, sequence_parallel=sequence_parallel) as grid, \
            tiles_of(7, world):
        local, flat = stage_of(plain, grid)
        local.head.set_loss_factor(UPSTREAM.item())
        flat.prepare_grad_sync(local, True)
        ours = outputs_and_dx(local, tokens, targets, part(x), part(dy))
        flat.finish_grad_sync()
        gradients = gradient_pairs(flat, plain)
    outputs = {name: (ours[name], part(theirs[name])) for name in theirs}
    assert set(gradients) == {name for name, _ in plain.named_parameters()}
    assert_close(outputs | gradients, 1e-12)


# ---- Pipeline parallelism: the stages' gradients are the whole model's

@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
@on_ranks
def test_plain_pipelines_give_the_gradients_of_the_whole_model(rank, world=3, *, schedule,
                                                               num_microbatches):
    """On three stages, with fewer microbatches than stages and with more, the plain orders give
    each parameter the gradient of the whole model, to 1e-12 in fp64."""
    cfg = replace(CFG, n_layer=world)
    tokens, targets = tokens_of(cfg, 8), tokens_of(cfg, 8, seed=1)
    whole, stage = random_gpt(cfg), random_gpt(cfg)
    (whole(tokens, targets) / targets.numel()).backward()
    batch = list(zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches)))
    with gridded(rank, world, tp=1, pp=world) as grid:
        parallel.keep_stage(stage, grid, [rank])
        order = parallel.SCHEDULES[schedule](rank, world, num_microbatches)
        parallel.plain_pipeline(stage, batch, order, targets.numel(), grid)
        for name, parameter in stage.named_parameters():
            if name in TIED or name in TIED.values():       # the sum of its two ends
                parallel.all_reduce(parameter.grad, grid.groups["embedding"])
    theirs = dict(whole.named_parameters())
    assert_close({name: (p.grad, theirs[TIED.get(name, name)].grad)
                  for name, p in stage.named_parameters()}, 1e-12)


@on_ranks
def test_stages_give_the_gradients_of_the_whole_model(rank, world=3):
    """On three stages with four microbatches run_schedule gives each parameter the gradient of the
    whole model, to 1e-12 in fp64."""
    cfg = replace(CFG, n_layer=world)
    tokens, targets = tokens_of(cfg, 8), tokens_of(cfg, 8, seed=1)
    activation_like = torch.empty(2, cfg.seq_len, cfg.n_embd, dtype=torch.float64)
    whole = random_gpt(cfg)
    (whole(tokens, targets) / targets.numel()).backward()
    batch = [(*pair, 0, None) for pair in zip(tokens.split(2), targets.split(2))]
    with gridded(rank, world, tp=1, pp=world) as grid:
        local, flat = stage_of(whole, grid)
        if grid.is_last:
            local.head.set_loss_factor(1 / targets.numel())
        run_schedule(one_f_one_b(rank, world, 4), local, grid, batch, activation_like, flat)
        flat.finish_grad_sync()
        pairs = gradient_pairs(flat, whole)
    assert pairs.keys() == set(checkpoint.parameter_shapes(cfg))
    assert_close(pairs, 1e-12)


# ---- Data parallelism and ZeRO: replicas train as one process

def comparable(whole):
    """The parameters without padding, and without the bias of the keys: the softmax does not see
    it, so its gradient is nothing but rounding, which Adam divides by its own size."""
    found = {name: x.detach() for name, x in whole.items()}
    for name, x in found.items():
        if name == "embed.token.weight":
            found[name] = x[:257]
        if name.endswith("qkv.bias"):
            q, _, v = x.chunk(3)
            found[name] = torch.cat([q, v])
    return found


@on_ranks
def test_replicas_train_as_one_process_and_stay_equal(rank, world=2):
    """Five AdamW steps on two ranks with half of a batch each, by plain_step, by the plain forms of
    buckets and ZeRO 1 to 3, and by FlatParameters, end at the parameters of one process, to 1e-12
    in fp64, and at the same bits on both ranks. The gradients of the last step are those of one
    process, to 1e-10."""
    tokens, targets = tokens_of(CFG, 4), tokens_of(CFG, 4, seed=1)
    rows, targets_of_rows = tokens.chunk(world)[rank], targets.chunk(world)[rank]
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    with gridded(rank, world, tp=1, pp=1) as grid:
        one, plain, bucketed, *sharded = (GPT(CFG).initialize(0).double() for _ in range(6))
        of_one, of_plain, of_bucketed = (adamw(x.parameters()) for x in (one, plain, bucketed))
        local, flat = stage_of(one, grid)
        buckets = parallel.plain_buckets(bucketed, grid)
        shards = [parallel.plain_shards(x, grid) for x in sharded]
        of_shards = [adamw(x.values()) for x in shards]
        parallel.reduce_scatter_in_backward(sharded[1], shards[1], grid)
        parallel.gather_in_use(sharded[2], shards[2], grid)

        def backward(model, optimizer):
            model.zero_grad()
            optimizer.zero_grad()
            (model(rows, targets_of_rows) / targets.numel()).backward()
        for step in range(1, 6):
            of_one.zero_grad()
            (one(tokens, targets) / targets.numel()).backward()
            of_one.step()

            parallel.plain_step(plain, of_plain, tokens, targets)

            for bucket in buckets:
                bucket.begin_step(num_microbatches=1)
            backward(bucketed, of_bucketed)
            for bucket in buckets:
                bucket.finish()
            of_bucketed.step()

            for zero, (gpt, own, optimizer) in enumerate(zip(sharded, shards, of_shards), 1):
                backward(gpt, optimizer)
                if zero == 1:
                    parallel.reduce_scatter_gradients(gpt, own, grid)
                optimizer.step()
                if zero < 3:
                    parallel.all_gather_parameters(gpt, own, grid)

            flat.zero_grad()
            local.head.set_loss_factor(1 / targets.numel())
            run_schedule(gpipe(0, 1, 1), local, grid, [(rows, targets_of_rows, 0, None)],
                         torch.empty(0), flat)
            flat.finish_grad_sync()
            flat.adamw_step(1.0, step, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0)
        whole = {name: parallel.all_gather(x.detach(), grid.groups["replicas"])
                 for name, x in shards[2].items()}
        last_gradients = gradient_pairs(flat, one)
    assert_close(last_gradients, 1e-10)
    expected = dict(one.named_parameters())
    forms = {"plain_step": dict(plain.named_parameters()),
             "PlainBucket": dict(bucketed.named_parameters()),
             "ZeRO 1": dict(sharded[0].named_parameters()),
             "ZeRO 2": dict(sharded[1].named_parameters()),
             "ZeRO 3": {name: x[:expected[name].numel()].view_as(expected[name])
                        for name, x in whole.items()},
             "FlatParameters": {spec.name: bucket.view(bucket.data, spec)
                                for bucket in flat.buckets for spec in bucket.specs}}
    expected = comparable(expected)
    assert_close({form: (comparable(ours), expected) for form, ours in forms.items()}, 1e-12)
    for form, ours in forms.items():
        ranks = collectives.all_gather_object({name: x.tolist() for name, x in ours.items()})
        assert ranks[0] == ranks[1], form


# ---- Context parallelism: attention of cp ranks is plain attention

@pytest.mark.claim("Attention of context-parallel ranks equals plain attention.")
@pytest.mark.parametrize("world", [2, 4])
@on_ranks
def test_plain_context_attention_equals_plain_attention(rank, world):
    """The output at this rank's positions, and dq, dk and dv there under random upstream gradients
    of all ranks, are those of causal attention on the whole sequence, to 1e-12 in fp64."""
    whole = [random_tensor(2, 3, 16, 5, seed=n).requires_grad_() for n in range(3)]
    dy = random_tensor(2, 3, 16, 5, seed=3)

    def own(x):
        return context.own_positions(x, rank, world, dim=2)
    mine = [own(x).detach().requires_grad_() for x in whole]
    theirs = F.scaled_dot_product_attention(*whole, is_causal=True)
    theirs.backward(dy)
    with gridded(rank, world, tp=1, pp=1, cp=world) as grid:
        ours = parallel.PlainContextAttention(grid)(*mine)
        ours.backward(own(dy))
    pairs = {name: (x.grad, own(y.grad)) for name, x, y in zip(("dq", "dk", "dv"), mine, whole)}
    assert_close(pairs | dict(y=(ours, own(theirs))), 1e-12)


@pytest.mark.claim("Layers on the positions of one context-parallel rank compute what the whole "
                   "layers do.")
@pytest.mark.parametrize("cp, tp, sequence_parallel, recompute", [
    (2, 1, False, False), (4, 1, False, True), (8, 1, False, False), (4, 2, False, False),
    (2, 4, True, False)])
def test_layers_on_some_positions_equal_the_whole_layers(pool, cp, tp, sequence_parallel,
                                                         recompute):
    """Embedding, block and head with its loss on cp ranks' positions give the plain layers' output
    there, and all gradients, summed over the ranks, under random upstream gradients, to 1e-12 in
    fp64; also with tensor and sequence parallelism."""
    pool.run(cp * tp, layers_on_some_positions, cp, tp, sequence_parallel, recompute)


def layers_on_some_positions(rank, world, cp, tp, sequence_parallel, recompute):
    plain = random_gpt(replace(CFG, n_layer=1))
    tokens, targets = tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)
    targets[:, ::7] = IGNORE_INDEX
    x, dy = random_tensor(2, 16, 32, seed=1), random_tensor(2, 16, 32, seed=2)
    theirs = outputs_and_dx(plain, tokens, targets, x, dy)

    def own(x):
        return context.own_positions(x, grid.cp_rank, cp, dim=1)

    def part(x):
        return own(x).chunk(tp, 1)[grid.tp_rank] if sequence_parallel else own(x)
    with gridded(rank, world, tp, 1, sequence_parallel, cp=cp) as grid:
        local, flat = stage_of(plain, grid, recompute)
        local.head.set_loss_factor(UPSTREAM.item())
        flat.prepare_grad_sync(local, True)
        ours = outputs_and_dx(local, own(tokens), own(targets), part(x), part(dy))
        flat.finish_grad_sync()
        gradients = gradient_pairs(flat, plain)
        ours["loss"] = parallel.all_reduce(ours["loss"].detach(), grid.groups["cp"])
    outputs = {name: (ours[name], part(theirs[name])) for name in ("embedding", "block", "dx")}
    assert set(gradients) == {name for name, _ in plain.named_parameters()}
    assert_close(outputs | gradients | dict(loss=(ours["loss"], theirs["loss"])), 1e-12)


def test_ranks_hold_each_position_once_and_attend_to_equally_many():
    """For 1 to 16 ranks. A single rank holds all in order, of any number. A rank's two pieces of q
    attend to 2 cp + 1 pieces together, the figure in context.py."""
    for cp in (1, 2, 3, 4, 8, 16):
        positions = torch.arange(6 * cp)
        parts = [context.own_positions(positions, rank, cp) for rank in range(cp)]
        assert torch.cat(parts).sort().values.equal(positions)
        assert {len(part) for part in parts} == {6}
        assert len({(part + 1).sum().item() for part in parts}) == 1        # keys of all q
        pieces = [(part[::3] // 3 + 1).tolist() for part in parts]
        assert {sum(piece) for piece in pieces} == {2 * cp + 1}
    drawing = "".join(line for line in context.__doc__.splitlines(True) if "rank that" in line)
    holders = [int(x) for x in re.findall(r"\d", drawing)]
    parts = [context.own_positions(torch.arange(8), rank, 4).tolist() for rank in range(4)]
    assert [next(r for r in range(4) if piece in parts[r]) for piece in range(8)] == holders
    for length in (1, 2, 7):
        assert context.own_positions(torch.arange(length), 0, 1).tolist() == list(range(length))


def test_a_run_keeps_only_its_own_positions_of_keys_and_values(pool):
    """CP3: of a layer's attention autograd keeps q, k and v at this rank's positions, all in one
    tensor of the projection, and nothing of all positions."""
    assert pool.run(4, bytes_kept_by_attention) == [3 * 2 * 3 * 4 * 5 * 8] * 4


def bytes_kept_by_attention(rank, world):
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with gridded(rank, world, 1, 1, cp=world) as grid:
        block = SimpleNamespace(attn=SimpleNamespace(core_attention=(
            context.ContextParallelAttention(model.CoreAttention(0.0, "x"), grid))))
        context.recompute_attention(SimpleNamespace(blocks={"0": block}))
        qkv = random_tensor(3, 2, 3, 4, 5, seed=rank).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = block.attn.core_attention(*qkv.unbind(), True)
        y.sum().backward()
    return sum(kept.values())


# ---- parallel.py's program: all plain forms together train as train.py does

@pytest.mark.parametrize("world, tp, pp", [
    (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (8, 2, 2)])
def test_plain_program_has_the_losses_of_train_py(pool, shards, losses_of_train_py, world, tp, pp):
    """`torchrun parallel.py` prints the losses of train.py, to 1e-5: in one process, with each
    parallelism by itself, and with all three on eight ranks."""
    found = pool.run(world, losses_of_plain_program, tp, pp, shards, 5)[0]
    assert len(found) == 5 and found == pytest.approx(losses_of_train_py(5), rel=1e-5)


# ---- Whole runs: stopped and resumed, moved to other layouts, and 50 recorded losses

def overflow_in(run, steps):
    """As after an overflow, one of the gradients of these steps is infinite."""
    def spoil(step):
        if step in steps:
            run.flat.buckets[0].shard["grad"][0] = math.inf
    after_backward(run, spoil)


def overflow_and_grow(run):
    """Steps 2 and 5 overflow; in fp16 the loss scale grows after two steps without an overflow."""
    overflow_in(run, (2, 5))
    if run.step == 1 and run.config.dtype == "fp16":    # a resumed run has it from the file
        run.scaler.growth_interval = 2


def untimed(rows):
    """The rows of metrics.jsonl but for their speed, as text, in which nan equals nan."""
    return [repr(row | dict(tokens_per_second=None)) for row in rows]


@pytest.mark.claim("A resumed run equals an uninterrupted one with as many threads, bit for bit.")
@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), dict(dtype="fp32")),
    ((1, 1, 1), dict(dtype="fp16")),
    ((1, 1, 2), dict(dtype="fp32", pp_schedule="1f1b", batch_size=16, batch_ramp="4:4:25")),
    ((1, 2, 1), dict(dtype="bf16", sequence_parallel=True)),
    ((2, 1, 2), dict(dtype="fp32", zero=2, pp_schedule="interleaved", pp_chunks=2)),
    ((2, 1, 2), dict(dtype="fp16", zero=1, pp_schedule="zb-h1")),
    ((2, 1, 1), dict(dtype="fp16", zero=3, recompute=True)),
    ((1, 1, 1), dict(dtype="bf16", cp=2, zero=1)),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ((2, 1, 2), dict(dtype="fp32", zero=1, pp_schedule="1f1b"))])])
def test_a_resumed_run_is_the_straight_one_bit_for_bit(pool, tmp_path, layout, flags):
    """A run that resumes from an uninterrupted run's file of step 3 has the same rows and, at step
    6, the same checkpoint, to the bit: with dropout, a skipped step before the file and one after
    it, and a loss scale that grows after the file by a count that began before it."""
    cfg = replace(CFG, dropout=0.1, n_layer=2 * flags.get("pp_chunks", 1))
    # Two microbatches a rank, of a batch of 8.
    flags = dict(steps=6, save_every=3, micro_batch=4 // layout[0], **flags)
    whole, _, _ = trained(pool, layout, tmp_path / "whole", cfg, prepare=overflow_and_grow, **flags)
    file = tmp_path / "whole" / "step_00000003.pt"
    resumed, _, _ = trained(pool, layout, tmp_path / "resumed", cfg, state=file,
                            prepare=overflow_and_grow, **flags)
    assert column(resumed, "step") == [4, 5, 6] and "val_loss" in resumed[-1]
    assert untimed(resumed) == untimed(whole[3:])
    end = saved(tmp_path / "whole", 6)
    assert_same_state(saved(tmp_path / "resumed", 6), end)
    assert (checkpoint.load(file)["optimizer_steps"], end["optimizer_steps"]) == (2, 4)
    if flags["dtype"] == "fp16":
        assert column(whole, "loss_scale") == [2 ** 16, 2 ** 16, 2 ** 15, 2 ** 15, 2 ** 16, 2 ** 15]


def test_saves_change_nothing(pool, tmp_path):
    """A run of two replicas with ZeRO 2 in fp16, with dropout, that saves after each step has the
    rows and the final state of one that does not, to the bit."""
    flags = dict(dtype="fp16", zero=2, steps=4, prepare=overflow_and_grow)
    cfg = replace(CFG, dropout=0.1, n_layer=2)
    saves, without = (trained(pool, (2, 1, 1), tmp_path / str(every), cfg, save_every=every,
                              **flags) for every in (1, 0))
    assert same_bits(saves, without) and len(list((tmp_path / "1").glob("step_*.pt"))) == 3


def test_a_resume_in_a_new_process_continues_the_order_of_the_data(run_train, tmp_path):
    """train.py, on a data set of 49 windows, which batches of four do not divide: a process that
    resumes from the file of step 12, one window before the end of the epoch, trains on the same
    windows in two more epochs, and ends with the same rows and file, to the bit."""
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
    for row in rows + expected:
        del row["time"]                     # of writing
    assert column(rows, "step") == [*range(13, 27)] and untimed(rows) == untimed(expected[12:])
    assert_same_state(saved(resumed, 26), saved(whole, 26))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_a_run_resumes_in_any_other_layout(pool, tmp_path, seed):
    """A run that moves to the next of 14 layouts after every step, in an order drawn by the seed,
    has the rows and the final state of one that stays, to 1e-10 in fp64."""
    moves = [((1, 1, 1), {}), ((2, 1, 1), dict(zero=1)), ((1, 2, 1), {}), ((2, 1, 1), dict(zero=2)),
             ((1, 1, 2), dict(pp_schedule="1f1b")), ((2, 1, 1), dict(zero=3)), ((2, 1, 1), {}),
             ((1, 2, 1), dict(sequence_parallel=True)), ((2, 2, 1), dict(zero=1)),
             ((1, 1, 1), dict(recompute=True)),
             ((1, 1, 2), dict(pp_schedule="interleaved", pp_chunks=2)),
             ((2, 1, 2), dict(pp_schedule="zb-h1", zero=1)),
             ((1, 1, 1), dict(cp=4)), ((2, 1, 1), dict(cp=2, zero=3))]
    random.Random(seed).shuffle(moves)
    # Each part ends at its own --steps; a ratio of 1 keeps the learning rate from decaying there.
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


GOLDEN = GPTConfig(vocab_size=257, seq_len=16, n_layer=3, n_head=4, n_embd=16)
GOLDEN_LOSSES = [
    5.55859342554, 5.54993836079, 5.55928922506, 5.57521507225, 5.55341832377, 5.56903443908,
    5.53138854180, 5.57396297904, 5.55446105077, 5.53090800447, 5.55036172769, 5.53649833564,
    5.50409286957, 5.52529699706, 5.52753836086, 5.51024847885, 5.48547254518, 5.50549845205,
    5.45782505804, 5.42085144855, 5.39062347425, 5.39965676384, 5.40952086666, 5.36618765570,
    5.37158298166, 5.40663422933, 5.39841800383, 5.38075935571, 5.36821849766, 5.34220575404,
    5.33095501145, 5.31837483140, 5.34466257152, 5.35467174986, 5.30130897040, 5.28853533772,
    5.32006669590, 5.27005457866, 5.25036845347, 5.24546381000, 5.28323049477, 5.24434663133,
    5.25224618006, 5.22539766955, 5.26769357355, 5.28794425309, 5.27352202707, 5.24853730414,
    5.24752749178, 5.22088411553]


def test_fifty_losses_equal_the_recorded_ones(pool, tmp_path):
    """On any CPU 50 steps in fp64 give the losses in GOLDEN_LOSSES, to 1e-9: a
    change of the code that moves a number shows here at once. The weights are integers, scaled by
    exact divisions, because the normal distribution of torch and NumPy depends on the CPU."""
    draw = np.random.default_rng(0)
    parameters = {}
    for name, shape in checkpoint.parameter_shapes(GOLDEN).items():
        values = torch.from_numpy(draw.integers(-2 ** 20, 2 ** 20, size=shape) / 2 ** 24)
        parameters[name] = values + 1 if re.search(r"norm.*weight", name) else values
    file = tmp_path / "weights.pt"
    torch.save(small_state(0) | dict(model=asdict(GOLDEN), parameters=parameters, exp_avg={},
                                     exp_avg_sq={}), file)
    rows, _, _ = trained(pool, (1, 1, 1), tmp_path, GOLDEN, dtype="fp64", steps=50, lr=3e-3,
                         init_from=str(file), micro_batch=8)
    assert relative(column(rows, "loss"), GOLDEN_LOSSES) <= 1e-9


# ---------------------------------------------------------------------------------------------
# model.py
# ---------------------------------------------------------------------------------------------

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


# Billions of parameters, layers, width, channels of a head, positions, activation, learning rate.
# GPT-2: the released checkpoints, to the last parameter (the learning rate: that of GPT-3's row);
# GPT-3: table 2.1; OPT: table 1. Their numbers of parameters are those of the names, which round
# to 3%.
PUBLISHED = {
    "gpt2": (0.124439808, 12, 768, 64, 1024, "gelu", 6e-4),
    "gpt2-medium": (0.354823168, 24, 1024, 64, 1024, "gelu", 3e-4),
    "gpt2-large": (0.774030080, 36, 1280, 64, 1024, "gelu", 2.5e-4),
    "gpt2-xl": (1.557611200, 48, 1600, 64, 1024, "gelu", 2e-4),
    "gpt3-125m": (0.125, 12, 768, 64, 2048, "gelu", 6e-4),
    "gpt3-350m": (0.350, 24, 1024, 64, 2048, "gelu", 3e-4),
    "gpt3-760m": (0.760, 24, 1536, 96, 2048, "gelu", 2.5e-4),
    "gpt3-1.3b": (1.3, 24, 2048, 128, 2048, "gelu", 2e-4),
    "gpt3-2.7b": (2.7, 32, 2560, 80, 2048, "gelu", 1.6e-4),
    "gpt3-6.7b": (6.7, 32, 4096, 128, 2048, "gelu", 1.2e-4),
    "gpt3-13b": (13, 40, 5120, 128, 2048, "gelu", 1e-4),         # the paper's 5140 is not 40 x 128
    "gpt3-175b": (175, 96, 12288, 128, 2048, "gelu", 0.6e-4),
    "opt-125m": (0.125, 12, 768, 64, 2048, "relu", 6e-4),
    "opt-1.3b": (1.3, 24, 2048, 64, 2048, "relu", 2e-4),
    "opt-2.7b": (2.7, 32, 2560, 80, 2048, "relu", 1.6e-4),
    "opt-6.7b": (6.7, 32, 4096, 128, 2048, "relu", 1.2e-4),
    "opt-13b": (13, 40, 5120, 128, 2048, "relu", 1e-4),
    "opt-30b": (30, 48, 7168, 128, 2048, "relu", 1e-4),
    "opt-66b": (66, 64, 9216, 128, 2048, "relu", 0.8e-4),
    "opt-175b": (175, 96, 12288, 128, 2048, "relu", 1.2e-4),
}


def test_named_sizes_have_the_published_numbers_of_parameters():
    """Each size has the published shape, peak learning rate and number of parameters, to the last
    one for GPT-2 and to 3% for the others; parameter_count is the number that a GPT holds."""
    assert PUBLISHED.keys() == SIZES.keys() - {"nano"}
    for name, (billions, *shape, lr) in PUBLISHED.items():
        cfg = GPTConfig(vocab_size=50257, **SIZES[name])
        assert model.PEAK_LR[name] == lr, name
        assert shape == [cfg.n_layer, cfg.n_embd, cfg.n_embd // cfg.n_head, cfg.seq_len,
                         cfg.activation], name
        bound = 1e-12 if name.startswith("gpt2") else 0.03
        assert parameter_count(cfg) == pytest.approx(1e9 * billions, rel=bound), name
        with torch.device("meta"):
            held = sum(parameter.numel() for parameter in GPT(cfg).parameters())
        padding = (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd
        assert parameter_count(cfg) == held - padding, name


def test_initial_values_have_gpt2s_standard_deviations():
    """Matrices: mean 0 and standard deviation 0.02, or 0.02 / sqrt(2 n_layer) for the projections
    to the residual stream, to 5%; LayerNorm's weights 1, biases and padding 0. The first loss is
    that of a uniform guess, ln 257, to 0.05. A derived seed is recorded: it is the same on every
    machine, in every version."""
    cfg = GPTConfig(n_layer=8, n_embd=128)
    plain = GPT(cfg).initialize(0)
    for name, parameter in plain.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == name.endswith("weight")).all(), name
            continue
        drawn = parameter[:257] if name == "embed.token.weight" else parameter
        residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
        assert drawn.std().item() == pytest.approx(0.005 if residual else 0.02, rel=0.05), name
        assert abs(drawn.mean().item()) < 0.001, name
        assert not parameter[len(drawn):].any()
    assert model.derive_seed(0, "a") == 225321766190137866
    targets = tokens_of(cfg, 4, seed=1)
    loss = plain(tokens_of(cfg, 4), targets) / targets.numel()
    assert loss.item() == pytest.approx(math.log(257), abs=0.05)


def test_dropout_is_a_function_of_its_seed_or_of_torchs_generator():
    """With a dropout_seed the state of torch's generator changes nothing; without one, the same
    state gives the same logits and the next call others; in eval mode nothing is dropped."""
    plain, tokens = GPT(replace(CFG, dropout=0.3)).initialize(0), tokens_of(CFG, 2)

    def drawn(torchs_seed, dropout_seed=None):
        torch.manual_seed(torchs_seed)
        return plain(tokens, dropout_seed=dropout_seed)
    assert drawn(0, 1).equal(drawn(5, 1)) and not drawn(0, 1).equal(drawn(0, 2))
    assert drawn(0).equal(drawn(0)) and not plain(tokens).equal(plain(tokens))
    plain.eval()
    assert drawn(0, 1).equal(drawn(0, 2))


def test_dropout_drops_its_share_and_scales_the_rest():
    """Of 100,000 ones 30% become 0, to 0.5%, and the others 1 / 0.7. In attention the weights of
    each position, of which v shows one, are dropped."""
    x = model.Dropout(0.3)(torch.ones(1000, 100), dropout_seed=1)
    v = torch.eye(100).expand(10, 10, 100, 100)
    q = torch.zeros(10, 10, 100, 100)               # equal weights, of 1 / 100
    attended = 100 * model.CoreAttention(0.3)(q, q, v, False, dropout_seed=1)
    for found in (x, attended):
        assert (found == 0).float().mean().item() == pytest.approx(0.3, abs=0.005)
        torch.testing.assert_close(found[found != 0].unique().mean().item(), 1 / 0.7)


def test_the_loss_of_16_bit_logits_is_computed_in_fp32():
    """The loss of a bf16 model, plain or parallel, is the cross-entropy of its logits in fp32, to
    torch's fp32 tolerance of 1.3e-6. (Each beside the plain model that has the same products:
    where a CPU has no instructions for bf16, a parallel model multiplies in fp32.)"""
    plain, tokens = GPT(CFG).initialize(0).bfloat16(), tokens_of(CFG, 2)
    same_products = copy.deepcopy(plain)
    cpu_kernels.use_kernels(same_products)
    local, _ = staged(CFG, Grid(1, 1, 1), torch.bfloat16)
    for gpt, beside in ((plain, plain), (local, same_products)):
        logits = beside(tokens).float().flatten(0, 1)
        expected = F.cross_entropy(logits, tokens.flatten(), reduction="sum")
        torch.testing.assert_close(gpt(tokens, tokens), expected)


@pytest.mark.parametrize("name, value", [("n_head", 5), ("activation", "tanh")])
def test_an_invalid_shape_is_refused(name, value):
    """By a ValueError that names the argument."""
    with pytest.raises(ValueError, match=name):
        GPTConfig(**{name: value})


# ---------------------------------------------------------------------------------------------
# data.py
# ---------------------------------------------------------------------------------------------

def test_seed_and_text_alone_decide_the_split_of_a_document(tmp_path, monkeypatch, run_data):
    """Each of 400 documents is in one split, in the order of the input, with its text unchanged,
    <|endoftext|> within it too. Another order, or fewer documents, does not move one to the other
    split; another seed does. Of 20 documents at least one validates and one trains."""
    monkeypatch.setattr(index.os, "cpu_count", lambda: 1)        # 4 jobs, 3 of them under way
    monkeypatch.chdir(tmp_path)
    Path("in/sub").mkdir(parents=True)
    Path("in/other.md").write_text("neither .txt nor .jsonl: not read")
    Path("in/empty.txt").touch()
    Path("in/link.jsonl").symlink_to("nowhere")
    texts = [f"{i} " + "".join(random.Random(i).sample(NASTY, 9)) for i in range(400)]

    def split(texts, seed=0):
        shutil.rmtree("my data", ignore_errors=True)
        Path("in/sub/a.jsonl").write_text("".join(json.dumps(dict(text=t)) + "\n" for t in texts))
        status, told, _ = run_data("--input", "in", "--tokenizer", "bytes", "--out",
                                   "my data", "--seed", seed)
        assert status == 0 and "python train.py --data 'my data' --out 'out/my data'" in told
        assert f"{len(texts)} documents, 0 duplicates dropped, 1 without text skipped" in told
        to_train, val = (texts_of("my data", split) for split in SPLITS)
        assert to_train == [t for t in texts if t not in val] and min(len(to_train), len(val)) > 0
        assert val == [t for t in texts if t not in to_train]
        meta = json.loads(Path("my data/meta.json").read_text())
        assert meta["bytes_per_token"] == sum(len(t.encode()) for t in val) / meta["tokens"]["val"]
        return set(val)
    first = split(texts)
    assert 5 <= len(first) <= 40 and split(texts[::-1]) == first != split(texts, 1)
    assert split(texts[:300]) == first & set(texts[:300])
    few = [len(split(texts[:20], seed)) for seed in range(12)]
    assert min(few) == 1 and max(few) < 20


def test_few_documents_each_give_their_last_5_percent_in_llm_cs_shards(tmp_path, monkeypatch,
                                                                       run_data):
    """With fewer than 20 documents each is cut at a character, at most 5% from its end. Duplicates
    and blank documents are dropped and counted, line ends stay, and a shard has llm.c's header and
    --shard-tokens tokens."""
    set_block(monkeypatch, 70)
    texts = ["é" * 101, "abcdefghij" * 200, "漢字" * 40 + "x", "one text\n", "one text\r\n"]
    for number, text in enumerate([*texts, texts[1], texts[3], " \n", "\n"]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    status, told, _ = run_data("--input", tmp_path, "--tokenizer", "bytes", "--out",
                               tmp_path / "out", "--shard-tokens", 1024)
    assert status == 0 and told.startswith("5 documents, 2 duplicates dropped, 2 without text skip"
                                           "ped; 2,342 tokens to train on, 130 to validate on.\n")
    assert texts_of(tmp_path / "out", *SPLITS) == texts
    tails = [len(tail.encode()) for tail in texts_of(tmp_path / "out", "val")]
    assert tails == [10, 100, 13, 1, 1]
    for name, count in [("train_000000", 1024), ("train_000001", 1024), ("train_000002", 294),
                        ("val_000000", 130)]:
        raw = (tmp_path / "out" / f"{name}.bin").read_bytes()
        assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, count] + [0] * 253
        assert len(raw) == 1024 + 2 * count


def test_the_plain_form_makes_the_shards_of_data_py(tmp_path):
    """Of 200 texts, of which every tenth is given twice, by two seeds."""
    texts = [f"{i} " + "".join(random.Random(i).sample(NASTY, 9)) for i in range(200)]
    texts += texts[::10]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    for seed in (0, 5):
        plain, made = tmp_path / f"plain_{seed}", tmp_path / f"made_{seed}"
        plain.mkdir()
        data.plain_prepare(texts, get_tokenizer("bytes"), plain, seed)
        prepare([tmp_path / "a.jsonl"], made, "bytes", seed)
        for split in SPLITS:
            name = f"{split}_000000.bin"
            assert (plain / name).read_bytes() == (made / name).read_bytes()


def test_windows_share_one_token_and_stay_in_their_shard(tmp_path):
    """The shards are those that have the split as a word of their names. Without meta.json the
    names, sizes and samples of the files tell one source from another."""
    made = dataset(tmp_path, {"TinyStories-train": range(13), "retrieval_train_1": range(99, 102),
                              "train_2": range(100, 112), "constrained_val_0": range(9)})
    assert (made.n_tokens, made.n_windows) == (28, 5)
    assert made.tokens_of(np.array([2, 0, 4, 3])).tolist() == [
        [8, 9, 10, 11, 12], [0, 1, 2, 3, 4], [104, 105, 106, 107, 108], [100, 101, 102, 103, 104]]
    assert made.tokens_of([1]).dtype == np.int64
    assert data.TokenDataset(tmp_path, "val", 4).n_tokens == 9
    keys = []
    for size in (9, 9, 8):
        dataset(tmp_path, {"train_2": range(size)})
        (tmp_path / "meta.json").unlink()
        keys.append(data.TokenDataset(tmp_path, "train", 4).sources.keys())
    assert keys[0] == keys[1] != keys[2]


def mixture(n_windows, phases):
    """A TokenDataset without tokens; phases are [first sequence, {source: weight}] each."""
    made = data.TokenDataset.__new__(data.TokenDataset)
    made.sources = {}
    made.phases = phases
    first = 0
    for name, n in n_windows.items():
        windows = SimpleNamespace(count=n)
        made.sources[name] = data.Source(name, phases[-1][1][name], first, windows, {})
        first += n
    return made


@pytest.mark.parametrize("n", [*range(1, 40), 255, 256, 257, 1000, 4097, 10 ** 6])
def test_an_epoch_is_a_permutation_drawn_from_seed_and_epoch(n):
    """An epoch reads each of n windows once. The order of another epoch, or of another seed, shares
    no more positions than chance predicts, and neighbors in the order are uncorrelated, to four
    standard deviations. A later version must read the same data: the windows of sequences 995 to
    1004 are recorded."""
    made, in_order = mixture({"d": n}, [[0, {"d": 1}]]), np.arange(n)
    one, two = made.window_ids(7, 0, 2 * n).reshape(2, n)
    assert np.array_equal(np.sort(one), in_order) and np.array_equal(np.sort(two), in_order)
    if n == 1000:
        assert made.window_ids(1337, 995, 10).tolist() == [
            483, 950, 50, 473, 32, 918, 294, 124, 291, 217]
    if n > 250:
        for other in (two, made.window_ids(8, 0, n), in_order):
            assert (other == one).mean() < 10 / n + 1e-3
        for other in (in_order, np.roll(one, 1)):
            assert abs(np.corrcoef(one, other)[0, 1]) < 4 / n ** 0.5


@pytest.mark.claim("A mixture of data sets is exact in proportion and reads each source without "
                   "replacement.")
@pytest.mark.parametrize("n_windows, phases", [
    (dict(d=5), [[0, dict(d=1)]]), (dict(a=50, b=300), [[0, dict(a=7, b=3)]]),
    (dict(a=1, b=2000), [[0, dict(a=1, b=999)]]), (dict(a=9, b=9), [[0, dict(a=0, b=1)]]),
    (dict(a=40, b=70, c=11, d=400, e=30, f=90), [[0, dict(a=5, b=1, c=3, d=20, e=0, f=5)]]),
    # With other weights each source goes on where it was; d is a new one.
    (dict(a=50, b=300, c=70, d=9), [[0, dict(a=7, b=3, c=0)], [100, dict(a=1, b=1, c=2, d=4)]])])
def test_a_mixture_is_exact_in_proportion_and_reads_each_source_without_replacement(n_windows,
                                                                                    phases):
    """After any number of sequences of a phase, each source has given its share of them, to less
    than one sequence a source. It gives its windows in the same order as it would alone, and the
    window of a sequence does not depend on which sequences are asked for with it."""
    n = 2000
    made = mixture(n_windows, phases)
    windows = made.window_ids(7, 0, n)
    for first, count in [(0, 1), (17, 16), (90, 99), (n - 3, 3), (5, 0)]:
        assert np.array_equal(made.window_ids(7, first, count), windows[first:first + count])
    ends = [*(first for first, _ in phases[1:]), n]
    for name, source in made.sources.items():
        its = (source.first <= windows) & (windows < source.first + source.n_windows)
        alone = mixture({name: source.n_windows}, [[0, {name: 1}]]).window_ids(7, 0, its.sum())
        assert np.array_equal(windows[its] - source.first, alone)
        assert made.epochs(n)[name] == its.sum() / source.n_windows
        for (first, weights), end in zip(phases, ends):
            share = weights.get(name, 0) / sum(weights.values())
            off = np.cumsum(its[first:end]) - np.arange(1, end - first + 1) * share
            assert abs(off).max() < len(weights)


def test_new_weights_replace_the_phases_of_later_files():
    """A run that goes back to sequence 60 forgets the phase that it began at 100."""
    made = mixture(dict(a=50, b=300), [[0, dict(a=1, b=2)]])
    made.go_on([[0, dict(a=7, b=3)], [100, dict(a=1, b=1)]], 60)
    assert made.phases == [[0, dict(a=7, b=3)], [60, dict(a=1, b=2)]]


@pytest.mark.parametrize("batch_size, ramp, steps", [
    (16, None, 60), (16, "4:4:100", 60), (24, "8:2:77", 60), (9, "1:1:7", 60), (16, "16:3:50", 60),
    (8, "1:7:1", 60), (64, "1:1:5000", 460), (1536, "16:16:585937", 2400)])
def test_the_batch_grows_as_in_megatron(batch_size, ramp, steps):
    """At each step, also past the end of the ramp, batches begin where Megatron-LM's do and have
    their size; so do batches that begin at other samples, as after a rollback."""
    config = Config(batch_size=batch_size, batch_ramp=ramp)
    starts = [first for first, _ in batches_from(config, 0, steps + 1)]
    assert starts[-1] - starts[-2] == batch_size
    for at in (0, 1, 2, 5, 30, steps // 2, steps):
        assert sequences_after(config, 0, at) == starts[at]
    for consumed in range(0, starts[-1], 1 + starts[-1] // 5000):
        assert batch_size_at(config, consumed) == megatrons_batch_size(config, consumed)


def test_the_steps_of_a_long_run_are_counted_without_a_loop():
    """The end of a run and the steps of its epochs are those of a loop over all steps, for 300
    random ramps; and those of 10^9 steps come at once."""
    rng = random.Random(0)
    for _ in range(300):
        start, increment = rng.randint(1, 9), rng.randint(1, 9)
        batch_size = start + increment * rng.randint(0, 12)
        ramp = rng.choice([None, f"{start}:{increment}:{rng.randint(1, 600)}"])
        config = Config(batch_size=batch_size, batch_ramp=ramp, epochs=rng.randint(1, 3))
        n_windows, steps = rng.randint(1, 500), rng.randint(0, 150)
        begin = rng.randint(0, 700)
        position = begin
        for _ in range(steps):
            position += batch_size_at(config, position)
        assert sequences_after(config, begin, steps) == position
        state = dict(step=5, tokens=begin * 4, model=dict(seq_len=4))
        made = mixture(dict(a=n_windows, b=7), [[0, dict(a=1, b=0)]])
        position, step = begin, 5
        while position < config.epochs * n_windows:
            position += batch_size_at(config, position)
            step += 1
        assert steps_of_epochs(config, made, state) == step
    config = Config(batch_size=512, batch_ramp="16:16:1000000")
    assert sequences_after(config, 0, 10 ** 9) == 511_996_842_048       # a loop would take minutes


# ---- Mechanisms

def test_the_pieces_of_a_text_encode_to_the_tokens_of_the_whole(monkeypatch):
    """Mechanism of the bounded memory: the pieces of 300 texts have the words of the whole, by
    GPT-2's own pattern, and BPE merges nothing across words; cut anywhere, a third of these texts
    would have others. A text without white space is cut at BLOCK."""
    import regex
    from tiktoken_ext.openai_public import r50k_pat_str

    def words(parts):
        return [word for part in parts for word in regex.findall(r50k_pat_str, part)]

    def cut(blocks):
        splits, (begin, *pieces) = zip(*encode.split_document(blocks, 10 ** 6))
        assert set(splits) == {"train"} and begin == ""
        return pieces

    rng = random.Random(0)
    cut_anywhere = 0
    for size in rng.choices(range(100, 200), k=300):
        text = "".join(rng.choices(NASTY, k=rng.randrange(1, 200)))
        set_block(monkeypatch, size)
        pieces = cut(text[i:i + 7] for i in range(0, len(text), 7))
        assert "".join(pieces) == text and max(map(len, pieces)) <= size
        assert words(pieces) == words([text])
        cut_anywhere += words(text[i:i + size] for i in range(0, len(text), size)) != words(pieces)
    assert cut_anywhere > 100
    assert cut(["x" * 500]) == ["x" * size] * (500 // size) + ["x" * (500 % size)]


def test_memory_does_not_grow_with_the_size_of_a_document(tmp_path, monkeypatch):
    """Mechanism of the bounded memory: ten times the text takes at most 100 kB more."""
    set_block(monkeypatch, 4096)
    monkeypatch.setattr(index.os, "cpu_count", lambda: 2)
    peaks = []
    for size in (100_000, 1_000_000):
        (tmp_path / "a.txt").write_text("All work and no play. " * (size // 22))
        tracemalloc.start()
        prepare([tmp_path / "a.txt"], tmp_path / f"{size}", "bytes")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, peaks


def test_a_mixture_of_a_long_run_is_exact_too_and_takes_no_memory():
    """Mechanism of the exact proportions: they are computed in whole numbers, so they hold after
    8 * 10^9 sequences of 10^9 windows, and take less than 100 kB."""
    n, total = 8 * 10 ** 9, 10 ** 9
    made = mixture(dict(a=10 ** 9, b=10), [[0, dict(a=total - 1, b=1)]])
    made.window_ids(1337, 0, 1)         # the first call imports a module
    tracemalloc.start()
    counts, windows = made.counts(np.array([n, n + 1])), made.window_ids(1337, n, 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expected = [(n + i) * (total - 1) // total for i in (0, 1)]
    assert [counts["a"].tolist(), counts["b"].tolist()] == [
        expected, [n + i - expected[i] for i in (0, 1)]]
    assert peak < 10 ** 5 and len(set(windows.tolist())) == 256 and windows.max() < 10 ** 9 + 10


# ---------------------------------------------------------------------------------------------
# amp.py
# ---------------------------------------------------------------------------------------------

def test_plain_scaled_step_equals_that_of_torchs_scaler():
    """Dynamic loss scaling in its plainest form and torch.amp.GradScaler make the same 30 steps, to
    the bit: the same weights and scales. In fp32, as GradScaler wants it: a gradient of 2^113
    overflows until the scale is 2^14."""
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    plain, torchs = (torch.optim.SGD([weight], lr=2.0 ** -113) for weight in weights)
    scale = 2.0 ** 16
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    for step in range(30):
        losses = [(weight * 2.0 ** (111 + step % 3)).sum() for weight in weights]
        scale = amp.plain_scaled_step(losses[0], plain, scale)
        torchs.zero_grad()
        theirs.scale(losses[1]).backward()
        theirs.step(torchs)
        theirs.update()
        assert scale == theirs.get_scale() and weights[0].equal(weights[1])
    assert scale == 2.0 ** 14 and weights[0][0] < -8


@pytest.mark.claim("The loss scale moves as that of PyTorch's `GradScaler`.")
@pytest.mark.parametrize("init_scale, growth_factor, backoff_factor, growth_interval, share", [
    (2.0 ** 16, 2.0, 0.5, 5, 0.1),
    (1.7, 1.01, 0.95, 3, 0.02),
    (0.3, 1e12, 0.3, 1, 0.02)])         # up to where fp32 ends
def test_the_scale_moves_as_in_torch(init_scale, growth_factor, backoff_factor, growth_interval,
                                     share):
    """For 300 steps, a `share` of which overflow, the scale equals torch.amp.GradScaler's to the
    bit, although after each step another LossScaler goes on from the state."""
    numbers = dict(init_scale=init_scale, growth_factor=growth_factor,
                   backoff_factor=backoff_factor, growth_interval=growth_interval)
    draw = random.Random(0)
    overflows = [draw.random() < share for _ in range(300)]
    ours, scales = amp.LossScaler(**numbers, min_scale=0.0), []
    for overflow in overflows:
        scales.append(ours.scale)
        state = json.dumps(ours.state_dict())
        ours = amp.LossScaler()
        ours.load_state_dict(json.loads(state))
        ours.update(overflow)
    assert scales == scales_by_torch(overflows, **numbers) and min(scales) > 1e-37


def scales_by_torch(overflows, **numbers):
    """The loss scale of torch.amp.GradScaler in each of these steps, which overflow or do not."""
    scaler = torch.amp.GradScaler("cpu", **numbers)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in overflows:
        scaler.scale(torch.ones(()))            # (creates the scale)
        scales.append(scaler.get_scale())
        weight.grad = torch.full((2,), math.inf if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
    return scales


def test_fp16s_scaler_begins_and_moves_by_torchs_numbers():
    ours, theirs = amp.make_scaler("fp16"), torch.amp.GradScaler("cpu")
    assert ours.scale == theirs.get_scale() == 2.0 ** 16
    assert ours.growth_factor == theirs.get_growth_factor()
    assert ours.backoff_factor == theirs.get_backoff_factor()
    assert ours.growth_interval == theirs.get_growth_interval()


def test_the_scale_stays_at_its_floor_and_grows_from_there():
    """min_scale, which GradScaler lacks: a halving that would pass it ends there, also after the
    state has been stored and loaded."""
    scaler = amp.LossScaler(init_scale=5.0, growth_interval=2, min_scale=2.0)

    def scales(*overflows):
        found = []
        for found_inf in overflows:
            scaler.update(found_inf)
            found.append(scaler.scale)
        return found
    assert scales(True, True, True, False, False) == [2.5, 2.0, 2.0, 2.0, 4.0]
    state = scaler.state_dict()
    scaler = amp.LossScaler()
    scaler.load_state_dict(state)
    assert scales(True, True, False, False) == [2.0, 2.0, 2.0, 4.0]


def start_with_a_high_scale(run):
    run.scaler = amp.LossScaler(2.0 ** 22, growth_interval=4)


@pytest.mark.claim("An fp16 run finds its loss scale and trains as fp64 does.")
def test_an_fp16_run_finds_its_loss_scale_and_trains_as_fp64(pool, tmp_path):
    """On two stages the gradients overflow by themselves under a scale of 2^22. The run skips these
    steps, its scale moves as GradScaler's, and it grows until the next overflow. The losses are
    those of an fp64 run that skips the same steps, to 1% of what it learns, and the norms of the
    gradients to 1%."""
    flags = dict(steps=20, rollback="off", layout=(1, 1, 2))
    half, *_ = trained(pool, out=tmp_path / "fp16", prepare=start_with_a_high_scale, dtype="fp16",
                       **flags)
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


def test_an_fp16_update_equals_torchs_unscaling_clipping_and_adamw(tmp_path):
    """The gradients of three steps under a loss scale of 2^12 are handed, still scaled, to
    GradScaler.unscale_, clip_grad_norm_ and AdamW of an fp32 model. Norms, masters and moments
    equal theirs, to 1e-6; the parameters are the masters, rounded to fp16."""
    cfg = replace(CFG, n_layer=1)
    config = settings(tmp_path, dtype="fp16", steps=3, clip=0.5, lr=1e-2)
    scaled = []                     # of each step, {parameter: gradient}

    def prepare(run):
        run.scaler.scale = 2.0 ** 12
        after_backward(run, lambda step: scaled.append(everything(run, "grad")))

    def everything(run, name):
        return {spec.name: bucket.view(getattr(bucket, name), spec).clone()
                for bucket in run.flat.buckets for spec in bucket.specs}
    rows, parameters, state = run_steps(0, 1, (1, 1, 1), config, cfg,
                                        lambda run: everything(run, "data"), prepare=prepare)
    plain = GPT(cfg).initialize(config.seed)
    optimizer = torch.optim.AdamW([
        dict(params=[p for p in plain.parameters() if p.dim() > 1],
             weight_decay=config.weight_decay),
        dict(params=[p for p in plain.parameters() if p.dim() == 1], weight_decay=0.0)],
        betas=(config.beta1, config.beta2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    for row, gradients in zip(rows, scaled):
        scaler.scale(torch.ones(()))                        # (creates its scale)
        for name, p in plain.named_parameters():
            p.grad = gradients[name]
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-6) and norm > config.clip
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        scaler.step(optimizer)
        scaler.update()
    for name, p in plain.named_parameters():
        for kind, theirs in dict(master=p.detach(), **optimizer.state[p]).items():
            if kind != "step":
                ours = state[kind][name]
                assert relative(ours, theirs[:len(ours)]) <= 1e-6, (name, kind)
        master = state["master"][name]
        assert parameters[-1][name][:len(master)].equal(master.half()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_update_below_the_last_bit_of_a_parameter_accumulates_in_the_master(dtype):
    """Eight updates of an eighth of the last bit of 1 move a parameter to the next number of its
    type; torch's AdamW, on parameters of that type alone, leaves it at 1."""
    last_bit = torch.finfo(dtype).eps
    _, flat = staged(replace(CFG, n_layer=1), Grid(1, 1, 1), dtype)
    flat.load("master", lambda name, shape: torch.ones(shape))
    theirs = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.AdamW([theirs], lr=last_bit / 8, weight_decay=0.0)
    bucket = flat.buckets[-1]
    spec = bucket.specs[0]
    seen = []
    for step in range(1, 9):
        for each in flat.buckets:
            each.grad.fill_(-1)             # AdamW adds the learning rate
        flat.adamw_step(1.0, step, lr=last_bit / 8, beta1=0.9, beta2=0.999, weight_decay=0.0)
        theirs.grad = torch.full_like(theirs, -1)
        optimizer.step()
        seen.append(bucket.view(bucket.data, spec).unique().tolist())
    assert seen[:3] == 3 * [[1.0]] and seen[-1] == [1 + last_bit]
    assert theirs.tolist() == 4 * [1.0]


def test_16_bit_gradients_of_a_matrix_add_up_in_fp32():
    """300 gradients of 1 in bf16 are 300; autograd's own sum ends at 256, because 257 rounds to
    256. (For the token matrix: test_the_token_matrix_adds_its_gradient_to_main_grad.)"""
    local, _ = staged(replace(CFG, n_layer=1), Grid(1, 1, 1), torch.bfloat16)
    matrix = local.blocks["0"].mlp.up.weight
    plain = nn.Parameter(matrix.detach().clone())
    for _ in range(300):
        matrix.sum().backward()
        plain.sum().backward()
    assert matrix.main_grad().unique().tolist() == [300] and plain.grad.unique().tolist() == [256]


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.0025), (torch.float16, 0.0004)])
def test_16_bit_gradients_of_layer_norms_and_embeddings_add_up_in_fp32(dtype, bound):
    """With 4,096 tokens in a microbatch the gradients of the LayerNorms of a training model, and of
    a token that occurs 4,096 times in a plain one, are those of fp64 for the same input and
    upstream gradient, to one rounding. PyTorch's own kernels are ten times as far off, or more."""
    cfg = GPTConfig(n_layer=1)
    local, flat = staged(cfg, Grid(1, 1, 1), dtype)
    norms = {name: module for name, module in local.named_modules()
             if isinstance(module, nn.LayerNorm)}
    seen = {}

    def watch(name, x, y):
        seen[name] = [x.detach()]
        y.register_hook(lambda dy: seen[name].append(dy))
    for name, norm in norms.items():
        norm.register_forward_hook(lambda _, x, y, name=name: watch(name, x[0], y))
    tokens, targets = tokens_of(cfg, 32), tokens_of(cfg, 32, seed=1)
    local.head.set_loss_factor(2.0 ** -8)
    (local(tokens, targets) * 2.0 ** -8).backward()
    pairs, torchs = {}, {}
    for name, norm in norms.items():
        x, dy = seen[name]
        wide, theirs = (nn.LayerNorm(cfg.n_embd, dtype=d) for d in (torch.float64, dtype))
        wide(x.double()).backward(dy.double())
        theirs(x).backward(dy)
        for kind in ("weight", "bias"):
            expected = wide.get_parameter(kind).grad
            pairs[f"{name}.{kind}"] = norm.get_parameter(kind).main_grad(), expected
            torchs[f"{name}.{kind}"] = relative(theirs.get_parameter(kind).grad, expected)
    assert len(pairs) == 6 and max(torchs.values()) > 10 * bound
    assert_close(pairs, bound)

    embed = model.Embed(cfg).to(dtype)
    cpu_kernels.use_kernels(embed)
    nn.init.zeros_(embed.token.weight)
    theirs = nn.Embedding.from_pretrained(embed.token.weight.detach(), freeze=False)
    dy = random_tensor(32, 128, cfg.n_embd, seed=2).add(0.1).to(dtype)
    same = torch.zeros(32, 128, dtype=torch.long)
    embed.token(same).backward(dy)
    theirs(same).backward(dy)
    expected = dy.double().sum((0, 1))
    assert relative(embed.token.weight.grad[0], expected) < bound
    assert relative(theirs.weight.grad[0], expected) > 10 * bound


@on_ranks
def test_a_16_bit_sum_of_slices_on_cpus_is_rounded_once(rank, world=8):
    """Eight ranks reduce-scatter numbers in bf16 (sequence parallelism's activations, dK and dV of
    context parallelism): the sum is that of fp64 rounded once. Added up in bf16 it is twice as far
    from it."""
    terms = [random_tensor(world * 1000, seed=seed).bfloat16() for seed in range(world)]
    expected = sum(term.double() for term in terms).chunk(world)[rank]
    one_by_one = sum(term.chunk(world)[rank] for term in terms)
    with gridded(rank, world, tp=world, pp=1) as grid:
        total = collectives.reduce_scatter(terms[rank], grid.groups["tp"]).wait()
    assert relative(one_by_one, expected) > 2 * relative(expected.bfloat16(), expected)
    assert relative(total, expected) < 1.05 * relative(expected.bfloat16(), expected)


def test_without_a_loss_scale_small_gradients_vanish_in_fp16(tmp_path):
    """Unscaled, most fp16 gradients of a large batch are all zero and the loss stalls, 0.15 nats
    above fp64's; with make_scaler's scale the gradients are those of fp64 to 5%, the losses to
    0.05. A batch of GPT-3 has 4M tokens (table 2.1), ours 128: a loss scale of 2^-15 makes the
    gradients of a microbatch, which are those of a mean over the batch, as small."""
    def train_with(dtype, init_scale):
        def prepare(run):
            run.scaler = amp.LossScaler(init_scale, min_scale=0.0)
        config = settings(tmp_path, dtype=dtype, lr=4e-3, clip=0.0)
        steps, gradients, _ = run_steps(0, 1, (1, 1, 1), config, replace(CFG, n_layer=2),
                                        whole_gradient, prepare=prepare)
        return np.array(column(steps, "loss")), gradients[0]
    exact, expected = train_with("fp64", 1.0)
    stalled, vanished = train_with("fp16", 2.0 ** -15)
    scaled, gradient = train_with("fp16", 2.0 ** -15 * amp.make_scaler("fp16").scale)
    assert sum(not tensor.any() for tensor in vanished.values()) > len(vanished) / 2
    assert relative(gradient, expected) < 0.05
    assert abs(scaled - exact).max() < 0.05
    assert stalled[-1] - exact[-1] > 0.15


def spoil_in_turn(run):
    """At step k rank k - 1 alone finds a gradient that is not finite, after the reductions: only
    the agreement can tell the others. Without ZeRO it is a LayerNorm's: in the global norm this
    counts on one tensor-parallel rank alone. At step 9 the loss of rank 6 is infinite."""
    step_stats = run.step_stats

    def spoil(loss, *args):
        bucket = run.flat.buckets[-1]
        assert bucket.specs[0].partition_dim is None
        if run.grid.rank == run.step - 1:
            bucket.shard["grad"][0] = math.inf if run.step < 5 else math.nan
        if (run.step, run.grid.rank) == (9, 6):
            loss += math.inf
        return step_stats(loss, *args)
    run.step_stats = spoil


HALVED = [65536, 32768, 16384, 8192, 4096, 2048, 1024, 512, 256]


@pytest.mark.claim("An overflow on any rank skips the step on all ranks.")
@pytest.mark.parametrize("dtype, zero, scales", [
    ("fp16", 2, HALVED), ("fp32", 0, [1] * 9)])
def test_an_overflow_on_any_rank_skips_the_step_on_all(pool, tmp_path, dtype, zero, scales):
    """Each of eight ranks overflows once, by an inf or a NaN, and a loss is infinite. All ranks
    skip all nine steps and halve the scale; the learning rate goes on, and the state stays that of
    step 0, to the bit."""
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


# ---- Mechanisms

def test_the_gradient_norm_is_exact_over_many_elements():
    """The sum behind grad_norm, of 25M fp32 gradients, is their sum of squares in fp64, to 1e-10;
    one fp32 sum over 10M is off by 7e-4. Clipping and the monitor rely on it."""
    cfg = GPTConfig(vocab_size=50257, seq_len=16, n_layer=1, n_head=1, n_embd=384)
    _, flat = staged(cfg, Grid(1, 1, 1))
    generator = torch.Generator().manual_seed(0)
    expected = 0.0
    for bucket in flat.buckets:
        for spec in bucket.specs:
            gradient = bucket.view(bucket.grad, spec).normal_(0, 3, generator=generator)
            expected += gradient.double().square().sum().item()
    squares = {name: x.item() for name, x in flat.grad_norm_squares().items()}
    assert squares == pytest.approx(dict(squares=expected, all_squares=expected), rel=1e-10)


# ---------------------------------------------------------------------------------------------
# parallelism/pipeline.py and schedules.py: stages, schedules, what a stage keeps
# ---------------------------------------------------------------------------------------------

def test_stages_share_the_layers_in_order_and_evenly():
    """Stages differ by one layer at most; the first has the most, the last, with the head, the
    fewest."""
    for n_layer in range(1, 20):
        for pp in range(1, n_layer + 1):
            stages = [list(pipeline.stage_layers(n_layer, pp, s)) for s in range(pp)]
            sizes = [len(layers) for layers in stages]
            assert sum(stages, []) == list(range(n_layer)) and min(sizes) > 0
            assert sizes[0] == max(sizes) <= min(sizes) + 1 and sizes[-1] == min(sizes)


@pytest.mark.claim("Every schedule has the bubble and the live microbatches of its paper's "
                   "formulas.")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_schedules_have_the_papers_bubble_and_live_microbatches(name):
    """GPipe and 1F1B idle for (p - 1) / (m + p - 1) of the time, v chunks for (p - 1) / (v m + p -
    1); stage s keeps m microbatches under GPipe, min(m, p - s) under 1F1B (Narayanan et al. 2021,
    section 2.2), the first of v chunks p (1 + (p - 1) / (p v)), if there are so many (Korthikanti
    et al. 2022, section 4.2.3). ZB-H1, whose F, B and W take one unit each, idles for a third of
    1F1B's time, p - 1 of 3 m + p - 1 units if m is at least p, and keeps p microbatches on each
    stage (Qi et al. 2024, section 2.1). No op is missing or repeated. Not in the papers, but our
    own: ZB-H1's time for fewer microbatches, and 2 / v less on each stage after the first of v
    chunks."""
    for p, m, v in itertools.product(range(1, 9), (*range(1, 17), 32), (1, 2, 3, 4)):
        if (v > 1) != (name == "interleaved") or v > 1 and (p == 1 or m % p):
            continue
        schedules = [SCHEDULES[name](s, p, m, v) for s in range(p)]
        if name == "zb-h1":
            ops = "FBW"
            idle = 1 - 3 * m / max(3 * m + p - 1, 2 * m + 2 * p - 1)
        else:
            ops = "FB"
            idle = (p - 1) / (v * m + p - 1)
        assert bubble(clock(schedules)) == pytest.approx(idle)
        for s, schedule in enumerate(schedules):
            live = {"gpipe": m, "1f1b": p - s, "zb-h1": p,
                    "interleaved": p * (1 + (p - 1) / (p * v)) - 2 * s / v}
            assert live_activations(schedule) == pytest.approx(v * min(m, live[name]))
            assert sorted(schedule) == sorted(itertools.product(ops, range(m), range(v)))


def ops_of_a_step(rank, world, config, cfg):
    """What the first step of a run carries out on this stage, in order: the kinds "F", "B", "W" by
    what its layers do, as one text, and the ops (kind, microbatch, chunk)."""
    kinds_of_ops, ops, seen = [], [], []

    def note(op, function):
        def noted(*args, **kwargs):
            kinds_of_ops.append(op)
            return function(*args, **kwargs)
        return noted

    def run_op(functions, op, x):
        ops.append(op)
        return pipeline_run_op(functions, op, x)

    def prepare(run):
        for block in run.model.blocks.values():
            block.mlp.register_forward_pre_hook(lambda *_: kinds_of_ops.append("F"))
        run.flat.prepare_grad_sync = note("B", run.flat.prepare_grad_sync)
        after_backward(run, lambda step: seen.append(("".join(kinds_of_ops), list(ops))))
        without_saves(run)
    pipeline_run_op = pipeline.run_op
    with mock.patch.multiple(pipeline, matmul=note("W", pipeline.matmul), run_op=run_op):
        run_steps(rank, world, (1, 1, world), config, cfg, prepare=prepare)
    kinds_of_blocks, ops = seen[0]
    return kinds_of_blocks.replace("WWWW", "W"), ops        # a block has four products


@pytest.mark.parametrize("schedule, chunks", [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_a_run_executes_the_schedule_of_its_flags(pool, tmp_path, schedule, chunks):
    """On two stages, with four microbatches and chunks of one block."""
    config = settings(tmp_path, steps=1, pp=2, pp_schedule=schedule, pp_chunks=chunks)
    found = pool.run(2, ops_of_a_step, config, replace(CFG, n_layer=2 * chunks))
    for stage, (kinds_of_blocks, ops) in enumerate(found):
        assert ops == SCHEDULES[schedule](stage, 2, 4, chunks)
        assert kinds_of_blocks == "".join(kind for kind, *_ in ops)


def test_a_run_recomputes_each_block_in_backward_with_the_flag(pool, tmp_path):
    """Each backward begins by running its block's forward again."""
    config = settings(tmp_path, steps=1, pp=2, recompute=True)
    for kinds_of_blocks, _ in pool.run(2, ops_of_a_step, config, replace(CFG, n_layer=2)):
        assert kinds_of_blocks == "FFFFBFBFBFBF"


@pytest.mark.parametrize("schedule, expected", [
    (gpipe(0, 1, 8), 8), (make_schedule("gpipe", Grid(1, 1, 1), 8), 1)])
def test_backward_frees_what_its_microbatch_holds(schedule, expected):
    """Of eight microbatches GPipe holds all graphs at once; without a pipeline there is one."""
    local, flat = staged(CFG, Grid(1, 1, 1))
    losses, live = [], []

    def count(module, args, loss):
        losses.append(weakref.ref(loss))
        live.append(sum(loss() is not None for loss in losses))
    local.register_forward_hook(count)
    run_schedule(schedule, local, flat.grid,
                 [(x, x, 0, None) for x in tokens_of(CFG, 8).split(1)], torch.empty(0), flat)
    assert max(live) == expected and len(live) == 8


# ---------------------------------------------------------------------------------------------
# parallelism/tensor.py: layers and loss
# ---------------------------------------------------------------------------------------------

@on_ranks
def test_tensor_parallel_modules_without_flat_parameters_give_the_plain_gradients(rank, world=2):
    """Without FlatParameters they give autograd the plain model's gradients of a scaled loss, on
    two ranks, to 1e-10 in fp64. With them a scaled loss is refused: a part of the gradients is in
    main_grad already."""
    cfg = replace(CFG, n_layer=2)
    tokens, targets = tokens_of(cfg, 2), tokens_of(cfg, 2, seed=1)
    plain = random_gpt(cfg)
    with gridded(rank, world, tp=world, pp=1) as grid, tiles_of(7, world):
        ours = build_stage(cfg, grid)
        specs = param_specs(ours, cfg, grid)
        for spec in specs:
            full = plain.get_parameter(spec.name).detach()[:spec.shape[0]]
            own_part = nn.Parameter(spec.cut(full, rank).clone())
            for module, attribute in spec.owners:
                setattr(module, attribute, own_part)
        ours.head.set_loss_factor(3.0)             # by which the gradients are divided again
        losses = [gpt(tokens, targets) / targets.numel() for gpt in (ours, plain)]
        sum(losses).backward()
    pairs = dict(loss=losses)
    for spec in specs:
        full = plain.get_parameter(spec.name).grad[:spec.shape[0]]
        pairs[spec.name] = ours.get_parameter(spec.name).grad, spec.cut(full, rank)
    assert_close(pairs, 1e-10)
    local, _ = staged(replace(CFG, n_layer=1), Grid(1, 1, 1))
    with pytest.raises(RuntimeError, match="multiply the loss by head.loss_factor"):
        (local(tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)) / 2).backward()


def test_memory_of_the_loss_does_not_grow_with_the_number_of_positions(monkeypatch):
    """384 more positions of 16 channels take less than eight fp32 tensors of their shape (x after
    LayerNorm, its gradient, the targets ...); their logits would take 512 times one of these."""
    monkeypatch.setitem(MAX_LOGITS, "cpu", 2 ** 17)
    peaks = []
    for positions in (128, 512):
        cfg = GPTConfig(vocab_size=8192, seq_len=positions, n_layer=1, n_head=1, n_embd=16)
        local, _ = staged(cfg, Grid(1, 1, 1))
        x = torch.randn(1, positions, 16, requires_grad=True)
        with Alive() as alive:
            local.head(x, tokens_of(cfg, 1)).backward()
        peaks.append(alive.peak)
    few, many = peaks
    tile_of_logits = 4 * 2 ** 17
    assert few > tile_of_logits
    assert many - few < 8 * (4 * 384 * 16)


class Passes(TorchDispatchMode):
    """`calls`: the names of the operations in the block. `names`: those that read or write all of a
    matrix of this shape."""

    def __init__(self, *shape):
        super().__init__()
        self.shape, self.names, self.calls = shape, [], []

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        few = "gather", "scatter_", "alias", "detach", "view", "slice"
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
        name = function.name().removeprefix("aten::").split(".")[0]
        self.calls.append(name)
        if any(x.shape == self.shape for x in tensors) and name not in few:
            self.names.append(name)
        return out


@pytest.mark.parametrize("dtype, given", [
    (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])    # False: on a GPU
def test_the_loss_of_a_tile_passes_over_its_logits_few_times(dtype, given):
    """Loss and gradient of 7 positions are those of F.cross_entropy in fp64, to the type's eps.
    Two operations reduce the logits; at most five more read or write all of them, of which two copy
    a tensor to itself in fp32, which does nothing."""
    logits, width = random_tensor(7, 384, seed=1).to(dtype), 300
    targets = torch.tensor([0, 1, 299, IGNORE_INDEX, 128, 5, 5])
    exact = logits[:, :width].double().requires_grad_()
    expected_loss = F.cross_entropy(exact, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    (expected_loss / 4).backward()
    p = None
    if given:
        p = logits.to(torch.float32)                    # in fp32 the logits themselves
    with Passes(7, 384) as passes:
        loss, columns, at_columns = tile_loss(logits, p, targets, torch.tensor(0.25), width,
                                              Grid(1, 1, 1))
    logits.scatter_(1, columns, at_columns.to(dtype))
    assert {"amax", "sum"} < set(passes.names) and len(passes.names) <= 7
    assert relative(loss, expected_loss.detach()) < 1e-6
    assert relative(logits, F.pad(exact.grad, (0, 84))) < torch.finfo(dtype).eps


def test_logits_are_computed_in_equal_tiles_of_at_most_MAX_LOGITS():
    """A GPU's 2^28 logits hold 5336 positions of GPT-2: four microbatches of 4096 positions are
    four tiles."""
    assert tile_size(4 * 4096, 50304, "cuda") == 4096


# ---- Mechanisms

@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_token_matrix_adds_its_gradient_to_main_grad(dtype, bound):
    """Mechanism (that 16-bit gradients add up in fp32): embedding and head add the token matrix's
    to main_grad, here in three parts; autograd gets none. The sum is that of fp64, to `bound`."""
    weight, total = nn.Parameter(torch.zeros(5000, 8, dtype=dtype)), torch.ones(5000, 8)
    weight.main_grad = lambda: total
    tokens, dx = torch.tensor([[7, 4999, 7, 0]]), random_tensor(1, 4, 8, seed=4)
    dy, x = random_tensor(9, 5000, seed=1), random_tensor(9, 8, seed=2)
    lookup = VocabParallelEmbedding(SimpleNamespace(weight=weight), Grid(1, 1, 1))
    for _ in range(2):
        lookup(tokens).backward(dx.to(dtype))
        add_product(total, dy.to(dtype), x.to(dtype))
    expected = 1 + 2 * (dy.t() @ x).index_add(0, tokens[0], dx[0])
    assert weight.grad is None
    assert relative(total.split(500), expected.split(500)) < bound


@pytest.mark.parametrize("sequence_parallel, expected", [
    (False, ["product", "start", "product", "wait"]),
    (True, ["start", "product", "start", "wait", "product", "wait"])])
@on_ranks
def test_dx_is_reduced_while_dw_is_computed(rank, world=2, *, sequence_parallel, expected):
    """Mechanism (that products hide tensor parallelism's communication): in the backward of a
    column-parallel matrix dx is summed during the product of dW; with sequence parallelism x is
    gathered again during that of dx."""
    events = []

    def product(*args, matmul=torch.matmul, **kwargs):
        events.append("product")
        return matmul(*args, **kwargs)
    with gridded(rank, world, tp=world, pp=1, sequence_parallel=sequence_parallel) as grid:
        layer = ColumnParallelLinear(nn.Linear(8, 12), grid)
        y = layer(torch.randn(2, 4 // world, 8, requires_grad=True))
        with traffic(lambda name, *_, **__: events.append(name)), \
                mock.patch.object(torch, "matmul", product):
            y.sum().backward()
    assert in_turn(events) == expected, events


class Copied(TorchDispatchMode):
    """How many numbers copies wrote in the block."""
    numbers = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if function.name() in ("aten::copy_", "aten::clone", "aten::cat"):
            self.numbers += out.numel()
        return out


@pytest.mark.claim("Sequence parallelism copies few activations.")
@pytest.mark.parametrize("sequences, attention", [(1, 0), (3, 1)])
@pytest.mark.parametrize("world", [2, 4])
@on_ranks
def test_sequence_parallelism_copies_little(rank, world, sequences, attention):
    """Mechanism (that it costs little beside its traffic): forward and backward of a block copy, in
    units of x (B, T, C), 1 / tp for each of six all-gathers; of several sequences attention also
    reorders q, k, v (3 / tp), its output, and the gradients of both."""
    plain = random_gpt(replace(CFG, n_layer=1))
    with gridded(rank, world, tp=world, pp=1, sequence_parallel=True) as grid:
        local, flat = stage_of(plain, grid)
        block = local.blocks["0"]
        flat.prepare_grad_sync(block, False)
        x, dy = (random_tensor(sequences, 16 // world, 32, seed=seed) for seed in (1, 2))
        with Copied() as copied:
            block(x.requires_grad_()).backward(dy)
    unit = sequences * 16 * 32
    assert copied.numbers / unit == 6 / world + attention * (2 * 3 / world + 2)


# ---------------------------------------------------------------------------------------------
# parallelism/: whole runs beside torch's own stack, and dropout
# ---------------------------------------------------------------------------------------------

@pytest.mark.claim("ZB-H1 computes what 1F1B does, bit for bit.")
@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 2), dict(dtype="bf16", micro_batch=1)), ((1, 2, 2), dict(sequence_parallel=True)),
    ((2, 1, 2), dict(zero=1, dtype="fp16", micro_batch=1)),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ((1, 1, 4), dict(dtype="fp64", micro_batch=1)), ((1, 1, 4), dict(micro_batch=4)),
        ((1, 2, 2), dict(dtype="bf16")), ((2, 2, 2), dict(dtype="fp64", sequence_parallel=True)),
        ((1, 1, 8), dict(dtype="bf16"))])])
def test_zb_h1_is_1f1b_bit_for_bit(pool, tmp_path, layout, flags):
    """Rows, gradients and final state, with dropout: in 16 bits, and where tp ranks gather x again
    for W. A sum of products in another order would show."""
    flags = dict(steps=2, dtype="fp32", micro_batch=2) | flags
    cfg = replace(CFG, n_layer=layout[2] + 1, dropout=0.1)
    ours, theirs = (trained(pool, layout, tmp_path, cfg, whole_gradient, prepare=without_saves,
                            pp_schedule=schedule, **flags) for schedule in ("zb-h1", "1f1b"))
    assert differences(ours, theirs) == (0, 0, 0) and relative(ours.state, theirs.state) == 0


def train_theirs(config, gpt, kind=torch.optim.AdamW, rows=slice(None), backward=None, **more):
    """Run AdamW, or another `kind`, with clip_grad_norm_ on the rows of this rank, on the mean loss
    or what `backward(tokens, targets)` does instead -> ([(loss, norm)] of the steps, optimizer)."""
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
        windows = tokens.tokens_of(tokens.window_ids(config.seed, first, size))
        batch = torch.from_numpy(windows)[rows]
        optimizer.zero_grad()
        loss = (backward or backward_of_mean)(batch[:, :-1], batch[:, 1:])
        norm = nn.utils.clip_grad_norm_(parameters, config.clip) if config.clip else None
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        optimizer.step()
        seen.append((loss, norm))
    return seen, optimizer


@pytest.mark.claim("Clipping and AdamW equal those of a plain model.")
@pytest.mark.parametrize("layout, flags, sizes", [
    ((1, 1, 1), {}, [8] * 5),
    ((2, 2, 2), dict(batch_size=16, batch_ramp="4:4:20"), [4, 4, 8, 12, 16])])
def test_a_run_is_adamw_with_clipping_on_a_plain_model(pool, tmp_path, monkeypatch, layout, flags,
                                                       sizes):
    """Losses and norms are those of a plain model with torch.optim.AdamW and clip_grad_norm_, to
    1e-10 in fp64, the parameters after five steps to 1e-8; also with batches that grow. Without
    these, so are those of plain_train, as it stands in train.py."""
    clipped = dict(dtype="fp64", steps=5, clip=0.35, lr=1e-2, warmup_steps=2)
    config = settings(tmp_path, **clipped, **flags)
    steps, _, whole = trained(pool, layout, tmp_path, **clipped, **flags)
    assert column(steps, "batch_size") == sizes
    assert column(steps, "tokens") == [16 * n for n in itertools.accumulate(sizes)]
    plain_forms = [lambda gpt: train_theirs(config, gpt)[0]]
    if config.batch_ramp is None:
        memory = Memory(CFG)                                # it has windows, and no shards
        monkeypatch.setattr(train, "plain_batch", lambda shards, seq_len, *which: memory.tokens_of(
            memory.window_ids(*which)))
        plain_forms.append(lambda gpt: train.plain_train(
            config, gpt, train.plain_adamw(config, gpt), shards=[]))
    for train_plain in plain_forms:
        plain = GPT(CFG).initialize(config.seed).double()
        losses, norms = zip(*train_plain(plain))
        assert min(norms) > config.clip                     # it clips
        assert relative(column(steps, "loss"), list(losses)) <= 1e-10
        assert relative(column(steps, "grad_norm"), list(norms)) <= 1e-10
        expected = comparable(dict(plain.named_parameters()))
        assert relative(comparable(whole["master"]), expected) <= 1e-8


def test_the_example_of_plain_train_prints_the_losses_of_train_py(
        run_train, library, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "python").symlink_to(library)
    monkeypatch.chdir(tmp_path)
    example = re.search(r"( {8}from train .*?)\n\n", train.plain_train.__doc__, re.S)[1]
    exec(textwrap.dedent(example).replace("steps=20", "steps=3"), {})
    losses = [float(line) for line in capsys.readouterr().out.split()]
    run_train("--data", library, "--out", tmp_path / "o", "--steps", 3)
    expected = column(read_metrics(tmp_path / "o")[0], "loss")
    assert len(losses) == 3 and relative(losses, expected) <= 1e-5


def replicated(rank, world, config, what="data"):
    """{name: parameter, or its gradient} by DistributedDataParallel and ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    gpt = DistributedDataParallel(GPT(CFG).initialize(config.seed).double())
    train_theirs(config, gpt, ZeroRedundancyOptimizer, slice(rank, None, world),
                 optimizer_class=torch.optim.AdamW)
    return {name: getattr(p, what) for name, p in gpt.module.named_parameters()}


def fully_sharded(rank, world, config):
    """{name: parameter} by fully_shard (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    gpt = GPT(CFG).initialize(config.seed).double()
    mesh = init_device_mesh("cpu", (world,))
    for part in (*gpt.blocks.values(), gpt):
        fully_shard(part, mesh=mesh)
    train_theirs(config, gpt, rows=slice(rank, None, world))
    return {name: p.full_tensor() for name, p in gpt.named_parameters()}


def pipelined(rank, world, config):
    """{name: parameter} of this stage of two by torch.distributed.pipelining, which leaves the sum
    of the tied matrix's gradients to us."""
    from torch.distributed import pipelining
    cuts = [[("0", "1", "2")], [("3", "4")]]
    if config.pp_chunks == 2:
        cuts = [[("0", "1"), ("3",)], [("2",), ("4",)]]
    whole = GPT(CFG).initialize(config.seed).double()
    tied = whole.head.weight
    stage = nn.ModuleList()
    parts = []
    for chunk, layers in enumerate(cuts[rank]):
        part = copy.copy(whole)
        part._modules = dict(whole._modules, blocks=nn.ModuleDict(
            {layer: whole.blocks[layer] for layer in layers}))
        if rank > 0 or chunk > 0:
            part.embed = None
        if rank == 0 or chunk < config.pp_chunks - 1:
            part.head = None
        stage.append(part)
        parts.append(pipelining.PipelineStage(part, chunk * world + rank, world * config.pp_chunks,
                                              torch.device("cpu")))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B}[config.pp_schedule]
    schedule = kind(parts if config.pp_chunks > 1 else parts[0],
                    config.batch_size // config.micro_batch,
                    loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))

    def step(x, y):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        dist.all_reduce(tied.grad)
    train_theirs(config, stage, backward=step)
    return {("embed.token.weight" if p is tied else n.split(".", 1)[1]): p
            for n, p in stage.named_parameters()}


def in_rings(rank, world, config):
    """{name: parameter} by torch's context_parallel, which shares out the positions, and its ring
    attention, which calls a CUDA kernel: here the CPU's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _context_parallel
    from torch.distributed.tensor.experimental import context_parallel
    theirs = _context_parallel._attention
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    same = dict(is_causal=True, dropout_p=0.0)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            y, lse = theirs._templated_ring_attention(
                dist.group.WORLD, 2, getattr(torch.ops.aten, kernel), q, k, v, **same)
            ctx.save_for_backward(q, k, v, y, lse)
            return y

        @staticmethod
        def backward(ctx, dy):
            return theirs._templated_ring_attention_backward(
                dist.group.WORLD, 2, getattr(torch.ops.aten, f"{kernel}_backward"), dy, "grad_out",
                *ctx.saved_tensors, **same)
    gpt = GPT(CFG).initialize(config.seed).double()
    for block in gpt.blocks.values():
        block.attn.core_attention.forward = lambda q, k, v, *_: Ring.apply(q, k, v)
    mesh = init_device_mesh("cpu", (world,))

    def step(x, y):
        x, y, positions = x.clone(), y.clone(), torch.arange(CFG.seq_len)
        gpt.embed.position.forward = lambda _: F.embedding(positions, gpt.embed.position.weight)
        total = y.numel()
        with context_parallel(mesh, buffers=[x, y, positions], buffer_seq_dims=[1, 1, 0]):
            (gpt(x, y) / total).backward()
        for parameter in gpt.parameters():
            dist.all_reduce(parameter.grad)
    with mock.patch.object(theirs._cp_options, "convert_to_f32", False):
        train_theirs(config, gpt, backward=step)
    return dict(gpt.named_parameters())


@pytest.mark.claim("Data-parallel gradients equal those of `DistributedDataParallel`.")
def test_data_parallel_gradients_are_those_of_DistributedDataParallel(pool, tmp_path):
    """On four replicas, of each parameter, to 1e-12 in fp64."""
    config = settings(tmp_path, dtype="fp64", steps=1, micro_batch=1, clip=0.0)
    _, (ours,), _ = pool.run(4, run_steps, (4, 1, 1), config, CFG, whole_gradient)[0]
    theirs = pool.run(4, replicated, config, "grad")[0]
    assert relative(comparable(ours), comparable(theirs)) <= 1e-12


@pytest.mark.claim("Five steps end where those of `ZeroRedundancyOptimizer`, FSDP2, "
                   "`torch.distributed.pipelining` and `context_parallel` end.")
@pytest.mark.parametrize("theirs, world, flags", [
    (replicated, 4, dict(zero=1)), (fully_sharded, 2, dict(zero=3)),
    (in_rings, 4, dict(cp=4, micro_batch=4)),
    (pipelined, 2, dict(pp=2, pp_schedule="1f1b", clip=0.0)),
    (pipelined, 2, dict(pp=2, pp_schedule="interleaved", pp_chunks=2, clip=0.0))])
def test_five_steps_end_where_torchs_own_stack_ends(pool, tmp_path, theirs, world, flags):
    """The parameters are those of ZeroRedundancyOptimizer, fully_shard (FSDP2), context_parallel
    and torch.distributed.pipelining, to 1e-8 in fp64."""
    config = settings(tmp_path, dtype="fp64", steps=5, lr=1e-2, warmup_steps=2,
                      **{"clip": 0.5, "micro_batch": 1, **flags})
    expected = {}
    for parameters in pool.run(world, theirs, config):
        expected |= comparable(parameters)
    layout = (world // config.pp // config.cp, 1, config.pp)
    ours = pool.run(world, run_steps, layout, config, CFG)[0].state["master"]
    assert relative(comparable(ours), expected) <= 1e-8


@pytest.mark.parametrize("cp, sequence_parallel", [(1, False), (1, True), (2, False), (2, True)])
@on_ranks
def test_dropout_masks_are_equal_where_activations_are(rank, world=4, *, tmp_path, cp,
                                                       sequence_parallel):
    """Ranks 0 and 1, and 2 and 3, have different heads of the same rows, or with cp 2 of the same
    positions; outside attention they have the same activations, unless sequence parallelism splits
    these. In each of 2 steps of 2 microbatches a rank draws one mask for the embedding and three in
    a layer, of which one is for attention. No mask is drawn twice, and none again with another
    seed."""
    cfg = replace(CFG, dropout=0.2, n_layer=2)

    def look(module, args, y):
        if module.training and isinstance(module, model.CoreAttention):
            # Equal scores and one-hot values: the output is the softmax itself, under its mask.
            own = context.own_positions(torch.eye(cfg.seq_len), rank // 2 % cp, cp, dim=0)
            one_hot = own.expand(*args[0].shape[:2], -1, -1)
            zeros = torch.zeros_like(one_hot)
            y = module.forward(zeros, zeros, one_hot, cp > 1, args[-1])
        if module.training and isinstance(module, model.Dropout):
            drawn.append((y == 0).numpy().tobytes())

    def prepare(run):
        for module in run.model.modules():
            module.register_forward_hook(look)
    runs = []                           # of each seed the masks of each rank, as bytes
    for seed in (1, 2):
        drawn = []
        config = settings(tmp_path, steps=2, tp=2, cp=cp, batch_size=8 // cp, seed=seed,
                          sequence_parallel=sequence_parallel)
        run_steps(rank, world, (2 // cp, 2, 1), config, cfg, prepare=prepare)
        runs.append(collectives.all_gather_object(drawn))
    one, other = runs
    assert [len(set(drawn)) for drawn in one] == [len(drawn) for drawn in one] == [4 * 7] * 4
    assert not set(sum(one, [])) & set(sum(other, []))
    shared = [len(set(one[a]) & set(one[b])) for a, b in itertools.combinations(range(4), 2)]
    same = 0 if sequence_parallel else 4 * 5
    assert shared == [same, 0, 0, 0, 0, same]           # 01 02 03 12 13 23


@pytest.mark.parametrize("layout, flags, other, changes, bound", [
    ((1, 2, 1), dict(dtype="bf16", sequence_parallel=True), (1, 2, 1), dict(recompute=True), 0),
    ((1, 2, 1), dict(dtype="fp64", sequence_parallel=True),
     (1, 2, 2), dict(pp_schedule="1f1b"), 1e-10),
    ((1, 1, 1), dict(dtype="bf16", cp=2), (1, 1, 1), dict(recompute=True), 0),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ((1, 2, 2), dict(dtype="bf16"), (1, 2, 2), dict(recompute=True), 0),
        ((2, 1, 1), dict(dtype="fp64"), (2, 1, 3), dict(zero=2, pp_schedule="1f1b"), 1e-10),
        ((2, 2, 1), dict(dtype="fp64"), (2, 2, 1), dict(zero=3, recompute=True), 1e-10)])])
def test_masks_do_not_depend_on_schedule_stage_or_recomputation(pool, tmp_path, reference, layout,
                                                                flags, other, changes, bound):
    """With dropout, another layout and `changes` leave losses, gradients and norms to 1e-10 in
    fp64; recomputation alone leaves each bit."""
    cfg = replace(CFG, dropout=0.2, n_layer=3)
    ours = trained(pool, other, tmp_path, cfg, whole_gradient, prepare=without_saves, steps=2,
                   **flags, **changes)
    theirs = reference(cfg, layout, micro_batch=2, steps=2, **flags)
    assert max(differences(ours, theirs)) <= bound


# ---------------------------------------------------------------------------------------------
# parallelism/full_tensors.py: a run's tensors by their global names
# ---------------------------------------------------------------------------------------------

def refusal(call, *args):
    """The message of the exception, one line, that the call raises."""
    with pytest.raises((ValueError, RuntimeError)) as refused:
        call(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def look_at_gradients(run):
    """Before and after the update, the same; before the sum and in the next step, a refusal."""
    flat, name = run.flat, "blocks.0.mlp.up.weight"
    zero, finish = flat.zero_grad, flat.finish_grad_sync
    looks = run.looks = []

    def zero_grad(*args):
        zero(*args)
        looks.append(refusal(flat.full_gradient, name))

    def finish_grad_sync():
        looks.append(refusal(lambda: list(flat.full_gradients())))
        if flat.zero >= 2:                  # every backward's sum has emptied this rank's part
            refusal(list(run.model.parameters())[-1].main_grad)
        finish()
        looks.append((flat.full_gradient(name), dict(flat.full_gradients())))
    flat.zero_grad, flat.finish_grad_sync = zero_grad, finish_grad_sync
    without_saves(run)


def after_the_update(run):
    """What can be read after a step, on every rank."""
    flat = run.flat
    parameters = list(run.model.named_parameters())
    name, parameter = parameters[-1]
    said = [refusal(parameter.main_grad), refusal(flat.full_gradient, "blocks.0.mlp.up.wieght"),
            refusal(flat.full_state, "weights", "embed.token.weight")]
    assert all(p.grad is None for _, p in parameters)
    if flat.zero == 3 or run.grid.tp * run.grid.pp > 1:
        assert "full_state('master', name)" in refusal(run.model.state_dict)
    else:                                   # an update may still be on its way to this rank
        weights = run.model.state_dict()["blocks.0.mlp.up.weight"]
        assert flat.full_state("master", "blocks.0.mlp.up.weight").to(weights.dtype).equal(weights)
    if run.grid.world > 1:
        said.append(refusal(flat.full_gradient, f"blocks.{run.grid.rank}.norm1.bias"))
    state = {kind: {name: flat.full_state(kind, name) for name in flat.parameter_names()}
             for kind in checkpoint.STATE.values()}
    return (run.looks, said, flat.full_gradient("blocks.0.mlp.up.weight"),
            flat.full_gradient("head.weight"), state)


@pytest.mark.parametrize("layout, flags", [                 # (dp, tp, pp)
    ((1, 1, 1), dict(dtype="fp16")), ((2, 2, 1), dict(zero=3, dtype="fp16")),
    ((2, 1, 2), dict(zero=2)), ((1, 2, 2), dict(exact=True)), ((2, 1, 1), dict(zero=1))])
def test_gradients_weights_and_moments_can_be_read_by_global_name_or_are_refused(
        pool, tmp_path, layout, flags):
    """On every rank the full gradient is that of the plain model, from the sum over the ranks to
    the next step, the tied matrix's by either name; weights and moments are those of a save. At
    another time, by another name, or by different names on different ranks it is refused in one
    line; so is `main_grad` after the sum, and a state_dict() that is a part or freed."""
    dp, tp, pp = layout
    cfg = replace(CFG, n_layer=4)
    config = settings(tmp_path, tp=tp, pp=pp, steps=1, micro_batch=1, clip=1e-3, **flags)
    answers = pool.run(dp * tp * pp, run_steps, layout, config, cfg, after_the_update, None,
                       look_at_gradients)
    plain = plain_gradient(cfg)
    bound = 0.05 if "dtype" in flags else 1e-5
    name = "blocks.0.mlp.up.weight"
    for _, ((looks, said, after, tied, state),), _ in answers:
        early, earlier, (one, every) = looks
        assert "not summed over the ranks yet" in early and "after finish_grad_sync" in earlier
        assert relative(every, plain) <= bound and one.equal(every[name])
        assert relative(after, one) <= 1e-6                 # clipping is divided out again
        assert relative(tied, every["embed.token.weight"]) <= 1e-6
        assert one.dtype == (torch.float64 if "exact" in flags else torch.float32)
        assert "call full_gradient('" in said[0]
        assert "did you mean 'blocks.0.mlp.up.weight'" in said[1]
        assert "none of master, exp_avg, exp_avg_sq" in said[2]
        assert len(answers) == 1 or "norm1.bias') at once" in said[3]
        saved_state = answers[0].state
        for kind, tensors in state.items():
            assert relative(tensors, saved_state[kind]) == 0


def test_without_training_there_are_no_gradients_to_read():
    """The weights are there; gradients and moments are refused in a line."""
    cfg = replace(CFG, n_layer=1)
    local = build_stage(cfg, Grid(1, 1, 1))
    specs = param_specs(local, cfg, Grid(1, 1, 1))
    flat = FlatParameters(specs, Grid(1, 1, 1), torch.float32, torch.float32, "cpu", training=False)
    flat.initialize(cfg, 0)
    expected = model.initial_value(cfg, "embed.token.weight", (257, 32), 0)
    assert flat.full_state("master", "embed.token.weight").equal(expected)
    assert "without training" in refusal(flat.full_gradient, "embed.token.weight")
    assert "without training" in refusal(flat.full_state, "exp_avg", "embed.token.weight")


def test_the_example_that_prints_gradient_norms_runs_in_every_layout(shards, tmp_path):
    """The lines of full_tensors.py's docstring, behind finish_grad_sync in train.py, print the same
    names and, to 1e-4, norms in one process, with tp 2, and with ZeRO 3."""
    lines = re.findall(r"^    ((?:for|    if|        print).*)", full_tensors.__doc__, re.M)
    assert len(lines) == 3
    code = (ROOT / "train.py").read_text()
    line = "        flat.finish_grad_sync()\n"
    assert code.count(line) == 1
    example = "".join(f"        {x}\n" for x in lines)
    (tmp_path / "train.py").write_text(code.replace(line, line + example))
    printed = []
    for world, flags in [(1, []), (2, ["--tp", 2]), (2, ["--zero", 3])]:
        commands = launch(world, "--data", shards, "--out", tmp_path / f"{len(printed)}", *TINY,
                          "--steps", 1, *flags, file=tmp_path / "train.py")
        (status, out, error), *_ = [command.finish() for command in commands]
        assert status == 0, error
        printed.append({name: float(norm) for name, norm
                        in re.findall(r"^([a-z0-9_.]+\.(?:weight|bias)) (\S+)$", out, re.M)})
    assert printed[0].keys() == set(checkpoint.parameter_shapes(GPTConfig(n_layer=2)))
    assert all(norms == pytest.approx(printed[0], rel=1e-4) for norms in printed)


# ---------------------------------------------------------------------------------------------
# parallelism/zero.py: what a rank keeps, and when it communicates
# ---------------------------------------------------------------------------------------------

def held_by(flat):
    """{(device, kind): bytes} of the tensors in a FlatParameters' buckets."""
    sizes = {}                  # storage -> ((device, kind), bytes)
    for bucket in flat.buckets:
        own = bucket.shard
        for kind, x in [("parameters", bucket.data), ("parameters", own["data"]),
                        ("gradients", bucket.grad), ("gradients", own.get("grad")),
                        ("masters", own["master"]), ("moments", own.get("exp_avg")),
                        ("moments", own.get("exp_avg_sq"))]:
            if x is not None:
                storage = x.untyped_storage()
                sizes.setdefault(storage._cdata, ((x.device.type, kind), storage.nbytes()))
    if flat.staging is not None:
        sizes["staging"] = ("cpu", "staging"), flat.staging.nbytes
    places = {place for place, _ in sizes.values()}
    return {place: sum(size for at, size in sizes.values() if at == place) for place in places}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_bytes_are_what_flat_parameters_allocate(device, dtype, zero):
    """On every rank of dp 2 x pp 2 x tp 2, by kind, exactly; the total is ZeRO's published formula.
    Parameters on another device than the optimizer, here torch's meta device, are --offload."""
    dtypes = amp.PRECISIONS[dtype]
    offload = device == "meta"
    pp = 1 if zero == 3 else 2
    for rank in range(4 * pp):
        grid = Grid(dp=2, pp=pp, tp=2, rank=rank)
        specs = param_specs(build_stage(CFG, grid), CFG, grid)
        flat = FlatParameters(specs, grid, *dtypes, device, zero, "cpu")
        numel = sum(bucket.numel for bucket in flat.buckets)
        longest = max(bucket.numel for bucket in flat.buckets)
        on_device, on_host = state_bytes(numel, longest, grid.dp, dtypes, zero, offload)
        expected = {(device, kind): size for kind, size in on_device.items() if size > 0}
        expected |= {("cpu", kind): size for kind, size in on_host.items()}
        assert held_by(flat) == expected
        if not offload:
            formula = FORMULA["bf16" if dtype == "bf16" else "fp32"](2)[zero]
            assert sum(on_device.values()) == formula * numel * dtypes[1].itemsize / 4
        # An evaluation keeps the parameters alone.
        flat = FlatParameters(specs, grid, *dtypes, device, zero, "cpu", training=False)
        assert held_by(flat) == {(device, "parameters"): on_device["parameters"]}


def test_a_run_offloads_and_shards_as_its_flags_say(tmp_path):
    """With --offload masters and moments of a model on another device, here torch's meta device,
    are on the host; with --zero 1, 2 and 3 one of two replicas has half of them."""
    def kept(device, **flags):
        with mock.patch.object(run_state, "restore"):
            run = train.Run(settings(tmp_path, **flags), CFG, Grid(dp=2, pp=1, tp=1),
                            torch.device(device), Memory(CFG), Memory(CFG), None)
        found = [bucket.shard[name] for bucket in run.flat.buckets
                 for name in ("master", "exp_avg", "exp_avg_sq")]
        assert len({x.device for x in found}) == 1
        return found[0].device.type, sum(x.numel() for x in found)
    _, whole = kept("cpu")
    assert kept("meta") == ("meta", whole) and kept("meta", offload=True) == ("cpu", whole)
    for zero in (1, 2, 3):
        assert kept("cpu", zero=zero) == ("cpu", whole // 2)


# ---- Mechanisms

def events_of_a_step(rank, world, zero):
    """What a step of two microbatches does, in order, and then the next forward: (what, of which
    bucket or part of the model). And the most buckets of blocks that had memory for gradients at
    once."""
    events, held = [], []
    storages = {}               # of tensors on their way: (what they are, their bucket)

    def note_gradient(name, gradient):
        events.append(("gradient", name))
        held.append(sum(bucket.grad is not None for bucket in flat.buckets[2:]))

    def note_message(name, x, *_, **__):
        storage = x.untyped_storage().data_ptr()
        if name == "isend":
            for bucket in flat.buckets:
                for kind, tensor in (("sum", bucket.grad), ("gather", bucket.data)):
                    if tensor is not None and tensor.untyped_storage().data_ptr() == storage:
                        storages[storage] = kind, bucket.name
                        events.append((f"{kind} starts", bucket.name))
        if name == "wait" and storage in storages:      # (not for what is received)
            kind, bucket = storages.pop(storage)        # other tensors may take this memory
            events.append((f"{kind} ends", bucket))
    with gridded(rank, world, tp=1, pp=1) as grid:
        local, flat = staged(replace(CFG, n_layer=2), grid, zero=zero)
        for bucket in flat.buckets:
            for module, attribute in sum((spec.owners for spec in bucket.specs), []):
                parameter = getattr(module, attribute)
                parameter.register_hook(functools.partial(note_gradient, bucket.name))
        parts = {f"block {name}": block.norm1 for name, block in local.blocks.items()}
        parts |= dict(embedding=local.embed.token, head=local.head.norm)
        batch = [(tokens, tokens, 0, None) for tokens in tokens_of(CFG, 4).split(2)]
        with traffic(note_message):
            flat.zero_grad()
            run_schedule(one_f_one_b(0, 1, 2), local, grid, batch, torch.empty(0), flat)
            flat.finish_grad_sync()
            events.append(("update", ""))
            flat.adamw_step(1.0, 1, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
            for name, first in parts.items():
                first.register_forward_pre_hook(lambda *_, name=name: events.append((name, "")))
            with torch.no_grad():
                local(*batch[0][:2])
    return events, max(held)


@pytest.mark.parametrize("zero, most_held", [(0, 4), (1, 4), (2, 1)])
def test_sums_of_buckets_overlap_backward(pool, zero, most_held):
    """Mechanism (that backward hides communication, and that ZeRO 2 needs its memory): the sum of a
    bucket starts between its last gradient and the first of the next bucket. ZeRO 0 and 1 sum after
    the last microbatch; ZeRO 2 after each, and keeps the gradients of half a block at once. With
    ZeRO a CPU has one sum on its way at a time. At last ZeRO gathers the updated parameters, and
    the next forward awaits those of each part before the part runs, not earlier."""
    completed = ["1.mlp", "1.attn", "0.mlp", "0.attn", "ends", "tied"]      # in this order
    for events, held in pool.run(2, events_of_a_step, zero):
        assert held == most_held
        update = events.index(("update", ""))
        backward, after = events[:update], events[update:]
        started = [bucket for what, bucket in backward if what == "sum starts"]
        assert started == completed * (2 if zero == 2 else 1)
        last = {event: i for i, event in enumerate(backward)}
        for bucket, following in itertools.pairwise(completed):
            assert last["gradient", bucket] < last["sum starts", bucket] < last[
                "gradient", following], (bucket, backward)
        sums = [what for what, _ in backward if what in ("sum starts", "sum ends")]
        if zero > 0:
            assert sums == len(started) * ["sum starts", "sum ends"]
        else:
            assert sums == len(started) * ["sum starts"] + len(started) * ["sum ends"]
            assert {what for what, _ in after} == {"update", "embedding", "block 0", "block 1",
                                                   "head"}
            continue
        place = {event: i for i, event in enumerate(after)}
        for part, previous, buckets in [
                ("embedding", "update", ("tied", "ends")),
                ("block 0", "embedding", ("0.attn", "0.mlp")),
                ("block 1", "block 0", ("1.attn", "1.mlp"))]:
            for bucket in buckets:
                assert place["gather starts", bucket] < place["embedding", ""]
                assert place[previous, ""] < place["gather ends", bucket] < place[part, ""]


@pytest.mark.parametrize("stage, expected", [
    (0, "2.mlp 2.attn 1.mlp 1.attn 0.mlp 0.attn ends tied"),
    (1, "tied 4.mlp 4.attn 3.mlp 3.attn ends")])
def test_buckets_are_summed_in_the_order_of_their_completion(stage, expected):
    """Mechanism (that backward hides the largest one): on a pipeline's last stage the tied matrix
    is first, because only the head uses it there."""
    local, flat = staged(CFG, Grid(dp=1, pp=2, tp=1, rank=stage))
    order = []
    flat._start_grad_sync = lambda bucket: order.append(bucket.name)
    x = tokens_of(CFG, 2) if stage == 0 else torch.randn(2, 16, 32, requires_grad=True)
    flat.prepare_grad_sync(local, True)
    local(x, tokens_of(CFG, 2)).sum().backward()
    assert " ".join(order) == expected


@pytest.mark.parametrize("dtype, copies", [(torch.float32, 0), (torch.bfloat16, 1)])
def test_a_step_calls_each_operation_on_all_buckets_once(dtype, copies):
    """Mechanism (that a GPU does not wait for the host): not once a bucket, of which there are 12.
    AdamW takes two calls: for what decays, and for what does not."""
    local, flat = staged(CFG, Grid(1, 1, 1), dtype)
    assert len(flat.buckets) == 12
    with Passes() as seen:
        flat.zero_grad()
        flat.adamw_step(0.5, 1, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
    counts = {name: seen.calls.count(name) for name in ("_foreach_zero_", "_foreach_mul_",
                                                        "_fused_adamw_", "_foreach_copy_", "copy_")}
    assert list(counts.values()) == [1, 1, 2, copies, 0]


@pytest.mark.parametrize("recompute", [False, True])
def test_zero_3_holds_one_block_and_gathers_the_next(recompute):
    """Mechanism (of ZeRO 3's memory and overlap): which buckets have memory, the two halves of a
    block each, and + what is on its way: in a block's forward, its backward (recomputation sees it
    in both) and after."""
    tokens = tokens_of(CFG, 2)
    seen = []
    local, flat = staged(replace(CFG, n_layer=3), Grid(1, 1, 1), recompute=recompute, zero=3)

    def look(*_):
        held = []
        for bucket in flat.buckets:
            if bucket.data.untyped_storage().size() > 0:
                part = bucket.name.split(".")[0]
                held.append(part if bucket.unsharding is None else part + "+")
        seen.append(" ".join(held))
    local.embed.token.register_forward_hook(look)
    for block in local.blocks.values():
        block.norm2.register_forward_hook(look)
        block.norm2.weight.register_post_accumulate_grad_hook(look)
    loss = local(tokens, tokens)
    look()                                      # the head has made its gradients already
    flat.prepare_grad_sync(local, True)
    loss.backward()
    look()
    with torch.no_grad():
        local(tokens, tokens)
    look()
    forward = ["tied ends 0+ 0+", "tied ends 0 0 1+ 1+", "tied ends 1 1 2+ 2+", "tied ends 2 2"]
    backward = ["ends 2 2", "ends 1+ 1+ 2 2", "ends 0+ 0+ 1 1", "ends 0 0"]
    assert in_turn(seen) == [*forward, *backward, "", *forward, ""]


# ---------------------------------------------------------------------------------------------
# checkpoint.py
# ---------------------------------------------------------------------------------------------

def save_at_the_start(run):
    run_state.save(run, is_start=True)


@pytest.mark.parametrize("layout, cp, zero", [
    ((1, 1, 1), 1, 0), ((2, 2, 2), 1, 1), ((1, 4, 1), 1, 0), ((2, 1, 1), 1, 2), ((4, 1, 1), 1, 3),
    ((1, 1, 3), 1, 0), ((2, 1, 2), 2, 1), ((1, 2, 1), 2, 0)])
def test_a_file_has_the_plain_models_state_in_any_layout(pool, tmp_path, layout, cp, zero):
    """In each layout and ZeRO stage the file of step 0 holds a plain model's parameters, bit for
    bit, and no moments; that of step 1 the parameters and moments of torch's AdamW after a step on
    the plain model, to 1e-10 in fp64: under its names, the tied matrix once, without padding, at
    most 1.2 times as large as the tensors."""
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


def test_load_model_returns_the_plain_model_which_drops_nothing(tmp_path):
    """With the parameters of the run, in eval mode."""
    cfg = replace(CFG, dropout=0.5, n_layer=1)
    watched(settings(tmp_path, steps=0), save_at_the_start, cfg=cfg)
    loaded, _ = checkpoint.load_model(tmp_path / "latest.pt")
    expected = dict(GPT(cfg).initialize(Config.seed).named_parameters())
    assert all(p.equal(expected[name]) for name, p in loaded.named_parameters())
    tokens = tokens_of(cfg, 1)
    assert loaded(tokens, dropout_seed=1).equal(loaded(tokens, dropout_seed=2))


@pytest.mark.parametrize("before, after, scale", [
    ("fp16", "fp16", 15), ("fp32", "fp16", 16), ("fp16", "bf16", 0)])
def test_a_loss_scale_stays_with_its_precision(tmp_path, before, after, scale):
    """A resume in fp16 goes on with fp16's scale, 2 ** 15 after the overflow of step 2; after
    another precision it begins at 2 ** 16."""
    config = settings(tmp_path, dtype=before, steps=2)
    watched(config, lambda run: overflow_in(run, [2]))
    (row,) = watched(replace(config, dtype=after, steps=3), state=tmp_path / "latest.pt").rows
    assert row["step"] == 3 and row["loss_scale"] == 2.0 ** scale


@pytest.mark.claim("Loading a checkpoint runs no code from it.")
def test_a_checkpoints_code_is_not_run(tmp_path):
    """A pickle that makes a folder is refused, and makes none; with plain torch.load it does."""
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


@pytest.mark.parametrize("content, words", [
    ([1, 2], "not a checkpoint of this project"),
    (dict(format=None), "not a checkpoint of this project"),
    (dict(new=0), r"differ: \['new'\]"), (dict(tokens=None), r"differ: \['tokens'\]"),
    (dict(model=dict(width=3)), "width"),
    (dict(model=asdict(GPTConfig(n_layer=1, n_embd=64))), "its parameters are not those"),
    (dict(parameters={}), "its parameters are not those of its model"),
    (dict(exp_avg=dict(x=torch.zeros(1))), "its exp_avg are not those of its model")])
def test_other_files_and_states_that_contradict_themselves_are_refused(tmp_path, content, words):
    """Refused with its name and the reason. A dict changes a whole state; None leaves a key out."""
    if isinstance(content, dict):
        content = {k: v for k, v in {**small_state(1), **content}.items() if v is not None}
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(checkpoint_files.CorruptCheckpoint, match=f"x.pt is refused: .*{words}"):
        checkpoint.load(tmp_path / "x.pt")


# ---------------------------------------------------------------------------------------------
# train.py
# ---------------------------------------------------------------------------------------------

def test_learning_rate_warms_up_then_decays_to_the_ratio():
    """To 0.1 of a peak of 2 at step 110, where it stays, after a warm-up of 10; a quarter of the
    way is step 35."""
    config = Config(lr=2.0, steps=110, warmup_steps=10, min_lr_ratio=0.1)
    for schedule, at_a_quarter in [("cosine", 1.7363961), ("linear", 1.55)]:
        rates = [train.learning_rate(replace(config, lr_schedule=schedule), step)
                 for step in (1, 5, 10, 35, 60, 110, 111, 500)]
        assert rates == pytest.approx([0.2, 1.0, 2.0, at_a_quarter, 1.1, 0.2, 0.2, 0.2]), schedule
        short = replace(config, lr_schedule=schedule, steps=10)
        assert train.learning_rate(short, 11) == pytest.approx(0.2)
    assert train.learning_rate(replace(config, warmup_steps=0, steps=1), 1) == pytest.approx(0.2)


def test_wsd_is_constant_until_its_last_fifth_also_in_a_prolonged_run():
    """A peak of 2 after a warm-up of 10 steps; of 110 the last 22 decay, linearly, to 0.1 of it."""
    config = Config(lr=2.0, steps=110, warmup_steps=10, min_lr_ratio=0.1, lr_schedule="wsd")

    def rates(*steps, **changes):
        return [train.learning_rate(replace(config, **changes), step) for step in steps]
    assert rates(5, 10, 11, 88, 99, 110) == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.1, 0.2])
    assert rates(88, 110, 176, 198, 220, steps=220) == pytest.approx([2.0, 2.0, 2.0, 1.1, 0.2])
    assert rates(55, 110, decay_ratio=0.5) == pytest.approx([2.0, 0.2])
    assert rates(109, 110, decay_ratio=0.0) == pytest.approx([2.0, 2.0])
    assert rates(10, 60, 110, decay_ratio=0.99) == pytest.approx([2.0, 1.1, 0.2])


@pytest.mark.parametrize("ranks, dropout", [(1, 0.0), (2, 0.5)])
def test_a_mixture_is_evaluated_by_source_on_evenly_spaced_windows(monkeypatch, tmp_path,
                                                                   two_sources, ranks, dropout):
    """Each source is evaluated on at most 128 windows, without dropout, which is on again in the
    next step. Compared with a plain model in two steps whose learning rate is 0, to 1e-10 in fp64;
    so is the training loss, on the batches that the mixture draws."""
    monkeypatch.chdir(two_sources)
    plain = GPT(GPTConfig(257, 16, 2, 2, 16)).initialize(Config.seed).double()
    both = data.TokenDataset("a=3,b=1", "train", 16)
    each = []

    def loss(source, windows):
        tokens = torch.from_numpy(source.tokens_of(windows))
        return plain(tokens[:, :-1], tokens[:, 1:]).item() / tokens[:, 1:].numel()
    for name in "ab":
        val = data.TokenDataset(name, "val", 16)
        spaced = np.linspace(0, val.n_windows - 1, min(val.n_windows, 128)).astype(int)
        each.append(pytest.approx(loss(val, spaced), rel=1e-10))
    assert val.n_windows > 128
    assert TINY[-2:] == ["--eval-tokens", "64"]         # left out
    ends = [command.finish() for command in launch(
        ranks, "--data", "a=3,b=1", "--out", tmp_path, *TINY[:-2], "--batch-size", 8, "--steps", 2,
        "--eval-every", 1, "--lr", 0, "--dtype", "fp64", "--dropout", dropout, "--pp", ranks,
        cwd=two_sources)]
    assert ends[0][1].count(" bits a byte") == 2 * 3, ends
    for step, row in enumerate(read_metrics(tmp_path)[0]):
        assert [row["val_loss/a"], row["val_loss/b"]] == each
        mean = (3 * row["val_loss/a"] + row["val_loss/b"]) / 4
        assert row["val_loss"] == pytest.approx(mean, rel=1e-14)
        assert [row["epochs/a"], row["epochs/b"]] == [
            n * (step + 1) / source.n_windows for n, source in zip((6, 2), both.sources.values())]
        expected = loss(both, both.window_ids(Config.seed, 8 * step, 8))
        assert (row["loss"] == pytest.approx(expected, rel=1e-10)) == (dropout == 0)
    assert both.average([4.0, 1.0]) == 3.25 and both.average([4.0, None]) is None
    assert data.TokenDataset("a=1,b=0", "val", 16).average([4.0, None]) == 4.0


# ---------------------------------------------------------------------------------------------
# sample.py
# ---------------------------------------------------------------------------------------------

def test_sampling_prints_only_text_and_is_a_function_of_the_seed_and_the_flags(run_sample, things):
    """Greedy sampling, a temperature near 0, --top-k 1 and a small --top-p print the most probable
    tokens of the plain model. Of a prompt longer than the context only the end counts, and a
    warning says so."""
    def text(*flags, **options):
        status, out, error = run_sample("--max-tokens", 30, "--seed", 1, *flags, **options)
        assert (status, error) == (0, "") and out.startswith("line ") and out.endswith("\n")
        return out

    prompt = ("--prompt", "line ")
    assert text(*prompt) == text(*prompt) != text(*prompt, "--seed", 2)
    tokens = greedy(checkpoint.load_model(things / "whole.pt")[0], b"line ", 30)
    expected = "line " + bytes(tokens).decode(errors="replace") + "\n"
    assert text(*prompt, "--temperature", 9) != expected
    for flags in ("--temperature 0", "--temperature 1e-6", "--temperature 9 --top-k 1",
                  "--temperature 9 --top-p 1e-6"):
        assert text(*prompt, *flags.split()) == expected, flags
    assert text("--prompt", "-", "--temperature", 0, stdin="line ") == expected
    status, out, error = run_sample("--temperature", 0, "--prompt", "x" * 10 + "line 12: some wo")
    assert status == 0 and error.count("\n") == 1 and "26 tokens" in error
    assert run_sample("--temperature", 0, "--prompt", "line 12: some wo") == (0, out[10:], "")


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_samples_of_a_batch_equal_those_drawn_one_by_one(temperature):
    """Sample i, token by token, is that of seed i alone: it does not depend on how many there are,
    nor on when others end."""
    def drawn(seeds, end):
        """The tokens of each sample."""
        generators = [torch.Generator().manual_seed(i) for i in seeds]
        tokens = [[] for _ in seeds]
        for of in sample.generate(random_gpt(CFG), [1, 2, 3], 40, {end}, temperature,
                                  generators=generators):
            for i, token in of.items():
                tokens[i].append(token)
        return tokens
    alone = [drawn([i], end=-1)[0] for i in range(4)]
    assert len(set(map(tuple, alone))) == (4 if temperature else 1)
    end = alone[1][20]                                      # where the others go on, or all end
    assert drawn(range(4), end) == [
        tokens[:tokens.index(end) if end in tokens else None] for tokens in alone]


def test_sampling_stops_at_the_end_of_text_and_never_draws_padding():
    """At a temperature at which all tokens are nearly as probable, 256 comes within 2,000 tokens
    and ends the sample, and none of the padding above it comes."""
    drawn = list(sample.generate(random_gpt(CFG), [1], 2000, {256}, temperature=1000.0,
                                 generators=[torch.Generator().manual_seed(0)]))
    assert 0 < len(drawn) < 2000 and max(of.get(0, 0) for of in drawn) < 256


# ---- Mechanisms

def test_a_cache_gives_the_logits_of_the_whole_text_token_by_token():
    """Serves "greedy sampling": five tokens, the others one by one and the second again give the
    logits of one forward to 100 eps."""
    for batch, dtype in ((2, torch.float64), (1, torch.float32)):
        plain = random_gpt(CFG).to(dtype)
        tokens = tokens_of(CFG, batch)
        whole = plain(tokens)
        cache = plain.new_kv_cache(batch)
        parts = [plain(tokens[:, :5], cache=cache)]
        parts += [plain(tokens[:, i:i + 1], cache=cache, start=i) for i in range(5, CFG.seq_len)]
        parts += [plain(tokens[:, 1:2], cache=cache, start=1)]
        assert relative(torch.cat(parts, 1), whole[:, [*range(4, CFG.seq_len), 1]]) <= (
            100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("seq_len, positions", [
    (1, [1] * 24), (5, [3, 1, 1] + [2, 1, 1, 1] * 5 + [2]), (16, [3] + [1] * 13 + [8] + [1] * 8)])
def test_sampling_computes_each_token_once_until_its_window_is_full(seq_len, positions):
    """Serves the speed of "greedy sampling": the number of positions in each forward; the tokens
    are those of the plain model without a cache."""
    plain = random_gpt(replace(CFG, seq_len=seq_len))
    seen = []
    plain.embed.register_forward_hook(lambda module, args, x: seen.append(x.shape[1]))
    drawn = [of[0] for of in sample.generate(plain, [1, 2, 3], 40, {256}, temperature=0)]
    assert seen[:len(positions)] == positions
    assert drawn == greedy(plain, [1, 2, 3][-seq_len:], 40)


def test_top_k_and_top_p_keep_the_most_probable_tokens():
    """Serves --top-k and --top-p: the softmax of the tokens that stay, of each row for itself."""
    one = torch.tensor([2.0, -1.0, 3.0, 0.5, 1.0])      # probabilities .238 .012 .647 .053 .088
    logits = torch.stack([one, one.flip(0)])            # each row for itself
    for k, p, kept in ((1, 1.0, 1), (2, 1.0, 2), (3, 1.0, 3), (0, 1.0, 5), (9, 1.0, 5),
                       (0, 0.01, 1), (0, 0.6, 1), (0, 0.7, 2), (0, 0.9, 3)):
        least = one.sort(descending=True).values[kept - 1]
        expected = logits.where(logits >= least, -math.inf).softmax(-1)
        torch.testing.assert_close(sample.filter_logits(logits, 1.0, k, p), expected)
    torch.testing.assert_close(sample.filter_logits(one, 2.0, 0, 1.0), (one / 2).softmax(0))
    assert sample.filter_logits(one, 1e-40, 0, 1.0).tolist() == [0, 0, 1, 0, 0]
    rows = torch.tensor([[0.0, 0.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]])       # equal ones
    for k, p in ((1, 1.0), (3, 0.5), (0, 0.5)):
        alone = [sample.filter_logits(row, 0.7, k, p) for row in rows]
        assert sample.filter_logits(rows, 0.7, k, p).equal(torch.stack(alone))


def kept_by_hand(weights, k, p):
    """The tokens that top-k, then top-p keep of probabilities in the ratio of these whole numbers,
    in exact fractions: the most probable first, of equal ones the lowest."""
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[:k or None]
    whole = sum(weights[token] for token in order)
    reached = Fraction(0)
    kept = []
    for token in order:
        if reached >= p:
            break
        reached += Fraction(weights[token], whole)
        kept.append(token)
    return sorted(kept)


def test_top_k_keeps_exactly_k_and_top_p_the_smallest_set_that_reaches_p():
    """Of equal tokens the lowest come first. The sums of probabilities that reach p exactly do so
    in spite of rounding; in 16 bits many tokens are equal."""
    def kept(logits, k, p, temperature=1.0):
        return sample.filter_logits(logits, temperature, k, float(p)).nonzero()[:, 0].tolist()
    equal = torch.zeros(300)
    assert kept(equal, 1, 1.0) == [0] and kept(equal, 3, 1.0, 1e-6) == [0, 1, 2]
    assert kept(equal, 1000, 1.0) == kept(equal, 300, 1.0) == list(range(300))
    assert kept(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]), 2, 1.0) == [1, 2]
    assert kept(torch.tensor([1.0, 3.0, 2.0]), 2, 1.0, 1e30) == [1, 2]
    for p, count in ((0.75, 2), (0.5, 1), (0.76, 3), (0.51, 2)):
        assert kept(torch.tensor([0.5, 0.25, 0.25]).log(), 0, p) == list(range(count)), p
    rng = random.Random(0)
    for _ in range(300):
        weights = [rng.choice((1, 2, 3, 10, 50)) for _ in range(rng.choice((2, 7, 300)))]
        k = rng.choice((0, 1, 2, 5, 1000))
        top = sorted(weights, reverse=True)[:k or None]         # p that some set reaches exactly
        p = min(Fraction(sum(top[:rng.randint(1, len(top))]), sum(top)), Fraction(99, 100))
        logits = torch.tensor(weights, dtype=torch.float64).log().float() + rng.uniform(-3, 3)
        if len(set(logits.tolist())) == len(set(weights)):
            assert kept(logits, k, p) == kept_by_hand(weights, k, p), (weights, k, p)
    one = torch.randn(50257, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = kept(one, 40, 1.0)
    assert found == sorted(sorted(range(50257), key=lambda i: (-one[i].item(), i))[:40])
    assert len(kept(torch.zeros(50257), 0, 0.5)) == 25129


# ---------------------------------------------------------------------------------------------
# The table of differences
# ---------------------------------------------------------------------------------------------

def equality_table(pool, dtype, out):
    """Yields (layout, schedule, (loss, gradient, norm)): the figures of
    docs/measurements.md."""
    one = {cfg: trained(pool, (1, 1, 1), out, cfg, whole_gradient, dtype=dtype, micro_batch=8)
           for cfg in map(deep_enough, LAYOUTS)}
    for layout in LAYOUTS:
        cfg = deep_enough(layout)
        yield layout, "gpipe", equality_row(pool, layout, one[cfg], out, cfg, dtype=dtype)
    cfg = deep_enough((1, 1, 8))
    for layout in [(1, 1, 2), (4, 1, 2), (2, 2, 2), (1, 1, 4), (2, 1, 4), (1, 2, 4)]:
        for flags in (INTERLEAVED, dict(pp_schedule="zb-h1")):
            yield layout, flags["pp_schedule"], equality_row(
                pool, layout, one[cfg], out, cfg, dtype=dtype, **flags)


def exact_row(pool, dtype, out):
    """The largest (loss, gradient, norm) of all these layouts with --exact: 0."""
    cfg = replace(NARROW, n_layer=9)
    flags = dict(exact=True, dtype=dtype, micro_batch=1)
    one = trained(pool, (1, 1, 1), out, cfg, whole_gradient, **flags)
    rows = [differences(trained(pool, layout, out, cfg, whole_gradient, **flags), one)
            for layout in LAYOUTS]
    return [max(column) for column in zip(*rows)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        workers = Pool()
        tables = [equality_table(workers, dtype, folder) for dtype in ("fp32", "fp64")]
        print("| dp x tp x pp | schedule | fp32: loss | gradient | norm | fp64: loss | gradient | "
              "norm |\n" + "|---" * 8 + "|")
        for (layout, schedule, fp32), (_, _, fp64) in zip(*tables):
            cells = [" x ".join(map(str, layout)), schedule]
            cells += [f"{x:.0e}" for x in fp32 + fp64]
            print("| " + " | ".join(cells) + " |", flush=True)
        cells = []
        for dtype in ("fp32", "fp64"):
            cells += [f"{x:.0e}" for x in exact_row(workers, dtype, folder)]
        print("| all of these | exact | " + " | ".join(cells) + " |")
        workers.stop()
