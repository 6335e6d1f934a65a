"""What the numbers of a step permit: update, skip, or roll back.

Mixed precision (which type each tensor has), the loss scaler, and the monitor of divergence.

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

An overflow anywhere, on any rank, skips the update everywhere: masters, moments and Adam's own
count stay as they are. The step number, the learning rate's schedule and the position in the data
move on, and the batch is not tried again: its gradient at a lower scale is worth no more than the
next batch's, and a batch that always overflows would stop the run.
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
        numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in state.values())
        if set(state) != set(vars(self)) or not numbers:
            raise ValueError(f"a loss scaler's state has numbers {sorted(vars(self))}, not {state}")
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


# ---------------------------------------------------------------------------------------------
# The monitor of divergence
#
# A loss far above its lowest median so far for several steps, one that is not finite, an fp16
# overflow at the minimum scale, MAX_SKIPPED skipped steps in a row, or a median that has risen by
# two deviations (one just after a rollback): the run has diverged. What the teams of OPT-175B
# (Zhang et al. 2022, section 2.5, and their logbook) and PaLM (Chowdhery et al. 2022, section 5.1)
# then did by hand happens by itself, up to --max-rollbacks times:
#
#     loss                                 x x x                  x high
#        \_____                         x                         o healthy checkpoint: no high loss
#              \___o________o___________/                           in the HEALTHY_STEPS after it
#                  |           |////////////|
#          go back there,     skip these batches        at learning rate x LR_CUT
#
# The steps are done again, on the batches behind the skipped ones. If the first of these has a high
# loss at once, although the steps before it went well again, the data is to blame: the rollback
# skips twice as many, and takes the last cut of the learning rate back. If the run comes back to
# the same checkpoint, or to an older one, for another reason, the learning rate was not cut enough:
# then it is cut three times.
# ---------------------------------------------------------------------------------------------

WINDOW, MIN_WINDOW = 64, 16     # losses that make the median, and the fewest that do
MAX_SKIPPED = 20                # steps in a row without an update that make a divergence
HEALTHY_STEPS = 16              # steps without a high loss that prove a checkpoint healthy
LEAD_IN = 8                     # batches before the first high loss that are skipped
LR_CUT = 0.6


@dataclass
class StepStats:
    """What every rank knows of a step after its one all-reduce."""
    loss: float                 # mean over the tokens of the global batch, in nats
    activation_norm: float      # mean over them of the norm of the last activations
    grad_norm: float            # of the whole model, unscaled, before clipping
    found_inf: bool             # on some rank the loss or a gradient is not finite
    stop_requested: bool        # some rank got a signal


@dataclass
class DivergenceMonitor:
    """What a run remembers of its losses and rollbacks, and its verdict on each step. A function of
    numbers that all ranks agree on, so they decide alike; every checkpoint holds it."""
    losses: list = field(default_factory=list)      # the last that were not high
    lowest: float = math.inf    # median of a window of them so far
    high: int = 0               # steps in a row whose loss was
    skipped_steps: int = 0      # steps in a row without an update
    lr_factor: float = 1.0      # on the schedule's learning rate
    last_cut: float = 1.0       # what the last rollback multiplied it by
    rollbacks: int = 0
    last_rollback_step: int = -1                    # where the last of them went back to
    excluded: list = field(default_factory=list)    # [first, end) of the samples to pass over
    applied_skip: str | None = None                 # --skip-steps, once it is among them
    checkpoints: list = field(default_factory=list)     # [step, file]: its start, then the kept

    @classmethod
    def from_state(cls, state: dict) -> "DivergenceMonitor":
        """The monitor that a checkpoint holds as a dict; raises ValueError if it is none."""
        types = {f.name: f.type for f in fields(cls)}
        wrong = [name for name in {**types, **state}
                 if name not in types or not isinstance(state.get(name, ...), types[name])]
        if wrong:
            raise ValueError(f"the state of the monitor of divergence has no valid {wrong}")
        return cls(**state)

    def deviation(self) -> float:
        """Of the losses from their median. It is measured between neighbours, so that a falling
        loss does not count as noise: their median distance times 1.4826 / sqrt 2, which is sigma if
        the noise is normal; or 1% of the median if that is more."""
        distance = statistics.median(abs(a - b) for a, b in zip(self.losses, self.losses[1:]))
        return max(1.4826 / math.sqrt(2) * distance, statistics.median(self.losses) / 100)

    def limit(self, margin: float) -> float:
        """The highest loss that is no spike. (A median that may rise again would follow a slow
        divergence.)"""
        known = len(self.losses) >= MIN_WINDOW
        return self.lowest + margin * self.deviation() if known else math.inf

    def observe(self, step: int, stats: StepStats, at_floor: bool,
                config) -> tuple[str, str | None]:
        """Judge step `step`, whose loss scale was `at_floor` or not; `config` has --spike-margin,
        --spike-steps, --rollback and --dtype. Returns a verdict, "update" or "rollback", and the
        reason of a divergence. An fp16 overflow above the minimum scale is none."""
        loss, limit, slow = stats.loss, self.limit(config.spike_margin), False
        self.skipped_steps = self.skipped_steps + 1 if stats.found_inf else 0
        reason = ("the loss is not finite" if not math.isfinite(loss) else
                  "a gradient is not finite, and the loss scale is at its floor"
                  if stats.found_inf and at_floor and config.dtype == "fp16" else
                  f"{MAX_SKIPPED} steps in a row were skipped"
                  if self.skipped_steps >= MAX_SKIPPED else None)
        if reason is not None:
            self.high = max(self.high + 1, config.spike_steps)
        elif loss > limit:
            self.high += 1
            reason = f"the loss was above {limit:.4f} for {self.high} steps, now {loss:.4f}"
        else:
            self.high = 0
            self.losses = [*self.losses, loss][-WINDOW:]
            median = statistics.median(self.losses)
            # Noise around a constant loss stays below two deviations for 20,000 steps and more;
            # just after a rollback one says enough: the run has not recovered.
            recovering = self.rollbacks > 0 and step - self.last_rollback_step <= 2 * WINDOW
            slow = len(self.losses) == WINDOW and (
                median - self.lowest > (1 if recovering else 2) * self.deviation())
            if slow:
                reason = f"the loss has risen from {self.lowest:.4f} to {median:.4f}"
            if slow and config.rollback == "on":
                since = step - self.last_rollback_step - HEALTHY_STEPS
                self.high = max(config.spike_steps, min(WINDOW // 2, since))
            if slow or len(self.losses) >= MIN_WINDOW:
                self.lowest = median if slow else min(self.lowest, median)
        if config.rollback == "on":
            return ("rollback", reason) if self.high >= config.spike_steps else ("update", None)
        return "update", reason if slow or self.high == config.spike_steps else None

    def forget_losses(self) -> None:
        """With other data or another schedule a higher loss may be healthy."""
        self.losses, self.lowest = [], math.inf

    def bad_steps(self) -> int:
        """How many of the last steps led to the divergence."""
        return max(self.high, self.skipped_steps)

    def candidates(self, onset: int, data: bool) -> list:
        """[step, file] to go back to from a divergence that began at step `onset`, best first:
        those proven healthy, the newest first; if there are none, or none whole, the oldest of the
        later ones, but not the same again unless the `data` is to blame; where the run began."""
        began, *kept = [c for c in self.checkpoints if c[0] < onset] or self.checkpoints[:1]
        proven = [c for c in kept if c[0] <= onset - HEALTHY_STEPS]
        others = [c for c in kept if c not in proven and (data or c[0] != self.last_rollback_step)]
        return [*reversed(proven), *others[:1], began]

    def to_exclude(self, step: int, end: int, before) -> tuple[list[int], bool]:
        """The samples [first, end) to pass over after a divergence in step `step`, which has read
        up to `end`; `before(end, n)` is the sample n batches before. And whether the data is to
        blame: it diverged right behind excluded samples, and the steps from the checkpoint up to
        there went well."""
        bad = self.bad_steps()
        onset, replayed = before(end, bad), step - bad - self.last_rollback_step
        if (self.rollbacks > 0 and self.excluded[-1][1] == onset
                and replayed >= HEALTHY_STEPS - LEAD_IN - 1):
            first, last = self.excluded[-1]
            return [onset, onset + 2 * (last - first)], True
        return [before(onset, LEAD_IN), end], False

    def rolled_back(self, step: int, samples: list, data: bool, then: "DivergenceMonitor") -> None:
        """Record a rollback to `step`, where the monitor was `then`, that excludes these samples:
        the losses are those of then, what has been learned since stays. `data`: they are to blame.
        """
        self.losses, self.lowest = then.losses, then.lowest
        self.high, self.skipped_steps = then.high, then.skipped_steps
        cut = 1.0 if data else LR_CUT if step > self.last_rollback_step else LR_CUT ** 3
        self.lr_factor *= cut / (self.last_cut if data else 1.0)        # data: it was cut in vain
        self.last_cut = cut
        self.rollbacks += 1
        self.last_rollback_step = step
        self.excluded.append(samples)

    def skip_excluded(self, sample: int, size_at) -> int:
        """The first sample from this one on that begins a batch without excluded samples;
        `size_at(sample)` is the size of the batch that begins there."""
        for first, end in sorted(self.excluded):
            if first < sample + size_at(sample) and sample < end:
                sample = end
        return sample

    def add_checkpoint(self, step: int, name: str, keep: int) -> None:
        """Note a checkpoint that is about to be written; of those after the start, `keep` stay."""
        began, *kept = self.checkpoints or [[step, name]]
        kept = [c for c in kept if c[0] < step] + [[step, name]]
        self.checkpoints = [began, *kept[-keep:]]
