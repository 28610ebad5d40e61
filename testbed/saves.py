"""What is saved of a stage on its way: states to go on from, and the checkpoints that a spec keeps.

    <store>/partial/stages-<key>/<step>/     the last two states of a run that has not ended
    <store>/checkpoints/<key>@<step>/        kept for good

Both are artifacts like any other: whole or not at all, with the digest of every file. A stage goes on from the latest
of either, so that it is not trained twice when a checkpoint of it is there.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed import phases
from testbed.conditions import numeric_class, versions
from testbed.errors import StoreError, UserError
from testbed.leases import Lease
from testbed.nodes import SHELVES, Node, checkpoint_key, shelf
from testbed.store import Artifact, Store
from testbed.tracking import METRICS, Tracker

# Seconds between two saves of a run.
EVERY = 60.0
# States kept: one may turn out damaged.
STATES = 2


class OtherClassError(UserError):
    """A state was saved under another numeric class."""


class Saves:
    """Where one node's run saves and finds its states."""

    def __init__(
        self,
        store: Store,
        node: Node,
        lease: Lease | None = None,
        *,
        every: float = EVERY,
        other_class: bool = False,
        announce: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """other_class: go on from a state of another numeric class; the artifact is marked for it."""
        self.store, self.node, self.lease = store, node, lease
        self.every, self.other_class, self.announce, self._clock = every, other_class, announce, clock
        self._shelf = f"partial/{shelf(node.kind)}-{node.key}"
        self._last = clock()
        # Numeric classes other than its own that a run went through.
        self.crossed: list[dict[str, Any]] = []

    def latest(self, here: dict[str, Any]) -> Artifact | None:
        """The furthest state to go on from; `here` tells device, dtype and devices of this run.

        Damaged states are announced, moved aside and passed over. Raises OtherClassError where the state of a stopped
        run was saved under another numeric class; a checkpoint of another class is passed over.
        """
        own = [(int(key), self._shelf, key) for key in self.store.keys(self._shelf)]
        checkpoints = SHELVES["checkpoint"]
        kept = [
            (int(key.partition("@")[2]), checkpoints, key)
            for key in self.store.keys(checkpoints)
            if key.partition("@")[0] == self.node.stage_key
        ]
        mine = numeric_class(here)
        for step, place, key in sorted([*own, *kept], reverse=True):
            if self.node.step is not None and step > self.node.step:
                continue
            found = self.store.get(place, key)
            if found is None:
                continue
            theirs = found.manifest["numeric_class"]
            if theirs != mine and not self.other_class:
                if place == checkpoints:
                    continue
                raise OtherClassError(_other_class(found, step, theirs, mine))
            crossed = [theirs] if theirs != mine else []
            self.crossed = [*found.manifest.get("crossed", []), *crossed]
            return found
        return None

    def due(self) -> bool:
        return self._clock() - self._last >= self.every

    def save(self, step: int, write: Callable[[Path], dict[str, Any]], tracker: Tracker) -> None:
        """Save the state after `step` steps; `write` fills a folder and returns the summary so far."""
        phases.enter("save: begin")
        if self.lease is not None:
            self.lease.check()
        key = f"{step:09d}"
        if not self.store.has(self._shelf, key):
            self._publish(self._shelf, key, step, write, tracker)
        # The new one is read back before an older one goes.
        if self.store.get(self._shelf, key) is not None:
            for old in self.store.keys(self._shelf)[:-STATES]:
                self.store.discard(self._shelf, old)
        self._last = self._clock()
        phases.enter("save: end")

    def keep(self, step: int, write: Callable[[Path], dict[str, Any]], tracker: Tracker) -> None:
        """Publish the checkpoint after `step` steps, unless it is there."""
        place, key = SHELVES["checkpoint"], checkpoint_key(self.node.stage_key, step)
        for attempt in (1, 2):
            if self.store.get(place, key) is not None:
                return
            try:
                self._publish(place, key, step, write, tracker)
            except StoreError:
                # A run of the checkpoint alone, under a lease of its own, may be first (the bits are the same) or clear
                # away what it takes for a leftover.
                if attempt == 2 and not self.store.has(place, key):
                    raise

    def clear(self) -> None:
        """Forget the states: the artifact is there."""
        with contextlib.suppress(StoreError):
            self.store.discard(*self._shelf.split("/"))

    def manifest(self, summary: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What every artifact of the node says of itself."""
        marked = {"crossed": self.crossed} if self.crossed else {}
        return {
            "kind": self.node.kind,
            "name": self.node.name,
            "fields": self.node.fields,
            "inputs": self.node.parents,
            "summary": summary,
            "numeric_class": numeric_class(summary),
            "versions": versions(),
            "wall_s": round(seconds, 3),
            **marked,
        }

    def _publish(
        self, place: str, key: str, step: int, write: Callable[[Path], dict[str, Any]], tracker: Tracker
    ) -> None:
        with self.store.publish(place, key, lease=self.lease) as draft:
            summary = write(draft.out)
            shutil.copyfile(tracker.path, draft.out / METRICS)
            draft.manifest = self.manifest(summary, tracker.seconds) | {"step": step}
            if place == SHELVES["checkpoint"]:
                draft.manifest |= {"kind": "checkpoint", "name": f"{self.node.name.partition('@')[0]}@{step}"}
                draft.manifest["fields"] = {**self.node.fields, "step": step}


def _other_class(found: Artifact, step: int, theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    differing = [
        f"{name} {theirs.get(name, '(none)')} there and {mine.get(name, '(none)')} here"
        for name in sorted({*theirs, *mine})
        if theirs.get(name) != mine.get(name)
    ]
    return (
        f"a stopped run left its state after {step} steps under other numeric conditions ({'; '.join(differing)}): "
        "going on would give bits that no uninterrupted run has. Run under the same conditions; or give --other-class, "
        f"which marks the result; or delete {found.path.parent} to start it anew."
    )
