"""Stopping at a safe place: SIGTERM and SIGINT ask for it, long work looks and leaves when what it has is saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_asked = threading.Event()


class Stopped(Exception):
    """Work left before its end because it was asked to; what it saved is taken up by the next run."""


def ask() -> None:
    _asked.set()


def asked() -> bool:
    return _asked.is_set()


def check() -> None:
    """Leave here if asked to. Raises Stopped."""
    if asked():
        raise Stopped


@contextlib.contextmanager
def heeded(then: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """While this lasts the first SIGINT or SIGTERM asks to stop and calls `then`; a second SIGINT interrupts at once.

    Does nothing outside the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if asked() and number == signal.SIGINT:
            raise KeyboardInterrupt
        ask()
        then(number)

    _asked.clear()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.clear()
