"""The command line of python -m tools.ladder."""
import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from base import options
from base.commandline import Parser, add_flags, flag, flag_name, parse_given
from base.errors import errors_in_one_line, named
from data import TokenDataset
from model import ceil_div
from models import SIZES
from runtime.checks import default_lr
from runtime.layout_checks import check_heads
from tools.ladder import answer, budget, picture
from tools.ladder.rungs import (DOUBLINGS, MULTIPLE, Rung, default_widths, make_rung,
                                start_of_branch)
from tools.plan.gpus import gpu_name
from tools.scaling_law import FEWEST_SIZES
from tools.train_many import Stopped, Trainer, check_jobs

HELP = """Predict the loss of a model before it is trained: train smaller ones and fit a law.

The flags of the model, the batch and the layout are those of the target. The same command repeats
no run that has ended, and continues those that were stopped. Once the target has been trained by
the command that is printed, it says how far off the prediction was."""
MOST_EPOCHS = 4         # up to these, repeated text is almost as good as new (Muennighoff 2023)
EVAL_TOKENS = 65_536    # by default: a validation loss of fewer is noise
# Flags that would make rungs and target differ in more than width, or that the ladder sets.
REFUSED = ("lr_schedule", "decay_ratio", "epochs", "batch_ramp", "resume", "init_from", "eval_only",
           "save_every", "keep", "eval_every", "skip_steps", "plain")


# Of the model's shape, what all rungs have in common with the target. (make_rung adds the rest.)
SHAPE_OF_ALL = ("n_layer", "seq_len", "activation", "rope_theta", "head_dim", *options.OF_MIXTURE)


def widths(text: str) -> list[int]:
    """"32,48" -> [32, 48]. Raises argparse.ArgumentTypeError."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text}: give widths, as 32,48,64")
    return sorted(set(map(int, words)))


@dataclass(frozen=True)
class LadderConfig(options.Config):
    """train.py's flags of the target, and the ladder's own."""
    out: str = flag("out/ladder", "directory of the ladder: the runs, ladder.json, ladder.svg",
                    form="DIR", group="paths")
    rungs: widths = flag(None, "widths of the smaller models (default: 1/6, 1/4, 1/3 and 1/2 of "
                         "the target's)", form="W,W,W", group="ladder")
    jobs: int = flag(1, "rungs that train at a time; with several each has one thread", low=1)
    launch: str = flag(None, "what starts train.py (default: this python), such as 'torchrun "
                       "--standalone --nproc_per_node=8'", form="COMMAND")
    budget: float = flag(None, "FLOPs of which the best size and tokens are told (default: the "
                         "target's)", low=1)
    gpu: gpu_name = flag("h100", "GPU in whose days the budget is told, as of tools.plan",
                         form="NAME")
    price: float = flag(None, "price of an hour of that GPU", low=0)


OWN = ("rungs", "jobs", "launch", "budget", "gpu", "price")


def read_flags(arguments: list[str]) -> tuple[LadderConfig, dict]:
    """The config, and train.py's flags for all runs. Raises ValueError."""
    parser = Parser("tools.ladder", "python -m tools.ladder [--rungs W,W,W] [--jobs N] [train.py's "
                    "flags of the target]", HELP)
    add_flags(parser, LadderConfig)
    given = parse_given(parser, arguments)
    refused = [flag_name(name) for name in REFUSED if name in given]
    if refused:
        raise ValueError(f"the rungs and the target cannot have {', '.join(refused)}: drop it")
    config = LadderConfig(**given)
    if config.eval_tokens is None:
        config = replace(config, eval_tokens=EVAL_TOKENS)
    by_rung = {"out", "lr", "steps", *options.SHAPE} - set(SHAPE_OF_ALL)
    of_all = {name: value for name, value in given.items() if name not in by_rung.union(OWN)}
    return config, of_all | dict(data=config.data)


def check(config: LadderConfig, rungs: list[Rung], target: Rung, data: TokenDataset) -> list[str]:
    """Raise ValueError about a ladder that cannot predict its target; return notes."""
    if len(rungs) < FEWEST_SIZES:
        raise ValueError(f"--rungs has {len(rungs)} widths: give {FEWEST_SIZES} or more")
    wide = [str(rung.width) for rung in rungs if rung.width >= target.width]
    if wide:
        raise ValueError(f"the target has width {target.width}, and the rungs {', '.join(wide)} "
                         f"are no smaller: give narrower --rungs, or a larger --n-embd")
    if config.steps % MULTIPLE:
        near = ceil_div(config.steps, MULTIPLE) * MULTIPLE
        raise ValueError(f"--steps {config.steps} cannot be branched at the saves of its trunk: "
                         f"give a multiple of {MULTIPLE}, such as {near}")
    first = start_of_branch(config.steps >> DOUBLINGS)
    if config.warmup_steps > first:
        raise ValueError(f"the first branch begins at step {first}, an eighth of --steps "
                         f"{config.steps} less its decay, and --warmup-steps "
                         f"{config.warmup_steps} end after it: give fewer, or more --steps")
    epochs = max(data.mixture.epochs(config.steps * config.batch_size).values())
    if epochs > MOST_EPOCHS:
        raise ValueError(f"--steps {config.steps} read {config.data} {epochs:.1f} times: the law "
                         f"is for text that is new, and holds up to about {MOST_EPOCHS} times: "
                         f"give fewer steps, a smaller --batch-size, or more text")
    if epochs > 1:
        return [f"note     the text is read {epochs:.1f} times: the law is for text that is new"]
    return []


def plan(arguments: list[str]) -> tuple[LadderConfig, list[Rung], Rung, list[str]]:
    """The config, the rungs, the target, and notes. Raises ValueError, OSError."""
    config, of_all = read_flags(arguments)
    given = {name: value for name, value in vars(config).items()
             if name in options.SHAPE and value is not None}
    base = SIZES[config.model]
    options.refuse_flags_of_others(given, base, f"--model {config.model}")
    shape = base | given
    check_heads(shape, config.tp)
    data = TokenDataset(config.data, "train", shape["seq_len"])
    TokenDataset(config.data, "val", shape["seq_len"])      # or a run would say that it is missing
    if config.lr is None:
        config = replace(config, lr=default_lr(config.model, shape))
    vocab_size = data.meta["vocab_size"]
    target = make_rung(shape["n_embd"], shape, vocab_size, config, of_all)
    widths_of_rungs = config.rungs or default_widths(shape["n_embd"])
    rungs = [make_rung(width, shape, vocab_size, config, of_all) for width in widths_of_rungs]
    notes = check(config, rungs, target, data)
    every = [job for rung in rungs for job in rung.jobs()]
    check_jobs([*every, target.job_of_target()], data)
    return config, rungs, target, notes


def write(found: dict, config: LadderConfig) -> list[str]:
    """ladder.json, whole or not at all, and ladder.svg; lines on them."""
    file = Path(config.out, "ladder.json")
    with named(file):
        aside = file.with_suffix(".tmp")
        aside.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(aside, file)
    lines = [f"wrote    {file}"]
    if find_spec("matplotlib") is None:
        return [*lines, "note     no picture: pip install matplotlib"]
    picture.draw(found, file.with_suffix(".svg"))
    return [*lines, f"wrote    {file.with_suffix('.svg')}"]


@errors_in_one_line("tools.ladder")
def main() -> None:
    config, rungs, target, notes = plan(sys.argv[1:])
    print("\n".join([f"rungs    {', '.join(str(rung.width) for rung in rungs)}; target "
                     f"{target.width}, {target.N / rungs[-1].N:.1f} times the largest rung's N",
                     *notes]), flush=True)
    launch = shlex.split(config.launch) if config.launch else [sys.executable]
    try:        # the longest first
        failures = Trainer(launch, config.jobs).train([rung.jobs() for rung in reversed(rungs)])
    except Stopped:
        print("tools.ladder: stopped: give the same command to continue", file=sys.stderr)
        sys.exit(130)
    ended = [rung for rung in rungs if rung.points()]
    if len(ended) < FEWEST_SIZES:
        print(f"tools.ladder: {len(ended)} rungs of the {FEWEST_SIZES} that a law takes have "
              f"ended; the others failed: see the lines above, and console.txt in their folders",
              file=sys.stderr)
        sys.exit(1)
    found = answer.find(rungs, target, config.batch_size * target.cfg.seq_len)
    lines = answer.report(found) + budget.report_budget(found, config.budget, config.gpu,
                                                        config.price)
    words = [*shlex.split(config.launch or "python"), "train.py",
             *target.job_of_target().words()]
    print("\n".join([*lines, f"train    {shlex.join(words)}", *write(found, config)]))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
