"""The rungs of a ladder: their models, and the runs that train them."""
import math
from dataclasses import dataclass
from pathlib import Path

from base.checkpoint_files import step_file
from base.flops import active_parameters, looked_up
from model import GPTConfig
from models import make_config
from tools.metrics import read_metrics
from tools.train_many import Job, has_ended

DECAY = 0.2                 # of the steps of a branch
DOUBLINGS = 3               # of the steps, from the first branch to the trunk's end
MULTIPLE = 5 << DOUBLINGS   # of the steps: every branch then begins at a step that is saved
PARTS_OF_WIDTH = (1 / 6, 1 / 4, 1 / 3, 1 / 2)       # the default: N is 1/36 to 1/4 of the target's


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
        own = dict(steps=end, save_every=0)
        if end < self.steps:
            own["resume"] = step_file(self.out(self.steps), start_of_branch(end))
        return Job(self.out(end), self.flags | own)

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
            if has_ended(run, end):
                rolled_back = sum(event["event"] == "rollback" for event in run.events)
                found.append(dict(width=self.width, N=self.N, D=run.last["tokens"], steps=end,
                                  loss=run.last["val_loss"], rollbacks=rolled_back))
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
    own = shape_of_width(shape, width) if width != shape["n_embd"] else shape
    flags = given | {name: own[name] for name in ("n_embd", "n_head", "n_kv_head", "hidden")
                     if own.get(name)}
    lr = config.lr * math.sqrt(shape["n_embd"] / width)
    flags |= dict(lr=float(f"{lr:.4g}"), lr_schedule="wsd", decay_ratio=DECAY, eval_every=0,
                  eval_tokens=config.eval_tokens)
    return Rung(make_config(vocab_size=vocab_size, **own), flags, config.steps, Path(config.out))


def default_widths(width: int) -> list[int]:
    """Multiples of 8, or of 2 for a small target."""
    step = 8 if width >= 64 else 2
    return sorted({max(step, round(width * part / step) * step) for part in PARTS_OF_WIDTH})
