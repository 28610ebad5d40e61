"""Kill runs of a tiny spec with SIGKILL, again and again, and see that the end is that of a run nobody killed.

    make soak                                   at least 100 kills, each phase at least once
    python tests/soak.py --kills 8 --seed 1

This process has imported everything and computed nothing: it forks a run, and kills it after a time drawn evenly from
the length of a whole run, or the moment the run enters a phase that was drawn. Then it forks the next, which goes on
from what the store holds, until one reaches its end. The store has to be sound after every kill, and at the end every
artifact has to have the bits of the unbroken run, its metrics without gap or double.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tiny

import testbed.combining
import testbed.corpora
import testbed.evaluation
import testbed.probes  # noqa: F401 (all runs are imported before the fork)
from sweeps.local import run_graph
from testbed.execute import Conduct
from testbed.graph import Graph
from testbed.nodes import shelf
from testbed.store import Store

PHASES = (
    "lease: take", "lease: takeover", "lease: held", "lease: release", "step", "save: begin", "save: end",
    "publish: write", "publish: seal", "publish: rename", "publish: done",
)  # fmt: skip
# A run that takes longer hangs.
PATIENCE = 120.0


@dataclass
class Log:
    """Where the kills fell: by phase, and how many of them at times drawn evenly."""

    phases: Counter[str] = field(default_factory=Counter)
    at_random: int = 0
    runs: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.phases.values())

    def table(self) -> str:
        lines = [f"{self.kills} kills in {self.runs} whole runs, {self.at_random} of them at times drawn evenly"]
        lines += [f"  {count:5d}  in {phase}" for phase, count in sorted(self.phases.items())]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


def start(graph: Graph, root: Path, phases: Path, pause: str = "") -> int:
    """Fork a run, which rests in the phase `pause`; returns its process."""
    if pid := os.fork():
        return pid
    # The child: nothing of the parent's is to be cleaned up by it.
    code = 1
    try:
        os.environ |= {"TESTBED_PHASES": str(phases), "TESTBED_PAUSE": pause}
        quiet = Store(root, announce=lambda text: None)
        conduct = Conduct(group=graph.spec.name, save_every=0.0)
        code = 0 if run_graph(graph, quiet, workers=1, threads=1, conduct=conduct).ok else 2
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """How a child ended: its status, -9 for a killed one; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def phase_of(phases: Path) -> str:
    """The last thing a run said it was doing; inside a save that is told too."""
    names = [line.split(" ", 2)[2] for line in phases.read_text().splitlines()] if phases.exists() else []
    backwards = ["save: end", "start", *names][::-1]
    saving = "save: begin" in backwards and backwards.index("save: begin") < backwards.index("save: end")
    return f"save, {backwards[0]}" if saving and backwards[0].startswith("publish") else backwards[0]


def soak(kills: int, seed: int, folder: Path, graph: Graph) -> Log:
    """Kill until `kills` have fallen, every phase was hit and the last run is through."""
    noise, log = random.Random(seed), Log()
    whole, broken = folder / "whole", folder / "broken"
    begin = time.monotonic()
    _wait(start(graph, whole, folder / "unbroken"), log, "the unbroken run")
    length = time.monotonic() - begin
    while not log.problems and (log.kills < kills or missed(log)):
        shutil.rmtree(broken, ignore_errors=True)
        _one_run(graph, broken, folder / "phases", length, noise, log, kills)
        log.runs += 1
        if not log.problems:
            log.problems += differences(graph, whole, broken)
    return log


def missed(log: Log) -> list[str]:
    """Phases that no kill has hit."""
    return [phase for phase in PHASES if not any(hit.endswith(phase) for hit in log.phases)]


def _one_run(graph: Graph, root: Path, phases: Path, length: float, noise: random.Random, log: Log, kills: int) -> None:
    """A run to its end, however often it is killed on the way."""
    while not log.problems:
        phases.unlink(missing_ok=True)
        wanted = missed(log)
        # Half of the kills at an even time, half in a phase, first in those that were not hit yet.
        targeted = noise.random() < 0.5 or log.kills >= kills
        target = noise.choice(wanted or PHASES) if targeted else ""
        if log.kills >= kills and not wanted:
            _wait(start(graph, root, phases), log, "a run that is left alone")
            return
        pid = start(graph, root, phases, pause=target)
        # The first time that the phase is entered, or a later one.
        skip = 0 if target in wanted else noise.choice((0, 1, 2))
        due = time.monotonic() + noise.uniform(0, length)
        while (code := ended(pid)) is None:
            if not target and time.monotonic() >= due:
                break
            if target and phases.exists() and phases.read_text().count(f" {target}\n") > skip:
                time.sleep(noise.uniform(0, 0.01))
                break
            if time.monotonic() > due + PATIENCE:
                log.problems.append("a run hangs")
                break
            time.sleep(0.001)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            log.phases[phase_of(phases)] += 1
            log.at_random += not target
            log.problems += unsound(root)
        elif code == 0:
            return
        else:
            log.problems.append(f"a run ended with {code}")


def _wait(pid: int, log: Log, what: str) -> None:
    due = time.monotonic() + PATIENCE
    while (code := ended(pid)) is None and time.monotonic() < due:
        time.sleep(0.01)
    if code != 0:
        log.problems.append(f"{what} ended with {code}")


def unsound(root: Path) -> list[str]:
    """Artifacts that are there and not whole: of what a killed run published, there must be none."""
    store, found = Store(root, announce=lambda text: None), []
    for place, key in store.known() if root.exists() else []:
        if store.path(place, key).exists() and (problem := store.examine(place, key)[0]) is not None:
            found.append(f"after a kill {place}/{key} is damaged: {problem}")
    return found


def differences(graph: Graph, whole: Path, broken: Path) -> list[str]:
    """Artifacts that differ from those of the unbroken run."""
    one, other = Store(whole), Store(broken)
    found = []
    for key, node in graph.nodes.items():
        pair = [store.get(shelf(node.kind), key) for store in (one, other)]
        if pair[0] is None or pair[1] is None:
            found.append(f"{node.label} is missing")
        elif (a := tiny.contents(pair[0])) != (b := tiny.contents(pair[1])):
            names = [name for name in {*a, *b} if a.get(name) != b.get(name)]
            found.append(f"{node.label} differs in {', '.join(sorted(names))}")
    return found


def short() -> Graph:
    return tiny.graph(arms={"early": "pretrain@4", "mid": "mid"}, parents={}, probes={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a run of two stages instead of all kinds of nodes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = soak(arguments.kills, arguments.seed, Path(folder), short() if arguments.short else tiny.graph())
    print(log.table())
    sys.exit(1 if log.problems else 0)


if __name__ == "__main__":
    main()
