"""Specs: what is accepted, and that every mistake is named where it is, with what was meant."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from testbed import spec as specs
from testbed.errors import SpecError
from testbed.nodes import Seeds
from testbed.spec import load, names, parse

SMOKE: dict[str, Any] = yaml.safe_load((specs.BUILT_IN / "smoke.yaml").read_text())


def changed(**parts: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SMOKE), **parts}


def message(*changes: str, name: str = "smoke") -> str:
    with pytest.raises(SpecError) as error:
        load(name, changes)
    return str(error.value)


@pytest.mark.parametrize("name", names())
def test_built_in_specs_are_sound(name: str) -> None:
    spec = load(name)
    assert spec.name == name
    assert len(spec.seeds) >= 2
    assert set(spec.parent_arms()) == set(spec.arms)


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ("stages.mid.tokns=5", "stages.mid.tokns", "did you mean `tokens`"),
        ("stages.rl.optimizer.lrr=1", "stages.rl.optimizer.lrr", "did you mean `lr`"),
        ("stages.mid.schedule.warmpu=1", "stages.mid.schedule.warmpu", "did you mean `warmup`"),
        ("evaluation.sampels=8", "evaluation.sampels", "did you mean `samples`"),
        ("model.widht=8", "model.widht", "did you mean `width`"),
        ("model.presett=1", "model.presett", "did you mean `preset`"),
        ("sedes=[0]", "sedes", "did you mean `seeds`"),
        ("claims.0.bnad=edge", "claims.0.bnad", "did you mean `band`"),
        ("data.base.document=3", "data.base.document", "did you mean `documents`"),
        ("attribution.factor=[a]", "attribution.factor", "did you mean `factors`"),
        ("seeds=[{init: 0, odrer: 1}]", "seeds.0.odrer", "did you mean `order`"),
        ("stages.mid.tokens=many", "stages.mid.tokens", "valid integer, not 'many' (text)"),
        ("stages.mid.tokens='4096'", "stages.mid.tokens", "valid integer, not '4096' (text)"),
        ("stages.mid.tokens=true", "stages.mid.tokens", "not True (true or false)"),
        ("stages.mid.tokens=1.5", "stages.mid.tokens", "not 1.5 (a number)"),
        ("stages.mid.optimizer.lr=.nan", "stages.mid.optimizer.lr", "not a finite number"),
        ("data.base.operations={one: 1}", "data.base.operations", "valid integer"),
        ("bands=[1, 2]", "bands", "not a list of 2"),
        ("stages.mid.tokens=-5", "stages.mid", "tokens must be positive, not -5"),
        ("stages.rl.steps=0", "stages.rl", "steps must be positive, not 0"),
        ("data.base.documents=0", "data.base.documents", "greater than 0"),
        ("data.base.operations={1: 0}", "data.base", "one of them positive"),
        ("data.base.replay=edge_mix", "data.base", "go together"),
        ("stages.mid.kind=midtrian", "stages.mid.kind", "did you mean `midtrain`"),
        ("stages.extra={data: base}", "stages.extra.kind", "required"),
        ("stages.extra={kind: rl}", "stages.extra.parent", "required"),
        ("model.preset=0.1m", "model.preset", "did you mean `0.1M`"),
        ("stages.mid.parent=pretrian", "stages.mid.parent", "did you mean `pretrain`"),
        ("stages.mid.data=edge_mx", "stages.mid.data", "did you mean `edge_mix`"),
        ("stages.rl.band=edg", "stages.rl.band", "did you mean `edge`"),
        ("stages.continued.match=[midd]", "stages.continued.match", "did you mean `mid`"),
        ("data.edge_mix.replay=bsae", "data.edge_mix.replay", "did you mean `base`"),
        ("arms.mid=midd", "arms.mid", "did you mean `mid`"),
        ("arms.twin=mid", "arms", "`mid`, `twin` are all the stage `mid`"),
        ("parents={mid: pretraind}", "parents.mid", "did you mean `pretrained`"),
        ("claims.0.arm=lr", "claims.0.arm", "did you mean `rl`"),
        ("claims.0.band=egde", "claims.0.band", "did you mean `edge`"),
        ("claims.0.k=4", "claims.0.k", "not among evaluation.k [1, 2]"),
        ("claims.0.arm=pretrained", "claims.0", "so it has no gain"),
        ("attribution.arms.mid=midd", "attribution.arms.mid", "did you mean `mid`"),
        ("attribution.arms={'': pretrained}", "attribution", "each of the 4 combinations"),
        ("attribution.matched={treated: rl}", "attribution", "both treated and placebo"),
        ("attribution.arms.mid=rl", "attribution", "an arm of its own"),
        ("attribution.matched.placebo=mid+rl", "attribution", "must be two arms"),
        ("parents={mid: rl, rl: mid}", "parents", "mid → rl → mid is a circle"),
        ("stages.continued.row_length=64", "stages.continued.row_length", "`pretrain` read the corpus `base`"),
        ("stages.rl.keep=[9]", "stages.rl", "the stage has 1 steps, so none has the number [9]"),
        ("stages.mid.match=[rl]", "stages.mid", "exactly one of"),
        ("arms.early=pretrain@²", "arms.early", "is no checkpoint"),
        ("seeds=[{init: 0, problems: 1}, {init: 1}]", "seeds.0.problems", "set problem_seed"),
        ("stages.pretrain.parent=mid", "stages.pretrain", "is a circle"),
        ("stages.mid={kind: midtrain, parent: pretrain, data: base, match: [mid_rl]}", "stages.mid", "is a circle"),
        ("stages.mid.optimizer.kind=muon", "stages.mid.edge.optimizer", "trains with adamw, this stage with muon"),
        ("stages.mid.optimizer.lr=1e-3", "stages.mid.edge.rate", "starts at another rate than its parent ended with"),
        ("stages.mid.schedule.warmup=0.1", "stages.mid.schedule", "warmup + decay must not exceed 1"),
        ("stages.rl.schedule.warmup=0.1", "stages.rl.edge.rate", "stated as restart, but the stage warms up over 0.1"),
        ("stages.pretrain.schedule.decay=0.2", "stages.mid.edge.parent", "`pretrain` is annealed where it is left"),
        ("stages.mid.edge=null", "stages.mid.edge", "`edge: {parent: stable, optimizer: carry, rate: continue}`"),
        ("stages.rl.edge=null", "stages.rl.edge", "`edge: {parent: annealed, optimizer: reset, rate: restart}`"),
        ("stages.mid.edge.parnt=stable", "stages.mid.edge.parnt", "did you mean `parent`"),
        ("stages.mid.edge.optimizer=keep", "stages.mid.edge.optimizer", "carry"),
        ("stages.mid.edge={parent: stable}", "stages.mid.edge.optimizer", "required"),
        (
            "stages.pretrain.edge={parent: stable, optimizer: carry, rate: continue}",
            "stages.pretrain",
            "nothing crosses to a stage without a parent",
        ),
        ("arms.early=pretrain@x", "arms.early", "is no checkpoint; write the stage and a step"),
        ("arms.early=pretrain@0", "arms.early", "is no checkpoint"),
        ("arms.early=pretrian@3", "arms.early", "did you mean `pretrain`"),
        ("arms.early=rl@9", "arms.early", "`rl` has 1 steps, not 9"),
        ("stages.rl.flops=1e6", "stages.rl", "exactly one of `steps` and `flops`"),
        ("stages.mid.flops=1e6", "stages.mid", "exactly one of `tokens`, `flops` and `match`"),
        ("stages.mid.keep=[0]", "stages.mid", "steps are counted from 1"),
        ("stages.both={kind: combine, of: {mid: 0.5, anneal: 0.4}}", "stages.both", "sum to 1, not 0.9"),
        ("stages.both={kind: combine, of: {mid: 0.5, annel: 0.5}}", "stages.both.of", "did you mean `anneal`"),
        (
            "stages.both={kind: parallel, objectives: {mid: 0.5, rl: 0.5}, steps: 4, every: 2}",
            "stages.both.objectives",
            "all continue one parent, not pretrain and anneal",
        ),
        (
            "stages.both={kind: parallel, objectives: {mid: 0.5, pretrain: 0.5}, steps: 4, every: 2}",
            "stages.both.objectives",
            "no training stage that continues a parent",
        ),
        (
            "stages.both={kind: parallel, objectives: {mid: 0.5, anneal: 0.5}, steps: 4, every: 3}",
            "stages.both",
            "a multiple of every (3)",
        ),
        ("stages.a+b={kind: combine, of: {mid: 1}}", "stages.a", "`+`; these name checkpoints and combinations"),
        ("probes={p: {measure: roles, of: [midd]}}", "probes.p", "did you mean `mid`"),
        ("probes={p: {measure: weights, of: [mid]}}", "probes.p", "against goes with measure: weights"),
        ("name=../stages", "name", "a name is made of letters, digits"),
        ("name=''", "name", "a name is made of letters, digits"),
        ("name=" + 65 * "a", "name", "at most 64"),
        ("seeds=[9223372036854775808]", "seeds", "a seed lies in [0, 2^63)"),
        ("seeds=[-1]", "seeds", "a seed lies in [0, 2^63)"),
        ("stages.mid.rows=1000000000", "stages.mid", "a step holds at most 16777216 tokens"),
        ("stages.rl.optimizer.lr=1e300", "stages.rl.optimizer", "must lie in (0, 10]"),
        ("bands.edge=[]", "bands.edge", "the band is empty"),
        ("bands.edge=[1]", "bands.edge", "already belong to the band `in_range`"),
        ("bands.edge=[0]", "bands.edge", "at least 1"),
        ("bands.edge=[20]", "bands.edge", "20 operations do not fit the task's settings"),
        ("data.base.operations={1: 1, 20: 1}", "data.base.operations", "20 operations do not fit"),
        ("evaluation.k=[1, 64]", "evaluation.samples", "at least twice the largest k (64)"),
        ("evaluation.k=[0]", "evaluation.k", "at least 1"),
        ("task.name=arithmatic", "task.name", "did you mean `arithmetic`"),
        ("task.settings.modulos=5", "task.settings", "did you mean 'modulus'"),
        ("task.settings.modulus=6", "task.settings", "prime"),
        ("seeds=[]", "seeds", "at least one"),
        ("seeds=[1, 1]", "seeds", "repeat"),
        ("stages.rl.max_new_tokens=3", "stages.rl.max_new_tokens", "cannot hold solution and end"),
        ("evaluation.max_new_tokens=3", "evaluation.max_new_tokens", "cannot hold solution and end"),
        ("evaluation.max_new_tokens=512", "evaluation.max_new_tokens", "exceed model.max_length 512"),
        ("stages.mid.row_length=12", "stages.mid.row_length", "a row of 12 cannot hold"),
        ("model.max_length=12", "bands.in_range", "model.max_length is 12"),
    ],
)
def test_a_mistake_is_named_where_it_is(change: str, path: str, words: str) -> None:
    lines = message(change).splitlines()
    assert any(line.startswith(f"smoke: {path}") and words in line for line in lines), lines
    assert all(line.startswith("smoke: ") and line.endswith(".") and not line.endswith("..") for line in lines), lines


def test_a_band_without_structures_left_is_named() -> None:
    # One operator, one operation: fewer problems than splits.
    lines = message("task.settings={operators: '+', modulus: 2, names: 8}", "bands.in_range=[1]")
    assert "bands.in_range: no problem of 1 operations is left for the test split" in lines


def test_every_mistake_is_told_at_once() -> None:
    lines = message("stages.mid.tokns=5", "evaluation.sampels=8", "model.widht=8").splitlines()
    assert len(lines) == 3


def test_unknown_names_and_files(tmp_path: Path) -> None:
    assert "did you mean `quickstart`" in message(name="quickstar")
    assert "no spec file" in message(name=str(tmp_path / "none.yaml"))
    for text, words in [
        ("name: [", "not YAML"),
        ("- 1", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("name: a\nname: b", "`name` is given twice"),
        ("seeds: {1: a, '1': b}", "`1` is given twice"),
        ("name: 2020-01-01", "has no meaning here"),
        ("name: &a [*a]", "refers to itself"),
    ]:
        (tmp_path / "s.yaml").write_text(text)
        assert words in message(name=str(tmp_path / "s.yaml")), text
    (tmp_path / "s.yaml").write_bytes(b"name: \xff")
    assert "not UTF-8" in message(name=str(tmp_path / "s.yaml"))
    assert "cannot be read" in message(name=str(_unreadable(tmp_path)))


def _unreadable(tmp_path: Path) -> Path:
    path = tmp_path / "folder.yaml"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("stages.mid.tokens", "path=value"),
        ("=3", "path=value"),
        ("claims.7.band=edge", "not an index of a list of 1"),
        ("name.first=a", "has no fields"),
        ("seeds=[", "not YAML"),
        ("stages.mdi.tokens=1", "there is no `mdi` (did you mean `mid`?)"),
        ("stages..tokens=1", "a part of the path is empty"),
        ("seeds=" + "[" * 300 + "]" * 300, "nested too deeply"),
        ("seeds=" + "[" * 5000 + "]" * 5000, "nested far too deeply"),
        ("seeds=[" + "1" * 5000 + "]", "a value that cannot be read"),
    ],
)
def test_changes_that_cannot_be_made(change: str, words: str) -> None:
    assert words in message(change)


def test_a_few_lines_of_aliases_are_not_written_out(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "laughs.yaml").write_text("\n".join(lines))
    assert "more than 100000 values" in message(name=str(tmp_path / "laughs.yaml"))


def test_changes_reach_every_depth() -> None:
    spec = load(
        "smoke",
        [
            "stages.mid.tokens=1e4",
            "data.edge_mix.operations.2=0.5",
            "claims.0.band=further",
            "stages.mid.optimizer.lr=1e-3",
            "stages.mid.edge.rate=restart",
        ],
    )
    mid = spec.stages["mid"]
    assert mid.kind == "midtrain" and mid.tokens == 10_000 and mid.optimizer.lr == 1e-3
    assert spec.data["edge_mix"].operations == {2: 0.5}
    assert spec.claims[0].band == "further"


def test_replay_is_mixed_in() -> None:
    spec = parse(
        changed(
            data={
                "base": {"documents": 9, "operations": {1: 3, 2: 1, 3: 0}},
                "edge_mix": {"documents": 9, "operations": {3: 5}, "replay": "base", "replay_share": 0.25},
            }
        )
    )
    shares = {
        (c.name, o): c.share * w / sum(c.operations.values())
        for c in spec.components("edge_mix")
        for o, w in c.operations.items()
    }
    assert shares == pytest.approx({("own", 3): 0.75, ("replay", 1): 0.1875, ("replay", 2): 0.0625})


EDGE = "edge: {parent: stable, optimizer: carry, rate: continue}"


def test_seeds_are_labelled_by_the_topmost_that_varies() -> None:
    assert load("smoke", ["seeds=[3, 5]", "problem_seed=9"]).seed_sets() == {
        3: Seeds(init=3, order=3, rollout=3, problems=9),
        5: Seeds(init=5, order=5, rollout=5, problems=9),
    }
    varied = load("smoke", ["seeds=[{rollout: 4}, {rollout: 6}]"]).seed_sets()
    assert varied == {4: Seeds(rollout=4), 6: Seeds(rollout=6)}
    nested = "seeds=[{init: 0, order: 0}, {init: 0, order: 1}, {init: 1, order: 2}]"
    assert "nested" in message(nested)


def test_parent_arms_are_annealed_or_evaluated_ancestors() -> None:
    parents = load("smoke").parent_arms()
    assert parents == {
        "pretrained": None, "mid": "pretrained", "rl": "pretrained", "mid+rl": "mid", "continued": "pretrained",
    }  # fmt: skip
    two = f"stages.second={{kind: pretrain, parent: pretrain, {EDGE}, data: base, tokens: 999}}"
    assert "say which in `parents`" in message(two, "arms.second=second")
    pairs = "parents={mid: second, rl: pretrained, mid+rl: mid, continued: pretrained, second: pretrained}"
    assert load("smoke", [two, "arms.second=second", pairs]).parent_arms()["mid"] == "second"
    assert "is a circle" in message(two, "arms.second=second", pairs, "parents.pretrained=second")


def test_two_annealings_of_a_checkpoint_are_not_each_others_parents() -> None:
    second = f"stages.second={{kind: pretrain, parent: pretrain, {EDGE}, data: base, tokens: 999}}"
    arms = "arms={short: anneal, long: second}"
    spec = load("smoke", [second, arms, "attribution=null", "claims=[]"])
    assert spec.parent_arms() == {"short": None, "long": None}


def test_a_part_given_in_part_keeps_its_stages_own_defaults() -> None:
    """Those of rl differ from those of training."""
    changes = ["stages.rl.optimizer.clip=0.5", "stages.rl.schedule={warmup: 0.1}", "stages.mid.optimizer.clip=0.5"]
    changes.append("stages.rl.edge.rate=rewarm")
    spec = load("smoke", changes)
    whole = load("smoke").stages
    rl, mid = spec.stages["rl"], spec.stages["mid"]
    assert rl.optimizer == dataclasses.replace(whole["rl"].optimizer, clip=0.5) and rl.optimizer.lr == 3e-4
    assert rl.schedule == dataclasses.replace(whole["rl"].schedule, warmup=0.1)
    assert mid.optimizer == dataclasses.replace(whole["mid"].optimizer, clip=0.5) and mid.optimizer.lr == 3e-3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
PATHS = [(), *[(k,) for k in SMOKE], ("stages", "mid"), ("stages", "rl", "optimizer"), ("data", "base"), ("claims", 0)]


@given(path=st.sampled_from(PATHS[1:]), value=json_values)
def test_anything_anywhere_is_a_spec_or_a_spec_error(path: tuple[Any, ...], value: Any) -> None:
    raw = copy.deepcopy(SMOKE)
    here: Any = raw
    for part in path[:-1]:
        here = here.setdefault(part, {}) if isinstance(here, dict) else here[part]
    here[path[-1]] = value
    try:
        parse(raw)
    except SpecError as error:
        assert str(error)
