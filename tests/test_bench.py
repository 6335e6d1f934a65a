"""tools/bench: its tables; its command for a GPU, on a CPU: parts, page, what befalls a part.

    python -m pytest tests/test_bench.py

No figure of these tests is a measurement.
"""
import functools
import itertools
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import own_processes, readme_commands
from tools.bench import __main__ as bench
from tools.bench import (benchmarks, gpu, launch, layouts_on_one_gpu, peak_memory, pytorch_stack,
                         report, shared_gpu, trace)


# What these tables print, if train.py has 300 tokens a second and the peer 200.
ROWS = {
    "parallel_stack": "| pp 2, gpipe | 300 | 200 | 1.50 |\n",
    "scaling_of_layouts": "| 10.8M | 300 | 1.00 | 1.00 | 1.00 |\n",
    "memory": "| zero 3 | 10 MB | 20 MB | 30 MB | 60 MB | 63 MB | 1.05 |\n"}


@pytest.mark.parametrize("name", ROWS)
def test_a_table_has_its_rows(monkeypatch, capsys, tmp_path, name):
    """Each with as many cells as its heading. Programs are not started, and nothing is timed."""
    def train_py(processes, folder, vocab, *flags):
        return [dict(tokens_per_second=speed) for speed in (1.0, 2.0, 300.0, 300.0)], {}
    monkeypatch.setattr(launch, "train_py", train_py)
    monkeypatch.setattr(launch, "peer", lambda *_, **__: dict(tokens_per_second=200.0))
    monkeypatch.setattr(benchmarks, "peak_of", lambda *_, **__: [(63e6, (10e6, 20e6, 30e6))])
    benchmarks.TABLES[name](tmp_path)
    printed = capsys.readouterr().out
    assert ROWS[name] in printed
    for table in re.findall("(?m)(?:^\\|.*\n)+", printed):
        heading, rule, *rows = table.splitlines()
        assert rows and {line.count("|") for line in rows} == {heading.count("|")}
        assert rule == "|---" * (heading.count("|") - 1) + "|"


def test_a_program_that_fails_is_an_error_and_one_that_ends_returns_what_it_printed():
    assert launch.finished(1, "-c", "print('rows')") == "rows\n"
    for code, words in [("raise SystemExit('why')", "why"), ("raise SystemExit(3)", "status 3")]:
        with pytest.raises(RuntimeError, match=words):
            launch.finished(1, "-c", code)
    with pytest.raises(RuntimeError, match="stopped after 0 s"):
        launch.finished(1, "-c", "import time; time.sleep(60)", seconds=0.1)


def test_memory_is_read_in_bytes():
    """Of this process, which holds PyTorch: more than 50 MB, and at most what it held at its
    peak."""
    assert 50e6 < peak_memory.resident("VmRSS") <= peak_memory.resident("VmHWM") < 50e9


def a_profile_on_a_cpu(rank, world, folder):
    """{title: rows} of the part. (Compiled without inductor, which takes a minute; the plain loop
    in this process.)"""
    def run_peer(processes, seconds, **work):
        return pytorch_stack.train_plain(**work)
    without_inductor = functools.partial(torch.compile, backend="aot_eager")
    found = {}
    with mock.patch.object(torch, "compile", without_inductor), \
            mock.patch.object(launch, "peer", run_peer):
        for title, row in gpu.profile(gpu.CPU_WORK, folder):
            found.setdefault(title, []).append(row)
    return found


def test_a_profile_has_each_sides_kernels_by_time_and_ten_gaps(tmp_path):
    with own_processes() as fresh:
        profile, = fresh.run(1, a_profile_on_a_cpu, tmp_path)
    sides = ["ours", "ours --compile", "2 of 8 experts --compile", gpu.PLAIN]
    assert [row["side"] for row in profile["two steps"]] == sides
    for side in sides:
        times = [row["ms"] for row in profile[f"{side}: kernels"]]
        assert times == sorted(times, reverse=True) and 0 < len(profile[f"{side}: gaps"]) <= 10
    assert any("linear" in row["kernel"] for row in profile["ours: kernels"])


def test_a_trace_shows_the_gaps_and_the_host_beneath(tmp_path):
    """Two kernels at once, then a gap of 3 ms in which the host copies, and one of 1 ms."""
    def event(kind, name, start, end):
        return dict(ph="X", cat=kind, name=name, ts=1e3 * start, dur=1e3 * (end - start))
    events = [event("kernel", "a", 0, 4), event("kernel", "b", 1, 2), event("kernel", "a", 7, 8),
              event("gpu_memcpy", "c", 9, 10), event("cpu_op", "aten::item", 3, 7),
              event("cuda_runtime", "cudaMemcpyAsync", 5, 6), dict(ph="M", name="other")]
    (tmp_path / "trace.json").write_text(json.dumps(dict(traceEvents=events)))
    tables = {}
    for title, row in trace.tables_of(tmp_path / "trace.json", "ours"):
        tables.setdefault(title, []).append(row)
    assert tables["two steps"] == [{"side": "ours", "kernels": 4, "ms": 10, "busy, ms": 6,
                                    "idle, ms": 4, "idle": 0.4}]
    assert tables["ours: kernels"][0] == {"kernel": "a", "calls": 2, "ms": 5, "share": 5 / 7}
    assert [list(row.values()) for row in tables["ours: gaps"]] == [
        [3, "a", "a", "cudaMemcpyAsync"], [1, "a", "c", "-"]]


def test_the_race_takes_turns_and_ends_in_time(monkeypatch, tmp_path):
    """Rates relative to the plain loop's at the same microbatch, MFU of an H100's 989 TFLOP/s, in
    rounds of 80 seconds, of which two fit; a side that has too little memory says so."""
    seconds = itertools.count(0, 80).__next__
    turns = []
    plain = dict(tokens_per_second=250_000, peak_memory=10.0)

    def ours(work, folder, micro_batch, steps, *flags):
        turns.append(" ".join([str(micro_batch), *flags]))
        if micro_batch == 64 and not flags:
            raise RuntimeError("train.py: CUDA out of memory")
        return [1] * 10 + [300_000 if flags else 200_000] * 20, dict(peak=20.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=seconds))
    monkeypatch.setattr(gpu, "run_model", ours)
    monkeypatch.setattr(gpu, "plain_loop", lambda *_: plain)
    work = replace(gpu.GPU_WORK, seconds=420)
    rows = [row for _, row in gpu.race(work, tmp_path)]
    assert turns == ["16", "16 --compile", "64", "64 --compile"]
    found = {(row["microbatch"], row["side"]): row for row in rows}
    assert found[64, "ours"]["error"] == "train.py: CUDA out of memory"
    for at, ratio, mfu in [((16, "ours"), 0.8, 0.173), ((64, "ours --compile"), 1.2, 0.259)]:
        assert found[at]["of the plain"] == ratio and found[at]["MFU"] == pytest.approx(mfu, 2e-3)


def test_memory_is_compared_with_the_plan(monkeypatch, tmp_path):
    """Of each microbatch, then of each flag; what an offloaded state takes on the host is left out
    of the plan."""
    monkeypatch.setattr(gpu, "run_model", lambda *_: ([], dict(peak=3.0, retries=0)))
    rows = [row for _, row in gpu.memory(gpu.GPU_WORK, tmp_path)]
    assert [(row["microbatch"], row["flags"]) for row in rows] == [
        (16, ""), (64, ""), (8, ""), *((16, flags) for flags in gpu.MEMORIES)]
    plan = {row["flags"]: row["plan, GB"] for row in rows[:1] + rows[3:]}
    state = 124.4e6 / 1e9                       # parameters of GPT-2, in units of 10^9 bytes
    assert plan[""] - plan["--offload"] == pytest.approx(12 * state, rel=0.01)
    assert plan["--recompute"] < plan[""] < plan["--dtype fp32"]
    assert all(row["peak / plan"] == 3.0 / row["plan, GB"] for row in rows)


def test_a_part_that_fails_or_hangs_leaves_its_rows_and_the_next_one_runs(monkeypatch, tmp_path,
                                                                          capsys):
    """On the page and in the JSON. The page has the cause of an error, the JSON all of it."""
    row = 'print(\'["table", {"a": 1, "b": 0.123456, "right": true}]\', flush=True)'
    programs = dict(
        race=f"{row}; raise ZeroDivisionError('of this part')",
        layouts=f"{row}; import time; time.sleep(60)",
        memory="print('other words'); " + row.replace("1,", '"x|y",'))
    monkeypatch.setattr(gpu, "part_command",
                        lambda name, work: [sys.executable, "-c", programs[name]])
    monkeypatch.setattr(gpu, "SECONDS", dict(race=30, layouts=1, memory=30))
    monkeypatch.setattr(sys, "argv", ["tools.bench", "gpu", "--device", "cpu", *programs, "--out",
                                      str(tmp_path)])
    bench.main()
    page = (tmp_path / "gpu.md").read_text()
    assert page in capsys.readouterr().out
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == list(programs)
    assert parts["race"]["error"].startswith("Traceback")
    assert parts["memory"]["error"] is None
    assert "**Failed:** ZeroDivisionError: of this part" in page
    assert "**Failed:** stopped after 1 s" in page
    assert page.count("| a | b | right |\n|---|---|---|\n| 1 | 0.123 | yes |") == 2
    assert "| x/y | 0.123 | yes |" in page


def test_the_parts_share_the_given_minutes(monkeypatch, tmp_path):
    taken = {}

    def collect(command, seconds):
        taken[command[3]] = seconds
        return dict(seconds=0.0, tables={}, error=None)
    monkeypatch.setattr(launch, "collect", collect)
    monkeypatch.setattr(sys, "argv", ["tools.bench", "gpu", "--device", "cpu", "race", "memory",
                                      "--minutes", "0.5", "--out", str(tmp_path)])
    bench.main()
    assert sum(taken.values()) == 30
    assert taken["race"] / taken["memory"] == gpu.SECONDS["race"] / gpu.SECONDS["memory"]


def test_the_page_has_the_first_error_of_a_job():
    text = "W1 warning\n[rank1]: Traceback\ntrain.py: rank 1: it fails\nChildFailedError:\n=====\n"
    assert report.cause(text) == "train.py: rank 1: it fails"
    assert report.cause("words\nand others") == "and others"


def test_the_command_ends_within_20_minutes_and_names_what_it_lacks(monkeypatch, capsys):
    assert sum(gpu.SECONDS.values()) <= 20 * 60 and set(gpu.SECONDS) == set(gpu.PARTS)
    for flags, words in [([], "finds no CUDA device here: --device cpu shows"),
                         (["speed"], "there is no part 'speed': there are race, profile")]:
        monkeypatch.setattr(sys, "argv", ["tools.bench", "gpu", *flags])
        with pytest.raises(SystemExit):
            bench.main()
        error = capsys.readouterr().err
        assert error.startswith("tools.bench: ") and words in error and error.count("\n") == 1


def test_an_older_pytorch_has_other_names_for_two_collectives(monkeypatch):
    """Those of 2.11, under which it has them too."""
    for new in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.delattr(dist, new)
    shared_gpu.accept_older_pytorch()
    assert dist.all_gather_single is dist.all_gather_into_tensor
    assert dist.reduce_scatter_single is dist.reduce_scatter_tensor


@pytest.mark.parametrize("model, losses, right", [
    ("", [2.0, 2.0 * (1 + 9e-6)], True),
    ("", [2.0, 2.0 * (1 + 2e-5)], False),
    ("--dtype bf16", [2.0, 2.001], True),
    (layouts_on_one_gpu.MIXTURE, [2.0, 2.0 * (1 + 1e-9)], False),
    ("--exact", [2.0, 2.0], True),
    ("--exact", [2.0, 2.0 * (1 + 1e-15)], False),
    ("", [2.0, None], False)])
def test_a_layout_is_right_within_its_bound(tmp_path, model, losses, right):
    """One process on the CPU, with --exact on the same device, has the losses 2. (A loss that is
    not finite is null in metrics.jsonl.)"""
    def train_py(processes, folder, vocab, *flags, **environment):
        device = flags[flags.index("--device") + 1]
        assert device == ("cpu" if processes == 1 and "--exact" not in model else "cuda")
        found = [2.0] * 2 if processes == 1 else losses
        return [dict(loss=loss, grad_norm=1.0) for loss in found], {}
    layout = layouts_on_one_gpu.Layout(4, "--zero 3", model)
    with mock.patch.object(layouts_on_one_gpu, "train_py", train_py):
        row = layouts_on_one_gpu.compare_layout("cuda", layout, {}, tmp_path, 9)
    assert row["processes"] == 4 and row["right"] is right


def test_a_layout_that_fails_has_its_error(tmp_path):
    failing = mock.Mock(side_effect=RuntimeError("train.py: rank 1: it fails"))
    layout = layouts_on_one_gpu.Layout(2, "--tp 2")
    with mock.patch.object(layouts_on_one_gpu, "train_py", failing):
        row = layouts_on_one_gpu.compare_layout("cuda", layout, {}, tmp_path, 9)
    assert row == dict(processes=2, flags="--tp 2", environment="",
                       error="train.py: rank 1: it fails")


@pytest.mark.slow
def test_layouts_are_compared_with_one_process(tmp_path):
    """Two processes and one on the CPU, while what ZeRO 3 frees becomes NaN."""
    layout = layouts_on_one_gpu.Layout(2, "--zero 3", environment={shared_gpu.POISON: "1"})
    work = replace(gpu.CPU_WORK, layouts=(layout,), seconds=60)
    (_, row), = gpu.layouts(work, tmp_path)
    assert row["right"] is True and row["environment"], row


def test_the_readmes_benchmarks_exist():
    for _, names in readme_commands("tools.bench"):
        assert names[0] in (*benchmarks.TABLES, "gpu", "paper")
