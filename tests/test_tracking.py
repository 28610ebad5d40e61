"""The tracker: JSON lines always, rates without the warm-up, and wandb that can do no harm."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import ClassVar

import pytest

from testbed.tracking import MACHINE, METRICS, Progress, ProgressLine, Tracker, WandbRun, duration, quantity


def test_lines_rates_and_time_left(tmp_path: Path) -> None:
    now = [100.0]
    seen: list[Progress] = []
    with Tracker(tmp_path, name="mid", report=seen.append, clock=lambda: now[0]) as tracker:
        # The first step takes 50 s to warm up, the others a second each.
        for step, seconds in enumerate((50, 1, 1, 1), start=1):
            now[0] += seconds
            tracker.log(step, 10, tokens=100 * step, loss=1 / step, reward=math.nan)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert 10 < lines[1].pop("peak_memory_mib") < 1e5
    assert lines[1] == {"step": 2, "total": 10, "time": 51.0, "tokens": 200.0, "loss": 0.5}
    assert lines[2]["tokens_per_s"] == 100.0 and "flops_per_s" not in lines[2] and "mfu" not in lines[2]
    assert set(lines[3]) - {"step", "total", "tokens", "loss"} <= set(MACHINE)
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
    copy = WandbRun(project="p", name="n", folder=tmp_path, config={}, key="k", announce=said.append)
    with Tracker(tmp_path, wandb=copy) as tracker:
        tracker.log(1, 2, loss=1.0)
        tracker.log(2, 2, loss=1.0)
    assert len(said) == 1 and said[0].startswith("wandb is off (")
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2


def test_wandb_gets_the_metrics_until_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def log(self, metrics: dict[str, float], step: int) -> None:
            assert step == metrics["step"]
            if len(self.logged) == 1:
                raise OSError("disk full")
            self.logged.append(metrics)

    run, said, asked = Run(), [], {}

    def init(**arguments: object) -> Run:
        asked.update(arguments)
        return run

    fake = type("wandb", (), {"init": staticmethod(init), "Settings": staticmethod(lambda **_: None)})
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    copy = WandbRun(project="p", name="n", folder=tmp_path, config={}, key="k", announce=said.append)
    for step in (1, 2, 3):
        copy.log({"step": step})
    copy.finish()
    assert run.logged == [{"step": 1}]
    # One run a stage, taken up under its key; offline where there is no key of wandb's.
    assert asked["id"] == "k" and asked["resume"] == "allow" and asked["mode"] == "offline"
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


def test_wandb_is_online_where_there_is_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from testbed.tracking import _wandb_mode

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert _wandb_mode() == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.example login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert _wandb_mode() is None
    (tmp_path / ".netrc").write_text("what is this\n")
    assert _wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert _wandb_mode() is None


def test_steps_that_wandb_has_are_not_logged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that was killed and taken up repeats some steps; wandb would drop what does not increase, and warn."""

    class Run:
        step = 4
        logged: ClassVar[list[int]] = []

        def log(self, metrics: dict[str, float], step: int) -> None:
            self.logged.append(step)

        def finish(self) -> None: ...

    fake = type("wandb", (), {"init": staticmethod(lambda **_: Run()), "Settings": staticmethod(lambda **_: None)})
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    copy = WandbRun(project="p", name="n", folder=tmp_path, config={}, key="k@3", announce=print)
    for step in (2, 3, 4, 5):
        copy.log({"step": step})
    assert Run.logged == [4, 5]


def test_a_run_that_is_taken_up_goes_on_in_its_file_and_its_time(tmp_path: Path) -> None:
    """No line twice, none lost, and no time left or rate that counts what another run did."""
    now = [100.0]
    with Tracker(tmp_path, clock=lambda: now[0]) as first:
        for step in (1, 2, 3):
            now[0] += 1
            first.log(step, 10, tokens=100 * step)
            if step == 2:
                saved = (tmp_path / METRICS).read_text()
    (tmp_path / "saved").write_text(saved)
    (tmp_path / "again").mkdir()
    now[0], seen = 5000.0, []
    with Tracker(tmp_path / "again", report=seen.append, clock=lambda: now[0]) as second:
        second.log(1, 10)  # replaced by what was saved
        second.take_up(tmp_path / "saved", 2.5)
        for step in (3, 4, 5, 6):
            now[0] += 1
            second.log(step, 10, tokens=100 * step)
        assert second.seconds == 6.5
    lines = [json.loads(line) for line in (tmp_path / "again" / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["time"] for line in lines] == [1, 2, 3.5, 4.5, 5.5, 6.5]
    assert seen[-1].left == 4.0 and seen[-1].tokens_per_s == 100.0


@pytest.mark.parametrize(
    ("card", "peak"), [("NVIDIA H200", 495e12), ("NVIDIA A100-SXM4-80GB", 156e12), ("Some card", None)]
)
def test_mfu_is_told_where_the_peak_is_known(
    card: str, peak: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda = type("cuda", (), {
        "is_available": staticmethod(lambda: True), "get_device_name": staticmethod(lambda: card),
        "is_initialized": staticmethod(lambda: True), "max_memory_allocated": staticmethod(lambda: 2**21),
    })  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "torch", type("torch", (), {"cuda": cuda}))
    now = [0.0]
    for devices in (1, 2):
        with Tracker(tmp_path, clock=lambda: now[0], devices=devices) as tracker:
            for step in (1, 2, 3):
                now[0] += 2
                tracker.log(step, 3, tokens=100 * step, flops=1e12 * step)
        last = json.loads((tmp_path / METRICS).read_text().splitlines()[-1])
        assert last["flops_per_s"] == 5e11 and last["peak_memory_mib"] == 2.0
        assert last.get("mfu") == (None if peak is None else 5e11 / (devices * peak))
