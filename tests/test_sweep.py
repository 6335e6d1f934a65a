"""tools/sweep.py: a grid of runs, what it repeats, and what it draws.

    python -m pytest tests/test_sweep.py

Most runs are imitated, as in tests/test_ladder.py.
"""
import json
import re

import pytest

import tools.sweep
from tests.harness import Command, run_main
from tests.test_ladder import imitated      # a fixture
from tools import matplotlib_svg
from tools.metrics import Evaluations, Run
from tools.sweep import best_losses, read_command

SMALL = ["--n-embd", 32, "--seq-len", 32, "--steps", 20, "--save-every", 5]


def sweep(capsys, tmp_path, *arguments):
    """(exit status, standard output, standard error, the runs that it started)."""
    (tmp_path / "starts").write_text("")
    result = run_main(capsys, tools.sweep, *arguments)
    return *result, [line.rpartition("/")[2]
                     for line in (tmp_path / "starts").read_text().splitlines()]


@pytest.mark.claim("A sweep goes on past runs that fail or diverge, and repeats none that has "
                   "ended.")
def test_a_sweep_goes_on_and_repeats_nothing(imitated, tmp_path, monkeypatch, capsys):
    """One run fails, one diverges: the table has the others, the best first. Again: what failed is
    tried again, and what was killed resumes. More values add runs."""
    monkeypatch.setattr(tools.sweep, "find_spec", lambda name: None)
    flags = [*imitated, *SMALL, "--lr", "2e-3,1e-3,7", "--beta2=0.9,0.95"]
    monkeypatch.setenv("FAILS", "lr1e-3_beta20.95")
    status, text, error, started = sweep(capsys, tmp_path, *flags)
    assert status == 0 and len(started) == 6 and "sweep    6 runs of 6\n" in text
    table = re.findall(r"(?m)^[a-z] +(\d\.\d+) .*/(lr\S+), lr (\S+), beta2 (\S+)$", text)
    assert [(row[1], float(row[2])) for row in table] == [
        ("lr1e-3_beta20.9", 1e-3), ("lr2e-3_beta20.9", 2e-3), ("lr2e-3_beta20.95", 2e-3)]
    assert table[0][0] <= table[1][0] and "pip install matplotlib" in text
    assert text.count("lr1e-3_beta20.95: no memory: take less\n") == 2
    assert text.count("lr7_beta20.9: step 1: the loss is not finite\n") == 2
    assert error.count("left out\n") == 3
    assert sweep(capsys, tmp_path, *flags)[3] == ["lr1e-3_beta20.95"]
    monkeypatch.delenv("FAILS")
    killed = tmp_path / "o/lr2e-3_beta20.9"
    lines = (killed / "metrics.jsonl").read_text().splitlines(True)
    (killed / "metrics.jsonl").write_text("".join(lines[:8]))
    for step in (10, 15, 20):
        (killed / f"step_{step:08}.pt").unlink()
    started = sweep(capsys, tmp_path, *flags)[3]
    assert set(started) == {"lr1e-3_beta20.95", "lr2e-3_beta20.9"}
    events = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in events if "event" in e] == [
        ("start", 0), ("resume", 5), ("end", 20)]
    started = sweep(capsys, tmp_path, *flags, "--lr", "1e-3,4e-3")[3]
    assert set(started) == {"lr4e-3_beta20.9", "lr4e-3_beta20.95"}
    started = sweep(capsys, tmp_path, *flags, "--lr", "1e-3,2e-3", "--steps", 40)[3]
    assert len(started) == 4            # they continue
    started = sweep(capsys, tmp_path, *flags, "--lr", 1e-3)[3]      # the last --lr wins
    assert set(started) == {"beta20.9", "beta20.95"}
    status, _, error, started = sweep(capsys, tmp_path, *flags, "--seed", 1)
    assert status == 2 and error.count("\n") == 1 and not started and "--seed 1337, not 1" in error


def test_random_points_are_the_same_ones_and_the_first_of_more():
    def names(count):
        _, _, jobs = read_command(f"--lr 1,2,3,4 --seed 1,2,3 --random {count}".split())
        return [job.out.name for job in jobs]
    assert names(5) == names(5) == names(9)[:5] and len(set(names(99))) == 12
    assert names(99) != sorted(names(99))


@pytest.mark.parametrize("flags, words", [
    (["--lr", "1e-3"], "nothing to sweep: give a number of train.py several values"),
    (["--lr", "1e-3,x"], "argument --lr: invalid float value: 'x'"),
    (["--beta2", "0.9,2"], "argument --beta2: 2 must be at least 0 and below 1"),
    (["--lr", "1,2", "--stepz", "10"], "did you mean --steps?"),
    (["--lr", "1,2", "--resume", "a.pt"], "--resume is for one run: drop it"),
    (["--lr", "1,2", "--data", "nowhere"], "nowhere")])
def test_a_wrong_sweep_is_one_line(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    status, text, error = run_main(capsys, tools.sweep, *flags)
    assert status == 2 and text == "" and error.count("\n") == 1 and words in error, error
    assert list(tmp_path.iterdir()) == []


def test_the_picture_has_a_line_for_each_value_of_the_others(tmp_path, monkeypatch):
    """Best losses over one number, in its order; runs without an evaluation are left out."""
    runs = []
    for lr, beta2, loss in [(2, 0.9, 5.0), (1, 0.9, 4.0), (1, 0.99, 3.0), (4, 0.99, None)]:
        evaluations = [] if loss is None else [Evaluations(None, dict(val_loss=loss, step=1),
                                                           dict(val_loss=loss + 1, step=2))]
        runs.append(Run("a", evaluations=evaluations, data=[None],
                        events=[dict(event="start", config=dict(lr=lr, beta2=beta2))]))
    swept = dict(lr=["2", "1", "4"], beta2=["0.9", "0.99"])
    assert best_losses(runs, "lr", swept) == [("beta2 0.9", [1, 2], [4.0, 5.0]),
                                              ("beta2 0.99", [1], [3.0])]
    assert best_losses(runs, "beta2", swept) == [("lr 1", [0.9, 0.99], [4.0, 3.0]),
                                                 ("lr 2", [0.9], [5.0])]
    pytest.importorskip("matplotlib")
    tools.sweep.draw(runs, swept, tmp_path / "a.svg")
    content = (tmp_path / "a.svg").read_text()
    for words in ("beta2 0.9<", "beta2 0.99<", "lr 1<", "lr 2<", ">--lr<", ">--beta2<"):
        assert words in content, words
    assert matplotlib_svg.SCHEME in content


@pytest.mark.slow
def test_a_real_sweep_goes_on_past_a_run_that_diverges(shards, tmp_path):
    """train.py itself: one rate is absurd, one number of heads does not divide the width."""
    flags = ["--data", shards, "--out", tmp_path / "o", "--n-layer", 1, "--n-embd", 16, "--seq-len",
             32, "--steps", 20, "--warmup-steps", 2, "--max-rollbacks", 0, "--jobs", 2, "--lr",
             "1e-3,1e19", "--n-head", "2,3"]
    status, text, _ = Command("tools/sweep.py", *flags).finish(600)
    assert status == 0 and text.count("the run has diverged") == 2
    assert text.count("is not divisible by n_head 3") == 4
    assert "\na " in text and "n-head2_lr1e-3, " in text
    assert len(list((tmp_path / "o").glob("*.svg"))) == 2
    status, again, _ = Command("tools/sweep.py", *flags).finish(600)
    trained = re.findall("(?m)^train .*/(.*)$", again)
    assert status == 0 and trained and "n-head2_lr1e-3" not in trained
