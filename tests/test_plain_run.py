"""train.py --plain beside its training: what it refuses, what its checkpoints hold, its log, and
its end by a signal. test_all.py shows that it trains as train.py does.
"""
import errno
import json
import os
import re
import signal
from unittest import mock

import pytest

import checkpoint
from corpus.prepare import prepare
from tests.harness import TINY, Command, expect_mistake, kinds, read_metrics, wait_for_step

PLAIN = [*TINY, "--plain", "--device", "cpu"]


@pytest.mark.parametrize("flags, words", [
    (["--tp", 2], "--plain has no --tp"),
    (["--zero", 1, "--exact"], "--plain has no --exact, --zero"),
    (["--dropout", 0.1], "--plain has no --dropout"),
    (["--dtype", "bf16"], "--plain has no --dtype bf16"),
    (["--resume", "x.pt"], "--plain has no --resume FILE"),
    (["--init-from", "x.pt"], "--plain has no --init-from"),
    (["--data", "a=1,b=2"], "--plain reads one directory, not a mixture"),
])
def test_flags_of_other_programs_are_refused(shards, run_train, tmp_path, flags, words):
    out = tmp_path / "o"
    expect_mistake(run_train("--data", shards, "--out", out, *PLAIN, *flags), words)
    assert not out.exists()


def test_several_processes_and_conversations_are_refused(shards, run_train, tmp_path):
    flags = ["--out", tmp_path / "o", *PLAIN, "--seq-len", 32]
    expect_mistake(run_train("--data", shards, *flags, WORLD_SIZE=2),
                   "--plain is for one process, not 2")
    pairs = [dict(prompt=f"{i}", completion=f"{2 * i}") for i in range(200)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    prepare([tmp_path / "chat.jsonl"], tmp_path / "chat", "bytes", field=None)
    expect_mistake(run_train("--data", tmp_path / "chat", *flags), "--plain reads text")


@pytest.mark.parametrize("first, then, words", [
    ([], ["--batch-size", 2], "this run has --batch-size 4, not 2"),
    (["--batch-ramp", "2:2:4"], [], "this run has --batch-ramp"),
    (["--dropout", 0.1], [], "this run has --dropout"),
    (["--skip-steps", "2:2"], [], "this run has --skip-steps"),
    ([], ["--data", "OTHER"], "was trained on the text"),
])
def test_what_another_program_must_continue_is_refused(shards, two_sources, run_train, tmp_path,
                                                       first, then, words):
    """One line says so, and the run stays as it is."""
    out = tmp_path / "o"
    flags = ["--data", shards, "--out", out, *TINY, "--batch-size", 4, "--steps", 4]
    assert run_train(*flags, *first)[0] == 0
    before = (out / "latest.pt").read_bytes(), (out / "metrics.jsonl").read_bytes()
    then = [two_sources / "b" if flag == "OTHER" else flag for flag in then]
    expect_mistake(run_train(*flags, "--plain", "--steps", 6, *then), words)
    assert ((out / "latest.pt").read_bytes(), (out / "metrics.jsonl").read_bytes()) == before


def test_a_run_that_has_changed_its_batch_size_is_refused(shards, run_train, tmp_path):
    flags = ["--data", shards, "--out", tmp_path, *TINY]
    for steps, size in ((2, 2), (4, 4)):
        assert run_train(*flags, "--steps", steps, "--batch-size", size)[0] == 0
    expect_mistake(run_train(*flags, "--batch-size", 4, "--steps", 6, "--plain"),
                   "had another --batch-size")


def test_checkpoints_and_metrics_have_the_entries_of_a_run(shards, run_train, tmp_path):
    """Beside the tensors a plain run and a Run write the same, but for what the Run has observed.
    The scaler of an earlier fp16 run is not kept."""
    flags = ["--data", shards, *TINY]
    assert run_train(*flags, "--out", tmp_path / "after_fp16", "--dtype", "fp16", "--steps",
                     2)[0] == 0
    states = {}
    for name, first in (("run", []), ("plain", ["--plain"]), ("after_fp16", ["--plain"])):
        assert run_train(*flags, "--out", tmp_path / name, *first)[0] == 0
        states[name] = checkpoint.load(tmp_path / name / "latest.pt")
    for name, state in states.items():
        for key in ("format", "step", "consumed_samples", "tokens", "optimizer_steps", "model",
                    "tokenizer", "data"):
            assert state[key] == states["run"][key], (name, key)
        assert state["scaler"]["scale"] == 1
        assert bool(state["monitor"]["losses"]) == (name == "run")      # that of other steps
        assert state.keys() == states["run"].keys()
        assert state["config"] | dict(plain=False, out="") == states["run"]["config"] | dict(out="")
        assert [step for step, _, _ in state["monitor"]["checkpoints"]][-1] == 4
    (rows, events), (plain_rows, plain_events) = (
        read_metrics(tmp_path / name) for name in ("run", "plain"))
    for row, plain_row in zip(rows, plain_rows, strict=True):
        assert row.keys() - plain_row.keys() == {"activation_norm"}
        for key in ("step", "tokens", "lr", "batch_size", "loss_scale"):
            assert row[key] == plain_row[key]
    assert kinds(plain_events) == ["start", "end"]
    for key in ("data", "environment"):
        assert events[0][key] == plain_events[0][key]


def test_a_run_that_continues_can_go_back_to_a_plain_checkpoint(shards, run_train, tmp_path):
    """The monitor lists the plain checkpoints that are left, and a Run takes them."""
    flags = ["--data", shards, "--out", tmp_path, *TINY, "--keep", 1]
    assert run_train(*flags, "--plain")[0] == 0
    listed = checkpoint.load(tmp_path / "latest.pt")["monitor"]["checkpoints"]
    files = sorted(file.name for file in tmp_path.glob("step_*.pt"))
    assert [file for _, file, healthy in listed if healthy] == files == ["step_00000004.pt"]
    assert run_train(*flags, "--steps", 6)[0] == 0
    assert (tmp_path / "step_00000004.pt").exists()     # healthy: no step after it has been judged


def test_a_finished_run_says_so_and_a_resume_tells_which_flags_have_changed(shards, run_train,
                                                                            tmp_path):
    flags = ["--data", shards, "--out", tmp_path, *PLAIN]
    run_train(*flags)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    status, printed, error = run_train(*flags)
    assert (status, error) == (0, "") and "is step 4 of 4: nothing left to do" in printed
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    _, printed, _ = run_train(*flags, "--steps", 6, "--lr", 0.001)
    assert (f"resume   {tmp_path}/step_00000004.pt, after step 4, steps 6 instead of 4, "
            f"lr 0.001 instead of 0.004; so the next step's learning rate is ") in printed
    assert "bits a byte" in printed
    event, = (event for event in read_metrics(tmp_path)[1] if event["event"] == "resume")
    assert event["changed"] == dict(steps=[4, 6], lr=[0.004, 0.001])


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


def test_a_loss_that_is_not_finite_ends_the_run_without_a_save(shards, run_train, tmp_path):
    status, _, error = run_train("--data", shards, "--out", tmp_path, *PLAIN, "--lr", 1e30,
                                 "--save-every", 1)
    assert status == 1 and re.search(r"step \d has loss nan .*lower --lr\n$", error), error
    for file in tmp_path.glob("*.pt"):
        assert all(x.isfinite().all() for x in checkpoint.load(file)["parameters"].values())


def test_a_full_disk_ends_the_run_in_one_line(shards, run_train, tmp_path):
    """The earlier checkpoint stays whole."""
    flags = ["--data", shards, "--out", tmp_path, *PLAIN]
    assert run_train(*flags, "--steps", 2)[0] == 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "fsync", side_effect=full):
        status, _, error = run_train(*flags)
    assert status == 1 and error.count("\n") == 1
    assert "No space left" in error and "earlier checkpoints, if any, are untouched" in error
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 2


def test_two_signals_at_once_are_one(shards, tmp_path):
    """A shell and a launcher may send the same signal. Here the second comes in the evaluation."""
    code = """
import os, signal, threading, train
def send():
    os.kill(os.getpid(), signal.SIGTERM)
evaluate = train.plain_evaluate
def slowly(*arguments):
    send()
    threading.Event().wait(0.1)
    send()
    return evaluate(*arguments)
train.plain_evaluate = slowly
train.main()
"""
    (tmp_path / "program.py").write_text(code)
    run = Command(tmp_path / "program.py", "--data", shards, "--out", tmp_path / "o", *PLAIN,
                  "--save-every", 0)
    status, text, error = run.finish()
    assert (status, error) == (-signal.SIGTERM, "")
    assert "stopped and saved after step 2" in text
    assert checkpoint.load(tmp_path / "o/latest.pt")["step"] == 2


def test_metrics_that_cannot_be_written_end_in_one_line(shards, run_train, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    expect_mistake(run_train("--data", shards, "--out", tmp_path, *PLAIN), "Is a directory")
