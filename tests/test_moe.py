"""Mixtures of experts: the same numbers as transformers, and one process's in every layout.

    python -m pytest tests/test_moe.py
"""
import functools
import json
import math
import signal
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import checkpoint
import parallel
import sample
from amp import PRECISIONS
from base.flops import active_parameters, flops_per_token, parameter_count
from base.options import Config, merge_config
from model import IGNORE_INDEX, initial_value
from models import SIZES, make_config
from models.llama import LlamaConfig
from models.moe import FAMILIES, MoEConfig
from parallelism import zero
from parallelism.buckets import state_bytes
from parallelism.build import Grid, build_stage, rank_buckets
from parallelism.collectives import all_reduce
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters
from runtime import layout_checks
from tests.harness import (BOUNDS, INTERLEAVED, TWO_STEPS, Command, Memory, after_backward,
                           assert_same_rows, assert_same_state, different_bits, different_rows,
                           differences, expect_mistake, kinds, launch, losses_of_plain_program,
                           nothing, on_ranks, own_processes, plain_gradient, poison, random_gpt,
                           read_metrics, relative, run_steps, saved, settings, tokens_of, trained,
                           wait_for_step, watched, whole_gradient, without_saves)
from tests.test_combinations import compiled_steps
from tests.test_flipped_bits import STEPS, Flip, equal_states, events_of, inject
from tools import huggingface, huggingface_families
from tools.plan.__main__ import answer

# ---------------------------------------------------------------------------------------------
# transformers
# ---------------------------------------------------------------------------------------------

# (model_type, what differs from SMALL in config.json)
SMALL = dict(vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
             num_experts_per_tok=2)
OF_OLMOE = dict(pad_token_id=None, eos_token_id=None)
THEIRS = {
    "mixtral": ("mixtral", dict(num_local_experts=5, sliding_window=7)),
    "olmoe": ("olmoe", OF_OLMOE | dict(num_experts=7, num_experts_per_tok=3)),
    "olmoe, grouped": ("olmoe", OF_OLMOE | dict(num_experts=4, num_key_value_heads=3,
                                                norm_topk_prob=True)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=6, moe_intermediate_size=32, head_dim=16,
                                    norm_topk_prob=True, tie_word_embeddings=True))}


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory):
    """theirs_and_ours(name, changes of its config) -> a folder of a transformers model with random
    weights, that model, and the file that `import` makes of it."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def make(name, **more):
        key = name, *more.items()
        if key not in made:
            model_type, changes = THEIRS[name]
            config = transformers.AutoConfig.for_model(model_type, **SMALL | changes | more)
            torch.manual_seed(0)
            theirs = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager").eval()
            for parameter in theirs.parameters():
                torch.nn.init.normal_(parameter, 0 if parameter.dim() > 1 else 1, 0.15)
            folder = tmp_path_factory.mktemp("theirs") / model_type
            theirs.save_pretrained(folder)
            file = folder.parent / "model.pt"
            huggingface.import_model(str(folder), file)
            made[key] = folder, theirs, file
        return made[key]
    return make


@contextmanager
def in_their_widest(dtype):
    """Let transformers compute norms, rotary positions and routers in fp64 for a model in it."""
    if dtype == torch.float32:
        yield
        return
    with mock.patch.object(torch, "float32", dtype), mock.patch.object(torch, "float", dtype), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def difference(x, y):
    return ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()


@pytest.mark.claim("Logits and gradients of mixtures are those of three transformers classes.")
@pytest.mark.parametrize("dtype, bound", [
    (torch.float64, 1e-10), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_gradients_are_those_of_transformers(theirs_and_ours, name, dtype, bound):
    """With the same weights, logits and the gradient of each parameter relative to its largest.
    The losses of the routers are left out, because transformers' is of a microbatch."""
    _, theirs, file = theirs_and_ours(name)
    theirs = theirs.to(dtype)
    trained, _ = checkpoint.load_model(file)
    ours = replace(trained.cfg, balance_loss=0.0, z_loss=0.0).build()
    ours.load_state_dict(trained.state_dict())
    ours = ours.to(dtype)
    tokens = tokens_of(replace(ours.cfg, seq_len=40), 2)
    with in_their_widest(dtype):
        expected = theirs(tokens).logits
    assert difference(ours(tokens), expected) < bound

    targets = tokens.roll(-1, 1)
    ours(tokens, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    family = huggingface_families.family_of(theirs.config)
    gradients = {name: parameter.grad.double() for name, parameter in theirs.named_parameters()}
    theirs.zero_grad()
    for name, parameter in ours.named_parameters():
        names = huggingface_families.their_names(name, family)
        full = huggingface_families.to_ours(name, [gradients[one] for one in names], family,
                                            ours.cfg)
        assert difference(parameter.grad[:len(full)], full) < 10 * bound, name


@pytest.mark.parametrize("name", [
    "olmoe", *(pytest.param(name, marks=pytest.mark.slow) for name in THEIRS if name != "olmoe")])
def test_greedy_text_is_that_of_full_recomputation_by_transformers(theirs_and_ours, name):
    """Thirty tokens with our cache, beside transformers' model without one."""
    _, theirs, file = theirs_and_ours(name)
    ours, _ = checkpoint.load_model(file)
    tokens = [3, 1, 4, 1, 5]
    found = [drawn[0] for drawn in sample.generate(ours.double(), tokens, 30, set(), temperature=0)]
    theirs = theirs.double()
    for _ in found:
        tokens.append(theirs(torch.tensor([tokens])).logits[0, -1].argmax().item())
    assert found == tokens[5:]


# ---------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------

SHAPE = dict(vocab_size=257, seq_len=16, n_layer=3, n_head=8, n_embd=32, hidden=16, n_kv_head=4,
             balance_loss=0.1)
CFGS = {
    "mixtral": MoEConfig(**FAMILIES["mixtral"] | SHAPE),
    "shared, bias": MoEConfig(**FAMILIES["mixtral"] | SHAPE | dict(
        balance_bias=0.01, shared_hidden=24, n_active=3, z_loss=0.01)),
    "olmoe": MoEConfig(**FAMILIES["olmoe"] | SHAPE | dict(n_expert=16, n_active=4)),
    "qwen3-moe": MoEConfig(**FAMILIES["qwen3-moe"] | SHAPE | dict(n_expert=16, n_active=4)),
    "few tokens": MoEConfig(**FAMILIES["mixtral"] | SHAPE | dict(n_expert=64, n_active=1,
                                                                  normalised=False))}


@pytest.mark.parametrize("name, vocab, count, active", [
    ("mixtral-8x7b", 32000, 46_702_792_704, 12.9e9),
    ("mixtral-8x22b", 32768, 140_630_071_296, 39.2e9),
    ("olmoe-1b-7b", 50304, 6_919_161_856, 1.28e9),
    ("qwen3-30b-a3b", 151936, 30_532_122_624, 3.35e9),
    ("qwen3-235b-a22b", 151936, 235_093_634_560, 22.2e9)])
def test_parameters_are_as_many_as_published(name, vocab, count, active):
    cfg = make_config(vocab_size=vocab, **SIZES[name])
    assert parameter_count(cfg) == count
    assert active_parameters(cfg) == pytest.approx(active, rel=0.005)


def test_flops_count_the_experts_of_a_token_alone():
    """K experts cost what an MLP of K times the channels costs. The router comes on top."""
    cfg = MoEConfig(n_expert=8, n_active=2, hidden=64, shared_hidden=32)
    dense = MoEConfig(n_expert=1, n_active=1, hidden=2 * 64 + 32)
    routers = 6 * cfg.n_layer * (8 - 1) * cfg.n_embd
    assert flops_per_token(cfg) - routers == flops_per_token(dense)
    assert flops_per_token(cfg, True) - routers == flops_per_token(dense, True)


@pytest.mark.parametrize("name", CFGS)
def test_a_mixture_is_the_sum_over_tokens_of_their_experts(name):
    """A block's mixture beside a loop over tokens and over their experts."""
    model = random_gpt(CFGS[name])
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


def test_the_balancing_loss_is_one_where_experts_are_used_alike():
    """Per token, with a factor of 1; E / K where all tokens choose the same K with score 1 / K."""
    cfg = MoEConfig(n_expert=4, n_active=2, balance_loss=1.0)
    router = cfg.build().blocks["0"].mlp.router
    scores = torch.full((1, 6, 4), 0.25)
    even = torch.full((1, 4), 3)
    assert router.balance_loss(scores, even, 6).item() == pytest.approx(6)
    scores = torch.tensor([0.5, 0.5, 0, 0]).expand(1, 6, 4)
    assert router.balance_loss(scores, torch.tensor([[6, 6, 0, 0]]), 6).item() == pytest.approx(12)


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe"])
def test_an_imported_block_has_the_loss_of_transformers_with_that_of_its_router(theirs_and_ours,
                                                                               name, padding):
    """Loss, gradient of the router and load of one sequence, whose end may be padding, in a model
    of one layer. An export has the factor that the import has read."""
    _, theirs, file = theirs_and_ours(name, num_hidden_layers=1, router_aux_loss_coef=0.03)
    trained, _ = checkpoint.load_model(file)
    ours = replace(trained.cfg, z_loss=0.0).build()
    ours.load_state_dict(trained.state_dict())
    theirs, ours, T = theirs.double(), ours.double(), 32
    tokens = tokens_of(replace(ours.cfg, seq_len=T), 1)
    text = (torch.arange(T) < T - padding).expand(1, T)
    labels = tokens.masked_fill(~text, -100)
    with in_their_widest(torch.float64):
        expected = theirs(tokens, attention_mask=text.long(), labels=labels,
                          output_router_logits=True).loss
    expected.backward()

    targets = labels[:, 1:].masked_fill(labels[:, 1:] < 0, IGNORE_INDEX)
    targets = F.pad(targets, (0, 1), value=IGNORE_INDEX)
    positions = torch.arange(T).expand(1, T) * text if padding > 0 else None
    value = ours(tokens, targets, positions=positions) / (T - padding - 1)
    value.backward()
    router = ours.blocks["0"].mlp.router
    assert value.item() + router.losses.item() / T == pytest.approx(expected.item(), abs=1e-6)
    assert value.item() < expected.item() - 0.02
    gradient = theirs.get_submodule("model.layers.0.mlp.gate").weight.grad
    assert difference(router.weight.grad, gradient) < 1e-6
    theirs.zero_grad(), theirs.float()
    assert router.load.sum() == (T - padding) * ours.cfg.n_active
    config = huggingface_families.their_config(replace(trained.cfg, n_layer=1))
    assert config.router_aux_loss_coef == 0.03


class Padded(Memory):
    """Rows of two texts and, at their end, padding of the token `filler`."""
    filler = 0

    def __init__(self, cfg):
        super().__init__(cfg)
        self.has_conversations = True

    def read(self, window_ids):
        tokens, places, has_loss = super().read(window_ids)
        number = np.asarray(window_ids)[:, None]
        begin, end = 5 + number % 4, 11 + number % 3            # of the second text
        is_text = places < end
        positions = np.where(places < begin, places, places - begin) * is_text
        return np.where(is_text, tokens, self.filler), positions, has_loss & is_text

    def count_targets(self, window_ids):
        return int((self.rows(window_ids)[1] != IGNORE_INDEX).sum())


def read_padded(run, filler):
    run.train_data = Padded(run.model_config)
    run.train_data.filler = filler
    run.batches.data = run.train_data
    without_saves(run)


def gradient_loads_and_bias(run):
    """Of all blocks, on rank 0; the bias is that after the update."""
    whole = whole_gradient(run)
    if whole is None:
        return None
    routers = {name: block.mlp.router for name, block in run.model.blocks.items()}
    whole |= {f"load {name}": router.load.double() for name, router in routers.items()}
    return whole | {f"bias {name}": router.bias.detach().clone()
                    for name, router in routers.items()}


@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), dict(recompute=True)),
    ((1, 1, 1), dict(micro_batch=8)),
    ((1, 1, 1), dict(exact=True)),
    ((1, 2, 1), dict(ep=1, sequence_parallel=True)),
    pytest.param((1, 2, 1), dict(exact=True, sequence_parallel=True), marks=pytest.mark.slow),
    pytest.param((2, 1, 2), dict(ep=2, pp_schedule="zb-h1", recompute=True),
                 marks=pytest.mark.slow),
    pytest.param((1, 1, 1), dict(cp=2), marks=pytest.mark.slow)])
def test_padding_is_outside_of_losses_of_routers_their_loads_and_their_bias(pool, tmp_path, layout,
                                                                            flags):
    """Other tokens in the padding change nothing in the first step, and layouts agree: gradients,
    loss of the routers, loads of a block, and what its bias moves by. (Exact sums round to 1e-8.)
    """
    cfg, bound = CFGS["shared, bias"], 1e-7 if "exact" in flags else 1e-10

    def first_step(filler, layout=(1, 1, 1), **flags):
        one = trained(pool, layout, tmp_path, cfg, gradient_loads_and_bias, dtype="fp64", steps=1,
                      prepare=partial(read_padded, filler=filler), **flags)
        return one.rows[0], one.seen[0]
    row, seen = first_step(0)
    text = sum((11 + number % 3) for number in Memory(cfg).window_ids(Config.seed, 0, 8))
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


def test_the_value_is_the_cross_entropy_and_the_gradient_has_the_losses_of_all_routers():
    """Beside autograd of the cross-entropy plus the losses, by their formulas."""
    cfg = CFGS["shared, bias"]
    tokens = tokens_of(cfg, 2)
    targets = tokens.roll(-1, 1)
    model = random_gpt(cfg)
    value = model(tokens, targets)
    value.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    found = []
    for block in model.blocks.values():
        block.mlp.router.register_forward_pre_hook(lambda router, x: found.append((router, *x)))
    model.zero_grad()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(value, expected)
    for router, x in found:
        logits = F.linear(x, router.weight)
        scores = logits.softmax(-1)
        chosen = (scores + router.bias).topk(cfg.n_active).indices
        count = F.one_hot(chosen, cfg.n_expert).sum((1, 2))
        T = tokens.shape[1]
        per_sequence = (count / T * scores.sum(1) / T).sum(-1) * cfg.n_expert / cfg.n_active
        expected = expected + cfg.balance_loss * T * per_sequence.sum()
        expected = expected + cfg.z_loss * logits.logsumexp(-1).square().sum()
    expected.backward()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10,
                                   atol=1e-12)


def test_without_gradients_a_router_computes_no_losses():
    cfg = CFGS["mixtral"]
    model = random_gpt(cfg)
    tokens = tokens_of(cfg, 2)
    with torch.no_grad():
        value = model(tokens, tokens)
    assert not hasattr(model.blocks["0"].mlp.router, "losses")
    assert model(tokens, tokens).equal(value) and model.blocks["0"].mlp.router.losses > 0


class FewTargets(Memory):
    """About one target in four counts in the loss, as in conversations."""

    def read(self, window_ids):
        tokens, positions, has_loss = super().read(window_ids)
        return tokens, positions, has_loss & (tokens % 4 == 0)

    def count_targets(self, window_ids):
        _, targets, _ = self.rows(window_ids)
        return int((targets != IGNORE_INDEX).sum())


def with_few_targets(run):
    run.train_data.__class__ = FewTargets
    without_saves(run)


@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), {}),
    pytest.param((2, 1, 2), dict(ep=2), marks=pytest.mark.slow)])
def test_losses_of_routers_are_means_over_all_tokens_with_or_without_a_target(pool, tmp_path,
                                                                              layout, flags):
    """The gradient of a run, of the plain model, and of the mean cross-entropy of the targets plus
    the mean losses of the tokens."""
    cfg = CFGS["shared, bias"]
    ours = trained(pool, layout, tmp_path, cfg, whole_gradient, prepare=with_few_targets,
                   dtype="fp64", steps=1, **flags).seen[0]
    dataset = FewTargets(cfg)
    ids = dataset.window_ids(Config.seed, 0, 8)
    inputs, targets = map(torch.from_numpy, dataset.rows(ids)[:2])
    count = dataset.count_targets(ids)
    assert 10 < count < targets.numel() / 3
    plain, expected = (cfg.build().initialize(Config.seed).double() for _ in range(2))
    (plain(inputs, targets) / count).backward()

    logits = expected(inputs).flatten(0, 1)
    losses = sum(block.mlp.router.losses for block in expected.blocks.values())
    (F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX)
     + losses / targets.numel()).backward()
    for name, parameter in expected.named_parameters():
        if parameter.requires_grad:
            rows = len(ours[name])                  # without padding
            assert relative(plain.get_parameter(name).grad, parameter.grad) <= 1e-10, name
            assert relative(ours[name], parameter.grad[:rows]) <= 1e-10, name


def prefer_two_experts(run):
    """All tokens choose the experts 0 and 1, whose bias is larger than scores differ."""
    run.model.blocks["0"].mlp.router.bias.data[:2] = 0.1
    without_saves(run)


def bias_and_load(run):
    router = run.model.blocks["0"].mlp.router
    return router.bias.detach().clone(), router.load.clone()


def test_a_bias_balances_without_a_loss(tmp_path):
    """Tokens that all choose two experts are spread over eight, where nothing but the bias is
    trained. Experts with more tokens than the mean lose 0.002 in a step, those with fewer win it.
    """
    cfg = MoEConfig(**SHAPE | dict(n_layer=1, balance_bias=0.002, balance_loss=0.0))
    config = settings(tmp_path, steps=40, lr=0.0, weight_decay=0.0)
    seen = run_steps(0, 1, (1, 1, 1), config, cfg, bias_and_load, prepare=prefer_two_experts).seen
    tokens = 8 * 16
    assert seen[0][1].tolist() == [tokens] * 2 + [0] * 6
    torch.testing.assert_close(seen[0][0], torch.tensor([0.098] * 2 + [0.002] * 6))
    for (before, _), (after, load) in zip(seen, seen[1:]):
        expected = before - 0.002 * (load - tokens * 2 / 8).sign()
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-7)
    assert seen[-1][1].max() < 1.5 * tokens * 2 / 8


def offloaded(run):
    """The masters are apart from the parameters, and updated bucket by bucket, as with --offload on
    a GPU."""
    for bucket in run.flat.buckets:
        bucket.shard["master"] = bucket.shard["master"].clone()
    longest = max(len(bucket.shard["master"]) for bucket in run.flat.buckets)
    run.flat.staging = torch.empty(2, longest)
    without_saves(run)


def test_a_bias_moves_the_same_with_offload(tmp_path):
    """Bit for bit, in the parameters, too."""
    cfg = replace(CFGS["shared, bias"], n_layer=2)
    plain, ours = (run_steps(0, 1, (1, 1, 1), settings(tmp_path, steps=3), cfg, bias_and_load,
                             prepare=prepare) for prepare in (without_saves, offloaded))
    assert different_bits(ours, plain) == ""
    assert all(one.equal(two) for row in zip(ours.seen, plain.seen) for one, two in zip(*row))
    assert ours.seen[2][0].any()


def slowed_after_step_30(run):
    """The learning rate is that behind a rollback."""
    def slow(step):
        if step == 30:
            run.divergence.lr_factor = 0.6
    after_backward(run, slow)


def test_a_mixture_that_goes_back_has_the_bits_of_one_that_never_diverged(tmp_path):
    """Weights, biases and loads. From step 43 the run goes back to step 30, and leaves out the
    batches of steps 33 to 43."""
    cfg = replace(CFGS["shared, bias"], n_layer=1)
    config = settings(tmp_path / "ours", steps=50, save_every=10, keep=9, micro_batch=8)
    ours = watched(config, poison, cfg=cfg)
    assert kinds(ours.events) == ["spike", "rollback", "skip"]
    assert (ours.events[1]["step"], ours.events[1]["to"]) == (43, 30)
    smooth = replace(config, out=str(tmp_path / "smooth"), skip_steps="33:43")
    one = watched(smooth, slowed_after_step_30, cfg=cfg)
    assert different_rows(ours.rows[:30] + ours.rows[43:], one.rows) == ""
    end, expected = (saved(tmp_path / name, 50) for name in ("ours", "smooth"))
    for key in checkpoint.STATE:
        assert all(end[key][name].equal(full) for name, full in expected[key].items()), key
    assert end["parameters"]["blocks.0.mlp.router.bias"].any()


@pytest.mark.parametrize("fields, words", [
    (dict(n_active=0), "n_active 0 is not between 1 and n_expert 8: give --n-active of 1 to 8"),
    (dict(n_active=1), "n_active 1 with normalised weights: .* Give --n-active of 2 to 8, or a "
     "model of the family olmoe"),
    (dict(gated=False), "an expert is a gated MLP without biases"),
    (dict(bias="all"), "an expert is a gated MLP without biases")])
def test_a_shape_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**fields)


def test_a_config_is_stored_and_made_again():
    cfg = CFGS["shared, bias"]
    assert make_config(**asdict(cfg)) == cfg and isinstance(make_config(**asdict(cfg)), MoEConfig)


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------

LAYOUTS = {             # (dp x tp x pp, flags)
    "tp": ((1, 2, 1), {}), "tp, sequence": ((1, 2, 1), dict(sequence_parallel=True)),
    "gpipe": ((1, 1, 2), dict(pp_schedule="gpipe")),
    "1f1b, zero 2": ((2, 1, 2), dict(pp_schedule="1f1b", zero=2)),
    "interleaved": ((1, 1, 2), INTERLEAVED), "zb-h1": ((1, 1, 2), dict(pp_schedule="zb-h1")),
    "zero 1": ((2, 1, 1), dict(zero=1)),
    "zero 3, recompute": ((2, 1, 1), dict(zero=3, recompute=True)),
    "cp": ((1, 1, 1), dict(cp=2)),
    "cp, tp, sequence": ((1, 2, 1), dict(cp=2, sequence_parallel=True)),
    "ep": ((2, 1, 1), dict(ep=2)), "ep 4": ((4, 1, 1), dict(ep=4, recompute=True)),
    "ep, zero 2": ((4, 1, 1), dict(ep=2, zero=2)),
    "ep, zero 3, all": ((4, 1, 1), dict(ep=4, zero=3, recompute=True)),
    "ep, tp": ((2, 2, 1), dict(ep=2)), "ep, pp": ((2, 1, 2), dict(ep=2, pp_schedule="1f1b")),
    "ep, zb-h1": ((2, 1, 2), dict(ep=2, pp_schedule="zb-h1")),
    "ep, cp": ((1, 1, 1), dict(ep=2, cp=2)), "ep, dp, cp": ((2, 1, 1), dict(ep=4, cp=2, zero=1))}
ROWS = {
    # What tests/test_combinations.py does not have: layouts without ep, and ep 4.
    "shared, bias": ("tp", "tp, sequence", "gpipe", "1f1b, zero 2", "interleaved", "zb-h1",
                     "zero 1", "zero 3, recompute", "cp", "cp, tp, sequence", "ep 4", "ep, dp, cp"),
    # Experts, and ranks, without a token.
    "few tokens": ("tp, sequence", "1f1b, zero 2", "ep", "ep, zero 2", "ep, zero 3, all", "ep, tp",
                   "ep, zb-h1", "ep, cp"),
    # The families differ in their norms and weights, which tp, cp and sequence parallelism cut.
    "olmoe": ("tp", "tp, sequence", "cp, tp, sequence", "ep, tp"),
    "qwen3-moe": ("cp, tp, sequence", "ep, tp"), "mixtral": ("ep, pp",)}
BY_DEFAULT = [("few tokens", "ep, tp"), ("shared, bias", "zb-h1"), ("olmoe", "tp")]


@functools.cache
def gradient_of_plain(cfg):
    """harness.plain_gradient. Of a router's bias it is E counts less their sum."""
    gradients = dict(plain_gradient(cfg))
    if cfg.balance_bias > 0:
        plain = cfg.build().initialize(Config.seed).double()
        dataset = Memory(cfg)
        tokens = torch.from_numpy(dataset.tokens_of(dataset.window_ids(Config.seed, 0, 8)))
        plain(tokens[:, :-1])
        loads = plain.loads()
        for layer, excess in enumerate(cfg.n_expert * loads - loads.sum(1, keepdim=True)):
            gradients[f"blocks.{layer}.mlp.router.bias"] = excess
    return gradients


@pytest.mark.claim("A mixture of experts trains in every layout, its experts divided over "
                   "replicas, too, as it does in one process.")
@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=() if (name, layout) in BY_DEFAULT else pytest.mark.slow)
    for name, layouts in ROWS.items() for layout in layouts])
def test_mixtures_train_in_every_layout_as_in_one_process(pool, tmp_path, reference, name, layout):
    """Loss, gradient, norm and final weights of two steps in fp64 are those of one process, and the
    first gradients those of the plain model by autograd: relative difference at most 1e-10."""
    shape, flags = LAYOUTS[layout]
    cfg = replace(CFGS[name], n_layer=shape[2] * flags.get("pp_chunks", 1) + 1)
    ours = trained(pool, shape, tmp_path, cfg, whole_gradient, prepare=without_saves, dtype="fp64",
                   **TWO_STEPS, **flags)
    one = reference(cfg, dtype="fp64", **TWO_STEPS)
    assert max(differences(ours, one)) <= BOUNDS["fp64"]
    assert relative(ours.seen[0], gradient_of_plain(cfg)) <= BOUNDS["fp64"]
    assert relative(ours.state["master"], one.state["master"]) <= BOUNDS["fp64"]


@on_ranks
def test_plain_experts_have_the_gradients_of_all(rank, world=4):
    """Four replicas, two of which share the experts: parallel.plain_experts, for 64 experts. Most
    get no token."""
    cfg = CFGS["few tokens"]
    tokens = tokens_of(cfg, 5)
    inputs, targets = tokens[:4], tokens[1:]
    whole = random_gpt(cfg)
    whole(inputs, targets).backward()
    grid = parallel.Grid(world, 1, 1, rank, ep=2)
    parallel.make_groups(grid)
    part = random_gpt(cfg)
    parallel.plain_expert_parallel(part, grid)
    buckets = parallel.plain_buckets(part, grid)
    for bucket in buckets:
        bucket.begin_step(1)
    part(inputs[rank:rank + 1], targets[rank:rank + 1]).backward()
    for bucket in buckets:
        bucket.finish()
    for name, parameter in part.named_parameters():
        expected = whole.get_parameter(name).grad
        if hasattr(parameter, "is_expert"):
            expected = expected.chunk(2)[grid.ep_rank]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-10)
    grid.groups.clear()


@pytest.mark.parametrize("world, ep", [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_the_plain_program_trains_a_mixture_as_train_py_does(pool, shards, tmp_path, world, ep):
    """In fp32, from the first step on while the learning rate is small: to 1e-5."""
    vocab = json.loads((shards / "meta.json").read_text())["vocab_size"]
    cfg = MoEConfig(vocab_size=vocab, **SIZES["moe-nano"])
    found = pool.run(world, partial(losses_of_plain_program, ep=ep, config=cfg), 1, 1, shards, 3)[0]
    rows = trained(pool, (1, 1, 1), tmp_path, cfg, prepare=without_saves, data=str(shards),
                   steps=3, batch_size=16, warmup_steps=50, lr=4e-3, min_lr_ratio=1.0).rows
    assert found == pytest.approx([row["loss"] for row in rows], rel=1e-5)


@pytest.mark.parametrize("layout, flags", [
    ((2, 1, 1), dict(ep=2)),
    pytest.param((2, 1, 2), dict(ep=2, recompute=True, pp_schedule="1f1b"),
                 marks=pytest.mark.slow),
    pytest.param((1, 2, 1), dict(cp=2, ep=2, sequence_parallel=True), marks=pytest.mark.slow)])
def test_the_log_has_the_load_of_each_block_and_the_losses_of_the_routers(pool, tmp_path, layout,
                                                                          flags):
    """Beside the plain model's, of the first step. The loss stays the cross-entropy."""
    cfg = CFGS["shared, bias"]
    ours = trained(pool, layout, tmp_path, cfg, prepare=without_saves, dtype="fp64", steps=1,
                   **flags).rows[0]
    plain = cfg.build().initialize(Config.seed).double()
    losses = []
    for block in plain.blocks.values():
        block.mlp.router.register_forward_hook(lambda router, *_: losses.append(router.losses))
    tokens = torch.from_numpy(Memory(cfg).tokens_of(Memory(cfg).window_ids(Config.seed, 0, 8)))
    logits = plain(tokens[:, :-1])
    loads = plain.loads().double()
    assert [ours[f"load/{layer}"] for layer in range(cfg.n_layer)] == pytest.approx(
        (loads.amax(1) / loads.mean(1)).tolist())
    assert ours["dead_experts"] == (loads == 0).sum()
    count = tokens[:, 1:].numel()
    assert ours["router_loss"] == pytest.approx(sum(losses).item() / count)
    assert ours["loss"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_rank_draws_its_own_experts_alone_and_one_at_a_time(monkeypatch, ep):
    """Each with values that depend on the seed, the name and the number of the expert."""
    cfg = CFGS["mixtral"]
    drawn = []

    def noted(_, name, shape, seed):
        drawn.append((name, shape))
        return initial_value(cfg, name, shape, seed)
    monkeypatch.setattr(zero, "initial_value", noted)
    grid = Grid(4, 1, 2, 5, ep=ep)
    flat = FlatParameters(param_specs(build_stage(cfg, grid), cfg, grid), grid, torch.float32,
                          torch.float32, "cpu", training=False)
    flat.initialize(cfg, 0)
    plain = cfg.build().initialize(0)
    for bucket in flat.buckets:
        for spec in bucket.specs:
            full = plain.get_parameter(spec.name).detach()[:spec.shape[0]]
            assert bucket.view(bucket.data, spec)[:len(spec.cut(full, grid))].equal(
                spec.cut(full, grid)), spec.name
    of_experts = [(name, shape) for name, shape in drawn if "experts" in name]
    assert len(of_experts) == cfg.n_layer * 2 * cfg.n_expert // ep
    assert {shape for _, shape in of_experts} == {(32, 32), (32, 16)}
    up = plain.blocks["0"].mlp.experts.up.weight
    assert not up[0].equal(up[1]) and abs(up.std() / 0.02 - 1) < 0.05


@on_ranks
def test_a_step_sums_its_statistics_in_one_message(rank, world=4):
    """The loads of experts travel with the loss and the norm."""
    groups = []
    all_reduce = dist.all_reduce

    def noted(x, op, group, async_op):
        groups.append(group)
        return all_reduce(x, op, group, async_op)
    with mock.patch.object(dist, "all_reduce", noted):
        run = run_steps(rank, world, (4, 1, 1), settings("out", ep=2, steps=2), CFGS["mixtral"],
                        lambda run: groups.count(run.grid.groups["world"]), prepare=without_saves)
    assert run.seen[0] == 1 and run.rows[0]["load/2"] >= 1


def choose_one(run):
    """All tokens choose the first experts: routers of zeros, whose equal scores topk orders."""
    for bucket in run.flat.buckets:
        if bucket.is_wide:
            bucket.shard["master"].zero_()
    run.flat.sync_params()
    run.flat.wait_params()
    without_saves(run)


@pytest.mark.parametrize("layout, flags", [
    ((4, 1, 1), dict(ep=4)),
    pytest.param((2, 2, 1), dict(ep=2, zero=2), marks=pytest.mark.slow)])
def test_a_rank_whose_experts_nobody_chose_takes_part(pool, tmp_path, layout, flags):
    """All tokens go to two of sixteen experts, which one rank has."""
    def run(layout, **flags):
        return trained(pool, layout, tmp_path, replace(CFGS["qwen3-moe"], n_active=2),
                       whole_gradient, prepare=choose_one, dtype="fp64", steps=1, **flags)
    ours, one = run(layout, **flags), run((1, 1, 1))
    assert ours.rows[0]["dead_experts"] == 3 * 14 and ours.rows[0]["load/0"] == 8
    # Not the loss after the update: the gradients of these routers are rounding alone.
    assert relative(ours.rows[0]["loss"], one.rows[0]["loss"]) <= BOUNDS["fp64"]
    assert relative(ours.seen[0], one.seen[0]) <= BOUNDS["fp64"]


def differ_on_tp_ranks(run):
    """The routers of tp rank 1 become others."""
    generator = torch.Generator().manual_seed(1)
    for bucket in run.flat.buckets:
        if bucket.is_wide and run.grid.tp_rank == 1:
            master = bucket.shard["master"]
            master += 1e-3 * torch.randn(master.shape, generator=generator, dtype=master.dtype)
    without_saves(run)


def loads_of_tp_ranks(run):
    """Of each block, (tp, E)."""
    loads = []
    for block in run.model.blocks.values():
        load = torch.zeros(run.grid.tp, len(block.mlp.router.load), dtype=torch.int64)
        load[run.grid.tp_rank] = block.mlp.router.load
        loads.append(all_reduce(load, run.grid.groups["tp"]).wait())
    return loads


def test_tp_ranks_choose_the_same_experts_although_their_routers_differ(pool, tmp_path):
    """Otherwise ranks would send other numbers of rows than their partners expect. The losses stay
    near those of equal routers."""
    cfg = CFGS["qwen3-moe"]
    rows, seen, _ = trained(pool, (2, 2, 1), tmp_path, cfg, loads_of_tp_ranks,
                            prepare=differ_on_tp_ranks, ep=2, steps=3)
    one = trained(pool, (1, 1, 1), tmp_path, cfg, prepare=without_saves, steps=3)
    assert_same_rows(rows, one.rows, 1e-3)
    assert all(load[0].equal(load[1]) for step in seen for load in step)


@pytest.mark.claim("A checkpoint of divided experts has no layout.")
@pytest.mark.parametrize("layout, flags", [
    ((2, 1, 2), dict(ep=2, zero=2)),
    pytest.param((2, 2, 1), dict(ep=2, zero=3), marks=pytest.mark.slow)])
def test_a_run_continues_with_other_parts_of_the_experts(pool, tmp_path, reference, layout, flags):
    """Two steps with ep 4 and ZeRO 1, saved, then two more in another layout: the numbers of four
    steps in one process."""
    cfg = CFGS["shared, bias"]
    run = dict(dtype="fp64", steps=4, lr=1e-2, warmup_steps=1)
    trained(pool, (4, 1, 1), tmp_path / "half", cfg, ep=4, zero=1, save_every=2, **run)
    half = tmp_path / "half" / "step_00000002.pt"
    assert checkpoint.load(half)["parameters"].keys() == checkpoint.parameter_shapes(cfg).keys()
    ours = trained(pool, layout, tmp_path / "rest", cfg, state=half, prepare=without_saves, **run,
                   **flags)
    one = reference(cfg, **run)
    assert relative(ours.state["master"], one.state["master"]) <= 1e-9
    assert relative(ours.rows[-1]["val_loss"], one.rows[-1]["val_loss"]) <= BOUNDS["fp64"]


@pytest.mark.claim("--exact: a mixture has the same bits in every layout.")
@pytest.mark.parametrize("name, layout, flags", [
    ("shared, bias", (2, 2, 1), dict(ep=2, zero=2)),
    ("shared, bias", (1, 2, 1), dict(sequence_parallel=True)), ("olmoe", (1, 2, 1), {}),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ("shared, bias", (1, 1, 2), {}),
        ("shared, bias", (1, 2, 2), dict(pp_schedule="zb-h1", recompute=False)),
        ("shared, bias", (2, 1, 2), dict(zero=2, ep=2, pp_schedule="1f1b")),
        ("shared, bias", (2, 1, 1), dict(ep=2, recompute=True, dtype="bf16")),
        ("qwen3-moe", (2, 2, 1), dict(ep=2, zero=3, sequence_parallel=True)),
        ("olmoe", (1, 4, 1), dict(sequence_parallel=True, recompute=True, dtype="bf16")),
        ("few tokens", (1, 2, 1), {}), ("few tokens", (4, 1, 1), dict(ep=2)),
        ("few tokens", (4, 1, 1), dict(ep=4, zero=3)),
        ("few tokens", (2, 2, 1), dict(ep=2, zero=3, sequence_parallel=True))])])
def test_exact_layouts_have_the_bits_of_one_process(pool, tmp_path, reference, name, layout, flags):
    """Losses, norms, loads and the final state of two steps. And the layout is not refused."""
    _, tp, pp = layout
    cfg = replace(CFGS[name], n_layer=pp + 1)
    layout_checks.check_layout(cfg, math.prod(layout), 8,
                        settings("", micro_batch=2, exact=True, tp=tp, pp=pp, **flags))
    same = dict(micro_batch=2, exact=True, dtype=flags.get("dtype", "fp32"), **TWO_STEPS)
    ours = trained(pool, layout, tmp_path, cfg, prepare=without_saves, **same | flags)
    assert different_bits(ours, reference(cfg, **same)) == ""


@pytest.mark.parametrize("name", ["olmoe", pytest.param("shared, bias", marks=pytest.mark.slow)])
def test_an_exact_mixture_has_the_gradients_of_the_plain_model(pool, tmp_path, name):
    """Beside autograd's in fp64, to the units of exact sums, which are 1e-8 of a gradient."""
    ours = trained(pool, (1, 1, 1), tmp_path, CFGS[name], whole_gradient, prepare=without_saves,
                   micro_batch=2, exact=True, dtype="fp64", steps=1)
    assert relative(ours.seen[0], gradient_of_plain(CFGS[name])) < 1e-7


@pytest.mark.slow
def test_an_exact_run_continues_bit_by_bit_in_one_process(pool, tmp_path, reference):
    """Two steps with ep 4, saved, and two more in one process: the bits of four there."""
    cfg = replace(CFGS["shared, bias"], n_layer=2)
    run = dict(micro_batch=2, exact=True, steps=4, lr=1e-2, warmup_steps=1)
    trained(pool, (4, 1, 1), tmp_path / "half", cfg, ep=4, zero=3, save_every=2, **run)
    half = tmp_path / "half" / "step_00000002.pt"
    ours = trained(pool, (1, 1, 1), tmp_path / "rest", cfg, state=half, prepare=without_saves,
                   **run)
    one = reference(cfg, **run)
    assert different_bits(ours._replace(rows=ours.rows[-1:]),
                          one._replace(rows=one.rows[-1:])) == ""


def types_of_routers(run):
    router = run.model.blocks["0"].mlp.router
    return router.weight.dtype, router.bias.dtype, run.model.blocks["0"].norm1.weight.dtype


@pytest.mark.parametrize("dtype, layout, flags", [
    ("bf16", (2, 1, 1), dict(ep=2, zero=1)),
    pytest.param("fp16", (2, 2, 1), dict(ep=2, zero=3), marks=pytest.mark.slow)])
def test_a_router_in_16_bits_computes_with_its_masters(pool, tmp_path, reference, dtype, layout,
                                                       flags):
    """So a bias of many small steps is not rounded. Losses of two steps are those of fp64 to 0.001,
    norms to 0.03."""
    cfg = CFGS["shared, bias"]
    ours = trained(pool, layout, tmp_path, cfg, types_of_routers, prepare=without_saves,
                   dtype=dtype, steps=2, **flags)
    half = dict(bf16=torch.bfloat16, fp16=torch.float16)[dtype]
    assert ours.seen[0] == (torch.float32, torch.float32, half)
    one = reference(cfg, dtype="fp64", steps=2)
    for row, expected in zip(ours.rows, one.rows):
        assert abs(row["loss"] - expected["loss"]) <= 0.001
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("flip, flags", [
    (Flip(2, 4, "update", "data", "blocks.2.mlp.experts.up.weight", 20), dict(zero=1)),
    (Flip(3, 5, "update", "exp_avg", "blocks.0.mlp.experts.down.weight", 20), {})])
def test_a_flipped_bit_of_an_expert_is_found_named_and_undone(pool, tmp_path, flip, flags):
    """On four replicas, of which two have the same experts. The run ends with the bits of one
    without the flip."""
    def run(out, prepare=nothing):
        _, seen, state = trained(pool, (4, 1, 1), tmp_path / out, CFGS["mixtral"], events_of,
                                 prepare=prepare, ep=2, **STEPS, **flags)
        return seen[-1], state
    _, healthy = run("healthy")
    events, state = run("flipped", partial(inject, flip, False))
    assert [event["event"] for event in events] == ["replicas", "rollback"], events
    assert flip.rank in events[0]["ranks"] and events[0]["parameter"] == flip.place
    assert equal_states(state, healthy)


@pytest.mark.parametrize("model, world, flags, words", [
    ("mixtral", 6, dict(ep=3), "ep 3 does not divide the 8 experts: change one"),
    ("mixtral", 2, dict(ep=4), "the replicas, dp x cp = 2, are not divisible by ep 4: start more"),
    ("shared, bias", 16, dict(tp=16), "the shared expert's 24 hidden channels are not divisible"),
    ("dense", 2, dict(ep=2), "--ep 2 divides the experts of a mixture, and this model has none")])
def test_a_layout_that_cannot_be_is_refused_with_its_numbers(model, world, flags, words):
    cfg = (CFGS | dict(dense=LlamaConfig()))[model]
    with pytest.raises(ValueError) as refused:
        layout_checks.check_layout(cfg, world, 48, settings("", micro_batch=1, **flags))
    assert words in str(refused.value)


@pytest.mark.slow
def test_compiled_blocks_train_as_they_are(tmp_path):
    """Routers and experts run eagerly between the compiled parts, and again in recomputation."""
    config = settings(tmp_path, steps=2, ep=2, recompute=True)
    cfg = replace(CFGS["qwen3-moe"], n_layer=2)
    with own_processes(TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) as fresh:
        (plain, expected), (compiled, seen) = (
            fresh.run(2, compiled_steps, (2, 1, 1), replace(config, compile=c), cfg, "aot_eager",
                      seconds=400)[-1] for c in (False, True))
    assert_same_rows(compiled, plain, 1e-5)
    assert relative(seen[0][1], expected[0][1]) <= 1e-5


# ---------------------------------------------------------------------------------------------
# train.py
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, words", [
    (["--n-expert", 4], "--model nano is no mixture of experts, which alone has --n-expert: drop "
     "it, or give --model moe-nano"),
    (["--model", "llama-nano", "--balance-loss", 0.1], "--model llama-nano is no mixture of "
     "experts, which alone has --balance-loss"),
    (["--model", "moe-nano", "--n-active", 9], "n_active 9 is not between 1 and n_expert 8")])
def test_flags_of_a_mixture_are_refused_in_one_line(shards, run_train, flags, words):
    expect_mistake(run_train("--data", shards, *flags), words)


def test_fine_grained_experts_and_a_shared_one_train_resume_and_sample(shards, run_train,
                                                                       tmp_path):
    """As DeepSeekMoE has them, by the commands. A resumed run ends with the bits of a straight one.
    """
    common = ["--data", shards, "--model", "moe-nano", "--n-expert", 16, "--n-active", 4,
              "--hidden", 64, "--n-layer", 1, "--seq-len", 32, "--batch-size", 4, "--steps", 4,
              "--warmup-steps", 1, "--eval-tokens", 64, "--save-every", 2]
    straight, first = tmp_path / "straight", tmp_path / "first"
    status, text, error = run_train(*common, "--shared-hidden", 64, "--out", straight)
    assert status == 0, error
    state = saved(straight, 2)
    assert state["model"]["shared_hidden"] == 64
    assert state["parameters"]["blocks.0.mlp.shared.up.weight"].shape == (2 * 64, 192)
    first.mkdir()
    (straight / "step_00000002.pt").rename(first / "step_00000002.pt")
    status, text, error = run_train(*common, "--out", first)        # the file has the model
    assert status == 0, error
    assert_same_state(saved(first, 4), saved(straight, 4))
    expect_mistake(run_train(*common, "--shared-hidden", 32, "--steps", 6, "--out", first),
                   "has shared_hidden 64, not 32")
    status, text, error = Command("sample.py", "--ckpt", first / "latest.pt", "--max-tokens", 4,
                                  "--prompt", "def").finish()
    assert status == 0 and text.startswith("def"), error


def test_plain_moves_no_bias(shards, run_train, tmp_path):
    flags = ["--data", shards, "--out", tmp_path, "--model", "moe-nano", "--balance-bias", 0.01]
    expect_mistake(run_train("--plain", *flags), "--plain moves no bias of a router, and this "
                   "model has --balance-bias 0.01")


@pytest.mark.slow
def test_a_run_on_four_ranks_goes_on_in_one_process_and_speaks(shards, tmp_path):
    """By the commands, with the experts divided over all, then over none; and another run with
    --plain from the same seed has the losses of its first steps."""
    common = ["--data", shards, "--model", "moe-nano", "--n-layer", 1, "--n-embd", 32, "--n-expert",
              4, "--seq-len", 16, "--batch-size", 8, "--dtype", "fp64", "--eval-every", 0]
    out = tmp_path / "out"
    ranks = launch(4, *common, "--steps", 4, "--ep", 4, "--zero", 1, "--out", out)
    for status, _, error in [rank.finish() for rank in ranks]:
        assert status == 0, error
    status, text, error = Command("train.py", *common, "--steps", 6, "--out", out).finish()
    assert status == 0 and "experts: the largest load is " in text, error
    plain = tmp_path / "plain"
    status, _, error = Command("train.py", "--plain", *common, "--steps", 6, "--out",
                               plain).finish()
    assert status == 0, error
    losses = [[row["loss"] for row in read_metrics(folder)[0][:4]] for folder in (out, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    status, text, error = Command("sample.py", "--ckpt", out / "latest.pt", "--max-tokens", 4,
                                  "--prompt", "def").finish()
    assert status == 0 and text.startswith("def"), error


@pytest.mark.slow
def test_a_killed_run_of_four_ranks_ends_on_eight_with_the_bits_of_one_process(shards, tmp_path):
    """By the commands, with --exact: ep 4, then ep 2 x pp 2 x tp 2."""
    common = ["--data", shards, "--model", "moe-nano", "--n-embd", 32, "--hidden", 32, "--seq-len",
              16, "--batch-size", 8, "--micro-batch", 2, "--exact", "--eval-every", 0,
              "--save-every", 2, "--keep", 99, "--steps", 12]
    out, one = tmp_path / "out", tmp_path / "one"
    ranks = launch(4, *common, "--ep", 4, "--zero", 1, "--out", out)
    wait_for_step(out, 4, ranks[0])
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.process.join()
    eight = launch(8, *common, "--ep", 2, "--pp", 2, "--tp", 2, "--zero", 2, "--out", out)
    for status, _, error in [rank.finish(120) for rank in eight]:
        assert status == 0, error
    status, _, error = Command("train.py", *common, "--out", one).finish(120)
    assert status == 0, error
    assert "resume" in kinds(read_metrics(out)[1])
    ours, expected = saved(out, 12), saved(one, 12)
    for key in checkpoint.STATE:
        assert all(ours[key][name].equal(full) for name, full in expected[key].items()), key


# ---------------------------------------------------------------------------------------------
# tools.plan
# ---------------------------------------------------------------------------------------------


def test_a_plan_has_total_and_active_parameters_and_the_rows_of_experts():
    flags = ["--model", "mixtral-8x7b", "--world", "64", "--gpu", "h100", "--tp", "2", "--ep", "8",
             "--dtype", "bf16", "--seq-len", "4096", "--zero", "1", "--micro-batch", "1",
             "--batch-size", "512"]
    text = answer(flags)
    assert "46,702,792,704 parameters, of which a token uses 12,879,925,248: 32 layers" in text
    plan = json.loads(answer([*flags, "--json"]))
    positions = plan["tokens_per_step"] // 32
    # To the experts and back, forward and backward, in 16 bits; 7 of 8 leave the rank. And of each
    # sequence the counts of 8 experts, in 64 bits, to 7 ranks.
    rows, counts = 4 * 32 * 2 * positions * 4096 * 2 / 2 * 7 / 8, 32 * positions / 4096 * 8 * 8 * 7
    assert plan["bytes_ep"] == rows + counts
    whole = json.loads(answer([*flags, "--ep", "1", "--json"]))
    experts = 32 * 8 * 3 * 4096 * 14336 / 2
    saved = whole["memory_gradients"] - plan["memory_gradients"]
    assert saved == pytest.approx(4 * experts * 7 / 8, rel=1e-3)
    assert plan["memory_moments"] == pytest.approx(whole["memory_moments"], rel=1e-3)


def test_the_search_divides_experts_as_train_py_can():
    """ZeRO 1 without tp and pp needs --ep: with 1 it does not fit. All plans have one that
    divides the experts and the replicas, in the table and in the command. With any other that
    train.py takes, the fastest layout is not faster, or does not fit."""
    flags = ["--model", "mixtral-8x7b", "--world", "24", "--gpu", "h100", "--dtype", "bf16",
             "--seq-len", "2048", "--batch-size", "96", "--pp", "1", "--tp", "1", "--zero", "1"]
    plans = json.loads(answer([*flags, "--search", "--json"]))
    assert plans and {plan["ep"] for plan in plans} <= {2, 4, 8}
    header, first, *_, command = answer([*flags, "--search"]).splitlines()
    assert dict(zip(header.split(), first.split()))["ep"] == str(plans[0]["ep"])
    again = [*flags, *command.partition("train.py ")[2].split(), "--json"]
    unused = dict(pp_schedule="1f1b")                   # without a pipeline
    assert json.loads(answer(again)) | unused == plans[0] | unused
    for ep in range(1, 25):
        try:
            other = json.loads(answer([*again, "--ep", str(ep)]))
        except ValueError as error:         # of --ep alone
            assert ep not in (1, 2, 4, 8) and f"ep {ep} does not divide the 8" in str(error)
            continue
        assert not other["fits"] or other["step_seconds"] >= plans[0]["step_seconds"]
    assert {plan["ep"] for plan in json.loads(
        answer([*flags, "--ep", "8", "--search", "--json"]))} == {8}


def test_a_plan_counts_the_shared_expert():
    """Two blocks of 3 x 192 x 64 numbers, which every token uses. tp 2 divides them, and ep 2 does
    not. Of 64 hidden channels a position keeps four numbers each: gate, value, the activated gate
    and their product."""
    flags = ["--model", "moe-nano", "--world", "4", "--gpu", "h100", "--tp", "2", "--ep", "2",
             "--batch-size", "4", "--micro-batch", "1", "--json"]
    without, plan = (json.loads(answer([*flags, "--shared-hidden", n])) for n in ("0", "64"))
    numbers = 2 * 3 * 192 * 64
    assert {name: plan[name] - without[name] for name in (
        "parameters", "active_parameters", "flops_per_token", "memory_parameters",
        "memory_moments", "memory_activations")} == dict(
            parameters=numbers, active_parameters=numbers, flops_per_token=6 * numbers,
            memory_parameters=4 * numbers / 2, memory_moments=8 * numbers / 2,
            memory_activations=2 * 128 * 4 * 64 / 2 * 4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("zero, ep", [(0, 2), (1, 2), (2, 4), (3, 2), (3, 1)])
def test_state_bytes_are_what_flat_parameters_allocate(dtype, zero, ep):
    """Of a rank among four replicas, times tp 2."""
    cfg = CFGS["shared, bias"]
    grid = Grid(4, 1, 2, 3, ep=ep)
    dtypes = PRECISIONS[dtype]
    flat = FlatParameters(param_specs(build_stage(cfg, grid), cfg, grid), grid, *dtypes, "cpu",
                          zero)
    kept = dict.fromkeys(("parameters", "gradients", "masters", "moments"), 0)
    for bucket in flat.buckets:
        shard = bucket.shard
        own_master = shard["master"] is not shard["data"]
        kept["parameters"] += shard["data"].nbytes if zero == 3 else bucket.data.nbytes
        kept["gradients"] += shard["grad"].nbytes if zero >= 2 else bucket.grad.nbytes
        kept["masters"] += shard["master"].nbytes if own_master else 0
        kept["moments"] += shard["exp_avg"].nbytes + shard["exp_avg_sq"].nbytes
    assert state_bytes(rank_buckets(cfg, grid, zero), dtypes, zero, False) == (kept, {})


def test_the_losses_of_the_routers_may_change_but_the_model_may_not(tmp_path):
    """--balance-loss and --z-loss as --dropout; a bias balances in place of the loss."""
    state = dict(model=asdict(MoEConfig()), config={})
    _, shape = merge_config(dict(balance_loss=0.0, z_loss=0.1), state, weights_only=True)
    assert (shape["balance_loss"], shape["z_loss"], shape["n_expert"]) == (0.0, 0.1, 8)
    with pytest.raises(ValueError, match="has n_active 2, not 3"):
        merge_config(dict(n_active=3), state, weights_only=True)
    given = dict(model="moe-nano", balance_bias=0.001)
    assert merge_config(given, None)[1]["balance_loss"] == 0
    assert merge_config(given | dict(balance_loss=0.1), None)[1]["balance_loss"] == 0.1
