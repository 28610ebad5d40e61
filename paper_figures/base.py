"""What a figure is: its claim in words, the spec that feeds it, its source table, and a pure function to draw it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd
from matplotlib.figure import Figure

from analysis.tables import default_k


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What an experiment left behind, as far as figures and reports read it. A table that is missing is empty."""

    outcomes: pd.DataFrame
    stages: pd.DataFrame = field(default_factory=pd.DataFrame)
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    roles: pd.DataFrame = field(default_factory=pd.DataFrame)
    # From analysis.attribute.
    attribution: pd.DataFrame = field(default_factory=pd.DataFrame)
    # Answer-only pass@1 of the best guess, by operations.
    floors: Mapping[int, float] = field(default_factory=dict)
    # The k of pass@k; empty means powers of two up to half the samples.
    k: tuple[int, ...] = ()
    # Nominal coverage of the intervals.
    level: float = 0.95

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(sorted({1, *(self.k or default_k(self.outcomes))}))


@dataclass(frozen=True, kw_only=True)
class FigureModule:
    """One figure. `table` makes the rows that are drawn (and saved beside the figure), or an empty table where the
    experiment has nothing to draw; `figure` draws them and reads nothing else."""

    name: str
    claim: str
    # Built-in spec whose run feeds the figure.
    spec: str
    table: Callable[[Tables], pd.DataFrame]
    figure: Callable[[pd.DataFrame], Figure]
