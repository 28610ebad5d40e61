"""Claims fed tables where the effect is there, absent, reversed and drowned in noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import tables as made_up
from pydantic import TypeAdapter, ValidationError

from analysis import Claim, judge, over_seeds
from analysis.claims import ClaimResult, table
from analysis.tables import matrix

STAGES = made_up.stages(far_signal=64)


def run(
    claim: Claim, *, base: float, rl: float, far: float | None = None, noise: float = 0.05, **more: Any
) -> ClaimResult:
    """The verdict on a made-up table: strict rates of the parent, of RL at the edge and of RL far beyond it."""
    rates = {"pretrained": {6: base}, "rl": {6: rl}, "rl far": {6: base if far is None else far}}
    outcomes = made_up.outcomes(rates, seed_sd=noise, problem_sd=0.5)
    return judge(claim, outcomes, more.get("stages", STAGES), made_up.PARENTS)


GAIN = Claim(name="gain", arm="rl", band="further")
SMALL = Claim(name="small", arm="rl", band="further", delta=0.05)
NONE = Claim(name="none", arm="rl", band="further", expect="equivalent", delta=0.05)
MORE = Claim(name="more", kind="gain_difference", arm="rl", other="rl far", band="further")


@pytest.mark.parametrize(
    ("claim", "settings", "verdict"),
    [
        (GAIN, {"base": 0.2, "rl": 0.5}, "shown"),
        (GAIN, {"base": 0.5, "rl": 0.5}, "undecided"),
        (GAIN, {"base": 0.5, "rl": 0.2}, "not shown"),
        (GAIN, {"base": 0.2, "rl": 0.35, "noise": 1.5}, "undecided"),
        (SMALL, {"base": 0.02, "rl": 0.02}, "not shown"),
        (SMALL, {"base": 0.2, "rl": 0.5}, "shown"),
        (NONE, {"base": 0.02, "rl": 0.02}, "shown"),
        (NONE, {"base": 0.2, "rl": 0.5}, "not shown"),
        (NONE, {"base": 0.5, "rl": 0.2}, "not shown"),
        (NONE, {"base": 0.4, "rl": 0.4, "noise": 1.5}, "undecided"),
        (MORE, {"base": 0.2, "rl": 0.5}, "shown"),
        (MORE, {"base": 0.2, "rl": 0.2}, "undecided"),
        (MORE, {"base": 0.2, "rl": 0.2, "far": 0.5}, "not shown"),
        (MORE, {"base": 0.2, "rl": 0.3, "noise": 1.5}, "undecided"),
    ],
)
def test_verdicts(claim: Claim, settings: dict[str, Any], verdict: str) -> None:
    result = run(claim, **settings)
    assert result.verdict == verdict, result.reason
    assert f"{result.interval.low:+.3f} to {result.interval.high:+.3f}" in result.reason


def test_a_gain_is_paired_and_from_its_own_parent() -> None:
    outcomes = made_up.outcomes(seed_sd=0.3)
    claim = Claim(name="own", arm="mid+rl", band="edge", k=4)
    found = judge(claim, outcomes, STAGES, made_up.PARENTS)
    values = [matrix(outcomes, arm=arm, band="edge", k=4).to_numpy() for arm in ("mid+rl", "mid")]
    assert found.interval == over_seeds(values[0] - values[1], bounds=(-1, 1))
    assert found.signal_share == pytest.approx(610 / 640)
    assert found.weight_change == pytest.approx(0.031)
    both = judge(
        Claim(name="new", arm="mid+rl", band="edge", over="seeds and problems"), outcomes, STAGES, made_up.PARENTS
    )
    assert both.interval.method.startswith("two-way")


def test_the_far_arm_is_subtracted() -> None:
    outcomes = made_up.outcomes()
    gains = [
        judge(Claim(name=arm, arm=arm, band="further"), outcomes, STAGES, made_up.PARENTS) for arm in ("rl", "rl far")
    ]
    more = judge(MORE, outcomes, STAGES, made_up.PARENTS)
    assert more.estimate == pytest.approx(gains[0].estimate - gains[1].estimate)
    assert more.signal_share == pytest.approx(0.1)


def test_an_arm_without_signal_is_no_evidence_of_no_gain() -> None:
    silent = made_up.stages(far_signal=0)
    none = Claim(name="none", arm="rl far", band="further", expect="equivalent", delta=0.05)
    result = run(none, base=0.02, rl=0.4, stages=silent)
    assert result.verdict == "no signal"
    assert (result.signal_share, result.weight_change) == (0.0, 0.0)
    assert "none of its 2560 groups" in result.reason
    # One group of one seed is signal.
    heard = silent.assign(
        groups_with_signal=silent["groups_with_signal"].where(silent["key"] != "rl_far-2", 1), weight_change=0.01
    )
    assert run(none, base=0.02, rl=0.4, stages=heard).verdict == "shown"
    # An arm that is not RL has no signal to miss.
    mid = Claim(name="mid", arm="mid", band="far", expect="equivalent", delta=0.5)
    found = judge(mid, made_up.outcomes(), silent, made_up.PARENTS)
    assert (found.verdict, found.signal_share, found.weight_change) == ("shown", None, None)


def test_signal_is_that_of_the_stages_between_an_arm_and_its_parent() -> None:
    after = STAGES[STAGES["stage"] == "continued"].assign(
        stage="after", key=lambda rows: "after-" + rows["seed"].astype(str), parent="rl_edge", kind="sft"
    )
    outcomes = made_up.outcomes({"rl": {6: 0.3}, "after": {6: 0.4}}, problems=8)
    claim = Claim(name="after", arm="after", band="further")
    found = judge(claim, outcomes, pd.concat([STAGES, after]), {"after": "rl"})
    assert (found.signal_share, found.weight_change) == (None, None)


def test_no_signal_elsewhere_does_not_stop_a_difference_or_a_shown_gain() -> None:
    silent = made_up.stages(far_signal=0)
    result = run(MORE, base=0.2, rl=0.5, stages=silent)
    assert result.verdict == "shown" and "“rl far” never had signal" in result.reason
    gain = Claim(name="far", arm="rl far", band="further")
    assert run(gain, base=0.2, rl=0.2, far=0.6, stages=silent).verdict == "shown"
    assert run(gain, base=0.2, rl=0.2, stages=silent).verdict == "no signal"


def test_a_silent_arm_is_never_an_equivalence() -> None:
    """Whichever side of the difference was silent."""
    for arm, other in (("rl far", "rl"), ("rl", "rl far")):
        equal = Claim(
            name="same", kind="gain_difference", arm=arm, other=other, band="further", expect="equivalent", delta=0.5
        )
        result = run(equal, base=0.2, rl=0.2, stages=made_up.stages(far_signal=0))
        assert result.verdict == "no signal" and result.signal_share == 0.0
        assert "“rl far” never had signal" in result.reason
        assert run(equal, base=0.2, rl=0.2).verdict == "shown"
    treated = Claim(name="more", kind="gain_difference", arm="rl far", other="rl", band="further")
    assert run(treated, base=0.2, rl=0.2, stages=made_up.stages(far_signal=0)).verdict == "no signal"


def test_repeated_checkpoints_are_one_run() -> None:
    outcomes = made_up.outcomes(seed_sd=0.3)
    claim = Claim(name="gain", arm="mid", band="edge")
    # From one parent, differing runs are repetitions; one run sampled again and again is not.
    parent = outcomes.assign(key=outcomes["key"].where(outcomes["arm"] != "pretrained", "one"))
    assert judge(claim, parent, STAGES, made_up.PARENTS).interval.seeds == 4
    found = judge(claim, outcomes.assign(key=outcomes["arm"]), STAGES, made_up.PARENTS).interval
    assert found.seeds == 1
    assert found.estimate == pytest.approx(judge(claim, outcomes, STAGES, made_up.PARENTS).estimate)


def test_a_constant_null_is_not_equivalent_for_free() -> None:
    rates = {"pretrained": {6: 0.0}, "rl": {6: 0.0}}
    few = judge(NONE, made_up.outcomes(rates, problems=20), STAGES, made_up.PARENTS)
    many = judge(NONE, made_up.outcomes(rates, problems=200), STAGES, made_up.PARENTS)
    assert (few.verdict, many.verdict) == ("undecided", "shown")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "loss"}, "kind is"),
        ({"expect": "negative"}, "expect is"),
        ({"kind": "gain_difference"}, "`other`"),
        ({"other": "rl far"}, "`other`"),
        ({"expect": "equivalent"}, "states its margin"),
        ({"delta": 0.0}, "positive"),
        ({"k": 0}, "k must be"),
        ({"metric": "process", "k": 2}, "process score"),
        ({"level": 1.0}, "level"),
    ],
)
def test_claims_that_cannot_be_judged_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Claim(**{"name": "x", "arm": "rl", "band": "edge", **change})


def test_a_claim_is_read_by_pydantic() -> None:
    adapter = TypeAdapter(Claim)
    claim = adapter.validate_python({"name": "x", "arm": "rl", "band": "edge", "expect": "equivalent", "delta": 0.1})
    assert claim == Claim(name="x", arm="rl", band="edge", expect="equivalent", delta=0.1)
    with pytest.raises(ValidationError, match="bnad"):
        adapter.validate_python({"name": "x", "arm": "rl", "band": "edge", "bnad": "edge"})


def test_what_is_missing_is_named() -> None:
    outcomes = made_up.outcomes(problems=8)
    with pytest.raises(ValueError, match="'pretrained' has no parent"):
        judge(Claim(name="x", arm="pretrained", band="edge"), outcomes, STAGES, made_up.PARENTS)
    with pytest.raises(ValueError, match="no outcomes of arm 'rl' in band 'near'"):
        judge(Claim(name="x", arm="rl", band="near"), outcomes, STAGES, made_up.PARENTS)


def test_table_of_results() -> None:
    rows = table([run(GAIN, base=0.2, rl=0.5), run(NONE, base=0.2, rl=0.5)])
    assert rows["verdict"].tolist() == ["shown", "not shown"]
    assert np.isnan(rows["delta"].iloc[0]) and rows["delta"].iloc[1] == 0.05
    assert isinstance(rows, pd.DataFrame)


@pytest.mark.parametrize("kind", ["rl", "parallel"])
def test_no_signal_is_seen_whatever_the_stage_is_called(kind: str) -> None:
    """A stage that samples groups has signal or has none, as a checkpoint of RL, and beside another objective."""
    silent = made_up.stages().assign(kind=lambda rows: rows["kind"].where(rows["stage"] != "rl_far", kind))
    claim = Claim(name="none", arm="rl far", band="further", expect="equivalent", delta=0.05)
    assert run(claim, base=0.02, rl=0.02, stages=silent).verdict == "no signal"
    heard = made_up.stages(far_signal=3).assign(kind=lambda rows: rows["kind"].where(rows["stage"] != "rl_far", kind))
    assert run(claim, base=0.02, rl=0.02, stages=heard).verdict == "shown"


def test_signal_that_the_parent_has_is_not_the_arms_own() -> None:
    """An arm that goes on from a checkpoint of its own stage counts the rest: here the signal came before."""
    stages = made_up.stages(far_signal=64)
    early = stages[stages["stage"] == "rl_far"].assign(
        stage="rl_far@5", key=lambda rows: rows["key"] + "@5", groups=320, samples=5_120
    )
    late = stages.assign(groups_with_signal=stages["groups_with_signal"])
    table = pd.concat([late, early], ignore_index=True)
    rates = {"early": {6: 0.02}, "rl far": {6: 0.02}}
    outcomes = made_up.outcomes(rates, seed_sd=0.05, problem_sd=0.5)
    names = {"early": "rl_far@5", "rl far": "rl_far"}
    outcomes["stage"] = outcomes["arm"].map(names)
    keys = dict(zip(zip(table["stage"], table["seed"], strict=True), table["key"], strict=True))
    outcomes["key"] = [keys[place] for place in zip(outcomes["stage"], outcomes["seed"], strict=True)]
    claim = Claim(name="none", arm="rl far", band="further", expect="equivalent", delta=0.05)
    result = judge(claim, outcomes, table, {"early": None, "rl far": "early"})
    assert result.verdict == "no signal" and "none of its 1280 groups" in result.reason
