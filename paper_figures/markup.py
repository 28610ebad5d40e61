"""The few pieces of HTML a report is made of. Every text is escaped here, and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources


class Html(str):
    """Markup that is finished: not escaped again."""


@dataclass(frozen=True)
class Cell:
    """A table cell: text or markup, numbers to the right, optionally a bar of this share of its width behind it."""

    content: str
    number: bool = True
    share: float | None = None


def text(value: object) -> Html:
    """A value as escaped text; markup stays as it is."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def element(tag: str, *content: object, kind: str = "") -> Html:
    """<tag class=kind>content</tag>."""
    opening = f'{tag} class="{escape(kind)}"' if kind else tag
    return Html(f"<{opening}>{''.join(text(part) for part in content)}</{tag}>")


def section(title: str, *content: object) -> Html:
    return Html(element("h2", title) + "".join(text(part) for part in content))


def picture(source: str, caption: str, *, alt: str) -> Html:
    """An image (an address that carries its data) with its caption."""
    image = Html(f'<img src="{escape(source)}" alt="{escape(alt)}">')
    return element("figure", image, element("figcaption", caption))


def table(headers: Sequence[str], rows: Iterable[Sequence[Cell | str] | str]) -> Html:
    """A table; a row that is a single text is a heading of the rows below it. A column is right-aligned in its heading
    where its first cell is a number."""
    body = list(rows)
    first = next((row for row in body if not isinstance(row, str)), ())
    numeric = [isinstance(cell, Cell) and cell.number for cell in first]
    head = "".join(
        element("th", name, kind="number" if i < len(numeric) and numeric[i] else "") for i, name in enumerate(headers)
    )
    lines = [
        f'<tr class="group"><th colspan="{len(headers)}">{text(row)}</th></tr>'
        if isinstance(row, str)
        else f"<tr>{''.join(_cell(cell) for cell in row)}</tr>"
        for row in body
    ]
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return element("div", Html(whole), kind="scroll")


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return element("td", cell)
    kind = " ".join(name for name, on in (("number", cell.number), ("bar", cell.share is not None)) if on)
    share = "" if cell.share is None else f' style="--share: {100 * min(max(cell.share, 0.0), 1.0):.1f}%"'
    return f'<td class="{kind}"{share}>{text(cell.content)}</td>'


def definitions(pairs: Mapping[str, object]) -> Html:
    """Names and what they are; a mapping within is written on one line."""
    return element("dl", *(part for name, value in pairs.items() for part in _definition(name, value)))


def _definition(name: str, value: object) -> tuple[Html, Html]:
    return element("dt", name), element("dd", value if isinstance(value, Html) else _line(value))


def _line(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_line(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_line, value))
    return str(value)


def limits(estimate: float, low: float, high: float, *, signed: bool = False) -> Html:
    """An estimate with its limits, such as 0.31 (0.28 to 0.35); a scale without limits says so."""
    sign = "+" if signed else ""
    # Enough digits for the limits to look as different as they are.
    digits = next((d for d in (3, 4, 5) if f"{low:.{d}f}" != f"{high:.{d}f}"), 6)
    span = "no interval" if math.isnan(low) else f"{low:{sign}.{digits}f} to {high:{sign}.{digits}f}"
    return Html(minus(f'{estimate:{sign}.3f} <span class="limits">({span})</span>'))


def minus(words: str) -> str:
    """Words with the hyphens of negative numbers turned into minus signs."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", words)


def quantity(value: float) -> str:
    """A count for people: 950, 3.2M, 9.0 × 10^12."""
    if value >= 1e12:
        power = int(math.log10(value))
        return f"{value / 10**power:.1f} × 10{str(power).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def page(title: str, *content: object) -> str:
    """A whole document with its style inside: nothing is loaded from elsewhere."""
    css = resources.files("paper_figures").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n"
        f"<body><main>{''.join(text(part) for part in content)}</main></body></html>\n"
    )
