"""Rollback: how a run acts on a divergence, which divergence.py judges. It returns to an older
checkpoint and leaves out the batches that led there.
`run` is a train.Run."""
import math
from itertools import pairwise
from pathlib import Path

from amp import NOT_FINITE
from base.batch_ramp import batch_size_at, sequences_after
from base.errors import RunError
from base.options import step_range
from base.processes import all_gather_object
from data import Batch
from parallelism.zero import FlatParameters
from runtime import flipped_bits, run_state
from runtime.divergence import BAD_STEPS, LEAD_IN, MAX_SKIPPED, Divergence, scale_may_help


def go_back_if_diverged(run, batch: Batch, stats, row: dict) -> bool:
    """Judge a step by its StepStats; complete its row of metrics.jsonl, and print it. Returns True
    if the run has gone back to an older checkpoint: the row is then written."""
    monitor, config = run.divergence, run.config
    forget_other_mixture(run, batch.start)
    divergence = monitor.observe(batch.start, stats)
    row["skipped"] = monitor.skipped
    report(run, batch, stats, row, divergence)
    run.log.print_step(run, row)
    off = config.rollback == "off"
    hopeless = off and monitor.skipped >= MAX_SKIPPED and not scale_may_help(stats)
    if not hopeless and (off or divergence is None):
        return False
    run.log.write_row(run, row)
    # Was a flipped bit the cause, not the data or the learning rate?
    if flipped_bits.go_back_if_found(run):
        return True
    if hopeless:
        fail(run, run.step, f"{MAX_SKIPPED} steps in a row were not finite")
    roll_back(run, divergence)
    return True


def forget_other_mixture(run, first: int) -> None:
    """Forget the losses if the weights of a mixture change at one of the sequences from `first` to
    where the run is in its data."""
    monitor = run.divergence
    changes = run.train_data.mixture.phase_begins(first, run.batches.consumed)
    if changes and not monitor.rate_is_suspect:
        monitor.forget_losses()


def report(run, batch: Batch, stats, row: dict, divergence: Divergence | None) -> None:
    """Write events for a step that is not finite, or diverged. TokenDataset.tokens_of rebuilds the
    batch, or the last batches, from the windows in the event."""
    seen = {name: row[name] for name in ("step", "loss", "grad_norm", "loss_scale")}
    if stats.skipped:
        where = {}
        if stats.skipped == NOT_FINITE:
            where = locate_nonfinite(stats.local_loss.item(), run.flat)
        run.log.event("skip", reason=stats.skipped, **seen, **where,
                      windows=batch.window_ids.tolist())
    if divergence is not None:
        windows = []
        starts = run.divergence.starts[-LEAD_IN - BAD_STEPS:]
        for start, following in pairwise([*starts, run.batches.consumed]):
            size = min(batch.size, following - start)    # skipped batches leave a gap
            windows += run.train_data.window_ids(run.config.seed, start, size).tolist()
        run.log.event("spike", f"diverged: {divergence.reason}", reason=divergence.reason,
                      limit=run.divergence.limit(), windows=windows, **seen)


def roll_back(run, divergence: Divergence) -> None:
    """Return to a healthy checkpoint, skip the batches that led to the divergence, and save at
    once, so that a kill does not undo the rollback."""
    config, monitor = run.config, run.divergence
    diverged_at = run.step
    if monitor.rollbacks >= config.max_rollbacks:
        fail(run, diverged_at,
             f"{divergence.reason}, and --max-rollbacks {config.max_rollbacks} are used up")
    excluded, data_to_blame = monitor.to_exclude(divergence.steps, run.batches.consumed)
    first_skipped = diverged_at - divergence.steps + 1
    if not data_to_blame:
        first_skipped -= LEAD_IN
    candidates = monitor.candidates(first_skipped)
    files = [Path(config.out, name) for name in candidates] or [None]       # None: step 0

    run_state.go_back(run, lambda: files)
    excluded[0] = max(excluded[0], run.batches.consumed)
    # The history of rollbacks outlasts the restored state, which has a monitor of its own.
    monitor.rolled_back(run.step - 1, excluded, data_to_blame, restored=run.divergence)
    run.divergence = monitor
    run.log.event(
        "rollback", f"rollback {monitor.rollbacks} of at most {config.max_rollbacks}: back to step "
        f"{run.step - 1}, learning rate x {monitor.lr_factor:.3g} from now on",
        reason=divergence.reason, to=run.step - 1, sequences=excluded, lr_factor=monitor.lr_factor,
        rollbacks=monitor.rollbacks, step=diverged_at)
    run_state.submit(run)
    run_state.wait_for_last_save(run)


def skip_excluded(run) -> None:
    """Leave out the excluded sequences that the next batch would contain: those of --skip-steps
    and those of rollbacks."""
    monitor, config, batches = run.divergence, run.config, run.batches
    consumed = batches.consumed
    size = batch_size_at(config, batches.sequences_trained)
    if config.skip_steps is not None and monitor.applied_skip != config.skip_steps:
        first, last = step_range(config.skip_steps)
        if first <= run.step <= last:
            monitor.applied_skip = config.skip_steps
            trained = batches.sequences_trained
            skipped = sequences_after(config, trained, last - run.step + 1) - trained
            monitor.excluded.insert(0, [consumed, consumed + skipped])    # rollbacks append theirs
    start = consumed
    for first, end in sorted(monitor.excluded):
        if first < start + size and start < end:
            start = end
    if start > consumed:
        run.log.event(
            "skip", f"skip     sequences {consumed:,} to {start - 1:,} are left out",
            step=run.step, reason="left out", sequences=[consumed, start])
        batches.skip_to(start)
        forget_other_mixture(run, consumed)


def fail_if_diverged(run, row: dict) -> None:
    """Raise RunError if the last step's `row` has a validation loss that is not finite: the last
    steps may have diverged without BAD_STEPS in a row."""
    if row["step"] == run.config.steps and not math.isfinite(row["val_loss"]):
        fail(run, row["step"], "the validation loss is not finite")


def fail(run, step: int, reason: str) -> None:
    """Stop a run that cannot recover from its divergence, which `step` showed."""
    run.log.event("stop", step=step, reason=reason)
    healthy = [file for _, file, healthy in run.divergence.checkpoints if healthy]
    begin = "begin again"
    if healthy:
        begin = f"branch from an older checkpoint (--resume {Path(run.config.out, healthy[-1])})"
    raise RunError(f"step {step}: {reason}; the run has diverged: see the events in "
                   f"{run.config.out}/metrics.jsonl, and {begin} in another --out, with a lower "
                   f"--lr, a tighter --clip or --skip-steps")


def locate_nonfinite(local_loss: float, flat: FlatParameters) -> dict:
    """Find where a number is not finite; every rank must call it. Reports the first rank with a
    non-finite loss or, if there is none, with a non-finite gradient, and the last such parameter:
    backward reaches it first. Gradients have already been summed over the replicas, so another
    replica may be the source. If all numbers are finite but their squares are not, `what` is
    "norm"."""
    parameter = None
    for bucket in flat.buckets:
        for spec, shard_slice, _ in bucket.shard_ranges:
            if not bucket.shard["grad"][shard_slice].isfinite().all():
                parameter = spec.name
    found = all_gather_object((local_loss, parameter))
    for rank, (loss, name) in enumerate(found):
        if not math.isfinite(loss):
            return dict(what="loss", rank=rank, parameter=name)
    for rank, (_, name) in enumerate(found):
        if name is not None:
            return dict(what="gradient", rank=rank, parameter=name)
    return dict(what="norm", rank=None, parameter=None)
