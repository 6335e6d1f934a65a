"""Bytes that a rank sends in a step."""
from amp import PRECISIONS
from model import GPTConfig
from parallel import Grid
from tools.plan.flags import PlanConfig
from tools.plan.stages import (keys_and_values, layers_of, microbatches, numbers_between_blocks,
                               numel_of, stage_buckets)

CONTEXT_RINGS = 3       # K and V go around in forward and in backward, their gradients once


def ring(ranks: int, nbytes: float) -> float:
    """Bytes that each rank sends in a reduce-scatter or all-gather; an all-reduce sends twice as
    many."""
    return (ranks - 1) * nbytes / ranks


def gradient_rings(zero: int, m: int) -> int:
    """How often a step's gradients go around the ring of replicas."""
    if zero == 0:
        return 2            # all-reduce
    if zero == 1:
        return 1            # reduce-scatter
    return m                # reduce-scatter of every microbatch


def traffic_bytes(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> dict:
    """Bytes that this rank sends in a step, by kind:

        tp          see `tensor_parallel_bytes`
        cp          K and V of a block, (B, T, C / tp), forward and again in backward; the sum of
                    their gradients
        pp          1 / tp of x (B, T / cp, C) forward, of its gradient backward, of each chunk
        gradients   `gradient_rings`
        parameters  ZeRO 1, 2: an all-gather; 3: for each microbatch one forward and another
                    backward, where the ends and the last block are still there
        embedding   the tied matrix's gradient, between the first stage and the last
        world       five numbers in float64 that all ranks agree on
    """
    size, master_size = (dtype.itemsize for dtype in PRECISIONS[config.dtype])
    m = microbatches(config, grid)
    zero = config.zero
    buckets = stage_buckets(cfg, grid, zero)
    numel = numel_of(buckets)
    tied = buckets[0][0].numel                  # on the stages at the ends

    gradients = gradient_rings(zero, m) * numel
    if zero == 2 and grid.is_last and grid.pp > 1 and config.pp_schedule == "gpipe":
        gradients -= (m - 1) * tied             # GPipe's forwards add up all of the head's
    parameters = 0
    if zero in (1, 2):
        parameters = numel
    if zero == 3:
        parameters = m * (2 * numel - sum(bucket.numel for bucket, _ in buckets))

    messages = 2 * grid.chunks - grid.is_first - grid.is_last
    message = numbers_between_blocks(cfg, grid, config) * size
    tp = tensor_parallel_bytes(cfg, grid, config, buckets)
    if not grid.sequence_parallel:
        tp += m * messages * ring(grid.tp, message)         # the receivers gather it
    embedding = 0
    if grid.pp > 1 and (grid.is_first or grid.is_last):
        embedding = master_size * tied
        if zero > 0:
            embedding /= grid.replicas
    rings = CONTEXT_RINGS * layers_of(cfg, grid)
    cp = m * rings * ring(grid.cp, size * keys_and_values(cfg, grid, config))
    return dict(tp=tp, cp=cp, pp=m * messages * message / grid.tp,
                gradients=ring(grid.replicas, master_size * gradients),
                parameters=ring(grid.replicas, size * parameters), embedding=embedding,
                world=2 * ring(grid.world, 5 * 8))


def tensor_parallel_bytes(cfg: GPTConfig, grid: Grid, config: PlanConfig, buckets: list) -> float:
    """4 all-reduces of x (B, T / cp, C) a block, 1 of the embedding, 1 of the head; 3 numbers a
    position for the loss. Recomputation: 1 more a block. Sequence parallelism: the input of 2
    matrices is gathered again (of 3 with recomputation), and the gradients of what is replicated
    are summed."""
    size, master_size = (dtype.itemsize for dtype in PRECISIONS[config.dtype])
    positions = config.micro_batch * cfg.seq_len // grid.cp
    per_block = 8                               # rings: an all-reduce is two
    if config.recompute:
        per_block += 2
    if grid.sequence_parallel:
        per_block += 3 if config.recompute else 2
    rings = per_block * layers_of(cfg, grid) + 2 * grid.is_first + 2 * grid.is_last
    per_microbatch = rings * ring(grid.tp, positions * cfg.n_embd * size)
    if grid.is_last:
        per_microbatch += 2 * ring(grid.tp, 3 * master_size * positions)
    total = microbatches(config, grid) * per_microbatch
    if grid.sequence_parallel:
        replicated = 0
        for bucket, count in buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                if spec.partition_dim is None:
                    replicated += count * (shard_slice.stop - shard_slice.start)
        total += 2 * ring(grid.tp, master_size * replicated)
    return total
