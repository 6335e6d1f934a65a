"""tools/bench: its parts, their page, and what befalls a program.

No figure of these tests is a measurement.
"""
import json
import sys

import torch

from tests.commands import readme_commands
from tools.bench import __main__ as bench
from tools.bench import launch


def test_the_parts_write_a_page(monkeypatch, tmp_path, capsys):
    """Of eleven GPUs, which are imitated, and of a CPU; a side that has too little memory says so,
    and a batch is no smaller than eight microbatches."""
    def train_py(work, folder, processes, *flags, **options):
        of_race = "--n-layer=4" not in flags
        assert processes < 8 or not of_race or flags[-2:] == ("--micro-batch", 8)
        if "--zero" in flags and processes > 1 and of_race:
            raise RuntimeError("train.py: no memory")
        return [dict(tokens_per_second=300.0, loss=2.0)] * 25, dict(peak=2.0, profile="a table")
    monkeypatch.setattr(bench, "train_py", train_py)
    monkeypatch.setattr(launch, "finished", lambda *_, **__: json.dumps(dict(
        tokens_per_second=200.0, peak_memory=None)))
    for name, value in dict(is_available=True, get_device_name="H100", device_count=11).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    pages = []
    for device in bench.PARTS:
        monkeypatch.setattr(sys, "argv", ["tools.bench", device, "--out", str(tmp_path)])
        bench.main()
        pages.append((tmp_path / "bench.txt").read_text())
        assert pages[-1] == capsys.readouterr().out
        assert "race alone; processes 1; tokens/s 300; PyTorch's 200; ratio 1.5" in pages[-1]
        assert "race FSDP2; error train.py: no memory\n" in pages[-1]
    assert "H100, torch " in pages[0] and "kernels \na table\n" in pages[0]
    assert pages[0].count("loss is off by 0\n") == len(bench.LAYOUTS)
    assert "--compile" not in pages[1] and "memory" not in pages[1].replace("no memory", "")


def test_the_pages_commands_exist():
    for _, names in readme_commands("tools.bench"):
        assert names and names[0] in bench.PARTS
