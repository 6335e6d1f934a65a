"""Published runs, and what a plan would say of them with what they did otherwise than ours.

The plan's constants are fitted on 209 rows of public tables (least absolute error of the logarithm
of a step's time, beyond 3%). 132 rows were held out by a rule that was set before any error was
seen: MosaicML's of 4,096 tokens and more, BigScience's from February 25 on with 64 heads, and those
of Korthikanti et al. 2022. (They are no blind test any more: their errors were looked at three
times while the plan was corrected, and the SPREAD of tools/plan/report.py comes from them.
Korthikanti's figures are quoted from memory, and that DeepSpeed's stages are outermost.) Below is a
part of each.

    rows            fitted  error, mean     held out  error, mean  at most     was
    MosaicML           125         3.2%           84         5.6%    22.9%   15.8%
    BigScience          58         3.7%           40         4.0%    18.1%    9.4%
    others              26         3.1%            8         7.3%     9.4%   13.6%
    all                209         3.3%          132         5.2%    22.9%

Of the 202 pairs of BigScience's layouts of one model that were held out, 177 are in the right
order, 88% (before: 44%); of those that differ by a twentieth or more 93%. Without what was theirs
the plan orders 71% of the 186 pairs below. Six of the 132 steps are off by more than 15%: two had
1 GB of memory to spare, where PyTorch's allocator frees and asks again; two are recomputed at
65,536 tokens, where backward takes more of attention than the plan says; two contradict their
neighbors in the table (1,568 and 2,048 sequences in the same time; one microbatch of 1 43% slower
than of 2).

Without a constant, all others fitted anew:

    without            fitted  held out  order
    SHARE                4.5%      7.3%    88%
    PASSES               4.2%     22.6%    86%
    LINK (1)             4.1%      8.8%    73%
    HOP                  3.6%      7.5%    88%
    TILE                 3.6%      9.3%    88%
    WHOLE_PASSES         3.4%      5.6%    88%      (kept: --sequence-parallel divides them)
    attention's rate     3.8%     11.0%    88%
    a rate for each GPU  6.8%      9.6%    81%
    SCORES               3.8%      9.2%    88%
    WAITS                4.2%      6.2%    84%

All figures above but the 71% are of plans whose replicas were outermost, not their stages, and with
DeepSpeed's links of replicas counted as a difference. The grid has since taken the order of
Megatron-LM and DeepSpeed, and the constants stayed. Of the rows below the error of one changed,
GPT-NeoX-20B's, from -13.4% to -13.7%. Then the plan began to hide two of tensor parallelism's four
sums (time.hidden_seconds), as Megatron-LM does. Of the rows below the fitted ones' error rose from
3.1% to 3.4%, that of Korthikanti et al. fell from 7.3% to 4.2%, and the order stayed.
"""
from dataclasses import dataclass
from unittest import mock

from base.flops import flops_per_token
from model import GPTConfig
from tools.plan import estimate, time
from tools.plan.flags import PlanConfig
from tools.plan.time import BlockTimes

# Fitted with the plan's constants. They are of others' programs, so no plan has them:
SCORES = 18             # times that a (heads, T, T) matrix crosses memory without FlashAttention
WAITS = 0.009           # seconds that a block waits for its kernels, launched one at a time


@dataclass(frozen=True)
class Published:
    """A run, the seconds of a step, and what it did that ours does not:

        unfused     attention writes its scores to memory
        whole       recomputation repeats a block's last product, and its all-reduce
        halved      gradients are sent in 16 bits
        overlapped  computation hides all communication
        deepspeed   kernels are launched one at a time (CUDA_LAUNCH_BLOCKING=1); nothing hides data
                    parallelism
    """
    name: str
    seconds: float
    cfg: GPTConfig
    config: PlanConfig
    theirs: tuple = ()

    @property
    def samples_per_second(self) -> float:
        return self.config.batch_size / self.seconds


def predicted_seconds(row: Published) -> float:
    """The plan's step, with what was theirs."""
    block, traffic = time.block_seconds, estimate.traffic_bytes
    changes = dict(block_seconds=lambda stage: their_block(row, block(stage)))
    if "overlapped" in row.theirs:
        changes |= dict(HOP=0.0, hidden_seconds=lambda *_: 0.0)
    if "deepspeed" in row.theirs:
        changes |= dict(exposed=lambda seconds, hidden: seconds)
    with mock.patch.multiple(time, **changes), mock.patch.object(
            estimate, "traffic_bytes", lambda stage: their_traffic(row, traffic(stage))):
        return estimate.make_plan(row.cfg, row.config)["step_seconds"]


def their_block(row: Published, block: BlockTimes) -> BlockTimes:
    cfg, config, gpu = row.cfg, row.config, row.config.spec
    forward, backward, recomputed = (dict(part) for part in block[:3])
    if "whole" in row.theirs:
        recomputed["matrices"] = forward["matrices"]
    for part, times in ((forward, 1), (backward, 2), (recomputed, 1)):
        if "unfused" in row.theirs:
            numel = config.micro_batch * cfg.n_head * cfg.seq_len ** 2 / config.tp
            crossing = SCORES * numel * config.size / gpu.bandwidth
            part["attention"] *= gpu.attention / gpu.products
            part["attention"] += times / 3 * crossing
        if "deepspeed" in row.theirs:
            part["passes"] += times / 3 * WAITS
    return block._replace(forward=forward, backward=backward, recomputed=recomputed)


def their_traffic(row: Published, sent: dict) -> dict:
    sent = dict(sent)
    if "whole" in row.theirs and row.config.recompute:
        sent["tp"] *= 12 / 10
    if "halved" in row.theirs:
        sent["gradients"] /= 2
    if "overlapped" in row.theirs:
        sent |= dict.fromkeys(("tp", "pp", "gradients", "parameters", "embedding"), 0)
    return sent


def right_pairs(rows: list[Published], predicted: list[float]) -> list[bool]:
    """Of each two rows of other layouts, and batch sizes within 5%: is the plan's order theirs?"""
    right = []
    for i, row in enumerate(rows):
        for other, seconds in zip(rows[:i], predicted):
            ratio = row.config.batch_size / other.config.batch_size
            same = [getattr(row.config, name) == getattr(other.config, name)
                    for name in ("tp", "pp", "micro_batch")]
            if not all(same) and abs(ratio - 1) < 0.05:
                theirs = row.samples_per_second > other.samples_per_second
                ours = ratio / predicted[i] > 1 / seconds
                right.append(theirs == ours)
    return right


# ---------------------------------------------------------------------------------------------
# Fitted
# ---------------------------------------------------------------------------------------------

A100, OLD_A100, H100 = "a100-80g", "a100-40g", "h100"


def megatron(name, rate, gpu, shape, layout, batch, *theirs, seq_len=2048, vocab=51200,
             interleave=1, recompute=True, zero=0, split=False, seconds=None, network=None):
    """A row with TFLOP/s a GPU, with all of what is recomputed, or seconds of a step; (layers,
    width, heads), (tp, pp, GPUs), (sequences of a microbatch, of a step)."""
    (layers, width, heads), (tp, pp, world), (micro_batch, batch) = shape, layout, batch
    schedule = "interleaved" if interleave > 1 else "1f1b"
    config = PlanConfig(gpu=gpu, world=world, tp=tp, pp=pp, pp_schedule=schedule, zero=zero,
                        pp_chunks=interleave, micro_batch=micro_batch, batch_size=batch,
                        recompute=recompute, sequence_parallel=split, dtype="fp16",
                        network=network)
    cfg = GPTConfig(vocab, seq_len, layers, heads, width)
    if seconds is None:
        flops = flops_per_token(cfg, recompute)
        if recompute:
            flops += layers * 8 * width ** 2            # `whole`
        seconds = batch * seq_len * flops / (world * rate * 1e12)
    return Published(name, seconds, cfg, config, theirs)


OF_2021 = ("unfused", "whole")
RUNS = [
    # Narayanan et al. 2021, table 1; 175B: Megatron-LM's README
    *(megatron(f"A100 {name}", rate, A100, shape, layout, batch, *OF_2021, interleave=interleave)
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
    # Megatron-LM's README of 2020, DGX-A100
    *(megatron(f"tp {tp}", None, OLD_A100, shape, (tp, 1, tp), (16, 16), "unfused", "whole",
               seq_len=1024, seconds=seconds)
      for tp, shape, seconds in [(1, (24, 1920, 15), 1.076), (2, (30, 2304, 18), 1.026),
                                 (4, (36, 3072, 24), 1.162), (8, (42, 4096, 32), 1.343)]),
    # Megatron-LM's README of 2024; neither microbatch nor interleaving is said
    *(megatron(f"H100 {name}", rate, H100, shape, (tp, pp, 48 * tp * pp), (1, batch), "overlapped",
               seq_len=4096, vocab=131072, recompute=False, zero=1, split=tp > 1)
      for name, shape, tp, pp, batch, rate in [
        ("1.7B", (24, 2048, 16), 1, 1, 192, 408.8), ("7.1B", (30, 4096, 32), 2, 1, 192, 465.9),
        ("16B", (32, 6144, 48), 4, 1, 192, 489.1), ("32B", (48, 7168, 56), 8, 1, 192, 459.6),
        ("70B", (84, 8192, 64), 8, 2, 384, 419.7), ("119B", (92, 10240, 80), 8, 4, 768, 420.5),
        ("177B", (96, 12288, 96), 8, 6, 1152, 432.8), ("314B", (96, 16384, 128), 8, 8, 1536, 474.4),
        ("462B", (112, 18432, 144), 8, 16, 3072, 459.9)]),
    # Zhang et al. 2022, section 2.5; Black et al. 2022: 150,000 steps in 1,830 hours
    megatron("OPT-175B", 147, A100, (96, 12288, 96), (8, 1, 992), (8, 992), "unfused", "whole",
             vocab=50272, zero=3),
    megatron("GPT-NeoX-20B", None, OLD_A100, (44, 6144, 64), (2, 4, 96), (4, 1536), "unfused",
             "whole", vocab=50432, zero=1, seconds=1830 * 3600 / 150000)]


# ---------------------------------------------------------------------------------------------
# Held out
# ---------------------------------------------------------------------------------------------

MOSAIC_SHAPES = {"125m": (12, 768, 12), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
                 "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40),
                 "30b": (48, 7168, 56)}


def mosaic(gpu, size, seq_len, micro_batch, num_microbatches, recompute, rate, *theirs):
    """llm-foundry, scripts/train/benchmarking: ZeRO 3 on eight GPUs, tokens per second and GPU."""
    layers, width, heads = MOSAIC_SHAPES[size]
    batch = 8 * micro_batch * num_microbatches
    config = PlanConfig(gpu=gpu, world=8, micro_batch=micro_batch, batch_size=batch, zero=3,
                        recompute=recompute, dtype="bf16")
    return Published(f"{gpu} {size} {seq_len}", batch * seq_len / 8 / rate,
                     GPTConfig(50368, seq_len, layers, heads, width), config, theirs)


LONG = [mosaic(*row) for row in [
    (H100, "30b", 8192, 1, 21, True, 1384), (H100, "13b", 4096, 10, 3, True, 4717),
    (H100, "7b", 65536, 1, 2, True, 1956), (H100, "7b", 8192, 8, 2, True, 6935),
    (H100, "3b", 16384, 1, 6, False, 11152), (H100, "1b", 32768, 1, 4, False, 12025),
    (H100, "1b", 4096, 7, 4, False, 38535), (A100, "13b", 8192, 5, 3, True, 1795),
    (A100, "7b", 65536, 1, 2, True, 1013), (A100, "3b", 16384, 1, 6, False, 5529),
    (A100, "1b", 32768, 1, 4, False, 6275), (A100, "125m", 65536, 1, 2, False, 20368),
    (A100, "125m", 4096, 16, 2, False, 118396), (OLD_A100, "7b", 16384, 1, 4, True, 2249, "halved"),
    (OLD_A100, "3b", 4096, 2, 8, False, 8777, "halved"),
    (OLD_A100, "760m", 32768, 1, 4, True, 7183, "halved")]]

# BigScience, chronicles-prequel.md: one model of 181B parameters on 384 A100s with 6.25 GB/s each,
# ZeRO 1 and recomputation: (tp, pp, sequences of a microbatch, of a step), seconds of a step
LAYOUTS = [
    megatron(f"tp {tp} pp {pp} micro {micro_batch}", None, A100, (72, 14336, 64), (tp, pp, 384),
             (micro_batch, batch), *OF_2021, "deepspeed", vocab=250880, zero=1, seconds=seconds,
             network=6.25)
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
    megatron(f"{name}{' recomputed' if recompute else ''}", None, A100, shape, (8, pp, 8 * pp),
             batch, *OF_2021, interleave=interleave, recompute=recompute, split=not recompute,
             seconds=seconds)
    for name, shape, pp, interleave, batch, times in [
        ("22B", (48, 6144, 64), 1, 1, (4, 4), (1.42, 1.10)),
        ("175B", (96, 12288, 96), 8, 3, (1, 64), (18.13, 13.75)),
        ("530B", (105, 20480, 128), 35, 3, (1, 280), (49.05, 37.83)),
        ("1T", (128, 25600, 160), 64, 1, (1, 512), (94.42, 71.49))]
    for recompute, seconds in zip((True, False), times)]
