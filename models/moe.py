"""Mixtures of experts: decoders whose MLP is many small ones, of which each token uses a few. Read
models/llama.py first.

    Llama        y = MLP(x)
    mixture      y = sum over the K experts e that the router chooses for x of  w_e(x) MLP_e(x)

               + ...  expert 0                       ...  not chosen by this token
      x -------+----> expert 1 --+
      |        + ...  expert 2   +--> w_1 y_1 + w_3 y_3
      router --+----> expert 3 --+                        E = 4 experts, of which K = 2 are active

A block has E / K times the experts' parameters that one token uses. So it knows more, and computes
no more. Other systems give an expert a capacity, and drop the tokens above this limit. Here an
expert computes all tokens that choose it.

                    scores s             weights w         q and k are normed     family here
    Mixtral         softmax over E       s / sum over K    not                    mixtral
    OLMoE           the same             s                 over all heads         olmoe
    Qwen3-MoE       the same             s / sum over K    head by head           qwen3-moe

A router that is left alone soon sends most tokens to few experts. There are two remedies.

    balance_loss    a loss of each sequence (DeepSeek-V3, section 2.1.2). It is computed per
                    sequence, so it does not depend on how the batch is cut. For each expert it
                    multiplies the part of the T tokens that chose it by the mean of its scores:
                        E / K sum_e (count_e / T) (sum_t s_te / T)
                    This is 1 if all experts are used alike. The code computes T times this,
                    because a model here returns sums over tokens.
    balance_bias    no loss (Wang et al. 2024). The K largest of s + b are chosen. After each step
                    train.py adds balance_bias to b_e if fewer tokens of the batch than the mean
                    over experts chose e, and subtracts it if more did. The weights w are those
                    of s.

Another loss, z_loss, keeps the logits z of the router small (ST-MoE, Zoph et al. 2022). It is the
mean over tokens of (log sum_e exp z_e)^2.

    model = MoEConfig(vocab_size=257).build().initialize(seed=0)
    loss = model(tokens, targets) / targets.numel()     # the cross-entropy alone. Its gradient has
                                                        # the router's losses of each block, too
Shapes, besides those of model.py and llama.py:
    E experts, K of them active for a token, F hidden channels of each, N = B T tokens

Papers: Shazeer et al. 2017, Switch (Fedus et al. 2021), Mixtral (Jiang et al. 2024), OLMoE
(Muennighoff et al. 2024), DeepSeekMoE (Dai et al. 2024), DeepSeek-V3 (2024), Qwen3 (2025).
"""
from __future__ import annotations      # MoEConfig comes last
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import IGNORE_INDEX
from models import llama, llama_sizes
from models.llama import ACTIVATIONS, Llama, LlamaConfig


class Router(nn.Module):
    """x (B, T, C) -> the weights (B, T, K) of the chosen experts, and their numbers (B, T, K).

    It computes in fp32 or wider, because rounding in 16 bits would choose another expert. A forward
    with gradients sets

        load     (B, E)   how many tokens of each sequence chose an expert
        losses   ()       the balancing loss and z_loss, summed over the tokens

    Padding is in neither of them: there `is_text` (B, T) is False. None: there is no padding."""
    is_text = None

    def __init__(self, cfg: MoEConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd))
        self.bias = None
        if cfg.balance_bias > 0:        # without a gradient: adamw_update moves it by loads
            self.bias = nn.Parameter(torch.zeros(cfg.n_expert), requires_grad=False)

    def forward(self, x):
        logits, scores, weights, chosen = self.choose(x)
        if torch.is_grad_enabled():
            self.load = self.count(chosen)
            self.losses = self.sum_losses(logits, scores, self.load, x.shape[1])
        return weights, chosen

    def choose(self, x):
        """The logits and scores of all experts (B, T, E), then what `forward` returns."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))                 # (B, T, E)
        scores = logits.softmax(-1)
        ranked = scores
        if self.bias is not None:
            ranked = scores + self.bias
        chosen = self.largest(ranked)                                       # (B, T, K)
        weights = scores.gather(-1, chosen)
        if self.cfg.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, scores, weights.to(x.dtype), chosen

    def largest(self, ranked):
        return ranked.topk(self.cfg.n_active).indices

    def count(self, chosen):
        """(B, E): how many tokens of each sequence chose an expert, without padding."""
        counted = torch.ones_like(chosen)
        if self.is_text is not None:
            counted = counted * self.own_text().unsqueeze(-1)
        return count_choices(chosen.flatten(1), self.cfg.n_expert, counted.flatten(1))

    def own_text(self):
        """`is_text` of the positions of x, which parallelism/experts.py cuts."""
        return self.is_text

    def sum_losses(self, logits, scores, counts, positions):
        """The losses summed over these tokens, whose scores are (B, T, E). `counts` (B, E) are of
        whole sequences of `positions` tokens; no gradient flows into them. In a sequence with
        padding the mean over its text counts for all positions."""
        squares = logits.logsumexp(-1).square()                             # (B, T)
        if self.is_text is not None:
            choices = counts.sum(1, keepdim=True).clamp(min=1)              # (B, 1)
            length = choices.to(scores.dtype) / self.cfg.n_active
            weights = self.own_text() * positions / length                  # (B, T)
            scores, squares = scores * weights.unsqueeze(-1), squares * weights
            positions = length
        factor = self.cfg.balance_loss * self.cfg.n_expert / (self.cfg.n_active * positions)
        balance_loss = (factor * (counts * scores.sum(1))).sum()
        return balance_loss + self.cfg.z_loss * squares.sum()


def count_choices(chosen: torch.Tensor, n_expert: int,
                  counted: torch.Tensor | None = None) -> torch.Tensor:
    """chosen (..., n) -> (..., E): how often each expert is among the n, or among those that are 1
    and not 0 in `counted`. On a GPU `bincount` would wait for the result."""
    if counted is None:
        counted = torch.ones_like(chosen)
    counts = chosen.new_zeros(*chosen.shape[:-1], n_expert)
    return counts.scatter_add_(-1, chosen, counted)


def is_text(mask: torch.Tensor) -> torch.Tensor:
    """The mask (B, 1, T, T) of packed texts -> whether a position is of a text, bool (B, T). A
    position of padding does not attend to the one before it, nor the next one to it."""
    continues = mask.diagonal(-1, 2, 3).squeeze(1)                          # (B, T - 1)
    return F.pad(continues, (1, 0)) | F.pad(continues, (0, 1))


class ExpertLinear(nn.Module):
    """E linear layers, x (n, in) -> (n, out). The first counts[0] rows of x are for expert 0, the
    next counts[1] rows for expert 1, and so on. `stacked`: an expert's matrix consists of so many,
    one after another along `outputs`. Tensor parallelism cuts each by itself."""

    def __init__(self, n_expert: int, inputs: int, outputs: int, stacked: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, outputs, inputs))
        self.stacked = stacked

    def forward(self, x, counts):
        # An expert without rows has a product, too: its gradient is zero, not None.
        parts = x.split(counts.tolist())
        return torch.cat([F.linear(rows, weight) for rows, weight in zip(parts, self.weight)])


class Experts(nn.Module):
    """x (B, T, C) -> the weighted sum (B, T, C) of what its chosen experts compute. The tokens are
    sorted by expert, so each expert multiplies all of its tokens at once. The steps are methods,
    because parallelism/ replaces `permute` and `run`, and compiles two others."""

    def __init__(self, cfg: MoEConfig):
        super().__init__()
        self.n_expert = cfg.n_expert
        # One matrix computes gate and value.
        self.up = ExpertLinear(cfg.n_expert, cfg.n_embd, 2 * cfg.hidden, stacked=2)
        self.down = ExpertLinear(cfg.n_expert, cfg.hidden, cfg.n_embd)
        self.activation = ACTIVATIONS[cfg.activation]

    def forward(self, x, weights, chosen):
        rows = x.flatten(0, 1).repeat_interleave(chosen.shape[-1], dim=0)   # (N K, C)
        flat = chosen.flatten()                                             # (N K,)
        order = flat.argsort(stable=True)           # by expert, then by token
        back = order.argsort()                      # the inverse permutation
        y = self.run(self.permute(rows, order, back), count_choices(flat, self.n_expert))
        y = self.permute(y, back, order).view(*chosen.shape, -1)            # (B, T, K, C)
        return self.weighted_sum(y, weights)

    def permute(self, rows, order, inverse):
        return rows[order]          # parallelism/experts.py needs the inverse, for backward

    def run(self, x, counts):
        """x (n, C), sorted by expert -> (n, C). counts (E,): the rows of each expert."""
        return self.mlp(x, counts)

    def mlp(self, x, counts):
        return self.down(self.activate(self.up(x, counts)), counts)

    def activate(self, h):
        gate, value = h.chunk(2, dim=-1)                                    # 2 of (n, F)
        return self.activation(gate) * value

    def weighted_sum(self, y, weights):
        return (y * weights.unsqueeze(-1)).sum(-2)                          # (B, T, C)


class Mixture(nn.Module):
    """x (B, T, C) -> (B, T, C). The `shared` expert (DeepSeekMoE), if there is one, computes every
    token, with weight 1."""

    def __init__(self, cfg: MoEConfig):
        super().__init__()
        self.router = Router(cfg)
        self.experts = Experts(cfg)
        self.shared = None
        if cfg.shared_hidden > 0:
            self.shared = llama.MLP(replace(cfg, hidden=cfg.shared_hidden))

    def forward(self, x):
        weights, chosen = self.router(x)
        y = self.experts(x, weights, chosen)
        if self.shared is not None:
            y = y + self.shared(x)
        return y


class Block(llama.Block):
    """One block, (B, T, C) -> (B, T, C)."""

    def __init__(self, cfg: MoEConfig, layer: int):
        super().__init__(cfg, layer)
        self.mlp = Mixture(cfg)

    def forward(self, x, dropout_seed=None, mask=None):
        self.mlp.router.is_text = None if mask is None else is_text(mask)
        return super().forward(x, dropout_seed, mask)


class MoE(Llama):
    """The whole model. Given targets, its value is the cross-entropy alone. Its gradient is that of
    the cross-entropy and of the losses of all routers. The caller divides the value by the number
    of targets that count. Then the gradient is that of the mean cross-entropy of these targets plus
    the mean losses of all tokens: those without a target, as in conversations, are routed, too."""
    block_type = Block

    def forward(self, x, targets=None, dropout_seed=None, positions=None):
        y = super().forward(x, targets, dropout_seed, positions)
        if targets is None or self.head is None or not torch.is_grad_enabled():
            return y
        for block in self.blocks.values():
            losses = block.mlp.router.losses
            if losses is None:      # parallelism/experts.py adds the gradient in the router
                continue
            losses = losses * (targets != IGNORE_INDEX).to(losses.dtype).mean()
            y = y + (losses - losses.detach())      # adds 0, and the gradient of the losses
        return y


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """The shape of a model. The defaults are a Mixtral of the size `nano`. `hidden` is of one
    expert."""
    n_expert: int = 8               # E
    n_active: int = 2               # K
    normalised: bool = True         # the weights of a token's experts add up to 1
    shared_hidden: int = 0          # hidden channels of the expert that computes every token
    balance_loss: float = 0.01      # the factors of the two losses
    z_loss: float = 0.0
    balance_bias: float = 0.0       # the speed of the bias

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.n_active <= self.n_expert:
            raise ValueError(f"n_active {self.n_active} is not between 1 and n_expert "
                             f"{self.n_expert}: give --n-active of 1 to {self.n_expert}")
        if self.n_active == 1 and self.n_expert > 1 and self.normalised:
            raise ValueError("n_active 1 with normalised weights: a token's expert always has the "
                             "weight 1, so the cross-entropy does not train the router. Give "
                             f"--n-active of 2 to {self.n_expert}, or a model of the family olmoe")
        if not self.gated or self.bias != "none":
            raise ValueError("an expert is a gated MLP without biases: its config has gated "
                             f"{self.gated} and bias {self.bias!r}")

    def build(self) -> MoE:
        return MoE(self)


# The losses as their programs count them; `with_own_losses` converts them to ours.
FAMILIES = {
    "mixtral": dict(rope_theta=1e6, balance_loss=0.02),
    "olmoe": dict(normalised=False, norm_all_heads=True, balance_loss=0.01, z_loss=0.001),
    "qwen3-moe": llama_sizes.FAMILIES["qwen3"] | dict(balance_loss=0.001),
}


def with_own_losses(shape: dict) -> dict:
    """The fields of a model whose factors of losses are those of its family, or of its config.json,
    with ours, which multiply sums over the layers.

    transformers multiplies router_aux_loss_coef by K times ours, of all layers' tokens in one pool.
    For one layer the losses are equal. For several, with random routers, theirs is 1.2 to 1.3 times
    ours. OLMo's program (megablocks, its branch `olmoe`) divides z_loss by the layers and by K."""
    n_layer, n_active = shape["n_layer"], shape["n_active"]
    return shape | dict(balance_loss=shape["balance_loss"] * n_active / n_layer,
                        z_loss=shape.get("z_loss", 0.0) / (n_layer * n_active))


# As in llama_sizes.py, with n_expert and n_active after `hidden`.
_TABLE = {
    "moe-nano": ("mixtral", 2, 4, 2, 192, 256, 8, 2, 128, 2e-3, dict(rope_theta=1e4)),
    "mixtral-8x7b": ("mixtral", 32, 32, 8, 4096, 14336, 8, 2, 32768, 3e-4, {}),
    "mixtral-8x22b": ("mixtral", 56, 48, 8, 6144, 16384, 8, 2, 65536, 3e-4, {}),
    "olmoe-1b-7b": ("olmoe", 16, 16, 16, 2048, 1024, 64, 8, 4096, 4e-4, {}),
    "qwen3-30b-a3b": ("qwen3-moe", 48, 32, 4, 2048, 768, 128, 8, 32768, 3e-4, dict(head_dim=128)),
    "qwen3-235b-a22b": ("qwen3-moe", 94, 64, 4, 4096, 1536, 128, 8, 32768, 3e-4,
                        dict(head_dim=128)),
}
_FIELDS = ("n_layer", "n_head", "n_kv_head", "n_embd", "hidden", "n_expert", "n_active", "seq_len")
SIZES = {name: with_own_losses(FAMILIES[family] | dict(zip(_FIELDS, shape)) | others)
         for name, (family, *shape, _, others) in _TABLE.items()}
PEAK_LR = {name: row[-2] for name, row in _TABLE.items()}
