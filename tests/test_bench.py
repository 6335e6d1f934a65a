"""tools/bench: its parts, their page, and what befalls a program.

    python -m pytest tests/test_bench.py

No figure of these tests is a measurement.
"""
import sys
from dataclasses import replace

import pytest

from tests.commands import readme_commands
from tools.bench import __main__ as bench
from tools.bench import launch


def test_a_program_that_fails_is_an_error_and_one_that_ends_returns_what_it_printed():
    assert launch.finished(1, "json.tool", "-h").startswith("usage: ")
    with pytest.raises(RuntimeError, match="No module named nowhere"):
        launch.finished(1, "nowhere")
    with pytest.raises(RuntimeError, match="stopped after 0 s"):
        launch.finished(1, "http.server", "0", seconds=0.1)
    text = "W1 warning\n[rank1]: a\ntrain.py: rank 1: it fails\nChildFailedError:\n=====\n"
    assert launch.first_error(text) == "train.py: rank 1: it fails"


def test_the_parts_write_a_page(monkeypatch, tmp_path, capsys):
    """Of two processes on a CPU; a side that has too little memory says so."""
    def train_py(processes, folder, vocab, *flags, **options):
        if "--zero" in flags and processes == 2 and "--n-layer=4" not in flags:
            raise RuntimeError("train.py: no memory")
        return [dict(tokens_per_second=300.0, loss=2.0)] * 5, dict(peak=None, profile="a table")
    monkeypatch.setattr(launch, "train_py", train_py)
    monkeypatch.setattr(launch, "peer", lambda *_, **__: dict(tokens_per_second=200.0,
                                                              peak_memory=None))
    monkeypatch.setattr(sys, "argv", ["tools.bench", "--device", "cpu", "--out", str(tmp_path)])
    bench.main()
    page = (tmp_path / "bench.txt").read_text()
    assert page == capsys.readouterr().out
    assert "race alone; processes 1; tokens/s 300; PyTorch's 200; ratio 1.5\n" in page
    assert "race FSDP2; error train.py: no memory\n" in page
    assert "error only a GPU's allocator counts\n" in page and "kernels \na table\n" in page
    assert page.count("loss is off by 0\n") == len(bench.LAYOUTS)


def test_memory_is_compared_with_the_plan(monkeypatch, tmp_path):
    """What an offloaded state takes on the host is left out of the plan."""
    monkeypatch.setattr(launch, "train_py", lambda *_, **__: ([], dict(peak=3.0)))
    work = replace(bench.WORKS["cuda"], microbatches=(16,))
    plan = {row["flags"]: row["plan, GB"] for row in bench.memory(work, tmp_path)}
    state = 124.4e6 / 1e9                       # parameters of GPT-2, in units of 10^9 bytes
    assert plan[""] - plan["--offload"] == pytest.approx(12 * state, rel=0.01)
    assert plan["--recompute"] < plan[""] < plan["--dtype fp32"]


def test_the_command_names_what_it_lacks(monkeypatch, capsys):
    for flags, words in [([], "finds no CUDA device here: --device cpu"),
                         (["speed"], "there is no part 'speed': there are race, memory")]:
        monkeypatch.setattr(sys, "argv", ["tools.bench", *flags])
        with pytest.raises(SystemExit):
            bench.main()
        error = capsys.readouterr().err
        assert error.startswith("tools.bench: ") and words in error and error.count("\n") == 1


def test_the_pages_commands_exist():
    for _, names in readme_commands("tools.bench"):
        assert set(names) <= {*bench.PARTS, "--device", *bench.WORKS}
