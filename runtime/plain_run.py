"""What `train.py --plain` needs beside training: where a run begins, what it cannot continue, and
the folder that it writes, as a train.Run does."""
import dataclasses
import socket
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable

import torch

from amp import make_scaler
from base.agreement import all_ranks, print_rank0
from base.commandline import flag_name
from base.errors import refuse, warn
from base.flops import parameter_count
from base.options import Config
from base.processes import Job
from model import GPTConfig
from runtime import run_state, startup
from runtime.console import print_finished, report_begin, report_end, tokens_in_words
from runtime.directory import Metrics
from runtime.divergence import DivergenceMonitor
from runtime.run_log import RunLog

OF_OTHERS = ("dropout", "batch_ramp", "skip_steps")


def begin(given: dict, job: Job, device: torch.device,
          stack: ExitStack, learning_rate: Callable) -> tuple[Config, GPTConfig, "OutputFolder"]:
    """The config and the model of a run with the flags `given`, and its folder, which `stack`
    unlocks. Raises RunError if the plain program cannot train it."""
    config, model_config, start = startup.prepare(given, job, device, stack)
    train_data, val_data = startup.open_data(config, model_config, start.state, job)
    bias = getattr(model_config, "balance_bias", 0)
    problems = [
        (train_data.has_conversations,
         f"--plain reads text, and {config.data} has conversations: drop --plain, or give another "
         f"--data"),
        (bias > 0,
         f"--plain moves no bias of a router, and this model has --balance-bias {bias:g}: drop "
         f"--plain, or give --balance-bias 0 in a new run")]
    problems += [(getattr(config, name) != getattr(Config(), name),
                  f"this run has {flag_name(name)}, which --plain does not have: drop --plain")
                 for name in OF_OTHERS]
    if start.state is not None:
        # It continues only a run whose steps have each read one batch of this size and data.
        state, stored = start.state, start.state["config"]["batch_size"]
        problems += [
            (config.batch_size != stored,
             f"this run has --batch-size {stored}, not {config.batch_size}: give --batch-size "
             f"{stored}, or drop --plain"),
            (state["consumed_samples"] != state["step"] * stored
             or state["monitor"].get("excluded"),
             "this run has left out sequences, or had another --batch-size, which --plain cannot "
             "continue: drop --plain"),
            (len(state["data"]) > 1,
             "this run has read a mixture, or other data before, which --plain cannot continue: "
             "drop --plain")]
    all_ranks(lambda: refuse(problems))
    facts = run_state.make_facts(config, model_config, train_data, start.run,
                                 make_scaler(config.dtype), DivergenceMonitor())    # a new one
    out = OutputFolder(config, model_config.seq_len, start.path, facts, start.step)
    if start.step >= config.steps:
        print_finished(start, config)
    else:
        metrics = all_ranks(lambda: Metrics(Path(config.out)))
        out.log = RunLog(metrics, config, val_data, model_config, torch.device("cpu"), world=1)
        print_rank0(f"model    {parameter_count(model_config):,} parameters, {config.dtype}; "
                    f"{tokens_in_words(train_data)} in {config.data} -> {config.out}")
        report_begin(out.log, start, train_data, [socket.gethostname()], learning_rate)
    micro_batch = given.get("micro_batch")      # the default is for a train.Run
    return dataclasses.replace(config, micro_batch=micro_batch), model_config, out


@dataclasses.dataclass
class OutputFolder:
    """The folder --out of a plain run, with its checkpoints and metrics.jsonl."""
    config: Config
    seq_len: int
    checkpoint: Path | None         # from which the run begins; None: a new run
    of_all: dict                    # what all checkpoints hold besides tensors
    finished_step: int              # the last one
    log: RunLog | None = None       # unless the run has no step to make

    def report_step(self, step: int, loss: float, norm: float, lr: float, seconds: float) -> dict:
        """Print a step that took `seconds`, and return its row of metrics.jsonl."""
        config = self.config
        self.finished_step = step
        tokens = config.batch_size * self.seq_len
        row = dict(step=step, tokens=step * tokens, loss=loss, grad_norm=norm, lr=lr,
                   loss_scale=1.0, tokens_per_second=tokens / seconds)
        self.log.print_step(row | dict(skipped=0), seconds / config.batch_size)
        return row

    @contextmanager
    def outlive_failed_save(self, is_last: bool):
        """A save in the block that fails costs a warning, unless it is the last one of the run."""
        began = time.monotonic()
        try:
            yield
        except OSError as error:
            if is_last:
                raise
            warn(f"{error}; earlier checkpoints, if any, are untouched")
        self.log.save_seconds = time.monotonic() - began

    def facts(self, step: int) -> dict:
        """What the checkpoint of this step holds besides tensors."""
        consumed = step * self.config.batch_size
        return self.of_all | dict(step=step, tokens=consumed * self.seq_len,
                                  consumed_samples=consumed)

    def report_end(self) -> None:
        """Tell how a run with steps has ended: by a signal, or after its last step."""
        if self.log is not None:
            # Its checkpoints are files, also where the run that it continues had folders.
            config = dataclasses.replace(self.config, checkpoint_format="file")
            report_end(self.log, self.finished_step, config, self.of_all)
