"""Bytes that a rank sends in a step, by kind. (The tests compare them with those of real runs.)"""
from model import ceil_div
from tools.plan.memory import Stage

INTEGER = 8             # bytes of a count, or of the number of an expert
CONTEXT_RINGS = 3       # K and V go around in forward and in backward, their gradients once


def ring(ranks: int, nbytes: float) -> float:
    """Bytes that each rank sends in a reduce-scatter or all-gather; an all-reduce sends twice as
    many."""
    return (ranks - 1) * nbytes / ranks


def gradient_rings(stage: Stage) -> int:
    """How often a step's gradients go around the ring of replicas, by the stage of ZeRO: an
    all-reduce, a reduce-scatter, and a reduce-scatter of every microbatch."""
    return (2, 1, stage.microbatches, stage.microbatches)[stage.config.zero]


def traffic_bytes(stage: Stage) -> dict:
    """Bytes that this rank sends in a step, by kind:

        tp          `tensor_parallel_bytes`; of mixtures also `tensor_parallel_bytes_of_experts`
        cp          K and V of a block, (B, T, K D / tp), forward and again in backward; the sum of
                    their gradients; of mixtures how many tokens chose each expert, (B, E) integers
        pp          1 / tp of x (B, T / cp, C) forward, of its gradient backward, of each chunk
        ep          K rows of C numbers for each position, to the experts and back, forward and
                    backward, from each tp rank all of them, and forward E integers before them;
                    recomputation sends what forward does once more
        gradients   `gradient_rings`, those of experts among the ranks that have the same ones
        parameters  ZeRO 1, 2: an all-gather; 3: for each microbatch one forward and another
                    backward, where the ends and the last block are still there
        embedding   the tied matrix's gradient, between the first stage and the last
        world       five numbers in float64 that all ranks agree on; of mixtures also the loads
                    of the experts, and the routers' losses
    """
    config, grid = stage.config, stage.grid
    m = stage.microbatches
    of_head = sum(bucket.numel for bucket, _ in stage.buckets if bucket.name in ("tied", "head"))

    of_experts = sum(bucket.numel * count for bucket, count in stage.buckets
                     if bucket.group == "same_experts")
    gradients = gradient_rings(stage) * (stage.numel - of_experts)
    if config.zero == 2 and grid.is_last and grid.pp > 1 and config.pp_schedule == "gpipe":
        gradients -= (m - 1) * of_head          # GPipe's forwards add up all of the head's
    gradients_of_experts = gradient_rings(stage) * of_experts
    same_experts = grid.replicas // grid.ep

    messages = 2 * grid.chunks - grid.is_first - grid.is_last
    message = stage.x * config.size
    tp = tensor_parallel_bytes(stage)
    if not grid.sequence_parallel:
        tp += m * messages * ring(grid.tp, message)         # the receivers gather it
    statistics = 5
    counts, ep = 0, 0
    if hasattr(stage.cfg, "n_expert"):
        statistics += stage.cfg.n_layer * (stage.cfg.n_expert + 1)
        counts = forwards(stage) * config.micro_batch * stage.cfg.n_expert * INTEGER
        tp += tensor_parallel_bytes_of_experts(stage)
    if grid.ep > 1:
        trips = 2 * (forwards(stage) + m * stage.layers)    # of a row, if all are used alike
        numbers = trips * stage.cfg.n_active * stage.positions * stage.cfg.n_embd
        integers = forwards(stage) * stage.cfg.n_expert
        ep = ring(grid.ep, numbers * config.size + integers * INTEGER)
    embedding = 0
    if grid.pp > 1 and stage.buckets[0][0].name == "tied":
        embedding = config.master_size * stage.buckets[0][0].numel
        if config.zero > 0:
            embedding /= grid.replicas
    rings = CONTEXT_RINGS * stage.layers
    cp = m * rings * ring(grid.cp, config.size * stage.keys_and_values) + 2 * ring(grid.cp, counts)
    return dict(tp=tp, cp=cp, pp=m * messages * message / grid.tp, ep=ep,
                gradients=(ring(grid.replicas, config.master_size * gradients)
                           + ring(same_experts, config.master_size * gradients_of_experts)),
                parameters=(ring(grid.replicas, gathered_bytes(stage, "replicas"))
                            + ring(same_experts, gathered_bytes(stage, "same_experts"))),
                embedding=embedding, world=2 * ring(grid.world, 8 * statistics))


def gathered_bytes(stage: Stage, group: str) -> int:
    """Bytes of the parameters that the ranks of this group gather in a step."""
    config = stage.config
    sizes = [(bucket.numel * (config.master_size if bucket.is_wide else config.size), count)
             for bucket, count in stage.buckets if bucket.group == group]
    total = sum(count * nbytes for nbytes, count in sizes)
    once = sum(nbytes for nbytes, _ in sizes)       # of the ends and the last block
    if config.zero == 3:
        return stage.microbatches * (2 * total - once)
    return total if config.zero > 0 else 0


def forwards(stage: Stage) -> int:
    """How many forwards of a block this rank computes in a step, with those of recomputation."""
    return stage.microbatches * stage.layers * (2 if stage.config.recompute else 1)


def tensor_parallel_bytes_of_experts(stage: Stage) -> float:
    """What a mixture adds to `tensor_parallel_bytes`:

        choice      an all-reduce of (B, T / cp, K) integers. Sequence parallelism: a gather, and
                    an all-reduce of how many tokens chose each expert, (B, E) integers
        weights     the sum of their gradients, (B, T / cp, K). Sequence parallelism also gathers
                    them forward; it does not gather the experts' input again in backward
        shared      2 all-reduces of x (B, T / cp, C); recomputation: 1 more; sequence parallelism
                    gathers the input of a matrix again
    """
    cfg, config, grid = stage.cfg, stage.config, stage.grid
    once = stage.microbatches * stage.layers
    again = forwards(stage)                     # with those of recomputation
    numbers = stage.positions * cfg.n_active
    x = stage.x * config.size
    total = 0
    if grid.sequence_parallel:
        total += again * ring(grid.tp, numbers * (INTEGER + config.size))
        total += once * ring(grid.tp, numbers * config.size)
        total += 2 * again * ring(grid.tp, config.micro_batch * cfg.n_expert * INTEGER)
        total -= once * ring(grid.tp, x)
    else:
        total += 2 * again * ring(grid.tp, numbers * INTEGER)
        total += 2 * once * ring(grid.tp, numbers * config.size)
    if cfg.shared_hidden > 0:
        total += 2 * (once + again) * ring(grid.tp, x)
        if grid.sequence_parallel:
            total += once * ring(grid.tp, x)
    return total


def tensor_parallel_bytes(stage: Stage) -> float:
    """Of a block 4 all-reduces of x (B, T / cp, C), each of two rings, and with recomputation 1
    more; sequence parallelism gathers the input of 2 matrices again, of 3 with recomputation. An
    all-reduce of the embedding, and one of the head; 3 numbers a position for the loss. Sequence
    parallelism: the gradients of what is replicated are summed; without it, of norms of heads
    alone. A norm over all heads of q, or of k, sums a number for each position, and its gradient.
    Ranks that share a head of k and v exchange them (B, T / cp, 2 D) and their gradients, and of a
    norm over all heads its D weights."""
    config, grid = stage.config, stage.grid
    of_block = 10 if config.recompute else 8
    if grid.sequence_parallel:
        of_block += 3 if config.recompute else 2
    rings = of_block * stage.layers + 2 * grid.is_first + 2 * grid.is_last
    per_microbatch = rings * ring(grid.tp, stage.x * config.size)
    if grid.is_last:
        per_microbatch += 2 * ring(grid.tp, 3 * config.master_size * stage.positions)
    total = stage.microbatches * per_microbatch
    exchanges = stage.microbatches * stage.layers + forwards(stage)
    channels = stage.sharing * ceil_div(2 * stage.cfg.head_dim, stage.sharing)      # padded
    exchanged = stage.positions * channels
    if getattr(stage.cfg, "norm_all_heads", False):
        total += 2 * 2 * exchanges * ring(grid.tp, stage.positions * config.master_size)
        exchanged += stage.cfg.head_dim
    total += exchanges * ring(stage.sharing, exchanged * config.size)
    replicated = 0
    for bucket, count in stage.buckets:
        for spec, shard_slice, _ in bucket.shard_ranges:
            if spec.partition_dim is None and (
                    grid.sequence_parallel or spec.grad_covers_own_heads):
                replicated += count * (shard_slice.stop - shard_slice.start)
    return total + 2 * ring(grid.tp, config.master_size * replicated)
