"""Imports point down, never up; and `import testbed` costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Which of the project's packages each may import.
MAY_IMPORT = {
    "synthetic_tasks": set(),
    "models": set(),
    "analysis": set(),
    "testbed": {"models", "synthetic_tasks", "analysis"},
    "sweeps": {"testbed", "analysis"},
    "paper_figures": {"sweeps", "testbed", "analysis"},
}
# Which libraries the lower ones may import, beside the standard library.
LIBRARIES = {
    "synthetic_tasks": {"numpy", "chess", "sympy"},
    "models": {"torch", "triton", "numpy"},
    "analysis": {"numpy", "scipy", "pandas", "statsmodels"},
}
# The one module on top.
TOP = ROOT / "testbed" / "cli.py"


def modules() -> list[Path]:
    found = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if "notebooks" not in path.parts]


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of all imported modules, those inside functions too. Relative imports stay inside their package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def faults(package: str, source: str) -> list[str]:
    """What a module of the package imports and may not."""
    tops = {name.partition(".")[0] for name in imported(ast.parse(source))}
    allowed = {package} | MAY_IMPORT[package]
    wrong = {top for top in tops if top in MAY_IMPORT and top not in allowed}
    if package in LIBRARIES:
        outside = tops - set(sys.stdlib_module_names) - set(MAY_IMPORT)
        wrong |= outside - LIBRARIES[package]
    return sorted(wrong)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_points_down(path: Path) -> None:
    if path != TOP:
        assert faults(path.relative_to(ROOT).parts[0], path.read_text()) == []


def test_the_rule_sees_what_it_forbids() -> None:
    assert faults("models", "import testbed") == ["testbed"]
    assert faults("models", "def f():\n    from analysis.claims import Claim") == ["analysis"]
    assert faults("testbed", "import sweeps.local, paper_figures") == ["paper_figures", "sweeps"]
    assert faults("analysis", "import numpy, torch, os") == ["torch"]
    assert faults("sweeps", "import testbed, torch") == []


def test_no_module_hides_from_the_rule() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import testbed", ("torch", "matplotlib", "pandas")),
        ("import testbed.cli", ("torch", "matplotlib", "pandas")),
        (
            "from testbed.spec import load; from testbed.graph import build; build(load('smoke'))",
            ("torch", "matplotlib"),
        ),
        ("import analysis, synthetic_tasks", ("torch", "matplotlib")),
        ("import testbed; testbed.plan('smoke', 'nowhere', probe=False)", ("torch", "matplotlib", "sweeps")),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str, absent: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys; loaded = [m for m in {absent!r} if m in sys.modules]; assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)


def test_the_notebook_functions_are_there() -> None:
    import testbed

    names = {"export", "generate", "load", "load_spec", "plan", "results", "run", "score"}
    assert set(testbed.__all__) == names <= set(dir(testbed))
    assert all(callable(getattr(testbed, name)) for name in testbed.__all__)
    with pytest.raises(AttributeError):
        testbed.nothing  # noqa: B018
