"""One look for every figure: colours that colour-blind readers can tell apart, quiet axes, text that stays text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
# Opacity of an interval around a line.
BAND_ALPHA = 0.15

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


def interval_line(axes: Axes, rows: pd.DataFrame, *, x: str, label: str, look: Mapping[str, str]) -> None:
    """A line of `estimate` against x with its interval shaded."""
    rows = rows.sort_values(x)
    axes.plot(rows[x], rows["estimate"], label=label, color=look["color"], marker=look["marker"], zorder=3)
    axes.fill_between(rows[x], rows["low"], rows["high"], color=look["color"], alpha=BAND_ALPHA, linewidth=0)


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
