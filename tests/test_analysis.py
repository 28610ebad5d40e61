"""pass@k and intervals against closed forms, brute force and simulated coverage."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis import Interval, equivalence, over_seeds, over_seeds_and_problems, paired, pass_at_k
from analysis.intervals import DIFFERENCE, wilson

# --- pass@k


def brute_force(n: int, c: int, k: int) -> float:
    draws = list(combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, draws)) / len(draws)


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(brute_force(n, c, k), abs=1e-15)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"), [(10, 3, 5, 11 / 12), (1024, 1, 512, 0.5), (7, 3, 1, 3 / 7), (5, 0, 5, 0.0)]
)
def test_pass_at_k_known(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n=n, c=c, k=k) == pytest.approx(expected, abs=1e-14)


def test_pass_at_k_is_exactly_one_where_too_few_are_wrong() -> None:
    assert pass_at_k(n=4, c=1, k=4) == 1.0
    assert pass_at_k(n=10, c=8, k=3) == 1.0


def test_pass_at_k_is_unbiased() -> None:
    n, k, p = 12, 5, 0.13
    c = np.arange(n + 1)
    assert np.sum(stats.binom.pmf(c, n, p) * pass_at_k(n, c, k)) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_broadcasts() -> None:
    values = pass_at_k(6, np.array([[0], [2], [6]]), np.array([1, 3]))
    assert isinstance(values, np.ndarray)
    np.testing.assert_allclose(values, [[0, 0], [1 / 3, 0.8], [1, 1]], atol=1e-15)
    assert isinstance(pass_at_k(4, 2, 2), float)
    assert np.shape(pass_at_k(np.array([], dtype=int), np.array([], dtype=int), 1)) == (0,)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1), (4, 1.5, 1), (4, float("nan"), 1)]
)
def test_pass_at_k_refuses(n: float, c: float, k: float) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(np.array([8, n]), np.array([1, c]), np.array([1, k]))


# --- intervals


def test_over_seeds_is_students_t_of_the_seeds_means() -> None:
    matrix = np.random.default_rng(0).uniform(size=(4, 30))
    expected = stats.t.interval(0.9, 3, loc=matrix.mean(), scale=stats.sem(matrix.mean(axis=1)))
    found = over_seeds(matrix, level=0.9)
    assert (found.estimate, found.low, found.high) == pytest.approx((matrix.mean(), *expected))
    assert (found.method, found.seeds, found.problems, found.level) == ("t over seeds", 4, 30, 0.9)


def test_limits_stay_within_the_bounds() -> None:
    matrix = np.array([[1.0, 1.0], [0.9, 1.0]])
    assert over_seeds(matrix).high == 1.0
    assert over_seeds(1 - matrix).low == 0.0


@pytest.mark.parametrize("method", [over_seeds, over_seeds_and_problems])
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_agreement_never_gives_a_width_of_zero(method, seeds: int, value: float) -> None:  # type: ignore[no-untyped-def]
    found = method(np.full((seeds, 40), value))
    assert found.low <= value <= found.high
    assert found.high - found.low > 0.01
    assert "one seed" in found.method if seeds == 1 else "agree" in found.method


def test_agreeing_seeds_use_the_problems() -> None:
    row = np.repeat([0.0, 1.0], [30, 10])
    found = over_seeds(np.stack([row, row]))
    assert (found.low, found.high) == pytest.approx(stats.binomtest(10, 40).proportion_ci(method="wilson"))
    assert found.method == "Wilson over problems (all seeds agree)"
    # The same values on other problems add up in another order, which moves the last bit: still agreement.
    values = np.random.default_rng(0).uniform(size=41)
    pair = np.stack([values, np.sort(values)])
    assert np.ptp(pair.mean(axis=1)) > 0
    shuffled = over_seeds(pair)
    assert shuffled.method == "bootstrap over problems (all seeds agree)"
    assert shuffled.high - shuffled.low > 0.01


def test_one_seed_bootstraps_its_problems() -> None:
    values = np.random.default_rng(1).uniform(size=(1, 400))
    found = over_seeds(values)
    half = 1.96 * values.std() / 20
    assert found.method == "bootstrap over problems (one seed)"
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.004)


def test_no_difference_at_all_is_bounded_by_the_share_of_problems_unseen() -> None:
    found = paired(np.ones((3, 60)), np.ones((3, 60)))
    limit = stats.binomtest(0, 60).proportion_ci(method="wilson").high
    assert (found.low, found.high) == pytest.approx((-limit, limit))


def test_wilson_matches_scipy() -> None:
    for right in (0, 1, 17, 40):
        expected = stats.binomtest(right, 40).proportion_ci(0.9, method="wilson")
        assert wilson(right, 40, level=0.9) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_two_way_bootstrap_has_the_spread_of_both() -> None:
    rng = np.random.default_rng(2)
    seeds, problems = rng.normal(0, 0.05, size=(6, 1)), rng.normal(0, 0.1, size=(1, 80))
    matrix = 0.5 + seeds + problems
    found = over_seeds_and_problems(matrix)
    # Additive effects: the variance of the resampled mean is the sum of the two.
    sd = math.sqrt(seeds.var() / 6 + problems.var() / 80)
    assert found.high - found.low == pytest.approx(2 * 1.96 * sd, rel=0.06)
    only_seeds = over_seeds_and_problems(0.5 + seeds + np.zeros((1, 80)))
    assert only_seeds.high - only_seeds.low < 0.95 * (found.high - found.low)


def test_bootstrap_is_a_function_of_its_arguments() -> None:
    matrix = np.random.default_rng(3).uniform(size=(3, 20))
    state = np.random.get_state()[1].copy()
    assert over_seeds_and_problems(matrix) == over_seeds_and_problems(matrix)
    assert over_seeds_and_problems(matrix) != over_seeds_and_problems(matrix, rng_seed=1)
    np.testing.assert_array_equal(np.random.get_state()[1], state)


def test_t_interval_covers_at_its_level() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(600):
        found = over_seeds(np.clip(0.5 + rng.normal(0, 0.05, (4, 1)) + rng.normal(0, 0.01, (4, 50)), 0, 1))
        hits += found.low <= 0.5 <= found.high
    assert 0.925 <= hits / 600 <= 0.975


def test_two_way_bootstrap_covers_new_problems_where_t_over_seeds_does_not() -> None:
    rng = np.random.default_rng(6)
    hits = {"seeds": 0, "both": 0}
    for _ in range(200):
        matrix = np.clip(0.5 + rng.normal(0, 0.01, (5, 1)) + rng.normal(0, 0.15, (1, 40)), 0, 1)
        matrix = matrix + rng.normal(0, 0.001, matrix.shape).clip(-0.01, 0.01) * (matrix < 0.9) * (matrix > 0.1)
        both, seeds = over_seeds_and_problems(matrix, resamples=500), over_seeds(matrix)
        hits["both"] += both.low <= 0.5 <= both.high
        hits["seeds"] += seeds.low <= 0.5 <= seeds.high
    assert hits["both"] / 200 > 0.88
    assert hits["seeds"] / 200 < 0.8


def test_pairing_removes_what_arms_share() -> None:
    rng = np.random.default_rng(5)
    control = np.clip(rng.normal(0.4, 0.1, (4, 1)) + rng.normal(0, 0.05, (4, 60)), 0, 1)
    treated = np.clip(control + 0.1 + rng.normal(0, 0.02, (4, 60)), 0, 1)
    found = paired(treated, control)
    assert found.low > 0.08 and found.high < 0.12
    assert paired(treated, control, population=True).method.startswith("two-way")
    with pytest.raises(ValueError, match="same seeds and problems"):
        paired(treated, control[:3])


@pytest.mark.parametrize(
    "values", [np.zeros(3), np.zeros((0, 4)), np.zeros((2, 0)), [[0.1, float("nan")]], [[0.1, 1.2]], [[-0.2, 0.1]]]
)
def test_intervals_refuse(values) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        over_seeds(values)
    with pytest.raises(ValueError):
        over_seeds(np.zeros((2, 2)), level=1.0, bounds=DIFFERENCE)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.04, 0.04, "equivalent"),
        (-0.05, 0.05, "equivalent"),
        (-0.06, 0.01, "undecided"),
        (0.01, 0.06, "undecided"),
        (0.05, 0.2, "undecided"),
        (0.06, 0.2, "different"),
        (-0.2, -0.06, "different"),
    ],
)
def test_equivalence_needs_the_whole_interval(low: float, high: float, verdict: str) -> None:
    interval = Interval(
        estimate=(low + high) / 2, low=low, high=high, level=0.95, method="t over seeds", seeds=3, problems=9
    )
    assert equivalence(interval, delta=0.05) == verdict
    with pytest.raises(ValueError, match="positive delta"):
        equivalence(interval, delta=0.0)
