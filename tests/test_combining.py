"""Stages that make one checkpoint of several, and probes: against sums by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from analysis import SCHEMAS, check
from testbed import runtime
from testbed.config import Parallel
from testbed.execute import execute
from testbed.nodes import Node
from testbed.store import Store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Store]:
    graph, store = tiny.graph(), Store(tmp_path_factory.mktemp("store"))
    tiny.run_all(graph, store)
    return graph, store


def weights(store: Store, node: Node) -> torch.Tensor:
    return runtime.flat(runtime.load_model(tiny.get(store, node).path)[0])


def test_a_combination_is_the_weighted_sum(made: tuple[Any, Store]) -> None:
    graph, store = made
    parts = {"mid": 0.5, "rl@2": 0.25, "both": 0.25}
    expected = sum(factor * weights(store, tiny.node(graph, name)).numpy() for name, factor in parts.items())
    found = weights(store, tiny.node(graph, "mean")).numpy()
    assert np.array_equal(found, expected.astype(np.float32).astype(np.float64))
    manifest = tiny.get(store, tiny.node(graph, "mean")).manifest
    assert set(manifest["inputs"]) == {"of/mid", "of/rl@2", "of/both"}
    # What was read of the corpora before is not read again by what comes after.
    read = [tiny.get(store, tiny.node(graph, name)).summary["positions"] for name in parts]
    found = manifest["summary"]["positions"]
    assert set(found) == {stream for one in read for stream in one} and len(found) == 3
    for stream, place in found.items():
        assert place == max((one[stream] for one in read if stream in one), key=lambda place: list(place.values()))


def test_a_delta_can_be_added(made: tuple[Any, Store], tmp_path: Path) -> None:
    """base + (tuned - start), and what a part is called does not matter."""
    _, store = made
    of = {"anneal": 1.0, "rl": 1.0, "pretrain@4": -1.0}
    changed = tiny.graph(
        stages=tiny.SPEC["stages"] | {"sum": {"kind": "combine", "of": of}},
        arms={"pretrained": "anneal", "sum": "sum"}, parents={"sum": "pretrained"}, probes={},
    )  # fmt: skip
    added = execute(tiny.node(changed, "sum"), store)
    values = {name: weights(store, tiny.node(changed, name)) for name in of}
    expected = sum(factor * values[name].numpy() for name, factor in of.items())
    found = runtime.flat(runtime.load_model(added.path)[0]).numpy()
    assert np.abs(found - expected).max() < 1e-7
    reordered = {name: of[name] for name in reversed(of)}
    again = tiny.graph(
        stages=tiny.SPEC["stages"] | {"other": {"kind": "combine", "of": reordered}},
        arms={"x": "other"}, parents={}, probes={},
    )  # fmt: skip
    assert tiny.node(again, "other").key == tiny.node(changed, "sum").key


def test_averaging_is_what_its_formula_says(made: tuple[Any, Store]) -> None:
    """Two rounds by hand: every objective trained alone from the average, with its own optimizer, by the same stage's
    code; weights <- weights + sum of factor x change."""
    graph, store = made
    node = tiny.node(graph, "both")
    config = node.config
    assert isinstance(config, Parallel)
    from testbed.combining import put
    from testbed.rl import Policy
    from testbed.training import NextToken

    paths = {role: store.path("checkpoints" if "@" in key else "corpora", key) for role, key in node.parents.items()}
    tune = NextToken(node.objectives["tune"], {"parent": paths["parent"], "corpus": paths["objective/tune"]}, total=4)
    rl = Policy(node.objectives["rl"], {"parent": paths["parent"]})
    theta = [p.detach().double() for p in runtime.load_model(paths["parent"])[0].parameters()]
    for first in (0, 2):
        new = [t.clone() for t in theta]
        for learner in (tune, rl):
            put([t.float() for t in theta], learner.raw)
            for step in (first, first + 1):
                learner.step(step)
            for total, before, after in zip(new, theta, learner.raw.parameters(), strict=True):
                total += 0.5 * (after.detach().double() - before)
        theta = [t.float().double() for t in new]
        if first == 0:
            half = torch.cat([t.flatten() for t in theta])
    assert torch.allclose(weights(store, tiny.node(graph, "both@2")), half, atol=1e-7)
    assert torch.allclose(weights(store, node), torch.cat([t.flatten() for t in theta]), atol=1e-7)


def test_objectives_differ_from_one_trained_alone(made: tuple[Any, Store]) -> None:
    """Guards the test above: the average is neither objective, nor its start."""
    graph, store = made
    both = weights(store, tiny.node(graph, "both"))
    for other in ("tune", "rl", "pretrain@4"):
        assert (both - weights(store, tiny.node(graph, other))).abs().max().item() > 1e-4
    assert tiny.get(store, tiny.node(graph, "both")).summary["weight_change"] > 0


def test_names_and_order_of_objectives_do_not_matter(made: tuple[Any, Store], tmp_path: Path) -> None:
    graph, store = made
    stages = dict(tiny.SPEC["stages"])
    stages["policy"], stages["taught"] = stages.pop("rl") | {"keep": []}, stages.pop("tune")
    stages["both"] = stages["both"] | {"objectives": {"policy": 0.5, "taught": 0.5}}
    del stages["mean"]
    other = tiny.graph(stages=stages, arms={"both": "both"}, parents={}, probes={})
    node = tiny.node(other, "both")
    assert node.key == tiny.node(graph, "both").key
    again = Store(tmp_path)
    again.prepare()
    for key in node.parents.values():
        folder = "checkpoints" if "@" in key else "corpora"
        again.path(folder, key).parent.mkdir(parents=True, exist_ok=True)
        again.path(folder, key).symlink_to(store.path(folder, key))
    execute(node, again)
    ours, theirs = (tiny.contents(tiny.get(*place)) for place in ((again, node), (store, tiny.node(graph, "both"))))
    # The names of inputs are those of the spec that made it; nothing reads them.
    for contents in (ours, theirs):
        contents["manifest.json"]["inputs"] = sorted(contents["manifest.json"]["inputs"].values())
    assert ours == theirs
    metrics = tiny.metrics(tiny.get(again, node).path)[0]
    assert {"sft/loss", "rl/reward", "tokens", "flops"} <= set(metrics) and not any(
        "taught" in name for name in metrics
    )


def test_equal_settings_with_other_factors_are_told_apart() -> None:
    """The order of two objectives of equal settings is that of their factors, not that of the spec."""
    stages = tiny.SPEC["stages"] | {"tune2": tiny.SPEC["stages"]["tune"]}
    graphs = [
        tiny.graph(
            stages=stages | {"both": {"kind": "parallel", "objectives": of, "steps": 2, "every": 1}},
            arms={"both": "both"}, parents={}, probes={},
        )
        for of in ({"tune": 0.2, "tune2": 0.8}, {"tune2": 0.2, "tune": 0.8}, {"tune2": 0.8, "tune": 0.2})
    ]  # fmt: skip
    assert len({tiny.node(graph, "both").key for graph in graphs}) == 1


def test_a_factor_changes_the_key(made: tuple[Any, Store]) -> None:
    graph, _ = made
    keys = {tiny.node(graph, "both").key}
    for change in ({"objectives": {"tune": 0.4, "rl": 0.6}}, {"every": 4, "keep": []}, {"steps": 8}):
        mean = {"kind": "combine", "of": {"mid": 1}}
        stages = tiny.SPEC["stages"] | {"both": tiny.SPEC["stages"]["both"] | change, "mean": mean}
        keys.add(tiny.node(tiny.graph(stages=stages, probes={}), "both").key)
    assert len(keys) == 4


def test_other_shapes_are_not_combined(made: tuple[Any, Store], tmp_path: Path) -> None:
    graph, store = made
    node = tiny.node(graph, "mean")
    model, tokenizer = runtime.load_model(tiny.get(store, tiny.node(graph, "mid")).path)
    wider = dataclasses.replace(model.config, hidden=96)
    other = type(model)(wider, len(tokenizer))
    import shutil

    moved = Store(tmp_path / "moved")
    shutil.copytree(store.root, moved.root, symlinks=True)
    path = moved.path("stages", tiny.node(graph, "mid").key)
    runtime.save_model(path, other, tokenizer)
    from testbed.combining import run_combine
    from testbed.nodes import shelf_of_input
    from testbed.tracking import Tracker

    inputs = {role: moved.path(shelf_of_input(role, key), key) for role, key in node.parents.items()}
    (tmp_path / "out").mkdir()
    with Tracker(tmp_path / "out") as tracker, pytest.raises(ValueError, match="one model shape"):
        run_combine(node, inputs, tmp_path / "out", tracker)


# Probes -------------------------------------------------------------------------------------------------------------


def probe(graph: Any, store: Store, name: str, of: str) -> pd.DataFrame:
    path = tiny.get(store, graph.nodes[graph.probes[name, of, 0]]).path
    return pd.read_parquet(path / "probe.parquet")


def test_changes_of_weights_by_hand(made: tuple[Any, Store]) -> None:
    graph, store = made
    table = probe(graph, store, "moved", "rl").set_index("tensor")
    before, _ = runtime.load_model(tiny.get(store, tiny.node(graph, "pretrain@4")).path)
    after, _ = runtime.load_model(tiny.get(store, tiny.node(graph, "rl")).path)
    assert list(table.index) == [name for name, _ in before.named_parameters()]
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        old, new = one.detach().numpy().astype(np.float64), other.detach().numpy().astype(np.float64)
        assert table.loc[name, "change"] == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
        assert table.loc[name, "moved"] == (new != old).mean()
        assert table.loc[name, "norm_after"] == pytest.approx(np.linalg.norm(new))


def test_roles_are_probed_at_checkpoints(made: tuple[Any, Store]) -> None:
    graph, store = made
    early, late = (probe(graph, store, "roles", f"pretrain@{step}") for step in (1, 4))
    assert set(early["operations"]) == {1, 2} and set(early["measure"]) == {"roles"}
    assert list(early["tokens"]) == list(late["tokens"]), "the same problems"
    assert (early["loss"] != late["loss"]).any()


def test_tables_hold_checkpoints_probes_and_ledger(made: tuple[Any, Store]) -> None:
    from testbed.tables import load

    graph, store = made
    tables = load(graph.spec, store)
    stages = tables.stages.set_index("stage")
    assert stages.loc["pretrain@4", "kind"] == "pretrain" and stages.loc["mean", "parent"] == "mid + rl@2 + both"
    assert stages.loc["mid", "parent"] == "pretrain@4"
    for name in ("stages", "ledger", "probes", "outcomes"):
        check(getattr(tables, name), SCHEMAS[name])
    ledger = tables.ledger
    assert (
        ledger[(ledger["activity"] != "scoring") & (ledger["kind"] == "rl")]
        .groupby("stage")["flops_useful"]
        .sum()["rl"]
        == stages.loc["rl", "flops"]
    )
    assert {"roles", "moved"} == set(tables.probes["probe"])
    assert set(tables.probes.loc[tables.probes["probe"] == "moved", "against"]) == {"pretrain@4"}


def test_an_arm_costs_all_that_led_to_it_and_each_step_once(made: tuple[Any, Store]) -> None:
    from analysis.compute import by_arm, total
    from testbed.tables import load

    graph, store = made
    tables = load(graph.spec, store)
    flops = tables.stages.set_index("stage")["flops"]
    costs = by_arm(tables.stages, graph.spec.arms).set_index("arm")["flops"]
    assert costs["early"] == flops["pretrain@4"]
    assert costs["pretrained"] == flops["pretrain"] + flops["anneal"]
    # Of two checkpoints of one stage the furthest went through the other.
    assert costs["mean"] == flops["pretrain@4"] + flops["mid"] + flops["rl@2"] + flops["both"]
    once = ("pretrain", "anneal", "mid", "tune", "rl", "both", "mean", "continued")
    assert total(tables.stages)["flops"] == pytest.approx(sum(flops[name] for name in once))
