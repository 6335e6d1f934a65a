"""What a save survives, and its checkpoint: kills at any moment, full disks, damaged files.

A fault costs at most the save that it meets, and a message that names the file or the rank. What
comes after it is compared with a run without the fault, bit for bit. Checkpoints are files or, of
which every rank writes a part, folders."""
import ctypes
import errno
import gc
import io
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import zipfile
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map_only

import checkpoint
import train
from base import agreement, checkpoint_files, disk
from base.checkpoint_files import LATEST, list_checkpoints, step_file
from base.flops import parameter_count
from base.processes import RunError
from parallelism.pieces import owned_slices
from runtime import directory, folder_writer, run_state
from runtime.checkpoint_writer import Streamed
from tests.commands import TINY, kinds, read_metrics
from tests.harness import (CFG, Memory, after_backward, assert_same_state, contents, gridded,
                           names_in, no_file_above, on_ranks, poison, run_steps, saved, settings,
                           small_state, trained, watched)

SMALL = replace(CFG, n_layer=1, n_embd=16, n_head=2)


# ---- Saves: kills, memory, full disks

def is_killed(save, call, most):
    """Whether the kernel kills a fork of this process that calls save(): before its `call`-th
    operation on a file, from 0 (None: none), and where a file would exceed `most` bytes."""
    def die_at_the_call(event, _):
        if event.startswith(("open", "os.", "shutil.")) and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):       # the child must never return to pytest
            calls = itertools.count()
            sys.addaudithook(die_at_the_call)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with no_file_above(most):
                save()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def bytes_held(name):
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+)", lines, re.M)[1])


def give_back_freed_memory():
    """To the system. From here on it gets what is freed at once, as far as that is large."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 2 ** 17)       # M_MMAP_THRESHOLD: or glibc keeps up to 64 MB that are freed
    libc.malloc_trim(0)


class AtOnce:
    """Stands for the writer's thread, which a fork would not have."""

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
            config, memory = settings(out, checkpoint_format=form, **flags), Memory(SMALL)
            runs[form] = train.Run(config, SMALL, grid, torch.device("cpu"), memory, memory, None)
            runs[form].writer.thread = AtOnce()

        def save(step, form="folder"):
            run = runs[form]
            for name in checkpoint.STATE.values():
                for bucket in run.flat.buckets:
                    bucket.shard[name].fill_(step)
            run.progress.step = step
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


@pytest.mark.fault("a save is killed before one of its file operations, or at any byte", tried=60,
                   survived=60, note="a file or folder does not exist or is complete")
@pytest.mark.parametrize("before, form, more, first, every, links", [
    ("file", "file", 1, 0, 1, True), ("folder", "folder", 1, 0, 6, True),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ("file", "file", 1, 0, 2, False), ("folder", "folder", 0, 1, 3, True),
        ("file", "folder", 1, 2, 3, True), ("folder", "file", 1, 0, 3, True)])])
@on_ranks
def test_a_kill_at_any_moment_of_a_save_leaves_no_part_of_a_checkpoint(
        rank, world=1, *, tmp_path, before, form, more, first, every, links):
    """Before each call that opens, names or removes a file, and at random sizes."""
    rng = random.Random(first)
    with saver(tmp_path, keep=1) as save, nullcontext() if links else mock.patch.object(
            os, "link", side_effect=OSError):
        assert save(1, form) is None
        path = step_file(tmp_path, 1, form)
        size = (path / "__0_0.distcp" if form == "folder" else path).stat().st_size
        moments = [(call, 9 * size) for call in range(first, 100, every)]
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
            assert names_in(tmp_path) == [LATEST[form], step_file(tmp_path, step + 2, form).name], (
                call, most)
            assert step_of(tmp_path / LATEST[form]) == step + 2
    assert killed.count(False) == 1 and sum(killed) > 6 // every      # the last call was reached


def lose_the_file_of_step_2(run):
    """Rank 0 cannot write it, but later ones."""
    out = run.writer.out
    run.writer.out = Path("/proc/missing")          # where it cannot be made

    def mend(step):
        if step == 4:
            run.writer.wait()
            run.writer.out = out
    after_backward(run, mend)


def test_ranks_that_outlive_a_failed_save_write_the_next_one_whole(pool, tmp_path):
    """The state that rank 0 could not write is not mistaken for that of the next save."""
    flags = dict(zero=1, steps=4, save_every=2)
    trained(pool, (2, 1, 1), tmp_path / "whole", **flags)
    trained(pool, (2, 1, 1), tmp_path / "lost", prepare=lose_the_file_of_step_2, **flags)
    assert names_in(tmp_path / "lost") == ["latest.pt", "step_00000004.pt"]
    assert_same_state(saved(tmp_path / "lost", 4), saved(tmp_path / "whole", 4))


@pytest.mark.fault("the disk is full at the last save", tried=1, survived=0,
                   note="exit status 1; the file before is whole")
def test_a_run_outlives_a_failed_save_but_not_the_last(tmp_path, monkeypatch, capsys):
    """A full disk costs the save, and one line, which says what is left."""
    def save_on_a_full_disk(state, *where, save=checkpoint.save):
        with no_file_above(10_000) if state["step"] in full else nullcontext():
            save(state, *where)
    monkeypatch.setattr(checkpoint, "save", save_on_a_full_disk)
    full = [0, 4, 8]
    config = settings(tmp_path / "o", steps=6, save_every=2, keep=9)
    watched(config)
    error = capsys.readouterr().err
    assert "step_00000004.pt" in error and "File too large" in error and error.count("\n") == 1
    assert "untouched" in error
    assert names_in(tmp_path / "o") == ["latest.pt", "step_00000002.pt", "step_00000006.pt"]
    lost = "is lost.*_00000008.pt.*: see that .* has space .* same"
    with pytest.raises(RunError, match=lost) as stop:
        watched(replace(config, steps=8), state=tmp_path / "o" / "latest.pt")
    assert stop.value.status == 1 and checkpoint.load(tmp_path / "o" / "latest.pt")["step"] == 6
    with pytest.raises(RunError, match="the last checkpoint is lost.*step_00000000.pt"):
        watched(settings(tmp_path / "rollback", steps=44), poison)
    assert "step 24/24" not in capsys.readouterr().out


def full_on_rank_1(run):
    """In the saves after steps 2 and 6 the disk of rank 1 has room for no more than 5000 bytes."""
    def write(path, chunks, write_part=folder_writer.write_part):
        full = run.grid.rank == 1 and run.progress.step in (2, 6)
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
        assert names_in(tmp_path) == ["latest", "step_00000004", "warnings"]
        checkpoint_files.verify(tmp_path / "latest")
        said = (tmp_path / "warnings").read_text()
        assert re.match(lost % 2, said) and said.count("\n") == 1
        state = tmp_path / "step_00000004"
        with pytest.raises(RunError, match="^the last checkpoint is lost: " + lost % 6) as stop:
            run_steps(rank, world, (2, 1, 1), replace(config, steps=6), SMALL, state=state,
                      prepare=full_on_rank_1)
        assert stop.value.status == 1
        agreement.all_gather_object(None)
        assert names_in(tmp_path) == ["latest", "step_00000004", "warnings"]
        *_, said = (tmp_path / "warnings").read_text().splitlines()
        assert re.match(lost % 6 + ".*untouched", said)
    finally:
        mock.patch.stopall()


@on_ranks
def test_a_disk_that_the_ranks_do_not_share_is_told(rank, world=2, *, tmp_path):
    """In a save, which is lost. Where a run continues, nothing is taken for damaged."""
    def on_own_disk(run):
        if rank == 1:
            run.writer.out = tmp_path / "other"
    config = settings(tmp_path, steps=2, save_every=2, checkpoint_format="folder")
    shared = "--out must be on a disk that all machines share"
    with pytest.raises(RunError, match=f"rank 1: there is no {tmp_path}/other/step.tmp here: "
                                       f"{shared}"):
        run_steps(rank, world, (2, 1, 1), config, SMALL, prepare=on_own_disk)
    run_steps(rank, world, (2, 1, 1), config, SMALL)
    path = step_file(tmp_path if rank == 0 else tmp_path / "other", 2, "folder")
    with pytest.raises(RunError, match=f"^rank 1.*{path.name}.*{shared}"):
        directory.latest_valid([path])


@pytest.mark.fault("the disk is full at some byte of a save", tried=52, survived=52,
                   note="earlier files are whole")
@pytest.mark.fault("the disk is full at some byte of a save of a folder", tried=36, survived=36,
                   note="earlier folders are whole, and space is given back")
@pytest.mark.parametrize("form, module, writes, file, drawn", [
    ("file", checkpoint, "write_file", "step_00000001.pt", 23),
    ("file", checkpoint, "link_file", "latest.pt", 23),
    ("folder", folder_writer, "write_part", "step_00000001/__0_0.distcp", 9),
    ("folder", folder_writer, "write_table", "step_00000001/.metadata", 9),
    ("folder", folder_writer, "write_table", "step_00000001/facts.pt", 9)])
def test_a_disk_that_is_full_at_any_byte_costs_nothing_but_the_save(tmp_path, capsys, form, module,
                                                                    writes, file, drawn):
    """Before the last byte of such a file. Without hard links latest.pt is written, too. One line
    names what could not be written, and the earlier files are unchanged."""
    def write_on_a_full_disk(*args, write=getattr(module, writes)):
        with no_file_above(place):
            return write(*args)
    no_links = writes == "link_file"
    left = {tmp_path / "step_00000002.pt"} if no_links else set()
    lost = tmp_path / ("latest.pt" if no_links else step_file(tmp_path, 2, form).name)
    rng = random.Random(file)
    with saver(tmp_path, keep=2) as save, mock.patch.object(
            os, "link", side_effect=OSError) if no_links else nullcontext():
        save(1, form)
        before = contents(tmp_path)
        size = len(before[tmp_path / file])
        for place in [0, 1, size - 1, *(rng.randrange(size) for _ in range(drawn))]:
            with mock.patch.object(module, writes, write_on_a_full_disk):
                reason = save(2, form)
            assert f"{lost} could not be" in reason and "too large" in reason
            assert capsys.readouterr().err.count("\n") == 1
            found = contents(tmp_path)
            assert found.keys() - before.keys() == left and found | before == found, place
        assert save(2, form) is None and step_of(tmp_path / LATEST[form]) == 2


def test_a_save_is_whole_though_old_files_cannot_be_removed(tmp_path, capsys):
    with mock.patch.object(checkpoint_files, "remove", side_effect=OSError("stale handle")):
        path = checkpoint.save(small_state(2), tmp_path, keep=2)
    assert "could not be removed: stale handle" in capsys.readouterr().err
    assert checkpoint.load(path)["step"] == 2


@pytest.mark.claim("A save adds a rank's own shards to its memory, and two tensors on rank 0.")
@on_ranks
def test_a_save_adds_a_ranks_own_shards_and_on_rank_0_two_tensors(rank, world=4, *, tmp_path):
    """Under a limit far below the state, to 10% and 10 MB (code, the threads' own): by what a rank
    sends, and on rank 0 by its own part, the parts of the largest tensor and their union."""
    cfg = replace(CFG, n_layer=6, n_embd=384, vocab_size=8200)
    config = settings(tmp_path, pp=2, micro_batch=1, zero=1)
    with gridded(rank, world, 1, config.pp) as grid:
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg), None)
        own = sum(x.nbytes for x in checkpoint.copy_pieces(owned_slices(run.flat),
                                                           checkpoint.STATE.values(), 60))
        allowed = own
        if rank == 0:       # its part of the largest tensor, the first, then leaves the copies
            largest = 4 * cfg.padded_vocab * cfg.n_embd
            allowed += 2 * largest - largest // run.flat.num_shards
        give_back_freed_memory()
        seen = [bytes_held("RssAnon")]
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(bytes_held("VmData") + 1.1 * allowed + 3e7),
                                                  limits[1]))
        try:
            run_state.submit(run)
            while not run.writer.pending.done():
                seen.append(bytes_held("RssAnon"))
                time.sleep(0.001)
            run.writer.wait(required=True)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
    whole = 12 * (parameter_count(cfg) + (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd)
    assert sum(agreement.all_gather_object(own)) == whole
    grown = max(seen) - seen[0]
    assert 0.9 * allowed - 1e7 < grown < 1.1 * allowed + 1e7 < 0.7 * whole, (allowed, grown)
    checkpoint.verify(tmp_path / "latest.pt")


# ---- Damage, and errors of the file system that are none

def test_a_streamed_state_makes_the_file_of_its_tensors(tmp_path):
    """A run saves a state of which each tensor exists only while it is written."""
    def stand_in(tensor):
        return Streamed(tensor.shape, tensor.dtype, itertools.repeat(tensor))
    states = [small_state(1), tree_map_only(torch.Tensor, stand_in, small_state(1))]
    files = [checkpoint.save(state, tmp_path / name, 2) for state, name in zip(states, "ab")]
    assert files[0].read_bytes() == files[1].read_bytes()


def damages(content, kind, count):
    """Yields `count` times the bytes of a file with one bit flipped "anywhere", or in a zip's
    "pickle" or "directory"; with a "block" lost, cleared, doubled or reversed; or cut off."""
    rng = random.Random(kind)
    first, last = 0, len(content)
    if kind in ("pickle", "directory"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            first = archive.start_dir
            if kind == "pickle":
                entry = next(e for e in archive.infolist() if e.filename.endswith("data.pkl"))
                first, last = entry.header_offset, entry.header_offset + entry.file_size
    for _ in range(count):
        i, j = sorted(rng.sample(range(first, last), 2))
        if kind == "end":
            yield content[:i]
        elif kind == "block":
            block = rng.choice([b"", bytes(j - i), 2 * content[i:j], content[i:j][::-1]])
            yield content[:i] + block + content[j:]
        else:
            yield content[:i] + bytes([content[i] ^ 1 << rng.randrange(8)]) + content[i + 1:]


@pytest.fixture(scope="module")
def two_folders(pool, tmp_path_factory):
    """Folders of two ranks: [newest, the one before], and one of another layout."""
    out = tmp_path_factory.mktemp("folders")
    for name, layout in [("run", (2, 1, 1)), ("other", (1, 2, 1))]:
        trained(pool, layout, out / name, SMALL, steps=4, save_every=2, zero=1,
                checkpoint_format="folder")
    return [step_file(out / "run", step, "folder") for step in (4, 2)]


@pytest.mark.fault("a file of the newest folder is missing, or is of another rank, step or layout",
                   tried=9, survived=9, note="the one before is taken")
@pytest.mark.parametrize("file, source, said", [
    ("__1_0.distcp", None, "__1_0.distcp is missing"), (".metadata", None, ".metadata is missing"),
    ("__0_0.distcp", "run/step_00000004/__1_0.distcp", "the CRC of __0_0.distcp does not match"),
    ("__1_0.distcp", "run/step_00000002/__1_0.distcp", "the CRC of __1_0.distcp does not match"),
    ("facts.pt", "run/step_00000002/facts.pt", "the CRC of __0_0.distcp does not match"),
    (".metadata", "other/step_00000004/.metadata", "the CRC of .metadata does not match"),
    *((file, "a folder", "directory") for file in ("__0_0.distcp", ".metadata", "facts.pt"))])
def test_a_folder_with_a_file_of_another_is_passed_over(two_folders, tmp_path, file, source, said):
    """Each of these files is whole by itself. The message names the folder and the file."""
    newest, before = (shutil.copytree(folder, tmp_path / folder.name) for folder in two_folders)
    path, *_, events = directory.latest_valid([newest, before])
    assert (path, events) == (newest, [])
    (newest / file).unlink()
    if source == "a folder":
        (newest / file).mkdir()
    elif source is not None:
        shutil.copy(two_folders[0].parents[1] / source, newest / file)
    path, *_, [event] = directory.latest_valid([newest, before])
    assert path == before and event["path"] == str(newest)
    assert str(newest) in event["reason"] and said in event["reason"]


@pytest.mark.fault("the newest checkpoint is damaged: a bit flipped, a block lost, cut off",
                   tried=840, survived=840,
                   note="the one before is taken, or nothing has changed")
@pytest.mark.parametrize("file, kind, fewest", [
    (None, "pickle", 0.98), (None, "directory", 0.4), (None, "anywhere", 0.9),
    (None, "block", 0.9), (None, "end", 1.0), *(
        (file, kind, fewest) for file, fewest in [
            ("__1_0.distcp", 1.0), (".metadata", 1.0), ("facts.pt", 0.8)]
        for kind in ("anywhere", "block", "end"))])
def test_a_damaged_newest_checkpoint_is_passed_over_or_nothing_has_changed(two_folders, tmp_path,
                                                                           file, kind, fewest):
    """Of a checkpoint that is one file, or of one file of a folder. At least this share is
    recognised: some bytes of a zip mean nothing, such as padding and dates."""
    if file is None:
        damaged = newest = checkpoint.save(small_state(2), tmp_path, keep=2)
    else:
        newest = shutil.copytree(two_folders[0], tmp_path / two_folders[0].name)
        damaged = newest / file
    content, intact = damaged.read_bytes(), checkpoint.load(newest)
    intact |= {key: dict(intact[key].items()) for key in checkpoint.STATE}
    recognised = 0
    for bytes_ in damages(content, kind, 60):
        damaged.write_bytes(bytes_)
        path, *_, events = directory.latest_valid([newest, None])
        if path == newest:
            assert_same_state(checkpoint.load(newest), intact, but=())
        else:
            assert events[0]["path"] == str(newest) and str(newest) in events[0]["reason"]
        recognised += path != newest or bytes_ == content
    assert recognised >= fewest * 60


def test_an_entry_marked_as_a_directory_is_damage(tmp_path):
    """The bit is in no CRC; torch.load would leave the memory of such an entry as it finds it."""
    path = checkpoint.save(small_state(2), tmp_path, keep=2)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 38] |= 0x10         # in the zip's directory
    path.write_bytes(content)
    with pytest.raises(checkpoint_files.CorruptCheckpoint, match="attributes of archive/data.pkl"):
        checkpoint.verify(path)


def failing(name, call, errors):
    """A patch: each open, or read, of a path that ends in `name` raises one of the `errors`."""
    def open_file(path, *more, **options):
        if not errors or not str(path).endswith(str(name)):
            return open(path, *more, **options)
        error = OSError(errors.pop(), "the disk hangs")
        if call == "open":
            raise error
        return mock.Mock(wraps=open(path, *more, **options), read=mock.Mock(side_effect=error))
    return mock.patch.object(io, "open", open_file)


@pytest.mark.parametrize("form, name, call", [
    ("file", "", "open"), ("file", "", "read"), ("folder", "facts.pt", "open"),
    ("folder", ".metadata", "open"), ("folder", "__0_0.distcp", "open")])
def test_an_error_of_the_file_system_is_not_damage(run_train, run_sample, shards, tmp_path,
                                                   monkeypatch, form, name, call):
    """Two errors are waited out. More end in exit status 1 and the path; no older file is taken."""
    monkeypatch.setattr(disk, "RETRY_SECONDS", (0, 0, 0, 0))
    out, new = tmp_path / "o", tmp_path / "new"
    flags = ["--data", shards, "--out", out, *TINY, "--checkpoint-format", form]
    run_train(*flags)
    path = step_file(out, 4, form)
    for program, *given in [(run_train, *flags, "--out", new, "--init-from", path),
                            (run_sample, "--ckpt", path, "--max-tokens", 3),
                            (run_train, *flags, "--steps", 5)]:
        for failures in (99, 2):
            with failing(path / name, call, failures * [errno.EIO]):
                status, _, error = program(*given)
            if failures == 99:
                assert status == 1 and re.fullmatch(r"\w+.py: .* could not be read.*\n", error)
                assert name == "__0_0.distcp" or not new.exists()
            else:
                assert (status, error) == (0, "")
            shutil.rmtree(new, ignore_errors=True)
    assert "damaged" not in kinds(read_metrics(out)[1])
    with mock.patch.object(os, "listdir", side_effect=OSError(errno.EIO, "I/O error")):
        status, _, error = run_train(*flags)
    assert status == 1 and f"{out} could not be read" in error
