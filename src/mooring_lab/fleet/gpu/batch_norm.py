"""Batch norm of a whole stack of networks on a GPU, by our own kernels: each run over its own samples."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.backends.kernels.launch import DryRunContext, dry_run, launch
from mooring_lab.fleet.gpu.conv_tiles import next_power_of_two
from mooring_lab.fleet.gpu.convolution import has_kernels

with suppress(ImportError):  # without Triton, torch's own batch norm takes the runs as channels
    from mooring_lab.fleet.gpu import kernels

RunningStatistics = tuple[Tensor, Tensor, Tensor]

MAX_COLUMNS = 512
"""Largest number of columns of a tile."""

TILE_VALUES = 4096
"""Number of values of a tile."""

SUM_ROWS_FACTOR = 4
"""A tile has this many times as many rows in kernels that sum."""


def supports_batch_norm(x: Tensor) -> bool:
    """Return whether the kernels support a batch norm of x: on a GPU, in float32 or bfloat16."""
    return has_kernels(x.device) and x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 0


def fused_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStatistics | None,
    runs: int,
    *,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Apply the batch norm of every run; the result has its channels last in memory, and x should have them too.

    Args:
        x: of shape (runs * batch, channels, ...).
        weight: of shape (runs, channels), or None.
        bias: of the same shape, and None if weight is.
        running: running mean and variance of the same shape, and the number of batches so far, of shape (runs,).
        runs: the number of runs.
        training: whether to use the statistics of the batch and update the running ones.
        momentum: of the running statistics.
        eps: added to the variance.
    """
    last = x.movedim(1, -1).contiguous()
    if training:
        if last.numel() == runs * last.shape[-1]:  # as torch's own batch norm does
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        _compile_kernels(last, weight, bias, running, runs)
        out: Tensor = FusedBatchNorm.apply(last, weight, bias, running, runs, momentum, eps)  # type: ignore[no-untyped-call]
        return out.movedim(-1, 1)
    assert running is not None
    mean, scale = running[0], torch.rsqrt(running[1] + eps)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))):
        return _normalize(last, mean, scale, weight, bias, _Tiling.of(last, runs)).movedim(-1, 1)
    rows = (last.view(runs, -1, last.shape[-1]) - mean.unsqueeze(1)) * scale.unsqueeze(1)
    if weight is not None and bias is not None:
        rows = torch.addcmul(bias.unsqueeze(1), rows, weight.unsqueeze(1))
    return rows.to(x.dtype).view(last.shape).movedim(-1, 1)


@dataclass(frozen=True)
class _Tiling:
    """The tiles in which a batch norm is computed.

    Attributes:
        runs, channels: their numbers.
        count: the number of values of a run.
        span: the number of columns of a row, a multiple of the number of channels.
        bm, bn: rows and columns of a tile.
    """

    runs: int
    channels: int
    count: int
    span: int
    bm: int
    bn: int

    @classmethod
    def of(cls, x: Tensor, runs: int) -> "_Tiling":
        """Choose the tiles for x of shape (runs * batch, ..., channels)."""
        channels, count = x.shape[-1], x.numel() // runs
        # the fewest empty columns; of equal choices the widest, because longer rows are read faster
        times = min(
            range(1, max(1, MAX_COLUMNS // channels) + 1), key=lambda k: (next_power_of_two(k * channels) / k, -k)
        )
        span = times * channels
        bn = max(16, min(MAX_COLUMNS, next_power_of_two(span)))
        return cls(runs, channels, count, span, TILE_VALUES // bn, bn)

    @property
    def positions(self) -> int:
        """Return the number of values of a channel of a run."""
        return self.count // self.channels

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return the grid of programs for tiles with this many rows."""
        return -(-self.count // (self.span * rows)), self.runs, -(-self.span // self.bn)

    def options(self, rows: int) -> dict[str, Any]:
        """Return the options that every kernel takes."""
        return {"SPAN": self.span, "BM": rows, "BN": self.bn, "num_warps": 8 if self.bn > 128 else 4}

    def launch_elementwise(self, kernel: Any, *arguments: object, **options: object) -> None:
        """Launch a kernel over all values."""
        launch(kernel, self.grid(self.bm), *arguments, **options, **self.options(self.bm))

    def launch_sums(self, kernel: Any, *arguments: Tensor) -> Tensor:
        """Launch a kernel that sums two quantities by channel, and return the sums, of shape (runs, 2, channels)."""
        rows = SUM_ROWS_FACTOR * self.bm
        grid = self.grid(rows)
        sums = torch.empty(self.runs, grid[0], 2, self.span, dtype=torch.float32, device=arguments[0].device)
        launch(kernel, grid, *arguments, sums, self.count, self.channels, **self.options(rows))
        return sums.view(self.runs, grid[0], 2, -1, self.channels).sum((1, 3))


_compiled: set[Hashable] = set()


def _compile_kernels(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStatistics | None, runs: int
) -> None:
    """Compile every kernel of the forward and backward pass, on the first call with this shape."""
    key = (x.shape[-1], x.numel() // runs, x.dtype, x.device, weight is None, running is None)
    if key not in _compiled:
        _compiled.add(key)
        with torch.no_grad(), dry_run():
            ctx = DryRunContext((True,))
            FusedBatchNorm.backward(ctx, FusedBatchNorm.forward(ctx, x, weight, bias, running, runs, 0.0, 0.0))


class FusedBatchNorm(torch.autograd.Function):
    """out = (x - mean) / sqrt(variance + eps) * weight + bias for each channel of each run; channels are last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: RunningStatistics | None,
        runs: int,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Compute the sums of each tile, then the statistics, then the result."""
        tiling = _Tiling.of(x, runs)
        sums = tiling.launch_sums(kernels.shifted_moments, x)
        mean, scale = (torch.empty(runs, tiling.channels, dtype=torch.float32, device=x.device) for _ in range(2))
        block = min(128, next_power_of_two(tiling.channels))
        launch(
            kernels.batch_statistics, (runs, -(-tiling.channels // block)),
            sums, x, mean, scale, *(running or (mean, scale, mean)), tiling.count, tiling.positions, tiling.channels,
            momentum, eps, TRACKED=running is not None, BC=block,
        )  # fmt: skip
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.tiling = tiling
        return _normalize(x, mean, scale, weight, bias, tiling)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x, weight and bias."""
        x, mean, scale, weight = ctx.saved_tensors
        tiling, g = ctx.tiling, g.contiguous()
        sums = tiling.launch_sums(kernels.norm_gradient_sums, g, x, mean, scale)
        out = None
        if ctx.needs_input_grad[0]:
            out = torch.empty_like(x)
            arguments = (mean if weight is None else weight, sums, out, tiling.count, tiling.positions, tiling.channels)
            tiling.launch_elementwise(kernels.norm_gradient, g, x, mean, scale, *arguments, AFFINE=weight is not None)
        parameter_gradients = (sums[:, 1], sums[:, 0]) if weight is not None else (None, None)
        return out, *parameter_gradients, None, None, None, None


def _normalize(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, tiling: _Tiling
) -> Tensor:
    out = torch.empty_like(x)
    factors = (mean, mean) if weight is None or bias is None else (weight, bias)
    affine = weight is not None
    tiling.launch_elementwise(
        kernels.normalize, x, mean, scale, *factors, out, tiling.count, tiling.channels, AFFINE=affine
    )
    return out
