"""Edges: what two stages come to is what their steps then do."""

from __future__ import annotations

import ast
import itertools
from typing import Any

import pytest
import tiny

from testbed import edges
from testbed.checks import check
from testbed.config import Schedule
from testbed.errors import SpecError
from testbed.optim import factor, rate_state
from testbed.spec import parse

SCHEDULES = [
    Schedule(shape=shape, warmup=warmup, decay=decay, final=final)  # type: ignore[arg-type]
    for shape, warmup, decay, final in itertools.product(
        ("constant", "cosine", "wsd"), (0.0, 0.3), (0.0, 0.05, 0.5), (0.0, 0.1, 1.0)
    )
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("total", [2, 10, 64])
def test_the_state_of_a_rate_is_what_its_factors_say(schedule: Schedule, total: int) -> None:
    """By the factors of the steps before and after: rising, at the peak, falling, at the end of a fall."""
    factors = [factor(schedule, step, total) for step in range(total)]
    for steps in range(1, total + 1):
        now, state = factors[steps - 1], rate_state(schedule, steps, total)
        fallen = any(b < a for a, b in itertools.pairwise(factors[:steps]))
        begins = schedule.shape == "cosine" and schedule.final < 1 and steps > round(schedule.warmup * total)
        if state == "warming":
            assert now < 1 and not fallen
        elif state == "stable":
            assert now == 1 and not fallen
        elif state == "annealed":
            assert steps == total and (fallen or begins or now < 1)
        else:
            assert steps < total and (fallen or begins)


def spec_with(parent: str, edge: dict[str, str] | None, **pretrain: Any) -> Any:
    """The tiny spec, with mid continuing `parent`."""
    stages = dict(tiny.SPEC["stages"])
    stages["pretrain"] = stages["pretrain"] | pretrain
    stages["mid"] = stages["mid"] | {"parent": parent, "edge": edge}
    keep = {name: stages[name] for name in ("pretrain", "mid")}
    return tiny.SPEC | {"stages": keep, "arms": {"mid": "mid"}, "parents": {}, "probes": {}}


@pytest.mark.parametrize(
    ("parent", "schedule", "allowed"),
    [
        ("pretrain", {"warmup": 0.2, "decay": 0}, {"stable"}),
        ("pretrain", {"decay": 0.2}, {"annealed"}),
        ("pretrain", {"decay": 0.2, "final": 1}, {"stable"}),
        ("pretrain", {"shape": "cosine"}, {"annealed"}),
        ("pretrain@3", {"decay": 0}, {"stable"}),
        # Where its steps end is known when the corpus is there: the run compares.
        ("pretrain@3", {"warmup": 0.2, "decay": 0}, {"stable", "warming"}),
        ("pretrain@3", {"decay": 0.2}, {"stable", "annealing", "annealed"}),
        ("pretrain@3", {"shape": "cosine", "warmup": 0.1}, {"stable", "warming", "annealing", "annealed"}),
    ],
)
def test_what_a_spec_may_state(parent: str, schedule: dict[str, Any], allowed: set[str]) -> None:
    for state in edges.ORDER:
        found = []
        for rate in ("continue", "restart"):
            raw = spec_with(parent, {"parent": state, "optimizer": "carry", "rate": rate}, schedule=schedule)
            try:
                parse(raw)
                found.append(rate)
            except SpecError as error:
                assert "edge" in str(error)
        assert bool(found) == (state in allowed), (state, found)
        # A rate goes on from its peak or its end alone; mid starts at the peak.
        assert found in ([], ["continue"] if state == "stable" else ["restart"])


def test_the_line_to_add_is_accepted_as_it_stands() -> None:
    import yaml

    for parent in ("pretrain", "pretrain@3"):
        with pytest.raises(SpecError) as error:
            parse(spec_with(parent, None))
        line = str(error.value).partition("`edge: ")[2].partition("`")[0]
        assert check(parse(spec_with(parent, yaml.safe_load(line)))) == []


def test_sums_are_as_stable_as_their_least_annealed_part() -> None:
    spec = parse(tiny.SPEC)
    assert edges.left(spec, "mean") == ("stable",) and edges.left(spec, "anneal") == ("annealed",)
    stages = tiny.SPEC["stages"] | {"end": {"kind": "combine", "of": {"anneal": 0.5, "mid": 0.5}}}
    assert edges.left(parse(tiny.SPEC | {"stages": stages}), "end") == ("stable",)


def test_another_length_of_rows_is_refused_however_the_parts_come_together() -> None:
    stages = dict(tiny.SPEC["stages"])
    stages["tune"] = stages["tune"] | {"row_length": 96, "edge": tiny.RESET}
    with pytest.raises(SpecError, match=r"stages\.both\.parallel|stages\.mean\.combine|stages\.tune\.row_length"):
        parse(tiny.SPEC | {"stages": stages, "arms": {"mean": "mean"}, "parents": {}, "probes": {}})
    other = {
        "pretrain": stages["pretrain"],
        "a": stages["mid"],
        "b": stages["mid"] | {"row_length": 96},
        "mean": {"kind": "combine", "of": {"a": 0.5, "b": 0.5}},
    }
    with pytest.raises(SpecError, match=r"stages\.mean\.combine: `a` read the corpus `mixed` in rows of 64, and `b`"):
        parse(tiny.SPEC | {"stages": other, "arms": {"mean": "mean"}, "parents": {}, "probes": {}})


def test_a_parallel_of_sums_is_told_and_no_traceback() -> None:
    stages = tiny.SPEC["stages"] | {
        "odd": {"kind": "parallel", "objectives": {"mean": 0.5, "rl": 0.5}, "steps": 2, "every": 1},
        "after": tiny.SPEC["stages"]["mid"] | {"parent": "odd"},
    }
    with pytest.raises(SpecError, match="`mean` is no training stage that continues a parent"):
        parse(tiny.SPEC | {"stages": stages})


def test_sums_are_not_matched() -> None:
    stages = tiny.SPEC["stages"] | {"continued": tiny.SPEC["stages"]["continued"] | {"match": ["mean"]}}
    with pytest.raises(SpecError, match="`mean` is a sum and costs nothing"):
        parse(tiny.SPEC | {"stages": stages})


def test_no_name_of_a_stage_is_taken_for_a_role() -> None:
    """`corpus`, `match` and `objective` are names like any other: the keys stay what they are."""
    plain = tiny.graph(arms={"mean": "mean"}, parents={}, probes={})
    names = {"mid": "corpus", "tune": "match", "both": "objective"}
    text = str(tiny.SPEC["stages"])
    for old, new in names.items():
        text = text.replace(f"'{old}'", f"'{new}'").replace(f"'{old}@", f"'{new}@")
    odd = tiny.graph(stages=ast.literal_eval(text), arms={"mean": "mean"}, parents={}, probes={})
    assert list(odd.nodes) == list(plain.nodes)
