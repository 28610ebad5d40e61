"""What an arm cost: tokens and FLOPs of its stage and of every stage before it."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
    """The stage and its ancestors, each after its own parents. Raises TableError for an unknown stage or a circle."""
    parents = {str(name): parent for name, parent in stages[["stage", "parent"]].itertuples(index=False)}
    chain: list[str] = []

    def add(name: str, below: tuple[str, ...]) -> None:
        if name in below:
            raise TableError(f"stage {name!r} is its own ancestor")
        if name not in parents:
            raise TableError(f"no stage {name!r} in the stages table; it has {', '.join(parents)}")
        if name not in chain:
            for before in _names(parents[name]):
                add(before, (*below, name))
            chain.append(name)

    add(stage, ())
    return tuple(chain)


def _names(parent: object) -> list[str]:
    return parent.split(SEVERAL) if isinstance(parent, str) and parent else []


def base_of(name: str) -> str:
    """The stage, or its key, that a checkpoint (`stage@step`) belongs to; any other name itself."""
    base, at, step = name.partition("@")
    return base if at and step.isdecimal() else name


def once(stages: pd.DataFrame) -> pd.DataFrame:
    """Of the rows of one stage (by its key) in one seed, the furthest alone: a stage went through its checkpoints, and
    one stage may have several names."""
    keys = [str(key) for key in stages["key"]]
    base = [base_of(key) for key in keys]
    step = [math.inf if one == key else int(key[len(one) + 1 :]) for key, one in zip(keys, base, strict=True)]
    ordered = stages.assign(_base=base, _step=step).sort_values("_step", kind="stable")
    kept = ordered.drop_duplicates(["_base", "seed"], keep="last").index
    return stages.loc[stages.index.isin(kept)]


def parent_arms(stages: pd.DataFrame, arms: Mapping[str, str]) -> dict[str, str]:
    """The arm that each arm continues: the nearest ancestor stage that is itself an arm's; arms without one are left
    out. Where arms branch from a stage that was never evaluated, name the parents by hand."""
    owner = {stage: arm for arm, stage in reversed(list(arms.items()))}
    parents = {str(name): _names(parent) for name, parent in stages[["stage", "parent"]].itertuples(index=False)}
    found = {}
    for arm, stage in arms.items():
        lineage(stages, stage)  # known, and no circle
        before = parents[stage]
        # What is made of several continues none of them.
        while len(before) == 1 and before[0] not in owner:
            before = parents[before[0]]
        if len(before) == 1:
            found[arm] = owner[before[0]]
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
        mine = once(stages[stages["stage"].isin(chain)])
        counts = mine.groupby("seed")[list(COUNTS)].sum().mean()
        rows.append({"arm": arm, "stages": chain} | {name: float(counts[name]) for name in COUNTS})
    return pd.DataFrame(rows)


def total(stages: pd.DataFrame) -> pd.Series:
    """COUNTS of the whole experiment, all seeds together: each stage (its key) once, and of its checkpoints the
    furthest alone."""
    return once(check(stages, STAGES).drop_duplicates("key"))[list(COUNTS)].sum()
