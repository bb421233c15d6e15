"""Gradients with a penalty, which take the place of the task's own until a step is over, and their memory."""

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from mooring.backends.kernels.tensor_list import TensorForm
from mooring.distributed.dtensor import local_tensors

SMALL = 1 << 14
"""Weights of a parameter whose penalized gradient is kept between steps."""


class PenalizedGradients:
    """Gradients with a penalty, in the place of the task's until the step is over.

    They are in lists, because an object for each of thousands of parameters makes Python's collector run in each step.

    Args:
        parameters: the parameters.
        task_gradients: the gradients of the task's loss, to be restored.
        penalized: the gradients that the optimizer gets.
    """

    def __init__(self, parameters: list[Tensor], task_gradients: list[Tensor], penalized: list[Tensor]) -> None:
        self.parameters, self.task_gradients, self.penalized = parameters, task_gradients, penalized
        self._versions = [gradient._version for gradient in penalized]

    def set(self) -> None:
        """Give each parameter its penalized gradient."""
        for p, gradient in zip(self.parameters, self.penalized, strict=True):
            p.grad = gradient

    def restore(self, *, finished: bool) -> None:
        """Restore the task's gradients, except of parameters that were given another one since.

        Args:
            finished: whether the optimizer has taken its step; before that a gradient that was written to is kept.
        """
        lists = self.parameters, self.task_gradients, self.penalized, self._versions
        for p, task_gradient, penalized, version in zip(*lists, strict=True):
            if p.grad is penalized and (finished or penalized._version == version):
                p.grad = task_gradient


class SmallGradients:
    """Memory of the penalized gradients of small parameters, kept from step to step.

    To allocate one takes the host as long as the rest of the step of a small parameter.

    Attributes:
        tensors: the memory; None for parameters that are not small.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self._parameters: list[Tensor] = []
        self._form: TensorForm | None = None
        self._addresses: list[int] = []

    def allocate(self, parameters: list[Tensor], form: TensorForm, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return a tensor for the penalized gradient of each parameter.

        What is kept is allocated again if an optimizer has given it other memory: kernels know its addresses.

        Args:
            parameters: the parameters; for others it is allocated again, too.
            form: their form, likewise.
            gradients: their gradients now; after a step that failed these may be what is kept.
        """
        kept = [t for t in self.tensors if t is not None]
        known = parameters is self._parameters and form is self._form and _addresses(kept) == self._addresses
        if not known or any(map(is_, self.tensors, gradients)):
            self.tensors = [None if p.numel() > SMALL else torch.empty_like(p) for p in parameters]
            kept = [t for t in self.tensors if t is not None]
            self._parameters, self._form, self._addresses = parameters, form, _addresses(kept)
        if len(kept) == len(parameters):
            return self.tensors  # type: ignore[return-value]
        return [torch.empty_like(p) if t is None else t for p, t in zip(parameters, self.tensors, strict=True)]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of the parts on this rank."""
    return list(map(Tensor.data_ptr, local_tensors(tensors)))
