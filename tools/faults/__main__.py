"""The tables and the command line of python -m tools.faults."""
import sys

if not __package__:
    sys.path.insert(0, f"{sys.path[0]}/..")
import tools        # first: python tools/faults ends in its line

import itertools
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import torch

import tools.faults
from base import commandline
from tools import markdown
from tools.faults.policies import POLICIES
from tools.faults.runs import DTYPES, FAULTS, MODELS, Outcome, disturbed, healthy, make_texts

SEEDS = (7, 8)
HEALTHY_RUNS = 100      # from seed 100 on


def outcomes(folder: Path, faults) -> dict[tuple, list[Outcome]]:
    """{(fault, policy): one outcome for each model and seed}. `folder` has the texts."""
    found = {(fault, policy): [] for fault in faults for policy in POLICIES}
    dtypes = sorted({DTYPES[fault] for fault in faults})
    for model, seed, dtype in itertools.product(MODELS, SEEDS, dtypes):
        print(f"{model}, seed {seed}, {dtype}", file=sys.stderr)
        run, half_way = healthy(folder, model, seed, dtype)
        for fault, policy in found:
            if DTYPES[fault] == dtype:
                found[fault, policy].append(disturbed(run, fault, half_way[policy]))
    return found


def false_alarms(folder: Path) -> Counter:
    """{policy: in how many of HEALTHY_RUNS it would have acted}, each with its own seed."""
    found = Counter()
    for number, model in zip(range(HEALTHY_RUNS), itertools.cycle(MODELS)):
        run, _ = healthy(folder, model, 100 + number)
        found.update(run.policy.alarms)
        found["ours"] += run.alarm
    return found


def table_of_faults(found: dict) -> list[str]:
    """A row for each fault: the medians of the rise and of the steps lost; runs that ended."""
    rows = []
    for fault in dict.fromkeys(fault for fault, _ in found):
        cells = []
        for policy in POLICIES:
            rises, lost, ended = zip(*found[fault, policy])
            cells.append(f"{statistics.median(rises):+,.1%}; {statistics.median(lost):g}")
            if any(ended):
                cells[-1] += f"; {sum(ended)} of {len(ended)} ended"
        rows.append([fault, *cells])
    return markdown.table(["rise of the loss; steps lost", *POLICIES], rows)


def table_of_policies(found: dict, alarms: Counter) -> list[str]:
    """A row for each policy, over all faults."""
    rows = []
    for policy in POLICIES:
        groups = [group for (_, name), group in found.items() if name == policy]
        rises, lost, ended = zip(*itertools.chain(*groups))
        near = sum(rise <= 0.05 for rise in rises)
        rows.append([policy, f"{near} of {len(rises)}", f"{max(rises):+,.1%}",
                     f"{statistics.mean(lost):.0f}", sum(ended), alarms[policy]])
    return markdown.table(["policy", "rise of at most 5%", "largest rise", "steps lost, mean",
                           "ended early", f"false alarms in {HEALTHY_RUNS} runs"], rows)


def main() -> None:
    parser = commandline.Parser("tools.faults", "python -m tools.faults [FAULT ...]",
                                tools.faults.__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS)
                        + " (default: all of them, and the false alarms)")
    faults = parser.parse_args().faults
    for name in faults:
        if name not in FAULTS:
            parser.error(f"there is no fault {name!r}: there are {', '.join(FAULTS)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_texts(Path(folder))
        found = outcomes(Path(folder), faults or FAULTS)
        print(*table_of_faults(found), sep="\n")
        if not faults:
            print("", *table_of_policies(found, false_alarms(Path(folder))), sep="\n")


if __name__ == "__main__":
    main()
