"""Convolutions of a whole stack of networks on a GPU: implicit matrix products, one for each run, in Triton.

Images lie in memory as (runs, batch, height, width, channels), weights as (runs, outputs, taps, channels).
"""

import triton
import triton.language as tl

__all__ = ["convolve", "halve", "transpose", "weight_gradient"]


@triton.jit
def convolve(
    x,
    w,
    bias,
    out,
    height,
    width,
    out_height,
    out_width,
    rows,
    x_run,
    w_run,
    w_output,
    w_tap,
    w_channel,
    out_run,
    C: tl.constexpr,
    N: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FLAT: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[m, n] = sum over taps and channels of x[m moved by the tap, c] * w[n, tap, c], plus the bias.

    TRANSPOSED goes the other way: from the gradient of the outputs to that of the inputs. FLAT takes taps and channels
    as one dimension, for the few channels of an image.
    """
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (N + BN - 1) // BN
    m = (program // blocks) * BM + tl.arange(0, BM)
    n = (program % blocks) * BN + tl.arange(0, BN)
    column, row, image = m % out_width, (m // out_width) % out_height, m // (out_width * out_height)
    there = m < rows
    x += run * x_run
    w += run * w_run
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if FLAT:
        j = tl.arange(0, BK)
        tap, c = j // C, j % C
        h = row[:, None] * STRIDE + (tap // KW)[None, :] - PAD
        v = column[:, None] * STRIDE + (tap % KW)[None, :] - PAD
        known = (j < KH * KW * C)[None, :]
        inside = there[:, None] & known & (h >= 0) & (h < height) & (v >= 0) & (v < width)
        a = tl.load(x + ((image[:, None] * height + h) * width + v) * C + c[None, :], mask=inside, other=0.0)
        at = n[None, :] * w_output + tap[:, None] * w_tap + c[:, None] * w_channel
        b = tl.load(w + at, mask=(n < N)[None, :] & (j < KH * KW * C)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        for tap in range(KH * KW):
            if TRANSPOSED:
                h = row + PAD - tap // KW
                v = column + PAD - tap % KW
                inside = there & (h % STRIDE == 0) & (v % STRIDE == 0) & (h >= 0) & (v >= 0)
                h = h // STRIDE
                v = v // STRIDE
            else:
                h = row * STRIDE + tap // KW - PAD
                v = column * STRIDE + tap % KW - PAD
                inside = there & (h >= 0) & (v >= 0)
            inside = inside & (h < height) & (v < width)
            start = ((image * height + h) * width + v) * C
            for first in range(0, C, BK):
                c = first + tl.arange(0, BK)
                a = tl.load(x + start[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
                at = n[None, :] * w_output + tap * w_tap + c[:, None] * w_channel
                b = tl.load(w + at, mask=(n < N)[None, :] & (c < C)[:, None], other=0.0)
                total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + run * N + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0)
    at = run * out_run + m[:, None] * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


@triton.jit
def weight_gradient(
    x,
    g,
    out,
    height,
    width,
    out_height,
    out_width,
    rows,
    x_run,
    g_run,
    out_run,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    FLAT: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """out[n, tap, c] = sum over m of g[m, n] * x[m moved by the tap, c] / SCALE."""
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    x += run * x_run
    g += run * g_run
    blocks: tl.constexpr = 1 if FLAT else (C + BC - 1) // BC
    taps: tl.constexpr = 1 if FLAT else KH * KW
    rest = program // taps
    j = (rest % blocks) * BC + tl.arange(0, BC)
    n = (rest // blocks) * BN + tl.arange(0, BN)
    if FLAT:
        tap, c = j // C, j % C
        known = j < KH * KW * C
    else:
        tap, c = program % taps + tl.zeros((BC,), dtype=tl.int32), j
        known = j < C
    total = tl.zeros((BN, BC), dtype=tl.float32)
    for first in range(0, rows, BK):
        m = first + tl.arange(0, BK)
        column, row, image = m % out_width, (m // out_width) % out_height, m // (out_width * out_height)
        there = m < rows
        if FLAT:
            h = row[:, None] * STRIDE + (tap // KW)[None, :] - PAD
            v = column[:, None] * STRIDE + (tap % KW)[None, :] - PAD
            inside = there[:, None] & (h >= 0) & (h < height) & (v >= 0) & (v < width)
            at = ((image[:, None] * height + h) * width + v) * C + c[None, :]
        else:
            one = program % taps
            h = row * STRIDE + one // KW - PAD
            v = column * STRIDE + one % KW - PAD
            inside = (there & (h >= 0) & (h < height) & (v >= 0) & (v < width))[:, None]
            at = (((image * height + h) * width + v) * C)[:, None] + c[None, :]
        a = tl.load(g + m[:, None] * N + n[None, :], mask=there[:, None] & (n < N)[None, :], other=0.0)
        b = tl.load(x + at, mask=inside & known[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    if SCALE != 1:
        total = total / SCALE
    at = run * out_run + (n[:, None] * (KH * KW) + tap[None, :]) * C + c[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & known[None, :])


@triton.jit
def transpose(x, out, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    """out[k, n] = x[n, k] for each run."""
    run = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (K + B - 1) // B
    n = (tl.program_id(0) // blocks) * B + tl.arange(0, B)
    k = (tl.program_id(0) % blocks) * B + tl.arange(0, B)
    tile = tl.load(x + run * N * K + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    tl.store(out + run * N * K + k[:, None] * N + n[None, :], tl.trans(tile), mask=(k < K)[:, None] & (n < N)[None, :])


@triton.jit
def halve(x, out, masked, half, count, SCALE: tl.constexpr, RELU: tl.constexpr, B: tl.constexpr):
    """half = x * SCALE as float16, cut off at the end of its range; RELU first puts 0 where out is 0, in masked too."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = at < count
    value = tl.load(x + at, mask=there, other=0.0)
    if RELU:
        value = tl.where(tl.load(out + at, mask=there, other=0.0) > 0, value, 0.0)
        tl.store(masked + at, value, mask=there)
    tl.store(half + at, tl.clamp(value * SCALE, -65504.0, 65504.0).to(tl.float16), mask=there)
