"""What this machine has, and what that means for a run."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from testbed.errors import StoreError
from testbed.machine import cores
from testbed.store import Store

# Core-minutes of `testbed run quickstart` on the machine where `speed` gave the second number.
QUICKSTART = (24.0, 73.0)
# Memory of one worker at the sizes a CPU trains, in GiB.
WORKER_GIB = 1.4
LIBRARIES = ("torch", "lightning", "numpy", "pandas", "pyarrow", "scipy", "pydantic", "triton", "wandb")


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what there is and what it means; `ok` is False where it stands in the way."""

    what: str
    found: str
    means: str
    ok: bool = True


def examine(root: Path) -> Iterator[Finding]:
    """Look at the machine; takes about a second. Nothing is left behind."""
    import psutil
    import torch

    count = cores()
    yield Finding("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}", "")
    yield Finding("cores", f"{count} usable of {os.cpu_count()}", f"{count} worker{'s' * (count > 1)}, one thread each")
    rate = speed()
    minutes = QUICKSTART[0] * QUICKSTART[1] / rate / count
    yield Finding("speed", f"{rate:.0f} GFLOP/s a core", f"`testbed run quickstart` takes about {minutes:.0f} minutes")
    policy, threads = (os.environ.get(name, "not set") for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"))
    yield Finding(
        "threads",
        f"OMP_NUM_THREADS {threads}, OMP_WAIT_POLICY {policy}",
        "`testbed run` sets both for its workers; set them yourself for scripts that run side by side",
    )
    yield from _gpus(torch.cuda.is_available())
    memory = psutil.virtual_memory().available / 2**30
    enough = memory > WORKER_GIB * count
    few = max(1, int(memory / WORKER_GIB))
    means = f"enough for {count} worker{'s' * (count > 1)}" if enough else f"use --workers {few}"
    yield Finding("memory", f"{memory:.1f} GiB available", means, ok=enough)
    yield _store(root)
    installed = {name: _version(name) for name in LIBRARIES}
    present = ", ".join(f"{name} {found}" for name, found in installed.items() if found)
    absent = ", ".join(name for name, found in installed.items() if not found)
    yield Finding("libraries", present, f"without {absent} (optional)" if absent else "")


def speed(seconds: float = 0.3) -> float:
    """GFLOP/s of one thread on matrix products of a small model's shape."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(4096, 64), torch.ones(64, 176)
        torch.mm(a, b)
        start, times = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            torch.mm(a, b)
            times += 1
        return 2 * 4096 * 64 * 176 * times / (time.perf_counter() - start) / 1e9
    finally:
        torch.set_num_threads(before)


def _gpus(available: bool) -> Iterator[Finding]:
    if not available:
        yield Finding("GPU", "none", "models up to about 1M parameters train in minutes on the CPU")
        return
    import torch

    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        yield Finding("GPU", f"{device.name}, {device.total_memory / 2**30:.0f} GiB", f"CUDA {torch.version.cuda}")


def _store(root: Path) -> Finding:
    root = root.expanduser().absolute()
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB free"
    try:
        # Permissions alone do not tell: a file system may be read-only.
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError:
        return Finding("store", f"{root}, {free}", "cannot be written; use --store DIR or TESTBED_STORE", ok=False)
    if not root.exists():
        return Finding("store", f"{root}, {free}", "will be made by the first run")
    try:
        Store(root).prepare()
    except StoreError as error:
        return Finding("store", f"{root}, {free}", str(error), ok=False)
    counts = ", ".join(f"{len(Store(root).keys(shelf))} {shelf}" for shelf in ("corpora", "stages", "evaluations"))
    return Finding("store", f"{root}, {free}", f"holds {counts}")


def _version(name: str) -> str:
    try:
        return str(sys.modules[name].__version__) if name in sys.modules else version(name)
    except (PackageNotFoundError, AttributeError):
        return ""
