"""Tables read back from the store: names of this spec, nothing missing, and a clear word where something is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import fake_runners
import pandas as pd
import pytest

import analysis
from analysis import judge
from sweeps.local import run_graph
from testbed import notebook, show
from testbed.errors import StoreError
from testbed.graph import build
from testbed.provenance import environment_summary, keep_tables, mixed_conditions, spec_summary
from testbed.schema import Spec
from testbed.spec import load, parse
from testbed.store import Store
from testbed.tables import Tables
from testbed.tables import load as load_tables


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("store"), announce=lambda text: None)
    assert run_graph(build(load("smoke")), store, workers=1, runners=fake_runners.RUNNERS).ok
    return store


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load("smoke")


@pytest.fixture(scope="module")
def tables(spec: Spec, store: Store) -> Tables:
    return load_tables(spec, store)


def test_tables_have_their_schemas(tables: Tables) -> None:
    analysis.check_outcomes(tables.outcomes)
    analysis.check(tables.stages, analysis.SCHEMAS["stages"])
    analysis.check(tables.curves, analysis.SCHEMAS["curves"])


def test_rows_are_complete_and_named_as_the_spec_names_them(spec: Spec, tables: Tables) -> None:
    assert len(tables.outcomes) == 5 * 2 * 3 * 4  # arms, seeds, operations, problems
    assert list(tables.outcomes["arm"].unique()) == list(spec.arms)
    pairs = tables.outcomes[["operations", "band"]].drop_duplicates()
    assert dict(pairs.itertuples(index=False)) == {1: "in_range", 2: "edge", 3: "further"}
    stages = tables.stages.set_index(["stage", "seed"])
    assert len(stages) == 12 and stages.loc[("mid_rl", 1), "groups_with_signal"] == 2
    assert pd.isna(stages.loc[("pretrain", 0), "parent"]) and stages.loc[("mid", 0), "parent"] == "pretrain"
    curve = tables.curves[(tables.curves["stage"] == "mid") & (tables.curves["seed"] == 1)]
    assert curve["step"].tolist() == [1, 2] and curve["tokens"].tolist() == [50, 100] and "total" not in curve
    key = build(spec).stages["mid", 1]
    assert set(curve["key"]) == set(tables.outcomes.query("arm == 'mid' and seed == 1")["key"]) == {key}


def test_another_spec_reads_the_same_artifacts_under_its_own_names(store: Store) -> None:
    other = load(
        "smoke",
        [
            "bands={low: [2, 1], high: [3]}",
            "stages.rl.band=high",
            "stages.mid_rl.band=high",
            "arms={start: anneal}",
            "attribution=null",
            "claims=[]",
        ],
    )
    tables = load_tables(other, store)
    assert set(tables.outcomes["band"]) == {"low", "high"} and set(tables.outcomes["arm"]) == {"start"}


def test_what_was_not_run_is_named(spec: Spec, store: Store, tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"22 of 22 stages and evaluations of `smoke` .* such as pretrain, seed 0. Run"
    ):
        load_tables(spec, Store(tmp_path))
    # Two stages and their evaluations, in two repetitions.
    changed = load("smoke", ["stages.continued.schedule.final=0.5", "stages.rl.reward=random"])
    with pytest.raises(StoreError, match="8 of 22"):
        load_tables(changed, store)


def test_the_end_of_a_run_tells_everything(tables: Tables) -> None:
    out = show.console()
    with out.capture() as captured:
        out.print(*show.experiment(tables, show.judged(tables), show.attribution(tables)[0]))
    text = captured.get()
    for words in (
        "Strict pass@1",
        "Strict pass@2",
        "Claims",
        "rl gains at the edge",
        "Attribution",
        "shapley",
        "FLOPs",
    ):
        assert words in text
    assert "1 operation " in text and "1 operations" not in text


def test_records_are_strict_json() -> None:
    frame = pd.DataFrame({"a": [1.5, float("nan")], "b": [{1: 0.5}, {2: float("nan")}], "c": [True, False]})
    assert json.loads(show.records(frame)) == [
        {"a": 1.5, "b": {"1": 0.5}, "c": True}, {"a": None, "b": {"2": None}, "c": False},
    ]  # fmt: skip


def test_provenance(tables: Tables, store: Store, spec: Spec) -> None:
    assert environment_summary(tables, store)["store"] == str(store.root)
    assert "python" in environment_summary(tables, store)
    assert mixed_conditions(tables) == ""
    one = tables.environment[0]
    mixed = dataclasses.replace(tables, environment=[{**one, "threads": 1}, {**one, "threads": 2}])
    assert "(threads 1 and 2)" in mixed_conditions(mixed)
    mixed = dataclasses.replace(tables, environment=[{**one, "devices": 1}, {**one, "devices": 2}])
    assert "(devices 1 and 2)" in mixed_conditions(mixed)
    summary = spec_summary(spec)
    assert summary["stage rl"]["kind"] == "rl" and summary["stage rl"]["steps"] == 1 and summary["model"]["width"] == 64


def test_a_kept_study_says_the_same_as_its_store(tables: Tables, spec: Spec, tmp_path: Path) -> None:
    claims = show.judged(tables)
    keep_tables(tmp_path / "kept", tables, claims)
    assert parse(json.loads((tmp_path / "kept" / "spec.json").read_text())) == spec
    outcomes = pd.read_parquet(tmp_path / "kept" / "outcomes.parquet")
    pd.testing.assert_frame_equal(outcomes, tables.outcomes)
    again = judge(spec.claims[0], outcomes, pd.read_csv(tmp_path / "kept" / "stages.csv"), spec.parent_arms())
    kept = pd.read_csv(tmp_path / "kept" / "claims.csv").iloc[0]
    assert (kept["verdict"], kept["estimate"]) == (again.verdict, pytest.approx(again.estimate))
    results = pd.read_csv(tmp_path / "kept" / "results.csv")
    assert len(results) == len(spec.arms) * len(spec.seeds) * 3


def test_notebook_results_and_stage_names(store: Store, spec: Spec) -> None:
    assert notebook.results("smoke", store=store.root).outcomes.equals(
        notebook.results(spec, store=store.root).outcomes
    )
    for name, words in [
        ("smoke/midd", "did you mean `mid`"),
        ("smoke/mid/7", "no repetition 7"),
        ("0123456789", "no stage 0123456789"),
    ]:
        with pytest.raises(StoreError, match=words):
            notebook.load(name, store=store.root)
