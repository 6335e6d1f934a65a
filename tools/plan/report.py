"""Plans as text."""
from base.commandline import words_of
from model import GPTConfig
from tools.plan.estimate import HEADROOM
from tools.plan.flags import RUN_FLAGS, PlanConfig

# Times that were seen, in units of those that a plan prints (docs/planning.md has the table). One
# GPU: MosaicML's steps, the nearest ones, are at most 20% off. Many: the means of six sources.
OF_ONE_GPU = (0.8, 1.2)
OF_MANY = (0.72, 1.29)
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


def format_saves(form: str, plan: dict, prefix: str = "") -> str:
    """How often to save in a format, how long it takes, and the goodput."""
    waits = " while training waits" if form == "folder" else ""
    return (f"as a {form} every {plan[prefix + 'interval_seconds']:,.0f} s, written in "
            f"{plan[prefix + 'write_seconds']:,.4g} s{waits} and read in "
            f"{plan[prefix + 'read_seconds']:,.4g} s; goodput {plan[prefix + 'goodput']:.1%}")


def format_trust(cfg: GPTConfig, config: PlanConfig) -> str:
    """What stands behind the times."""
    words = ("published steps of other programs are 6 to 42% off in the mean, by source; no run of "
             "ours on several GPUs stands behind it")
    if config.world == 1:
        words = ("our GPT-2 on one H100 and our small Llama on one H200 are at most 2% off; no "
                 "other card or size is measured")
    if hasattr(cfg, "n_expert"):
        words += "; two mixtures on one H200 took twice the time and up to 1.4 times the memory"
    return f"trust    {words}"


def format_run(cfg: GPTConfig, config: PlanConfig, plan: dict) -> str:
    """How long the run takes, with the range that was seen, and how fast it is."""
    unit, of_a_day = next(one for one in UNITS if one[0] == "minutes" or plan["days"] * one[1] >= 1)
    time = plan["days"] * of_a_day
    low, high = OF_ONE_GPU if config.world == 1 else OF_MANY
    if hasattr(cfg, "n_expert"):
        high *= OF_MIXTURES
    hours = f"{plan['gpu_hours']:,.0f}" if plan["gpu_hours"] >= 100 else f"{plan['gpu_hours']:.3g}"
    return (f"run      {config.steps:,} steps in {time:.3g} {unit} ({low * time:.3g} to "
            f"{high * time:.3g}), {hours} GPU hours; MFU {plan['mfu']:.1%}, "
            f"{plan['hardware_tflops_per_gpu']:.0f} TFLOP/s; a week reads "
            f"{plan['tokens'] / plan['days'] * 7:.3g} tokens")


def format_plan(cfg: GPTConfig, config: PlanConfig, plan: dict, command: str) -> list[str]:
    """The numbers of `make_plan` in lines, the most important first."""
    gpu = config.spec
    best = plan["compute_optimal_parameters_" + ("law" if config.law else "chinchilla_law")]
    lines = [
        f"fits     {'yes' if plan['fits'] else 'no'}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{gpu.memory / 1e9:.0f} GB on rank {plan['fullest_rank']}, the fullest; "
        f"{HEADROOM:.0%} should stay free",
        format_run(cfg, config, plan),
        format_trust(cfg, config),
        f"model    {plan['parameters']:,} parameters, of which a token uses "
        f"{plan['active_parameters']:,}: {cfg.n_layer} layers, {cfg.n_head} heads, width "
        f"{cfg.n_embd}, {cfg.seq_len} positions, vocabulary {cfg.vocab_size} (--vocab-size)",
        f"layout   dp {plan['dp']} x pp {config.pp} x cp {config.cp} x tp {config.tp}, "
        f"{config.gpu}, {config.dtype}, {', '.join(options_of(config))}",
        f"batch    {config.batch_size} sequences = dp {plan['dp']} x "
        f"{config.batch_size // (plan['dp'] * config.micro_batch)} microbatches x "
        f"{config.micro_batch} sequences; {plan['tokens_per_step']:,} tokens per step",
        f"memory   {parts(plan, 'memory_', format_bytes)} (buffers, logits, activations: "
        f"estimates)",
        f"compute  {plan['tokens']:.4g} tokens x {plan['flops_per_token']:.4g} FLOPs = "
        f"{plan['flops_with_attention']:.4g}, {plan['pf_days']:,.4g} PF-days; with recomputation "
        f"{plan['flops_with_recomputation']:.4g}",
        f"optimal  {plan['tokens'] / plan['compute_optimal_tokens']:.3g} times the tokens that are "
        f"compute-optimal, 20 for each parameter (Hoffmann et al. 2022); predicted loss "
        f"{plan['predicted_loss']:.2f}",
        f"         as much compute is best spent on {best:.4g} parameters by "
        f"{config.law or 'the law that they fitted'}",
        f"sends    per step: {parts(plan, 'bytes_', format_bytes) or 'nothing'}",
        f"step     {plan['step_seconds']:.4g} s: {parts(plan, 'seconds_', '{:,.4g} s'.format)}; "
        f"bubble {plan['bubble']:.1%}; {plan['tokens_per_second']:,.0f} tokens per second",
        f"failures every {plan['failure_hours']:,.4g} hours; a checkpoint is of "
        f"{format_bytes(plan['checkpoint_bytes'])}; a save pauses training for "
        f"{plan['pause_seconds']:,.4g} s",
        f"saves    {format_saves(config.checkpoint_format, plan)}"]
    if config.checkpoint_format == "file":
        lines.append(f"         {format_saves('folder', plan, 'folder_')}")
    lines += [
        f"assumes  backward hides data parallelism and half of tp, and nothing cp and pp; no rank "
        f"is slow; {gpu.link / 1e9:g} GB/s to a GPU of the same machine, {gpu.network / 1e9:g} to "
        f"another's",
        f"command  {command}"]
    if not plan["fits"]:
        lines.append("note     it does not fit: --search, without flags of the layout, finds any "
                     "layouts that do")
    if config.dtype == "fp32":
        lines.append("note     fp32 is slow: give --dtype bf16 (fp16 on a V100)")
    return lines


def options_of(config: PlanConfig) -> list[str]:
    """The parts of a layout that are not its grid."""
    words = [f"zero {config.zero}", f"ep {config.ep}"] if config.ep > 1 else [f"zero {config.zero}"]
    if config.pp > 1:
        words.append(f"{config.pp_schedule} in {config.pp_chunks} chunks" if config.pp_chunks > 1
                     else config.pp_schedule)
    return words + [name.replace("_", " ") for name in (
        "recompute", "sequence_parallel", "offload") if getattr(config, name)]


def format_search(plans: list[dict]) -> list[str]:
    """A row for each layout, the fastest first."""
    names = ("dp", "pp", "pp_chunks", "cp", "ep", "tp", "micro_batch", "zero", "recompute",
             "sequence_parallel")
    rows = [[*(name.replace("_", "-") for name in names), "memory GB", "bubble %", "step s",
             "MFU %", "days"]]
    for plan in plans:
        rows.append([str(int(plan[name])) for name in names] + [
            f"{plan['memory_bytes'] / 1e9:.1f}", f"{100 * plan['bubble']:.1f}",
            f"{plan['step_seconds']:.3g}", f"{100 * plan['mfu']:.1f}", f"{plan['days']:.3g}"])
    return ["  ".join(cell.rjust(max(4, len(name))) for cell, name in zip(row, rows[0]))
            for row in rows]


def format_command(config: PlanConfig, given: dict) -> str:
    """The command that starts the run: the flags that were `given`, and what was found. One on
    several machines starts on each of them, and HOST is the name of one."""
    flags = {name: given[name] for name in RUN_FLAGS if name in given}
    if config.steps != PlanConfig.steps:
        flags["steps"] = config.steps
    if config.search:
        for name in ("tp", "pp", "cp", "micro_batch", "zero", "recompute", "sequence_parallel"):
            flags[name] = getattr(config, name)
        if config.ep > 1:
            flags["ep"] = config.ep
        if config.pp > 1:
            flags |= dict(pp_schedule=config.pp_schedule, pp_chunks=config.pp_chunks)
    per_node = max(n for n in range(1, config.gpus_per_node + 1) if config.world % n == 0)
    nodes = config.world // per_node
    start = f"torchrun --nproc_per_node={per_node} train.py"
    if config.world == 1:
        start = "python train.py"
    elif nodes > 1:
        start = (f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv-backend=c10d "
                 f"--rdzv-endpoint=HOST:29500 train.py")
    return " ".join([start, *words_of(flags)])
