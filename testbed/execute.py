"""Make one node's artifact: find its inputs, run the function of its kind, publish what it wrote."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from testbed import saves as saving
from testbed.errors import StoreError
from testbed.nodes import Node, shelf, shelf_of_input
from testbed.saves import Saves
from testbed.store import Artifact, Store
from testbed.tracking import Progress, Tracker, WandbRun


class Run(Protocol):
    """Writes files into `out` and returns the summary that the manifest keeps."""

    def __call__(
        self, node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None
    ) -> dict[str, Any]: ...


# Function of every kind, imported when it is needed: a spec is read and planned without torch. A checkpoint is made by
# that of its stage.
RUNNERS: Mapping[str, str] = {
    "corpus": "testbed.corpora:run",
    "pretrain": "testbed.training:run",
    "midtrain": "testbed.training:run",
    "sft": "testbed.training:run",
    "rl": "testbed.rl:run",
    "combine": "testbed.combining:run_combine",
    "parallel": "testbed.combining:run_parallel",
    "evaluation": "testbed.evaluation:run",
    "probe": "testbed.probes:run",
}
# Of those, what several processes can train together.
TOGETHER = ("pretrain", "midtrain", "sft", "rl", "parallel")


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """How nodes are run; nothing of it is part of a key."""

    # Of the spec, for the grouping of copied metrics.
    group: str = ""
    # Name of the wandb project to copy metrics to.
    wandb: str | None = None
    # Seconds between two saves of a stage.
    save_every: float = saving.EVERY
    # Go on from states of another numeric class; the results are marked.
    other_class: bool = False
    # Processes that train one stage together.
    devices: int = 1


def execute(
    node: Node,
    store: Store,
    *,
    report: Callable[[Progress], None] | None = None,
    announce: Callable[[str], None] | None = None,
    runners: Mapping[str, str] = RUNNERS,
    conduct: Conduct = Conduct(),
    wait: bool = True,
    found: Callable[[], None] = lambda: None,
) -> Artifact:
    """The node's artifact, made now unless the store has it, which `found` is told.

    wait: until another process that works on it has finished; else Busy is raised.
    Raises StoreError where an input is not there; whatever the run raises, nothing is published.
    """
    folder = shelf(node.kind)
    announce = announce or store.announce
    with store.lease(folder, node.key, wait=wait, waiting=lambda text: announce(f"{node.label}: {text}")) as lease:
        if (there := store.get(folder, node.key)) is not None:
            found()
            return there
        inputs = {role: _input(store, node, role, key) for role, key in node.parents.items()}
        module, _, name = runners[_runner(node)].partition(":")
        run: Run = getattr(importlib.import_module(module), name)
        saves = Saves(store, node, lease, every=conduct.save_every, other_class=conduct.other_class, announce=announce)
        try:
            with (
                store.publish(folder, node.key, lease=lease) as draft,
                _tracked(node, store, draft.out, report, announce, conduct) as tracker,
            ):
                with _ranks(node, inputs, runners[_runner(node)], _devices(node, conduct)):
                    summary = run(node, inputs, draft.out, tracker, saves)
                draft.manifest = saves.manifest(summary, tracker.seconds)
                if node.step is not None:
                    draft.manifest["step"] = node.step
        except StoreError:
            # Somebody else may have published it meanwhile: an import, or who took over a lease that was lost.
            if not store.has(folder, node.key):
                raise
        saves.clear()
    artifact = store.get(folder, node.key, read=False)
    assert artifact is not None
    return artifact


def _tracked(
    node: Node,
    store: Store,
    out: Path,
    report: Callable[[Progress], None] | None,
    announce: Callable[[str], None],
    conduct: Conduct,
) -> Tracker:
    copy = None
    if conduct.wandb is not None:
        copy = WandbRun(
            project=conduct.wandb, name=node.label, folder=store.root, config=node.fields, announce=announce,
            key=node.key, group=conduct.group,
        )  # fmt: skip
    return Tracker(out, name=node.label, report=report, wandb=copy, devices=_devices(node, conduct))


def _devices(node: Node, conduct: Conduct) -> int:
    """Processes that a node is run in: several for stages of many steps alone."""
    return conduct.devices if _runner(node) in TOGETHER else 1


def _ranks(node: Node, inputs: Mapping[str, Path], run: str, devices: int) -> AbstractContextManager[None]:
    """The other processes that train the node, where several are to."""
    if devices == 1:
        return nullcontext()
    from testbed.ranks import together

    return together(devices, run, node, inputs)


def _runner(node: Node) -> str:
    return str(node.fields["kind"]) if node.kind == "checkpoint" else node.kind


def _input(store: Store, node: Node, role: str, key: str) -> Path:
    found = store.get(shelf_of_input(role, key), key)
    if found is None:
        raise StoreError(f"{node.label} needs {role} {key}, which is not in {store.root}; run the spec again.")
    return found.path


def set_threads(threads: int) -> None:
    """Threads of this process' arithmetic. Called before torch is imported, it also makes idle threads sleep."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
