"""What a kind of node makes does not change under an epoch that stays (see fingerprints.py)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import fingerprints
import numpy as np
import pytest
import torch

from testbed.graph import EPOCHS

GOLDEN: dict[str, Any] = json.loads(fingerprints.FILE.read_text(encoding="utf-8"))
# Between instruction sets and versions of torch the last bits differ, and no more.
TOLERANCE = 1e-4


def complaints(golden: dict[str, Any], found: dict[str, Any], epochs: dict[str, int], same_class: bool) -> list[str]:
    """What changed without its epoch, the cause before what follows from it; or that the file has to be renewed."""
    moved = [name for name in sorted({*golden["epochs"], *epochs}) if golden["epochs"].get(name) != epochs.get(name)]
    if moved:
        return [f"epochs of {', '.join(moved)} are not those of tests/golden: run `make golden`"]
    order = sorted(golden["fingerprints"], key=lambda name: (not name.startswith("task "), name != "corpus", name))
    out = []
    for name in dict.fromkeys([*order, *found]):
        before, after = golden["fingerprints"].get(name), found.get(name)
        if before is None or after is None:
            out.append(f"{name} is new or gone: run `make golden`")
        elif _differ(before, after, exact=same_class):
            whose = fingerprints.epoch_of(name)
            where = f"the `epoch` of the {whose}" if whose.startswith("task ") else f"EPOCHS[{whose!r}]"
            out.append(f"{name} changed, and its epoch is still {epochs[whose]}: raise {where}, then run `make golden`")
    return out


def _differ(before: dict[str, Any], after: dict[str, Any], *, exact: bool) -> bool:
    if exact or "projections" not in before:
        return before != after
    if before.get("words") != after.get("words") or len(before["projections"]) != len(after["projections"]):
        return True
    return not np.allclose(before["projections"], after["projections"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    yield fingerprints.fingerprints()
    torch.set_num_threads(threads)


def test_nothing_changed_without_its_epoch(found: dict[str, Any]) -> None:
    same = GOLDEN["made_on"] == fingerprints.here()
    assert complaints(GOLDEN, found, fingerprints.epochs(), same) == []


def test_every_kind_and_task_has_a_fingerprint(found: dict[str, Any]) -> None:
    assert {fingerprints.epoch_of(name) for name in found} == set(fingerprints.epochs())
    assert set(EPOCHS) < set(fingerprints.epochs())


def test_a_change_is_named(found: dict[str, Any]) -> None:
    epochs = GOLDEN["epochs"]
    for name in ("task arithmetic", "corpus", "rl kl, two updates", "evaluation"):
        golden = copy.deepcopy(GOLDEN)
        one = golden["fingerprints"][name]
        if "projections" in one:
            one["projections"][0] += 0.01
        one["sha256"] = "0" * 64
        for same in (True, False):
            (text,) = complaints(golden, GOLDEN["fingerprints"], epochs, same)
            assert text.startswith(
                f"{name} changed, and its epoch is still {epochs[fingerprints.epoch_of(name)]}: raise"
            )
    (text,) = complaints(GOLDEN, found, epochs | {"rl": 99}, True)
    assert text == "epochs of rl are not those of tests/golden: run `make golden`"


def test_last_bits_of_another_machine_are_no_change() -> None:
    golden = copy.deepcopy(GOLDEN)
    one = golden["fingerprints"]["rl"]
    one["sha256"], one["projections"][0] = "0" * 64, one["projections"][0] + 1e-6
    assert complaints(golden, GOLDEN["fingerprints"], GOLDEN["epochs"], False) == []
    assert len(complaints(golden, GOLDEN["fingerprints"], GOLDEN["epochs"], True)) == 1


RL = ("rl", "rl kl, two updates", "rl no std")
NEXT_TOKEN = ("pretrain", "pretrain muon", "midtrain", "sft")


@pytest.mark.parametrize(
    ("place", "change", "names"),
    [
        ("testbed.rl.group_advantages", lambda rewards, scale_by_std: rewards, {*RL, "parallel"}),
        ("testbed.optim.NEWTON_SCHULZ", (3.0, -4.0, 2.0), {"pretrain muon"}),
        (
            "synthetic_tasks.corpus.PackedLoader._plan",
            None,
            {*NEXT_TOKEN, "parallel"},
        ),
    ],
)
def test_a_changed_line_shows_in_the_kinds_it_is_in(
    place: str, change: Any, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code itself is changed, and the kinds that use it are named, no others."""
    if change is None:
        from synthetic_tasks.corpus import PackedLoader

        real = PackedLoader._plan
        change = lambda self, epoch: real(self, epoch + 1)  # noqa: E731
    monkeypatch.setattr(place, change)
    changed = {
        text.partition(" changed")[0]
        for text in complaints(GOLDEN, fingerprints.fingerprints(), GOLDEN["epochs"], False)
    }
    assert changed == names
