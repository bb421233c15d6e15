"""The gradient of a convolution's weights, for every run."""

import triton
import triton.language as tl

__all__ = ["weigh", "weigh_tiles"]


@triton.jit
def weigh(
    x, g, out, height, width, out_height, out_width, rows, per_part, x_run, g_run, out_run, out_part, channels, outputs,
    C: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, FLAT: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[n, tap, c] = sum over m of g[m, n] * x[m moved by the tap, c] / SCALE, of any shape; rows in parts.

    g has N outputs and x has C channels, of which the first ones are asked for.
    """
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    x += run * x_run
    g += run * g_run
    blocks = 1 if FLAT else tl.cdiv(C, BC)
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
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, rows), BK):
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
    at = part * out_part + run * out_run + (n[:, None] * (KH * KW) + tap[None, :]) * channels + c[None, :]
    tl.store(out + at, total / SCALE, mask=(n < outputs)[:, None] & (known & (c < channels))[None, :])


@triton.jit
def weigh_tiles(
    x, g, out, height, width, rows, per_part, out_run, out_part, channels, outputs, C,
    SCALE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr, THREE: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The same where a step along the sum is a box of whole image rows; THREE does a row of three taps at once.

    x describes (runs, batch, height, width, C), g describes (runs, rows, N).
    """
    BK: tl.constexpr = BI * BH * BW
    run = tl.program_id(1)
    part = tl.program_id(2)
    taps: tl.constexpr = KH if THREE else KH * KW
    tap = tl.program_id(0) % taps
    rest = tl.program_id(0) // taps
    blocks = tl.cdiv(C, BC)
    c0 = (rest % blocks) * BC
    n0 = (rest // blocks) * BN
    total = tl.zeros((BN, BC), dtype=tl.float32)
    second = tl.zeros((BN, BC), dtype=tl.float32)
    third = tl.zeros((BN, BC), dtype=tl.float32)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, rows), BK):
        a = g.load([run, first, n0]).reshape(BK, BN).T
        image = first // (height * width)
        top = first % (height * width) // width - PAD
        if THREE:
            total = tl.dot(a, x.load([run, image, top + tap, -PAD, c0]).reshape(BK, BC), total)
            second = tl.dot(a, x.load([run, image, top + tap, 1 - PAD, c0]).reshape(BK, BC), second)
            third = tl.dot(a, x.load([run, image, top + tap, 2 - PAD, c0]).reshape(BK, BC), third)
        else:
            b = x.load([run, image, top + tap // KW, tap % KW - PAD, c0]).reshape(BK, BC)
            total = tl.dot(a, b, total)
    n = n0 + tl.arange(0, BN)
    c = c0 + tl.arange(0, BC)
    known = (n < outputs)[:, None] & (c < channels)[None, :]
    out += part.to(tl.int64) * out_part + run.to(tl.int64) * out_run
    at = (n[:, None] * (KH * KW) + (tap * KW if THREE else tap)) * channels + c[None, :]
    tl.store(out + at, total / SCALE, mask=known)
    if THREE:
        tl.store(out + at + channels, second / SCALE, mask=known)
        tl.store(out + at + 2 * channels, third / SCALE, mask=known)
