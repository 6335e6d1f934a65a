"""What each architecture of Hugging Face's is called in its files: the keys of config.json and the
names of the tensors. tools/huggingface_formats.py converts by these tables.

    model_type      ours                            differences in the tensors
    gpt2            GPTConfig with gelu             matrices of blocks are (in, out)
    opt             GPTConfig with relu             q, k and v are three tensors; the table of
                                                    positions begins with two unused rows
    opt, another    LlamaConfig of the family       another activation or width of the MLP, no
                    galactica                       biases, or plain norms; qkv by heads of k
    llama, mistral, qwen2, qwen3, olmo, olmo2       q, k and v are three tensors, and so are gate
                    LlamaConfig of that family      and value; our qkv is ordered by heads of k
    gpt_neox        LlamaConfig of the family neox  none: qkv is ordered by heads, as ours
    phi             LlamaConfig of that family      q, k and v are three tensors
    gptj            LlamaConfig of that family      q, k and v are three tensors; q and k rotate
                                                    other pairs of channels
    mixtral, olmoe, qwen3_moe                       as of llama; and each matrix of an expert is a
                    MoEConfig of that family        tensor, which ours stack
"""
import re
from typing import NamedTuple

from models import llama_sizes, moe

ACTIVATIONS = {                                     # theirs: ours
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_python_tanh": "gelu",
    "gelu_accurate": "gelu", "relu": "relu"}
LLAMA_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu_erf", "gelu_python": "gelu_erf",
                     "gelu_fast": "gelu"} | ACTIVATIONS

# What model.py has only one form of: the key in config.json, and its value where it is missing.
FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
         "scale_attn_by_inverse_layer_idx": False, "do_layer_norm_before": True,
         "_remove_final_layer_norm": False, "enable_bias": True,
         "layer_norm_elementwise_affine": True}
# The same of every architecture.
ANY = {"is_encoder_decoder": False, "add_cross_attention": False}


class Family(NamedTuple):
    """How one architecture is written down."""
    architecture: str                   # the class in transformers
    activation: str                     # in config.json, where it is missing there
    dropout: list[str]                  # keys of its probabilities there
    shape: dict[str, str]               # field of our config: key in config.json
    prefix: str                         # of each tensor's name, but the head's
    ends: dict[str, str]                # our module outside of the blocks: theirs
    blocks: str                         # their list of blocks
    block: dict[str, list[str]]         # our module in a block: theirs, stacked in this order; {}:
                                        # the number of an expert
    transposed: bool = False            # matrices in blocks are (in, out)
    unused_positions: int = 0           # rows before the first position
    activation_key: str = "hidden_act"
    has_rope_keys: bool = True          # config.json has a rope_theta
    interleaved: bool = False           # they rotate channels 2i and 2i + 1, not i and i + n/2
    fields: dict | None = None          # of every LlamaConfig of the family; None: a GPTConfig
    optional: dict = {}                 # field: (key in config.json, its value where it is missing)
    only: dict = {}                     # key: (the one value we have, that where it is missing)
    any_width: bool = True              # also one that is no multiple of the heads


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    activation="gelu_new",
    dropout=["embd_pdrop", "attn_pdrop", "resid_pdrop"],
    shape={"vocab_size": "vocab_size", "seq_len": "n_positions", "n_layer": "n_layer",
           "n_head": "n_head", "n_embd": "n_embd"},
    prefix="transformer.",
    ends={"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"},
    blocks="h",
    block={"norm1": ["ln_1"], "attn.qkv": ["attn.c_attn"], "attn.proj": ["attn.c_proj"],
           "norm2": ["ln_2"], "mlp.up": ["mlp.c_fc"], "mlp.down": ["mlp.c_proj"]},
    transposed=True,
    activation_key="activation_function")

OPT = Family(
    architecture="OPTForCausalLM",
    activation="relu",
    dropout=["attention_dropout", "dropout"],
    shape={"vocab_size": "vocab_size", "seq_len": "max_position_embeddings",
           "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
           "n_embd": "hidden_size"},
    prefix="model.decoder.",
    ends={"embed.token": "embed_tokens", "embed.position": "embed_positions",
          "head.norm": "final_layer_norm"},
    blocks="layers",
    block={"norm1": ["self_attn_layer_norm"],
           "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
           "attn.proj": ["self_attn.out_proj"], "norm2": ["final_layer_norm"],
           "mlp.up": ["fc1"], "mlp.down": ["fc2"]},
    unused_positions=2,
    activation_key="activation_function")

LLAMA = Family(
    architecture="LlamaForCausalLM",
    activation="silu",
    dropout=["attention_dropout"],
    shape=OPT.shape | {"hidden": "intermediate_size"},
    prefix="model.",
    ends={"embed.token": "embed_tokens", "head.norm": "norm", "head": "lm_head"},
    blocks="layers",
    block={"norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"],
           "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
           "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
           "attn.proj": ["self_attn.o_proj"],
           "mlp.up": ["mlp.gate_proj", "mlp.up_proj"], "mlp.down": ["mlp.down_proj"]},
    fields=llama_sizes.FAMILIES["llama"],
    optional={"n_kv_head": ("num_key_value_heads", 0), "head_dim": ("head_dim", 0),
              "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False)},
    only={"attention_bias": (False, False), "mlp_bias": (False, False)},
    any_width=False)

NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    activation="gelu",
    dropout=["attention_dropout", "hidden_dropout"],
    shape=LLAMA.shape,
    prefix="gpt_neox.",
    ends={"embed.token": "embed_in", "head.norm": "final_layer_norm", "head": "embed_out"},
    blocks="layers",
    block={"norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"],
           "attn.qkv": ["attention.query_key_value"], "attn.proj": ["attention.dense"],
           "mlp.up": ["mlp.dense_h_to_4h"], "mlp.down": ["mlp.dense_4h_to_h"]},
    fields=llama_sizes.FAMILIES["neox"],
    optional={"norm_eps": ("layer_norm_eps", 1e-5), "tied": ("tie_word_embeddings", False),
              "rotary": ("rotary_pct", 0.25)},
    only={"attention_bias": (True, True)},
    any_width=False)

PHI = Family(
    architecture="PhiForCausalLM",
    activation="gelu_new",
    dropout=["attention_dropout", "resid_pdrop", "embd_pdrop"],
    shape=LLAMA.shape,
    prefix="model.",
    ends={"embed.token": "embed_tokens", "head.norm": "final_layernorm", "head": "lm_head"},
    blocks="layers",
    block={"norm1": ["input_layernorm"],
           "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
           "attn.proj": ["self_attn.dense"], "mlp.up": ["mlp.fc1"], "mlp.down": ["mlp.fc2"]},
    fields=llama_sizes.FAMILIES["phi"],
    optional={"n_kv_head": ("num_key_value_heads", 0), "norm_eps": ("layer_norm_eps", 1e-5),
              "tied": ("tie_word_embeddings", False), "rotary": ("partial_rotary_factor", 0.5)},
    only={"qk_layernorm": (False, False)},
    any_width=False)

GPTJ = Family(
    architecture="GPTJForCausalLM",
    activation="gelu_new",
    dropout=["attn_pdrop", "resid_pdrop", "embd_pdrop"],
    shape=GPT2.shape | {"hidden": "n_inner", "rotated": "rotary_dim"},
    prefix="transformer.",
    ends={"embed.token": "wte", "head.norm": "ln_f", "head": "lm_head"},
    blocks="h",
    block={"norm1": ["ln_1"], "attn.qkv": ["attn.q_proj", "attn.k_proj", "attn.v_proj"],
           "attn.proj": ["attn.out_proj"], "mlp.up": ["mlp.fc_in"], "mlp.down": ["mlp.fc_out"]},
    activation_key="activation_function",
    has_rope_keys=False,
    interleaved=True,
    fields=llama_sizes.FAMILIES["gptj"],
    optional={"norm_eps": ("layer_norm_epsilon", 1e-5), "tied": ("tie_word_embeddings", False)},
    any_width=False)

GALACTICA = OPT._replace(
    activation="gelu",
    shape=OPT.shape | {"hidden": "ffn_dim"},
    has_rope_keys=False,
    fields=llama_sizes.FAMILIES["galactica"],
    only={"do_layer_norm_before": (True, True), "_remove_final_layer_norm": (False, False),
          "tie_word_embeddings": (True, True)},
    any_width=False)

MOE = LLAMA._replace(
    shape=LLAMA.shape | {"n_expert": "num_experts", "n_active": "num_experts_per_tok"},
    block={ours: theirs for ours, theirs in LLAMA.block.items() if not ours.startswith("mlp.")} | {
        "mlp.router": ["mlp.gate"],
        "mlp.experts.up": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
        "mlp.experts.down": ["mlp.experts.{}.down_proj"]},
    optional=LLAMA.optional | {"balance_loss": ("router_aux_loss_coef", 0.001)},
    any_width=True)

NO_WINDOW = {"use_sliding_window": (False, False)}
KEYS_OF_QWEN = {"n_kv_head": ("num_key_value_heads", 32)}
FAMILIES = {
    "gpt2": GPT2,
    "opt": OPT,
    "llama": LLAMA,
    "mistral": LLAMA._replace(
        architecture="MistralForCausalLM", only={}, any_width=True,
        optional=LLAMA.optional | {"n_kv_head": ("num_key_value_heads", 8),
                                   "window": ("sliding_window", 4096)}),
    "qwen2": LLAMA._replace(
        architecture="Qwen2ForCausalLM", fields=llama_sizes.FAMILIES["qwen2"], only=NO_WINDOW,
        any_width=True, optional=LLAMA.optional | KEYS_OF_QWEN),
    "qwen3": LLAMA._replace(
        architecture="Qwen3ForCausalLM", fields=llama_sizes.FAMILIES["qwen3"],
        only=NO_WINDOW | {"attention_bias": (False, False)}, any_width=True,
        optional=LLAMA.optional | KEYS_OF_QWEN | {"head_dim": ("head_dim", 128)}),
    "olmo": LLAMA._replace(
        architecture="OlmoForCausalLM", fields=llama_sizes.FAMILIES["olmo"],
        only={"attention_bias": (False, False), "clip_qkv": (None, None)}, any_width=True,
        optional={name: LLAMA.optional[name] for name in ("n_kv_head", "head_dim", "tied")}),
    "olmo2": LLAMA._replace(
        architecture="Olmo2ForCausalLM", fields=llama_sizes.FAMILIES["olmo2"], any_width=True,
        block=LLAMA.block | {"norm1": ["post_attention_layernorm"],
                             "norm2": ["post_feedforward_layernorm"]},
        optional=LLAMA.optional | {"norm_eps": ("rms_norm_eps", 1e-5)},
        only={"attention_bias": (False, False)}),
    "gpt_neox": NEOX,
    "phi": PHI,
    "gptj": GPTJ,
    "galactica": GALACTICA,
    "mixtral": MOE._replace(
        architecture="MixtralForCausalLM", fields=moe.FAMILIES["mixtral"],
        shape=MOE.shape | {"n_expert": "num_local_experts"},
        block=MOE.block | {
            "mlp.router": ["block_sparse_moe.gate"],
            "mlp.experts.up": ["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"],
            "mlp.experts.down": ["block_sparse_moe.experts.{}.w2"]},
        optional=MOE.optional | {"n_kv_head": ("num_key_value_heads", 8),
                                 "norm_eps": ("rms_norm_eps", 1e-5),
                                 "window": ("sliding_window", 0)},
        only={"router_jitter_noise": (0.0, 0.0)}),
    "olmoe": MOE._replace(
        architecture="OlmoeForCausalLM", fields=moe.FAMILIES["olmoe"],
        optional=MOE.optional | {"norm_eps": ("rms_norm_eps", 1e-5),
                                 "balance_loss": ("router_aux_loss_coef", 0.01),
                                 "normalised": ("norm_topk_prob", False)},
        only={"attention_bias": (False, False), "clip_qkv": (None, None)}),
    "qwen3_moe": MOE._replace(
        architecture="Qwen3MoeForCausalLM", fields=moe.FAMILIES["qwen3-moe"],
        shape=MOE.shape | {"hidden": "moe_intermediate_size"},
        optional=MOE.optional | {"n_kv_head": ("num_key_value_heads", 4),
                                 "normalised": ("norm_topk_prob", False)},
        only=NO_WINDOW | {"attention_bias": (False, False), "decoder_sparse_step": (1, 1),
                          "mlp_only_layers": ([], [])}),
}
# Tensors that older files have beside the parameters, which follow from config.json.
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
