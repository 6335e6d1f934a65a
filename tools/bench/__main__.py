"""The command line of python -m tools.bench."""
import os
import sys
import tempfile
from pathlib import Path

import torch

import tools.bench
from base import commandline
from tools.bench import gpu
from tools.bench.benchmarks import TABLES


def main() -> None:
    if sys.argv[1:2] == ["gpu"]:
        gpu.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["paper"]:
        from tools.bench import paper           # it imports the compiler, for seconds
        paper.main(sys.argv[2:])
        return
    parser = commandline.Parser("tools.bench", "python -m tools.bench [NAME ...]",
                                tools.bench.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=", ".join(TABLES) + " (default: all); or gpu or paper, which have "
                             "arguments of their own")
    names = parser.parse_args().names or list(TABLES)
    for name in names:
        if name not in TABLES:
            parser.error(f"there is no table {name!r}: there are {', '.join(TABLES)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""                 # these tables are of CPUs
    torch.set_num_threads(1)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            TABLES[name](Path(folder))


if __name__ == "__main__":
    main()
