"""The trainer of next-token stages: pretraining, mid-training, supervised fine-tuning.

corpus ──PackedLoader──> batch(step) ──> loss over the step's weighted tokens ──> clip ──> AdamW (+ Muon)

A loader's state is one integer, and a child that continues on its parent's corpus starts where the parent stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.flops import TRAIN, Shape, causal_pairs, forward_flops
from models.transformer import token_log_probs
from synthetic_tasks.corpus import Batch, Corpus, PackedLoader
from testbed import optim, runtime
from testbed.config import Train
from testbed.ledger import Ledger, interplay_training
from testbed.nodes import Node
from testbed.probing import teacher_forced, teacher_forced_shapes, unlearnt_lookups
from testbed.ranks import ALONE, Ranks
from testbed.saves import Saves
from testbed.tracking import Tracker
from testbed.trainer import Learner, train

# Held-out problems of each difficulty behind a probe.
PROBE_PROBLEMS = 32
# The progress line and the JSON lines are written this often (steps), so that no step waits for the device.
LOG_EVERY = 10
ROLES = "roles.parquet"


def useful(documents: np.ndarray) -> Shape:
    """Real tokens and visible pairs of rows, from document numbers [rows, length], 0 being padding."""
    lengths = np.concatenate([np.bincount(row)[1:] for row in documents])
    tokens = int(lengths.sum())
    return Shape(tokens, int(sum(causal_pairs(0, int(n)) for n in lengths)), tokens)


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
    model: Any, batch: Batch, config: Train, device: torch.device, where: str, *, ranks: Ranks = ALONE
) -> float:
    """Gradients of the mean loss over the whole step's weighted tokens, however it is split over micro-batches and
    ranks; returns that mean.

    Raises FloatingPointError where it is not finite.
    """
    total = float(loss_weights(batch, config.prompt_weight).sum())
    if total == 0:
        raise ValueError(f"{where}: no token of the step carries a loss weight")
    parts = split(batch, config.accumulate * ranks.size)
    mine = [parts[i] for i in ranks.share(len(parts))]
    mean = 0.0
    for part in mine:
        with ranks.adding(model, last=part is mine[-1]):
            loss, _ = weighted_loss(model, part, config.prompt_weight, device)
            ranks.backward(loss / total)
        mean += float(loss.detach()) / total
    (mean,) = ranks.sums([mean])
    if not np.isfinite(mean):
        raise FloatingPointError(f"{where}: the loss is {mean}; no step was taken")
    return mean


def steps_to(loader: PackedLoader, start: int, budget: float, cost: Callable[[Any, Any], NDArray[np.float64]]) -> int:
    """Steps from batch `start` on whose cost comes nearest to a budget; at least one.

    cost: of rows, from their tokens and visible pairs [rows].
    """
    steps, spent, left = 0, 0.0, np.zeros(0)
    for tokens, pairs in loader.row_costs(start * loader.rows):
        rows = np.concatenate([left, cost(tokens, pairs)])
        whole = len(rows) // loader.rows
        sums = spent + rows[: whole * loader.rows].reshape(whole, loader.rows).sum(axis=1).cumsum()
        beyond = int(np.searchsorted(sums, budget))
        if beyond < whole:
            before = sums[beyond - 1] if beyond else spent
            nearer = beyond if budget - before <= sums[beyond] - budget else beyond + 1
            return max(1, steps + nearer)
        steps, left = steps + whole, rows[whole * loader.rows :]
        spent = float(sums[-1]) if whole else spent
    raise AssertionError("a loader never ends")


class NextToken(Learner):
    """A stage of next-token training."""

    log_every = LOG_EVERY

    def __init__(self, node: Node, inputs: Mapping[str, Path], *, total: int | None = None) -> None:
        """total: steps, where another budget than the node's own counts."""
        config = node.config
        assert isinstance(config, Train)
        self.node, self.config = node, config
        fabric = runtime.fabric()
        self.ranks, self.device = Ranks(fabric), fabric.device
        self.task, self.tokenizer = node.context.task_and_tokenizer()
        parent = inputs.get("parent")
        self.raw, self.optimizers = runtime.start(node, parent, self.tokenizer, config.optimizer, fabric.device)
        self.before = None if parent is None else runtime.flat(self.raw)
        self.model, *self.wrapped = fabric.setup(self.raw, *self.optimizers)
        self.ledger = Ledger(node.context.model, len(self.tokenizer))
        self.raw.train()

        self.corpus = Corpus(inputs["corpus"])
        self.loader = PackedLoader(
            self.corpus, rows=config.rows, row_length=config.row_length, seed=node.context.seeds.order
        )
        self.earlier = {} if parent is None else runtime.positions_of(parent)
        self.start = _start(self.earlier.get(node.parents["corpus"]), config)
        self.total = self.length = total or self._steps(inputs)
        self.probed = {round(self.length * (i + 1) / config.probes) for i in range(config.probes)}
        self.held_out = {
            operations: self.task.sample_batch(
                seed=runtime.derive(node.context.seeds.problems, "probe"),
                start=0, count=PROBE_PROBLEMS, operations=operations, split="validation",
            )
            for operations in node.context.operations
        }  # fmt: skip
        self.steps, self.tokens, self.loss = 0, 0, float("nan")
        self.roles: list[pd.DataFrame] = []

    def step(self, step: int) -> Mapping[str, float]:
        config = self.config
        batch = self.loader.batch(self.start + step)
        optim.set_rate(self.optimizers, config.optimizer, rate := optim.factor(config.schedule, step, self.length))
        where = f"{self.node.label}, step {step + 1}"
        self.loss = accumulate(self.model, batch, config, self.device, where, ranks=self.ranks)
        norm = runtime.finite_norm(self.raw, config.optimizer.clip, where)
        for optimizer in self.wrapped:
            optimizer.step()
            optimizer.zero_grad()
        shape = useful(batch.documents)
        self.ledger.add("training", shape, Shape.dense(config.rows, config.row_length), passes=TRAIN)
        self.steps, self.tokens = step + 1, self.tokens + shape.tokens
        if step + 1 in self.probed:
            self.roles.append(teacher_forced(self.raw, self.tokenizer, self.task, self.held_out, step=step + 1))
            self.ledger.add("scoring", *teacher_forced_shapes(self.tokenizer, self.held_out))
        return {
            "loss": self.loss,
            "lr": config.optimizer.lr * rate,
            "grad_norm": norm,
            "tokens": self.tokens,
            "flops": self.ledger.flops,
        }

    def record(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "loss": self.loss,
            "ledger": self.ledger.record(),
            "roles": [row for table in self.roles for row in table.to_dict("records")],
        }

    def restore(self, record: dict[str, Any]) -> None:
        self.steps, self.tokens, self.loss = record["steps"], record["tokens"], record["loss"]
        self.ledger.restore(record["ledger"])
        self.roles = [pd.DataFrame(record["roles"])] if record["roles"] else []

    def write(self, out: Path) -> dict[str, Any]:
        if self.roles:
            pd.concat(self.roles, ignore_index=True).to_parquet(out / ROLES)
        return super().write(out)

    def summary(self) -> dict[str, Any]:
        config = self.config
        probed = unlearnt_lookups(pd.concat(self.roles, ignore_index=True)) if self.roles else []
        trained = self.corpus.report["documents_by_operations"]
        change = None if self.before is None else runtime.relative_change(self.before, runtime.flat(self.raw))
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "rows": self.steps * config.rows,
            "flops": self.ledger.flops,
            "flops_interplay": interplay_training(self.raw.parameter_count(), self.tokens),
            "ledger": self.ledger.record(),
            "weight_change": change,
            "parameters": self.raw.parameter_count(),
            "loss": self.loss,
            "rate_state": optim.rate_state(config.schedule, self.steps, self.length),
            "unlearnt_lookups": [o for o in probed if str(o) in trained],
            # Where the corpora were left, for a descendant that goes on with one.
            "positions": self.earlier | {self.node.parents["corpus"]: self._position()},
            **runtime.conditions(),
        }

    def _position(self) -> dict[str, int]:
        return {"rows": (self.start + self.steps) * self.config.rows, "row_length": self.config.row_length}

    def _steps(self, inputs: Mapping[str, Path]) -> int:
        """Steps that bring the stage nearest to its tokens, or to its FLOPs or those of the stages it matches."""
        config = self.config
        if config.tokens is not None:
            return steps_to(self.loader, self.start, config.tokens, lambda tokens, pairs: tokens.astype(np.float64))
        matched = [runtime.summary_of(path)["flops"] for role, path in inputs.items() if role.startswith("match/")]
        one_token, one_pair = (
            TRAIN * forward_flops(self.raw.config, len(self.tokenizer), shape)
            for shape in (Shape(1, 0, 1), Shape(0, 1, 0))
        )
        return steps_to(
            self.loader, self.start, config.flops or sum(matched),
            lambda tokens, pairs: one_token * tokens + one_pair * pairs,
        )  # fmt: skip


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None) -> dict[str, Any]:
    """Train one stage and write its checkpoint; returns what the stages table needs."""
    return train(NextToken(node, inputs), out, tracker, saves)


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
