"""A directory of finished artifacts by key, each published whole or not at all.

    <store>/stages/<key>/        a stage, with manifest.json; likewise corpora/ and evaluations/
    <store>/tmp/                 work under way; renamed into place when it is whole
    <store>/leases/              who works on what
    <store>/damaged/, failed/    what was found broken; tracebacks

An artifact is there when its manifest is: the files are written and synced elsewhere in the same file system, the
manifest last, then one rename. Nothing is ever overwritten. A lease spares two runs the same work and no more: should
both do it, the second rename is refused and the first result stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.errors import StoreError

MANIFEST = "manifest.json"
# A lease whose holder has not renewed it for this long (seconds) is broken.
STALE_AFTER = 120.0
RENEW_EVERY = 10.0


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


class Store:
    """Artifacts below `root`. Problems that do not stop the work are told to `announce`."""

    def __init__(self, root: str | Path, *, announce: Callable[[str], None] | None = None) -> None:
        self.root = Path(root).expanduser().absolute()
        self.announce = announce or (lambda message: print(message, file=sys.stderr))
        self._read: set[Path] = set()

    def path(self, shelf: str, key: str) -> Path:
        return self.root / shelf / key

    def prepare(self) -> None:
        """Make the store's folders and see that they can be written. Raises StoreError."""
        try:
            for name in ("tmp", "leases"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            probe = self.root / "tmp" / f"probe-{secrets.token_hex(4)}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise self._error(error) from error

    def get(self, shelf: str, key: str, *, read: bool = True) -> Artifact | None:
        """The artifact, or None where there is none.

        Its files must be there in the size the manifest says and, before they are first read (`read`), with the digest.
        A damaged artifact is announced, moved aside and never used.
        """
        path = self.path(shelf, key)
        if not path.exists():
            return None
        problem, manifest = self._problem(path, read=read)
        if problem is None:
            return Artifact(path, manifest)
        aside = self.root / "damaged" / f"{shelf}-{key}-{secrets.token_hex(4)}"
        try:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        except OSError as error:
            raise StoreError(
                f"The artifact {path} is damaged ({problem}) and cannot be moved aside: {error.strerror}. "
                "Make the store writable or delete that folder."
            ) from error
        self.announce(f"The artifact {path} is damaged ({problem}). It was moved to {aside} and will be made anew.")
        return None

    def has(self, shelf: str, key: str) -> bool:
        """Whether the artifact is there with files of the right size; touches nothing."""
        path = self.path(shelf, key)
        return path.exists() and self._problem(path, read=False)[0] is None

    def keys(self, shelf: str) -> list[str]:
        folder = self.root / shelf
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    @contextlib.contextmanager
    def publish(self, shelf: str, key: str) -> Iterator[Draft]:
        """Collect the files of an artifact; when the block ends well they appear whole, else not at all.

        Raises StoreError where the store cannot be written or the artifact is already there.
        """
        final = self.path(shelf, key)
        if final.exists():
            raise StoreError(f"The artifact {final} is already there, and artifacts are never overwritten.")
        draft = Draft(self.root / "tmp" / f"{shelf}-{key}-{secrets.token_hex(4)}")
        try:
            draft.out.mkdir(parents=True)
        except OSError as error:
            raise self._error(error) from error
        try:
            yield draft
            try:
                self._seal(draft, key)
                final.parent.mkdir(exist_ok=True)
                # Fails where the other directory exists and holds anything.
                draft.out.rename(final)
                _sync(final.parent)
            except OSError as error:
                if final.exists():
                    raise StoreError(f"The artifact {final} was published by another run meanwhile.") from error
                raise self._error(error) from error
        finally:
            shutil.rmtree(draft.out, ignore_errors=True)

    @contextlib.contextmanager
    def lease(self, shelf: str, key: str, *, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the work on an artifact; waits while another live process holds it.

        A lease is stale when its process is gone from this host or has not renewed it for two minutes.
        """
        path = self.root / "leases" / f"{shelf}-{key}.json"
        told = False
        while not _take(path):
            holder = _holder(path)
            if holder is None:
                continue
            if _stale(path, holder):
                # Only the lease that was judged may go; the rename lets one breaker through.
                broken = path.with_suffix(f".{secrets.token_hex(4)}")
                with contextlib.suppress(OSError):
                    path.rename(broken)
                    if _holder(broken) != holder:
                        os.link(broken, path)
                    broken.unlink()
                continue
            if waiting is not None and not told:
                waiting(f"waiting for process {holder['pid']} on {holder['host']}, which works on the same")
                told = True
            time.sleep(1.0)
        stop = threading.Event()
        thread = threading.Thread(target=_renew, args=(path, stop), daemon=True)
        thread.start()
        try:
            for left in (self.root / "tmp").glob(f"{shelf}-{key}-*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            stop.set()
            thread.join()
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def folder(self, shelf: str, name: str) -> Iterator[Path]:
        """Fill a folder that may be made anew, such as a report; when the block ends well it replaces the old one.

        Raises ValueError for a name that is not one of a folder right below the shelf: what is there is deleted.
        """
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} cannot name a folder of the store")
        out, final = self.root / "tmp" / f"{shelf}-{name}-{secrets.token_hex(4)}", self.root / shelf / name
        try:
            out.mkdir(parents=True)
            yield out
            final.parent.mkdir(exist_ok=True)
            if final.exists():
                shutil.rmtree(final)
            out.rename(final)
        except OSError as error:
            raise self._error(error) from error
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def fail(self, shelf: str, key: str, text: str) -> Path:
        """Keep the traceback of a failed run beside the artifacts."""
        path = self.root / "failed" / f"{shelf}-{key}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def _problem(self, path: Path, *, read: bool) -> tuple[str | None, dict[str, Any]]:
        """What is wrong with a published directory, and its manifest."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            files = manifest["files"]
            if manifest["sha256"] != _manifest_digest(manifest):
                return "its manifest differs from its digest", {}
            if manifest["key"] != path.name:
                return f"it was made as {manifest['key']}", {}
            for name, entry in files.items():
                if not (path / name).is_file():
                    return f"{name} is missing", {}
                if (size := (path / name).stat().st_size) != entry["bytes"]:
                    return f"{name} has {size} bytes, not {entry['bytes']}", {}
                if read and path not in self._read and _sha256(path / name) != entry["sha256"]:
                    return f"{name} differs from its digest", {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its manifest cannot be read: {error}", {}
        if read:
            self._read.add(path)
        return None, manifest

    def _seal(self, draft: Draft, key: str) -> None:
        paths = sorted(path for path in draft.out.rglob("*") if path.is_file())
        for path in paths:
            _sync(path)
        files = {
            path.relative_to(draft.out).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in paths
        }
        # As JSON gives it back, so that the digest is the same when it is read.
        manifest = json.loads(json.dumps({**draft.manifest, "key": key, "files": files}))
        manifest["sha256"] = _manifest_digest(manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (draft.out / MANIFEST).write_text(text + "\n", encoding="utf-8")
        _sync(draft.out / MANIFEST)
        _sync(draft.out)

    def _error(self, error: OSError) -> StoreError:
        return StoreError(
            f"The store {self.root} cannot be written: {error.strerror or error}. "
            "Give another folder with --store DIR or the variable TESTBED_STORE."
        )


def default_root() -> Path:
    """$TESTBED_STORE, or ./runs."""
    return Path(os.environ.get("TESTBED_STORE") or "runs")


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """Of everything in a manifest but the digest itself."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take(path: Path) -> bool:
    """Create the lease whole (write, then link), so that nobody reads half of one."""
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "token": secrets.token_hex(8)})
    new = path.with_suffix(f".{secrets.token_hex(4)}")
    new.write_text(text, encoding="utf-8")
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink()
    return True


def _holder(path: Path) -> dict[str, Any] | None:
    try:
        holder: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return holder


def _stale(path: Path, holder: dict[str, Any]) -> bool:
    try:
        if time.time() - path.stat().st_mtime > STALE_AFTER:
            return True
    except FileNotFoundError:
        return False
    return holder["host"] == socket.gethostname() and not _alive(holder["pid"])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(RENEW_EVERY):
        with contextlib.suppress(OSError):
            os.utime(path)
