"""Convolutions in a row, with the ReLUs and pools between them, as one function with a gradient of its own.

What one layer leaves for the next, and what the way back needs of it, is stored once, in the dtype it is read in.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.kernels.launching import rehearsing
from mooring.lab.fleet.convolution import (
    Stored,
    convolve,
    halved,
    input_gradient,
    mask,
    pool,
    unpool,
    weight_gradient,
)
from mooring.lab.fleet.tiles import Geometry

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
    with torch.no_grad(), rehearsing():
        for back in (True, False):
            ctx = _Rehearsal((len(links) == 1, False, *[back] * 2 * len(links)) if back else (False,))
            out = Chain.forward(ctx, x, links, *weights, *biases)
            if back:
                Chain.backward(ctx, torch.empty_like(out))


class _Rehearsal:
    """What a function keeps for its way back."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *saved: Tensor) -> None:
        self.saved_tensors = saved


class Chain(torch.autograd.Function):
    """out = pool(relu(x * w + b)), link after link; the result has its channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: tuple[Link, ...], *parameters: Tensor | None) -> Tensor:
        """One or two kernels for each link."""
        count = len(links)
        weights, ctx.biased = parameters[:count], [bias is not None for bias in parameters[count:]]
        images = x.permute(0, 2, 3, 1).contiguous()
        back = any(ctx.needs_input_grad)
        stored = Stored(images, halved(images) if back else images)
        saved = [stored.half]
        ctx.links, ctx.geometries = links, []
        for number, (link, weight, bias) in enumerate(zip(links, weights, parameters[count:], strict=True)):
            assert weight is not None
            runs, outputs, channels, kh, kw = weight.shape
            geometry = Geometry(runs, outputs, channels, kh, kw, link.stride, link.padding)
            taps = weight.permute(0, 1, 3, 4, 2).to(x.dtype).contiguous().flatten(2, 3)
            more = back and number + 1 < count
            stored = convolve(stored.full, taps, bias, geometry, relu=link.relu, half=more and not link.pool)
            full = stored.full
            if link.pool:
                stored = pool(full, half=more)
            # unpooling reads the result itself, and so does the last ReLU; the next link needs its inputs in half
            saved += [taps, full if link.pool or (link.relu and not more) else taps.new_empty(0)]
            saved += [stored.half] if number + 1 < count else []
            ctx.geometries.append(geometry)
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
                    told = unpool(told, result, geometry.runs, relu=link.relu, half=True)
                else:
                    told = mask(told, result if link.relu else None, geometry.runs, sums=ctx.biased[number])
            if wanted[2 + number]:
                found = weight_gradient(x, told.half, geometry)
                shape = (geometry.runs, geometry.outputs, geometry.kh, geometry.kw, geometry.channels)
                weights[number] = found.view(shape).permute(0, 1, 4, 2, 3)
            if ctx.biased[number] and wanted[2 + count + number]:
                biases[number] = told.sums
            if number == 0 and not wanted[0]:
                break
            before = links[number - 1] if number else None
            joined = before is not None and not before.pool  # its gradient comes ready for the link before
            seen = x if before is not None and joined and before.relu else None
            down = input_gradient(told.full, taps, tuple(x.shape), geometry, seen=seen, half=joined)
            told = down if joined else down.full
        gx = told.permute(0, 3, 1, 2) if wanted[0] and isinstance(told, Tensor) else None
        return gx, None, *weights, *biases
