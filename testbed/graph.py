"""From a spec to its graph of work, every node with a key that names its result.

A key is the SHA-256 of canonical JSON: every field that is not listed in NON_SEMANTIC, the keys of what the node reads,
the digest of the tokenizer, the seeds it uses and the epoch of its code. A field at its default is left out, so a new
field with a default that changes nothing keeps every old key. Experiments that share a prefix share its nodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from synthetic_tasks import Tokenizer
from testbed.config import RL, Evaluation, Train
from testbed.nodes import Context, Corpus, Node, Seeds
from testbed.spec import Spec

# Raise the epoch of a kind when its code or a default changes the result of the same fields: old artifacts stay unused.
EPOCHS = {"corpus": 1, "pretrain": 1, "midtrain": 1, "sft": 1, "rl": 1, "evaluation": 1}

# Fields that cannot change a result, each with the reason. Of names that refer to other parts the contents are hashed.
NON_SEMANTIC = {
    (Train, "parent"),  # a name: the parent's key is hashed
    (Train, "data"),  # a name: the corpus' key is hashed
    (Train, "match"),  # names: the keys of those stages are hashed
    (RL, "parent"),  # a name: the parent's key is hashed
    (RL, "band"),  # a name: the operations of the band are hashed
    (Evaluation, "k"),  # read off the counts afterwards
}

# Seeds each kind of node can see; those of its parents are in their keys.
SEEDS = {
    "corpus": ("problems",),
    "pretrain": ("init", "order", "problems"),
    "midtrain": ("order", "problems"),
    "sft": ("order", "problems"),
    "rl": ("order", "rollout", "problems"),
    "evaluation": ("rollout", "problems"),
}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of a spec by key, parents before children, and where each name leads."""

    spec: Spec
    nodes: dict[str, Node]
    # Keys of corpora by name, of stages and of evaluations by (stage name, repetition).
    corpora: dict[str, str]
    stages: dict[tuple[str, int], str]
    evaluations: dict[tuple[str, int], str]

    def children(self, key: str) -> list[Node]:
        """The nodes that read this one."""
        return [node for node in self.nodes.values() if key in node.parents.values()]


def build(spec: Spec) -> Graph:
    """The graph of what the spec's arms need, for every repetition."""
    return _Builder(spec).build()


def canonical(value: Any) -> Any:
    """What JSON is made of, for hashing: fields at their default left out, numbers of the type their field declares."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints, out = get_type_hints(type(value)), {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if (type(value), f.name) not in NON_SEMANTIC and item != _default(f):
                out[f.name] = canonical(float(item) if hints[f.name] is float else item)
        return out
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} has no canonical form")


def digest(fields: Mapping[str, Any]) -> str:
    """The key of canonical fields: 32 hexadecimal digits of their SHA-256."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def work(graph: Graph) -> dict[str, float]:
    """A rough size of every node in trained tokens: it orders the work and scales the time left, nothing else."""
    sizes: dict[str, float] = {}
    for key, node in graph.nodes.items():
        config = node.config
        if isinstance(config, Corpus):
            sizes[key] = 2.0 * config.documents
        elif isinstance(config, Train):
            matched = sum(sizes[parent] for role, parent in node.parents.items() if role.startswith("match/"))
            sizes[key] = float(config.tokens or matched)
        elif isinstance(config, RL):
            sizes[key] = 1.0 * config.steps * config.prompts * config.group * config.max_new_tokens
        else:
            operations = sum(len(band) for band in node.context.bands.values())
            sizes[key] = 0.5 * operations * config.problems * config.samples * config.max_new_tokens
    return sizes


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

    def build(self) -> Graph:
        for label, seeds in self.spec.seed_sets().items():
            for stage in self.spec.arms.values():
                self._evaluation(stage, label, seeds)
        return Graph(
            spec=self.spec,
            nodes=self.nodes,
            corpora=self.corpora,
            stages=self.stages,
            evaluations=self.evaluations,
        )

    def _evaluation(self, stage: str, label: int, seeds: Seeds) -> None:
        parents = {"stage": self._stage(stage, label, seeds)}
        node = self._node("evaluation", stage, label, self.spec.evaluation, parents, seeds)
        self.evaluations[stage, label] = node.key

    def _stage(self, name: str, label: int, seeds: Seeds) -> str:
        if (name, label) not in self.stages:
            config = self.spec.stages[name]
            parents = {}
            if config.parent is not None:
                parents["parent"] = self._stage(config.parent, label, seeds)
            if isinstance(config, Train):
                parents["corpus"] = self._corpus(config.data)
                parents |= {f"match/{other}": self._stage(other, label, seeds) for other in config.match}
            self.stages[name, label] = self._node(config.kind, name, label, config, parents, seeds).key
        return self.stages[name, label]

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
        config: Corpus | Train | RL | Evaluation,
        parents: dict[str, str],
        seeds: Seeds,
    ) -> Node:
        bands = {} if kind == "corpus" else {name: tuple(sorted(band)) for name, band in self.spec.bands.items()}
        fields: dict[str, Any] = {
            "kind": kind,
            "epoch": EPOCHS[kind],
            "config": canonical(config),
            # The names that a spec gives matched stages mean nothing: only whose cost is matched counts.
            "inputs": {role: key for role, key in parents.items() if not role.startswith("match/")},
            "task": [self.spec.task.name, canonical(getattr(self.task, "settings", self.spec.task.settings))],
            "tokenizer": self.tokenizer,
            "seeds": {seed: getattr(seeds, seed) for seed in SEEDS[kind]},
        }
        if matched := sorted(key for role, key in parents.items() if role.startswith("match/")):
            fields["inputs"]["match"] = matched
        if kind != "corpus":
            fields["model"] = canonical(self.spec.model)
            # What is probed or sampled on; the names of bands mean nothing.
            fields["operations"] = sorted(o for band in bands.values() for o in band)
        if isinstance(config, RL):
            fields["trained_operations"] = list(bands[config.band])
        node = Node(
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
        )
        return self.nodes.setdefault(node.key, node)
