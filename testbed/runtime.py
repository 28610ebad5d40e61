"""What every stage does around its own work: device, seeds of streams, checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.config import ModelConfig
from models.transformer import Transformer
from synthetic_tasks import Tokenizer
from testbed.store import MANIFEST

OPTIMIZERS = "optimizer.pt"


def fabric() -> Fabric:
    """Lightning Fabric on one device, a CUDA GPU where there is one, in fp32."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    engine = Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=1, precision="32-true")
    engine.launch()
    return engine


def derive(seed: int, purpose: str) -> int:
    """A seed for one purpose (63 bits), so that streams of different purposes share nothing."""
    digest = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def summary_of(path: Path) -> dict[str, Any]:
    """What the run of a finished artifact returned."""
    summary: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["summary"]
    return summary


def positions_of(path: Path) -> dict[str, dict[str, int]]:
    """How many rows, of which length, a stage and its ancestors have read of each corpus (by key)."""
    positions: dict[str, dict[str, int]] = summary_of(path)["positions"]
    return positions


def save_model(out: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    """Write model.safetensors, model.json and tokenizer.json."""
    # A tied head is the embedding: it is written once.
    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    if model.config.tied:
        del state["head.weight"]
    save_file(state, out / "model.safetensors")
    (out / "model.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=1) + "\n", encoding="utf-8")
    tokenizer.save(out / "tokenizer.json")


def load_model(path: Path) -> tuple[Transformer, Tokenizer]:
    """Model (on the CPU, in evaluation mode) and tokenizer of a stage's folder."""
    tokenizer = Tokenizer.load(path / "tokenizer.json")
    config = ModelConfig(**json.loads((path / "model.json").read_text(encoding="utf-8")))
    model = Transformer(config, len(tokenizer))
    state = load_file(path / "model.safetensors")
    if config.tied:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state)
    return model.eval(), tokenizer


def load_parent(path: Path, tokenizer: Tokenizer) -> Transformer:
    """The parent's model. Raises ValueError where it was trained with another vocabulary."""
    model, parents = load_model(path)
    if parents.digest != tokenizer.digest:
        raise ValueError(
            f"the parent stage was trained with another vocabulary ({parents!r}) than this stage's ({tokenizer!r}); "
            "both must come from the same tasks and settings"
        )
    return model


def save_optimizers(out: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    torch.save([optimizer.state_dict() for optimizer in optimizers], out / OPTIMIZERS)


def load_optimizers(path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Carry moments over; rates and other settings stay those of the new stage.

    Raises ValueError where the parent left no state or that of other optimizers.
    """
    if not (path / OPTIMIZERS).exists():
        raise ValueError("the parent stage kept no optimizer state (rl does not): set `parent_optimizer: reset`")
    states = torch.load(path / OPTIMIZERS, map_location="cpu", weights_only=True)
    shapes = [[len(group["params"]) for group in state["param_groups"]] for state in states]
    if shapes != [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]:
        raise ValueError("the parent stage used other optimizers: set `parent_optimizer: reset`")
    for optimizer, state in zip(optimizers, states, strict=True):
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)


def flat(model: nn.Module) -> Tensor:
    """Every parameter once, in one fp64 vector on the CPU."""
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def relative_change(before: Tensor, after: Tensor) -> float:
    """Norm of the change over the norm of what was there."""
    return float((after - before).norm() / before.norm())


def finite_norm(model: nn.Module, clip: float, where: str) -> float:
    """Clip gradients to the global norm `clip` (0: leave them) and return the norm before.

    Raises FloatingPointError where it is not finite, so that no optimizer step is taken.
    """
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
    if not norm < float("inf"):
        raise FloatingPointError(f"{where}: the gradient norm is {norm}; no step was taken")
    return norm
