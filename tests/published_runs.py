"""Published runs, beside which tests/test_plan.py puts what a plan prints.

The plan's constants come from larger tables (636 steps) of which these are a part:

    fitted      AMPERE's products, attention and links, and SHARE: every second row of MosaicML's on
                A100s, and of Hagemann et al. 2023 (13B and 65B with the fused norm, not recomputed)
    in view     PASSES, when one constant took the place of two, and AMPERE's network: OPT, which
                0.6 suits, and BigScience, which 0.3 suits; HOPPER's attention, links and network:
                all rows on H100s
    our own     HOPPER's products and COMPILED (tests/test_plan.py)
    neither     Megatron-LM on A100s, Narayanan et al., Korthikanti et al., GPT-NeoX-20B

Figures of Narayanan et al. (table 2), Korthikanti et al. and Llama 3 are quoted from memory; how
many chunks Llama 3's stages had is a guess. What these programs did otherwise than ours:

    Megatron-LM of 2021         attention writes its scores to memory; recomputation repeats a
                                block's last product, and its all-reduce
    BigScience                  the same; kernels are launched one at a time
                                (CUDA_LAUNCH_BLOCKING=1); nothing hides data parallelism
    OPT; MosaicML, 40 GB        gradients are sent in 16 bits (we send and count 32)
    Megatron-LM, H100           hides all communication
    torchtitan                  cards of 500 W, with slower memory; recomputes some products"""
from dataclasses import dataclass

from base.flops import flops_per_token
from model import GPTConfig
from models.llama import LlamaConfig
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


def megatron(name, shape, layout, batch, seconds=None, rate=None, gpu=A100, seq_len=2048,
             vocab=51200, interleave=1, recompute=True, zero=0, network=None):
    """(layers, width, heads), (tp, pp, GPUs), (sequences of a microbatch, of a step), and seconds
    of a step or TFLOP/s a GPU, with all of what is recomputed. Sequence parallelism where nothing
    is recomputed."""
    (layers, width, heads), (tp, pp, world), (micro_batch, batch) = shape, layout, batch
    config = PlanConfig(gpu=gpu, world=world, tp=tp, pp=pp, zero=zero, pp_chunks=interleave,
                        pp_schedule="interleaved" if interleave > 1 else "1f1b",
                        micro_batch=micro_batch, batch_size=batch, recompute=recompute,
                        sequence_parallel=tp > 1 and not recompute, dtype="fp16", network=network)
    cfg = GPTConfig(vocab, seq_len, layers, heads, width)
    if rate is not None:
        flops = flops_per_token(cfg, recompute) + (8 * layers * width ** 2 if recompute else 0)
        seconds = batch * seq_len * flops / (world * rate * 1e12)
    return Published(name, seconds, cfg, config)


# Narayanan et al. 2021, table 1; 175B, and those of 40 GB: Megatron-LM's README (2021, 2020)
MEGATRON_A100 = [
    *(megatron(name, shape, layout, batch, rate=rate, interleave=interleave)
      for name, shape, layout, interleave, batch, rate in [
        ("1.7B", (24, 2304, 24), (1, 1, 32), 1, (16, 512), 137),
        ("3.6B", (30, 3072, 32), (2, 1, 64), 1, (16, 512), 138),
        ("7.5B", (36, 4096, 32), (4, 1, 128), 1, (16, 512), 142),
        ("18B", (40, 6144, 48), (8, 1, 256), 1, (8, 1024), 135),
        ("39B", (48, 8192, 64), (8, 2, 512), 1, (4, 1536), 138),
        ("76B", (60, 10240, 80), (8, 4, 1024), 3, (2, 1792), 140),
        ("145B", (80, 12288, 96), (8, 8, 1536), 2, (2, 2304), 148),
        ("310B", (96, 16384, 128), (8, 16, 1920), 2, (1, 2160), 155),
        ("530B", (105, 20480, 128), (8, 35, 2520), 3, (1, 2520), 163),
        ("1T", (128, 25600, 160), (8, 64, 3072), 1, (1, 3072), 163),
        ("175B", (96, 12288, 96), (8, 16, 1024), 1, (1, 1536), 138)]),
    *(megatron(f"tp {tp}", shape, (tp, 1, tp), (16, 16), seconds, gpu=OLD_A100, seq_len=1024)
      for tp, shape, seconds in [(1, (24, 1920, 15), 1.076), (2, (30, 2304, 18), 1.026),
                                 (4, (36, 3072, 24), 1.162), (8, (42, 4096, 32), 1.343)])]
# Megatron-LM's README of 2024; neither microbatch nor interleaving is said
MEGATRON_H100 = [
    megatron(name, shape, (tp, pp, 48 * tp * pp), (1, batch), rate=rate, gpu=H100, seq_len=4096,
             vocab=131072, recompute=False, zero=1)
    for name, shape, tp, pp, batch, rate in [
        ("1.7B", (24, 2048, 16), 1, 1, 192, 408.8), ("7.1B", (30, 4096, 32), 2, 1, 192, 465.9),
        ("16B", (32, 6144, 48), 4, 1, 192, 489.1), ("32B", (48, 7168, 56), 8, 1, 192, 459.6),
        ("70B", (84, 8192, 64), 8, 2, 384, 419.7), ("119B", (92, 10240, 80), 8, 4, 768, 420.5),
        ("177B", (96, 12288, 96), 8, 6, 1152, 432.8), ("314B", (96, 16384, 128), 8, 8, 1536, 474.4),
        ("462B", (112, 18432, 144), 8, 16, 3072, 459.9)]]
# Zhang et al. 2022, section 2.5; Black et al. 2022: 150,000 steps in 1,830 hours
OPT_AND_NEOX = [
    megatron("OPT-175B", (96, 12288, 96), (8, 1, 992), (8, 992), rate=147, vocab=50272, zero=3),
    megatron("GPT-NeoX-20B", (44, 6144, 64), (2, 4, 96), (4, 1536), 1830 * 3600 / 150000,
             gpu=OLD_A100, vocab=50432, zero=1)]
# Narayanan et al. 2021, table 2: the same model on more and more GPUs
MORE_GPUS = [
    megatron(f"{pp} x {world}", shape, (8, pp, world), (1, batch), rate=rate)
    for shape, pp, batch, rates in [
        ((96, 12288, 96), 12, 1536, {384: 153, 768: 149, 1536: 141}),
        ((105, 20480, 128), 35, 2240, {560: 171, 1120: 167, 2240: 159})]
    for world, rate in rates.items()]


def llama(name, shape, seq_len, vocab, rate=None, tflops=None, **layout):
    """(layers, width, heads, heads of K and V, hidden); tokens per second, or TFLOP/s, of a GPU."""
    layers, width, heads, keys, hidden = shape
    cfg = LlamaConfig(vocab, seq_len, layers, heads, width, n_kv_head=keys, hidden=hidden)
    config = PlanConfig(gpu=H100, dtype="bf16", **layout)
    rate = rate or tflops * 1e12 / flops_per_token(cfg)
    return Published(name, config.batch_size * seq_len / config.world / rate, cfg, config)


# Dubey et al. 2024, table 4; torchtitan's benchmarks of December 2024; fms-fsdp's README
LLAMAS = [
    *(llama(f"405B {world}", (126, 16384, 128, 8, 53248), 8192, 128256, tflops=tflops, world=world,
            tp=8, pp=16, pp_schedule="interleaved", pp_chunks=8, zero=1, micro_batch=1,
            batch_size=2048, sequence_parallel=True)
      for world, tflops in [(8192, 430), (16384, 400)]),
    *(llama(f"torchtitan {world}", (32, 4096, 32, 8, 14336), 8192, 128256, rate, world=world,
            zero=3, micro_batch=2, batch_size=2 * world, compile=compiled)
      for world, compiled, rate in [(8, False, 5762), (8, True, 6667), (128, False, 5605),
                                    (128, True, 6514)]),
    llama("fms-fsdp", (32, 4096, 32, 32, 11008), 4096, 32000, 9600, world=96, zero=2, micro_batch=2,
          batch_size=192, compile=True, network=12.5)]

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
    (OLD_A100, "3b", 4096, 2, 8, False, 8777), (OLD_A100, "760m", 32768, 1, 4, True, 7183)]]

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
