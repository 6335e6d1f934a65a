"""The faults, and runs: healthy ones, and those that a fault disturbs under a policy."""
import copy
import importlib
import inspect
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

import checkpoint
from base import checkpoint_files
from base.options import Config
from corpus.prepare import prepare
from data import TokenDataset
from model import GPTConfig
from runtime import evaluation
from tools.faults.policies import CountAlarms, Policy, PolicyRun

# Neither the models nor the seeds (__main__.py) are those by which divergence.py's constants were
# chosen.
SETTINGS = Config(steps=300, batch_size=8, micro_batch=8, lr=4e-3, warmup_steps=20, save_every=30,
                  eval_every=0, device="cpu", log_every=10 ** 9)
MODELS = {              # (text, shape)
    "code": ("code", GPTConfig(n_layer=2, n_head=2, n_embd=48, seq_len=32)),
    "deep": ("code", GPTConfig(n_layer=4, n_head=2, n_embd=32, seq_len=32, activation="relu")),
    "prose": ("prose", GPTConfig(n_layer=1, n_head=4, n_embd=96, seq_len=64))}


# ---- Faults ---------------------------------------------------------------------------------

def spoil(run, batches: int, every: int, tokens_of) -> None:
    """In so many coming batches, one of `every` sequences is tokens_of(its window) instead."""
    read = run.train_data.read
    count = batches * run.config.batch_size
    windows = run.train_data.window_ids(run.config.seed, run.batches.consumed, count)[::every]
    spoiled = {window: tokens_of(window) for window in windows.tolist()}

    def spoiled_read(window_ids):
        tokens, *others = read(window_ids)
        for row, window in zip(tokens, window_ids):
            row[:] = spoiled.get(int(window), row)
        return tokens, *others
    run.train_data.read = spoiled_read


def noise(run, batches: int, every: int) -> None:
    def random_bytes(window):
        return np.random.default_rng(window).integers(256, size=run.model_config.seq_len + 1)
    spoil(run, batches, every, random_bytes)


def other_data(run) -> None:
    """One of four ranks reads another text, in shards with the same fingerprint. (With another one
    `startup.open_data` refuses to start.)"""
    own = Path(run.config.data)
    name = dict(code="prose", prose="code")[own.name]
    other = TokenDataset(own.with_name(name), "train", run.model_config.seq_len)
    spoil(run, 600, 4, lambda window: other.tokens_of([window % other.n_windows])[0])


def higher_lr(run, factor: int) -> None:
    run.config = replace(run.config, lr=factor * run.config.lr)


def overflow(run) -> None:
    """Bits flip in memory: a matrix becomes 1e5 times as large, and activations in fp16 inf."""
    state = checkpoint.load(run.files()[0])
    name = "blocks.0.mlp.up.weight"
    state["parameters"][name] = 1e5 * state["parameters"][name]
    checkpoint.restore(state, run.flat)


def full_disk(run) -> None:
    """There is no room for the next two saves."""
    run.failing_saves = 2


FAULTS = {"41 bad batches": partial(noise, batches=41, every=1),
          "lr x 30": partial(higher_lr, factor=30), "lr x 300": partial(higher_lr, factor=300),
          "lr x 3000": partial(higher_lr, factor=3000), "overflow": overflow,
          "source of noise": partial(noise, batches=600, every=3),      # it has a third
          "other data": other_data, "full disk": full_disk}
DTYPES = {fault: "fp32" for fault in FAULTS} | {"overflow": "fp16"}


# ---- Runs -----------------------------------------------------------------------------------

class Outcome(NamedTuple):
    """A run under a fault and a policy."""
    rise: float         # of its validation loss above the healthy run's, relative to that
    lost: int           # steps
    ended: bool         # before the last step


def healthy(folder: Path, model: str, seed: int, dtype="fp32",
            settings=SETTINGS) -> tuple[PolicyRun, dict]:
    """Train without a fault on the text in `folder`. Returns the run and the policies as they were
    half way, when it saved; the checkpoints of that time are in `folder`/half."""
    text, model_config = MODELS[model]
    whole, half = folder / "whole", folder / "half"
    for path in (whole, half):
        shutil.rmtree(path, ignore_errors=True)
    whole.mkdir()
    config = replace(settings, data=str(folder / text), out=str(whole), seed=seed, dtype=dtype,
                     rollback="off")
    run = PolicyRun(CountAlarms(), config, model_config)
    half_way = {}

    def submit(progress):
        PolicyRun.submit(run, progress)
        if run.step == settings.steps // 2:
            run.writer.wait()
            shutil.copytree(whole, half, ignore=shutil.ignore_patterns("latest.pt"))
            half_way.update(copy.deepcopy(run.policy.policies))
    run.submit = submit
    run.reaches_the_end()
    assert half_way, "no save fell on the half"
    return run, half_way


def disturbed(run: PolicyRun, fault: str, policy: Policy) -> Outcome:
    """Train the second half of a healthy run under a fault and a policy."""
    half, out = (Path(run.config.out).with_name(name) for name in ("half", "disturbed"))
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(half, out)
    state = checkpoint.load(checkpoint_files.list_checkpoints(out)[0])
    config = replace(run.config, out=str(out), rollback="on")
    other = PolicyRun(copy.deepcopy(policy), config, run.model_config, state)
    FAULTS[fault](other)
    whole = other.reaches_the_end()
    if not whole:
        other.load(other.policy.file_left(other))
        other.note(**evaluation.evaluate(other))
    rise = other.val_loss / run.val_loss - 1
    if math.isnan(rise):
        rise = math.inf
    steps = max(other.computed, config.steps - state["step"])
    kept = other.optimizer_steps - state["optimizer_steps"]
    return Outcome(rise, steps - kept, not whole)


def make_texts(folder: Path) -> None:
    """Shards of two texts: some of the standard library's source, and Python's own help."""
    names = ("argparse", "ast", "asyncio.base_events", "collections", "datetime", "doctest",
             "inspect", "logging", "mailbox", "optparse", "pathlib", "pdb", "pickle", "pydoc",
             "socket", "subprocess", "tarfile", "threading", "typing", "zipfile")
    code = "".join(inspect.getsource(importlib.import_module(name)) for name in names)
    for name, text in dict(code=code, prose="\n".join(topics.values())).items():
        file = folder / f"{name}.txt"
        file.write_text(text, encoding="utf-8")
        prepare([file], folder / name, "bytes")
