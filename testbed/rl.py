"""GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3) on problems of one band with verified rewards.

    problems(step) ──sample G each──> verdicts ──> rewards [P, G] ──> advantages ──> clipped policy gradient

Departures from the paper: the loss is summed over tokens and divided by the tokens of the whole step (DAPO, arXiv
2503.14476, eq. 8), not averaged within each sample first; the standard deviation has ddof 0; there is no KL term unless
`kl` is positive, and then k3 is added to the loss (Schulman 2020) against the parent. Problems are grouped by their
place in the batch, so equal problems stay apart. The end token is trained; what is trained is decided by position.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.flops import TRAIN, Shape, causal_pairs
from models.noise import Noise, uniforms
from models.sampler import Samples, sample, sampling_shape
from models.transformer import Transformer, token_log_probs
from synthetic_tasks import Problem, Task, Tokenizer, Verdict
from testbed import optim, runtime
from testbed.config import RL
from testbed.ledger import Ledger, interplay_rl
from testbed.nodes import Node
from testbed.ranks import ALONE, Ranks
from testbed.saves import Saves
from testbed.tracking import Tracker
from testbed.trainer import Learner, train

# What a stage counts, over all its batches.
COUNTS = ("steps", "tokens", "samples", "sampled_tokens", "groups", "groups_with_signal", "rows")
# Added to a group's standard deviation.
STD_EPS = 1e-4
# Log-ratios are held in this range before exp, so that none overflows.
MAX_LOG_RATIO = 20.0


def group_advantages(rewards: NDArray[np.float64], *, scale_by_std: bool) -> NDArray[np.float64]:
    """Rewards [P, G] less their group's mean, over the group's standard deviation (ddof 0) + 1e-4 where asked.

    Two passes in float64; a group of equal rewards gets exactly 0, whatever rounding does to its mean.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if scale_by_std:
        centred = centred / (np.sqrt((centred**2).mean(axis=1, keepdims=True)) + STD_EPS)
    equal = rewards.max(axis=1, keepdims=True) == rewards.min(axis=1, keepdims=True)
    return np.where(equal, 0.0, centred)


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Sum over tokens of -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A). Divide by the step's tokens.

    log_probs, old_log_probs [N, T] (old detached); advantages [N]; mask [N, T], True on trained tokens. At ratio 1 the
    gradient is REINFORCE's: -A d log p. What the mask hides never reaches the result or its gradient.
    """
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    a = advantages[:, None]
    surrogate = torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    return -torch.where(mask, surrogate, 0.0).sum()


def k3(log_probs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Sum over tokens of exp(-d) - 1 + d, d = log p - log reference: unbiased for KL(p || reference), never negative.

    Its expected gradient is that of KL(reference || p), not of KL(p || reference), wherever k3 is put in the loss.
    """
    d = torch.where(mask, log_probs - reference, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask, (-d).exp() - 1 + d, 0.0).sum()


def reward_of(kind: str, verdict: Verdict, coin: float) -> float:
    """What one sample earns; `coin` in [0, 1) decides a random reward."""
    if kind == "process":
        return verdict.process_score
    if kind == "random":
        return float(coin < 0.5)
    return float(verdict.strict if kind == "strict" else verdict.answer_correct)


@dataclass(frozen=True)
class Rollouts:
    """One batch: P problems, G samples of each; row p·G + g is sample g of problem p."""

    prompts: list[list[int]]
    samples: Samples
    verdicts: list[Verdict]
    # [P, G]
    rewards: NDArray[np.float64]

    @property
    def group(self) -> int:
        return self.rewards.shape[1]

    def row(self, index: int) -> tuple[list[int], int]:
        """Prompt and completion of a row, end token included, and where the completion starts."""
        prompt = self.prompts[index // self.group]
        return [*prompt, *self.samples.tokens[index, : int(self.samples.lengths[index])].tolist()], len(prompt)


def roll_out(
    model: Transformer, tokenizer: Tokenizer, task: Task, problems: Sequence[Problem], config: RL, noise: Noise, *,
    first: int = 0,
) -> Rollouts:  # fmt: skip
    """Sample and judge `group` completions of each problem; `first` is the place of the first in the whole batch, which
    names its noise."""
    prompts = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    drawn = sample(
        model, prompts, range(first, first + len(prompts)), samples=config.group, max_new_tokens=config.max_new_tokens,
        end=tokenizer.eos, pad=tokenizer.pad, noise=noise, temperature=config.temperature,
    )  # fmt: skip
    rows = range(len(problems) * config.group)
    verdicts = [
        task.verify(
            problems[row // config.group], tokenizer.decode(drawn.completion(row)), ended=bool(drawn.ended[row])
        )
        for row in rows
    ]
    places = torch.arange(len(rows)) + first * config.group
    coin_noise = Noise(seed=noise.seed, purpose=f"{noise.purpose}/coin", step=noise.step)
    coins = uniforms(coin_noise.keys(places // config.group, places % config.group), 0).tolist()
    rewards = np.array([reward_of(config.reward, *pair) for pair in zip(verdicts, coins, strict=True)])
    return Rollouts(prompts, drawn, verdicts, rewards.reshape(len(problems), config.group))


@dataclass
class Micro:
    """Some rows of a batch, right-padded to the longest: N rows, T tokens."""

    # [N, T]
    tokens: Tensor
    documents: Tensor
    # [N, T-1]: True where the next token is one of the completion.
    mask: Tensor
    # [N]
    advantages: Tensor
    # Sampler's log-probabilities of the next token [N, T-1], 0 outside the mask.
    sampled: Tensor
    # The trainer's, before the first optimizer step and of the parent, where they are needed.
    old: Tensor | None = None
    reference: Tensor | None = None

    def log_probs(self, model: Any, temperature: float) -> Tensor:
        """Log-probabilities of the next tokens under the sampling distribution [N, T-1]."""
        return token_log_probs(model(self.tokens, documents=self.documents)[:, :-1], self.tokens[:, 1:], temperature)

    @property
    def useful(self) -> Shape:
        """Real tokens and visible pairs."""
        lengths = self.documents.sum(1).tolist()
        return Shape(sum(lengths), sum(causal_pairs(0, int(n)) for n in lengths), sum(lengths))

    @property
    def executed(self) -> Shape:
        return Shape.dense(*self.tokens.shape)


def micro_batches(rollouts: Rollouts, advantages: NDArray[np.float64], config: RL, pad: int) -> list[Micro]:
    """The rows that have a gradient, those of like length together.

    Without a KL term a row of advantage 0 has none, and is left out; the tokens it counts in the denominator stay.
    """
    flat = advantages.reshape(-1)
    laid = {i: rollouts.row(i) for i in range(len(flat)) if config.kl > 0 or flat[i] != 0}
    rows = sorted(laid, key=lambda i: len(laid[i][0]))
    device = rollouts.samples.tokens.device
    out = []
    for first in range(0, len(rows), config.micro_rows):
        some = rows[first : first + config.micro_rows]
        width = max(len(laid[i][0]) for i in some)
        tokens = torch.full((len(some), width), pad)
        documents = torch.zeros(len(some), width, dtype=torch.long)
        mask = torch.zeros(len(some), width, dtype=torch.bool)
        sampled = torch.zeros(len(some), width)
        for n, i in enumerate(some):
            ids, start = laid[i]
            tokens[n, : len(ids)] = torch.tensor(ids)
            documents[n, : len(ids)] = 1
            mask[n, start : len(ids)] = True
            sampled[n, start : len(ids)] = rollouts.samples.log_probs[i, : len(ids) - start].cpu()
        out.append(
            Micro(
                tokens.to(device),
                documents.to(device),
                mask[:, 1:].to(device),
                torch.tensor(flat[some], dtype=torch.float32, device=device),
                sampled[:, 1:].to(device),
            )
        )
    return out


@dataclass
class Update:
    """What one batch did to the policy."""

    grad_norm: float = 0.0
    # Largest difference between the sampler's and the trainer's log-probability of a token.
    sampler_gap: float = 0.0
    # Share of tokens whose ratio lay outside the clip in the last optimizer step.
    clipped: float = 0.0
    # Mean k3 against the parent a token, before the update.
    kl: float = 0.0
    steps: int = 0


def update(
    model: Any, optimizers: Sequence[Any], micros: Sequence[Micro], tokens: int, config: RL, *,
    raw: Transformer, where: str, reference: Transformer | None = None, ranks: Ranks = ALONE,
) -> Update:  # fmt: skip
    """Take `config.updates` optimizer steps on a batch; none where no row of any rank has a gradient.

    tokens: completion tokens of the whole step over all ranks, the denominator of every term. The ratio is to the
    trainer's own log-probabilities before the first step, so it is exactly 1 there.
    """
    done = Update()
    # Ranks take part in the same number of backward passes; one that has fewer rows takes empty ones.
    most = int(ranks.maximum(len(micros)))
    if most == 0:
        return done
    if reference is not None:
        with torch.no_grad():
            for micro in micros:
                micro.reference = micro.log_probs(reference, config.temperature)
    for step in range(config.updates):
        outside = 0
        for number in range(most):
            with ranks.adding(model, last=number == most - 1):
                if number >= len(micros):
                    nothing = model(torch.zeros(1, 1, dtype=torch.long, device=raw.embedding.weight.device))
                    ranks.backward(0.0 * nothing.sum())
                    continue
                micro = micros[number]
                log_probs = micro.log_probs(model, config.temperature)
                if step == 0:
                    micro.old = log_probs.detach()
                    gap = torch.where(micro.mask, (micro.old - micro.sampled).abs(), 0.0)
                    done.sampler_gap = max(done.sampler_gap, float(gap.max()))
                assert micro.old is not None
                loss = policy_loss(
                    log_probs, micro.old, micro.advantages, micro.mask,
                    clip_low=config.clip_low, clip_high=config.clip_high,
                )  # fmt: skip
                if micro.reference is not None:
                    penalty = k3(log_probs, micro.reference, micro.mask)
                    loss = loss + config.kl * penalty
                    done.kl += float(penalty.detach()) / tokens if step == 0 else 0.0
                if not torch.isfinite(loss):
                    raise FloatingPointError(f"{where}: the loss is {float(loss)}; no step was taken")
                ranks.backward(loss / tokens)
            ratio = (log_probs.detach() - micro.old).exp()
            beyond = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
            outside += int((beyond & micro.mask).sum())
        done.grad_norm = runtime.finite_norm(raw, config.optimizer.clip, where)
        done.clipped = ranks.sums([outside])[0] / tokens
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done.steps += 1
    done.sampler_gap, (done.kl,) = ranks.maximum(done.sampler_gap), ranks.sums([done.kl])
    return done


class Policy(Learner):
    """An RL stage."""

    def __init__(self, node: Node, inputs: Mapping[str, Path]) -> None:
        config = node.config
        assert isinstance(config, RL)
        self.node, self.config = node, config
        fabric = runtime.fabric()
        self.ranks = Ranks(fabric)
        self.task, self.tokenizer = node.context.task_and_tokenizer()
        parent = inputs["parent"]
        self.raw, self.optimizers = runtime.start(node, parent, self.tokenizer, config.optimizer, fabric.device)
        self.reference = copy.deepcopy(self.raw) if config.kl > 0 else None
        self.before = runtime.flat(self.raw)
        self.model, *self.wrapped = fabric.setup(self.raw, *self.optimizers)
        self.raw.eval()  # there is no dropout, and scoring equals sampling
        self.ledger = Ledger(node.context.model, len(self.tokenizer))
        self.earlier = runtime.positions_of(parent)
        seeds = node.context.seeds
        self.stream = runtime.derive(seeds.problems, f"rl problems, order {seeds.order}")
        self.weights = {operations: 1.0 for operations in node.context.bands[config.band]}
        # A stage after another on the same problems goes on where that stopped, with noise of its own.
        self.place = f"rl/{self.stream}/{','.join(map(str, sorted(self.weights)))}"
        self.first = self.earlier.get(self.place, {}).get("problems", 0)
        self.total = config.steps
        self.counts = dict.fromkeys(COUNTS, 0)

    def step(self, step: int) -> Mapping[str, float]:
        config, ranks = self.config, self.ranks
        mine = ranks.share(config.prompts)
        problems = self.task.sample_batch(
            seed=self.stream, start=self.first + step * config.prompts + mine.start, count=len(mine),
            operations=self.weights, split=self.config.split,
        )  # fmt: skip
        purpose = f"rl after {self.first}" if self.first else "rl"
        noise = Noise(seed=self.node.context.seeds.rollout, purpose=purpose, step=step)
        rollouts = roll_out(self.raw, self.tokenizer, self.task, problems, config, noise, first=mine.start)
        advantages = group_advantages(rollouts.rewards, scale_by_std=config.scale_by_std)
        micros = micro_batches(rollouts, advantages, config, self.tokenizer.pad)
        # Without a budget of steps the rate is constant.
        rate = optim.factor(config.schedule, step, config.steps or step + 1)
        optim.set_rate(self.optimizers, config.optimizer, rate)
        lengths, verdicts = rollouts.samples.lengths, rollouts.verdicts
        # Sums over all ranks, of which the metrics are made.
        sampled, samples, reward, strict, answer, ended, signal = ranks.sums(
            [
                int(lengths.sum()),
                len(lengths),
                float(rollouts.rewards.sum()),
                sum(v.strict for v in verdicts),
                sum(v.answer_correct for v in verdicts),
                int(rollouts.samples.ended.sum()),
                int((rollouts.rewards.max(axis=1) > rollouts.rewards.min(axis=1)).sum()),
            ]
        )
        done = update(
            self.model, self.wrapped, micros, int(sampled), config,
            raw=self.raw, where=f"{self.node.label}, step {step + 1}", reference=self.reference, ranks=ranks,
        )  # fmt: skip
        trained, rows = self._enter(rollouts, micros, done.steps)
        new = {
            "steps": 1,
            "tokens": trained,
            "samples": int(samples),
            "sampled_tokens": int(sampled),
            "groups": config.prompts,
            "groups_with_signal": int(signal),
            "rows": rows,
        }
        self.counts = {name: self.counts[name] + new[name] for name in COUNTS}
        return {
            "reward": reward / samples,
            "strict": strict / samples,
            "answer": answer / samples,
            "signal_share": signal / config.prompts,
            "length": sampled / samples,
            "truncated": 1 - ended / samples,
            "lr": config.optimizer.lr * rate,
            "grad_norm": done.grad_norm,
            "sampler_gap": done.sampler_gap,
            "clipped": done.clipped,
            **({"kl": done.kl} if self.reference is not None else {}),
            "tokens": self.counts["tokens"] + self.counts["sampled_tokens"],
            "flops": self.ledger.flops,
        }

    def done(self, steps: int) -> bool:
        if self.total is not None:
            return steps >= self.total
        return self.ledger.flops >= float(self.config.flops or 0)

    def expected(self, steps: int) -> int:
        if self.total is not None:
            return self.total
        return max(steps, math.ceil(steps * float(self.config.flops or 0) / self.ledger.flops))

    def record(self) -> dict[str, Any]:
        return {"counts": self.counts, "ledger": self.ledger.record()}

    def restore(self, record: dict[str, Any]) -> None:
        self.counts = record["counts"]
        self.ledger.restore(record["ledger"])

    def summary(self) -> dict[str, Any]:
        config, parameters = self.config, self.raw.parameter_count()
        return {
            **self.counts,
            "flops": self.ledger.flops,
            "flops_interplay": interplay_rl(
                parameters, self.counts["samples"], self.raw.config.max_length, reference=self.reference is not None
            ),
            "ledger": self.ledger.record(),
            "weight_change": runtime.relative_change(self.before, runtime.flat(self.raw)),
            "rate_state": optim.rate_state(config.schedule, self.counts["steps"], config.steps or 0),
            "positions": self.earlier | {self.place: {"problems": self.first + self.counts["groups"]}},
            "parameters": parameters,
            **runtime.conditions(),
        }

    def _enter(self, rollouts: Rollouts, micros: Sequence[Micro], updates: int) -> tuple[int, int]:
        """Enter a batch into the ledger, over all ranks; returns trained tokens and rows.

        Sampling, then forward and backward of the trained rows.
        """
        useful = sampling_shape(rollouts.prompts, rollouts.samples)
        micro = sum((m.useful for m in micros), Shape())
        padded = sum((m.executed for m in micros), Shape())
        executed = rollouts.samples.executed
        rows = sum(len(m.tokens) for m in micros)
        here = [v for shape in (useful, executed, micro, padded) for v in (shape.tokens, shape.pairs, shape.read)]
        every = [int(value) for value in self.ranks.sums([*here, rows])]
        useful, executed, micro, padded = (Shape(*every[i : i + 3]) for i in range(0, 12, 3))
        self.ledger.add("rollout", useful, executed)
        self.ledger.add("training", micro, padded, passes=TRAIN, times=updates)
        if self.reference is not None and updates:
            self.ledger.add("reference", micro, padded)
        return micro.tokens * updates, every[12] * updates


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None) -> dict[str, Any]:
    """Train one RL stage and write its checkpoint; returns what the stages table needs."""
    return train(Policy(node, inputs), out, tracker, saves)
