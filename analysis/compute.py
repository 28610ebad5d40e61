"""What an arm cost: tokens and FLOPs of its stage and of every stage before it."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.tables import STAGES, TableError, check

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
    """The stage and its ancestors, the first ancestor first. Raises TableError for an unknown stage or a circle."""
    parents = {str(name): parent for name, parent in stages[["stage", "parent"]].itertuples(index=False)}
    chain: list[str] = []
    current: object = stage
    while isinstance(current, str) and current:
        if current in chain:
            raise TableError(f"stage {current!r} is its own ancestor")
        if current not in parents:
            raise TableError(f"no stage {current!r} in the stages table; it has {', '.join(parents)}")
        chain.append(current)
        current = parents[current]
    return tuple(reversed(chain))


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
    """COUNTS of the whole experiment, all seeds together: each finished stage (its key) once."""
    return check(stages, STAGES).drop_duplicates("key")[list(COUNTS)].sum()
