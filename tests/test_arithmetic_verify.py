"""The verdict against an independent generator of valid traces and of every kind of corruption."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_traces import Claim, Reading, compute, propagate, text, valid_trace

from synthetic_tasks import ParseError, Problem, Verdict, get_task
from synthetic_tasks.arithmetic import ArithmeticTask
from synthetic_tasks.reading import Trace

TASK = get_task("arithmetic", distractors=3, names=20)
assert isinstance(TASK, ArithmeticTask)
PROBLEMS = TASK.sample_batch(seed=0, start=0, count=250, operations=5)


def test_gold_passes() -> None:
    for problem in [*PROBLEMS, *TASK.sample_batch(seed=1, start=0, count=200)]:
        verdict = TASK.verify(problem, problem.solution)
        n = problem.difficulty["operations"]
        assert verdict.strict and verdict.exact and verdict.answer_correct and verdict.process_score == 1
        assert [step.status for step in verdict.steps] == ["ok"] * n and verdict.obligations == n
        assert verdict.first_error is None and verdict.parse_error is None and verdict.missing == ()
        assert [step.position for step in verdict.steps] == list(range(0, 9 * n, 9))


def test_a_thousand_valid_traces_that_differ_from_gold_pass() -> None:
    rng, seen = random.Random(0), 0
    extra_steps = 0
    while seen < 1000:
        problem = rng.choice(PROBLEMS)
        reading = Reading(problem.prompt, 7)
        claims = valid_trace(reading, rng)
        completion = text(claims, problem.answer)
        if completion == problem.solution:
            continue
        seen += 1
        verdict = TASK.verify(problem, completion)
        extras = [claim.target not in reading.needed for claim in claims]
        assert [step.status for step in verdict.steps] == ["extra" if extra else "ok" for extra in extras]
        assert verdict.strict and verdict.exact == (not any(extras)) and verdict.process_score == 1
        extra_steps += sum(extras)
    assert extra_steps > 100


# Each takes a problem and a valid trace and returns the corrupted trace, the place, the status and the detail; or
# nothing where this trace has no room for it.
Corrupted = tuple[list[Claim], int, str, str] | None


def operator(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claim = claims[at]
    other = rng.choice([o for o in "+-*" if o != claim.operator])
    result = compute(other, claim.left_value, claim.right_value, 7)
    claims[at] = replace(claim, operator=other, result=result)
    return claims, at, "wrong_operator", ""


def operator_with_the_right_value(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claims[at] = replace(claims[at], operator=rng.choice([o for o in "+-*" if o != claims[at].operator]))
    return claims, at, "wrong_operator", ""


def operand(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claim = claims[at]
    stated = {**reading.leaves, **{c.target: c.result for c in claims[:at]}}
    other = rng.choice(sorted(stated.keys() - {claim.left, claim.right}) or [""])
    if not other:
        return None
    result = compute(claim.operator, stated[other], claim.right_value, 7)
    claims[at] = replace(claim, left=other, left_value=stated[other], result=result)
    return claims, at, "wrong_operand", ""


def operand_with_the_right_value(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    corrupted = operand(reading, claims.copy(), at, rng)
    if corrupted:
        corrupted[0][at] = replace(corrupted[0][at], result=claims[at].result)
    return corrupted


def operands_doubled(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claim = claims[at]
    claims[at] = replace(claim, right=claim.left, right_value=claim.left_value)
    return claims, at, "wrong_operand", ""


def difference_turned_round(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claim = claims[at]
    if claim.operator != "-":
        return None
    claims[at] = Claim(
        claim.right,
        claim.right_value,
        "-",
        claim.left,
        claim.left_value,
        claim.target,
        compute("-", claim.right_value, claim.left_value, 7),
    )
    return claims, at, "wrong_operand", ""


def quoted_value(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claim, shift = claims[at], rng.randrange(1, 7)
    if rng.random() < 0.5:
        claim = replace(claim, left_value=(claim.left_value + shift) % 7)
    else:
        claim = replace(claim, right_value=(claim.right_value + shift) % 7)
    claims[at] = replace(claim, result=compute(claim.operator, claim.left_value, claim.right_value, 7))
    return claims, at, "wrong_value", "operand"


def result(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claims[at] = replace(claims[at], result=(claims[at].result + rng.randrange(1, 7)) % 7)
    return claims, at, "wrong_value", "result"


def too_early(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    if not at or claims[at - 1].target not in (claims[at].left, claims[at].right):
        return None
    claims[at - 1], claims[at] = claims[at], claims[at - 1]
    return claims, at - 1, "used_before_defined", ""


def unknown_operand(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    unknown = sorted(set("abcdefghijklmnopqrst") - set(reading.order))
    if not unknown:
        return None
    claims[at] = replace(claims[at], left=rng.choice(unknown))
    return claims, at, "unknown_quantity", ""


def unknown_target(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    unknown = sorted(set("abcdefghijklmnopqrst") - set(reading.order))
    if not unknown:
        return None
    claims.insert(at, replace(claims[at], target=rng.choice(unknown)))
    return claims, at, "unknown_quantity", ""


def repeated_step(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claims.insert(rng.randrange(at + 1, len(claims) + 1), claims[at])
    place = max(i for i, claim in enumerate(claims) if claim.target == claims[at].target)
    return claims, place, "redefined", ""


def redefined_with_another_value(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    claims.insert(at + 1, replace(claims[at], result=(claims[at].result + 1) % 7))
    return claims, at + 1, "redefined", ""


def redefined_leaf(reading: Reading, claims: list[Claim], at: int, rng: random.Random) -> Corrupted:
    leaf = rng.choice(sorted(reading.leaves))
    claims.insert(at, replace(claims[at], target=leaf))
    return claims, at, "redefined", ""


CORRUPTIONS: list[Callable[[Reading, list[Claim], int, random.Random], Corrupted]] = [
    operator,
    operator_with_the_right_value,
    operand,
    operand_with_the_right_value,
    operands_doubled,
    difference_turned_round,
    quoted_value,
    result,
    too_early,
    unknown_operand,
    unknown_target,
    repeated_step,
    redefined_with_another_value,
    redefined_leaf,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_a_corruption_gets_its_status_where_it_is_and_only_ok_or_inherited_after_it(
    corrupt: Callable[[Reading, list[Claim], int, random.Random], Corrupted],
) -> None:
    rng, tried, inherited = random.Random(1), 0, 0
    while tried < 120:
        problem = rng.choice(PROBLEMS)
        reading = Reading(problem.prompt, 7)
        claims = valid_trace(reading, rng)
        corrupted = corrupt(reading, claims.copy(), rng.randrange(len(claims)), rng)
        if corrupted is None:
            continue
        tried += 1
        claims, at, status, detail = corrupted
        claims = propagate(reading, claims, at)
        verdict = TASK.verify(problem, text(claims, problem.answer))

        def expected(i: int, claim: Claim, reading: Reading = reading, at: int = at, status: str = status) -> str:
            if i == at:
                return status
            quoted = ((claim.left, claim.left_value), (claim.right, claim.right_value))
            if any(reading.values[name] != value for name, value in quoted):
                return "inherited"
            return "ok" if claim.target in reading.needed else "extra"

        statuses = [expected(i, claim) for i, claim in enumerate(claims)]
        assert [step.status for step in verdict.steps] == statuses
        assert verdict.steps[at].detail == detail
        assert verdict.first_error == at and not verdict.strict and not verdict.exact
        assert verdict.answer_correct  # the answer given is the right one all the same
        met = {claim.target for claim, s in zip(claims, statuses, strict=True) if s == "ok"}
        assert set(verdict.missing) == reading.needed - met
        assert verdict.process_score == pytest.approx(len(met) / (5 + 1))
        inherited += statuses.count("inherited")
    if corrupt in (operator, operand, quoted_value, result, difference_turned_round):
        assert inherited > 20


def test_a_step_left_out() -> None:
    rng = random.Random(2)
    for problem in PROBLEMS[:100]:
        reading = Reading(problem.prompt, 7)
        claims = valid_trace(reading, rng, extras=0)
        at = rng.randrange(5)
        gone = claims.pop(at)
        verdict = TASK.verify(problem, text(claims, problem.answer))
        assert gone.target in verdict.missing and not verdict.strict and verdict.answer_correct
        uses = [gone.target in (claim.left, claim.right) for claim in claims]
        assert [step.status for step in verdict.steps] == ["used_before_defined" if use else "ok" for use in uses]
        assert verdict.process_score == pytest.approx((4 - sum(uses)) / (5 + sum(uses)))


def test_answers() -> None:
    problem = PROBLEMS[0]
    steps = problem.solution.rsplit(" ", 2)[0]
    right, wrong = problem.answer, str((int(problem.answer) + 1) % 7)
    cases = {
        f"! {right}": (True, False, None),
        f"{steps} ! {wrong}": (False, False, None),
        f"{steps} ! {right} ;": (True, False, 47),
        f"{steps} ! {right} ! {right}": (True, False, 47),
        f"{steps} ! {wrong} ! {right}": (False, False, 47),
        f"{steps} ! ! {right}": (True, False, 46),
        f"{steps} ! a {right} ! {right}": (True, False, 46),
        f"{steps} ! {right}": (True, True, None),
        f"{steps} !": (False, False, 46),
        steps: (False, False, 45),
        f"{steps} ! {right} ": (True, False, 47),
        f" {problem.solution}": (True, False, 0),
        problem.solution.replace(" ; ", "  ; ", 1): (True, False, 8),
        f"{steps} ! {right}\n": (False, False, 46),
        f"{steps} ! 0{right}": (False, False, 46),
        f"{steps} ! -{right}": (False, False, 46),
        "": (False, False, 0),
    }
    for completion, (answer_correct, strict, position) in cases.items():
        verdict = TASK.verify(problem, completion)
        assert (verdict.answer_correct, verdict.strict) == (answer_correct, strict), completion
        assert (verdict.parse_error.position if verdict.parse_error else None) == position, completion
        assert verdict.strict or completion != problem.solution
        # What was read before the error is judged.
        if completion.startswith(steps):
            assert verdict.process_score == 1 and len(verdict.steps) == 5
    assert TASK.verify(problem, f"! {right}").process_score == 0


def test_a_completion_that_was_cut_off_is_not_strict() -> None:
    verdict = TASK.verify(PROBLEMS[0], PROBLEMS[0].solution, ended=False)
    assert not verdict.strict and not verdict.exact and verdict.answer_correct and verdict.process_score == 1


VOCABULARY = st.sampled_from(TASK.vocabulary)
NAME, NUMBER = "[a-t]", "[0-6]"
STEP = f"{NAME} {NUMBER} [-+*] {NAME} {NUMBER} = {NAME} {NUMBER} ; "
GRAMMAR = re.compile(f"({STEP})*! {NUMBER}")


@st.composite
def edited(draw: st.DrawFn) -> tuple[Problem, str]:
    """A gold trace with some tokens replaced, deleted or put in."""
    problem = draw(st.sampled_from(PROBLEMS[:20]))
    tokens = problem.solution.split(" ")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(tokens)))
        new = draw(st.lists(st.one_of(VOCABULARY, st.text(max_size=3)), max_size=2))
        tokens[at : at + draw(st.integers(0, 9))] = new
    return problem, " ".join(tokens)


def check(problem: Problem, completion: str) -> Verdict:
    """What must hold for any completion at all."""
    verdict = TASK.verify(problem, completion)
    whole = GRAMMAR.fullmatch(completion) is not None
    assert (verdict.parse_error is None) == whole
    try:
        trace = TASK.parse(completion)
        assert whole and isinstance(trace, Trace) and len(trace.steps) == len(verdict.steps)
    except ParseError as error:
        assert not whole and error.reason
        assert 0 <= error.position <= len(completion.split(" "))
        assert str(error) == str(verdict.parse_error)
    first = re.search(f"(?<![^ ])! ({NUMBER})(?![^ ])", completion)
    assert verdict.answer_correct == (first is not None and first[1] == problem.answer)
    statuses = [step.status for step in verdict.steps]
    assert set(statuses) <= set(TASK.statuses)
    sound = set(statuses) <= {"ok", "extra"} and not verdict.missing
    assert verdict.strict == (whole and verdict.answer_correct and sound)
    assert verdict.exact == (verdict.strict and "extra" not in statuses)
    assert 0 <= verdict.process_score <= 1 and (verdict.process_score == 1 or not verdict.strict)
    TASK.interplay(problem, completion)
    return verdict


@given(edited())
@settings(max_examples=300, deadline=None)
def test_edited_traces(case: tuple[Problem, str]) -> None:
    check(*case)


@given(st.one_of(st.text(), st.lists(VOCABULARY, max_size=30).map(" ".join), st.text("! 012ab;", max_size=12)))
@settings(max_examples=300, deadline=None)
def test_any_text_at_all(completion: str) -> None:
    check(PROBLEMS[0], completion)


@pytest.mark.parametrize("completion", ["\ud800", "! " * 200_000, " " * 200_000, "a" * 1_000_000, "! \u0663", "! ²"])
def test_hostile_text(completion: str) -> None:
    assert TASK.verify(PROBLEMS[0], completion).parse_error is not None
    with pytest.raises(ParseError) as caught:
        TASK.parse(completion)
    assert len(str(caught.value)) < 200


def test_a_trace_that_parses_is_told_in_full() -> None:
    trace = TASK.parse("a 4 + b 2 = d 6 ; ! 2")
    assert trace.steps[0]._asdict() == {
        "left": "a",
        "left_value": 4,
        "operator": "+",
        "right": "b",
        "right_value": 2,
        "target": "d",
        "result": 6,
        "position": 0,
    }
    assert trace.answer == 2


def test_roles_name_what_each_token_does() -> None:
    for problem in PROBLEMS[:50]:
        tokens, roles = problem.solution.split(" "), TASK.token_roles(problem)
        assert len(tokens) == len(roles) and set(roles) <= set(TASK.roles) and "end" in TASK.roles
        by_role = {role: [t for t, r in zip(tokens, roles, strict=True) if r == role] for role in TASK.roles}
        claims = re.findall(r"(\w) (\d) (.) (\w) (\d) = (\w) (\d) ;", problem.solution)
        assert by_role["next"] == [claim[0] for claim in claims]
        assert by_role["name"] == [name for claim in claims for name in (claim[3], claim[5])]
        assert by_role["lookup"] == [value for claim in claims for value in (claim[1], claim[4])]
        assert by_role["operator"] == [claim[2] for claim in claims]
        assert by_role["result"] == [claim[6] for claim in claims]
        assert by_role["answer"] == [problem.answer]
        assert set(by_role["mark"]) == {"=", ";", "!"}


def test_interplay_conventions() -> None:
    """On `a 4, b 2, d = a + b, f = d - a, e = a * b`: faults counted by hand."""
    task = get_task("arithmetic")
    assert isinstance(task, ArithmeticTask)
    problem = next(
        p
        for p in task.sample_batch(seed=0, start=0, count=400, operations=2)
        if (reading := Reading(p.prompt, 7)).operations[reading.query][1] == "-" and len(reading.leaves) == 3
    )
    gold = problem.solution
    first, last, answer = gold.split(" ; ")
    score = task.interplay(problem, gold)
    assert score.process_accuracy == 1 and score.verified and score.process_reward == 1 and score.strict_reward == 1
    # A wrong operator with the right value passes both conventions, and not our verdict.
    assert task.interplay(problem, gold.replace(" - ", " + ")).verified
    assert not task.verify(problem, gold.replace(" - ", " + ")).strict
    # A step missing: one of two nodes; in the reward one fault of two. The last step now uses what was never defined.
    score = task.interplay(problem, f"{last} ; {answer}")
    assert (score.missing, score.wrong_parents, score.wrong_value) == (1, 1, 0)
    assert score.process_accuracy == 0 and score.process_reward == 0 and not score.verified
    assert score.reward(0.2) == pytest.approx(0.2) and score.strict_reward == 0
    # An extra definition is free in the evaluation and a fault in the reward.
    unused = next(name for name in "abcdefghijklmnop" if name not in problem.prompt)
    score = task.interplay(problem, f"{first.rsplit(' ', 2)[0]} {unused} 3 ; {gold}")
    assert score.verified and score.extra == 1 and score.process_reward == 0.5 and score.strict_reward == 0
    assert score.reward(0.2) == pytest.approx(0.2 + 0.8 * 0.5)
    # The last definition wins, where our verdict says redefined.
    assert task.interplay(problem, f"{first[:-1]}{(int(first[-1]) + 1) % 7} ; {gold}").verified
    # A wrong answer zeroes the reward, whatever the process.
    wrong = task.interplay(problem, f"{first} ; {last} ; ! {(int(problem.answer) + 1) % 7}")
    assert wrong.process_accuracy == 1 and not wrong.verified and wrong.reward(0.5) == 0 and wrong.process_reward == 0.5
    with pytest.raises(ValueError, match="alpha"):
        wrong.reward(2)
