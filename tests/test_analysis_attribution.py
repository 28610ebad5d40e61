"""Shapley values against their definition over orders, and the two estimands kept apart."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pandas as pd
import pytest
import tables as made_up

from analysis import attribute, interactions, shapley
from analysis.attribution import coalitions, subsets
from analysis.tables import matrix

FACTORS = ("mid", "rl")
ARMS = {"": "pretrained", "mid": "mid", "rl": "rl", "mid+rl": "mid+rl"}
MATCHED = {"treated": "mid+rl", "placebo": "continued"}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shapley_is_the_mean_contribution_over_all_orders(count: int) -> None:
    factors = list("abcd"[:count])
    rng = np.random.default_rng(count)
    values = {some: rng.normal(size=5) for some in subsets(factors)}
    assert len(values) == 2**count
    found = shapley(values, factors)
    for factor in factors:
        gains = []
        for order in permutations(factors):
            before = frozenset(order[: order.index(factor)])
            gains.append(values[before | {factor}] - values[before])
        np.testing.assert_allclose(found[factor], np.mean(gains, axis=0), atol=1e-12)
    total = values[frozenset(factors)] - values[frozenset()]
    np.testing.assert_allclose(sum(found.values()), total, atol=1e-12)


def test_interaction_of_two_and_three() -> None:
    a, b, c = (frozenset(x) for x in "abc")
    two = {frozenset(): 1.0, a: 3.0, b: 4.0, a | b: 10.0}
    assert interactions(two, "ab") == {a | b: pytest.approx(4.0)}
    # Additive up to a product of all three: no pair interacts where the third is absent.
    three = {some: len(some) + 5.0 * (len(some) == 3) for some in subsets("abc")}
    found = interactions(three, "abc")
    assert {some: float(value) for some, value in found.items()} == {a | b: 0, a | c: 0, b | c: 0, a | b | c: 5}


def test_coalitions_are_read_in_any_order_and_must_be_complete() -> None:
    assert coalitions(FACTORS, {"rl+mid" if k == "mid+rl" else k: v for k, v in ARMS.items()})[frozenset(FACTORS)]
    for arms, message in (
        ({k: v for k, v in ARMS.items() if k != "rl"}, "missing: 'rl'"),
        ({**ARMS, "sft": "mid"}, "names sft"),
        ({**ARMS, "rl+mid": "mid"}, "two arms"),
        ({**ARMS, "mid+rl": "rl"}, "'rl' for two combinations"),
    ):
        with pytest.raises(ValueError, match=message):
            coalitions(FACTORS, arms)
    with pytest.raises(ValueError, match="distinct factors"):
        shapley({}, ["a", "a"])


@pytest.fixture(scope="module")
def outcomes() -> pd.DataFrame:
    return made_up.outcomes(seed_sd=0.2, problems=32)


def cell(table: pd.DataFrame, band: str, kind: str, effect: str, scale: str = "probability") -> pd.Series:
    rows = table[
        (table["band"] == band) & (table["kind"] == kind) & (table["effect"] == effect) & (table["scale"] == scale)
    ]
    assert len(rows) == 1
    return rows.iloc[0]


def test_attribute_matches_a_calculation_by_hand(outcomes: pd.DataFrame) -> None:
    table = attribute(outcomes, factors=FACTORS, arms=ARMS, matched=MATCHED, stages=made_up.stages())
    assert set(table["kind"]) == {"base", "total", "shapley", "interaction", "matched"}
    v = {arm: matrix(outcomes, arm=arm, band="further").to_numpy().mean(axis=1) for arm in made_up.RATES}
    rl = 0.5 * (v["rl"] - v["pretrained"]) + 0.5 * (v["mid+rl"] - v["mid"])
    found = cell(table, "further", "shapley", "rl")
    half = 3.182446305 * rl.std(ddof=1) / 2
    assert (found["estimate"], found["low"], found["high"]) == pytest.approx(
        (rl.mean(), rl.mean() - half, rl.mean() + half)
    )
    both = cell(table, "further", "shapley", "mid")["estimate"] + found["estimate"]
    assert cell(table, "further", "total", "mid+rl − pretrained")["estimate"] == pytest.approx(both)
    assert cell(table, "further", "matched", "mid+rl − continued")["estimate"] == pytest.approx(
        np.mean(v["mid+rl"] - v["continued"])
    )
    assert cell(table, "further", "matched", "mid+rl − continued")["note"] == "placebo has 1.000 of the FLOPs"
    interaction = v["mid+rl"] - v["mid"] - v["rl"] + v["pretrained"]
    assert cell(table, "further", "interaction", "mid × rl")["estimate"] == pytest.approx(interaction.mean())
    logit = {arm: np.log(rate / (1 - rate)) for arm, rate in v.items()}
    expected = np.mean(logit["mid+rl"] - logit["mid"] - logit["rl"] + logit["pretrained"])
    assert cell(table, "further", "interaction", "mid × rl", "logit")["estimate"] == pytest.approx(expected)
    assert cell(table, "further", "base", "pretrained")["estimate"] == pytest.approx(v["pretrained"].mean())


def test_a_ceiling_fakes_an_interaction_on_one_scale_alone() -> None:
    logits = {"pretrained": 0.0, "mid": 2.0, "rl": 2.0, "mid+rl": 4.0}
    rates = {arm: {5: 1 / (1 + np.exp(-logit))} for arm, logit in logits.items()}
    outcomes = made_up.outcomes(rates, problems=400, n=64, problem_sd=0.0, seed_sd=0.02)
    table = attribute(outcomes, factors=FACTORS, arms=ARMS)
    assert cell(table, "edge", "interaction", "mid × rl")["high"] < -0.2
    logit = cell(table, "edge", "interaction", "mid × rl", "logit")
    assert logit["low"] < 0 < logit["high"] and abs(logit["estimate"]) < 0.15


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_no_spread_between_seeds_still_has_a_width(seeds: tuple[int, ...]) -> None:
    rates = {arm: {8: 0.0} for arm in ARMS.values()}
    table = attribute(made_up.outcomes(rates, seeds=seeds, problems=50), factors=FACTORS, arms=ARMS)
    effects = table[table["kind"] != "base"]
    assert (effects["estimate"] == 0).all()
    assert (effects["low"] < -0.03).all() and (effects["high"] > 0.03).all()
    # An interaction can reach twice as far as a difference.
    width = (table["high"] - table["low"])[table["scale"] == "probability"].groupby(table["kind"]).first()
    assert width["interaction"] == pytest.approx(2 * width["total"])
    # Beyond the clip the logit scale knows nothing, and says so.
    many = attribute(made_up.outcomes(rates, seeds=seeds, problems=500), factors=FACTORS, arms=ARMS)
    logit = many[many["scale"] == "logit"]
    assert logit["low"].isna().all() and logit["method"].str.contains("clip").all()
    assert many.loc[many["scale"] == "probability", "low"].notna().all()


def test_a_budget_split_is_refused(outcomes: pd.DataFrame) -> None:
    stages = made_up.stages()
    ladder = stages.assign(samples=stages["samples"].where(stages["stage"] != "mid_rl", 5_120))
    with pytest.raises(ValueError, match=r"different doses of rl.*series of contrasts"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, stages=ladder)


def test_arms_of_one_factorial_start_from_one_stage(outcomes: pd.DataFrame) -> None:
    stages = made_up.stages()
    shorter = stages[stages["stage"] == "pretrain"].assign(stage="short", tokens=1)
    moved = stages.assign(parent=stages["parent"].where(stages["stage"] != "mid", "short"))
    with pytest.raises(ValueError, match="start from different stages"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, stages=pd.concat([shorter, moved]))


@pytest.mark.parametrize("kind", ["parallel", "combine"])
def test_stages_of_several_factors_are_no_cells(outcomes: pd.DataFrame, kind: str) -> None:
    stages = made_up.stages()
    mixed = stages.assign(kind=stages["kind"].where(stages["stage"] != "mid_rl", kind))
    with pytest.raises(ValueError, match=f"has the {kind} stage 'mid_rl', in which several factors act at once"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, stages=mixed)


def test_an_early_checkpoint_is_another_dose(outcomes: pd.DataFrame) -> None:
    stages = made_up.stages()
    early = stages["stage"] == "mid_rl"
    cut = stages.assign(
        stage=stages["stage"].where(~early, "mid_rl@5"), key=stages["key"].where(~early, stages["key"] + "@5"),
        samples=stages["samples"].where(~early, 1_024),
    )  # fmt: skip
    renamed = outcomes.assign(stage=outcomes["stage"].replace("mid_rl", "mid_rl@5"))
    with pytest.raises(ValueError, match="different doses of rl"):
        attribute(renamed, factors=FACTORS, arms=ARMS, stages=cut)


def test_one_checkpoint_sampled_often_is_one_run(outcomes: pd.DataFrame) -> None:
    """Effects of arms that repeat their checkpoint are not given an interval over seeds."""
    kept = ["pretrained", "mid"]
    one = outcomes.assign(key=outcomes["key"].where(~outcomes["arm"].isin(kept), outcomes["arm"]))
    table = attribute(one, factors=FACTORS, arms=ARMS)
    base, total = (cell(table, "further", kind, effect) for kind, effect in (
        ("base", "pretrained"), ("total", "mid+rl − pretrained"),
    ))  # fmt: skip
    assert (base["seeds"], total["seeds"]) == (1, 4) and "one seed" in base["method"]
    same = attribute(outcomes, factors=FACTORS, arms=ARMS)
    assert base["estimate"] == pytest.approx(cell(same, "further", "base", "pretrained")["estimate"])
    alone = attribute(outcomes[outcomes["arm"].isin(["pretrained", "mid"])].assign(key="k"), factors=["mid"],
        arms={"": "pretrained", "mid": "mid"})  # fmt: skip
    assert set(alone["seeds"]) == {1}


def test_a_matched_contrast_needs_equal_flops(outcomes: pd.DataFrame) -> None:
    stages = made_up.stages()
    cheap = stages.assign(flops=stages["flops"].where(stages["stage"] != "continued", 1e12))
    with pytest.raises(ValueError, match=r"unequal compute.*0\.78 times"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, matched=MATCHED, stages=cheap)
    with pytest.raises(ValueError, match="names arm 'nobody'"):
        attribute(
            outcomes, factors=FACTORS, arms=ARMS, matched={"treated": "nobody", "placebo": "continued"}, stages=stages
        )
    with pytest.raises(ValueError, match="a treated and a placebo"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, matched={"treated": "mid+rl"})
    with pytest.raises(ValueError, match="its own placebo"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, matched={"treated": "rl", "placebo": "rl"})
    assert "matched" not in set(attribute(outcomes, factors=FACTORS, arms=ARMS, matched={}, stages=cheap)["kind"])


def test_clip_is_checked(outcomes: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="clip"):
        attribute(outcomes, factors=FACTORS, arms=ARMS, clip=0.5)
