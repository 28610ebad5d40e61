"""Samples on fixed problems of every band, judged step by step, and teacher-forced accuracy by role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from models.noise import Noise
from models.sampler import sample, sampling_shape
from synthetic_tasks import Problem, Split, Task
from testbed import runtime, stopping
from testbed.config import Evaluation
from testbed.ledger import Ledger
from testbed.nodes import Node
from testbed.probing import teacher_forced, teacher_forced_shapes, unlearnt_lookups
from testbed.saves import Saves
from testbed.tracking import Tracker


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None) -> dict[str, Any]:
    """Evaluate one stage; writes outcomes.parquet (one row a problem) and roles.parquet."""
    config = node.config
    assert isinstance(config, Evaluation)
    fabric = runtime.fabric()
    task, tokenizer = node.context.task_and_tokenizer()
    model = runtime.load_parent(inputs["stage"], tokenizer).to(fabric.device)
    # Problems are the same for every arm and repetition; only the noise differs.
    stream = runtime.derive(node.context.seeds.problems, "evaluation")
    cells = node.context.operations
    problems = {
        operations: distinct_problems(task, config.problems, seed=stream, operations=operations, split=config.split)
        for operations in cells
    }
    ledger = Ledger(node.context.model, len(tokenizer))
    rows: list[dict[str, Any]] = []
    sampled = 0
    for done, operations in enumerate(cells, start=1):
        stopping.check()
        noise = Noise(seed=node.context.seeds.rollout, purpose="evaluation", step=operations)
        prompts = [tokenizer.encode_prompt(problem.prompt) for problem in problems[operations]]
        drawn = sample(
            model,
            prompts,
            range(len(problems[operations])),
            samples=config.samples,
            max_new_tokens=config.max_new_tokens,
            end=tokenizer.eos,
            pad=tokenizer.pad,
            noise=noise,
            temperature=config.temperature,
        )
        lengths = drawn.lengths.cpu().numpy()
        ended = drawn.ended.cpu().numpy()
        texts = [tokenizer.decode(drawn.completion(row)) for row in range(len(lengths))]
        for i, problem in enumerate(problems[operations]):
            own = slice(i * config.samples, (i + 1) * config.samples)
            rows.append(outcome(task, problem, i, texts[own], ended[own], lengths[own], temperature=config.temperature))
        sampled += int(lengths.sum())
        ledger.add("rollout", sampling_shape(prompts, drawn), drawn.executed)
        strict = sum(row["c_strict"] for row in rows[-len(problems[operations]) :]) / len(texts)
        tracker.log(done, len(cells), operations=operations, strict=strict, tokens=sampled)
    pd.DataFrame(rows).to_parquet(out / "outcomes.parquet")
    roles = teacher_forced(model, tokenizer, task, problems, step=0)
    roles.to_parquet(out / "roles.parquet")
    ledger.add("scoring", *teacher_forced_shapes(tokenizer, problems))
    return {
        "sampled_tokens": sampled,
        "samples": len(rows) * config.samples,
        "unlearnt_lookups": unlearnt_lookups(roles),
        "ledger": ledger.record(),
        **runtime.conditions(),
    }


def distinct_problems(task: Task, count: int, *, seed: int, operations: int, split: Split) -> list[Problem]:
    """The first `count` problems of a stream that differ by their instance key, or as many as 16 draws for each find.

    A cell of one or two operations may hold fewer problems than are asked for; repeated ones would count as evidence.
    """
    found: dict[str, Problem] = {}
    for start in range(0, 16 * count, count):
        for problem in task.sample_batch(seed=seed, start=start, count=count, operations=operations, split=split):
            if len(found) < count:
                found.setdefault(problem.instance_key, problem)
        if len(found) == count:
            break
    return list(found.values())


def outcome(
    task: Task, problem: Problem, index: int, texts: list[str], ended: np.ndarray, lengths: np.ndarray, *,
    temperature: float,
) -> dict[str, Any]:  # fmt: skip
    """The outcomes row of one problem; arm, stage, seed and band are put on when the table is read."""
    verdicts = [task.verify(problem, text, ended=bool(end)) for text, end in zip(texts, ended, strict=True)]
    operations = problem.difficulty["operations"]
    return {
        "task": task.name,
        "context": problem.context,
        "operations": operations,
        "problem": index,
        "structures_shared": task.structures_shared(operations),
        "n": len(verdicts),
        "c_answer": sum(v.answer_correct for v in verdicts),
        "c_strict": sum(v.strict for v in verdicts),
        "process_mean": float(np.mean([v.process_score for v in verdicts])),
        "length_mean": float(np.mean(lengths)),
        "truncated": int((~ended).sum()),
        "temperature": temperature,
        **{f"status_{status}": sum(v.count(status) for v in verdicts) for status in task.statuses},
    }
