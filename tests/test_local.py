"""The local launcher: order, reuse, failures that take only their own along, and workers that die."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_runners
import pytest

from sweeps.local import Event, Outcome, run_graph
from testbed.errors import StoreError
from testbed.graph import Graph, build
from testbed.nodes import shelf
from testbed.spec import load
from testbed.store import Store

FAKES = fake_runners.RUNNERS


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", announce=lambda text: None)


def smoke(*changes: str) -> Graph:
    return build(load("smoke", changes))


def contents(store: Store) -> dict[str, bytes]:
    """Every published file but the manifests, which hold times."""
    files = [p for p in store.root.rglob("*") if p.is_file() and p.name not in ("manifest.json", "metrics.jsonl")]
    return {str(p.relative_to(store.root)): p.read_bytes() for p in files}


def run(
    graph: Graph, store: Store, workers: int, *, retry: bool = False, **changes: str
) -> tuple[Outcome, list[Event]]:
    events: list[Event] = []
    runners = {**FAKES, **changes}
    return run_graph(graph, store, workers=workers, on_event=events.append, runners=runners, retry=retry), events


def leases(store: Store) -> list[Path]:
    """Those that somebody holds; the guard that all share stays."""
    return list((store.root / "leases").glob("*.json"))


@pytest.mark.parametrize("workers", [1, 3])
def test_every_node_is_made_after_its_inputs_and_then_reused(store: Store, workers: int) -> None:
    graph = smoke()
    outcome, events = run(graph, store, workers)
    assert outcome.ok and set(outcome.made) == set(graph.nodes) and len(outcome.made) == len(graph.nodes)
    place = {key: i for i, key in enumerate(outcome.made)}
    assert all(place[parent] < place[key] for key, node in graph.nodes.items() for parent in node.parents.values())
    kinds = [event.kind for event in events]
    assert kinds.count("started") == kinds.count("done") == len(graph.nodes)
    assert any("│ pretrain, seed 0  1/2  loss 1" in event.line for event in events if event.kind == "progress")
    manifest = store.get("stages", graph.stages["mid", 0]).manifest  # type: ignore[union-attr]
    assert manifest["fields"] == graph.nodes[graph.stages["mid", 0]].fields
    assert manifest["inputs"]["parent"] == graph.stages["pretrain", 0] and manifest["summary"]["flops"] == 1e6

    again, events = run(graph, store, workers, rl="fake_runners:failing_rl")
    assert again.ok and not again.made and set(again.reused) == set(graph.nodes)
    assert {event.kind for event in events} == {"reused"}


def test_workers_do_not_change_what_is_made(tmp_path: Path) -> None:
    stores = [Store(tmp_path / str(workers)) for workers in (1, 3)]
    for store, workers in zip(stores, (1, 3), strict=True):
        assert run(smoke(), store, workers)[0].ok
    assert contents(stores[0]) == contents(stores[1]) != {}


def test_the_longest_chain_goes_first(store: Store) -> None:
    """Before any evaluation of seed 0, and before the short arms, come the stages that the placebo waits for."""
    graph = smoke("seeds=[0]", "stages.mid.tokens=9000")
    outcome, _ = run(graph, store, 1)
    names = [graph.nodes[key].name for key in outcome.made if shelf(graph.nodes[key].kind) == "stages"]
    assert names[:4] == ["pretrain", "mid", "mid_rl", "continued"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_takes_its_dependents_and_nothing_else(store: Store, workers: int) -> None:
    graph = smoke()
    outcome, events = run(graph, store, workers, rl="fake_runners:failing_rl")
    assert not outcome.ok
    assert {graph.nodes[key].name for key in outcome.failed} == {"rl", "mid_rl"} and len(outcome.failed) == 4
    skipped = {(graph.nodes[key].kind, graph.nodes[key].name) for key in outcome.skipped}
    assert skipped == {
        ("evaluation", "rl"), ("evaluation", "mid_rl"), ("pretrain", "continued"), ("evaluation", "continued"),
    }  # fmt: skip
    assert len(outcome.made) + len(outcome.failed) + len(outcome.skipped) == len(graph.nodes)
    cause, trace = next(iter(outcome.failed.values()))
    assert trace is not None
    assert cause == "RuntimeError: the reward was lost." and "Traceback" in trace.read_text()
    assert next(event.text for event in events if event.kind == "failed") == f"{cause} The traceback is in {trace}."
    for key in (*outcome.failed, *outcome.skipped):
        assert not store.has(shelf(graph.nodes[key].kind), key)
    assert list((store.root / "tmp").iterdir()) == [] and leases(store) == []
    # Failed is a state: it is told again and not tried again, until that is asked for; then only what was lost is made.
    again, events = run(graph, store, workers)
    assert not again.made and set(again.failed) == set(again.failed_before) == set(outcome.failed)
    assert set(again.skipped) == set(outcome.skipped)
    told = next(event.text for event in events if event.kind == "failed")
    assert told.startswith(f"{cause} That was on 20") and told.endswith("--retry tries again.")
    assert all(store.state("stages", key) == "failed" for key in outcome.failed)
    mended, _ = run(graph, store, workers, retry=True)
    assert mended.ok and set(mended.made) == {*outcome.failed, *outcome.skipped}
    assert {store.state("stages", key) for key in outcome.failed} == {"done"}


def test_a_worker_that_is_killed_fails_its_node_alone(store: Store) -> None:
    graph = smoke("seeds=[0]", "arms={pretrained: anneal, rl: rl}", "attribution=null")
    outcome, _ = run(graph, store, 2, rl="fake_runners:killed")
    assert [graph.nodes[key].name for key in outcome.failed] == ["rl"]
    cause, trace = next(iter(outcome.failed.values()))
    assert "was killed by SIGKILL, perhaps for want of memory" in cause and trace is not None and trace.exists()
    assert store.has("evaluations", graph.evaluations["anneal", 0])
    # That is no fault of the stage: the next run tries it without being asked to.
    assert run(graph, store, 2)[0].ok


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_no_fault_of_the_stage(store: Store, workers: int) -> None:
    graph = smoke("seeds=[0]")
    outcome, _ = run(graph, store, workers, rl="fake_runners:out_of_space")
    assert {graph.nodes[key].name for key in outcome.failed} == {"rl", "mid_rl"}
    assert all("No space left" in cause for cause, _ in outcome.failed.values())
    assert set(outcome.passing) == set(outcome.failed)
    assert run(graph, store, workers)[0].ok


def test_checkpoints_fall_with_the_stage_that_did_not_come_to_them(store: Store) -> None:
    early = ["arms={early: pretrain@2, pretrained: anneal}", "seeds=[0]", "attribution=null", "claims=[]"]
    graph = smoke(*early)
    outcome, _ = run(graph, store, 1, pretrain="fake_runners:failing_rl")
    assert list(outcome.failed) == [graph.stages["pretrain", 0]]
    assert {graph.nodes[key].label for key in outcome.skipped} == {
        "pretrain@2, seed 0", "evaluation of pretrain@2, seed 0", "anneal, seed 0", "evaluation of anneal, seed 0",
    }  # fmt: skip


def test_a_failure_that_cannot_be_recorded_is_told_all_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Path:
        raise StoreError("The store is full.")

    monkeypatch.setattr(Store, "fail", full)
    outcome, events = run(smoke("seeds=[0]"), store, 1, rl="fake_runners:failing_rl")
    assert len(outcome.failed) == 2 and {trace for _, trace in outcome.failed.values()} == {None}
    assert "It could not be recorded." in next(event.text for event in events if event.kind == "failed")


def test_what_another_process_has_in_hand_is_left_to_it(store: Store) -> None:
    """Everything else is done meanwhile; when the other is gone, the node is taken over, or found."""
    graph = smoke("seeds=[0]")
    store.prepare()
    held = graph.stages["anneal", 0]
    release = threading.Event()
    order: list[str] = []

    def other() -> None:
        with Store(store.root).lease("stages", held):
            started.set()
            release.wait(20)

    started = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    started.wait()

    def watch(event: Event) -> None:
        if event.kind == "done" and event.node is not None:
            order.append(event.node.label)
            if event.node.label == "evaluation of mid, seed 0":
                release.set()
        if event.kind == "note":
            order.append(event.text)

    outcome = run_graph(graph, store, workers=1, on_event=watch, runners=FAKES)
    thread.join()
    assert outcome.ok and not outcome.found and set(outcome.made) == set(graph.nodes)
    waited = next(i for i, text in enumerate(order) if "works on" in text)
    assert waited < order.index("evaluation of mid, seed 0") < order.index("anneal, seed 0")


def test_missing_checkpoints_go_on_from_one_another(store: Store) -> None:
    """Where their stage is there already they are made in order, one after the other, by however many workers."""
    early = "arms={one: pretrain@1, two: pretrain@2, pretrained: anneal}"
    graph = smoke("seeds=[0]", "attribution=null", "claims=[]", early)
    stage = graph.stages["pretrain", 0]
    run(smoke("seeds=[0]", "attribution=null", "claims=[]", "arms={pretrained: anneal}"), store, 1)
    for workers in (1, 2):
        outcome, events = run(graph, store, workers)
        assert outcome.ok
        places = [
            (e.kind, e.node.step) for e in events if e.node and e.node.kind == "checkpoint" and e.kind != "progress"
        ]
        assert places == [("started", 1), ("done", 1), ("started", 2), ("done", 2)]
        for step in (1, 2):
            shutil.rmtree(store.path("checkpoints", f"{stage}@{step}"))


@pytest.mark.parametrize("group", [False, True])
def test_a_request_to_stop_that_comes_twice_is_answered_once(tmp_path: Path, group: bool) -> None:
    """Schedulers signal the whole group, and the parent passes it on: a worker that is saving goes on saving."""
    script = tmp_path / "patient.py"
    script.write_text(SLOW.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"), run="patient"))
    root = Path(__file__).parent.parent
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=root, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root), "COUNT": str(tmp_path / "count")},
    )  # fmt: skip
    store = Store(tmp_path / "store")
    _wait(lambda: len(leases(store)) == 2)
    time.sleep(0.3)
    if group:
        os.killpg(parent.pid, signal.SIGTERM)
    else:
        parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=20) == 130
    assert (tmp_path / "count").read_text().count("saved") == 2


EIGHT = """
import sys; sys.path.insert(0, {tests!r})
from sweeps.local import run_graph
from testbed.graph import build
from testbed.spec import load
from testbed.store import Store
runners = dict.fromkeys({kinds!r}, "fake_runners:counted")
if __name__ == "__main__":
    outcome = run_graph(build(load("smoke")), Store({store!r}), workers=1, runners=runners)
    print(len(outcome.made), len(outcome.found) + len(outcome.reused))
    sys.exit(0 if outcome.ok else str(outcome))
"""


def test_eight_processes_run_one_plan_and_each_node_once(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    script = tmp_path / "eight.py"
    text = EIGHT.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"), kinds=list(FAKES))
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(root), "COUNT": str(tmp_path / "count")}
    command = [sys.executable, str(script)]
    several = [
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    told = [process.communicate(timeout=120)[0].split() for process in several]
    assert [process.returncode for process in several] == [0] * 8
    assert sum(int(made) for made, _ in told) == 24 and all(int(made) + int(there) == 24 for made, there in told)
    counted = (tmp_path / "count").read_text().split()
    graph = smoke()
    assert sorted(key for key, _ in (line.split(":") for line in counted)) == sorted(graph.nodes)
    assert len({pid for _, pid in (line.split(":") for line in counted)}) > 1, "they shared the work"
    assert leases(Store(tmp_path / "store")) == []


def test_workers_are_processes_with_their_own_threads(store: Store) -> None:
    graph = smoke("attribution=null", "arms={pretrained: anneal}", "claims=[]", "seeds=[0, 1, 2]")
    outcome = run_graph(graph, store, workers=2, threads=3, runners={**FAKES, "pretrain": "fake_runners:environment"})
    made = [store.get("stages", key).summary for key in graph.stages.values()]  # type: ignore[union-attr]
    assert len({summary["pid"] for summary in made} - {os.getpid()}) == 2
    assert {(s["OMP_NUM_THREADS"], s["OMP_WAIT_POLICY"]) for s in made} == {("3", "PASSIVE")}
    assert set(outcome.failed) <= set(graph.evaluations.values())


def test_what_is_left_to_do_does_not_change_the_threads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.local.cores", lambda: 4)
    seen = []
    monkeypatch.setattr("sweeps.local._run_here", lambda state, job, workers, on_event: seen.append(job.threads))
    monkeypatch.setattr("sweeps.local._run_pool", lambda state, job, workers, on_event: seen.append(job.threads))
    graph = smoke()
    for workers in (None, 2, 1):
        run_graph(graph, store, workers=workers, runners=FAKES)
    key = next(key for key, node in graph.nodes.items() if node.kind == "corpus")
    one = dataclasses.replace(graph, nodes={key: graph.nodes[key]})
    for workers in (None, 2, 1):
        run_graph(one, store, workers=workers, runners=FAKES)
    assert seen == [1, 2, 4] * 2


def test_damage_of_equal_size_is_mended_in_the_same_run(store: Store) -> None:
    """It is seen when the file is read: here by an evaluation that has to be made again."""
    graph = smoke()
    run(graph, store, 1)
    key = graph.stages["anneal", 0]
    path = store.path("stages", key) / "depth"
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    evaluation = graph.evaluations["anneal", 0]
    shutil.rmtree(store.path("evaluations", evaluation))
    # A store remembers what it has checked; the next run is another process.
    outcome, _ = run(graph, Store(store.root, announce=lambda text: None), 1)
    assert outcome.ok and set(outcome.made) == {key, evaluation}


def test_damage_is_mended(store: Store) -> None:
    graph = smoke()
    run(graph, store, 1)
    key = graph.stages["anneal", 0]
    (store.path("stages", key) / "depth").write_text("10")
    outcome, _ = run(graph, store, 1)
    assert outcome.ok and outcome.made == [key]


def _wait(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


SLOW = """
import signal, sys; sys.path.insert(0, {tests!r})
# A shell makes what it starts in the background deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from sweeps.local import run_graph
from testbed.graph import build
from testbed.spec import load
from testbed.store import Store
from fake_runners import RUNNERS
if __name__ == "__main__":
    runners = dict.fromkeys(RUNNERS, "fake_runners:{run}")
    outcome = run_graph(build(load("smoke")), Store({store!r}), workers=2, runners=runners)
    sys.exit(130 if outcome.stopped else 0)
"""


def _children(pid: int) -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    import psutil

    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"), run="slow"))
    root = Path(__file__).parent.parent
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL
    )
    store = Store(tmp_path / "store")
    _wait(lambda: len(leases(store)) == 2)
    workers = _children(parent.pid)
    parent.send_signal(how)
    parent.wait(timeout=20)
    _wait(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers))
    if how == signal.SIGINT:
        assert parent.returncode == 130
        assert leases(store) == [] and list((tmp_path / "store" / "tmp").iterdir()) == []


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    """The first asks everybody to stop at a safe place; here none comes."""
    import psutil

    script = tmp_path / "deaf.py"
    script.write_text(SLOW.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"), run="deaf"))
    root = Path(__file__).parent.parent
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL
    )
    store = Store(tmp_path / "store")
    _wait(lambda: len(leases(store)) == 2)
    workers = _children(parent.pid)
    parent.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert parent.poll() is None, "it waits for its workers"
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=5) != 0
    _wait(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers))
    # Leases of the dead are broken at once, and what they left is cleared away.
    for path in leases(store):
        with (
            store.lease("stages", path.stem.removeprefix("stages-"))
            if path.stem.startswith("stages")
            else store.lease("corpora", path.stem.removeprefix("corpora-"))
        ):
            pass
    assert leases(store) == [] and list((store.root / "tmp").iterdir()) == []
