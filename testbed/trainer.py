"""The loop that every stage of many steps runs in: step, log, keep checkpoints, save, stop, and go on from a state.

    learner.step(n) ──> metrics.jsonl (every `log_every` steps) ──> kept checkpoint? ──> state due, or asked to stop?

A state holds the weights, the optimizers' moments and what the learner recorded; everything else is a function of the
node and of the step. So a run that was killed anywhere and taken up gives the bits of one that was not.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.transformer import Transformer
from synthetic_tasks import Tokenizer
from testbed import phases, runtime, stopping
from testbed.errors import UserError
from testbed.ledger import Ledger
from testbed.nodes import Node
from testbed.ranks import ALONE, Ranks
from testbed.saves import Saves
from testbed.tracking import METRICS, Tracker

STATE = "state.json"


class NoSuchStepError(UserError):
    """A checkpoint that a spec names lies beyond the end of its stage."""

    def __init__(self, name: str, steps: int, asked: int) -> None:
        name = name.partition("@")[0]
        super().__init__(
            f"{name}@{asked} is asked for, but `{name}` ends after {steps} steps, so it has no checkpoint there: name "
            "an earlier step in `keep`, `keep_doubling` or wherever it stands, or give the stage a larger budget"
        )


class Learner(ABC):
    """What is particular to a kind of stage: a model, its optimizers, and one step."""

    node: Node
    raw: Transformer
    tokenizer: Tokenizer
    optimizers: Sequence[torch.optim.Optimizer]
    ledger: Ledger
    # Who trains the model together.
    ranks: Ranks = ALONE
    # Steps of the stage; None where a budget decides as it goes.
    total: int | None = None
    # Metrics are written after every so many steps, and after the last.
    log_every: int = 1

    @abstractmethod
    def step(self, step: int) -> Mapping[str, float]:
        """Take step 0, 1, ...; returns its metrics. Raises FloatingPointError where something is not finite."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What the manifest keeps, as of the last step taken."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What has to be remembered beside weights and moments, as JSON."""

    @abstractmethod
    def restore(self, record: dict[str, Any]) -> None:
        """Take `record` up again."""

    def done(self, steps: int) -> bool:
        """Whether the stage ends after so many steps."""
        assert self.total is not None
        return steps >= self.total

    def expected(self, steps: int) -> int:
        """Steps that the stage will have, as far as one can tell after so many; for the progress line."""
        assert self.total is not None
        return self.total

    def write(self, out: Path) -> dict[str, Any]:
        """Write weights, moments and record into a folder; returns the summary."""
        _check_finite(self.raw)
        runtime.save_model(out, self.raw, self.tokenizer)
        if self.optimizers:
            runtime.save_optimizers(out, self.optimizers)
        (out / STATE).write_text(json.dumps(self.record()) + "\n", encoding="utf-8")
        return self.summary()

    def read(self, path: Path) -> None:
        """Take up what `write` wrote."""
        runtime.load_weights(path, self.raw)
        if self.optimizers:
            runtime.load_optimizers(path, self.optimizers)
        self.restore(json.loads((path / STATE).read_text(encoding="utf-8")))


def train(learner: Learner, out: Path, tracker: Tracker, saves: Saves | None) -> dict[str, Any]:
    """Run a stage, or up to the step of a checkpoint, to its end and write its artifact; returns the summary.

    Rank 0 saves, logs and stops, for the weights of all ranks are the same; the others only compute. Raises Stopped
    after saving where it was asked to stop, NoSuchStepError where a checkpoint lies beyond the end of its stage.
    """
    node, step, ranks = learner.node, 0, learner.ranks
    leader = ranks.rank == 0
    goal = node.step if node.step is not None else math.inf
    # Before anything is trained, where the end is known.
    furthest = max([*node.keep, node.step or 0])
    if learner.total is not None and furthest > learner.total:
        raise NoSuchStepError(node.name, learner.total, furthest)
    found = saves.latest(runtime.conditions()) if saves is not None and leader else None
    # All go on from what the first found, whatever is there by now.
    here = None if found is None else (found.path, int(found.manifest["step"]), float(found.manifest["wall_s"]))
    if (state := ranks.first(here)) is not None:
        path, step, seconds = state
        learner.read(path)
        tracker.take_up(path / METRICS, seconds)
    while step < goal and not learner.done(step):
        phases.enter("step")
        metrics = learner.step(step)
        step += 1
        last = learner.done(step)
        if leader and (step % learner.log_every == 0 or last):
            tracker.log(step, learner.expected(step), **metrics)
        if saves is None or not leader:
            continue
        if step in node.keep:
            saves.keep(step, learner.write, tracker)
        if not last and step < goal:
            # Asked once: a request that comes while this one is answered waits for the next step.
            stop = stopping.asked()
            if stop or saves.due():
                saves.save(step, learner.write, tracker)
            if stop:
                raise stopping.Stopped
    if step < goal < math.inf:
        raise NoSuchStepError(node.name, step, int(goal))
    if not ranks.same(runtime.flat(learner.raw)):
        raise RuntimeError(f"{node.label}: the ranks ended with different weights; nothing was published")
    return learner.write(out) if leader else learner.summary()


def _check_finite(model: nn.Module) -> None:
    """A state that is not finite must never replace one that is."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise FloatingPointError(f"{name} holds values that are not finite; nothing was saved")
