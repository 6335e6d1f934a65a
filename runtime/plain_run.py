"""What `train.py --plain` needs besides training: what it refuses, what its checkpoints hold
besides tensors, its log, and its end by a signal. train.plain_launch calls the functions here, and
runtime/startup.py calls `check_flags`.

The directory of a plain run is that of any other run: either continues what the other has saved.
"""
import dataclasses
import shlex
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import checkpoint
from amp import make_scaler
from data import TokenDataset
from model import GPTConfig, ceil_div
from runtime.checkpoint_files import first_cause, remove_old, step_file, what_is_left
from runtime.console import changed_flags, describe, environment, time_left
from runtime.directory import Metrics, Start
from runtime.divergence import STATISTICS, DivergenceMonitor
from runtime.evaluation import bits_per_byte, describe_data
from runtime.flops import parameter_count
from runtime.options import SHAPE, Config
from runtime.processes import RunError, print_rank0
from runtime.signals import exit_like_signal

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


# ---- What a checkpoint holds besides tensors --------------------------------------------------

def new_facts(config: Config, model_config: GPTConfig, begin: Start) -> dict:
    """What the checkpoints of a new run hold, at step 0. Raises RunError for data that the plain
    forms cannot read."""
    facts = dict(format=checkpoint.FORMAT, run=begin.run, model=dataclasses.asdict(model_config),
                 monitor=dataclasses.asdict(DivergenceMonitor()), step=0)
    take_data(facts, config, model_config)
    return facts


def continue_facts(facts: dict, config: Config, model_config: GPTConfig) -> None:
    """Continue those of a checkpoint, of whichever layout. Raises RunError unless the plain forms
    continue where it is in its data."""
    monitor = facts["monitor"]
    default = Config()
    changed = [name for name in CHANGE_THE_BATCH
               if getattr(config, name) != getattr(default, name)]
    if changed:
        raise RunError(f"this run has --{changed[0].replace('_', '-')}, which --plain has not: "
                       f"drop --plain", 2)
    stored = facts["config"]["batch_size"]
    if facts["step"] > 0 and config.batch_size != stored:
        raise RunError(f"this run has --batch-size {stored}, not {config.batch_size}: give "
                       f"--batch-size {stored}, or drop --plain", 2)
    if facts["consumed_samples"] != facts["step"] * config.batch_size or monitor["excluded"]:
        raise RunError("this run has left out sequences, or had another --batch-size, which "
                       "--plain cannot continue: drop --plain", 2)
    # The losses of the steps to come are not judged. What the run could go back to stays.
    fresh = dataclasses.asdict(DivergenceMonitor())
    facts["monitor"] = monitor | {name: fresh[name] for name in STATISTICS}
    take_data(facts, config, model_config)


def update_facts(facts: dict, config: Config, model_config: GPTConfig, step: int) -> None:
    """Set what changes from one checkpoint to the next, for the one after `step`."""
    consumed = step * config.batch_size
    facts.update(step=step, consumed_samples=consumed, tokens=consumed * model_config.seq_len,
                 config=dataclasses.asdict(config), scaler=make_scaler(config.dtype).state_dict())
    monitor = DivergenceMonitor(**facts["monitor"])
    file = step_file(Path(config.out), step).name       # a Run that continues may go back to it
    monitor.add_checkpoint(step, file, config.keep, scheduled=True, at_floor=False, is_start=True)
    facts["monitor"] = dataclasses.asdict(monitor)


def take_data(facts: dict, config: Config, model_config: GPTConfig) -> None:
    """Set what the checkpoints say of the data. The tokens of data that is new to the run are
    checked."""
    train = TokenDataset(config.data, "train", model_config.seq_len)
    if train.has_conversations:
        raise RunError(f"--plain reads text, and {config.data} has conversations: drop --plain, or "
                       f"give another --data", 2)
    if "data" not in facts:
        try:
            for split in ("train", "val"):
                dataset = TokenDataset(config.data, split, model_config.seq_len)
                dataset.mixture.check(0, 1, model_config.vocab_size)
        except ValueError as error:
            raise RunError(str(error), 2) from None
    facts["data"] = train.mixture.phases
    facts["tokenizer"] = train.meta["tokenizer"]
    facts.update({key: train.meta[key] for key in checkpoint.OPTIONAL if key in train.meta})


@contextmanager
def errors_in_one_line(config: Config):
    """Raise RunError if the block cannot write a checkpoint."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise RunError(f"a checkpoint could not be written: {first_cause(error)}; "
                       f"{what_is_left(Path(config.out))}") from error


def remove_old_checkpoints(facts: dict, config: Config) -> None:
    """Remove old checkpoints, but not those that a run may go back to."""
    named = {file for _, file, _ in facts["monitor"]["checkpoints"]}
    remove_old(Path(config.out), config.keep, named)


# ---- The log, and the end by a signal --------------------------------------------------------

class Log:
    """The rows of metrics.jsonl, and lines of them on the console."""

    def __init__(self, config: Config, model_config: GPTConfig, facts: dict):
        """`facts`: those of the checkpoint with which the run continues, or of step 0."""
        self.config = config
        self.tokens = config.batch_size * model_config.seq_len          # of a step
        self.seconds = 0.0                                              # of the last step
        self.metrics = Metrics(Path(config.out), rank=0)
        val_data = TokenDataset(config.data, "val", model_config.seq_len)
        self.bytes_per_token = val_data.meta["bytes_per_token"]
        print_rank0(f"model    {parameter_count(model_config):,} parameters\n"
                    f"data     {config.data}, {config.batch_size} sequences of "
                    f"{model_config.seq_len} tokens in a step")
        event = dict(event="start", step=facts["step"])
        if facts["step"] > 0:
            changed = changed_flags(config, facts)
            print_rank0(", ".join([f"resume   {config.out}, after step {facts['step']}",
                                   *describe(changed)]))
            event |= dict(event="resume", changed=changed)
        self.metrics.write(**event, config=dataclasses.asdict(config),
                           data=describe_data(val_data, config, model_config),
                           environment=environment([socket.gethostname()]))

    def timed(self, steps: Iterator) -> Iterator:
        """The items of an iterator. `seconds` is the time that it took for the last one."""
        start = time.perf_counter()
        for item in steps:
            self.seconds = time.perf_counter() - start
            yield item
            start = time.perf_counter()

    def write(self, row: dict) -> None:
        """Write the row of a step to metrics.jsonl. Print some of the rows."""
        config, step = self.config, row["step"]
        speed = self.tokens / self.seconds
        row |= dict(tokens=step * self.tokens, batch_size=config.batch_size, loss_scale=1.0,
                    tokens_per_second=round(speed, 1))
        if config.is_due(step, config.log_every or ceil_div(config.steps, LINES)):
            print_rank0(f"step {step}/{config.steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
                        f"norm {row['grad_norm']:.3f}  {speed:,.0f} tok/s  "
                        f"left {time_left(config.steps - step, self.seconds)}")
        if "val_loss" in row:
            bits = bits_per_byte(row["val_loss"], self.bytes_per_token)
            row["bits_per_byte"] = bits
            in_bits = "" if bits is None else f", {bits:.4f} bits a byte"
            print_rank0(f"validation: {row['val_loss']:.4f} nats a token{in_bits}")
        self.metrics.write(**row)

    def end(self) -> None:
        self.metrics.write(event="end", step=self.config.steps)
        file = shlex.quote(f"{self.config.out}/latest.pt")
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}")


class StopAfterStep:
    """Ctrl-C, SIGTERM and a closed terminal. The run ends after the step in progress and its save.
    A second signal ends it at once."""

    def __init__(self):
        self.number = None              # of the first signal
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)            # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    @property
    def received(self) -> bool:
        return self.number is not None

    def receive(self, number: int, frame) -> None:
        if self.received:
            exit_like_signal(number)
        self.number = number
        print_rank0("saving after the step in progress; a second signal ends at once, without "
                    "saving")

    def end(self, log: Log, step: int) -> None:
        """End the process by the signal, after the save of this step."""
        log.metrics.write(event="stop", step=step)
        print_rank0(f"stopped and saved after step {step}; run the same command to continue")
        exit_like_signal(self.number)
