"""What an experiment was and where it was made, for the foot of a report."""

from __future__ import annotations

import dataclasses
from typing import Any

from testbed.execute import versions
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


def environment_summary(tables: Tables, store: Store) -> dict[str, Any]:
    """Store, command and every numeric class and set of versions that took part; more than one of a thing is told."""
    merged: dict[str, list[str]] = {}
    for one in tables.environment:
        for name, value in ({**one, **one["versions"]}).items():
            if name != "versions" and str(value) not in merged.setdefault(name, []):
                merged[name].append(str(value))
    return {
        "store": str(store.root),
        **{name: " and ".join(values) for name, values in merged.items()},
        "report written by": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
