"""train.py --plain: in a notebook, its end by a signal, and on a full disk.

That it trains as train.py does: test_all.py. Its refusals, resumes and files: test_stories.py."""
import errno
import os
import re
import signal
import subprocess
import sys
from time import sleep
from unittest import mock

import pytest

import checkpoint
import train
from tests.commands import TINY, Command, read_metrics, wait_for_step
from tests.harness import ROOT, column

PLAIN = [*TINY, "--plain", "--device", "cpu"]


def test_the_notebook_of_the_page_has_the_losses_of_the_command(run_train, tmp_path, monkeypatch):
    """And `Config` the defaults of the command, which it checks."""
    page = (ROOT / "docs/training.md").read_text()
    [cell] = re.findall(r"```python\n(from train import .*?)```", page, re.DOTALL)
    [flags] = re.findall("# as (--plain .*)", cell)
    monkeypatch.chdir(tmp_path)
    assert subprocess.run([sys.executable, ROOT / "data.py"], capture_output=True).returncode == 0
    printed = []
    exec(cell, dict(print=printed.append))
    assert run_train(*flags.split())[0] == 0
    rows, _ = read_metrics(tmp_path / "out")
    assert [loss for loss, _ in printed] == pytest.approx(column(rows, "loss"), rel=1e-6)
    assert train.Config(model="gpt2").lr == 6e-4 and train.Config(model="gpt2", lr=1.0).lr == 1.0
    for wrong in (dict(lr_schedule="nope"), dict(beta2=1.0), dict(steps=0)):
        with pytest.raises(ValueError, match=f"--{[*wrong][0].replace('_', '-')}"):
            train.Config(**wrong)


def test_a_signal_ends_a_run_after_a_save(shards, tmp_path):
    """As one process of a Run: it saves the step in progress and ends by the signal. The same
    command continues it."""
    flags = ["--data", shards, "--out", tmp_path, *PLAIN, "--steps", 100000, "--save-every", 0,
             "--eval-every", 0]
    run = Command("train.py", *flags)
    wait_for_step(tmp_path, 3, run)
    run.send_signal(signal.SIGUSR1)
    status, text, error = run.finish()
    assert (status, error) == (-signal.SIGUSR1, "")
    rows, events = read_metrics(tmp_path)
    last = rows[-1]["step"]
    assert events[-1].items() >= dict(event="stop", step=last).items()
    assert f"saved after step {last}; run the same command to go on" in text
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == last >= 3
    status, _, error = Command("train.py", *flags, "--steps", last + 1).finish()
    assert (status, error) == (0, "")
    assert read_metrics(tmp_path)[0][-1]["step"] == last + 1


def test_a_run_outlives_a_failed_save_but_not_the_last(shards, run_train, tmp_path):
    """As a Run: the earlier checkpoint stays whole, and all steps are trained."""
    write = checkpoint.write_file
    for status, failing, newest in ((0, {2, 3}, 4), (1, {3, 4}, 2)):
        def write_or_fail(state, aside, path):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with mock.patch.object(os, "fsync", side_effect=full if state["step"] in failing
                                   else None):
                write(state, aside, path)
        out = tmp_path / f"{status}"
        with mock.patch.object(checkpoint, "write_file", write_or_fail):
            found, _, error = run_train("--data", shards, *PLAIN, "--save-every", 1, "--out", out)
        assert found == status and error.count("\n") == error.count("No space left") == 2, error
        assert error.count("warning: ") == error.count("untouched") == 2 - status
        rows, events = read_metrics(out)
        assert column(rows, "step") == [1, 2, 3, 4]
        assert (events[-1]["event"] == "end") == (status == 0)
        assert checkpoint.load(out / "latest.pt")["step"] == newest


def test_the_time_left_counts_evaluations_and_saves(shards, run_train, tmp_path, monkeypatch):
    """Each of 0.4 s, as the last one."""
    for name in ("plain_evaluate", "plain_save"):
        act = getattr(train, name)
        monkeypatch.setattr(train, name, lambda *args, act=act: sleep(0.4) or act(*args))
    _, text, _ = run_train("--data", shards, *PLAIN, "--steps", 3, "--eval-every", 1,
                           "--save-every", 1, "--log-every", 1, "--out", tmp_path)
    assert re.findall(r"left 0:00:0(\d)", text)[1:] == ["2", "1"]
