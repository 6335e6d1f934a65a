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
from dataclasses import dataclass, field, fields

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
        if not 0 <= min_scale <= init_scale or not 0 < init_scale < math.inf:
            raise ValueError(f"init_scale {init_scale} must be above 0, min_scale {min_scale} at "
                             f"least 0 (no floor) and at most init_scale")
        if not growth_factor > 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(f"growth_factor {growth_factor} must be above 1, backoff_factor "
                             f"{backoff_factor} between 0 and 1, growth_interval "
                             f"{growth_interval} at least 1")
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
        numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in state.values())
        if set(state) != set(vars(self)) or not numbers:
            raise ValueError(f"a loss scaler's state has numbers {sorted(vars(self))}, not {state}")
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
# The monitor of divergence
#
# The run has diverged after any of these: several losses in a row far above the lowest median so
# far; a loss that is not finite; an fp16 overflow at the lowest loss scale; MAX_SKIPPED skipped
# steps in a row; a median that has risen by two deviations (by one, just after a rollback). The
# teams of OPT-175B (Zhang et al. 2022, section 2.5, and their logbook) and PaLM (Chowdhery et al.
# 2022, section 5.1) then went back to a checkpoint by hand. Here it happens by itself, up to
# --max-rollbacks times:
#
#     loss                                 x x x                  x high
#        \_____                         x                         o healthy checkpoint: no high loss
#              \___o________o___________/                           in the HEALTHY_STEPS after it
#                  |           |////////////|
#          go back there,     skip these batches        at learning rate x LR_CUT
#
# The steps are then repeated on the batches behind the skipped ones. If the first of these batches
# have a high loss again, we attribute the divergence to the data: the next rollback skips twice as
# many batches and undoes the last reduction of the learning rate. If the run returns to the same
# checkpoint, or to an older one, for another reason, the learning rate was not reduced enough, and
# the factor is applied three times.
# ---------------------------------------------------------------------------------------------

WINDOW = 64             # losses that make the median
MIN_WINDOW = 16         # the fewest losses that make one
SPIKE_MARGIN = 6.0      # deviations between the lowest median and a loss that is high
SPIKE_STEPS = 3         # high losses in a row that are a divergence
MAX_SKIPPED = 20        # skipped steps in a row that are a divergence
HEALTHY_STEPS = 16      # steps without a high loss that prove a checkpoint healthy
LEAD_IN = 8             # batches before the first high loss that are skipped too
LR_CUT = 0.6


@dataclass
class StepStats:
    """The statistics of a step, equal on every rank after the step's one all-reduce."""
    loss: float                 # mean over the tokens of the global batch, in nats
    activation_norm: float      # mean over the tokens of the norm of the last activations
    grad_norm: float            # of the whole model, unscaled, before clipping
    found_inf: bool             # the loss or a gradient of some rank is not finite
    stop_requested: bool        # some rank received a signal
    loss_scale: float           # that the step used
    scale_at_floor: bool        # fp16: this scale cannot fall any further


@dataclass
class DivergenceMonitor:
    """The losses and rollbacks of a run so far, and the judgement of each step. A function of
    numbers that are equal on every rank, so all ranks decide alike. Every checkpoint holds it."""
    losses: list = field(default_factory=list)      # the last WINDOW losses that were not high
    lowest: float = math.inf    # lowest median of such a window so far
    high: int = 0               # steps in a row whose loss was high
    rising: int = 0             # steps that led to a risen median, if the last step showed one
    skipped_steps: int = 0      # steps in a row without an update
    lr_factor: float = 1.0      # on the learning rate of the schedule
    last_cut: float = 1.0       # the factor that the last rollback applied
    rollbacks: int = 0
    last_rollback_step: int = -1                    # the step to which the last rollback returned
    excluded: list = field(default_factory=list)    # [first, end) of samples to pass over
    applied_skip: str | None = None                 # --skip-steps, once its samples are excluded
    checkpoints: list = field(default_factory=list)     # [step, file]: the first, then those kept

    @classmethod
    def from_state(cls, state: dict) -> "DivergenceMonitor":
        """The monitor that a checkpoint holds as a dict; raises ValueError if it is not one."""
        types = {f.name: f.type for f in fields(cls)}
        wrong = []
        for name in {**types, **state}:
            if name not in types or not isinstance(state.get(name, ...), types[name]):
                wrong.append(name)
        if wrong:
            raise ValueError(f"the state of the monitor of divergence has no valid {wrong}")
        return cls(**state)

    def deviation(self) -> float:
        """Standard deviation of the losses. It is estimated from neighbours, so that a falling loss
        does not count as noise: the median of their distances times 1.4826 / sqrt(2), which is
        sigma if the noise is normal; at least 1% of the median loss."""
        distance = statistics.median(abs(a - b) for a, b in zip(self.losses, self.losses[1:]))
        return max(1.4826 / math.sqrt(2) * distance, statistics.median(self.losses) / 100)

    def limit(self) -> float:
        """The highest loss that is not a spike. We compare with the lowest median, because a moving
        one would track a slow divergence."""
        if len(self.losses) < MIN_WINDOW:
            return math.inf
        return self.lowest + SPIKE_MARGIN * self.deviation()

    def observe(self, step: int, stats: StepStats) -> str | None:
        """Judge step `step`. Returns the reason of a divergence, once for each divergence, or None.
        An fp16 overflow above the lowest scale is none."""
        limit = self.limit()
        self.rising = 0
        self.skipped_steps = self.skipped_steps + 1 if stats.found_inf else 0
        reason = self._not_finite(stats)
        if reason is not None:
            first = self.high < SPIKE_STEPS
            self.high = max(self.high + 1, SPIKE_STEPS)
            return reason if first else None
        if stats.loss > limit:
            self.high += 1
            if self.high != SPIKE_STEPS:
                return None
            return f"the loss was above {limit:.4f} for {self.high} steps, now {stats.loss:.4f}"
        self.high = 0
        self.losses = [*self.losses, stats.loss][-WINDOW:]
        return self._rising_median(step)

    def _not_finite(self, stats: StepStats) -> str | None:
        """Why this step, or this series of skipped steps, is a divergence by itself."""
        if not math.isfinite(stats.loss):
            return "the loss is not finite"
        if stats.found_inf and stats.scale_at_floor:
            return "a gradient is not finite, and the loss scale is at its floor"
        if self.skipped_steps >= MAX_SKIPPED:
            return f"{MAX_SKIPPED} steps in a row were skipped"
        return None

    def _rising_median(self, step: int) -> str | None:
        """A slow divergence: the median has risen, without high losses. Noise around a constant
        loss stays below two deviations for 20,000 steps and more. Just after a rollback one is
        enough: the run has not recovered."""
        if len(self.losses) < MIN_WINDOW:
            return None
        median = statistics.median(self.losses)
        recovering = self.rollbacks > 0 and step - self.last_rollback_step <= 2 * WINDOW
        margin = 1 if recovering else 2
        if len(self.losses) < WINDOW or median - self.lowest <= margin * self.deviation():
            self.lowest = min(self.lowest, median)
            return None
        reason = f"the loss has risen from {self.lowest:.4f} to {median:.4f}"
        self.lowest = median
        since = step - self.last_rollback_step - HEALTHY_STEPS
        self.rising = max(SPIKE_STEPS, min(WINDOW // 2, since))
        return reason

    def forget_losses(self) -> None:
        """With other data or another schedule a higher loss may be healthy."""
        self.losses = []
        self.lowest = math.inf

    def bad_steps(self) -> int:
        """Number of the last steps that led to the divergence."""
        return max(self.high, self.rising, self.skipped_steps)

    def candidates(self, onset: int, data: bool) -> list:
        """[step, file] to return to from a divergence that began at step `onset`, best first: the
        checkpoints proven healthy, the newest first; then the oldest of the later ones, but not the
        one that was tried last, unless the `data` are to blame; then the start of the run."""
        before = [c for c in self.checkpoints if c[0] < onset] or self.checkpoints[:1]
        start, *kept = before
        proven = [c for c in kept if c[0] <= onset - HEALTHY_STEPS]
        others = [c for c in kept if c not in proven and (data or c[0] != self.last_rollback_step)]
        return [*reversed(proven), *others[:1], start]

    def to_exclude(self, step: int, lead_in: int, onset: int, end: int) -> tuple[list[int], bool]:
        """The samples [first, end) to pass over after a divergence in step `step`, which has read
        up to sample `end`; its first bad step began at sample `onset`, and LEAD_IN batches earlier
        is sample `lead_in`. And whether the data are to blame: the run diverged right behind
        excluded samples, and the steps from the checkpoint up to there went well."""
        replayed = step - self.bad_steps() - self.last_rollback_step
        if (self.rollbacks > 0 and self.excluded[-1][1] == onset
                and replayed >= HEALTHY_STEPS - LEAD_IN - 1):
            first, last = self.excluded[-1]
            return [onset, onset + 2 * (last - first)], True
        return [lead_in, end], False

    def rolled_back(self, step: int, samples: list, data: bool, then: "DivergenceMonitor") -> None:
        """Record a rollback to `step` that excludes these samples. The losses are those of `then`,
        the checkpoint's monitor; what the run has learned since stays. `data`: they are to blame.
        """
        self.losses = then.losses
        self.lowest = then.lowest
        self.high = then.high
        self.skipped_steps = then.skipped_steps
        if data:
            self.lr_factor /= self.last_cut         # that reduction was in vain
            self.last_cut = 1.0
        else:
            self.last_cut = LR_CUT if step > self.last_rollback_step else LR_CUT ** 3
            self.lr_factor *= self.last_cut
        self.rollbacks += 1
        self.last_rollback_step = step
        self.excluded.append(samples)

    def add_checkpoint(self, step: int, name: str, keep: int) -> None:
        """Note a checkpoint that is about to be written; `keep` stay of those after the first."""
        if not self.checkpoints:
            self.checkpoints = [[step, name]]
        start, *kept = self.checkpoints
        kept = [c for c in kept if c[0] < step] + [[step, name]]
        self.checkpoints = [start, *kept[-keep:]]
