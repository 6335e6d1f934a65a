"""The flags of train.py: their defaults, how they are read, and what a checkpoint restores.
`Config` is the list; --help is made of it."""
import dataclasses
import re

from amp import PRECISIONS
from base.commandline import Flags, Parser, add_flags, flag, flag_name, groups_of
from base.errors import refuse
from models import PEAK_LR, SIZES, make_config


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Every flag with its default; the field n_layer is the flag --n-layer. The default of `lr` is
    the published one of the model."""
    data: str = flag("data/python", "directory of token shards, or a mixture: A=0.7,B=0.3",
                     group="paths", form="DIR")
    out: str = flag("out", "directory of the run: checkpoints and metrics.jsonl", form="DIR")
    log: str = flag(None, "also log to tensorboard, wandb, or tensorboard,wandb", form="NAMES",
                    choices=["tensorboard", "wandb", "tensorboard,wandb", "wandb,tensorboard"])
    model: str = flag("nano", "named size: " + ", ".join(SIZES), choices=list(SIZES), group="model",
                      form="NAME")
    n_layer: int = flag(None, "blocks; a flag of the model overrides --model", low=1)
    n_head: int = flag(None, "attention heads", low=1)
    n_embd: int = flag(None, "channels", low=1)
    seq_len: int = flag(None, "context length, in tokens", low=1)
    activation: str = flag(None, "activation of the MLP; a GPT has gelu or relu",
                           choices=["gelu", "relu", "silu", "gelu_erf"])
    dropout: float = flag(0.0, "probability on embeddings, attention, residuals", low=0, below=1)
    n_kv_head: int = flag(None, "heads of keys and values", low=1, group="models but GPTs")
    head_dim: int = flag(None, "channels of a head", low=1)
    hidden: int = flag(None, "channels in the MLP", low=1)
    rope_theta: float = flag(None, "base of the rotary positions", low=1)
    n_expert: int = flag(None, "experts of a block", low=1, group="mixtures of experts")
    n_active: int = flag(None, "experts that a token uses", low=1)
    shared_hidden: int = flag(None, "hidden channels of one more expert, which computes every "
                              "token; 0: none", low=0)
    balance_loss: float = flag(None, "factor of the balancing loss of each sequence", low=0)
    z_loss: float = flag(None, "factor of the squared logarithm of the router's sum", low=0)
    balance_bias: float = flag(None, "speed of the router's bias, which balances in place of "
                               "--balance-loss; 0: no bias", low=0)
    batch_size: int = flag(16, "global batch size: sequences per step", low=1, group="optimization")
    batch_ramp: str = flag(None, "ramp the batch from START to --batch-size in INCREMENTs over "
                           "SEQUENCES; none: no ramp", form="START:INCREMENT:SEQUENCES")
    steps: int = flag(800, "steps of the whole run", low=1)
    epochs: int = flag(None, "train for N epochs, instead of --steps", low=1)
    lr: float = flag(None, "peak learning rate (default: the published one of --model, 4e-3 for "
                     "nano)", low=0)
    min_lr_ratio: float = flag(0.1, "final learning rate / peak; 1: constant", low=0)
    warmup_steps: int = flag(50, "steps of linear warm-up", low=0)
    lr_schedule: str = flag("cosine", "decay of the learning rate; wsd: linear, at the end",
                            choices=["cosine", "linear", "wsd"])
    decay_ratio: float = flag(0.2, "wsd: the fraction of the steps that decay, at the end", low=0,
                              below=1)
    weight_decay: float = flag(0.1, "AdamW weight decay, on matrices only", low=0)
    beta1: float = flag(0.9, "AdamW beta1: decay rate of the mean of gradients", low=0, below=1)
    beta2: float = flag(0.95, "AdamW beta2: the same of their squares", low=0, below=1)
    clip: float = flag(1.0, "maximum global gradient norm; 0: no clipping", low=0)
    seed: int = flag(1337, "random seed of initial weights, data order and dropout", low=0)
    plain: bool = flag(False, "train by the plain program, in one process: the program to read",
                       group="layout")
    tp: int = flag(1, "tensor-parallel ranks", low=1)
    pp: int = flag(1, "pipeline stages", low=1)
    cp: int = flag(1, "context-parallel ranks: each has a part of every sequence", low=1)
    ep: int = flag(1, "replicas that divide a mixture's experts among them", low=1)
    pp_schedule: str = flag("gpipe", "order of the microbatches in the pipeline",
                            choices=["gpipe", "1f1b", "interleaved"])
    pp_chunks: int = flag(1, "interleaved: parts of the model on each stage", low=1)
    device: str = flag("auto", "auto: cuda, or mps for one process, where available",
                       choices=["auto", "cpu", "cuda", "mps"])
    compile: bool = flag(False, "torch.compile the blocks; communication and dropout run eagerly")
    timeout: int = flag(600, "seconds a step waits for another rank (on GPUs for all of it)", low=1)
    micro_batch: int = flag(None, "sequences per microbatch (default: the largest, up to 4, or 16 "
                            "on CUDA without --pp, that gives a multiple of pp microbatches)",
                            low=1, group="memory")
    zero: int = flag(0, "ZeRO stage: shard optimizer state (1), also gradients (2), also "
                     "parameters (3)", choices=[0, 1, 2, 3])
    recompute: bool = flag(False, "recompute the activations of a block in backward")
    sequence_parallel: bool = flag(False, "shard activations along the sequence outside the "
                                   "tensor-parallel layers")
    offload: bool = flag(False, "keep the optimizer state in host memory and run AdamW on the CPU")
    dtype: str = flag("fp32", "type of parameters and activations",
                      choices=list(PRECISIONS), group="precision")
    exact: bool = flag(False, "the same bits in every layout, with the same --micro-batch (chosen "
                       "as for 8 replicas on CPUs); slower, and on a CPU with one thread")
    save_every: int = flag(200, "steps between checkpoints; 0: only the last", low=0,
                           group="checkpoints, evaluation, logging")
    keep: int = flag(3, "checkpoints kept; the newest healthy one stays, too", low=1)
    checkpoint_format: str = flag("file", "file: rank 0 writes one; folder: each rank writes its "
                                  "own part, in the format of torch.distributed.checkpoint",
                                  choices=["file", "folder"])
    resume: str = flag("auto", "auto: from the newest whole checkpoint of --out; never: --out must "
                       "be new; FILE: branch from it into a new --out", form="{auto,never,FILE}")
    init_from: str = flag(None, "start a new run from the weights of this checkpoint", form="FILE")
    check_every: int = flag(100, "steps between comparisons of the bits that replicas share, also "
                            "made before each save; 0: never", low=0)
    eval_every: int = flag(200, "steps between evaluations; 0: only the last", low=0)
    eval_tokens: int = flag(None, "validation tokens per evaluation and source (default: 128 "
                            "sequences; with --eval-only all, whatever the run's value)", low=1)
    eval_only: bool = flag(False, "evaluate the checkpoint, then exit")
    log_every: int = flag(None, "steps between lines on the console (default: about 50 lines in "
                          "the run, at most one a second)", low=1)
    rollback: str = flag("on", "after a divergence go back, skip batches, reduce the learning rate",
                         choices=["on", "off"], group="stability")
    max_rollbacks: int = flag(5, "rollbacks of the whole run before it fails", low=0)
    skip_steps: str = flag(None, "skip the batches of steps A to B, inclusive; none: skip nothing",
                           form="A:B")

    def __post_init__(self):
        super().__post_init__()
        if self.lr is None:
            shape = SIZES[self.model] | model_shape(vars(self))
            object.__setattr__(self, "lr", default_lr(self.model, shape))       # it is frozen

    def is_nth_or_last(self, step: int, n: int) -> bool:
        """Whether `step` is a multiple of n (0: none is), or the last step."""
        return step == self.steps or (n > 0 and step % n == 0)


OF_LLAMA = ("n_kv_head", "head_dim", "hidden", "rope_theta")
OF_MIXTURE = ("n_expert", "n_active", "shared_hidden", "balance_loss", "z_loss", "balance_bias")
ROUTER_LOSSES = ("balance_loss", "z_loss")      # they change the training, not the model
SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "activation", *OF_LLAMA, *OF_MIXTURE)
# These flags apply to one launch and are not restored from a checkpoint; all others are. (--epochs
# is stored as the resulting --steps.)
PRECISION = [name for name, group in groups_of(Config).items() if group == "precision"]
LOCAL = {"resume", "init_from", "eval_only", "log_every", "epochs", *PRECISION, *(
    name for name, group in groups_of(Config).items() if group in ("paths", "layout", "memory"))}
RESTORED = [f.name for f in dataclasses.fields(Config) if f.name not in LOCAL]
OF_TRAINING = [*RESTORED, *PRECISION]           # a note of a resume names their changes
# Losses under different values of these flags are not compared (DivergenceMonitor.restored).
FLAGS_THAT_CHANGE_THE_LOSS = (
    "dropout", "batch_size", "batch_ramp", "steps", "lr", "min_lr_ratio", "warmup_steps",
    "lr_schedule", "decay_ratio", "weight_decay", "beta1", "beta2", "clip", "dtype")


def step_range(text: str) -> tuple[int, int]:
    """"A:B" -> (A, B). Raises ValueError."""
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ValueError(f"argument --skip-steps: {text} must be A:B, steps with 1 <= A <= B")
    return int(numbers[1]), int(numbers[2])


def parse_flags(arguments) -> dict:
    """The flags of train.py that were given. Raises ValueError."""
    parser = Parser("train.py", "python train.py [FLAG ...]", "Train a GPT.")
    add_flags(parser, Config)
    given = parser.parse(arguments)
    for name in ("batch_ramp", "skip_steps"):       # "none" unsets what a checkpoint has stored
        if given.get(name) == "none":
            given[name] = None
    config = Config(**given)
    if config.skip_steps is not None:
        step_range(config.skip_steps)
    refuse([
        (not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", config.batch_ramp or "1:1:1"),
         f"argument --batch-ramp: {config.batch_ramp} is not START:INCREMENT:SEQUENCES, all > 0"),
        ({"steps", "epochs"} <= set(given),
         "--steps cannot be combined with --epochs: both say when the run ends"),
        (config.init_from is not None and config.resume not in ("auto", "never"),
         "--init-from cannot be combined with --resume FILE: drop --resume to begin a new run from "
         "the weights, or --init-from to branch")])
    return given


def default_lr(model: str, shape: dict) -> float:
    """Published peak learning rate of the size with this depth and width (`model` first, but the
    weights of --init-from may have another shape); without one, that of `model`."""
    def size_of(shape):                         # in: of a GPT, a Llama, or a mixture
        return shape["n_layer"], shape["n_embd"], "n_kv_head" in shape, "n_expert" in shape
    alike = [name for name in (model, *SIZES) if size_of(SIZES[name]) == size_of(shape)]
    return PEAK_LR[[*alike, model][0]]


def model_shape(flags: dict) -> dict:
    """The fields of the model's shape that these flags set."""
    size = SIZES[flags["model"]] if "model" in flags else {}
    return size | {name: flags[name] for name in SHAPE if flags.get(name) is not None}


def refuse_flags_of_others(given: dict, base: dict, source) -> None:
    """Raise ValueError if the model of `source`, whose shape is `base`, lacks a given flag."""
    for names, model in ((OF_LLAMA, "llama-nano"), (OF_MIXTURE, "moe-nano")):
        flags = [flag_name(name) for name in names if name in given]
        if flags and names[0] not in base:
            raise ValueError(f"{source} has no {', '.join(flags)}: drop it, or give --model "
                             f"{model} or another of the models after it")


def new_run_advice(given: dict) -> str:
    """How a command whose run cannot go on with these flags begins a new one."""
    without = ", without --resume" if "resume" in given else ""
    return f"for a new run give another --out{without}"


def merge_config(given: dict, state: dict | None, weights_only=False,
                 file="the checkpoint") -> tuple[Config, dict]:
    """Command line, then checkpoint, then defaults -> the config and the model's shape (without
    vocabulary and dropout). With `weights_only` the checkpoint gives the shape alone, and seq_len
    may be shorter, with rotary positions also longer. Raises ValueError, which names the `file`, if
    the command line asks for another model."""
    config = Config(**given)
    shape = model_shape(given)
    base = SIZES[config.model]
    if state is not None:
        stored = make_config(**state["model"])
        base = dataclasses.asdict(stored)
        if "model" in given and type(asked := make_config(**shape)) is type(stored):
            # also the fields that have their defaults; those of flags may be the file's own
            shape |= {name: value for name, value in dataclasses.asdict(asked).items()
                      if name not in (*SHAPE, "vocab_size", "dropout")}
    refuse_flags_of_others(given, base, f"--model {config.model}" if state is None else file)
    if state is None:
        if "balance_bias" in given and "balance_loss" not in given:
            shape["balance_loss"] = 0.0             # the bias balances in place of the loss
        return config, base | shape
    # What a run may change is the checkpoint's, unless its own flag is given.
    of_run = {*ROUTER_LOSSES, "seq_len"} if weights_only else {*ROUTER_LOSSES}
    shape = {name: value for name, value in shape.items() if name in given or name not in of_run}
    problems, drop = [], []
    may_be_longer = "rope_theta" in base and not base.get("learned_positions", False)
    for name, value in shape.items():
        stored = base.get(name)
        is_length = name == "seq_len" and weights_only
        if value == stored or name in ROUTER_LOSSES or (
                is_length and (value < stored or may_be_longer)):
            continue
        allowed = f"at most {stored}" if is_length else stored
        # A GPT has no number such as n_kv_head.
        problems.append(f"{name} {allowed}, not {value}" if name in base else f"no {name}")
        drop.append(flag_name(name if name in given else "model"))
    if problems:
        advice = f"drop {', '.join(dict.fromkeys(drop))}"
        if weights_only:
            advice += ", or use another checkpoint"
        else:
            advice = f"{new_run_advice(given)}; to go on {advice}"
            if config.data != state["config"]["data"]:
                advice += f" and give --data {state['config']['data']}"
        raise ValueError(f"{file} has {'; '.join(problems)}: {advice}")
    stored = {name: value for name, value in base.items() if name not in ("vocab_size", "dropout")}
    shape = stored | shape
    if not weights_only:
        config = Config(**(restored_flags(state) | given))
    elif "lr" not in given:                     # the weights may have another shape than --model
        config = dataclasses.replace(config, lr=default_lr(config.model, shape))
    return config, shape


def restored_flags(state: dict) -> dict:
    """The flags that a checkpoint restores."""
    return {name: state["config"][name] for name in RESTORED if name in state["config"]}


def flags_of_writer(state: dict) -> dict:
    """All flags of the run that wrote a checkpoint; those that an older file lacks: defaults."""
    return dataclasses.asdict(Config()) | state["config"]
