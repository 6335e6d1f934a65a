"""Which layouts are refused before a run starts, each in one line that names the numbers.

runtime/startup.py calls `check_grid`, and checks.py the others. tools.plan and tools.schedule use
the same rules.
"""
from model import GPTConfig
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
    heads into groups, or a head into the pairs that rotary positions rotate."""
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
    channels = shape["n_embd"]
    heads = shape["n_head"]
    groups = shape.get("n_kv_head")
    if groups and heads % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        with_tp = [n for n in fitting if n % tp == 0] or fitting
        raise ValueError(f"n_head {heads} is not divisible by n_kv_head {groups}: give --n-kv-head "
                         f"{in_words(with_tp)}, or an --n-head in multiples of {groups}")
    head_dim = shape.get("head_dim") or channels // heads
    rotated = int(shape.get("rotary", 1.0) * head_dim)
    if groups is not None and rotated % 2 and (shape.get("head_dim") or channels % heads == 0):
        part = "" if rotated == head_dim else f", of which {rotated} rotate"
        fitting = [n for n in range(max(1, head_dim - 8), head_dim + 9)
                   if int(shape.get("rotary", 1.0) * n) in range(2, n + 1, 2)]
        near = sorted(sorted(fitting, key=lambda n: abs(n - head_dim))[:2])
        raise ValueError(f"rotary positions rotate pairs of channels, but a head has {head_dim}"
                         f"{part}: give --head-dim {in_words(near)}")


def check_layout(model_config: GPTConfig, world: int, batch: int, config) -> None:
    """Raise a ValueError that names the numbers if this job cannot run; no communication."""
    check_grid(world, config)
    tp, pp, cp, chunks = config.tp, config.pp, config.cp, config.pp_chunks
    micro_batch, seq_len = config.micro_batch, model_config.seq_len
    dp = world // (tp * pp * cp)
    problems = problems_of_tp(model_config, world, batch, config)
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


def problems_of_tp(model_config: GPTConfig, world: int, batch: int, config) -> list[str]:
    """What tensor parallelism cannot cut: heads, their channels, or those of the MLP."""
    tp, pp, cp = config.tp, config.pp, config.cp
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
    return problems


def problems_of_experts(model_config: GPTConfig, config, replicas: int) -> list[str]:
    """What a mixture of experts cannot have, and what it alone can."""
    problems = []
    if not hasattr(model_config, "n_expert"):
        if config.ep > 1:
            problems.append(f"--ep {config.ep} divides the experts of a mixture, and this model "
                            f"has none: drop it, or give --model moe-nano or another after it")
        return problems
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
