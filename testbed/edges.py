"""What crosses an edge of the stage graph, as the settings of its two ends have it."""

from __future__ import annotations

import itertools
import math
from typing import Literal

from testbed.config import RL, Combine, Edge, Parallel, Train
from testbed.nodes import split_reference
from testbed.schema import Spec

State = Literal["annealed", "stable", "warming", "annealing"]
# The less of its decay a rate has behind it, the earlier.
ORDER: tuple[State, ...] = ("warming", "stable", "annealing", "annealed")


def left(spec: Spec, reference: str) -> tuple[State, ...]:
    """Where the learning rate of a stage or kept checkpoint may stand when it is left, the likeliest first: how many
    steps a stage has is known when its corpus is there, and the trainer compares then."""
    name, step = split_reference(reference)
    stage = spec.stages[name]
    if isinstance(stage, Combine | Parallel):
        parts = tuple(stage.of) if isinstance(stage, Combine) else tuple(stage.objectives)
        each = [left(spec, part if step is None else f"{part}@{step}") for part in parts]
        # A sum is as stable as its least annealed part.
        return tuple(dict.fromkeys(min(some, key=ORDER.index) for some in itertools.product(*each)))
    schedule = stage.schedule
    if schedule.final == 1 or schedule.shape == "constant" or (schedule.shape == "wsd" and schedule.decay == 0):
        end: State = "stable"
    else:
        end = "annealed"
    if step is None:
        return (end,)
    up: tuple[State, ...] = ("warming",) if schedule.warmup > 0 else ()
    down: tuple[State, ...] = ("annealing", "annealed") if end == "annealed" else ()
    return (*down[:1], *up, *down[1:], "stable") if schedule.shape == "cosine" else ("stable", *up, *down)


def edge(spec: Spec, name: str) -> Edge | None:
    """What the settings of a stage and its parent come to, taking what the stage states for granted where it may be so;
    None for a stage without a single parent."""
    stage, parent = spec.stages[name], spec.parent_of(name)
    if parent is None or not isinstance(stage, Train | RL):
        return None
    before = spec.stages[split_reference(parent)[0]]
    states = left(spec, parent)
    state = stage.edge.parent if stage.edge and stage.edge.parent in states else states[0]
    can_carry = isinstance(before, Train | RL) and before.optimizer.kind == stage.optimizer.kind
    optimizer = stage.edge.optimizer if stage.edge else ("carry" if can_carry and isinstance(stage, Train) else "reset")
    rate: Literal["continue", "rewarm", "restart"] = "restart"
    if stage.schedule.warmup > 0:
        rate = "rewarm"
    elif can_carry and isinstance(before, Train | RL) and state in ("stable", "annealed"):
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
