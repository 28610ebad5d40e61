"""What can be set about the arithmetic task."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from string import ascii_letters
from typing import Any, Literal

from synthetic_tasks.registry import nearest

OPERATORS = "+-*"
ORDERS = ("topological", "leaves_first", "shuffled")


@dataclass(frozen=True, kw_only=True)
class ArithmeticSettings:
    """Raises ValueError for what cannot be."""

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

    def __post_init__(self) -> None:
        for name in ("modulus", "names", "distractors"):
            _require(_is_int(getattr(self, name)), f"{name} must be an integer, not {getattr(self, name)!r}")
            object.__setattr__(self, name, int(getattr(self, name)))
        prime = self.modulus >= 2 and all(self.modulus % d for d in range(2, int(self.modulus**0.5) + 1))
        _require(prime and self.modulus < 1000, f"modulus must be a prime below 1000, not {self.modulus}")
        _require(
            3 <= self.names <= len(ascii_letters), f"names must lie in [3, {len(ascii_letters)}], not {self.names}"
        )
        _require(
            isinstance(self.operators, str)
            and 0 < len(self.operators) == len(set(self.operators))
            and set(self.operators) <= set(OPERATORS),
            f"operators must be some of {OPERATORS!r}, each once, not {self.operators!r}",
        )
        for name in ("branching", "leaf_reuse", "sharing"):
            share = getattr(self, name)
            number = isinstance(share, int | float) and not isinstance(share, bool)
            _require(number and 0 <= share <= 1, f"{name} must be a chance in [0, 1], not {share!r}")
            object.__setattr__(self, name, float(share))  # 0 and 0.0 are one setting
        _require(
            self.leaf_reuse + self.sharing <= 1,
            f"leaf_reuse + sharing must not exceed 1, but are {self.leaf_reuse} + {self.sharing}",
        )
        _require(
            self.max_leaves is None or (_is_int(self.max_leaves) and self.max_leaves >= 2),
            f"max_leaves must be an integer of at least 2, or none, not {self.max_leaves!r}",
        )
        _require(self.distractors >= 0, f"distractors must not be negative, but is {self.distractors}")
        _require(
            self.distractors + 3 <= self.names,
            f"{self.names} names leave no room for one operation, its two leaves and {self.distractors} distractors; "
            "raise names or lower distractors",
        )
        _require(self.order in ORDERS, f"order must be one of {', '.join(map(repr, ORDERS))}, not {self.order!r}")
        _require(self.question in ("last", "first"), f"question must be 'last' or 'first', not {self.question!r}")

    @classmethod
    def of(cls, **settings: Any) -> ArithmeticSettings:
        """As the constructor, but an unknown setting is a ValueError that gives the nearest right name."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise ValueError(f"arithmetic has no setting {name!r}; {nearest(name, known)}")
        return cls(**settings)

    @property
    def largest(self) -> int:
        """The most operations that the names allow: two leaves, the distractors and the operations take a name each."""
        return self.names - self.distractors - 2

    def leaf_limit(self, operations: int) -> int:
        """The most leaves that a question of so many operations may need; ValueError where it cannot be asked."""
        if not _is_int(operations) or operations < 1:
            raise ValueError(f"operations must be an integer of at least 1, not {operations!r}")
        if operations > self.largest:
            raise ValueError(
                f"{operations} operations with at least two leaves and {self.distractors} distractors take "
                f"{operations + 2 + self.distractors} names, but there are {self.names}; ask for at most "
                f"{self.largest} operations, raise `names`, or lower `distractors`"
            )
        free = self.names - self.distractors - operations
        return free if self.max_leaves is None else min(free, self.max_leaves)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"arithmetic: {message}")
