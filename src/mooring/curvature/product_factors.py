"""The Kronecker factors of a base layer's curvature, kept for a low-rank product that is added to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import ref

import torch
from torch import Tensor, nn

from mooring.curvature.kronecker_factors import KroneckerFactors, layer_rows
from mooring.curvature.low_rank import LowRank, Product
from mooring.curvature.observed_factors import ObservedFactors
from mooring.curvature.product import input_gram
from mooring.curvature.sides import rows_times, second_moment, side_diagonal, side_shape
from mooring.distributed.dtensor import gathered, local_part, reduce_over_shards


def factor_shapes(low_rank: LowRank, largest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of C and G, as `side_shape` says; C of token indices is diagonal.

    Example:
        >>> factor_shapes(LowRank(torch.zeros(2, 9), torch.zeros(3, 2), 1.0, nn.Identity()), largest=8)
        ((2, 5, 5), (3, 3))
    """
    ins, outs = low_rank.inputs, low_rank.outputs
    tokens = isinstance(low_rank.layer, nn.Embedding)
    return (ins,) if tokens else side_shape(ins, largest), side_shape(outs, largest)


@dataclass(kw_only=True)
class ProductFactors(KroneckerFactors):
    """C and G of the layer that a low-rank product is added to, in the forms of `sides`; the state of B has them.

    `basis` contains C as it is stored, the eigenvectors of G (empty if G is diagonal) and the curvature of each, tasks
    times its damped eigenvalue. The factors of this task take no memory before the first iteration that is observed.

    Attributes:
        low_rank: the product.
        layer_name: the name of the module that adds it; factors of past tasks belong to that.
        options: how the product is held.
    """

    low_rank: LowRank = field(repr=False)
    layer_name: str
    options: Product
    _anchor: tuple["ref[Tensor]", int, bool] | None = field(default=None, init=False, repr=False)

    @classmethod
    def create(cls, low_rank: LowRank, layer_name: str, options: Product, dtype: torch.dtype) -> "ProductFactors":
        """Return factors of which nothing is known yet, in a dtype to compute in."""
        shapes, device = factor_shapes(low_rank, options.largest), low_rank.b.device
        inputs, outputs = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape in shapes)
        factors = cls(inputs, outputs, inputs, outputs, low_rank=low_rank, layer_name=layer_name, options=options)
        factors.store(inputs, outputs)
        return factors

    def store(self, inputs: Tensor, outputs: Tensor) -> None:
        """Keep factors of past tasks, as the options say."""
        self.past_inputs, self.past_outputs = self._stored(inputs), self._stored(outputs)

    def _stored(self, factor: Tensor) -> Tensor:
        dtype = self.options.dtype or factor.dtype
        if factor.stride(-1) == 0:  # zeros, which take no memory
            return factor.new_zeros((), dtype=dtype).expand(factor.shape)
        return factor.to(dtype)

    def past_factor(self, side: Literal["inputs", "outputs"]) -> Tensor:
        """Return C or G of past tasks in the dtype to compute in."""
        return super().past_factor(side).to(self.inputs.dtype)

    def inherit(self, other: "ProductFactors") -> None:
        """Take over what is known of past tasks of the same layer, if the factors have the same shapes."""
        if other.past_inputs.shape == self.past_inputs.shape and other.past_outputs.shape == self.past_outputs.shape:
            self.store(other.past_factor("inputs").clone(), other.past_factor("outputs").clone())
            self.tasks = other.tasks
            self.update_eigenbasis()

    def matrices(self) -> list[Tensor]:
        """Return G over past tasks, whose eigenvectors are the basis; nothing if it is a diagonal."""
        outputs = self.past_factor("outputs")
        return [outputs] if outputs.ndim > 1 else []

    def set_basis(self, solved: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compute the damped eigenvalues of G over past tasks, and keep its eigenvectors."""
        values, vectors = solved[0] if solved else (self.past_factor("outputs"), self.inputs.new_empty(0))
        values = values.flatten().clamp(min=0)
        mean = values.sum() / max(1, self.low_rank.outputs)
        curvature = (values + self.options.damping * mean) * self.past_inputs.any()
        self.basis = self.past_inputs, vectors.to(self.past_outputs.dtype), curvature.mul_(self.tasks)

    def is_anchored(self, anchor: Tensor) -> bool:
        """Return whether the anchor of B is not 0 on any rank; the device is asked once for each anchor.

        The anchor is not known by its id: a new anchor may get that of a freed one, on some ranks and not on others,
        which would wait in the reduction.
        """
        known = self._anchor
        if known is None or known[0]() is not anchor or known[1] != anchor._version:
            flag = anchor.any().to(self.low_rank.b.device, torch.float32)
            known = ref(anchor), anchor._version, bool(reduce_over_shards([flag], [self.low_rank.b], "max")[0])
            self._anchor = known
        return known[2]

    def outputs_in_basis(self) -> Tensor:
        """Return the damped curvature of this task along the eigenvectors of G over past tasks."""
        assert self.basis is not None
        outputs, vectors = self.outputs / max(1, self.count), self.basis[1].to(self.outputs)
        values = outputs if outputs.ndim == 1 else (vectors * (outputs @ vectors)).sum(-2).flatten().clamp(min=0)
        return values + self.options.damping * values.sum() / max(1, self.low_rank.outputs)

    def past_diagonal_of_a(self) -> Tensor:
        """Return the curvature of each weight of A on this rank over past tasks, for the present B; 0 while B is 0."""
        b = gathered(self.low_rank.b.detach()).flatten(1).to(self.inputs).mT
        rows = (rows_times(b, self.past_factor("outputs"), b.shape[-1]) * b).sum(1)
        columns = side_diagonal(self.past_factor("inputs"), self.low_rank.inputs)
        whole = self.tasks * self.low_rank.scale**2 * rows.unsqueeze(-1) * columns
        return local_part(whole.reshape(self.low_rank.a.shape), self.low_rank.a)

    def _diagonal(self, inputs: Tensor, outputs: Tensor, scale: float, like: Tensor) -> Tensor:
        """Return the curvature of each weight of B, for the present A."""
        a = gathered(self.low_rank.a.detach()).flatten(1).to(inputs)
        columns = input_gram(a, rows_times(a, inputs, a.shape[-1]), self.low_rank.scale).diagonal().to(inputs)
        rows = side_diagonal(outputs, self.low_rank.outputs)
        return local_part((scale * rows.unsqueeze(-1) * columns).reshape(self.low_rank.b.shape), self.low_rank.b)


def observe_products(
    products: dict[str, LowRank], largest: int, a: Tensor, b: Tensor, firsts: Mapping[Tensor, Tensor]
) -> dict[str, ObservedFactors]:
    """Return the factors of one call of a module that adds low-rank products.

    Args:
        products: the module's products, by any name.
        largest: as for `factor_shapes`.
        a: the module's input.
        b: the gradient of the mean loss with respect to its output.
        firsts: the whole A of a product, where its own is sharded.
    """
    observed: dict[str, ObservedFactors] = {}
    known: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}  # several products of a layer have the same factors
    for name, low_rank in products.items():
        x, g = _rows(low_rank, a, b)
        (n, places), gradients, shapes = g.shape[:2], g.flatten(0, 1), factor_shapes(low_rank, largest)
        wide = torch.promote_types(g.dtype, torch.float32)
        first = firsts.get(low_rank.a, low_rank.a).detach().flatten(1).to(wide)
        key = type(low_rank.layer), *shapes
        tokens = isinstance(low_rank.layer, nn.Embedding)
        rows = x.flatten() if tokens else x.flatten(0, 1)
        projected = first.mT[rows] if tokens else rows.to(wide) @ first.mT
        if key not in known:
            counts = (
                torch.bincount(rows, minlength=low_rank.inputs).to(wide) if tokens else second_moment(rows, shapes[0])
            )
            known[key] = counts / n, second_moment(gradients, shapes[1]) * (n / places)
        gradients = gradients.to(wide)
        noise = gradients.square().sum() * projected.square().sum() / len(projected)
        gradient = low_rank.scale * gradients.mT @ projected
        observed[name] = ObservedFactors(n, *known[key], gradient, noise * low_rank.scale**2)
    return observed


def _rows(low_rank: LowRank, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's inputs, or indices, and the gradients of its outputs, as (samples, places, ...)."""
    indices, convolution = (isinstance(low_rank.layer, kind) for kind in (nn.Embedding, nn.Conv2d))
    if a.ndim == (3 if convolution else 0 if indices else 1):  # a sample without a batch
        a, b = a.unsqueeze(0), b.unsqueeze(0)
    if convolution:
        return layer_rows(low_rank.layer, a, b)
    x = a.reshape(len(a), -1) if indices else a.reshape(len(a), -1, a.shape[-1])
    return x, b.reshape(len(a), -1, b.shape[-1])
