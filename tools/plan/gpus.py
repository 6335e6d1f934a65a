"""The GPUs that tools.plan knows by name: their speeds, from the makers' data sheets.

    --gpu h100
    --gpu 165:24:1008                                                 another: TFLOP/s:GB:GB/s

A card without NVLink talks to its machine's others through PCIe, at 32 GB/s (version 4, 16 lanes)
or 64 (version 5), also two RTX 3090 or A6000 that have a bridge.
"""
import argparse
import re
from dataclasses import dataclass

from base.flops import PEAK_FLOPS

# Fractions that a run reaches: of the peak by matrix products and by FlashAttention (1), which
# counts its whole square, of which it computes half; of the speed of a link and of the network by
# collectives and messages. Fitted on published steps, HOPPER's products on our own
# (tests/published_runs.py).
AMPERE = (0.735, 0.53, 0.52, 0.5)
HOPPER = (0.613, 0.3, 0.8, 0.7)


@dataclass(frozen=True)
class GPUSpec:
    """A GPU in its usual machine: bytes, and bytes per second in one direction."""
    name: str           # in PEAK_FLOPS, or FLOP/s in 16 bits
    fp32: float         # FLOP/s, in TF32 where there is one
    memory: float       # that CUDA reports
    bandwidth: float    # of its memory
    link: float         # NVLink or PCIe, to the machine's other GPUs
    network: float      # InfiniBand or Ethernet, its share of the machine's adapters
    host: float         # PCIe, to the host's memory
    processors: int     # multiprocessors
    products: float     # fraction of the peak that matrix products reach
    attention: float    # that FlashAttention reaches
    on_link: float      # fraction of a link's speed that collectives and messages reach
    on_network: float   # the same of the network's

    def peak(self, itemsize: int) -> float:
        """FLOP/s of matrix products in a type of so many bytes."""
        if itemsize == 2:
            return PEAK_FLOPS.get(self.name) or float(self.name)
        if itemsize == 4:
            return self.fp32
        return self.fp32 / 8        # fp64, roughly


def pcie_card(name, memory, bandwidth, processors, network, pcie=32e9) -> GPUSpec:
    """A card whose products in TF32 take twice the time of those in 16 bits."""
    return GPUSpec(name, PEAK_FLOPS[name] / 2, memory, bandwidth, pcie, network, pcie, processors,
                   *AMPERE)


def spec_of(name: str) -> GPUSpec:
    """A GPU of GPUS, or another: TFLOP/s:GB:GB/s, as 165:24:1008 (in 16 bits; its memory), and
    optionally :GB/s of its link to the machine's other GPUs, without which it is on PCIe. It has
    half the FLOP/s in TF32. Raises argparse.ArgumentTypeError."""
    if name in GPUS:
        return GPUS[name]
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?(:[1-9]\d*(\.\d+)?){2,3}", name):
        raise argparse.ArgumentTypeError(
            f"{name} is none of {', '.join(GPUS)}: give one of these, or another GPU's "
            f"TFLOP/s:GB:GB/s (products in 16 bits; its memory), as --gpu 165:24:1008; with "
            f"NVLink also :GB/s, in one direction, as 989:80:3350:450")
    flops, memory, bandwidth, *links = map(float, name.split(":"))
    link = links[0] if links else 32.0
    return GPUSpec(f"{flops}e12", flops * 5e11, memory * 1e9, bandwidth * 1e9, link * 1e9, 25e9,
                   32e9, 108, *AMPERE)


# The SXM modules (where 80 GB are 79.1 GiB), with network and host of DGX-1, A100, H100, H200 and
# B200. The rates of V100 and B200 are those of their neighbors, and so are those of the cards. The
# servers' cards have 100 Gbit/s of network for each, the others 10 Gbit/s for a machine of eight.
SHARE_OF_10_GBIT = 1.25e9 / 8
GPUS = {
    "v100-16g": GPUSpec("V100", 15.7e12, 17e9, 900e9, 150e9, 6.25e9, 16e9, 80, *AMPERE),
    "v100-32g": GPUSpec("V100", 15.7e12, 34e9, 900e9, 150e9, 6.25e9, 16e9, 80, *AMPERE),
    "a100-40g": GPUSpec("A100", 156e12, 42e9, 1555e9, 300e9, 25e9, 32e9, 108, *AMPERE),
    "a100-80g": GPUSpec("A100", 156e12, 85e9, 2039e9, 300e9, 25e9, 32e9, 108, *AMPERE),
    "h100": GPUSpec("H100", 494e12, 85e9, 3350e9, 450e9, 50e9, 64e9, 132, *HOPPER),
    "h200": GPUSpec("H200", 494e12, 150e9, 4800e9, 450e9, 50e9, 64e9, 132, *HOPPER),
    "b200": GPUSpec("B200", 1125e12, 191e9, 8000e9, 900e9, 50e9, 64e9, 148, *HOPPER),
    "a10g": pcie_card("A10G", 23.8e9, 600e9, 80, 12.5e9),
    "l4": pcie_card("L4", 23.6e9, 300e9, 58, 12.5e9),
    "l40s": pcie_card("L40S", 47.7e9, 864e9, 142, 12.5e9),
    "a6000": pcie_card("RTX A6000", 51e9, 768e9, 84, SHARE_OF_10_GBIT),
    "3080": pcie_card("RTX 3080", 10.5e9, 760e9, 68, SHARE_OF_10_GBIT),
    "3090": pcie_card("RTX 3090", 25.4e9, 936e9, 82, SHARE_OF_10_GBIT),
    "4080": pcie_card("RTX 4080", 16.8e9, 717e9, 76, SHARE_OF_10_GBIT),
    "4090": pcie_card("RTX 4090", 25.4e9, 1008e9, 128, SHARE_OF_10_GBIT),
    "5080": pcie_card("RTX 5080", 16.6e9, 960e9, 84, SHARE_OF_10_GBIT, 64e9),
    "5090": pcie_card("RTX 5090", 33.7e9, 1792e9, 170, SHARE_OF_10_GBIT, 64e9),
}


def gpu_name(name: str) -> str:
    """The value of --gpu in lower case. Raises argparse.ArgumentTypeError."""
    spec_of(name.lower())
    return name.lower()
