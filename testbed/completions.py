"""Judge completions from JSON lines: each names a problem and what somebody answered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from synthetic_tasks import Problem, Task, Verdict, get_task
from testbed.errors import UserError, nearest

# What a line holds, what its cell may, and what is told of a step.
LINE = {"task": str, "cell": dict, "seed": int, "index": int, "completion": str}
STEP = ("status", "position", "target", "detail")
CELL = {"operations": int, "split": str, "settings": dict, "axes": dict}


def verify_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Each line's object with the problem's answer and the `verdict` added; blank lines are left out.

    A line: {"task": "arithmetic", "cell": {"operations": 6}, "seed": 0, "index": 3, "completion": "..."}. A cell may
    also hold `split`, `settings` and `axes`; without `operations` it is the task's default grid.
    Raises UserError with the number of the first line that cannot be read.
    """
    tasks: dict[str, Task] = {}
    judged = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = _read(line)
            cell = entry["cell"]
            settings = cell.get("settings", {})
            name = json.dumps([entry["task"], settings], sort_keys=True)
            task = tasks.setdefault(name, get_task(entry["task"], **settings))
            where = {name: cell[name] for name in ("operations", "split") if name in cell} | _axes(cell)
            problem = task.sample(entry["seed"], entry["index"], **where)
            _same(entry, problem)
        except ValueError as error:
            raise UserError(f"line {number}: {error}") from error
        verdict = task.verify(problem, entry["completion"])
        judged.append(entry | {"answer": problem.answer, "verdict": verdict_record(verdict)})
    return judged


def _same(entry: dict[str, Any], problem: Problem) -> None:
    """Whether a line that also tells its problem tells the one that is judged."""
    for name in ("prompt", "split", "structure_key", "instance_key"):
        if name in entry and entry[name] != getattr(problem, name):
            raise ValueError(
                f"`{name}` is {json.dumps(entry[name])[:60]}, but the problem of this task, cell, seed and index has "
                f"{json.dumps(getattr(problem, name))[:60]}; `cell` holds operations, split, settings and axes"
            )


def _axes(cell: dict[str, Any]) -> dict[str, str]:
    axes = cell.get("axes", {})
    for name, value in axes.items():
        _check(f"cell.axes.{name}", value, str)
        if name in CELL:
            raise ValueError(f"`{name}` is no axis; it stands in the cell itself")
    return axes


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON."""
    record = {f.name: getattr(verdict, f.name) for f in dataclasses.fields(verdict)}
    error = verdict.parse_error
    return record | {
        "steps": [{name: getattr(step, name) for name in STEP} for step in verdict.steps],
        "missing": list(verdict.missing),
        "parse_error": None if error is None else {"position": error.position, "reason": error.reason},
    }


def problem_record(problem: Problem, cell: dict[str, Any]) -> dict[str, Any]:
    """A problem as JSON, with the place (task, cell, seed, index) that `verify_lines` asks for."""
    return {
        "task": problem.task,
        "cell": cell,
        "seed": problem.seed,
        "index": problem.index,
        "prompt": problem.prompt,
        "solution": problem.solution,
        "answer": problem.answer,
        "difficulty": dict(problem.difficulty),
        "context": problem.context,
        "axes": dict(problem.axes),
        "structure_key": problem.structure_key,
        "instance_key": problem.instance_key,
        "split": problem.split,
    }


def problem_text(problem: Problem) -> str:
    """A problem for people."""
    measures = ", ".join(f"{name} {value}" for name, value in problem.difficulty.items())
    return (
        f"problem {problem.index} of seed {problem.seed} ({problem.split}; {measures})\n"
        f"  prompt     {problem.prompt}\n"
        f"  solution   {problem.solution}\n"
        f"  answer     {problem.answer}\n"
        f"  structure  {problem.structure_key}\n"
        f"  instance   {problem.instance_key}"
    )


def describe(task: Task) -> str:
    """What a task is made of, for people."""
    settings = getattr(task, "settings", None)
    lines = [task.name, "", "settings (name, value here)"]
    lines += [f"  {f.name:<12} {getattr(settings, f.name)!r}" for f in dataclasses.fields(settings)] if settings else []
    for name, words in (("tokens", task.vocabulary), ("roles", task.roles), ("statuses of a step", task.statuses)):
        lines += ["", f"{name} ({len(words)})", "  " + " ".join(words)]
    if task.axes:
        lines += ["", "axes", *(f"  {axis:<12} {' '.join(values)}" for axis, values in task.axes.items())]
    width = max(map(len, task.corruptions))
    lines += ["", "corruptions", *(f"  {kind:<{width}}  {what}" for kind, what in task.corruptions.items())]
    return "\n".join(lines)


def _read(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error}") from error
    except RecursionError:
        raise ValueError("this JSON is nested too deeply") from None
    except ValueError:
        raise ValueError("this JSON holds a number of too many digits") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object with {', '.join(LINE)}, not {line.strip()[:40]!r}")
    for name, kind in LINE.items():
        if name not in entry:
            raise ValueError(f"`{name}` is missing; a line has {', '.join(LINE)}")
        _check(name, entry[name], kind)
    for name, value in entry["cell"].items():
        if name not in CELL:
            raise ValueError(f"unknown `cell.{name}`{nearest(name, CELL)}; a cell has {', '.join(CELL)}")
        _check(f"cell.{name}", value, CELL[name])
    return entry


def _check(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        words = {str: "text", int: "a whole number", dict: "an object"}
        raise ValueError(f"`{name}` must be {words[kind]}, not {json.dumps(value)[:40]}")
