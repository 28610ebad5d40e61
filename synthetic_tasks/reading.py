"""Reading a completion token by token: a trace as far as it goes, and why no further."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from synthetic_tasks.base import ParseError

StepT = TypeVar("StepT")
AnswerT = TypeVar("AnswerT")
V = TypeVar("V")

# Marks that all families share: the end of a step, a question, the end of a prompt, and what announces the answer.
STEP_END, QUESTION, PROMPT_END, ANSWER = ";", "?", ":", "!"
DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Reading(Generic[StepT, AnswerT]):
    """A completion as far as it can be read; whole if there is no error."""

    steps: tuple[StepT, ...]
    # The first complete answer, wherever it stands.
    answer: AnswerT | None
    error: ParseError | None


@dataclass(frozen=True)
class Trace(Generic[StepT, AnswerT]):
    """A completion that is a trace from end to end."""

    steps: tuple[StepT, ...]
    answer: AnswerT


class Cursor:
    """A place in a text's tokens. Everything it cannot take is a ParseError at that place."""

    def __init__(self, text: str, position: int = 0) -> None:
        self.tokens = text.split(" ")
        self.position = position

    @property
    def token(self) -> str | None:
        """The token here, None at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, meaning: Mapping[str, V], what: str) -> V:
        """What the token here means; the cursor moves on."""
        check(self.tokens, self.position, meaning, what)
        self.position += 1
        return meaning[self.tokens[self.position - 1]]

    def expect(self, mark: str) -> None:
        check(self.tokens, self.position, (mark,), repr(mark))
        self.position += 1

    def number(self, what: str = "a number") -> int:
        """Digits, the highest first and not 0 unless it is alone."""
        start = self.position
        check(self.tokens, start, DIGITS, what)
        while self.token in DIGITS:
            self.position += 1
        digits = self.tokens[start : self.position]
        if digits[0] == "0" and len(digits) > 1:
            raise ParseError(start, f"{what} begins with 0")
        if len(digits) > 18:
            raise ParseError(start, f"{what} has {len(digits)} digits")
        return int("".join(digits))

    def end(self) -> None:
        """Nothing may follow."""
        if self.token is not None:
            raise ParseError(self.position, f"{shown(self.token)} stands after the answer")


def digits(number: int) -> str:
    """A number that is not negative as tokens: 12 is `1 2`."""
    return " ".join(str(number))


def check(tokens: list[str], position: int, allowed: Container[str], what: str) -> None:
    """Raises ParseError where what is allowed does not stand at the position."""
    if position >= len(tokens):
        raise ParseError(position, f"the completion ends where {what} should stand")
    if tokens[position] not in allowed:
        raise ParseError(position, f"{shown(tokens[position])} stands where {what} should")


def shown(token: str) -> str:
    return repr(token) if len(token) <= 20 else f"{token[:20]!r}..."
