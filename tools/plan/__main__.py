"""The command line of python -m tools.plan."""
import json
import math
import sys
from dataclasses import replace

from base import options
from base.agreement import print_rank0
from base.commandline import Parser, add_flags
from base.errors import errors_in_one_line
from models import make_config
from tools.plan.flags import LAYOUT, OWN_FLAGS, RUN_FLAGS, PlanConfig
from tools.plan.gpus import GPUS

HELP = """Plan a run of train.py on GPUs: memory, traffic, time and failures.

Of what it prints, in a step: passes are the reads and writes of activations beside matrix products
and attention; fill is what the pipeline waits for its first and last microbatches, bubble the idle
fraction of its stages; dp is the traffic of gradients and parameters that computation does not
hide; update is AdamW. Days are of training alone: saves and failures come on top, as goodput
says. GPU hours times the price of one are the price of the run."""


def read_flags(arguments: list[str]) -> tuple[PlanConfig, dict]:
    """The config, and what of it was given. Raises ValueError on a usage error."""
    parser = Parser("tools.plan", "python -m tools.plan --world N --gpu NAME [FLAG ...]", HELP)
    add_flags(parser, PlanConfig, OWN_FLAGS + RUN_FLAGS)
    given = parser.parse(arguments)
    if "world" not in given or "gpu" not in given:
        raise ValueError(f"--world, the number of GPUs, and --gpu, one of {', '.join(GPUS)} or "
                         f"TFLOP/s:GB:GB/s of another, are required")
    if "steps" in given and "tokens" in given:
        raise ValueError("--steps and --tokens both say when the run ends: drop one")
    config = PlanConfig(**given)
    if config.dtype == "bf16" and config.spec.name == "V100":
        raise ValueError("a V100 has no matrix products in bf16: give --dtype fp16")
    if config.world % (config.tp * config.pp * config.cp):
        raise ValueError(f"--world {config.world} is not divisible by tp {config.tp} x pp "
                         f"{config.pp} x cp {config.cp}: give a multiple")
    return config, given


def answer(arguments: list[str]) -> str:
    """What the command prints. Raises ValueError on a usage error, or if --search finds nothing."""
    config, given = read_flags(arguments)
    # Here: it imports what trains, and a mistake in the flags need not wait for that.
    from runtime.checks import check_config
    from tools.plan import report
    from tools.plan.estimate import make_plan
    from tools.plan.search import search_layouts
    shape = options.model_shape(vars(config))
    cfg = make_config(vocab_size=config.vocabulary, **shape)
    if config.tokens is not None:
        config = replace(config, steps=math.ceil(
            config.tokens / (config.batch_size * shape["seq_len"])))
    if config.search:
        plans = search_layouts(cfg, config, given)
    else:
        config, cfg = check_config(config, shape, config.vocabulary, config.world, "cuda")
        plans = [make_plan(cfg, config)]
    if config.json:
        return json.dumps(plans if config.search else plans[0])
    found = replace(config, **{name: plans[0][name] for name in LAYOUT})
    if config.search:
        return "\n".join([report.format_batch(config, given, plans[0]),
                          *report.format_search(plans), report.format_trust(cfg, config),
                          report.format_command(found, given, plans[0])])
    return "\n".join(report.format_plan(cfg, found, given, plans[0]))


@errors_in_one_line("tools.plan")
def main() -> None:
    print_rank0(answer(sys.argv[1:]))


if __name__ == "__main__":
    main()
