"""What is done to images between convolutions, and before the first."""

import triton
import triton.language as tl

from mooring.lab.fleet.gpu.kernels.tile_store import finish, larger, place, shorten

__all__ = ["gather", "halve", "mask", "pool", "unpool", "widen"]


@triton.jit
def gather(images, indices, out, pixels, C, B: tl.constexpr):
    """out[i, pixel, c] = images[indices[i], c, pixel] / 127.5 - 1: bytes chosen, scaled and laid channels last."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    there = at < pixels * C
    chosen = tl.load(indices + i)
    value = tl.load(images + chosen * pixels * C + (at % C) * pixels + at // C, mask=there, other=0)
    tl.store(out + i * pixels * C + at, tl.div_rn(value.to(tl.float32), 127.5) - 1, mask=there)


@triton.jit
def halve(x, half, count, B: tl.constexpr):
    """x as float16."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(half + at, shorten(tl.load(x + at, mask=at < count, other=0.0)), mask=at < count)


@triton.jit
def mask(
    g, seen, out, half, sums, rows, N,
    MASK: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out = g, 0 where seen is 0."""
    run = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    m = tile * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    at = run.to(tl.int64) * rows * N + m[:, None] * N + n[None, :]
    value = tl.load(g + at, mask=(m < rows)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    tiles = tl.num_programs(0) // blocks
    finish(value, run, tile, m, n, rows, N, out, half, sums, seen, tiles, MASK, HALF, SCALE, SUMS)


@triton.jit
def pool(
    x, out, half, codes, count, height, width, C,
    RELU: tl.constexpr, HALF: tl.constexpr, CODED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The largest of each two by two positions, channel by channel.

    CODED stores which one it was: 0 to 3, the first where several are; with RELU 4 where it is not above 0.
    """
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = at < count
    c, column, row = at % C, at // C % (width // 2), at // C // (width // 2)  # rows of all images: height is even
    corner = x + (2 * row * width + 2 * column) * C + c
    one = tl.load(corner, mask=there, other=0.0)
    two = tl.load(corner + C, mask=there, other=0.0)
    three = tl.load(corner + width * C, mask=there, other=0.0)
    four = tl.load(corner + width * C + C, mask=there, other=0.0)
    largest = larger(larger(one, two), larger(three, four))
    tl.store(out + at, largest, mask=there)
    if HALF:
        tl.store(half + at, shorten(largest.to(tl.float32)), mask=there)
    if CODED:
        code = tl.where(one == largest, 0, tl.where(two == largest, 1, tl.where(three == largest, 2, 3)))
        if RELU:
            code = tl.where(largest <= 0, 4, code)
        tl.store(codes + at, code.to(tl.uint8), mask=there)


@triton.jit
def unpool(
    g, codes, out, half, sums, rows, width, N, tiles,
    HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of `pool`: g goes to the position that its code names, and nowhere where that is 4.

    rows counts the pooled positions of a run, width is that of the images before.
    """
    run = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    m = tile * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    known = (m < rows)[:, None] & (n < N)[None, :]
    at = run.to(tl.int64) * rows * N + m[:, None] * N + n[None, :]
    code = tl.load(codes + at, mask=known, other=4)
    value = tl.where(code == 4, 0.0, tl.load(g + at, mask=known, other=0.0).to(tl.float32))
    column, row = m % (width // 2), m // (width // 2)
    corner = run.to(tl.int64) * 4 * rows * N + ((2 * row * width + 2 * column) * N)[:, None] + n[None, :]
    place(out, half, corner, tl.where(code == 0, value, 0.0), known, HALF, SCALE)
    place(out, half, corner + N, tl.where(code == 1, value, 0.0), known, HALF, SCALE)
    place(out, half, corner + width * N, tl.where(code == 2, value, 0.0), known, HALF, SCALE)
    place(out, half, corner + width * N + N, tl.where(code == 3, value, 0.0), known, HALF, SCALE)
    if SUMS:
        tl.store(sums + (run * tiles + tile) * N + n, tl.sum(value, 0), mask=n < N)


@triton.jit
def widen(x, out, rows, more, C: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    """For each run, rows of C values as more rows of N; what is new is 0."""
    run = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    row, n = at // N, at % N
    there = row < more
    value = tl.load(x + (run * rows + row) * C + n, mask=(row < rows) & (n < C), other=0.0)
    tl.store(out + run * more * N + at, value.to(out.dtype.element_ty), mask=there)
