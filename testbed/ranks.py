"""Processes that train one model together, each on its share of every batch (data parallel).

    rank 0: executes the node        ── process + pipe ──>  ranks 1 .. n-1: run the same function on the same node
            saves, logs, publishes   <─── gradients ────>                   compute, and write nothing

Every rank holds the same weights and the same optimizer state. A step's denominators are those of the whole step,
and what the ranks' losses add up to is that of one process; so are its gradients, up to the order of the sums.

What happens is rank 0's to decide. When it leaves, stopped or failed or killed, its end of the pipes closes and the
others are gone: so they need not be told of saves and stops, and cannot disagree about them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from testbed import stopping
from testbed.config import RL, Train
from testbed.errors import UserError
from testbed.nodes import Node
from testbed.stopping import Stopped
from testbed.tracking import Tracker

LOOPBACK = "127.0.0.1"
# The longest that ranks wait for each other: while one saves, or its samples are longer.
PATIENCE = timedelta(minutes=30)
# Seconds in which news of a rank's end arrives after its connection broke, and in which a process ends by itself.
GRACE = 2.0


class RankLost(UserError):
    """A process of those that train together is gone."""


class Ranks:
    """This process among those that train together; alone without an engine of several."""

    def __init__(self, fabric: Any = None) -> None:
        self.fabric = fabric
        self.rank: int = fabric.global_rank if fabric is not None else 0
        self.size: int = fabric.world_size if fabric is not None else 1

    def share(self, count: int) -> range:
        """Which of `count` things are this rank's: all, where it is alone."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.fabric.device)
        return [float(value) for value in self.fabric.all_reduce(total, reduce_op="sum").tolist()]

    def maximum(self, value: float) -> float:
        if self.size == 1:
            return float(value)
        here = torch.tensor(value, dtype=torch.float64, device=self.fabric.device)
        return float(self.fabric.all_reduce(here, reduce_op="max"))

    def first(self, value: Any) -> Any:
        """What rank 0 gave."""
        return value if self.size == 1 else self.fabric.broadcast(value, src=0)

    def same(self, tensor: Tensor) -> bool:
        """Whether every rank gave the same bits."""
        if self.size == 1:
            return True
        digest = hashlib.sha256(tensor.cpu().numpy().tobytes()).digest()
        number = float(int.from_bytes(digest[:6], "little"))  # exact in float64
        return self.maximum(number) == -self.maximum(-number)

    def adding(self, model: Any, *, last: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and the backward of one part of a step: gradients are exchanged in the `last` alone."""
        return contextlib.nullcontext() if self.size == 1 or last else self.fabric.no_backward_sync(model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss whose sum over ranks is meant."""
        if self.fabric is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            # The engine averages over ranks.
            self.fabric.backward(loss * self.size if self.size > 1 else loss)


ALONE = Ranks()


# Which rank this process is, and of how many.
_rank, _size = 0, 1


def here() -> tuple[int, int]:
    """Which rank this process is, and how many train together: (0, 1) where it is alone."""
    return _rank, _size


def _abort() -> None:
    """Break off what this process waits for."""
    # Not public in torch; what imports this module on a CPU must not need it.
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def _join(rank: int, size: int, store: TCPStore) -> None:
    """Become one of `size` ranks; returns when all have."""
    global _rank, _size
    cuda = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE,
        device_id=torch.device("cuda", rank) if cuda else None,
    )  # fmt: skip
    _rank, _size = rank, size


def _part(*, clean: bool) -> None:
    """Be alone again. clean: all ranks do it now; else the others may be gone."""
    global _rank, _size
    _rank, _size = 0, 1
    if not dist.is_initialized():
        return
    if not clean and torch.cuda.is_available():
        _abort()  # NCCL would wait for the others
    else:
        dist.destroy_process_group()


# Rank 0 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What the other ranks are told: who they are, where the first is, and what to do."""

    rank: int
    size: int
    port: int
    threads: int
    # `module:function`
    run: str
    node: Node
    inputs: dict[str, Path]


@contextlib.contextmanager
def together(size: int, run: str, node: Node, inputs: Mapping[str, Path]) -> Iterator[None]:
    """While this lasts `size` processes train together: this one is rank 0, the others call `run` (`module:function`)
    on the node.

    Raises UserError where so many cannot do it. Whatever the block raises because another rank is gone becomes what
    that rank raised, or RankLost.
    """
    refuse(node, size)
    with _environment(), _Team(size, run, node, dict(inputs)) as team:
        try:
            team.expect("ready")
            _join(0, size, team.store)
            yield
            team.expect("done")
        except Stopped:
            raise
        except Exception as error:
            cause = team.cause(error)
            if isinstance(cause, RankLost) and stopping.asked():
                # What stops this process may have ended the other. What was saved before stands.
                raise Stopped from None
            if cause is error:
                raise
            raise cause from None


def refuse(node: Node, size: int) -> None:
    """Raises UserError where a node cannot be trained by so many ranks."""
    for part in (node, *node.objectives.values()):
        config = part.config
        if isinstance(config, Train) and config.rows < size * config.accumulate:
            raise UserError(
                f"{part.label}: {config.rows} rows of a step in {config.accumulate} micro-batches cannot be shared by "
                f"{size} devices, for every part needs a row; take fewer --devices, more rows or less accumulate"
            )
        if isinstance(config, RL) and config.prompts < size:
            raise UserError(
                f"{part.label}: {config.prompts} prompts of a step cannot be shared by {size} devices; take fewer "
                "--devices or more prompts"
            )
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise UserError(f"this machine has {torch.cuda.device_count()} GPUs, not {size}; take fewer --devices")


@dataclass
class _Member:
    """Another rank, as rank 0 sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    # The last that it said: "ready", "done", "failed", or "" before.
    said: str = ""
    # When it failed, and of what.
    failed: tuple[float, Exception] | None = None
    # Whether its end of the pipe is closed.
    gone: bool = False

    @property
    def over(self) -> bool:
        return self.gone or self.failed is not None


class _Team:
    """The processes of the other ranks."""

    def __init__(self, size: int, run: str, node: Node, inputs: dict[str, Path]) -> None:
        # Listens where no other machine reaches, on a port that nobody else was given.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(
            LOOPBACK, port, size, is_master=True, wait_for_workers=False, timeout=PATIENCE,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._news = threading.Condition()
        self._closing = False
        self._members: list[_Member] = []
        try:
            for rank in range(1, size):
                self._members.append(_start(_Job(rank, size, port, torch.get_num_threads(), run, node, inputs)))
        except BaseException:
            self._end(kill=True)
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def expect(self, word: str) -> None:
        """Wait until every member has said it. Raises RuntimeError where one cannot any more."""

        def settled() -> bool:
            return any(m.over for m in self._members) or all(m.said == word for m in self._members)

        with self._news:
            self._news.wait_for(settled)
            if any(m.over for m in self._members):
                raise RuntimeError("another rank has ended")

    def cause(self, error: Exception) -> Exception:
        """Why the ranks ended, where this one raised `error`: the first error of all, or the death that explains it."""
        now = time.monotonic()
        with self._news:
            if isinstance(error, RuntimeError):  # such as a broken connection, whose reason is on its way
                self._news.wait_for(lambda: all(m.over for m in self._members), timeout=GRACE)
            failures = [m.failed for m in self._members if m.failed is not None and m.failed[0] < now]
            lost = [m for m in self._members if m.gone and m.failed is None]
        if lost:
            return RankLost(_death(lost[0], len(self._members) + 1))
        return min(failures, key=lambda failure: failure[0])[1] if failures else error

    def __enter__(self) -> _Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closing = True
        clean = kind is None
        if clean:
            for member in self._members:
                with contextlib.suppress(OSError):
                    member.pipe.send("leave")
            _part(clean=True)
        self._end(kill=not clean)
        self._watcher.join()
        if not clean:
            _part(clean=False)

    def _end(self, *, kill: bool) -> None:
        for member in self._members:
            if kill:
                member.process.kill()
        for member in self._members:
            try:
                member.process.wait(timeout=5 * GRACE)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()

    def _watch(self) -> None:
        """Take in what the members say, until all are gone."""
        while open_pipes := {m.pipe: m for m in self._members if not m.gone}:
            broken = any(m.over for m in self._members) and not self._closing
            heard = wait(list(open_pipes), timeout=GRACE if broken else None)
            if broken and not heard and not self._closing and torch.cuda.is_available():
                # Gloo breaks off where a rank is gone; NCCL waits, and this process with it.
                with contextlib.suppress(Exception):
                    _abort()
            for pipe in heard:
                member = open_pipes[pipe]  # type: ignore[index]
                try:
                    word, *rest = member.pipe.recv()
                except (EOFError, OSError):
                    word, rest = "gone", []
                with self._news:
                    if word == "gone":
                        member.gone = True
                        member.pipe.close()
                    elif word == "failed":
                        at, packed, trace = rest
                        member.failed = (at, _unpacked(packed, trace, member.rank))
                    else:
                        member.said = word
                    self._news.notify_all()


def _start(job: _Job) -> _Member:
    here, there = Pipe()
    # Not the child of multiprocessing: a worker of a pool may have none. Ctrl-C is for rank 0 alone: a session of its
    # own. What this process can import the other can.
    process = subprocess.Popen(
        [sys.executable, "-c", "from testbed.ranks import serve; serve()", str(there.fileno())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[there.fileno()], start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )  # fmt: skip
    there.close()
    with contextlib.suppress(OSError):  # it is gone already, which the watcher will tell
        here.send(job)
    return _Member(job.rank, process, here)


def _death(member: _Member, size: int) -> str:
    try:
        code = member.process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        return f"The process of rank {member.rank} of {size} fell silent."
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
    return f"The process of rank {member.rank} of {size} {how}{hint}."


def _unpacked(packed: bytes, trace: str, rank: int) -> Exception:
    error: Exception = pickle.loads(packed)
    error.add_note(f"On rank {rank}:\n{trace}")
    return error


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What libraries read there, for this process and those it starts."""
    # Fabric chooses a number of threads of its own where none is told.
    wanted = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# The other ranks -----------------------------------------------------------------------------------------------------


class _Silent(Tracker):
    """Of a rank that only computes."""

    def __init__(self) -> None:
        pass

    def take_up(self, metrics: Path, seconds: float) -> None:
        pass

    def log(self, step: int, total: int, **metrics: float) -> None:
        pass

    def close(self) -> None:
        pass


def serve() -> None:
    """The life of another rank: a node in, its run, and the end. Called in a process of its own."""
    from testbed.execute import set_threads

    # A stop is for rank 0 to heed, which saves first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    try:
        job: _Job = pipe.recv()
    except EOFError:
        os._exit(1)
    leave = threading.Event()
    threading.Thread(target=_listen, args=(pipe, leave), daemon=True).start()
    try:
        set_threads(job.threads)
        module, _, name = job.run.partition(":")
        run: Callable[..., Any] = getattr(importlib.import_module(module), name)
        if torch.cuda.is_available():
            # What can go wrong with the card goes wrong before anybody waits for this rank.
            torch.cuda.set_device(job.rank)
            torch.zeros(1, device="cuda")
        pipe.send(("ready",))
        _join(job.rank, job.size, TCPStore(LOOPBACK, job.port, job.size, wait_for_workers=False))
        run(job.node, job.inputs, Path(os.devnull), _Silent(), None)
        pipe.send(("done",))
    except BaseException as error:
        at, trace = time.monotonic(), traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send(("failed", at, _packed(error), trace))
        # At once: the others are waiting for this rank, and a broken connection tells them not to.
        os._exit(1)
    leave.wait()
    _part(clean=True)


def _listen(pipe: Connection, leave: threading.Event) -> None:
    """Leave when told to, and at once where rank 0 is gone."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)
    leave.set()


def _packed(error: BaseException) -> bytes:
    """The error for another process; in words where it cannot travel."""
    try:
        packed = pickle.dumps(error)
        if isinstance(pickle.loads(packed), Exception):
            return packed
    except Exception:  # whatever an exception's class does when it is copied
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
