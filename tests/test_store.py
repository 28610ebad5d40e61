"""The store: whole or not at all, never overwritten, damage noticed, work leased."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from testbed import store as stores
from testbed.errors import StoreError
from testbed.leases import LeaseLost
from testbed.store import MANIFEST, SHELVES, Store


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
    real = stores.sync

    def watch(path: Path) -> None:
        assert path.name == "stages" or not store.path("stages", "k1").exists()
        synced.append(path.name)
        real(path)

    monkeypatch.setattr(stores, "sync", watch)
    publish(store)
    assert synced[:4] == ["b.bin", "sub", "a.txt", MANIFEST] and synced[4].startswith("stages-k1-")
    # The new shelf in its own folder, and at last the artifact on its shelf.
    assert synced[5:] == [store.root.name, "stages"]


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
    (path / MANIFEST).write_text('{"files": {"b.bin": 3}, "format": 2}')


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
    assert [p.name for p in (store.root / "leases").iterdir()] == [".guard"]


def test_what_a_killed_taker_left_is_swept_up(store: Store) -> None:
    for name in ("stages-k1.json.0123.new", "stages-k2.json.0123.new"):
        (store.root / "leases" / name).touch()
    with store.lease("stages", "k1"):
        pass
    assert sorted(p.name for p in (store.root / "leases").iterdir()) == [".guard", "stages-k2.json.0123.new"]


def left_of(out: Path) -> Path:
    """A folder as another draft of the same would have left."""
    return out.with_name(out.name[:-1] + ("1" if out.name[-1] == "0" else "0"))


def test_a_lease_clears_what_was_begun_under_it_and_nothing_else(store: Store) -> None:
    """The artifact, its saved states and the checkpoints that are published on the way."""
    with store.lease("stages", "k1") as lease:
        drafts = [
            store.publish("stages", "k1", lease=lease),
            store.publish("partial/stages-k1", "000000010", lease=lease),
            store.publish("checkpoints", "k1@10", lease=lease),
        ]
        others = [store.publish("stages", "k10"), store.publish("partial/stages-k2", "000000010")]
        kept = []
        with contextlib.ExitStack() as stack:
            for one in drafts:
                out = stack.enter_context(one).out
                assert out.parent == store.root / "tmp"
                shutil.copytree(out, left_of(out))
            kept = [stack.enter_context(one).out for one in others]
            assert len(list((store.root / "tmp").iterdir())) == 8
            for out in kept:
                shutil.copytree(out, left_of(out))
    assert len(list((store.root / "tmp").iterdir())) == 5
    with store.lease("stages", "k1"):
        assert sorted(p.name for p in (store.root / "tmp").iterdir()) == sorted(left_of(out).name for out in kept)


@pytest.mark.parametrize("shelf", ["partial/stages-k1", "stages"])
def test_a_nested_shelf_is_like_any_other(store: Store, shelf: str) -> None:
    with store.publish(shelf, "000000010") as draft:
        (draft.out / "a.txt").write_text("state")
    assert store.keys(shelf) == ["000000010"] and store.has(shelf, "000000010")
    found = store.get(shelf, "000000010")
    assert found is not None and (found.path / "a.txt").read_text() == "state"
    with (found.path / "a.txt").open("ab") as file:
        file.write(b"!")
    assert store.get(shelf, "000000010") is None and "is damaged" in said[0]
    assert len(list((store.root / "damaged").iterdir())) == 1
    assert store.keys(shelf) == []


# What can fail.


class Failing:
    """os.fsync that fails at one of its calls."""

    def __init__(self, number: int, at: int) -> None:
        self.number, self.at, self.calls = number, at, 0
        self.real = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise OSError(self.number, os.strerror(self.number))
        self.real(descriptor)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_full_or_broken_disk_publishes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """At whichever sync it shows: of a file, a folder, the manifest, the shelf."""
    counter = Failing(number, at=0)
    monkeypatch.setattr(os, "fsync", counter)
    publish(store, "k0")
    for at in range(1, counter.calls + 1):
        # In a store where the shelf is made too.
        other = Store(store.root.with_name(f"store{at}"))
        other.prepare()
        monkeypatch.setattr(os, "fsync", Failing(number, at))
        with pytest.raises(StoreError, match=os.strerror(number)) as error:
            publish(other)
        assert "\n" not in str(error.value)
        assert ("store gc" in str(error.value)) == (number == errno.ENOSPC)
        assert other.get("stages", "k1") is None and other.keys("stages") == []
        assert list((other.root / "tmp").iterdir()) == []
        monkeypatch.setattr(os, "fsync", counter.real)
        publish(other)
        assert other.get("stages", "k1") is not None


STEPS = ["mkdir", "write_text", "rename"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_every_step_of_publishing_can_fail(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    draft = store.publish("stages", "k1")
    real = getattr(Path, step)

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == MANIFEST or step != "write_text":
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    def attempt() -> None:
        if step == "mkdir":
            monkeypatch.setattr(Path, step, fail)
        with draft as out:
            (out.out / "a.txt").write_text("text")
            monkeypatch.setattr(Path, step, fail)

    with pytest.raises(StoreError, match=f"cannot be written: {os.strerror(number)}"):
        attempt()
    monkeypatch.setattr(Path, step, real)
    assert store.get("stages", "k1") is None
    assert [p for p in (store.root / "tmp").iterdir()] == []
    publish(store)


def test_an_error_of_the_work_is_raised_as_it_is(store: Store) -> None:
    for error in (PermissionError("the data"), OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)) as raised,
            store.lease("stages", "k1") as lease,
            store.publish("stages", "k1", lease=lease) as draft,
        ):
            (draft.out / "a.txt").write_text("text")
            raise error
        assert raised.value is error
        assert store.get("stages", "k1") is None and list((store.root / "tmp").iterdir()) == []


def test_a_pipe_that_broke_is_no_error_of_the_store(store: Store) -> None:
    def waiting(text: str) -> None:
        raise BrokenPipeError

    with store.lease("stages", "k1"), pytest.raises(BrokenPipeError), store.lease("stages", "k1", waiting=waiting):
        pass


def test_a_lost_lease_is_looked_for_last(store: Store) -> None:
    """Work that went well and whose lease another has is not published, whatever that one has done so far."""
    with (
        pytest.raises(LeaseLost, match="process 1 on elsewhere has it"),
        store.lease("stages", "k1") as lease,
        store.publish("stages", "k1", lease=lease) as draft,
    ):
        (draft.out / "a.txt").write_text("mine")
        lease.path.write_text(
            json.dumps({"pid": 1, "host": "elsewhere", "machine": "elsewhere", "started": None, "token": "t"})
        )
    assert not store.path("stages", "k1").exists() and list((store.root / "tmp").iterdir()) == []
    assert (store.root / "leases" / "stages-k1.json").exists()


def test_what_may_not_be_read_is_no_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, for one: moving the artifact away would throw good work away."""
    path = publish(store)
    real = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == "b.bin":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match="cannot be read: Too many open files"):
        store.get("stages", "k1")
    monkeypatch.setattr(Path, "open", real)
    assert path.exists() and store.get("stages", "k1") is not None and said == []


# Damage.


@pytest.mark.parametrize("shelf", SHELVES)
def test_one_bit_and_one_byte_of_any_file_are_missed(store: Store, shelf: str) -> None:
    key = "0123456789abcdef0123456789abcdef" + "@20" * (shelf == "checkpoints")
    names = [MANIFEST, "sub/a.txt", "b.bin", "empty"]
    for name in names:
        for change in ("flip", "cut", "grow"):
            with store.publish(shelf, key) as draft:
                (draft.out / "sub").mkdir()
                (draft.out / "sub" / "a.txt").write_text("hello")
                (draft.out / "b.bin").write_bytes(bytes(range(100)))
                (draft.out / "empty").touch()
                draft.manifest = {"summary": {"n": 3}}
            assert store.examine(shelf, key)[0] is None
            file = store.path(shelf, key) / name
            data = bytearray(file.read_bytes())
            if not data and change != "grow":
                store.discard(shelf, key)
                continue
            if change == "flip":
                data[len(data) // 2] ^= 1
            file.write_bytes({"flip": data, "cut": data[:-2], "grow": data + b"x"}[change])
            problem, _ = Store(store.root).examine(shelf, key)
            assert problem is not None and problem.startswith(("is damaged", "was written by another")), (name, change)
            assert store.path(shelf, key).exists()
            said.clear()
            # As a run that has not read it yet.
            assert Store(store.root, announce=said.append).get(shelf, key) is None
            assert len(said) == 1 and not store.path(shelf, key).exists()


@pytest.mark.parametrize("format", [1, 3, None])
def test_an_artifact_of_another_format_is_not_used(store: Store, format: int | None) -> None:
    """Whatever its digest says: it may be counted in another way."""
    path = publish(store)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["format"] == 2
    manifest["format"] = format
    if format is None:
        del manifest["format"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert not store.has("stages", "k1") and store.state("stages", "k1") == "missing"
    assert store.get("stages", "k1") is None
    assert len(said) == 1 and "was written by another version of the store" in said[0] and "damaged (" not in said[0]
    assert f"format {format or 1}; this one reads 2" in said[0]
    assert not path.exists() and len(list((store.root / "damaged").iterdir())) == 1


def test_an_artifact_that_another_moves_aside_first_is_just_not_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(store)
    damage_size(path)
    real = stores.examine

    def faster(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        shutil.rmtree(path)
        return result

    monkeypatch.setattr(stores, "examine", faster)
    assert store.get("stages", "k1") is None and said == []


# States.


def test_states(store: Store) -> None:
    assert store.state("stages", "k1") == "missing"
    with store.lease("stages", "k1") as lease:
        assert store.state("stages", "k1") == "running" and store.state("stages", "k10") == "missing"
        with store.publish("partial/stages-k1", "000000010", lease=lease) as draft:
            (draft.out / "a.txt").write_text("state")
        assert store.state("stages", "k1") == "running"
    assert store.state("stages", "k1") == "partial"
    store.fail("stages", "k1", label="k one", reason="It broke.", trace="Traceback ...")
    assert store.state("stages", "k1") == "failed"
    with store.lease("stages", "k1"):
        assert store.state("stages", "k1") == "running"
        publish(store)
    assert store.state("stages", "k1") == "done"
    store.fail("evaluations", "k2", label="two", reason="It broke.", trace="")
    assert store.known() == [("stages", "k1"), ("evaluations", "k2")]
    before = sorted(store.root.rglob("*"))
    assert store.state("stages", "k9") == "missing" and Store(store.root / "none").state("stages", "k1") == "missing"
    assert sorted(store.root.rglob("*")) == before, "touches nothing"
    store.discard("partial", "stages-k1")
    assert store.keys("partial/stages-k1") == [] and list((store.root / "tmp").iterdir()) == []


def test_a_failure_is_kept_until_it_is_forgiven_or_made_good(store: Store) -> None:
    assert store.failure("stages", "k1") is None
    store.forgive("stages", "k1")
    path = store.fail(
        "stages", "k1", label="mid, seed 0", reason="No memory.", trace="Traceback\n  line", versions={"torch": "9"}
    )
    assert path.parent.name == "failed" and json.loads(path.read_text())["reason"] == "No memory."
    failure = store.failure("stages", "k1")
    assert failure is not None and failure.trace == "Traceback\n  line" and failure.label == "mid, seed 0"
    assert failure.host == socket.gethostname() and failure.versions == {"torch": "9"}
    assert datetime.fromisoformat(failure.time).utcoffset() == timedelta(0)
    store.fail("stages", "k1", label="mid, seed 0", reason="Again.", trace="")
    assert store.failure("stages", "k1").reason == "Again."  # type: ignore[union-attr]
    assert [p.name for p in path.parent.iterdir()] == ["stages-k1.json"]
    store.forgive("stages", "k1")
    assert store.failure("stages", "k1") is None
    store.fail("stages", "k1", label="mid, seed 0", reason="Again.", trace="")
    with pytest.raises(RuntimeError), store.publish("stages", "k1") as draft:
        raise RuntimeError(draft.out)
    assert store.failure("stages", "k1") is not None
    publish(store)
    assert store.failure("stages", "k1") is None and not path.exists()
    path.write_text("{")
    assert store.failure("stages", "k1") is None


def test_specs_are_remembered_by_what_they_say(store: Store) -> None:
    assert store.remembered() == []
    first = store.remember("quick-start", {"name": "quick-start", "tokens": 1})
    assert store.remember("quick-start", {"tokens": 1, "name": "quick-start"}) == first
    second = store.remember("quick-start", {"name": "quick-start", "tokens": 2})
    assert {one.path for one in store.remembered()} == {first, second}
    assert {one.spec["tokens"] for one in store.remembered() if one.spec} == {1, 2}
    assert {one.name for one in store.remembered()} == {"quick-start"}
    first.write_text("{")
    assert [one.spec is None for one in store.remembered()].count(True) == 1
    with pytest.raises(ValueError, match="cannot name a spec"):
        store.remember("../out", {})


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    stores.write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", Failing(errno.ENOSPC, at=1))
    with pytest.raises(OSError, match="No space"):
        stores.write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    stores.write_atomic(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_longer_name_is_another_one(store: Store) -> None:
    """What is being written under it is not cleared away by who takes the shorter."""
    with store.folder("reports", "quickstart-1a2b3c4d") as out:
        (out / "a.txt").write_text("mine")
        with store.folder("reports", "quickstart") as other:
            (other / "a.txt").write_text("theirs")
    assert (store.path("reports", "quickstart-1a2b3c4d") / "a.txt").read_text() == "mine"


def test_two_reports_of_a_name_are_written_one_after_the_other(store: Store) -> None:
    def second() -> None:
        with store.folder("reports", "r") as out:
            (out / "second").touch()

    with store.folder("reports", "r") as out:
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        (out / "first").touch()
        assert len(list((store.root / "tmp").iterdir())) == 1
    thread.join(timeout=10)
    assert [p.name for p in (store.root / "reports" / "r").iterdir()] == ["second"]


def test_deleting_shows_nobody_half_an_artifact(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(store)
    seen: list[bool] = []
    real = shutil.rmtree

    def watch(folder: Path, **options: Any) -> None:
        seen.append(path.exists())
        real(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", watch)
    store.discard("stages", "k1")
    assert seen == [False] and store.get("stages", "k1") is None
    store.discard("stages", "k1")
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **options: None)
    publish(store)
    with pytest.raises(StoreError, match="cannot be deleted"):
        store.discard("stages", "k1")
