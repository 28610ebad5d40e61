"""Claims: an expectation written before the run, and the verdict of the table on it.

Undecided is an honest result. "No gain" is a claim too (`equivalent`), with a margin stated beforehand; an arm that
never received a reward has "no signal", which says nothing about what RL could do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pandas as pd

from analysis.compute import arm_stages, base_of, lineage, once
from analysis.intervals import DIFFERENCE, SECOND_DIFFERENCE, Interval, over_seeds, over_seeds_and_problems
from analysis.tables import Metric, check_outcomes, independent, matrix

Verdict = Literal["shown", "not shown", "undecided", "no signal"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """gain: arm minus its parent, > 0 (`positive`) or within +-delta of 0 (`equivalent`).
    gain_difference: gain of `arm` minus gain of `other`, likewise."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    # The claim in a sentence, as a report prints it.
    text: str = ""
    kind: Literal["gain", "gain_difference"] = "gain"
    arm: str
    # The arm whose gain is subtracted (gain_difference only).
    other: str | None = None
    band: str
    metric: Metric = "strict"
    k: int = 1
    expect: Literal["positive", "equivalent"] = "positive"
    # Margin under which a gain is as good as none.
    delta: float | None = None
    # Nominal coverage of the interval.
    level: float = 0.95
    # What the claim generalises to: new seeds on these problems, or new problems too.
    over: Literal["seeds", "seeds and problems"] = "seeds"

    def __post_init__(self) -> None:
        if self.kind not in ("gain", "gain_difference"):
            raise ValueError(f"claim {self.name!r}: kind is gain or gain_difference, not {self.kind!r}")
        if self.expect not in ("positive", "equivalent"):
            raise ValueError(f"claim {self.name!r}: expect is positive or equivalent, not {self.expect!r}")
        if (self.kind == "gain_difference") != (self.other is not None):
            raise ValueError(f"claim {self.name!r}: `other` names the second arm of a gain_difference alone")
        if self.expect == "equivalent" and self.delta is None:
            raise ValueError(f"claim {self.name!r}: an equivalent claim states its margin `delta` before the run")
        if self.delta is not None and not self.delta > 0:
            raise ValueError(f"claim {self.name!r}: delta must be positive, not {self.delta}")
        if self.k < 1 or (self.metric == "process" and self.k != 1):
            raise ValueError(f"claim {self.name!r}: k must be at least 1, and 1 for the process score, not {self.k}")
        if not 0 < self.level < 1:
            raise ValueError(f"claim {self.name!r}: level must lie between 0 and 1, not {self.level}")


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim with what was found. signal_share and weight_change are of the RL stages between the arm and its parent,
    over all seeds (for a gain_difference of whichever arm had less signal); None where there is none."""

    claim: Claim
    interval: Interval
    verdict: Verdict
    # Why, in words, with the numbers.
    reason: str
    signal_share: float | None = None
    weight_change: float | None = None

    @property
    def estimate(self) -> float:
        return self.interval.estimate


def judge(claim: Claim, outcomes: pd.DataFrame, stages: pd.DataFrame, parents: Mapping[str, str | None]) -> ClaimResult:
    """The verdict of the tables on a claim.

    parents: from arm to the arm its gain is measured from (`compute.parent_arms` finds the nearest evaluated one).
    positive: shown if the interval lies above 0; not shown if it does not reach above 0, or lies within +-delta.
    equivalent: shown if the interval lies within +-delta; not shown if it lies beyond on one side.
    Undecided otherwise. A gain of an arm whose RL never saw a group with signal is "no signal", unless the numbers
    show a positive claim all the same; so is an equivalence with such a gain. Where it is the gain that is subtracted
    from, the verdict stands and the reason tells.
    Raises ValueError for an arm, parent or band that is not there.
    """
    check_outcomes(outcomes)
    gain = _gain(claim, claim.arm, outcomes, parents)
    if claim.other is not None:
        gain = gain - _gain(claim, claim.other, outcomes, parents)
    involved = [arm for arm in (claim.arm, claim.other) if arm is not None]
    gain = independent(gain, outcomes, [*involved, *(str(parents[arm]) for arm in involved)])
    method = over_seeds if claim.over == "seeds" else over_seeds_and_problems
    bounds = DIFFERENCE if claim.other is None else SECOND_DIFFERENCE
    interval = method(gain.to_numpy(), level=claim.level, bounds=bounds)

    verdict, reason = _verdict(claim, interval)
    signals = {arm: found for arm in involved if (found := _signal(outcomes, stages, arm, parents)) is not None}
    silent = {arm: found for arm, found in signals.items() if not found.share}
    if silent:
        words = "; ".join(found.words(arm) for arm, found in silent.items())
        shown = verdict == "shown" and claim.expect == "positive"
        if not shown and (claim.arm in silent or claim.expect == "equivalent"):
            verdict, reason = "no signal", f"{words}; the interval is {_span(interval)}"
        else:
            reason += f"; {words}"
    least = min(signals.values(), key=lambda found: found.share, default=None)
    share, weight_change = (None, None) if least is None else (least.share, least.weight_change)
    return ClaimResult(
        claim=claim, interval=interval, verdict=verdict, reason=reason, signal_share=share, weight_change=weight_change
    )


def table(results: Sequence[ClaimResult]) -> pd.DataFrame:
    """One row a claim: claim, text, expect, delta, estimate, low, high, method, verdict, signal_share, weight_change,
    reason."""
    return pd.DataFrame(
        [
            {
                "claim": result.claim.name,
                "text": result.claim.text,
                "expect": result.claim.expect,
                "delta": result.claim.delta,
                "estimate": result.interval.estimate,
                "low": result.interval.low,
                "high": result.interval.high,
                "method": result.interval.method,
                "verdict": result.verdict,
                "signal_share": result.signal_share,
                "weight_change": result.weight_change,
                "reason": result.reason,
            }
            for result in results
        ]
    )


def _gain(claim: Claim, arm: str, outcomes: pd.DataFrame, parents: Mapping[str, str | None]) -> pd.DataFrame:
    """Arm minus parent, [seeds, problems]."""
    parent = parents.get(arm)
    if parent is None:
        raise ValueError(f"claim {claim.name!r}: arm {arm!r} has no parent arm, so it has no gain")
    values = [matrix(outcomes, arm=name, metric=claim.metric, k=claim.k, band=claim.band) for name in (arm, parent)]
    return values[0] - values[1]


@dataclass(frozen=True)
class _Signal:
    """Of the RL stages that an arm has and its parent has not: groups, the share whose rewards differed, and the mean
    relative change of the weights."""

    groups: float
    share: float
    weight_change: float | None

    def words(self, arm: str) -> str:
        text = f"“{arm}” never had signal: the samples of none of its {self.groups:.0f} groups differed in reward"
        if self.weight_change is not None:
            text += f"; its weights changed by {self.weight_change:.2g} of their norm"
        return text


def _signal(
    outcomes: pd.DataFrame, stages: pd.DataFrame, arm: str, parents: Mapping[str, str | None]
) -> _Signal | None:
    """None for an arm without RL of its own. Of a stage of which the parent has a checkpoint, the rest counts."""
    ends = arm_stages(outcomes)
    before = lineage(stages, ends[str(parents[arm])])
    own = [stage for stage in lineage(stages, ends[arm]) if stage not in before]
    rows = once(stages[stages["stage"].isin(own)])
    earlier = once(stages[stages["stage"].isin(before) & stages["stage"].map(base_of).isin(rows["stage"].map(base_of))])
    signal, groups = (
        float(rows[column].fillna(0).sum() - earlier[column].fillna(0).sum())
        for column in ("groups_with_signal", "groups")
    )
    if not groups:
        return None
    # Where a part of it is the parent's, the change of weights is not its own.
    change = rows.loc[rows["groups"].fillna(0) > 0, "weight_change"].mean() if earlier.empty else math.nan
    return _Signal(groups, signal / groups, None if pd.isna(change) else float(change))


def _verdict(claim: Claim, interval: Interval) -> tuple[Verdict, str]:
    span, delta = _span(interval), claim.delta
    within = delta is not None and interval.inside(delta)
    if claim.expect == "positive":
        if interval.low > 0:
            return "shown", f"the whole interval, {span}, lies above 0"
        if interval.high <= 0:
            return "not shown", f"the interval, {span}, does not reach above 0"
        if within:
            return "not shown", f"the whole interval, {span}, lies within ±{delta:g}: as good as none"
        return "undecided", f"the interval, {span}, holds 0 and gains that would count"
    assert delta is not None
    if within:
        return "shown", f"the whole interval, {span}, lies within ±{delta:g}"
    if interval.outside(delta):
        return "not shown", f"the whole interval, {span}, lies beyond ±{delta:g}"
    return "undecided", f"the interval, {span}, reaches across ±{delta:g}"


def _span(interval: Interval) -> str:
    return f"{interval.low:+.3f} to {interval.high:+.3f}"
