"""Probe nodes: what is read off a checkpoint beside its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from models.transformer import Transformer
from testbed import runtime, stopping
from testbed.config import Probe
from testbed.ledger import Ledger
from testbed.nodes import Node
from testbed.probing import teacher_forced, teacher_forced_shapes
from testbed.saves import Saves
from testbed.tracking import Tracker

TABLE = "probe.parquet"


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None) -> dict[str, Any]:
    """Probe one checkpoint; writes probe.parquet (schema `probes`)."""
    config = node.config
    assert isinstance(config, Probe)
    task, tokenizer = node.context.task_and_tokenizer()
    model = runtime.load_parent(inputs["stage"], tokenizer).to(runtime.fabric().device)
    ledger = Ledger(node.context.model, len(tokenizer))
    stopping.check()
    if config.measure == "weights":
        table = weight_changes(runtime.load_parent(inputs["against"], tokenizer), model)
    else:
        seed = runtime.derive(node.context.seeds.problems, "probe node")
        problems = {
            operations: task.sample_batch(
                seed=seed, start=0, count=config.problems, operations=operations, split=config.split
            )
            for operations in node.context.operations
        }
        table = teacher_forced(model, tokenizer, task, problems, step=0).drop(columns="step")
        ledger.add("scoring", *teacher_forced_shapes(tokenizer, problems))
    table.insert(0, "measure", config.measure)
    table.to_parquet(out / TABLE)
    tracker.log(1, 1)
    return {"ledger": ledger.record(), **runtime.conditions()}


def weight_changes(before: Transformer, after: Transformer) -> pd.DataFrame:
    """One row a tensor, in fp64: Frobenius norms before and after, `change` (norm of the difference over the norm
    before) and `moved`, the share of entries that differ at all.

    Raises ValueError where the two have other shapes.
    """
    if before.config != after.config:
        raise ValueError("only checkpoints of one model shape have a change of weights")
    rows = []
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        old, new = one.detach().double().cpu(), other.detach().double().cpu()
        rows.append(
            {
                "tensor": name,
                "norm_before": float(old.norm()),
                "norm_after": float(new.norm()),
                "change": float((new - old).norm() / old.norm()) if bool(old.any()) else float("nan"),
                "moved": float((new != old).double().mean()),
            }
        )
    return pd.DataFrame(rows)
