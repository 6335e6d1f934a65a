"""--log: rank 0 sends the lines of metrics.jsonl to TensorBoard and Weights & Biases."""
import json
import time
from pathlib import Path


class TensorBoard:
    """Event files in OUT/tensorboard. Events are text. (The thread of torch's SummaryWriter would
    print a traceback when the disk is full.)"""

    def open(self, out: Path, run_id: str | None, first_step: int) -> None:
        """TensorBoard drops what earlier files have of `first_step` and later steps."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        folder = out / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # It reads the files in the order of their names.
        self.path = folder / f"events.out.tfevents.{time.time_ns()}"
        self.Event, self.RecordWriter = Event, RecordWriter
        self.out, self.last_step = out, first_step - 1
        self.append(file_version="brain.Event:2")
        self.append(step=first_step, session_log=dict(status="START"))

    def append(self, **event) -> None:
        with open(self.path, "ab") as file:
            self.RecordWriter(file).write(self.Event(**event).SerializeToString())

    def write(self, line: dict) -> None:
        if "event" in line:         # of step 0, which is never dropped, with a tag of its own
            step = 0
            values = [dict(tag=f"{line['event']}/step {line['step']} at {line['time']}",
                           tensor=dict(dtype="DT_STRING", string_val=[json.dumps(line).encode()]),
                           metadata=dict(plugin_data=dict(plugin_name="text")))]
        else:
            step = line["step"]
            if step <= self.last_step:                  # after a rollback
                self.open(self.out, None, step)
            self.last_step = step
            values = [dict(tag=name, simple_value=value) for name, value in line.items()
                      if name not in ("step", "time") and value is not None]
        self.append(step=step, wall_time=line["time"], summary=dict(value=values))

    def close(self) -> None:
        """Nothing is open."""


class WandB:
    """A run of Weights & Biases. Its own steps can only rise, so the x axis is our field `step`."""

    def open(self, out: Path, run_id: str | None, first_step: int) -> None:
        import wandb
        self.run = wandb.init(id=run_id, resume="allow", name=out.resolve().name, dir=out,
                              settings=dict(console="off", finish_timeout=10))
        self.run.define_metric("*", step_metric="step")

    def write(self, line: dict) -> None:
        if "event" in line:
            self.run.config.update(line.get("config", {}), allow_val_change=True)
            line = {"step": line["step"], f"events/{line['event']}": json.dumps(line)}
        self.run.log(line)

    def close(self) -> None:
        self.run.finish()


KINDS = dict(tensorboard=TensorBoard, wandb=WandB)
