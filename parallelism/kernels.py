"""Replacements for kernels of PyTorch that are slow or inaccurate.

    where                               PyTorch's kernel                   here
    products in 16 bits, on a CPU       4 to 27 times the time of fp32     upcast_for_matmul
    without instructions for them
    gradients in 16 bits of LayerNorm   added up in 16 bits:               LayerNorm, lookup
    and of an embedding                 up to 42% off
    RMSNorm, on a CPU                   several kernels, which keep x 3    RMSNorm
                                        to 5 times for backward
    products of experts, on a GPU       a kernel for each number of        expert_linear
                                        rows, which the host awaits
    causal attention to more keys       computes what it masks, and on     attend_to_prefix
    than there are queries              a CPU keeps the mask

Elsewhere these functions call PyTorch's own: the first two in fp32 and fp64, the first three on
GPUs, expert_linear on CPUs. model.py calls PyTorch alone: `use_kernels` changes that. parallel.py
calls `linear`, `matmul`, `lookup` and `attend_to_prefix`.
"""
from functools import partial
from typing import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import model
from model import CoreAttention
from models import llama, moe
from models.window import WindowedAttention

# ---- Products -------------------------------------------------------------------------------

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
    # them again in backward. Attention is repeated there, a linear product is not.
    return checkpoint(in_fp32, *factors, use_reentrant=False)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b. A CPU without 16-bit products multiplies in fp32, which is 4 to 27 times as fast."""
    return upcast_for_matmul(torch.matmul, a, b, out=out)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """F.linear by `upcast_for_matmul`: x (..., in), weight (out, in) -> (..., out)."""
    return upcast_for_matmul(F.linear, x, weight, bias)


# ---- Attention to a prefix -----------------------------------------------------------------

def attend_to_prefix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float,
                     mask: torch.Tensor | None):
    """Causal attention of q (B, H, n, D), the last n of the positions of k and v
    (B, H, end, D), or by a mask (B, 1, n, end)."""
    n, end = q.shape[2], k.shape[2]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p,
                     enable_gqa=q.shape[1] > k.shape[1])
    if mask is not None:
        return upcast_for_matmul(partial(attend, attn_mask=mask), q, k, v)
    if q.device.type == "cpu":
        return upcast_for_matmul(partial(attend, attn_mask=reversed_mask(n, end, q.dtype)),
                                 q.flip(2), k, v).flip(2)
    # Flash attention, which needs no mask in memory. Imported here because it takes a second.
    from torch.nn.attention.bias import causal_lower_right
    return attend(q, k, v, attn_mask=causal_lower_right(n, end))


def reversed_mask(n: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask (n, end) to add to the scores of the last n of `end` positions, in reverse order: row
    i, of position end - 1 - i, is elements i to i + end - 1 of a vector (0, ... 0, -inf, ... -inf).
    A CPU's kernel keeps the mask for backward; a view of the vector takes no memory."""
    vector = torch.zeros(end + n - 1, dtype=torch.promote_types(dtype, torch.float32))
    vector[end:] = -torch.inf
    return vector.unfold(0, end, 1)


# ---- Products of experts --------------------------------------------------------------------

def multiplies_experts_at_once(weight: torch.Tensor) -> bool:
    """Whether PyTorch has one kernel for the products of all experts: in bf16 on GPUs since the
    A100, where rows begin at a multiple of 16 bytes."""
    return (weight.device.type == "cuda" and weight.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(weight.device) >= (8, 0)
            and all(size % 8 == 0 for size in weight.shape[1:]))


def expert_linear(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """x (n, in) by weight (E, out, in) -> (n, out). The first counts[0] rows are for expert 0, the
    next counts[1] for expert 1, and so on.

    Expert by expert, a GPU waits for the host, which waits for the counts. And cuBLAS looks for a
    kernel whenever a number of rows is new: on an H100, most of a profiled step was idle."""
    if multiplies_experts_at_once(weight):
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    products = [linear(rows, of_expert) for rows, of_expert in zip(x.split(counts.tolist()),
                                                                   weight)]
    return torch.cat(products)


# ---- Gradients' sums ------------------------------------------------------------------------

# Two kernels of PyTorch for CPUs add up a gradient in its own type, so in 16 bits the error grows
# with the number of terms: relative to fp64, with 192 channels in bf16,
#
#     rows of x, or places of one token           128        4,096      16,384
#     LayerNorm: gradient  of weight, of bias     1.4, 1.1   6.8, 6.2   13, 42 %
#     embedding: gradient of the token's row      1.3        5.9        41 %
#
# Everything else adds up in fp32 there (biases, products, softmax, broadcasts), and is off by one
# rounding, 0.17%, however many terms there are. LayerNorm and `lookup` reach that too.


def sums_in_16_bits(weight: torch.Tensor) -> bool:
    """Whether PyTorch would add up a gradient of this weight in 16 bits."""
    return (weight.device.type == "cpu" and weight.dtype.itemsize == 2
            and torch.is_grad_enabled() and not torch.compiler.is_compiling())


class _LayerNormSumsInFp32(torch.autograd.Function):
    """F.layer_norm of x (..., C) over the channels, with gradients that add up in fp32. Keeps x in
    16 bits, as PyTorch does; backward converts it."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        weight = weight.float()
        if bias is not None:                # PaLM's norms have none
            bias = bias.float()
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)      # all but x in fp32
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.float(), x.float(), weight.shape, mean, rstd, weight, bias,
            output_mask=[True, True, bias is not None])
        if bias is not None:
            dbias = dbias.to(x.dtype)
        return dx.to(x.dtype), dweight.to(x.dtype), dbias, None


def lookup(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.embedding: the rows (...) of weight (n, C), with a gradient that adds up in fp32."""
    if sums_in_16_bits(weight):
        return F.embedding(rows, weight.float()).to(weight.dtype)
    return F.embedding(rows, weight)


# ---- RMSNorm --------------------------------------------------------------------------------

class _RMSNorm(torch.autograd.Function):
    """F.rms_norm of x (..., C) over the channels: y = x / rms * weight, with
    1 / rms = (mean(x^2) + eps)^(-1/2). Keeps x alone; sums are of fp32 or wider."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()      # (..., 1): 1 / rms
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, inverse = ctx.saved_tensors
        normal = x * inverse                                                # (..., C)
        dnormal = dy * weight.to(inverse.dtype)
        dx = inverse * (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True))
        dweight = (dy * normal).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


# ---- The modules of a model -----------------------------------------------------------------

class Linear(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        if self.weight is not None and sums_in_16_bits(self.weight):
            return _LayerNormSumsInFp32.apply(x, self.weight, self.bias, self.eps)
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        if x.device.type == "cpu":
            return _RMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class Embedding(nn.Embedding):
    def forward(self, rows):
        return lookup(rows, self.weight)


class FastCoreAttention(CoreAttention):
    def forward(self, q, k, v, dropout_seed=None, mask=None):
        attend = partial(super().forward, dropout_seed=dropout_seed, mask=mask)
        return upcast_for_matmul(attend, q, k, v)


class FastWindowedAttention(FastCoreAttention, WindowedAttention):
    pass


class Head(model.Head):
    def logits(self, x):
        return linear(self.norm(x), self.weight)[..., :self.vocab_size]


class BiasedHead(llama.BiasedHead, Head):
    pass


class ExpertLinear(moe.ExpertLinear):
    def forward(self, x, counts):
        return expert_linear(x, self.weight, counts)


KERNELS = {nn.Linear: Linear, nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm,
           nn.Embedding: Embedding, CoreAttention: FastCoreAttention,
           WindowedAttention: FastWindowedAttention, model.Head: Head,
           llama.BiasedHead: BiasedHead, moe.ExpertLinear: ExpertLinear}


def use_kernels(plain: nn.Module) -> None:
    """Let the modules of a plain model compute by the functions of this file. Each keeps its
    parameters and becomes an instance of its class in KERNELS."""
    for module in plain.modules():
        module.__class__ = KERNELS.get(type(module), type(module))
