"""The tidy tables of a spec, read from the store.

Artifacts know nothing of arms and names of bands; those are put on here, as this spec calls them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

import analysis
from analysis.compute import SEVERAL
from testbed.errors import StoreError
from testbed.graph import Graph, build
from testbed.nodes import shelf
from testbed.schema import Spec
from testbed.store import Artifact, Store
from testbed.tracking import METRICS

# Columns of the stages table that a run may leave out of its summary, and what then stands there.
COUNTS: dict[str, Any] = {
    "tokens": 0, "samples": 0, "sampled_tokens": 0, "flops": 0.0, "rows": 0,
    "groups": 0, "groups_with_signal": 0, "weight_change": float("nan"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Everything that was measured for a spec (schemas: `analysis.SCHEMAS`)."""

    spec: Spec
    # One row an (arm, seed, problem).
    outcomes: pd.DataFrame
    # One row a (stage, seed, step).
    curves: pd.DataFrame
    # One row a (stage, seed, step, operations, role), teacher-forced.
    roles: pd.DataFrame
    # One row a (stage, seed).
    stages: pd.DataFrame
    # One row a (stage or evaluation, seed, activity).
    ledger: pd.DataFrame
    # What the spec's probes read off, one row or more a (probe, checkpoint, seed).
    probes: pd.DataFrame
    # Where the artifacts were made: distinct numeric classes and versions.
    environment: list[dict[str, Any]] = field(default_factory=list)

    @property
    def parents(self) -> dict[str, str | None]:
        """The arm that each arm's gain is measured from."""
        return self.spec.parent_arms()


def load(spec: Spec, store: Store) -> Tables:
    """The tables of a finished run. Raises StoreError where something has not been run yet."""
    graph = build(spec)
    found = _artifacts(graph, store)
    bands = {o: band for band, operations in spec.bands.items() for o in operations}

    def outcomes() -> Iterator[pd.DataFrame]:
        for arm, stage in spec.arms.items():
            for seed in spec.seed_sets():
                table = pd.read_parquet(found[graph.evaluations[stage, seed]].path / "outcomes.parquet")
                labels = {"arm": arm, "stage": stage, "key": graph.stages[stage, seed], "seed": seed}
                yield _label(table, bands, labels)

    def per_stage(read: Callable[[Artifact], pd.DataFrame | None]) -> Iterator[pd.DataFrame]:
        for (stage, seed), key in graph.stages.items():
            if (table := read(found[key])) is not None:
                yield _label(table, bands, {"stage": stage, "key": key, "seed": seed})

    made = [found[key] for key in dict.fromkeys([*graph.stages.values(), *graph.evaluations.values()])]
    classes = {
        json.dumps(one | {"versions": artifact.manifest["versions"]}, sort_keys=True)
        for artifact in made
        # Those that a run went through before it was taken up under its own.
        for one in (_class(artifact), *artifact.manifest.get("crossed", []))
    }
    return Tables(
        spec=spec,
        outcomes=pd.concat(outcomes(), ignore_index=True),
        curves=_concat(per_stage(_curve)),
        roles=_concat(per_stage(_roles)),
        stages=pd.DataFrame([_stage_row(graph, found, *place) for place in graph.stages]),
        ledger=_ledger(graph, found),
        probes=_concat(_probes(graph, found, bands)),
        environment=[json.loads(text) for text in sorted(classes)],
    )


def guess_floors(spec: Spec, *, problems: int = 400) -> dict[int, float]:
    """Answer-only pass@1 of the best way of guessing, by operations; takes about half a second each."""
    task, operations = spec.task.build(), sorted(o for band in spec.bands.values() for o in band)
    return {o: task.guess_floor(o, split=spec.evaluation.split, problems=problems)["best"] for o in operations}


def _artifacts(graph: Graph, store: Store) -> dict[str, Artifact]:
    """Stages and evaluations by key; corpora are not read."""
    wanted = [node for node in graph.nodes.values() if node.kind != "corpus"]
    found = {node.key: store.get(shelf(node.kind), node.key) for node in wanted}
    absent = [node for node in wanted if found[node.key] is None]
    if absent:
        raise StoreError(
            f"{len(absent)} of {len(wanted)} stages and evaluations of `{graph.spec.name}` are not in {store.root}, "
            f"such as {absent[0].label}. Run `testbed run` with this spec, store and --set first."
        )
    return {key: artifact for key, artifact in found.items() if artifact is not None}


def _stage_row(graph: Graph, found: dict[str, Artifact], stage: str, seed: int) -> dict[str, Any]:
    key = graph.stages[stage, seed]
    artifact = found[key]
    # What a checkpoint was trained by; that it is one is in its name.
    kind = str(graph.nodes[key].fields["kind"])
    told = {name: value for name, value in artifact.summary.items() if name in COUNTS and value is not None}
    parents = SEVERAL.join(graph.spec.parents_of(stage)) or None
    place = {"stage": stage, "key": key, "kind": kind, "seed": seed, "parent": parents}
    return place | COUNTS | told | {"wall_s": float(artifact.manifest["wall_s"])}


def _ledger(graph: Graph, found: dict[str, Artifact]) -> pd.DataFrame:
    rows = [
        {
            "stage": stage,
            "key": key,
            "kind": graph.nodes[key].fields["kind"],
            "seed": seed,
            "activity": activity,
            **work,
        }
        for place in (graph.stages, graph.evaluations)
        for (stage, seed), key in place.items()
        for activity, work in found[key].summary.get("ledger", {}).items()
    ]
    columns = list(analysis.SCHEMAS["ledger"].columns)
    return pd.DataFrame(rows, columns=columns)


def _probes(graph: Graph, found: dict[str, Artifact], bands: dict[int, str]) -> Iterator[pd.DataFrame]:
    for (probe, stage, seed), key in graph.probes.items():
        table = pd.read_parquet(found[key].path / "probe.parquet")
        labels = {
            "probe": probe, "stage": stage, "key": graph.stages[stage, seed], "seed": seed,
            "against": graph.spec.probes[probe].against,
        }  # fmt: skip
        yield _label(table, bands, labels)


def _class(artifact: Artifact) -> dict[str, Any]:
    """The numeric class; evaluations run on one device whatever the stages had."""
    found: dict[str, Any] = artifact.manifest["numeric_class"]
    alone = artifact.manifest["kind"] == "evaluation"
    return {name: value for name, value in found.items() if not (alone and name == "devices")}


def _curve(artifact: Artifact) -> pd.DataFrame | None:
    path = artifact.path / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    table = pd.DataFrame([json.loads(line) for line in lines]).drop(columns="total", errors="ignore")
    if table.empty:
        return None
    tokens = table["tokens"] if "tokens" in table else pd.Series(float("nan"), index=table.index)
    return table.assign(tokens=tokens.astype("Int64"))


def _roles(artifact: Artifact) -> pd.DataFrame | None:
    path = artifact.path / "roles.parquet"
    return pd.read_parquet(path) if path.exists() else None


def _label(table: pd.DataFrame, bands: dict[int, str], labels: dict[str, Any]) -> pd.DataFrame:
    """The table with the spec's names in front, in place of any it had."""
    front = dict(labels)
    if "operations" in table:
        front["band"] = table["operations"].map(bands)
    return pd.concat(
        [pd.DataFrame(front, index=table.index), table.drop(columns=[c for c in front if c in table])], axis=1
    )


def _concat(parts: Iterator[pd.DataFrame]) -> pd.DataFrame:
    # Columns that only some stages have are NaN elsewhere; concatenating by records keeps pandas from guessing kinds.
    tables = list(parts)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
