"""A state that rules change, one after the other: depth without choice."""

from synthetic_tasks.state.task import Facts, StateSettings, StateTask
from synthetic_tasks.state.verify import Step

__all__ = ["Facts", "StateSettings", "StateTask", "Step"]
