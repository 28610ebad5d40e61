"""The stage graph of a plan: what is made of what, what crosses every edge, and how far the work is.

It draws a plan and no results, so it is not among the figures of a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path

from paper_figures import style
from testbed.nodes import is_corpus
from testbed.planning import Plan, PlannedNode
from testbed.tracking import quantity

# Colours by kind, and outlines by state: colour, width and dashes.
KINDS = {
    "corpus": "#d9d9d9",
    "pretrain": "#9ecae8",
    "midtrain": "#f5c66b",
    "sft": "#e8b3d0",
    "rl": "#7fd0b4",
    "combine": "#c9b59c",
    "parallel": "#e9a27a",
    "checkpoint": "#cfe5f4",
    "evaluation": "#ffffff",
    "probe": "#f4f4f4",
}
STATES: dict[str, tuple[str, float, Any]] = {
    "done": ("#222222", 1.8, "-"),
    "running": ("#0072B2", 2.2, "-"),
    "failed": ("#C4001A", 2.2, "-"),
    "partial": ("#222222", 1.2, "-."),
    "missing": ("#888888", 1.0, (0, (3, 2))),
}
# Of edges that lend documents or a budget, not weights.
QUIET = "#b0b0b0"
# Of several repetitions the first of these that any is in is shown.
FIRST = ("failed", "running", "partial", "missing", "done")
# Inches between columns and lanes, and of a box.
COLUMN, LANE, WIDE, HIGH = 2.2, 0.6, 1.2, 0.44


def table(plan: Plan) -> pd.DataFrame:
    """One row a node of the first repetition of every spec: key, kind, name, `said` (its second line), `state` over all
    repetitions, `inputs` (keys by role, those drawn) and `crossing` (the text on the edge from its parent)."""
    first: dict[str, int] = {}
    for node in plan:
        for spec in node.specs:
            if node.seed is not None:
                first.setdefault(spec, node.seed)
    drawn = [node for node in plan if node.seed is None or any(first[spec] == node.seed for spec in node.specs)]
    keys = {node.key for node in drawn}
    rows = []
    for node in drawn:
        inputs = {role: key for role, key in node.inputs.items() if key in keys}
        if node.maker in keys:
            # It is made by a stage on its way: what that one reads is drawn there.
            inputs = {"maker": str(node.maker)}
        same = [one.state for one in plan if _repeats(one, node)]
        rows.append(
            {
                "key": node.key,
                "kind": node.kind,
                "name": node.name,
                "said": _said(node, same),
                "state": min(same, key=FIRST.index),
                "inputs": inputs,
                "crossing": "\n".join(node.edge[part] for part in ("parent", "optimizer", "rate")) if node.edge else "",
            }
        )
    return pd.DataFrame(rows)


def figure(rows: pd.DataFrame) -> Figure:
    """Boxes in columns by depth; the children of a stage in lanes beside each other, so that no two edges cross but
    those from corpora and budgets, which are grey."""
    nodes = rows.set_index("key")
    column, lane = _columns(nodes), _lanes(nodes)
    height = max(lane.values()) - min(lane.values()) + 1
    with style.context():
        chart = style.canvas(COLUMN * max(column.values()) + WIDE + 0.4, LANE * height + 0.75)
        axes = chart.subplots()
        place = {key: (COLUMN * column[key], -LANE * lane[key]) for key in nodes.index}
        for key, node in nodes.iterrows():
            for role, source in node["inputs"].items():
                _edge(axes, place[source], place[str(key)], _carries(role))
                if role == "parent" and node["crossing"]:
                    _crossing(axes, place[source], place[str(key)], node["crossing"])
            _box(axes, place[str(key)], node)
        xs, ys = zip(*place.values(), strict=True)
        axes.set_xlim(min(xs) - WIDE / 2 - 0.1, max(xs) + WIDE / 2 + 0.1)
        axes.set_ylim(min(ys) - LANE / 2, max(ys) + LANE / 2)
        axes.set_aspect("equal")
        axes.set_axis_off()
        _legend(chart, nodes)
    return chart


def _repeats(one: PlannedNode, other: PlannedNode) -> bool:
    return (one.kind, one.name) == (other.kind, other.name) and not set(one.specs).isdisjoint(other.specs)


def _carries(role: str) -> str:
    """What an input of that role lends: `weights`, `documents` or a `budget`."""
    if role.startswith("match/"):
        return "budget"
    return "documents" if is_corpus(role) else "weights"


def _said(node: PlannedNode, states: Sequence[str]) -> str:
    """Its second line: tokens, and how many repetitions are done where it is some of them."""
    tokens = f"{quantity(node.tokens)} tokens" if node.tokens else ""
    if not tokens and node.sampled_tokens:
        tokens = f"{quantity(node.sampled_tokens)} sampled"
    done = states.count("done")
    some = f"{done} of {len(states)} done" if 0 < done < len(states) else ""
    return ", ".join(filter(None, (tokens, some)))


def _columns(nodes: pd.DataFrame) -> dict[str, int]:
    """Steps from the roots; inputs come first in the table."""
    found: dict[str, int] = {}
    for key, inputs in nodes["inputs"].items():
        found[str(key)] = max((found[source] + 1 for source in inputs.values() if source in found), default=0)
    return found


def _lanes(nodes: pd.DataFrame) -> dict[str, float]:
    """Every leaf of the tree of weights has a lane, and what has children stands in the middle of them; corpora
    stand outside the tree."""
    stem: dict[str, str] = {}
    for key, node in nodes.iterrows():
        sources = [source for role, source in node["inputs"].items() if _carries(role) == "weights"]
        if sources:
            stem[str(key)] = sources[0]
    lanes: dict[str, float] = {}
    leaves = 0

    def put(key: str) -> None:
        nonlocal leaves
        children = [child for child, parent in stem.items() if parent == key]
        # What ends at once comes first.
        for child in sorted(children, key=lambda child: child in stem.values()):
            put(child)
        if children:
            lanes[key] = sum(lanes[child] for child in children) / len(children)
        else:
            lanes[key] = float(leaves)
            leaves += 1

    outside = [str(key) for key in nodes.index[nodes["kind"] == "corpus"]]
    for key in map(str, nodes.index):
        if key not in stem and key not in outside:
            put(key)
    # Above the tree, where no box is in the way of their lines.
    return lanes | {corpus: float(place - len(outside)) for place, corpus in enumerate(outside)}


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    """From the right of one box to the left of another. Bends lie between columns, so that no line runs behind a box:
    weights and budgets go over to the lane of the end at once, documents in the last gap."""
    left, right = start[0] + WIDE / 2, end[0] - WIDE / 2
    # Side by side where they arrive.
    level = end[1] + {"weights": 0.0, "documents": 0.14, "budget": -0.14}[kind]
    gap = COLUMN - WIDE
    begin, until = (max(left, right - gap), right) if kind == "documents" else (left, min(right, left + gap))
    middle = (begin + until) / 2
    points = [(left, start[1]), (begin, start[1]), (middle, start[1]), (middle, level), (until, level), (right, level)]
    codes = [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO]
    axes.add_patch(
        PathPatch(
            Path(points, codes),
            facecolor="none",
            edgecolor="#444444" if kind == "weights" else QUIET,
            linewidth=1.2 if kind == "weights" else 0.8,
            linestyle="--" if kind == "budget" else "-",
            zorder=2 if kind == "weights" else 1,
        )
    )


def _crossing(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """What crosses, at the end of the edge, where edges of one parent have parted."""
    axes.text(
        end[0] - WIDE / 2 - 0.06, end[1], text, ha="right", va="center", fontsize=5.8, linespacing=1.1, color="#333333",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=3,
    )  # fmt: skip


def _box(axes: Axes, place: tuple[float, float], node: pd.Series) -> None:
    x, y = place
    colour, width, dashes = STATES[node["state"]]
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDE / 2 + 0.04, y - HIGH / 2 + 0.04), WIDE - 0.08, HIGH - 0.08, boxstyle="round,pad=0.04",
            facecolor=KINDS[node["kind"]], edgecolor=colour, linewidth=width, linestyle=dashes, zorder=4,
        )
    )  # fmt: skip
    two = bool(node["said"])
    name = node["name"] if len(node["name"]) <= 20 else f"{node['name'][:19]}…"
    axes.text(x, y + 0.08 * two, name, ha="center", va="center", fontsize=7.5, fontweight="bold", zorder=5)
    if two:
        axes.text(x, y - 0.1, node["said"], ha="center", va="center", fontsize=6.5, zorder=5)


def _legend(chart: Figure, nodes: pd.DataFrame) -> None:
    def present(known: Iterable[str], column: str) -> list[str]:
        return [name for name in known if name in set(nodes[column])]

    kinds = [Patch(facecolor=KINDS[kind], edgecolor="#888888", label=kind) for kind in present(KINDS, "kind")]
    states = [
        Line2D([], [], color=STATES[state][0], linewidth=STATES[state][1], linestyle=STATES[state][2], label=state)
        for state in present(STATES, "state")
    ]
    lent = {_carries(role) for inputs in nodes["inputs"] for role in inputs}
    lines = []
    if "documents" in lent:
        lines.append(Line2D([], [], color=QUIET, linewidth=0.8, label="documents"))
    if "budget" in lent:
        lines.append(Line2D([], [], color=QUIET, linewidth=0.8, linestyle="--", label="FLOPs to match"))
    style.bottom_legend(chart, [*kinds, *states, *lines], columns=9)
