"""What `import tools` finds where a tool is started as a file, as by `python tools/compare.py`:
this file instead of the folder. There Python does not find the project's other modules, either.
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
