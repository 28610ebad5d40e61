"""Noise that is a function of what is sampled, not of when: counter-based uniforms from SplitMix64.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the finaliser "mix64 variant
13"). A row's key is made from (seed, purpose, step, problem, sample); its uniform at a position hashes (key, position).
So a sample does not depend on its batch mates, their order, or how often anything else was drawn.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 [any shape]; multiplication wraps."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What a call's samples are drawn for."""

    seed: int
    # Keeps uses apart: "rl", "evaluation", ...
    purpose: str
    step: int = 0

    def keys(self, problems: Tensor, samples: Tensor) -> Tensor:
        """Row keys [N] from problem ids [N] and sample numbers [N], both int64."""
        digest = hashlib.sha256(f"{self.seed}/{self.purpose}/{self.step}".encode()).digest()
        base = int.from_bytes(digest[:8], "little", signed=True)
        return mix(mix(mix(problems + base) + samples) + GOLDEN)


def uniforms(keys: Tensor, position: int | Tensor) -> Tensor:
    """Uniforms in [0, 1), float64 [N], one a row at a position."""
    bits = _shift(mix(keys + (torch.as_tensor(position, device=keys.device) + 1) * GOLDEN), 11)
    return bits.double() * 2.0**-53
