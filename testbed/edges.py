"""What crosses an edge of the stage graph, as the settings of its two ends have it."""

from __future__ import annotations

import math
from typing import Literal

from testbed.config import RL, Combine, Edge, Parallel, Schedule, Train
from testbed.nodes import split_reference
from testbed.schema import Spec

State = Literal["annealed", "stable", "annealing"]


def left(spec: Spec, reference: str) -> State:
    """How a stage or kept checkpoint leaves its learning rate."""
    name, step = split_reference(reference)
    stage = spec.stages[name]
    if isinstance(stage, Combine):
        # A sum is as stable as its least annealed part.
        states = [left(spec, part) for part in stage.of]
        return next((state for state in ("stable", "annealing") if state in states), "annealed")
    if isinstance(stage, Parallel):
        states = [_left(spec.stages[objective].schedule, step) for objective in stage.objectives]  # type: ignore[union-attr]
        return next((state for state in ("stable", "annealing") if state in states), "annealed")
    return _left(stage.schedule, step)


def _left(schedule: Schedule, step: int | None) -> State:
    if schedule.shape == "cosine":
        return "annealed" if step is None else "annealing"
    if schedule.shape == "wsd" and schedule.decay > 0 and schedule.final < 1 and step is None:
        return "annealed"
    # A checkpoint is taken before the decay: the trainer refuses others.
    return "stable"


def edge(spec: Spec, name: str) -> Edge | None:
    """What the settings of a stage and its parent come to; None for a stage without a single parent."""
    stage, parent = spec.stages[name], spec.parent_of(name)
    if parent is None or not isinstance(stage, Train | RL):
        return None
    before = spec.stages[split_reference(parent)[0]]
    state = left(spec, parent)
    can_carry = isinstance(before, Train | RL) and before.optimizer.kind == stage.optimizer.kind
    optimizer = stage.edge.optimizer if stage.edge else ("carry" if can_carry and isinstance(stage, Train) else "reset")
    rate: Literal["continue", "rewarm", "restart"] = "restart"
    if stage.schedule.warmup > 0:
        rate = "rewarm"
    elif can_carry and isinstance(before, Train | RL) and state != "annealing":
        ended = before.schedule.final if state == "annealed" else 1.0
        rates = [(before.optimizer.lr, stage.optimizer.lr)]
        if stage.optimizer.kind == "muon":
            rates.append((before.optimizer.muon_lr, stage.optimizer.muon_lr))
        if all(math.isclose(one * ended, other, rel_tol=1e-6) for one, other in rates):
            rate = "continue"
    return Edge(parent=state, optimizer=optimizer, rate=rate)


def written(edge: Edge) -> str:
    """As a spec writes it."""
    return f"edge: {{parent: {edge.parent}, optimizer: {edge.optimizer}, rate: {edge.rate}}}"
