"""The Kronecker factors of a layer's curvature: of one batch, over a task and over tasks, and their eigenbasis."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

LayerFactors = tuple[Tensor, Tensor, Tensor]
"""A, G and the G of the bias of one layer."""

FACTOR_SLOTS = ("inputs", "outputs", "past_inputs", "past_outputs")
"""The names of the tensors of `KroneckerFactors`, in memory and in files."""


@dataclass
class KroneckerFactors:
    """The curvature of one parameter of a layer, G (x) A; every tensor may have a leading run axis.

    Attributes:
        inputs: A summed over the iterations of this task, (in, in). A bias has one input, so (1, 1).
        outputs: G summed over the iterations of this task, (out, out).
        past_inputs, past_outputs: the mean over past tasks of each task's mean A and G.
        count: the number of iterations in the sums.
        tasks: the number of tasks in the means.
        basis: the eigenvectors of A and of G, and the curvature of each pair of them, (out, in); None before the first
            consolidation.
    """

    inputs: Tensor
    outputs: Tensor
    past_inputs: Tensor
    past_outputs: Tensor
    count: int = 0
    tasks: int = 0
    basis: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def zeros(cls, parameter: Tensor, dtype: torch.dtype, *, runs: bool = False) -> "KroneckerFactors":
        """Return zero factors of a weight (out, in, ...) or a bias (out,), with `runs` behind a leading run axis."""
        lead, shape = (parameter.shape[:1], parameter.shape[1:]) if runs else ((), parameter.shape)
        inputs, outputs = (
            torch.zeros(*lead, size, size, dtype=dtype, device=parameter.device)
            for size in (shape[1:].numel(), shape[0])
        )
        return cls(inputs, outputs, inputs.clone(), outputs.clone())

    def select_runs(self, rows: Tensor) -> None:
        """Keep the runs in these rows, in this order."""
        for name, tensor in self.slots().items():
            setattr(self, name, tensor[rows])
        if self.basis is not None:
            inputs, outputs, curvature = (tensor[rows] for tensor in self.basis)
            self.basis = inputs, outputs, curvature

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors that are saved, by name."""
        return {name: getattr(self, name) for name in FACTOR_SLOTS}

    def accumulate(self, inputs: Tensor | None, outputs: Tensor) -> None:
        """Add the factors of one iteration; the caller increments `count`. The input of a bias is 1."""
        self.inputs.add_(1.0 if inputs is None else inputs)
        self.outputs.add_(outputs)

    def consolidate(self, scale: float = 1.0) -> None:
        """End a task: average its factors, with G times `scale`, into those of past tasks; all tasks count alike."""
        if self.count:
            self.tasks += 1
            for mean, total, factor in (
                (self.past_inputs, self.inputs, 1.0),
                (self.past_outputs, self.outputs, scale),
            ):
                mean.lerp_(total * (factor / self.count), 1 / self.tasks)
                total.zero_()
            self.count = 0
        self.update_eigenbasis()

    def update_eigenbasis(self) -> None:
        """Compute the basis in which the curvature of past tasks, tasks * G (x) A, is diagonal."""
        if self.tasks:
            (a, inputs), (g, outputs) = eigenbasis(self.past_inputs), eigenbasis(self.past_outputs)
            curvature = self.tasks * g.clamp(min=0).unsqueeze(-1) * a.clamp(min=0).unsqueeze(-2)
            self.basis = inputs, outputs, curvature

    def diagonal(self) -> Tensor:
        """Return the curvature of each single weight over past tasks, tasks * diag(G) (x) diag(A), (out, in)."""
        a, g = (matrix.diagonal(dim1=-2, dim2=-1) for matrix in (self.past_inputs, self.past_outputs))
        return self.tasks * g.unsqueeze(-1) * a.unsqueeze(-2)

    def to_basis(self, d: Tensor) -> Tensor:
        """Return a displacement of the parameter in the eigenbasis, (out, in)."""
        assert self.basis is not None
        inputs, outputs, _ = self.basis
        return outputs.mT @ d.reshape(*outputs.shape[:-1], -1).to(inputs) @ inputs

    def from_basis(self, d: Tensor, like: Tensor) -> Tensor:
        """Return a displacement in the eigenbasis in the shape of the parameter `like`."""
        assert self.basis is not None
        inputs, outputs, _ = self.basis
        return (outputs @ d @ inputs.mT).reshape(like.shape)


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of symmetric matrices.

    A factor of few samples has a large null space, on which some GPU solvers fail. They are tried in float64 next, and
    LAPACK last.

    Example:
        >>> eigenbasis(torch.diag(torch.tensor([1.0, 2.0])))[0]
        tensor([1., 2.])
    """
    for candidate in (matrix, matrix.double()):
        try:
            values, vectors = torch.linalg.eigh(candidate)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix), vectors.to(matrix)
    values, vectors = torch.linalg.eigh(matrix.double().cpu())
    return values.to(matrix), vectors.to(matrix)


def layers_with_factors(model: nn.Module, largest: int) -> dict[nn.Module, dict[str, Tensor]]:
    """Return the linear layers and plain two-dimensional convolutions of a model, with their parameters.

    Args:
        model: the model.
        largest: the largest number of inputs, or outputs, of a layer with factors.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> [type(layer).__name__ for layer in layers_with_factors(model, largest=100)]
        ['Conv2d', 'Linear']
    """
    layers: dict[nn.Module, dict[str, Tensor]] = {}
    for module in model.modules():
        plain = isinstance(module, nn.Conv2d) and module.groups == 1 and not isinstance(module.padding, str)
        supported = isinstance(module, nn.Linear) or (plain and module.padding_mode == "zeros")
        if supported and max(module.weight.flatten(1).shape) <= largest:  # type: ignore[operator]
            layers[module] = dict(module.named_parameters(recurse=False))
    return layers


def batch_factors(layer: nn.Module, a: Tensor, b: Tensor, runs: int | None = None) -> LayerFactors:
    """Compute A, G and the G of the bias from one batch.

    With n samples and t places per sample (positions of a sequence, pixels of an image): A = sum(a a') / n over samples
    and places. G = n / t * sum(b b'), since n * b is the gradient of a single sample. The G of the bias is
    n * sum(s s'), where s is the sum of b over the places of a sample.

    Args:
        layer: a linear layer or a convolution.
        a: the inputs, (n, ..., in) or (n, channels, height, width); with runs, (runs * n, ...).
        b: the gradient of the mean loss with respect to the outputs.
        runs: the number of runs in the batch, one after the other, each with a mean loss of its own; every factor then
            has a leading run axis.

    Example:
        >>> a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
        >>> [factor.tolist() for factor in batch_factors(nn.Linear(2, 1), a, b)]
        [[[1.0, 2.0], [2.0, 4.0]], [[9.0]], [[9.0]]]
    """
    n, lead = len(a) // (runs or 1), () if runs is None else (runs,)
    dtype = torch.promote_types(a.dtype, torch.float32)
    if isinstance(layer, nn.Conv2d):
        window = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, b = unfold(a.to(dtype), *window).mT, b.flatten(2).mT  # type: ignore[arg-type]
    a, b = (t.to(dtype).reshape(*lead, n, -1, t.shape[-1]) for t in (a, b))
    places, sums = a.shape[-2], b.sum(-2)
    a_rows, b_rows = a.flatten(-3, -2), b.flatten(-3, -2)
    return a_rows.mT @ a_rows / n, b_rows.mT @ b_rows * (n / places), sums.mT @ sums * n


def combine_uses(factors: Sequence[LayerFactors]) -> LayerFactors:
    """Combine the factors of a layer that is used several times in one pass: its uses are places of the same samples.

    Example:
        >>> one = torch.ones(1, 1)
        >>> [factor.item() for factor in combine_uses([(one, one, one), (3 * one, 3 * one, 3 * one)])]
        [4.0, 2.0, 4.0]
    """
    a, g, sums = (torch.stack(column).sum(0) for column in zip(*factors, strict=True))
    return a, g / len(factors), sums


def combine_passes(factors: Sequence[LayerFactors], samples: Sequence[int]) -> LayerFactors:
    """Combine the factors of the passes whose gradients one step accumulates, each a share of one mean loss.

    Args:
        factors: the factors of each pass, as `batch_factors` returns them.
        samples: the number of samples in each pass.

    Example:
        >>> one = torch.ones(1, 1)
        >>> [factor.item() for factor in combine_passes([(one, one, one), (one, one, one)], [2, 2])]
        [1.0, 4.0, 4.0]
    """
    total = sum(samples)
    pairs = list(zip(factors, samples, strict=True))
    a = torch.stack([factor[0] * (n / total) for factor, n in pairs]).sum(0)
    g, sums = (torch.stack([factor[k] * (total / n) for factor, n in pairs]).sum(0) for k in (1, 2))
    return a, g, sums
