"""A stage that is stopped or killed and taken up again gives the bits of one that was not.

Kills by another process, at any time, are in test_kills.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from testbed import runtime, saves, stopping, trainer, training
from testbed.execute import Conduct, execute
from testbed.nodes import Node, shelf
from testbed.saves import OtherClassError, Saves
from testbed.stopping import Stopped
from testbed.store import Store
from testbed.tracking import METRICS, Tracker

GRAPH = tiny.graph()
EVERY_STEP = Conduct(save_every=0.0)
STAGES = ["pretrain", "anneal", "mid", "tune", "rl", "both", "continued"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything, made without a break."""
    store = Store(tmp_path_factory.mktemp("whole"))
    tiny.run_all(GRAPH, store)
    return store


def with_inputs(node: Node, whole: Store, root: Path) -> Store:
    """A store that holds the inputs of a node and nothing else."""
    store = Store(root, announce=said.append)
    said.clear()
    store.prepare()
    for key in node.parents.values():
        other = GRAPH.nodes[key]
        target = store.path(shelf(other.kind), key)
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(whole.path(shelf(other.kind), key))
    return store


said: list[str] = []


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`stop_after(n)`: the run is asked to stop in its n-th step from here on; 0 never."""
    left = [0]

    def asked() -> bool:
        return left[0] == 1

    real = trainer.phases.enter

    def enter(name: str) -> None:
        real(name)
        if name == "step" and left[0] > 1:
            left[0] -= 1

    def stop_after(steps: int) -> None:
        left[0] = steps + 1 if steps else 0

    monkeypatch.setattr(stopping, "asked", asked)
    monkeypatch.setattr(trainer.phases, "enter", enter)
    yield stop_after


@pytest.mark.parametrize("name", STAGES)
def test_stopped_after_every_step_and_taken_up(name: str, whole: Store, tmp_path: Path, stop_after: Any) -> None:
    node = tiny.node(GRAPH, name)
    store = with_inputs(node, whole, tmp_path)
    stops = 0
    while True:
        stop_after(1)
        try:
            execute(node, store)
            break
        except Stopped:
            stops += 1
            partial = store.keys(f"partial/stages-{node.key}")
            assert partial[-1] == f"{stops:09d}" and len(partial) <= saves.STATES
            assert not store.has("stages", node.key)
    made, unbroken = tiny.get(store, node), tiny.get(whole, node)
    assert stops == unbroken.summary["steps"] - 1 > 1
    assert tiny.contents(made) == tiny.contents(unbroken)
    # Steps that increase, each once: nothing is logged twice, nothing lost.
    steps = [line["step"] for line in tiny.metrics(made.path)]
    assert steps == sorted(set(steps)) and steps[-1] == unbroken.summary["steps"]
    assert store.keys(f"partial/stages-{node.key}") == [], "states are forgotten when the artifact is there"
    for step in node.keep:
        kept = GRAPH.nodes[f"{node.key}@{step}"]
        assert tiny.contents(tiny.get(store, kept)) == tiny.contents(tiny.get(whole, kept))


def test_bits_would_differ_if_anything_were_forgotten(whole: Store, tmp_path: Path, stop_after: Any) -> None:
    """Guards the test above: moments, counters and the place in the data all matter."""
    node, load = tiny.node(GRAPH, "anneal"), runtime.load_optimizers
    for lost in ("load_optimizers", "restore"):
        store = with_inputs(node, whole, tmp_path / lost)
        stop_after(2)
        with pytest.raises(Stopped):
            execute(node, store)
        stop_after(0)
        with pytest.MonkeyPatch.context() as patch:
            if lost == "restore":
                patch.setattr("testbed.training.NextToken.restore", lambda self, record: None)
            else:
                patch.setattr(runtime, lost, lambda path, o: None if "partial" in str(path) else load(path, o))
            execute(node, store)
        assert tiny.contents(tiny.get(store, node)) != tiny.contents(tiny.get(whole, node))


@pytest.mark.parametrize("name", ["pretrain@1", "pretrain@4", "rl@2", "both@2"])
def test_a_checkpoint_alone_is_what_its_stage_leaves_on_its_way(name: str, whole: Store, tmp_path: Path) -> None:
    node = tiny.node(GRAPH, name)
    store = with_inputs(node, whole, tmp_path)
    alone = execute(dataclasses.replace(node, after=None), store)
    assert tiny.contents(alone) == tiny.contents(tiny.get(whole, node))
    assert alone.manifest["step"] == node.step and not store.has("stages", node.stage_key)
    # The stage itself goes on from there, and ends where it ends without.
    before = [line["step"] for line in tiny.metrics(alone.path)]
    stage = tiny.node(GRAPH, name.partition("@")[0])
    taken: list[int] = []
    real = trainer.phases.enter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer.phases, "enter", lambda what: (taken.append(1) if what == "step" else None, real(what))[1]
        )
        made = execute(stage, store)
    assert len(taken) == made.summary["steps"] - node.step  # type: ignore[operator]
    assert tiny.contents(made) == tiny.contents(tiny.get(whole, stage))
    assert [line["step"] for line in tiny.metrics(made.path)][: len(before)] == before


def test_checkpoints_are_loaded_like_stages(whole: Store) -> None:
    node = tiny.node(GRAPH, "pretrain@2")
    model, _ = runtime.load_model(tiny.get(whole, node).path)
    last, _ = runtime.load_model(tiny.get(whole, tiny.node(GRAPH, "pretrain")).path)
    assert not torch.equal(runtime.flat(model), runtime.flat(last))
    summary = tiny.get(whole, node).summary
    assert summary["steps"] == 2 and summary["positions"][GRAPH.corpora["base"]]["rows"] == 8
    assert 0 < summary["flops"] < tiny.get(whole, tiny.node(GRAPH, "pretrain")).summary["flops"]


def test_a_damaged_state_is_passed_over(whole: Store, tmp_path: Path, stop_after: Any) -> None:
    """Of two states the older one serves, and the result is the same."""
    node = tiny.node(GRAPH, "anneal")
    store = with_inputs(node, whole, tmp_path)
    stop_after(3)
    with pytest.raises(Stopped):
        execute(node, store, conduct=EVERY_STEP)
    partial = f"partial/stages-{node.key}"
    assert store.keys(partial) == ["000000002", "000000003"]
    weights = store.path(partial, "000000003") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    stop_after(0)
    fresh = Store(tmp_path, announce=said.append)
    made = execute(node, fresh)
    assert any("is damaged" in text for text in said)
    assert tiny.contents(made) == tiny.contents(tiny.get(whole, node))


def test_a_state_that_is_not_finite_is_never_saved(
    whole: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the weights: the good states before stay, and nothing is published."""
    node = tiny.node(GRAPH, "anneal")
    store = with_inputs(node, whole, tmp_path)
    real = trainer.Learner.write
    calls = itertools.count()

    def write(self: trainer.Learner, out: Path) -> dict[str, Any]:
        if next(calls) == 2:
            with torch.no_grad():
                self.raw.norm.weight[0] = float("nan")
        return real(self, out)

    monkeypatch.setattr(trainer.Learner, "write", write)
    with pytest.raises(FloatingPointError, match=r"norm.weight holds values that are not finite"):
        execute(node, store, conduct=EVERY_STEP)
    assert store.keys(f"partial/stages-{node.key}") == ["000000001", "000000002"]
    assert not store.has("stages", node.key) and list((store.root / "tmp").iterdir()) == []


def test_a_nan_in_the_loss_stops_before_the_step(whole: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tiny.node(GRAPH, "anneal")
    store = with_inputs(node, whole, tmp_path)
    real, calls = training.weighted_loss, itertools.count()

    def planted(*arguments: Any) -> Any:
        loss, weight = real(*arguments)
        return (loss * float("nan") if next(calls) == 2 else loss), weight

    monkeypatch.setattr(training, "weighted_loss", planted)
    with pytest.raises(FloatingPointError, match="anneal, seed 0, step 3: the loss is nan; no step was taken"):
        execute(node, store, conduct=EVERY_STEP)
    # What was saved before is good: without the plant the run ends as it should.
    monkeypatch.setattr(training, "weighted_loss", real)
    assert tiny.contents(execute(node, store)) == tiny.contents(tiny.get(whole, node))


def test_another_numeric_class_is_refused_or_marked(whole: Store, tmp_path: Path, stop_after: Any) -> None:
    node = tiny.node(GRAPH, "anneal")
    store = with_inputs(node, whole, tmp_path)
    stop_after(2)
    with pytest.raises(Stopped):
        execute(node, store)
    stop_after(0)
    mine, threads = saves.numeric_class, torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "numeric_class", lambda summary: mine(summary) | {"threads": 77})
        with pytest.raises(OtherClassError, match=rf"threads {threads} there and 77 here.*--other-class") as error:
            execute(node, store)
        assert "\n" not in str(error.value)
        marked = execute(node, store, conduct=dataclasses.replace(EVERY_STEP, other_class=True))
    assert [one["threads"] for one in marked.manifest["crossed"]] == [threads]
    assert marked.manifest["numeric_class"]["threads"] == 77
    assert "crossed" not in tiny.get(whole, node).manifest


def test_a_checkpoint_of_another_class_is_passed_over(whole: Store, tmp_path: Path) -> None:
    """It was made for others; the stage is trained from its start instead."""
    node, stage = tiny.node(GRAPH, "pretrain@4"), tiny.node(GRAPH, "pretrain")
    store = with_inputs(node, whole, tmp_path)
    mine = saves.numeric_class
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "numeric_class", lambda summary: mine(summary) | {"threads": 77})
        execute(dataclasses.replace(node, after=None), store)
    made = execute(dataclasses.replace(stage, keep=()), store)
    assert "crossed" not in made.manifest
    assert tiny.contents(made) == tiny.contents(tiny.get(whole, stage))


def test_a_step_beyond_the_end_is_told_before_anything_is_trained(whole: Store, tmp_path: Path) -> None:
    stage = dataclasses.replace(tiny.node(GRAPH, "pretrain"), keep=(2, 100))
    store = with_inputs(stage, whole, tmp_path)
    with pytest.raises(trainer.NoSuchStepError, match=r"pretrain@100 is asked for, but `pretrain` ends after 9 steps"):
        execute(stage, store, conduct=EVERY_STEP)
    assert store.keys("checkpoints") == [] and store.keys(f"partial/stages-{stage.key}") == []


def test_a_checkpoint_beyond_the_end_is_told(whole: Store, tmp_path: Path) -> None:
    node = dataclasses.replace(tiny.node(GRAPH, "pretrain@4"), step=900, key=f"{tiny.node(GRAPH, 'pretrain').key}@900")
    with pytest.raises(ValueError, match=r"ends after \d+ steps, so it has no checkpoint there"):
        execute(node, with_inputs(node, whole, tmp_path))


def test_a_checkpoint_in_the_decay_is_not_taken_for_a_stable_one(whole: Store, tmp_path: Path) -> None:
    stages = {**tiny.SPEC["stages"], "mid": tiny.SPEC["stages"]["mid"] | {"parent": "anneal@2"}}
    graph = tiny.graph(stages=stages, probes={}, arms={"mid": "mid"}, parents={})
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="stated as stable, but the learning rate of `anneal@2` was annealing"):
        tiny.run_all(graph, store)
    assert store.has("checkpoints", graph.stages["anneal@2", 0]) and not store.has("stages", graph.stages["mid", 0])


def test_time_and_rates_do_not_count_what_another_run_did(whole: Store, tmp_path: Path, stop_after: Any) -> None:
    """Nor is a time left ever negative after a run is taken up."""
    node = tiny.node(GRAPH, "rl")
    store = with_inputs(node, whole, tmp_path)
    stop_after(2)
    with pytest.raises(Stopped):
        execute(node, store)
    stop_after(0)
    seen: list[Any] = []
    made = execute(node, store, report=seen.append)
    assert [progress.step for progress in seen] == [3, 4]
    assert all(progress.left is None or progress.left >= 0 for progress in seen)
    times = [json.loads(line)["time"] for line in (made.path / METRICS).read_text().splitlines()]
    assert times == sorted(times) and made.manifest["wall_s"] >= times[-1]


def test_states_are_saved_when_due(whole: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third look at a clock that goes a second a look; a step looks once, a save once more."""
    node = tiny.node(GRAPH, "continued")
    store = with_inputs(node, whole, tmp_path)
    now, saved = itertools.count(), []
    real = Saves.save
    monkeypatch.setattr(Saves, "save", lambda self, step, *rest: (saved.append(step), real(self, step, *rest))[1])
    inputs = {role: whole.path(shelf(GRAPH.nodes[key].kind), key) for role, key in node.parents.items()}
    (tmp_path / "out").mkdir()
    with store.lease("stages", node.key) as lease, Tracker(tmp_path / "out") as tracker:
        often = Saves(store, node, lease, every=3.0, clock=lambda: float(next(now)))
        training.run(node, inputs, tmp_path / "out", tracker, often)
    assert saved == [3, 6, 9, 12]
