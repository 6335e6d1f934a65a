"""Seconds of a step."""
from functools import lru_cache
from typing import NamedTuple

from base.flops import mlp_channels
from parallelism.pipeline import interleaved
from tools.plan.flags import PlanConfig
from tools.plan.memory import Stage
from tools.plan.traffic import CONTEXT_RINGS, gradient_rings, ring
from tools.schedule import clock

# Fitted on 209 published steps (tests/published_runs.py says which, and the error without each):
PASSES = 93             # times that (B, T, C / tp) numbers cross memory in the rest of a block
LINK = 0.55             # fraction of a link's speed that collectives and messages reach
SHARE = 0.32            # fraction of hidden traffic's time that it takes from what hides it
# Counted, or from the makers' descriptions:
WHOLE_PASSES = 20       # the same of (B, T, C): norms and residual sums, / tp if sequence-parallel
TILE = 128 * 256        # outputs of a matrix product that a multiprocessor computes at a time
HOP = 5e-6              # seconds that each rank of a ring adds (NCCL's tuning: 3 to 14 us)
# Fitted on our own GPT-2 124M on an H100: 449,000 tokens per second. (Without --compile, where it
# has 350,000, and for a Llama on an H200, with it, the plan is then 2% off.)
COMPILED = 0.22         # fraction of the time of passes that --compile leaves, the loss's too


def link_speeds(config: PlanConfig) -> dict[str, float]:
    """Bytes per second between the ranks of a group of tp, cp, ep, pp, and of replicas (dp), in the
    order of parallel.Grid: NVLink where they share a machine. What leaves a machine uses an adapter
    for each of them in it, and a message between stages that of its rank alone."""
    gpu = config.spec
    per_node, tp = config.gpus_per_node, config.tp
    ranks_of_stage = config.world // config.pp

    def speed(ranks, stride, adapters):
        one_machine = per_node % (ranks * stride) == 0 or config.world <= per_node
        return LINK * (gpu.link if one_machine else min(gpu.link, adapters * gpu.network))

    beside = max(1, per_node // tp)         # ranks of a machine with the same part of each matrix
    return dict(tp=speed(tp, 1, per_node), cp=speed(config.cp, tp, beside),
                ep=speed(config.ep, tp, beside), dp=speed(ranks_of_stage // tp, tp, beside),
                pp=speed(config.pp, ranks_of_stage, 1))


def product_seconds(config: PlanConfig, rows: float, columns: float, inner: float) -> float:
    """A matrix product (rows, inner) x (inner, columns). Each multiprocessor computes a tile of the
    result at a time, so that in the last wave of tiles half of them are idle, on average: narrow
    and short products are slow."""
    gpu = config.spec
    idle = 0.5 * gpu.processors * TILE
    return 2 * (rows * columns + idle) * inner / (gpu.products * gpu.peak(config.size))


def linear_seconds(stage: Stage, outputs: float, inputs: float) -> tuple[float, float, float]:
    """A linear layer's forward, the gradient of its input, and that of its weight."""
    config, rows = stage.config, stage.positions
    return (product_seconds(config, rows, outputs, inputs),
            product_seconds(config, rows, inputs, outputs),
            product_seconds(config, outputs, inputs, rows))


def pass_seconds(config: PlanConfig, numbers: float) -> float:
    """So many numbers of the activations cross memory."""
    seconds = config.size * numbers / config.spec.bandwidth
    return COMPILED * seconds if config.compile else seconds


class BlockTimes(NamedTuple):
    """Seconds of a block by what they go to, for one microbatch, without communication."""
    forward: dict
    backward: dict
    recomputed: dict    # once more in backward, with --recompute
    columns: list       # of qkv, and of a dense MLP's first matrix: (gradient of its input, own)


def block_seconds(stage: Stage) -> BlockTimes:
    config = stage.config
    cfg, C = stage.cfg, stage.cfg.n_embd
    queries, keys, hidden = (channels / config.tp for channels in (
        cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim, mlp_channels(cfg)))
    up = 2 * hidden if cfg.gated else hidden
    layers = [(queries + 2 * keys, C), (C, queries), (up, C), (C, hidden)]      # (outputs, inputs)
    forward, inputs, weights = zip(*(
        linear_seconds(stage, *layer) for layer in layers))
    columns = [0] if hasattr(cfg, "n_expert") else [0, 2]       # experts wait for their sum of dx
    scores = 4 * stage.positions * stage.cfg.seq_len * queries / (
        config.spec.attention * config.spec.peak(config.size))
    whole = queries if config.sequence_parallel else C
    passes = pass_seconds(config, stage.positions * (PASSES * queries + WHOLE_PASSES * whole))
    backward = 3 * scores if config.recomputes_attention else 2 * scores
    return BlockTimes(
        dict(matrices=sum(forward), attention=scores, passes=passes / 3),
        dict(matrices=sum(inputs + weights), attention=backward, passes=passes * 2 / 3),
        dict(matrices=sum(forward[:-1]), attention=scores, passes=passes / 3),
        [(inputs[layer], weights[layer]) for layer in columns])


class StageTimes(NamedTuple):
    """Seconds of a microbatch on a stage."""
    by_kind: dict       # forward and backward, by what they go to
    total: float        # their sum
    forward: float
    backward: float


def stage_seconds(stage: Stage, sent: dict) -> StageTimes:
    """`sent`: the stage's `traffic_bytes`."""
    config, layers, m = stage.config, stage.layers, stage.microbatches
    links = link_speeds(config)
    block = block_seconds(stage)
    seconds = {kind: layers * (block.forward[kind] + block.backward[kind])
               for kind in block.forward}
    rings, recomputed_rings = 8, 0              # an all-reduce is two
    if config.recompute:
        recomputed_rings = 2
        seconds = {kind: x + layers * block.recomputed[kind] for kind, x in seconds.items()}
    hops = dict(tp=HOP * (config.tp - 1) * layers * (rings + recomputed_rings),
                cp=HOP * (config.cp - 1) * layers * CONTEXT_RINGS, pp=0,
                ep=HOP * (config.ep - 1) * layers * 4)
    seconds |= {kind: sent[kind] / m / links[kind] + hops[kind] for kind in hops}
    forward = (layers * sum(block.forward.values()) + seconds["pp"] / 2
               + seconds["cp"] / CONTEXT_RINGS + seconds["ep"] / 2
               + seconds["tp"] * rings / 2 / (rings + recomputed_rings))
    once = ring(config.tp, stage.x * config.size) / links["tp"] + HOP * (config.tp - 1)
    seconds["tp"] -= layers * hidden_seconds(config, block, once)
    if stage.grid.is_last:      # the head's gradients come in forward; 8 passes through its logits
        vocab = stage.cfg.vocab_size / config.tp
        head = sum(linear_seconds(stage, vocab, stage.cfg.n_embd))
        passes = pass_seconds(config, 8 * stage.positions * vocab)
        seconds["matrices"] += head
        seconds["passes"] += passes
        forward += head + passes
    total = sum(seconds.values())
    return StageTimes(seconds, total, forward, total - forward)


def hidden_seconds(config: PlanConfig, block: BlockTimes, once: float) -> float:
    """Seconds of a block's tensor parallelism that are hidden, if x goes around the ring in `once`.
    In backward (parallel.ColumnProduct) the sum of dx, twice around, travels behind the gradient of
    the weight. Sequence parallelism sums in one ring, and gathers x in another, behind the product
    that is dx."""
    hidden = 0.0
    for of_input, of_weight in block.columns:
        if config.sequence_parallel:
            hidden += 2 * once - exposed(once, of_input) - exposed(once, of_weight)
        else:
            hidden += 2 * once - exposed(2 * once, of_weight)
    return hidden


def pipeline_seconds(config: PlanConfig, stages: list[StageTimes], m: int) -> float:
    """The time of m microbatches through all stages. GPipe: the slowest stage works, the others add
    their time once, forward and backward. 1F1B: a stage starts when the first microbatch reaches
    it, and waits for its first and last backward, from all stages behind it, if the forwards (or
    backwards) that it has to do meanwhile are shorter. Interleaved, with chunks that take equally
    long: simulated."""
    p, chunks = len(stages), config.pp_chunks
    if config.pp_schedule == "interleaved":
        return simulated_seconds(chunks, m, tuple(
            (s.forward / chunks, s.backward / chunks) for s in stages))
    forward, backward = [s.forward for s in stages], [s.backward for s in stages]
    if config.pp_schedule == "gpipe":
        return sum(sum(times) + (m - 1) * max(times) for times in (forward, backward))
    both = [f + b for f, b in zip(forward, backward)]
    ends = []
    for s in range(max(0, p - m), p):
        behind = sum(both[s + 1:])
        waits = sum(max(0.0, behind - (p - 1 - s) * times[s]) for times in (forward, backward))
        ends.append(sum(both[:s]) + m * both[s] + waits)
    return max(ends)


@lru_cache          # a search asks for the same with each ZeRO stage
def simulated_seconds(chunks: int, m: int, times: tuple) -> float:
    """Seconds of m microbatches, interleaved; `times`: those of F and B on each stage."""
    p = len(times)
    ops = [interleaved(stage, p, m, chunks) for stage in range(p)]
    rows = clock(ops, [dict(zip("FB", of_stage)) for of_stage in times])
    return max(end for row in rows for _, end in row.values())


def exposed(traffic: float, hidden: float) -> float:
    """What traffic adds to a step if computation hides so many seconds of it. What is hidden takes
    memory and multiprocessors from the computation."""
    return max(SHARE * traffic, traffic - hidden)


def exposed_seconds(stage: Stage, sent: dict, slowest: StageTimes) -> float:
    """What data parallelism adds to a step, behind the slowest stage. ZeRO 0 and 1 send gradients
    during the last backward, 2 during all, 3 during forward and backward. ZeRO 1 and 2 gather
    parameters during the first forward."""
    links = link_speeds(stage.config)
    m, zero = stage.microbatches, stage.config.zero
    hops = HOP * (stage.grid.replicas - 1) * (2 * stage.layers + 2)     # once around, all buckets
    gradients = sent["gradients"] / links["dp"] + hops * gradient_rings(stage)
    embedding = sent["embedding"] / links["pp"]
    gathers = sent["parameters"] / links["dp"]
    if zero == 3:
        gathers += hops * 2 * m
        return embedding + exposed(gradients + gathers, m * slowest.total)
    if zero > 0:
        gathers = exposed(gathers + hops, slowest.forward)
    hidden = slowest.backward
    if zero == 2:
        hidden *= m
    return embedding + gathers + exposed(gradients, hidden)


def step_seconds(stages: list[Stage], kinds: list, sent: list) -> tuple[dict, float]:
    """Seconds of a step by what they go to, which add up, and the bubble: the idle fraction of the
    stages until the last backward. `kinds_of_stages`, and the `traffic_bytes` of each kind."""
    config, m = stages[0].config, stages[0].microbatches
    times = [stage_seconds(stage, out) for stage, out in zip(stages, sent)]
    slowest = max(times, key=lambda stage: stage.total)
    span = m * slowest.total            # of one stage, exactly
    if config.pp > 1:
        span = pipeline_seconds(config, [times[k] for k in kinds], m)
    dp = max(exposed_seconds(stage, out, slowest) for stage, out in zip(stages, sent))
    # AdamW reads or writes about twelve numbers for each parameter.
    numel = stages[0].numel
    if config.zero > 0:
        numel = sum(count * bucket.numel / bucket.num_ranks for bucket, count in stages[0].buckets)
    memory_speed = config.spec.host if config.offload else config.spec.bandwidth
    update = 12 * config.master_size * numel / memory_speed
    seconds = {kind: m * x for kind, x in slowest.by_kind.items()}
    seconds |= dict(fill=span - m * slowest.total, dp=dp, update=update)
    return seconds, 1 - m * sum(times[k].total for k in kinds) / (config.pp * span)
