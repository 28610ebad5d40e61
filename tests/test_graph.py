"""Keys: whatever can change a result changes its key, nothing else does, and keys stay what they were."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args, get_type_hints

import pytest

from models.config import ModelConfig
from synthetic_tasks.corpus import Component
from testbed import graph as graphs
from testbed.config import RL, Combine, Edge, Evaluation, Optimizer, Parallel, Probe, Schedule, Train
from testbed.graph import NON_SEMANTIC, build, canonical, digest, work
from testbed.nodes import Corpus, Seeds
from testbed.spec import load

EXAMPLES: dict[type, Any] = {
    Train: Train(kind="midtrain", parent="a", data="d", tokens=1000),
    RL: RL(parent="a", band="b", steps=3),
    Combine: Combine(kind="combine", of={"a": 0.5, "b": 0.5}),
    Parallel: Parallel(kind="parallel", objectives={"a": 0.5, "b": 0.5}, steps=4, every=2),
    Edge: Edge(parent="stable", optimizer="carry", rate="continue"),
    Probe: Probe(measure="roles", of=("a",)),
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
    (Train, "edge"): Edge(parent="stable", optimizer="carry", rate="continue"),
    (Train, "keep"): (3,),
    (RL, "edge"): Edge(parent="stable", optimizer="carry", rate="continue"),
    (RL, "keep"): (3,),
    (Combine, "of"): {"a": 1.0},
    (Parallel, "objectives"): {"a": 0.4, "b": 0.6},
    (Parallel, "keep"): (2,),
    (Parallel, "steps"): 6,
    (Parallel, "every"): 4,
    (Probe, "of"): ("b",),
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


def pair(kind: type, name: str) -> tuple[Any, Any]:
    """The example, or one that differs from it as little as makes room, and the same with another value."""
    before = EXAMPLES[kind]
    if (kind, name) == (Train, "match"):
        return dataclasses.replace(before, tokens=None, match=("a",)), dataclasses.replace(
            before, tokens=None, match=("b",)
        )
    if name == "flops":
        budget = {"tokens": None} if kind is Train else {"steps": None}
        return tuple(dataclasses.replace(before, flops=flops, **budget) for flops in (1e9, 2e9))  # type: ignore[return-value]
    if kind is Probe and name in ("measure", "against"):
        weights = Probe(measure="weights", of=("a",), against="c")
        return weights, before if name == "measure" else dataclasses.replace(weights, against="d")
    value = other(kind, name)
    assert value != getattr(before, name)
    return before, dataclasses.replace(before, **{name: value})


@pytest.mark.parametrize(("kind", "name"), fields(), ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_every_field_changes_the_key_or_is_listed(kind: type, name: str) -> None:
    if name == "kind" and kind is not Train:
        return  # one value
    if (kind, name) == (Parallel, "keep_doubling"):
        assert (kind, name) in NON_SEMANTIC  # refused in any other value
        return
    before, after = pair(kind, name)
    same = digest({"x": canonical(before)}) == digest({"x": canonical(after)})
    assert same == ((kind, name) in NON_SEMANTIC)


def test_every_config_has_an_example() -> None:
    """A dataclass that a node's settings reach is walked above."""
    reached, todo = set(), [Train, RL, Combine, Parallel, Probe, Evaluation, Corpus, ModelConfig, Seeds]
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
    unused = "stages.unused={kind: midtrain, parent: pretrain, edge: {parent: stable, optimizer: carry, rate: continue}"
    graph = build(load("smoke", [f"{unused}, data: base, tokens: 77}}"]))
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
    "base": "f4b092bca4159a86",
    "pretrain": "b4388934db5e5d55",
    "anneal": "5d9512e7b10819f7",
    "mid": "c3062fa2b8cfc14a",
    "rl": "d9637df349376125",
    "mid_rl": "d4aa006b373c23be",
    "continued": "5b56058f3eef59b8",
}
# A default is not hashed: when one changes, raise the epochs of the kinds it reaches, then renew this digest.
DEFAULTS = "ba7afd85780738f2"


def test_golden_keys() -> None:
    graph = build(load("smoke", ["seeds=[0]"]))
    keys = {"base": graph.corpora["base"], **{name: key for (name, _), key in graph.stages.items()}}
    assert {name: key[:16] for name, key in keys.items()} == GOLDEN


def test_golden_defaults() -> None:
    defaults = {kind.__name__: dataclasses.asdict(example) for kind, example in EXAMPLES.items()}
    assert digest(defaults)[:16] == DEFAULTS
