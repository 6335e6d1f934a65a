"""Refuses `python tools/compare.py` and the like: there Python does not find the project's other
modules. It has its name because `import tools`, the first line of each tool, then finds this file
instead of the folder.
"""
import sys
from pathlib import Path

program = Path(sys.argv[0])
name = program.stem
if name == "-m":                    # python -m compare, in this folder
    name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
elif name == "__main__":            # python -m plan, in this folder
    name = program.parent.name
print(f"{name}.py: start it as a module, in the folder {Path(__file__).resolve().parents[1]}: "
      f"python -m tools.{name}", file=sys.stderr)
sys.exit(2)
