"""--log and tools/follow.py: what TensorBoard and Weights & Biases get of a run."""
import json
import math
import sys
from unittest import mock

import pytest

from runtime import dashboards, directory
from tests.commands import TINY, expect_mistake, read_metrics, run_main
from tools import follow, metrics


@pytest.fixture
def wandb(monkeypatch):
    """Weights & Biases as far as we use it. `log` has the lines of all sessions."""
    fake = mock.Mock()
    fake.__spec__ = "is installed"          # for importlib.util.find_spec
    fake.init.return_value = fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


class ReadByWandB:
    """The losses and events of all lines so far."""

    def __init__(self, fake):
        fake.define_metric.assert_called_with("*", step_metric="step")      # the x axis
        self.lines = [call.args[0] for call in fake.log.call_args_list]

    def losses(self):
        return [(line["step"], line["loss"]) for line in self.lines if "loss" in line]

    def texts(self):
        return [text for line in self.lines for name, text in line.items()
                if name.startswith("events/")]


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


def log_words(out, words, number=0, names=("tensorboard", "wandb"), first_step=1):
    """A run with --log. A word is a step, whose loss is the word's number, or an event:step."""
    pytest.importorskip("tensorboard")
    log = directory.Metrics(out, 0)
    log.dashboards = {name: dashboards.KINDS[name]() for name in names}
    log.send(lambda dashboard: dashboard.open(out, "the run's id", first_step))
    for number, word in enumerate(words.split(), number):
        event, _, step = word.rpartition(":")
        if event:
            log.write(step=int(step), event=event, to=3, config=dict(lr=number))
        else:
            log.write(step=int(step), loss=number, grad_norm=math.nan)
    log.send(lambda dashboard: dashboard.close())


def log_run_that_resumes(out, *names):
    """A rollback to step 3, and a resume from step 4. Valid are the losses VALID."""
    log_words(out, "start:0 1 2 3 4 skip:5 spike:5 5 rollback:5 skip:4 4 5", names=names)
    log_words(out, "damaged:4 resume:4 5 6 7 end:7", 20, names, first_step=5)


VALID = [(1, 1), (2, 2), (3, 3), (4, 10), (5, 22), (6, 23), (7, 24)]


def assert_events_arrived(out, texts):
    wanted = [(event["event"], event["step"]) for event in metrics.read_metrics(out).events]
    assert sorted((x["event"], x["step"]) for x in map(json.loads, texts)) == sorted(wanted)


def test_tensorboard_hides_void_steps_and_weights_and_biases_keeps_them_in_one_run(tmp_path, wandb):
    """Both have every event. A resume goes on with the same run of Weights & Biases."""
    log_run_that_resumes(tmp_path, "tensorboard", "wandb")
    seen, theirs = ReadByTensorBoard(tmp_path), ReadByWandB(wandb)
    assert seen.losses() == VALID and seen.read.Tags()["scalars"] == ["loss"]
    assert_events_arrived(tmp_path, seen.texts())
    assert theirs.losses() == [(row["step"], row["loss"]) for row in read_metrics(tmp_path)[0]]
    assert_events_arrived(tmp_path, theirs.texts())
    assert wandb.finish.call_count == 2 and [call.kwargs.items() >= dict(
        id="the run's id", resume="allow").items() for call in wandb.init.mock_calls] == [True] * 2
    wandb.config.update.assert_any_call(dict(lr=21), allow_val_change=True)


def test_follow_sends_the_valid_rows_and_all_events_of_a_run_again(tmp_path, wandb, capsys):
    """To Weights & Biases as a new run each time, to TensorBoard in a new folder."""
    log_run_that_resumes(tmp_path, "wandb")
    wandb.reset_mock()
    for name in dashboards.KINDS:
        text = f"{tmp_path} is sent to {name}\n"
        assert run_main(capsys, follow, tmp_path, "--to", name) == (0, text, "")
    for seen in (ReadByWandB(wandb), ReadByTensorBoard(tmp_path)):
        assert seen.losses() == VALID
        assert_events_arrived(tmp_path, seen.texts())
    assert wandb.init.call_args.kwargs["id"] is None and wandb.finish.call_count == 1
    expect_mistake(run_main(capsys, follow, tmp_path, "--to", "tensorboard"),
                   f"{tmp_path}/tensorboard exists: remove it", program="tools.follow")
    with mock.patch.object(wandb, "log", side_effect=OSError("lost\nfor now")):
        status, _, _ = run_main(capsys, follow, tmp_path, "--to", "wandb")
    assert status == "tools.follow: wandb failed: lost"             # printed; 1


def test_a_dashboard_that_raises_costs_a_warning(run_train, shards, tmp_path, wandb, monkeypatch):
    pytest.importorskip("tensorboard")
    command = ["--data", shards, *TINY, "--steps", 3, "--log", "wandb,tensorboard"]
    monkeypatch.setattr(wandb, "log", mock.Mock(side_effect=[None, OSError("lost\nfor now")]))
    status, text, error = run_train(*command, "--out", tmp_path / "o")
    assert status == 0 and "step 3/3" in text and error.count("\n") == 1, error
    assert "train.py: warning: --log: wandb is off from here on: lost" in error
    assert [step for step, _ in ReadByTensorBoard(tmp_path / "o").losses()] == [1, 2, 3]
    flags = [*command[:-1], "tensorboard", "--out", tmp_path / "o", "--steps"]
    _, told, _ = run_train(*flags, 4)
    assert f"note     --log has the steps from 4 on: `python -m tools.follow {tmp_path}" in told
    assert "--log has" not in run_train(*flags, 5)[1]       # the same dashboard
