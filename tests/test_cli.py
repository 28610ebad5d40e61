"""The command: what it prints; and every mistake is a paragraph on stderr, status 2 and nothing half-written."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_runners
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from sweeps.local import run_graph
from testbed import execute
from testbed.cli import _report_name, app
from testbed.graph import build
from testbed.spec import BUILT_IN, load
from testbed.store import Store

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_STORE", raising=False)
    for kind, runner in fake_runners.RUNNERS.items():
        monkeypatch.setitem(execute.RUNNERS, kind, runner)  # type: ignore[arg-type]
    yield


def call(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input)


def refused(*arguments: str) -> str:
    """What is said on stderr; status 2, no output, no traceback, nothing written."""
    before = sorted(Path.cwd().rglob("*"))
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    assert sorted(Path.cwd().rglob("*")) == before
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "quickstar"], "did you mean `quickstart`"),
        (["run", "none.yaml"], "no spec file"),
        (["run", "smoke", "--set", "stages.mid.tokns=3"], "stages.mid.tokns: unknown field (did you mean `tokens`?)"),
        (["run", "smoke", "--set", "stages.mid.tokens=many"], "stages.mid.tokens: expected a valid integer"),
        (["run", "smoke", "--set", "stages.mid.tokens=-5"], "stages.mid: tokens must be positive, not -5."),
        (["run", "smoke", "--set", "bands.edge=[]"], "bands.edge: the band is empty"),
        (
            ["run", "smoke", "--set", "task.settings={operators: '+', modulus: 2, names: 8}"],
            "bands.in_range: no problem of 1 operations is left for the test split",
        ),
        (["run", "smoke", "--set", "evaluation.k=[1, 3]"], "evaluation.samples (4) must be at least twice"),
        (["run", "smoke", "--set", "tokens"], "path=value"),
        (["run", "smoke", "--workers", "0"], "greater than or equal to 1"),
        (["run", "smoke", "--nothing"], "No such option"),
        (["results", "smoke"], "are not in"),
        (["results", "smoke", "--format", "xml"], "xml"),
        (["report", "smoke"], "are not in"),
        (["tasks", "sample", "arithmatic"], "did you mean 'arithmetic'"),
        (["tasks", "sample", "arithmetic", "--operations", "99"], "99 operations"),
        (["tasks", "sample", "arithmetic", "--setting", "modulos=7"], "did you mean 'modulus'"),
        (["tasks", "sample", "arithmetic", "--setting", "modulus"], "name=value"),
        (["tasks", "show", "none"], "no task"),
        (["tasks", "verify", "none.jsonl"], "cannot be read"),
        (["nothing"], "No such command"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_is_a_paragraph_and_status_2(arguments: list[str], words: str) -> None:
    assert words in " ".join(refused(*arguments).replace("│", " ").split())


def test_a_store_that_cannot_be_written() -> None:
    Path("file").write_text("")
    assert "cannot be written" in refused("run", "smoke", "--store", "file/store")


def test_a_mistake_in_a_real_process_has_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "testbed", "run", "quickstar"]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("Error: There is no spec named `quickstar`") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_plan_and_writes_nothing() -> None:
    result = call("run", "smoke", "--dry-run")
    assert result.exit_code == 0 and "24 of 24 nodes to make" in result.stdout
    assert list(Path.cwd().iterdir()) == []


def test_results_in_every_format() -> None:
    assert run_graph(build(load("smoke")), Store("store"), workers=1, runners=fake_runners.RUNNERS).ok
    again = call("run", "smoke", "--store", "store", "--set", "title=Other", "--dry-run")
    assert "0 of 24 nodes to make" in again.stdout

    stored = ("results", "smoke", "--store", "store")
    rows = json.loads(call(*stored, "--format", "json").stdout)
    assert len(rows) == 5 * 2 * 3
    wanted = {"arm", "seed", "operations", "problems", "samples", "strict_pass_at_1", "answer_pass_at_1"}
    assert wanted < set(rows[0]) and set(rows[0]["strict_pass_at_k"]) == {"1", "2"}
    csv = pd.read_csv(io.StringIO(call(*stored, "--format", "csv").stdout))
    assert csv["strict_pass_at_2"].tolist() == [row["strict_pass_at_k"]["2"] for row in rows]
    assert "Strict pass@1" in call(*stored).stdout
    saved = call(*stored, "--format", "parquet", "--output", "r.parquet")
    assert saved.exit_code == 0 and saved.stdout == "" and len(pd.read_parquet("r.parquet")) == len(rows)
    assert "--output" in refused(*stored, "--format", "parquet")
    assert "cannot be written" in refused(*stored, "--output", "none/r.txt")
    assert "cannot be written" in refused(*stored, "--output", "r.parquet/r.txt")
    claims = json.loads(call(*stored, "--format", "json", "--claims").stdout)
    assert claims[0]["claim"] == "rl gains at the edge" and {"low", "high", "verdict"} < set(claims[0])
    assert "rl gains at the edge" in call(*stored, "--claims").stdout
    # Brackets of a name are no markup.
    odd = ["--set", "arms={'[/red]': anneal}", "--set", "attribution=null", "--set", "claims=[]"]
    assert "[/red]" in call(*stored, *odd).stdout


def test_a_spec_does_not_replace_the_report_of_another() -> None:
    text = (BUILT_IN / "smoke.yaml").read_text()
    Path("same.yaml").write_text(text)
    Path("changed.yaml").write_text(text.replace("title: Every", "title: Any"))
    Path("own.yaml").write_text(text.replace("name: smoke", "name: own"))
    assert _report_name(load("same.yaml"), []) == _report_name(load("smoke"), []) == "smoke"
    assert _report_name(load("own.yaml"), []) == "own"
    other, changed = (
        _report_name(load("smoke", ["title=Other"]), ["title=Other"]),
        _report_name(load("changed.yaml"), []),
    )
    assert len({other, changed, "smoke"}) == 3 and all(name.startswith("smoke-") for name in (other, changed))


def test_a_failed_node_is_told_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(execute.RUNNERS, "rl", "fake_runners:failing_rl")  # type: ignore[arg-type]
    result = call("run", "smoke", "--store", "store", "--workers", "1")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: 4 of 24 nodes failed and 8 that need them were left out; 12 were made")
    assert "RuntimeError: the reward was lost. The traceback is in" in last
    assert last.endswith("The same command with --retry tries again; without it, what failed stays failed.")
    again = call("run", "smoke", "--store", "store", "--workers", "1").stderr.splitlines()[-1]
    assert again.endswith("What failed in an earlier run is not tried again; --retry does.")
    monkeypatch.setitem(execute.RUNNERS, "rl", "fake_runners:out_of_space")  # type: ignore[arg-type]
    full = call("run", "smoke", "--store", "store", "--workers", "1", "--retry").stderr.splitlines()[-1]
    assert "No space left on device" in full and full.endswith("The same command tries again.")


def test_tasks() -> None:
    assert "arithmetic" in call("tasks", "list").stdout
    shown = call("tasks", "show", "arithmetic", "--setting", "modulus=5").stdout
    assert "modulus      5" in shown and "statuses" in shown
    text = call("tasks", "sample", "arithmetic", "--operations", "6", "--seed", "1").stdout
    assert "operations 6" in text and "prompt" in text and "solution" in text


def test_sampled_problems_verify() -> None:
    arguments = ["--operations", "3", "--seed", "1", "--count", "3", "--split", "test", "--setting", "modulus=5"]
    lines = call("tasks", "sample", "arithmetic", *arguments, "--json").stdout.splitlines()
    problems = [json.loads(line) for line in lines]
    assert [p["index"] for p in problems] == [0, 1, 2] and problems[0]["cell"]["settings"] == {"modulus": 5}
    answers = [problems[0]["solution"], problems[1]["solution"] + " ;", "! " + problems[2]["answer"]]
    Path("f.jsonl").write_text(
        "\n\n".join(json.dumps(p | {"completion": a}) for p, a in zip(problems, answers, strict=True))
    )
    result = call("tasks", "verify", "f.jsonl")
    verdicts = [json.loads(line)["verdict"] for line in result.stdout.splitlines()]
    assert [v["strict"] for v in verdicts] == [True, False, False]
    assert [v["answer_correct"] for v in verdicts] == [True, True, True]
    assert verdicts[1]["parse_error"]["reason"] and verdicts[0]["parse_error"] is None
    assert call("tasks", "verify", "-", input=Path("f.jsonl").read_text()).stdout == result.stdout


GOOD = {"task": "arithmetic", "cell": {"operations": 2}, "seed": 0, "index": 0, "completion": ""}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: this is not JSON"),
        ("[1]", "line 2: expected an object"),
        (json.dumps({"task": "arithmetic"}), "line 2: `cell` is missing"),
        (json.dumps(GOOD | {"seed": "0"}), "`seed` must be a whole number"),
        (json.dumps(GOOD | {"seed": True}), "`seed` must be a whole number"),
        (json.dumps(GOOD | {"completion": None}), "`completion` must be text"),
        (json.dumps(GOOD | {"cell": {"operation": 2}}), "unknown `cell.operation` (did you mean `operations`?)"),
        (json.dumps(GOOD | {"cell": {"operations": 2.5}}), "`cell.operations` must be a whole number"),
        (json.dumps(GOOD | {"cell": {"operations": 99}}), "line 2: 99 operations"),
        (json.dumps(GOOD | {"cell": {"settings": {"modulos": 7}}}), "did you mean 'modulus'"),
        (json.dumps(GOOD | {"cell": {"split": "dev"}}), "split must be one of"),
        (json.dumps(GOOD | {"index": -1}), "line 2:"),
        (json.dumps(GOOD | {"task": "chess"}), "no task 'chess'"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(GOOD)[:-1] + ', "more": ' + "1" * 5000 + "}", "too many digits"),
        (json.dumps(GOOD | {"prompt": "? a :"}), '`prompt` is "? a :", but the problem'),
        (json.dumps(GOOD | {"split": "test"}), '`split` is "test", but the problem'),
    ],
)
def test_a_bad_line_is_named(line: str, words: str) -> None:
    Path("f.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    assert words in refused("tasks", "verify", "f.jsonl")


def test_doctor_says_what_the_machine_is_good_for() -> None:
    result = call("doctor", "--store", "store")
    assert result.exit_code == 0, result.output
    for words in ("cores", "GFLOP/s", "minutes", "memory", "will be made by the first run", "torch"):
        assert words in result.stdout
    assert list(Path.cwd().iterdir()) == []
    Path("file").write_text("")
    assert call("doctor", "--store", "file").exit_code == 2
    assert "cannot be written" in call("doctor", "--store", "/proc/x").stdout


def test_version() -> None:
    result = call("--version")
    assert result.exit_code == 0 and result.stdout.startswith("testbed ")


def test_the_real_thing_from_nothing_to_a_report(tmp_path: Path) -> None:
    """Every real run function, over two worker processes; the second call has nothing left to do."""
    changes = ["seeds=[0]", "arms={pretrained: anneal, mid: mid, rl: rl}", "attribution=null"]
    command = [sys.executable, "-m", "testbed", "run", "smoke", "--store", "store", "--workers", "2"]
    command += [part for change in changes for part in ("--set", change)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)

    first, second = run(), run("--dry-run")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    for words in ("9 made, 0 reused", "Strict pass@1", "Claims", "FLOPs"):
        assert words in first.stdout
    assert "0 of 9 nodes to make" in second.stdout
    made = [line.split()[1] for line in first.stdout.splitlines() if line.startswith(("Report", "Figure"))]
    assert len(made) >= 4 and all(Path(path).stat().st_size > 1000 for path in made)
    code = (
        "import testbed; from synthetic_tasks import get_task\n"
        "model, tokenizer = testbed.load('smoke/mid', store='store')\n"
        "problem = get_task('arithmetic', names=8).sample(seed=0, index=0, operations=1)\n"
        "texts = testbed.generate(model, tokenizer, [problem.prompt] * 2, samples=3, max_new_tokens=5)\n"
        "assert [len(t) for t in texts] == [3, 3]\n"
        "scores = testbed.score(model, tokenizer, problem.prompt, problem.solution)\n"
        "assert len(scores) == len(problem.solution.split()) + 1 and max(scores) < 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
