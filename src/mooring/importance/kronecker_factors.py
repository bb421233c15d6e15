"""The Kronecker factors of a layer's curvature: of one batch, over a task, over tasks, and the basis they make."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

__all__ = [
    "FACTORS",
    "Factor",
    "Factors",
    "eigenbasis",
    "kronecker_factors",
    "layers_with_factors",
    "over_passes",
    "over_uses",
]

Factors = tuple[Tensor, Tensor, Tensor]
"""A, G and a bias's G of a layer."""

FACTORS = ("inputs", "outputs", "past_inputs", "past_outputs")
"""The names of what is kept of a parameter."""


@dataclass
class Factor:
    """What is known of the curvature of one parameter of a layer; all tensors may have a leading run axis.

    Attributes:
        inputs: A summed over iterations of this task, of shape (in, in); of a bias, which has one input, (1, 1).
        outputs: G summed over them, of shape (out, out).
        past_inputs, past_outputs: the means of their means over past tasks.
        looks: how many iterations they are sums over.
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
    def fresh(cls, parameter: Tensor, dtype: torch.dtype, *, runs: bool = False) -> "Factor":
        """Nothing is known of a weight (out, in, ...) or a bias (out,); with runs, of each behind a run axis."""
        lead, shape = (parameter.shape[:1], parameter.shape[1:]) if runs else ((), parameter.shape)
        sizes = (shape[1:].numel(), shape[0])
        one, two, three, four = (
            torch.zeros(*lead, size, size, dtype=dtype, device=parameter.device) for size in (*sizes, *sizes)
        )
        return cls(one, two, three, four)

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        for name, tensor in self.slots().items():
            setattr(self, name, tensor[rows])
        if self.basis is not None:
            inputs, outputs, curvature = (part[rows] for part in self.basis)
            self.basis = inputs, outputs, curvature

    def slots(self) -> dict[str, Tensor]:
        """Every tensor, by what it is."""
        return {name: getattr(self, name) for name in FACTORS}

    def look(self, inputs: Tensor | None, outputs: Tensor) -> None:
        """Add what one iteration showed, to be counted in `looks`; a bias's input is 1."""
        self.inputs.add_(1.0 if inputs is None else inputs)
        self.outputs.add_(outputs)

    def consolidate(self, scale: float = 1.0) -> None:
        """A task is over: it joins the past, its curvature times a scale, all tasks alike."""
        if self.looks:
            self.tasks += 1
            for past, new, times in ((self.past_inputs, self.inputs, 1.0), (self.past_outputs, self.outputs, scale)):
                past.lerp_(new * (times / self.looks), 1 / self.tasks)
                new.zero_()
            self.looks = 0
        self.turn()

    def turn(self) -> None:
        """Find the basis in which the curvature, tasks * G (x) A, is diagonal."""
        if self.tasks:
            (a, inputs), (g, outputs) = eigenbasis(self.past_inputs), eigenbasis(self.past_outputs)
            curvature = self.tasks * g.clamp(min=0).unsqueeze(-1) * a.clamp(min=0).unsqueeze(-2)
            self.basis = inputs, outputs, curvature

    def turned(self, d: Tensor) -> Tensor:
        """A displacement in that basis, (out, in)."""
        assert self.basis is not None
        inputs, outputs, _ = self.basis
        return outputs.mT @ d.reshape(*outputs.shape[:-1], -1).to(inputs) @ inputs

    def turned_back(self, turned: Tensor, like: Tensor) -> Tensor:
        """And back, in the shape of a parameter."""
        assert self.basis is not None
        inputs, outputs, _ = self.basis
        return (outputs @ turned @ inputs.mT).reshape(like.shape)


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices.

    A factor of few samples has a large null space, and some GPU solvers give up on that: then in float64, then by
    LAPACK.

    Example:
        >>> eigenbasis(torch.diag(torch.tensor([1.0, 2.0])))[0]
        tensor([1., 2.])
    """
    for tried in (matrix, matrix.double()):
        try:
            values, vectors = torch.linalg.eigh(tried)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix), vectors.to(matrix)
    values, vectors = torch.linalg.eigh(matrix.double().cpu())
    return values.to(matrix), vectors.to(matrix)


def layers_with_factors(model: nn.Module, largest: int) -> dict[nn.Module, dict[str, Tensor]]:
    """Linear layers and plain two-dimensional convolutions, with their parameters.

    Args:
        model: whose.
        largest: how many inputs, or outputs, a layer may have at most.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> [type(layer).__name__ for layer in layers_with_factors(model, largest=100)]
        ['Conv2d', 'Linear']
    """
    found: dict[nn.Module, dict[str, Tensor]] = {}
    for module in model.modules():
        plain = isinstance(module, nn.Conv2d) and module.groups == 1 and not isinstance(module.padding, str)
        fits = isinstance(module, nn.Linear) or (plain and module.padding_mode == "zeros")
        if fits and max(module.weight.flatten(1).shape) <= largest:  # type: ignore[operator]
            found[module] = dict(module.named_parameters(recurse=False))
    return found


def kronecker_factors(layer: nn.Module, a: Tensor, b: Tensor, runs: int | None = None) -> Factors:
    """A, G and a bias's G from one batch: of a mean over samples whose gradient at the layer's outputs is b.

    With n samples and t places in each (positions of a sequence, pixels of an image): A = sum(a a') / n over samples
    and places; G = n / t * sum(b b'), since n * b is the gradient of a single sample; a bias's G = n * sum(s s'), s
    being the sum of b over the places of a sample.

    Args:
        layer: a linear one, or a convolution.
        a: what went in, (n, ..., in) or (n, channels, height, width); with runs, (runs * n, ...).
        b: the gradient of the mean loss at what came out.
        runs: how many lie one after the other in the batch, each with a mean loss of its own; each factor then has a
            leading run axis.

    Example:
        >>> a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
        >>> [factor.tolist() for factor in kronecker_factors(nn.Linear(2, 1), a, b)]
        [[[1.0, 2.0], [2.0, 4.0]], [[9.0]], [[9.0]]]
    """
    n, lead = len(a) // (runs or 1), () if runs is None else (runs,)
    wide = torch.promote_types(a.dtype, torch.float32)
    if isinstance(layer, nn.Conv2d):
        how = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, b = unfold(a.to(wide), *how).mT, b.flatten(2).mT  # type: ignore[arg-type]
    a, b = (t.to(wide).reshape(*lead, n, -1, t.shape[-1]) for t in (a, b))
    places, sums = a.shape[-2], b.sum(-2)
    rows, back = a.flatten(-3, -2), b.flatten(-3, -2)
    return rows.mT @ rows / n, back.mT @ back * (n / places), sums.mT @ sums * n


def over_uses(factors: Sequence[Factors]) -> Factors:
    """Of a layer that is used several times in one pass: its uses are places of the same samples.

    Example:
        >>> one = torch.ones(1, 1)
        >>> [factor.item() for factor in over_uses([(one, one, one), (3 * one, 3 * one, 3 * one)])]
        [4.0, 2.0, 4.0]
    """
    a, g, sums = (torch.stack(each).sum(0) for each in zip(*factors, strict=True))
    return a, g / len(factors), sums


def over_passes(factors: Sequence[Factors], samples: Sequence[int]) -> Factors:
    """Of a step whose gradient was accumulated over several passes, each with its share of one mean loss.

    Args:
        factors: what `kronecker_factors` gave for each.
        samples: in each.

    Example:
        >>> one = torch.ones(1, 1)
        >>> [factor.item() for factor in over_passes([(one, one, one), (one, one, one)], [2, 2])]
        [1.0, 4.0, 4.0]
    """
    total = sum(samples)
    pairs = list(zip(factors, samples, strict=True))
    a = torch.stack([each[0] * (n / total) for each, n in pairs]).sum(0)
    g, sums = (torch.stack([each[k] * (total / n) for each, n in pairs]).sum(0) for k in (1, 2))
    return a, g, sums
