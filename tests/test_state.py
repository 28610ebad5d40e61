"""The state family against a reader of the prompt that shares no code with it, and sympy's permutations."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.combinatorics import Permutation

from synthetic_tasks import EmptyCellError, ParseError, get_task
from synthetic_tasks.state.keys import instance_key, structure_key

TASK: Any = get_task("state")
DIRECTIONS = ("forward", "inverse")


def read(prompt: str) -> tuple[dict[str, str], list[str], str, str]:
    """Images of the symbols by rule, the program, `from` or `to`, and the symbol that is known."""
    *rules, question = prompt.removeprefix("state ").removesuffix(" :").split(" ; ")
    tables = {rule.split(" = ")[0]: rule.split(" = ")[1].replace(" ", "") for rule in rules}
    *program, word, known = question.split(" ")
    return tables, program, word, known


def solve(prompt: str) -> tuple[str, str]:
    """Trace and answer."""
    tables, program, word, known = read(prompt)
    symbols = "abcdefghij"
    lines = []
    for rule in program if word == "from" else program[::-1]:
        table = tables[rule]
        reached = table[symbols.index(known)] if word == "from" else symbols[table.index(known)]
        lines.append(f"{rule} {known} {reached} ;")
        known = reached
    return " ".join([*lines, f"! {known}"]), known


def check(task: Any, count: int) -> None:
    for direction in DIRECTIONS:
        for problem in task.sample_batch(1, 0, count, direction=direction):
            trace, answer = solve(problem.prompt)
            assert (problem.solution, problem.answer) == (trace, answer)
            tables, program, word, known = read(problem.prompt)
            assert len(program) == problem.difficulty["operations"] and (word == "to") == (direction == "inverse")
            whole = Permutation(task.settings.size - 1)
            for rule in program:
                whole = whole * Permutation(["abcdefghij".index(symbol) for symbol in tables[rule]])
            image = whole if word == "from" else ~whole
            assert "abcdefghij"[image("abcdefghij".index(known))] == answer
            verdict = task.verify(problem, trace)
            assert verdict.strict and verdict.exact and verdict.process_score == 1
            assert verdict.obligations == len(program) and {step.status for step in verdict.steps} == {"ok"}


@pytest.mark.parametrize("knobs", [{}, {"size": 10, "rules": 6}, {"size": 3, "rules": 1}])
def test_gold_is_what_an_independent_reader_finds(knobs: dict[str, int]) -> None:
    check(get_task("state", **knobs), 250)


@pytest.mark.long
def test_gold_is_what_an_independent_reader_finds_at_length() -> None:
    check(TASK, 5000)


def test_no_other_trace_is_strict() -> None:
    """Every turn has one right line, so whatever differs from gold in one token is wrong."""
    for direction in DIRECTIONS:
        for problem in TASK.sample_batch(2, 0, 12, operations={1: 1, 3: 1, 5: 1}, direction=direction):
            tokens = problem.solution.split(" ")
            for at in range(len(tokens)):
                for word in TASK.vocabulary:
                    if word != tokens[at]:
                        edited = " ".join([*tokens[:at], word, *tokens[at + 1 :]])
                        assert not TASK.verify(problem, edited).strict, (problem.prompt, edited)
                assert not TASK.verify(problem, " ".join(tokens[:at] + tokens[at + 1 :])).strict
            assert not TASK.verify(problem, problem.solution, ended=False).strict


@pytest.mark.parametrize(
    ("completion", "statuses", "right"),
    [
        ("p a b ; q b a ; ! a", ["ok", "ok"], True),
        ("p a c ; q c b ; ! a", ["wrong_result", "inherited"], True),
        ("p a c ; q b a ; ! a", ["wrong_result", "wrong_state"], True),
        ("q a b ; q b a ; ! a", ["wrong_rule", "ok"], True),
        ("p b c ; q c b ; ! b", ["wrong_state", "inherited"], False),
        ("p a b ; q b a ; q a c ; ! a", ["ok", "ok", "too_many"], True),
        ("r a b ; q b a ; ! a", ["wrong_rule", "ok"], True),
        ("! a", [], True),
        ("p a b ; ! c ! a", ["ok"], False),
    ],
)
def test_statuses(completion: str, statuses: list[str], right: bool) -> None:
    problem = _problem()
    assert problem.prompt.endswith("p q from a :")
    verdict = TASK.verify(problem, completion)
    assert [step.status for step in verdict.steps] == statuses and verdict.answer_correct == right
    assert verdict.strict == (statuses == ["ok", "ok"] and right)


def _problem() -> Any:
    """p takes a to b and b to c; q takes b to a, c to b, a to c; p's turn, then q's, from a."""
    import dataclasses

    from synthetic_tasks.state import Facts

    tables = ((1, 2, 0, 3, 4), (2, 0, 1, 3, 4))
    facts = Facts(tables, ("p", "q"), (0, 1), 0, False)
    prompt = "state p = b c a d e ; q = c a b d e ; p q from a :"
    assert solve(prompt) == ("p a b ; q b a ; ! a", "a")
    return dataclasses.replace(TASK.sample(0, 0), facts=facts, prompt=prompt, solution=solve(prompt)[0], answer="a")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_anything_can_be_read(data: st.DataObject) -> None:
    problem = TASK.sample(0, data.draw(st.integers(0, 20)))
    words = st.sampled_from([*TASK.vocabulary, "", "word"])
    text = data.draw(
        st.one_of(st.text(max_size=40), st.lists(words, max_size=30).map(" ".join), st.just(problem.solution))
    )
    verdict = TASK.verify(problem, text)
    assert 0 <= verdict.process_score <= 1 and verdict.strict == (text == problem.solution)
    try:
        trace = TASK.parse(text)
    except ParseError as error:
        assert 0 <= error.position <= len(text.split(" "))
    else:
        assert len(trace.steps) == len(verdict.steps)


def test_directions_share_a_structure_and_no_instance() -> None:
    for index in range(100):
        forward, inverse = (TASK.sample(7, index, direction=direction) for direction in DIRECTIONS)
        assert forward.structure_key == inverse.structure_key and forward.instance_key != inverse.instance_key
        assert forward.facts.program == inverse.facts.program and forward.facts.start == inverse.facts.start


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_keys_do_not_mind_names(data: st.DataObject) -> None:
    size, rules = data.draw(st.integers(3, 6)), data.draw(st.integers(1, 4))
    tables = [tuple(data.draw(st.permutations(range(size)))) for _ in range(rules)]
    program = data.draw(st.lists(st.integers(0, rules - 1), min_size=1, max_size=6))
    start = data.draw(st.integers(0, size - 1))
    place, order = data.draw(st.permutations(range(size))), data.draw(st.permutations(range(rules)))
    renamed: list[Any] = [None] * rules
    for rule, table in enumerate(tables):
        images = [0] * size
        for symbol, image in enumerate(table):
            images[place[symbol]] = place[image]
        renamed[order[rule]] = tuple(images)
    told = [order[rule] for rule in program]
    assert structure_key(program) == structure_key(told)
    assert instance_key(tables, program, start) == instance_key(renamed, told, place[start])


def test_keys_tell_programs_and_answers_apart() -> None:
    programs = [p for n in (1, 2, 3, 4) for p in product(range(3), repeat=n)]
    shapes = {tuple(p.index(rule) for rule in p) for p in programs}
    assert len({structure_key(p) for p in programs}) == len(shapes)
    # Instances with one key have traces of one form: here, those of two rules on three symbols.
    forms: dict[str, set[Any]] = {}
    for one, other in product(permutations(range(3)), repeat=2):
        states = [0]
        for table in (one, other, one):
            states.append(table[states[-1]])
        shape = tuple(states.index(state) for state in states)
        forms.setdefault(instance_key((one, other), (0, 1, 0), 0), set()).add(shape)
    assert all(len(shapes) == 1 for shapes in forms.values()) and len(forms) > 10


def test_few_structures_are_shared_and_split_by_instance() -> None:
    assert [TASK.structures_shared(n) for n in (1, 4, 8, 9, 12, 40)] == [True, True, True, False, False, False]
    assert get_task("state", rules=1).structures_shared(100)
    keys = {split: set() for split in ("train", "validation", "test")}  # type: ignore[var-annotated]
    for split, found in keys.items():
        for direction in DIRECTIONS:
            for problem in TASK.sample_batch(0, 0, 200, operations=2, split=split, direction=direction):
                facts = problem.facts
                found.add(instance_key(facts.tables, facts.program, facts.start))
    assert not keys["train"] & keys["validation"] and not keys["test"] & (keys["train"] | keys["validation"])
    with pytest.raises(EmptyCellError, match="raise size or rules"):
        for seed in range(20):
            get_task("state", size=3, rules=1).sample(seed, 0, operations=1, split="test")
            get_task("state", size=3, rules=1).sample(seed, 0, operations=1, split="validation")


def test_a_batch_and_another_process_draw_the_same() -> None:
    batch = TASK.sample_batch(5, 10, 20)
    assert batch == [TASK.sample(5, index) for index in range(10, 30)]
    code = "from synthetic_tasks import get_task; print(*[p.prompt for p in get_task('state').sample_batch(5, 10, 20)])"
    out = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, check=True)
    assert out.stdout.decode().strip() == " ".join(problem.prompt for problem in batch)


def test_guess_floor() -> None:
    floor = TASK.guess_floor(6, problems=1000)
    assert floor["uniform"] == pytest.approx(0.2) and floor["best"] < 0.3
    problems = TASK.sample_batch(1, 0, 1000, operations=6, split="test")
    assert floor["copy"] == sum(read(p.prompt)[3] == p.answer for p in problems) / 1000


@pytest.mark.parametrize(
    ("knobs", "message"),
    [({"size": 2}, r"size must lie in \[3, 10\]"), ({"rules": 7}, "rules must lie"), ({"rules": "2"}, "integer")],
)
def test_settings_that_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task("state", **knobs)
    with pytest.raises(ValueError, match="at most 256 turns"):
        TASK.sample(0, 0, operations=300)
