"""How every stage trained: loss of the trained stages, reward and signal of the RL stages, seed by seed."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.compute import base_of
from paper_figures import style
from paper_figures.base import FigureModule, Tables

CLAIM = (
    "How the stages trained, one line a seed: the loss, or for RL the mean reward of a batch and, dotted, the share of "
    "its groups whose samples differ in reward (without signal nothing is learnt)."
)
METRICS = ("loss", "reward", "signal_share")


def table(tables: Tables) -> pd.DataFrame:
    """stage, seed, step, metric, value: the drawn metrics in long form."""
    curves = tables.curves
    metrics = [metric for metric in METRICS if metric in curves.columns]
    if curves.empty or not metrics:
        return pd.DataFrame()
    # A checkpoint's curve is the beginning of its stage's.
    stages = set(curves["stage"])
    curves = curves[[base_of(stage) == stage or base_of(stage) not in stages for stage in curves["stage"]]]
    long = curves.melt(["stage", "seed", "step"], metrics, var_name="metric", value_name="value").dropna(subset="value")
    # RL logs a loss too, which is no measure of progress.
    rewarded = set(long.loc[long["metric"] == "reward", "stage"])
    return long[~((long["metric"] == "loss") & long["stage"].isin(rewarded))].reset_index(drop=True)


def figure(rows: pd.DataFrame) -> Figure:
    stages = style.order(rows, "stage")
    stages.sort(key=lambda stage: "reward" in set(rows.loc[rows["stage"] == stage, "metric"]))
    columns = min(3, len(stages))
    lines = -(-len(stages) // columns)
    seeds = sorted(rows["seed"].unique())
    colours = {seed: style.PALETTE[i % len(style.PALETTE)] for i, seed in enumerate(seeds)}
    with style.context():
        chart = style.canvas(max(4.0, 3.0 * columns), 2.0 * lines + 0.5)
        grid = chart.subplots(lines, columns, squeeze=False)
        for axes, stage in zip(grid.flat, stages, strict=False):
            mine = rows[rows["stage"] == stage]
            for (metric, seed), line in mine.groupby(["metric", "seed"], sort=False):
                dotted = ":" if metric == "signal_share" else "-"
                axes.plot(line["step"], line["value"], color=colours[seed], linestyle=dotted, linewidth=1.1)
            _label(axes, stage, set(mine["metric"]))
        for axes in grid.flat[len(stages) :]:
            axes.set_visible(False)
        handles = [Line2D([], [], color=colour, label=f"seed {seed}") for seed, colour in colours.items()]
        if "signal_share" in set(rows["metric"]):
            handles.append(Line2D([], [], color=style.GREY, linestyle=":", label="groups with signal"))
        style.bottom_legend(chart, handles)
    return chart


def _label(axes: Axes, stage: str, metrics: set[str]) -> None:
    axes.set_title(stage)
    axes.set_xlabel("step")
    if "reward" in metrics:
        style.rate_axis(axes, "reward")
    else:
        axes.set_ylabel("loss")


FIGURE = FigureModule(name="training_curves", claim=CLAIM, spec="quickstart", table=table, figure=figure)
