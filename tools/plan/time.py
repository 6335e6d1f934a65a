"""Seconds of a step."""
from base.flops import mlp_channels
from tools.plan.flags import PlanConfig
from tools.plan.memory import Stage
from tools.plan.traffic import CONTEXT_RINGS, gradient_rings

# Fitted, as AMPERE is, on published steps of programs with FlashAttention on A100s:
PASSES = 100            # times that x (B, T, C) crosses memory in the rest of a block, / tp if
                        # sequence-parallel: also what narrow products cost more than TILE says
SHARE = 0.3             # fraction of hidden traffic's time that it takes from what hides it
# From the makers' descriptions:
TILE = 128 * 256        # outputs of a matrix product that a multiprocessor computes at a time
HOP = 5e-6              # seconds that each rank of a ring adds (NCCL's tuning: 3 to 14 us)
# Fitted, with HOPPER's products, on our own GPT-2 124M on an H100: 449,000 and 350,000 tokens per
# second, with --compile and without. (A Llama on an H200, with it, is then 0.2% off.)
COMPILED = 0.2          # fraction of the time of passes that --compile leaves, the loss's too


def link_speeds(config: PlanConfig) -> dict[str, float]:
    """Bytes per second between the ranks of a group of tp, cp, ep, pp, and of replicas (dp), in the
    order of parallel.Grid: NVLink where they share a machine. What leaves a machine uses an adapter
    for each of them in it, and a message between stages that of its rank alone."""
    gpu = config.spec
    per_node, tp = config.gpus_per_node, config.tp
    ranks_of_stage = config.world // config.pp

    def speed(ranks, stride, adapters):
        one_machine = per_node % (ranks * stride) == 0 or config.world <= per_node
        link = gpu.on_link * gpu.link
        return link if one_machine else min(link, gpu.on_network * adapters * gpu.network)

    beside = max(1, per_node // tp)         # ranks of a machine with the same part of each matrix
    return dict(tp=speed(tp, 1, per_node), cp=speed(config.cp, tp, beside),
                ep=speed(config.ep, tp, beside), dp=speed(ranks_of_stage // tp, tp, beside),
                pp=speed(config.pp, ranks_of_stage, 1))


def linear_seconds(stage: Stage, outputs: float, inputs: float) -> list[float]:
    """A linear layer's forward, the gradient of its input, and that of its weight. Each
    multiprocessor computes a tile of a product at a time, so that in the last wave of tiles half of
    them are idle, on average: narrow and short products are slow."""
    gpu, rows = stage.config.spec, stage.positions
    idle = 0.5 * gpu.processors * TILE
    rate = gpu.products * gpu.peak(stage.config.size)
    products = [(rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows)]
    return [2 * (height * width + idle) * inner / rate for height, width, inner in products]


def pass_seconds(config: PlanConfig, numbers: float) -> float:
    """So many numbers of the activations cross memory."""
    seconds = config.size * numbers / config.spec.bandwidth
    return COMPILED * seconds if config.compile else seconds


def block_seconds(stage: Stage) -> dict:
    """Seconds of a block by what they go to, for one microbatch, forward and backward, without
    communication."""
    config = stage.config
    cfg, C = stage.cfg, stage.cfg.n_embd
    queries, keys, hidden = (channels / config.tp for channels in (
        cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim, mlp_channels(cfg)))
    up = 2 * hidden if cfg.gated else hidden
    layers = [(queries + 2 * keys, C), (C, queries), (up, C), (C, hidden)]      # (outputs, inputs)
    products = [linear_seconds(stage, *layer) for layer in layers]
    matrices = sum(map(sum, products))
    scores = 4 * stage.positions * cfg.seq_len * queries / (
        config.spec.attention * config.spec.peak(config.size))
    attention = 3 * scores
    passes = pass_seconds(config, PASSES * stage.own_x)
    if config.recompute:                    # forward once more, but for the last product
        matrices += sum(forward for forward, _, _ in products[:-1])
        passes *= 4 / 3
    if config.recompute or config.recomputes_attention:
        attention += scores
    return dict(matrices=matrices, attention=attention, passes=passes)


def stage_seconds(stage: Stage, sent: dict) -> dict:
    """Seconds of a microbatch on a stage, by what they go to; `sent`: its `traffic_bytes`."""
    config, layers = stage.config, stage.layers
    links = link_speeds(config)
    seconds = {kind: layers * x for kind, x in block_seconds(stage).items()}
    rings = dict(tp=10 if config.recompute else 8, cp=CONTEXT_RINGS, pp=0, ep=4)    # of a block
    for kind, times in rings.items():
        hops = HOP * (getattr(config, kind) - 1) * layers * times
        seconds[kind] = sent[kind] / stage.microbatches / links[kind] + hops
    if stage.grid.is_last:                  # 8 passes through the logits
        vocab = stage.cfg.vocab_size / config.tp
        seconds["matrices"] += sum(linear_seconds(stage, vocab, stage.cfg.n_embd))
        seconds["passes"] += pass_seconds(config, 8 * stage.positions * vocab)
    return seconds


def exposed(traffic: float, hidden: float) -> float:
    """What traffic adds to a step if computation hides so many seconds of it. What is hidden takes
    memory and multiprocessors from the computation."""
    return max(SHARE * traffic, traffic - hidden)


def exposed_seconds(stage: Stage, sent: dict, computing: float) -> float:
    """What data parallelism adds to a step, behind `computing` seconds of a microbatch on the
    slowest stage. ZeRO 0 and 1 send gradients during the last backward, 2 during all, 3 during
    forward and backward. ZeRO 1 and 2 gather parameters during the first forward."""
    links = link_speeds(stage.config)
    m, zero = stage.microbatches, stage.config.zero
    hops = HOP * (stage.grid.replicas - 1) * (2 * stage.layers + 2)     # once around, all buckets
    gradients = sent["gradients"] / links["dp"] + hops * gradient_rings(stage)
    embedding = sent["embedding"] / links["pp"]
    gathers = sent["parameters"] / links["dp"]
    if zero == 3:
        gathers += hops * 2 * m
        return embedding + exposed(gradients + gathers, m * computing)
    forward = computing / (4 if stage.config.recompute else 3)
    if zero > 0:
        gathers = exposed(gathers + hops, forward)
    backwards = m if zero == 2 else 1
    return embedding + gathers + exposed(gradients, backwards * (computing - forward))


def step_seconds(stages: list[Stage], kinds: list, sent: list) -> tuple[dict, float]:
    """Seconds of a step by what they go to, which add up, and the bubble: the idle fraction of the
    stages until the last backward. `kinds_of_stages`, and the `traffic_bytes` of each kind.

    The slowest stage works, and waits for one microbatch of the others (interleaved: for one chunk
    of it)."""
    config, m = stages[0].config, stages[0].microbatches
    of_stages = [stage_seconds(stage, out) for stage, out in zip(stages, sent)]
    totals = [sum(seconds.values()) for seconds in of_stages]
    slowest = max(totals)
    of_all = sum(totals[kind] for kind in kinds)
    fill = (of_all - slowest) / config.pp_chunks
    seconds = {kind: m * x for kind, x in of_stages[totals.index(slowest)].items()}
    dp = max(exposed_seconds(stage, out, slowest) for stage, out in zip(stages, sent))
    # AdamW reads or writes about twelve numbers for each parameter.
    numel = stages[0].numel
    if config.zero > 0:
        numel = sum(count * bucket.numel / bucket.num_ranks for bucket, count in stages[0].buckets)
    memory_speed = config.spec.host if config.offload else config.spec.bandwidth
    update = 12 * config.master_size * numel / memory_speed
    bubble = 1 - m * of_all / (config.pp * (m * slowest + fill))
    return seconds | dict(fill=fill, dp=dp, update=update), bubble
