"""What watches a run: divergence and flipped bits. train.py calls it in its loop:

    begin_step          leaves out sequences: --skip-steps, or a rollback's    rollback.py
    judge_step          goes back if the loss has diverged                     rollback.py
    copies_are_equal    compares the copies of the state                       flipped_bits.py
    go_back             if they differ, to the last checkpoint
    fail_if_diverged    at the end of the run                                  rollback.py

It holds nothing that a checkpoint has: the losses and rollbacks so far are run.divergence.
"""
import math
import time

from data import Batch
from runtime import flipped_bits, rollback


class Monitors:
    """What watches `run`, a train.Run."""

    def __init__(self, run):
        self.run = run
        self.difference = None      # of the copies (flipped_bits.find_difference), or None
        self.started = None         # when the step in progress began, in seconds
        self.began_at = None        # and at which sequence of the data

    def begin_step(self) -> None:
        """Start the clock, and leave out the sequences that --skip-steps or a rollback excludes."""
        self.started = time.perf_counter()
        self.began_at = self.run.batches.consumed
        rollback.skip_excluded(self.run)

    def judge_step(self, batch: Batch, stats, lr: float) -> dict | None:
        """Judge a step by its StepStats. Returns its row of metrics.jsonl. Returns None if
        the run has diverged: step, weights and data are then those of an older checkpoint."""
        run, log = self.run, self.run.log
        row = log.new_row(run, batch, stats, lr, time.perf_counter() - self.started)
        if rollback.go_back_if_diverged(run, self.began_at, batch, stats, row):
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
