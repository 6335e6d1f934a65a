"""Rollback: how a run acts on a divergence, which divergence.py judges. It returns to an older
checkpoint and leaves out the batches that led there. `run` is a train.Run."""
import math
from itertools import pairwise
from pathlib import Path

from base.agreement import all_ranks
from base.batch_ramp import sequences_after
from base.errors import RunError
from base.options import Config, step_range
from data import Batch
from runtime import flipped_bits, run_state
from runtime.divergence import (BAD_STEPS, LEAD_IN, MAX_SKIPPED, Divergence, DivergenceMonitor,
                                scale_may_help)
from runtime.run_log import RunLog
from runtime.run_state import Progress
from runtime.step_stats import StepStats


def find_divergence(batch: Batch, stats: StepStats, progress: Progress,
                    log: RunLog) -> Divergence | None:
    """Let the monitor observe a step. Write events if it is not finite, or diverged: from their
    windows TokenDataset.read rebuilds the batch, or the last batches. Returns a divergence on
    which the run has to act."""
    batches, monitor = progress.batches, progress.monitor
    begin, _ = batches.data.mixture.phases[-1]      # above 0: where the weights have changed
    before = [0, *monitor.starts][-1]               # where the batch before this one begins
    if before < begin < batches.consumed and not monitor.rate_is_suspect:
        monitor.forget_losses()
    divergence = monitor.observe(batch.start, stats)
    seen = dict(step=batch.step, loss=stats.loss, grad_norm=stats.grad_norm,
                loss_scale=stats.loss_scale)
    if stats.why_skipped:
        log.event("skip", reason=stats.why_skipped, **seen, **stats.where,
                  windows=batch.window_ids.tolist())
    if divergence is not None:
        windows = []
        starts = monitor.starts[-LEAD_IN - BAD_STEPS:]
        for start, following in pairwise([*starts, batches.consumed]):
            size = min(batch.size, following - start)    # skipped batches leave a gap
            windows += batches.data.window_ids(batches.config.seed, start, size).tolist()
        log.event("spike", f"diverged: {divergence.reason}", reason=divergence.reason,
                  limit=monitor.limit(), windows=windows, **seen)
    if batches.config.rollback == "on":
        return divergence
    if monitor.skipped >= MAX_SKIPPED and not scale_may_help(stats):
        return Divergence(f"{MAX_SKIPPED} steps in a row were not finite", MAX_SKIPPED)
    return None


def save_or_go_back(run, row: dict, divergence: Divergence | None) -> None:
    """What follows a step, whose `row` is written. If it is due, compare the bits that ranks share,
    and save. If two copies differ, a bit has flipped: this state is not saved, but an older one
    restored, as after a divergence. Every rank calls it."""
    config, step = run.config, row["step"]
    saving = config.is_nth_or_last(step, config.save_every) or run.stop.agreed
    if divergence is not None:
        go_back(run, divergence)
    elif saving or config.is_nth_or_last(step, config.check_every):
        if flipped_bits.go_back_if_found(run) or not saving:
            return
        if step == config.steps and not math.isfinite(row["val_loss"]):
            # The last steps may have diverged without BAD_STEPS in a row.
            fail(step, "the validation loss is not finite", run.progress.monitor, config, run.log)
        run_state.save(run)


def go_back(run, divergence: Divergence) -> None:
    """Take a run that has diverged back to a healthy checkpoint, skip the batches that led there,
    and save at once, so that a kill does not undo the rollback. Or end it. Every rank calls it."""
    # Was a flipped bit the cause, not the data or the learning rate?
    if flipped_bits.go_back_if_found(run):
        return
    config, progress = run.config, run.progress
    monitor, diverged_at, reason = progress.monitor, progress.step, divergence.reason
    if config.rollback == "off":
        fail(diverged_at, reason, monitor, config, run.log)
    if monitor.rollbacks >= config.max_rollbacks:
        fail(diverged_at, f"{reason}, and --max-rollbacks {config.max_rollbacks} are used up",
             monitor, config, run.log)
    excluded, data_to_blame = monitor.to_exclude(divergence.steps, progress.batches.consumed)
    first_skipped = diverged_at - divergence.steps + 1
    if not data_to_blame:
        first_skipped -= LEAD_IN
    candidates = monitor.candidates(first_skipped)
    files = [Path(config.out, name) for name in candidates] or [None]       # None: step 0

    run_state.go_back(run, lambda: files)
    restored = run.progress
    excluded[0] = max(excluded[0], restored.batches.consumed)
    # The history of rollbacks outlasts the restored state, which has a monitor of its own.
    monitor.rolled_back(restored.step, excluded, data_to_blame, restored=restored.monitor)
    restored.monitor = monitor
    run.log.event(
        "rollback", f"rollback {monitor.rollbacks} of at most {config.max_rollbacks}: back to step "
        f"{restored.step}, learning rate x {monitor.lr_factor:.3g} from now on",
        reason=reason, to=restored.step, sequences=excluded, lr_factor=monitor.lr_factor,
        rollbacks=monitor.rollbacks, step=diverged_at)
    run_state.submit(run)
    all_ranks(lambda: run.writer.wait(required=True))


def leave_out_batches(step: int, progress: Progress, log: RunLog) -> None:
    """Leave out the excluded sequences that the batch of this step would contain: those of
    --skip-steps, which the monitor notes, and those of rollbacks. Moves progress.batches past them.
    """
    batches, monitor = progress.batches, progress.monitor
    config, consumed, size = batches.config, batches.consumed, batches.next_size()
    if config.skip_steps is not None and monitor.applied_skip != config.skip_steps:
        first, last = step_range(config.skip_steps)
        if first <= step <= last:
            monitor.applied_skip = config.skip_steps
            trained = batches.sequences_trained
            skipped = sequences_after(config, trained, last - step + 1) - trained
            monitor.excluded.insert(0, [consumed, consumed + skipped])    # rollbacks append theirs
    start = consumed
    for first, end in sorted(monitor.excluded):
        if first < start + size and start < end:
            start = end
    if start > consumed:
        log.event("skip", f"skip     sequences {consumed:,} to {start - 1:,} are left out",
                  step=step, reason="left out", sequences=[consumed, start])
        batches.consumed = start


def fail(step: int, reason: str, monitor: DivergenceMonitor, config: Config, log: RunLog) -> None:
    """Stop a run that cannot recover from its divergence, which `step` showed."""
    log.event("stop", step=step, reason=reason)
    healthy = [file for _, file, healthy in monitor.checkpoints if healthy]
    begin = "begin again"
    if healthy:
        begin = f"branch from an older checkpoint (--resume {Path(config.out, healthy[-1])})"
    more_range = " or --dtype bf16" if config.dtype == "fp16" else ""
    raise RunError(f"step {step}: {reason}; the run has diverged: see the events in "
                   f"{config.out}/metrics.jsonl, and {begin} in another --out, with a lower "
                   f"--lr, a tighter --clip or --skip-steps{more_range}")
