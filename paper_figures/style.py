"""One look for every figure: colours that colour-blind readers can tell apart, quiet axes, text that stays text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's palette, from the most to the least distinct on white, without its yellow; black last.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7A5230", "#000000")
# Lines differ in their marker too, for print without colour.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#6b6b6b"
# Share of the way to the next place over which the lines of one place are spread, so that their intervals stay apart.
SPREAD = 0.36

RC: Any = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.dpi": 100.0,
    "savefig.dpi": 200.0,
    # Text in a PDF can be searched and edited; ids in an SVG do not change from run to run.
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "paper_figures",
}


def context() -> AbstractContextManager[None]:
    """The style, for a `with` block; nothing outside it changes."""
    return mpl.rc_context(RC)


def canvas(width: float, height: float) -> Figure:
    """An empty figure (inches) outside pyplot's registry, so that it needs no display and is never leaked."""
    return Figure(figsize=(width, height), layout="constrained")


def order(table: pd.DataFrame, column: str) -> list[str]:
    """Names of a column in the order of the table."""
    return [str(name) for name in table[column].unique()]


def looks(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and marker by name, the same in every figure that names the same things in the same order."""
    return {
        name: {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(names)
    }


def interval_lines(axes: Axes, rows: pd.DataFrame, *, names: Sequence[str], x: str) -> None:
    """For every arm a line of `estimate` against x (places one apart) with its intervals, side by side."""
    rows = rows.sort_values(x)
    shifts = np.linspace(-SPREAD / 2, SPREAD / 2, len(names)) if len(names) > 1 else np.zeros(1)
    for shift, (name, look) in zip(shifts, looks(names).items(), strict=True):
        own = rows[rows["arm"] == name]
        places = own[x] + shift
        axes.plot(places, own["estimate"], label=name, color=look["color"], marker=look["marker"], zorder=3)
        axes.vlines(places, own["low"], own["high"], color=look["color"], linewidth=1.0, alpha=0.7, zorder=2)


def rate_axis(axes: Axes, label: str) -> None:
    """A vertical axis for a probability: the same limits in every panel and figure."""
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel(label)


def bottom_legend(figure: Figure, handles: Iterable[Any], *, columns: int = 6) -> None:
    """One legend for all panels, below them."""
    shown = list(handles)
    figure.legend(handles=shown, loc="outside lower center", ncols=max(1, min(columns, len(shown))))


def arm_handles(names: Sequence[str]) -> list[Line2D]:
    """Legend entries of arms."""
    return [
        Line2D([], [], label=name, color=look["color"], marker=look["marker"]) for name, look in looks(names).items()
    ]
