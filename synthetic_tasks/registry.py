"""Every task by name. A new task is a package beside `arithmetic` and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from synthetic_tasks.base import Corruption, Problem
from synthetic_tasks.family import Task

# name -> (module, class, one line on what it is); the module is imported when the task is asked for.
TASKS: dict[str, tuple[str, str, str]] = {
    "arithmetic": (
        "synthetic_tasks.arithmetic",
        "ArithmeticTask",
        "chains of + - * between named quantities, modulo a prime; each step can be verified",
    ),
    "state": (
        "synthetic_tasks.state",
        "StateTask",
        "rules that permute symbols, applied one after the other; forward or inverse",
    ),
}


def nearest(name: str, known: list[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def list_tasks() -> dict[str, str]:
    """Every task's name and what it is, in one line."""
    return {name: description for name, (_, _, description) in TASKS.items()}


def get_task(name: str, **settings: Any) -> Task:
    """The task of that name. Raises ValueError for an unknown name, an unknown setting or a value that cannot be."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; {nearest(str(name), list(TASKS))}")
    return _family(name).from_settings(**settings)


def portable(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A task's settings with what files hold in place of their paths; as they are for an unknown task."""
    return _family(name).Settings.portable(settings) if name in TASKS else dict(settings)


def _family(name: str) -> type[Task]:
    module, attribute, _ = TASKS[name]
    return cast(type[Task], getattr(import_module(module), attribute))


@lru_cache(maxsize=64)
def _task(name: str, settings: Any) -> Task:
    return _family(name)(settings)


def task_of(problem: Problem) -> Task:
    """The task that drew a problem, with its settings."""
    return _task(problem.task, problem.settings)


def corrupt(problem: Problem, kind: str, seed: int) -> Corruption | None:
    """The problem's gold trace spoilt in one way, at a place that the seed chooses; None where it has no room for it.

    Raises ValueError for a kind that the task does not have (`task.corruptions` names them).
    """
    return task_of(problem).corrupt(problem, kind, seed)
