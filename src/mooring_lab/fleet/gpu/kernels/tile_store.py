"""Helpers that finish and store a computed tile: bias, ReLU, mask, float16 copy and sums."""

import triton
import triton.language as tl

FLOAT16_MAX = tl.constexpr(65504.0)
"""The largest finite float16."""

PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)
"""NaN in one operand gives NaN: a run that is no longer finite must be detected."""


@triton.jit
def clamp_to_float16(value):
    """Convert to float16, clamped to its range."""
    return tl.clamp(value, -FLOAT16_MAX, FLOAT16_MAX, propagate_nan=PROPAGATE_NAN).to(tl.float16)


@triton.jit
def maximum_or_nan(a, b):
    """Return the larger of two values, or NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=PROPAGATE_NAN)


@triton.jit
def store_values(out, half, offsets, value, valid, HALF: tl.constexpr, SCALE: tl.constexpr):
    """Store values; HALF also stores them times SCALE as float16."""
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=valid)
    if HALF:
        tl.store(half + offsets, clamp_to_float16(value * SCALE), mask=valid)


@triton.jit
def add_bias_and_relu(total, bias, run, n, N, BIAS: tl.constexpr, RELU: tl.constexpr):
    """Add the bias to a tile if BIAS, then apply a ReLU if RELU."""
    if BIAS:
        total += tl.load(bias + run * N + n, mask=n < N, other=0.0)[None, :]
    if RELU:
        total = maximum_or_nan(total, 0.0)
    return total


@triton.jit
def store_tile(
    total, run, tile, m, n, rows, N, out, half, sums, activation, tiles,
    MASK: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Store a tile of rows m and channels n.

    MASK puts 0 where the activation is not positive. HALF also stores the tile times SCALE as float16, and SUMS its
    sums by channel.
    """
    valid = (m < rows)[:, None] & (n < N)[None, :]
    offsets = run.to(tl.int64) * rows * N + m[:, None] * N + n[None, :]
    if MASK:
        total = tl.where(tl.load(activation + offsets, mask=valid, other=0.0) <= 0, 0.0, total)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=valid)
    if HALF:
        tl.store(half + offsets, clamp_to_float16(total * SCALE), mask=valid)
    if SUMS:
        tl.store(sums + (run * tiles + tile) * N + n, tl.sum(tl.where(valid, total, 0.0), 0), mask=n < N)
