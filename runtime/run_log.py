"""The log of a run: each step is a row of metrics.jsonl, and some are a line on the console.
console.py prints the rest.
"""
import math
import statistics
import sys
import time
from collections import deque
from datetime import timedelta
from itertools import zip_longest

import torch

from base.batch_ramp import sequences_after
from base.flops import flops_per_token, peak_flops
from base.processes import print_rank0
from data import Batch
from model import ceil_div
from runtime.directory import Metrics
from runtime.evaluation import eval_sequences, perplexity
from runtime.step_stats import experts_in_words

LINES = 50                      # of steps on the console in a run, about


class RunLog:
    """What a run reports while it trains: metrics.jsonl, complete, and a selection of it on the
    console."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self.recent_seconds = deque(maxlen=20)      # of a sequence, in the last steps
        self.step_ended_at = None       # in seconds, as the others
        self.evaluation_seconds = None  # of the last evaluation
        self.printed_at = None          # when a step's line was last printed, in seconds
        self.shown_at = -math.inf       # when that or the line of a terminal was
        self.on_terminal = sys.stdout is not None and sys.stdout.isatty()

    def event(self, kind: str, line: str | None = None, **fields) -> None:
        """Write an event to metrics.jsonl and, if there is one, its line to the console."""
        self.metrics.write(event=kind, **fields)
        if line is not None:
            print_rank0(line)

    def new_row(self, run, batch: Batch, stats, lr: float, seconds: float) -> dict:
        """The row of metrics.jsonl of a step that took `seconds`; `stats`: its StepStats."""
        self.recent_seconds.append(seconds / batch.size)
        self.step_ended_at = time.monotonic()
        seq_len = run.model_config.seq_len
        return dict(
            step=batch.step, tokens=run.batches.sequences_trained * seq_len, loss=stats.loss,
            lr=lr, batch_size=batch.size, grad_norm=stats.grad_norm, loss_scale=stats.loss_scale,
            activation_norm=stats.activation_norm,
            tokens_per_second=round(batch.size * seq_len / seconds, 1), **stats.expert_loads)

    def print_step(self, run, row: dict) -> None:
        """Print a step's line: with --log-every N each N-th, otherwise about LINES in the run and
        at most one a second; always the first, the last and those of evaluations. A terminal shows
        beside these how far the run has come, in a line that the next one replaces."""
        config, step = run.config, row["step"]
        now = time.monotonic()
        is_due = config.is_due(step, config.eval_every)
        if config.log_every is not None:
            is_due = is_due or step % config.log_every == 0
        elif self.printed_at is None:
            is_due = True
        elif now - self.printed_at >= 1:
            is_due = is_due or step % ceil_div(config.steps, LINES) == 0
        if is_due:
            print_rank0(format_step(run, row, self.time_left(run, step)))
            self.printed_at = now
            self.shown_at = now
        elif self.on_terminal and now - self.shown_at >= 1:
            self.shown_at = now
            print_rank0(f"step {step}/{config.steps}  loss {row['loss']:.4f}  "
                        f"left {self.time_left(run, step)}\x1b[K", end="\r")

    def time_left(self, run, step: int) -> timedelta:
        """The time of the sequences that are left to train, by the median of the last steps, and of
        the evaluations that are left, each as long as the last one. Before there was one it is
        guessed: forward is about a third of a step. At first in a ramp it is too long, for a small
        model 1.6 times: what a step costs beside its sequences is not known yet."""
        config = run.config
        trained = run.batches.sequences_trained
        sequences = sequences_after(config, trained, config.steps - step) - trained
        evaluations = 1                 # after the last step. That of this step is still to come
        if config.eval_every > 0:
            evaluations += ((config.steps - 1) // config.eval_every
                            - (step - 1) // config.eval_every)
        of_sequence = statistics.median_low(self.recent_seconds)
        of_evaluation = self.evaluation_seconds
        if of_evaluation is None:
            of_evaluation = evaluated_sequences(run) * of_sequence / 3
        return timedelta(seconds=round(sequences * of_sequence + evaluations * of_evaluation))

    def write_row(self, run, row: dict) -> None:
        """Write a step's row to metrics.jsonl, and its evaluation also to the console."""
        self.metrics.write(**row)
        if "val_loss" in row:
            self.evaluation_seconds = time.monotonic() - self.step_ended_at
            print_rank0(format_eval(row, run))
            if "dead_experts" in row:
                print_rank0(experts_in_words(row, run.model_config))


def evaluated_sequences(run) -> int:
    """How many sequences an evaluation reads."""
    return sum(eval_sequences(run.config, run.model_config, source.n_windows)
               for source in run.val_data.mixture.sources.values())


def evaluated_tokens(run) -> str:
    """How many tokens an evaluation reads."""
    count = evaluated_sequences(run)
    if run.val_data.has_conversations:
        return f"{count:,} of {run.val_data.n_windows:,} windows of conversations"
    return f"{count * run.model_config.seq_len:,} of {run.val_data.n_tokens:,} tokens"


def format_step(run, row: dict, left: timedelta) -> str:
    """The console's line of a step."""
    config = run.config
    line = (f"step {row['step']:>{len(str(config.steps))}}/{config.steps}  "
            f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:,.0f} tok/s")
    if config.batch_ramp is not None:
        line += f"  batch {row['batch_size']}"
    if config.dtype == "fp16":
        line += f"  scale {row['loss_scale']:g}"
    if run.device.type == "cuda" and config.dtype in ("bf16", "fp16"):
        peak = run.grid.world * peak_flops(torch.cuda.get_device_name(run.device))
        if peak > 0:
            flops = row["tokens_per_second"] * flops_per_token(run.model_config)
            line += f"  MFU {flops / peak:.1%}"
    line += f"  left {left}"
    if row["skipped"] > 0:
        line += "  skipped: loss or gradient not finite"
        if config.exact:
            line += ", or out of range"
    return line


def format_eval(row: dict, run) -> str:
    """The validation loss in three units; of several sources a table, a line for each."""
    dataset = run.val_data
    sources = dataset.mixture.sources.values()
    uniform = math.log(run.model_config.vocab_size)
    # (name, what ends the keys of its numbers, note)
    lines = [("validation:", "", f" (on {evaluated_tokens(run)})")]
    if len(sources) > 1:
        lines += [(f"  {source.name}:", f"/{source.name}", "") for source in sources]
    cells, notes = [], []
    for name, key, note in lines:
        loss = row["val_loss" + key]
        bits = row.get("bits_per_byte" + key)
        value = perplexity(loss)
        cells.append([name, f"{loss:.4f} nats a token,",
                      f"perplexity {value:{'.2f' if value < 1e4 else '.3g'}}"])
        if bits is not None:
            cells[-1][-1] += ","
            cells[-1].append(f"{bits:.4f} bits a byte")
        if loss > uniform:
            note = f" (a uniform guess: {uniform:.4f} nats){note}"
        notes.append(note)
    return "\n".join((line + note).rstrip() for line, note in zip(align(cells), notes))


def align(lines: list[list[str]]) -> list[str]:
    """The cells of each line, side by side in columns."""
    columns = zip_longest(*lines, fillvalue="")
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return [" ".join(line) for line in zip(*padded)]
