"""Tokens and FLOPs: counted from what ran, against torch's counter and sums by hand; budgets met to the step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.flops import TRAIN, Shape, forward_flops
from models.noise import Noise
from models.sampler import Samples, sample, sampling_shape
from models.transformer import Transformer
from synthetic_tasks.corpus import Corpus, PackedLoader
from testbed import rl, training
from testbed.config import RL, Train
from testbed.execute import execute
from testbed.ledger import ACTIVITIES, Ledger, interplay_rl, interplay_training
from testbed.nodes import Node
from testbed.store import Store

SHAPES = [
    ModelConfig(layers=2, width=64, heads=4),
    ModelConfig(layers=1, width=48, heads=4, kv_heads=2, head_dim=16, canon=0, tied=False),
    ModelConfig(layers=3, width=32, heads=2, hidden=80, canon=2, qk_norm=False, rope_share=0.5),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Store]:
    graph, store = tiny.graph(), Store(tmp_path_factory.mktemp("store"))
    tiny.run_all(graph, store)
    return graph, store


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize(("rows", "length"), [(2, 12), (5, 31)])
def test_a_training_step_executes_what_torch_counts(config: ModelConfig, rows: int, length: int) -> None:
    """Within 1% with dense attention, and exactly without the convolutions, which torch does not count."""
    vocabulary = 19
    model = Transformer(config, vocabulary)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(rows, length, dtype=torch.long)).sum().backward()
    ledger = Ledger(config, vocabulary)
    ledger.add("training", Shape(), Shape.dense(rows, length), passes=TRAIN)
    ours = ledger.work["training"].flops_executed
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.015 if config.canon else 0.01)
    convolutions = TRAIN * 2 * config.layers * 2 * config.canon * config.width * rows * length
    assert counter.get_total_flops() == ours - convolutions


def test_one_small_layer_by_hand() -> None:
    """Width 8, two heads of 4, one of keys, SwiGLU of 16, convolutions of 2, a vocabulary of 5: a document of 3 tokens
    and one of 2 in a row of 8."""
    config = ModelConfig(layers=1, width=8, heads=2, kv_heads=1, hidden=16, canon=2)
    a_token = 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8) + 2 * 3 * (8 * 16) + 2 * (2 * 2 * 8)  # qkvo, SwiGLU, convolutions
    a_pair = 2 * (2 * 4) + 2 * (2 * 4)  # q·k and weights·v of two heads
    a_read = 2 * 8 * 5
    documents = np.array([[1, 1, 1, 2, 2, 0, 0, 0]])
    ledger = Ledger(config, 5)
    ledger.add("training", training.useful(documents), Shape.dense(1, 8), passes=TRAIN)
    work = ledger.work["training"]
    assert work.flops_useful == 3 * (5 * a_token + (6 + 3) * a_pair + 5 * a_read)
    assert work.flops_executed == 3 * (8 * a_token + 64 * a_pair + 8 * a_read)
    assert (work.tokens, work.padded_tokens) == (5, 8)
    assert ledger.flops == work.flops_useful
    ledger.add("scoring", Shape(9, 9, 9), Shape(9, 9, 9))
    assert ledger.flops == work.flops_useful, "measuring is in no budget"


def rollouts(lengths: list[int], new: int = 8) -> rl.Rollouts:
    """Two problems of 5 prompt tokens, two samples each, of these lengths, padded to `new`; all with a gradient."""
    samples = Samples(
        torch.zeros(4, new, dtype=torch.long), torch.tensor(lengths), torch.ones(4, dtype=torch.bool),
        torch.zeros(4, new), Shape(10 + 4 * new, 0, 0),
    )  # fmt: skip
    return rl.Rollouts([[1] * 5] * 2, samples, [], np.array([[1.0, 0.0]] * 2))


def test_half_the_length_costs_what_it_does_by_hand() -> None:
    """Useful FLOPs follow the lengths; executed ones of the update follow the longest row of a micro-batch."""
    config = ModelConfig(layers=1, width=8, heads=2, kv_heads=1, hidden=16, canon=0)
    a_token, a_pair, a_read = 2 * 192 + 768, 32, 80

    def hand(length: int) -> tuple[float, float]:
        read = length - 1
        prompts = 2 * (5 * a_token + 15 * a_pair + a_read)
        fed = 4 * (read * (a_token + a_read) + (5 * read + read * (read + 1) // 2) * a_pair)
        whole = 5 + length
        update = 3 * 4 * (whole * (a_token + a_read) + whole * (whole + 1) // 2 * a_pair)
        return prompts + fed, update

    settings = RL(parent="p", band="b", steps=1, prompts=2, group=2, micro_rows=4)
    found = {}
    for length in (8, 4):
        drawn = rollouts([length] * 4)
        micros = rl.micro_batches(drawn, np.array([[1.0, -1.0]] * 2), settings, 0)
        ledger = Ledger(config, 5)
        ledger.add("rollout", sampling_shape(drawn.prompts, drawn.samples), drawn.samples.executed)
        (micro,) = micros
        ledger.add("training", micro.useful, micro.executed, passes=TRAIN)
        found[length] = ledger
        assert (ledger.work["rollout"].flops_useful, ledger.work["training"].flops_useful) == hand(length)
        assert ledger.work["rollout"].padded_tokens == 10 + 4 * 8, "padded to the same length"
    assert found[4].flops / found[8].flops == pytest.approx(sum(hand(4)) / sum(hand(8)))
    # One long row keeps the width of the micro-batch, so what is executed stays while what is useful falls.
    (mixed,) = rl.micro_batches(rollouts([8, 1, 2, 1]), np.array([[1.0, -1.0]] * 2), settings, 0)
    assert mixed.executed == Shape.dense(4, 13) and mixed.useful.tokens == 4 * 5 + 12


def test_a_ragged_batch_of_samples_executes_more_than_it_uses() -> None:
    config = ModelConfig(layers=1, width=16, heads=2)
    torch.manual_seed(0)
    model = Transformer(config, 9)
    prompts = [[3, 4, 5], [3] * 7]
    drawn = sample(
        model, prompts, range(2), samples=4, max_new_tokens=12, end=2, pad=0, noise=Noise(seed=0, purpose="x")
    )
    useful = sampling_shape(prompts, drawn)
    assert useful.tokens < drawn.executed.tokens and useful.pairs < drawn.executed.pairs
    assert useful.tokens == sum(map(len, prompts)) + int((drawn.lengths - 1).sum())


def test_stages_tell_what_they_spent_on_what(made: tuple[Any, Store]) -> None:
    graph, store = made
    summaries = {name: tiny.get(store, graph.nodes[key]).summary for (name, _), key in graph.stages.items()}
    assert set(summaries["pretrain"]["ledger"]) == {"training", "scoring"}
    assert set(summaries["rl"]["ledger"]) == {"training", "rollout", "reference"}
    assert set(summaries["both"]["ledger"]) == set(ACTIVITIES)
    for name, summary in summaries.items():
        work = summary["ledger"]
        assert summary["flops"] == sum(w["flops_useful"] for a, w in work.items() if a != "scoring"), name
        for one in work.values():
            assert 0 < one["tokens"] <= one["padded_tokens"] and one["flops_useful"] <= one["flops_executed"]
    trained = summaries["pretrain"]["ledger"]["training"]
    assert trained["tokens"] == summaries["pretrain"]["tokens"]
    assert trained["padded_tokens"] == summaries["pretrain"]["steps"] * 4 * 64
    evaluation = tiny.get(store, graph.nodes[graph.evaluations["mid", 0]]).summary["ledger"]
    assert set(evaluation) == {"rollout", "scoring"}
    # The parts of a parallel stage add up.
    assert summaries["both"]["flops"] == pytest.approx(
        sum(w["flops_useful"] for a, w in summaries["both"]["ledger"].items() if a != "scoring")
    )


def test_the_convention_of_interplay(made: tuple[Any, Store]) -> None:
    """Their table 3: 200 steps of 1024 prompts, 6 rollouts of 2048 tokens, reference on, are 4.2B trained tokens."""
    tokens = interplay_rl(1, 200 * 1024 * 6, 2048, reference=True) / interplay_training(1, 1)
    assert tokens == pytest.approx(4.2e9, rel=0.01)
    assert interplay_rl(1, 6, 10, reference=False) / 6 == pytest.approx(4 / 3 * 60)
    graph, store = made
    summary = tiny.get(store, tiny.node(graph, "rl")).summary
    assert summary["flops_interplay"] == 10 * summary["parameters"] * 4 * 2 * 3 * 96
    mid = tiny.get(store, tiny.node(graph, "mid")).summary
    assert mid["flops_interplay"] == 6 * mid["parameters"] * mid["tokens"]


# Budgets ------------------------------------------------------------------------------------------------------------


def loader_of(graph: Any, store: Store, node: Node) -> PackedLoader:
    assert isinstance(node.config, Train)
    corpus = Corpus(store.path("corpora", node.parents["corpus"]))
    return PackedLoader(corpus, rows=node.config.rows, row_length=node.config.row_length, seed=0)


@pytest.mark.parametrize("budget", [1, 200, 1000, 2345, 9000])
def test_a_budget_of_tokens_is_met_to_the_nearest_step(made: tuple[Any, Store], budget: int) -> None:
    """By counting every batch, over the ends of epochs too."""
    graph, store = made
    loader = loader_of(graph, store, tiny.node(graph, "pretrain"))
    for start in (0, 5):
        steps = training.steps_to(loader, start, budget, lambda tokens, pairs: tokens.astype(float))
        counted = np.cumsum([training.useful(loader.batch(start + i).documents).tokens for i in range(steps + 1)])
        nearest = 1 + int(np.abs(counted - budget).argmin())
        assert steps == nearest
        pairs = training.steps_to(loader, start, budget, lambda tokens, pairs: pairs.astype(float))
        counted = np.cumsum([training.useful(loader.batch(start + i).documents).pairs for i in range(pairs + 1)])
        assert pairs == 1 + int(np.abs(counted - budget).argmin())


def test_budgets_of_stages_are_met(made: tuple[Any, Store], tmp_path: Path) -> None:
    graph, store = made
    summaries = {name: tiny.get(store, graph.nodes[key]).summary for (name, _), key in graph.stages.items()}
    step = {name: summary["flops"] / summary["steps"] for name, summary in summaries.items() if summary["steps"]}
    assert abs(summaries["pretrain"]["tokens"] - 2000) <= 2000 / summaries["pretrain"]["steps"] / 2 * 1.2
    assert abs(summaries["tune"]["flops"] - 2e7) <= step["tune"] * 0.6
    wanted = summaries["mid"]["flops"] + summaries["both"]["flops"]
    assert abs(summaries["continued"]["flops"] - wanted) <= step["continued"] * 0.6


def test_rl_ends_with_the_batch_that_reaches_its_flops(made: tuple[Any, Store], tmp_path: Path) -> None:
    graph, store = made
    node = tiny.node(graph, "rl")
    lines = tiny.metrics(tiny.get(store, node).path)
    for budget, steps in ((lines[0]["flops"], 1), (lines[1]["flops"] - 1, 2), (lines[1]["flops"] + 1, 3)):
        config = dataclasses.replace(node.config, steps=None, flops=budget, keep=())  # type: ignore[arg-type]
        cut = dataclasses.replace(node, config=config, keep=(), key=f"{steps:032d}")
        seen: list[Any] = []
        summary = execute(cut, store, report=seen.append).summary
        assert summary["steps"] == steps and summary["flops"] == lines[steps - 1]["flops"]
        assert seen[-1].total == steps


def test_useful_shapes_add_up() -> None:
    assert Shape(1, 2, 3) + Shape(4, 5, 6) == Shape(5, 7, 9)
    config = SHAPES[0]
    both = forward_flops(config, 9, Shape(5, 7, 9))
    assert both == forward_flops(config, 9, Shape(1, 2, 3)) + forward_flops(config, 9, Shape(4, 5, 6))
