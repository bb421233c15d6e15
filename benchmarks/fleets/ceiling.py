"""What a device can do at most, measured, and what a training step asks of it, counted.

A model-step is `flops` floating-point operations, two for each multiply-add of a convolution or a linear layer: the
forward pass, as many again for the gradient of the weights, and as many for the gradient of the inputs, less those of
the first layer, whose inputs have none: 3 * forward - forward of the first layer. The explicit step with EWC moves 36
bytes a parameter: theta, velocity and the current importance read and written, gradient, anchor and the previous
importance read, 4 bytes each.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fleets.clock import now
from mooring.lab.model.precision import tf32_mode
from mooring.lab.networks.initialization import initial_network
from mooring.lab.streams import Stream

__all__ = ["BYTES", "Work", "copy_rate", "product_rate", "work_of"]

BYTES = 36
"""A parameter's traffic in a step of explicit EWC."""


@dataclass(frozen=True)
class Work:
    """What a model-step asks for.

    Attributes:
        flops: of its products.
        bytes: of its update.
    """

    flops: int
    bytes: int

    def limit_us(self, rate: float, bandwidth: float) -> float:
        """Microseconds at these ceilings, in operations and bytes a second, one after the other."""
        return (self.flops / rate + self.bytes / bandwidth) * 1e6


def work_of(network: str, stream: Stream, batch: int) -> Work:
    """Counted over one forward and backward pass of the network as PyTorch runs it."""
    model = initial_network(network, stream, 0)
    images = torch.rand(2, *stream.shape)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(images), torch.zeros(2, dtype=torch.int64)).backward()
    return Work(counter.get_total_flops() * batch // 2, BYTES * sum(p.numel() for p in model.parameters()))


def product_rate(device: str, dtype: str, size: int | None = None, times: int = 20) -> float:
    """Operations a second of a large square matrix product in that precision, on random numbers."""
    size = size or (8192 if device.startswith("cuda") else 1024)
    kind = {"bf16": torch.bfloat16, "float64": torch.float64}.get(dtype, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    with tf32_mode(dtype):
        return 2 * size**3 * times / _seconds(lambda: torch.matmul(a, b, out=out), device, times)


def copy_rate(device: str, size: int | None = None, times: int = 20) -> float:
    """Bytes a second of a copy within the device's memory, read and written."""
    size = size or (1 << 32 if device.startswith("cuda") else 1 << 27)
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    return 2 * size * times / _seconds(lambda: b.copy_(a), device, times)


def _seconds(action, device: str, times: int) -> float:
    for _ in range(3):
        action()
    began = now(device)
    for _ in range(times):
        action()
    return now(device) - began
