"""Schemas, summaries of outcomes, competence and compute."""

from __future__ import annotations

import json
from io import StringIO

import numpy as np
import pandas as pd
import pytest
import tables as made_up

from analysis import (
    SCHEMAS,
    Interval,
    TableError,
    by_band,
    by_operations,
    check,
    classify,
    competence_map,
    compute,
    flat,
    pass_at_k,
    results,
)
from analysis.competence import summarise
from analysis.tables import arms, bands, check_outcomes, default_k, matrix, metric_values


@pytest.fixture(scope="module")
def outcomes() -> pd.DataFrame:
    return made_up.outcomes(seed_sd=0.2, problems=24)


def test_made_up_tables_fit_their_schemas(outcomes: pd.DataFrame) -> None:
    check_outcomes(outcomes)
    for name, table in (("stages", made_up.stages()), ("curves", made_up.curves()), ("roles", made_up.roles())):
        check(table, SCHEMAS[name])
        back = pd.read_json(StringIO(table.to_json(orient="records")), orient="records")
        check(back, SCHEMAS[name])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.drop(columns="c_strict"), "lacks the columns c_strict"),
        (lambda t: t.assign(seed="one"), "'seed'.*should be int, but holds 'one'"),
        (lambda t: t.assign(n=t["n"] + 0.5), "'n'.*should be int"),
        (lambda t: t.assign(arm=3), "'arm'.*should be str"),
        (lambda t: t.assign(process_mean=np.inf), "'process_mean'.*should be float"),
        (lambda t: t.assign(temperature=np.nan), "'temperature'.*are missing"),
        (lambda t: t.assign(structures_shared=1), "'structures_shared'.*should be bool"),
        (lambda t: t.assign(status_ok="few"), "'status_ok'.*should be int"),
        (lambda t: pd.concat([t, t.iloc[[5]]]), "more than one row"),
        (lambda t: t.iloc[:0], "empty"),
        (lambda t: t.assign(n=np.where(t["problem"] == 3, 32, t["n"])), "mix numbers of samples.*16, 32"),
        (lambda t: t.assign(temperature=np.where(t["seed"] == 1, 0.6, 1.0)), "mix temperatures"),
        (lambda t: t.assign(band=np.where(t["arm"] == "mid", "other", t["band"])), "more than one band"),
        (lambda t: t.drop(index=7), "seed 0 has outcomes for 167 of the 168 problems"),
        (lambda t: t[(t["arm"] != "mid") | (t["seed"] != 2)], "arm 'mid' has seeds"),
        # As many problems, but others.
        (
            lambda t: t.assign(problem=np.where(t["arm"] == "mid", t["problem"] + 1, t["problem"])),
            "of the 175 problems",
        ),
    ],
)
def test_damage_is_named(outcomes: pd.DataFrame, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TableError, match=message):
        check_outcomes(damage(outcomes))


def test_order_of_rows_and_columns_is_no_matter(outcomes: pd.DataFrame) -> None:
    shuffled = outcomes.sample(frac=1, random_state=0)[list(reversed(outcomes.columns))]
    for arm in arms(outcomes):
        pd.testing.assert_frame_equal(matrix(shuffled, arm=arm), matrix(outcomes, arm=arm))
    assert bands(shuffled) == made_up.BANDS
    assert list(bands(shuffled)) == list(made_up.BANDS)


def test_results_agree_with_a_loop(outcomes: pd.DataFrame) -> None:
    found = results(outcomes, (1, 2, 4))
    assert len(found) == 6 * 4 * 7
    assert list(found["arm"].unique()) == list(made_up.RATES)
    row = found[(found["arm"] == "mid") & (found["seed"] == 2) & (found["operations"] == 6)].iloc[0]
    cell = outcomes[(outcomes["arm"] == "mid") & (outcomes["seed"] == 2) & (outcomes["operations"] == 6)]
    assert (row["band"], row["problems"], row["samples"]) == ("further", 24, 16)
    assert row["strict_pass_at_1"] == pytest.approx(cell["c_strict"].sum() / (24 * 16))
    assert row["answer_pass_at_1"] == pytest.approx(cell["c_answer"].sum() / (24 * 16))
    assert set(row["strict_pass_at_k"]) == {1, 2, 4}
    assert row["strict_pass_at_k"][4] == pytest.approx(np.mean([pass_at_k(16, int(c), 4) for c in cell["c_strict"]]))
    assert row["answer_pass_at_k"][2] == pytest.approx(np.mean([pass_at_k(16, int(c), 2) for c in cell["c_answer"]]))
    assert row["process_mean"] == pytest.approx(cell["process_mean"].mean())
    assert row["truncated"] == pytest.approx(cell["truncated"].sum() / (24 * 16))
    assert found.groupby("operations")["structures_shared"].all().tolist() == [True, True] + [False] * 5


def test_results_are_plain_json_and_flat_columns(outcomes: pd.DataFrame) -> None:
    found = results(outcomes)
    assert json.loads(json.dumps(found.to_dict("records")))[0]["strict_pass_at_k"].keys() == {"1", "2", "4", "8"}
    wide = flat(found)
    assert {"strict_pass_at_8", "answer_pass_at_4"} <= set(wide) and "strict_pass_at_k" not in wide
    assert wide["strict_pass_at_8"].tolist() == [row[8] for row in found["strict_pass_at_k"]]


def test_k_beyond_the_samples_is_refused(outcomes: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="must not exceed n"):
        results(outcomes, (1, 17))
    assert default_k(outcomes) == (1, 2, 4, 8)


def test_metrics(outcomes: pd.DataFrame) -> None:
    assert metric_values(outcomes, metric="process", k=1).tolist() == outcomes["process_mean"].tolist()
    with pytest.raises(ValueError, match="no pass@2"):
        metric_values(outcomes, metric="process", k=2)
    with pytest.raises(ValueError, match="unknown metric"):
        metric_values(outcomes, metric="luck", k=1)  # type: ignore[arg-type]
    with pytest.raises(TableError, match="no outcomes of arm 'mdi'"):
        matrix(outcomes, arm="mdi")
    with pytest.raises(TableError, match="in band 'near'"):
        matrix(outcomes, arm="mid", band="near")


def test_by_band_and_by_operations(outcomes: pd.DataFrame) -> None:
    band = by_band(outcomes, "strict", 4)
    assert len(band) == 6 * 4 and band["operations"].iloc[:2].tolist() == ["1-4", "5"]
    means = results(outcomes, (4,)).assign(value=lambda t: t["strict_pass_at_k"].map(lambda v: v[4]))
    row = band[(band["arm"] == "rl") & (band["band"] == "in range")].iloc[0]
    assert row["estimate"] == pytest.approx(means[(means["arm"] == "rl") & (means["operations"] < 5)]["value"].mean())
    assert (row["problems"], row["seeds"], row["structures_shared"]) == (96, 4, True)
    single = by_operations(outcomes, "strict", 4)
    assert len(single) == 6 * 7
    edge = single[(single["arm"] == "rl") & (single["operations"] == 5)].iloc[0]
    same = band[(band["arm"] == "rl") & (band["band"] == "edge")].iloc[0]
    assert (edge["low"], edge["high"], edge["structures_shared"]) == (same["low"], same["high"], False)
    assert by_band(outcomes, population=True)["method"].str.startswith("two-way").any()
    once = by_band(outcomes.assign(key=outcomes["arm"]), "strict", 4)
    assert (once["seeds"] == 1).all()
    assert once["estimate"].to_numpy() == pytest.approx(band["estimate"].to_numpy())


# --- competence


def interval(low: float, high: float) -> Interval:
    return Interval(estimate=(low + high) / 2, low=low, high=high, level=0.95, method="", seeds=3, problems=9)


@pytest.mark.parametrize(
    ("pass_1", "pass_k", "expected"),
    [
        ((0.9, 0.99), (0.99, 1.0), "solved"),
        ((0.89, 0.99), (0.99, 1.0), "undecided"),
        ((0.3, 0.89), (0.2, 0.9), "edge"),
        ((0.3, 0.9), (0.5, 0.95), "undecided"),
        ((0.0, 0.1), (0.19, 0.5), "undecided"),
        ((0.0, 0.01), (0.0, 0.05), "beyond"),
        ((0.0, 0.01), (0.0, 0.051), "undecided"),
    ],
)
def test_classify(pass_1: tuple[float, float], pass_k: tuple[float, float], expected: str) -> None:
    assert classify(interval(*pass_1), interval(*pass_k)) == expected


def test_competence_map() -> None:
    rates = {"base": {1: 1.0, 2: 0.99, 3: 0.9, 5: 0.4, 8: 0.0}, "better": {1: 1.0, 2: 0.99, 3: 0.99, 5: 0.97, 8: 0.5}}
    table = competence_map(made_up.outcomes(rates, problems=80, problem_sd=0.2), k=8)
    found = table.pivot(index="arm", columns="operations", values="competence")
    assert found.loc["base"].tolist() == ["solved", "solved", "undecided", "edge", "beyond"]
    assert found.loc["better"].tolist() == ["solved", "solved", "solved", "solved", "edge"]
    # 72 problems without one right sample leave room for more than 0.05.
    few = competence_map(made_up.outcomes({"base": {8: 0.0}}, problems=72), k=8)
    assert few["competence"].tolist() == ["undecided"]
    ends = summarise(table).set_index("arm")
    assert ends.loc["base", "solved_to"] == 2 and ends.loc["better", "solved_to"] == 5
    assert ends.loc["base", "edge"] == (5,) and ends.loc["base", "beyond"] == (8,)
    gap = table[table["arm"] == "better"].assign(competence=["solved", "edge", "solved", "solved", "edge"])
    assert summarise(gap)["solved_to"].tolist() == [1]
    assert summarise(gap.assign(competence="edge"))["solved_to"].tolist() == [0]


# --- compute


def test_compute_counts_shared_stages_in_each_arm_and_once_in_the_total() -> None:
    stages = made_up.stages((0, 1))
    rows = compute.by_arm(stages, made_up.STAGE_OF).set_index("arm")
    assert rows.loc["mid+rl", "stages"] == ("pretrain", "mid", "mid_rl")
    assert rows.loc["mid+rl", "flops"] == 9e12
    assert rows.loc["mid+rl", "tokens"] == 3_920_000
    assert rows.loc["rl", "samples"] == 10_240 and rows.loc["mid", "samples"] == 0
    whole = compute.total(stages)
    assert whole["flops"] == 2 * 16e12
    # Two seeds that share one pretraining share its key.
    shared = stages.assign(key=stages["key"].where(stages["stage"] != "pretrain", "pretrain-shared"))
    assert compute.total(shared)["flops"] == 2 * 16e12 - 6e12


def test_lineage_and_parents() -> None:
    stages = made_up.stages((0,))
    assert compute.lineage(stages, "mid_rl") == ("pretrain", "mid", "mid_rl")
    assert compute.parent_arms(stages, made_up.STAGE_OF) == made_up.PARENTS
    with pytest.raises(TableError, match="no stage 'middle'"):
        compute.lineage(stages, "middle")
    circle = stages.assign(parent=stages["parent"].where(stages["stage"] != "pretrain", "mid"))
    with pytest.raises(TableError, match="its own ancestor"):
        compute.lineage(circle, "mid")


def test_checkpoints_and_sums_have_their_costs_once() -> None:
    """By the key: a stage goes through its checkpoints, under whatever name they stand in the table."""
    stages = made_up.stages((0,))
    base = stages[stages["stage"] == "mid"]
    early = base.assign(stage="mid@5", key=base["key"] + "@5", flops=2e11)
    alias = base.assign(stage="twin@7", key=base["key"] + "@7", flops=4e11)
    mean = base.assign(stage="mean", key="mean-0", kind="combine", parent="mid@5 + rl_edge", flops=0.0)
    table = pd.concat([stages, early, alias, mean], ignore_index=True)
    assert compute.total(table)["flops"] == compute.total(stages)["flops"]
    assert compute.lineage(table, "mean") == ("pretrain", "mid@5", "rl_edge", "mean")
    costs = compute.by_arm(table, {"mean": "mean", "early": "mid@5", "whole": "mid"}).set_index("arm")["flops"]
    assert costs.to_dict() == {"mean": 6e12 + 2e11 + 2e12, "early": 6e12 + 2e11, "whole": 7e12}
    # What is made of several continues none of them.
    arms = made_up.STAGE_OF | {"mean": "mean"}
    assert compute.parent_arms(table, arms) == made_up.PARENTS


def test_an_arm_is_one_stage(outcomes: pd.DataFrame) -> None:
    assert compute.arm_stages(outcomes) == made_up.STAGE_OF
    with pytest.raises(TableError, match="several stages"):
        compute.arm_stages(outcomes.assign(stage=np.where(outcomes["seed"] == 1, "other", outcomes["stage"])))
