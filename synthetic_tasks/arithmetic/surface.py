"""How problems and traces look: in symbols, one token a name, a number, an operator or a mark, or told in a context.

a 4 ; b 2 ; a + b = d ; d - a = f ; ? f :          prompt
a 4 + b 2 = d 6 ; d 6 - a 4 = f 2 ; ! 2            solution
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from string import ascii_letters
from typing import Any, TypeAlias

from synthetic_tasks.arithmetic.contexts import Context
from synthetic_tasks.arithmetic.operators import OPERATORS
from synthetic_tasks.arithmetic.trace import Facts, Reading, Step
from synthetic_tasks.base import ParseError
from synthetic_tasks.reading import ANSWER, PROMPT_END, QUESTION, STEP_END, check, shown

# A step token by token: (a field of Step or a mark, the token's role).
STEP: tuple[tuple[str, str], ...] = (
    ("left", "next"),
    ("left_value", "lookup"),
    ("operator", "operator"),
    ("right", "name"),
    ("right_value", "lookup"),
    ("=", "mark"),
    ("target", "name"),
    ("result", "result"),
    (";", "mark"),
)
MARKS = (STEP_END, "=", QUESTION, PROMPT_END, ANSWER)

# next: a step's first name, which chooses the step; name: its other names; lookup: an operand's value, to be copied;
# result: the value computed; end: the end token after the solution, which evaluation adds.
ROLES = ("next", "name", "operator", "lookup", "result", "answer", "mark", "end")


# What may stand somewhere, with what it means, and that in words.
Slot: TypeAlias = tuple[Mapping[str, Any], str]


class Surface:
    """Renders and reads problems of one modulus and one pool of names, in symbols or told in a context.

    A trace looks alike in all contexts, but for what quantities are called.
    """

    def __init__(self, *, modulus: int, names: int, context: Context | None = None) -> None:
        self._context = context
        self.names = tuple(ascii_letters[:names]) if context is None else context.names(names)
        words = self.names if context is None else context.words
        self.vocabulary = tuple(dict.fromkeys((*MARKS, *OPERATORS, *map(str, range(modulus)), *words)))
        self._numbers = {str(number): number for number in range(modulus)}
        # Tokens of a name; all have as many.
        self._words = words_of_a_name = self.names[0].count(" ") + 1
        name: Slot = dict(zip(self.names, self.names, strict=True)), "a name"
        number: Slot = self._numbers, "a number"
        operator: Slot = dict(zip(OPERATORS, OPERATORS, strict=True)), "an operator"
        kinds = dict.fromkeys(("left", "right", "target"), name) | {"operator": operator}
        kinds |= dict.fromkeys(("left_value", "right_value", "result"), number)
        self._slots: list[Slot] = [kinds.get(field, ({field: field}, repr(field))) for field, _ in STEP]
        fields = [field for field, _ in STEP]
        # Where in a step each field of Step stands.
        self._places = [fields.index(field) for field in Step._fields[:-1]]
        # First token of every field of a step, and where the step ends.
        lengths = [words_of_a_name if field in ("left", "right", "target") else 1 for field in fields]
        self._starts = [0, *accumulate(lengths)]
        self._roles = [role for (_, role), length in zip(STEP, lengths, strict=True) for _ in range(length)]

    def prompt(self, facts: Facts, question: str) -> str:
        names, values, graph = facts.names, facts.values, facts.graph
        if self._context is not None:
            return self._told(self._context, facts, question)
        parts = []
        for i in facts.order:
            node = graph[i]
            parts.append(
                f"{names[node[1]]} {node[0]} {names[node[2]]} = {names[i]}" if node else f"{names[i]} {values[i]}"
            )
        parts.insert(len(parts) if question == "last" else 0, f"{QUESTION} {names[facts.query]}")
        return f"{f' {STEP_END} '.join(parts)} {PROMPT_END}"

    def _told(self, context: Context, facts: Facts, question: str) -> str:
        names, forms = facts.names, dict(context.forms)
        parts = []
        for i in facts.order:
            node = facts.graph[i]
            if node:
                operator, left, right = node
                parts.append(forms[operator].format(target=names[i], left=names[left], right=names[right]))
            else:
                parts.append(forms["leaf"].format(target=names[i], value=facts.values[i]))
        parts.insert(len(parts) if question == "last" else 0, forms["question"].format(target=names[facts.query]))
        return f"{' '.join(parts)} {PROMPT_END}"

    def solution(self, facts: Facts) -> str:
        """The gold trace."""
        names, values, graph = facts.names, facts.values, facts.graph
        parts = []
        for i in facts.gold_order:
            operator, left, right = graph[i]  # type: ignore[misc]
            parts.append(
                f"{names[left]} {values[left]} {operator} {names[right]} {values[right]} = {names[i]} {values[i]} ; "
            )
        return f"{''.join(parts)}{ANSWER} {values[facts.query]}"

    def step(self, step: Step) -> str:
        """One step of a trace."""
        fields = step._asdict()
        return " ".join([str(fields.get(field, field)) for field, _ in STEP])

    def roles(self, facts: Facts) -> list[str]:
        """The role of each token of the solution."""
        return self._roles * len(facts.gold_order) + ["mark", "answer"]

    def read(self, text: str) -> Reading:
        """As much of a completion as is a trace; never raises."""
        tokens = text.split(" ")
        steps: list[Step] = []
        error: ParseError | None = None
        position = 0
        try:
            while position < len(tokens) and tokens[position] != ANSWER:
                steps.append(self._step(tokens, position))
                position += self._starts[-1]
            check(tokens, position, (ANSWER,), "a step or the answer")
            check(tokens, position + 1, self._numbers, "the answer, a number,")
            if position + 2 < len(tokens):
                raise ParseError(position + 2, f"{shown(tokens[position + 2])} stands after the answer")
        except ParseError as raised:
            error = raised
        answer = next(
            (self._numbers[token] for mark, token in pairwise(tokens) if mark == ANSWER and token in self._numbers),
            None,
        )
        return Reading(tuple(steps), answer, error)

    def _step(self, tokens: list[str], position: int) -> Step:
        window = tokens[position : position + self._starts[-1]]
        if self._words > 1:
            window = [" ".join(window[start:end]) for start, end in pairwise(self._starts)]
        try:
            fields = [meaning[token] for (meaning, _), token in zip(self._slots, window, strict=True)]
        except (KeyError, ValueError):
            for start, end, (meaning, what) in zip(self._starts, self._starts[1:], self._slots, strict=False):
                self._check_field(tokens, position + start, end - start, meaning, what)
            raise
        return Step._make([*[fields[place] for place in self._places], position])

    def _check_field(
        self, tokens: list[str], position: int, length: int, meaning: Mapping[str, Any], what: str
    ) -> None:
        if length == 1:
            check(tokens, position, meaning, what)
        elif position + length > len(tokens):
            raise ParseError(min(position, len(tokens)), f"the completion ends where {what} should stand")
        elif (phrase := " ".join(tokens[position : position + length])) not in meaning:
            raise ParseError(position, f"{shown(phrase)} stands where {what} should")
