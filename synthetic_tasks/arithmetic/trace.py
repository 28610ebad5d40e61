"""What a problem says and what a completion claims, apart from any surface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from synthetic_tasks import reading
from synthetic_tasks.arithmetic.structure import Graph


class Step(NamedTuple):
    """One step: `left left_value operator right right_value = target result`."""

    left: str
    left_value: int
    operator: str
    right: str
    right_value: int
    target: str
    result: int
    # Position of the step's first token.
    position: int


Reading: TypeAlias = reading.Reading[Step, int]
Trace: TypeAlias = reading.Trace[Step, int]


@dataclass(frozen=True)
class Facts:
    """A problem's graph, with a value and a name for each node, and the order in which the prompt states them."""

    graph: Graph
    values: tuple[int, ...]
    names: tuple[str, ...]
    query: int
    modulus: int
    order: tuple[int, ...]

    @cached_property
    def gold_order(self) -> tuple[int, ...]:
        """The needed operations, each time the first in the prompt whose operands are known."""
        waiting = [i for i in self.order if i <= self.query and self.graph[i]]
        known = {i for i, node in enumerate(self.graph) if node is None}
        done: list[int] = []
        while waiting:
            for i in waiting:
                node = self.graph[i]
                assert node is not None
                if node[1] in known and node[2] in known:
                    waiting.remove(i)
                    known.add(i)
                    done.append(i)
                    break
        return tuple(done)

    @cached_property
    def definitions(self) -> Mapping[str, tuple[str, str, str]]:
        """Name of each operation to its (operator, left name, right name)."""
        names = self.names
        return {names[i]: (node[0], names[node[1]], names[node[2]]) for i, node in enumerate(self.graph) if node}

    @cached_property
    def given(self) -> Mapping[str, int]:
        """Name of each leaf to its value."""
        return {self.names[i]: self.values[i] for i, node in enumerate(self.graph) if not node}

    @cached_property
    def true_values(self) -> Mapping[str, int]:
        return dict(zip(self.names, self.values, strict=True))

    @cached_property
    def obligations(self) -> tuple[str, ...]:
        """Names of the operations that the question needs; each is to be met by a step."""
        return tuple(name for name, node in zip(self.names[: self.query + 1], self.graph, strict=False) if node)
