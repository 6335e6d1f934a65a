"""Six policies on a run that goes wrong, each written from its public description, and `PolicyRun`,
the train.Run that obeys one. __main__.py compares them.
"""
import errno
import math
import os
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

import train
from base import checkpoint_files
from base.options import Config
from base.processes import RunError
from corpus.shards import SPLITS
from data import TokenDataset
from model import GPTConfig
from parallelism.build import Grid, make_groups
from runtime import console, rollback, run_state
from runtime.rollback import go_back_if_diverged
from runtime.run_state import submit as submit_save     # bound before it is patched below

MAX_RETURNS = 5         # of a policy to a checkpoint, then the run ends: as --max-rollbacks


class Ended(Exception):
    """The policy has ended the run."""


class Restart(Exception):
    """The exception of a failed save has ended the process. torchrun starts it again, from the
    newest whole checkpoint."""


class Policy:
    """Ignore: the run goes on, whatever happens."""
    after_failed_save = None        # or an exception
    returns = 0

    def judge(self, step: int, stats: train.StepStats) -> str | None:
        """Before the update: "skip" it, or "stop" or go "back" after it, or None."""

    def go_back_if_diverged(self, run, batch, stats, row: dict) -> bool:
        """In place of rollback.go_back_if_diverged."""
        row["skipped"] = int(bool(stats.skipped))
        if run.verdict == "stop":
            raise Ended
        if run.verdict == "back":
            self.returns += 1
            if self.returns > MAX_RETURNS:
                raise Ended
            self.go_back(run)
        return run.verdict == "back"

    def file_left(self, run) -> Path:
        """The checkpoint of a run that has ended."""
        return run.files()[0]


class Stop(Policy):
    """As Keras's TerminateOnNaN: a loss that is not finite ends the run; so does a failed save."""
    after_failed_save = Ended

    def judge(self, step, stats):
        return None if math.isfinite(stats.loss) else "stop"


class SkipSixDeviations(Policy):
    """OLMo-core's SkipStepOptimizer (olmo_core/optim/skip_step_optimizer.py): no update if the loss
    or the norm of the gradient is more than six standard deviations above the mean of the last 128,
    from the 64th step on. All enter the mean, so that one that is not finite skips every step until
    it is no longer among them."""
    after_failed_save = Restart

    def __init__(self):
        self.seen = dict(loss=[], grad_norm=[])

    def judge(self, step, stats):
        verdict = None
        for name, values in self.seen.items():
            value = getattr(stats, name)
            if len(values) >= 63:
                with np.errstate(invalid="ignore"):         # the deviation of inf is NaN
                    limit = np.mean(values) + 6 * np.std(values, ddof=1)
                if not value <= limit:
                    verdict = "skip"
            self.seen[name] = [*values, value][-128:]
        return verdict


class CountNaN(Policy):
    """KempnerForge's NaNDetector (kempnerforge/resilience/health.py and docs/resilience): a step
    whose loss is not finite is skipped; after ten in a row the run goes back to a checkpoint.
    (There the loop ends, for a person to do that.)"""
    after_failed_save = Restart
    in_a_row = 0

    def judge(self, step, stats):
        self.in_a_row += 1
        if math.isfinite(stats.loss):
            self.in_a_row = 0
        return "back" if self.in_a_row == 10 else None

    def go_back(self, run):
        self.in_a_row = 0
        run.load(run.files()[0])


class ByHand(Policy):
    """OPT-175B (Zhang et al. 2022, section 2.5, and the team's logbook): somebody looks at the
    curve, here every 50 steps. If the mean of the last ten losses is not finite, or 5% above that
    of the last good look, the run goes on from a checkpoint before that look, with half the
    learning rate and, as PaLM did (Chowdhery et al. 2022, section 5.1), without the data read
    since."""
    after_failed_save = Restart
    losses = ()                     # the last ten
    good = (0, math.inf)            # the last look that found nothing: step and mean

    def judge(self, step, stats):
        self.losses = (*self.losses, stats.loss)[-10:]
        mean = float(np.mean(self.losses))
        if step % 50 == 0 and not mean <= 1.05 * self.good[1]:
            return "back"
        if step % 50 == 0:
            self.good = (step, mean)
        return None

    def go_back(self, run):
        consumed = run.batches.consumed
        step, _ = self.good
        before = [file for file in run.files() if int(file.stem.removeprefix("step_")) <= step]
        run.load((before or run.files()[-1:])[0])
        run.batches.skip_to(consumed)
        run.monitors.divergence.lr_factor = 0.5 ** self.returns


class Ours(Policy):
    """runtime/divergence.py and runtime/rollback.py, as train.py runs them."""

    def go_back_if_diverged(self, run, batch, stats, row):
        return go_back_if_diverged(run, batch, stats, row)

    def file_left(self, run):
        """The healthy one that the run's last words name."""
        healthy = [file for _, file, healthy in run.monitors.divergence.checkpoints if healthy]
        return Path(run.config.out, healthy[-1]) if healthy else super().file_left(run)


POLICIES = {"ignore": Policy, "stop": Stop, "skip six deviations": SkipSixDeviations,
            "count NaN": CountNaN, "by hand": ByHand, "ours": Ours}


class CountAlarms(Ours):
    """For healthy runs, with --rollback off: each policy judges, none acts."""

    def __init__(self):
        self.policies = {name: policy() for name, policy in POLICIES.items()}
        self.alarms = set()         # the policies that would have acted

    def judge(self, step, stats):
        self.alarms |= {name for name, policy in self.policies.items() if policy.judge(step, stats)}


class PolicyRun(train.Run):
    """A train.Run under a policy. `computed`: its steps so far; `alarm`: its own monitor has told
    of a divergence; `failing_saves`: how many of the next saves fail."""

    def __init__(self, policy: Policy, config: Config, model_config: GPTConfig, state=None):
        grid = Grid(1, 1, 1)
        make_groups(grid)
        texts = [TokenDataset(config.data, split, model_config.seq_len) for split in SPLITS]
        super().__init__(config, model_config, grid, torch.device("cpu"), *texts, state)
        self.policy = policy
        self.failing_saves = 0
        self.computed = 0
        self.verdict = None
        self.val_loss = None
        self.alarm = False
        self.monitors.log = console.RunLog(SimpleNamespace(write=self.note))
        self.monitors.fail_if_diverged = lambda row: None     # the policy alone ends a run

    def note(self, **row) -> None:
        """In place of metrics.jsonl."""
        self.val_loss = row.get("val_loss", self.val_loss)
        self.alarm = self.alarm or row.get("event") == "spike"

    def step_stats(self, *arguments) -> train.StepStats:
        stats = super().step_stats(*arguments)
        self.computed += 1
        self.verdict = self.policy.judge(self.step, stats)
        if self.verdict == "skip" and not stats.skipped:
            stats = replace(stats, skipped="left out by the policy")  # the loss scale stays
        return stats

    def submit(self, progress) -> None:
        """Save; or fail where a full disk shows at the latest, when a file is flushed to it."""
        if self.failing_saves == 0:
            return submit_save(self, progress)
        self.failing_saves -= 1
        self.writer.wait()
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(os, "fsync", side_effect=full):
            submit_save(self, progress)
            self.writer.wait()
        if self.policy.after_failed_save is not None:
            raise self.policy.after_failed_save

    def files(self) -> list[Path]:
        """The checkpoints, the newest first."""
        return checkpoint_files.list_checkpoints(Path(self.config.out))

    def load(self, file: Path) -> None:
        run_state.go_back(self, lambda: (file, []))

    def reaches_the_end(self) -> bool:
        """Train. False if the run ended before its last step."""
        policy = self.policy.go_back_if_diverged
        self.stop = SimpleNamespace(held=nullcontext, close=lambda: None, since=None)   # no signal
        with mock.patch.object(rollback, "go_back_if_diverged", policy), \
                mock.patch.object(run_state, "submit", lambda run, *state: run.submit(*state)), \
                redirect_stdout(None), redirect_stderr(None):       # prints nothing
            while True:
                try:
                    self.train()
                    return True
                except Restart:
                    self.load(self.files()[0])
                except (Ended, RunError):
                    return False
