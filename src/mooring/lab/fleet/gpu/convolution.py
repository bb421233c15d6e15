"""One convolution of a whole stack of networks on a GPU: which kernel, in what tiles, and its gradients."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mooring.backends.kernels.launch import launch
from mooring.lab.fleet.gpu.conv_tiles import BUSY, Geometry, blocks, box, boxes, next_power, weight_blocks, weight_boxes

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from mooring.lab.fleet.gpu import kernels
except ImportError:  # no GPU compiler here: convolutions run as groups of one
    triton = None

__all__ = [
    "Stored",
    "convolve",
    "gather",
    "halved",
    "has_kernels",
    "input_gradient",
    "laid",
    "mask",
    "pool",
    "takes",
    "unpool",
    "weight_gradient",
    "widened",
]

SCALE = 4096
"""Brings gradients of a mean loss into the range of float16: from 1.5e-8 to 16 they keep ten bits."""


class Stored(NamedTuple):
    """What a kernel leaves: values of shape (runs * batch, height, width, channels), as its options asked.

    Attributes:
        full: in the dtype of products.
        half: in a dtype that weight gradients are multiplied in; float16 where full is float32, else full itself.
        sums: over all positions of a run, of shape (runs, channels).
    """

    full: Tensor
    half: Tensor
    sums: Tensor | None = None


def has_kernels(device: torch.device | str) -> bool:
    """Whether kernels of our own run there.

    Example:
        >>> has_kernels("cpu")
        False
    """
    return triton is not None and torch.device(device).type == "cuda"


def gather(images: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """The images at these places as a network sees them, channels last in memory: `scaled` in the same pass.

    Args:
        images: bytes, of shape (all, channels, height, width).
        places: int64 of shape (chosen,).
        dtype: of the result, of shape (chosen, channels, height, width).
    """
    channels, height, width = images.shape[1:]
    out = torch.empty(len(places), height, width, channels, dtype=dtype, device=places.device)
    grid = (len(places), triton.cdiv(channels * height * width, 1024))
    launch(kernels.gather, grid, images, places, out, height * width, channels, B=1024)
    return out.permute(0, 3, 1, 2)


def takes(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether the kernels do this layer: on a GPU, in TF32 or bfloat16, without groups, dilation or odd paddings."""
    square = isinstance(layer.padding, tuple) and len({*layer.padding}) == len({*layer.stride}) == 1
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and square
    fast = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    return has_kernels(x.device) and plain and fast


def convolve(
    x: Tensor, taps: Tensor, bias: Tensor | None, geometry: Geometry, *, relu: bool, half: bool = False
) -> Stored:
    """x * w + b for each run, what is below 0 cut off where relu says so.

    Args:
        x: of shape (runs * batch, height, width, channels), contiguous.
        taps: the weights, of shape (runs, outputs or more, taps, channels), in x's dtype.
        bias: of shape (runs, outputs), in float32.
        geometry: of the convolution.
        relu: whether a ReLU follows.
        half: whether the result is asked for in half precision too.
    """
    high, wide = geometry.size(x.shape[1], x.shape[2])
    out = x.new_empty(len(x), high, wide, geometry.outputs)
    strides = (taps.stride(0), taps.stride(1), geometry.channels, 1)
    return _convolve(x, taps, strides, out, geometry, bias=bias, relu=relu, half=half)


def input_gradient(
    g: Tensor, taps: Tensor, shape: tuple[int, ...], geometry: Geometry, *, seen: Tensor | None, half: bool
) -> Stored:
    """The gradient of the inputs of `convolve`.

    Args:
        g: of the outputs, of shape (runs * batch, height, width, outputs).
        taps: as `convolve` had them, with as many outputs as g.
        shape: of the inputs; those of its channels that are left out come last.
        geometry: of the convolution.
        seen: the inputs, where a ReLU made them: the gradient is 0 where they are.
        half: whether the next layer down wants it in half precision too, and summed.
    """
    runs, outputs, _, channels = taps.shape
    strides = (taps.stride(0), 1, channels, taps.stride(1))  # of run, input channel, tap and output channel
    if g.dtype == torch.float32:  # TF32 wants the summed dimension to be the last
        count = geometry.kh * geometry.kw
        turned = torch.empty(runs, channels, count, outputs, dtype=taps.dtype, device=taps.device)
        grid = (triton.cdiv(outputs, 32) * triton.cdiv(count * channels, 32), runs)
        launch(kernels.transpose, grid, taps, turned, outputs, channels, TAPS=count, B=32)
        taps, strides = turned, (turned.stride(0), turned.stride(1), outputs, 1)
    back = replace(geometry, outputs=shape[3], channels=outputs)
    return _convolve(g, taps, strides, g.new_empty(shape), back, transposed=True, seen=seen, half=half, sums=half)


def _convolve(
    x: Tensor,
    taps: Tensor,
    strides: tuple[int, int, int, int],
    out: Tensor,
    geometry: Geometry,
    *,
    bias: Tensor | None = None,
    relu: bool = False,
    transposed: bool = False,
    seen: Tensor | None = None,
    half: bool = False,
    sums: bool = False,
) -> Stored:
    runs, outputs, channels = geometry.runs, geometry.outputs, geometry.channels
    height, width = x.shape[1:3]
    rows = out.numel() // outputs // runs
    boxed = geometry.boxed(height, width, channels, taps.shape[1], taps.shape[3])
    tile = boxes(rows, outputs, channels, runs, x.dtype) if boxed else blocks(outputs, channels, x.dtype)
    bm, bn, bk, warps, stages = tile
    flat = not transposed and channels * geometry.kh * geometry.kw <= 64
    bk = max(16, next_power(channels * geometry.kh * geometry.kw)) if flat else bk
    left = _Left(out, runs, triton.cdiv(rows, bm), half=half, sums=sums)
    common: dict[str, Any] = {
        "KH": geometry.kh, "KW": geometry.kw, "PAD": geometry.padding, "TRANSPOSED": transposed,
        "BIAS": bias is not None, "RELU": relu, "MASK": seen is not None, "HALF": left.half is not out,
        "SCALE": SCALE if transposed else 1, "SUMS": sums, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    told = (taps if bias is None else bias, out, left.half, left.sums, out if seen is None else seen)
    grid = (triton.cdiv(rows, bm) * triton.cdiv(outputs, bn), runs)
    if boxed:
        bi, bh, bw = box(bm, height, width)
        images = TensorDescriptor.from_tensor(x.view(runs, -1, height, width, channels), [1, bi, bh, bw, bk])
        turned = strides[3] != 1
        weights = TensorDescriptor.from_tensor(taps.flatten(2), [1, bk, bn] if turned else [1, bn, bk])
        launch(
            kernels.convolve_tiles,
            grid,
            images,
            weights,
            *told,
            height,
            width,
            rows,
            channels,
            outputs,
            taps.shape[3],
            **common,
            TURNED=turned,
            ASIDE=bn >= 128,
            WAITS=torch.cuda.get_device_capability()[0] == 9,
            BI=bi,
            BH=bh,
            BW=bw,
        )
        return left.stored()
    high, wide = out.shape[1:3]
    launch(
        kernels.convolve, grid,
        x, taps, *told, height, width, high, wide, rows, x.numel() // runs, *strides,
        **common, C=channels, N=outputs, STRIDE=geometry.stride, FLAT=flat, BM=bm,
    )  # fmt: skip
    return left.stored()


def weight_gradient(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the weights of `convolve`, of shape (runs, outputs, taps, channels), in float32.

    Args:
        x: the inputs in half precision, of shape (runs * batch, height, width, channels or more).
        g: the gradient of the outputs in half precision, these or more; in float16 times SCALE.
        geometry: of the convolution, with the outputs and channels that are asked for.
    """
    runs, outputs, channels, kh, kw = geometry.runs, g.shape[3], x.shape[3], geometry.kh, geometry.kw
    height, width = x.shape[1:3]
    rows = len(g) // runs * g.shape[1] * g.shape[2]
    boxed = geometry.boxed(height, width, channels, outputs)
    bn, bc, bk, warps, stages, three = (
        weight_boxes(outputs, channels, kw) if boxed else weight_blocks(outputs, channels, kh * kw)
    )
    flat = not boxed and channels * kh * kw <= 64
    programs = triton.cdiv(outputs, bn) * (1 if flat else triton.cdiv(channels, bc) * kh * (1 if three else kw))
    parts = max(1, min(16, 2 * BUSY // (programs * runs), rows // (4 * bk)))
    per_part = triton.cdiv(triton.cdiv(rows, parts), bk) * bk
    asked = (geometry.outputs, kh * kw, geometry.channels)
    out = torch.empty(parts, runs, *asked, dtype=torch.float32, device=x.device)
    common: dict[str, Any] = {
        "SCALE": SCALE if g.dtype == torch.float16 else 1, "KH": kh, "KW": kw, "PAD": geometry.padding,
        "BN": bn, "BC": bc, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    if boxed:
        bi, bh, bw = box(bk, height, width)
        images = TensorDescriptor.from_tensor(x.view(runs, -1, height, width, channels), [1, bi, bh, bw, bc])
        gradients = TensorDescriptor.from_tensor(g.view(runs, rows, outputs), [1, bk, bn])
        launch(
            kernels.weigh_tiles, (programs, runs, parts),
            images, gradients, out, height, width, rows, per_part, out.stride(1), out.stride(0),
            geometry.channels, geometry.outputs, channels, THREE=three, BI=bi, BH=bh, BW=bw, **common,
        )  # fmt: skip
    else:
        launch(
            kernels.weigh, (programs, runs, parts),
            x, g, out, height, width, g.shape[1], g.shape[2], rows, per_part, x.numel() // runs, g.numel() // runs,
            out.stride(1), out.stride(0), geometry.channels, geometry.outputs, C=channels, N=outputs,
            STRIDE=geometry.stride, FLAT=flat, BK=bk, **common,
        )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def mask(g: Tensor, seen: Tensor | None, runs: int, *, sums: bool) -> Stored:
    """g, 0 where a ReLU's result `seen` is; also in half precision, and summed where that is asked for."""
    if seen is None and not sums and g.dtype != torch.float32:
        return Stored(g, g)
    channels = g.shape[3]
    rows = g.numel() // channels // runs
    bn = min(64, next_power(channels))
    left = _Left(g if seen is None else torch.empty_like(g), runs, triton.cdiv(rows, 64), half=True, sums=sums)
    launch(
        kernels.mask, (left.tiles * triton.cdiv(channels, bn), runs),
        g, g if seen is None else seen, left.out, left.half, left.sums, rows, channels,
        MASK=seen is not None, HALF=left.half is not left.out, SCALE=SCALE, SUMS=sums, BM=64, BN=bn,
    )  # fmt: skip
    return left.stored()


def halved(x: Tensor) -> Tensor:
    """float32 as float16; bfloat16 as it is."""
    if x.dtype != torch.float32:
        return x
    half = torch.empty_like(x, dtype=torch.float16)
    launch(kernels.halve, (triton.cdiv(x.numel(), 1024),), x, half, x.numel(), B=1024)
    return half


def widened(x: Tensor, channels: int) -> Tensor:
    """With so many channels, the last dimension; those that are new are 0."""
    if x.shape[-1] == channels:
        return x
    out = x.new_empty(*x.shape[:-1], channels)
    rows = x.numel() // x.shape[-1]
    launch(kernels.widen, (triton.cdiv(out.numel(), 1024), 1), x, out, rows, rows, C=x.shape[-1], N=channels, B=1024)
    return out


def laid(weight: Tensor, outputs: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Weights as kernels read them, of shape (runs, outputs, taps, channels); those that are new are 0.

    Args:
        weight: of shape (runs, outputs, channels, kernel height, kernel width), best with channels last in memory.
        outputs: so many or more.
        channels: so many or more.
        dtype: of the result.
    """
    taps = weight.permute(0, 1, 3, 4, 2).contiguous().flatten(2, 3)
    runs, rows, count, width = taps.shape
    if (rows, width, weight.dtype) == (outputs, channels, dtype):
        return taps
    out = torch.empty(runs, outputs, count, channels, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(outputs * count * channels, 1024), runs)
    launch(kernels.widen, grid, taps, out, rows * count, outputs * count, C=width, N=channels, B=1024)
    return out


def pool(x: Tensor, *, half: bool, relu: bool, coded: bool) -> tuple[Stored, Tensor]:
    """The largest of each two by two positions, and which one it was; images with even sides.

    Args:
        x: of shape (images, height, width, channels).
        half: whether the result is asked for in half precision too.
        relu: whether a ReLU came before.
        coded: whether `unpool` will ask which ones; if not, they are empty.
    """
    images, height, width, channels = x.shape
    left = _Left(x.new_empty(images, height // 2, width // 2, channels), 1, 1, half=half)
    codes = torch.empty(left.out.shape if coded else 0, dtype=torch.uint8, device=x.device)
    count = left.out.numel()
    launch(
        kernels.pool, (triton.cdiv(count, 512),),
        x, left.out, left.half, codes, count, height, width, channels,
        RELU=relu, HALF=left.half is not left.out, CODED=coded, B=512,
    )  # fmt: skip
    return left.stored(), codes


def unpool(g: Tensor, codes: Tensor, runs: int, *, half: bool) -> Stored:
    """The gradient of `pool`, and of a ReLU before it, with its sums."""
    images, high, wide, channels = g.shape
    rows = g.numel() // channels // runs
    bn = min(64, next_power(channels))
    out = g.new_empty(images, 2 * high, 2 * wide, channels)
    left = _Left(out, runs, triton.cdiv(rows, 32), half=half, sums=True)
    launch(
        kernels.unpool, (left.tiles * triton.cdiv(channels, bn), runs),
        g, codes, left.out, left.half, left.sums, rows, 2 * wide, channels, left.tiles,
        HALF=left.half is not left.out, SCALE=SCALE, SUMS=True, BM=32, BN=bn,
    )  # fmt: skip
    return left.stored()


class _Left:
    """Memory for what a kernel leaves; what is not asked for is the result's own, and not written."""

    def __init__(self, out: Tensor, runs: int, tiles: int, *, half: bool, sums: bool = False) -> None:
        self.out, self.tiles = out, tiles
        self.half = torch.empty_like(out, dtype=torch.float16) if half and out.dtype == torch.float32 else out
        size = (runs, tiles, out.shape[-1])
        self.sums = torch.empty(size, dtype=torch.float32, device=out.device) if sums else out
        self.summed = sums

    def stored(self) -> Stored:
        """The result; sums of all tiles together."""
        return Stored(self.out, self.half, self.sums.sum(1) if self.summed else None)
