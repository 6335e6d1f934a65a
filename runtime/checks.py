"""What is refused before a run starts, each in one line that names the numbers. layout_checks.py
has the rules of the layout."""
import dataclasses
import math
import os

from base.batch_ramp import batch_sizes, steps_of_epochs
from base.options import Config, merge_config, new_run_advice
from base.processes import warn
from corpus.templates import is_own
from data import TokenDataset
from model import GPTConfig
from models import PEAK_LR, SIZES, make_config
from runtime.layout_checks import check_layout


def default_micro_batch(sizes: range, dp: float, pp: int, device_type: str) -> int:
    """The largest microbatch, up to a limit, that splits every batch size into a multiple of pp
    microbatches, which fill the pipeline. GPUs gain from large products, but a pipeline loses more:
    with 16 sequences instead of 4 it has fewer microbatches (`tools.plan`: 8 to 40% slower)."""
    limit = 16 if device_type == "cuda" and pp == 1 else 4
    rows = math.gcd(*sizes) / dp        # sequences of each rank; a fraction is no multiple
    return max([m for m in range(1, limit + 1) if rows % (m * pp) == 0], default=1)


def default_lr(model: str, shape: dict) -> float:
    """Published peak learning rate of the size with this depth and width (`model` first, but the
    weights of --init-from may have another shape); without one, that of `model`."""
    def size_of(shape):
        kind = "n_kv_head" in shape, "n_expert" in shape        # a GPT, a Llama, or a mixture
        return shape["n_layer"], shape["n_embd"], kind
    for name in (model, *SIZES):
        if size_of(SIZES[name]) == size_of(shape):
            return PEAK_LR[name]
    return PEAK_LR[model]


def check_config(config: Config, shape: dict, vocab_size: int, world: int,
                 device_type: str) -> tuple[Config, GPTConfig]:
    """The config with a microbatch and a learning rate, and the model. Raises ValueError if they
    cannot run."""
    model_config = make_config(vocab_size=vocab_size, dropout=config.dropout, **shape)
    dp = world / (config.tp * config.pp * config.cp)
    sizes, _ = batch_sizes(config)
    if config.batch_size not in sizes and not config.eval_only:
        raise ValueError(f"--batch-ramp {config.batch_ramp} does not end at --batch-size "
                         f"{config.batch_size}: START and INCREMENTs must add up to it (none: no "
                         f"ramp)")
    defaults = {}
    if config.micro_batch is None and config.exact:     # the same in every layout of 8 replicas
        defaults["micro_batch"] = default_micro_batch(sizes, 8, 1, "cpu")
    elif config.micro_batch is None:
        defaults["micro_batch"] = default_micro_batch(sizes, dp, config.pp, device_type)
    if config.lr is None:
        defaults["lr"] = default_lr(config.model, shape)
    config = dataclasses.replace(config, **defaults)
    if config.eval_only:            # an evaluation ignores --batch-size
        sizes = [max(1, int(dp)) * config.micro_batch * config.pp]
        config = dataclasses.replace(config, batch_size=sizes[0])
    for size in sizes:
        check_layout(model_config, world, size, config)
    return config, model_config


def check_data(given: dict, state: dict, file, dataset: TokenDataset, config,
               weights_only: bool) -> None:
    """Raise ValueError, which names the checkpoint's `file`, unless the data has its tokenizer and,
    to go on or to evaluate it, all sources that the run was last trained on. An evaluation on other
    data that --data names is a warning."""
    tokenizer, vocab_size = state["tokenizer"], state["model"]["vocab_size"]
    meta = dataset.meta
    stored = state["config"].get("data")                            # None: weights alone
    fine_tunes = weights_only and not config.eval_only
    found = config.data
    if "data" not in given:
        found += " (the default: --data was left out)"
    # A model may have more rows than its tokenizer has tokens, as Qwen's, or fewer:
    # startup.open_data refuses tokens without a row.
    if state["tokenizer"] != meta["tokenizer"]:
        advice = "make --data with that tokenizer, or use another checkpoint"
        if stored is not None and not fine_tunes:
            advice = f"give --data {stored}, or {advice} or --out"
        raise ValueError(f"{file}'s tokenizer is {tokenizer} with {vocab_size} tokens, but {found} "
                         f"has {meta['tokenizer']} with {meta['vocab_size']}: {advice}")
    trained_on = {}
    if state["data"]:                                               # None: weights alone
        _, trained_on = state["data"][-1]
    template = state.get("template")
    if template is not None and meta.get("template", template) != template:
        flag = template
        if is_own(template):
            flag = "DIR, the folder of its model,"
        warn(f"{file} was trained on conversations by the template {template}, and {config.data} "
             f"has {meta['template']}: data.py --template {flag} makes it alike")
    if fine_tunes or set(trained_on) <= set(dataset.mixture.sources):
        return
    problem = f"{file} was trained on the text that {stored} had, not on that of {found}"
    if not config.eval_only:
        go_on = f"give --data {stored}"
        if os.path.realpath(stored) == os.path.realpath(config.data):
            go_on = "restore its shards, which have changed"
        elif "data" in given and "=" in f"{stored}{config.data}":
            go_on += " (DIR=0 leaves out a source)"
        raise ValueError(f"{problem}: {new_run_advice(given)} (--init-from {file} begins it with "
                         f"these weights); to go on {go_on}")
    if "data" not in given:
        raise ValueError(f"{problem}: give --data {stored} or --data {config.data}")
    warn(problem)


def validate(given: dict, state: dict | None, world: int, device_type: str,
             weights_only: bool = False, file="the checkpoint") -> tuple[Config, GPTConfig]:
    """Flags and the checkpoint in `file` -> config and model. Raises ValueError or OSError if they
    cannot run."""
    config, shape = merge_config(given, state, weights_only, file)
    data = TokenDataset(config.data, "train", shape["seq_len"])
    TokenDataset(config.data, "val", shape["seq_len"])       # refuses data without it
    if "decay_ratio" in given and config.lr_schedule != "wsd":
        raise ValueError(f"--decay-ratio is for --lr-schedule wsd, not {config.lr_schedule}, which "
                         f"decays until the last step: give --lr-schedule wsd, or drop the flag")
    vocab_size = data.meta["vocab_size"] if state is None else state["model"]["vocab_size"]
    config, model_config = check_config(config, shape, vocab_size, world, device_type)
    if state is not None:
        check_data(given, state, file, data, config, weights_only)
    resumed = None if weights_only else state
    if config.epochs is not None and not config.eval_only:
        config = dataclasses.replace(config, steps=steps_of_epochs(config, data, resumed))
    if resumed is not None and not config.eval_only and config.steps > resumed["step"]:
        seed = resumed["config"]["seed"]
        if config.seed != seed:
            raise ValueError(f"{file} has read its data in the order of seed {seed}; in that of "
                             f"--seed {config.seed} it would read some of it again: "
                             f"{new_run_advice(given)}; to go on drop --seed")
    return config, model_config
