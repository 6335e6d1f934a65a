"""What `train.py --plain` shares with a train.Run, whose directory it has: the flags that it
refuses, what its checkpoints hold besides tensors, and how its log begins."""
import dataclasses
import socket
from pathlib import Path

from amp import make_scaler
from base.errors import RunError
from base.flops import parameter_count
from base.options import SHAPE, Config
from base.processes import all_ranks, print_rank0
from data import TokenDataset
from model import GPTConfig
from runtime import checks, console, run_state
from runtime.directory import Metrics, Start, find_start
from runtime.divergence import DivergenceMonitor
from runtime.evaluation import describe_data

# The flags that --plain takes. A run that it continues may have had others. They are ignored.
FLAGS = {"plain", "data", "out", "model", *SHAPE, "batch_size", "steps", "epochs", "lr",
         "min_lr_ratio", "warmup_steps", "lr_schedule", "decay_ratio", "weight_decay", "beta1",
         "beta2", "clip", "seed", "device", "dtype", "save_every", "keep", "eval_every",
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
    if set("=,") & set(given.get("data", "")) and not Path(given["data"]).is_dir():
        raise ValueError("--plain reads one directory, not a mixture: drop --plain, or give one "
                         "directory")


def read_config(given: dict) -> tuple[Config, GPTConfig, Start]:
    """The config and the model of a run with the flags `given`, and where it begins. Raises
    RunError if the plain forms cannot train it."""
    begin = find_start(Path(given.get("out", Config.out)))
    if begin.path is not None and begin.path.is_dir():
        raise RunError(f"--plain reads files, and {begin.path} is a folder: drop --plain, or make "
                       f"a file of it, `python -m tools.checkpoint {begin.path} NEW/latest.pt`, "
                       f"and give --out NEW", 2)
    config, model_config = all_ranks(lambda: checks.validate(
        given, begin.state, world=1, device_type="cpu", file=begin.path))
    train_data, val_data = (TokenDataset(config.data, split, model_config.seq_len)
                            for split in ("train", "val"))
    if train_data.has_conversations:
        raise RunError(f"--plain reads text, and {config.data} has conversations: drop --plain, or "
                       f"give another --data", 2)
    if getattr(model_config, "balance_bias", 0) > 0:
        raise RunError(f"--plain moves no bias of a router, and this model has --balance-bias "
                       f"{model_config.balance_bias:g}: drop --plain, or give --balance-bias 0 in "
                       f"a new run", 2)
    if begin.state is not None:
        check_continues(begin.state, config)
    else:
        rows = min(train_data.meta["vocab_size"], model_config.vocab_size)
        for data in (train_data, val_data):         # for tokens beyond the vocabulary
            all_ranks(lambda: data.mixture.check(rows, part=0, parts=1))
    facts = run_state.make_facts(config, model_config, train_data, begin.run,
                                 make_scaler(config.dtype), DivergenceMonitor())    # a new one
    return config, model_config, begin._replace(facts=facts)


def check_continues(state: dict, config: Config) -> None:
    """Raise RunError unless every step of the run so far has read one batch of --batch-size
    sequences of the same data, as the steps to come will do."""
    default = Config()
    for name in CHANGE_THE_BATCH:
        if getattr(config, name) != getattr(default, name):
            raise RunError(f"this run has --{name.replace('_', '-')}, which --plain has not: drop "
                           f"--plain", 2)
    stored = state["config"]["batch_size"]
    if config.batch_size != stored:
        raise RunError(f"this run has --batch-size {stored}, not {config.batch_size}: give "
                       f"--batch-size {stored}, or drop --plain", 2)
    consumed = state["step"] * config.batch_size
    if state["consumed_samples"] != consumed or state["monitor"].get("excluded"):
        raise RunError("this run has left out sequences, or had another --batch-size, which "
                       "--plain cannot continue: drop --plain", 2)
    if len(state["data"]) > 1:
        raise RunError("this run has read a mixture, or other data before, which --plain cannot "
                       "continue: drop --plain", 2)


def open_metrics(config: Config, model_config: GPTConfig, begin: Start) -> Metrics:
    """Open metrics.jsonl. Write how the run begins, and print it."""
    metrics = all_ranks(lambda: Metrics(Path(config.out)))
    val_data = TokenDataset(config.data, "val", model_config.seq_len)
    print_rank0(f"model    {parameter_count(model_config):,} parameters, {config.dtype}; "
                f"{config.data} -> {config.out}")
    event = dict(event="start")
    if begin.state is not None:
        for damaged in begin.events:
            metrics.write(**damaged, step=begin.step)
        changed = console.changed_flags(config, begin.state)
        event = dict(event="resume", path=str(begin.path), changed=changed)
        print_rank0(", ".join([f"resume   {begin.path}, after step {begin.step}",
                               *console.describe(changed)]))
    metrics.write(**event, step=begin.step, config=dataclasses.asdict(config),
                  data=describe_data(val_data, config, model_config),
                  environment=console.environment([socket.gethostname()]))
    return metrics
