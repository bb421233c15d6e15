"""The energy of a low-rank product as a quadratic form in one of its factors, and the pull that lowers it.

A low-rank layer computes base(x) + s B A x. Held is the product s B A: displaced from s B0 A0 by D it costs
tr(G D C D') / 2, where C is the mean of x x' over the layer's inputs and G that of g g' over the gradients of its
outputs. With A = A0 + dA and B = B0 + dB, D = s (dB A + B0 dA). For a fixed A that is quadratic in dB, with the
curvature G (x) M, M = s^2 A C A', and its minimum at dB = -B0 K M^-1, K = s^2 dA C A'. What remains there, because A
has turned away from B0 A0, is the residual tr(G B0 (s^2 dA C dA' - K M^-1 K') B0') / 2. It is 0 while B0 is 0.

Every tensor may have leading axes, such as one of several layers of the same shape.
"""

from collections.abc import Callable
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

    def at(self, t: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Return M, K and s^2 dA C dA' where A = A0 + t * dA."""
        both = t * (self.mixed + self.mixed.mT)
        return self.anchor + both + t**2 * self.moved, t * self.mixed + t**2 * self.moved, t**2 * self.moved


@dataclass(frozen=True)
class ProductForm:
    """The energy of a product for its present A: sum(curvature * d^2) / 2 + residual.

    Attributes:
        d: the displacement of B from the minimum, in the eigenbases of G and M, (out, rank).
        curvature: that of each entry of d.
        residual: the energy at the minimum, in float64.
        rows: the eigenvectors of M, (rank, rank).
    """

    d: Tensor
    curvature: Tensor
    residual: Tensor
    rows: Tensor


def input_gram(a: Tensor, weighted: Tensor, scale: Tensor | float) -> Tensor:
    """Return M = s^2 A C A' in float64.

    Args:
        a: A, (rank, in).
        weighted: A C, (rank, in).
        scale: s.

    Example:
        >>> input_gram(torch.ones(1, 2), torch.ones(1, 2), scale=3.0)
        tensor([[18.]], dtype=torch.float64)
    """
    gram = (weighted @ a.mT).double() * scale**2
    return (gram + gram.mT) / 2


def product_grams(
    a: Tensor, anchor: Tensor, times_inputs: Callable[[Tensor], Tensor], scale: Tensor | float
) -> ProductGrams:
    """Return the inner products of the rows of A0 and A - A0.

    Args:
        a: A, (rank, in).
        anchor: A0.
        times_inputs: X -> X C.
        scale: s.
    """
    moved = a - anchor
    weighted = times_inputs(moved)
    return ProductGrams(
        input_gram(anchor, times_inputs(anchor), scale),
        (weighted @ anchor.mT).double() * scale**2,
        (weighted @ moved.mT).double() * scale**2,
    )


Eigen = tuple[Tensor, Tensor]
"""The eigenvalues, in any order, and eigenvectors of M."""


def product_form(eigen: Eigen, displaced: Tensor, outputs: Tensor) -> ProductForm:
    """Return the energy of a product that was 0 at its anchor, as a quadratic form in B.

    Args:
        eigen: of M, float64.
        displaced: B in the eigenbasis of G, (out, rank).
        outputs: the eigenvalues of G, at least 0, (out,).

    Example:
        >>> eigen = torch.linalg.eigh(torch.tensor([[2.0]]).double())
        >>> form = product_form(eigen, torch.tensor([[3.0]]), torch.ones(1))
        >>> (form.curvature * form.d.square()).sum() / 2  # |B A|^2 / 2 where C, G and s are 1 and A is (1, 1)
        tensor(9.)
    """
    values, rows = eigen[0], eigen[1].to(displaced)
    residual = torch.zeros(values.shape[:-1], dtype=torch.float64, device=values.device)
    return ProductForm(displaced @ rows, _curvature(outputs, values), residual, rows)


def anchored_form(grams: ProductGrams, eigen: Eigen, displaced: Tensor, start: Tensor, outputs: Tensor) -> ProductForm:
    """Return the energy of a product that was not 0 at its anchor, as a quadratic form in B.

    Args:
        grams: of A0 and A.
        eigen: of `grams.at(1.0)[0]`, which is M.
        displaced: B - B0 in the eigenbasis of G, (out, rank).
        start: B0 there.
        outputs: the eigenvalues of G, at least 0, (out,).
    """
    values, rows = eigen
    back = grams.at(1.0)[1] @ rows * _inverse(values, displaced.dtype).unsqueeze(-2)
    narrow = rows.to(displaced)
    d = displaced @ narrow + start @ back.to(displaced)
    residual = residual_at(grams, start, outputs, 1.0, eigen)
    return ProductForm(d, _curvature(outputs, values).to(d), residual, narrow)


def residual_at(grams: ProductGrams, start: Tensor, outputs: Tensor, t: Tensor | float, eigen: Eigen) -> Tensor:
    """Return the energy at the best B where A = A0 + t * (A - A0), in float64.

    Args:
        grams: of A0 and A.
        start: B0 in the eigenbasis of G, (out, rank).
        outputs: the eigenvalues of G, (out,).
        t: from 0, at the anchor, where the residual is 0, to 1; or several, with two axes behind.
        eigen: of M there.
    """
    _, k, moved = grams.at(t)
    values, rows = eigen
    k = k @ rows
    remaining = moved - k * _inverse(values, start.dtype).unsqueeze(-2) @ k.mT
    weighted = (start * outputs.unsqueeze(-1)).mT @ start  # B0' G B0
    energy: Tensor = (weighted.double() * remaining).sum((-2, -1)) / 2
    return energy.clamp(min=0)


def retreat(residuals: Tensor, allowed: Tensor) -> Tensor:
    """Return the largest fraction of `RETREATS` at which the residual is allowed, without waiting for the device.

    Args:
        residuals: the residual of all products together at each of `RETREATS`.
        allowed: the largest that is allowed.

    Example:
        >>> retreat(torch.tensor(RETREATS) ** 2, torch.tensor(0.3))
        tensor(0.5000)
    """
    fractions = torch.tensor(RETREATS, device=allowed.device)
    return torch.where(residuals <= allowed, fractions, 0.0).amax()


def _curvature(outputs: Tensor, values: Tensor) -> Tensor:
    return outputs.unsqueeze(-1) * values.clamp(min=0).to(outputs).unsqueeze(-2)


def _inverse(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inverse eigenvalues of M; 0 for those that are rounding in the dtype it was computed in."""
    if not values.shape[-1]:
        return values
    limit = values.shape[-1] * torch.finfo(dtype).eps * values.amax(-1, keepdim=True).clamp(min=0)
    return torch.where(values > limit, 1 / values, 0.0)
