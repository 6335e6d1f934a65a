"""Processes and signals: ranks start and fail together, and a signal saves the last finished step.

A stopped and resumed run is compared with one that no signal stopped."""
import io
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import checkpoint
from base import agreement, errors, processes
from base.checkpoint_files import LATEST
from base.options import parse_flags
from parallelism import collectives
from runtime import signals
from tests.commands import TINY, kinds, launch, read_metrics
from tests.harness import ROOT, assert_same_state, column


def start_and_wait_for(ranks, folder, statements, *flags):
    """`ranks` of train.py after these statements, once they have called `there()`."""
    (folder / "wrapper.py").write_text(f"""
import os, pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)        # as train.py's first lines
import checkpoint, train
from runtime import evaluation, flipped_bits
def there():
    pathlib.Path("{folder}/there").touch()
{statements}
train.main()
""")
    run = launch(ranks, *flags, "--out", folder / "out", file=folder / "wrapper.py")
    while not (folder / "there").exists():
        assert run[-1].poll() is None, run[-1].finish()
        time.sleep(0.01)
    return run


# Where a run of TINY's four steps is when the signal comes, in the main thread: (statement of a
# wrapper, the step after which it ends). It spends two seconds there.
PHASES = {
    "start": ("train.Run.train = slow(train.Run.train)", 1),
    "step": ("train.Run.sum_statistics = slow(train.Run.sum_statistics, 2)", 3),
    "evaluation": ("evaluation.evaluate_source = slow(evaluation.evaluate_source, 2)", 2),
    "comparison": ("flipped_bits.find_difference = slow(flipped_bits.find_difference, 2)", 3),
    "save": ("run_state.save = slow(run_state.save, 2)", 3),
    "last evaluation": ("evaluation.evaluate_source = slow(evaluation.evaluate_source, 4)", 4)}


SLOW = """
from runtime import run_state
restored, restore = [], run_state.restore
run_state.restore = lambda *args: restored.append(restore(*args)) or restored[-1]
def slow(function, step=None):
    def slowed(*args):
        if step in (None, restored[0].step):
            there()
            time.sleep(2)
        return function(*args)
    return slowed
"""


@pytest.mark.claim("After a signal the run saves, and the same command continues it.")
@pytest.mark.parametrize("form, phase, number, ranks", [
    ("file", "start", signal.SIGTERM, 1), ("file", "step", signal.SIGHUP, 1),
    ("file", "step", signal.SIGUSR1, 1), ("file", "step", signal.SIGTERM, 2),
    ("folder", "evaluation", signal.SIGINT, 1), ("file", "save", signal.SIGTERM, 2),
    *(pytest.param("folder", phase, signal.SIGTERM, 2, marks=pytest.mark.slow)
      for phase in PHASES)])
def test_a_signal_ends_a_run_after_the_step_in_progress(shards, things, tmp_path, phase, number,
                                                        ranks, form):
    """Its step is evaluated, where that is due, and saved. The same command goes on, and ends with
    the bits of a run that was not stopped. One process ends by the signal, so that Ctrl-C ends a
    shell's loop; a rank exits with 0. Two ranks get the signal from their launcher, or in a step
    the last one alone, which tells the other."""
    statement, last = PHASES[phase]
    command = ["--data", shards, *TINY, "--pp", ranks, "--checkpoint-format", form]
    run = start_and_wait_for(ranks, tmp_path, SLOW + statement, *command)
    time.sleep(0.1)
    for process in run[-1:] if phase == "step" else run:
        process.send_signal(number)
    (status, text, error), *others = [process.finish() for process in run]
    stopped = last < 4
    assert (status, error) == (-number if ranks == 1 and stopped else 0, "")
    assert others == [(0, "", "")] * (ranks - 1)
    assert (f"stopped and saved after step {last}; " in text) == stopped
    rows, events = read_metrics(tmp_path / "out")
    assert column(rows, "step") == list(range(1, last + 1))
    assert kinds(events) == ["start", "stop" if stopped else "end"]
    assert checkpoint.load(tmp_path / "out" / LATEST[form])["step"] == last
    for process in launch(ranks, *command, "--out", tmp_path / "out"):
        status, text, error = process.finish()
        assert (status, error) == (0, "")
    rows, events = read_metrics(tmp_path / "out")
    assert column(rows, "step") == [1, 2, 3, 4] and kinds(events)[-1] == "end"
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4]
    if ranks == 1:
        assert_same_state(checkpoint.load(tmp_path / "out" / LATEST[form]),
                          checkpoint.load(things / "whole.pt"),
                          but=("config", "run", "monitor"))     # which may list other files


@pytest.mark.parametrize("ranks, number", [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_an_error_after_a_signal_ends_the_run_in_one_line(shards, tmp_path, ranks, number):
    """As of the compiler of --compile, which gets Ctrl-C from the terminal, too."""
    run = start_and_wait_for(ranks, tmp_path, """
def killed(*_):
    there()
    time.sleep(2)
    raise RuntimeError("C++ compile error\\nmany lines")
train.Run.sum_statistics = killed
""", "--data", shards, *TINY, "--pp", ranks)
    for process in run:
        process.send_signal(number)
    for process in run:
        status, text, error = process.finish()
        assert status == (-number if ranks == 1 else 1)
        assert error == "train.py: ended without saving: RuntimeError: C++ compile error\n"
    assert not list((tmp_path / "out").glob("*.pt"))


def test_a_kernel_that_fails_here_is_no_lost_peer():
    """Serves the claim that a lost peer is named: this error keeps its traceback."""
    with pytest.raises(torch.AcceleratorError) as error, collectives.comm_errors("all-reduce"):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert processes.fatal_message(error.value) is None


NCCL_ERROR = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {}
Last error:
{}
Exception raised from create at ../NCCLUtils.cpp:93 (most recent call first):
frame #0: c10::Error::Error"""
CUDA = ("unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.")
REMOTE = ("remote process exited or there was a network error, NCCL version 2.29.3\n"
          "ncclRemoteError: A call failed possibly due to a network error or a remote process "
          "exiting prematurely.")
PAGE = "docs/troubleshooting.md, NCCL"
NVLS = ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 "
        "'the operation cannot be performed in the present state'.\nThis is usually caused by a "
        "system or configuration error in the Fabric Manager.\n"
        "Disable NVLS (NCCL_NVLS_ENABLE=0) if you wish to avoid this error in the future.")


@pytest.mark.parametrize("kind, reason, advice", [
    (CUDA, NVLS, PAGE), (CUDA, "Cuda failure 2 'out of memory'", PAGE),
    (REMOTE, "socketProgress: Connection closed by remote peer node2<41224>", "another rank")])
@pytest.mark.parametrize("operation", ["", "all-reduce with ranks [0, 1]: "])
def test_nccls_own_reason_and_remedy_are_the_line(kind, reason, advice, operation):
    """Serves "each failure is one line": not the advice of too little memory, nor to look at
    another rank, where NCCL failed here. The texts are those of PyTorch's issues."""
    with pytest.raises(torch.distributed.DistError) as error, \
            errors.memory_advice("{}; give --recompute"):
        if operation == "":
            raise torch.distributed.DistBackendError(NCCL_ERROR.format(kind, reason))
        with collectives.comm_errors(operation[:-2]):
            raise torch.distributed.DistBackendError(NCCL_ERROR.format(kind, reason))
    line = processes.fatal_message(error.value)
    assert line.startswith(f"{operation}NCCL: {' '.join(reason.split())}; {advice}")


def test_a_second_signal_ends_at_once_but_not_a_launchers_copy_of_the_first(monkeypatch, capfd):
    """Serves "a signal saves": torchrun's copy comes within 0.5 s and does not count. The exit
    status is the signal's, so that a second Ctrl-C, too, ends a shell's loop."""
    monkeypatch.setattr(signals, "exit_like_signal", lambda number: ended.append(number))
    ended, stop = [], signals.StopSignal()
    for seconds, expected in [(100, []), (100.4, []), (100.6, [signal.SIGINT])]:
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: seconds))
        stop.receive(signal.SIGINT, None)
        assert stop.number == signal.SIGINT and ended == expected
    assert capfd.readouterr().out.splitlines() == [
        "saving after the step in progress; a second signal ends at once, without saving",
        "ended without saving"]


def test_a_signal_ends_an_evaluation_and_the_run_saves(shards, tmp_path):
    """One of a thousand parts at a time; the evaluation after the last step is made whole."""
    run = start_and_wait_for(2, tmp_path, """
evaluation.MICROBATCHES = 1
def slow(*arguments, real=evaluation.sum_across_ranks):
    there()
    time.sleep(0.3)
    return real(*arguments)
evaluation.sum_across_ranks = slow
""", "--data", shards, *TINY, "--pp", 2, "--eval-every", 2, "--eval-tokens", 10 ** 6)
    begin = time.monotonic()
    run[1].send_signal(signal.SIGTERM)
    for process in run:
        assert process.finish()[0] == 0
    assert time.monotonic() - begin < 10
    rows, events = read_metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2] and "val_loss" not in rows[-1]
    assert events[-1].items() >= dict(event="stop", step=2).items()
    assert checkpoint.load(tmp_path / "out/latest.pt")["step"] == 2


@pytest.mark.parametrize("program", ["train.py", "sample.py", "data.py"])
def test_ctrl_c_while_packages_are_imported_has_no_traceback(program):
    lines = ("import signal, sys; sys.argv = [sys.argv[1]]; import base; "
             "signal.raise_signal(signal.SIGINT)")
    done = subprocess.run([sys.executable, "-c", lines, program], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_a_signal_that_one_rank_gets_later_than_another_is_no_second_one(shards, tmp_path):
    """As from the launchers of two machines, while the first is saving."""
    run = start_and_wait_for(2, tmp_path, """
def slow_save(state, *where, save=checkpoint.save):
    if state["step"] == 2:
        there()
        time.sleep(2)
    return save(state, *where)
checkpoint.save = slow_save
""", "--data", shards, *TINY, "--steps", 100000, "--pp", 2, "--eval-every", 0)
    run[1].send_signal(signal.SIGTERM)
    time.sleep(1.2)
    run[0].send_signal(signal.SIGTERM)
    ends = [process.finish() for process in run]
    assert [(status, error) for status, _, error in ends] == [(0, ""), (0, "")], ends
    assert "stopped and saved after step " in ends[0][1]


@pytest.mark.slow
def test_a_closed_input_or_output_ends_quietly(shards, things, tmp_path):
    """`sample.py --prompt -` without standard input ends in one line and status 2, `| head` in no
    line. train.py, also --plain, trains on when nobody reads its lines."""
    draw = f"{sys.executable} sample.py --ckpt {things / 'whole.pt'} --max-tokens 3000 --prompt "
    run = shlex.join(map(str, [sys.executable, "train.py", "--data", shards, *TINY, "--out"]))
    *unread, closed, head, full = [
        subprocess.Popen(["bash", "-o", "pipefail", "-c", command], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True, errors="replace", cwd=ROOT)
        for command in (f"{run} {tmp_path}/run", f"{run} {tmp_path}/plain --plain", draw + "- <&-",
                        draw + "line | head -c 6", draw + "line > /dev/full")]
    for process, name in zip(unread, ("run", "plain")):
        process.stdout.close()
        _, error = process.communicate()
        assert (process.returncode, error) == (0, "")
        assert checkpoint.load(tmp_path / name / "latest.pt")["step"] == 4
    out, error = closed.communicate()
    assert (closed.returncode, out, error.count("\n")) == (2, "", 1) and "is closed" in error
    out, error = head.communicate()
    assert (head.returncode, out[:4], error) == (1, "line", "")
    _, error = full.communicate()
    assert full.returncode == 1 and "No space left on device" in error and error.count("\n") == 1


def test_no_thread_of_gloo_outlives_a_run_even_if_its_last_save_fails(shards, tmp_path):
    """Serves the exit status: such a thread may abort the process after its last line."""
    (tmp_path / "wrapper.py").write_text("""
import glob, checkpoint, train
from runtime import console
def tell_of_threads(*_):
    print(sum("gloo" in open(path).read() for path in glob.glob("/proc/self/task/*/comm")))
def fail(*_):
    raise OSError("full")
console.print_summary, checkpoint.save = tell_of_threads, fail
try:
    train.main()
finally:
    tell_of_threads()
""")
    ranks = launch(2, "--data", shards, "--out", tmp_path, *TINY, file=tmp_path / "wrapper.py")
    for rank, (status, text, error) in enumerate([process.finish() for process in ranks]):
        during, *_, after = text.splitlines()
        assert int(during) > 0 == int(after) and status == 1
        assert ("train.py: the last checkpoint is lost: full" in error) == (rank == 0)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_console_that_lacks_a_letter_of_a_path_does_not_end_a_run(monkeypatch, encoding):
    """Half of a surrogate pair stands for a byte of a file's name that is no UTF-8."""
    console = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", console)
    parse_flags(["--out", "out"])
    agreement.print_rank0("\u0153 \udcff")
    assert console.buffer.getvalue().endswith(b" \\udcff\n")
