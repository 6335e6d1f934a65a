"""The cache of keys and values: a text that grows by a token costs one position, not all of them.

Keys and values of earlier tokens do not change, because attention is causal. `CachedModel` keeps
them and computes the new tokens alone:

    cached = CachedModel(model, rows=16, positions=128)
    logits = cached(prompt)         # (1, T) -> (1, V): the prompt of all 16 rows
    logits = cached(tokens)         # (16, 1) -> (16, V): a token of each row, and so on

model.py knows nothing of it. A cached model is a copy of the model that shares its parameters. In
the copy CachedAttention stands for each core_attention: it attends to the keys and values of all
tokens so far. Positions count on from the first new token, and the head has the last one alone.
"""
import copy

import torch
import torch.nn as nn

from model import GPT


class CachedModel:
    """A model with a cache for `rows` texts of at most so many `positions`."""

    def __init__(self, plain: GPT, rows: int, positions: int):
        self.past = 0           # the tokens before the new ones, whose keys and values it has
        self.model = copy.deepcopy(plain, {id(p): p for p in plain.parameters()})   # not copied
        cfg, head = plain.cfg, plain.head
        shape = (2, rows, cfg.n_kv_head, positions, cfg.head_dim)
        for block in self.model.blocks.values():
            attention = block.attn
            attention.core_attention = CachedAttention(
                attention.core_attention, head.weight.new_empty(shape), self)
            if hasattr(attention, "rotary"):
                attention.rotary.positions = self.positions
        if hasattr(self.model.embed, "position"):
            self.model.embed.position.register_forward_pre_hook(
                lambda module, inputs: self.past + inputs[0])
        self.model.head.register_forward_pre_hook(lambda module, inputs: inputs[0][:, -1:])

    def positions(self, T, device):
        """The positions of T new tokens."""
        return torch.arange(self.past, self.past + T, device=device)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next tokens -> the logits (B, V) after them. The first call takes a whole prompt,
        which all rows may share as a batch of 1. Each later call takes one token of every row."""
        logits = self.model(tokens)[:, 0]
        self.past += tokens.shape[1]
        return logits

    def clear(self) -> None:
        """Forget all tokens. The next call takes a whole prompt."""
        self.past = 0


class CachedAttention(nn.Module):
    """Stores k and v (B, K, T, D) of the new tokens in the cache (2, rows, K, positions, D)."""

    def __init__(self, plain: nn.Module, cache: torch.Tensor, of: CachedModel):
        super().__init__()
        self.plain, self.cache, self.of = plain, cache, of

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        start = self.of.past
        end = start + k.shape[2]
        assert start == 0 or k.shape[2] == 1, "first a whole prompt, then one token at a time"
        self.cache[0, :, :, start:end] = k      # A batch of 1 fills every row.
        self.cache[1, :, :, start:end] = v
        if start > 0:
            k, v = self.cache[:, :, :, :end]                    # 2 of (rows, K, end, D)
        return self.plain(q, k, v, dropout_seed, mask)
