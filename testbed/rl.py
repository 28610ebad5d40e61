"""GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3) on problems of one band with verified rewards.

    problems(step) ──sample G each──> verdicts ──> rewards [P, G] ──> advantages ──> clipped policy gradient

Departures from the paper: the loss is summed over tokens and divided by the tokens of the whole step (DAPO, arXiv
2503.14476, eq. 8), not averaged within each sample first; the standard deviation has ddof 0; there is no KL term unless
`kl` is positive, and then k3 is added to the loss (Schulman 2020) against the parent. Problems are grouped by their
place in the batch, so equal problems stay apart. The end token is trained; what is trained is decided by position.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.flops import TRAIN, causal_pairs, forward_flops
from models.noise import Noise, uniforms
from models.sampler import Samples, sample
from models.transformer import Transformer, token_log_probs
from synthetic_tasks import Problem, Task, Tokenizer, Verdict
from testbed import optim, runtime
from testbed.config import RL
from testbed.nodes import Node
from testbed.tracking import Tracker

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
    model: Transformer, tokenizer: Tokenizer, task: Task, problems: Sequence[Problem], config: RL, noise: Noise
) -> Rollouts:
    """Sample and judge `group` completions of each problem."""
    prompts = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    drawn = sample(
        model, prompts, range(len(prompts)), samples=config.group, max_new_tokens=config.max_new_tokens,
        end=tokenizer.eos, pad=tokenizer.pad, noise=noise, temperature=config.temperature,
    )  # fmt: skip
    rows = range(len(problems) * config.group)
    verdicts = [
        task.verify(
            problems[row // config.group], tokenizer.decode(drawn.completion(row)), ended=bool(drawn.ended[row])
        )
        for row in rows
    ]
    places = torch.arange(len(rows))
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
    def pairs(self) -> int:
        return sum(causal_pairs(0, int(n)) for n in self.documents.sum(1))


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
    raw: Transformer, backward: Any, where: str, reference: Transformer | None = None,
) -> Update:  # fmt: skip
    """Take `config.updates` optimizer steps on a batch; none where no row has a gradient.

    tokens: completion tokens of the whole step, the denominator of every term. The ratio is to the trainer's own
    log-probabilities before the first step, so it is exactly 1 there.
    """
    done = Update()
    if not micros:
        return done
    if reference is not None:
        with torch.no_grad():
            for micro in micros:
                micro.reference = micro.log_probs(reference, config.temperature)
    for step in range(config.updates):
        outside = 0
        for micro in micros:
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
            backward(loss / tokens)
            ratio = (log_probs.detach() - micro.old).exp()
            beyond = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
            outside += int((beyond & micro.mask).sum())
        done.grad_norm = runtime.finite_norm(raw, config.optimizer.clip, where)
        done.clipped = outside / tokens
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done.steps += 1
    return done


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker) -> dict[str, Any]:
    """Train one RL stage and write its checkpoint; returns what the stages table needs."""
    config = node.config
    assert isinstance(config, RL)
    fabric = runtime.fabric()
    task, tokenizer = node.context.task_and_tokenizer()
    raw = runtime.load_parent(inputs["parent"], tokenizer)
    reference = copy.deepcopy(raw).to(fabric.device) if config.kl > 0 else None
    before = runtime.flat(raw)
    optimizers = optim.build(raw, config.optimizer)
    model, *wrapped = fabric.setup(raw, *optimizers)
    raw.eval()  # there is no dropout, and scoring equals sampling
    seeds = node.context.seeds
    stream = runtime.derive(seeds.problems, f"rl problems, order {seeds.order}")
    weights = {operations: 1.0 for operations in node.context.bands[config.band]}

    counts = dict.fromkeys(("tokens", "samples", "sampled_tokens", "groups", "groups_with_signal", "rows"), 0)
    flops = 0.0
    for step in range(config.steps):
        problems = task.sample_batch(
            seed=stream, start=step * config.prompts, count=config.prompts, operations=weights, split="train"
        )
        noise = Noise(seed=seeds.rollout, purpose="rl", step=step)
        rollouts = roll_out(raw, tokenizer, task, problems, config, noise)
        advantages = group_advantages(rollouts.rewards, scale_by_std=config.scale_by_std)
        micros = micro_batches(rollouts, advantages, config, tokenizer.pad)
        optim.set_rate(optimizers, config.optimizer, rate := optim.factor(config.schedule, step, config.steps))
        lengths = rollouts.samples.lengths
        sampled = int(lengths.sum())
        done = update(
            model, wrapped, micros, sampled, config,
            raw=raw, backward=fabric.backward, where=f"{node.label}, step {step + 1}", reference=reference,
        )  # fmt: skip

        flops += _flops(raw, rollouts, micros, done.steps, reference is not None)
        signal = int((rollouts.rewards.max(axis=1) > rollouts.rewards.min(axis=1)).sum())
        trained = sum(int(micro.documents.sum()) for micro in micros) * done.steps
        new = {
            "tokens": trained,
            "samples": len(lengths),
            "sampled_tokens": sampled,
            "groups": config.prompts,
            "groups_with_signal": signal,
            "rows": sum(len(micro.tokens) for micro in micros) * done.steps,
        }
        counts = {name: counts[name] + new[name] for name in counts}
        tracker.log(
            step + 1,
            config.steps,
            reward=float(rollouts.rewards.mean()),
            strict=float(np.mean([v.strict for v in rollouts.verdicts])),
            answer=float(np.mean([v.answer_correct for v in rollouts.verdicts])),
            signal_share=signal / config.prompts,
            length=float(lengths.double().mean()),
            truncated=1 - float(rollouts.samples.ended.double().mean()),
            lr=config.optimizer.lr * rate,
            grad_norm=done.grad_norm,
            sampler_gap=done.sampler_gap,
            clipped=done.clipped,
            **({"kl": done.kl} if reference is not None else {}),
            tokens=counts["tokens"] + counts["sampled_tokens"],
            flops=flops,
        )
    runtime.save_model(out, raw, tokenizer)
    return {
        "steps": config.steps,
        **counts,
        "flops": flops,
        "weight_change": runtime.relative_change(before, runtime.flat(raw)),
        "positions": runtime.positions_of(inputs["parent"]),
        "parameters": raw.parameter_count(),
        "device": str(fabric.device),
        "dtype": "float32",
    }


def _flops(model: Transformer, rollouts: Rollouts, micros: Sequence[Micro], steps: int, reference: bool) -> float:
    """FLOPs of a batch: each prompt is read once for one row of logits, and of a sample every token but the last is fed
    back; then forward and backward of the trained rows."""
    lengths = rollouts.samples.lengths.view(len(rollouts.prompts), rollouts.group).tolist()
    prompts = [len(prompt) for prompt in rollouts.prompts]
    fed = [[length - 1 for length in group] for group in lengths]
    again = sum(map(sum, fed))
    pairs = sum(causal_pairs(0, n) for n in prompts)
    pairs += sum(causal_pairs(n, length) for n, group in zip(prompts, fed, strict=True) for length in group)
    trained = {
        "tokens": sum(int(micro.documents.sum()) for micro in micros),
        "pairs": sum(micro.pairs for micro in micros),
    }
    passes = TRAIN * steps + (1.0 if reference and micros else 0.0)
    sampling = forward_flops(
        model.config, model.vocabulary, tokens=sum(prompts) + again, pairs=pairs, read=len(prompts) + again
    )
    return sampling + passes * forward_flops(model.config, model.vocabulary, **trained)
