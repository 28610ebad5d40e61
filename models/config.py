"""The shape of a model: one frozen dataclass and named sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer (RMSNorm, RoPE, SwiGLU).

    Raises ValueError where the numbers cannot fit together.
    """

    # Read by pydantic where a spec contains this dataclass: unknown keys are refused.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    # Number of blocks.
    layers: int = 4
    # Width of the residual stream.
    width: int = 64
    # Query heads; the head dimension is width / heads unless head_dim is given.
    heads: int = 4
    # Key-value heads (grouped-query attention); 0 means as many as query heads.
    kv_heads: int = 0
    # Dimension of a head; 0 means width / heads.
    head_dim: int = 0
    # Hidden width of the SwiGLU; 0 means 8/3 of the width, rounded up to a multiple of 16.
    hidden: int = 0
    # RMS-normalise queries and keys of each head before RoPE.
    qk_norm: bool = True
    # Width of the short causal depthwise convolutions before attention and MLP (Canon A and C); 0 turns them off.
    canon: int = 4
    # Base of RoPE.
    rope_base: float = 10_000.0
    # Share of each head's dimensions that RoPE turns; 0 leaves attention without positions (NoPE).
    rope_share: float = 1.0
    # Tie the output head to the embedding.
    tied: bool = True
    # Added inside RMSNorm's square root.
    norm_eps: float = 1e-6
    # Longest document, in tokens.
    max_length: int = 512

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        if self.head_dim < 0 or self.hidden < 0 or self.kv_heads < 0 or self.canon < 0:
            raise ValueError("model.head_dim, hidden, kv_heads and canon must not be negative")
        if not self.head_dim and self.width % self.heads:
            raise ValueError(f"model.width {self.width} is not divisible by model.heads {self.heads}; give head_dim")
        if self.heads % self.key_value_heads:
            raise ValueError(f"model.heads {self.heads} is not divisible by model.kv_heads {self.key_value_heads}")
        if not 0.0 <= self.rope_share <= 1.0:
            raise ValueError(f"model.rope_share must lie in [0, 1], not {self.rope_share}")

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def hidden_size(self) -> int:
        return self.hidden or -(-8 * self.width // 3 // 16) * 16

    @property
    def rope_size(self) -> int:
        """Dimensions of a head that RoPE turns: even, at most head_size."""
        return int(self.head_size * self.rope_share) // 2 * 2


PRESETS: dict[str, ModelConfig] = {
    "0.1M": ModelConfig(layers=2, width=64, heads=4),
    "0.2M": ModelConfig(layers=4, width=64, heads=4),
    "0.8M": ModelConfig(layers=4, width=128, heads=4),
    "5M": ModelConfig(layers=6, width=256, heads=4, max_length=1024),
    "26M": ModelConfig(layers=8, width=512, heads=8, kv_heads=4, max_length=1024),
    "87M": ModelConfig(layers=12, width=768, heads=12, kv_heads=4, max_length=2048),
    "300M": ModelConfig(layers=24, width=1024, heads=16, kv_heads=4, max_length=2048),
    "1B": ModelConfig(layers=20, width=2048, heads=16, kv_heads=4, max_length=2048),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """A named size, with changed fields. Raises KeyError for an unknown name."""
    return replace(PRESETS[name], **changes)
