"""A directory of finished artifacts by key, each published whole or not at all.

    <store>/<shelf>/<key>/       an artifact, with manifest.json; the shelves are SHELVES
    <store>/partial/<shelf>-<key>/   saved states of a run that has not ended, artifacts themselves
    <store>/tmp/                 work under way; renamed into place when it is whole
    <store>/leases/              who works on what
    <store>/failed/              why the last run of an artifact failed
    <store>/specs/               the specs that were run; what they need is kept
    <store>/damaged/             what was found broken

An artifact is there when its manifest is: the files are written and synced elsewhere in the same file system, the
manifest last, then one rename. Nothing is ever overwritten. A lease spares two runs the same work and no more: should
both do it, the second rename is refused and the first result stands.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from testbed import leases, phases
from testbed.errors import StoreError
from testbed.leases import Holder, Lease, Watch

MANIFEST = "manifest.json"
# Raise it when an artifact's manifest or layout means something else: what another format wrote is made anew.
FORMAT = 2
SHELVES = ("corpora", "stages", "checkpoints", "evaluations", "probes")

State = Literal["done", "running", "failed", "partial", "missing"]

# Errors that say what a file is, not what this process may or can do: only these are damage.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)


@dataclass(frozen=True)
class Artifact:
    """A published result: its directory and what its manifest says."""

    path: Path
    manifest: dict[str, Any]

    @property
    def summary(self) -> dict[str, Any]:
        """What the run returned."""
        summary: dict[str, Any] = self.manifest["summary"]
        return summary


@dataclass
class Draft:
    """An artifact being made: files go to `out`; `manifest` is written with them when the block ends."""

    out: Path
    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why the last run of an artifact failed."""

    label: str
    # One line for people.
    reason: str
    trace: str
    # UTC, ISO 8601.
    time: str
    host: str
    # Whether the cause lies in the run itself. A full disk or a killed process may be over next time.
    lasting: bool = True
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Remembered:
    """A spec that was run in this store."""

    # `<name>-<digits of its digest>`
    id: str
    path: Path
    # None where the file cannot be read.
    spec: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.id.rpartition("-")[0]


class Store:
    """Artifacts below `root`. Problems that do not stop the work are told to `announce`."""

    def __init__(self, root: str | Path, *, announce: Callable[[str], None] | None = None) -> None:
        self.root = Path(root).expanduser().absolute()
        self.announce = announce or (lambda message: print(message, file=sys.stderr))
        self._read: set[Path] = set()
        self._watch = Watch()

    def path(self, shelf: str, key: str) -> Path:
        return self.root / shelf / key

    def failure_path(self, shelf: str, key: str) -> Path:
        """Where the record of a failure lies."""
        return self.root / "failed" / f"{_flat(shelf, key)}.json"

    def prepare(self) -> None:
        """Make the store's folders and see that they can be written. Raises StoreError."""
        with self._writing():
            for name in ("tmp", "leases"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            probe = self.root / "tmp" / f"probe-{secrets.token_hex(4)}"
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)

    # Reading.

    def get(self, shelf: str, key: str, *, read: bool = True) -> Artifact | None:
        """The artifact, or None where there is none.

        Its files must be there in the size the manifest says and, before they are first read (`read`), with the digest.
        A damaged artifact, and one of another format, is announced, moved aside and never used.
        Raises StoreError where it cannot be read or moved.
        """
        path = self.path(shelf, key)
        if not path.exists():
            return None
        problem, manifest = examine(path, read=read and path not in self._read)
        if problem is None:
            if read:
                self._read.add(path)
            return Artifact(path, manifest)
        self._read.discard(path)
        aside = self.root / "damaged" / f"{_flat(shelf, key)}-{secrets.token_hex(4)}"
        try:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        except FileNotFoundError:
            # Another process was faster.
            return None
        except OSError as error:
            raise StoreError(
                f"The artifact {path} {problem} and cannot be moved aside: {error.strerror}. "
                "Make the store writable or delete that folder."
            ) from error
        self.announce(f"The artifact {path} {problem}. It was moved to {aside} and will be made anew.")
        return None

    def has(self, shelf: str, key: str) -> bool:
        """Whether the artifact is there with files of the right size; touches nothing."""
        return self.path(shelf, key).exists() and self.examine(shelf, key, read=False)[0] is None

    def keys(self, shelf: str) -> list[str]:
        folder = self.root / shelf
        with self._reading():
            return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def examine(self, shelf: str, key: str, *, read: bool = True) -> tuple[str | None, dict[str, Any]]:
        """What is wrong with an artifact, as in "is damaged (...)" (None: nothing), and its manifest; touches nothing.

        read: every byte, not the sizes alone. Raises StoreError where it may not be read.
        """
        return examine(self.path(shelf, key), read=read)

    def state(self, shelf: str, key: str) -> State:
        """How the work on an artifact stands; touches nothing.

        failed: the last run of it raised. partial: a run was stopped and left saved states.
        A process of another machine that died counts as running until this store has watched its lease for long enough.
        """
        if self.has(shelf, key):
            return "done"
        if self.holder(shelf, key) is not None:
            return "running"
        if self.failure(shelf, key) is not None:
            return "failed"
        return "partial" if self.keys(f"partial/{_flat(shelf, key)}") else "missing"

    def holder(self, shelf: str, key: str) -> Holder | None:
        """Who works on an artifact; touches nothing."""
        with self._reading():
            return leases.live(self._lease_path(shelf, key), self._watch)

    def known(self) -> list[tuple[str, str]]:
        """Shelf and key of everything on the shelves, leased, failed or begun, finished or not, in order."""
        found = {(shelf, key) for shelf in SHELVES for key in self.keys(shelf)}
        folders = (("leases", ".json"), ("failed", ".json"), ("partial", ""))
        for folder, ending in folders:
            for path in sorted((self.root / folder).glob(f"*{ending}")):
                if (named := unflat(path.name.removesuffix(ending))) is not None:
                    found.add(named)
        return sorted(found, key=lambda one: (SHELVES.index(one[0]), one[1]))

    # Writing.

    @contextlib.contextmanager
    def publish(self, shelf: str, key: str, *, lease: Lease | None = None) -> Iterator[Draft]:
        """Collect the files of an artifact; when the block ends well they appear whole, else not at all.

        shelf: one of SHELVES, or a folder such as partial/stages-<key>.
        lease: under which the work is done; looked at last before the artifact appears.
        Raises StoreError where the store cannot be written, the artifact is already there or the lease is lost.
        """
        final = self.path(shelf, key)
        with self._writing(lease):
            if final.exists():
                raise StoreError(f"The artifact {final} is already there, and artifacts are never overwritten.")
            # Named after the lease, whose next holder clears it away should this process be killed.
            draft = Draft(self.temporary(lease.name if lease else _flat(shelf, key)))
        try:
            phases.enter("publish: write")
            try:
                yield draft
            except OSError:
                # Whoever took the lease over deleted the folder that was being written.
                if lease is not None:
                    lease.check()
                raise
            phases.enter("publish: seal")
            with self._writing(lease):
                self._seal(draft, key)
                phases.enter("publish: rename")
                if lease is not None:
                    lease.check()
            self.place(draft.out, shelf, key)
            phases.enter("publish: done")
        finally:
            shutil.rmtree(draft.out, ignore_errors=True)

    def temporary(self, name: str) -> Path:
        """A new folder below tmp/, `<name>-<random>`."""
        path = self.root / "tmp" / f"{name}-{secrets.token_hex(4)}"
        with self._writing():
            path.mkdir(parents=True)
        return path

    def place(self, folder: Path, shelf: str, key: str) -> None:
        """Make a synced folder of the same file system the artifact, by one rename; it was not there, or StoreError.

        Where this raises the artifact did not appear (or was taken back at once), and `folder` is where it was.
        """
        final = self.path(shelf, key)
        with self._writing():
            _make(final.parent)
            try:
                # Fails where the other directory exists and holds anything.
                folder.rename(final)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise StoreError(f"The artifact {final} was published by another run meanwhile.") from error
                raise
            try:
                sync(final.parent)
            except OSError:
                final.rename(folder)
                raise
        # It is there whatever an old record says.
        with contextlib.suppress(StoreError):
            self.forgive(shelf, key)

    @contextlib.contextmanager
    def lease(
        self, shelf: str, key: str, *, wait: bool = True, waiting: Callable[[str], None] | None = None
    ) -> Iterator[Lease]:
        """Hold the work on an artifact for the block. What a holder that died left below tmp/ is cleared away.

        wait: while another live process holds it, telling `waiting` once for whom; else leases.Busy is raised.
        A lease is stale when its process is gone from this machine or has not renewed it for two minutes.
        """
        path = self._lease_path(shelf, key)
        with contextlib.ExitStack() as stack:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                guard = path.parent / ".guard"
                held = leases.hold(path, guard=guard, wait=wait, waiting=waiting, watch=self._watch)
                lease = stack.enter_context(held)
                for left in path.parent.glob(f"{path.name}.*"):
                    left.unlink(missing_ok=True)
                for left in (self.root / "tmp").glob(f"{path.stem}-*"):
                    # Not that of a longer name.
                    if not re.fullmatch(r"-[0-9a-f]{8}", left.name.removeprefix(path.stem)):
                        continue
                    # Stopped, not dead, its process may still write there: by another name it cannot publish it.
                    self._shred(left)
            yield lease

    def discard(self, shelf: str, key: str) -> None:
        """Delete an artifact, or with the shelf `partial` all saved states of one; nobody sees half of it.

        Raises StoreError where it cannot be deleted.
        """
        self._read.discard(self.path(shelf, key))
        self.delete(self.path(shelf, key))

    def delete(self, path: Path) -> None:
        """Delete a file or folder of the store, if it is there. Raises StoreError where that is not possible."""
        with self._writing():
            left = self._shred(path)
        if left is not None:
            raise StoreError(f"{path} cannot be deleted: a part of it stays in {left}. Make the store writable.")

    @contextlib.contextmanager
    def folder(self, shelf: str, name: str) -> Iterator[Path]:
        """Fill a folder that may be made anew, such as a report; when the block ends well it replaces the old one.

        Raises ValueError for a name that is not one of a folder right below the shelf: what is there is deleted.
        """
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} cannot name a folder of the store")
        final = self.path(shelf, name)
        with self.lease(shelf, name):
            out = self.temporary(_flat(shelf, name))
            try:
                yield out
                with self._writing():
                    final.parent.mkdir(exist_ok=True)
                    self._shred(final)
                    out.rename(final)
            finally:
                shutil.rmtree(out, ignore_errors=True)

    # Failures and specs.

    def fail(
        self, shelf: str, key: str, *, label: str, reason: str, trace: str, lasting: bool = True,
        versions: Mapping[str, str] | None = None,
    ) -> Path:  # fmt: skip
        """Record that the run of an artifact failed. Raises StoreError where that cannot be written."""
        failure = Failure(
            label=label,
            reason=reason,
            trace=trace,
            time=_now(),
            host=socket.gethostname(),
            lasting=lasting,
            versions=dict(versions or {}),
        )
        path = self.failure_path(shelf, key)
        with self._writing():
            _make(path.parent)
            write_atomic(path, json.dumps(asdict(failure), indent=1) + "\n")
        return path

    def failure(self, shelf: str, key: str) -> Failure | None:
        """Why the last run of an artifact failed; None where none did since it was forgiven or published.

        A record that cannot be read counts as none: the artifact is tried again.
        """
        try:
            return Failure(**json.loads(self.failure_path(shelf, key).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def forgive(self, shelf: str, key: str) -> None:
        """Forget that an artifact failed."""
        with self._writing():
            self.failure_path(shelf, key).unlink(missing_ok=True)

    def remember(self, name: str, spec: dict[str, Any]) -> Path:
        """Keep a spec that is run here: what it needs is no garbage.

        Before a run looks at what is there: a collection that sees the spec deletes nothing of it.
        """
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} cannot name a spec of the store")
        text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = self.root / "specs" / f"{name}-{digest[:8]}.json"
        with self._writing():
            _make(path.parent)
            write_atomic(path, json.dumps(spec, indent=1) + "\n")
        return path

    def remembered(self) -> list[Remembered]:
        """The specs that were run here, by name."""
        found = []
        for path in sorted((self.root / "specs").glob("*.json")):
            spec = None
            with contextlib.suppress(OSError, ValueError):
                spec = json.loads(path.read_text(encoding="utf-8"))
            found.append(Remembered(path.stem, path, spec if isinstance(spec, dict) else None))
        return found

    def _lease_path(self, shelf: str, key: str) -> Path:
        return self.root / "leases" / f"{_flat(shelf, key)}.json"

    def _seal(self, draft: Draft, key: str) -> None:
        """Sync the files, then write the manifest that names them."""
        paths = sorted(draft.out.rglob("*"))
        for path in paths:
            sync(path)
        files = {
            path.relative_to(draft.out).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in paths
            if path.is_file()
        }
        own = {"key": key, "format": FORMAT, "made": _now(), "files": files}
        # As JSON gives it back, so that the digest is the same when it is read.
        manifest = json.loads(json.dumps({**draft.manifest, **own}))
        manifest["sha256"] = _manifest_digest(manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (draft.out / MANIFEST).write_text(text + "\n", encoding="utf-8")
        sync(draft.out / MANIFEST)
        sync(draft.out)

    def _shred(self, path: Path) -> Path | None:
        """Delete a file or folder, by way of a name that nobody uses; returns what stays of it."""
        away = self.root / "tmp" / f"trash-{secrets.token_hex(4)}"
        away.parent.mkdir(exist_ok=True)
        try:
            path.rename(away)
        except FileNotFoundError:
            return None
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away, ignore_errors=True)
        else:
            away.unlink(missing_ok=True)
        return away if away.exists() else None

    @contextlib.contextmanager
    def _writing(self, lease: Lease | None = None) -> Iterator[None]:
        """Errors of the file system as StoreError; as LeaseLost where the lease is: its new holder cleared away."""
        try:
            yield
        except ConnectionError:
            # Of a pipe to whom it is told that this process waits.
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                if lease is not None:
                    lease.check()
            raise self._error(error) from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"The store {self.root} cannot be read: {error.strerror or error}.") from error

    def _error(self, error: OSError) -> StoreError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return StoreError(
            f"The store {self.root} cannot be written: {error.strerror or error}. "
            f"{'Free some space (`testbed store gc`), or give' if full else 'Give'} "
            "another folder with --store DIR or the variable TESTBED_STORE."
        )


def examine(path: Path, *, read: bool) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with an artifact's folder, whose name is its key, as in "is damaged (...)", and its manifest.

    Raises StoreError where it may not be read: that is no damage.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        # Another format may count its digest in another way.
        if (found := manifest.get("format", 1)) != FORMAT:
            return f"was written by another version of the store (format {found}; this one reads {FORMAT})", {}
        return _damage(path, manifest, read), manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"is damaged (its manifest cannot be read: {error})", {}
    except OSError as error:
        if error.errno in _DAMAGE:
            return f"is damaged ({Path(error.filename or path).name} cannot be read: {error.strerror})", {}
        raise StoreError(f"The artifact {path} cannot be read: {error.strerror or error}.") from error


def _damage(path: Path, manifest: dict[str, Any], read: bool) -> str | None:
    if manifest["sha256"] != _manifest_digest(manifest):
        return "is damaged (its manifest differs from its digest)"
    if manifest["key"] != path.name:
        return f"is damaged (it was made as {manifest['key']})"
    for name, entry in manifest["files"].items():
        if not (path / name).is_file():
            return f"is damaged ({name} is missing)"
        if (size := (path / name).stat().st_size) != entry["bytes"]:
            return f"is damaged ({name} has {size} bytes, not {entry['bytes']})"
        if read and _sha256(path / name) != entry["sha256"]:
            return f"is damaged ({name} differs from its digest)"
    return None


def unflat(name: str) -> tuple[str, str] | None:
    """Shelf and key in the name of a lease, failure, folder of saved states or temporary folder; None: of none."""
    for shelf in SHELVES:
        if name.startswith(f"{shelf}-"):
            return shelf, name.removeprefix(f"{shelf}-").partition("-")[0]
    return None


def write_atomic(path: Path, text: str) -> None:
    """Write a file whole or not at all, in the place of an old one. Raises OSError."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        new.write_text(text, encoding="utf-8")
        sync(new)
        new.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders, and need not.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def default_root() -> Path:
    """$TESTBED_STORE, or ./runs."""
    return Path(os.environ.get("TESTBED_STORE") or "runs")


def _flat(shelf: str, key: str) -> str:
    """A name for a file or folder that stands for an artifact; for a saved state of one it starts with that one's."""
    return f"{shelf.rpartition('/')[2]}-{key}"


def _make(folder: Path) -> None:
    """Make a folder and those above it, each on the disk."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """Of everything in a manifest but the digest itself."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
