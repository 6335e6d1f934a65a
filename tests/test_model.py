"""model.py: named sizes, initial values, dropout in every layout.

    python -m pytest tests/test_model.py

Logits and gradients beside torch's layers: test_all.py. The decoders of models/: test_models.py.
"""
import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import model
from base import processes
from base.flops import parameter_count
from model import GPT, SIZES, GPTConfig
from parallelism import context, kernels
from parallelism.build import Grid
from tests.harness import (CFG, differences, on_ranks, run_steps, settings, staged, tokens_of,
                           trained, whole_gradient, without_saves)


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


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_has_its_masks_whatever_rows_are_beside_it(packed):
    """Rows 2 and 3 of a batch have the logits of a batch of both with their seed, and of each."""
    plain, tokens = GPT(replace(CFG, dropout=0.3)).initialize(0).double(), tokens_of(CFG, 4)
    positions = torch.arange(CFG.seq_len).remainder(5).expand(4, -1) if packed else None

    def logits(first, end):
        own = None if positions is None else positions[first:end]
        return plain(tokens[first:end], dropout_seed=7 + first, positions=own)
    whole = logits(0, 4)
    for first, end in [(2, 4), (2, 3), (3, 4)]:
        torch.testing.assert_close(logits(first, end), whole[first:end], rtol=0, atol=1e-12)
    assert not plain(tokens[2:], dropout_seed=7).allclose(whole[2:])


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
    torch's fp32 tolerance of 1.3e-6. (Each beside the plain model that has the same products:
    where a CPU has no instructions for bf16, a parallel model multiplies in fp32.)"""
    plain, tokens = GPT(CFG).initialize(0).bfloat16(), tokens_of(CFG, 2)
    same_products = copy.deepcopy(plain)
    kernels.use_kernels(same_products)
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


@pytest.mark.parametrize("cp, sequence_parallel", [(1, False), (2, True)])
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
            mask = None if cp > 1 else torch.ones(cfg.seq_len, cfg.seq_len, dtype=torch.bool)
            y = module.forward(zeros, zeros, one_hot, args[3], mask)
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
        runs.append(processes.all_gather_object(drawn))
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
    ((1, 1, 1), dict(dtype="fp64"), (1, 1, 1), dict(micro_batch=4), 1e-10),
    ((1, 1, 1), dict(dtype="fp64"), (4, 1, 1), dict(micro_batch=1, zero=1), 1e-10),
    ((1, 1, 1), dict(dtype="fp64"), (2, 1, 2), dict(micro_batch=1), 1e-10),
    ((1, 2, 1), dict(dtype="fp64", sequence_parallel=True), (2, 2, 1), dict(micro_batch=1), 1e-10),
    ((1, 1, 1), dict(dtype="fp64", cp=2), (2, 1, 1), dict(micro_batch=4), 1e-10),
    pytest.param((2, 2, 1), dict(dtype="fp64"), (2, 2, 1), dict(zero=3, recompute=True), 1e-10,
                 marks=pytest.mark.slow)])
def test_masks_do_not_depend_on_dp_microbatches_stages_or_recomputation(
        pool, tmp_path, reference, layout, flags, other, changes, bound):
    """With dropout, another layout and `changes` leave losses, gradients and norms to 1e-10 in
    fp64; recomputation alone leaves each bit."""
    cfg = replace(CFG, dropout=0.2, n_layer=3)
    ours = trained(pool, other, tmp_path, cfg, whole_gradient, prepare=without_saves, steps=2,
                   **flags, **changes)
    theirs = reference(cfg, layout, micro_batch=2, steps=2, **flags)
    assert max(differences(ours, theirs)) <= bound
