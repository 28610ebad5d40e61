"""The tidy tables everything downstream reads, and the summaries made from outcomes.

A schema names the columns a table must have; columns beyond it are let through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.api import types

from analysis.intervals import Interval, over_seeds, over_seeds_and_problems
from analysis.passk import pass_at_k

Metric = Literal["strict", "answer", "process"]
Grouping = Literal["band", "operations"]

# What makes two outcomes the same problem, whichever arm and seed answered it.
PROBLEM = ("task", "context", "operations", "problem")


class TableError(ValueError):
    """A table that does not hold what its schema promises, or does not hold it for every arm and seed."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns and their kinds (str, int, float, bool; a question mark allows missing values), one row a `key`."""

    name: str
    version: int
    columns: Mapping[str, str]
    key: tuple[str, ...] = ()
    # Kinds of further columns by the start of their name.
    prefixes: Mapping[str, str] = field(default_factory=dict)


OUTCOMES = Schema(
    name="outcomes",
    version=1,
    columns={
        "arm": "str",
        "stage": "str",
        "key": "str",
        "seed": "int",
        "task": "str",
        "context": "str",
        "band": "str",
        "operations": "int",
        "problem": "int",
        "structures_shared": "bool",
        "n": "int",
        "c_answer": "int",
        "c_strict": "int",
        "process_mean": "float",
        "length_mean": "float",
        "truncated": "int",
        "temperature": "float",
    },
    key=("arm", "seed", *PROBLEM),
    prefixes={"status_": "int"},
)
CURVES = Schema(
    name="curves",
    version=1,
    columns={"stage": "str", "key": "str", "seed": "int", "step": "int", "tokens": "int?"},
)
ROLES = Schema(
    name="roles",
    version=1,
    columns={
        "stage": "str",
        "seed": "int",
        "step": "int",
        "band": "str",
        "operations": "int",
        "role": "str",
        "accuracy": "float?",
        "loss": "float?",
        "tokens": "int",
    },
)
STAGES = Schema(
    name="stages",
    version=1,
    columns={
        "stage": "str",
        "key": "str",
        "kind": "str",
        "seed": "int",
        "parent": "str?",
        "tokens": "int",
        "samples": "int?",
        "sampled_tokens": "int?",
        "flops": "float",
        "wall_s": "float?",
        "rows": "int?",
        "groups": "int?",
        "groups_with_signal": "int?",
        "weight_change": "float?",
    },
    key=("stage", "seed"),
)
# Work by what it was for (see testbed.ledger): of stages, kept checkpoints and evaluations.
LEDGER = Schema(
    name="ledger",
    version=1,
    columns={
        "stage": "str",
        "key": "str",
        "kind": "str",
        "seed": "int",
        "activity": "str",
        "tokens": "int",
        "padded_tokens": "int",
        "flops_useful": "float",
        "flops_executed": "float",
    },
    key=("key", "stage", "seed", "activity"),
)
# What was read off checkpoints: `measure` says which of the further columns hold something.
PROBES = Schema(
    name="probes",
    version=1,
    columns={"probe": "str", "stage": "str", "key": "str", "seed": "int", "against": "str?", "measure": "str"},
)
SCHEMAS: dict[str, Schema] = {schema.name: schema for schema in (OUTCOMES, CURVES, ROLES, STAGES, LEDGER, PROBES)}


def check(table: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """The table itself, if it holds every column of the schema in its kind and no key twice. Raises TableError."""
    missing = [name for name in schema.columns if name not in table.columns]
    if missing:
        raise TableError(
            f"the {schema.name} table (schema {schema.version}) lacks the columns {', '.join(missing)}; "
            f"it has {', '.join(map(str, table.columns))}"
        )
    kinds = dict(schema.columns)
    for start, kind in schema.prefixes.items():
        kinds |= {str(name): kind for name in table.columns if str(name).startswith(start)}
    for name, kind in kinds.items():
        problem = _misfit(table[name], kind)
        if problem:
            raise TableError(f"column {name!r} of the {schema.name} table should be {kind}, but {problem}")
    if schema.key and table.duplicated(list(schema.key)).any():
        first = table.loc[table.duplicated(list(schema.key)), list(schema.key)].iloc[0].to_dict()
        raise TableError(f"the {schema.name} table has more than one row for {first}")
    return table


def _misfit(column: pd.Series, kind: str) -> str:
    """What is wrong with a column, or an empty string."""
    present = column.dropna()
    if len(present) < len(column) and not kind.endswith("?"):
        return f"{len(column) - len(present)} of its {len(column)} values are missing"
    if present.empty:
        return ""
    numeric = types.is_numeric_dtype(present) and not types.is_bool_dtype(present)
    match kind.rstrip("?"):
        case "str":
            fits = types.is_string_dtype(present) or all(isinstance(value, str) for value in present)
        case "bool":
            fits = types.is_bool_dtype(present)
        case "int":
            # A column of whole numbers with gaps is kept as floats.
            whole = types.is_integer_dtype(present) or kind.endswith("?")
            fits = numeric and whole and bool((present == np.floor(present)).all())
        case _:
            fits = numeric and bool(np.isfinite(present).all())
    return "" if fits else f"holds {present.iloc[0]!r} ({present.dtype})"


def check_outcomes(outcomes: pd.DataFrame) -> pd.DataFrame:
    """`check`, and what a comparison needs: every arm and seed answered the same problems, with as many samples, at
    one temperature, and an operations count belongs to one band. Raises TableError."""
    check(outcomes, OUTCOMES)
    if outcomes.empty:
        raise TableError("the outcomes table is empty: nothing was evaluated")
    for column, what in (("n", "numbers of samples a problem"), ("temperature", "temperatures")):
        seen = sorted(outcomes[column].unique())
        if len(seen) > 1:
            raise TableError(f"outcomes mix {what} ({', '.join(map(str, seen))}); compare one at a time")
    bands = outcomes.groupby("operations")["band"].nunique()
    if (bands > 1).any():
        raise TableError(f"{bands[bands > 1].index[0]} operations stand in more than one band")
    problems = pd.MultiIndex.from_frame(outcomes[list(PROBLEM)])
    runs = outcomes.groupby(["arm", "seed"], sort=False).size()
    expected = problems.nunique()
    if (runs != expected).any():
        run = runs[runs != expected].index[0]
        raise TableError(
            f"arm {run[0]!r}, seed {run[1]} has outcomes for {runs[run]} of the {expected} problems that other arms or "
            "seeds answered; a comparison needs the same problems everywhere: evaluate the missing ones or leave the "
            "arm out"
        )
    seeds = outcomes.groupby("arm", sort=False)["seed"].unique()
    for arm, these in seeds.items():
        if set(these) != set(seeds.iloc[0]):
            raise TableError(
                f"arm {arm!r} has seeds {list(map(int, these))}, arm {seeds.index[0]!r} has "
                f"{list(map(int, seeds.iloc[0]))}; paired differences need the same"
            )
    return outcomes


def arms(outcomes: pd.DataFrame) -> list[str]:
    """Arms in the order of the table."""
    return [str(arm) for arm in outcomes["arm"].unique()]


def bands(outcomes: pd.DataFrame) -> dict[str, tuple[int, ...]]:
    """Operations of each band, bands and operations from easy to hard."""
    pairs = outcomes[["band", "operations"]].drop_duplicates().sort_values("operations")
    return {str(band): tuple(int(o) for o in rows) for band, rows in pairs.groupby("band", sort=False)["operations"]}


def default_k(outcomes: pd.DataFrame) -> tuple[int, ...]:
    """Powers of two up to half the samples of a problem: n >= 2k keeps the estimate's spread in hand."""
    limit = max(1, int(outcomes["n"].min()) // 2)
    return tuple(2**e for e in range(limit.bit_length()))


def metric_values(outcomes: pd.DataFrame, *, metric: Metric, k: int) -> pd.Series:
    """The metric of every row: pass@k of strict or answer, or the mean process score (k = 1 only)."""
    if metric == "process":
        if k != 1:
            raise ValueError(f"the process score is a mean over samples and has no pass@{k}; use k = 1")
        values = outcomes["process_mean"].to_numpy(dtype=np.float64)
    elif metric in ("strict", "answer"):
        values = np.asarray(pass_at_k(outcomes["n"].to_numpy(), outcomes[f"c_{metric}"].to_numpy(), k))
    else:
        raise ValueError(f"unknown metric {metric!r}; there are strict, answer and process")
    return pd.Series(values, index=outcomes.index, name=f"{metric}_{k}")


def matrix(
    outcomes: pd.DataFrame, *, arm: str, metric: Metric = "strict", k: int = 1, band: str | None = None
) -> pd.DataFrame:
    """Values of one arm, [seeds, problems]: rows by seed, columns by task, context, operations and problem, sorted.

    Two arms of a checked table have equal labels, so their difference is paired. Raises TableError where no outcome
    belongs to the arm or the band.
    """
    rows = outcomes[outcomes["arm"] == arm]
    if rows.empty:
        raise TableError(f"no outcomes of arm {arm!r}; the table has {', '.join(arms(outcomes))}")
    if band is not None:
        rows = rows[rows["band"] == band]
        if rows.empty:
            raise TableError(f"no outcomes of arm {arm!r} in band {band!r}; the table has {', '.join(bands(outcomes))}")
    values = rows.assign(value=metric_values(rows, metric=metric, k=k))
    wide = values.pivot(index="seed", columns=list(PROBLEM), values="value").sort_index().sort_index(axis=1)
    if wide.isna().any(axis=None):
        raise TableError(f"arm {arm!r} did not answer every problem with every seed")
    return wide


def independent(values: pd.DataFrame, outcomes: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """Values [seeds, problems] that come from these arms, one row a training run: seeds at which every one of the arms
    is the same checkpoint differ in sampling alone, and are averaged instead of counted as repetitions."""
    rows = outcomes[outcomes["arm"].isin(arms)].drop_duplicates(["arm", "seed"])
    keys = rows.sort_values("arm").groupby("seed")["key"].agg(" ".join)
    if keys.is_unique:
        return values
    return values.groupby(keys.loc[values.index].to_numpy(), sort=False).mean()


def results(outcomes: pd.DataFrame, k: Sequence[int] | None = None) -> pd.DataFrame:
    """One row an (arm, seed, operations): what was measured, without intervals.

    Columns: arm, seed, band, operations, problems, samples (of a problem), strict_pass_at_1, answer_pass_at_1,
    strict_pass_at_k and answer_pass_at_k (dict from k), process_mean, truncated (share of the samples), length_mean
    (tokens), structures_shared, temperature. `flat` turns the dicts into columns.
    """
    check_outcomes(outcomes)
    ks = tuple(k) if k is not None else default_k(outcomes)
    values = outcomes[["arm", "seed", "band", "operations"]].copy()
    names = {(metric, each): f"{metric}_{each}" for metric in ("strict", "answer") for each in (1, *ks)}
    for (metric, each), name in names.items():
        values[name] = metric_values(outcomes, metric=metric, k=each)  # type: ignore[arg-type]
    for name in ("process_mean", "length_mean", "temperature", "structures_shared", "n"):
        values[name] = outcomes[name]
    values["truncated"] = outcomes["truncated"] / outcomes["n"]
    rows = []
    order = {arm: place for place, arm in enumerate(arms(outcomes))}
    for _, cell in values.groupby(["arm", "seed", "operations"], sort=False):
        mean = cell[[*names.values(), "process_mean", "length_mean", "truncated"]].mean()
        rows.append(
            {
                "arm": str(cell["arm"].iloc[0]),
                "seed": int(cell["seed"].iloc[0]),
                "band": cell["band"].iloc[0],
                "operations": int(cell["operations"].iloc[0]),
                "problems": len(cell),
                "samples": int(cell["n"].iloc[0]),
                "strict_pass_at_1": float(mean["strict_1"]),
                "answer_pass_at_1": float(mean["answer_1"]),
                "strict_pass_at_k": {each: float(mean[f"strict_{each}"]) for each in ks},
                "answer_pass_at_k": {each: float(mean[f"answer_{each}"]) for each in ks},
                "process_mean": float(mean["process_mean"]),
                "truncated": float(mean["truncated"]),
                "length_mean": float(mean["length_mean"]),
                "structures_shared": bool(cell["structures_shared"].any()),
                "temperature": float(cell["temperature"].iloc[0]),
            }
        )
    rows.sort(key=lambda row: (order[row["arm"]], row["seed"], row["operations"]))
    return pd.DataFrame(rows)


def flat(table: pd.DataFrame) -> pd.DataFrame:
    """A results table with one column a k (strict_pass_at_2, ...) in place of the dicts: for csv and parquet."""
    columns: dict[str, pd.Series] = {}
    for name in table.columns:
        if str(name).endswith("_pass_at_k"):
            for k in table[name].iloc[0] if len(table) else ():
                columns[f"{str(name)[:-1]}{k}"] = table[name].map(lambda value, k=k: value[k])
        else:
            columns[str(name)] = table[name]
    return pd.DataFrame(columns)


def by_band(
    outcomes: pd.DataFrame, metric: Metric = "strict", k: int = 1, *, level: float = 0.95, population: bool = False
) -> pd.DataFrame:
    """One row an (arm, band): arm, band, operations (first and last), metric, k and the fields of the interval."""
    return _intervals(outcomes, "band", metric, k, level, population)


def by_operations(
    outcomes: pd.DataFrame, metric: Metric = "strict", k: int = 1, *, level: float = 0.95, population: bool = False
) -> pd.DataFrame:
    """One row an (arm, operations): arm, band, operations, structures_shared, metric, k and the interval's fields."""
    return _intervals(outcomes, "operations", metric, k, level, population)


def _intervals(
    outcomes: pd.DataFrame, by: Grouping, metric: Metric, k: int, level: float, population: bool
) -> pd.DataFrame:
    check_outcomes(outcomes)
    method = over_seeds_and_problems if population else over_seeds
    shared = outcomes.groupby("operations")["structures_shared"].any()
    rows = []
    for arm in arms(outcomes):
        values = independent(matrix(outcomes, arm=arm, metric=metric, k=k), outcomes, [arm])
        operations = values.columns.get_level_values("operations")
        for band, members in bands(outcomes).items():
            for cell in [members] if by == "band" else [(member,) for member in members]:
                interval = method(values.loc[:, operations.isin(cell)].to_numpy(), level=level)
                span = f"{cell[0]}-{cell[-1]}" if len(cell) > 1 else str(cell[0])
                rows.append(
                    {"arm": arm, "band": band, "operations": span if by == "band" else cell[0]}
                    | {"structures_shared": bool(shared[list(cell)].any()), "metric": metric, "k": k}
                    | interval_columns(interval)
                )
    return pd.DataFrame(rows)


def interval_columns(interval: Interval) -> dict[str, Any]:
    """An interval as the columns of a table row."""
    return {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "level": interval.level,
        "method": interval.method,
        "seeds": interval.seeds,
        "problems": interval.problems,
    }
