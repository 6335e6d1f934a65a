"""What a run on real machines needs beside the training: runtime/.

Refusals: test_refusals.py. Signals: test_signals.py. Divergence: test_rollback.py. Faults:
test_faults.py."""
import errno
import fcntl
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import checkpoint
import data
from base import devices
from base.batch_ramp import sequences_after
from base.flops import flops_per_token, peak_flops
from base.options import Config
from base.processes import Job, RunError
from model import GPT
from runtime import directory, evaluation, run_log, startup
from tests.commands import (README, TINY, Command, dataset, expect_mistake, launch, meta_of,
                            read_metrics, wait_for_step)
from tests.harness import CFG, ROOT, Memory, column, no_file_above, nothing, settings, watched


def test_too_little_memory_is_one_line_that_says_what_to_lower(shards, things, tmp_path):
    """Exit status 1: training with an exabyte of activations, sampling with one of positions."""
    state = torch.load(things / "whole.pt")
    state["model"]["seq_len"] = 2 ** 54
    for key in checkpoint.STATE:            # on the disk a single number
        state[key]["embed.position.weight"] = torch.zeros(()).expand(2 ** 54, 16)
    torch.save(state, tmp_path / "large.pt")
    most = ["--out", tmp_path, *TINY, "--batch-size", 2 ** 50, "--micro-batch", 2 ** 50]
    for words, file, *flags in [
            ("allocate .*--micro-batch", "train.py", "--data", shards, *most),
            ("allocate memory.* --device cpu", "sample.py", "--ckpt", tmp_path / "large.pt")]:
        status, _, error = Command(file, *flags).finish()
        assert status == 1 and re.fullmatch(rf"{file}: .*{words}.*\n", error), error


# ---- Devices, and machines that lack something

def test_one_process_needs_no_posix(shards, tmp_path):
    """Without what Windows lacks a run trains, saves, goes on and is sampled; train.py needs torch
    and numpy alone."""
    (tmp_path / "windows.py").write_text(f"""
import os, runpy, sys, torch
def open_file(path, *arguments, open=os.open, **options):
    if os.path.isdir(path):
        raise PermissionError(path)
    return open(path, *arguments, **options)
os.open = open_file
torch.set_num_threads(2)
del os.sysconf, os.getloadavg, os.O_DIRECTORY, os.fork
sys.modules.update(dict.fromkeys(["fcntl", "resource", "termios", "pwd", "grp"]))
if sys.argv[1] == "train.py":
    sys.modules.update(requests=None, tiktoken=None)
for name in ("model", "data", "amp", "parallel", "checkpoint", "train", "sample"):
    sys.modules.pop(name, None)
runpy.run_path({str(ROOT)!r} + "/" + sys.argv.pop(1), run_name="__main__")
""")
    for words, *command in [("Now sample", "train.py", "--data", shards, *TINY, "--steps", 2),
                            ("\n", "sample.py", "--max-tokens", 5)]:
        status, text, error = Command(tmp_path / "windows.py", *command, cwd=tmp_path).finish()
        assert (status, error) == (0, "") and words in text, error


@pytest.mark.parametrize("gpus, mps, count, picked", [
    (2, True, 2, "cuda:1"), (1, False, 2, "cuda:0"),                # one each, as srun may show it
    (1, True, 1, "cuda:0"), (0, True, 1, "mps"), (0, True, 2, "cpu"), (0, False, 1, "cpu")])
def test_each_process_has_a_device_of_its_own(gpus, mps, count, picked):
    """Serves --device auto: the device of the last process. Two with the same GPU are refused."""
    with mock.patch.multiple(torch.cuda, is_available=lambda: gpus > 0, set_device=nothing,
                             device_count=lambda: gpus, get_device_properties=mock.Mock()), \
            mock.patch.object(torch.backends.mps, "is_available", lambda: mps):
        with mock.patch.object(torch, "set_float32_matmul_precision") as set_precision:
            device = devices.pick_device("auto", count - 1, count == 1)
            assert not set_precision.called         # that is the training program's decision
            devices.choose_device(Config(), Job(0, count, count - 1))
        assert set_precision.mock_calls == [mock.call("high")] * (device.type == "cuda")
        assert str(device) == picked and devices.pick_device("cpu").type == "cpu"
        for other, refused in (("another", False), (None, True)):
            with mock.patch.object(startup, "all_gather_object", lambda x: [x, other or x]), \
                    pytest.raises(RunError, match="but 1 CUDA") if refused else nullcontext():
                startup.assert_own_gpu(device)


# ---- The run's directory, its metrics and the console

def test_metrics_are_whole_lines_of_valid_json_whatever_happens(tmp_path, capsys, monkeypatch):
    """A value that is not finite is null; a line torn at any byte is removed at the next start; a
    disk that is full at any byte costs the line, and not the run."""
    monkeypatch.setattr(time, "time", lambda: 1795350923.9721)
    path = tmp_path / "metrics.jsonl"
    row = dict(step=1, loss=math.nan, grad_norm=math.inf)
    directory.Metrics(tmp_path, 0).write(**row)
    written = dict(step=1, loss=None, grad_norm=None, time=1795350923.972)
    assert read_metrics(tmp_path) == ([written], [])
    one = path.read_bytes()
    for torn in range(len(one)):
        path.write_bytes(one + one[:torn])
        metrics = directory.Metrics(tmp_path, 0)
        assert path.read_bytes() == one
        with no_file_above(len(one) + torn):
            metrics.write(**row)
        assert f"{path} lacks a line: " in capsys.readouterr().err and path.read_bytes() == one
    shutil.rmtree(tmp_path)
    metrics.write(**row)
    assert path.read_bytes() == one


@pytest.mark.parametrize("number, told", [(errno.ENOSYS, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, capsys, number, told):
    """As Lustre without the option flock, or some of NFS. Another error is none of that. With locks
    or without, checkpoints that came since the start are refused."""
    def lock():
        with directory.lock_output_dir(tmp_path, []):
            pass
    with mock.patch.object(fcntl, "flock", side_effect=OSError(number, "the reason")):
        with nullcontext() if told else pytest.raises(RunError, match="written and locked"):
            lock()
    (tmp_path / "step_00000001.pt").touch()
    with pytest.raises(RunError, match="has just written"):
        lock()
    error = f"train.py: warning: the file system of {tmp_path} has no locks (the reason): see that"
    assert capsys.readouterr().err.startswith(error) == told


def log_without_run(config, world=1):
    return run_log.RunLog(SimpleNamespace(write=nothing), config, Memory(CFG), CFG,
                          torch.device("cpu"), world)


@pytest.mark.parametrize("flags, seconds, lines", [
    ({}, 0.1, [1, *range(20, 1001, 20)]), ({}, 1 / 128, [1, *range(140, 1001, 140), 1000]),
    (dict(steps=5), 0.1, [1, 5]), (dict(steps=5), 2, [1, 2, 3, 4, 5]),
    (dict(eval_every=100), 0.001, [1, *range(100, 1001, 100)]),
    (dict(log_every=300), 0.001, [300, 600, 900, 1000])])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_long_run_prints_fifty_lines_and_at_most_one_a_second(monkeypatch, capsys, on_terminal,
                                                                flags, seconds, lines):
    """Evaluations are told beside these. A terminal shows each second how far the run has come, in
    a line that is replaced; a file never has one."""
    config = Config(**dict(steps=1000, eval_every=0) | flags)
    log = log_without_run(config)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    row = dict(tokens=0, loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, skipped=0)
    for step in range(1, config.steps + 1):
        monkeypatch.setattr(run_log.time, "monotonic", lambda: step * seconds)
        log.print_step(row | dict(step=step), seconds)
    text = capsys.readouterr().out
    replaced = re.findall(r"step \d+/\d+  loss 1.0000  left [\d:]+\x1b\[K\r", text)
    printed = re.sub(r"step \d+/\d+  loss 1.0000  left [\d:]+\x1b\[K\r", "", text).splitlines()
    assert [int(re.match(r"step +(\d+)/", line)[1]) for line in printed] == lines
    assert len(replaced) <= 1 + config.steps * seconds
    if not on_terminal:
        assert not replaced
    elif seconds == 0.1 and config.steps == 1000:
        assert len(replaced) > 40           # of 100 seconds, beside 51 lines


def test_bits_per_byte_are_in_the_row_of_an_evaluation_as_on_the_console(run_train, two_sources,
                                                                         tmp_path, monkeypatch):
    """Of a mixture (mean loss) / ln 2 / (mean bytes per token), by weight, and of each source. A
    resume with other weights says so in its event, too."""
    monkeypatch.chdir(two_sources)
    flags = ["--out", tmp_path, *TINY, "--eval-every", 4]
    text = run_train("--data", "a=3,b=1", *flags)[1]
    _, row = read_metrics(tmp_path)[0][2:]
    metas = [meta_of(name) for name in "ab"]
    a, b = (meta["bytes_per_token"] for meta in metas)
    assert a != b
    for key, size in [("", (3 * a + b) / 4), ("/a", a), ("/b", b)]:
        bits = row["val_loss" + key] / math.log(2) / size
        assert row["bits_per_byte" + key] == pytest.approx(bits, rel=1e-12)
        assert f" {bits:.4f} bits a byte" in text
    run_train("--data", "a=1,b=1", *flags, "--steps", 5)
    start, _, resume, _ = read_metrics(tmp_path)[1]
    for event, weights in [(start, (3, 1)), (resume, (1, 1))]:
        told = event["data"]
        assert (told["tokenizer"], told["vocab_size"], told["seq_len"]) == ("bytes", 257, 16)
        for (name, source), weight, meta in zip(told["sources"].items(), weights, metas):
            assert source["weight"] == weight and source["fingerprint"] == meta["fingerprint"]
            assert source["bytes_per_token"] == meta["bytes_per_token"], name
    few = data.TokenDataset("a", "val", 16).n_windows
    assert [source["sequences"] for source in told["sources"].values()] == [few, 4]
    fingerprints = [source["val_fingerprint"] for source in told["sources"].values()]
    assert len(set(fingerprints)) == 2
    assert fingerprints == [x["val_fingerprint"] for x in start["data"]["sources"].values()]


def test_eval_only_tells_the_loss_in_any_layout_on_any_data_and_trains_nothing(
        run_train, shards, things, two_sources, tmp_path, monkeypatch):
    """The losses that the run had, of its newest file or a FILE, also of weights alone. Without
    --eval-tokens it reads all windows. No file changes."""
    out = things / "run"
    before = contents(out)
    middle, end = (f" {row['val_loss']:.4f} nats a" for row in read_metrics(out)[0][1::2])
    flags = ["--data", shards, "--out", out, "--eval-only"]
    as_before = [*flags, "--eval-tokens", 64]
    older = ["--resume", out / "step_00000002.pt"]
    for more, words in [(older, middle), ([], end), ([*older, "--out", out / "nothing"], middle)]:
        status, text, _ = run_train(*as_before, *more)
        assert status == 0 and words in text and "bits a byte (on 64 of " in text
    for more, words in [([], "(on 3,680 of 3,695 "), (["--data", two_sources / "a"], "nats")]:
        _, text, error = run_train(*flags, *more)
        assert words in text and end not in text
        assert ("was trained on the text" in error) == (more != []), error
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two_sources / "a", "data/python")
    expect_mistake(run_train("--out", out, "--eval-only"), "--data was left out")
    weights = tmp_path / "weights.pt"
    torch.save({**torch.load(things / "whole.pt"), "exp_avg": {}, "exp_avg_sq": {}, "scaler": {},
                "monitor": {}, "data": None, "config": {}}, weights)
    first, *_ = launch(4, *as_before, "--tp", 2, "--pp", 2, "--init-from", weights)
    assert f"step 4, on {shards}: validation:{end}" in first.finish()[1]
    assert contents(out) == before


def test_the_console_tells_what_is_left_the_loss_in_three_units_and_mfu(tmp_path, capsys,
                                                                        monkeypatch):
    """Of steps of 40 seconds; evaluations and saves of 1000 count. A line is that of the README. Of
    a GPU whose peak is known the fraction used is told."""
    now = [0]

    def takes(seconds, result=None):
        now[0] += seconds
        return result

    def prepare(run):
        monkeypatch.setattr(evaluation, "evaluate_source", lambda *_: takes(1000, 2 * math.log(2)))
        run.writer.submit = lambda *_: takes(1000)
        run.val_data.meta["bytes_per_token"] = 4.0
    with mock.patch.object(time, "perf_counter", lambda: takes(40, now[0])), \
            mock.patch.object(time, "monotonic", lambda: now[0]):
        rows = watched(settings(tmp_path, steps=3, save_every=1, eval_every=2, log_every=1),
                       prepare).rows
    evaluated = ("validation: 1.3863 nats a token, perplexity 4.00, 0.5000 bits a byte (on 208 of "
                 "209 tokens)")
    assert [line.split("left ")[-1] for line in capsys.readouterr().out.splitlines()[:5]] == [
        "0:02:03", "0:34:43", evaluated, "0:33:20", evaluated]
    assert column(rows, "tokens_per_second") == [8 * 16 / 40] * 3
    log = log_without_run(Config(), world=2)
    assert "perplexity inf" in run_log.format_eval(dict(val_loss=1e3), Config(), CFG, Memory(CFG))
    row = dict(rows[0], loss=5.28014, lr=8e-5, grad_norm=7.9496, activation_norm=0.9251,
               tokens_per_second=7133.0)
    assert log.format_step(row, timedelta(seconds=229)) in README.splitlines()
    used = f"MFU {1e9 * flops_per_token(CFG) / (2 * 756e12):.1%}"
    for name, dtype, left, told in [("NVIDIA H100 PCIe", "bf16", 1838, f"{used}  left 0:30:38"),
                                    ("NVIDIA H100 PCIe", "fp32", 9588, "tok/s  left 2:39:48"),
                                    ("GeForce GTX 1080", "fp16", 799, "scale 8  left 0:13:19")]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        log.device = torch.device("cuda")
        log.config = Config(dtype=dtype)
        row |= dict(tokens_per_second=1e9, loss_scale=8.0)
        assert log.format_step(row, timedelta(seconds=left)).endswith(told)


def test_the_time_left_counts_the_sequences_of_a_ramp_the_evaluations_and_the_saves():
    """A sequence takes 3 s. Five evaluations of 128 sequences follow step 1, of a third of that,
    and the saves of steps 3, 6, 9 and 10. How long a save takes is known after the first."""
    config = Config(steps=10, batch_size=8, batch_ramp="4:2:16", eval_every=2, save_every=3)
    log = log_without_run(config)
    log.recent_seconds.append(3.0)
    row = dict(step=1, tokens=4 * CFG.seq_len)
    left = sequences_after(config, 4, 9) - 4
    assert 9 * 4 < left < 9 * 8
    assert log.time_left(row).total_seconds() == 3 * left + 5 * 128
    log.evaluation_seconds, log.save_seconds = 100.0, 20.0
    assert log.time_left(row).total_seconds() == 3 * left + 500 + 80
    log.config = replace(config, eval_every=0, save_every=0)            # both after the last step
    assert log.time_left(row).total_seconds() == 3 * left + 100 + 20


def contents(folder):
    """{path: (time of writing, bytes)} of the files in a folder and in its folders."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*")
            if path.is_file()}


def test_of_several_machines_messages_and_events_name_them(shards, tmp_path):
    """Two ranks that are told different host names: the start's lines and event, and the message of
    a lost peer name them. Different flags are refused."""
    (tmp_path / "wrapper.py").write_text("""
import os, socket, sys, train
socket.gethostname = lambda: "node" + os.environ["RANK"]
if os.environ["RANK"] == "1":
    sys.argv += os.environ.get("MORE", "").split()
os.environ["LOCAL_WORLD_SIZE"] = "1"
train.main()
""")
    flags = ["--data", shards, "--out", tmp_path / "out", *TINY, "--steps", 1_000_000, "--tp", 2,
             "--save-every", 0, "--eval-every", 0]
    first, second = launch(2, *flags, file=tmp_path / "wrapper.py", MORE="--lr 1")
    expect_mistake(first.finish(), "the ranks have different flags")
    assert second.finish()[0] == 2
    first, second = launch(2, *flags, file=tmp_path / "wrapper.py")
    wait_for_step(tmp_path / "out", 3, first)
    second.send_signal(signal.SIGKILL)
    _, text, error = first.finish()
    second.finish()
    assert re.match(r"train.py: rank 0 on node0: stage 0, step \d+: (.*: )?all-reduce with ranks "
                    r"\[0, 1\] on node0, node1: ", error), error
    assert "zero 0 on node0, node1\n" in text
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert read_metrics(tmp_path / "out")[1][0]["environment"] == dict(
        python=".".join(map(str, sys.version_info[:3])), pytorch=torch.__version__,
        commit=commit.stdout.strip() or None, hosts=["node0", "node1"])


@pytest.mark.parametrize("program", [[], ["--plain"]], ids=["Run", "plain"])
def test_shards_that_are_not_read_and_a_tiny_validation_are_told(run_train, tmp_path, program):
    """A shard of 9 tokens has no window of 16 + 1; 20 of 6,009 tokens validate, or 40."""
    tokens = np.arange(6000) % 257
    for val, few in ((20, True), (40, False)):
        dataset(tmp_path / f"{val}", dict(train_0=tokens, train_1=tokens[:9], val_0=tokens[:val]))
        _, told, _ = run_train("--data", tmp_path / f"{val}", *TINY, *program, "--steps", 1,
                               "--out", tmp_path / f"o{val}")
        assert "6,000 of 6,009 tokens, as shards shorter than a window of 16 + 1 are not" in told
        assert ("note     20 tokens validate beside 6,009" in told) == few


def test_the_activation_norm_is_that_of_the_plain_model(tmp_path):
    """The mean norm of the last activations. (Of every layout: test_layouts.py.)"""
    cfg = replace(CFG, n_layer=2)
    rows = watched(settings(tmp_path, steps=2, lr=0.0, eval_every=1), cfg=cfg).rows
    norms, plain, memory = [], GPT(cfg).initialize(1337), Memory(CFG)
    plain.head.register_forward_pre_hook(
        lambda module, args: norms.append(args[0].norm(dim=-1).mean().item()))
    for first in (0, 8):
        windows = memory.read(memory.window_ids(1337, first, 8))[0]
        plain(torch.from_numpy(windows)[:, :-1])
    assert column(rows, "activation_norm") == pytest.approx(norms, rel=1e-5)


def test_a_devices_peak_is_that_of_its_full_name():
    """The dense 16-bit TFLOP/s of the maker's data sheet. Parts of a device, slower editions and
    unknown devices have no peak rather than another's."""
    for name, peak in {
            "Tesla V100-SXM2-16GB": 125, "Tesla V100S-PCIE-32GB": 130, "A100-SXM4-40GB": 312,
            "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H20-3e": 148,
            "NVIDIA A10": 125, "NVIDIA A10G": 70, "Tesla T4": 65, "Tesla T40 24GB": 0,
            "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 4090 Laptop GPU": 0,
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb": 0, "AMD Instinct MI300X": 1307.4, "": 0}.items():
        assert peak_flops(name) == peak * 1e12, name


@pytest.mark.parametrize("command", [["train.py"], ["data.py"], ["sample.py", "--prompt", "x"]])
def test_a_python_without_the_packages_names_the_environment(command):
    """As the system's: -S leaves out what pip has installed."""
    done = subprocess.run([sys.executable, "-S", *command], cwd=ROOT, capture_output=True,
                          text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert ". .venv/bin/activate" in done.stderr
    assert ("torch" in done.stderr) == (command != ["data.py"])
