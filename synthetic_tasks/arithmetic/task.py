"""The arithmetic task: sampling, keys, splits and verdicts put together."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import accumulate, chain, islice
from typing import Any, get_args

from synthetic_tasks.arithmetic import floors
from synthetic_tasks.arithmetic.interplay import InterplayScore, interplay_score
from synthetic_tasks.arithmetic.keys import instance_key, split_of, structure_key
from synthetic_tasks.arithmetic.settings import ArithmeticSettings
from synthetic_tasks.arithmetic.structure import (
    Graph,
    RandomChooser,
    draw_core,
    draw_distractors,
    enumerate_cores,
    fact_order,
    fill_values,
    leaf_values,
    levels,
    operations_of,
)
from synthetic_tasks.arithmetic.symbolic import ROLES, Surface
from synthetic_tasks.arithmetic.trace import Facts, Reading, Trace
from synthetic_tasks.arithmetic.values import draw_values
from synthetic_tasks.arithmetic.verify import STATUSES, judge
from synthetic_tasks.base import EmptyCellError, Problem, Split, Verdict

# A cell with fewer structures is split by instances instead.
FEWEST_STRUCTURES = 200
# Structures drawn for one problem, at most, until one falls in the split.
MOST_DRAWS = 2000
# Those of them, where structures are shared, for which only the answer aimed at will do.
DRAWS_FOR_TARGET = 20
SPLITS: tuple[Split, ...] = get_args(Split)


class ArithmeticTask:
    """Named quantities, each given or one of + - * of two others, modulo a prime; the question asks for one of them.

    After iGSM (Ye et al. 2024, arXiv 2407.20311), without its world of shelves and bags: the graph is drawn directly,
    nothing is drawn and thrown away but structures that fall in another split, and `operations` is the exact number of
    operations that the question needs.
    """

    name = "arithmetic"
    epoch = 1
    statuses = STATUSES
    roles = ROLES

    def __init__(self, settings: ArithmeticSettings) -> None:
        self.settings = settings
        self._surface = Surface(modulus=settings.modulus, names=settings.names)
        self.vocabulary = self._surface.vocabulary
        # Operations drawn from, evenly, where none are asked for.
        self.grid = tuple(range(1, min(6, settings.largest) + 1))
        # Everything random comes from this and (seed, index, operations, split).
        self._stream = hashlib.sha256(json.dumps(["arithmetic", asdict(settings)], sort_keys=True).encode())

    @classmethod
    def from_settings(cls, **settings: Any) -> ArithmeticTask:
        return cls(ArithmeticSettings.of(**settings))

    # Sampling -------------------------------------------------------------------------------------------------------

    def sample(
        self,
        *,
        seed: int,
        index: int,
        operations: int | Mapping[int, float] | None = None,
        split: Split = "train",
    ) -> Problem:
        """Problem `index` of the stream `seed`: a function of the arguments and the settings alone.

        operations: how many the question needs; a mapping draws them by weight, none draws them from `grid` evenly.
        Raises ValueError for what cannot be asked, EmptyCellError where the split has no such problem.
        """
        return self.sample_batch(seed=seed, start=index, count=1, operations=operations, split=split)[0]

    def sample_batch(
        self,
        *,
        seed: int,
        start: int,
        count: int,
        operations: int | Mapping[int, float] | None = None,
        split: Split = "train",
    ) -> list[Problem]:
        """Problems `start .. start + count - 1`, each as `sample` gives it."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        if start < 0 or count < 0:
            raise ValueError(f"a stream has problems 0, 1, 2, ...; there is none from {start}, {count} of them")
        seed, start = int(seed), int(start)
        choices, ends = self._weights(operations)
        problems = []
        for index in range(start, start + count):
            chosen = choices[0]
            if len(choices) > 1:
                chosen = random.Random(self._hash("operations", seed, index)).choices(choices, cum_weights=ends)[0]
            problems.append(self._problem(seed, index, chosen, split))
        return problems

    def _weights(self, operations: int | Mapping[int, float] | None) -> tuple[list[int], list[float]]:
        """The operations to choose among and their cumulative weights."""
        if operations is None:
            operations = dict.fromkeys(self.grid, 1.0)
        elif not isinstance(operations, Mapping):
            operations = {operations: 1.0}
        for number, weight in operations.items():
            self.settings.leaf_limit(number)
            if not weight >= 0:
                raise ValueError(f"the weight of {number} operations must not be negative, but is {weight}")
        chosen = {int(number): weight for number, weight in sorted(operations.items()) if weight > 0}
        if not chosen:
            raise ValueError("the weights of operations must have a positive one; give some number of operations")
        return list(chosen), list(accumulate(chosen.values()))

    def _hash(self, *parts: object) -> int:
        stream = self._stream.copy()
        stream.update("|".join(map(str, parts)).encode())
        return int.from_bytes(stream.digest(), "big")

    def _problem(self, seed: int, index: int, operations: int, split: Split) -> Problem:
        settings = self.settings
        modulus = settings.modulus
        choose = RandomChooser(random.Random(self._hash(seed, index, operations, split)))
        core, key, values = self._core(choose, operations, split)
        query = len(core) - 1
        graph = core
        if settings.distractors:
            graph = draw_distractors(settings, core, choose)
            values += [choose.uniform(modulus) for _ in range(settings.distractors)]
            fill_values(operations_of(graph), values, modulus)
        facts = Facts(
            graph=graph,
            values=tuple(values),
            names=tuple(choose.shuffled(self._surface.names, len(graph))),
            query=query,
            modulus=modulus,
            order=tuple(fact_order(graph, settings.order, choose)),
        )
        level = levels(core)
        return Problem(
            task=self.name,
            prompt=self._surface.prompt(facts, settings.question),
            solution=self._surface.solution(facts),
            answer=str(values[query]),
            difficulty={
                "operations": operations,
                # Operations on the longest chain, and on the fullest level (distance from the leaves).
                "depth": level[query],
                "width": max(level.count(depth) for depth in range(1, level[query] + 1)),
                "leaves": len(core) - operations,
                "facts": len(graph),
                # Interplay's count: edges into what the question needs, a literal constant being one (2512.07783).
                "interplay_op": operations + len(core),
            },
            context="symbolic",
            structure_key=key,
            instance_key=instance_key(graph, leaf_values(graph, values), query, modulus),
            seed=seed,
            index=index,
            split=split,
            facts=facts,
        )

    def _core(self, choose: RandomChooser, operations: int, split: Split) -> tuple[Graph, str, list[int]]:
        """What the question needs: a structure of the split, its key and the values of all its nodes."""
        modulus = self.settings.modulus
        shared = self.structures_shared(operations)
        target = choose.uniform(modulus)
        found: tuple[Graph, str, list[int]] | None = None
        for draw in range(MOST_DRAWS):
            core = draw_core(self.settings, operations, choose)
            key = structure_key(core)
            if not shared:
                if split_of(key) == split:
                    return core, key, draw_values(core, modulus, target, choose)
                continue
            values = draw_values(core, modulus, target, choose, accept=partial(self._instance_in, split, core))
            if values:
                found = core, key, values
            # A split may hold no instance with the target as its answer; then any answer has to do.
            if found and (found[2][-1] == target or draw >= DRAWS_FOR_TARGET):
                return found
        raise EmptyCellError(
            f"arithmetic: of {MOST_DRAWS} structures with {operations} operations none falls in the {split} split; "
            "allow more structures (operators, names, branching, leaf_reuse, sharing) or a larger modulus, or ask for "
            "other operations"
        )

    def _instance_in(self, split: Split, core: Graph, values: Sequence[int]) -> bool:
        return split_of(instance_key(core, leaf_values(core, values), len(core) - 1, self.settings.modulus)) == split

    def structures_shared(self, operations: int) -> bool:
        """Whether the cell has so few structures that splits share them and are disjoint in instances only."""
        return not _has_structures(self.settings, operations, FEWEST_STRUCTURES)

    # Traces ---------------------------------------------------------------------------------------------------------

    def read(self, completion: str) -> Reading:
        """As much of a completion as is a trace, and why no more; never raises."""
        return self._surface.read(completion)

    def parse(self, completion: str) -> Trace:
        """What a completion claims. Raises ParseError, and nothing else, where it is not a trace from end to end."""
        reading = self._surface.read(completion)
        if reading.error is not None:
            raise reading.error
        assert reading.answer is not None
        return Trace(reading.steps, reading.answer)

    def verify(self, problem: Problem, completion: str, *, ended: bool = True) -> Verdict:
        """The verdict on a completion (without the end token; `ended`: there was one). Never raises."""
        return judge(problem.facts, self._surface.read(completion), ended=ended)

    def interplay(self, problem: Problem, completion: str) -> InterplayScore:
        """Interplay's two scoring conventions; never raises."""
        return interplay_score(problem.facts, self._surface.read(completion))

    def token_roles(self, problem: Problem) -> list[str]:
        """The role of each token of the problem's solution."""
        return self._surface.roles(problem.facts)

    def lookup_guess(self, problem: Problem) -> float:
        """Accuracy of look-ups that guess a leaf; see `floors.lookup_guess`."""
        return floors.lookup_guess(problem.facts)

    def guess_floor(self, operations: int, *, split: Split = "test", problems: int = 2000) -> dict[str, float]:
        """Accuracy that guessing reaches; see `floors.guess_floor`."""
        return floors.guess_floor(self, operations, split=split, problems=problems)


@lru_cache(maxsize=1024)
def _has_structures(settings: ArithmeticSettings, operations: int, count: int) -> bool:
    """Whether so many structures are found: by drawing, which is quick where there are many, then one by one."""
    choose = RandomChooser(random.Random(0))
    drawn = (draw_core(settings, operations, choose) for _ in range(4 * count))
    # A cell in which so many graphs show so few structures is treated as one that has few.
    every = islice(enumerate_cores(settings, operations), 200 * count)
    keys: set[str] = set()
    for core in chain(drawn, every):
        keys.add(structure_key(core))
        if len(keys) >= count:
            return True
    return False
