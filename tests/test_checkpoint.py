"""The files of a run: which stay, which is taken, how they reach the disk, and what is refused.

What is in a file: test_all.py. What a file survives: test_faults.py."""
import os
import shutil
import threading
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import checkpoint
from base import checkpoint_files, disk
from base.options import Config
from model import GPT, GPTConfig
from runtime.checkpoint_writer import Writer
from tests.harness import (CFG, after_backward, assert_same_state, names_in, save_at_the_start,
                           saved, saved_file, settings, small_state, tokens_of, watched)


@pytest.mark.parametrize("latest", [True, False])
def test_the_newest_file_is_that_of_the_last_step_whatever_the_times(tmp_path, latest):
    """A copy may change times, or lack latest.pt. The files of steps that a rollback has made void
    are older than the one that it wrote; the next save removes them unless they are protected."""
    for step, rollbacks, time_ in [(2, 0, 9), (3, 0, 2), (4, 0, 8), (5, 0, 8), (2, 1, 7),
                                   (3, 1, 1)]:
        state = small_state(step) | dict(monitor=dict(rollbacks=rollbacks))
        os.utime(checkpoint.save(state, tmp_path, 4, ["step_00000004.pt"]), (time_, time_))
    if not latest:
        (tmp_path / "latest.pt").unlink()
    files = [saved_file(tmp_path, step) for step in (3, 2, 4)]
    assert checkpoint_files.list_checkpoints(tmp_path) == files
    os.truncate(saved_file(tmp_path, 3), 1000)      # its name tells
    assert checkpoint_files.list_checkpoints(tmp_path) == files
    checkpoint.save(small_state(3) | dict(monitor=dict(rollbacks=1)), tmp_path, keep=1)
    assert names_in(tmp_path) == ["latest.pt", "step_00000003.pt"]


def content(path):
    if path.is_file():
        return path.read_bytes()
    return {(file.name, file.stat().st_ino) for file in path.iterdir()}


@pytest.fixture
def safe(monkeypatch):
    """{inode: content} of what a power cut leaves: what os.fsync has seen, of a file its bytes, of
    a directory its names. A file that is renamed must be among it."""
    safe = {}

    def spy_sync(number, sync=os.fsync):
        sync(number)
        safe[os.fstat(number).st_ino] = content(Path(os.readlink(f"/proc/self/fd/{number}")))

    def spy_move(source, target, move=os.replace):
        assert safe.get(Path(source).stat().st_ino) == content(Path(source)), target
        move(source, target)
    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(os, "replace", spy_move)
    return safe


@pytest.mark.parametrize("links", [True, False])
def test_files_reach_the_disk_before_they_get_their_names(tmp_path, monkeypatch, safe, links):
    """What stays are the newest two files, and those that are named for a rollback."""
    if not links:                               # the file system has no hard links
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError))
    latest = tmp_path / "latest.pt"
    for step in range(1, 6):
        newest = checkpoint.save(small_state(step), tmp_path, 2, {"step_00000001.pt"})
        assert content(tmp_path) <= safe[tmp_path.stat().st_ino]        # some are removed since
        assert latest.samefile(newest) == links and content(latest) == content(newest)
    assert names_in(tmp_path) == ["latest.pt", *(f"step_0000000{k}.pt" for k in (1, 4, 5))]


def test_a_folder_loses_its_name_on_the_disk_before_its_files(tmp_path, safe):
    """Else a power cut could leave half of a folder under the name of a whole one."""
    def spy_remove(path, rmtree=shutil.rmtree):
        assert safe.get(tmp_path.stat().st_ino) == content(tmp_path)
        rmtree(path)
    (tmp_path / "step_00000001").mkdir()
    with mock.patch.object(shutil, "rmtree", spy_remove):
        disk.remove(tmp_path / "step_00000001")
    assert names_in(tmp_path) == []


def test_plain_save_writes_whole_files_without_padding(tmp_path, safe):
    """Its files too reach the disk first. A killed save has left a second name of a whole file."""
    cfg = GPTConfig(vocab_size=257, n_layer=1, n_embd=32)           # padded to 384
    model = GPT(cfg)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    optimizer.step()
    facts = small_state(0) | dict(model=asdict(cfg))
    for step in (1, 2):
        checkpoint.plain_save(model, optimizer, facts | dict(step=step), tmp_path, keep=2)
        assert content(tmp_path) == safe[tmp_path.stat().st_ino]
        file = saved_file(tmp_path, step)
        assert (tmp_path / "latest.pt").samefile(file)
        state = checkpoint.load(file)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes
                   for key in checkpoint.STATE for tensor in state[key].values())
        os.link(file, tmp_path / "latest.pt.tmp")
        (tmp_path / "step.pt.tmp").write_bytes(bytes(1_000_000))
    assert checkpoint_files.list_checkpoints(tmp_path) == [saved_file(tmp_path, k) for k in (2, 1)]


@pytest.mark.parametrize("full, whole", [(False, [2, 4, 6]), (True, [6])])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, full, whole):
    """When the next file is due, training waits, also on a full disk; no older state is kept."""
    save, copy, wait = checkpoint.save, checkpoint.copy_pieces, Writer.wait
    waits = threading.Semaphore(0)
    done, living, states = [], [], []

    def save_when_waited_for(state, *where):
        assert waits.acquire(timeout=20)
        done.append(f"file {state['step']}")
        if full and state["step"] < 6:
            raise OSError("the disk is full")
        return save(state, *where)

    def wait_and_tell(writer, **required):
        if writer.pending is not None:
            waits.release()
        return wait(writer, **required)

    def copy_and_count(*facts):
        living.append(sum(reference() is not None for reference in states))
        copies = copy(*facts)
        states.extend(map(weakref.ref, copies))
        return copies
    fast = settings(tmp_path / "fast", steps=6, save_every=2, keep=9)
    watched(fast)
    with mock.patch.multiple(checkpoint, save=save_when_waited_for, copy_pieces=copy_and_count), \
            mock.patch.object(Writer, "wait", wait_and_tell):
        watched(replace(fast, out=str(tmp_path / "slow")),
                lambda run: after_backward(run, done.append))
    assert done == [1, 2, 3, 4, "file 2", 5, 6, "file 4", "file 6"] and living[:3] == [0, 0, 0]
    for step in whole:
        assert_same_state(saved(tmp_path / "fast", step), saved(tmp_path / "slow", step))


def test_load_model_returns_the_plain_model_which_drops_nothing(tmp_path):
    cfg = replace(CFG, dropout=0.5, n_layer=1)
    watched(settings(tmp_path, steps=1), save_at_the_start, cfg=cfg)
    loaded, _ = checkpoint.load_model(saved_file(tmp_path, 0))
    expected = dict(GPT(cfg).initialize(Config.seed).named_parameters())
    assert all(p.equal(expected[name]) for name, p in loaded.named_parameters())
    tokens = tokens_of(cfg, 1)
    assert loaded(tokens, dropout_seed=1).equal(loaded(tokens, dropout_seed=2))


@pytest.mark.parametrize("content, words", [
    ([1, 2], "not a checkpoint of this project"),
    (dict(format=None), "not a checkpoint of this project"), (dict(new=0), r"differ: \['new'\]"),
    (dict(tokens=None), r"differ: \['tokens'\]"), (dict(model=dict(width=3)), "width"),
    (dict(model=asdict(GPTConfig(n_layer=1, n_embd=64))), "its parameters are not those"),
    (dict(parameters={}), "its parameters are not those of its model"),
    (dict(exp_avg=dict(x=torch.zeros(1))), "its exp_avg are not those of its model")])
def test_other_files_and_states_that_contradict_themselves_are_refused(tmp_path, content, words):
    """Refused with its name and the reason. A dict changes a whole state; None leaves a key out."""
    if isinstance(content, dict):
        content = {k: v for k, v in {**small_state(1), **content}.items() if v is not None}
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(checkpoint_files.CorruptCheckpoint, match=f"x.pt is refused: .*{words}"):
        checkpoint.load(tmp_path / "x.pt")
