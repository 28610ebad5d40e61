"""Transformers, their sampler and their sizes. Needs torch alone."""

from models.config import PRESETS, ModelConfig, preset

__all__ = ["PRESETS", "ModelConfig", "preset"]
