"""What a checkpoint that is a folder survives: kills, damage, full disks, lost ranks.

    python -m pytest tests/test_folder_faults.py
    python -m pytest tests/test_folder_faults.py -m slow       the rest of the table of docs/faults.md

The faults are those of tests/test_survival.py. A folder has several files, and several ranks write
it. So these faults may also hit one file or one rank of several.
"""
import errno
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import checkpoint
import train
from base import checkpoint_files, processes, retries
from base.checkpoint_files import list_checkpoints, step_file
from base.processes import RunError
from runtime import directory, folder_writer, run_state
from runtime.folder_writer import FolderWriter
from tests.harness import (CFG, TINY, Memory, assert_same_state, expect_mistake, failing, gridded,
                           kinds, launch, names_in, no_file_above, on_ranks, poison, read_metrics,
                           run_steps, saved, saved_file, settings, trained, wait_for,
                           wait_for_step, watched)

SMALL = replace(CFG, n_layer=1, n_embd=16, n_head=2)


# ---------------------------------------------------------------------------------------------
# Saves in one process, without training
# ---------------------------------------------------------------------------------------------

class AtOnce:
    """Stands for the writer's thread."""

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


@contextmanager
def saver(out, **flags):
    """Yields save(step, form="folder"), which saves a run of one process after that step. Each
    number of the tensors is the step: a state of two saves shows."""
    runs = {}
    with gridded(0, 1, 1, 1) as grid:
        for form in ("folder", "file"):
            config = settings(out, checkpoint_format=form, **flags)
            runs[form] = train.Run(config, SMALL, grid, torch.device("cpu"), Memory(SMALL),
                                   Memory(SMALL), None)
            runs[form].writer.thread = AtOnce()

        def save(step, form="folder"):
            run = runs[form]
            for name in checkpoint.STATE.values():
                for bucket in run.flat.buckets:
                    bucket.shard[name].fill_(step)
            run_state.submit(run, run_state.Progress.of(run)._replace(step=step))
            return run.writer.wait()
        yield save


def step_of(path):
    """The step of a checkpoint, all of whose numbers are of that step."""
    checkpoint_files.verify(path)
    state = checkpoint.load(path)
    for key in checkpoint.STATE:
        for name in state[key]:
            assert (state[key][name] == state["step"]).all(), (path, key, name)
    return state["step"]


# What is saved before the save that is killed, and how that differs from the one before.
CALLS = {"a new step": 0, "the same step": 0, "from a file": 0, "to a file": 0}
CHANGES = {"a new step": ("folder", "folder", 1), "the same step": ("folder", "folder", 0),
           "from a file": ("file", "folder", 1), "to a file": ("folder", "file", 1)}


@pytest.mark.fault("a save of a folder is killed before one of its file operations, or at any byte",
                   tried=100, survived=100, note="each folder that has a name is whole")
@pytest.mark.parametrize("change", [*list(CHANGES)[:1], *(
    pytest.param(change, marks=pytest.mark.slow) for change in list(CHANGES)[1:])])
@on_ranks
def test_a_kill_at_any_moment_of_a_save_leaves_no_part_of_a_folder(rank, world=1, *, tmp_path,
                                                                   change):
    """As the test of this name in test_survival.py: after each kill every checkpoint that has a
    name is whole, of this save or the one before. The next save removes the rest. Half of the saves
    replace the folder of the same step, or one in the other format."""
    before, form, more = CHANGES[change]
    rng = random.Random(0)
    with saver(tmp_path, keep=1) as save:
        save(1)
        size = (step_file(tmp_path, 1, "folder") / "__0_0.distcp").stat().st_size
        moments = [(call, 9 * size) for call in range(100)]
        moments += [(None, rng.randrange(size)) for _ in range(5)]
        killed = []

        def die_at_the_call(event, _):
            if event.startswith(("open", "os.", "shutil.")) and next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
        for step, (call, most) in zip(itertools.count(2, 3), moments):
            if call is not None and False in killed:
                continue                            # such a save has fewer calls
            assert save(step, before) is None
            child = os.fork()
            if child == 0:
                with suppress(BaseException):       # the child must never return to pytest
                    calls = itertools.count()
                    sys.addaudithook(die_at_the_call)
                    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    with no_file_above(most):
                        save(step + more, form)
                os._exit(0)
            killed.append(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
            found = list_checkpoints(tmp_path)
            assert found and {step_of(path) for path in found} <= {step, step + more}, (call, most)
            assert save(step + 2, form) is None
            latest = "latest" if form == "folder" else "latest.pt"
            assert names_in(tmp_path) == [latest, step_file(tmp_path, step + 2, form).name], (
                call, most)
            assert step_of(tmp_path / latest) == step + 2
    calls = len(killed) - 6
    assert all(killed[:calls]) and not killed[calls] and all(killed[calls + 1:])
    assert calls == CALLS[change], killed


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def two_folders(pool, tmp_path_factory):
    """Folders of two ranks: [newest, the one before], and one of another layout."""
    out = tmp_path_factory.mktemp("folders")
    for name, layout in [("run", (2, 1, 1)), ("other", (1, 2, 1))]:
        trained(pool, layout, out / name, SMALL, steps=4, save_every=2, zero=1,
                checkpoint_format="folder")
    return [step_file(out / "run", step, "folder") for step in (4, 2)]


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


# Each is an error that may be made by hand, or by a disk: (it, what is said of it).
MIX_UPS = {
    "a file is missing": (lambda new, old: (new / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "the table is missing": (lambda new, old: (new / ".metadata").unlink(), ".metadata is missing"),
    "parts are swapped": (lambda new, old: swap(new / "__0_0.distcp", new / "__1_0.distcp"),
                          "the CRC of __0_0.distcp does not match"),
    "a part is of another step": (lambda new, old: shutil.copy(old / "__1_0.distcp", new),
                                  "the CRC of __1_0.distcp does not match"),
    "the facts are of another step": (lambda new, old: shutil.copy(old / "facts.pt", new),
                                      "the CRC of __0_0.distcp does not match"),
    "the table is of another layout": (lambda new, old: shutil.copy(
        old.parents[1] / "other" / new.name / ".metadata", new),
        "the CRC of .metadata does not match")}


@pytest.mark.fault("a file of the newest folder is missing, or is of another rank, step or layout",
                   tried=6, survived=6, note="the one before is taken")
@pytest.mark.parametrize("mix_up", MIX_UPS)
def test_a_folder_with_a_file_of_another_is_passed_over(two_folders, tmp_path, mix_up):
    """Each of these files is whole by itself. The message names the folder and the file."""
    newest, before = (tmp_path / folder.name for folder in two_folders)
    for folder in two_folders:
        shutil.copytree(folder, tmp_path / folder.name)
    assert directory.latest_valid([newest, before]) == (newest, [])
    act, said = MIX_UPS[mix_up]
    act(newest, two_folders[1])
    path, [event] = directory.latest_valid([newest, before])
    assert path == before
    assert event["path"] == str(newest) and str(newest) in event["reason"]
    assert said in event["reason"]


def damages(content, kind, count):
    """Yields `count` times the bytes of a file with one bit flipped, with a block lost, cleared,
    doubled or reversed, or cut off."""
    rng = random.Random(kind)
    for _ in range(count):
        i, j = sorted(rng.sample(range(len(content)), 2))
        if kind == "bit":
            yield content[:i] + bytes([content[i] ^ 1 << rng.randrange(8)]) + content[i + 1:]
        elif kind == "end":
            yield content[:i]
        else:
            block = rng.choice([b"", bytes(j - i), 2 * content[i:j], content[i:j][::-1]])
            yield content[:i] + block + content[j:]


@pytest.mark.fault("a file of the newest folder is damaged: a bit flipped, a block lost, cut off",
                   tried=960, survived=960,
                   note="the one before is taken, or nothing has changed")
@pytest.mark.slow
@pytest.mark.parametrize("file, fewest", [("__1_0.distcp", 320), (".metadata", 320),
                                          ("facts.pt", 290)])
def test_a_damaged_file_of_a_folder_is_found_or_nothing_has_changed(two_folders, tmp_path, file,
                                                                    fewest):
    """Some bytes of facts.pt mean nothing, as in a checkpoint that is one file. Of the other files
    each byte is in a CRC. (A block that is cleared or reversed may be as before.)"""
    newest = tmp_path / two_folders[0].name
    shutil.copytree(two_folders[0], newest)
    intact = checkpoint.load(two_folders[0])
    content = (newest / file).read_bytes()
    found = 0
    for damaged in itertools.chain(damages(content, "bit", 220), damages(content, "block", 60),
                                   damages(content, "end", 40)):
        (newest / file).write_bytes(damaged)
        path, events = directory.latest_valid([newest, None])
        if path == newest:
            if file != "facts.pt":
                assert damaged == content
            assert_same_state(checkpoint.load(newest), intact, but=())
        else:
            assert events[0]["path"] == str(newest) and str(newest) in events[0]["reason"]
        found += path != newest or damaged == content
    assert found >= fewest, found


def test_a_damaged_folder_that_is_named_is_a_mistake_and_all_damaged_end_the_run(
        run_train, run_sample, shards, tmp_path):
    """Exit status 2 for --resume, --init-from, --eval-only and sample.py. A run none of whose
    folders is whole ends with status 1, and changes none."""
    out = tmp_path / "out"
    flags = ["--data", shards, "--out", out, *TINY, "--checkpoint-format", "folder"]
    assert run_train(*flags)[0] == 0
    for folder in list_checkpoints(out):
        part = folder / "__0_0.distcp"
        part.write_bytes(part.read_bytes()[:-1])
    folder = step_file(out, 4, "folder")
    said = f"{folder} is damaged, cut off, or no checkpoint: the CRC of __0_0.distcp does not match"
    new = [*flags, "--out", tmp_path / "new"]
    for given in ("--resume", "--init-from"):
        expect_mistake(run_train(*new, given, folder), said)
    expect_mistake(run_train(*new, "--eval-only", "--resume", folder), said)
    assert not (tmp_path / "new").exists()
    status, text, error = run_sample("--ckpt", folder)
    assert (status, text) == (2, "") and said in error and error.count("\n") == 1
    status, _, error = run_train(*flags)
    assert status == 1 and "none of the 2 checkpoints is whole: " in error
    assert error.count("\n") == 3           # one for each folder
    (folder / "facts.pt").unlink()
    status, _, error = run_train(*new, "--resume", folder)
    assert status == 2 and f"there is no checkpoint {folder}" in error


@pytest.mark.parametrize("file", ["facts.pt", ".metadata", "__0_0.distcp"])
def test_an_error_of_the_file_system_is_no_damage_of_a_folder(run_train, run_sample, shards,
                                                              tmp_path, monkeypatch, file):
    """Two errors are waited out. If they go on, a program ends with exit status 1 and one line, and
    no older folder is taken."""
    monkeypatch.setattr(retries, "RETRY_SECONDS", (0, 0, 0, 0))
    out = tmp_path / "out"
    flags = ["--data", shards, *TINY, "--checkpoint-format", "folder"]
    assert run_train(*flags, "--out", out)[0] == 0
    folder = step_file(out, 4, "folder")
    for program, *given in [(run_train, *flags, "--out", out, "--steps", 5),
                            (run_train, *flags, "--out", tmp_path / "new", "--init-from", folder),
                            (run_sample, "--ckpt", folder, "--max-tokens", 3)]:
        for errors in (99, 2):
            with failing(folder / file, "open", errors * [errno.EIO]):
                status, _, error = program(*given)
            if errors == 99:
                assert status == 1 and re.fullmatch(r"\w+.py: .* could not be read.*\n", error)
            else:
                assert (status, error) == (0, "")
    assert "damaged" not in kinds(read_metrics(out)[1])
