"""What an arm cost: tokens and FLOPs of its stage and of every stage before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from analysis.tables import STAGES, TableError, check

# Between the names of several parents in the stages table.
SEVERAL = " + "
# Counts that add up along a lineage.
COUNTS = ("tokens", "samples", "sampled_tokens", "flops", "wall_s")


def arm_stages(outcomes: pd.DataFrame) -> dict[str, str]:
    """The stage that each arm ends in, in the order of the table."""
    pairs = outcomes[["arm", "stage"]].drop_duplicates()
    if pairs["arm"].duplicated().any():
        arm = pairs.loc[pairs["arm"].duplicated(), "arm"].iloc[0]
        raise TableError(f"arm {arm!r} has outcomes of several stages; an arm is one stage and what led to it")
    return {str(arm): str(stage) for arm, stage in pairs.itertuples(index=False)}


def lineage(stages: pd.DataFrame, stage: str) -> tuple[str, ...]:
    """The stage and its ancestors, each after its own parents. Of two checkpoints of one stage (`a@10`, `a@20` and `a`
    itself) the furthest alone is there: it went through the others.

    Raises TableError for an unknown stage or a circle.
    """
    parents = {str(name): parent for name, parent in stages[["stage", "parent"]].itertuples(index=False)}
    chain: list[str] = []

    def add(name: str, below: tuple[str, ...]) -> None:
        if name in below:
            raise TableError(f"stage {name!r} is its own ancestor")
        if name not in parents:
            raise TableError(f"no stage {name!r} in the stages table; it has {', '.join(parents)}")
        if name not in chain:
            parent = parents[name]
            for before in parent.split(SEVERAL) if isinstance(parent, str) and parent else []:
                add(before, (*below, name))
            chain.append(name)

    add(stage, ())
    return tuple(furthest(chain))


def furthest(stages: Iterable[str]) -> list[str]:
    """The names without those of checkpoints that another of them went through."""
    names = list(stages)

    def place(name: str) -> tuple[str, float]:
        base, at, step = name.partition("@")
        return (base, float(step)) if at and step.isdigit() else (name, math.inf)

    most: dict[str, float] = {}
    for base, step in map(place, names):
        most[base] = max(step, most.get(base, 0.0))
    return [name for name in names if place(name)[1] == most[place(name)[0]]]


def parent_arms(stages: pd.DataFrame, arms: Mapping[str, str]) -> dict[str, str]:
    """The arm that each arm continues: the nearest ancestor stage that is itself an arm's; arms without one are left
    out. Where arms branch from a stage that was never evaluated, name the parents by hand."""
    owner = {stage: arm for arm, stage in reversed(list(arms.items()))}
    found = {}
    for arm, stage in arms.items():
        for ancestor in reversed(lineage(stages, stage)[:-1]):
            if ancestor in owner:
                found[arm] = owner[ancestor]
                break
    return found


def by_arm(stages: pd.DataFrame, arms: Mapping[str, str]) -> pd.DataFrame:
    """One row an arm: arm, stages (names from the first on) and the COUNTS of a training run (mean over seeds).

    arms: from arm to its final stage. A stage that several arms share counts fully in each of them; the arms do not
    add up to `total`.
    """
    check(stages, STAGES)
    rows = []
    for arm, stage in arms.items():
        chain = lineage(stages, stage)
        mine = stages[stages["stage"].isin(chain)]
        counts = mine.groupby("seed")[list(COUNTS)].sum().mean()
        rows.append({"arm": arm, "stages": chain} | {name: float(counts[name]) for name in COUNTS})
    return pd.DataFrame(rows)


def total(stages: pd.DataFrame) -> pd.Series:
    """COUNTS of the whole experiment, all seeds together: each finished stage (its key) once, and of its checkpoints
    the furthest alone."""
    once = check(stages, STAGES).drop_duplicates("key")
    return once[once["stage"].isin(furthest(once["stage"]))][list(COUNTS)].sum()
