"""Canonical forms of a program and of its instance: rules and symbols are numbered as they are met."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import permutations


def structure_key(program: Sequence[int]) -> str:
    """Which turns take the same rule, whatever it is called."""
    order = {rule: number for number, rule in enumerate(dict.fromkeys(program))}
    return _key([order[rule] for rule in program])


def instance_key(tables: Sequence[Sequence[int]], program: Sequence[int], start: int, *, asked: str = "") -> str:
    """The program with its tables, up to names of rules and symbols.

    Symbols are numbered as they are reached from the start by the rules in the order of their first turn, then by those
    that no turn takes, in the order that gives the least form. Symbols that no rule reaches are not told apart: two
    such instances may share a key, equal ones never differ.
    """
    used = list(dict.fromkeys(program))
    unused = [rule for rule in range(len(tables)) if rule not in used]
    forms = (_form([tables[rule] for rule in (*used, *rest)], start) for rest in permutations(unused))
    order = {rule: number for number, rule in enumerate(used)}
    return _key([[order[rule] for rule in program], len(tables[0]), min(forms), asked])


def _form(tables: Sequence[Sequence[int]], start: int) -> list[list[int]]:
    """The tables on the symbols reached from the start, numbered as they are reached."""
    number, reached = {start: 0}, [start]
    for symbol in reached:  # grows as it is walked
        for table in tables:
            image = table[symbol]
            if image not in number:
                number[image] = len(reached)
                reached.append(image)
    return [[number[table[symbol]] for symbol in reached] for table in tables]


def _key(form: object) -> str:
    return hashlib.sha256(repr(form).encode()).hexdigest()[:32]
