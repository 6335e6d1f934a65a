"""Predict the loss of a model before it is trained: train smaller ones, the rungs, and fit a law.

    python -m tools.ladder --rungs 16,24,32 --n-embd 64 --n-head 4 --steps 800 --batch-size 4 \\
        --lr 3e-3 --warmup-steps 40 --jobs 2 --out out/ladder

takes train.py's flags of the target, here of width 64. It trains the same model in smaller widths,
each on S/8, S/4, S/2 and all of its S steps, fits

    L(N, D) = E + A N^-a + B D^-b           (tools/scaling_law.py)

N: parameters that multiply (none that are looked up; of a mixture those that a token uses), D:
tokens, L: validation loss in nats. It prints what the target will reach, how well the ladder
without its largest rung would have predicted that rung, and the command that trains the target. It
writes ladder.json and, with matplotlib, ladder.svg to --out. --budget FLOPS: the best for so many.

Runs that have ended are not repeated, and one that was stopped continues: give the same command
again, also with more --rungs. Once the target has been trained by the printed command, the same
command says how far off the prediction was.

    steps      S/8      S/4            S/2                            S
    trunk       |        |              |                        _____|     the rate is constant,
    branches   \\       \\             \\                            \\    then falls to a tenth

A branch decays from a checkpoint of the trunk (--lr-schedule wsd; Haegele et al. 2024): four
numbers of tokens cost 1.2 times the largest. All rungs read the same batches, and the target reads
as many tokens, so that from the rungs to the target only N grows. The rungs have the target's
depth, and heads of about its size. The learning rate of a rung is the target's times
sqrt(width of the target / its width).
"""
import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from base import options
from base.checkpoint_files import step_file
from base.commandline import Parser, add_flags, flag, flag_name
from base.errors import errors_in_one_line, errors_with_path
from base.flops import active_parameters, looked_up
from data import TokenDataset
from model import GPTConfig, ceil_div
from models import SIZES, make_config
from tools.metrics import read_metrics
from tools.scaling_law import (FEWEST_SIZES, Law, Points, back_test, check_scipy, on_law,
                               predict)
from tools.svg_picture import COLORS, draw_if_possible, few_numbers, picture, short
from tools.train_many import Job, check_jobs, has_ended, jobs_flag, launch_flag, train_all

HELP = """Predict the loss of a model before it is trained: train smaller ones and fit a law.

The flags of the model, the batch and the layout are those of the target. The same command repeats
no run that has ended, and continues those that were stopped."""
DECAY = 0.2                 # of the steps of a branch
DOUBLINGS = 3               # of the steps, from the first branch to the trunk's end
MULTIPLE = 5 << DOUBLINGS   # of the steps: every branch then begins at a step that is saved
PARTS_OF_WIDTH = (1 / 6, 1 / 4, 1 / 3, 1 / 2)       # the default: N is 1/36 to 1/4 of the target's
MOST_EPOCHS = 4         # up to these, repeated text is almost as good as new (Muennighoff 2023)
EVAL_TOKENS = 65_536    # by default: a validation loss of fewer is noise
# Flags that would make rungs and target differ in more than width, or that the ladder sets.
REFUSED = ("lr_schedule", "decay_ratio", "epochs", "batch_ramp", "resume", "init_from", "eval_only",
           "save_every", "keep", "eval_every", "skip_steps", "plain")
OF_WIDTH = ("n_embd", "n_head", "n_kv_head", "hidden")      # of the shape, in which rungs differ


# ---- The rungs -------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rung:
    """A model of the ladder, or its target, and its runs in `folder`: a trunk of `steps`, and a
    branch for each half of them."""
    cfg: GPTConfig
    flags: dict                 # of train.py, for all of its runs
    steps: int
    folder: Path

    @property
    def width(self) -> int:
        return self.cfg.n_embd

    @property
    def N(self) -> int:
        """The parameters that multiply."""
        return active_parameters(self.cfg) - looked_up(self.cfg)

    def ends(self) -> list[int]:
        """The steps at which a branch, or at last the trunk, ends."""
        return [self.steps >> halvings for halvings in range(DOUBLINGS, -1, -1)]

    def out(self, end: int) -> Path:
        return self.folder / f"w{self.width}" / f"steps{end}"

    def job(self, end: int) -> Job:
        """The run that ends there."""
        flags = self.flags | dict(steps=end, save_every=0)
        if end < self.steps:
            flags["resume"] = step_file(self.out(self.steps), start_of_branch(end),
                                        self.flags.get("checkpoint_format", "file"))
        return Job(self.out(end), flags)

    def jobs(self) -> list[Job]:
        """The trunk, then its branches. The trunk keeps what they begin from."""
        trunk, *branches = [self.job(end) for end in reversed(self.ends())]
        saves = dict(save_every=start_of_branch(self.ends()[0]), keep=99)
        return [trunk._replace(flags=trunk.flags | saves), *branches]

    def job_of_target(self) -> Job:
        """The run of the target: the trunk, with train.py's own saves."""
        return Job(self.out(self.steps), self.flags | dict(steps=self.steps))

    def points(self) -> list[dict]:
        """What its runs have measured so far."""
        found = []
        for end in self.ends():
            run = read_metrics(self.out(end))
            if has_ended(run, dict(steps=end)):
                rolled_back = sum(event["event"] == "rollback" for event in run.events)
                last = run.rows[-1]
                found.append(dict(width=self.width, N=self.N, D=last["tokens"], steps=end,
                                  loss=last["val_loss"], rollbacks=rolled_back))
        return found


def start_of_branch(end: int) -> int:
    """The step of the trunk from which the branch to this end decays."""
    return end - round(DECAY * end)


def shape_of_width(shape: dict, width: int) -> dict:
    """The target's shape in another width: as deep, heads of about the same size, as many of them
    for each head of keys. Raises ValueError if no number of heads fits."""
    wanted = shape.get("head_dim") or shape["n_embd"] // shape["n_head"]
    group = shape["n_head"] // (shape.get("n_kv_head") or shape["n_head"])
    scaled = shape | dict(n_embd=width)
    if shape.get("hidden"):
        scaled["hidden"] = max(8, round(shape["hidden"] * width / shape["n_embd"] / 8) * 8)
    fitting = []
    for heads in range(group, width + 1, group):
        one = scaled | dict(n_head=heads)
        if shape.get("n_kv_head"):
            one["n_kv_head"] = heads // group
        if width % heads == 0 or shape.get("head_dim"):
            try:
                make_config(vocab_size=1, **one)
            except ValueError:          # such as an odd head, whose channels rotate in pairs
                continue
            fitting.append(one)
    if not fitting:
        raise ValueError(f"width {width} cannot be cut into heads as the target's: give --rungs "
                         f"in multiples of {group * wanted}")
    return min(fitting, key=lambda one: abs(math.log(width / one["n_head"] / wanted)))


def make_rung(width: int, shape: dict, vocab_size: int, config, given: dict) -> Rung:
    """The target, or a rung of this width; `given` are train.py's flags for all of them."""
    rung = shape_of_width(shape, width) if width != shape["n_embd"] else shape
    flags = given | {name: rung[name] for name in OF_WIDTH if rung.get(name)}
    lr = config.lr * math.sqrt(shape["n_embd"] / width)
    flags |= dict(lr=float(f"{lr:.4g}"), lr_schedule="wsd", decay_ratio=DECAY, eval_every=0,
                  eval_tokens=config.eval_tokens)
    return Rung(make_config(vocab_size=vocab_size, **rung), flags, config.steps, Path(config.out))


# ---- The command -----------------------------------------------------------------------------

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
    jobs: int = jobs_flag()
    launch: str = launch_flag()
    budget: float = flag(None, "FLOPs of which the best size and tokens are told (default: the "
                         "target's)", low=1)


OWN = ("rungs", "jobs", "launch", "budget")


def read_flags(arguments: list[str]) -> tuple[LadderConfig, dict]:
    """The config, and train.py's flags for all runs. Raises ValueError."""
    parser = Parser("tools.ladder", "python -m tools.ladder [--rungs W,W,W] [--jobs N] [train.py's "
                    "flags of the target]", HELP)
    add_flags(parser, LadderConfig)
    given = parser.parse(arguments)
    refused = [flag_name(name) for name in REFUSED if name in given]
    if refused:
        raise ValueError(f"the rungs and the target cannot have {', '.join(refused)}: drop it")
    config = LadderConfig(**given)
    if config.eval_tokens is None:
        config = replace(config, eval_tokens=EVAL_TOKENS)
    of_all = {name: value for name, value in given.items()
              if name not in ("out", "lr", "steps", *OF_WIDTH, *OWN)}
    return config, of_all | dict(data=config.data)


def check(config: LadderConfig, rungs: list[Rung], target: Rung, data: TokenDataset) -> None:
    """Raise ValueError about a ladder that cannot predict its target."""
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


def plan(arguments: list[str]) -> tuple[LadderConfig, list[Rung], Rung]:
    """The config, the rungs, the target. Raises ValueError, OSError."""
    config, of_all = read_flags(arguments)
    check_scipy()
    given = {name: value for name, value in vars(config).items()
             if name in options.SHAPE and value is not None}
    base = SIZES[config.model]
    options.refuse_flags_of_others(given, base, f"--model {config.model}")
    shape = base | given
    data = TokenDataset(config.data, "train", shape["seq_len"])
    TokenDataset(config.data, "val", shape["seq_len"])      # or a run would say that it is missing
    widest = shape["n_embd"]
    step = 8 if widest >= 64 else 2         # of the default widths
    chosen = config.rungs or sorted({max(step, round(widest * part / step) * step)
                                     for part in PARTS_OF_WIDTH})
    target, *rungs = [make_rung(width, shape, data.meta["vocab_size"], config, of_all)
                      for width in (widest, *chosen)]
    check(config, rungs, target, data)
    every = [job for rung in rungs for job in rung.jobs()]
    check_jobs([*every, target.job_of_target()], data)
    return config, rungs, target


# ---- The answer ------------------------------------------------------------------------------

def find(rungs: list[Rung], target: Rung, tokens_per_step: int) -> dict:
    """The content of ladder.json. Raises ValueError if fewer than three rungs have ended."""
    rows = [row for rung in rungs for row in rung.points()]
    columns = (np.array([row[name] for row in rows], float) for name in Points._fields)
    points = on_law(Points(*columns))
    D = target.steps * tokens_per_step
    found = predict(points, target.N, D)
    law = found.law
    measured = [row["loss"] for row in target.points() if row["steps"] == target.steps]
    return dict(
        prediction=dict(loss=found.loss, low=found.low, high=found.high),
        measured=measured[0] if measured else None, law=asdict(law),
        untied=dict(law=asdict(found.untied), loss=float(found.untied(target.N, D))),
        target=dict(width=target.width, N=target.N, D=D), points=rows,
        points_used=len(points.N), back_test=back_test(points)._asdict(),
        largest_error=float(np.abs(law(points.N, points.D) / points.loss - 1).max()))


def report(found: dict, flops: float | None) -> list[str]:
    """The lines of the answer; `flops` of the budget, or None for the target's."""
    law = Law(**found["law"])
    target, test = found["target"], found["back_test"]
    prediction, rows = found["prediction"], found["points"]
    times = target["N"] / max(row["N"] for row in rows)
    lines = ["   width           N            D  tokens/N     loss  the law's      off"]
    for row in rows:
        expected = float(law(row["N"], row["D"]))
        note = f"  {row['rollbacks']} rollback" if row["rollbacks"] else ""
        lines.append(f"{row['width']:8} {row['N']:11,} {row['D']:12,} {row['D'] / row['N']:9.1f} "
                     f"{row['loss']:8.4f} {expected:10.4f} {expected / row['loss'] - 1:+8.2%}"
                     f"{note}")
    lines += [
        f"law      {law}, with a = b; at most {found['largest_error']:.2%} off; from "
        f"{found['points_used']} of {len(rows)} points",
        f"untied   {Law(**found['untied']['law'])}: {found['untied']['loss']:.4f} for the target",
        f"test     without its largest rung the ladder predicts {test['predicted']:.4f} for it, "
        f"{test['times']:.1f} times larger than the next: measured {test['measured']:.4f}, "
        f"{test['predicted'] / test['measured'] - 1:+.2%} off",
        f"target   width {target['width']}, N {target['N']:,}, {target['D']:,} tokens: predicted "
        f"{prediction['loss']:.4f} nats a token ({prediction['low']:.4f} to "
        f"{prediction['high']:.4f}: 80% by the noise of the rungs, each left out in turn; whether "
        f"the law holds so far, only the test says)"]
    if times > 8:
        lines.append(f"note     the target is {times:.0f} times larger than the largest rung: 4 to "
                     f"8 times are tried; add a wider one to --rungs")
    if found["measured"] is not None:
        lines.append(f"measured {found['measured']:.4f}: the prediction is "
                     f"{prediction['loss'] / found['measured'] - 1:+.2%} off")
    flops = flops or 6 * target["N"] * target["D"]
    N, D = law.optimal(flops)
    if min(row["N"] for row in rows) / 10 < N < 10 * target["N"]:       # not too far for the law
        lines.append(f"budget   {flops:.3g} FLOPs: best by this law with N {N:.3g} and {D:.3g} "
                     f"tokens: {float(law(N, D)):.4f}")
    return lines


def draw(found: dict, file: Path) -> None:
    """Loss over tokens: each size has the law's curve, the rungs their points, the target what was
    predicted and measured. Raises ValueError without matplotlib."""
    law = Law(**found["law"])
    target, prediction, rows = found["target"], found["prediction"], found["points"]
    tokens = np.geomspace(min(row["D"] for row in rows), target["D"], 40)
    with picture(file, "A ladder, and what it predicts", 4.5) as figure:
        panel = figure.subplots()
        sizes = sorted({(row["N"], row["width"]) for row in [*rows, target]}, reverse=True)
        for (N, width), color in zip(sizes, 9 * COLORS):
            points = [row for row in rows if row["N"] == N]
            panel.plot(tokens, law(N, tokens), color=color, label=f"width {width}, N {short(N)}")
            panel.plot([row["D"] for row in points], [row["loss"] for row in points], "o",
                       color=color)
        panel.errorbar(target["D"], prediction["loss"], fmt="s", color=COLORS[0],
                       yerr=prediction["high"] - prediction["loss"],
                       label=f"predicted {prediction['loss']:.3f}")
        if found["measured"] is not None:
            panel.plot(target["D"], found["measured"], "*", color=COLORS[0], markersize=12,
                       label=f"measured {found['measured']:.3f}")
        panel.set(xscale="log", yscale="log", xlabel="tokens read",
                  ylabel="validation loss, nats per token")
        few_numbers(panel.xaxis, short)
        few_numbers(panel.yaxis)
        panel.grid(alpha=0.25)
        figure.legend(loc="outside lower left", frameon=False, ncols=2)


@errors_in_one_line("tools.ladder")
def main() -> None:
    config, rungs, target = plan(sys.argv[1:])
    print(f"rungs    {', '.join(str(rung.width) for rung in rungs)}; target {target.width}, "
          f"{target.N / rungs[-1].N:.1f} times the largest rung's N", flush=True)
    chains = [rung.jobs() for rung in reversed(rungs)]          # the longest first
    failures = train_all("tools.ladder", chains, config.launch, config.jobs)
    ended = [rung for rung in rungs if rung.points()]
    if len(ended) < FEWEST_SIZES:
        print(f"tools.ladder: {len(ended)} rungs of the {FEWEST_SIZES} that a law takes have "
              f"ended; the others failed: see the lines above, and console.txt in their folders",
              file=sys.stderr)
        sys.exit(1)
    found = find(rungs, target, config.batch_size * target.cfg.seq_len)
    words = [*shlex.split(config.launch or "python"), "train.py",
             *target.job_of_target().words()]
    print("\n".join([*report(found, config.budget), f"train    {shlex.join(words)}"]))
    file = Path(config.out, "ladder.json")
    with errors_with_path(file):
        file.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote    {file}\n{draw_if_possible(draw, found, file.with_suffix('.svg'))}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
