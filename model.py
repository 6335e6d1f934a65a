"""The GPT: a stack of Transformer decoder blocks between an embedding and a head that share one
matrix.

    tokens (B, T) -> Embed -> Block 0 -> ... -> Block L-1 -> Head -> logits (B, T, V), or the loss

    Block:  x = x + attention(norm(x))
            x = x + mlp(norm(x))                            # pre-LayerNorm, as in GPT-2

The shape legend of the whole project:
    B sequences, T positions, C channels (n_embd), H heads, D channels of a head (C = H D),
    V vocabulary

Papers: GPT-2 (Radford et al. 2019, section 2.3), GPT-3 (Brown et al. 2020, table 2.1) and OPT
(Zhang et al. 2022, table 1) for sizes and learning rates.

This file needs only PyTorch, and can be used by itself:

    model = GPT(GPTConfig(vocab_size=257)).initialize(seed=0)
    loss = model(tokens, targets) / targets.numel()

There is no parallelism here. Four conventions let other files cut the model into pieces:

    1. Head counts come from tensor shapes, never from the config.
    2. Each end of the model, `embed` and `head`, may be None.
    3. The head owns the projection to the vocabulary and the loss.
    4. Names of modules are an API: "attn.qkv", "embed.token", a block's number in the whole model.
"""
import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB_MULTIPLE = 128    # the token matrix is padded to a multiple of this many rows
IGNORE_INDEX = -1       # a target that adds nothing to the loss
OF_VOCABULARY = ("embed.token.weight", "head.weight", "head.bias")  # one row a token


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. The defaults are the size `nano`."""
    vocab_size: int = 257
    seq_len: int = 128
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 192
    activation: str = "gelu"        # GPT-2's tanh form of gelu, or relu, which is OPT's choice
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

    def build(self) -> "GPT":
        return GPT(self)

    # The same in every GPT. Other models (models/) have fields of these names.
    gated = False
    tied = True

    @property
    def n_kv_head(self) -> int:
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        return 4 * self.n_embd


class Dropout(nn.Module):
    """F.dropout of x (B, ...) in training mode. The mask of row i is a function of dropout_seed + i
    and the name. Nothing else in a block may draw: recomputation restores no generator."""

    def __init__(self, p: float, *name):
        super().__init__()
        self.p, self.name = p, name

    def forward(self, x, dropout_seed=None):
        if self.p == 0 or not self.training:
            return x
        if dropout_seed is None:
            return F.dropout(x, self.p)         # from torch's own generator
        mask = torch.empty_like(x)
        for i, row in enumerate(mask):
            seed_dropout(x.device, dropout_seed + i, *self.name)
            row.bernoulli_(1 - self.p)
        return x * mask.div_(1 - self.p)


class Embed(nn.Module):
    """tokens (B, T) -> x (B, T, C): the token's row plus the position's row."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(cfg.padded_vocab, cfg.n_embd)
        self.position = nn.Embedding(cfg.seq_len, cfg.n_embd)
        self.dropout = Dropout(cfg.dropout, "embed")

    def forward(self, tokens, dropout_seed=None, positions=None):
        return self.add_positions(self.token(tokens), dropout_seed, positions)

    def add_positions(self, x, dropout_seed, positions):
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)           # (T,)
        return self.dropout(x + self.position(positions), dropout_seed)


class CoreAttention(Dropout):
    """q, k and v (B, H, T, D) -> (B, H, T, D):

        scores = q @ k.mT / sqrt(D)                     # (B, H, T, T): a row for each q
        scores = scores.masked_fill(future, -inf)       # each q attends to itself and before
        return softmax(scores) @ v

    with dropout on the softmax. A mask (B, 1, T, T) is True where q attends to k. k and v may have
    fewer heads than q (GQA). A q of one position is the last: it attends to all of k."""
    part = 0        # the tensor-parallel rank: different heads draw different dropout masks

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        if self.p == 0 or not self.training or dropout_seed is None:
            return self.attend(q, k, v, mask)
        masks = [mask] * len(q) if mask is None or mask.dim() == 2 else mask.split(1)
        outputs = []
        for i, row in enumerate(zip(q.split(1), k.split(1), v.split(1), masks)):
            seed_dropout(q.device, dropout_seed + i, *self.name, self.part)
            outputs.append(self.attend(*row))
        return torch.cat(outputs)

    def attend(self, q, k, v, mask):
        is_causal = mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal,
                                              dropout_p=self.p if self.training else 0.0,
                                              enable_gqa=q.shape[1] > k.shape[1])


class Attention(nn.Module):
    """Causal multi-head self-attention, x (B, T, C) -> (B, T, C).

    One matrix product computes q, k and v. Its 3C output channels are ordered (3, H, D): all heads
    of q, then of k, then of v. To cut the matrix by heads, cut each third by itself."""

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.qkv.stacked = 3        # matrices, each of which is cut by heads
        self.core_attention = CoreAttention(cfg.dropout, "layer", layer, "attention")
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x, dropout_seed=None, mask=None):
        qkv = self.qkv(x)                                                   # (B, T, 3 H D)
        B, T, _ = qkv.shape
        thirds = qkv.view(B, T, 3, -1, self.head_dim).unbind(2)             # 3 of (B, T, H, D)
        q, k, v = (third.transpose(1, 2) for third in thirds)               # (B, H, T, D) each
        y = self.core_attention(q, k, v, dropout_seed, mask)                # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))                      # (B, T, H D)


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

    def forward(self, x, dropout_seed=None, mask=None):
        y = self.attn(self.norm1(x), dropout_seed, mask)
        x = x + self.dropout1(y, dropout_seed)
        return x + self.dropout2(self.mlp(self.norm2(x)), dropout_seed)


class Head(nn.Module):
    """Final LayerNorm, projection to logits by the token embedding's matrix, and loss.

    x (B, T, C) -> logits (B, T, V). With targets (B, T) -> the loss: the sum over positions of the
    cross-entropy in nats, in fp32 or wider. It is a sum because the sums of microbatches of any
    size can be added. Targets of IGNORE_INDEX add nothing."""

    def __init__(self, cfg: GPTConfig, weight: nn.Parameter):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.n_embd)
        self.weight = weight                                                # (padded V, C)
        self.vocab_size = cfg.vocab_size

    def logits(self, x):
        return F.linear(self.norm(x), self.weight)[..., :self.vocab_size]

    def forward(self, x, targets=None):
        logits = self.logits(x)
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

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x, targets=None, dropout_seed=None, positions=None):
        """tokens (B, T) -> logits (B, T, V), or the summed loss in nats given targets (B, T).

        Given an int `dropout_seed`, the dropout masks of row i are a function of dropout_seed + i.
        If a row holds several packed texts, `positions` (B, T) restart at 0 with each of them."""
        mask = None if positions is None else mask_of_packed(positions)
        if self.embed is not None:
            x = self.embed(x, dropout_seed, positions)
        for block in self.blocks.values():
            x = block(x, dropout_seed, mask)
        if self.head is None:
            return x
        return self.head(x, targets)

    @torch.no_grad()
    def initialize(self, seed: int) -> "GPT":
        """Fill every parameter by its name. Returns the model."""
        for name, parameter in self.named_parameters():
            rows = self.cfg.vocab_size if name in OF_VOCABULARY else parameter.shape[0]
            shape = (rows, *parameter.shape[1:])
            parameter.zero_()
            parameter[:rows] = initial_value(self.cfg, name, shape, seed)
        return self


def initial_value(cfg: GPTConfig, name: str, shape, seed: int) -> torch.Tensor:
    """The value at step 0 of the full parameter `name`, without padding: fp32 on the CPU.

    It is a function of (seed, name) alone, so each rank of any layout can draw its parameters, one
    at a time. Biases are 0, LayerNorm weights 1. Matrices have a standard deviation of 0.02. For
    the two projections that write to the residual stream it is 0.02 / sqrt(2L), so that the
    stream's variance does not depend on the depth. Stacked matrices (E, out, in), the experts of
    models/moe.py, are drawn one by one, each by a name of its own."""
    if len(shape) == 3:
        return torch.stack([initial_value(cfg, f"{number}.{name}", shape[1:], seed)
                            for number in range(shape[0])])
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    residual = name.endswith(("attn.proj.weight", ".down.weight"))
    std = 0.02 / math.sqrt(2 * cfg.n_layer) if residual else 0.02
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.empty(shape).normal_(0, std, generator=generator)


def mask_of_packed(positions: torch.Tensor) -> torch.Tensor:
    """positions (B, T), which restart at 0 with each text of a row -> whether a token attends to
    another, bool (B, 1, T, T): a row for each token, a column for each other."""
    text = (positions == 0).cumsum(1)               # the number of the token's text, from 1
    in_same_text = text.unsqueeze(2) == text.unsqueeze(1)
    return in_same_text.tril().unsqueeze(1)


def derive_seed(*what) -> int:
    """A 63-bit seed of ints and strings, which is the same everywhere, unlike Python's `hash`."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1


def seed_dropout(device: torch.device, dropout_seed: int, *name) -> None:
    """Make the next dropout mask on `device` a function of (dropout_seed, name), so that it can be
    drawn again. torch.manual_seed would seed all devices, which takes 0.4 to 2 ms with a GPU."""
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
# 24 heads of 128 at width 2048 and 13B a width of 5140. Neither divides: here they are 16 and 5120.
# OPT-350m is post-LayerNorm, and left out. GPT-2's rates are those of GPT-3's models of like size.
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
_FIELDS = ("n_layer", "n_head", "n_embd", "seq_len", "activation")      # all but the rate
SIZES = {name: dict(zip(_FIELDS, row)) for name, row in _TABLE.items()}
PEAK_LR = {name: row[-1] for name, row in _TABLE.items()}
