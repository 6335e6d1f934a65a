"""What a checkpoint that is a folder survives: kills, damage, full disks, lost ranks.

    python -m pytest tests/test_folder_faults.py
    python -m pytest tests/test_folder_faults.py -m slow     the rest of the table of docs/faults.md

The faults are those of tests/test_survival.py. A folder has several files, and several ranks write
it. So these faults may also hit one file or one rank of several.
"""
import errno
import itertools
import os
import random
import re
import shutil
import signal
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import checkpoint
import train
from base import checkpoint_files, disk, processes
from base.checkpoint_files import list_checkpoints, step_file
from base.errors import RunError
from runtime import directory, folder_writer, run_state
from tests.harness import (CFG, TINY, Memory, assert_same_state, failing, gridded, is_killed, kinds,
                           launch, lose_either_rank, names_in, no_file_above, on_ranks, poison,
                           read_metrics, run_steps, saved, settings, trained, watched)

SMALL = replace(CFG, n_layer=1, n_embd=16, n_head=2)


@contextmanager
def saver(out, **flags):
    """Yields save(step, form="folder"), which saves a run of one process after that step, without
    training. Each number of the tensors is the step: a state of two saves shows."""
    runs = {}
    with gridded(0, 1, 1, 1) as grid:
        for form in ("folder", "file"):
            config = settings(out, checkpoint_format=form, **flags)
            runs[form] = train.Run(config, SMALL, grid, torch.device("cpu"), Memory(SMALL),
                                   Memory(SMALL), None)

        def save(step, form="folder"):
            run = runs[form]
            for name in checkpoint.STATE.values():
                for bucket in run.flat.buckets:
                    bucket.shard[name].fill_(step)
            run.finished_step = step
            run_state.submit(run)
            return run.writer.wait()
        yield save


def step_of(path):
    """The step of a whole checkpoint. Its last tensor must be of that step, too."""
    checkpoint_files.verify(path)
    state = checkpoint.load(path)
    *_, name = state["exp_avg_sq"]
    assert (state["exp_avg_sq"][name] == state["step"]).all(), path
    return state["step"]


# How the save that is killed differs from the one before: (that one, more steps).
CHANGES = {"a new step": ("folder", 1), "the same step": ("folder", 0), "from a file": ("file", 1)}


@pytest.mark.fault("a save of a folder is killed before one of its file operations, or at any byte",
                   tried=75, survived=75, note="each folder that has a name is whole")
@pytest.mark.parametrize("change, first, every", [("a new step", 0, 6), *(
    pytest.param(change, first, 2, marks=pytest.mark.slow)
    for change in CHANGES for first in (0, 1))])
@on_ranks
def test_a_kill_at_any_moment_of_a_save_leaves_no_part_of_a_folder(rank, world=1, *, tmp_path,
                                                                   change, first, every):
    """After each kill every checkpoint that has a name is whole, of this save or the one before.
    The next save removes the rest."""
    before, more = CHANGES[change]
    rng = random.Random(first)
    with saver(tmp_path, keep=1) as save:
        save(1)
        size = (step_file(tmp_path, 1, "folder") / "__0_0.distcp").stat().st_size
        moments = [(call, 9 * size) for call in range(first, 100, every)]
        moments += [(None, rng.randrange(size)) for _ in range(12 // every)]
        killed = []
        for step, (call, most) in zip(itertools.count(2, 3), moments):
            if call is not None and False in killed:
                continue                            # such a save has fewer calls
            assert save(step, before) is None
            killed.append(is_killed(lambda: save(step + more), call, most))
            found = list_checkpoints(tmp_path)
            assert found and {step_of(path) for path in found} <= {step, step + more}, (call, most)
            assert save(step + 2) is None
            assert names_in(tmp_path) == ["latest", step_file(tmp_path, step + 2, "folder").name]
            assert step_of(tmp_path / "latest") == step + 2
    assert killed.count(False) == 1 and sum(killed) > 10 // every     # the last call was reached


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def folders(pool, tmp_path_factory):
    """A directory of three: those of two ranks, `newest` and `before`, and `other`, of another
    layout."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("folders")
    for name, layout in [("run", (2, 1, 1)), ("tp", (1, 2, 1))]:
        trained(pool, layout, runs / name, SMALL, steps=4, save_every=2, zero=1,
                checkpoint_format="folder")
    for name, folder in [("newest", "run/step_00000004"), ("before", "run/step_00000002"),
                         ("other", "tp/step_00000004")]:
        shutil.move(runs / folder, out / name)
    return out


def change(act):
    """Of the bytes of a file."""
    def change_file(file):
        file.write_bytes(act(file.read_bytes()))
    return change_file


def flip(content):
    """One bit, in the middle."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1:]


# What befalls a file of the newest folder. Some leave a file that is whole by itself, but is of
# another step, rank or layout: it is a copy of (folder, file).
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "facts.pt")
DAMAGE = (Path.unlink, change(flip), change(lambda content: content[:-1]))
COPIES = [("__0_0.distcp", "newest", "__1_0.distcp"), ("__1_0.distcp", "before", "__1_0.distcp"),
          ("facts.pt", "before", "facts.pt"), (".metadata", "other", ".metadata")]


@pytest.mark.fault("a file of the newest folder is damaged, missing, or of another rank, step or "
                   "layout", tried=16, survived=16, note="the one before is taken")
@pytest.mark.parametrize("file, act", [
    *itertools.product(FILES, DAMAGE),
    *((file, lambda path, source=source: shutil.copy(path.parents[1].joinpath(*source), path))
      for file, *source in COPIES)])
def test_a_folder_with_a_wrong_file_is_passed_over(folders, tmp_path, file, act):
    """The message names the folder and a file."""
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    newest, before = tmp_path / "newest", tmp_path / "before"
    path, _, events = directory.latest_valid([newest, before])
    assert (path, events) == (newest, [])
    act(newest / file)
    path, _, [event] = directory.latest_valid([newest, before])
    assert path == before and event["path"] == str(newest)
    if file == "facts.pt":          # with those of another step the first part does not match
        assert re.search(f"{newest} |__0_0.distcp", event["reason"])
    else:
        assert str(newest) in event["reason"] and file in event["reason"]


@pytest.mark.parametrize("file", ["facts.pt", ".metadata", "__0_0.distcp"])
def test_an_error_of_the_file_system_is_no_damage_of_a_folder(run_train, shards, tmp_path,
                                                              monkeypatch, file):
    """Two errors are waited out. If they go on, the run ends with exit status 1 and one line, and
    no older folder is taken."""
    monkeypatch.setattr(disk, "RETRY_SECONDS", (0, 0, 0, 0))
    flags = ["--data", shards, *TINY, "--checkpoint-format", "folder", "--out", tmp_path]
    assert run_train(*flags)[0] == 0
    for errors in (99, 2):
        with failing(step_file(tmp_path, 4, "folder") / file, "open", errors * [errno.EIO]):
            status, _, error = run_train(*flags, "--steps", 5)
        if errors == 99:
            assert status == 1 and re.fullmatch(r"train.py: .* could not be read.*\n", error)
        else:
            assert (status, error) == (0, "")
    assert "damaged" not in kinds(read_metrics(tmp_path)[1])


# ---------------------------------------------------------------------------------------------
# Full disks, and file systems without links
# ---------------------------------------------------------------------------------------------

def full_on_rank_1(run):
    """In the saves after steps 2 and 6 the disk of rank 1 has room for no more than 5000 bytes."""
    def write(path, chunks, write_part=folder_writer.write_part):
        full = run.grid.rank == 1 and run.finished_step in (2, 6)
        with no_file_above(5000) if full else nullcontext():
            return write_part(path, chunks)

    def warn(text):
        (Path(run.config.out) / "warnings").open("a").write(text + "\n")
    mock.patch.multiple(folder_writer, write_part=write, warn=warn).start()


@pytest.mark.fault("the disk of one rank of two is full in a save of a folder", tried=2, survived=1,
                   note="a line names the rank; the next save is whole; at the last save exit "
                        "status 1")
@on_ranks
def test_a_full_disk_of_one_rank_costs_the_save_of_all(rank, world=2, *, tmp_path):
    """The files that others have written are removed."""
    config = settings(tmp_path, steps=4, save_every=2, checkpoint_format="folder", zero=1)
    lost = (rf"{tmp_path}/step_0000000%d could not be written: rank 1: "
            rf"\[Errno {errno.EFBIG}\] File too large")
    try:
        run_steps(rank, world, (2, 1, 1), config, SMALL, prepare=full_on_rank_1)
        checkpoint_files.verify(tmp_path / "latest")
        state = tmp_path / "step_00000004"
        with pytest.raises(RunError, match="^the last checkpoint is lost: " + lost % 6) as stop:
            run_steps(rank, world, (2, 1, 1), replace(config, steps=6), SMALL, state=state,
                      prepare=full_on_rank_1)
        assert stop.value.status == 1
        processes.all_gather_object(None)
        assert names_in(tmp_path) == ["latest", "step_00000004", "warnings"]
        assert re.fullmatch(f"{lost % 2}; earlier checkpoints, if any, are untouched\n"
                            f"{lost % 6}; earlier checkpoints, if any, are untouched\n",
                            (tmp_path / "warnings").read_text())
    finally:
        mock.patch.stopall()


@on_ranks
def test_a_disk_that_the_ranks_do_not_share_is_told(rank, world=2, *, tmp_path):
    """In a save, which is lost. Where a run continues, nothing is taken for damaged."""
    def on_own_disk(run):
        if rank == 1:
            run.writer.aside = tmp_path / "other" / "step.tmp"
    config = settings(tmp_path, steps=2, save_every=2, checkpoint_format="folder")
    shared = "--out must be on a disk that all machines share"
    with pytest.raises(RunError, match=f"rank 1: there is no {tmp_path}/other/step.tmp here: "
                                       f"{shared}"):
        run_steps(rank, world, (2, 1, 1), config, SMALL, prepare=on_own_disk)
    run_steps(rank, world, (2, 1, 1), config, SMALL)
    path = step_file(tmp_path if rank == 0 else tmp_path / "other", 2, "folder")
    with pytest.raises(RunError, match=f"^rank 1: there is no {tmp_path}/other/{path.name} "
                                       f"here: {shared}"):
        directory.latest_valid([path])


def test_a_file_system_without_links_has_folders_but_no_latest(tmp_path, capsys):
    """A link that fails costs a line, and the older link, which would name an older folder. The
    same if a folder that is replaced cannot be removed."""
    with saver(tmp_path, keep=2) as save:
        assert save(1) is None
        with mock.patch.object(os, "symlink", side_effect=OSError(errno.EPERM, "not permitted")):
            assert save(2) is None
        assert names_in(tmp_path) == ["step_00000001", "step_00000002"]
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "step_00000002 is whole, but no link" in said
        with mock.patch.object(disk.shutil, "rmtree", side_effect=OSError("stale")):
            assert save(2) is None
        assert "could not be removed: stale" in capsys.readouterr().err
        assert step_of(tmp_path / "latest") == 2
        assert save(3) is None
        assert names_in(tmp_path) == ["latest", "step_00000002", "step_00000003"]


# ---------------------------------------------------------------------------------------------
# Ranks that are lost, and a rollback
# ---------------------------------------------------------------------------------------------

WRAPPER = """
import pathlib, time, train
from runtime import folder_writer
def write(path, chunks, write_part=folder_writer.write_part):
    while pathlib.Path("step_00000005").exists() and not pathlib.Path("lost").exists():
        time.sleep(0.05)            # in the folder of step 10
    return write_part(path, chunks)
folder_writer.write_part = write
train.main()
"""


@pytest.mark.fault("a rank is killed or hangs while it writes its part of a folder", tried=4,
                   survived=4, note="the other rank ends; earlier folders are whole")
@pytest.mark.slow
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_during_a_save_of_a_folder_costs_at_most_that_save(shards, tmp_path, fate):
    """Of two ranks either is lost. The other exits with status 1 and one line. Every folder is
    whole, and the same command goes on. Both jobs run at the same time."""
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    flags = ["--data", shards, *TINY, "--steps", 1_000_000, "--eval-every", 0, "--save-every", 5,
             "--pp", 2, "--timeout", 10, "--checkpoint-format", "folder"]
    for out in lose_either_rank(tmp_path, flags, fate, step=10):
        assert list_checkpoints(out) == [step_file(out, 5, "folder")]
        checkpoint_files.verify(out / "latest")
        again = launch(2, *flags, "--out", out, "--steps", 6)
        assert [rank.finish()[0] for rank in again] == [0, 0]
        assert checkpoint.load(out / "latest")["step"] == 6
        assert "step.tmp" not in names_in(out)


def test_a_rollback_goes_back_to_a_folder_as_to_a_file(tmp_path):
    """The same rows, names and final state."""
    file, folder = (watched(settings(tmp_path / form, steps=44, save_every=4,
                                     checkpoint_format=form), poison, cfg=SMALL)
                    for form in ("file", "folder"))
    assert "rollback" in kinds(file.events) == kinds(folder.events)
    assert [row["loss"] for row in file.rows] == [row["loss"] for row in folder.rows]
    assert_same_state(checkpoint.load(tmp_path / "folder" / "latest"),
                      saved(tmp_path / "file", 44), ("config", "run", "monitor"))
    steps = {name.partition(".")[0] for name in names_in(tmp_path / "file")} - {"latest"}
    assert {*names_in(tmp_path / "folder")} == steps | {"latest"} and len(steps) > 1
