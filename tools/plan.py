"""Plan a run before it starts: memory, traffic, time and failures on GPUs of any number.

    python -m tools.plan --world 992 --gpu a100-80g --model opt-175b --dtype fp16 --tp 8 --zero 3 \\
        --recompute --batch-size 992 --micro-batch 8 --steps 147660 --vocab-size 50272

is OPT-175B as it was trained (Zhang et al. 2022: 147 TFLOP/s per GPU), and begins with

    fits     yes: 47.7 of 85 GB on rank 0, the fullest; 6% should stay free
    run      147,660 steps in 32.4 days (28.5 to 36.3), 771,765 GPU hours; MFU 37.3%, 142 TFLOP/s

The flags of the model and the layout are train.py's. `--search` prints the ten fastest layouts that
fit; flags that are given are constraints, so leave out those that may vary. `--json` prints the
numbers of `make_plan`. `--tokens 26e9` stands for the number of steps that read so many tokens,
`--days 7` for those of a week; without --model it finds the largest named size that reads its
compute-optimal tokens in the days, and its layout.

    step = sum(t) + (m - 1) max(t) + data parallelism + AdamW

           for m microbatches, where t is the time of one on each stage, forward and backward
           (GPipe: the sum for forward plus that for backward; interleaved 1F1B and ZB-H1: by
           tools.schedule.clock); data parallelism counts where backward does not hide it, and
           SHARE of it where backward does

    t    = sum(products) / (rate of the GPU) + FLOPs of attention / (its rate)
           + (PASSES / tp + WHOLE_PASSES) bytes of x / memory bandwidth
           + bytes of tp, cp and pp / (LINK * link speed) + HOP for each rank, none of them hidden

A product takes half a wave of tiles more, so that narrow and short ones are slow. Attention's rate
is FlashAttention 1's, so that a plan of a long context is cautious. The tests compare memory and
bytes sent with those of real runs of train.py.

The constants are fitted on 209 published steps. Of 132 others the time is 5% off in the mean, in
nine of ten cases at most 12%, at worst 23%, and 88% of the pairs of layouts of one model are in the
right order. That counts what those programs did otherwise than ours (tests/published.py); without
it the order is right in 62%. Two layouts within 5% of each other may be in the other order.
"""
import tools        # first: python tools/plan.py ends in its line

import argparse
import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from amp import PRECISIONS
from model import SIZES, GPTConfig
from parallel import Grid, build_stage
from parallelism.buckets import Bucket, make_buckets, state_bytes
from parallelism.pipeline import chunk_layers
from parallelism.schedules import SCHEDULES, make_schedule
from parallelism.tensor import ParamSpec, chunk_size, param_specs
from runtime import options
from runtime.checks import check_config, check_layout
from runtime.commandline import Parser
from runtime.flops import flops_per_token, parameter_count
from runtime.options import flag
from runtime.other_names import OTHER_NAMES, PLAN_ADVICE
from runtime.processes import print_rank0
from tools.gpus import GPUS, GPUName, GPUSpec
from tools.schedule import clock, live_activations

# Fitted on 209 published steps (tests/published.py says which, and the error without each):
PASSES = 93             # times that (B, T, C / tp) numbers cross memory in the rest of a block
LINK = 0.55             # fraction of a link's speed that collectives and messages reach
SHARE = 0.32            # fraction of hidden traffic's time that it takes from what hides it
SPREAD = 0.12           # nine of ten of the 132 steps that were held out are so close or closer
# Counted, or from the makers' descriptions:
WHOLE_PASSES = 20       # the same of (B, T, C): norms and residual sums, / tp if sequence-parallel
TILE = 128 * 256        # outputs of a matrix product that a multiprocessor computes at a time
CONTEXT_RINGS = 3       # K and V go around in forward and in backward, their gradients once
HOP = 5e-6              # seconds that each rank of a ring adds (NCCL's tuning: 3 to 14 us)
# Measured: GPT-2 124M on an H100 is 1.09 times as fast with --compile.
COMPILED = 0.6          # fraction of PASSES and WHOLE_PASSES that --compile leaves
# Assumed:
LEAST_POSITIONS = 4096  # of a sequence, that --search leaves a rank: shorter ones need no cp
BATCH_TOKENS = 2 ** 19  # of a step with --days and no --model: GPT-3's smallest batch
HEADROOM = 0.06         # fraction of memory for temporaries, NCCL and fragmentation
DISK = 2e9              # bytes per second of one writer
RESTART = 300.0         # seconds from a failure until a checkpoint is read
DAY = 86400
PF_DAY = 1e15 * DAY     # FLOPs


@dataclass(frozen=True)
class PlanConfig(options.Config):
    """train.py's flags, of which RUN_FLAGS count here, and the plan's own."""
    world: int = flag(None, "GPUs (required)", low=1, group="plan")
    gpu: GPUName = flag(None, "kind of GPU (required): " + ", ".join(GPUS) + ", or TFLOP/s:GB:GB/s "
                        "of another", form="NAME")
    gpus_per_node: int = flag(8, "GPUs of a machine", low=1)
    network: float = flag(None, "GB per second of each GPU to other machines (default: its usual "
                          "machine's)", low=0)
    vocab_size: int = flag(50257, "tokens of the vocabulary; a run takes that of its data", low=1)
    tokens: float = flag(None, "instead of --steps: train on so many tokens, as 26e9", low=1)
    days: float = flag(None, "instead of --steps: what so many days can train: --model or a shape "
                       "for their steps; without these, the largest named size that gets its "
                       "compute-optimal tokens", low=1e-4)
    mtbf_hours: float = flag(5100.0, "hours between two failures of a machine; OPT-175B: 35 "
                             "restarts in two months on 124 machines", low=1)
    search: bool = flag(False, "the ten fastest layouts that fit; layout flags that are given are "
                        "constraints")
    json: bool = flag(False, "print one object, or with --search a list")


LAYOUT = ("tp", "pp", "cp", "micro_batch", "zero", "recompute", "sequence_parallel", "pp_schedule",
          "pp_chunks", "steps")
RUN_FLAGS = ["model", *options.SHAPE, "batch_size", "steps", "tp", "pp", "cp", "pp_schedule",
             "pp_chunks", "micro_batch", "zero", "recompute", "sequence_parallel", "offload",
             "compile", "dtype"]
OWN_FLAGS = ["world", "gpu", "gpus_per_node", "network", "vocab_size", "tokens", "days",
             "mtbf_hours",
             "search", "json"]


def gpu_of(config: PlanConfig) -> GPUSpec:
    gpu = GPUS[config.gpu]
    if config.network is not None:
        gpu = replace(gpu, network=1e9 * config.network)
    return gpu


def make_plan(cfg: GPTConfig, config: PlanConfig) -> dict:
    """Estimate a run of `config.steps` steps on `config.world` GPUs, as one flat dict in bytes and
    seconds, unless a name has another unit. Memory is that of the fullest rank; bytes_... are what
    the rank that sends most sends in a step."""
    grids, kinds = kinds_of_stages(cfg, config)
    gpu = gpu_of(config)
    plan = {name: getattr(config, name) for name in ("gpu", "world", *LAYOUT)}
    plan |= dict(dp=grids[0].dp, layers_per_stage=math.ceil(cfg.n_layer / config.pp))
    plan |= compute_of(cfg, config)

    memory = [memory_bytes(cfg, grid, config) for grid in grids]
    on_gpu = [sum(size for kind, size in sizes.items() if not kind.startswith("host_"))
              for sizes in memory]
    fullest = on_gpu.index(max(on_gpu))
    plan |= {f"memory_{kind}": size for kind, size in memory[fullest].items()}
    plan |= dict(memory_bytes=on_gpu[fullest], fullest_rank=grids[fullest].rank,
                 fits=on_gpu[fullest] <= (1 - HEADROOM) * gpu.memory)

    sent = [traffic_bytes(cfg, grid, config) for grid in grids]
    busiest = max(sent, key=lambda sizes: sum(sizes.values()))
    plan |= {f"bytes_{kind}": size for kind, size in busiest.items()}

    seconds, bubble = step_seconds(cfg, config, grids, kinds, sent)
    step = sum(seconds.values())
    days = config.steps * step / DAY
    rate = plan["tokens_per_step"] / step / config.world        # tokens per second and GPU
    plan |= {f"seconds_{kind}": x for kind, x in seconds.items()}
    plan |= dict(
        step_seconds=step, bubble=bubble, tokens_per_second=rate * config.world,
        model_tflops_per_gpu=rate * plan["flops_per_token"] / 1e12,
        hardware_tflops_per_gpu=rate * hardware_flops_per_token(cfg, config) / 1e12,
        mfu=rate * plan["flops_per_token"] / gpu.peak(PRECISIONS[config.dtype][0].itemsize),
        days=days, gpu_hours=days * 24 * config.world)

    # A checkpoint holds masters and moments. Each rank copies its own to the host; rank 0 receives
    # and writes a parameter at a time. Rank 0 reads the whole file once more than the others: CRCs.
    checkpoint = 3 * PRECISIONS[config.dtype][1].itemsize * plan["parameters"]
    moments = max(sizes.get("moments", 0) + sizes.get("host_moments", 0) for sizes in memory)
    speed = LINK * (gpu.network if config.world > config.gpus_per_node else gpu.host)
    nodes = max(1, config.world / config.gpus_per_node)
    return plan | dict(checkpoint_bytes=checkpoint) | goodput(
        1.5 * moments / gpu.host, checkpoint / speed + checkpoint / DISK, 2 * checkpoint / DISK,
        nodes, config.mtbf_hours)


def recomputes_attention(config: PlanConfig) -> bool:
    """Whether backward computes attention once more, and nothing else of a block (CP3)."""
    return config.cp > 1 and not config.recompute


def hardware_flops_per_token(cfg: GPTConfig, config: PlanConfig) -> int:
    """`flops_per_token`, with what is recomputed."""
    again = 4 * cfg.n_layer * cfg.n_embd * cfg.seq_len if recomputes_attention(config) else 0
    return flops_per_token(cfg, config.recompute) + again


def compute_of(cfg: GPTConfig, config: PlanConfig) -> dict:
    """Parameters, tokens and FLOPs of the run, and what scaling laws say about them."""
    N = parameter_count(cfg)
    tokens_per_step = config.batch_size * cfg.seq_len
    tokens = config.steps * tokens_per_step
    flops = flops_per_token(cfg)
    optimal = compute_optimal(6 * N * tokens)
    return dict(
        parameters=N, tokens_per_step=tokens_per_step, tokens=tokens, flops_per_token=flops,
        flops_6nd=6 * N * tokens, flops_with_attention=flops * tokens,
        flops_with_recomputation=hardware_flops_per_token(cfg, config) * tokens,
        pf_days=flops * tokens / PF_DAY, compute_optimal_tokens=20 * N,
        **{f"compute_optimal_parameters_{name}": x for name, x in optimal.items()},
        predicted_loss=chinchilla_loss(N, tokens))


# ---------------------------------------------------------------------------------------------
# Stages: all blocks are alike, so one block and a count stand for them
# ---------------------------------------------------------------------------------------------


def layers_of(cfg: GPTConfig, grid: Grid) -> int:
    return sum(map(len, chunk_layers(cfg.n_layer, grid)))


def kinds_of_stages(cfg: GPTConfig, config: PlanConfig) -> tuple[list[Grid], list[int]]:
    """(the grid of the first rank of each kind of stage, which kind each stage is)"""
    in_stage = config.cp * config.tp
    dp = config.world // (config.pp * in_stage)
    stages = [Grid(dp, config.pp, config.tp, stage * in_stage, config.sequence_parallel,
                   config.pp_chunks, config.cp) for stage in range(config.pp)]
    kind_of = [(layers_of(cfg, grid), grid.is_first, grid.is_last) for grid in stages]
    kinds = list(dict.fromkeys(kind_of))
    firsts = [stages[kind_of.index(kind)] for kind in kinds]
    return firsts, [kinds.index(kind) for kind in kind_of]


@lru_cache
def stage_specs(cfg: GPTConfig, tp: int, is_first: bool, is_last: bool) -> list[ParamSpec]:
    """The parameters of such a stage if it has one block."""
    if is_first and is_last:
        grid = Grid(1, 1, tp)
    elif is_first:
        grid = Grid(1, 2, tp)
    elif is_last:
        grid = Grid(1, 2, tp, rank=tp)
    else:
        grid = Grid(1, 3, tp, rank=tp)
    cfg = replace(cfg, n_layer=grid.pp)
    return param_specs(build_stage(cfg, grid), cfg, grid)


def stage_buckets(cfg: GPTConfig, grid: Grid, zero: int) -> list[tuple[Bucket, int]]:
    """The buckets of this rank's FlatParameters, without tensors: [(bucket, how many like it)]. The
    last two are a block's attention and MLP."""
    specs = stage_specs(cfg, grid.tp, grid.is_first, grid.is_last)
    if zero > 0:
        buckets = make_buckets(specs, grid.replicas, grid.replicas, grid.replica)
    else:
        buckets = make_buckets(specs, grid.replicas)
    ends = [(bucket, 1) for bucket in buckets[:-2]]
    return ends + [(bucket, layers_of(cfg, grid)) for bucket in buckets[-2:]]


def numel_of(buckets: list[tuple[Bucket, int]]) -> int:
    return sum(bucket.numel * count for bucket, count in buckets)


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


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


def numbers_between_blocks(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """Of x (B, T / cp, C)."""
    return config.micro_batch * cfg.seq_len // grid.cp * cfg.n_embd


def keys_and_values(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """How many numbers a block's K and V (B, T, C / tp) have."""
    return 2 * config.micro_batch * cfg.seq_len * cfg.n_embd // grid.tp


def kept_by_mlp(cfg: GPTConfig, grid: Grid, config: PlanConfig) -> int:
    """How many numbers a block keeps of the LayerNorm before its MLP, and of the MLP."""
    unit = numbers_between_blocks(cfg, grid, config)
    thin = unit // grid.tp if grid.sequence_parallel else unit
    wide = 8 if cfg.activation == "gelu" else 4
    return 2 * thin + wide * unit // grid.tp


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


def microbatches(config, grid: Grid) -> int:
    """Number of microbatches of a step on each replica."""
    return config.batch_size // (grid.dp * config.micro_batch)


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


# ---------------------------------------------------------------------------------------------
# Traffic
# ---------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------
# Failures, and scaling laws
# ---------------------------------------------------------------------------------------------


def goodput(pause: float, write: float, read: float, nodes: float, mtbf_hours: float) -> dict:
    """The fraction of time that makes progress, where each node fails every `mtbf_hours`, with the
    best interval between checkpoints (Daly 2006, equations 20 and 37; Young's of 1974,
    sqrt(2 M pause), is its first term).

    Training pauses for `pause` seconds; then threads write for `write` seconds, one checkpoint at a
    time. A failure costs the restart, the `read` seconds, and the progress since the last whole
    checkpoint, which is a write's time older than the last.
    """
    M = mtbf_hours * 3600 / nodes           # seconds between two failures of the job
    root = min(1.0, math.sqrt(pause / (2 * M)))
    interval = max(write, 2 * M * root * (1 + root / 3 + root ** 2 / 9) - pause)
    lost = RESTART + read + write
    progress = (interval / M * math.exp(-(lost + interval + pause) / M)
                / -math.expm1(-(interval + pause) / M))
    return dict(failure_hours=M / 3600, pause_seconds=pause, write_seconds=write,
                read_seconds=read, interval_seconds=interval, goodput=progress)


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Loss in nats per token that a good run of this size reaches on text of the web: the law that
    Hoffmann et al. 2022 fitted, equation 10 (their tokenizer, 32000 tokens)."""
    return 1.69 + 406.4 / parameters ** 0.34 + 410.7 / tokens ** 0.28


def compute_optimal(flops: float) -> dict[str, float]:
    """Parameters N of the model with the lowest loss that 6 N D = `flops` can buy, by three laws:

    chinchilla      20 tokens per parameter (Hoffmann et al. 2022, table 3, and Chinchilla itself)
    chinchilla_law  the minimum of `chinchilla_loss` (equation 4 there, with rounded constants)
    kaplan          1.3e9 PF-days^0.73 (Kaplan et al. 2020, table 6), without embeddings: too large
    """
    return dict(
        chinchilla=math.sqrt(flops / 6 / 20), kaplan=1.3e9 * (flops / PF_DAY) ** 0.73,
        chinchilla_law=(0.34 * 406.4 / (0.28 * 410.7) * (flops / 6) ** 0.28) ** (1 / 0.62))


# ---------------------------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------------------------


def search_layouts(cfg: GPTConfig, config: PlanConfig, given: dict) -> list[dict]:
    """The plans of the ten fastest layouts that fit, of those with tp inside a machine, at least
    LEAST_POSITIONS on a rank or no cp, microbatches of 1 to 16 sequences, and 1F1B, which takes
    less time and memory than GPipe, or that interleaved in 2 or 4 chunks. (ZB-H1 only if it is
    given.) What `given` names stays as it is in `config`. Raises ValueError if nothing fits."""
    divisors = [n for n in range(1, config.world + 1) if config.world % n == 0]
    options = dict(tp=[n for n in divisors if config.gpus_per_node % n == 0],
                   pp=[n for n in divisors if n <= cfg.n_layer],
                   cp=[n for n in divisors if n == 1 or cfg.seq_len // n >= LEAST_POSITIONS],
                   pp_schedule=["1f1b", "interleaved"], pp_chunks=[1, 2, 4],
                   micro_batch=[1, 2, 4, 8, 16], zero=range(4), recompute=[False, True],
                   sequence_parallel=[False, True])
    for name in options.keys() & given.keys():
        options[name] = [getattr(config, name)]
    plans = []
    for values in product(*options.values()):
        one = replace(config, **dict(zip(options, values)))
        if one.zero > 0 and one.world == one.tp * one.pp:   # one replica has nothing to shard
            continue
        with suppress(ValueError):
            check_layout(cfg, one.world, one.batch_size, one)
            plans.append(make_plan(cfg, one))
    problem = (f"no layout of this model and batch size {config.batch_size} fits {config.world} x "
               f"{config.gpu}")
    if not plans:
        raise ValueError(f"{problem}: give another --batch-size or --world, which more layouts "
                         f"divide, or fewer flags of the layout")
    least = min(plan["memory_bytes"] for plan in plans)
    plans = [plan for plan in plans if plan["fits"]]
    if not plans:
        free = (1 - HEADROOM) * gpu_of(config).memory
        advice = "take more or larger GPUs"
        if not config.offload:
            advice += ", or --offload"
        raise ValueError(f"{problem}: the smallest needs {least / 1e9:.1f} GB of each GPU, "
                         f"{(least - free) / 1e9:.1f} GB too many: {advice}")

    def order(plan):        # of equally fast plans the lowest ZeRO stage, then the least memory
        return float(f"{plan['step_seconds']:.3g}"), plan["zero"], plan["memory_bytes"]
    plans.sort(key=order)
    best = {}
    for plan in plans:
        layout = tuple(plan[name] for name in options if name != "micro_batch")
        best.setdefault(layout, plan)
    return list(best.values())[:10]


# ---------------------------------------------------------------------------------------------
# What so many days train
# ---------------------------------------------------------------------------------------------


def with_layout(config: PlanConfig, plan: dict) -> PlanConfig:
    """The config of a plan that `config` has led to."""
    return replace(config, **{name: plan[name] for name in LAYOUT})


def plan_of_days(cfg: GPTConfig, config: PlanConfig, plan: dict, has_steps: bool) -> dict:
    """The plan of the same layout with the steps that --days suffice for, unless it has its own,
    and what the days are compared with. Raises ValueError if they are shorter than a step."""
    if not has_steps:
        steps = int(config.days * DAY / plan["step_seconds"])
        if steps == 0:
            raise ValueError(f"a step takes {plan['step_seconds']:.3g} s, and --days "
                             f"{config.days:g} are shorter: give more days or more --world")
        plan = make_plan(cfg, replace(with_layout(config, plan), steps=steps))
    return plan | dict(model=config.model, batch_size=config.batch_size, days_given=config.days,
                       times_compute_optimal=plan["tokens"] / plan["compute_optimal_tokens"])


def largest_model(config: PlanConfig, given: dict) -> tuple[PlanConfig, list[dict]]:
    """(the config with the model, the plans of its ten fastest layouts) for the largest named size
    that reads its compute-optimal tokens, 20 for each parameter, in --days. Without --batch-size a
    step has BATCH_TOKENS, or the next multiple of the GPUs. Raises ValueError if there is none."""
    models = {name: GPTConfig(config.vocab_size, **shape) for name, shape in SIZES.items()}
    peak = config.world * gpu_of(config).peak(PRECISIONS[config.dtype][0].itemsize)
    for name in sorted(models, key=lambda name: parameter_count(models[name]), reverse=True):
        cfg = models[name]
        tokens = 20 * parameter_count(cfg)
        if tokens * flops_per_token(cfg) / peak > config.days * DAY:
            continue                                # not even with an MFU of 100%
        batch_size = config.batch_size
        if "batch_size" not in given:
            batch_size = config.world * math.ceil(BATCH_TOKENS / cfg.seq_len / config.world)
        one = replace(config, model=name, batch_size=batch_size, search=True,
                      steps=math.ceil(tokens / (batch_size * cfg.seq_len)))
        with suppress(ValueError):                  # of memory, or of what does not divide
            plans = search_layouts(cfg, one, given)
            if plans[0]["days"] <= config.days:
                return one, plans
    raise ValueError(f"{config.days:g} days of {config.world} x {config.gpu} train no named size "
                     f"on its compute-optimal tokens: give more days or GPUs, or --model to see "
                     f"what they do train")


# ---------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------


def format_bytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e6:,.1f} MB"


def format_plan(cfg: GPTConfig, config: PlanConfig, plan: dict) -> list[str]:
    """The numbers of `make_plan` in lines, the most important first."""
    def parts(prefix, render):
        return ", ".join(f"{name.removeprefix(prefix).replace('_', ' ')} {render(x)}"
                         for name, x in plan.items()
                         if name.startswith(prefix) and name != "memory_bytes")
    options = [f"zero {config.zero}"]
    if config.pp > 1:
        options.append(config.pp_schedule)
    if config.pp_chunks > 1:
        options.append(f"{config.pp_chunks} chunks")
    options += [name.replace("_", " ") for name in ("recompute", "sequence_parallel", "offload")
                if getattr(config, name)]
    num_microbatches = config.batch_size // (plan["dp"] * config.micro_batch)
    gpu = gpu_of(config)
    cp = f" x cp {config.cp}" if config.cp > 1 else ""
    best = {name: plan[f"compute_optimal_parameters_{name}"]
            for name in ("chinchilla", "chinchilla_law", "kaplan")}
    low, high = (plan["days"] * (1 + sign * SPREAD) for sign in (-1, 1))
    lines = [
        f"fits     {'yes' if plan['fits'] else 'no'}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{GPUS[config.gpu].memory / 1e9:.0f} GB on rank {plan['fullest_rank']}, the fullest; "
        f"{HEADROOM:.0%} should stay free",
        f"run      {config.steps:,} steps in {plan['days']:.3g} days ({low:.3g} to {high:.3g}), "
        f"{plan['gpu_hours']:,.0f} GPU hours; MFU {plan['mfu']:.1%}, "
        f"{plan['hardware_tflops_per_gpu']:.0f} TFLOP/s",
        f"model    {plan['parameters']:,} parameters: {cfg.n_layer} layers, {cfg.n_head} heads, "
        f"width {cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size}",
        f"layout   dp {plan['dp']} x pp {config.pp}{cp} x tp {config.tp}, {config.gpu}, "
        f"{config.dtype}, {', '.join(options)}",
        f"batch    {config.batch_size} sequences = dp {plan['dp']} x {num_microbatches} "
        f"microbatches x {config.micro_batch} sequences; {plan['tokens_per_step']:,} tokens per "
        f"step",
        f"memory   {parts('memory_', format_bytes)} (buffers, logits, activations: estimates)",
        f"compute  {plan['tokens']:.4g} tokens x {plan['flops_per_token']:.4g} FLOPs = "
        f"{plan['flops_with_attention']:.4g}, {plan['pf_days']:,.4g} PF-days; with recomputation "
        f"{plan['flops_with_recomputation']:.4g}",
        f"optimal  {plan['compute_optimal_tokens']:.4g} tokens, 20 for each parameter, would give "
        f"this model the lowest loss for its compute (Hoffmann et al. 2022); the run has "
        f"{plan['tokens'] / plan['compute_optimal_tokens']:.3g} times as many; predicted loss "
        f"{plan['predicted_loss']:.2f}",
        f"         the compute of this run would be best spent on a model of "
        f"{best['chinchilla']:.4g} parameters by that rule, {best['chinchilla_law']:.4g} by the "
        f"loss that Hoffmann et al. fitted, {best['kaplan']:.4g} by Kaplan et al. 2020 (too large)",
        f"sends    per step: {parts('bytes_', format_bytes)}",
        f"step     {plan['step_seconds']:.4g} s: {parts('seconds_', '{:,.4g} s'.format)}; bubble "
        f"{plan['bubble']:.1%}; {plan['tokens_per_second']:,.0f} tokens per second",
        f"failures every {plan['failure_hours']:,.4g} hours; a checkpoint every "
        f"{plan['interval_seconds']:,.0f} s pauses {plan['pause_seconds']:,.4g} s and is written "
        f"in {plan['write_seconds']:,.4g} s and read in {plan['read_seconds']:,.4g} s "
        f"({format_bytes(plan['checkpoint_bytes'])}); goodput {plan['goodput']:.1%}, which the "
        f"days above do not count",
        f"assumes  backward hides data parallelism, nothing hides tp, cp and pp; no rank is slow; "
        f"{gpu.link / 1e9:g} GB/s to a GPU of the same machine, {gpu.network / 1e9:g} to another's"]
    return lines


def notes_of(config: PlanConfig, plan: dict) -> list[str]:
    """What to change in such a plan, in lines."""
    lines = []
    if config.days is not None and plan["tokens_per_step"] < BATCH_TOKENS / 4:
        lines.append(f"note     a step of {plan['tokens_per_step']:,} tokens is small: a larger "
                     f"--batch-size wastes less of the GPUs (GPT-3's are of {BATCH_TOKENS:,} "
                     f"tokens or more)")
    if config.days is None and plan["tokens"] < plan["compute_optimal_tokens"] / 10:
        lines.append(f"note     few tokens: {plan['compute_optimal_tokens']:.3g} would be "
                     f"compute-optimal (--tokens, or --steps and --batch-size)")
    if not plan["fits"]:
        lines.append("note     it does not fit: --search, without flags of the layout, finds any "
                     "layouts that do; --zero, --tp, --pp and --offload leave less state on a GPU, "
                     "--recompute, a smaller --micro-batch, --tp and --cp fewer activations")
    if config.dtype == "fp32":
        lines.append("note     fp32 is slow: give --dtype bf16 (fp16 on a V100)")
    return lines


def format_days(config: PlanConfig, plan: dict, chooses_model: bool) -> str:
    """The answer to --days."""
    tokens = f"{plan['tokens']:.4g} tokens in {plan['steps']:,} steps"
    total = (f"training alone takes {plan['days']:.3g} days, {plan['days'] / plan['goodput']:.3g} "
             f"with saves and failures")
    if chooses_model:
        return (f"answer   {config.model} is the largest named size that {config.days:g} days "
                f"train on its compute-optimal tokens, 20 for each parameter: {tokens}; {total}")
    return (f"answer   {config.days:g} days train this model on {tokens}, "
            f"{plan['times_compute_optimal']:.3g} times its compute-optimal "
            f"{plan['compute_optimal_tokens']:.4g}; {total}")


def format_search(plans: list[dict]) -> list[str]:
    """A row for each layout, the fastest first."""
    rows = [["dp", "pp", "chunks", "cp", "tp", "micro-batch", "zero", "recompute",
             "sequence-parallel", "memory GB", "bubble %", "step s", "MFU %", "days"]]
    numbers = ("dp", "pp", "pp_chunks", "cp", "tp", "micro_batch", "zero")
    for plan in plans:
        rows.append([str(plan[name]) for name in numbers])
        for switch in ("recompute", "sequence_parallel"):
            rows[-1].append("yes" if plan[switch] else "no")
        rows[-1] += [f"{plan['memory_bytes'] / 1e9:.1f}", f"{100 * plan['bubble']:.1f}",
                     f"{plan['step_seconds']:.3g}", f"{100 * plan['mfu']:.1f}",
                     f"{plan['days']:.3g}"]
    lines = []
    for row in rows:
        lines.append("  ".join(cell.rjust(max(4, len(name))) for cell, name in zip(row, rows[0])))
    return [*lines, f"nine of ten times are at most {SPREAD:.0%} off; the first is started with"]


def format_command(config: PlanConfig, given: dict) -> str:
    """The command that starts the run: the flags that were `given`, and what was found."""
    flags = {name: given[name] for name in RUN_FLAGS if name in given}
    if config.steps != PlanConfig.steps:
        flags["steps"] = config.steps
    if config.search:
        for name in ("tp", "pp", "cp", "micro_batch", "zero", "recompute", "sequence_parallel"):
            flags[name] = getattr(config, name)
        if config.pp > 1:
            flags |= dict(pp_schedule=config.pp_schedule, pp_chunks=config.pp_chunks)
    words = [start_of_command(config)]
    for name, value in flags.items():
        if value is not False:
            words.append("--" + name.replace("_", "-"))
        if not isinstance(value, bool):
            words.append(str(value))
    return " ".join(words)


def start_of_command(config: PlanConfig) -> str:
    """python or torchrun, with the largest equal number of processes on each machine; several start
    it at the same time, and HOST is the name of one of them."""
    if config.world == 1:
        return "python train.py"
    per_node = max(n for n in range(1, config.gpus_per_node + 1) if config.world % n == 0)
    nodes = config.world // per_node
    if nodes == 1:
        return f"torchrun --nproc_per_node={per_node} train.py"
    return (f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv-backend=c10d "
            f"--rdzv-endpoint=HOST:29500 train.py")


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


HELP = """Plan a run of train.py on GPUs: memory, traffic, time and failures.

Of what it prints, in a step: passes are the reads and writes of activations beside matrix products
and attention; fill is what the pipeline waits for its first and last microbatches, bubble the idle
fraction of its stages; dp is the traffic of gradients and parameters that computation does not
hide; update is AdamW. Days, also those of --days, are of training alone: saves and failures come
on top, as goodput says. Command is what starts the run."""


def read_flags(arguments: list[str]) -> tuple[PlanConfig, dict]:
    """The config, and what of it was given. Raises ValueError on a usage error."""
    parser = Parser("plan.py", "python -m tools.plan --world N --gpu NAME [FLAG ...]", HELP,
                    OTHER_NAMES, PLAN_ADVICE, argument_default=argparse.SUPPRESS)
    options.add_flags(parser, OWN_FLAGS + RUN_FLAGS, PlanConfig)
    given = options.parse_given(parser, arguments, PlanConfig)
    if "world" not in given or "gpu" not in given:
        raise ValueError(f"--world, the number of GPUs, and --gpu, one of {', '.join(GPUS)} or "
                         f"TFLOP/s:GB:GB/s of another, are required")
    ends = ["--" + name for name in ("steps", "tokens", "days") if name in given]
    if len(ends) > 1:
        raise ValueError(f"{ends[0]} and {ends[1]} both say when the run ends: drop one")
    config = PlanConfig(**given)
    if config.dtype == "bf16" and GPUS[config.gpu].name == "V100":
        raise ValueError("a V100 has no matrix products in bf16: give --dtype fp16")
    if config.world % (config.tp * config.pp * config.cp):
        raise ValueError(f"--world {config.world} is not divisible by tp {config.tp} x pp "
                         f"{config.pp} x cp {config.cp}: give a multiple")
    return config, given


def answer(arguments: list[str]) -> str:
    """What the command prints. Raises ValueError on a usage error, or if --search finds nothing."""
    config, given = read_flags(arguments)
    chooses_model = config.days is not None and not given.keys() & {"model", *options.SHAPE}
    if chooses_model:
        config, plans = largest_model(config, given)
        given = given | dict(model=config.model, batch_size=config.batch_size)
    shape = options.model_shape(vars(config))
    if config.tokens is not None:
        steps = math.ceil(config.tokens / (config.batch_size * shape["seq_len"]))
        config = replace(config, steps=steps)
    cfg = GPTConfig(config.vocab_size, **shape)
    if not chooses_model and config.search:
        plans = search_layouts(cfg, config, given)
    elif not chooses_model:
        config, cfg = check_config(config, shape, config.vocab_size, config.world, "cuda")
        plans = [make_plan(cfg, config)]
    if config.days is not None:
        plans = [plan_of_days(cfg, config, plan, chooses_model) for plan in plans]

    if config.json:
        return json.dumps(plans if "search" in given else plans[0])
    lines = []
    if config.days is not None:
        lines.append(format_days(config, plans[0], chooses_model))
    first = with_layout(config, plans[0])
    if "search" in given:
        return "\n".join([*lines, *format_search(plans), format_command(first, given)])
    lines += format_plan(cfg, first, plans[0])
    lines.append(f"command  {format_command(first, given)}")
    return "\n".join(lines + notes_of(config, plans[0]))


def main() -> None:
    try:
        print_rank0(answer(sys.argv[1:]))
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
