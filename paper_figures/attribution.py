"""Who gave the gain: Shapley values by band as run, and apart from them the contrast at equal FLOPs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.base import FigureModule, Tables

CLAIM = (
    "What each stage gave. Left, as run: the Shapley values of the stages, which add up to the whole gain, and their "
    "interaction beside them. Right, a different question: the full recipe minus a placebo that spent the same FLOPs "
    "on pretraining. Above on the probability scale; below in logits, where ceilings do not fake interactions."
)
SCALES = {"probability": "change of rate", "logit": "change of logit"}


def table(tables: Tables) -> pd.DataFrame:
    """The effects of an attribution table that are drawn: shapley, interaction and matched."""
    if tables.attribution.empty:
        return tables.attribution
    return tables.attribution[tables.attribution["kind"].isin(["shapley", "interaction", "matched"])]


def figure(rows: pd.DataFrame) -> Figure:
    run, matched = (rows[(rows["kind"] == "matched") == is_matched] for is_matched in (False, True))
    bands, scales = style.order(rows, "band"), [scale for scale in SCALES if scale in set(rows["scale"])]
    metric, k = rows["metric"].iloc[0], rows["k"].iloc[0]
    columns = 1 if matched.empty else 2
    with style.context():
        chart = style.canvas(8.6 if columns > 1 else 5.6, 2.1 * len(scales) + 0.6)
        grid = chart.subplots(
            len(scales), columns, squeeze=False, sharex="col", sharey="row", width_ratios=[2.2, 1.0][:columns]
        )
        for line, scale in zip(grid, scales, strict=True):
            for axes, part in zip(line, (run, matched), strict=False):
                _bars(axes, part[part["scale"] == scale], bands)
            line[0].set_ylabel(f"{SCALES[scale]},\n{metric} pass@{k}")
        grid[0, 0].set_title("As run: Shapley values and interaction")
        if columns > 1:
            grid[0, 1].set_title("Equal FLOPs")
        style.bottom_legend(chart, [bars for axes in grid[0] for bars in axes.get_legend_handles_labels()[0]])
    return chart


def _bars(axes: Axes, rows: pd.DataFrame, bands: list[str]) -> None:
    effects = rows.drop_duplicates("effect")[["kind", "effect"]]
    width = 0.8 / len(effects)
    colours = iter(style.PALETTE)
    for number, (kind, effect) in enumerate(effects.itertuples(index=False)):
        cell = rows[rows["effect"] == effect].set_index("band").loc[bands]
        x = np.arange(len(bands)) + (number - (len(effects) - 1) / 2) * width
        look: dict[str, Any] = {
            "shapley": {"color": next(colours)},
            "interaction": {"color": "white", "edgecolor": style.GREY, "hatch": "////"},
            "matched": {"color": style.PALETTE[4]},
        }[kind]
        axes.bar(x, cell["estimate"], width * 0.9, label=effect, linewidth=0.8, **look)
        # A scale that saw nothing has no limits; its bar stands without whiskers.
        spread = np.abs(cell[["low", "high"]].to_numpy().T - cell["estimate"].to_numpy())
        axes.errorbar(x, cell["estimate"], spread, fmt="none", ecolor="#222222", elinewidth=1.1, capsize=2.5)
    axes.axhline(0, color="#444444", linewidth=0.8)
    axes.set_xticks(range(len(bands)), bands)
    axes.grid(visible=False, axis="x")


FIGURE = FigureModule(name="attribution", claim=CLAIM, spec="quickstart", table=table, figure=figure)
