"""GRPO by enumeration and by invariance: what the gradient is, and what must not change it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.config import ModelConfig
from models.noise import Noise
from models.sampler import sample
from models.transformer import Transformer, token_log_probs
from synthetic_tasks import Tokenizer, get_task
from testbed import optim, rl, runtime
from testbed.config import RL, Optimizer
from testbed.nodes import Context, Node, Seeds
from testbed.store import MANIFEST
from testbed.tracking import METRICS, Tracker

SETTINGS: dict[str, Any] = {"modulus": 5, "names": 8}
TASK = get_task("arithmetic", **SETTINGS)
TOKENIZER = Tokenizer.for_tasks(TASK)
MODEL = ModelConfig(layers=1, width=16, heads=2)
CONFIG = RL(parent="p", band="b", steps=1, prompts=4, group=6, max_new_tokens=12, micro_rows=5)


# Advantages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "scaled", "centred"),
    [
        ([1, 0, 0, 0], [a / (math.sqrt(0.1875) + 1e-4) for a in (0.75, -0.25, -0.25, -0.25)], [0.75] + [-0.25] * 3),
        ([1, 1, 0, 0], [0.5 / 0.5001] * 2 + [-0.5 / 0.5001] * 2, [0.5, 0.5, -0.5, -0.5]),
        ([0.9] * 4, [0.0] * 4, [0.0] * 4),
        ([0.0] * 4, [0.0] * 4, [0.0] * 4),
    ],
)  # fmt: skip
def test_advantages_by_hand(rewards: list[float], scaled: list[float], centred: list[float]) -> None:
    assert rl.group_advantages(np.array([rewards]), scale_by_std=True)[0].tolist() == pytest.approx(scaled)
    assert rl.group_advantages(np.array([rewards]), scale_by_std=False)[0].tolist() == pytest.approx(centred)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1 / 3])
@pytest.mark.parametrize("group", [3, 6, 7, 8])
def test_equal_rewards_have_exactly_no_advantage(value: float, group: int) -> None:
    found = rl.group_advantages(np.full((2, group), value), scale_by_std=True)
    assert (found == 0).all()


def test_groups_do_not_mix() -> None:
    rewards = np.array([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]])
    alone = np.concatenate([rl.group_advantages(row[None], scale_by_std=True) for row in rewards])
    assert (rl.group_advantages(rewards, scale_by_std=True) == alone).all()


# The loss -----------------------------------------------------------------------------------------------------------


def test_at_ratio_one_the_gradient_is_reinforce() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(5, 7, generator=generator).requires_grad_()
    advantages = torch.randn(5, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    loss = rl.policy_loss(log_probs, log_probs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, -advantages[:, None] * mask, atol=0, rtol=0)


@pytest.mark.parametrize("advantage", [1.5, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 0.85, 1.0, 1.1, 1.25, 1.5])
def test_clipped_surrogate_by_hand(advantage: float, ratio: float) -> None:
    """min(rA, clip(r, .8, 1.28)A): value, and a gradient of rA where the unclipped branch is the lesser."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = rl.policy_loss(
        log_probs, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool), clip_low=0.2, clip_high=0.28,
    )  # fmt: skip
    clipped = min(max(ratio, 0.8), 1.28)
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    stopped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    assert float(gradient) == pytest.approx(0.0 if stopped else -ratio * advantage)


def test_masked_extremes_reach_neither_value_nor_gradient() -> None:
    log_probs = torch.tensor([[-1.0, -1e4, 1e4, float("nan")]], requires_grad=True)
    old = torch.tensor([[-1.0, 1e4, -1e4, 0.0]])
    mask = torch.tensor([[True, False, False, False]])
    for loss in (
        rl.policy_loss(log_probs, old, torch.tensor([2.0]), mask, clip_low=0.2, clip_high=0.2),
        rl.k3(log_probs, old, mask),
    ):
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all() and (gradient[0, 1:] == 0).all()


def test_k3_by_enumeration() -> None:
    """Over six symbols: E[k3] = KL(p || ref), and its expected gradient is that of KL(ref || p)."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), dim=0)
    p = torch.softmax(theta, 0).detach()
    each = torch.ones(1, 1, dtype=torch.bool)
    log_p = torch.log_softmax(theta, 0)
    terms = torch.stack([rl.k3(log_p[i].view(1, 1), reference[i].view(1, 1), each) for i in range(6)])
    value = (p * terms).sum()
    assert value.item() == pytest.approx((p * (log_p - reference)).sum().item())
    (found,) = torch.autograd.grad(value, theta)
    reverse = (reference.exp() * (reference - torch.log_softmax(theta, 0))).sum()
    (expected,) = torch.autograd.grad(reverse, theta)
    torch.testing.assert_close(found, expected)


# A batch through a model --------------------------------------------------------------------------------------------


def policy(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(MODEL, len(TOKENIZER)).eval()


def batch(config: RL = CONFIG, model: Transformer | None = None, step: int = 0) -> rl.Rollouts:
    problems = TASK.sample_batch(seed=0, start=0, count=config.prompts, operations=1, split="train")
    return rl.roll_out(model or policy(), TOKENIZER, TASK, problems, config, Noise(seed=0, purpose="rl", step=step))


def some_rewards(rollouts: rl.Rollouts) -> rl.Rollouts:
    """Rewards with signal in three of four groups; an untrained model earns none."""
    rewards = np.zeros_like(rollouts.rewards)
    rewards[0, 0] = rewards[1, ::2] = rewards[2, 3:] = 1.0
    return dataclasses.replace(rollouts, rewards=rewards)


def gradient(model: Transformer, rollouts: rl.Rollouts, config: RL) -> torch.Tensor:
    """The gradient of one update, read off before the step."""
    advantages = rl.group_advantages(rollouts.rewards, scale_by_std=config.scale_by_std)
    micros = rl.micro_batches(rollouts, advantages, config, TOKENIZER.pad)

    class Keep:
        grads: torch.Tensor

        def step(self) -> None:
            self.grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()

        def zero_grad(self) -> None:
            model.zero_grad()

    keep = Keep()
    tokens = int(rollouts.samples.lengths.sum())
    free = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip=0.0))
    rl.update(model, [keep], micros, tokens, free, raw=model, where="here")
    return keep.grads


def test_batch_gradient_equals_reinforce_row_by_row() -> None:
    """Brute force: each row alone, -A sum log p, over the tokens of the whole step, zero-advantage rows included."""
    model, rollouts = policy(), some_rewards(batch())
    advantages = rl.group_advantages(rollouts.rewards, scale_by_std=True).reshape(-1)
    expected = gradient(model, rollouts, CONFIG)
    model.zero_grad()
    tokens = 0
    for i, a in enumerate(advantages):
        ids, start = rollouts.row(i)
        row = torch.tensor(ids)
        tokens += len(ids) - start
        scores = token_log_probs(model(row[None])[0, start - 1 : -1], row[start:])
        (-float(a) * scores.sum()).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / tokens
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("micro_rows", [1, 3, 24])
def test_gradient_does_not_depend_on_micro_batches(micro_rows: int) -> None:
    model, rollouts = policy(), some_rewards(batch())
    assert len(set(rollouts.samples.lengths.tolist())) > 2  # uneven rows, or this proves nothing
    whole = gradient(model, rollouts, CONFIG)
    split = gradient(model, rollouts, dataclasses.replace(CONFIG, micro_rows=micro_rows))
    torch.testing.assert_close(whole, split, atol=1e-6, rtol=1e-4)


def test_the_end_token_is_trained_and_padding_is_not() -> None:
    model = policy()
    with torch.no_grad():
        model.embedding.weight[TOKENIZER.eos] = model.embedding.weight[5]  # ends come often
    rollouts = some_rewards(batch(model=model))
    assert bool(rollouts.samples.ended.any())
    advantages = np.ones_like(rollouts.rewards)
    for micro in rl.micro_batches(rollouts, advantages, CONFIG, TOKENIZER.pad):
        targets = micro.tokens[:, 1:]
        for row in range(len(targets)):
            trained = targets[row][micro.mask[row]]
            ends = (trained == TOKENIZER.eos).nonzero().flatten().tolist()
            assert ends in ([], [len(trained) - 1])
            assert (micro.documents[row, 1:][micro.mask[row]] == 1).all()
    trained = sum(int(m.mask.sum()) for m in rl.micro_batches(rollouts, advantages, CONFIG, TOKENIZER.pad))
    assert trained == int(rollouts.samples.lengths.sum())


def test_sampler_and_trainer_agree_at_any_temperature() -> None:
    for temperature in (0.6, 1.0, 1.3):
        config = dataclasses.replace(CONFIG, temperature=temperature)
        model = policy()
        rollouts = some_rewards(batch(config, model))
        advantages = rl.group_advantages(rollouts.rewards, scale_by_std=True)
        micros = rl.micro_batches(rollouts, advantages, config, TOKENIZER.pad)
        done = rl.update(
            model, optim.build(model, config.optimizer), micros, 100, config,
            raw=model, where="here",
        )  # fmt: skip
        assert done.sampler_gap < 1e-5 and done.clipped == 0 and done.grad_norm > 0


def step_with(rewards: float | None, config: RL, prepared: bool = True) -> tuple[torch.Tensor, torch.Tensor, rl.Update]:
    """Weights before and after one update with optimizers that already carry momentum."""
    model = policy()
    optimizers = optim.build(model, config.optimizer)
    if prepared:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    rollouts = some_rewards(batch(config, model))
    if rewards is not None:
        rollouts = dataclasses.replace(rollouts, rewards=np.full_like(rollouts.rewards, rewards))
    before = runtime.flat(model)
    micros = rl.micro_batches(rollouts, rl.group_advantages(rollouts.rewards, scale_by_std=True), config, TOKENIZER.pad)
    done = rl.update(
        model, optimizers, micros, int(rollouts.samples.lengths.sum()), config,
        raw=model, where="here",
        reference=policy(1) if config.kl else None,
    )  # fmt: skip
    return before, runtime.flat(model), done


@pytest.mark.parametrize("rewards", [0.0, 1.0, 0.9])
def test_a_batch_of_equal_groups_leaves_the_weights_unmoved(rewards: float) -> None:
    config = dataclasses.replace(CONFIG, optimizer=Optimizer(kind="muon", weight_decay=0.1))
    before, after, done = step_with(rewards, config)
    assert torch.equal(before, after) and done.steps == 0
    before, after, done = step_with(None, config)
    assert not torch.equal(before, after) and done.steps == 1


def test_kl_moves_the_policy_without_any_reward() -> None:
    before, after, done = step_with(0.0, dataclasses.replace(CONFIG, kl=0.1))
    assert not torch.equal(before, after) and done.kl > 0


def test_later_updates_are_off_policy_and_clipped() -> None:
    config = dataclasses.replace(CONFIG, updates=4, optimizer=Optimizer(lr=0.05, clip=0.0))
    _, _, done = step_with(None, config, prepared=False)
    assert done.steps == 4 and done.clipped > 0


def test_equal_prompts_stay_apart() -> None:
    config = dataclasses.replace(CONFIG, prompts=2)
    problem = TASK.sample(seed=0, index=0, operations=1)
    rollouts = rl.roll_out(policy(), TOKENIZER, TASK, [problem, problem], config, Noise(seed=0, purpose="rl"))
    assert rollouts.rewards.shape == (2, 6) and rollouts.prompts[0] == rollouts.prompts[1]
    assert not torch.equal(rollouts.samples.tokens[:6], rollouts.samples.tokens[6:])


def test_rewards_are_those_of_the_verdict() -> None:
    problem = TASK.sample(seed=0, index=0, operations=2)
    gold = TASK.verify(problem, problem.solution)
    answer_only = TASK.verify(problem, f"! {problem.answer}")
    assert [rl.reward_of(kind, gold, 0.9) for kind in ("strict", "answer", "process", "random")] == [1, 1, 1, 0]
    assert [rl.reward_of(kind, answer_only, 0.1) for kind in ("strict", "answer", "process", "random")] == [0, 1, 0, 1]
    half = TASK.verify(problem, " ".join(problem.solution.split(" ")[:9]))
    assert rl.reward_of("process", half, 0.0) == 0.5


def test_random_rewards_are_coin_flips() -> None:
    rollouts = batch(dataclasses.replace(CONFIG, reward="random", group=200, prompts=2))
    assert 0.4 < rollouts.rewards.mean() < 0.6 and set(rollouts.rewards.flatten()) == {0.0, 1.0}


# The stage ----------------------------------------------------------------------------------------------------------


POSITIONS = {"corpus": {"rows": 64, "row_length": 128}}


def parent(path: Path) -> Path:
    """A checkpoint whose model often writes a valid answer mark, so that some answer rewards differ."""
    path.mkdir()
    runtime.save_model(path, policy(), TOKENIZER)
    (path / MANIFEST).write_text(json.dumps({"summary": {"positions": POSITIONS}}))
    return path


def run(config: RL, start: Path, out: Path, **seeds: int) -> dict[str, Any]:
    out.mkdir()
    context = Context(model=MODEL, task=("arithmetic", SETTINGS), seeds=Seeds(**seeds), bands={"b": (1,)})
    node = Node(kind="rl", name="rl", seed=0, key="k", config=config, parents={"parent": "p"}, context=context)
    with Tracker(out) as tracker:
        return rl.run(node, {"parent": start}, out, tracker)


def test_a_stage_is_a_function_of_its_seeds(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=3, reward="random")
    start = parent(tmp_path / "parent")
    flat = {}
    for name, seeds in {"a": {}, "same": {}, "rollout": {"rollout": 1}, "order": {"order": 1}}.items():
        run(config, start, tmp_path / name, **seeds)
        flat[name] = runtime.flat(runtime.load_model(tmp_path / name)[0])
    assert torch.equal(flat["a"], flat["same"])
    assert not torch.equal(flat["a"], flat["rollout"]) and not torch.equal(flat["a"], flat["order"])


def test_a_stage_without_signal_says_so_and_does_not_move(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=2, optimizer=Optimizer(weight_decay=0.1))
    summary = run(config, parent(tmp_path / "parent"), tmp_path / "out")
    assert summary["groups"] == 8 and summary["groups_with_signal"] == 0
    assert summary["weight_change"] == 0.0 and summary["tokens"] == 0 and summary["rows"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / METRICS).read_text().splitlines()]
    assert [line["reward"] for line in lines] == [0.0, 0.0] and lines[0]["grad_norm"] == 0.0
    assert summary["sampled_tokens"] > 0 and summary["flops"] > 0
    # What was read of a corpus before is not forgotten.
    assert summary["positions"].items() > POSITIONS.items()


def test_rl_after_rl_goes_on_with_other_problems_and_noise(tmp_path: Path) -> None:
    """Two stages of two steps draw what one of four draws; a band that was not trained on begins at its start."""
    seen: list[tuple[int, str, int]] = []
    real = rl.roll_out

    def watch(model: Any, tokenizer: Any, task: Any, problems: Any, config: Any, noise: Noise, **more: Any) -> Any:
        seen.append((problems[0].index, noise.purpose, noise.step))
        return real(model, tokenizer, task, problems, config, noise, **more)

    config = dataclasses.replace(CONFIG, steps=2, reward="random")
    start = parent(tmp_path / "parent")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "roll_out", watch)
        first = run(config, start, tmp_path / "first")
        (tmp_path / "first" / MANIFEST).write_text(json.dumps({"summary": first}))
        second = run(config, tmp_path / "first", tmp_path / "second")
    assert [index for index, *_ in seen] == [0, 4, 8, 12]
    assert len({(purpose, step) for _, purpose, step in seen}) == 4
    (place,) = second["positions"].keys() - POSITIONS.keys()
    assert first["positions"][place] == {"problems": 8} and second["positions"][place] == {"problems": 16}
    run(config, tmp_path / "first", tmp_path / "other", order=1)


def test_rollouts_see_the_weights_of_the_last_update() -> None:
    """After a large update the sampler's log-probabilities are those of the new weights."""
    model = policy()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    rollouts = some_rewards(batch(model=model))
    micros = rl.micro_batches(rollouts, np.ones((4, 6)), CONFIG, TOKENIZER.pad)
    for micro in micros:
        gap = (micro.log_probs(model, 1.0) - micro.sampled).abs()[micro.mask]
        assert gap.max().item() < 1e-5
    stale = micros[0].log_probs(policy(), 1.0) - micros[0].sampled
    assert stale[micros[0].mask].abs().max().item() > 1e-2


def test_noise_of_a_step_differs_from_that_of_the_next() -> None:
    first, second = batch(step=0), batch(step=1)
    assert not torch.equal(first.samples.tokens, second.samples.tokens)
    drawn = sample(
        policy(), first.prompts[:1], [0], samples=6, max_new_tokens=12, end=TOKENIZER.eos, pad=TOKENIZER.pad,
        noise=Noise(seed=0, purpose="rl"),
    )  # fmt: skip
    assert torch.equal(drawn.tokens, first.samples.tokens[:6])
