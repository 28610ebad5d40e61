"""The two ways in which Interplay (arXiv 2512.07783) scores a trace, as alternatives to our verdict.

Both key a step by the quantity it defines, the last definition winning, and compare two things with the gold graph:
the quantities it uses that were given or defined before, and the value. Operators and the algebra are not looked at,
so `a 4 - b 2 = d 6` passes where d is a + b. The evaluation (appendix A.4) and the reward (reward_fn.py of their code)
differ in what they make of extra steps and of a wrong answer.

Departures: leaves are given in our prompts, so only operations are nodes; a trace is read up to the first token that is
none, where their parser skips what it cannot read.
"""

from __future__ import annotations

from dataclasses import dataclass

from synthetic_tasks.arithmetic.trace import Facts, Reading


@dataclass(frozen=True, kw_only=True)
class InterplayScore:
    """Counts over the nodes of the gold graph, and what the two conventions make of them."""

    nodes: int
    # Nodes with the right parents and value.
    right: int
    missing: int
    wrong_parents: int
    wrong_value: int
    # Quantities defined that the gold graph does not have.
    extra: int
    answer_correct: bool

    @property
    def process_accuracy(self) -> float:
        """Evaluation: the share of nodes that are right; extra steps are free."""
        return self.right / self.nodes

    @property
    def verified(self) -> bool:
        """Evaluation: every node and the answer right. All their pass@k are of this."""
        return self.right == self.nodes and self.answer_correct

    @property
    def process_reward(self) -> float:
        """Reward: one minus faults / nodes, not below 0; a node can be at fault twice, extras count up to `nodes`."""
        faults = self.wrong_value + self.wrong_parents + self.missing + min(self.extra, self.nodes)
        return max(0.0, 1 - (faults + (not self.answer_correct)) / self.nodes)

    def reward(self, alpha: float) -> float:
        """Reward: alpha x outcome + (1 - alpha) x process, and 0 for a wrong answer, as in the code (not the paper)."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], not {alpha}")
        return alpha + (1 - alpha) * self.process_reward if self.answer_correct else 0.0

    @property
    def strict_reward(self) -> float:
        """Reward: 1 if the answer is right and the process reward is 1, so without extras; else 0."""
        return float(self.answer_correct and self.process_reward == 1)


def interplay_score(facts: Facts, reading: Reading) -> InterplayScore:
    """The score of a completion as far as it was read."""
    known = set(facts.given)
    defined: dict[str, tuple[set[str], int]] = {}
    for step in reading.steps:
        defined[step.target] = ({step.left, step.right} & known, step.result)
        known.add(step.target)
    gold = {name: ({*facts.definitions[name][1:]}, facts.true_values[name]) for name in facts.obligations}
    present = {name: defined[name] for name in gold if name in defined}
    return InterplayScore(
        nodes=len(gold),
        right=sum(gold[name] == found for name, found in present.items()),
        missing=len(gold) - len(present),
        wrong_parents=sum(gold[name][0] != parents for name, (parents, _) in present.items()),
        wrong_value=sum(gold[name][1] != value for name, (_, value) in present.items()),
        extra=len(defined) - len(present),
        answer_correct=reading.answer == facts.values[facts.query],
    )
