"""tools/plan: what a plan says, beside runs of train.py, published runs and the papers."""
import json
import math
import random
import re
from contextlib import suppress
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import parallel
import tools.plan.__main__
import tools.schedule
import train
from base.flops import parameter_count
from base.options import Config, parse_flags
from model import SIZES, GPTConfig
from models.llama import LlamaConfig
from models.moe import MoEConfig, Router
from parallel import Grid
from parallelism import kernels
from parallelism.pipeline import SCHEDULES
from parallelism.zero import FlatParameters
from runtime import checks, evaluation
from tests import published_runs
from tests.commands import PAGES
from tests.harness import (CFG, COVER, FORMULA, Alive, Memory, Rows, column, deep_enough_for,
                           gridded, log_of, nothing, run_steps, settings, staged, tokens_of,
                           traffic, without_saves)
from tools.plan import report
from tools.plan.__main__ import answer
from tools.plan.estimate import RESTART, goodput, make_plan
from tools.plan.flags import PlanConfig
from tools.plan.gpus import gpu_name
from tools.plan.memory import (Stage, activation_bytes, bucket_bytes, kinds_of_stages,
                               memory_bytes)
from tools.plan.time import stage_seconds, step_seconds
from tools.plan.traffic import traffic_bytes
from tools.scaling_law import HOFFMANN

KEPT = ("parameters", "gradients", "masters", "moments")        # from the start to the end


def plan_config(**changes):
    """PlanConfig with what `settings` has."""
    return PlanConfig(**{**asdict(settings("")), **changes})


def in_turn_choose(router, ranked):
    """Each expert is chosen by as many tokens of each sequence: (B, T, K)."""
    B, T, E = ranked.shape
    K = router.cfg.n_active
    return (torch.arange(T * K) % E).view(1, T, K).repeat(B, 1, 1)


def a_step_of_a_run(rank, world, config, cfg):
    """(numbers in this rank's buckets; bytes that a run makes there and keeps; bytes that a step
    sends by process group, an all-reduce's in a ring; FLOPs), on a device with products in its
    type; experts are used alike"""
    sent = {}
    flops = FlopCounterMode(display=False, custom_mapping={
        torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]})

    def note(name, x, *args, **kwargs):
        if name in ("isend", "all_reduce", "all_to_all_single"):
            group = next(v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup))
            kind = next(kind for kind in grid.groups if grid.groups[kind] is group)
            nbytes = x.nbytes
            if name == "all_reduce":
                nbytes *= 2 * (group.size() - 1) / group.size()
            elif name == "all_to_all_single":       # all rows but those for this rank itself
                rows, _, row_counts = args
                nbytes = rows[0].nbytes * (len(rows) - row_counts[group.rank()])
            sent[kind] = sent.get(kind, 0) + nbytes
    with gridded(rank, world, config.tp, config.pp, config.sequence_parallel,
                 config.pp_chunks, config.cp, config.ep) as grid:
        for kind in ("world", "embedding"):     # a group of its own tells its bytes apart
            group = grid.groups[kind]
            if group is not None and list(grid.groups.values()).count(group) > 1:
                grid.groups[kind] = dist.new_group(grid.members(kind),
                                                   use_local_synchronization=True)
        with Alive() as alive:
            run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg), Memory(cfg), None)
            held = alive.bytes()
        run.writer.submit = lambda *_: None
        plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with flops, traffic(note), plain, mock.patch.object(kernels, "NO_PRODUCTS", []), \
                mock.patch.object(Router, "largest", in_turn_choose), \
                mock.patch.object(evaluation, "evaluate_source", lambda *_: 0.0):
            run.log = log_of(run, Rows(run, nothing))
            run.train()
    numel = sum(bucket.numel for bucket in run.flat.buckets)
    return numel, held, sent, flops.get_total_flops()


def largest_buffers(rank, world, layout, config, cfg):
    """The most bytes of whole gradients (ZeRO 2 and 3) and gathered parameters (ZeRO 3) that the
    buckets of this rank hold at a time in a run, also those of gradients on their way."""
    largest = 0

    def noting(name):
        method = getattr(FlatParameters, name)

        def noted(flat, *args, **kwargs):
            nonlocal largest
            result = method(flat, *args, **kwargs)
            grads = sum(bucket.numel for bucket in flat.buckets if bucket.grad is not None)
            grads += sum(bucket.numel for bucket, *_ in flat.in_flight)
            held = config.master_size * grads
            if config.zero == 3:
                held += sum(bucket.data.untyped_storage().nbytes() for bucket in flat.buckets)
            largest = max(largest, held)
            return result
        return mock.patch.object(FlatParameters, name, noted)
    with noting("unshard"), noting("main_grad"):
        run_steps(rank, world, layout, config, cfg, prepare=without_saves)
    return largest


LLAMA = LlamaConfig(384, 16, 2, 8, 64, n_kv_head=4, hidden=192, qk_norm=True)
ONE_KEY = replace(LLAMA, n_kv_head=1)
# No padding, which does work that does not count; so wide that vectors count little.
WIDE = replace(CFG, vocab_size=384, n_embd=64)
EXPERTS = MoEConfig(384, 16, 3, 4, 32, n_kv_head=2, hidden=24, n_expert=4)
SHARED = replace(EXPERTS, shared_hidden=24, balance_bias=0.1)
ALL_HEADS = replace(EXPERTS, norm_all_heads=True)


def cover(number, model, **changes):
    """A model and the flags of a row of COVER."""
    row = COVER[number] | changes
    return replace(model, n_layer=deep_enough_for(row).n_layer), row


@pytest.mark.claim("A plan tells what a run holds, sends and computes.")
@pytest.mark.parametrize("world, cfg, flags", [
    # Each ZeRO stage and schedule on four ranks, tp beside pp and dp beside cp on eight.
    (4, *cover(13, ONE_KEY)), (4, *cover(17, WIDE)), (4, *cover(18, WIDE)),
    (4, *cover(1, LLAMA, cp=1)),
    (2, EXPERTS, dict(ep=2, dtype="bf16", zero=1)), (4, EXPERTS, dict(ep=2, tp=2, recompute=True)),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        (8, *cover(3, WIDE)), (8, *cover(6, LLAMA)), (8, *cover(10, WIDE)), (8, *cover(20, LLAMA)),
        (2, SHARED, dict(tp=2, sequence_parallel=True, recompute=True)),
        (4, EXPERTS, dict(ep=2, pp=2, pp_schedule="1f1b", zero=2)),
        (8, ALL_HEADS, dict(ep=2, cp=2, tp=2, sequence_parallel=True))])])
def test_a_plan_tells_what_a_run_holds_sends_and_computes(pool, tmp_path, world, cfg, flags):
    """Bytes sent, by kind, exactly, of every rank, if all experts are used alike. Of a model
    without experts also the bytes kept, which are ZeRO's formulas, and without cp, whose ranks
    leave a part of attention out, FLOPs but for those of vectors."""
    config = plan_config(out=str(tmp_path), steps=1, world=world, gpu="endless", batch_size=world,
                         micro_batch=1, check_every=0, **flags)
    tp, pp, cp = config.tp, config.pp, config.cp
    has_experts = isinstance(cfg, MoEConfig)
    formula = FORMULA["bf16" if config.dtype in ("bf16", "fp16") else "fp32"]
    ranks = pool.run(world, a_step_of_a_run, config, cfg)
    for rank, (numel, held, sent, _) in enumerate(ranks):
        grid = Grid(world // (tp * pp * cp), pp, tp, rank, cp=cp, ep=config.ep,
                    chunks=config.pp_chunks, sequence_parallel=config.sequence_parallel)
        stage = Stage(cfg, config, grid)
        told = traffic_bytes(stage)
        told["replicas"] = told.pop("gradients") + told.pop("parameters")
        if "same_experts" in sent:
            sent["replicas"] += sent.pop("same_experts")
        assert {kind: size for kind, size in told.items() if size} == pytest.approx(sent, rel=1e-12)
        if not has_experts:
            sizes = memory_bytes(stage, on_gpu=False)
            assert held == sum(sizes[kind] for kind in KEPT)
            assert held == formula(grid.replicas)[config.zero] * numel * config.master_size // 4
    if not has_experts and cp == 1:
        plan = make_plan(cfg, replace(config, gpu="h100"))
        with torch.device("meta"):
            vectors = sum(p.numel() for p in cfg.build().parameters() if p.dim() == 1)
        of_vectors = 6 * vectors * plan["tokens"]
        assert plan["flops_with_recomputation"] - of_vectors == pytest.approx(
            sum(flops for *_, flops in ranks), rel=1e-9)


WIDE_ENDS = LlamaConfig(2000, 16, 3, 4, 32, n_kv_head=2)        # of more parameters than a block


@pytest.mark.parametrize("cfg, layout, flags", [
    (replace(CFG, vocab_size=2000), (2, 1, 1), dict(zero=3, dtype="bf16")),
    (WIDE_ENDS, (2, 1, 1), dict(zero=3, micro_batch=4, recompute=True)),
    (WIDE_ENDS, (2, 1, 2), dict(zero=2, dtype="bf16"))])
def test_the_estimate_of_buffers_is_what_the_buckets_hold(pool, tmp_path, cfg, layout, flags):
    """Whole gradients and gathered parameters at their peak, on every rank, with one microbatch
    and two; at most 1% more, because a first stage's positions have their gradients late."""
    dp, tp, pp = layout
    config = plan_config(out=str(tmp_path), steps=2, world=math.prod(layout), gpu="h100", tp=tp,
                         pp=pp, **flags)
    ranks = pool.run(math.prod(layout), largest_buffers, layout, config, cfg)
    for rank, held in enumerate(ranks):
        assert held <= bucket_bytes(Stage(cfg, config, Grid(dp, pp, tp, rank))) <= 1.01 * held


LLAMA_MEASURED = ("--n-layer 12 --n-head 12 --n-kv-head 12 --n-embd 768 --seq-len 1024 --gpu h200 "
                  "--vocab-size 50257 --compile --model")


@pytest.mark.claim("The interval that a plan prints holds what one H100 and one H200 measured.")
@pytest.mark.parametrize("flags, tokens_per_second", [
    ("--gpu h100 --model gpt2 --compile", 449_000), ("--gpu h100 --model gpt2", 350_000),
    (f"{LLAMA_MEASURED} llama-nano --hidden 2048", 459_000),
    (f"{LLAMA_MEASURED} moe-nano --hidden 1024", 229_000),
    (f"{LLAMA_MEASURED} moe-nano --hidden 256 --n-expert 64 --n-active 8", 218_000)])
def test_a_printed_interval_holds_what_was_measured(flags, tokens_per_second):
    """docs/measurements.md, "One H100". HOPPER's products and COMPILED are fitted to the first two.
    The third's time is 0.2% off; mixtures take twice theirs."""
    text = answer(f"--world 1 --dtype bf16 --batch-size 64 --micro-batch 16 --steps 10000 {flags}"
                  .split())
    told, low, high = map(float, re.search(r" in (\S+) minutes \((\S+) to (\S+)\)", text).groups())
    measured = 10_000 * 64 * 1024 / tokens_per_second / 60
    assert low < measured < high and "H100" in text
    if "moe" not in flags:
        assert told == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("microbatches", [4, 12])
def test_the_time_of_a_pipeline_is_that_of_its_simulated_schedule(schedule, chunks, microbatches):
    """The last stage, with the head, is the slowest."""
    config = plan_config(world=4, gpu="h100", pp=4, pp_schedule=schedule, pp_chunks=chunks,
                         micro_batch=1, batch_size=microbatches)
    stages, kinds = kinds_of_stages(replace(CFG, n_layer=8), config)
    sent = [traffic_bytes(stage) for stage in stages]
    seconds, bubble = step_seconds(stages, kinds, sent)
    of_stages = [sum(stage_seconds(stages[kind], sent[kind]).values()) for kind in kinds]
    rows = tools.schedule.clock(
        [SCHEDULES[schedule](stage, 4, microbatches, chunks) for stage in range(4)],
        [dict(F=total / 3 / chunks, B=total * 2 / 3 / chunks) for total in of_stages])
    assert of_stages[3] == max(of_stages) > of_stages[1]
    assert bubble == pytest.approx(tools.schedule.bubble(rows))
    assert sum(seconds.values()) - seconds["dp"] - seconds["update"] == pytest.approx(
        max(end for row in rows for _, end in row.values()))


def test_fitting_in_memory_is_what_was_seen():
    """Of runs that were held out, and layouts of BigScience's model that ran out of memory. (Where
    the plan needs 84 of 85 GB, a run went on, slowly.)"""
    assert [row.name for row in published_runs.LONG
            if not make_plan(row.cfg, row.config)["fits"]] == ["h100 30b 8192"]
    row = published_runs.LAYOUTS[0]
    for tp, pp, micro_batch in [(8, 1, 1), (2, 6, 2), (2, 6, 1)]:
        config = replace(row.config, tp=tp, pp=pp, micro_batch=micro_batch, batch_size=2304)
        assert not make_plan(row.cfg, config)["fits"]


def test_scaling_laws_and_flops_are_the_papers():
    """Chinchilla: 70B, 1.4T tokens; Gopher: 280B, 300B tokens. GPT-3: 3.14e23 FLOPs, 3640 PF-days.
    """
    assert HOFFMANN(70e9, 1.4e12) == pytest.approx(1.94, abs=0.005)
    assert HOFFMANN(280e9, 300e9) == pytest.approx(1.99, abs=0.005)
    cfg = GPTConfig(50257, **SIZES["gpt3-175b"])
    plan = make_plan(cfg, PlanConfig(
        gpu="v100-32g", world=1, batch_size=1600, micro_batch=1, recompute=True,
        steps=round(300e9 / 2048 / 1600), dtype="fp16"))
    assert plan["flops_6nd"] == pytest.approx(3.14e23, rel=0.002) and not plan["fits"]
    assert plan["pf_days"] == pytest.approx(3640, rel=0.03)
    assert plan["flops_with_attention"] == pytest.approx(plan["pf_days"] * 8.64e19)
    assert plan["compute_optimal_tokens"] == 20 * parameter_count(cfg)


@pytest.mark.parametrize("size, mtbf_hours", [("gpt3-175b", 20000), ("gpt3-13b", 1000)])
def test_goodput_is_that_of_a_simulation_with_random_failures(size, mtbf_hours):
    """Of 10,000 GPUs; and no interval is much better than the one that is told."""
    def simulated(plan):
        """The fraction of the time that makes progress, with `gaps` seconds between failures."""
        interval, pause, write, read = (plan[f"{x}_seconds"]
                                        for x in ("interval", "pause", "write", "read"))
        training = gaps - RESTART - read            # after a checkpoint has been read
        steps = interval * np.maximum(0, (training - write) // (interval + pause))
        return steps.sum() / gaps.sum()
    N = parameter_count(GPTConfig(50257, **SIZES[size]))
    told = goodput(12 * N / 18e9, 12 * N / 2e9, 24 * N / 2e9, 1250, mtbf_hours)
    gaps = np.random.default_rng(0).exponential(told["failure_hours"] * 3600, 1_000_000)
    assert told["goodput"] == pytest.approx(simulated(told), rel=0.05)
    for factor in (0.5, 2):
        other = dict(told, interval_seconds=factor * told["interval_seconds"])
        assert other["interval_seconds"] < told["write_seconds"] or (
            simulated(other) < 1.01 * simulated(told))
    assert goodput(1e4, 5e3, 1e4, 1e6, 1)["goodput"] == 0


GELU = GPTConfig(257, seq_len=64, n_layer=4, n_head=4, n_embd=128)
RELU = replace(GELU, activation="relu")
SILU = LlamaConfig(257, seq_len=64, n_layer=4, n_head=4, n_embd=128, n_kv_head=2)
MIXTURE = MoEConfig(257, seq_len=64, n_layer=4, n_head=4, n_embd=128, n_kv_head=4, hidden=128,
                    n_expert=4, n_active=3)
WITH_SHARED = replace(MIXTURE, shared_hidden=160)


@pytest.mark.parametrize("tp, pp, cp, sequence_parallel, recompute, cfg, missing", [
    (1, 1, 1, False, False, RELU, []), (1, 2, 1, False, False, GELU, []),
    (1, 1, 1, False, False, SILU, []), (2, 1, 1, True, False, SILU, []),
    (2, 1, 1, False, True, GELU, []), (2, 1, 1, True, False, GELU, []),
    (2, 1, 1, True, True, RELU, []), (1, 1, 4, False, False, GELU, []),
    (2, 1, 1, True, False, SILU, [torch.bfloat16]),
    (2, 1, 4, True, True, GELU, [torch.bfloat16]), (4, 1, 1, False, False, SILU, []),
    (1, 1, 1, False, False, MIXTURE, []), (1, 1, 1, False, False, WITH_SHARED, [])])
def test_the_estimate_of_activations_is_what_autograd_keeps(
        tp, pp, cp, sequence_parallel, recompute, cfg, missing, monkeypatch):
    """Of a microbatch, after its forward: with recomputation, without the block that is there
    besides in backward. Each rank is alone here, and sums nothing. A CPU without products in the
    type of the activations keeps no more."""
    monkeypatch.setattr(kernels, "NO_PRODUCTS", missing)
    for rank in range(tp * pp * cp):
        kept = {}
        grid = Grid(1, pp, tp, rank, sequence_parallel=sequence_parallel, cp=cp)

        def keep(x):
            kept[x.untyped_storage().data_ptr()] = x
            return x
        local, flat = staged(cfg, grid, torch.bfloat16, recompute)
        positions = cfg.seq_len // cp // (tp if sequence_parallel else 1)
        tokens = tokens_of(cfg, 4)[:, :cfg.seq_len // cp]
        x = torch.randn(4, positions, cfg.n_embd).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), mock.patch.object(
                parallel, "reduce_scatter", lambda x, group: parallel.Work(x.chunk(tp)[0])):
            keep(local(tokens if grid.is_first else x, tokens))
        for bucket in flat.buckets:
            kept.pop(bucket.data.untyped_storage().data_ptr(), None)
        config = plan_config(micro_batch=4, batch_size=4, pp=pp, tp=tp, cp=cp, dtype="bf16")
        expected = activation_bytes(Stage(cfg, config, grid))
        if recompute:
            deeper = Stage(replace(cfg, n_layer=cfg.n_layer + pp), config, grid)
            block = activation_bytes(deeper) - expected
            recomputed = Stage(cfg, replace(config, recompute=True), grid)
            expected = activation_bytes(recomputed) - block
        if isinstance(cfg, LlamaConfig):        # the plan leaves out cos and sin of the positions
            expected += cfg.n_layer * cfg.seq_len * cfg.head_dim * 2
        assert sum(x.untyped_storage().nbytes() for x in kept.values()) == pytest.approx(
            expected, rel=0.06)


@pytest.mark.claim("What a plan prints for published runs is as far off as docs/planning.md says.")
def test_the_planning_page_has_the_errors_as_printed():
    """Of each source that this repository keeps; and the intervals hold what the page says."""
    page, of_many, means = PAGES["planning.md"], [], []
    for source, rows in [("Megatron-LM, A100", published_runs.MEGATRON_A100),
                         ("Narayanan et al., table 2", published_runs.MORE_GPUS),
                         ("Korthikanti et al.", published_runs.SEQUENCE_PARALLEL),
                         ("OPT-175B, GPT-NeoX-20B", published_runs.OPT_AND_NEOX),
                         ("BigScience, 181B", published_runs.LAYOUTS),
                         ("MosaicML, 4,096 tokens and more", published_runs.LONG),
                         ("Llama 3, torchtitan, fms-fsdp, H100", published_runs.LLAMAS),
                         ("Megatron-LM, H100", published_runs.MEGATRON_H100)]:
        planned = np.array([make_plan(row.cfg, row.config)["step_seconds"] for row in rows])
        published = np.array([row.seconds for row in rows])
        errors = abs(planned / published - 1)
        assert (f"| {source} | {len(rows)} | {errors.mean():.0%} | {errors.max():.0%} | "
                f"{np.mean(published / planned):.2f} |") in page
        means.append(errors.mean())
        of_many += list(published / planned)
        if rows is published_runs.LONG:
            low, high = report.OF_ONE_GPU
            assert low < min(published / planned) and max(published / planned) < high
        if rows is published_runs.LAYOUTS:
            right = published_runs.right_pairs(rows, planned)
            words = f"{np.mean(right):.0%} of BigScience's pairs correctly ({len(right)} pairs)"
            assert words in page and np.mean(right) >= 0.78
            assert errors.mean() <= 0.12 and errors.max() <= 0.23
    low, high = report.OF_MANY
    held = np.mean([low <= ratio <= high for ratio in of_many])
    assert held >= 0.9 and f"{low:g} to {high:g} times the time" in page
    assert f"{held:.0%} of these {len(of_many)} steps" in page
    told = f"{min(means):.0%} to {max(means):.0%} off in the mean".replace("%", "", 1)
    assert told in page and told in report.format_trust(CFG, plan_config(world=2))


@pytest.mark.parametrize("flags", ["", "--batch-size 64"])
def test_the_batch_is_the_same_with_a_search_and_says_whose_choice_it_is(flags):
    """A search also prints GPU hours, of which a price makes the cost of the run."""
    base = f"--world 8 --gpu h100 --model gpt2 --dtype bf16 {flags}".split()
    one, all_layouts = answer(base), answer([*base, "--search"])
    line = re.search("(?m)^batch .*$", one)[0]
    size = 64 if flags else Config.batch_size
    assert line in all_layouts and f"{size} sequences" in line
    assert f"{size * 1024:,} tokens per step" in line and ("default" in line) == (not flags)
    head, best = all_layouts.splitlines()[1:3]
    days, hours = (float(cell.replace(",", "")) for cell in best.split()[-2:])
    assert head.endswith("days  GPU hours") and hours == pytest.approx(8 * 24 * days, rel=0.01)


def test_the_search_finds_the_fastest_layouts_that_fit():
    """Ten, each once, and what its flags would plan; none of others is faster. Flags that are given
    stay."""
    base = PlanConfig(world=16, tp=4, gpu="a100-40g", model="gpt3-13b", dtype="bf16",
                      batch_size=256)
    cfg = GPTConfig(50257, **SIZES["gpt3-13b"])
    choices = dict(pp=(1, 2, 4), micro_batch=(1, 2, 4), zero=range(4), recompute=(False, True),
                   sequence_parallel=(False, True), pp_schedule=("gpipe", "1f1b", "interleaved"),
                   pp_chunks=(1, 2, 4))

    def planned(chosen):
        config, _ = checks.check_config(replace(base, **chosen), SIZES["gpt3-13b"], 50257, 16,
                                        "cuda")
        return make_plan(cfg, config)

    def shown(plan):                        # of equal ones others may come first
        return float(f"{plan['step_seconds']:.3g}")
    plans = json.loads(answer("--world 16 --gpu a100-40g --model gpt3-13b --dtype bf16 "
                              "--batch-size 256 --tp 4 --search --json".split()))
    seconds, rng = [shown(plan) for plan in plans], random.Random(0)
    assert len(plans) == 10 and seconds == sorted(seconds)
    assert all(plan["fits"] and (plan["dp"] > 1 or plan["zero"] == 0) for plan in plans)
    assert plans == [planned({name: plan[name] for name in choices}) for plan in plans]
    for _ in range(100):                        # most do not go together
        chosen = {name: rng.choice(values) for name, values in choices.items()}
        with suppress(ValueError):
            other = planned(chosen)
            assert shown(other) >= seconds[-1] or not other["fits"] or (
                other["step_seconds"] in column(plans, "step_seconds")), chosen


def test_the_pages_plan_is_what_the_command_prints():
    """As text and as one flat object, and as the module's docstring says."""
    section = PAGES["planning.md"]
    command = section.split("```")[1].replace("\\\n", " ")
    flags = command.partition("tools.plan")[2].split()
    text = answer(flags)
    plan = json.loads(answer([*flags, "--json"]))
    folder = json.loads(answer([*flags, "--json", "--checkpoint-format", "folder"]))
    for words in (f"{plan['memory_bytes'] / 1e9:.0f} of 85 GB", f"{plan['days']:.0f} days",
                  f"{plan['hardware_tflops_per_gpu']:.0f} TFLOP/s per GPU (the paper: 147)",
                  f"at {plan['goodput']:.0%} goodput {plan['days'] / plan['goodput']:.0f} days",
                  f"| {plan['checkpoint_bytes'] / 1e12:.1f} TB |",
                  f"| {plan['write_seconds'] / 60:.0f} minutes, on a disk of 2 GB/s |",
                  f"| written in {folder['write_seconds']:.0f} s, read in "
                  f"{folder['read_seconds']:.0f} s, {folder['goodput']:.1%} goodput |"):
        assert words in " ".join(section.split()), words
    assert not any(isinstance(value, (dict, list)) for value in plan.values())
    assert plan["mfu"] * 312 == pytest.approx(plan["model_tflops_per_gpu"])
    assert plan["days"] * 86400 == pytest.approx(147660 * plan["step_seconds"])
    for line in text.splitlines()[:2]:
        assert line.partition("; a week")[0] in tools.plan.__doc__


@pytest.mark.parametrize("flags, start", [
    ("--world 1", "python train.py"),
    ("--world 2 --tp 2 --recompute", "torchrun --nproc_per_node=2 train.py"),
    ("--world 4 --gpus-per-node 4 --search", "torchrun --nproc_per_node=4 train.py"),
    ("--world 16 --pp 2 --pp-schedule 1f1b --tokens 1e8", "torchrun --nnodes=2 --nproc_per_node=8 "
     "--rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py")])
def test_the_command_of_a_plan_starts_the_run_that_was_planned(flags, start):
    """train.py's parser takes its flags, its checks take their layout on so many GPUs,
    and the plan of these flags is the one that was printed."""
    words = f"{flags} --gpu a100-80g --dtype bf16 --model gpt2 --batch-size 96".split()
    command = re.search("(?m)^(?:command  )?((?:torchrun|python) .*)$", answer(words))[1]
    assert command.startswith(start)
    flags_of_train = command.partition("train.py --data DIR ")[2].split()
    printed = json.loads(answer([*words, "--json"]))
    best = printed[0] if "--search" in words else printed
    steps = flags_of_train.index("--save-every")
    assert int(flags_of_train[steps + 1]) == report.save_every(best) <= best["steps"]
    given, world = parse_flags(flags_of_train), int(words[1])
    config, cfg = checks.check_config(Config(**given), SIZES[given["model"]], 50257, world, "cuda")
    checks.check_layout(cfg, world, config.batch_size, config)
    if "--search" in words:
        del flags_of_train[steps:steps + 2]             # the plan has no such flag
        again = json.loads(answer([*"--world 4 --gpu a100-80g --json".split(), *flags_of_train]))
        del again["pp_schedule"]            # of one stage it has any name
        assert again["pp"] == 1 and best.items() >= again.items()


def test_a_gpu_that_the_plan_does_not_know_is_three_numbers():
    """Those of an A100, on one GPU, give an A100's plan. A fourth one is NVLink's."""
    assert gpu_name("H100") == "h100"
    flags = "--world 1 --json --dtype bf16 --gpu".split()
    known, own = (json.loads(answer([*flags, gpu])) for gpu in ("a100-80g", "312:80:2039"))
    assert known == own | dict(gpu="a100-80g")
    assert "over 450 GB/s to a GPU of the same machine" in answer(
        "--world 1 --gpu 989:80:3350:450".split())
