"""Turn a checkpoint that is one file into a folder, and back.

    python -m tools.checkpoint out/latest.pt folder     # as train.py --checkpoint-format folder
    python -m tools.checkpoint out/latest latest.pt     # a name that ends in .pt: a file

One tensor is in memory at a time.
"""
import os
from pathlib import Path

from base.checkpoint_files import verify
from base.checkpoint_folder import FolderTensors, part_file
from base.commandline import Parser
from base.disk import flush_folder, write_file, writing
from base.errors import errors_in_one_line
from checkpoint import STATE, load
from runtime.checkpoint_writer import Streamed
from runtime.folder_writer import write_part, write_table


def write(state: dict, target: Path) -> None:
    """Write a state to a new file or folder, which appears only when it is whole."""
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".tmp")
    if target.suffix == ".pt":
        if isinstance(state["parameters"], FolderTensors):      # torch.save asks in this order
            kinds = [state[kind] for kind in STATE]
            read = (tensors[name] for tensors in kinds for name in tensors)
            state = state | {kind: {name: Streamed(like.shape, like.dtype, read)
                                    for name, like in state[kind].like.items()} for kind in STATE}
        write_file(state, aside, target)
        flush_folder(target.absolute().parent)
        return
    if aside.exists():
        raise ValueError(f"{aside} exists, as a killed process may leave it: remove it")
    with writing(aside, target):
        aside.mkdir()
        # As a run of one rank: one part has all tensors.
        part = write_part(aside / part_file(0), (
            (f"{kind}.{name}", tensor.shape, (0,) * tensor.dim(), tensor)
            for kind in STATE for name, tensor in state[kind].items()))
        dtype = next(iter(state["parameters"].values())).dtype
        facts = {key: value for key, value in state.items() if key not in STATE}
        write_table(aside, [part], dtype, facts)
        flush_folder(aside)
        os.rename(aside, target)
        flush_folder(target.absolute().parent)


@errors_in_one_line("tools.checkpoint")
def main() -> None:
    parser = Parser("tools.checkpoint", "python -m tools.checkpoint FROM TO",
                    "Turn a checkpoint that is one file into a folder, and back.")
    parser.add_argument("source", type=Path, metavar="FROM", help="a checkpoint: file or folder")
    parser.add_argument("target", type=Path, metavar="TO", help="FILE.pt, or else a folder")
    args = parser.parse_args()
    if os.path.lexists(args.target):
        raise ValueError(f"{args.target} exists: give a new name")
    verify(args.source)
    write(load(args.source), args.target)
    print(f"wrote the {'folder' if args.target.is_dir() else 'file'} {args.target}")


if __name__ == "__main__":
    main()
