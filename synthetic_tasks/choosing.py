"""Every choice of a drawing, made by one object, so that one procedure serves to draw at random and to enumerate."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Chooser(Protocol):
    def uniform(self, options: int) -> int: ...

    def weighted(self, weights: Sequence[float]) -> int: ...


class RandomChooser:
    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def uniform(self, options: int) -> int:
        return int(self._random() * options)

    def weighted(self, weights: Sequence[float]) -> int:
        left = self._random() * sum(weights)
        for i, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return i
        return max(i for i, weight in enumerate(weights) if weight > 0)

    def shuffled(self, items: Iterable[T], count: int) -> list[T]:
        """So many of the items in random order, without replacement."""
        pool = list(items)
        size, draw = len(pool), self._random
        for i in range(count):
            j = i + int(draw() * (size - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]
