"""Send the metrics.jsonl of a run that has ended to TensorBoard or Weights & Biases.

    python -m tools.follow out --to tensorboard         # makes out/tensorboard
    python -m tools.follow out --to wandb               # makes a new run there

This is for a run that trained without `train.py --log`, or whose dashboard failed. It remembers
nothing: each call sends all events, and all rows but those that a resume or a rollback made void.
"""
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from base.commandline import Parser
from base.errors import errors_in_one_line
from runtime import dashboards
from tools.metrics import judged_lines

DESTINATIONS = {"tensorboard": dashboards.TensorBoard, "wandb": dashboards.WandB}


def valid_lines(path: Path) -> Iterator[dict]:
    """The events and the valid rows, in the order of the file."""
    kept = [text for text, _, is_valid in judged_lines(path) if is_valid]
    return map(json.loads, reversed(kept))


def check(out: Path, name: str) -> None:
    """Raise a ValueError if the run cannot be sent."""
    if name not in DESTINATIONS:
        raise ValueError(f"--to {name}: give {' or '.join(DESTINATIONS)}, one at a time")
    if not (out / "metrics.jsonl").is_file():
        raise ValueError(f"{out} has no metrics.jsonl: give the --out of a run")
    dashboards.check("--to", name)
    folder = out / "tensorboard"
    if name == "tensorboard" and folder.exists():
        raise ValueError(f"{folder} exists: remove it to send the run again")


def send(out: Path, name: str) -> None:
    destination = DESTINATIONS[name](out)
    for line in valid_lines(out / "metrics.jsonl"):
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
        sys.exit(f"tools.follow: {args.to} failed: {dashboards.describe(error)}")


if __name__ == "__main__":
    main()
