"""A scaling law: the loss of a model of N parameters after D tokens, and how to fit one.

    L(N, D) = E + A N^-a + B D^-b               (Hoffmann et al. 2022, approach 3)

    points = Points(N, D, loss)                     # measured, (n,) each
    predict(points, 1e9, 20e9)                      # at another point, with an interval

The fit minimizes Huber's loss of the relative errors, so that an outlier counts little. It needs
scipy, an optional package. It begins at several a and b, with the best E, A and B there, so that
the same points always give the same law.

With `tied`, a = b. A ladder of few sizes does not tell a from b: of five public ladders, four are
predicted at least as well with a = b, at sizes 3.4 to 5.4 times the largest one that was fitted.

A law of few sizes does not know E. Never read it as the entropy of the text.
"""
import math
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import numpy as np

DELTA = 1e-3            # Huber's loss is quadratic below this relative error
EXPONENTS = 0.01, 2.0   # a and b lie between these
STARTS = 0.15, 0.3, 0.6         # of a and b
FEWEST_TOKENS = 3       # for each parameter: with fewer, losses are not yet on the law
FEWEST_SIZES = 3        # of which one can be left out


@dataclass(frozen=True)
class Law:
    E: float
    A: float
    B: float
    a: float
    b: float

    def __call__(self, N, D):
        """Loss in nats per token."""
        return self.E + self.A * np.power(N, -self.a) + self.B * np.power(D, -self.b)

    def optimal(self, flops: float) -> tuple[float, float]:
        """(N, D) of the lowest loss for 6 N D FLOPs (Hoffmann et al. 2022, equation 4). (0, 0) if
        the loss does not depend on N or on D."""
        if self.A == 0 or self.B == 0:
            return 0.0, 0.0
        G = (self.a * self.A / (self.b * self.B)) ** (1 / (self.a + self.b))
        N = G * (flops / 6) ** (self.b / (self.a + self.b))
        return N, flops / 6 / N

    def __str__(self) -> str:
        return (f"L = {self.E:.3f} + {self.A:.4g} N^-{self.a:.3f} + {self.B:.4g} "
                f"D^-{self.b:.3f}")


# Hoffmann et al. 2022, equation 10: a good run on text of the web, in their 32,000 tokens.
HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)


class Points(NamedTuple):
    """Measured losses, (n,) each."""
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray

    def where(self, mask) -> "Points":
        return Points(*(column[mask] for column in self))

    def sizes(self) -> np.ndarray:
        return np.unique(self.N)


def on_law(points: Points) -> Points:
    """Those with tokens enough, or all if too few would remain to fit and to test a law."""
    enough = points.where(points.D >= FEWEST_TOKENS * points.N)
    if len(enough.sizes()) < FEWEST_SIZES or len(enough.N) < 2 * FEWEST_SIZES:
        return points
    return enough


def check_scipy() -> None:
    """Raise ValueError without it."""
    if find_spec("scipy") is None:
        raise ValueError("the fit of a law needs a package that is missing: pip install scipy")


def fit(points: Points, tied: bool = False) -> Law:
    """The law of these points; with `tied` one with a = b. Raises ValueError without scipy."""
    check_scipy()
    from scipy.optimize import least_squares, nnls
    N, D, loss = points
    n0, d0 = np.exp(np.log(N).mean()), np.exp(np.log(D).mean())     # for the condition

    def features(a, b):         # (n, 3): what E, A and B are multiplied with
        return np.stack([np.ones_like(loss), (N / n0) ** -a, (D / d0) ** -b], 1) / loss[:, None]

    def relative_errors(x):     # x: E, A and B of N / n0 and D / d0, then a and b
        return features(x[3], x[-1]) @ x[:3] - 1

    found = []
    for a, b in product(STARTS, [None] if tied else STARTS):
        start = nnls(features(a, b or a), np.ones_like(loss))[0]
        x = [*start, a] if tied else [*start, a, b]
        low, high = (np.repeat(ends, (3, len(x) - 3)) for ends in ((0, EXPONENTS[0]),
                                                                   (np.inf, EXPONENTS[1])))
        # Squares first: from far away Huber's loss is nearly flat. "cs": derivatives by complex
        # steps, which err by rounding alone (Squire and Trapp 1998).
        for options in (dict(), dict(loss="huber", f_scale=DELTA)):
            fitted = least_squares(relative_errors, x, "cs", (low, high), x_scale="jac",
                                   xtol=1e-14, ftol=1e-14, gtol=1e-14, max_nfev=1000, **options)
            x = fitted.x
        found.append((fitted.cost, x))
    _, (E, A, B, *exponents) = min(found, key=lambda one: one[0])
    a, b = exponents[0], exponents[-1]
    return Law(float(E), float(A * n0 ** a), float(B * d0 ** b), float(a), float(b))


# ---- What a law is worth ---------------------------------------------------------------------

class Prediction(NamedTuple):
    loss: float
    low: float          # 80% of the noise of the sizes: see `predict`
    high: float
    law: Law            # with a = b
    untied: Law


class BackTest(NamedTuple):
    """The largest size's last loss, and what the smaller ones predict for it."""
    N: float
    D: float
    measured: float
    predicted: float
    times: float        # larger than the next size


def predict(points: Points, N: float, D: float) -> Prediction:
    """The loss at (N, D), with an interval by the jackknife over the sizes (Tukey 1958): how much
    the prediction changes if each size is left out in turn, since the points of a size have one
    seed and one trunk and so share their noise. On synthetic ladders of 3 or 4 sizes with noise of
    0.2 to 0.5%, 60 to 93% of the intervals held the true loss. It does not know whether the law
    holds at N. Raises ValueError for fewer than three sizes."""
    check_scipy()
    from scipy.stats import t
    sizes = points.sizes()
    count = len(sizes)
    if count < FEWEST_SIZES:
        raise ValueError(f"{count} sizes do not tell what another one will reach: three do")
    law = fit(points, tied=True)
    loss = float(law(N, D))
    without = np.array([fit(points.where(points.N != size), tied=True)(N, D) for size in sizes])
    spread = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    half = float(t.ppf(0.9, count - 1)) * spread
    return Prediction(loss, loss - half, loss + half, law, fit(points))


def back_test(points: Points) -> BackTest:
    """Leave out the largest size and predict its last loss."""
    *_, next_size, largest = points.sizes()
    held_out = points.where(points.N == largest)
    last = held_out.D.argmax()
    law = fit(points.where(points.N < largest), tied=True)
    D, measured = float(held_out.D[last]), float(held_out.loss[last])
    return BackTest(float(largest), D, measured, float(law(largest, D)),
                    float(largest / next_size))
