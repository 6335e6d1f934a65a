"""--log: start tools/follow.py, which sends metrics.jsonl to TensorBoard or Weights & Biases, as a
process, and end it. runtime/startup.py calls it.
"""
import importlib.util
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from base.options import Config
from base.processes import warn

SECONDS_TO_END = 10             # time allowed to send the last lines
SECONDS_AFTER_A_SIGNAL = 3      # the same
ROOT = Path(__file__).resolve().parent.parent         # of the repository
FOLLOW = ROOT / "tools" / "follow.py"


def check(log: str) -> None:
    """Raise a ValueError if something that --log needs is missing."""
    if not FOLLOW.exists():
        raise ValueError(f"--log {log} needs {FOLLOW}, which is missing: drop the flag")
    for name in log.split(","):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--log {name} needs a package that is missing: pip install {name}")


@contextmanager
def started(config: Config):
    """Run tools.follow during the block, in a process whose failure does not end the run; yields a
    function that ends it before. Its own session lets it send the last lines after Ctrl-C or
    torchrun's SIGTERM."""
    command = [sys.executable, "-m", "tools.follow", os.path.abspath(config.out),
               "--to", config.log, "--parent"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT,
                               start_new_session=True)

    def end(seconds: float) -> None:
        process.stdin.close()                       # it sends the rest, then it exits
        try:
            process.wait(seconds)                   # (it prints its own errors)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            warn(f"--log: tools.follow did not end in {seconds} seconds: "
                 f"`python -m tools.follow` sends the rest")
    try:
        yield partial(end, SECONDS_AFTER_A_SIGNAL)
    finally:
        end(SECONDS_TO_END)
