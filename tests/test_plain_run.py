"""The end of train.py --plain by a signal, and on a full disk.

That it trains as train.py does: test_all.py. Its refusals, resumes and files: test_stories.py.
"""
import errno
import os
import signal
from unittest import mock

import checkpoint
from tests.commands import TINY, Command, read_metrics, wait_for_step
from tests.harness import column

PLAIN = [*TINY, "--plain", "--device", "cpu"]


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
    """As a Run: the earlier checkpoint stays whole, and the losses are those of a healthy disk."""
    flags = ["--data", shards, *PLAIN, "--save-every", 1]
    assert run_train(*flags, "--out", tmp_path / "healthy")[0] == 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    healthy, _ = read_metrics(tmp_path / "healthy")
    write = checkpoint.write_file
    for name, fails, status in (("o", {2, 3}, 0), ("last", {3, 4}, 1)):
        def write_or_fail(state, aside, path):
            with mock.patch.object(os, "fsync", side_effect=full if state["step"] in fails
                                   else None):
                write(state, aside, path)
        with mock.patch.object(checkpoint, "write_file", write_or_fail):
            found, _, error = run_train(*flags, "--out", tmp_path / name)
        assert found == status and error.count("\n") == error.count("No space left") == 2, error
        assert error.count("warning: ") == error.count("untouched") == 2 - status
        rows, events = read_metrics(tmp_path / name)
        assert column(rows, "loss") == column(healthy, "loss")
        assert (events[-1]["event"] == "end") == (status == 0)
        newest = checkpoint.load(tmp_path / name / "latest.pt")
        assert newest["step"] == (4 if status == 0 else 2)
