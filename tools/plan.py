"""What a run of any size needs, before anything runs."""
import json
import math
import operator
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from amp import PRECISIONS
from model import (PEAK_FLOPS, GPTConfig, flops_per_token, parameter_count)
from parallel import (Bucket, Grid, ParamSpec, build_stage, check_layout, live_activations,
                      make_buckets, microbatches, param_specs, positions_at_once, print_rank0,
                      schedule_of, stage_layers)
from train import Config, check_config, format_layout, merge_config


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Loss in nats a token that a good run of this size reaches on text of the web: the law fitted
    by Hoffmann et al. 2022, equation 10 (their tokenizer, 32000 tokens)."""
    return 1.69 + 406.4 / parameters ** 0.34 + 410.7 / tokens ** 0.28


def compute_optimal(flops: float) -> dict[str, float]:
    """Parameters N of the model with the lowest loss that 6 N D = `flops` can buy, thrice:

    chinchilla      20 tokens a parameter (Hoffmann et al. 2022, table 3, and Chinchilla itself)
    chinchilla_law  the minimum of `chinchilla_loss` (equation 4 there, with rounded constants)
    kaplan          1.3e9 PF-days^0.73 (Kaplan et al. 2020, table 6), without embeddings: too large
    """
    return dict(chinchilla=math.sqrt(flops / 6 / 20), kaplan=1.3e9 * (flops / 8.64e19) ** 0.73,
                chinchilla_law=(0.34 * 406.4 / (0.28 * 410.7) * (flops / 6) ** 0.28) ** (1 / 0.62))


@dataclass(frozen=True)
class Device:
    """A GPU in its usual machine: bytes, and bytes a second in one direction."""
    word: str           # of its name, in PEAK_FLOPS
    fp32: float         # FLOP/s, by TF32 where there is one; fp64 has about an eighth
    memory: float
    bandwidth: float    # of its memory
    link: float         # NVLink, to the machine's other GPUs
    network: float      # InfiniBand, its share of the machine's adapters
    host: float         # PCIe, to the host's memory

    def peak(self, itemsize: int) -> float:
        """FLOP/s of matrix products in a type of so many bytes."""
        return PEAK_FLOPS[self.word] if itemsize == 2 else self.fp32 / (1 if itemsize == 4 else 8)


# The makers' data sheets of the SXM modules; network and host of DGX-1, A100, H100, H200 and B200.
DEVICES = {
    "v100-16g": Device("V100", 15.7e12, 16e9, 900e9, 150e9, 6.25e9, 16e9),
    "v100-32g": Device("V100", 15.7e12, 32e9, 900e9, 150e9, 6.25e9, 16e9),
    "a100-40g": Device("A100", 156e12, 40e9, 1555e9, 300e9, 25e9, 32e9),
    "a100-80g": Device("A100", 156e12, 80e9, 2039e9, 300e9, 25e9, 32e9),
    "h100": Device("H100", 494e12, 80e9, 3350e9, 450e9, 50e9, 64e9),
    "h200": Device("H200", 494e12, 141e9, 4800e9, 450e9, 50e9, 64e9),
    "b200": Device("B200", 1125e12, 180e9, 8000e9, 900e9, 50e9, 64e9),
}


def activation_bytes(cfg: GPTConfig, grid: Grid, schedule, micro_batch: int, itemsize: int,
                     recompute: bool = False) -> int:
    """Estimate of the most bytes this rank keeps between forward and backward, in units of
    B T C numbers (Korthikanti et al. 2022, section 4, for what we save; without dropout):

        block    inputs and outputs of 2 LayerNorms     / tp with sequence parallelism
                 q, k, v, attention's output and the MLP's 4C (before and after GELU)     / tp
        stage    what it sends on; or the head's input and its gradient, computed in forward
    """
    unit = micro_batch * cfg.seq_len * cfg.n_embd * itemsize
    thin = unit // (grid.tp if grid.sequence_parallel else 1)
    block = 4 * thin + (12 if cfg.activation == "gelu" else 8) * unit // grid.tp
    end = 2 * thin if grid.is_last else thin
    layers = len(stage_layers(cfg.n_layer, grid.pp, grid.stage))
    kept = layers * thin + end if recompute else layers * block + end
    return live_activations(schedule) * kept + (block if recompute else 0)


def loss_bytes(cfg: GPTConfig, grid: Grid, micro_batch: int, itemsize: int, device: str) -> int:
    """The memory of the logits in VocabParallelCrossEntropy, on the last stage: a chunk of them in
    the type of the activations, and in 16 bits a second one in fp32."""
    vocab = cfg.padded_vocab // grid.tp
    count = positions_at_once(micro_batch * cfg.seq_len, vocab, device)
    return count * vocab * (itemsize + 4 * (itemsize == 2)) * grid.is_last


# ---------------------------------------------------------------------------------------------
# 5. What a layout costs, on paper. `config` is train.Config, by attribute names.
#
#     step = sum(t) + (m - 1) max(t) + data parallelism + AdamW
#
#            m microbatches, t the time of one on each stage, forward and backward (with GPipe first
#            the one, then the other); of data parallelism what backward does not hide
#     t    = FLOPs / (MATRIX of the peak) + PASSES of x through the memory for the rest of a block
#            + the bytes of tp and pp / (LINK of the link's speed), nothing of them hidden
# ---------------------------------------------------------------------------------------------

# Fitted on published runs of up to 18B parameters on A100s and H100s (listed in test_all.py):
MATRIX = 0.57           # of the device's peak is what matrix products reach
LINK = 0.73             # of a link's speed is what collectives and messages reach
PASSES = 260            # how often (B, T, C / tp) numbers cross the memory for the rest of a block
HEADROOM = 0.1          # of a device's memory stays for temporaries, NCCL and fragmentation
# Assumed: seconds that each rank of a ring adds (NCCL's tuning has 3 to 14 microseconds); bytes/s
# of one writer; seconds from a failure until a checkpoint is read.
HOP, DISK, RESTART = 1e-5, 2e9, 300.0
KEPT = ("parameters", "gradients", "masters", "moments")        # all the time


@lru_cache
def stage_specs(cfg: GPTConfig, tp: int, is_first: bool, is_last: bool) -> list[ParamSpec]:
    """The parameters of such a stage if it has one block: all blocks are alike."""
    pp, stage = (1, 0) if is_first and is_last else (3, 0 if is_first else 2 if is_last else 1)
    grid, cfg = Grid(1, pp, tp, stage * tp), replace(cfg, n_layer=pp)
    return param_specs(build_stage(cfg, grid), cfg, grid)


def stage_buckets(cfg: GPTConfig, grid: Grid, zero: int) -> list[tuple[Bucket, int]]:
    """The buckets of this rank's FlatParameters, without tensors: [(bucket, how many like it)], the
    last two a block's."""
    buckets = make_buckets(stage_specs(cfg, grid.tp, grid.is_first, grid.is_last), grid.dp,
                           *((grid.dp, grid.dp_rank) if zero else ()))
    layers = len(stage_layers(cfg.n_layer, grid.pp, grid.stage))
    return list(zip(buckets, [1] * (len(buckets) - 2) + [layers] * 2))


def memory_bytes(cfg: GPTConfig, grid: Grid, config, dtypes: tuple, on_gpu: bool) -> dict:
    """The most bytes of this rank, by kind ("host_..." with `--offload`); dtypes are those of the
    parameters and the masters. KEPT is exact, the others are estimates: what stays between forward
    and backward, and buffers:

        ZeRO 2, 3   gradients of the ends and a block; on the CPU also slices that arrive (from 1)
        ZeRO 3      parameters of the ends and two blocks, gathered
        pipeline    a message comes, another leaves
    """
    (size, wide), zero, each = (dtype.itemsize for dtype in dtypes), config.zero, config.micro_batch
    buckets = stage_buckets(cfg, grid, zero)
    numel = sum(bucket.numel * count for bucket, count in buckets)
    data, grad, own = (numel // (grid.dp if zero >= since else 1) for since in (3, 2, 1))
    once = [bucket.numel for bucket, _ in buckets]          # of the ends and one block
    buffers = wide * sum(once) * (zero >= 2) + size * sum(once + once[-2:]) * (zero == 3)
    buffers += wide * max(once) * (grid.dp - 1) // grid.dp * (zero > 0 and not on_gpu)
    buffers += 2 * (grid.pp > 1) * each * cfg.seq_len * cfg.n_embd * size // (
        grid.tp if grid.sequence_parallel else 1)
    host, schedule = "host_" if config.offload and on_gpu else "", schedule_of(config, grid)
    return {"parameters": size * data, "gradients": wide * grad,
            f"{host}masters": wide * own * (size != wide or host != ""),
            f"{host}moments": 2 * wide * own, "buffers": buffers,
            "logits": loss_bytes(cfg, grid, each, size, "gpu" if on_gpu else "cpu"),
            "activations": activation_bytes(cfg, grid, schedule, each, size, config.recompute)}


def traffic_bytes(cfg: GPTConfig, grid: Grid, config, dtypes: tuple) -> dict:
    """Bytes that this rank sends in a step, by kind. An all-reduce of n ranks counts as a ring's,
    2 (n - 1) / n of its bytes, a reduce-scatter or all-gather as one half of that. x is (B, T, C).

        tp          4 all-reduces of x a block, 1 of the embedding, 1 of the head; 3 numbers a
                    position for the loss. Recomputation: 1 more a block. Sequence parallelism:
                    the input of 2 matrices is gathered again (of 3 with recomputation), and the
                    gradients of what is replicated are summed
        pp          x forward, x backward
        gradients   ZeRO 0: an all-reduce; 1: a reduce-scatter; 2, 3: one for each microbatch
        parameters  ZeRO 1, 2: an all-gather; 3: for each microbatch one forward and another
                    backward, where the ends and the last block are still there
        embedding   the tied matrix's gradient, between the first stage and the last
        world       five numbers in float64 that all ranks agree on
    """
    def ring(ranks, nbytes):
        return (ranks - 1) * nbytes / ranks

    (size, wide), zero, tp = (dtype.itemsize for dtype in dtypes), config.zero, grid.tp
    m, positions = microbatches(config, grid), config.micro_batch * cfg.seq_len
    x, split, ends = positions * cfg.n_embd * size, grid.sequence_parallel, (
        grid.is_first + grid.is_last)
    buckets = stage_buckets(cfg, grid, zero)
    numel = sum(bucket.numel * count for bucket, count in buckets)
    once, tied = sum(bucket.numel for bucket, _ in buckets), buckets[0][0].numel
    replicated = sum(count * (here.stop - here.start) for bucket, count in buckets
                     for spec, here, _ in bucket.shard_ranges if spec.partition_dim is None)
    halves = 2 * ends + buckets[-1][1] * (8 + 2 * split + config.recompute * (2 + split))
    gradients = numel * (2, 1, m, m)[zero]
    if zero == 2 and grid.is_last and grid.pp > 1 and config.pp_schedule == "gpipe":
        gradients -= (m - 1) * tied             # the forwards have added up all of the head's
    return dict(
        tp=m * (halves * ring(tp, x) + 2 * grid.is_last * ring(tp, 3 * wide * positions))
        + 2 * split * ring(tp, wide * replicated),
        pp=m * (2 - ends) * x / (tp if split else 1),
        gradients=ring(grid.dp, wide * gradients),
        parameters=ring(grid.dp, size * (0, numel, numel, m * (2 * numel - once))[zero]),
        embedding=wide * tied / (grid.dp if zero else 1) * (ends > 0 and grid.pp > 1),
        world=2 * ring(grid.world, 5 * 8))


def kinds_of_stages(cfg: GPTConfig, config) -> tuple[list[Grid], list[int]]:
    """The first rank of each kind of stage, and which kind each stage is of."""
    tp, pp = config.tp, config.pp
    stages = [(len(stage_layers(cfg.n_layer, pp, stage)), stage == 0, stage == pp - 1)
              for stage in range(pp)]
    kinds = list(dict.fromkeys(stages))
    return ([Grid(config.world // (tp * pp), pp, tp, stages.index(kind) * tp,
                  config.sequence_parallel) for kind in kinds], list(map(kinds.index, stages)))


def pipeline_seconds(schedule: str, forward: list, backward: list, m: int) -> float:
    """The time of m microbatches through stages that take so long for one. GPipe: the slowest stage
    works, the others add their time once, forward and backward. 1F1B: a stage starts when the first
    microbatch reaches it, and waits for its first and last backward, from all stages behind it,
    if the forwards (or backwards) that it has to do meanwhile are shorter."""
    if schedule == "gpipe":
        return sum(sum(times) + (m - 1) * max(times) for times in (forward, backward))
    both, p = list(map(operator.add, forward, backward)), len(forward)
    return max(sum(both[:s]) + m * both[s] + sum(
        max(0.0, sum(both[s + 1:]) - (p - 1 - s) * times[s]) for times in (forward, backward))
        for s in range(max(0, p - m), p))


def step_seconds(cfg: GPTConfig, grids: list, kinds: list, sent: list, config, dtypes: tuple,
                 device: Device) -> tuple[dict, float]:
    """Seconds of a step by what they go to, which add up, and the bubble: the idle fraction of the
    stages until the last backward. `kinds_of_stages`, and the `traffic_bytes` of each kind."""
    size, zero, tp, pp = dtypes[0].itemsize, config.zero, config.tp, config.pp
    dp, m = grids[0].dp, microbatches(config, grids[0])

    def speed(ranks, stride, adapters=1):
        """Of ranks `stride` apart; what leaves a machine does so by as many of its adapters."""
        inside = config.gpus_per_node % (ranks * stride) == 0 or (
            config.world <= config.gpus_per_node)
        return LINK * (device.link if inside else min(device.link, adapters * device.network))

    pipeline, tensor, data = speed(pp, tp), speed(tp, 1, config.gpus_per_node), speed(
        dp, tp * pp, max(1, config.gpus_per_node // (tp * pp)))
    positions, head = config.micro_batch * cfg.seq_len, 6 * cfg.vocab_size * cfg.n_embd
    plain, block = ((flops_per_token(cfg, again) - head) / cfg.n_layer
                    for again in (False, config.recompute))
    rate = tp * MATRIX * device.peak(size) / positions
    x = positions * cfg.n_embd * size / tp / device.bandwidth
    costs, forward = [], []                     # of a microbatch on each kind of stage
    for grid, out in zip(grids, sent):
        layers = len(stage_layers(cfg.n_layer, pp, grid.stage))
        costs.append(dict(matrices=(layers * block + grid.is_last * head) / rate,
                          passes=layers * PASSES * x * block / plain,
                          tp=out["tp"] / m / tensor, pp=out["pp"] / m / pipeline))
        # A third of a block's work without recomputation is forward, and all of the head's.
        ahead = grid.is_last * head / rate
        forward.append(ahead + (sum(costs[-1].values()) - ahead) * plain / block / 3)
    both = [sum(cost.values()) for cost in costs]
    backward, slowest = [t - f for t, f in zip(both, forward)], both.index(max(both))
    span = pipeline_seconds(config.pp_schedule, [forward[k] for k in kinds],
                            [backward[k] for k in kinds], m)
    exposed, t, last = 0.0, both[slowest], backward[slowest]
    for grid, out in zip(grids, sent):
        hops = HOP * (dp - 1) * (2 * len(stage_layers(cfg.n_layer, pp, grid.stage)) + 2)
        gradients = out["gradients"] / data + hops * (2, 1, m, m)[zero]
        parameters = out["parameters"] / data + hops * (0, 1, 1, 2 * m)[zero]
        late = out["embedding"] / pipeline + parameters * (zero < 3)
        hidden = (last, last, m * last, m * t)[zero]
        exposed = max(exposed, late + max(0.0, gradients + parameters * (zero == 3) - hidden))
    # AdamW reads or writes twelve numbers for each parameter, about.
    numel = sum(bucket.numel * n for bucket, n in stage_buckets(cfg, grids[0], zero))
    update = 12 * dtypes[1].itemsize * numel / (dp if zero else 1) / (
        device.host if config.offload else device.bandwidth)
    return (dict({kind: m * seconds for kind, seconds in costs[slowest].items()}, fill=span - m * t,
                 dp=exposed, update=update), 1 - m * sum(both[k] for k in kinds) / (pp * span))


def goodput(checkpoint: float, speed: float, nodes: float, mtbf_hours: float) -> dict:
    """The fraction of time that makes progress, where each node fails every `mtbf_hours`, with the
    best interval between checkpoints of so many bytes (Daly 2006, equations 20 and 37; Young's of
    1974, sqrt(2 M pause), is its first term).

    Training pauses while rank 0 gathers a checkpoint at `speed` bytes/s; then a thread writes it.
    A failure costs the restart, the reading of a checkpoint, and the progress since the last whole
    one, which is a write's time older than the last.
    """
    M, pause, write = mtbf_hours * 3600 / nodes, checkpoint / speed, checkpoint / DISK
    root, lost = min(1.0, math.sqrt(pause / (2 * M))), RESTART + 2 * write
    interval = max(write, 2 * M * root * (1 + root / 3 + root ** 2 / 9) - pause)
    progress = interval / M * math.exp(-(lost + interval + pause) / M) / -math.expm1(
        -(interval + pause) / M)
    return dict(failure_hours=M / 3600, pause_seconds=pause, write_seconds=write,
                interval_seconds=interval, goodput=progress)


def make_plan(cfg: GPTConfig, config, dtypes: tuple) -> dict:
    """What `config.steps` steps on `config.world` GPUs need, as one flat dict. Memory is that of
    the fullest rank, bytes sent are those of the rank that sends most."""
    device, world, (grids, kinds) = DEVICES[config.gpu], config.world, kinds_of_stages(cfg, config)
    sizes = [memory_bytes(cfg, grid, config, dtypes, True) for grid in grids]
    needed = [sum(size for kind, size in each.items() if kind[:4] != "host") for each in sizes]
    at = needed.index(max(needed))
    sent = [traffic_bytes(cfg, grid, config, dtypes) for grid in grids]
    seconds, bubble = step_seconds(cfg, grids, kinds, sent, config, dtypes, device)
    step, N, tokens = sum(seconds.values()), parameter_count(cfg), config.batch_size * cfg.seq_len
    D, rate, days = config.steps * tokens, tokens / step / world, config.steps * step / 86400
    flops, hardware = flops_per_token(cfg), flops_per_token(cfg, config.recompute)
    gather = LINK * (device.network if world > config.gpus_per_node else device.link)
    layout = ("gpu", "world", "tp", "pp", "micro_batch", "zero", "recompute", "sequence_parallel",
              "pp_schedule", "steps")
    return dict(
        {name: getattr(config, name) for name in layout}, dp=grids[0].dp,
        layers_per_stage=-(-cfg.n_layer // config.pp),
        parameters=N, tokens_per_step=tokens, tokens=D, flops_per_token=flops, flops_6nd=6 * N * D,
        flops_with_attention=flops * D, flops_with_recomputation=hardware * D,
        pf_days=flops * D / 8.64e19, compute_optimal_tokens=20 * N,
        **{f"compute_optimal_parameters_{name}": x
           for name, x in compute_optimal(6 * N * D).items()},
        predicted_loss=chinchilla_loss(N, D),
        **{f"memory_{kind}": size for kind, size in sizes[at].items()}, memory_bytes=needed[at],
        fullest_rank=grids[at].rank, fits=needed[at] <= (1 - HEADROOM) * device.memory,
        **{f"bytes_{kind}": size for kind, size in
           max(sent, key=lambda sizes: sum(sizes.values())).items()},
        **{f"seconds_{kind}": x for kind, x in seconds.items()}, step_seconds=step, bubble=bubble,
        tokens_per_second=rate * world, model_tflops_per_gpu=rate * flops / 1e12,
        hardware_tflops_per_gpu=rate * hardware / 1e12,
        mfu=rate * flops / device.peak(dtypes[0].itemsize), days=days, gpu_hours=days * 24 * world,
        **goodput(3 * dtypes[1].itemsize * N, gather, max(1, world / config.gpus_per_node),
                  config.mtbf_hours))


def search_layouts(cfg: GPTConfig, config, dtypes: tuple, given: dict) -> list[dict]:
    """The plans of the ten fastest layouts that fit, of those with tp inside a machine and
    microbatches of 1 to 16 sequences, and with 1F1B, which takes less time and memory than GPipe.
    What `given` names stays as it is in `config`."""
    divisors = [n for n in range(1, config.world + 1) if config.world % n == 0]
    options = dict(tp=[n for n in divisors if config.gpus_per_node % n == 0],
                   pp=[n for n in divisors if n <= cfg.n_layer], pp_schedule=["1f1b"],
                   micro_batch=[1, 2, 4, 8, 16], zero=range(4), recompute=[False, True],
                   sequence_parallel=[False, True])
    options.update({name: [getattr(config, name)] for name in options.keys() & given.keys()})
    plans = []
    for values in product(*options.values()):
        one = replace(config, **dict(zip(options, values)))
        if one.zero > 0 and one.world == one.tp * one.pp:       # no replicas share anything
            continue
        with suppress(ValueError):
            check_layout(cfg, one.world, one.tp, one.pp, one.batch_size, one.micro_batch, one.zero,
                         one.sequence_parallel)
            plans.append(make_plan(cfg, one, dtypes))
    # Of the sizes of a microbatch the fastest, or of equal ones the smallest.
    plans = sorted((plan for plan in plans if plan["fits"]),
                   key=lambda plan: (plan["step_seconds"], plan["memory_bytes"]))
    best = {}
    for plan in plans:
        best.setdefault(tuple(plan[name] for name in options if name != "micro_batch"), plan)
    if not plans:
        raise ValueError(f"no layout of this model and batch size {config.batch_size} fits "
                         f"{config.world} x {config.gpu}: take more or larger GPUs, --offload, or "
                         f"a batch size that more layouts divide")
    return list(best.values())[:10]


def format_plan(config: Config, cfg: GPTConfig, plan: dict) -> str:
    """`parallel.make_plan` in lines."""
    def line(title, names):
        """What of the plan has one of these names, a regular expression."""
        return f"{title:8} " + ", ".join(
            f"{name.replace('_', ' ')} " + (f"{x:,.0f}" if x % 1 == 0 and x < 1e6 else f"{x:.4g}")
            for name, x in plan.items() if re.fullmatch(names, name))
    grid = Grid(plan["dp"], config.pp, config.tp, plan["fullest_rank"], config.sequence_parallel)
    sizes = {name[7:]: x for name, x in plan.items() if re.match("memory_(?!bytes)", name)}
    return "\n".join([
        format_layout(config, cfg, grid, config.gpu, sizes),
        f"fits     {'yes' if plan['fits'] else 'no'}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{DEVICES[config.gpu].memory / 1e9:.0f} GB, of which a tenth is to stay free",
        line("compute", "steps|tokens(_per_step)?|flops_.*|pf_days"),
        line("optimal", "compute_optimal_.*|predicted_loss"), line("sends", "bytes_.*"),
        line("time", "layers_per_stage|seconds_.*|step_seconds|bubble"),
        line("speed", "tokens_per_second|.*tflops_per_gpu|mfu|days|gpu_hours"),
        line("failures", "(failure|pause|write|interval)_.*|goodput"),
        "assumes  backward hides data parallelism, nothing hides tp and pp; no rank is slow",
        *["note     few tokens for this model: give --steps, --batch-size"] * (
            plan["tokens"] < plan["compute_optimal_tokens"] / 10),
        *["note     fp32 is slow: give --dtype bf16 (fp16 on a V100)"] * (config.dtype == "fp32")])


def print_plan(given: dict) -> None:
    """--plan: what a run would need, without starting one. Raises ValueError."""
    config, shape = merge_config(given, None)
    dtypes = PRECISIONS[config.dtype]
    if config.dtype == "bf16" and DEVICES[config.gpu].word == "V100":
        raise ValueError("a V100 has no products in bf16: give --dtype fp16")
    if config.plan.startswith("search"):
        cfg = GPTConfig(config.vocab_size, dropout=config.dropout, **shape)
        result = search_layouts(cfg, config, dtypes, given)
        columns = ("dp", "pp", "tp", "micro_batch", "zero", "recompute", "sequence_parallel",
                   "pp_schedule", "memory_bytes", "bubble", "step_seconds", "mfu", "days")
        rows = [[f"{plan[name]:.4g}" if isinstance(plan[name], float) else str(plan[name])
                 for name in columns] for plan in result]
        text = "\n".join("  ".join(x.rjust(max(4, len(name))) for x, name in zip(row, columns))
                         for row in [columns, *rows])
    else:
        config, cfg = check_config(config, shape, config.vocab_size, config.world)
        result = make_plan(cfg, config, dtypes)
        text = format_plan(config, cfg, result)
    print_rank0(json.dumps(result) if "json" in config.plan else text)


