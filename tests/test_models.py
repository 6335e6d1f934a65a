"""model.py and models/: published sizes, initial values, dropout, norms, the cache.

Logits and gradients beside torch's layers: test_all.py; beside transformers: test_transformers.py.
That models train in every layout as in one process: test_layouts.py."""
import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import model
import sample
from base import agreement
from base.flops import active_parameters, flops_per_token, parameter_count
from model import GPT, GPTConfig
from models import SIZES, make_config
from models.llama import LlamaConfig
from parallel import Grid, cut_sequence
from parallelism import kernels
from tests.harness import (CFG, differences, on_ranks, plain_generate, random_gpt, run_steps,
                           settings, staged, tokens_of, trained, whole_gradient, without_saves)
from tests.test_layouts import MODELS


@pytest.mark.parametrize("name", [
    name for name, cfg in MODELS.items() if type(cfg) is LlamaConfig])
def test_a_cache_changes_no_token(name):
    """Also beyond seq_len, when the older half of the window is forgotten."""
    plain = random_gpt(MODELS[name])
    tokens = [3, 1, 4, 1, 5]
    found = [drawn[0] for drawn in sample.generate(plain, tokens, 30, set(), temperature=0)]
    assert found == plain_generate(plain, tokens, 30, temperature=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_is_torchs(dtype):
    """Output and both gradients, to the type's tolerance; backward keeps the input once."""
    x = torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
    norm = torch.nn.RMSNorm(16, 1e-5, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    expected = norm(x)
    kernels.use_kernels(norm)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = norm(x)
    assert sorted(x.numel() for x in kept) == [15, 16, 240]
    dy = torch.randn_like(found)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, (x, norm.weight), dy),
                            torch.autograd.grad(expected, (x, norm.weight), dy)):
        torch.testing.assert_close(ours, theirs)


def test_flops_of_a_window_are_those_of_its_reach():
    """12 L H D T of attention. (The others, as a run computes them: test_plan.py.)"""
    cfg = LlamaConfig(100, 8, 2, 4, 16, n_kv_head=2, hidden=24)
    for window, reach in ((3, 3), (9, 8)):
        fewer = flops_per_token(cfg) - flops_per_token(replace(cfg, window=window))
        assert fewer == 12 * 2 * 16 * (8 - reach)


# Vocabulary, published parameters, and of mixtures those that a token uses.
COUNTS = {
    "gpt2": (50257, 124_439_808), "gpt2-medium": (50257, 354_823_168),
    "gpt2-large": (50257, 774_030_080), "gpt2-xl": (50257, 1_557_611_200),
    "llama-7b": (32000, 6_738_415_616), "llama-65b": (32000, 65_285_660_672),
    "llama2-70b": (32000, 68_976_648_192), "llama3-8b": (128256, 8_030_261_248),
    "llama3-70b": (128256, 70_553_706_496), "mistral-7b": (32768, 7_248_023_552),
    "tinyllama-1.1b": (32000, 1_100_048_384), "smollm2-135m": (49152, 134_515_008),
    "smollm2-1.7b": (49152, 1_711_376_384), "qwen2.5-0.5b": (151936, 494_032_768),
    "qwen2.5-7b": (152064, 7_615_616_512), "qwen3-0.6b": (151936, 596_049_920),
    "qwen3-8b": (151936, 8_190_735_360), "neox-20b": (50432, 20_554_567_680),
    "pythia-70m": (50304, 70_426_624), "pythia-12b": (50688, 11_846_072_320),
    "olmo-1b": (50304, 1_176_764_416), "mixtral-8x7b": (32000, 46_702_792_704, 12.9e9),
    "mixtral-8x22b": (32768, 140_630_071_296, 39.2e9),
    "olmoe-1b-7b": (50304, 6_919_161_856, 1.28e9),
    "qwen3-30b-a3b": (151936, 30_532_122_624, 3.35e9),
    "qwen3-235b-a22b": (151936, 235_093_634_560, 22.2e9)}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_published(name):
    vocab, count, *active = COUNTS[name]
    cfg = make_config(vocab_size=vocab, **SIZES[name])
    assert parameter_count(cfg) == count
    if active:
        assert active_parameters(cfg) == pytest.approx(active[0], rel=0.005)


def test_gpts_have_as_many_parameters_as_their_names_say():
    """Which round to 3%. parameter_count is the number that a GPT holds."""
    for name in model.SIZES.keys() - COUNTS.keys() - {"nano"}:
        size = name.partition("-")[2]
        cfg = GPTConfig(50257, **model.SIZES[name])
        published = float(size[:-1]) * dict(m=1e6, b=1e9)[size[-1]]
        assert parameter_count(cfg) == pytest.approx(published, rel=0.03), name
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in GPT(cfg).parameters())
    assert parameter_count(cfg) == held - (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd


def test_initial_values_have_gpt2s_standard_deviations():
    """Matrices: mean 0 and standard deviation 0.02, or 0.02 / sqrt(2 n_layer) for the projections
    to the residual stream, to 5%; LayerNorm's weights 1, biases and padding 0."""
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


def test_a_row_of_several_texts_has_its_masks_whatever_rows_are_beside_it():
    """Rows 2 and 3 of a batch have the logits of a batch of both with their seed, and of each."""
    plain, tokens = GPT(replace(CFG, dropout=0.3)).initialize(0).double(), tokens_of(CFG, 4)
    positions = torch.stack([torch.arange(CFG.seq_len) % length for length in (4, 5, 6, 7)])

    def logits(first, end):
        return plain(tokens[first:end], dropout_seed=7 + first, positions=positions[first:end])
    for first, end in [(2, 4), (2, 3), (3, 4)]:
        torch.testing.assert_close(logits(first, end), logits(0, 4)[first:end], rtol=0, atol=1e-12)


def test_dropout_drops_its_share_and_scales_the_rest():
    """Of 100,000 ones 30% become 0, to 0.5%, and the others 1 / 0.7. In attention the weights of
    each position, of which v shows one, are dropped."""
    x = model.Dropout(0.3)(torch.ones(1000, 100), dropout_seed=1)
    v = torch.eye(100).expand(10, 10, 100, 100)
    q = torch.zeros(10, 10, 100, 100)               # equal weights, of 1 / 100
    all_of_them = torch.ones(100, 100, dtype=torch.bool)
    attended = 100 * model.CoreAttention(0.3)(q, q, v, 1, all_of_them)
    for found in (x, attended):
        assert (found == 0).float().mean().item() == pytest.approx(0.3, abs=0.005)
        torch.testing.assert_close(found[found != 0].unique().mean().item(), 1 / 0.7)


def test_the_loss_of_16_bit_logits_is_computed_in_fp32():
    """The loss of a bf16 model, plain or parallel, is the cross-entropy of its logits in fp32, to
    torch's fp32 tolerance of 1.3e-6."""
    plain, tokens = GPT(CFG).initialize(0).bfloat16(), tokens_of(CFG, 2)
    same_products = copy.deepcopy(plain)
    kernels.use_kernels(same_products)
    local, _ = staged(CFG, Grid(1, 1, 1), torch.bfloat16)
    for gpt, beside in ((plain, plain), (local, same_products)):
        logits = beside(tokens).float().flatten(0, 1)
        expected = F.cross_entropy(logits, tokens.flatten(), reduction="sum")
        torch.testing.assert_close(gpt(tokens, tokens), expected)


@pytest.mark.parametrize("cp, sequence_parallel", [(1, False), (2, False), (2, True)])
@on_ranks
def test_dropout_masks_are_equal_where_activations_are(rank, world=4, *, tmp_path, cp,
                                                       sequence_parallel):
    """Ranks 0 and 1, and 2 and 3, have different heads of the same rows, or with cp 2 of the same
    positions; outside attention they have the same activations, unless sequence parallelism splits
    these."""
    cfg = replace(CFG, dropout=0.2, n_layer=2)

    def look(module, args, y):
        if module.training and isinstance(module, model.CoreAttention):
            # Equal scores and one-hot values: the output is the softmax itself, under its mask.
            own = cut_sequence(torch.eye(cfg.seq_len), rank // 2 % cp, cp, dim=0)
            one_hot = own.expand(*args[0].shape[:2], -1, -1)
            zeros = torch.zeros_like(one_hot)
            mask = None if cp > 1 else torch.ones(cfg.seq_len, cfg.seq_len, dtype=torch.bool)
            y = module.forward(zeros, zeros, one_hot, args[3], mask)
        if module.training and isinstance(module, model.Dropout):
            drawn.append((y == 0).numpy().tobytes())

    def prepare(run):
        for module in run.model.modules():
            module.register_forward_hook(look)
    drawn = []
    config = settings(tmp_path, steps=2, tp=2, cp=cp, batch_size=8 // cp,
                      sequence_parallel=sequence_parallel)
    run_steps(rank, world, (2 // cp, 2, 1), config, cfg, prepare=prepare)
    masks = agreement.all_gather_object(drawn)          # of each rank, as bytes
    assert [len(set(its)) for its in masks] == [len(its) for its in masks] == [4 * 7] * 4
    shared = [len(set(one) & set(other)) for one, other in itertools.combinations(masks, 2)]
    same = 0 if sequence_parallel else 4 * 5
    assert shared == [same, 0, 0, 0, 0, same]           # 01 02 03 12 13 23


@pytest.mark.parametrize("layout, flags, other, changes, bound", [
    ((1, 2, 1), dict(dtype="bf16", sequence_parallel=True), (1, 2, 1), dict(recompute=True), 0),
    ((1, 2, 1), dict(dtype="fp64", sequence_parallel=True),
     (1, 2, 2), dict(pp_schedule="1f1b"), 1e-10),
    ((1, 1, 1), dict(dtype="bf16", cp=2), (1, 1, 1), dict(recompute=True), 0),
    ((1, 1, 1), dict(dtype="fp64"), (2, 1, 2), dict(micro_batch=1, zero=1), 1e-10),
    ((1, 1, 1), dict(dtype="fp64", cp=2), (2, 1, 1), dict(micro_batch=4), 1e-10)])
def test_masks_do_not_depend_on_dp_microbatches_stages_or_recomputation(
        pool, tmp_path, reference, layout, flags, other, changes, bound):
    """With dropout, another layout and `changes` leave losses, gradients and norms to 1e-10 in
    fp64; recomputation alone leaves each bit."""
    cfg = replace(CFG, dropout=0.2, n_layer=3)
    ours = trained(pool, other, tmp_path, cfg, whole_gradient, prepare=without_saves, steps=2,
                   **flags | changes)
    theirs = reference(cfg, layout, micro_batch=2, steps=2, **flags)
    assert max(differences(ours, theirs)) <= bound
