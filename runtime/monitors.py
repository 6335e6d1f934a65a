"""The monitors of a run, for divergence and flipped bits, and its log. train.py calls them, and
runtime/startup.py calls `fail_if_diverged` where a signal stopped the end:

    begin_step          leaves out sequences: --skip-steps, or a rollback's    rollback.py
    judge_step          goes back if the loss has diverged                     rollback.py
    copies_are_equal    compares the copies of the state                       flipped_bits.py
    go_back             if they differ, to the last checkpoint
    fail_if_diverged    at the end of the run                                  rollback.py
"""
import math
import time

from data import Batch
from runtime import flipped_bits, rollback
from runtime.divergence import ANSWERS_DEVIATION, DivergenceMonitor


class Monitors:
    """The monitors of `run`, a train.Run.

    divergence  the losses so far, and the rollbacks; every checkpoint holds it
    log         console.RunLog; startup sets it before `train`
    judged      the sequences of the data up to the last step that was judged
    difference  how the copies of the state differ (flipped_bits.find_difference), or None
    """

    def __init__(self, run):
        self.run = run
        self.divergence = DivergenceMonitor()
        self.rate_is_suspect = False    # the losses from before the resume stay
        self.log = None
        self.judged = 0
        self.difference = None
        self.started = None             # when the step in progress began, in seconds

    @property
    def lr_factor(self) -> float:
        """By which the learning rate is multiplied: below 1 after a rollback."""
        return self.divergence.lr_factor

    def restore(self, state: dict | None) -> None:
        """Take the divergence monitor of a checkpoint; without one, a new one."""
        self.divergence = DivergenceMonitor()
        self.judged = 0
        if state is not None:
            self.judged = state["consumed_samples"]
            self.rate_is_suspect = rollback.rate_is_suspect(self.run.config, state)
            self.divergence = rollback.restored_monitor(self.run.config, self.run.train_data, state)
        learns_answers = self.run.train_data.has_conversations
        self.divergence.least_deviation = ANSWERS_DEVIATION if learns_answers else 0.0

    def begin_step(self) -> None:
        """Start the clock, and leave out the sequences that --skip-steps or a rollback excludes."""
        self.started = time.perf_counter()
        rollback.skip_excluded(self.run)

    def judge_step(self, batch: Batch, stats, lr: float) -> dict | None:
        """Judge a step by its train.StepStats. Returns its row of metrics.jsonl. Returns None if
        the run has diverged: step, weights and data are then those of an older checkpoint."""
        run, log = self.run, self.log
        row = log.new_row(run, batch, stats, lr, time.perf_counter() - self.started)
        if rollback.go_back_if_diverged(run, batch, stats, row):
            return None
        log.print_step(run, row)
        return row

    def copies_are_equal(self, saving: bool) -> bool:
        """Before a save and every --check-every steps, compare the copies of the state that ranks
        hold. They differ if a bit has flipped. Every rank calls it."""
        every = self.run.config.check_every
        self.difference = None
        if saving or (every > 0 and self.run.step % every == 0):
            self.difference = flipped_bits.find_difference(self.run)
        return self.difference is None

    def go_back(self) -> None:
        """Go back to the last checkpoint, because the copies of the state differ."""
        flipped_bits.go_back(self.run, self.difference)

    def fail_if_diverged(self, row: dict) -> None:
        """Raise RunError if the last step's `row` has a validation loss that is not finite: the
        last steps may have diverged without BAD_STEPS in a row."""
        if row["step"] == self.run.config.steps and not math.isfinite(row["val_loss"]):
            rollback.fail(self.run, row["step"], "the validation loss is not finite")
