"""What the optimizers of a fleet share: the numbers of each run, its learning rate, and tensors of each parameter."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mooring.diagnose.stability import divergence_limit
from mooring_lab.fleet.stack.stack import to_stack_layout
from mooring_lab.model.known_methods import find_method
from mooring_lab.model.spec import RunSpec, rate_factor

Tensors = dict[str, Tensor]
Own = TypeVar("Own", bound="FleetOptimizer")


def decays_in_task(specs: Sequence[RunSpec], task: int) -> list[float]:
    """Return the weight decay of each run in a task.

    Example:
        >>> decays_in_task([RunSpec("digits", "0", "ewc-decays-first", 0)], 0)
        [0.0001]
    """
    return [s.weight_decay + (find_method(s.method).first_decay if task == 0 else 0.0) for s in specs]


class FleetOptimizer(ABC):
    """An optimizer of every run of a fleet, each with its own learning rate, momentum and weight decay.

    Args:
        lr: of shape (runs,).
        momentum: of all runs, or of shape (runs,).
        weight_decay: the same.
        dtype: of the learning rates in use; by default that of `lr`.

    Attributes:
        lr: the present learning rates, in memory that recorded steps and kernels read.
        base: the learning rates that schedules multiply, float64.
        state: the tensors of each parameter, by slot and name, with a leading run axis; a task starts without any.
    """

    slots: ClassVar[tuple[str, ...]]
    """What is kept for each parameter."""

    def __init__(
        self,
        lr: Tensor,
        momentum: float | Tensor = 0.0,
        weight_decay: float | Tensor = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.lr, self.base = lr.to(dtype or lr.dtype, copy=True), lr.double()
        self.momentum, self.weight_decay = momentum, weight_decay
        self.sizes: dict[int, Tensor] = {}
        self.start_task()

    @classmethod
    def of(cls: type[Own], specs: Sequence[RunSpec], like: Tensor) -> Own:
        """Return the optimizer of these runs, with the dtype and device of a tensor."""
        columns = ([spec.momentum for spec in specs], decays_in_task(specs, 0), decays_in_task(specs, 1))
        constant = [len({*values}) == 1 for values in columns]
        constant[1] = constant[1] and columns[1] == columns[2]  # the decay of the first task may be another
        momentum, decay, _ = (
            values[0] if same else like.new_tensor(values) for values, same in zip(columns, constant, strict=True)
        )
        lr = torch.tensor([spec.lr for spec in specs], dtype=torch.float64, device=like.device)
        return cls(lr, momentum, decay, like.dtype)

    def set_decay(self, specs: Sequence[RunSpec], task: int) -> None:
        """Set the weight decay of a task in place, where it depends on the task."""
        if isinstance(self.weight_decay, Tensor):
            self.weight_decay.copy_(self.weight_decay.new_tensor(decays_in_task(specs, task)))

    # The learning rate

    def start_task(self) -> None:
        """Start a task with nothing kept for any parameter, and without a plan of learning rates."""
        self.state: dict[str, Tensors] = {slot: {} for slot in self.slots}
        self.factors: Tensor | None = None

    def plan_rates(self, specs: Sequence[RunSpec], steps: int) -> None:
        """Compute the factors on the learning rates in all steps of a task, once; none if all rates are constant."""
        schedules = [*dict.fromkeys(spec.schedule for spec in specs)]
        if self.factors is not None or schedules == ["constant"]:
            return
        epochs, numbers = specs[0].epochs, range(steps)
        rows = [[rate_factor(schedule, step, steps, epochs) for step in numbers] for schedule in schedules]
        self.factors = self.base.new_tensor(rows)
        self.rows = torch.tensor([schedules.index(spec.schedule) for spec in specs], device=self.lr.device)

    def set_step(self, step: Tensor) -> None:
        """Set the learning rates of a step in place.

        Args:
            step: the number of the step within the task, int64 of shape (1,).
        """
        if self.factors is not None:
            self.lr.copy_(self.base * self.factors.index_select(1, step)[self.rows, 0])

    # The step

    @abstractmethod
    def step(self, parameters: Tensors, gradients: Tensors) -> None:
        """Move every parameter that has a gradient, in place."""

    @abstractmethod
    def update(self, tensors: Tensors, g: Tensor) -> None:
        """Take the step of one parameter as an elementwise rule, for kernels.

        Args:
            tensors: theta and `elements`, changed in place; the numbers of `per_run_numbers` and `count_step`.
            g: the gradient.
        """

    @abstractmethod
    def allocate(self, name: str, theta: Tensor) -> None:
        """Add what is kept for a parameter in its first step of a task, if it is not there."""

    def elements(self, name: str) -> Tensors:
        """Return what is kept for each element of a parameter, by slot."""
        return {slot: tensors[name] for slot, tensors in self.state.items()}

    def count_step(self, names: Collection[str], rows: slice, *, dry: bool = False) -> dict[str, Tensors]:
        """Count a step of these parameters in some runs, unless `dry`; return the numbers that their rule needs."""
        return {}

    def per_run_numbers(self, rows: slice) -> Tensors:
        """Return the numbers that differ between runs, of some runs, by name."""
        numbers = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        return {name: value[rows] for name, value in numbers.items() if isinstance(value, Tensor)}

    @property
    def constants(self) -> Hashable:
        """All that the rule depends on beside its tensors."""
        numbers = (self.momentum, self.weight_decay)
        return (type(self).__name__, *(None if isinstance(number, Tensor) else number for number in numbers))

    @property
    def decays(self) -> bool:
        """Whether any run's weights decay."""
        return isinstance(self.weight_decay, Tensor) or self.weight_decay != 0

    def size(self, samples: int) -> Tensor:
        """Return a batch size on the device, so that batches of different sizes share their kernels."""
        if samples not in self.sizes:
            self.sizes[samples] = self.lr.new_tensor(samples)
        return self.sizes[samples]

    # What a penalty does under it

    @abstractmethod
    def in_torch(self, momentum: float) -> torch.optim.Optimizer:
        """Return torch's optimizer of this kind, with a momentum."""

    def divergence_limits(self) -> Tensor:
        """Return the p from which a penalty alone makes each run diverge, of shape (runs,)."""
        momenta = torch.as_tensor(self.momentum).expand(len(self.lr)).tolist()
        same = [self.in_torch(momentum) for momentum in momenta]
        return self.lr.new_tensor([divergence_limit(optimizer, optimizer.param_groups[0]) for optimizer in same])

    def rescaling(self, name: str) -> Tensor | None:
        """Return the present factor on the learning rate of each weight of a parameter, (runs, ...); None for 1."""
        return None

    # Which runs are in the fleet

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows, in this order."""
        self.lr, self.base = self.lr[rows], self.base[rows]
        self.momentum, self.weight_decay = (
            value[rows] if isinstance(value, Tensor) else value for value in (self.momentum, self.weight_decay)
        )
        self.state = {
            slot: {name: to_stack_layout(tensor[rows]) for name, tensor in tensors.items()}
            for slot, tensors in self.state.items()
        }
        if self.factors is not None:
            self.rows = self.rows[rows]
