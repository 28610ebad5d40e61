"""The verdict, and what spoils a trace.

A line is judged against the program and what the line before it reached, never against the gold trace. The first that
holds is its status:

too_many       every turn has been taken
wrong_rule     it is another rule's turn
wrong_state    it does not start from the symbol that was reached (or given)
wrong_result   the rule does not lead there
inherited      all right, but the symbol it starts from was reached wrongly
ok             valid

Every turn is an obligation; only an `ok` line meets it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from synthetic_tasks.base import Corruption, StepVerdict, Verdict
from synthetic_tasks.family import conclude
from synthetic_tasks.reading import ANSWER, STEP_END, Reading

if TYPE_CHECKING:
    from synthetic_tasks.state.task import Facts

STATUSES = ("ok", "inherited", "wrong_rule", "wrong_state", "wrong_result", "too_many")
KINDS = {
    "wrong_rule": "another rule, with its own result where it has one",
    "wrong_state": "another symbol to start from, with its own result",
    "wrong_result": "another result",
    "too_many": "one line more than there are turns",
    "missing_step": "a line left out",
    "wrong_answer": "another answer",
    "after_the_answer": "a word after the answer",
    "cut": "the end of the trace left out",
}


class Step(NamedTuple):
    """One line: the rule, the symbol known and the symbol reached."""

    rule: str
    known: str
    reached: str
    # Position of the line's first token.
    position: int

    @property
    def text(self) -> str:
        return f"{self.rule} {self.known} {self.reached} {STEP_END}"


def judge(facts: Facts, reading: Reading[Step, str], answer: str, *, ended: bool) -> Verdict:
    """The verdict on a completion as far as it was read; not `ended`: it was cut off, so it is not strict."""
    gold = facts.gold
    turns = [f"turn {i + 1}" for i in range(len(gold))]
    steps: list[StepVerdict] = []
    met: set[str] = set()
    reached = gold[0].known
    for i, line in enumerate(reading.steps):
        if i >= len(gold):
            status = "too_many"
        elif line.rule != gold[i].rule:
            status = "wrong_rule"
        elif line.known != reached:
            status = "wrong_state"
        elif line.reached != facts.apply(line.rule, line.known):
            status = "wrong_result"
        elif line.known != gold[i].known:
            status = "inherited"
        else:
            status = "ok"
            met.add(turns[i])
        steps.append(StepVerdict(status, line.position, turns[i] if i < len(turns) else ""))
        reached = line.reached
    return conclude(
        steps, obligations=turns, met=met, answer_correct=reading.answer == answer, ended=ended, error=reading.error
    )


def corrupt(
    facts: Facts, kind: str, answer: str, symbols: Sequence[str], rules: Sequence[str], rng: random.Random
) -> Corruption | None:
    """The gold trace spoilt in one way of KINDS."""
    lines = list(facts.gold)
    at = rng.randrange(len(lines))
    line = lines[at]
    status, step, end = kind, at, ""
    if kind == "wrong_rule":
        rule = rng.choice([rule for rule in rules if rule != line.rule])
        lines[at] = line._replace(rule=rule, reached=facts.apply(rule, line.known) or line.reached)
    elif kind == "wrong_state":
        known = _other(line.known, symbols, rng)
        lines[at] = line._replace(known=known, reached=facts.apply(line.rule, known) or "")
    elif kind == "wrong_result":
        lines[at] = line._replace(reached=_other(line.reached, symbols, rng))
    elif kind == "too_many":
        step = len(lines)
        reached = lines[-1].reached
        lines.append(line._replace(known=reached, reached=facts.apply(line.rule, reached) or ""))
    elif kind == "missing_step":
        lines.pop(at)
        status, step = _fault_without(facts.gold, at)
    else:
        status, step = "", -1
        if kind == "wrong_answer":
            answer = _other(answer, symbols, rng)
        elif kind == "after_the_answer":
            end = f" {rng.choice(list(symbols))}"
    text = " ".join([*[line.text for line in lines], ANSWER, answer]) + end
    if kind == "cut":
        words = text.split(" ")
        text = " ".join(words[: rng.randrange(len(words))])
    return Corruption(kind=kind, completion=text, status=status, step=step if status else None)


def _fault_without(gold: Sequence[Step], at: int) -> tuple[str, int]:
    """Status and place of the first fault where the line `at` is left out; empty where all that follow are right."""
    for i in range(at, len(gold) - 1):
        line, turn = gold[i + 1], gold[i]
        reached = turn.known if i == at else turn.reached
        if line.rule != turn.rule:
            return "wrong_rule", i
        if line.known != reached:
            return "wrong_state", i
        if line.known != turn.known:
            return "inherited", i
    return "", -1


def _other(symbol: str, symbols: Sequence[str], rng: random.Random) -> str:
    return rng.choice([other for other in symbols if other != symbol])
