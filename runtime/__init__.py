"""What a run on real machines needs beside the training, one concern a file.

Programs import something from here before numpy and torch, so that a Python without them, such as
the system's, ends in one line: data.py needs numpy alone, the others both.
"""
import importlib.util
import sys
from pathlib import Path

needed = ["numpy", "torch"]
if Path(sys.argv[0]).name == "data.py":
    needed = ["numpy"]
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    print(f"{sys.executable} does not have {' and '.join(missing)}: activate the environment that "
          f"does, as `. .venv/bin/activate` (README.md), or `pip install -r requirements.txt`",
          file=sys.stderr)
    sys.exit(2)
