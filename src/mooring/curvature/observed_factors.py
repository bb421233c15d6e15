"""The factors of one parameter since the last step, and the part of the parameter's gradient that they account for.

Those of a weight come from rows, one for each place of each sample, or for some places, which are pixels of an image or
positions of a sequence. The rows of a convolution have channels last, so they are a transposed copy of the image, or of
its unfolded windows. Products of each sample need no such copy where images lie in memory channels first. In a
convolution with many groups, whose products are small, they also use the whole GPU.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from mooring.curvature.kronecker_factors import (
    bias_factor,
    factor_shape,
    float32_product,
    group_rows,
    is_transposed,
    layer_groups,
    layer_rows,
    output_rows,
    sums_in_float32,
    weight_factors,
)
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

MAX_WINDOWS = 1 << 26
"""Numbers in the copies of windows of a convolution that are made at once."""

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


def has_channels_first(layer: nn.Module, a: Tensor, b: Tensor) -> bool:
    """Return whether a layer is a convolution whose inputs and output gradients lie in memory channels first.

    Example:
        >>> images = torch.zeros(2, 4, 5, 5)
        >>> last = images.to(memory_format=torch.channels_last)
        >>> has_channels_first(nn.Conv2d(4, 4, 1), images, images), has_channels_first(nn.Conv2d(4, 4, 1), last, last)
        (True, False)
    """
    return isinstance(layer, nn.Conv2d) and a.is_contiguous() and b.is_contiguous()


def image_windows(layer: nn.Conv2d, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs and the output gradients of each place, (n, groups, features, places), in one dtype.

    Example:
        >>> layer = nn.Conv2d(4, 8, 3, groups=2)
        >>> [tuple(t.shape) for t in image_windows(layer, torch.zeros(5, 4, 6, 6), torch.zeros(5, 8, 4, 4))]
        [(5, 2, 18, 16), (5, 2, 4, 16)]
    """
    if a.dtype != b.dtype or not sums_in_float32(a):
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = a.to(dtype), b.to(dtype)
    window: Any = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    if layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        rows, columns = layer.stride
        a = a[:, :, ::rows, ::columns].flatten(2)
    else:
        a = functional.unfold(a, *window)
    places = b.shape[2:].numel()
    a, b = (t.reshape(len(t), layer.groups, -1, places) for t in (a, b))
    return a, b


def window_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x y' over samples and places, (groups, f, h), of x (n, groups, f, t) and y (n, groups, h, t).

    Each sample has a product of its own, unless these would take more memory than x and y.

    Example:
        >>> window_products(torch.ones(5, 2, 3, 4), torch.ones(5, 2, 1, 4))[0].tolist()
        [[20.0], [20.0], [20.0]]
    """
    n, groups, f, t = x.shape
    h = y.shape[2]
    if f == h == 1:
        return (x * y).sum((0, 3), dtype=torch.promote_types(x.dtype, torch.float32)).unsqueeze(-1)
    if f * h <= (f + h) * t:
        return float32_product(x.reshape(n * groups, f, t), y.reshape(n * groups, h, t).mT).view(n, groups, f, h).sum(0)
    columns = [t.permute(1, 2, 0, 3).reshape(groups, t.shape[2], -1) for t in (x, y)]
    return float32_product(columns[0], columns[1].mT)


def gradient_of_windows(windows: Tensor, outputs: Tensor, fixed: Tensor) -> Tensor:
    """Return the gradient of a weight along fixed directions of its inputs, (out, directions).

    Args:
        windows: the inputs of each place, as `image_windows` returns them.
        outputs: the output gradients likewise.
        fixed: the directions, (features, directions).

    Example:
        >>> windows, outputs = torch.ones(5, 2, 3, 4), torch.ones(5, 2, 1, 4)
        >>> gradient_of_windows(windows, outputs, torch.ones(3, 8)).shape
        torch.Size([2, 8])
    """
    if windows.shape[2] > fixed.shape[1] and windows.shape[1] == 1:
        n, _, f, t = windows.shape
        along = float32_product(fixed.mT.to(windows.dtype).expand(n, -1, -1), windows.reshape(n, f, t))
        return window_products(outputs, along.to(outputs.dtype).unsqueeze(1)).flatten(0, 1)
    gradient = window_products(outputs, windows)  # whole, because it takes no more
    return (gradient @ fixed.to(gradient.dtype)).flatten(0, 1)


def sample_rows(layer: nn.Module, a: Tensor, b: Tensor, places: int | None) -> tuple[Tensor, Tensor, float]:
    """Return `layer_rows` of at most `places` places per sample, and the ratio of all places to those.

    Places lie on a regular grid. Its first point is in the middle of a cell, so that borders do not count too much.

    Args:
        layer: a linear layer or a convolution.
        a: its inputs, (n, ..., in) or (n, channels, height, width).
        b: the gradient of its outputs.
        places: the largest number of places of a sample.

    Example:
        >>> a, b, share = sample_rows(nn.Conv2d(3, 8, 2), torch.zeros(5, 3, 9, 9), torch.zeros(5, 8, 8, 8), 16)
        >>> tuple(a.shape), tuple(b.shape), share
        ((5, 16, 12), (5, 16, 8), 4.0)
    """
    total = b.shape[2:].numel() if isinstance(layer, nn.Conv2d) else b.shape[1:-1].numel()
    if places is None or total <= places:
        return *layer_rows(layer, a, b), 1.0
    if isinstance(layer, nn.Conv2d):
        every = math.ceil(math.sqrt(total / places))
        a, b, layer = _sample_image(layer, a, b, every)
    else:
        every = math.ceil(total / places)
        a, b = (t.flatten(1, -2)[:, every // 2 :: every] for t in (a, b))
    a, b = layer_rows(layer, a, b)
    return a, b, total / a.shape[1]


def samples_at_once(layer: nn.Module, a: Tensor, b: Tensor, places: int | None) -> int:
    """Return how many samples of a batch to take at once, so that the windows of a convolution fit into MAX_WINDOWS.

    Example:
        >>> samples_at_once(nn.Conv2d(64, 8, 3), torch.zeros(256, 64, 1, 1), torch.zeros(256, 8, 56, 56), None)
        37
    """
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size == (1, 1):
        return len(a)
    total = b.shape[2:].numel()
    windows = layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1] * min(total, places or total)
    return max(1, MAX_WINDOWS // windows)


def _sample_image(layer: nn.Conv2d, a: Tensor, b: Tensor, every: int) -> tuple[Tensor, Tensor, nn.Conv2d]:
    """Return the inputs and output gradients of each `every`-th row and column, and the convolution between them."""
    first = min(every // 2, b.shape[-2] - 1), min(every // 2, b.shape[-1] - 1)
    assert not isinstance(layer.padding, str)  # such layers have no factors
    (rows, columns), (top, left) = layer.stride, layer.padding
    a = functional.pad(a, (left, left, top, top))[:, :, first[0] * rows :, first[1] * columns :]
    stride, device = (every * rows, every * columns), torch.device("meta")
    wider = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        stride,
        dilation=layer.dilation,  # type: ignore[arg-type]
        groups=layer.groups,
        device=device,
    )
    return a, b[:, :, first[0] :: every, first[1] :: every], wider


def gradient_along(layer: nn.Module, a: Tensor, b: Tensor, fixed: Tensor) -> Tensor:
    """Return the gradient of a weight, from all places, along fixed directions of its inputs, (out, directions).

    That of a convolution is computed as a backward pass does it, without a copy of each place's window.

    Args:
        layer: a linear layer or a convolution.
        a: its inputs.
        b: the gradient of its outputs.
        fixed: the directions, (inputs of a group, directions).

    Example:
        >>> gradient_along(nn.Conv2d(3, 8, 2), torch.ones(5, 3, 4, 4), torch.ones(5, 8, 3, 3), torch.ones(12, 2)).shape
        torch.Size([8, 2])
    """
    if isinstance(layer, nn.Conv2d):
        shape = layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size
        window = layer.stride, layer.padding, layer.dilation, layer.groups
        gradient: Tensor = conv2d_weight(a, shape, b.to(a.dtype), *window)  # type: ignore[no-untyped-call]
        return gradient.flatten(1).to(fixed.dtype) @ fixed
    along = a.flatten(0, -2).to(fixed.dtype) @ fixed
    return b.flatten(0, -2).to(fixed.dtype).mT @ along


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
