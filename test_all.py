"""Every claim of this project, once, in the order of the files.

    python -m pytest test_all.py                what a change must pass: minutes, on two CPU cores
    python -m pytest test_all.py -m slow        the same claims at a size that takes longer
    python test_all.py                          the README's table of measured differences
    python test_all.py memory                   its tables of memory, and of speed under ZeRO
    python -m pytest test_all.py -m bench -s    its tables of speed: an hour on a quiet machine

Three habits. Where someone else computes the same thing (torch's GradScaler, AdamW, clipping,
DistributedDataParallel, a plain model), that is what we compare with. Upstream gradients are
random: all-ones hide what is transposed. A test of something that could be absent shows first that
its absence makes a difference.

Eight processes are started once and do all the distributed work, in a fresh process group each
time; nothing here needs a network or a GPU.
"""
import functools
import gc
import hashlib
import http.server
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
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
import threading
import time
import traceback
import warnings
import weakref
import zipfile
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parent
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1",
                  PYTHONPATH=str(ROOT))
sys.dont_write_bytecode = True      # the tests leave nothing behind

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amp
import checkpoint
import data
import model
import parallel
import sample
import train
from model import GPT, IGNORE_INDEX, SIZES, GPTConfig
from parallel import (FlatParameters, Grid, RunError, gpipe, make_grid, one_f_one_b,
                      run_schedule)

torch.set_num_threads(1)

# Neither tp nor pp divides the 257 tokens or the five layers.
CFG = GPTConfig(vocab_size=257, seq_len=16, n_layer=5, n_head=8, n_embd=32)
OWN = ("data", "grad", "master", "exp_avg", "exp_avg_sq")       # what a rank keeps of a bucket
LAYOUTS = [(world // (tp * pp), tp, pp) for world in (1, 2, 4, 8) for tp in (1, 2, 4, 8)
           for pp in (1, 2, 4, 8) if world % (tp * pp) == 0]        # (dp, tp, pp)


# ---------------------------------------------------------------------------------------------
# Eight processes
# ---------------------------------------------------------------------------------------------


FORKS = multiprocessing.get_context("forkserver")      # forks of a process that has imported torch
FORKS.set_forkserver_preload(["test_all"])


def worker(rank, pipe, environment):
    os.environ.update(environment)
    sys.stdout = open(os.devnull, "w")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            world, store, seconds, fn, args = pickle.loads(message)
            if world > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                        world_size=world, timeout=timedelta(seconds=seconds))
            answer = True, fn(rank, world, *args)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))       # plain pickle: no shared memory


class Pool:
    """`run` calls a function of this module on the first `world` of eight processes."""

    def __init__(self, **environment):
        self.processes, self.pipes, self.environment = [], [], environment

    def start(self):
        for rank in range(8):
            pipe, theirs = FORKS.Pipe()
            process = FORKS.Process(target=worker, args=(rank, theirs, self.environment),
                                    daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(pipe)

    def stop(self):
        for process, pipe in zip(self.processes, self.pipes):
            process.kill()
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []

    def run(self, world, fn, *args, seconds=120):
        """[fn(rank, world, *args) of each rank]. A rank's exception is raised here with its
        traceback; after it, or `seconds`, the processes are replaced."""
        if not self.processes:
            self.start()
        try:
            with tempfile.TemporaryDirectory() as folder:
                message = pickle.dumps((world, f"{folder}/store", seconds, fn, args))
                for pipe in self.pipes[:world]:
                    pipe.send_bytes(message)
                answers, end = {}, time.monotonic() + seconds
                while len(answers) < world:
                    waiting = [p for r, p in enumerate(self.pipes[:world]) if r not in answers]
                    ready = multiprocessing.connection.wait(waiting, end - time.monotonic())
                    if not ready:
                        raise TimeoutError(f"{fn.__name__}: no answer in {seconds} s")
                    for pipe in ready:
                        rank = self.pipes.index(pipe)
                        good, answers[rank] = pickle.loads(pipe.recv_bytes())
                        if not good:
                            raise RuntimeError(f"rank {rank} of {world}:\n{answers[rank]}")
            return [answers[rank] for rank in range(world)]
        except BaseException:
            self.stop()
            raise


def run_file(folder, cwd, environment, file, arguments):
    """What `python FILE ARGUMENTS` does, in this process, with its output in files."""
    for number, name in [(1, "out"), (2, "error")]:
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = [str(file), *arguments]
    runpy.run_path(str(ROOT / file), run_name="__main__")


class Command:
    """`python FILE ARGUMENTS` in a process of its own, a fork of one that has imported torch."""

    def __init__(self, file, *arguments, cwd=ROOT, **environment):
        self.folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        environment = {name: str(value) for name, value in environment.items()}
        self.process = FORKS.Process(target=run_file, args=(
            self.folder, cwd, environment, file, list(map(str, arguments))), daemon=True)
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Command(file, *flags, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world,
                    LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                    **environment) for rank in range(world)]


@contextmanager
def gridded(rank, world, tp, pp, sequence_parallel=False):
    """This rank's grid, whose process groups end with the block: the gradient hooks of its
    parameters keep it alive for ever, and each group is two threads."""
    grid = make_grid(world, tp, pp, rank, sequence_parallel)
    try:
        yield grid
    finally:
        grid.groups.clear()


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session", autouse=True)
def leave_nothing_behind():
    """pytest compiles this file before its first line has run."""
    yield
    for file in (ROOT / "__pycache__").glob("test_all.*"):
        file.unlink()
    with suppress(OSError):
        (ROOT / "__pycache__").rmdir()


# ---------------------------------------------------------------------------------------------
# A run of train.py on one rank, and a look at it after every step
# ---------------------------------------------------------------------------------------------


class Memory:
    """A data.TokenDataset without files: each token follows from the one before, but one in four
    is drawn."""

    def __init__(self, cfg, n_windows=150, seed=0):
        rng = np.random.default_rng(seed)
        self.seq_len, self.n_windows = cfg.seq_len, n_windows
        self.n_tokens = n_windows * cfg.seq_len + 1
        tokens = rng.integers(cfg.vocab_size, size=self.n_tokens)
        for i in np.flatnonzero(rng.random(self.n_tokens) < 0.75):
            tokens[i] = (3 * tokens[i - 1] + 7) % cfg.vocab_size
        self.tokens = tokens
        self.meta = dict(tokenizer="bytes", vocab_size=cfg.vocab_size, bytes_per_token=1.0,
                         fingerprint="memory")

    def sample_indices(self, seed, first, count):
        permutation = np.random.default_rng(seed).permutation(self.n_windows)
        return permutation[np.arange(first, first + count) % self.n_windows]

    def windows(self, indices):
        T = self.seq_len
        return np.stack([self.tokens[i * T:i * T + T + 1] for i in indices]).astype(np.int64)


class Rows:
    """train.Metrics for a test: keeps the rows, and what `look(run)` sees after each step."""

    def __init__(self, run, look):
        self.run, self.look, self.steps, self.seen = run, look, [], []
        run.events = []

    def write(self, **row):
        if "event" in row:
            self.run.events.append(row)
        else:
            self.steps.append(row)
            self.seen.append(self.look(self.run))


def settings(out, **changes):
    usual = dict(batch_size=8, micro_batch=2, steps=20, lr=1e-3, warmup_steps=5, eval_every=0,
                 save_every=0, device="cpu")
    return train.Config(**{**usual, **changes, "out": str(out)})


def whole_gradient(run):
    whole = checkpoint.gather_full_state(run.flat, run.cfg, run.grid, ["grad"])
    return whole and whole["grad"]


def nothing(run):
    return None


def run_steps(rank, world, layout, config, cfg, look=nothing, state=None, prepare=nothing):
    """Train with train.Run on this rank -> (rows, what `look` saw, whole final state)."""
    dp, tp, pp = layout
    with gridded(rank, world, tp, pp, config.sequence_parallel) as grid:
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg),
                        Memory(cfg, 13, seed=1), state and checkpoint.load(state))
        prepare(run)
        rows = Rows(run, look)
        run.train(rows, SimpleNamespace(requested=False))
        whole = checkpoint.gather_full_state(run.flat, cfg, grid, checkpoint.STATE.values())
    return rows.steps, rows.seen, whole


def staged(cfg, grid, dtype=torch.float32, recompute=False, zero=0):
    """This rank's stage at step 0 of seed 0 -> (model, its FlatParameters)."""
    local = parallel.build_stage(cfg, grid)
    flat = FlatParameters(parallel.param_specs(local, cfg, grid), grid, dtype,
                          torch.promote_types(dtype, torch.float32), "cpu", zero)
    parallel.wrap_blocks(local, recompute, compile=False)
    if zero == 3:
        parallel.fully_shard(local, flat)
    flat.initialize(cfg, 0)
    return local, flat


def relative(ours, theirs):
    """Largest |difference| of numbers, or of tensors in Euclidean norm, relative to `theirs`."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        return max(relative(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        return max(map(relative, ours, theirs))
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / theirs.norm()).item()


def column(steps, name):
    return [row[name] for row in steps]


def deep_enough(layout):
    """Layers that no pp above 1 divides, but no more than needed."""
    return replace(CFG, n_layer=9 if layout[2] == 8 else 5)


def equality_row(pool, layout, one, config, cfg):
    """Largest relative differences (loss, gradient, norm) from one process, over all steps."""
    dp, tp, pp = layout
    # Fewer microbatches than stages where pp is 4 or 8.
    num_microbatches = max(pp // 2, 1 if tp > 2 else 2)
    config = replace(config, tp=tp, pp=pp, recompute=pp in (2, 8),
                     micro_batch=max(1, 8 // (dp * num_microbatches)))
    steps, gradients, _ = pool.run(dp * tp * pp, run_steps, layout, config, cfg, whole_gradient)[0]
    losses, expected = ([*column(rows, "loss"), rows[-1]["val_loss"]] for rows in (steps, one[0]))
    return (relative(losses, expected), relative(gradients, one[1]),
            relative(column(steps, "grad_norm"), column(one[0], "grad_norm")))


def equality_table(pool, dtype, out):
    """Yields (layout, (loss, gradient, norm)): the README's table."""
    config = settings(out, dtype=dtype, micro_batch=8)
    one = {cfg: pool.run(1, run_steps, (1, 1, 1), config, cfg, whole_gradient)[0]
           for cfg in map(deep_enough, LAYOUTS)}
    for layout in LAYOUTS:
        cfg = deep_enough(layout)
        yield layout, equality_row(pool, layout, one[cfg], config, cfg)


# ---------------------------------------------------------------------------------------------
# model.py
# ---------------------------------------------------------------------------------------------


def tokens_of(cfg, batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(cfg.vocab_size, (batch, cfg.seq_len), generator=generator)


@pytest.mark.parametrize("name", ["nano", "gpt2", "gpt2-xl", "gpt3-13b", "opt-66b"])
def test_parameter_count_is_what_the_model_holds_without_padding(name):
    cfg = GPTConfig(vocab_size=50257, **SIZES[name])
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in GPT(cfg).parameters())
    padding = (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd
    assert model.parameter_count(cfg) == held - padding


def test_named_sizes_have_the_published_numbers_of_parameters():
    count = {name: model.parameter_count(GPTConfig(vocab_size=50257, **size))
             for name, size in SIZES.items()}
    assert count["gpt2"] == 124_439_808 and count["gpt2-xl"] == 1_557_611_200
    for name, published in [("gpt2-medium", 355e6), ("gpt2-large", 774e6), ("gpt3-1.3b", 1.3e9),
                            ("gpt3-2.7b", 2.7e9), ("gpt3-6.7b", 6.7e9), ("gpt3-13b", 13e9),
                            ("gpt3-175b", 175e9), ("opt-30b", 30e9), ("opt-66b", 66e9),
                            ("opt-175b", 175e9)]:
        assert count[name] == pytest.approx(published, rel=0.03), name
    assert all(SIZES[name]["activation"] == ("relu" if "opt" in name else "gelu") for name in SIZES)


def test_flops_are_counted_from_the_matrix_products():
    """Two for a multiplication and an addition, forward once and backward twice."""
    cfg = replace(CFG, vocab_size=256)          # no padding, which does work that does not count
    tokens = tokens_of(cfg, 1)
    with FlopCounterMode(display=False) as counter, \
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        x = GPT(cfg).initialize(0)(tokens, tokens)
        x.backward()
    # The formula has the vectors in N too: biases and LayerNorm.
    vectors = 6 * (cfg.n_layer * 13 + 2) * cfg.n_embd
    counted = counter.get_total_flops() / cfg.seq_len
    assert model.flops_per_token(cfg) - vectors == pytest.approx(counted, rel=1e-9)


def test_initial_values_have_the_deviation_their_name_asks_for():
    cfg = GPTConfig(n_layer=8, n_embd=128)
    for name, parameter in GPT(cfg).initialize(0).named_parameters():
        parameter = parameter[:cfg.vocab_size] if name == "embed.token.weight" else parameter
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(16) if residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.001


def test_initial_loss_is_that_of_a_uniform_guess():
    tokens = tokens_of(CFG, 16)
    loss = GPT(CFG).initialize(0)(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(math.log(257), abs=0.02)


def test_a_position_sees_no_later_one_and_short_sequences_give_the_same():
    plain = GPT(replace(CFG, activation="relu")).initialize(0).double().eval()
    tokens = tokens_of(CFG, 2)
    whole = plain(tokens)
    assert whole.shape == (2, 16, 257)          # padding is not seen
    for t in (1, 7, 15):
        torch.testing.assert_close(plain(tokens[:, :t]), whole[:, :t])
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % 257
        difference = (plain(changed) - whole).abs().amax(dim=(0, 2))
        assert difference[:t].max() == 0 and difference[t:].min() > 1e-6


def test_ignored_targets_and_padding_count_for_nothing():
    plain, tokens = GPT(CFG).initialize(0).double(), tokens_of(CFG, 2)
    targets = tokens.clone()
    targets[0, 3:] = IGNORE_INDEX
    whole = plain(tokens).flatten(0, 1).log_softmax(-1)
    kept = targets.flatten() != IGNORE_INDEX
    expected = -whole[kept, targets.flatten()[kept]].sum()
    loss = plain(tokens, targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    weight = plain.embed.token.weight
    assert not weight[257:].any() and not weight.grad[257:].any() and weight.shape[0] == 384


def test_dropout_is_a_function_of_the_key():
    plain, tokens = GPT(replace(CFG, dropout=0.3)).initialize(0), tokens_of(CFG, 2)
    torch.manual_seed(0)
    one = plain(tokens, dropout_seed=1)
    torch.manual_seed(5)                        # the state of torch's generator has no say
    assert plain(tokens, dropout_seed=1).equal(one) and not plain(tokens, dropout_seed=2).equal(one)
    plain.eval()
    assert plain(tokens, dropout_seed=1).equal(plain(tokens, dropout_seed=2))


@pytest.mark.parametrize("bad", [dict(n_head=5), dict(n_layer=0), dict(activation="tanh"),
                                 dict(dropout=1.0), dict(dropout=-0.1), dict(vocab_size=0)])
def test_a_shape_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match="|".join(bad)):
        replace(CFG, **bad)


def test_the_loss_of_16_bit_logits_is_computed_in_fp32():
    tokens, grid = tokens_of(CFG, 2), Grid(1, 1, 1)
    plain = GPT(CFG).initialize(0).bfloat16()
    local, _ = staged(CFG, grid, torch.bfloat16)
    logits = plain(tokens).float().flatten(0, 1)
    expected = F.cross_entropy(logits, tokens.flatten(), reduction="sum")
    for kind in (plain, local):
        torch.testing.assert_close(kind(tokens, tokens), expected)


# ---------------------------------------------------------------------------------------------
# data.py
# ---------------------------------------------------------------------------------------------

NASTY = ["a  b", " \n\n \tx", "don't 've ''s", "\u00e9t\u00e9 \u6f22\u5b57 \u00a0\u2003x \u3000",
         "\r\n\r\n", "    ", "12 345 !?", "\x85\x1c \x1d\n", "\U0001f600 \U0001f469\u200d",
         data.EOT, "\u200b ", "A", "\n", " ", "\t\v", "'"]


@pytest.fixture
def gpt2(monkeypatch):
    cache = ROOT.parent / "shared" / "tiktoken_cache"
    if not cache.is_dir():
        pytest.skip("needs the GPT-2 vocabulary in ../shared/tiktoken_cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    return data.get_tokenizer("gpt2")


def run_data(capsys, *arguments):
    """(exit status, standard output, standard error) of `python data.py ...`."""
    try:
        status = data.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, np.uint16).tobytes())


def texts_of(directory, split):
    """The documents of a split, read without data.py's own reader."""
    encoding = data.get_tokenizer(json.loads((directory / "meta.json").read_text())["tokenizer"])
    tokens = [np.fromfile(file, np.uint16, offset=1024)
              for file in sorted(directory.glob(f"{split}_*.bin"))]
    text = encoding.decode_bytes(np.concatenate(tokens).tolist()).decode()
    assert text.startswith(data.EOT)
    return text.split(data.EOT)[1:]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_bytes_tokenizer_is_an_encoding_of_257_tokens_that_round_trips_any_text():
    encoding = data.get_tokenizer("bytes")
    text = "".join(NASTY) + "x" * 1000
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_pieces_encode_to_the_tokens_of_the_whole(gpt2, monkeypatch):
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(NASTY, k=rng.randrange(1, 60)))
        monkeypatch.setattr(data, "PIECE", rng.randrange(100, 200))
        blocks = [text[i:i + 7] for i in range(0, len(text), 7)]
        cut = list(data.chunks(blocks))
        assert "".join(cut) == text and max(map(len, cut)) <= data.PIECE
        assert sum(map(gpt2.encode_ordinary, cut), []) == gpt2.encode_ordinary(text)
    monkeypatch.setattr(data, "PIECE", 10)
    assert list(data.chunks(["x" * 25])) == ["x" * 10, "x" * 10, "x" * 5]   # no place, but bounded


def test_every_cut_that_CUT_allows_is_exact_and_others_are_not(gpt2):
    rng, wrong = random.Random(1), 0
    for _ in range(100):
        text = "".join(rng.choices(NASTY, k=12))
        whole = gpt2.encode_ordinary(text)
        for at in range(1, len(text)):
            exact = gpt2.encode_ordinary(text[:at]) + gpt2.encode_ordinary(text[at:]) == whole
            allowed = data.CUT.match(text, at - 1, at + 1) is not None
            assert exact or not allowed, (text, at)
            wrong += not exact
    assert wrong > 100


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_shards_hold_every_document_after_its_separator(tmp_path, tokenizer, request):
    request.getfixturevalue("gpt2") if tokenizer == "gpt2" else None
    texts = [f"{i} " + "".join(random.Random(i).sample(NASTY, 9)).replace(data.EOT, "<|end|>")
             for i in range(200)]
    meta = data.prepare([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "out", tokenizer)
    train, val = (texts_of(tmp_path / "out", split) for split in data.SPLITS)
    assert sorted(train + val) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]      # in the order of the input
    assert 1 <= len(val) <= 30 and meta["documents"] == 200
    assert meta["bytes_per_token"] == sum(len(t.encode()) for t in val) / meta["tokens"]["val"]


def test_the_separators_characters_in_a_text_are_ordinary_text(tmp_path):
    (tmp_path / "a.txt").write_text(f"one{data.EOT}two" * 20)
    data.prepare([tmp_path / "a.txt"], tmp_path, "bytes")
    tokens = np.fromfile(tmp_path / "train_000000.bin", np.uint16, offset=1024)
    assert (tokens == 256).sum() == 1 and tokens[0] == 256


def test_a_shard_has_the_format_of_llm_c_and_ends_where_asked(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 400)
    meta = data.prepare([tmp_path / "a.txt"], tmp_path, "bytes", shard_tokens=1500)
    counts = []
    for name in ("train_000000.bin", "train_000001.bin", "train_000002.bin", "val_000000.bin"):
        raw = (tmp_path / name).read_bytes()
        header = np.frombuffer(raw[:1024], np.int32)
        assert header[:2].tolist() == [20240520, 1] and not header[3:].any()
        assert len(raw) == 1024 + 2 * header[2]
        counts.append(header[2])
    assert counts == [1500, 1500, 801, 201]
    assert meta["tokens"] == {"train": 3801, "val": 201}


def test_the_split_depends_on_seed_and_text_not_on_order_or_neighbours(tmp_path):
    texts = [f"document {i}" for i in range(400)]

    def val(name, texts, seed):
        data.prepare([write_jsonl(tmp_path / f"{name}.jsonl", texts)], tmp_path / name, "bytes",
                     seed=seed)
        return set(texts_of(tmp_path / name, "val"))

    first = val("a", texts, 0)
    assert 5 <= len(first) <= 40
    assert val("b", texts[::-1], 0) == first
    assert val("c", texts[:300], 0) == first & set(texts[:300])
    assert val("d", texts, 1) != first


def test_twenty_documents_always_leave_one_for_each_split(tmp_path):
    files = [write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(20)])]
    sizes = set()
    for seed in range(12):
        cuts, _ = data.index_documents(files, seed)
        sizes.add(int((cuts == 0).sum()))
    assert min(sizes) == 1 and max(sizes) < 20


def test_of_few_documents_each_gives_its_last_twentieth_at_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK", 7)
    texts = ["é" * 101, "abcdefghij" * 10, "漢字" * 40 + "x"]
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for file, text in zip(files, texts):
        file.write_text(text)
    data.prepare(files, tmp_path, "bytes")
    train, val = (texts_of(tmp_path, split) for split in data.SPLITS)
    assert [a + b for a, b in zip(train, val)] == texts
    assert [len(tail.encode()) for tail in val] == [10, 5, 13]


def test_duplicates_and_blank_documents_are_dropped_and_counted(tmp_path):
    for number, text in enumerate([b"one text\n", b"one text\n", b"one text\r\n", b" \n"]):
        (tmp_path / f"{number}.txt").write_bytes(text)
    meta = data.prepare(sorted(tmp_path.glob("*.txt")), tmp_path, "bytes")
    assert (meta["documents"], meta["duplicates"], meta["skipped"]) == (2, 1, 1)
    joined = "".join(a + b for a, b in zip(texts_of(tmp_path, "train"), texts_of(tmp_path, "val")))
    assert joined == "one text\none text\r\n"          # line ends are kept as they are


def test_tinystories_documents_stand_between_lines_of_the_separator(tmp_path):
    path = tmp_path / "a.eot"
    path.write_text("Once\nupon\n<|endoftext|>\n\nThe end <|endoftext|> not\n<|endoftext|>\n")
    documents = ["".join(blocks) for blocks in data.read_documents(path)]
    assert documents == ["Once\nupon", "The end <|endoftext|> not"]


def test_a_new_run_replaces_the_shards_of_an_earlier_one(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 500)
    first = data.prepare([tmp_path / "a.txt"], tmp_path, "bytes", shard_tokens=1024)
    second = data.prepare([tmp_path / "a.txt"], tmp_path, "bytes")
    again = data.prepare([tmp_path / "a.txt"], tmp_path, "bytes")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "meta.json", "train_000000.bin",
                                            "val_000000.bin"]
    assert first["fingerprint"] != second["fingerprint"] == again["fingerprint"]
    names = ["train_000000.bin", "val_000000.bin"]
    digest = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in names))
    assert second["fingerprint"] == digest.hexdigest()


def test_a_run_that_fails_leaves_the_earlier_shards_whole(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abcdefghij" * 500)
    data.prepare([tmp_path / "a.txt"], tmp_path, "bytes")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    results = iter([("train", np.zeros(9, np.uint16), 9)])
    monkeypatch.setattr(data, "encode", lambda *_: (next(results) for _ in range(2)))
    with pytest.raises(RuntimeError):
        data.prepare([tmp_path / "a.txt"], tmp_path, "bytes")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_foreign_shards_are_neither_deleted_nor_mixed_in(tmp_path, capsys):
    write_shard(tmp_path / "fineweb_train_000001.bin", [1, 2])
    (tmp_path / "a.txt").write_text("some text")
    status, _, line = run_data(capsys, "--input", tmp_path / "a.txt", "--tokenizer", "bytes",
                               "--out", tmp_path)
    assert status == 2 and "fineweb_train_000001.bin" in line
    assert (tmp_path / "fineweb_train_000001.bin").exists()


def test_embedded_default_is_the_standard_library_in_bytes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run_data(capsys)
    assert status == 0 and "\npython train.py\n" in out
    meta = data.TokenDataset("data/python", "train", 256).meta
    assert meta["tokenizer"] == "bytes" and meta["documents"] > 300
    assert any(json.__doc__ in text for split in data.SPLITS
               for text in texts_of(Path("data/python"), split))
    assert not {"test", "tests", "idle_test", "site-packages"} & {
        part for path in data.standard_library()[0] for part in path.parts[-2:]}


def test_unreadable_files_of_the_standard_library_are_skipped_and_counted(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("x = 2\n")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert data.standard_library() == ([tmp_path / "good.py"], 1)
    monkeypatch.chdir(tmp_path)
    data.main([])
    assert json.loads((tmp_path / "data/python/meta.json").read_text())["skipped"] == 1


def test_data_ends_with_the_train_command_that_uses_what_it_made(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 99)
    status, out, _ = run_data(capsys, "--input", tmp_path / "a.txt", "--tokenizer", "bytes",
                              "--out", tmp_path / "my data")
    command = out.splitlines()[-2]
    assert status == 0 and command == (f"python train.py --data '{tmp_path}/my data' "
                                        f"--out 'out/my data'")


@pytest.mark.parametrize("name, content, words", [
    ("none.txt", None, ["none.txt", "No such file"]),
    ("empty.txt", b"", ["empty.txt", "is empty"]),
    ("tiny.txt", b"a", ["no text"]),
    ("blank.jsonl", b'{"text": ""}\n{"text": " \\n"}\n', ["no text"]),
    ("latin.txt", b"x" * 300_000 + "ä".encode("latin-1") + b"!", ["latin.txt", "byte 300000"]),
    ("torn.txt", b"x" * 50 + "漢".encode()[:2], ["torn.txt", "byte 50"]),
    ("latin.jsonl", b'{"text": "ok"}\n{"text": "\xe4"}\n', ["latin.jsonl", "byte 25"]),
    ("bad.jsonl", b'{"text": "ok"}\n\n{"text": }\n', ["bad.jsonl line 3", "JSON"]),
    ("half.jsonl", b'{"text": "\\ud800"}\n', ["half.jsonl line 1", "surrogate"]),
    ("field.jsonl", b'{"text": "ok"}\n{"txt": "a"}\n', ["field.jsonl line 2", '"text"']),
    ("number.jsonl", b'{"text": 5}\n', ["number.jsonl line 1", '"text"']),
    ("list.jsonl", b'["text"]\n', ["list.jsonl line 1", '"text"']),
    ("data.csv", b"a,b\n", ["data.csv", ".txt", ".jsonl"]),
])
def test_bad_input_ends_in_one_line_and_exit_2(tmp_path, capsys, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    status, out, line = run_data(capsys, "--input", tmp_path / name, "--tokenizer", "bytes",
                                 "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert line.startswith("data.py: ") and line.count("\n") == 1
    assert all(word in line for word in words), line
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("arguments, word", [
    (["--out", "FILE"], "FILE"), (["--input", "FILE"], "--out"), (["--dataset", "none"], "none"),
    (["--seed", "-1"], "--seed"), (["--shard-tokens", "9"], "1024"),
    (["--no-such-flag"], "no-such"),
    (["--input", "FILE", "--dataset", "shakespeare"], "not allowed"),
])
def test_a_bad_command_line_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys, arguments, word):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("x")
    status, _, line = run_data(capsys, *arguments)
    assert status == 2 and line.startswith("data.py: ") and line.count("\n") == 1 and word in line


def test_without_gpt2_vocabulary_the_files_to_get_are_named(tmp_path, monkeypatch, capsys):
    def no_network(*_, **__):
        raise data.requests.ConnectionError("no network")
    monkeypatch.setattr(data.requests, "get", no_network)
    monkeypatch.setattr(data.time, "sleep", lambda _: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some text")
    status, _, line = run_data(capsys, "--input", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert status == 1 and line.count("\n") == 1
    for word in ("TIKTOKEN_CACHE_DIR", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
                 "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "vocab.bpe", "encoder.json",
                 "--tokenizer bytes"):
        assert word in line


@pytest.fixture
def server():
    """serve(body, ...): a URL on this machine, and where its requests began. ranges: it knows
    Range; drop: so many replies end half way; length: it says how long the body is."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body, ranges, asked = self.server.body, self.server.ranges, self.headers["Range"]
            start = int(asked[6:-1]) if ranges and asked else 0
            self.server.starts.append(start)
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206 if ranges and asked else 200)
            if ranges and asked:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            if self.server.length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = (start + len(body)) // 2 if self.server.drop > 0 else len(body)
            self.server.drop -= 1
            self.wfile.write(body[start:end])

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()

    def serve(body, ranges=True, drop=0, length=True):
        httpd.body, httpd.ranges, httpd.drop, httpd.length = body, ranges, drop, length
        httpd.starts = []
        return f"http://127.0.0.1:{httpd.server_port}/file", httpd.starts

    yield serve
    httpd.shutdown()
    httpd.server_close()


BODY = np.random.default_rng(0).bytes(2_000_000)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_download_goes_on_or_starts_over(tmp_path, server, ranges):
    url, starts = server(BODY, ranges=ranges, drop=2)
    data.download(url, tmp_path / "raw" / "file", wait=0.01)
    assert (tmp_path / "raw" / "file").read_bytes() == BODY
    assert os.listdir(tmp_path / "raw") == ["file"]
    assert starts[0] == 0 and len(starts) == 3 and (starts[2] > starts[1] > 0) == ranges
    data.download(url, tmp_path / "raw" / "file")          # what is there is not fetched again
    assert len(starts) == 3


def test_a_download_goes_on_in_the_next_run_and_a_wrong_remainder_starts_over(tmp_path, server):
    url, starts = server(BODY)
    (tmp_path / "a.part").write_bytes(BODY[:1_500_000])
    data.download(url, tmp_path / "a")
    sha256 = hashlib.sha256(BODY).hexdigest()
    for size in (1000, len(BODY), len(BODY) + 5):       # the last two are answered with 416
        (tmp_path / "b.part").write_bytes(b"x" * size)
        (tmp_path / "b").write_bytes(b"damaged")
        data.download(url, tmp_path / "b", sha256, wait=0.01)
        assert (tmp_path / "b").read_bytes() == BODY
    assert (tmp_path / "a").read_bytes() == BODY and starts[0] == 1_500_000


def test_a_download_that_stays_wrong_is_refused(tmp_path, server, monkeypatch, capsys):
    url, starts = server(BODY, drop=99)
    with pytest.raises(ConnectionError, match="in 3 tries"):
        data.download(url, tmp_path / "short", tries=3, wait=0.01)
    url, starts = server(BODY)
    with pytest.raises(ConnectionError):
        data.download(url, tmp_path / "other", "0" * 64, tries=3, wait=0.01)
    url, starts = server(BODY, ranges=False, length=False)      # nothing says that it is whole
    with pytest.raises(ConnectionError):
        data.download(url, tmp_path / "endless", tries=3, wait=0.01)
    assert not any((tmp_path / name).exists() for name in ("short", "other", "endless"))
    monkeypatch.setattr(data.time, "sleep", lambda _: None)
    monkeypatch.setitem(data.DOWNLOADS, "shakespeare", (url, "0" * 64, ".txt"))
    capsys.readouterr()
    status, out, err = run_data(capsys, "--dataset", "shakespeare", "--out", tmp_path / "out")
    assert (status, out) == (1, "") and err.splitlines()[-1].startswith("data.py: cannot download")


def test_shakespeare_is_the_known_text(tmp_path, server, monkeypatch, gpt2):
    text = ROOT.parent / "shared" / "text" / "shakespeare.txt"
    if not text.exists():
        pytest.skip("needs ../shared/text/shakespeare.txt")
    url, _ = server(text.read_bytes(), drop=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data.time, "sleep", lambda _: None)
    monkeypatch.setitem(data.DOWNLOADS, "shakespeare", (url, *data.DOWNLOADS["shakespeare"][1:]))
    assert data.main(["--dataset", "shakespeare"]) == 0
    train = data.TokenDataset("data/shakespeare", "train", 1024)
    cut = len(text.read_bytes()) - len(text.read_bytes()) // 20
    assert train.shards[0].tolist() == [50256] + gpt2.encode_ordinary(text.read_text()[:cut])


def dataset(directory, shards, meta=True, seq_len=4):
    for name, tokens in shards.items():
        write_shard(directory / f"{name}.bin", tokens)
    if meta:
        (directory / "meta.json").write_text(json.dumps(dict(
            tokenizer="bytes", vocab_size=257, bytes_per_token=1.0, fingerprint="f")))
    return data.TokenDataset(directory, "train", seq_len)


def test_windows_share_one_token_and_stay_in_their_shard(tmp_path):
    windows = dataset(tmp_path, {"train_0": range(13), "train_1": range(99, 102),
                                 "train_2": range(100, 112), "val_0": range(9)})
    assert (windows.n_tokens, windows.n_windows) == (28, 5)
    assert windows.windows(np.array([2, 0, 4, 3])).tolist() == [
        [8, 9, 10, 11, 12], [0, 1, 2, 3, 4], [104, 105, 106, 107, 108], [100, 101, 102, 103, 104]]
    assert windows.windows([1]).dtype == np.int64


def test_order_is_a_seeded_permutation_an_epoch_and_a_function_of_the_position(tmp_path):
    shards = {"train_0": range(201)}
    stream = dataset(tmp_path, shards).sample_indices(7, 0, 170)
    assert stream.dtype == np.int64
    epochs = stream[:150].reshape(3, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist() + [list(range(50))]}) == 4
    fresh = dataset(tmp_path, shards)
    for first, count in [(140, 30), (0, 7), (49, 2), (30, 120), (3, 0)]:      # any order of asking
        drawn = fresh.sample_indices(7, first, count)
        assert drawn.tolist() == stream[first:first + count].tolist()
    assert fresh.sample_indices(8, 0, 50).tolist() != stream[:50].tolist()


def test_a_token_beyond_the_vocabulary_is_found_by_exactly_one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK", 4)
    for at in range(38):
        tokens = np.arange(38) % 200
        tokens[at] = 257
        bad = dataset(tmp_path, {"train_0": tokens[:17], "train_1": tokens[17:]})
        where = f"train_{int(at >= 17)}.bin position {at - 17 * (at >= 17)}: token 257 .* 257"
        found = 0
        for part in range(3):
            try:
                bad.check(part, 3)
            except ValueError as error:
                found += bool(data.re.search(where, str(error)))
        assert found == 1
    with pytest.raises(ValueError, match="train_1.bin position 20: token 257"):
        bad.windows([0, 8])
    assert bad.windows([0, 1]).shape == (2, 5)
    dataset(tmp_path, {"train_0": [256] * 9, "train_1": [0] * 9}).check(0, 1)


def test_ready_made_shards_without_meta_are_gpt2(tmp_path):
    meta = dataset(tmp_path, {"fineweb_train_000001": range(9)}, meta=False).meta
    assert (meta["tokenizer"], meta["vocab_size"], meta["bytes_per_token"]) == ("gpt2", 50257, None)
    more = dataset(tmp_path, {"fineweb_train_000001": range(11)}, meta=False).meta
    assert meta["fingerprint"] != more["fingerprint"]


HEADER_ALONE = np.array([20240520, 1] + [0] * 254, np.int32).tobytes()


@pytest.mark.parametrize("change, words", [
    (dict(magic=20240521), ["20240521"]), (dict(version=2), ["20240520, 2"]),
    (dict(count=21), ["21", "1064"]), (dict(count=19), ["19", "1064"]), (HEADER_ALONE, ["1024"]),
    (b"short", ["5 bytes"]), (b"", ["0 bytes"]),
])
def test_a_damaged_shard_is_refused_with_its_name_and_numbers(tmp_path, change, words):
    path = tmp_path / "train_000000.bin"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        write_shard(path, range(20), **change)
    with pytest.raises(ValueError) as error:
        data.TokenDataset(tmp_path, "train", 4)
    assert all(word in str(error.value) for word in [path.name, *words])


def test_too_few_tokens_for_a_window_are_refused(tmp_path):
    assert dataset(tmp_path, {"train_0": range(5)}, seq_len=4).n_windows == 1
    with pytest.raises(ValueError, match="train_0.bin: 5 tokens .* 5 "):
        data.TokenDataset(tmp_path, "train", 5)


def test_shards_whose_meta_was_not_written_are_not_taken_for_gpt2s(tmp_path):
    (tmp_path / "a.txt").write_text("a text " * 9)
    replace_file = os.replace

    def killed(path, target):
        if target.name == "meta.json":
            raise KeyboardInterrupt
        replace_file(path, target)
    for _ in range(2):                      # in a new directory, and over an earlier data set
        with mock.patch.object(os, "replace", killed), pytest.raises(KeyboardInterrupt):
            data.prepare([tmp_path / "a.txt"], tmp_path / "d", "bytes")
        with pytest.raises(ValueError, match="meta.json is damaged.*run data.py again"):
            data.TokenDataset(tmp_path / "d", "train", 4)
        data.prepare([tmp_path / "a.txt"], tmp_path / "d", "bytes")
        assert data.TokenDataset(tmp_path / "d", "train", 4).meta["tokenizer"] == "bytes"


@pytest.mark.parametrize("text", ["{", "[]", '{"tokenizer": "gpt2"}'])
def test_a_damaged_meta_is_refused(tmp_path, text):
    write_shard(tmp_path / "train_0.bin", range(9))
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ValueError, match="meta.json is damaged"):
        data.TokenDataset(tmp_path, "train", 4)


def test_without_shards_the_message_says_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory, command in {"data/python": "`python data.py`", "mine": "--out mine",
                               "data/shakespeare": "--dataset shakespeare"}.items():
        with pytest.raises(FileNotFoundError, match=command):
            data.TokenDataset(directory, "train", 4)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_size_of_a_document(tmp_path):
    # VmHWM, not ru_maxrss: the latter starts from the memory of the process that forked.
    program = ("import sys, re, pathlib, data\n"
               "data.prepare([pathlib.Path(sys.argv[1])], pathlib.Path(sys.argv[2]), 'bytes')\n"
               "status = pathlib.Path('/proc/self/status').read_text()\n"
               "print(re.search(r'VmHWM:\\s+(\\d+)', status)[1])")
    peaks = []
    for megabytes in (4, 44):
        text = "All work and no play makes Jack a dull boy.\n" * (megabytes * 1_000_000 // 44)
        (tmp_path / "a.txt").write_text(text)
        run = subprocess.run([sys.executable, "-c", program, tmp_path / "a.txt", tmp_path],
                             cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        peaks.append(int(run.stdout) / 1000)
    assert peaks[1] < peaks[0] + 15, peaks


def test_tokens_stay_in_order_where_jobs_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(data.os, "cpu_count", lambda: 1)
    texts = [f"document {i}" for i in range(400)]       # 8 jobs, 3 of them under way
    data.prepare([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path, "bytes")
    train = texts_of(tmp_path, "train")
    assert train == [text for text in texts if text in set(train)]


def test_the_flags_of_data_arrive(tmp_path, capsys):
    file = write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(400)])
    vals = []
    for seed in (0, 1):
        assert run_data(capsys, "--input", file, "--tokenizer", "bytes", "--out", tmp_path / "o",
                        "--seed", seed, "--shard-tokens", 2000)[0] == 0
        vals.append(texts_of(tmp_path / "o", "val"))
        sizes = [(f.stat().st_size - 1024) // 2 for f in sorted((tmp_path / "o").glob("train*"))]
        assert len(sizes) > 1 and set(sizes[:-1]) == {2000} and sizes[-1] <= 2000
    assert vals[0] != vals[1]


# ---------------------------------------------------------------------------------------------
# amp.py
# ---------------------------------------------------------------------------------------------


def torch_scales(settings, overflows):
    """The scales of torch's own GradScaler around a real optimizer."""
    scaler = torch.amp.GradScaler("cpu", **settings)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in overflows:
        weight.grad = torch.full((2,), math.inf if overflow else 0.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


@pytest.mark.parametrize("seed", range(20))
def test_the_scale_moves_as_in_torch(seed):
    rng = random.Random(seed)
    settings = dict(init_scale=2.0 ** rng.uniform(0, 60), growth_factor=rng.uniform(1.01, 9),
                    backoff_factor=rng.uniform(0.05, 0.95), growth_interval=rng.randint(1, 5))
    share = rng.choice([0.02, 0.1, 0.4])
    if seed % 4 == 0:                           # up to where fp32 ends
        settings.update(growth_factor=2.0 ** rng.randint(5, 60), growth_interval=1)
    overflows = [rng.random() < share for _ in range(300)]
    ours = amp.LossScaler(**settings, min_scale=0.0)
    for step, expected in enumerate(torch_scales(settings, overflows)):
        if expected < 1e-37:
            break                               # the floor, torch has none
        ours.update(overflows[step])
        assert ours.scale == expected, (step, settings)
    assert step > 30


def test_the_scale_stops_at_its_floor_and_below_infinity():
    scaler = amp.LossScaler(init_scale=16.0, growth_interval=1, min_scale=3.0)
    scales = []
    for found_inf in [True] * 5 + [False]:
        scaler.update(found_inf)
        scales.append(scaler.scale)
    assert scales == [8, 4, 3, 3, 3, 6]
    top = amp.LossScaler(init_scale=2.0 ** 127, growth_interval=1)
    top.update(False)
    assert top.scale == 2.0 ** 127


@pytest.mark.parametrize("bad", [
    dict(init_scale=math.inf), dict(init_scale=math.nan), dict(init_scale=0.0, min_scale=0.0),
    dict(min_scale=-1.0), dict(init_scale=1.0, min_scale=2.0), dict(growth_factor=1.0),
    dict(backoff_factor=1.0), dict(backoff_factor=0.0), dict(growth_interval=0)])
def test_a_scaler_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        amp.LossScaler(**bad)


def test_the_scalers_state_is_whole():
    one = amp.LossScaler(1024.0, 4.0, 0.25, 3, 2.0)
    for found_inf in (False, False, True, False, False):
        one.update(found_inf)
    two = amp.LossScaler()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for found_inf in (False, True, True, True, True, False):
        one.update(found_inf)
        two.update(found_inf)
        assert one.state_dict() == two.state_dict()
    with pytest.raises(ValueError):
        two.load_state_dict({"scale": 1.0})
    for bad in (dict(growth_factor=1.0), dict(backoff_factor=1.0), dict(growth_interval=0),
                dict(min_scale=-1.0), dict(init_scale=0.5)):
        with pytest.raises(ValueError):
            amp.LossScaler(**bad)


def rounded_masters(run):
    """After a step: are the parameters the masters rounded, and small updates kept?"""
    flat = run.flat
    own = {name: torch.cat([bucket.shard[name] for bucket in flat.buckets]) for name in OWN}
    rounded = own["master"].to(own["data"].dtype)
    return (own["data"].equal(rounded), own["data"].dtype,
            {t.dtype for name, t in own.items() if name != "data"},
            bool((rounded.float() != own["master"]).any()))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_train_as_one_process_within_a_twentieth_of_a_nat(pool, tmp_path, dtype):
    cfg = replace(CFG, n_layer=3)
    config = settings(tmp_path, dtype=dtype, steps=60, lr=4e-3)
    one = pool.run(1, run_steps, (1, 1, 1), config, cfg, rounded_masters)[0]
    eight = pool.run(8, run_steps, (2, 2, 2), replace(config, tp=2, pp=2), cfg, rounded_masters)
    losses = np.array([column(steps, "loss") for steps in (one[0], eight[0][0])])
    assert np.abs(losses[0] - losses[1]).max() <= 0.05
    assert losses[0][-1] < losses[0][0] - 0.5           # it learns
    for _, seen, _ in (one, *eight):
        half = amp.PRECISIONS[dtype][0]
        assert set(row[:2] for row in seen) == {(True, half)}
        assert all(row[2] == {torch.float32} and row[3] for row in seen)


def inject(run):
    """At step k, rank k - 1 alone finds an infinite gradient: after the reductions, so that only
    the agreement can tell the others."""
    finish, bucket = run.flat.finish_grad_sync, run.flat.buckets[-1]
    last = bucket.specs[-1]

    def finish_and_spoil():
        finish()
        if run.grid.rank == run.step:           # the step done
            # A LayerNorm or a bias: in the norm, these count on one tensor-parallel rank alone.
            assert last.partition_dim is None
            bad = math.nan if run.step % 2 else math.inf
            if run.config.zero:                 # any other rank has another slice
                bucket.shard["grad"][0] = bad
            else:
                bucket.view(bucket.grad, last)[0] = bad
    run.flat.finish_grad_sync = finish_and_spoil


def state_now(run):
    flat = run.flat
    tensors = [bucket.shard[name] for bucket in flat.buckets for name in OWN if name != "grad"]
    return [t.clone() for t in tensors], run.optimizer_steps, run.consumed_samples, run.scaler.scale


@pytest.mark.parametrize("dtype, zero", [("fp16", 0), ("fp32", 0), ("fp16", 2)])
def test_an_overflow_on_any_rank_skips_the_step_on_all(pool, tmp_path, dtype, zero):
    cfg = replace(CFG, n_layer=2)
    config = settings(tmp_path, dtype=dtype, steps=9, tp=2, pp=2, zero=zero, rollback="off")
    for steps, seen, _ in pool.run(8, run_steps, (2, 2, 2), config, cfg, state_now, None, inject):
        start = amp.make_scaler(dtype).scale
        for k, (tensors, optimizer_steps, sequences, scale) in enumerate(seen, 1):
            skipped = k <= 8
            assert optimizer_steps == (0 if skipped else 1)
            assert sequences == 8 * k and steps[k - 1]["step"] == k
            assert scale == max(1.0, start / 2 ** min(k, 8))
            assert all(a.equal(b) for a, b in zip(tensors, seen[0][0])) == skipped
        assert column(steps, "lr")[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
        assert steps[6]["lr"] < steps[5]["lr"] < 1e-3       # the schedule went on


def test_a_run_that_always_overflows_ends_with_a_clear_message(tmp_path):
    cfg = replace(CFG, n_layer=1)

    def huge(run):
        for bucket in run.flat.buckets:
            bucket.data.fill_(60000)
    config = settings(tmp_path, dtype="fp16", steps=16, rollback="off")     # not yet at the floor
    run_steps(0, 1, (1, 1, 1), config, cfg, prepare=huge)
    with pytest.raises(RunError) as stop:                   # in step 20: the count is in the file
        run_steps(0, 1, (1, 1, 1), replace(config, steps=21), cfg, nothing,
                  tmp_path / "step_00000016.pt", huge)
    error = str(stop.value)
    assert stop.value.status == 1 and "\n" not in error
    assert "20 steps in a row" in error and "a loss scale of 1" in error and "lower --lr" in error


def test_sums_of_squares_are_accurate():
    for size in (10_000_019, 4096, 5, 0):
        x = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 3
        expected = x.double().square().sum().item()
        assert parallel.square_sum(x).item() == pytest.approx(expected, rel=2e-6)


def test_clipping_and_unscaling_are_one_factor():
    assert amp.clip_factor(4.0, 1.0, 8.0) == pytest.approx(1 / 4 / 8, rel=1e-6)
    assert amp.clip_factor(0.5, 1.0, 8.0) == amp.clip_factor(9.0, 0.0, 8.0) == 1 / 8


def test_16_bit_gradients_and_their_norm_are_those_of_fp32(tmp_path):
    """The scale is in the loss, and out of the gradients before they are measured and clipped;
    AdamW, which divides a gradient by its size, would hide it."""
    runs = [run_steps(0, 1, (1, 1, 1), settings(tmp_path, dtype=dtype, steps=1, clip=0.5),
                      replace(CFG, n_layer=2), whole_gradient)
            for dtype in ("fp32", "fp16", "bf16")]
    norm = runs[0][0][0]["grad_norm"]
    assert norm > 0.6                                   # it clips
    for steps, gradients, _ in runs[1:]:
        assert steps[0]["grad_norm"] == pytest.approx(norm, rel=0.02)
        whole, expected = (torch.cat([g.flatten() for g in seen[0].values()])
                           for seen in (gradients, runs[0][1]))
        assert relative(whole, expected) < 0.05


def test_a_skipped_step_is_an_event(tmp_path):
    rows = []
    with mock.patch.object(Rows, "write", lambda self, **row: rows.append(row)):
        run_steps(0, 1, (1, 1, 1), settings(tmp_path, dtype="fp16", steps=3),
                  replace(CFG, n_layer=1), prepare=overflow)
    windows = Memory(CFG).sample_indices(1337, 8, 8).tolist()
    (event,) = [row for row in rows if "event" in row]
    assert 5 < event.pop("loss") < 6 and event.pop("grad_norm") > 0
    assert event == dict(event="skip", step=2, reason="not finite", loss_scale=2.0 ** 16,
                         what="gradient", rank=0, parameter="embed.token.weight", windows=windows)
    assert [row["skipped"] for row in rows if "event" not in row] == [0, 1, 0]


# ---------------------------------------------------------------------------------------------
# parallel.py: the grid and the schedules
# ---------------------------------------------------------------------------------------------


def test_the_grid_counts_tp_fastest_and_dp_slowest():
    for rank in range(12):
        grid = Grid(dp=2, pp=3, tp=2, rank=rank)
        assert grid.ranks[grid.dp_rank, grid.stage, grid.tp_rank] == rank
    assert (grid.dp_rank, grid.stage, grid.tp_rank) == (1, 2, 1) and grid.pipeline_peer(-1) == 9
    assert (grid.is_first, grid.is_last) == (False, True)


def test_stages_share_the_layers_in_order_and_evenly():
    for n_layer in range(1, 20):
        for pp in range(1, n_layer + 1):
            stages = [list(parallel.stage_layers(n_layer, pp, s)) for s in range(pp)]
            assert sum(stages, []) == list(range(n_layer))
            assert max(map(len, stages)) - min(map(len, stages)) <= 1 and min(map(len, stages))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 32])
def test_schedules_have_the_papers_bubble_and_live_microbatches(name, p, m):
    schedules = [parallel.SCHEDULES[name](s, p, m) for s in range(p)]
    timeline = parallel.clock(schedules)
    assert parallel.bubble(timeline) == pytest.approx((p - 1) / (m + p - 1))
    for s, (schedule, row) in enumerate(zip(schedules, timeline)):
        assert sorted(schedule) == sorted((op, i) for op in "FB" for i in range(m))
        assert all(schedule.index(("F", i)) < schedule.index(("B", i)) for i in range(m))
        assert parallel.live_activations(schedule) == (m if name == "gpipe" else min(m, p - s))
        assert [step[:2] for step in row] == schedule
        assert all(a[3] <= b[2] for a, b in zip(row, row[1:]))
    ends = {(op, s, i): end for s, row in enumerate(timeline) for op, i, _, end in row}
    for s, row in enumerate(timeline):
        for op, i, start, _ in row:             # what it waits for is done
            before = ("F", s - 1, i) if op == "F" else ("B", s + 1, i)
            assert start >= ends.get(before, 0) and (op == "F" or start >= ends["F", s, i])


def test_one_stage_holds_one_microbatch_and_a_deadlock_is_told():
    assert parallel.live_activations(one_f_one_b(0, 1, 8)) == 1
    assert parallel.bubble(parallel.clock([one_f_one_b(0, 1, 8)])) == 0
    for bad in ([[("B", 0), ("F", 0)]], [[("F", 0), ("F", 1)], [("F", 1), ("B", 1), ("F", 2)]]):
        with pytest.raises(ValueError, match="deadlock"):
            parallel.clock(bad)


def test_parallel_py_draws_the_timeline_and_counts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "parallel.py --pp 4 --microbatches 8".split())
    parallel.main()
    text = capsys.readouterr().out
    assert text.count("stage ") == 4 + 4 and "27.3%" in text and "stage 3: 8" in text
    first = next(line for line in text.splitlines() if line.startswith("stage  0"))
    assert first.split()[2:10] == [f"F{i}" for i in range(8)] and first.split().count(".") == 9
    monkeypatch.setattr(sys, "argv", "parallel.py --pp 4 --pp-schedule 1f1b".split())
    parallel.main()
    text = capsys.readouterr().out
    assert "1f1b, 4 stages, 8" in text and "27.3%" in text and "stage 0: 4, stage 1: 3" in text
    monkeypatch.setattr(sys, "argv", "parallel.py --pp 0".split())
    with pytest.raises(SystemExit) as stop:
        parallel.main()
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("world,tp,pp,batch,micro,words", [
    (6, 4, 1, 8, 1, "6 processes"), (8, 3, 1, 8, 1, "8 processes"), (16, 16, 1, 8, 1, "n_head 8"),
    (8, 1, 8, 8, 1, "n_layer 5"), (8, 2, 2, 6, 2, "batch size 6"), (4, 1, 1, 6, 1, "dp 4")])
def test_a_layout_that_cannot_run_is_refused_by_its_numbers(world, tp, pp, batch, micro, words):
    with pytest.raises(ValueError, match=words):
        parallel.check_layout(CFG, world, tp, pp, batch, micro)
    parallel.check_layout(CFG, 8, 2, 2, 8, 2)


@pytest.mark.parametrize("tp, pp, zero, sequence_parallel, words", [
    (1, 2, 3, False, "zero 3 with pp 2"), (1, 1, 0, True, "tp is 1"),
    (4, 1, 0, True, "seq_len 18 is not divisible by tp 4")])
def test_a_combination_that_cannot_run_is_refused_with_its_reason(tp, pp, zero, sequence_parallel,
                                                                  words):
    cfg = replace(CFG, seq_len=18)
    with pytest.raises(ValueError, match=words):
        parallel.check_layout(cfg, 8, tp, pp, 8, 1, zero, sequence_parallel)
    parallel.check_layout(cfg, 8, 2, 2, 8, 1, 2, True)


# ---------------------------------------------------------------------------------------------
# parallel.py: the parallel layers against plain ones
# ---------------------------------------------------------------------------------------------


def random_tensor(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward(fn, inputs, upstream):
    """Output, and gradients of the inputs, of fn under the gradient `upstream` of its output; of
    a token matrix what was added to its main_grad."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    sums = [torch.zeros_like(x) for x in inputs]
    for x, total in zip(inputs, sums):
        x.main_grad = functools.partial(torch.Tensor.detach, total)
    y = fn(*inputs)
    y.backward(upstream)
    return [y.detach(), *(total if x.grad is None else x.grad for x, total in zip(inputs, sums))]


def layers(rank, world):
    """[(what, ours, expected)] for tp = world; weights are cut here by hand."""
    B, T, C, out = 2, 3, 16, 48
    def part(x, dim):
        return x.chunk(world, dim)[rank]
    with gridded(rank, world, world, 1) as grid:
        x, weight = random_tensor(B, T, C, seed=1), random_tensor(out, C, seed=2)
        bias, dy = random_tensor(out, seed=3), random_tensor(B, T, out, seed=4)

        def linear(kind):
            def run(x, weight, bias):
                return kind(SimpleNamespace(weight=weight, bias=bias), grid)(x)
            return run

        y, dx, dw, db = backward(F.linear, (x, weight, bias), dy)
        yield "column", backward(linear(parallel.ColumnParallelLinear),
                                 (x, part(weight, 0), part(bias, 0)), part(dy, 2)), \
            [part(y, 2), dx, part(dw, 0), part(db, 0)]
        yield "row", backward(linear(parallel.RowParallelLinear),
                              (part(x, 2), part(weight, 1), bias), dy), \
            [y, part(dx, 2), part(dw, 1), db]

        rows = 384 // world                             # the last ranks hold nothing but padding
        tokens = torch.randint(257, (B, 40), generator=torch.Generator().manual_seed(5))
        table, dy = random_tensor(384, C, seed=6), random_tensor(B, 40, C, seed=7)
        y, dt = backward(lambda table: F.embedding(tokens, table), (table,), dy)
        yield "embedding", backward(
            lambda t: parallel.VocabParallelEmbedding(SimpleNamespace(weight=t), grid)(tokens),
            (part(table, 0),), dy), [y, part(dt, 0)]

        x, weight = 5 * random_tensor(B, 40, C, seed=8), random_tensor(384, C, seed=10)
        targets = tokens.clone()
        targets[:, ::7] = IGNORE_INDEX
        one, scale = torch.ones((), dtype=torch.float64), 0.3
        y, *expected = backward(lambda x, w: F.cross_entropy(
            F.linear(x, w[:257]).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX,
            reduction="sum"), (x, weight), scale * one)
        valid = min(max(257 - rank * rows, 0), rows)
        with mock.patch.dict(parallel.LOGITS, cpu=7 * rows):       # the last slice is shorter
            yield "cross-entropy", backward(
                lambda x, w: parallel.VocabParallelCrossEntropy.apply(
                    x, w, targets, rank * rows, valid, grid, scale),
                (x, part(weight, 0)), one), [y, expected[0], part(expected[1], 0)]


def attention(rank, world):
    """A block's attention: heads are cut from q, k and v each on its own."""
    whole = model.Attention(CFG).double()
    for i, parameter in enumerate(whole.parameters()):
        parameter.data = random_tensor(*parameter.shape, seed=i) / 3
    x, dy = random_tensor(2, 5, 32, seed=8), random_tensor(2, 5, 32, seed=9)
    y, dx = backward(whole, (x,), dy)
    heads = lambda t: t.unflatten(0, (3, world, -1))[:, rank].flatten(0, 1)
    with gridded(rank, world, world, 1) as grid:
        mine = model.Attention(CFG).double()
        for part, kind in (("qkv", parallel.ColumnParallelLinear),
                           ("proj", parallel.RowParallelLinear)):
            mine.set_submodule(part, kind(getattr(mine, part), grid))
        mine.qkv.weight.data, mine.qkv.bias.data = heads(whole.qkv.weight), heads(whole.qkv.bias)
        mine.proj.weight.data = whole.proj.weight.chunk(world, 1)[rank]
        mine.proj.bias.data = whole.proj.bias.data.clone()
        ours = backward(mine, (x,), dy)
    return [("attention", ours + [mine.qkv.weight.grad, mine.qkv.bias.grad, mine.proj.weight.grad],
             [y, dx, heads(whole.qkv.weight.grad), heads(whole.qkv.bias.grad),
              whole.proj.weight.grad.chunk(world, 1)[rank]])]


def parallel_layers(rank, world):
    return [(what, ours, [t.detach() for t in expected])
            for what, ours, expected in [*layers(rank, world), *attention(rank, world)]]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_parallel_layers_are_the_plain_ones_under_random_upstream_gradients(pool, tp):
    for rank, checks in enumerate(pool.run(tp, parallel_layers)):
        assert len(checks) == 5
        for what, ours, expected in checks:
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10,
                                           msg=lambda m: f"{what}, rank {rank}: {m}")


class Products(TorchDispatchMode):
    """Notes the matrix products."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.events.append("product")
        return function(*args, **kwargs or {})


def overlapped(rank, world, sequence_parallel):
    """What the backward of a column-parallel matrix does, in order."""
    events = []
    with gridded(rank, world, world, 1, sequence_parallel) as grid:
        def noted(name):
            collective = getattr(parallel, name)

            def start(x, *args):
                work = collective(x, *args)
                wait = work.wait
                work.wait = lambda: events.append(f"{name} ends") or wait()
                events.append(f"{name} starts")
                return work
            return mock.patch.object(parallel, name, start)

        layer = parallel.ColumnParallelLinear(nn.Linear(8, 12), grid)
        y = layer(torch.randn(2, 4 // world, 8, requires_grad=True))
        with noted("copy_to"), noted("reduce_from"), Products(events):
            y.sum().backward()
    return events


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_input_gradient_travels_while_the_weights_is_computed(pool, sequence_parallel):
    for events in pool.run(2, overlapped, sequence_parallel):
        assert events == ["copy_to starts", "product", "reduce_from starts", "copy_to ends",
                          "product", "reduce_from ends"]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_token_matrixs_gradient_is_added_where_it_is_kept(dtype, bound):
    """Autograd never sees a tensor; what 16-bit products add up to is in fp32."""
    weight, total = nn.Parameter(random_tensor(5000, 8, seed=3).to(dtype)), torch.ones(5000, 8)
    weight.main_grad = lambda: total
    tokens, dx = torch.tensor([[7, 4999, 7, 0]]), random_tensor(1, 4, 8, seed=4)
    dy, x = random_tensor(9, 5000, seed=1), random_tensor(9, 8, seed=2)
    lookup = parallel.VocabParallelEmbedding(SimpleNamespace(weight=weight), Grid(1, 1, 1))
    for _ in range(2):
        lookup(tokens).backward(dx.to(dtype))
    rows = torch.zeros(5000, 8, dtype=torch.float64).index_add(0, tokens[0], dx[0])
    assert weight.grad is None and relative(total, 1 + 2 * rows) < bound
    for _ in range(2):
        parallel.add_product(total, dy.to(dtype), x.to(dtype))
    assert relative(total, 1 + 2 * rows + 2 * dy.t() @ x) < bound


def peak_of_loss(rank, world, positions):
    """Bytes at the peak of the head's forward and backward, vocabulary 50304, above what was."""
    cfg = GPTConfig(vocab_size=50304, seq_len=positions, n_layer=1, n_head=1, n_embd=16)
    local, _ = staged(cfg, Grid(1, 1, 1))
    x = torch.randn(1, positions, 16, requires_grad=True)
    local.head(x[:, :64], tokens_of(cfg, 1)[:, :64]).backward()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    local.head(x, tokens_of(cfg, 1)).backward()
    return resident("VmHWM") - before


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_memory_of_the_loss_does_not_grow_with_the_number_of_positions():
    with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"):
        fresh = Pool()
        try:
            few, many = (fresh.run(1, peak_of_loss, n)[0] for n in (1024, 4096))
        finally:
            fresh.stop()
    assert 2 ** 24 < few < many + 2 ** 23 and many < few + 2 ** 23      # 9 * 2^26 for logits


def sums(rank, world, elements):
    """(ours, torch's) sum over the ranks of a tensor, and how often ours asked torch for it."""
    with gridded(rank, world, world, 1) as grid:
        x = random_tensor(elements, seed=rank).float()
        theirs = x.clone()
        dist.all_reduce(theirs)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as asked:
            return parallel.all_reduce(x, grid.group("tp")).wait(), theirs, asked.call_count


@pytest.mark.parametrize("world, elements, asked", [
    (2, 3, 0), (2, parallel.EXCHANGE_BYTES // 4, 0), (2, parallel.EXCHANGE_BYTES // 4 + 1, 1),
    (4, 3, 1)])
def test_two_ranks_swap_a_small_tensor_to_the_same_sum_as_an_all_reduce(pool, world, elements,
                                                                        asked):
    ranks = pool.run(world, sums, elements)
    for ours, theirs, count in ranks:
        torch.testing.assert_close(ours, theirs)
        assert torch.equal(ours, ranks[0][0]) and count == asked


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """Processes of their own: a compiler leaves tensors behind that are none. And a cache of their
    own: code that was compiled for another set of instructions crashes."""
    cache = str(tmp_path_factory.mktemp("inductor"))
    pool = Pool(TORCHINDUCTOR_CACHE_DIR=cache)
    yield pool
    pool.stop()


def compiled_graphs(run):
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] if run.config.compile else 0


@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), dict(dtype="bf16")), ((2, 1, 1), dict(zero=3, recompute=True)),
    ((1, 1, 2), dict(zero=2, pp=2))])
def test_compiled_blocks_train_as_they_are(compilers, tmp_path, layout, flags):
    config = settings(tmp_path, steps=3, **flags)
    plain, compiled = (compilers.run(math.prod(layout), run_steps, layout,
                                     replace(config, compile=c), CFG, compiled_graphs,
                                     seconds=400)[0] for c in (False, True))
    assert compiled[1][0] > 0 == plain[1][0]
    # The compiler fuses operations, so a 16-bit run rounds in other places. One rounding is off by
    # at most eps / 2, each in its own direction: a mean or a norm of thousands stays within eps.
    bound = torch.finfo(torch.bfloat16).eps if config.dtype == "bf16" else 1e-5
    assert relative(column(compiled[0], "loss"), column(plain[0], "loss")) <= bound
    assert relative(column(compiled[0], "grad_norm"), column(plain[0], "grad_norm")) <= bound


# ---------------------------------------------------------------------------------------------
# parallel.py: every layout is one process
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype,bound", [("fp32", 1e-5), ("fp64", 1e-10)])
def test_every_layout_trains_as_one_process(pool, tmp_path, dtype, bound):
    for layout, differences in equality_table(pool, dtype, tmp_path):
        assert max(differences) <= bound, f"{dtype}, dp, tp, pp = {layout}: {differences}"


def test_gpt2s_vocabulary_and_eight_stages_of_two_microbatches(pool, tmp_path):
    cfg = GPTConfig(vocab_size=50257, seq_len=8, n_layer=9, n_head=4, n_embd=16)
    config = settings(tmp_path, steps=3, micro_batch=4)
    one = pool.run(1, run_steps, (1, 1, 1), config, cfg, whole_gradient)[0]
    for layout in [(1, 4, 2), (1, 1, 8)]:
        assert max(equality_row(pool, layout, one, config, cfg)) <= 1e-5, layout


def one_gradient(rank, world, layout, broken, zero=0, sequence_parallel=False):
    """The whole gradient of one step, with a part of the machinery taken out."""
    def no_f(ctx, dy, backward=parallel._ColumnParallel.backward):
        ctx.grid = Grid(1, 1, 1)
        return backward(ctx, dy)

    loss = parallel.VocabParallelCrossEntropy

    def no_f_of_the_head(ctx, *args, forward=loss.forward):
        with mock.patch.object(parallel, "reduce_from", lambda x, grid: parallel.Work(x)):
            return forward(ctx, *args)

    def prepare(run):
        if broken in run.grid.groups:
            del run.grid.groups[broken]

    def no_sum(ctx, x, grid):
        ctx.grid = grid
        return x.clone()
    patches = {"positions": mock.patch.object(torch, "_foreach_copy_", lambda terms, sums: None),
               "f": mock.patch.object(parallel._ColumnParallel, "backward", staticmethod(no_f)),
               "head": mock.patch.object(loss, "forward", staticmethod(no_f_of_the_head)),
               "g": mock.patch.object(parallel._ReduceFrom, "forward", staticmethod(no_sum))}
    dp, tp, pp = layout
    config = settings(tempfile.gettempdir(), dtype="fp64", steps=1, tp=tp, pp=pp, zero=zero,
                      sequence_parallel=sequence_parallel)
    with patches.get(broken, nullcontext()), mock.patch.object(train.Run, "save", nothing_saved):
        return run_steps(rank, world, layout, config, CFG, whole_gradient, None, prepare)[1][0]


def nothing_saved(run):
    pass


@pytest.mark.parametrize("layout, broken, flags", [
    ((1, 1, 2), "embedding", (0, False)), ((2, 1, 2), "embedding", (2, False)),
    ((2, 1, 1), "dp", (0, False)),
    ((1, 2, 1), "f", (0, False)), ((1, 2, 1), "g", (0, False)), ((1, 2, 1), "head", (0, False)),
    ((1, 2, 1), "positions", (0, True)), ((2, 2, 1), "positions", (3, True))])
def test_each_sum_is_needed_and_sufficient(pool, layout, broken, flags):
    """The tied weight between the ends, gradients between replicas, f and g, what sequence
    parallelism splits by positions: without it the gradient is another, with it the same."""
    one, world = pool.run(1, one_gradient, (1, 1, 1), None)[0], math.prod(layout)
    assert relative(pool.run(world, one_gradient, layout, None, *flags)[0], one) <= 1e-10
    assert relative(pool.run(world, one_gradient, layout, broken, *flags)[0], one) > 1e-3


def ddp_gradients(rank, world):
    """(ours, DistributedDataParallel's) on this rank, of the same batch."""
    x, y = tokens_of(CFG, 8, seed=1), tokens_of(CFG, 8, seed=2)
    with gridded(rank, world, 1, 1) as grid:
        local, flat = staged(CFG, grid, torch.float64)
        mine = [slice(rank, rank + 1), slice(rank + world, rank + world + 1)]   # two microbatches
        run_schedule(one_f_one_b(0, 1, 2), local, grid, [(x[i], y[i], 0) for i in mine],
                     torch.empty(0), flat, 1 / y.numel())
        flat.finish_grad_sync()
        ours = {spec.name: bucket.view(bucket.grad, spec).clone()
                for bucket in flat.buckets for spec in bucket.specs}
    theirs = DistributedDataParallel(GPT(CFG).initialize(0).double())
    rows = [rank, rank + world]
    (theirs(x[rows], y[rows]) / y[rows].numel()).backward()
    return ours, {n: p.grad for n, p in theirs.module.named_parameters()}, len(flat.buckets)


def test_data_parallel_gradients_are_those_of_DistributedDataParallel(pool):
    for ours, theirs, buckets in pool.run(4, ddp_gradients):
        assert buckets > 5 and relative(ours, theirs) <= 1e-12


def plain_steps(config, cfg):
    """The same run with what torch has: AdamW, clip_grad_norm_, a plain model."""
    plain, tokens, rows = GPT(cfg).initialize(config.seed).double(), Memory(cfg), []
    decays = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=decays, weight_decay=config.weight_decay),
                                   dict(params=others, weight_decay=0.0)],
                                  betas=(config.beta1, config.beta2), eps=1e-8)
    for step in range(1, config.steps + 1):
        windows = tokens.sample_indices(config.seed, (step - 1) * config.batch_size,
                                        config.batch_size)
        batch = torch.from_numpy(tokens.windows(windows))
        loss = plain(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        optimizer.step()
        rows.append(dict(loss=loss.item(), grad_norm=norm.item()))
    return rows, {name: p.detach()[:cfg.vocab_size] if name == "embed.token.weight" else p.detach()
                  for name, p in plain.named_parameters()}


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)])
def test_a_run_is_adamw_with_clipping_on_a_plain_model(pool, tmp_path, layout):
    """clip_grad_norm_ counts each parameter once; so must ranks that share some of them."""
    config = settings(tmp_path, dtype="fp64", steps=5, clip=0.5, lr=1e-2, warmup_steps=2)
    rows, parameters = plain_steps(config, CFG)
    assert min(column(rows, "grad_norm")) > 0.5         # it clips
    dp, tp, pp = layout
    steps, _, whole = pool.run(dp * tp * pp, run_steps, layout, replace(config, tp=tp, pp=pp),
                               CFG)[0]
    assert relative(column(steps, "loss"), column(rows, "loss")) <= 1e-10
    assert relative(column(steps, "grad_norm"), column(rows, "grad_norm")) <= 1e-10
    # Adam divides a gradient that is nothing but rounding (the keys' bias) by its own size.
    assert relative({n: p for n, p in whole["master"].items() if "qkv.bias" not in n},
                    {n: p for n, p in parameters.items() if "qkv.bias" not in n}) <= 1e-8


def padding_stays_zero(run):
    tied = next((p for b in run.flat.buckets for p in b.specs if p.name == "embed.token.weight"), None)
    if tied is None:
        return None
    start = run.grid.tp_rank * 384 // run.grid.tp
    rows = run.flat.buckets[0].view(run.flat.buckets[0].shard["master"], tied)
    return rows[max(257 - start, 0):].abs().sum().item(), rows[:max(257 - start, 0)].any().item()


def test_the_vocabularys_padding_stays_zero(pool, tmp_path):
    config = settings(tmp_path, steps=3, tp=4, pp=2)
    ranks = [seen[-1] for _, seen, _ in pool.run(8, run_steps, (1, 4, 2), config, CFG,
                                                 padding_stays_zero)]
    assert ranks == [(0, True)] * 3 + [(0, False)] + [(0, True)] * 3 + [(0, False)]


# ---------------------------------------------------------------------------------------------
# parallel.py: dropout
# ---------------------------------------------------------------------------------------------


def masks(rank, world, layout, config, cfg):
    """The seeds that attention drew with and the masks of the rest, by step."""
    dp, tp, pp = layout
    drop, attend, drawn = F.dropout, F.scaled_dot_product_attention, []

    def spy_dropout(x, p):
        seed, y = torch.initial_seed(), drop(x, p)
        drawn.append(("replicated", seed, (y == 0).numpy().tobytes()))
        return y

    def spy_attention(*args, **kwargs):
        if kwargs["dropout_p"] > 0:             # not in the evaluation
            drawn.append(("attention", torch.initial_seed(), None))
        return attend(*args, **kwargs)

    def take(run):
        seen = list(drawn)
        drawn.clear()
        return seen
    with mock.patch.object(F, "dropout", spy_dropout), \
            mock.patch.object(F, "scaled_dot_product_attention", spy_attention):
        return run_steps(rank, world, layout, config, cfg, take)[1]


def test_dropout_masks_are_shared_by_who_shares_the_activation(pool, tmp_path):
    cfg = replace(CFG, dropout=0.2, n_layer=2)
    config = settings(tmp_path, steps=2, tp=2, micro_batch=2)
    ranks = pool.run(4, masks, (2, 2, 1), config, cfg)      # dp 2, tp 2: ranks (0 1) (2 3)

    def flat(rank, kind):
        return [draw for step in ranks[rank] for draw in step if draw[0] == kind]
    # 2 steps of 2 microbatches of (embedding, 2 layers of 2), or 2 layers of attention.
    for kind, count in (("replicated", 2 * 2 * 5), ("attention", 2 * 2 * 2)):
        for rank in range(4):
            drawn = flat(rank, kind)
            assert len(drawn) == count == len({seed for _, seed, _ in drawn})
    for a, b in ((0, 1), (2, 3)):
        assert flat(a, "replicated") == flat(b, "replicated")
        assert len(set(flat(a, "attention") + flat(b, "attention"))) == 2 * 8
    for kind in ("replicated", "attention"):
        assert len({seed for r in (0, 2) for _, seed, _ in flat(r, kind)}) == 2 * len(flat(0, kind))
    assert len({mask for _, _, mask in flat(0, "replicated")}) == 20


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2)])
def test_recomputation_replays_the_masks_bit_for_bit(pool, tmp_path, layout):
    dp, tp, pp = layout
    config = settings(tmp_path, steps=3, tp=tp, pp=pp, dtype="bf16")
    cfg = replace(CFG, dropout=0.2)
    runs = [pool.run(dp * tp * pp, run_steps, layout, replace(config, recompute=recompute), cfg,
                     whole_gradient)[0] for recompute in (False, True, False)]
    none = pool.run(dp * tp * pp, run_steps, layout, config, CFG, whole_gradient)[0]
    for steps, gradients, _ in runs[1:]:
        assert column(steps, "loss") == column(runs[0][0], "loss") != column(none[0], "loss")
        assert relative(gradients, runs[0][1]) == 0
        assert steps[-1]["val_loss"] == runs[0][0][-1]["val_loss"]


def test_the_last_stages_have_no_more_layers_than_the_first():
    for n_layer in range(1, 20):
        for pp in range(1, n_layer + 1):
            sizes = [len(parallel.stage_layers(n_layer, pp, s)) for s in range(pp)]
            assert sizes[0] == max(sizes) and sizes[-1] == min(sizes)


def test_recomputation_keeps_a_blocks_input_alone():
    tokens, grid, kept = tokens_of(CFG, 2), Grid(1, 1, 1), []
    for recompute in (False, True):
        local, _ = staged(CFG, grid, recompute=recompute)
        saved = []                  # checkpoint's own hooks hide what it will make again
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            for block in local.blocks.values():
                block.register_forward_pre_hook(lambda _, x: saved.clear())
                block.register_forward_hook(lambda *_: kept.append(sum(x.numel() for x in saved)))
            local(tokens, tokens)
    assert len(kept) == 10 and min(kept[:5]) > 10 * 2 * 16 * 32 and max(kept[5:]) <= 2 * 16 * 32


def test_buckets_are_reduced_while_backward_goes_on():
    tokens, seen = tokens_of(CFG, 2), []
    local, flat = staged(CFG, Grid(1, 1, 1))
    for parameter in local.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(flat.in_flight)))
    flat.prepare_grad_sync(True)
    local(tokens, tokens).backward()
    assert len(flat.buckets) > 5 and set(seen) >= set(range(len(flat.buckets) + 1))
    assert [spec.name for spec in flat.buckets[0].specs] == ["embed.token.weight"]   # for itself


def test_a_parameter_without_a_gradient_is_noticed():
    local, flat = staged(CFG, Grid(1, 1, 1))
    flat.prepare_grad_sync(True)
    local.embed(tokens_of(CFG, 2)).sum().backward()
    with pytest.raises(AssertionError, match="no gradient"):
        flat.finish_grad_sync()


def test_one_stage_takes_the_schedule_with_one_live_microbatch(tmp_path):
    run = mock.patch.object(train, "run_schedule", side_effect=RuntimeError)
    with run as spy, pytest.raises(RuntimeError):
        run_steps(0, 1, (1, 1, 1), settings(tmp_path, steps=1), replace(CFG, n_layer=1))
    assert parallel.live_activations(spy.call_args.args[0]) == 1


def test_dropout_masks_depend_on_the_seed_of_the_run(tmp_path):
    cfg = replace(CFG, dropout=0.2, n_layer=1)
    runs = (masks(0, 1, (1, 1, 1), settings(tmp_path, steps=1, seed=s), cfg) for s in (1, 2))
    one, two = ({seed for step in run for _, seed, _ in step} for run in runs)
    assert len(one) == len(two) > 0 and not one & two


# ---------------------------------------------------------------------------------------------
# parallel.py: ZeRO, 1F1B, sequence parallelism
# ---------------------------------------------------------------------------------------------

# Rows in which every two values of different columns that may stand together do: a mistake that
# shows where two of the seven meet shows here. Replicas are 4, or 2 beside tp or pp; beside both
# only where eight processes leave some.
COLUMNS = dict(zero=(0, 1, 2, 3), tp=(1, 2), pp=(1, 2, 4), pp_schedule=("gpipe", "1f1b"),
               recompute=(False, True), sequence_parallel=(False, True),
               dtype=("fp32", "fp64", "bf16", "fp16"))
COVER = [dict(zip(COLUMNS, row)) for row in [
    (0, 1, 1, "gpipe", False, False, "bf16"), (0, 1, 2, "1f1b", True, False, "fp64"),
    (0, 1, 4, "gpipe", False, False, "fp16"), (0, 2, 4, "1f1b", False, True, "fp32"),
    (1, 1, 1, "gpipe", True, False, "fp16"), (1, 1, 2, "1f1b", False, False, "fp32"),
    (1, 1, 4, "1f1b", True, False, "bf16"), (1, 2, 2, "gpipe", False, True, "fp64"),
    (2, 1, 2, "1f1b", False, False, "fp16"), (2, 1, 2, "gpipe", False, False, "bf16"),
    (2, 1, 4, "1f1b", False, False, "fp64"), (2, 2, 1, "gpipe", True, True, "fp32"),
    (3, 1, 1, "gpipe", False, False, "fp64"), (3, 2, 1, "gpipe", False, False, "fp32"),
    (3, 2, 1, "gpipe", True, True, "bf16"), (3, 2, 1, "gpipe", False, True, "fp16")]]


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def test_the_covering_set_has_every_pair_of_values_that_may_meet():
    def allowed(row):
        with suppress(ValueError):
            parallel.check_layout(CFG, 8, row["tp"], row["pp"], 8, 1, row["zero"],
                                  row["sequence_parallel"])
            return row["pp"] > 1 or row["pp_schedule"] == "gpipe"   # the default says nothing there
    product = (dict(zip(COLUMNS, values)) for values in itertools.product(*COLUMNS.values()))
    rows = [row for row in product if allowed(row)]
    assert len(rows) > 200 and all(row in rows for row in COVER)
    assert set().union(*map(pairs_of, COVER)) == set().union(*map(pairs_of, rows))


@pytest.fixture(scope="session")
def one_process(pool, tmp_path_factory):
    """(config, model) -> the run of one process, once."""
    @functools.cache
    def run(config, cfg):
        config = replace(config, out=str(tmp_path_factory.mktemp("one")), micro_batch=8)
        return pool.run(1, run_steps, (1, 1, 1), config, cfg, whole_gradient)[0]
    return run


@pytest.mark.parametrize("row", COVER, ids=lambda row: "-".join(map(str, row.values())))
def test_every_combination_trains_as_one_process(pool, tmp_path, one_process, row):
    half = row["dtype"] in ("bf16", "fp16")
    tp, pp = row["tp"], row["pp"]
    cfg = replace(CFG, n_layer=3) if half and pp < 4 else CFG
    dp = min(8 // (tp * pp), 2 if tp * pp > 1 else 4)
    config = settings("", dtype=row["dtype"], **(dict(steps=60, lr=4e-3) if half else {}))
    steps, gradients, _ = pool.run(dp * tp * pp, run_steps, (dp, tp, pp),
                                   replace(config, out=str(tmp_path), micro_batch=4 // dp,
                                           **row), cfg, whole_gradient)[0]
    one = one_process(config, cfg)
    losses, expected = ([*column(rows, "loss"), rows[-1]["val_loss"]] for rows in (steps, one[0]))
    if half:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 0.05
        assert losses[-1] < losses[0] - 0.5
    else:
        bound = dict(fp32=1e-5, fp64=1e-10)[row["dtype"]]
        assert relative(losses, expected) <= bound
        assert relative(gradients, one[1]) <= bound
        assert relative(column(steps, "grad_norm"), column(one[0], "grad_norm")) <= bound


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_three_replicas_have_equal_slices_too(pool, tmp_path, zero):
    config = settings(tmp_path, dtype="fp64", batch_size=6, steps=5)
    one = pool.run(1, run_steps, (1, 1, 1), config, CFG, whole_gradient)[0]
    three = pool.run(3, run_steps, (3, 1, 1), replace(config, zero=zero, micro_batch=1), CFG,
                     whole_gradient)[0]
    assert relative(column(three[0], "loss"), column(one[0], "loss")) <= 1e-10
    assert relative(three[1], one[1]) <= 1e-10


def offloaded_to(device):
    """FlatParameters whose masters and moments are on `device`, whatever train.py asks for."""
    return mock.patch.object(train, "FlatParameters",
                             lambda *args: FlatParameters(*args[:-1], host=device))


def offload(rank, world, config, look, device):
    with offloaded_to(device):
        return run_steps(rank, world, (world, 1, 1), config, replace(CFG, n_layer=2), look)


def masters_are_their_own(run):
    return all(b.shard["master"].data_ptr() != b.shard["data"].data_ptr() for b in run.flat.buckets)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offload_changes_nothing_but_where_the_optimizer_is(pool, tmp_path, zero, dtype):
    """cpu:0 is to torch another device than cpu: two of them here, with a copy in each direction.
    The flag itself, without a second device, leaves masters where they are."""
    config = settings(tmp_path, zero=zero, dtype=dtype, steps=4, offload=True, micro_batch=2)
    plain = pool.run(2, offload, config, masters_are_their_own, "cpu")
    there = pool.run(2, offload, config, masters_are_their_own, "cpu:0")
    assert set(there[0][1]) == {True} and set(plain[0][1]) == {dtype == "bf16"}
    for (steps, _, whole), (expected, _, theirs) in zip(there, plain):
        assert column(steps, "loss") == column(expected, "loss")
        assert whole is theirs is None or relative(whole, theirs) == 0


@pytest.mark.parametrize("offload, host", [(True, "cpu"), (False, torch.device("meta"))])
def test_the_offload_flag_puts_the_optimizer_on_the_host(tmp_path, offload, host):
    device = torch.device("meta")               # any that is not the host
    with mock.patch.object(train, "FlatParameters", side_effect=RuntimeError) as spy, \
            pytest.raises(RuntimeError):
        train.Run(settings(tmp_path, offload=offload), CFG, Grid(1, 1, 1), device, None, None, None)
    assert spy.call_args.args[4] == device and spy.call_args.args[6] == host


def test_offload_updates_the_hosts_slice_then_brings_the_parameters_back(tmp_path):
    events, copy, adamw = [], torch.Tensor.to, parallel.adamw

    def spy_to(x, *args, **kwargs):
        if args[:1] == (torch.device("cpu"),) and x.is_floating_point():
            events.append("gradients to the host")
        return copy(x, *args, **kwargs)

    def spy_adamw(masters, *args, **kwargs):
        events.append("update")
        return adamw(masters, *args, **kwargs)

    def prepare(run):
        sync_params = run.flat._sync_params
        run.flat._sync_params = lambda bucket: (events.append("parameters back")
                                                or sync_params(bucket))
    config = settings(tmp_path, zero=1, steps=1, offload=True)
    with mock.patch.object(torch.Tensor, "to", spy_to), \
            mock.patch.object(parallel, "adamw", spy_adamw):
        run_steps(0, 1, (1, 1, 1), config, replace(CFG, n_layer=1), prepare=prepare)
    assert [event for event, _ in itertools.groupby(events)] == [
        "gradients to the host", "update", "parameters back"] * 4       # tied, ends, two halves


def transfers(rank, world):
    """(ours, torch's) of two reduce-scatters and two all-gathers, all on their way at once."""
    with gridded(rank, world, 1, 1) as grid:
        group = grid.group("dp")
        summed = [random_tensor(5 * world, seed=10 * rank + i) for i in range(2)]
        expected = [dist.all_reduce(x := y.clone()) or x.chunk(world)[rank] for y in summed]
        handles = [parallel.reduce_scatter(x, group) for x in summed]
        whole = [torch.zeros(world, 3) for _ in range(2)]
        for i, x in enumerate(whole):
            x[rank] = 10 * rank + i
        handles += [parallel.all_gather(x, group) for x in whole]
        ours = [handle.wait() for handle in reversed(handles)][::-1]
        for i in range(2):
            lists = [torch.zeros(3) for _ in range(world)]
            dist.all_gather(lists, torch.full((3,), 10.0 * rank + i))
            expected.append(torch.stack(lists))
    return ours, expected


@pytest.mark.parametrize("world", [2, 4])
def test_a_reduce_scatter_and_an_all_gather_are_torchs(pool, world):
    for ours, expected in pool.run(world, transfers):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


def positions(rank, world):
    """(what, ours, expected) of f and g with sequence parallelism, upstream gradients random."""
    B, n, C = 2, 3, 4
    def of(r, *shape, seed):
        return random_tensor(*shape, seed=seed + r)
    with gridded(rank, world, world, 1, True) as grid:
        here = slice(rank * n, rank * n + n)
        slices = [of(r, B, n, C, seed=1) for r in range(world)]
        wholes = [of(r, B, n * world, C, seed=21) for r in range(world)]
        one = SimpleNamespace(weight=torch.eye(C, dtype=torch.float64),
                              bias=torch.zeros(C, dtype=torch.float64))
        yield "f", backward(parallel.ColumnParallelLinear(one, grid), (slices[rank],),
                            wholes[rank]), [torch.cat(slices, 1), sum(wholes)[:, here]]
        yield "g", backward(parallel.RowParallelLinear(one, grid), (wholes[rank],),
                            slices[rank]), [sum(wholes)[:, here], torch.cat(slices, 1)]


def sequence_parallel_f_and_g(rank, world):
    return list(positions(rank, world))


@pytest.mark.parametrize("tp", [2, 4])
def test_with_sequence_parallelism_f_gathers_positions_and_g_scatters_their_sums(pool, tp):
    for checks in pool.run(tp, sequence_parallel_f_and_g):
        for what, ours, expected in checks:
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, msg=lambda m: f"{what}: {m}")


def test_with_sequence_parallelism_every_rank_draws_other_masks(pool, tmp_path):
    cfg = replace(CFG, dropout=0.2, n_layer=2)
    config = settings(tmp_path, steps=1, tp=2, sequence_parallel=True)
    drawn = [[draw for step in rank for draw in step]
             for rank in pool.run(4, masks, (2, 2, 1), config, cfg)]
    assert len({seed for rank in drawn for _, seed, _ in rank}) == sum(map(len, drawn)) > 0


@pytest.mark.parametrize("layout, plain, other", [
    ((2, 1, 1), {}, dict(zero=1)), ((2, 1, 1), {}, dict(zero=2)),
    ((2, 1, 1), {}, dict(zero=3, recompute=True)),
    ((2, 1, 2), {}, dict(zero=2, pp_schedule="1f1b")),
    ((1, 2, 1), dict(sequence_parallel=True), dict(sequence_parallel=True, recompute=True)),
    ((2, 2, 1), {}, dict(zero=3))])
def test_masks_do_not_depend_on_schedule_stage_or_recomputation(pool, tmp_path, layout, plain,
                                                                other):
    dp, tp, pp = layout
    config = settings(tmp_path, steps=3, tp=tp, pp=pp, dtype="fp64")
    cfg = replace(CFG, dropout=0.2, n_layer=3)
    ours, theirs, none = (
        pool.run(dp * tp * pp, run_steps, layout, replace(config, **flags), shape)[0][0]
        for flags, shape in ((other, cfg), (plain, cfg), (plain, replace(cfg, dropout=0.0))))
    assert relative(column(ours, "loss"), column(theirs, "loss")) <= 1e-10
    assert relative(column(none, "loss"), column(theirs, "loss")) > 1e-5


BUCKETS = ["tied", "ends", *(f"{i}.{half}" for i in range(5) for half in ("attn", "mlp"))]  # CFG's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stage_2_reduces_every_microbatch_while_backward_goes_on(dtype):
    grid, tokens, held, reduced = Grid(1, 1, 1), tokens_of(CFG, 4), [], []
    local, flat = staged(CFG, grid, dtype, zero=2)
    assert len({p.data_ptr() for p in local.parameters()}) == sum(len(b.specs) for b in flat.buckets)
    sync = flat._sync
    flat._sync = lambda bucket: reduced.append(BUCKETS[flat.buckets.index(bucket)]) or sync(bucket)
    for parameter in local.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: held.append(
            ({name for name, b in zip(BUCKETS, flat.buckets, strict=True) if b.grad is not None
              and b.grad.dtype == torch.float32}, len(flat.in_flight))))
    run_schedule(one_f_one_b(0, 1, 2), local, grid, [(x, x, 0) for x in tokens.split(2)],
                 torch.empty(0), flat)
    flat.finish_grad_sync()
    order = BUCKETS[::-1]
    assert reduced == 2 * order
    blocks = [names - {"ends", "tied"} for names, _ in held]
    assert max(map(len, blocks)) == 1 and {on_its_way for _, on_its_way in held} == {0, 1}
    for half in order[1:-2]:                    # the one before is on its way while it fills
        assert {on_its_way for names, on_its_way in held if half in names} == {1}
    assert all(b.grad is None for b in flat.buckets)
    assert all(p.grad is None for p in local.parameters())
    plain = GPT(CFG).initialize(0)
    (plain(tokens[:2], tokens[:2]) + plain(tokens[2:], tokens[2:])).backward()
    theirs = dict(plain.named_parameters())
    ours = {p.name: b.view(b.shard["grad"], p) for b in flat.buckets for p in b.specs}
    assert relative(named(ours), named({name: p.grad for name, p in theirs.items()})) <= (
        1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("recompute", [False, True])
def test_stage_3_holds_two_blocks_the_next_on_its_way(recompute):
    tokens, seen = tokens_of(CFG, 2), []
    local, flat = staged(CFG, Grid(1, 1, 1), recompute=recompute, zero=3)

    def there():                                # + is on its way
        return [name + "+" * (b.unsharding is not None)
                for name, b in zip(BUCKETS, flat.buckets) if b.data.untyped_storage().size()]

    def halves(*blocks):
        return ends + [f"{block[0]}.{half}{block[1:]}" for block in blocks
                       for half in ("attn", "mlp")]
    assert there() == []
    local.embed.token.register_forward_hook(lambda *_: seen.append(there()))
    for block in local.blocks.values():
        block.norm2.register_forward_hook(lambda *_: seen.append(there()))
        block.norm2.weight.register_post_accumulate_grad_hook(lambda _: seen.append(there()))
    ends = ["tied", "ends"]
    loss = local(tokens, tokens)
    assert seen == [halves(*blocks) for blocks in (
        ["0+"], ["0", "1+"], ["1", "2+"], ["2", "3+"], ["3", "4+"], ["4"])]
    ends = ["ends"]                             # the head has made its gradients already
    assert there() == halves("4")
    seen.clear()
    flat.prepare_grad_sync(True)
    loss.backward()
    again = 2 if recompute else 1               # and once when the block is made again
    expected = [halves(*blocks) for blocks in (
        ["3+", "4"], ["2+", "3"], ["1+", "2"], ["0+", "1"], ["0"]) for _ in range(again)]
    assert seen == expected and there() == []
    with torch.no_grad():
        local(tokens, tokens)
    assert there() == []


def live_graphs(rank, world, schedule, micro):
    """The most microbatches whose activations exist at once, and what is being sent forward, and
    backward, seen from outside the executor."""
    cfg = replace(CFG, n_layer=4)
    with gridded(rank, world, 1, world) as grid:
        local, flat = staged(cfg, grid)
        alive, most, isend = {}, {}, dist.isend

        def count(what, tensor):
            refs = alive.setdefault(what, [])
            refs.append(weakref.ref(tensor))
            most[what] = max(most.get(what, 0), sum(ref() is not None for ref in refs))

        def forward(*args):
            y = local(*args)
            count("graphs", y)
            return y

        def spy(x, target, group, tag):
            count("forward" if target > rank else "backward", x)
            return isend(x, target, group, tag=tag)
        forward.head = local.head
        tokens = [tokens_of(cfg, 1, seed=m) for m in range(micro)]
        with mock.patch.object(dist, "isend", spy):
            run_schedule(parallel.SCHEDULES[schedule](grid.stage, world, micro), forward, grid,
                         [(x, x, 0) for x in tokens], torch.empty(1, cfg.seq_len, cfg.n_embd), flat)
        flat.finish_grad_sync()
    return tuple(most.get(what, 0) for what in ("graphs", "forward", "backward"))


def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all(pool):
    for schedule, micro, expected in (("1f1b", 8, (4, 3, 2, 1)), ("1f1b", 2, (2, 2, 2, 1)),
                                      ("gpipe", 8, (8, 8, 8, 8))):
        graphs, forward, backward = zip(*pool.run(4, live_graphs, schedule, micro))
        assert graphs == expected and max(forward + backward) <= 2 and forward[-1] == 0


# Independent implementations.


def named(whole):
    """Without the keys' bias: Adam divides its gradient, nothing but rounding, by its own size."""
    return {name: value for name, value in whole.items() if "qkv.bias" not in name}


def their_optimizer(kind, config, parameters, **more):
    groups = [dict(params=[p for p in parameters if (p.dim() > 1) == decays],
                   weight_decay=config.weight_decay * decays) for decays in (True, False)]
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, **more)


def train_theirs(config, cfg, parameters, optimizer, rows_of_rank, loss_and_backward):
    tokens = Memory(cfg)
    for step in range(1, config.steps + 1):
        windows = tokens.sample_indices(config.seed, (step - 1) * config.batch_size,
                                        config.batch_size)
        batch = torch.from_numpy(tokens.windows(windows))[rows_of_rank]
        optimizer.zero_grad()
        loss_and_backward(batch[:, :-1], batch[:, 1:])
        if config.clip:
            torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        optimizer.step()


def zero_redundancy_optimizer(rank, world, config, cfg):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(GPT(cfg).initialize(config.seed).double())
    parameters = list(model.parameters())
    optimizer = their_optimizer(ZeroRedundancyOptimizer, config, parameters,
                                optimizer_class=torch.optim.AdamW)
    train_theirs(config, cfg, parameters, optimizer, slice(rank, None, world),
                 lambda x, y: (model(x, y) / y.numel()).backward())
    return {n: p.detach() for n, p in model.module.named_parameters()}


def fully_sharded(rank, world, config, cfg):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model = GPT(cfg).initialize(config.seed).double()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = their_optimizer(torch.optim.AdamW, config, parameters)
    train_theirs(config, cfg, parameters, optimizer, slice(rank, None, world),
                 lambda x, y: (model(x, y) / y.numel()).backward())
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def pipelined(rank, world, config, cfg):
    """torch.distributed.pipelining on two stages; what it leaves to us is the tied matrix."""
    from torch.distributed import pipelining
    stage = GPT(cfg).initialize(config.seed).double()
    for i in range(cfg.n_layer):
        if (i < (cfg.n_layer + 1) // 2) != (rank == 0):
            del stage.blocks[str(i)]
    tied = stage.head.weight
    stage.embed, stage.head = (stage.embed, None) if rank == 0 else (None, stage.head)
    num_microbatches = config.batch_size // config.micro_batch
    kind = dict(gpipe=pipelining.ScheduleGPipe, **{"1f1b": pipelining.Schedule1F1B})
    schedule = kind[config.pp_schedule](
        pipelining.PipelineStage(stage, rank, world, torch.device("cpu")), num_microbatches,
        loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))

    def step(x, y):
        schedule.step(*([x] if rank == 0 else []), **(dict(target=y, losses=[]) if rank else {}))
        dist.all_reduce(tied.grad)
    parameters = list(stage.parameters())
    optimizer = their_optimizer(torch.optim.AdamW, config, parameters)
    train_theirs(config, cfg, parameters, optimizer, slice(None), step)
    return {("embed.token.weight" if p is tied else n): p.detach()
            for n, p in stage.named_parameters()}


@pytest.mark.parametrize("theirs, world, flags", [
    (zero_redundancy_optimizer, 4, dict(zero=1)), (zero_redundancy_optimizer, 2, dict(zero=2)),
    (fully_sharded, 2, dict(zero=3)), (fully_sharded, 4, dict(zero=3, recompute=True)),
    (pipelined, 2, dict(pp=2, pp_schedule="gpipe", clip=0.0)),
    (pipelined, 2, dict(pp=2, pp_schedule="1f1b", clip=0.0))])
def test_five_steps_end_where_torchs_own_stack_ends(pool, tmp_path, theirs, world, flags):
    """ZeroRedundancyOptimizer, fully_shard (FSDP2), torch.distributed.pipelining."""
    config = settings(tmp_path, dtype="fp64", steps=5, lr=1e-2, warmup_steps=2,
                      **{"clip": 0.5, "micro_batch": 1, **flags})
    dp = world // config.pp
    expected = {}
    for parameters in pool.run(world, theirs, config, CFG):
        expected |= {n: p[:257] if n == "embed.token.weight" else p for n, p in parameters.items()}
    whole = pool.run(world, run_steps, (dp, 1, config.pp), config, CFG)[0][2]["master"]
    start = dict(GPT(CFG).initialize(config.seed).named_parameters())
    assert relative(named(whole), named(expected)) <= 1e-8
    name = "blocks.0.mlp.up.weight"
    assert relative(whole[name], start[name].detach()) > 1e-2


# What a rank holds.

FORMULA = dict(fp32=lambda dp: (16, 8 + 8 / dp, 4 + 12 / dp, 16 / dp),      # bytes a parameter
               bf16=lambda dp: (18, 6 + 12 / dp, 2 + 16 / dp, 18 / dp))


def live_tensors():
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def held_by(run):
    """Bytes of live tensors by kind, and in all, without what the run itself does not hold."""
    gc.collect()
    def size(tensors):
        return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    def own(*names):
        return size(b.shard[name] for b in run.flat.buckets for name in names)
    data, everything = own("data"), size(live_tensors())
    optimizer = {at: n for at, n in own("master", "exp_avg", "exp_avg_sq").items()
                 if at not in data}
    kinds = dict(parameters=data, gradients=own("grad"), optimizer=optimizer)
    return {kind: sum(x.values()) for kind, x in kinds.items()}, sum(everything.values())


def bytes_held(rank, world, layout, config, cfg):
    dp, tp, pp = layout
    with gridded(rank, world, tp, pp) as grid:
        gc.collect()
        before = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                  for x in live_tensors()}
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg), None)
        kinds, everything = held_by(run)
        rest = run.boundary.nbytes + sum(before.values())
        specs = [spec for bucket in run.flat.buckets for spec in bucket.specs]
        numel = sum(spec.numel for spec in specs)
        return kinds, everything - rest, run.flat.memory(), numel, len(specs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [(4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_bytes_a_parameter_are_the_formulas(pool, tmp_path, dtype, layout):
    cfg = replace(CFG, vocab_size=256, n_embd=64, n_layer=4)
    dp, tp, pp = layout
    for zero in range(4 if pp == 1 else 3):
        config = settings(tmp_path, dtype=dtype, zero=zero, tp=tp, pp=pp, micro_batch=1)
        for kinds, everything, told, numel, specs in pool.run(4, bytes_held, layout, config, cfg):
            expected = FORMULA[dtype](dp)[zero] * numel
            padding = (specs + (4 + 2) * dp) * 32 * FORMULA[dtype](dp)[zero]
            assert expected <= sum(kinds.values()) <= expected + padding
            assert everything == sum(kinds.values()) and told == kinds


def test_the_memory_printed_at_the_start_is_that_of_the_tensors(run_train, shards, tmp_path):
    kept, print_summary = [], train.print_summary
    def keep(run):
        kept.append(held_by(run)[0])
        kept.append(parallel.activation_bytes(run.cfg, run.grid, run.schedule, 2, 2))
        print_summary(run)
    flags = ["--n-embd", "256", "--dtype", "bf16", "--micro-batch", "2", "--zero", "3"]
    with mock.patch.object(train, "print_summary", keep):
        status, text, _ = run_train("--data", shards, "--out", tmp_path, *TINY, *flags)
    line = next(line for line in text.splitlines() if line.startswith("memory"))
    told = {kind: float(size.replace(",", "")) for kind, size
            in re.findall(r"(\w+)(?: about)? ([\d,.]+) MB", line)}
    assert status == 0 and told == {kind: pytest.approx(size / 1e6, abs=0.051) for kind, size in
                                    [*kept[0].items(), ("activations", kept[1])]}
    assert told["parameters"] > 3 and "(rank 0)" in line and "zero 3" in text


def saved_for_backward(rank, world, layout, sequence_parallel, recompute, cfg):
    """(bytes that autograd holds after a microbatch's forward, train.py's estimate)"""
    dp, tp, pp = layout
    with gridded(rank, world, tp, pp, sequence_parallel) as grid:
        local, flat = staged(cfg, grid, torch.bfloat16, recompute)
        weights, kept = {b.data.untyped_storage().data_ptr() for b in flat.buckets}, {}

        def keep(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = x, storage.nbytes()
            return x
        tokens = tokens_of(cfg, 4)
        x = tokens if grid.is_first else torch.randn(
            4, cfg.seq_len // (tp if sequence_parallel else 1), cfg.n_embd).bfloat16()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            keep(local(x if grid.is_first else x.requires_grad_(), tokens))
    estimate = functools.partial(parallel.activation_bytes, grid=grid, micro_batch=4, itemsize=2,
                                 schedule=[("F", 0), ("B", 0)])
    again = 0               # recomputation has one block at a time besides, in backward
    if recompute:
        again = estimate(replace(cfg, n_layer=2)) - estimate(replace(cfg, n_layer=1))
    return (sum(nbytes for _, nbytes in kept.values()),
            estimate(cfg, recompute=recompute) - again)


@pytest.mark.parametrize("layout, sequence_parallel, recompute, activation", [
    ((2, 1, 1), False, False, "relu"), ((2, 1, 1), False, True, "gelu"),
    ((1, 1, 2), False, False, "gelu"), ((1, 2, 1), False, False, "gelu"),
    ((1, 2, 1), True, False, "gelu"), ((1, 2, 1), True, False, "relu"),
    ((1, 2, 1), True, True, "gelu")])
def test_the_estimate_of_activations_is_what_autograd_keeps(pool, layout, sequence_parallel,
                                                            recompute, activation):
    cfg = GPTConfig(vocab_size=257, seq_len=64, n_layer=4, n_head=4, n_embd=128,
                    activation=activation)
    for kept, estimate in pool.run(2, saved_for_backward, layout, sequence_parallel, recompute,
                                   cfg):
        assert kept == pytest.approx(estimate, rel=0.06)


def test_the_estimate_of_activations_counts_the_microbatches_a_stage_holds():
    for stage in range(4):
        grid = Grid(1, 4, 1, rank=stage)
        one, gpipes, ours = (parallel.activation_bytes(CFG, grid, schedule, 2, 4) for schedule in (
            gpipe(stage, 4, 1), gpipe(stage, 4, 8), one_f_one_b(stage, 4, 8)))
        assert gpipes == 8 * one and ours == (4 - stage) * one


# What a process holds at its peak: 101M parameters on four replicas, and a pipeline of four stages
# with eight layers of width 512, 16 microbatches of two sequences.

BIG = GPTConfig(vocab_size=257, seq_len=32, n_layer=8, n_head=8, n_embd=1024)
LONG = GPTConfig(vocab_size=257, seq_len=512, n_layer=8, n_head=8, n_embd=512)
PIPELINES = {"gpipe": {}, "1f1b": dict(pp_schedule="1f1b"), "recompute": dict(recompute=True)}


def resident(what):
    """Bytes of this process, now (VmRSS) or at most since the last reset (VmHWM)."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(what))


def peak_memory(rank, world, layout, config, cfg):
    """(bytes at the peak of a step, less what was there before the model was made; the formula's:
    state, buffers, activations)"""
    dp, tp, pp = layout

    def step(grid, cfg):
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg, 1), None)
        run.save = run.evaluate = lambda *row: 0.0
        run.train(Rows(run, nothing), SimpleNamespace(requested=False))
        return run
    with gridded(rank, world, tp, pp) as grid:
        step(grid, replace(CFG, n_layer=pp))            # libraries allocate at their first use
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")                             # VmHWM starts over
        before = resident("VmRSS")
        run = step(grid, cfg)
        peak = resident("VmHWM") - before
    specs, zero = [spec for bucket in run.flat.buckets for spec in bucket.specs], config.zero
    numel = [sum(p.numel for p in specs if p.name.startswith(start))
             for start in ("", f"blocks.{min(map(int, run.model.blocks))}.")]
    # A bucket fills, one is on its way, and slices come in for it; one of the two is an MLP's, two
    # thirds of a block. Two blocks are gathered.
    arriving = (dp - 1) / dp
    buffers = (0, 2 * arriving, 3 + 2 * arriving, 9 + 2 * arriving)[zero] / 3 * 4 * numel[1]
    return peak, (FORMULA["fp32"](dp)[zero] * numel[0], buffers, parallel.activation_bytes(
        cfg, grid, run.schedule, config.micro_batch, 4, config.recompute))


def peak_of(layout, cfg, out, **flags):
    """`peak_memory` in fresh processes, whose freed memory goes back to the system at once."""
    config = settings(out, steps=1, pp=layout[2], **flags)
    with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"):
        fresh = Pool()
        try:
            return fresh.run(4, peak_memory, layout, config, cfg, seconds=500)
        finally:
            fresh.stop()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_peak_memory_falls_with_zeros_stage_as_the_formula_says(tmp_path, zero):
    for peak, formula in peak_of((4, 1, 1), BIG, tmp_path, zero=zero, micro_batch=1):
        assert peak == pytest.approx(sum(formula), rel=0.15)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", PIPELINES)
def test_peak_memory_of_a_pipeline_is_what_its_schedule_keeps(tmp_path, name):
    peaks = peak_of((1, 1, 4), LONG, tmp_path, batch_size=32, **PIPELINES[name])
    for peak, formula in peaks:
        assert peak == pytest.approx(sum(formula), rel=0.15)
    peak, (state, _, activations) = peaks[0]            # the stage that 1F1B relieves least
    assert peak - state == pytest.approx(activations, rel=0.15)


# ---------------------------------------------------------------------------------------------
# checkpoint.py
# ---------------------------------------------------------------------------------------------


def saved(out, step):
    return checkpoint.load(out / f"step_{step:08d}.pt")


def assert_same_state(one, two, but=("config",)):
    """Bit for bit."""
    assert one.keys() == two.keys()
    for key in one.keys() - set(but):
        if key in checkpoint.STATE:
            assert one[key].keys() == two[key].keys()
            assert all(one[key][n].equal(two[key][n]) for n in one[key]), key
        else:
            assert one[key] == two[key], key


def save_now(rank, world, layout, config, cfg):
    """A file of step 0."""
    dp, tp, pp = layout
    with gridded(rank, world, tp, pp, config.sequence_parallel) as grid:
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg), None)
        run.save()
        run.writer.wait()


def test_a_file_has_the_plain_models_names_and_no_layout(pool, tmp_path):
    plain, files = GPT(CFG).initialize(5), {}
    for layout in [(1, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 5), (8, 1, 1), (1, 4, 2)]:
        dp, tp, pp = layout
        out = tmp_path / str(layout)
        out.mkdir()
        config = settings(out, tp=tp, pp=pp, micro_batch=1, seed=5, zero=min(dp // 2, 3))
        pool.run(dp * tp * pp, save_now, layout, config, CFG)
        files[layout] = saved(out, 0)
        assert_same_state(files[layout], files[1, 1, 1])
        size = sum(4 * t.numel() for n in checkpoint.STATE for t in files[layout][n].values())
        assert (out / "latest.pt").stat().st_size < 1.2 * size      # no storage of padding or twins
    whole = files[1, 1, 1]["parameters"]
    named = dict(plain.named_parameters())
    assert whole.keys() == named.keys()             # the tied matrix once
    assert all(whole[n].equal(named[n].detach()[:whole[n].shape[0]]) for n in named)
    assert whole["embed.token.weight"].shape[0] == 257
    loaded, _ = checkpoint.load_model(out / "latest.pt")
    assert all(p.equal(named[n]) for n, p in loaded.named_parameters())


@pytest.mark.parametrize("dtype, layout, flags", [
    *[(dtype, layout, {}) for dtype in ("fp32", "bf16", "fp16")
      for layout in ((1, 1, 1), (2, 2, 2))],
    ("fp32", (2, 1, 2), dict(zero=1, pp_schedule="1f1b")),
    ("bf16", (2, 2, 1), dict(zero=2, sequence_parallel=True)),
    ("fp16", (2, 2, 1), dict(zero=3, recompute=True, offload=True))])
def test_a_resumed_run_is_the_straight_one_bit_for_bit(pool, tmp_path, dtype, layout, flags):
    """With dropout, skipped steps and the scaler's state; from the file of the middle."""
    dp, tp, pp = layout
    cfg = replace(CFG, dropout=0.1, n_layer=2)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir(), resumed.mkdir()
    config = settings(straight, dtype=dtype, steps=8, save_every=4, tp=tp, pp=pp, **flags)
    world, file = dp * tp * pp, straight / "step_00000004.pt"
    steps, _, whole = pool.run(world, run_steps, layout, config, cfg, nothing, None, overflow)[0]
    again, _, other = pool.run(world, run_steps, layout, replace(config, out=str(resumed)), cfg,
                               nothing, file, overflow)[0]
    assert [row["step"] for row in again] == [5, 6, 7, 8]
    for name in ("loss", "grad_norm", "lr", "loss_scale", "tokens"):
        assert repr(column(again, name)) == repr(column(steps[4:], name)), name     # nan is nan
    assert all(whole[k][n].equal(other[k][n]) for k in whole for n in whole[k])
    assert_same_state(saved(straight, 8), saved(resumed, 8))
    assert saved(straight, 8)["optimizer_steps"] == 6 and saved(straight, 4)["optimizer_steps"] == 3
    if dtype == "fp16":
        assert column(steps, "loss_scale") == [2.0 ** n for n in (16, 16, 15, 15, 15, 15, 14, 14)]


def overflow(run):
    """Steps 2 and 6 overflow."""
    finish = run.flat.finish_grad_sync

    def finish_and_spoil():
        finish()
        if run.step + 1 in (2, 6):
            run.flat.buckets[0].shard["grad"][0] = math.inf
    run.flat.finish_grad_sync = finish_and_spoil


def test_a_run_goes_on_in_another_layout(pool, tmp_path):
    config = settings(tmp_path, steps=10, save_every=5, tp=2, pp=2)
    straight = pool.run(8, run_steps, (2, 2, 2), replace(
        config, zero=2, sequence_parallel=True, pp_schedule="1f1b"), CFG)[0][0]
    for layout, flags in [((1, 1, 1), {}), ((8, 1, 1), dict(zero=3)), ((1, 4, 2), {}),
                          ((1, 1, 4), dict(pp_schedule="1f1b")), ((4, 1, 1), dict(zero=1))]:
        dp, tp, pp = layout
        out = tmp_path / str(layout)
        out.mkdir()
        moved = replace(config, out=str(out), tp=tp, pp=pp, micro_batch=1, **flags)
        steps = pool.run(dp * tp * pp, run_steps, layout, moved, CFG, nothing,
                         tmp_path / "step_00000005.pt")[0][0]
        for name in ("loss", "grad_norm"):
            assert relative(column(steps, name), column(straight[5:], name)) <= 1e-5, layout
        assert relative(saved(out, 10)["parameters"], saved(tmp_path, 10)["parameters"]) <= 1e-3


@pytest.mark.parametrize("given", [dict(lr=0.1), dict(beta1=0.5), dict(beta2=0.5), dict(clip=0.01),
                                   dict(weight_decay=9.0), dict(steps=9, lr_schedule="linear")])
def test_a_flag_given_at_the_resume_wins_over_the_stored_one(tmp_path, given):
    cfg = replace(CFG, n_layer=1)
    run_steps(0, 1, (1, 1, 1), settings(tmp_path, steps=3, lr=1e-2), cfg)
    file, ends = tmp_path / "step_00000003.pt", []
    usual = dict(device="cpu", out=str(tmp_path), steps=6, micro_batch=2)
    for flags in (usual, {**usual, **given}, usual):
        config, _ = train.merge_config(flags, checkpoint.load(file))
        assert (config.batch_size, config.warmup_steps) == (8, 5)       # stored, and not given
        ends.append(run_steps(0, 1, (1, 1, 1), config, cfg, nothing, file)[2]["master"])
    assert relative(ends[2], ends[0]) == 0 < 1e-4 < relative(ends[1], ends[0])


def small_state(step, fill=0.0):
    """The state of a small model whose parameters and moments are all `fill`."""
    cfg = GPTConfig(n_layer=1, n_embd=32)
    tensors = {name: torch.full(shape, fill) for name, shape in plain_shapes(cfg).items()}
    return dict(format=3, step=step, consumed_samples=1, tokens=1, optimizer_steps=1, config={},
                model=asdict(cfg), tokenizer="bytes", data="d", scaler={}, monitor={},
                **{key: tensors for key in checkpoint.STATE})


def plain_shapes(cfg):
    shapes = {name: list(p.shape) for name, p in GPT(cfg).named_parameters()}
    shapes["embed.token.weight"][0] = cfg.vocab_size
    return shapes


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_files_stay_and_latest_is_one_of_them(tmp_path):
    for step in range(1, 6):
        checkpoint.save(small_state(step), tmp_path, keep=2)
        assert (tmp_path / "latest.pt").samefile(tmp_path / f"step_{step:08d}.pt")
    assert names_in(tmp_path) == ["latest.pt", "step_00000004.pt", "step_00000005.pt"]
    with mock.patch.object(os, "link", side_effect=OSError):        # a file system without links
        checkpoint.save(small_state(6), tmp_path, keep=1)
    assert names_in(tmp_path) == ["latest.pt", "step_00000006.pt"]
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 6


@contextmanager
def no_file_above(size):
    """The kernel refuses to write more than `size` bytes to a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_save_leaves_the_files_before_it(tmp_path):
    checkpoint.save(small_state(1), tmp_path, keep=1)
    before = (tmp_path / "latest.pt").read_bytes()
    with no_file_above(100_000), pytest.raises(OSError, match="step_00000002.pt.*File too large"):
        checkpoint.save(small_state(2), tmp_path, keep=1)
    assert names_in(tmp_path) == ["latest.pt", "step_00000001.pt"]
    assert (tmp_path / "latest.pt").read_bytes() == before
    checkpoint.save(small_state(3), tmp_path, keep=1)
    assert names_in(tmp_path) == ["latest.pt", "step_00000003.pt"]


def test_a_run_outlives_a_failed_save_but_not_the_last(tmp_path, capsys):
    cfg = replace(CFG, n_layer=1)

    def fill_disk(run):
        save = run.save

        def save_on_a_full_disk():
            with no_file_above(10_000) if run.step in full else nullcontext():
                save()
                run.writer.wait()
        run.save = save_on_a_full_disk
    full, config = {4}, settings(tmp_path, steps=6, save_every=2, keep=9)
    steps, _, _ = run_steps(0, 1, (1, 1, 1), config, cfg, prepare=fill_disk)
    error = capsys.readouterr().err
    assert "step_00000004.pt" in error and "File too large" in error and error.count("\n") == 1
    assert len(steps) == 6
    assert names_in(tmp_path) == ["latest.pt", "step_00000002.pt", "step_00000006.pt"]
    full = {8}
    with pytest.raises(RunError, match="the last checkpoint is lost.*step_00000008.pt") as stop:
        run_steps(0, 1, (1, 1, 1), replace(config, steps=8), cfg, nothing,
                  tmp_path / "step_00000006.pt", fill_disk)
    assert stop.value.status == 1
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 6


def test_a_flipped_bit_or_a_missing_end_is_recognised(tmp_path):
    state = small_state(1)
    whole = torch.randn(128, 32)
    state["parameters"]["embed.position.weight"] = whole
    path = checkpoint.save(state, tmp_path, keep=1)
    checkpoint.verify(path)
    content = path.read_bytes()
    start = content.index(whole.numpy().tobytes())
    rng = random.Random(0)
    for _ in range(50):
        damaged = bytearray(content)
        damaged[start + rng.randrange(4 * whole.numel())] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.CorruptCheckpoint, match="damaged"):
            checkpoint.verify(path)
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(checkpoint.CorruptCheckpoint):
            checkpoint.verify(path)
    with pytest.raises(FileNotFoundError):
        checkpoint.verify(tmp_path / "none.pt")


def test_of_damaged_files_the_newest_whole_one_is_taken(tmp_path, capsys):
    for step in (1, 2, 3):
        checkpoint.save(small_state(step), tmp_path, keep=3)
        time.sleep(0.02)
    with open(tmp_path / "step_00000003.pt", "r+b") as file:
        file.truncate(1000)
    path, (event,) = checkpoint.latest_valid(checkpoint.list_checkpoints(tmp_path))
    assert path.name == "step_00000002.pt" and event["event"] == "damaged"
    assert "step_00000003.pt" in event["path"] and event["reason"] in capsys.readouterr().err
    for path in tmp_path.iterdir():
        path.write_bytes(b"torn")
    with pytest.raises(checkpoint.NoValidCheckpoint, match="none of the 3"):
        checkpoint.latest_valid(checkpoint.list_checkpoints(tmp_path))


def test_a_file_that_may_not_be_read_is_not_taken_for_a_damaged_one(tmp_path):
    """Passed over, the run would go on from an older one."""
    for step in (1, 2):
        checkpoint.save(small_state(step), tmp_path, keep=2)
    with mock.patch.object(checkpoint.zipfile, "ZipFile", side_effect=PermissionError), \
            pytest.raises(PermissionError):
        checkpoint.latest_valid(checkpoint.list_checkpoints(tmp_path))


class Malice:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_checkpoints_code_is_not_run(tmp_path):
    path = tmp_path / "step_00000001.pt"
    torch.save({**small_state(1), "scaler": Malice(str(tmp_path / "ran"))}, path)
    checkpoint.verify(path)
    with pytest.raises(checkpoint.CorruptCheckpoint, match="refused"):
        checkpoint.load(path)
    assert names_in(tmp_path) == ["step_00000001.pt"]
    torch.load(path, weights_only=False)        # the trap does work
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize("content, words", [
    ([1, 2], "not a checkpoint of this project"), ({}, "not a checkpoint of this project"),
    ({**small_state(1), "format": 2}, "format 2.*format 3")])
def test_a_file_of_something_else_is_no_checkpoint(tmp_path, content, words):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(checkpoint.CorruptCheckpoint, match=words):
        checkpoint.load(tmp_path / "x.pt")


@pytest.mark.parametrize("change", [
    dict(model={}), dict(model=dict(width=3)), dict(parameters={}), dict(another_key=0),
    dict(model=asdict(GPTConfig(n_layer=1, n_embd=64))), dict(exp_avg=dict(x=torch.zeros(1)))])
def test_a_file_that_contradicts_itself_is_no_checkpoint(tmp_path, change):
    torch.save({**small_state(1), **change}, tmp_path / "x.pt")
    with pytest.raises(checkpoint.CorruptCheckpoint, match="is refused: "):
        checkpoint.load(tmp_path / "x.pt")


def test_latest_is_the_newest_whatever_became_of_the_times(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(small_state(step), tmp_path, keep=3)
        os.utime(tmp_path / f"step_{step:08d}.pt", (step, step))
    os.utime(tmp_path / "step_00000001.pt", (9, 9))         # as after a copy that keeps no times
    listed = checkpoint.list_checkpoints(tmp_path)
    assert [path.name[12:14] for path in listed] == ["3.", "1.", "2."]


def test_what_a_killed_save_left_is_overwritten_by_the_next(tmp_path):
    with mock.patch.object(os, "fsync", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(small_state(1), tmp_path, keep=1)
    assert names_in(tmp_path) == ["step.pt.tmp"]
    checkpoint.save(small_state(2), tmp_path, keep=1)
    assert names_in(tmp_path) == ["latest.pt", "step_00000002.pt"]


def lose_the_last(rank, world, folder):
    with mock.patch.object(checkpoint, "save", side_effect=OSError("the disk is full")):
        try:
            run_steps(rank, world, (1, 1, 2), settings(folder, steps=2, pp=2), CFG)
        except RunError as error:
            return error.status, str(error)


def test_all_ranks_leave_together_when_the_last_save_fails(pool, tmp_path):
    assert pool.run(2, lose_the_last, tmp_path) == 2 * [
        (1, "the last checkpoint is lost: the disk is full")]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path):
    """The order of calls, for want of a power cut."""
    done, sync, move = [], os.fsync, os.replace

    def spy_sync(number):
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{number}")).name))
        sync(number)

    def spy_move(source, target):
        done.append(("replace", Path(target).name))
        move(source, target)
    with mock.patch.object(os, "fsync", spy_sync), mock.patch.object(os, "replace", spy_move):
        checkpoint.save(small_state(1), tmp_path, keep=1)
        with mock.patch.object(os, "link", side_effect=OSError):    # latest.pt is a copy
            checkpoint.save(small_state(2), tmp_path, keep=1)
    assert done == [("fsync", "step.pt.tmp"), ("replace", "step_00000001.pt"),
                    ("replace", "latest.pt"), ("fsync", tmp_path.name),
                    ("fsync", "step.pt.tmp"), ("replace", "step_00000002.pt"),
                    ("fsync", "latest.pt.tmp"), ("replace", "latest.pt"), ("fsync", tmp_path.name)]


def test_a_file_with_a_flipped_bit_is_passed_over_and_not_sampled_from(tmp_path):
    cfg = replace(CFG, n_layer=1)
    run_steps(0, 1, (1, 1, 1), settings(tmp_path, steps=2, save_every=1), cfg)
    newest = tmp_path / "step_00000002.pt"
    content, weight = newest.read_bytes(), saved(tmp_path, 2)["parameters"]["embed.token.weight"]
    damaged = bytearray(content)
    damaged[content.index(weight.numpy().tobytes()) + 50] ^= 1
    newest.write_bytes(damaged)
    checkpoint.load(newest)                             # torch sees nothing
    path, _ = checkpoint.latest_valid(checkpoint.list_checkpoints(tmp_path))
    assert path.name == "step_00000001.pt"
    with pytest.raises(checkpoint.CorruptCheckpoint):
        checkpoint.load_model(newest)


def test_a_loaded_model_drops_nothing(tmp_path):
    save_now(0, 1, (1, 1, 1), settings(tmp_path), replace(CFG, n_layer=1, dropout=0.5))
    loaded, _ = checkpoint.load_model(tmp_path / "latest.pt")
    tokens = tokens_of(CFG, 1)
    assert loaded(tokens, dropout_seed=1).equal(loaded(tokens, dropout_seed=2))


def test_a_resume_in_another_precision_starts_with_that_precisions_scale(tmp_path):
    config, cfg = settings(tmp_path, steps=1), replace(CFG, n_layer=1)
    run_steps(0, 1, (1, 1, 1), config, cfg)
    steps, *_ = run_steps(0, 1, (1, 1, 1), replace(config, dtype="fp16", steps=2), cfg, nothing,
                          tmp_path / "step_00000001.pt")
    assert column(steps, "loss_scale") == [2.0 ** 16]


def test_a_resume_with_another_batch_size_reads_on_where_the_file_ends(tmp_path):
    config, cfg = settings(tmp_path, steps=2), replace(CFG, n_layer=1)
    order, asked = Memory.sample_indices, []

    def spy(self, seed, first, count):
        asked.append((first, count))
        return order(self, seed, first, count)
    with mock.patch.object(Memory, "sample_indices", spy):
        run_steps(0, 1, (1, 1, 1), config, cfg)
        steps, *_ = run_steps(0, 1, (1, 1, 1), replace(config, batch_size=4, steps=4), cfg, nothing,
                              tmp_path / "step_00000002.pt")
    assert asked == [(0, 8), (8, 8), (16, 4), (20, 4)]
    assert column(steps, "tokens") == [20 * 16, 24 * 16]


# ---------------------------------------------------------------------------------------------
# train.py: the command line
# ---------------------------------------------------------------------------------------------

TINY = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--seq-len", "16", "--batch-size", "4",
        "--steps", "4", "--warmup-steps", "2", "--save-every", "2", "--eval-every", "2"]


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A directory of token shards made by data.py."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text.txt").write_text("".join(f"line {i}: some words é\n" for i in range(3000)))
    subprocess.run([sys.executable, ROOT / "data.py", "--input", folder / "text.txt", "--out",
                    folder / "d", "--tokenizer", "bytes"], check=True, capture_output=True)
    return folder / "d"


@pytest.fixture
def run_train(monkeypatch, capsys):
    """run_train(*flags, **environment) -> (exit status, stdout, stderr) of train.main here."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*flags, **environment):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, flags)])
        monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, str(value))
            try:
                train.main()
                status = 0
            except SystemExit as exit_:
                status = exit_.code
        return status, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def read_metrics(out):
    """(rows of steps, events), each in the order of the file."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "event" not in r], [r for r in rows if "event" in r]


def copy_of(shards, tmp_path, change):
    """A copy of the data whose first training shard went through `change` (bytes -> bytes)."""
    folder = tmp_path / "changed"
    shutil.copytree(shards, folder)
    path = sorted(folder.glob("train_*.bin"))[0]
    path.write_bytes(change(path.read_bytes()))
    return folder


def expect_mistake(result, message):
    status, _, error = result
    assert status == 2, error
    assert message in error and error.startswith("train.py: ") and error.count("\n") == 1


@pytest.mark.parametrize("flags, environment, message", [
    ("--tp 2", dict(WORLD_SIZE=3), "3 processes are not divisible by tp 2 x pp 1"),
    ("--tp 4 --pp 4", dict(WORLD_SIZE=8), "8 processes are not divisible by tp 4 x pp 4"),
    ("--tp 8", dict(WORLD_SIZE=8), "n_head 2 is not divisible by tp 8"),
    ("--compile --tp 2", dict(WORLD_SIZE=2), "--compile goes with tp 1 and dropout 0, not 2 and 0"),
    ("--compile --dropout 0.1", {}, "not 1 and 0.1"),
    ("--pp 4", dict(WORLD_SIZE=4), "n_layer 2 is less than pp 4"),
    ("--zero 3 --pp 2", dict(WORLD_SIZE=2), "zero 3 with pp 2"),
    ("--sequence-parallel", {}, "but tp is 1"),
    ("--sequence-parallel --tp 2 --seq-len 15", dict(WORLD_SIZE=2), "seq_len 15 is not divisible"),
    ("--zero 4", {}, "--zero"),
    ("--pp-schedule zigzag", {}, "zigzag"),
    ("--batch-size 6 --micro-batch 4", {}, "batch size 6 is not divisible by dp 1 x micro-batch 4"),
    ("--n-embd 15", {}, "n_embd 15 is not divisible by n_head 2"),
    ("--seq-len 100000", {}, "too few"),
    ("--nonsense 1", {}, "--nonsense"),
    ("--dtype fp8", {}, "fp8"),
    ("--model gpt5", {}, "gpt5"),
    ("--batch-size many", {}, "many"),
    ("--steps 0", {}, "argument --steps: 0 must be at least 1 and finite"),
    ("--lr -1", {}, "--lr: -1 must be"),
    ("--lr nan", {}, "--lr: nan must be"),
    ("--lr inf", {}, "--lr: inf must be at least 0 and finite"),
    ("--dropout 1", {}, "--dropout: 1 must be at least 0 and below 1"),
    ("--beta2 1.5", {}, "--beta2: 1.5 must be"),
    ("--device cuda", {}, "no CUDA device"),
    ("--skip-steps 5", {}, "--skip-steps: 5 must be A:B"),
    ("--skip-steps 9:3", {}, "A not after B"),
    ("--skip-steps 0:3", {}, "from 1 on"),
    ("--spike-steps 0", {}, "--spike-steps: 0 must be"),
    ("--spike-margin 0", {}, "--spike-margin: 0 must be"),
    ("--max-rollbacks -1", {}, "--max-rollbacks: -1 must be"),
    ("--timeout 0", {}, "--timeout: 0 must be"),
    ("--rollback maybe", {}, "maybe"),
    ("--eval-only", {}, "holds no checkpoint"),
    ("--resume nowhere.pt", {}, "no checkpoint nowhere.pt"),
    ("--data nowhere", {}, "python data.py"),
    ("--out /proc/nowhere", {}, "/proc/nowhere"),
])
def test_a_users_mistake_ends_in_one_line_and_exit_2(run_train, shards, tmp_path, flags,
                                                     environment, message):
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        result = run_train("--data", shards, "--out", tmp_path / "o", *TINY, *flags.split(),
                           **environment)
    finally:
        os.chdir(before)
    expect_mistake(result, message)
    assert not list(tmp_path.rglob("*.pt"))


def test_out_that_is_a_file_is_refused(run_train, shards, tmp_path):
    (tmp_path / "o").write_text("precious")
    expect_mistake(run_train("--data", shards, "--out", tmp_path / "o", *TINY), "--out")
    assert (tmp_path / "o").read_text() == "precious"


@pytest.mark.parametrize("change, message", [
    (lambda b: b[:-100], "train_000000.bin"),
    (lambda b: b"abcd" + b[4:], "train_000000.bin"),
    (lambda b: b[:-2] + (257).to_bytes(2, "little"), "257"),
])
def test_damaged_data_is_refused(run_train, shards, tmp_path, change, message):
    folder = copy_of(shards, tmp_path, change)
    expect_mistake(run_train("--data", folder, "--out", tmp_path / "o", *TINY), message)


def test_checkpoints_that_are_damaged_hostile_or_of_another_run_are_refused(run_train, shards,
                                                                            tmp_path):
    out = tmp_path / "o"
    assert run_train("--data", shards, "--out", out, *TINY)[0] == 0
    good = out / "step_00000004.pt"
    bad = tmp_path / "bad.pt"

    def resume(*flags, path=bad):
        return run_train("--data", shards, "--out", tmp_path / "o2", "--resume", path, *flags)

    bad.write_bytes(good.read_bytes()[:-5000])
    expect_mistake(resume(), "bad.pt")
    middle = good.stat().st_size // 2
    data_ = bytearray(good.read_bytes())
    data_[middle] ^= 1
    bad.write_bytes(data_)
    expect_mistake(resume(), "bad.pt")
    torch.save({"x": Malice(str(tmp_path / "exploded"))}, bad)
    expect_mistake(resume(), "bad.pt")
    assert not (tmp_path / "exploded").exists()
    torch.save({"weights": torch.zeros(3)}, bad)
    expect_mistake(resume(), "not a checkpoint of this project")
    bad.write_bytes(b"")
    expect_mistake(resume(), "bad.pt")
    expect_mistake(resume("--n-layer", 3, path=good), "n_layer 2, not 3")
    expect_mistake(resume("--model", "gpt2", path=good), "n_layer 2, not 12")
    other = copy_of(shards, tmp_path, bytes)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "fingerprint": "another"}))
    expect_mistake(resume("--data", other, path=good), "not the data")
    (other / "meta.json").write_text(json.dumps({**meta, "vocab_size": 300}))
    expect_mistake(resume("--data", other, path=good), "tokenizer")


def torchrun(processes, *arguments, cwd=None, **options):
    """torchrun on a free port, with the environment of a user's shell."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", f"--nproc_per_node={processes}", *map(str, arguments)],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, **options)


@pytest.mark.parametrize("flags, change, message", [
    (["--pp", "2", "--n-layer", "1"], bytes, "n_layer 1 is less than pp 2"),
    ([], lambda b: b[:-2] + (999).to_bytes(2, "little"), "999"),     # rank 1 finds it
    (["--resume", "nowhere.pt"], bytes, "no checkpoint nowhere.pt"),
])
def test_of_many_ranks_one_tells_the_mistake(shards, tmp_path, monkeypatch, flags, change, message):
    folder = copy_of(shards, tmp_path, change)
    process = torchrun(2, ROOT / "train.py", "--data", folder, "--out", tmp_path / "o", *TINY,
                       *flags)
    _, error = process.communicate(timeout=120)
    ours = [line for line in error.splitlines() if line.startswith("train.py: ")]
    assert len(ours) == 1 and message in ours[0], error
    assert "exitcode  : 2" in error and process.returncode != 0
    assert error.count("Traceback (most recent call last)") <= 1            # torchrun's own


def test_metrics_have_a_row_for_every_step_and_what_happened_besides(run_train, shards, tmp_path):
    out = tmp_path / "o"
    assert run_train("--data", shards, "--out", out, *TINY)[0] == 0
    rows, events = read_metrics(out)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert [r["tokens"] for r in rows] == [64, 128, 192, 256]
    assert [("val_loss" in r) for r in rows] == [False, True, False, True]
    for row in rows:
        assert {"loss", "lr", "grad_norm", "loss_scale", "tokens_per_second"} <= set(row)
        assert 4 < row["loss"] < 7 and row["tokens_per_second"] > 0 and row["loss_scale"] == 1.0
    assert [e["event"] for e in events] == ["start"]
    assert len(repr(rows[0]["loss"])) > 8                       # enough digits to compare layouts


def test_a_value_that_is_not_finite_is_null_in_metrics(tmp_path):
    metrics = train.Metrics(tmp_path, 0)
    metrics.write(step=1, loss=math.nan, grad_norm=math.inf)
    assert read_metrics(tmp_path)[0] == [dict(step=1, loss=None, grad_norm=None)]


def test_resume_takes_the_command_line_then_the_checkpoint_then_the_default(run_train, shards,
                                                                            tmp_path):
    out, base = tmp_path / "o", ["--data", shards]
    assert run_train(*base, "--out", out, *TINY, "--lr", 0.01, "--lr-schedule", "linear", "--beta2",
                     0.9, "--clip", 0.5)[0] == 0
    status, text, _ = run_train(*base, "--out", out)
    assert status == 0 and "nothing left to do" in text         # --steps 4 is in the checkpoint
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')                           # torn by a crash
    assert run_train(*base, "--out", out, "--steps", 6)[0] == 0
    assert run_train(*base, "--out", out, "--steps", 8, "--lr", 0.1)[0] == 0
    rows, events = read_metrics(out)
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert [e["event"] for e in events] == ["start", "resume", "resume"]
    assert rows[4]["lr"] == pytest.approx(0.01 * (0.1 + 0.9 * (1 - 3 / 4)))
    assert rows[6]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * (1 - 5 / 6)))
    config = checkpoint.load(out / "latest.pt")["config"]
    assert (config["beta2"], config["clip"], config["lr"], config["steps"]) == (0.9, 0.5, 0.1, 8)
    assert events[1]["config"]["tp"] == 1 and events[1]["config"]["dropout"] == 0.0


def test_resume_auto_never_and_path(run_train, shards, tmp_path):
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out, *TINY]
    assert run_train(*flags, "--resume", "never")[0] == 0
    expect_mistake(run_train(*flags, "--resume", "never"), "--resume never")
    status, text, _ = run_train(*flags, "--resume", "never", TORCHELASTIC_RESTART_COUNT=1)
    assert status == 0 and "nothing left" in text               # torchrun restarted the group
    newest = out / "step_00000004.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])             # latest.pt is the same file
    status, text, error = run_train(*flags)
    assert status == 0 and "step_00000004.pt is damaged" in error and "after step 2" in text
    rows, events = read_metrics(out)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 3, 4]
    assert [e["event"] for e in events] == ["start", "damaged", "resume"]
    assert rows[3]["loss"] == rows[5]["loss"]                   # and bit-equal at that
    # The run that goes on from an older file is the newer one from then on.
    assert run_train(*flags, "--resume", out / "step_00000002.pt", "--steps", 3)[0] == 0
    assert checkpoint.list_checkpoints(out)[0].name == "step_00000003.pt"
    for path in out.glob("*.pt"):
        path.write_bytes(b"no checkpoint")
    status, _, error = run_train(*flags)
    assert status == 1 and "is whole" in error.splitlines()[-1]


def test_eval_only_tells_the_loss_and_trains_nothing(run_train, shards, tmp_path):
    out = tmp_path / "o"
    assert run_train("--data", shards, "--out", out, *TINY)[0] == 0
    before = (out / "latest.pt").read_bytes(), (out / "metrics.jsonl").read_bytes()
    old, times = out / "step_00000002.pt", [path.stat().st_mtime_ns for path in out.iterdir()]
    assert run_train("--data", shards, "--out", out, "--eval-only", "--resume", old)[0] == 0
    assert times == [path.stat().st_mtime_ns for path in out.iterdir()]
    val_loss = read_metrics(out)[0][-1]["val_loss"]
    status, text, _ = run_train("--data", shards, "--out", out, "--eval-only")
    assert status == 0 and f"{val_loss:.4f} nats" in text and "bits a byte" in text
    assert before == ((out / "latest.pt").read_bytes(), (out / "metrics.jsonl").read_bytes())


def wait_for_step(out, step, process):
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        with suppress(FileNotFoundError, IndexError, ValueError):
            if read_metrics(out)[0][-1]["step"] >= step:
                return
        time.sleep(0.02)
    raise AssertionError(process.communicate())


def test_a_signal_in_the_last_step_changes_nothing(run_train, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "StopSignal", lambda: SimpleNamespace(requested=True))
    out = tmp_path / "o"
    _, text, _ = run_train("--data", shards, "--out", out, *TINY, "--steps", 1)
    rows, events = read_metrics(out)
    assert "val_loss" in rows[0] and events[-1]["event"] == "start" and "goes on" not in text


def test_a_stopped_run_says_how_it_goes_on(run_train, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "StopSignal", lambda: SimpleNamespace(requested=True))
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    assert "go on with --resume auto" in run_train(*flags, "--resume", "never")[1]
    assert "the same command goes on" in run_train(*flags)[1]


@pytest.mark.parametrize("killed, steps", [(1, [1, 1, 2, 3, 4]), (2, [1, 2, 3, 3, 4])])
def test_after_a_kill_in_an_evaluation_every_step_has_its_row(run_train, shards, tmp_path, killed,
                                                              steps):
    """The steps since the last checkpoint are done again, and are the same."""
    flags = ["--data", shards, *TINY, "--out"]
    assert run_train(*flags, tmp_path / "straight")[0] == 0
    with mock.patch.object(train.Run, "evaluate", side_effect=[1.0] * (killed - 1) + [
            ZeroDivisionError]), pytest.raises(ZeroDivisionError):
        run_train(*flags, tmp_path / "o")
    assert column(read_metrics(tmp_path / "o")[0], "step") == list(range(1, 2 * killed))
    assert run_train(*flags, tmp_path / "o")[0] == 0
    straight, rows = (read_metrics(tmp_path / out)[0] for out in ("straight", "o"))
    assert column(rows, "step") == steps
    assert column({row["step"]: row for row in rows}.values(), "loss") == column(straight, "loss")
    assert rows[-1]["val_loss"] == straight[-1]["val_loss"]


def test_a_resumed_run_lets_go_of_the_file(run_train, shards, tmp_path, monkeypatch):
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    run_train(*flags)
    maps = []
    monkeypatch.setattr(train.Run, "train", lambda *_: maps.append(
        Path("/proc/self/maps").read_text()))
    run_train(*flags, "--steps", 6)
    assert len(maps) == 1 and str(tmp_path / "o") not in maps[0]


def test_an_impossible_layout_is_refused_before_communication_at_a_resume_too(
        run_train, shards, tmp_path):
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    run_train(*flags)
    expect_mistake(run_train(*flags, "--tp", 2, WORLD_SIZE=3), "3 processes are not divisible")


def disagree(rank, world, folder):
    told = []
    for action in (lambda: parallel.assert_equal_across_ranks(rank, "not the same"),
                   lambda: parallel.all_ranks(lambda: rank and checkpoint.load(folder / "x.pt"))):
        with pytest.raises(RunError) as error:
            action()
        told.append((error.value.status, str(error.value)))
    return told


def test_ranks_that_see_different_files_end_alike(pool, tmp_path):
    assert pool.run(2, disagree, tmp_path) == 2 * [[
        (2, "not the same"), (2, f"rank 1: there is no checkpoint {tmp_path / 'x.pt'}")]]


def test_any_layout_evaluates(run_train, shards, tmp_path):
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    _, text, _ = run_train(*flags)
    loss = read_metrics(tmp_path / "o")[0][-1]["val_loss"]
    assert f"{loss:.4f}" in run_train(*flags, "--eval-only", "--micro-batch", 3)[1]


def test_a_checkpoint_is_evaluated_on_other_data_too(run_train, shards, tmp_path):
    other, flags = tmp_path / "d", ["--out", tmp_path / "o", *TINY]
    (tmp_path / "other.txt").write_text("another text, of another rhythm. " * 200)
    data.prepare([tmp_path / "other.txt"], other, "bytes")
    run_train("--data", shards, *flags)
    expect_mistake(run_train("--data", other, *flags, "--steps", 6), "not the data")
    own, theirs = (run_train("--data", d, *flags, "--eval-only") for d in (shards, other))
    assert own[0] == theirs[0] == 0 and own[1] != theirs[1] and "nats" in theirs[1]


def test_a_run_goes_on_when_nobody_reads_its_lines(shards, tmp_path):
    with subprocess.Popen([sys.executable, ROOT / "train.py", "--data", shards, "--out",
                           tmp_path / "o", *TINY], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0
    assert checkpoint.load(tmp_path / "o" / "latest.pt")["step"] == 4


def test_a_diverged_validation_loss_can_be_printed():
    assert "perplexity inf" in train.format_eval(1e3, bytes_per_token=1.0)


@pytest.mark.parametrize("processes, number, to", [
    (1, signal.SIGINT, "it"), (1, signal.SIGTERM, "it"), (2, signal.SIGTERM, "torchrun"),
    (2, signal.SIGTERM, "a worker")])
def test_a_signal_saves_and_the_same_command_goes_on(shards, tmp_path, processes, number, to):
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out, *TINY, "--steps", "100000", "--save-every", "0",
             "--eval-every", "0", "--pp", str(processes)]
    if processes == 1:
        process = subprocess.Popen([sys.executable, ROOT / "train.py", *flags], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    else:
        process = torchrun(processes, ROOT / "train.py", *flags)
    wait_for_step(out, 3, process)
    if to == "a worker":                            # which tells the others
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children.split()[-1]), number)
    else:
        process.send_signal(number)                 # torchrun passes it to the workers
    text, error = process.communicate(timeout=60)
    rows, events = read_metrics(out)
    assert events[-1] == dict(event="stop", step=rows[-1]["step"])
    assert "the same command goes on" in text and rows[-1]["step"] >= 3
    assert checkpoint.load(out / "latest.pt")["step"] == rows[-1]["step"]
    assert "val_loss" not in rows[-1]
    assert to == "torchrun" or process.returncode == 0
    if processes == 1:
        assert process.returncode == 0 and error == ""
        done = subprocess.run([sys.executable, ROOT / "train.py", *flags, "--steps",
                               str(rows[-1]["step"] + 1)], check=True, capture_output=True)
        assert read_metrics(out)[0][-1]["step"] == rows[-1]["step"] + 1, done


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
@pytest.mark.parametrize("lost", [False, True])
def test_no_thread_of_gloo_outlives_a_run(shards, tmp_path, lost):
    """Those that do abort the process now and then, after its last line."""
    (tmp_path / "wrapper.py").write_text(f"""
import glob, sys
sys.path.insert(0, {str(ROOT)!r})
import checkpoint, train
def fail(*_):
    raise OSError("full")
if {lost}:
    checkpoint.save = fail
try:
    train.main()
finally:
    names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    sys.stdout.write("gloo threads %d\\n" % sum("gloo" in name for name in names))
""")
    process = torchrun(2, tmp_path / "wrapper.py", "--data", shards, "--out", tmp_path / "out",
                       *TINY, "--zero", "1")
    text, error = process.communicate(timeout=120)
    assert set(re.findall(r"gloo threads (\d+)", text)) == {"0"}, text
    assert ("the last checkpoint is lost" in error) == lost == (process.returncode != 0)


def test_learning_rate_warms_up_then_decays_to_the_ratio_by_either_schedule():
    for schedule, middle in (("cosine", 0.5), ("linear", 0.5)):
        config = train.Config(lr=2.0, steps=110, warmup_steps=10, min_lr_ratio=0.1,
                              lr_schedule=schedule)
        assert [train.learning_rate(config, k) for k in (1, 5, 10)] == pytest.approx([0.2, 1, 2])
        assert train.learning_rate(config, 60) == pytest.approx(0.2 + 1.8 * middle)
        assert train.learning_rate(config, 110) == pytest.approx(0.2)
        quarter = train.learning_rate(config, 35)
        shape = 0.5 * (1 + math.cos(math.pi / 4)) if schedule == "cosine" else 0.75
        assert quarter == pytest.approx(0.2 + 1.8 * shape)
    assert train.learning_rate(train.Config(warmup_steps=0), 1) <= train.Config().lr


@pytest.mark.parametrize("flags, world, micro", [
    ({}, 1, 4), (dict(tp=2, pp=2), 8, 4), ({}, 8, 2),
    (dict(pp=4, n_layer=4), 8, 2), (dict(pp=4, n_layer=4, batch_size=18), 4, 1),
    (dict(pp=2, batch_size=5), 2, 1), (dict(batch_size=6), 2, 1), (dict(micro_batch=8), 1, 8)])
def test_the_default_microbatch_suits_the_layout(shards, flags, world, micro):
    config, _ = train.validate(dict(flags, data=str(shards), seq_len=16), None, world)
    assert config.micro_batch == micro


def test_help_lists_every_flag_with_its_default(run_train):
    status, text, _ = run_train("--help")
    assert status == 0
    for name, value in asdict(train.Config()).items():
        assert f"--{name.replace('_', '-')} " in text.replace("\n", " ")
        if value not in (None, False):
            assert re.search(rf"\((at least [^()]*, )?default {re.escape(str(value))}\)",
                             " ".join(text.split())), name


def test_layout_precision_and_paths_never_come_from_the_checkpoint():
    stored = train.Config(data="d", out="o", tp=2, pp=2, micro_batch=3, dtype="bf16", device="cpu",
                          recompute=True, eval_only=True, resume="file", steps=7)
    config, _ = train.merge_config({}, dict(config=asdict(stored), model=asdict(CFG)))
    assert config == train.Config(steps=7)


def test_the_models_flags_arrive_in_the_model(shards):
    given = dict(data=str(shards), model="opt-125m", n_layer=3, dropout=0.3, seq_len=16)
    assert train.validate(given, None, 1)[1] == GPTConfig(257, 16, 3, 12, 768, "relu", 0.3)
    assert train.validate(dict(given, activation="gelu"), None, 1)[1].activation == "gelu"


def test_a_token_beyond_the_vocabulary_is_found_in_the_validation_split_too(run_train, shards,
                                                                            tmp_path):
    folder = copy_of(shards, tmp_path, bytes)
    path = folder / "val_000000.bin"
    path.write_bytes(path.read_bytes()[:-2] + (257).to_bytes(2, "little"))
    expect_mistake(run_train("--data", folder, "--out", tmp_path / "o", *TINY), "257")


@pytest.mark.parametrize("n_windows", [13, 300])
def test_validation_is_the_mean_loss_of_evenly_spaced_windows(tmp_path, n_windows):
    cfg, val = replace(CFG, dropout=0.5), Memory(CFG, n_windows, seed=1)
    with gridded(0, 1, 1, 1) as grid:
        run = train.Run(settings(tmp_path, dtype="fp64"), cfg, grid, torch.device("cpu"),
                        Memory(cfg), val, None)
        ours = run.evaluate()
    spaced = np.linspace(0, n_windows - 1, min(n_windows, 128)).astype(int)
    batch = torch.from_numpy(val.windows(spaced))
    plain = GPT(cfg).initialize(1337).double().eval()
    loss = plain(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
    assert ours == pytest.approx(loss.item(), rel=1e-10)
    assert all(module.training for module in run.model.modules())       # dropout is back


def test_tokens_per_second_are_those_of_training_alone(tmp_path):
    now = [0.0]

    def clock():
        now[0] += 1
        return now[0]

    def slow(run):
        def wait(*_):
            now[0] += 1000
            return 0.0
        run.evaluate = run.save = wait
    with mock.patch.object(time, "perf_counter", clock):
        steps, *_ = run_steps(0, 1, (1, 1, 1), settings(tmp_path, steps=3, save_every=1,
                                                        eval_every=1),
                              replace(CFG, n_layer=1), prepare=slow)
    assert column(steps, "tokens_per_second") == [8 * 16] * 3


def test_the_console_tells_what_is_left_and_the_loss_in_three_units(tmp_path, capsys):
    def fixed(run):
        run.evaluate = lambda: 2 * math.log(2)
        run.val_data.meta["bytes_per_token"] = 4.0
    now = iter(range(0, 10**6, 40))                     # 40 seconds a step
    with mock.patch.object(time, "perf_counter", lambda: next(now)):
        run_steps(0, 1, (1, 1, 1), settings(tmp_path, steps=3), replace(CFG, n_layer=1),
                  prepare=fixed)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("left ")[1] for line in lines[:3]] == ["1m20s", "0m40s", "0m00s"]
    assert lines[3] == ("validation: 1.3863 nats a token, perplexity 4.00, 0.5000 bits a byte")


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12), ("GeForce GTX 1080", None)])
def test_mfu_is_a_fraction_of_the_peak_of_all_devices_where_it_is_known(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    tokens = 1e9
    used, wide = (                              # the peak is that of 16 bits
        train.format_step(SimpleNamespace(cfg=CFG, grid=Grid(2, 1, 1), device=torch.device("cuda"),
                                          config=train.Config(steps=9, dtype=dtype)),
                          dict(step=1, loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_second=tokens,
                               skipped=0), seconds=1.0) for dtype in ("bf16", "fp32"))
    assert "MFU" not in wide and ("MFU" in used) == (peak is not None)
    if peak is not None:
        share = 100 * tokens * model.flops_per_token(CFG) / (2 * peak)
        assert f"MFU {share:.1f}%" in used


def test_a_full_disk_costs_metrics_a_line_and_not_the_run(tmp_path, capsys):
    metrics = train.Metrics(tmp_path, 0)
    metrics.write(step=1)
    with no_file_above(20):
        metrics.write(step=2, loss=1 / 3)
    metrics.write(step=3)
    assert column(read_metrics(tmp_path)[0], "step") == [1, 3]
    assert "lacks a line" in capsys.readouterr().err


def said(rank, world, folder):
    with redirect_stdout(io.StringIO()) as text:
        run_steps(rank, world, (1, 1, 2), settings(folder, steps=1, pp=2), CFG)
    return text.getvalue()


def test_only_rank_0_writes_metrics_and_to_the_console(pool, tmp_path):
    train.Metrics(tmp_path, 1).write(step=1)
    assert names_in(tmp_path) == []
    first, second = pool.run(2, said, tmp_path)
    assert "step 1/1" in first and second == ""


def test_the_resume_event_tells_the_file_and_the_flags_given(run_train, shards, tmp_path):
    for flags in (TINY, ["--steps", 5]):
        assert run_train("--data", shards, "--out", tmp_path / "o", *flags)[0] == 0
    event = read_metrics(tmp_path / "o")[1][1]
    assert event["event"] == "resume" and event["path"].endswith("step_00000004.pt")
    assert event["given"] == dict(data=str(shards), out=str(tmp_path / "o"), steps=5)


# ---------------------------------------------------------------------------------------------
# train.py: divergence, rollback
# ---------------------------------------------------------------------------------------------


def watched(config, prepare=nothing, state=None, cfg=replace(CFG, n_layer=1), stop=None, rank=0,
            world=1):
    """Train on this rank, with a real metrics.jsonl -> the run, its rows and events (of all runs in
    this --out), and the numbers of the batches it read."""
    order, batches, out = Memory.sample_indices, [], Path(config.out)
    out.mkdir(exist_ok=True)

    def spy(self, seed, first, count):
        batches.append(first // count)
        return order(self, seed, first, count)
    with gridded(rank, world, config.tp, config.pp, config.sequence_parallel) as grid, \
            mock.patch.object(Memory, "sample_indices", spy):
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg),
                        Memory(cfg, 13, seed=1), state and checkpoint.load(state))
        prepare(run)
        try:
            run.train(train.Metrics(out, rank), stop or SimpleNamespace(requested=False))
        finally:
            run.writer.wait()
    rows, events = read_metrics(out)
    return SimpleNamespace(run=run, rows=rows, events=events, batches=batches)


def after_backward(run, act):
    """act(step) whenever the gradients of a step are complete, and nothing is decided yet."""
    finish = run.flat.finish_grad_sync
    run.flat.finish_grad_sync = lambda: (finish(), act(run.step + 1))


def poison(run, step=20, times=1):
    """After this step the parameters are wrong, in the first `times` attempts: the losses of the
    next three steps are high, and the last of them rolls back."""
    def spoil(now):
        if now == step and run.monitor.rollbacks < times:
            for bucket in run.flat.buckets:
                bucket.shard["data"] *= 30
    after_backward(run, spoil)


def kinds(events):
    return [event["event"] for event in events]


def judge(losses, **flags):
    """What a DivergenceMonitor says to a series of losses: {index: reason}. "overflow" stands for a
    step that an infinite gradient skips, "at floor" for one at the lowest loss scale."""
    monitor, reasons = amp.DivergenceMonitor(), {}
    for i, loss in enumerate(losses):
        _, reasons[i] = monitor.observe(
            2.0 if isinstance(loss, str) else loss, found_inf=isinstance(loss, str),
            overflow_at_floor=loss == "at floor", samples=(0, 8), config=train.Config(**flags))
    return {i: reason for i, reason in reasons.items() if reason is not None}


NOISY = list(2 + 0.1 * np.random.default_rng(0).standard_normal(100))       # 2.9: nine deviations


@pytest.mark.parametrize("losses, flags, told, words", [
    ([*NOISY, 2.9, 2.9, *NOISY, 2.9], {}, [], ""),                      # outliers
    ([*NOISY, 2.9, 2.9, 2.9, 2.9], {}, [102, 103], "above 2.* for 3 steps, now 2.9000"),
    ([*NOISY, 2.9, 2.9, 2.9, 2.9], dict(rollback="off"), [102], "for 3 steps"),   # told once
    ([*NOISY, 2.9], dict(spike_steps=1), [100], "for 1 steps"),
    ([*NOISY, *[2.9] * 3], dict(spike_margin=10.0), [102], ""),
    ([*NOISY, *[2.9] * 3], dict(spike_margin=11.0), [], ""),
    ([3.0] * 15 + [9.0] * 3, {}, [], ""),                               # too few to judge by
    ([3.0] * 16 + [9.0] * 3, {}, [18], "above 3.1800 "),
    ([2.0] * 50 + [2.11] * 5, {}, [], ""),          # no noise at all: 1% counts as a deviation
    ([2.0] * 50 + [2.13] * 3, {}, [52], "above 2.1200 "),
    ([2.0] * 20 + [9.0, 9.0, 2.0] * 40 + [9.0] * 3, {}, [142], ""),     # high ones make no median
    ([9.0] * 200 + [2.0] * 33 + [3.0] * 3, {}, [235], ""),              # old ones are forgotten
    ([math.nan], {}, [0], "not finite"), ([*NOISY, math.inf], {}, [100], "not finite"),
    (["at floor"], {}, [0], "floor"),
    (["overflow"] * 20, {}, [19], "20 steps in a row"),
    ((["overflow"] * 19 + [2.0]) * 3, {}, [], "")])
def test_a_divergence_is_several_high_losses_or_one_that_is_not_finite(losses, flags, told, words):
    """A series of losses, train.py's flags, the steps at which the monitor tells of a divergence
    and, at the first of them, how."""
    reasons = judge(losses, **flags)
    assert [i for i in reasons if i <= max(told, default=len(losses))] == told, reasons
    assert not told or re.search(words, reasons[told[0]])


def test_a_falling_loss_and_a_plateau_are_healthy():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        fall = 2 + 3.5 * np.exp(-np.arange(1000) / rng.uniform(20, 200))
        noise = rng.standard_t(4, 1000) * rng.uniform(0.005, 0.2)       # tails wider than normal
        assert judge(fall + noise) == {}, seed


def test_a_run_goes_back_to_a_checkpoint_that_stayed_healthy():
    """From a divergence that began at `onset` to these steps, the best first."""
    monitor = amp.DivergenceMonitor(checkpoints=[[0, None]])
    for step in (8, 10, 20, 30, 40, 30):                # 30 again, after a rollback; 8 is dropped
        monitor.add_checkpoint(step, f"file {step}", keep=4 if step == 40 else 3)
    assert monitor.checkpoints == [[0, None], [10, "file 10"], [20, "file 20"], [30, "file 30"]]
    for onset, steps in [(47, [30, 20, 10, 0]), (46, [30, 20, 10, 0]), (45, [20, 10, 30, 0]),
                         (31, [10, 20, 0]), (30, [10, 20, 0]), (12, [10, 0]), (1, [0])]:
        assert [step for step, _ in monitor.candidates(onset)] == steps, onset
    monitor.last_rollback_step = 10
    assert monitor.candidates(12) == [[0, None]]        # not the same again
    by_hand = amp.DivergenceMonitor(checkpoints=[[30, "/elsewhere/30"]])
    assert by_hand.candidates(31) == by_hand.candidates(30) == [[30, "/elsewhere/30"]]


def test_a_rollback_to_the_same_checkpoint_or_an_older_one_cuts_three_times():
    monitor, factors = amp.DivergenceMonitor(), [1.0]
    for step in (40, 50, 50, 40, 60):
        monitor.rolled_back(step, [8 * step, 8 * step + 80], then=amp.DivergenceMonitor([1.5]))
        factors.append(monitor.lr_factor)
    assert [b / a for a, b in itertools.pairwise(factors)] == pytest.approx(
        [0.6, 0.6, 0.6 ** 3, 0.6 ** 3, 0.6])
    assert (monitor.rollbacks, monitor.last_rollback_step, monitor.losses) == (5, 60, [1.5])
    assert [monitor.skip_excluded(sample) for sample in (319, 320, 400, 559, 560)] == [
        319, 560, 560, 560, 560]


def test_a_bad_batch_right_behind_the_skipped_ones_is_dropped():
    def verdict(batch, loss):
        return monitor.observe(loss, False, False, (8 * batch, 8 * batch + 8), train.Config())[0]
    monitor = amp.DivergenceMonitor(losses=[2.0] * 30, excluded=[[0, 80]])
    assert verdict(10, math.nan) == verdict(11, 2.2) == "drop"
    assert verdict(12, 2.0) == "update" and monitor.excluded == [[0, 96]]
    assert verdict(13, math.nan) == "rollback"                          # not right behind them
    for length, expected in ((amp.MAX_EXCLUDED - 1, "drop"), (amp.MAX_EXCLUDED, "update")):
        monitor = amp.DivergenceMonitor(losses=[2.0] * 30, excluded=[[0, 8 * length]])
        assert verdict(length, 9.0) == expected


def poison_and_tear(run):
    """The checkpoint that the run would go back to is damaged."""
    poison(run)
    after_backward(run, lambda step: step == 20 and (
        Path(run.config.out, "step_00000004.pt").write_bytes(b"torn")))


def poison_and_wait(run):
    """The file of step 19 is still being written when it is wanted."""
    poison(run)
    after_backward(run, lambda step: step == 19 and run.writer.thread.submit(time.sleep, 0.5))


def overflow_for_twenty_steps(run):
    def spoil(step):
        if 20 <= step < 40 and run.monitor.rollbacks == 0:
            run.flat.buckets[0].shard["grad"][0] = math.inf
    after_backward(run, spoil)


@pytest.mark.parametrize("prepare, save_every, at, to, first", [
    (poison, 4, 23, 4, 12), (poison_and_tear, 2, 23, 2, 12),
    (poison, 0, 23, 0, 12),                             # no checkpoint yet
    (poison_and_wait, 19, 23, 19, 19),                  # too young to be proven, but the only one
    (overflow_for_twenty_steps, 10, 39, 10, 11)])       # which began with the first
def test_after_a_divergence_a_run_goes_back_skips_and_slows(tmp_path, prepare, save_every, at, to,
                                                            first):
    """What goes wrong, --save-every, the step that rolls back and where to, and the first batch
    that is left out: eight before the first high loss, but none that the checkpoint has read."""
    config = settings(tmp_path, steps=42, save_every=save_every, keep=99)
    seen = watched(config, prepare)
    again = [batch for batch in range(to, 99) if not first <= batch < at][:42 - to]
    assert seen.batches == [*range(at), *again]
    assert column(seen.rows, "step") == [*range(1, at + 1), *range(to + 1, 43)]
    assert column(seen.rows[at:], "lr") == pytest.approx(
        [0.6 * train.learning_rate(config, step) for step in range(to + 1, 43)])
    assert first == to or seen.rows[at]["loss"] == seen.rows[to]["loss"]    # the same parameters
    assert seen.rows[-1]["loss"] < seen.rows[to]["loss"]
    (spike,), (rollback,), damaged = ([e for e in seen.events if e["event"] == kind]
                                      for kind in ("spike", "rollback", "damaged"))
    assert (spike["step"], rollback["step"], rollback["to"]) == (at, at, to)
    assert spike["reason"] == rollback["reason"] and (at == 39) == ("in a row" in spike["reason"])
    assert rollback["sequences"] == [8 * first, 8 * at] == seen.events[-1]["sequences"]
    assert len(damaged) == (prepare is poison_and_tear)
    start = saved(tmp_path, to)         # holds the correction before anything else happens
    assert start["monitor"]["excluded"] == [[8 * first, 8 * at]]
    assert (start["monitor"]["lr_factor"], start["monitor"]["rollbacks"]) == (0.6, 1)
    assert to > 0 or not any(t.any() for key in ("exp_avg", "exp_avg_sq")
                             for t in start[key].values())
    assert saved(tmp_path, 42)["optimizer_steps"] == 42


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_during_a_rollback_loses_nothing(tmp_path, moment):
    """Before the file that holds the correction is written, or right after."""
    config = settings(tmp_path / "straight", steps=26, save_every=4, keep=9)
    watched(config, poison)

    def prepare(run):
        def save_and_die():
            if moment == "after" or run.monitor.rollbacks == 0:
                save()
            if run.monitor.rollbacks:
                raise ZeroDivisionError
        poison(run)
        save, run.save = run.save, save_and_die
    killed = tmp_path / "killed"
    with pytest.raises(ZeroDivisionError):
        watched(replace(config, out=str(killed)), prepare)
    newest = checkpoint.list_checkpoints(killed)[0]
    state = checkpoint.load(newest)
    assert (state["step"], state["monitor"]["rollbacks"]) == dict(before=(20, 0),
                                                                  after=(4, 1))[moment]
    watched(replace(config, out=str(killed)), poison, newest)
    assert_same_state(saved(tmp_path / "straight", 26), saved(killed, 26))


def monitor_now(run):
    return asdict(run.monitor), run.consumed_samples, list(run.events)


@pytest.mark.parametrize("layout, zero", [((2, 2, 2), 1), ((2, 1, 1), 3)])
def test_every_rank_decides_alike_and_like_one_process(pool, tmp_path, layout, zero):
    dp, tp, pp = layout
    cfg, config = replace(CFG, n_layer=2), settings(tmp_path, steps=24, save_every=4, keep=9)
    (tmp_path / "one").mkdir()
    one = run_steps(0, 1, (1, 1, 1), replace(config, out=str(tmp_path / "one")), cfg, monitor_now,
                    prepare=poison)
    ranks = pool.run(dp * tp * pp, run_steps, layout, replace(config, tp=tp, pp=pp, zero=zero),
                     cfg, monitor_now, None, poison)
    for _, seen, _ in ranks:
        assert repr(seen) == repr(ranks[0][1])
    (_, samples, events), (_, expected_samples, expected) = ranks[0][1][-1], one[1][-1]
    assert kinds(events) == kinds(expected) == ["spike", "rollback", "skip"]
    assert samples == expected_samples
    for name in ("step", "to", "sequences"):
        assert [e.get(name) for e in events] == [e.get(name) for e in expected], name
    losses = [column(steps[:20] + steps[23:], "loss") for steps in (ranks[0][0], one[0])]
    assert len(losses[0]) == 40 and relative(*losses) <= 1e-5       # but for the poisoned ones


def test_rollbacks_are_bounded_and_cut_more_each_time(tmp_path):
    config = settings(tmp_path, steps=30, save_every=4, keep=9, max_rollbacks=2)
    with pytest.raises(RunError) as stop:
        watched(config, functools.partial(poison, times=9))
    error, (_, events) = str(stop.value), read_metrics(tmp_path)
    assert stop.value.status == 1 and "\n" not in error
    assert "--max-rollbacks 2 are spent" in error and "--skip-steps" in error
    assert events[-1]["event"] == "stop" and "--max-rollbacks 2" in events[-1]["reason"]
    cuts = [event["lr_factor"] for event in events if event["event"] == "rollback"]
    assert cuts == pytest.approx([0.6, 0.6 ** 4]) and kinds(events).count("spike") == 3


def test_without_rollback_a_run_tells_and_goes_on_and_can_be_resumed_with_it(tmp_path):
    config = settings(tmp_path, steps=30, save_every=4, keep=9, rollback="off")
    seen = watched(config, poison)
    assert kinds(seen.events) == ["spike"] and column(seen.rows, "step") == [*range(1, 31)]
    assert saved(tmp_path, 30)["monitor"]["high"] == 10
    seen = watched(replace(config, steps=32, rollback="on"), nothing, tmp_path / "step_00000030.pt")
    assert kinds(seen.events)[:3] == ["spike", "spike", "rollback"]
    assert seen.events[2]["step"] == 31 and seen.events[2]["to"] <= 20
    assert column(seen.rows, "step")[-1] == 32


def test_a_rollback_whose_checkpoint_cannot_be_kept_ends_the_run(tmp_path):
    """It would be done again at every restart, without a bound."""
    def on_a_full_disk(state, out, keep):
        if state["monitor"]["rollbacks"]:
            raise OSError("the disk is full")
        return save(state, out, keep)
    save = checkpoint.save
    with mock.patch.object(checkpoint, "save", on_a_full_disk), \
            pytest.raises(RunError, match="is lost: the disk is full") as stop:
        watched(settings(tmp_path, steps=40, save_every=10), poison)
    assert stop.value.status == 1
    assert column(read_metrics(tmp_path)[0], "step")[-1] == 23         # at once
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 20


def test_skip_steps_leaves_out_the_batches_of_these_steps_once(tmp_path):
    config = settings(tmp_path, steps=6, skip_steps="3:5", save_every=1, keep=9)
    seen = watched(config)
    assert seen.batches == [0, 1, 5, 6, 7, 8] and column(seen.rows, "step") == [1, 2, 3, 4, 5, 6]
    assert seen.events == [dict(event="skip", step=3, reason="left out", batches=3,
                                sequences=[16, 40])]
    for step, batches in ((2, [5, 6, 7, 8]), (3, [6, 7, 8])):       # not twice at a resume
        assert watched(config, state=tmp_path / f"step_{step:08d}.pt").batches == batches
    config = settings(tmp_path / "rollback", steps=24, skip_steps="16:18", save_every=4, keep=9)
    seen = watched(config, poison)                                  # nor after a rollback
    assert kinds(seen.events) == ["skip", "spike", "rollback", "skip"]
    assert seen.batches == [*range(15), *range(18, 26), *range(4, 15), *range(26, 35)]


def test_of_steps_to_skip_what_lies_ahead_is_skipped(run_train, shards, tmp_path):
    flags = ["--data", shards, *TINY, "--steps", 8, "--save-every", 1, "--keep", 9]
    run_train(*flags, "--out", tmp_path / "o")
    for skip, sequences in (("3:6", [16, 24]), ("2:4", None)):
        status, text, _ = run_train(*flags, "--out", tmp_path / skip, "--skip-steps", skip,
                                    "--resume", tmp_path / "o" / "step_00000004.pt")
        skips = [e["sequences"] for e in read_metrics(tmp_path / skip)[1] if e["event"] == "skip"]
        assert status == 0 and skips == [sequences] * (sequences is not None)
        assert ("lie behind" in text) == (sequences is None)


def test_high_losses_behind_the_skipped_batches_are_left_out_too(tmp_path):
    """Without an update, and without counting as steps. A stop at one of them costs no step."""
    def prepare(run):
        observe = run.monitor.observe           # the three behind those of --skip-steps look bad
        run.monitor.observe = lambda loss, *facts, **more: observe(
            99.0 if 22 * 8 <= more["samples"][0] < 25 * 8 else loss, *facts, **more)
        after_backward(run, lambda step: setattr(stop, "requested", step == 21))
    straight, stopped = (settings(tmp_path / name, steps=24, skip_steps="21:22", save_every=10)
                         for name in ("straight", "stopped"))
    stop = SimpleNamespace(requested=False)
    seen = watched(straight, prepare)
    assert seen.batches == [*range(20), *range(22, 29)]
    assert [e["reason"] for e in seen.events] == ["left out", *["a high loss behind batches left "
                                                                "out"] * 3]
    assert column(seen.rows, "step") == [*range(1, 25)] and seen.run.optimizer_steps == 24
    assert seen.run.monitor.excluded == [[20 * 8, 25 * 8]]
    seen = watched(stopped, prepare, stop=stop)
    assert column(seen.rows, "step") == [*range(1, 21)]
    assert kinds(seen.events) == ["skip", "skip", "stop"]
    watched(stopped, prepare, tmp_path / "stopped" / "step_00000020.pt")
    assert_same_state(saved(tmp_path / "straight", 24), saved(tmp_path / "stopped", 24))


def test_a_file_given_by_hand_is_a_new_beginning(run_train, shards, tmp_path):
    """A correction stays with the run, but not against a learning rate that is given."""
    out, by_hand = tmp_path / "o", tmp_path / "by_hand.pt"
    assert run_train("--data", shards, "--out", out, *TINY)[0] == 0
    state = torch.load(out / "step_00000002.pt", weights_only=True)
    state["monitor"].update(lr_factor=0.25, rollbacks=2, last_rollback_step=2)
    torch.save(state, by_hand)
    plain = dict(steps=4, warmup_steps=2)
    for name, flags, expected, told, changed in [
            ("kept", [], 0.25 * train.learning_rate(train.Config(**plain), 3),
             "learning rate x 0.25", {}),
            ("own", ["--lr", 1.0, "--clip", 0.5, "--beta2", 0.9, "--skip-steps", "3:3"],
             train.learning_rate(train.Config(lr=1.0, **plain), 3), "lr 1.0 instead of 0.004",
             dict(lr=[4e-3, 1.0], clip=[1.0, 0.5], beta2=[0.95, 0.9], skip_steps=[None, "3:3"]))]:
        status, text, _ = run_train("--data", shards, "--out", tmp_path / name, "--resume",
                                    os.path.relpath(by_hand), *flags)
        rows, events = read_metrics(tmp_path / name)
        assert status == 0 and told in text and column(rows, "step") == [3, 4]
        assert rows[0]["lr"] == pytest.approx(expected)
        assert kinds(events) == ["resume"] + ["skip"] * bool(flags)
        factor = 1.0 if flags else 0.25
        assert (events[0]["changed"], events[0]["lr_factor"]) == (changed, factor)
        monitor = checkpoint.load(tmp_path / name / "latest.pt")["monitor"]
        assert (monitor["lr_factor"], monitor["rollbacks"], monitor["last_rollback_step"]) == (
            factor, 0, -1)
        assert monitor["checkpoints"][0] == [2, str(by_hand.resolve())]
    flags = ["--data", shards, "--out", out, "--steps", 6, "--resume", out / "latest.pt"]
    assert run_train(*flags)[0] == 0            # latest.pt will be another file: its lasting name
    assert saved(out, 6)["monitor"]["checkpoints"] == [
        [4, str((out / "step_00000004.pt").resolve())], [6, "step_00000006.pt"]]


def test_behind_a_damaged_file_comes_its_own_branchs_beginning(run_train, shards, tmp_path):
    """And not what another branch, that was left, wrote in between."""
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out, *TINY, "--keep", 9]
    run_train(*flags, "--steps", 6)
    run_train(*flags, "--resume", out / "step_00000002.pt", "--lr", 0.5, "--steps", 3)
    (out / "step_00000003.pt").write_bytes(b"torn")
    assert "step_00000002.pt, after step 2" in run_train(*flags, "--steps", 7)[1]


def spoil_in_turn(run):
    """At step k rank k - 1 alone finds an infinite gradient."""
    def spoil(step):
        bucket = run.flat.buckets[-1]
        if run.grid.rank == step - 1:
            bucket.view(bucket.grad, bucket.specs[-1])[0] = math.inf
    after_backward(run, spoil)


def test_a_number_that_is_not_finite_is_traced(pool, tmp_path):
    config = settings(tmp_path, steps=9, tp=2, pp=2, rollback="off")
    ranks = pool.run(8, run_steps, (2, 2, 2), config, replace(CFG, n_layer=2), monitor_now, None,
                     spoil_in_turn)
    events = [e for e in ranks[0][1][-1][2] if e["event"] == "skip"]
    assert [(e["step"], e["rank"], e["what"]) for e in events] == [
        (k, k - 1, "gradient") for k in range(1, 9)]
    for event in events:
        stage = event["rank"] // 2 % 2
        assert event["parameter"].startswith(f"blocks.{stage}.mlp") and event["loss_scale"] == 1.0
        windows = Memory(CFG).sample_indices(1337, 8 * event["step"] - 8, 8)
        assert event["windows"] == windows.tolist()


def test_the_batch_of_a_loss_that_is_not_finite_can_be_replayed(tmp_path):
    def prepare(run):
        def spoil(step):
            if step == 4:                   # one token's vector; the others' losses are fine
                bucket, spec = next((b, p) for b in run.flat.buckets for p in b.specs
                                    if p.name == "embed.position.weight")
                bucket.view(bucket.data, spec)[3] = math.inf
        after_backward(run, spoil)
    config = settings(tmp_path, steps=5, save_every=1, keep=9, rollback="off")
    skip, spike = watched(config, prepare).events
    assert (skip["event"], skip["step"], skip["what"], skip["rank"]) == ("skip", 5, "loss", 0)
    assert spike["event"] == "spike"
    loaded, _ = checkpoint.load_model(tmp_path / "step_00000004.pt")
    batch = torch.from_numpy(Memory(CFG).windows(np.array(skip["windows"])))
    loss = loaded(batch[:, :-1], batch[:, 1:])
    loss.backward()
    assert not loss.isfinite()
    assert not dict(loaded.named_parameters())[skip["parameter"]].grad.isfinite().all()


@pytest.mark.parametrize("layout, flags", [((1, 1, 1), {}), ((2, 2, 2), {}),
                                           ((1, 2, 1), dict(sequence_parallel=True))])
def test_the_activation_norm_is_that_of_the_plain_model(pool, tmp_path, layout, flags):
    dp, tp, pp = layout
    cfg = replace(CFG, n_layer=2)
    config = settings(tmp_path, steps=2, eval_every=1, tp=tp, pp=pp, **flags)
    rows, *_ = pool.run(dp * tp * pp, run_steps, layout, config, cfg)[0]
    memory, plain, seen = Memory(cfg), GPT(cfg).initialize(1337), []
    plain.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batch = torch.from_numpy(memory.windows(memory.sample_indices(1337, 0, 8)))
    plain(batch[:, :-1])
    assert rows[0]["activation_norm"] == pytest.approx(seen[0].norm(dim=-1).mean().item(), rel=1e-5)
    assert rows[1]["activation_norm"] == pytest.approx(rows[0]["activation_norm"], rel=0.1)


# ---------------------------------------------------------------------------------------------
# train.py: saving beside the training, locks, signals, lost peers
# ---------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """Until the next is due: then it waits, for memory holds the state twice and not three times.
    And the file holds the state of its step, not of the one that is on by then."""
    def two_steps_later(state, out, keep):
        assert reached[min(state["step"] + 2, 6)].wait(60)
        time.sleep(0.2)         # if nothing waited for this file, more steps would be done by now
        done.append(f"file {state['step']}")
        return save(state, out, keep)

    def reach(step):
        done.append(step)
        reached[step].set()
    save, done, reached = checkpoint.save, [], {step: threading.Event() for step in range(1, 7)}
    slow, fast = (settings(tmp_path / name, steps=6, save_every=2, keep=9)
                  for name in ("slow", "fast"))
    watched(fast)
    with mock.patch.object(checkpoint, "save", two_steps_later):
        watched(slow, lambda run: after_backward(run, reach))
    assert done == [1, 2, 3, 4, "file 2", 5, 6, "file 4", "file 6"]
    for step in (2, 4, 6):
        assert_same_state(*(saved(Path(config.out), step) for config in (slow, fast)))


def test_a_second_run_in_the_same_out_is_refused_until_the_first_is_dead(shards, tmp_path):
    """The first is held in its steps: a lock belongs to the process, not to its progress."""
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out, *TINY]
    first = Command("train.py", *flags, "--steps", 1_000_000, "--save-every", 20)
    try:
        wait_for_step(out, 41, first)               # so the file of step 20 is whole
        first.send_signal(signal.SIGSTOP)
        status, _, error = Command("train.py", *flags).finish()
        assert status == 2 and error.count("\n") == 1
        assert f"another run writes to {out}" in error and f"process {first.pid})" in error
        status, text, _ = Command("train.py", *flags, "--eval-only").finish()
        assert status == 0 and "nats" in text       # to look is allowed
    finally:
        first.send_signal(signal.SIGKILL)
    first.finish()
    path, _ = checkpoint.latest_valid(checkpoint.list_checkpoints(out))
    last = checkpoint.load(path)["step"] + 2
    third = Command("train.py", *flags, "--steps", last)
    assert third.finish()[0] == 0 and checkpoint.load(out / "latest.pt")["step"] == last
    assert (out / "lock").read_text() == f"{socket.gethostname()}, process {third.pid}"


def test_a_second_signal_ends_at_once_but_not_a_launchers_copy_of_the_first(capfd):
    def after(seconds, number):
        with mock.patch.object(parallel, "time", SimpleNamespace(monotonic=lambda: 100 + seconds)):
            signal.raise_signal(number)
        return stop.requested is not None, ended.called
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with mock.patch.object(os, "_exit") as ended:
            stop = parallel.StopSignal()
            assert not stop.requested and after(0, signal.SIGTERM) == (True, False)
            assert after(0.4, signal.SIGTERM) == (True, False)
            assert after(0.6, signal.SIGINT) == (True, True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.call_args.args == (1,) and capfd.readouterr().out.splitlines() == [
        "saving after this step; a second signal ends at once, without saving",
        "ended without saving"]


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_hangs_or_vanishes_is_named(shards, tmp_path, fate):
    """Of two stages each is the victim once; both jobs at the same time."""
    flags = ["--data", shards, *TINY, "--steps", 1_000_000, "--save-every", 0, "--eval-every", 0,
             "--pp", 2, "--timeout", 4]
    jobs = [launch(2, *flags, "--out", tmp_path / f"{victim}") for victim in (0, 1)]
    try:
        for victim, job in enumerate(jobs):
            wait_for_step(tmp_path / f"{victim}", 3, job[0])
            job[victim].send_signal(fate)
        for victim, job in enumerate(jobs):
            status, _, error = job[1 - victim].finish()         # long before the usual ten minutes
            assert status == 1 and error.count("\n") == 1 and re.match(
                rf"train.py: rank {1 - victim}: stage {1 - victim}, step \d+: (((forward|backward)"
                rf" of microbatch \d+: receive from|((forward|backward) of microbatch \d+: )?send "
                rf"to) rank {victim} \(stage {victim}\)|all-reduce with ranks \[0, 1\]): ",
                error), error
    finally:
        for process in itertools.chain(*jobs):
            process.process.kill()


def test_a_run_that_torchrun_starts_again_goes_on_with_its_own_files(run_train, shards, tmp_path):
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out, *TINY]
    assert run_train(*flags)[0] == 0
    by_hand = ["--resume", out / "step_00000002.pt", "--steps", 6, "--lr", 0.5]
    # Killed before its first checkpoint: from the file that was given, not from another's step 4.
    with mock.patch.object(train.Run, "train", side_effect=ZeroDivisionError), \
            pytest.raises(ZeroDivisionError):
        run_train(*flags, *by_hand)
    with mock.patch.object(train.Run, "evaluate", side_effect=[1.0, ZeroDivisionError]), \
            pytest.raises(ZeroDivisionError):
        run_train(*flags, *by_hand, TORCHELASTIC_RESTART_COUNT=1)       # now after its first
    assert column(read_metrics(out)[0], "step") == [1, 2, 3, 4, 3, 4, 5]
    assert saved(out, 4)["config"]["lr"] == 0.5
    text = run_train(*flags, *by_hand, TORCHELASTIC_RESTART_COUNT=2)[1]
    assert "step_00000004.pt, after step 4" in text
    assert column(read_metrics(out)[0], "step") == [1, 2, 3, 4, 3, 4, 5, 5, 6]
    # The same file with another learning rate is another attempt.
    text = run_train(*flags, *by_hand[:4], "--lr", 0.1, TORCHELASTIC_RESTART_COUNT=1)[1]
    assert "step_00000002.pt, after step 2" in text


def test_the_ranks_of_a_restarted_group_do_not_take_dead_ones_for_each_other(monkeypatch):
    """Three ranks, as threads; the store holds what an earlier group wrote before it died."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, None, None)]))
    for attempt in range(3):
        def meet(rank):
            time.sleep(0.1 * ((rank + attempt) % 3))            # the dead ones' keys come first
            prefix = parallel.rendezvous(rank, 3, timedelta(seconds=20))
            prefix.set(f"{rank}", "here")
            met[rank] = [prefix.get(f"{r}").decode() for r in range(3)]
            found.append(prefix)
        met, found = {}, []
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert met == {rank: ["here"] * 3 for rank in range(3)}
        assert not found[0].check([f"stale {attempt}"])
        found[0].set(f"stale {attempt + 1}", "")                # another prefix does not see it
    lonely = dist.HashStore()
    lonely.set_timeout(timedelta(seconds=0.3))
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(lonely, None, None)]))
    with pytest.raises(RuntimeError):
        parallel.rendezvous(0, 2, timedelta(seconds=0.3))


def places_in(content, part, count, rng):
    """Random places in a part of a checkpoint's bytes: the "pickle" with its settings and names,
    the "directory" at the zip's end, or "anywhere"."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("data.pkl"))
        first, end = dict(pickle=(entry.header_offset, entry.header_offset + entry.file_size),
                          directory=(archive.start_dir, len(content)),
                          anywhere=(0, len(content)))[part]
    return [rng.randrange(first, end) for _ in range(count)]


def flipped(content, place, rng):
    """The bytes with one bit changed."""
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1:]


@pytest.mark.parametrize("part", ["pickle", "directory", "anywhere"])
def test_a_damaged_newest_file_never_ends_a_run_that_has_another(run_train, shards, tmp_path, part):
    """By one bit, or cut off there: it is told and the file before is taken, or nothing changes.
    Not even what it says of settings, counters and names gets in the way."""
    out, rng = tmp_path / "o", random.Random(0)
    flags = ["--data", shards, "--out", out, *TINY]
    assert run_train(*flags)[0] == 0
    newest = out / "step_00000004.pt"
    content = newest.read_bytes()
    whole = run_train(*flags, "--eval-only")
    older = run_train(*flags, "--eval-only", "--resume", out / "step_00000002.pt")
    assert whole[0] == older[0] == 0 and "step 4: " in whole[1] and "step 2: " in older[1]
    for i, place in enumerate(places_in(content, part, 75, rng)):
        # latest.pt is the same file
        newest.write_bytes(content[:place] if i % 5 == 0 else flipped(content, place, rng))
        status, text, error = run_train(*flags, "--steps", 3, "--eval-only")
        passed_over = "step_00000004.pt is" in error and error.endswith("; passed over\n")
        assert (status, text) == (older if passed_over else whole)[:2], (place, error)
        assert passed_over or error == ""
    fingerprint = saved(out, 2)["data"].encode()            # other data, says the damaged file
    newest.write_bytes(content.replace(fingerprint, b"0" * len(fingerprint)))
    assert checkpoint.load(newest)["data"].encode() != fingerprint
    assert "after step 2" in run_train(*flags)[1]


@pytest.mark.parametrize("part, count, fewest", [("pickle", 400, 0.98), ("directory", 400, 0.4),
                                                 ("anywhere", 800, 0.9)])
def test_a_bit_flipped_anywhere_is_recognised_or_changes_nothing(tmp_path, part, count, fewest):
    """The part of the file, how many bits of it are flipped, one at a time, and the share that is
    recognised at least: some bytes of a zip mean nothing, such as padding and dates."""
    path = checkpoint.save(small_state(1, fill=0.5), tmp_path, keep=1)
    content, rng, recognised = path.read_bytes(), random.Random(0), 0
    state = small_state(1, fill=0.5)
    for place in places_in(content, part, count, rng):
        path.write_bytes(flipped(content, place, rng))
        try:
            checkpoint.verify(path)
            assert_same_state(checkpoint.load(path), state, but=())
        except checkpoint.CorruptCheckpoint as error:
            assert str(path) in str(error)
            recognised += 1
    print(f"\n{part}: {recognised} of {count} recognised, the others without effect")
    assert recognised >= fewest * count


@pytest.mark.parametrize("links", [True, False])
def test_a_disk_that_is_full_at_any_byte_costs_nothing_but_the_save(tmp_path, links):
    """At the step's file; without hard links at latest.pt too, which is then a copy."""
    checkpoint.save(small_state(1), tmp_path, keep=2)
    before, size = (tmp_path / "latest.pt").read_bytes(), (tmp_path / "latest.pt").stat().st_size
    rng = random.Random(links)
    places = [0, 1, size - 1, *(rng.randrange(size) for _ in range(60)),
              *(size - rng.randrange(20_000) for _ in range(40))]           # the zip's directory
    with nullcontext() if links else mock.patch.object(os, "link", side_effect=OSError):
        for place in places:
            with no_file_above(place), pytest.raises(OSError, match="step_00000002.pt"):
                checkpoint.save(small_state(2), tmp_path, keep=2)
            assert names_in(tmp_path) == ["latest.pt", "step_00000001.pt"], place
            assert (tmp_path / "latest.pt").read_bytes() == before
        assert (tmp_path / "step_00000001.pt").read_bytes() == before
        checkpoint.save(small_state(2), tmp_path, keep=2)               # when there is room again
    assert names_in(tmp_path) == ["latest.pt", "step_00000001.pt", "step_00000002.pt"]
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 2


def test_a_latest_that_cannot_be_copied_stays_the_one_before(tmp_path):
    checkpoint.save(small_state(1), tmp_path, keep=2)
    before, copied = (tmp_path / "latest.pt").read_bytes(), shutil.copyfile

    def copy_on_a_full_disk(source, target):
        with no_file_above(len(before) // 2):
            copied(source, target)
    with mock.patch.object(os, "link", side_effect=OSError), \
            mock.patch.object(shutil, "copyfile", copy_on_a_full_disk), pytest.raises(OSError):
        checkpoint.save(small_state(2), tmp_path, keep=2)
    assert (tmp_path / "latest.pt").read_bytes() == before
    path, _ = checkpoint.latest_valid(checkpoint.list_checkpoints(tmp_path))
    assert path in (tmp_path / "step_00000001.pt", tmp_path / "step_00000002.pt")


# ---------------------------------------------------------------------------------------------
# train.py: chains of stops, layouts and faults, drawn at random
# ---------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def train_until(rank, world, config, cfg, file, diverges, at, fate):
    """Train on from a file. At step `at` one rank gets a signal, or all are killed. On the way
    another rank finds infinite gradients, or the run diverges after step 18 and rolls back."""
    def prepare(run):
        def hurt(step):
            if step in (3, 9) and rank == step % world:
                run.flat.buckets[-1].shard["grad"][0] = math.inf
            if step == at and fate == "kill":
                raise Killed
            stop.requested = stop.requested or (step == at and rank == step % world)
        if diverges:
            poison(run, 18)
        after_backward(run, hurt)
    stop = SimpleNamespace(requested=False)
    with suppress(Killed):
        watched(config, prepare, file, cfg, stop, rank, world)


def drawn_layout(rng, config, most):
    """Of at most so many ranks -> (ranks, the config with this layout and flags that suit it)."""
    dp, tp, pp = rng.choice([layout for layout in LAYOUTS
                             if math.prod(layout) <= most and layout[2] <= 2])
    return dp * tp * pp, replace(
        config, tp=tp, pp=pp, zero=rng.randrange(4 if pp == 1 else 3), recompute=rng.random() < 0.5,
        micro_batch=rng.choice([m for m in (1, 2, 4, 8) if 8 % (dp * m) == 0]),
        pp_schedule=rng.choice(list(parallel.SCHEDULES)),
        sequence_parallel=tp > 1 and rng.random() < 0.5)


def damage(path, rng):
    """A bit of the file is flipped in the middle, or its end is missing."""
    content, place = path.read_bytes(), rng.randrange(path.stat().st_size)
    path.write_bytes(rng.choice([content[:place], flipped(content, place, rng)]))


@pytest.mark.parametrize("seed, dtype, layouts, most", [
    (0, "fp16", "same", 2), (1, "fp32", "same", 2), (2, "fp64", "others", 4),
    (3, "fp32", "others", 2),
    *[pytest.param(seed, dtype, layouts, 8, marks=pytest.mark.slow) for seed in range(4, 10)
      for dtype, layouts in (("fp32", "same"), ("fp32", "others"), ("fp64", "others"))],
    *[pytest.param(seed, "fp16", "same", 8, marks=pytest.mark.slow) for seed in (10, 12)]])
def test_a_chain_of_random_stops_and_faults_ends_as_the_straight_run(pool, tmp_path, seed, dtype,
                                                                    layouts, most):
    """The seed of everything drawn; whether each part of the chain has the "same" layout as the
    straight run (then, with dropout, all is bit-equal) or is drawn anew among "others"; ranks."""
    rng, out = random.Random(seed), tmp_path / "chain"
    diverges = seed % 2 == 1        # a damaged file would make it diverge, and go back, elsewhere
    steps = 22 if diverges else 12
    cfg = replace(CFG, n_layer=2, dropout=0.1 if layouts == "same" else 0.0)
    config = settings(tmp_path / "straight", steps=steps, save_every=1, keep=99, dtype=dtype)
    world, config = drawn_layout(rng, config, most)
    pool.run(world, train_until, config, cfg, None, diverges, 0, None)
    chain, file, step = [], None, 0
    while step < steps:
        assert len(chain) < 60, chain
        if layouts == "others":
            world, config = drawn_layout(rng, config, most)
        at = step + rng.randint(1, 8)
        fate = rng.choice(["signal", "kill"] + ["damage"] * (not diverges))
        chain.append((world, config, at, fate))
        pool.run(world, train_until, replace(config, out=str(out)), cfg, file, diverges, at,
                 "signal" if fate == "signal" else "kill")
        files = checkpoint.list_checkpoints(out)
        for path in files[:rng.randint(1, 3) if fate == "damage" and len(files) > 3 else 0]:
            damage(path, rng)
        file, _ = checkpoint.find_checkpoint(out, "auto", False, {})
        step = checkpoint.load(file)["step"] if file else 0
    straight, chained = ({row["step"]: row for row in read_metrics(folder)[0]}     # the last count
                         for folder in (tmp_path / "straight", out))
    bound = dict(same=0, others=1e-5 if dtype == "fp32" else 1e-10)[layouts]
    assert column(straight.values(), "skipped") == column(chained.values(), "skipped")
    for step, name in itertools.product(range(1, steps + 1), ("loss", "grad_norm", "lr")):
        one, two = straight[step][name], chained[step][name]
        assert straight[step]["skipped"] or abs(one - two) <= bound * one, (name, step, chain)
    states = [saved(folder, steps) for folder in (tmp_path / "straight", out)]
    assert states[0]["monitor"]["rollbacks"] == states[1]["monitor"]["rollbacks"] == diverges
    if layouts == "same":
        assert_same_state(*states)


# ---------------------------------------------------------------------------------------------
# train.py: whole runs that are made to fail (slow); the README's table of faults
# ---------------------------------------------------------------------------------------------

SMALL = ["--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--seq-len", 64, "--batch-size", 16,
         "--warmup-steps", 20, "--save-every", 50, "--keep", 9]


def with_noise(source, folder, steps, batch, seq_len):
    """A copy of the data in which what these steps read is random bytes."""
    shutil.copytree(source, folder)
    dataset = data.TokenDataset(folder, "train", seq_len)
    windows = dataset.sample_indices(train.Config.seed, (steps[0] - 1) * batch, len(steps) * batch)
    tokens = np.memmap(folder / "train_000000.bin", np.uint16, "r+", offset=1024)
    for i, window in enumerate(windows):
        noise = np.random.default_rng(i).integers(256, size=seq_len + 1)
        tokens[window * seq_len:(window + 1) * seq_len + 1] = noise
    tokens.flush()
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The standard library's source in bytes: what `python data.py` makes."""
    folder = tmp_path_factory.mktemp("library") / "python"
    data.prepare(data.standard_library()[0], folder, "bytes")
    return folder


BROKEN_MEMORY = """
import train

def hurt(run):
    '''Before step 150 a matrix goes wrong, as from a fault in memory.'''
    if run.step == 149 and run.monitor.rollbacks == 0:
        for bucket in run.flat.buckets:
            for spec, here, _ in bucket.shard_ranges:
                if spec.name == "blocks.1.mlp.up.weight":
                    bucket.shard["master"][here] *= 1e5
        run.flat.sync_params()
    skip_excluded(run)

skip_excluded, train.Run.skip_excluded = train.Run.skip_excluded, hurt
train.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault, most", [("bad data", 1.02), ("learning rate", 1.05),
                                         ("fp16 overflow", 1.05)])
def test_a_run_made_to_diverge_ends_near_the_healthy_one(library, tmp_path, fault, most):
    """By forty batches of noise; a learning rate a hundred times too high, given by hand at a
    resume in the middle; activations that overflow in fp16 (slow on a CPU: fewer steps). And the
    validation loss at its end, at most, as a multiple of the healthy run's."""
    file, half, healthy = "train.py", fault == "fp16 overflow", tmp_path / "healthy"
    flags = [*SMALL, *["--steps", 300, "--dtype", "fp16"] * half, *["--steps", 400] * (not half)]
    assert Command(file, "--data", library, "--out", healthy, *flags).finish(600)[0] == 0
    assert kinds(read_metrics(healthy)[1]) == ["start"]
    if fault == "bad data":
        flags += ["--data", with_noise(library, tmp_path / "noisy", range(200, 241), 16, 64)]
    elif fault == "learning rate":
        flags += ["--data", library, "--resume", healthy / "step_00000200.pt", "--lr", 0.4]
    else:
        file, flags = tmp_path / "broken.py", [*flags, "--data", library]
        file.write_text(BROKEN_MEMORY)
    runs = {name: Command(file, "--out", tmp_path / name, *flags, "--rollback", name)
            for name in ("on", "off")}
    ends = {name: run.finish(600) for name, run in runs.items()}
    events = {name: kinds(read_metrics(tmp_path / name)[1]) for name in runs}
    assert "spike" in events["on"] and "rollback" in events["on"]
    assert "spike" in events["off"] and "rollback" not in events["off"]
    goal, on, off = (read_metrics(folder)[0][-1].get("val_loss", math.inf)
                     for folder in (healthy, tmp_path / "on", tmp_path / "off"))
    print(f"\n{fault}: healthy {goal:.4f}, rollback on {on / goal - 1:+.1%}, off "
          f"{off / goal - 1:+.1%}")
    assert ends["on"][0] == 0 and on < goal * most and off > on * 1.02
    if half:                                    # nothing but overflows from then on
        assert ends["off"][0] == 1 and "diverged" in ends["off"][2]
    else:
        assert ends["off"][0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name, flags", [
    ("bytes", []), ("high learning rate", ["--lr", "1.2e-2", "--batch-size", "8"]),
    ("gpt2 tokens", ["--seq-len", "32", "--dropout", "0.1"]),
    ("fp16", ["--dtype", "fp16", "--steps", "120"])])
def test_healthy_runs_never_roll_back(run_train, library, tmp_path, request, name, flags):
    folder = library
    if name == "gpt2 tokens":
        request.getfixturevalue("gpt2")
        data.prepare(data.standard_library()[0][:99], folder := tmp_path / "d", "gpt2")
    out = tmp_path / "o"
    assert run_train("--data", folder, "--out", out, *SMALL, "--steps", 300, *flags)[0] == 0
    assert set(kinds(read_metrics(out)[1])) <= {"start", "skip"}        # fp16 may overflow


CHAOS = """
import os, signal, time
from pathlib import Path
import checkpoint, train
rank, marks = int(os.environ["RANK"]), Path({marks!r})

def die(moment, who):
    '''Once.'''
    if rank == who and not (marks / moment).exists():
        (marks / moment).touch()
        os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, act):
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (act(*args), plain(*args, **options))[1])

def half_a_file(state, file):
    if state["step"] >= 20 and not (marks / "in a save").exists():
        file.write(b"PK" + bytes(5000))
        file.flush()
        die("in a save", 0)

before(checkpoint.torch, "save", half_a_file)
before(checkpoint, "_point_latest", lambda path: path.name > "step_00000030" and
       die("before latest.pt", 0))
before(checkpoint, "gather_full_state", lambda *_: (marks / "in a save").exists() and
       die("in a gather", 1))
before(train.Run, "evaluate", lambda run: run.step > 20 and die("in an evaluation", 1))
before(train.Run, "restore", lambda run, *_: hasattr(run, "num_microbatches") and
       die("before a rollback", 1))
before(train.Run, "skip_excluded", lambda run: run.monitor.rollbacks and
       die("after a rollback", 0))
before(train, "learning_rate", lambda *_: time.sleep({pause}))
train.main()
"""


def restart_until_done(rng, kills, *flags, **options):
    """What torchrun does for two ranks, but faster. `kills` times a random one is killed."""
    statuses = None
    while statuses != [0, 0]:
        ranks, end = launch(2, *flags, **options), time.monotonic() + rng.uniform(0.05, 2.5)
        while all(rank.poll() is None for rank in ranks) and (
                kills == 0 or time.monotonic() < end):
            time.sleep(0.01)
        if kills > 0 and all(rank.poll() is None for rank in ranks):
            victim, kills = rng.choice(ranks), kills - 1
            victim.send_signal(signal.SIGKILL)
            victim.finish()
        statuses = []
        for rank in sorted(ranks, key=lambda rank: rank.poll() is None):        # the dead first
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGTERM if any(statuses) else 0)
            with suppress(TimeoutError):                # `finish` kills who does not listen
                statuses.append(rank.finish(5)[0])
    assert kills == 0


@pytest.mark.slow
@pytest.mark.parametrize("steps, at_random", [(120, 0), (300, 24)])
def test_a_run_killed_twenty_times_ends_bit_equal(shards, tmp_path, steps, at_random):
    """Two replicas under ZeRO 1, at six chosen moments: under torchrun; or at random ones too, from
    the first line on, and started again at once."""
    noisy, marks = with_noise(shards, tmp_path / "noisy", range(60, 70), 4, 16), tmp_path / "marks"
    script, straight, out = (tmp_path / name for name in ("chaos.py", "straight", "out"))
    flags = ["--data", noisy, *TINY, "--steps", steps, "--save-every", 10, "--eval-every", 20,
             "--zero", 1, "--timeout", 60, "--out"]
    assert [rank.finish(300)[0] for rank in launch(2, *flags, straight)] == [0, 0]
    marks.mkdir()
    script.write_text(CHAOS.format(marks=str(marks), pause=0.02 if at_random else 0))
    if at_random:
        restart_until_done(random.Random(3), at_random, *flags, out, file=script)
    else:
        process = torchrun(2, "--max-restarts=20", script, *flags, out)
        _, error = process.communicate(timeout=400)
        assert process.returncode == 0, error[-3000:]
    healthy, events = (kinds(read_metrics(folder)[1]) for folder in (straight, out))
    assert healthy[:3] == ["start", "spike", "rollback"] and set(healthy[3:]) <= {"skip"}
    moments = names_in(marks)
    print(f"\n{at_random + len(moments)} kills: {at_random} at random, and {', '.join(moments)}; "
          f"{events.count('resume')} resumes")
    assert len(moments) == 6 and events.count("resume") >= (10 if at_random else 6)
    states = [checkpoint.load(folder / "latest.pt") for folder in (straight, out)]
    assert states[0]["step"] == steps and states[0]["monitor"]["rollbacks"] == 1
    assert_same_state(*states)


@contextmanager
def two_machines(folder):
    """Two network namespaces, joined by a link, with host names of their own -> (function that
    starts a shell line on machine 0 or 1, function that takes the link "down" or "up")."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
    names, processes = [f"pid{os.getpid()}n{i}" for i in (0, 1)], []

    def ip(line):
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)

    def start(i, line):
        shell = f"mount --bind {folder}/hosts /etc/hosts && hostname node{i} && {line}"
        processes.append(subprocess.Popen(
            ["ip", "netns", "exec", names[i], "unshare", "--mount", "--uts", "bash", "-c", shell],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))
        return processes[-1]

    try:
        try:
            for name in names:
                ip(f"netns add {name}")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no network namespaces can be made here (ip netns add)")
        ip(f"link add eth7 netns {names[0]} type veth peer eth7 netns {names[1]}")
        for i, name in enumerate(names):
            ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev eth7")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth7 up")
        yield start, lambda state: ip(f"-n {names[0]} link set eth7 {state}")
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_the_readmes_two_machines_survive_a_link_that_goes_down(shards, tmp_path):
    """For fifteen seconds; and they end where four ranks of one machine do."""
    straight, out = tmp_path / "straight", tmp_path / "out"
    flags = ["--data", shards, *TINY, "--steps", 200, "--save-every", 20, "--tp", 2, "--timeout", 8]
    assert {rank.finish(300)[0] for rank in launch(4, *flags, "--out", straight)} == {0}
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    line = next(block for block in blocks if "until torchrun --nnodes=2" in block).strip()
    line = re.sub(r"train\.py .*?--out \S+", lambda _: shlex.join(map(str, [
        ROOT / "train.py", *flags, "--out", out])), line.replace("\\\n", " "), flags=re.DOTALL)
    python = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
    for ours, theirs in (("until torchrun", f"until {python}"), ("HOST", "node0"),
                         ("--nproc_per_node=8", "--nproc_per_node=2")):
        assert ours in line
        line = line.replace(ours, theirs)
    with two_machines(tmp_path) as (start, link):
        nodes = [start(i, line) for i in (0, 1)]
        wait_for_step(out, 60, nodes[0])
        link("down")
        time.sleep(15)
        link("up")
        texts = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], texts
    lost = re.search("train.py: .*", texts[0])[0]
    print("\n" + lost)
    assert "all-reduce with ranks" in lost or "exchange" in lost
    assert "resume" in kinds(read_metrics(out)[1])
    states = [checkpoint.load(folder / "latest.pt") for folder in (straight, out)]
    assert states[0]["step"] == 200
    assert_same_state(*states)


# ---------------------------------------------------------------------------------------------
# sample.py
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trained(shards, tmp_path_factory):
    """A checkpoint of a model that has seen a little of the text."""
    out = tmp_path_factory.mktemp("trained")
    subprocess.run([sys.executable, ROOT / "train.py", "--data", shards, "--out", out, *TINY,
                    "--steps", "60", "--lr", "0.02", "--batch-size", "16"], check=True,
                   capture_output=True)
    return out / "latest.pt"


def run_sample(*arguments, **options):
    return subprocess.run([sys.executable, ROOT / "sample.py", *map(str, arguments)], text=True,
                          capture_output=True, **options)


def test_sampling_prints_only_text_and_is_a_function_of_the_seed(trained, tmp_path):
    flags = ["--ckpt", trained, "--prompt", "line ", "--max-tokens", 30]
    one, again, other, greedy = (run_sample(*flags, *more) for more in (
        ["--seed", 1], ["--seed", 1], ["--seed", 2], ["--temperature", 0, "--seed", 3]))
    assert one.stdout == again.stdout != other.stdout
    assert all(r.stdout.startswith("line ") and r.stderr == "" and r.returncode == 0
               for r in (one, other, greedy))
    piped = run_sample("--ckpt", trained, "--prompt", "-", "--max-tokens", 30, "--temperature", 0,
                       input="line ")
    assert piped.stdout == greedy.stdout
    model_, state = checkpoint.load_model(trained)
    tokens = list(b"line ")
    for _ in range(30):                                             # greedy, by hand
        tokens.append(model_(torch.tensor([tokens[-16:]]))[0, -1].argmax().item())
    assert greedy.stdout == bytes(tokens).decode(errors="replace") + "\n"


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_cache_gives_the_logits_of_the_whole_text_token_by_token(activation):
    plain = GPT(replace(CFG, activation=activation)).initialize(0).double().eval()
    tokens = tokens_of(CFG, 2)
    whole, cache = plain(tokens), plain.new_kv_cache(2)
    parts = [plain(tokens[:, :5], cache=cache)]
    parts += [plain(tokens[:, i:i + 1], cache=cache, start=i) for i in range(5, CFG.seq_len)]
    assert relative(torch.cat(parts, 1), whole) <= 1e-14
    assert relative(plain(tokens[:, 1:2], cache=cache, start=1), whole[:, 1:2]) <= 1e-14


def test_sampling_computes_each_token_once_until_the_window_moves():
    plain, seen = GPT(CFG).initialize(0).double().eval(), []
    plain.embed.register_forward_hook(lambda module, args, x: seen.append(x.shape[1]))
    tokens, expected = list(sample.generate(plain, [1, 2, 3], 20, 256, temperature=0)), [1, 2, 3]
    assert seen == [3] + 13 * [1] + 6 * [16]
    for _ in range(20):
        window = torch.tensor([expected[-CFG.seq_len:]])
        expected.append(plain(window)[0, -1].argmax().item())
    assert tokens == expected[3:]


def test_a_prompt_longer_than_the_context_is_cropped_with_a_warning(trained):
    long = run_sample("--ckpt", trained, "--prompt", "x" * 10 + "line 12: some wo",
                      "--temperature", 0, "--max-tokens", 8)
    short = run_sample("--ckpt", trained, "--prompt", "line 12: some wo", "--temperature", 0,
                       "--max-tokens", 8)
    assert long.returncode == 0 and long.stderr.count("\n") == 1 and "26 tokens" in long.stderr
    assert short.stderr == "" and long.stdout == "x" * 10 + short.stdout


@pytest.mark.parametrize("flags, message", [
    ("--ckpt nowhere.pt", "no checkpoint nowhere.pt"), ("--temperature -1", "--temperature"),
    ("--top-p 0", "--top-p"), ("--top-k -3", "--top-k"), ("--max-tokens x", "--max-tokens"),
    ("--device cuda", "no CUDA device"), ("--nonsense", "--nonsense"), ("--seed -1", "--seed"),
    ("--seed 99999999999999999999", "--seed"), ("--prompt \udce9", "surrogates not allowed")])
def test_sampling_mistakes_end_in_one_line_and_exit_2(monkeypatch, capsys, trained, flags,
                                                      message):
    monkeypatch.setattr(sys, "argv", ["sample.py", "--ckpt", str(trained), *flags.split()])
    with pytest.raises(SystemExit) as exit_:
        sample.main()
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and message in error and error.count("\n") == 1


def test_a_tiny_temperature_is_greedy():
    logits = torch.tensor([2.0, -1.0, 3.0])
    assert sample.filter_logits(logits, 1e-40, 0, 1.0).tolist() == [0, 0, 1]


def test_top_k_and_top_p_keep_what_they_should():
    logits = torch.tensor([2.0, -1.0, 3.0, 0.5, 1.0]).log_softmax(0)
    probabilities = logits.exp()                    # .238 .012 .647 .053 .088: order 2 0 4 3 1
    for k, kept in ((1, [2]), (2, [2, 0]), (3, [2, 0, 4]), (0, [2, 0, 4, 3, 1])):
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        torch.testing.assert_close(sample.filter_logits(logits, 1.0, k, 1.0), expected)
    for p, kept in ((0.01, [2]), (0.6, [2]), (0.7, [2, 0]), (0.9, [2, 0, 4]),
                    (1.0, [2, 0, 4, 3, 1])):
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        torch.testing.assert_close(sample.filter_logits(logits, 1.0, 0, p), expected)
    hot = sample.filter_logits(logits, 2.0, 0, 1.0)
    torch.testing.assert_close(hot, (logits / 2).softmax(0))


def test_sampling_stops_at_the_end_of_text_and_never_draws_padding():
    cfg = GPTConfig(vocab_size=257, seq_len=8, n_layer=1, n_head=1, n_embd=8)
    plain = GPT(cfg).initialize(0).eval()
    tokens = list(sample.generate(plain, [1], 2000, end=256, temperature=100.0,
                                  generator=torch.Generator().manual_seed(0)))
    assert 0 < len(tokens) < 2000 and max(tokens) < 256     # nearly uniform: 256 comes up soon
    assert len(set(tokens)) > 50 or len(tokens) < 100


def test_characters_of_several_bytes_come_out_whole(trained, monkeypatch, capsys):
    text = "é漢🙂!"
    monkeypatch.setattr(sample, "generate", lambda *a, **k: iter(text.encode() + b"\xff"))
    monkeypatch.setattr(sys, "argv", ["sample.py", "--ckpt", str(trained)])
    sample.main()
    assert capsys.readouterr().out == text + "\ufffd\n"


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(trained):
    done = run_sample("--ckpt", trained, "--prompt", "é", "--max-tokens", 0,
                      env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.stdout, done.stderr, done.returncode) == ("?\n", "", 0)


def test_the_flags_of_sampling_arrive(trained, monkeypatch, capsys):
    def text(*flags):
        monkeypatch.setattr(sys, "argv", ["sample.py", "--ckpt", str(trained), "--prompt", "line ",
                                          "--max-tokens", "30", *flags])
        sample.main()
        return capsys.readouterr().out
    greedy = text("--temperature", "0")
    assert text("--temperature", "9") != greedy
    for flags in ("--temperature 1e-6", "--temperature 9 --top-k 1",
                  "--temperature 9 --top-p 1e-6"):
        assert text(*flags.split()) == greedy


def test_without_a_prompt_a_sample_begins_at_the_end_of_text(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(sample, "generate", lambda model, tokens, *_: seen.append(tokens) or [])
    monkeypatch.setattr(sys, "argv", ["sample.py", "--ckpt", str(trained)])
    sample.main()
    assert seen == [[256]]


# ---------------------------------------------------------------------------------------------
# Speed, beside PyTorch's own parallel stack on the same work. Nothing is asserted about time.
# ---------------------------------------------------------------------------------------------

PAIRS = 3                       # each side's runs, in turn
SHAPE = dict(n_layer=6, n_head=6, n_embd=384, seq_len=256)
WORK = dict(batch_size=16, micro_batch=2, vocab=257, dtype="fp32", steps=3, warmup=2)


class PlainBlock(nn.Module):
    """A block as PyTorch's stack can cut it: q, k and v apart."""

    def __init__(self, C, D):
        super().__init__()
        self.head_dim = D
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.q, self.k, self.v, self.proj = (nn.Linear(C, C) for _ in range(4))
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """What a pipeline's stage holds of it: all blocks and both ends for one process."""

    def __init__(self, vocab, stage=0, stages=1, tied=True):
        super().__init__()
        layers, C = SHAPE["n_layer"] // stages, SHAPE["n_embd"]
        first, last = stage == 0, stage == stages - 1
        self.token = nn.Embedding(vocab, C) if first else None
        self.position = nn.Embedding(SHAPE["seq_len"], C) if first else None
        self.blocks = nn.ModuleList(PlainBlock(C, C // SHAPE["n_head"]) for _ in range(layers))
        self.norm = nn.LayerNorm(C) if last else None
        self.head = nn.Linear(C, vocab, bias=False) if last else None
        for module in self.modules():               # of N(0, 1) many numbers become denormal
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if first and last and tied:
            self.head.weight = self.token.weight

    def forward(self, x):
        if self.token is not None:
            x = self.token(x) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def tensor_parallel(plain, mesh):
    """parallelize_module as its tutorial has it, with the loss on cut logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)
    layer = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    layer |= {name: RowwiseParallel() for name in ("proj", "down")}
    for block in plain.blocks:
        parallelize_module(block, mesh, layer)
    ends = {"token": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(plain, mesh, {n: s for n, s in ends.items() if getattr(plain, n)})


def peer(mode, batch_size, micro_batch, vocab, dtype, steps, warmup, schedule="ScheduleGPipe"):
    """Train a PlainGPT on random tokens by PyTorch's stack; rank 0 prints tokens a second. Where
    there is tensor parallelism (tp, 3d) or a pipeline the head is not tied and the norm is not
    global, because the stack has no way to do either."""
    warnings.simplefilter("ignore")
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(os.cpu_count() if world == 1 else 1)
    tp = {"tp": world, "3d": 2}.get(mode, 1)
    pp = {"pp": world, "3d": 2}.get(mode, 1)
    dp, stage = world // (tp * pp), rank // tp % pp
    first, last = stage == 0, stage == pp - 1
    torch.manual_seed(0)
    plain = net = PlainGPT(vocab, stage, pp, tied=tp == 1)
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    if tp > 1:
        tensor_parallel(plain, mesh["tp"])
    if mode in ("ddp", "zero1"):
        net = DistributedDataParallel(plain)
    if mode == "fsdp":
        for module in [*plain.blocks, plain]:
            fully_shard(module)
    parameters = list(plain.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == sharded]
             for sharded in (False, True)]
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    optimizer = (ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3, fused=True)
                 if mode == "zero1" else adamw([dict(params=k) for k in kinds if k]))

    def loss_of(logits, y):
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    cast = (functools.partial(torch.autocast, "cpu", torch.bfloat16) if dtype == "bf16"
            else nullcontext)
    count, loss_context = batch_size // dp // micro_batch, loss_parallel if tp > 1 else nullcontext
    if pp > 1:
        schedule = getattr(pipelining, schedule)(
            pipelining.PipelineStage(net, stage, pp, torch.device("cpu"),
                                     group=mesh["pp"].get_group()), count, loss_fn=loss_of)

    def gradients(x, y):
        if pp > 1:
            schedule.step(*([x] if first else []), **(dict(target=y, losses=[]) if last else {}))
            return
        for i, (a, b) in enumerate(zip(x.split(micro_batch), y.split(micro_batch))):
            alone = isinstance(net, DistributedDataParallel) and i < count - 1
            with net.no_sync() if alone else nullcontext():
                with cast():
                    loss = loss_of(net(a), b) / count
                loss.backward()

    seconds = []
    for _ in range(warmup + steps):
        x, y = torch.randint(vocab, (2, batch_size // dp, SHAPE["seq_len"]))
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        with loss_context():
            gradients(x, y)
        for p in parameters if mode == "3d" else ():        # DDP refuses DTensors
            whole = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(whole, group=mesh["dp"].get_group())
            whole /= dp
        for some in filter(None, kinds):                    # clipping refuses to mix the two kinds
            torch.nn.utils.clip_grad_norm_(some, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        tokens = batch_size * SHAPE["seq_len"]
        print(json.dumps(dict(tokens_per_second=tokens / np.median(seconds[warmup:]))))
    if world > 1:
        dist.destroy_process_group()


def random_data(folder, vocab):
    """A directory of shards of random tokens."""
    path, draw = Path(folder) / f"random_{vocab}", np.random.default_rng(0)
    if not path.exists():
        path.mkdir()
        for split, count in (("train", 400_000), ("val", 1025)):
            write_shard(path / f"{split}_000000.bin", draw.integers(vocab, size=count))
        (path / "meta.json").write_text(json.dumps(dict(
            tokenizer="bytes", vocab_size=vocab, bytes_per_token=1.0, fingerprint="random")))
    return path


def finished(processes, *command):
    """Standard output of a Python script, in one process on all cores, or by torchrun."""
    if processes > 1:
        process = torchrun(processes, *command)
    else:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        process = subprocess.Popen([sys.executable, *map(str, command)], env=environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    text, error = process.communicate(timeout=900)
    assert process.returncode == 0, error
    return text


def speed_of_train_py(folder, processes, *flags, vocab=257, shape=SHAPE, steps=3, warmup=2):
    """Tokens a second, train.py's own figure: the median after the warm-up."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
        finished(processes, ROOT / "train.py", "--data", random_data(folder, vocab), "--out", out,
                 *sizes, "--batch-size", 16, "--steps", warmup + steps, "--eval-every", 0,
                 "--save-every", 0, "--lr", 1e-3, *flags)
        rows = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
        speeds = [row["tokens_per_second"] for row in rows if "loss" in row]
    assert len(speeds) == warmup + steps
    return np.median(speeds[warmup:])


def speed_of_peer(processes, **work):
    return json.loads(finished(processes, __file__, "peer", json.dumps(work)))["tokens_per_second"]


def race(name, ours, theirs):
    """Both sides in turn, PAIRS times; prints medians and their ratio."""
    seen = [(ours(), theirs()) for _ in range(PAIRS)]
    us, them = np.median(seen, axis=0)
    print(f"| {name} | {us:,.4g} | {them:,.4g} | {us / them:.2f} |", flush=True)


# name, processes, train.py's flags, the peer's work; alone each side has its best micro-batch
RACES = [
    ("one process, fp32", 1, "--micro-batch 8", dict(mode="single", micro_batch=8)),
    ("one process, fp32, vocabulary 50304", 1, "--micro-batch 2", dict(mode="single", vocab=50304)),
    ("one process, bf16", 1, "--micro-batch 4", dict(mode="single", dtype="bf16", micro_batch=16)),
    ("one process, bf16, vocabulary 50304", 1, "--micro-batch 8",
     dict(mode="single", dtype="bf16", vocab=50304)),
    ("dp 2 / DDP", 2, "", dict(mode="ddp")),
    ("dp 2, zero 1 / ZeroRedundancyOptimizer", 2, "--zero 1", dict(mode="zero1")),
    ("dp 2, zero 3 / FSDP2", 2, "--zero 3", dict(mode="fsdp")),
    ("pp 2, gpipe", 2, "--pp 2", dict(mode="pp")),
    ("pp 2, 1f1b", 2, "--pp 2 --pp-schedule 1f1b", dict(mode="pp", schedule="Schedule1F1B")),
    ("tp 2 / DTensor", 2, "--tp 2", dict(mode="tp")),
    ("dp 2 x pp 2 x tp 2", 8, "--tp 2 --pp 2", dict(mode="3d")),
]


@pytest.mark.bench
def test_speed_beside_torchs_parallel_stack(tmp_path):
    print("\n| tokens a second | ours | PyTorch's | ratio |\n|---|---|---|---|")
    for name, processes, flags, theirs in RACES:
        work = {**WORK, **theirs}
        flags = ["--micro-batch", 2, "--dtype", work["dtype"], *flags.split()]
        race(name, lambda: speed_of_train_py(tmp_path, processes, *flags, vocab=work["vocab"]),
             lambda: speed_of_peer(processes, **work))


@pytest.mark.bench
def test_speed_of_three_dimensions_beside_one_process(tmp_path):
    print("\n| tokens a second | 2 x 2 x 2 | one process | ratio |\n|---|---|---|---|")
    race("8 processes / 1 on all cores",
         lambda: speed_of_train_py(tmp_path, 8, "--tp", 2, "--pp", 2, "--micro-batch", 2),
         lambda: speed_of_train_py(tmp_path, 1, "--micro-batch", 8))


@contextmanager
def all_cores():
    torch.set_num_threads(os.cpu_count())
    try:
        yield
    finally:
        torch.set_num_threads(1)


def per_second(work, amount):
    """A function that does the work once and returns amount / seconds."""
    def measure():
        start = time.perf_counter()
        work()
        return amount / (time.perf_counter() - start)
    return measure


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore")
def test_speed_of_sampling():
    plain = GPT(GPTConfig(vocab_size=257, **SHAPE)).initialize(0).eval()

    def cached():
        return list(sample.generate(plain, [1], 255, end=-1, temperature=0))

    @torch.inference_mode()
    def whole_prefix():
        tokens = [1]
        while len(tokens) < 256:
            tokens.append(plain(torch.tensor([tokens]))[0, -1].argmax().item())
        return tokens[1:]
    with all_cores():
        assert cached() == whole_prefix()
        print("\n| tokens sampled a second | ours | theirs | ratio |\n|---|---|---|---|")
        race("cache / the whole prefix again", per_second(cached, 255),
             per_second(whole_prefix, 255))
        transformers = pytest.importorskip("transformers")
        shape = dict(n_layer=SHAPE["n_layer"], n_head=SHAPE["n_head"], n_embd=SHAPE["n_embd"])
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=257, n_positions=SHAPE["seq_len"], **shape)).eval()
        race("cache / Hugging Face generate", per_second(cached, 255), per_second(
            lambda: theirs.generate(torch.tensor([[1]]), max_new_tokens=255, min_new_tokens=255,
                                    do_sample=False, use_cache=True, pad_token_id=0), 255))


@pytest.mark.bench
def test_speed_of_tokenizing(tmp_path, gpt2):
    files, _ = data.standard_library()
    texts = [file.read_text() for file in files]
    size, cores = sum(file.stat().st_size for file in files) / 1e6, os.cpu_count()
    print("\n| MB a second | ours | tiktoken | ratio |\n|---|---|---|---|")
    race("data.py, GPT-2 BPE / encode_ordinary_batch",
         per_second(lambda: data.prepare(files, tmp_path, "gpt2"), size),
         per_second(lambda: gpt2.encode_ordinary_batch(texts, num_threads=cores), size))


@pytest.mark.bench
def test_speed_of_checkpoints(tmp_path):
    config = settings(tmp_path, steps=1, warmup_steps=1, batch_size=1, micro_batch=1)
    cfg = GPTConfig(vocab_size=50257, seq_len=64, n_layer=6, n_head=6, n_embd=384)
    run_steps(0, 1, (1, 1, 1), config, cfg)
    state = torch.load(tmp_path / "latest.pt")
    size = (tmp_path / "latest.pt").stat().st_size / 1e6

    latest, theirs = tmp_path / "latest.pt", tmp_path / "theirs"
    room = {key: {name: torch.empty_like(x) for name, x in state[key].items()}
            for key in checkpoint.STATE}

    def their_save():
        theirs.unlink(missing_ok=True)              # ours too is a new file, and removes the old
        with open(theirs, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def copied(loaded):
        for key, tensors in room.items():
            for name, tensor in tensors.items():
                tensor.copy_(loaded[key][name])
    print("\n| MB a second | ours | torch's | ratio |\n|---|---|---|---|")
    race("save / torch.save, fsync", per_second(lambda: checkpoint.save(state, tmp_path, 1), size),
         per_second(their_save, size))
    race("CRCs, load, copy / torch.load, copy", per_second(
        lambda: checkpoint.verify(latest) or copied(checkpoint.load(latest)), size),
        per_second(lambda: copied(torch.load(theirs)), size))


@pytest.mark.bench
def test_cost_of_watching(tmp_path):
    """What a step of `nano` does for its health alone, timed alone; whole steps vary by more."""
    cfg = GPTConfig(**SIZES["nano"])
    config = settings(tmp_path, steps=30, batch_size=16, micro_batch=4, lr=4e-3)
    rows, *_ = run_steps(0, 1, (1, 1, 1), config, cfg)
    step = 16 * cfg.seq_len / float(np.median(column(rows[10:], "tokens_per_second")))
    x = torch.randn(4, cfg.seq_len, cfg.n_embd)
    monitor = amp.DivergenceMonitor(losses=list(range(64, 0, -1)))

    def watch():
        for _ in range(4):              # microbatches
            torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).sum()
        monitor.observe(3.0, False, False, (0, 16), config)
    seconds = [1 / per_second(watch, 1)() for _ in range(200)]
    print(f"watching takes {1e6 * np.median(seconds):.0f} us of a step of {1e3 * step:.0f} ms: "
          f"{np.median(seconds) / step:.2%}")


@pytest.mark.bench
def test_time_to_the_first_step_of_eight_processes(tmp_path):
    """Beside eight processes that only import torch and start gloo."""
    least = tmp_path / "least.py"
    least.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n"
                     "print('step 1/', flush=True)\ndist.destroy_process_group()\n")
    flags = ["--data", random_data(tmp_path, 257), "--steps", 2, "--tp", 2, "--pp", 2]

    def seconds(*command):
        start = time.perf_counter()
        process = torchrun(8, *command)
        while not process.stdout.readline().startswith("step 1/"):
            assert process.poll() is None
        duration = time.perf_counter() - start
        process.communicate(timeout=300)
        return duration
    print("\n| seconds to the first step | ours | the least | ratio |\n|---|---|---|---|")
    race("8 processes", lambda: seconds(ROOT / "train.py", *flags, "--out", tempfile.mkdtemp(
        dir=tmp_path)), lambda: seconds(least))


def rate_of_products(n=2048):
    """FLOP/s of a large square matrix product on all cores, fp32."""
    with all_cores():
        a = torch.randn(n, n)
        return max(per_second(lambda: a @ a, 2 * n ** 3)() for _ in range(4))


@pytest.mark.bench
def test_cost_as_the_work_grows(tmp_path):
    """One quantity at a time, 4096 tokens a step; the machine's rate is measured with each."""
    print("\n| one process, fp32 | tokens a second | GFLOP/s | of the products' rate |\n"
          "|---|---|---|---|")
    for name, value in [("n_embd", 192), ("n_embd", 384), ("n_embd", 768), ("n_embd", 1024),
                        ("n_layer", 3), ("n_layer", 12), ("seq_len", 64), ("seq_len", 1024),
                        ("vocab", 8192), ("vocab", 50304)]:
        shape = {**SHAPE, "vocab": 257, name: value}
        shape["n_head"], vocab = shape["n_embd"] // 64, shape.pop("vocab")
        flops = model.flops_per_token(GPTConfig(vocab_size=vocab, **shape))
        batch = 4096 // shape["seq_len"]
        rate = rate_of_products()
        speed = speed_of_train_py(tmp_path, 1, "--batch-size", batch, "--micro-batch",
                                  max(1, batch // 4), vocab=vocab, shape=shape)
        print(f"| {name} {value} | {speed:,.0f} | {speed * flops / 1e9:,.0f} | "
              f"{speed * flops / rate:.2f} |", flush=True)


@pytest.mark.bench
def test_cost_as_processes_and_microbatches_grow(tmp_path):
    """One thread each. The bubble: what a step takes beyond its microbatches, whose time is the
    slope between 8 and 32 of them."""
    print("\n| layout | tokens a second |\n|---|---|")
    for processes, flags in [(1, ""), (2, ""), (4, ""), (2, "--tp 2"), (2, "--pp 2"),
                             (4, "--pp 4")]:
        speed = speed_of_train_py(tmp_path, processes, "--micro-batch", 2, *flags.split())
        print(f"| {processes} processes {flags} | {speed:,.0f} |", flush=True)
    seconds = {}
    for num_microbatches in (1, 2, 4, 8, 32):
        speed = speed_of_train_py(tmp_path, 2, "--pp", 2, "--batch-size", num_microbatches,
                                  "--micro-batch", 1, steps=9)
        seconds[num_microbatches] = num_microbatches * SHAPE["seq_len"] / speed
    each = (seconds[32] - seconds[8]) / 24
    print("\n| microbatches on 2 stages | bubble measured | (p - 1) / (m + p - 1) |\n|---|---|---|")
    for num_microbatches, time_ in seconds.items():
        print(f"| {num_microbatches} | {1 - num_microbatches * each / time_:.2f} | "
              f"{1 / (num_microbatches + 1):.2f} |")


# ---------------------------------------------------------------------------------------------
# README.md
# ---------------------------------------------------------------------------------------------


def readme_commands():
    """The commands of the README's first fenced block, install step aside."""
    block = (ROOT / "README.md").read_text().split("```")[1]
    lines = [line.split("#")[0].strip() for line in block.splitlines()[1:]]
    return [shlex.split(line) for line in lines if line.startswith(("python data", "torchrun",
                                                                    "python sample"))]


def test_the_readmes_commands_run_as_printed_with_fewer_steps(tmp_path):
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    commands = readme_commands()
    assert [c[0] for c in commands] == ["python", "torchrun", "python"]
    assert commands[1] == ["torchrun", "--nproc_per_node=8", "train.py", "--tp", "2", "--pp", "2"]
    outputs = []
    for command in commands:
        if command[0] == "torchrun":
            process = torchrun(8, *command[2:], "--steps", "3", "--eval-every", "0", cwd=tmp_path)
        else:
            process = subprocess.Popen([sys.executable, *command[1:]], cwd=tmp_path, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        text, error = process.communicate(timeout=200)
        assert process.returncode == 0, error
        assert "warn" not in error.lower(), error
        outputs.append(text)
    assert "torchrun --nproc_per_node=8 train.py --tp 2 --pp 2" in outputs[0]
    assert "step 3/3" in outputs[1] and "dp 2 x pp 2 x tp 2" in outputs[1]
    assert outputs[2].startswith("def ")


def test_the_readme_names_only_tests_and_flags_that_exist():
    text = (ROOT / "README.md").read_text()
    tests = set(re.findall(r"`(test_\w+)`", text))
    assert len(tests) > 10 and tests <= set(globals())
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    known = {f"--{name.replace('_', '-')}" for name in asdict(train.Config())}
    for file in ("data.py", "sample.py", "parallel.py"):
        known |= set(re.findall(r"--[a-z][a-z0-9-]*", (ROOT / file).read_text()))
    assert not {f for f in flags if f not in known and not f.startswith((
        "--help", "--nproc", "--nnodes", "--node", "--rdzv", "--master", "--ntasks", "--gpus",
        "--job", "--cpus", "--max-restarts"))}


def test_the_readmes_layouts_are_not_refused(shards):
    blocks = "".join((ROOT / "README.md").read_text().split("```")[1::2]).replace("\\\n", " ")
    commands = [shlex.split(line) for line in blocks.splitlines() if " train.py" in line]
    for command in commands:
        at = command.index("train.py")
        numbers = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", " ".join(command[:at]))
        given = dict(train.parse_flags(command[at + 1:]), data=str(shards), seq_len=16)
        config, cfg = train.validate(given, None, math.prod(map(int, numbers)))
        assert cfg.n_layer == SIZES[config.model]["n_layer"]
    assert len(commands) == 7


def print_equality(folder):
    workers = Pool()
    tables = [equality_table(workers, dtype, folder) for dtype in ("fp32", "fp64")]
    print("| dp x tp x pp | fp32: loss | gradient | norm | fp64: loss | gradient | norm |")
    print("|---|---|---|---|---|---|---|")
    for (layout, fp32), (_, fp64) in zip(*tables):
        cells = [" x ".join(map(str, layout)), *(f"{x:.0e}" for x in fp32 + fp64)]
        print("| " + " | ".join(cells) + " |", flush=True)
    workers.stop()


def speed(rank, world, config, cfg):
    with mock.patch.object(train.Run, "save", nothing_saved), \
            mock.patch.object(train.Run, "evaluate", lambda run: 0.0):
        steps = run_steps(rank, world, (world, 1, 1), config, cfg)[0]
    return column(steps, "tokens_per_second")[1:]


def relative_speeds(folder, rounds=5):
    """Tokens a second on two processes at each stage, relative to stage 0: medians of all steps of
    runs that take turns."""
    cfg = GPTConfig(vocab_size=257, seq_len=256, n_layer=6, n_head=6, n_embd=384)
    config = settings(folder, steps=5, batch_size=16, micro_batch=2)
    workers, seen = Pool(), {zero: [] for zero in range(4)}
    for _ in range(rounds):
        for zero, speeds in seen.items():
            speeds += workers.run(2, speed, replace(config, zero=zero), cfg, seconds=500)[0]
    workers.stop()
    return [np.median(speeds) / np.median(seen[0]) for speeds in seen.values()]


def print_memory(folder):
    heads = ["", "bytes a parameter", "state", "buffers", "activations", "sum", "measured peak",
             "measured / sum"]

    def row(name, peaks, formula, *more):
        peak, sizes = peaks[0]
        cells = [name, formula, *(f"{x / 1e6:,.0f} MB" for x in (*sizes, sum(sizes), peak)),
                 f"{peak / sum(sizes):.2f}", *more]
        print("| " + " | ".join(cells) + " |", flush=True)
    print("| " + " | ".join([*heads, "tokens a second"]) + " |\n" + "|---" * 9 + "|")
    speeds = relative_speeds(folder)
    for zero in range(4):
        row(f"zero {zero}", peak_of((4, 1, 1), BIG, folder, zero=zero, micro_batch=1),
            f"{FORMULA['fp32'](4)[zero]:g}", f"{speeds[zero]:.2f}")
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * 8 + "|")
    for name, flags in PIPELINES.items():
        row(name, peak_of((1, 1, 4), LONG, folder, batch_size=32, **flags), "16")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        sys.exit(peer(**json.loads(sys.argv[2])))
    with tempfile.TemporaryDirectory() as folder:
        (print_memory if sys.argv[1:] == ["memory"] else print_equality)(folder)
