"""Canonical forms against brute force over all permutations."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from synthetic_tasks import get_task
from synthetic_tasks.arithmetic import ArithmeticSettings
from synthetic_tasks.arithmetic.keys import canonical_form, instance_key, structure_key
from synthetic_tasks.arithmetic.structure import Graph, draw_core, draw_distractors, enumerate_cores
from synthetic_tasks.choosing import RandomChooser

Edges = tuple[tuple[object, ...], ...]


def relabelled(graph: Graph, labels: list[str], query: int, place: tuple[int, ...]) -> tuple[Edges, int]:
    """The graph as a sorted list of facts after node i is called place[i]; equal for equal graphs."""
    facts: list[tuple[object, ...]] = []
    for i, node in enumerate(graph):
        if node is None:
            facts.append((place[i], "leaf", labels[i]))
        else:
            operator, left, right = node[0], place[node[1]], place[node[2]]
            if operator != "-" and left > right:
                left, right = right, left
            facts.append((place[i], operator, left, right))
    return tuple(sorted(facts)), place[query]  # the places differ, so nothing else is compared


def brute_force_form(graph: Graph, labels: list[str], query: int) -> object:
    leaves = [i for i, node in enumerate(graph) if node is None]
    operations = [i for i, node in enumerate(graph) if node]
    forms = []
    for leaf_order in permutations(range(len(leaves))):
        for operation_order in permutations(range(len(leaves), len(graph))):
            place = [0] * len(graph)
            for nodes, order in ((leaves, leaf_order), (operations, operation_order)):
                for node, at in zip(nodes, order, strict=True):
                    place[node] = at
            forms.append(relabelled(graph, labels, query, tuple(place)))
    return min(forms)


@st.composite
def graphs(draw: st.DrawFn, *, leaves: int = 3, operations: int = 4) -> tuple[Graph, list[str], int]:
    """Any graph at all, with equal leaves, unused nodes and repeated expressions."""
    graph: list[tuple[str, int, int] | None] = [None] * draw(st.integers(2, leaves))
    labels = [draw(st.sampled_from(["0", "1"])) for _ in graph]
    for _ in range(draw(st.integers(1, operations))):
        pair = draw(st.lists(st.integers(0, len(graph) - 1), min_size=2, max_size=2, unique=True))
        graph.append((draw(st.sampled_from("+-*")), *pair))
        labels.append("")
    return tuple(graph), labels, draw(st.integers(0, len(graph) - 1))


def shuffled(graph: Graph, labels: list[str], query: int, rng: random.Random) -> tuple[Graph, list[str], int]:
    """The same graph with its nodes in another order and operands of + and * changed over."""
    place: dict[int, int] = {}
    out: list[tuple[str, int, int] | None] = []
    while len(out) < len(graph):
        ready = [
            i for i, node in enumerate(graph) if i not in place and (node is None or {node[1], node[2]} <= place.keys())
        ]
        i = rng.choice(ready)
        node = graph[i]
        place[i] = len(out)
        if node is None:
            out.append(None)
        else:
            operands = [place[node[1]], place[node[2]]]
            if node[0] != "-":
                rng.shuffle(operands)
            out.append((node[0], operands[0], operands[1]))
    new_labels = [""] * len(graph)
    for old, new in place.items():
        new_labels[new] = labels[old]
    return tuple(out), new_labels, place[query]


@given(graphs(), graphs(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_equal_forms_exactly_if_brute_force_finds_them_equal(
    one: tuple[Graph, list[str], int], other: tuple[Graph, list[str], int], rng: random.Random
) -> None:
    same = shuffled(*one, rng)
    assert canonical_form(*one) == canonical_form(*same)
    assert brute_force_form(*one) == brute_force_form(*same)
    assert (canonical_form(*one) == canonical_form(*other)) == (brute_force_form(*one) == brute_force_form(*other))


@given(graphs(), st.data())
@settings(max_examples=150, deadline=None)
def test_another_operator_edge_label_or_question_changes_the_form_unless_brute_force_finds_it_equal(
    one: tuple[Graph, list[str], int], data: st.DataObject
) -> None:
    graph, labels, query = list(one[0]), list(one[1]), one[2]
    i = data.draw(st.integers(0, len(graph) - 1))
    node = graph[i]
    if data.draw(st.booleans()):
        query = data.draw(st.integers(0, len(graph) - 1))
    elif node is None:
        labels[i] = "2"
    else:
        operator, left, right = node
        edit = data.draw(st.sampled_from(["operator", "edge", "order"]))
        if edit == "operator":
            operator = data.draw(st.sampled_from("+-*"))
        elif edit == "edge":
            left = data.draw(st.integers(0, i - 1))
            assume(left != right)
        else:
            left, right = right, left
        graph[i] = (operator, left, right)
    other = tuple(graph), labels, query
    assert (canonical_form(*one) == canonical_form(*other)) == (brute_force_form(*one) == brute_force_form(*other))


@given(st.integers(0, 2**32), st.integers(1, 14), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_drawn_graphs_keep_their_keys_under_any_order(seed: int, operations: int, distractors: int) -> None:
    rng = random.Random(seed)
    knobs = ArithmeticSettings(names=26, distractors=distractors, sharing=0.4, leaf_reuse=0.3, branching=0.6)
    core = draw_core(knobs, operations, RandomChooser(rng))
    graph = draw_distractors(knobs, core, RandomChooser(rng))
    labels = [str(rng.randrange(2)) if node is None else "" for node in graph]
    form = canonical_form(graph, labels, len(core) - 1)
    for _ in range(3):
        assert canonical_form(*shuffled(graph, labels, len(core) - 1, rng)) == form


def symmetric(depth: int, *, shared: bool) -> Graph:
    """A full binary tree of sums and products by level; or one in which all pairs of neighbours share a leaf."""
    graph: list[tuple[str, int, int] | None] = [None] * (2**depth + shared)
    level = list(range(2**depth + shared))
    for height in range(depth):
        pairs = pairwise(level) if shared and not height else zip(level[::2], level[1::2], strict=False)
        above = []
        for left, right in pairs:
            graph.append(("+*"[height % 2], left, right))
            above.append(len(graph) - 1)
        level = above
    return tuple(graph[: level[0] + 1])


@pytest.mark.parametrize("shared", [False, True])
def test_symmetric_graphs_are_fast_and_stable(shared: bool) -> None:
    graph = symmetric(4, shared=shared)
    rng, labels, query = random.Random(0), ["."] * len(graph), len(graph) - 1
    form = canonical_form(graph, labels, query)
    for _ in range(5):
        other, _, at = shuffled(graph, labels, query, rng)
        assert canonical_form(other, labels, at) == form


def rings(*sizes: int) -> Graph:
    """a - b for the question, and sums of neighbours round rings of leaves: no refinement tells the sums apart."""
    graph: list[tuple[str, int, int] | None] = [None, None, ("-", 0, 1)]
    for size in sizes:
        first = len(graph)
        graph += [None] * size
        graph += [("+", first + i, first + (i + 1) % size) for i in range(size)]
    return tuple(graph)


def test_ties_that_no_refinement_breaks() -> None:
    """A ring of six and two of three look alike from every node; only singling out tells where a node belongs."""
    rng = random.Random(0)

    def form(graph: Graph) -> str:
        return canonical_form(graph, ["."] * len(graph), 2)

    assert form(rings(6)) != form(rings(3, 3))
    for sizes in ((3, 3), (6,), (3, 4)):
        forms = set()
        for _ in range(6):
            graph = rings(*rng.sample(sizes, len(sizes)))
            other, labels, query = shuffled(graph, ["."] * len(graph), 2, rng)
            forms.add(canonical_form(other, labels, query))
        assert len(forms) == 1


def test_sharing_is_told_from_equality() -> None:
    shared: Graph = (None, None, None, ("+", 0, 1), ("+", 0, 2), ("*", 3, 4))
    apart: Graph = (None, None, None, None, ("+", 0, 1), ("+", 2, 3), ("*", 4, 5))
    assert structure_key(shared) != structure_key(apart)
    assert (
        canonical_form(shared, ["."] * 6, 5) == "* + . . + @2 ." or canonical_form(shared, ["."] * 6, 5).count("@") == 1
    )


@pytest.mark.parametrize(("operations", "count"), [(1, 3), (2, 28)])
def test_enumeration_finds_every_structure(operations: int, count: int) -> None:
    """Three of one operation. Of two, x op (y op z) has 3 x 4 forms; x op (x op y) 2 x 4 for + and *, 8 for -."""
    cores = set(enumerate_cores(ArithmeticSettings(), operations))
    keys = {structure_key(core) for core in cores}
    assert len(keys) == count
    assert len({repr(brute_force_form(core, ["."] * len(core), len(core) - 1)) for core in cores}) == count
    rng = RandomChooser(random.Random(0))
    assert {structure_key(draw_core(ArithmeticSettings(), operations, rng)) for _ in range(4000)} == keys


def test_keys_ignore_names_order_question_and_distractors_as_they_should() -> None:
    """Keys do not see the surface: one graph, with other names and another order, under other settings."""
    plain: Graph = (None, None, ("+", 0, 1), None, ("-", 2, 3))
    moved: Graph = (None, None, None, ("+", 2, 0), ("-", 3, 1))
    assert structure_key(plain) == structure_key(moved)
    assert instance_key(plain, (1, 2, 0, 5, 0), 4, 7) == instance_key(moved, (2, 5, 1, 0, 0), 4, 7)
    assert instance_key(plain, (1, 2, 0, 5, 0), 4, 7) != instance_key(moved, (2, 1, 5, 0, 0), 4, 7)
    assert instance_key(plain, (1, 2, 0, 5, 0), 4, 7) != instance_key(plain, (1, 2, 0, 5, 0), 4, 11)
    with_distractor: Graph = (*plain, ("*", 0, 3))
    assert instance_key(plain, (1, 2, 0, 5, 0), 4, 7) != instance_key(with_distractor, (1, 2, 0, 5, 0, 0), 4, 7)


def test_keys_are_pinned() -> None:
    """Splits hang on these: a change re-deals every problem, so it must be meant."""
    assert structure_key((None, None, ("+", 0, 1))) == "17601a9742a8ee8994e44ba52391cbaa"
    assert instance_key((None, None, ("-", 0, 1)), (3, 5, 0), 2, 7) == "f7bcf275f0eb8167c7c08491d0bb6e65"


def test_splits_take_80_10_10() -> None:
    shares = [get_task("arithmetic").split_of(f"{i:08x}".ljust(32, "0")) for i in range(0, 16**8, 16**8 // 1000)]
    assert [round(shares.count(split) / len(shares), 2) for split in ("train", "validation", "test")] == [0.8, 0.1, 0.1]


@pytest.mark.parametrize("operations", [1, 2, 3, 4])
@pytest.mark.parametrize("distractors", [0, 2])
def test_splits_are_disjoint(operations: int, distractors: int) -> None:
    task = get_task("arithmetic", distractors=distractors)
    splits = {
        split: task.sample_batch(seed=0, start=0, count=300, operations=operations, split=split)
        for split in ("train", "validation", "test")
    }
    shared = task.structures_shared(operations)
    assert shared == (operations <= 2)
    for one in splits:
        for other in splits:
            if one < other:
                assert not {p.instance_key for p in splits[one]} & {p.instance_key for p in splits[other]}
                if not shared:
                    assert not {p.structure_key for p in splits[one]} & {p.structure_key for p in splits[other]}
