"""What every family shares: splits, axes, corruptions and settings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from synthetic_tasks import get_task, list_tasks
from synthetic_tasks.family import SPLITS, Settings


def task(name: str, **settings: Any) -> Any:
    return get_task(name, rl_share=0.2, held_out_share=0.1, **settings)


@pytest.mark.parametrize("name", list_tasks())
def test_keys_stand_in_one_split_each(name: str) -> None:
    drawn = task(name)
    problems = {split: drawn.sample_batch(3, 0, 120, split=split) for split in SPLITS}
    for kind in ("structure_key", "instance_key"):
        owners: dict[str, set[str]] = {}
        for split, some in problems.items():
            for problem in some:
                assert problem.split == split
                if kind == "instance_key" or not drawn.structures_shared(problem.difficulty["operations"]):
                    owners.setdefault(getattr(problem, kind), set()).add(split)
        assert all(len(splits) == 1 for splits in owners.values())


def test_the_shares_move_no_structure_in_or_out_of_validation_and_test() -> None:
    with_shares, without = task("arithmetic"), get_task("arithmetic")
    for share in range(0, 16**8, 16**8 // 2000):
        splits = {drawn.split_of(f"{share:08x}") for drawn in (with_shares, without)}
        assert len(splits) == 1 or not splits & {"validation", "test"}


def test_shares_are_taken_from_train() -> None:
    drawn = task("arithmetic")
    counts = Counter(drawn.split_of(f"{i:08x}") for i in range(0, 16**8, 16**8 // 2000))
    shares = {split: round(counts[split] / counts.total(), 2) for split in SPLITS}
    assert shares == {"train": 0.5, "validation": 0.1, "test": 0.1, "rl": 0.2, "held_out": 0.1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rl_share": -0.1}, "rl_share must be a chance"),
        ({"held_out_share": "much"}, "held_out_share must be a chance"),
        ({"rl_share": 0.5, "held_out_share": 0.3}, "must not exceed 0.7"),
        ({"rl_shar": 0.5}, "did you mean 'rl_share'"),
    ],
)
@pytest.mark.parametrize("name", list_tasks())
def test_settings_that_cannot_be(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task(name, **settings)


@pytest.mark.parametrize("name", list_tasks())
def test_a_cell_that_cannot_be_asked(name: str) -> None:
    drawn = get_task(name)
    with pytest.raises(ValueError, match="no structures are kept for the split 'rl'; set rl_share"):
        drawn.sample(0, 0, split="rl")
    with pytest.raises(ValueError, match="split must be one of"):
        drawn.sample(0, 0, split="training")
    with pytest.raises(ValueError, match="has no axis 'operation'; did you mean 'operations'"):
        drawn.sample(0, 0, operation="3")
    with pytest.raises(ValueError, match="operations must be an integer of at least 1"):
        drawn.sample(0, 0, operations=0)
    for axis in drawn.axes:
        with pytest.raises(ValueError, match=f"unknown {axis} 'sideways'"):
            drawn.sample(0, 0, **{axis: "sideways"})
        with pytest.raises(ValueError, match="must not be negative"):
            drawn.sample(0, 0, **{axis: {drawn.axes[axis][0]: -1.0}})


@pytest.mark.parametrize("name", list_tasks())
def test_axes_are_drawn_by_their_weights_and_told_by_the_problem(name: str) -> None:
    drawn = get_task(name)
    for axis, values in drawn.axes.items():
        weights = {value: float(i + 1) for i, value in enumerate(values)}
        problems = drawn.sample_batch(0, 0, 600, operations=drawn.grid[0], **{axis: weights})
        counts = Counter(problem.axes[axis] for problem in problems)
        for value, weight in weights.items():
            assert counts[value] / 600 == pytest.approx(weight / sum(weights.values()), abs=0.08)
        # What is drawn under a value does not depend on how the value was chosen.
        for i in range(20):
            assert problems[i] == drawn.sample(0, i, operations=drawn.grid[0], **{axis: problems[i].axes[axis]})


@pytest.mark.parametrize("name", list_tasks())
def test_every_token_is_in_the_vocabulary_and_has_a_role(name: str) -> None:
    drawn = get_task(name)
    for axes in [{}, *({axis: value} for axis, values in drawn.axes.items() for value in values)]:
        for problem in drawn.sample_batch(1, 0, 100, **axes):
            words = [*problem.prompt.split(" "), *problem.solution.split(" ")]
            assert set(words) <= set(drawn.vocabulary)
            roles = drawn.token_roles(problem)
            assert len(roles) == len(problem.solution.split(" ")) and set(roles) <= set(drawn.roles) - {"end"}


def test_a_setting_that_came_later_changes_no_stream_at_its_default() -> None:
    old, new = get_task("arithmetic"), get_task("arithmetic", rl_share=0.0)
    assert old.settings.stream() == new.settings.stream()
    assert "rl_share" not in old.settings.stream() and "rl_share" in task("arithmetic").settings.stream()
    every, shared = ({f.name for f in dataclasses.fields(kind)} for kind in (old.settings, Settings))
    # Nor does a change of words.
    assert set(old.settings.stream()) == every - shared - {"contexts"}
