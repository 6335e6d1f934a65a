"""tools/schedule.py: the drawing of a pipeline.

    python -m pytest tests/test_schedule.py
"""
import sys

import pytest

import tools.schedule
from tools.schedule import clock


def test_the_schedule_tool_draws_the_timeline_and_counts(monkeypatch, capsys):
    """The program prints these lines, and refuses a size of 0 in one; a deadlock raises."""
    def output(*flags):
        monkeypatch.setattr(sys, "argv", ["schedule.py", *flags])
        tools.schedule.main()
        return capsys.readouterr().out
    assert output("--pp", "2", "--microbatches", "3", "--pp-schedule", "1f1b").splitlines() == [
        "1f1b, 2 stages, 3 microbatches; a backward takes two units of time", "",
        "stage  0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "stage  1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .", "",
        "bubble 25.0% of the time, (p - 1) / (m + p - 1) = 25.0%",
        "live activations, in microbatches: stage 0: 2, stage 1: 1"]
    assert output("--pp", "2", "--microbatches", "2", "--pp-schedule", "interleaved",
                  "--pp-chunks", "2").splitlines() == [
        "interleaved, 2 stages in 2 chunks, 2 microbatches; a backward takes two units of time", "",
        "stage  0  F0a F1a F0b F1b .   .   B0b B0b .   B1b B1b B0a B0a B1a B1a",
        "stage  1  .   F0a F1a F0b B0b B0b F1b B1b B1b B0a B0a B1a B1a .   .", "",
        "bubble 20.0% of the time, (p - 1) / (v m + p - 1) = 20.0%",
        "live activations, in microbatches: stage 0: 2, stage 1: 1.5"]
    assert output("--pp", "3", "--microbatches", "3", "--pp-schedule", "zb-h1").splitlines() == [
        "zb-h1, 3 stages, 3 microbatches; an op takes one unit of time, the formula is for m >= p",
        "",
        "stage  0  F0 F1 F2 .  .  B0 W0 B1 W1 B2 W2",
        "stage  1  .  F0 F1 .  B0 F2 B1 W0 B2 W1 W2",
        "stage  2  .  .  F0 B0 F1 B1 F2 B2 W0 W1 W2", "",
        "bubble 18.2% of the time, (p - 1) / (3 m + p - 1) = 18.2%",
        "live activations, in microbatches: stage 0: 3, stage 1: 3, stage 2: 3"]
    for flag in ("--pp", "--microbatches", "--pp-chunks"):
        with pytest.raises(SystemExit, match="2"):
            output(flag, "0")
        assert capsys.readouterr().err.count("\n") == 1
    interleaved = ["--pp", "2", "--pp-schedule", "interleaved", "--pp-chunks", "2"]
    with pytest.raises(SystemExit, match="2"):
        output(*interleaved, "--microbatches", "3")
    assert "requires --microbatches in multiples of --pp 2" in capsys.readouterr().err
    output(*interleaved, "--microbatches", "4")
    with pytest.raises(SystemExit, match="2"):
        output("--schedule", "1f1b")
    assert capsys.readouterr().err == (
        "tools.schedule: unknown argument --schedule: did you mean --pp-schedule? (order of the "
        "microbatches (default gpipe))\n")
    with pytest.raises(ValueError, match="deadlock"):
        clock([[("F", 0, 0), ("F", 1, 0)], [("F", 1, 0), ("B", 1, 0), ("F", 2, 0)]])
