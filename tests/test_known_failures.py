"""What went wrong in the caches and trainers of others, and the test that holds ours against it.

Those that no other file tests are here.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import os
import shutil
from pathlib import Path

import fake_runners
import pytest
import tiny
import torch
import yaml

from sweeps.local import Event, run_graph
from testbed import runtime
from testbed.execute import execute
from testbed.graph import build, canonical, digest
from testbed.spec import BUILT_IN, load, parse
from testbed.store import Store
from testbed.training import NextToken

HERE = Path(__file__).parent
# What happened to whom, and where it is tested.
ELSEWHERE = {
    "tango #602: the order of a mapping changes the hash": "test_graph::test_order_and_spelling_do_not_change_keys",
    "tango #444, redun #23, #99: code changes and the hash stays": (
        "test_epochs::test_a_changed_line_shows_in_the_kinds_it_is_in"
    ),
    "marin #6895: a field that nobody hashed serves stale results": (
        "test_graph::test_every_field_changes_the_key_or_is_listed"
    ),
    "tango: half-written and overwritten results": "test_store::test_nothing_is_overwritten",
    "DVC #9805, #10465: one lock for everything": "test_local::test_what_another_process_has_in_hand_is_left_to_it",
    "DVC #755, Optuna #5921: the lock of a killed process stays": (
        "test_leases::test_the_lease_of_a_killed_process_is_taken_at_once"
    ),
    "Optuna: a lock is forced open while its holder merely stalls": (
        "test_leases::test_a_stopped_process_finds_its_lease_taken_and_publishes_nothing"
    ),
    "Optuna #820, #5385: many processes start at once": (
        "test_local::test_eight_processes_run_one_plan_and_each_node_once"
    ),
    "Optuna #5138: a flushed line is lost": "test_kills::test_a_handful_of_kills",
    "Optuna #3256: a failed cell counts as visited and is never tried again": (
        "test_local::test_a_failure_takes_its_dependents_and_nothing_else"
    ),
    "Optuna #6283: a crash leaves its work running for ever": (
        "test_local::test_a_worker_that_is_killed_fails_its_node_alone"
    ),
    "wandb #6234: nothing works offline": "test_tracking::test_wandb_gets_the_metrics_until_it_fails",
    "wandb #4482, #2234, #6728: steps logged again are dropped": (
        "test_tracking::test_steps_that_wandb_has_are_not_logged_again"
    ),
    "Lightning #18780, #19764, #11029: a resumed epoch replays data": (
        "test_resume::test_stopped_after_every_step_and_taken_up"
    ),
    "litgpt #1712: later epochs see only the tail": "test_ledger::test_a_budget_of_tokens_is_met_to_the_nearest_step",
    "OLMo-core 1.0.1, pytorch #129079, nanotron #245: the rate is reset on load, or not loaded": (
        "test_resume::test_stopped_after_every_step_and_taken_up"
    ),
    "torchtitan #1136, #1702, #1213: the loss is worse, or another, after a load": (
        "test_resume::test_bits_would_differ_if_anything_were_forgotten"
    ),
    "torchtitan #816: another number of devices goes unnoticed": (
        "test_resume::test_another_numeric_class_is_refused_or_marked"
    ),
    "ms-swift #9935, open-instruct #932, #1823: restored noise is thrown away": (
        "test_resume::test_stopped_after_every_step_and_taken_up"
    ),
    "transformers #34191, torchtitan #1842: a mean of means over micro-batches": (
        "test_training::test_the_naive_mean_of_means_would_differ"
    ),
    "verl #6280, TRL #4159: the ratio is not 1 on policy": (
        "test_rl::test_sampler_and_trainer_agree_at_any_temperature"
    ),
    "Lightning #688, #19970: a checkpoint is half written": "test_store::test_the_manifest_is_written_last",
    "Lightning #21800: a save that failed is reported as done": "test_store::test_every_step_of_publishing_can_fail",
    "pocket-tts #262: weights of NaN are saved, and the good ones deleted": (
        "test_resume::test_a_state_that_is_not_finite_is_never_saved"
    ),
    "torchtitan #916, nanoGPT #227: a loss of NaN": "test_resume::test_a_nan_in_the_loss_stops_before_the_step",
    "litgpt #403, OLMo-core 2.5: MFU against the wrong peak": (
        "test_tracking::test_mfu_is_told_where_the_peak_is_known"
    ),
    "Lightning #13124, #18220, #20603: negative time left after a resume": (
        "test_tracking::test_a_run_that_is_taken_up_goes_on_in_its_file_and_its_time"
    ),
}


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_test_is_there(place: str) -> None:
    file, name = place.split("::")
    tree = ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_tango_602_equal_values_are_one_and_kinds_of_numbers_are_told_apart() -> None:
    """Not by identity: two equal texts are one. True, 1 and 1.0 are three things, and one where a field is real."""
    made_late = "".join(["ba", "se"])
    assert digest({"a": canonical(made_late)}) == digest({"a": canonical("base")})
    assert len({digest({"a": canonical(value)}) for value in (True, 1, 1.0, "1")}) == 4
    one, other = ["model.norm_eps=1", "seeds=[0]"], ["model.norm_eps=1.0", "seeds=[0]"]
    assert set(build(load("smoke", one)).nodes) == set(build(load("smoke", other)).nodes)


def test_marin_8101_two_ways_to_the_same_spec_are_one() -> None:
    raw = yaml.safe_load((BUILT_IN / "smoke.yaml").read_text(encoding="utf-8"))
    spec = load("smoke")
    ways = [spec, parse(raw), parse(spec.model_dump(mode="json")), type(spec).model_validate(dict(spec))]
    keys = [list(build(way).nodes) for way in ways]
    assert all(one == keys[0] for one in keys)


def test_marin_6895_datasets_2496_no_path_is_in_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec file elsewhere, another working folder, another store: the same keys, and no field holds a path."""
    before = build(load("smoke"))
    copy = tmp_path / "deep" / "smoke.yaml"
    copy.parent.mkdir()
    shutil.copyfile(BUILT_IN / "smoke.yaml", copy)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESTBED_STORE", str(tmp_path / "elsewhere"))
    assert list(build(load(str(copy))).nodes) == list(before.nodes)
    assert not any(os.sep in str(node.fields) for node in before.nodes.values())


def test_snakemake_1694_datasets_5109_times_and_places_of_files_do_not_count(tmp_path: Path) -> None:
    """A store that was copied, moved and touched is the same store; nothing is made again."""
    graph = build(load("smoke", ["seeds=[0]"]))
    assert run_graph(graph, Store(tmp_path / "a"), workers=1, runners=fake_runners.RUNNERS).ok
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (1, 1))
    again = run_graph(graph, Store(tmp_path / "b"), workers=1, runners=fake_runners.RUNNERS)
    assert again.ok and not again.made


def test_hydra_2824_a_failure_is_told_when_it_happens(tmp_path: Path) -> None:
    """Not at the end of the sweep: work goes on after it."""
    events: list[Event] = []
    runners = {**fake_runners.RUNNERS, "rl": "fake_runners:failing_rl"}
    run_graph(build(load("smoke")), Store(tmp_path), workers=1, runners=runners, on_event=events.append)
    kinds = [event.kind for event in events]
    assert "done" in kinds[kinds.index("failed") :]


def test_submitit_a_spec_that_is_edited_after_its_stage_was_done_gets_another_stage(tmp_path: Path) -> None:
    """The old result stays what it was and is not taken for the new one; back under the old text it is found again."""
    store = Store(tmp_path, announce=print)
    file = tmp_path / "my.yaml"
    text = (BUILT_IN / "smoke.yaml").read_text(encoding="utf-8")
    file.write_text(text)
    first = build(load(str(file)))
    assert run_graph(first, store, workers=1, runners=fake_runners.RUNNERS).ok
    file.write_text(text.replace("tokens: 8192", "tokens: 8191"))
    second = build(load(str(file)))
    outcome = run_graph(second, store, workers=1, runners=fake_runners.RUNNERS)
    assert set(outcome.made) == set(second.nodes) - set(first.nodes) and len(outcome.reused) == 2  # the corpora
    file.write_text(text)
    assert not run_graph(build(load(str(file))), store, workers=1, runners=fake_runners.RUNNERS).made


def test_speculators_1027_measuring_in_between_changes_nothing(tmp_path: Path) -> None:
    """However often a stage is probed while it trains, it ends with the same bits."""
    flat = []
    for probes in (1, 4):
        stages = {**tiny.SPEC["stages"], "pretrain": tiny.SPEC["stages"]["pretrain"] | {"probes": probes}}
        graph = tiny.graph(stages=stages, arms={"pretrained": "pretrain"}, parents={}, probes={})
        store = Store(tmp_path / str(probes))
        execute(graph.nodes[graph.corpora["base"]], store)
        made = execute(tiny.node(graph, "pretrain"), store)
        flat.append(runtime.flat(runtime.load_model(made.path)[0]))
    assert torch.equal(*flat)


def test_nanogpt_236_a_state_that_was_read_is_not_kept_in_memory(tmp_path: Path) -> None:
    graph = tiny.graph(arms={"early": "pretrain@4"}, parents={}, probes={})
    store = Store(tmp_path)
    made = tiny.run_all(graph, store)
    checkpoint = made[graph.stages["pretrain@4", 0]]
    node = dataclasses.replace(tiny.node(graph, "pretrain@4"), after=None)
    learner = NextToken(node, {"corpus": store.path("corpora", graph.corpora["base"])})
    learner.read(checkpoint.path)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    before = tensors()
    learner.read(checkpoint.path)
    assert tensors() == before


def test_prime_rl_745_the_loader_needs_no_state_of_its_own(tmp_path: Path) -> None:
    """Any step of any epoch is asked for directly and is the one that reading on gives."""
    from synthetic_tasks.corpus import Corpus, PackedLoader

    graph = tiny.graph(arms={"early": "pretrain@4"}, parents={}, probes={})
    store = Store(tmp_path)
    corpus = Corpus(execute(graph.nodes[graph.corpora["base"]], store).path)
    read_on = PackedLoader(corpus, rows=3, row_length=64, seed=1)
    batches = [read_on.batch(step) for step in range(40)]
    assert batches[0].tokens.tolist() != batches[20].tokens.tolist()
    for step in (39, 0, 17):
        fresh = PackedLoader(corpus, rows=3, row_length=64, seed=1).batch(step)
        assert fresh.tokens.tolist() == batches[step].tokens.tolist()
