"""tools/scaling_law.py: known laws are recovered, published ones too, and predicted from."""
import numpy as np
import pytest

from tools.scaling_law import HOFFMANN, Law, Points, back_test, fit, on_law, predict

# A published law beside HOFFMANN, and below the sizes and tokens on which they were fitted, about.
BESIROGLU = Law(1.817, 482.0, 2085.0, 0.348, 0.366)             # 2024, of Chinchilla's figure 4
KNOWN = Law(1.7, 400.0, 400.0, 0.34, 0.28)      # of no one: the one of the measured noise below


def grid(sizes, tokens, law, noise=None):
    """Points of a law at each size after each number of tokens."""
    N, D = (x.ravel() for x in np.meshgrid(sizes, tokens, indexing="ij"))
    loss = law(N, D)
    if noise is not None:
        loss = loss * np.exp(noise)
    return Points(N, D, loss)


@pytest.mark.claim("A scaling law is recovered from its points: the constants to 1e-4, a "
                   "prediction at 4 times the largest size to 2e-6.")
@pytest.mark.parametrize("law, sizes, tokens", [
    (HOFFMANN, (7e7, 1.6e10), (5e9, 5e11)), (BESIROGLU, (5e7, 1e10), (1e9, 3e11)),
    (Law(0.0, 30.0, 20.0, 0.3, 0.3), (3e4, 2e5), (2e5, 2e6))],
    ids=["Hoffmann", "Besiroglu", "no E"])
def test_a_known_law_is_recovered(law, sizes, tokens):
    points = grid(np.geomspace(*sizes, 6), np.geomspace(*tokens, 6), law)
    found = fit(points)
    assert vars(found) == pytest.approx(vars(law), rel=1e-4, abs=1e-4)
    N, D = 4 * sizes[1], tokens[1]
    assert found(N, D) == pytest.approx(law(N, D), rel=2e-6)
    if law.a == law.b:
        assert vars(fit(points, tied=True)) == pytest.approx(vars(law), rel=1e-4, abs=1e-4)


def test_an_outlier_counts_little():
    points = grid(np.geomspace(1e7, 8e7, 4), np.geomspace(2e8, 1.6e9, 4), KNOWN)
    points.loss[5] *= 1.1
    assert fit(points)(3.2e8, 1.6e9) == pytest.approx(KNOWN(3.2e8, 1.6e9), rel=2e-3)
    shuffled = points.where(np.random.default_rng(0).permutation(16))
    assert vars(fit(shuffled)) == pytest.approx(vars(fit(points)), rel=1e-6)


def test_points_with_few_tokens_are_left_out_unless_too_few_remain():
    points = grid([1e6, 2e6, 4e6], [5e6, 1e7, 2e7, 4e7], KNOWN)
    assert [*zip(*on_law(points))] == [row for row in zip(*points) if row[1] >= 3 * row[0]]
    assert len(on_law(points).N) == 9
    few = points.where(points.D < 2e7)          # two sizes have enough tokens
    assert on_law(few) is few


def test_a_prediction_has_an_interval_and_a_back_test():
    """Without noise the interval is empty, and the test exact. With noise of a whole size it is as
    wide as that, and more. Two sizes tell nothing."""
    law = Law(1.2, 20.0, 25.0, 0.28, 0.28)
    sizes, tokens = np.array([33e3, 68e3, 115e3]), 8e5 * np.array([1, 2, 4, 8])
    exact = grid(sizes, tokens, law)
    found = predict(exact, 460e3, 6.4e6)
    assert found[:3] == pytest.approx([law(460e3, 6.4e6)] * 3, rel=1e-5)
    test = back_test(exact)
    assert (test.N, test.D, test.times) == (115e3, 6.4e6, pytest.approx(115 / 68))
    assert test.predicted == pytest.approx(test.measured, rel=1e-5)
    noise = np.repeat([0.0, 0.005, 0.0], 4)
    found = predict(grid(sizes, tokens, law, noise), 460e3, 6.4e6)
    assert found.low < law(460e3, 6.4e6) < found.high and found.high - found.low > 0.01
    with pytest.raises(ValueError, match="2 sizes do not tell"):
        predict(grid(sizes[:2], tokens, law), 460e3, 6.4e6)


def test_the_best_size_for_a_budget_is_the_laws_minimum():
    N, D = KNOWN.optimal(1e17)
    sizes = np.geomspace(1e6, 1e10, 20_001)
    losses = KNOWN(sizes, 1e17 / 6 / sizes)
    assert N == pytest.approx(sizes[losses.argmin()], rel=1e-3) and 6 * N * D == pytest.approx(1e17)


@pytest.mark.slow
@pytest.mark.claim("Of a ladder's intervals of 80%, at least 60% hold the true loss where the "
                   "noise of a rung, 0.5%, is shared by its points.")
def test_intervals_hold_the_true_loss():
    law, generator = Law(1.2, 20.0, 25.0, 0.28, 0.28), np.random.default_rng(0)
    sizes, tokens = np.array([33e3, 68e3, 115e3]), 8e5 * np.array([1, 2, 4, 8])
    held = 0
    for _ in range(40):
        noise = 0.005 * np.repeat(generator.standard_normal(3), 4)
        noise += 0.001 * generator.standard_normal(12)
        found = predict(grid(sizes, tokens, law, noise), 460e3, 6.4e6)
        held += found.low <= law(460e3, 6.4e6) <= found.high
    assert 24 <= held < 40
