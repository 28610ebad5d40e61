"""The nouns of a task: problem, trace, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Split = Literal["train", "validation", "test"]


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
    context: str
    # What has to be reasoned through: shape and operators alone.
    structure_key: str
    # The problem up to renaming and order of facts, with values.
    instance_key: str
    seed: int
    index: int
    split: Split
    facts: Any = field(hash=False)


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


class Task(Protocol):
    """A family of problems. Sampling is a function of (seed, index) and the arguments; it keeps no state."""

    name: str
    # Raised when the same settings, seed and index give another problem, trace or verdict: results under the old one
    # stay unused.
    epoch: int
    # A dataclass of everything that can be set; the name and this make the task again.
    settings: Any
    # Every token that a prompt or solution of this task can hold, in a fixed order.
    vocabulary: tuple[str, ...]
    # Every status a step can have, in a fixed order.
    statuses: tuple[str, ...]
    # Every role a solution token can have, in a fixed order; `end` is the end token's.
    roles: tuple[str, ...]
    # Operations that are drawn, evenly, where none are asked for.
    grid: tuple[int, ...]

    def sample(
        self,
        *,
        seed: int,
        index: int,
        operations: int | Mapping[int, float] | None = None,
        split: Split = "train",
    ) -> Problem:
        """Problem `index` of stream `seed`. Operations: a number, weights of several, or none for the grid."""
        ...

    def sample_batch(
        self,
        *,
        seed: int,
        start: int,
        count: int,
        operations: int | Mapping[int, float] | None = None,
        split: Split = "train",
    ) -> Sequence[Problem]:
        """Problems `start .. start + count - 1`, each as `sample` gives it, bit for bit."""
        ...

    def parse(self, completion: str) -> Any:
        """What a completion claims, step by step. Raises ParseError and nothing else."""
        ...

    def verify(self, problem: Problem, completion: str, *, ended: bool = True) -> Verdict:
        """The verdict on a completion without its end token; `ended`: it had one. Never raises."""
        ...

    def token_roles(self, problem: Problem) -> Sequence[str]:
        """The role of each token of the solution."""
        ...

    def structures_shared(self, operations: int) -> bool:
        """Whether the cell has so few structures that splits are disjoint in instances only."""
        ...

    def lookup_guess(self, problem: Problem) -> float:
        """Accuracy, over the solution's `lookup` tokens, of guessing without having learnt to look up."""
        ...

    def guess_floor(self, operations: int, *, split: Split = "test", problems: int = 2000) -> Mapping[str, float]:
        """Accuracy of each way to guess an answer, and the `best` of them."""
        ...
