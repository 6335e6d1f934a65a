"""tools/ladder.py and tools/train_many.py: rungs of one family, a law, and a prediction.

    python -m pytest tests/test_ladder.py

Most runs are imitated (tests/imitated_train.py), as train.py takes seconds to start.
"""
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
from tests.harness import ROOT, Command, dataset, run_main
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
    environment = dict(
        STARTS=tmp_path / "starts", DEFAULTS=json.dumps(asdict(Config())), FINGERPRINT=fingerprint,
        SIZES=json.dumps({width: multiplying(width) for width in WIDTHS}), SECONDS_OF_A_STEP=0)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(tools.ladder, "find_spec", lambda name: None)      # no picture
    # Without site-packages: a tenth of the time.
    launch = shlex.join([sys.executable, "-S", "-E", str(ROOT / "tests/imitated_train.py")])
    return ["--data", shards, "--out", tmp_path / "o", "--launch", launch, "--jobs", 2]


def starts(tmp_path):
    return [str(Path(line).relative_to(tmp_path / "o"))
            for line in (tmp_path / "starts").read_text().splitlines()]


@pytest.mark.claim("`tools.ladder` predicts the loss of a model before it is trained, and says "
                   "afterwards how far off it was.")
def test_a_ladder_predicts_repeats_nothing_and_compares(imitated, tmp_path, capsys):
    """The losses are a law's, so the prediction is exact. The printed command trains the target,
    and the same ladder then compares."""
    status, text, error = run_main(capsys, tools.ladder, *imitated, *FLAGS)
    assert (status, error) == (0, "")
    found = json.loads((tmp_path / "o/ladder.json").read_text())
    expected = LAW(multiplying(32), 200 * TOKENS_PER_STEP)
    assert [*found["prediction"].values()] == pytest.approx([expected] * 3, rel=1e-4)
    assert found["prediction"].keys() == {"loss", "low", "high"} and found["measured"] is None
    assert found["law"] == pytest.approx(vars(LAW), rel=0.01)
    assert [(p["width"], p["N"], p["D"]) for p in found["points"]] == [
        (w, multiplying(w), steps * TOKENS_PER_STEP) for w in (8, 12, 16)
        for steps in (25, 50, 100, 200)]
    assert len(starts(tmp_path)) == 12 and abs(found["back_test"]["predicted"]
                                               / found["back_test"]["measured"] - 1) < 1e-4
    again = run_main(capsys, tools.ladder, *imitated, *FLAGS)
    assert again[0] == 0 and len(starts(tmp_path)) == 12
    assert again[1].splitlines() == [line for line in text.splitlines()
                                     if not line.startswith("train    " + str(tmp_path))]
    assert json.loads((tmp_path / "o/ladder.json").read_text()) == found
    command = re.search(r"(?m)^train    (.* train\.py .*)$", text)[1]
    (tmp_path / "o/w32/steps200").mkdir(parents=True)
    assert subprocess.run(shlex.split(command)).returncode == 0
    status, text, _ = run_main(capsys, tools.ladder, *imitated, *FLAGS)
    assert status == 0
    assert re.search(r"\nmeasured \d\.\d+: the prediction is [+-]0\.00% off\n", text)
    compared = json.loads((tmp_path / "o/ladder.json").read_text())
    assert compared == found | dict(measured=compared["measured"])
    assert compared["measured"] == pytest.approx(expected, rel=1e-6)


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def runs_of(pid):
    """The processes that its threads have started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def ladder_command(arguments):
    """In a process of its own, to be killed."""
    imitation = {name: os.environ[name] for name in OF_IMITATED if name in os.environ}
    return Command("tools/ladder.py", *arguments, **imitation)


def start_until_it_ends(arguments, seconds, numbers):
    """Start the ladder, end it after each of these times by a signal, and start it again."""
    for moment, number in zip(seconds, numbers):
        ladder = ladder_command(arguments)
        deadline = time.monotonic() + moment
        while ladder.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if ladder.poll() is None and number == "and its runs":
            pids = runs_of(ladder.pid)
            ladder.send_signal(signal.SIGKILL)
            for pid in pids:
                kill(pid)
        elif ladder.poll() is None:
            ladder.send_signal(number)
        ladder.finish(200)
    status, text, error = ladder_command(arguments).finish(1500)
    assert (status, error) == (0, ""), text
    return text


@pytest.mark.slow
@pytest.mark.claim("A ladder that is killed at any moment ends with the same ladder.json.")
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_real_ladder_killed_ten_times_ends_with_the_same_prediction(library, tmp_path):
    """train.py itself, on the library's source, killed at random: ladder.json is the same, byte for
    byte. The target is then within 5%."""
    flags = ["--data", library, "--rungs", "16,24,32", "--n-embd", 64, "--n-head", 4, "--steps",
             400, "--batch-size", 4, "--warmup-steps", 20, "--jobs", 2]
    out = tmp_path / "o"
    assert ladder_command([*flags, "--out", out]).finish(1500)[0] == 0
    whole = (out / "ladder.json").read_bytes()
    out.rename(tmp_path / "whole")
    generator = random.Random(0)
    moments = [generator.uniform(3, 15) for _ in range(10)]
    numbers = [generator.choice([signal.SIGKILL, "and its runs", signal.SIGTERM])
               for _ in range(10)]
    text = start_until_it_ends([*flags, "--out", out], moments, numbers)
    assert (out / "ladder.json").read_bytes() == whole
    words = shlex.split(re.search(r"(?m)^train    python (train\.py .*)$", text)[1])
    assert Command(*words).finish(600)[0] == 0
    assert ladder_command([*flags, "--out", out]).finish(200)[0] == 0
    found = json.loads((out / "ladder.json").read_text())
    assert found["prediction"]["loss"] == pytest.approx(found["measured"], rel=0.05)


def test_a_ladder_goes_on_past_rungs_that_fail_and_are_killed(imitated, tmp_path, monkeypatch,
                                                              capsys):
    """The others predict, if three are left. The same command tries again what failed, but not what
    diverged."""
    monkeypatch.setenv("FAILS", "w24/steps200")
    monkeypatch.setenv("KILLED", "w16/steps50")
    four = [*FLAGS, "--rungs", "8,12,16,24"]
    status, text, _ = run_main(capsys, tools.ladder, *imitated, *four)
    assert status == 1 and "w24/steps200: no memory: take less\n" in text
    assert "w16/steps50: killed (SIGKILL): out of memory?\n" in text
    found = json.loads((tmp_path / "o/ladder.json").read_text())
    assert [p["width"] for p in found["points"]] == 4 * [8] + 4 * [12] + 2 * [16]
    status, _, error = run_main(capsys, tools.ladder, *imitated, *FLAGS, "--rungs", "8,12,24")
    assert status == 1 and error.startswith("tools.ladder: 2 rungs of the 3")
    monkeypatch.delenv("FAILS")
    monkeypatch.delenv("KILLED")
    count = len(starts(tmp_path))
    assert run_main(capsys, tools.ladder, *imitated, *four)[0] == 0
    assert len(starts(tmp_path)) == count + 6
    monkeypatch.setenv("STARTS", str(tmp_path / "more"))
    for _ in range(2):
        status, text, _ = run_main(capsys, tools.ladder, *imitated, *FLAGS, "--lr", 5, "--out",
                                   tmp_path / "wild")
        assert status == 1 and text.count("the loss is not finite\n") == 3
    assert len((tmp_path / "more").read_text().splitlines()) == 3


@pytest.mark.parametrize("flags, words", [
    (["--n-embd", 16], "the target has width 16, and the rungs 16 are no smaller: give narrower"),
    (["--rungs", "8,64,12"], "and the rungs 64 are no smaller"),
    (["--rungs", "8,16"], "--rungs has 2 widths: give 3 or more"),
    (["--rungs", "8,x"], "8,x: give widths, as 32,48,64"),
    (["--steps", 100], "--steps 100 cannot be branched at the saves of its trunk: give a multiple "
     "of 40, such as 120"),
    (["--warmup-steps", 30], "the first branch begins at step 20"),
    (["--steps", 2000], "4 times: give fewer steps, a smaller --batch-size, or more text"),
    (["--lr-schedule", "cosine"], "the rungs and the target cannot have --lr-schedule: drop it"),
    (["--rungs", "9,12,16", "--model", "llama-nano"], "width 9 cannot be cut into heads"),
    (["--data", "nowhere"], "nowhere"), (["--stepz", 10], "did you mean --steps?"),
    (["--n-kv-head", 2], "--model nano is a GPT, which has no --n-kv-head")])
def test_a_ladder_that_cannot_predict_is_refused_in_one_line(imitated, tmp_path, capsys, flags,
                                                             words):
    """Before a run starts."""
    status, text, error = run_main(capsys, tools.ladder, *imitated, *FLAGS, *flags)
    assert status == 2 and text == "" and error.count("\n") == 1 and words in error, error
    assert not (tmp_path / "starts").exists() and not (tmp_path / "o").exists()


def test_rungs_of_other_flags_or_another_data_set_are_refused(imitated, tmp_path, monkeypatch,
                                                              capsys):
    assert run_main(capsys, tools.ladder, *imitated, *FLAGS)[0] == 0
    count = len(starts(tmp_path))
    tokens = TokenDataset(imitated[1], "train", 32).tokens_of([0] * 4000).ravel() % 257
    dataset(tmp_path / "other", dict(train_0=tokens, val_0=tokens[:4000]), fingerprint="other")
    for flags, words in [(["--data", tmp_path / "other"], "holds a run of another data set"),
                         (["--batch-size", 8], "holds a run with --batch-size 16, not 8: give"),
                         (["--lr", 2e-3], "--lr ")]:
        status, text, error = run_main(capsys, tools.ladder, *imitated, *FLAGS, *flags)
        assert status == 2 and text == "" and error.count("\n") == 1 and words in error, error
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
