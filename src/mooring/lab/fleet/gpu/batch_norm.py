"""The batch norm of a whole stack of networks on a GPU, by kernels of our own: each run over its own samples."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.backends.kernels.launch import DryRun, dry_run, launch
from mooring.lab.fleet.gpu.conv_tiles import next_power
from mooring.lab.fleet.gpu.convolution import has_kernels

with suppress(ImportError):  # no GPU compiler here: torch's own norm takes all runs as channels
    from mooring.lab.fleet.gpu import kernels

__all__ = ["normalised", "takes_norm"]

Running = tuple[Tensor, Tensor, Tensor]

WIDE = 512
"""Columns of a tile at most."""

VALUES = 4096
"""Of a tile."""

MORE = 4
"""So many times as many values where they are summed."""


def takes_norm(x: Tensor) -> bool:
    """Whether the kernels do a batch norm of x: on a GPU, in float32 or bfloat16."""
    return has_kernels(x.device) and x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 0


def normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    runs: int,
    *,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """All runs of a batch norm; channels last in memory, as the result has them.

    Args:
        x: of shape (runs * batch, channels, ...).
        weight: of shape (runs, channels), or None.
        bias: the same, and None where weight is.
        running: the mean and the variance that are kept, of the same shape, and how many batches were seen, (runs,).
        runs: how many there are.
        training: whether statistics are the batch's own; then the running ones go along.
        momentum: by how much.
        eps: added to the variance.
    """
    last = x.movedim(1, -1).contiguous()
    if training:
        if last.numel() == runs * last.shape[-1]:  # as torch's own does
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        _rehearse(last, weight, bias, running, runs)
        out: Tensor = BatchNorm.apply(last, weight, bias, running, runs, momentum, eps)  # type: ignore[no-untyped-call]
        return out.movedim(-1, 1)
    assert running is not None
    mean, scale = running[0], torch.rsqrt(running[1] + eps)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))):
        return _normalise(last, mean, scale, weight, bias, _Plan.of(last, runs)).movedim(-1, 1)
    rows = (last.view(runs, -1, last.shape[-1]) - mean.unsqueeze(1)) * scale.unsqueeze(1)
    if weight is not None and bias is not None:
        rows = torch.addcmul(bias.unsqueeze(1), rows, weight.unsqueeze(1))
    return rows.to(x.dtype).view(last.shape).movedim(-1, 1)


@dataclass(frozen=True)
class _Plan:
    """In what tiles a norm is computed.

    Attributes:
        runs, channels: how many there are.
        count: values of a run.
        span: columns of a row, some times as many as channels.
        bm, bn: rows and columns of a tile.
    """

    runs: int
    channels: int
    count: int
    span: int
    bm: int
    bn: int

    @classmethod
    def of(cls, x: Tensor, runs: int) -> "_Plan":
        """For x of shape (runs * batch, ..., channels)."""
        channels, count = x.shape[-1], x.numel() // runs
        # the fewest empty columns; of equals the widest, which is read in longer rows
        times = min(range(1, max(1, WIDE // channels) + 1), key=lambda k: (next_power(k * channels) / k, -k))
        span = times * channels
        bn = max(16, min(WIDE, next_power(span)))
        return cls(runs, channels, count, span, VALUES // bn, bn)

    @property
    def places(self) -> int:
        """Values of a channel of a run."""
        return self.count // self.channels

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The programs, where each has so many rows."""
        return -(-self.count // (self.span * rows)), self.runs, -(-self.span // self.bn)

    def shape(self, rows: int) -> dict[str, Any]:
        """What every kernel is told."""
        return {"SPAN": self.span, "BM": rows, "BN": self.bn, "num_warps": 8 if self.bn > 128 else 4}

    def each(self, kernel: Any, *told: object, **options: object) -> None:
        """Let a kernel go over all values."""
        launch(kernel, self.grid(self.bm), *told, **options, **self.shape(self.bm))

    def summed(self, kernel: Any, *told: Tensor) -> Tensor:
        """What a kernel sums by channel, two numbers each: of shape (runs, 2, channels)."""
        rows = MORE * self.bm
        grid = self.grid(rows)
        sums = torch.empty(self.runs, grid[0], 2, self.span, dtype=torch.float32, device=told[0].device)
        launch(kernel, grid, *told, sums, self.count, self.channels, **self.shape(rows))
        return sums.view(self.runs, grid[0], 2, -1, self.channels).sum((1, 3))


_rehearsed: set[Hashable] = set()


def _rehearse(x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None, runs: int) -> None:
    """Have every kernel of a norm compiled, there and back, where this is the first of its shape."""
    key = (x.shape[-1], x.numel() // runs, x.dtype, x.device, weight is None, running is None)
    if key not in _rehearsed:
        _rehearsed.add(key)
        with torch.no_grad(), dry_run():
            ctx = DryRun((True,))
            BatchNorm.backward(ctx, BatchNorm.forward(ctx, x, weight, bias, running, runs, 0.0, 0.0))


class BatchNorm(torch.autograd.Function):
    """out = (x - mean) / sqrt(variance + eps) * weight + bias, channel by channel of each run; channels are last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running | None,
        runs: int,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Sums of every part, then statistics, then the result."""
        plan = _Plan.of(x, runs)
        sums = plan.summed(kernels.moments, x)
        mean, scale = (torch.empty(runs, plan.channels, dtype=torch.float32, device=x.device) for _ in range(2))
        block = min(128, next_power(plan.channels))
        launch(
            kernels.settle, (runs, -(-plan.channels // block)),
            sums, x, mean, scale, *(running or (mean, scale, mean)), plan.count, plan.places, plan.channels,
            momentum, eps, TRACKED=running is not None, BC=block,
        )  # fmt: skip
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.plan, ctx.biased = plan, bias is not None
        return _normalise(x, mean, scale, weight, bias, plan)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, mean, scale, weight = ctx.saved_tensors
        plan, g = ctx.plan, g.contiguous()
        found = plan.summed(kernels.norm_sums, g, x, mean, scale)
        out = None
        if ctx.needs_input_grad[0]:
            out = torch.empty_like(x)
            told = (mean if weight is None else weight, found, out, plan.count, plan.places, plan.channels)
            plan.each(kernels.norm_gradient, g, x, mean, scale, *told, AFFINE=weight is not None)
        slopes = (found[:, 1], found[:, 0]) if weight is not None else (None, None)
        return out, *slopes, None, None, None, None


def _normalise(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, plan: _Plan
) -> Tensor:
    out = torch.empty_like(x)
    told = (mean, mean) if weight is None or bias is None else (weight, bias)
    affine = weight is not None
    plan.each(kernels.normalise, x, mean, scale, *told, out, plan.count, plan.channels, AFFINE=affine)
    return out
