"""Tensors in the order of a kernel's table, with what the kernel must know of them, compared from step to step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorForm:
    """The dtypes, strides, sizes and devices of some tensors, in order; devices as numbers."""

    dtypes: list[torch.dtype]
    strides: list[tuple[int, ...]]
    sizes: list[int]
    devices: list[int]


class TensorList:
    """Tensors that are new objects in each step, mostly with the form and often with the addresses of the last one.

    A model may have thousands of parameters. So addresses and form are read once in a step, when they are needed. Both
    stay the same objects as long as they are equal, so that it is enough to compare identities.

    Attributes:
        tensors: the tensors.

    Example:
        >>> tensors = TensorList().replace([torch.zeros(2), torch.zeros(3)])
        >>> form = tensors.form
        >>> tensors.replace([torch.ones(2), torch.ones(3)]).form is form, tensors.replace([torch.ones(2)]).form is form
        (True, False)
    """

    def __init__(self) -> None:
        self.tensors: Sequence[Tensor] = ()
        self._addresses: list[int] = []
        self._form: TensorForm | None = None
        self._is_read = False
        self._last_read: Sequence[Tensor] | None = None

    def replace(self, tensors: Sequence[Tensor]) -> "TensorList":
        """Set the tensors of this step; the same sequence as before means the same objects, perhaps moved."""
        self.tensors, self._is_read = tensors, False
        return self

    def release(self) -> None:
        """Drop the references to the tensors."""
        self.tensors, self._last_read = (), None

    @property
    def addresses(self) -> list[int]:
        """The addresses of the first elements."""
        self._read()
        return self._addresses

    @property
    def form(self) -> TensorForm:
        """The form of the tensors."""
        self._read()
        assert self._form is not None
        return self._form

    def _read(self) -> None:
        if self._is_read:
            return
        tensors, known, same_objects = self.tensors, self._form, self.tensors is self._last_read
        self._is_read, self._last_read = True, tensors
        addresses = list(map(Tensor.data_ptr, tensors))
        if moved := addresses != self._addresses:
            self._addresses = addresses
        if known is not None and same_objects and not moved:
            return
        dtypes, strides = [t.dtype for t in tensors], list(map(Tensor.stride, tensors))
        sizes = list(map(Tensor.numel, tensors))
        # no two devices have the same address
        devices = known.devices if known is not None and not moved else list(map(Tensor.get_device, tensors))
        form = TensorForm(dtypes, strides, sizes, devices)
        if known is None or vars(form) != vars(known):
            self._form = form


class TensorLists(dict[str, TensorList]):
    """Lists by name, kept from step to step.

    Example:
        >>> lists, tensors = TensorLists(), [torch.zeros(2)]
        >>> lists.find("gradients", tensors) is lists.find("checked", tensors)
        True
    """

    def find(self, name: str, tensors: Sequence[Tensor]) -> TensorList:
        """Return a list of these tensors: that of the name, or another one that has read them already."""
        for known in self.values():
            if known.tensors is tensors:
                return known
        return self.setdefault(name, TensorList()).replace(tensors)

    def release(self, kept: Collection[Sequence[object]]) -> None:
        """Drop the references to tensors but those in sequences that are kept."""
        for known in self.values():
            if not any(known.tensors is tensors for tensors in kept):
                known.release()
