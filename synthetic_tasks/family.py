"""What every family of problems shares: settings, streams, cells, splits, verdicts and guess floors.

(seed, index), cell, split -> _draw -> Problem              a family draws
completion -> _read -> Reading -> _judge -> Verdict         a family reads and judges

A new family is a package with a Settings and a Family; the registry names it. `state` is the shortest to learn from.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from itertools import accumulate
from math import fsum
from numbers import Integral
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar, get_args

from synthetic_tasks.base import Corruption, EmptyCellError, ParseError, Problem, Split, StepVerdict, Verdict
from synthetic_tasks.choosing import RandomChooser
from synthetic_tasks.reading import Reading, Trace

# A cell with fewer structures is split by instances instead.
FEWEST_STRUCTURES = 200
# Structures drawn for one problem, at most, until one falls in the split.
MOST_DRAWS = 2000
SPLITS: tuple[Split, ...] = get_args(Split)


# Settings ------------------------------------------------------------------------------------------------------------


def later(default: Any) -> Any:
    """A setting that came after problems were drawn with the others: at its default it changes no stream."""
    return field(default=default, metadata={"later": True})


def surface(default: Any) -> Any:
    """A setting of how problems look, which no stream depends on: one structure is told in any of them."""
    return field(default=default, metadata={"surface": True})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set about every family. Raises ValueError for what cannot be."""

    family: ClassVar[str]

    # Shares of all structures kept for RL and held out, taken from the 0.8 of train; validation and test have 0.1 each.
    rl_share: float = later(0.0)
    held_out_share: float = later(0.0)

    def __post_init__(self) -> None:
        for name in ("rl_share", "held_out_share"):
            self.require_chance(name)
        self.require(
            self.rl_share + self.held_out_share <= 0.7,
            f"rl_share + held_out_share must not exceed 0.7, but are {self.rl_share} + {self.held_out_share}",
        )

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """As the constructor, but an unknown setting is a ValueError that gives the nearest right name."""
        from synthetic_tasks.registry import nearest

        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise ValueError(f"{cls.family} has no setting {name!r}; {nearest(name, known)}")
        return cls(**settings)

    @classmethod
    def portable(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with what files hold in place of their paths. Raises ValueError where one cannot be read."""
        return dict(settings)

    def stream(self) -> dict[str, Any]:
        """The settings that what is drawn depends on."""

        def counts(f: Field[Any]) -> bool:
            if f.metadata.get("later"):
                return bool(getattr(self, f.name) != f.default)
            return not f.metadata.get("surface")

        every = asdict(self)
        return {f.name: every[f.name] for f in fields(self) if counts(f)}

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.family}: {message}")

    def require_integer(self, name: str, least: int | None = None, most: int | None = None) -> None:
        value = getattr(self, name)
        self.require(is_integer(value), f"{name} must be an integer, not {value!r}")
        object.__setattr__(self, name, int(value))
        self.require(
            (least is None or least <= value) and (most is None or value <= most),
            f"{name} must lie in [{least}, {most}], not {value}",
        )

    def require_chance(self, name: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        self.require(number and 0 <= value <= 1, f"{name} must be a chance in [0, 1], not {value!r}")
        object.__setattr__(self, name, float(value))  # 0 and 0.0 are one setting

    def require_one_of(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        self.require(value in known, f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# Families ------------------------------------------------------------------------------------------------------------

SettingsT = TypeVar("SettingsT", bound=Settings)
FactsT = TypeVar("FactsT")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a problem stands: in its stream, and in which cell."""

    seed: int
    index: int
    split: Split
    operations: int
    # Value of every axis.
    axes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Drawn(Generic[FactsT]):
    """What a family draws; fields as in Problem. `difficulty` needs no `operations`."""

    prompt: str
    solution: str
    answer: str
    structure_key: str
    instance_key: str
    facts: FactsT
    difficulty: Mapping[str, int] = field(default_factory=dict)


class Family(ABC, Generic[SettingsT, FactsT]):
    """A family of problems. Sampling is a function of (seed, index) and the cell; it keeps no state.

    The name and the settings make the task again.
    """

    name: ClassVar[str]
    # Raised when the same settings, seed and index give another problem, trace or verdict: results under the old one
    # stay unused.
    epoch: ClassVar[int] = 1
    Settings: ClassVar[type[Any]]
    # Kinds of corruption, each with what it does to the gold trace, in a line.
    corruptions: ClassVar[Mapping[str, str]] = {}

    # Set by the constructor of a family; each in a fixed order.
    # Every token that a prompt or solution of this task can hold.
    vocabulary: tuple[str, ...]
    # Every status a step can have.
    statuses: tuple[str, ...]
    # Every role a solution token can have, of `next` (chooses the step), `name`, `operator`, `lookup` (a value copied),
    # `result` (a value computed), `answer` and `mark`; `end` is the end token's.
    roles: tuple[str, ...]
    # Operations that are drawn, evenly, where none are asked for.
    grid: tuple[int, ...]
    # Axes of a cell beside operations and split, such as `direction`, with their values, the default first.
    axes: Mapping[str, tuple[str, ...]]

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings
        self.axes = {}
        # Everything random comes from this and (seed, index, operations, split).
        self._stream = hashlib.sha256(json.dumps([self.name, settings.stream()], sort_keys=True).encode())

    @classmethod
    def from_settings(cls, **settings: Any) -> Self:
        return cls(cls.Settings.of(**settings))

    # What a family has of its own -------------------------------------------------------------------------------------

    @abstractmethod
    def check_operations(self, operations: int) -> None:
        """Raises ValueError where the settings leave no problem of so many operations."""

    @abstractmethod
    def _draw(self, place: Place, choose: RandomChooser) -> Drawn[FactsT]:
        """A problem of the place. The chooser is the same for all values of the axes, so that one structure is told in
        every way. Raises EmptyCellError where the split has none."""

    @abstractmethod
    def _read(self, completion: str, problem: Problem | None) -> Reading[Any, Any]:
        """As much of a completion as is a trace; never raises."""

    @abstractmethod
    def _judge(self, problem: Problem, reading: Reading[Any, Any], *, ended: bool) -> Verdict:
        """The verdict on a reading, by `conclude`; never raises."""

    @abstractmethod
    def token_roles(self, problem: Problem) -> list[str]:
        """The role of each token of the problem's solution."""

    @abstractmethod
    def structures_shared(self, operations: int) -> bool:
        """Whether the cell has so few structures that splits share them and are disjoint in instances only."""

    @abstractmethod
    def _guesses(self, problem: Problem) -> Mapping[str, float]:
        """Expected accuracy of ways to guess this problem's answer without reasoning."""

    def _corrupt(self, problem: Problem, kind: str, rng: random.Random) -> Corruption | None:
        raise NotImplementedError

    def _is_right(self, problem: Problem, answer: str) -> bool:
        """Whether a constant answer happens to be right; families with several right answers say so here."""
        return answer == problem.answer

    def lookup_guess(self, problem: Problem) -> float:
        """Accuracy, over the solution's `lookup` tokens, of guessing without having learnt to look up; 0 where the
        family has no such tokens."""
        return 0.0

    # Sampling ---------------------------------------------------------------------------------------------------------

    def sample(
        self,
        seed: int,
        index: int,
        *,
        operations: int | Mapping[int, float] | None = None,
        split: Split = "train",
        **axes: str | Mapping[str, float] | None,
    ) -> Problem:
        """Problem `index` of the stream `seed`: a function of the arguments and the settings alone.

        operations: how many the problem needs; a mapping draws them by weight, none draws them from `grid` evenly.
        axes: a value of an axis of the family, or weights of several; none takes the first.
        Raises ValueError for what cannot be asked, EmptyCellError where the split has no such problem.
        """
        return self.sample_batch(seed, index, 1, operations=operations, split=split, **axes)[0]

    def sample_batch(
        self,
        seed: int,
        start: int,
        count: int,
        *,
        operations: int | Mapping[int, float] | None = None,
        split: Split = "train",
        **axes: str | Mapping[str, float] | None,
    ) -> list[Problem]:
        """Problems `start .. start + count - 1`, each as `sample` gives it."""
        self._check_split(split)
        if start < 0 or count < 0:
            raise ValueError(f"a stream has problems 0, 1, 2, ...; there is none from {start}, {count} of them")
        seed, start = int(seed), int(start)
        choices, ends = self._operations(operations)
        weighed = self._axes(axes)
        return [
            self._problem(
                Place(
                    seed=seed,
                    index=index,
                    split=split,
                    operations=self._chosen("operations", choices, ends, seed, index),
                    axes={axis: self._chosen(axis, *some, seed, index) for axis, some in weighed.items()},
                )
            )
            for index in range(start, start + count)
        ]

    def _problem(self, place: Place) -> Problem:
        rng = random.Random(self._hash(place.seed, place.index, place.operations, place.split))
        drawn = self._draw(place, RandomChooser(rng))
        return Problem(
            task=self.name,
            settings=self.settings,
            prompt=drawn.prompt,
            solution=drawn.solution,
            answer=drawn.answer,
            difficulty={"operations": place.operations, **drawn.difficulty},
            axes=place.axes,
            structure_key=drawn.structure_key,
            instance_key=drawn.instance_key,
            seed=place.seed,
            index=place.index,
            split=place.split,
            facts=drawn.facts,
        )

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        share = f"{split}_share"
        if not getattr(self.settings, share, 1.0):
            raise ValueError(f"{self.name}: no structures are kept for the split {split!r}; set {share}, such as 0.1")

    def _operations(self, operations: int | Mapping[int, float] | None) -> tuple[list[int], list[float]]:
        """The operations to choose among and their cumulative weights."""
        if operations is None:
            operations = dict.fromkeys(self.grid, 1.0)
        elif not isinstance(operations, Mapping):
            operations = {operations: 1.0}
        for number, weight in operations.items():
            if not is_integer(number) or number < 1:
                raise ValueError(f"operations must be an integer of at least 1, not {number!r}")
            self.check_operations(number)
            if not weight >= 0:
                raise ValueError(f"the weight of {number} operations must not be negative, but is {weight}")
        chosen = {int(number): weight for number, weight in sorted(operations.items()) if weight > 0}
        if not chosen:
            raise ValueError("the weights of operations must have a positive one; give some number of operations")
        return list(chosen), list(accumulate(chosen.values()))

    def _axes(self, asked: Mapping[str, Any]) -> dict[str, tuple[list[str], list[float]]]:
        """For every axis the values to choose among and their cumulative weights."""
        from synthetic_tasks.registry import nearest

        for axis in asked:
            if axis not in self.axes:
                known = ["operations", "split", *self.axes]
                raise ValueError(f"{self.name} has no axis {axis!r}; {nearest(axis, known)}")
        out = {}
        for axis, values in self.axes.items():
            weights = asked.get(axis) or values[0]
            if not isinstance(weights, Mapping):
                weights = {weights: 1.0}
            for value, weight in weights.items():
                if value not in values:
                    raise ValueError(f"{self.name}: unknown {axis} {value!r}; {nearest(str(value), list(values))}")
                if not weight >= 0:
                    raise ValueError(f"the weight of {axis} {value!r} must not be negative, but is {weight}")
            chosen = {value: weight for value, weight in sorted(weights.items()) if weight > 0}
            if not chosen:
                raise ValueError(f"the weights of {axis} must have a positive one")
            out[axis] = list(chosen), list(accumulate(chosen.values()))
        return out

    def _chosen(self, what: str, choices: Sequence[Any], ends: Sequence[float], seed: int, index: int) -> Any:
        if len(choices) == 1:
            return choices[0]
        return random.Random(self._hash(what, seed, index)).choices(choices, cum_weights=ends)[0]

    def _hash(self, *parts: object) -> int:
        stream = self._stream.copy()
        stream.update("|".join(map(str, parts)).encode())
        return int.from_bytes(stream.digest(), "big")

    def split_of(self, key: str) -> Split:
        """Train, validation and test by 80, 10 and 10 in 100 of all keys; `rl` and `held_out` are taken from train."""
        share = int(key[:8], 16) / 16**8
        if share >= 0.8:
            return "validation" if share < 0.9 else "test"
        kept = 0.8 - self.settings.held_out_share
        return "held_out" if share >= kept else "rl" if share >= kept - self.settings.rl_share else "train"

    def empty_cell(self, operations: int, split: Split, advice: str) -> EmptyCellError:
        return EmptyCellError(
            f"{self.name}: of {MOST_DRAWS} structures with {operations} operations none falls in the {split} split; "
            f"{advice}, or ask for other operations"
        )

    # Traces -----------------------------------------------------------------------------------------------------------

    def parse(self, completion: str) -> Trace[Any, Any]:
        """What a completion claims. Raises ParseError, and nothing else, where it is not a trace from end to end."""
        reading = self._read(completion, None)
        if reading.error is not None:
            raise reading.error
        assert reading.answer is not None
        return Trace(reading.steps, reading.answer)

    def verify(self, problem: Problem, completion: str, *, ended: bool = True) -> Verdict:
        """The verdict on a completion (without the end token; `ended`: there was one). Never raises."""
        return self._judge(problem, self._read(completion, problem), ended=ended)

    def corrupt(self, problem: Problem, kind: str, seed: int) -> Corruption | None:
        """The gold trace spoilt in one way, at a place that the seed chooses; None where the trace has no room for it.

        Raises ValueError for a kind that is not among `corruptions`.
        """
        from synthetic_tasks.registry import nearest

        if kind not in self.corruptions:
            raise ValueError(f"{self.name} has no corruption {kind!r}; {nearest(kind, list(self.corruptions))}")
        return self._corrupt(problem, kind, random.Random(self._hash("corrupt", kind, seed, problem.instance_key)))

    # Guessing ---------------------------------------------------------------------------------------------------------

    def guess_floor(
        self, operations: int, *, split: Split = "test", problems: int = 2000, **axes: str | None
    ) -> dict[str, float]:
        """Accuracy of each way of guessing on `problems` problems of the split, and the `best` of them.

        majority is the most frequent answer of as many training problems; the others are the family's.
        """
        if problems < 1:
            raise ValueError(f"problems must be at least 1, not {problems}")
        seen = self.sample_batch(0, 0, problems, operations=operations, split="train", **axes)
        majority = Counter(problem.answer for problem in seen).most_common(1)[0][0]
        hits: dict[str, list[float]] = {}
        # Another stream than that of seen, should the split be train.
        for problem in self.sample_batch(1, 0, problems, operations=operations, split=split, **axes):
            guessed = {"majority": float(self._is_right(problem, majority)), **self._guesses(problem)}
            for name, accuracy in guessed.items():
                hits.setdefault(name, []).append(accuracy)
        floor = {name: fsum(found) / problems for name, found in hits.items()}
        return {**floor, "best": max(floor.values()), "measured": float(problems)}


# What the rest of the house calls a family with its settings.
Task: TypeAlias = Family[Any, Any]


def enough_structures(keys: Iterable[str]) -> bool:
    """Whether FEWEST_STRUCTURES different ones are among the keys; reads no further."""
    seen: set[str] = set()
    for key in keys:
        seen.add(key)
        if len(seen) >= FEWEST_STRUCTURES:
            return True
    return False


def conclude(
    steps: Sequence[StepVerdict],
    *,
    obligations: Sequence[str],
    met: Collection[str],
    answer_correct: bool,
    ended: bool,
    error: ParseError | None,
) -> Verdict:
    """The verdict that follows from each step's and the obligations that valid steps met; `ended`: not cut off."""
    missing = tuple([name for name in obligations if name not in met])
    invalid = extra = 0
    first_error: int | None = None
    for i, step in enumerate(steps):
        status = step.status
        if status == "extra":
            extra += 1
        elif status != "ok":
            if first_error is None:
                first_error = i
            invalid += status != "inherited"
    strict = ended and error is None and answer_correct and not missing and first_error is None
    total = len(obligations)
    return Verdict(
        steps=tuple(steps),
        obligations=total,
        missing=missing,
        answer_correct=answer_correct,
        strict=strict,
        exact=strict and not extra,
        process_score=(total - len(missing)) / (total + invalid) if total + invalid else 0.0,
        first_error=first_error,
        parse_error=error,
    )
