"""Tables for a terminal: results, claims, attribution, compute, and the plan of a run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

import analysis
from analysis import claims, compute
from testbed.planning import Plan, PlannedNode
from testbed.schema import Spec
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


def plan(planned: Plan, *, every: bool = False) -> list[Table]:
    """What a run would do: the nodes with their state and cost, and the totals.

    every: one row a node; else one for what differs by its repetition alone, with the numbers of one on average.
    """
    names, todo = " and ".join(planned.specs), len(planned.to_do)
    table = _table(f"{names}: {todo} of {len(planned)} nodes to make in {planned.store}", "kind", "node")
    table.caption = "tokens: trained; of a corpus, what it holds"
    table.add_column("seed" if every else "seeds", justify="right")
    for column in ("key", "from", "edge", "state"):
        table.add_column(column)
    for column in ("tokens", "sampled", "FLOPs", "params", "memory", "time"):
        table.add_column(column, justify="right")
    several = len(set(planned.specs)) > 1
    if several:
        table.add_column("for")
    for group in [[node] for node in planned] if every else _repetitions(planned):
        first = group[0]
        cells = [first.kind, first.name]
        cells.append("" if first.seed is None else str(first.seed if every else len(group)))
        cells += [first.key[:8] + "…" * (len(group) > 1), first.parent or "", _crossing(first.edge), _states(group)]
        for values, form in (
            ([node.tokens for node in group], quantity),
            ([node.sampled_tokens for node in group], quantity),
            ([node.flops for node in group], quantity),
            ([node.parameters for node in group], quantity),
            ([node.memory_bytes for node in group], lambda value: f"{quantity(value)}B"),
            ([node.seconds for node in group], duration),
        ):
            known = [value for value in values if value]
            cells.append(form(sum(known) / len(known)) if known else "")
        table.add_row(*cells, *([", ".join(first.specs)] if several else []))
    return [table, _plan_totals(planned)]


def failures(planned: Plan) -> list[str]:
    """Why nodes of a plan failed, a line each."""
    return [f"{node.label} failed: {node.reason}" for node in planned if node.reason]


def _repetitions(planned: Plan) -> list[list[PlannedNode]]:
    groups: dict[Any, list[PlannedNode]] = {}
    for node in planned:
        groups.setdefault((node.kind, node.name, node.parent, node.specs), []).append(node)
    return list(groups.values())


def _crossing(edge: dict[str, str] | None) -> str:
    """`stable, carry, continue`: how the parent was left, what becomes of the optimizer, and of the rate."""
    return "" if edge is None else ", ".join((edge["parent"], edge["optimizer"], edge["rate"]))


def _states(group: Sequence[PlannedNode]) -> str:
    counts = Counter(node.state for node in group)
    if len(counts) == 1:
        return group[0].state
    return "\n".join(f"{count} {state}" for state, count in counts.items())


def _plan_totals(planned: Plan) -> Table:
    table = _table("All nodes", "")
    workers = f"{planned.workers} worker{'s' * (planned.workers > 1)}"
    columns = ("nodes", "trained tokens", "sampled tokens", "FLOPs", "memory", "time of one worker", f"of {workers}")
    for column in columns:
        table.add_column(column, justify="right")
    names = {
        "to_do": "still to make",
        "shared": "everything, each node once",
        "alone": "every arm and seed by itself, nothing shared",
    }
    for key, name in names.items():
        total = planned.totals[key]
        table.add_row(
            name,
            str(total.nodes),
            quantity(total.tokens),
            quantity(total.sampled_tokens),
            quantity(total.flops),
            f"{quantity(total.memory_bytes)}B" if total.memory_bytes else "",
            "" if total.seconds is None else duration(total.seconds),
            "" if total.elapsed is None else duration(total.elapsed),
        )
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
