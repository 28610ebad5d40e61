"""pass@k: the probability that at least one of k samples is right."""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...
@overload
def pass_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: npt.ArrayLike) -> float | Floats: ...
def pass_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: npt.ArrayLike) -> float | Floats:
    """Unbiased estimate of pass@k from n samples of which c are right (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    1 - C(n-c, k) / C(n, k), as the product over j < k of (n - c - j) / (n - j): no factorials, error below 1e-15,
    exactly 1 where fewer than k samples are wrong.

    n, c, k: whole numbers, or arrays of them that broadcast together. Returns a float, or an array of their shape.
    Raises ValueError for k < 1, c < 0, c > n, k > n and for numbers that are not whole: a problem with too few
    samples is never skipped, since each k would then be about another set of problems.
    """
    samples, right, draws = np.broadcast_arrays(*(_whole(name, x) for name, x in (("n", n), ("c", c), ("k", k))))
    _refuse(draws < 1, "k must be at least 1", samples, right, draws)
    _refuse(right < 0, "c must not be negative", samples, right, draws)
    _refuse(right > samples, "c (right samples) must not exceed n (samples)", samples, right, draws)
    _refuse(draws > samples, "k must not exceed n (samples); draw more, or ask for a smaller k", samples, right, draws)
    all_wrong = np.ones(samples.shape)
    for j in range(int(draws.max(initial=0))):
        factor = np.maximum(samples - right - j, 0) / np.maximum(samples - j, 1)
        all_wrong *= np.where(j < draws, factor, 1.0)
    return 1.0 - all_wrong if all_wrong.ndim else float(1.0 - all_wrong)


def _whole(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or not np.all(np.isfinite(array)) or np.any(array != np.floor(array)):
        raise ValueError(f"pass@k needs whole numbers for {name}, not {values!r}")
    return array.astype(np.int64)


def _refuse(bad: npt.NDArray[np.bool_], rule: str, *values: npt.NDArray[np.int64]) -> None:
    if np.any(bad):
        n, c, k = (int(value[bad].flat[0]) for value in values)
        raise ValueError(f"pass@k: {rule}; got n={n}, c={c}, k={k}")
