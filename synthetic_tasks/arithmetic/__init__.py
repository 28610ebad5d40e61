"""Arithmetic over named quantities, modulo a prime; a family of the kind of iGSM (arXiv 2407.20311)."""

from synthetic_tasks.arithmetic.settings import ArithmeticSettings
from synthetic_tasks.arithmetic.task import ArithmeticTask
from synthetic_tasks.arithmetic.trace import Facts, Reading, Step, Trace

__all__ = ["ArithmeticSettings", "ArithmeticTask", "Facts", "Reading", "Step", "Trace"]
