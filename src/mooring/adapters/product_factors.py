"""The Kronecker factors of a base layer's curvature, kept for a low-rank product that is added to it."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mooring.adapters.low_rank import LowRank
from mooring.adapters.product import ProductForm, apply_inputs, input_gram, product_form
from mooring.errors import MooringError, check_number, check_whole
from mooring.importance.kronecker_factors import KroneckerFactors, eigenbasis, layer_rows
from mooring.importance.observed_factors import ObservedFactors


@dataclass(frozen=True)
class Product:
    """How low-rank adapters are held through their product, for `mooring.attach(adapters=...)`.

    Args:
        largest: the factor of a side with more inputs, or outputs, is its diagonal.
        dtype: the dtype in which the factors of past tasks are kept; float32 or wider by default.
        damping: what is added to each eigenvalue of G, as a part of their mean. Outputs to which the loss is not
            sensitive, as long as all other layers stay as they are, would otherwise be free, although these change too.

    Example:
        >>> Product(dtype=torch.bfloat16)
        Product(largest=2048, dtype=torch.bfloat16, damping=0.05)
    """

    largest: int = 2048
    dtype: torch.dtype | None = None
    damping: float = 0.05

    def __post_init__(self) -> None:
        check_whole("largest", self.largest, 1)
        check_number("damping", self.damping, 0)
        if self.dtype is not None and not (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            raise MooringError(f"dtype={self.dtype} is not allowed: give a floating-point dtype of 16 bits or more")


def factor_shapes(low_rank: LowRank, largest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of C and G: matrices up to a size, their diagonals beyond it; of token indices the diagonal.

    Example:
        >>> factor_shapes(LowRank(torch.zeros(2, 9), torch.zeros(3, 2), 1.0, nn.Identity()), largest=8)
        ((9,), (3, 3))
    """
    ins, outs = low_rank.inputs, low_rank.outputs
    diagonal = ins > largest or isinstance(low_rank.layer, nn.Embedding)
    return (ins,) if diagonal else (ins, ins), (outs,) if outs > largest else (outs, outs)


@dataclass
class ProductFactors(KroneckerFactors):
    """C and G of the layer that a low-rank product is added to; the state of B has them.

    Vectors instead of matrices are diagonals. `basis` contains C, the eigenvectors of G (empty if G is diagonal) and
    the curvature of each, tasks times its eigenvalue.

    Attributes:
        low_rank: the product.
        layer_name: the name of the module that adds it; factors of past tasks belong to that.
        damping: as in `Product`.
    """

    low_rank: LowRank | None = field(default=None, repr=False)
    layer_name: str = ""
    damping: float = 0.0
    _anchor: tuple[int, int, bool] | None = field(default=None, init=False, repr=False)

    @classmethod
    def create(cls, low_rank: LowRank, layer_name: str, options: Product, dtype: torch.dtype) -> "ProductFactors":
        """Return zero factors, those of past tasks in the dtype of the options."""
        shapes, device = factor_shapes(low_rank, options.largest), low_rank.b.device
        current = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        previous = [torch.zeros(shape, dtype=options.dtype or dtype, device=device) for shape in shapes]
        factors = cls(current[0], current[1], previous[0], previous[1])
        factors.low_rank, factors.layer_name, factors.damping = low_rank, layer_name, options.damping
        return factors

    def inherit(self, other: "ProductFactors") -> None:
        """Take over what is known of past tasks of the same layer; anything but the shapes of another is refused."""
        if other.past_inputs.shape == self.past_inputs.shape and other.past_outputs.shape == self.past_outputs.shape:
            self.past_inputs, self.past_outputs = other.past_inputs.clone(), other.past_outputs.clone()
            self.tasks = other.tasks
            self.update_eigenbasis()

    def consolidated(self, scale: float = 1.0) -> "ProductFactors":
        """Return the factors after the end of a task, as `KroneckerFactors.consolidated` does."""
        dtype = self.past_inputs.dtype
        if dtype == self.inputs.dtype:
            new = super().consolidated(scale)
            assert isinstance(new, ProductFactors)
            return new
        wide = replace(
            self, past_inputs=self.past_inputs.to(self.inputs), past_outputs=self.past_outputs.to(self.inputs)
        )
        new = KroneckerFactors.consolidated(wide, scale)
        assert isinstance(new, ProductFactors)
        new.past_inputs, new.past_outputs = new.past_inputs.to(dtype), new.past_outputs.to(dtype)
        new.update_eigenbasis()
        return new

    def of_this_task(self) -> "ProductFactors":
        """Return factors in which this task alone is the past."""
        means = self.inputs / self.count, self.outputs / self.count
        new = replace(self, past_inputs=means[0], past_outputs=means[1], tasks=1)
        new.update_eigenbasis()
        return new

    def update_eigenbasis(self) -> None:
        """Compute the eigenvectors and the damped eigenvalues of G over past tasks."""
        if not self.tasks:
            return
        values, vectors = self.past_outputs.to(self.inputs), self.past_outputs.new_empty(0)
        if values.ndim == 2:
            values, vectors = eigenbasis(values)
        values = values.clamp(min=0)
        curvature = self.tasks * (values + self.damping * values.mean()) * self.past_inputs.any()
        self.basis = self.past_inputs, vectors.to(self.past_outputs), curvature

    def is_anchored(self, anchor: Tensor) -> bool:
        """Return whether the anchor of B is not 0; the device is asked once for each anchor."""
        key = id(anchor), anchor._version
        if self._anchor is None or self._anchor[:2] != key:
            self._anchor = (*key, bool(anchor.any()))
        return self._anchor[2]

    @property
    def vectors(self) -> Tensor | None:
        """The eigenvectors of G; None if G is diagonal."""
        assert self.basis is not None
        return self.basis[1].to(self.inputs) if self.basis[1].ndim == 2 else None

    def form(self, a: Tensor, b: Tensor, anchors: tuple[Tensor, Tensor] | None) -> ProductForm:
        """Return the energy of the product over past tasks as a quadratic form in B, by `product_form`."""
        assert self.basis is not None
        assert self.low_rank is not None
        inputs = self.basis[0].to(self.inputs)
        return product_form(a, b, anchors, self.low_rank.scale, inputs, self.basis[2], self.vectors)

    def diagonal(self, like: Tensor) -> Tensor:
        """Return the curvature of each weight of B on this task, for the present A."""
        return self._b_diagonal(self.inputs, self.outputs, 1 / max(1, self.count) ** 2, like)

    def past_diagonal(self, like: Tensor) -> Tensor:
        """Return the curvature of each weight of B over past tasks, for the present A."""
        return self._b_diagonal(self.past_inputs.to(self.inputs), self.past_outputs.to(self.inputs), self.tasks, like)

    def past_diagonal_of_a(self, like: Tensor) -> Tensor:
        """Return the curvature of each weight of A over past tasks, for the present B; 0 while B is 0."""
        assert self.low_rank is not None
        b, inputs = self.low_rank.b.detach().flatten(1).to(self.inputs), self.past_inputs.to(self.inputs)
        rows = (apply_inputs(b.mT, self.past_outputs.to(self.inputs)) * b.mT).sum(1)
        columns = inputs if inputs.ndim == 1 else inputs.diagonal()
        return (self.tasks * self.low_rank.scale**2 * rows.unsqueeze(-1) * columns).reshape(like.shape)

    def _b_diagonal(self, inputs: Tensor, outputs: Tensor, scale: float, like: Tensor) -> Tensor:
        assert self.low_rank is not None
        a = self.low_rank.a.detach().flatten(1).to(inputs)
        columns = input_gram(a, inputs, self.low_rank.scale).diagonal().to(inputs)
        rows = outputs if outputs.ndim == 1 else outputs.diagonal()
        return (scale * rows.unsqueeze(-1) * columns).reshape(like.shape)

    @property
    def nbytes(self) -> int:
        """The memory of everything that is kept."""
        vectors = self.basis[1].nbytes if self.basis else 0
        return sum(t.nbytes for t in self.slots().values()) + vectors


def observe_products(products: dict[str, LowRank], largest: int, a: Tensor, b: Tensor) -> dict[str, ObservedFactors]:
    """Return the factors of one call of a module that adds low-rank products.

    Args:
        products: the module's products, by any name.
        largest: as for `factor_shapes`.
        a: the module's input.
        b: the gradient of the mean loss with respect to its output.
    """
    observed: dict[str, ObservedFactors] = {}
    for name, low_rank in products.items():
        indices = isinstance(low_rank.layer, nn.Embedding)
        layer, dims = low_rank.layer, 3 if isinstance(low_rank.layer, nn.Conv2d) else 0 if indices else 1
        x, g = (a.unsqueeze(0), b.unsqueeze(0)) if a.ndim == dims else (a, b)
        if indices:
            g = g.to(torch.promote_types(g.dtype, torch.float32)).reshape(len(x), -1, g.shape[-1])
            projected = low_rank.a.detach().flatten(1).to(g).mT[x.reshape(-1)]
            inputs = torch.bincount(x.reshape(-1), minlength=low_rank.inputs).to(g) / len(x)
        else:
            x, g = layer_rows(layer, x, g)
            rows = x.flatten(0, 1)
            projected = rows @ low_rank.a.detach().flatten(1).to(x).mT
            inputs = _second_moment(rows, factor_shapes(low_rank, largest)[0]) / len(x)
        n, places, gradients = len(g), g.shape[1], g.flatten(0, 1)
        outputs = _second_moment(gradients, factor_shapes(low_rank, largest)[1]) * (n / places)
        noise = gradients.square().sum() * projected.square().sum() / len(projected)
        gradient = low_rank.scale * gradients.mT @ projected
        observed[name] = ObservedFactors(n, inputs, outputs, gradient, noise * low_rank.scale**2)
    return observed


def _second_moment(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sum of x x' over rows x, or its diagonal."""
    return rows.mT @ rows if len(shape) == 2 else rows.square().sum(0)
