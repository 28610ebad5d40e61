"""Leases: one holder at a time, whatever is killed, stopped, reused or set to another time."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import leases, phases
from testbed.errors import StoreError
from testbed.leases import Busy, Lease, LeaseLost, Watch, hold, live
from testbed.store import Store

DAY = 86400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stages-k1.json"


def held(path: Path, **options: Any) -> contextlib.AbstractContextManager[Lease]:
    return hold(path, guard=path.parent / ".guard", **options)


@contextlib.contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the block; it says on stdout where it is."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


HOLD = """
import os, signal, sys
from pathlib import Path
from testbed.leases import hold
path = Path(sys.argv[1])
with hold(path, guard=path.parent / ".guard"):
    print("held", flush=True)
    sys.stdin.read()
"""

KILLED = """
import os, sys
from pathlib import Path
from testbed import leases, phases
path, phase = Path(sys.argv[1]), sys.argv[2]
def enter(name):
    if name == phase:
        print("dying", flush=True)
        os.kill(os.getpid(), 9)
phases.enter = enter
with leases.hold(path, guard=path.parent / ".guard"):
    pass
"""


def dead(path: Path) -> None:
    """A lease of a process of this machine that was killed."""
    with process(HOLD, path) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.kill()
        holder.wait()


def foreign(path: Path, **changes: Any) -> None:
    """A lease of another machine, which nobody renews."""
    fields = {"pid": 1, "host": "elsewhere", "machine": "elsewhere", "started": None, "token": "t"}
    path.write_text(json.dumps(fields | changes))


def test_a_lease_is_there_while_it_is_held(path: Path) -> None:
    assert live(path, Watch()) is None
    with held(path) as lease:
        lease.check()
        holder = live(path, Watch())
        assert holder is not None and holder.pid == os.getpid() and lease.name == "stages-k1"
    assert live(path, Watch()) is None
    assert [p.name for p in path.parent.iterdir()] == [".guard"]


def test_it_is_let_go_when_the_work_fails(path: Path) -> None:
    with pytest.raises(RuntimeError), held(path):
        raise RuntimeError
    assert not path.exists()


def test_who_does_not_wait_is_told_who_has_it(path: Path) -> None:
    with held(path):
        with (
            pytest.raises(Busy, match=f"process {os.getpid()} on .* works on stages-k1") as busy,
            held(path, wait=False),
        ):
            pass
        assert busy.value.holder.pid == os.getpid() and isinstance(busy.value, StoreError)
        path.with_name("other.json").touch()
        with held(path.with_name("another.json"), wait=False):
            pass
    with held(path, wait=False):
        pass


COUNT = """
import sys
from pathlib import Path
from testbed.leases import hold
folder = Path(sys.argv[1])
counter = folder / "counter"
for _ in range(20):
    with hold(folder / "lease.json", guard=folder / ".guard"):
        count = int(counter.read_text())
        counter.write_text(str(count + 1))
"""


def test_eight_processes_never_hold_it_together(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(process(COUNT, tmp_path)) for _ in range(8)]
        assert [one.wait(timeout=60) for one in crowd] == [0] * 8
    assert (tmp_path / "counter").read_text() == "160"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".guard", "counter"]


def test_without_locks_the_link_alone_decides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no flock; others fail otherwise, and that is an error."""

    def refuse(number: int) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("testbed.leases.fcntl.flock", flock)

    refuse(errno.ENOLCK)
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with held(path):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert most == 1 and not path.exists()
    refuse(errno.EACCES)
    with pytest.raises(PermissionError), held(path):
        pass


def test_the_lease_of_a_killed_process_is_taken_at_once(path: Path) -> None:
    dead(path)
    assert path.exists()
    start = time.monotonic()
    with held(path, wait=False) as lease:
        lease.check()
    assert time.monotonic() - start < 2


def test_a_process_that_is_dead_and_not_waited_for_is_gone(path: Path) -> None:
    with process(HOLD, path) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        # Not waited for: it stays as a zombie, and signals still reach it.
        while leases._started(holder.pid) not in ("zombie", None) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(holder.pid, 0)
        if Path("/proc/self/stat").exists():
            with held(path, wait=False):
                pass


@pytest.mark.parametrize("phase", ["lease: takeover", "lease: held", "lease: release"])
def test_a_kill_at_any_point_blocks_nobody(path: Path, phase: str) -> None:
    """In a takeover too, when the guard is held and the new lease is written but not in place."""
    dead(path)
    with process(KILLED, path, phase) as taker:
        assert taker.wait(timeout=20) == -9
    start = time.monotonic()
    with held(path, wait=False):
        pass
    assert time.monotonic() - start < 2


def test_a_stopped_process_with_the_guard_does_not_stop_everybody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "GUARD_PATIENCE", 0.2)
    with leases._guarded(path.parent / ".guard"):
        start = time.monotonic()
        with held(path):
            assert time.monotonic() - start > 0.15


def test_a_pid_that_was_given_to_another_process_is_not_the_holder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = leases.Holder(os.getpid(), "here", leases._machine(), "17", "t")
    monkeypatch.setattr(leases, "_started", lambda pid: "17")
    path.write_text(json.dumps(dataclasses.asdict(mine)))
    assert live(path, Watch()) == mine
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(mine, started="16"))))
    assert live(path, Watch()) is None
    # Where the start of one cannot be seen, nothing is known.
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(mine, started=None))))
    assert live(path, Watch()) is not None
    # The same pid on another machine says nothing.
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(mine, started="16", machine="elsewhere"))))
    assert live(path, Watch()) is not None


def test_processes_have_a_start_of_their_own() -> None:
    if not Path("/proc/self/stat").exists():
        assert leases._started(os.getpid()) is None
        return
    first = leases._started(os.getpid())
    assert first is not None and first.isdigit() and first == leases._started(os.getpid())
    with process("import sys; sys.stdin.read()") as other:
        assert leases._started(other.pid) not in (None, first, "zombie")
    assert leases._started(other.pid) is None


def test_without_proc_host_and_pid_tell(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_machine", lambda: "host")
    monkeypatch.setattr(leases, "_started", lambda pid: None)
    with held(path):
        assert live(path, Watch()) is not None
    with process("pass") as gone:
        gone.wait()
    path.write_text(json.dumps(dataclasses.asdict(leases.Holder(gone.pid, "host", "host", None, "t"))))
    assert live(path, Watch()) is None


@pytest.mark.parametrize("shift", [-DAY, DAY])
def test_no_wall_clock_makes_a_live_lease_stale(path: Path, monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """Neither the observer's, nor that of the file system that stamps the file."""
    foreign(path)
    os.utime(path, (time.time() + shift,) * 2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - shift)
    watch = Watch()
    assert live(path, watch) is not None and live(path, watch) is not None
    with pytest.raises(Busy), held(path, wait=False, watch=watch):
        pass


def test_a_lease_is_stale_when_the_observer_saw_it_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over calls that do not wait, the observer's memory is what counts; a renewal starts it anew."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    foreign(path)
    watch = Watch()
    for renewed in (True, True, False):
        assert live(path, watch) is not None
        now += leases.STALE_AFTER - 1
        assert live(path, watch) is not None
        if renewed:
            # By a clock that goes backwards, even.
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    assert live(path, Watch()) is not None, "who has just come has seen nothing"
    now += 2
    assert live(path, watch) is None
    with held(path, wait=False, watch=watch) as lease:
        lease.check()
        assert live(path, watch) is not None
    # Another at the same place begins anew.
    foreign(path)
    assert live(path, watch) is not None


def test_a_store_remembers_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.prepare()
    foreign(tmp_path / "leases" / "stages-k1.json")
    with pytest.raises(Busy), store.lease("stages", "k1", wait=False):
        pass
    monkeypatch.setattr(leases, "STALE_AFTER", 0.05)
    time.sleep(0.1)
    assert store.holder("stages", "k1") is None
    with store.lease("stages", "k1", wait=False):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\udcff"])
def test_a_lease_that_cannot_be_read_is_stale_when_it_rests(
    path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    watch = Watch()
    with pytest.raises(Busy, match="an unknown process"), held(path, wait=False, watch=watch):
        pass
    monkeypatch.setattr(leases, "STALE_AFTER", 0.05)
    time.sleep(0.1)
    with held(path, wait=False, watch=watch):
        pass


def test_a_heartbeat_renews_its_own_lease_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY", 0.02)
    with held(path) as lease:
        os.utime(path, (0, 0))
        time.sleep(0.2)
        assert path.stat().st_mtime > 0
        lease.check()
        # Another takes its place: what the thread touches is no longer under that name.
        new = path.with_name("new")
        foreign(new)
        os.utime(new, (0, 0))
        new.rename(path)
        time.sleep(0.2)
        assert path.stat().st_mtime == 0
        with pytest.raises(LeaseLost, match="process 1 on elsewhere has it") as lost:
            lease.check()
        assert "\n" not in str(lost.value) and isinstance(lost.value, StoreError)
    assert path.exists(), "what is another's is not let go"
    path.unlink()
    with held(path) as lease:
        path.unlink()
        with pytest.raises(LeaseLost, match="its file is gone"):
            lease.check()


STOPPED = """
import sys, time
from pathlib import Path
from testbed import leases
from testbed.store import Store
leases.RENEW_EVERY = 0.02
store = Store(sys.argv[1])
store.prepare()
try:
    with store.lease("stages", "k1") as lease, store.publish("stages", "k1", lease=lease) as draft:
        (draft.out / "a.txt").write_text("first")
        print("writing", flush=True)
        sys.stdin.readline()
        if sys.argv[2] == "writes on":
            (draft.out / "b.txt").write_text("first")
except leases.LeaseLost as error:
    print(f"lost: {error}", flush=True)
"""


@pytest.mark.parametrize("then", ["writes on", "ends"])
def test_a_stopped_process_finds_its_lease_taken_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(leases, "STALE_AFTER", 0.3)
    store = Store(tmp_path)
    with process(STOPPED, tmp_path, then) as stopped:
        assert stopped.stdout is not None and stopped.stdin is not None and stopped.stdout.readline() == "writing\n"
        time.sleep(0.6)
        with pytest.raises(Busy), store.lease("stages", "k1", wait=False):
            pass
        os.kill(stopped.pid, signal.SIGSTOP)
        with store.lease("stages", "k1") as lease, store.publish("stages", "k1", lease=lease) as draft:
            (draft.out / "a.txt").write_text("second")
        os.kill(stopped.pid, signal.SIGCONT)
        out, _ = stopped.communicate("\n", timeout=20)
    assert out.startswith("lost: The lease on stages-k1 was lost")
    assert stopped.returncode == 0
    assert (store.path("stages", "k1") / "a.txt").read_text() == "second"
    assert store.get("stages", "k1") is not None
    assert list((tmp_path / "tmp").iterdir()) == []


def test_phases_are_written_where_asked(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "phases"
    monkeypatch.delenv("TESTBED_PHASES", raising=False)
    phases.enter("unseen")
    monkeypatch.setenv("TESTBED_PHASES", str(log))
    with held(path):
        pass
    store = Store(tmp_path / "store")
    with store.publish("stages", "k1") as draft:
        (draft.out / "a").touch()
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    assert [name for _, _, name in lines] == [
        "lease: take", "lease: held", "lease: release",
        "publish: write", "publish: seal", "publish: rename", "publish: done",
    ]  # fmt: skip
    assert {int(pid) for pid, _, _ in lines} == {os.getpid()}
    times = [int(when) for _, when, _ in lines]
    assert times == sorted(times)
