"""The store: whole or not at all, never overwritten, damage noticed, work leased."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from testbed import store as stores
from testbed.errors import StoreError
from testbed.store import MANIFEST, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store", announce=lambda text: said.append(text))
    said.clear()
    made.prepare()
    return made


said: list[str] = []


def publish(store: Store, key: str = "k1", text: str = "hello") -> Path:
    with store.publish("stages", key) as draft:
        (draft.out / "sub").mkdir()
        (draft.out / "sub" / "a.txt").write_text(text)
        (draft.out / "b.bin").write_bytes(b"\0\1")
        draft.manifest = {"summary": {"n": 3}}
    return store.path("stages", key)


def test_an_artifact_comes_back_with_its_manifest(store: Store) -> None:
    path = publish(store)
    found = store.get("stages", "k1")
    assert found is not None and found.path == path and found.summary == {"n": 3}
    assert set(found.manifest["files"]) == {"sub/a.txt", "b.bin"}
    assert found.manifest["files"]["b.bin"]["bytes"] == 2
    assert store.get("stages", "k2") is None and store.get("corpora", "k1") is None
    assert store.has("stages", "k1") and not store.has("stages", "k2")
    assert store.keys("stages") == ["k1"] and store.keys("corpora") == []
    assert list((store.root / "tmp").iterdir()) == []


def test_a_failure_publishes_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.publish("stages", "k1") as draft:
        (draft.out / "a.txt").write_text("half")
        raise RuntimeError
    assert store.get("stages", "k1") is None
    assert list((store.root / "tmp").iterdir()) == []


def test_the_manifest_is_written_last(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment before the rename the final place is empty, and all files are synced before the manifest is."""
    synced: list[str] = []
    real = stores._sync

    def watch(path: Path) -> None:
        assert path.name == "stages" or not store.path("stages", "k1").exists()
        synced.append(path.name)
        real(path)

    monkeypatch.setattr(stores, "_sync", watch)
    publish(store)
    assert synced[:3] == ["b.bin", "a.txt", MANIFEST] and synced[-1] == "stages"


def test_a_process_killed_while_it_writes_leaves_nothing_to_be_used(store: Store) -> None:
    code = (
        "import os, sys; from testbed.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "with store.lease('stages', 'k1'), store.publish('stages', 'k1') as draft:\n"
        "    (draft.out / 'a.txt').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(store.root)], check=False)
    assert result.returncode == -9
    assert store.get("stages", "k1") is None and not store.has("stages", "k1")
    assert len(list((store.root / "tmp").iterdir())) == 1
    # The dead holder's lease is broken at once, and what it left is cleared away.
    start = time.monotonic()
    with store.lease("stages", "k1"):
        assert list((store.root / "tmp").iterdir()) == []
        publish(store)
    assert time.monotonic() - start < 5
    assert store.get("stages", "k1") is not None


def test_nothing_is_overwritten(store: Store) -> None:
    publish(store)
    with pytest.raises(StoreError, match="never overwritten"):
        publish(store, text="other")
    with pytest.raises(StoreError, match="by another run meanwhile"), store.publish("stages", "k2") as draft:
        (draft.out / "a.txt").write_text("mine")
        publish(store, "k2", text="theirs")
    assert (store.path("stages", "k2") / "sub" / "a.txt").read_text() == "theirs"
    assert list((store.root / "tmp").iterdir()) == []


def damage_size(path: Path) -> None:
    (path / "b.bin").write_bytes(b"\0")


def damage_bytes(path: Path) -> None:
    (path / "b.bin").write_bytes(b"\0\2")


def damage_missing(path: Path) -> None:
    (path / "sub" / "a.txt").unlink()


def damage_manifest(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": ')


def damage_no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def damage_odd_manifest(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": {"b.bin": 3}}')


def damage_edited_manifest(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["summary"] = {"flops": 9e9}
    (path / MANIFEST).write_text(json.dumps(manifest))


def damage_other_name(path: Path) -> None:
    """Another artifact stands under the key."""
    shutil.rmtree(path)
    publish(Store(path.parent.parent), "k2").rename(path)


DAMAGES: list[Any] = [
    damage_edited_manifest, damage_other_name,
    damage_size, damage_bytes, damage_missing, damage_manifest, damage_no_manifest, damage_odd_manifest,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_announced_and_moved_aside(store: Store, damage: Any) -> None:
    path = publish(store)
    damage(path)
    assert store.get("stages", "k1") is None
    assert len(said) == 1 and "is damaged" in said[0]
    assert not path.exists() and len(list((store.root / "damaged").iterdir())) == 1
    publish(store)
    assert store.get("stages", "k1") is not None


def test_sizes_are_always_looked_at_and_bytes_before_they_are_read(store: Store) -> None:
    damage_bytes(publish(store))
    assert store.has("stages", "k1") and store.get("stages", "k1", read=False) is not None
    assert store.get("stages", "k1") is None
    damage_size(publish(store))
    assert not store.has("stages", "k1")
    assert store.path("stages", "k1").exists(), "has() touches nothing"


@pytest.mark.parametrize("below", ["file/store", "file"])
def test_a_store_that_cannot_be_written_is_one_paragraph(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot be written.*--store") as error:
        Store(tmp_path / below).prepare()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../stages", "a/b", "/tmp"])
def test_a_folder_made_anew_lies_on_its_shelf(store: Store, name: str) -> None:
    """What is there before is deleted: a name must not lead elsewhere."""
    kept = publish(store)
    with pytest.raises(ValueError, match="cannot name a folder"), store.folder("reports", name):
        pass
    assert kept.exists() and store.root.exists()


def test_one_holds_a_lease_and_the_other_waits(store: Store) -> None:
    order: list[str] = []
    waiting: list[str] = []

    def second() -> None:
        with store.lease("stages", "k1", waiting=waiting.append):
            order.append("second")

    with store.lease("stages", "k1"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
        with store.lease("stages", "k2"):
            pass  # another key is free
    thread.join(timeout=10)
    assert order == ["first", "second"]
    assert len(waiting) == 1 and str(os.getpid()) in waiting[0]
    assert list((store.root / "leases").iterdir()) == []


@pytest.mark.parametrize(("age", "host", "stale"), [(0.0, "elsewhere", False), (600.0, "elsewhere", True)])
def test_a_lease_of_another_host_is_stale_when_it_is_not_renewed(
    store: Store, age: float, host: str, stale: bool
) -> None:
    path = store.root / "leases" / "stages-k1.json"
    path.write_text(json.dumps({"pid": 1, "host": host, "token": "t"}))
    os.utime(path, (time.time() - age,) * 2)
    got = threading.Event()

    def take() -> None:
        with store.lease("stages", "k1"):
            got.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert got.wait(0.5) == stale
    path.unlink(missing_ok=True)
    thread.join(timeout=10)


def test_a_lease_is_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "RENEW_EVERY", 0.05)
    with store.lease("stages", "k1"):
        path = next((store.root / "leases").iterdir())
        os.utime(path, (0, 0))
        time.sleep(0.3)
        assert path.stat().st_mtime > time.time() - 60
        assert json.loads(path.read_text())["host"] == socket.gethostname()
