"""Figures of papers and reports: each a pure function from a table, registered here."""

from paper_figures import (
    attribution,
    competence_map,
    operations_by_arm,
    passk_by_band,
    roles_by_operations,
    training_curves,
)
from paper_figures.base import FigureModule, Tables

FIGURES: dict[str, FigureModule] = {
    module.FIGURE.name: module.FIGURE
    for module in (passk_by_band, operations_by_arm, attribution, competence_map, training_curves, roles_by_operations)
}

__all__ = ["FIGURES", "FigureModule", "Tables"]
