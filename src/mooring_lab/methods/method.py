"""The definition of a method: an importance and a pull, or another use of data and gradients.

The importance and the pull are imported when a run needs them, so that methods are listed without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mooring
from mooring.errors import MooringError, unknown
from mooring_lab.model.scenarios import SCENARIOS, scenario_title

if TYPE_CHECKING:
    from mooring.rules import Budget, Importance, Pull
    from mooring.rules.merges import Merge
    from mooring.rules.pull import Number
    from mooring_lab.methods.projection import InputProjection, RadiusProjection


def decades(first: int, last: int) -> tuple[float, ...]:
    """Return powers of ten, both ends included.

    Example:
        >>> decades(-1, 1)
        (0.1, 1.0, 10.0)
    """
    return tuple(10.0**power for power in range(first, last + 1))


@dataclass(frozen=True)
class Method:
    """A continual-learning method.

    Attributes:
        name: the method's name.
        line: what the method does, in one line.
        importance: a function that makes the importance from a run's seed; None if nothing is moored.
        pull: a function that makes the pull from a strength, one number or one per run; the explicit step by default.
        strength: the default strength; None for a method without a strength.
        merge: how the importance of a finished task is merged with the previous importance: "average", "sum", "max"
            or a function.
        anchors: the parameters to hold on to: those at the end of the "last" task, or those at the "start".
        dial: the strengths that a sweep tries.
        frozen: when the backbone is frozen: "never", "always" or "after first".
        data: the source of batches: "task", "joint" (all tasks), "er" (the task and a memory), "a-gem" (the task,
            with a second gradient from a memory), "validation" (the task, with a memory on which a projection is
            learned), "reference" (the task, with a memory of which only the inputs are used: a `Budget` is measured
            on it and, with distil=True, distilled; without an importance it is distilled with the strength as the
            weight), or "der++" (the task and a memory with stored outputs, which are held with the strength as the
            weight).
        memory: the default number of samples in the memory; None for a method without a memory.
        recalls: the number of samples drawn from the memory in each step; None means the batch size.
        past_only: whether a task's samples enter the memory at its end, so that steps draw samples of past tasks only;
            always so with "a-gem".
        updates: how often each batch is trained in a row, every time with newly drawn samples.
        temperature: at which the outputs of old heads on the new task's inputs are distilled from the last task's
            model, with the strength as the weight; None if they are not.
        scenarios: the scenarios in which the method is defined; see `mooring_lab.model.scenarios`.
        projection: a function that makes a projection of gradients or of weights from a strength, one number or one per
            run; None if nothing is projected.

    Example:
        >>> from mooring.rules import Uniform
        >>> Method("l2", "pull everything back", importance=lambda seed: Uniform()).has_strength
        False
    """

    name: str
    line: str
    importance: Callable[[int], Importance] | None = None
    pull: Callable[[Number], Pull] = lambda strength: mooring.Interpolation()
    strength: float | None = None
    merge: Literal["average", "sum", "max"] | Merge = "average"
    anchors: Literal["last", "start"] = "last"
    dial: tuple[float, ...] = ()
    frozen: Literal["never", "always", "after first"] = "never"
    data: Literal["task", "joint", "er", "a-gem", "validation", "reference", "der++"] = "task"
    memory: int | None = None
    recalls: int | None = None
    past_only: bool = False
    updates: int = 1
    temperature: float | None = None
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    projection: Callable[[Number], InputProjection | RadiusProjection] | None = None

    def __post_init__(self) -> None:
        """Check that the importance and the pull are functions, and that a pull has an importance."""
        for name, argument in (("importance", "seed"), ("pull", "strength")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                class_name = type(value).__name__
                raise MooringError(
                    f"{name} of method {self.name!r} is one {class_name}, and every run needs its own: give a function "
                    f"that makes it, such as lambda {argument}: {class_name}(...)"
                )
        default = type(self).__dataclass_fields__["pull"].default
        if self.pull is not default:
            try:
                inspect.signature(self.pull).bind(self.strength)
            except TypeError as error:
                raise MooringError(
                    f"pull of method {self.name!r} must take one argument, the strength, used or not ({error}): "
                    "give a function such as lambda strength: Interpolation()"
                ) from error
        for scenario in self.scenarios:
            if scenario not in SCENARIOS:
                raise unknown(f"scenario of method {self.name!r}", scenario, SCENARIOS)
        holds_outputs = self.data in ("reference", "der++") or self.temperature is not None
        strength_only = (holds_outputs or self.projection is not None) and self.pull is default
        if self.importance is None and (self.pull is not default or self.strength is not None) and not strength_only:
            raise MooringError(
                f"method {self.name!r} has a pull or a strength and no importance, so it would pull nothing: give an "
                "importance, such as lambda seed: EWC(), or leave both out"
            )

    def check_scenario(self, scenario: str) -> None:
        """Raise an error if the method is not defined in a scenario.

        Example:
            >>> Method("gates", "a gate for each task", scenarios=("task",)).check_scenario("class")
            Traceback (most recent call last):
            ...
            mooring.errors.MooringError: gates is not defined in the class-incremental scenario: leave it out, or give \
scenario task
        """
        if scenario not in self.scenarios:
            raise MooringError(
                f"{self.name} is not defined in the {scenario_title(scenario)} scenario: leave it out, or give "
                f"scenario {' or '.join(self.scenarios)}"
            )

    @property
    def has_strength(self) -> bool:
        """Whether the method has a strength."""
        return self.strength is not None

    def check_strength(self, strength: float) -> None:
        """Refuse a strength outside the range of the pull or of the projection, which have other names for it."""
        try:
            self.pull(strength)
            if self.projection is not None:
                self.projection(strength)
        except MooringError as error:
            rule = str(error).partition(" is not allowed: ")[2] or str(error)
            raise MooringError(f"strength={strength!r} of {self.name} is not allowed: {rule}") from error

    @property
    def stores_after_tasks(self) -> bool:
        """Whether a task's samples enter the memory at its end, not while it is trained."""
        return self.past_only or self.data == "a-gem"

    @property
    def strength_acts_at_once(self) -> bool:
        """Whether the strength has an effect in the first task."""
        return self.anchors == "start" or self.data == "der++"

    @property
    def measures(self) -> bool:
        """Whether forgetting is measured on a memory."""
        return self.data == "reference" and self.importance is not None

    @property
    def distils(self) -> bool:
        """Whether the predictions on a memory are distilled."""
        return self.data == "reference" and (self.importance is None or bool(self._budget.distil))

    @property
    def _budget(self) -> Budget:
        pull = self.pull(self.strength or 0.0)
        if not isinstance(pull, mooring.Budget):
            raise MooringError(
                f"method {self.name!r} measures on a reference, and {type(pull).__name__} has no budget to keep: give "
                "a pull such as lambda nats: Budget(nats), or data='task'"
            )
        return pull

    @property
    def observes_outputs(self) -> bool:
        """Whether the method needs a second backward pass, from the outputs."""
        return self.importance is not None and self.importance(0).watches == "outputs"

    @property
    def observes_layers(self) -> bool:
        """Whether the method needs the inputs and gradients of layers."""
        return self.importance is not None and self.importance(0).by_layer

    @property
    def observation_limits(self) -> tuple[int, int]:
        """How often layers are observed, in steps, and the largest width of an observed layer."""
        assert self.importance is not None
        return self.importance(0).every, self.importance(0).largest

    @property
    def can_extrapolate(self) -> bool:
        """Whether a strong pull moves a parameter beyond its anchor."""
        pull = self.pull(self.strength or 0.0)
        gradient_pull = isinstance(pull, mooring.rules.GradientPull)
        return self.importance is not None and gradient_pull and not getattr(pull, "clamp", False)
