"""tools/schedule.py: the drawing of a pipeline.
"""
import pytest

import tools.schedule
from tests.commands import run_main
from tools.schedule import clock


def test_the_schedule_tool_draws_the_timeline_and_counts(capsys):
    """The program prints these lines; a deadlock raises."""
    def run(flags):
        return run_main(capsys, tools.schedule, *flags.split())
    assert run("--pp 2 --microbatches 3 --pp-schedule 1f1b")[1].splitlines() == [
        "1f1b, 2 stages, 3 microbatches; a backward takes two units of time", "",
        "stage  0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "stage  1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .", "",
        "bubble 25.0% of the time, (p - 1) / (m + p - 1) = 25.0%",
        "live activations, in microbatches: stage 0: 2, stage 1: 1"]
    interleaved = "--pp 2 --pp-schedule interleaved --pp-chunks 2 --microbatches"
    assert run(f"{interleaved} 2")[1].splitlines()[2:] == [
        "stage  0  F0a F1a F0b F1b .   .   B0b B0b .   B1b B1b B0a B0a B1a B1a",
        "stage  1  .   F0a F1a F0b B0b B0b F1b B1b B1b B0a B0a B1a B1a .   .", "",
        "bubble 20.0% of the time, (p - 1) / (v m + p - 1) = 20.0%",
        "live activations, in microbatches: stage 0: 2, stage 1: 1.5"]
    with pytest.raises(ValueError, match="deadlock"):
        clock([[("F", 0, 0), ("F", 1, 0)], [("F", 1, 0), ("B", 1, 0), ("F", 2, 0)]])
