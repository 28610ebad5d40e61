"""What an experiment was and where it was made, for the foot of a report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import analysis
from analysis.claims import ClaimResult
from analysis.claims import table as claims_table
from testbed.conditions import versions
from testbed.schema import Spec
from testbed.store import Store
from testbed.tables import Tables


def spec_summary(spec: Spec) -> dict[str, Any]:
    """The spec by its parts, each stage under its name; fields at their default are left out, the model is whole."""
    dump = spec.model_dump(mode="json", exclude_defaults=True)
    shown = ("task", "bands", "evaluation", "seeds", "problem_seed")
    parts: dict[str, Any] = {name: dump[name] for name in shown if name in dump}
    parts["model"] = dataclasses.asdict(spec.model)
    parts |= {f"data {name}": dump["data"][name] for name in spec.data}
    parts |= {f"stage {name}": {"kind": stage.kind} | dump["stages"][name] for name, stage in spec.stages.items()}
    return parts | {"arms": spec.arms}


def keep_tables(out: Path, tables: Tables, claims: Sequence[ClaimResult]) -> None:
    """Write what a study stands on into `out`, so that it can be kept without its store: the whole spec, every outcome,
    the results and verdicts made from them, and the stages with their keys, tokens and FLOPs."""
    out.mkdir()
    spec = json.dumps(tables.spec.model_dump(mode="json"), indent=1)
    (out / "spec.json").write_text(spec + "\n", encoding="utf-8")
    tables.outcomes.to_parquet(out / "outcomes.parquet", index=False)
    for name, table in {
        "results": analysis.flat(analysis.results(tables.outcomes, k=tables.spec.evaluation.k)),
        "claims": claims_table(claims),
        "stages": tables.stages,
    }.items():
        table.to_csv(out / f"{name}.csv", index=False)


def environment_summary(tables: Tables, store: Store) -> dict[str, Any]:
    """Store, command and every numeric class and set of versions that took part; more than one of a thing is told."""
    return {
        "store": str(store.root),
        **{name: " and ".join(values) for name, values in _conditions(tables).items()},
        "report written by": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def mixed_conditions(tables: Tables) -> str:
    """A sentence where stages or evaluations were made under different conditions, such as "threads 1 and 2"; else
    nothing."""
    mixed = [f"{name} {' and '.join(values)}" for name, values in _conditions(tables).items() if len(values) > 1]
    if not mixed:
        return ""
    return f"Parts were made under different conditions ({', '.join(mixed)}): last bits may differ for it."


def _conditions(tables: Tables) -> dict[str, list[str]]:
    """Every value of each part of the numeric class and of each version."""
    merged: dict[str, list[str]] = {}
    for one in tables.environment:
        for name, value in ({**one, **one["versions"]}).items():
            if name != "versions" and str(value) not in merged.setdefault(name, []):
                merged[name].append(str(value))
    return merged
