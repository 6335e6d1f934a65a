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
from base import checkpoint_files, processes
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
