"""What `train.py --plain` needs besides training: what it refuses, what its checkpoints hold
besides tensors, its log, and its end by a signal. train.plain_launch makes a `PlainRun`, and
runtime/startup.py calls `check_flags`.

The directory of a plain run is that of any other run: either continues what the other has saved.
"""
import dataclasses
import math
import shlex
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Iterator

import checkpoint
from amp import make_scaler
from base.checkpoint_files import remove_old, step_file, what_is_left
from base.flops import parameter_count
from base.options import SHAPE, Config
from base.processes import RunError, all_ranks, print_rank0
from base.retries import first_cause
from data import TokenDataset
from model import GPTConfig, ceil_div
from parallelism.collectives import out_of_memory
from runtime.console import changed_flags, describe, environment
from runtime.directory import Metrics, Start
from runtime.divergence import STATISTICS, DivergenceMonitor
from runtime.evaluation import bits_per_byte, describe_data
from runtime.run_log import time_left
from runtime.signals import StopSignal, exit_like_signal

# The flags that --plain takes. A run that it continues may have had others. They are ignored.
FLAGS = {"plain", "data", "out", "model", *SHAPE, "batch_size", "steps", "epochs", "lr",
         "min_lr_ratio", "warmup_steps", "lr_schedule", "decay_ratio", "weight_decay", "beta1",
         "beta2", "clip", "seed", "device", "dtype", "save_every", "keep", "resume", "eval_every",
         "eval_tokens", "log_every"}
CHANGE_THE_BATCH = ("dropout", "batch_ramp", "skip_steps")      # but not these
LINES = 50                      # of steps on the console in a run, about


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


# ---- What a checkpoint holds besides tensors -------------------------------------------------

def facts_at_start(loaded: dict | None, config: Config, model_config: GPTConfig, begin: Start,
                   train_data: TokenDataset) -> dict:
    """What the run's checkpoints hold besides tensors, at its start. `loaded` are the entries of
    the checkpoint with which it continues, of any layout, or None. Raises RunError if the plain
    forms cannot continue it."""
    if train_data.has_conversations:
        raise RunError(f"--plain reads text, and {config.data} has conversations: drop --plain, or "
                       f"give another --data", 2)
    if getattr(model_config, "balance_bias", 0) > 0:
        raise RunError(f"--plain moves no bias of a router, and this model has --balance-bias "
                       f"{model_config.balance_bias:g}: drop --plain, or give --balance-bias 0 in "
                       f"a new run", 2)
    if loaded is None:
        facts = dict(format=checkpoint.FORMAT, run=begin.run, step=0,
                     model=dataclasses.asdict(model_config))
        monitor = DivergenceMonitor()
    else:
        check_continues(loaded, config)
        facts = loaded
        monitor = DivergenceMonitor.restored(loaded, config, train_data)
        # The losses of the steps to come are not judged. What the run could go back to stays.
        for name in STATISTICS:
            setattr(monitor, name, getattr(DivergenceMonitor(), name))
    facts.update(data=train_data.mixture.phases, monitor=dataclasses.asdict(monitor),
                 tokenizer=train_data.meta["tokenizer"])
    return facts | {key: train_data.meta[key] for key in checkpoint.OPTIONAL
                    if key in train_data.meta}


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


# ---- The run ----------------------------------------------------------------------------------

class PlainRun:
    """A plain run beside its training.

    step        the last finished step
    facts       what its checkpoints hold besides tensors: the step, the flags, the data ...
    seconds     the time that the step took; `steps` sets it
    metrics     directory.Metrics: metrics.jsonl; `start` sets it
    stop        signals.StopSignal; `steps` sets it
    stopping    whether a signal ends the run after this step; `log` sets it
    """

    def __init__(self, config: Config, model_config: GPTConfig, begin: Start, loaded: dict | None,
                 train_data: TokenDataset, val_data: TokenDataset):
        """`loaded` are the entries of the checkpoint with which it continues, or None."""
        self.config, self.model_config, self.begin = config, model_config, begin
        self.val_data = val_data
        self.facts = facts_at_start(loaded, config, model_config, begin, train_data)
        self.step = self.facts["step"]

    def print_finished(self) -> None:
        print_rank0(f"{self.begin.path} is step {self.step} of {self.config.steps}: nothing left "
                    f"to do; raise --steps to continue, or begin a new run in another --out")

    def start(self) -> None:
        """Write the event of a start or a resume."""
        config, model_config, begin, step = self.config, self.model_config, self.begin, self.step
        self.metrics = all_ranks(lambda: Metrics(Path(config.out), rank=0))
        print_rank0(f"model    {parameter_count(model_config):,} parameters\n"
                    f"data     {config.data}, {config.batch_size} sequences of "
                    f"{model_config.seq_len} tokens in a step")
        event = dict(event="start")
        if step > 0:
            changed = changed_flags(config, self.facts)
            event = dict(event="resume", path=str(begin.path), given=begin.given, changed=changed)
            print_rank0(", ".join([f"resume   {begin.path}, after step {step}",
                                   *describe(changed)]))
        for damaged in begin.events:
            self.metrics.write(**damaged, step=step)
        self.metrics.write(**event, step=step, config=dataclasses.asdict(config),
                           data=describe_data(self.val_data, config, model_config),
                           environment=environment([socket.gethostname()]))

    def steps(self, training: Iterator, stack: ExitStack) -> Iterator[tuple[int, float, float]]:
        """The number, the loss and the gradient norm of each step, which `training` makes. After a
        signal the process ends by it: the step in progress is the last. Raises RunError if the
        norm is not finite."""
        if self.step >= self.config.steps:
            self.print_finished()
            return
        self.start()
        self.stop = stack.enter_context(StopSignal())
        start = time.perf_counter()
        for loss, norm in training:
            self.seconds = time.perf_counter() - start
            self.step += 1
            if not math.isfinite(norm):
                raise RunError(f"step {self.step} has loss {loss} and gradient norm {norm}: lower "
                               f"--lr")
            yield self.step, loss, norm
            if self.stopping:
                self.end_by_signal()
            start = time.perf_counter()
        self.end()

    def log(self, row: dict) -> None:
        """Write the row of a step to metrics.jsonl. Print some of the rows. A signal that has come
        by now ends the run after this step."""
        config, step = self.config, self.step
        self.stopping = self.stop.number is not None and step < config.steps
        tokens = config.batch_size * self.model_config.seq_len          # of a step
        speed = tokens / self.seconds
        row |= dict(tokens=step * tokens, batch_size=config.batch_size, loss_scale=1.0,
                    tokens_per_second=round(speed, 1))
        if config.is_due(step, config.log_every or ceil_div(config.steps, LINES)):
            print_rank0(f"step {step}/{config.steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
                        f"norm {row['grad_norm']:.3f}  {speed:,.0f} tok/s  "
                        f"left {time_left(config.steps - step, self.seconds)}")
        if "val_loss" in row:
            bits = bits_per_byte(row["val_loss"], self.val_data.meta["bytes_per_token"])
            row["bits_per_byte"] = bits
            in_bits = "" if bits is None else f", {bits:.4f} bits a byte"
            print_rank0(f"validation: {row['val_loss']:.4f} nats a token{in_bits}")
        self.metrics.write(**row)

    @contextmanager
    def saving(self):
        """The block saves a checkpoint of this step with the facts that it is given. If it cannot
        write, remove what it wrote and raise RunError. Then remove the checkpoints that neither
        --keep nor a rollback of a later Run needs."""
        out = Path(self.config.out)
        self.update_facts()
        try:
            yield self.facts
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                (out / "step.pt.tmp").unlink(missing_ok=True)       # give its space back
            if out_of_memory(error):
                raise
            raise RunError(f"a checkpoint could not be written: {first_cause(error)}; "
                           f"{what_is_left(out)}") from error
        named = {file for _, file, _ in self.facts["monitor"]["checkpoints"]}
        remove_old(step_file(out, self.step), self.config.keep, named)

    def update_facts(self) -> None:
        """Set what changes from one checkpoint to the next, for the one after this step."""
        config, step = self.config, self.step
        consumed = step * config.batch_size
        monitor = DivergenceMonitor(**self.facts["monitor"])
        file = step_file(Path(config.out), step).name
        # is_start: a Run that continues may go back to this file. Its loss was finite.
        monitor.add_checkpoint(step, file, config.keep, scheduled=True, at_floor=False,
                               is_start=True)
        self.facts.update(
            step=step, consumed_samples=consumed, tokens=consumed * self.model_config.seq_len,
            config=dataclasses.asdict(config), scaler=make_scaler(config.dtype).state_dict(),
            monitor=dataclasses.asdict(monitor))

    def end_by_signal(self) -> None:
        """End the process by the signal that it got, after the save of this step."""
        self.metrics.write(event="stop", step=self.step)
        print_rank0(f"stopped and saved after step {self.step}; run the same command to continue")
        exit_like_signal(self.stop.number)

    def end(self) -> None:
        """The event of a run that has made all steps, and a line: how to sample."""
        self.metrics.write(event="end", step=self.config.steps)
        file = shlex.quote(f"{self.config.out}/latest.pt")
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}")
