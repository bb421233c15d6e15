"""Memory: in what form, and where, anchors and importances are kept."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mooring.errors import MooringError, check_whole
from mooring.importance import Importance
from mooring.pulls import ParameterPull, Pull
from mooring.state.quantization import QuantizedImportance, block_of

__all__ = ["Memory"]

Narrow = torch.dtype | None
"""A floating-point dtype; None is float32, or the parameter's own where wider."""


@dataclass(frozen=True)
class Memory:
    """How much is kept for each parameter; by default everything in full, on the parameter's device.

    docs/memory.md has the bytes of each mode, and what each of them changes.

    Args:
        anchor: dtype of anchors. By default each parameter's own, which loses nothing. A narrower one moves what it
            holds: a float32 weight whose anchor is bfloat16 is pulled to a value up to 2^-8 of itself away.
        previous: dtype of the importance over past tasks, float32 or wider by default; or "8bit", one byte for each
            weight and two numbers for each block of up to 256 (`mooring.state.quantization` states the error bound).
        current: dtype of the importance on this task, float32 or wider by default; what else an importance keeps stays
            there. "none" keeps nothing while training: importance then comes from data alone, as with
            `attach(reference=...)` or `consolidate(data=...)`. For pulls that do not read it.
        host: anchors are kept in pinned host memory and copied to the device ahead of their use.
        staging: bytes on the device that they pass through, in two halves; a larger parameter has a room of its size.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(256, 64, bias=False).to(torch.bfloat16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> lean = Memory(previous="8bit", current="none")
        >>> data = [torch.randn(8, 256, dtype=torch.bfloat16) for _ in range(4)]
        >>> moor = mooring.attach(model, optimizer, reference=data, memory=lean)
        >>> kept = sum(t.nbytes for name, t in moor.state_dict().items() if name != "mooring")
        >>> round(kept / model.weight.numel(), 2)  # 2 for the anchor, 1 for the importance, 8 / 256 for its blocks
        3.03
    """

    anchor: Narrow = None
    previous: Narrow | Literal["8bit"] = None
    current: Narrow | Literal["none"] = None
    host: bool = False
    staging: int = 1 << 28

    def __post_init__(self) -> None:
        """Refuse what is no dtype, and no form that is known."""
        forms = {"anchor": None, "previous": "8bit", "current": "none"}
        for name, form in forms.items():
            given = getattr(self, name)
            floating = isinstance(given, torch.dtype) and given.is_floating_point
            if not (given is None or floating or (form is not None and given == form)):
                also = f', or "{form}"' if form else ""
                raise MooringError(f"{name}={given!r} is not allowed: give a floating-point dtype{also}")
        check_whole("staging", self.staging, 1)

    @property
    def accumulates(self) -> bool:
        """Whether training adds to the importance of its task."""
        return self.current != "none"

    def check(self, importance: Importance, pull: Pull) -> None:
        """Refuse what an importance or a pull cannot do with this.

        Example:
            >>> from mooring import EWC, Interpolation
            >>> Memory(current="none").check(EWC(), Interpolation())
            Traceback (most recent call last):
            ...
            mooring.errors.MooringError: Interpolation weighs the importance on this task, which current="none" ...
        """
        if not self.accumulates and isinstance(pull, ParameterPull) and pull.reads_current:
            raise MooringError(
                f'{type(pull).__name__} weighs the importance on this task, which current="none" does not keep: use '
                "Proximal(...) or Budget(...), or leave current out"
            )
        narrow = isinstance(self.current, torch.dtype) and self.current.itemsize < 4
        if narrow and importance.averages:
            raise MooringError(
                f"{importance!r} is a mean over the task, to which {self.current} stops adding after some hundred "
                "iterations: leave current out, or give the importance a decay"
            )
        if self.previous == "8bit" and importance.by_layer:
            raise MooringError(f'{importance.name}() keeps factors and no scores: leave previous="8bit" out')
        if self.previous == "8bit" and importance.signed:
            raise MooringError(
                f'{importance!r} has negative scores, which previous="8bit" has no code for: give a dtype, or '
                'sign="rectified" or "absolute"'
            )

    def anchored(self, theta: Tensor) -> Tensor:
        """A new anchor at a parameter, or at the part of it that is on this rank."""
        dtype = self.anchor or theta.dtype
        if not self.host:
            return torch.empty_like(theta, dtype=dtype).copy_(theta)
        pinned = theta.device.type == "cuda"
        return torch.empty_like(theta, dtype=dtype, device="cpu", pin_memory=pinned).copy_(theta)

    def started(self, current: Tensor) -> Tensor:
        """The importance of a task that begins, as it is kept."""
        return current.to(self.current) if isinstance(self.current, torch.dtype) else current

    def kept(self, previous: Tensor, theta: Tensor) -> Tensor | QuantizedImportance:
        """The importance over past tasks, as it is kept; one number stays one."""
        if self.previous == "8bit":
            block = block_of(theta.shape) if previous.shape == theta.shape else None
            return (
                previous.to(compute_dtype_of(theta))
                if block is None
                else QuantizedImportance.of(previous.to(compute_dtype_of(theta)), block)
            )
        return previous.to(self.previous or compute_dtype_of(theta))


def compute_dtype_of(tensor: Tensor) -> torch.dtype:
    """float32, or the tensor's own dtype where wider.

    Example:
        >>> compute_dtype_of(torch.ones(1, dtype=torch.bfloat16))
        torch.float32
    """
    return torch.promote_types(tensor.dtype, torch.float32)
