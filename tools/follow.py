"""Send the metrics.jsonl of a run to TensorBoard or Weights & Biases: old lines, then new ones.

    python -m tools.follow out --to tensorboard         # makes out/tensorboard
    python -m tools.follow out --to wandb               # makes a new run there

It is a program of its own, beside the run: training never waits for a network or a package. It ends
when the run has made all its steps, or at Ctrl-C, and remembers nothing: each call sends all.
"""
import importlib.util
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from base.commandline import Parser
from base.errors import errors_in_one_line
from tools.metrics import parse_line

SECONDS = 1             # between two looks at the file


class TensorBoard:
    """Event files in OUT/tensorboard. Events are text. We do not use torch's SummaryWriter: its
    thread prints a traceback when the disk is full."""

    def __init__(self, out: Path):
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
        self.last_step = 0

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

    def __init__(self, out: Path):
        import wandb
        if not can_start(wandb):
            raise PermissionError("W&B has no API key: run `wandb login` before this program, or "
                                  "set WANDB_MODE=offline")
        self.run = wandb.init(name=out.resolve().name, dir=out, settings=dict(console="off"))
        self.run.define_metric("*", step_metric="step")

    def write(self, line: dict) -> None:
        if "event" in line:
            self.run.config.update(line.get("config", {}), allow_val_change=True)
            line = {"step": line["step"], f"events/{line['event']}": json.dumps(line)}
        self.run.log(line)

    def close(self) -> None:
        self.run.finish()


def can_start(wandb) -> bool:
    """Whether W&B has a key, or needs none. Without a key it would ask at the terminal."""
    if wandb.setup().settings.mode != "online":         # WANDB_MODE
        return True
    try:
        return wandb.login(prompt=False, verify=False)
    except TypeError:                   # an older version, which cannot be told not to ask
        return True


DESTINATIONS = {"tensorboard": TensorBoard, "wandb": WandB}


def lines_of(path: Path) -> Iterator[dict]:
    """The lines of the file as they come, until the run has ended."""
    has_ended = False
    with open(path, "rb") as file:
        while True:
            text = file.readline()
            if text.endswith(b"\n"):
                line = parse_line(text)
                if line is not None:
                    has_ended = line.get("event") == "end"
                    yield line
            elif has_ended:
                return
            else:                                   # not yet whole; a resume cuts it
                file.seek(-len(text), 1)
                time.sleep(SECONDS)


def check(out: Path, name: str) -> None:
    """Raise a ValueError if the run cannot be sent."""
    if name not in DESTINATIONS:
        raise ValueError(f"--to {name}: give {' or '.join(DESTINATIONS)}, one at a time")
    if not (out / "metrics.jsonl").is_file():
        raise ValueError(f"{out} has no metrics.jsonl: give the --out of a run that has begun")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"--to {name} needs a package that is missing: pip install {name}")
    folder = out / "tensorboard"
    if name == "tensorboard" and folder.exists():
        raise ValueError(f"{folder} exists: remove it to send the run again")


def send(out: Path, name: str) -> None:
    destination = DESTINATIONS[name](out)
    with suppress(KeyboardInterrupt):
        for line in lines_of(out / "metrics.jsonl"):
            destination.write(line)
    destination.close()


@errors_in_one_line("tools.follow")
def main() -> None:
    parser = Parser("tools.follow", "python -m tools.follow OUT --to NAME", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--to", required=True, metavar="NAME", help="tensorboard or wandb")
    args = parser.parse_args()
    check(args.out, args.to)
    try:
        send(args.out, args.to)
        print(f"{args.out} is sent to {args.to}")
    except Exception as error:          # of the network, the disk or the package
        text = " ".join(f"{type(error).__name__}: {error}".split())
        sys.exit(f"tools.follow: {args.to} failed: {text}")


if __name__ == "__main__":
    main()
