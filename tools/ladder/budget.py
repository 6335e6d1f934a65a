"""The compute-optimal size and tokens for a budget, by the ladder's law and by the published ones,
and what the budget costs."""
from tools.plan.estimate import DAY, PF_DAY, compute_optimal
from tools.plan.gpus import spec_of
from tools.scaling_law import Law

MFU = 0.4           # of the GPU's peak in 16 bits: what a good run reaches
FAR = 10            # times beyond the ladder's sizes or its target
PUBLISHED = dict(chinchilla="20 tokens a parameter", chinchilla_law="Hoffmann et al.'s law",
                 kaplan="Kaplan et al.'s law")


def best_models(law: Law, flops: float) -> list[tuple[str, float, float]]:
    """(whose, N, D) for 6 N D = `flops`."""
    found = [("this law", *law.optimal(flops))]
    for name, N in compute_optimal(flops).items():
        found.append((PUBLISHED[name], N, flops / 6 / N))
    return found


def cost(flops: float, gpu: str, price: float | None) -> str:
    """In PF-days, days of one GPU and, at a price of its hour, money."""
    gpu_days = flops / (MFU * spec_of(gpu).peak(2)) / DAY
    text = (f"{flops:.3g} FLOPs = {flops / PF_DAY:.3g} PF-days = {gpu_days:.3g} days of one {gpu} "
            f"at an MFU of {MFU:.0%}")
    if price is not None:
        text += f" = {24 * gpu_days * price:.3g} at {price:g} an hour"
    return text


def report_budget(found: dict, flops: float | None, gpu: str, price: float | None) -> list[str]:
    """Lines on a budget, by default that of the target."""
    law = Law(**found["law"])
    target = found["target"]
    whose = "--budget"
    if flops is None:
        flops = 6 * target["N"] * target["D"]
        whose = "as the target"
    lines = [f"budget   {whose}: {cost(flops, gpu, price)}"]
    smallest = min(row["N"] for row in found["points"])
    for name, N, D in best_models(law, flops):
        if not smallest / FAR <= N <= target["N"] * FAR:
            lines.append(f"         {name:22} N {N:9.3g}: too far from the ladder's sizes")
            continue
        lines.append(f"         {name:22} N {N:9.3g}, {D:9.3g} tokens, {D / N:7.1f} each: "
                     f"{float(law(N, D)):.4f} by this law")
    for minimum in found["isoflop"]:
        N, _ = law.optimal(minimum["flops"])
        lines.append(f"isoflop  {minimum['flops']:.3g} FLOPs: N {minimum['N']:.3g} by the parabola "
                     f"over the rungs, {N:.3g} by this law")
    return lines
