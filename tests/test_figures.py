"""Figures by what they draw (lines, labels, limits), and the report by what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tables as made_up
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from analysis import Claim, attribute, by_band, judge
from paper_figures import FIGURES, Tables, style
from paper_figures.markup import element, limits, quantity
from paper_figures.report import warnings, write_report
from paper_figures.save import save_figures, svg_data

ARMS = list(made_up.RATES)


@pytest.fixture(scope="module")
def tables() -> Tables:
    outcomes, stages = made_up.outcomes(seed_sd=0.15, problems=24), made_up.stages()
    attribution = attribute(
        outcomes,
        factors=("mid", "rl"),
        arms={"": "pretrained", "mid": "mid", "rl": "rl", "mid+rl": "mid+rl"},
        matched={"treated": "mid+rl", "placebo": "continued"},
        stages=stages,
    )
    return Tables(
        outcomes=outcomes,
        stages=stages,
        curves=made_up.curves(),
        roles=made_up.roles(),
        attribution=attribution,
        floors=made_up.GUESS,
        k=(1, 2, 4, 8),
    )


def draw(name: str, tables: Tables) -> tuple[pd.DataFrame, Figure]:
    rows = FIGURES[name].table(tables)
    return rows, FIGURES[name].figure(rows)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for shown in figure.legends for text in shown.get_texts()]


def line(axes: Axes, label: str) -> np.ndarray:
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(found.get_xydata())


def test_passk_by_band(tables: Tables) -> None:
    _, figure = draw("passk_by_band", tables)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "in range (1-4 operations)",
        "edge (5 operations)",
        "further (6 operations)",
        "far (8 operations)",
    ]
    assert legend(figure) == ARMS
    edge = figure.axes[1]
    assert edge.get_ylim() == (-0.03, 1.03)
    assert [tick.get_text() for tick in edge.get_xticklabels()] == ["1", "2", "4", "8"]
    bars = [bar for bar in edge.collections if isinstance(bar, LineCollection)]
    assert len(bars) == len(ARMS)
    for place, (arm, bar) in enumerate(zip(ARMS, bars, strict=True)):
        shift = style.SPREAD * (place / (len(ARMS) - 1) - 0.5)
        np.testing.assert_allclose(line(edge, arm)[:, 0], np.arange(4) + shift)
        for k, (_, drawn), segment in zip((1, 2, 4, 8), line(edge, arm), bar.get_segments(), strict=True):
            row = by_band(tables.outcomes, "strict", k).set_index(["arm", "band"]).loc[(arm, "edge")]
            assert drawn == pytest.approx(row["estimate"])
            assert segment[:, 1].tolist() == pytest.approx([row["low"], row["high"]])


def test_operations_by_arm(tables: Tables) -> None:
    rows, figure = draw("operations_by_arm", tables)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["strict pass@1", "strict pass@8", "answer pass@1"]
    assert legend(figure) == [*ARMS, "best guess"]
    for axes, (metric, k) in zip(figure.axes, [("strict", 1), ("strict", 8), ("answer", 1)], strict=True):
        cell = rows[(rows["metric"] == metric) & (rows["k"] == k) & (rows["arm"] == "rl")]
        np.testing.assert_allclose(line(axes, "rl")[:, 1], cell["estimate"])
        # Places are evenly spaced: 8 operations stand beside 6.
        np.testing.assert_allclose(np.diff(line(axes, "rl")[:, 0]), 1)
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1†", "2†", "3", "4", "5", "6", "8"]
        assert [note.get_text() for note in axes.texts] == list(made_up.BANDS)
        assert "structures shared" in axes.get_xlabel()
        spans = {patch.get_label(): (patch.get_x(), patch.get_width()) for patch in axes.patches}
        assert spans == {"band edge": (3.5, 1.0), "band far": (5.5, 1.0)}
    np.testing.assert_allclose(line(figure.axes[2], "best guess")[:, 1], list(made_up.GUESS.values()))
    assert all(shown.get_label() != "best guess" for shown in figure.axes[0].lines)


def test_operations_without_floors_or_shared_structures() -> None:
    outcomes = made_up.outcomes(problems=8, seeds=(0, 1)).assign(structures_shared=False)
    _, figure = draw("operations_by_arm", Tables(outcomes=outcomes, k=(1,)))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["strict pass@1", "answer pass@1"]
    assert legend(figure) == ARMS
    assert figure.axes[0].get_xlabel() == "operations"


def test_attribution(tables: Tables) -> None:
    rows, figure = draw("attribution", tables)
    run, matched = figure.axes[0], figure.axes[1]
    assert legend(figure) == ["mid", "rl", "mid × rl", "mid+rl − continued"]
    assert len(figure.axes) == 4 and len(matched.patches) == 4
    bars = [shown for shown in run.containers if isinstance(shown, BarContainer)]
    drawn = {str(shown.get_label()): [bar.get_height() for bar in shown] for shown in bars}
    for effect, heights in drawn.items():
        cell = rows[(rows["effect"] == effect) & (rows["scale"] == "probability")]
        np.testing.assert_allclose(heights, cell["estimate"])
    assert set(drawn) == {"mid", "rl", "mid × rl"}
    segments = run.collections[1].get_segments()  # type: ignore[attr-defined]
    cell = rows[(rows["effect"] == "rl") & (rows["scale"] == "probability")]
    np.testing.assert_allclose([segment[:, 1] for segment in segments], cell[["low", "high"]])
    assert "logit" in figure.axes[2].get_ylabel()
    only = tables.attribution[tables.attribution["kind"] != "matched"]
    assert len(draw("attribution", Tables(outcomes=tables.outcomes, attribution=only))[1].axes) == 2


def test_effects_without_limits_are_drawn_bare(tables: Tables) -> None:
    blind = tables.attribution.assign(low=float("nan"), high=float("nan"))
    _, figure = draw("attribution", Tables(outcomes=tables.outcomes, attribution=blind))
    svg_data(figure)
    assert len(figure.axes[0].patches) == 12


def test_competence_map(tables: Tables) -> None:
    rows, figure = draw("competence_map", tables)
    axes = figure.axes[0]
    assert len(axes.patches) == len(rows) == 42
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ARMS
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    row = rows[(rows["arm"] == "rl") & (rows["operations"] == 8)].iloc[0]
    assert cells[(6, 2)] == f"{row['pass_1_estimate']:.2f} / {row['pass_k_estimate']:.2f}"
    assert set(legend(figure)) == {"solved", "edge", "beyond", "undecided"}


def test_training_curves(tables: Tables) -> None:
    rows, figure = draw("training_curves", tables)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["pretrain", "mid", "continued", "rl_edge", "mid_rl", "rl_far"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss"] * 3 + ["reward"] * 3
    assert [len(axes.lines) for axes in figure.axes] == [4, 4, 4, 8, 8, 8]
    seed = rows[(rows["stage"] == "mid") & (rows["seed"] == 0)]
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), seed["value"])
    assert "loss" not in set(rows.loc[rows["stage"] == "rl_edge", "metric"])


def test_roles_by_operations(tables: Tables) -> None:
    rows, figure = draw("roles_by_operations", tables)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["lookup", "result", "next name", "end"]
    # The last step alone, mean over seeds.
    raw = tables.roles
    raw = raw[(raw["stage"] == "mid") & (raw["step"] == 400) & (raw["role"] == "result") & (raw["operations"] == 5)]
    assert dict(line(figure.axes[1], "mid"))[5] == pytest.approx(raw["accuracy"].mean())
    assert len(rows) == 6 * 7 * 4
    np.testing.assert_allclose(line(figure.axes[0], "guess")[0], (1, 0.5))


def test_every_figure_follows_the_style(tables: Tables) -> None:
    for name, module in FIGURES.items():
        assert len(module.claim) > 40 and module.spec == "quickstart" and module.name == name
        _, figure = draw(name, tables)
        for axes in figure.axes:
            assert not axes.spines["top"].get_visible() and not axes.spines["right"].get_visible()


def test_an_arm_keeps_its_colour() -> None:
    looks = style.looks(ARMS)
    assert len({look["color"] for look in looks.values()}) == len(ARMS)
    assert style.looks(ARMS[:3]) == {arm: looks[arm] for arm in ARMS[:3]}


def test_import_leaves_pyplot_and_settings_alone() -> None:
    # Reading the backend would itself load pyplot.
    code = """
import sys, matplotlib
settings = lambda: {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}
before = settings()
import paper_figures, paper_figures.report
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saved_figures_come_with_their_source(tables: Tables, tmp_path: Path) -> None:
    # Curves and roles are missing, so that their figures are left out.
    some = Tables(outcomes=tables.outcomes, attribution=tables.attribution, k=tables.k)
    paths = save_figures(tmp_path / "deep" / "figures", some, formats=("svg",))
    drawn = ("passk_by_band", "operations_by_arm", "attribution", "competence_map")
    assert [path.name for path in paths] == [f"{name}.{end}" for name in drawn for end in ("svg", "csv")]
    assert all(path.exists() for path in paths)
    source = pd.read_csv(tmp_path / "deep" / "figures" / "passk_by_band.csv")
    pd.testing.assert_series_equal(source["estimate"], FIGURES["passk_by_band"].table(some)["estimate"])


def test_files_hold_real_text_and_no_date(tables: Tables, tmp_path: Path) -> None:
    _, figure = draw("competence_map", tables)
    for name in ("one.pdf", "two.pdf"):
        with style.context():
            figure.savefig(tmp_path / name, metadata={"CreationDate": None})
    assert (tmp_path / "one.pdf").read_bytes() == (tmp_path / "two.pdf").read_bytes()
    assert b"/Type3" not in (tmp_path / "one.pdf").read_bytes()
    assert svg_data(figure) == svg_data(draw("competence_map", tables)[1])


# --- the report


class Outline(HTMLParser):
    """Headings, addresses and visible text; complains about tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def page(tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> str:
    claims = [
        judge(claim, tables.outcomes, tables.stages, made_up.PARENTS)
        for claim in (
            Claim(name="edge", text="RL at the edge <helps> & holds", arm="rl", band="further"),
            Claim(name="far", text="Far gives none", arm="rl far", band="further", expect="equivalent", delta=0.05),
        )
    ]
    path = write_report(
        tmp_path_factory.mktemp("report") / "deep" / "report.html",
        title="A <b>title</b>",
        spec_summary={"bands": made_up.BANDS, "task": "<script>alert(1)</script>"},
        outcomes=tables.outcomes,
        stages=tables.stages,
        curves=tables.curves,
        roles=tables.roles,
        claims=claims,
        attribution=tables.attribution,
        environment={"torch": "2.13.0"},
        floors=tables.floors,
        k=tables.k,
    )
    return path.read_text(encoding="utf-8")


def outline(page: str) -> Outline:
    parsed = Outline()
    parsed.feed(page)
    assert parsed.open == []
    return parsed


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", " ".join(outline(page).words))


def test_the_report_stands_alone(page: str) -> None:
    addresses = outline(page).addresses
    assert len(addresses) == len(FIGURES)
    assert all(address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert "<script" not in page and "http" not in re.sub(r'src="[^"]*"', "", page)


def test_the_report_escapes(page: str) -> None:
    assert "<b>title" not in page and "&lt;b&gt;title" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "RL at the edge &lt;helps&gt; &amp; holds" in page


def test_the_report_opens_with_the_answer(page: str, tables: Tables) -> None:
    words = words_of(page)
    rows = tables.attribution
    rows = rows[(rows["band"] == "further") & (rows["scale"] == "probability")].set_index(["kind", "effect"])
    rl = rows.loc[("shapley", "rl")]
    answer = words[: words.index("How far each arm gets")]
    assert f"rl gave {rl['estimate']:+.2f} ({rl['low']:+.2f} to {rl['high']:+.2f})" in answer
    assert "On the band “further” (6 operations)" in answer
    assert "1 shown, 1 no signal" in answer
    assert "Expected no gain (margin ±0.05): gain of rl far" in answer
    assert "none of its 2560 groups" in answer


def test_the_report_holds_every_part(page: str, tables: Tables) -> None:
    words = words_of(page)
    for part in (
        "Which stage gave what",
        "Every arm in every band",
        "The edge of competence",
        "What it cost",
        "How the stages trained",
        "Which tokens are hard",
        "How the intervals were made",
        "t over seeds",
        "pretrain → mid → mid_rl",
        "9.0 × 10¹²",
        "edge (5 operations; best guess of an answer 0.22)",
        "in range: 1, 2, 3, 4; edge: 5",
        "torch 2.13.0",
        "mid_rl-3",
    ):
        assert part in words
    row = by_band(tables.outcomes, "answer", 8).set_index(["arm", "band"]).loc[("mid", "edge")]
    assert f"{row['estimate']:.3f} ({row['low']:.3f} to {row['high']:.3f})" in words


def test_warnings(tables: Tables) -> None:
    found = warnings(tables)
    assert [words.partition(":")[0] for words in found[:2]] == ["Structures shared", "No signal"]
    assert "at 1 and 2 operations" in found[0] and "rl_far none of 2560" in found[1]
    assert "Look-ups of continued" in found[2]
    share = tables.outcomes.groupby(["arm", "operations"])["truncated"].mean().max() / 16
    assert found[3].startswith(f"Truncated: up to {share:.0%} of the samples")
    quiet = Tables(
        outcomes=tables.outcomes.assign(structures_shared=False, truncated=0), stages=made_up.stages(far_signal=1)
    )
    assert warnings(quiet) == []
    poor = tables.outcomes[tables.outcomes["seed"] < 2].assign(structures_shared=False, truncated=0)
    assert [words.partition(":")[0] for words in warnings(Tables(outcomes=poor, k=(1, 16)))] == ["Seeds", "Samples"]


def test_a_report_of_little(tables: Tables, tmp_path: Path) -> None:
    empty = pd.DataFrame()
    path = write_report(
        tmp_path / "report.html",
        title="little",
        spec_summary="one arm",
        outcomes=tables.outcomes[(tables.outcomes["arm"] == "mid") & (tables.outcomes["seed"] == 0)],
        stages=empty,
        curves=empty,
        roles=empty,
        claims=[],
        attribution=empty,
        environment={},
        k=(1,),
    )
    words = words_of(path.read_text(encoding="utf-8"))
    assert "How the stages trained" not in words and "Which stage gave what" not in words
    assert "best guess of an answer unknown" in words and "one seed" in words


def test_markup() -> None:
    assert element("p", "a < b", element("b", "&")) == "<p>a &lt; b<b>&amp;</b></p>"
    assert "−0.100" in limits(0.1, -0.1, 0.2) and "+0.100" in limits(0.1, 0.0, 0.2, signed=True)
    assert "no interval" in limits(0.0, float("nan"), float("nan"))
    assert "0.9998 to 1.0000" in limits(1.0, 0.9998, 1.0)
    assert [quantity(x) for x in (0, 950, 3_200, 4.5e6, 2e9, 9e12)] == [
        "0",
        "950",
        "3.2k",
        "4.5M",
        "2.0G",
        "9.0 × 10¹²",
    ]
