"""Checkpoints as folders, of which each rank writes a part.

    python -m pytest tests/test_checkpoint_folder.py
    python -m pytest tests/test_checkpoint_folder.py -m slow      all pairs of layouts

What a folder holds is compared with the state that rank 0 gathers, and with what PyTorch's own
torch.distributed.checkpoint reads from it, which is told names and shapes alone.
"""
import functools
import gc
import itertools
import math
import os
import pickle
import random
import shutil
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
from base import checkpoint_files, checkpoint_folder, dcp_table
from base.checkpoint_files import CorruptCheckpoint, step_file
from base.chunks import chunks
from base.dcp_table import Entry, read_table
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import MoEConfig
from parallelism.parameters import ParamSpec
from runtime import directory
from tests.harness import (CFG, INTERLEAVED, TINY, assert_same_state, names_in, no_file_above,
                           run_main, saved_file, settings, trained, watched)
from tools import checkpoint as tool


def random_spec(rng):
    """One parameter, as any model may have it, and its ranks (ep rank, tp rank)."""
    tp, ep, stacked = rng.choice([1, 2, 4]), 1, rng.choice([1, 2, 3])
    size = tp * rng.randint(1, 4)                       # of a dimension that is cut
    kind = rng.choice(["whole", "vector", "column", "row", "vocabulary", "experts",
                       "shared heads"])
    shape, dim = {"whole": ((rng.randint(1, 9), rng.randint(1, 9)), None),
                  "vector": ((stacked * size,), 0), "column": ((stacked * size, 5), 0),
                  "row": ((5, size), 1), "vocabulary": ((rng.randint(1, 20), 3), 0),
                  "experts": ((2 * rng.randint(1, 3), stacked * size, 3), 1),
                  "shared heads": ((0, 3), 0)}[kind]
    if kind in ("whole", "row", "vocabulary"):
        stacked = 1
    if kind == "experts":
        ep = rng.choice([1, 2])
    groups, sections, widths = 1, (), ()
    if dim is not None:
        sections = (shape[dim] // stacked,) * stacked
        widths = tuple(math.ceil(section / tp) for section in sections)
    if kind == "shared heads":
        groups = rng.choice([n for n in (1, 2) if tp % n == 0])
        sections = tp // groups * rng.randint(1, 3), rng.randint(1, 6)
        widths = tuple(math.ceil(section * groups / tp) for section in sections)
        shape = groups * sum(sections), 3
    ranks = [SimpleNamespace(ep_rank=e, tp_rank=t) for e in range(ep) for t in range(tp)]
    return ParamSpec("x", shape, dim, sections, widths, tp, [], False, ep=ep, groups=groups), ranks


def test_chunks_are_the_inverse_of_a_cut():
    """Each number of a parameter, cut by tensor and expert parallelism and then anywhere by ZeRO,
    is in one chunk, at its place; the padding is in none."""
    rng = random.Random(0)
    for _ in range(500):
        spec, ranks = random_spec(rng)
        full = torch.arange(math.prod(spec.shape)).view(spec.shape)
        seen = torch.full_like(full, -1)
        numbers = 0
        for grid in ranks:
            part = spec.cut(full, grid).flatten()
            ends = sorted(rng.randint(0, len(part)) for _ in range(3))
            for low, high in itertools.pairwise([0, *ends, len(part)]):
                for offsets, chunk in chunks(spec, grid, part[low:high], slice(low, high)):
                    seen[tuple(slice(o, o + s) for o, s in zip(offsets, chunk.shape))] = chunk
                    numbers += chunk.numel()
        assert seen.equal(full), spec
        is_replicated = spec.partition_dim is None
        assert numbers == full.numel() * (len(ranks) // spec.ep if is_replicated else 1), spec


def test_the_table_of_many_ranks_is_short_and_lets_other_threads_run(monkeypatch, tmp_path):
    """It has a rank's chunk once, whichever layers and kinds of tensors have it. While it is
    pickled, the interpreter's lock is free after each piece."""
    pieces = []

    class Watched(dcp_table.Table):
        def write(self, piece):
            pieces.append(len(piece))
            super().write(piece)
    monkeypatch.setattr(dcp_table, "Table", Watched)
    names = [f"{kind}.blocks.{layer}.attn.qkv.weight" for kind in checkpoint.STATE
             for layer in range(50)]
    parts = [pickle.loads(pickle.dumps([
        Entry(name, (9000, 512), (9 * rank, 0), (9, 512), 20_000 * number, 20_000)
        for number, name in enumerate(names)])) for rank in range(200)]
    table = dcp_table.make_table(parts, torch.float32)
    assert len(table) < 90 * 200 * len(names) and max(pieces) < 1e5 < sum(pieces) == len(table)
    (tmp_path / ".metadata").write_bytes(table)
    read = dcp_table.read_table(tmp_path)
    for rank in (0, 199):
        first, *others = (read.state_dict_metadata[name].chunks[rank] for name in names)
        assert first.offsets == (9 * rank, 0) and first.sizes == (9, 512)
        assert all(other is first for other in others)
    assert len(read.storage_data) == 200 * len(names)
    assert gc.isenabled()


LLAMA = LlamaConfig(257, 16, 5, 8, 32, n_kv_head=1, **FAMILIES["qwen2"])      # shared by ranks
MIXTURE = MoEConfig(257, 16, 2, 4, 32, n_expert=4, n_active=2, shared_hidden=32)
# Layouts dp, tp, pp and flags. Each writes a folder that the next one reads, and so on.
BY_DEFAULT = [((2, 2, 2), dict(zero=1)), ((1, 2, 1), {})]
CHAIN = [
    ((1, 1, 1), {}), ((4, 1, 1), dict(zero=2)), ((1, 4, 1), dict(sequence_parallel=True)),
    ((2, 1, 2), dict(zero=2, pp_schedule="1f1b")), ((1, 1, 4), {}),
    ((2, 2, 1), dict(zero=3, recompute=True)),
    ((1, 2, 1), dict(cp=2, zero=1)), ((1, 1, 2), INTERLEAVED), ((2, 1, 2), dict(zero=1)),
    ((2, 1, 1), dict(zero=2, offload=True)), ((1, 1, 2), dict(pp_schedule="zb-h1")),
    ((1, 4, 2), {}), ((2, 1, 1), dict(dtype="fp16", zero=1)), ((1, 2, 2), dict(dtype="bf16")),
    ((4, 1, 1), dict(zero=3, dtype="fp16")), ((2, 2, 1), dict(exact=True)),
    ((1, 1, 2), dict(exact=True, zero=0)), ((2, 1, 1), dict(exact=True, zero=3)),
    ((1, 1, 1), dict(offload=True)), ((8, 1, 1), dict(zero=3, micro_batch=1))]
PAIRS = [(CFG, BY_DEFAULT[0], BY_DEFAULT[1])]
PAIRS += [pytest.param(cfg, one, other, marks=pytest.mark.slow)
          for cfg, (one, other) in zip(itertools.cycle([CFG, LLAMA]), itertools.pairwise(
              [*CHAIN, CHAIN[0]]))]
PAIRS += [pytest.param(MIXTURE, ((2, 1, 1), dict(ep=2, zero=1)), ((1, 2, 1), {}),
                       marks=pytest.mark.slow),
          pytest.param(MIXTURE, ((2, 2, 1), dict(ep=2, zero=3)), ((4, 1, 1), dict(ep=4)),
                       marks=pytest.mark.slow)]


@pytest.mark.claim("A checkpoint of which every rank writes a part resumes in any layout, bit for "
                   "bit.")
@pytest.mark.parametrize("cfg, writer, reader", PAIRS)
def test_a_layout_reads_the_folder_of_another_bit_for_bit(pool, tmp_path, cfg, writer, reader):
    """A folder holds the state that rank 0 gathers of the run that writes it. The run that reads it
    has the same state before it trains."""
    (layout, flags), (other, theirs) = writer, reader
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
    folder = step_file(tmp_path, 2, "folder")
    file = checkpoint.load(saved_file(tmp_path / "file", 2))
    assert_same_state(checkpoint.load(folder), file, ("config", "run", "monitor"))
    names = {f"{key}.{name}": tensor for key in checkpoint.STATE
             for name, tensor in file[key].items()}
    theirs = {name: torch.empty_like(tensor) for name, tensor in names.items()}
    dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    assert all(tensor.equal(theirs[name]) for name, tensor in names.items())
    dcp_to_torch_save(folder, tmp_path / "theirs.pt")
    whole = torch.load(tmp_path / "theirs.pt")
    assert whole.keys() == names.keys()
    assert all(tensor.equal(whole[name]) for name, tensor in names.items())


def write_folders(tmp_path, steps, **flags):
    """The folders of a run in one process, newest first."""
    watched(settings(tmp_path, steps=steps, save_every=1, keep=9, checkpoint_format="folder",
                     **flags))
    found = checkpoint_files.list_checkpoints(tmp_path)
    assert found == [step_file(tmp_path, step, "folder") for step in range(steps, 0, -1)]
    return found


def test_a_damaged_folder_is_passed_over(tmp_path, capsys):
    """One bit flipped, or the end cut off, in any file of a folder; or a file that is gone."""
    newest, older = write_folders(tmp_path, 2)
    whole = {file.name: file.read_bytes() for file in newest.iterdir()}
    assert sorted(whole) == [".metadata", "__0_0.distcp", "facts.pt"]
    intact = checkpoint.load(newest)
    rng = random.Random(0)
    for name, content in whole.items():
        damaged = [content[:rng.randrange(len(content))], None]
        for _ in range(6):
            changed = bytearray(content)
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(changed))
        found = 0
        for bytes_ in damaged:
            (newest / name).unlink()
            if bytes_ is not None:
                (newest / name).write_bytes(bytes_)
            path, events = directory.latest_valid([newest, older])
            found += path == older
            if path == newest:          # a bit that nobody reads: the state is whole
                assert_same_state(checkpoint.load(newest), intact)
            (newest / name).write_bytes(content)
        assert found > 3, name
    assert directory.latest_valid([newest, older]) == (newest, [])


def test_a_table_that_lacks_a_chunk_is_refused(tmp_path):
    """No number of a tensor stays as it was in memory."""
    full = torch.arange(8.0).view(4, 2)
    halves = [("parameters.x", full.shape, (row, 0), full[row:row + 2]) for row in (0, 2)]
    entries, _ = checkpoint_folder.write_part(tmp_path / dcp_table.part_file(0), halves)
    for count in (2, 1):
        table = dcp_table.make_table([entries[:count]], torch.float32)
        (tmp_path / ".metadata").write_bytes(table)
        tensors = checkpoint_folder.FolderTensors(tmp_path, read_table(tmp_path), "parameters.")
        if count == 2:
            assert tensors["x"].equal(full)
        else:
            with pytest.raises(ValueError, match="lacks a part of parameters.x"):
                tensors["x"]


class Runs:
    """A pickle of it runs code."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_table_runs_no_code(tmp_path, monkeypatch):
    """DCP itself would run it."""
    monkeypatch.chdir(tmp_path)
    (folder,) = write_folders(tmp_path, 1)
    table = pickle.dumps(Runs())
    (folder / ".metadata").write_bytes(table)
    facts = torch.load(folder / "facts.pt")
    facts["crcs"][".metadata"] = zlib.crc32(table)
    torch.save(facts, folder / "facts.pt")
    checkpoint_files.verify(folder)             # it reads bytes alone
    with pytest.raises(CorruptCheckpoint, match="names posix.mkdir"):
        checkpoint.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_the_same_step_is_replaced_and_old_ones_are_removed(tmp_path):
    """Also what killed saves have left, and a link of the other format."""
    newest, _, first = write_folders(tmp_path, 3)
    for left in ("step.tmp", "removed.tmp", "step_00000003.old"):
        shutil.copytree(newest, tmp_path / left)
    before = (newest / "facts.pt").stat().st_ino
    config = settings(tmp_path, steps=3, save_every=1, keep=2, checkpoint_format="folder")
    watched(config, state=first)
    assert names_in(tmp_path) == ["latest", "step_00000002", "step_00000003"]
    assert (newest / "facts.pt").stat().st_ino != before
    assert os.readlink(tmp_path / "latest") == "step_00000003"
    watched(replace(config, steps=4, checkpoint_format="file"), state=newest)
    assert names_in(tmp_path) == ["latest.pt", "step_00000003", "step_00000004.pt"]
    watched(replace(config, steps=5), state=saved_file(tmp_path, 4))
    assert names_in(tmp_path) == ["latest", "step_00000004.pt", "step_00000005"]


# ---------------------------------------------------------------------------------------------
# Programs that take folders
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def run_tool(capsys):
    """run_tool(*words) -> (exit status, standard output, standard error) of tools.checkpoint."""
    return functools.partial(run_main, capsys, tool)


def test_a_file_becomes_a_folder_and_a_file_again(run_train, run_sample, run_tool, shards,
                                                  tmp_path):
    """A run goes on from a folder or begins from its weights, and sample.py reads it."""
    out, folder = tmp_path / "o", tmp_path / "folder"
    flags = ["--data", shards, *TINY]
    assert run_train(*flags, "--out", out)[0] == 0
    assert run_tool(out / "latest.pt", folder) == (0, f"wrote the folder {folder}\n", "")
    assert run_tool(folder, tmp_path / "again.pt")[0] == 0
    assert names_in(tmp_path) == ["again.pt", "folder", "o"]        # nothing is left aside
    file = checkpoint.load(out / "latest.pt")
    for made in (folder, tmp_path / "again.pt"):
        checkpoint_files.verify(made)
        assert_same_state(checkpoint.load(made), file, ())
    texts = {run_sample("--ckpt", ckpt, "--max-tokens", 20) for ckpt in (folder, out / "latest.pt")}
    assert len(texts) == 1
    for start in (["--resume", folder, "--steps", 6], ["--init-from", folder]):
        branch = tmp_path / start[0]
        status, text, error = run_train(*flags, "--out", branch, *start)
        assert (status, error) == (0, ""), error
        assert names_in(branch)[0] == "latest.pt" and str(folder) in text
    status, _, error = run_train(*flags, "--out", tmp_path / "no", "--eval-only",
                                 "--resume", folder)
    assert (status, error) == (0, "") and not (tmp_path / "no").exists()
    run_train(*flags, "--out", tmp_path / "p", "--checkpoint-format", "folder")
    status, _, error = run_train(*flags, "--out", tmp_path / "p", "--steps", 6, "--plain")
    assert status == 2 and "--plain reads files" in error
    run_tool(tmp_path / "p" / "latest", tmp_path / "q" / "latest.pt")
    status, text, _ = run_train(*flags, "--out", tmp_path / "q", "--steps", 6, "--plain")
    assert status == 0 and "after step 4" in text
    status, _, error = run_sample("--ckpt", folder / "facts.pt")
    assert status == 2 and f"is a part of the checkpoint {folder}: give the folder" in error
    status, _, error = run_sample("--ckpt", tmp_path / "p" / "latest.pt")
    assert status == 2 and "p has step_00000004, latest" in error.replace("step_00000002, ", "")
    for words, given in [("exists: give a new name", (folder, out)),
                         ("there is no checkpoint", (tmp_path / "x", tmp_path / "y"))]:
        status, _, error = run_tool(*given)
        assert status == 2 and words in error and error.count("\n") == 1, error


def test_a_full_disk_ends_the_tool_in_one_line_and_leaves_nothing(things, run_tool, tmp_path):
    for name in ("folder", "file.pt"):
        with no_file_above(5000):
            status, text, error = run_tool(things / "whole.pt", tmp_path / name)
        assert (status, text) == (1, "") and "File too large" in error
        assert error.startswith("tools.checkpoint: ") and error.count("\n") == 1, error
        assert f"{tmp_path / name}" in error and names_in(tmp_path) == []
