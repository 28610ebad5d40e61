"""The arithmetic task: sampling, keys, splits and verdicts put together."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any, ClassVar

from synthetic_tasks.arithmetic import floors
from synthetic_tasks.arithmetic.corrupt import KINDS, corrupt
from synthetic_tasks.arithmetic.interplay import InterplayScore, interplay_score
from synthetic_tasks.arithmetic.keys import instance_key, structure_key
from synthetic_tasks.arithmetic.settings import ArithmeticSettings
from synthetic_tasks.arithmetic.structure import (
    Graph,
    draw_core,
    draw_distractors,
    enumerate_cores,
    fact_order,
    fill_values,
    leaf_values,
    levels,
    operations_of,
)
from synthetic_tasks.arithmetic.surface import ROLES, Surface
from synthetic_tasks.arithmetic.trace import Facts, Reading
from synthetic_tasks.arithmetic.values import draw_values
from synthetic_tasks.arithmetic.verify import STATUSES, judge
from synthetic_tasks.base import Corruption, Problem, Split, Verdict
from synthetic_tasks.choosing import RandomChooser
from synthetic_tasks.family import FEWEST_STRUCTURES, MOST_DRAWS, Drawn, Family, Place, enough_structures
from synthetic_tasks.reading import Reading as AnyReading

# Of the structures drawn for one problem, where they are shared, those for which only the answer aimed at will do.
DRAWS_FOR_TARGET = 20


class ArithmeticTask(Family[ArithmeticSettings, Facts]):
    """Named quantities, each given or one of + - * of two others, modulo a prime; the question asks for one of them.

    After iGSM (Ye et al. 2024, arXiv 2407.20311), without its world of shelves and bags: the graph is drawn directly,
    nothing is drawn and thrown away but structures that fall in another split, and `operations` is the exact number of
    operations that the question needs.
    """

    name = "arithmetic"
    Settings: ClassVar[type[ArithmeticSettings]] = ArithmeticSettings
    corruptions = KINDS

    def __init__(self, settings: ArithmeticSettings) -> None:
        super().__init__(settings)
        prose = settings.prose
        self._surfaces = {
            name: Surface(modulus=settings.modulus, names=settings.names, context=prose.get(name))
            for name in settings.context_names
        }
        self.axes = {"context": settings.context_names}
        self.vocabulary = tuple(dict.fromkeys(word for s in self._surfaces.values() for word in s.vocabulary))
        self.statuses, self.roles = STATUSES, ROLES
        self.grid = tuple(range(1, min(6, settings.largest) + 1))

    # Sampling -------------------------------------------------------------------------------------------------------

    def check_operations(self, operations: int) -> None:
        self.settings.leaf_limit(operations)

    def _draw(self, place: Place, choose: RandomChooser) -> Drawn[Facts]:
        settings = self.settings
        modulus = settings.modulus
        core, key, values = self._core(choose, place.operations, place.split)
        query = len(core) - 1
        graph = core
        if settings.distractors:
            graph = draw_distractors(settings, core, choose)
            values += [choose.uniform(modulus) for _ in range(settings.distractors)]
            fill_values(operations_of(graph), values, modulus)
        surface = self._surfaces[place.axes["context"]]
        facts = Facts(
            graph=graph,
            values=tuple(values),
            names=tuple(choose.shuffled(surface.names, len(graph))),
            query=query,
            modulus=modulus,
            order=tuple(fact_order(graph, settings.order, choose)),
        )
        level = levels(core)
        return Drawn(
            prompt=surface.prompt(facts, settings.question),
            solution=surface.solution(facts),
            answer=str(values[query]),
            difficulty={
                # Operations on the longest chain, and on the fullest level (distance from the leaves).
                "depth": level[query],
                "width": max(level.count(depth) for depth in range(1, level[query] + 1)),
                "leaves": len(core) - place.operations,
                "facts": len(graph),
                # Interplay's count: edges into what the question needs, a literal constant being one (2512.07783).
                "interplay_op": place.operations + len(core),
            },
            structure_key=key,
            instance_key=instance_key(graph, leaf_values(graph, values), query, modulus),
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
                if self.split_of(key) == split:
                    return core, key, draw_values(core, modulus, target, choose)
                continue
            values = draw_values(core, modulus, target, choose, accept=partial(self._instance_in, split, core))
            if values:
                found = core, key, values
            # A split may hold no instance with the target as its answer; then any answer has to do.
            if found and (found[2][-1] == target or draw >= DRAWS_FOR_TARGET):
                return found
        raise self.empty_cell(
            operations,
            split,
            "allow more structures (operators, names, branching, leaf_reuse, sharing) or a larger modulus",
        )

    def _instance_in(self, split: Split, core: Graph, values: Sequence[int]) -> bool:
        key = instance_key(core, leaf_values(core, values), len(core) - 1, self.settings.modulus)
        return self.split_of(key) == split

    def structures_shared(self, operations: int) -> bool:
        """Whether the cell has so few structures that splits share them and are disjoint in instances only."""
        return not _has_structures(self.settings, operations)

    # Traces ---------------------------------------------------------------------------------------------------------

    def _read(self, completion: str, problem: Problem | None) -> Reading:
        if problem is not None:
            return self._surfaces[problem.context].read(completion)
        # The words of two contexts differ, so the first name tells which it is.
        readings = [surface.read(completion) for surface in self._surfaces.values()]
        return max(readings, key=lambda reading: (reading.error is None, len(reading.steps), _reach(reading)))

    def _judge(self, problem: Problem, reading: AnyReading[Any, Any], *, ended: bool) -> Verdict:
        return judge(problem.facts, reading, ended=ended)

    def _corrupt(self, problem: Problem, kind: str, rng: random.Random) -> Corruption | None:
        surface = self._surfaces[problem.context]
        steps = list(surface.read(problem.solution).steps)
        return corrupt(problem.facts, surface.names, kind, steps, surface.step, rng)

    def interplay(self, problem: Problem, completion: str) -> InterplayScore:
        """Interplay's two scoring conventions; never raises."""
        return interplay_score(problem.facts, self._surfaces[problem.context].read(completion))

    def token_roles(self, problem: Problem) -> list[str]:
        """The role of each token of the problem's solution."""
        return self._surfaces[problem.context].roles(problem.facts)

    def lookup_guess(self, problem: Problem) -> float:
        """Accuracy of look-ups that guess a leaf; see `floors.lookup_guess`."""
        return floors.lookup_guess(problem.facts)

    def _guesses(self, problem: Problem) -> Mapping[str, float]:
        return floors.guesses(problem.facts, self.settings.question)


def _reach(reading: Reading) -> int:
    """How far a reading came."""
    return -1 if reading.error is None else reading.error.position


@lru_cache(maxsize=1024)
def _has_structures(settings: ArithmeticSettings, operations: int) -> bool:
    """Whether there are enough structures: by drawing, which is quick where there are many, then one by one."""

    def cores() -> Iterator[Graph]:
        choose = RandomChooser(random.Random(0))
        yield from (draw_core(settings, operations, choose) for _ in range(4 * FEWEST_STRUCTURES))
        # A cell in which so many graphs show so few structures is treated as one that has few.
        yield from islice(enumerate_cores(settings, operations), 200 * FEWEST_STRUCTURES)

    return enough_structures(map(structure_key, cores()))
