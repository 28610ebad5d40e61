"""The nouns of a task: problem, verdict, corruption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Split = Literal["train", "validation", "test", "rl", "held_out"]


class ParseError(ValueError):
    """A completion that is not a trace: `position` is the token, counted from 0, where reading stopped."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"token {position}: {reason}")
        self.position = position
        self.reason = reason


class EmptyCellError(ValueError):
    """No structure of a cell falls in the split, or the settings leave no problem of that difficulty."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a task. Immutable; `facts` is the task's own view of it (never read outside the task)."""

    task: str
    prompt: str
    solution: str
    answer: str
    # Exact measures: `operations` is the difficulty; `depth`, `width`, ... are recorded beside it.
    difficulty: Mapping[str, int] = field(hash=False)
    # Value of every axis of its cell, such as the direction of the question.
    axes: Mapping[str, str] = field(hash=False)
    # What has to be reasoned through: shape and operators alone.
    structure_key: str
    # The problem up to renaming and order of facts, with values.
    instance_key: str
    seed: int
    index: int
    split: Split
    facts: Any = field(hash=False)
    # With these the registry makes its task again.
    settings: Any = field(repr=False)

    @property
    def context(self) -> str:
        """The words it is told in; `symbolic` where its family has no other."""
        return self.axes.get("context", "symbolic")


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """A trace spoilt in one way, and what a verdict has to say of it."""

    kind: str
    completion: str
    # Status of the first step that is neither ok nor extra; empty where no step is at fault, but something is missing
    # or cannot be read.
    status: str
    # Which step that is, counted from 0.
    step: int | None


class StepVerdict(NamedTuple):
    """What one step is: `ok`, `extra`, `inherited`, `redefined`, or a reason of the task's family."""

    status: str
    # Position of the step's first token in the completion.
    position: int
    # Obligation the step meets or would meet, where there is one.
    target: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Each step's validity and whether the valid steps suffice. Every field is defined for any completion."""

    steps: tuple[StepVerdict, ...]
    # Obligations of the problem, and those that no valid step met.
    obligations: int
    missing: tuple[str, ...]
    # The first complete answer is right; nothing else counts.
    answer_correct: bool
    # All parsed, end right after the answer, answer right, nothing missing, invalid, inherited or redefined.
    strict: bool
    # Strict without extra steps.
    exact: bool
    # Obligations met validly / (obligations + invalid steps).
    process_score: float
    # Index of the first step that is neither ok nor extra.
    first_error: int | None
    parse_error: ParseError | None = None

    def count(self, status: str) -> int:
        return sum(step.status == status for step in self.steps)
