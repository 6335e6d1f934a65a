"""Tensor parallelism: the loss and its memory, and what communication overlaps.

That the layers compute what the whole ones do, and torch's: test_all.py."""
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import IGNORE_INDEX, GPTConfig
from parallel import ColumnParallelLinear, ContextParallelAttention, Grid, f
from parallelism.loss import MAX_LOGITS, softmax_over_ranks, tile_loss, tile_sums
from tests.harness import (CFG, Alive, after_backward, gridded, in_turn, on_ranks,
                           random_tensor, relative, run_steps, settings, staged, tokens_of,
                           traffic, without_saves)


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


@pytest.mark.parametrize("dtype, keeps_p", [
    (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])    # False: compiled
def test_the_loss_of_a_tile_is_the_cross_entropy(dtype, keeps_p):
    """Loss and gradient of 7 positions are those of F.cross_entropy in fp64, to the type's eps."""
    logits, width = random_tensor(7, 384, seed=1).to(dtype), 300
    logits[:, width:] = torch.finfo(dtype).min
    targets = torch.tensor([0, 1, 299, IGNORE_INDEX, 128, 5, 5])
    exact = logits[:, :width].double().requires_grad_()
    expected_loss = F.cross_entropy(exact, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    (expected_loss / 4).backward()
    p = logits.to(torch.float32) if keeps_p else None       # in fp32 the logits themselves
    sums = tile_sums(logits, p, targets, 0)
    loss, at_columns = tile_loss(logits, p, targets, sums, softmax_over_ranks(sums, None),
                                 torch.tensor(0.25))
    logits.scatter_(1, sums.columns, at_columns.to(dtype))
    assert relative(loss, expected_loss.detach()) < 1e-6
    assert relative(logits, F.pad(exact.grad, (0, 84))) < torch.finfo(dtype).eps


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


def test_a_loss_that_is_scaled_by_hand_is_refused():
    """A part of its gradients is in main_grad already."""
    local, _ = staged(replace(CFG, n_layer=1), Grid(1, 1, 1))
    with pytest.raises(RuntimeError, match="multiply the loss by head.loss_factor"):
        (local(tokens_of(CFG, 2), tokens_of(CFG, 2, seed=1)) / 2).backward()


@on_ranks
def test_f_sums_a_copy_of_the_gradient(rank, world=2):
    """Autograd may give the same tensor to another function, too."""
    x = random_tensor(2, 4, 3, seed=0).requires_grad_()
    dy, other = random_tensor(2, 4, 3, seed=rank), random_tensor(2, 4, 3, seed=1 - rank)
    before = dy.clone()
    with gridded(rank, world, tp=world, pp=1) as grid:
        f(x, grid).backward(dy)
    assert dy.equal(before) and relative(x.grad, dy + other) < 1e-15


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks
def test_attention_of_context_parallel_ranks_runs_again_once(rank, world=2, *, tmp_path, recompute):
    """Mechanism (of the memory of keys and values): alone, or with its whole block."""
    def prepare(run):
        without_saves(run)
        after_backward(run, lambda step: seen.append(attend.call_count))
    seen = []
    config = settings(tmp_path, steps=1, cp=world, recompute=recompute, micro_batch=2)
    with mock.patch.object(ContextParallelAttention, "attend", autospec=True,
                           side_effect=ContextParallelAttention.attend) as attend:
        run_steps(rank, world, (1, 1, 1), config, replace(CFG, n_layer=1), prepare=prepare)
    assert seen == [2 * 4]                              # in each of four microbatches
