"""Plans as text."""
from base.commandline import words_of
from model import GPTConfig
from tools.plan.estimate import HEADROOM
from tools.plan.flags import LAYOUT, RUN_FLAGS, PlanConfig

# Times that were seen, in units of those that a plan prints (docs/planning.md has the table). One
# GPU: all of MosaicML's steps, the nearest ones. Many: nine of ten of 636 steps, where each of
# ten programs has the same weight.
OF_ONE_GPU = (0.8, 1.3)
OF_MANY = (0.7, 1.4)
OF_MIXTURES = 2.1       # of two on an H200
UNITS = (("days", 1), ("hours", 24), ("minutes", 24 * 60))      # the first of which there is one


def format_bytes(size: float) -> str:
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:,.1f} {unit}"
    return f"{size / 1e6:,.1f} MB"


def parts(plan: dict, prefix: str, render) -> str:
    """The numbers whose names begin so, without the prefix."""
    return ", ".join(f"{name.removeprefix(prefix).replace('_', ' ')} {render(x)}"
                     for name, x in plan.items()
                     if name.startswith(prefix) and name != "memory_bytes" and x > 0)


def save_every(plan: dict) -> int:
    """The steps between checkpoints that lose least to saves and failures."""
    return min(plan["steps"], max(1, round(plan["interval_seconds"] / plan["step_seconds"])))


def format_batch(config: PlanConfig, given: dict, plan: dict) -> str:
    """The batch, in its type, and whose choice it is."""
    default = "" if "batch_size" in given else ", the default of train.py (--batch-size)"
    return (f"batch    {config.batch_size} sequences{default}; {plan['tokens_per_step']:,} tokens "
            f"per step, in {config.dtype}")


def format_trust(cfg: GPTConfig, config: PlanConfig) -> str:
    """What stands behind the times."""
    words = ("published steps of other programs are 2 to 36% off in the mean, by source; no run of "
             "ours on several GPUs stands behind it")
    if config.world == 1:
        words = ("our small Llama on one H200 is 0.2% off, our GPT-2 on one H100 was fitted; no "
                 "other card or size is measured")
    if hasattr(cfg, "n_expert"):
        words += "; two mixtures on one H200 took twice the time and up to 1.4 times the memory"
    return f"trust    {words}"


def format_hours(plan: dict) -> str:
    """GPU hours: times the price of one, the price of the run."""
    hours = plan["gpu_hours"]
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def format_run(cfg: GPTConfig, config: PlanConfig, plan: dict) -> str:
    """How long the run takes, with the range that was seen, and how fast it is."""
    unit, of_a_day = next(one for one in UNITS if one[0] == "minutes" or plan["days"] * one[1] >= 1)
    time = plan["days"] * of_a_day
    low, high = OF_ONE_GPU if config.world == 1 else OF_MANY
    if hasattr(cfg, "n_expert"):
        high *= OF_MIXTURES
    return (f"run      {config.steps:,} steps in {time:.3g} {unit} ({low * time:.3g} to "
            f"{high * time:.3g}), {format_hours(plan)} GPU hours; MFU {plan['mfu']:.1%}, "
            f"{plan['hardware_tflops_per_gpu']:.0f} TFLOP/s; a week reads "
            f"{plan['tokens'] / plan['days'] * 7:.3g} tokens")


def format_plan(cfg: GPTConfig, config: PlanConfig, given: dict, plan: dict) -> list[str]:
    """The numbers of `make_plan` in lines, the most important first."""
    gpu = config.spec
    lines = [
        f"fits     {'yes' if plan['fits'] else 'no'}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{gpu.memory / 1e9:.0f} GB on rank {plan['fullest_rank']}, the fullest; "
        f"{HEADROOM:.0%} should stay free",
        format_run(cfg, config, plan),
        format_trust(cfg, config),
        f"model    {plan['parameters']:,} parameters, of which a token uses "
        f"{plan['active_parameters']:,}: {cfg.n_layer} layers, {cfg.n_head} heads, width "
        f"{cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size} (--vocab-size)",
        f"layout   {config.world} x {config.gpu}: dp {plan['dp']} "
        f"{' '.join(words_of(layout_flags(config)))}; "
        f"{config.batch_size // (plan['dp'] * config.micro_batch)} microbatches",
        format_batch(config, given, plan),
        f"memory   {parts(plan, 'memory_', format_bytes)} (buffers, logits, activations: "
        f"estimates)",
        f"compute  {plan['tokens']:.4g} tokens x {plan['flops_per_token']:.4g} FLOPs = "
        f"{plan['flops_with_attention']:.4g}, {plan['pf_days']:,.4g} PF-days; with recomputation "
        f"{plan['flops_with_recomputation']:.4g}",
        f"optimal  {plan['tokens'] / plan['compute_optimal_tokens']:.3g} times the tokens that are "
        f"compute-optimal, 20 for each parameter (Hoffmann et al. 2022); predicted loss "
        f"{plan['predicted_loss']:.2f}",
        f"         as much compute is best spent on {plan['compute_optimal_parameters']:.4g} "
        f"parameters by the law that they fitted",
        f"sends    per step: {parts(plan, 'bytes_', format_bytes) or 'nothing'}; over "
        f"{gpu.link / 1e9:g} GB/s to a GPU of the same machine, {gpu.network / 1e9:g} to another's",
        f"step     {plan['step_seconds']:.4g} s: {parts(plan, 'seconds_', '{:,.4g} s'.format)}; "
        f"bubble {plan['bubble']:.1%}; {plan['tokens_per_second']:,.0f} tokens per second",
        f"failures every {plan['failure_hours']:,.4g} hours; a checkpoint is of "
        f"{format_bytes(plan['checkpoint_bytes'])}; a save pauses training for "
        f"{plan['pause_seconds']:,.4g} s",
        f"saves    as a {config.checkpoint_format} (--checkpoint-format) every "
        f"{plan['interval_seconds']:,.0f} s, written in {plan['write_seconds']:,.4g} s and read in "
        f"{plan['read_seconds']:,.4g} s; goodput {plan['goodput']:.1%}",
        f"command  {format_command(config, given, plan)}"]
    if not plan["fits"]:
        lines.append("note     it does not fit: --search, without flags of the layout, finds any "
                     "layouts that do")
    if config.dtype == "fp32":
        lines.append("note     fp32 is slow: give --dtype bf16 (fp16 on a V100)")
    return lines


def layout_flags(config: PlanConfig) -> dict:
    """The flags of a layout whose values are not train.py's defaults."""
    return {name: getattr(config, name) for name in LAYOUT
            if getattr(config, name) != getattr(PlanConfig, name)
            and (config.pp > 1 or not name.startswith("pp"))}


def format_search(plans: list[dict]) -> list[str]:
    """A row for each layout, the fastest first."""
    names = ["dp", *(name for name in LAYOUT if name != "pp_schedule")]
    rows = [[*(name.replace("_", "-") for name in names), "memory GB", "bubble %", "step s",
             "MFU %", "days", "GPU hours"]]
    for plan in plans:
        rows.append([str(int(plan[name])) for name in names] + [
            f"{plan['memory_bytes'] / 1e9:.1f}", f"{100 * plan['bubble']:.1f}",
            f"{plan['step_seconds']:.3g}", f"{100 * plan['mfu']:.1f}", f"{plan['days']:.3g}",
            format_hours(plan)])
    return ["  ".join(cell.rjust(max(4, len(name))) for cell, name in zip(row, rows[0]))
            for row in rows]


def format_command(config: PlanConfig, given: dict, plan: dict) -> str:
    """The command that starts the run: the flags that were `given`, and what was found. One on
    several machines starts on each of them. HOST is the name of one, DIR the folder of the data."""
    flags = dict(data="DIR") | {name: given[name] for name in RUN_FLAGS if name in given}
    if config.steps != PlanConfig.steps:
        flags["steps"] = config.steps
    flags["save_every"] = save_every(plan)
    if config.search:
        flags |= layout_flags(config)
    per_node = max(n for n in range(1, config.gpus_per_node + 1) if config.world % n == 0)
    nodes = config.world // per_node
    start = f"torchrun --nproc_per_node={per_node} train.py"
    if config.world == 1:
        start = "python train.py"
    elif nodes > 1:
        start = (f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv-backend=c10d "
                 f"--rdzv-endpoint=HOST:29500 train.py")
    return " ".join([start, *words_of(flags)])
