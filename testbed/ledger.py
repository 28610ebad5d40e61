"""Tokens and FLOPs of a stage by what they were spent on, counted from what ran.

`useful` counts real tokens and the query-key pairs that attention may see; `executed` counts what the arithmetic units
were given: padding, masked pairs, rows that had ended. Budgets and the FLOPs of a comparison are useful ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from models.config import ModelConfig
from models.flops import Shape, forward_flops

# What work is for. training: forward and backward of the loss. rollout: sampling. reference: the reference policy's
# log-probabilities. scoring: measuring, such as teacher-forced accuracy; no budget counts it.
ACTIVITIES = ("training", "rollout", "reference", "scoring")


@dataclass
class Work:
    """Work of one activity."""

    # Real tokens, and positions that were computed.
    tokens: int = 0
    padded_tokens: int = 0
    flops_useful: float = 0.0
    flops_executed: float = 0.0


class Ledger:
    """Work by activity of a model with this shape."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.work = {activity: Work() for activity in ACTIVITIES}

    def add(self, activity: str, useful: Shape, executed: Shape, *, passes: float = 1.0, times: int = 1) -> None:
        """Count work over these shapes. passes: of FLOPs for each forward pass (3 with its backward); times: how often
        it was done, each time over all tokens."""
        work = self.work[activity]
        work.tokens += useful.tokens * times
        work.padded_tokens += executed.tokens * times
        work.flops_useful += times * passes * forward_flops(self.config, self.vocabulary, useful)
        work.flops_executed += times * passes * forward_flops(self.config, self.vocabulary, executed)

    @property
    def flops(self) -> float:
        """Useful FLOPs of all but scoring: what a budget counts."""
        return sum(work.flops_useful for activity, work in self.work.items() if activity != "scoring")

    def record(self) -> dict[str, Any]:
        """As JSON holds it; activities without work are left out."""
        return {activity: asdict(work) for activity, work in self.work.items() if work != Work()}

    def restore(self, record: dict[str, Any]) -> None:
        self.work = {activity: Work(**record.get(activity, {})) for activity in ACTIVITIES}


def interplay_training(parameters: int, tokens: int) -> float:
    """FLOPs of training as Interplay counts them (arXiv 2512.07783, appendix A.10): 6 a parameter and token."""
    return 6.0 * parameters * tokens


def interplay_rl(parameters: int, samples: int, length: int, *, reference: bool) -> float:
    """FLOPs of RL as Interplay counts them (appendix A.10): of every sample the longest possible `length` in tokens,
    2 a parameter and token for the rollout, 2 for the reference where there is one, 6 for the update."""
    return (8.0 + 2.0 * reference) * parameters * samples * length
