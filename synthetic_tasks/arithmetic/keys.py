"""Canonical forms: two graphs have the same one exactly if they are the same up to names and order.

Operands of + and * may change places, those of - may not; a quantity used twice differs from two alike quantities.
The form is a preorder walk from the question's node, in which a node met again is a reference to its place in the walk
(`* + . . + @2 .` is (a+b)*(a+c)), so it determines the graph. What is left to fix is the order in which the operands of
+ and * are walked: by a colour, which is a 64-bit mix of all that is below a node (one pass up) and above it (one pass
down). Where two colours tie, either the two sub-graphs are trees that nothing else uses, and changing their places
changes nothing; or the passes are repeated from the colours so far while that tells more nodes apart; or, at last, each
of the two is singled out in turn, and the lesser form is taken (individualisation and refinement; McKay 1981).
Arithmetic on the colours is our own, not `hash`, so that a key is
the same on every machine and in every version of Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from synthetic_tasks.arithmetic.structure import Graph

_MASK = (1 << 64) - 1
_A, _B, _C = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93
_SYMBOL = {"+": 0x243F6A8885A308D3, "*": 0x13198A2E03707344, "-": 0xA4093822299F31D0}


def canonical_form(graph: Graph, labels: Sequence[str], query: int) -> str:
    """The form of a graph whose leaves carry labels (read at the leaves' positions) and that asks for node `query`."""
    start = [0 if node else _label_colour(label) for node, label in zip(graph, labels, strict=True)]
    return _form(graph, labels, query, start)


def _form(graph: Graph, labels: Sequence[str], query: int, start: Sequence[int]) -> str:
    """The least form among the walks that the starting colours leave open."""
    colour, used = _colours(graph, query, start)
    form, tied = _walk(graph, labels, query, colour, used)
    while tied:
        finer, _ = _colours(graph, query, colour)
        if len(set(finer)) == len(set(colour)):
            return min(
                _form(graph, labels, query, [c ^ _C if i == single else c for i, c in enumerate(colour)])
                for single in tied
            )
        colour = finer
        form, tied = _walk(graph, labels, query, colour, used)
    return form


def _walk(
    graph: Graph, labels: Sequence[str], query: int, colour: Sequence[int], used: Sequence[int]
) -> tuple[str, list[int]]:
    """The walk in the order of the colours, or the first nodes met whose order they do not decide though it matters."""

    def undecided(one: int, other: int) -> bool:
        return colour[one] == colour[other] and not (
            _is_own_tree(graph, used, one) and _is_own_tree(graph, used, other)
        )

    # Besides the query, what nothing uses is the start of a walk.
    sinks = [node for node, times in enumerate(used) if not times and node != query]
    if len(sinks) > 1:
        sinks.sort(key=colour.__getitem__)
        for one, other in pairwise(sinks):
            if undecided(one, other):
                return "", [node for node in sinks if colour[node] == colour[one]]
    place: dict[int, int] = {}
    form: list[str] = []
    stack = [*reversed(sinks), query]
    while stack:
        i = stack.pop()
        if i in place:
            form.append(f"@{place[i]}")
            continue
        place[i] = len(place)
        node = graph[i]
        if not node:
            form.append(labels[i])
            continue
        operator, left, right = node
        form.append(operator)
        if operator != "-":
            if colour[left] > colour[right]:
                left, right = right, left
            elif undecided(left, right):
                return "", [left, right]
        stack += (right, left)
    return " ".join(form), []


def _colours(graph: Graph, query: int, start: Sequence[int]) -> tuple[list[int], list[int]]:
    """Each node's colour, finer than the starting one, and how often the node is an operand."""
    size = len(graph)
    below = [0] * size
    used = [0] * size
    for i, node in enumerate(graph):
        x = start[i]
        if node:
            operator, left, right = node
            a, b = below[left], below[right]
            if a > b and operator != "-":
                a, b = b, a
            x = (x + a * _A + b * _B + _SYMBOL[operator]) & _MASK
            x = ((x ^ (x >> 29)) * _C) & _MASK
            x ^= x >> 32
            used[left] += 1
            used[right] += 1
        below[i] = x
    # The sum of what those that use a node hand down to it.
    above = [0] * size
    above[query] = 1
    for i in range(size - 1, -1, -1):
        x = (below[i] * _B + above[i] * _A) & _MASK
        below[i] = x = ((x ^ (x >> 31)) * _C) & _MASK
        node = graph[i]
        if node:
            operator, left, right = node
            x ^= x >> 30
            above[left] += x
            above[right] += x if operator != "-" else x * 3
    return below, used


def _is_own_tree(graph: Graph, used: Sequence[int], i: int) -> bool:
    """Whether a node and all below it are used once at most, so that it is a tree apart from the rest."""
    node = graph[i]
    return used[i] <= 1 and (node is None or all(_is_own_tree(graph, used, child) for child in node[1:]))


@lru_cache(maxsize=4096)
def _label_colour(label: str) -> int:
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big")


def _key(form: str) -> str:
    return hashlib.sha256(form.encode()).hexdigest()[:32]


@lru_cache(maxsize=1 << 16)
def structure_key(core: Graph) -> str:
    """Shape and operators of what the question needs."""
    return _key(canonical_form(core, (".",) * len(core), len(core) - 1))


@lru_cache(maxsize=1 << 16)
def instance_key(graph: Graph, values: tuple[int, ...], query: int, modulus: int) -> str:
    """The whole problem with the values of its leaves; those of operations are not read."""
    return _key(f"{canonical_form(graph, [str(value) for value in values], query)} mod {modulus}")
