"""The monitors of a run, for divergence, flipped bits and the gradient noise scale, and its log.
train.py calls them (and runtime/startup.py `before_end`, where a signal stopped the end):

    before_step         leaves out sequences: --skip-steps, or a rollback's    rollback.py
    after_microbatch    measure the gradient of a part of the batch            noise_scale.py
    after_backward
    after_step          goes back if the loss has diverged                     rollback.py
    before_save         compares the copies of the state                       flipped_bits.py
    go_back             if they differ, to the last checkpoint
    before_end          fails if the run ends diverged                         rollback.py
"""
import math
import time

from data import Batch
from runtime import flipped_bits, rollback
from runtime.divergence import ANSWERS_DEVIATION, DivergenceMonitor
from runtime.noise_scale import NoiseScale


class Monitors:
    """The monitors of `run`, a train.Run.

    divergence  the losses so far, and the rollbacks; every checkpoint holds it
    noise       the gradient noise scale, with --noise-scale
    log         console.RunLog; startup sets it before `train`
    """

    def __init__(self, run):
        self.run = run
        self.divergence = DivergenceMonitor()
        self.noise = NoiseScale()
        self.rate_is_suspect = False    # the losses from before the resume stay
        self.log = None
        self.started = None             # when the step in progress began, in seconds

    @property
    def lr_factor(self) -> float:
        """By which the learning rate is multiplied: below 1 after a rollback."""
        return self.divergence.lr_factor

    def restore(self, state: dict | None) -> None:
        """Take the divergence monitor of a checkpoint; without one, a new one."""
        self.divergence = DivergenceMonitor()
        if state is not None:
            self.rate_is_suspect = rollback.rate_is_suspect(self.run.config, state)
            self.divergence = rollback.restored_monitor(self.run.config, self.run.train_data, state)
        learns_answers = self.run.train_data.has_conversations
        self.divergence.least_deviation = ANSWERS_DEVIATION if learns_answers else 0.0

    def before_step(self) -> None:
        """Leave out the sequences that --skip-steps or a rollback excludes."""
        self.started = time.perf_counter()
        rollback.skip_excluded(self.run)
        self.noise.before_step(self.run)

    def after_microbatch(self, number: int) -> None:
        self.noise.after_microbatch(self.run, number)

    def after_backward(self) -> None:
        """The gradients are complete, but not yet summed over the replicas if they are measured."""
        self.noise.after_backward(self.run)

    def after_step(self, batch: Batch, stats, lr: float) -> dict | None:
        """Judge a step by its train.StepStats. Returns its row of metrics.jsonl; None if the run
        has diverged and gone back: step, weights and data are where an older checkpoint was."""
        run, log = self.run, self.log
        row = log.new_row(run, batch, stats, lr, time.perf_counter() - self.started)
        self.noise.after_step(run, batch, stats, row)
        if rollback.go_back_if_diverged(run, batch, stats, row):
            return None
        log.print_step(run, row)
        return row

    def before_end(self, row: dict) -> None:
        """The last steps may have diverged without BAD_STEPS in a row: raise RunError if the
        validation loss in the last step's `row` is not finite."""
        if not math.isfinite(row["val_loss"]):
            rollback.fail(self.run, row["step"], "the validation loss is not finite")

    def before_save(self, saving: bool) -> dict | None:
        """Before a save and every --check-every steps, compare the copies of the state. Returns
        how they differ (flipped_bits.find_difference), or None."""
        if saving or self.run.is_due(self.run.config.check_every):
            return flipped_bits.find_difference(self.run)
        return None

    def go_back(self, difference: dict) -> None:
        """To the last checkpoint, as the copies differ."""
        flipped_bits.go_back(self.run, difference)
