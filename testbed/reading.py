"""Reading a spec: YAML as people write it, `path=value` changes, and pydantic's complaints in words."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

from testbed.errors import SpecError, nearest

# No spec comes near these.
MOST_LEVELS = 50
MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as people write it: `1e-3` is a number, and a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [str(key) for key, count in Counter(map(str, keys)).items() if count > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"`{twice[0]}` is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(text: str, where: str) -> Any:
    """Raises SpecError for text that is not YAML, or that no experiment needs: too deep or too large."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: this is not YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise SpecError(f"{where}: this is nested far too deeply.") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise SpecError(f"{where}: this holds a value that cannot be read: {error}.") from error
    _measure(value, where)
    return value


def _measure(value: Any, where: str) -> None:
    """Aliases make a few lines of YAML endless or enormous."""
    seen, stack = 0, [(value, 0)]
    while stack:
        here, depth = stack.pop()
        seen += 1
        if depth > MOST_LEVELS:
            raise SpecError(f"{where}: this refers to itself (an alias inside its own anchor) or is nested too deeply.")
        if seen > MOST_VALUES:
            raise SpecError(f"{where}: this holds more than {MOST_VALUES} values, aliases written out.")
        inner = here.values() if isinstance(here, dict) else here if isinstance(here, list) else ()
        stack += [(item, depth + 1) for item in inner]


def override(raw: dict[str, Any], change: str) -> None:
    """Apply one `path=value` to a spec as read. Raises SpecError where the path cannot be followed."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise SpecError(f"--set takes path=value, such as stages.mid.tokens=20000, not `{change}`.")
    value = read_yaml(text, f"--set {change}")
    here: Any = raw
    *parents, last = path.split(".")
    if "" in (*parents, last):
        raise SpecError(f"--set {change}: a part of the path is empty.")
    for part in parents:
        here = here[_key(here, part, change)] if _has(here, part) else _grow(here, part, change)
    here[_key(here, last, change)] = value


def _has(here: Any, part: str) -> bool:
    return isinstance(here, list) or (isinstance(here, dict) and any(str(key) == part for key in here))


def _grow(here: Any, part: str, change: str) -> dict[str, Any]:
    if isinstance(here, dict) and here and all(isinstance(value, dict) for value in here.values()):
        known = ", ".join(map(str, here))
        raise SpecError(
            f"--set {change}: there is no `{part}`{nearest(part, map(str, here))}; there are {known}. "
            "A new one is given whole."
        )
    child: dict[str, Any] = {}
    here[_key(here, part, change)] = child
    return child


def _key(here: Any, part: str, change: str) -> Any:
    """The key or index that `part` of a path means in `here`."""
    if isinstance(here, dict):
        return next((key for key in here if str(key) == part), part)
    if isinstance(here, list) and part.isdigit() and int(part) < len(here):
        return int(part)
    if isinstance(here, list):
        raise SpecError(f"--set {change}: `{part}` is not an index of a list of {len(here)}.")
    raise SpecError(f"--set {change}: `{part}` lies below {_show(here)}, which has no fields.")


def plain(value: Any, path: str) -> Any:
    """The value as JSON can hold it; a whole float (1e6) becomes the integer it is."""
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{path}.{i}") for i, v in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SpecError(f"{path}: {value} is not a finite number.")
        return int(value) if value == int(value) else value
    if value is None or isinstance(value, bool | int | str):
        return value
    raise SpecError(f"{path}: {_show(value)} has no meaning here; write text, numbers, lists or mappings.")


def explain(schema: type[BaseModel], raw: Mapping[str, Any], error: Any) -> str:
    """One of pydantic's errors in words: the path, what was given, what is expected."""
    location = tuple(part for part in error["loc"] if part != "[key]")
    kind, given = error["type"], error["input"]
    path = _path(raw, location, missing=kind == "missing")
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields(schema, location[:-1]) + (["preset"] if location[:-1] == ("model",) else [])
        return f"{path}: unknown field{nearest(str(location[-1]), known)}. Known here: {', '.join(known)}."
    if kind == "missing":
        return f"{path}: this field is required."
    if kind == "union_tag_invalid":
        tags = error["ctx"]["expected_tags"].replace("'", "").split(", ")
        tag = error["ctx"]["tag"]
        return f"{path}.kind: unknown kind `{tag}`{nearest(tag, tags)}. Kinds: {', '.join(tags)}."
    if kind == "union_tag_not_found":
        return f"{path}.kind: this field is required (pretrain, midtrain, sft or rl)."
    if kind == "value_error":
        message, part = str(error["ctx"]["error"]), path.rpartition(".")[2]
        # Many messages start with the part they are about, which ends the path too.
        return f"{path}{message.removeprefix(part)}." if message.startswith(f"{part}.") else f"{path}: {message}."
    expected = error["msg"]
    for theirs, ours in _PHRASES.items():
        expected = expected.replace(theirs, ours)
    return f"{path}: {expected}, not {_show(given)}."


def _path(raw: Any, location: Sequence[Any], *, missing: bool) -> str:
    """The path as the person wrote it: pydantic's location without the tags of unions."""
    parts: list[str] = []
    here = raw
    for i, part in enumerate(location):
        if isinstance(here, Mapping) and any(str(key) == str(part) for key in here):
            here = here[next(key for key in here if str(key) == str(part))]
        elif isinstance(here, list | tuple) and isinstance(part, int):
            here = here[part]
        elif not (missing and i == len(location) - 1):
            continue
        parts.append(str(part))
    return ".".join(parts) or "top level"


def _fields(kind: Any, location: Sequence[Any]) -> list[str]:
    """Names of the fields at a location of pydantic's, following the types."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _fields(get_args(kind)[0], location)
    if origin in (Union, UnionType):
        options = [option for option in get_args(kind) if _own_fields(option)]
        if location and (tagged := [o for o in options if location[0] in _tags(o)]):
            return _fields(tagged[0], location[1:])
        named = location and location[0] == options[0].__name__
        return _fields(options[0], location[1:] if named else location)
    if origin in (dict, tuple) and location:
        return _fields(get_args(kind)[1 if origin is dict else 0], location[1:])
    hints = {name: get_type_hints(kind, include_extras=True)[name] for name in _own_fields(kind)}
    if not location:
        return list(hints)
    return _fields(hints[location[0]], location[1:]) if location[0] in hints else []


def _own_fields(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _tags(option: Any) -> Iterable[Any]:
    return get_args(get_type_hints(option).get("kind")) if dataclasses.is_dataclass(option) else ()


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({_WORDS.get(type(value), type(value).__name__)})"


_PHRASES = {"Input should be": "expected", "an object": "a mapping of fields", "a valid array": "a list"}
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
