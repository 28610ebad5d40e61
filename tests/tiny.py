"""A spec in which everything is tiny and every kind of node occurs; it runs in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testbed.execute import execute
from testbed.graph import Graph, build
from testbed.nodes import Node, shelf
from testbed.spec import parse
from testbed.store import MANIFEST, Artifact, Store
from testbed.tracking import MACHINE, METRICS

CARRIED = {"parent": "stable", "optimizer": "carry", "rate": "continue"}
RESET = {"parent": "stable", "optimizer": "reset", "rate": "restart"}
CONSTANT = {"shape": "constant", "decay": 0}
# About 230 tokens a step.
ROWS = {"rows": 4, "row_length": 64, "probes": 2}
SPEC: dict[str, Any] = {
    "name": "tiny",
    "task": {"name": "arithmetic", "settings": {"modulus": 5, "names": 8}},
    "model": {"layers": 1, "width": 16, "heads": 2, "max_length": 96},
    "bands": {"in_range": [1], "edge": [2]},
    "data": {
        # Few, so that stages run over the end of an epoch.
        "base": {"documents": 40, "operations": {1: 1}},
        "mixed": {"documents": 40, "operations": {2: 1}, "replay": "base", "replay_share": 0.5},
    },
    "stages": {
        "pretrain": {
            "kind": "pretrain", "data": "base", "tokens": 2000, "keep_doubling": 4,
            "schedule": {"warmup": 0.2, "decay": 0}, "optimizer": {"kind": "muon"}, **ROWS,
        },
        "anneal": {
            "kind": "pretrain", "parent": "pretrain", "edge": CARRIED, "data": "base", "tokens": 1000,
            "schedule": {"decay": 1}, "optimizer": {"kind": "muon"}, **ROWS,
        },
        "mid": {
            "kind": "midtrain", "parent": "pretrain@4", "edge": CARRIED, "data": "mixed", "tokens": 1000,
            "schedule": CONSTANT, "optimizer": {"kind": "muon"}, "accumulate": 2, **ROWS,
        },
        "tune": {
            "kind": "sft", "parent": "pretrain@4", "edge": RESET, "data": "mixed", "flops": 2e7,
            "schedule": CONSTANT, "prompt_weight": 0, **ROWS,
        },
        "rl": {
            "kind": "rl", "parent": "pretrain@4", "edge": RESET, "band": "in_range", "steps": 4, "keep": [2],
            "prompts": 2, "group": 3, "max_new_tokens": 16, "reward": "random", "kl": 0.1, "updates": 2,
        },
        "both": {
            "kind": "parallel", "objectives": {"tune": 0.5, "rl": 0.5}, "steps": 4, "every": 2, "keep": [2],
        },
        "mean": {"kind": "combine", "of": {"mid": 0.5, "rl@2": 0.25, "both": 0.25}},
        "continued": {
            "kind": "pretrain", "parent": "pretrain", "edge": CARRIED, "data": "base", "match": ["mid", "both"],
            "schedule": CONSTANT, "optimizer": {"kind": "muon"}, **ROWS,
        },
    },
    "arms": {
        "early": "pretrain@4", "pretrained": "anneal", "mid": "mid", "tune": "tune", "rl": "rl", "both": "both",
        "mean": "mean", "continued": "continued",
    },
    "parents": {
        "pretrained": "early", "mid": "early", "tune": "early", "rl": "early", "both": "early", "mean": "early",
        "continued": "early",
    },
    "probes": {
        "roles": {"measure": "roles", "of": ["pretrain@1", "pretrain@4"], "problems": 4},
        "moved": {"measure": "weights", "of": ["rl", "both@2"], "against": "pretrain@4"},
    },
    "evaluation": {"problems": 2, "samples": 2, "k": [1], "max_new_tokens": 24},
}  # fmt: skip


def graph(**changes: Any) -> Graph:
    """The graph of the tiny spec with top-level fields replaced."""
    return build(parse(SPEC | changes))


def run_all(graph: Graph, store: Store, **more: Any) -> dict[str, Artifact]:
    """Every artifact of a graph, made in this process."""
    store.prepare()
    return {key: execute(node, store, **more) for key, node in graph.nodes.items()}


def node(graph: Graph, name: str) -> Node:
    """The node of a stage or checkpoint."""
    return graph.nodes[graph.stages[name, next(iter(graph.spec.seed_sets()))]]


def contents(artifact: Artifact) -> dict[str, Any]:
    """Everything that is equal in two runs of one node: bytes of files, metrics and manifest without what the machine
    did."""
    files: dict[str, Any] = {
        path.relative_to(artifact.path).as_posix(): path.read_bytes()
        for path in artifact.path.rglob("*")
        if path.is_file() and path.name not in (MANIFEST, METRICS)
    }
    files[METRICS] = metrics(artifact.path)
    differing = ("wall_s", "made", "sha256", "files", "name")
    files[MANIFEST] = {name: value for name, value in artifact.manifest.items() if name not in differing}
    return files


def metrics(path: Path) -> list[dict[str, Any]]:
    lines = (path / METRICS).read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in MACHINE} for line in lines]


def get(store: Store, node: Node) -> Artifact:
    found = store.get(shelf(node.kind), node.key)
    assert found is not None, node.label
    return found
