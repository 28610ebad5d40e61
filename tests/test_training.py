"""The trainer: gradients that no split changes, branches that continue exactly, and work counted as it ran."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.flops import Shape, causal_pairs, forward_flops
from models.noise import Noise
from models.sampler import sample, sampling_shape
from models.transformer import Transformer
from synthetic_tasks import Tokenizer, get_task
from synthetic_tasks.corpus import Batch, Component, Corpus, PackedLoader, build_corpus
from testbed import runtime, training
from testbed.config import Edge, Optimizer, Schedule, Train
from testbed.nodes import Context, Node, Seeds
from testbed.store import MANIFEST
from testbed.tracking import Tracker

SETTINGS: dict[str, Any] = {"modulus": 5, "names": 8}
MODEL = ModelConfig(layers=1, width=16, heads=2)
CPU = torch.device("cpu")
VOCABULARY = len(Tokenizer.for_tasks(get_task("arithmetic", **SETTINGS)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("corpus")
    task = get_task("arithmetic", **SETTINGS)
    mixture = [Component(name="base", operations={1: 1.0, 2: 1.0, 3: 1.0})]
    build_corpus(out, task=task, tokenizer=Tokenizer.for_tasks(task), mixture=mixture, documents=300, seed=0)
    return out


def uneven_batch(corpus: Path) -> Batch:
    """Rows with very different numbers of tokens."""
    batch = PackedLoader(Corpus(corpus), rows=8, row_length=64, seed=0).batch(0)
    documents = batch.documents.copy()
    for row in range(4):
        documents[row][documents[row] > 1] = 0
    return dataclasses.replace(batch, documents=documents)


def gradients(batch: Batch, parts: int, prompt_weight: float = 1.0) -> tuple[list[torch.Tensor], float]:
    torch.manual_seed(0)
    model = Transformer(MODEL, VOCABULARY)
    config = Train(kind="pretrain", data="base", tokens=1, rows=8, accumulate=parts, prompt_weight=prompt_weight)
    loss = training.accumulate(model, batch, config, CPU, "here")
    return [p.grad for p in model.parameters() if p.grad is not None], loss


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_accumulation_does_not_change_the_gradient(corpus: Path, parts: int) -> None:
    batch = uneven_batch(corpus)
    whole, loss = gradients(batch, 1)
    split, split_loss = gradients(batch, parts)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_the_naive_mean_of_means_would_differ(corpus: Path) -> None:
    """Guards the test above: on these rows the wrong normalisation is visible."""
    batch = uneven_batch(corpus)
    whole, _ = gradients(batch, 1)
    parts = [gradients(part, 1)[0] for part in training.split(batch, 4)]
    mean = [sum(g) / 4 for g in zip(*parts, strict=True)]
    assert max(float((a - b).abs().max()) for a, b in zip(whole, mean, strict=True)) > 1e-3


@pytest.mark.parametrize("prompt_weight", [0.0, 0.25, 1.0])
def test_loss_is_the_weighted_mean_over_predicted_tokens(corpus: Path, prompt_weight: float) -> None:
    """By brute force over documents, each alone."""
    path = Corpus(corpus)
    batch = PackedLoader(path, rows=2, row_length=64, seed=0).batch(0)
    torch.manual_seed(0)
    model = Transformer(MODEL, VOCABULARY)
    loss, weight = training.weighted_loss(model, batch, prompt_weight, CPU)
    total = weights = 0.0
    for row in range(2):
        for number in range(1, int(batch.documents[row].max()) + 1):
            inside = batch.documents[row] == number
            ids, prompt = torch.from_numpy(batch.tokens[row][inside]), batch.prompt[row][inside]
            scores = torch.log_softmax(model(ids[None])[0], dim=-1)
            for t in range(1, len(ids)):
                w = prompt_weight if prompt[t] else 1.0
                total -= w * scores[t - 1, ids[t]].item()
                weights += w
    assert weight == pytest.approx(weights)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)


def test_non_finite_loss_and_gradient_stop_before_the_step(corpus: Path) -> None:
    batch = uneven_batch(corpus)
    model = Transformer(MODEL, VOCABULARY)
    with torch.no_grad():
        model.embedding.weight[3:] = float("nan")
    config = Train(kind="pretrain", data="base", tokens=1, rows=8)
    with pytest.raises(FloatingPointError, match="mid, step 7"):
        training.accumulate(model, batch, config, CPU, "mid, step 7")
    model = Transformer(MODEL, VOCABULARY)
    model.norm.weight.grad = torch.full_like(model.norm.weight, float("inf"))
    with pytest.raises(FloatingPointError, match="gradient norm"):
        runtime.finite_norm(model, 1.0, "here")


def test_clipping_scales_to_the_norm_and_zero_leaves_gradients() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    for clip, expected in [(1.0, [0.6, 0.8]), (0.0, [3.0, 4.0]), (9.0, [3.0, 4.0])]:
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        assert runtime.finite_norm(model, clip, "here") == pytest.approx(5.0)
        assert model.weight.grad[0].tolist() == pytest.approx(expected, rel=1e-5)


def node_of(config: Train, parents: dict[str, str], **seeds: int) -> Node:
    context = Context(model=MODEL, task=("arithmetic", SETTINGS), seeds=Seeds(**seeds), bands={"all": (1, 2)})
    return Node(kind=config.kind, name="stage", seed=0, key="k", config=config, parents=parents, context=context)


def train(
    config: Train, corpus: Path, out: Path, parent: Path | None = None, *, name: str = "c", **more: Any
) -> dict[str, Any]:
    """Run a stage as the store does, manifest included."""
    import json

    out.mkdir()
    inputs = {"corpus": corpus} | ({"parent": parent} if parent else {}) | more.pop("match", {})
    with Tracker(out) as tracker:
        summary = training.run(node_of(config, {"corpus": name}, **more), inputs, out, tracker)
    (out / MANIFEST).write_text(json.dumps({"summary": summary}))
    return summary


@pytest.fixture(scope="module")
def per_step(corpus: Path) -> float:
    """Tokens of a step, as a stage estimates them."""
    loader = PackedLoader(Corpus(corpus), rows=8, row_length=64, seed=0)
    return float(np.mean([training.useful(loader.batch(step).documents).tokens for step in range(8)]))


CARRIED = Edge(parent="stable", optimizer="carry", rate="continue")
RESET = Edge(parent="stable", optimizer="reset", rate="continue")
CONSTANT = Schedule(shape="constant", decay=0.0)
STAGE = Train(
    kind="pretrain", data="base", tokens=6 * 8 * 60, rows=8, row_length=64, probes=1, schedule=CONSTANT,
    optimizer=Optimizer(kind="muon", lr=1e-2),
)  # fmt: skip


def weights(path: Path) -> torch.Tensor:
    return runtime.flat(runtime.load_model(path)[0])


def test_two_stages_equal_one_bit_for_bit(corpus: Path, tmp_path: Path, per_step: float) -> None:
    """With the optimizer carried and a constant rate, a branch goes on exactly where its parent stopped."""
    whole = train(dataclasses.replace(STAGE, tokens=round(6 * per_step)), corpus, tmp_path / "whole")
    half = dataclasses.replace(STAGE, tokens=round(3 * per_step))
    first = train(half, corpus, tmp_path / "first")
    carried = dataclasses.replace(half, parent="first", edge=CARRIED)
    second = train(carried, corpus, tmp_path / "second", tmp_path / "first")
    assert first["steps"] + second["steps"] == whole["steps"]
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "second"))
    assert whole["tokens"] == first["tokens"] + second["tokens"]
    assert whole["flops"] == pytest.approx(first["flops"] + second["flops"])
    reset = dataclasses.replace(half, parent="first", edge=RESET)
    train(reset, corpus, tmp_path / "reset", tmp_path / "first")
    assert not torch.equal(weights(tmp_path / "reset"), weights(tmp_path / "second"))


def test_a_corpus_is_read_on_from_where_any_ancestor_left_it(corpus: Path, tmp_path: Path, per_step: float) -> None:
    """Through a stage on another corpus, and never from rows of another length."""
    config = dataclasses.replace(STAGE, tokens=round(2 * per_step), parent="a", edge=CARRIED)
    train(dataclasses.replace(config, parent=None, edge=None), corpus, tmp_path / "a")
    between = train(config, corpus, tmp_path / "b", tmp_path / "a", name="other")
    assert between["positions"] == {n: {"rows": 16, "row_length": 64} for n in ("c", "other")}
    third = train(config, corpus, tmp_path / "c", tmp_path / "b")
    assert third["positions"]["c"]["rows"] == 32
    with pytest.raises(ValueError, match="in rows of 64; set row_length to the same"):
        train(dataclasses.replace(config, row_length=80), corpus, tmp_path / "d", tmp_path / "b")


def test_seeds_do_what_they_say(corpus: Path, tmp_path: Path) -> None:
    train(STAGE, corpus, tmp_path / "a")
    train(STAGE, corpus, tmp_path / "same")
    for seed in ("init", "order", "rollout"):
        train(STAGE, corpus, tmp_path / seed, **{seed: 1})
    base = weights(tmp_path / "a")
    assert torch.equal(base, weights(tmp_path / "same")) and torch.equal(base, weights(tmp_path / "rollout"))
    assert not torch.equal(base, weights(tmp_path / "init"))
    assert not torch.equal(base, weights(tmp_path / "order"))


def test_a_matched_stage_costs_what_it_matches(corpus: Path, tmp_path: Path, per_step: float) -> None:
    spent = train(dataclasses.replace(STAGE, tokens=round(6 * per_step)), corpus, tmp_path / "a")["flops"]
    config = dataclasses.replace(STAGE, tokens=None, match=("a", "b"))
    match = {"match/a": tmp_path / "a", "match/b": tmp_path / "a"}
    matched = train(config, corpus, tmp_path / "b", match=match)
    assert matched["steps"] == 12
    assert matched["flops"] == pytest.approx(2 * spent, rel=0.05)


def test_another_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    train(STAGE, corpus, tmp_path / "a")
    node = node_of(dataclasses.replace(STAGE, parent="a"), {"corpus": "c"})
    node = dataclasses.replace(node, context=dataclasses.replace(node.context, task=("arithmetic", {"modulus": 7})))
    with Tracker(tmp_path) as tracker, pytest.raises(ValueError, match="another vocabulary"):
        training.run(node, {"corpus": corpus, "parent": tmp_path / "a"}, tmp_path, tracker)


def test_carrying_another_optimizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    train(STAGE, corpus, tmp_path / "a")
    config = dataclasses.replace(STAGE, parent="a", edge=CARRIED, optimizer=Optimizer(kind="adamw"))
    with pytest.raises(ValueError, match="reset"):
        train(config, corpus, tmp_path / "b", tmp_path / "a")


def test_saved_model_loads_to_the_same_logits(corpus: Path, tmp_path: Path) -> None:
    train(STAGE, corpus, tmp_path / "a")
    model, tokenizer = runtime.load_model(tmp_path / "a")
    assert model.head.weight is model.embedding.weight and not model.training
    ids = torch.tensor([[tokenizer.bos, 5, 6, 7]])
    torch.manual_seed(0)
    fresh = Transformer(MODEL, len(tokenizer))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(ids), fresh(ids))
    assert runtime.relative_change(weights(tmp_path / "a"), runtime.flat(model)) == 0.0


@pytest.mark.parametrize("model", [MODEL, ModelConfig(layers=3, width=32, heads=4, kv_heads=2, canon=0, tied=False)])
def test_flops_equal_torch_counter(model: ModelConfig) -> None:
    """torch counts projections, head and the full square of attention; convolutions are elementwise there."""
    length, vocabulary = 12, 19
    # Only the unfused kernel is counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Transformer(model, vocabulary)(torch.zeros(2, length, dtype=torch.long))
    dense = Shape.dense(2, length)
    ours = forward_flops(model, vocabulary, dense)
    convolutions = 2.0 * model.layers * 2 * model.canon * model.width * 2 * length
    assert counter.get_total_flops() == ours - convolutions
    # A row of logits that is not made costs the head's product less.
    last = forward_flops(model, vocabulary, dataclasses.replace(dense, read=2))
    assert ours - last == 2 * (2 * length - 2) * model.width * vocabulary


def test_sampling_flops_equal_torch_counter() -> None:
    """Where nothing is padded and no sample ends early, all that is run is useful and is counted."""
    torch.manual_seed(0)
    prompts, samples, new, length = 3, 4, 6, 14
    model = Transformer(MODEL, 19)
    ids = torch.randint(3, 19, (prompts, length)).tolist()
    noise = Noise(seed=0, purpose="flops")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        drawn = sample(model, ids, range(prompts), samples=samples, max_new_tokens=new, end=-1, pad=0, noise=noise)
    ours = forward_flops(MODEL, 19, sampling_shape(ids, drawn))
    # torch counts the full square of the prompts, and no convolutions over a whole sequence.
    square = prompts * (length * length - causal_pairs(0, length)) * 4 * MODEL.layers * MODEL.width
    convolutions = 4 * MODEL.layers * MODEL.canon * MODEL.width * prompts * length
    assert counter.get_total_flops() == ours + square - convolutions
    assert counter.get_total_flops() == forward_flops(MODEL, 19, drawn.executed) - convolutions


def test_useful_work_is_real_tokens_and_visible_pairs() -> None:
    documents = np.array([[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]])
    visible = (documents[:, :, None] == documents[:, None, :]) & (documents[:, :, None] > 0)
    visible &= np.tril(np.ones((6, 6), dtype=bool))
    assert training.useful(documents) == Shape(6, int(visible.sum()), 6)
    assert causal_pairs(4, 3) == 5 + 6 + 7
