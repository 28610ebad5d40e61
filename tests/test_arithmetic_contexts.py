"""One structure told in any context, with the sentences read back by patterns of the test's own."""

from __future__ import annotations

import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from valid_traces import Reading, text, valid_trace

from synthetic_tasks import ParseError, Problem, Tokenizer, get_task
from synthetic_tasks.arithmetic.contexts import built_in
from testbed.graph import build
from testbed.schema import TaskSpec
from testbed.spec import parse

PROSE = ("zoo", "school", "festival")
CONTEXTS = ("symbolic", *PROSE)
TASK: Any = get_task("arithmetic", contexts=CONTEXTS, distractors=2, names=20, max_leaves=5)
# The sentences as a reader knows them: quantities, then (leaf, +, -, *, question).
QUANTITY = {"zoo": r"\w+ in \w+", "school": r"\w+ at \w+", "festival": r"\w+ of \w+"}
SENTENCES = {
    "zoo": (
        "the keeper counts (\\d) (Q)", "(Q) are as many as (Q) and (Q) together",
        "(Q) are as many as (Q) without as many as (Q)", "(Q) are as many as (Q) times (Q)",
        "how many (Q) are there [?]",
    ),
    "school": (
        "(\\d) (Q) teach this term", "(Q) plus (Q) make the number of (Q)", "(Q) minus (Q) make the number of (Q)",
        "(Q) times (Q) make the number of (Q)", "what is the number of (Q) [?]",
    ),
    "festival": (
        "(Q) fill (\\d) screenings", "there are as many (Q) as (Q) and (Q) together",
        "there are as many (Q) as (Q) without as many as (Q)", "there are as many (Q) as (Q) times (Q)",
        "how many (Q) are there [?]",
    ),
}  # fmt: skip
SLOTS = {
    "zoo": (("value", "target"), ("target", "left", "right")),
    "school": (("value", "target"), ("left", "right", "target")),
    "festival": (("target", "value"), ("target", "left", "right")),
}


def in_symbols(prompt: str, context: str, letters: dict[str, str]) -> str:
    """A prompt in sentences as the symbolic one, with a letter for each quantity."""
    assert prompt.endswith(" :")
    parts = []
    for sentence in re.findall(r"[^.?]+[.?]", prompt[:-2]):
        told = sentence.strip().removesuffix(" .")
        for form, pattern in zip("=+-*?", SENTENCES[context], strict=True):
            if match := re.fullmatch(pattern.replace("Q", QUANTITY[context]), told):
                parts.append(_symbolic(form, match, context, letters))
                break
        else:
            raise AssertionError(told)
    return f"{' ; '.join(parts)} :"


def _symbolic(form: str, match: re.Match[str], context: str, letters: dict[str, str]) -> str:
    if form == "?":
        return f"? {letters[match[1]]}"
    slot = dict(zip(SLOTS[context][form != "="], match.groups(), strict=True))
    if form == "=":
        return f"{letters[slot['target']]} {slot['value']}"
    return f"{letters[slot['left']]} {form} {letters[slot['right']]} = {letters[slot['target']]}"


def letters_of(problem: Problem, symbolic: Problem) -> dict[str, str]:
    """The quantities' names in a context, each with its letter."""
    return dict(zip(problem.facts.names, symbolic.facts.names, strict=True))


@pytest.mark.parametrize("context", PROSE)
def test_one_structure_is_told_in_every_context(context: str) -> None:
    for index in range(500):
        symbolic, told = (TASK.sample(3, index, context=c) for c in ("symbolic", context))
        letters = letters_of(told, symbolic)
        assert len(set(letters)) == len(letters) and told.context == context
        assert in_symbols(told.prompt, context, letters) == symbolic.prompt
        assert re.sub(QUANTITY[context], lambda m, names=letters: names[m[0]], told.solution) == symbolic.solution
        same = ("structure_key", "instance_key", "answer", "difficulty", "split", "seed", "index")
        assert [getattr(told, name) for name in same] == [getattr(symbolic, name) for name in same]


@pytest.mark.parametrize("context", PROSE)
def test_valid_traces_pass_in_every_context(context: str) -> None:
    rng, different = random.Random(0), 0
    for index in range(300):
        symbolic, told = (TASK.sample(4, index, operations=5, context=c) for c in ("symbolic", context))
        names = {letter: name for name, letter in letters_of(told, symbolic).items()}
        reading = Reading(symbolic.prompt, 7)
        trace = text(valid_trace(reading, rng), told.answer)
        trace = " ".join(names.get(token, token) for token in trace.split(" "))
        different += trace != told.solution
        verdict = TASK.verify(told, trace)
        assert verdict.strict and TASK.verify(told, told.solution).exact
        # Steps stand where their first token does.
        tokens = trace.split(" ")
        starts = [step.position for step in verdict.steps]
        assert starts == [0, *(i + 1 for i, token in enumerate(tokens) if token == ";")][:-1]
    assert different > 200


def test_a_trace_in_the_words_of_another_context_is_none() -> None:
    for index in range(40):
        problems = {context: TASK.sample(0, index, context=context) for context in CONTEXTS}
        for one, problem in problems.items():
            trace = TASK.parse(problem.solution)
            assert len(trace.steps) == problem.difficulty["operations"]
            for other in problems.values():
                verdict = TASK.verify(problem, other.solution)
                assert verdict.strict == (other.context == one)
                assert verdict.answer_correct  # the answer is a number in all of them


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_edited_traces_never_raise_but_parse_errors(data: st.DataObject) -> None:
    problem = TASK.sample(0, data.draw(st.integers(0, 50)), context=data.draw(st.sampled_from(CONTEXTS)))
    tokens = problem.solution.split(" ")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(tokens)))
        word = data.draw(st.sampled_from([*TASK.vocabulary, "", "nonsense"]))
        tokens[at : at + data.draw(st.integers(0, 2))] = [word] * data.draw(st.integers(0, 2))
    edited = " ".join(tokens)
    verdict = TASK.verify(problem, edited)
    try:
        TASK.parse(edited)
    except ParseError as error:
        assert 0 <= error.position <= len(edited.split(" ")) and error.reason
        assert not verdict.strict


def test_contexts_share_common_words_alone_and_a_tokenizer_holds_all() -> None:
    assert set(built_in()) == set(PROSE)
    tokenizer = Tokenizer.for_tasks(TASK)
    for context in CONTEXTS:
        problem = TASK.sample(0, 0, context=context)
        for words in (problem.prompt, problem.solution):
            assert tokenizer.decode(tokenizer.encode(words)) == words
    # An undeclared context is no part of the vocabulary.
    assert "owls" in TASK.vocabulary
    assert "owls" not in get_task("arithmetic", contexts=["symbolic", "school"]).vocabulary


def own(**changes: Any) -> str:
    """A context file with some fields changed; None leaves one out."""
    fields: dict[str, Any] = {
        "name": "harbour", "things": ["tugs", "barges", "ferries", "yachts"],
        "places": ["Dover", "Calais", "Ostend", "Whitby"], "quantity": "{thing} near {place}",
        "leaf": "{value} {target} moor .", "+": "{target} are {left} and {right} together .",
        "-": "{target} are {left} minus {right} .", "*": "{target} are {left} times {right} .",
        "question": "how many {target} are there ?",
    }  # fmt: skip
    fields |= changes
    return "".join(f'"{key}" = {value!r}\n'.replace("'", '"') for key, value in fields.items() if value is not None)


def test_a_context_of_ones_own(tmp_path: Path) -> None:
    paths = [tmp_path / "one.toml", tmp_path / "folder" / "two.toml"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(own())
    tasks = [get_task("arithmetic", contexts=["symbolic", str(path)]) for path in paths]
    problem = tasks[0].sample(0, 5, operations=4, context="harbour")
    assert " near " in problem.prompt and tasks[0].verify(problem, problem.solution).strict
    # What a file holds counts, not where it lies; a record of it makes the same task.
    assert tasks[0].settings == tasks[1].settings
    assert get_task("arithmetic", **asdict(tasks[0].settings)).settings == tasks[0].settings
    paths[1].write_text(own(places=["Dover", "Calais", "Ostend", "Boston"]))
    assert get_task("arithmetic", contexts=["symbolic", str(paths[1])]).settings != tasks[0].settings


def test_keys_follow_the_words_not_the_path(tmp_path: Path) -> None:
    def keys(path: Path, content: str) -> set[str]:
        path.write_text(content)
        spec = {
            "name": "told", "task": {"name": "arithmetic", "settings": {"contexts": ["symbolic", str(path)]}},
            "bands": {"easy": [1]}, "data": {"base": {"documents": 10, "operations": {1: 1}}},
            "stages": {"pretrain": {"kind": "pretrain", "data": "base", "tokens": 1000, "row_length": 64}},
            "arms": {"base": "pretrain"},
        }  # fmt: skip
        return set(build(parse(spec)).nodes)

    first = keys(tmp_path / "a.toml", own())
    assert keys(tmp_path / "b.toml", own()) == first
    assert not keys(tmp_path / "a.toml", own(leaf="{value} {target} anchor .")) & first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"*": None}, r"'\*' missing; a context has name, things"),
        ({"colour": "red"}, "unknown 'colour'"),
        ({"name": "symbolic"}, "name must be a word"),
        ({"things": ["tugs"]}, "things must be a list of at least two words"),
        ({"things": ["tugs", "tugs"]}, "'tugs' stands there twice"),
        ({"things": ["tugs", "big ships"]}, "'big ships' is not one word"),
        ({"things": ["tugs", "many"]}, "'many' is a common word"),
        ({"things": ["tugs", "Dover"]}, "'Dover' stand in both"),
        ({"things": ["tugs", "x"]}, "'x' are marks, digits or letters"),
        ({"leaf": "{value} {target} moor ;"}, "';' are marks"),
        ({"leaf": "{target} moor ."}, r"'leaf' needs the slots \{target\} \{value\}"),
        ({"leaf": "{value} {target} meet {target} ."}, "'leaf' needs the slots"),
        ({"leaf": "{value}{target} moor ."}, "'leaf' needs the slots"),
        ({"leaf": "{value} {target}  moor ."}, "separated by one space"),
        ({"question": "how many {target} tugs ?"}, "'tugs' stand in a form"),
        ({"-": "{target} are {left} times {right} ."}, "two operators are told in the same words"),
        ({"places": ["Dover", "Northgate"]}, "'harbour' and 'zoo' share 'Northgate'"),
        ({"leaf": "{value} {target} counts ."}, "'harbour' and 'zoo' share 'counts'"),
        ({"places": ["Dover", "Calais"]}, "names 8 quantities .* but names is 16"),
    ],
)
def test_a_context_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "harbour.toml"
    path.write_text(own(**changes))
    with pytest.raises(ValueError, match=message) as caught:
        get_task("arithmetic", contexts=["symbolic", str(path), "zoo"])
    assert str(caught.value).startswith("arithmetic: ")


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        (["zooo"], "unknown context 'zooo'; did you mean 'zoo'"),
        (["zoo", "zoo"], "stands there twice"),
        ([], "list of names or files"),
        ("zoo", "list of names or files"),
        ([3], "3 is no name of a context"),
        (["nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_contexts_that_cannot_be(contexts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task("arithmetic", contexts=contexts)


def test_a_context_the_task_was_not_made_with() -> None:
    with pytest.raises(ValueError, match="unknown context 'zoo'"):
        get_task("arithmetic").sample(0, 0, context="zoo")


def test_a_file_that_is_no_context(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(ValueError, match="is not TOML"):
        get_task("arithmetic", contexts=[str(path)])


def test_a_spec_needs_its_context_files_once(tmp_path: Path) -> None:
    path = tmp_path / "harbour.toml"
    path.write_text(own())
    task = TaskSpec(name="arithmetic", settings={"contexts": ["symbolic", str(path)]})
    path.unlink()
    assert task.build().axes["context"] == ("symbolic", "harbour")
    again = TaskSpec.model_validate_json(task.model_dump_json())
    assert again.build().settings == task.build().settings
    with pytest.raises(ValidationError, match="cannot be read"):
        TaskSpec(name="arithmetic", settings={"contexts": [str(path)]})
