"""tools/bench: its parts, their table, and what befalls a program.

No figure of these tests is a measurement."""
import json
from dataclasses import replace

import pytest
import torch

from model import SIZES
from tests.commands import readme_commands, run_main
from tools.bench import __main__ as bench
from tools.bench import eight
from tools.metrics import Run


def test_the_parts_write_a_table(monkeypatch, tmp_path, capsys):
    """Of eight GPUs, which are imitated, and of a CPU. A program that has too little memory, a loss
    that is off by 2e-5 and a run that begins again are lines that fail, with what to do."""
    def train_py(work, folder, processes, *flags, **options):
        if flags[-2:] == ("--zero", "1") and work.vocab == 50257:
            raise RuntimeError("train.py: no | memory")
        row = dict(step=1, tokens=1, lr=1, tokens_per_second=300.0 * processes, grad_norm=1.0)
        row["loss"] = 2.00004 if flags[-2:] == ("--tp", "8") else 2.0
        return Run("", [row] * 25), dict(peak=2.0, profile="a table")
    monkeypatch.setattr(bench, "train_py", train_py)
    monkeypatch.setattr(eight, "train_py", train_py)

    def finished(folder, processes, *command):
        return json.dumps(dict(tokens_per_second=200.0 * processes, peak_memory=3.0))
    monkeypatch.setattr(bench, "finished", finished)
    for name, value in dict(is_available=True, get_device_name="H100", device_count=11).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert {names[0] for _, names in readme_commands("tools.bench")} <= {*bench.PARTS}
    pages = {}
    for kind, fails in dict(gpu=1, cpu=1, eight=1).items():
        status, text, _ = run_main(capsys, bench, kind, "--out", str(tmp_path))
        assert (status or 0) == fails and text == (tmp_path / "bench.txt").read_text(), text
        pages[kind] = text
    assert pages["gpu"].startswith("8 x H100, NCCL 2.29.7, torch ")
    assert "| race  / single | 300 tokens/s; PyTorch's 200; ratio 1.50" in pages["gpu"]
    assert ", memory | peak 2 GB; plan 7.95 | within 10% | **FAIL** |" in pages["gpu"]
    assert (tmp_path / "kernels--compile.txt").read_text() == "a table"
    assert "| race  / single | 300 tokens/s; PyTorch's 200; ratio 1.50 |  | ok |" in pages["cpu"]
    assert pages["cpu"].count("FAIL") == 1 and "--compile" not in pages["cpu"]
    for line in ["| layouts --zero 2 | losses are off by 0e+00, norms by 0e+00 | 1e-05, 0.0001 | o",
                 "| layouts --tp 8 | losses are off by 2e-05, norms by 0e+00 | 1e-05, 0.0001 | **F",
                 "| resume --zero 1 --save-every 3 | the second start did not resume |  | **FAIL**",
                 "| replicas --compile / ddp | 2,400 tokens/s; PyTorch's 1,600; ratio 1.50; MFU 0",
                 "| replicas --compile --zero 1 / fsdp | train.py: no / memory |  | **FAIL** |",
                 "\n- resume: The last rank is killed"]:
        assert line in pages["eight"], pages["eight"]
    assert pages["eight"].count("| ok |") == 15 and "- bits" not in pages["eight"]


@pytest.mark.slow
def test_two_ranks_on_cpus_fill_the_table_and_another_seed_fails(monkeypatch, tmp_path, capsys):
    """The command on this machine; its layout is no layout but another seed."""
    monkeypatch.setattr(eight, "LAYOUTS", {1: ("--compile --seed 7",), 4: ("--tp 4",)})
    monkeypatch.setattr(bench, "SEVERAL", [("--compile --zero 1", "fsdp")])
    monkeypatch.setitem(bench.WORKS, "cpu", replace(bench.CPU, shape=SIZES["nano"], turns=1))
    status, text, _ = run_main(capsys, bench, "cpu", "layouts", "bits", "resume", "replicas",
                               "--out", str(tmp_path))
    *_, table, advice = text.split("\n\n")
    verdicts = {line.split(" | ")[0]: line.split(" | ")[-1] for line in table.splitlines()[2:]}
    assert status == 1 and verdicts == {
        "| layouts --seed 7": "**FAIL** |",
        "| bits --exact --pp 2 --pp-schedule 1f1b / --exact --zero 1": "ok |",
        "| resume --zero 1 --save-every 3": "ok |", "| replicas --zero 1 / fsdp": "ok |"}, text
    assert "; resumed after step " in table and "\n- layouts: The losses" in advice
    assert "'KILL_IN_STEP': '7'" in (tmp_path / "log.txt").read_text()
