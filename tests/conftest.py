"""Under CI a skip is a failure unless its reason is one of those that a machine cannot help; torch warns every time."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch

# A warning that is given once fails whichever test comes first, and hides in the others.
torch.set_warn_always(True)

# Starts of reasons that stand even under CI. A kernel test has none: the interpreter runs it anywhere.
ALLOWED_SKIPS = ("needs a GPU",)


def _refused(report: Any) -> bool:
    if not (os.environ.get("CI") and report.skipped) or hasattr(report, "wasxfail"):
        return False
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS)


def _refuse(report: Any) -> None:
    if _refused(report):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI, where every test must run: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(report)
    return report
