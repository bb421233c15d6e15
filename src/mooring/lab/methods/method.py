"""What a method is: an importance and a pull of the core, or what it does with data and gradients instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mooring.errors import MooringError
from mooring.importance import Importance
from mooring.pulls import GradientPull, Interpolation, Pull
from mooring.pulls.merges import Merge, average
from mooring.pulls.run_axis import Number

__all__ = ["Method", "decades"]


def decades(first: int, last: int) -> tuple[float, ...]:
    """Powers of ten, both ends included.

    Example:
        >>> decades(-1, 1)
        (0.1, 1.0, 10.0)
    """
    return tuple(10.0**power for power in range(first, last + 1))


@dataclass(frozen=True)
class Method:
    """A way to go through a stream, by name.

    Attributes:
        name: what it is called.
        line: what it does, in one line.
        importance: makes the importance from a run's seed; None where nothing is moored.
        pull: makes the pull from a strength, one number or one per run; by default the explicit step.
        strength: the strength where none is given; None where there is none to give.
        merge: how the importance of a finished task joins the past.
        anchors: what it holds on to: where it was at the end of the "last" task, or at the "start".
        dial: the strengths that a sweep goes through.
        frozen: when the backbone stands still: "never", "always" or "after first".
        data: what a batch is drawn from: "task", "joint" (all tasks), "er" (the task and a memory), or "a-gem" (the
            task, with a gradient from a memory beside it).
        memory: how many samples are kept where none is given; None where none are.
        recalls: how many of them are drawn in each step; None for as many as a batch has.

    Example:
        >>> from mooring.importance import Uniform
        >>> Method("l2", "pull everything back", importance=lambda seed: Uniform()).has_strength
        False
    """

    name: str
    line: str
    importance: Callable[[int], Importance] | None = None
    pull: Callable[[Number], Pull] = lambda strength: Interpolation()
    strength: float | None = None
    merge: Merge = average
    anchors: Literal["last", "start"] = "last"
    dial: tuple[float, ...] = ()
    frozen: Literal["never", "always", "after first"] = "never"
    data: Literal["task", "joint", "er", "a-gem"] = "task"
    memory: int | None = None
    recalls: int | None = None

    def __post_init__(self) -> None:
        """Refuse a method that would do something else than its name says."""
        for name, kind, given in (("importance", Importance, "seed"), ("pull", Pull, "strength")):
            made = getattr(self, name)
            if isinstance(made, kind):
                what = type(made).__name__
                raise MooringError(
                    f"{name} of method {self.name!r} is one {what}, and every run needs its own: give a function that "
                    f"makes it, such as lambda {given}: {what}(...)"
                )
        usual = type(self).__dataclass_fields__["pull"].default
        if self.pull is not usual:
            try:
                self.pull(self.strength or 0.0)
            except TypeError as error:
                raise MooringError(
                    f"pull of method {self.name!r} is called with the strength, also where there is none ({error}): "
                    "give a function of it, such as lambda strength: Interpolation()"
                ) from error
        if self.importance is None and (self.pull is not usual or self.strength is not None):
            raise MooringError(
                f"method {self.name!r} has a pull or a strength and no importance, so it would pull nothing: give an "
                "importance, such as lambda seed: EWC(), or leave both out"
            )

    @property
    def has_strength(self) -> bool:
        """Whether it has a strength to give."""
        return self.strength is not None

    @property
    def observes_outputs(self) -> bool:
        """Whether it needs a second backward pass, from the outputs."""
        return self.importance is not None and self.importance(0).watches == "outputs"

    @property
    def observes_layers(self) -> bool:
        """Whether it needs to see what goes through layers."""
        return self.importance is not None and self.importance(0).by_layer

    @property
    def observation_limits(self) -> tuple[int, int]:
        """In each how many-th step of a task it looks at layers, and at how large ones, where it does."""
        assert self.importance is not None
        return self.importance(0).every, self.importance(0).largest

    @property
    def can_extrapolate(self) -> bool:
        """Whether its pull leaves the interval between parameter and anchor when it is too strong."""
        pull = self.pull(self.strength or 0.0)
        return self.importance is not None and isinstance(pull, GradientPull) and not getattr(pull, "clamp", False)
