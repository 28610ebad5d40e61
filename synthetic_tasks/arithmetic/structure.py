"""The graph behind a problem: which quantity is which operation of which two others.

A graph is a tuple of nodes in an order in which every node stands after its operands. A leaf is None, an operation is
(operator, left, right) with the operands' positions. The *core* of a problem is the part that the question needs; the
question asks for its last node. Distractors, if any, stand after the core, so `graph[: query + 1]` is the core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from synthetic_tasks.arithmetic.settings import ArithmeticSettings
from synthetic_tasks.choosing import Chooser, RandomChooser

Expression: TypeAlias = tuple[str, int, int]
Node: TypeAlias = Expression | None
# (node, operator, left, right)
Operation: TypeAlias = tuple[int, str, int, int]
Graph: TypeAlias = tuple[Node, ...]


class _Replay:
    """Follows a path of choices and takes the first option where the path ends."""

    def __init__(self, path: list[int]) -> None:
        self.path, self.options = path, list[int]()

    def uniform(self, options: int) -> int:
        depth = len(self.options)
        if depth == len(self.path):
            self.path.append(0)
        self.options.append(options)
        return self.path[depth]

    def weighted(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        return possible[self.uniform(len(possible))]


def enumerate_cores(settings: ArithmeticSettings, operations: int) -> Iterator[Graph]:
    """Every core that `draw_core` can draw, at least once each; the last choices vary first."""
    path: list[int] = []
    while True:
        replay = _Replay(path)
        yield draw_core(settings, operations, replay)
        path = replay.path
        while path and path[-1] + 1 == replay.options[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def draw_core(settings: ArithmeticSettings, operations: int, choose: Chooser) -> Graph:
    """A graph of so many operations, all of them ancestors of the last; constructive, nothing is drawn twice.

    Going forward, a node consumes 0, 1 or 2 operations that nothing has used yet, as many as keep it possible that only
    the last node is unused at the end: with r nodes to come, at most r + 1 unused ones may be left. The other
    operands are free: a new leaf, a leaf in use or an operation in use. An operand in use can repeat an expression only
    where both are; there the second operand and the operator are chosen among those that do not.
    """
    limit = settings.leaf_limit(operations)
    graph: list[Node] = []
    leaves: list[int] = []
    unused: list[int] = []
    used: list[int] = []
    expressions: set[Expression] = set()

    def new_leaf() -> int:
        graph.append(None)
        leaves.append(len(graph) - 1)
        return len(graph) - 1

    def take_unused() -> int:
        node = unused.pop(choose.uniform(len(unused)))
        used.append(node)
        return node

    def take_free(old_leaves: list[int], shared: list[int]) -> int:
        room = len(leaves) < limit
        weights = (
            1 - settings.leaf_reuse - settings.sharing if room else 0.0,
            settings.leaf_reuse if old_leaves else 0.0,
            settings.sharing if shared else 0.0,
        )
        if not any(weights):  # what the settings prefer cannot be had: names run short, or nothing is in use yet
            weights = (float(room), float(not room and bool(old_leaves)), float(not room and not old_leaves))
        kind = choose.weighted(weights)
        if kind == 0:
            return new_leaf()
        pool = old_leaves if kind == 1 else shared
        return pool[choose.uniform(len(pool))]

    for left_to_draw in range(operations - 1, -1, -1):
        may_branch = len(leaves) < limit and len(unused) <= left_to_draw
        onward = 1 - settings.branching
        weights = (
            (settings.branching if unused else 1.0) if may_branch else 0.0,
            onward if 1 <= len(unused) <= left_to_draw + 1 else 0.0,
            onward if len(unused) >= 2 else 0.0,
        )
        if not any(weights):  # branching is 1 and there is no room for a branch
            weights = (0.0, float(1 <= len(unused) <= left_to_draw + 1), float(len(unused) >= 2))
        consumed = choose.weighted(weights)
        if consumed == 2:
            first, second = take_unused(), take_unused()
        elif consumed == 1:
            shared = used.copy()
            first = take_unused()
            second = take_free(leaves, shared)
        else:
            old_leaves = leaves.copy()
            first = take_free(old_leaves, used)
            second = take_free(
                _partners(settings.operators, expressions, first, old_leaves),
                _partners(settings.operators, expressions, first, used),
            )
        unused.append(len(graph))
        # What nothing has used yet cannot repeat an expression.
        seen = expressions if consumed == 0 else ()
        node = _draw_operation(settings.operators, seen, first, second, choose)
        expressions.add(expression(*node))
        graph.append(node)
    return tuple(graph)


def draw_distractors(settings: ArithmeticSettings, core: Graph, choose: Chooser) -> Graph:
    """The core and, after it, as many facts as the settings ask for that the question does not need."""
    graph = list(core)
    expressions = {expression(*node) for node in core if node}
    for _ in range(settings.distractors):
        node: Node = None
        if choose.uniform(2):  # an operation, where a new one can be made; else a leaf
            first = choose.uniform(len(graph))
            partners = _partners(settings.operators, expressions, first, range(len(graph)))
            if partners:
                second = partners[choose.uniform(len(partners))]
                node = _draw_operation(settings.operators, expressions, first, second, choose)
                expressions.add(expression(*node))
        graph.append(node)
    return tuple(graph)


def expression(operator: str, left: int, right: int) -> Expression:
    """The same for two operations that are the same whatever the values: + and * do not mind the order."""
    return (operator, right, left) if operator != "-" and right < left else (operator, left, right)


def _draw_operation(
    operators: str, seen: Collection[Expression], first: int, second: int, choose: Chooser
) -> Expression:
    """An operation of the two that is not among the expressions seen; there is one."""
    if choose.uniform(2):
        first, second = second, first
    possible = _new_operators(operators, seen, first, second)
    if not possible:  # only the difference in the other order is new
        first, second = second, first
        possible = _new_operators(operators, seen, first, second)
    return possible[choose.uniform(len(possible))], first, second


def _new_operators(operators: str, seen: Collection[Expression], left: int, right: int) -> str:
    if not seen:
        return operators
    return "".join([o for o in operators if expression(o, left, right) not in seen])


def _partners(operators: str, expressions: set[Expression], first: int, pool: Sequence[int]) -> list[int]:
    """The nodes that make a new expression with `first`, in either order."""
    return [
        node
        for node in pool
        if node != first
        and (_new_operators(operators, expressions, first, node) or _new_operators(operators, expressions, node, first))
    ]


def fill_values(operations: Sequence[Operation], values: list[int], modulus: int) -> None:
    """Compute every operation's value in place from those of the leaves."""
    for i, operator, left, right in operations:
        if operator == "+":
            values[i] = (values[left] + values[right]) % modulus
        elif operator == "-":
            values[i] = (values[left] - values[right]) % modulus
        else:
            values[i] = values[left] * values[right] % modulus


def operations_of(graph: Graph) -> list[Operation]:
    """(node, operator, left, right) of every operation, in order."""
    return [(i, *node) for i, node in enumerate(graph) if node]


def levels(graph: Graph) -> list[int]:
    """Length of the longest chain of operations that ends at each node; a leaf is at level 0."""
    level = [0] * len(graph)
    for i, node in enumerate(graph):
        if node:
            level[i] = 1 + max(level[node[1]], level[node[2]])
    return level


def leaf_values(graph: Graph, values: Sequence[int]) -> tuple[int, ...]:
    """The leaves' values in their places, 0 for operations."""
    return tuple([0 if node else value for node, value in zip(graph, values, strict=True)])


def fact_order(graph: Graph, order: str, choose: RandomChooser) -> list[int]:
    """A random order of the facts: of any kind (`shuffled`), each after those it uses (`topological`), or that with
    all leaves in front (`leaves_first`)."""
    if order == "shuffled":
        return choose.shuffled(range(len(graph)), len(graph))
    facts = _topological_order(graph, choose)
    return sorted(facts, key=lambda i: graph[i] is not None) if order == "leaves_first" else facts


def _topological_order(graph: Graph, choose: RandomChooser) -> list[int]:
    waits = [2 if node else 0 for node in graph]
    users: list[list[int]] = [[] for _ in graph]
    for i, node in enumerate(graph):
        if node:
            users[node[1]].append(i)
            users[node[2]].append(i)
    ready = [i for i, node in enumerate(graph) if not node]
    order = []
    while ready:
        at = choose.uniform(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        i = ready.pop()
        order.append(i)
        for user in users[i]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return order
