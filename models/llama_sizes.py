"""Llama and its relatives: how the families differ from LlamaConfig's defaults, and the sizes by
their names, with their learning rates."""
QWEN = dict(norm_eps=1e-6, rope_theta=1e6)
FAMILIES = {
    "llama": {},                                        # Mistral, TinyLlama and SmolLM2, too
    "qwen2": QWEN | dict(bias="qkv"),
    "qwen3": QWEN | dict(qk_norm=True),
    "olmo": dict(norm="plain"),
    "neox": dict(norm="layer", activation="gelu", gated=False, bias="all", rotary=0.25,
                 residual="parallel"),                  # Pythia, too
    "palm": dict(norm="layer", residual="one norm", tied=True),
    "olmo2": dict(norm_all_heads=True, residual="norm after", norm_eps=1e-6, rope_theta=5e5),
    "phi": dict(norm="layer", activation="gelu", gated=False, bias="all", rotary=0.5,
                residual="one norm", head_bias=True),
    "gptj": dict(norm="layer", activation="gelu", gated=False, bias="mlp and norms",
                 rotary=0.25, residual="one norm", head_bias=True),
    "galactica": dict(norm="plain", activation="gelu_erf", gated=False, learned_positions=True,
                      rotary=0.0, tied=True),
}

# {name: (family, n_layer, n_head, n_kv_head, n_embd, hidden, seq_len, peak learning rate, others)}.
# The rates of Mistral, Qwen and PaLM are Llama-7B's, whatever the size. Mistral's and Qwen's are
# unpublished, and PaLM's is for another optimizer. Phi-2's, unpublished too, is Phi-1.5's. seq_len
# is that of the last pre-training or of the release. PaLM's scaling of the logits is not here.
# mistral-7b is version 0.3, which has no sliding window.
_TABLE = {
    "llama-nano": ("llama", 2, 4, 2, 192, 512, 128, 4e-3, {}),
    "llama-7b": ("llama", 32, 32, 32, 4096, 11008, 2048, 3e-4, dict(norm_eps=1e-6)),
    "llama-13b": ("llama", 40, 40, 40, 5120, 13824, 2048, 3e-4, dict(norm_eps=1e-6)),
    "llama-33b": ("llama", 60, 52, 52, 6656, 17920, 2048, 1.5e-4, dict(norm_eps=1e-6)),
    "llama-65b": ("llama", 80, 64, 64, 8192, 22016, 2048, 1.5e-4, {}),
    "llama2-7b": ("llama", 32, 32, 32, 4096, 11008, 4096, 3e-4, {}),
    "llama2-13b": ("llama", 40, 40, 40, 5120, 13824, 4096, 3e-4, {}),
    "llama2-70b": ("llama", 80, 64, 8, 8192, 28672, 4096, 1.5e-4, {}),
    "llama3-8b": ("llama", 32, 32, 8, 4096, 14336, 8192, 3e-4, dict(rope_theta=5e5)),
    "llama3-70b": ("llama", 80, 64, 8, 8192, 28672, 8192, 1.5e-4, dict(rope_theta=5e5)),
    "mistral-7b": ("llama", 32, 32, 8, 4096, 14336, 32768, 3e-4, dict(rope_theta=1e6)),
    "mistral-7b-v0.1": ("llama", 32, 32, 8, 4096, 14336, 32768, 3e-4, dict(window=4096)),
    "tinyllama-1.1b": ("llama", 22, 32, 4, 2048, 5632, 2048, 4e-4, {}),
    "smollm2-135m": ("llama", 30, 9, 3, 576, 1536, 8192, 3e-3, dict(tied=True, rope_theta=1e5)),
    "smollm2-360m": ("llama", 32, 15, 5, 960, 2560, 8192, 3e-3, dict(tied=True, rope_theta=1e5)),
    "smollm2-1.7b": ("llama", 24, 32, 32, 2048, 8192, 8192, 5e-4,
                     dict(tied=True, rope_theta=1.3e5)),
    "qwen2.5-0.5b": ("qwen2", 24, 14, 2, 896, 4864, 32768, 3e-4, dict(tied=True)),
    "qwen2.5-1.5b": ("qwen2", 28, 12, 2, 1536, 8960, 32768, 3e-4, dict(tied=True)),
    "qwen2.5-3b": ("qwen2", 36, 16, 2, 2048, 11008, 32768, 3e-4, dict(tied=True)),
    "qwen2.5-7b": ("qwen2", 28, 28, 4, 3584, 18944, 32768, 3e-4, {}),
    "qwen3-0.6b": ("qwen3", 28, 16, 8, 1024, 3072, 32768, 3e-4, dict(tied=True, head_dim=128)),
    "qwen3-1.7b": ("qwen3", 28, 16, 8, 2048, 6144, 32768, 3e-4, dict(tied=True, head_dim=128)),
    "qwen3-4b": ("qwen3", 36, 32, 8, 2560, 9728, 32768, 3e-4, dict(tied=True, head_dim=128)),
    "qwen3-8b": ("qwen3", 36, 32, 8, 4096, 12288, 32768, 3e-4, dict(head_dim=128)),
    "olmo-1b": ("olmo", 16, 16, 16, 2048, 8192, 2048, 4e-4, dict(tied=True)),
    "neox-20b": ("neox", 44, 64, 64, 6144, 24576, 2048, 0.97e-4, {}),
    "pythia-70m": ("neox", 6, 8, 8, 512, 2048, 2048, 1e-3, dict(activation="gelu_erf")),
    "pythia-160m": ("neox", 12, 12, 12, 768, 3072, 2048, 6e-4, dict(activation="gelu_erf")),
    "pythia-410m": ("neox", 24, 16, 16, 1024, 4096, 2048, 3e-4, dict(activation="gelu_erf")),
    "pythia-1b": ("neox", 16, 8, 8, 2048, 8192, 2048, 3e-4, dict(activation="gelu_erf")),
    "pythia-1.4b": ("neox", 24, 16, 16, 2048, 8192, 2048, 2e-4, dict(activation="gelu_erf")),
    "pythia-2.8b": ("neox", 32, 32, 32, 2560, 10240, 2048, 1.6e-4, dict(activation="gelu_erf")),
    "pythia-6.9b": ("neox", 32, 32, 32, 4096, 16384, 2048, 1.2e-4, dict(activation="gelu_erf")),
    "pythia-12b": ("neox", 36, 40, 40, 5120, 20480, 2048, 1.2e-4, dict(activation="gelu_erf")),
    "olmo2-1b": ("olmo2", 16, 16, 16, 2048, 8192, 4096, 4e-4, {}),
    "olmo2-7b": ("olmo2", 32, 32, 32, 4096, 11008, 4096, 3e-4, {}),
    "olmo2-13b": ("olmo2", 40, 40, 40, 5120, 13824, 4096, 9e-4, {}),
    "olmo2-32b": ("olmo2", 64, 40, 8, 5120, 27648, 4096, 6e-4, {}),
    "phi-1": ("phi", 24, 32, 32, 2048, 8192, 2048, 1e-3, {}),
    "phi-1.5": ("phi", 24, 32, 32, 2048, 8192, 2048, 2e-4, {}),
    "phi-2": ("phi", 32, 32, 32, 2560, 10240, 2048, 2e-4, dict(rotary=0.4)),
    "gptj-6b": ("gptj", 28, 16, 16, 4096, 16384, 2048, 1.2e-4, {}),
    "galactica-125m": ("galactica", 12, 12, 12, 768, 3072, 2048, 6e-4, {}),
    "galactica-1.3b": ("galactica", 24, 32, 32, 2048, 8192, 2048, 2e-4, {}),
    "galactica-6.7b": ("galactica", 32, 32, 32, 4096, 16384, 2048, 1.2e-4, {}),
    "galactica-30b": ("galactica", 48, 56, 56, 7168, 28672, 2048, 1e-4, {}),
    "galactica-120b": ("galactica", 96, 80, 80, 10240, 40960, 2048, 0.7e-5, {}),
    "palm-8b": ("palm", 32, 16, 1, 4096, 16384, 2048, 3e-4, dict(head_dim=256)),
}
_FIELDS = ("n_layer", "n_head", "n_kv_head", "n_embd", "hidden", "seq_len")
SIZES = {name: FAMILIES[family] | dict(zip(_FIELDS, shape)) | others
         for name, (family, *shape, _, others) in _TABLE.items()}
PEAK_LR = {name: row[-2] for name, row in _TABLE.items()}
