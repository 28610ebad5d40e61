"""The one trainer of next-token stages: pretraining, mid-training, supervised fine-tuning.

corpus ──PackedLoader──> batch(step) ──> loss over the step's weighted tokens ──> clip ──> AdamW (+ Muon)

A loader's state is one integer, and a child that continues on its parent's corpus starts where the parent stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from models.flops import TRAIN, causal_pairs, forward_flops
from models.transformer import Transformer, token_log_probs
from synthetic_tasks.corpus import Batch, Corpus, PackedLoader
from testbed import optim, runtime
from testbed.config import Train
from testbed.nodes import Node
from testbed.probing import teacher_forced, unlearnt_lookups
from testbed.tracking import Tracker

# Held-out problems of each difficulty behind a probe.
PROBE_PROBLEMS = 32
# The progress line and the JSON lines are written this often (steps), so that no step waits for the device.
LOG_EVERY = 10


@dataclass(frozen=True)
class Cost:
    """Useful work of some rows: real tokens and visible query-key pairs."""

    tokens: int
    pairs: int

    @classmethod
    def of(cls, documents: np.ndarray) -> Cost:
        """From document numbers [rows, length], 0 being padding."""
        lengths = np.concatenate([np.bincount(row)[1:] for row in documents])
        return cls(int(lengths.sum()), int(sum(causal_pairs(0, int(n)) for n in lengths)))


def weighted_loss(model: Any, batch: Batch, prompt_weight: float, device: torch.device) -> tuple[Tensor, float]:
    """Sum over predicted tokens of weight x negative log-likelihood, and the sum of weights.

    Every token of a document but its first is predicted; one of the prompt weighs `prompt_weight`, others weigh 1.
    """
    weights = loss_weights(batch, prompt_weight)
    tokens = torch.from_numpy(batch.tokens).to(device)
    logits = model(
        tokens,
        positions=torch.from_numpy(batch.positions).to(device),
        documents=torch.from_numpy(batch.documents).to(device),
    )
    scores = token_log_probs(logits[:, :-1], tokens[:, 1:])
    return -(scores * torch.from_numpy(weights[:, 1:]).to(device)).sum(), float(weights.sum())


def loss_weights(batch: Batch, prompt_weight: float) -> np.ndarray:
    """Weight of each token as a target [rows, length], fp32: 0 for padding and for the first of a document."""
    weights = np.where(batch.prompt, np.float32(prompt_weight), np.float32(1))
    weights[(batch.documents == 0) | (batch.positions == 0)] = 0
    return weights


def split(batch: Batch, parts: int) -> list[Batch]:
    """The rows of a batch in `parts` micro-batches."""
    pieces = {name: np.array_split(array, parts) for name, array in vars(batch).items()}
    return [Batch(**{name: arrays[i] for name, arrays in pieces.items()}) for i in range(parts)]


def accumulate(
    model: Any, batch: Batch, config: Train, device: torch.device, backward: Callable[[Tensor], None], where: str
) -> float:
    """Gradients of the mean loss over the whole step's weighted tokens, whatever the split; returns that mean.

    Raises FloatingPointError where it is not finite.
    """
    total = float(loss_weights(batch, config.prompt_weight).sum())
    if total == 0:
        raise ValueError(f"{where}: no token of the step carries a loss weight")
    mean = 0.0
    for part in split(batch, config.accumulate):
        loss, _ = weighted_loss(model, part, config.prompt_weight, device)
        backward(loss / total)
        mean += float(loss.detach()) / total
    if not np.isfinite(mean):
        raise FloatingPointError(f"{where}: the loss is {mean}; no step was taken")
    return mean


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker) -> dict[str, Any]:
    """Train one stage and write its checkpoint; returns what the stages table needs."""
    config = node.config
    assert isinstance(config, Train)
    fabric = runtime.fabric()
    task, tokenizer = node.context.task_and_tokenizer()
    parent = inputs.get("parent")
    if parent is None:
        torch.manual_seed(node.context.seeds.init)
        raw = Transformer(node.context.model, len(tokenizer))
    else:
        raw = runtime.load_parent(parent, tokenizer)
    # Moved first: a parent's moments are loaded to where the weights are.
    raw = raw.to(fabric.device)
    optimizers = optim.build(raw, config.optimizer)
    if parent is not None and config.parent_optimizer == "carry":
        runtime.load_optimizers(parent, optimizers)
    before = runtime.flat(raw)
    model, *wrapped = fabric.setup(raw, *optimizers)

    corpus = Corpus(inputs["corpus"])
    loader = PackedLoader(corpus, rows=config.rows, row_length=config.row_length, seed=node.context.seeds.order)
    positions = {} if parent is None else runtime.positions_of(parent)
    start = _start(positions.get(node.parents["corpus"]), config)
    total = _steps(config, loader, raw, inputs)
    probes = {round(total * (i + 1) / config.probes) for i in range(config.probes)}
    held_out = {
        operations: task.sample_batch(
            seed=runtime.derive(node.context.seeds.problems, "probe"),
            start=0, count=PROBE_PROBLEMS, operations=operations, split="validation",
        )
        for operations in node.context.operations
    }  # fmt: skip

    raw.train()
    tokens = 0
    flops = 0.0
    roles = []
    for step in range(total):
        batch = loader.batch(start + step)
        optim.set_rate(optimizers, config.optimizer, rate := optim.factor(config.schedule, step, total))
        where = f"{node.label}, step {step + 1}"
        loss = accumulate(model, batch, config, fabric.device, fabric.backward, where)
        norm = runtime.finite_norm(raw, config.optimizer.clip, where)
        for optimizer in wrapped:
            optimizer.step()
            optimizer.zero_grad()
        cost = Cost.of(batch.documents)
        tokens += cost.tokens
        flops += TRAIN * forward_flops(raw.config, len(tokenizer), tokens=cost.tokens, pairs=cost.pairs)
        if step + 1 in probes:
            roles.append(teacher_forced(raw, tokenizer, task, held_out, step=step + 1))
        if (step + 1) % LOG_EVERY == 0 or step + 1 == total:
            tracker.log(
                step + 1, total, loss=loss, lr=config.optimizer.lr * rate, grad_norm=norm, tokens=tokens, flops=flops
            )
    table = pd.concat(roles, ignore_index=True)
    table.to_parquet(out / "roles.parquet")
    runtime.save_model(out, raw, tokenizer)
    runtime.save_optimizers(out, optimizers)
    return {
        "steps": total,
        "tokens": tokens,
        "rows": total * config.rows,
        "flops": flops,
        "weight_change": None if parent is None else runtime.relative_change(before, runtime.flat(raw)),
        "parameters": raw.parameter_count(),
        "loss": loss,
        "unlearnt_lookups": [o for o in unlearnt_lookups(table) if str(o) in corpus.report["documents_by_operations"]],
        # Where the corpora were left, for a descendant that goes on with one.
        "positions": positions
        | {node.parents["corpus"]: {"rows": (start + total) * config.rows, "row_length": config.row_length}},
        "device": str(fabric.device),
        "dtype": "float32",
    }


def _start(position: Mapping[str, int] | None, config: Train) -> int:
    """First batch: where the nearest ancestor that read the corpus stopped, 0 where none did.

    Raises ValueError where it read rows of another length: they are packed anew, and nobody knows what was read.
    """
    if position is None:
        return 0
    if position["row_length"] != config.row_length:
        raise ValueError(
            f"an earlier stage read this corpus in rows of {position['row_length']}; set row_length to the same, "
            f"not {config.row_length}"
        )
    return -(-position["rows"] // config.rows)


def _steps(config: Train, loader: PackedLoader, model: Transformer, inputs: dict[str, Path]) -> int:
    """Steps that bring the stage nearest to its tokens, or to the FLOPs of the stages it matches; at least one.

    Both are estimated from the first batches of the loader; what ran is counted as it runs.
    """
    sample = [Cost.of(loader.batch(step).documents) for step in range(8)]
    tokens = sum(cost.tokens for cost in sample) / len(sample)
    if config.tokens is not None:
        return max(1, round(config.tokens / tokens))
    summaries = [runtime.summary_of(path) for role, path in inputs.items() if role.startswith("match/")]
    wanted = sum(float(summary["flops"]) for summary in summaries)
    costs = [
        TRAIN * forward_flops(model.config, model.vocabulary, tokens=cost.tokens, pairs=cost.pairs) for cost in sample
    ]
    return max(1, round(wanted / (sum(costs) / len(costs))))
