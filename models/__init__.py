"""The models: GPTs (model.py), and Llama and its relatives (llama.py). kv_cache.py samples."""
import model
from model import GPTConfig
from models import llama
from models.llama import LlamaConfig

SIZES = model.SIZES | llama.SIZES           # of --model
PEAK_LR = model.PEAK_LR | llama.PEAK_LR


def make_config(**fields) -> GPTConfig:
    """The GPTConfig or LlamaConfig with these fields. Only the second has `n_kv_head`."""
    if "n_kv_head" in fields:
        return LlamaConfig(**fields)
    return GPTConfig(**fields)
