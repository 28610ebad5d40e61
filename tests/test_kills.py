"""Runs that are killed by another process, at any time, end with the bits of one that was not (see soak.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import soak


def test_a_handful_of_kills() -> None:
    """Every phase once, and more at any time; `make soak` kills a hundred times."""
    root = Path(__file__).parent.parent
    command = [sys.executable, str(root / "tests" / "soak.py"), "--kills", "6", "--seed", "1", "--short"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    hit = re.findall(r"^ +\d+  in (.*)$", result.stdout, re.MULTILINE)
    assert all(any(phase.endswith(wanted) for phase in hit) for wanted in soak.PHASES)


def test_what_a_kill_may_not_leave_behind_is_seen(tmp_path: Path) -> None:
    """Guards the test above: damage and differences are problems."""
    import shutil

    import tiny

    from testbed.store import Store

    graph = soak.short()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    tiny.run_all(graph, Store(whole))
    shutil.copytree(whole, broken)
    assert soak.unsound(broken) == [] and soak.differences(graph, whole, broken) == []
    key = graph.stages["pretrain@4", 0]
    path = broken / "checkpoints" / key / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(soak.unsound(broken)) == 1
    shutil.rmtree(broken / "checkpoints" / key)
    assert soak.differences(graph, whole, broken) == ["pretrain@4, seed 0 is missing"]


def test_the_phase_of_a_kill_is_told(tmp_path: Path) -> None:
    file = tmp_path / "phases"
    assert soak.phase_of(file) == "start"
    lines = ["lease: held", "save: begin", "publish: write", "save: end", "step", "save: begin", "publish: seal"]
    for last, told in ((3, "publish: write"), (4, "save: end"), (5, "step"), (7, "save, publish: seal")):
        file.write_text("".join(f"1 2 {line}\n" for line in lines[:last]))
        assert soak.phase_of(file) == (f"save, {told}" if last == 3 else told)
