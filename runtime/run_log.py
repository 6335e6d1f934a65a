"""The log of a run: each step is a row of metrics.jsonl, and some are a line on the console.
console.py prints the rest.
"""
import math
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch

from base.agreement import print_rank0
from base.batch_ramp import sequences_after
from base.flops import flops_per_token, peak_flops
from base.options import Config
from data import Batch, TokenDataset
from model import GPTConfig, ceil_div
from runtime.directory import Metrics
from runtime.evaluation import eval_sequences, perplexity
from runtime.run_state import Progress
from runtime.step_stats import StepStats

LINES = 50                      # of steps on the console in a run, about


@dataclass
class RunLog:
    """What a run reports: metrics.jsonl, complete, and a selection of it on the console."""
    metrics: Metrics
    config: Config
    val_data: TokenDataset
    model_config: GPTConfig
    device: torch.device
    world: int
    # of a sequence, in the last steps
    recent_seconds: deque = field(default_factory=partial(deque, maxlen=20))
    step_ended_at: float = 0.0          # in seconds, as the others
    evaluation_seconds: float | None = None     # of the last evaluation
    save_seconds: float = 0.0           # how long training waited for the last save
    beats_a_uniform_guess: bool = True  # the last evaluation
    printed_at: float | None = None     # when a step's line was last printed
    shown_at: float = -math.inf         # when that or the line of a terminal was

    def event(self, kind: str, line: str | None = None, **fields) -> None:
        """Write an event to metrics.jsonl and, if there is one, its line to the console."""
        self.metrics.write(event=kind, **fields)
        if line is not None:
            print_rank0(line)

    def report_step(self, batch: Batch, stats: StepStats, lr: float, seconds: float,
                    progress: Progress) -> dict:
        """Print a step that took `seconds`, and return its row of metrics.jsonl. In it `skipped`
        says how many steps in a row, this one the last, have had no update."""
        row = dict(
            step=batch.step, loss=stats.loss, lr=lr,
            tokens=progress.batches.sequences_trained * self.model_config.seq_len,
            batch_size=batch.size, grad_norm=stats.grad_norm, loss_scale=stats.loss_scale,
            activation_norm=stats.activation_norm,
            tokens_per_second=round(batch.num_tokens / seconds, 1), **stats.expert_loads,
            skipped=progress.monitor.skipped)
        self.print_step(row, seconds / batch.size)
        return row

    def print_step(self, row: dict, seconds: float) -> None:
        """Print the line of a step, which took so many seconds for each sequence: with --log-every
        N each N-th, otherwise the first and about LINES in the run, at most one a second; always
        the last and those of evaluations. A terminal shows beside these how far the run has come,
        in a line that the next one replaces."""
        config, step = self.config, row["step"]
        self.recent_seconds.append(seconds)
        self.step_ended_at = now = time.monotonic()
        if config.log_every is not None:
            is_due = step % config.log_every == 0
        else:
            is_due = self.printed_at is None or (
                now - self.printed_at >= 1 and step % ceil_div(config.steps, LINES) == 0)
        if is_due or config.is_nth_or_last(step, config.eval_every):
            print_rank0(self.format_step(row, self.time_left(row)))
            self.printed_at = self.shown_at = now
        elif now - self.shown_at >= 1 and sys.stdout is not None and sys.stdout.isatty():
            self.shown_at = now
            print_rank0(f"step {step}/{config.steps}  loss {row['loss']:.4f}  "
                        f"left {self.time_left(row)}\x1b[K", end="\r")

    def time_left(self, row: dict) -> timedelta:
        """The time of the sequences that are left to train, by the median of the last steps, and of
        the evaluations and saves that are left, each as long as the last one. Before there was one,
        a save counts nothing, and an evaluation is guessed: forward is about a third of a step. At
        first in a ramp it is too long, for a small model 1.6 times: what a step costs beside its
        sequences is not known yet."""
        config, step = self.config, row["step"]
        trained = row["tokens"] // self.model_config.seq_len
        sequences = sequences_after(config, trained, config.steps - step) - trained
        of_sequence = statistics.median_low(self.recent_seconds)
        of_evaluation = self.evaluation_seconds
        if of_evaluation is None:
            of_evaluation = evaluated_sequences(config, self.val_data) * of_sequence / 3
        return timedelta(seconds=round(
            sequences * of_sequence
            + times_due(step, config.steps, config.eval_every) * of_evaluation
            + times_due(step, config.steps, config.save_every) * self.save_seconds))

    def write_row(self, row: dict) -> None:
        """Write a step's row to metrics.jsonl, and its evaluation also to the console."""
        self.metrics.write(**row)
        if "val_loss" in row:
            self.evaluation_seconds = time.monotonic() - self.step_ended_at
            self.beats_a_uniform_guess = row["val_loss"] <= math.log(self.model_config.vocab_size)
            print_rank0(format_eval(row, self.config, self.model_config, self.val_data))

    def format_step(self, row: dict, left: timedelta) -> str:
        """The console's line of a step."""
        config = self.config
        line = (f"step {row['step']:>{len(str(config.steps))}}/{config.steps}  "
                f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.3f}  "
                f"{row['tokens_per_second']:,.0f} tok/s")
        if config.batch_ramp is not None:
            line += f"  batch {row['batch_size']}"
        if config.dtype == "fp16":
            line += f"  scale {row['loss_scale']:g}"
        if self.device.type == "cuda" and config.dtype in ("bf16", "fp16"):
            peak = self.world * peak_flops(torch.cuda.get_device_name(self.device))
            if peak > 0:
                flops = row["tokens_per_second"] * flops_per_token(self.model_config)
                line += f"  MFU {flops / peak:.1%}"
        line += f"  left {left}"
        if row["skipped"] > 0:
            line += "  skipped: loss or gradient not finite, or out of range"
        return line


def times_due(step: int, steps: int, n: int) -> int:
    """How many of the steps from `step` to the last are a multiple of n (0: none is), or the last
    one."""
    return 1 if n == 0 else 1 + (steps - 1) // n - (step - 1) // n


def evaluated_sequences(config: Config, data: TokenDataset) -> int:
    """How many sequences an evaluation reads."""
    return sum(eval_sequences(config, data.seq_len, source.n_windows)
               for source in data.mixture.sources.values())


def format_eval(row: dict, config: Config, model_config: GPTConfig, data: TokenDataset) -> str:
    """The validation loss in three units; of several sources also a line for each."""
    count = evaluated_sequences(config, data)
    read = f"{count * data.seq_len:,} of {data.n_tokens:,} tokens"
    if data.has_conversations:
        read = f"{count:,} of {data.n_windows:,} windows"
    names = {"": "validation:"}         # {what ends the keys of its numbers: name}
    if len(data.mixture.sources) > 1:
        names |= {f"/{source.name}": f"  {source.name}:"
                  for source in data.mixture.sources.values()}
    uniform = math.log(model_config.vocab_size)
    lines = []
    for key, name in names.items():
        loss = row["val_loss" + key]
        lines.append(f"{name} {in_units(loss, row.get('bits_per_byte' + key))}")
        if loss > uniform:
            lines[-1] += f" (worse than a uniform guess: {uniform:.4f} nats)"
    lines[0] += f" (on {read})"
    return "\n".join(lines)


def in_units(loss: float, bits: float | None) -> str:
    """A loss in nats a token, as perplexity and, if it is known, in `bits` a byte."""
    value = perplexity(loss)
    text = f"{loss:.4f} nats a token, perplexity {value:{'.2f' if value < 1e4 else '.3g'}}"
    return text if bits is None else f"{text}, {bits:.4f} bits a byte"
