"""tools/sweep.py: a grid of runs, what it repeats, and what it draws.

Most runs are imitated, as in tests/test_ladder.py."""
import re

import pytest

import tools.sweep
from tests.commands import read_metrics, run_main
from tests.test_ladder import imitated      # a fixture
from tools import svg_picture
from tools.train_many import why_it_ended

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
    """One run fails, one is killed, one diverges: the table has the others, the best first. Again:
    what failed is tried again, and what was killed resumes. More values add runs."""
    monkeypatch.setattr(svg_picture, "find_spec", lambda name: None)
    flags = [*imitated, *SMALL, "--lr", "2e-3,1e-3,7", "--beta2=0.9,0.95"]

    def started(*more):
        return set(sweep(capsys, tmp_path, *flags, *more)[3])
    monkeypatch.setenv("FAILS", "lr1e-3_beta20.95")
    monkeypatch.setenv("KILLED", "lr7_beta20.95")
    status, text, error, first = sweep(capsys, tmp_path, *flags)
    assert status == 0 and len(first) == 6 and "sweep    6 runs\n" in text
    table = re.findall(r"(?m)^ +(\d\.\d+) .*/(lr\S+), lr (\S+), beta2 (\S+)$", text)
    assert [(row[1], float(row[2])) for row in table] == [
        ("lr1e-3_beta20.9", 1e-3), ("lr2e-3_beta20.9", 2e-3), ("lr2e-3_beta20.95", 2e-3)]
    assert table[0][0] <= table[1][0] and "pip install matplotlib" in text
    for words in ("lr1e-3_beta20.95: no memory: take less\n", "lr7_beta20.95: killed (SIGKILL)",
                  "lr7_beta20.9: step 1: the loss is not finite\n"):
        assert text.count(words) == 2
    assert error.count("left out\n") == 3
    assert started() == {"lr1e-3_beta20.95", "lr7_beta20.95"}
    monkeypatch.delenv("FAILS")
    monkeypatch.delenv("KILLED")
    killed = tmp_path / "o/lr2e-3_beta20.9"
    lines = (killed / "metrics.jsonl").read_text().splitlines(True)
    (killed / "metrics.jsonl").write_text("".join(lines[:8]))
    for step in (10, 15, 20):
        (killed / f"step_{step:08}.pt").unlink()
    assert started() == {"lr1e-3_beta20.95", "lr2e-3_beta20.9", "lr7_beta20.95"}
    assert [(e["event"], e["step"]) for e in read_metrics(killed)[1]] == [
        ("start", 0), ("resume", 5), ("end", 20)]
    assert started("--lr", "1e-3,4e-3") == {"lr4e-3_beta20.9", "lr4e-3_beta20.95"}
    assert len(started("--lr", "1e-3,2e-3", "--steps", 40)) == 4        # they continue
    assert started("--lr", 1e-3) == {"beta20.9", "beta20.95"}           # the last --lr wins
    status, _, error, more = sweep(capsys, tmp_path, *flags, "--seed", 1)
    assert status == 2 and error.count("\n") == 1 and not more and "--seed 1337, not 1" in error


def test_a_sweep_of_more_epochs_continues_its_runs(imitated, tmp_path, capsys):
    flags = [*imitated, "--n-embd", 32, "--seq-len", 32, "--lr", "1e-3,2e-3"]
    for epochs, started in [(1, 2), (1, 0), (2, 2), (2, 0)]:
        status, *_, runs = sweep(capsys, tmp_path, *flags, "--epochs", epochs)
        assert status == 0 and len(runs) == started, epochs


@pytest.mark.parametrize("status, text, words", [
    (-9, "step 40/400 loss 3.6 left 0:00:21\n", "killed (SIGKILL): out of memory?"),
    (-11, "train.py: a line\n", "killed (SIGSEGV)"), (-99, "", "killed (signal 99)"),
    (137, "srun: error\n", "killed (SIGKILL): out of memory?"),
    (1, "train.py: rank 1: closed\ntraceback : Signal 15 (SIGTERM) received by PID 7\n"
     "traceback : Signal 9 (SIGKILL) received by PID 8\n==\n", "killed (SIGKILL): out of memory?"),
    (1, "train.py: no memory\ntrain.py: warning: a\nb\n", "no memory"), (1, "\n", "status 1"),
    (3, "Traceback\nKeyError: 4\n", "KeyError: 4")])
def test_a_killed_run_is_reported_by_its_signal_and_another_by_its_last_message(status, text,
                                                                                words):
    assert why_it_ended(text, status) == words
