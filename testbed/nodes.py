"""One piece of work: what a node of the stage graph is told, as plain dataclasses.

corpus ──> pretrain ──> midtrain / sft / rl / parallel / combine ──> ... ──> evaluation, probe
               └──> pretrain@200 (a kept checkpoint) ──> ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from models.config import ModelConfig
from synthetic_tasks import Task, Tokenizer, get_task
from synthetic_tasks.corpus import Component
from testbed.config import Config, Evaluation, Probe, StageConfig


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
    """One piece of work of one repetition, and the key of the artifact it makes."""

    # corpus, a kind of stage, checkpoint, evaluation or probe
    kind: str
    # The spec's name for it, `stage@step` for a checkpoint; not part of the key.
    name: str
    # Label of the repetition; corpora belong to all.
    seed: int | None
    key: str
    config: Corpus | StageConfig | Evaluation | Probe
    # Keys of the artifacts it reads, by role: parent, corpus, match/<stage>, of/<stage>, stage, against, and
    # objective/<stage> for the corpus of an objective.
    parents: dict[str, str]
    context: Context
    # What was hashed into the key; kept in the manifest.
    fields: dict[str, Any] = field(default_factory=dict)
    # Of a checkpoint: the step of its stage.
    step: int | None = None
    # Steps whose checkpoints are published on the way.
    keep: tuple[int, ...] = ()
    # Key of the node that makes this one on its way, if it is made in the same run.
    after: str | None = None
    # The objectives of a parallel stage, by name.
    objectives: dict[str, Node] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name for people: `mid, seed 0`, `evaluation of mid, seed 0`."""
        what = {
            "corpus": f"corpus {self.name}",
            "evaluation": f"evaluation of {self.name}",
            "probe": f"probe {self.name}",
        }.get(self.kind, self.name)
        return what if self.seed is None else f"{what}, seed {self.seed}"

    @property
    def stage_key(self) -> str:
        """Key of the stage that a checkpoint belongs to; a node's own otherwise."""
        return self.key.partition("@")[0]


SHELVES = {"corpus": "corpora", "checkpoint": "checkpoints", "evaluation": "evaluations", "probe": "probes"}


def shelf(kind: str) -> str:
    """Folder of the store in which artifacts of a kind stand; all stages share one."""
    return SHELVES.get(kind, "stages")


def shelf_of_input(role: str, key: str) -> str:
    """Folder in which an input stands: checkpoints are told by their keys, corpora by their role."""
    if "@" in key:
        return SHELVES["checkpoint"]
    return SHELVES["corpus"] if is_corpus(role) else "stages"


def is_corpus(role: str) -> bool:
    """Whether an input is documents, by its role."""
    return role == "corpus" or role.startswith("objective/")


def checkpoint_key(stage: str, step: int) -> str:
    """Of the checkpoint after `step` steps of the stage with that key."""
    return f"{stage}@{step}"


def split_reference(reference: str) -> tuple[str, int | None]:
    """`pretrain@200` names the checkpoint after 200 steps of `pretrain`; without a step the stage itself is meant."""
    name, at, step = reference.partition("@")
    number = int(step) if at and step.isascii() and step.isdigit() and len(step) < 10 else 0
    return (name, number) if number > 0 else (reference, None)
