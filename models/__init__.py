"""The models: GPTs (model.py), Llama and its relatives (llama.py), mixtures of experts (moe.py).
llama_sizes.py has their sizes, kv_cache.py samples."""
import model
from model import GPTConfig
from models import llama_sizes, moe
from models.llama import LlamaConfig
from models.moe import MoEConfig

SIZES = model.SIZES | llama_sizes.SIZES | moe.SIZES           # of --model
PEAK_LR = model.PEAK_LR | llama_sizes.PEAK_LR | moe.PEAK_LR


def make_config(**fields) -> GPTConfig:
    """The config with these fields. Only a mixture has `n_expert`, and a GPT has no `n_kv_head`."""
    if "n_expert" in fields:
        return MoEConfig(**fields)
    if "n_kv_head" in fields:
        return LlamaConfig(**fields)
    return GPTConfig(**fields)
