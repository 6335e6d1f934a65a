"""Seconds of a step."""
from typing import NamedTuple

from amp import PRECISIONS
from model import GPTConfig
from parallel import Grid
from parallelism.schedules import SCHEDULES
from tools.plan.flags import PlanConfig, gpu_of
from tools.plan.gpus import GPUSpec
from tools.plan.stages import layers_of, microbatches, numel_of, stage_buckets
from tools.plan.traffic import CONTEXT_RINGS, gradient_rings
from tools.schedule import clock

# Fitted on 209 published steps (tests/published_steps.py says which, and the error without each):
PASSES = 93             # times that (B, T, C / tp) numbers cross memory in the rest of a block
LINK = 0.55             # fraction of a link's speed that collectives and messages reach
SHARE = 0.32            # fraction of hidden traffic's time that it takes from what hides it
# Counted, or from the makers' descriptions:
WHOLE_PASSES = 20       # the same of (B, T, C): norms and residual sums, / tp if sequence-parallel
TILE = 128 * 256        # outputs of a matrix product that a multiprocessor computes at a time
HOP = 5e-6              # seconds that each rank of a ring adds (NCCL's tuning: 3 to 14 us)
# Measured: GPT-2 124M on an H100 is 1.09 times as fast with --compile.
COMPILED = 0.6          # fraction of PASSES and WHOLE_PASSES that --compile leaves


def recomputes_attention(config: PlanConfig) -> bool:
    """Whether backward computes attention once more, and nothing else of a block (CP3)."""
    return config.cp > 1 and not config.recompute


class Links(NamedTuple):
    """Bytes per second between the ranks of a group."""
    tensor: float
    context: float
    pipeline: float
    data: float


def link_speeds(config: PlanConfig) -> Links:
    """NVLink where a group's ranks share a machine. What leaves a machine uses an adapter for each
    of the group's ranks in it."""
    gpu = gpu_of(config)
    per_node, tp, pp, cp = config.gpus_per_node, config.tp, config.pp, config.cp

    def speed(ranks, stride, adapters):
        one_machine = per_node % (ranks * stride) == 0 or config.world <= per_node
        return LINK * (gpu.link if one_machine else min(gpu.link, adapters * gpu.network))

    replicas = config.world // (tp * pp)
    beside = max(1, per_node // tp)         # ranks of a machine with the same part of each matrix
    context = speed(cp, tp, beside)
    data = context
    if replicas > cp:
        data = speed(replicas, tp * pp, max(beside // pp, min(beside, cp)))
    return Links(speed(tp, 1, per_node), context, speed(pp, cp * tp, 1), data)


def product_seconds(gpu: GPUSpec, size: int, rows: int, columns: float, inner: float) -> float:
    """A matrix product (rows, inner) x (inner, columns). Each multiprocessor computes a tile of the
    result at a time, so that in the last wave of tiles half of them are idle, on average: narrow
    and short products are slow."""
    idle = 0.5 * gpu.processors * TILE
    return 2 * (rows * columns + idle) * inner / (gpu.products * gpu.peak(size))


def linear_seconds(gpu: GPUSpec, size: int, positions: int, outputs: float,
                   inputs: float) -> tuple[float, float, float]:
    """A linear layer's forward, the gradient of its input, and that of its weight."""
    return (product_seconds(gpu, size, positions, outputs, inputs),
            product_seconds(gpu, size, positions, inputs, outputs),
            product_seconds(gpu, size, outputs, inputs, positions))


class BlockTimes(NamedTuple):
    """Seconds of a block by what they go to, for one microbatch, without communication."""
    forward: dict
    backward: dict
    recomputed: dict    # once more in backward, with --recompute
    weights: float      # of backward: the products that are gradients of matrices


def block_seconds(cfg: GPTConfig, config: PlanConfig) -> BlockTimes:
    gpu = gpu_of(config)
    size = PRECISIONS[config.dtype][0].itemsize
    positions = config.micro_batch * cfg.seq_len / config.cp
    own = cfg.n_embd / config.tp                                        # channels
    C = cfg.n_embd
    layers = [(3 * own, C), (C, own), (4 * own, C), (C, 4 * own)]       # (outputs, inputs)
    forward, inputs, weights = zip(*(linear_seconds(gpu, size, positions, *layer)
                                     for layer in layers))
    scores = 4 * positions * cfg.seq_len * own / (gpu.attention * gpu.peak(size))
    whole = own if config.sequence_parallel else cfg.n_embd
    passes = positions * size * (PASSES * own + WHOLE_PASSES * whole) / gpu.bandwidth
    if config.compile:
        passes *= COMPILED
    backward = 3 * scores if recomputes_attention(config) else 2 * scores
    return BlockTimes(
        dict(matrices=sum(forward), attention=scores, passes=passes / 3),
        dict(matrices=sum(inputs + weights), attention=backward, passes=passes * 2 / 3),
        dict(matrices=sum(forward[:-1]), attention=scores, passes=passes / 3), sum(weights))


def microbatch_seconds(cfg: GPTConfig, config: PlanConfig, grid: Grid,
                       sent: dict) -> tuple[dict, float, float]:
    """(seconds of a microbatch on this stage, forward and backward, by what they go to; seconds of
    its forward alone; of the products that are the gradients of the blocks' matrices)"""
    gpu = gpu_of(config)
    size = PRECISIONS[config.dtype][0].itemsize
    links = link_speeds(config)
    m = microbatches(config, grid)
    layers = layers_of(cfg, grid)
    block = block_seconds(cfg, config)
    seconds = {kind: layers * (block.forward[kind] + block.backward[kind])
               for kind in block.forward}
    rings, recomputed_rings = 8, 0              # an all-reduce is two
    if config.recompute:
        recomputed_rings = 2
        seconds = {kind: x + layers * block.recomputed[kind] for kind, x in seconds.items()}
    hops = HOP * (config.tp - 1) * layers * (rings + recomputed_rings)
    context_hops = HOP * (config.cp - 1) * layers * CONTEXT_RINGS
    seconds |= dict(tp=sent["tp"] / m / links.tensor + hops,
                    cp=sent["cp"] / m / links.context + context_hops,
                    pp=sent["pp"] / m / links.pipeline)
    forward = (layers * sum(block.forward.values()) + seconds["pp"] / 2
               + seconds["cp"] / CONTEXT_RINGS
               + seconds["tp"] * rings / 2 / (rings + recomputed_rings))
    if grid.is_last:        # the head's gradients come in forward; 8 passes through its logits
        positions = config.micro_batch * cfg.seq_len / config.cp
        vocab = cfg.vocab_size / config.tp
        head = sum(linear_seconds(gpu, size, positions, vocab, cfg.n_embd))
        passes = 8 * size * positions * vocab / gpu.bandwidth
        seconds["matrices"] += head
        seconds["passes"] += passes
        forward += head + passes
    return seconds, forward, layers * block.weights


def pipeline_seconds(schedule: str, forward: list, backward: list, weights: list, m: int,
                     chunks: int) -> float:
    """The time of m microbatches through stages that take so long for one. GPipe: the slowest stage
    works, the others add their time once, forward and backward. 1F1B: a stage starts when the first
    microbatch reaches it, and waits for its first and last backward, from all stages behind it,
    if the forwards (or backwards) that it has to do meanwhile are shorter. Interleaved, with chunks
    that take equally long, and ZB-H1, whose W takes `weights` of backward: simulated."""
    if schedule in ("interleaved", "zb-h1"):
        stages = range(len(forward))
        units = [dict(F=f / chunks, B=b / chunks) for f, b in zip(forward, backward)]
        if schedule == "zb-h1":
            units = [dict(F=f, B=b - w, W=w) for f, b, w in zip(forward, backward, weights)]
        times = clock([SCHEDULES[schedule](s, len(stages), m, chunks) for s in stages], units)
        return max(end for row in times for _, end in row.values())
    if schedule == "gpipe":
        return sum(sum(times) + (m - 1) * max(times) for times in (forward, backward))
    both = [f + b for f, b in zip(forward, backward)]
    p = len(forward)
    ends = []
    for s in range(max(0, p - m), p):
        behind = sum(both[s + 1:])
        waits = sum(max(0.0, behind - (p - 1 - s) * times[s]) for times in (forward, backward))
        ends.append(sum(both[:s]) + m * both[s] + waits)
    return max(ends)


def exposed(traffic: float, hidden: float) -> float:
    """What traffic adds to a step if computation hides so many seconds of it. What is hidden takes
    memory and multiprocessors from the computation."""
    return max(SHARE * traffic, traffic - hidden)


def exposed_seconds(cfg: GPTConfig, config: PlanConfig, grid: Grid, sent: dict, microbatch: float,
                    forward: float, backward: float) -> float:
    """What data parallelism adds to a step. Of the slowest stage, the times of a microbatch, of its
    forward and of its backward (ZB-H1: its W). ZeRO 0 and 1 send gradients during the last
    backward, 2 during all, 3 during forward and backward. ZeRO 1 and 2 gather parameters during the
    first forward."""
    links = link_speeds(config)
    m = microbatches(config, grid)
    zero = config.zero
    hops = HOP * (grid.replicas - 1) * (2 * layers_of(cfg, grid) + 2)   # once around, all buckets
    gradients = sent["gradients"] / links.data + hops * gradient_rings(zero, m)
    embedding = sent["embedding"] / links.pipeline
    gathers = sent["parameters"] / links.data
    if zero == 3:
        gathers += hops * 2 * m
        return embedding + exposed(gradients + gathers, m * microbatch)
    if zero > 0:
        gathers = exposed(gathers + hops, forward)
    hidden = m * backward if zero == 2 else backward
    return embedding + gathers + exposed(gradients, hidden)


def step_seconds(cfg: GPTConfig, config: PlanConfig, grids: list, kinds: list,
                 sent: list) -> tuple[dict, float]:
    """Seconds of a step by what they go to, which add up, and the bubble: the idle fraction of the
    stages until the last backward. `kinds_of_stages`, and the `traffic_bytes` of each kind."""
    gpu = gpu_of(config)
    m = microbatches(config, grids[0])
    costs, forward, weights = zip(*(microbatch_seconds(cfg, config, grid, out)
                                    for grid, out in zip(grids, sent)))
    both = [sum(cost.values()) for cost in costs]
    backward = [t - f for t, f in zip(both, forward)]
    slowest = both.index(max(both))
    span = m * both[slowest]            # of one stage, exactly
    if config.pp > 1:
        span = pipeline_seconds(config.pp_schedule, [forward[k] for k in kinds],
                                [backward[k] for k in kinds], [weights[k] for k in kinds], m,
                                config.pp_chunks)
    hiding = weights if config.pp_schedule == "zb-h1" else backward
    exposed = max(exposed_seconds(cfg, config, grid, out, both[slowest], forward[slowest],
                                  hiding[slowest]) for grid, out in zip(grids, sent))
    # AdamW reads or writes about twelve numbers for each parameter.
    numel = numel_of(stage_buckets(cfg, grids[0], config.zero))
    if config.zero > 0:
        numel /= grids[0].replicas
    memory_speed = gpu.host if config.offload else gpu.bandwidth
    update = 12 * PRECISIONS[config.dtype][1].itemsize * numel / memory_speed
    seconds = {kind: m * x for kind, x in costs[slowest].items()}
    seconds |= dict(fill=span - m * both[slowest], dp=exposed, update=update)
    return seconds, 1 - m * sum(both[k] for k in kinds) / (config.pp * span)
