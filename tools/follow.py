"""Send the metrics.jsonl of a run that has ended to TensorBoard or Weights & Biases.

    python -m tools.follow out --to tensorboard         # makes out/tensorboard
    python -m tools.follow out --to wandb               # makes a new run there

This is for a run that trained without `train.py --log`, or whose dashboard failed. It remembers
nothing: each call sends all events, and all rows but those that a resume or a rollback made void.
"""
import sys
from pathlib import Path

from base.commandline import Parser
from base.errors import errors_in_one_line, first_line
from runtime.dashboards import KINDS
from tools.metrics import read_metrics


def check(out: Path, name: str) -> None:
    """Raise a ValueError if the run cannot be sent."""
    if name not in KINDS:
        raise ValueError(f"--to {name}: give {' or '.join(KINDS)}, one at a time")
    if not (out / "metrics.jsonl").is_file():
        raise ValueError(f"{out} has no metrics.jsonl: give the --out of a run")
    folder = out / "tensorboard"
    if name == "tensorboard" and folder.exists():
        raise ValueError(f"{folder} exists: remove it to send the run again")


def send(out: Path, name: str) -> None:
    dashboard = KINDS[name]()
    dashboard.open(out, run_id=None, first_step=1)
    for line in read_metrics(out).lines:
        dashboard.write(line)
    dashboard.close()


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
        sys.exit(f"tools.follow: {args.to} failed: {first_line(error)}")


if __name__ == "__main__":
    main()
