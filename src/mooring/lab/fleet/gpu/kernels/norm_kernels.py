"""Batch norms of every run: statistics of each channel, what they make of the images, and the way back.

Some positions in a row are taken as one row of SPAN columns, so that few columns of a tile stay empty where there are
few channels: column j belongs to channel j % C.
"""

import triton
import triton.language as tl

__all__ = ["moments", "norm_gradient", "norm_sums", "normalise", "settle"]


@triton.jit
def _tile(count, C, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where the values of this program's tile lie in its run, which of them there are, and each column's channel."""
    j = tl.program_id(2) * BN + tl.arange(0, BN)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    at = m[:, None] * SPAN + j[None, :]
    return at, (at < count) & (j < SPAN)[None, :], j, j % C


@triton.jit
def _sum(one, other, sums, j, SPAN: tl.constexpr):
    """Store the sums of two tiles by column."""
    place = ((tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2) * SPAN + j
    tl.store(sums + place, tl.sum(one, 0), mask=j < SPAN)
    tl.store(sums + place + SPAN, tl.sum(other, 0), mask=j < SPAN)


@triton.jit
def moments(x, sums, count, C, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sums of d and of d^2, where d is the distance of a value to the first of its run and channel."""
    run = tl.program_id(1).to(tl.int64)
    at, known, j, c = _tile(count, C, SPAN, BM, BN)
    home = tl.load(x + run * count + c, mask=j < SPAN, other=0.0).to(tl.float32)[None, :]
    d = tl.where(known, tl.load(x + run * count + at, mask=known, other=0.0).to(tl.float32) - home, 0.0)
    _sum(d, d * d, sums, j, SPAN)


@triton.jit
def settle(
    sums, x, mean, scale, running_mean, running_var, seen, count, places, C, momentum, eps,
    TRACKED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The mean, and 1 / sqrt(variance + eps), of every channel; what is kept about batches goes along where TRACKED.

    sums are those of `moments`, all of a channel together.
    """
    run = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = c < C
    one = tl.load(sums + 2 * run * C + c, mask=there, other=0.0)
    other = tl.load(sums + (2 * run + 1) * C + c, mask=there, other=0.0)
    d = one / places
    found = tl.load(x + run * count + c, mask=there, other=0.0).to(tl.float32) + d
    left = other - one * d
    variance = tl.where(left < 0, 0.0, left) / places  # rounding may leave less than nothing
    at = run * C + c
    tl.store(mean + at, found, mask=there)
    tl.store(scale + at, 1 / tl.sqrt_rn(variance + eps), mask=there)
    if TRACKED:
        before = tl.load(running_mean + at, mask=there, other=0.0)
        tl.store(running_mean + at, before + momentum * (found - before), mask=there)
        before = tl.load(running_var + at, mask=there, other=0.0)
        unbiased = variance * (places / (places - 1))
        tl.store(running_var + at, before + momentum * (unbiased - before), mask=there)
        if tl.program_id(1) == 0:
            tl.store(seen + run, tl.load(seen + run) + 1)


@triton.jit
def normalise(
    x, mean, scale, weight, bias, out, count, C,
    AFFINE: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out = (x - mean) * scale * weight + bias."""
    run = tl.program_id(1).to(tl.int64)
    at, known, j, c = _tile(count, C, SPAN, BM, BN)
    own = run * C + c
    value = tl.load(x + run * count + at, mask=known, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + own, mask=j < SPAN, other=0.0)[None, :]) * tl.load(
        scale + own, mask=j < SPAN, other=0.0
    )[None, :]
    if AFFINE:
        value = value * tl.load(weight + own, mask=j < SPAN, other=0.0)[None, :]
        value += tl.load(bias + own, mask=j < SPAN, other=0.0)[None, :]
    tl.store(out + run * count + at, value.to(out.dtype.element_ty), mask=known)


@triton.jit
def norm_sums(g, x, mean, scale, sums, count, C, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sums of g, and of g times what was normalised: the gradients of bias and weight."""
    run = tl.program_id(1).to(tl.int64)
    at, known, j, c = _tile(count, C, SPAN, BM, BN)
    middle = tl.load(mean + run * C + c, mask=j < SPAN, other=0.0)[None, :]
    width = tl.load(scale + run * C + c, mask=j < SPAN, other=0.0)[None, :]
    slope = tl.load(g + run * count + at, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + run * count + at, mask=known, other=0.0).to(tl.float32)
    _sum(slope, slope * ((value - middle) * width), sums, j, SPAN)


@triton.jit
def norm_gradient(
    g, x, mean, scale, weight, found, out, count, places, C,
    AFFINE: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out = scale * weight * (g - mean of g - normalised * mean of g * normalised); found has the two sums."""
    run = tl.program_id(1).to(tl.int64)
    at, known, j, c = _tile(count, C, SPAN, BM, BN)
    own = run * C + c
    there = j < SPAN
    width = tl.load(scale + own, mask=there, other=0.0)
    middle = tl.load(mean + own, mask=there, other=0.0)
    one = tl.load(found + 2 * run * C + c, mask=there, other=0.0) / places
    other = tl.load(found + (2 * run + 1) * C + c, mask=there, other=0.0) / places
    slope = tl.load(g + run * count + at, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + run * count + at, mask=known, other=0.0).to(tl.float32)
    normal = (value - middle[None, :]) * width[None, :]
    steep = width
    if AFFINE:
        steep = width * tl.load(weight + own, mask=there, other=0.0)
    value = steep[None, :] * (slope - one[None, :] - normal * other[None, :])
    tl.store(out + run * count + at, value.to(out.dtype.element_ty), mask=known)
