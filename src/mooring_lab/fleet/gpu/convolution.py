"""One convolution of a whole stack of networks on a GPU: the choice of kernel and tiles, and its gradients."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mooring.backends.kernels.launch import launch
from mooring_lab.fleet.gpu.conv_tiles import (
    MIN_PROGRAMS,
    ConvolutionGeometry,
    block_tile,
    box_shape,
    box_tile,
    next_power_of_two,
    weight_block_tile,
    weight_box_tile,
)

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from mooring_lab.fleet.gpu import kernels
except ImportError:  # without Triton, convolutions run as groups of one
    triton = None

SCALE = 4096
"""Brings gradients of a mean loss into the range of float16: from 1.5e-8 to 16 they keep ten bits."""


class KernelOutput(NamedTuple):
    """The results of a kernel, of shape (runs * batch, height, width, channels).

    Attributes:
        full: in the dtype of matrix products.
        half: in the dtype that weight gradients are computed from: float16 if full is float32, otherwise full itself.
        sums: over all positions of a run, of shape (runs, channels), if they were requested.
    """

    full: Tensor
    half: Tensor
    sums: Tensor | None = None


def has_kernels(device: torch.device | str) -> bool:
    """Return whether our own kernels run on a device.

    Example:
        >>> has_kernels("cpu")
        False
    """
    return triton is not None and torch.device(device).type == "cuda"


def gather_images(images: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the images at these indices as network inputs, channels last in memory; `scaled` in the same pass.

    Args:
        images: bytes, of shape (all, channels, height, width).
        indices: int64 of shape (selected,).
        dtype: of the result, of shape (selected, channels, height, width).
    """
    channels, height, width = images.shape[1:]
    out = torch.empty(len(indices), height, width, channels, dtype=dtype, device=indices.device)
    grid = (len(indices), triton.cdiv(channels * height * width, 1024))
    launch(kernels.gather_images, grid, images, indices, out, height * width, channels, B=1024)
    return out.permute(0, 3, 1, 2)


def supports_convolution(layer: nn.Conv2d, x: Tensor) -> bool:
    """Return whether the kernels support a layer.

    It must be on a GPU, in TF32 or bfloat16, without groups or dilation, with zero padding, and with the same padding
    and stride in both dimensions.
    """
    square = isinstance(layer.padding, tuple) and len({*layer.padding}) == len({*layer.stride}) == 1
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and square
    fast = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    return has_kernels(x.device) and plain and fast


def convolve(
    x: Tensor, taps: Tensor, bias: Tensor | None, geometry: ConvolutionGeometry, *, relu: bool, half: bool = False
) -> KernelOutput:
    """Compute x * w + b for each run, followed by a ReLU if asked for.

    Args:
        x: of shape (runs * batch, height, width, channels), contiguous.
        taps: the weights, of shape (runs, outputs or more, taps, channels), in x's dtype.
        bias: of shape (runs, outputs), in float32.
        geometry: of the convolution.
        relu: whether a ReLU follows.
        half: whether to store the result in half precision too.
    """
    out_height, out_width = geometry.output_size(x.shape[1], x.shape[2])
    out = x.new_empty(len(x), out_height, out_width, geometry.outputs)
    strides = (taps.stride(0), taps.stride(1), geometry.channels, 1)
    return _convolve(x, taps, strides, out, geometry, bias=bias, relu=relu, half=half)


def input_gradient(
    g: Tensor,
    taps: Tensor,
    shape: tuple[int, ...],
    geometry: ConvolutionGeometry,
    *,
    activation: Tensor | None,
    half: bool,
) -> KernelOutput:
    """Compute the gradient of the inputs of `convolve`.

    Args:
        g: the gradient of the outputs, of shape (runs * batch, height, width, outputs).
        taps: as for `convolve`, with as many outputs as g.
        shape: of the inputs; it may leave out the last channels.
        geometry: of the convolution.
        activation: the inputs, if a ReLU made them: the gradient is 0 where they are 0.
        half: whether the previous layer needs the gradient in half precision too, and its sums.
    """
    runs, outputs, _, channels = taps.shape
    strides = (taps.stride(0), 1, channels, taps.stride(1))  # of run, input channel, tap and output channel
    if g.dtype == torch.float32:  # TF32 needs the summed dimension last
        count = geometry.kh * geometry.kw
        transposed = torch.empty(runs, channels, count, outputs, dtype=taps.dtype, device=taps.device)
        grid = (triton.cdiv(outputs, 32) * triton.cdiv(count * channels, 32), runs)
        launch(kernels.transpose_weights, grid, taps, transposed, outputs, channels, TAPS=count, B=32)
        taps, strides = transposed, (transposed.stride(0), transposed.stride(1), outputs, 1)
    reverse = replace(geometry, outputs=shape[3], channels=outputs)
    out = g.new_empty(shape)
    return _convolve(g, taps, strides, out, reverse, transposed=True, activation=activation, half=half, sums=half)


def _convolve(
    x: Tensor,
    taps: Tensor,
    strides: tuple[int, int, int, int],
    out: Tensor,
    geometry: ConvolutionGeometry,
    *,
    bias: Tensor | None = None,
    relu: bool = False,
    transposed: bool = False,
    activation: Tensor | None = None,
    half: bool = False,
    sums: bool = False,
) -> KernelOutput:
    runs, outputs, channels = geometry.runs, geometry.outputs, geometry.channels
    height, width = x.shape[1:3]
    rows = out.numel() // outputs // runs
    boxed = geometry.fits_boxes(height, width, channels, taps.shape[1], taps.shape[3])
    tile = box_tile(rows, outputs, channels, runs, x.dtype) if boxed else block_tile(outputs, channels, x.dtype)
    bm, bn, bk, warps, stages = tile
    flat = not transposed and channels * geometry.kh * geometry.kw <= 64
    bk = max(16, next_power_of_two(channels * geometry.kh * geometry.kw)) if flat else bk
    buffers = _OutputBuffers(out, runs, triton.cdiv(rows, bm), half=half, sums=sums)
    common: dict[str, Any] = {
        "KH": geometry.kh, "KW": geometry.kw, "PAD": geometry.padding, "TRANSPOSED": transposed,
        "BIAS": bias is not None, "RELU": relu, "MASK": activation is not None, "HALF": buffers.half is not out,
        "SCALE": SCALE if transposed else 1, "SUMS": sums, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    tensors = (
        taps if bias is None else bias,
        out,
        buffers.half,
        buffers.sums,
        out if activation is None else activation,
    )
    grid = (triton.cdiv(rows, bm) * triton.cdiv(outputs, bn), runs)
    if boxed:
        bi, bh, bw = box_shape(bm, height, width)
        images = TensorDescriptor.from_tensor(x.view(runs, -1, height, width, channels), [1, bi, bh, bw, bk])
        channels_first = strides[3] != 1
        weights = TensorDescriptor.from_tensor(taps.flatten(2), [1, bk, bn] if channels_first else [1, bn, bk])
        launch(
            kernels.convolve_tiles,
            grid,
            images,
            weights,
            *tensors,
            height,
            width,
            rows,
            channels,
            outputs,
            taps.shape[3],
            **common,
            CHANNELS_FIRST=channels_first,
            SWAP_OPERANDS=bn >= 128,
            WAIT=torch.cuda.get_device_capability()[0] == 9,
            BI=bi,
            BH=bh,
            BW=bw,
        )
        return buffers.result()
    out_height, out_width = out.shape[1:3]
    launch(
        kernels.convolve, grid,
        x, taps, *tensors, height, width, out_height, out_width, rows, x.numel() // runs, *strides,
        **common, C=channels, N=outputs, STRIDE=geometry.stride, FLAT=flat, BM=bm,
    )  # fmt: skip
    return buffers.result()


def weight_gradient(x: Tensor, g: Tensor, geometry: ConvolutionGeometry) -> Tensor:
    """Compute the gradient of the weights of `convolve`, of shape (runs, outputs, taps, channels), in float32.

    Args:
        x: the inputs in half precision, of shape (runs * batch, height, width, channels or more).
        g: the gradient of the outputs in half precision, with outputs or more channels; in float16 times SCALE.
        geometry: of the convolution, with the outputs and channels of the result.
    """
    runs, outputs, channels, kh, kw = geometry.runs, g.shape[3], x.shape[3], geometry.kh, geometry.kw
    height, width = x.shape[1:3]
    rows = len(g) // runs * g.shape[1] * g.shape[2]
    boxed = geometry.fits_boxes(height, width, channels, outputs)
    bn, bc, bk, warps, stages, three_taps = (
        weight_box_tile(outputs, channels, kw) if boxed else weight_block_tile(outputs, channels, kh * kw)
    )
    flat = not boxed and channels * kh * kw <= 64
    programs = triton.cdiv(outputs, bn) * (1 if flat else triton.cdiv(channels, bc) * kh * (1 if three_taps else kw))
    parts = max(1, min(16, 2 * MIN_PROGRAMS // (programs * runs), rows // (4 * bk)))
    per_part = triton.cdiv(triton.cdiv(rows, parts), bk) * bk
    shape = (geometry.outputs, kh * kw, geometry.channels)
    out = torch.empty(parts, runs, *shape, dtype=torch.float32, device=x.device)
    common: dict[str, Any] = {
        "SCALE": SCALE if g.dtype == torch.float16 else 1, "KH": kh, "KW": kw, "PAD": geometry.padding,
        "BN": bn, "BC": bc, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    if boxed:
        bi, bh, bw = box_shape(bk, height, width)
        images = TensorDescriptor.from_tensor(x.view(runs, -1, height, width, channels), [1, bi, bh, bw, bc])
        gradients = TensorDescriptor.from_tensor(g.view(runs, rows, outputs), [1, bk, bn])
        launch(
            kernels.convolution_weight_gradient_tiles, (programs, runs, parts),
            images, gradients, out, height, width, rows, per_part, out.stride(1), out.stride(0),
            geometry.channels, geometry.outputs, channels, THREE_TAPS=three_taps, BI=bi, BH=bh, BW=bw, **common,
        )  # fmt: skip
    else:
        launch(
            kernels.convolution_weight_gradient, (programs, runs, parts),
            x, g, out, height, width, g.shape[1], g.shape[2], rows, per_part, x.numel() // runs, g.numel() // runs,
            out.stride(1), out.stride(0), geometry.channels, geometry.outputs, C=channels, N=outputs,
            STRIDE=geometry.stride, FLAT=flat, BK=bk, **common,
        )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def mask_gradient(g: Tensor, activation: Tensor | None, runs: int, *, sums: bool) -> KernelOutput:
    """Return g, with 0 where the activation of a ReLU is 0; in half precision too, and with its sums if asked for."""
    if activation is None and not sums and g.dtype != torch.float32:
        return KernelOutput(g, g)
    channels = g.shape[3]
    rows = g.numel() // channels // runs
    bn = min(64, next_power_of_two(channels))
    out = g if activation is None else torch.empty_like(g)
    buffers = _OutputBuffers(out, runs, triton.cdiv(rows, 64), half=True, sums=sums)
    launch(
        kernels.mask_gradient, (buffers.tiles * triton.cdiv(channels, bn), runs),
        g, g if activation is None else activation, buffers.out, buffers.half, buffers.sums, rows, channels,
        MASK=activation is not None, HALF=buffers.half is not buffers.out, SCALE=SCALE, SUMS=sums, BM=64, BN=bn,
    )  # fmt: skip
    return buffers.result()


def to_half(x: Tensor) -> Tensor:
    """Convert float32 to float16; return bfloat16 unchanged."""
    if x.dtype != torch.float32:
        return x
    half = torch.empty_like(x, dtype=torch.float16)
    launch(kernels.to_float16, (triton.cdiv(x.numel(), 1024),), x, half, x.numel(), B=1024)
    return half


def pad_channels(x: Tensor, channels: int) -> Tensor:
    """Pad the last dimension with zeros to this many channels."""
    if x.shape[-1] == channels:
        return x
    out = x.new_empty(*x.shape[:-1], channels)
    rows = x.numel() // x.shape[-1]
    grid = (triton.cdiv(out.numel(), 1024), 1)
    launch(kernels.pad_channels, grid, x, out, rows, rows, C=x.shape[-1], N=channels, B=1024)
    return out


def to_taps(weight: Tensor, outputs: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Rearrange weights for the kernels to (runs, outputs, taps, channels), padded with zeros.

    Args:
        weight: of shape (runs, outputs, channels, kernel height, kernel width), best with channels last in memory.
        outputs: of the result; at least those of the weight.
        channels: of the result; at least those of the weight.
        dtype: of the result.
    """
    taps = weight.permute(0, 1, 3, 4, 2).contiguous().flatten(2, 3)
    runs, rows, count, width = taps.shape
    if (rows, width, weight.dtype) == (outputs, channels, dtype):
        return taps
    out = torch.empty(runs, outputs, count, channels, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(outputs * count * channels, 1024), runs)
    launch(kernels.pad_channels, grid, taps, out, rows * count, outputs * count, C=width, N=channels, B=1024)
    return out


def max_pool(x: Tensor, *, half: bool, relu: bool, coded: bool) -> tuple[KernelOutput, Tensor]:
    """Return the maximum of each two by two positions, and codes of its position; images must have even sides.

    Args:
        x: of shape (images, height, width, channels).
        half: whether to store the result in half precision too.
        relu: whether a ReLU came before.
        coded: whether `max_pool_gradient` needs the codes; they are empty otherwise.
    """
    images, height, width, channels = x.shape
    buffers = _OutputBuffers(x.new_empty(images, height // 2, width // 2, channels), 1, 1, half=half)
    codes = torch.empty(buffers.out.shape if coded else 0, dtype=torch.uint8, device=x.device)
    count = buffers.out.numel()
    launch(
        kernels.max_pool, (triton.cdiv(count, 512),),
        x, buffers.out, buffers.half, codes, count, height, width, channels,
        RELU=relu, HALF=buffers.half is not buffers.out, CODED=coded, B=512,
    )  # fmt: skip
    return buffers.result(), codes


def max_pool_gradient(g: Tensor, codes: Tensor, runs: int, *, half: bool) -> KernelOutput:
    """Compute the gradient of `max_pool`, and of a ReLU before it, with its sums."""
    images, height, width, channels = g.shape
    rows = g.numel() // channels // runs
    bn = min(64, next_power_of_two(channels))
    out = g.new_empty(images, 2 * height, 2 * width, channels)
    buffers = _OutputBuffers(out, runs, triton.cdiv(rows, 32), half=half, sums=True)
    launch(
        kernels.max_pool_gradient, (buffers.tiles * triton.cdiv(channels, bn), runs),
        g, codes, buffers.out, buffers.half, buffers.sums, rows, 2 * width, channels, buffers.tiles,
        HALF=buffers.half is not buffers.out, SCALE=SCALE, SUMS=True, BM=32, BN=bn,
    )  # fmt: skip
    return buffers.result()


class _OutputBuffers:
    """Memory for the results of a kernel; results that are not requested point to `out` and are not written."""

    def __init__(self, out: Tensor, runs: int, tiles: int, *, half: bool, sums: bool = False) -> None:
        self.out, self.tiles = out, tiles
        self.half = torch.empty_like(out, dtype=torch.float16) if half and out.dtype == torch.float32 else out
        size = (runs, tiles, out.shape[-1])
        self.sums = torch.empty(size, dtype=torch.float32, device=out.device) if sums else out
        self.has_sums = sums

    def result(self) -> KernelOutput:
        """Return the results, with the sums of all tiles added up."""
        return KernelOutput(self.out, self.half, self.sums.sum(1) if self.has_sums else None)
