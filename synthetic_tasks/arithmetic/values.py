"""Values for a structure, constructed so that answers are near uniform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product

from synthetic_tasks.arithmetic.structure import Graph, fill_values, operations_of
from synthetic_tasks.choosing import RandomChooser

# Pairs of changes that are tried at most, to reach an answer and to be accepted.
PAIRS_FOR_ANSWER, PAIRS_FOR_ACCEPTANCE = 300, 20_000


def _always(values: list[int]) -> bool:
    return True


def draw_values(
    core: Graph,
    modulus: int,
    target: int,
    choose: RandomChooser,
    *,
    accept: Callable[[list[int]], bool] = _always,
) -> list[int]:
    """Values of all nodes, with the target as the answer if possible; empty where none that were tried are accepted.

    Leaves are uniform; then they are taken in random order, and the first that can make the answer the target, the
    others as they are, is set to do so. Where none can, two leaves are set. Where values also have to be accepted
    (their instance falls in a split), the target is sought among those that are, and then any answer.
    """
    operations = operations_of(core)
    values = [0 if node else choose.uniform(modulus) for node in core]
    leaves = [i for i, node in enumerate(core) if not node]
    leaves = choose.shuffled(leaves, len(leaves))
    first = choose.uniform(modulus)
    numbers = [*range(first, modulus), *range(first)]
    pairs = PAIRS_FOR_ANSWER if accept is _always else PAIRS_FOR_ACCEPTANCE
    for _ in _changes(values, leaves, numbers, pairs):
        fill_values(operations, values, modulus)
        if values[-1] == target and accept(values):
            return values
    for _ in _changes(values, leaves, numbers, pairs):
        fill_values(operations, values, modulus)
        if accept(values):
            return values
    return []


def _changes(values: list[int], leaves: Sequence[int], numbers: Sequence[int], pairs: int) -> Iterator[None]:
    """Set one leaf at a time to each number in place, then two; iterated to the end, all is as before."""
    for leaf in leaves:
        before = values[leaf]
        for number in numbers:
            values[leaf] = number
            yield
        values[leaf] = before
    every_pair = ((pair, chosen) for pair in combinations(leaves, 2) for chosen in product(numbers, repeat=2))
    start = values.copy()
    for (one, other), (number, other_number) in islice(every_pair, pairs):
        values[one], values[other] = number, other_number
        yield
        values[one], values[other] = start[one], start[other]
