"""Llamas, their relatives and mixtures of experts have the numbers of transformers.

Random weights, biases and norms too, go in by tools.huggingface and out again.
"""
import json
import random
import shutil
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import sample
from model import IGNORE_INDEX
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import FAMILIES as MIXTURES
from models.moe import MoEConfig
from models.window import WindowedAttention
from tests.harness import tokens_of, weights_only
from tools import huggingface, huggingface_families

SMALL = dict(vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)
OF_GPT2 = dict(n_embd=48, n_layer=3, n_head=6, n_positions=64, vocab_size=160)
OF_OPT = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=6, ffn_dim=192,
              word_embed_proj_dim=48, max_position_embeddings=64, vocab_size=160)
OLMOE = SMALL | dict(pad_token_id=None, eos_token_id=None)
THEIRS = {      # model_type, config.json
    "llama": ("llama", SMALL),
    "llama, multi-query, tied": ("llama", SMALL | dict(num_key_value_heads=1,
                                                       tie_word_embeddings=True)),
    "llama 3.1": ("llama", SMALL | dict(rope_parameters=LLAMA3)),
    "mistral, window": ("mistral", SMALL | dict(sliding_window=7, head_dim=16)),
    "qwen2": ("qwen2", SMALL | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", SMALL | dict(head_dim=16)),
    "olmo": ("olmo", SMALL | dict(num_key_value_heads=6, pad_token_id=None)),
    "gpt_neox": ("gpt_neox", SMALL | dict(intermediate_size=192)),
    "gpt_neox, serial": ("gpt_neox", SMALL | dict(
        use_parallel_residual=False, hidden_act="gelu_fast", rotary_pct=0.5)),
    "olmo2": ("olmo2", SMALL | dict(pad_token_id=None)),
    "phi": ("phi", SMALL | dict(num_key_value_heads=3)),
    "gptj": ("gptj", OF_GPT2 | dict(rotary_dim=6)),
    "galactica": ("opt", OF_OPT | dict(activation_function="gelu")),
    "galactica without biases": ("opt", OF_OPT | dict(
        activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False)),
    "mixtral": ("mixtral", SMALL | dict(num_experts_per_tok=2, num_local_experts=5,
                                        sliding_window=7)),
    "olmoe": ("olmoe", OLMOE | dict(num_experts=7, num_experts_per_tok=3)),
    "olmoe, grouped": ("olmoe", OLMOE | dict(num_experts=4, num_key_value_heads=3,
                                             num_experts_per_tok=2, norm_topk_prob=True)),
    "qwen3_moe": ("qwen3_moe", SMALL | dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
        norm_topk_prob=True, tie_word_embeddings=True))}
BLOCKS = {f"block of {name}": (name, THEIRS[name][1] | dict(num_hidden_layers=1,
                                                           router_aux_loss_coef=0.03))
          for name in ("mixtral", "olmoe", "qwen3_moe")}
GPTS = {"gpt2": ("gpt2", OF_GPT2), "opt": ("opt", OF_OPT)}      # by tests/test_huggingface.py


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory):
    """theirs_and_ours(name) -> a folder of a transformers model with random weights, that model,
    and the file that `import` makes of it."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def make(name):
        if name not in made:
            model_type, shape = (THEIRS | GPTS | BLOCKS)[name]
            if model_type == "gpt_neox":
                shape = {key: x for key, x in shape.items() if key != "num_key_value_heads"}
            config = transformers.AutoConfig.for_model(model_type, **shape)
            eager = dict(attn_implementation="eager")
            if "num_experts_per_tok" in shape:
                eager["experts_implementation"] = "eager"
            torch.manual_seed(0)
            theirs = transformers.AutoModelForCausalLM.from_config(config, **eager).eval()
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


@contextmanager
def in_fp64(theirs):
    """Let transformers compute norms, rotary positions and routers in fp64, and GPT-J's table."""
    with mock.patch.object(torch, "float32", torch.float64), \
            mock.patch.object(torch, "float", torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        if theirs.config.model_type == "gptj":
            from transformers.models.gptj import modeling_gptj
            table = theirs.transformer.rotary_emb.embed_positions
            table.copy_(modeling_gptj.create_sinusoidal_positions(len(table),
                                                                  theirs.config.rotary_dim))
        yield


def difference(x, y):
    return ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()


@pytest.mark.claim("Logits and gradients are those of thirteen transformers classes.")
@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_gradients_are_those_of_transformers(theirs_and_ours, name):
    """In fp64, to 1e-10 and 1e-9. Without the routers' losses: transformers' pool all layers.
    Twenty greedy tokens with our cache are those of its model without one."""
    _, theirs, file = theirs_and_ours(name)
    theirs = theirs.double()
    loaded, _ = checkpoint.load_model(file)
    cfg = loaded.cfg
    if isinstance(cfg, MoEConfig):
        cfg = replace(cfg, balance_loss=0.0, z_loss=0.0)
    ours = cfg.build().double().eval()
    ours.load_state_dict(loaded.state_dict())
    tokens = tokens_of(replace(cfg, seq_len=40), 2)
    with in_fp64(theirs):
        expected = theirs(tokens).logits
    logits = difference(ours(tokens), expected)
    assert logits < 1e-10, f"{name}: logits differ by {logits:.3g}"
    targets = tokens.roll(-1, 1)
    ours(tokens, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    family = huggingface_families.family_of(theirs.config)
    gradients = {key: parameter.grad.double() for key, parameter in theirs.named_parameters()}
    theirs.zero_grad()
    for key, parameter in ours.named_parameters():
        names = huggingface_families.their_names(key, family)
        full = huggingface_families.to_ours(key, [gradients[one] for one in names], family, cfg)
        gradient = difference(parameter.grad[:len(full)], full)
        assert gradient < 1e-9, f"{name}: gradients of {key} differ by {gradient:.3g}"
    tokens = [3, 1, 4, 1, 5]
    found = [drawn[0] for drawn in sample.generate(loaded.double(), tokens, 20, set(), 0.0)]
    for _ in found:
        tokens.append(theirs(torch.tensor([tokens])).logits[0, -1].argmax().item())
    assert found == tokens[5:]


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_has_the_loss_of_transformers_with_that_of_its_router(theirs_and_ours, name,
                                                                      padding):
    """Loss, gradient of the router and load of one sequence, whose end may be padding."""
    _, theirs, file = theirs_and_ours(name)
    theirs, T = theirs.double(), 32
    trained, _ = checkpoint.load_model(file)
    ours = replace(trained.cfg, z_loss=0.0).build().double()
    ours.load_state_dict(trained.state_dict())
    tokens = tokens_of(replace(ours.cfg, seq_len=T), 1)
    text = (torch.arange(T) < T - padding).expand(1, T)
    labels = tokens.masked_fill(~text, -100)
    theirs.zero_grad()
    with in_fp64(theirs):
        expected = theirs(tokens, attention_mask=text.long(), labels=labels,
                          output_router_logits=True).loss
    expected.backward()

    targets = F.pad(tokens.masked_fill(~text, IGNORE_INDEX)[:, 1:], (0, 1), value=IGNORE_INDEX)
    positions = torch.arange(T).expand(1, T) * text if padding > 0 else None
    value = ours(tokens, targets, positions=positions) / (T - padding - 1)
    value.backward()
    router = ours.blocks["0"].mlp.router
    assert value.item() + router.losses.item() / T == pytest.approx(expected.item(), abs=1e-6)
    assert value.item() < expected.item() - 0.02
    gradient = theirs.get_submodule("model.layers.0.mlp.gate").weight.grad
    assert difference(router.weight.grad, gradient) < 1e-6
    assert router.load.sum() == (T - padding) * ours.cfg.n_active


@pytest.mark.claim("A model of thirteen architectures goes in and out bit by bit.")
@pytest.mark.parametrize("name", THEIRS)
def test_a_round_trip_changes_no_bit(theirs_and_ours, tmp_path, name):
    """transformers opens the export; its weights and its configuration are the imported ones."""
    transformers = pytest.importorskip("transformers")
    folder, _, file = theirs_and_ours(name)
    huggingface.export_model(file, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours, expected = again.state_dict(), before.state_dict()
    assert ours.keys() == expected.keys()
    assert all(ours[key].equal(expected[key]) for key in expected)
    assert (getattr(again.config, "router_aux_loss_coef", None)
            == getattr(before.config, "router_aux_loss_coef", None))
    tokens = torch.arange(40)[None] % 160
    assert again(tokens).logits.equal(before(tokens).logits)
    huggingface.import_model(str(tmp_path / "out"), tmp_path / "again.pt")
    assert checkpoint.load(tmp_path / "again.pt")["model"] == checkpoint.load(file)["model"]


def random_config(seed: int, family: str) -> LlamaConfig:
    """A small shape of the family; its heads need not divide its width."""
    draw = random.Random(f"{family} {seed}")
    n_kv_head = draw.choice([1, 2, 3])
    fields = dict(n_head=n_kv_head * draw.choice([1, 2, 3]), n_kv_head=n_kv_head,
                  n_embd=draw.choice([20, 32, 44]), head_dim=draw.choice([4, 8, 10]))
    if family in ("neox", "phi", "gptj", "galactica"):      # their architectures have no head_dim
        fields = dict(n_head=n_kv_head, n_embd=8 * n_kv_head)
    return LlamaConfig(vocab_size=97, seq_len=24, n_layer=draw.choice([1, 2]),
                       hidden=draw.choice([24, 40]), **fields, **FAMILIES[family])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"palm"}))
def test_an_export_of_any_width_opens_in_transformers(tmp_path, capsys, family):
    """Three shapes: logits in fp64, and imported again, every bit. A Llama whose width is no
    multiple of its heads, which LlamaConfig refuses, is a Mistral without a window."""
    transformers = pytest.importorskip("transformers")
    written = set()
    for seed in range(3):
        cfg, folder = random_config(seed, family), tmp_path / str(seed)
        plain = weights_only(tmp_path / "a.pt", cfg, "own-97").double()
        huggingface.export_model(tmp_path / "a.pt", folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager").double().eval()
        written.add((cfg.n_embd % cfg.n_head == 0, theirs.config.model_type))
        tokens = tokens_of(cfg, 2)
        with in_fp64(theirs):
            expected = theirs(tokens).logits
        assert difference(plain(tokens), expected) < 1e-10
        huggingface.import_model(str(folder), folder / "b.pt")
        one, two = (checkpoint.load(file) for file in (tmp_path / "a.pt", folder / "b.pt"))
        assert one["model"] == two["model"]
        assert all(full.equal(two["parameters"][name]) for name, full in one["parameters"].items())
    if family == "llama":
        assert written == {(True, "llama"), (False, "mistral")}


def test_a_window_that_hides_nothing_is_kept():
    """sliding_window of Mistral at or above its positions: attention has no mask, and the export
    says it again. With a longer --seq-len it hides something."""
    transformers = pytest.importorskip("transformers")
    for window, ours in ((None, 0), (64, 64), (65, 65), (63, 63)):
        config = transformers.MistralConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            sliding_window=window)
        cfg = huggingface_families.our_config(config)
        assert cfg.window == ours
        core = cfg.build().blocks["0"].attn.core_attention
        assert isinstance(core, WindowedAttention) == (ours == 63)
        written = huggingface_families.their_config(cfg)
        assert getattr(written, "sliding_window", None) == window
        assert huggingface_families.our_config(written) == cfg


@pytest.mark.parametrize("name, changes, words", [
    ("opt", dict(enable_bias=False), "unexpected keys there, such as model.decoder"),
    ("opt", dict(do_layer_norm_before=False), "unexpected keys there, such as model.decoder.final"),
    ("opt", dict(_remove_final_layer_norm=True), "unexpected keys there, such as model.decoder"),
    ("phi", dict(qk_layernorm=True), "missing keys there, such as model.layers.0.self_attn"),
    ("gptj", dict(rotary_dim=None), "rotary_dim"),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4), "its sliding_window is 4: no qwen2"),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0)), "its rope_type is 'yarn'"),
    ("llama", dict(rope_scaling=dict(type="dynamic", factor=2.0)), "its rope_type is 'dynamic'"),
    ("llama", dict(attention_bias=True), "missing keys there, such as model.layers.0.self_attn.k"),
    ("llama", dict(hidden_act="mish"), "its hidden_act is 'mish'"),
    ("olmo", dict(clip_qkv=8.0), "its clip_qkv is 8.0"),
    ("gpt_neox", dict(attention_bias=False), "unexpected keys there, such as gpt_neox.layers.0"),
    ("qwen3", dict(layer_types=["full_attention", "sliding_attention", "full_attention"],
                   use_sliding_window=True, sliding_window=4), "its sliding_window is 4: no qwen3"),
    ("llama", dict(vocab_size="160"), "Validation error for field 'vocab_size'"),
    ("llama", dict(rope_parameters=dict(rope_type="llama3", factor=8.0)), "Missing required keys"),
    ("gpt_neox", dict(rope_parameters=dict(partial_rotary_factor=2.0)), "rotary 2 is no part of"),
    ("llama", dict(tie_word_embeddings=True), "lm_head.weight is a parameter of transformers'"),
    ("mixtral", dict(num_experts_per_tok=6), "n_active 6 is not between 1 and n_expert 5"),
    ("mixtral", dict(num_local_experts="5"), "Validation error for field 'num_local_experts'"),
    ("olmoe", dict(clip_qkv=8.0), "its clip_qkv is 8.0"),
    ("qwen3_moe", dict(mlp_only_layers=[0]), "missing keys there"),
    ("qwen3_moe", dict(decoder_sparse_step=2), "missing keys there")])
def test_what_the_model_cannot_be_is_refused(theirs_and_ours, tmp_path, name, changes, words):
    """A ValueError names the key of config.json and its value, or what shows the difference."""
    folder, *_ = theirs_and_ours(name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=words):
        huggingface.import_model(str(tmp_path), tmp_path / "new.pt")


@pytest.mark.parametrize("changes", [dict(balance_bias=0.01), dict(shared_hidden=16)])
def test_what_no_architecture_has_is_not_exported(changes):
    pytest.importorskip("transformers")
    cfg = MoEConfig(**MIXTURES["mixtral"] | changes)
    with pytest.raises(ValueError, match="no architecture of transformers"):
        huggingface_families.their_config(cfg)


@pytest.mark.claim("A conversion ends with equal logits, or is refused.")
@pytest.mark.parametrize("name, changes", [
    ("gpt2", dict(activation="relu")), ("opt", dict(activation="gelu")),
    ("llama", dict(norm_eps=0.1)), ("llama", dict(rope_theta=5.0)),
    ("llama", dict(activation="relu")), ("llama 3.1", dict(rope_scaling=())),
    ("mistral, window", dict(window=0)), ("mistral, window", dict(window=6)),
    ("gpt_neox", dict(residual="serial")), ("gpt_neox", dict(rotary=0.5)),
    ("gptj", dict(rotary=0.25)), ("galactica", dict(activation="gelu"))])
def test_the_check_sees_a_config_that_is_another(theirs_and_ours, name, changes):
    """The parameters fit both models. The logits tell."""
    folder, *_ = theirs_and_ours(name)
    config, cfg = huggingface.read_config(folder)
    with pytest.raises(ValueError, match="have other logits"):
        huggingface.read_parameters(folder, config, replace(cfg, **changes))
