"""Files that say who works on what.

    taken     written whole under another name, then linked: of two that try, one succeeds
    renewed   a thread touches it every RENEW_EVERY seconds, by its inode and never by its name
    stale     its process is gone from this machine, or nobody touched it for STALE_AFTER seconds of the observer's time
    taken over, released   under a guard that the kernel gives back when its holder dies

A lease can be lost: a process that was stopped for minutes finds another in its place. It spares two runs the same work
and no more; `Lease.check` tells a holder before it publishes.

No wall clock takes part. Clocks are moved, and those of two machines on one file system differ: an observer waits until
it has itself seen the file unchanged for long enough.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed import phases
from testbed.errors import StoreError

RENEW_EVERY = 10.0
# Many renewals, and longer than network file systems keep the attributes of a file.
STALE_AFTER = 120.0
# Seconds between two looks of who waits: the first, and the longest.
POLL = (0.02, 1.0)
# The guard is held for milliseconds. Whoever holds it longer was stopped, and need not stop everybody.
GUARD_PATIENCE = 10.0
# What file systems without locks answer.
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. A file that cannot be read has one without a process."""

    pid: int = 0
    host: str = ""
    # Where `pid` names the same process: boot, process namespace and host.
    machine: str = ""
    # When the process started, in the kernel's units: pids are used again.
    started: str | None = None
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process (its lease cannot be read)"


class Busy(StoreError):
    """A live process holds the lease."""

    def __init__(self, holder: Holder, name: str) -> None:
        super().__init__(f"{holder} works on {name}; wait until it has finished.")
        self.holder = holder


class LeaseLost(StoreError):
    """The lease was taken over by another process."""


class Watch:
    """When this process last saw each lease change, on its own monotonic clock. Kept over many looks."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}

    def unchanged(self, path: Path, stamp: tuple[int, int]) -> float:
        """Seconds since the file (inode, mtime in ns) was first seen as it is now."""
        now = time.monotonic()
        last, since = self._seen.get(path, (None, now))
        if last != stamp:
            self._seen[path] = stamp, now
            return 0.0
        return now - since

    def forget(self, path: Path) -> None:
        self._seen.pop(path, None)


class Lease:
    """A lease that this process took."""

    def __init__(self, path: Path, token: str, descriptor: int) -> None:
        self.path = path
        self.token = token
        self._descriptor = descriptor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    @property
    def name(self) -> str:
        return self.path.stem

    def check(self) -> None:
        """Raises LeaseLost where another process has taken it over."""
        look = _look(self.path)
        if look is None or look[0].token != self.token:
            now = f"{look[0]} has it" if look is not None else "its file is gone"
            raise LeaseLost(
                f"The lease on {self.name} was lost, and {now}: this process was stopped, or its machine slept, for "
                f"more than {STALE_AFTER:g} seconds, or the file was deleted. Nothing of what it made is published; "
                "the result of whoever took over stands."
            )

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_EVERY):
            # The inode is this lease's own: where the name has gone to another, nothing of theirs is touched.
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def _start(self) -> None:
        self._thread.start()

    def _end(self, guard: Path) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._descriptor)
        phases.enter("lease: release")
        # The work is over, well or not, and that is what has to be told. A lease that stays is stale soon.
        with contextlib.suppress(OSError), _guarded(guard):
            look = _look(self.path)
            if look is not None and look[0].token == self.token:
                self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def hold(
    path: Path,
    *,
    guard: Path,
    wait: bool = True,
    waiting: Callable[[str], None] | None = None,
    watch: Watch | None = None,
) -> Iterator[Lease]:
    """Hold the lease at `path` for the block; both files lie in folders that are there.

    guard: one permanent file for all leases that contend.
    wait: until a live holder lets go; else Busy is raised. `waiting` is told once for whom.
    watch: keep one over calls that do not wait: none of them sees a heartbeat stop by itself.
    Raises OSError where the file cannot be written.
    """
    phases.enter("lease: take")
    watch = watch or Watch()
    pause, told = POLL[0], False
    while not isinstance(taken := _try(path, guard, watch), Lease):
        if taken is None:
            continue
        if not wait:
            raise Busy(taken, path.stem)
        if waiting is not None and not told:
            waiting(f"waiting for {taken}, which works on the same")
            told = True
        time.sleep(pause)
        pause = min(2 * pause, POLL[1])
    try:
        taken._start()
        phases.enter("lease: held")
        yield taken
    finally:
        taken._end(guard)


def live(path: Path, watch: Watch) -> Holder | None:
    """Who holds the lease; None where nobody does or the lease is stale. Touches nothing."""
    return _judge(path, watch)[0]


def _judge(path: Path, watch: Watch) -> tuple[Holder | None, tuple[int, int] | None]:
    """Who holds the lease, if a live process does, and the stamp of the file, if there is one."""
    look = _look(path)
    if look is None:
        watch.forget(path)
        return None, None
    holder, stamp = look
    stale = watch.unchanged(path, stamp) > STALE_AFTER or _gone(holder)
    return None if stale else holder, stamp


def _try(path: Path, guard: Path, watch: Watch) -> Lease | Holder | None:
    """The lease, or who holds it; None where others were faster and it has to be looked at again."""
    if (holder := live(path, watch)) is not None:
        return holder
    with _guarded(guard):
        # Again: it may have changed hands before the guard was had.
        holder, stamp = _judge(path, watch)
        return holder if holder is not None else _take(path, stamp)


def _take(path: Path, stale: tuple[int, int] | None) -> Lease | None:
    """Put a lease of this process in the place of none, or of the stale one with that stamp; under the guard.

    Should there be no guard: two that create it, one fails; two that take it over, the first finds out in `check`.
    """
    mine = Holder(os.getpid(), socket.gethostname(), _machine(), _started(os.getpid()), secrets.token_hex(8))
    # Of an own name, so that nobody reads half of one. The ending keeps it from being taken for a lease.
    new = path.with_name(f"{path.name}.{mine.token}.new")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
            json.dump(asdict(mine), file)
        if stale is not None:
            phases.enter("lease: takeover")
            look = _look(path)
            # Only the lease that was judged is replaced.
            if look is None or look[1] != stale:
                raise FileNotFoundError(path)
            os.replace(new, path)
        else:
            os.link(new, path)
            new.unlink(missing_ok=True)
    except BaseException as error:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        # Others were faster. They sweep up `new` too, as a leftover.
        if isinstance(error, FileExistsError | FileNotFoundError):
            return None
        raise
    return Lease(path, mine.token, descriptor)


def _look(path: Path) -> tuple[Holder, tuple[int, int]] | None:
    """What a lease file says, and what changes when it is renewed or replaced (inode, mtime in ns); None: no file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        # Stale: how a network file system tells that the open file was deleted.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    try:
        fields: dict[str, Any] = json.loads(text)
        started = None if fields["started"] is None else str(fields["started"])
        holder = Holder(int(fields["pid"]), str(fields["host"]), str(fields["machine"]), started, str(fields["token"]))
    except (ValueError, KeyError, TypeError):
        # Whole files are all that is ever linked, so this one was cut by a power failure or written by something else.
        # Whoever it is still renews it if it is alive: it is stale when it rests, like any other, and not before.
        holder = Holder()
    return holder, (status.st_ino, status.st_mtime_ns)


def _gone(holder: Holder) -> bool:
    """Whether the holder's process is known to be gone: only on its own machine can that be seen."""
    if holder.pid <= 0 or holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass  # somebody else's process
    now = _started(holder.pid)
    # Only what is known of both can differ: some systems show no process but one's own.
    return now == "zombie" or (now is not None and holder.started is not None and now != holder.started)


def _started(pid: int) -> str | None:
    """When a process started; "zombie" for one that is dead and not yet waited for; None where it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The second field, a name in parentheses, holds anything.
        rest = text.rpartition(")")[2].split()
        return "zombie" if rest[0] in "ZX" else rest[19]
    except (OSError, IndexError):
        return None


def _machine() -> str:
    """Equal for two processes that see each other's pids, different for all others as far as that can be known."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


@contextlib.contextmanager
def _guarded(guard: Path) -> Iterator[None]:
    """Hold the guard, a lock that goes with its process. Without one (no support, or its holder was stopped) go on:
    the lease is linked or replaced whole in any case."""
    descriptor = os.open(guard, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + GUARD_PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                break
        yield
    finally:
        os.close(descriptor)
