"""What this machine offers a run."""

from __future__ import annotations

import math
import os
from pathlib import Path


def cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its container."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count
