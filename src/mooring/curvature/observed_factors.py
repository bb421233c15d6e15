"""The factors of one parameter since the last step, and the part of the parameter's gradient that they account for."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from mooring.curvature.image_factors import (
    gradient_of_windows,
    has_channels_first,
    image_windows,
    window_products,
)
from mooring.curvature.kronecker_factors import (
    bias_factor,
    factor_shape,
    float32_product,
    group_rows,
    is_transposed,
    layer_groups,
    output_rows,
    weight_factors,
)
from mooring.curvature.sampled_places import gradient_along, sample_rows, samples_at_once
from mooring.distributed.collectives import all_reduce, all_reduce_many
from mooring.distributed.dtensor import world_size

DIRECTIONS = 8
"""The number of directions of inputs along which gradients are compared, instead of as a whole."""

MIN_EXPLAINED = 0.75
"""The part of the square of a gradient that the observed calls of a layer must explain."""

NOISE = 0.02
"""The rounding error of a gradient in bfloat16, relative to the norm of its terms, with a margin."""

RELIABLE = 0.01
"""The least square of a gradient, relative to that of its terms, that a scale is read from."""

UNSCALED = 0.02
"""A ratio of squares closer to 1 is rounding, and no scale."""


FactorShapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The shapes of `inputs`, `outputs` and `gradient` of `ObservedFactors`."""


@dataclass
class ObservedFactors:
    """The factors of a weight or a bias in the backward passes since the last step.

    Attributes:
        samples: the number of samples.
        inputs: A, (in, in); a bias has the one input 1.
        outputs: G, (out, out).
        gradient: the parameter's gradient along fixed directions of its inputs, as `along_directions` returns it.
        noise: the square that the norm of `gradient` has if its terms have random signs.
        uses: the number of calls, within one pass.
        transposed: whether the parameter has the shape (in, out).
    """

    samples: int
    inputs: Tensor
    outputs: Tensor
    gradient: Tensor
    noise: Tensor
    uses: int = 1
    transposed: bool = False

    def add_use(self, other: "ObservedFactors") -> None:
        """Add another call in the same pass; calls are places of the same samples."""
        self.inputs = self.inputs + other.inputs
        self.outputs = self.outputs + other.outputs
        self.gradient = self.gradient + other.gradient
        self.noise = self.noise + other.noise
        self.uses += other.uses

    def end_pass(self) -> None:
        """Divide G by the number of calls, as `combine_uses` does."""
        if self.uses > 1:
            self.outputs, self.uses = self.outputs / self.uses, 1

    def add_pass(self, other: "ObservedFactors") -> None:
        """Add another pass whose gradient the same step accumulates, each a share of one mean loss.

        Example:
            >>> one = torch.ones(1, 1)
            >>> passes = [ObservedFactors(2, one, one, one, one) for _ in range(2)]
            >>> passes[0].add_pass(passes[1])
            >>> passes[0].samples, passes[0].inputs.item(), passes[0].outputs.item()
            (4, 1.0, 4.0)
        """
        total = self.samples + other.samples
        self.inputs = self.inputs * (self.samples / total) + other.inputs * (other.samples / total)
        self.outputs = self.outputs * (total / self.samples) + other.outputs * (total / other.samples)
        self.gradient, self.noise = self.gradient + other.gradient, self.noise + other.noise
        self.samples = total


def observe(
    layer: nn.Module,
    a: Tensor,
    b: Tensor,
    names: Collection[str] = ("weight", "bias"),
    blocks: int | None = None,
    places: int | None = None,
) -> dict[str, ObservedFactors]:
    """Return the factors of the weight, of the bias or of both from one batch.

    The arguments are those of `batch_factors`, the names of the parameters, the largest size of a block, if factors are
    block-diagonal, and the largest number of places of a sample from which the factors of a weight are computed.
    """
    if a.ndim == (3 if isinstance(layer, nn.Conv2d) else 1):
        a, b = a.unsqueeze(0), b.unsqueeze(0)  # a sample without a batch
    observed: dict[str, ObservedFactors] = {}
    if "weight" in names:
        count = samples_at_once(layer, a, b, places)
        first, *others = (
            _observe_weight(layer, *part, blocks, places)
            for part in zip(torch.split(a, count), torch.split(b, count), strict=True)
        )
        for other in others:
            first.add_pass(other)
        observed["weight"] = first
        observed["weight"].transposed = is_transposed(layer)
    if "bias" in names:
        rows = output_rows(layer, b)
        sums = bias_factor(rows, blocks)
        noise = sums.diagonal(dim1=-2, dim2=-1).sum() / len(rows)
        total, one = rows.sum((0, 1), dtype=sums.dtype), sums.new_ones(factor_shape(1, blocks))
        observed["bias"] = ObservedFactors(len(rows), one, sums, total, noise)
    return observed


def _observe_weight(layer: nn.Module, a: Tensor, b: Tensor, blocks: int | None, places: int | None) -> ObservedFactors:
    n, groups = len(a), layer_groups(layer)
    whole = (blocks is None or groups > 1) and (places is None or b.shape[2:].numel() <= places)
    if whole and isinstance(layer, nn.Conv2d) and has_channels_first(layer, a, b):
        return _observe_image(layer, a, b)
    a_rows, b_rows, share = sample_rows(layer, a, b, places)
    inputs, outputs = weight_factors(a_rows, b_rows, blocks, groups)
    fixed = directions(a_rows.shape[-1] // groups, a_rows.dtype, a.device)
    along = float32_product(group_rows(a_rows.flatten(0, 1), groups), fixed.expand(groups, -1, -1))
    if share > 1:
        inputs, gradient = inputs * share, gradient_along(layer, a, b, fixed.to(outputs.dtype))
    else:
        gradient = float32_product(group_rows(b_rows.flatten(0, 1), groups).mT, along).reshape(-1, DIRECTIONS)
    squares = outputs.diagonal(dim1=-2, dim2=-1).sum(-1).reshape(groups, -1).sum(-1)
    squares = squares * (share * a_rows.shape[1] / n)  # the sum of b^2 in each group
    noise = (squares * along.square().sum((1, 2))).sum() / along.shape[1]
    return ObservedFactors(n, inputs, outputs, gradient, noise)


def _observe_image(layer: nn.Conv2d, a: Tensor, b: Tensor) -> ObservedFactors:
    """Return the factors of the weight of a convolution from all places, without transposed copies of images."""
    windows, output_windows = image_windows(layer, a, b)
    n, groups, size, places = windows.shape
    inputs = window_products(windows, windows) / n
    outputs = window_products(output_windows, output_windows) * (n / places)
    fixed = directions(size, inputs.dtype, a.device)
    gradient = gradient_of_windows(windows, output_windows, fixed)
    squares = outputs.diagonal(dim1=-2, dim2=-1).sum(-1) * (places / n)  # the sum of b^2 in each group
    along = (fixed * (inputs @ fixed)).sum((1, 2)) * n  # the sum of (a' v)^2 over directions v, in each group
    noise = (squares * along).sum() / (n * places)
    if groups == 1:
        inputs, outputs = inputs[0], outputs[0]
    return ObservedFactors(n, inputs, outputs, gradient, noise)


def observed_shapes(
    parameter: Tensor, blocks: int | None, *, transposed: bool = False, groups: int = 1
) -> FactorShapes:
    """Return the shapes of what `observe` returns for a weight, of a layer with so many groups, or a bias.

    Example:
        >>> observed_shapes(torch.zeros(3, 2), None), observed_shapes(torch.zeros(3), None)
        (((2, 2), (3, 3), (3, 8)), ((1, 1), (3, 3), (3,)))
    """
    if transposed:
        parameter = parameter.mT
    out, size = len(parameter), parameter.shape[1:].numel()
    along = (out,) if parameter.ndim == 1 else (out, DIRECTIONS)
    return factor_shape(size, blocks, groups), factor_shape(out // groups, blocks, groups), along


@cache
def directions(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed vectors without a pattern, (size, DIRECTIONS)."""
    angles = torch.arange(size * DIRECTIONS, dtype=torch.float64) * 2.399963
    return angles.cos().reshape(DIRECTIONS, size).mT.to(dtype=dtype, device=device)


def along_directions(g: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Return the gradient of a weight along `directions`, (out, DIRECTIONS); that of a bias as it is."""
    if g.ndim == 1:
        return g.to(dtype)
    if transposed:
        g = g.mT
    return g.flatten(1).to(dtype) @ directions(g[0].numel(), dtype, g.device)


def gradient_scales(observed: list[ObservedFactors], gradients: list[Tensor]) -> list[Tensor]:
    """Return the squared ratio of each gradient that a step uses to that of the backward passes.

    A GradScaler that unscales, and a gradient that is clipped, make it differ from 1. Where a gradient is too close to
    0 for its own factor, that of all of them together is taken.

    Args:
        observed: the factors of parameters on one device.
        gradients: their gradients, as `along_directions` returns them.

    Example:
        >>> one = torch.ones(2)
        >>> passes = ObservedFactors(1, one, one, 4 * one, 32 * one[0])
        >>> gradient_scales([passes], [one])
        [tensor(0.0625)]
    """
    used = torch.stack(torch._foreach_norm(gradients)).square()
    passed = torch.stack(torch._foreach_norm([o.gradient for o in observed])).square()
    noise = torch.stack([o.noise for o in observed])
    scale = torch.where(passed > RELIABLE * noise, used / passed, used.sum() / passed.sum())
    return list(torch.where(((scale - 1).abs() < UNSCALED) | scale.isnan(), 1.0, scale).unbind())


def is_explained(observed: ObservedFactors, gradient: Tensor, scale: Tensor) -> Tensor:
    """Return whether the observed calls account for a gradient, up to rounding and the scale.

    They do not if the weight is also read without a call of its layer, or if the layer changes it before its use.

    Example:
        >>> passes = ObservedFactors(1, *torch.ones(2, 1, 1), torch.tensor([1.0, 0.0]), torch.tensor(1.0))
        >>> [bool(is_explained(passes, torch.tensor(g), torch.tensor(1.0))) for g in ([0.5, 0.0], [1.0, 1.0])]
        [True, False]
    """
    norm = observed.gradient.norm()
    along = (gradient * (observed.gradient / norm)).sum().nan_to_num(nan=0.0)
    unexplained: Tensor = gradient.square().sum() - along.square()
    limit = (1 - MIN_EXPLAINED) * gradient.square().sum() + NOISE**2 * scale * observed.noise
    return ~(unexplained > limit)  # a gradient that is not a number is not for this check


def all_reduce_factors(
    parameters: Sequence[Tensor],
    observed: dict[Tensor, ObservedFactors],
    shapes: Mapping[Tensor, FactorShapes],
    transposed: Collection[Tensor] = (),
) -> dict[Tensor, ObservedFactors]:
    """Combine the factors of each rank's mean loss into those of the mean loss over all ranks.

    The gradient is averaged over W ranks, so a layer's share of it is 1 / W of what this rank observed. With n of all
    samples on this rank: A <- sum over ranks of n / samples * A; G <- sum over ranks of samples / n * G / W^2.

    Args:
        parameters: all parameters with factors, in the same order on all ranks.
        observed: the factors of those whose layers ran on this rank.
        shapes: the shapes of A, of G and of the gradient that is compared with the step's, for each of them.
        transposed: the parameters of shape (in, out).
    """
    if world_size() == 1 or not parameters:
        return observed
    samples = [observed[p].samples if p in observed else 0 for p in parameters]
    totals = all_reduce(torch.tensor(samples, device=parameters[0].device)).tolist()
    ran = [(p, total) for p, total in zip(parameters, totals, strict=True) if total]
    contributions = [tensor for p, total in ran for tensor in _contribution(p, total, observed.get(p), shapes[p])]
    summed = all_reduce_many(contributions)
    return {
        p: ObservedFactors(n, next(summed), next(summed), next(summed), next(summed), transposed=p in transposed)
        for p, n in ran
    }


def _contribution(p: Tensor, total: int, observed: ObservedFactors | None, shapes: FactorShapes) -> tuple[Tensor, ...]:
    """Return this rank's term in the sum of a parameter's factors; zeros if its layer did not run here."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    if observed is None:
        return tuple(torch.zeros(shape, dtype=dtype, device=p.device) for shape in (*shapes, ()))
    share, ranks = observed.samples / total, world_size()
    return (
        observed.inputs.to(dtype) * share,
        observed.outputs.to(dtype) / (share * ranks**2),
        observed.gradient.to(dtype) / ranks,
        observed.noise.to(dtype) / ranks**2,
    )
