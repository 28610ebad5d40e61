"""Garbage collection: what nobody needs goes, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testbed.collect import Garbage, Item, collect, plan_gc, size
from testbed.errors import StoreError
from testbed.store import Store

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store", announce=lambda text: None)
    made.prepare()
    return made


def publish(store: Store, shelf: str, key: str, size: int = 100) -> Path:
    with store.publish(shelf, key) as draft:
        (draft.out / "sub").mkdir()
        (draft.out / "sub" / "data").write_bytes(b"x" * size)
        draft.manifest = {"summary": {}}
    return store.path(shelf, key)


def begun(store: Store, name: str) -> Path:
    """What a killed run left below tmp/."""
    path = store.root / "tmp" / f"{name}-01234567"
    path.mkdir()
    (path / "half").write_text("half")
    return path


def found(garbage: Garbage) -> set[tuple[str, str]]:
    return {(item.kind, item.path.relative_to(garbage.store.root).as_posix()) for item in garbage.items}


def test_only_what_is_needed_stays(store: Store) -> None:
    kept = [publish(store, "stages", A), publish(store, "checkpoints", f"{A}@20"), publish(store, "corpora", C)]
    gone = [publish(store, "stages", B), publish(store, "checkpoints", f"{A}@10"), publish(store, "probes", A)]
    garbage = plan_gc(store, {("stages", A), ("checkpoints", f"{A}@20"), ("corpora", C)})
    assert found(garbage) == {("artifact", f"{path.parent.name}/{path.name}") for path in gone}
    assert all(path.exists() for path in kept + gone), "a plan touches nothing"
    assert garbage.bytes == sum(size(path) for path in gone) > 300
    assert [item.path for item in collect(garbage)] == [item.path for item in garbage.items]
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)
    assert list((store.root / "tmp").iterdir()) == []
    assert [p.name for p in (store.root / "leases").iterdir()] == [".guard"]
    assert collect(garbage) == [] or not any(path.exists() for path in gone)
    assert plan_gc(store, {("stages", A), ("checkpoints", f"{A}@20"), ("corpora", C)}).items == ()


def test_what_was_left_behind_goes_by_its_kind(store: Store) -> None:
    publish(store, "stages", A)
    publish(store, f"partial/stages-{A}", "000000010")  # its artifact is finished
    publish(store, f"partial/stages-{B}", "000000010")  # needed and not finished
    publish(store, f"partial/stages-{C}", "000000010")  # not needed
    for key in (A, B, C):
        store.fail("evaluations", key, label="x", reason="x", trace="x")
    for name in (f"stages-{B}", f"stages-{B}-000000010", "reports-quick-start", "trash", "import-0123"):
        begun(store, name)
    (store.root / "tmp" / "probe-0123").touch()
    (store.root / "damaged" / "stages-x-1").mkdir(parents=True)
    needed = {("stages", A), ("stages", B), ("evaluations", A)}
    garbage = plan_gc(store, needed)
    assert found(garbage) == {
        ("partial", f"partial/stages-{A}"),
        ("partial", f"partial/stages-{C}"),
        ("failure", f"failed/evaluations-{B}.json"),
        ("failure", f"failed/evaluations-{C}.json"),
        ("damaged", "damaged/stages-x-1"),
        *(("temporary", f"tmp/{name}-01234567") for name in (
            f"stages-{B}", f"stages-{B}-000000010", "reports-quick-start", "trash", "import-0123",
        )),
        ("temporary", "tmp/probe-0123"),
    }  # fmt: skip
    kinds = garbage.by_kind()
    assert [item.bytes for item in kinds["temporary"]].count(4) == 5 and len(kinds["failure"]) == 2
    collect(garbage)
    assert plan_gc(store, needed).items == ()
    assert store.state("stages", A) == "done" and store.state("stages", B) == "partial"
    assert store.failure("evaluations", A) is not None


def test_what_a_live_lease_holds_stays(store: Store) -> None:
    publish(store, "stages", A)
    with store.lease("stages", B) as lease, store.publish("stages", B, lease=lease) as draft:
        with store.publish(f"partial/stages-{B}", "000000010", lease=lease) as state:
            (state.out / "x").touch()
            assert found(plan_gc(store, {("stages", B)})) == {("artifact", f"stages/{A}")}
        with store.publish("checkpoints", f"{B}@10", lease=lease) as checkpoint:
            (checkpoint.out / "x").touch()
        # A checkpoint that is read to go on from, too.
        assert found(plan_gc(store, {("stages", B)})) == {("artifact", f"stages/{A}")}
        store.fail("stages", B, label="x", reason="x", trace="x")
        garbage = plan_gc(store, set())
        assert garbage.items == () and f"makes stages/{B}, which no remembered spec names" in garbage.note
        assert draft.out.exists()
    with store.folder("reports", "quick-start"):
        assert not {kind for kind, _ in found(plan_gc(store, set()))} & {"temporary"}
    assert ("checkpoints", f"{B}@10") in [item.work for item in plan_gc(store, set()).items]


def test_inputs_of_unknown_work_stay_and_its_leftovers_go(store: Store) -> None:
    publish(store, "corpora", A)
    publish(store, f"partial/stages-{C}", "000000010")
    begun(store, f"stages-{C}")
    with store.lease("stages", B):
        assert {kind for kind, _ in found(plan_gc(store, set()))} == {"temporary"}
        assert plan_gc(store, {("stages", B)}).note == ""
        assert len(plan_gc(store, {("stages", B)}).items) == 3


def test_a_lease_taken_after_the_plan_is_heeded(store: Store) -> None:
    for key in (A, B):
        publish(store, "stages", key)
    for key in (A, B):
        publish(store, "checkpoints", f"{key}@10")
    report = begun(store, "reports-quick-start")
    garbage = plan_gc(store, set())
    assert len(garbage.items) == 5
    with store.lease("stages", A):
        with store.lease("reports", "quick-start"):
            # Taking the lease swept up what had been left; this is its new folder.
            report.mkdir()
            deleted = collect(garbage)
            assert report.exists()
        assert [item.work for item in deleted] == [("stages", B), ("checkpoints", f"{B}@10")]
        assert store.has("stages", A) and store.has("checkpoints", f"{A}@10") and not store.has("stages", B)
    assert len(collect(garbage)) >= 2
    assert not store.has("stages", A)


def test_a_spec_remembered_after_the_plan_saves_its_artifacts(store: Store) -> None:
    publish(store, "stages", A)
    publish(store, f"partial/stages-{B}", "000000010")
    left = begun(store, f"stages-{C}")
    store.remember("old", {"name": "old"})
    garbage = plan_gc(store, set())
    store.remember("new", {"name": "new"})
    assert [item.kind for item in collect(garbage)] == ["temporary"]
    assert store.has("stages", A) and store.keys(f"partial/stages-{B}") and not left.exists()
    # One that was forgotten since is no reason to stop.
    garbage = plan_gc(store, set())
    for one in store.remembered():
        one.path.unlink()
    assert len(collect(garbage)) == 2 and not store.has("stages", A)


def test_damage_is_no_reason_to_keep_what_is_not_needed(store: Store) -> None:
    (publish(store, "stages", A) / "manifest.json").write_text("{")
    collect(plan_gc(store, set()))
    assert store.keys("stages") == [] and not (store.root / "damaged").exists()


def test_what_cannot_be_deleted_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, "stages", A)
    garbage = plan_gc(store, set())
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
    with pytest.raises(StoreError, match="cannot be deleted"):
        collect(garbage)


def test_an_empty_store_has_no_garbage(tmp_path: Path) -> None:
    garbage = plan_gc(Store(tmp_path / "none"), set())
    assert garbage.items == () and garbage.bytes == 0 and collect(garbage) == []
    assert not (tmp_path / "none").exists()


def test_sizes_count_files_once_and_links_as_themselves(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    (tmp_path / "a" / "c").symlink_to(tmp_path / "a" / "b")
    assert size(tmp_path) == 5 + len(str(tmp_path / "a" / "b"))
    assert size(tmp_path / "a" / "b") == 5 and size(tmp_path / "none") == 0
    assert Item("damaged", tmp_path, 5, None).bytes == 5
