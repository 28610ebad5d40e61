"""Pass@k against difficulty: one line an arm, the bands shaded and named."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.tables import by_operations
from paper_figures import style
from paper_figures.base import FigureModule, Tables

CLAIM = (
    "How far each arm reaches: strict pass@1 and pass@k against the operations a problem needs, and the answers "
    "alone against the best guess. Where answers are right without a valid trace, the difference is guessing."
)


def table(tables: Tables) -> pd.DataFrame:
    """One row a (panel, arm, operations), with the interval, the guess floor (answers only) and whether the splits
    share structures. Panels: strict pass@1, strict pass@k at the largest k, answer pass@1."""
    panels = [("strict", 1), ("answer", 1)]
    if max(tables.ks) > 1:
        panels.insert(1, ("strict", max(tables.ks)))
    cells = [by_operations(tables.outcomes, metric, k, level=tables.level) for metric, k in panels]  # type: ignore[arg-type]
    rows = pd.concat(cells, ignore_index=True)
    floors = rows["operations"].map(dict(tables.floors)).astype(float)
    return rows.assign(guess_floor=floors.where(rows["metric"] == "answer"))


def figure(rows: pd.DataFrame) -> Figure:
    panels = rows[["metric", "k"]].drop_duplicates()
    arms = style.order(rows, "arm")
    places = {operations: place for place, operations in enumerate(sorted(rows["operations"].unique()))}
    rows = rows.assign(place=rows["operations"].map(places))
    shared = set(rows.loc[rows["structures_shared"], "operations"])
    with style.context():
        chart = style.canvas(3.4 * len(panels), 3.4)
        grid = chart.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (metric, k) in zip(grid, panels.itertuples(index=False), strict=True):
            panel = rows[(rows["metric"] == metric) & (rows["k"] == k)]
            _bands(axes, panel)
            style.interval_lines(axes, panel, names=arms, x="place")
            floor = panel.drop_duplicates("place").sort_values("place")
            if floor["guess_floor"].notna().any():
                axes.plot(floor["place"], floor["guess_floor"], color=style.GREY, linestyle=":", label="best guess")
            axes.set_xticks(list(places.values()), [f"{o}†" if o in shared else str(o) for o in places])
            axes.set_xlim(-0.5, len(places) - 0.5)
            axes.grid(visible=False, axis="x")
            axes.set_xlabel("operations" + (" († structures shared between splits)" if shared else ""))
            style.rate_axis(axes, "share of problems" if axes is grid[0] else "")
            axes.set_title(f"{metric} pass@{k}", pad=16)
        handles = style.arm_handles(arms)
        if rows["guess_floor"].notna().any():
            handles.append(Line2D([], [], color=style.GREY, linestyle=":", label="best guess"))
        style.bottom_legend(chart, handles, columns=7)
    return chart


def _bands(axes: Axes, panel: pd.DataFrame) -> None:
    """Shade every other band and name all above the panel."""
    spans = panel.groupby("band", sort=False)["place"].agg(["min", "max"]).sort_values("min")
    for number, (band, span) in enumerate(spans.iterrows()):
        left, right = span["min"] - 0.5, span["max"] + 0.5
        if number % 2:
            axes.axvspan(left, right, color="black", alpha=0.05, linewidth=0, zorder=0, label=f"band {band}")
        axes.annotate(
            str(band),
            ((left + right) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=style.GREY,
        )


FIGURE = FigureModule(name="operations_by_arm", claim=CLAIM, spec="quickstart", table=table, figure=figure)
