"""The picture of a plan: every node once, nothing on top of anything else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.transforms import Bbox

from paper_figures import FIGURES
from paper_figures.stage_graph import KINDS, STATES, figure, table
from testbed.graph import EPOCHS
from testbed.planning import Plan, plan
from testbed.spec import load
from testbed.store import State, Store

ODD = [
    "stages.sum={kind: combine, of: {mid: 0.5, anneal@3: 0.5}}",
    "stages.anneal.schedule={shape: constant, decay: 0}",
    "stages.rl.edge={parent: stable, optimizer: reset, rate: restart}",
    "arms={pretrained: anneal, mid: mid, rl: rl, mid+rl: mid_rl, continued: continued, sum: sum}",
    "attribution=null",
    "claims=[]",
    "probes={moved: {measure: weights, of: [mid], against: pretrain@2}}",
]


def planned(*specs: str, changes: list[str] | None = None, store: Path = Path("none")) -> Plan:
    return plan([load(spec, changes or []) for spec in specs], Store(store), probe=False)


@pytest.mark.parametrize(("specs", "changes"), [(["quickstart"], []), (["smoke"], ODD), (["smoke", "quickstart"], [])])
def test_boxes_and_words_lie_apart(specs: list[str], changes: list[str]) -> None:
    rows = table(planned(*specs, changes=changes))
    chart = figure(rows)
    FigureCanvasAgg(chart).draw()
    (axes,) = chart.axes
    boxes = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    words = {text: text.get_window_extent() for text in axes.texts}
    assert len(boxes) == len(rows)
    assert not any(Bbox.intersection(one, other) for one, other in itertools.combinations(boxes, 2))
    assert not any(Bbox.intersection(one, other) for one, other in itertools.combinations(words.values(), 2))
    whole = chart.bbox
    for text, place in words.items():
        inside = [box for box in boxes if Bbox.intersection(box, place)]
        # A word is in one box and no wider than it, or it stands on an edge and in none.
        assert len(inside) == (0 if "\n" in text.get_text() else 1), text.get_text()
        assert all(box.x0 <= place.x0 and place.x1 <= box.x1 for box in inside), text.get_text()
        assert whole.x0 <= place.x0 and place.x1 <= whole.x1
    # Lines run between the boxes: every inner point of a corner lies in none.
    lines = [patch for patch in axes.patches if isinstance(patch, PathPatch)]
    assert len(lines) == sum(len(inputs) for inputs in rows["inputs"])
    for line in lines:
        points = line.get_path().interpolated(8).vertices
        drawn = axes.transData.transform(points)[1:-1]
        assert not any(box.padded(-3).contains(*point) for box in boxes for point in drawn)


def test_the_table_of_quickstart() -> None:
    rows = table(planned("quickstart")).set_index(["kind", "name"])
    assert len(rows) == 2 + 7 + 6 and not rows.index.duplicated().any()
    assert rows.loc[("pretrain", "anneal"), "crossing"] == "stable\ncarry\ncontinue"
    assert rows.loc[("rl", "mid_rl"), "crossing"] == "annealed\nreset\nrestart"
    assert rows.loc[("pretrain", "pretrain"), "crossing"] == "" and rows.loc[("rl", "rl"), "said"] == "1.1M tokens"
    assert set(rows.loc[("pretrain", "continued"), "inputs"]) == {"parent", "corpus", "match/mid", "match/mid_rl"}
    assert set(rows["state"]) == {"missing"}


def test_states_of_all_repetitions_count(tmp_path: Path) -> None:
    found, store = planned("smoke"), Store(tmp_path)
    keys = {(node.name, node.seed): node.key for node in found if node.kind != "evaluation"}
    for key in (keys["pretrain", 0], keys["anneal", 0], keys["anneal", 1]):
        with store.publish("stages", key) as draft:
            draft.manifest = {"summary": {}, "wall_s": 1.0}
    store.fail("stages", keys["mid", 1], label="mid", reason="No.", trace="")
    rows = table(planned("smoke", store=tmp_path)).set_index(["kind", "name"])
    assert rows.loc[("pretrain", "pretrain"), ["state", "said"]].tolist() == ["missing", "1 of 2 done"]
    assert rows.loc[("pretrain", "anneal"), "state"] == "done" and rows.loc[("midtrain", "mid"), "state"] == "failed"


def test_a_checkpoint_hangs_on_what_makes_it() -> None:
    rows = table(planned("smoke", changes=ODD)).set_index("name")
    pretrain = rows.loc["pretrain", "key"]
    assert rows.loc["pretrain@2", "inputs"] == {"maker": pretrain} and rows.loc["pretrain@2", "kind"] == "checkpoint"
    assert set(rows.loc["moved of mid", "inputs"]) == {"stage", "against"}


def test_every_kind_and_state_has_a_look_and_no_report_draws_it() -> None:
    assert set(KINDS) == {*EPOCHS, "checkpoint"} and set(STATES) == set(State.__args__)  # type: ignore[attr-defined]
    assert "stage_graph" not in FIGURES
    assert isinstance(table(planned("smoke")), pd.DataFrame)
