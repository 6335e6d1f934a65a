"""Low-precision arithmetic: what is kept in which type, and the dynamic loss scaler.

                 parameters, activations     gradients, masters, Adam's moments
    fp32                fp32                              fp32 (the parameter is its own master)
    fp64                fp64                              fp64
    bf16, fp16          16 bit                            fp32

One step in 16 bits (Micikevicius et al. 2018, "Mixed Precision Training", section 3):

    1. forward and backward run on 16-bit parameters; statistics of LayerNorm and softmax, and the
       loss, are computed in fp32;
    2. the loss is multiplied by the scale, so gradients too small for fp16 (below 6e-8) survive;
    3. every microbatch's 16-bit gradient is added to an fp32 buffer, which is divided by the scale;
    4. AdamW updates the fp32 masters, and the parameters are the masters rounded once more: an
       update far smaller than the last bit of a parameter is not lost, it adds up in the master.

bf16 has the exponent of fp32, so it needs steps 1, 3 and 4 but no scale.

What a skipped step means. An overflow anywhere, on any rank, skips the update everywhere: masters,
moments and Adam's own count stay as they are. The step number, the learning rate's schedule and
the position in the data move on, and the batch is not tried again: its gradient at a lower scale
is worth no more than the next batch's, and a batch that always overflows would stop the run.
"""
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    param_dtype: torch.dtype        # of parameters and activations
    master_dtype: torch.dtype         # of gradients, masters and moments


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32),
    "fp64": Precision(torch.float64, torch.float64),
}


class LossScaler:
    """The factor on the loss: halved when gradients overflow, doubled after a long run without.

    Step for step what torch.amp.GradScaler does to its scale, in fp32 as there, plus a floor: the
    scale never falls below `min_scale`. `update` never raises, and never grows past what fp32
    holds; what a scale at its floor means is for the training loop to judge.
    """

    def __init__(self, init_scale: float = 2.0 ** 16, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000,
                 min_scale: float = 1.0):
        if not 0 <= min_scale <= init_scale or not 0 < init_scale < math.inf:
            raise ValueError(f"init_scale {init_scale} must be above 0, min_scale {min_scale} at "
                             f"least 0 (no floor) and at most init_scale")
        if not growth_factor > 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(f"growth_factor {growth_factor} must be above 1, backoff_factor "
                             f"{backoff_factor} between 0 and 1, growth_interval "
                             f"{growth_interval} at least 1")
        self.scale = _fp32(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.growth_tracker = 0         # steps without overflow since the scale last changed

    def update(self, found_inf: bool) -> None:
        """Once a step, after it: `found_inf` says whether any gradient of any rank overflowed."""
        if found_inf:
            self.scale = max(_fp32(self.scale * self.backoff_factor), self.min_scale)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = _fp32(self.scale * self.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.growth_tracker = 0

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        if set(state) != set(vars(self)):
            raise ValueError(f"a loss scaler's state has {sorted(vars(self))}, not "
                             f"{sorted(state)}")
        vars(self).update(state)


def make_scaler(dtype: str) -> LossScaler:
    """The scaler of a precision: only fp16 needs a scale, the others' is 1 and stays 1."""
    return LossScaler() if dtype == "fp16" else LossScaler(init_scale=1.0, growth_interval=2 ** 62)


def _fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def clip_factor(norm: float, clip: float, scale: float) -> float:
    """What to multiply the accumulated gradients by: 1 / scale takes the loss scale out, and a
    global norm (unscaled) above `clip` is brought down to it (Pascanu et al. 2013); clip 0: as is.
    """
    return (min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0) / scale
