"""Published runs, beside which tests/test_plan.py puts what a plan prints.

The plan's constants are fitted on other rows of public tables: on A100s every second row of
MosaicML's README, of Hagemann et al. 2023 (13B and 65B, without recomputation), fms-fsdp,
flash-attention and InternEvo; on H100s our own two runs, and the links on torchtitan's, MosaicML's
and Llama 3's. These 44 are BigScience's from February 25 on with 64 heads, those of Korthikanti et
al. 2022 (quoted from memory), and MosaicML's of 4,096 tokens and more, some of which were fitted.
Their errors were in view while the plan was corrected. What these programs did
otherwise than ours:

    Korthikanti, BigScience     attention writes its scores to memory; recomputation repeats a
                                block's last product, and its all-reduce
    BigScience                  kernels are launched one at a time (CUDA_LAUNCH_BLOCKING=1);
                                nothing hides data parallelism
    MosaicML, A100 of 40 GB     gradients are sent in 16 bits
"""
from dataclasses import dataclass

from model import GPTConfig
from tools.plan.flags import PlanConfig


@dataclass(frozen=True)
class Published:
    name: str
    seconds: float
    cfg: GPTConfig
    config: PlanConfig


def right_pairs(rows: list[Published], predicted: list[float]) -> list[bool]:
    """Of each two rows of other layouts, and batch sizes within 5%: is the plan's order theirs?"""
    right = []
    for i, row in enumerate(rows):
        for other, seconds in zip(rows[:i], predicted):
            ratio = row.config.batch_size / other.config.batch_size
            same = [getattr(row.config, name) == getattr(other.config, name)
                    for name in ("tp", "pp", "micro_batch")]
            if not all(same) and abs(ratio - 1) < 0.05:
                right.append((ratio / row.seconds > 1 / other.seconds)
                             == (ratio / predicted[i] > 1 / seconds))
    return right


# ---- The rows ---------------------------------------------------------------------------------

A100, OLD_A100, H100 = "a100-80g", "a100-40g", "h100"


def megatron(name, shape, layout, batch, seconds, vocab=51200, interleave=1, recompute=True, zero=0,
             network=None):
    """(layers, width, heads), (tp, pp, GPUs), (sequences of a microbatch, of a step). Sequence
    parallelism where nothing is recomputed."""
    (layers, width, heads), (tp, pp, world), (micro_batch, batch) = shape, layout, batch
    schedule = "interleaved" if interleave > 1 else "1f1b"
    config = PlanConfig(gpu=A100, world=world, tp=tp, pp=pp, pp_schedule=schedule, zero=zero,
                        pp_chunks=interleave, micro_batch=micro_batch, batch_size=batch,
                        recompute=recompute, sequence_parallel=not recompute, dtype="fp16",
                        network=network)
    return Published(name, seconds, GPTConfig(vocab, 2048, layers, heads, width), config)


MOSAIC_SHAPES = {"125m": (12, 768, 12), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
                 "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40),
                 "30b": (48, 7168, 56)}


def mosaic(gpu, size, seq_len, micro_batch, num_microbatches, recompute, rate):
    """llm-foundry, scripts/train/benchmarking: ZeRO 3 on eight GPUs, tokens per second and GPU."""
    layers, width, heads = MOSAIC_SHAPES[size]
    batch = 8 * micro_batch * num_microbatches
    config = PlanConfig(gpu=gpu, world=8, micro_batch=micro_batch, batch_size=batch, zero=3,
                        recompute=recompute, dtype="bf16")
    return Published(f"{gpu} {size} {seq_len}", batch * seq_len / 8 / rate,
                     GPTConfig(50368, seq_len, layers, heads, width), config)


LONG = [mosaic(*row) for row in [
    (H100, "30b", 8192, 1, 21, True, 1384), (H100, "13b", 4096, 10, 3, True, 4717),
    (H100, "7b", 65536, 1, 2, True, 1956), (H100, "7b", 8192, 8, 2, True, 6935),
    (H100, "3b", 16384, 1, 6, False, 11152), (H100, "1b", 32768, 1, 4, False, 12025),
    (H100, "1b", 4096, 7, 4, False, 38535), (A100, "13b", 8192, 5, 3, True, 1795),
    (A100, "7b", 65536, 1, 2, True, 1013), (A100, "3b", 16384, 1, 6, False, 5529),
    (A100, "1b", 32768, 1, 4, False, 6275), (A100, "125m", 65536, 1, 2, False, 20368),
    (A100, "125m", 4096, 16, 2, False, 118396), (OLD_A100, "7b", 16384, 1, 4, True, 2249),
    (OLD_A100, "3b", 4096, 2, 8, False, 8777),
    (OLD_A100, "760m", 32768, 1, 4, True, 7183)]]

# BigScience, chronicles-prequel.md: one model of 181B parameters on 384 A100s with 6.25 GB/s each,
# ZeRO 1 and recomputation: (tp, pp, sequences of a microbatch, of a step), seconds of a step
LAYOUTS = [
    megatron(f"tp {tp} pp {pp} micro {micro_batch}", (72, 14336, 64), (tp, pp, 384),
             (micro_batch, batch), seconds, vocab=250880, zero=1, network=6.25)
    for (tp, pp, micro_batch, batch), seconds in [
        ((8, 6, 4, 2048), 114.11), ((8, 6, 6, 2016), 123.57), ((8, 12, 4, 2048), 117.07),
        ((8, 12, 2, 2048), 128.82), ((8, 8, 4, 2016), 113.16), ((8, 4, 2, 2016), 125.52),
        ((8, 4, 4, 2016), 114.81), ((8, 2, 1, 2016), 145.45), ((8, 2, 2, 2016), 136.13),
        ((4, 12, 4, 2048), 111.89), ((4, 12, 2, 2048), 110.48), ((4, 12, 2, 2048), 113.54),
        ((4, 6, 4, 2048), 117.11), ((4, 6, 2, 2048), 111.71), ((2, 12, 2, 2048), 112.50),
        ((2, 24, 1, 2048), 119.53), ((2, 24, 2, 2048), 122.75), ((4, 24, 1, 2048), 130.60),
        ((4, 12, 2, 2048), 110.42), ((8, 6, 4, 2048), 113.95)]]

# Korthikanti et al. 2022, table 5: all of a block recomputed, and attention alone with sequence
# parallelism, which without its scores in memory is no recomputation
SEQUENCE_PARALLEL = [
    megatron(f"{name}{' recomputed' if recompute else ''}", shape, (8, pp, 8 * pp), batch, seconds,
             interleave=interleave, recompute=recompute)
    for name, shape, pp, interleave, batch, times in [
        ("22B", (48, 6144, 64), 1, 1, (4, 4), (1.42, 1.10)),
        ("175B", (96, 12288, 96), 8, 3, (1, 64), (18.13, 13.75)),
        ("530B", (105, 20480, 128), 35, 3, (1, 280), (49.05, 37.83)),
        ("1T", (128, 25600, 160), 64, 1, (1, 512), (94.42, 71.49))]
    for recompute, seconds in zip((True, False), times)]
