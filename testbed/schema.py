"""The shape of a spec: an experiment as a person writes it.

The fields of stages, evaluation and model are the plain dataclasses of `testbed.config` and `models.config`. What is
checked here stands within one part; `testbed.checks` looks at how the parts refer to each other.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from analysis.claims import Claim
from models.config import ModelConfig
from synthetic_tasks import Task, get_task
from synthetic_tasks.corpus import Component, with_replay
from synthetic_tasks.registry import portable
from testbed.config import RL, Combine, Evaluation, Parallel, Probe, Train
from testbed.nodes import Seeds, split_reference

Stage = Annotated[Train | RL | Combine | Parallel, Field(discriminator="kind")]


class TaskSpec(BaseModel):
    """The name of a task and those of its settings that are not at their default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    settings: dict[str, Any] = {}

    @field_validator("settings")
    @classmethod
    def _portable(cls, settings: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """A spec stands for itself: what it names in files is read once, here."""
        return portable(str(info.data.get("name", "")), settings)

    def build(self) -> Task:
        """The task. Raises ValueError for settings it does not have."""
        return get_task(self.name, **self.settings)


class Data(BaseModel):
    """A corpus: how many documents, of which difficulty, and what share repeats the mixture of another corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int = Field(gt=0)
    # Weights of the difficulties (exact operations); they need not sum to 1.
    operations: dict[int, float]
    # Another corpus, whose mixture this share of the documents follows.
    replay: str | None = None
    replay_share: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits(self) -> Data:
        if not self.operations or min(self.operations.values()) < 0 or max(self.operations.values()) <= 0:
            raise ValueError(
                "operations needs weights that are not negative, one of them positive, such as {1: 0.5, 2: 0.5}"
            )
        if (self.replay is None) != (self.replay_share == 0):
            raise ValueError("replay and a positive replay_share go together")
        return self


class Attribution(BaseModel):
    """Whose contributions are told apart: as run (Shapley over the factorial) and at equal FLOPs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Stages that are present or absent.
    factors: tuple[str, ...]
    # The arm of every combination, written as its factors joined by `+`; none of them is the empty text.
    arms: dict[str, str]
    # The treated arm and its placebo of equal FLOPs.
    matched: dict[Literal["treated", "placebo"], str] = {}

    @model_validator(mode="after")
    def _complete(self) -> Attribution:
        for name, parts in ((name, name.split("+") if name else []) for name in self.arms):
            if not set(parts) <= set(self.factors) or len(set(parts)) != len(parts):
                raise ValueError(f"arms: `{name}` is not a combination of the factors {', '.join(self.factors)}")
        if len({frozenset(name.split("+")) for name in self.arms}) != 2 ** len(self.factors):
            raise ValueError(f"arms: give one arm for each of the {2 ** len(self.factors)} combinations of the factors")
        if self.matched and set(self.matched) != {"treated", "placebo"}:
            raise ValueError("matched: give both treated and placebo")
        if len(set(self.arms.values())) < len(self.arms):
            raise ValueError("arms: every combination needs an arm of its own")
        if self.matched and self.matched["treated"] == self.matched["placebo"]:
            raise ValueError("matched: treated and placebo must be two arms")
        return self


class Spec(BaseModel):
    """An experiment. `load` and `parse` are the checked ways to one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Names the report's folder. Results do not depend on it: every spec that asks for the same shares them.
    name: str = Field(max_length=64)
    title: str = ""
    task: TaskSpec
    model: ModelConfig = ModelConfig()
    # Difficulties (exact operations) by band; every band is evaluated.
    bands: dict[str, tuple[int, ...]]
    data: dict[str, Data]
    stages: dict[str, Stage]
    # The final stage, or kept checkpoint `stage@step`, of every arm.
    arms: dict[str, str]
    # What is read off checkpoints beside their evaluation.
    probes: dict[str, Probe] = {}
    # The arm whose result a gain is measured from, where it is not the one that `parent_arms` finds.
    parents: dict[str, str] = {}
    evaluation: Evaluation = Evaluation()
    # Repetitions: an integer s stands for init, order and rollout seed s.
    seeds: tuple[int | Seeds, ...] = (0,)
    # The seed of every problem, the same for all repetitions.
    problem_seed: int = 0
    attribution: Attribution | None = None
    # Expectations, written before the run.
    claims: tuple[Claim, ...] = ()

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("a name is made of letters, digits, `.`, `_` and `-`, the first a letter or digit")
        return name

    def seed_sets(self) -> dict[int, Seeds]:
        """The seeds of each repetition by its label: the topmost seed that varies (init, then order, then rollout).

        Raises ValueError where that seed repeats: nested repetitions are not independent.
        """
        every = [s if isinstance(s, Seeds) else Seeds(init=s, order=s, rollout=s) for s in self.seeds]
        every = [dataclasses.replace(s, problems=self.problem_seed) for s in every]
        for name in ("init", "order", "rollout"):
            labels = [getattr(s, name) for s in every]
            if len(set(labels)) == len(every):
                return dict(zip(labels, every, strict=True))
            if len(set(labels)) > 1:
                break
        raise ValueError(
            f"the {name} seeds {labels} repeat: repetitions that share their topmost varying seed are nested, "
            "and no interval may count them as independent"
        )

    def parent_arms(self) -> dict[str, str | None]:
        """The arm that each arm's gain is measured from, None for an arm that comes from nowhere.

        It is the nearest ancestor stage that is evaluated, itself or annealed. Where arms branch from a stable
        checkpoint, its annealing is the arm that continues it on the same corpus for a dose of its own.
        Raises ValueError where several arms qualify; `parents` then has to say which.
        """
        return {arm: self.parents.get(arm) or self._parent_arm(arm) for arm in self.arms}

    def _parent_arm(self, arm: str) -> str | None:
        for ancestor in reversed(self.lineage(self.arms[arm])[:-1]):
            others = {other: stage for other, stage in self.arms.items() if other != arm}
            found = [other for other, stage in others.items() if stage == ancestor]
            # An annealing is not compared with another annealing of the same checkpoint: neither came first.
            if not found and not self._anneals(self.arms[arm], ancestor):
                found = [other for other, stage in others.items() if self._anneals(stage, ancestor)]
            if len(found) > 1:
                raise ValueError(f"the arm `{arm}` may be compared with {' or '.join(found)}; say which in `parents`")
            if found:
                return found[0]
        return None

    def _anneals(self, stage: str, stable: str) -> bool:
        one, other = self.stages[split_reference(stage)[0]], self.stages[split_reference(stable)[0]]
        return (
            isinstance(one, Train)
            and isinstance(other, Train)
            and one.parent == stable
            and one.data == other.data
            and not one.match
        )

    def parent_of(self, reference: str) -> str | None:
        """The stage or checkpoint that a stage (or the stage of a checkpoint) continues; None where there is none, or
        where several are combined."""
        stage = self.stages[split_reference(reference)[0]]
        if isinstance(stage, Parallel):
            # `checks` sees to it that all objectives have the same.
            return self.stages[next(iter(stage.objectives))].parent
        return stage.parent

    def parents_of(self, reference: str) -> tuple[str, ...]:
        """Every stage or checkpoint whose weights enter."""
        stage = self.stages[split_reference(reference)[0]]
        if isinstance(stage, Combine):
            return tuple(stage.of)
        parent = self.parent_of(reference)
        return () if parent is None else (parent,)

    def lineage(self, reference: str) -> tuple[str, ...]:
        """The stage or checkpoint and its ancestors, the root first; a combination begins its own."""
        chain: list[str] = []
        name: str | None = reference
        while name is not None:
            chain.append(name)
            name = self.parent_of(name)
        return tuple(reversed(chain))

    def components(self, name: str) -> list[Component]:
        """What a corpus is mixed from: its `own` difficulties, and those it replays of another corpus."""
        data = self.data[name]
        own = [Component(name="own", operations={o: w for o, w in sorted(data.operations.items()) if w > 0})]
        if data.replay is None:
            return own
        replayed = [dataclasses.replace(part, name="replay") for part in self.components(data.replay)]
        return with_replay(own, replayed, share=data.replay_share)
