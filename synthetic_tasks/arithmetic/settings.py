"""What can be set about the arithmetic task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_letters
from typing import Any, ClassVar, Literal

from synthetic_tasks.arithmetic import contexts
from synthetic_tasks.arithmetic.contexts import Context
from synthetic_tasks.arithmetic.operators import OPERATORS
from synthetic_tasks.family import Settings, is_integer, surface

ORDERS = ("topological", "leaves_first", "shuffled")


@dataclass(frozen=True, kw_only=True)
class ArithmeticSettings(Settings):
    """Raises ValueError for what cannot be."""

    family: ClassVar[str] = "arithmetic"

    # Numbers are 0 .. modulus - 1; prime, so that a product is zero only where a factor is.
    modulus: int = 7
    # Names to draw from: a, b, c, ... Every fact of a problem takes one.
    names: int = 16
    # Operators to draw from.
    operators: str = OPERATORS
    # Chance that an operation starts a new branch instead of continuing one, where it can still be joined later.
    branching: float = 0.25
    # Chance that a free operand is a leaf already in use; the rest are new leaves, while names suffice.
    leaf_reuse: float = 0.25
    # Chance that a free operand is an operation already in use.
    sharing: float = 0.1
    # Most leaves that the question needs; none: as many as the names allow.
    max_leaves: int | None = None
    # Facts that the question does not need.
    distractors: int = 0
    # Facts stand in a random topological order, in one with all leaves first, or in any order.
    order: Literal["topological", "leaves_first", "shuffled"] = "topological"
    # Whether the question stands after the facts or before them.
    question: Literal["last", "first"] = "last"
    # What problems are told in: `symbolic`, built-in contexts, or paths of context files (`.toml`).
    contexts: tuple[str | Context, ...] = surface(("symbolic",))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("modulus")
        prime = self.modulus >= 2 and all(self.modulus % d for d in range(2, int(self.modulus**0.5) + 1))
        self.require(prime and self.modulus < 1000, f"modulus must be a prime below 1000, not {self.modulus}")
        self.require_integer("names", 3, len(ascii_letters))
        self.require_integer("distractors")
        self.require(self.distractors >= 0, f"distractors must not be negative, but is {self.distractors}")
        self.require(
            isinstance(self.operators, str)
            and 0 < len(self.operators) == len(set(self.operators))
            and set(self.operators) <= set(OPERATORS),
            f"operators must be some of {OPERATORS!r}, each once, not {self.operators!r}",
        )
        for name in ("branching", "leaf_reuse", "sharing"):
            self.require_chance(name)
        self.require(
            self.leaf_reuse + self.sharing <= 1,
            f"leaf_reuse + sharing must not exceed 1, but are {self.leaf_reuse} + {self.sharing}",
        )
        self.require(
            self.max_leaves is None or (is_integer(self.max_leaves) and self.max_leaves >= 2),
            f"max_leaves must be an integer of at least 2, or none, not {self.max_leaves!r}",
        )
        self.require(
            self.distractors + 3 <= self.names,
            f"{self.names} names leave no room for one operation, its two leaves and {self.distractors} distractors; "
            "raise names or lower distractors",
        )
        self.require_one_of("order", ORDERS)
        self.require_one_of("question", ("last", "first"))
        self._resolve_contexts()

    def _resolve_contexts(self) -> None:
        """Files become what they hold, so that equal settings mean equal words wherever a file lies."""
        asked = self.contexts
        self.require(
            isinstance(asked, list | tuple) and bool(asked),
            f"contexts must be a list of names or files, not {asked!r}",
        )
        found: list[str | Context] = []
        for one in asked:
            if isinstance(one, Mapping):  # what a file held, as JSON gives it back
                found.append(contexts.from_record(one))
            elif isinstance(one, str) and one.endswith(".toml"):
                found.append(contexts.load(one))
            else:
                self.require(isinstance(one, str | Context), f"contexts: {one!r} is no name of a context")
                found.append(one)
        object.__setattr__(self, "contexts", tuple(found))
        names = [one if isinstance(one, str) else one.name for one in found]
        self.require(len(set(names)) == len(names), f"contexts: one stands there twice: {', '.join(names)}")
        contexts.check_clashes(list(self.prose.values()))
        for context in self.prose.values():
            context.names(self.names)

    @classmethod
    def portable(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        asked = settings.get("contexts")
        if not isinstance(asked, list | tuple):
            return dict(settings)
        held = [contexts.data_of(one) if isinstance(one, str) and one.endswith(".toml") else one for one in asked]
        return {**settings, "contexts": held}

    @property
    def prose(self) -> dict[str, Context]:
        """The contexts told in sentences, by name."""
        every = [contexts.load(one) if isinstance(one, str) else one for one in self.contexts if one != "symbolic"]
        return {context.name: context for context in every}

    @property
    def context_names(self) -> tuple[str, ...]:
        return tuple([one if isinstance(one, str) else one.name for one in self.contexts])

    @property
    def largest(self) -> int:
        """The most operations that the names allow: two leaves, the distractors and the operations take a name each."""
        return self.names - self.distractors - 2

    def leaf_limit(self, operations: int) -> int:
        """The most leaves that a question of so many operations may need; ValueError where it cannot be asked."""
        if not is_integer(operations) or operations < 1:
            raise ValueError(f"operations must be an integer of at least 1, not {operations!r}")
        if operations > self.largest:
            raise ValueError(
                f"{operations} operations with at least two leaves and {self.distractors} distractors take "
                f"{operations + 2 + self.distractors} names, but there are {self.names}; ask for at most "
                f"{self.largest} operations, raise `names`, or lower `distractors`"
            )
        free = self.names - self.distractors - operations
        return free if self.max_leaves is None else min(free, self.max_leaves)
