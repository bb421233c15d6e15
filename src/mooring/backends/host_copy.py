"""A tensor on its way from a GPU to the host, which waits only when it reads the values."""

from typing import Any

import torch
from torch import Tensor


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a GPU's tensor on the host, which is complete when the GPU has done what it was given so far."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class HostCopy:
    """A copy of a tensor in the host's memory.

    Args:
        tensor: the tensor, on any device.

    Attributes:
        ready: whether the values are there without waiting.

    Example:
        >>> copy = HostCopy(torch.tensor([1.0, 2.0]))
        >>> copy.ready, copy.tolist()
        (True, [1.0, 2.0])
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = pinned_copy(tensor)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.cpu()
        self.ready = self._copied is None

    def read(self) -> Tensor:
        """Return the tensor on the host; wait for it if need be."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def tolist(self) -> Any:
        """Return the values; wait for them if need be."""
        return self.read().tolist()
