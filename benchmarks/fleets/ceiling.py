"""Measure the peak rates of a device, and count the work of a training step.

A model-step has `flops` floating-point operations, two for each multiply-add of a convolution or a linear layer. The
forward pass, the gradient of the weights and the gradient of the inputs need the same number, except that the first
layer needs no gradient of its inputs: 3 * forward - forward of the first layer. The explicit step with EWC moves 36
bytes per parameter: theta, velocity and the current importance are read and written, and gradient, anchor and the
previous importance are read, 4 bytes each.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fleets.clock import now
from mooring_lab.model.precision import tf32_mode
from mooring_lab.networks.initialization import initial_network
from mooring_lab.streams import Stream

__all__ = ["BYTES_PER_PARAMETER", "Work", "copy_rate", "product_rate", "work_of"]

BYTES_PER_PARAMETER = 36
"""The memory traffic per parameter in a step of explicit EWC."""


@dataclass(frozen=True)
class Work:
    """The work of a model-step.

    Attributes:
        flops: the floating-point operations of its matrix products and convolutions.
        bytes: the memory traffic of its update.
    """

    flops: int
    bytes: int

    def limit_us(self, rate: float, bandwidth: float) -> float:
        """Return the microseconds at these rates, in operations and bytes per second, without overlap."""
        return (self.flops / rate + self.bytes / bandwidth) * 1e6


def work_of(network: str, stream: Stream, batch: int) -> Work:
    """Count the work of one forward and backward pass of the network in PyTorch."""
    model = initial_network(network, stream, 0)
    images = torch.rand(2, *stream.shape)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(images), torch.zeros(2, dtype=torch.int64)).backward()
    return Work(
        counter.get_total_flops() * batch // 2, BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    )


def product_rate(device: str, dtype: str, size: int | None = None, times: int = 20) -> float:
    """Return the operations per second of a large square matrix product in that precision, on random numbers."""
    size = size or (8192 if device.startswith("cuda") else 1024)
    torch_dtype = {"bf16": torch.bfloat16, "float64": torch.float64}.get(dtype, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(torch_dtype) for _ in range(2))
    out = torch.empty_like(a)
    with tf32_mode(dtype):
        return 2 * size**3 * times / _seconds(lambda: torch.matmul(a, b, out=out), device, times)


def copy_rate(device: str, size: int | None = None, times: int = 20) -> float:
    """Return the bytes per second, read and written, of a copy within the device's memory."""
    size = size or (1 << 32 if device.startswith("cuda") else 1 << 27)
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    return 2 * size * times / _seconds(lambda: b.copy_(a), device, times)


def _seconds(action, device: str, times: int) -> float:
    for _ in range(3):
        action()
    start = now(device)
    for _ in range(times):
        action()
    return now(device) - start
