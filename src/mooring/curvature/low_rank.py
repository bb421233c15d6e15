"""Low-rank layers: which tensors are the two factors of a product, its scale, and the layer that it is added to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from mooring.errors import MooringError

METHOD = "mooring_low_rank"
"""The method by which a module names its low-rank products."""


def _always() -> bool:
    return True


@dataclass(frozen=True, eq=False)
class LowRank:
    """One low-rank product s B A that a module adds to what its base layer computes.

    A module of your own is moored through its products if it has a method `mooring_low_rank()` that returns them. Only
    the inputs and outputs of the module are read, never the weights of the base layer, so that may be quantized.

    Args:
        a: A, (rank, in) for a linear layer, (rank, channels, height, width) for a convolution.
        b: B, (out, rank), or (out, rank, 1, 1).
        scale: s.
        layer: the base layer. An `nn.Conv2d` says how inputs are unfolded, an `nn.Embedding` that they are indices; any
            other layer is linear in its inputs' last dimension.
        is_active: returns whether the product is added at present; an adapter may be switched off, or merged.
        note: what holding the product does not protect; empty if there is nothing.

    Example:
        >>> import torch
        >>> class Adapted(nn.Module):
        ...     def __init__(self, base, rank):
        ...         super().__init__()
        ...         self.base = base.requires_grad_(False)
        ...         self.a = nn.Parameter(torch.randn(rank, base.in_features))
        ...         self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        ...     def forward(self, x):
        ...         return self.base(x) + 0.5 * x @ self.a.T @ self.b.T
        ...     def mooring_low_rank(self):
        ...         return [LowRank(self.a, self.b, scale=0.5, layer=self.base)]
        >>> [tuple(product.b.shape) for product in low_rank_of(Adapted(nn.Linear(4, 3), rank=2))]
        [(3, 2)]
    """

    a: Tensor
    b: Tensor
    scale: float
    layer: nn.Module
    is_active: Callable[[], bool] = _always
    note: str = ""

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return len(self.a)

    @property
    def inputs(self) -> int:
        """The number of inputs; of a convolution, channels * height * width of its kernel."""
        return self.a.shape[1:].numel()

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.b)


LowRankFinder = Callable[[nn.Module], Iterable[LowRank]]
"""A function that returns the products of a module of the class that it was registered for."""

_FINDERS: dict[type, LowRankFinder] = {}


def register_low_rank(cls: type[nn.Module], finder: LowRankFinder) -> None:
    """Name the low-rank products of a class that you cannot edit; subclasses have them too.

    Example:
        >>> class Theirs(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(2, 3)
        >>> register_low_rank(Theirs, lambda m: [LowRank(m.down.weight, m.up.weight, 1.0, m.base)])
        >>> [product.rank for product in low_rank_of(Theirs())]
        [2]
    """
    if not (isinstance(cls, type) and callable(finder)):
        raise MooringError("register_low_rank takes a class and a function from its modules to their LowRank products")
    _FINDERS[cls] = finder


def low_rank_of(module: nn.Module) -> list[LowRank]:
    """Return the products that a module names by its method, or by the function registered for its class."""
    registered = (_FINDERS[cls] for cls in type(module).__mro__ if cls in _FINDERS)
    finder: LowRankFinder | None = next(registered, getattr(type(module), METHOD, None))
    products = list(finder(module)) if finder else []
    for product in products:
        if not isinstance(product, LowRank):
            raise MooringError(
                f"{METHOD} of {type(module).__name__} gave a {type(product).__name__}: give LowRank(a, b, scale, layer)"
            )
        rank = product.b.shape[1:].numel() if product.b.ndim > 1 else -1
        if product.a.ndim < 2 or rank != product.rank:
            shapes = f"{tuple(product.a.shape)} and {tuple(product.b.shape)}"
            raise MooringError(
                f"A and B of a {type(module).__name__} have shapes {shapes}, which is no product: give A as (rank, in) "
                "and B as (out, rank)"
            )
    return products
