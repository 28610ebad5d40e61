"""Valid traces of arithmetic problems from the prompt's text alone: an oracle that shares no code with the verifier."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Claim:
    """One step of a trace."""

    left: str
    left_value: int
    operator: str
    right: str
    right_value: int
    target: str
    result: int

    def __str__(self) -> str:
        operands = f"{self.left} {self.left_value} {self.operator} {self.right} {self.right_value}"
        return f"{operands} = {self.target} {self.result} ;"


def compute(operator: str, left: int, right: int, modulus: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % modulus


class Reading:
    """A prompt, read and solved."""

    def __init__(self, prompt: str, modulus: int) -> None:
        self.modulus = modulus
        self.leaves: dict[str, int] = {}
        self.operations: dict[str, tuple[str, str, str]] = {}
        # Names in the order in which the prompt states their facts.
        self.order: list[str] = []
        text, colon = prompt[:-2], prompt[-2:]
        assert colon == " :"
        for part in text.split(" ; "):
            match part.split(" "):
                case ["?", name]:
                    self.query = name
                case [name, value]:
                    self.leaves[name] = int(value)
                    self.order.append(name)
                case [left, operator, right, "=", name]:
                    self.operations[name] = (left, operator, right)
                    self.order.append(name)
                case _:
                    raise AssertionError(part)
        self.values = {name: self._solve(name) for name in self.order}
        self.needed = self._ancestors(self.query)

    def _solve(self, name: str) -> int:
        if name in self.leaves:
            return self.leaves[name]
        left, operator, right = self.operations[name]
        return compute(operator, self._solve(left), self._solve(right), self.modulus)

    def _ancestors(self, name: str) -> set[str]:
        if name in self.leaves:
            return set()
        left, _, right = self.operations[name]
        return {name} | self._ancestors(left) | self._ancestors(right)

    def needed_leaves(self) -> set[str]:
        return {operand for name in self.needed for operand in self.operations[name][::2]} & set(self.leaves)

    def depth(self, name: str) -> int:
        return 0 if name in self.leaves else 1 + max(self.depth(operand) for operand in self.operations[name][::2])


def valid_trace(problem: Reading, rng: random.Random, *, extras: float = 0.5) -> list[Claim]:
    """A random order of the needed steps and some others, operands of + and * in a random order."""
    wanted = set(problem.needed)
    for name in problem.operations:
        if name not in wanted and rng.random() < extras:
            wanted |= problem._ancestors(name)
    known = set(problem.leaves)
    claims = []
    while wanted:
        ready = sorted(name for name in wanted if {*problem.operations[name][::2]} <= known)
        name = rng.choice(ready)
        wanted.remove(name)
        known.add(name)
        left, operator, right = problem.operations[name]
        if operator != "-" and rng.random() < 0.5:
            left, right = right, left
        values = problem.values
        claims.append(Claim(left, values[left], operator, right, values[right], name, values[name]))
    return claims


def propagate(problem: Reading, claims: list[Claim], after: int) -> list[Claim]:
    """The claims with those after position `after` quoting what was stated before, and computing on with it."""
    stated = dict(problem.leaves)
    out = []
    for position, claim in enumerate(claims):
        if position > after:
            left, right = stated.get(claim.left, claim.left_value), stated.get(claim.right, claim.right_value)
            result = compute(claim.operator, left, right, problem.modulus)
            claim = replace(claim, left_value=left, right_value=right, result=result)
        stated.setdefault(claim.target, claim.result)
        out.append(claim)
    return out


def text(claims: list[Claim], answer: int | str) -> str:
    return " ".join([*map(str, claims), f"! {answer}"])
