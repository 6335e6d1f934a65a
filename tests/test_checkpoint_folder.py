"""Checkpoints as folders, of which each rank writes a part.

What a folder holds is compared with the state that rank 0 gathers, and with what PyTorch's own
torch.distributed.checkpoint reads from it, which is told names and shapes alone."""
import math
import os
import pickle
import shutil
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
from base import checkpoint_files
from base.checkpoint_files import CorruptCheckpoint, step_file
from base.checkpoint_folder import chunks
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import MoEConfig
from parallel import Grid, make_buckets
from parallelism.build import build_stage
from parallelism.parameters import param_specs
from parallelism.pieces import owned_slices
from tests.commands import TINY, expect_mistake, run_main
from tests.harness import (CFG, assert_same_state, names_in, no_file_above, saved, saved_file,
                           settings, trained, watched)
from tests.test_layouts import MODELS, drawn
from tools import checkpoint as tool


LLAMA = LlamaConfig(257, 16, 5, 8, 32, n_kv_head=1, **FAMILIES["qwen2"])      # shared by ranks
MIXTURE = MoEConfig(257, 16, 2, 4, 32, n_expert=4, n_active=2, shared_hidden=32)


@pytest.mark.parametrize("cfg, grid, num_shards", [
    (CFG, Grid(2, 2, 2), 2), (CFG, Grid(1, 1, 4), 1), (CFG, Grid(8, 1, 1), 8),
    (LLAMA, Grid(2, 1, 4), 2), (LLAMA, Grid(3, 1, 2), 3), (MODELS["uneven"], Grid(1, 1, 3), 1),
    (MIXTURE, Grid(4, 1, 2, ep=2), 4), (MIXTURE, Grid(2, 2, 1, ep=2), 1)])
def test_each_number_is_in_one_chunk_at_its_place(cfg, grid, num_shards):
    """Cut by tensor and expert parallelism, with heads that ranks share, and by ZeRO."""
    full = {name: torch.arange(math.prod(shape)).view(shape)
            for name, shape in checkpoint.parameter_shapes(cfg).items()}
    counts = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for rank in range(grid.world):
        place = Grid(grid.dp, grid.pp, grid.tp, rank, ep=grid.ep)
        specs = param_specs(build_stage(cfg, place), cfg, place)
        buckets = make_buckets(specs, place.replicas, num_shards, place.replica % num_shards)
        flat = SimpleNamespace(buckets=buckets, grid=place, num_shards=num_shards)
        for _, spec, _, where in owned_slices(flat):
            numbers = spec.cut(full[spec.name], place).flatten()[where]
            for offsets, chunk in chunks(spec, place, numbers, where):
                box = tuple(slice(o, o + size) for o, size in zip(offsets, chunk.shape))
                assert chunk.equal(full[spec.name][box])
                counts[spec.name][box] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.claim("A checkpoint of which every rank writes a part resumes in any layout, bit for "
                   "bit.")
@pytest.mark.parametrize("name, seed", [
    ("gpt", 0), *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ("gpt", 1), ("palm", 2), ("qwen2", 3), ("shared, bias", 4), ("olmoe", 5)])])
def test_a_layout_reads_the_folder_of_another_bit_for_bit(pool, tmp_path, name, seed):
    """It holds the state that rank 0 gathers, with which the next run begins. Layouts are drawn."""
    cfg = replace(MODELS[name], n_layer=5)
    (_, layout, flags), (_, other, theirs) = (drawn(seed + i, [name]) for i in (0, 0.5))
    whole = trained(pool, layout, tmp_path, cfg, steps=2, checkpoint_format="folder", **flags).state
    folder = step_file(tmp_path, 2, "folder")
    state = checkpoint.load(folder)
    for key, name in checkpoint.STATE.items():
        assert state[key].keys() == whole[name].keys()
        assert all(state[key][n].equal(full) for n, full in whole[name].items())
    checkpoint_files.verify(folder)
    again = trained(pool, other, tmp_path / "again", cfg, state=folder, steps=2, **theirs).state
    assert all(full.equal(again[name][n]) for name in whole for n, full in whole[name].items())


@pytest.mark.claim("PyTorch's own `torch.distributed.checkpoint` opens such a folder, by the "
                   "names.")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_alone_opens_a_folder(pool, tmp_path):
    """As a folder of torch.distributed.checkpoint, by the names: into tensors, and as one file."""
    trained(pool, (2, 2, 1), tmp_path, steps=2, checkpoint_format="folder", zero=2)
    trained(pool, (2, 2, 1), tmp_path / "file", steps=2, zero=2)
    folder, file = step_file(tmp_path, 2, "folder"), saved(tmp_path / "file", 2)
    assert_same_state(checkpoint.load(folder), file, ("config", "run", "monitor"))
    names = {f"{key}.{name}": tensor for key in checkpoint.STATE
             for name, tensor in file[key].items()}
    theirs = {name: torch.empty_like(tensor) for name, tensor in names.items()}
    dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, tmp_path / "theirs.pt")
    whole = torch.load(tmp_path / "theirs.pt")
    assert whole.keys() == names.keys()
    assert all(full.equal(theirs[name]) and full.equal(whole[name]) for name, full in names.items())


class Runs:
    """A pickle of it runs code."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_table_runs_no_code(tmp_path, monkeypatch):
    """DCP itself would run it."""
    monkeypatch.chdir(tmp_path)
    watched(settings(tmp_path, steps=1, checkpoint_format="folder"))
    folder = step_file(tmp_path, 1, "folder")
    table = pickle.dumps(Runs())
    (folder / ".metadata").write_bytes(table)
    facts = torch.load(folder / "facts.pt")
    facts["crcs"][".metadata"] = zlib.crc32(table)
    torch.save(facts, folder / "facts.pt")
    checkpoint_files.verify(folder)             # it reads bytes alone
    with pytest.raises(CorruptCheckpoint, match="names posix.mkdir"):
        checkpoint.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_link_to_a_missing_folder_is_passed_over(tmp_path, run_train, shards):
    """The run goes on from the folder before it, and says so."""
    flags = ["--data", shards, *TINY, "--out", tmp_path, "--checkpoint-format", "folder"]
    assert run_train(*flags)[0] == 0
    shutil.rmtree(tmp_path / "step_00000004")
    status, text, error = run_train(*flags)
    assert status == 0 and "step_00000002, after step 2" in text, text
    assert "latest is a link to step_00000004, which is missing; passed over" in error


def test_a_folder_of_the_same_step_is_replaced_and_old_ones_are_removed(tmp_path):
    """Also what killed saves have left, and a link of the other format."""
    config = settings(tmp_path, steps=3, save_every=1, keep=2, checkpoint_format="folder")
    watched(replace(config, keep=9))
    newest, _, first = checkpoint_files.list_checkpoints(tmp_path)
    for left in ("step.tmp", "removed.tmp", "step_00000003.old"):
        shutil.copytree(newest, tmp_path / left)
    with open(newest / "facts.pt") as before:       # open, so that no new file gets its number
        watched(config, state=first)
        assert (newest / "facts.pt").stat().st_ino != os.fstat(before.fileno()).st_ino
    assert names_in(tmp_path) == ["latest", "step_00000002", "step_00000003"]
    assert os.readlink(tmp_path / "latest") == "step_00000003"
    watched(replace(config, steps=4, checkpoint_format="file"), state=newest)
    assert names_in(tmp_path) == ["latest.pt", "step_00000003", "step_00000004.pt"]
    watched(replace(config, steps=5), state=saved_file(tmp_path, 4))
    assert names_in(tmp_path) == ["latest", "step_00000004.pt", "step_00000005"]


# ---- Programs that take folders

def test_a_file_becomes_a_folder_and_back(run_train, run_sample, capsys, shards, tmp_path):
    """A run goes on from a folder or begins from its weights, and sample.py reads it. A full disk
    ends the tool in one line; nothing of it stays."""
    out, folder = tmp_path / "o", tmp_path / "folder"
    flags = ["--data", shards, *TINY]
    assert run_train(*flags, "--out", out)[0] == 0
    for made in (folder, tmp_path / "again.pt"):
        with no_file_above(5000):
            ended = run_main(capsys, tool, out / "latest.pt", made)
        expect_mistake(ended, "File too large", f"{made}", program="tools.checkpoint", status=1)
    assert names_in(tmp_path) == ["o"]
    told = 0, f"wrote the folder {folder}\n", ""
    assert run_main(capsys, tool, out / "latest.pt", folder) == told
    assert run_main(capsys, tool, folder, tmp_path / "again.pt")[0] == 0
    assert names_in(tmp_path) == ["again.pt", "folder", "o"]        # nothing is left aside
    file = checkpoint.load(out / "latest.pt")
    for made in (folder, tmp_path / "again.pt"):
        checkpoint_files.verify(made)
        assert_same_state(checkpoint.load(made), file, ())
    texts = {run_sample("--ckpt", ckpt, "--max-tokens", 20) for ckpt in (folder, out / "latest.pt")}
    assert len(texts) == 1
    for start in (["--resume", folder, "--steps", 6], ["--init-from", folder]):
        status, text, error = run_train(*flags, "--out", tmp_path / start[0], *start)
        assert (status, error) == (0, "") and str(folder) in text
    run_train(*flags, "--out", tmp_path / "p", "--checkpoint-format", "folder")
    for words, file in ((f"a part of the checkpoint {folder}: give", folder / "facts.pt"),
                        ("has step_00000004, ", tmp_path / "p" / "latest.pt")):
        expect_mistake(run_sample("--ckpt", file), words, program="sample.py")
    for words, *given in (("exists: give a new name", folder, out),
                          ("there is no checkpoint", tmp_path / "x", tmp_path / "y")):
        expect_mistake(run_main(capsys, tool, *given), words, program="tools.checkpoint")
    assert run_train(*flags, "--out", tmp_path / "p", "--plain", "--steps", 6)[0] == 0
