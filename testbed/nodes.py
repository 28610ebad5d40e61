"""One piece of work: what a node of the stage graph is told, as plain dataclasses.

corpus ──> pretrain ──> midtrain / sft / rl ──> ... ──> evaluation
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from models.config import ModelConfig
from synthetic_tasks import Task, Tokenizer, get_task
from synthetic_tasks.corpus import Component
from testbed.config import RL, Config, Evaluation, Train


@dataclass(frozen=True, kw_only=True)
class Seeds(Config):
    """Separate sources of chance; each is used for nothing else."""

    # Initial weights.
    init: int = 0
    # Order of the training data.
    order: int = 0
    # Noise of sampled tokens.
    rollout: int = 0
    # Problems, the same in all repetitions; set by the spec's `problem_seed`.
    problems: int = 0

    def __post_init__(self) -> None:
        for name, seed in vars(self).items():
            if not 0 <= seed < 2**63:
                raise ValueError(f"{name}: a seed lies in [0, 2^63), not {seed}")


@dataclass(frozen=True, kw_only=True)
class Corpus(Config):
    """Documents of one packed corpus, what it replays of another mixed in."""

    documents: int
    components: tuple[Component, ...]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every node of one experiment is told beside its own settings."""

    model: ModelConfig
    # Name and settings of the task.
    task: tuple[str, dict[str, Any]]
    seeds: Seeds
    # Operations by band.
    bands: dict[str, tuple[int, ...]]

    @property
    def operations(self) -> list[int]:
        """Operations of all bands, from easy to hard."""
        return sorted({o for band in self.bands.values() for o in band})

    def task_and_tokenizer(self) -> tuple[Task, Tokenizer]:
        """The experiment's task, and the tokenizer of it."""
        name, settings = self.task
        task = get_task(name, **settings)
        return task, Tokenizer.for_tasks(task)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One stage, evaluation or corpus of one repetition, and the key of the artifact it makes."""

    # corpus, pretrain, midtrain, sft, rl or evaluation
    kind: str
    # The spec's name for it; not part of the key.
    name: str
    # Label of the repetition; corpora belong to all.
    seed: int | None
    key: str
    config: Corpus | Train | RL | Evaluation
    # Keys of the artifacts it reads, by role: parent, corpus, match/<stage>, stage.
    parents: dict[str, str]
    context: Context
    # What was hashed into the key; kept in the manifest.
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name for people: `mid, seed 0`, `evaluation of mid, seed 0`."""
        what = {"corpus": f"corpus {self.name}", "evaluation": f"evaluation of {self.name}"}.get(self.kind, self.name)
        return what if self.seed is None else f"{what}, seed {self.seed}"


def shelf(kind: str) -> str:
    """Folder of the store in which artifacts of a kind stand; all training stages share one."""
    return {"corpus": "corpora", "evaluation": "evaluations"}.get(kind, "stages")


def shelf_of_role(role: str) -> str:
    """Folder in which an input stands, by its role."""
    return "corpora" if role == "corpus" else "stages"
