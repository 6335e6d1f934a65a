"""tools/follow.py: what TensorBoard and Weights & Biases get of a run.

    python -m pytest tests/test_follow.py
"""
import importlib
import json
import math
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from runtime import directory, start_follow
from tests.harness import TINY, expect_mistake, launch, run_main
from tools import compare, follow


class FakeWandB:
    """Weights & Biases as far as the follower uses it: what a server keeps over several sessions.
    It refuses a step that is behind, as the service does."""

    def __init__(self):
        self.steps, self.ids, self.configs, self.finished = {}, [], [], 0
        self.id = "x"
        self.config = mock.Mock(update=self.update_config)

    def init(self, id, **_):
        self.ids.append(id)
        self.closed = max(self.steps, default=-1)
        return self

    def update_config(self, values, allow_val_change):
        self.configs.append(values)

    def log(self, values, step):
        assert step >= max(self.steps, default=0) and step > self.closed
        self.steps.setdefault(step, {}).update(values)

    def finish(self):
        self.finished += 1

    def losses(self):
        return [(step, row["loss"]) for step, row in self.steps.items() if "loss" in row]

    def texts(self):
        return [text for row in self.steps.values() for field, lines in row.items()
                if field.startswith("events/") for text in lines.split("\n")]


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


class ReadByTensorBoard:
    """The losses and events in OUT/tensorboard, as TensorBoard reads them."""

    def __init__(self, out):
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        multiplexer = reader.__name__.replace("accumulator", "multiplexer")
        runs = importlib.import_module(multiplexer).EventMultiplexer()
        self.runs = list(runs.AddRunsFromDirectory(str(out)).Runs())
        self.read = reader.EventAccumulator(str(out / "tensorboard")).Reload()

    def losses(self):
        assert self.runs == ["tensorboard"] and self.read.Tags()["scalars"] == ["loss"]
        return [(x.step, x.value) for x in self.read.Scalars("loss")]

    def texts(self):
        return [x.tensor_proto.string_val[0] for tag in self.read.Tags()["tensors"]
                for x in self.read.Tensors(tag)]


def log_words(out, words, number=0):
    """Write lines as a run does: a word is a step, whose loss is the word's number, or an event and
    its step."""
    metrics = directory.Metrics(out, 0)
    for number, word in enumerate(words.split(), number):
        event, _, step = word.rpartition(":")
        if event:
            metrics.write(step=int(step), event=event, to=3, config=dict(lr=number))
        else:
            metrics.write(step=int(step), loss=number, grad_norm=math.nan)


def assert_events_arrived(out, texts):
    wanted = [(event["event"], event["step"]) for event in compare.read_metrics(out).events]
    assert sorted((x["event"], x["step"]) for x in map(json.loads, texts)) == sorted(wanted)


def send(out, *names):
    """What the follower does each second."""
    if "tensorboard" in names:
        pytest.importorskip("tensorboard")
    destinations = [follow.DESTINATIONS[name](out) for name in names]
    for destination in destinations:
        follow.send_new_lines(out / "metrics.jsonl", destination)
        if destination.is_open:
            destination.close()


FIRST, THEN = "start:0 1 2 3 4 skip:5 spike:5 5 rollback:5 skip:4 skip:4 4 5", (
    "damaged:3 resume:3 4 5 6 7 end:7")


@pytest.mark.parametrize("name, kept", [("tensorboard", [1, 2, 3, 22, 23, 24, 25]),
                                        ("wandb", [1, 2, 3, 4, 7, 24, 25])])
@pytest.mark.parametrize("restarts", ["at the resume", "later", "after each second line"])
def test_a_log_has_every_step_once_and_every_event_after_a_rollback_and_a_resume(
        tmp_path, wandb, name, kept, restarts):
    """In order, wherever the follower is started again: TensorBoard hides void steps; Weights &
    Biases keeps those that it has."""
    log_words(tmp_path, FIRST)
    if restarts == "at the resume":
        send(tmp_path, name)
    log_words(tmp_path, THEN, 20)
    if restarts == "after each second line":
        path = tmp_path / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        for count in range(0, len(lines), 2):
            path.write_bytes(b"".join(lines[:count]))
            send(tmp_path, name)
        path.write_bytes(b"".join(lines))
    for _ in range(2):                      # the second time there is nothing to send
        send(tmp_path, name)
    seen = ReadByTensorBoard(tmp_path) if name == "tensorboard" else wandb
    assert seen.losses() == list(enumerate(kept, 1))
    assert_events_arrived(tmp_path, seen.texts())
    if name == "wandb":
        assert wandb.ids[0] is None and set(wandb.ids[1:]) <= {"x"}
        assert wandb.finished == len(wandb.ids) and dict(lr=21) in wandb.configs


SERVED = """
import json, sys
from tensorboard import context, program
board = program.TensorBoard()
board.configure(["", "--logdir", sys.argv[1], "--load_fast", sys.argv[2], "--reload_interval", "0",
                 "--reload_task", "blocking"])
ingester = board._make_data_ingester()
served = ingester.data_provider
many = dict(ctx=context.RequestContext(), experiment_id="", downsample=1000)
losses, texts = {}, {}
while len(losses) < 2 or len(texts) < 2:        # the data server reads in a thread
    losses = served.read_scalars(plugin_name="scalars", **many)
    texts = served.read_tensors(plugin_name="text", **many)
losses = {run: [(x.step, x.value) for x in tags["loss"]] for run, tags in losses.items()}
texts = {run: [x.numpy.item().decode() for tag in tags.values() for x in tag]
         for run, tags in texts.items()}
print(json.dumps([losses, texts]))
"""


@pytest.mark.parametrize("fast", ["true", "false"])
def test_tensorboard_lists_one_run_for_each_out_and_keeps_every_event(tmp_path, fast):
    """As the program serves two --outs below one folder, by its data server and without: each of
    the two forgets in a way of its own. At the resume the clock is set back."""
    pytest.importorskip("tensorboard")
    if fast == "true":
        pytest.importorskip("tensorboard_data_server")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        log_words(tmp_path / name, FIRST)
        send(tmp_path / name, "tensorboard")
        log_words(tmp_path / name, THEN, 20)
        with mock.patch.object(time, "time_ns", return_value=5):
            send(tmp_path / name, "tensorboard")
    ran = subprocess.run([sys.executable, "-c", SERVED, tmp_path, fast], text=True,
                         capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    losses, texts = json.loads(ran.stdout)
    assert set(losses) == set(texts) == {"a/tensorboard", "b/tensorboard"}
    for name in ("a", "b"):
        assert losses[f"{name}/tensorboard"] == [[1, 1], [2, 2], [3, 3], [4, 22], [5, 23], [6, 24],
                                                 [7, 25]]
        assert_events_arrived(tmp_path / name, texts[f"{name}/tensorboard"])


def test_lines_arrive_whole_also_if_the_file_shrinks(tmp_path, wandb):
    """A line is torn at some byte; later the last three lines are lost, as after a crash of the
    machine, and the run goes on from step 1."""
    pytest.importorskip("tensorboard")
    log_words(tmp_path, "start:0 1 2 3 4")
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    destinations = [follow.DESTINATIONS[name](tmp_path) for name in ("tensorboard", "wandb")]

    def update():
        for destination in destinations:
            follow.send_new_lines(path, destination)

    for size in range(0, len(content) + 1, 7):
        path.write_bytes(content[:size])
        update()
    path.write_bytes(content)
    update()
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    update()
    log_words(tmp_path, "resume:1 2 3 4 5", 10)
    update()
    assert ReadByTensorBoard(tmp_path).losses() == [(1, 1), (2, 11), (3, 12), (4, 13), (5, 14)]
    assert wandb.losses() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 14)]


def test_steps_logged_without_a_log_are_sent_later(tmp_path, wandb):
    """Also those from before the folder was removed; and each goes on from where it came itself."""
    log_words(tmp_path, "start:0 1 2")
    send(tmp_path, "wandb")
    log_words(tmp_path, "resume:2 3 4", 10)                 # a run without --log
    log_words(tmp_path, "resume:4 5", 20)
    send(tmp_path, "wandb", "tensorboard")
    losses = [(1, 1), (2, 2), (3, 11), (4, 12), (5, 21)]
    assert wandb.losses() == losses == ReadByTensorBoard(tmp_path).losses()
    for file in (tmp_path / "tensorboard").glob("*.json"):
        file.unlink()
    send(tmp_path, "tensorboard")
    assert losses == ReadByTensorBoard(tmp_path).losses()


def test_a_log_that_fails_costs_one_warning_and_goes_on_from_there_later(tmp_path, wandb, capsys):
    """Weights & Biases fails at its fifth line; TensorBoard goes on."""
    pytest.importorskip("tensorboard")
    log_words(tmp_path, "start:0 1 2 3 4 5 end:5")
    with mock.patch.object(wandb, "log", side_effect=[None] * 4 + [OSError("lost\nfor now")]):
        assert not follow.follow(tmp_path, ["wandb", "tensorboard"], parent=False)
    error = capsys.readouterr().err
    assert error == "tools.follow: warning: wandb is off from here on: OSError: lost for now\n"
    assert len(ReadByTensorBoard(tmp_path).losses()) == 5
    assert follow.follow(tmp_path, ["wandb", "tensorboard"], parent=False)
    assert wandb.losses() == [(4, 4), (5, 5)] and capsys.readouterr().err == ""
    with mock.patch.object(wandb, "finish", side_effect=OSError):
        log_words(tmp_path, "resume:5 6 end:6")
        assert not follow.follow(tmp_path, ["wandb"], parent=False)
    assert capsys.readouterr().err.count("\n") == 1


def test_the_follower_waits_for_more_until_the_run_is_complete(tmp_path, monkeypatch):
    """An `end` that other lines follow, as after a resume with more --steps, is not the end."""
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    log_words(tmp_path, "start:0 1 end:1 resume:1 2")
    follower = threading.Thread(target=follow.follow, args=(tmp_path, ["tensorboard"], False))
    follower.start()
    state = tmp_path / "tensorboard" / "follow.json"
    for words, complete in [("3", False), ("stop:3", False), ("resume:3 4", False)]:
        log_words(tmp_path, words)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        while not state.exists() or json.loads(state.read_text())["position"] < size:
            time.sleep(0.01)
        assert json.loads(state.read_text())["complete"] == complete and follower.is_alive()
    log_words(tmp_path, "end:4")
    follower.join(30)
    assert not follower.is_alive()
    assert [step for step, _ in ReadByTensorBoard(tmp_path).losses()] == [1, 2, 3, 4]


def test_follow_refuses_mistakes_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for arguments, words in [
            (["o", "--to", "wandb"], "o has no metrics.jsonl: give the --out of a run"),
            (["o", "--to", "wandb,comet"], "'comet' is not one of tensorboard, wandb"),
            (["o"], "--to"), (["--to", "wandb"], "OUT"), (["o", "--to", "wandb", "--x"], "--x")]:
        status, text, error = run_main(capsys, follow, *arguments)
        assert (status, text) == (2, "") and error.count("\n") == 1 and words in error, error
        assert error.startswith("tools.follow: ")
    with mock.patch.dict(sys.modules, wandb=None), pytest.raises(ValueError,
                                                                 match="pip install wandb"):
        follow.parse_names("wandb")


def test_train_py_sends_every_step_through_a_process_of_its_own(shards, tmp_path):
    """Also what a resume with more steps adds; and the run says that it is complete, once."""
    pytest.importorskip("tensorboard")
    flags = ["--data", shards, "--out", "o", *TINY, "--log", "tensorboard"]
    for steps in (4, 6):
        ranks = launch(2, *flags, "--steps", steps, cwd=tmp_path)
        for status, _, error in [rank.finish(200) for rank in ranks]:
            assert (status, error) == (0, "")
    run = compare.read_metrics(tmp_path / "o")
    assert [event["event"] for event in run.events] == ["start", "end", "resume", "end"]
    seen = ReadByTensorBoard(tmp_path / "o")
    assert [(x.step, x.value) for x in seen.read.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in zip(run.steps["step"], run.steps["loss"])]
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert_events_arrived(tmp_path / "o", seen.texts())


def test_a_run_without_tools_refuses_log_in_one_line(run_train, shards, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(start_follow, "FOLLOW", tmp_path / "tools" / "follow.py")
    expect_mistake(run_train("--data", shards, "--out", tmp_path, *TINY, "--log", "tensorboard"),
                   "needs " + str(start_follow.FOLLOW))


def test_a_signal_that_ends_the_run_is_sent_and_does_not_end_the_follower(shards, tmp_path):
    """The follower gets the Ctrl-C too, as in a terminal; it ends when standard input closes."""
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "tools.follow", tmp_path, "--to", "tensorboard", "--parent"]
    log_words(tmp_path, "start:0 1 end:1 resume:1 2")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as follower:
        state = tmp_path / "tensorboard" / "follow.json"
        while not state.exists() and follower.poll() is None:
            time.sleep(0.01)
        follower.send_signal(signal.SIGINT)
        log_words(tmp_path, "stop:2")
        follower.stdin.close()
        assert (follower.wait(30), follower.stderr.read()) == (0, b"")
    seen = ReadByTensorBoard(tmp_path)
    assert len(seen.losses()) == 2
    assert_events_arrived(tmp_path, seen.texts())


@pytest.mark.parametrize("code, words", [
    ("import sys, time; sys.stdin.read(); time.sleep(60)", "did not end in 0.5 seconds"),
    ("import os; os.kill(os.getpid(), 9)", None), ("exit(1)", None),
    ("import sys; sys.stdin.read()", None)])
def test_a_follower_that_hangs_costs_one_warning_and_never_the_run(
        shards, tmp_path, run_train, monkeypatch, code, words):
    """(A follower that fails by itself has printed the reason.)"""
    pytest.importorskip("tensorboard")
    started, Popen = [], subprocess.Popen

    def start(command, **options):
        if "tools.follow" not in command:                   # git, which tells the commit
            return Popen(command, **options)
        started.append(Popen([sys.executable, "-c", code], **options))
        return started[-1]
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(start_follow, "SECONDS_TO_END", 0.5)
    status, text, error = run_train("--data", shards, "--out", tmp_path, *TINY, "--steps", 2,
                                    "--log", "tensorboard")
    assert status == 0 and "step 2/2" in text and started[0].poll() is not None
    if words is None:
        assert error == ""
    else:
        assert error.count("\n") == 1 and words in error
