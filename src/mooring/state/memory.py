"""Memory: the form and the place in which anchors and importances are kept."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mooring.errors import MooringError, check_whole
from mooring.rules import Importance, ParameterPull, Pull
from mooring.state.parameter_state import compute_dtype_of
from mooring.state.quantization import QuantizedImportance, block_size

StorageDtype = torch.dtype | None
"""A floating-point dtype; None is float32, or the parameter's own if wider."""


@dataclass(frozen=True)
class Memory:
    """How anchors and importances are stored; by default in full precision, on the parameter's device.

    docs/memory.md lists the bytes per parameter of each mode, and what each changes.

    Args:
        anchor: dtype of anchors. By default each parameter's own, which loses nothing. A narrower one rounds: a
            float32 weight with a bfloat16 anchor is pulled to a value up to 2^-8 of itself away.
        previous: dtype of the importance over past tasks, float32 or wider by default; or "8bit", one byte for each
            weight and two numbers for each block of up to 256 (`mooring.state.quantization` states the error bound).
        current: dtype of the importance on this task, float32 or wider by default; other tensors of an importance keep
            that default. "none" keeps nothing during training: importance then comes from data alone, as with
            `attach(reference=...)` or `consolidate(data=...)`. For pulls that do not read it.
        host: keep anchors in pinned host memory and copy them to the device ahead of their use.
        staging: bytes of the two device buffers that they pass through; a larger parameter gets a buffer of its size.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(256, 64, bias=False).to(torch.bfloat16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> lean = Memory(previous="8bit", current="none")
        >>> data = [torch.randn(8, 256, dtype=torch.bfloat16) for _ in range(4)]
        >>> moor = mooring.attach(model, optimizer, reference=data, memory=lean)
        >>> kept = sum(t.nbytes for name, t in moor.state_dict(gauge=False).items() if name != "mooring")
        >>> round(kept / model.weight.numel(), 2)  # 2 for the anchor, 1 for the importance, 8 / 256 for its blocks
        3.03
    """

    anchor: StorageDtype = None
    previous: StorageDtype | Literal["8bit"] = None
    current: StorageDtype | Literal["none"] = None
    host: bool = False
    staging: int = 1 << 28

    def __post_init__(self) -> None:
        """Refuse values outside their options."""
        forms = {"anchor": None, "previous": "8bit", "current": "none"}
        for name, form in forms.items():
            given = getattr(self, name)
            floating = isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize > 1
            if not (given is None or floating or (form is not None and given == form)):
                also = f', or "{form}"' if form else ""
                raise MooringError(
                    f"{name}={given!r} is not allowed: give a floating-point dtype of 16 bits or more{also}"
                )
            if given is torch.float16 and name != "anchor":
                raise MooringError(f"{name}={given} rounds small importances to 0: give {name}=torch.bfloat16")
        check_whole("staging", self.staging, 1)

    @property
    def accumulates(self) -> bool:
        """Whether training updates the importance of its task."""
        return self.current != "none"

    def check(self, importance: Importance, pull: Pull) -> None:
        """Refuse combinations that an importance or a pull does not support.

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
        decay: float | None = getattr(getattr(importance, "importance", importance), "decay", None)
        averaged = isinstance(self.current, torch.dtype) and not importance.needs_step
        if averaged and decay is not None and 1 - decay < torch.finfo(self.current).eps:  # type: ignore[arg-type]
            raise MooringError(
                f"decay={decay} adds {1 - decay:.2g} of each score to the average, which {self.current} rounds away: "
                "leave current out of Memory, or give a smaller decay"
            )
        if self.previous == "8bit" and importance.by_layer:
            raise MooringError(f'{importance.name}() keeps factors and no scores: leave previous="8bit" out')
        if self.previous == "8bit" and importance.signed:
            raise MooringError(
                f'{importance!r} has negative scores, which previous="8bit" cannot store: give a dtype, or '
                'sign="rectified" or "absolute"'
            )

    def new_anchor(self, theta: Tensor) -> Tensor:
        """Return a new anchor at a parameter, or at its part on this rank."""
        pinned, device = self.host and theta.device.type == "cuda", "cpu" if self.host else theta.device
        return torch.empty_like(theta, dtype=self.anchor or theta.dtype, device=device, pin_memory=pinned).copy_(theta)

    def store_current(self, current: Tensor) -> Tensor:
        """Return the importance of a new task in the form it is kept in."""
        return current.to(self.current) if isinstance(self.current, torch.dtype) else current

    def store_previous(self, previous: Tensor, theta: Tensor) -> Tensor | QuantizedImportance:
        """Return the importance over past tasks in the form it is kept in; a single number stays one."""
        if self.previous == "8bit":
            values, block = previous.to(compute_dtype_of(theta)), block_size(theta.shape)
            return (
                values
                if block is None or values.shape != theta.shape
                else QuantizedImportance.from_values(values, block)
            )
        return previous.to(self.previous or compute_dtype_of(theta))
