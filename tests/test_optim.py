"""Schedules, Muon against its definition, and what each optimizer owns."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from models.config import ModelConfig
from models.transformer import Transformer
from testbed import optim
from testbed.config import Optimizer, Schedule


def factors(schedule: Schedule, total: int) -> list[float]:
    return [optim.factor(schedule, step, total) for step in range(total)]


def test_warmup_is_linear_and_reaches_one() -> None:
    found = factors(Schedule(shape="constant", warmup=0.4, decay=0.0), 10)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1, 1, 1, 1, 1, 1])


def test_wsd_is_stable_then_falls_to_one_interval_above_final() -> None:
    found = factors(Schedule(shape="wsd", warmup=0.2, decay=0.4, final=0.5), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6])
    assert factors(Schedule(shape="wsd", decay=0.0), 4) == [1.0] * 4


def test_cosine_falls_from_one_towards_final() -> None:
    found = factors(Schedule(shape="cosine", decay=0.0, final=0.1), 8)
    assert found[0] == 1.0 and found[4] == pytest.approx(0.55)
    assert all(a > b for a, b in pairwise(found)) and 0.1 < found[-1] < 0.15


@pytest.mark.parametrize("shape", [(8, 8), (16, 6), (6, 16)])
def test_orthogonalise_keeps_directions_and_levels_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    out = optim.orthogonalise(matrices)
    # Five rounds leave singular values that were not tiny near 1.
    assert float(torch.linalg.svdvals(out.double()).max()) < 1.3
    exact_u, exact_s, exact_v = torch.linalg.svd(matrices.double(), full_matrices=False)
    inside = exact_u.mT @ out.double() @ exact_v.mT  # diagonal in the matrix's own singular basis
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert float(off.abs().max()) < 1e-3
    large = exact_s > 0.1 * exact_s[:, :1]
    assert (inside.diagonal(dim1=1, dim2=2)[large] > 0.6).all()


def test_muon_equals_its_definition_over_three_steps() -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 6), (4, 6), (8, 2)]]
    expected = [p.detach().clone() for p in parameters]
    buffers = [torch.zeros_like(p) for p in expected]
    muon = optim.Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        for i, p in enumerate(parameters):
            p.grad = torch.randn(p.shape, generator=generator)
            buffers[i] = 0.9 * buffers[i] + 0.1 * p.grad
            nesterov = 0.9 * buffers[i] + 0.1 * p.grad
            scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            expected[i] = expected[i] * (1 - 0.1 * 0.01) - 0.1 * scale * optim.orthogonalise(nesterov[None])[0]
        muon.step()
    for p, e in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_owner_and_only_matrices_decay(kind: str, tied: bool) -> None:
    model = Transformer(ModelConfig(layers=2, width=16, heads=2, tied=tied), 11)
    optimizers = optim.build(model, Optimizer(kind=kind, weight_decay=0.1))  # type: ignore[arg-type]
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))
    decayed = {id(p) for o in optimizers for g in o.param_groups if g["weight_decay"] for p in g["params"]}
    matrices = {id(m.weight) for b in model.blocks for m in b.modules() if isinstance(m, torch.nn.Linear)}
    assert decayed == matrices
    if kind == "muon":
        assert {id(p) for p in optimizers[1].param_groups[0]["params"]} == matrices


def test_rates_come_from_the_stage_and_not_from_a_loaded_state() -> None:
    model = Transformer(ModelConfig(layers=1, width=16, heads=2), 11)
    config = Optimizer(kind="muon", lr=0.5, muon_lr=0.25)
    optimizers = optim.build(model, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 99.0
    optim.set_rate(optimizers, config, 0.5)
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.25, 0.125]
