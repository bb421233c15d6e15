"""Batch norm of every run: statistics of each channel, normalization, and the gradients.

Several positions are taken as one row of SPAN columns, so that few columns of a tile stay empty if there are few
channels: column j belongs to channel j % C.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(count, C, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return the offsets of this program's tile in its run, which of them exist, the columns and their channels."""
    j = tl.program_id(2) * BN + tl.arange(0, BN)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    offsets = m[:, None] * SPAN + j[None, :]
    return offsets, (offsets < count) & (j < SPAN)[None, :], j, j % C


@triton.jit
def _store_column_sums(first, second, sums, j, SPAN: tl.constexpr):
    """Store the sums of two tiles by column."""
    offsets = ((tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2) * SPAN + j
    tl.store(sums + offsets, tl.sum(first, 0), mask=j < SPAN)
    tl.store(sums + offsets + SPAN, tl.sum(second, 0), mask=j < SPAN)


@triton.jit
def shifted_moments(x, sums, count, C, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sum d and d^2, where d is the difference between a value and the first value of its run and channel."""
    run = tl.program_id(1).to(tl.int64)
    offsets, valid, j, c = _tile(count, C, SPAN, BM, BN)
    shift = tl.load(x + run * count + c, mask=j < SPAN, other=0.0).to(tl.float32)[None, :]
    d = tl.where(valid, tl.load(x + run * count + offsets, mask=valid, other=0.0).to(tl.float32) - shift, 0.0)
    _store_column_sums(d, d * d, sums, j, SPAN)


@triton.jit
def batch_statistics(
    sums, x, mean, scale, running_mean, running_var, batches, count, positions, C, momentum, eps,
    TRACKED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the mean and 1 / sqrt(variance + eps) of every channel; update the running statistics if TRACKED.

    sums are those of `shifted_moments`, added up over all tiles.
    """
    run = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    valid = c < C
    sum_d = tl.load(sums + 2 * run * C + c, mask=valid, other=0.0)
    sum_d2 = tl.load(sums + (2 * run + 1) * C + c, mask=valid, other=0.0)
    d = sum_d / positions
    batch_mean = tl.load(x + run * count + c, mask=valid, other=0.0).to(tl.float32) + d
    squares = sum_d2 - sum_d * d
    variance = tl.where(squares < 0, 0.0, squares) / positions  # rounding may make it negative
    offsets = run * C + c
    tl.store(mean + offsets, batch_mean, mask=valid)
    tl.store(scale + offsets, 1 / tl.sqrt_rn(variance + eps), mask=valid)
    if TRACKED:
        before = tl.load(running_mean + offsets, mask=valid, other=0.0)
        tl.store(running_mean + offsets, before + momentum * (batch_mean - before), mask=valid)
        before = tl.load(running_var + offsets, mask=valid, other=0.0)
        unbiased = variance * (positions / (positions - 1))
        tl.store(running_var + offsets, before + momentum * (unbiased - before), mask=valid)
        if tl.program_id(1) == 0:
            tl.store(batches + run, tl.load(batches + run) + 1)


@triton.jit
def normalize(
    x, mean, scale, weight, bias, out, count, C,
    AFFINE: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute out = (x - mean) * scale * weight + bias; without weight and bias unless AFFINE."""
    run = tl.program_id(1).to(tl.int64)
    offsets, valid, j, c = _tile(count, C, SPAN, BM, BN)
    channel = run * C + c
    value = tl.load(x + run * count + offsets, mask=valid, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + channel, mask=j < SPAN, other=0.0)[None, :]) * tl.load(
        scale + channel, mask=j < SPAN, other=0.0
    )[None, :]
    if AFFINE:
        value = value * tl.load(weight + channel, mask=j < SPAN, other=0.0)[None, :]
        value += tl.load(bias + channel, mask=j < SPAN, other=0.0)[None, :]
    tl.store(out + run * count + offsets, value.to(out.dtype.element_ty), mask=valid)


@triton.jit
def norm_gradient_sums(g, x, mean, scale, sums, count, C, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sum g, and g times the normalized values: the gradients of bias and weight."""
    run = tl.program_id(1).to(tl.int64)
    offsets, valid, j, c = _tile(count, C, SPAN, BM, BN)
    mean_c = tl.load(mean + run * C + c, mask=j < SPAN, other=0.0)[None, :]
    scale_c = tl.load(scale + run * C + c, mask=j < SPAN, other=0.0)[None, :]
    gradient = tl.load(g + run * count + offsets, mask=valid, other=0.0).to(tl.float32)
    value = tl.load(x + run * count + offsets, mask=valid, other=0.0).to(tl.float32)
    _store_column_sums(gradient, gradient * ((value - mean_c) * scale_c), sums, j, SPAN)


@triton.jit
def norm_gradient(
    g, x, mean, scale, weight, gradient_sums, out, count, positions, C,
    AFFINE: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute out = scale * weight * (g - mean(g) - normalized * mean(g * normalized)).

    gradient_sums are those of `norm_gradient_sums`, added up over all tiles.
    """
    run = tl.program_id(1).to(tl.int64)
    offsets, valid, j, c = _tile(count, C, SPAN, BM, BN)
    channel = run * C + c
    column_valid = j < SPAN
    scale_c = tl.load(scale + channel, mask=column_valid, other=0.0)
    mean_c = tl.load(mean + channel, mask=column_valid, other=0.0)
    mean_g = tl.load(gradient_sums + 2 * run * C + c, mask=column_valid, other=0.0) / positions
    mean_gx = tl.load(gradient_sums + (2 * run + 1) * C + c, mask=column_valid, other=0.0) / positions
    gradient = tl.load(g + run * count + offsets, mask=valid, other=0.0).to(tl.float32)
    value = tl.load(x + run * count + offsets, mask=valid, other=0.0).to(tl.float32)
    normalized = (value - mean_c[None, :]) * scale_c[None, :]
    factor = scale_c
    if AFFINE:
        factor = scale_c * tl.load(weight + channel, mask=column_valid, other=0.0)
    value = factor[None, :] * (gradient - mean_g[None, :] - normalized * mean_gx[None, :])
    tl.store(out + run * count + offsets, value.to(out.dtype.element_ty), mask=valid)
