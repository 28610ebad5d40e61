"""From a name, a file or a mapping to a checked spec."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from models.config import PRESETS
from testbed.checks import check
from testbed.config import RL, Train
from testbed.errors import SpecError, nearest
from testbed.reading import explain, override, plain, read_yaml
from testbed.schema import Attribution, Data, Spec, TaskSpec

__all__ = ["Attribution", "Data", "Spec", "TaskSpec", "load", "names", "parse"]

BUILT_IN = Path(__file__).parent / "specs"


def names() -> list[str]:
    """Names of the built-in specs."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def load(spec: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """A built-in spec by name, or one from a YAML file, with `path=value` changes such as `stages.mid.tokens=20000`.

    Raises SpecError, whose message is one paragraph for each mistake.
    """
    path = _find(str(spec))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from error
    raw = read_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise SpecError(f"{path} must hold a mapping of fields: name, task, bands, data, stages, arms and more.")
    for change in overrides:
        override(raw, change)
    return parse(raw, source=str(spec))


def parse(raw: Mapping[str, Any], *, source: str = "the spec") -> Spec:
    """A spec from a mapping of the shape of a YAML file. Raises SpecError."""
    try:
        # By way of JSON, pydantic's strict mode takes lists for tuples and "3" for the key 3, and nothing else.
        text = json.dumps(_expand_parts(_expand_preset(plain(raw, ""))))
        spec = Spec.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = [explain(Spec, raw, e) for e in error.errors()]
    except SpecError as error:
        problems = [str(error)]
    except RecursionError:
        problems = ["the spec refers to itself (a YAML alias inside its own anchor) or is nested far too deeply."]
    else:
        problems = check(spec)
    if problems:
        raise SpecError("\n".join(f"{source}: {problem}" for problem in problems))
    return spec


def _find(spec: str) -> Path:
    if spec in names():
        return BUILT_IN / f"{spec}.yaml"
    path = Path(spec)
    if path.exists():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise SpecError(f"There is no spec file {spec}.")
    raise SpecError(
        f"There is no spec named `{spec}`{nearest(spec, names())}. Built-in specs: {', '.join(names())}; "
        "a file of your own is given by its path, such as my/spec.yaml."
    )


def _expand_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """`model: {preset: 0.1M, canon: 0}` becomes all fields of that size, with canon changed."""
    model = raw.get("model")
    if isinstance(model, dict) and "preset" in model:
        size = str(model["preset"])
        if size not in PRESETS:
            raise SpecError(
                f"model.preset: there is no size `{size}`{nearest(size, PRESETS)}. Sizes: {', '.join(PRESETS)}."
            )
        changes = {key: value for key, value in model.items() if key != "preset"}
        return {**raw, "model": {**dataclasses.asdict(PRESETS[size]), **changes}}
    return raw


def _expand_parts(raw: dict[str, Any]) -> dict[str, Any]:
    """What is given in part keeps the rest of its stage's own default: `optimizer: {clip: 0.5}` keeps RL's rate."""
    stages = raw.get("stages")
    if not isinstance(stages, dict):
        return raw
    return {**raw, "stages": {name: _expand_stage(stage) for name, stage in stages.items()}}


def _expand_stage(stage: Any) -> Any:
    if not isinstance(stage, dict):
        return stage
    kind = RL if stage.get("kind") == "rl" else Train
    parts = {f.name: f.default_factory() for f in dataclasses.fields(kind) if callable(f.default_factory)}
    given = {name: stage[name] for name in parts if isinstance(stage.get(name), dict)}
    return {**stage, **{name: {**dataclasses.asdict(parts[name]), **given[name]} for name in given}}
