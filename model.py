"""The GPT: a stack of Transformer decoder blocks between an embedding and a head that share one
matrix.

    tokens (B, T) -> Embed -> Block 0 -> ... -> Block L-1 -> Head -> logits (B, T, V), or the loss

    Block:  x = x + attention(norm(x));  x = x + mlp(norm(x))          (pre-LayerNorm, GPT-2)

The shape legend of the whole project:
    B sequences, T positions, C channels (n_embd), H heads, D channels of a head (C = H D),
    V vocabulary

Papers: GPT-2 (Radford et al. 2019, section 2.3) for the architecture and its initialization,
GPT-3 (Brown et al. 2020, table 2.1) and OPT (Zhang et al. 2022, table 1) for the sizes and their
learning rates, PaLM (Chowdhery et al. 2022, appendix B) for the count of FLOPs.

This file knows nothing of parallelism and can be used alone:

    model = GPT(GPTConfig(vocab_size=257)).initialize(seed=0)
    loss = model(tokens, targets) / targets.numel()

Four habits let parallel.py cut it into pieces: the number of heads is inferred from the width of
the projection, and T from its length; the ends of the model may be absent; the head owns the
projection and the loss; blocks keep their global number as their name.
"""
import hashlib
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCAB_MULTIPLE = 128    # the token matrix is padded to a multiple of this many rows
IGNORE_INDEX = -1       # a target that adds nothing to the loss


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; the defaults are the size `nano`."""
    vocab_size: int = 257
    seq_len: int = 128
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 192
    activation: str = "gelu"        # gelu: GPT-2's tanh form; relu: OPT's choice
    dropout: float = 0.0

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.activation not in ("gelu", "relu"):
            raise ValueError(f"activation {self.activation!r} is neither 'gelu' nor 'relu'")

    @property
    def padded_vocab(self) -> int:
        """Rows of the token matrix in memory; those past vocab_size are never seen outside."""
        return ceil_div(self.vocab_size, VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Dropout(nn.Module):
    """F.dropout in training mode, with a mask that is a function of (dropout_seed, name)."""

    def __init__(self, p: float, *name):
        super().__init__()
        self.p, self.name = p, name

    def forward(self, x, dropout_seed=None):
        if self.p == 0 or not self.training:
            return x
        seed_dropout(x.device, dropout_seed, *self.name)
        return F.dropout(x, self.p)


class Linear(nn.Linear):
    """nn.Linear whose product goes through `linear`."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm through `layer_norm`."""

    def forward(self, x):
        return layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(nn.Embedding):
    """nn.Embedding through `lookup`."""

    def forward(self, rows):
        return lookup(rows, self.weight)


class Embed(nn.Module):
    """tokens (B, T) -> x (B, T, C): the token's row plus the position's row."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        # Empty until `initialize`: torch's own N(0, 1) would be thrown away.
        self.token = Embedding.from_pretrained(
            torch.empty(cfg.padded_vocab, cfg.n_embd), freeze=False)
        self.position = nn.Embedding.from_pretrained(
            torch.empty(cfg.seq_len, cfg.n_embd), freeze=False)
        self.dropout = Dropout(cfg.dropout, "embed")

    def forward(self, tokens, dropout_seed=None, start=0):
        return self.add_positions(self.token(tokens), dropout_seed, start)

    def add_positions(self, x, dropout_seed, start):
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        return self.dropout(x + self.position(positions), dropout_seed)    # (B, T, C) + (T, C)


class CoreAttention(Dropout):
    """softmax(q k^T / sqrt(D)) v of q (B, H, T, D), k and v (B, H, positions, D), with dropout on
    the softmax; causal, or each q attends to all positions."""
    rng_offset = 0      # build.py sets it: ranks with different heads draw different masks

    def forward(self, q, k, v, causal, dropout_seed=None):
        p = self.p if self.training else 0.0
        if p > 0:
            seed_dropout(q.device, dropout_seed, *self.name, self.rng_offset)
        attend = partial(F.scaled_dot_product_attention, is_causal=causal, dropout_p=p)
        return upcast_for_matmul(attend, q, k, v)


class Attention(nn.Module):
    """Causal multi-head self-attention, x (B, T, C) -> (B, T, C).

    One matrix product computes q, k and v. Its 3C output channels are ordered (3, H, D): all heads
    of q, then of k, then of v. To cut the matrix by heads, cut each third by itself.

    cache (2, B, H, seq_len, D) holds the keys and values of the positions before `start`; those of
    x are added. At start 0 a batch of 1 is broadcast to that of the cache.
    """

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.head_dim = cfg.n_embd // cfg.n_head
        self.qkv = Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.core_attention = CoreAttention(cfg.dropout, "layer", layer, "attention")
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x, dropout_seed=None, cache=None, start=0):
        qkv = self.qkv(x)                                                   # (B, T, 3 H D)
        B, T, _ = qkv.shape
        split = qkv.view(B, T, 3, -1, self.head_dim).unbind(2)              # 3 of (B, T, H, D)
        q, k, v = (x.transpose(1, 2) for x in split)                        # 3 of (B, H, T, D)
        assert start == 0 or T == 1, "a second part of a text would see its own future"
        if cache is not None:
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
        if start > 0:
            k, v = cache[:, :, :, :start + T]                   # 2 of (B, H, start + T, D)
        y = self.core_attention(q, k, v, start == 0, dropout_seed)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))   # (B, H, T, D) -> (B, T, H D)


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C) through 4C hidden channels."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.up = Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.down = Linear(4 * cfg.n_embd, cfg.n_embd)
        self.activation = cfg.activation

    def forward(self, x):
        h = self.up(x)                                                      # (B, T, 4C)
        h = F.relu(h) if self.activation == "relu" else F.gelu(h, approximate="tanh")
        return self.down(h)


class Block(nn.Module):
    """One pre-LayerNorm Transformer block, (B, T, C) -> (B, T, C)."""

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.norm1 = LayerNorm(cfg.n_embd)
        self.attn = Attention(cfg, layer)
        self.dropout1 = Dropout(cfg.dropout, "layer", layer, "attn")
        self.norm2 = LayerNorm(cfg.n_embd)
        self.mlp = MLP(cfg)
        self.dropout2 = Dropout(cfg.dropout, "layer", layer, "mlp")

    def forward(self, x, dropout_seed=None, cache=None, start=0):
        y = self.attn(self.norm1(x), dropout_seed, cache, start)
        x = x + self.dropout1(y, dropout_seed)
        return x + self.dropout2(self.mlp(self.norm2(x)), dropout_seed)


class Head(nn.Module):
    """Final LayerNorm, projection on the vocabulary by the embedding's own matrix, and loss.

    x (B, T, C) -> logits (B, T, V); given targets (B, T) -> the sum over positions of the
    cross-entropy in nats, in fp32 or wider. It is a sum because the sums of microbatches of any
    size can be added; targets of IGNORE_INDEX add nothing.
    """

    def __init__(self, cfg: GPTConfig, weight: nn.Parameter):
        super().__init__()
        self.norm = LayerNorm(cfg.n_embd)
        self.weight = weight                                                # (padded V, C)
        self.vocab_size = cfg.vocab_size

    def forward(self, x, targets=None):
        logits = linear(self.norm(x), self.weight)[..., :self.vocab_size]
        if targets is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX,
                               reduction="sum")


class GPT(nn.Module):
    """The whole model. `embed` and `head` may be set to None and blocks deleted: the rest then runs
    as one stage of a pipeline, from activations (B, T, C) to activations."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = Embed(cfg)
        self.blocks = nn.ModuleDict({str(i): Block(cfg, i) for i in range(cfg.n_layer)})
        self.head = Head(cfg, self.embed.token.weight)

    def forward(self, x, targets=None, dropout_seed=None, cache=None, start=0):
        """tokens (B, T) -> logits (B, T, V), or the summed loss in nats given targets (B, T).

        In training mode all dropout masks are a function of `dropout_seed`, an int, if it is given.
        With a cache (`new_kv_cache`) the tokens have the positions start, start + 1, ...: the whole
        prompt at start 0, then one token at a time. The logits (B, 1, V) are of the last position.
        """
        if self.embed is not None:
            x = self.embed(x, dropout_seed, start)
        for name, block in self.blocks.items():
            block_cache = None if cache is None else cache[name]
            x = block(x, dropout_seed, block_cache, start)
        if cache is not None:
            x = x[:, -1:]
        if self.head is None:
            return x
        return self.head(x, targets)

    def new_kv_cache(self, batch: int) -> dict:
        """An empty cache for `batch` sequences: block -> keys and values (2, B, H, seq_len, D)."""
        H = self.cfg.n_head
        D = self.cfg.n_embd // H
        return {name: self.head.weight.new_empty(2, batch, H, self.cfg.seq_len, D)
                for name in self.blocks}

    @torch.no_grad()
    def initialize(self, seed: int) -> "GPT":
        """Fill every parameter by its name; returns the model."""
        for name, parameter in self.named_parameters():
            rows = self.cfg.vocab_size if name == "embed.token.weight" else parameter.shape[0]
            shape = (rows, *parameter.shape[1:])
            parameter.zero_()[:rows] = initial_value(self.cfg, name, shape, seed)
        return self


def initial_value(cfg: GPTConfig, name: str, shape, seed: int) -> torch.Tensor:
    """The value at step 0 of the full parameter `name`, without padding: fp32 on the CPU.

    It is a function of (seed, name) alone, so each rank of any layout can draw its parameters, one
    at a time. Standard deviation 0.02, and 0.02 / sqrt(2L) for the two projections that write to
    the residual stream, so that its variance does not depend on the depth; biases 0, LayerNorm
    weights 1.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
    std = 0.02 / math.sqrt(2 * cfg.n_layer) if residual else 0.02
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.empty(shape).normal_(0, std, generator=generator)


# ---------------------------------------------------------------------------------------------
# Seeds, products and sums in 16 bits on CPUs, sizes and counts
# ---------------------------------------------------------------------------------------------


def derive_seed(*what) -> int:
    """A 63-bit seed that is a pure function of its arguments (ints and strings), on every machine
    and in every process; Python's own `hash` of a string is not."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1


def seed_dropout(device: torch.device, dropout_seed: int | None, *name) -> None:
    """Make the next dropout mask on `device` a function of (dropout_seed, name), so that it can be
    drawn again. Without a dropout_seed, the default generator is used. (torch.manual_seed would
    seed the generators of all devices, which takes 0.4 to 2 ms with a GPU.)"""
    if dropout_seed is None:
        return
    if device.type == "cpu":
        generator = torch.default_generator
    elif device.type == "mps":
        generator = torch.mps
    else:
        generator = torch.get_device_module(device).default_generators[device.index]
    generator.manual_seed(derive_seed(dropout_seed, *name))


# The 16-bit types in which this CPU has no instructions for matrix products: there PyTorch takes 4
# to 27 times as long as in fp32.
NO_PRODUCTS = [dtype for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
               if not (torch.backends.mkldnn.is_available()
                       and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())]


def multiplies_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `upcast_for_matmul` multiplies factors of this type on this device in fp32."""
    return device.type == "cpu" and dtype in NO_PRODUCTS


def upcast_for_matmul(product: Callable, *factors: torch.Tensor | None, out=None) -> torch.Tensor:
    """product(*factors), which every matrix product of the project goes through: computed in fp32
    where this CPU needs it, and rounded to the type of the factors. `out` takes the result; it
    cannot be combined with autograd."""
    dtype = factors[0].dtype
    if not multiplies_in_fp32(dtype, factors[0].device):
        return product(*factors) if out is None else product(*factors, out=out)

    def in_fp32(*factors):
        wide = [x if x is None else x.float() for x in factors]
        return product(*wide).to(dtype)

    if not torch.is_grad_enabled():
        result = in_fp32(*factors)
        return result if out is None else out.copy_(result)
    # Autograd would keep the factors in fp32; the checkpoint keeps them in 16 bits and converts
    # them again in backward. (Attention is repeated there, a linear product is not.)
    return checkpoint(in_fp32, *factors, use_reentrant=False)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """F.linear by `upcast_for_matmul`: x (..., in), weight (out, in) -> (..., out)."""
    return upcast_for_matmul(F.linear, x, weight, bias)


# Two kernels of PyTorch for CPUs add up a gradient in its own type, so in 16 bits the error grows
# with the number of terms: relative to fp64, with 192 channels in bf16,
#
#     rows of x, or places of one token           128        4,096      16,384
#     layer_norm: gradient of weight, of bias     1.4, 1.1   6.8, 6.2   13, 42 %
#     embedding: gradient of the token's row      1.3        5.9        41 %
#
# Everything else adds up in fp32 there (biases, products, softmax, broadcasts), and is off by one
# rounding, 0.17%, however many terms there are. The two functions below reach that too. In fp32,
# fp64, on GPUs, and compiled, they are PyTorch's own.


def sums_in_16_bits(weight: torch.Tensor) -> bool:
    """Whether PyTorch would add up a gradient of this weight in 16 bits."""
    return (weight.device.type == "cpu" and weight.dtype.itemsize == 2
            and torch.is_grad_enabled() and not torch.compiler.is_compiling())


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float):
    """F.layer_norm of x (..., C) over the channels, with gradients that add up in fp32."""
    if sums_in_16_bits(weight):
        return _LayerNormSumsInFp32.apply(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _LayerNormSumsInFp32(torch.autograd.Function):
    """Keeps x in 16 bits, as PyTorch does; backward converts it."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        weight, bias = weight.float(), bias.float()
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)      # all but x in fp32
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        gradients = torch.ops.aten.native_layer_norm_backward(
            dy.float(), x.float(), weight.shape, mean, rstd, weight, bias,
            output_mask=[True, True, True])
        return *(gradient.to(x.dtype) for gradient in gradients), None


def lookup(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.embedding: the rows (...) of weight (n, C), with a gradient that adds up in fp32."""
    if sums_in_16_bits(weight):
        return F.embedding(rows, weight.float()).to(weight.dtype)
    return F.embedding(rows, weight)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


# {name: (n_layer, n_head, n_embd, seq_len, activation, peak learning rate)}. GPT-3's table gives XL
# 24 heads of 128 at width 2048 and 13B a width of 5140: neither divides, so they are 16 and 5120
# here. OPT-350m is post-LayerNorm, another architecture, and left out. GPT-2's learning rates are
# unpublished: they are those of GPT-3's models of about the same size.
_TABLE = {
    "nano": (2, 4, 192, 128, "gelu", 4e-3),
    "gpt2": (12, 12, 768, 1024, "gelu", 6e-4),
    "gpt2-medium": (24, 16, 1024, 1024, "gelu", 3e-4),
    "gpt2-large": (36, 20, 1280, 1024, "gelu", 2.5e-4),
    "gpt2-xl": (48, 25, 1600, 1024, "gelu", 2e-4),
    "gpt3-125m": (12, 12, 768, 2048, "gelu", 6e-4),
    "gpt3-350m": (24, 16, 1024, 2048, "gelu", 3e-4),
    "gpt3-760m": (24, 16, 1536, 2048, "gelu", 2.5e-4),
    "gpt3-1.3b": (24, 16, 2048, 2048, "gelu", 2e-4),
    "gpt3-2.7b": (32, 32, 2560, 2048, "gelu", 1.6e-4),
    "gpt3-6.7b": (32, 32, 4096, 2048, "gelu", 1.2e-4),
    "gpt3-13b": (40, 40, 5120, 2048, "gelu", 1e-4),
    "gpt3-175b": (96, 96, 12288, 2048, "gelu", 0.6e-4),
    "opt-125m": (12, 12, 768, 2048, "relu", 6e-4),
    "opt-1.3b": (24, 32, 2048, 2048, "relu", 2e-4),
    "opt-2.7b": (32, 32, 2560, 2048, "relu", 1.6e-4),
    "opt-6.7b": (32, 32, 4096, 2048, "relu", 1.2e-4),
    "opt-13b": (40, 40, 5120, 2048, "relu", 1e-4),
    "opt-30b": (48, 56, 7168, 2048, "relu", 1e-4),
    "opt-66b": (64, 72, 9216, 2048, "relu", 0.8e-4),
    "opt-175b": (96, 96, 12288, 2048, "relu", 1.2e-4),
}
SIZES = {name: dict(zip(("n_layer", "n_head", "n_embd", "seq_len", "activation"), shape))
         for name, (*shape, _) in _TABLE.items()}
PEAK_LR = {name: lr for name, (*_, lr) in _TABLE.items()}


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
