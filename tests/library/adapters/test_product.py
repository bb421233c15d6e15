"""Tests of the energy of a low-rank product and of its pull, against dense computations and a numerical minimiser."""

import pytest
import torch

from mooring.backends.product_stack import eigen
from mooring.curvature.product import (
    RETREATS,
    anchored_form,
    input_gram,
    product_form,
    product_grams,
    residual_at,
    retreat,
)
from mooring.curvature.sides import rows_times
from waiting import waiting_refused

OUT, INS, RANK, SCALE = 5, 7, 3, 1.7
FORMS = ["matrix", "blocks", "diagonal"]


def form_energy(form):
    """Return the energy of each product by its definition, in float64."""
    return (form.curvature * form.d.square()).sum((-2, -1), dtype=torch.float64) / 2 + form.residual


def factor(size, generator, form, rank=None):
    root = torch.randn(size, rank or size, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT
    if form != "blocks":
        return matrix.diagonal().clone() if form == "diagonal" else matrix
    half = -(-size // 2)
    whole = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
    whole[:size, :size] = matrix
    return torch.stack([whole[:half, :half], whole[half:, half:]])


def dense(factor, size):
    if factor.ndim == 1:
        return torch.diag(factor)
    return factor if factor.ndim == 2 else torch.block_diag(*factor)[:size, :size]


def case(seed, *, anchored, form="matrix", rank=None):
    g = torch.Generator().manual_seed(seed)
    a, a0 = (torch.randn(RANK, INS, generator=g, dtype=torch.float64) for _ in range(2))
    b, b0 = (torch.randn(OUT, RANK, generator=g, dtype=torch.float64) for _ in range(2))
    return a, b, (a0, b0) if anchored else None, factor(INS, g, form, rank), factor(OUT, g, form)


def basis_of(outputs):
    """Return the eigenvalues of G, and functions to its eigenbasis and back."""
    if outputs.ndim == 1:
        return outputs.clamp(min=0), lambda b: b, lambda d: d
    values, vectors = torch.linalg.eigh(outputs)
    return (
        values.flatten().clamp(min=0),
        lambda b: rows_times(b.mT, vectors).mT,
        lambda d: rows_times(d.mT, vectors.mT, OUT).mT,
    )


def form_of(a, b, anchors, inputs, outputs):
    values, to_basis, from_basis = basis_of(outputs)

    def times_inputs(rows):
        return rows_times(rows, inputs, INS)

    if anchors is None:
        eigen = torch.linalg.eigh(input_gram(a, times_inputs(a), SCALE))
        form = product_form(eigen, to_basis(b), values)
    else:
        grams = product_grams(a, anchors[0], times_inputs, SCALE)
        eigen = torch.linalg.eigh(grams.at(1.0)[0])
        form = anchored_form(grams, eigen, to_basis(b - anchors[1]), to_basis(anchors[1]), values)
    return form, lambda removed: from_basis(removed @ form.rows.mT)


def dense_energy(a, b, anchors, inputs, outputs):
    displaced = SCALE * b @ a - (SCALE * anchors[1] @ anchors[0] if anchors else 0)
    return torch.trace(dense(outputs, OUT) @ displaced @ dense(inputs, INS) @ displaced.mT) / 2


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [None, 2])
def test_energy_equals_dense_computation(anchored, form, rank):
    for seed in range(4):
        a, b, anchors, inputs, outputs = case(seed, anchored=anchored, form=form, rank=rank)
        energy, _ = form_of(a, b, anchors, inputs, outputs)
        expected = dense_energy(a, b, anchors, inputs, outputs)
        torch.testing.assert_close(form_energy(energy), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_pull_equals_numerical_minimiser(anchored, form):
    """The pull minimises |change of B in the eigenbases|^2 / 2 + mu * energy, as a proximal step does."""
    a, b, anchors, inputs, outputs = case(1, anchored=anchored, form=form)
    energy, change_of = form_of(a, b, anchors, inputs, outputs)
    mu, x = 0.3, b.clone().requires_grad_()
    minimiser = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, history_size=50)

    def closure():
        minimiser.zero_grad()
        value = (x - b).square().sum() / 2 + mu * dense_energy(a, x, anchors, inputs, outputs)
        value.backward()
        return value

    for _ in range(5):
        minimiser.step(closure)
    pulled = b - change_of(energy.d - energy.d / (1 + mu * energy.curvature))
    torch.testing.assert_close(pulled, x.detach(), rtol=1e-6, atol=1e-7)


def test_residual_is_the_least_energy_over_b():
    a, b, anchors, inputs, outputs = case(2, anchored=True)
    form, change_of = form_of(a, b, anchors, inputs, outputs)
    best = b - change_of(form.d)
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
    values, to_basis, _ = basis_of(outputs)
    grams = product_grams(a, anchors[0], lambda rows: rows @ inputs, SCALE)
    for t in RETREATS:
        form, _ = form_of(anchors[0].lerp(a, t), b, anchors, inputs, outputs)
        along = residual_at(grams, to_basis(anchors[1]), values, t, torch.linalg.eigh(grams.at(t)[0]))
        torch.testing.assert_close(along, form.residual, rtol=1e-8, atol=1e-9)


def test_retreat_stops_at_the_anchor_if_nothing_else_is_allowed():
    residuals = torch.tensor(RETREATS, dtype=torch.float64)
    assert retreat(residuals, torch.tensor(0.0, dtype=torch.float64)) == 0
    assert retreat(residuals, torch.tensor(5.0, dtype=torch.float64)) == 1


def test_rank_zero_spends_nothing():
    eigen = torch.linalg.eigh(torch.zeros(0, 0, dtype=torch.float64))
    form = product_form(eigen, torch.zeros(2, 0), torch.ones(2))
    assert form_energy(form) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 16, 17, 32, 33])
def test_eigenvectors_on_a_gpu_are_as_exact_as_on_a_cpu(rank):
    rows = torch.randn(4, rank, 2 * rank, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    matrices = rows @ rows.mT
    matrices[1], matrices[2] = 0, 1  # of rank 0 and 1
    graded = torch.logspace(-12, 0, rank, dtype=torch.float64)
    matrices[3] *= graded.outer(graded)
    values, vectors = (t.cpu() for t in eigen(matrices.cuda()))
    scale = matrices.abs().amax((1, 2), keepdim=True).clamp(min=1)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank).double().expand(4, -1, -1), rtol=0, atol=1e-13)
    rebuilt = vectors @ torch.diag_embed(values) @ vectors.mT
    torch.testing.assert_close(rebuilt / scale, matrices / scale, rtol=0, atol=1e-13)
    expected = torch.linalg.eigvalsh(matrices) / scale[..., 0]
    torch.testing.assert_close(values.sort(-1)[0] / scale[..., 0], expected, rtol=0, atol=1e-13)


@pytest.mark.gpu
def test_eigenvectors_on_a_gpu_make_nothing_wait():
    matrices = torch.eye(8, dtype=torch.float64, device="cuda").expand(3, 8, 8).contiguous()
    eigen(matrices)
    with waiting_refused():
        eigen(matrices)
