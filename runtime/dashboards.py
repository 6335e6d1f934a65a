"""--log: rank 0 sends the lines of metrics.jsonl to TensorBoard and Weights & Biases, while the run
trains. runtime/startup.py starts it. tools/follow.py sends a finished run by the same classes.

Each dashboard has a thread, so that training never waits for a network or a package. An error there
costs one warning and the dashboard, never the run.
"""
import importlib.util
import json
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Callable

from base.processes import warn

SECONDS_TO_END = 10             # time allowed to send the last lines


class TensorBoard:
    """Event files in OUT/tensorboard. Events are text. We do not use torch's SummaryWriter: its
    thread prints a traceback when the disk is full."""

    def __init__(self, out: Path, first_step: int = 1):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        self.Event, self.RecordWriter = Event, RecordWriter
        folder = out / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        numbers = [0]
        for file in folder.glob("events.out.tfevents.*"):
            numbers += map(int, re.findall(r"tfevents\.(\d+)", file.name))
        self.path = folder / f"events.out.tfevents.{max(numbers) + 1:06}"
        self.tags = Counter()           # of the texts so far
        self.append(file_version="brain.Event:2")
        self.purge(first_step)

    def append(self, **event) -> None:
        with open(self.path, "ab") as file:
            self.RecordWriter(file).write(self.Event(**event).SerializeToString())

    def purge(self, step: int) -> None:
        """TensorBoard drops what it has read of this step and later ones."""
        self.append(step=step, wall_time=time.time(), session_log=dict(status="START"))
        self.last_step = step - 1

    def write(self, line: dict) -> None:
        if "event" in line:
            # A purge drops texts too. Step 0 keeps this one, and so it needs a tag of its own.
            tag = f"{line['event']}/step {line['step']}"
            self.tags[tag] += 1
            if self.tags[tag] > 1:
                tag += f" ({self.tags[tag]})"
            value = dict(tag=tag,
                         tensor=dict(dtype="DT_STRING", string_val=[json.dumps(line).encode()]),
                         metadata=dict(plugin_data=dict(plugin_name="text")))
            self.append(step=0, wall_time=line["time"], summary=dict(value=[value]))
            return
        if line["step"] <= self.last_step:          # after a rollback
            self.purge(line["step"])
        self.last_step = line["step"]
        values = [dict(tag=name, simple_value=value) for name, value in line.items()
                  if name not in ("step", "time") and value is not None]
        self.append(step=line["step"], wall_time=line["time"], summary=dict(value=values))

    def close(self) -> None:
        """Nothing is open."""


class WandB:
    """A run of Weights & Biases. Its own steps can only rise, so the x axis is our field `step`.
    Void rows stay, beside those that replace them."""

    def __init__(self, out: Path, run_id: str | None = None, finish_timeout: float = 0):
        import wandb
        if not can_start(wandb):
            raise PermissionError("W&B has no API key: run `wandb login` before this program, or "
                                  "set WANDB_MODE=offline")
        self.run = wandb.init(id=run_id, resume="allow", name=out.resolve().name, dir=out,
                              settings=dict(console="off", finish_timeout=finish_timeout))
        self.run.define_metric("*", step_metric="step")

    def write(self, line: dict) -> None:
        if "event" in line:
            self.run.config.update(line.get("config", {}), allow_val_change=True)
            line = {"step": line["step"], f"events/{line['event']}": json.dumps(line)}
        self.run.log(line)

    def close(self) -> None:
        self.run.finish()


def can_start(wandb) -> bool:
    """Whether W&B has a key, or needs none. Without a key it would ask at the terminal, among the
    lines of the steps."""
    if wandb.setup().settings.mode != "online":         # WANDB_MODE
        return True
    try:
        return wandb.login(prompt=False, verify=False)
    except TypeError:                   # an older version, which cannot be told not to ask
        return True


class Dashboard:
    """The thread that opens a TensorBoard or a WandB, by `connect`, and writes to it."""

    def __init__(self, name: str, connect: Callable):
        self.name = name
        self.lines = SimpleQueue()      # None is the end
        self.thread = Thread(target=self.send, args=(connect,), daemon=True)
        self.thread.start()

    def send(self, connect: Callable) -> None:
        try:
            destination = connect()
            for line in iter(self.lines.get, None):
                destination.write(line)
            destination.close()
        except (Exception, KeyboardInterrupt) as error:     # W&B's own, at its prompt
            warn(f"--log: {self.name} is off from here on: {describe(error)}")

    def write(self, line: dict | None) -> None:
        if self.thread.is_alive():
            self.lines.put(line)

    def close(self, deadline: float) -> None:
        """Wait until all is sent, or this time (time.monotonic). The end is in the queue."""
        self.thread.join(max(0, deadline - time.monotonic()))
        if self.thread.is_alive():
            warn(f"--log: {self.name} did not end in {SECONDS_TO_END} seconds: "
                 f"`python -m tools.follow` sends the run again")


def close(dashboards: list[Dashboard]) -> None:
    """End all of them, together in at most SECONDS_TO_END."""
    deadline = time.monotonic() + SECONDS_TO_END
    for dashboard in dashboards:
        dashboard.write(None)
    for dashboard in dashboards:
        dashboard.close(deadline)


def start(names: str, out: Path, run_id: str, first_step: int) -> list[Dashboard]:
    """The dashboards of a run that begins at `first_step`; `names` is the value of --log."""
    connect = dict(tensorboard=partial(TensorBoard, out, first_step),
                   wandb=partial(WandB, out, run_id, SECONDS_TO_END))
    return [Dashboard(name, connect[name]) for name in names.split(",")]


def check(flag: str, names: str) -> None:
    """Raise a ValueError if a package that `flag` needs is missing."""
    for name in names.split(","):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{flag} {name} needs a package that is missing: pip install {name}")


def describe(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
