"""Plans as text."""
from model import GPTConfig
from tools.plan.estimate import HEADROOM
from tools.plan.flags import RUN_FLAGS, VOCABULARIES, PlanConfig
from tools.plan.search import BATCH_TOKENS

SPREAD = 0.12           # nine of ten of the 132 steps that were held out are so close or closer
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


def format_plan(cfg: GPTConfig, config: PlanConfig, plan: dict, batch_source: str) -> list[str]:
    """The numbers of `make_plan` in lines, the most important first. `batch_source` says where the
    batch size is from, if it was not given."""
    gpu = config.spec
    return [
        f"fits     {'yes' if plan['fits'] else 'no'}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{gpu.memory / 1e9:.0f} GB on rank {plan['fullest_rank']}, the fullest; "
        f"{HEADROOM:.0%} should stay free",
        format_run(config, plan),
        *format_shape(cfg, config, plan, batch_source),
        f"memory   {parts(plan, 'memory_', format_bytes)} (buffers, logits, activations: "
        f"estimates)",
        *format_compute(config, plan),
        f"sends    per step: {parts(plan, 'bytes_', format_bytes) or 'nothing'}",
        f"step     {plan['step_seconds']:.4g} s: {parts(plan, 'seconds_', '{:,.4g} s'.format)}; "
        f"bubble {plan['bubble']:.1%}; {plan['tokens_per_second']:,.0f} tokens per second",
        f"failures every {plan['failure_hours']:,.4g} hours; a checkpoint is of "
        f"{format_bytes(plan['checkpoint_bytes'])}; a save pauses training for "
        f"{plan['pause_seconds']:,.4g} s",
        f"saves    {format_saves(plan)}, which the days above do not count",
        f"assumes  backward hides data parallelism; counts as if nothing hid cp, pp and half of "
        f"tp; no rank is slow; {gpu.link / 1e9:g} GB/s to a GPU of the same machine, "
        f"{gpu.network / 1e9:g} to another's"]


def format_saves(plan: dict) -> str:
    """How often to save, how long it takes, and the goodput."""
    return (f"every {plan['interval_seconds']:,.0f} s, written in {plan['write_seconds']:,.4g} s "
            f"and read in {plan['read_seconds']:,.4g} s; goodput {plan['goodput']:.1%}")


def format_run(config: PlanConfig, plan: dict) -> str:
    """How long the run takes, with the time's spread, and how fast it is."""
    unit, of_a_day = next(one for one in UNITS if one[0] == "minutes" or plan["days"] * one[1] >= 1)
    time, low, high = (plan["days"] * of_a_day * (1 + sign * SPREAD) for sign in (0, -1, 1))
    hours = f"{plan['gpu_hours']:,.0f}" if plan["gpu_hours"] >= 100 else f"{plan['gpu_hours']:.3g}"
    return (f"run      {config.steps:,} steps in {time:.3g} {unit} ({low:.3g} to {high:.3g}), "
            f"{hours} GPU hours; MFU {plan['mfu']:.1%}, "
            f"{plan['hardware_tflops_per_gpu']:.0f} TFLOP/s")


def format_shape(cfg: GPTConfig, config: PlanConfig, plan: dict, batch_source: str) -> list[str]:
    """The model, the layout, and the batch that it divides."""
    options = [f"zero {config.zero}"]
    if config.ep > 1:
        options.append(f"ep {config.ep}")
    if config.pp > 1:
        options.append(config.pp_schedule)
    if config.pp_chunks > 1:
        options.append(f"{config.pp_chunks} chunks")
    options += [name.replace("_", " ") for name in ("recompute", "sequence_parallel", "offload")
                if getattr(config, name)]
    num_microbatches = config.batch_size // (plan["dp"] * config.micro_batch)
    assumed = ""
    if config.vocab_size is None:
        owner = config.model if config.model in VOCABULARIES else "GPT-2"
        assumed = f" ({owner}'s; --vocab-size changes it)"
    active = ""
    if plan["active_parameters"] < plan["parameters"]:
        active = f", of which a token uses {plan['active_parameters']:,}"
    cp = f" x cp {config.cp}" if config.cp > 1 else ""
    return [
        f"model    {plan['parameters']:,} parameters{active}: {cfg.n_layer} layers, "
        f"{cfg.n_head} heads, width {cfg.n_embd}, {cfg.seq_len} positions, "
        f"vocabulary {cfg.vocab_size}{assumed}",
        f"layout   dp {plan['dp']} x pp {config.pp}{cp} x tp {config.tp}, {config.gpu}, "
        f"{config.dtype}, {', '.join(options)}",
        f"batch    {config.batch_size} sequences = dp {plan['dp']} x {num_microbatches} "
        f"microbatches x {config.micro_batch} sequences; {plan['tokens_per_step']:,} tokens per "
        f"step{batch_source}"]


def format_compute(config: PlanConfig, plan: dict) -> list[str]:
    """The run's FLOPs, and what scaling laws say of them."""
    law, of_law = "chinchilla_law", "the loss that Hoffmann et al. fitted"
    if config.law is not None:
        law, of_law = "law", f"the law in {config.law}"
    best = {name: plan[f"compute_optimal_parameters_{name}"]
            for name in ("chinchilla", law, "kaplan")}
    return [
        f"compute  {plan['tokens']:.4g} tokens x {plan['flops_per_token']:.4g} FLOPs = "
        f"{plan['flops_with_attention']:.4g}, {plan['pf_days']:,.4g} PF-days; with recomputation "
        f"{plan['flops_with_recomputation']:.4g}",
        f"optimal  {plan['compute_optimal_tokens']:.4g} tokens, 20 for each parameter, would give "
        f"this model the lowest loss for its compute (Hoffmann et al. 2022); the run has "
        f"{plan['tokens'] / plan['compute_optimal_tokens']:.3g} times as many; predicted loss "
        f"{plan['predicted_loss']:.2f}",
        f"         the compute of this run would be best spent on a model of "
        f"{best['chinchilla']:.4g} parameters by that rule, {best[law]:.4g} by {of_law}, "
        f"{best['kaplan']:.4g} by Kaplan et al. 2020"]


def notes_of(config: PlanConfig, plan: dict) -> list[str]:
    """What to change in such a plan, in lines."""
    lines = []
    is_long = config.days is not None or config.tokens is not None
    if is_long and plan["tokens_per_step"] < BATCH_TOKENS / 4:
        lines.append(f"note     a step of {plan['tokens_per_step']:,} tokens is small: a larger "
                     f"--batch-size wastes less of the GPUs (GPT-3's are of {BATCH_TOKENS:,} "
                     f"tokens or more)")
    if config.days is None and plan["tokens"] < plan["compute_optimal_tokens"] / 10:
        lines.append(f"note     few tokens: {plan['compute_optimal_tokens']:.3g} would be "
                     f"compute-optimal (--tokens, or --steps and --batch-size)")
    if not plan["fits"]:
        lines.append("note     it does not fit: --search, without flags of the layout, finds any "
                     "layouts that do; --zero, --tp, --pp and --offload leave less state on a GPU, "
                     "--recompute, a smaller --micro-batch, --tp and --cp fewer activations")
    if config.dtype == "fp32":
        lines.append("note     fp32 is slow: give --dtype bf16 (fp16 on a V100)")
    return lines


def format_days(config: PlanConfig, plan: dict, chooses_model: bool) -> str:
    """The answer to --days."""
    tokens = f"{plan['tokens']:.4g} tokens in {plan['steps']:,} steps"
    total = (f"training alone takes {plan['days']:.3g} days, {plan['days'] / plan['goodput']:.3g} "
             f"with saves and failures")
    if chooses_model:
        return (f"answer   {config.model} is the largest size of GPT or OPT that {config.days:g} "
                f"days train on its compute-optimal tokens, 20 for each parameter: {tokens}; "
                f"{total}")
    train = "train" if plan["fits"] else "would, if it fitted, train"
    return (f"answer   {config.days:g} days {train} this model on {tokens}, "
            f"{plan['times_compute_optimal']:.3g} times its compute-optimal "
            f"{plan['compute_optimal_tokens']:.4g}; {total}")


def format_search(plans: list[dict]) -> list[str]:
    """A row for each layout, the fastest first."""
    numbers = dict(dp="dp", pp="pp", pp_chunks="chunks", cp="cp", ep="ep", tp="tp",
                   micro_batch="micro-batch", zero="zero")
    if plans[0]["active_parameters"] == plans[0]["parameters"]:     # no mixture of experts
        del numbers["ep"]
    rows = [[*numbers.values(), "recompute", "sequence-parallel", "memory GB", "bubble %", "step s",
             "MFU %", "days"]]
    for plan in plans:
        rows.append([str(plan[name]) for name in numbers])
        for switch in ("recompute", "sequence_parallel"):
            rows[-1].append("yes" if plan[switch] else "no")
        rows[-1] += [f"{plan['memory_bytes'] / 1e9:.1f}", f"{100 * plan['bubble']:.1f}",
                     f"{plan['step_seconds']:.3g}", f"{100 * plan['mfu']:.1f}",
                     f"{plan['days']:.3g}"]
    lines = []
    for row in rows:
        lines.append("  ".join(cell.rjust(max(4, len(name))) for cell, name in zip(row, rows[0])))
    return [*lines, f"nine of ten times are at most {SPREAD:.0%} off; the first is started with"]


def format_command(config: PlanConfig, given: dict) -> str:
    """The command that starts the run: the flags that were `given`, and what was found."""
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
    words = [start_of_command(config)]
    for name, value in flags.items():
        if value is not False:
            words.append("--" + name.replace("_", "-"))
        if not isinstance(value, bool):
            words.append(str(value))
    return " ".join(words)


def start_of_command(config: PlanConfig) -> str:
    """python or torchrun, with the largest equal number of processes on each machine; several start
    it at the same time, and HOST is the name of one of them."""
    if config.world == 1:
        return "python train.py"
    per_node = max(n for n in range(1, config.gpus_per_node + 1) if config.world % n == 0)
    nodes = config.world // per_node
    if nodes == 1:
        return f"torchrun --nproc_per_node={per_node} train.py"
    return (f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv-backend=c10d "
            f"--rdzv-endpoint=HOST:29500 train.py")
