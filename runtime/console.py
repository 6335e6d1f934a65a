"""What a run prints besides its steps: a summary at the start, how it resumes, stops and
ends. run_log.py prints the steps and evaluations.
"""
import dataclasses
import platform
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Callable

import torch

from amp import PRECISIONS
from base.batch_ramp import sequences_after
from base.checkpoint_files import LATEST
from base.flops import flops_per_token, parameter_count
from base.options import OF_TRAINING, Config, flags_of_writer, restored_flags
from base.processes import print_rank0
from corpus.tokenizers import is_named
from parallelism.zero import state_bytes
from parallelism.collectives import on_hosts
from parallelism.kernels import multiplies_in_fp32
from runtime.directory import Start
from runtime.evaluation import describe_data, evaluate
from runtime.run_log import RunLog, format_eval


def print_summary(run) -> None:
    """Print model, layout, memory, batch and data."""
    config, model_config, grid, data = run.config, run.model_config, run.grid, run.train_data
    device = run.device.type
    if multiplies_in_fp32(PRECISIONS[config.dtype].parameters, run.device):
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
    for name, value in vars(config).items():
        if value is True:                       # a switch
            layout += ", " + name.replace("_", " ")
    num_microbatches = config.batch_size // (grid.dp * config.micro_batch)
    batch = (f"{config.batch_size} sequences = dp {grid.dp} x {num_microbatches} microbatches x "
             f"{config.micro_batch} sequences")
    if config.batch_ramp is not None:
        batch += f", after a ramp {config.batch_ramp}"
    offload = config.offload and run.device.type != "cpu"
    on_device, on_host = state_bytes([(bucket, 1) for bucket in run.flat.buckets],
                                     PRECISIONS[config.dtype], config.zero, offload,
                                     run.flat.grad_dtype)
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
    if config.exact:
        print_rank0(f"note     with --exact a step takes 1.3 to 2.5 times as long, with "
                    f"microbatches of 1 sequence up to 18 times: here they have "
                    f"{config.micro_batch} (--micro-batch)")
    for source in data.mixture.sources.values():
        if source.meta["template"] is not None:
            print_rank0(source.windows.describe())


def print_evaluation(run, begin: Start) -> None:
    """--eval-only: evaluate, and print it."""
    row = evaluate(run.model, run.val_data, run.loader, run.stop)
    text = format_eval(row, run.config, run.model_config, run.val_data)
    _, _, step = begin.run["origin"]
    sep = "\n" if "\n" in text else " "         # a table has its own lines
    print_rank0(f"{begin.path}, step {step}, on {run.config.data}:{sep}{text}")


def print_finished(run, begin: Start) -> None:
    """Also which of the given settings are not used."""
    advice = "raise --steps or --epochs"
    if begin.kind == "continue":
        advice += " to continue, or begin a new run in another --out"
    changed = {name: values for name, values in changed_settings(run, begin.state).items()
               if name in begin.given and name != "steps"}
    unused = f" ({'; '.join(describe(changed))}: not used)" if changed else ""
    print_rank0(f"{begin.path} is step {run.step - 1} of {run.config.steps}: nothing left to do"
                f"{unused}; {advice}")


def report_begin(run, begin: Start, learning_rate: Callable) -> None:
    """The event of a new run, and a line if it begins from weights; or those of a resume."""
    if begin.kind in ("continue", "resume"):
        report_resume(run, begin, learning_rate)
        return
    line = None
    if begin.kind == "init-from":
        line = f"weights  from {run.config.init_from}"
    run.log.event("start", line, step=0, config=dataclasses.asdict(run.config),
                  **circumstances(run))


def circumstances(run) -> dict:
    """What a start or a resume writes of the data and machines. Only rank 0, which writes it, reads
    the shards."""
    if run.grid.rank > 0:
        return {}
    return dict(data=describe_data(run.val_data, run.config),
                environment=environment(run.grid.hosts))


def changed_flags(config: Config, state: dict) -> dict:
    """{name: [what the checkpoint has, what the run has]} of the flags that differ."""
    stored = flags_of_writer(state)
    return {name: [stored[name], getattr(config, name)] for name in OF_TRAINING
            if stored[name] != getattr(config, name)}


def changed_settings(run, state: dict) -> dict:
    """As `changed_flags`, and of the data, which may be others in the same directory."""
    changed = changed_flags(run.config, state)
    if state["data"] != run.train_data.mixture.phases:
        changed["data"] = [state["config"]["data"], run.config.data]
    return changed


def describe(changed: dict) -> list[str]:
    """Changed flags or settings in words."""
    return [f"{name.replace('_', ' ')} {'none' if new is None else new} instead of "
            f"{'the default' if old is None else old}" for name, (old, new) in changed.items()]


def report_resume(run, begin: Start, learning_rate: Callable) -> None:
    """The events of a resume, and its line: which settings differ from the stored ones, and how the
    next step's learning rate changes."""
    config, factor = run.config, run.divergence.lr_factor
    stored = Config(**restored_flags(begin.state))
    lr_before = learning_rate(stored, min(run.step, stored.steps))      # it may have ended
    lr_now = learning_rate(config, run.step)
    changed = changed_settings(run, begin.state)
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


def report_end(log: RunLog, step: int, config: Config, meta: dict) -> None:
    """The event of a run that has made all steps, and a line: how to sample. Of a run that a signal
    ends after `step`: how to continue it. `meta`: of the training data."""
    if step < config.steps:
        command = "the same command"
        if config.resume == "never":
            command += " without --resume never"
        log.event("stop", f"stopped and saved after step {step}; run {command} to go on", step=step)
        return
    log.event("end", step=config.steps)
    if is_named(meta["tokenizer"]) or "tokenizer_file" in meta:
        file = shlex.quote(f"{config.out}/{LATEST[config.checkpoint_format]}")
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
