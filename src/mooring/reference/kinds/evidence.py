"""What the gradient of a loss at the outputs shows of their kind.

The gradient of a cross entropy sums to 0 over the classes, and so does that of every loss that does not change when a
constant is added to the logits. Those of sigmoid and squared losses do not. A sum of n numbers with independent signs
is about a 1/sqrt(n) part of the sum of their sizes, so a sum is called different from 0 from half of that on.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.observe.output_observer import ZERO_SUM, class_dimension
from mooring.reference.kinds.classes import Classes, gradient_of_logits
from mooring.reference.kinds.kind import OutputKind
from mooring.reference.kinds.labels import Labels, is_binary_cross_entropy
from mooring.reference.kinds.values import Values

ROUNDINGS = 2
"""A sum of gradients is 0 if it is at most so many roundings of their dtype, or ZERO_SUM if that is more."""

INDEPENDENT = 0.5
"""A sum is not 0 from this part of what independent signs would give."""


@dataclass(frozen=True)
class GradientEvidence:
    """What a gradient shows.

    Attributes:
        parts: by dimension but the first, the mean size of the sums along it, as a part of the gradient's.
        sizes: the size of each of these dimensions.
        ndim: the number of dimensions of the gradient.
        tolerance: the part below which a sum is 0.
        binary: whether the gradient is that of a binary cross entropy.

    Example:
        >>> logits = torch.randn(8, 3, requires_grad=True)
        >>> loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
        >>> evidence = GradientEvidence.of(logits, *torch.autograd.grad(loss, logits))
        >>> evidence.adds_up(1), evidence.kind(Labels())
        (True, Classes(dimension=None))
    """

    parts: dict[int, float]
    sizes: dict[int, int]
    ndim: int
    tolerance: float
    binary: bool

    @classmethod
    @torch.no_grad()
    def of(cls, outputs: Tensor, gradient: Tensor, part: Tensor | None = None) -> "GradientEvidence":
        """Return what a gradient shows.

        Args:
            outputs: the outputs, or a part of them.
            gradient: of all outputs.
            part: that of the outputs that are given; None if these are all.
        """
        own = gradient_of_logits(outputs, gradient if part is None else part)
        gradient = gradient if part is not None and own is part else own  # a part has its classes last
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.linalg.vector_norm(gradient, 1, dtype=wide)
        if not bool(total > 0) or not bool(total.isfinite()):
            return cls({}, {}, gradient.ndim, 0.0, binary=False)
        dimensions = [d for d in range(1, gradient.ndim) if gradient.shape[d] > 1]
        parts = {d: float(gradient.sum(d, dtype=wide).abs().sum() / total) for d in dimensions}
        tolerance = max(ZERO_SUM, ROUNDINGS * torch.finfo(gradient.dtype).eps)
        binary = not any(part <= tolerance for part in parts.values()) and is_binary_cross_entropy(outputs, own)
        sizes = {d: gradient.shape[d] for d in dimensions}
        return cls(parts, sizes, gradient.ndim, tolerance, binary)

    def adds_up(self, dimension: int) -> bool:
        """Return whether the gradient sums to 0 along a dimension."""
        return self.parts.get(dimension, 1.0) <= self.tolerance

    def differs(self, dimension: int) -> bool:
        """Return whether it clearly does not; also if there is a single output."""
        if dimension not in self.parts:
            return True
        return self.parts[dimension] > max(self.tolerance, INDEPENDENT / math.sqrt(self.sizes[dimension]))

    def kind(self, assumed: OutputKind) -> OutputKind | None:
        """Return the kind that fits clearly better than the assumed one; None if none does.

        Where only the assumed one is excluded, that is values.
        """
        if not self.parts and not self.binary:
            return None
        usual = class_dimension(torch.empty((1,) * max(2, self.ndim)))
        along = assumed.dimension if isinstance(assumed, Classes) and assumed.dimension is not None else usual
        if isinstance(assumed, Classes) and self.adds_up(along):
            return None
        others = () if isinstance(assumed, Values) else (1, *self.parts)  # a loss of distances sees no translation
        for dimension in dict.fromkeys((along, *others)):
            if self.adds_up(dimension):
                return Classes(None if dimension == usual else dimension)
        if self.binary:
            return None if isinstance(assumed, Labels) else Labels()
        if isinstance(assumed, Classes) and self.differs(along):
            return Values()
        return None
