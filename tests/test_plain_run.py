"""train.py --plain beside its training: what it refuses, what its checkpoints hold, its log, and
its end by a signal. test_all.py shows that it trains as train.py does.
"""
import errno
import json
import os
import signal
from unittest import mock

import checkpoint
from corpus.prepare import prepare
from tests.commands import TINY, Command, expect_mistake, read_metrics, wait_for_step

PLAIN = [*TINY, "--plain", "--device", "cpu"]


def test_several_processes_and_conversations_are_refused(shards, run_train, tmp_path):
    flags = ["--out", tmp_path / "o", *PLAIN, "--seq-len", 32]
    expect_mistake(run_train("--data", shards, *flags, WORLD_SIZE=2),
                   "--plain is for one process, not 2")
    pairs = [dict(prompt=f"{i}", completion=f"{2 * i}") for i in range(200)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    prepare([tmp_path / "chat.jsonl"], tmp_path / "chat", "bytes", field=None)
    expect_mistake(run_train("--data", tmp_path / "chat", *flags), "--plain reads text")


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


def test_a_full_disk_ends_the_run_in_one_line(shards, run_train, tmp_path):
    """The earlier checkpoint stays whole."""
    flags = ["--data", shards, "--out", tmp_path, *PLAIN]
    assert run_train(*flags, "--steps", 2)[0] == 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "fsync", side_effect=full):
        status, _, error = run_train(*flags)
    assert status == 1 and error.count("\n") == 1
    assert "could not be written" in error and "No space left" in error
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 2
