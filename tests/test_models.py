"""Llama and its relatives: the same numbers as transformers, and one process's in every layout.

    python -m pytest tests/test_models.py
"""
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import sample
from base.flops import flops_per_token, parameter_count
from base.options import merge_config, parse_flags
from model import GPTConfig
from models import SIZES, kv_cache, llama_sizes, make_config, moe
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from parallelism import kernels
from runtime import checks
from tests.harness import (BOUNDS, TWO_STEPS, differences, different_bits, plain_gradient,
                           random_gpt, relative, tokens_of, trained, whole_gradient,
                           without_saves)
from tools import huggingface, huggingface_families
from tools.plan.__main__ import answer
from tools.plan.flags import VOCABULARIES

SHAPE = dict(vocab_size=257, seq_len=16, n_layer=5, n_head=8, n_embd=32)
CFGS = {
    "llama": LlamaConfig(**SHAPE, n_kv_head=4),
    "llama, tied": LlamaConfig(**SHAPE, n_kv_head=2, tied=True),
    "qwen2": LlamaConfig(**SHAPE, n_kv_head=2, **FAMILIES["qwen2"]),
    "qwen3": LlamaConfig(**SHAPE, n_kv_head=2, head_dim=8, **FAMILIES["qwen3"]),
    "olmo": LlamaConfig(**SHAPE, **FAMILIES["olmo"]),
    "neox": LlamaConfig(**SHAPE | dict(n_head=4), hidden=128, **FAMILIES["neox"]),
    "palm": LlamaConfig(**SHAPE, n_kv_head=1, head_dim=8, **FAMILIES["palm"]),
    "window": LlamaConfig(**SHAPE, n_kv_head=2, window=5),
    "olmo2": LlamaConfig(**SHAPE, n_kv_head=2, **FAMILIES["olmo2"]),
    "phi": LlamaConfig(**SHAPE | dict(n_head=4), hidden=128, **FAMILIES["phi"]),
    "gptj": LlamaConfig(**SHAPE | dict(n_head=4), hidden=128, **FAMILIES["gptj"]),
    "galactica": LlamaConfig(**SHAPE, hidden=128, **FAMILIES["galactica"])}


# ---------------------------------------------------------------------------------------------
# transformers
# ---------------------------------------------------------------------------------------------

# model_type: what differs from SMALL in config.json
SMALL = dict(vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)
OF_GPT2 = dict(n_embd=48, n_layer=3, n_head=6, n_positions=64, vocab_size=160)
OF_OPT = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=6, ffn_dim=192,
              word_embed_proj_dim=48, max_position_embeddings=64, vocab_size=160)
THEIRS = {
    "llama": ("llama", {}),
    "llama, multi-query, tied": ("llama", dict(num_key_value_heads=1, tie_word_embeddings=True)),
    "llama 3.1": ("llama", dict(rope_parameters=LLAMA3)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=16)),
    "mistral, window": ("mistral", dict(sliding_window=7)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "olmo": ("olmo", dict(num_key_value_heads=6, pad_token_id=None)),
    "gpt_neox": ("gpt_neox", dict(intermediate_size=192)),
    "gpt_neox, serial": ("gpt_neox", dict(use_parallel_residual=False, hidden_act="gelu_fast",
                                          rotary_pct=0.5)),
    "olmo2": ("olmo2", dict(pad_token_id=None)),
    "phi": ("phi", dict(num_key_value_heads=3)),
    "gptj": ("gptj", OF_GPT2 | dict(rotary_dim=6)),
    "galactica": ("opt", OF_OPT | dict(activation_function="gelu")),
    "galactica without biases": ("opt", OF_OPT | dict(
        activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False))}
GPTS = {"gpt2": ("gpt2", OF_GPT2), "opt": ("opt", OF_OPT)}


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory):
    """theirs_and_ours(name) -> a folder of a transformers model with random weights, biases and
    norms too, that model, and the file that `import` makes of it."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def make(name):
        if name not in made:
            model_type, changes = (THEIRS | GPTS)[name]
            shape = changes if model_type in ("gpt2", "gptj", "opt") else SMALL | changes
            if model_type == "gpt_neox":
                del shape["num_key_value_heads"]
            config = transformers.AutoConfig.for_model(model_type, **shape)
            torch.manual_seed(0)
            theirs = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager").eval()
            for parameter in theirs.parameters():
                torch.nn.init.normal_(parameter, 0 if parameter.dim() > 1 else 1, 0.15)
            if model_type == "opt":         # rows that no position uses
                theirs.model.decoder.embed_positions.weight.data[:2] = 0
            folder = tmp_path_factory.mktemp("theirs") / model_type
            theirs.save_pretrained(folder)
            file = folder.parent / "model.pt"
            huggingface.import_model(str(folder), file)
            made[name] = folder, theirs, file
        return made[name]
    return make


@pytest.mark.claim("Logits, losses and gradients are those of ten transformers classes.")
@pytest.mark.parametrize("name, dtype, bound", [
    ("llama", torch.float32, 1e-5), *((name, torch.float64, 1e-10) for name in THEIRS)])
def test_logits_and_gradients_are_those_of_transformers(theirs_and_ours, name, dtype, bound):
    """With the same weights: logits to the bound, and the gradient of each parameter to ten times
    the bound, of its largest number."""
    _, theirs, file = theirs_and_ours(name)
    theirs = theirs.to(dtype)
    ours, _ = checkpoint.load_model(file)
    ours = ours.to(dtype)
    tokens = tokens_of(replace(ours.cfg, seq_len=40), 2)
    assert tokens.max() < ours.cfg.vocab_size
    with in_fp64() if dtype == torch.float64 else nullcontext():
        make_tables_again(theirs)
        expected = theirs(tokens).logits
    assert difference(ours(tokens), expected) < bound

    targets = tokens.roll(-1, 1)
    ours(tokens, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    family = huggingface_families.family_of(theirs.config)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    theirs.zero_grad()
    for name, parameter in ours.named_parameters():
        names = huggingface_families.their_names(name, family)
        theirs_here = [gradients[one].double() for one in names]
        full = huggingface_families.to_ours(name, theirs_here, family, ours.cfg)
        rows = len(full)
        assert difference(parameter.grad[:rows], full) < 10 * bound, name


@contextmanager
def in_fp64():
    """Let transformers compute norms and rotary positions in fp64, too, where it has fp32."""
    with mock.patch.object(torch, "float32", torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def make_tables_again(theirs):
    """GPT-J's table of sines: its rounding to fp32 alone would be 5e-9 of the logits."""
    if theirs.config.model_type == "gptj":
        from transformers.models.gptj import modeling_gptj
        table = theirs.transformer.rotary_emb.embed_positions
        table.copy_(modeling_gptj.create_sinusoidal_positions(len(table), theirs.config.rotary_dim))


def difference(x, y):
    return ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()


@pytest.mark.parametrize("name", THEIRS)
def test_greedy_text_is_that_of_full_recomputation_by_transformers(theirs_and_ours, name):
    """Twenty tokens with our cache, beside transformers' model without one."""
    _, theirs, file = theirs_and_ours(name)
    ours, _ = checkpoint.load_model(file)
    tokens = [3, 1, 4, 1, 5]
    found = [drawn[0] for drawn in sample.generate(ours.double(), tokens, 20, set(), temperature=0)]
    theirs = theirs.double()
    for _ in found:
        tokens.append(theirs(torch.tensor([tokens])).logits[0, -1].argmax().item())
    assert found == tokens[5:]


# ---------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CFGS)
def test_a_cache_changes_no_token(name):
    """Also beyond seq_len, when the older half of the window is forgotten."""
    plain = random_gpt(CFGS[name])
    tokens = [3, 1, 4, 1, 5]
    found = [drawn[0] for drawn in sample.generate(plain, tokens, 30, set(), temperature=0)]
    assert found == sample.plain_generate(plain, tokens, 30, temperature=0)


def test_a_cache_has_the_heads_of_keys_and_the_positions_that_are_used(monkeypatch):
    """K heads, not H; of a prompt of 5 tokens and 4 more, 9 positions."""
    plain = random_gpt(CFGS["llama"])
    shapes = []

    class Seen(kv_cache.CachedModel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            shapes.append(self.model.blocks["0"].attn.core_attention.cache.shape)
    monkeypatch.setattr(sample, "CachedModel", Seen)
    for count in (4, 100):
        list(sample.generate(plain, [1, 2, 3, 4, 5], count, set(), 0.0))
    assert shapes == [(2, 1, 4, 9, 4), (2, 1, 4, 16, 4)]


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


def test_attention_depends_on_distances_alone():
    """The scores of q and k at positions 3, 4, ... are those at 0, 1, ..."""
    q, k = torch.randn(2, 1, 2, 6, 4, dtype=torch.float64)
    rotary = random_gpt(CFGS["llama"]).blocks["0"].attn.rotary
    later = kv_cache.CachedRotary(rotary, kv_cache.Past(3))
    scores = [torch.matmul(a, b.mT) for a, b in (rotary(q, k), later(q, k))]
    torch.testing.assert_close(*scores)
    assert not torch.allclose(scores[0], torch.matmul(q, k.mT))


@pytest.mark.parametrize("name, vocab, count", [
    ("llama-7b", 32000, 6_738_415_616), ("llama-13b", 32000, 13_015_864_320),
    ("llama-33b", 32000, 32_528_943_616), ("llama-65b", 32000, 65_285_660_672),
    ("llama2-7b", 32000, 6_738_415_616), ("llama2-13b", 32000, 13_015_864_320),
    ("llama2-70b", 32000, 68_976_648_192), ("llama3-8b", 128256, 8_030_261_248),
    ("llama3-70b", 128256, 70_553_706_496), ("mistral-7b", 32768, 7_248_023_552),
    ("tinyllama-1.1b", 32000, 1_100_048_384), ("smollm2-135m", 49152, 134_515_008),
    ("smollm2-360m", 49152, 361_821_120), ("smollm2-1.7b", 49152, 1_711_376_384),
    ("qwen2.5-0.5b", 151936, 494_032_768), ("qwen2.5-3b", 151936, 3_085_938_688),
    ("qwen2.5-1.5b", 151936, 1_543_714_304), ("qwen2.5-7b", 152064, 7_615_616_512),
    ("qwen3-0.6b", 151936, 596_049_920), ("qwen3-1.7b", 151936, 1_720_574_976),
    ("qwen3-4b", 151936, 4_022_468_096), ("qwen3-8b", 151936, 8_190_735_360),
    ("neox-20b", 50432, 20_554_567_680), ("pythia-70m", 50304, 70_426_624),
    ("pythia-160m", 50304, 162_322_944), ("pythia-410m", 50304, 405_334_016),
    ("pythia-1b", 50304, 1_011_781_632), ("pythia-1.4b", 50304, 1_414_647_808),
    ("pythia-2.8b", 50304, 2_775_208_960), ("pythia-6.9b", 50432, 6_857_302_016),
    ("pythia-12b", 50688, 11_846_072_320), ("olmo-1b", 50304, 1_176_764_416)])
def test_parameters_are_as_many_as_published(name, vocab, count):
    """tools.plan prints them for the published vocabulary, unless another is given."""
    assert parameter_count(make_config(vocab_size=vocab, **SIZES[name])) == count
    flags = ["--world", "1", "--gpu", "h100", "--model", name]
    text = answer(flags)
    assert f"model    {count:,} parameters, " in text
    assert f", vocabulary {vocab} (--vocab-size)\n" in text
    assert ", vocabulary 9999 (" in answer([*flags, "--vocab-size", "9999"])


def test_a_plan_knows_the_vocabulary_of_every_published_size():
    """llama-nano and moe-nano are none: like a GPT they have GPT-2's."""
    published = (llama_sizes.SIZES | moe.SIZES).keys() - {"llama-nano", "moe-nano"}
    assert VOCABULARIES.keys() == published
    for flags in (["--model", "llama-nano"], ["--model", "gpt2"], ["--n-layer", "3"]):
        text = answer(["--world", "1", "--gpu", "h100", *flags])
        assert ", vocabulary 50257 (--vocab-size)\n" in text


def test_flops_are_those_of_the_formula():
    """6 N + 12 L H D T of a Llama by hand, and what recomputation repeats."""
    cfg = LlamaConfig(100, 8, 2, 4, 16, n_kv_head=2, hidden=24)
    attention = 16 * (16 + 2 * 8) + 16 * 16                         # qkv and proj
    mlp = 3 * 16 * 24
    N = 100 * 16 + 16 + 2 * (attention + mlp + 2 * 16)
    assert flops_per_token(cfg) == 6 * N + 12 * 2 * 16 * 8
    for window, reach in ((3, 3), (9, 8)):
        assert flops_per_token(replace(cfg, window=window)) == 6 * N + 12 * 2 * 16 * reach
    again = 2 * (2 * (attention + 2 * 16 * 24) + 4 * 16 * 8)
    assert flops_per_token(cfg, recompute=True) - flops_per_token(cfg) == again


@pytest.mark.parametrize("fields, words", [
    (dict(n_kv_head=3), "n_head 8 is not divisible by n_kv_head 3"),
    (dict(n_embd=30), "n_embd 30 is not divisible by n_head 8"),
    (dict(activation="tanh"), "activation 'tanh' is none of"),
    (dict(rotary=0.25), "0.25 of head_dim 4 is 1")])
def test_a_shape_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        LlamaConfig(**SHAPE | fields)


def test_a_gpt_is_stored_as_ever():
    """An old checkpoint's model has these fields, and no others are written."""
    old = dict(vocab_size=257, seq_len=128, n_layer=2, n_head=4, n_embd=192, activation="gelu",
               dropout=0.0)
    assert asdict(make_config(**old)) == old and type(make_config(**old)) is GPTConfig
    new = replace(CFGS["neox"], rope_scaling=(8.0, 1.0, 4.0, 16.0))
    assert make_config(**asdict(new)) == new


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------

# What these models have of their own: grouped keys under tp, rotary positions under cp, ends that
# are not tied, and the products of their blocks, which ZB-H1 splits and recomputation repeats. A
# window, norms after attention and MLP, a bias of the logits, learned positions: the others'.
LAYOUTS = {
    "tp, sequence": ((1, 2, 1), dict(sequence_parallel=True)),
    "1f1b, zero 2": ((2, 1, 2), dict(pp_schedule="1f1b", zero=2)),
    "zb-h1": ((1, 1, 2), dict(pp_schedule="zb-h1")),
    "zero 3, recompute": ((2, 1, 1), dict(zero=3, recompute=True)),
    "cp": ((1, 1, 1), dict(cp=2))}
DEFAULT = [*(("llama", layout) for layout in LAYOUTS),
           ("llama, tied", "1f1b, zero 2"), ("palm", "1f1b, zero 2"),
           ("qwen3", "tp, sequence"), ("neox", "tp, sequence"), ("olmo2", "tp, sequence"),
           ("gptj", "tp, sequence"), ("window", "cp")]
OTHERS = ("window", "olmo2", "phi", "galactica")
SLOW = [("qwen2", "tp, sequence"), ("olmo", "tp, sequence"),
        *((name, layout) for name in ("qwen3", "neox", "palm")      # each of another kind of block
          for layout in ("zb-h1", "zero 3, recompute", "cp")),
        *((name, layout) for name in OTHERS for layout in LAYOUTS if (name, layout) not in DEFAULT)]


@pytest.mark.claim("A Llama and its relatives train in every layout as in one process.")
@pytest.mark.parametrize("name, layout", [
    *DEFAULT, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)])
def test_llamas_train_in_every_layout_as_in_one_process(pool, tmp_path, reference, name, layout):
    """Loss, gradient and norm of two steps in fp64 are those of one process, and the first
    gradients those of the plain model by autograd: relative difference at most 1e-10. (Of tensor
    parallelism with fewer heads of keys than ranks see test_shared_heads.py.)"""
    shape, flags = LAYOUTS[layout]
    ours = trained(pool, shape, tmp_path, CFGS[name], whole_gradient, prepare=without_saves,
                   dtype="fp64", **TWO_STEPS, **flags)
    one = reference(CFGS[name], dtype="fp64", **TWO_STEPS)
    assert max(differences(ours, one)) <= BOUNDS["fp64"]
    assert relative(ours.seen[0], plain_gradient(CFGS[name])) <= BOUNDS["fp64"]


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow)
                                             for name in ("neox", *OTHERS))])
def test_exact_layouts_of_llamas_have_the_bits_of_one_process(pool, tmp_path, name):
    """Two replicas of two stages with two tensor-parallel ranks."""
    def run(layout, **flags):
        return trained(pool, layout, tmp_path, CFGS[name], whole_gradient, prepare=without_saves,
                       micro_batch=2, exact=True, steps=2, **flags)
    assert different_bits(run((2, 2, 2), zero=2), run((1, 1, 1))) == ""


@pytest.mark.parametrize("name", ["qwen3", pytest.param("phi", marks=pytest.mark.slow)])
def test_16_bits_train_within_their_bound(pool, tmp_path, reference, name):
    """With tp 2 and ZeRO 3 losses, gradients and norms of two steps are those of fp64, to 0.001,
    0.05 and 0.01, and the first gradients those of the plain model in fp64, to 0.05."""
    cfg = CFGS[name]
    ours = trained(pool, (2, 2, 1), tmp_path, cfg, whole_gradient, prepare=without_saves,
                   dtype="fp16", steps=2, zero=3)
    loss, gradient, norm = differences(ours, reference(cfg, dtype="fp64", steps=2))
    assert loss <= 0.001 and gradient <= 0.05 and norm <= 0.01
    assert relative(ours.seen[0], plain_gradient(cfg)) <= 0.05


# ---------------------------------------------------------------------------------------------
# train.py
# ---------------------------------------------------------------------------------------------

def test_flags_make_a_llama_of_a_named_size(shards):
    """The flags of the shape override it; the learning rate is that of the size."""
    flags = "--model llama-nano --n-head 8 --n-kv-head 4 --hidden 100 --rope-theta 5e5 --seq-len 16"
    given = parse_flags(["--data", str(shards), *flags.split()])
    config, cfg = checks.validate(given, None, 1, "cpu")
    assert cfg == LlamaConfig(257, 16, 2, 8, 192, n_kv_head=4, hidden=100, rope_theta=5e5)
    assert config.lr == 4e-3


@pytest.mark.parametrize("flags, words", [
    ("--n-kv-head 2", "--model nano is a GPT, which has no --n-kv-head: drop it"),
    ("--activation silu", "activation 'silu' is neither 'gelu' nor 'relu'"),
    ("--model llama-nano --n-kv-head 3", "n_head 4 is not divisible by n_kv_head 3"),
    ("--model llama-nano --head-dim 7", "rotate pairs of channels, but 1 of head_dim 7 is 7"),
    ("--model pythia-70m --head-dim 6", "but 0.25 of head_dim 6 is 1"),
    ("--model llama-nano --n-head 12 --n-kv-head 3 --tp 2",
     "tp 2 neither divides n_kv_head 3 nor is a multiple of it: change one"),
    ("--model llama-nano --n-head 6 --n-kv-head 2 --tp 4",
     "n_head 6 is not divisible by tp 4: change one"),
    ("--model llama-nano --n-head 8 --n-kv-head 1 --head-dim 6 --tp 4 --exact",
     "--exact requires that tp 4 divides the 6 channels of all heads of keys: change one"),
    ("--model llama-nano --tp 2 --hidden 99", "the MLP's 99 hidden channels .* by tp 2")])
def test_what_a_llama_cannot_be_is_refused_with_its_numbers(shards, flags, words):
    given = parse_flags(["--data", str(shards), "--seq-len", "16", *flags.split()])
    with pytest.raises(ValueError, match=words):
        checks.validate(given, None, 4, "cpu")


def test_a_run_goes_on_with_its_model_and_weights_may_get_a_longer_one(shards, tmp_path,
                                                                        run_train):
    """The sum of 4 + 4 steps is 8; --init-from takes a longer --seq-len for rotary positions, but
    no other model; a GPT's stays as it is."""
    flags = ["--data", shards, "--model", "llama-nano", "--seq-len", 16, "--batch-size", 4,
             "--eval-every", 0]
    assert run_train(*flags, "--out", tmp_path / "a", "--steps", 8, "--save-every", 4)[0] == 0
    half = tmp_path / "a/step_00000004.pt"
    assert run_train(*flags, "--out", tmp_path / "b", "--steps", 8, "--resume", half)[0] == 0
    ends = [checkpoint.load(tmp_path / name / "latest.pt") for name in "ab"]
    assert all(ends[0]["parameters"][name].equal(x) for name, x in ends[1]["parameters"].items())
    tuned = ["--data", shards, "--batch-size", 4, "--eval-every", 0, "--steps", 1, "--lr", 1e-4,
             "--init-from", half, "--out", tmp_path / "c"]
    assert "--model" in run_train(*tuned, "--model", "nano")[2]
    assert run_train(*tuned, "--seq-len", 32)[0] == 0
    assert checkpoint.load(tmp_path / "c/latest.pt")["model"]["seq_len"] == 32


def test_a_named_size_is_compared_in_the_fields_that_are_no_flags_too():
    """A Mistral without a window is not one with a window; a checkpoint of an older version lacks
    the fields that have come since."""
    def merge(model, state):
        return merge_config(dict(model=model), dict(model=state), weights_only=True, file="a.pt")
    old = asdict(make_config(**SIZES["mistral-7b"]))
    del old["window"], old["head_bias"], old["learned_positions"]
    assert merge("mistral-7b", old)[1]["window"] == 0
    new = asdict(make_config(**SIZES["mistral-7b-v0.1"]))
    with pytest.raises(ValueError, match="rope_theta 10000.0, not 1000000.0; window 4096, not 0"):
        merge("mistral-7b", new)


def test_learned_positions_may_be_fewer_but_not_more(tmp_path):
    """Those of a Galactica, as those of a GPT."""
    state = dict(model=asdict(CFGS["galactica"]))
    merge = partial(merge_config, state=state, weights_only=True, file="a.pt")
    assert merge(dict(seq_len=8))[1]["seq_len"] == 8
    with pytest.raises(ValueError, match="a.pt has seq_len at most 16, not 32"):
        merge(dict(seq_len=32))
