"""Memory of a rank. What ZeRO's formula counts is exact (parallelism/zero.py); buffers, logits and
activations are estimates.
"""
from itertools import accumulate

from amp import PRECISIONS
from parallelism.buckets import state_bytes
from parallelism.schedules import make_schedule
from parallelism.tensor import chunk_size
from tools.plan.stages import Stage
from tools.schedule import live_activations


def memory_bytes(stage: Stage, on_gpu: bool = True) -> dict:
    """Peak memory of this rank in bytes, by kind; what --offload keeps on the host has the prefix
    host_."""
    config = stage.config
    longest = max(bucket.numel for bucket, _ in stage.buckets)
    sizes, on_host = state_bytes(stage.numel, longest, stage.grid.replicas,
                                 PRECISIONS[config.dtype], config.zero, config.offload and on_gpu)
    sizes |= {f"host_{kind}": size for kind, size in on_host.items()}
    return sizes | dict(buffers=buffer_bytes(stage, on_gpu), logits=logits_bytes(stage, on_gpu),
                        activations=activation_bytes(stage))


def buffer_bytes(stage: Stage, on_gpu: bool) -> int:
    """What comes and goes within a step:

        ZeRO 2, 3   gradients of the ends and a block
        ZeRO 3      parameters of the ends and two blocks, gathered
        ZeRO 1 - 3  on the CPU, slices of one bucket that arrive from the other replicas
        pipeline    a message that comes, another that leaves
        context     of one block the K and V of all positions, their gradients, and these in slices;
                    by then backward has freed what its MLP kept
    """
    config, grid = stage.config, stage.grid
    once = [bucket.numel for bucket, _ in stage.buckets]
    total = 0
    if config.zero >= 2:
        total += config.master_size * sum(once)
    if config.zero == 3:
        total += config.size * sum(once + once[-2:])
    if config.zero >= 1 and not on_gpu:
        total += config.master_size * max(once) * (grid.replicas - 1) // grid.replicas
    if grid.pp > 1:
        total += 2 * stage.own_x * config.size
    if grid.cp > 1:
        total += max(0, 3 * stage.keys_and_values - kept_by_mlp(stage)) * config.size
    return total


def logits_bytes(stage: Stage, on_gpu: bool = True) -> int:
    """The logits that VocabParallelCrossEntropy holds at once, on the last stage: a chunk in the
    type of the activations, and in 16 bits a second one in fp32."""
    if not stage.grid.is_last:
        return 0
    size = stage.config.size
    if size == 2:
        size += 4
    vocab = stage.cfg.padded_vocab // stage.grid.tp
    device_type = "gpu" if on_gpu else "cpu"
    return chunk_size(stage.positions, vocab, device_type) * vocab * size


def kept_by_mlp(stage: Stage) -> int:
    """How many numbers a block keeps of the LayerNorm before its MLP, and of the MLP."""
    wide = 8 if stage.cfg.activation == "gelu" else 4
    return 2 * stage.own_x + wide * stage.x // stage.grid.tp


def activation_bytes(stage: Stage) -> int:
    """The most that this rank keeps between forward and backward, in units of B T C / cp numbers
    (Korthikanti et al. 2022, section 4, for what we save; without dropout):

        block    inputs and outputs of 2 LayerNorms     / tp with sequence parallelism
                 q, k, v, attention's output and the MLP's 4C (before and after GELU)     / tp
        stage    what it sends on; or the head's input and its gradient, computed in forward

    Of chunks (interleaved 1F1B) each is such a stage, with its part of the blocks. Under ZB-H1 a
    microbatch keeps from B to W the inputs of a block's four matrices, and the gradients of their
    outputs: with GELU and no sequence parallelism as many numbers, otherwise more."""
    config, grid = stage.config, stage.grid
    thin, unit = config.size * stage.own_x, config.size * stage.x
    block = config.size * kept_by_mlp(stage) + 2 * thin + 4 * unit // grid.tp
    end = 2 * thin if grid.is_last else thin
    schedule = make_schedule(config.pp_schedule, grid, stage.microbatches)
    if config.recompute:        # a block's input; and once, in backward, all of a block
        inputs = stage.layers * thin // grid.chunks + end
        return live_activations(schedule) * inputs + block
    whole = stage.layers * block // grid.chunks + end
    for_weights = 0
    if config.pp_schedule == "zb-h1":
        for_weights = stage.layers * (2 * thin + 2 * unit + 12 * unit // grid.tp)
    change = dict(F=whole, B=for_weights - whole, W=-for_weights)
    return max(accumulate(change[op] for op, _, _ in schedule))
