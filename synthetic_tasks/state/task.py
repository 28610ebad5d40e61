"""Rules that permute symbols are applied one after the other: where does a symbol end, or where did it start?

state p = b c a ; q = a c b ; p q p from a :      p takes a to b, b to c and c to a
p a b ; q b c ; p c a ; ! a                       one line a turn: the rule, the state before, the state after

Asked `to` instead of `from`, the end is known: lines go backwards from the last turn, each with its known state first.

The shortest family; `verify` and `keys` beside it show the rest of what a family has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise, product
from typing import Any, ClassVar

from synthetic_tasks.base import Corruption, ParseError, Problem, Verdict
from synthetic_tasks.choosing import RandomChooser
from synthetic_tasks.family import FEWEST_STRUCTURES, MOST_DRAWS, Drawn, Family, Place, Settings, enough_structures
from synthetic_tasks.reading import ANSWER, PROMPT_END, STEP_END, Cursor, Reading
from synthetic_tasks.state.keys import instance_key, structure_key
from synthetic_tasks.state.verify import KINDS, STATUSES, Step, corrupt, judge

SYMBOLS, RULES = "abcdefghij", "pqrstu"
# The longest program that is drawn: beyond it a prompt has no end.
LONGEST = 256


@dataclass(frozen=True, kw_only=True)
class StateSettings(Settings):
    """Raises ValueError for what cannot be."""

    family: ClassVar[str] = "state"

    # Symbols that a rule permutes.
    size: int = 5
    # Rules of a problem; a program need not use all of them.
    rules: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("size", 3, len(SYMBOLS))
        self.require_integer("rules", 1, len(RULES))


@dataclass(frozen=True)
class Facts:
    """A problem apart from its text; states are numbers from 0, rules are numbers in the order of the prompt."""

    # For every rule the image of every state.
    tables: tuple[tuple[int, ...], ...]
    # Name of every rule.
    names: tuple[str, ...]
    # The rule of every turn.
    program: tuple[int, ...]
    start: int
    inverse: bool

    @cached_property
    def states(self) -> tuple[int, ...]:
        """The state before the first turn and after each."""
        states = [self.start]
        for rule in self.program:
            states.append(self.tables[rule][states[-1]])
        return tuple(states)

    @cached_property
    def gold(self) -> tuple[Step, ...]:
        """The lines of the trace, in the order of the question's direction."""
        symbols = [SYMBOLS[state] for state in self.states]
        lines = list(zip([self.names[rule] for rule in self.program], symbols, symbols[1:], strict=False))
        if self.inverse:
            lines = [(rule, after, before) for rule, before, after in reversed(lines)]
        return tuple([Step(*line, 4 * i) for i, line in enumerate(lines)])

    def apply(self, rule: str, known: str) -> str | None:
        """The symbol that a line of the rule leads to from a known one; None for a rule that there is not."""
        if rule not in self.names or known not in SYMBOLS[: len(self.tables[0])]:
            return None
        table, state = self.tables[self.names.index(rule)], SYMBOLS.index(known)
        return SYMBOLS[table.index(state) if self.inverse else table[state]]


class StateTask(Family[StateSettings, Facts]):
    """Depth without choice: every turn has one right line, and `operations` is the number of turns."""

    name = "state"
    Settings: ClassVar[type[StateSettings]] = StateSettings
    corruptions = KINDS

    def __init__(self, settings: StateSettings) -> None:
        super().__init__(settings)
        self.axes = {"direction": ("forward", "inverse")}
        self._symbols = tuple(SYMBOLS[: settings.size])
        marks = (self.name, STEP_END, "=", "from", "to", PROMPT_END, ANSWER)
        self.vocabulary = (*marks, *self._symbols, *RULES)
        self.statuses = STATUSES
        self.roles = ("next", "lookup", "result", "answer", "mark", "end")
        self.grid = tuple(range(1, 9))

    def check_operations(self, operations: int) -> None:
        if operations > LONGEST:
            raise ValueError(f"state: a program has at most {LONGEST} turns, not {operations}")

    def _draw(self, place: Place, choose: RandomChooser) -> Drawn[Facts]:
        shared = self.structures_shared(place.operations)
        size, rules = self.settings.size, self.settings.rules
        inverse = place.axes["direction"] == "inverse"
        for _ in range(MOST_DRAWS):
            program = tuple([choose.uniform(rules) for _ in range(place.operations)])
            key = structure_key(program)
            if not shared and self.split_of(key) != place.split:
                continue
            tables = tuple([tuple(choose.shuffled(range(size), size)) for _ in range(rules)])
            names = tuple(choose.shuffled(RULES, rules))
            # Where structures are shared, splits are dealt by the instance, whichever way it is asked.
            for start in choose.shuffled(range(size), size):
                instance = instance_key(tables, program, start)
                if not shared or self.split_of(instance) == place.split:
                    facts = Facts(tables, names, program, start, inverse)
                    return self._told(facts, key, instance_key(tables, program, start, asked=place.axes["direction"]))
        raise self.empty_cell(place.operations, place.split, "raise size or rules")

    def _told(self, facts: Facts, structure: str, instance: str) -> Drawn[Facts]:
        rules = [
            f"{name} = {' '.join([SYMBOLS[image] for image in table])} {STEP_END}"
            for name, table in zip(facts.names, facts.tables, strict=True)
        ]
        program = [facts.names[rule] for rule in facts.program]
        known, asked = facts.states[0], facts.states[-1]
        if facts.inverse:
            known, asked = asked, known
        question = ["to" if facts.inverse else "from", SYMBOLS[known], PROMPT_END]
        return Drawn(
            prompt=" ".join([self.name, *rules, *program, *question]),
            solution=" ".join([*[line.text for line in facts.gold], ANSWER, SYMBOLS[asked]]),
            answer=SYMBOLS[asked],
            structure_key=structure,
            instance_key=instance,
            facts=facts,
            difficulty={"rules_used": len(set(facts.program))},
        )

    def structures_shared(self, operations: int) -> bool:
        return not _has_structures(self.settings.rules, operations)

    def _read(self, completion: str, problem: Problem | None) -> Reading[Step, str]:
        symbols, rules = dict(zip(self._symbols, self._symbols, strict=True)), dict(zip(RULES, RULES, strict=True))
        cursor, steps, error = Cursor(completion), list[Step](), None
        try:
            while cursor.token != ANSWER:
                at = cursor.position
                rule = cursor.take(rules, "a rule or the answer")
                known, reached = cursor.take(symbols, "a symbol"), cursor.take(symbols, "a symbol")
                cursor.expect(STEP_END)
                steps.append(Step(rule, known, reached, at))
            cursor.expect(ANSWER)
            cursor.take(symbols, "the answer, a symbol,")
            cursor.end()
        except ParseError as raised:
            error = raised
        tokens = cursor.tokens
        answers = (then for mark, then in pairwise(tokens) if mark == ANSWER and then in symbols)
        return Reading(tuple(steps), next(answers, None), error)

    def _judge(self, problem: Problem, reading: Reading[Any, Any], *, ended: bool) -> Verdict:
        return judge(problem.facts, reading, problem.answer, ended=ended)

    def token_roles(self, problem: Problem) -> list[str]:
        return ["next", "lookup", "result", "mark"] * len(problem.facts.gold) + ["mark", "answer"]

    def lookup_guess(self, problem: Problem) -> float:
        """The known state of a line was just written: any symbol is a guess."""
        return 1 / self.settings.size

    def _guesses(self, problem: Problem) -> Mapping[str, float]:
        """uniform: any symbol; copy: the symbol of the question; last_rule: the last line's rule on that symbol."""
        facts: Facts = problem.facts
        known = facts.gold[0].known
        return {
            "uniform": 1 / self.settings.size,
            "copy": float(known == problem.answer),
            "last_rule": float(facts.apply(facts.gold[-1].rule, known) == problem.answer),
        }

    def _corrupt(self, problem: Problem, kind: str, rng: random.Random) -> Corruption | None:
        return corrupt(problem.facts, kind, problem.answer, self._symbols, RULES, rng)


@lru_cache(maxsize=1024)
def _has_structures(rules: int, operations: int) -> bool:
    def programs() -> Iterator[str]:
        # The first rule is that of the first turn, so programs that begin alike cover all of them.
        every = product(range(rules), repeat=min(operations, 12) - 1)
        yield from (structure_key((0, *rest)) for rest in islice(every, 200 * FEWEST_STRUCTURES))

    return enough_structures(programs())
