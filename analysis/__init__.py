"""Pure functions from arrays and tidy tables to numbers with intervals, and to tables."""

from analysis.attribution import attribute, interactions, shapley
from analysis.claims import Claim, ClaimResult, judge
from analysis.competence import classify, competence_map
from analysis.intervals import Interval, equivalence, over_seeds, over_seeds_and_problems, paired
from analysis.passk import pass_at_k
from analysis.tables import SCHEMAS, TableError, by_band, by_operations, check, check_outcomes, flat, results

__all__ = [
    "SCHEMAS",
    "Claim",
    "ClaimResult",
    "Interval",
    "TableError",
    "attribute",
    "by_band",
    "by_operations",
    "check",
    "check_outcomes",
    "classify",
    "competence_map",
    "equivalence",
    "flat",
    "interactions",
    "judge",
    "over_seeds",
    "over_seeds_and_problems",
    "paired",
    "pass_at_k",
    "results",
    "shapley",
]
