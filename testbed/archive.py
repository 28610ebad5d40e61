"""Artifacts in one file, to carry them from one store to another.

    <shelf>/<key>/manifest.json, then its files in order; the next artifact; ...      plain tar, without times or owners

The same artifacts give the same bytes. An archive may come from anywhere: it is read by the few lines below, which know
nothing but plain files and long names, and nothing of it reaches the shelves before all of it was found whole.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from testbed.errors import StoreError
from testbed.store import MANIFEST, SHELVES, Store, examine, sync

BLOCK = 512
# Larger manifests and headers are not of this project.
MAX_MANIFEST = 64 << 20
MAX_HEADER = 16 << 10
CHUNK = 1 << 20
KEY = re.compile(r"[0-9A-Za-z]{1,64}(@[0-9]{1,12})?")
# First bytes of what is often taken for a tar.
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03": "zip"}


class ArchiveError(StoreError):
    """An archive that cannot be written or is not taken in."""


@dataclass(frozen=True)
class Imported:
    """Shelf and key of what an archive brought, and of what the store had already."""

    added: list[tuple[str, str]]
    present: list[tuple[str, str]]


def export(store: Store, artifacts: Sequence[tuple[str, str]], file: Path) -> int:
    """Write artifacts (shelf and key) into a tar and return its bytes; every byte is checked first.

    Raises ArchiveError where one is not there or damaged, or the file cannot be written; an old file then stays.
    """
    order = sorted(set(artifacts), key=lambda one: (SHELVES.index(one[0]), one[1]))
    for shelf, key in order:
        if not store.path(shelf, key).exists():
            raise ArchiveError(f"There is no artifact {shelf}/{key} in {store.root}; nothing was exported.")
        problem, _ = store.examine(shelf, key)
        if problem is not None:
            raise ArchiveError(f"The artifact {store.path(shelf, key)} {problem}; nothing was exported.")
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        with tarfile.open(new, "w", format=tarfile.PAX_FORMAT) as tar:
            for shelf, key in order:
                for name in (MANIFEST, *sorted(store.examine(shelf, key, read=False)[1]["files"])):
                    _add(tar, store.path(shelf, key) / name, f"{shelf}/{key}/{name}")
        sync(new)
        size = new.stat().st_size
        new.replace(file)
        sync(file.absolute().parent)
        return size
    except OSError as error:
        raise ArchiveError(f"{file} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def import_(store: Store, file: Path, *, max_bytes: int | None = None) -> Imported:
    """Take in the artifacts of a tar that `export` wrote: all that the store does not have, or none.

    max_bytes: of all files together; None: nine tenths of what the disk has free.
    Raises ArchiveError, naming the member, for whatever `export` does not write; StoreError where the store cannot be
    written. Either way nothing of the archive remains.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Before the store's folders are made: a wrong name makes none.
            source = stack.enter_context(file.open("rb"))
        except OSError as error:
            raise _failed(store, file, error) from error
        store.prepare()
        if max_bytes is None:
            max_bytes = shutil.disk_usage(store.root).free * 9 // 10
        token = secrets.token_hex(4)
        # The lease tells a collection that the folder is in use.
        stack.enter_context(store.lease("import", token))
        out = store.temporary(f"import-{token}")
        stack.callback(shutil.rmtree, out, ignore_errors=True)
        reader = _Reader(store, out, max_bytes)
        try:
            reader.read(source)
        except OSError as error:
            raise _failed(store, file, error) from error
        return _publish(store, out, reader)


def _failed(store: Store, file: Path, error: OSError) -> ArchiveError:
    return ArchiveError(
        f"Reading {file} into {store.root} failed: {error.strerror or error}. Nothing of it was imported."
    )


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    member = tarfile.TarInfo(name)
    with path.open("rb") as file:
        member.size = path.stat().st_size
        tar.addfile(member, file)


def _publish(store: Store, out: Path, reader: _Reader) -> Imported:
    placed: list[tuple[str, str]] = []
    try:
        for shelf, key in reader.arriving:
            try:
                store.place(out / shelf / key, shelf, key)
                placed.append((shelf, key))
            except StoreError:
                # Published by a run meanwhile: that one stays.
                if not store.has(shelf, key):
                    raise
                reader.present.append((shelf, key))
    except BaseException:
        for shelf, key in placed:
            store.discard(shelf, key)
        raise
    return Imported(placed, reader.present)


@dataclass
class _Member:
    name: str
    size: int
    # Of its header.
    kind: bytes


@dataclass
class _Arrival:
    """An artifact whose manifest was read."""

    files: dict[str, int]
    # Whether the store lacks it, so that its files are kept.
    new: bool
    seen: set[str] = field(default_factory=set)


class _Reader:
    """Reads an archive once, from front to back, and fills `out` with the artifacts that the store lacks."""

    def __init__(self, store: Store, out: Path, max_bytes: int) -> None:
        self.store, self.out, self.left = store, out, max_bytes
        self.max_bytes = max_bytes
        self._arrivals: dict[tuple[str, str], _Arrival] = {}
        self.arriving: list[tuple[str, str]] = []
        self.present: list[tuple[str, str]] = []

    def read(self, source: IO[bytes]) -> None:
        """Raises ArchiveError for anything that is not as `export` writes it."""
        for member in _members(source):
            shelf, key, name = _place(member)
            if name == MANIFEST:
                self._manifest(source, member, shelf, key)
            else:
                self._file(source, member, shelf, key, name)
            _exactly(source, -member.size % BLOCK, member.name)
        for (shelf, key), arrival in self._arrivals.items():
            if absent := sorted(arrival.files.keys() - arrival.seen):
                raise ArchiveError(f"The archive lacks {shelf}/{key}/{absent[0]}, which its manifest names.")
            if arrival.new:
                self._verify(shelf, key)

    def _manifest(self, source: IO[bytes], member: _Member, shelf: str, key: str) -> None:
        if (shelf, key) in self._arrivals:
            raise _error(member, "is there twice")
        if member.size > MAX_MANIFEST:
            raise _error(member, f"has {member.size} bytes, more than any manifest")
        text = _exactly(source, member.size, member.name)
        files = _files(text, member)
        # What is damaged here is moved aside, so that the archive mends it.
        new = self.store.get(shelf, key) is None
        self._arrivals[shelf, key] = _Arrival(files, new)
        (self.arriving if new else self.present).append((shelf, key))
        if new:
            self._count(member, member.size)
            self._count(member, sum(files.values()), spend=False)
            self._write(member, shelf, key, MANIFEST, iter([text]))

    def _file(self, source: IO[bytes], member: _Member, shelf: str, key: str, name: str) -> None:
        arrival = self._arrivals.get((shelf, key))
        if arrival is None:
            raise _error(member, "comes before its artifact's manifest")
        if name not in arrival.files:
            raise _error(member, "is not in its artifact's manifest")
        if name in arrival.seen:
            raise _error(member, "is there twice")
        if member.size != arrival.files[name]:
            raise _error(member, f"has {member.size} bytes, and its manifest says {arrival.files[name]}")
        arrival.seen.add(name)
        chunks = _chunks(source, member)
        if arrival.new:
            self._count(member, member.size)
            self._write(member, shelf, key, name, chunks)
        else:
            for _ in chunks:
                pass

    def _count(self, member: _Member, size: int, *, spend: bool = True) -> None:
        if size > self.left:
            raise _error(member, f"would take the archive over {self.max_bytes} bytes, which is all it may bring")
        self.left -= size if spend else 0

    def _write(self, member: _Member, shelf: str, key: str, name: str, chunks: Iterator[bytes]) -> None:
        path = self.out / shelf / key / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Where the file system takes two names for one, the second fails.
            file = path.open("xb")
        except (FileExistsError, NotADirectoryError) as error:
            raise _error(member, "has the name of another member or of a folder of one") from error
        with file:
            for chunk in chunks:
                file.write(chunk)

    def _verify(self, shelf: str, key: str) -> None:
        folder = self.out / shelf / key
        problem, _ = examine(folder, read=True)
        if problem is not None:
            raise ArchiveError(f"{shelf}/{key} in the archive {problem}.")
        for path in [*sorted(folder.rglob("*")), folder]:
            sync(path)


def _members(source: IO[bytes]) -> Iterator[_Member]:
    """Every member, its header read and its bytes still to be read by the caller, padding included."""
    first = True
    while True:
        name, size, block = None, None, _block(source, first)
        header = _header(block, first)
        first = False
        if header is None:
            # The end is two empty blocks.
            if _block(source, False).strip(b"\0"):
                raise ArchiveError("The archive has an empty block between its members.")
            return
        if header.kind == tarfile.XHDTYPE:
            if header.size > MAX_HEADER:
                raise _error(header, f"has a header of {header.size} bytes")
            records = _records(_exactly(source, header.size, header.name), header)
            _exactly(source, -header.size % BLOCK, header.name)
            name, size = records.get("path"), records.get("size")
            header = _header(_block(source, False), False)
            if header is None:
                raise ArchiveError("The archive is cut off after an extended header.")
        member = _Member(name or header.name, header.size if size is None else _number(size, header), header.kind)
        if member.kind not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise _error(member, f"is {KINDS.get(member.kind, 'no plain file')}; only plain files are taken")
        if member.size < 0:
            raise _error(member, "has a negative size")
        yield member


KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


def _header(block: bytes, first: bool) -> _Member | None:
    """What a header block says; None for an empty block."""
    if not block.strip(b"\0"):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        if not first:
            raise ArchiveError(f"The archive is damaged: {error}, where a member should begin.") from error
        packed = next((how for start, how in COMPRESSED.items() if block.startswith(start)), None)
        what = f"compressed ({packed}): unpack it first" if packed else "no tar archive"
        raise ArchiveError(
            f"The file is {what}; a plain tar, as `testbed store export` writes it, is expected."
        ) from error
    return _Member(info.name, info.size, info.type)


def _records(text: bytes, member: _Member) -> dict[str, str]:
    """`<length> <field>=<value>\\n` of an extended header; nothing but names and sizes is known here."""
    records: dict[str, str] = {}
    while text:
        length, _, _ = text.partition(b" ")
        if not re.fullmatch(rb"[0-9]{1,6}", length) or not 0 < int(length) <= len(text):
            raise _error(member, "has an extended header that cannot be read")
        record, text = text[: int(length)], text[int(length) :]
        name, equals, value = record[len(length) + 1 :].partition(b"=")
        if name not in (b"path", b"size") or not equals or not value.endswith(b"\n"):
            raise _error(member, f"has an extended header with {name[:40].decode(errors='replace')!r} in it")
        records[name.decode()] = value[:-1].decode("utf-8", "surrogateescape")
    return records


def _number(text: str, member: _Member) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise _error(member, "has a size that is no number")
    return int(text)


def _place(member: _Member) -> tuple[str, str, str]:
    """Shelf, key and file of a member. Raises ArchiveError for a name that could lead anywhere else."""
    shelf, _, rest = member.name.partition("/")
    key, _, name = rest.partition("/")
    if shelf not in SHELVES or not KEY.fullmatch(key) or not _plain(name):
        raise _error(member, f"is no file of an artifact: <shelf>/<key>/<file> with a shelf of {', '.join(SHELVES)}")
    return shelf, key, name


def _plain(name: str) -> bool:
    """Whether a name leads to a file below its folder on every system."""
    parts = name.split("/")
    return (
        name.isprintable()
        and "\\" not in name
        and len(parts) <= 16
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    )


def _files(text: bytes, member: _Member) -> dict[str, int]:
    """Bytes of every file that a manifest names."""
    try:
        files: dict[str, Any] = json.loads(text)["files"]
        sizes = {name: entry["bytes"] for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _error(member, "is no manifest") from error
    for name, size in sizes.items():
        if not _plain(name) or name == MANIFEST or type(size) is not int or size < 0:
            raise _error(member, f"names a file {name[:100]!r} that no artifact has")
    return sizes


def _chunks(source: IO[bytes], member: _Member) -> Iterator[bytes]:
    left = member.size
    while left:
        chunk = _exactly(source, min(left, CHUNK), member.name)
        left -= len(chunk)
        yield chunk


def _exactly(source: IO[bytes], size: int, name: str) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise ArchiveError(f"The archive is cut off within {_shown(name)}.")
    return data


def _block(source: IO[bytes], first: bool) -> bytes:
    block = source.read(BLOCK)
    if len(block) == BLOCK or (first and block):
        # A short file is judged by its first bytes.
        return block.ljust(BLOCK, b"\0") if first else block
    raise ArchiveError("The file is empty." if first else "The archive is cut off: its end is missing.")


def _error(member: _Member, what: str) -> ArchiveError:
    return ArchiveError(f"The archive is refused: its member {_shown(member.name)} {what}. Nothing of it was imported.")


def _shown(name: str) -> str:
    """A member's name for a message: of one line, and not endless."""
    return ascii(name if len(name) <= 120 else name[:120] + "...")
