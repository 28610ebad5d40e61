from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_traces import Reading

from synthetic_tasks import EmptyCellError, Problem, get_task, list_tasks
from synthetic_tasks.arithmetic import ArithmeticSettings
from synthetic_tasks.arithmetic.structure import draw_core

TASK = get_task("arithmetic")


class DataChooser:
    """Lets hypothesis make every choice."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def uniform(self, options: int) -> int:
        return self.data.draw(st.integers(0, options - 1))

    def weighted(self, weights: Any) -> int:
        return self.data.draw(st.sampled_from([i for i, weight in enumerate(weights) if weight > 0]))


@given(
    st.data(),
    st.integers(1, 8),
    st.sampled_from([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.3, 0.3)]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from(["+", "-", "+-*"]),
    st.integers(10, 18),
    st.sampled_from([None, 2, 3]),
)
@settings(max_examples=300, deadline=None)
def test_any_drawing_is_a_graph_whose_operations_are_all_needed(
    data: st.DataObject,
    operations: int,
    reuse: tuple[float, float],
    branching: float,
    operators: str,
    names: int,
    max_leaves: int | None,
) -> None:
    knobs = ArithmeticSettings(
        leaf_reuse=reuse[0],
        sharing=reuse[1],
        branching=branching,
        operators=operators,
        names=names,
        max_leaves=max_leaves,
    )
    core = draw_core(knobs, operations, DataChooser(data))
    nodes = [node for node in core if node]
    assert len(nodes) == operations
    assert 2 <= len(core) - operations <= min(knobs.leaf_limit(operations), operations + 1)
    assert len(core) <= names
    assert all(
        left != right and max(left, right) < i for i, node in enumerate(core) if node for _, left, right in [node]
    )
    # No expression twice, whatever the order of the operands of + and *.
    assert len({(o, *(pair if o == "-" else sorted(pair))) for o, *pair in nodes}) == operations
    needed, waiting = set(), [len(core) - 1]
    while waiting:
        i = waiting.pop()
        needed.add(i)
        waiting += core[i][1:] if core[i] else ()  # type: ignore[index]
    assert needed == set(range(len(core)))


@pytest.mark.parametrize("distractors", [0, 3])
@pytest.mark.parametrize("order", ["topological", "leaves_first", "shuffled"])
@pytest.mark.parametrize("question", ["last", "first"])
def test_prompts_say_what_the_problem_says(distractors: int, order: str, question: str) -> None:
    task = get_task("arithmetic", distractors=distractors, order=order, question=question, modulus=11)
    used_early = late_leaves = 0
    for problem in task.sample_batch(seed=0, start=0, count=200):
        reading = Reading(problem.prompt, 11)
        assert problem.answer == str(reading.values[reading.query])
        assert problem.prompt.startswith("?") == (question == "first")
        levels = Counter(reading.depth(name) for name in reading.needed)
        assert problem.difficulty == {
            "operations": len(reading.needed),
            "depth": reading.depth(reading.query),
            "width": max(levels.values()),
            "leaves": len(reading.needed_leaves()),
            "facts": len(reading.order),
            "interplay_op": 2 * len(reading.needed) + len(reading.needed_leaves()),
        }
        assert len(reading.order) == len(reading.needed) + len(reading.needed_leaves()) + distractors
        place = {name: i for i, name in enumerate(reading.order)}
        late_leaves += any(name in reading.leaves for name in reading.order[len(reading.leaves) :])
        used_early += any(place[o] > place[n] for n, f in reading.operations.items() for o in f[::2])
        assert task.verify(problem, problem.solution).exact
        assert problem.solution.split(" ")[-1] == problem.answer
    assert (used_early > 0) == (order == "shuffled")
    assert (late_leaves > 0) == (order != "leaves_first")


def test_an_item_is_a_function_of_seed_and_index() -> None:
    for operations in (None, 3, {2: 1, 5: 0.5}):
        batch = TASK.sample_batch(seed=5, start=10, count=40, operations=operations)
        fresh = get_task("arithmetic")
        for i in (39, 0, 17):
            assert fresh.sample(seed=5, index=10 + i, operations=operations) == batch[i]
        assert batch[7:9] == TASK.sample_batch(seed=5, start=17, count=2, operations=operations)
        for problem in batch[:5]:  # drawn operations lead to the same problem as asked for
            n = problem.difficulty["operations"]
            assert TASK.sample(seed=5, index=problem.index, operations=n) == problem
    assert TASK.sample(seed=np.int64(1), index=np.int64(2), operations=np.int64(3)) == TASK.sample(
        seed=1, index=2, operations=3
    )


def test_items_are_pinned() -> None:
    """Fixed problem sets hang on this: a change of it must be meant."""
    problem = TASK.sample(seed=0, index=3, operations=3)
    assert problem.prompt == "d 6 ; c 4 ; h 3 ; d * h = a ; d - c = l ; l - a = p ; ? p :"
    assert problem.solution == "d 6 * h 3 = a 4 ; d 6 - c 4 = l 2 ; l 2 - a 4 = p 5 ; ! 5"


def test_problems_are_immutable_hashable_and_pickle() -> None:
    problem = TASK.sample(seed=0, index=0, operations=4)
    with pytest.raises(AttributeError):
        problem.answer = "1"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert len({problem, TASK.sample(seed=0, index=0, operations=4)}) == 1


def test_streams_share_nothing() -> None:
    """Neighbouring seeds are not one stream shifted, and a long stream does not repeat itself."""
    streams = {seed: TASK.sample_batch(seed=seed, start=0, count=400, operations=6) for seed in (-1, 0, 1, 2)}
    keys = [problem.instance_key for stream in streams.values() for problem in stream]
    assert len(set(keys)) == len(keys)
    splits = [TASK.sample(seed=0, index=0, operations=6, split=split) for split in ("train", "validation", "test")]
    assert len({problem.prompt for problem in splits}) == 3
    for setting in ({"leaf_reuse": 0.24}, {"names": 17}, {"question": "first"}):
        assert get_task("arithmetic", **setting).sample(seed=0, index=0, operations=6).instance_key not in keys


@pytest.mark.parametrize(("operations", "operators"), [(1, "+-*"), (2, "+-*"), (4, "+-*"), (6, "+-*"), (3, "*")])
def test_answers_are_near_uniform(operations: int, operators: str) -> None:
    task = get_task("arithmetic", operators=operators)
    answers = Counter(p.answer for p in task.sample_batch(seed=0, start=0, count=20_000, operations=operations))
    for number in range(7):
        assert answers[str(number)] / 20_000 * 7 == pytest.approx(1, abs=0.15)


def test_weights_of_operations_are_kept() -> None:
    batch = TASK.sample_batch(seed=0, start=0, count=4000, operations={1: 3, 2: 1, 3: 0})
    counts = Counter(problem.difficulty["operations"] for problem in batch)
    assert set(counts) == {1, 2}
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.03)
    grid = Counter(p.difficulty["operations"] for p in TASK.sample_batch(seed=0, start=0, count=3000))
    assert tuple(sorted(grid)) == TASK.grid == (1, 2, 3, 4, 5, 6)
    assert min(grid.values()) > 3000 / 6 * 0.8


def test_names_are_drawn_evenly() -> None:
    used = Counter(p.prompt.split(" ")[0] for p in TASK.sample_batch(seed=0, start=0, count=3200, operations=3))
    assert set(used) == set("abcdefghijklmnop")
    assert max(used.values()) < 200 * 1.35 and min(used.values()) > 200 * 0.65


@pytest.mark.parametrize("question", ["last", "first"])
def test_guess_floor(question: str) -> None:
    floor = TASK.guess_floor(4, problems=800)
    assert floor["uniform"] == 1 / 7
    assert floor["best"] == max(floor[name] for name in ("uniform", "majority", "copy_leaf", "nearest_leaf"))
    assert floor["best"] < 0.25 and floor["measured"] == 800
    # The oracle counts hits in the texts.
    task = get_task("arithmetic", modulus=5, distractors=2, question=question, names=8)
    problems = task.sample_batch(seed=1, start=0, count=400, operations=2, split="test")
    readings = [Reading(problem.prompt, 5) for problem in problems]
    leaves = [[r.leaves[name] for name in r.order if name in r.leaves] for r in readings]
    answers = [int(problem.answer) for problem in problems]
    floor, at = task.guess_floor(2, problems=400), 0 if question == "first" else -1
    assert floor["nearest_leaf"] == np.mean([ls[at] == a for ls, a in zip(leaves, answers, strict=True)])
    assert floor["copy_leaf"] == pytest.approx(
        np.mean([ls.count(a) / len(ls) for ls, a in zip(leaves, answers, strict=True)])
    )
    seen = Counter(p.answer for p in task.sample_batch(seed=0, start=0, count=400, operations=2)).most_common(1)[0][0]
    assert floor["majority"] == np.mean([a == int(seen) for a in answers])


def test_gold_order_follows_the_prompt() -> None:
    """The gold trace takes, each time, the first needed fact of the prompt that is ready."""
    for order in ("topological", "leaves_first", "shuffled"):
        task = get_task("arithmetic", order=order, distractors=2)
        for problem in task.sample_batch(seed=0, start=0, count=60, operations=5):
            reading = Reading(problem.prompt, 7)
            known, expected = set(reading.leaves), []
            while len(expected) < 5:
                name = next(
                    n for n in reading.order if n in reading.needed - known and {*reading.operations[n][::2]} <= known
                )
                known.add(name)
                expected.append(name)
            assert problem.solution.split(" ")[6::9] == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"moduls": 7}, "did you mean 'modulus'"),
        ({"zzz": 7}, "known: .*modulus"),
        ({"modulus": 9}, "prime"),
        ({"modulus": 1}, "prime"),
        ({"modulus": "7"}, "integer"),
        ({"modulus": True}, "integer"),
        ({"names": 2}, "names must lie in"),
        ({"names": 53}, "names must lie in"),
        ({"names": 5, "distractors": 3}, "no room"),
        ({"operators": ""}, "operators must be"),
        ({"operators": "++"}, "operators must be"),
        ({"operators": "+/"}, "operators must be"),
        ({"branching": 1.5}, r"chance in \[0, 1\]"),
        ({"branching": float("nan")}, r"chance in \[0, 1\]"),
        ({"sharing": "much"}, r"chance in \[0, 1\]"),
        ({"leaf_reuse": 0.6, "sharing": 0.6}, "must not exceed 1"),
        ({"max_leaves": 1}, "at least 2"),
        ({"distractors": -1}, "not be negative"),
        ({"order": "random"}, "order must be"),
        ({"question": "middle"}, "question must be"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task("arithmetic", **setting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operations": 0}, "at least 1"),
        ({"operations": 2.5}, "integer"),
        ({"operations": True}, "integer"),
        ({"operations": 15}, "ask for at most 14"),
        ({"operations": {15: 1}}, "ask for at most 14"),
        ({"operations": {}}, "positive"),
        ({"operations": {1: 0}}, "positive"),
        ({"operations": {1: -1}}, "negative"),
        ({"operations": {1: float("nan")}}, "negative"),
        ({"index": -1}, "a stream has problems"),
        ({"split": "tests"}, "split must be"),
    ],
)
def test_problems_that_cannot_be_asked_for(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASK.sample(**{"seed": 0, "index": 0, **arguments})


def test_an_empty_cell_says_so() -> None:
    """a + b modulo 2 has three instances; they cannot fill three splits at 80/10/10."""
    task = get_task("arithmetic", modulus=2, operators="+")
    empty = 0
    for split in ("train", "validation", "test"):
        try:
            task.sample(seed=0, index=0, operations=1, split=split)  # type: ignore[arg-type]
        except EmptyCellError as error:
            empty += 1
            assert "other operations" in str(error)
    assert empty >= 1


def test_the_registry() -> None:
    assert "arithmetic" in list_tasks()
    assert all(description and "\n" not in description for description in list_tasks().values())
    with pytest.raises(ValueError, match="did you mean 'arithmetic'"):
        get_task("arithmetics")
    assert isinstance(TASK.sample(seed=0, index=0), Problem)


@pytest.mark.parametrize(
    ("knobs", "operations", "shared"),
    [
        ({}, 2, True),
        ({}, 3, False),
        ({}, 14, False),
        # A chain of sums of new leaves is one structure, however long.
        ({"operators": "+", "branching": 0, "leaf_reuse": 0, "sharing": 0}, 6, True),
        # Of differences, one for each choice of sides but the first node's: 2 ** 7 and 2 ** 8.
        ({"operators": "-", "branching": 0, "leaf_reuse": 0, "sharing": 0, "names": 20}, 8, True),
        ({"operators": "-", "branching": 0, "leaf_reuse": 0, "sharing": 0, "names": 20}, 9, False),
    ],
)
def test_cells_with_fewer_than_200_structures_share_them(knobs: dict[str, Any], operations: int, shared: bool) -> None:
    assert get_task("arithmetic", **knobs).structures_shared(operations) == shared
