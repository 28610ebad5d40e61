"""Run a graph over worker processes of this machine.

    parent:  ready nodes, longest chain first ──> pipe ──> worker 1..n: execute, publish
             one progress line               <── pipe ──

A worker is one process with a fixed number of threads. For small models one thread a worker and a worker a core is
fastest on a CPU: their matrices are too small to share. What a node computes does not depend on which worker has it.

Several of these may run over one store, on one machine or more: a node that another has in hand is left to it, and
others are done meanwhile. SIGINT and SIGTERM end a run at a safe place: every stage saves its state first.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from testbed import stopping
from testbed.conditions import versions
from testbed.errors import StoreError, UserError
from testbed.execute import RUNNERS, Conduct, execute, set_threads
from testbed.graph import Graph, work
from testbed.leases import Busy
from testbed.machine import cores
from testbed.nodes import Node, shelf
from testbed.stopping import Stopped
from testbed.store import Store
from testbed.tracking import Progress, duration

# Seconds until a node that another process has in hand is looked at again.
LOOK_AGAIN = 0.5


@dataclass(frozen=True)
class Event:
    """What happened: `reused`, `started`, `progress`, `done`, `failed`, `skipped` (an input failed), `stopped` (left at
    a safe place because the run was asked to stop), `note`."""

    kind: Literal["reused", "started", "progress", "done", "failed", "skipped", "stopped", "note"]
    node: Node | None = None
    # In words: of a failure its cause, of a note its text.
    text: str = ""
    # The whole state, for a progress line.
    line: str = ""


@dataclass
class Outcome:
    """How every node ended, by key."""

    reused: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    # What was there when it came to be made: another process had made it, or another node on its way.
    found: list[str] = field(default_factory=list)
    # Cause of failure, and where the traceback lies (None where not even that could be written).
    failed: dict[str, tuple[str, Path | None]] = field(default_factory=dict)
    # Of those, what had failed in an earlier run and was not tried again, and what will be tried again unasked.
    failed_before: list[str] = field(default_factory=list)
    passing: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    # Whether the run was asked to stop, and did.
    stopped: bool = False
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and not self.skipped and not self.stopped


def run_graph(
    graph: Graph,
    store: Store,
    *,
    workers: int | None = None,
    threads: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    runners: Mapping[str, str] = RUNNERS,
    conduct: Conduct | None = None,
    retry: bool = False,
) -> Outcome:
    """Make every artifact of the graph that the store does not have.

    workers: processes; None for one a core, or for as many cores as a stage has devices; at most one a node. One worker
    runs in this process.
    threads: of each worker; None shares the cores out between the workers asked for. How much is left to do never
    changes it: sums in another number of threads have other last bits, and arms are compared.
    conduct: how nodes are run. retry: try again what failed in an earlier run.
    A node that fails takes what depends on it with it; everything else is finished.
    """
    store.prepare()
    store.remember(graph.spec.name, graph.spec.model_dump(mode="json"))
    start = time.monotonic()
    state = _State(graph, store)
    for key in _usable(graph, store):
        state.outcome.reused.append(key)
        on_event(Event("reused", graph.nodes[key]))
    for event in state.failed_before(retry):
        on_event(event)
    todo = len(graph.nodes) - len(state.over)
    conduct = conduct or Conduct(group=graph.spec.name)
    # Every worker starts that many processes for its stage.
    workers = workers or max(1, cores() // conduct.devices)
    threads = threads or max(1, cores() // (workers * conduct.devices))
    workers = max(1, min(workers, todo))
    job = _Job(store_root=store.root, threads=threads, runners=dict(runners), conduct=conduct)
    if todo:
        (_run_here if workers == 1 else _run_pool)(state, job, workers, on_event)
    state.outcome.wall_s = time.monotonic() - start
    return state.outcome


def _usable(graph: Graph, store: Store) -> list[str]:
    """Keys of what the store has; what will be read is checked to the byte, so that the same run mends damage."""
    there = {key for key, node in graph.nodes.items() if store.get(shelf(node.kind), key, read=False) is not None}
    missing = [key for key in graph.nodes if key not in there]
    while missing:
        for key in graph.nodes[missing.pop()].parents.values():
            if key in there and store.get(shelf(graph.nodes[key].kind), key) is None:
                there.remove(key)
                missing.append(key)
    return [key for key in graph.nodes if key in there]


@dataclass(frozen=True)
class _Job:
    """What every worker is told once."""

    store_root: Path
    threads: int
    runners: dict[str, str]
    conduct: Conduct


class _State:
    """Which nodes are ready, running and over."""

    def __init__(self, graph: Graph, store: Store) -> None:
        self.graph, self.store = graph, store
        self.outcome = Outcome()
        self.sizes = work(graph)
        self.chains = _chains(graph, self.sizes)
        self.running: dict[str, Progress | None] = {}
        # What another process has in hand, and when to look again.
        self.elsewhere: dict[str, float] = {}
        self.start = time.monotonic()

    @property
    def finished(self) -> set[str]:
        return {*self.outcome.reused, *self.outcome.made, *self.outcome.found}

    @property
    def over(self) -> set[str]:
        return {*self.finished, *self.outcome.failed, *self.outcome.skipped}

    def next(self) -> Node | None:
        """The ready node at the head of the longest chain of work."""
        if stopping.asked():
            return None
        self._look_again()
        finished, over = self.finished, self.over
        taken = {*over, *self.running, *self.elsewhere}
        ready = [
            node
            for key, node in self.graph.nodes.items()
            if key not in taken and set(node.parents.values()) <= finished and self._its_turn(node, over)
        ]
        return max(ready, key=lambda node: self.chains[node.key], default=None)

    def _its_turn(self, node: Node, over: set[str]) -> bool:
        """What makes a checkpoint on its way is waited for; where it does not, checkpoints go on from one another."""
        if node.after is None:
            return True
        before = [one for one in self.graph.made_by(node.after) if (one.step or 0) < (node.step or 0)]
        return node.after in over and all(one.key in over for one in before)

    def _look_again(self) -> None:
        now = time.monotonic()
        for key in [key for key, due in self.elsewhere.items() if due <= now]:
            if self.store.holder(shelf(self.graph.nodes[key].kind), key) is None:
                del self.elsewhere[key]
            else:
                self.elsewhere[key] = now + LOOK_AGAIN

    @property
    def waiting(self) -> bool:
        """Whether nothing can be done before another process has finished something."""
        return bool(self.elsewhere) and not self.running and not stopping.asked()

    def busy(self, key: str, why: str) -> list[Event]:
        """Another process has the node in hand."""
        self.running.pop(key, None)
        self.elsewhere[key] = time.monotonic() + LOOK_AGAIN
        return [Event("note", self.graph.nodes[key], text=why)]

    def stopped(self, key: str) -> list[Event]:
        self.running.pop(key, None)
        return [Event("stopped", self.graph.nodes[key])]

    def failed_before(self, retry: bool) -> list[Event]:
        """What failed in an earlier run, for a lasting reason, fails again unless it is to be tried again."""
        events: list[Event] = []
        for key, node in self.graph.nodes.items():
            record = None if key in self.over else self.store.failure(shelf(node.kind), key)
            if record is None:
                continue
            if retry or not record.lasting:
                self.store.forgive(shelf(node.kind), key)
                continue
            path = self.store.failure_path(shelf(node.kind), key)
            self.outcome.failed[key] = (record.reason, path)
            self.outcome.failed_before.append(key)
            events.append(
                Event("failed", node, text=f"{record.reason} That was on {record.time}; --retry tries again.")
            )
            events += self._skip(key)
        return events

    def done(self, key: str, found: bool) -> Event:
        self.running.pop(key, None)
        (self.outcome.found if found else self.outcome.made).append(key)
        return Event("done", self.graph.nodes[key], line=self.line())

    def failed(self, key: str, cause: str, trace: str, lasting: bool) -> list[Event]:
        """The failure and everything it takes along."""
        self.running.pop(key, None)
        node = self.graph.nodes[key]
        where = "It could not be recorded."
        path = None
        try:
            path = self.store.fail(
                shelf(node.kind), key, label=node.label, reason=cause, trace=trace, versions=versions(), lasting=lasting
            )
            where = f"The traceback is in {path}."
        except StoreError:
            pass  # the disk is full, as likely as not: told already
        self.outcome.failed[key] = (cause, path)
        if not lasting:
            self.outcome.passing.append(key)
        return [Event("failed", node, text=f"{cause} {where}"), *self._skip(key)]

    def _skip(self, key: str) -> list[Event]:
        """Everything that needs the result of a node is left out, and the checkpoints that it did not come to."""
        events, lost = [], [key]
        while lost:
            key = lost.pop()
            # Checkpoints before the last saved state can be made alone; those beyond would fail like their stage.
            saved = max(map(int, self.store.keys(f"partial/stages-{key}")), default=0)
            kept = [node for node in self.graph.made_by(key) if (node.step or 0) > saved]
            missing = [node for node in kept if not self.store.has(shelf(node.kind), node.key)]
            for child in [*self.graph.children(key), *missing]:
                if child.key not in self.over:
                    self.outcome.skipped.append(child.key)
                    events.append(Event("skipped", child))
                    lost.append(child.key)
        return events

    def line(self) -> str:
        """`7/21 done  1 min 2 s left  mid, seed 0  120/400  loss 0.53  41k tok/s │ ...`"""
        parts = [f"{len(self.over)}/{len(self.graph.nodes)} done"]
        if (left := self._left()) is not None:
            parts.append(f"about {duration(left)} left")
        now = [progress.line() if progress else self.graph.nodes[key].label for key, progress in self.running.items()]
        return "  ".join([*parts, "│ " + " │ ".join(now)] if now else parts)

    def _left(self) -> float | None:
        """Seconds, from the rate of work since the start; None until some was done."""
        shares = {key: p.step / p.total if p and p.total else 0.0 for key, p in self.running.items()}
        made = sum(self.sizes[key] for key in self.outcome.made)
        made += sum(self.sizes[key] * share for key, share in shares.items())
        rest = sum(self.sizes[key] for key in self.graph.nodes if key not in self.over)
        rest -= sum(self.sizes[key] * share for key, share in shares.items())
        seconds = time.monotonic() - self.start
        return rest * seconds / made if made > 0 and seconds > 2 else None


def _chains(graph: Graph, sizes: Mapping[str, float]) -> dict[str, float]:
    """Work from each node to the end of the longest chain that hangs on it."""
    chains: dict[str, float] = {}
    for key in reversed(graph.nodes):
        then = [*graph.children(key), *graph.made_by(key)]
        chains[key] = sizes[key] + max((chains[child.key] for child in then), default=0.0)
    return chains


def _run_here(state: _State, job: _Job, workers: int, on_event: Callable[[Event], None]) -> None:
    set_threads(job.threads)
    with stopping.heeded():
        while (node := state.next()) is not None or state.waiting:
            if node is None:
                time.sleep(LOOK_AGAIN / 5)
                continue
            state.running[node.key] = None
            on_event(Event("started", node, line=state.line()))
            for event in _make_here(node, state, job, on_event):
                on_event(event)
        state.outcome.stopped = stopping.asked()


def _make_here(node: Node, state: _State, job: _Job, on_event: Callable[[Event], None]) -> list[Event]:
    def report(progress: Progress) -> None:
        state.running[node.key] = progress
        on_event(Event("progress", node, line=state.line()))

    def note(text: str) -> None:
        on_event(Event("note", node, text=text))

    there: list[bool] = []
    try:
        execute(
            node, state.store, report=report, announce=note, runners=job.runners, conduct=job.conduct, wait=False,
            found=lambda: there.append(True),
        )  # fmt: skip
    except Busy as busy:
        return state.busy(node.key, str(busy))
    except Stopped:
        return state.stopped(node.key)
    except Exception as error:
        return state.failed(node.key, _cause(error), traceback.format_exc(), _lasting(error))
    return [state.done(node.key, bool(there))]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    node: Node | None = None


def _run_pool(state: _State, job: _Job, workers: int, on_event: Callable[[Event], None]) -> None:
    pool = [_start(job) for _ in range(workers)]

    def pass_on(number: int) -> None:
        for worker in pool:
            if worker.node is not None:
                worker.process.terminate()

    try:
        with stopping.heeded(pass_on):
            _serve_pool(state, job, pool, on_event)
            state.outcome.stopped = stopping.asked()
    except BaseException:
        # A second interrupt does not wait. What was saved before stands.
        for worker in pool:
            worker.process.kill()
        raise
    finally:
        for worker in pool:
            worker.process.terminate()
        for worker in pool:
            worker.process.join(timeout=10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()


def _serve_pool(state: _State, job: _Job, pool: list[_Worker], on_event: Callable[[Event], None]) -> None:
    """Hand out nodes and take in results until nothing is left, or everybody has stopped."""
    while True:
        for i, worker in enumerate(pool):
            if worker.node is None and (node := state.next()) is not None:
                if not worker.process.is_alive():
                    worker = pool[i] = _start(job)
                worker.node = node
                state.running[node.key] = None
                worker.pipe.send(node)
                on_event(Event("started", node, line=state.line()))
                if stopping.asked():
                    # The request came while the node was on its way, and was not passed on to this worker.
                    worker.process.terminate()
        busy = [worker for worker in pool if worker.node is not None]
        if not busy and not state.waiting:
            return
        readable = wait([worker.pipe for worker in busy], timeout=LOOK_AGAIN if state.elsewhere else None)
        for i, worker in enumerate(pool):
            if worker.pipe in readable:
                try:
                    message = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    message = _death(worker)
                    pool[i] = _start(job)
                for event in _take(state, worker, message):
                    on_event(event)


def _take(state: _State, worker: _Worker, message: tuple[Any, ...]) -> list[Event]:
    """What a worker's message means."""
    assert worker.node is not None
    node, (kind, *rest) = worker.node, message
    if kind == "progress":
        state.running[node.key] = rest[0]
        return [Event("progress", node, line=state.line())]
    if kind == "note":
        return [Event("note", node, text=rest[0])]
    worker.node = None
    if kind == "busy":
        return state.busy(node.key, *rest)
    if kind == "stopped":
        return state.stopped(node.key)
    return [state.done(node.key, *rest)] if kind == "done" else state.failed(node.key, *rest)


def _start(job: _Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, job), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _death(worker: _Worker) -> tuple[Any, ...]:
    worker.process.join(timeout=10)
    code = worker.process.exitcode
    how = (
        f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with status {code}"
    )
    hint = ", perhaps for want of memory: try fewer --workers" if code == -signal.SIGKILL else ""
    text = f"The worker process {how}{hint}."
    if stopping.asked():
        return ("stopped",)
    return "failed", text, text + "\n", False


def _serve(pipe: Connection, job: _Job) -> None:
    """A worker's life: a node in, progress and an end out, until the parent is gone."""
    set_threads(job.threads)
    # Ctrl-C reaches the whole group: the parent passes it on, as SIGTERM, to those that have something to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    idle, sent = True, 0.0

    def terminate(*_: object) -> None:
        if idle:
            os._exit(143)
        # It may come twice, to the whole group and passed on by the parent, which has SIGKILL for those in a hurry.
        stopping.ask()

    signal.signal(signal.SIGTERM, terminate)

    def report(progress: Progress) -> None:
        nonlocal sent
        if time.monotonic() - sent > 0.2:
            sent = time.monotonic()
            pipe.send(("progress", progress))

    def announce(text: str) -> None:
        pipe.send(("note", text))

    store = Store(job.store_root, announce=announce)
    try:
        while True:
            node = pipe.recv()
            idle, there = False, [False]
            try:
                execute(
                    node, store, report=report, announce=announce, runners=job.runners, conduct=job.conduct, wait=False,
                    found=functools.partial(there.append, True),
                )  # fmt: skip
            except (BrokenPipeError, EOFError):
                raise
            except Busy as busy:
                answer: tuple[Any, ...] = ("busy", str(busy))
            except Stopped:
                answer = ("stopped",)
            except Exception as error:
                answer = ("failed", _cause(error), traceback.format_exc(), _lasting(error))
            else:
                answer = ("done", there[-1])
            idle = True
            pipe.send(answer)
            if stopping.asked():
                os._exit(143)
    except (BrokenPipeError, EOFError, ConnectionResetError):
        # The parent is gone, and with it whoever wanted the result.
        os._exit(1)


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, UserError | ValueError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if text.endswith((".", "!", "?")) else text + "."


def _lasting(error: Exception) -> bool:
    """Whether a failure is the node's own. A full disk, a lost lease or want of memory may be over next time."""
    return not isinstance(error, UserError | OSError | MemoryError) and type(error).__name__ != "OutOfMemoryError"
