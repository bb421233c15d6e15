"""The gradient of a convolution's weights, for every run."""

import triton
import triton.language as tl


@triton.jit
def convolution_weight_gradient(
    x, g, out, height, width, out_height, out_width, rows, per_part, x_run, g_run, out_run, out_part, channels, outputs,
    C: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, FLAT: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out[n, tap, c] = sum over m of g[m, n] * x[m shifted by the tap, c] / SCALE, for images of any size.

    The rows m are summed in parts, one for each program on the last axis. g has N outputs and x has C channels; the
    first `outputs` and `channels` of them are stored. FLAT takes taps and channels as one dimension.
    """
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    x += run * x_run
    g += run * g_run
    blocks = 1 if FLAT else tl.cdiv(C, BC)
    taps: tl.constexpr = 1 if FLAT else KH * KW
    block = program // taps
    j = (block % blocks) * BC + tl.arange(0, BC)
    n = (block // blocks) * BN + tl.arange(0, BN)
    if FLAT:
        tap, c = j // C, j % C
        c_valid = j < KH * KW * C
    else:
        tap, c = program % taps + tl.zeros((BC,), dtype=tl.int32), j
        c_valid = j < C
    total = tl.zeros((BN, BC), dtype=tl.float32)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, rows), BK):
        m = first + tl.arange(0, BK)
        column, row, image = m % out_width, (m // out_width) % out_height, m // (out_width * out_height)
        m_valid = m < rows
        if FLAT:
            h = row[:, None] * STRIDE + (tap // KW)[None, :] - PAD
            v = column[:, None] * STRIDE + (tap % KW)[None, :] - PAD
            inside = m_valid[:, None] & (h >= 0) & (h < height) & (v >= 0) & (v < width)
            offsets = ((image[:, None] * height + h) * width + v) * C + c[None, :]
        else:
            own_tap = program % taps
            h = row * STRIDE + own_tap // KW - PAD
            v = column * STRIDE + own_tap % KW - PAD
            inside = (m_valid & (h >= 0) & (h < height) & (v >= 0) & (v < width))[:, None]
            offsets = (((image * height + h) * width + v) * C)[:, None] + c[None, :]
        a = tl.load(g + m[:, None] * N + n[None, :], mask=m_valid[:, None] & (n < N)[None, :], other=0.0)
        b = tl.load(x + offsets, mask=inside & c_valid[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    offsets = part * out_part + run * out_run + (n[:, None] * (KH * KW) + tap[None, :]) * channels + c[None, :]
    tl.store(out + offsets, total / SCALE, mask=(n < outputs)[:, None] & (c_valid & (c < channels))[None, :])


@triton.jit
def convolution_weight_gradient_tiles(
    x, g, out, height, width, rows, per_part, out_run, out_part, channels, outputs, C,
    SCALE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr, THREE_TAPS: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the same, where each step of the sum is a box of whole image rows.

    THREE_TAPS computes a row of three taps at once. x describes (runs, batch, height, width, C), g describes
    (runs, rows, N).
    """
    BK: tl.constexpr = BI * BH * BW
    run = tl.program_id(1)
    part = tl.program_id(2)
    taps: tl.constexpr = KH if THREE_TAPS else KH * KW
    tap = tl.program_id(0) % taps
    block = tl.program_id(0) // taps
    blocks = tl.cdiv(C, BC)
    c0 = (block % blocks) * BC
    n0 = (block // blocks) * BN
    total = tl.zeros((BN, BC), dtype=tl.float32)
    second = tl.zeros((BN, BC), dtype=tl.float32)
    third = tl.zeros((BN, BC), dtype=tl.float32)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, rows), BK):
        a = g.load([run, first, n0]).reshape(BK, BN).T
        image = first // (height * width)
        top = first % (height * width) // width - PAD
        if THREE_TAPS:
            total = tl.dot(a, x.load([run, image, top + tap, -PAD, c0]).reshape(BK, BC), total)
            second = tl.dot(a, x.load([run, image, top + tap, 1 - PAD, c0]).reshape(BK, BC), second)
            third = tl.dot(a, x.load([run, image, top + tap, 2 - PAD, c0]).reshape(BK, BC), third)
        else:
            b = x.load([run, image, top + tap // KW, tap % KW - PAD, c0]).reshape(BK, BC)
            total = tl.dot(a, b, total)
    n = n0 + tl.arange(0, BN)
    c = c0 + tl.arange(0, BC)
    valid = (n < outputs)[:, None] & (c < channels)[None, :]
    out += part.to(tl.int64) * out_part + run.to(tl.int64) * out_run
    offsets = (n[:, None] * (KH * KW) + (tap * KW if THREE_TAPS else tap)) * channels + c[None, :]
    tl.store(out + offsets, total / SCALE, mask=valid)
    if THREE_TAPS:
        tl.store(out + offsets + channels, second / SCALE, mask=valid)
        tl.store(out + offsets + 2 * channels, third / SCALE, mask=valid)
