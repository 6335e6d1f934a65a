r"""Divergence: the judgement of each step and of each checkpoint. rollback.py acts on it.

A step is bad if its loss is high (far above the lowest median so far) or not finite, or if its
gradient is not finite and no loss scale can cure that. The run has diverged after BAD_STEPS bad
steps in a row, or when the median has risen by two deviations. The teams of OPT-175B (Zhang et
al. 2022, section 2.5, and their logbook) and PaLM (Chowdhery et al. 2022, section 5.1) then went
back to a checkpoint by hand. Here it happens by itself, up to --max-rollbacks times:

    loss                                 x x x                   x bad step
       \_____                         x                          o healthy checkpoint
             \___o________o___________/
                          |  |////////////|
              go back there, skip these batches, from LEAD_IN before the first bad step on

A checkpoint is healthy, as OPT's team judged it, if its last step was neither bad nor skipped,
the median of the last losses was known and within one deviation of the lowest, the norm of the
last activations was at most twice its own median and, in fp16, the loss scale was above its
floor. The checkpoint with which a run from a file begins always counts as healthy.

The first loss after the skipped batches decides. If it is high again, we attribute the divergence
to the data: twice as many batches are skipped, and the last reduction of the learning rate is
undone. Otherwise the learning rate is multiplied by the first of LR_CUTS, and as long as the run
does not get beyond a checkpoint that it has returned to, by the next. A third return to the same
checkpoint takes the next older healthy one. Only a run that never had a healthy checkpoint begins
again at step 0.
"""
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from amp import MIN_SCALE
from base.checkpoint_files import step_file
from base.options import FLAGS_THAT_CHANGE_THE_LOSS, Config, flags_of_writer
from data import TokenDataset

MAX_LOSSES = 64         # losses that make the median
MIN_LOSSES = 16         # the fewest losses that make one
ANSWERS_DEVIATION = 0.02        # nats; of the mean loss of a batch of answers
SPIKE_MARGIN = 6.0      # deviations between the lowest median and a loss that is high
BAD_STEPS = 3           # bad steps in a row that are a divergence
MAX_SKIPPED = 20        # the most steps in a row without an update, with --rollback off
LEAD_IN = 8             # batches before the first bad step that are skipped too
LR_CUTS = (0.6, 0.1, 0.05)      # the last one is repeated
STATISTICS = ("losses", "norms", "starts", "lowest", "bad", "skipped", "rate_is_suspect")


def scale_may_help(stats) -> bool:
    """Whether a step was skipped that a smaller loss scale may cure."""
    return stats.not_finite and stats.loss_scale > MIN_SCALE


class Divergence(NamedTuple):
    """What `DivergenceMonitor.observe` has found."""
    reason: str
    steps: int                  # number of the last steps that led to it


@dataclass
class DivergenceMonitor:
    """The losses and rollbacks of a run so far, and the judgement of each step. A function of
    numbers that are equal on every rank, so all ranks decide alike. Every checkpoint holds it."""
    # Statistics: a rollback takes those of its checkpoint.
    losses: list = field(default_factory=list)      # the last MAX_LOSSES losses of steps not bad
    norms: list = field(default_factory=list)       # of the last activations in the same steps
    starts: list = field(default_factory=list)      # first sequences of the last batches
    lowest: float = math.inf        # lowest median of the losses so far
    bad: int = 0                    # bad steps in a row
    skipped: int = 0                # steps in a row without an update
    rate_is_suspect: bool = False   # the losses from before the resume are kept (`restored`)
    # History: it outlasts a rollback.
    lr_factor: float = 1.0          # on the learning rate of the schedule
    last_cut: float = 1.0           # the factor that the last rollback applied
    rollbacks: int = 0
    returned_to: list = field(default_factory=list)     # steps of rollbacks that cut
    excluded: list = field(default_factory=list)        # [first, end) of sequences to skip
    applied_skip: str | None = None                     # --skip-steps, once they are excluded
    checkpoints: list = field(default_factory=list)     # [step, file, healthy] of those kept
    accused: list = field(default_factory=list)         # machines with a flipped bit
    # Not below this is `deviation`: the loss of answers may fall to 0, where a surprise is no
    # divergence.
    least_deviation: float = 0.0

    @classmethod
    def restored(cls, state: dict | None, config: Config, data: TokenDataset):
        """The monitor in a checkpoint, or that of a run before step 1. An older file may lack
        fields, which keep their defaults."""
        monitor = cls()
        if state is not None:
            for name, value in state["monitor"].items():
                setattr(monitor, name, value)
            if state["config"].get("plain"):        # which judges no checkpoint: its loss is finite
                file = step_file(Path(config.out), state["step"]).name
                monitor.checkpoints = [[state["step"], file, True]]
            if config.rollback == "on":     # the checkpoint may have been saved while diverging
                monitor.bad = min(monitor.bad, BAD_STEPS - 1)
            # A peak learning rate that has more than tripled is probably a mistake, and the old
            # losses are the only evidence of it. (Weights alone have no flags.)
            monitor.rate_is_suspect = config.lr > 3 * state["config"].get("lr", math.inf)
            # Losses can be compared only under the same flags and on the same data.
            stored = flags_of_writer(state)
            changed = [name for name in FLAGS_THAT_CHANGE_THE_LOSS
                       if stored[name] != getattr(config, name)]
            weights, stored_weights = data.mixture.phases[-1][1], state["data"][-1][1]
            if not monitor.rate_is_suspect and (changed or weights != stored_weights):
                monitor.forget_losses()
        monitor.least_deviation = ANSWERS_DEVIATION if data.has_conversations else 0.0
        return monitor

    def deviation(self) -> float:
        """Standard deviation of the losses. It is estimated from neighbors, so that a falling loss
        does not count as noise: the median of their distances times 1.4826 / sqrt(2), which is
        sigma if the noise is normal; at least 1% of the median loss, and `least_deviation`."""
        distance = statistics.median(abs(a - b) for a, b in zip(self.losses, self.losses[1:]))
        return max(1.4826 / math.sqrt(2) * distance, statistics.median(self.losses) / 100,
                   self.least_deviation)

    def limit(self) -> float:
        """The highest loss that is not high. We compare with the lowest median, because a moving
        one would track a slow divergence."""
        if len(self.losses) < MIN_LOSSES:
            return math.inf
        return self.lowest + SPIKE_MARGIN * self.deviation()

    def observe(self, start: int, stats) -> Divergence | None:
        """Judge a step by its StepStats; `start` is the number of its batch's first
        sequence. Returns a divergence once."""
        limit = self.limit()
        self.starts = [*self.starts, start][-(MAX_LOSSES + LEAD_IN):]
        self.skipped = self.skipped + 1 if stats.why_skipped else 0
        problem = None
        if not math.isfinite(stats.loss):
            problem = "the loss is not finite"
        elif stats.why_skipped and not stats.not_finite:
            problem = f"a number is {stats.why_skipped}"
        elif stats.why_skipped and not scale_may_help(stats):
            problem = "a gradient is not finite"
        elif stats.loss > limit:
            problem = f"the loss is {stats.loss:.4f}, above {limit:.4f}"
        if problem is None:
            self.bad = 0
            self.losses = [*self.losses, stats.loss][-MAX_LOSSES:]
            self.norms = [*self.norms, stats.activation_norm][-MAX_LOSSES:]
            return self._risen_median()
        self.bad += 1
        if self.bad == BAD_STEPS:
            return Divergence(f"{BAD_STEPS} bad steps in a row: {problem}", BAD_STEPS)
        return None

    def _risen_median(self) -> Divergence | None:
        """A slow divergence: the median has risen, without high losses. Noise around a constant
        loss stays below two deviations for 20,000 steps and more."""
        if len(self.losses) < MIN_LOSSES:
            return None
        median = statistics.median(self.losses)
        if median <= self.lowest:
            self.lowest = median
        elif len(self.losses) == MAX_LOSSES and median - self.lowest > 2 * self.deviation():
            reason = f"the loss has risen from {self.lowest:.4f} to {median:.4f}"
            steps = 1
            while steps < MAX_LOSSES and self.losses[-1 - steps] > self.lowest:
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
        healthy one. One that is not `scheduled`, because a signal ended the run, is no place to
        return to: a run without the signal does not have it."""
        healthy = False
        if len(self.losses) >= MIN_LOSSES:
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
