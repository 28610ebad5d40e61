"""The edge of competence: arm by operations, each cell solved, edge, beyond or undecided."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from analysis.competence import competence_map
from paper_figures import style
from paper_figures.base import FigureModule, Tables

CLAIM = (
    "The edge of competence. Solved: pass@1 is surely at least 0.9. Edge: pass@k is surely at least 0.2 and pass@1 "
    "below 0.9, so there is something to reinforce. Beyond: pass@k is surely at most 0.05. Each cell shows pass@1 and "
    "pass@k."
)
COLOURS = {"solved": "#0072B2", "edge": "#F0B95B", "beyond": "#8f8f8f", "undecided": "#f2f2f2"}


def table(tables: Tables) -> pd.DataFrame:
    """The competence map at the largest k."""
    return competence_map(tables.outcomes, k=max(tables.ks), level=tables.level)


def figure(rows: pd.DataFrame) -> Figure:
    arms, operations = style.order(rows, "arm"), sorted(rows["operations"].unique())
    with style.context():
        chart = style.canvas(1.6 + 0.85 * len(operations), 0.9 + 0.46 * len(arms))
        axes = chart.subplots()
        for cell in rows.to_dict("records"):
            x, y, name = operations.index(cell["operations"]), arms.index(cell["arm"]), cell["competence"]
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=COLOURS[name], linewidth=0))
            axes.text(
                x,
                y,
                f"{cell['pass_1_estimate']:.2f} / {cell['pass_k_estimate']:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if name == "solved" else "black",
            )
        axes.set_xlim(-0.5, len(operations) - 0.5)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        names = rows.drop_duplicates("operations").set_index("operations")["band"]
        axes.set_xticks(range(len(operations)), [f"{o}\n{names[o]}" for o in operations])
        axes.set_yticks(range(len(arms)), arms)
        axes.set_xlabel("operations")
        axes.set_title(f"strict pass@1 / pass@{rows['k'].iloc[0]}, temperature {rows['temperature'].iloc[0]:g}")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        handles = [Patch(facecolor=colour, label=name) for name, colour in COLOURS.items()]
        chart.legend(handles=handles, loc="outside lower center", ncols=4)
    return chart


FIGURE = FigureModule(name="competence_map", claim=CLAIM, spec="quickstart", table=table, figure=figure)
