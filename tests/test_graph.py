"""Keys: whatever can change a result changes its key, nothing else does, and keys stay what they were."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args, get_type_hints

import pytest

from models.config import ModelConfig
from synthetic_tasks.corpus import Component
from testbed import graph as graphs
from testbed.config import RL, Evaluation, Optimizer, Schedule, Train
from testbed.graph import NON_SEMANTIC, build, canonical, digest, work
from testbed.nodes import Corpus, Seeds
from testbed.spec import load

EXAMPLES: dict[type, Any] = {
    Train: Train(kind="midtrain", parent="a", data="d", tokens=1000),
    RL: RL(parent="a", band="b", steps=3),
    Evaluation: Evaluation(),
    Optimizer: Optimizer(),
    Schedule: Schedule(),
    ModelConfig: ModelConfig(),
    Seeds: Seeds(),
    Corpus: Corpus(documents=9, components=(Component(name="own", operations={1: 1.0}),)),
    Component: Component(name="own", operations={1: 1.0}),
}
# Other values where adding a bit would not do.
OTHER: dict[tuple[type, str], Any] = {
    (Train, "parent"): "other",
    (Train, "optimizer"): Optimizer(beta2=0.5),
    (Train, "schedule"): Schedule(final=0.5),
    (RL, "optimizer"): Optimizer(lr=3e-4, beta2=0.5),
    (RL, "schedule"): Schedule(shape="constant", decay=0.0, final=0.5),
    (Evaluation, "k"): (1, 2),
    (Corpus, "components"): (Component(name="own", operations={2: 1.0}),),
    (Component, "operations"): {1: 2.0},
    (ModelConfig, "heads"): 8,
    (ModelConfig, "kv_heads"): 2,
    (ModelConfig, "rope_share"): 0.5,
    (ModelConfig, "width"): 128,
}


def other(kind: type, name: str) -> Any:
    """A value of the field that is allowed and differs from the example's."""
    if (kind, name) in OTHER:
        return OTHER[kind, name]
    value, hint = getattr(EXAMPLES[kind], name), get_type_hints(kind)[name]
    if choices := [choice for choice in get_args(hint) if isinstance(choice, str) and choice != value]:
        return choices[0]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value / 2 + 0.05 if isinstance(value, float) else f"{value}x"


def fields() -> list[tuple[type, str]]:
    return [(kind, f.name) for kind in EXAMPLES for f in dataclasses.fields(kind)]


@pytest.mark.parametrize(("kind", "name"), fields(), ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_every_field_changes_the_key_or_is_listed(kind: type, name: str) -> None:
    if (kind, name) == (Train, "match"):
        assert (kind, name) in NON_SEMANTIC
        return
    if (kind, name) == (RL, "kind"):
        return  # one value
    before = EXAMPLES[kind]
    value = other(kind, name)
    assert value != getattr(before, name)
    after = dataclasses.replace(before, **{name: value})
    same = digest({"x": canonical(before)}) == digest({"x": canonical(after)})
    assert same == ((kind, name) in NON_SEMANTIC)


def test_every_config_has_an_example() -> None:
    """A dataclass that a node's settings reach is walked above."""
    reached, todo = set(), [Train, RL, Evaluation, Corpus, ModelConfig, Seeds]
    while todo:
        kind = todo.pop()
        reached.add(kind)
        for hint in get_type_hints(kind).values():
            todo += [h for h in (hint, *get_args(hint)) if dataclasses.is_dataclass(h) and h not in reached]
    assert reached == set(EXAMPLES)


def test_defaults_are_left_out_and_numbers_typed() -> None:
    assert canonical(Optimizer()) == {}
    assert canonical(Optimizer(lr=1)) == {"lr": 1.0}
    assert json.dumps(canonical(Optimizer(lr=1))) == '{"lr": 1.0}'
    # The default of the outer class counts, so the inner default is told from it.
    assert canonical(RL(parent="a", band="b", steps=3, optimizer=Optimizer()))["optimizer"] == {}
    with pytest.raises(TypeError):
        canonical({"a": object()})
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest({"a": float("nan")})


def test_order_and_spelling_do_not_change_keys() -> None:
    one = load(
        "smoke",
        ["data.base.operations={1: 1, 2: 0.5}", "bands={a: [1, 2], edge: [4, 3]}", "task.settings={}", "claims=[]"],
    )
    two = load(
        "smoke",
        [
            "data.base.operations={2: 0.5, 1: 1.0, 3: 0}",
            "bands={edge: [3, 4], b: [2, 1]}",
            "task.settings={modulus: 7}",
            "claims=[]",
        ],
    )
    assert set(build(one).nodes) == set(build(two).nodes)


SHARED = [
    ("name=other", set()),
    ("title=other", set()),
    ("claims=[]", set()),
    ("evaluation.k=[1]", set()),
    ("evaluation.problems=3", {"evaluation"}),
    ("evaluation.split=validation", {"evaluation"}),
    ("stages.mid.tokens=9999", {"mid", "mid_rl", "continued"}),
    ("stages.rl.reward=random", {"rl"}),
    ("stages.rl.band=further", {"rl"}),
    ("stages.mid_rl.group=6", {"mid_rl", "continued"}),
    ("stages.continued.schedule.final=0.5", {"continued"}),
    ("data.edge_mix.documents=201", {"edge_mix", "mid", "mid_rl", "continued"}),
    ("data.base.operations={1: 1, 2: 1}", {"all"}),
    ("task.settings.modulus=5", {"all"}),
    ("problem_seed=1", {"all"}),
    ("model.canon=0", {"all", "not corpora"}),
    ("bands.further=[4]", {"all", "not corpora"}),
    (
        "seeds=[{init: 0, order: 0, rollout: 8}, {init: 1, order: 1, rollout: 9}]",
        {"rl", "mid_rl", "continued", "evaluation"},
    ),
]


@pytest.mark.parametrize(("change", "moved"), SHARED, ids=[change for change, _ in SHARED])
def test_a_change_moves_what_it_can_reach_and_nothing_else(change: str, moved: set[str]) -> None:
    before, after = build(load("smoke")), build(load("smoke", [change]))
    corpora = {name for name in before.corpora if before.corpora[name] != after.corpora[name]}
    stages = {name for name, seed in before.stages if before.stages[name, seed] != after.stages[name, seed]}
    evaluations = {
        name for name, seed in before.evaluations if before.evaluations[name, seed] != after.evaluations[name, seed]
    }
    if "all" in moved:
        assert stages == {name for name, _ in before.stages}
        assert corpora == (set() if "not corpora" in moved else set(before.corpora))
    else:
        assert corpora | stages == moved - {"evaluation"}
    arms = {name for name, _ in before.evaluations}
    assert evaluations == (arms if moved & {"evaluation", "all"} else arms & stages)


def test_experiments_share_a_prefix_under_other_names() -> None:
    names = load("smoke")
    renamed = load(
        "smoke",
        [
            "stages.first={kind: pretrain, data: base, tokens: 8192, rows: 8, probes: 1}",
            "stages.first.schedule={warmup: 0.1, decay: 0.0}",
            "stages.anneal.parent=first",
            "arms={x: anneal}",
            "seeds=[0]",
            "attribution=null",
            "claims=[]",
        ],
    )
    assert set(build(renamed).nodes) <= set(build(names).nodes)


def test_epochs_move_a_kind_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build(load("smoke"))
    monkeypatch.setitem(graphs.EPOCHS, "rl", 99)
    after = build(load("smoke"))
    moved = {name for name, seed in before.stages if before.stages[name, seed] != after.stages[name, seed]}
    assert moved == {"rl", "mid_rl", "continued"}


def test_parents_come_first_and_only_what_arms_need_is_there() -> None:
    graph = build(load("smoke", ["stages.unused={kind: midtrain, parent: pretrain, data: base, tokens: 77}"]))
    seen: set[str] = set()
    for key, node in graph.nodes.items():
        assert key == node.key and set(node.parents.values()) <= seen
        seen.add(key)
    assert "unused" not in {node.name for node in graph.nodes.values()}
    assert len(graph.corpora) == 2 and len(graph.stages) == 12 and len(graph.evaluations) == 10
    continued = graph.nodes[graph.stages["continued", 1]]
    assert continued.parents == {
        "parent": graph.stages["pretrain", 1],
        "corpus": graph.corpora["base"],
        "match/mid": graph.stages["mid", 1],
        "match/mid_rl": graph.stages["mid_rl", 1],
    }
    sizes = work(graph)
    assert all(size > 0 for size in sizes.values())
    assert sizes[continued.key] == sizes[graph.stages["mid", 1]] + sizes[graph.stages["mid_rl", 1]]


# The same fields give these keys for ever. They may change only with an epoch, a task's tokens or a spec of the test.
GOLDEN = {
    "base": "8993002d547e81fc",
    "pretrain": "8b6a3f8413637d5e",
    "anneal": "4936b5b7fe869587",
    "mid": "4813c58bd9b5d8f7",
    "rl": "3212ee1db98a1d79",
    "mid_rl": "9866c46aa564a519",
    "continued": "3998ae5d489d7d88",
}
# A default is not hashed: when one changes, raise the epochs of the kinds it reaches, then renew this digest.
DEFAULTS = "85b2970429c42847"


def test_golden_keys() -> None:
    graph = build(load("smoke", ["seeds=[0]"]))
    keys = {"base": graph.corpora["base"], **{name: key for (name, _), key in graph.stages.items()}}
    assert {name: key[:16] for name, key in keys.items()} == GOLDEN


def test_golden_defaults() -> None:
    defaults = {kind.__name__: dataclasses.asdict(example) for kind, example in EXAMPLES.items()}
    assert digest(defaults)[:16] == DEFAULTS
