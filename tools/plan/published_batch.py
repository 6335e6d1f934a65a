"""The batch size of a plan that is given none: what published runs of a model of this size had."""
from dataclasses import replace

from base.flops import parameter_count
from model import GPTConfig
from tools.plan.flags import LEAST_PARAMETERS, PlanConfig

# Tokens of a step: GPT-3's of 0.5M, 1M, 2M and 3.2M by its parameters (Brown et al. 2020, table
# 2.1), and OPT's where they are others (Zhang et al. 2022, table 1).
GPT3 = {125e6: 2**19, 350e6: 2**19, 760e6: 2**19, 1.3e9: 2**20, 2.7e9: 2**20, 6.7e9: 2**21,
        13e9: 2**21, 175e9: 3 * 2**20}
OPT = {"opt-13b": 2**22, "opt-30b": 2**22, "opt-66b": 2**21, "opt-175b": 2**21}


def with_usual_batch(config: PlanConfig, cfg: GPTConfig, given: dict) -> tuple[PlanConfig, str]:
    """(the config with about the batch size that OPT or the nearest size of GPT-3 had, in multiples
    that the layout divides; where it is from). What `given` names stays; so does the default of
    train.py for a model of less than LEAST_PARAMETERS."""
    if "batch_size" in given:
        return config, ""
    fixed = config.world                        # --search may find any layout
    if not config.search:
        replicas = config.world // (config.tp * config.pp * config.cp)
        fixed = replicas * config.pp * (config.micro_batch or 1)
    parameters = parameter_count(cfg)
    if parameters < LEAST_PARAMETERS:
        return config, " (train.py's default; --batch-size changes it)"
    size = min(GPT3, key=lambda size: max(size / parameters, parameters / size))
    name = f"{size / 1e9:g}B" if size >= 1e9 else f"{size / 1e6:g}M"
    tokens, owner = GPT3[size], f"GPT-3 {name}"
    if config.model in OPT:
        tokens, owner = OPT[config.model], config.model
    batch_size = max(1, round(tokens / cfg.seq_len / fixed)) * fixed
    return (replace(config, batch_size=batch_size),
            f" (about {tokens / 1e6:.1f}M tokens, as {owner} had; --batch-size changes it)")
