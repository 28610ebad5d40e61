"""Two processes that train together are one process: gradients, data, counts; and they live and die together.

Every start of another rank costs the imports of a process: what can share one start does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import rank_ends
import rank_runs
import tiny
import torch
import torch.distributed as dist

from testbed import ranks, runtime, stopping, trainer
from testbed.config import RL, Train
from testbed.errors import UserError
from testbed.execute import Conduct, execute
from testbed.nodes import shelf
from testbed.ranks import RankLost, together
from testbed.saves import OtherClassError
from testbed.stopping import Stopped
from testbed.store import Artifact, Store

GRAPH, NODE = rank_runs.GRAPH, rank_runs.NODE
TWO = Conduct(devices=2, save_every=0.0)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # Another test's resource tracker may live on in this process.
    environment, before = dict(os.environ), psutil.Process().children()
    yield
    assert ranks.here() == (0, 1) and not dist.is_initialized()
    assert psutil.Process().children() == before
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    assert kept == {name: value for name, value in environment.items() if not name.startswith("PYTEST")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Made by one process."""
    store = Store(tmp_path_factory.mktemp("whole"))
    store.prepare()
    needed = [GRAPH.nodes[key] for key in GRAPH.corpora.values()]
    for node in [*needed, *(tiny.node(GRAPH, name) for name in rank_runs.STAGES)]:
        execute(node, store)
    return store


@pytest.fixture(scope="module")
def results(whole: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process and two did, in the folders `1` and `2`."""
    root = tmp_path_factory.mktemp("results")
    for size in (1, 2):
        (root / str(size)).mkdir()
        inputs = rank_runs.inputs_of(NODE, whole) | {"results": root / str(size), "store": whole.root}
        if size == 1:
            rank_runs.everything(NODE, inputs, root, None)  # type: ignore[arg-type]
        else:
            with together(2, "rank_runs:everything", NODE, inputs):
                rank_runs.everything(NODE, inputs, root, None)  # type: ignore[arg-type]
    return root


def arrays(results: Path, size: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(results / str(size) / f"{rank}.npz")) for rank in range(size)]


NEXT_TOKEN = [f"{weight} {parts}" for weight, parts in rank_runs.CASES]


@pytest.mark.parametrize("case", [*NEXT_TOKEN, "rl 0.0", "rl 0.1"])
def test_two_ranks_have_the_gradient_of_one_process(results: Path, case: str) -> None:
    (alone,), (first, second) = arrays(results, 1), arrays(results, 2)
    assert np.abs(alone[f"{case} gradient"]).max() > 1e-3
    np.testing.assert_allclose(first[f"{case} gradient"], alone[f"{case} gradient"], rtol=1e-6, atol=1e-6)
    assert np.array_equal(first[f"{case} gradient"], second[f"{case} gradient"])
    np.testing.assert_allclose([first[f"{case} loss"], second[f"{case} loss"]], alone[f"{case} loss"], rtol=1e-6)


@pytest.mark.parametrize("case", [*NEXT_TOKEN, "rl 0.0", "rl 0.1"])
def test_the_ranks_read_and_sample_what_one_process_does(results: Path, case: str) -> None:
    """The same rows in the same order: the noise of a sample is named by its problem's place in the whole batch."""
    (alone,), both = arrays(results, 1), arrays(results, 2)
    shares = [part[f"{case} rows"] for part in both]
    width = max(share.shape[1] for share in shares)
    joined = np.concatenate([np.pad(share, ((0, 0), (0, width - share.shape[1]))) for share in shares])
    assert min(len(share) for share in shares) > 0 and np.array_equal(joined, alone[f"{case} rows"])


@pytest.mark.parametrize("name", rank_runs.STAGES)
def test_a_stage_of_two_ranks_is_that_of_one(results: Path, whole: Store, name: str) -> None:
    (alone,), (first, second) = arrays(results, 1), arrays(results, 2)
    assert np.array_equal(first[name], second[name]), "the ranks hold the same bits"
    made = tiny.get(whole, tiny.node(GRAPH, name))
    assert np.array_equal(alone[name], weights(made)), "a guard: the runs of this test are those of the store"
    np.testing.assert_allclose(first[name], alone[name], rtol=0, atol=1e-5)
    summary = json.loads((results / "2" / name / "summary.json").read_text())
    assert summary["steps"] >= 4 and summary["devices"] == 2 and made.summary["devices"] == 1
    same_numbers(without_padding(summary), without_padding(made.summary))
    same_numbers(tiny.metrics(results / "2" / name), tiny.metrics(made.path))


def without_padding(summary: dict[str, Any]) -> dict[str, Any]:
    """How much is padded depends on which rows stand together, and is told as it was."""
    ledger = {
        activity: {name: value for name, value in work.items() if name in ("tokens", "flops_useful")}
        for activity, work in summary["ledger"].items()
    }
    return {name: value for name, value in summary.items() if name != "devices"} | {"ledger": ledger}


def same_numbers(found: Any, expected: Any) -> None:
    """Whole numbers equal, others to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            # The sampler's rounding errors are errors: their size is nobody's.
            if not name.endswith("sampler_gap"):
                same_numbers(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same_numbers(a, b)
    elif isinstance(expected, float) and expected != int(expected):
        # Norms and changes follow gradients, which are equal to 1e-6 of the largest.
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    else:
        assert found == expected


def weights(artifact: Artifact) -> np.ndarray:
    return runtime.flat(runtime.load_model(artifact.path)[0]).numpy()


# Stop, kill, go on ---------------------------------------------------------------------------------------------------


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Any) -> None:
    """Do something at the start of the n-th step from here on."""
    left = [number]
    real = trainer.phases.enter

    def enter(name: str) -> None:
        real(name)
        left[0] -= name == "step"
        if name == "step" and left[0] == 0:
            act()

    monkeypatch.setattr(trainer.phases, "enter", enter)


def with_inputs(whole: Store, root: Path) -> Store:
    store = Store(root, announce=lambda text: None)
    store.prepare()
    for key in NODE.parents.values():
        target = store.path(shelf(GRAPH.nodes[key].kind), key)
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(whole.path(shelf(GRAPH.nodes[key].kind), key))
    return store


PARTIAL = f"partial/stages-{NODE.key}"


@pytest.fixture(scope="module")
def stopped(whole: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store in which two ranks were asked to stop in the second step."""
    store = with_inputs(whole, tmp_path_factory.mktemp("stopped"))
    with pytest.MonkeyPatch.context() as patch, stopping.heeded():
        in_step(patch, 2, stopping.ask)
        with pytest.raises(Stopped):
            execute(NODE, store, conduct=TWO)
    return store.root


@pytest.fixture(scope="module")
def killed(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RankLost, float]:
    """The same, taken up and left again since rank 1 was killed in the fourth step; the error, and the seconds it
    took."""
    root = tmp_path_factory.mktemp("killed") / "store"
    shutil.copytree(stopped, root, symlinks=True)
    times: list[float] = []

    def kill() -> None:
        times.append(time.monotonic())
        (other,) = [child for child in psutil.Process().children() if "testbed.ranks" in " ".join(child.cmdline())]
        other.kill()

    with pytest.MonkeyPatch.context() as patch:
        in_step(patch, 2, kill)
        with pytest.raises(RankLost) as error:
            execute(NODE, Store(root, announce=lambda text: None), conduct=TWO)
    return root, error.value, time.monotonic() - times[0]


def test_a_stop_saves_and_another_number_of_devices_is_refused_or_goes_on_exactly(
    whole: Store, stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "store", symlinks=True)
    store = Store(tmp_path / "store", announce=lambda text: None)
    assert store.keys(PARTIAL) == ["000000001", "000000002"]
    with pytest.raises(OtherClassError, match=r"devices 2 there and 1 here.*--other-class"):
        execute(NODE, store)
    goes_on_exactly(execute(NODE, store, conduct=Conduct(other_class=True)), whole, [2])


def test_a_killed_rank_ends_the_others_in_seconds_and_is_named(killed: tuple[Path, RankLost, float]) -> None:
    root, error, seconds = killed
    assert str(error) == "The process of rank 1 of 2 was killed by SIGKILL, perhaps for want of memory."
    assert seconds < 5
    store = Store(root)
    assert store.keys(PARTIAL) == ["000000002", "000000003"] and not store.has("stages", NODE.key)


def test_what_was_stopped_and_killed_is_taken_up_to_the_same_bits(
    results: Path, killed: tuple[Path, RankLost, float]
) -> None:
    made = execute(NODE, Store(killed[0], announce=lambda text: None), conduct=TWO)
    assert made.manifest["numeric_class"]["devices"] == 2 and "crossed" not in made.manifest
    assert np.array_equal(weights(made), arrays(results, 2)[0]["pretrain"])
    assert tiny.metrics(made.path) == tiny.metrics(results / "2" / "pretrain")


def test_two_devices_go_on_exactly_from_the_state_of_one(whole: Store, tmp_path: Path) -> None:
    store = with_inputs(whole, tmp_path)
    with pytest.MonkeyPatch.context() as patch, stopping.heeded():
        in_step(patch, 3, stopping.ask)
        with pytest.raises(Stopped):
            execute(NODE, store)
    shutil.rmtree(store.root / "checkpoints")
    made = execute(NODE, store, conduct=dataclasses.replace(TWO, other_class=True))
    assert made.manifest["numeric_class"]["devices"] == 2
    goes_on_exactly(made, whole, [1])


def goes_on_exactly(made: Artifact, whole: Store, devices: list[int]) -> None:
    """Same documents in the same steps, and weights to rounding."""
    expected = tiny.get(whole, NODE)
    assert [one.get("devices", 1) for one in made.manifest["crossed"]] == devices
    np.testing.assert_allclose(weights(made), weights(expected), rtol=0, atol=1e-5)
    same_numbers(tiny.metrics(made.path), tiny.metrics(expected.path))


def test_the_error_told_is_that_of_the_rank_that_had_it() -> None:
    with (
        pytest.raises(FloatingPointError) as error,
        together(2, "rank_ends:fails", NODE, {}),
    ):
        start = time.monotonic()
        rank_ends.fails()
    assert time.monotonic() - start < 5
    assert str(error.value) == "the loss of rank 1 is nan"
    (note,) = error.value.__notes__
    assert note.startswith("On rank 1:\nTraceback") and "in fails" in note
    with pytest.raises(RuntimeError, match=r"^rank 0 has had enough$"), together(2, "rank_ends:ends", NODE, {}):
        rank_ends.ends()
    # Before it joined the others.
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), together(2, "no_such_module:run", NODE, {}):
        raise AssertionError


def test_no_rank_outlives_a_killed_leader() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", "import rank_ends; rank_ends.lead()"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )  # fmt: skip
    assert leader.stdout is not None
    try:
        other = psutil.Process(int(leader.stdout.readline()))
        assert other.is_running() and other.ppid() == leader.pid
    finally:
        leader.send_signal(signal.SIGKILL)
        leader.wait()
        leader.stdout.close()
    end = time.monotonic() + 5
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the other rank goes on without its leader"
        time.sleep(0.02)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_shared_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(config: Any) -> Any:
        return dataclasses.replace(NODE, config=config)

    train = Train(kind="pretrain", data="base", tokens=1, rows=6, accumulate=3)
    policy = RL(parent="p", band="b", steps=1, prompts=2)
    ranks.refuse(node(train), 2)
    ranks.refuse(node(policy), 2)
    both = dataclasses.replace(NODE, objectives={"rl": node(policy)})
    for refused in (node(dataclasses.replace(train, accumulate=4)), node(train), node(policy), both):
        size = 2 if refused.config == dataclasses.replace(train, accumulate=4) else 3
        with pytest.raises(UserError, match=f"cannot be shared by {size} devices"), together(size, "", refused, {}):
            raise AssertionError
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="has 1 GPUs, not 2"), together(2, "", NODE, {}):
        raise AssertionError
