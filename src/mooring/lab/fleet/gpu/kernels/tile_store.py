"""What a kernel does with a tile once it is computed."""

import triton
import triton.language as tl

__all__ = ["ALL", "LARGEST", "activated", "finish", "larger", "place", "shorten"]

LARGEST = tl.constexpr(65504.0)
"""The end of float16's range."""

ALL = tl.constexpr(tl.PropagateNan.ALL)
"""Whatever is compared with a value that is not a number becomes one: a lost run must be seen."""


@triton.jit
def shorten(value):
    """As float16, cut off at the end of its range."""
    return tl.clamp(value, -LARGEST, LARGEST, propagate_nan=ALL).to(tl.float16)


@triton.jit
def larger(one, other):
    """The larger of two, or whichever is not a number."""
    return tl.maximum(one, other, propagate_nan=ALL)


@triton.jit
def place(out, half, at, value, known, HALF: tl.constexpr, SCALE: tl.constexpr):
    """Store a tile, and times SCALE as float16."""
    tl.store(out + at, value.to(out.dtype.element_ty), mask=known)
    if HALF:
        tl.store(half + at, shorten(value * SCALE), mask=known)


@triton.jit
def activated(total, bias, run, n, N, BIAS: tl.constexpr, RELU: tl.constexpr):
    """A tile with its bias, what is below 0 cut off, where these are asked for."""
    if BIAS:
        total += tl.load(bias + run * N + n, mask=n < N, other=0.0)[None, :]
    if RELU:
        total = larger(total, 0.0)
    return total


@triton.jit
def finish(
    total, run, tile, m, n, rows, N, out, half, sums, seen, tiles,
    MASK: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Store a tile. MASK puts 0 where seen is 0; HALF stores it times SCALE as float16, SUMS summed by channel."""
    known = (m < rows)[:, None] & (n < N)[None, :]
    at = run.to(tl.int64) * rows * N + m[:, None] * N + n[None, :]
    if MASK:
        total = tl.where(tl.load(seen + at, mask=known, other=0.0) <= 0, 0.0, total)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)
    if HALF:
        tl.store(half + at, shorten(total * SCALE), mask=known)
    if SUMS:
        tl.store(sums + (run * tiles + tile) * N + n, tl.sum(tl.where(known, total, 0.0), 0), mask=n < N)
