"""Run a graph over worker processes of this machine.

    parent:  ready nodes, longest chain first ──> pipe ──> worker 1..n: execute, publish
             one progress line               <── pipe ──

A worker is one process with a fixed number of threads. For small models one thread a worker and a worker a core is
fastest on a CPU: their matrices are too small to share. What a node computes does not depend on which worker has it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from testbed.errors import UserError
from testbed.execute import RUNNERS, execute, set_threads
from testbed.graph import Graph, work
from testbed.machine import cores
from testbed.nodes import Node, shelf
from testbed.store import Store
from testbed.tracking import Progress, duration


@dataclass(frozen=True)
class Event:
    """What happened: `reused`, `started`, `progress`, `done`, `failed`, `skipped` (an input failed), `note`."""

    kind: Literal["reused", "started", "progress", "done", "failed", "skipped", "note"]
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
    # Cause of failure, and where the traceback lies.
    failed: dict[str, tuple[str, Path]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and not self.skipped


def run_graph(
    graph: Graph,
    store: Store,
    *,
    workers: int | None = None,
    threads: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    runners: Mapping[str, str] = RUNNERS,
    wandb: str | None = None,
) -> Outcome:
    """Make every artifact of the graph that the store does not have.

    workers: processes; None for one a core, at most one a node. One worker runs in this process.
    threads: of each worker; None shares the cores out between the workers asked for. How much is left to do never
    changes it: sums in another number of threads have other last bits, and arms are compared.
    A node that fails takes what depends on it with it; everything else is finished.
    """
    store.prepare()
    start = time.monotonic()
    state = _State(graph, store)
    for key in _usable(graph, store):
        state.outcome.reused.append(key)
        on_event(Event("reused", graph.nodes[key]))
    todo = len(graph.nodes) - len(state.outcome.reused)
    workers = workers or cores()
    threads = threads or max(1, cores() // workers)
    workers = max(1, min(workers, todo))
    job = _Job(store_root=store.root, threads=threads, runners=dict(runners), wandb=wandb)
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
    wandb: str | None


class _State:
    """Which nodes are ready, running and over."""

    def __init__(self, graph: Graph, store: Store) -> None:
        self.graph, self.store = graph, store
        self.outcome = Outcome()
        self.sizes = work(graph)
        self.chains = _chains(graph, self.sizes)
        self.running: dict[str, Progress | None] = {}
        self.start = time.monotonic()

    @property
    def finished(self) -> set[str]:
        return {*self.outcome.reused, *self.outcome.made}

    @property
    def over(self) -> set[str]:
        return {*self.finished, *self.outcome.failed, *self.outcome.skipped}

    def next(self) -> Node | None:
        """The ready node at the head of the longest chain of work."""
        finished, over = self.finished, self.over
        ready = [
            node
            for key, node in self.graph.nodes.items()
            if key not in over and key not in self.running and set(node.parents.values()) <= finished
        ]
        return max(ready, key=lambda node: self.chains[node.key], default=None)

    def done(self, key: str) -> Event:
        self.running.pop(key, None)
        self.outcome.made.append(key)
        return Event("done", self.graph.nodes[key], line=self.line())

    def failed(self, key: str, cause: str, trace: str) -> list[Event]:
        """The failure and everything it takes along."""
        self.running.pop(key, None)
        node = self.graph.nodes[key]
        path = self.store.fail(shelf(node.kind), key, trace)
        self.outcome.failed[key] = (cause, path)
        events = [Event("failed", node, text=f"{cause} The traceback is in {path}.")]
        lost = [key]
        while lost:
            for child in self.graph.children(lost.pop()):
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
        chains[key] = sizes[key] + max((chains[child.key] for child in graph.children(key)), default=0.0)
    return chains


def _run_here(state: _State, job: _Job, workers: int, on_event: Callable[[Event], None]) -> None:
    set_threads(job.threads)
    while (node := state.next()) is not None:
        key = node.key
        state.running[key] = None
        on_event(Event("started", node, line=state.line()))

        def report(progress: Progress, node: Node = node) -> None:
            state.running[node.key] = progress
            on_event(Event("progress", node, line=state.line()))

        def note(text: str, node: Node = node) -> None:
            on_event(Event("note", node, text=text))

        try:
            execute(node, state.store, report=report, announce=note, runners=job.runners, wandb=job.wandb)
        except Exception as error:
            events = state.failed(key, _cause(error), traceback.format_exc())
        else:
            events = [state.done(key)]
        for event in events:
            on_event(event)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    node: Node | None = None


def _run_pool(state: _State, job: _Job, workers: int, on_event: Callable[[Event], None]) -> None:
    pool = [_start(job) for _ in range(workers)]
    try:
        while True:
            for i, worker in enumerate(pool):
                if worker.node is None and (node := state.next()) is not None:
                    if not worker.process.is_alive():
                        worker = pool[i] = _start(job)
                    worker.node = node
                    state.running[node.key] = None
                    worker.pipe.send(node)
                    on_event(Event("started", node, line=state.line()))
            busy = [worker for worker in pool if worker.node is not None]
            if not busy:
                return
            readable = wait([worker.pipe for worker in busy])
            for i, worker in enumerate(pool):
                if worker.pipe in readable:
                    try:
                        message = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        message = _death(worker)
                        pool[i] = _start(job)
                    for event in _take(state, worker, message):
                        on_event(event)
    finally:
        for worker in pool:
            worker.process.terminate()
        for worker in pool:
            worker.process.join(timeout=10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()


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
    return [state.done(node.key)] if kind == "done" else state.failed(node.key, *rest)


def _start(job: _Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, job), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _death(worker: _Worker) -> tuple[str, str, str]:
    worker.process.join(timeout=10)
    code = worker.process.exitcode
    how = (
        f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with status {code}"
    )
    hint = ", perhaps for want of memory: try fewer --workers" if code == -signal.SIGKILL else ""
    text = f"The worker process {how}{hint}."
    return "failed", text, text + "\n"


def _serve(pipe: Connection, job: _Job) -> None:
    """A worker's life: a node in, progress and an end out, until the parent is gone."""
    set_threads(job.threads)
    # Ctrl-C reaches the whole group: the parent ends the workers, and they clean up as they leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sent = 0.0

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
            try:
                execute(node, store, report=report, announce=announce, runners=job.runners, wandb=job.wandb)
            except (BrokenPipeError, EOFError):
                raise
            except Exception as error:
                pipe.send(("failed", _cause(error), traceback.format_exc()))
            else:
                pipe.send(("done",))
    except (BrokenPipeError, EOFError, ConnectionResetError):
        # The parent is gone, and with it whoever wanted the result.
        os._exit(1)


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, UserError | ValueError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if text.endswith((".", "!", "?")) else text + "."
