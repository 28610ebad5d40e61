"""Tables for a terminal: results, claims, attribution, compute, and the plan of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

import analysis
from analysis import claims, compute
from testbed.graph import Graph, work
from testbed.nodes import shelf
from testbed.schema import Spec
from testbed.store import Store
from testbed.tables import Tables
from testbed.tracking import duration, quantity


def console() -> Console:
    """Standard output; as wide as it takes where it is not a terminal."""
    # Names of arms and bands are text, whatever brackets they hold.
    out = Console(highlight=False, markup=False)
    return out if out.is_terminal else Console(highlight=False, markup=False, width=160)


def experiment(tables: Tables, claims: Sequence[analysis.ClaimResult], effects: pd.DataFrame) -> list[Table]:
    """Everything the end of a run tells; claims from `judged`, effects from `attribution`."""
    ks = tables.spec.evaluation.k
    shown = [pass_at_k(tables, 1)] + [pass_at_k(tables, max(ks))] * (max(ks) > 1)
    if claims:
        shown.append(verdicts(claims))
    if not effects.empty:
        shown.append(attributed(tables.spec, effects))
    return [*shown, costs(tables)]


def judged(tables: Tables) -> list[analysis.ClaimResult]:
    """The verdict on each of the spec's claims."""
    return [analysis.judge(claim, tables.outcomes, tables.stages, tables.parents) for claim in tables.spec.claims]


def pass_at_k(tables: Tables, k: int) -> Table:
    """Strict pass@k with its interval, arms by bands."""
    rows = analysis.by_band(tables.outcomes, metric="strict", k=k)
    cells = {(row.arm, row.band): _span(row) for row in _rows(rows)}
    shared = set(rows.loc[rows["structures_shared"], "band"])
    spec = tables.spec
    seeds = len(spec.seeds)
    table = _table(f"Strict pass@{k}: every step right. {seeds} seed{'s' * (seeds > 1)}, 95% intervals.", "arm")
    for band, operations in spec.bands.items():
        plural = "s" * (operations != (1,))
        table.add_column(f"{band}{'*' * (band in shared)}\n{_list(operations)} operation{plural}")
    for arm in spec.arms:
        table.add_row(arm, *(cells[arm, band] for band in spec.bands))
    if shared:
        table.caption = "* too few structures to keep apart: structures shared between splits"
    return table


def verdicts(results: Sequence[analysis.ClaimResult]) -> Table:
    table = _table("Claims, written before the run", "claim", "expected", "estimate", "verdict", "why")
    for row in _rows(claims.table(results)):
        margin = "" if row.delta is None or pd.isna(row.delta) else f" ±{row.delta:g}"
        table.add_row(f"{row.claim}: {row.text}", f"{row.expect}{margin}", _span(row), row.verdict.upper(), row.reason)
    return table


def attributed(spec: Spec, rows: pd.DataFrame) -> Table:
    """Which stage gave what, in strict pass@1 on the probability scale; rows from `attribution`."""
    rows = rows[rows["scale"] == "probability"]
    table = _table("Attribution of strict pass@1 (Shapley as run; matched at equal FLOPs)", "", "effect", *spec.bands)
    for (kind, effect), group in rows.groupby(["kind", "effect"], sort=False):
        cells = {row.band: _span(row, signed=kind != "base") for row in _rows(group)}
        table.add_row(str(kind), str(effect), *(cells[band] for band in spec.bands))
    return table


def attribution(tables: Tables) -> tuple[pd.DataFrame, str]:
    """`analysis.attribute` with the arms that the spec names; or an empty table and why there is none."""
    asked = tables.spec.attribution
    if asked is None:
        return pd.DataFrame(), "the spec asks for none"
    try:
        rows = analysis.attribute(
            tables.outcomes,
            factors=asked.factors,
            arms=asked.arms,
            matched={str(role): arm for role, arm in asked.matched.items()},
            stages=tables.stages,
        )
    except ValueError as error:  # doses or FLOPs that turned out unequal
        return pd.DataFrame(), str(error)
    return rows, ""


def costs(tables: Tables) -> Table:
    """Tokens and FLOPs of every arm, of one repetition."""
    table = _table(
        "Compute of an arm with its ancestors, one seed",
        "arm", "stages", "trained tokens", "sampled tokens", "FLOPs", "time",
    )  # fmt: skip
    for row in _rows(compute.by_arm(tables.stages, tables.spec.arms)):
        table.add_row(
            row.arm,
            " → ".join(row.stages),
            quantity(row.tokens),
            quantity(row.sampled_tokens),
            quantity(row.flops),
            duration(row.wall_s),
        )
    return table


def plan(graph: Graph, store: Store) -> Table:
    """What a run would do: every node, whether the store has it, and its share of the work still to do."""
    sizes = work(graph)
    have = {key: store.has(shelf(node.kind), key) for key, node in graph.nodes.items()}
    rest = sum(size for key, size in sizes.items() if not have[key])
    todo = len(have) - sum(have.values())
    table = _table(f"{graph.spec.name}: {todo} of {len(have)} nodes to make in {store.root}", "kind", "node", "key")
    table.add_column("state")
    table.add_column("share of the work", justify="right")
    for key, node in graph.nodes.items():
        share = "" if have[key] else f"{sizes[key] / rest:.0%}"
        table.add_row(node.kind, node.label, key[:12], "in the store" if have[key] else "to make", share)
    return table


def records(table: pd.DataFrame) -> str:
    """A table as a JSON list of objects; what is missing is null."""
    return json.dumps([_plain(row) for row in table.to_dict("records")], indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def _rows(table: pd.DataFrame) -> Iterator[Any]:
    """Rows by attribute."""
    return iter(table.itertuples())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _span(row: Any, *, signed: bool = False) -> str:
    # z: what rounds to zero has no minus sign.
    form = "+z.2f" if signed else "z.2f"
    return f"{row.estimate:{form}} [{row.low:{form}}, {row.high:{form}}]"


def _list(operations: tuple[int, ...]) -> str:
    return ", ".join(map(str, operations))
