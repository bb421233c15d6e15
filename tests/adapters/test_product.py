"""Tests of the energy of a low-rank product and of its pull, against dense computations and a numerical minimiser."""

import pytest
import torch

from mooring.adapters.product import (
    RETREATS,
    form_energy,
    product_form,
    product_grams,
    remove_displacement,
    residual_at,
    retreat,
)
from mooring.importance.kronecker_factors import eigenbasis

OUT, INS, RANK, SCALE = 5, 7, 3, 1.7


def factor(size, generator, *, diagonal=False, rank=None):
    root = torch.randn(size, rank or size, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT
    return matrix.diagonal().clone() if diagonal else matrix


def dense(factor):
    return torch.diag(factor) if factor.ndim == 1 else factor


def case(seed, *, anchored, diagonal=False, rank=None):
    g = torch.Generator().manual_seed(seed)
    a, a0 = (torch.randn(RANK, INS, generator=g, dtype=torch.float64) for _ in range(2))
    b, b0 = (torch.randn(OUT, RANK, generator=g, dtype=torch.float64) for _ in range(2))
    inputs, outputs = factor(INS, g, diagonal=diagonal, rank=rank), factor(OUT, g, diagonal=diagonal)
    return a, b, (a0, b0) if anchored else None, inputs, outputs


def form_of(a, b, anchors, inputs, outputs):
    values, basis = (outputs, None) if outputs.ndim == 1 else eigenbasis(outputs)
    return product_form(a, b, anchors, SCALE, inputs, values, basis), basis


def dense_energy(a, b, anchors, inputs, outputs):
    displaced = SCALE * b @ a - (SCALE * anchors[1] @ anchors[0] if anchors else 0)
    return torch.trace(dense(outputs) @ displaced @ dense(inputs) @ displaced.mT) / 2


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("rank", [None, 2])
def test_energy_equals_dense_computation(anchored, diagonal, rank):
    for seed in range(4):
        a, b, anchors, inputs, outputs = case(seed, anchored=anchored, diagonal=diagonal, rank=rank)
        form, _ = form_of(a, b, anchors, inputs, outputs)
        expected = dense_energy(a, b, anchors, inputs, outputs)
        torch.testing.assert_close(form_energy(form), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
def test_pull_equals_numerical_minimiser(anchored, diagonal):
    """The pull minimises |change of B in the eigenbases|^2 / 2 + mu * energy, as a proximal step does."""
    a, b, anchors, inputs, outputs = case(1, anchored=anchored, diagonal=diagonal)
    form, basis = form_of(a, b, anchors, inputs, outputs)
    mu, x = 0.3, b.clone().requires_grad_()
    minimiser = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, history_size=50)

    def closure():
        minimiser.zero_grad()
        value = (x - b).square().sum() / 2 + mu * dense_energy(a, x, anchors, inputs, outputs)
        value.backward()
        return value

    for _ in range(5):
        minimiser.step(closure)
    pulled = b.clone()
    remove_displacement(pulled, form, form.d - form.d / (1 + mu * form.curvature), basis)
    torch.testing.assert_close(pulled, x.detach(), rtol=1e-6, atol=1e-7)


def test_residual_is_the_least_energy_over_b():
    a, b, anchors, inputs, outputs = case(2, anchored=True)
    form, basis = form_of(a, b, anchors, inputs, outputs)
    best = b.clone()
    remove_displacement(best, form, form.d, basis)
    torch.testing.assert_close(dense_energy(a, best, anchors, inputs, outputs), form.residual, rtol=1e-9, atol=1e-9)
    assert form.residual > 0
    for seed in range(3):
        noise = 0.01 * torch.randn(b.shape, generator=torch.Generator().manual_seed(seed), dtype=b.dtype)
        assert dense_energy(a, best + noise, anchors, inputs, outputs) > form.residual


def test_nothing_is_spent_at_the_anchor():
    _, _, anchors, inputs, outputs = case(3, anchored=True)
    form, _ = form_of(anchors[0].clone(), anchors[1].clone(), anchors, inputs, outputs)
    assert form.residual == 0
    assert form_energy(form) == 0


def test_residual_along_the_way_equals_that_of_the_interpolated_a():
    a, b, anchors, inputs, outputs = case(4, anchored=True)
    values, basis = eigenbasis(outputs)
    grams = product_grams(a, anchors[0], inputs, SCALE)
    for t in RETREATS:
        between = anchors[0].lerp(a, t)
        form = product_form(between, b, anchors, SCALE, inputs, values, basis)
        along = residual_at(grams, basis.mT @ anchors[1], values, t)
        torch.testing.assert_close(along, form.residual, rtol=1e-8, atol=1e-9)


def test_retreat_stops_at_the_anchor_if_nothing_else_is_allowed():
    residuals = [torch.tensor(t, dtype=torch.float64) for t in RETREATS]
    assert retreat(residuals, torch.tensor(0.0, dtype=torch.float64)) == 0
    assert retreat(residuals, torch.tensor(5.0, dtype=torch.float64)) == 1


def test_rank_zero_spends_nothing():
    inputs, outputs = torch.eye(4), torch.ones(2)
    form = product_form(torch.zeros(0, 4), torch.zeros(2, 0), None, 1.0, inputs, outputs, None)
    assert form_energy(form) == 0
