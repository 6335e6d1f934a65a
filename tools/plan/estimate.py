"""The whole plan of one layout, as numbers."""
import math

from amp import PRECISIONS
from model import GPTConfig, flops_per_token, parameter_count
from tools.plan.flags import LAYOUT, PlanConfig, gpu_of
from tools.plan.laws import PF_DAY, chinchilla_loss, compute_optimal, goodput
from tools.plan.memory import memory_bytes
from tools.plan.stages import kinds_of_stages
from tools.plan.time import LINK, recomputes_attention, step_seconds
from tools.plan.traffic import traffic_bytes

HEADROOM = 0.06         # fraction of memory for temporaries, NCCL and fragmentation
DISK = 2e9              # bytes per second of one writer
DAY = 86400


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
