"""Words in which a problem can be told: data files that name quantities and say what is known of them in sentences.

A context is a TOML file as those in `contexts/`. It calls a quantity by a thing and a place ("owls in Northgate"), so
that 8 of each name 64 quantities. Words other than FUNCTION_WORDS belong to one context alone: two contexts of a task
that share one are refused, so that what transfers from one to the other is not vocabulary.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import ascii_letters
from typing import Any

from synthetic_tasks.arithmetic.operators import OPERATORS
from synthetic_tasks.reading import ANSWER, DIGITS, PROMPT_END, QUESTION, STEP_END

_COMMON = (
    "an and are as at by each for from how in is it make makes many more number of on than that the there this times "
    "to together what when with without plus minus . , ?"
)
FUNCTION_WORDS = frozenset(_COMMON.split())
RESERVED = frozenset((*ascii_letters, *DIGITS, *OPERATORS, STEP_END, "=", QUESTION, PROMPT_END, ANSWER))
# Every form a context needs, with the slots that stand in it once each.
FORMS: Mapping[str, tuple[str, ...]] = {
    "quantity": ("thing", "place"),
    "leaf": ("target", "value"),
    **dict.fromkeys(OPERATORS, ("target", "left", "right")),
    "question": ("target",),
}
FOLDER = Path(__file__).parent / "contexts"


@dataclass(frozen=True)
class Context:
    """A checked context."""

    name: str
    things: tuple[str, ...]
    places: tuple[str, ...]
    # (form, template) of each of FORMS.
    forms: tuple[tuple[str, str], ...]

    def form(self, name: str) -> str:
        return dict(self.forms)[name]

    def names(self, count: int) -> tuple[str, ...]:
        """What the first `count` quantities are called; few need few words. ValueError where there are not so many."""
        pairs = [(i, j) for i in range(len(self.things)) for j in range(len(self.places))]
        if count > len(pairs):
            raise ValueError(
                f"arithmetic: the context {self.name!r} names {len(pairs)} quantities ({len(self.things)} things x "
                f"{len(self.places)} places), but names is {count}; add things or places, or lower names"
            )
        pairs.sort(key=lambda pair: (max(pair), pair))
        quantity = self.form("quantity")
        return tuple([quantity.format(thing=self.things[i], place=self.places[j]) for i, j in pairs[:count]])

    @property
    def words(self) -> tuple[str, ...]:
        """Every word it can utter, in a fixed order."""
        spoken = [word for _, template in self.forms for word in template.split(" ") if not word.startswith("{")]
        return tuple(dict.fromkeys([*self.things, *self.places, *spoken]))

    @property
    def own_words(self) -> frozenset[str]:
        return frozenset(self.words) - FUNCTION_WORDS


def built_in() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(source: str) -> Context:
    """The built-in context of that name, or the one in a file whose path ends with `.toml`.

    Raises ValueError where there is none, or the file is not a context.
    """
    from synthetic_tasks.registry import nearest

    if not source.endswith(".toml") and source not in built_in():
        hint = nearest(source, ["symbolic", *built_in()])
        raise ValueError(f"arithmetic: unknown context {source!r}; {hint} (or give the path of a .toml file)")
    return read(data_of(source), source)


def data_of(source: str) -> dict[str, Any]:
    """What the file of a context holds. Raises ValueError where it cannot be read."""
    path = Path(source) if source.endswith(".toml") else FOLDER / f"{source}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"arithmetic: the context {source} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"arithmetic: the context {source} is not TOML: {error}") from error


def read(data: Mapping[str, Any], source: str) -> Context:
    """A context from its data. Raises ValueError for everything that is missing, unknown or ambiguous."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"arithmetic: the context {source}: {message}")

    fields = ("name", "things", "places", *FORMS)
    missing = [field for field in fields if field not in data]
    require(not missing, f"{', '.join(map(repr, missing))} missing; a context has {', '.join(fields)}")
    unknown = [field for field in data if field not in fields]
    require(not unknown, f"unknown {', '.join(map(repr, unknown))}; a context has {', '.join(fields)}")
    name = data["name"]
    require(
        isinstance(name, str) and bool(re.fullmatch("[a-z][a-z0-9_]*", name)) and name != "symbolic",
        f"name must be a word of small letters other than 'symbolic', not {name!r}",
    )
    for kind in ("things", "places"):
        words = data[kind]
        require(
            isinstance(words, list) and len(words) >= 2 and all(isinstance(word, str) for word in words),
            f"{kind} must be a list of at least two words",
        )
        for word in words:
            require(word.split() == [word] and "{" not in word and "}" not in word, f"{kind}: {word!r} is not one word")
            require(word not in FUNCTION_WORDS, f"{kind}: {word!r} is a common word; choose one of its own")
            require(words.count(word) == 1, f"{kind}: {word!r} stands there twice")
    both = sorted(set(data["things"]) & set(data["places"]))
    require(not both, f"{', '.join(map(repr, both))} stand in both things and places")
    for form, slots in FORMS.items():
        template = data[form]
        require(
            isinstance(template, str) and template.split() == template.split(" ") and bool(template),
            f"{form!r} must be words separated by one space each",
        )
        found = sorted(word for word in template.split(" ") if "{" in word or "}" in word)
        wanted = sorted(f"{{{slot}}}" for slot in slots)
        require(found == wanted, f"{form!r} needs the slots {' '.join(wanted)}, once each, as words of their own")
    context = Context(
        name=name,
        things=tuple(data["things"]),
        places=tuple(data["places"]),
        forms=tuple([(form, data[form]) for form in FORMS]),
    )
    clash = sorted(context.own_words & RESERVED)
    require(not clash, f"{', '.join(map(repr, clash))} are marks, digits or letters of traces")
    inside = sorted(
        {word for _, template in context.forms for word in template.split(" ")} & {*context.things, *context.places}
    )
    require(not inside, f"{', '.join(map(repr, inside))} stand in a form as well as in things or places")
    told = [data[operator] for operator in OPERATORS]
    require(len(set(told)) == len(told), "two operators are told in the same words")
    return context


def from_record(record: Mapping[str, Any]) -> Context:
    """A context from `dataclasses.asdict` of it, or from the fields of a file. Raises ValueError as `read` does."""
    forms = record.get("forms")
    if isinstance(forms, list | tuple):
        record = {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
        record = {key: value for key, value in record.items() if key != "forms"} | dict(forms)
    return read(record, str(record.get("name", "given")))


def check_clashes(contexts: Sequence[Context]) -> None:
    """Raises ValueError where two contexts have one name or share a word of their own."""
    for one, other in combinations(contexts, 2):
        if one.name == other.name:
            raise ValueError(f"arithmetic: two contexts are called {one.name!r}")
        if shared := sorted(one.own_words & other.own_words):
            raise ValueError(
                f"arithmetic: the contexts {one.name!r} and {other.name!r} share {', '.join(map(repr, shared))}; words "
                "other than the common ones belong to one context alone"
            )
