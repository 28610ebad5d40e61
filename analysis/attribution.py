"""Which stage gave what: Shapley values over a factorial of stages, and the contrast at equal FLOPs.

Two estimands, never mixed. *As run*: each stage at one fixed dose, present or absent, credited by its Shapley value.
*Matched*: the treated arm minus a placebo that trained for the same FLOPs. A fixed budget split between stages (a
ladder of beta) has no absent stage at a fixed dose: it is a series of contrasts, and `attribute` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.compute import arm_stages, base_of, by_arm, lineage, once
from analysis.intervals import Interval, over_seeds, t_half_width, wilson
from analysis.tables import Metric, bands, check_outcomes, independent, interval_columns, matrix

Floats = npt.NDArray[np.float64]
Coalition = frozenset[str]
# A linear combination of the coalitions' values.
Weights = dict[Coalition, float]

# Rates are kept this far from 0 and 1 before their logit is taken.
CLIP = 0.01
# Arms of a matched contrast may differ by this share of FLOPs.
MATCHED_WITHIN = 0.05


def subsets(factors: Sequence[str]) -> list[Coalition]:
    """Every coalition of the factors, small ones first."""
    return [frozenset(some) for size in range(len(factors) + 1) for some in combinations(factors, size)]


def shapley_weights(factors: Sequence[str], factor: str) -> Weights:
    """Weights of the coalitions' values v in the Shapley value of one factor (Shapley 1953):
    the sum over coalitions A without it of |A|! (N - |A| - 1)! / N! (v(A + factor) - v(A))."""
    count = len(factors)
    weights: Weights = {}
    for others in subsets([name for name in factors if name != factor]):
        weight = factorial(len(others)) * factorial(count - len(others) - 1) / factorial(count)
        weights[others | {factor}] = weight
        weights[others] = -weight
    return weights


def interaction_weights(together: Coalition) -> Weights:
    """Weights of the interaction of two or more factors where all others are absent (Harsanyi dividend):
    for two, v(AB) - v(A) - v(B) + v()."""
    return {some: float((-1) ** (len(together) - len(some))) for some in subsets(sorted(together))}


def combine(values: Mapping[Coalition, npt.ArrayLike], weights: Weights) -> Floats:
    """The weighted sum of the coalitions' values, which are numbers or arrays of one shape."""
    terms = [weight * np.asarray(values[coalition], dtype=np.float64) for coalition, weight in weights.items()]
    return np.asarray(np.sum(terms, axis=0), dtype=np.float64)


def shapley(values: Mapping[Coalition, npt.ArrayLike], factors: Sequence[str]) -> dict[str, Floats]:
    """Shapley value of every factor from the values of all 2^N coalitions, by exact enumeration; they add up to
    v(all) - v(none). Values are numbers or arrays of one shape. Raises ValueError where a coalition is missing."""
    _complete(factors, values)
    return {factor: combine(values, shapley_weights(factors, factor)) for factor in factors}


def interactions(values: Mapping[Coalition, npt.ArrayLike], factors: Sequence[str]) -> dict[Coalition, Floats]:
    """Interaction of every two or more factors; see `interaction_weights`."""
    _complete(factors, values)
    return {some: combine(values, interaction_weights(some)) for some in subsets(factors) if len(some) > 1}


def coalitions(factors: Sequence[str], arms: Mapping[str, str]) -> dict[Coalition, str]:
    """From labels such as "", "mid", "mid+rl" to coalitions; every one of the 2^N must be there. Raises ValueError."""
    found: dict[Coalition, str] = {}
    for label, arm in arms.items():
        members = frozenset(part for part in label.split("+") if part)
        unknown = sorted(members - set(factors))
        if unknown:
            raise ValueError(f"attribution arm {label!r} names {', '.join(unknown)}, no factor of {list(factors)}")
        if members in found:
            raise ValueError(f"attribution names two arms for {_label(members, factors) or 'no factor'!r}")
        if arm in found.values():
            raise ValueError(f"attribution takes arm {arm!r} for two combinations of {', '.join(factors)}")
        found[members] = arm
    _complete(factors, found)
    return found


def attribute(
    outcomes: pd.DataFrame,
    *,
    factors: Sequence[str],
    arms: Mapping[str, str],
    matched: Mapping[str, str] | None = None,
    stages: pd.DataFrame | None = None,
    metric: Metric = "strict",
    k: int = 1,
    level: float = 0.95,
    clip: float = CLIP,
) -> pd.DataFrame:
    """Effects by band, on the probability scale and on the logit scale (ceilings fake interactions on the first).

    arms: from coalition ("", "mid", "rl", "mid+rl") to arm; matched: {"treated": arm, "placebo": arm} of equal
    FLOPs; none or empty leaves the contrast out.
    stages: with it, doses are compared (a budget split is refused) and so are the FLOPs of a matched contrast.

    One row an effect: band, operations, scale, kind, effect, metric, k, note and the interval's fields. Kinds: `base`
    (the arm without any factor, its rate or logit), `total` (all factors minus none), `shapley`, `interaction`,
    `matched`. Effects are computed seed by seed and get a t interval over seeds. On the logit scale the rate of a
    band is clipped to [clip, 1 - clip] first.
    Raises ValueError for an incomplete factorial, unequal doses or unmatched FLOPs.
    """
    check_outcomes(outcomes)
    if not 0 < clip < 0.5:
        raise ValueError(f"clip must lie between 0 and 0.5, not {clip}")
    if matched and set(matched) != {"treated", "placebo"}:
        raise ValueError(f"matched names a treated and a placebo arm, not {', '.join(matched)}")
    if matched and matched["treated"] == matched["placebo"]:
        raise ValueError(f"matched names arm {matched['treated']!r} as its own placebo")
    contrast = (matched["treated"], matched["placebo"]) if matched else None
    factorial_arms = coalitions(factors, arms)
    note = ""
    if stages is not None:
        ends = arm_stages(outcomes)
        _same_doses(stages, {arm: ends[arm] for arm in factorial_arms.values()})
        note = _matched_flops(stages, ends, contrast) if contrast else ""
    effects = _effects(factors, factorial_arms, contrast)
    names = sorted({arm for weights in effects.values() for arm in weights})
    rows = []
    for band, operations in bands(outcomes).items():
        values = {arm: matrix(outcomes, arm=arm, metric=metric, k=k, band=band) for arm in names}
        runs = {
            name: {arm: independent(values[arm], outcomes, list(weights)).to_numpy() for arm in weights}
            for name, weights in effects.items()
        }
        for scale in ("probability", "logit"):
            for (kind, effect), weights in effects.items():
                cells = runs[kind, effect]
                interval = (
                    _linear(cells, weights, level) if scale == "probability" else _logit(cells, weights, level, clip)
                )
                rows.append(
                    {"band": band, "operations": operations, "scale": scale, "kind": kind, "effect": effect}
                    | {"metric": metric, "k": k, "note": note if kind == "matched" else ""}
                    | interval_columns(interval)
                )
    return pd.DataFrame(rows)


def _effects(
    factors: Sequence[str], arms: Mapping[Coalition, str], matched: tuple[str, str] | None
) -> dict[tuple[str, str], dict[str, float]]:
    """Every effect as a weighted sum of arms."""

    def by_arms(weights: Weights) -> dict[str, float]:
        return {arms[coalition]: weight for coalition, weight in weights.items()}

    everything, nothing = frozenset(factors), Coalition()
    effects = {("base", arms[nothing]): {arms[nothing]: 1.0}}
    effects["total", f"{arms[everything]} − {arms[nothing]}"] = {arms[everything]: 1.0, arms[nothing]: -1.0}
    for factor in factors:
        effects["shapley", factor] = by_arms(shapley_weights(factors, factor))
    for some in subsets(factors):
        if len(some) > 1:
            effects["interaction", _label(some, factors, " × ")] = by_arms(interaction_weights(some))
    if matched:
        effects["matched", f"{matched[0]} − {matched[1]}"] = {matched[0]: 1.0, matched[1]: -1.0}
    return effects


def _linear(cells: Mapping[str, Floats], weights: Mapping[str, float], level: float) -> Interval:
    """An effect on the probability scale is linear, so it exists for every seed and problem: [S, P]."""
    matrix = np.sum([weight * cells[arm] for arm, weight in weights.items()], axis=0)
    low = sum(min(weight, 0.0) for weight in weights.values())
    high = sum(max(weight, 0.0) for weight in weights.values())
    return over_seeds(matrix, level=level, bounds=(low, high))


def _logit(cells: Mapping[str, Floats], weights: Mapping[str, float], level: float, clip: float) -> Interval:
    """An effect on the logits of the band's rate, which exist seed by seed: t over seeds. Where the seeds carry no
    spread, limits combine those of each arm's rate at their worst, which is wide but never too narrow."""

    def logit(rate: Any) -> Any:
        kept = np.clip(rate, clip, 1 - clip)
        return np.log(kept / (1 - kept))

    seeds, problems = next(iter(cells.values())).shape
    values = np.sum([weight * logit(cells[arm].mean(axis=1)) for arm, weight in weights.items()], axis=0)
    mean = float(values.mean())
    if seeds > 1 and np.ptp(values) > 1e-12:
        half = t_half_width(values, level=level)
        low, high, method = mean - half, mean + half, "t over seeds"
    else:
        limits = {arm: _rate_limits(cells[arm], level) for arm in weights}
        worst = [sorted(weight * logit(limit) for limit in limits[arm]) for arm, weight in weights.items()]
        low, high = min(mean, sum(pair[0] for pair in worst)), max(mean, sum(pair[1] for pair in worst))
        why = "one seed" if seeds == 1 else "all seeds agree"
        method = f"limits of each arm combined ({why})"
        if high - low < 1e-12:
            # Clipping hides whatever the rates do: the scale has nothing to say, not something exact.
            low, high, method = float("nan"), float("nan"), f"none: every rate lies beyond the clip ({why})"
    return Interval(estimate=mean, low=low, high=high, level=level, method=method, seeds=seeds, problems=problems)


def _rate_limits(cell: Floats, level: float) -> tuple[float, float]:
    # A value in [0, 1] varies at most as much as a coin of the same mean: Wilson's limits hold for any of them.
    problems = cell.shape[1]
    mean = float(cell.mean()) * problems
    return wilson(int(np.floor(mean)), problems, level=level)[0], wilson(int(np.ceil(mean)), problems, level=level)[1]


def _complete(factors: Sequence[str], values: Mapping[Coalition, object]) -> None:
    if not factors or len(set(factors)) < len(factors) or any("+" in factor or not factor for factor in factors):
        raise ValueError(f"attribution needs distinct factors with names free of '+', not {list(factors)}")
    missing = [_label(some, factors) for some in subsets(factors) if some not in values]
    if missing:
        raise ValueError(
            f"attribution over {', '.join(factors)} needs an arm for each of the {2 ** len(factors)} combinations; "
            f"missing: {', '.join(repr(label) for label in missing)}"
        )


def _label(coalition: Coalition, factors: Sequence[str], between: str = "+") -> str:
    return between.join(factor for factor in factors if factor in coalition)


# Kinds of stages that are made of several others.
MIXED = ("parallel", "combine")


def _same_doses(stages: pd.DataFrame, ends: Mapping[str, str]) -> None:
    """All arms start from one first stage, and a kind of stage beyond pretraining has one dose (tokens, or samples for
    RL) in all arms that have it at all. A stage that is made of several (parallel, combine) has no dose of one."""
    doses: dict[str, tuple[str, float]] = {}
    roots: dict[str, str] = {}
    first = set(stages.loc[stages["parent"].isna() | (stages["parent"] == ""), "stage"])
    for arm, end in ends.items():
        roots |= {base_of(stage): arm for stage in lineage(stages, end) if stage in first}
        mixed = stages[stages["stage"].isin(lineage(stages, end)) & stages["kind"].isin(MIXED)]
        if not mixed.empty:
            stage, kind = str(mixed["stage"].iloc[0]), str(mixed["kind"].iloc[0])
            raise ValueError(
                f"arm {arm!r} has the {kind} stage {stage!r}, in which several factors act at once: it is a contrast "
                "of its own, and no cell of a factorial"
            )
    if len(roots) > 1:
        raise ValueError(
            f"arms {' and '.join(map(repr, roots.values()))} start from different stages ({', '.join(roots)}): what "
            "they differ in is not one factor"
        )
    for arm, end in ends.items():
        mine = once(stages[stages["stage"].isin(lineage(stages, end)) & (stages["kind"] != "pretrain")])
        for name, rows in mine.groupby("kind"):
            kind = str(name)
            column = "samples" if kind == "rl" else "tokens"
            dose = float(rows.groupby("seed")[column].sum().mean())
            other, expected = doses.setdefault(kind, (arm, dose))
            if abs(dose - expected) > 0.01 * max(dose, expected):
                raise ValueError(
                    f"arms {other!r} and {arm!r} have different doses of {kind} ({expected:.0f} and {dose:.0f} "
                    f"{column}): a budget split between stages is a series of contrasts, and Shapley values need each "
                    "stage at one dose"
                )


def _matched_flops(stages: pd.DataFrame, ends: Mapping[str, str], matched: tuple[str, str]) -> str:
    unknown = [arm for arm in matched if arm not in ends]
    if unknown:
        raise ValueError(f"the matched contrast names arm {unknown[0]!r}; the table has {', '.join(ends)}")
    flops = by_arm(stages, {arm: ends[arm] for arm in matched}).set_index("arm")["flops"]
    ratio = float(flops[matched[1]] / flops[matched[0]])
    if abs(ratio - 1) > MATCHED_WITHIN:
        raise ValueError(
            f"the matched contrast compares unequal compute: {matched[1]!r} took {ratio:.2f} times the FLOPs of "
            f"{matched[0]!r}; give the placebo the FLOPs of the stages it replaces"
        )
    return f"placebo has {ratio:.3f} of the FLOPs"
