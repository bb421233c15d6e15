"""A convolution of a whole stack of networks: the kernels, their shapes, and their gradients."""

from typing import Any

import torch
from torch import Tensor, nn

try:
    import triton

    from mooring.lab.fleet import kernels
except ImportError:  # no GPU compiler here: convolutions run as groups of one
    triton = None

__all__ = ["Convolution", "takes"]

SCALE = 4096
"""Brings gradients of a mean loss into the range of float16: from 1.5e-8 to 16 they keep ten bits."""

Config = tuple[int, int, int, int, int]


def takes(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether the kernels do this layer: on a GPU, in TF32 or bfloat16, without groups, dilation or odd paddings."""
    square = isinstance(layer.padding, tuple) and len({*layer.padding}) == len({*layer.stride}) == 1
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and square
    fast = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    return triton is not None and x.is_cuda and plain and fast


class Convolution(torch.autograd.Function):
    """x * w + b for each run; with relu, what is below 0 cut off in the same pass.

    x is (runs * batch, channels, height, width), best with channels last in memory, as the result has them; weight is
    (runs, outputs, channels, kernel height, kernel width) and bias (runs, outputs). The weights are read in x's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, relu: bool
    ) -> Tensor:
        """One kernel for all runs."""
        images = x.contiguous(memory_format=torch.channels_last)
        taps = weight.permute(0, 1, 3, 4, 2).to(x.dtype).contiguous()
        ctx.geometry = (weight.shape, stride, padding)
        out = _convolve(images, taps, bias, ctx.geometry, relu)
        ctx.save_for_backward(images, taps, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias: the first two by kernels of their own."""
        x, taps, out = ctx.saved_tensors
        runs, outputs, channels, kh, kw = ctx.geometry[0]
        g = g.contiguous(memory_format=torch.channels_last)
        half = g
        if x.dtype == torch.float32:
            g, half = _halved(g, out, SCALE)
        elif out is not None:
            half = g = torch.ops.aten.threshold_backward(g, out, 0)
        wanted = ctx.needs_input_grad
        gx = _input_gradient(g, taps, x, ctx.geometry) if wanted[0] else None
        gw = gb = None
        if wanted[1]:
            narrow = _halved(x, None, 1)[1] if x.dtype == torch.float32 else x
            found = _weight_gradient(narrow, half, ctx.geometry, SCALE if x.dtype == torch.float32 else 1)
            gw = found.view(runs, outputs, kh, kw, channels).permute(0, 1, 4, 2, 3)
        if wanted[2]:
            gb = g.permute(0, 2, 3, 1).reshape(runs, -1, outputs).sum(1, dtype=torch.float32)
        return gx, gw, gb, None, None, None


def _convolve(x: Tensor, taps: Tensor, bias: Tensor | None, geometry: Any, relu: bool) -> Tensor:
    (runs, outputs, channels, kh, kw), stride, padding = geometry
    height, width = x.shape[2:]
    high, wide = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
    out = torch.empty(len(x), high, wide, outputs, dtype=x.dtype, device=x.device)
    rows = len(x) // runs * high * wide
    flat = channels * kh * kw <= 64
    bm, bn, bk, warps, stages = _shape(outputs, channels, x.dtype)
    if flat:
        bk = max(16, triton.next_power_of_2(channels * kh * kw))
    kernels.convolve[(triton.cdiv(rows, bm) * triton.cdiv(outputs, bn), runs)](
        x, taps, taps if bias is None else bias, out, height, width, high, wide, rows,
        x.numel() // runs, taps.stride(0), taps.stride(1), channels, 1, out.numel() // runs,
        C=channels, N=outputs, KH=kh, KW=kw, STRIDE=stride, PAD=padding, TRANSPOSED=False, FLAT=flat,
        BIAS=bias is not None, RELU=relu, BM=bm, BN=bn, BK=bk,
        PRECISION="tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def _input_gradient(g: Tensor, taps: Tensor, x: Tensor, geometry: Any) -> Tensor:
    (runs, outputs, channels, kh, kw), stride, padding = geometry
    gx = torch.empty_like(x)  # channels last, as x is
    rows = len(x) // runs * x.shape[2] * x.shape[3]
    bm, bn, bk, warps, stages = _shape(channels, outputs, x.dtype)
    strides = (1, channels, taps.stride(1))  # of input channel, tap and output channel
    if x.dtype == torch.float32:  # TF32 wants the summed dimension to be the last
        turned = torch.empty(runs, kh * kw * channels, outputs, dtype=taps.dtype, device=taps.device)
        grid = (triton.cdiv(outputs, 32) * triton.cdiv(kh * kw * channels, 32), runs)
        kernels.transpose[grid](taps, turned, N=outputs, K=kh * kw * channels, B=32)
        taps, strides = turned, (outputs, channels * outputs, 1)
    kernels.convolve[(triton.cdiv(rows, bm) * triton.cdiv(channels, bn), runs)](
        g, taps, taps, gx, g.shape[2], g.shape[3], x.shape[2], x.shape[3], rows,
        g.numel() // runs, taps.stride(0), *strides, gx.numel() // runs,
        C=outputs, N=channels, KH=kh, KW=kw, STRIDE=stride, PAD=padding, TRANSPOSED=True, FLAT=False,
        BIAS=False, RELU=False, BM=bm, BN=bn, BK=bk, PRECISION="tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gx


def _weight_gradient(x: Tensor, g: Tensor, geometry: Any, scale: int) -> Tensor:
    (runs, outputs, channels, kh, kw), stride, padding = geometry
    gw = torch.empty(runs, outputs, kh * kw, channels, dtype=torch.float32, device=x.device)
    rows = len(g) // runs * g.shape[2] * g.shape[3]
    flat = channels * kh * kw <= 64
    wide = 64 if outputs <= 64 or channels <= 64 else 128
    bn = 64 if outputs <= 64 else 128
    bc = max(16, triton.next_power_of_2(channels * kh * kw if flat else min(channels, wide)))
    programs = triton.cdiv(outputs, bn) * (1 if flat else kh * kw * triton.cdiv(channels, bc))
    kernels.weight_gradient[(programs, runs)](
        x, g, gw, x.shape[2], x.shape[3], g.shape[2], g.shape[3], rows,
        x.numel() // runs, g.numel() // runs, gw.stride(0),
        SCALE=scale, C=channels, N=outputs, KH=kh, KW=kw, STRIDE=stride, PAD=padding, FLAT=flat,
        BN=bn, BC=bc, BK=64, num_warps=8 if bn == bc == 128 else 4, num_stages=3,
    )  # fmt: skip
    return gw


def _halved(x: Tensor, out: Tensor | None, scale: int) -> tuple[Tensor, Tensor]:
    """x where out is above 0, and the same times scale as float16, whose mantissa has the ten bits of TF32.

    The gradient of the weights is a product along a dimension that TF32 has no fast one for, and float16 has.
    """
    half = torch.empty_like(x, dtype=torch.float16)
    masked = x if out is None else torch.empty_like(x)
    kernels.halve[(triton.cdiv(x.numel(), 1024),)](
        x, x if out is None else out, masked, half, x.numel(), SCALE=scale, RELU=out is not None, B=1024
    )
    return masked, half


def _shape(outputs: int, summed: int, dtype: torch.dtype) -> Config:
    """Rows, outputs and summed channels of a block, warps and stages: the fastest of those tried on an H200."""
    narrow = max(16, triton.next_power_of_2(outputs))
    if narrow <= 64:
        return 128, narrow, min(32 if dtype == torch.float32 else 64, max(16, triton.next_power_of_2(summed))), 4, 3
    if dtype == torch.float32:
        return 128, min(256, narrow), 32, 8, 3
    return 128, 128, 32, 8, 3
