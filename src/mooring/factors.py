"""The Kronecker factors of a layer's curvature: of one batch, over a task, over tasks, and the basis they make."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from mooring.importance.averaging import average

__all__ = ["Factor", "kronecker_factors", "layers_with_factors"]


@dataclass
class Factor:
    """What is known of the curvature of one parameter of a layer.

    Attributes:
        inputs: A on this task, of shape (in, in); of a bias, which has one input, (1, 1).
        outputs: G on this task, of shape (out, out).
        past_inputs, past_outputs: their means over past tasks.
        looks: iterations of this task that they are means of.
        tasks: how many tasks the past is a mean of.
        basis: the eigenvectors of both, and the curvature of each pair of them, (out, in); None without a past.
    """

    inputs: Tensor
    outputs: Tensor
    past_inputs: Tensor
    past_outputs: Tensor
    looks: int = 0
    tasks: int = 0
    basis: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def fresh(cls, parameter: Tensor, dtype: torch.dtype) -> "Factor":
        """Nothing is known of a weight (out, in, ...) or a bias (out,)."""
        sizes = (1 if parameter.ndim == 1 else parameter[0].numel(), len(parameter))
        one, two, three, four = (
            torch.zeros(size, size, dtype=dtype, device=parameter.device) for size in (*sizes, *sizes)
        )
        return cls(one, two, three, four)

    def slots(self) -> dict[str, Tensor]:
        """Every tensor, by what it is."""
        names = ("inputs", "outputs", "past_inputs", "past_outputs")
        return {name: getattr(self, name) for name in names}

    def look(self, inputs: Tensor | None, outputs: Tensor) -> None:
        """Average in what one iteration showed."""
        self.looks += 1
        if inputs is None:
            self.inputs.fill_(1.0)
        else:
            average(self.inputs, inputs.to(self.inputs), None, self.looks, out=self.inputs)
        average(self.outputs, outputs.to(self.outputs), None, self.looks, out=self.outputs)

    def consolidate(self) -> None:
        """A task is over: it joins the past, all tasks alike."""
        if self.looks:
            self.tasks += 1
            for past, new in ((self.past_inputs, self.inputs), (self.past_outputs, self.outputs)):
                past.lerp_(new, 1 / self.tasks)
                new.zero_()
            self.looks = 0
        self.turn()

    def turn(self) -> None:
        """Find the basis in which the curvature, tasks * G (x) A, is diagonal."""
        if self.tasks:
            (a, inputs), (g, outputs) = torch.linalg.eigh(self.past_inputs), torch.linalg.eigh(self.past_outputs)
            curvature = self.tasks * g.clamp(min=0)[:, None] * a.clamp(min=0)[None, :]
            self.basis = inputs, outputs, curvature

    def turned(self, d: Tensor) -> Tensor:
        """A displacement in that basis, (out, in)."""
        assert self.basis is not None
        inputs, outputs, _ = self.basis
        return outputs.T @ d.reshape(len(d), -1).to(inputs) @ inputs

    def turned_back(self, turned: Tensor, like: Tensor) -> Tensor:
        """And back, in the shape of a parameter."""
        assert self.basis is not None
        inputs, outputs, _ = self.basis
        return (outputs @ turned @ inputs.T).reshape(like.shape)


def layers_with_factors(model: nn.Module) -> dict[nn.Module, dict[str, Tensor]]:
    """Linear layers and plain two-dimensional convolutions, with their parameters.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> [type(layer).__name__ for layer in layers_with_factors(model)]
        ['Conv2d', 'Linear']
    """
    found: dict[nn.Module, dict[str, Tensor]] = {}
    for module in model.modules():
        plain = isinstance(module, nn.Conv2d) and module.groups == 1 and not isinstance(module.padding, str)
        if isinstance(module, nn.Linear) or (plain and module.padding_mode == "zeros"):
            found[module] = dict(module.named_parameters(recurse=False))
    return found


def kronecker_factors(layer: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A, G and a bias's G from one batch: of a mean over samples whose gradient at the layer's outputs is b.

    With n samples and t places in each (positions of a sequence, pixels of an image): A = sum(a a') / n over samples
    and places; G = n / t * sum(b b'), since n * b is the gradient of a single sample; a bias's G = n * sum(s s'), s
    being the sum of b over the places of a sample.

    Args:
        layer: a linear one, or a convolution.
        a: what went in, (n, ..., in) or (n, channels, height, width).
        b: the gradient of the mean loss at what came out.

    Example:
        >>> a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
        >>> [factor.tolist() for factor in kronecker_factors(nn.Linear(2, 1), a, b)]
        [[[1.0, 2.0], [2.0, 4.0]], [[9.0]], [[9.0]]]
    """
    n = len(a)
    wide = torch.promote_types(a.dtype, torch.float32)
    if isinstance(layer, nn.Conv2d):
        how = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, b = unfold(a.to(wide), *how).transpose(1, 2), b.flatten(2).transpose(1, 2)  # type: ignore[arg-type]
    a, b = a.to(wide).reshape(n, -1, a.shape[-1]), b.to(wide).reshape(n, -1, b.shape[-1])
    places, sums = a.shape[1], b.sum(1)
    rows, back = a.flatten(0, 1), b.flatten(0, 1)
    return rows.T @ rows / n, back.T @ back * (n / places), sums.T @ sums * n
