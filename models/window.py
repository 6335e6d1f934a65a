"""Mistral 7B's sliding window (Jiang et al. 2023, section 2): attention reaches back only so far.

    scores, window 3:   position    0 1 2 3 4           k
                               0    x . . . .
                               1    x x . . .
                               2    x x x . .
                               3    . x x x .           itself and the two positions before it
                               4    . . x x x
                               q

The token at a position still depends on earlier ones: each layer reaches `window` - 1 further back.
A text of at most `window` positions is computed as without a window. A longer one takes a mask of
(T, T), so it saves no time here in training. In sampling a token reads `window` keys.
"""
import torch

from model import CoreAttention


class WindowedAttention(CoreAttention):
    """model.CoreAttention of q, k and v (B, H, T, D) with a window."""

    def __init__(self, window: int, p: float, *name):
        super().__init__(p, *name)
        self.window = window

    def forward(self, q, k, v, dropout_seed=None, mask=None):
        if q.shape[2] == 1:         # The last position. The cache (kv_cache.py) has all before it.
            k, v = k[:, :, -self.window:], v[:, :, -self.window:]
        else:
            mask = with_window(mask, self.window, q.shape[2], q.device)
        return super().forward(q, k, v, dropout_seed, mask)


def with_window(mask: torch.Tensor | None, window: int, T: int,
                device: torch.device) -> torch.Tensor | None:
    """The mask (..., T, T), or None, without what is further back than the window."""
    if T <= window:
        return mask
    near = torch.ones(T, T, dtype=torch.bool, device=device).tril().triu(1 - window)
    return near if mask is None else mask & near
