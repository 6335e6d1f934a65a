"""What the rungs say of the target, as numbers (`find`) and as text (`report`)."""
from dataclasses import asdict

import numpy as np

from tools.ladder.rungs import Rung
from tools.scaling_law import FEWEST_TOKENS, Law, Points, back_test, isoflop, on_law, predict

ISOFLOP_LEVELS = 5


def find(rungs: list[Rung], target: Rung, tokens_per_step: int) -> dict:
    """The content of ladder.json. Raises ValueError if fewer than three rungs have ended."""
    rows = [row for rung in rungs for row in rung.points()]
    every = Points.of((row["N"], row["D"], row["loss"]) for row in rows)
    points = on_law(every)
    D = target.steps * tokens_per_step
    found = predict(points, target.N, D)
    law = found.law
    measured = [row["loss"] for row in target.points() if row["steps"] == target.steps]
    test = back_test(points)
    return dict(
        prediction=dict(loss=found.loss, low=found.low, high=found.high),
        measured=measured[0] if measured else None, law=asdict(law),
        untied=dict(law=asdict(found.untied), loss=float(found.untied(target.N, D))),
        target=dict(width=target.width, N=target.N, D=D), points=rows,
        points_used=len(points.N), back_test=test._asdict(),
        largest_error=float(np.abs(law(points.N, points.D) / points.loss - 1).max()),
        isoflop=minima(points))


def minima(points: Points) -> list[dict]:
    """The minima of parabolas over sizes, at a few amounts of compute of the ladder."""
    flops = 6 * points.N * points.D
    found = []
    for level in np.geomspace(flops.min(), flops.max(), ISOFLOP_LEVELS + 2)[1:-1]:
        N = isoflop(points, level)
        if N is not None:
            found.append(dict(flops=float(level), N=N))
    return found


def report(found: dict) -> list[str]:
    """The lines of the answer. Those of the budget are budget.py's."""
    law = Law(**found["law"])
    target, test = found["target"], found["back_test"]
    prediction, rows = found["prediction"], found["points"]
    lines = ["   width           N            D  tokens/N     loss  the law's      off"]
    for row in rows:
        expected = float(law(row["N"], row["D"]))
        note = f"  {row['rollbacks']} rollback" if row["rollbacks"] else ""
        lines.append(f"{row['width']:8} {row['N']:11,} {row['D']:12,} {row['D'] / row['N']:9.1f} "
                     f"{row['loss']:8.4f} {expected:10.4f} {expected / row['loss'] - 1:+8.2%}"
                     f"{note}")
    lines += [
        f"law      {law}, with a = b; at most {found['largest_error']:.2%} off; from "
        f"{found['points_used']} of {len(rows)} points",
        f"untied   {Law(**found['untied']['law'])}: {found['untied']['loss']:.4f} for the target",
        f"test     without its largest rung the ladder predicts {test['predicted']:.4f} for it, "
        f"{test['times']:.1f} times larger than the next: measured {test['measured']:.4f}, "
        f"{test['predicted'] / test['measured'] - 1:+.2%} off"]
    lines += notes(found)
    lines.append(
        f"target   width {target['width']}, N {target['N']:,}, {target['D']:,} tokens: predicted "
        f"{prediction['loss']:.4f} nats a token ({prediction['low']:.4f} to "
        f"{prediction['high']:.4f}: 80% by the noise of the rungs, each left out in turn; whether "
        f"the law holds so far, only the test says)")
    if found["measured"] is not None:
        lines.append(f"measured {found['measured']:.4f}: the prediction is "
                     f"{prediction['loss'] / found['measured'] - 1:+.2%} off")
    return lines


def notes(found: dict) -> list[str]:
    """What makes the prediction less certain than it looks."""
    lines = []
    rows, target = found["points"], found["target"]
    few = sum(row["D"] < FEWEST_TOKENS * row["N"] for row in rows)
    if few and found["points_used"] == len(rows):
        lines.append(f"note     {few} points have fewer than {FEWEST_TOKENS} tokens for each "
                     f"parameter, where the law does not hold yet, and without them too few "
                     f"remain: give more --steps or smaller --rungs")
    if any(row["rollbacks"] for row in rows):
        lines.append("note     a run that was rolled back has left out batches: a lower --lr may "
                     "avoid it")
    times = target["N"] / max(row["N"] for row in rows)
    if times > 8:
        lines.append(f"note     the target is {times:.0f} times larger than the largest rung: 4 to "
                     f"8 times are tried; add a wider one to --rungs")
    return lines
