"""How the tests start ranks and programs, and what they compare: a plugin of pytest.

.pytest.ini loads it by `-p tests.harness`, and tests/commands.py, so that their fixtures are there
for test_all.py and every file in tests/. It loads before torch and sets the environment that torch
reads at its import. A test imports the functions it calls: `from tests.harness import trained`.

A test on ranks is `on_ranks`, or takes `pool`; a run is trained(pool, layout, ...), or watched(...)
in this process. Programs, and the data sets that they read, are in tests/commands.py."""
import copy
import functools
import gc
import inspect
import io
import itertools
import math
import multiprocessing.forkserver
import os
import pickle
import resource
import sys
import tempfile
import traceback
from contextlib import contextmanager
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
sys.dont_write_bytecode = True
# Here and in every rank and command, a process that wakes does not interrupt another one: else the
# sender of gloo is interrupted by whom it wakes, and the other threads spin on what it has locked.
if sys.platform == "linux":
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Ranks and commands are forks of one process, which imports for all of them what takes seconds. It
# starts here, if this is pytest, and imports while this process does.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "tests.harness", "tests.commands", "torch._dynamo", "torch.distributed.fsdp",
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
import train
from base.options import Config
from corpus.mixtures import Mixture, Source
from model import GPT, OF_VOCABULARY, GPTConfig
from parallel import Grid
from parallelism.build import build_stage, make_groups, recompute_blocks
from parallelism.context import recompute_attention
from parallelism.loss import MAX_LOGITS
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters
from runtime import loader, run_log, run_state
from runtime.full_tensors import full_gradients, full_tensors

torch.set_num_threads(1)


# ---- Sizes, layouts and files that many tests take

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
    (1, 1, 4, 2, "1f1b", False, False, "fp16"), (1, 2, 2, 1, "1f1b", False, False, "fp32")]]
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


# ---- Ranks: eight processes that are started once

class RankFailed(AssertionError):
    """An assertion of a rank: the first line says which and what, then comes its traceback."""


def place_and_values(error):
    """Where a test failed, and the first line of the AssertionError, or of the code if it says
    nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames
             if Path(frame.filename).name not in ("harness.py", "commands.py")][-1]
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
    gc.freeze()         # what is imported is not collected again and again
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
        traceback, a rank's failed assertion as RankFailed."""
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


@contextmanager
def own_processes(*context, **environment):
    """A Pool for the block alone."""
    pool = Pool(*context, **environment)
    try:
        yield pool
    finally:
        pool.stop()


@pytest.fixture(scope="session")
def pool():
    with own_processes() as pool:
        yield pool


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


# ---- Runs of train.Run

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


@torch.inference_mode()
def plain_generate(model, tokens: list[int], count: int, temperature: float = 1.0,
                   generator=None) -> list[int]:
    """`count` tokens drawn after `tokens`, each given the whole window before it. A full window
    continues with its newest half. Temperature 0 takes the most probable token."""
    seq_len = model.cfg.seq_len
    device = next(model.parameters()).device
    window = list(tokens[-seq_len:])
    drawn = []
    for _ in range(count):
        if len(window) > seq_len:
            window = window[-max(1, seq_len // 2):]
        logits = model(torch.tensor([window], device=device))       # (1, T, V)
        logits = logits[0, -1].cpu()                                # (V,), of the last position
        if temperature == 0:
            token = logits.argmax().item()
        else:
            probabilities = (logits / temperature).softmax(dim=-1)
            token = torch.multinomial(probabilities, 1, generator=generator).item()
        drawn.append(token)
        window.append(token)
    return drawn


class Memory(data.TokenDataset):
    """Without files: each token follows from the one before, but one in four is drawn."""

    def __init__(self, cfg, n_windows=150, seed=0):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(cfg.vocab_size, size=n_windows * cfg.seq_len + 1)
        for i in np.flatnonzero(rng.random(len(tokens)) < 0.75):
            tokens[i] = (3 * tokens[i - 1] + 7) % cfg.vocab_size
        self.seq_len, self.n_windows, self.n_tokens = cfg.seq_len, n_windows, len(tokens)
        self.meta = dict(tokenizer="bytes", vocab_size=cfg.vocab_size, bytes_per_token=1.0)
        self.has_conversations = False
        windows = data.TextWindows([tokens], cfg.seq_len)
        self.mixture = Mixture({"memory": Source("memory", 1, 0, windows, self.meta)})

    def window_ids(self, seed, first, count):
        permutation = np.random.default_rng(seed).permutation(self.n_windows)
        return permutation[np.arange(first, first + count) % self.n_windows]


class Rows:
    """directory.Metrics for a test: keeps the rows, and what `look(run)` sees after each step."""

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


def gather_full_state(flat, names):
    """{flat name: {global parameter name: full tensor}} on rank 0; None on the others."""
    state = {name: dict(full_tensors(flat, name)) for name in names}
    return state if flat.grid.rank == 0 else None


def whole_gradient(run):
    """{global name: gradient of the mean loss} on rank 0; empty on the others."""
    return dict(full_gradients(run.flat))


@functools.cache
def plain_gradient(cfg, batch_size=8):
    """What `whole_gradient` gives after the first step, by autograd of the plain model in fp64."""
    plain = cfg.build().initialize(Config.seed).double()
    dataset = Memory(cfg)
    window_ids = dataset.window_ids(Config.seed, 0, batch_size)
    tokens = torch.from_numpy(dataset.read(window_ids)[0])
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


def log_of(run, metrics):
    """As startup.begin_training makes it."""
    return run_log.RunLog(metrics, run.config, run.val_data, run.model_config, run.device,
                          run.grid.world)


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
        rows = Rows(run, look)
        run.log = log_of(run, rows)
        prepare(run)
        run.train()
        whole = gather_full_state(run.flat, checkpoint.STATE.values())
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


def watched(config, prepare=nothing, state=None, cfg=replace(CFG, n_layer=1)):
    """Train on this rank -> the run, its rows, events and batches: (first sequence, how many)."""
    def begin(run):
        runs.append(run)
        prepare(run)
    runs, starts = [], []
    next_batch = loader.Loader.next

    def noted(own, batches, step):
        batch = next_batch(own, batches, step)
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
        if step == at and run.progress.monitor.rollbacks < times:
            for bucket in run.flat.buckets:
                bucket.shard["data"] *= 30
    after_backward(run, spoil)


def monitor_now(run):
    return asdict(run.progress.monitor), run.progress.batches.consumed, list(run.events)


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
        parallel.gather_before_use(local, flat)
    flat.initialize(cfg, 0)
    return local, flat


def save_at_the_start(run):
    run_state.save(run, is_start=True)


def stage_of(plain, grid, recompute=False):
    """This rank's part of an fp64 model, with its values -> (model, its FlatParameters)."""
    local, flat = staged(plain.cfg, grid, torch.float64, recompute)
    flat.load("master", lambda name, shape: plain.get_parameter(name)[:shape[0]])
    return local, flat


# ---- What is compared, counted and watched

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


UPSTREAM = torch.tensor(-0.37, dtype=torch.float64)         # the gradient of the loss


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


# ---- Checkpoints and folders

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
                **{key: copy.deepcopy(tensors) for key in checkpoint.STATE})


def weights_only(path, cfg, tokenizer="bytes"):
    """A checkpoint of a random model without the optimizer's state -> the model."""
    plain, shapes = random_gpt(cfg).float(), checkpoint.parameter_shapes(cfg)
    parameters = {n: p.detach()[:shapes[n][0]].clone() for n, p in plain.named_parameters()}
    torch.save(small_state(0) | dict(model=asdict(cfg), tokenizer=tokenizer, parameters=parameters,
                                     exp_avg={}, exp_avg_sq={}), path)
    return plain


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    """{path: bytes} of the files in a folder and in its folders."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def no_file_above(size):
    """The kernel refuses to write more than `size` bytes to a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
