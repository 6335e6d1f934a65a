"""Numbers: the precisions, the loss scaler, gradient clipping, AdamW on masters.

                 parameters, activations     gradients, masters, Adam's moments
    fp32                fp32                              fp32 (the parameter is its own master)
    fp64                fp64                              fp64
    bf16, fp16          16 bit                            fp32

One step in 16 bits (Micikevicius et al. 2018, "Mixed Precision Training", section 3):

    1. Forward and backward run on 16-bit parameters. The statistics of LayerNorm and softmax, the
       loss, and a gradient's sum over the tokens are computed in fp32, and then rounded.
    2. The loss is multiplied by the loss scale, so that gradients too small for fp16 (below 6e-8)
       survive.
    3. The 16-bit gradient of every microbatch is added to an fp32 buffer.
    4. One factor takes the loss scale out of the buffer and clips it.
    5. AdamW updates the fp32 masters, and the parameters are the rounded masters. An update far
       smaller than a parameter's last bit adds up in the master.

bf16 has the exponent of fp32, so it needs no scale. train.py runs steps 1 to 3 in
`Run.compute_gradients`, 4 and 5 in `Run.update`. parallel.py has the buffers.

An overflow on any rank skips the update on all ranks. Masters, moments and Adam's own step count
stay as they are. The step number, the schedule and the place in the data advance. The batch is not
tried again: one that always overflows would stop the run.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw     # the function: the class imports a compiler, for seconds


class Precision(NamedTuple):        # a row of the table
    parameters: torch.dtype         # and activations
    masters: torch.dtype            # and gradients, and moments


PRECISIONS = {                      # by --dtype
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32),
    "fp64": Precision(torch.float64, torch.float64),
}


MIN_SCALE = 1.0                 # the floor of the loss scale
NOT_FINITE = "not finite"       # why a step is skipped: the loss or a gradient is inf or NaN


@dataclass
class LossScaler:
    """The factor on the loss: halved when gradients overflow, doubled after a long run without.

    Its scale follows that of torch.amp.GradScaler step for step, also in fp32. In addition, it
    never falls below `min_scale` and never grows past what fp32 holds. `update` never raises.
    runtime/divergence.py judges what a scale at its floor means."""

    scale: float = 2.0 ** 16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = MIN_SCALE
    growth_tracker: int = 0         # steps without overflow since the scale last changed

    def update(self, found_inf: bool) -> None:
        """Call once, after each step. `found_inf`: a gradient of some rank overflowed."""
        if found_inf:
            self.scale = max(round_to_fp32(self.scale * self.backoff_factor), self.min_scale)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = round_to_fp32(self.scale * self.growth_factor)
            if math.isfinite(grown):            # otherwise fp32 cannot hold it, and the scale stays
                self.scale = grown
            self.growth_tracker = 0

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def round_to_fp32(x: float) -> float:
    """The nearest number of fp32, which is inf beyond 3.4e38."""
    return torch.tensor(x, dtype=torch.float32).item()


def make_scaler(dtype: str) -> LossScaler:
    """The scaler of a precision. Only fp16 needs one. In the others the scale stays 1."""
    if dtype == "fp16":
        return LossScaler()
    return LossScaler(scale=1.0, growth_interval=2 ** 62)      # which no run reaches


def clip_factor(norm: float, clip: float, loss_scale: float) -> float:
    """The factor on the accumulated gradients. It takes the loss scale out, and brings a norm above
    `clip` down to it (Pascanu et al. 2013), unless `clip` is 0. `norm` is without the scale."""
    factor = 1.0
    if clip > 0:
        factor = min(1.0, clip / (norm + 1e-6))
    return factor / loss_scale


def adamw_update(buckets: list, grads: list[torch.Tensor], updates: int, lr: float, beta1: float,
                 beta2: float, weight_decay: float) -> None:
    """torch's fused AdamW of this rank's shards of buckets (parallel.Bucket), whose gradients are
    `grads`. A router's bias (models/moe.py) takes a step of a fixed size instead."""
    slices = {True: ([], [], [], []), False: ([], [], [], [])}      # with weight decay, and without
    for bucket, grad in zip(buckets, grads):
        shard = bucket.shard
        for spec, part, _ in bucket.shard_ranges:
            if spec.sign_step > 0:
                shard["master"][part] -= spec.sign_step * grad[part].sign()
                continue
            # The slices end at a multiple of 32, in the padding. So each number gets the same
            # instructions, wherever a shard ends.
            numbers = slice(part.start, math.ceil(part.stop / 32) * 32)
            whole = shard["master"], grad, shard["exp_avg"], shard["exp_avg_sq"]
            for tensors, tensor in zip(slices[spec.decays], whole):
                tensors.append(tensor[numbers])
    for decays, (masters, of_grads, *moments) in slices.items():
        if masters:
            counts = torch.full((len(masters),), updates - 1.0, device=masters[0].device).unbind()
            # It adds 1 to each count. The empty list is amsgrad's.
            adamw(masters, of_grads, *moments, [], list(counts), fused=True, amsgrad=False,
                  maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=1e-8,
                  weight_decay=weight_decay if decays else 0.0)
