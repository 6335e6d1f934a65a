"""Memory of a rank."""
from itertools import accumulate

from amp import PRECISIONS
from model import GPTConfig
from parallel import Grid
from parallelism.schedules import make_schedule
from parallelism.tensor import chunk_size
from parallelism.zero import state_bytes
from tools.plan.flags import PlanConfig
from tools.plan.stages import (keys_and_values, kept_by_mlp, layers_of, microbatches,
                               numbers_between_blocks, numel_of, stage_buckets)
from tools.schedule import live_activations


def memory_bytes(cfg: GPTConfig, grid: Grid, config: PlanConfig, on_gpu: bool = True) -> dict:
    """Peak memory of this rank in bytes, by kind; what --offload keeps on the host has the prefix
    host_. `state_bytes` is exact; buffers, logits and activations are estimates."""
    dtypes = PRECISIONS[config.dtype]
    buckets = stage_buckets(cfg, grid, config.zero)
    longest = max(bucket.numel for bucket, _ in buckets)
    sizes, on_host = state_bytes(numel_of(buckets), longest, grid.replicas, dtypes,
                                 config.zero, config.offload and on_gpu)
    sizes |= {f"host_{kind}": size for kind, size in on_host.items()}
    return sizes | dict(buffers=buffer_bytes(cfg, grid, config, on_gpu),
                        logits=logits_bytes(cfg, grid, config, on_gpu),
                        activations=activation_bytes(cfg, grid, config))


def buffer_bytes(cfg: GPTConfig, grid: Grid, config: PlanConfig, on_gpu: bool) -> int:
    """What comes and goes within a step:

        ZeRO 2, 3   gradients of the ends and a block
        ZeRO 3      parameters of the ends and two blocks, gathered
        ZeRO 1 - 3  on the CPU, slices of one bucket that arrive from the other replicas
        pipeline    a message that comes, another that leaves
        context     of one block the K and V of all positions, their gradients, and these in slices;
                    by then backward has freed what its MLP kept
    """
    size, master_size = (dtype.itemsize for dtype in PRECISIONS[config.dtype])
    once = [bucket.numel for bucket, _ in stage_buckets(cfg, grid, config.zero)]
    total = 0
    if config.zero >= 2:
        total += master_size * sum(once)
    if config.zero == 3:
        total += size * sum(once + once[-2:])
    if config.zero >= 1 and not on_gpu:
        total += master_size * max(once) * (grid.replicas - 1) // grid.replicas
    if grid.pp > 1:
        message = numbers_between_blocks(cfg, grid, config) * size
        if grid.sequence_parallel:
            message //= grid.tp
        total += 2 * message
    if grid.cp > 1:
        more = 3 * keys_and_values(cfg, grid, config) - kept_by_mlp(cfg, grid, config)
        total += max(0, more) * size
    return total


def logits_bytes(cfg: GPTConfig, grid: Grid, config: PlanConfig, on_gpu: bool = True) -> int:
    """The logits that VocabParallelCrossEntropy holds at once, on the last stage: a chunk in the
    type of the activations, and in 16 bits a second one in fp32."""
    if not grid.is_last:
        return 0
    size = PRECISIONS[config.dtype][0].itemsize
    if size == 2:
        size += 4
    vocab = cfg.padded_vocab // grid.tp
    device_type = "gpu" if on_gpu else "cpu"
    positions = config.micro_batch * cfg.seq_len // grid.cp
    return chunk_size(positions, vocab, device_type) * vocab * size


def activation_bytes(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """The most that this rank keeps between forward and backward, in units of B T C / cp numbers
    (Korthikanti et al. 2022, section 4, for what we save; without dropout):

        block    inputs and outputs of 2 LayerNorms     / tp with sequence parallelism
                 q, k, v, attention's output and the MLP's 4C (before and after GELU)     / tp
        stage    what it sends on; or the head's input and its gradient, computed in forward

    Of chunks (interleaved 1F1B) each is such a stage, with its part of the blocks. Under ZB-H1 a
    microbatch keeps from B to W the inputs of a block's four matrices, and the gradients of their
    outputs: with GELU and no sequence parallelism as many numbers, otherwise more."""
    size = PRECISIONS[config.dtype][0].itemsize
    unit = numbers_between_blocks(cfg, grid, config) * size
    thin = unit // grid.tp if grid.sequence_parallel else unit
    wide = 12 if cfg.activation == "gelu" else 8
    block = 4 * thin + wide * unit // grid.tp
    end = 2 * thin if grid.is_last else thin
    schedule = make_schedule(config.pp_schedule, grid, microbatches(config, grid))
    layers = layers_of(cfg, grid)
    if config.recompute:        # a block's input; and once, in backward, all of a block
        return live_activations(schedule) * (layers * thin // grid.chunks + end) + block
    whole = layers * block // grid.chunks + end
    for_weights = 0
    if config.pp_schedule == "zb-h1":
        for_weights = layers * (2 * thin + 2 * unit + 12 * unit // grid.tp)
    change = dict(F=whole, B=for_weights - whole, W=-for_weights)
    return max(accumulate(change[op] for op, _, _ in schedule))
