"""Kernels on images before and between convolutions: gathering, conversion, masks, pools and padding of channels."""

import triton
import triton.language as tl

from mooring_lab.fleet.gpu.kernels.tile_store import clamp_to_float16, maximum_or_nan, store_tile, store_values


@triton.jit
def gather_images(images, indices, out, pixels, C, B: tl.constexpr):
    """Compute out[i, pixel, c] = images[indices[i], c, pixel] / 127.5 - 1: bytes selected, scaled, channels last."""
    i = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * B + tl.arange(0, B)
    valid = offsets < pixels * C
    index = tl.load(indices + i)
    value = tl.load(images + index * pixels * C + (offsets % C) * pixels + offsets // C, mask=valid, other=0)
    tl.store(out + i * pixels * C + offsets, tl.div_rn(value.to(tl.float32), 127.5) - 1, mask=valid)


@triton.jit
def to_float16(x, half, count, B: tl.constexpr):
    """Convert x to float16."""
    offsets = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(
        half + offsets, clamp_to_float16(tl.load(x + offsets, mask=offsets < count, other=0.0)), mask=offsets < count
    )


@triton.jit
def mask_gradient(
    g, activation, out, half, sums, rows, N,
    MASK: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute out = g, with 0 where the activation is not positive if MASK: the gradient of a ReLU."""
    run = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    m = tile * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    offsets = run.to(tl.int64) * rows * N + m[:, None] * N + n[None, :]
    value = tl.load(g + offsets, mask=(m < rows)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    tiles = tl.num_programs(0) // blocks
    store_tile(value, run, tile, m, n, rows, N, out, half, sums, activation, tiles, MASK, HALF, SCALE, SUMS)


@triton.jit
def max_pool(
    x, out, half, codes, count, height, width, C,
    RELU: tl.constexpr, HALF: tl.constexpr, CODED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute the maximum of each two by two positions, channel by channel.

    CODED stores the position of the maximum, 0 to 3, the first of equal ones; with RELU, 4 if it is not positive.
    """
    offsets = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    valid = offsets < count
    c, column, row = (
        offsets % C,
        offsets // C % (width // 2),
        offsets // C // (width // 2),
    )  # rows of all images: height is even
    corner = x + (2 * row * width + 2 * column) * C + c
    one = tl.load(corner, mask=valid, other=0.0)
    two = tl.load(corner + C, mask=valid, other=0.0)
    three = tl.load(corner + width * C, mask=valid, other=0.0)
    four = tl.load(corner + width * C + C, mask=valid, other=0.0)
    largest = maximum_or_nan(maximum_or_nan(one, two), maximum_or_nan(three, four))
    tl.store(out + offsets, largest, mask=valid)
    if HALF:
        tl.store(half + offsets, clamp_to_float16(largest.to(tl.float32)), mask=valid)
    if CODED:
        code = tl.where(one == largest, 0, tl.where(two == largest, 1, tl.where(three == largest, 2, 3)))
        if RELU:
            code = tl.where(largest <= 0, 4, code)
        tl.store(codes + offsets, code.to(tl.uint8), mask=valid)


@triton.jit
def max_pool_gradient(
    g, codes, out, half, sums, rows, width, N, tiles,
    HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of `max_pool`: g at the position that its code names, 0 elsewhere; code 4 gives 0 only.

    rows is the number of pooled positions of a run, width that of the images before the pool.
    """
    run = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    m = tile * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    valid = (m < rows)[:, None] & (n < N)[None, :]
    offsets = run.to(tl.int64) * rows * N + m[:, None] * N + n[None, :]
    code = tl.load(codes + offsets, mask=valid, other=4)
    value = tl.where(code == 4, 0.0, tl.load(g + offsets, mask=valid, other=0.0).to(tl.float32))
    column, row = m % (width // 2), m // (width // 2)
    corner = run.to(tl.int64) * 4 * rows * N + ((2 * row * width + 2 * column) * N)[:, None] + n[None, :]
    store_values(out, half, corner, tl.where(code == 0, value, 0.0), valid, HALF, SCALE)
    store_values(out, half, corner + N, tl.where(code == 1, value, 0.0), valid, HALF, SCALE)
    store_values(out, half, corner + width * N, tl.where(code == 2, value, 0.0), valid, HALF, SCALE)
    store_values(out, half, corner + width * N + N, tl.where(code == 3, value, 0.0), valid, HALF, SCALE)
    if SUMS:
        tl.store(sums + (run * tiles + tile) * N + n, tl.sum(value, 0), mask=n < N)


@triton.jit
def pad_channels(x, out, rows, padded_rows, C: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    """Copy each run's rows of C values to padded_rows rows of N values; new values are 0."""
    run = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    row, n = offsets // N, offsets % N
    valid = row < padded_rows
    value = tl.load(x + (run * rows + row) * C + n, mask=(row < rows) & (n < C), other=0.0)
    tl.store(out + run * padded_rows * N + offsets, value.to(out.dtype.element_ty), mask=valid)
