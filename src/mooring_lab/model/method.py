"""The declaration of a method: an importance and a pull, or a plugin, or both.

All of them are imported when a run needs them, so that methods are listed without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import mooring
from mooring.errors import MooringError, unknown
from mooring_lab.model.scenarios import SCENARIOS, scenario_title

if TYPE_CHECKING:
    from mooring.rules import Importance, Pull
    from mooring.rules.merges import Merge
    from mooring.rules.pull import Number


def decades(first: int, last: int) -> tuple[float, ...]:
    """Return powers of ten, both ends included.

    Example:
        >>> decades(-1, 1)
        (0.1, 1.0, 10.0)
    """
    return tuple(10.0**power for power in range(first, last + 1))


@dataclass(frozen=True)
class PluginOptions:
    """What a method declares of its plugin: where it is, and options, which subclasses add.

    Args:
        plugin: a subclass of `mooring_lab.fleet.learner_plugin.LearnerPlugin`, or "package.module:Class", which is
            imported when a fleet makes one.

    Attributes:
        uses_strength: whether the strength of a method without an importance is the plugin's.
        acts_at_once: whether the strength has an effect in the first task.
        all_tasks: whether every task trains on the data of all tasks.
        one_method: whether all runs of a fleet must have the same method.
        updates: how many steps in a row each batch is trained for.
        fresh_heads: whether the head of a new task is always a new one.
        scores_late: whether the plugin updates importances and pulls, after the optimizer's step of all runs.
    """

    plugin: str | type = "mooring_lab.fleet.learner_plugin:LearnerPlugin"
    uses_strength: ClassVar[bool] = True
    acts_at_once: ClassVar[bool] = False
    all_tasks: ClassVar[bool] = False
    one_method: ClassVar[bool] = False
    updates = 1
    fresh_heads = False
    scores_late: ClassVar[bool] = False

    def load(self) -> Any:
        """Return the plugin's class."""
        if not isinstance(self.plugin, str):
            return self.plugin
        module, _, name = self.plugin.partition(":")
        return getattr(import_module(module), name)

    def check_strength(self, strength: float) -> None:
        """Raise an error if a strength is not allowed."""


@dataclass(frozen=True)
class ReplayOptions(PluginOptions):
    """Options of plugins that replay samples of a memory.

    Args:
        recalls: the number of samples drawn from the memory in each step; None means the batch size.
        past_only: whether a task's samples enter the memory at its end, so that steps draw samples of past tasks only.
        updates: how many steps in a row each batch is trained for, every time with newly drawn samples.
        fresh_heads: whether the head of a new task is always a new one.
        restores_biases: whether a model is scored with its own biases; if not, convolutions have random ones then.
    """

    recalls: int | None = None
    past_only: bool = False
    updates: int = 1
    fresh_heads: bool = False
    restores_biases: bool = True
    uses_strength = False


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
        memory: the default number of samples in the memory; None for a method without a memory.
        scenarios: the scenarios in which the method is defined; see `mooring_lab.model.scenarios`.
        plugin: what else the method does around the steps of a run; None for nothing.
        first_decay: the weight decay of the first task, beside that of the run.
        penalized_scores: whether the importance reads the gradient with the penalty's, and not the task's alone.
        group: the group that lists the method; see `mooring_lab.methods.groups`.

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
    memory: int | None = None
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    plugin: PluginOptions | None = None
    first_decay: float = 0.0
    penalized_scores: bool = False
    group: Literal["controls", "published", "variants"] = "variants"

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
        strength_only = self.plugin is not None and self.plugin.uses_strength and self.pull is default
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

    def check_run(self, memory: int | None, scenario: str) -> None:
        """Raise an error if a run has no memory for a method that keeps samples, or an undefined scenario."""
        if self.memory and memory is None:
            raise MooringError(f"{self.name} keeps samples: say how many with memory")
        self.check_scenario(scenario)

    @property
    def has_strength(self) -> bool:
        """Whether the method has a strength."""
        return self.strength is not None

    def check_strength(self, strength: float) -> None:
        """Refuse a strength outside the range of the pull or of the plugin, which have other names for it."""
        try:
            self.pull(strength)
            if self.plugin is not None:
                self.plugin.check_strength(strength)
        except MooringError as error:
            rule = str(error).partition(" is not allowed: ")[2] or str(error)
            raise MooringError(f"strength={strength!r} of {self.name} is not allowed: {rule}") from error

    @property
    def strength_acts_at_once(self) -> bool:
        """Whether the strength has an effect in the first task."""
        return self.anchors == "start" or (self.plugin is not None and self.plugin.acts_at_once)

    @property
    def all_tasks(self) -> bool:
        """Whether every task trains on the data of all tasks."""
        return self.plugin is not None and self.plugin.all_tasks

    @property
    def updates(self) -> int:
        """How many steps in a row each batch is trained for."""
        return 1 if self.plugin is None else self.plugin.updates

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
