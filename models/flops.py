"""Floating-point operations of what ran.

Only useful work is counted: real tokens (no padding) and the query-key pairs that attention may see. A multiply-add is
two operations; norms, RoPE, softmax and other elementwise work are left out, as is usual (Kaplan et al. 2020, §2.1);
attention's pairs and the convolutions are counted, the embedding look-up is not.
"""

from __future__ import annotations

from models.config import ModelConfig

# A backward pass costs twice its forward pass.
TRAIN = 3.0


def matrix_parameters(config: ModelConfig, vocabulary: int) -> int:
    """Weights that multiply a token: projections, SwiGLU, convolutions and the head."""
    width, head = config.width, config.head_size
    attention = width * head * (2 * config.heads + 2 * config.key_value_heads)
    mlp = 3 * width * config.hidden_size
    convolutions = 2 * config.canon * width
    return config.layers * (attention + mlp + convolutions) + width * vocabulary


def forward_flops(config: ModelConfig, vocabulary: int, *, tokens: int, pairs: int, read: int | None = None) -> float:
    """FLOPs of a forward pass over `tokens` tokens with `pairs` visible query-key pairs; the head gives logits at
    `read` of the tokens (None: at all)."""
    per_pair = 4.0 * config.layers * config.heads * config.head_size
    unread = 0 if read is None else tokens - read
    dense = matrix_parameters(config, vocabulary) * tokens - config.width * vocabulary * unread
    return 2.0 * dense + per_pair * pairs


def causal_pairs(start: int, length: int) -> int:
    """Pairs seen by `length` tokens that follow `start` earlier ones, each seeing itself and all before."""
    return length * start + length * (length + 1) // 2
