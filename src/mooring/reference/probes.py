"""Probes: directions along which a calibration displaces the parameters, collected while importance is estimated."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.distributed.collectives import all_reduce_many
from mooring.state.mooring_state import MooringState

DIRECTIONS = 4
"""Number of probe directions, each used with its opposite."""

EXACT_BYTES, STORED_BYTES = 1 << 26, 1 << 30
"""Directions are in memory at once if they take at most the second; in bfloat16 if they take more than the first."""


def direction_dtype(parameters: Sequence[Tensor]) -> tuple[torch.dtype | None, bool]:
    """Return the dtype of directions, None for that of their parameter, and whether all are in memory at once.

    Example:
        >>> direction_dtype([torch.zeros(1 << 25)]), direction_dtype([torch.zeros((1 << 27) + 1, device="meta")])
        ((torch.bfloat16, True), (torch.bfloat16, False))
    """
    exact = DIRECTIONS * sum(p.numel() * p.element_size() for p in parameters)
    if exact <= EXACT_BYTES:
        return None, exact <= STORED_BYTES
    dtype = torch.bfloat16  # rounded, it is a direction no worse
    return dtype, DIRECTIONS * sum(p.numel() for p in parameters) * dtype.itemsize <= STORED_BYTES


def random_signs(seed: int, number: int) -> list[float]:
    """Return the sign that a batch has in each direction.

    Example:
        >>> {*random_signs(0, 3)} <= {-1.0, 1.0}
        True
    """
    generator = torch.Generator().manual_seed((seed << 20) + number)
    return (torch.randint(2, (DIRECTIONS,), generator=generator) * 2.0 - 1).tolist()


def add_gradients(
    totals: Sequence[Sequence[Tensor]], signs: Sequence[float], gradients: Sequence[Tensor | None]
) -> None:
    """Add the gradients of parameters to each total, with its sign.

    Example:
        >>> totals = [[torch.zeros(2)], [torch.zeros(2)]]
        >>> add_gradients(totals, [1.0, -1.0], [torch.ones(2)])
        >>> totals
        [[tensor([1., 1.])], [tensor([-1., -1.])]]
    """
    known = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not known:
        return
    added = [g.to(t.dtype) for t, g in zip(totals[0], gradients, strict=True) if g is not None]
    for total, sign in zip(totals, signs, strict=True):
        torch._foreach_add_([total[i] for i in known], added, alpha=sign)


class Probes:
    """Sums of the gradients of all batches of an estimate with random signs, and the losses of the first batches.

    With them a calibration needs no backward pass.

    Args:
        states: the states of the moored parameters, before the estimate.

    Attributes:
        losses: the losses of the first batches, in order.
    """

    def __init__(self, states: MooringState) -> None:
        self.states, self.losses = states, list[float]()
        self._parameters: list[Tensor] = []
        self._directions: list[list[Tensor]] = []

    def start(self) -> None:
        """Start the sums, unless they would take too much memory. Parameters have their shapes by now."""
        self._parameters = self.states.trained()
        dtype, stored = direction_dtype(self._parameters)
        if stored:
            self._directions = [[torch.zeros_like(p, dtype=dtype) for p in self._parameters] for _ in range(DIRECTIONS)]

    def add(self, number: int) -> None:
        """Add the gradients that the parameters have now, of the batch of this number."""
        if not self._parameters:
            self.start()
        if self._directions:
            gradients = [p.grad for p in self._parameters]
            add_gradients(self._directions, random_signs(self.states.tasks, number), gradients)

    def directions_of(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the directions of these parameters; none if they are not known."""
        index = {p: i for i, p in enumerate(self._parameters)}
        if not all(p in index for p in parameters):
            return []
        return [[direction[index[p]] for p in parameters] for direction in self._directions]

    def combine_ranks(self) -> None:
        """Add up the sums of all ranks, each of which has other batches; every rank must call this."""
        if not self._parameters:  # this rank had no batch
            self.start()
        for direction in self._directions:
            for total, whole in zip(direction, all_reduce_many(direction), strict=True):
                total.copy_(whole)
