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


@errors_in_one_line("tools.follow")
def main() -> None:
    parser = Parser("tools.follow", "python -m tools.follow OUT --to NAME", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the --out of a run of train.py")
    parser.add_argument("--to", required=True, choices=list(KINDS), help="one at a time")
    args = parser.parse_args()
    lines = read_metrics(args.out).lines
    folder = args.out / "tensorboard"
    if not lines:
        raise ValueError(f"{args.out} has no metrics.jsonl with a whole line: give the --out of a "
                         f"run")
    if args.to == "tensorboard" and folder.exists():
        raise ValueError(f"{folder} exists: remove it to send the run again")
    dashboard = KINDS[args.to]()
    try:
        dashboard.open(args.out, run_id=None, first_step=1)
        for line in lines:
            dashboard.write(line)
        dashboard.close()
        print(f"{args.out} is sent to {args.to}")
    except Exception as error:          # of the network, the disk or the package
        sys.exit(f"tools.follow: {args.to} failed: {first_line(error)}")


if __name__ == "__main__":
    main()
