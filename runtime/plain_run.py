"""What `train.py --plain` needs besides training: what it refuses, and its log, checkpoints and end
as those of a train.Run.

The directory of a plain run is that of any other run: either continues what the other has saved.
"""
import math
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator

import torch

from amp import make_scaler
from base.checkpoint_files import remove_old, step_file
from base.disk import first_cause
from base.errors import RunError, out_of_memory
from base.options import SHAPE, Config
from base.processes import all_ranks
from data import TokenDataset
from model import GPTConfig
from parallelism.build import Grid
from runtime import console, run_state
from runtime.directory import Metrics, Start
from runtime.divergence import STATISTICS, DivergenceMonitor
from runtime.evaluation import bits_per_byte
from runtime.run_log import RunLog
from runtime.signals import StopSignal, exit_like_signal

# The flags that --plain takes. A run that it continues may have had others. They are ignored.
FLAGS = {"plain", "data", "out", "model", *SHAPE, "batch_size", "steps", "epochs", "lr",
         "min_lr_ratio", "warmup_steps", "lr_schedule", "decay_ratio", "weight_decay", "beta1",
         "beta2", "clip", "seed", "device", "dtype", "save_every", "keep", "resume", "eval_every",
         "eval_tokens", "log_every"}
CHANGE_THE_BATCH = ("dropout", "batch_ramp", "skip_steps")      # but not these


def check_flags(given: dict, world: int) -> None:
    """Raise ValueError unless --plain has all flags that were given."""
    if world > 1:
        raise ValueError(f"--plain is for one process, not {world}: drop --plain, or start without "
                         f"torchrun")
    if set(given) - FLAGS:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(set(given) - FLAGS))
        raise ValueError(f"--plain has no {names}: drop one or the other")
    if given.get("dtype") in ("bf16", "fp16"):
        raise ValueError(f"--plain has no --dtype {given['dtype']}: give fp32 or fp64, or drop "
                         f"--plain")
    if given.get("resume", "auto") not in ("auto", "never"):
        raise ValueError("--plain has no --resume FILE: give auto or never, or drop --plain")
    if set("=,") & set(given.get("data", "")) and not Path(given["data"]).is_dir():
        raise ValueError("--plain reads one directory, not a mixture: drop --plain, or give one "
                         "directory")


def check_file(begin: Start) -> None:
    """Raise RunError if the run would continue from a folder."""
    if begin.path is not None and begin.path.is_dir():
        raise RunError(f"--plain reads files, and {begin.path} is a folder: drop --plain, or make "
                       f"a file of it, `python -m tools.checkpoint {begin.path} NEW/latest.pt`, "
                       f"and give --out NEW", 2)


def check_model(config: Config, model_config: GPTConfig, train_data: TokenDataset) -> None:
    """Raise RunError unless the plain forms can train this model on these data."""
    if train_data.has_conversations:
        raise RunError(f"--plain reads text, and {config.data} has conversations: drop --plain, or "
                       f"give another --data", 2)
    if getattr(model_config, "balance_bias", 0) > 0:
        raise RunError(f"--plain moves no bias of a router, and this model has --balance-bias "
                       f"{model_config.balance_bias:g}: drop --plain, or give --balance-bias 0 in "
                       f"a new run", 2)


def check_continues(loaded: dict, config: Config) -> None:
    """Raise RunError unless every step of the run so far has read one batch of --batch-size
    sequences, as the steps to come will do."""
    default = Config()
    for name in CHANGE_THE_BATCH:
        if getattr(config, name) != getattr(default, name):
            raise RunError(f"this run has --{name.replace('_', '-')}, which --plain has not: drop "
                           f"--plain", 2)
    stored = loaded["config"]["batch_size"]
    if config.batch_size != stored:
        raise RunError(f"this run has --batch-size {stored}, not {config.batch_size}: give "
                       f"--batch-size {stored}, or drop --plain", 2)
    consumed = loaded["step"] * config.batch_size
    if loaded["consumed_samples"] != consumed or loaded["monitor"].get("excluded"):
        raise RunError("this run has left out sequences, or had another --batch-size, which "
                       "--plain cannot continue: drop --plain", 2)


class PlainRun:
    """A plain run beside its training. Log, console and checkpoints take it for a train.Run, whose
    names it has.

    finished_step   the last finished step
    seconds         the time that the step took; `steps` sets it
    stopping        whether a signal ends the run after this step; `log_step` sets it
    """

    def __init__(self, config: Config, model_config: GPTConfig, device: torch.device, begin: Start,
                 loaded: dict | None, train_data: TokenDataset, val_data: TokenDataset,
                 learning_rate: Callable):
        """`loaded` are the entries of the checkpoint with which it continues, or None."""
        check_model(config, model_config, train_data)
        if loaded is not None:
            check_continues(loaded, config)
        self.config, self.model_config, self.device = config, model_config, device
        self.begin, self.loaded = begin, loaded
        self.train_data, self.val_data = train_data, val_data
        self.learning_rate = learning_rate
        self.grid = Grid(1, 1, 1)
        self.identity = begin.run
        self.finished_step = 0 if loaded is None else loaded["step"]
        self.optimizer_steps = 0        # plain_save takes the number from Adam
        self.scaler = make_scaler(config.dtype)
        self.divergence = DivergenceMonitor.restored(loaded, config, train_data)
        # The losses of the steps to come are not judged. What the run could go back to stays.
        for name in STATISTICS:
            setattr(self.divergence, name, getattr(DivergenceMonitor(), name))

    @property
    def step(self) -> int:
        return self.finished_step + 1

    @property
    def batches(self) -> SimpleNamespace:
        """The position in the data, as that of a data.Batches."""
        sequences = self.finished_step * self.config.batch_size
        return SimpleNamespace(consumed=sequences, sequences_trained=sequences)

    def steps(self, training: Iterator, stack: ExitStack) -> Iterator[tuple[int, float, float]]:
        """The number, the loss and the gradient norm of each step, which `training` makes. After a
        signal the process ends by it: the step in progress is the last. Raises RunError if the
        norm is not finite."""
        if self.step > self.config.steps:
            console.print_finished(self, self.loaded, self.begin)
            return
        self.log = RunLog(all_ranks(lambda: Metrics(Path(self.config.out), rank=0)))
        console.report_begin(self, self.loaded, self.begin)
        self.stop = stack.enter_context(StopSignal())
        start = time.perf_counter()
        for loss, norm in training:
            self.seconds = time.perf_counter() - start
            self.log.end_step(self.seconds, self.config.batch_size)
            self.finished_step += 1
            if not math.isfinite(norm):
                raise RunError(f"step {self.finished_step} has loss {loss} and gradient norm "
                               f"{norm}: lower --lr")
            yield self.finished_step, loss, norm
            if self.stopping:
                console.report_stop(self)
                exit_like_signal(self.stop.number)
            start = time.perf_counter()
        console.report_end(self)

    def log_step(self, row: dict) -> None:
        """Write the row of a step to metrics.jsonl, and print what a Run prints of it. A signal
        that has come by now ends the run after this step."""
        self.stopping = self.stop.number is not None and self.step <= self.config.steps
        tokens = self.config.batch_size * self.model_config.seq_len         # of a step
        row |= dict(tokens=self.finished_step * tokens, batch_size=self.config.batch_size,
                    loss_scale=1.0, skipped=0, tokens_per_second=round(tokens / self.seconds, 1))
        if "val_loss" in row:
            row["bits_per_byte"] = bits_per_byte(row["val_loss"],
                                                 self.val_data.meta["bytes_per_token"])
        self.log.print_step(self, row)
        self.log.write_row(self, row)

    @contextmanager
    def saving(self):
        """The block saves a checkpoint of this step with the facts that it is given. If it cannot
        write, remove what it wrote and raise RunError. Then remove the checkpoints that neither
        --keep nor a rollback of a later Run needs."""
        out = Path(self.config.out)
        # is_start: a Run that continues may go back to this file. Its loss was finite.
        run_state.judge_checkpoint(self, is_start=True)
        try:
            yield run_state.facts_of(self)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                (out / "step.pt.tmp").unlink(missing_ok=True)       # give its space back
            if out_of_memory(error):
                raise
            raise RunError(f"a checkpoint could not be written: {first_cause(error)}; "
                           f"earlier checkpoints, if any, are untouched") from error
        named = {file for _, file, _ in self.divergence.checkpoints}
        remove_old(step_file(out, self.finished_step), self.config.keep, named)
