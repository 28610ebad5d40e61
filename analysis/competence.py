"""The edge of competence: which difficulties an arm has solved, works at, and cannot reach."""

from __future__ import annotations

from typing import Any, Literal

import pandas as pd

from analysis.intervals import Interval, over_seeds
from analysis.tables import Metric, arms, bands, check_outcomes, independent, interval_columns, matrix

Competence = Literal["solved", "edge", "beyond", "undecided"]

# pass@1 whose lower limit reaches this is solved.
SOLVED = 0.9
# pass@k whose upper limit stays at or under this is beyond reach.
BEYOND = 0.05
# pass@k whose lower limit reaches this can be learnt from, if pass@1 is surely below SOLVED.
EDGE = 0.2


def classify(pass_1: Interval, pass_k: Interval) -> Competence:
    """Competence from the intervals of pass@1 and pass@k; undecided where they do not settle it.

    Where no sample of any problem is right, `beyond` still needs 73 problems at 95%: fewer leave room for more than
    0.05 of problems that can be solved.
    """
    if pass_1.low >= SOLVED:
        return "solved"
    if pass_k.high <= BEYOND:
        return "beyond"
    if pass_k.low >= EDGE and pass_1.high < SOLVED:
        return "edge"
    return "undecided"


def competence_map(outcomes: pd.DataFrame, *, k: int, metric: Metric = "strict", level: float = 0.95) -> pd.DataFrame:
    """One row an (arm, operations): arm, band, operations, competence, metric, k, temperature, and the intervals of
    pass@1 and pass@k as pass_1_estimate, pass_1_low, ... and pass_k_estimate, ... (t over seeds).

    Choose bands with it on validation problems; report it on test problems.
    """
    check_outcomes(outcomes)
    rows: list[dict[str, Any]] = []
    for arm in arms(outcomes):
        first, last = (
            independent(matrix(outcomes, arm=arm, metric=metric, k=each), outcomes, [arm]) for each in (1, k)
        )
        for band, members in bands(outcomes).items():
            for operations in members:
                cell = first.columns.get_level_values("operations") == operations
                pass_1, pass_k = (over_seeds(values.loc[:, cell].to_numpy(), level=level) for values in (first, last))
                rows.append(
                    {"arm": arm, "band": band, "operations": operations, "competence": classify(pass_1, pass_k)}
                    | {"metric": metric, "k": k, "temperature": float(outcomes["temperature"].iloc[0])}
                    | {f"pass_1_{name}": value for name, value in interval_columns(pass_1).items()}
                    | {f"pass_k_{name}": value for name, value in interval_columns(pass_k).items()}
                )
    return pd.DataFrame(rows)


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """One row an arm of a competence table: the operations that are solved, edge, beyond and undecided (tuples), and
    solved_to, the largest operations count up to which all are solved (0 where the easiest is not)."""
    rows = []
    for arm, cells in table.groupby("arm", sort=False):
        cells = cells.sort_values("operations")
        row: dict[str, object] = {"arm": arm}
        for name in ("solved", "edge", "beyond", "undecided"):
            row[name] = tuple(int(o) for o in cells.loc[cells["competence"] == name, "operations"])
        unbroken = cells.loc[(cells["competence"] == "solved").cummin(), "operations"]
        rows.append(row | {"solved_to": int(unbroken.max()) if len(unbroken) else 0})
    return pd.DataFrame(rows)
