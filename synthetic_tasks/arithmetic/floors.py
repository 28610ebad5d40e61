"""How often an answer is right without reasoning: an answer-only pass@1 means nothing below this."""

from __future__ import annotations

from synthetic_tasks.arithmetic.trace import Facts


def guesses(facts: Facts, question: str) -> dict[str, float]:
    """Expected accuracy of ways to guess the answer.

    uniform        any number, evenly
    copy_leaf      a leaf of the prompt, evenly
    nearest_leaf   the leaf whose fact stands nearest to the question in the prompt
    """
    answer = facts.values[facts.query]
    leaves = [facts.values[i] for i in facts.order if not facts.graph[i]]
    return {
        "copy_leaf": leaves.count(answer) / len(leaves),
        "nearest_leaf": float(answer == leaves[-1 if question == "last" else 0]),
        "uniform": 1 / facts.modulus,
    }


def lookup_guess(facts: Facts) -> float:
    """Expected accuracy of naming a random leaf of the prompt wherever the gold trace quotes an operand's value.

    A model that has not learnt to look values up sits at about this level; answer accuracy hides it.
    """
    leaves = [facts.values[i] for i in facts.order if not facts.graph[i]]
    quoted = [facts.values[operand] for i in facts.gold_order for operand in (facts.graph[i] or ())[1:]]
    return sum(map(leaves.count, quoted)) / (len(leaves) * len(quoted))
