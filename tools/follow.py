"""Send a run's metrics.jsonl to TensorBoard or Weights & Biases, while the run trains or later.

    python -m tools.follow out --to tensorboard
    python -m tools.follow out --to tensorboard,wandb

It begins with the first line and follows the file until the run is complete (its last line is the
event `end`). A run that stopped early has no such line: end this program with Ctrl-C.

What was sent is noted in OUT/tensorboard/follow.json and OUT/wandb/follow.json, so that a later
start goes on from there, also after the run was resumed or rolled back. Remove the folder to send
everything again. TensorBoard hides the steps that a rollback made void. Weights & Biases takes no
step twice: there the void steps stay, and those that replace them are not sent.

`train.py --log` starts this program with --parent: it then ignores Ctrl-C and ends, after it has
sent the last line, when train.py closes its standard input.
"""
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from base.commandline import Parser
from tools.metrics import last_valid_step, parse_line

POLL_SECONDS = 1.0


# ---------------------------------------------------------------------------------------------
# Destinations
# ---------------------------------------------------------------------------------------------


class Destination:
    """Where lines are sent. `state` says what was sent: `position`, the bytes of metrics.jsonl that
    were read; `complete`, whether they end with the event `end`; and what a subclass adds."""

    def __init__(self, out: Path, name: str, **state):
        self.out, self.name = out, name
        self.file = out / name / "follow.json"
        self.state = dict(position=0, complete=False, **state)
        self.is_open = False
        if self.file.exists():
            self.state |= json.loads(self.file.read_text())

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        aside = self.file.with_name("follow.json.tmp")
        aside.write_text(json.dumps(self.state))
        os.replace(aside, self.file)

    def open(self) -> None:
        """Called before the first line that is sent."""
        raise NotImplementedError

    def send(self, line: dict) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Called after the last line, if there was one."""


class TensorBoard(Destination):
    """Event files in OUT/tensorboard; events are text. We do not use torch's SummaryWriter: its
    thread prints a traceback when the disk is full.

    A restart (`hide_after`) makes TensorBoard drop all that it has read of later steps, texts too,
    and its data server keeps of one tag only rising steps. So that each event stays, its text has
    step 0 and a tag of its own: skip, skip/2, skip/3 (with the event's step in the text)."""

    def __init__(self, out: Path):
        super().__init__(out, "tensorboard", last_step=0, events={})

    def open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        self.Event, self.RecordWriter = Event, RecordWriter
        # TensorBoard reads the files in the order of their names. The clock may have been set back.
        numbers = [int(file.suffix[1:]) for file in self.file.parent.glob("events.out.tfevents.*")
                   if file.suffix[1:].isdecimal()]
        number = max([time.time_ns(), *(last + 1 for last in numbers)])
        self.records = self.file.with_name(f"events.out.tfevents.{number}")
        self.records.parent.mkdir(parents=True, exist_ok=True)
        self.append(file_version="brain.Event:2")
        # Rows that a killed process sent after it last saved the state are sent again.
        self.hide_after(self.state["last_step"], time.time())

    def append(self, **event) -> None:
        record = io.BytesIO()
        self.RecordWriter(record).write(self.Event(**event).SerializeToString())
        with open(self.records, "ab") as stream:
            stream.write(record.getvalue())

    def hide_after(self, step: int, wall_time: float) -> None:
        """TensorBoard drops what it has read of the steps after `step`."""
        self.append(step=step + 1, wall_time=wall_time, session_log=dict(status="START"))
        self.state["last_step"] = step

    def send(self, line: dict) -> None:
        last_valid = last_valid_step(line)
        if last_valid is not None and last_valid < self.state["last_step"]:
            self.hide_after(last_valid, line["time"])
        if "event" in line:
            self.send_event(line)
            return
        values = [dict(tag=name, simple_value=value) for name, value in line.items()
                  if name not in ("step", "time") and value is not None]
        self.append(step=line["step"], wall_time=line["time"], summary=dict(value=values))
        self.state["last_step"] = line["step"]

    def send_event(self, line: dict) -> None:
        tag = line["event"]
        count = self.state["events"].get(tag, 0) + 1
        self.state["events"][tag] = count
        if count > 1:
            tag += f"/{count}"
        text = dict(dtype="DT_STRING", string_val=[json.dumps(line).encode()])
        metadata = dict(plugin_data=dict(plugin_name="text"))
        value = dict(tag=tag, tensor=text, metadata=metadata)
        self.append(step=0, wall_time=line["time"], summary=dict(value=[value]))


class WandB(Destination):
    """A run of Weights & Biases. It takes steps in ascending order, and more values for the newest
    step while the process that logged it lives. So a row of a step that was sent is left out, and
    events wait for a row: they join the newest step that this process has logged."""

    def __init__(self, out: Path):
        super().__init__(out, "wandb", id=None, last_step=0, waiting_events=[])

    def open(self) -> None:
        import wandb
        self.run = wandb.init(id=self.state["id"], resume="allow", name=self.out.resolve().name,
                              dir=self.out)
        self.state["id"] = self.run.id
        self.has_logged_step = False

    def send(self, line: dict) -> None:
        if "event" in line:
            self.run.config.update(line.get("config", {}), allow_val_change=True)
            self.state["waiting_events"].append(line)
            return
        if line["step"] > self.state["last_step"]:
            self.run.log(line, step=line["step"])
            self.state["last_step"] = line["step"]
            self.has_logged_step = True
            self.texts = {}         # of the newest step: a second text would replace the first
        self.log_events()

    def log_events(self) -> None:
        events = self.state["waiting_events"]
        if not events or not self.has_logged_step:
            return
        for event in events:
            lines = self.texts.setdefault("events/" + event["event"], [])
            lines.append(json.dumps(event))
        self.run.log({name: "\n".join(lines) for name, lines in self.texts.items()},
                     step=self.state["last_step"])
        self.state["waiting_events"] = []

    def close(self) -> None:
        self.log_events()
        self.run.finish()
        self.save()


DESTINATIONS = {"tensorboard": TensorBoard, "wandb": WandB}


# ---------------------------------------------------------------------------------------------
# Following the file
# ---------------------------------------------------------------------------------------------


def read_from(path: Path, position: int) -> tuple[int, bytes]:
    """The content of the file from `position` on, and where it begins: earlier if the file has
    become shorter than that, as after a crash of the machine."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < position:
            file.seek(0)
            position = file.read(size).rfind(b"\n") + 1
        file.seek(position)
        return position, file.read()


def send_new_lines(path: Path, destination: Destination) -> None:
    """Send the whole lines that were not sent before, and save how far it came."""
    state = destination.state
    position, content = read_from(path, state["position"])
    if position == state["position"] and not content:
        return
    state["position"] = position
    state["complete"] = False
    try:
        for text in content.splitlines(keepends=True):
            if not text.endswith(b"\n"):            # it is still being written
                state["complete"] = False
                break
            line = parse_line(text)
            if line is not None:
                if not destination.is_open:
                    destination.open()
                    destination.is_open = True
                destination.send(line)
                state["complete"] = line.get("event") == "end"
            state["position"] += len(text)
    finally:
        destination.save()


def when_standard_input_closes() -> threading.Event:
    """An event that is set then."""
    closed = threading.Event()

    def wait():
        while os.read(0, 1024):
            pass
        closed.set()
    threading.Thread(target=wait, daemon=True).start()
    return closed


def warn(destination: Destination, error: Exception) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"tools.follow: warning: {destination.name} is off from here on: {reason}",
          file=sys.stderr)


def send_until_the_end(path: Path, destinations: list[Destination], parent: bool) -> None:
    """Send lines until the run is complete or, with `parent`, standard input has closed. A
    destination that fails is removed from the list."""
    closed = when_standard_input_closes() if parent else threading.Event()
    while destinations:
        is_last_time = closed.is_set()          # looked up first: no line is written after that
        for destination in list(destinations):
            try:
                send_new_lines(path, destination)
            except Exception as error:
                destinations.remove(destination)
                warn(destination, error)
        if parent and is_last_time:
            return
        if not parent and all(destination.state["complete"] for destination in destinations):
            return
        closed.wait(POLL_SECONDS)


def follow(out: Path, names: list[str], parent: bool) -> bool:
    """Send OUT/metrics.jsonl to these destinations; returns whether none has failed."""
    destinations = [DESTINATIONS[name](out) for name in names]
    try:
        send_until_the_end(out / "metrics.jsonl", destinations, parent)
    except KeyboardInterrupt:
        pass
    succeeded = len(destinations) == len(names)
    for destination in destinations:
        try:
            if destination.is_open:
                destination.close()
        except Exception as error:
            succeeded = False
            warn(destination, error)
    return succeeded


def parse_names(text: str) -> list[str]:
    """"tensorboard,wandb" -> the names; raises ValueError."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DESTINATIONS:
            raise ValueError(f"argument --to: {name!r} is not one of {', '.join(DESTINATIONS)}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--to {name} needs a package that is missing: pip install {name}")
    return names


def main() -> None:
    parser = Parser("tools.follow", "python -m tools.follow OUT --to NAMES", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--to", required=True, metavar="NAMES",
                        help="tensorboard, wandb, or both with a comma between them")
    parser.add_argument("--parent", action="store_true",
                        help="end when standard input closes, and ignore Ctrl-C")
    args = parser.parse_args()
    if args.parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        names = parse_names(args.to)
        if not (args.out / "metrics.jsonl").is_file():
            raise ValueError(f"{args.out} has no metrics.jsonl: give the --out of a run")
        succeeded = follow(args.out, names, args.parent)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
