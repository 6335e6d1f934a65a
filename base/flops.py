"""What a model computes, and what a device can: parameters, FLOPs, and their ratio, MFU.

    MFU = tokens per second x FLOPs per token / (devices x FLOP/s of a device)

(Chowdhery et al. 2022, "PaLM", appendix B.)
"""
import math
import re
from dataclasses import replace
from functools import cache

from base.checkpoint_files import parameter_shapes
from model import GPTConfig


@cache
def parameter_count(cfg: GPTConfig) -> int:
    """Parameters without padding. A GPT has (V + T) C in the embeddings, 12 C^2 + 13 C in a block,
    and 2 C in the last LayerNorm."""
    one, two = (sum(map(math.prod, parameter_shapes(replace(cfg, n_layer=n)).values()))
                for n in (1, 2))
    return one + (cfg.n_layer - 1) * (two - one)        # all blocks have as many


def mlp_channels(cfg: GPTConfig) -> int:
    """The hidden channels of a block that a token uses. In a mixture of experts they are those of
    its active experts, and of the shared one."""
    return cfg.hidden * getattr(cfg, "n_active", 1) + getattr(cfg, "shared_hidden", 0)


def active_parameters(cfg: GPTConfig) -> int:
    """The parameters that a token uses: all, but of a mixture's E experts only K."""
    idle = getattr(cfg, "n_expert", 1) - getattr(cfg, "n_active", 1)
    return parameter_count(cfg) - cfg.n_layer * idle * 3 * cfg.n_embd * cfg.hidden


def flops_per_token(cfg: GPTConfig, recompute: bool = False) -> int:
    """Floating-point operations to train on one token: 6 N + 12 L H D T (PaLM, appendix B).

    A parameter takes two operations (multiply, add) forward and four backward. N leaves out the
    matrices that are looked up, of positions and of tokens; a tied one counts once, for the head.
    It also leaves out the experts that a token does not use.
    Attention's two products take 4 H D T forward in each layer and twice that backward, although
    half of it is masked. With a sliding window T is the window. Recomputation repeats a block's
    forward but for its last product: for a GPT, where H D is C, that is 16 C^2 + 4 C T."""
    width = cfg.n_head * cfg.head_dim
    reach = cfg.seq_len
    if getattr(cfg, "window", 0) > 0:
        reach = min(reach, cfg.window)
    attention = 4 * width * reach
    N = active_parameters(cfg) - looked_up(cfg)
    again = 0
    if recompute:
        inputs = 2 * width + 2 * cfg.n_kv_head * cfg.head_dim       # q, k, v, and proj's
        hidden = mlp_channels(cfg)
        up = 2 * hidden if cfg.gated else hidden
        again = cfg.n_layer * (2 * cfg.n_embd * (inputs + up) + attention)
    return 6 * N + 3 * cfg.n_layer * attention + again


@cache
def looked_up(cfg: GPTConfig) -> int:
    """The parameters of the embeddings, without those that the head multiplies with."""
    shapes = parameter_shapes(replace(cfg, n_layer=1))
    tokens = 0 if cfg.tied else math.prod(shapes["embed.token.weight"])
    return tokens + math.prod(shapes.get("embed.position.weight", [0]))


# Dense 16-bit TFLOP/s of matrix products that sum in fp32, from the makers' data sheets and, for
# GeForce, NVIDIA's papers on GA102, Ada and Blackwell; of an MI250X the half that is one device.
_TFLOPS = {
    "V100": 125, "V100 DGXS": 125, "V100 PCIe": 112, "V100S PCIe": 130, "T4": 65,
    "A100": 312, "A100 PCIe": 312, "A800": 312, "A800 PCIe": 312, "A10": 125, "A10G": 70,
    "A30": 165, "A40": 149.7, "RTX A6000": 154.8, "L4": 121, "L40": 181, "L40S": 362,
    "RTX 6000 Ada Generation": 364.2, "H100": 989, "H100 PCIe": 756, "H100 NVL": 835, "H20": 148,
    "H200": 989, "H200 NVL": 835.5, "GH200": 989, "H800": 989, "H800 PCIe": 756, "B200": 2250,
    "GB200": 2500, "B300": 2250, "GB300": 2500, "MI250X": 191.5, "MI300X": 1307.4,
    "RTX 3080": 59.5, "RTX 3090": 71, "RTX 3090 Ti": 80, "RTX 4080": 97.5, "RTX 4090": 165.2,
    "RTX 4090 D": 147.1, "RTX 5080": 112.6, "RTX 5090": 209.5}
PEAK_FLOPS = {name: 1e12 * tflops for name, tflops in _TFLOPS.items()}


def peak_flops(device_name: str) -> float:
    """FLOP/s of a device by its name, without maker, memory and socket ("NVIDIA A100-SXM4-80GB" is
    an A100, "NVIDIA H200 NVL" no H200); 0.0 if unknown."""
    name = re.sub(r"\b(NVIDIA|Tesla|GeForce|AMD|Instinct|SXM\d?|AC|\d+GB?|HBM\w+|3e)\b", " ",
                  device_name.replace("PCIE", "PCIe"))
    return PEAK_FLOPS.get(" ".join(name.replace("-", " ").split()), 0.0)
