"""Send the metrics.jsonl of a run that has ended to TensorBoard or Weights & Biases.

    python -m tools.follow out --to tensorboard         # makes out/tensorboard
    python -m tools.follow out --to wandb               # makes a new run there

This is for a run that trained without `train.py --log`, or whose dashboard failed. It remembers
nothing: each call sends all events, and all rows but those that a resume or a rollback made void.
"""
import sys
from pathlib import Path

from base.commandline import Parser
from base.errors import errors_in_one_line
from runtime import dashboards
from tools.metrics import read_metrics

DESTINATIONS = {"tensorboard": dashboards.TensorBoard, "wandb": dashboards.WandB}


@errors_in_one_line("tools.follow")
def main() -> None:
    parser = Parser("tools.follow", "python -m tools.follow OUT --to NAME", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--to", required=True, metavar="NAME", help="tensorboard or wandb")
    args = parser.parse_args()
    if args.to not in DESTINATIONS:
        raise ValueError(f"--to {args.to}: give {' or '.join(DESTINATIONS)}, one at a time")
    if not (args.out / "metrics.jsonl").is_file():
        raise ValueError(f"{args.out} has no metrics.jsonl: give the --out of a run")
    dashboards.check("--to", args.to)
    folder = args.out / "tensorboard"
    if args.to == "tensorboard" and folder.exists():
        raise ValueError(f"{folder} exists: remove it to send the run again")
    try:
        destination = DESTINATIONS[args.to](args.out)
        for line in read_metrics(args.out).lines:
            destination.write(line)
        destination.close()
        print(f"{args.out} is sent to {args.to}")
    except Exception as error:          # of the network, the disk or the package
        sys.exit(f"tools.follow: {args.to} failed: {dashboards.describe(error)}")


if __name__ == "__main__":
    main()
