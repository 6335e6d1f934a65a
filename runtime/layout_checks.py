"""Which layouts are refused before a run starts, each in one line that names the numbers.

runtime/startup.py calls `check_grid`, and checks.py `check_layout`. tools.plan and tools.schedule
use the same rules. What a model cannot be by itself, its config refuses.
"""
from collections.abc import Iterable, Iterator

from model import GPTConfig
from parallelism.exact import MOST_STRIPS
from parallelism.shared_heads import can_cut_heads


def refuse(problems: Iterable[str]) -> None:
    """Raise a ValueError that names all of these problems, if there are any."""
    text = "; ".join(problems)
    if text:
        raise ValueError(text)


def check_grid(world: int, config) -> None:
    """Raise a ValueError if no model can run in this layout."""
    refuse(problems_of_grid(world, config))


def check_layout(model_config: GPTConfig, world: int, batch: int, config) -> None:
    """Raise a ValueError if this job cannot run; no communication."""
    check_grid(world, config)
    dp = world // (config.tp * config.pp * config.cp)
    refuse([*problems_of_tp(model_config, config),
            *problems_of_experts(model_config, config, dp * config.cp),
            *problems_of_sizes(model_config, dp, batch, config)])


def problems_of_grid(world: int, config) -> Iterator[str]:
    """What no model can have."""
    tp, pp, cp, schedule = config.tp, config.pp, config.cp, config.pp_schedule
    fewest = tp * pp * cp
    if world % fewest:
        count = f"{world} processes are not divisible by"
        if world == 1:
            count = "this is one process, too few for"
        yield (f"{count} tp {tp} x pp {pp} x cp {cp} = {fewest}: lower these, or start a multiple "
               f"of {fewest} by torchrun --nproc_per_node={fewest} train.py, with the same flags")
    if config.zero == 3 and pp > 1:
        yield (f"zero 3 with pp {pp} would gather every block again for each microbatch of the "
               f"pipeline: give another --zero")
    if config.sequence_parallel and tp == 1:
        yield ("sequence parallelism splits the positions over tensor-parallel ranks, but tp is 1: "
               "drop it, or give --tp")
    is_interleaved = schedule == "interleaved"
    if is_interleaved != (config.pp_chunks > 1) or (is_interleaved and pp == 1):
        yield (f"--pp-schedule {schedule} with pp {pp} and pp-chunks {config.pp_chunks}: chunks "
               f"require the schedule interleaved, and it requires --pp and --pp-chunks of 2 or "
               f"more: give all, or drop both flags")
    if schedule == "zb-h1" and (pp == 1 or config.zero == 2 or config.recompute or config.compile):
        yield ("--pp-schedule zb-h1 requires --pp 2 or more, and cannot be combined with --zero 2, "
               "--recompute or --compile: drop these, or use 1f1b")
    if config.exact and MOST_STRIPS % tp:
        yield f"--exact computes in {MOST_STRIPS} strips at most, which tp {tp} does not divide"
    if config.exact and cp > 1:
        yield (f"--exact cannot be combined with --cp {cp}, which sums the gradients of keys in "
               f"the order of the ranks: drop one")
    if config.exact and config.compile:
        yield ("--exact cannot be combined with --compile, which orders sums in its own way: drop "
               "one")
    if config.exact and config.sequence_parallel and config.dropout > 0:
        yield ("--exact cannot be combined with --dropout and --sequence-parallel, where each rank "
               "draws masks for its positions: drop one")


def problems_of_tp(model_config: GPTConfig, config) -> Iterator[str]:
    """What tensor parallelism cannot cut: heads, their channels, or those of the MLP."""
    tp, heads, groups = config.tp, model_config.n_head, model_config.n_kv_head
    channels = groups * model_config.head_dim
    if heads % tp:
        yield f"n_head {heads} is not divisible by tp {tp}: change one"
    elif not can_cut_heads(model_config, tp):
        yield f"tp {tp} neither divides n_kv_head {groups} nor is a multiple of it: change one"
    elif channels % tp and (config.exact or getattr(model_config, "norm_all_heads", False)):
        reason = "--exact" if config.exact else "a norm over all heads"
        yield (f"{reason} requires that tp {tp} divides the {channels} channels of all heads of "
               f"keys: change one")
    elif model_config.hidden % tp:
        yield (f"the MLP's {model_config.hidden} hidden channels are not divisible by tp {tp}: "
               f"change one")


def problems_of_experts(model_config: GPTConfig, config, replicas: int) -> Iterator[str]:
    """What a mixture of experts cannot have, and what it alone can."""
    tp, ep = config.tp, config.ep
    if not hasattr(model_config, "n_expert"):
        if ep > 1:
            yield (f"--ep {ep} divides the experts of a mixture, and this model has none: drop it, "
                   f"or give another --model")
        return
    if model_config.n_expert % ep:
        yield f"ep {ep} does not divide the {model_config.n_expert} experts: change one"
    elif replicas % ep:
        yield (f"the replicas, dp x cp = {replicas}, are not divisible by ep {ep}: start more "
               f"processes, or give a smaller --ep")
    if model_config.shared_hidden % tp:
        yield (f"the shared expert's {model_config.shared_hidden} hidden channels are not "
               f"divisible by tp {tp}: change one")


def problems_of_sizes(model_config: GPTConfig, dp: int, batch: int, config) -> Iterator[str]:
    """Positions, layers or sequences that cannot be divided."""
    tp, pp, cp, chunks = config.tp, config.pp, config.cp, config.pp_chunks
    seq_len, n_layer = model_config.seq_len, model_config.n_layer
    if cp > 1 and seq_len % (2 * cp):
        yield (f"context parallelism cuts a sequence into 2 x cp {cp} = {2 * cp} pieces, which do "
               f"not divide seq_len {seq_len}: change one")
    if config.sequence_parallel and seq_len % (cp * tp):
        yield (f"sequence parallelism: seq_len {seq_len} is not divisible by cp {cp} x tp {tp}: "
               f"change one, or drop --sequence-parallel")
    if n_layer < pp * chunks:
        yield (f"n_layer {n_layer} is less than pp {pp} x pp-chunks {chunks}: a stage would be "
               f"empty: raise --n-layer, or lower these")
    multiple = dp * config.micro_batch
    factors = f"dp {dp} x micro-batch {config.micro_batch}"
    if chunks > 1:
        multiple *= pp
        factors += f" x pp {pp} (interleaved)"
    if batch % multiple:
        which = f"batch size {batch}"
        if config.batch_ramp is not None:
            which = f"--batch-ramp {config.batch_ramp}: {which}"
        yield f"{which} is not divisible by {factors} = {multiple}: change one"
