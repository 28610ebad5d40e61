"""From a spec to its graph of work, every node with a key that names its result.

A key is the SHA-256 of canonical JSON: every field that is not listed in NON_SEMANTIC, the keys of what the node reads,
the digest of the tokenizer, the seeds it uses and the epoch of its code. A field at its default is left out, so a new
field with a default that changes nothing keeps every old key. Experiments that share a prefix share its nodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from synthetic_tasks import Tokenizer
from testbed.config import RL, Combine, Edge, Evaluation, Parallel, Probe, StageConfig, Train
from testbed.nodes import Context, Corpus, Node, Seeds, checkpoint_key, split_reference
from testbed.spec import Spec

# Raise the epoch of a kind when its code or a default changes the result of the same fields: old artifacts stay unused.
# tests/golden holds what each kind makes, and names the one that changed. Tasks have epochs of their own.
EPOCHS = {
    "corpus": 1,
    # 2: budgets are met to the step; optimizer states are safetensors.
    "pretrain": 2,
    "midtrain": 2,
    "sft": 2,
    "rl": 2,
    "combine": 1,
    "parallel": 1,
    "evaluation": 1,
    "probe": 1,
}

# Fields that cannot change a result, each with the reason. Of names that refer to other parts the contents are hashed.
NON_SEMANTIC = {
    (Train, "parent"),  # a name: the parent's key is hashed
    (Train, "data"),  # a name: the corpus' key is hashed
    (Train, "match"),  # names: the keys of those stages are hashed
    (RL, "parent"),  # a name: the parent's key is hashed
    (RL, "band"),  # a name: the operations of the band are hashed
    (Combine, "of"),  # names: keys and factors are hashed
    (Parallel, "objectives"),  # names: settings and factors are hashed
    (Probe, "of"),  # names: there is one node for each, and its key is hashed
    (Probe, "against"),  # a name: its key is hashed
    (Evaluation, "k"),  # read off the counts afterwards
    # Statements about the two stages, checked and not followed.
    (Edge, "parent"),
    (Edge, "rate"),
    # What is kept of a stage on its way does not change where it leads.
    *((kind, name) for kind in (Train, RL, Parallel) for name in ("keep", "keep_doubling")),
}

# Seeds each kind of node can see; those of its parents are in their keys.
SEEDS = {
    "corpus": ("problems",),
    "pretrain": ("init", "order", "problems"),
    "midtrain": ("order", "problems"),
    "sft": ("order", "problems"),
    "rl": ("order", "rollout", "problems"),
    "combine": (),
    "parallel": ("order", "rollout", "problems"),
    "evaluation": ("rollout", "problems"),
    "probe": ("problems",),
}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of a spec by key, inputs before what reads them, and where each name leads."""

    spec: Spec
    nodes: dict[str, Node]
    # Keys of corpora by name; of stages and kept checkpoints, and of their evaluations, by (name, repetition); of
    # probes by (probe, name, repetition).
    corpora: dict[str, str]
    stages: dict[tuple[str, int], str]
    evaluations: dict[tuple[str, int], str]
    probes: dict[tuple[str, str, int], str]

    def children(self, key: str) -> list[Node]:
        """The nodes that read this one."""
        return self._readers.get(key, [])

    def made_by(self, key: str) -> list[Node]:
        """The checkpoints that this node makes on its way."""
        return self._made_by.get(key, [])

    @cached_property
    def _readers(self) -> dict[str, list[Node]]:
        readers: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            for key in dict.fromkeys(node.parents.values()):
                readers.setdefault(key, []).append(node)
        return readers

    @cached_property
    def _made_by(self) -> dict[str, list[Node]]:
        made: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            if node.after is not None:
                made.setdefault(node.after, []).append(node)
        return made


def build(spec: Spec) -> Graph:
    """The graph of what the spec's arms and probes need, for every repetition."""
    return _Builder(spec).build()


def canonical(value: Any, hint: Any = None) -> Any:
    """What JSON is made of, for hashing: fields at their default left out, numbers of the type that `hint` declares, so
    that 1 and 1.0 are one thing where a number is real and two where it counts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints, out = _hints(type(value)), {}
        for f in dataclasses.fields(value):
            if (type(value), f.name) not in NON_SEMANTIC:
                item = canonical(getattr(value, f.name), hints[f.name])
                if f.default is f.default_factory is dataclasses.MISSING or item != canonical(
                    _default(f), hints[f.name]
                ):
                    out[f.name] = item
        return out
    if isinstance(value, Mapping):
        inner = _inner(hint)
        return {str(key): canonical(item, inner) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item, _inner(hint)) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and _real(hint):
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} has no canonical form")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _real(hint: Any) -> bool:
    parts: tuple[Any, ...] = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any(part is float for part in parts)


def _inner(hint: Any) -> Any:
    """The type of a container's items: values of a mapping, elements of a sequence."""
    arguments = [argument for argument in get_args(hint) if argument is not Ellipsis]
    return arguments[-1] if arguments and get_origin(hint) not in (Union, UnionType, Literal) else None


def digest(fields: Mapping[str, Any]) -> str:
    """The key of canonical fields: 32 hexadecimal digits of their SHA-256."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def work(graph: Graph) -> dict[str, float]:
    """A rough size of every node in trained tokens: it orders the work and scales the time left, nothing else."""
    sizes: dict[str, float] = {}
    for key, node in graph.nodes.items():
        config = node.config
        matched = sum(sizes[parent] for role, parent in node.parents.items() if role.startswith("match/"))
        sizes[key] = 1.0 if node.after else _size(config, node, matched)
    return sizes


def _size(config: Any, node: Node, matched: float) -> float:
    if isinstance(config, Corpus):
        return 2.0 * config.documents
    if isinstance(config, Train):
        tokens = config.tokens or matched or 1e5
        return float(min(tokens, node.step * config.rows * config.row_length) if node.step else tokens)
    if isinstance(config, RL):
        return 1.0 * (node.step or config.steps or 10) * config.prompts * config.group * config.max_new_tokens
    if isinstance(config, Parallel):
        return sum((_size(part.config, part, 0.0) for part in node.objectives.values()), 0.0)
    operations = sum(len(band) for band in node.context.bands.values())
    if isinstance(config, Evaluation):
        return 0.5 * operations * config.problems * config.samples * config.max_new_tokens
    return 1e3 * operations


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


class _Builder:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.task = spec.task.build()
        self.tokenizer = Tokenizer.for_tasks(self.task).digest
        self.nodes: dict[str, Node] = {}
        self.corpora: dict[str, str] = {}
        self.stages: dict[tuple[str, int], str] = {}
        self.evaluations: dict[tuple[str, int], str] = {}
        self.probes: dict[tuple[str, str, int], str] = {}

    def build(self) -> Graph:
        for label, seeds in self.spec.seed_sets().items():
            for reference in self.spec.arms.values():
                parents = {"stage": self._stage(reference, label, seeds)}
                node = self._node("evaluation", reference, label, self.spec.evaluation, parents, seeds)
                self.evaluations[reference, label] = node.key
            for name, probe in self.spec.probes.items():
                for reference in probe.of:
                    parents = {"stage": self._stage(reference, label, seeds)}
                    if probe.against is not None:
                        parents["against"] = self._stage(probe.against, label, seeds)
                    node = self._node("probe", f"{name} of {reference}", label, probe, parents, seeds)
                    self.probes[name, reference, label] = node.key
        return Graph(
            spec=self.spec,
            nodes=_in_order(_kept(self.nodes)),
            corpora=self.corpora,
            stages=self.stages,
            evaluations=self.evaluations,
            probes=self.probes,
        )

    def _stage(self, reference: str, label: int, seeds: Seeds) -> str:
        """Key of a stage or kept checkpoint, its node and those before it added."""
        if (reference, label) not in self.stages:
            name, step = split_reference(reference)
            node = self._stage_node(name, label, seeds)
            if step is None:
                self.nodes.setdefault(node.key, node)
                self.stages[reference, label] = node.key
                for kept in getattr(node.config, "kept_steps", tuple)():
                    self._stage(f"{name}@{kept}", label, seeds)
            else:
                key = checkpoint_key(node.key, step)
                fields = node.fields | {"step": step}
                node = dataclasses.replace(node, kind="checkpoint", name=reference, key=key, step=step, fields=fields)
                self.nodes.setdefault(key, node)
                self.stages[reference, label] = key
                for kept in getattr(node.config, "kept_steps", tuple)():
                    if kept < step:
                        self._stage(f"{name}@{kept}", label, seeds)
        return self.stages[reference, label]

    def _stage_node(self, name: str, label: int, seeds: Seeds) -> Node:
        config = self.spec.stages[name]
        parents = {}
        if (parent := self.spec.parent_of(name)) is not None:
            parents["parent"] = self._stage(parent, label, seeds)
        objectives = {}
        if isinstance(config, Train):
            parents["corpus"] = self._corpus(config.data)
            parents |= {f"match/{other}": self._stage(other, label, seeds) for other in config.match}
        elif isinstance(config, Combine):
            parents |= {f"of/{other}": self._stage(other, label, seeds) for other in config.of}
        elif isinstance(config, Parallel):
            objectives = {other: self._objective(other, config.steps, label, seeds) for other in config.objectives}
            for other, node in objectives.items():
                parents |= {f"objective/{other}": key for role, key in node.parents.items() if role == "corpus"}
        return self._made(config.kind, name, label, config, parents, seeds, objectives)

    def _objective(self, name: str, steps: int, label: int, seeds: Seeds) -> Node:
        """An objective of a parallel stage: the settings of a stage, whose budget is not used and not hashed."""
        config = self.spec.stages[name]
        assert isinstance(config, Train | RL)
        if isinstance(config, RL):
            config = dataclasses.replace(config, steps=steps, flops=None, keep=(), keep_doubling=0)
        else:
            tokens = steps * config.rows * config.row_length
            config = dataclasses.replace(config, tokens=tokens, flops=None, match=(), keep=(), keep_doubling=0)
        parents = {"parent": self._stage(str(config.parent), label, seeds)}
        if isinstance(config, Train):
            parents["corpus"] = self._corpus(config.data)
        return self._made(config.kind, name, label, config, parents, seeds, {})

    def _corpus(self, name: str) -> str:
        if name not in self.corpora:
            config = Corpus(documents=self.spec.data[name].documents, components=tuple(self.spec.components(name)))
            seeds = Seeds(problems=self.spec.problem_seed)
            self.corpora[name] = self._node("corpus", name, None, config, {}, seeds).key
        return self.corpora[name]

    def _node(
        self,
        kind: str,
        name: str,
        label: int | None,
        config: Corpus | Evaluation | Probe,
        parents: dict[str, str],
        seeds: Seeds,
    ) -> Node:
        node = self._made(kind, name, label, config, parents, seeds, {})
        return self.nodes.setdefault(node.key, node)

    def _made(
        self,
        kind: str,
        name: str,
        label: int | None,
        config: Corpus | StageConfig | Evaluation | Probe,
        parents: dict[str, str],
        seeds: Seeds,
        objectives: dict[str, Node],
    ) -> Node:
        """A node with its key; it is not added."""
        bands = {} if kind == "corpus" else {name: tuple(sorted(band)) for name, band in self.spec.bands.items()}
        fields: dict[str, Any] = {
            "kind": kind,
            "epoch": EPOCHS[kind],
            "config": canonical(config),
            "inputs": _inputs(config, parents),
            "task": [
                self.spec.task.name,
                self.task.epoch,
                canonical(getattr(self.task, "settings", self.spec.task.settings)),
            ],
            "tokenizer": self.tokenizer,
            "seeds": {seed: getattr(seeds, seed) for seed in SEEDS[kind]},
        }
        if kind != "corpus":
            fields["model"] = canonical(self.spec.model)
            # What is probed or sampled on; the names of bands mean nothing.
            fields["operations"] = sorted(o for band in bands.values() for o in band)
        if isinstance(config, RL):
            fields["trained_operations"] = list(bands[config.band])
        if isinstance(config, Parallel):
            fields["objectives"] = sorted(
                ([float(factor), objectives[other].fields] for other, factor in config.objectives.items()),
                key=lambda pair: json.dumps(pair, sort_keys=True),
            )
        return Node(
            kind=kind,
            name=name,
            seed=label,
            key=digest(fields),
            config=config,
            parents=parents,
            context=Context(
                model=self.spec.model,
                task=(self.spec.task.name, dict(self.spec.task.settings)),
                seeds=seeds,
                bands=bands,
            ),
            fields=fields,
            objectives=objectives,
        )


def _inputs(config: Any, parents: Mapping[str, str]) -> dict[str, Any]:
    """Keys of the inputs for hashing. The names that a spec gives to matched and combined stages mean nothing: only
    what they cost, or hold, counts."""
    named = ("match/", "of/", "objective/")
    inputs: dict[str, Any] = {role: key for role, key in parents.items() if not role.startswith(named)}
    if matched := sorted(key for role, key in parents.items() if role.startswith("match/")):
        inputs["match"] = matched
    if isinstance(config, Combine):
        inputs["of"] = sorted([parents[f"of/{name}"], float(factor)] for name, factor in config.of.items())
    return inputs


def _kept(nodes: dict[str, Node]) -> dict[str, Node]:
    """Of the nodes that belong to one stage, the one that goes furthest makes the others on its way."""
    families: dict[str, list[Node]] = {}
    for node in nodes.values():
        families.setdefault(node.stage_key, []).append(node)
    out = dict(nodes)
    for family in families.values():
        furthest = max(family, key=lambda node: math.inf if node.step is None else node.step)
        others = [node for node in family if node is not furthest]
        if others:
            steps = tuple(sorted(node.step for node in others if node.step is not None))
            out[furthest.key] = dataclasses.replace(furthest, keep=steps)
            out |= {node.key: dataclasses.replace(node, after=furthest.key) for node in others}
    return out


def _in_order(nodes: dict[str, Node]) -> dict[str, Node]:
    """Inputs before what reads them, and what makes a checkpoint before it; else the order they came in."""
    out: dict[str, Node] = {}

    def add(key: str) -> None:
        if key not in out:
            node = nodes[key]
            for before in (*node.parents.values(), *([node.after] if node.after else [])):
                add(before)
            out[key] = node

    for key in nodes:
        add(key)
    return out
