"""The Kronecker factors of a layer's curvature: of one batch, over a task and over tasks, and their eigenbasis."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mooring.curvature.eigenbases import at_least_rounding, eigenbases
from mooring.curvature.factor_blocks import block_size, rotate, split_rows

Factors = TypeVar("Factors", bound="KroneckerFactors")

LayerFactors = tuple[Tensor, Tensor, Tensor]
"""A, G and the G of the bias of one layer."""

FACTOR_SLOTS = ("inputs", "outputs", "past_inputs", "past_outputs")
"""The names of the tensors of `KroneckerFactors`, in memory and in files."""

MIN_BLOCK_SHARE = 8
"""Blocks may be smaller than asked for by this factor, where a size has no larger divisor."""

MIRRORED_BANDS, MIN_MIRRORED = 4, 1536
"""The number of bands in which the half of a symmetric product is computed, and the least size for that."""


@dataclass
class KroneckerFactors:
    """The curvature of one parameter of a layer, G (x) A; every tensor may have a leading run axis.

    Attributes:
        inputs: A summed over the iterations of this task, (in, in). A bias has one input, so (1, 1). With blocks, those
            along its diagonal, (blocks, size, size). A convolution in groups has a matrix for each, (groups, in, in).
        outputs: G summed over the iterations of this task, (out, out), or its blocks, or those of groups.
        past_inputs, past_outputs: the mean over past tasks of each task's mean A and G.
        count: the number of iterations in the sums.
        tasks: the number of tasks in the means.
        basis: the eigenvectors of A and of G, and the curvature of each pair of them, (out, in); None before the first
            consolidation, and until `complete_eigenbases` if nothing read it so far.
        basis_dtype: the dtype of the basis; None for that of the factors.
        blocked: whether factors are block-diagonal.
        runs: whether there is a run axis.
    """

    inputs: Tensor
    outputs: Tensor
    past_inputs: Tensor
    past_outputs: Tensor
    count: int = 0
    tasks: int = 0
    basis: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)
    basis_dtype: torch.dtype | None = None
    blocked: bool = False
    runs: bool = False

    @classmethod
    def zeros(
        cls,
        parameter: Tensor,
        dtype: torch.dtype,
        *,
        runs: bool = False,
        blocks: int | None = None,
        groups: int = 1,
    ) -> "KroneckerFactors":
        """Return zero factors of a weight (out, in, ...) or a bias (out,).

        Args:
            parameter: the parameter, with `runs` behind a leading run axis.
            dtype: the dtype of the factors.
            runs: whether there is a run axis.
            blocks: the largest size of a block, if factors are block-diagonal; those of groups are not.
            groups: the number of groups of a convolution.
        """
        lead, shape = (parameter.shape[:1], parameter.shape[1:]) if runs else ((), parameter.shape)
        zero, sizes = torch.zeros((), dtype=dtype, device=parameter.device), (shape[1:].numel(), shape[0] // groups)
        inputs, outputs = (zero.expand(*lead, *factor_shape(size, blocks, groups)) for size in sizes)
        if runs:
            inputs, outputs = inputs.contiguous(), outputs.contiguous()
        past_inputs, past_outputs = (inputs.clone(), outputs.clone()) if runs else (inputs, outputs)
        blocked = blocks is not None and groups == 1
        factors = cls(inputs, outputs, past_inputs, past_outputs, blocked=blocked, runs=runs)
        factors.choose_basis_dtype(parameter.dtype)
        return factors

    def choose_basis_dtype(self, dtype: torch.dtype) -> None:
        """Choose the dtype of the basis by that of the parameter; a basis of another dtype is computed again.

        The basis of a half-precision parameter is in bfloat16: what that rounds away of a displacement is less than
        the parameter itself rounds away.
        """
        rounded = torch.bfloat16 if dtype in (torch.bfloat16, torch.float16) and not self.runs else None
        if rounded != self.basis_dtype:
            self.basis_dtype, self.basis = rounded, None

    def select_runs(self, rows: Tensor) -> None:
        """Keep only the runs in these rows, in this order."""
        for name, tensor in self.slots().items():
            setattr(self, name, tensor[rows])
        if self.basis is not None:
            inputs, outputs, curvature = (tensor[rows] for tensor in self.basis)
            self.basis = inputs, outputs, curvature

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors that are saved, by name."""
        return {name: getattr(self, name) for name in FACTOR_SLOTS}

    def header(self) -> list[int]:
        """Return the numbers that are saved: `count` and `tasks`."""
        return [self.count, self.tasks]

    def accumulate(self, inputs: Tensor | None, outputs: Tensor) -> None:
        """Add the factors of one iteration; the caller increments `count`. The input of a bias is 1."""
        self.inputs = _add(self.inputs, 1.0 if inputs is None else inputs)
        self.outputs = _add(self.outputs, outputs)

    def consolidated(self: Factors) -> Factors:
        """Return the factors after the end of a task; these stay as they are, so that a failure changes nothing.

        The factors of the task are averaged into those of past tasks; all tasks count alike. The basis is None if it is
        still to be computed, by `update_eigenbases`.
        """
        if not self.count:
            return replace(self)
        a, g = (t / self.count if self.count > 1 else t for t in (self.inputs, self.outputs))
        if self.tasks:
            weight = 1 / (self.tasks + 1)
            a, g = self.past_factor("inputs").lerp(a, weight), self.past_factor("outputs").lerp(g, weight)
        new = replace(self, tasks=self.tasks + 1, basis=None, count=0)
        new.store(a, g)
        new.inputs, new.outputs = (_zeros_like(t, written=self.runs) for t in (self.inputs, self.outputs))
        if not bool((self.inputs.sum() + self.outputs.sum()).isfinite()):  # some solvers do not check
            raise torch.linalg.LinAlgError("the factors are not finite")  # type: ignore[attr-defined]
        return new

    def store(self, inputs: Tensor, outputs: Tensor) -> None:
        """Keep factors of past tasks."""
        self.past_inputs, self.past_outputs = inputs, outputs

    def past_factor(self, side: Literal["inputs", "outputs"]) -> Tensor:
        """Return A or G of past tasks."""
        return self.past_inputs if side == "inputs" else self.past_outputs

    def diagonal(self, like: Tensor) -> Tensor:
        """Return the diagonal of this task's mean curvature in the shape of the parameter `like`."""
        return self._diagonal(self.inputs, self.outputs, 1 / max(1, self.count) ** 2, like)

    def past_diagonal(self, like: Tensor) -> Tensor:
        """Return the diagonal of the curvature of past tasks in the shape of the parameter `like`."""
        return self._diagonal(self.past_factor("inputs"), self.past_factor("outputs"), self.tasks, like)

    def _diagonal(self, inputs: Tensor, outputs: Tensor, scale: float, like: Tensor) -> Tensor:
        """Return the diagonal of scale * G (x) A in the shape of a parameter."""
        g, a = (factor.diagonal(dim1=-2, dim2=-1) for factor in (outputs, inputs))
        if self.blocked:
            g, a = g.flatten(), a.flatten()
        return (scale * g.unsqueeze(-1) * a.unsqueeze(-2)).reshape(like.shape)

    def past_is_known(self) -> Tensor:
        """Return whether the curvature of past tasks is not 0 everywhere, on the device; it needs no basis."""
        return self.past_inputs.any() & self.past_outputs.any()

    def matrices(self) -> list[Tensor]:
        """Return the matrices whose eigenvectors are the basis."""
        return [self.past_inputs, self.past_outputs]

    def set_basis(self, solved: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compute the basis from the eigenvalues and eigenvectors of `matrices`."""
        (a, inputs), (g, outputs) = solved
        a, g = at_least_rounding(self.past_inputs, a, inputs), at_least_rounding(self.past_outputs, g, outputs)
        if self.blocked:
            a, g = a.flatten(), g.flatten()
        basis = inputs, outputs, (g.unsqueeze(-1) * a.unsqueeze(-2)).mul_(self.tasks)
        inputs, outputs, curvature = (t.to(self.basis_dtype or t.dtype) for t in basis)
        self.basis = inputs, outputs, curvature

    def update_eigenbasis(self) -> None:
        """Compute the basis in which the curvature of past tasks, tasks * G (x) A, is diagonal."""
        update_eigenbases([self])

    def to_basis(self, d: Tensor) -> Tensor:
        """Return a displacement of the parameter in the eigenbasis, (out, in)."""
        assert self.basis is not None
        inputs, outputs = (vectors.to(self.past_inputs.dtype) for vectors in self.basis[:2])
        if self.blocked:
            return rotate(outputs.mT, d.reshape(self.basis[2].shape).to(inputs), inputs)
        return outputs.mT @ d.reshape(*outputs.shape[:-1], -1).to(inputs) @ inputs

    def from_basis(self, d: Tensor, like: Tensor) -> Tensor:
        """Return a displacement in the eigenbasis in the shape of the parameter `like`."""
        assert self.basis is not None
        inputs, outputs = (vectors.to(d.dtype) for vectors in self.basis[:2])
        if self.blocked:
            return rotate(outputs, d, inputs.mT).reshape(like.shape)
        return (outputs @ d @ inputs.mT).reshape(like.shape)


def complete_eigenbases(factors: Iterable[KroneckerFactors | None]) -> None:
    """Compute the bases of factors of past tasks that have none; None stands for a parameter without factors."""
    update_eigenbases([own for own in factors if own is not None and own.basis is None])


def update_eigenbases(factors: Iterable[KroneckerFactors]) -> None:
    """Compute the eigenbases of factors that have past tasks, several at once on a GPU."""
    known = [(own, own.matrices()) for own in factors if own.tasks]
    solved = iter(eigenbases([matrix for _, matrices in known for matrix in matrices]))
    for own, matrices in known:
        own.set_basis([next(solved) for _ in matrices])


def _zeros_like(total: Tensor, *, written: bool) -> Tensor:
    """Return zeros; unless they are written to in place, they take no memory before something is added."""
    return torch.zeros_like(total) if written else total.new_zeros(()).expand(total.shape)


def _add(total: Tensor, added: Tensor | float) -> Tensor:
    """Add to a total in place; a total that is one expanded zero is replaced."""
    return (total + added).to(total.dtype) if total.stride(-1) == 0 else total.add_(added)


def factor_shape(size: int, blocks: int | None, groups: int = 1) -> tuple[int, ...]:
    """Return the shape of a factor of this size: whole, or the blocks along its diagonal, or one for each group.

    Example:
        >>> factor_shape(6, None), factor_shape(6, 2), factor_shape(6, 2, groups=4)
        ((6, 6), (3, 2, 2), (4, 6, 6))
    """
    if groups > 1:
        return groups, size, size
    if blocks is None:
        return size, size
    width = block_size(size, blocks)
    return size // width, width, width


def layers_with_factors(
    model: nn.Module, largest: int, blocks: int | None = None
) -> dict[nn.Module, dict[str, Tensor]]:
    """Return the linear layers and two-dimensional convolutions of a model, with their weights and biases.

    `Conv1D` of transformers is a linear layer.

    Args:
        model: the model.
        largest: the largest number of inputs, or outputs, of a layer with whole factors.
        blocks: the largest size of a block, if factors are block-diagonal, for layers of any size.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> [type(layer).__name__ for layer in layers_with_factors(model, largest=100)]
        ['Conv2d', 'Linear']
    """
    reasons = diagonal_reasons(model, largest, blocks)
    layers: dict[nn.Module, dict[str, Tensor]] = {}
    for module in filter(_is_layer, model.modules()):
        for name, p in module._parameters.items():
            if p is not None and p not in reasons:
                layers.setdefault(module, {})[name] = p
    return layers


def diagonal_reasons(model: nn.Module, largest: int, blocks: int | None = None) -> dict[Tensor, str]:
    """Return why a parameter of a linear or convolutional layer has scores and no factors, where that is so.

    The arguments are those of `layers_with_factors`.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> diagonal_reasons(model, largest=3)[model.weight]
        'its layer has 4 inputs and 2 outputs, and more than 3 have no Kronecker factors'
    """
    reasons: dict[Tensor, str] = {}
    for module in model.modules():
        reason = f"it belongs to a {type(module).__name__}, which has no Kronecker factors"
        if is_layer := _is_layer(module):
            reason = _layer_reason(module, largest, blocks)
        for name, p in module._parameters.items():
            if p is not None and is_layer and name not in ("weight", "bias"):
                reasons[p] = "only the weight and the bias of a layer have Kronecker factors"
            elif p is not None and reason:
                reasons[p] = reason
    return reasons


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d) or is_transposed(module)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is linear with a weight of shape (in, out), as `Conv1D` of transformers in GPT-2.

    The first axis of such a weight has the factor A and the second one G, in the places of G and A.
    """
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def layer_groups(layer: nn.Module) -> int:
    """Return the number of groups of a convolution, each of which has factors of its own; 1 for another layer.

    Example:
        >>> layer_groups(nn.Conv2d(8, 8, 3, groups=8)), layer_groups(nn.Linear(2, 3))
        (8, 1)
    """
    return layer.groups if isinstance(layer, nn.Conv2d) else 1


def _layer_reason(layer: nn.Module, largest: int, blocks: int | None) -> str:
    """Return why no parameter of a layer has factors; empty if they have."""
    weight: Any = layer._parameters.get("weight")
    if weight is None:
        return "the weight of its layer is computed from other parameters"
    if isinstance(layer, NonDynamicallyQuantizableLinear):  # the out_proj of nn.MultiheadAttention
        return "attention reads its weight without calling its layer"
    if isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return "convolutions with other padding than numbers of zeros have no Kronecker factors"
    outs, ins = weight.mT.shape if is_transposed(layer) else weight.flatten(1).shape
    if (groups := layer_groups(layer)) > 1:
        outs, largest, blocks = outs // groups, min(largest, blocks or largest), None
    if blocks is not None:
        narrow = min((ins, outs), key=lambda size: block_size(size, blocks) / min(size, blocks))
        if block_size(narrow, blocks) * MIN_BLOCK_SHARE < min(narrow, blocks):
            return f"{narrow} inputs or outputs of its layer do not divide into equal blocks of about {blocks}"
        return ""
    if max(ins, outs) > largest:
        return f"its layer has {ins} inputs and {outs} outputs, and more than {largest} have no Kronecker factors"
    return ""


def layer_rows(layer: nn.Module, a: Tensor, b: Tensor, runs: int | None = None) -> tuple[Tensor, Tensor]:
    """Return inputs and output gradients as (samples, places, features); with runs, behind a leading run axis.

    The arguments are those of `batch_factors`.

    Example:
        >>> a, b = layer_rows(nn.Conv2d(3, 8, 2), torch.zeros(5, 3, 4, 4), torch.zeros(5, 8, 3, 3))
        >>> tuple(a.shape), tuple(b.shape)
        ((5, 9, 12), (5, 9, 8))
    """
    n, lead = len(a) // (runs or 1), () if runs is None else (runs,)
    dtype = torch.promote_types(a.dtype, torch.float32)
    if isinstance(layer, nn.Conv2d):
        a, b = _patches(layer, a, dtype), b.permute(0, 2, 3, 1)
    if runs is not None or not all(sums_in_float32(t) for t in (a, b)):
        a, b = a.to(dtype), b.to(dtype)
    a, b = (t.reshape(*lead, n, -1, t.shape[-1]) for t in (a, b))
    return a, b


def output_rows(layer: nn.Module, b: Tensor) -> Tensor:
    """Return output gradients alone as `layer_rows` does, without their inputs.

    Example:
        >>> tuple(output_rows(nn.Conv2d(3, 8, 2), torch.zeros(5, 8, 3, 3)).shape)
        (5, 9, 8)
    """
    if isinstance(layer, nn.Conv2d):
        b = b.permute(0, 2, 3, 1)
    if not sums_in_float32(b):
        b = b.to(torch.promote_types(b.dtype, torch.float32))
    return b.reshape(len(b), -1, b.shape[-1])


def sums_in_float32(t: Tensor) -> bool:
    """Return whether products of a half-precision tensor can be summed in float32, without a copy in float32."""
    return t.dtype in (torch.bfloat16, torch.float16) and t.device.type == "cuda" and has_wide_products()


@cache
def has_wide_products() -> bool:
    """Return whether this torch has products of half-precision matrices with float32 results."""
    return "out_dtype" in str(torch.ops.aten.mm.dtype._schema) if hasattr(torch.ops.aten.mm, "dtype") else False


def float32_product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y in at least float32; half-precision matrices that `sums_in_float32` are not copied."""
    if x.dtype != y.dtype:
        y = y.to(x.dtype)
    if x.dtype.itemsize > 2:
        return x @ y
    return (torch.mm if x.ndim == 2 else torch.bmm)(x, y, out_dtype=torch.float32)


def _patches(layer: nn.Conv2d, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inputs of each place of a convolution, (n, places, channels * kernel) or with places in rows.

    The window of a 1 x 1 convolution is a pixel, which needs no copy of the image.
    """
    if layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        rows, columns = layer.stride
        return a[:, :, ::rows, ::columns].permute(0, 2, 3, 1)
    window: Any = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return unfold(a.to(dtype), *window).mT


def weight_factors(a: Tensor, b: Tensor, blocks: int | None = None, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Compute A = sum(a a') / n and G = n / t * sum(b b') from the rows of n samples with t places each.

    Args:
        a: inputs, (..., n, t, in).
        b: output gradients, (..., n, t, out).
        blocks: the largest size of a block, if factors are block-diagonal.
        groups: the number of groups of a convolution, whose factors have a leading axis for them.
    """
    n, places = a.shape[-3], a.shape[-2]
    a_rows, b_rows = a.flatten(-3, -2), b.flatten(-3, -2)
    if groups > 1:
        a_rows, b_rows, blocks = group_rows(a_rows, groups), group_rows(b_rows, groups), None
    return squares(a_rows, blocks) / n, squares(b_rows, blocks) * (n / places)


def group_rows(rows: Tensor, groups: int) -> Tensor:
    """Return rows (..., n, features) of all groups as (..., groups, n, features per group).

    Example:
        >>> group_rows(torch.zeros(5, 6), 3).shape
        torch.Size([3, 5, 2])
    """
    return rows.reshape(*rows.shape[:-1], groups, -1).transpose(-3, -2)


def squares(rows: Tensor, blocks: int | None = None) -> Tensor:
    """Return the sum of r r' over rows r, in at least float32; with blocks, only the blocks along its diagonal.

    A wide sum is computed in bands from its diagonal on, and mirrored: five eighths of the products.
    """
    if blocks is not None:
        rows = split_rows(rows, block_size(rows.shape[-1], blocks))
    if rows.ndim > 2 or rows.shape[-1] < MIN_MIRRORED:
        return float32_product(rows.mT, rows)
    size = rows.shape[-1]
    total = rows.new_empty(size, size, dtype=torch.promote_types(rows.dtype, torch.float32))
    width = -(-size // MIRRORED_BANDS)
    for start in range(0, size, width):
        stop = min(size, start + width)
        total[start:stop, start:] = float32_product(rows[:, start:stop].mT, rows[:, start:])
        total[stop:, start:stop] = total[start:stop, stop:].mT
    return total


def bias_factor(b: Tensor, blocks: int | None = None) -> Tensor:
    """Compute the G of the bias, n * sum(s s'), where s is the sum of b over the places of a sample."""
    sums = b.sum(-2, dtype=torch.promote_types(b.dtype, torch.float32))
    return squares(sums, blocks) * b.shape[-3]


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
    a, b = layer_rows(layer, a, b, runs)
    return *weight_factors(a, b, groups=layer_groups(layer)), bias_factor(b)


def combine_uses(factors: Sequence[LayerFactors]) -> LayerFactors:
    """Combine the factors of a layer that is used several times in one pass: its uses are places of the same samples.

    Example:
        >>> one = torch.ones(1, 1)
        >>> [factor.item() for factor in combine_uses([(one, one, one), (3 * one, 3 * one, 3 * one)])]
        [4.0, 2.0, 4.0]
    """
    a, g, sums = (torch.stack(column).sum(0) for column in zip(*factors, strict=True))
    return a, g / len(factors), sums
