"""The batch size of a plan that is given none: that of published runs of a model of this size."""
from dataclasses import replace

from base.flops import parameter_count
from model import GPTConfig
from tools.plan.flags import PlanConfig

# Tokens of a step: GPT-3's by its parameters (Brown et al. 2020, table 2.1), and OPT's where they
# are others (Zhang et al. 2022, table 1).
GPT3 = {125e6: 2**19, 350e6: 2**19, 760e6: 2**19, 1.3e9: 2**20, 2.7e9: 2**20, 6.7e9: 2**21,
        13e9: 2**21, 175e9: 3 * 2**20}
OPT = {"opt-13b": 2**22, "opt-30b": 2**22, "opt-66b": 2**21, "opt-175b": 2**21}
FEWEST = 60e6           # parameters: a smaller model has the default of train.py


def with_published_batch(config: PlanConfig, cfg: GPTConfig) -> tuple[PlanConfig, str]:
    """(the config with about the batch size of OPT or the nearest size of GPT-3, in multiples that
    the layout divides; where it is from)"""
    parameters = parameter_count(cfg)
    if parameters < FEWEST:
        return config, " (train.py's default; --batch-size changes it)"
    multiple = config.world                     # --search may find any layout
    if not config.search:
        replicas = config.world // (config.tp * config.pp * config.cp)
        multiple = replicas * config.pp * (config.micro_batch or 1)
    size = min(GPT3, key=lambda size: max(size / parameters, parameters / size))
    owner = f"GPT-3 {size / 1e9:g}B" if size >= 1e9 else f"GPT-3 {size / 1e6:g}M"
    tokens = GPT3[size]
    if config.model in OPT:
        tokens, owner = OPT[config.model], config.model
    batch_size = max(1, round(tokens / cfg.seq_len / multiple)) * multiple
    return (replace(config, batch_size=batch_size),
            f" (about {tokens / 1e6:.1f}M tokens, as {owner} had; --batch-size changes it)")
