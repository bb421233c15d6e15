"""The energy of a low-rank product as a quadratic form in one of its factors, and the pull that lowers it.

A low-rank layer computes base(x) + s B A x. Held is the product s B A: displaced from s B0 A0 by D it costs
tr(G D C D') / 2, where C is the mean of x x' over the layer's inputs and G that of g g' over the gradients of its
outputs. With A = A0 + dA and B = B0 + dB, D = s (dB A + B0 dA). For a fixed A that is quadratic in dB, with the
curvature G (x) M, M = s^2 A C A', and its minimum at dB = -B0 K M^-1, K = s^2 dA C A'. What remains there, because A
has turned away from B0 A0, is the residual tr(G B0 (s^2 dA C dA' - K M^-1 K') B0') / 2. It is 0 while B0 is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RETREATS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01, 0.0)
"""The fractions of a displacement that are tried where the residual alone exceeds a budget."""


@dataclass(frozen=True)
class ProductGrams:
    """The inner products s^2 X C Y' of the rows of A0 and of dA = A - A0, (rank, rank) each, in float64.

    Attributes:
        anchor: X = Y = A0.
        mixed: X = dA, Y = A0.
        moved: X = Y = dA.
    """

    anchor: Tensor
    mixed: Tensor
    moved: Tensor

    def at(self, t: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return M, K and s^2 dA C dA' where A = A0 + t * dA."""
        both = t * (self.mixed + self.mixed.mT)
        return self.anchor + both + t**2 * self.moved, t * self.mixed + t**2 * self.moved, t**2 * self.moved


@dataclass(frozen=True)
class ProductForm:
    """The energy of a product for its present A: sum(curvature * d^2) / 2 + residual.

    Attributes:
        d: the displacement of B from the minimum, in the eigenbases of G and M, (out, rank).
        curvature: that of each entry of d.
        residual: the energy at the minimum, 0-d in float64.
        rows: the eigenvectors of M, (rank, rank).
    """

    d: Tensor
    curvature: Tensor
    residual: Tensor
    rows: Tensor


def apply_inputs(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return rows @ C, where C is a matrix or the vector of its diagonal.

    Example:
        >>> rows = torch.ones(1, 2)
        >>> apply_inputs(rows, torch.tensor([2.0, 3.0])), apply_inputs(rows, torch.eye(2))
        (tensor([[2., 3.]]), tensor([[1., 1.]]))
    """
    return rows * inputs if inputs.ndim == 1 else rows @ inputs


def input_gram(a: Tensor, inputs: Tensor, scale: float) -> Tensor:
    """Return M = s^2 A C A' in float64.

    Args:
        a: A, (rank, in).
        inputs: C, (in, in), or its diagonal, (in,).
        scale: s.

    Example:
        >>> input_gram(torch.ones(1, 2), torch.eye(2), scale=3.0)
        tensor([[18.]], dtype=torch.float64)
    """
    gram = (apply_inputs(a, inputs) @ a.mT).double() * scale**2
    return (gram + gram.mT) / 2


def product_grams(a: Tensor, anchor: Tensor, inputs: Tensor, scale: float) -> ProductGrams:
    """Return the inner products of the rows of A0 and A - A0; the arguments are those of `product_form`."""
    moved = a - anchor
    weighted = apply_inputs(moved, inputs)
    return ProductGrams(
        input_gram(anchor, inputs, scale),
        (weighted @ anchor.mT).double() * scale**2,
        (weighted @ moved.mT).double() * scale**2,
    )


def product_form(
    a: Tensor,
    b: Tensor,
    anchors: tuple[Tensor, Tensor] | None,
    scale: float,
    inputs: Tensor,
    outputs: Tensor,
    basis: Tensor | None,
) -> ProductForm:
    """Return the energy of a product as a quadratic form in B.

    Args:
        a: A, (rank, in).
        b: B, (out, rank).
        anchors: A0 and B0; None if B0 is 0, where A0 has no effect.
        scale: s.
        inputs: C, (in, in), or its diagonal, (in,).
        outputs: the eigenvalues of G, at least 0, (out,).
        basis: its eigenvectors, (out, out); None if G is diagonal.

    Example:
        >>> a, b, eye = torch.ones(1, 2), torch.tensor([[3.0]]), torch.eye(2)
        >>> form = product_form(a, b, None, 1.0, eye, torch.ones(1), None)
        >>> form_energy(form)  # |B A|^2 / 2
        tensor(9., dtype=torch.float64)
    """
    if anchors is None:
        values, rows = torch.linalg.eigh(input_gram(a, inputs, scale))
        d = _rotated(b, basis) @ rows.to(b)
        residual = torch.zeros((), dtype=torch.float64, device=b.device)
    else:
        grams = product_grams(a, anchors[0], inputs, scale)
        m, k, _ = grams.at(1.0)
        values, rows = torch.linalg.eigh(m)
        start = _rotated(anchors[1], basis)
        back = k @ rows * _inverse(values, b.dtype)
        d = _rotated(b - anchors[1], basis) @ rows.to(b) + start @ back.to(b)
        residual = residual_at(grams, start, outputs, 1.0)
    return ProductForm(d, outputs.unsqueeze(-1) * values.clamp(min=0).to(b), residual, rows.to(b))


def residual_at(grams: ProductGrams, start: Tensor, outputs: Tensor, t: float) -> Tensor:
    """Return the energy at the best B where A = A0 + t * (A - A0); 0-d, float64.

    Args:
        grams: of A0 and A.
        start: B0 in the eigenbasis of G, (out, rank).
        outputs: the eigenvalues of G, (out,).
        t: from 0, at the anchor, where the residual is 0, to 1.
    """
    m, k, moved = grams.at(t)
    values, rows = torch.linalg.eigh(m)
    k = k @ rows
    remaining = moved - k * _inverse(values, start.dtype) @ k.mT
    weighted = (start * outputs.unsqueeze(-1)).mT @ start  # B0' G B0
    energy: Tensor = (weighted.double() * remaining).sum() / 2
    return energy.clamp(min=0)


def form_energy(form: ProductForm) -> Tensor:
    """Return the energy itself, 0-d in float64."""
    return (form.curvature * form.d.square()).sum(dtype=torch.float64) / 2 + form.residual


def remove_displacement(b: Tensor, form: ProductForm, removed: Tensor, basis: Tensor | None) -> None:
    """Subtract from B a displacement that is given in the eigenbases.

    Args:
        b: B, (out, rank), changed in place.
        form: the energy of the product.
        removed: what to remove of `form.d`.
        basis: the eigenvectors of G; None if G is diagonal.
    """
    removed = removed @ form.rows.mT
    b.sub_((removed if basis is None else basis @ removed).to(b.dtype))


def retreat(residuals: Sequence[Tensor], allowed: Tensor) -> Tensor:
    """Return the largest fraction of `RETREATS` at which the residual is allowed, without waiting for the device.

    Args:
        residuals: the residual of all products together at each of `RETREATS`.
        allowed: the largest that is allowed.

    Example:
        >>> retreat([torch.tensor(r**2) for r in RETREATS], torch.tensor(0.3))
        tensor(0.5000)
    """
    fractions = torch.tensor(RETREATS, device=allowed.device)
    fits = torch.stack([residual.to(allowed) for residual in residuals]) <= allowed
    return torch.where(fits, fractions, 0.0).amax()


def _rotated(b: Tensor, basis: Tensor | None) -> Tensor:
    return b if basis is None else basis.mT @ b


def _inverse(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inverse eigenvalues of M; 0 for those that are rounding in the dtype it was computed in."""
    limit = len(values) * torch.finfo(dtype).eps * values.amax().clamp(min=0) if len(values) else 0.0
    return torch.where(values > limit, 1 / values, 0.0)
