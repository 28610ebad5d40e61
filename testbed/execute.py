"""Make one node's artifact: find its inputs, run the function of its kind, publish what it wrote."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from testbed.errors import StoreError
from testbed.nodes import Node, shelf, shelf_of_role
from testbed.store import Artifact, Store
from testbed.tracking import Progress, Tracker, WandbRun


class Run(Protocol):
    """Writes files into `out` and returns the summary that the manifest keeps."""

    def __call__(self, node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker) -> dict[str, Any]: ...


# Function of every kind, imported when it is needed: a spec is read and planned without torch.
RUNNERS: Mapping[str, str] = {
    "corpus": "testbed.corpora:run",
    "pretrain": "testbed.training:run",
    "midtrain": "testbed.training:run",
    "sft": "testbed.training:run",
    "rl": "testbed.rl:run",
    "evaluation": "testbed.evaluation:run",
}


def execute(
    node: Node,
    store: Store,
    *,
    report: Callable[[Progress], None] | None = None,
    announce: Callable[[str], None] | None = None,
    runners: Mapping[str, str] = RUNNERS,
    wandb: str | None = None,
) -> Artifact:
    """The node's artifact, made now unless the store has it.

    wandb: name of the project to copy metrics to.
    Raises StoreError where an input is not there; whatever the run raises, nothing is published.
    """
    folder = shelf(node.kind)
    announce = announce or store.announce
    with store.lease(folder, node.key, waiting=lambda text: announce(f"{node.label}: {text}")):
        if (found := store.get(folder, node.key)) is not None:
            return found
        inputs = {role: _input(store, node, role, key) for role, key in node.parents.items()}
        module, _, name = runners[node.kind].partition(":")
        run: Run = getattr(importlib.import_module(module), name)
        with store.publish(folder, node.key) as draft:
            copy = None
            if wandb is not None:
                copy = WandbRun(
                    project=wandb, name=node.label, folder=store.root, config=node.fields, announce=announce
                )
            start = time.perf_counter()
            with Tracker(draft.out, name=node.label, report=report, wandb=copy) as tracker:
                summary = run(node, inputs, draft.out, tracker)
            draft.manifest = {
                "kind": node.kind,
                "name": node.name,
                "fields": node.fields,
                "inputs": node.parents,
                "summary": summary,
                "wall_s": round(time.perf_counter() - start, 3),
                "numeric_class": numeric_class(summary),
                "versions": versions(),
            }
    artifact = store.get(folder, node.key, read=False)
    assert artifact is not None
    return artifact


def _input(store: Store, node: Node, role: str, key: str) -> Path:
    found = store.get(shelf_of_role(role), key)
    if found is None:
        raise StoreError(f"{node.label} needs {role} {key}, which is not in {store.root}; run the spec again.")
    return found.path


def numeric_class(summary: Mapping[str, Any]) -> dict[str, Any]:
    """On equal classes a CPU run gives equal bits. Empty where no torch took part."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    device = str(summary.get("device", "cpu"))
    return {
        "torch": str(torch.__version__),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        # The card, not its number: two kinds of card give different bits.
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "dtype": summary.get("dtype", "float32"),
    }


def versions() -> dict[str, str]:
    """Python, this package and the libraries that are loaded."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        here = version("reasoning-testbed")
    except PackageNotFoundError:
        here = "source"
    libraries = {
        name: str(sys.modules[name].__version__)
        for name in ("torch", "lightning", "numpy", "pandas", "triton")
        if hasattr(sys.modules.get(name), "__version__")
    }
    return {"python": platform.python_version(), "reasoning-testbed": here, **libraries}


def set_threads(threads: int) -> None:
    """Threads of this process' arithmetic. Called before torch is imported, it also makes idle threads sleep."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
