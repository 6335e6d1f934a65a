"""How each architecture of transformers is written down: the attributes of its config and the names
of its parameters, beside ours.

    model_type  ours                        differences in the parameters
    gpt2        GPTConfig with gelu         matrices of blocks are (in, out)
    opt         GPTConfig with relu         q, k and v are three; two unused rows before positions
    opt         LlamaConfig, galactica      the same, and qkv is ordered by heads of k
    gpt_neox    LlamaConfig, neox           none: qkv is ordered by heads, as ours
    gptj        LlamaConfig, gptj           q, k and v are three; other pairs of channels rotate
    all others  LlamaConfig, MoEConfig      q, k and v are three, and so are gate and value

transformers fills in defaults, knows older keys, and gives the architectures common names. An
attribute that a class does not have changes nothing there.
"""
from contextlib import suppress
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import GPTConfig
from models import llama_sizes, make_config, moe
from models.llama import LlamaConfig

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DROPOUTS = ("attention_dropout", "hidden_dropout", "dropout", "embd_pdrop", "attn_pdrop",
            "resid_pdrop")
OF_TRAINING = ("dropout", "balance_loss", "z_loss")     # fields of ours that change no logits
HARMLESS = {*DROPOUTS, "transformers_version", "architectures", "dtype", "_name_or_path",
            "tokenizer", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
VALUES = {                                  # field: {their value: ours}, the usual one first
    "activation": {"silu": "silu", "relu": "relu", "gelu": "gelu_erf", "gelu_fast": "gelu",
                   "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "swish": "silu"},
    "residual": {True: "parallel", False: "serial"},
    "bias": {True: "all", False: "none"},
    "norm": {True: "layer", False: "plain"}}


class Family(NamedTuple):
    """How one architecture is written down."""
    model_type: str
    fields: dict | None             # of our config, alike in the family; None: a GPTConfig
    keys: dict[str, str]            # field of our config: attribute of theirs
    ends: dict[str, str]            # our module outside of the blocks: theirs
    blocks: str                     # their list of blocks
    block: dict[str, list[str]]     # our module in a block: theirs, stacked in this order
    transposed: bool = False        # matrices in blocks are (in, out)
    unused_positions: int = 0       # rows before the first position
    interleaved: bool = False       # they rotate channels 2i and 2i + 1, not i and i + n/2


SHAPE = {"vocab_size": "vocab_size", "seq_len": "max_position_embeddings",
         "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]

LLAMA = Family(
    "llama", llama_sizes.FAMILIES["llama"],
    keys=SHAPE | {"hidden": "intermediate_size", "activation": "hidden_act",
                  "n_kv_head": "num_key_value_heads", "head_dim": "head_dim",
                  "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"},
    ends={"embed.token": "model.embed_tokens", "head.norm": "model.norm", "head": "lm_head"},
    blocks="model.layers",
    block={"norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"], "attn.qkv": QKV,
           "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
           "attn.proj": ["self_attn.o_proj"],
           "mlp.up": ["mlp.gate_proj", "mlp.up_proj"], "mlp.down": ["mlp.down_proj"],
           "mlp.router": ["mlp.gate"], "mlp.experts.up": ["mlp.experts.gate_up_proj"],
           "mlp.experts.down": ["mlp.experts.down_proj"]})

OPT = Family(
    "opt", None, keys=SHAPE | {"activation": "activation_function"},
    ends={"embed.token": "model.decoder.embed_tokens", "head": "lm_head",
          "embed.position": "model.decoder.embed_positions",
          "head.norm": "model.decoder.final_layer_norm"},
    blocks="model.decoder.layers",
    block={"norm1": ["self_attn_layer_norm"], "norm2": ["final_layer_norm"], "attn.qkv": QKV,
           "attn.proj": ["self_attn.out_proj"], "mlp.up": ["fc1"], "mlp.down": ["fc2"]},
    unused_positions=2)

GPT2 = Family(
    "gpt2", None, keys=OPT.keys,
    ends={"embed.token": "transformer.wte", "embed.position": "transformer.wpe",
          "head.norm": "transformer.ln_f", "head": "lm_head"},
    blocks="transformer.h",
    block={"norm1": ["ln_1"], "norm2": ["ln_2"], "attn.qkv": ["attn.c_attn"],
           "attn.proj": ["attn.c_proj"], "mlp.up": ["mlp.c_fc"], "mlp.down": ["mlp.c_proj"]},
    transposed=True)

GPTJ = Family(
    "gptj", llama_sizes.FAMILIES["gptj"],
    keys=OPT.keys | {"hidden": "n_inner", "rotary": "rotary_dim", "norm_eps": "layer_norm_epsilon",
                     "tied": "tie_word_embeddings"},
    ends=GPT2.ends, blocks="transformer.h",
    block={"norm1": ["ln_1"], "attn.qkv": ["attn.q_proj", "attn.k_proj", "attn.v_proj"],
           "attn.proj": ["attn.out_proj"], "mlp.up": ["mlp.fc_in"], "mlp.down": ["mlp.fc_out"]},
    interleaved=True)

MIXTURE = LLAMA.keys | {"n_active": "num_experts_per_tok", "balance_loss": "router_aux_loss_coef"}

FAMILIES = {            # an export takes the first that has the model
    "opt": OPT,
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA._replace(model_type="mistral",
                              keys=LLAMA.keys | {"window": "sliding_window"}),
    "qwen2": LLAMA._replace(model_type="qwen2", fields=llama_sizes.FAMILIES["qwen2"]),
    "qwen3": LLAMA._replace(model_type="qwen3", fields=llama_sizes.FAMILIES["qwen3"]),
    "olmo": LLAMA._replace(model_type="olmo", fields=llama_sizes.FAMILIES["olmo"]),
    "olmo2": LLAMA._replace(
        model_type="olmo2", fields=llama_sizes.FAMILIES["olmo2"],
        block=LLAMA.block | {"norm1": ["post_attention_layernorm"],
                             "norm2": ["post_feedforward_layernorm"]}),
    "gpt_neox": LLAMA._replace(
        model_type="gpt_neox", fields=llama_sizes.FAMILIES["neox"],
        keys=LLAMA.keys | {"norm_eps": "layer_norm_eps", "residual": "use_parallel_residual"},
        ends={"embed.token": "gpt_neox.embed_in", "head.norm": "gpt_neox.final_layer_norm",
              "head": "lm_head"},
        blocks="gpt_neox.layers",
        block=LLAMA.block | {
            "attn.qkv": ["attention.query_key_value"], "attn.proj": ["attention.dense"],
            "mlp.up": ["mlp.dense_h_to_4h"], "mlp.down": ["mlp.dense_4h_to_h"]}),
    "phi": LLAMA._replace(
        model_type="phi", fields=llama_sizes.FAMILIES["phi"],
        keys=LLAMA.keys | {"norm_eps": "layer_norm_eps"},
        ends=LLAMA.ends | {"head.norm": "model.final_layernorm"},
        block=LLAMA.block | {"attn.proj": ["self_attn.dense"], "mlp.up": ["mlp.fc1"],
                             "mlp.down": ["mlp.fc2"]}),
    "gptj": GPTJ,
    "galactica": OPT._replace(
        fields=llama_sizes.FAMILIES["galactica"],
        keys=OPT.keys | {"hidden": "ffn_dim", "bias": "enable_bias",
                         "norm": "layer_norm_elementwise_affine"}),
    "mixtral": LLAMA._replace(
        model_type="mixtral", fields=moe.FAMILIES["mixtral"],
        keys=MIXTURE | {"n_expert": "num_local_experts", "window": "sliding_window"}),
    "olmoe": LLAMA._replace(
        model_type="olmoe", fields=moe.FAMILIES["olmoe"],
        keys=MIXTURE | {"n_expert": "num_experts", "normalised": "norm_topk_prob"}),
    "qwen3_moe": LLAMA._replace(
        model_type="qwen3_moe", fields=moe.FAMILIES["qwen3-moe"],
        keys=MIXTURE | {"n_expert": "num_experts", "normalised": "norm_topk_prob",
                        "hidden": "moe_intermediate_size"})}


# ---- The config ------------------------------------------------------------------------------

def family_of(config) -> Family:
    """Raises ValueError for an architecture that is not here. An OPT that model.py does not have is
    a Galactica."""
    kind = config.model_type
    if kind == "opt" and not (config.activation_function == "relu" and config.enable_bias
                              and config.layer_norm_elementwise_affine
                              and config.ffn_dim == 4 * config.hidden_size):
        kind = "galactica"
    if kind not in FAMILIES:
        raise ValueError(f"its model_type {kind!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def our_config(config) -> GPTConfig:
    """transformers' config -> ours. Raises ValueError for what our models cannot be, as far as the
    config shows it: some of it the logits alone show."""
    family = family_of(config)
    found = {name: getattr(config, key, None) for name, key in family.keys.items()}
    fields = {name: value for name, value in found.items() if value is not None}
    for name, values in VALUES.items():
        if name in fields and fields[name] not in values:
            raise ValueError(f"its {family.keys[name]} is {fields[name]!r}, and not one of "
                             f"{', '.join(map(str, values))}")
        if name in fields:
            fields[name] = values[fields[name]]
    if family is GPTJ:
        fields["rotary"] = config.rotary_dim * config.n_head / config.n_embd
        fields["hidden"] = config.n_inner or 4 * config.n_embd
    for key in ("sliding_window", "clip_qkv", "quantization_config"):   # few tokens do not show it
        value = getattr(config, key, None)
        if value is not None and key not in family.keys.values():
            raise ValueError(f"its {key} is {value}: no {family.model_type} here has one")
    if family.fields is not None:
        fields = {"n_kv_head": 0} | family.fields | read_rope(config) | fields
    if "n_expert" in fields:
        fields = moe.with_own_losses(fields)
    return make_config(**fields)


def read_rope(config) -> dict:
    """The fields of ours for rotary positions. Raises ValueError."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return {}
    fields = dict(rope_theta=float(rope["rope_theta"]))
    if rope.get("partial_rotary_factor") is not None:
        fields["rotary"] = float(rope["partial_rotary_factor"])
    if rope["rope_type"] == "llama3":
        fields["rope_scaling"] = tuple(float(rope[key]) for key in LLAMA3)
    elif rope["rope_type"] != "default":
        raise ValueError(f"its rope_type is {rope['rope_type']!r}, models/llama.py has only "
                         f"default and llama3")
    return fields


def unusual_keys(config) -> dict:
    """What a config has unlike its class, apart from what an import reads and what follows."""
    keys = [key for key in family_of(config).keys.values() if hasattr(config, key)]
    usual = type(config)(**{key: getattr(config, key) for key in keys}).to_dict()
    read = {config.attribute_map.get(key, key) for key in keys}
    return {key: value for key, value in config.to_dict().items()
            if value != usual.get(key) and key not in (read | HARMLESS)}


def their_config(cfg: GPTConfig, **facts):
    """The inverse of `our_config`: that of the first family which has this very model. `facts` are
    more of its attributes. Raises ValueError if none has it."""
    from transformers import AutoConfig
    for family in FAMILIES.values():
        if (family.fields is None) == isinstance(cfg, LlamaConfig):
            continue
        defaults = AutoConfig.for_model(family.model_type)
        keys = {name: cfg.dropout for name in DROPOUTS if hasattr(defaults, name)}
        for name, key in family.keys.items():
            values = VALUES.get(name, {})
            value = getattr(cfg, name, None)
            alike = [theirs for theirs, ours in values.items() if ours == value]
            if getattr(defaults, key, None) in alike:           # of several names its own
                alike = [getattr(defaults, key)]
            keys[key] = [*alike, value][0]
        if "balance_loss" in family.keys and hasattr(cfg, "n_expert"):
            keys["router_aux_loss_coef"] = round(cfg.balance_loss * cfg.n_layer / cfg.n_active, 12)
        if family is GPTJ:
            keys["rotary_dim"] = cfg.rotated
        elif family.model_type == "opt":
            keys |= dict(ffn_dim=cfg.hidden, word_embed_proj_dim=cfg.n_embd)
        elif family is not GPT2:
            rope = dict(rope_type="default", rope_theta=cfg.rope_theta)
            if cfg.rope_scaling:
                rope |= dict(rope_type="llama3") | dict(zip(LLAMA3, cfg.rope_scaling))
            if "rotary" in family.fields:
                rope["partial_rotary_factor"] = cfg.rotary
            keys["rope_parameters"] = rope
        if "sliding_window" in keys:
            keys["sliding_window"] = cfg.window or None
        with suppress(Exception):           # a shape that the family cannot have
            config = AutoConfig.for_model(family.model_type, **keys, **facts)
            found = our_config(config)
            alike = {name: getattr(cfg, name) for name in OF_TRAINING if hasattr(found, name)}
            if replace(found, **alike) == cfg:
                return config
    raise ValueError(f"no architecture of transformers that is known here has this model: "
                     f"{asdict(cfg)}")


# ---- One parameter ---------------------------------------------------------------------------

def their_names(name: str, family: Family) -> list[str]:
    """The names of their parameters that make ours. Raises ValueError if there are none."""
    module, kind = name.rsplit(".", 1)                  # kind: weight or bias
    try:
        if not module.startswith("blocks."):
            return [f"{family.ends[module]}.{kind}"]
        _, layer, module = module.split(".", 2)
        ends = "" if ".experts." in name else f".{kind}"
        return [f"{family.blocks}.{layer}.{theirs}{ends}" for theirs in family.block[module]]
    except KeyError:
        raise ValueError(f"{family.model_type} has no parameter for {name}") from None


def to_ours(name: str, tensors: list[torch.Tensor], family: Family,
            cfg: GPTConfig) -> torch.Tensor:
    """Our parameter `name` from theirs, in the order of `their_names`."""
    if family.transposed and name.startswith("blocks."):
        tensors = [t.mT if t.dim() == 2 else t for t in tensors]
    if is_grouped(name, tensors, family):
        if family.interleaved:
            order = pairs_apart(cfg)
            tensors = [*(channels_of_heads(t, order) for t in tensors[:2]), tensors[2]]
        groups = [t.unflatten(0, (cfg.n_kv_head, -1)) for t in tensors]     # (K, G D or D, C)
        return torch.cat(groups, 1).flatten(0, 1)                           # (K (G + 2) D, C)
    full = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if name == "embed.position.weight":
        full = full[family.unused_positions:]
    return full.contiguous()


def to_theirs(name: str, full: torch.Tensor, family: Family,
              cfg: GPTConfig) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`: {their name: tensor in fp32}."""
    full = full.float()
    if name == "embed.position.weight":
        full = F.pad(full, (0, 0, family.unused_positions, 0))
    names = their_names(name, family)
    parts = full.chunk(len(names))
    if is_grouped(name, names, family):
        D = cfg.head_dim
        groups = full.unflatten(0, (cfg.n_kv_head, -1))                     # (K, (G + 2) D, C)
        parts = [part.flatten(0, 1) for part in groups.split([groups.shape[1] - 2 * D, D, D], 1)]
        if family.interleaved:
            order = pairs_apart(cfg).argsort()
            parts = [*(channels_of_heads(part, order) for part in parts[:2]), parts[2]]
    if family.transposed and name.startswith("blocks."):
        parts = [t.mT if t.dim() == 2 else t for t in parts]
    return {key: part.contiguous() for key, part in zip(names, parts)}


def is_grouped(name: str, parts: list, family: Family) -> bool:
    """Whether our parameter is ordered by heads of k, and theirs is three."""
    return family.fields is not None and ".attn.qkv." in name and len(parts) == 3


def pairs_apart(cfg: LlamaConfig) -> torch.Tensor:
    """Their channels of a head in our order, (D,). They rotate 2i with 2i + 1, we i with i + n/2.
    """
    n = cfg.rotated
    return torch.tensor([*range(0, n, 2), *range(1, n, 2), *range(n, cfg.head_dim)])


def channels_of_heads(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The matrix of q or k, (H D, C) or (K D, C), with the channels of each head in this order."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
