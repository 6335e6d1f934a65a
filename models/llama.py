"""Llama and its relatives: what most decoders since GPT-3 have changed. Read model.py first.

                     GPT-3 (model.py)               Llama                             here
    norm             LayerNorm                      RMSNorm: no mean, no bias         make_norm
    positions        learned, added to the tokens   q and k are rotated by an angle   Rotary
    attention        a k and v for each head of q   G heads of q share a k and a v    Attention
    MLP              gelu(x A) B                    (silu(x A) * (x A')) B            MLP
    biases           everywhere                     nowhere                           bias
    head             the token matrix               a matrix of its own               Llama

The first four are the ideas of this file. Llama 1 and the small Llama 2 have G = 1. The relatives
differ from Llama in some of these, in a norm of q and k, in the residual, or in a bias of the
logits. Mistral 7B has a sliding window: window.py. llama_sizes.py has the families and the sizes.
Most classes replace the class of that name in model.py. They keep the names of its modules and the
four conventions of model.py's header, so whatever runs a GPT runs a Llama.

    model = LlamaConfig(vocab_size=257).build().initialize(seed=0)
    loss = model(tokens, targets) / targets.numel()

Shapes, besides those of model.py. H D may differ from C.
    K key/value heads, each shared by G = H/K query heads: the cache is G times smaller
    F hidden channels of the MLP

Papers: Llama (Touvron et al. 2023), RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al.
2021), gated MLPs (Shazeer 2020), grouped queries (Ainslie et al. 2023), GPT-NeoX-20B (Black et al.
2022), PaLM (Chowdhery et al. 2022), OLMo (Groeneveld et al. 2024), OLMo 2 (Walsh et al. 2025),
Qwen (Yang et al. 2024, 2025), GPT-J (Wang and Komatsuzaki 2021), Phi (Gunasekar et al. 2023),
Galactica (Taylor et al. 2022).
"""
from __future__ import annotations      # LlamaConfig comes last
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import model
from model import GPT, CoreAttention, Dropout, GPTConfig, ceil_div
from models.window import WindowedAttention


def make_norm(cfg: LlamaConfig) -> nn.Module:
    """RMSNorm of x (..., C), x / sqrt(mean(x^2) + eps) * weight, or a relative's LayerNorm."""
    if cfg.norm == "rms":
        return nn.RMSNorm(cfg.n_embd, cfg.norm_eps)
    return nn.LayerNorm(cfg.n_embd, cfg.norm_eps, elementwise_affine=cfg.norm == "layer",
                        bias=cfg.bias in ("mlp and norms", "all"))


class AllHeadsNorm(nn.RMSNorm):
    """OLMo 2's norm of q (B, H, T, D), or of k: RMSNorm over the channels of all heads."""

    def forward(self, q):
        y = super().forward(q.transpose(1, 2).flatten(2))                   # (B, T, H D)
        return y.unflatten(2, (q.shape[1], -1)).transpose(1, 2)


class Rotary(nn.Module):
    """Rotates q (B, H, T, D) and k (B, K, T, D) by their positions.

    Channels i and i + n/2 (i < n/2) of the first n of a head form a point in a plane. At position p
    it is rotated by p theta^(-2i/n) radians. The dot product of a rotated q and k therefore depends
    on their positions only through the difference. So packed texts need no positions that restart.

    In a Llama n is D. Su et al. and Meta's code pair the channels 2i and 2i + 1, which is the same
    model with permuted channels."""

    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        self.cfg = cfg

    def forward(self, q, k):
        cos, sin = self.cos_and_sin(q.shape[2], q.dtype, q.device)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    def cos_and_sin(self, T, dtype, device):
        """Of the angles of T positions, (T, n / 2) each."""
        wide = torch.promote_types(dtype, torch.float32)
        positions = self.positions(T, device).to(wide)
        angles = torch.outer(positions, self.speeds(device).to(wide))       # (T, n / 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x, cos, sin):
        n = self.cfg.rotated
        a, b = x[..., :n].chunk(2, dim=-1)                                  # 2 of (B, H, T, n / 2)
        parts = [a * cos - b * sin, b * cos + a * sin]
        if n < x.shape[-1]:
            parts.append(x[..., n:])
        return torch.cat(parts, dim=-1)

    def positions(self, T, device):
        return torch.arange(T, device=device)

    def speeds(self, device):
        """Radians per position, (n / 2,), in fp32.

        Llama 3.1 extends a model that was trained on `original` positions. Pairs that make fewer
        than `low` rotations over `original` positions are slowed by `factor`. Pairs that make more
        than `high` rotations are unchanged. Between the two, the speed is interpolated."""
        n = self.cfg.rotated
        twice_i = torch.arange(0, n, 2, device=device).float()
        speeds = 1 / self.cfg.rope_theta ** (twice_i / n)
        if self.cfg.rope_scaling:
            factor, low, high, original = self.cfg.rope_scaling
            rotations = original * speeds / (2 * torch.pi)
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
            speeds = (1 - kept) * speeds / factor + kept * speeds
        return speeds


class Attention(nn.Module):
    """Causal attention with rotary positions, x (B, T, C) -> (B, T, C). G heads of q share a head
    of k and v. With K = H it is multi-head attention, with K = 1 multi-query attention.

    The output channels of qkv are ordered (K, G + 2, D), unlike a GPT's: for each head of k its G
    heads of q, then k, then v. So a tensor-parallel rank takes whole groups."""

    def __init__(self, cfg: LlamaConfig, layer: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.group = cfg.n_head // cfg.n_kv_head                            # G
        width = cfg.n_head * cfg.head_dim
        self.qkv = nn.Linear(cfg.n_embd, width + 2 * cfg.n_kv_head * cfg.head_dim,
                             bias=cfg.bias in ("qkv", "all"))
        if cfg.qk_norm:
            self.q_norm = nn.RMSNorm(cfg.head_dim, cfg.norm_eps)
            self.k_norm = nn.RMSNorm(cfg.head_dim, cfg.norm_eps)
        if cfg.norm_all_heads:
            self.q_norm = AllHeadsNorm(width, cfg.norm_eps)
            self.k_norm = AllHeadsNorm(cfg.n_kv_head * cfg.head_dim, cfg.norm_eps)
        if cfg.rotated > 0:
            self.rotary = Rotary(cfg)
        name = ("layer", layer, "attention")
        if 0 < cfg.window < cfg.seq_len:
            self.core_attention = WindowedAttention(cfg.window, cfg.dropout, *name)
        else:
            self.core_attention = CoreAttention(cfg.dropout, *name)
        self.proj = nn.Linear(width, cfg.n_embd, bias=cfg.bias == "all")

    def forward(self, x, dropout_seed=None, mask=None):
        q, k, v = self.split_heads(self.qkv(x))                             # (B, H or K, T, D)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return self.attend(q, k, v, dropout_seed, mask)

    def attend(self, q, k, v, dropout_seed=None, mask=None):
        if hasattr(self, "rotary"):
            q, k = self.rotary(q, k)
        y = self.core_attention(q, k, v, dropout_seed, mask)                # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))                      # (B, T, H D)

    def split_heads(self, qkv):
        B, T, _ = qkv.shape
        groups = qkv.view(B, T, -1, self.group + 2, self.head_dim)          # (B, T, K, G + 2, D)
        q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in groups.split([self.group, 1, 1], 3))
        return q, k, v.clone()          # A view would keep all of qkv for backward.


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C) through F hidden channels. A gated MLP has two matrices in `up`, A
    stacked on A': each channel of x A', the value, is multiplied by one of silu(x A), its gate."""

    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        matrices = 2 if cfg.gated else 1
        has_bias = cfg.bias in ("mlp and norms", "all")
        self.up = nn.Linear(cfg.n_embd, matrices * cfg.hidden, bias=has_bias)
        self.up.stacked = matrices
        self.down = nn.Linear(cfg.hidden, cfg.n_embd, bias=has_bias)
        self.gated, self.activation = cfg.gated, ACTIVATIONS[cfg.activation]

    def forward(self, x):
        h = self.up(x)
        if not self.gated:
            return self.down(self.activation(h))
        gate, value = h.chunk(2, dim=-1)                                    # 2 of (B, T, F)
        return self.down(self.activation(gate) * value)


class Embed(nn.Module):
    """tokens (B, T) -> x (B, T, C): the token's row. Positions enter in Attention, by Rotary."""

    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        self.token = nn.Embedding(cfg.padded_vocab, cfg.n_embd)
        self.dropout = Dropout(cfg.dropout, "embed")

    def forward(self, tokens, dropout_seed=None, positions=None):
        return self.add_positions(self.token(tokens), dropout_seed, positions)

    def add_positions(self, x, dropout_seed, positions):
        return self.dropout(x, dropout_seed)


class Block(nn.Module):
    """One block, (B, T, C) -> (B, T, C)."""

    def __init__(self, cfg: LlamaConfig, layer: int):
        super().__init__()
        self.norm1 = make_norm(cfg)
        self.attn = Attention(cfg, layer)
        self.dropout1 = Dropout(cfg.dropout, "layer", layer, "attn")
        if cfg.residual != "one norm":
            self.norm2 = make_norm(cfg)
        self.mlp = MLP(cfg)
        self.dropout2 = Dropout(cfg.dropout, "layer", layer, "mlp")
        self.residual = cfg.residual

    def forward(self, x, dropout_seed=None, mask=None):
        if self.residual == "norm after":
            y = self.norm1(self.attn(x, dropout_seed, mask))
            x = x + self.dropout1(y, dropout_seed)
            return x + self.dropout2(self.norm2(self.mlp(x)), dropout_seed)
        normed = self.norm1(x)
        y = self.dropout1(self.attn(normed, dropout_seed, mask), dropout_seed)
        if self.residual == "serial":
            x = x + y
            return x + self.dropout2(self.mlp(self.norm2(x)), dropout_seed)
        if self.residual == "parallel":
            normed = self.norm2(x)
        return x + y + self.dropout2(self.mlp(normed), dropout_seed)


class BiasedHead(model.Head):
    """The logits have a bias."""

    def __init__(self, cfg: LlamaConfig, weight: nn.Parameter):
        super().__init__(cfg, weight)
        self.bias = nn.Parameter(torch.empty(cfg.padded_vocab))             # (padded V,)

    def logits(self, x):
        return super().logits(x) + self.bias[:self.vocab_size]


class Llama(GPT):
    """The whole model. As in a GPT, its ends may be None and blocks deleted."""
    block_type = Block

    def __init__(self, cfg: LlamaConfig):
        nn.Module.__init__(self)        # Not super(): it would build the modules of a GPT.
        self.cfg = cfg
        self.embed = model.Embed(cfg) if cfg.learned_positions else Embed(cfg)
        self.blocks = nn.ModuleDict(
            {str(i): self.block_type(cfg, i) for i in range(cfg.n_layer)})
        weight = self.embed.token.weight
        if not cfg.tied:
            weight = nn.Parameter(torch.empty_like(weight))
        self.head = BiasedHead(cfg, weight) if cfg.head_bias else model.Head(cfg, weight)
        self.head.norm = make_norm(cfg)


ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": partial(F.gelu, approximate="tanh"),
               "gelu_erf": F.gelu}
NORMS = ("rms", "layer", "plain")               # plain: LayerNorm without parameters
BIASES = ("none", "qkv", "mlp and norms", "all")
RESIDUALS = ("serial", "parallel", "one norm", "norm after")


@dataclass(frozen=True)
class LlamaConfig(GPTConfig):
    """The shape of a model. The defaults are a Llama of the size `nano`."""
    activation: str = "silu"
    n_kv_head: int = 0              # K, or 0 for n_head
    head_dim: int = 0               # D, or 0 for C / H
    hidden: int = 0                 # F, or 0 for 8/3 C, rounded up to a multiple of 64
    gated: bool = True              # the MLP has two input matrices, A and A'
    norm: str = "rms"
    norm_eps: float = 1e-5
    qk_norm: bool = False           # RMSNorm of each head of q and k
    norm_all_heads: bool = False    # RMSNorm of q and k over the channels of all heads
    window: int = 0                 # positions that attention reaches, its own included; 0: all
    learned_positions: bool = False  # added to the tokens, as a GPT's
    rotary: float = 1.0             # the fraction of a head's channels that is rotated
    rope_theta: float = 10000.0
    rope_scaling: tuple = ()        # Llama 3.1: (factor, low, high, original seq_len)
    bias: str = "none"
    residual: str = "serial"        # "parallel": x + attention(norm1(x)) + mlp(norm2(x))
                                    # "one norm": both branches read norm1(x)
                                    # "norm after": x + norm1(attention(x)), and so the MLP
    tied: bool = False
    head_bias: bool = False         # of the logits

    def __post_init__(self):
        def set_default(name, value):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        set_default("n_kv_head", self.n_head)
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        set_default("head_dim", self.n_embd // self.n_head)
        set_default("hidden", ceil_div(8 * self.n_embd, 3 * 64) * 64)
        object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))
        for name, values in dict(activation=ACTIVATIONS, norm=NORMS, bias=BIASES,
                                 residual=RESIDUALS).items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(values)}")
        if not 0 <= self.rotary <= 1:
            raise ValueError(f"rotary {self.rotary:g} is no part of a head: give 0 to 1")
        if self.rotated % 2:
            raise ValueError(f"rotary positions rotate pairs of channels, but {self.rotary:g} of "
                             f"head_dim {self.head_dim} is {self.rotated}")

    @property
    def rotated(self) -> int:
        """The channels of a head that Rotary rotates."""
        return int(self.rotary * self.head_dim)

    def build(self) -> Llama:
        return Llama(self)
