"""The gold trace spoilt, in every way that the verdict tells apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from synthetic_tasks.arithmetic.operators import OPERATORS, apply
from synthetic_tasks.arithmetic.trace import Facts, Step
from synthetic_tasks.base import Corruption
from synthetic_tasks.reading import ANSWER

# The spoilt steps, status and place of the first fault; None where the steps have no room for it.
Spoilt: TypeAlias = tuple[list[Step], str, int] | None
Spoil: TypeAlias = Callable[[Facts, Sequence[str], list[Step], int, random.Random], Spoilt]

KINDS = {
    "wrong_operator": "another operator, with its own result",
    "wrong_operator_right_value": "another operator, with the result of the right one",
    "wrong_operand": "another known quantity for an operand, with its own result",
    "wrong_operand_right_value": "another known quantity for an operand, with the right result",
    "swapped_difference": "the operands of a difference in the other order, with their own result",
    "wrong_lookup": "an operand quoted with another value, with its own result",
    "wrong_result": "another result",
    "used_before_defined": "a step before one that it uses",
    "unknown_quantity": "a name that the problem does not have, for an operand",
    "redefined": "a step once more",
    "missing_step": "a step left out",
    "wrong_answer": "another answer",
    "after_the_answer": "a word after the answer",
    "cut": "the end of the trace left out",
}


def corrupt(
    facts: Facts, names: Sequence[str], kind: str, steps: list[Step], render: Callable[[Step], str], rng: random.Random
) -> Corruption | None:
    """The gold steps spoilt in one way; `names`: all that could stand in a problem."""
    answer = facts.values[facts.query]
    if kind == "wrong_answer":
        answer = _other(answer, facts.modulus, rng)
        return _written(kind, steps, render, str(answer), "", None)
    if kind == "after_the_answer":
        return _written(kind, steps, render, f"{answer} {rng.choice(OPERATORS)}", "", None)
    if kind == "cut":
        whole = _written(kind, steps, render, str(answer), "", None).completion.split(" ")
        # Status and place are those of no step: what is left is valid as far as it goes.
        kept = " ".join(whole[: rng.randrange(len(whole))])
        return Corruption(kind=kind, completion=kept, status="", step=None)
    at = rng.randrange(len(steps))
    spoilt = _SPOIL[kind](facts, names, list(steps), at, rng)
    return spoilt and _written(kind, spoilt[0], render, str(answer), spoilt[1], spoilt[2])


def _written(
    kind: str, steps: Sequence[Step], render: Callable[[Step], str], answer: str, status: str, step: int | None
) -> Corruption:
    text = " ".join([*map(render, steps), f"{ANSWER} {answer}"])
    return Corruption(kind=kind, completion=text, status=status, step=step if status else None)


def _other(value: int, modulus: int, rng: random.Random) -> int:
    return (value + rng.randrange(1, modulus)) % modulus


def _own_result(facts: Facts, step: Step) -> Step:
    return step._replace(result=apply(step.operator, step.left_value, step.right_value, facts.modulus))


def _operator(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    steps[at] = steps[at]._replace(operator=rng.choice(OPERATORS.replace(steps[at].operator, "")))
    return steps, "wrong_operator", at


def _operand(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    known = {**facts.given, **{step.target: step.result for step in steps[:at]}}
    others = sorted(known.keys() - {steps[at].left, steps[at].right})
    if not others:
        return None
    other = rng.choice(others)
    steps[at] = steps[at]._replace(left=other, left_value=known[other])
    return steps, "wrong_operand", at


def _with_own_result(spoil: Spoil) -> Spoil:
    def spoiled(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
        found = spoil(facts, names, steps, at, rng)
        if found:
            found[0][at] = _own_result(facts, found[0][at])
        return found

    return spoiled


def _swapped(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    differences = [i for i, step in enumerate(steps) if step.operator == "-"]
    if not differences:
        return None
    at = rng.choice(differences)
    step = steps[at]
    step = step._replace(left=step.right, left_value=step.right_value, right=step.left, right_value=step.left_value)
    steps[at] = _own_result(facts, step)
    return steps, "wrong_operand", at


def _lookup(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    steps[at] = steps[at]._replace(left_value=_other(steps[at].left_value, facts.modulus, rng))
    return steps, "wrong_value", at


def _result(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    steps[at] = steps[at]._replace(result=_other(steps[at].result, facts.modulus, rng))
    return steps, "wrong_value", at


def _too_early(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    place = {step.target: i for i, step in enumerate(steps)}
    # (the step used, the first that uses it)
    users = [(place[used], i) for i, step in enumerate(steps) for used in (step.left, step.right) if used in place]
    if not users:
        return None
    first, second = rng.choice(users)
    steps.insert(first, steps.pop(second))
    return steps, "used_before_defined", first


def _unknown(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    unknown = [name for name in names if name not in facts.true_values]
    if not unknown:
        return None
    steps[at] = steps[at]._replace(left=rng.choice(unknown))
    return steps, "unknown_quantity", at


def _redefined(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    again = rng.randrange(at + 1, len(steps) + 1)
    steps.insert(again, steps[at])
    return steps, "redefined", again


def _missing(facts: Facts, names: Sequence[str], steps: list[Step], at: int, rng: random.Random) -> Spoilt:
    gone = steps.pop(at).target
    user = next((i for i, step in enumerate(steps) if gone in (step.left, step.right)), None)
    return (steps, "", 0) if user is None else (steps, "used_before_defined", user)


_SPOIL: dict[str, Spoil] = {
    "wrong_operator": _with_own_result(_operator),
    "wrong_operator_right_value": _operator,
    "wrong_operand": _with_own_result(_operand),
    "wrong_operand_right_value": _operand,
    "swapped_difference": _swapped,
    "wrong_lookup": _with_own_result(_lookup),
    "wrong_result": _result,
    "used_before_defined": _too_early,
    "unknown_quantity": _unknown,
    "redefined": _redefined,
    "missing_step": _missing,
}
