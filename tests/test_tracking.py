"""The tracker: JSON lines always, rates without the warm-up, and wandb that can do no harm."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from testbed.tracking import METRICS, Progress, ProgressLine, Tracker, WandbRun, duration, quantity


def test_lines_rates_and_time_left(tmp_path: Path) -> None:
    now = [100.0]
    seen: list[Progress] = []
    with Tracker(tmp_path, name="mid", report=seen.append, clock=lambda: now[0]) as tracker:
        # The first step takes 50 s to warm up, the others a second each.
        for step, seconds in enumerate((50, 1, 1, 1), start=1):
            now[0] += seconds
            tracker.log(step, 10, tokens=100 * step, loss=1 / step, reward=math.nan)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert lines[1] == {"step": 2, "total": 10, "time": 51.0, "tokens": 200.0, "loss": 0.5}
    assert [progress.left for progress in seen] == [None, None, 7.0, 6.0]
    assert [progress.tokens_per_s for progress in seen] == [None, None, 100.0, 100.0]
    assert seen[-1].line() == "mid  4/10  loss 0.25  100 tok/s  6 s left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_is_rewritten_on_a_terminal_and_rare_elsewhere() -> None:
    now = [0.0]
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = ProgressLine(stream, every=30, clock=lambda: now[0])
        for _ in range(61):
            now[0] += 1
            line.show("state")
        line.say("done")
    assert pipe.getvalue() == "state\nstate\nstate\ndone\n"
    assert terminal.getvalue().count("\r\x1b[2Kstate") == 61 and terminal.getvalue().endswith("\r\x1b[2Kdone\n")


def test_wandb_is_announced_once_and_never_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # importing it fails
    copy = WandbRun(project="p", name="n", folder=tmp_path, config={}, announce=said.append)
    with Tracker(tmp_path, wandb=copy) as tracker:
        tracker.log(1, 2, loss=1.0)
        tracker.log(2, 2, loss=1.0)
    assert len(said) == 1 and said[0].startswith("wandb is off (")
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2


def test_wandb_gets_the_metrics_until_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def log(self, metrics: dict[str, float]) -> None:
            if len(self.logged) == 1:
                raise OSError("disk full")
            self.logged.append(metrics)

    run, said = Run(), []
    fake = type("wandb", (), {"init": staticmethod(lambda **_: run), "Settings": staticmethod(lambda **_: None)})
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    copy = WandbRun(project="p", name="n", folder=tmp_path, config={}, announce=said.append)
    for step in (1, 2, 3):
        copy.log({"step": step})
    copy.finish()
    assert run.logged == [{"step": 1}]
    assert said == ["wandb is off (disk full); metrics are in metrics.jsonl all the same."]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1300, "1.3k"), (41_000, "41k"), (2.5e6, "2.5M"), (3e15, "3.0P")]
)
def test_quantities(value: float, text: str) -> None:
    assert quantity(value) == text
