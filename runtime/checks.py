"""What is refused before a run starts, each in one line that names the numbers.

runtime/startup.py calls `check_grid` and, on rank 0, `validate`; tools.plan and tools.schedule use
the rules of the layout. memory_limits.py asks whether there is memory.
"""
import dataclasses
import math
import os

from base.batch_ramp import batch_sizes, steps_of_epochs
from base.options import Config, merge_config, new_run_advice
from base.processes import warn
from corpus.published_templates import is_own
from corpus.shards import fits_tokenizer
from data import TokenDataset
from model import GPTConfig
from models import PEAK_LR, SIZES, make_config
from parallelism.exact import MOST_STRIPS
from parallelism.shared_heads import can_cut_heads


def refuse(problems: list[str]) -> None:
    """Raise a ValueError that names all of these problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))


def check_grid(world: int, config) -> None:
    """Raise a ValueError that names the numbers if no model can run in this layout."""
    tp, pp, cp, schedule, chunks = (config.tp, config.pp, config.cp, config.pp_schedule,
                                    config.pp_chunks)
    problems = []
    fewest = tp * pp * cp
    if world % fewest:
        factors, flags = f"tp {tp} x pp {pp}", f"--tp {tp} --pp {pp}"
        if cp > 1:
            factors += f" x cp {cp}"
            flags += f" --cp {cp}"
        count = f"{world} processes are not divisible by"
        if world == 1:
            count = "this is one process, too few for"
        problems.append(f"{count} {factors} = {fewest}: lower these, or start a multiple of "
                        f"{fewest}, with your other flags, too: torchrun --nproc_per_node={fewest} "
                        f"train.py {flags}")
    if config.zero == 3 and pp > 1:
        problems.append(f"zero 3 with pp {pp} would gather every block again for each microbatch "
                        f"of the pipeline: give --zero 1, or --zero 2 (not with zb-h1)")
    if config.sequence_parallel and tp == 1:
        problems.append("sequence parallelism splits the positions over tensor-parallel ranks, "
                        "but tp is 1: drop it, or give --tp 2 or more, and as many processes: "
                        "torchrun --nproc_per_node=2 train.py --tp 2")
    if config.tp_overlap:
        problems += problems_of_overlap(config)
    interleaved = schedule == "interleaved"
    if interleaved != (chunks > 1) or (interleaved and pp == 1):
        problems.append(f"--pp-schedule {schedule} with pp {pp} and pp-chunks {chunks}: chunks "
                        f"require the schedule interleaved, and it requires --pp and --pp-chunks "
                        f"of 2 or more, pp x pp-chunks layers or more, and --batch-size in "
                        f"multiples of dp x micro-batch x pp: give all, or drop both flags")
    if schedule == "zb-h1" and (pp == 1 or config.zero == 2 or config.recompute or config.compile):
        problems.append("--pp-schedule zb-h1 requires --pp 2 or more, and cannot be combined "
                        "with --zero 2, --recompute or --compile: drop these, or use 1f1b")
    if config.exact and MOST_STRIPS % tp:
        problems.append(f"--exact computes in {MOST_STRIPS} strips at most, which tp {tp} does "
                        f"not divide: give --tp 1, 2, 4 or 8")
    if config.exact and cp > 1:
        problems.append(f"--exact cannot be combined with --cp {cp}, which sums the gradients of "
                        f"keys in the order of the ranks: drop one")
    if config.exact and config.compile:
        problems.append("--exact cannot be combined with --compile, which orders sums in its own "
                        "way: drop one")
    if config.exact and config.sequence_parallel and config.dropout > 0:
        problems.append("--exact cannot be combined with --dropout and --sequence-parallel, where "
                        "each rank draws masks for its positions: drop one")
    refuse(problems)


def problems_of_overlap(config) -> list[str]:
    """What --tp-overlap (parallelism/halves.py) cannot be combined with."""
    problems = []
    if config.tp == 1:
        problems.append("--tp-overlap hides sums between tensor-parallel ranks, but tp is 1: drop "
                        "it, or give --tp 2 or more")
    if config.micro_batch == 1:
        problems.append("--tp-overlap computes a microbatch in two halves, but micro-batch is 1: "
                        "give --micro-batch 2 or more, or drop it")
    for flag, value, reason in (
            ("--sequence-parallel", config.sequence_parallel,
             "where a half would wait for the sum of the other before it gets its input"),
            ("--exact", config.exact, "which multiplies whole microbatches"),
            ("--dropout", config.dropout > 0, "of which both halves would draw the same masks")):
        if value:
            problems.append(f"--tp-overlap cannot be combined with {flag}, {reason}: drop one")
    return problems


def nearest_heads(channels: int, heads: int, tp: int) -> list[str]:
    """The number of heads next to `heads` that divides the channels and that tp divides, as a flag;
    none if there is no such number."""
    fitting = [n for n in range(tp, channels + 1, tp) if channels % n == 0]
    return [f"--n-head {n}" for n in sorted(fitting, key=lambda n: abs(n - heads))[:1]]


def in_words(values: list) -> str:
    """1, 2 or 4"""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def check_heads(shape: dict, tp: int) -> None:
    """Raise a ValueError that proposes near values if the channels cannot be cut into heads, the
    heads into groups, or a head into the pairs that rotary positions turn."""
    channels, heads = shape["n_embd"], shape["n_head"]
    check_groups(shape, tp)
    if channels % heads and not shape.get("head_dim"):
        near = nearest_heads(channels, heads, tp)
        if heads % tp == 0:
            below = channels // heads * heads
            near = [f"--n-embd {n}" for n in (below, below + heads) if n > 0] + near
        raise ValueError(f"n_embd {channels} is not divisible by n_head {heads}: give "
                         f"{' or '.join(near) or 'other values of both'}")


def check_groups(shape: dict, tp: int) -> None:
    """`check_heads` of what a GPT does not have: heads of keys, and channels of a head."""
    channels, heads, groups = shape["n_embd"], shape["n_head"], shape.get("n_kv_head")
    if groups and heads % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        with_tp = [n for n in fitting if n % tp == 0] or fitting
        raise ValueError(f"n_head {heads} is not divisible by n_kv_head {groups}: give --n-kv-head "
                         f"{in_words(with_tp)}, or an --n-head in multiples of {groups}")
    head_dim = shape.get("head_dim") or channels // heads
    turned = int(shape.get("rotary", 1.0) * head_dim)
    if groups is not None and turned % 2 and (shape.get("head_dim") or channels % heads == 0):
        part = "" if turned == head_dim else f", of which {turned} turn"
        fitting = [n for n in range(max(1, head_dim - 8), head_dim + 9)
                   if int(shape.get("rotary", 1.0) * n) in range(2, n + 1, 2)]
        near = sorted(sorted(fitting, key=lambda n: abs(n - head_dim))[:2])
        raise ValueError(f"rotary positions turn pairs of channels, but a head has {head_dim}"
                         f"{part}: give --head-dim {in_words(near)}")


def check_layout(model_config: GPTConfig, world: int, batch: int, config) -> None:
    """Raise a ValueError that names the numbers if this job cannot run; no communication."""
    check_grid(world, config)
    tp, pp, cp, chunks = config.tp, config.pp, config.cp, config.pp_chunks
    micro_batch, seq_len = config.micro_batch, model_config.seq_len
    dp = world // (tp * pp * cp)
    problems = []
    heads, groups = model_config.n_head, model_config.n_kv_head
    channels = groups * model_config.head_dim
    if not can_cut_heads(model_config, tp):
        problem, which = f"n_head {heads} is not divisible by tp {tp}", "divides it"
        if heads % tp == 0:
            problem = f"tp {tp} neither divides n_kv_head {groups} nor is a multiple of it"
            which = "fits it"
        fitting = [n for n in range(1, heads + 1)
                   if can_cut_heads(model_config, n) and world % (n * pp * cp) == 0]
        possible = [str(n) for n in fitting if batch % (world // (n * pp * cp)) == 0]
        near = []
        if heads == groups:
            near = nearest_heads(model_config.n_embd, heads, tp)
        if possible:
            near.insert(0, f"a --tp that {which} and the {world} processes: "
                           f"{', '.join(possible)}")
        problems.append(f"{problem}: give {'; or '.join(near) or 'another number of processes'}")
    elif channels % tp and (config.exact or getattr(model_config, "norm_all_heads", False)):
        reason = "--exact" if config.exact else "a norm over all heads"
        problems.append(f"{reason} requires that tp {tp} divides the {channels} channels of all "
                        f"heads of keys: give a --tp or a --head-dim that fits")
    elif model_config.hidden % tp:
        problems.append(f"the MLP's {model_config.hidden} hidden channels are not divisible by tp "
                        f"{tp}: give a --tp or a --hidden that fits")
    problems += problems_of_experts(model_config, config, dp * cp)
    if cp > 1 and seq_len % (2 * cp):
        problems.append(f"context parallelism cuts a sequence into 2 x cp {cp} = {2 * cp} pieces, "
                        f"which do not divide seq_len {seq_len}: change one")
    if config.sequence_parallel and seq_len % (cp * tp):
        positions = f"seq_len {seq_len}"
        if cp > 1:
            positions += f" / cp {cp}"
        problems.append(f"sequence parallelism: {positions} is not divisible "
                        f"by tp {tp}: change one, or drop --sequence-parallel")
    if model_config.n_layer < pp * chunks:
        stages = f"pp {pp}"
        advice = "raise --n-layer, or lower --pp"
        if chunks > 1:
            stages += f" x pp-chunks {chunks}"
            advice += ", or drop --pp-schedule interleaved and --pp-chunks"
        problems.append(f"n_layer {model_config.n_layer} is less than {stages}: a stage would be "
                        f"empty: {advice}")
    least = dp
    factors = f"dp {dp} x micro-batch {micro_batch}"
    if chunks > 1:
        least *= pp
        factors += f" x pp {pp}, as the interleaved schedule requires"
    multiple = least * micro_batch
    if batch % multiple:
        advice = f"give --batch-size (and START and INCREMENT of a ramp) in multiples of {multiple}"
        if batch % least == 0:
            advice += ", or drop --micro-batch"
        which = f"batch size {batch}"
        if config.batch_ramp is not None:
            which = f"--batch-ramp {config.batch_ramp}: {which}"
        problems.append(f"{which} is not divisible by {factors}: {advice}")
    refuse(problems)


def problems_of_experts(model_config: GPTConfig, config, replicas: int) -> list[str]:
    """What a mixture of experts cannot have, and what it alone can."""
    problems = []
    if not hasattr(model_config, "n_expert"):
        if config.ep > 1:
            problems.append(f"--ep {config.ep} divides the experts of a mixture, and this model "
                            f"has none: drop it, or give --model moe-nano or another after it")
        return problems
    if config.tp_overlap:
        problems.append("--tp-overlap cannot be combined with a mixture of experts, whose tokens "
                        "change places between the products: drop it")
    if model_config.n_expert % config.ep:
        problems.append(f"ep {config.ep} does not divide the {model_config.n_expert} experts: give "
                        f"an --ep or an --n-expert that fits")
    elif replicas % config.ep:
        problems.append(f"the replicas, dp x cp = {replicas}, are not divisible by ep {config.ep}: "
                        f"start more processes, or give a smaller --ep")
    if model_config.shared_hidden % config.tp:
        problems.append(f"the shared expert's {model_config.shared_hidden} hidden channels are not "
                        f"divisible by tp {config.tp}: give a --tp or a --shared-hidden that fits")
    return problems


def largest_microbatch(pp: int, device_type: str) -> int:
    """The most sequences of a microbatch by default. GPUs gain from large products, but a pipeline
    loses more: with 16 sequences instead of 4 it has fewer microbatches (`tools.plan`: 8 to 40%
    slower)."""
    return 16 if device_type == "cuda" and pp == 1 else 4


def default_micro_batch(sizes: range, dp: float, pp: int, device_type: str) -> int:
    """The largest microbatch, up to a limit, that splits every batch size into a multiple of pp
    microbatches, which fill the pipeline."""
    most = largest_microbatch(pp, device_type)
    rows = math.gcd(*sizes) / dp        # sequences of each rank; a fraction is no multiple
    return max([m for m in range(1, most + 1) if rows % (m * pp) == 0], default=1)


def default_lr(model: str, shape: dict) -> float:
    """Published peak learning rate of the size with this depth and width (`model` first, but the
    weights of --init-from may have another shape); without one, that of `model`."""
    def of(shape):
        kind = "n_kv_head" in shape, "n_expert" in shape        # a GPT, a Llama, or a mixture
        return shape["n_layer"], shape["n_embd"], kind
    for name in (model, *SIZES):
        if of(SIZES[name]) == of(shape):
            return PEAK_LR[name]
    return PEAK_LR[model]


def check_config(config: Config, shape: dict, vocab_size: int, world: int,
                 device_type: str) -> tuple[Config, GPTConfig]:
    """The config with a microbatch and a learning rate, and the model. Raises ValueError if they
    cannot run."""
    check_heads(shape, config.tp)
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
    # Mixture.check finds tokens without a row.
    if not fits_tokenizer(state, meta):
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
        own = template
        if is_own(template):
            own = "DIR, the folder of its model,"
        warn(f"{file} was trained on conversations by the template {template}, and {config.data} "
             f"has {meta['template']}: data.py --template {own} makes it alike")
    if fine_tunes or set(trained_on) <= set(dataset.mixture.sources):
        return
    problem = f"{file} was trained on the text that {stored} had, not on that of {found}"
    if not config.eval_only:
        go_on = f"give --data {stored}"
        if os.path.realpath(stored) == os.path.realpath(config.data):
            go_on = "restore its shards, which have changed"
        elif "data" in given:
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
    val_data = TokenDataset(config.data, "val", shape["seq_len"])
    if "decay_ratio" in given and config.lr_schedule != "wsd":
        raise ValueError(f"--decay-ratio is for --lr-schedule wsd, not {config.lr_schedule}, which "
                         f"decays until the last step: give --lr-schedule wsd, or drop the flag")
    vocab_size = data.meta["vocab_size"] if state is None else state["model"]["vocab_size"]
    config, model_config = check_config(config, shape, vocab_size, world, device_type)
    resumed = None if weights_only else state
    if state is not None:
        check_data(given, state, file, data, config, weights_only)
    if config.eval_answers > 0 and not val_data.has_conversations:
        raise ValueError(f"--eval-answers is for conversations, and {config.data} has none: give "
                         f"--eval-answers 0, or make --data from lines with messages or prompt and "
                         f"completion")
    if resumed is not None and config.exact and not config.eval_only:
        stored = resumed["config"]
        if stored.get("exact") and stored["micro_batch"] != config.micro_batch:
            raise ValueError(f"--exact: this run's microbatches have {stored['micro_batch']} "
                             f"sequences, others would give other bits: drop --micro-batch "
                             f"{config.micro_batch}")
    if config.epochs is not None and not config.eval_only:
        config = dataclasses.replace(config, steps=steps_of_epochs(config, data, resumed))
    return config, model_config
