"""What a run on real machines needs beside the training: runtime/.

    python -m pytest tests/test_runtime.py

test_signals.py has processes and signals, test_rollback.py divergence and rollback.

Section                       Claims                                    Compared with
Flags and refusals            a user's mistake ends in one line, and    literals
                              exit 2, from one rank
Memory                        what a rank keeps is told, and what to    the published formulas
                              do when there is too little
Devices                       GPUs, MPS, systems without POSIX          the choice by hand
The run's directory ...       where a run begins; metrics.jsonl; what   the file; the README's line
                              the console tells; --eval-only
sample.py's command line      only text is printed; mistakes            each sample by itself
"""
import errno
import fcntl
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import checkpoint
import data
import model
import sample
import train
from base import devices, processes
from base.batch_ramp import batch_size_at
from base.errors import RunError
from base.flops import flops_per_token, peak_flops
from base.options import Config, merge_config, parse_flags
from base.processes import Job
from corpus import flags as data_flags
from corpus.tokenizers import get_tokenizer
from model import GPT, GPTConfig
from models.kv_cache import CachedModel
from parallelism import collectives, kernels
from parallelism.buckets import make_buckets
from parallelism.build import Grid, build_stage, rank_buckets, rank_parameters
from parallelism.parameters import param_specs
from runtime import checks, console, directory, evaluation, run_log, sample_and_chat, startup
from tests.harness import (CFG, README, ROOT, TINY, Command, Memory, assert_same_state, column,
                           dataset, expect_mistake, kinds, launch, names_in, no_file_above,
                           nothing, read_metrics, saved, settings, trained, watched)


# ---------------------------------------------------------------------------------------------
# Flags and refusals: a user's mistake ends in one line
# ---------------------------------------------------------------------------------------------

# What the message says (... leaves words out), flags that it refuses, and flags that follow its
# advice. The processes are as many as tp x pp x cp, or as --nproc_per_node says.
REFUSED = [
    ("argument --zero: invalid choice: 4 (choose from 0, 1, 2, 3)", ["--zero 4"], []),
    ("argument --steps: invalid int value: 'x': give a whole number", ["--steps x"], []),
    ("argument --lr: nan must be at least 0\n", ["--lr nan"], []),
    ("argument --compile: ignored explicit argument 'False': a switch takes no value: give "
     "--compile alone, or leave it out", ["--compile=False"], []),
    ("unknown argument config/tiny.py: --help lists the flags", ["config/tiny.py"], []),
    ("unknown argument --warm: did you mean --warmup-steps?", ["--warm 5"], []),
    (": did you mean gpt3-6.7b?", ["--model gpt3-6.7", "--model GPT-3-6.7B"], []),
    ("--model: invalid choice: 'bert-base': --help lists the choices", ["--model bert-base"], []),
    ("--steps: 0 must be at least 1\n", ["--steps 0"], []),
    ("--lr: inf must be at least 0 and finite", ["--lr inf"], []),
    ("--lr: invalid float value: '10%': give a number", ["--lr 10%"], []),
    ("--dropout: 1 must be at least 0 and below 1", ["--dropout 1"], []),
    ("must be A:B, steps with 1 <= A <= B", ["--skip-steps 0:3", "--skip-steps 9:3"], []),
    ("is not START:INCREMENT:SEQUENCES, all > 0", [
        "--batch-ramp 2", "--batch-ramp 2:2", "--batch-ramp 0:2:9", "--batch-ramp 2:0:9",
        "--batch-ramp 2:2:0", "--batch-ramp 2:2:x", "--batch-ramp 2:-2:9"], []),
    ("does not end at --batch-size 4 ... (none: no ramp)", [
        "--batch-ramp 1:2:9", "--batch-ramp 5:1:9"], ["--batch-ramp none"]),
    ("did you mean gelu?", ["--activation GELU"], ["--activation gelu"]),
    ("no CUDA device here", ["--device cuda"], []), ("give --device cpu", ["--device mps"], []),
    ("needs a C++ compiler: install g++", ["--compile"], []),
    ("--steps cannot be combined with --epochs", ["--epochs 2"], []),
    ("--init-from: the value is empty: give a path (is a variable of the shell not set?)", [
        "--init-from ", "--init-from="], []),
    ("--out: the value is empty", ["--out ", "--out="], []),
    ("--data: the value is empty", ["--data ", "--data="], []),
    # Flags that do not exist here
    ("--nonsense: --help lists the flags", ["--nonsense 1"], []),
    ("did you mean --batch-size? (global batch size: sequences per step (default 16))",
     ["--batch-sise 1"], []),
    ("mean --n-layer?", ["--n-layers 1"], []), ("mean --lr?", ["lr=1e-3"], ["--lr 1e-3"]),
    ("unknown argument fit: --help lists the flags", ["fit it --steps 2"], []),
    # Layouts
    ("this is one process, too few for tp 2 x pp 1 x cp 1 = 2: lower these, or start a multiple of "
     "2 by torchrun --nproc_per_node=2 train.py, with the same flags",
     ["--nproc_per_node=1 --tp 2"], ["--nproc_per_node=2 --tp 2"]),
    ("3 processes are not divisible by tp 2 x pp 1 x cp 1 = 2", ["--nproc_per_node=3 --tp 2"], []),
    ("lower these, or start a multiple of 3", ["--nproc_per_node=2 --tp 3"], ["--tp 2"]),
    ("n_head 2 is not divisible by tp 16", ["--tp 16"], []),
    ("n_head 2 is not divisible by tp 4: change one", ["--tp 4"],
     ["--nproc_per_node=4 --tp 2", "--tp 4 --n-head 4"]),
    ("n_embd 15 is not divisible by n_head 2", ["--n-embd 15", "--tp 2 --n-embd 15"], []),
    ("tp is 1: drop it, or give --tp", ["--sequence-parallel"], ["--sequence-parallel --tp 2"]),
    ("seq_len 15 is not divisible", ["--sequence-parallel --tp 2 --seq-len 15"], []),
    ("zero 3 with pp 2 would gather every block again for each microbatch of the pipeline: give "
     "another --zero", ["--zero 3 --pp 2", "--zero 3 --pp 2 --pp-schedule zb-h1"],
     ["--pp 2 --zero 1", "--pp 2 --zero 2", "--pp 2 --zero 1 --pp-schedule zb-h1"]),
    ("with pp 2 would gather ... give another --zero; sequence parallelism splits", [
        "--zero 3 --pp 2 --sequence-parallel"], []),
    ("chunks require the schedule interleaved, and it requires --pp and --pp-chunks of 2 or more: "
     "give all, or drop both", [
         "--pp-chunks 2", "--pp 2 --pp-chunks 2", "--pp 2 --pp-schedule 1f1b --pp-chunks 2"],
     ["--n-layer 4 --pp-chunks 2 --pp 2 --pp-schedule interleaved"]),
    ("interleaved, and it requires", [
        "--pp 2 --pp-schedule interleaved", "--pp-schedule interleaved --pp-chunks 2"], []),
    ("n_layer 3 is less than pp 2 x pp-chunks 2: a stage would be empty: raise --n-layer, or lower "
     "these; batch size 5 is not divisible by", [
         "--n-layer 3 --batch-size 5 --pp 2 --pp-schedule interleaved --pp-chunks 2"],
     ["--n-layer 4 --pp 2 --pp-schedule interleaved --pp-chunks 2"]),
    ("n_layer 2 is less than pp 2 x pp-chunks 2", [
        "--resume whole.pt --pp 2 --pp-schedule interleaved --pp-chunks 2"],
     ["--resume whole.pt --pp 2"]),
    ("batch size 3 is not divisible by dp 1 x micro-batch 1 x pp 2 (interleaved) = 2", [
        "--n-layer 4 --batch-size 3 --micro-batch 1 --pp 2 --pp-schedule interleaved --pp-chunks 2",
        "--n-layer 4 --batch-size 4 --batch-ramp 3:1:9 --micro-batch 1 --pp 2 --pp-chunks 2 "
        "--pp-schedule interleaved"],
     ["--n-layer 4 --batch-size 2 --micro-batch 1 --pp 2 --pp-schedule interleaved --pp-chunks 2"]),
    ("--pp-schedule zb-h1 requires --pp 2 or more, and cannot be combined with --zero 2, ", [
        "--pp-schedule zb-h1", *(f"--pp 2 --pp-schedule zb-h1 {flag}" for flag in (
            "--recompute", "--zero 2", "--compile"))], []),
    ("cuts a sequence into 2 x cp 2 = 4 pieces, which do not divide seq_len 18",
     ["--cp 2 --seq-len 18"], []), ("--cp: 0 must be at least 1", ["--cp 0"], []),
    ("seq_len 20 is not divisible by cp 2 x tp 4", [
        "--cp 2 --tp 4 --n-head 4 --sequence-parallel --seq-len 20"], []),
    ("--exact cannot be combined with --cp 2", ["--exact --cp 2"], []),
    ("--exact computes in 8 strips at most, which tp 3 does not divide",
     ["--exact --tp 3 --n-head 3 --n-embd 24"], ["--exact --tp 2 --n-head 4 --n-embd 24"]),
    ("--exact cannot be combined with --compile", ["--exact --compile"], []),
    ("--exact cannot be combined with --dropout and --sequence-parallel",
     ["--exact --dropout 0.1 --sequence-parallel --tp 2"], []),
    ("batch size 6 is not divisible by dp 1 x micro-batch 4 = 4: change one",
     ["--batch-size 6 --micro-batch 4"], ["--batch-size 8 --micro-batch 4", "--batch-size 6"]),
    ("dp 3 x micro-batch 1 = 3", ["--nproc_per_node=3 --seed 1"],
     ["--nproc_per_node=3 --batch-size 6"]),
    ("--batch-ramp 2:3:9: batch size 5 is not divisible", [
        "--batch-size 8 --batch-ramp 2:3:9 --micro-batch 2"], []),
    ("--batch-ramp 1:1:60: batch size 1 ", ["--nproc_per_node=2 --batch-ramp 1:1:60"],
     ["--nproc_per_node=2 --batch-ramp 2:2:60"]),
    # Data
    ("--data a,b: a mixture is DIR=WEIGHT,DIR=WEIGHT: 'a' lacks its DIR or its =WEIGHT: give both, "
     "as in a=0.7", ["--data a,b"], ["--data other=0.7,beyond=0.7"]),
    ("lacks its DIR or its =WEIGHT", [
        "--data a:0.5,b:0.5", "--data a=1,b", "--data =1,b=1", "--data ,", "--data a=1,"], []),
    ("the weight 'x' of a is no number: give one, as in a=0.7", ["--data a=x,b=1"], []),
    ("the weight of a must be 0 or 1e-6 to 1000 ... scale all of them; a=0 leaves it out", [
        "--data a=nan,b=1", "--data a=inf,b=1", "--data a=-1,b=2", "--data a=1001,b=1"],
     ["--data other=200,beyond=0.1", "--data other=0,beyond=1"]),
    ("all weights are 0: give one that is not", ["--data a=0,b=0"], ["--data other=1,beyond=0"]),
    ("is the second with this last part, which names a source in metrics.jsonl: give it once, or "
     "rename one", ["--data a=1,a=2", "--data a=1,./a=2", "--data one/a=1,two/a=1"],
     ["--data other=3"]),
    ("nowhere is no directory: give a directory that data.py has made: data/python by `python "
     "data.py`, data/NAME by --dataset NAME, DIR by --input FILE --out DIR",
     ["--data nowhere", "--data other=1,nowhere=1"], []),
    ("has no train shards: give", ["--data run"], []),
    ("train_0.bin is no directory: give", ["--data other/train_0.bin"], []),
    ("lost has no meta.json: copy it, too, or remove the shards and run", ["--data lost"], []),
    ("too few for a window of 100000 + 1: ... a smaller --seq-len", ["--data other --seq-len 100000"],
     ["--data other --seq-len 99999"]),
    ("other and toy have different tokenizers", ["--data other=1,toy=0"], []),
    ("train_0.bin", ["--data torn=1,other=1"], []),
    ("beyond and beyond_val hold the same text: drop one", ["--data beyond=1,beyond_val=1"],
     ["--data beyond=1"]),
    ("run/../beyond and beyond_val hold the same", ["--data run/../beyond=1,beyond_val=1"], []),
    ("257", ["--data beyond_val", "--data other=1,beyond=2"], []),
    # The run's directory, --resume and --init-from
    ("/proc/nowhere", ["--out /proc/nowhere"], []),
    ("--out precious is not a", ["--out precious"], []),
    ("holds no checkpoint: give the --out of a run, or --resume FILE", ["--eval-only"],
     ["--eval-only --out run", "--eval-only --resume whole.pt"]),
    ("--resume: expected one argument: give a value", ["--resume"], []),
    ("there is no checkpoint nowhere: give a file of train.py, such as out/latest.pt; ", [
        "--resume nowhere"], []),
    ("there is no checkpoint no.pt: run train.py first, or `python -m tools.huggingface import "
     "NAME no.pt`, or give another file", ["--init-from no.pt", "--eval-only --resume no.pt"], []),
    ("`python -m tools.huggingface import gpt2 gpt2.pt` makes one of weights, for --init-from and "
     "sample.py", ["--init_from=gpt2"], ["--init-from whole.pt"]),
    ("sample.py; run holds a run: give another --out", ["--init_from=gpt2 --out run"], []),
    ("there is no checkpoint run/step_00000003.pt: run has step_00000004.pt, step_00000002.pt", [
        "--resume run/step_00000003.pt", "--init-from run/step_00000003.pt"],
     ["--resume run/step_00000004.pt"]),
    ("drop --resume to go on with it", ["--resume run/step_00000003.pt --out run"], ["--out run"]),
    ("no checkpoint sixth: it is a directory: give a file in it: sixth/latest.pt, sixth/step_0",
     ["--resume sixth", "--init-from sixth"], []),
    ("it is a directory: give a file in it: run/step_00000002.pt, run/step_00000004.pt", [
        "--resume run"], []),
    ("no checkpoint other: it is a directory without any: give", ["--resume other"], []),
    ("File name too long", [f"--resume {'x' * 300}.pt", f"--init-from {'x' * 300}.pt"], []),
    ("torn.pt is damaged", ["--resume torn.pt", "--init-from torn.pt"], []),
    ("torn.pt is refused", ["--resume torn.pt --out run"], []),
    ("has format 6, this code reads format 7: use the", [
        "--init-from six.pt", "--resume six.pt", "--out sixth", "--out sixth --eval-only"], []),
    ("whole.pt has n_layer 2, not 3: for a new run give another --out, without --resume; to go on "
     "drop --n-layer\n", ["--resume whole.pt --n-layer 3"], ["--resume whole.pt"]),
    ("activation gelu, not relu: for ... drop --n-layer, --n-head, --model", [
        "--resume whole.pt --n-layer 3 --n-head 4 --model opt-125m"], ["--resume whole.pt"]),
    ("whole.pt has no n_kv_head; no hidden: for a new run",
     ["--resume whole.pt --model llama-nano"], []),
    ("run/step_00000004.pt has n_layer 2, not 3: for a new run give another --out; to go on drop "
     "--n-layer and give --data /", ["--out run --n-layer 3 --data other"],
     ["--n-layer 3 --data other"]),
    ("/d had, not on that of other=1: for a", ["--resume whole.pt --data other=1"], []),
    ("was trained on the text that ... give another --out, without --resume (--init-from ... "
     "(DIR=0 leaves out a source)", [
         "--resume whole.pt --data other", "--resume whole.pt --data toy"],
     ["--resume whole.pt --data SHARDS=0,other=1", "--data other"]),
    ("4.pt was trained on the text that / ... for a new run give another --out (--init-from ... "
     "begins it with these weights); to go on give --data /", [
         "--out run --data other", "--out run --data toy"],
     ["--data other", "--out run", "--init-from run/step_00000004.pt --data other"]),
    ("seq_len at most 16, not 32: drop --seq-len", ["--init-from whole.pt --seq-len 32"], []),
    ("whole.pt has n_embd 16, not 32: drop --n-embd, or use another checkpoint", [
        "--init-from whole.pt --n-embd 32", "--eval-only --resume whole.pt --n-embd 32"], []),
    ("but opt has opt-257 with 257: make --data", ["--init-from whole.pt --data opt"], []),
    ("cannot be combined with --resume FILE: drop --resume ... or --init-from to branch",
     ["--init-from whole.pt --resume whole.pt"], ["--init-from whole.pt", "--resume whole.pt"]),
    ("did not begin from whole.pt: drop --init-from to go on with that run, or give another --out",
     ["--init-from whole.pt --out run"], ["--out run", "--init-from whole.pt"]),
    ("--resume never, but run holds step_00000004.pt: give another --out",
     ["--resume never --out run"], ["--resume never"]),
    (" is of the run in run: drop --resume to go on with that run, or give another --out to begin",
     ["--resume run/step_00000002.pt --out run", "--resume ./run/step_00000004.pt --out run/."],
     [])]


def world_of(flags):
    """(as many processes as --nproc_per_node says, or tp x pp x cp; the flags without it)"""
    given = re.search(r"--nproc_per_node=(\d+) ?", flags)
    if given:
        return int(given[1]), flags.replace(given[0], "").strip()
    return max(1, math.prod(map(int, re.findall(r"--[tpc]p (\d+)", flags)))), flags


def refusal(shards, flags):
    """What the start of train.py refuses; None if it would begin."""
    world, flags = world_of(flags.replace("SHARDS", str(shards)))
    job = Job(world=world, local_world=world)
    given = ["train.py", "--data", str(shards), "--out", "o", *TINY, *flags.split()]
    try:
        with ExitStack() as stack, mock.patch.object(sys, "argv", given):
            given, device, _ = startup.read_flags(job)
            startup.prepare(given, job, device, stack)
    except (ValueError, OSError, RunError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("message, commands, followed", REFUSED)
def test_a_users_mistake_ends_in_one_line_whose_advice_is_not_refused(
        run_train, shards, things, monkeypatch, message, commands, followed):
    """Each command ends with this message and exit status 2, where the compiler is missing. It
    leaves no file; an older format is never passed over. No message sends to a second error."""
    monkeypatch.chdir(things)
    monkeypatch.setenv("CXX", "no-such-compiler")
    before = names_in(things)
    words = message.split(" ... ")
    for flags in commands:
        world, given = world_of(flags)
        result = run_train("--data", shards, "--out", "o", *TINY, *given.split(" "),
                           WORLD_SIZE=world)
        for part in words:
            expect_mistake(result, part)
        shutil.rmtree("o", ignore_errors=True)
        assert names_in(things) == before and Path("precious").read_text() == "a file"
    for flags in followed:
        assert refusal(shards, flags) is None, flags
        shutil.rmtree("o", ignore_errors=True)


def test_a_tilde_is_the_home_folder_where_no_shell_replaces_it(monkeypatch):
    """bash leaves it as it is in --out=~/run, and in the second part of a mixture."""
    monkeypatch.setenv("HOME", "/home/me")
    given = parse_flags(["--out=~/run", "--data", "/a=1,~/b=2", "--init-from=x~/y.pt"])
    assert given == dict(out="/home/me/run", data="/a=1,/home/me/b=2", init_from="x~/y.pt")
    assert str(data_flags.parse_flags(["--input=~/a.txt", "--out=~/d"]).out) == "/home/me/d"


def differ(rank, world):
    """The exit status of a rank that sees other data than the others."""
    with pytest.raises(RunError, match="not the same") as error:
        processes.assert_equal_across_ranks(rank, "not the same")
    return error.value.status


def test_of_many_ranks_one_tells_the_mistake_and_all_end_alike(run_train, shards, things, tmp_path,
                                                               pool):
    """One line and exit status 2: of rank 0 if all find it in the flags, also before they meet, and
    of rank 1 if it is in its share of the data."""
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    assert pool.run(2, differ) == [2, 2]
    assert run_train(*flags, "--lr", -1, RANK=1, LOCAL_RANK=1, WORLD_SIZE=2) == (2, "", "")
    for more, message in [(["--pp", 2, "--n-layer", 1], "n_layer 1 is less than pp 2"),
                          (["--data", things / "beyond"], "rank 1: ")]:
        first, second = launch(2, *flags, *more)
        expect_mistake(first.finish(), message)
        assert second.finish() == (2, "", "")


@pytest.mark.parametrize("flags, world, expected", [
    ("", 1, dict(micro_batch=4)), ("--tp 2 --pp 2", 8, dict(micro_batch=4)),
    ("", 8, dict(micro_batch=2)), ("--pp=4 --n_layer=4", 8, dict(micro_batch=2)),
    ("--pp 2 --batch-size 5", 2, dict(micro_batch=1)), ("--micro-batch 8", 1, dict(micro_batch=8)),
    ("--batch-size 64 --device cuda", 2, dict(micro_batch=16)),
    ("--batch-size 30 --device cuda", 1, dict(micro_batch=15)),
    ("--batch-size 64 --pp 2 --device cuda", 2, dict(micro_batch=4)),
    ("--model opt-125m --n_layer 3 --dropout 0.3 --init-from a_b", 1,
     dict(asdict(GPTConfig(257, 16, 3, 12, 768, "relu", 0.3)), init_from="a_b")),
    ("--model opt-125m --activation gelu", 1, dict(activation="gelu", n_layer=12, lr=6e-4)),
    ("--model gpt3-1.3b", 1, dict(lr=2e-4)), ("--model gpt2 --lr 1e-3", 1, dict(lr=1e-3)),
    ("--n-layer 12 --n-embd 768", 1, dict(lr=6e-4)),        # by shape, as with --init-from
    ("--n-layer 3", 1, dict(lr=4e-3))])
def test_flags_make_the_model_and_a_microbatch_that_suits_the_layout(shards, flags, world,
                                                                     expected):
    """They also choose a learning rate, that of the papers for --model. Underscores are dashes."""
    given = parse_flags(["--data", str(shards), "--seq_len", "16", *flags.split()])
    config, cfg = checks.validate(given, None, world, given.get("device", "cpu"))
    assert {**asdict(config), **asdict(cfg)}.items() >= expected.items()


def test_layout_precision_and_paths_never_come_from_the_checkpoint():
    """Of a checkpoint in which every flag has a value of its own these are taken, and no others."""
    config, _ = merge_config({}, dict(model=asdict(CFG), config=dict.fromkeys(
        asdict(Config()), "the checkpoint's")))
    assert {name for name, value in asdict(config).items() if value == "the checkpoint's"} == set(
        """model n_layer n_head n_embd seq_len activation n_kv_head head_dim hidden rope_theta
        n_expert n_active shared_hidden balance_loss z_loss balance_bias
        dropout batch_size batch_ramp steps lr
        min_lr_ratio warmup_steps lr_schedule decay_ratio weight_decay beta1 beta2 clip seed
        save_every keep checkpoint_format check_every eval_every eval_tokens rollback
        max_rollbacks skip_steps""".split())


def test_an_exact_run_keeps_its_microbatch(shards, run_train, tmp_path):
    """A resume takes it from the checkpoint, whatever its default would be, and refuses another;
    a run that is not exact takes any."""
    command = ["--data", shards, "--out", tmp_path, *TINY, "--save-every", 0]
    assert run_train(*command, "--exact", "--micro-batch", 1)[0] == 0
    status, _, error = run_train(*command, "--steps", 6, "--exact", "--micro-batch", 2)
    assert status == 2 and "4.pt have 1 sequences: drop --micro-batch 2" in error, error
    status, text, error = run_train(*command, "--steps", 6, "--exact")
    assert status == 0 and "4 microbatches x 1 sequences" in text, error
    assert run_train(*command, "--steps", 8, "--micro-batch", 2)[0] == 0


def test_help_lists_every_flag_with_its_default(run_train):
    """The defaults are those of Config."""
    text = " ".join(run_train("--help")[1].split())
    for name, value in asdict(Config()).items():
        assert f" --{name.replace('_', '-')} " in text
        assert value in (None, False) or re.search(
            rf"\((at least [^()]*, )?default {re.escape(str(value))}\)", text), name


# ---------------------------------------------------------------------------------------------
# Memory: what a rank keeps, and what to do when there is too little
# ---------------------------------------------------------------------------------------------

def test_the_start_prints_the_state_that_a_rank_keeps(run_train, shards, tmp_path):
    """Of 1,682,432 parameters, with the vocabulary padded to 384, 2, 4, 4 and 8 bytes in bf16. And
    whether fp32 is multiplied in TF32, as on CUDA."""
    text = run_train("--data", shards, "--out", tmp_path, *TINY, "--steps", 1, "--n-embd", 256,
                     "--dtype", "bf16")[1]
    assert ("\nmemory   parameters 3.4 MB, gradients 6.7 MB, masters 6.7 MB, moments 13.5 MB "
            "(rank 0)\n") in text and "TF32" not in text
    with mock.patch.object(torch, "get_float32_matmul_precision", lambda: "high"):
        text = run_train("--data", shards, "--out", tmp_path / "fp32", *TINY, "--steps", 1)[1]
    assert "cpu (multiplies fp32 in TF32), fp32" in text


@pytest.mark.parametrize("dp, pp, tp, chunks, n_layer", [
    (1, 1, 1, 1, 3), (2, 3, 2, 1, 7), (3, 2, 4, 2, 9), (2, 4, 1, 1, 4)])
def test_the_parameters_of_a_rank_are_counted_without_building_its_blocks(dp, pp, tp, chunks,
                                                                          n_layer):
    """The counts are those of the stage, on every rank; 10 million layers take no longer."""
    cfg = GPTConfig(50257, n_layer=n_layer)
    for rank in range(dp * pp * tp):
        place = Grid(dp, pp, tp, rank, chunks=chunks)
        specs = param_specs(build_stage(cfg, place), cfg, place)
        sizes = [bucket.numel for bucket in make_buckets(specs, dp)]
        assert rank_parameters(rank_buckets(cfg, place, 1)) == (sum(sizes), max(sizes))
    huge = replace(cfg, n_layer=10 ** 7 * pp * chunks)
    buckets = rank_buckets(huge, Grid(dp, pp, tp, chunks=chunks), 0)
    assert rank_parameters(buckets)[0] > 10 ** 11


def test_too_little_memory_is_one_line_that_says_what_to_lower(shards, things, tmp_path):
    """Exit status 1: training with an exabyte of activations, sampling with one of positions."""
    state = torch.load(things / "whole.pt")
    state["model"]["seq_len"] = 2 ** 54
    for key in checkpoint.STATE:            # on the disk a single number
        state[key]["embed.position.weight"] = torch.zeros(()).expand(2 ** 54, 16)
    torch.save(state, tmp_path / "large.pt")
    most = ["--out", tmp_path, *TINY, "--batch-size", 2 ** 50, "--micro-batch", 2 ** 50]
    for words, file, *flags in [
            ("allocate memory.*; give --recompute, a smaller --micro-batch, a higher --zero, or "
             "--tp, --pp or --cp on more processes", "train.py", "--data", shards, *most),
            ("allocate memory.* --device cpu", "sample.py", "--ckpt", tmp_path / "large.pt")]:
        status, _, error = Command(file, *flags).finish()
        assert status == 1 and re.fullmatch(rf"{file}: .*{words}.*\n", error), error


# ---------------------------------------------------------------------------------------------
# Devices, and machines that lack something
# ---------------------------------------------------------------------------------------------

def test_mps_is_for_one_process_without_float64(run_train, shards, tmp_path, monkeypatch):
    """By name it is refused for two processes and in fp64; by itself a run in fp64 is on the CPU.
    (There sums are in fp32, and the generator of dropout is its own.)"""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    for more, world in ((["--dtype", "fp64"], 1), ([], 2)):
        expect_mistake(run_train(*flags, "--device", "mps", *more, WORLD_SIZE=world),
                       "--device mps is for one process, and not for fp64 or --exact: give")
    assert ", cpu, fp64" in run_train(*flags, "--dtype", "fp64")[1]
    assert collectives.sum_dtype(torch.device("mps")) == torch.float32
    with mock.patch.object(torch.mps, "manual_seed") as manual_seed:
        model.seed_dropout(torch.device("mps"), 1, "embed")
    manual_seed.assert_called_once_with(model.derive_seed(1, "embed"))


@pytest.mark.parametrize("command", [
    ["train.py"], ["data.py"], ["sample.py", "--prompt", "x"], ["-m", "tools.plan", "--help"],
    ["-m", "tools.huggingface", "export", "a.pt", "b"], ["-m", "tools.compare", "out"]])
def test_a_python_without_the_packages_names_the_environment(command):
    """As the system's: -S leaves out what pip has installed."""
    done = subprocess.run([sys.executable, "-S", *command], cwd=ROOT, capture_output=True,
                          text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert ". .venv/bin/activate" in done.stderr and "-r requirements.txt" in done.stderr
    assert "numpy" in done.stderr and ("torch" in done.stderr) == (command != ["data.py"])
    assert ("tiktoken" in done.stderr) == (command[0] in ("data.py", "sample.py"))


def test_one_process_needs_no_posix(shards, tmp_path):
    """Without what Windows lacks a run trains, saves, goes on and is sampled; train.py needs torch
    and numpy alone."""
    (tmp_path / "windows.py").write_text(f"""
import os, runpy, sys, torch
def open_file(path, *arguments, open=os.open, **options):
    if os.path.isdir(path):
        raise PermissionError(path)
    return open(path, *arguments, **options)
os.open = open_file
torch.set_num_threads(2)
del os.sysconf, os.getloadavg, os.O_DIRECTORY, os.fork
sys.modules.update(dict.fromkeys(["fcntl", "resource", "termios", "pwd", "grp"]))
if sys.argv[1] == "train.py":
    sys.modules.update(requests=None, tiktoken=None)
for name in ("model", "data", "amp", "parallel", "checkpoint", "train", "sample"):
    sys.modules.pop(name, None)
runpy.run_path({str(ROOT)!r} + "/" + sys.argv.pop(1), run_name="__main__")
""")
    for words, *command in [("Now sample", "train.py", "--data", shards, *TINY, "--steps", 2),
                            ("Now sample", "train.py", "--data", shards, *TINY),
                            ("\n", "sample.py", "--max-tokens", 5)]:
        status, text, error = Command(tmp_path / "windows.py", *command, cwd=tmp_path).finish()
        assert (status, error) == (0, "") and words in text, error


def test_a_run_that_was_all_warm_up_is_prolonged_without_a_word_of_it(run_train, shards, tmp_path):
    """Its last step had the peak rate, and the next one has 0.875 of it."""
    flags = ["--data", shards, "--out", tmp_path]
    run_train(*flags, *TINY, "--warmup-steps", 4, "--min-lr-ratio", 0.5)
    text = run_train(*flags, "--steps", 7)[1]
    assert "steps 7 instead of 4" in text and "rate is" not in text


def test_exact_says_what_it_costs_where_a_run_begins(run_train, shards, tmp_path):
    text = run_train("--data", shards, "--out", tmp_path, *TINY, "--exact")[1]
    assert "note     with --exact a step takes 1.3 to 2.5 times as long, " in text
    assert text.count("with --exact") == 1 and "18 times: here they have 1 (--micro-batch)" in text


@pytest.mark.parametrize("missing, flags, told", [
    ([torch.bfloat16], "", False), ([], "--dtype bf16", False),
    ([torch.bfloat16], "--dtype bf16", True)])
def test_a_type_without_instructions_is_told(run_train, shards, tmp_path, missing, flags, told):
    with mock.patch.object(kernels, "NO_PRODUCTS", missing):
        text = run_train("--data", shards, "--out", tmp_path, *TINY, *flags.split())[1]
    assert ("cpu (multiplies bf16 in fp32), bf16" in text) == told


@pytest.mark.parametrize("gpus, mps, count, picked", [
    (2, True, 2, "cuda:1"), (1, False, 2, "cuda:0"),                # one each, as srun may show it
    (1, True, 1, "cuda:0"), (0, True, 1, "mps"), (0, True, 2, "cpu"), (0, False, 1, "cpu")])
def test_each_process_has_a_device_of_its_own(gpus, mps, count, picked):
    """Serves --device auto: the device of the last process. Two with the same GPU are refused."""
    with mock.patch.multiple(torch.cuda, is_available=lambda: gpus > 0, set_device=nothing,
                             device_count=lambda: gpus, get_device_properties=mock.Mock()), \
            mock.patch.object(torch.backends.mps, "is_available", lambda: mps):
        with mock.patch.object(torch, "set_float32_matmul_precision") as set_precision:
            device = devices.pick_device("auto", count - 1, count == 1)
            assert not set_precision.called         # that is the training program's decision
            devices.choose_device(Config(), Job(0, count, count - 1))
        assert set_precision.mock_calls == [mock.call("high")] * (device.type == "cuda")
        assert str(device) == picked and devices.pick_device("cpu").type == "cpu"
        for other, refused in (("another", False), (None, device.type == "cuda")):
            with mock.patch.object(devices, "all_gather_object", lambda x: [x, other or x]), \
                    pytest.raises(RunError, match="but 1 CUDA") if refused else nullcontext():
                devices.assert_own_gpu(device)


# ---------------------------------------------------------------------------------------------
# The run's directory, its metrics and the console
# ---------------------------------------------------------------------------------------------

def test_metrics_are_whole_lines_of_valid_json_whatever_happens(tmp_path, capsys, monkeypatch):
    """A value that is not finite is null; a line torn at any byte is removed at the next start; a
    disk that is full at any byte costs the line, and not the run."""
    monkeypatch.setattr(time, "time", lambda: 1795350923.9721)
    path = tmp_path / "metrics.jsonl"
    row = dict(step=1, loss=math.nan, grad_norm=math.inf)
    directory.Metrics(tmp_path, 0).write(**row)
    written = dict(step=1, loss=None, grad_norm=None, time=1795350923.972)
    assert read_metrics(tmp_path) == ([written], [])
    one = path.read_bytes()
    for torn in range(len(one)):
        path.write_bytes(one + one[:torn])
        metrics = directory.Metrics(tmp_path, 0)
        assert path.read_bytes() == one
        with no_file_above(len(one) + torn):
            metrics.write(**row)
        assert f"{path} lacks a line: " in capsys.readouterr().err and path.read_bytes() == one
    shutil.rmtree(tmp_path)
    metrics.write(**row)
    assert path.read_bytes() == one


@pytest.mark.parametrize("number, told", [(errno.ENOSYS, True), (errno.EOPNOTSUPP, True),
                                          (errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, capsys, number, told):
    """As Lustre without the option flock, or some of NFS. Another error is none of that."""
    with mock.patch.object(fcntl, "flock", side_effect=OSError(number, "the reason")):
        with nullcontext() if told else pytest.raises(OSError, match="written and locked"):
            with directory.lock_output_dir(tmp_path):
                pass
    error = f"train.py: warning: the file system of {tmp_path} has no locks (the reason): see that"
    assert capsys.readouterr().err.startswith(error) == told


@pytest.mark.parametrize("flags, seconds, lines", [
    ({}, 0.1, [1, *range(20, 1001, 20)]), ({}, 1 / 128, [1, *range(140, 1001, 140), 1000]),
    (dict(steps=5), 0.1, [1, 5]), (dict(steps=5), 2, [1, 2, 3, 4, 5]),
    (dict(eval_every=100), 0.001, [1, *range(100, 1001, 100)]),
    (dict(log_every=300), 0.001, [300, 600, 900, 1000])])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_long_run_prints_fifty_lines_and_at_most_one_a_second(monkeypatch, capsys, on_terminal,
                                                                flags, seconds, lines):
    """Evaluations are told beside these. A terminal shows each second how far the run has come, in
    a line that is replaced; a file never has one."""
    config = Config(**dict(steps=1000, eval_every=0) | flags)
    log = run_log.RunLog(SimpleNamespace(write=nothing))
    log.on_terminal = on_terminal
    log.recent_seconds.append(seconds)
    run = SimpleNamespace(config=config, device=torch.device("cpu"), val_data=Memory(CFG),
                          model_config=CFG, batches=SimpleNamespace(sequences_trained=0))
    row = dict(loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, skipped=0)
    for step in range(1, config.steps + 1):
        monkeypatch.setattr(run_log.time, "monotonic", lambda: step * seconds)
        log.print_step(run, row | dict(step=step))
    text = capsys.readouterr().out
    replaced = re.findall(r"step \d+/\d+  loss 1.0000  left [\d:]+\x1b\[K\r", text)
    printed = re.sub(r"step \d+/\d+  loss 1.0000  left [\d:]+\x1b\[K\r", "", text).splitlines()
    assert [int(re.match(r"step +(\d+)/", line)[1]) for line in printed] == lines
    assert len(replaced) <= 1 + config.steps * seconds
    if not on_terminal:
        assert not replaced
    elif seconds == 0.1 and config.steps == 1000:
        assert len(replaced) > 40           # of 100 seconds, beside 51 lines


def test_none_unsets_a_stored_ramp_and_skip_and_the_console_shows_every_nth_step(run_train, things,
                                                                                 tmp_path):
    """--batch-ramp none and --skip-steps none, at a resume. With --log-every 3 metrics.jsonl still
    has a row for every step. There is no sample.py for tokens that it cannot decode."""
    flags = ["--data", things / "opt", "--out", tmp_path, *TINY, "--eval-every", 0]
    text = run_train(*flags, "--batch-ramp", "2:2:40", "--skip-steps", "3:3")[1]
    assert "sample.py" not in text and "sequences 4 to 5 are left out" in text
    stored = saved(tmp_path, 4)["config"]
    assert (stored["batch_ramp"], stored["skip_steps"]) == ("2:2:40", "3:3")
    expect_mistake(run_train(*flags, "--batch-size", 3), "--batch-ramp 2:2:40 does not end at "
                   "--batch-size 3: START and INCREMENTs must add up to it (none: no ramp)")
    text = run_train(*flags, "--batch-ramp", "none", "--skip-steps", "none", "--steps", 9,
                     "--log-every", 3)[1]
    assert re.findall(r"^step (\d)/9", text, re.MULTILINE) == ["6", "9"]
    assert column(read_metrics(tmp_path)[0], "step") == [*range(1, 10)]
    stored = saved(tmp_path, 9)["config"]
    assert (stored["batch_ramp"], stored["skip_steps"]) == (None, None)


STORIES = {     # shell commands, or: job of torchrun, flags of train.py, exit status, what it says
    "resume never, resume auto": [
        ("A", "--out 'my run' --resume never", 0, r"\npython sample.py --ckpt 'my run/latest.pt'$"),
        ("", "--out 'my run' --resume never", 2, "--resume never, but my run holds"),
        ("B", "--out 'my run' --resume never", 2, "--resume never, but my run holds"),
        ("B", "--out 'my run' --resume never", 2, "--resume never, but my run holds"),
        ("A", "--out 'my run' --resume never", 0, "nothing left"),
        "truncate -s 1000 'my run/step_00000004.pt'",           # latest.pt is the same file
        ("", "--out 'my run'", 0, "/step_00000004.pt is damaged.*after step 2"),
        "grep 'event.*damaged' 'my run/metrics.jsonl'",
        "truncate -s 9 'my run'/*.pt",
        ("", "--out 'my run'", 1, "is whole")],
    "resume FILE, killed and started again": [
        "cp -r base copy",
        ("", "--out new --resume base/step_00000002.pt --lr 0.5", 9, "base/step_00000002.pt, "),
        ("A", "--out new --resume base/step_00000002.pt --steps 6 --eval-every 6", 9, "step 2"),
        ("A", "--out new --resume base/step_00000002.pt --steps 6", 0, "new/.*after step 4"),
        ("", "--out new --resume base/step_00000002.pt --lr 0.1", 0, "nothing left to do"),
        "diff -r base copy && rm -r base",
        ("", "--out new --resume base/step_00000002.pt --steps 7", 2, "drop --resume to go on"),
        ("A", "--out new --resume base/step_00000002.pt --steps 7", 0, "after step 6")],
    "resume FILE by other paths": [
        ("", "--out new --keep 1 --resume base/step_00000002.pt", 0, ""),
        "ln -s base/step_00000002.pt link.pt",
        "mv base/step_00000004.pt base/step_00000003.pt",       # a name says nothing
        ("", "--out ./new --keep 1 --resume link.pt --steps 5", 0, "after step 4"),
        "rm link.pt && mv base old",
        ("", "--out old/../new --keep 1 --resume ./old/step_00000002.pt --steps 6", 0, "step 5"),
        ("", "--out new --resume old/step_00000003.pt", 2,
         "new holds a run that did not begin from old/step_00000003.pt: drop"),
        "rm -r old && mv new newer",
        "truncate -s 1000 newer/step_00000006.pt",              # it keeps its own first file
        ("", "--out newer", 0, "6.pt is damaged.*newer/step_00000002.pt, after step 2")],
    "init-from FILE": [
        ("", "--out new --init-from base/step_00000004.pt", 0, "weights  from base/"),
        "mv base old",
        ("A", "--out new --init-from ./old/step_00000004.pt --steps 5", 0, "after step 4"),
        "rm -r old",
        ("", "--out new --init-from old/step_00000004.pt --steps 6", 2, "drop --init-from to"),
        ("A", "--out new --init-from old/step_00000004.pt --steps 6", 0, "after step 5"),
        ("", "--out new --steps 7", 0, "after step 6")]}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_where_a_run_begins(run_train, shards, tmp_path, monkeypatch, torchrun_job, story):
    """An --out with checkpoints goes on from its newest whole one, and keeps its id; if not, a run
    begins from FILE or the seed. FILE is known by its run and step, and not by its path; it need
    not exist when a torchrun starts its group again. A refusal changes no file. Status 9: killed in
    the first evaluation."""
    monkeypatch.chdir(tmp_path)
    run_train("--data", shards, "--out", "base", *TINY)
    base = saved(Path("base"), 4)["run"]["id"]
    jobs = {"": {}, "A": torchrun_job(), "B": torchrun_job()}
    ids = set()
    for line in story:
        if isinstance(line, str):
            subprocess.run(line, shell=True, check=True)
            continue
        job, flags, status, words = line
        given = shlex.split(flags)
        before = contents(tmp_path)
        killed = mock.patch.object(evaluation, "evaluate_source", side_effect=SystemExit(9))
        with killed if status == 9 else nullcontext():
            found, out, error = run_train("--data", shards, *TINY, *given, **jobs[job])
        assert found == status, (line, out, error)
        assert re.search(words, error + out.strip(), re.S), (line, out, error)
        if status == 2:
            assert contents(tmp_path) == before and error.count("\n") == 1
        if status in (0, 9):
            ids.add(torch.load(Path(given[1], "latest.pt"))["run"]["id"])
    assert len(ids - {base}) == 1


def test_resume_takes_the_command_line_then_the_checkpoint_then_the_default(run_train, shards,
                                                                            tmp_path):
    """The console and an event say what that changes. metrics.jsonl has a row for every step. Old
    losses are forgotten where a longer schedule may raise a healthy loss; a much higher --lr is
    not trusted so far."""
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out]
    for more, words, losses in [
            ([*TINY, "--lr", 0.01, "--lr-schedule", "linear", "--beta2", 0.9], "step", 4),
            ([], "nothing left to do; raise", 4),               # --steps 4 is in the checkpoint
            (["--seed", 5, "--beta2", 0.8], "nothing left to do (beta2 0.8 instead of 0.9; seed 5 "
             "instead of 1337: not used); raise", 4),
            (["--steps", 8], "steps 8 instead of 4; so the next step's learning rate is 5.50e-03 "
                             "instead of 1.00e-03", 4),
            (["--steps", 10, "--lr", 0.1, "--batch-size", 2, "--dtype", "fp64"],
             "lr 0.1 instead of 0.01, dtype fp64 instead of fp32", 6)]:
        status, text, _ = run_train(*flags, *more)
        assert status == 0 and words in text
        assert len(checkpoint.load(out / "latest.pt")["monitor"]["losses"]) == losses
    expect_mistake(run_train(*flags, "--steps", 12, "--seed", 5), "in the order of seed 1337; in ")
    branch = run_train("--data", shards, "--out", tmp_path / "p", "--resume", out / "latest.pt")
    assert branch[1].endswith("10 of 10: nothing left to do; raise --steps or --epochs\n")
    rows, events = read_metrics(out)
    assert column(rows, "step") == [*range(1, 11)]
    assert ["val_loss" in row for row in rows] == [False, True] * 5
    assert all(row["loss_scale"] == 1.0 and len(repr(row["loss"])) > 8 for row in rows)
    assert kinds(events) == ["start", "end", "resume", "end", "resume", "end"]
    assert column(events, "step") == [0, 4, 4, 8, 8, 10]
    resume = events[2]
    assert resume["path"].endswith("step_00000004.pt") and resume["config"]["beta2"] == 0.9
    assert resume["environment"]["hosts"] == [socket.gethostname()]
    assert resume["given"] == dict(data=str(shards), out=str(out), steps=8)
    assert [rows[4]["lr"], rows[8]["lr"]] == pytest.approx([5.5e-3, 0.1 * (0.1 + 0.9 / 8)])
    state = saved(out, 10)
    assert state["consumed_samples"] == 8 * 4 + 2 * 2       # read on where the file of step 8 ended
    assert {"beta2": 0.9, "lr": 0.1, "steps": 10, "clip": 1.0}.items() <= state["config"].items()


def test_the_sample_of_an_evaluation_belongs_to_the_run(run_train, shards, tmp_path):
    """--eval-tokens holds after a resume without it, also in a branch and from the file of an older
    version; another value is told. With --eval-only all is read, unless the flag stands there."""
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out]

    def read(text):
        return re.findall(r"\(on ([\d,]+) of", text)
    first = run_train(*flags, *TINY, "--eval-tokens", 100)[1]
    assert read(first) == ["112", "112"]
    text = run_train(*flags, "--steps", 6)[1]
    assert read(text) == ["112"] and "eval tokens" not in text
    text = run_train(*flags, "--steps", 8, "--eval-tokens", 320)[1]
    assert read(text) == ["320"] and "eval tokens 320 instead of 100" in text
    branch = ["--data", shards, "--out", tmp_path / "p", "--resume", out / "latest.pt"]
    assert read(run_train(*branch, "--steps", 10)[1]) == ["320"]
    assert read(run_train(*flags, "--eval-only")[1]) == ["3,680"]
    assert read(run_train(*flags, "--eval-only", "--eval-tokens", 32)[1]) == ["32"]
    fresh = ["--data", shards, "--out", tmp_path / "q", "--init-from", out / "latest.pt"]
    assert read(run_train(*fresh, "--steps", 1)[1]) == ["2,048"]
    plain = ["--data", shards, "--out", tmp_path / "q", "--steps", 2, "--eval-tokens", 16]
    assert "eval tokens 16 instead of the default" in run_train(*plain)[1]
    samples = [event["data"]["sources"]["d"]["sequences"] for event in read_metrics(out)[1]
               if "data" in event]
    assert samples == [7, 7, 20]


def test_bits_per_byte_are_in_the_row_of_an_evaluation_as_on_the_console(run_train, two_sources,
                                                                         tmp_path, monkeypatch):
    """Of a mixture (mean loss) / ln 2 / (mean bytes per token), by weight, and of each source. The
    lines are a table. A resume with other weights says so in its event, too."""
    monkeypatch.chdir(two_sources)
    flags = ["--out", tmp_path, *TINY, "--eval-every", 4]
    text = run_train("--data", "a=3,b=1", *flags)[1]
    _, row = read_metrics(tmp_path)[0][2:]
    metas = [json.loads(Path(name, "meta.json").read_text()) for name in "ab"]
    a, b = (meta["bytes_per_token"] for meta in metas)
    assert a != b
    for key, size in [("", (3 * a + b) / 4), ("/a", a), ("/b", b)]:
        bits = row["val_loss" + key] / math.log(2) / size
        assert row["bits_per_byte" + key] == pytest.approx(bits, rel=1e-12)
        assert f" {bits:.4f} bits a byte" in text
    table = re.findall(r"^(?:validation|  [ab]):.*", text, re.M)
    assert len(table) == 3
    for word in ("nats a token", "perplexity", "bits a byte"):
        assert len({line.index(word) for line in table}) == 1, table
    text = run_train("--data", "a=3,b=1", *flags, "--eval-only")[1]
    assert "on a=3,b=1:\nvalidation: " in text
    run_train("--data", "a=1,b=1", *flags, "--steps", 5)
    start, _, resume, _ = read_metrics(tmp_path)[1]
    for event, weights in [(start, (3, 1)), (resume, (1, 1))]:
        told = event["data"]
        assert (told["tokenizer"], told["vocab_size"], told["seq_len"]) == ("bytes", 257, 16)
        for (name, source), weight, meta in zip(told["sources"].items(), weights, metas):
            assert source["weight"] == weight and source["fingerprint"] == meta["fingerprint"]
            assert source["bytes_per_token"] == meta["bytes_per_token"], name
    few = data.TokenDataset("a", "val", 16).n_windows
    assert [source["sequences"] for source in told["sources"].values()] == [few, 4]
    fingerprints = [source["val_fingerprint"] for source in told["sources"].values()]
    assert len(set(fingerprints)) == 2
    assert fingerprints == [x["val_fingerprint"] for x in start["data"]["sources"].values()]


def test_without_meta_json_there_are_no_bits_per_byte(run_train, tmp_path):
    """And what is validated is known by the tokens of its own shards, not by those to train on."""
    for name, extra in (("one", 0), ("two", 50)):
        dataset(tmp_path / name, dict(train_0=np.arange(900 + extra) % 99, val_0=range(99)))
        (tmp_path / name / "meta.json").unlink()
        text = run_train("--data", tmp_path / name, "--out", tmp_path / "o" / name, *TINY)[1]
        assert "bits a byte" not in text and re.search(r"perplexity \S+ \(", text)
    rows, events = zip(*(read_metrics(tmp_path / "o" / name) for name in ("one", "two")))
    assert rows[0][-1]["bits_per_byte"] is None
    one, two = (list(found[0]["data"]["sources"].values())[0] for found in events)
    assert one["fingerprint"] != two["fingerprint"]
    assert one["val_fingerprint"] == two["val_fingerprint"] and one["val_tokens"] == 99


def test_init_from_takes_a_checkpoints_weights_and_nothing_else(run_train, two_sources, things,
                                                                tmp_path):
    """From step 0 with its own flags, and with a file to roll back to."""
    base = things / "whole.pt"
    run_train("--data", two_sources / "b", "--out", tmp_path, "--init-from", base, "--steps", 1,
              "--lr", 0, "--warmup-steps", 2, "--seq-len", 8, "--batch-size", 8, "--dropout", 0.1)
    one = torch.load(base)
    two = saved(tmp_path, 1)
    for name, full in one["parameters"].items():
        assert full[:len(two["parameters"][name])].equal(two["parameters"][name]), name
    assert two["parameters"]["embed.position.weight"].shape == (8, 16)
    assert (two["optimizer_steps"], two["consumed_samples"], two["model"]["dropout"]) == (1, 8, 0.1)
    assert len(two["monitor"]["losses"]) == 1
    assert two["monitor"]["checkpoints"][0] == [0, "step_00000000.pt", True]
    assert two["run"]["origin"] == ["init-from", one["run"]["id"], 4]


def test_eval_only_tells_the_loss_in_any_layout_on_any_data_and_trains_nothing(
        run_train, shards, things, two_sources, tmp_path, monkeypatch):
    """The losses that the run had, of its newest file or a FILE, whatever --out is, also of weights
    alone. Without --eval-tokens it reads all windows. No file changes. Other data must be given:
    the default is refused, as it is to go on."""
    out = things / "run"
    before = contents(out)
    middle, end = (f" {row['val_loss']:.4f} nats a" for row in read_metrics(out)[0][1::2])
    weights = tmp_path / "weights.pt"
    torch.save({**torch.load(things / "whole.pt"), "exp_avg": {}, "exp_avg_sq": {}, "scaler": {},
                "monitor": {}, "data": None, "config": {}}, weights)
    flags = ["--data", shards, "--out", out, "--eval-only"]
    as_before = [*flags, "--eval-tokens", 64]
    older = ["--resume", out / "step_00000002.pt"]
    for more, words in [(older, middle), ([], end), (["--micro-batch", 3], end),
                        ([*older, "--out", things / "precious"], middle),
                        ([*older, "--out", out / "nothing"], middle)]:
        status, text, _ = run_train(*as_before, *more)
        assert status == 0 and words in text and "bits a byte (on 64 of " in text
    for more, words in [([], "(on 3,680 of 3,695 "), (["--data", two_sources / "a"], "nats")]:
        _, text, error = run_train(*flags, *more)
        assert words in text and end not in text
        assert (f"was trained on the text that {shards} had, " in error) == (more != []), error
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two_sources / "a", "data/python")
    for more, advice in [(["--eval-only"], f"give --data {shards} or --data data/python"),
                         ([], "for a new run give another --out (--init-from")]:
        expect_mistake(run_train("--out", out, *more),
                       f"{out / 'step_00000004.pt'} was trained on the text that {shards} had, not "
                       f"on that of data/python (the default: --data was left out): {advice}")
    for world, kind, file, *layout in [(2, "--resume", out / "step_00000004.pt", "--zero", 3),
                                       (4, "--init-from", weights, "--tp", 2, "--pp", 2)]:
        first, *_ = launch(world, *as_before, *layout, kind, file)
        assert f"{file}, step 4, on {shards}: validation:{end}" in first.finish()[1]
    assert contents(out) == before


def test_a_run_goes_on_with_a_mixture_and_tells_of_other_weights(run_train, two_sources, tmp_path,
                                                                 monkeypatch):
    """From the file of step 4, after 32 sequences. The same weights in other words end bit-equal to
    the straight run; others are told, hold from there on, and the monitor forgets the losses."""
    monkeypatch.chdir(two_sources)
    a, b = data.TokenDataset("a=1,b=1", "train", 16).mixture.sources
    flags = [*TINY, "--batch-size", 8, "--steps", 10, "--save-every", 4]
    for first, then, weights in [
            ("a=0.7,b=0.3", "b=3,a=7", None), ("a", "a=0.5", None),
            ("a=0.7,b=0.3", "a=1,b=1", {a: 1, b: 1}), ("a", "b=3,a=1", {a: 1, b: 3})]:
        straight, out = tmp_path / first, tmp_path / then
        out.mkdir()
        run_train("--data", first, "--out", straight, *flags)
        shutil.copy(straight / "step_00000004.pt", out)
        text = run_train("--data", then, "--out", out, *flags)[1]
        changed = read_metrics(out)[1][0]["changed"]
        whole, end = saved(straight, 10), saved(out, 10)
        if weights is None:
            assert "instead of" not in text and changed == {}
            assert_same_state(end, whole)
        else:
            assert f"data {then} instead of" in text and changed == dict(data=[first, then])
            assert end["data"] == [*whole["data"], [32, weights]]
            assert (len(whole["monitor"]["losses"]), len(end["monitor"]["losses"])) == (10, 6)
            again = tmp_path / f"again {then}"              # a resume does not forget them again
            again.mkdir()
            shutil.copy(out / "step_00000008.pt", again)
            run_train("--data", then, "--out", again, *flags)
            assert len(saved(again, 10)["monitor"]["losses"]) == 6
    expect_mistake(run_train("--data", "a", "--out", out, *flags),
                   "the text that b=3,a=1 had, not on that of a: ")
    assert run_train("--data", "a=1,b=0", "--out", out, *flags, "--steps", 11)[0] == 0
    assert saved(out, 11)["data"][-1] == [80, {a: 1, b: 0}]
    meta = two_sources / "b" / "meta.json"
    whole = meta.read_text()
    meta.write_text(whole.replace(b, "other"))
    expect_mistake(run_train("--data", "a=1,b=0", "--out", out, *flags, "--steps", 12),
                   "was trained on the text that a=1,b=0 had, not on that of a=1,b=0: for")
    meta.write_text(whole)
    branch = ["--resume", straight / "step_00000004.pt", "--out", tmp_path / "branch"]
    for weight, words in [(3, "after step 4"), (3, "nothing left"), (5, "nothing left")]:
        assert words in run_train("--data", f"a={weight},b=1", *branch, *flags)[1]


@pytest.mark.parametrize("meta, is_told", [
    (dict(tokenizer="bytes"), True), (dict(tokenizer="cl100k_base"), True),
    (dict(tokenizer="json-1", tokenizer_file="{}"), True), (dict(tokenizer="opt-50272"), False)])
def test_the_end_names_sample_py_where_it_has_the_tokenizer(capsys, meta, is_told):
    run = SimpleNamespace(log=mock.Mock(), train_data=SimpleNamespace(meta=meta), config=Config())
    console.report_end(run)
    assert ("python sample.py --ckpt out/latest.pt" in capsys.readouterr().out) == is_told


def test_the_console_tells_what_is_left_the_loss_in_three_units_and_mfu(tmp_path, capsys,
                                                                        monkeypatch):
    """Of steps of 40 seconds; an evaluation of 1000 counts, a save does not. A line is that of the
    README. Of a GPU whose peak is known the fraction used is told."""
    now = [0]

    def takes(seconds, result=None):
        now[0] += seconds
        return result

    def prepare(run):
        monkeypatch.setattr(evaluation, "evaluate_source",
                            lambda *_: takes(1000, 2 * math.log(2)))
        run.writer.submit = lambda *_: takes(1000)
        run.val_data.meta["bytes_per_token"] = 4.0
    with mock.patch.object(time, "perf_counter", lambda: takes(40, now[0])), \
            mock.patch.object(time, "monotonic", lambda: now[0]):
        rows = watched(settings(tmp_path, steps=3, save_every=1, eval_every=2, log_every=1),
                       prepare).rows
    evaluates = "evaluate on 208 of 209 tokens"
    evaluated = ("validation: 1.3863 nats a token, perplexity 4.00, 0.5000 bits a byte (on 208 of "
                 "209 tokens)")
    assert [line.split("left ")[-1] for line in capsys.readouterr().out.splitlines()[:7]] == [
        "0:02:03", "0:01:23", evaluates, evaluated, "0:16:40", evaluates, evaluated]
    assert column(rows, "tokens_per_second") == [8 * 16 / 40] * 3
    run = SimpleNamespace(config=Config(), model_config=CFG, val_data=Memory(CFG),
                          grid=Grid(dp=2, pp=1, tp=1), device=torch.device("cpu"))
    assert "perplexity inf" in run_log.format_eval(dict(val_loss=1e3), run)
    row = dict(rows[0], loss=5.28014, lr=8e-5, grad_norm=7.9496, activation_norm=0.9251,
               tokens_per_second=7133.0)
    assert run_log.format_step(run, row, timedelta(seconds=229)) in README.splitlines()
    used = f"MFU {1e9 * flops_per_token(CFG) / (2 * 756e12):.1%}"
    for name, dtype, left, told in [("NVIDIA H100 PCIe", "bf16", 1838, f"{used}  left 0:30:38"),
                                    ("NVIDIA H100 PCIe", "fp32", 9588, "tok/s  left 2:39:48"),
                                    ("GeForce GTX 1080", "fp16", 799, "scale 8  left 0:13:19")]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        run.device = torch.device("cuda")
        run.config = Config(dtype=dtype)
        row |= dict(tokens_per_second=1e9, loss_scale=8.0)
        assert run_log.format_step(run, row, timedelta(seconds=left)).endswith(told)


def test_the_time_left_counts_the_sequences_of_a_ramp_and_the_evaluations():
    """A sequence takes 3 s. After step 1 of 10 five evaluations follow, of 128 sequences and a third
    of the time each; after step 4 four, which took 100 s, or three if its own was first."""
    config = Config(steps=10, batch_size=8, batch_ramp="4:2:16", eval_every=2)
    log = run_log.RunLog(SimpleNamespace(write=nothing))
    log.recent_seconds.append(3.0)
    run = SimpleNamespace(config=config, model_config=CFG, val_data=Memory(CFG), batches=None)

    def left(step, trained, **evaluated):
        run.batches = SimpleNamespace(sequences_trained=trained)
        return log.time_left(run, dict(step=step, **evaluated)).total_seconds()
    sizes = []
    for _ in range(10):
        sizes.append(batch_size_at(config, sum(sizes)))
    assert sizes[0] < sizes[-1]
    assert left(1, sizes[0]) == 3 * sum(sizes[1:]) + 5 * 128
    log.evaluation_seconds = 100.0
    assert left(4, sum(sizes[:4])) == 3 * sum(sizes[4:]) + 400
    assert left(4, sum(sizes[:4]), val_loss=2.0) == 3 * sum(sizes[4:]) + 300
    assert left(10, sum(sizes)) == 100 and left(10, sum(sizes), val_loss=2.0) == 0


@pytest.mark.parametrize("layout, flags", [
    ((2, 1, 2), {}), ((1, 2, 1), dict(cp=2, sequence_parallel=True))])
def test_the_activation_norm_is_that_of_the_plain_model(pool, tmp_path, layout, flags):
    """The mean norm of the last activations in each step, to 1e-5 in fp32."""
    cfg = replace(CFG, n_layer=2)
    rows, *_ = trained(pool, layout, tmp_path, cfg, steps=2, lr=0.0, eval_every=1, **flags)
    norms = []
    plain = GPT(cfg).initialize(1337)
    plain.head.register_forward_pre_hook(
        lambda module, args: norms.append(args[0].norm(dim=-1).mean().item()))
    memory = Memory(CFG)
    for first in (0, 8):
        windows = memory.tokens_of(memory.window_ids(1337, first, 8))
        plain(torch.from_numpy(windows)[:, :-1])
    assert column(rows, "activation_norm") == pytest.approx(norms, rel=1e-5)


PEAKS = {       # TFLOP/s of what torch.cuda.get_device_name() reports; 0: unknown
    "Tesla V100-SXM2-16GB": 125, "Tesla V100-SXM3-32GB": 125, "Tesla V100-PCIE-32GB": 112,
    "Tesla V100-DGXS-32GB": 125, "Tesla V100S-PCIE-32GB": 130,
    "NVIDIA A100-SXM4-80GB": 312, "A100-SXM4-40GB": 312, "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-PCIE-40GB": 312, "NVIDIA A800-SXM4-80GB": 312, "NVIDIA A800 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835,
    "NVIDIA H800": 989, "NVIDIA H800 PCIe": 756, "NVIDIA H20": 148, "NVIDIA H20-3e": 148,
    "NVIDIA H200": 989, "NVIDIA H200 NVL": 835.5, "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 144G HBM3e": 989, "NVIDIA GB200": 2500, "NVIDIA B200": 2250,
    "NVIDIA B300 SXM6 AC": 2250, "NVIDIA GB300": 2500, "NVIDIA GB10": 0,
    "NVIDIA A10": 125, "NVIDIA A10G": 70, "NVIDIA A30": 165, "NVIDIA A40": 149.7,
    "NVIDIA L4": 121, "NVIDIA L40": 181, "NVIDIA L40S": 362, "Tesla T4": 65, "Tesla T40 24GB": 0,
    "NVIDIA RTX A6000": 154.8, "NVIDIA RTX 6000 Ada Generation": 364.2, "Quadro RTX 6000": 0,
    "NVIDIA GeForce RTX 3080": 59.5, "NVIDIA GeForce RTX 3080 Ti": 0, "GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 3090 Ti": 80, "NVIDIA GeForce RTX 4080": 97.5,
    "NVIDIA GeForce RTX 4080 SUPER": 0, "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1, "NVIDIA GeForce RTX 4090 Laptop GPU": 0,
    "NVIDIA GeForce RTX 5080": 112.6, "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 5090 Laptop GPU": 0, "NVIDIA GeForce RTX 5090 D": 0,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": 0, "NVIDIA H100 80GB HBM3 MIG 3g.40gb": 0,
    "Tesla P100-PCIE-16GB": 0, "NVIDIA A100X": 0, "NVIDIA TITAN V": 0, "": 0,
    "AMD Instinct MI250X": 191.5, "AMD Instinct MI300X": 1307.4, "AMD Instinct MI300A": 0}


@pytest.mark.parametrize("name", PEAKS)
def test_a_devices_peak_is_that_of_its_full_name(name):
    """The dense 16-bit TFLOP/s of the maker's data sheet, which the MFU divides by. Parts of a
    device, slower editions and unknown devices have no peak rather than another's."""
    assert peak_flops(name) == PEAKS[name] * 1e12


def test_a_branch_has_the_whole_state_but_a_new_history(run_train, shards, tmp_path):
    """A reduction of the learning rate goes on in a branch, unless --lr is given; the branch's
    first file has the state that it began from, bit for bit, and names its run and step."""
    base = tmp_path / "o"
    by_hand = tmp_path / "by_hand.pt"
    run_train("--data", shards, "--out", base, *TINY)
    state = saved(base, 2)
    state["monitor"].update(lr_factor=0.25, rollbacks=2, returned_to=[2])
    torch.save(state, by_hand)
    for flags, factor, told, events, changed in [
            ("", 0.25, "learning rate x 0.25", ["resume", "end"], {}),
            ("--lr 1.0 --clip 0.5 --beta2 0.9 --skip-steps 3:3", 1.0, "lr 1.0 instead of 0.004",
             ["resume", "skip", "end"],
             dict(lr=[4e-3, 1.0], clip=[1.0, 0.5], beta2=[0.95, 0.9], skip_steps=[None, "3:3"]))]:
        out = tmp_path / f"factor {factor}"
        text = run_train("--data", shards, "--out", out, "--resume", os.path.relpath(by_hand),
                         *flags.split())[1]
        rows, found = read_metrics(out)
        resume = found[0]
        assert told in text and column(rows, "step") == [3, 4] and kinds(found) == events
        assert rows[0]["lr"] == factor * train.learning_rate(Config(**resume["config"]), 3)
        assert (resume["changed"], resume["lr_factor"]) == (changed, factor)
        monitor = saved(out, 4)["monitor"]
        assert monitor.items() >= dict(lr_factor=factor, rollbacks=0, returned_to=[]).items()
        assert monitor["checkpoints"][0] == [2, "step_00000002.pt", True]
        assert monitor["checkpoints"][-1] == [4, "step_00000004.pt", False]
        assert_same_state(saved(out, 2), state, but=("config", "monitor", "run"))
        assert saved(out, 2)["run"] == saved(out, 4)["run"]
        assert saved(out, 4)["run"]["origin"] == ["resume", state["run"]["id"], 2]


def contents(folder):
    """{path: (time of writing, bytes)} of the files in a folder and in its folders."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*")
            if path.is_file()}


@pytest.fixture
def torchrun_job():
    """torchrun_job() -> what a new torchrun tells its processes: of a store that outlives them."""
    def start():
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=stores[-1].port,
                    TORCHELASTIC_USE_AGENT_STORE=True)
    stores = []
    return start


# ---------------------------------------------------------------------------------------------
# sample.py's command line
# ---------------------------------------------------------------------------------------------

def test_samples_end_before_the_stop_text_and_are_separated_by_dashes(run_sample):
    """Of 40 samples of a prompt, number 7 is that of --seed 7. Each ends before the --stop text of
    three tokens; what looks like the beginning of a text that never comes is not lost. Each line of
    standard input is a prompt."""
    flags = ("--max-tokens", 40, "--temperature", 1, "--prompt")
    line = "-" * 40 + "\n"
    many = run_sample(*flags, "line ", "--num-samples", 40)[1].split(line)
    assert len(many) == 40 and len(set(many)) > 30              # in three batches
    with mock.patch.object(sample_and_chat, "AT_ONCE", 40):
        assert run_sample(*flags, "line ", "--num-samples", 40)[1].split(line) == many
    assert many[7] == run_sample(*flags, "line ", "--seed", 7)[1]
    seed, stop = next((i, found[0]) for i, text in enumerate(many)
                      if (found := re.search("[ -~]{3}", text[7:])))
    cut = [re.sub(f"(?s)(?<=^line )(.*?){re.escape(stop)}.*", r"\1\n", text)
           for text in many[seed:seed + 3]]
    assert 6 < len(cut[0]) < len(many[seed])
    for count in (1, 3):
        assert run_sample(*flags, "line ", "--seed", seed, "--num-samples", count, "--stop",
                          stop) == (0, line.join(cut[:count]), "")
    never = many[seed].rstrip("\n")[-2:] + "\0"
    assert run_sample(*flags, "line ", "--seed", seed, "--stop", never)[1] == many[seed]
    both = [run_sample(*flags, prompt, "--num-samples", 2)[1] for prompt in ("line 1", "", "so")]
    assert run_sample(*flags, "-", "--num-samples", 2,
                      stdin="line 1\n\nso\n") == (0, line.join(both), "")


def test_the_first_sample_is_shown_as_it_grows_but_for_what_may_begin_the_stop_text(monkeypatch):
    """After each token standard output has all of it but its last two characters, which a stop text
    of three may begin with; whether or not the second sample has ended. The id 999, which no token
    has, is no text."""
    seen = []

    def scripted():                     # in place of sample.generate
        for first, second in zip(b"abcdxy", b"xyz"):
            yield [first, second]
            seen.append(sys.stdout.getvalue())
        for first in (999, *b"dxyz"):
            yield [first, None]
            seen.append(sys.stdout.getvalue())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    args = SimpleNamespace(prompt="p", stop="xyz", num_samples=2, max_tokens=9, seed=0)
    samples = sample_and_chat.Samples(args, get_tokenizer("bytes"), CFG)
    next(samples.prompts())
    samples.write(scripted())
    assert seen == ["p", "p", "pa", "pa", "pab", "pabc", "pabcd"]
    assert sys.stdout.getvalue() == "pabcd\n" + sample_and_chat.DASHES + "p\n"


@pytest.mark.parametrize("flags, message", [
    ("--ckpt nowhere.pt", "no checkpoint nowhere.pt"),
    ("--ckpt .", "checkpoint .: it is a directory without any: give"),
    ("--temperature -1", "--temperature"), ("--top-p 0", "--top-p"), ("--top-k -3", "--top-k"),
    ("--temperature 1e-50", "at least 1e-06"), ("--top-p 1e-300", "at least 1e-06"),
    ("--num_samples 0", "--num-samples: 0 must"), ("--max_tokns 9", "mean --max-tokens?"),
    ("--top-p 1.5 --seed x", "--seed: invalid int value: 'x': give a whole number"),
    ("--top-p 1.5", "must be at most 1"),
    ("--temprature 1", "mean --temperature?"), ("--ckpt=", "--ckpt: the value is empty"),
    ("once upon", "unknown argument once: --help"), ("--device cuda", "no CUDA device"),
    ("--seed -1", "--seed"), ("--seed 99999999999999999999", "--seed"), ("--nonsense", "--nons"),
    ("--prompt --x", "give a value; one that begins with - as --prompt=VALUE"),
    ("--prompt \udce9", "--stop is not UTF-8 (surrogates not allowed): convert it, as by iconv"),
    ("--stop \udce9", "surrogates not allowed")])
def test_sampling_mistakes_end_in_one_line_and_exit_2(run_sample, flags, message):
    """Nothing else is printed; the line names the flag, and the one meant if it knows it."""
    status, out, error = run_sample(*flags.split())
    assert (status, out) == (2, "") and message in error and error.count("\n") == 1


def test_characters_are_printed_whole(run_sample, monkeypatch):
    """Serves "prints only text": bytes that are no character print as one replacement character. A
    terminal shows a question mark for a character that it lacks. Weights and cache have the type of
    --dtype."""
    seen = []
    text = "é漢🙂!"

    def generate(gpt, tokens, *_):
        cache = CachedModel(gpt, 1, 9).model.blocks["0"].attn.core_attention.cache
        tensors = *gpt.parameters(), cache
        seen.append([tokens, *{tensor.dtype for tensor in tensors}])
        yield from ([token] for token in text.encode() + b"\xff!" + "é".encode()[:1])
    monkeypatch.setattr(sample, "generate", generate)
    assert run_sample() == (0, text + "\ufffd!\ufffd\n", "")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    run_sample("--dtype", "bf16")
    assert terminal.buffer.getvalue() == b"???!?!?\n"
    assert seen == [[[256], torch.float32], [[256], torch.bfloat16]]


def test_too_little_memory_for_samples_is_told_in_one_line_and_no_other_error(run_sample,
                                                                              monkeypatch):
    fail = mock.Mock(side_effect=RuntimeError("CUDA out of memory. Tried 9"))
    monkeypatch.setattr(sample, "generate", fail)
    assert run_sample() == (1, "", "sample.py: out of memory (CUDA out of memory. Tried 9): lower "
                            "--num-samples, try --device cpu, or another machine\n")
    fail = mock.Mock(side_effect=RuntimeError("a bug"))
    monkeypatch.setattr(sample, "generate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run_sample()


@pytest.mark.parametrize("redirection, told", [
    (">&-", "standard output, where the text goes, is closed: give a file or a pipe"),
    ("> /dev/full", "standard output cannot be written: No space left on device")])
def test_samples_that_cannot_be_written_are_told_in_one_line(things, redirection, told):
    command = shlex.join([sys.executable, "sample.py", "--ckpt", str(things / "whole.pt"),
                          "--max-tokens", "3"])
    done = subprocess.run(["bash", "-c", f"{command} {redirection}"], cwd=ROOT, text=True,
                          stderr=subprocess.PIPE)
    assert done.returncode in (1, 2) and done.stderr == f"sample.py: {told}\n"


def test_an_error_of_one_rank_is_raised_while_others_still_act():
    """For example too little memory: the others wait for it."""
    def fail():
        raise MemoryError("too little")
    with mock.patch.object(processes, "all_gather_object", side_effect=3 * [[None]]), \
            pytest.raises(MemoryError, match="too little"):
        processes.all_ranks(fail)
