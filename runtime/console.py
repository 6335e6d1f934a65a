"""What a run prints besides its steps: a summary at the start, hints, how it resumes, stops and
ends. train.py and runtime/startup.py call it. run_log.py prints the steps and evaluations.
"""
import dataclasses
import math
import platform
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import torch

from amp import PRECISIONS
from base.batch_ramp import batch_sizes, sequences_after
from base.checkpoint_files import LATEST
from base.flops import flops_per_token, parameter_count
from base.options import OF_TRAINING, Config, flags_of_writer, restored_flags, step_range
from base.processes import print_rank0
from corpus.tokenizers import is_named
from model import PEAK_LR
from parallelism.buckets import state_bytes
from parallelism.collectives import on_hosts
from parallelism.kernels import multiplies_in_fp32
from runtime import checks
from runtime.directory import Start
from runtime.evaluation import describe_data, evaluate
from runtime.run_log import format_eval

# From how much waiting for a disk on a note says so: seconds, and a fraction of the time between
# two saves.
LEAST_WAIT, LEAST_WAITING = 5.0, 0.05


def print_summary(run) -> None:
    """Print model, layout, memory, batch and data."""
    config, model_config, grid, data = run.config, run.model_config, run.grid, run.train_data
    device = run.device.type
    if multiplies_in_fp32(run.activation_like.dtype, run.device):
        device += f" (multiplies {config.dtype} in fp32)"
    if config.dtype == "fp32" and torch.get_float32_matmul_precision() == "high":
        device += " (multiplies fp32 in TF32)"
    cp = f" x cp {grid.cp}" if grid.cp > 1 else ""
    layout = (f"dp {grid.dp} x pp {grid.pp}{cp} x tp {grid.tp}, {device}, {config.dtype}, "
              f"zero {config.zero}")
    if grid.ep > 1:
        layout += f", ep {grid.ep}"
    if grid.pp > 1:
        layout += f", {config.pp_schedule}"
    if grid.chunks > 1:
        layout += f" in {grid.chunks} chunks"
    for name in ("recompute", "sequence_parallel", "offload", "compile", "exact"):
        if getattr(config, name):
            layout += ", " + name.replace("_", " ")
    num_microbatches = config.batch_size // (grid.dp * config.micro_batch)
    batch = (f"{config.batch_size} sequences = dp {grid.dp} x {num_microbatches} microbatches x "
             f"{config.micro_batch} sequences")
    if config.batch_ramp is not None:
        batch += f", after a ramp {config.batch_ramp}"
    offload = config.offload and run.device.type != "cpu"
    on_device, on_host = state_bytes([(bucket, 1) for bucket in run.flat.buckets],
                                     PRECISIONS[config.dtype], config.zero, offload, config.exact)
    memory = [f"{kind} {size / 1e6:,.1f} MB" for kind, size in on_device.items()]
    memory += [f"host {kind} {size / 1e6:,.1f} MB" for kind, size in on_host.items()]
    trained = run.batches.sequences_trained
    steps_left = config.steps - run.step + 1
    end = run.batches.consumed + sequences_after(config, trained, steps_left) - trained
    epochs = [f"{count:.2f} epochs of {name}" for name, count in data.mixture.epochs(end).items()]
    print_rank0(
        f"model    {parameter_count(model_config):,} parameters: {model_config.n_layer} layers, "
        f"{model_config.n_head} heads, width {model_config.n_embd}, {model_config.seq_len} "
        f"positions, vocabulary {model_config.vocab_size}; "
        f"{flops_per_token(model_config):.3g} FLOPs a token\n"
        f"layout   {layout}{on_hosts(range(grid.world), grid.hosts)}\n"
        f"memory   {', '.join(memory)} (rank {grid.rank})\n"
        f"batch    {batch}; {config.batch_size * model_config.seq_len:,} tokens a step\n"
        f"data     {data.n_tokens:,} tokens ({data.meta['tokenizer']}) in {config.data}; "
        f"{config.steps} steps read {', '.join(epochs)}")
    for source in data.mixture.sources.values():
        if source.meta["template"] is not None:
            print_rank0(source.windows.describe())


def print_evaluation(run, begin: Start) -> None:
    """--eval-only: evaluate, and print it."""
    text = format_eval(evaluate(run), run)
    _, _, step = begin.run["origin"]
    sep = "\n" if "\n" in text else " "         # a table has its own lines
    print_rank0(f"{begin.path}, step {step}, on {run.config.data}:{sep}{text}")


def print_finished(run, state: dict, begin: Start) -> None:
    """Also which of the given settings are not used."""
    advice = "raise --steps or --epochs"
    if begin.kind == "continue":
        advice += " to continue, or begin a new run in another --out"
    changed = {name: values for name, values in changed_settings(run, state).items()
               if name in begin.given and name != "steps"}
    unused = f" ({'; '.join(describe(changed))}: not used)" if changed else ""
    print_rank0(f"{begin.path} is step {run.step - 1} of {run.config.steps}: nothing left to do"
                f"{unused}; {advice}")


def print_notes(run, begin: Start) -> None:
    """Hints on settings that are probably not what the user wants."""
    config, grid = run.config, run.grid
    default_lr = begin.kind in ("seed", "init-from") and "lr" not in begin.given
    if default_lr and config.init_from is not None:
        print_rank0(f"note     the learning rate {config.lr:g} is a default for training from "
                    f"scratch: fine-tuning takes less, such as a tenth: give --lr")
    elif default_lr and config.lr == PEAK_LR["nano"] and parameter_count(run.model_config) > 2e7:
        print_rank0(f"note     a learning rate of {config.lr:g} suits nano: GPT-3 used 6e-4 for "
                    f"125M parameters, 2e-4 for 1.3B: give --lr")
    for ranks in grid.ranks.reshape(-1, grid.tp).tolist():
        if len({grid.hosts[rank] for rank in ranks}) > 1:
            print_rank0(f"note     tensor-parallel ranks {ranks} communicate most, but are"
                        f"{on_hosts(ranks, grid.hosts)}: --tp should divide a machine's ranks")
            break
    if config.lr == 0:
        print_rank0("note     a learning rate of 0 trains nothing: all weights stay as they are")
    if config.warmup_steps > config.steps / 2 and run.step <= config.warmup_steps:
        print_rank0(f"note     the warm-up takes {config.warmup_steps} of {config.steps} steps: "
                    f"give a smaller --warmup-steps")
    sizes, _ = batch_sizes(config)
    if config.batch_ramp is not None and len(sizes) == 1:
        print_rank0(f"note     --batch-ramp {config.batch_ramp} begins at --batch-size "
                    f"{config.batch_size}: give a larger --batch-size")
    largest = checks.largest_microbatch(grid.pp, run.device.type)
    most = min(largest, math.gcd(*sizes) // (grid.dp * grid.pp))
    if "micro_batch" not in begin.given and not config.exact and config.micro_batch < most:
        print_rank0(f"note     --micro-batch is {config.micro_batch}: no larger one, up to {most}, "
                    f"divides every batch size / (dp {grid.dp} x pp {grid.pp}): multiples of "
                    f"{grid.dp * grid.pp * largest} allow {largest}")
    if config.exact:
        print_rank0(f"note     with --exact a step takes 1.3 to 2.5 times as long, with microbatches "
                    f"of 1 sequence up to 18 times: here they have {config.micro_batch}, and the "
                    f"default grows with --batch-size")
    if config.compile:
        print_rank0("note     the first step and the first evaluation compile, for a minute or so")
    if config.skip_steps is not None and step_range(config.skip_steps)[1] < run.step:
        print_rank0(f"skip     the steps {config.skip_steps} are done: there is nothing to skip")


def note_slow_disk(run, waited: float) -> None:
    """Before a save: training has waited so many seconds, because the last checkpoint was still
    being written. If that is a large part of the time between the two saves, say what helps,
    once."""
    writer = run.writer
    if writer.submitted is None or writer.slow_disk_is_noted:
        return
    interval = time.monotonic() - writer.submitted
    if waited > max(LEAST_WAIT, LEAST_WAITING * interval):
        writer.slow_disk_is_noted = True
        advice = "give a larger --save-every"
        if run.config.checkpoint_format == "file" and run.grid.world > 1:
            advice += (", or --checkpoint-format folder, with which each rank writes its own part "
                       "to a disk that all share")
        print_rank0(f"note     training waited {waited:.1f} of the last {interval:.1f} s for a "
                    f"checkpoint to be written: {advice}")


def report_start(run, begin: Start) -> None:
    """The event of a new run; and a line, if it begins from weights."""
    line = None
    if begin.kind == "init-from":
        line = f"weights  from {run.config.init_from}"
    run.log.event("start", line, step=0, config=dataclasses.asdict(run.config),
                  **circumstances(run))


def circumstances(run) -> dict:
    """What a start or a resume of a train.Run writes of its data and machines. Only rank 0, which
    writes the event, reads the shards."""
    if run.grid.rank > 0:
        return {}
    return dict(data=describe_data(run.val_data, run.config, run.model_config),
                environment=environment(run.grid.hosts))


def changed_flags(config: Config, state: dict) -> dict:
    """{name: [what the checkpoint has, what the run has]} of the flags that differ."""
    changed = {}
    stored = flags_of_writer(state)
    for name in OF_TRAINING:
        now = getattr(config, name)
        if stored[name] != now:
            changed[name] = [stored[name], now]
    return changed


def changed_settings(run, state: dict) -> dict:
    """As `changed_flags`, and the data if they differ."""
    changed = changed_flags(run.config, state)
    if state["data"] != run.train_data.mixture.phases:
        changed["data"] = [state["config"]["data"], run.config.data]
    return changed


def describe(changed: dict) -> list[str]:
    """Of the `changed_settings`, in words."""
    return [f"{name.replace('_', ' ')} {'none' if new is None else new} instead of "
            f"{'the default' if old is None else old}" for name, (old, new) in changed.items()]


def report_resume(run, state: dict, begin: Start) -> None:
    """The events of a resume, and its line: which settings differ from the stored ones, and how the
    next step's learning rate changes."""
    config, factor = run.config, run.divergence.lr_factor
    stored = Config(**restored_flags(state))
    lr_before = run.learning_rate(stored, min(run.step, stored.steps))      # it may have ended
    lr_now = run.learning_rate(config, run.step)
    changed = changed_settings(run, state)
    done = run.step - 1
    line = ", ".join([f"resume   {begin.path}, after step {done}", *describe(changed)])
    if not 0.8 * lr_before <= lr_now <= 1.25 * lr_before:
        line += f"; so the next step's learning rate is {lr_now:.2e} instead of {lr_before:.2e}"
    if factor != 1:
        line += f", learning rate x {factor:.3g}"
    for event in begin.events:
        run.log.metrics.write(**event, step=done)
    run.log.event("resume", line, path=str(begin.path), given=begin.given, changed=changed,
                  lr_factor=factor, config=dataclasses.asdict(config), **circumstances(run),
                  step=done)


def report_stop(run) -> None:
    """The event of a run that a signal ends, and a line: how to continue it."""
    command = "the same command"
    if run.config.resume == "never":
        command += " without --resume never"
    run.log.event("stop", f"stopped and saved after step {run.finished_step}; run {command} to go "
                  f"on", step=run.finished_step)


def report_end(run) -> None:
    """The event of a run that has made all steps, and a line: how to sample."""
    run.log.event("end", step=run.config.steps)
    meta = run.train_data.meta
    if is_named(meta["tokenizer"]) or "tokenizer_file" in meta:
        file = shlex.quote(f"{run.config.out}/{LATEST[run.config.checkpoint_format]}")
        chat = " --chat" if "template" in meta else ""
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}{chat}")


def environment(hosts: list[str]) -> dict:
    """Versions, the git commit that this source is based on (None without a repository), and each
    rank's machine, for an event."""
    folder = Path(__file__).resolve().parent.parent
    commit = None
    if shutil.which("git") is not None and (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return dict(python=platform.python_version(), pytorch=torch.__version__, commit=commit,
                hosts=hosts)
