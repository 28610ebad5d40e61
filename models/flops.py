"""Floating-point operations of forward passes, counted from their shapes.

A multiply-add is two operations; norms, RoPE, softmax and other elementwise work are left out, as is usual (Kaplan et
al. 2020, §2.1); attention's pairs and the convolutions are counted, the embedding look-up is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig

# Passes that training takes: a backward pass costs twice its forward pass.
TRAIN = 3.0


@dataclass(frozen=True)
class Shape:
    """What forward passes went over: useful (real tokens, and the pairs that attention may see) or as executed (padding
    and masked pairs too)."""

    tokens: int = 0
    # Query-key pairs of one head.
    pairs: int = 0
    # Tokens of which the head gave logits.
    read: int = 0

    def __add__(self, other: Shape) -> Shape:
        return Shape(self.tokens + other.tokens, self.pairs + other.pairs, self.read + other.read)

    @classmethod
    def dense(cls, rows: int, length: int) -> Shape:
        """Rows of one length, every position attending to every other and every one read."""
        return cls(rows * length, rows * length * length, rows * length)


def matrix_parameters(config: ModelConfig) -> int:
    """Weights of the blocks that multiply every token: projections, SwiGLU and convolutions."""
    width, head = config.width, config.head_size
    attention = width * head * (2 * config.heads + 2 * config.key_value_heads)
    mlp = 3 * width * config.hidden_size
    convolutions = 2 * config.canon * width
    return config.layers * (attention + mlp + convolutions)


def forward_flops(config: ModelConfig, vocabulary: int, shape: Shape) -> float:
    """FLOPs of forward passes over the shape."""
    per_pair = 4.0 * config.layers * config.heads * config.head_size
    return (
        2.0 * matrix_parameters(config) * shape.tokens
        + per_pair * shape.pairs
        + 2.0 * config.width * vocabulary * shape.read
    )


def causal_pairs(start: int, length: int) -> int:
    """Pairs seen by `length` tokens that follow `start` earlier ones, each seeing itself and all before."""
    return length * start + length * (length + 1) // 2
