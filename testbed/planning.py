"""What a run would do and take, before anything is run: every node with its state, and estimates of its cost.

    specs ──> graphs, nodes of one key together ──> state in the store ──> manifest, or estimate ──> totals

Estimates (`testbed.estimates`) stand on the first documents of every mixture and, with the probe, on a few timed steps
on this machine (`testbed.timing`). What cannot be known beforehand is assumed, and the plan says what
(`assumed`). Nothing is written to the store.
"""

from __future__ import annotations

import heapq
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import edges
from testbed.config import Edge
from testbed.errors import UserError
from testbed.estimates import Cost, Estimates, parameter_count
from testbed.graph import Graph, build
from testbed.machine import cores
from testbed.nodes import Corpus, Node, shelf, split_reference
from testbed.schema import Spec
from testbed.store import State, Store

if TYPE_CHECKING:
    from testbed.timing import Gauge

ASSUMED = (
    "Completions of RL and evaluations are taken to be as long as gold solutions, and every row of RL to be trained: "
    "a model that rambles costs more, one that gets no signal less.",
    "Saved states of stopped runs are not counted; checkpoints that are kept are.",
)
ASSUMED_OF_SECONDS = "Seconds are those of this machine, without the few that each worker takes to start."


@dataclass(frozen=True, kw_only=True)
class PlannedNode:
    """One node of the plan.

    Its numbers are what making it adds to the nodes before it: zero for a checkpoint that another node makes on its
    way, what is left where a stage goes on from a kept checkpoint. Of a node that is done they are those of its run.
    """

    key: str
    kind: str
    name: str
    label: str
    # Repetition; None for a corpus, which belongs to all.
    seed: int | None
    # Names of the stages and checkpoints it continues or looks at, joined by ` + `; None for a root.
    parent: str | None
    # What crosses from the parent: parent (stable, annealed, annealing), optimizer, rate.
    edge: dict[str, str] | None
    # Keys of what it reads, by role.
    inputs: dict[str, str]
    # Of a checkpoint: key of the node of the plan that makes it on its way, if one does.
    maker: str | None
    state: State
    # Why its last run failed.
    reason: str | None
    # Whether the numbers were counted and timed in a run.
    measured: bool
    # Documents of a corpus.
    documents: int | None
    # Trained tokens; of a corpus the tokens it holds, which no total counts.
    tokens: int
    sampled_tokens: int
    flops: float
    # FLOPs when every completion is as long as it may be; None where nothing is sampled, and where it is done.
    flops_most: float | None
    parameters: int | None
    # Peak of the process that makes it, an estimate; None where it is done.
    memory_bytes: int | None
    seconds: float | None
    # Names of the specs that need it.
    specs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Total:
    """A sum over nodes; elapsed: seconds with all workers busy as far as inputs allow."""

    nodes: int
    tokens: int
    sampled_tokens: int
    flops: float
    seconds: float | None
    elapsed: float | None
    # The largest peaks of as many nodes as there are workers, together; of what is still to make.
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The nodes of one or more specs, inputs before what reads them; iterating a plan iterates them."""

    specs: tuple[str, ...]
    store: str
    nodes: list[PlannedNode]
    # to_do: what is not there. shared: all nodes, each once. alone: every arm and repetition of every spec trained by
    # itself from nothing, its ancestors counted again each time, without probes.
    totals: dict[str, Total]
    workers: int
    # What was measured: `measured` (whether anything was), seconds, threads, device, shapes, rates (FLOP/s), notes.
    probe: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[PlannedNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def to_do(self) -> list[PlannedNode]:
        return [node for node in self.nodes if node.state != "done"]

    @property
    def assumed(self) -> list[str]:
        """What the estimates stand on, in words; nothing where everything was measured."""
        if not self.to_do:
            return []
        return [*ASSUMED, *([ASSUMED_OF_SECONDS] if self.probe["measured"] else []), *self.probe.get("notes", [])]

    def record(self) -> dict[str, Any]:
        """As JSON holds it: finite numbers, None where unknown."""
        return {
            "specs": list(self.specs),
            "store": self.store,
            "workers": self.workers,
            "nodes": [asdict(node) | {"specs": list(node.specs)} for node in self.nodes],
            "totals": {name: asdict(total) for name, total in self.totals.items()},
            "probe": self.probe,
            "assumed": self.assumed,
        }


def plan(specs: Sequence[Spec], store: Store, *, probe: bool = True, workers: int | None = None) -> Plan:
    """The plan of the specs together: a node that several need is there once.

    probe: time a few steps, for some seconds; else there are no seconds and memory stands on formulas.
    workers: processes of the run, None for one a core; each has its share of the cores as threads.
    Raises UserError where a document of a corpus does not fit the rows of a stage, StoreError where the store cannot
    be read.
    """
    if not specs:
        raise UserError("A plan needs at least one spec.")
    graphs = [build(spec) for spec in specs]
    names = _names(specs)
    workers = workers or cores()
    nodes = _together(graphs)
    states = {key: store.state(shelf(node.kind), key) for key, node in nodes.items()}
    gauge: Gauge | None = None
    if probe and any(state != "done" for state in states.values()):
        from testbed.timing import Gauge

        gauge = Gauge(threads=max(1, cores() // workers))
    with tempfile.TemporaryDirectory() as folder:
        estimates = Estimates(nodes, Path(folder), gauge)
        past = _Past(nodes, states, store, estimates)
        makers = _makers(nodes)
        planned, costs = [], {}
        for key, node in nodes.items():
            cost = costs[key] = past.left(node, makers.get(key))
            owner = next(graph for graph in graphs if key in graph.nodes)
            failure = store.failure(shelf(node.kind), key) if states[key] == "failed" else None
            done = states[key] == "done"
            planned.append(
                PlannedNode(
                    key=key,
                    kind=node.kind,
                    name=node.name,
                    label=node.label,
                    seed=node.seed,
                    parent=_parent(node, owner),
                    edge=_edge(node, owner.spec),
                    inputs=dict(node.parents),
                    maker=makers.get(key),
                    state=states[key],
                    reason=failure.reason if failure else None,
                    measured=done,
                    documents=node.config.documents if isinstance(node.config, Corpus) else None,
                    tokens=past.corpus_tokens(node) if node.kind == "corpus" else round(cost.tokens),
                    sampled_tokens=round(cost.sampled_tokens),
                    flops=cost.flops,
                    flops_most=None if done else estimates.flops_most(node),
                    parameters=None if node.kind == "corpus" else parameter_count(*estimates.shape(node)),
                    memory_bytes=None if done else estimates.memory(node),
                    seconds=cost.seconds,
                    specs=tuple(name for name, graph in zip(names, graphs, strict=True) if key in graph.nodes),
                )
            )
        totals = _totals(graphs, nodes, states, past, costs, makers, workers)
    # Checkpoints that others make on their way are no processes of their own.
    working = [node for node in planned if node.state != "done" and node.maker is None]
    todo = sorted((node.memory_bytes or 0 for node in working), reverse=True)
    totals["to_do"] = replace(totals["to_do"], memory_bytes=sum(todo[:workers]))
    return Plan(
        specs=names,
        store=str(store.root),
        nodes=planned,
        totals=totals,
        workers=workers,
        probe=_told(gauge, workers),
    )


def _names(specs: Sequence[Spec]) -> tuple[str, ...]:
    """Of the specs; one that is there already is numbered: `smoke`, `smoke (2)`."""
    seen: Counter[str] = Counter()
    names = []
    for spec in specs:
        seen[spec.name] += 1
        names.append(spec.name if seen[spec.name] == 1 else f"{spec.name} ({seen[spec.name]})")
    return tuple(names)


def _together(graphs: Sequence[Graph]) -> dict[str, Node]:
    """The nodes of all graphs by key, inputs before what reads them, and what makes a checkpoint before it."""
    found: dict[str, Node] = {}
    for graph in graphs:
        for key, node in graph.nodes.items():
            found.setdefault(key, node)
    makers = _makers(found)
    out: dict[str, Node] = {}

    def add(key: str) -> None:
        if key not in out:
            for before in (*found[key].parents.values(), *([makers[key]] if key in makers else [])):
                add(before)
            out[key] = found[key]

    for key in found:
        add(key)
    return out


def _makers(nodes: Mapping[str, Node]) -> dict[str, str]:
    """Of every checkpoint that a node makes on its way, the key of that node: of one stage, the one that goes furthest.

    As `graph` has it within one spec; here over all of them.
    """
    furthest: dict[str, Node] = {}
    for node in nodes.values():
        best = furthest.get(node.stage_key)
        if best is None or _reach(node) > _reach(best):
            furthest[node.stage_key] = node
    made = {key: furthest[node.stage_key].key for key, node in nodes.items()}
    return {key: maker for key, maker in made.items() if maker != key}


def _reach(node: Node) -> float:
    return math.inf if node.step is None else node.step


def _parent(node: Node, graph: Graph) -> str | None:
    """Names, as the spec has them, of what a node continues or looks at."""
    if node.kind == "corpus":
        return None
    if node.kind in ("evaluation", "probe"):
        roles = [role for role in ("stage", "against") if role in node.parents]
        return " + ".join(graph.nodes[node.parents[role]].name for role in roles)
    return " + ".join(graph.spec.parents_of(node.name)) or None


def _edge(node: Node, spec: Spec) -> dict[str, str] | None:
    """What crosses from the parent; objectives that differ joined by ` + `, as their names are."""
    if node.kind in ("corpus", "evaluation", "probe"):
        return None
    stages = list(node.objectives) or [split_reference(node.name)[0]]
    crossing = [edge for stage in stages if (edge := edges.edge(spec, stage)) is not None]
    return (
        {part.name: " + ".join(dict.fromkeys(getattr(edge, part.name) for edge in crossing)) for part in fields(Edge)}
        if crossing
        else None
    )


def _told(gauge: Gauge | None, workers: int) -> dict[str, Any]:
    if gauge is None:
        return {"measured": False}
    return {
        "measured": True,
        "seconds": round(gauge.seconds, 2),
        "threads": gauge.threads,
        "device": str(gauge.device),
        "shapes": gauge.measured,
        "base_bytes": gauge.base_bytes,
        "flops_per_second": gauge.rates,
        "notes": list(dict.fromkeys(gauge.notes)),
    }


class _Past:
    """What nodes took, where they are done, and what is left of the others."""

    def __init__(
        self, nodes: Mapping[str, Node], states: Mapping[str, State], store: Store, estimates: Estimates
    ) -> None:
        self.nodes, self.states, self.store, self.estimates = nodes, states, store, estimates
        self.whole: dict[str, Cost] = {}
        for key, node in nodes.items():
            cost = self._measured(node) if states[key] == "done" else estimates.work(node).cost
            if cost.seconds is None:
                # A checkpoint that was made on the way of a stage that is not there.
                cost = replace(cost, seconds=estimates.work(node).cost.seconds)
            self.whole[key] = cost = _counted(cost)
            # Inputs come first, so a stage that matches this one finds it.
            estimates.flops[key] = cost.flops
        self._kept: dict[str, list[int]] = {}
        for key in store.keys("checkpoints"):
            stage, _, step = key.partition("@")
            if step.isdigit() and store.has("checkpoints", key):
                self._kept.setdefault(stage, []).append(int(step))

    def left(self, node: Node, maker: str | None) -> Cost:
        """What making the node adds; of one that is done, what it took."""
        if maker is not None and (self.states[node.key] == "done" or self.states[maker] != "done"):
            return Cost()
        if self.states[node.key] == "done":
            return self.whole[node.key]
        begin = max((step for step in self._kept.get(node.stage_key, []) if step < _reach(node)), default=0)
        if not begin:
            return self.whole[node.key]
        work = self.estimates.work(node)
        return _counted(replace(work, steps=max(0.0, work.steps - begin)).cost)

    def corpus_tokens(self, node: Node) -> int:
        """Tokens that a corpus holds."""
        if self.states[node.key] == "done" and "tokens" in (summary := self._manifest(node).get("summary", {})):
            return int(summary["tokens"])
        return self.estimates.corpus_tokens(node)

    def _manifest(self, node: Node) -> dict[str, Any]:
        return self.store.examine(shelf(node.kind), node.key, read=False)[1]

    def _measured(self, node: Node) -> Cost:
        manifest = self._manifest(node)
        summary: dict[str, Any] = manifest.get("summary", {})
        if node.kind == "corpus":
            return Cost(seconds=manifest.get("wall_s"))
        counted = sum(
            work["flops_useful"] for activity, work in summary.get("ledger", {}).items() if activity != "scoring"
        )
        return Cost(
            tokens=summary.get("tokens", 0),
            sampled_tokens=summary.get("sampled_tokens", 0),
            flops=summary.get("flops", counted),
            seconds=manifest.get("wall_s"),
        )


def _counted(cost: Cost) -> Cost:
    """Tokens as whole numbers, so that totals are the sums of what is shown."""
    return replace(cost, tokens=float(round(cost.tokens)), sampled_tokens=float(round(cost.sampled_tokens)))


def _totals(
    graphs: Sequence[Graph], nodes: Mapping[str, Node], states: Mapping[str, State], past: _Past,
    left: Mapping[str, Cost], makers: Mapping[str, str], workers: int,
) -> dict[str, Total]:  # fmt: skip
    todo = {key: cost for key, cost in left.items() if states[key] != "done"}
    once = {key: Cost() if key in makers else past.whole[key] for key in nodes}
    chains = [
        [past.whole[key] for key in _ancestry(graph, graph.nodes[evaluation])]
        for graph in graphs
        for evaluation in graph.evaluations.values()
    ]
    alone = {str(i): sum(chain, Cost()) for i, chain in enumerate(chains)}
    before = {key: {*node.parents.values(), *([makers[key]] if key in makers else [])} for key, node in nodes.items()}
    return {
        "to_do": _total(len(todo), todo, before, workers),
        "shared": _total(len(once), once, before, workers),
        "alone": _total(sum(map(len, chains)), alone, {}, workers),
    }


def _ancestry(graph: Graph, node: Node) -> list[str]:
    """Keys of a node and of all whose results reach it. Matched stages only lend their FLOPs, and of two checkpoints of
    one stage the further went through the other."""
    found: dict[str, Node] = {}

    def add(one: Node) -> None:
        if one.key not in found:
            found[one.key] = one
            for role, key in one.parents.items():
                if not role.startswith("match/"):
                    add(graph.nodes[key])

    add(node)
    on_the_way = _makers(found)
    return [key for key in found if key not in on_the_way]


def _total(count: int, costs: Mapping[str, Cost], before: Mapping[str, set[str]], workers: int) -> Total:
    cost = sum(costs.values(), Cost())
    return Total(
        nodes=count,
        tokens=round(cost.tokens),
        sampled_tokens=round(cost.sampled_tokens),
        flops=cost.flops,
        seconds=cost.seconds,
        elapsed=None if cost.seconds is None else _elapsed(costs, before, workers),
    )


def _elapsed(costs: Mapping[str, Cost], before: Mapping[str, set[str]], workers: int) -> float:
    """Seconds until all is made, when a free worker takes the ready node at the head of the longest chain of work.

    As the launcher of local processes does it, with the seconds known beforehand.
    """
    seconds = {key: cost.seconds or 0.0 for key, cost in costs.items()}
    after: dict[str, list[str]] = {key: [] for key in costs}
    missing = {key: 0 for key in costs}
    for key in costs:
        for earlier in before.get(key, ()):
            if earlier in after:
                after[earlier].append(key)
                missing[key] += 1
    chains: dict[str, float] = {}
    for key in reversed(list(costs)):
        chains[key] = seconds[key] + max((chains[later] for later in after[key]), default=0.0)
    ready = [(-chains[key], key) for key, count in missing.items() if not count]
    heapq.heapify(ready)
    running: list[tuple[float, str]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < workers:
            _, key = heapq.heappop(ready)
            heapq.heappush(running, (now + seconds[key], key))
        now, ended = heapq.heappop(running)
        for later in after[ended]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (-chains[later], later))
    return now
