"""How often an answer is right without reasoning: an answer-only pass@1 means nothing below this."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from synthetic_tasks.arithmetic.trace import Facts
from synthetic_tasks.base import Split

if TYPE_CHECKING:
    from synthetic_tasks.arithmetic.task import ArithmeticTask


def guess_floor(task: ArithmeticTask, operations: int, *, split: Split, problems: int) -> dict[str, float]:
    """Accuracy of each way of guessing on `problems` problems of the split, and the best of them.

    majority       the most frequent answer of as many training problems
    uniform        any number, evenly (exact: 1 / modulus)
    copy_leaf      a leaf of the prompt, evenly (expected accuracy)
    nearest_leaf   the leaf whose fact stands nearest to the question in the prompt
    measured       the number of problems that this was measured on
    """
    if problems < 1:
        raise ValueError(f"problems must be at least 1, not {problems}")
    seen = task.sample_batch(seed=0, start=0, count=problems, operations=operations, split="train")
    majority = Counter(problem.facts.values[problem.facts.query] for problem in seen).most_common(1)[0][0]
    hits = Counter[str]()
    # Another stream than that of seen, should the split be train.
    for problem in task.sample_batch(seed=1, start=0, count=problems, operations=operations, split=split):
        facts = problem.facts
        answer = facts.values[facts.query]
        leaves = [facts.values[i] for i in facts.order if not facts.graph[i]]
        hits["majority"] += answer == majority
        hits["copy_leaf"] += leaves.count(answer) / len(leaves)  # type: ignore[assignment]
        hits["nearest_leaf"] += answer == leaves[-1 if task.settings.question == "last" else 0]
    floor = {name: hits[name] / problems for name in ("majority", "copy_leaf", "nearest_leaf")}
    floor["uniform"] = 1 / task.settings.modulus
    return {**floor, "best": max(floor.values()), "measured": float(problems)}


def lookup_guess(facts: Facts) -> float:
    """Expected accuracy of naming a random leaf of the prompt wherever the gold trace quotes an operand's value.

    A model that has not learnt to look values up sits at about this level; answer accuracy hides it.
    """
    leaves = [facts.values[i] for i in facts.order if not facts.graph[i]]
    quoted = [facts.values[operand] for i in facts.gold_order for operand in (facts.graph[i] or ())[1:]]
    return sum(map(leaves.count, quoted)) / (len(leaves) * len(quoted))
