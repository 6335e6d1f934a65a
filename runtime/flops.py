"""What a model computes, and what a device can: parameters, FLOPs, and their ratio, MFU.

    MFU = tokens per second x FLOPs per token / (devices x FLOP/s of a device)

(Chowdhery et al. 2022, "PaLM", appendix B.) runtime/console.py prints it, and tools/plan.py
computes times with it.
"""
import re

from model import GPTConfig


def parameter_count(cfg: GPTConfig) -> int:
    """Parameters without padding: (V + T) C in the embeddings, 12 C^2 + 13 C in a block, 2 C in
    the last LayerNorm."""
    C = cfg.n_embd
    return (cfg.vocab_size + cfg.seq_len) * C + cfg.n_layer * (12 * C * C + 13 * C) + 2 * C


def flops_per_token(cfg: GPTConfig, recompute: bool = False) -> int:
    """Floating-point operations to train on one token: 6 N + 12 L C T (PaLM, appendix B).

    A parameter takes two operations (multiply, add) forward and four backward. N leaves out the
    position embeddings and counts the tied matrix once, for the head. Attention's two products take
    4 C T forward in each layer and twice that backward, although half of it is masked.
    Recomputation repeats a block's forward but for its last product (8 C^2).
    """
    C = cfg.n_embd
    T = cfg.seq_len
    N = parameter_count(cfg) - T * C
    again = cfg.n_layer * (16 * C * C + 4 * C * T) if recompute else 0
    return 6 * N + 12 * cfg.n_layer * C * T + again


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
