"""A convolution of every run, and the gradient of its inputs: an implicit matrix product for each tile."""

import triton
import triton.language as tl

from mooring_lab.fleet.gpu.kernels.tile_store import add_bias_and_relu, store_tile


@triton.jit
def convolve(
    x, w, bias, out, half, sums, activation,
    height, width, out_height, out_width, rows, x_run, w_run, w_output, w_tap, w_channel,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr, FLAT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    MASK: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out[m, n] = sum over taps and channels of x[m shifted by the tap, c] * w[n, tap, c], plus the bias.

    Images may have any size. TRANSPOSED computes the gradient of the inputs from that of the outputs. FLAT takes taps
    and channels as one dimension, for the few channels of an input image.
    """
    run = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    m = tile * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    column, row, image = m % out_width, (m // out_width) % out_height, m // (out_width * out_height)
    m_valid = m < rows
    x += run.to(tl.int64) * x_run
    w += run.to(tl.int64) * w_run
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if FLAT:
        j = tl.arange(0, BK)
        tap, c = j // C, j % C
        h = row[:, None] * STRIDE + (tap // KW)[None, :] - PAD
        v = column[:, None] * STRIDE + (tap % KW)[None, :] - PAD
        j_valid = (j < KH * KW * C)[None, :]
        inside = m_valid[:, None] & j_valid & (h >= 0) & (h < height) & (v >= 0) & (v < width)
        a = tl.load(x + ((image[:, None] * height + h) * width + v) * C + c[None, :], mask=inside, other=0.0)
        offsets = n[None, :] * w_output + tap[:, None] * w_tap + c[:, None] * w_channel
        b = tl.load(w + offsets, mask=(n < N)[None, :] & (j < KH * KW * C)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    else:
        parts = tl.cdiv(C, BK)
        for k in range(KH * KW * parts):
            tap = k // parts
            c = (k % parts) * BK + tl.arange(0, BK)
            if TRANSPOSED:
                h = row + PAD - tap // KW
                v = column + PAD - tap % KW
                inside = m_valid & (h >= 0) & (v >= 0)
                if STRIDE > 1:
                    inside = inside & (h % STRIDE == 0) & (v % STRIDE == 0)
                    h = h // STRIDE
                    v = v // STRIDE
            else:
                h = row * STRIDE + tap // KW - PAD
                v = column * STRIDE + tap % KW - PAD
                inside = m_valid & (h >= 0) & (v >= 0)
            inside = inside & (h < height) & (v < width)
            start = ((image * height + h) * width + v) * C
            a = tl.load(x + start[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
            offsets = n[None, :] * w_output + tap * w_tap + c[:, None] * w_channel
            b = tl.load(w + offsets, mask=(n < N)[None, :] & (c < C)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="tf32")
    total = add_bias_and_relu(total, bias, run, n, N, BIAS, RELU)
    tiles = tl.num_programs(0) // blocks
    store_tile(total, run, tile, m, n, rows, N, out, half, sums, activation, tiles, MASK, HALF, SCALE, SUMS)


@triton.jit
def _wait_for_products(total):
    """Return the same value once every product that adds to it is done: the copies vanish, the wait for them stays.

    On compute capability 9 images are multiplied out of registers, and Triton (3.6; triton-lang/triton#9433) lets
    three products run on while the next images are loaded into registers that these products still read.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def convolve_tiles(
    x, w, bias, out, half, sums, activation, height, width, rows, C, N, weight_width,
    KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr, TRANSPOSED: tl.constexpr, CHANNELS_FIRST: tl.constexpr,
    SWAP_OPERANDS: tl.constexpr, WAIT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    MASK: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, SUMS: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the same, where a tile is a box of whole image rows, which the memory unit fetches with 0 outside.

    x describes (runs, batch, height, width, C) in boxes of BI images of BH rows. w describes (runs, N, taps * C), or
    with CHANNELS_FIRST (runs, C, taps * weight_width). SWAP_OPERANDS computes the transposed tile, weights times
    images: both operands are multiplied where they were fetched to. WAIT finishes the products of each step before the
    next one.
    """
    BM: tl.constexpr = BI * BH * BW
    run = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BN
    image = tile * BM // (height * width)
    top = tile * BM % (height * width) // width
    total = tl.zeros((BN, BM) if SWAP_OPERANDS else (BM, BN), dtype=tl.float32)
    parts = tl.cdiv(C, BK)
    for k in range(KH * KW * parts):
        tap = k // parts
        c = (k % parts) * BK
        if TRANSPOSED:
            h = top + PAD - tap // KW
            v = PAD - tap % KW
        else:
            h = top + tap // KW - PAD
            v = tap % KW - PAD
        images = x.load([run, image, h, v, c]).reshape(BM, BK)
        if CHANNELS_FIRST:
            weights = w.load([run, c, tap * weight_width + first]).reshape(BK, BN).T
        else:
            weights = w.load([run, first, tap * C + c]).reshape(BN, BK)
        if SWAP_OPERANDS:
            total = tl.dot(weights, images.T, total, input_precision="tf32")
        else:
            total = tl.dot(images, weights.T, total, input_precision="tf32")
            if WAIT:
                total = _wait_for_products(total)
    if SWAP_OPERANDS:
        total = total.T
    m = tile * BM + tl.arange(0, BM)
    n = first + tl.arange(0, BN)
    total = add_bias_and_relu(total, bias, run, n, N, BIAS, RELU)
    tiles = tl.num_programs(0) // blocks
    store_tile(total, run, tile, m, n, rows, N, out, half, sums, activation, tiles, MASK, HALF, SCALE, SUMS)


@triton.jit
def transpose_weights(w, out, N, C, TAPS: tl.constexpr, B: tl.constexpr):
    """Compute out[c, tap, n] = w[n, tap, c] for each run."""
    run = tl.program_id(1).to(tl.int64)
    K = TAPS * C
    blocks = tl.cdiv(K, B)
    n = (tl.program_id(0) // blocks) * B + tl.arange(0, B)
    k = (tl.program_id(0) % blocks) * B + tl.arange(0, B)
    tile = tl.load(w + run * N * K + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    row = (k % C) * TAPS + k // C
    transposed = out + run * N * K + row[:, None] * N + n[None, :]
    tl.store(transposed, tl.trans(tile), mask=(k < K)[:, None] & (n < N)[None, :])
