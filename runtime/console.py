"""What a run prints besides its steps: a summary at the start, how it resumes, stops and
ends. run_log.py prints the steps and evaluations.
"""
import dataclasses
import platform
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Callable

import torch

from amp import PRECISIONS
from base.agreement import is_rank0, print_rank0
from base.batch_ramp import sequences_after
from base.checkpoint_files import LATEST
from base.flops import flops_per_token, parameter_count
from base.options import OF_TRAINING, Config, flags_of_writer, restored_flags
from corpus.shards import tiny_validation
from corpus.tokenizers import is_named
from data import Batches, TokenDataset
from model import GPTConfig
from parallel import Grid
from parallelism.collectives import on_hosts
from parallelism.kernels import multiplies_in_fp32
from parallelism.zero import FlatParameters
from runtime.directory import Start
from runtime.evaluation import describe_data
from runtime.run_log import RunLog


def print_summary(config: Config, model_config: GPTConfig, flat: FlatParameters,
                  device: torch.device, batches: Batches, steps_left: int) -> None:
    """Print model, layout, memory, batch and data."""
    grid, data = flat.grid, batches.data
    batch = (f"{config.batch_size} sequences = dp {grid.dp} x "
             f"{config.batch_size // (grid.dp * config.micro_batch)} microbatches x "
             f"{config.micro_batch} sequences")
    if config.batch_ramp is not None:
        batch += f", after a ramp {config.batch_ramp}"
    trained = batches.sequences_trained
    end = batches.consumed + sequences_after(config, trained, steps_left) - trained
    epochs = [f"{count:.2f} epochs of {name}" for name, count in data.mixture.epochs(end).items()]
    print_rank0(
        f"model    {parameter_count(model_config):,} parameters: {model_config.n_layer} layers, "
        f"{model_config.n_head} heads, width {model_config.n_embd}, {model_config.seq_len} "
        f"positions, vocabulary {model_config.vocab_size}; "
        f"{flops_per_token(model_config):.3g} FLOPs a token\n"
        f"layout   {layout_in_words(config, grid, device)}\n"
        f"memory   {memory_in_words(flat)} (rank {grid.rank})\n"
        f"batch    {batch}; {config.batch_size * model_config.seq_len:,} tokens a step\n"
        f"data     {tokens_in_words(data)} ({data.meta['tokenizer']}) in {config.data}; "
        f"{config.steps} steps read {', '.join(epochs)}")
    for source in data.mixture.sources.values():
        if source.meta["template"] is not None:
            print_rank0(source.windows.describe())


def tokens_in_words(data: TokenDataset) -> str:
    """The tokens of a split. A shard of text that is shorter than a window gives none."""
    unread = sum(len(tokens) for source in data.mixture.sources.values()
                 for tokens in source.windows.shards
                 if source.meta["template"] is None and len(tokens) <= data.seq_len)
    if unread == 0:
        return f"{data.n_tokens:,} tokens"
    return (f"{data.n_tokens - unread:,} of {data.n_tokens:,} tokens, as shards shorter than a "
            f"window of {data.seq_len} + 1 are not read,")


def layout_in_words(config: Config, grid: Grid, device: torch.device) -> str:
    """The ranks, what they compute on and in which precision, and the flags of the layout."""
    note = ""
    if multiplies_in_fp32(PRECISIONS[config.dtype].parameters, device):
        note = f" (multiplies {config.dtype} in fp32)"
    elif config.dtype == "fp32" and torch.get_float32_matmul_precision() == "high":
        note = " (multiplies fp32 in TF32)"
    cp = f" x cp {grid.cp}" if grid.cp > 1 else ""
    chunks = f" in {grid.chunks} chunks" if grid.chunks > 1 else ""
    others = {f"ep {grid.ep}": grid.ep > 1, config.pp_schedule + chunks: grid.pp > 1,
              **{name.replace("_", " "): value is True for name, value in vars(config).items()}}
    words = [f"dp {grid.dp} x pp {grid.pp}{cp} x tp {grid.tp}", device.type + note, config.dtype,
             f"zero {config.zero}", *(text for text, is_set in others.items() if is_set)]
    return ", ".join(words) + on_hosts(range(grid.world), grid.hosts)


def memory_in_words(flat: FlatParameters) -> str:
    """What this rank's state takes on its device and, with --offload, on the host."""
    host = "" if flat.staging is None else "host "
    sizes = dict.fromkeys(("parameters", "gradients", f"{host}masters", f"{host}moments"), 0)
    for bucket in flat.buckets:
        own = bucket.shard
        sizes["parameters"] += (own["data"] if flat.zero == 3 else bucket.data).nbytes
        sizes["gradients"] += (own["grad"] if flat.zero >= 2 else bucket.grad).nbytes
        if own["master"] is not own["data"]:
            sizes[f"{host}masters"] += own["master"].nbytes
        sizes[f"{host}moments"] += own["exp_avg"].nbytes + own["exp_avg_sq"].nbytes
    if flat.staging is not None:
        sizes["host staging"] = flat.staging.nbytes
    return ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in sizes.items())


def print_finished(begin: Start, config: Config) -> None:
    """Tell that the run has made all its steps: other flags change nothing."""
    advice = "raise --steps or --epochs"
    if begin.kind == "continue":
        advice += " to continue, or begin a new run in another --out"
    print_rank0(f"{begin.path} is step {begin.step} of {config.steps}: nothing left to do; "
                f"{advice}")


def report_begin(log: RunLog, begin: Start, data: TokenDataset, hosts: list[str],
                 learning_rate: Callable, lr_factor: float = 1.0) -> None:
    """The event of a new run, and a line if it begins from weights; or those of a resume, which
    name the settings that differ from the stored ones. `data`: of training. `lr_factor`: of
    rollbacks. Only rank 0, which writes the event, reads the shards."""
    config, kind, line, fields = log.config, "start", None, {}
    if begin.kind == "init-from":
        line = f"weights  from {config.init_from}"
    if begin.kind in ("continue", "resume"):
        changed = changed_settings(config, data.mixture.phases, begin.state)
        kind = "resume"
        fields = dict(path=str(begin.path), changed=changed, given=begin.given, lr_factor=lr_factor)
        line = ", ".join([f"resume   {begin.path}, after step {begin.step}", *describe(changed)])
        line += note_of_rate(begin, config, lr_factor, learning_rate)
        for event in begin.events:
            log.metrics.write(**event, step=begin.step)
    if is_rank0():
        fields |= dict(data=describe_data(log.val_data, config), environment=environment(hosts))
    log.event(kind, line, config=dataclasses.asdict(config), **fields, step=begin.step)
    if config.warmup_steps > config.steps:
        print_rank0(f"note     --warmup-steps {config.warmup_steps} is more than the run's "
                    f"{config.steps} steps: the learning rate reaches "
                    f"{config.lr * config.steps / config.warmup_steps:.2e}, not {config.lr:.2e}")
    for few in tiny_validation(data.n_tokens, log.val_data.n_tokens):
        print_rank0(f"note     {few}")


def note_of_rate(begin: Start, config: Config, factor: float, learning_rate: Callable) -> str:
    """How the next step's learning rate changes with a resume. `factor`: that of rollbacks."""
    step, stored = begin.step + 1, Config(**restored_flags(begin.state))
    before = learning_rate(stored, min(step, stored.steps))         # it may have ended
    now = learning_rate(config, step)
    note = ""
    if not 0.8 * before <= now <= 1.25 * before:
        note += f"; so the next step's learning rate is {now:.2e} instead of {before:.2e}"
    if factor != 1:
        note += f", learning rate x {factor:.3g}"
    return note


def changed_settings(config: Config, phases: list, state: dict) -> dict:
    """{name: [what the checkpoint has, what the run has]} of the flags that differ, and of the
    data, which may be others in the same directory."""
    stored = flags_of_writer(state)
    changed = {name: [stored[name], getattr(config, name)] for name in OF_TRAINING
               if stored[name] != getattr(config, name)}
    if state["data"] != phases:
        changed["data"] = [state["config"]["data"], config.data]
    return changed


def describe(changed: dict) -> list[str]:
    """Changed flags or settings in words."""
    return [f"{name.replace('_', ' ')} {'none' if new is None else new} instead of "
            f"{'the default' if old is None else old}" for name, (old, new) in changed.items()]


def report_end(log: RunLog, step: int, config: Config, facts: dict) -> None:
    """The event of a run that has made all steps, and a line: how to sample. Of a run that a signal
    ends after `step`: how to continue it. `facts`: of the tokenizer, as a checkpoint has them."""
    if step < config.steps:
        command = "the same command"
        if config.resume == "never":
            command += " without --resume never"
        log.event("stop", f"stopped and saved after step {step}; run {command} to go on", step=step)
        return
    log.event("end", step=config.steps)
    can_sample = is_named(facts["tokenizer"]) or "tokenizer_file" in facts
    if can_sample and log.beats_a_uniform_guess:
        file = shlex.quote(f"{config.out}/{LATEST[config.checkpoint_format]}")
        chat = " --chat" if "template" in facts else ""
        print_rank0(f"Now sample from it:\npython sample.py --ckpt {file}{chat}")


def environment(hosts: list[str]) -> dict:
    """Versions, the git commit that this source is based on (None without a repository), and each
    rank's machine, for an event."""
    repository = Path(__file__).resolve().parents[1] / ".git"
    commit = None
    with suppress(FileNotFoundError):           # no git
        commit = subprocess.run(["git", "--git-dir", repository, "rev-parse", "HEAD"],
                                capture_output=True, text=True).stdout.strip() or None
    return dict(python=platform.python_version(), pytorch=torch.__version__, commit=commit,
                hosts=hosts)
