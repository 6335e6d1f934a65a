"""tools/follow.py: what TensorBoard and Weights & Biases get of a run.

    python -m pytest tests/test_follow.py
"""
import json
import math
import subprocess
import sys
from unittest import mock

import pytest

from runtime import directory
from tests.harness import TINY, Command, launch, read_metrics, run_main
from tools import follow
from tools.metrics import read_metrics as read_run

NAMES = ["tensorboard", "wandb"]


class FakeWandB:
    """Weights & Biases as far as we use it. `lines`: what a server keeps over several sessions."""

    def __init__(self):
        self.lines, self.configs, self.finished = [], [], 0
        self.log = self.lines.append
        self.config = mock.Mock(update=lambda values, **_: self.configs.append(values))
        self.define_metric = mock.Mock()
        self.setup = mock.Mock(return_value=mock.Mock(settings=mock.Mock(mode="online")))
        self.login = mock.Mock(return_value=True)

    def init(self, **_):
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


def log_words(out, words, number=0):
    """A run that writes these lines. A word is a step, whose loss is the word's number, or an event
    and its step."""
    metrics = directory.Metrics(out, 0)
    for number, word in enumerate(words.split(), number):
        event, _, step = word.rpartition(":")
        if event:
            metrics.write(step=int(step), event=event, to=3, config=dict(lr=number))
        else:
            metrics.write(step=int(step), loss=number, tokens=1, lr=0.1, tokens_per_second=1.0,
                          grad_norm=math.nan)


def log_run_that_resumes(out):
    """A rollback to step 3, and a resume from step 3. Valid are the losses VALID."""
    log_words(out, "start:0 1 2 3 4 skip:5 spike:5 5 rollback:5 skip:4 4 5")
    log_words(out, "damaged:3 resume:3 4 5 6 7 end:7", 20)


VALID = [(1, 1), (2, 2), (3, 3), (4, 22), (5, 23), (6, 24), (7, 25)]


def assert_events_arrived(out, texts):
    wanted = [(event["event"], event["step"]) for event in read_run(out).events]
    assert sorted((x["event"], x["step"]) for x in map(json.loads, texts)) == sorted(wanted)


def test_tensorboard_hides_void_steps_and_weights_and_biases_keeps_them(tmp_path, wandb, capsys):
    """Both have every event."""
    pytest.importorskip("tensorboard")
    log_run_that_resumes(tmp_path)
    for name in NAMES:
        text = f"{tmp_path} is sent to {name}\n"
        assert run_main(capsys, follow, tmp_path, "--to", name) == (0, text, "")
    seen = ReadByTensorBoard(tmp_path)
    assert seen.losses() == VALID and "loss" in seen.read.Tags()["scalars"]
    assert_events_arrived(tmp_path, seen.texts())
    rows, _ = read_metrics(tmp_path)
    assert wandb.losses() == [(row["step"], row["loss"]) for row in rows]
    assert_events_arrived(tmp_path, wandb.texts())
    assert wandb.finished == 1 and dict(lr=21) in wandb.configs
    status, _, error = run_main(capsys, follow, tmp_path, "--to", "tensorboard")
    assert status == 2 and f"{tmp_path}/tensorboard exists: remove it" in error
    with mock.patch.object(wandb, "log", side_effect=OSError("lost\nfor now")):
        status, _, _ = run_main(capsys, follow, tmp_path, "--to", "wandb")
    assert status == "tools.follow: wandb failed: OSError: lost for now"    # printed; 1


def test_without_a_key_weights_and_biases_asks_nothing(tmp_path, wandb, capsys):
    """Offline no key is needed."""
    wandb.login.return_value = False
    log_words(tmp_path, "start:0 1 2 end:2")
    status, _, _ = run_main(capsys, follow, tmp_path, "--to", "wandb")
    assert "run `wandb login`" in status
    wandb.login.assert_called_with(prompt=False, verify=False)
    wandb.setup.return_value.settings.mode = "offline"
    assert run_main(capsys, follow, tmp_path, "--to", "wandb")[0] == 0


SERVED = """
import json, sys
from tensorboard import context, program
board = program.TensorBoard()
board.configure(["", "--logdir", sys.argv[1], "--load_fast", "true", "--reload_interval", "0"])
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


def test_tensorboards_data_server_lists_one_run_for_each_out_and_keeps_every_event(tmp_path):
    """Of two --outs below one folder. It forgets void steps in a way of its own."""
    pytest.importorskip("tensorboard_data_server")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        log_run_that_resumes(tmp_path / name)
        follow.send(tmp_path / name, "tensorboard")
    ran = subprocess.run([sys.executable, "-c", SERVED, tmp_path], text=True, capture_output=True,
                         timeout=60)
    assert ran.returncode == 0, ran.stderr
    losses, texts = json.loads(ran.stdout)
    assert set(losses) == set(texts) == {"a/tensorboard", "b/tensorboard"}
    for name in ("a", "b"):
        assert losses[f"{name}/tensorboard"] == list(map(list, VALID))
        assert_events_arrived(tmp_path / name, texts[f"{name}/tensorboard"])


def test_a_run_is_followed_while_it_trains_and_through_a_resume(shards, tmp_path):
    """By a process of its own, which ends when the run has made all steps."""
    pytest.importorskip("tensorboard")
    flags = ["--data", shards, "--out", "o", *TINY]
    first, = launch(1, *flags, "--steps", 3, cwd=tmp_path)
    assert first.finish(200)[0] == 0
    lines = (tmp_path / "o/metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "o/metrics.jsonl").write_bytes(b"".join(lines[:-1]) + b"{torn")     # a crash
    reader = Command("tools/follow.py", "o", "--to", "tensorboard", cwd=tmp_path)
    second, = launch(1, *flags, "--steps", 6, cwd=tmp_path)
    assert second.finish(200)[0] == 0 and reader.finish(200)[0] == 0
    run = read_run(tmp_path / "o")
    seen = ReadByTensorBoard(tmp_path / "o")
    assert seen.losses() == [(step, pytest.approx(loss)) for step, loss in
                             zip(run.column("step"), run.column("loss"))]
    assert len(seen.losses()) == 6
    assert_events_arrived(tmp_path / "o", seen.texts())


def test_follow_refuses_mistakes_in_one_line(tmp_path, wandb, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = [(["o", "--to", "wandb"], "o has no metrics.jsonl: give the --out of a run that has "),
             (["o", "--to", "comet"], "--to comet: give tensorboard or wandb"),
             (["o", "--to", "tensorboard,wandb"], "--to tensorboard,wandb: give tensorboard or "
              "wandb, one at a time"), (["o"], "--to"), (["--to", "wandb"], "OUT"),
             (["p", "--to", "tensorboard"], "--to tensorboard needs a package that is missing: pip "
              "install tensorboard")]
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "metrics.jsonl").touch()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for arguments, words in cases:
        status, text, error = run_main(capsys, follow, *arguments)
        assert (status, text) == (2, "") and error.count("\n") == 1 and words in error, error
        assert error.startswith("tools.follow: ")


def test_the_next_file_of_tensorboard_is_read_last(tmp_path):
    """TensorBoard reads them in the order of their names, of which older ones are a time."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    for name in ("000001", "1732700000000000000", "9"):
        (folder / f"events.out.tfevents.{name}").touch()
    follow.TensorBoard(tmp_path)
    assert max(file.name for file in folder.glob("events.*1*")).endswith("1732700000000000001")
