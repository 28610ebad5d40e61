"""Teacher-forced accuracy by token role: which part of a step an arm gets wrong."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.compute import arm_stages
from paper_figures import style
from paper_figures.base import FigureModule, Tables

CLAIM = (
    "Which part of a step is hard: accuracy on the gold trace by the role of the token, at the end of each arm's "
    "stage, mean over seeds. A look-up at the guessing level (dotted) means values are not bound to names at all."
)


def table(tables: Tables) -> pd.DataFrame:
    """arm, operations, role, accuracy (mean over seeds, by tokens within one) and guess, where it is known."""
    roles = last_roles(tables)
    if roles.empty:
        return roles
    keys = ["arm", "operations", "role"]
    guess = roles.groupby(keys, sort=False)["guess"].mean() if "guess" in roles.columns else None
    table = roles.groupby(keys, sort=False)["accuracy"].mean().reset_index()
    return table if guess is None else table.merge(guess.reset_index(), on=keys)


def last_roles(tables: Tables) -> pd.DataFrame:
    """The roles table at the last step of each arm's final stage, with a column `arm`."""
    roles = tables.roles
    if roles.empty:
        return roles
    if "arm" not in roles.columns:
        ends = pd.DataFrame(arm_stages(tables.outcomes).items(), columns=["arm", "stage"])
        roles = ends.merge(roles, on="stage")
    last = roles.groupby(["arm", "seed"])["step"].transform("max")
    return roles[(roles["step"] == last) & roles["accuracy"].notna()]


def figure(rows: pd.DataFrame) -> Figure:
    arms, roles = style.order(rows, "arm"), style.order(rows, "role")
    columns = min(4, len(roles))
    lines = -(-len(roles) // columns)
    ticks = sorted(rows["operations"].unique())
    guessed = "guess" in rows.columns and bool(rows["guess"].notna().any())
    with style.context():
        chart = style.canvas(max(4.0, 2.4 * columns), 2.1 * lines + 0.5)
        grid = chart.subplots(lines, columns, squeeze=False, sharey=True)
        for axes, role in zip(grid.flat, roles, strict=False):
            panel = rows[rows["role"] == role]
            for arm, look in style.looks(arms).items():
                line = panel[panel["arm"] == arm].sort_values("operations")
                axes.plot(line["operations"], line["accuracy"], label=arm, **look)
            if guessed and panel["guess"].notna().any():
                floor = panel.groupby("operations")["guess"].mean()
                axes.plot(floor.index, floor, color=style.GREY, linestyle=":", label="guess")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xlabel("operations")
            axes.set_title(role)
            style.rate_axis(axes, "accuracy" if axes in grid[:, 0] else "")
        for axes in grid.flat[len(roles) :]:
            axes.set_visible(False)
        guess = [Line2D([], [], color=style.GREY, linestyle=":", label="guess")] if guessed else []
        style.bottom_legend(chart, [*style.arm_handles(arms), *guess], columns=7)
    return chart


FIGURE = FigureModule(name="roles_by_operations", claim=CLAIM, spec="quickstart", table=table, figure=figure)
