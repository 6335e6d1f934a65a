"""A user's mistake ends in one line that names what is wrong, and exit status 2, from one rank.

A line of a table is a mistake: the command | words of its message | commands that follow its
advice, which must not be refused. The words are flags, names and numbers; sentences may change."""
import math
import re
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from unittest import mock

import pytest
import torch

from base import agreement
from base.options import Config, merge_config, parse_flags
from base.processes import Job, RunError
from corpus import program as data_flags
from model import GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig
from runtime import checks, startup
from tests.commands import TINY, expect_mistake, launch
from tests.harness import CFG, names_in


def rows(table):
    """[(command, [word], [command])]"""
    found = []
    table = table.replace("CHUNKED", "--pp-schedule interleaved --pp-chunks 2")
    for line in table.strip().splitlines():
        command, words, *advice = (part.strip() for part in line.split(" | "))
        found.append((command, words.split(", "), advice[0].split(" ; ") if advice else []))
    return found


# `things` has the files that are named. NAME=X before the flags is a variable of the environment.
# As many processes start as tp x pp x cp, or as --nproc_per_node says.
TRAIN = rows("""
--zero 4 | --zero, 4
--pp-schedule zb-h1 | zb-h1, 1f1b, interleaved | --pp 2 --pp-schedule 1f1b
--steps | --steps
--lr nan | --lr, nan
--log tensorboard | missing: pip install tensorboard
--compile=False | --compile, switch
config/tiny.py | config/tiny.py, no configuration files, --help
--block_size=64 | --seq-len? | --seq-len 8
--gradient_accumulation_steps=4 | --batch-size?
--tensor-model-parallel-size 2 | --tp?
--dtype float32 | fp32? | --dtype fp32
--warm 5 | --warmup-steps?
--nonsense 1 | --nonsense, --help
lr=1e-3 | --lr? | --lr 1e-3
--model gpt3-6.7 | gpt3-6.7b?
--model bert-base | 'bert-base', --help
--device cuda:0 | 'cuda:0', cpu, cuda, mps
--device cuda | CUDA
--compile | g++
--dropout 1 | --dropout, 1
--skip-steps 9:3 | A:B
--batch-ramp 2:0:9 | START:INCREMENT:SEQUENCES
--batch-ramp 1:2:9 | --batch-size 4, none | --batch-ramp none
--epochs 2 | --steps, --epochs
--init-from= | --init-from, empty
RANK=1 --steps 1 | RANK, 1, torchrun
WORLD_SIZE=0 --steps 1 | WORLD_SIZE, 0
WORLD_SIZE=2 RANK= MASTER_ADDR= MASTER_PORT= --lr 1 | RANK, MASTER_ADDR, MASTER_PORT, 2 processes
WORLD_SIZE=2 MASTER_PORT=abc --lr 1 | MASTER_PORT, abc
WORLD_SIZE=2 RANK=2 --lr 1 | RANK is 2
LOCAL_RANK=1 --lr 1 | LOCAL_RANK is 1
--nproc_per_node=3 --tp 2 | 3 processes, tp 2 x pp 1 | --nproc_per_node=2 --tp 2
--tp 4 | n_head 2, tp 4 | --nproc_per_node=4 --tp 2 ; --tp 4 --n-head 4
--n-embd 100 --n-head 3 | n_embd 100, n_head 3 | --n-embd 99 --n-head 3
--sequence-parallel | tp is 1 | --sequence-parallel --tp 2
--cp 2 --tp 4 --n-head 4 --sequence-parallel --seq-len 20 | seq_len 20, cp 2, tp 4
--cp 2 --seq-len 18 | 4 pieces, seq_len 18
--zero 3 --pp 2 | zero 3, pp 2 | --pp 2 --zero 1 ; --pp 2 --zero 2
--pp-chunks 2 | interleaved, --pp | --n-layer 4 --pp 2 CHUNKED
--pp 2 --pp-schedule interleaved | --pp, --pp-chunks, 2 and 1 | --n-layer 4 --pp 2 CHUNKED
--n-layer 3 --batch-size 5 --pp 2 CHUNKED | n_layer 3, pp 2 x pp-chunks 2, 5
--n-layer 4 --batch-size 3 --micro-batch 1 --pp 2 CHUNKED | batch size 3, pp 2
--exact --cp 2 | --exact, --cp 2
--exact --tp 3 --n-head 3 --n-embd 24 | --exact, tp 3 | --exact --tp 2
--exact --compile | --exact, --compile
--exact --dropout 0.1 --sequence-parallel --tp 2 | --exact, --dropout
--batch-size 6 --micro-batch 4 | 6, micro-batch 4 | --batch-size 8 ; --batch-size 6
--batch-size 8 --batch-ramp 2:3:9 --micro-batch 2 | 2:3:9, 5
--nproc_per_node=2 --batch-ramp 1:1:60 | 1:1:60, 1 | --nproc_per_node=2 --batch-ramp 2:2:60
--model nano --n-expert 4 | --n-expert, moe-nano
--model moe-nano --n-active 9 | n_active 9, 8
--model moe-nano --plain --balance-bias 0.01 | --plain, --balance-bias 0.01
--nproc_per_node=3 --model moe-nano --ep 3 --batch-size 6 | ep 3, 8 experts
--nproc_per_node=2 --model moe-nano --ep 4 | 2, ep 4
--nproc_per_node=2 --ep 2 | --ep 2, mixture
--model llama-nano --n-kv-head 3 | n_kv_head 3
--model llama-nano --head-dim 7 | 7
--model llama-nano --n-embd 24 --n-head 12 --n-kv-head 3 --tp 2 | tp 2, n_kv_head 3
--model llama-nano --n-head 8 --n-kv-head 1 --head-dim 6 --tp 4 --exact | --exact, tp 4, 6 channels
--model llama-nano --tp 2 --hidden 99 | 99, tp 2
--plain --zero 1 --exact | --plain, --exact, --zero
--plain --data a=1,b=2 | --plain, mixture
WORLD_SIZE=2 --plain | --plain, 2
--data a,b | a=0.7
--data a=1001,b=1 | a, 1000, a=0 | --data other=200,beyond=0.1 ; --data other=0,beyond=1
--data a=0,b=0 | 0 | --data other=1,beyond=0
--data a=1,./a=2 | ./a | --data other=3
--data one/a=1,two/a=1 | one/a, two/a
--data nowhere | nowhere, --dataset, --input
--data run | train shards
--data other --seq-len 100000 | 100000, --seq-len | --data other --seq-len 99999
--data other=1,toy=0 | other, toy, tokenizers
--data torn=1,other=1 | train_0.bin
--data beyond | beyond/train_0.bin, 257
--data beyond --plain | beyond/train_0.bin, 257
--data beyond_val | 257
--data beyond=1,beyond_val=1 | beyond, beyond_val | --data beyond=1
--out /proc/nowhere | /proc/nowhere
--out precious | precious
--eval-only | --out, --resume | --eval-only --out run ; --eval-only --resume whole.pt
--resume nowhere | nowhere, out/latest.pt
--resume True --out run | True | --out run
--init-from no.pt | no.pt, tools.huggingface import
--init-from=gpt2 | import gpt2 gpt2.pt | --init-from whole.pt
--init-from=resume | resume, leave the flag out | --out run
--resume run/step_00000003.pt | step_00000004.pt, step_00000002.pt | --resume run/step_00000004.pt
--resume sixth | sixth/latest.pt
--resume torn.pt | torn.pt, damaged
--out sixth | format 6, format 7
--resume whole.pt --n-layer 3 | n_layer 2, 3, --out, without --resume, --n-layer | --resume whole.pt
--out run --n-layer 3 --data other | n_layer 2, 3, --out, --data | --n-layer 3 --data other
--resume whole.pt --data other | the text, --out, --data | --resume whole.pt --data SHARDS=0,other=1
--out run --data toy | the text, --init-from | --init-from whole.pt --data other
--init-from whole.pt --seq-len 32 | 16, 32, --seq-len
--init-from whole.pt --data opt | opt-257
--init-from whole.pt --resume whole.pt | --resume, --init-from | --init-from whole.pt
--init-from whole.pt --out run | whole.pt, --init-from, --out | --out run
--resume never --out run | step_00000004.pt, --out | --resume never
--resume run/step_00000002.pt --out run | run, --resume, --out
""")
SAMPLE = rows("""
--ckpt nowhere.pt | nowhere.pt
--temperature -1 | --temperature
--temperature 1e-50 | 1e-06
--top-p 1.5 --seed x | --seed, 'x'
--top-k -3 | --top-k
--max_tokns 9 | --max-tokens?
--out_dir=out | --ckpt?
--max_iters=5 | --steps here, --help
once upon | once, --help
--device cuda | CUDA
--seed 99999999999999999999 | --seed
--ckpt= | --ckpt, empty
--prompt --x | --prompt=VALUE
--prompt \udce9 | --prompt, UTF-8
--chat | whole.pt, not trained on conversations
--chat --prompt 2 | --chat reads standard input
--chat --stop 2 | --chat reads standard input
--chat --num-samples 2 | --chat reads standard input
""")


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
        with (ExitStack() as stack, mock.patch.object(sys, "argv", given),
              mock.patch.object(Job, "from_environment", return_value=job)):
            _, given, device, _ = startup.parse()
            startup.prepare(given, job, device, stack)
    except (ValueError, OSError, RunError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("command, words, followed", TRAIN)
def test_train_py_refuses_a_mistake_and_not_what_it_advises(run_train, shards, things, monkeypatch,
                                                            command, words, followed):
    """It leaves no file and changes none. The compiler and tensorboard are missing."""
    monkeypatch.chdir(things)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    before = names_in(things)
    environment = dict(re.findall(r"\b([A-Z_]{4,})=(\S*)", command))
    world, flags = world_of(re.sub(r"\b[A-Z_]{4,}=\S* ?", "", command))
    if world > 1:
        environment["WORLD_SIZE"] = world
    expect_mistake(run_train("--data", shards, "--out", "o", *TINY, *flags.split(), **environment),
                   *words)
    shutil.rmtree("o", ignore_errors=True)
    assert names_in(things) == before and Path("precious").read_text() == "a file"
    for flags in followed:
        assert refusal(shards, flags) is None, flags
        shutil.rmtree("o", ignore_errors=True)


@pytest.mark.parametrize("command, words, _", SAMPLE)
def test_sample_py_refuses_a_mistake(run_sample, command, words, _):
    expect_mistake(run_sample(*command.split()), *words, program="sample.py")


@pytest.mark.parametrize("make, words", [
    (lambda: GPTConfig(n_head=5), "n_head"), (lambda: GPTConfig(activation="tanh"), "activation"),
    (lambda: LlamaConfig(n_head=8, n_kv_head=3), "n_kv_head 3"),
    (lambda: LlamaConfig(n_head=8, n_embd=32, rotary=0.25), "0.25 of head_dim 4"),
    (lambda: MoEConfig(n_active=0), "n_active 0"), (lambda: MoEConfig(n_active=1), "--n-active"),
    (lambda: MoEConfig(gated=False), "gated MLP")])
def test_a_shape_that_cannot_be_is_a_value_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def differ(rank, world):
    """The exit status of a rank that sees other data than the others."""
    with pytest.raises(RunError, match="not the same") as error:
        agreement.assert_equal_across_ranks(rank, "not the same")
    return error.value.status


def test_of_many_ranks_one_tells_the_mistake_and_all_end_alike(run_train, shards, things, tmp_path,
                                                               pool):
    """Rank 0, also before they meet."""
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    assert pool.run(2, differ) == [2, 2]
    assert run_train(*flags, "--lr", -1, RANK=1, LOCAL_RANK=1, WORLD_SIZE=2) == (2, "", "")
    first, second = launch(2, *flags, "--pp", 2, "--n-layer", 1)
    expect_mistake(first.finish(), "n_layer 1 is less than pp 2")
    assert second.finish() == (2, "", "")
    first, second = launch(2, "--out", tmp_path / "o", *TINY, "--data", things / "beyond")
    expect_mistake(first.finish(), "rank 1: ")
    assert second.finish() == (2, "", "")


def test_tasks_of_srun_without_torchrun_are_refused(run_train, shards, tmp_path):
    """Not refused: runs of their own (RANK=0), one task, a batch script, and empty variables."""
    def start(name, task=0, **environment):
        return run_train("--data", shards, "--out", tmp_path / name, *TINY, "--steps", 1,
                         SLURM_NTASKS=2, SLURM_PROCID=task, **environment)
    step = dict(SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=2)
    expect_mistake(start("a", **step), "SLURM_STEP_NUM_TASKS is 2")
    assert start("a", task=1, **step) == (2, "", "")
    for name, environment in [("batch", {}), ("one", dict(step, SLURM_STEP_NUM_TASKS=1)),
                              ("own", dict(step, RANK=0, task=1)),
                              ("empty", dict(RANK="", LOCAL_RANK=""))]:
        assert start(name, **environment)[0] == 0


def test_mps_is_for_one_process_without_float64(run_train, shards, tmp_path, monkeypatch):
    """By itself a run in fp64 is on the CPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    flags = ["--data", shards, "--out", tmp_path / "o", *TINY]
    for more, world in ((["--dtype", "fp64"], 1), ([], 2)):
        expect_mistake(run_train(*flags, "--device", "mps", *more, WORLD_SIZE=world),
                       "--device mps")
    assert ", cpu, fp64" in run_train(*flags, "--dtype", "fp64")[1]


@pytest.mark.parametrize("flags, world, expected", [
    ("", 1, dict(micro_batch=4)), ("", 8, dict(micro_batch=2)),
    ("--pp=4 --n_layer=4", 8, dict(micro_batch=2)), ("--micro-batch 8", 1, dict(micro_batch=8)),
    ("--pp 2 --batch-size 5", 2, dict(micro_batch=1)),
    ("--batch-size 30 --device cuda", 1, dict(micro_batch=15)),
    ("--batch-size 64 --pp 2 --device cuda", 2, dict(micro_batch=4)),
    ("--model opt-125m --n_layer 3 --dropout 0.3 --init-from a_b", 1,
     dict(asdict(GPTConfig(257, 16, 3, 12, 768, "relu", 0.3)), init_from="a_b")),
    ("--model gpt3-1.3b", 1, dict(lr=2e-4)), ("--model gpt2 --lr 1e-3", 1, dict(lr=1e-3)),
    ("--n-layer 12 --n-embd 768", 1, dict(lr=6e-4)),        # by shape, as with --init-from
    ("--model llama-nano --n-head 8 --n-kv-head 4 --hidden 100 --rope-theta 5e5", 1, dict(asdict(
        LlamaConfig(257, 16, 2, 8, 192, n_kv_head=4, hidden=100, rope_theta=5e5)), lr=4e-3))])
def test_flags_make_the_model_a_microbatch_and_a_learning_rate(shards, flags, world, expected):
    """Underscores are dashes."""
    given = parse_flags(["--data", str(shards), "--seq_len", "16", *flags.split()])
    config, cfg = checks.validate(given, None, world, given.get("device", "cpu"))
    assert {**asdict(config), **asdict(cfg)}.items() >= expected.items()


def test_layout_precision_and_paths_never_come_from_the_checkpoint():
    """Of a checkpoint in which every flag has a value of its own these are not taken."""
    stored = dict.fromkeys(asdict(Config()), "the checkpoint's")
    with mock.patch.object(Config, "__post_init__", lambda self: None):
        config, _ = merge_config({}, dict(model=asdict(CFG), config=stored))
    assert {name for name, value in asdict(config).items() if value != "the checkpoint's"} == set(
        """data out log epochs plain tp pp cp ep pp_schedule pp_chunks device compile timeout
        micro_batch zero recompute sequence_parallel offload dtype exact resume init_from eval_only
        log_every""".split())


def test_what_a_checkpoint_of_weights_may_change():
    """Positions may be fewer, of rotary ones also more, routers' losses others, but no model."""
    def merge(given, cfg):
        return merge_config(given, dict(model=asdict(cfg), config={}), weights_only=True)[1]
    learned = LlamaConfig(257, 16, 2, 4, 32, learned_positions=True)
    assert merge(dict(seq_len=8), learned)["seq_len"] == 8
    assert merge(dict(seq_len=32), LlamaConfig(257, 16, 2, 4, 32))["seq_len"] == 32
    found = merge(dict(balance_loss=0.0, z_loss=0.1), MoEConfig())
    assert (found["balance_loss"], found["z_loss"], found["n_expert"]) == (0.0, 0.1, 8)
    for given, cfg, words in [(dict(seq_len=32), learned, "seq_len at most 16, not 32"),
                              (dict(n_active=3), MoEConfig(), "n_active 2, not 3"),
                              (dict(model="gpt2"), MoEConfig(), "n_embd")]:
        with pytest.raises(ValueError, match=words):
            merge(given, cfg)
    given = dict(model="moe-nano", balance_bias=0.001)      # a bias balances in place of the loss
    assert merge_config(given, None)[1]["balance_loss"] == 0
    assert merge_config(given | dict(balance_loss=0.1), None)[1]["balance_loss"] == 0.1


@pytest.mark.parametrize("weights_only", [False, True], ids=["resume", "init-from"])
def test_a_checkpoint_wins_over_its_named_size_and_a_flag_over_the_checkpoint(weights_only):
    """What a size also sets, and a run may change, is the checkpoint's unless its own flag is
    given."""
    _, shape = merge_config(dict(model="moe-nano", balance_bias=0.01, z_loss=0.1), None)
    state = dict(model=asdict(MoEConfig(**shape)), config={})

    def merge(**given):
        found = merge_config(dict(model="moe-nano") | given, state, weights_only)[1]
        return {name: found[name] for name in shape}
    assert merge() == merge(balance_bias=0.01) == shape
    assert (shape["balance_loss"], shape["z_loss"]) == (0.0, 0.1)
    assert merge(balance_loss=0.5) == shape | dict(balance_loss=0.5)
    if weights_only:        # a size has a length, too
        state["model"]["seq_len"] = 64
        assert merge()["seq_len"] == 64 and merge(seq_len=32)["seq_len"] == 32


def test_help_lists_every_flag_with_its_default(run_train):
    text = " ".join(run_train("--help")[1].split())
    for name, value in ((f.name, f.default) for f in fields(Config)):
        assert f" --{name.replace('_', '-')} " in text
        assert value in (None, False) or re.search(
            rf"\((at least [^()]*, )?default {re.escape(str(value))}\)", text), name


def test_a_tilde_is_the_home_folder_where_no_shell_replaces_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = parse_flags(["--out=~/run", "--data", "/a=1,~/b=2", "--init-from=x~/y.pt"])
    assert given == dict(out="/home/me/run", data="/a=1,/home/me/b=2", init_from="x~/y.pt")
    assert str(data_flags.parse_flags(["--input=~/a.txt", "--out=~/d"]).out) == "/home/me/d"
