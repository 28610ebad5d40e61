"""Under which conditions an artifact is made: its numeric class and the versions of what made it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any


def numeric_class(summary: Mapping[str, Any]) -> dict[str, Any]:
    """On equal classes a CPU run gives equal bits. Empty where no torch took part.

    summary: device, dtype and devices of the run, where it told them.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    device = str(summary.get("device", "cpu"))
    return {
        "torch": str(torch.__version__),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        # The card, not its number: two kinds of card give different bits.
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device.partition(":")[0],
        "dtype": summary.get("dtype", "float32"),
        "devices": summary.get("devices", 1),
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
