"""Consecutive convolutions, with the ReLUs and pools between them, as one function with its own gradient.

The output of a layer is stored once for the next layer and the backward pass, in the dtype in which it is read.
Intermediate channels are padded with zeros to a number that fills whole memory reads; the zeros change no result.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mooring.backends.kernels.launch import DryRunContext, dry_run
from mooring_lab.fleet.gpu.conv_tiles import ConvolutionGeometry, align_channels
from mooring_lab.fleet.gpu.convolution import (
    KernelOutput,
    convolve,
    input_gradient,
    mask_gradient,
    max_pool,
    max_pool_gradient,
    pad_channels,
    to_half,
    to_taps,
    weight_gradient,
)


@dataclass(frozen=True)
class ConvolutionSpec:
    """One of several consecutive convolutions.

    Attributes:
        stride, padding: of the convolution, the same in both dimensions.
        relu: whether a ReLU follows.
        pool: whether a maximum over two by two positions follows after that.
    """

    stride: int
    padding: int
    relu: bool = False
    pool: bool = False


def fused_convolutions(
    x: Tensor, specs: tuple[ConvolutionSpec, ...], weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    """Apply consecutive convolutions of every run.

    Args:
        x: of shape (runs * batch, channels, height, width), best with channels last in memory, as the result has them.
        specs: the convolutions in their order.
        weights: of each, of shape (runs, outputs, channels, kernel height, kernel width); read in x's dtype.
        biases: of each, of shape (runs, outputs), or None.
    """
    _compile_kernels(x, specs, weights, biases)
    if not torch.is_grad_enabled():  # an autograd function does not see this, and would save tensors for the backward
        weights = [weight.detach() for weight in weights]
        biases = [None if bias is None else bias.detach() for bias in biases]
    out: Tensor = FusedConvolutions.apply(x, specs, *weights, *biases)  # type: ignore[no-untyped-call]
    return out.permute(0, 3, 1, 2)  # outside, because a view that the function returns may not be changed in place


_compiled: set[Hashable] = set()


def _compile_kernels(
    x: Tensor, specs: tuple[ConvolutionSpec, ...], weights: list[Tensor], biases: list[Tensor | None]
) -> None:
    """Compile every kernel of a pass on the first call with these shapes; of the backward pass too if there is one.

    Tiles depend on the number of images too, so the kernels are compiled once for each power of two of them.
    """
    tensors = (x, *weights, *biases)
    backward = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    shapes = (x.shape[1:], *(weight.shape[1:] for weight in weights))
    key = (backward, len(x).bit_length(), shapes, x.dtype, x.device, specs)
    if key in _compiled:
        return
    _compiled.add(key)
    with torch.no_grad(), dry_run():
        ctx = DryRunContext((len(specs) == 1, False, *[True] * 2 * len(specs)) if backward else (False,))
        out = FusedConvolutions.forward(ctx, x, specs, *weights, *biases)
        if backward:
            FusedConvolutions.backward(ctx, torch.empty_like(out))


def _padded_widths(weights: Sequence[Tensor | None]) -> list[int]:
    """Return the number of channels of each convolution's input and of the last output, padding included.

    The few channels of an input image are not padded: one product takes all their taps.
    """
    shapes = [weight.shape for weight in weights if weight is not None]
    widths = [align_channels(shape[2]) for shape in shapes] + [align_channels(shapes[-1][1])]
    return [shapes[0][2] if shapes[0][2:].numel() <= 64 else widths[0], *widths[1:]]


def _pad_output(output: KernelOutput, channels: int) -> KernelOutput:
    full = pad_channels(output.full, channels)
    half = full if output.half is output.full else pad_channels(output.half, channels)
    return KernelOutput(full, half, output.sums)


class FusedConvolutions(torch.autograd.Function):
    """out = pool(relu(x * w + b)), convolution after convolution; the result has its channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, specs: tuple[ConvolutionSpec, ...], *parameters: Tensor | None) -> Tensor:
        """Launch one or two kernels for each convolution."""
        count = len(specs)
        weights, ctx.biased = parameters[:count], [bias is not None for bias in parameters[count:]]
        widths = _padded_widths(weights)
        images = pad_channels(x.permute(0, 2, 3, 1).contiguous(), widths[0])
        needs_backward = any(ctx.needs_input_grad)
        output = KernelOutput(images, to_half(images) if needs_backward else images)
        saved = [output.half]
        ctx.specs, ctx.geometries = specs, []
        for number, (spec, weight, bias) in enumerate(zip(specs, weights, parameters[count:], strict=True)):
            assert weight is not None
            runs, outputs, _, kh, kw = weight.shape
            last = number + 1 == count
            geometry = ConvolutionGeometry(
                runs, outputs if last else widths[number + 1], widths[number], kh, kw, spec.stride, spec.padding
            )
            taps = to_taps(weight, widths[number + 1], widths[number], x.dtype)
            if bias is not None and geometry.outputs > outputs:
                bias = pad(bias, (0, geometry.outputs - outputs))
            half = needs_backward and not last
            output = convolve(output.full, taps, bias, geometry, relu=spec.relu, half=half and not spec.pool)
            activation = output.full if spec.relu and not half else taps.new_empty(0)
            if spec.pool:
                output, activation = max_pool(output.full, half=half, relu=spec.relu, coded=needs_backward)
            # the backward pass reads the codes of each pool, the last activation, and the inputs in half precision
            saved += [taps, activation]
            saved += [] if last else [output.half]
            ctx.geometries.append(geometry)
        ctx.shapes = [weight.shape for weight in weights if weight is not None]
        ctx.save_for_backward(*saved)
        return output.full

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x, weights and biases, from the last convolution to the first."""
        saved, specs = ctx.saved_tensors, ctx.specs
        count, needed = len(specs), ctx.needs_input_grad
        weights: list[Tensor | None] = [None] * count
        biases: list[Tensor | None] = [None] * count
        gradient: KernelOutput | Tensor = g.contiguous()
        for number in reversed(range(count)):
            spec, geometry = specs[number], ctx.geometries[number]
            x, taps, activation = saved[3 * number : 3 * number + 3]
            if not isinstance(gradient, KernelOutput):
                if spec.pool:
                    gradient = max_pool_gradient(gradient, activation, geometry.runs, half=True)
                else:
                    positive = activation if spec.relu else None
                    gradient = mask_gradient(gradient, positive, geometry.runs, sums=ctx.biased[number])
            _, outputs, channels, kh, kw = ctx.shapes[number]
            if ctx.biased[number] and needed[2 + count + number] and gradient.sums is not None:
                biases[number] = gradient.sums[:, :outputs]
            if number + 1 == count:
                gradient = _pad_output(gradient, taps.shape[1])
            if needed[2 + number]:
                flat = weight_gradient(x, gradient.half, replace(geometry, outputs=outputs, channels=channels))
                weights[number] = flat.view(*flat.shape[:2], kh, kw, -1).permute(0, 1, 4, 2, 3)
            if number == 0 and not needed[0]:
                break
            previous = specs[number - 1] if number else None
            # without a pool in between, the kernel also applies the gradient of the previous ReLU
            joined = previous is not None and not previous.pool
            inputs = x if previous is not None and joined and previous.relu else None
            shape = (*x.shape[:3], x.shape[3] if number else channels)
            down = input_gradient(gradient.full, taps, shape, geometry, activation=inputs, half=joined)
            gradient = down if joined else down.full
        gx = gradient.permute(0, 3, 1, 2) if needed[0] and isinstance(gradient, Tensor) else None
        return gx, None, *weights, *biases
