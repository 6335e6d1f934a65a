"""A scaling law: the loss of a model of N parameters after D tokens, and how to fit one.

    L(N, D) = E + A N^-a + B D^-b               (Hoffmann et al. 2022, approach 3)

    python -m tools.scaling_law points.csv --at 1e9:20e9

fits the points of a table with the columns N, D and loss, and says what the law expects at another
point. tools.ladder makes such points from data of one's own, tools.plan --law uses the law.

For fixed a and b the law is linear in E, A and B, which then have a closed form: the nonnegative
solution that minimizes the relative errors, with Huber's weights, so that an outlier counts little.
`fit` solves it on a grid over a and b that closes in on the best pair. There are no starting
points, so the same points always give the same law.

With `tied`, a = b. A ladder of few sizes does not tell a from b: of five public ladders, four are
predicted at least as well with a = b, at sizes 3.4 to 5.4 times the largest one that was fitted.

A law of few sizes does not know E. Never read it as the entropy of the text.
"""
import csv
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.commandline import Parser
from base.errors import errors_in_one_line, named

DELTA = 1e-3            # Huber's loss is quadratic below this relative error
EXPONENTS = 0.02, 1.5   # a and b lie between these
GRID, ROUNDS, REWEIGHTS = 17, 7, 12
FEWEST_TOKENS = 3       # for each parameter: with fewer, losses are not yet on the law
FEWEST_SIZES = 3        # of which one can be left out
# Quantiles of Student's t: an interval of 80%, for 1, 2, ... degrees of freedom.
STUDENTS_T = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)


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


class Points(NamedTuple):
    """Measured losses, (n,) each."""
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray

    @classmethod
    def of(cls, rows) -> "Points":
        """Of (N, D, loss) each."""
        return cls(*np.array(list(rows), float).reshape(-1, 3).T)

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


# ---- The fit ---------------------------------------------------------------------------------

def solve(features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """For each of G pairs of exponents the nonnegative x (G, 3) that minimizes the weighted squares
    of features x - 1, with features (G, n, 3) and weights (G, n): the best of the solutions in
    which some of the three are zero."""
    weighted = features * weights[..., None]
    gram = np.einsum("gni,gnj->gij", weighted, features)
    right = weighted.sum(1)
    # The small term keeps a matrix of equal columns solvable.
    answer = np.linalg.solve(gram + 1e-13 * np.eye(3), right[..., None])[..., 0]
    negative = (answer < 0).any(1)
    if not negative.any():
        return answer
    gram, right = gram[negative], right[negative]
    best, found = np.full(len(gram), np.inf), np.zeros((len(gram), 3))
    for used in ([0, 1], [0, 2], [1, 2], [0], [1], [2]):
        matrix = gram[:, used][:, :, used] + 1e-13 * np.eye(len(used))
        x = np.zeros_like(found)
        x[:, used] = np.linalg.solve(matrix, right[:, used, None])[..., 0]
        error = np.einsum("gi,gij,gj->g", x, gram, x) - 2 * np.einsum("gi,gi->g", x, right)
        better = (x >= 0).all(1) & (error < best - 1e-12)
        best[better], found[better] = error[better], x[better]
    answer[negative] = found
    return answer


def fit(points: Points, tied: bool = False) -> Law:
    """The law of these points; with `tied` one with a = b."""
    N, D, loss = points
    n0, d0 = np.exp(np.log(N).mean()), np.exp(np.log(D).mean())     # for the condition
    low, high = np.full(2, EXPONENTS[0]), np.full(2, EXPONENTS[1])
    best = (np.inf, None, None)         # mean Huber loss, (a, b), (E, A, B)
    for _ in range(ROUNDS):
        axes = [np.linspace(*ends, GRID) for ends in zip(low, high)]
        a, b = (x.ravel() for x in np.meshgrid(*axes, indexing="ij"))
        if tied:
            a = axes[0]
            b = a
        features = np.stack([np.ones((len(a), len(loss))), (N / n0) ** -a[:, None],
                             (D / d0) ** -b[:, None]], -1) / loss[:, None]      # (G, n, 3)
        weights = np.ones(features.shape[:2])
        for _ in range(REWEIGHTS):      # Huber's loss as squares with weights of the last errors
            x = solve(features, weights)
            error = np.abs(np.einsum("gni,gi->gn", features, x) - 1)
            weights = np.minimum(1, DELTA / np.maximum(error, 1e-30))
        huber = np.where(error < DELTA, error ** 2 / 2, DELTA * (error - DELTA / 2)).mean(1)
        place = int(huber.argmin())
        if huber[place] < best[0]:
            best = huber[place], np.array([a[place], b[place]]), x[place]
        reach = 1.5 * (high - low) / (GRID - 1)
        low = np.maximum(best[1] - reach, EXPONENTS[0] / 2)
        high = best[1] + reach
    _, (a, b), (E, A, B) = best
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

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(points: Points, N: float, D: float) -> Prediction:
    """The loss at (N, D), with an interval by the jackknife over the sizes (Tukey 1958): how much
    the prediction changes if each size is left out in turn, since the points of a size have one
    seed and one trunk and so share their noise. On synthetic ladders of 3 or 4 sizes with noise of
    0.2 to 0.5%, 60 to 93% of the intervals held the true loss. It does not know whether the law
    holds at N. Raises ValueError for fewer than three sizes."""
    sizes = points.sizes()
    count = len(sizes)
    if count < FEWEST_SIZES:
        raise ValueError(f"{count} sizes do not tell what another one will reach: three do")
    law = fit(points, tied=True)
    loss = float(law(N, D))
    without = np.array([fit(points.where(points.N != size), tied=True)(N, D) for size in sizes])
    spread = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    half = STUDENTS_T[min(count - 1, len(STUDENTS_T)) - 1] * spread
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


def isoflop(points: Points, flops: float) -> float | None:
    """Approach 2 of Hoffmann et al.: N of the lowest loss for 6 N D FLOPs, the minimum of a
    parabola in log N. Between the points of a size log L is linear in log D. None if fewer than
    three sizes were trained on so much compute, or their losses have no minimum between them."""
    sizes, losses = [], []
    for N in points.sizes():
        curve = points.where(points.N == N)
        order = curve.D.argsort()
        tokens = curve.D[order]
        D = flops / 6 / N
        if tokens[0] <= D <= tokens[-1]:
            sizes.append(math.log(N))
            losses.append(np.interp(math.log(D), np.log(tokens), np.log(curve.loss[order])))
    if len(sizes) < 3:
        return None
    curvature, slope, _ = np.polyfit(sizes, losses, 2)
    if curvature <= 0:
        return None
    best = -slope / (2 * curvature)
    return math.exp(best) if sizes[0] <= best <= sizes[-1] else None


# ---- Files -----------------------------------------------------------------------------------

def read_law(file: str) -> Law:
    """The law in a ladder.json. Raises ValueError, OSError."""
    with named(file):
        text = Path(file).read_text()
    try:
        fields = json.loads(text)["law"]
        law = Law(**{name: float(fields[name]) for name in "EABab"})
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{file} holds no law: give the ladder.json of tools.ladder") from None
    if not all(math.isfinite(x) and x >= 0 for x in asdict(law).values()):
        raise ValueError(f"{file}: the numbers of its law must be finite and not negative")
    return law


def read_points(file: str) -> Points:
    """A table of comma-separated values whose first line names the columns N, D and loss."""
    with named(file), open(file, newline="") as lines:
        rows = list(csv.DictReader(lines, skipinitialspace=True))
    try:
        points = Points.of((row["N"], row["D"], row["loss"]) for row in rows)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file}: give comma-separated values, with a first line that names the "
                         f"columns N, D and loss, all numbers") from None
    if not all((np.isfinite(column) & (column > 0)).all() for column in points):
        raise ValueError(f"{file}: N, D and loss must be finite and above 0")
    return points


@errors_in_one_line("tools.scaling_law")
def main() -> None:
    parser = Parser("tools.scaling_law", "python -m tools.scaling_law [--at N:D] FILE", __doc__)
    parser.add_argument("file", metavar="FILE", help="a table with the columns N, D and loss")
    parser.add_argument("--at", metavar="N:D", help="predict the loss there, as 1e9:20e9")
    args = parser.parse_args()
    every = read_points(args.file)
    points = on_law(every)
    if len(points.sizes()) < FEWEST_SIZES:
        raise ValueError(f"{args.file} has {len(points.sizes())} values of N: a law takes three")
    law = fit(points, tied=True)
    worst = np.abs(law(points.N, points.D) / points.loss - 1).max()
    test = back_test(points)
    print(f"a = b    {law}, at most {worst:.2%} off; {len(points.N)} of {len(every.N)} points")
    print(f"untied   {fit(points)}")
    print(f"test     without the largest N {test.predicted:.4f} for its last loss, "
          f"{test.measured:.4f}: {test.error:+.2%} off, {test.times:.1f} times larger")
    if args.at is not None:
        try:
            N, D = map(float, args.at.split(":"))
            if not 0 < min(N, D) <= max(N, D) < math.inf:
                raise ValueError
        except ValueError:
            raise ValueError(f"--at {args.at}: give two numbers, such as 1e9:20e9") from None
        found = predict(points, N, D)
        print(f"at       N {N:.4g}, D {D:.4g}: {found.loss:.4f} ({found.low:.4f} to "
              f"{found.high:.4f}), untied {found.untied(N, D):.4f}")


if __name__ == "__main__":
    main()
