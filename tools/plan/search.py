"""The fastest layouts that fit."""
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from model import GPTConfig
from runtime.checks import check_layout
from tools.plan.estimate import make_plan, usable_memory
from tools.plan.flags import PlanConfig
from tools.plan.memory import gpu_bytes, kinds_of_stages, memory_bytes

LEAST_POSITIONS = 4096  # of a sequence, that --search leaves a rank: shorter ones need no cp


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
        yield one
        if hasattr(cfg, "n_expert") and "ep" not in options:
            common = math.gcd(cfg.n_expert, one.world // (one.tp * one.pp))
            yield from (replace(one, ep=ep) for ep in range(2, common + 1) if common % ep == 0)


def search_layouts(cfg: GPTConfig, config: PlanConfig, given: dict) -> list[dict]:
    """The plans of the ten fastest layouts that fit, of those with tp inside a machine, at least
    LEAST_POSITIONS on a rank or no cp, microbatches of 1 to 16 sequences, and 1F1B, which takes
    less time and memory than GPipe, or that interleaved in 2 or 4 chunks. What `given` names stays
    as it is in `config`. Raises ValueError if nothing fits."""
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
        size = max(gpu_bytes(memory_bytes(stage)) for stage in kinds_of_stages(cfg, one)[0])
        least = min(least, size)
        if size <= usable_memory(config.spec):
            plans.append(make_plan(cfg, one))
    if not plans:
        problem = (f"no layout of this model and batch size {config.batch_size} fits "
                   f"{config.world} x {config.gpu}")
        if least == math.inf:
            raise ValueError(f"{problem}: give another --batch-size or --world, which more layouts "
                             f"divide, or fewer flags of the layout")
        raise ValueError(f"{problem}: the smallest needs {least / 1e9:.1f} GB of each GPU: take "
                         f"more or larger GPUs, or --offload")

    def order(plan):        # of equally fast plans the lowest ZeRO stage, then the least memory
        return float(f"{plan['step_seconds']:.3g}"), plan["zero"], plan["memory_bytes"]
    plans.sort(key=order)
    best = {}
    for plan in plans:
        layout = tuple(plan[name] for name in (*options, "ep") if name != "micro_batch")
        best.setdefault(layout, plan)
    return list(best.values())[:10]
