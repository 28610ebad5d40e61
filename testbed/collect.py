"""Find and delete what no spec needs.

A collection never takes what is needed, nor what a live lease holds, and looks at the lease again right before each
deletion. Runs remember their spec before they look at what is there: where a spec was remembered after the plan was
made, no more artifacts are deleted by that plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from testbed.leases import Busy
from testbed.store import SHELVES, Store, unflat

Kind = Literal["artifact", "partial", "temporary", "damaged", "failure"]


@dataclass(frozen=True)
class Item:
    """A file or folder that may go."""

    kind: Kind
    path: Path
    bytes: int
    # Shelf and key of the lease under which it may go; None: nobody can need it.
    work: tuple[str, str] | None


@dataclass(frozen=True)
class Garbage:
    """What a store can do without."""

    store: Store
    items: tuple[Item, ...]
    # Why artifacts stay although they are not needed; empty where none do.
    note: str
    # The specs that were remembered when it was planned.
    specs: frozenset[str]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def by_kind(self) -> dict[Kind, list[Item]]:
        kinds: dict[Kind, list[Item]] = {}
        for item in self.items:
            kinds.setdefault(item.kind, []).append(item)
        return kinds


def plan_gc(store: Store, needed: Set[tuple[str, str]]) -> Garbage:
    """What can go; touches nothing.

    needed: shelf and key of everything in the graphs of all remembered specs, which the store alone cannot know. What
    an artifact was made from is not needed for it once it is finished.
    """
    specs = frozenset(one.id for one in store.remembered())
    items = [item for item in _found(store, needed) if not _held(store, item.work)]
    note = ""
    for shelf, key in store.known():
        if (shelf, key) not in needed and (holder := store.holder(shelf, key)) is not None:
            note = (
                f"{holder} makes {shelf}/{key}, which no remembered spec names. What it reads cannot be known, so all "
                "artifacts and saved states stay."
            )
            items = [item for item in items if item.kind not in ("artifact", "partial")]
            break
    return Garbage(store, tuple(items), note, specs)


def collect(garbage: Garbage) -> list[Item]:
    """Delete what was planned and is still nobody's; returns what was deleted. Raises StoreError."""
    store, deleted = garbage.store, []
    for item in garbage.items:
        with contextlib.suppress(Busy), contextlib.ExitStack() as stack:
            for shelf, key in _leases(item.work):
                stack.enter_context(store.lease(shelf, key, wait=False))
            if item.kind in ("artifact", "partial") and not _same(store, garbage):
                continue
            store.delete(item.path)
            deleted.append(item)
    return deleted


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder. What vanishes meanwhile counts nothing."""
    total = 0
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += one.lstat().st_size if one.is_symlink() or one.is_file() else 0
    return total


def _found(store: Store, needed: Set[tuple[str, str]]) -> Iterator[Item]:
    for shelf in SHELVES:
        for key in store.keys(shelf):
            if (shelf, key) not in needed:
                yield _item("artifact", store.path(shelf, key), (shelf, key))
    for path in _inside(store.root / "partial"):
        work = unflat(path.name)
        if work is not None and (work not in needed or store.has(*work)):
            yield _item("partial", path, work)
    for path in _inside(store.root / "tmp"):
        # Of folders without a shelf, such as a report's, the name before the last `-` is that of their lease.
        shelf, _, name = path.name.rpartition("-")[0].partition("-")
        yield _item("temporary", path, unflat(path.name) or ((shelf, name) if name else None))
    for path in _inside(store.root / "damaged"):
        yield _item("damaged", path, None)
    for path in _inside(store.root / "failed"):
        work = unflat(path.stem)
        if work is not None and work not in needed:
            yield _item("failure", path, work)


def _item(kind: Kind, path: Path, work: tuple[str, str] | None) -> Item:
    return Item(kind, path, size(path), work)


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _leases(work: tuple[str, str] | None) -> list[tuple[str, str]]:
    """Under which an artifact is made, or read to go on from: a checkpoint under its stage's too."""
    if work is None:
        return []
    shelf, key = work
    stage = [("stages", key.partition("@")[0])] if shelf == "checkpoints" else []
    return [work, *stage]


def _held(store: Store, work: tuple[str, str] | None) -> bool:
    return any(store.holder(*one) is not None for one in _leases(work))


def _same(store: Store, garbage: Garbage) -> bool:
    """Whether no spec was remembered since the plan."""
    return {one.id for one in store.remembered()} <= garbage.specs
