"""tools/ladder.py and tools/train_many.py: rungs of one family, a law, and a prediction.

Most runs are imitated (tests/imitated_train.py), as train.py takes seconds to start."""
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

import tools.ladder
from base.options import Config
from data import TokenDataset
from models import SIZES, make_config
from runtime import checks
from tests.commands import Command, dataset, expect_mistake, run_main
from tests.harness import ROOT
from tools import svg_picture
from tools.ladder import plan, shape_of_width
from tools.scaling_law import Law

LAW = Law(1.0, 30.0, 30.0, 0.3, 0.3)
TOKENS_PER_STEP = 16 * 32
FLAGS = ["--rungs", "8,12,16", "--n-embd", 32, "--n-head", 4, "--seq-len", 32, "--steps", 200,
         "--warmup-steps", 5, "--lr", 1e-3]
WIDTHS = (8, 12, 16, 24, 32)
OF_IMITATED = ("STARTS", "DEFAULTS", "FINGERPRINT", "SIZES", "SECONDS_OF_A_STEP")


def multiplying(width, vocabulary=257):
    """The numbers of a GPT of two layers, but for positions: Kaplan's count, with the head."""
    return 2 * (12 * width ** 2 + 13 * width) + 2 * width + vocabulary * width


@pytest.fixture
def imitated(shards, tmp_path, monkeypatch):
    """The arguments of a ladder whose runs are imitated; its --out is tmp_path / "o"."""
    fingerprint, = TokenDataset(shards, "train", 32).mixture.sources
    for name, value in dict(
            STARTS=tmp_path / "starts", DEFAULTS=json.dumps(asdict(Config())),
            FINGERPRINT=fingerprint, SECONDS_OF_A_STEP=0,
            SIZES=json.dumps({width: multiplying(width) for width in WIDTHS})).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(svg_picture, "find_spec", lambda name: None)      # no picture
    # Without site-packages: a tenth of the time.
    launch = shlex.join([sys.executable, "-S", "-E", str(ROOT / "tests/imitated_train.py")])
    return ["--data", shards, "--out", tmp_path / "o", "--launch", launch, "--jobs", 2]


def starts(tmp_path):
    return (tmp_path / "starts").read_text().splitlines()


@pytest.mark.claim("`tools.ladder` predicts the loss of a model before it is trained, and says "
                   "afterwards how far off it was.")
def test_a_ladder_predicts_repeats_nothing_and_compares(imitated, tmp_path, capsys):
    """The losses are a law's, so the prediction is exact. The printed command trains the target,
    and the same ladder then compares."""
    def run():
        status, text, error = run_main(capsys, tools.ladder, *imitated, *FLAGS)
        assert (status, error) == (0, "")
        return text, json.loads((tmp_path / "o/ladder.json").read_text())
    text, found = run()
    expected = LAW(multiplying(32), 200 * TOKENS_PER_STEP)
    assert [*found["prediction"].values()] == pytest.approx([expected] * 3, rel=1e-4)
    assert found["prediction"].keys() == {"loss", "low", "high"} and found["measured"] is None
    assert found["law"] == pytest.approx(vars(LAW), rel=0.01)
    assert [(p["width"], p["N"], p["D"]) for p in found["points"]] == [
        (w, multiplying(w), steps * TOKENS_PER_STEP) for w in (8, 12, 16)
        for steps in (25, 50, 100, 200)]
    test = found["back_test"]
    assert len(starts(tmp_path)) == 12 and abs(test["predicted"] / test["measured"] - 1) < 1e-4
    again, same = run()
    assert same == found and len(starts(tmp_path)) == 12
    assert again.splitlines() == [line for line in text.splitlines()
                                  if not line.startswith("train    " + str(tmp_path))]
    command = re.search(r"(?m)^train    (.* train\.py .*)$", text)[1]
    (tmp_path / "o/w32/steps200").mkdir(parents=True)
    assert subprocess.run(shlex.split(command)).returncode == 0
    text, compared = run()
    assert re.search(r"\nmeasured \d\.\d+: the prediction is [+-]0\.00% off\n", text)
    assert compared == found | dict(measured=compared["measured"])
    assert compared["measured"] == pytest.approx(expected, rel=1e-6)


def is_running(pid):
    with suppress(FileNotFoundError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.claim("A ladder that is killed at any moment ends with the same ladder.json.")
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_killed_ladder_ends_with_the_same_prediction(imitated, tmp_path, monkeypatch):
    """At random moments, alone, with its runs, or by a signal that train.py saves after: the same,
    byte for byte. Runs whose ladder was killed alone go on; the next ladder begins after them."""
    monkeypatch.setenv("SECONDS_OF_A_STEP", "0.01")

    def start():
        return Command("tools/ladder.py", *imitated, *FLAGS,
                       **{name: os.environ[name] for name in OF_IMITATED})
    assert start().finish(200)[0] == 0
    whole = (tmp_path / "o/ladder.json").read_bytes()
    (tmp_path / "o").rename(tmp_path / "whole")
    rng = random.Random(0)
    for number in (signal.SIGKILL, "and its runs", signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        ladder, most = start(), len(starts(tmp_path)) + rng.randint(1, 2)
        while len(starts(tmp_path)) < most and ladder.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        pids = [int(pid) for task in Path(f"/proc/{ladder.pid}/task").glob("*/children")
                for pid in task.read_text().split()]
        also_runs = number == "and its runs"
        number = signal.SIGKILL if also_runs else number
        ladder.send_signal(number)
        for pid in pids if also_runs else []:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        status, _, error = ladder.finish()
        assert status == (-9 if number == signal.SIGKILL else 130), error
        while any(is_running(pid) for pid in pids):
            time.sleep(0.05)
    status, text, error = start().finish(200)
    assert (status, error) == (0, ""), text
    assert (tmp_path / "o/ladder.json").read_bytes() == whole


def test_a_ladder_goes_on_past_rungs_that_fail_and_are_killed(imitated, tmp_path, monkeypatch,
                                                              capsys):
    """The others predict, if three are left. (What is tried again: tests/test_sweep.py.)"""
    monkeypatch.setenv("FAILS", "w24/steps200")
    monkeypatch.setenv("KILLED", "w16/steps50")
    status, text, _ = run_main(capsys, tools.ladder, *imitated, *FLAGS, "--rungs", "8,12,16,24")
    assert status == 1 and "w24/steps200: no memory: take less\n" in text
    assert "w16/steps50: killed (SIGKILL): out of memory?\n" in text
    found = json.loads((tmp_path / "o/ladder.json").read_text())
    assert [p["width"] for p in found["points"]] == 4 * [8] + 4 * [12] + 2 * [16]
    status, _, error = run_main(capsys, tools.ladder, *imitated, *FLAGS, "--rungs", "8,12,24")
    assert status == 1 and error.startswith("tools.ladder: 2 rungs of the 3")


@pytest.mark.parametrize("flags, words", [
    ("--n-embd 16", "width 16 rungs 16"), ("--rungs 8,64,12", "rungs 64"),
    ("--rungs 8,16", "2 widths: 3"), ("--rungs 8,x", "8,x: 32,48,64"),
    ("--steps 100", "100 multiple 40, 120"), ("--warmup-steps 30", "step 20"),
    ("--steps 2000", "4 times --batch-size"), ("--lr-schedule cosine", "--lr-schedule: drop"),
    ("--rungs 9,12,16 --model llama-nano", "width 9 heads"), ("--data nowhere", "nowhere"),
    ("--stepz 10", "did you mean --steps?"), ("--n-kv-head 2", "nano --n-kv-head")])
def test_a_ladder_that_cannot_predict_is_refused_in_one_line(imitated, tmp_path, capsys, flags,
                                                             words):
    expect_mistake(run_main(capsys, tools.ladder, *imitated, *FLAGS, *flags.split()),
                   *words.split(), program="tools.ladder")
    assert not (tmp_path / "starts").exists() and not (tmp_path / "o").exists()


def test_rungs_of_other_flags_or_another_data_set_are_refused(imitated, tmp_path, capsys):
    assert run_main(capsys, tools.ladder, *imitated, *FLAGS)[0] == 0
    count = len(starts(tmp_path))
    tokens = TokenDataset(imitated[1], "train", 32).read([0] * 4000)[0].ravel() % 257
    dataset(tmp_path / "other", dict(train_0=tokens, val_0=tokens[:4000]), fingerprint="other")
    for flags, words in [(["--data", tmp_path / "other"], "another data set"),
                         (["--batch-size", 8], "--batch-size 16, not 8"), (["--lr", 2e-3], "--lr")]:
        expect_mistake(run_main(capsys, tools.ladder, *imitated, *FLAGS, *flags), words,
                       program="tools.ladder")
    assert len(starts(tmp_path)) == count
    status, *_ = run_main(capsys, tools.ladder, *imitated, *FLAGS, "--rungs", "8,12,16,24")
    assert status == 0 and len(starts(tmp_path)) == count + 4       # another rung


@pytest.mark.parametrize("model", ["nano", "llama-nano", "moe-nano"])
def test_train_py_takes_the_commands_and_trains_the_model_that_is_counted(shards, tmp_path, model):
    """Of the rungs and of the target: depth, sequence, batch and the tokens read are the same."""
    config, rungs, target = plan(list(map(str, [
        "--data", shards, "--out", tmp_path, "--model", model, "--rungs", "32,48,64", "--steps",
        40, "--seq-len", 16, "--batch-size", 8, "--warmup-steps", 2])))
    assert target.width == 192 and [rung.width for rung in rungs] == [32, 48, 64]
    for rung in [*rungs, target]:
        for job in [*rung.jobs(), rung.job_of_target()]:
            given = {name: value for name, value in job.flags.items() if name != "resume"}
            run, cfg = checks.validate(given, None, 1, "cpu")
            assert cfg == rung.cfg and cfg.n_layer == 2 and run.batch_size == 8
            assert run.lr == pytest.approx(config.lr * (192 / rung.width) ** 0.5, rel=1e-3)
        trunk, *branches = rung.jobs()
        assert [job.flags["steps"] for job in (trunk, *branches)] == [40, 20, 10, 5]
        for job in branches:            # each begins at a step that the trunk saves, and decays
            step = int(job.flags["resume"].stem[5:])
            assert step % trunk.flags["save_every"] == 0
            assert step == job.flags["steps"] - round(0.2 * job.flags["steps"])


def test_heads_keep_their_size_and_their_groups():
    for name, width, heads, groups in [("gpt2", 384, 6, None), ("llama3-8b", 1024, 8, 2),
                                       ("qwen3-0.6b", 512, 4, 2), ("pythia-160m", 192, 3, 3)]:
        shape = shape_of_width(SIZES[name], width)
        assert (shape["n_head"], shape.get("n_kv_head")) == (heads, groups), name
        target, cfg = (make_config(vocab_size=64, **one) for one in (SIZES[name], shape))
        assert cfg.hidden / width == pytest.approx(target.hidden / target.n_embd, rel=0.02)
