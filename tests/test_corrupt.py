"""Corruptions of every task: none is ever strict, and the verdict finds what was spoilt where it was spoilt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from synthetic_tasks import corrupt, get_task, list_tasks
from synthetic_tasks.registry import task_of

# Statuses that no single fault gives: a step's value is inherited only after another step was wrong.
CONSEQUENCES = {"ok", "extra", "inherited"}


# Settings under which every axis has all its values, where the default has fewer.
EVERY: dict[str, dict[str, Any]] = {"arithmetic": {"contexts": ["symbolic", "zoo", "school", "festival"]}}


@pytest.mark.parametrize("name", list_tasks())
def test_a_corrupted_trace_is_never_strict_and_fails_where_it_was_spoilt(name: str) -> None:
    task = get_task(name, **EVERY.get(name, {}))
    made = Counter[str]()
    statuses = set[str]()
    for axes in [{}, *({axis: value} for axis, values in task.axes.items() for value in values)]:
        for problem in task.sample_batch(5, 0, 40, **axes):
            assert task.verify(problem, problem.solution).strict
            for kind in task.corruptions:
                spoilt = corrupt(problem, kind, 1)
                if spoilt is None:
                    continue
                made[kind] += 1
                assert spoilt.kind == kind and spoilt.completion != problem.solution
                verdict = task.verify(problem, spoilt.completion)
                assert not verdict.strict, (problem.prompt, spoilt)
                first = verdict.first_error
                found = ("", None) if first is None else (verdict.steps[first].status, first)
                assert found == (spoilt.status, spoilt.step), (problem.prompt, problem.solution, spoilt)
                statuses.add(spoilt.status)
    assert set(made) == set(task.corruptions), "a kind that never finds room is not tested"
    assert statuses - {""} == set(task.statuses) - CONSEQUENCES, "every fault that a verdict tells has its corruption"


@pytest.mark.parametrize("name", list_tasks())
def test_a_corruption_is_a_function_of_problem_kind_and_seed(name: str) -> None:
    task = get_task(name)
    problem = max(task.sample_batch(0, 0, 20), key=lambda p: len(p.solution))
    kind = "missing_step"
    assert corrupt(problem, kind, 3) == corrupt(problem, kind, 3) == task.corrupt(problem, kind, 3)
    with pytest.raises(ValueError, match="did you mean 'missing_step'"):
        corrupt(problem, "missing_stp", 0)


def test_the_task_of_a_problem_has_its_settings() -> None:
    problem = get_task("arithmetic", modulus=11, names=9).sample(0, 0)
    assert task_of(problem).settings.modulus == 11 and task_of(problem).settings.names == 9
