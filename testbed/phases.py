"""Where a process is, for tests that kill it.

TESTBED_PHASES names a file that gets a line for each phase. TESTBED_PAUSE names a phase that then lasts a second, so
that a kill can land in one that is over in microseconds.
"""

from __future__ import annotations

import os
import time

PAUSE = 1.0


def enter(name: str) -> None:
    """Append `<pid> <monotonic ns> <name>` in one write; nothing where the variable is not set."""
    file = os.environ.get("TESTBED_PHASES")
    if not file:
        return
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{os.getpid()} {time.monotonic_ns()} {name}\n".encode())
    finally:
        os.close(descriptor)
    if os.environ.get("TESTBED_PAUSE") == name:
        time.sleep(PAUSE)
