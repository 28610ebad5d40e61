"""What a long job tells while it runs: metrics as JSON lines, always; one progress line; wandb when asked.

The JSON lines are the truth (`curves` is read from them); wandb is a copy that may fail without harm.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
# Metrics of the machine: they differ from one run to the next, all others are equal to the last bit.
MACHINE = ("time", "tokens_per_s", "flops_per_s", "peak_memory_mib", "mfu")
# Peak of dense fp32 matrix products (TF32 where the card has it; vendors' data sheets), FLOP/s, by the card's name. MFU
# is told for these alone.
PEAKS = {"A100": 156e12, "H100": 495e12, "H200": 495e12}
# The first steps (compilation, caches) are left out of rates and of the time left.
WARMUP_CALLS = 2


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where one node stands."""

    name: str
    step: int
    total: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    # None until the warm-up is over.
    tokens_per_s: float | None = None
    # Seconds.
    left: float | None = None

    def line(self) -> str:
        """`mid, seed 0  120/400  loss 0.53  41k tok/s  12 s left`"""
        parts = [self.name, f"{self.step}/{self.total}"]
        parts += [f"{name} {self.metrics[name]:.3g}" for name in ("loss", "reward") if name in self.metrics]
        if self.tokens_per_s is not None:
            parts.append(f"{quantity(self.tokens_per_s)} tok/s")
        if self.left is not None:
            parts.append(f"{duration(self.left)} left")
        return "  ".join(parts)


class Tracker:
    """Writes metrics.jsonl in `out` and reports progress.

    `tokens`, where it is logged, counts from the start of the node and gives the rate.
    """

    def __init__(
        self,
        out: Path,
        *,
        name: str = "",
        report: Callable[[Progress], None] | None = None,
        wandb: WandbRun | None = None,
        clock: Callable[[], float] = time.monotonic,
        devices: int = 1,
    ) -> None:
        """devices: that share what is logged."""
        self._devices = devices
        self.path = out / METRICS
        self._file = self.path.open("a", encoding="utf-8")
        self._name, self._report, self._wandb, self._clock = name, report, wandb, clock
        self._start = clock()
        self._calls = 0
        # (time, step, tokens, FLOPs) at the end of the warm-up of this run.
        self._warm: tuple[float, int, float, float] | None = None

    def take_up(self, metrics: Path, seconds: float) -> None:
        """Go on after the lines of a saved run, which took `seconds`: they become the first of this one, and its time
        counts on."""
        lines = metrics.read_text(encoding="utf-8")
        self._file.seek(0)
        self._file.truncate()
        self._file.write(lines)
        self._file.flush()
        self._start = self._clock() - seconds

    @property
    def seconds(self) -> float:
        """Since the start of the node, over all its runs."""
        return self._clock() - self._start

    def log(self, step: int, total: int, **metrics: float) -> None:
        """One line of metrics at a step of `total`; None and NaN metrics are left out."""
        now = self._clock()
        kept = {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
        progress = self._progress(step, total, kept, now)
        kept |= self._machine(progress, kept)
        line = {"step": step, "total": total, "time": round(now - self._start, 3), **kept}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **kept})
        if self._report is not None:
            self._report(progress)

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _progress(self, step: int, total: int, metrics: dict[str, float], now: float) -> Progress:
        self._calls += 1
        tokens = metrics.get("tokens", 0.0)
        if self._calls == WARMUP_CALLS:
            self._warm = (now, step, tokens, metrics.get("flops", 0.0))
        rate = left = None
        if self._warm is not None and step > self._warm[1] and now > self._warm[0]:
            seconds = now - self._warm[0]
            left = (total - step) * seconds / (step - self._warm[1])
            rate = (tokens - self._warm[2]) / seconds if tokens > self._warm[2] else None
        return Progress(name=self._name, step=step, total=total, metrics=metrics, tokens_per_s=rate, left=left)

    def _machine(self, progress: Progress, metrics: dict[str, float]) -> dict[str, float]:
        """What the machine does: tokens/s and FLOP/s since the warm-up, memory at its peak, share of peak FLOP/s."""
        out: dict[str, float] = {}
        if progress.tokens_per_s is not None and self._warm is not None:
            out["tokens_per_s"] = round(progress.tokens_per_s, 1)
            if "flops" in metrics:
                out["flops_per_s"] = (metrics["flops"] - self._warm[3]) / (self._clock() - self._warm[0])
        memory, peak = _peak_memory(), _peak_flops()
        if memory is not None:
            out["peak_memory_mib"] = round(memory / 2**20, 1)
        if peak is not None and "flops_per_s" in out:
            out["mfu"] = out["flops_per_s"] / (peak * self._devices)
        return out


def _peak_memory() -> int | None:
    """Bytes: of the card where there is one in use, else of this process; None where the system does not tell."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_flops() -> float | None:
    """FLOP/s that the device could do, where it is known."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class ProgressLine:
    """One line that is rewritten on a terminal; elsewhere a plain line now and then."""

    def __init__(
        self, stream: TextIO | None = None, *, every: float = 30.0, clock: Callable[[], float] = time.monotonic
    ):
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every = 0.1 if self._terminal else every
        self._clock = clock
        self._last = -math.inf
        self._shown = False

    def show(self, text: str) -> None:
        """Show the state, unless the last one is too fresh."""
        if self._clock() - self._last < self._every:
            return
        self._last = self._clock()
        if self._terminal:
            self._stream.write("\r\x1b[2K" + text[: _width() - 1])
            self._shown = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._shown = False


class WandbRun:
    """A copy of the metrics in wandb, one run a stage, grouped by spec; whatever fails is announced once, and the work
    goes on.

    Without a key it is kept offline, for `wandb sync`. A stage that is taken up goes on with its run; lines that were
    logged before a kill and are logged again are left out, since wandb drops steps that do not increase.
    """

    def __init__(
        self, *, project: str, name: str, folder: Path, config: dict[str, Any], announce: Callable[[str], None],
        key: str, group: str = "",
    ):  # fmt: skip
        self._announce = announce
        self._run: Any = None
        self._last = -1

        def start() -> None:
            import wandb

            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=project, name=name, group=group or None, id=key.replace("@", "-"), resume="allow",
                dir=str(folder), config=config, reinit="create_new", mode=_wandb_mode(),
                settings=wandb.Settings(silent=True, init_timeout=20),
            )  # fmt: skip
            self._last = int(getattr(self._run, "step", 0) or 0) - 1

        self._guard(start)

    def log(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        if self._run is not None and step > self._last:
            self._last = step
            self._guard(lambda: self._run.log(metrics, step=step))

    def finish(self) -> None:
        if self._run is not None:
            self._guard(lambda: self._run.finish())

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # wandb raises many kinds, and none may end a run
            self._run = None
            first = str(error).strip().splitlines()[:1] or [type(error).__name__]
            self._announce(f"wandb is off ({first[0]}); metrics are in {METRICS} all the same.")


def _wandb_mode() -> str | None:
    """Offline where there is neither a wish nor a key; None leaves it to wandb."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return None
    try:
        # Where `wandb login` puts it. wandb itself tells only by asking, or by going online.
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        hosts = {}
    return None if any("wandb" in host for host in hosts) else "offline"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def quantity(value: float) -> str:
    """A number to two or three digits with k, M, G, T or P: `41k`, `1.3M`."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def _width() -> int:
    import shutil

    return shutil.get_terminal_size().columns
