"""Sampling completions: one prefill a prompt, static caches, counter-based noise, fp32 log-probabilities.

Axes: P prompts, S samples of each, N = P·S rows (prompt-major), L new tokens.

The token is the inverse of the cumulative distribution at a uniform that depends only on (seed, purpose, step,
problem, sample, position). Batch shape still moves logits in the last bits, so samples across batch shapes agree except
where the uniform falls within about 1e-5 of a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.flops import Shape, causal_pairs
from models.noise import Noise, uniforms
from models.transformer import LayerCache, Transformer

# Rows that have ended are dropped from the batch at steps divisible by this, when at least a quarter has.
COMPACT_EVERY = 8


@dataclass(frozen=True)
class Samples:
    """Completions of N rows, prompt-major."""

    # Token ids [N, L], the end token included, padding after it.
    tokens: Tensor
    # Tokens of each row, the end token included [N].
    lengths: Tensor
    # Whether the end token came before the budget ran out [N].
    ended: Tensor
    # log-probability of each token under the sampling distribution [N, L], fp32, 0 after the end.
    log_probs: Tensor
    # What was computed: padding, masked pairs and rows that had ended included.
    executed: Shape = field(default_factory=Shape)

    def completion(self, row: int) -> list[int]:
        """Ids of a row without the end token."""
        length = int(self.lengths[row]) - int(self.ended[row])
        return self.tokens[row, :length].tolist()


@torch.inference_mode()
def sample(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    problems: Sequence[int],
    *,
    samples: int,
    max_new_tokens: int,
    end: int,
    pad: int,
    noise: Noise,
    temperature: float = 1.0,
    max_rows: int = 1024,
) -> Samples:
    """Draw `samples` completions of every prompt.

    prompts: P sequences of ids, any lengths of at least 1; problems: P ids that name the noise (equal ids get equal
    noise). At most max_rows rows are decoded at once, in whole prompts. Raises ValueError for an empty prompt, unequal
    lengths of the two lists, a temperature that is not positive, or a prompt that leaves no room for max_new_tokens
    under model.max_length. Top-k and nucleus truncation are not offered: they would break the equality of these
    log-probabilities with the trainer's.
    """
    if len(prompts) != len(problems):
        raise ValueError(f"{len(prompts)} prompts but {len(problems)} problem ids")
    if not prompts or min(map(len, prompts)) == 0:
        raise ValueError("sampling needs at least one prompt, and no prompt may be empty")
    if samples < 1 or max_new_tokens < 1:
        raise ValueError(f"samples and max_new_tokens must be at least 1, not {samples} and {max_new_tokens}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > model.config.max_length:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed model.max_length = "
            f"{model.config.max_length}: raise model.max_length or lower max_new_tokens"
        )
    device = model.embedding.weight.device
    total = len(prompts) * samples
    tokens = torch.full((total, max_new_tokens), pad, dtype=torch.long, device=device)
    log_probs = torch.zeros(total, max_new_tokens, device=device)
    executed = Shape()
    # Prompts of like length share a batch, so that little is padding.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    per_batch = max(1, max_rows // samples)
    was_training = model.training
    model.eval()
    for first in range(0, len(order), per_batch):
        batch = order[first : first + per_batch]
        rows = torch.tensor([index * samples + s for index in batch for s in range(samples)], device=device)
        ids = torch.tensor([problems[index] for index in batch], device=device).repeat_interleave(samples)
        keys = noise.keys(ids, torch.arange(samples, device=device).repeat(len(batch)))
        logits, state = _prefill(model, [prompts[index] for index in batch], samples, max_new_tokens)
        width = max(len(prompts[index]) for index in batch)
        executed += Shape(len(batch) * width, len(batch) * width * width, len(batch))
        live = torch.ones_like(rows, dtype=torch.bool)
        for step in range(max_new_tokens):
            scaled = torch.log_softmax(logits / temperature, dim=-1)
            chosen = _inverse_cdf(scaled, uniforms(keys, step))
            tokens[rows, step] = chosen
            log_probs[rows, step] = scaled.gather(1, chosen[:, None]).squeeze(1)
            live &= chosen != end
            if step == max_new_tokens - 1:
                break
            if (step + 1) % COMPACT_EVERY == 0:
                alive = int(live.sum())
                if alive == 0:
                    break
                if alive <= 0.75 * len(live):
                    kept = live.nonzero().squeeze(1)
                    rows, keys, chosen, live = rows[kept], keys[kept], chosen[kept], live[kept]
                    state = state.rows(kept)
            executed += Shape(len(rows), len(rows) * (state.column + 1), len(rows))
            logits = state.advance(model, chosen)
    model.train(was_training)
    # Rows rode along after their end until they were dropped: cut them there, by position.
    is_end = tokens == end
    ended = is_end.any(dim=1)
    lengths = torch.where(ended, is_end.int().argmax(dim=1) + 1, max_new_tokens)
    after = torch.arange(max_new_tokens, device=device) >= lengths[:, None]
    return Samples(tokens.masked_fill(after, pad), lengths, ended, log_probs.masked_fill(after, 0.0), executed)


def sampling_shape(prompts: Sequence[Sequence[int]], drawn: Samples) -> Shape:
    """Useful work behind samples: each prompt is read once for one row of logits, and of a sample every token but the
    last is fed back."""
    samples = len(drawn.lengths) // len(prompts)
    groups = drawn.lengths.view(len(prompts), samples).tolist()
    read = sum(length - 1 for group in groups for length in group)
    pairs = sum(causal_pairs(0, len(prompt)) for prompt in prompts)
    pairs += sum(causal_pairs(len(p), length - 1) for p, group in zip(prompts, groups, strict=True) for length in group)
    return Shape(sum(map(len, prompts)) + read, pairs, len(prompts) + read)


def _inverse_cdf(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens [N] whose share of the cumulative distribution holds uniform [N]; log_probs [N, V]."""
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # Scaled by the last entry, so that rounding can never push the choice past the vocabulary.
    return torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True).squeeze(1)


@dataclass
class _State:
    """Rows being decoded: caches, which columns each may see, and the position of its next token."""

    caches: list[LayerCache]
    # [N, capacity], False on the padding at the left; columns still to come are True.
    visible: Tensor
    # [N]
    positions: Tensor
    column: int

    def rows(self, index: Tensor) -> _State:
        return _State([c.rows(index) for c in self.caches], self.visible[index], self.positions[index], self.column)

    def advance(self, model: Transformer, tokens: Tensor) -> Tensor:
        """Feed one token a row; logits [N, V] of the next."""
        logits = model.step(tokens, self.positions, self.visible[:, : self.column + 1], self.column, self.caches)
        self.positions = self.positions + 1
        self.column += 1
        return logits


def _prefill(
    model: Transformer, prompts: Sequence[Sequence[int]], samples: int, max_new_tokens: int
) -> tuple[Tensor, _State]:
    """Logits [P·samples, V] after the prompts and the state behind them; every prompt is read once."""
    device = model.embedding.weight.device
    length = max(map(len, prompts))
    capacity = length + max_new_tokens
    tokens = torch.zeros(len(prompts), length, dtype=torch.long)
    real = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = torch.tensor(prompt)
        real[row, length - len(prompt) :] = True
    tokens, real = tokens.to(device), real.to(device)
    logits, caches = model.prefill(tokens, real, capacity)
    visible = torch.ones(len(prompts), capacity, dtype=torch.bool, device=device)
    visible[:, :length] = real
    state = _State(caches, visible, real.sum(1), length)
    repeated = torch.arange(len(prompts), device=device).repeat_interleave(samples)
    return logits[repeated], state.rows(repeated)
