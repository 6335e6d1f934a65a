"""Turn a checkpoint that is one file into a folder, and back.

    python -m tools.checkpoint out/latest.pt folder     # as train.py --checkpoint-format folder
    python -m tools.checkpoint out/latest latest.pt     # a name that ends in .pt: a file
    python -m tools.checkpoint theirs ours.pt --data data/python --model nano

One tensor is in memory at a time, by the third line all weights. That line takes a folder of
torch.distributed.checkpoint that another program has written, with our names of parameters. It has
no facts: --data tells the tokenizer, and the flags of train.py the model. What comes out has
weights alone, for train.py --init-from.
"""
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from base.atomic_writes import flush_folder, write_file, writing
from base.checkpoint_files import facts_file, reading, verify
from base.checkpoint_folder import FolderTensors, shapes_of, write_part, write_table
from base.commandline import Parser, add_flags, parse_given
from base.dcp_table import TABLE, make_table, part_file, read_table
from base.errors import errors_in_one_line
from base.options import SHAPE, Config, merge_config
from checkpoint import FORMAT, KEYS, OPTIONAL, STATE, load, parameter_shapes
from data import TokenDataset
from model import GPTConfig
from models import make_config
from runtime.directory import new_run
from runtime.streamed_tensors import Streamed

PREFIXES = ("", "parameters.", "model.")        # of the names in another program's folder


class Next:
    """The source of Streamed tensors: each `read` gives the next tensor, in the file's order."""

    def __init__(self, mappings: list):
        self.tensors = (mapping[name] for mapping in mappings for name in mapping)

    def read(self):
        return next(self.tensors)


def streamed(state: dict) -> dict:
    """The state with tensors that are read from the folder when they are written."""
    source = Next([state[kind] for kind in STATE])
    return state | {kind: {name: Streamed(like.shape, like.dtype, source)
                           for name, like in state[kind].like.items()} for kind in STATE}


def weights_of_another_program(folder: Path, given: dict) -> dict:
    """The state of weights alone in a folder without facts. Raises ValueError."""
    if "data" not in given:
        raise ValueError(f"{folder} has no facts.pt, so another program has written it: give "
                         f"--data, which tells the tokenizer, and --model")
    config, shape = merge_config(given, None)
    meta = TokenDataset(config.data, "train", shape["seq_len"]).meta
    cfg = make_config(vocab_size=meta["vocab_size"], **shape)
    expected = parameter_shapes(cfg)
    with reading(folder / TABLE, "is refused"):
        table = read_table(folder)
        for prefix in PREFIXES:
            tensors = FolderTensors(folder, table, prefix)
            found = shapes_of(tensors)
            if found.keys() & expected:
                break
        for name, size in expected.items():
            if name not in found:
                raise ValueError(f"it has no {name}")
            if found[name] != size:
                raise ValueError(f"{name} should have shape {size}, not {found[name]}: give the "
                                 f"flags of its model, such as --n-embd")
        parameters = {name: tensors[name] for name in expected}
    return state_of_weights(cfg, parameters) | {
        key: meta[key] for key in ("tokenizer", *OPTIONAL) if key in meta}


def state_of_weights(cfg: GPTConfig, parameters: dict[str, torch.Tensor]) -> dict:
    """A state of weights alone, whose tokenizer is not told yet."""
    return {key: {} for key in KEYS} | dict(
        format=FORMAT, step=0, consumed_samples=0, tokens=0, optimizer_steps=0, data=None,
        run=new_run("import"), model=asdict(cfg), parameters=parameters)


def read(source: Path, given: dict) -> dict:
    """The state in a file or folder. Raises ValueError, OSError."""
    if source.is_dir() and (source / TABLE).exists() and not facts_file(source).exists():
        return weights_of_another_program(source, given)
    if given:
        raise ValueError(f"{source} tells its model and tokenizer: drop the flags")
    verify(source)
    return load(source)


def write(state: dict, target: Path) -> None:
    """Write a state to a new file or folder, which appears only when it is whole."""
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".tmp")
    if target.suffix == ".pt":
        if isinstance(state["parameters"], FolderTensors):
            state = streamed(state)
        write_file(state, aside, target)
        flush_folder(target.absolute().parent)
        return
    if aside.exists():
        raise ValueError(f"{aside} exists, as a killed process may leave it: remove it")
    with writing(aside, target):
        aside.mkdir()
        write_one_part(state, aside)
        flush_folder(aside)
        os.rename(aside, target)
        flush_folder(target.absolute().parent)


def write_one_part(state: dict, folder: Path) -> None:
    """Write a state into a folder as a run of one rank does: one part has all tensors."""
    entries, crc = write_part(folder / part_file(0), (
        (f"{kind}.{name}", tensor.shape, (0,) * tensor.dim(), tensor)
        for kind in STATE for name, tensor in state[kind].items()))
    dtype = next(iter(state["parameters"].values())).dtype
    facts = {key: value for key, value in state.items() if key not in STATE}
    write_table(folder, make_table([entries], dtype), facts, [crc])


@errors_in_one_line("tools.checkpoint")
def main() -> None:
    parser = Parser("tools.checkpoint", "python -m tools.checkpoint FROM TO",
                    "Turn a checkpoint that is one file into a folder, and back.")
    parser.add_argument("source", type=Path, metavar="FROM", help="a checkpoint: file or folder")
    parser.add_argument("target", type=Path, metavar="TO", help="FILE.pt, or else a folder")
    add_flags(parser, Config, ("data", "model", *SHAPE))
    given = parse_given(parser, sys.argv[1:])
    source, target = given.pop("source"), given.pop("target")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: give a new name")
    write(read(source, given), target)
    print(f"wrote the {'folder' if target.is_dir() else 'file'} {target}")


if __name__ == "__main__":
    main()
