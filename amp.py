"""Mixed precision, loss scaling, and recovery from divergence: update, skip, or roll back.

                 parameters, activations     gradients, masters, Adam's moments
    fp32                fp32                              fp32 (the parameter is its own master)
    fp64                fp64                              fp64
    bf16, fp16          16 bit                            fp32

One step in 16 bits (Micikevicius et al. 2018, "Mixed Precision Training", section 3):

    1. Forward and backward run on 16-bit parameters. The statistics of LayerNorm and softmax, and
       the loss, are computed in fp32.
    2. The loss is multiplied by the loss scale, so that gradients too small for fp16 (below 6e-8)
       survive.
    3. The 16-bit gradient of every microbatch is added to an fp32 buffer, which is then divided by
       the scale.
    4. AdamW updates the fp32 masters, and the parameters are the rounded masters. An update that is
       far smaller than the last bit of a parameter is not lost: it accumulates in the master.

bf16 has the exponent of fp32, so it needs steps 1, 3 and 4 but no scale.

An overflow anywhere, on any rank, skips the update everywhere: masters, moments and Adam's own step
count stay as they are. The step number, the learning-rate schedule and the position in the data
move on. The batch is not tried again: a batch that always overflows would stop the run.
"""
import math
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


# --dtype: (type of parameters and activations, type of gradients, masters and moments)
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
    "fp64": (torch.float64, torch.float64),
}


# ---------------------------------------------------------------------------------------------
# The loss scaler
#
# Dynamic loss scaling in its plainest form is one function, which a test runs beside
# torch.amp.GradScaler. What training does departs from it:
#
#     1  the scale also grows, after 2,000 steps in a row without overflow     LossScaler.update
#     2  it has a floor; a scale that reaches it means that the run diverged   min_scale
#     3  all ranks agree on found_inf: one of them overflows, all skip         train.reduce_stats
#     4  gradients are not divided one by one: clipping's factor contains it   clip_factor
#     5  gradients and masters are fp32, beside 16-bit parameters              FlatParameters
# ---------------------------------------------------------------------------------------------


def plain_scaled_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer, scale: float) -> float:
    """Take one step of `optimizer` on the gradients of an fp16 `loss`; return the next scale."""
    parameters = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    (loss * scale).backward()                       # small gradients no longer round to zero
    if not all(p.grad.isfinite().all() for p in parameters):
        return scale / 2                            # overflow: skip this step
    for p in parameters:
        p.grad /= scale
    optimizer.step()
    return scale


class LossScaler:
    """The factor on the loss: halved when gradients overflow, doubled after a long run without.

    Step for step it does what torch.amp.GradScaler does to its scale, in fp32 as there, plus a
    floor: the scale never falls below `min_scale`. `update` never raises, and the scale never grows
    past what fp32 holds; the monitor of divergence judges what a scale at its floor means.
    """

    def __init__(self, init_scale: float = 2.0 ** 16, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000,
                 min_scale: float = 1.0):
        self.scale = _round_to_fp32(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.growth_tracker = 0         # steps without overflow since the scale last changed

    def update(self, found_inf: bool) -> None:
        """Call once, after each step. `found_inf`: a gradient of some rank overflowed."""
        if found_inf:
            self.scale = max(_round_to_fp32(self.scale * self.backoff_factor), self.min_scale)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = _round_to_fp32(self.scale * self.growth_factor)
            if math.isfinite(grown):
                self.scale = grown
            self.growth_tracker = 0

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def make_scaler(dtype: str) -> LossScaler:
    """The scaler of a precision. Only fp16 needs a scale; for the others it is 1 and stays 1."""
    if dtype == "fp16":
        return LossScaler()
    return LossScaler(init_scale=1.0, growth_interval=2 ** 62)


def _round_to_fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def clip_factor(norm: float, clip: float, scale: float) -> float:
    """The factor on the accumulated gradients. 1 / scale takes the loss scale out; a global norm
    (unscaled) above `clip` is brought down to it (Pascanu et al. 2013). clip 0: no clipping."""
    factor = 1.0
    if clip > 0:
        factor = min(1.0, clip / (norm + 1e-6))
    return factor / scale


# ---------------------------------------------------------------------------------------------
# Recovery from divergence
#
# A step is bad if its loss is high (far above the lowest median so far) or not finite, or if its
# gradient is not finite and no loss scale can cure that. The run has diverged after BAD_STEPS bad
# steps in a row, or when the median has risen by two deviations. The teams of OPT-175B (Zhang et
# al. 2022, section 2.5, and their logbook) and PaLM (Chowdhery et al. 2022, section 5.1) then went
# back to a checkpoint by hand. Here it happens by itself, up to --max-rollbacks times:
#
#     loss                                 x x x                   x bad step
#        \_____                         x                          o healthy checkpoint
#              \___o________o___________/
#                           |  |////////////|
#               go back there, skip these batches, from LEAD_IN before the first bad step on
#
# A checkpoint is healthy, as OPT's team judged it, if its last step was neither bad nor skipped,
# the median of the last losses was known and within one deviation of the lowest, the norm of the
# last activations was at most twice its own median and, in fp16, the loss scale was above its
# floor. The checkpoint with which a run from a file begins always counts as healthy.
#
# The first loss after the skipped batches decides. If it is high again, we attribute the divergence
# to the data: twice as many batches are skipped, and the last reduction of the learning rate is
# undone. Otherwise the learning rate is multiplied by the first of LR_CUTS, and as long as the run
# does not get beyond a checkpoint that it has returned to, by the next. A third return to the same
# checkpoint takes the next older healthy one. Only a run that never had a healthy checkpoint begins
# again at step 0.
# ---------------------------------------------------------------------------------------------

WINDOW = 64             # losses that make the median
MIN_WINDOW = 16         # the fewest losses that make one
SPIKE_MARGIN = 6.0      # deviations between the lowest median and a loss that is high
BAD_STEPS = 3           # bad steps in a row that are a divergence
MAX_SKIPPED = 20        # the most steps in a row without an update, with --rollback off
LEAD_IN = 8             # batches before the first bad step that are skipped too
LR_CUTS = (0.6, 0.1, 0.05)      # the last one is repeated
STATISTICS = ("losses", "norms", "starts", "lowest", "bad", "skipped")


@dataclass
class StepStats:
    """The statistics of a step, equal on every rank after the step's one all-reduce."""
    loss: float                 # mean over the tokens of the global batch, in nats
    activation_norm: float      # mean over the tokens of the norm of the last activations
    grad_norm: float            # of the whole model, unscaled, before clipping
    found_inf: bool             # the loss or a gradient of some rank is not finite
    stop_requested: bool        # some rank received a signal
    loss_scale: float           # that the step used
    scale_can_fall: bool        # fp16: this scale is above its floor


class Divergence(NamedTuple):
    """What `DivergenceMonitor.observe` has found."""
    reason: str
    steps: int                  # number of the last steps that led to it


@dataclass
class DivergenceMonitor:
    """The losses and rollbacks of a run so far, and the judgement of each step. A function of
    numbers that are equal on every rank, so all ranks decide alike. Every checkpoint holds it."""
    # Statistics: a rollback takes those of its checkpoint.
    losses: list = field(default_factory=list)      # the last WINDOW losses of steps not bad
    norms: list = field(default_factory=list)       # of the last activations in the same steps
    starts: list = field(default_factory=list)      # first sequences of the last batches
    lowest: float = math.inf        # lowest median of the losses so far
    bad: int = 0                    # bad steps in a row
    skipped: int = 0                # steps in a row without an update
    # History: it outlasts a rollback.
    lr_factor: float = 1.0          # on the learning rate of the schedule
    last_cut: float = 1.0           # the factor that the last rollback applied
    rollbacks: int = 0
    returned_to: list = field(default_factory=list)     # steps of rollbacks that cut
    excluded: list = field(default_factory=list)        # [first, end) of sequences to skip
    applied_skip: str | None = None                     # --skip-steps, once they are excluded
    checkpoints: list = field(default_factory=list)     # [step, file, healthy] of those kept

    def deviation(self) -> float:
        """Standard deviation of the losses. It is estimated from neighbours, so that a falling loss
        does not count as noise: the median of their distances times 1.4826 / sqrt(2), which is
        sigma if the noise is normal; at least 1% of the median loss."""
        distance = statistics.median(abs(a - b) for a, b in zip(self.losses, self.losses[1:]))
        return max(1.4826 / math.sqrt(2) * distance, statistics.median(self.losses) / 100)

    def limit(self) -> float:
        """The highest loss that is not high. We compare with the lowest median, because a moving
        one would track a slow divergence."""
        if len(self.losses) < MIN_WINDOW:
            return math.inf
        return self.lowest + SPIKE_MARGIN * self.deviation()

    def observe(self, first: int, stats: StepStats) -> Divergence | None:
        """Judge a step, whose batch begins with sequence `first`. Returns a divergence once."""
        limit = self.limit()
        self.starts = [*self.starts, first][-(WINDOW + LEAD_IN):]
        self.skipped = self.skipped + 1 if stats.found_inf else 0
        problem = None
        if not math.isfinite(stats.loss):
            problem = "the loss is not finite"
        elif stats.found_inf and not stats.scale_can_fall:
            problem = "a gradient is not finite"
        elif stats.loss > limit:
            problem = f"the loss is {stats.loss:.4f}, above {limit:.4f}"
        if problem is None:
            self.bad = 0
            self.losses = [*self.losses, stats.loss][-WINDOW:]
            self.norms = [*self.norms, stats.activation_norm][-WINDOW:]
            return self._risen_median()
        self.bad += 1
        if self.bad == BAD_STEPS:
            return Divergence(f"{BAD_STEPS} bad steps in a row: {problem}", BAD_STEPS)
        return None

    def _risen_median(self) -> Divergence | None:
        """A slow divergence: the median has risen, without high losses. Noise around a constant
        loss stays below two deviations for 20,000 steps and more."""
        if len(self.losses) < MIN_WINDOW:
            return None
        median = statistics.median(self.losses)
        if median <= self.lowest:
            self.lowest = median
        elif len(self.losses) == WINDOW and median - self.lowest > 2 * self.deviation():
            reason = f"the loss has risen from {self.lowest:.4f} to {median:.4f}"
            steps = 1
            while steps < WINDOW and self.losses[-1 - steps] > self.lowest:
                steps += 1
            self.lowest = median
            return Divergence(reason, steps)
        return None

    def forget_losses(self) -> None:
        """With other data or other flags a higher loss may be healthy."""
        self.losses = []
        self.norms = []
        self.lowest = math.inf

    def add_checkpoint(self, step: int, file: str, keep: int, scheduled: bool, at_floor: bool,
                       is_start: bool) -> None:
        """Judge a checkpoint that is about to be written. The last `keep` stay, and the newest
        healthy one. One that is not `scheduled`, because a signal stopped the run, is no place to
        return to: a run without the stop does not have it."""
        healthy = False
        if len(self.losses) >= MIN_WINDOW:
            rise = statistics.median(self.losses) - self.lowest
            healthy = (scheduled and self.bad == 0 and self.skipped == 0 and not at_floor
                       and rise <= self.deviation()
                       and self.norms[-1] <= 2 * statistics.median(self.norms))
        listed = [c for c in self.checkpoints if c[0] < step] + [[step, file, healthy or is_start]]
        newest_healthy = [c for c in listed if c[2]][-1:]
        self.checkpoints = [c for c in listed if c in listed[-keep:] or c in newest_healthy]

    def to_exclude(self, steps: int, end: int) -> tuple[list[int], bool]:
        """The sequences [first, end) to skip after a divergence to which the last `steps` led and
        whose last batch ends at `end`; and whether the data are to blame: the first bad batch came
        directly after skipped ones."""
        first_bad = self.starts[-steps:][0]
        if self.rollbacks > 0 and self.excluded[-1][1] == first_bad:
            first, last = self.excluded[-1]
            return [first_bad, first_bad + 2 * (last - first)], True
        return [self.starts[-steps - LEAD_IN:][0], end], False

    def candidates(self, step: int) -> list[str]:
        """The files to return to if the batches from step `step` on are skipped, best first: the
        healthy ones from before, the newest first, then those to which the run has returned twice.
        The later ones, the oldest first, are the last resort. Empty without a healthy one."""
        healthy = [c for c in self.checkpoints if c[2]]
        before = [c for c in healthy if c[0] < step]
        later = [c for c in healthy if c[0] >= step]
        tried = [c for c in before if self.returned_to.count(c[0]) >= 2]
        fresh = [c for c in before if c not in tried]
        return [file for _, file, _ in [*reversed(tried + fresh), *later]]

    def rolled_back(self, step: int, excluded: list, data_to_blame: bool,
                    restored: "DivergenceMonitor") -> None:
        """Record a rollback to `step` that skips these sequences. The statistics are those of
        `restored`, the checkpoint's monitor."""
        for name in STATISTICS:
            setattr(self, name, getattr(restored, name))
        if data_to_blame:
            if self.last_cut < 1:                   # that reduction was in vain
                self.lr_factor /= self.last_cut
                self.returned_to.pop()
            self.last_cut = 1.0
        else:
            returns = len([earlier for earlier in self.returned_to if earlier >= step])
            self.last_cut = LR_CUTS[min(returns, len(LR_CUTS) - 1)]
            self.lr_factor *= self.last_cut
            self.returned_to.append(step)
        self.rollbacks += 1
        self.excluded.append(excluded)
        self.checkpoints = [c for c in self.checkpoints if c[0] <= step]
