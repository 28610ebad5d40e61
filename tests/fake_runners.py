"""Stand-ins for the runs of nodes: they write what the tables need, in no time and without torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd

from testbed import stopping
from testbed.nodes import Node
from testbed.tracking import Tracker

RUNNERS = dict.fromkeys(
    ("corpus", "pretrain", "midtrain", "sft", "rl", "combine", "parallel", "evaluation", "probe"), "fake_runners:run"
)


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    """Deterministic files; how well a stage solves a band grows with the length of its lineage."""
    assert set(inputs) == set(node.parents)
    assert all((path / "manifest.json").exists() for path in inputs.values())
    if node.kind == "corpus":
        (out / "tokens.bin").write_bytes(b"\0" * 100)
        return {"documents": 3}
    if node.kind == "evaluation":
        _outcomes(node, inputs["stage"]).to_parquet(out / "outcomes.parquet")
        return {}
    depth = 1 + int((inputs["parent"] / "depth").read_text()) if "parent" in inputs else 1
    (out / "depth").write_text(str(depth))
    for step in (1, 2):
        tracker.log(step, 2, tokens=50 * step, loss=1 / step)
    rl = {"groups": 4, "groups_with_signal": 2, "weight_change": 0.1} if node.kind == "rl" else {}
    matched = sum(role.startswith("match/") for role in inputs)
    return {"tokens": 100, "flops": 1e6 * (matched or 1), **rl}


def _outcomes(node: Node, stage: Path) -> pd.DataFrame:
    depth = int((stage / "depth").read_text())
    rows = []
    for band, operations in node.context.bands.items():
        for o in operations:
            for problem in range(4):
                right = min(4, (depth + problem + node.context.seeds.rollout) % 5)
                rows.append(
                    {
                        "band": band, "task": "arithmetic", "context": "symbolic", "operations": o, "problem": problem,
                        "structures_shared": False, "n": 4, "c_answer": right, "c_strict": max(0, right - 1),
                        "process_mean": right / 4, "length_mean": 10.0, "truncated": 0, "temperature": 1.0,
                        "status_ok": 10,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def failing_rl(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    (out / "half").write_text("written before the failure")
    raise RuntimeError("the reward\nwas lost")


def killed(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def out_of_space(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    raise OSError(28, "No space left on device")


def slow(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    for step in range(1, 601):
        tracker.log(step, 600)
        time.sleep(0.1)
        stopping.check()
    return {}


def environment(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    """What a worker tells its libraries about threads, and which process it is."""
    time.sleep(0.2)
    return {"pid": os.getpid(), **{name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}}


def deaf(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    """Never looks whether it was asked to stop."""
    time.sleep(60)
    return {}


def counted(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    """Takes a moment, and leaves a line in a file for each time it ran."""
    with open(os.environ["COUNT"], "a", encoding="utf-8") as file:
        file.write(f"{node.key}:{os.getpid()}\n")
    time.sleep(0.1)
    return run(node, inputs, out, tracker)


def patient(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Any = None) -> dict[str, Any]:
    """Takes a while to save when it is asked to stop."""
    while not stopping.asked():
        time.sleep(0.05)
    time.sleep(0.7)
    with open(os.environ["COUNT"], "a", encoding="utf-8") as file:
        file.write("saved\n")
    raise stopping.Stopped
