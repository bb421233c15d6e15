"""Convolutions in a row, with the ReLUs and pools between them, as one function with a gradient of its own.

What one layer leaves for the next, and what the way back needs of it, is stored once, in the dtype it is read in.
Channels in between are filled up with zeros to a number that memory is read well in; they change nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mooring.backends.kernels.launch import DryRun, dry_run
from mooring.lab.fleet.gpu.conv_tiles import Geometry, aligned
from mooring.lab.fleet.gpu.convolution import (
    Stored,
    convolve,
    halved,
    input_gradient,
    laid,
    mask,
    pool,
    unpool,
    weight_gradient,
    widened,
)

__all__ = ["Chain", "Link", "run_chain"]


@dataclass(frozen=True)
class Link:
    """One convolution of a chain.

    Attributes:
        stride, padding: of the convolution, the same in both dimensions.
        relu: whether a ReLU follows.
        pool: whether the largest of each two by two positions is taken after that.
    """

    stride: int
    padding: int
    relu: bool = False
    pool: bool = False


def run_chain(x: Tensor, links: tuple[Link, ...], weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """All links of all runs.

    Args:
        x: of shape (runs * batch, channels, height, width), best with channels last in memory, as the result has them.
        links: in their order.
        weights: of each link, of shape (runs, outputs, channels, kernel height, kernel width); read in x's dtype.
        biases: of each link, of shape (runs, outputs), or None.
    """
    _rehearse(x.shape[1:], x.dtype, x.device, links, weights, biases)
    if not torch.is_grad_enabled():  # a function of one's own is not told: without this it would prepare the way back
        weights = [each.detach() for each in weights]
        biases = [None if each is None else each.detach() for each in biases]
    out: Tensor = Chain.apply(x, links, *weights, *biases)  # type: ignore[no-untyped-call]
    return out.permute(0, 3, 1, 2)  # out here: what such a function gives as a view may not be changed in place


_rehearsed: set[Hashable] = set()


def _rehearse(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    links: tuple[Link, ...],
    weights: list[Tensor],
    biases: list[Tensor | None],
) -> None:
    """Have every kernel of a chain compiled, there and back, where this is the first of its shape."""
    key = (shape, dtype, device, links, *(weight.shape[1:] for weight in weights))
    if key in _rehearsed:
        return
    _rehearsed.add(key)
    x = torch.empty(2 * len(weights[0]), *shape, dtype=dtype, device=device)
    with torch.no_grad(), dry_run():
        for back in (True, False):
            ctx = DryRun((len(links) == 1, False, *[back] * 2 * len(links)) if back else (False,))
            out = Chain.forward(ctx, x, links, *weights, *biases)
            if back:
                Chain.backward(ctx, torch.empty_like(out))


def _widths(weights: Sequence[Tensor | None]) -> list[int]:
    """How many channels go into each link, and out of the last, with those that are filled up.

    The few of an image are left as they are: one product takes them all.
    """
    shapes = [weight.shape for weight in weights if weight is not None]
    found = [aligned(shape[2]) for shape in shapes] + [aligned(shapes[-1][1])]
    return [shapes[0][2] if shapes[0][2:].numel() <= 64 else found[0], *found[1:]]


def _wide(told: Stored, channels: int) -> Stored:
    """With so many channels."""
    full = widened(told.full, channels)
    return Stored(full, full if told.half is told.full else widened(told.half, channels), told.sums)


class Chain(torch.autograd.Function):
    """out = pool(relu(x * w + b)), link after link; the result has its channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: tuple[Link, ...], *parameters: Tensor | None) -> Tensor:
        """One or two kernels for each link."""
        count = len(links)
        weights, ctx.biased = parameters[:count], [bias is not None for bias in parameters[count:]]
        widths = _widths(weights)
        images = widened(x.permute(0, 2, 3, 1).contiguous(), widths[0])
        back = any(ctx.needs_input_grad)
        stored = Stored(images, halved(images) if back else images)
        saved = [stored.half]
        ctx.links, ctx.geometries = links, []
        for number, (link, weight, bias) in enumerate(zip(links, weights, parameters[count:], strict=True)):
            assert weight is not None
            runs, outputs, _, kh, kw = weight.shape
            last = number + 1 == count
            geometry = Geometry(
                runs, outputs if last else widths[number + 1], widths[number], kh, kw, link.stride, link.padding
            )
            taps = laid(weight, widths[number + 1], widths[number], x.dtype)
            if bias is not None and geometry.outputs > outputs:
                bias = pad(bias, (0, geometry.outputs - outputs))
            more = back and not last
            stored = convolve(stored.full, taps, bias, geometry, relu=link.relu, half=more and not link.pool)
            left = stored.full if link.relu and not more else taps.new_empty(0)
            if link.pool:
                stored, left = pool(stored.full, half=more, relu=link.relu, coded=back)
            # the way back reads which positions were the largest, and what the last ReLU gave; inputs in half
            saved += [taps, left]
            saved += [] if last else [stored.half]
            ctx.geometries.append(geometry)
        ctx.shapes = [weight.shape for weight in weights if weight is not None]
        ctx.save_for_backward(*saved)
        return stored.full

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weights and biases, from the last link to the first."""
        saved, links = ctx.saved_tensors, ctx.links
        count, wanted = len(links), ctx.needs_input_grad
        weights: list[Tensor | None] = [None] * count
        biases: list[Tensor | None] = [None] * count
        told: Stored | Tensor = g.contiguous()
        for number in reversed(range(count)):
            link, geometry = links[number], ctx.geometries[number]
            x, taps, result = saved[3 * number : 3 * number + 3]
            if not isinstance(told, Stored):
                if link.pool:
                    told = unpool(told, result, geometry.runs, half=True)
                else:
                    told = mask(told, result if link.relu else None, geometry.runs, sums=ctx.biased[number])
            _, outputs, channels, kh, kw = ctx.shapes[number]
            if ctx.biased[number] and wanted[2 + count + number] and told.sums is not None:
                biases[number] = told.sums[:, :outputs]
            if number + 1 == count:
                told = _wide(told, taps.shape[1])
            if wanted[2 + number]:
                found = weight_gradient(x, told.half, replace(geometry, outputs=outputs, channels=channels))
                weights[number] = found.view(*found.shape[:2], kh, kw, -1).permute(0, 1, 4, 2, 3)
            if number == 0 and not wanted[0]:
                break
            before = links[number - 1] if number else None
            joined = before is not None and not before.pool  # its gradient comes ready for the link before
            seen = x if before is not None and joined and before.relu else None
            shape = (*x.shape[:3], x.shape[3] if number else channels)
            down = input_gradient(told.full, taps, shape, geometry, seen=seen, half=joined)
            told = down if joined else down.full
        gx = told.permute(0, 3, 1, 2) if wanted[0] and isinstance(told, Tensor) else None
        return gx, None, *weights, *biases
