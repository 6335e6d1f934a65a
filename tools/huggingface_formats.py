"""Convert config.json and the tensors of an architecture of Hugging Face, by the tables of
tools/huggingface_families.py. tools/huggingface.py reads and writes the files.

What a model of ours cannot be is refused by its key in config.json.
"""
import math
import re
from contextlib import suppress
from dataclasses import asdict, fields, replace

import torch
import torch.nn.functional as F

from model import GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig
from tools.huggingface_families import (ACTIVATIONS, ANY, FAMILIES, FIXED, GALACTICA,
                                        LLAMA_ACTIVATIONS, NEOX, Family)

MODEL_TYPES = {"gelu": "gpt2", "relu": "opt"}      # a GPT's activation: who has it
END_OF_OTHERS = {"opt-50272": 2}                   # token of a tokenizer that is not ours
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


# ---------------------------------------------------------------------------------------------
# One parameter
# ---------------------------------------------------------------------------------------------


def family_of(model_type: str, cfg: GPTConfig) -> Family:
    """The family, with the names of the tensors of each of this model's experts."""
    family = FAMILIES[model_type]
    block = {}
    for ours, theirs in family.block.items():
        block[ours] = theirs
        if is_of_experts(ours):
            block[ours] = [one.format(expert) for expert in range(cfg.n_expert) for one in theirs]
    return family._replace(block=block)


def is_of_experts(name: str) -> bool:
    """Whether our parameter, or module, stacks a matrix of every expert."""
    return ".experts." in name


def their_names(name: str, family: Family) -> list[str]:
    """Names, without the family's prefix, of the tensors that hold our parameter `name`. Raises
    ValueError if it has none."""
    module, kind = name.rsplit(".", 1)                      # kind: weight or bias
    with_layer = re.fullmatch(r"blocks\.(\d+)\.(.*)", module)
    if module in family.ends:
        return [f"{family.ends[module]}.{kind}"]
    if with_layer is None or with_layer[2] not in family.block:
        raise ValueError(f"{family.architecture} has no parameter for {name}")
    layer, module = with_layer.groups()
    return [f"{family.blocks}.{layer}.{theirs}.{kind}" for theirs in family.block[module]]


def is_transposed(name: str, tensor: torch.Tensor, family: Family) -> bool:
    return family.transposed and name.startswith("blocks.") and tensor.dim() == 2


def is_grouped(name: str, family: Family) -> bool:
    """Whether our parameter is ordered by heads of k, and theirs is three tensors."""
    return family.fields is not None and ".attn.qkv." in name and len(
        their_names(name, family)) == 3


def to_ours(name: str, tensors: list[torch.Tensor], family: Family,
            cfg: GPTConfig) -> torch.Tensor:
    """Our parameter `name` from the family's tensors, in the order of `their_names`."""
    tensors = [t.T if is_transposed(name, t, family) else t for t in tensors]
    if is_grouped(name, family):
        if family.interleaved:
            order = pairs_apart(cfg)
            tensors = [*(channels_of_heads(t, order) for t in tensors[:2]), tensors[2]]
        groups = [t.unflatten(0, (cfg.n_kv_head, -1)) for t in tensors]     # (K, G D or D, C)
        return torch.cat(groups, 1).flatten(0, 1)                           # (K (G + 2) D, C)
    full = torch.cat(tensors)
    if is_of_experts(name):
        return full.unflatten(0, (cfg.n_expert, -1))                        # (E, 2F, C)
    if name == "embed.position.weight":
        full = full[family.unused_positions:]
    return full.contiguous()


def pairs_apart(cfg: LlamaConfig) -> torch.Tensor:
    """Their channels of a head in our order, (D,). They rotate 2i with 2i + 1, we i with
    i + n/2."""
    n = cfg.rotated
    return torch.tensor([*range(0, n, 2), *range(1, n, 2), *range(n, cfg.head_dim)])


def channels_of_heads(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The matrix of q or k, (H D, C) or (K D, C), with the channels of each head in this order."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def to_theirs(name: str, full: torch.Tensor, family: Family,
              cfg: GPTConfig) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`: {full name: tensor in fp32}."""
    full = full.float()
    if name == "embed.position.weight":
        full = F.pad(full, (0, 0, family.unused_positions, 0))
    names = their_names(name, family)
    if is_of_experts(name):
        full = full.flatten(0, 1)                                           # (E 2F, C)
    if is_grouped(name, family):
        D = cfg.head_dim
        groups = full.unflatten(0, (cfg.n_kv_head, -1))                     # (K, (G + 2) D, C)
        parts = [part.flatten(0, 1) for part in groups.split([groups.shape[1] - 2 * D, D, D], 1)]
        if family.interleaved:
            order = pairs_apart(cfg).argsort()
            parts = [*(channels_of_heads(part, order) for part in parts[:2]), parts[2]]
    else:
        parts = full.chunk(len(names))
    tensors = [t.T if is_transposed(name, t, family) else t for t in parts]
    prefix = "" if name.startswith("head.") and "norm" not in name else family.prefix
    return {prefix + theirs: t.contiguous() for theirs, t in zip(names, tensors)}


# ---------------------------------------------------------------------------------------------
# config.json
# ---------------------------------------------------------------------------------------------


def kind_of(config: dict) -> str:
    """The key in FAMILIES: its model_type. An OPT that model.py does not have is a Galactica."""
    model_type = config.get("model_type")
    width, hidden = config.get("hidden_size"), config.get("ffn_dim")
    is_opt = (config.get("activation_function") in (None, "relu")
              and config.get("enable_bias", True)
              and config.get("layer_norm_elementwise_affine", True)
              and (type(width) is not int or hidden in (None, 4 * width)))
    if model_type == "opt" and not is_opt:
        return "galactica"
    return model_type


def model_config(config: dict) -> GPTConfig:
    """config.json -> our config. Raises ValueError for an architecture that we do not have."""
    kind = kind_of(config)
    if kind not in list(FAMILIES):                  # of a list: a wrong value may have no hash
        raise ValueError(f"its model_type {kind!r} is none of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    check_only(config, family.only, "models/llama.py")
    if kind == "gptj":
        config = {"rotary_dim": 64} | config
        if config.get("n_inner") is None and type(config.get("n_embd")) is int:
            config = config | {"n_inner": 4 * config["n_embd"]}
    # null: the default; but of these the number of heads, the width over it, and no window
    config = {key: 0 if value is None else value for key, value in config.items()
              if value is not None or key in ("num_key_value_heads", "head_dim", "sliding_window")}
    check_kind(config, family)
    if "num_local_experts" in config:               # transformers 5 writes Qwen3-MoE's so
        config.setdefault("num_experts", config["num_local_experts"])
    for theirs in family.shape.values():
        if theirs not in config:
            raise ValueError(f"it lacks {theirs}")
        if type(config[theirs]) is not int or config[theirs] < 1:
            raise ValueError(f"its {theirs} is {config[theirs]!r}, not a whole number above 0")
    shape = {ours: config[theirs] for ours, theirs in family.shape.items()}
    if family.fields is not None:
        return llama_config(config, shape, family)

    activation = config.get(family.activation_key, family.activation)
    if activation not in list(ACTIVATIONS):
        raise ValueError(f"its {family.activation_key} is {activation!r}, model.py has only "
                         f"{', '.join(ACTIVATIONS)}")
    width = shape["n_embd"]
    fixed = {**FIXED, "n_inner": 4 * width, "ffn_dim": 4 * width, "word_embed_proj_dim": width}
    check_only(config, {key: (value, value) for key, value in fixed.items()}, "model.py")
    return GPTConfig(activation=ACTIVATIONS[activation], **shape)


def check_only(config: dict, only: dict, ours: str) -> None:
    """Raise ValueError if a key does not have the one value of our file. `only`: as Family's."""
    for key, (value, default) in only.items():
        given = config.get(key, default)
        if given != value:
            raise ValueError(f"its {key} is {given!r}, {ours} has only {value!r}")


def check_kind(config: dict, family: Family) -> None:
    """Raise a ValueError if the model is none of language, its numbers are no plain ones, or it
    comes with its own code."""
    for key in ("quantization_config", "compression_config"):
        if key in config:
            raise ValueError(f"it has a {key}: give the model before it was quantised")
    for key, value in ANY.items():
        if config.get(key, value) != value:
            raise ValueError(f"its {key} is {config[key]!r}: only a decoder by itself is known")
    base = re.sub("(ForCausalLM|LMHeadModel)$", "", family.architecture)
    models_of_language = {f"{base}{end}" for end in (
        "ForCausalLM", "LMHeadModel", "Model", "DoubleHeadsModel", "PreTrainedModel")}
    named = config.get("architectures", [])
    if not isinstance(named, list):
        raise ValueError(f"its architectures is {named!r}, not a list")
    if named and not models_of_language & set(map(str, named)):
        raise ValueError(f"its architectures are {', '.join(map(str, named))}, whose head or body "
                         f"is another than that of {family.architecture}: give a model of "
                         f"language, or name it so there if it is one")
    code = config.get("auto_map", {})
    if not isinstance(code, dict):
        raise ValueError(f"its auto_map is {code!r}, not an object")
    own = [value for key, value in code.items() if key.startswith("AutoModel")]
    if own:
        raise ValueError(f"its auto_map names code of its own, {own[0]}, which may compute another "
                         f"model: if that is {family.architecture}, remove auto_map")


def value_of(config: dict, key: str, default):
    """The value of a key. Raises ValueError if its type is not the default's, or it is negative."""
    value = config.get(key, default)
    if isinstance(default, bool):
        kind = "true or false"
        is_right = isinstance(value, bool)
    elif isinstance(default, int):
        kind = "a whole number from 0 on"
        is_right = type(value) is int and value >= 0
    else:
        kind = "a number from 0 on"
        is_right = type(value) in (int, float) and 0 <= value < math.inf
    if not is_right:
        raise ValueError(f"its {key} is {value!r}, not {kind}")
    return value


def llama_config(config: dict, shape: dict, family: Family) -> LlamaConfig:
    """`model_config` of a Llama or a relative; `shape` is what it has of `family.shape`."""
    activation = config.get(family.activation_key, family.activation)
    if activation not in list(LLAMA_ACTIVATIONS):
        raise ValueError(f"its {family.activation_key} is {activation!r}, models/llama.py has only "
                         f"{', '.join(LLAMA_ACTIVATIONS)}")
    layers = config.get("layer_types", [])
    if not isinstance(layers, list):
        raise ValueError(f"its layer_types is {layers!r}, not a list")
    kinds = set(map(str, layers)) - {"full_attention"}
    if kinds:
        raise ValueError(f"its layer_types have {', '.join(sorted(kinds))}, models/llama.py has "
                         f"only full_attention")
    for ours, (theirs, default) in family.optional.items():
        shape[ours] = value_of(config, theirs, default)
    if not config.get("use_parallel_residual", True):
        shape["residual"] = "serial"
    if "rotated" in shape:
        shape["rotary"] = rotary_of(shape.pop("rotated"), shape["n_embd"] // shape["n_head"])
    if family is GALACTICA:
        shape |= galactica_shape(config)
    if family.has_rope_keys:
        read_rope(config, shape, family)
    kind = LlamaConfig
    if "n_expert" in shape:
        kind = MoEConfig
    return kind(**(family.fields | shape | dict(activation=LLAMA_ACTIVATIONS[activation])))


def read_rope(config: dict, shape: dict, family: Family) -> None:
    """Add to the `shape` what config.json says of rotary positions."""
    # (Before transformers 5 its parts stood by themselves. As there, rope_scaling comes first.)
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key, {})
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        raise ValueError(f"its {key} is {rope!r}, where models/llama.py has one object for all "
                         f"layers")
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        missing = [key for key in LLAMA3_ROPE if key not in rope]
        if missing:
            raise ValueError(f"its rope_type is llama3, but it lacks {', '.join(missing)}")
        shape["rope_scaling"] = tuple(float(value_of(rope, key, 1.0)) for key in LLAMA3_ROPE)
        if 0 in shape["rope_scaling"]:
            raise ValueError(f"its rope_type is llama3, but {', '.join(LLAMA3_ROPE)} are "
                             f"{shape['rope_scaling']}: none may be 0")
    elif kind != "default":
        raise ValueError(f"its rope_type is {kind!r}, models/llama.py has only default and llama3")
    theta = "rotary_emb_base" if family is NEOX else "rope_theta"
    theta = value_of(config, theta, 10000.0)
    shape["rope_theta"] = float(value_of(rope, "rope_theta", float(theta)))
    if shape["rope_theta"] == 0:
        raise ValueError("its rope_theta is 0")
    if "rotary" in family.optional:
        shape["rotary"] = value_of(rope, "partial_rotary_factor", float(shape["rotary"]))
    else:
        fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
        if fraction != 1:
            raise ValueError(f"its partial_rotary_factor is {fraction}, which "
                             f"{family.architecture} does not have here")


def rotary_of(rotated: int, head_dim: int) -> float:
    """The fraction of the channels of a head by which LlamaConfig.rotated is `rotated`."""
    fraction = rotated / head_dim
    if int(fraction * head_dim) < rotated:          # the product was rounded down
        fraction = math.nextafter(fraction, math.inf)
    return fraction


def galactica_shape(config: dict) -> dict:
    """What of an OPT depends on whether it has biases, and norms with parameters."""
    width = config["hidden_size"]
    check_only(config, {"word_embed_proj_dim": (width, width)}, "models/llama.py")
    has_bias = value_of(config, "enable_bias", True)
    has_affine_norms = value_of(config, "layer_norm_elementwise_affine", True)
    if has_affine_norms and not has_bias:
        raise ValueError("its norms have biases and its matrices have none (enable_bias is False, "
                         "layer_norm_elementwise_affine is not): models/llama.py has no such model")
    return dict(bias="all" if has_bias else "none", norm="layer" if has_affine_norms else "plain")


def config_json(cfg: GPTConfig, tokenizer: str, end: int | None = None) -> dict:
    """The inverse of `model_config`. `tokenizer` is our own key; `end` its token that ends a text,
    if it is one of ours. Raises ValueError for what no architecture has."""
    theirs = llama_json(cfg) if isinstance(cfg, LlamaConfig) else gpt_json(cfg)
    end = END_OF_OTHERS.get(tokenizer, end)
    if end is not None and end >= cfg.vocab_size:
        raise ValueError(f"the tokenizer {tokenizer} has {end + 1} tokens, but the model's "
                         f"vocabulary {cfg.vocab_size}")
    # Where a key is missing, transformers takes its own default: dropout 0.1, OPT's tokens. Its
    # OPT learns nothing of the token of pad_token_id, and GPT-2's tokenizer has none.
    return theirs | dict(tokenizer=tokenizer, dtype="float32", tie_word_embeddings=cfg.tied,
                         bos_token_id=end, eos_token_id=end, pad_token_id=None)


def gpt_json(cfg: GPTConfig) -> dict:
    """The keys of `config_json` that depend on the model."""
    if cfg.activation not in MODEL_TYPES:
        raise ValueError(f"activation {cfg.activation!r} is neither GPT-2's (gelu) nor OPT's "
                         f"(relu): opened as one of them it would be another model")
    family = FAMILIES[MODEL_TYPES[cfg.activation]]
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.name not in ("activation", "dropout", *family.shape) and value != field.default:
            raise ValueError(f"{family.architecture} has no {field.name} {value}: opened there it "
                             f"would be another model")
    config = keys_of(family, MODEL_TYPES[cfg.activation], cfg)
    config[family.activation_key] = family.activation
    if family.activation == "relu":
        config |= dict(ffn_dim=4 * cfg.n_embd, word_embed_proj_dim=cfg.n_embd)
    return config


def keys_of(family: Family, model_type: str, cfg: GPTConfig) -> dict:
    """The keys of config.json that every architecture has, by its own names."""
    names = dict(model_type=model_type, architectures=[family.architecture])
    shape = {theirs: getattr(cfg, ours) for ours, theirs in family.shape.items()}
    return names | dict.fromkeys(family.dropout, cfg.dropout) | shape


def llama_json(cfg: LlamaConfig) -> dict:
    """The same for the first family that has this very model. Dropout and z_loss are no part of
    it: they change its training alone."""
    theirs = {ours: name for name, ours in reversed(LLAMA_ACTIVATIONS.items())}
    rope = dict(rope_type="default", rope_theta=cfg.rope_theta)
    if cfg.rope_scaling:
        rope |= dict(rope_type="llama3") | dict(zip(LLAMA3_ROPE, cfg.rope_scaling))
    if cfg.activation not in theirs:
        raise ValueError(f"no architecture of transformers has the activation {cfg.activation}")
    for model_type, family in FAMILIES.items():
        is_mixture = "n_expert" in family.shape
        if family.fields is None or is_mixture != isinstance(cfg, MoEConfig):
            continue
        activation = theirs[cfg.activation]
        if LLAMA_ACTIVATIONS[family.activation] == cfg.activation:
            activation = family.activation      # of several names its own, with its last digits
        if cfg.n_embd % cfg.n_head and not family.any_width:
            continue
        config = keys_of(family, model_type, cfg) | {family.activation_key: activation}
        config |= {key: value for key, (value, _) in family.only.items()}
        config |= {key: getattr(cfg, ours) for ours, (key, _) in family.optional.items()}
        if "window" in family.optional:
            config["sliding_window"] = cfg.window or None
        if family is GALACTICA:
            config |= dict(model_type="opt", enable_bias=cfg.bias == "all",
                           layer_norm_elementwise_affine=cfg.norm == "layer",
                           word_embed_proj_dim=cfg.n_embd)
        if family.has_rope_keys:
            config |= dict(rope_theta=cfg.rope_theta, rope_parameters=dict(rope))
        if model_type == "gpt_neox":
            config |= dict(use_parallel_residual=cfg.residual == "parallel",
                           rotary_emb_base=cfg.rope_theta)
        if "rotary" in family.optional:
            config["rope_parameters"]["partial_rotary_factor"] = cfg.rotary
        with suppress(ValueError):              # of a shape that the family cannot have
            found = model_config(config)
            trained_alike = {name: getattr(cfg, name) for name in ("dropout", "z_loss")
                             if hasattr(found, name) and hasattr(cfg, name)}
            if replace(found, **trained_alike) == cfg:
                return config
    for name, part in (("balance_bias", "router's bias"), ("shared_hidden", "shared expert")):
        if getattr(cfg, name, 0) > 0:
            raise ValueError(f"no architecture of transformers that is known here has a {part}, "
                             f"and this model has one ({name} {getattr(cfg, name)})")
    raise ValueError(f"no architecture of transformers that is known here has this model: "
                     f"{asdict(cfg)}")
