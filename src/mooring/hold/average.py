"""An exponential average of the parameters over the last steps, which is nearer to a minimum than the last of them.

At a constant learning rate the parameters move about in a valley, and their average lies deeper in it: it has forgotten
less, and knows the new task better.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.distributed.dtensor import local_part, local_tensor, to_dtensor
from mooring.errors import MooringError
from mooring.reference.pass_cost import MEASURING_INTERVAL
from mooring.rules import State
from mooring.state.memory import compute_dtype_of

DECAY_OF_A_STEP = 0.98
"""The weight of what was before, for each step: the average is over about the last fifty."""

DECAY = DECAY_OF_A_STEP**MEASURING_INTERVAL
"""The same for one update, of which there is one in MEASURING_INTERVAL steps."""

FEWEST_UPDATES = 60
"""After so many updates, about 420 steps, a budget whose `average` is None takes the average.

The average is over a small part of the task then. Earlier each step still learns much, which the average gives up.
"""

PREFIX = "gauge.average."
"""How the keys of the averages begin in a state."""


@dataclass
class _Average:
    """The average of one parameter, of a sharded one of the part on this rank, and the number of its updates."""

    value: Tensor
    updates: int = 0


class ParameterAverage:
    """The averages of the parameters that are trained.

    An average has its parameter's dtype, or float32 if that is narrower: an update moves it by a part of the difference
    that half precision would round away.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> average = ParameterAverage()
        >>> average.update([p])
        >>> _ = p.data.fill_(11.0)
        >>> average.update([p])  # the first of two counts 2 / 11
        >>> [value for _, value in average.pairs([p])]
        [tensor([9., 9.])]
    """

    def __init__(self) -> None:
        self._averages: dict[Tensor, _Average] = {}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._averages)

    @torch.no_grad()
    def update(self, parameters: Collection[Tensor]) -> None:
        """average <- decay * average + (1 - decay) * parameter, without a wait for the device.

        A parameter that is new, or has another shape, dtype or device than before, starts at its value. What is known
        of parameters that are not among these is forgotten.

        Args:
            parameters: those that are trained.
        """
        averages: dict[Tensor, _Average] = {}
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}
        for p in parameters:
            theta, known = local_tensor(p).detach(), self._averages.get(p)
            if known is None or not _fits(known.value, theta):
                averages[p] = _Average(theta.to(compute_dtype_of(theta), copy=True))
                continue
            averages[p] = known
            known.updates += 1
            key = theta.device, theta.dtype, known.value.dtype, known.updates
            groups.setdefault(key, []).append((known.value, theta))
        self._averages = averages
        for (_, dtype, kept_dtype, updates), pairs in groups.items():
            weight = 1 - decay_of(updates)
            if dtype == kept_dtype:
                torch._foreach_lerp_([value for value, _ in pairs], [theta for _, theta in pairs], weight)
            else:  # one at a time, so that there are no copies of all in float32
                for value, theta in pairs:
                    value.lerp_(theta.to(kept_dtype), weight)

    def pairs(self, parameters: Collection[Tensor], fewest: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Return the part of each parameter on this rank, and its average, if one has so many updates.

        Args:
            parameters: those that are trained.
            fewest: the number of updates that the oldest of them needs.
        """
        known = [(local_tensor(p).detach(), self._averages[p]) for p in parameters if p in self._averages]
        if max((kept.updates for _, kept in known), default=0) < fewest:
            return []
        return [(theta, kept.value) for theta, kept in known if kept.updates and _fits(kept.value, theta)]

    def updates(self, names: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of updates of each parameter that has an average, by name."""
        return {name: self._averages[p].updates for name, p in names.items() if p in self._averages}

    def tensors(self, names: Mapping[str, Tensor]) -> State:
        """Return the averages by their keys in a saved state."""
        known = {name: p for name, p in names.items() if p in self._averages}
        return {PREFIX + name: to_dtensor(self._averages[p].value.contiguous(), p) for name, p in known.items()}

    def load(self, updates: Mapping[str, int], flat: State, names: Mapping[str, Tensor]) -> None:
        """Continue with saved averages; a parameter that has another shape by now starts again."""
        self._averages = {}
        for name, count in updates.items():
            if (saved := flat.get(PREFIX + name)) is None:
                raise MooringError(f"the state does not fit: {PREFIX + name!r} is missing")
            p = names.get(name)
            if p is not None and saved.shape == p.shape:
                theta = local_tensor(p).detach()
                value = torch.empty_like(theta, dtype=compute_dtype_of(theta)).copy_(local_part(saved.detach(), p))
                self._averages[p] = _Average(value, count)


def decay_of(updates: int, largest: float = DECAY) -> float:
    """Return the decay of an update: less at first, so that the beginning of a task is soon forgotten.

    Args:
        updates: the number of updates before.
        largest: the decay after many of them.

    Example:
        >>> [round(decay_of(updates), 2) for updates in (1, 8, 35, 1000)]
        [0.18, 0.5, 0.8, 0.87]
    """
    return min(largest, (1 + updates) / (10 + updates))


def _fits(value: Tensor, theta: Tensor) -> bool:
    same_place = value.shape == theta.shape and value.device == theta.device
    return same_place and value.dtype == compute_dtype_of(theta)
