"""What the ranks of test_ranks.py do. Every function runs on each rank, or in one process alone for comparison."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch

from models.noise import Noise
from models.transformer import Transformer
from synthetic_tasks.corpus import Batch, Corpus, PackedLoader
from testbed import combining, rl, runtime, trainer, training
from testbed.config import RL, Train
from testbed.nodes import Node, shelf
from testbed.ranks import Ranks
from testbed.store import Store
from testbed.tracking import Tracker

GRAPH = tiny.graph()
NODE = tiny.node(GRAPH, "pretrain")
TASK, TOKENIZER = NODE.context.task_and_tokenizer()
# Weight of the prompt, micro-batches.
CASES = [(1.0, 1), (1.0, 2), (0.0, 1), (0.25, 2)]
STAGES = ("pretrain", "rl", "both")
LEARNERS: dict[str, Any] = {"pretrain": training.NextToken, "rl": rl.Policy, "both": combining.Averaging}


def inputs_of(node: Node, store: Store) -> dict[str, Path]:
    return {role: store.path(shelf(GRAPH.nodes[key].kind), key) for role, key in node.parents.items()}


def everything(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    """Gradients, then whole stages; each rank leaves what it has in the folder `results`."""
    results = inputs["results"]
    fabric = runtime.fabric()
    group = Ranks(fabric)
    _collectives(group)
    found: dict[str, Any] = {}
    for weight, parts in CASES:
        _next_token(found, f"{weight} {parts}", inputs["corpus"], weight, parts)
    for kl in (0.0, 0.1):
        _policy(found, f"rl {kl}", kl)
    for name in STAGES:
        stage = tiny.node(GRAPH, name)
        learner = LEARNERS[name](stage, inputs_of(stage, Store(inputs["store"])))
        folder = results / name
        if group.rank == 0:
            folder.mkdir()
            with Tracker(folder) as real:
                summary = trainer.train(learner, folder, real, None)
            (folder / "summary.json").write_text(json.dumps(summary))
        else:
            trainer.train(learner, out, tracker, None)
        found[name] = runtime.flat(learner.raw).numpy()
    np.savez(results / f"{group.rank}.npz", **found)
    return {}


def _collectives(group: Ranks) -> None:
    rank, size = group.rank, group.size
    assert group.sums([1, rank, 0.1]) == [size, sum(range(size)), np.float64(0.1) * size]
    assert group.maximum(float(rank)) == size - 1 and group.maximum(-float(rank)) == 0
    assert group.first(("rank", rank)) == ("rank", 0)
    assert group.same(torch.ones(3)) and group.same(torch.tensor([rank])) == (size == 1)
    shares = [range(7 * r // size, 7 * (r + 1) // size) for r in range(size)]
    assert group.share(7) == shares[rank] and [i for share in shares for i in share] == list(range(7))


def fresh() -> tuple[Any, Transformer, Ranks]:
    fabric = runtime.fabric()
    torch.manual_seed(0)
    raw = Transformer(NODE.context.model, len(TOKENIZER))
    model, _ = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.0))
    return model, raw, Ranks(fabric)


def uneven(corpus: Path) -> Batch:
    """Nine rows, the first of them nearly empty: neither rows nor tokens can be halved."""
    batch = PackedLoader(Corpus(corpus), rows=9, row_length=64, seed=0).batch(0)
    documents = batch.documents.copy()
    for row in range(5):
        documents[row][documents[row] > 1] = 0
    return dataclasses.replace(batch, documents=documents)


def gradient_of(raw: Transformer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in raw.parameters() if p.grad is not None])


def _next_token(found: dict[str, Any], case: str, corpus: Path, weight: float, parts: int) -> None:
    batch = uneven(corpus)
    model, raw, group = fresh()
    seen: list[np.ndarray] = []
    alike: list[bool] = []
    real = training.weighted_loss

    def loss(model: Any, part: Batch, *rest: Any) -> Any:
        seen.append(part.tokens)
        if len(seen) > 1:
            alike.append(group.same(gradient_of(raw)))
        return real(model, part, *rest)

    training.weighted_loss = loss
    try:
        config = Train(kind="pretrain", data="base", tokens=1, rows=9, accumulate=parts, prompt_weight=weight)
        found[f"{case} loss"] = training.accumulate(model, batch, config, torch.device("cpu"), "here", ranks=group)
    finally:
        training.weighted_loss = real
    # Gradients are exchanged once a step, not once a micro-batch.
    assert alike == [group.size == 1] * (parts - 1), alike
    found[f"{case} gradient"], found[f"{case} rows"] = gradient_of(raw).numpy(), np.concatenate(seen)


def _policy(found: dict[str, Any], case: str, kl: float) -> None:
    """Five problems, of which the first two alone have signal: a rank that has the others takes part all the same."""
    config = RL(parent="p", band="b", steps=1, prompts=5, group=4, max_new_tokens=12, micro_rows=3, kl=kl)
    model, raw, group = fresh()
    raw.eval()
    mine = group.share(config.prompts)
    problems = TASK.sample_batch(seed=0, start=mine.start, count=len(mine), operations=1, split="train")
    rollouts = rl.roll_out(raw, TOKENIZER, TASK, problems, config, Noise(seed=0, purpose="rl"), first=mine.start)
    rewards = np.zeros((config.prompts, config.group))
    rewards[0, 0] = rewards[1, ::2] = 1.0
    rollouts = dataclasses.replace(rollouts, rewards=rewards[mine.start : mine.stop])
    micros = rl.micro_batches(rollouts, rl.group_advantages(rollouts.rewards, scale_by_std=True), config, TOKENIZER.pad)

    class Keep:
        def step(self) -> None:
            found[f"{case} gradient"] = gradient_of(raw).numpy()

        def zero_grad(self) -> None:
            raw.zero_grad()

    (tokens,) = group.sums([int(rollouts.samples.lengths.sum())])
    torch.manual_seed(1)
    reference = Transformer(NODE.context.model, len(TOKENIZER)) if kl else None
    free = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip=0.0))
    done = rl.update(
        model, [Keep()], micros, int(tokens), free, raw=raw, where="here", reference=reference, ranks=group
    )
    found[f"{case} loss"], found[f"{case} tokens"] = done.kl, tokens
    found[f"{case} rows"] = rollouts.samples.tokens.numpy()
