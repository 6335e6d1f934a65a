"""The fastest layouts, and what so many days train."""
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from base.flops import flops_per_token, parameter_count
from model import SIZES, GPTConfig
from runtime.layout_checks import check_layout
from tools.plan.estimate import DAY, make_plan, plan_of_stages, usable_memory
from tools.plan.flags import LAYOUT, PlanConfig
from tools.plan.memory import gpu_bytes, memory_bytes
from tools.plan.stages import kinds_of_stages

LEAST_POSITIONS = 4096  # of a sequence, that --search leaves a rank: shorter ones need no cp
BATCH_TOKENS = 2 ** 19  # of a step with --days and no --model: GPT-3's smallest batch


def candidates(cfg: GPTConfig, config: PlanConfig, options: dict) -> Iterator[PlanConfig]:
    """The layouts of these options that train.py takes. If --ep is not among the options, a layout
    of a mixture comes with each --ep that divides its experts and its replicas."""
    for values in product(*options.values()):
        one = replace(config, **dict(zip(options, values)))
        if one.zero > 0 and one.world == one.tp * one.pp:   # one replica has nothing to shard
            continue
        try:
            check_layout(cfg, one.world, one.batch_size, one)
        except ValueError:
            continue
        common = 1
        if hasattr(cfg, "n_expert") and "ep" not in options:
            common = math.gcd(cfg.n_expert, one.world // (one.tp * one.pp))
        yield one
        for ep in range(2, common + 1):
            if common % ep == 0:
                yield replace(one, ep=ep)


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
    for name in (options.keys() | {"ep"}) & given.keys():
        options[name] = [getattr(config, name)]
    plans, least = [], math.inf
    for one in candidates(cfg, config, options):
        stages, kinds = kinds_of_stages(cfg, one)
        memory = [memory_bytes(stage) for stage in stages]
        size = max(map(gpu_bytes, memory))
        least = min(least, size)
        if size <= usable_memory(config.spec):
            plans.append(plan_of_stages(stages, kinds, memory))
    problem = (f"no layout of this model and batch size {config.batch_size} fits {config.world} x "
               f"{config.gpu}")
    if least == math.inf:
        raise ValueError(f"{problem}: give another --batch-size or --world, which more layouts "
                         f"divide, or fewer flags of the layout")
    if not plans:
        advice = "take more or larger GPUs"
        if not config.offload:
            advice += ", or --offload"
        excess = least - usable_memory(config.spec)
        raise ValueError(f"{problem}: the smallest needs {least / 1e9:.1f} GB of each GPU, "
                         f"{excess / 1e9:.1f} GB too many: {advice}")

    def order(plan):        # of equally fast plans the lowest ZeRO stage, then the least memory
        return float(f"{plan['step_seconds']:.3g}"), plan["zero"], plan["memory_bytes"]
    plans.sort(key=order)
    best = {}
    for plan in plans:
        layout = tuple(plan[name] for name in (*options, "ep") if name != "micro_batch")
        best.setdefault(layout, plan)
    return list(best.values())[:10]


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
    """(the config with the model, the plans of its ten fastest layouts) for the largest size of
    GPT or OPT that reads its compute-optimal tokens, 20 for each parameter, in --days. Without
    --batch-size a step has BATCH_TOKENS, or the next multiple of the GPUs. Raises ValueError if
    there is none."""
    models = {name: GPTConfig(config.vocabulary, **shape) for name, shape in SIZES.items()}
    peak = config.world * config.spec.peak(config.size)
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
    raise ValueError(f"{config.days:g} days of {config.world} x {config.gpu} train no size of "
                     f"GPT or OPT on its compute-optimal tokens: give more days or GPUs, or "
                     f"--model to see what they do train")
