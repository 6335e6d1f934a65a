"""The whole plan of one layout, as numbers: memory, traffic and time of its stages, what failures
cost, and what scaling laws say."""
import math

from base.flops import active_parameters, flops_per_token, parameter_count
from model import GPTConfig
from tools.plan.flags import LAYOUT, PlanConfig
from tools.plan.gpus import GPUSpec
from tools.plan.memory import gpu_bytes, kinds_of_stages, memory_bytes
from tools.plan.time import step_seconds
from tools.plan.traffic import traffic_bytes
from tools.scaling_law import HOFFMANN

HEADROOM = 0.06         # fraction of memory for temporaries, NCCL and fragmentation
DISK = 2e9              # bytes per second of one writer, or of a machine's ranks together
HOST_COPY = 1.75e9      # bytes per second of one thread, from pinned memory to new memory
RESTART = 300.0         # seconds from a failure until a checkpoint is read
DAY = 86400


def usable_memory(gpu: GPUSpec) -> float:
    """Bytes of a GPU that a run can take."""
    return (1 - HEADROOM) * gpu.memory


def make_plan(cfg: GPTConfig, config: PlanConfig) -> dict:
    """Estimate a run of `config.steps` steps on `config.world` GPUs, as one flat dict in bytes and
    seconds, unless a name has another unit. Memory is that of the fullest rank; bytes_... are what
    the rank that sends most sends in a step."""
    stages, kinds = kinds_of_stages(cfg, config)
    gpu = config.spec
    plan = {name: getattr(config, name) for name in ("gpu", "world", "steps", *LAYOUT)}
    plan |= dict(dp=stages[0].grid.dp, layers_per_stage=math.ceil(cfg.n_layer / config.pp))
    plan |= compute_of(cfg, config)

    memory = [memory_bytes(stage) for stage in stages]
    on_gpu = [gpu_bytes(sizes) for sizes in memory]
    fullest = on_gpu.index(max(on_gpu))
    plan |= {f"memory_{kind}": size for kind, size in memory[fullest].items()}
    plan |= dict(memory_bytes=on_gpu[fullest], fullest_rank=stages[fullest].grid.rank,
                 fits=on_gpu[fullest] <= usable_memory(gpu))

    sent = [traffic_bytes(stage) for stage in stages]
    busiest = max(sent, key=lambda sizes: sum(sizes.values()))
    plan |= {f"bytes_{kind}": size for kind, size in busiest.items()}

    seconds, bubble = step_seconds(stages, kinds, sent)
    step = sum(seconds.values())
    days = config.steps * step / DAY
    rate = plan["tokens_per_step"] / step / config.world        # tokens per second and GPU
    plan |= {f"seconds_{kind}": x for kind, x in seconds.items()}
    plan |= dict(
        step_seconds=step, bubble=bubble, tokens_per_second=rate * config.world,
        model_tflops_per_gpu=rate * plan["flops_per_token"] / 1e12,
        hardware_tflops_per_gpu=rate * hardware_flops_per_token(cfg, config) / 1e12,
        mfu=rate * plan["flops_per_token"] / gpu.peak(config.size),
        days=days, gpu_hours=days * 24 * config.world)

    # A checkpoint holds masters and moments. Training pauses while each rank copies its own to the
    # host, where one thread copies them once more, out of pinned memory; or writes a folder.
    checkpoint = 3 * config.master_size * plan["parameters"]
    moments = max(sizes.get("moments", 0) + sizes.get("host_moments", 0) for sizes in memory)
    write, read = save_seconds(checkpoint, config, stages[0].grid.replicas)
    waits = dict(file=(1.5 * moments * (1 / gpu.host + 1 / HOST_COPY), write), folder=(write, 0.0))
    nodes = max(1, config.world / config.gpus_per_node)
    return plan | goodput(*waits[config.checkpoint_format], read, nodes, config.mtbf_hours) | dict(
        checkpoint_bytes=checkpoint, write_seconds=write)


def save_seconds(checkpoint: float, config: PlanConfig, replicas: int) -> tuple[float, float]:
    """Seconds to write a checkpoint of so many bytes, and to read it.

        file    rank 0 receives and writes a parameter at a time; it reads the whole file once more
                than the others, for its CRCs
        folder  the machines whose ranks have a part write and read side by side, as fast as their
                network and the file system let them. Without ZeRO one replica writes, and each
                reads all. The CRCs are read once more, by all ranks together
    """
    gpu = config.spec
    arriving = gpu.on_link * gpu.host
    machine = DISK
    if config.world > config.gpus_per_node:
        arriving = gpu.on_network * gpu.network
        machine = min(DISK, arriving * config.gpus_per_node)
    if config.checkpoint_format == "file":
        return checkpoint / arriving + checkpoint / DISK, 2 * checkpoint / DISK

    def rate(ranks: int) -> float:
        return min(1e9 * config.file_system, machine * max(1, ranks / config.gpus_per_node))
    writers, copies = config.world, 1
    if config.zero == 0:
        writers = config.pp * config.tp * config.ep
        copies = replicas / config.ep
    return checkpoint / rate(writers), (1 + copies) * checkpoint / rate(config.world)


def hardware_flops_per_token(cfg: GPTConfig, config: PlanConfig) -> int:
    """`flops_per_token`, with what is recomputed."""
    again = 0
    if config.recomputes_attention:
        again = 4 * cfg.n_layer * cfg.n_head * cfg.head_dim * cfg.seq_len
    return flops_per_token(cfg, config.recompute) + again


def compute_of(cfg: GPTConfig, config: PlanConfig) -> dict:
    """Parameters, tokens and FLOPs of the run, and what scaling laws say about them."""
    N = parameter_count(cfg)
    tokens_per_step = config.batch_size * cfg.seq_len
    tokens = config.steps * tokens_per_step
    flops = flops_per_token(cfg)
    active = active_parameters(cfg)             # what laws for dense models are asked about
    best, _ = HOFFMANN.optimal(6 * active * tokens)
    return dict(
        parameters=N, active_parameters=active, tokens_per_step=tokens_per_step, tokens=tokens,
        flops_per_token=flops, flops_6nd=6 * active * tokens, flops_with_attention=flops * tokens,
        flops_with_recomputation=hardware_flops_per_token(cfg, config) * tokens,
        pf_days=flops * tokens / (1e15 * DAY), compute_optimal_tokens=20 * active,
        compute_optimal_parameters=float(best), predicted_loss=float(HOFFMANN(active, tokens)))


def goodput(pause: float, write: float, read: float, nodes: float, mtbf_hours: float) -> dict:
    """The fraction of time that makes progress, where each node fails every `mtbf_hours`, with the
    best interval between checkpoints (Daly 2006, equations 20 and 37; Young's of 1974,
    sqrt(2 M pause), is its first term).

    Training pauses for `pause` seconds; then a thread writes for `write` seconds, one checkpoint at
    a time. A failure costs the restart, the `read` seconds, and
    the progress since the last whole checkpoint, which is a write's time older than the last.
    """
    M = mtbf_hours * 3600 / nodes           # seconds between two failures of the job
    root = min(1.0, math.sqrt(pause / (2 * M)))
    interval = max(write, 2 * M * root * (1 + root / 3 + root ** 2 / 9) - pause)
    lost = RESTART + read + write
    progress = (interval / M * math.exp(-(lost + interval + pause) / M)
                / -math.expm1(-(interval + pause) / M))
    return dict(failure_hours=M / 3600, pause_seconds=pause, write_seconds=write,
                read_seconds=read, interval_seconds=interval, goodput=progress)
