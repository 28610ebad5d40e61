"""Figures as files: PNG and PDF, and beside each the rows it was drawn from."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import FIGURES, style
from paper_figures.base import Tables

# Without dates, the same table gives the same bytes.
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def save_figures(directory: Path, tables: Tables, *, formats: tuple[str, ...] = ("png", "pdf")) -> list[Path]:
    """Every registered figure that has something to draw, in each format, with its source as NAME.csv. Returns the
    paths written."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, module in FIGURES.items():
        rows = module.table(tables)
        if rows.empty:
            continue
        chart = module.figure(rows)
        for suffix in formats:
            path = directory / f"{name}.{suffix}"
            with style.context():
                chart.savefig(path, metadata=UNDATED.get(suffix))
            written.append(path)
        source = directory / f"{name}.csv"
        rows.to_csv(source, index=False)
        written.append(source)
    return written


def svg_data(chart: Figure) -> str:
    """A figure as the address of an image (data:...) that carries all of it."""
    buffer = BytesIO()
    with style.context():
        chart.savefig(buffer, format="svg", metadata=UNDATED["svg"])
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
