"""Mixtures of experts: routers, their losses and biases, and experts divided over replicas.

That they train in every layout as in one process: tests/test_layouts.py."""
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import checkpoint
from base.flops import flops_per_token
from base.options import Config
from model import IGNORE_INDEX
from models.moe import MoEConfig
from tests.harness import (BOUNDS, Memory, assert_same_rows, random_gpt, relative, run_steps,
                           settings, tokens_of, trained, whole_gradient, without_saves)
from tests.test_layouts import MODELS


@pytest.mark.parametrize("name", [
    name for name, cfg in MODELS.items() if isinstance(cfg, MoEConfig)])
def test_a_mixture_is_the_sum_over_tokens_of_their_experts(name):
    """A block's mixture beside a loop over tokens and over their experts."""
    model = random_gpt(MODELS[name])
    mixture = model.blocks["0"].mlp
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    y = mixture(x)
    scores = F.linear(x, mixture.router.weight).softmax(-1)
    expected = torch.zeros_like(x)
    for place in ((b, t) for b in range(2) for t in range(7)):
        ranked = scores[place]
        if mixture.router.bias is not None:
            ranked = ranked + mixture.router.bias
        chosen = ranked.argsort(descending=True)[:model.cfg.n_active]
        weights = scores[place][chosen]
        if model.cfg.normalised:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights):
            gate, value = F.linear(x[place], mixture.experts.up.weight[expert]).chunk(2)
            hidden = F.silu(gate) * value
            expected[place] += weight * F.linear(hidden, mixture.experts.down.weight[expert])
    if mixture.shared is not None:
        expected += mixture.shared(x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("has_all_targets", [True, False])
def test_the_value_is_the_cross_entropy_and_the_gradient_has_the_losses_of_all_routers(
        has_all_targets):
    """Beside autograd of the cross-entropy plus the losses, by their formulas. Those are means over
    all tokens, with or without a target."""
    cfg = MODELS["shared, bias"]
    tokens = tokens_of(cfg, 2)
    has_target = (tokens % 4 == 0) | has_all_targets
    targets = tokens.roll(-1, 1).masked_fill(~has_target, IGNORE_INDEX)
    share = has_target.double().mean()
    model = random_gpt(cfg)
    value = model(tokens, targets)
    value.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    found = []
    for block in model.blocks.values():
        block.mlp.router.register_forward_pre_hook(lambda router, x: found.append((router, *x)))
    model.zero_grad()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum",
                               ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(value, expected)
    for router, x in found:
        logits = F.linear(x, router.weight)
        scores = logits.softmax(-1)
        chosen = (scores + router.bias).topk(cfg.n_active).indices
        count = F.one_hot(chosen, cfg.n_expert).sum((1, 2))
        T = tokens.shape[1]
        per_sequence = (count / T * scores.sum(1) / T).sum(-1) * cfg.n_expert / cfg.n_active
        losses = cfg.balance_loss * T * per_sequence.sum()
        losses = losses + cfg.z_loss * logits.logsumexp(-1).square().sum()
        expected = expected + share * losses
    expected.backward()
    for name, gradient in ours.items():
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


class Padded(Memory):
    """Rows of two texts and, at their end, padding of the token `filler`. About one target in four
    counts in the loss, as in conversations."""

    def read(self, window_ids):
        tokens, places, has_loss = super().read(window_ids)
        number = np.asarray(window_ids)[:, None]
        begin, end = 5 + number % 4, 11 + number % 3            # of the second text
        is_text = places < end
        positions = np.where(places < begin, places, places - begin) * is_text
        has_loss = has_loss & is_text & (tokens % 4 == 0)
        return np.where(is_text, tokens, self.filler), positions, has_loss

    def count_targets(self, window_ids):
        _, targets, _ = self.rows(window_ids)
        return int((targets != IGNORE_INDEX).sum())


def with_padding(run, filler):
    run.train_data.__class__ = Padded
    run.train_data.has_conversations, run.train_data.filler = True, filler
    without_saves(run)


def gradient_loads_and_bias(run):
    """Of all blocks, on rank 0; the bias is that after the update."""
    whole = whole_gradient(run)
    if not whole:
        return None
    for name, block in run.model.blocks.items():
        whole[f"load {name}"] = block.mlp.router.load.double()
        whole[f"bias {name}"] = block.mlp.router.bias.detach().clone()
    return whole


@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), dict(recompute=True)), ((1, 1, 1), dict(exact=True)),
    ((1, 2, 1), dict(sequence_parallel=True)), ((2, 1, 1), dict(ep=2)),
    pytest.param((2, 1, 2), dict(ep=2, pp_schedule="1f1b"), marks=pytest.mark.slow),
    pytest.param((1, 1, 1), dict(cp=2), marks=pytest.mark.slow)])
def test_padding_is_outside_of_losses_of_routers_their_loads_and_their_bias(pool, tmp_path, layout,
                                                                            flags):
    """Other tokens in the padding change nothing in the first step, whose gradients are those of
    the plain model, and layouts agree: gradients, loss of the routers, loads of a block, and what
    its bias moves by. (Exact sums round to 1e-8.)"""
    cfg, bound = MODELS["shared, bias"], 1e-7 if "exact" in flags else 1e-10

    def first_step(filler, layout=(1, 1, 1), **flags):
        one = trained(pool, layout, tmp_path, cfg, gradient_loads_and_bias, dtype="fp64", steps=1,
                      prepare=partial(with_padding, filler=filler), **flags)
        return one.rows[0], one.seen[0]
    row, seen = first_step(0)
    dataset = Padded(cfg)
    dataset.has_conversations, dataset.filler = True, 0
    ids = dataset.window_ids(Config.seed, 0, 8)
    inputs, targets, positions = map(torch.from_numpy, dataset.rows(ids))
    count, plain = dataset.count_targets(ids), cfg.build().initialize(Config.seed).double()
    (plain(inputs, targets, positions=positions) / count).backward()
    assert 10 < count < targets.numel() / 3
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            rows = len(seen[name])                  # without padding
            assert relative(seen[name], parameter.grad[:rows]) <= 1e-10, name
    text = sum((11 + number % 3) for number in ids)
    assert seen["load 0"].sum() == cfg.n_active * text
    excess = cfg.n_expert * seen["load 0"] - seen["load 0"].sum()
    torch.testing.assert_close(seen["bias 0"], -cfg.balance_bias * excess.sign())
    for filler in (0, 9):
        other, gradients = first_step(filler, layout, **flags)
        for name in ("loss", "router_loss", "grad_norm", "load/0", "dead_experts"):
            assert other[name] == pytest.approx(row[name], rel=bound), name
        for name, value in gradients.items():
            if not name.startswith("load"):                 # those of rank 0 alone
                assert relative(value, seen[name]) <= bound, name


def differ_on_tp_ranks(run):
    """The routers of tp rank 1 become others."""
    generator = torch.Generator().manual_seed(1)
    for bucket in run.flat.buckets:
        if bucket.is_wide and run.grid.tp_rank == 1:
            master = bucket.shard["master"]
            master += 1e-3 * torch.randn(master.shape, generator=generator, dtype=master.dtype)
    without_saves(run)


def loads_of_blocks(run):
    return [block.mlp.router.load.tolist() for block in run.model.blocks.values()]


def test_tp_ranks_choose_the_same_experts_although_their_routers_differ(pool, tmp_path):
    """Otherwise ranks would send other numbers of rows than their partners expect. The losses stay
    near those of equal routers."""
    cfg = MODELS["qwen3-moe"]
    config = settings(tmp_path, steps=3)
    ranks = pool.run(4, run_steps, (2, 2, 1), replace(config, tp=2, ep=2), cfg, loads_of_blocks,
                     None, differ_on_tp_ranks)
    one = run_steps(0, 1, (1, 1, 1), config, cfg, prepare=without_saves)
    assert_same_rows(ranks[0].rows, one.rows, 1e-3)
    assert ranks[0].seen == ranks[1].seen and ranks[2].seen == ranks[3].seen


@pytest.mark.claim("A checkpoint of divided experts has no layout.")
def test_a_run_continues_with_other_parts_of_the_experts(pool, tmp_path, reference):
    """Two steps with ep 4 and ZeRO 1, saved, then two more in another layout: the numbers of four
    steps in one process."""
    cfg = MODELS["shared, bias"]
    run = dict(dtype="fp64", steps=4, lr=1e-2, warmup_steps=1)
    trained(pool, (4, 1, 1), tmp_path / "half", cfg, ep=4, zero=1, save_every=2, **run)
    half = tmp_path / "half" / "step_00000002.pt"
    assert checkpoint.load(half)["parameters"].keys() == checkpoint.parameter_shapes(cfg).keys()
    ours = trained(pool, (2, 1, 2), tmp_path / "rest", cfg, state=half, prepare=without_saves,
                   ep=2, zero=2, **run)
    one = reference(cfg, **run)
    assert relative(ours.state["master"], one.state["master"]) <= 1e-9
    assert relative(ours.rows[-1]["val_loss"], one.rows[-1]["val_loss"]) <= BOUNDS["fp64"]


def test_flops_count_the_experts_of_a_token_alone():
    """K experts cost what an MLP of K times the channels costs. The router comes on top."""
    cfg = MoEConfig(n_expert=8, n_active=2, hidden=64, shared_hidden=32)
    dense = MoEConfig(n_expert=1, n_active=1, hidden=2 * 64 + 32)
    routers = 6 * cfg.n_layer * (8 - 1) * cfg.n_embd
    assert flops_per_token(cfg) - routers == flops_per_token(dense)
    assert flops_per_token(cfg, True) - routers == flops_per_token(dense, True)
