"""What a run on real machines needs beside the training, one concern a file.

Programs import something from here before numpy and torch, so that a Python without the packages
that they need, such as the system's, ends in one line.
"""
import importlib.util
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
