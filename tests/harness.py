"""How the tests start ranks and programs, and what they compare: a plugin of pytest.

.pytest.ini loads it by `-p tests.harness`, so that its fixtures are there for test_all.py and for
every file in tests/. It is loaded before torch: it sets the environment that torch reads at its
import. A test imports the functions that it calls: `from tests.harness import trained`.

    Ranks       Pool: eight processes, started once. An `on_ranks` test runs on each of `world`.
    Runs        trained(pool, layout, ...): train.Run on dp x tp x pp ranks; watched(config): here;
                losses_of_plain_program: those that parallel.py prints
    Compared    relative(ours, theirs): the largest relative difference; outputs_and_dx: of layers
    Files       small_state, saved, links: checkpoints without a run; failing: a broken disk
    Commands    Command, launch: programs in other processes; run_train, run_data, run_sample: here
    Data sets   shards, two_sources, things: made once
"""
import ctypes
import functools
import gc
import inspect
import io
import itertools
import json
import math
import multiprocessing.forkserver
import os
import pickle
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")       # None: all
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1",
                  PYTHONPATH=str(ROOT))
sys.dont_write_bytecode = True      # the tests leave nothing behind

# Ranks and commands are forks of one process, which imports for all of them what takes seconds. It
# starts here, if this is pytest, and imports while this process does.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.harness", "torch._dynamo", "torch.distributed.fsdp",
                              "torch.distributed.optim", "torch.distributed.pipelining"])
if "_pytest" in sys.modules:
    multiprocessing.forkserver.ensure_running()

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_leaves, tree_map_with_path

import checkpoint
import data
import parallel
import sample
import train
from base import processes
from base.options import Config
from corpus import documents, downloads, encode, inputs, program
from corpus.mixtures import Mixture, Source
from corpus.prepare import prepare
from corpus.windows import TextWindows
from model import GPT, OF_VOCABULARY, GPTConfig
from parallelism import pieces
from parallelism.build import Grid, build_stage, make_groups
from parallelism.context import recompute_attention
from parallelism.full_tensors import full_gradients
from parallelism.parameters import param_specs
from parallelism.pipeline import recompute_blocks
from parallelism.tensor import MAX_LOGITS
from parallelism.zero import FlatParameters, gather_before_use
from runtime import checkpoint_writer, loader, run_log, run_state

torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------
# Sizes, layouts and files that many tests take
# ---------------------------------------------------------------------------------------------

# No tp or pp above 1 divides the 257 tokens or the five layers.
CFG = GPTConfig(vocab_size=257, seq_len=16, n_layer=5, n_head=8, n_embd=32)
LAYOUTS = [(world // (tp * pp), tp, pp) for world in (1, 2, 4, 8) for tp in (1, 2, 4, 8)
           for pp in (1, 2, 4, 8) if world % (tp * pp) == 0]        # (dp, tp, pp)


def deep_enough(layout):
    """The models of the table in docs/measurements.md: layers that no pp above 1 divides."""
    return replace(CFG, n_layer=9 if layout[2] == 8 else 5)


BOUNDS = dict(fp32=1e-5, fp64=1e-10)
INTERLEAVED = dict(pp_schedule="interleaved", pp_chunks=2)
TWO_STEPS = dict(steps=2, lr=1e-2, warmup_steps=1)      # a wrong second one shows in val_loss

# Any two values of different columns that may be combined stand together in some row: a mistake
# that shows where two of them meet shows here. dp is 4, or 2 beside tp, pp or cp; beside several
# only where eight processes leave some (`dp_for`).
COLUMNS = ("zero", "tp", "pp", "cp", "pp_schedule", "recompute", "sequence_parallel", "dtype")
COVER = [dict(zip(COLUMNS, row)) for row in [
    (0, 1, 1, 1, "gpipe", False, False, "bf16"), (0, 1, 2, 2, "1f1b", True, False, "fp64"),
    (0, 1, 4, 1, "gpipe", False, False, "fp16"), (0, 2, 4, 1, "1f1b", False, True, "fp32"),
    (1, 1, 1, 1, "gpipe", True, False, "fp16"), (1, 1, 4, 1, "1f1b", True, False, "bf16"),
    (1, 2, 2, 1, "gpipe", False, True, "fp64"), (2, 1, 2, 1, "1f1b", False, False, "fp16"),
    (2, 1, 2, 1, "gpipe", False, False, "bf16"), (2, 1, 4, 1, "1f1b", False, False, "fp64"),
    (2, 2, 1, 1, "gpipe", True, True, "fp32"), (3, 1, 1, 1, "gpipe", False, False, "fp64"),
    (3, 2, 1, 1, "gpipe", False, False, "fp32"), (3, 2, 1, 2, "gpipe", True, True, "bf16"),
    (3, 2, 1, 1, "gpipe", False, True, "fp16"), (0, 1, 4, 1, "interleaved", False, False, "fp64"),
    (0, 2, 2, 1, "interleaved", False, True, "bf16"),
    (1, 1, 2, 1, "interleaved", True, False, "fp16"),
    (2, 1, 2, 2, "interleaved", False, False, "fp32"),
    (0, 1, 2, 1, "zb-h1", False, False, "bf16"), (0, 2, 4, 1, "zb-h1", False, True, "fp64"),
    (1, 1, 4, 2, "zb-h1", False, False, "fp16"), (1, 2, 2, 1, "zb-h1", False, False, "fp32")]]
for row in COVER:
    if row["pp_schedule"] == "interleaved":
        row["pp_chunks"] = 2


def dp_for(row):
    ranks = row["tp"] * row["pp"] * row["cp"]
    return min(8 // ranks, 2 if ranks > 1 else 4)


def deep_enough_for(row):
    """The model for such a row: of the stages, or of their chunks, the first has two blocks, the
    others one."""
    return replace(CFG, n_layer=row["pp"] * row.get("pp_chunks", 1) + 1)


FORMULA = dict(fp32=lambda dp: (16, 8 + 8 / dp, 4 + 12 / dp, 16 / dp),      # bytes a parameter
               bf16=lambda dp: (18, 6 + 12 / dp, 2 + 16 / dp, 18 / dp))     # in ZeRO 0 to 3
TINY = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--seq-len", "16", "--batch-size", "4",
        "--steps", "4", "--warmup-steps", "2", "--save-every", "2", "--eval-every", "2",
        "--eval-tokens", "64"]
NASTY = ["a  b", " \n\n \tx", "don't 've ''s", "\u00e9t\u00e9 \u6f22\u5b57 \u00a0\u2003x \u3000",
         "\r\n\r\n", "    ", "12 345 !?", "\x85\x1c \x1d\n", "\U0001f600 \U0001f469\u200d",
         documents.EOT, "\u200b ", "A", "\n", " ", "\t\v", "'"]
SHARED = ROOT.parent / "shared"         # what is downloaded elsewhere, where there is a copy
PAGES = {page.name: page.read_text() for page in
         [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
README = "\n".join(PAGES.values())         # the front page, then the chapters by name


def readme_commands(program) -> list[tuple[str, list[str]]]:
    """(what stands before `program`, its flags) of each command in the README and the chapters that
    python or torchrun starts. (Of a sweep its first turn; no transcripts, no --help.)"""
    blocks = README.split("```")
    commands = [block for block in blocks[1::2]
                if not re.match(r"console\n|\w*\n\$ ", block)]
    text = "".join(commands).replace("\\\n", " ").replace(" && ", "\n")
    text = re.sub("for lr in (\\S+) .*; do (.*); done",
                  lambda loop: loop[2].replace("$lr", loop[1]), text)
    text += "\n".join(re.findall("`((?:python|torchrun) [^`]*)`", "".join(blocks[::2])))
    found = re.findall(rf"(?m)^(.*(?:python|torchrun).* ){re.escape(program)}(?: (.*))?$", text)
    return [(before, shlex.split(flags, comments=True)) for before, flags in found
            if flags != "--help"]


# ---------------------------------------------------------------------------------------------
# Ranks: eight processes that are started once
# ---------------------------------------------------------------------------------------------

class RankFailed(AssertionError):
    """An assertion of a rank: the first line says which and what, then comes its traceback."""


def place_and_values(error):
    """Where a test failed, and the first line of the AssertionError, or of the code if it says
    nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if frame.filename != __file__][-1]
    said = str(error).partition("\n")[0] or frame.line
    return f"{Path(frame.filename).name}:{frame.lineno}: {said}"


def work(task):
    """In one of the pool's processes -> (rank, its answer as a file of torch.save, which has the
    memory that several tensors are views of once; pickle would send it with each of them)."""
    rank, world, store, seconds, call = task
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                    world_size=world, timeout=timedelta(seconds=seconds))
        fn, args = pickle.loads(call)
        answer = io.BytesIO()
        torch.save(fn(rank, world, *args), answer)
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
        return rank, answer.getvalue()
    except AssertionError as error:
        said = f"rank {rank} of {world}, {place_and_values(error)}"
        raise RankFailed(f"{said}\n{traceback.format_exc()}") from None
    except BaseException:
        raise RuntimeError(f"rank {rank} of {world}:\n{traceback.format_exc()}") from None


def enter(environment):
    # Two ranks connect at their first message: gloo takes about 10 ms to close a connection, and
    # else a rank of 2 x 2 x 2 has seventeen. (Commands connect at once, as a user's ranks do.)
    os.environ.update(TORCH_GLOO_LAZY_INIT="1", **environment)
    sys.stdout = sys.stderr = open(os.devnull, "w")


class Pool:
    """`run` calls a function of a module on `world` of eight processes."""

    def __init__(self, context=FORKS, **environment):
        self.start = functools.partial(context.Pool, 8, enter, (environment,))
        self.processes = None

    def stop(self):
        if self.processes:
            self.processes.terminate()
            self.processes.join()
        self.processes = None

    def run(self, world, fn, *args, seconds=120):
        """[fn(rank, world, *args) of each rank]. A rank's exception is raised here with its
        traceback, a rank's failed assertion as RankFailed. After it, or `seconds` without an
        answer, the processes are replaced."""
        self.processes = self.processes or self.start()
        call = pickle.dumps((fn, args))
        try:
            with tempfile.TemporaryDirectory() as folder:
                running = self.processes.imap_unordered(work, [
                    (rank, world, f"{folder}/store", seconds, call) for rank in range(world)])
                answers = dict(running.next(seconds) for _ in range(world))
            return [torch.load(io.BytesIO(answers[rank]), weights_only=False)
                    for rank in range(world)]
        except BaseException:
            self.stop()
            raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A claim that fails, or a rank of a test, is told in one line: the claim, the layout, the
    values. With -vv or --tb=long its traceback is shown."""
    report = yield
    error = call.excinfo and call.excinfo.value
    claims = [mark.args[0] for mark in item.iter_markers("claim")]
    short = item.config.option.verbose < 2 and item.config.option.tbstyle == "auto"
    if short and isinstance(error, AssertionError) and (claims or isinstance(error, RankFailed)):
        said = [f"claim: {claim}" for claim in claims]
        if hasattr(item, "callspec"):
            said.append(", ".join(f"{name} {getattr(value, '__name__', value)}"
                                  for name, value in item.callspec.params.items()))
        if isinstance(error, RankFailed):
            said.append(str(error).partition("\n")[0])
        else:
            said.append(place_and_values(error))
        report.longrepr = " | ".join(said)
    return report


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()


@contextmanager
def own_processes(*context, **environment):
    """A Pool for the block alone."""
    pool = Pool(*context, **environment)
    try:
        yield pool
    finally:
        pool.stop()


def on_ranks(body):
    """Decorator of a test whose body runs on each of `world` ranks; what fails there fails here."""
    parameters = inspect.signature(body).parameters
    rank, *others = parameters.values()

    @functools.wraps(body)
    def test(pool, **given):
        world = given.pop("world", parameters["world"].default)
        pool.run(world, functools.partial(body, **given))
    # pytest reads the arguments of a test from its signature: here `pool`, where the body has
    # `rank`, and the others. pickle finds the body by its qualified name: as test.body.
    del test.__wrapped__
    test.__signature__ = inspect.Signature([rank.replace(name="pool"), *others])
    test.body = body
    body.__qualname__ += ".body"
    return test


@contextmanager
def gridded(rank, world, tp, pp, sequence_parallel=False, chunks=1, cp=1, ep=1):
    """This rank's grid, whose process groups end with the block: the gradient hooks of its
    parameters keep it alive for ever, and each group is two threads."""
    grid = Grid(world // (tp * pp * cp), pp, tp, rank, cp=cp, ep=ep, chunks=chunks,
                sequence_parallel=sequence_parallel)
    make_groups(grid)
    try:
        yield grid
    finally:
        grid.groups.clear()


# ---------------------------------------------------------------------------------------------
# Runs of train.Run
# ---------------------------------------------------------------------------------------------

def tokens_of(cfg, batch, seed=0):
    """Random tokens (batch, seq_len)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(cfg.vocab_size, (batch, cfg.seq_len), generator=generator)


def random_tensor(*shape, seed):
    """Standard normal numbers in fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_gpt(cfg):
    """A GPT in fp64 with every parameter random, biases and padding included, so that a test sees
    when one is left out."""
    generator = torch.Generator().manual_seed(0)
    plain = cfg.build().double().eval()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, 0, 0.3, generator)
    return plain


class Memory(data.TokenDataset):
    """Without files: each token follows from the one before, but one in four is drawn."""

    def __init__(self, cfg, n_windows=150, seed=0):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(cfg.vocab_size, size=n_windows * cfg.seq_len + 1)
        for i in np.flatnonzero(rng.random(len(tokens)) < 0.75):
            tokens[i] = (3 * tokens[i - 1] + 7) % cfg.vocab_size
        self.seq_len, self.n_windows, self.n_tokens = cfg.seq_len, n_windows, len(tokens)
        self.meta = dict(tokenizer="bytes", vocab_size=cfg.vocab_size, bytes_per_token=1.0)
        self.has_conversations, self.n_rows = False, cfg.vocab_size
        windows = TextWindows([tokens], cfg.seq_len)
        self.mixture = Mixture({"memory": Source("memory", 1, 0, windows, self.meta)})

    def window_ids(self, seed, first, count):
        permutation = np.random.default_rng(seed).permutation(self.n_windows)
        return permutation[np.arange(first, first + count) % self.n_windows]


class Rows:
    """checkpoint.Metrics for a test: keeps the rows, and what `look(run)` sees after each step."""

    def __init__(self, run, look):
        self.run, self.look, self.steps, self.seen = run, look, [], []
        run.events = []

    def write(self, **row):
        if row.get("event") == "end":       # a run that is not stopped ends with it
            return
        if "event" in row:
            self.run.events.append(row)
        else:
            self.steps.append(row)
            self.seen.append(self.look(self.run))


def settings(out, **changes):
    usual = dict(batch_size=8, micro_batch=2, steps=20, lr=1e-3, warmup_steps=5, eval_every=0,
                 save_every=0, device="cpu")
    return Config(**{**usual, **changes, "out": str(out)})


def gather_full_state(flat, cfg, grid, names):
    """{flat name: {global parameter name: full tensor}} on rank 0, by the parts of a save; None on
    the others."""
    names = list(names)
    copies = checkpoint_writer.copy_pieces(flat, names, 60)
    if grid.rank > 0:
        return checkpoint_writer.send_pieces(copies, grid, 0)
    order = pieces.file_order(cfg, grid, flat.num_shards)
    inbox = checkpoint_writer.Inbox(order, copies[0].dtype, copies, grid, 0)
    return {name: {spec.name: inbox.read() for spec, _ in order} for name in names}


def whole_gradient(run):
    """{global name: gradient of the mean loss} on rank 0; None on the others."""
    whole = dict(full_gradients(run.flat))
    return whole if run.grid.rank == 0 else None


@functools.cache
def plain_gradient(cfg, batch_size=8):
    """What `whole_gradient` gives after the first step, by autograd of the plain model in fp64."""
    plain = cfg.build().initialize(Config.seed).double()
    dataset = Memory(cfg)
    window_ids = dataset.window_ids(Config.seed, 0, batch_size)
    tokens = torch.from_numpy(dataset.tokens_of(window_ids))
    targets = tokens[:, 1:]
    (plain(tokens[:, :-1], targets) / targets.numel()).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name in set(OF_VOCABULARY) & gradients.keys():
        gradients[name] = gradients[name][:cfg.vocab_size]          # without padding
    return gradients


def nothing(run):
    return None


def without_saves(run):
    """For a test that reads no file: without this the run saves after its last step."""
    run.writer.submit = lambda *_: None


class Trained(NamedTuple):
    """What a run gives on a rank."""
    rows: list                  # of metrics.jsonl
    seen: list                  # what `look(run)` returned after each step
    state: dict | None          # on rank 0, at the end: {"master": {global name: full tensor}, ..}


def run_steps(rank, world, layout, config, cfg, look=nothing, state=None,
              prepare=nothing) -> Trained:
    """Train with train.Run on this rank."""
    dp, tp, pp = layout
    with gridded(rank, world, tp, pp, config.sequence_parallel, config.pp_chunks,
                 config.cp, config.ep) as grid:
        datasets = Memory(cfg), Memory(cfg, 13, seed=1)
        if config.data != Config.data:
            datasets = [data.TokenDataset(config.data, split, cfg.seq_len)
                        for split in ("train", "val")]
        run = train.Run(config, cfg, grid, torch.device("cpu"), *datasets,
                        state and checkpoint.load(state))
        prepare(run)
        rows = Rows(run, look)
        run.log = run_log.RunLog(rows)
        run.train()
        whole = gather_full_state(run.flat, cfg, grid, checkpoint.STATE.values())
    return Trained(rows.steps, rows.seen, whole)


def trained(pool, layout, out, cfg=CFG, look=nothing, state=None, prepare=nothing,
            **flags) -> Trained:
    """A run on dp x tp x pp processes, times `cp` of the flags, as rank 0 has it."""
    dp, tp, pp = layout
    Path(out).mkdir(exist_ok=True)
    config = settings(out, tp=tp, pp=pp, **flags)
    world = dp * tp * pp * config.cp
    return pool.run(world, run_steps, layout, config, cfg, look, state, prepare)[0]


@pytest.fixture(scope="session")
def reference(pool, tmp_path_factory):
    """reference(model, layout, settings) -> the run of one process, or of a layout, once."""
    @functools.cache
    def run(cfg, layout=(1, 1, 1), **flags):
        flags.setdefault("micro_batch", flags.get("batch_size", 8))
        return trained(pool, layout, tmp_path_factory.mktemp("reference"), cfg, whole_gradient,
                       prepare=without_saves, **flags)
    return run


def losses_of_plain_program(rank, world, tp, pp, folder, steps, cp=1, ep=1, sequence_parallel=False,
                            config=None, **options):
    """The losses that parallel.py prints on rank 0. `config`: None is that of `nano`."""
    train_data = data.TokenDataset(folder, "train", seq_len=128)
    if config is None:
        config = GPTConfig(vocab_size=train_data.meta["vocab_size"])
    grid = parallel.Grid(world // (tp * pp * cp), pp, tp, rank, cp=cp, ep=ep,
                         sequence_parallel=sequence_parallel)
    parallel.make_groups(grid)
    try:
        with redirect_stdout(io.StringIO()) as text:
            parallel.train_plainly(train_data, config, steps, grid, **options)
    finally:
        grid.groups.clear()             # their threads end
    return [float(line.split()[3]) for line in text.getvalue().splitlines()]


def watched(config, prepare=nothing, state=None, cfg=replace(CFG, n_layer=1)):
    """Train on this rank -> the run, its rows, events and batches: (first sequence, how many)."""
    def begin(run):
        runs.append(run)
        prepare(run)
    runs, starts = [], []
    next_batch = loader.Loader.next

    def noted(own):
        batch = next_batch(own)
        starts.append(batch.start)
        return batch
    Path(config.out).mkdir(exist_ok=True)
    with mock.patch.object(loader.Loader, "next", noted):
        rows, trained_on, _ = run_steps(0, 1, (1, 1, 1), config, cfg, lambda run: starts[-1],
                                        state, begin)
    batches = [(start, row["batch_size"]) for start, row in zip(trained_on, rows)]
    return SimpleNamespace(run=runs[0], rows=rows, events=runs[0].events, batches=batches)


def megatrons_batch_size(config, consumed_samples):
    """What Megatron-LM computes, step by step as in its num_microbatches_calculator.py."""
    if config.batch_ramp is None:
        return config.batch_size
    start, increment, rampup_samples = map(int, config.batch_ramp.split(":"))
    num_increments = (config.batch_size - start) // increment
    if consumed_samples > rampup_samples or num_increments == 0:
        return config.batch_size
    samples_per_increment = Fraction(rampup_samples, num_increments)    # there, a float
    return start + int(consumed_samples / samples_per_increment) * increment


def batches_from(config, consumed, count):
    """So many batches, (first sequence, size) each, after these sequences."""
    batches = []
    for _ in range(count):
        batches.append((consumed, megatrons_batch_size(config, consumed)))
        consumed = sum(batches[-1])
    return batches


def after_backward(run, act):
    """act(step) whenever the gradients of a step are complete, and nothing is decided yet."""
    finish = run.flat.finish_grad_sync
    run.flat.finish_grad_sync = lambda: (finish(), act(run.step))


def overflow_in(run, steps):
    """As after an overflow, one of the gradients of these steps is infinite."""
    def spoil(step):
        if step in steps:
            run.flat.buckets[0].shard["grad"][0] = math.inf
    after_backward(run, spoil)


def poison(run, times=1, at=40):
    """After step `at` the parameters are wrong, in the first `times` attempts: the next three
    losses are high, and the last of them rolls back."""
    def spoil(step):
        if step == at and run.divergence.rollbacks < times:
            for bucket in run.flat.buckets:
                bucket.shard["data"] *= 30
    after_backward(run, spoil)


def monitor_now(run):
    return asdict(run.divergence), run.batches.consumed, list(run.events)


def staged(cfg, grid, dtype=torch.float32, recompute=False, zero=0):
    """This rank's stage at step 0 of seed 0 -> (model, its FlatParameters)."""
    local = build_stage(cfg, grid)
    flat = FlatParameters(param_specs(local, cfg, grid), grid, dtype,
                          torch.promote_types(dtype, torch.float32), "cpu", zero)
    if recompute:
        recompute_blocks(local)
    elif grid.cp > 1:
        recompute_attention(local)
    if zero > 0:
        gather_before_use(local, flat)
    flat.initialize(cfg, 0)
    return local, flat


def save_at_the_start(run):
    run_state.save(run, is_start=True)


def stage_of(plain, grid, recompute=False):
    """This rank's part of an fp64 model, with its values -> (model, its FlatParameters)."""
    local, flat = staged(plain.cfg, grid, torch.float64, recompute)
    flat.load("master", lambda name, shape: plain.get_parameter(name)[:shape[0]])
    return local, flat


# ---------------------------------------------------------------------------------------------
# What is compared, counted and watched
# ---------------------------------------------------------------------------------------------

class Difference(float):
    """A relative difference that names its place and the two values there when it is printed."""

    def __new__(cls, difference, place=""):
        self = super().__new__(cls, difference)
        self.place = place
        return self

    def __repr__(self):
        return f"{float(self):.3g}{self.place}"


def relative(ours, theirs):
    """The largest Difference of numbers, or of tensors in Euclidean norm, relative to `theirs`."""
    def difference(path, *pair):
        ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in pair)
        assert ours.shape == theirs.shape, keystr(path)
        off = (ours - theirs).norm()
        if off == 0:
            return Difference(0.0)      # also from zero
        largest = (ours - theirs).abs().argmax()
        values = (f"{x.flatten()[largest].item():.12g}" for x in (ours, theirs))
        place = (" at " + keystr(path) if path else "") + ": " + " beside ".join(values)
        # A NaN is infinitely far away: max() would pass over it.
        return Difference((off / theirs.norm()).nan_to_num(math.inf).item(), place)
    return max(tree_leaves(tree_map_with_path(difference, ours, theirs)))


def assert_close(pairs, bound):
    """Each of ours is theirs, to a relative difference of `bound`."""
    for name, (ours, theirs) in pairs.items():
        difference = relative(ours, theirs)
        assert difference <= bound, f"{name} differs by {difference}"


def by_step(rows, name):
    return {f"step {row['step']}": {name: row[name]} for row in rows}


def assert_same_rows(rows, expected, bound):
    """Losses, norms and the last validation loss of two runs are equal, to `bound`."""
    for name in ("loss", "grad_norm"):
        assert relative(by_step(rows, name), by_step(expected, name)) <= bound
    assert relative(by_step(rows[-1:], "val_loss"), by_step(expected[-1:], "val_loss")) <= bound


def assert_same_state(one, two, but=("config", "run")):
    """Bit for bit."""
    assert one.keys() == two.keys()
    for key in one.keys() - set(but):
        if key in checkpoint.STATE:
            assert one[key].keys() == two[key].keys()
            for name, tensor in one[key].items():
                difference = relative(tensor, two[key][name])
                assert tensor.equal(two[key][name]), f"{key} of {name} differ by {difference}"
        else:
            assert one[key] == two[key], key


def different_rows(ours, theirs, but=("tokens_per_second",)):
    """The step, the name and the two values of the first difference of two lists of rows. Empty if
    all bits are equal. A nan equals a nan."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        for name in {**one, **other}:
            pair = repr(one.get(name)), repr(other.get(name))
            if pair[0] != pair[1] and name not in but:
                return f"step {one['step']}, {name}: {' beside '.join(pair)}"
    return ""


def different_bits(ours, theirs):
    """The first difference of two runs (Trained), in their rows or in their final states."""
    def of_tensors(path, one, other):
        if torch.equal(one, other):
            return ""
        return f"final state{keystr(path)} differs by {relative(one, other)}"
    of_states = tree_leaves(tree_map_with_path(of_tensors, ours.state, theirs.state))
    return next(filter(None, [different_rows(ours.rows, theirs.rows), *of_states]), "")


def same_bits(ours, theirs):
    return different_bits(ours, theirs) == ""


def column(steps, name):
    return [row[name] for row in steps]


def differences(ours, theirs):
    """Largest relative differences (loss, gradient, norm) over all steps of two runs (Trained) that
    looked at the `whole_gradient`."""
    losses = [by_step(run.rows, "loss") | {"end": by_step(run.rows[-1:], "val_loss")}
              for run in (ours, theirs)]
    gradients = [dict(zip(by_step(run.rows, "step"), run.seen)) for run in (ours, theirs)]
    norms = [by_step(run.rows, "grad_norm") for run in (ours, theirs)]
    return relative(*losses), relative(*gradients), relative(*norms)


CUTS = {        # of a parameter: (the dimension that is cut, how many matrices are stacked there)
    "embed.token.weight": (0, 1), "blocks.0.attn.qkv.weight": (0, 3),
    "blocks.0.attn.qkv.bias": (0, 3), "blocks.0.attn.proj.weight": (1, 1),
    "blocks.0.mlp.up.weight": (0, 1), "blocks.0.mlp.up.bias": (0, 1),
    "blocks.0.mlp.down.weight": (1, 1)}
UPSTREAM = torch.tensor(-0.37, dtype=torch.float64)         # the gradient of the loss


def cut(name, gradient, rank, world):
    """The part of a full gradient that a tensor-parallel rank has."""
    if name not in CUTS:
        return gradient
    dim, stacked = CUTS[name]
    return torch.cat([matrix.chunk(world, dim)[rank] for matrix in gradient.chunk(stacked, dim)],
                     dim)


def outputs_and_dx(gpt, tokens, targets, x, dy):
    """The embedding, a block that sees x, and the loss of the head that sees x; and dx under the
    upstream gradients dy of the first two and UPSTREAM of the loss."""
    x = x.clone().requires_grad_()
    outputs = gpt.embed(tokens), gpt.blocks["0"](x), gpt.head(x, targets)
    torch.autograd.backward(outputs, [dy, dy, UPSTREAM])
    return dict(zip(("embedding", "block", "loss", "dx"), (*outputs, x.grad)))


def gradient_pairs(flat, plain):
    """{parameter: (the full gradient, the plain model's)}"""
    return {name: (gradient, plain.get_parameter(name).grad[:len(gradient)])
            for name, gradient in full_gradients(flat)}


def tiles_of(positions, world):
    """In the block, `world` ranks compute the logits of so many positions at once. (Of the 32 in a
    batch of two, 7 are no divisor: the last tile is shorter.)"""
    return mock.patch.dict(MAX_LOGITS, cpu=positions * (CFG.padded_vocab // world))


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made in the block, while these live."""

    def __init__(self):
        super().__init__()
        self.made = torch.utils.weak.WeakTensorKeyDictionary()
        self.peak = 0

    def bytes(self):
        storages = [x.untyped_storage() for x in self.made]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.made[x] = None
        self.peak = max(self.peak, self.bytes())
        return out


class Passes(TorchDispatchMode):
    """`calls`: the names of the operations in the block. `names`: those that read or write all of a
    matrix of this shape."""

    def __init__(self, *shape):
        super().__init__()
        self.shape, self.names, self.calls = shape, [], []

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        few = "gather", "scatter_", "alias", "detach", "view", "slice"
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
        name = function.name().removeprefix("aten::").split(".")[0]
        self.calls.append(name)
        if any(x.shape == self.shape for x in tensors) and name not in few:
            self.names.append(name)
        return out


@contextmanager
def traffic(note):
    """In the block note(name, x, *arguments) hears of each "all_reduce", "isend" or "irecv" of x,
    or "all_to_all_single" into x, that this rank starts in torch.distributed, and note("wait", x)
    that it waits for that."""
    def noted(name, start):
        def run(x, *args, **kwargs):
            note(name, x, *args, **kwargs)
            handle = start(x, *args, **kwargs)
            return SimpleNamespace(wait=lambda: note("wait", x) or handle.wait())
        return run
    noting = {name: noted(name, getattr(dist, name))
              for name in ("all_reduce", "isend", "irecv", "all_to_all_single")}
    # batch_isend_irecv looks isend and irecv up in the module that defines them.
    with mock.patch.multiple(dist, **noting), mock.patch.multiple(dist.distributed_c10d, **noting):
        yield


def in_turn(events):
    """The events without repetition; the start of any communication is "start"."""
    events = ["start" if x in ("all_reduce", "isend", "irecv") else x for x in events]
    return [event for event, _ in itertools.groupby(events)]


# ---------------------------------------------------------------------------------------------
# Checkpoints and folders
# ---------------------------------------------------------------------------------------------

def saved_file(out, step):
    return out / f"step_{step:08d}.pt"


def saved(out, step):
    return checkpoint.load(saved_file(out, step))


def small_state(step):
    """The state of a small model whose parameters and moments are all 0.5."""
    cfg = GPTConfig(vocab_size=256, n_layer=1, n_embd=32)           # no padding
    tensors = {name: torch.full(p.shape, 0.5) for name, p in GPT(cfg).named_parameters()}
    return dict(format=checkpoint.FORMAT, step=step, consumed_samples=1, tokens=1, config={},
                optimizer_steps=1, model=asdict(cfg), tokenizer="bytes", scaler={},
                data=[[0, {"d": 1}]], monitor={}, run=dict(id="x", origin=["seed", None, 0]),
                **{key: tensors for key in checkpoint.STATE})


def weights_only(path, cfg, tokenizer="bytes"):
    """A checkpoint of a random model without the optimizer's state -> the model."""
    plain, shapes = random_gpt(cfg).float(), checkpoint.parameter_shapes(cfg)
    parameters = {n: p.detach()[:shapes[n][0]].clone() for n, p in plain.named_parameters()}
    torch.save(small_state(0) | dict(model=asdict(cfg), tokenizer=tokenizer, parameters=parameters,
                                     exp_avg={}, exp_avg_sq={}), path)
    return plain


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def no_file_above(size):
    """The kernel refuses to write more than `size` bytes to a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def is_killed(save, call, most):
    """Whether the kernel kills a fork of this process that calls save(): before the call with this
    number (from 0; None: none) that opens, names or removes a file, and where a file would exceed
    `most` bytes."""
    def die_at_the_call(event, _):
        if event.startswith(("open", "os.", "shutil.")) and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):       # the child must never return to pytest
            calls = itertools.count()
            sys.addaudithook(die_at_the_call)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with no_file_above(most):
                save()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def lose_either_rank(folder, flags, fate, step=11):
    """Two jobs at the same time, each folder/wrapper.py on two ranks, in folder/0 and folder/1.
    After a step a signal `fate` reaches rank 0 of the one and rank 1 of the other, and the job's
    file "lost" appears. The other rank exits with status 1 and one line. Returns the two folders,
    which are --out and the working directory."""
    folders = folder / "0", folder / "1"
    jobs = []
    for out in folders:
        out.mkdir()
        jobs.append(launch(2, *flags, "--out", out, file=folder / "wrapper.py", cwd=out))
    try:
        for victim, (out, job) in enumerate(zip(folders, jobs)):
            wait_for_step(out, step, job[0])    # of saves every 5 steps: 5 is whole, 10 is not
            job[victim].send_signal(fate)
            (out / "lost").touch()
        for victim, job in enumerate(jobs):
            status, _, error = job[1 - victim].finish()
            assert status == 1 and error.count("\n") == 1, error
    finally:
        for rank in itertools.chain(*jobs):
            rank.process.kill()
            rank.process.join()
    return folders


def bytes_held(name):
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+)", lines, re.M)[1])


def give_back_freed_memory():
    """To the system. From here on it gets what is freed at once, as far as that is large."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 2 ** 17)       # M_MMAP_THRESHOLD: or glibc keeps up to 64 MB that are freed
    libc.malloc_trim(0)


@pytest.fixture(params=["hard links", "no hard links"])
def links(request):
    """Whether the file system has hard links: once with, once without."""
    there = request.param == "hard links"
    with nullcontext() if there else mock.patch.object(os, "link", side_effect=OSError):
        yield there


def failing(name, call, errors):
    """A patch: each open, or read, of a path that ends in `name` raises one of the `errors`."""
    def open_file(path, *more, **options):
        if not errors or not str(path).endswith(str(name)):
            return open(path, *more, **options)
        error = OSError(errors.pop(), "the disk hangs")
        if call == "open":
            raise error
        return mock.Mock(wraps=open(path, *more, **options), read=mock.Mock(side_effect=error))
    return mock.patch.object(io, "open", open_file)


# ---------------------------------------------------------------------------------------------
# Commands: programs in processes of their own, or here
# ---------------------------------------------------------------------------------------------

def run_file(folder, cwd, environment, file, arguments):
    """What `python FILE ARGUMENTS` does, in this process, with its output in files."""
    for number, name in [(1, "out"), (2, "error")]:
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in environment.items()})
    signal.signal(signal.SIGHUP, signal.SIG_DFL)        # under nohup it is ignored
    sys.argv = list(map(str, [file, *arguments]))
    runpy.run_path(str(ROOT / file), run_name="__main__")


class Command:
    """`python FILE ARGUMENTS` in a process of its own, a fork of one that has imported torch."""

    def __init__(self, file, *arguments, cwd=ROOT, **environment):
        self.folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.process = FORKS.Process(target=run_file, daemon=True, args=(
            self.folder, cwd, environment, file, arguments))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def finish(self, seconds=60):
        """Wait for its end -> (exit status, standard output, standard error)."""
        self.process.join(seconds)
        texts = [Path(self.folder, name).read_text() for name in ("out", "error")]
        if self.poll() is None:
            self.process.kill()
            raise TimeoutError(f"no end in {seconds} s: {texts}")
        return self.poll(), *texts


def launch(world, *flags, file="train.py", **environment):
    """train.py on `world` ranks as torchrun would start them, but without torchrun: [Command]."""
    held = socket.socket()      # or the kernel gives the port away before rank 0 listens to it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    ranks = [Command(file, *flags, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world,
                     LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=held.getsockname()[1], **environment) for rank in range(world)]
    weakref.finalize(ranks[0], held.close)
    return ranks


def torchrun(count, *arguments, cwd=None, gpus="", **options):
    """torchrun on a free port, with the environment of a user's shell, but only these GPUs."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "CUDA_VIS"))}
    environment |= {} if gpus is None else dict(CUDA_VISIBLE_DEVICES=gpus)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", f"--nproc_per_node={count}", *map(str, arguments)],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, **options)


def wait_for(out, find, process, seconds=120):
    """What find(rows, events) says of metrics.jsonl, once that is true; `process` is a Command or a
    Popen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with suppress(FileNotFoundError, ValueError):
            if found := find(*read_metrics(out)):
                return found
        time.sleep(0.02)
    raise AssertionError((process.finish if isinstance(process, Command) else
                          process.communicate)())


def wait_for_step(out, step, process):
    wait_for(out, lambda rows, _: rows and rows[-1]["step"] >= step, process)


def run_main(capsys, module, *flags):
    """`python PROGRAM.py FLAGS`, in this process -> (exit status, stdout, stderr)."""
    with mock.patch.object(sys, "argv", [f"{module.__name__}.py", *map(str, flags)]):
        try:
            status = module.main() or 0
        except SystemExit as stop:
            status = stop.code
    return status, *capsys.readouterr()


@pytest.fixture
def run_data(capsys):
    """run_data(*flags) -> (exit status, standard output, standard error) of data.py."""
    return functools.partial(run_main, capsys, SimpleNamespace(__name__="data", main=program.main))


@pytest.fixture
def make_data(run_data, tmp_path, monkeypatch):
    """make_data(*input, *flags) -> (standard output, standard error) of data.py, which succeeds: in
    tmp_path, in bytes, to "out"."""
    monkeypatch.chdir(tmp_path)

    def make(*given):
        status, out, error = run_data("--tokenizer", "bytes", "--out", "out", "--input", *given)
        assert status == 0, error
        return out, error
    return make


@pytest.fixture
def refuse_data(run_data, tmp_path, monkeypatch):
    """refuse_data(words, *input, *flags): data.py writes no file and changes none, and ends with
    exit status 2 and one line, behind its notes, that has all of these words. The line is returned.
    """
    monkeypatch.chdir(tmp_path)

    def files_here(given):
        return {path: path.is_file() and str(path) not in map(str, given) and path.read_bytes()
                for path in Path().rglob("*") if not path.is_dir()}

    def refuse(words, *given):
        if not str(given[0]).startswith("--"):
            given = "--tokenizer", "bytes", "--out", "out", "--input", *given
        before = files_here(given)
        status, out, error = run_data(*given)
        *notes, line = error.splitlines(keepends=True)
        assert (status, out) == (2, "") and line.startswith("data.py: "), error
        assert all(note.startswith("note: ") for note in notes), error
        assert all(word in line for word in words.split()), line
        assert "Errno" not in line and files_here(given) == before
        return line
    return refuse


@pytest.fixture
def run_train(capsys):
    """run_train(*flags, **environment) -> (exit status, stdout, stderr) of train.main here. With a
    WORLD_SIZE above 1 this is rank 0, without the others: for mistakes, which it alone tells."""
    def run(*flags, **environment):
        if "WORLD_SIZE" in environment:
            ranks = environment["WORLD_SIZE"]
            environment = dict(RANK=0, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1",
                               MASTER_PORT=29500) | environment
        with mock.patch.dict(os.environ, {k: str(v) for k, v in environment.items()}), \
                mock.patch.object(signal, "signal"), mock.patch.object(processes.time, "sleep"), \
                mock.patch.object(processes, "process_group", lambda *_: nullcontext()):
            return run_main(capsys, train, *flags)
    return run


@pytest.fixture
def run_sample(things, monkeypatch, capsys):
    """run_sample(*flags) -> (exit status, standard output, standard error) of sample.py."""
    def run(*flags, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return run_main(capsys, sample, "--ckpt", things / "whole.pt", *flags)
    return run


def read_metrics(out):
    """(rows of steps, events), each in the order of the file."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "event" not in r], [r for r in rows if "event" in r]


def kinds(events):
    return [event["event"] for event in events]


def expect_mistake(result, message):
    status, _, error = result
    assert status == 2, error
    assert message in error and error.startswith("train.py: ") and error.count("\n") == 1


@pytest.fixture(scope="session", autouse=True)
def leave_nothing_behind():
    """Remove the bytecode of this file, which pytest writes before its first line has run."""
    yield
    folder = ROOT / "tests" / "__pycache__"
    for file in [*folder.glob("harness.*"), *folder.glob("__init__.*")]:
        file.unlink(missing_ok=True)        # another pytest may end at the same time
    with suppress(OSError):
        folder.rmdir()
    # The CPU seconds of ranks and commands are the forkserver's, and of this process only once it
    # has waited for that.
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGTERM)     # it may still import
        server._stop()


# ---------------------------------------------------------------------------------------------
# Data sets
# ---------------------------------------------------------------------------------------------

def shard(tokens, magic=20240520, version=1, count=None):
    """The bytes of a shard, whose header can be wrong."""
    header = np.array([magic, version, len(tokens) if count is None else count], "<i4").tobytes()
    return header.ljust(1024, b"\0") + np.array(tokens, "<u2").tobytes()


def texts_of(directory, *splits):
    """The documents of a split in tokens that are bytes; of two splits, document by document."""
    found = []
    for split in splits:
        tokens = np.concatenate([np.fromfile(file, "<u2", offset=1024)
                                 for file in sorted(Path(directory).glob(f"{split}_*.bin"))])
        before, *documents = np.split(tokens, np.flatnonzero(tokens == 256))
        assert not len(before)
        found.append([bytes(document[1:].tolist()).decode() for document in documents])
    return ["".join(parts) for parts in zip(*found, strict=True)]


def write_lines(path, records):
    """A file of JSON by lines."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path, texts, field="text"):
    return write_lines(path, [{field: text} for text in texts])


def meta_of(folder):
    return json.loads(Path(folder, "meta.json").read_text())


def set_block(monkeypatch, size):
    """The characters read, and encoded, at once."""
    for module in (documents, downloads, encode):
        monkeypatch.setattr(module, "BLOCK", size)


def dataset(directory, files, **changes):
    """A TokenDataset of these shards, {name: tokens}, with `changes` of meta.json."""
    directory.mkdir(exist_ok=True)
    for name, tokens in files.items():
        (directory / f"{name}.bin").write_bytes(shard(tokens))
    meta = dict(tokenizer="bytes", vocab_size=257, bytes_per_token=1.0, fingerprint="f")
    (directory / "meta.json").write_text(json.dumps(meta | changes))
    return data.TokenDataset(directory, "train", 4)


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A directory of token shards made by data.py."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text.txt").write_text("".join(f"line {i}: some words é\n" for i in range(3000)))
    prepare([folder / "text.txt"], folder / "d", "bytes")
    return folder / "d"


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Directories a, of 40 windows of 16 tokens and 2 to validate on, and b, of more than 128."""
    folder = tmp_path_factory.mktemp("sources")
    for name, lines in (("a", [f"{i} + {i} = {2 * i}\n" for i in range(50)]),
                        ("b", [f"line {i}: other words é\n" for i in range(2200)])):
        (folder / f"{name}.txt").write_text("".join(lines))
        prepare([folder / f"{name}.txt"], folder / name, "bytes")
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Shards of the standard library's source in bytes, as `python data.py` makes them."""
    folder = tmp_path_factory.mktemp("library") / "python"
    prepare(inputs.standard_library(), folder, "bytes")
    return folder


@pytest.fixture(scope="session")
def things(shards, tmp_path_factory):
    """A folder with things that are wrong, by the names that the mistakes below call them; and a
    whole checkpoint."""
    folder = tmp_path_factory.mktemp("things")
    (folder / "precious").write_text("a file")
    tokens = np.arange(100_000) % 257       # two blocks of check, one for each of two ranks
    beyond = np.append(tokens, 257)
    for name, of_train, of_val, changes in [
            ("beyond", beyond, tokens, {}), ("beyond_val", tokens, beyond, {}),
            ("torn", tokens, tokens, {}), ("other", tokens, tokens, dict(fingerprint="other")),
            ("opt", tokens, tokens, dict(tokenizer="opt-257")),
            ("toy", tokens, tokens, dict(vocab_size=300))]:
        dataset(folder / name, dict(train_0=of_train, val_0=of_val), **changes)
    os.truncate(folder / "torn/train_0.bin", 2000)
    dataset(folder / "lost", dict(train_000000=tokens, val_000000=tokens))
    (folder / "lost/meta.json").unlink()
    whole = Command("train.py", "--data", shards, "--out", folder / "run", *TINY).finish(200)
    assert whole[0] == 0, whole
    (folder / "run" / "latest.pt").rename(folder / "whole.pt")
    state = torch.load(folder / "whole.pt")
    state["format"] = 6
    torch.save(state, folder / "six.pt")
    (folder / "sixth").mkdir()
    shutil.copy(folder / "run" / "step_00000002.pt", folder / "sixth")
    shutil.copy(folder / "six.pt", folder / "sixth" / "latest.pt")
    (folder / "torn.pt").write_bytes((folder / "whole.pt").read_bytes()[:-5000])
    return folder


@pytest.fixture(scope="session")
def losses_of_train_py(shards, tmp_path_factory):
    """losses_of_train_py(steps): those of the quick start's model and flags in one process."""
    @functools.cache
    def run(steps):
        out = tmp_path_factory.mktemp("quick start")
        done = Command("train.py", "--data", shards, "--out", out, "--steps", steps,
                       "--eval-every", 0, "--save-every", 0).finish(200)
        assert done[0] == 0, done
        return column(read_metrics(out)[0], "loss")
    return run
