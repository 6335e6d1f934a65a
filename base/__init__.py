"""What every program needs before it knows of any run. It calls model.py, models/ and amp.py:

    commandline, options, sample_flags  flags, and the mistakes in them
    errors                              what ends a program in one line
    batch_ramp                          the sizes of batches that grow
    agreement                           what the ranks know and fail at together
    processes, devices                  the life of a process, and what it computes on
    checkpoint_files                    the files of checkpoints: find, read, remove
    checkpoint_folder                   a checkpoint as a folder, of which each rank writes a part
    disk                                whole files and folders on a disk that may fail
    flops                               what a model computes

Programs import it before numpy and torch. So a Python without their packages, such as the system's,
ends in one line, and Ctrl-C while torch is imported ends them at once.
"""
import importlib.util
import signal
import sys
from pathlib import Path

program = Path(sys.argv[0]).name
needed = ["numpy"]
if program != "data.py":
    needed.append("torch")
if program in ("data.py", "sample.py"):
    needed.append("tiktoken")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    print(f"{sys.executable} does not have {' and '.join(missing)}: activate the environment that "
          f"does, as `. .venv/bin/activate` (README.md), or `pip install -r requirements.txt`",
          file=sys.stderr)
    sys.exit(2)
if program in ("train.py", "sample.py", "data.py") and (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
