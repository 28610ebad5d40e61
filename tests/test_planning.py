"""Plans: what they say beforehand is what runs then find, and nothing is written."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_runners
import pytest
import torch
from typer.testing import CliRunner, Result

import testbed
from models.config import ModelConfig
from models.flops import Shape
from models.sampler import Samples, sample, sampling_shape
from models.transformer import Transformer
from sweeps.local import run_graph
from testbed import estimates, execute, training
from testbed.cli import app
from testbed.config import Optimizer
from testbed.errors import SpecError, UserError
from testbed.estimates import Cost, Lengths, parameter_count
from testbed.graph import build
from testbed.nodes import shelf
from testbed.planning import Plan, PlannedNode, _elapsed, plan
from testbed.spec import load
from testbed.store import Store
from testbed.timing import Gauge

ROOT = Path(__file__).parent.parent
# Small enough a step for a budget to be met to a few percent.
FINE = [f"stages.{stage}.rows=1" for stage in ("pretrain", "anneal", "mid", "continued")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESTBED_STORE", raising=False)
    yield


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, runner in fake_runners.RUNNERS.items():
        monkeypatch.setitem(execute.RUNNERS, kind, runner)  # type: ignore[arg-type]


def planned(*changes: str, store: str = "store", probe: bool = False) -> Plan:
    return plan([load("smoke", changes)], Store(store), probe=probe)


def named(found: Plan, name: str, seed: int | None = 0, kind: str | None = None) -> PlannedNode:
    """The one node of that name and repetition that is no evaluation, unless another kind is asked for."""
    (node,) = [
        node
        for node in found
        if node.name == name and node.seed == seed and (node.kind == kind if kind else node.kind != "evaluation")
    ]
    return node


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --- estimates


def test_estimates_are_what_a_run_then_counts() -> None:
    # What RL comes to before it has learnt anything nobody knows, nor what matches it.
    spec, store = load("smoke", ["seeds=[0]", *FINE, "stages.continued.match=[mid]"]), Store("store")
    before = plan([spec], store)
    assert not store.root.exists()
    assert run_graph(build(spec), store, workers=1).ok
    after = {node.key: node for node in plan([spec], store)}
    compared = 0
    for node in before:
        then = after[node.key]
        assert (node.state, then.state) == ("missing", "done")
        assert (node.measured, then.measured) == (False, True)
        assert node.parameters == then.parameters
        if node.kind in ("pretrain", "midtrain"):
            compared += 1
            assert node.tokens == pytest.approx(then.tokens, rel=0.05)
            assert node.flops == pytest.approx(then.flops, rel=0.05)
        if node.kind == "corpus":
            assert node.tokens == then.tokens > 0  # of so few documents all are looked at
        assert node.seconds and then.seconds and node.memory_bytes
    assert compared == 4
    assert before.totals["to_do"].seconds == pytest.approx(sum(node.seconds or 0 for node in before))
    assert before.probe["measured"] and before.probe["shapes"] > 0
    # Nothing is left, so that nothing is measured.
    done = plan([spec], store)
    assert done.probe == {"measured": False} and done.assumed == [] and done.totals["to_do"].nodes == 0
    rl = named(done, "rl")
    manifest = store.examine("stages", rl.key)[1]
    assert (rl.tokens, rl.sampled_tokens) == tuple(manifest["summary"][name] for name in ("tokens", "sampled_tokens"))
    assert (rl.flops, rl.seconds) == (manifest["summary"]["flops"], manifest["wall_s"])


def test_memory_is_of_the_order_of_what_a_run_takes() -> None:
    """Half of it are activations: 64 rows of 256 tokens."""
    changes = [
        "seeds=[0]", "arms={a: pretrain}", "attribution=null", "claims=[]", "stages.pretrain.rows=64",
        "stages.pretrain.tokens=15000",
        *(f"stages.{stage}.row_length=256" for stage in ("pretrain", "anneal", "mid", "continued")),
    ]  # fmt: skip
    code = (
        "import sys, resource; from pathlib import Path; from testbed.spec import load\n"
        "from testbed.graph import build; from testbed.store import Store; from sweeps.local import run_graph\n"
        "assert run_graph(build(load('smoke', sys.argv[1:])), Store('store'), workers=1, threads=1).ok\n"
        # Linux counts the peak of the process that started this one in ru_maxrss.
        "told = Path('/proc/self/status')\n"
        "if told.exists():\n"
        "    print(1024 * int(told.read_text().split('VmHWM:')[1].split()[0]))\n"
        "else:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    measured, formula = (planned(*changes, probe=probe, store="none") for probe in (True, False))
    result = subprocess.run(
        [sys.executable, "-c", code, *changes], capture_output=True, text=True, env=environment, check=True
    )
    peak = int(result.stdout)
    for found in (measured, formula):
        bytes_ = max(node.memory_bytes or 0 for node in found)
        assert peak / 2 < bytes_ < 2 * peak
        # The base alone would not do.
        assert bytes_ > 1.4 * estimates.BASE_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"tied": False}, {"canon": 0}, {"qk_norm": False}, {"heads": 8, "kv_heads": 2}, {"head_dim": 32},
        {"hidden": 96, "layers": 3},
    ],
)  # fmt: skip
def test_parameters_and_activations_without_a_model(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(ModelConfig(layers=2), **changes)
    assert parameter_count(config, 38) == Transformer(config, 38).parameter_count()
    saved = Gauge(threads=1).train(config, 38, Optimizer(), rows=2, row_length=64, accumulate=1).saved_bytes
    assert saved == pytest.approx(2 * 64 * estimates._saved_bytes(config, 38, 64), rel=0.3)


def test_sampling_is_counted_as_the_sampler_counts_it() -> None:
    lengths = Lengths(prompts=[5, 9], solutions=[4, 2], judging=0.0)
    drawn = torch.tensor([4, 4, 4, 2, 2, 2])
    none = torch.zeros(6, 4)
    samples = Samples(none.long(), drawn, drawn > 0, none)
    found, sampled = lengths.shape(2, 3)
    assert Shape(*map(int, found)) == sampling_shape([[1] * 5, [1] * 9], samples)
    assert sampled == 18
    assert lengths.shape(20, 3) == (tuple(10 * value for value in found), 180)


def test_numbers_that_stand_in_two_places_agree() -> None:
    assert estimates.HELD_OUT == training.PROBE_PROBLEMS
    assert inspect.signature(sample).parameters["max_rows"].default == estimates.MOST_ROWS


def test_budgets_of_every_kind() -> None:
    found = planned(
        "stages.rl.steps=null", "stages.rl.flops=1e9", "stages.mid_rl.updates=3", "stages.anneal.tokens=null",
        "stages.anneal.flops=1e10",
    )  # fmt: skip
    assert named(found, "rl").flops == pytest.approx(1e9)
    step = named(found, "anneal").flops / round(1e10 / named(found, "anneal").flops)
    assert abs(named(found, "anneal").flops - 1e10) <= step
    usual = planned()
    mid_rl = named(usual, "mid_rl")
    assert named(found, "mid_rl").tokens == pytest.approx(3 * mid_rl.tokens, abs=2)
    assert named(found, "mid_rl").flops > 2 * mid_rl.flops
    assert named(found, "mid_rl").sampled_tokens == mid_rl.sampled_tokens
    assert mid_rl.flops_most and mid_rl.flops_most > mid_rl.flops
    matched = named(usual, "mid").flops + mid_rl.flops
    # To the nearest of its steps, of which it takes about five.
    assert named(usual, "continued").flops == pytest.approx(matched, rel=0.12)


def test_several_objectives_and_sums_of_checkpoints() -> None:
    found = planned(
        "stages.far={kind: rl, parent: pretrain, edge: {parent: stable, optimizer: reset, rate: restart}, band: edge, "
        "steps: 9, prompts: 2, group: 4, max_new_tokens: 40}",
        "stages.both={kind: parallel, objectives: {mid: 0.5, far: 0.5}, steps: 4, every: 2}",
        "stages.sum={kind: combine, of: {mid: 0.5, anneal: 0.5}}",
        "arms={pretrained: anneal, both: both, sum: sum}", "attribution=null", "claims=[]",
        "probes={moved: {measure: weights, of: [sum], against: pretrain}}",
    )  # fmt: skip
    one = planned("stages.rl.band=edge")
    rl = named(one, "rl")
    both = named(found, "both")
    # Four steps of 8 rows of mid-training and four of the batch that `rl` takes once.
    assert both.sampled_tokens == 4 * rl.sampled_tokens
    step = named(one, "mid").tokens / 4
    assert both.tokens == pytest.approx(4 * (step + rl.tokens), rel=0.01)
    assert both.parent == "pretrain" and both.edge is not None
    assert both.edge == {"parent": "stable", "optimizer": "carry + reset", "rate": "continue + restart"}
    total = named(found, "sum")
    assert (total.parent, total.edge, total.tokens, total.flops) == ("mid + anneal", None, 0, 0)
    assert named(found, "moved of sum").parent == "sum + pretrain"
    assert both.memory_bytes and total.memory_bytes and both.memory_bytes > total.memory_bytes


def test_a_document_longer_than_a_row_is_told() -> None:
    # The first problem, which is all that the spec's own check draws, is one of the short ones.
    changes = [f"stages.{stage}.row_length=45" for stage in ("pretrain", "anneal", "continued", "mid")]
    with pytest.raises(UserError, match=r"stages.mid.row_length: the corpus `edge_mix` has documents of \d+ tokens"):
        planned(*changes, "problem_seed=5")


def test_what_cannot_be_tried_is_told_from_flops() -> None:
    config = ModelConfig(layers=2)
    gauge = Gauge(threads=1, limit=0.0)
    small = gauge.train(config, 38, Optimizer(kind="muon"), rows=8, row_length=64, accumulate=2)
    large = gauge.train(config, 38, Optimizer(), rows=80, row_length=64, accumulate=2)
    assert large.seconds > small.seconds > large.seconds / 10
    assert small.seconds > 0 and small.saved_bytes is None
    assert gauge.decode(config, 38, rows=8, samples=4, length=20).token > 0
    assert gauge.measured == 0 and len(gauge.notes) == 3 and "the time for measurements was up" in gauge.notes[0]
    huge = Gauge(threads=1)
    wide = ModelConfig(layers=40, width=4096, heads=32)
    assert huge.train(wide, 38, Optimizer(), rows=8, row_length=64, accumulate=2).seconds > 10
    assert huge.measured == 0 and "too large" in huge.notes[0] and huge.seconds < 5


def test_a_measurement_leaves_chance_and_threads_alone() -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    gauge = Gauge(threads=1)
    trained = gauge.train(ModelConfig(layers=1), 38, Optimizer(), rows=4, row_length=32, accumulate=3)
    assert gauge.train(ModelConfig(layers=1), 38, Optimizer(), rows=4, row_length=32, accumulate=3) is trained
    assert gauge.decode(ModelConfig(layers=1), 38, rows=8, samples=4, length=20).token > 0
    assert gauge.measured == 2 and gauge.notes == []
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), state)


# --- states


def test_states_of_the_store(monkeypatch: pytest.MonkeyPatch, fakes: None) -> None:
    monkeypatch.setitem(execute.RUNNERS, "rl", "fake_runners:failing_rl")  # type: ignore[arg-type]
    spec, store = load("smoke"), Store("store")
    assert not run_graph(build(spec), store, workers=1).ok
    graph = build(spec)
    keys = {(name, seed): key for (name, seed), key in graph.stages.items()}
    (store.root / f"partial/stages-{keys['mid_rl', 1]}" / "000000001").mkdir(parents=True)
    store.forgive("stages", keys["mid_rl", 1])
    store.forgive("stages", keys["rl", 1])
    with store.lease("stages", keys["rl", 1]):
        before = sorted(store.root.rglob("*"))
        found = planned()
        assert sorted(store.root.rglob("*")) == before
        shown = call("plan", "smoke", "--store", "store", "--no-probe").stdout
    states = {(name, seed): named(found, name, seed).state for name, seed in keys}
    wanted = {("rl", 0): "failed", ("rl", 1): "running", ("mid_rl", 0): "failed", ("mid_rl", 1): "partial"}
    wanted |= {(name, seed): "done" for name, seed in keys if name in ("pretrain", "anneal", "mid")}
    wanted |= {("continued", seed): "missing" for seed in (0, 1)}
    assert states == wanted
    assert named(found, "rl").reason == "RuntimeError: the reward was lost."
    assert named(found, "rl", 1).reason is None and named(found, "pretrain").measured
    assert "rl, seed 0 failed: RuntimeError: the reward was lost." in shown
    assert all(words in shown for words in ("1 failed", "1 running", "1 partial"))
    assert f"{len(found.to_do)} of 24 nodes to make" in shown


def test_a_checkpoint_on_the_way_costs_nothing_else_its_own_steps(fakes: None) -> None:
    kept = ["stages.pretrain.keep=[1, 4]"]
    found = planned(*kept)
    step = named(found, "pretrain").tokens / 9
    for name in ("pretrain@1", "pretrain@4"):
        node = named(found, name)
        assert (node.kind, node.tokens, node.flops) == ("checkpoint", 0, 0)
        assert node.maker == named(found, "pretrain").key
    plain = planned()
    assert found.totals["to_do"].tokens == plain.totals["to_do"].tokens
    assert named(planned("arms={a: pretrain@4}", "attribution=null", "claims=[]"), "pretrain@4").tokens == 4 * step

    store = Store("store")
    assert run_graph(build(load("smoke")), store, workers=1).ok
    late = planned(*kept)
    assert named(late, "pretrain").state == "done" and named(late, "pretrain@4").state == "missing"
    assert [named(late, name).tokens for name in ("pretrain@1", "pretrain@4")] == [step, 4 * step]
    # With the first there, the second goes on from it; and so does a stage.
    for seed, at in ((0, 1), (1, 4)):
        key = f"{named(late, 'pretrain', seed).key}@{at}"
        with store.publish("checkpoints", key) as draft:
            draft.manifest = {"summary": {"tokens": at * step, "flops": 1.0}}
    store.discard("stages", named(late, "pretrain", 1).key)
    now = planned(*kept)
    assert named(now, "pretrain@1").state == "done" and named(now, "pretrain@4").tokens == 3 * step
    assert named(now, "pretrain", 1).tokens == 5 * step and named(now, "pretrain@1", 1).tokens == 0


# --- totals


def test_what_sharing_spares_by_hand() -> None:
    found = planned()
    sums = {
        field: {
            name: sum(getattr(node, field) for node in found if node.name == name and node.kind != "evaluation")
            for name in ("pretrain", "anneal", "mid", "rl", "mid_rl", "continued")
        }
        for field in ("tokens", "flops")
    }
    judged = sum(node.flops for node in found if node.kind == "evaluation")
    for field, extra in (("tokens", 0), ("flops", judged)):
        p, a, m, r, mr, c = sums[field].values()
        shared, alone = (getattr(found.totals[name], field) for name in ("shared", "alone"))
        assert shared == pytest.approx(p + a + m + r + mr + c + extra)
        # pretrained, mid, rl, mid+rl, and continued without the stages that only lend it their FLOPs.
        assert alone == pytest.approx((p + a) + (p + m) + (p + a + r) + (p + m + mr) + (p + c) + extra)
    assert found.totals["to_do"] == dataclasses.replace(
        found.totals["shared"], memory_bytes=found.totals["to_do"].memory_bytes
    )
    assert found.totals["shared"].nodes == len(found) == 24 and found.totals["shared"].seconds is None


def test_specs_planned_together_share_their_nodes() -> None:
    one, more = load("smoke", ["name=one"]), load("smoke", ["name=more", "seeds=[0, 1, 2]", "stages.rl.steps=2"])
    found = plan([one, more], Store("store"), probe=False)
    alone = [plan([spec], Store("store"), probe=False) for spec in (one, more)]
    # Of `more` the third repetition is its own, and in the others `rl` with its evaluation.
    assert len(found) == 24 + 11 + 2 * 2
    assert named(found, "pretrain").specs == ("one", "more") and named(found, "pretrain", 2).specs == ("more",)
    assert {node.specs for node in found if node.name == "rl"} == {("one",), ("more",)}
    assert found.totals["alone"].tokens == sum(part.totals["alone"].tokens for part in alone)
    assert found.totals["shared"].tokens < sum(part.totals["shared"].tokens for part in alone)
    # One wants a checkpoint, the other the stage that passes it: it is made once.
    early = load("smoke", ["name=early", "arms={a: pretrain@4}", "attribution=null", "claims=[]"])
    both = plan([early, one], Store("store"), probe=False)
    assert named(both, "pretrain@4").maker == named(both, "pretrain").key
    assert both.totals["shared"].tokens == alone[0].totals["shared"].tokens
    places = [node.key for node in both]
    assert places.index(named(both, "pretrain").key) < places.index(named(both, "pretrain@4").key)


def test_elapsed_follows_the_longest_chain() -> None:
    costs = {name: Cost(seconds=seconds) for name, seconds in {"a": 3.0, "b": 2.0, "c": 4.0, "d": 1.0}.items()}
    before = {"b": {"a", "elsewhere"}, "d": {"c"}}
    assert [_elapsed(costs, before, workers) for workers in (1, 2, 9)] == [10.0, 5.0, 5.0]
    assert _elapsed({"a": Cost(seconds=1.0), "b": Cost(seconds=1.0)}, {"b": {"a"}}, 5) == 2.0
    assert _elapsed({}, {}, 2) == 0.0


# --- the command


def test_the_table_shows_edges_and_totals_and_writes_nothing() -> None:
    shown = call("plan", "smoke", "--no-probe")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert "smoke: 24 of 24 nodes to make" in lines[0]
    (anneal,) = [line for line in lines if "anneal" in line and "stable, carry, continue" in line]
    assert [cell.strip() for cell in anneal.split("│")[1:4]] == ["pretrain", "anneal", "2"]
    assert sum("evaluation" in line for line in lines if "│" in line) == 5
    for words in ("still to make", "every arm and seed by itself", "annealed, reset, restart", "gold solutions"):
        assert words in shown.stdout
    assert max(map(len, lines[:-2])) <= 160
    every = call("plan", "smoke", "--no-probe", "--all").stdout
    keys = [node.key[:8] for node in planned()]
    assert len(keys) == 24 and all(key in every for key in keys)
    dry = call("run", "smoke", "--dry-run").stdout
    assert dry == shown.stdout
    assert list(Path.cwd().iterdir()) == []


def test_json_is_complete_and_finite() -> None:
    result = call("plan", "smoke", "--format", "json", "--no-probe", "--store", "none", "--workers", "3")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(told) == {"specs", "store", "workers", "nodes", "totals", "probe", "assumed"}
    assert told["specs"] == ["smoke"] and told["store"] == str(Path("none").absolute()) and told["workers"] == 3
    graph = build(load("smoke"))
    assert {node["key"] for node in told["nodes"]} == set(graph.nodes)
    wanted = {field.name for field in dataclasses.fields(PlannedNode)}
    assert all(set(node) == wanted and node["state"] == "missing" and node["seconds"] is None for node in told["nodes"])
    for node in told["nodes"]:
        made = graph.nodes[node["key"]]
        assert (node["kind"], node["label"], node["inputs"]) == (made.kind, made.label, made.parents)
        assert (node["edge"] is None) == (node["kind"] in ("corpus", "evaluation") or node["name"] == "pretrain")
        assert node["memory_bytes"] > 0 and (node["parameters"] is None) == (node["kind"] == "corpus")
        assert shelf(node["kind"])
    assert set(told["totals"]) == {"to_do", "shared", "alone"} and told["probe"] == {"measured": False}
    assert list(Path.cwd().iterdir()) == []


def test_a_picture_in_every_format() -> None:
    for name in ("a.png", "a.svg", "a.pdf"):
        result = call("plan", "smoke", "--no-probe", "--picture", name)
        assert result.exit_code == 0 and f"Wrote {name}" in result.stderr, result.output
    assert "mid_rl" in Path("a.svg").read_text() or Path("a.svg").stat().st_size > 10_000
    assert Path("a.png").read_bytes().startswith(b"\x89PNG") and Path("a.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smok"], "did you mean `smoke`"),
        (["smoke", "none.yaml"], "There is no spec file none.yaml"),
        ([], "Missing argument"),
        (["smoke", "--picture", "a.gif"], "a picture is a .png, .svg or .pdf file"),
        (["smoke", "--no-probe", "--picture", "none/a.png"], "cannot be written"),
        (["smoke", "--format", "csv"], "csv"),
        (["smoke", "--workers", "0"], "greater than or equal to 1"),
        (["smoke", "--set", "stages.mid.tokns=3"], "did you mean `tokens`"),
    ],
)
def test_a_mistake_is_answered(arguments: list[str], words: str) -> None:
    result = call("plan", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert list(Path.cwd().iterdir()) == []


# --- from Python


def test_from_python(fakes: None) -> None:
    spec = testbed.load_spec("smoke", ["seeds=[3]"])
    assert testbed.load_spec(spec) is spec
    assert testbed.load_spec(spec, ["title=Other"]).title == "Other"
    with pytest.raises(SpecError, match="did you mean"):
        testbed.load_spec(spec, ["stages.mid.tokns=1"])
    found = testbed.plan(spec, "store", probe=False)
    assert [node.key for node in found] == [node.key for node in found.nodes] and len(found) == 13
    for node in found:
        assert node.key and node.kind and node.state == "missing" and node.tokens >= 0 and math.isfinite(node.flops)
    seen: list[str] = []
    outcome = testbed.run(spec, "store", workers=1, on_event=lambda event: seen.append(event.kind))
    assert outcome.ok and len(outcome.made) == 13 and seen.count("done") == 13
    again = testbed.plan([spec, "smoke"], "store", probe=False)
    assert again.specs == ("smoke", "smoke (2)")
    assert {node.state for node in again if node.specs == ("smoke (2)",)} == {"missing"}
    assert {node.state for node in again if "smoke" in node.specs} == {"done"}
    assert set(testbed.results(spec, store="store").outcomes["seed"]) == {3}
    with pytest.raises(UserError, match="at least one spec"):
        testbed.plan([], "store")


def test_checkpoints_on_the_way_take_no_memory_of_their_own() -> None:
    stages = ["stages.pretrain.keep_doubling=4", "arms={pretrained: anneal}", "attribution=null", "claims=[]"]
    one, several = (
        plan([load("smoke", [*stages, "seeds=[0]"])], Store("store"), probe=False, workers=n) for n in (1, 4)
    )
    most = max(node.memory_bytes or 0 for node in several.nodes)
    assert one.totals["to_do"].memory_bytes == most
    working = [node.memory_bytes or 0 for node in several.nodes if node.maker is None]
    assert several.totals["to_do"].memory_bytes == sum(sorted(working)[-4:])
