"""Stages that make one checkpoint of several: a weighted sum, and objectives trained side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from testbed import runtime
from testbed.config import RL, Combine, Parallel
from testbed.ledger import Ledger
from testbed.nodes import Node
from testbed.rl import COUNTS, Policy
from testbed.saves import Saves
from testbed.tracking import Tracker
from testbed.trainer import Learner, train
from testbed.training import NextToken

# Least annealed first.
RATE_STATES = ("warming", "stable", "annealing", "annealed")


def weighted_sum(terms: Sequence[tuple[float, nn.Module]]) -> list[Tensor]:
    """The sum of factor x parameter over models of one shape, parameter by parameter: added in fp64, in the order
    given, and rounded once."""
    models = [list(model.parameters()) for _, model in terms]
    factors = [factor for factor, _ in terms]
    return [
        torch.stack([f * p.detach().double() for f, p in zip(factors, same, strict=True)]).sum(0).to(same[0].dtype)
        for same in zip(*models, strict=True)
    ]


def put(values: Sequence[Tensor], model: nn.Module) -> None:
    """Write parameters into a model in place."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def run_combine(
    node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None
) -> dict[str, Any]:
    """Write the weighted sum of checkpoints; returns what the stages table needs.

    Raises ValueError where their models have other shapes or vocabularies.
    """
    config = node.config
    assert isinstance(config, Combine)
    _, tokenizer = node.context.task_and_tokenizer()
    # By key: what a spec calls the parts, and their order in it, must not reach the last bits.
    parts = sorted((node.parents[f"of/{name}"], factor, inputs[f"of/{name}"]) for name, factor in config.of.items())
    models = [(factor, runtime.load_parent(path, tokenizer)) for _, factor, path in parts]
    if len({model.config for _, model in models}) > 1:
        raise ValueError("only checkpoints of one model shape can be combined")
    model = models[0][1]
    put(weighted_sum(models), model)
    runtime.save_model(out, model, tokenizer)
    summaries = [runtime.summary_of(path) for _, _, path in parts]
    tracker.log(1, 1)
    return {
        "steps": 0,
        "tokens": 0,
        "flops": 0.0,
        "flops_interplay": 0.0,
        "ledger": {},
        "parameters": model.parameter_count(),
        "rate_state": _least_annealed(summary.get("rate_state") for summary in summaries),
        "positions": _furthest([summary["positions"] for summary in summaries]),
        **runtime.conditions(),
    }


class Averaging(Learner):
    """Objectives trained from one parent, each with its optimizer; every few steps their changes are averaged."""

    def __init__(self, node: Node, inputs: Mapping[str, Path]) -> None:
        config = node.config
        assert isinstance(config, Parallel)
        self.node, self.config, self.total = node, config, config.steps
        self.parts: dict[str, NextToken | Policy] = {}
        self.factors: dict[str, float] = {}
        # Of the metrics: the kind, with a number where several are of one.
        self.names: dict[str, str] = {}
        # By key and factor, for the reason given above; two objectives may be equal, so their place tells them apart.
        # What they are called here is the spec's affair, and must not be in an artifact that other specs share.
        order = sorted(node.objectives.items(), key=lambda item: (item[1].key, config.objectives[item[0]]))
        for place, (name, objective) in enumerate(order):
            read = {"parent": inputs["parent"]}
            if isinstance(objective.config, RL):
                part: NextToken | Policy = Policy(objective, read)
            else:
                part = NextToken(objective, read | {"corpus": inputs[f"objective/{name}"]}, total=config.steps)
            label = f"{place}-{objective.key}"
            self.parts[label], self.factors[label] = part, config.objectives[name]
            same = sum(other.kind == objective.kind for other in node.objectives.values()) > 1
            self.names[label] = f"{objective.kind}{place}" if same else objective.kind
        first = next(iter(self.parts.values()))
        self.tokenizer, self.ranks = first.tokenizer, first.ranks
        self.raw = runtime.load_parent(inputs["parent"], self.tokenizer).to(next(first.raw.parameters()).device)
        self.before = runtime.flat(self.raw)
        self.optimizers = []
        self.ledger = Ledger(node.context.model, len(self.tokenizer))
        self.steps = 0

    def step(self, step: int) -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        for label, part in self.parts.items():
            metrics |= {f"{self.names[label]}/{name}": value for name, value in part.step(step).items()}
        self.steps = step + 1
        if self.steps % self.config.every == 0:
            self._average()
        return metrics | {
            "tokens": sum(metrics[f"{name}/tokens"] for name in self.names.values()),
            "flops": sum(part.ledger.flops for part in self.parts.values()),
        }

    def _average(self) -> None:
        """weights <- weights + sum of factor x (objective's weights - weights)."""
        rest = 1 - math.fsum(self.factors.values())
        terms = [(rest, self.raw), *((self.factors[label], part.raw) for label, part in self.parts.items())]
        new = weighted_sum(terms)
        for model in (self.raw, *(part.raw for part in self.parts.values())):
            put(new, model)

    def write(self, out: Path) -> dict[str, Any]:
        for label, part in self.parts.items():
            (out / "objectives" / label).mkdir(parents=True)
            part.write(out / "objectives" / label)
        return super().write(out)

    def read(self, path: Path) -> None:
        for label, part in self.parts.items():
            part.read(path / "objectives" / label)
        super().read(path)

    def record(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, record: dict[str, Any]) -> None:
        self.steps = record["steps"]

    def summary(self) -> dict[str, Any]:
        summaries = [part.summary() for part in self.parts.values()]
        counts = (*COUNTS[1:], "flops", "flops_interplay")
        ledgers = [part.ledger for part in self.parts.values()]
        for activity, work in self.ledger.work.items():
            for name in vars(work):
                setattr(work, name, sum(getattr(ledger.work[activity], name) for ledger in ledgers))
        return {
            "steps": self.steps,
            **{name: sum(summary.get(name, 0) for summary in summaries) for name in counts},
            "ledger": self.ledger.record(),
            "parameters": self.raw.parameter_count(),
            "weight_change": runtime.relative_change(self.before, runtime.flat(self.raw)),
            "rate_state": _least_annealed(summary["rate_state"] for summary in summaries),
            "positions": _furthest([summary["positions"] for summary in summaries]),
            **runtime.conditions(),
        }


def run_parallel(
    node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None
) -> dict[str, Any]:
    """Train the objectives of a parallel stage and write its checkpoint; returns what the stages table needs."""
    return train(Averaging(node, inputs), out, tracker, saves)


def _least_annealed(states: Any) -> str:
    found = {state for state in states if state is not None}
    return next((state for state in RATE_STATES if state in found), RATE_STATES[-1])


def _furthest(positions: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Of everything that is read in order the furthest position that any part came to, so that nothing is read again.

    Raises ValueError where parts read one corpus in rows of different lengths.
    """
    out: dict[str, dict[str, int]] = {}
    for one in positions:
        for stream, place in one.items():
            before = out.setdefault(stream, dict(place))
            if before.get("row_length") != place.get("row_length"):
                raise ValueError(
                    f"the parts read one corpus in rows of {before['row_length']} and {place['row_length']}; "
                    "take one length"
                )
            out[stream] = {name: max(before[name], value) for name, value in place.items()}
    return out
