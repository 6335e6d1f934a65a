"""Published runs, and what a plan would say of them with what they did otherwise than ours.

The plan's constants are fitted on 209 rows of public tables. 132 others were held out by a rule
that was set before any error was seen: MosaicML's of 4,096 tokens and more, BigScience's from
February 25 on with 64 heads, and those of Korthikanti et al. 2022. (They are no blind test any
more: their errors were looked at three times while the plan was corrected. Korthikanti's figures
are quoted from memory, and that DeepSpeed's stages are outermost.) Below are 44 of the rows that
were held out. Commit 8a7dec6 also has 26 of those that were fitted, and the errors without each
constant.
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


# ---- The rows ---------------------------------------------------------------------------------

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
