"""What a checkpoint that is a folder survives: kills, damage, full disks, lost ranks.

    python -m pytest tests/test_folder_faults.py
    python -m pytest tests/test_folder_faults.py -m slow     the rest of the table of docs/faults.md

The faults are those of tests/test_survival.py. A folder has several files, and several ranks write
it. So these faults may also hit one file or one rank of several.
"""
import errno
import io
import itertools
import math
import os
import random
import re
import shutil
import signal
import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import checkpoint
import train
from base import (atomic_writes, checkpoint_files, checkpoint_folder, dcp_table, pieces, processes,
                  retries)
from base.checkpoint_files import list_checkpoints, step_file
from base.flops import parameter_count
from base.processes import RunError
from runtime import directory, folder_writer, run_state
from runtime.folder_writer import FolderWriter
from tests.harness import (CFG, TINY, Memory, assert_same_state, bytes_held, expect_mistake,
                           failing, give_back_freed_memory, gridded, is_killed, kinds, launch,
                           lose_either_rank, names_in, no_file_above, on_ranks, poison,
                           read_metrics, run_steps, saved, saved_file, settings, trained,
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
    """The step of a whole checkpoint. Its last tensor must be of that step, too."""
    checkpoint_files.verify(path)
    state = checkpoint.load(path)
    *_, name = state["exp_avg_sq"]
    assert (state["exp_avg_sq"][name] == state["step"]).all(), path
    return state["step"]


# What is saved before the save that is killed, and how that differs from the one before.
CHANGES = {"a new step": ("folder", "folder", 1), "the same step": ("folder", "folder", 0),
           "from a file": ("file", "folder", 1), "to a file": ("folder", "file", 1)}


@pytest.mark.fault("a save of a folder is killed before one of its file operations, or at any byte",
                   tried=100, survived=100, note="each folder that has a name is whole")
@pytest.mark.parametrize("change, first, every", [("a new step", 0, 6), *(
    pytest.param(change, first, 2, marks=pytest.mark.slow)
    for change in CHANGES for first in (0, 1))])
@on_ranks
def test_a_kill_at_any_moment_of_a_save_leaves_no_part_of_a_folder(rank, world=1, *, tmp_path,
                                                                   change, first, every):
    """As the test of this name in test_survival.py: after each kill every checkpoint that has a
    name is whole, of this save or the one before. The next save removes the rest. Half of the saves
    replace the folder of the same step, or one in the other format."""
    before, form, more = CHANGES[change]
    rng = random.Random(first)
    with saver(tmp_path, keep=1) as save:
        save(1)
        size = (step_file(tmp_path, 1, "folder") / "__0_0.distcp").stat().st_size
        moments = [(call, 9 * size) for call in range(first, 100, every)]
        if form == "folder":        # of a file: the same test there
            moments += [(None, rng.randrange(size)) for _ in range(12 // every)]
        killed = []
        for step, (call, most) in zip(itertools.count(2, 3), moments):
            if call is not None and False in killed:
                continue                            # such a save has fewer calls
            assert save(step, before) is None
            killed.append(is_killed(lambda: save(step + more, form), call, most))
            found = list_checkpoints(tmp_path)
            assert found and {step_of(path) for path in found} <= {step, step + more}, (call, most)
            assert save(step + 2, form) is None
            latest = "latest" if form == "folder" else "latest.pt"
            assert names_in(tmp_path) == [latest, step_file(tmp_path, step + 2, form).name], (
                call, most)
            assert step_of(tmp_path / latest) == step + 2
    assert killed.count(False) == 1 and sum(killed) > 10 // every     # the last call was reached


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
    "a file is missing": (lambda new, old: (new / "__1_0.distcp").unlink(),
                          "__1_0.distcp is missing"),
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
    assert "give another --out to start over" in error
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


# ---------------------------------------------------------------------------------------------
# Full disks, and file systems without links
# ---------------------------------------------------------------------------------------------

def full_on_rank_1(run):
    """In the saves after steps 2 and 6 the disk of rank 1 has room for no more than 5000 bytes."""
    def write(path, chunks, write_part=folder_writer.write_part):
        full = run.grid.rank == 1 and run.saved_step in (2, 6)
        with no_file_above(5000) if full else nullcontext():
            return write_part(path, chunks)

    def warn(text):
        (Path(run.config.out) / "warnings").open("a").write(text + "\n")
        warnings.append((text, names_in(Path(run.config.out))))
    warnings = []
    mock.patch.multiple(folder_writer, write_part=write, warn=warn).start()


@pytest.mark.fault("the disk of one rank of two is full in a save of a folder", tried=2, survived=1,
                   note="a line names the rank; the next save is whole; at the last save exit "
                        "status 1")
@on_ranks
def test_a_full_disk_of_one_rank_costs_the_save_of_all(rank, world=2, *, tmp_path):
    """No other rank waits for it. The files that others have written are removed. Each rank's file
    has 12 bytes for each number that it owns, and 1.6 kB for each chunk."""
    config = settings(tmp_path, steps=4, save_every=2, checkpoint_format="folder", zero=1)
    lost = (rf"{tmp_path}/step_0000000%d could not be written: rank 1: "
            rf"\[Errno {errno.EFBIG}\] File too large")
    try:
        run_steps(rank, world, (2, 1, 1), config, SMALL, prepare=full_on_rank_1)
        assert names_in(tmp_path) == ["latest", "step_00000004", "warnings"]
        checkpoint_files.verify(tmp_path / "latest")
        said = (tmp_path / "warnings").read_text()
        assert re.fullmatch(lost % 2 + f"; {tmp_path} has no checkpoint yet\n", said)
        state = tmp_path / "step_00000004"
        with pytest.raises(RunError, match="^the last checkpoint is lost: " + lost % 6) as stop:
            run_steps(rank, world, (2, 1, 1), replace(config, steps=6), SMALL, state=state,
                      prepare=full_on_rank_1)
        assert stop.value.status == 1
        processes.all_gather_object(None)
        assert names_in(tmp_path) == ["latest", "step_00000004", "warnings"]
        *_, said = (tmp_path / "warnings").read_text().splitlines()
        assert re.fullmatch(lost % 6 + "; earlier checkpoints are untouched", said)
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
    with pytest.raises(RunError, match=f"^rank 1 does not see {path}: {shared}"):
        directory.latest_valid([path])


@pytest.mark.fault("the disk is full at some byte of a save of a folder", tried=206, survived=206,
                   note="earlier folders are whole, and space is given back")
@pytest.mark.slow
@pytest.mark.parametrize("file, count", [("__0_0.distcp", 106), (".metadata", 50),
                                         ("facts.pt", 50)])
def test_a_disk_that_is_full_at_any_byte_costs_nothing_but_the_folder(tmp_path, capsys, file,
                                                                      count):
    rng = random.Random(file)

    class Full(io.FileIO):
        def write(self, data):
            room = place - self.tell() if Path(self.name).name == file else len(data)
            if room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(memoryview(data)[:room])

    def open_on_a_full_disk(path, mode):
        return io.BufferedWriter(Full(path, "w")) if mode == "wb" else open(path, mode)
    with saver(tmp_path, keep=2) as save:
        save(1)
        folder = step_file(tmp_path, 1, "folder")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        size = len(before[file])
        for place in [0, 1, size - 1, *(rng.randrange(size) for _ in range(count - 3))]:
            with mock.patch.object(atomic_writes, "open", open_on_a_full_disk, create=True), \
                    mock.patch.object(checkpoint_folder.io, "FileIO", Full):
                reason = save(2)
            assert re.fullmatch(rf"{tmp_path}/step_00000002 could not be written: "
                                rf"(rank 0: )?.*No space left on device", reason), reason
            assert capsys.readouterr().err.count("\n") == 1
            assert names_in(tmp_path) == ["latest", "step_00000001"], place
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert save(2) is None and step_of(tmp_path / "latest") == 2


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
        with mock.patch.object(atomic_writes.shutil, "rmtree", side_effect=OSError("stale")):
            assert save(2) is None
        assert "could not be removed: stale" in capsys.readouterr().err
        assert step_of(tmp_path / "latest") == 2
        assert save(3) is None
        assert names_in(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_a_link_of_the_other_format_goes_though_a_damaged_file_seems_newer(tmp_path):
    """A run passed over its damaged file of step 9 to step 1, and goes on in the other format."""
    with saver(tmp_path, keep=2) as save:
        save(9, "file")
        save(1, "folder")
        os.truncate(saved_file(tmp_path, 9), 1000)
        save(2, "folder")
        assert step_of(tmp_path / "latest") == 2
        assert "latest.pt" not in names_in(tmp_path)


# ---------------------------------------------------------------------------------------------
# Ranks that are lost, and errors of one rank
# ---------------------------------------------------------------------------------------------

def test_an_error_of_one_rank_is_raised_while_others_still_act():
    """For example too little memory in a rank's writer: the others wait for its file. Before, all
    ranks waited for each other without end."""
    def fail():
        raise MemoryError("too little")
    with mock.patch.object(processes.dist, "is_initialized", lambda: True), \
            mock.patch.object(processes, "all_gather_object", side_effect=3 * [[True, False]]), \
            pytest.raises(MemoryError, match="too little"):
        processes.all_ranks(fail)


def test_a_run_that_ends_by_an_error_does_not_wait_long_for_a_lost_rank():
    """Rank 0 is no exception: it waits for the files of others, which a stopped one never writes.
    One process alone waits for its disk."""
    waits = []
    writer = FolderWriter.__new__(FolderWriter)
    writer.timeout = 7
    writer.pending = SimpleNamespace(result=waits.append)
    for world in (2, 1):
        writer.grid = SimpleNamespace(rank=0, world=world)
        writer.close()
    assert waits == [7, None]


WRAPPER = """
import pathlib, time, train
from runtime import folder_writer
def write(path, chunks, write_part=folder_writer.write_part):
    {statement}
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
    (tmp_path / "wrapper.py").write_text(WRAPPER.format(statement="""
    while pathlib.Path("step_00000005").exists() and not pathlib.Path("lost").exists():
        time.sleep(0.05)            # in the folder of step 10"""))
    flags = ["--data", shards, *TINY, "--steps", 1_000_000, "--eval-every", 0, "--save-every", 5,
             "--pp", 2, "--timeout", 10, "--checkpoint-format", "folder"]
    for out in lose_either_rank(tmp_path, flags, fate):
        assert list_checkpoints(out) == [step_file(out, 5, "folder")]
        checkpoint_files.verify(out / "latest")
        again = launch(2, *flags, "--out", out, "--steps", 6)
        assert [rank.finish()[0] for rank in again] == [0, 0]
        assert checkpoint.load(out / "latest")["step"] == 6
        assert "step.tmp" not in names_in(out)


@pytest.mark.slow
@pytest.mark.parametrize("error, said", [
    ('MemoryError("too little")', "^train.py: rank 1: too little; give .*\n$"),
    ('KeyError("a mistake")', "KeyError: 'a mistake'")])
def test_an_error_in_the_writer_of_one_rank_ends_all(shards, tmp_path, error, said):
    (tmp_path / "wrapper.py").write_text(WRAPPER.format(
        statement=f'if "__1_" in str(path): raise {error}'))
    run = launch(2, "--data", shards, "--out", tmp_path / "out", *TINY, "--zero", 1,
                 "--checkpoint-format", "folder", file=tmp_path / "wrapper.py")
    (status, _, of_other), (other, _, of_rank) = [rank.finish() for rank in run]
    assert (status, other) == (1, 1)
    assert re.search(said, of_rank) and re.fullmatch("train.py: rank 0: .* by peer.*\n", of_other)
    assert list_checkpoints(tmp_path / "out") == []


@pytest.mark.fault("a rank of two is killed at a random moment of a save of a folder", tried=5,
                   survived=5, note="each folder is whole; bit-equal at the end")
@pytest.mark.slow
def test_a_run_killed_in_five_saves_of_folders_ends_bit_equal(shards, tmp_path):
    """Two ranks with ZeRO 1. After each kill every folder that has a name is whole."""
    rng = random.Random(0)
    out = tmp_path / "out"
    flags = ["--data", shards, *TINY, "--steps", 60, "--save-every", 1, "--eval-every", 0,
             "--zero", 1, "--timeout", 60, "--checkpoint-format", "folder", "--out"]
    assert [rank.finish(300)[0] for rank in launch(2, *flags, tmp_path / "straight")] == [0, 0]
    for step in (3, 12, 20, 30, 45):
        victim, other = rng.sample(launch(2, *flags, out), 2)
        wait_for_step(out, step, victim)
        while not (out / "step.tmp").exists():
            assert victim.poll() is None
        time.sleep(rng.uniform(0, 0.03))
        victim.process.kill()
        other.process.terminate()               # as torchrun does
        other.process.join(10)
        for rank in (victim, other):
            rank.process.kill()
            rank.process.join()
        found = list_checkpoints(out)
        assert found
        for folder in found:
            checkpoint_files.verify(folder)
    assert [rank.finish(300)[0] for rank in launch(2, *flags, out)] == [0, 0]
    assert names_in(out) == ["latest", "lock", "metrics.jsonl", *(
        f"step_{step:08d}" for step in (58, 59, 60))]
    assert_same_state(checkpoint.load(tmp_path / "straight" / "latest"),
                      checkpoint.load(out / "latest"))


# ---------------------------------------------------------------------------------------------
# What a run does with folders: rollback, other layouts
# ---------------------------------------------------------------------------------------------

def test_a_rollback_goes_back_to_a_folder_as_to_a_file(tmp_path):
    """The same rows, names and final state."""
    runs = {form: watched(settings(tmp_path / form, steps=44, save_every=4,
                                   checkpoint_format=form), poison, cfg=SMALL)
            for form in ("file", "folder")}
    file, folder = runs.values()
    assert "rollback" in kinds(file.events) == kinds(folder.events)
    assert [row["loss"] for row in file.rows] == [row["loss"] for row in folder.rows]
    assert_same_state(checkpoint.load(tmp_path / "folder" / "latest"),
                      saved(tmp_path / "file", 44), ("config", "run", "monitor"))
    steps = {name.partition(".")[0] for name in names_in(tmp_path / "file")} - {"latest"}
    assert {*names_in(tmp_path / "folder")} == steps | {"latest"} and len(steps) > 1


@pytest.mark.slow
def test_a_run_of_commands_in_several_layouts_and_formats_is_the_straight_run(shards, tmp_path):
    """Each command goes on with what the one before has saved, the last as a branch."""
    # A rate that does not depend on --steps.
    flags = ["--data", shards, *TINY, "--eval-every", 0, "--dtype", "fp64", "--min-lr-ratio", 1]
    assert launch(1, *flags, "--steps", 10, "--out", tmp_path / "one")[0].finish()[0] == 0
    out = tmp_path / "out"
    for steps, (ranks, *given) in zip((2, 4, 6, 8, 10), [
            (2, "--tp", 2), (2, "--zero", 3), (1,), (2, "--pp", 2, "--checkpoint-format", "file"),
            (2, "--zero", 1, "--out", tmp_path / "branch", "--resume", out / "latest.pt")]):
        run = launch(ranks, *flags, "--checkpoint-format", "folder", "--out", out, "--steps", steps,
                     *given)
        assert [rank.finish()[::2] for rank in run] == [(0, "")] * ranks
    assert names_in(out)[0] == "latest.pt" and "latest" in names_in(tmp_path / "branch")
    rows = {row["step"]: row["loss"] for folder in (out, tmp_path / "branch")
            for row in read_metrics(folder)[0]}
    straight = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "one")[0]}
    assert rows.keys() == straight.keys()
    assert all(abs(rows[step] - loss) < 1e-10 * loss for step, loss in straight.items())


# ---------------------------------------------------------------------------------------------
# Memory and bytes
# ---------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("tp, pp, zero", [(1, 2, 1), (2, 1, 3)])
@on_ranks
def test_a_save_of_a_folder_adds_a_ranks_own_shards_and_one_chunk(rank, world=4, *, tmp_path, tp,
                                                                  pp, zero):
    """Rank 0 needs no more than others. The rank's file has 12 bytes for each number that it owns,
    and at most 1.7 kB for each chunk. To restore, it reads the chunks of its own shard alone."""
    cfg = replace(CFG, n_layer=6, n_embd=384, vocab_size=8200)
    config = settings(tmp_path, tp=tp, pp=pp, micro_batch=1, zero=zero, checkpoint_format="folder")
    with gridded(rank, world, config.tp, config.pp) as grid:
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg), None)
        dcp_table.make_table([[]], torch.float32)       # it imports DCP
        own = 4 * sum(where.stop - where.start for _, _, _, where in pieces.owned_slices(
            run.flat.buckets, grid, run.flat.num_shards)) * len(checkpoint.STATE)
        give_back_freed_memory()
        seen = [bytes_held("RssAnon")]
        run_state.submit(run, run_state.Progress.of(run)._replace(step=1))
        while not run.writer.pending.done():
            seen.append(bytes_held("RssAnon"))
            time.sleep(0.001)
        assert run.writer.wait() is None
        folder = step_file(tmp_path, 1, "folder")
        table = dcp_table.read_table(folder)
        part = f"__{rank}_0.distcp"
        mine = [(index, where) for index, where in table.storage_data.items()
                if where.relative_path == part]
        largest = max(where.length for _, where in mine)
        size = (folder / part).stat().st_size
        numbers = sum(math.prod(chunk.sizes) for index, _ in mine
                      for chunk in table.state_dict_metadata[index.fqn].chunks
                      if chunk.offsets == index.offset)
        assert size == sum(where.length for _, where in mine)
        assert 800 * len(mine) < size - 4 * numbers < 1700 * len(mine), (size, numbers, len(mine))
        grown = max(seen) - seen[0]
        assert 0.9 * own - 1e7 < grown < 1.1 * own + largest + 1e7, (own, largest, grown)
        read = []

        def slice_file(reader, file, info, whole=FileSystemReader._slice_file):
            read.append((info.relative_path, info.offset, info.length))
            return whole(reader, file, info)
        with mock.patch.object(FileSystemReader, "_slice_file", slice_file):
            checkpoint.restore(checkpoint.load(folder), run.flat)
        expected = {(where.relative_path, where.offset, where.length) for _, where in mine}
        assert expected <= {*read}
        # Others own copies of what tensor parallelism and tied weights hold twice.
        assert sum(length for *_, length in {*read}) < 0.7 * 12 * parameter_count(cfg)
