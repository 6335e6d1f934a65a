"""The GPT: a stack of Transformer decoder blocks between an embedding and a head that share one
matrix.

    tokens (B, T) -> Embed -> Block 0 -> ... -> Block L-1 -> Head -> logits (B, T, V), or the loss

    Block:  x = x + attention(norm(x));  x = x + mlp(norm(x))          (pre-LayerNorm, GPT-2)

The shape legend of the whole project:
    B sequences, T positions, C channels (n_embd), H heads, D channels of a head (C = H D),
    V vocabulary

Papers: GPT-2 (Radford et al. 2019, section 2.3) for the architecture and its initialization,
GPT-3 (Brown et al. 2020, table 2.1) and OPT (Zhang et al. 2022, table 1) for the sizes and their
learning rates.

This file needs only PyTorch, and can be used by itself:

    model = GPT(GPTConfig(vocab_size=257)).initialize(seed=0)
    loss = model(tokens, targets) / targets.numel()

There is no parallelism here. Four habits let other files cut the model into pieces: the numbers of
heads and of positions are those of the projected q, k and v; the ends of the model may be absent;
the head owns the projection to the vocabulary and the loss; blocks are named by their number.
"""
import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB_MULTIPLE = 128    # the token matrix is padded to a multiple of this many rows
IGNORE_INDEX = -1       # a target that adds nothing to the loss
VOCAB_MATRICES = ("embed.token.weight", "head.weight")      # in a GPT they are one


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
        """Rows of the token matrix in memory. Those past vocab_size are padding: the head drops
        their logits."""
        return ceil_div(self.vocab_size, VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    # Fixed in a GPT; the models of models/ choose them.
    n_kv_head = property(lambda self: self.n_head)
    head_dim = property(lambda self: self.n_embd // self.n_head)
    hidden = property(lambda self: 4 * self.n_embd)
    gated = False
    tied = True

    def build(self) -> "GPT":
        return GPT(self)


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


class Embed(nn.Module):
    """tokens (B, T) -> x (B, T, C): the token's row plus the position's row."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        # Left empty: `initialize` fills it.
        self.token = nn.Embedding.from_pretrained(
            torch.empty(cfg.padded_vocab, cfg.n_embd), freeze=False)
        self.position = nn.Embedding.from_pretrained(
            torch.empty(cfg.seq_len, cfg.n_embd), freeze=False)
        self.dropout = Dropout(cfg.dropout, "embed")

    def forward(self, tokens, dropout_seed=None, start=0, positions=None):
        return self.add_positions(self.token(tokens), dropout_seed, start, positions)

    def add_positions(self, x, dropout_seed, start, positions=None):
        if positions is None:
            positions = torch.arange(start, start + x.shape[1], device=x.device)
        # (B, T, C) + (T, C), or + (B, T, C) for packed texts
        return self.dropout(x + self.position(positions), dropout_seed)


class CoreAttention(Dropout):
    """q (B, H, T, D), k and v (B, H, positions, D) -> (B, H, T, D). In its plain form:

        scores = q @ k.mT / sqrt(D)                     # (B, H, T, positions)
        scores = scores.masked_fill(future, -inf)       # if causal: what comes later
        return softmax(scores) @ v

    with dropout on the softmax. Without `causal` each q attends to all positions, with a mask
    (B, 1, T, positions) to those where it is True. (k and v may have fewer heads.)"""
    attend = staticmethod(F.scaled_dot_product_attention)
    part = 0        # which part of the heads this is: each draws dropout masks of its own

    def forward(self, q, k, v, causal, dropout_seed=None, mask=None):
        p = self.p if self.training else 0.0
        if p > 0:
            seed_dropout(q.device, dropout_seed, *self.name, self.part)
        return self.attend(q, k, v, attn_mask=mask, is_causal=causal and mask is None, dropout_p=p,
                           enable_gqa=q.shape[1] > k.shape[1])


class Attention(nn.Module):
    """Causal multi-head self-attention, x (B, T, C) -> (B, T, C).

    One matrix product computes q, k and v. Its 3C output channels are ordered (3, H, D): all heads
    of q, then of k, then of v. To cut the matrix by heads, cut each third by itself.

    cache (2, B, H, positions, D) holds the keys and values of the positions before `start`; those
    of x are added. At start 0 a prompt, a batch of 1, fills every row of the cache.
    """

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.head_dim = cfg.n_embd // cfg.n_head
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.qkv.stacked = 3        # matrices: each is cut by heads on its own
        self.core_attention = CoreAttention(cfg.dropout, "layer", layer, "attention")
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x, dropout_seed=None, cache=None, start=0, mask=None):
        q, k, v = self.split_heads(self.qkv(x), start)                      # 3 of (B, H, T, D)
        B, _, T, _ = q.shape
        assert start == 0 or T == 1, "with a cache: the whole prompt first, then a token at a time"
        if cache is not None:
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
        if start > 0:
            k, v = cache[:, :, :, :start + T]                   # 2 of (B, H, start + T, D)
        causal = start == 0         # a single new token may attend to the whole cache
        y = self.core_attention(q, k, v, causal, dropout_seed, mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))   # (B, H, T, D) -> (B, T, H D)

    def split_heads(self, qkv, start):
        """qkv (B, T, 3 H D), of the positions from `start` on, -> q, k and v (B, H, T, D)."""
        B, T, _ = qkv.shape
        split = qkv.view(B, T, 3, -1, self.head_dim).unbind(2)              # 3 of (B, T, H, D)
        return [x.transpose(1, 2) for x in split]


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C) through 4C hidden channels."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.down = nn.Linear(4 * cfg.n_embd, cfg.n_embd)
        self.activation = cfg.activation

    def forward(self, x):
        h = self.up(x)                                                      # (B, T, 4C)
        h = F.relu(h) if self.activation == "relu" else F.gelu(h, approximate="tanh")
        return self.down(h)


class Block(nn.Module):
    """One pre-LayerNorm Transformer block, (B, T, C) -> (B, T, C)."""

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.n_embd)
        self.attn = Attention(cfg, layer)
        self.dropout1 = Dropout(cfg.dropout, "layer", layer, "attn")
        self.norm2 = nn.LayerNorm(cfg.n_embd)
        self.mlp = MLP(cfg)
        self.dropout2 = Dropout(cfg.dropout, "layer", layer, "mlp")

    def forward(self, x, dropout_seed=None, cache=None, start=0, mask=None):
        y = self.attn(self.norm1(x), dropout_seed, cache, start, mask)
        x = x + self.dropout1(y, dropout_seed)
        return x + self.dropout2(self.mlp(self.norm2(x)), dropout_seed)


class Head(nn.Module):
    """Final LayerNorm, projection to logits by the token embedding's matrix, and loss.

    x (B, T, C) -> logits (B, T, V); given targets (B, T) -> the sum over positions of the
    cross-entropy in nats, in fp32 or wider. It is a sum because the sums of microbatches of any
    size can be added; targets of IGNORE_INDEX add nothing.
    """
    project = staticmethod(F.linear)

    def __init__(self, cfg: GPTConfig, weight: nn.Parameter):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.n_embd)
        self.weight = weight                                                # (padded V, C)
        self.vocab_size = cfg.vocab_size

    def forward(self, x, targets=None):
        logits = self.project(self.norm(x), self.weight)[..., :self.vocab_size]
        if targets is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX,
                               reduction="sum")


def mask_of_packed(positions: torch.Tensor) -> torch.Tensor:
    """positions (B, T) of several texts packed in a row, which restart at 0 with each text ->
    whether a token (row) attends to another (column): bool (B, 1, T, T)."""
    text = (positions == 0).cumsum(1)                                       # its number, from 1
    in_same_text = text.unsqueeze(2) == text.unsqueeze(1)
    return in_same_text.tril().unsqueeze(1)


class GPT(nn.Module):
    """The whole model. `embed` and `head` may be set to None and blocks deleted: the rest then runs
    as one stage of a pipeline, from activations (B, T, C) to activations."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = Embed(cfg)
        self.blocks = nn.ModuleDict({str(i): Block(cfg, i) for i in range(cfg.n_layer)})
        self.head = Head(cfg, self.embed.token.weight)

    def forward(self, x, targets=None, dropout_seed=None, cache=None, start=0, positions=None):
        """tokens (B, T) -> logits (B, T, V), or the summed loss in nats given targets (B, T).

        In training mode all dropout masks are a function of `dropout_seed`, an int, if it is given.
        With a cache (`new_kv_cache`) the tokens have the positions start, start + 1, ...: the whole
        prompt at start 0, then one token at a time. The logits (B, 1, V) are of the last position.
        If a row holds several packed texts, `positions` (B, T) begins again at 0 with each of them.
        """
        mask = None if positions is None else mask_of_packed(positions)
        if self.embed is not None:
            x = self.embed(x, dropout_seed, start, positions)
        for name, block in self.blocks.items():
            block_cache = None if cache is None else cache[name]
            x = block(x, dropout_seed, block_cache, start, mask)
        if cache is not None:
            x = x[:, -1:]
        if self.head is None:
            return x
        return self.head(x, targets)

    def new_kv_cache(self, batch: int, positions: int | None = None) -> dict:
        """An empty cache for `batch` sequences of at most `positions` (None: seq_len) tokens: block
        -> keys and values (2, B, H, positions, D)."""
        cfg = self.cfg
        shape = (2, batch, cfg.n_kv_head, positions or cfg.seq_len, cfg.head_dim)
        return {name: self.head.weight.new_empty(shape) for name in self.blocks}

    @torch.no_grad()
    def initialize(self, seed: int) -> "GPT":
        """Fill every parameter by its name; returns the model."""
        for name, parameter in self.named_parameters():
            rows = self.cfg.vocab_size if name in VOCAB_MATRICES else parameter.shape[0]
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
# Seeds and sizes
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
