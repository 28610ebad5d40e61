"""Optimizers and learning-rate schedules of every stage."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from testbed.config import Optimizer, Schedule


def factor(schedule: Schedule, step: int, total: int) -> float:
    """Learning-rate factor in [0, 1] of step 0..total-1.

    Warm-up rises linearly and reaches 1 on its last step; a decay falls linearly and its last step is one interval
    above `final`, so no step is wasted at a rate of zero.
    """
    warm = round(schedule.warmup * total)
    if step < warm:
        return (step + 1) / warm
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "cosine":
        progress = (step - warm) / max(total - warm, 1)
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = round(schedule.decay * total)
    if step < total - decay:
        return 1.0
    return 1.0 + (schedule.final - 1.0) * (step - (total - decay) + 1) / (decay + 1)


def rate_state(schedule: Schedule, steps: int, total: int) -> Literal["annealed", "stable", "warming", "annealing"]:
    """Where the learning rate stands after `steps` of `total`: on its way up, at its peak, on its way down, or at the
    end of its decay."""
    warm = round(schedule.warmup * total)
    if steps < warm:
        return "warming"
    decay = {"constant": 0, "cosine": total - warm, "wsd": round(schedule.decay * total)}[schedule.shape]
    if decay == 0 or schedule.final == 1 or steps <= total - decay:
        return "stable"
    return "annealed" if steps >= total else "annealing"


# Quintic coefficients of Jordan et al., "Muon" (2024): they push every singular value to about 1 in five rounds.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Replace the singular values of matrices [M, rows, columns] by about 1 (0.7 to 1.2), in fp32."""
    x = matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, on matrices (Jordan et al. 2024).

    The update is scaled by sqrt(max(1, rows / columns)). Matrices of one shape are stacked, since a small model pays
    for launches rather than arithmetic. Departure: Newton-Schulz runs in fp32, not bf16.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    gradient, state = parameter.grad, self.state[parameter]
                    assert gradient is not None
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(torch.lerp(gradient, state["momentum"], group["momentum"]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, orthogonalise(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-scale)


def build(model: nn.Module, config: Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of a model, in a fixed order: AdamW, then Muon where asked.

    Muon takes the matrices of the blocks. Embedding, head, norms and convolutions stay with AdamW; weight decay falls
    on matrices of the blocks alone.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = "blocks." in name and parameter.ndim == 2 and "canon" not in name
        (matrices if inside else others).append(parameter)
    decayed = [] if config.kind == "muon" else matrices
    groups = [{"params": others, "weight_decay": 0.0}]
    if decayed:
        groups.append({"params": decayed, "weight_decay": config.weight_decay})
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if config.kind == "muon":
        optimizers.append(
            Muon(matrices, lr=config.muon_lr, momentum=config.muon_momentum, weight_decay=config.weight_decay)
        )
    return optimizers


def set_rate(optimizers: Iterable[torch.optim.Optimizer], config: Optimizer, multiple: float) -> None:
    """Set every group's learning rate to its peak times `multiple`; the peak is read from config, never from a
    loaded state, so a resumed or branched stage cannot keep its parent's rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = (config.muon_lr if isinstance(optimizer, Muon) else config.lr) * multiple
