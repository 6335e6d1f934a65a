"""Models of transformers, imported by tools.huggingface, have its logits and gradients.

Random weights, biases and norms too."""
import functools
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import sample
from model import IGNORE_INDEX
from models.moe import MoEConfig
from tests.harness import tokens_of
from tools import huggingface, huggingface_families

transformers = pytest.importorskip("transformers")

SMALL = dict(vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)
OF_GPT2 = dict(n_embd=48, n_layer=3, n_head=6, n_positions=64, vocab_size=160)
OF_OPT = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=6, ffn_dim=192,
              word_embed_proj_dim=48, max_position_embeddings=64, vocab_size=160,
              pad_token_id=None)                # a row of the embedding that learns nothing
OLMOE = SMALL | dict(pad_token_id=None, eos_token_id=None)
THEIRS = {      # model_type, config.json
    "gpt2": ("gpt2", OF_GPT2),
    "opt": ("opt", OF_OPT),
    "llama": ("llama", SMALL),
    "llama, multi-query, tied": ("llama", SMALL | dict(num_key_value_heads=1,
                                                       tie_word_embeddings=True)),
    "llama 3.1": ("llama", SMALL | dict(rope_parameters=LLAMA3)),
    "mistral": ("mistral", SMALL | dict(
        sliding_window=None, hidden_size=44, head_dim=10)),         # which LlamaConfig refuses
    "mistral, window": ("mistral", SMALL | dict(sliding_window=7, head_dim=16)),
    "mistral, window of all": ("mistral", SMALL | dict(sliding_window=64)),
    "qwen2": ("qwen2", SMALL | dict(tie_word_embeddings=True, hidden_size=44, head_dim=10)),
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


def their_config(name):
    model_type, shape = (THEIRS | BLOCKS)[name]
    if model_type == "gpt_neox":
        shape = {key: x for key, x in shape.items() if key != "num_key_value_heads"}
    return transformers.AutoConfig.for_model(model_type, **shape)


def our_config(name, **changes):
    return replace(huggingface_families.our_config(their_config(name)), **changes)


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory):
    """theirs_and_ours(name) -> a folder of a transformers model with random weights, that model,
    and the file that `import` makes of it."""
    @functools.cache
    def make(name):
        config = their_config(name)
        eager = dict(attn_implementation="eager")
        if hasattr(config, "num_experts_per_tok"):
            eager["experts_implementation"] = "eager"
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(config, **eager).eval()
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, 0 if parameter.dim() > 1 else 1, 0.15)
        if config.model_type == "opt":          # rows that no position uses
            theirs.model.decoder.embed_positions.weight.data[:2] = 0
        folder = tmp_path_factory.mktemp("theirs") / config.model_type
        theirs.save_pretrained(folder)
        file = folder.parent / "model.pt"
        huggingface.import_model(str(folder), file)
        return folder, theirs, file
    return make


@contextmanager
def in_fp64(theirs):
    """Let transformers compute norms, rotary positions and routers in fp64, and GPT-J's table."""
    with mock.patch.multiple(torch, float32=torch.float64, float=torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        if theirs.config.model_type == "gptj":
            from transformers.models.gptj import modeling_gptj
            table = theirs.transformer.rotary_emb.embed_positions
            table.copy_(modeling_gptj.create_sinusoidal_positions(len(table),
                                                                  theirs.config.rotary_dim))
        yield


def difference(x, y):
    return ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()


@pytest.mark.claim("Logits and gradients are those of fourteen transformers classes.")
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
