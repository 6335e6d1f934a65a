"""Train runs that differ in a few numbers, all of a grid, and compare them.

    python -m tools.sweep --lr 1e-3,2e-3,4e-3 --beta2 0.95,0.99 --jobs 2 --out out/sweep

A number of train.py with several values, separated by commas, is swept. All other flags are as they
are there. Each run is in a folder of --out that is named by its values.

A run that has ended is not repeated, and one that was stopped continues: give the same command
again, or one with more values. One that fails or diverges does not end the others.

It ends with the table of tools.compare, the best run first, and with matplotlib draws sweep.svg,
the best validation loss over each number, with a line for each value of the others.
"""
import dataclasses
import itertools
import sys
from pathlib import Path

from base.commandline import Parser, add_flags, flag, flag_name, words_of
from base.errors import errors_in_one_line
from base.options import Config, parse_flags
from data import TokenDataset
from tools import compare
from tools.comparable_losses import evaluated
from tools.metrics import Run
from tools.svg_picture import COLORS, draw_if_possible, picture
from tools.train_many import Job, check_jobs, jobs_flag, launch_flag, train_all

NUMBERS = [f for f in dataclasses.fields(Config) if f.type in (int, float)]


def texts(text: str) -> list[str]:
    """Those between commas, each once."""
    return list(dict.fromkeys(filter(None, text.split(",")))) or [text]


def several(f: dataclasses.Field) -> tuple:
    """The flag of a number, for make_dataclass, with `texts` as its value."""
    form = f.metadata["form"] or {int: "N", float: "X"}[f.type]
    metadata = {**f.metadata, "low": None, "choices": None, "form": form}
    return f.name, texts, dataclasses.field(default=f.default, metadata=metadata)


SweepFlags = dataclasses.make_dataclass("SweepFlags", [
    *map(several, NUMBERS), ("jobs", int, jobs_flag("sweep")), ("launch", str, launch_flag()),
    ("out", str, flag("out/sweep", "directory of the runs", form="DIR"))],
    bases=(Config,), frozen=True)


def read_command(arguments: list[str]) -> tuple[SweepFlags, dict, list[Job]]:
    """The flags, {field: texts} of what is swept, and the jobs. Raises ValueError."""
    parser = Parser("tools.sweep", "python -m tools.sweep --FLAG A,B,C ... [train.py's flags]",
                    __doc__)
    add_flags(parser, SweepFlags)
    given = parser.parse(arguments)
    flags = SweepFlags(**given)
    wrong = [flag_name(name) for name in ("resume", "eval_only") if name in given]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} is for one run: drop it")
    numbers = {f.name: given.pop(f.name) for f in NUMBERS if f.name in given}   # in --help's order
    swept = {name: values for name, values in numbers.items() if len(values) > 1}
    if not swept:
        raise ValueError("nothing to sweep: give a number of train.py several values, such as "
                         "--lr 1e-3,2e-3")
    of_all = {name: value for name, value in given.items() if name not in ("out", "jobs", "launch")}
    jobs = []
    for values in itertools.product(*numbers.values()):
        point = dict(zip(numbers, values))
        name = "_".join(f"{name.replace('_', '-')}{point[name]}" for name in swept)
        # train.py's parser checks the numbers.
        jobs.append(Job(Path(flags.out, name), of_all | parse_flags(words_of(point))))
    return flags, swept, jobs


def best_losses(runs: list[Run], name: str, swept: dict) -> list[tuple[str, list, list]]:
    """The lines of a panel: (values of the other numbers in words, values of this one in order,
    best validation losses there)."""
    lines = {}
    for run in runs:
        found = evaluated(run)
        if found is not None:
            others = ", ".join(f"{other.replace('_', '-')} {run.config[other]}" for other in swept
                               if other != name)
            lines.setdefault(others, []).append((run.config[name], found.best["val_loss"]))
    return [(words, *map(list, zip(*sorted(points)))) for words, points in sorted(lines.items())]


def draw(runs: list[Run], swept: dict, file: Path) -> None:
    """A panel for each number that is swept. Raises ValueError without matplotlib."""
    with picture(file, "Best validation loss of a sweep", 4) as figure:
        panels = figure.subplots(1, len(swept), sharey=True, squeeze=False)[0]
        for panel, name in zip(panels, swept):
            for place, (words, *line) in enumerate(best_losses(runs, name, swept)):
                panel.plot(*line, "o-", color=COLORS[place % len(COLORS)], label=words or None)
            panel.set(xlabel=flag_name(name), xscale="symlog" if "0" in swept[name] else "log")
            panel.grid(alpha=0.25)
            if len(swept) > 1:
                panel.legend(frameon=False, fontsize="small")
        panels[0].set_ylabel("best validation loss, nats per token")


@errors_in_one_line("tools.sweep")
def main() -> None:
    flags, swept, jobs = read_command(sys.argv[1:])
    check_jobs(jobs, TokenDataset(Config(**jobs[0].flags).data, "train", 1))
    print(f"sweep    {len(jobs)} runs", flush=True)
    failures = train_all("tools.sweep", [[job] for job in jobs], flags.launch, flags.jobs)
    runs = compare.read_runs([str(job.out) for job in jobs])
    print(compare.compare(runs))
    for failure in failures:
        print(f"failed   {failure}")
    print(draw_if_possible(draw, runs, swept, Path(flags.out, "sweep.svg")))
    sys.exit(1 if len(failures) == len(jobs) else 0)


if __name__ == "__main__":
    main()
