"""The end of a task: the average of the parameters, and the way back towards the anchor until the budget is kept.

At a constant learning rate the parameters move about in a valley, and their average over the last steps lies deeper in
it: it has forgotten less, and knows the new task better. What is then still above the budget is returned, by bisection
along a path that begins at the anchor or near it. Every run has its own place on the path.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.distributed.dtensor import local_part, local_tensor, to_dtensor
from mooring.errors import MooringError
from mooring.reference.pass_cost import MEASURING_INTERVAL
from mooring.rules import State
from mooring.rules.pull import per_run
from mooring.state.parameter_state import ParameterState, compute_dtype_of

BISECTIONS = 10
"""The number of bisections of the last return towards the anchor."""

STRONGEST_PULL = 1e-6
"""The part of the present estimate that the strongest pull at the end of a task leaves."""

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


Ends = list[tuple[ParameterState, Tensor]]
"""The parameters where training left them, on this rank."""

Path = Callable[[Tensor, Tensor], None]
"""Takes places from 0 to 1, of shape (runs,), and which runs to move there, bool of shape (runs,)."""


def return_path(
    path: Path, runs: Tensor, named: Tensor, measure: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Go to the farthest place of a path that keeps the budget.

    Args:
        path: moves the parameters.
        runs: which runs to move.
        named: the budget of each run.
        measure: returns what is measured now, (values, runs); the first row is limited.

    Returns:
        The runs that have such a place, what is measured there, and the place; of the others, at the beginning.
    """
    low, high = torch.zeros_like(named), torch.ones_like(named)
    path(low, runs)
    first = measure()
    runs = runs & (first[0] <= named)
    if not bool(runs.any()):
        return runs, first, low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        path(middle, runs)
        kept = measure()[0] <= named
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    path(low, runs)
    while bool((over := runs & ((values := measure())[0] > named)).any()):  # by rounding
        low = torch.where(over, torch.where(low > 1e-3, 0.98 * low, 0.0), low)
        path(low, runs)
    return runs, torch.where(runs, values, first), low


def strongest_first(t: Tensor, energy: Tensor, allowed: Tensor) -> Tensor:
    """Return the scale of the pull at a place of its path, from STRONGEST_PULL to 1 times what is spent.

    Example:
        >>> strongest_first(torch.tensor([0.0, 1.0]), torch.tensor([0.2, 0.2]), torch.tensor([0.1, 0.1]))
        tensor([2.0000e-06, 2.0000e+00])
    """
    return STRONGEST_PULL ** (1 - t) * energy / allowed


def between_anchor_and(end: Tensor, state: ParameterState, t: Tensor) -> Tensor:
    """Return the parameter at a place between its anchor, 0, and where training left it, 1."""
    anchor = state.device_anchor.to(state.compute_dtype)
    if not state.runs:
        return anchor.lerp(end.to(anchor.dtype), float(t)) if t else anchor
    share = torch.as_tensor(per_run(t.to(anchor), anchor))
    return torch.where(share == 0, anchor, anchor.lerp(end.to(anchor.dtype), share))


def move(parameters: Sequence[Tensor], places: Sequence[Tensor], runs: Tensor) -> None:
    """Set the parameters of these runs; a model without a run axis is one run.

    Example:
        >>> p = torch.zeros(2, 2)
        >>> move([p], [torch.ones(2, 2)], torch.tensor([True, False]))
        >>> p
        tensor([[1., 1.],
                [0., 0.]])
    """
    if bool(runs.all()):
        torch._foreach_copy_(list(parameters), list(places))
    elif bool(runs.any()):
        for p, place in zip(parameters, places, strict=True):
            p.copy_(torch.where(torch.as_tensor(per_run(runs.to(p.device), p)), place.to(p.dtype), p))


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

    def keep(self, parameters: Mapping[Tensor, Tensor], rows: Tensor) -> None:
        """Keep these rows of the averages, of parameters with a run axis that others replace."""
        known = [(new, self._averages[p]) for p, new in parameters.items() if p in self._averages]
        self._averages = {new: _Average(kept.value[rows.to(new.device)], kept.updates) for new, kept in known}

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
