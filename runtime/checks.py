"""What is refused before a run starts, each in one line that names the numbers. What a model cannot
be by itself, its config refuses."""
import dataclasses
import math
import os
from pathlib import Path

from base.batch_ramp import batch_sizes, steps_of_epochs
from base.commandline import flag_name
from base.errors import refuse, warn
from base.options import SHAPE, Config, merge_config, new_run_advice
from data import TokenDataset
from model import GPTConfig
from models import make_config
from parallelism import exact
from parallelism.shared_heads import can_cut_heads

# The flags that --plain takes. A run that it continues may have had others. They are ignored.
PLAIN_FLAGS = {
    "plain", "data", "out", "model", *SHAPE, "batch_size", "micro_batch", "steps", "epochs", "lr",
    "min_lr_ratio", "warmup_steps", "lr_schedule", "decay_ratio", "weight_decay", "beta1", "beta2",
    "clip", "seed", "device", "dtype", "save_every", "keep", "eval_every", "eval_tokens",
    "log_every"}


def validate(given: dict, state: dict | None, world: int, device_type: str,
             weights_only: bool = False, file="the checkpoint") -> tuple[Config, GPTConfig]:
    """Flags and the checkpoint in `file` -> config and model. Raises ValueError or OSError if they
    cannot run."""
    config, shape = merge_config(given, state, weights_only, file)
    resumed = None if weights_only else state
    if config.exact:
        of_8_replicas = default_micro_batch(batch_sizes(config)[0], 8, 1, "cpu")
        config = exact.complete_config(config, device_type, resumed, file, of_8_replicas)
    data = TokenDataset(config.data, "train", shape["seq_len"])
    TokenDataset(config.data, "val", shape["seq_len"])       # refuses data without it
    if "decay_ratio" in given and config.lr_schedule != "wsd":
        raise ValueError(f"--decay-ratio is for --lr-schedule wsd, not {config.lr_schedule}, which "
                         f"decays until the last step: give --lr-schedule wsd, or drop the flag")
    vocab_size = data.meta["vocab_size"] if state is None else state["model"]["vocab_size"]
    config, model_config = check_config(config, shape, vocab_size, world, device_type)
    if state is not None:
        check_data(given, state, file, data, config, weights_only)
    if config.epochs is not None and not config.eval_only:
        config = dataclasses.replace(config, steps=steps_of_epochs(config, data, resumed))
    if resumed is not None and not config.eval_only and config.steps > resumed["step"]:
        seed = resumed["config"]["seed"]
        if config.seed != seed:
            raise ValueError(f"{file} has read its data in the order of seed {seed}; in that of "
                             f"--seed {config.seed} it would read some of it again: "
                             f"{new_run_advice(given)}; to go on drop --seed")
    return config, model_config


def check_config(config: Config, shape: dict, vocab_size: int, world: int,
                 device_type: str) -> tuple[Config, GPTConfig]:
    """The config with a microbatch, and the model. Raises ValueError if they cannot run."""
    model_config = make_config(vocab_size=vocab_size, dropout=config.dropout, **shape)
    dp = world / (config.tp * config.pp * config.cp)
    sizes, _ = batch_sizes(config)
    if config.batch_size not in sizes and not config.eval_only:
        raise ValueError(f"--batch-ramp {config.batch_ramp} does not end at --batch-size "
                         f"{config.batch_size}: START and INCREMENTs must add up to it (none: no "
                         f"ramp)")
    micro_batch = config.micro_batch or default_micro_batch(sizes, dp, config.pp, device_type)
    if config.eval_only:            # an evaluation ignores --batch-size
        sizes = [max(1, int(dp)) * micro_batch * config.pp]
    config = dataclasses.replace(config, micro_batch=micro_batch, batch_size=sizes[-1])
    for size in sizes:
        check_layout(model_config, world, size, config)
    return config, model_config


def default_micro_batch(sizes: range, dp: float, pp: int, device_type: str) -> int:
    """The largest microbatch, up to a limit, that splits every batch size into a multiple of pp
    microbatches, which fill the pipeline. GPUs gain from large products, but a pipeline loses more:
    with 16 sequences instead of 4 it has fewer microbatches (`tools.plan`: 8 to 40% slower)."""
    limit = 16 if device_type == "cuda" and pp == 1 else 4
    rows = math.gcd(*sizes) / dp        # sequences of each rank; a fraction is no multiple
    return max([m for m in range(1, limit + 1) if rows % (m * pp) == 0], default=1)


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
    if tokenizer != meta["tokenizer"]:
        advice = "make --data with that tokenizer, or use another checkpoint"
        if stored is not None and not fine_tunes:
            advice = f"give --data {stored}, or {advice} or --out"
        raise ValueError(f"{file}'s tokenizer is {tokenizer} with {vocab_size} tokens, but {found} "
                         f"has {meta['tokenizer']} with {meta['vocab_size']}: {advice}")
    template = state.get("template")
    if template is not None and meta.get("template", template) != template:
        flag = "DIR, the folder of its model," if template != "plain" else template
        warn(f"{file} was trained on conversations by the template {template}, and {config.data} "
             f"has {meta['template']}: data.py --template {flag} makes it alike")
    trained_on = state["data"][-1][1] if state["data"] else {}      # of the last phase
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


def check_plain(given: dict, world: int) -> None:
    """Raise ValueError unless --plain has all flags that were given."""
    config = Config(**given)
    names = ", ".join(map(flag_name, sorted(set(given) - PLAIN_FLAGS)))
    refuse([
        (world > 1,
         f"--plain is for one process, not {world}: drop --plain, or start without torchrun"),
        (names, f"--plain has no {names}: drop one or the other"),
        (config.dtype == "fp16",
         "--plain has no --dtype fp16: give fp32, bf16 or fp64, or drop --plain"),
        (set("=,") & set(config.data) and not Path(config.data).is_dir(),
         "--plain reads one directory, not a mixture: drop --plain, or give one directory")])


# ---- Layouts ---------------------------------------------------------------------------------

def check_grid(world: int, config, model_config: GPTConfig | None = None) -> None:
    """Raise a ValueError if no model can run in this layout, or if not this one."""
    tp, pp, cp, schedule = config.tp, config.pp, config.cp, config.pp_schedule
    fewest = tp * pp * cp
    count = f"{world} processes are not divisible by"
    if world == 1:
        count = "this is one process, too few for"
    is_interleaved = schedule == "interleaved"
    refuse([
        (world % fewest,
         f"{count} tp {tp} x pp {pp} x cp {cp} = {fewest}: lower these, or start a multiple of "
         f"{fewest} by torchrun --nproc_per_node={fewest} train.py, with the same flags"),
        (config.zero == 3 and pp > 1,
         f"zero 3 with pp {pp} would gather every block again for each microbatch of the pipeline: "
         f"give another --zero"),
        (config.sequence_parallel and tp == 1,
         "sequence parallelism splits the positions over tensor-parallel ranks, but tp is 1: drop "
         "it, or give --tp"),
        (config.pp_chunks > 1 and not is_interleaved,
         f"--pp-chunks {config.pp_chunks} requires --pp-schedule interleaved: give both, or none"),
        (is_interleaved and min(pp, config.pp_chunks) == 1,
         f"--pp-schedule interleaved requires --pp and --pp-chunks of 2 or more, not {pp} and "
         f"{config.pp_chunks}: give both, or another schedule"),
        *exact.refusals(config, model_config)])


def check_layout(model_config: GPTConfig, world: int, batch: int, config) -> None:
    """Raise a ValueError if this job cannot run; no communication."""
    check_grid(world, config, model_config)
    cfg, tp, pp, cp, chunks = model_config, config.tp, config.pp, config.cp, config.pp_chunks
    dp, channels = world // (tp * pp * cp), cfg.n_kv_head * cfg.head_dim
    multiple, interleaved = dp * config.micro_batch, ""
    if chunks > 1:
        multiple *= pp
        interleaved = f" x pp {pp} (interleaved)"
    ramp = f"--batch-ramp {config.batch_ramp}: " if config.batch_ramp is not None else ""
    of_tp = [               # what it cannot cut: the first problem alone is told
        (cfg.n_head % tp, f"n_head {cfg.n_head} is not divisible by tp {tp}: change one"),
        (not can_cut_heads(cfg, tp),
         f"tp {tp} neither divides n_kv_head {cfg.n_kv_head} nor is a multiple of it: change one"),
        (channels % tp and getattr(cfg, "norm_all_heads", False),
         f"a norm over all heads requires that tp {tp} divides the {channels} channels of all "
         f"heads of keys: change one"),
        (cfg.hidden % tp,
         f"the MLP's {cfg.hidden} hidden channels are not divisible by tp {tp}: change one")]
    refuse([
        *[rule for rule in of_tp if rule[0]][:1], *rules_of_experts(cfg, config, dp),
        (cp > 1 and cfg.seq_len % (2 * cp),
         f"context parallelism cuts a sequence into 2 x cp {cp} = {2 * cp} pieces, which do not "
         f"divide seq_len {cfg.seq_len}: change one"),
        (config.sequence_parallel and cfg.seq_len % (cp * tp),
         f"sequence parallelism: seq_len {cfg.seq_len} is not divisible by cp {cp} x tp {tp}: "
         f"change one, or drop --sequence-parallel"),
        (cfg.n_layer < pp * chunks,
         f"n_layer {cfg.n_layer} is less than pp {pp} x pp-chunks {chunks}: a stage would be "
         f"empty: raise --n-layer, or lower these"),
        (batch % multiple,
         f"{ramp}batch size {batch} is not divisible by dp {dp} x micro-batch "
         f"{config.micro_batch}{interleaved} = {multiple}: change one")])


def rules_of_experts(cfg: GPTConfig, config, dp: int) -> list[tuple]:
    """What a mixture of experts cannot have, and what it alone can."""
    tp, ep, replicas = config.tp, config.ep, dp * config.cp
    if not hasattr(cfg, "n_expert"):
        return [(ep > 1, f"--ep {ep} divides the experts of a mixture, and this model has none: "
                         f"drop it, or give another --model")]
    return [
        (cfg.n_expert % ep, f"ep {ep} does not divide the {cfg.n_expert} experts: change one"),
        (cfg.n_expert % ep == 0 and replicas % ep,
         f"the replicas, dp x cp = {replicas}, are not divisible by ep {ep}: start more processes, "
         f"or give a smaller --ep"),
        (cfg.shared_hidden % tp,
         f"the shared expert's {cfg.shared_hidden} hidden channels are not divisible by tp {tp}: "
         f"change one")]
