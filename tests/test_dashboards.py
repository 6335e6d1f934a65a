"""runtime/dashboards.py, --log: what TensorBoard and Weights & Biases get of a run.

    python -m pytest tests/test_dashboards.py
"""
import json
import math
import signal
import sys
import threading
from unittest import mock

import pytest

from runtime import dashboards, directory
from tests.harness import TINY, launch, read_metrics, wait_for_step
from tools.metrics import read_metrics as read_run

NAMES = ["tensorboard", "wandb"]


class FakeWandB:
    """Weights & Biases as far as we use it. `lines`: what a server keeps over several sessions."""

    def __init__(self):
        self.lines, self.ids, self.configs, self.finished = [], [], [], 0
        self.log = self.lines.append
        self.config = mock.Mock(update=lambda values, **_: self.configs.append(values))
        self.define_metric = mock.Mock()
        self.setup = mock.Mock(return_value=mock.Mock(settings=mock.Mock(mode="online")))
        self.login = mock.Mock(return_value=True)

    def init(self, id, resume, **_):
        assert resume == "allow"
        self.ids.append(id)
        return self

    def finish(self):
        self.finished += 1

    def losses(self):
        self.define_metric.assert_called_with("*", step_metric="step")      # the x axis
        return [(line["step"], line["loss"]) for line in self.lines if "loss" in line]

    def texts(self):
        return [text for line in self.lines for name, text in line.items()
                if name.startswith("events/")]


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(fake, "__spec__", fake, raising=False)
    return fake


class ReadByTensorBoard:
    """The losses and events in OUT/tensorboard, as TensorBoard reads them."""

    def __init__(self, out):
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        self.read = reader.EventAccumulator(str(out / "tensorboard")).Reload()

    def losses(self):
        return [(x.step, x.value) for x in self.read.Scalars("loss")]

    def texts(self):
        return [x.tensor_proto.string_val[0] for tag in self.read.Tags()["tensors"]
                for x in self.read.Tensors(tag)]


def log_words(out, words, number=0, names=",".join(NAMES), first_step=1):
    """A run with --log that writes these lines. A word is a step, whose loss is the word's number,
    or an event and its step."""
    pytest.importorskip("tensorboard")
    metrics = directory.Metrics(out, 0)
    metrics.dashboards = dashboards.start(names, out, "the run's id", first_step)
    for number, word in enumerate(words.split(), number):
        event, _, step = word.rpartition(":")
        if event:
            metrics.write(step=int(step), event=event, to=3, config=dict(lr=number))
        else:
            metrics.write(step=int(step), loss=number, grad_norm=math.nan)
    metrics.close()


def log_run_that_resumes(out, names=",".join(NAMES)):
    """A rollback to step 3, and a resume from step 3. Valid are the losses VALID."""
    log_words(out, "start:0 1 2 3 4 skip:5 spike:5 5 rollback:5 skip:4 4 5", names=names)
    log_words(out, "damaged:3 resume:3 4 5 6 7 end:7", 20, names, first_step=4)


VALID = [(1, 1), (2, 2), (3, 3), (4, 22), (5, 23), (6, 24), (7, 25)]


def assert_events_arrived(out, texts):
    wanted = [(event["event"], event["step"]) for event in read_run(out).events]
    assert sorted((x["event"], x["step"]) for x in map(json.loads, texts)) == sorted(wanted)


def test_tensorboard_hides_void_steps_and_weights_and_biases_keeps_them_in_one_run(tmp_path, wandb):
    """Both have every event. A resume goes on with the same run of Weights & Biases."""
    log_run_that_resumes(tmp_path)
    seen = ReadByTensorBoard(tmp_path)
    assert seen.losses() == VALID and seen.read.Tags()["scalars"] == ["loss"]
    assert_events_arrived(tmp_path, seen.texts())
    rows, _ = read_metrics(tmp_path)
    assert wandb.losses() == [(row["step"], row["loss"]) for row in rows]
    assert_events_arrived(tmp_path, wandb.texts())
    assert wandb.ids == ["the run's id"] * 2 and wandb.finished == 2
    assert dict(lr=21) in wandb.configs


def test_without_a_key_weights_and_biases_is_off_and_asks_nothing(tmp_path, wandb, capsys):
    """Its own prompt would stand among the lines of the steps. Offline no key is needed."""
    wandb.login.return_value = False
    log_words(tmp_path, "start:0 1 2", names="wandb")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "wandb is off from here on" in error, error
    assert "run `wandb login`" in error and wandb.ids == []
    wandb.login.assert_called_with(prompt=False, verify=False)
    wandb.setup.return_value.settings.mode = "offline"
    log_words(tmp_path, "3", names="wandb")
    assert capsys.readouterr().err == "" and len(wandb.ids) == 1


def test_a_dashboard_that_raises_or_hangs_costs_one_warning_and_never_the_run(
        run_train, shards, tmp_path, wandb, monkeypatch):
    """The other one gets every row."""
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(dashboards, "SECONDS_TO_END", 1)
    released = threading.Event()
    for out, log, words in [
            ("raises", mock.Mock(side_effect=[None, OSError("lost\nfor now")]),
             "train.py: warning: --log: wandb is off from here on: OSError: lost for now\n"),
            ("hangs", lambda line: released.wait(), "wandb did not end in 1 seconds")]:
        monkeypatch.setattr(wandb, "log", log)
        status, text, error = run_train("--data", shards, "--out", tmp_path / out, *TINY,
                                        "--steps", 3, "--log", "wandb,tensorboard")
        assert status == 0 and "step 3/3" in text
        assert error.count("\n") == 1 and words in error
        assert [step for step, _ in ReadByTensorBoard(tmp_path / out).losses()] == [1, 2, 3]
    released.set()


def test_a_run_ended_by_a_signal_and_resumed_is_whole_in_tensorboard(shards, tmp_path):
    """Rank 0 of two writes each row and event, the last ones too."""
    pytest.importorskip("tensorboard")
    flags = ["--data", shards, "--out", "o", *TINY, "--log", "tensorboard"]
    ranks = launch(2, *flags, "--steps", 10 ** 6, cwd=tmp_path)
    wait_for_step(tmp_path / "o", 3, ranks[0])
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        assert rank.finish(200)[::2] == (0, "")
    done = read_metrics(tmp_path / "o")[1][-1]["step"]
    for rank in launch(2, *flags, "--steps", done + 2, cwd=tmp_path):
        assert rank.finish(200)[::2] == (0, "")
    run = read_run(tmp_path / "o")
    assert [event["event"] for event in run.events] == ["start", "stop", "resume", "end"]
    seen = ReadByTensorBoard(tmp_path / "o")
    assert seen.losses() == [(row["step"], pytest.approx(row["loss"])) for row in run.rows]
    assert len(seen.losses()) == done + 2
    assert_events_arrived(tmp_path / "o", seen.texts())


def test_the_next_file_of_tensorboard_is_read_last(tmp_path):
    """TensorBoard reads them in the order of their names, of which older ones are a time."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    for name in ("000001", "1732700000000000000", "9"):
        (folder / f"events.out.tfevents.{name}").touch()
    dashboards.TensorBoard(tmp_path)
    assert max(file.name for file in folder.glob("events.*1*")).endswith("1732700000000000001")
