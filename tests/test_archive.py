"""Archives: they come back as they went, and nothing else comes in."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed import archive
from testbed.archive import ArchiveError, export, import_
from testbed.errors import StoreError
from testbed.store import MANIFEST, SHELVES, Store

A, B = "a" * 32, "b" * 32
LONG = "very/" * 10 + "l" * 150 + "é.txt"


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return filled(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Store:
    store = Store(tmp_path / "there", announce=lambda text: None)
    store.prepare()
    return store


def filled(root: Path) -> Store:
    store = Store(root, announce=lambda text: None)
    for shelf, key in (("stages", A), ("checkpoints", f"{A}@20"), ("corpora", B)):
        publish(store, shelf, key)
    return store


def publish(store: Store, shelf: str, key: str) -> None:
    with store.publish(shelf, key) as draft:
        for name, data in (("b.bin", bytes(range(256)) * 9), ("empty", b""), ("sub/a.txt", b"hello"), (LONG, b"long")):
            (draft.out / name).parent.mkdir(parents=True, exist_ok=True)
            (draft.out / name).write_bytes(data)
        draft.manifest = {"summary": {"shelf": shelf}}


def everything(store: Store) -> list[tuple[str, str]]:
    return [(shelf, key) for shelf in SHELVES for key in store.keys(shelf)]


def contents(store: Store) -> dict[str, bytes]:
    files = [path for shelf in SHELVES for path in (store.root / shelf).rglob("*") if path.is_file()]
    return {path.relative_to(store.root).as_posix(): path.read_bytes() for path in files}


def clean(store: Store) -> bool:
    """Nothing is left below tmp/, and nothing outside the store was touched."""
    assert list((store.root / "tmp").iterdir()) == []
    assert [p.name for p in (store.root / "leases").iterdir()] in ([], [".guard"])
    return {p.name for p in store.root.parent.iterdir()} <= {"here", "there", "a.tar", "outside"}


def test_what_is_exported_comes_back(here: Store, there: Store, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    assert export(here, everything(here), file) == file.stat().st_size
    there.fail("stages", A, label="x", reason="x", trace="x")
    done = import_(there, file)
    assert done.added == everything(here) and done.present == []
    assert contents(there) == contents(here) and clean(there)
    for shelf, key in everything(there):
        assert there.get(shelf, key) is not None
    assert there.state("stages", A) == "done" and there.failure("stages", A) is None
    with tarfile.open(file, "r:") as tar:
        names = [member.name for member in tar]
        assert all((member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "") for member in tar)
    assert names[:3] == [f"corpora/{B}/{name}" for name in (MANIFEST, "b.bin", "empty")]


def test_equal_artifacts_give_equal_bytes(here: Store, there: Store, tmp_path: Path) -> None:
    first, second = tmp_path / "a.tar", tmp_path / "b.tar"
    export(here, everything(here), first)
    import_(there, first)
    export(there, [*reversed(everything(there)), ("stages", A)], second)
    assert first.read_bytes() == second.read_bytes()


def test_what_is_there_stays_and_what_is_damaged_is_mended(here: Store, there: Store, tmp_path: Path) -> None:
    export(here, everything(here), tmp_path / "a.tar")
    publish(there, "stages", A)
    (there.path("stages", A) / "extra").write_text("mine")
    publish(there, "corpora", B)
    (there.path("corpora", B) / "b.bin").write_bytes(b"cut")
    done = import_(there, tmp_path / "a.tar")
    assert done.present == [("stages", A)] and done.added == [("corpora", B), ("checkpoints", f"{A}@20")]
    assert (there.path("stages", A) / "extra").exists() and there.get("corpora", B) is not None
    again = import_(there, tmp_path / "a.tar")
    assert again.added == [] and len(again.present) == 3


def test_only_what_is_whole_is_exported(here: Store, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_text("old")
    with pytest.raises(ArchiveError, match="There is no artifact stages/bbb"):
        export(here, [("stages", A), ("stages", B)], file)
    data = here.path("stages", A) / "b.bin"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(ArchiveError, match=r"b\.bin differs from its digest"):
        export(here, everything(here), file)
    assert here.path("stages", A).exists() and file.read_text() == "old"
    with pytest.raises(ArchiveError, match="cannot be written: No such file"):
        export(here, [("corpora", B)], tmp_path / "none" / "a.tar")


def test_a_full_disk_leaves_the_old_archive(here: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.tar"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArchiveError, match="No space left on device"):
        export(here, everything(here), file)
    assert file.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "here"]


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What an archive may not be.


class Tar:
    """An archive made by hand."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        self.tar = tarfile.TarFile(fileobj=self.buffer, mode="w", format=tarfile.PAX_FORMAT)

    def add(self, name: str, data: bytes = b"", **changes: Any) -> Tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for field, value in changes.items():
            setattr(member, field, value)
        self.tar.addfile(member, io.BytesIO(data))
        return self

    def artifact(self, shelf: str = "stages", key: str = B, files: dict[str, bytes] | None = None) -> Tar:
        """A whole artifact with the files."""
        files = {"a.txt": b"hello"} if files is None else files
        self.add(f"{shelf}/{key}/{MANIFEST}", manifest(key, files))
        for name, data in files.items():
            self.add(f"{shelf}/{key}/{name}", data)
        return self

    def write(self, path: Path) -> Path:
        self.tar.close()
        path.write_bytes(self.buffer.getvalue())
        return path


def manifest(key: str, files: dict[str, bytes], **changes: Any) -> bytes:
    """As the store writes it, with a true digest."""
    body: dict[str, Any] = {
        "key": key,
        "format": 2,
        "summary": {},
        "files": {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()},
    } | changes
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body).encode()


def refused(store: Store, file: Path, **options: Any) -> str:
    """What is said; nothing came in, nothing is left, and the archive's good artifacts did not come in either."""
    before = contents(store)
    with pytest.raises(ArchiveError) as error:
        import_(store, file, **options)
    assert "\n" not in str(error.value) and contents(store) == before and clean(store)
    return str(error.value)


def test_an_archive_made_by_hand_is_taken(there: Store, tmp_path: Path) -> None:
    """Else the refusals below would prove nothing."""
    done = import_(there, Tar().artifact().artifact(key=A).write(tmp_path / "a.tar"))
    assert done.added == [("stages", B), ("stages", A)]
    found = there.get("stages", A)
    assert found is not None and (found.path / "a.txt").read_text() == "hello"
    assert import_(there, Tar().write(tmp_path / "a.tar")).added == []


NAMES = [
    "/etc/passwd", "../outside", f"stages/{A}/../../../outside", f"stages/{A}/../b", f"stages/{A}/sub/../a.txt",
    f"stages/../{A}/a.txt", f"./stages/{A}/a.txt", f"stages//{A}/a.txt", f"stages/{A}//a.txt", f"stages/{A}/./a.txt",
    f"stages/{A}", f"stages/{A}/", "stages", "a.txt", f"tmp/{A}/a.txt", f"leases/{A}/a.txt", f"partial/stages-{A}/1/a",
    f"other/{A}/a.txt", "stages/../a.txt", "stages/./a.txt", "stages/a b/c", "stages/a-b/c", f"stages/{A}@x/a.txt",
    f"stages/{A}/a\\..\\b", f"stages/{A}/a\nb", f"stages/{A}/a\x7fb", f"stages/{A}/{'d/' * 20}x",
    f"stages/{A}/{'x' * 300}", f"Stages/{A}/a.txt", "é" * 200, f"stages/{'a' * 65}/x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_member_elsewhere_is_refused(there: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("untouched")
    text = refused(there, Tar().artifact().add(name, b"evil").write(tmp_path / "a.tar"))
    assert ascii(name)[1:20].rstrip("/'") in text and "its member" in text
    assert (tmp_path / "outside").read_text() == "untouched"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.DIRTYPE, "a folder"),
        (tarfile.CONTTYPE, "no plain file"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (tarfile.GNUTYPE_LONGNAME, "no plain file"),
        (tarfile.XGLTYPE, "no plain file"),
        (b"Z", "no plain file"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_only_plain_files_are_taken(there: Store, tmp_path: Path, kind: bytes, words: str, known: bool) -> None:
    """A link in the place of a file that the manifest names, too."""
    tar = Tar().artifact().add(f"stages/{A}/{MANIFEST}", manifest(A, {"a.txt": b""}))
    tar.add(f"stages/{A}/{'a' if known else 'b'}.txt", type=kind, linkname="../../../outside")
    text = refused(there, tar.write(tmp_path / "a.tar"))
    assert f"is {words}; only plain files are taken" in text and f"stages/{A}/" in text


def swapped(tar: Tar) -> None:
    tar.add(f"stages/{A}/a.txt", b"hello").add(f"stages/{A}/{MANIFEST}", manifest(A, {"a.txt": b"hello"}))


def twice(tar: Tar) -> None:
    tar.artifact(key=A).add(f"stages/{A}/a.txt", b"hello")


def manifest_twice(tar: Tar) -> None:
    tar.artifact(key=A).artifact(key=A)


def unnamed(tar: Tar) -> None:
    tar.artifact(key=A).add(f"stages/{A}/more", b"x")


def bigger(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {"a.txt": b"hello"})).add(f"stages/{A}/a.txt", b"hello!")


def smaller(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {"a.txt": b"hello"})).add(f"stages/{A}/a.txt", b"hell")


def other_bytes(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {"a.txt": b"hello"})).add(f"stages/{A}/a.txt", b"hullo")


def absent(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {"a.txt": b"hello"}))


def other_key(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(B, {}))


def other_format(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {}, format=1))


def edited(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {}).replace(b'"summary": {}', b'"summary": []'))


def file_and_folder(tar: Tar) -> None:
    tar.artifact(key=A, files={"a": b"x", "a/b": b"y"})


def folder_and_file(tar: Tar) -> None:
    tar.artifact(key=A, files={"a/b": b"y", "a": b"x"})


def no_manifest(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", b"[1, 2")


def list_manifest(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", b"[]")


def deep_manifest(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", b"[" * 100_000)


def out_manifest(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {"../../../outside": b"x"}))


def self_manifest(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {MANIFEST: b"x"}))


def negative_manifest(tar: Tar) -> None:
    text = json.dumps({"files": {"a": {"bytes": -5, "sha256": ""}}}).encode()
    tar.add(f"stages/{A}/{MANIFEST}", text)


def fraction_manifest(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", b'{"files": {"a": {"bytes": 1e400, "sha256": ""}}}')


def other_field(tar: Tar) -> None:
    tar.add(f"stages/{A}/{MANIFEST}", manifest(A, {}), pax_headers={"GNU.sparse.realsize": "999999999999"})


def huge_header(tar: Tar) -> None:
    tar.add(f"stages/{A}/{'x' * 100_000}", b"")


BAD: list[tuple[Callable[[Tar], None], str]] = [
    (swapped, "comes before its artifact's manifest"),
    (twice, "is there twice"),
    (manifest_twice, "is there twice"),
    (unnamed, "is not in its artifact's manifest"),
    (bigger, "has 6 bytes, and its manifest says 5"),
    (smaller, "has 4 bytes, and its manifest says 5"),
    (other_bytes, "a.txt differs from its digest"),
    (absent, f"lacks stages/{A}/a.txt"),
    (other_key, f"it was made as {B}"),
    (other_format, "was written by another version of the store"),
    (edited, "its manifest differs from its digest"),
    (file_and_folder, "has the name of another member or of a folder of one"),
    (folder_and_file, "failed: Is a directory|has the name of another member or of a folder of one"),
    (no_manifest, "is no manifest"),
    (list_manifest, "is no manifest"),
    (deep_manifest, "is no manifest"),
    (out_manifest, "names a file '../../../outside' that no artifact has"),
    (self_manifest, "names a file 'manifest.json' that no artifact has"),
    (negative_manifest, "names a file 'a' that no artifact has"),
    (fraction_manifest, "names a file 'a' that no artifact has"),
    (other_field, "has an extended header with 'GNU.sparse.realsize' in it"),
    (huge_header, "has a header of 10"),
]


@pytest.mark.parametrize(("spoil", "words"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_an_archive_that_export_would_not_write_is_refused(
    there: Store, tmp_path: Path, spoil: Callable[[Tar], None], words: str
) -> None:
    (tmp_path / "outside").write_text("untouched")
    tar = Tar().artifact()
    spoil(tar)
    text = refused(there, tar.write(tmp_path / "a.tar"))
    assert any(word in text for word in words.split("|")), text
    assert (tmp_path / "outside").read_text() == "untouched"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"plain text", "is no tar archive; a plain tar"),
        (b"x" * 5000, "is no tar archive; a plain tar"),
        (gzip.compress(b"x" * 5000), "is compressed (gzip): unpack it first; a plain tar"),
        (b"BZh91AY" + bytes(5000), "is compressed (bzip2)"),
        (b"\xfd7zXZ\0" + bytes(5000), "is compressed (xz)"),
        (b"\x28\xb5\x2f\xfd" + bytes(5000), "is compressed (zstd)"),
        (b"PK\x03\x04" + bytes(5000), "is compressed (zip)"),
    ],
)
def test_what_is_no_plain_tar_is_said(there: Store, tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    assert words in refused(there, tmp_path / "a.tar")


def test_a_file_that_cannot_be_read_is_said(there: Store, tmp_path: Path) -> None:
    assert "No such file" in refused(there, tmp_path / "none.tar")
    assert "Is a directory" in refused(there, tmp_path)


def test_a_cut_archive_is_refused_wherever_it_was_cut(there: Store, tmp_path: Path) -> None:
    file = Tar().artifact(files={"a.txt": b"x" * 700, "b.txt": b""}).write(tmp_path / "a.tar")
    data = file.read_bytes()
    with tarfile.open(file, "r:") as tar:
        end = tar.getmembers()[-1].offset_data  # of an empty file: the end begins here
    for size in [*range(0, end + 2 * 512, 128), end + 2 * 512 - 1]:
        file.write_bytes(data[:size])
        text = refused(there, file)
        assert "cut off" in text or "is empty" in text or "no tar" in text, size
    # From here on nothing is missing but padding.
    file.write_bytes(data[: end + 2 * 512])
    assert import_(there, file).added == [("stages", B)]


def test_damaged_headers_are_refused(there: Store, tmp_path: Path) -> None:
    file = Tar().artifact(files={"a.txt": b"x" * 700}).write(tmp_path / "a.tar")
    data = file.read_bytes()
    second = data.index(b"stages/" + B.encode() + b"/a.txt")
    file.write_bytes(data[: second + 100] + b"\xff" + data[second + 101 :])
    assert "is damaged" in refused(there, file)
    file.write_bytes(data[:second] + bytes(512) + data[second:])
    assert "empty block between its members" in refused(there, file)
    # A size below zero, and one that is more than any disk, in the notation for large ones.
    for size in (-1, 1 << 62):
        member = tarfile.TarInfo(f"stages/{A}/{MANIFEST}")
        member.size = size
        file.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
        assert "negative size" in (text := refused(there, file)) or "more than any manifest" in text


def test_the_size_of_all_is_bounded(here: Store, there: Store, tmp_path: Path) -> None:
    export(here, everything(here), tmp_path / "a.tar")
    total = sum(map(len, contents(here).values()))
    assert f"would take the archive over {total - 1} bytes" in refused(there, tmp_path / "a.tar", max_bytes=total - 1)
    assert len(import_(there, tmp_path / "a.tar", max_bytes=total).added) == 3
    # What is there already takes nothing.
    assert import_(there, tmp_path / "a.tar", max_bytes=0).added == []


def test_the_bound_is_what_the_disk_has(here: Store, there: Store, tmp_path: Path, monkeypatch: Any) -> None:
    export(here, everything(here), tmp_path / "a.tar")

    class Usage:
        free = 1000

    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: Usage)
    assert "would take the archive over 900 bytes" in refused(there, tmp_path / "a.tar")


def test_a_manifest_is_not_read_before_its_size_is_known(there: Store, tmp_path: Path) -> None:
    """And one that claims more than it brings is refused before any file is read."""
    with (tmp_path / "a.tar").open("wb") as file:
        member = tarfile.TarInfo(f"stages/{A}/{MANIFEST}")
        member.size = archive.MAX_MANIFEST + 1
        file.write(member.tobuf(tarfile.PAX_FORMAT))
        file.truncate(512 + member.size + 4096)
    assert "more than any manifest" in refused(there, tmp_path / "a.tar")
    claim = json.dumps({"files": {"a": {"bytes": 1 << 60, "sha256": ""}}}).encode()
    assert "would take the archive over" in refused(
        there, Tar().add(f"stages/{A}/{MANIFEST}", claim).write(tmp_path / "a.tar")
    )


def test_a_disk_that_fills_up_leaves_nothing(here: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever: while files are written, or with some artifacts already in their place."""
    export(here, everything(here), tmp_path / "a.tar")
    real, calls = os.fsync, 0

    def count(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        real(descriptor)

    monkeypatch.setattr(os, "fsync", count)
    import_(Store(tmp_path / "here" / "other"), tmp_path / "a.tar")
    for at in (1, calls // 2, calls - 2, calls):
        there, left = Store(tmp_path / "here" / str(at)), at

        def fail(descriptor: int) -> None:
            nonlocal left
            left -= 1
            (full if left == 0 else real)(descriptor)

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="No space left on device"):
            import_(there, tmp_path / "a.tar")
        assert contents(there) == {} and list((there.root / "tmp").iterdir()) == []
        monkeypatch.setattr(os, "fsync", real)
        assert len(import_(there, tmp_path / "a.tar").added) == 3


def test_an_artifact_that_a_run_publishes_meanwhile_stays(
    here: Store, there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(here, everything(here), tmp_path / "a.tar")
    real = Store.place

    def place(store: Store, folder: Path, shelf: str, key: str) -> None:
        if folder.is_relative_to(there.root / "tmp") and "import-" in str(folder) and shelf == "stages":
            monkeypatch.setattr(Store, "place", real)
            publish(there, shelf, key)
        real(store, folder, shelf, key)

    monkeypatch.setattr(Store, "place", place)
    done = import_(there, tmp_path / "a.tar")
    assert done.present == [("stages", A)] and len(done.added) == 2 and clean(there)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(["..", ".", "", "stages", A, "a.txt", "tmp", "~", "\\", "\0", "\udcff"]), max_size=6
        ).map("/".join),
        st.text(st.sampled_from("./\\a\0 é\u202e"), max_size=20).map(lambda end: f"stages/{A}/{end}"),
    )
)
def test_no_name_leads_out_of_its_artifact(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    try:
        shelf, key, file = archive._place(archive._Member(name, 0, tarfile.REGTYPE))
    except ArchiveError as error:
        assert "\n" not in str(error)
        return
    folder = Path("/store") / shelf / key
    whole = os.path.normpath(folder / file)
    assert shelf in SHELVES and whole.startswith(f"{folder}/") and whole == str(folder / file)
    assert name == f"{shelf}/{key}/{file}"


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.none() | st.integers(0, 10_240))
def test_a_spoilt_archive_gives_one_error_or_what_was_in_it(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int | None
) -> None:
    folder = tmp_path_factory.mktemp("spoilt")
    store = Store(folder / "there", announce=lambda text: None)
    file = Tar().artifact(files={"a.txt": b"x" * 700, LONG: b"y"}).write(folder / "a.tar")
    data = bytearray(file.read_bytes())
    data[at % len(data)] = byte
    file.write_bytes(data[:cut])
    try:
        import_(store, file)
    except ArchiveError:
        assert everything(store) == []
    else:
        for shelf, key in everything(store):
            assert store.get(shelf, key) is not None
    assert clean(store)


def test_two_names_that_are_one_on_this_file_system_are_refused(
    there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def caseless(path: Path, *arguments: Any, **options: Any) -> Any:
        return real(path.with_name(path.name.lower()), *arguments, **options)

    monkeypatch.setattr(Path, "open", caseless)
    file = Tar().artifact(files={"a.txt": b"one", "A.txt": b"two"}).write(tmp_path / "a.tar")
    assert "A.txt' has the name of another member" in refused(there, file)
