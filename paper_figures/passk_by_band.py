"""Strict pass@k against k: one panel a band, one line an arm."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.tables import by_band
from paper_figures import style
from paper_figures.base import FigureModule, Tables

CLAIM = (
    "Strict pass@k against the number of samples k, by band. A stage that only sharpens what the model could already "
    "do lifts the left end of a line; one that adds capability lifts the right end too."
)


def table(tables: Tables) -> pd.DataFrame:
    """One row an (arm, band, k), with the interval of strict pass@k."""
    return pd.concat([by_band(tables.outcomes, "strict", k, level=tables.level) for k in tables.ks], ignore_index=True)


def figure(rows: pd.DataFrame) -> Figure:
    bands = rows.drop_duplicates("band")
    arms, ks = style.order(rows, "arm"), sorted(rows["k"].unique())
    rows = rows.assign(doublings=np.log2(rows["k"]))
    columns = min(4, len(bands))
    lines = -(-len(bands) // columns)
    with style.context():
        chart = style.canvas(max(4.0, 2.5 * columns), 2.6 * lines + 0.5)
        grid = chart.subplots(lines, columns, squeeze=False, sharey=True)
        panels = bands[["band", "operations"]].itertuples(index=False)
        for axes, (band, operations) in zip(grid.flat, panels, strict=False):
            style.interval_lines(axes, rows[rows["band"] == band], names=arms, x="doublings")
            axes.set_xticks(np.log2(ks), [str(k) for k in ks])
            axes.set_xlabel("samples k")
            axes.set_title(f"{band} ({_count(operations)})")
            style.rate_axis(axes, "strict pass@k" if axes in grid[:, 0] else "")
        for axes in grid.flat[len(bands) :]:
            axes.set_visible(False)
        style.bottom_legend(chart, style.arm_handles(arms))
    return chart


def _count(operations: str) -> str:
    return f"{operations} operation" + ("" if operations == "1" else "s")


FIGURE = FigureModule(name="passk_by_band", claim=CLAIM, spec="quickstart", table=table, figure=figure)
