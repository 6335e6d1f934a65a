"""tools/follow.py: what TensorBoard and Weights & Biases get of a run that has ended.

    python -m pytest tests/test_follow.py
"""
import sys
from unittest import mock

from tests.commands import run_main
from tests.test_dashboards import (NAMES, VALID, ReadByTensorBoard, assert_events_arrived,
                                   log_run_that_resumes, wandb)         # wandb: a fixture
from tools import follow


def test_follow_sends_the_valid_rows_and_all_events_of_a_run_again(tmp_path, wandb, capsys):
    """To Weights & Biases as a new run each time, to TensorBoard in a new folder."""
    log_run_that_resumes(tmp_path, "wandb")
    wandb.lines.clear()
    for name in NAMES:
        text = f"{tmp_path} is sent to {name}\n"
        assert run_main(capsys, follow, tmp_path, "--to", name) == (0, text, "")
    for seen in (wandb, ReadByTensorBoard(tmp_path)):
        assert seen.losses() == VALID
        assert_events_arrived(tmp_path, seen.texts())
    assert wandb.ids[2:] == [None] and wandb.finished == 3
    status, _, error = run_main(capsys, follow, tmp_path, "--to", "tensorboard")
    assert status == 2 and f"{tmp_path}/tensorboard exists: remove it" in error
    with mock.patch.object(wandb, "log", side_effect=OSError("lost\nfor now")):
        status, _, _ = run_main(capsys, follow, tmp_path, "--to", "wandb")
    assert status == "tools.follow: wandb failed: OSError: lost for now"    # printed; 1


def test_follow_refuses_mistakes_in_one_line(tmp_path, wandb, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = [(["o", "--to", "wandb"], "o has no metrics.jsonl: give the --out of a run"),
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
