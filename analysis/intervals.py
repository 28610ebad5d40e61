"""Intervals for a mean over seeds and problems.

Axis letters: S seeds, P problems. A matrix [S, P] holds one number a seed and problem: a pass@k, or a difference of
two that share seed and problem.

Which interval answers which question (coverage of each was simulated; with 3 to 5 seeds only these two hold 95%):
  over_seeds       these very problems, new training runs: t over the seeds' means.
  over_seeds_and_problems  new problems too: two-way bootstrap.
Both fall back on problems where the seeds say nothing (there is one, or all agree), and say so in `method`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

Floats = npt.NDArray[np.float64]
Bounds = tuple[float, float]

# Range of a rate, of a difference of two rates, and of a difference of two such differences.
RATE: Bounds = (0.0, 1.0)
DIFFERENCE: Bounds = (-1.0, 1.0)
SECOND_DIFFERENCE: Bounds = (-2.0, 2.0)

# Seeds' means closer than this differ by rounding alone.
_SAME = 1e-12
# Resamples drawn at a time: bounds the memory of the weights [chunk, P].
_CHUNK = 500


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its limits; `level` is the nominal coverage, `method` how the limits were made, in words."""

    estimate: float
    low: float
    high: float
    level: float
    method: str
    seeds: int
    problems: int

    def inside(self, delta: float) -> bool:
        """The whole interval lies within [-delta, delta]."""
        return -delta <= self.low and self.high <= delta

    def outside(self, delta: float) -> bool:
        """The whole interval lies beyond delta, on one side."""
        return self.low > delta or self.high < -delta

    def __str__(self) -> str:
        return f"{self.estimate:.3f} ({self.low:.3f} to {self.high:.3f})"


def over_seeds(values: npt.ArrayLike, *, level: float = 0.95, bounds: Bounds = RATE, rng_seed: int = 0) -> Interval:
    """Interval of the mean of values [S, P] for a fixed set of problems: Student's t over the S means, S - 1 degrees.

    bounds: the range a single value can take; limits are clipped to it. One seed, or seeds that agree exactly, carry
    no spread: the interval then comes from the problems (`over_problems`) and is never of zero width.
    Raises ValueError for a shape other than [S, P], an empty matrix, non-finite values or values outside the bounds.
    """
    matrix = _matrix(values, level, bounds)
    seeds, problems = matrix.shape
    means = matrix.mean(axis=1)
    if seeds == 1:
        return _over_problems(matrix, level, bounds, rng_seed, why="one seed")
    if np.ptp(means) < _SAME:
        return _over_problems(matrix, level, bounds, rng_seed, why="all seeds agree")
    mean = float(means.mean())
    half = t_half_width(means, level=level)
    return _interval(mean, mean - half, mean + half, level, bounds, "t over seeds", seeds, problems)


def over_seeds_and_problems(
    values: npt.ArrayLike, *, level: float = 0.95, bounds: Bounds = RATE, resamples: int = 4000, rng_seed: int = 0
) -> Interval:
    """Interval of the mean of values [S, P] for new seeds and new problems: percentile two-way bootstrap.

    Seeds and problems are resampled together, whole rows and whole columns (a checkpoint answers every problem, so
    cells of a row are not independent). The result is a function of the arguments. One seed: from the problems.
    """
    matrix = _matrix(values, level, bounds)
    seeds, problems = matrix.shape
    if seeds == 1:
        return _over_problems(matrix, level, bounds, rng_seed, why="one seed")
    if np.ptp(matrix) < _SAME:
        return _over_problems(matrix, level, bounds, rng_seed, why="every seed and problem agrees")
    low, high = _percentiles(bootstrap_means(matrix, resamples=resamples, rng_seed=rng_seed), level)
    return _interval(
        float(matrix.mean()), low, high, level, bounds, "two-way bootstrap over seeds and problems", seeds, problems
    )


def paired(
    treated: npt.ArrayLike, control: npt.ArrayLike, *, level: float = 0.95, population: bool = False, rng_seed: int = 0
) -> Interval:
    """Interval of the mean of treated - control, both [S, P] over the same seeds and problems in the same order.

    population: the claim is about new problems too (two-way bootstrap), not about these alone (t over seeds).
    """
    one, two = np.asarray(treated, dtype=np.float64), np.asarray(control, dtype=np.float64)
    if one.shape != two.shape:
        raise ValueError(f"paired values need the same seeds and problems: {one.shape} against {two.shape}")
    method = over_seeds_and_problems if population else over_seeds
    return method(one - two, level=level, bounds=DIFFERENCE, rng_seed=rng_seed)


def equivalence(interval: Interval, *, delta: float) -> Literal["equivalent", "different", "undecided"]:
    """Whether a difference is as good as zero: equivalent if the whole interval is within +-delta, different if the
    whole interval is beyond it, undecided otherwise.

    Two one-sided tests at 5% would use a 90% interval; the interval is used at its own level, which is stricter.
    """
    if not delta > 0:
        raise ValueError(f"an equivalence test needs a positive delta, not {delta}")
    return "equivalent" if interval.inside(delta) else "different" if interval.outside(delta) else "undecided"


def wilson(right: int, total: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score limits of a proportion (Wilson 1927, eq. 4); never of zero width."""
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"a proportion needs 0 <= right <= total and total >= 1, not {right} of {total}")
    z2 = float(ndtri((1 + level) / 2)) ** 2
    centre = (right + z2 / 2) / (total + z2)
    half = np.sqrt(z2 * (right * (total - right) / total + z2 / 4)) / (total + z2)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def t_half_width(values: npt.ArrayLike, *, level: float = 0.95) -> float:
    """Half the width of Student's t interval of the mean of values [S], S >= 2."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < 2:
        raise ValueError(f"a t interval needs at least two values in one dimension, not shape {array.shape}")
    return float(stdtrit(len(array) - 1, (1 + level) / 2) * array.std(ddof=1) / np.sqrt(len(array)))


def bootstrap_means(matrix: Floats, *, resamples: int, rng_seed: int) -> Floats:
    """Means [resamples] of matrix [S, P] with its rows and its columns drawn anew, with replacement."""
    seeds, problems = matrix.shape
    rng = np.random.default_rng(rng_seed)
    means = []
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        rows = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=size) / seeds
        columns = rng.multinomial(problems, np.full(problems, 1 / problems), size=size) / problems
        means.append(((rows @ matrix) * columns).sum(axis=1))
    return np.concatenate(means)


def _over_problems(matrix: Floats, level: float, bounds: Bounds, rng_seed: int, *, why: str) -> Interval:
    """Interval from the P means over seeds, with the reason why the seeds were not used.

    All problems alike: had a share q of problems differed, none of P would have been seen to with probability
    (1-q)^P; q's Wilson limit times the farthest a value can be bounds the mean. For rates of 0 or 1 this is Wilson's
    own interval, for a difference of 0 it is +-z^2/(P + z^2).
    """
    seeds, problems = matrix.shape
    each = matrix.mean(axis=0)
    mean = float(each.mean())
    if np.ptp(each) < _SAME:
        unseen = wilson(0, problems, level=level)[1]
        low, high = mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)
        method = "Wilson limit over problems"
    elif bounds == RATE and np.all((each < _SAME) | (each > 1 - _SAME)):
        low, high = wilson(round(float(each.sum())), problems, level=level)
        method = "Wilson over problems"
    else:
        low, high = _percentiles(bootstrap_means(each[None, :], resamples=4000, rng_seed=rng_seed), level)
        method = "bootstrap over problems"
    return _interval(mean, low, high, level, bounds, f"{method} ({why})", seeds, problems)


def _percentiles(means: Floats, level: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _interval(
    mean: float, low: float, high: float, level: float, bounds: Bounds, method: str, seeds: int, problems: int
) -> Interval:
    # Rounding of a mean must not put an estimate outside its own limits.
    low, high = max(bounds[0], min(low, mean)), min(bounds[1], max(high, mean))
    return Interval(estimate=mean, low=low, high=high, level=level, method=method, seeds=seeds, problems=problems)


def _matrix(values: npt.ArrayLike, level: float, bounds: Bounds) -> Floats:
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"an interval needs a matrix [seeds, problems] that is not empty, not shape {matrix.shape}")
    if not np.all(np.isfinite(matrix)):
        raise ValueError("an interval needs a value for every seed and problem; some are missing (NaN or infinite)")
    if matrix.min() < bounds[0] - 1e-9 or matrix.max() > bounds[1] + 1e-9:
        raise ValueError(f"values reach from {matrix.min():g} to {matrix.max():g}, outside the bounds {bounds}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    return matrix
